"""What crosses ep for a layer of experts: rows, experts or copies; set once, or decided in each step.

    table [n, E]   rows that each rank of ep has for each expert, alike on all ranks
    hook           (x [N, D], its routing, experts) -> [N, D], as moe/dispatch.AllToAll; each wraps another:

    partial(shadow, hook=partial(pull, hook=AllToAll(group), ..), ..)

AllToAll   rows go to their experts (dispatch.py); TwoLevels over nodes, by_capacity in chunks
pull       experts go to their rows (move_experts.py), where that pays: by the table, if it sends fewer bytes
shadow     experts that a rule picks from the table are copied to every rank for the step, the busiest first;
           their rows stay, the gradients of the copies are added up at the owner; other rows go on

The table sends 8·E·(n-1) bytes per rank over ep, and 16·E·(t-1)/t over each group `shared_by` (tp) whose t
ranks share out the rows of a rank of ep; a shadow what balance.shadows sends. Sources: move_experts.py,
balance.py. Differs: the rule counts bytes, not seconds, and those of rows and matrices only; in training it
reckons with a backward in which nothing is frozen.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from minitrain.moe.dispatch import Dispatch
from minitrain.moe.experts import grouped
from minitrain.moe.router import Routing
from minitrain.ranks import collectives
from minitrain.systems.moe.balance import shadows
from minitrain.systems.moe.move_experts import pull_is_cheaper, pulled

Table = list[list[int]]
Hook = Callable[[Tensor, Routing, nn.Module], Tensor]


def pull(x: Tensor, routing: Routing, experts: nn.Module, *, hook: Hook, across, inside, pays=None) -> Tensor:
    """Where `pays(routing, training)`, alike on all ranks, experts travel to the rows; else rows by the other
    `hook`. None: always."""
    if pays is None or pays(routing, experts.training):
        return at_home(x, routing, experts, partial(pulled, across=across, inside=inside))
    return hook(x, routing, experts)


def shadow(x, routing: Routing, experts: nn.Module, *, hook: Hook, group, table, rule, most: int) -> Tensor:
    """Of the experts that `rule(table(routing))` picks the `most` busiest are copied to their rows; other
    rows by the other `hook`."""
    rows_of = table(routing)
    chosen = busiest(rows_of, rule(rows_of), most)
    if not chosen:
        return hook(x, routing, experts)

    def work(rows, counts, up, down, act, gate=None, *, sizes=None) -> Tensor:
        matrices = [matrix for matrix in (up, down, gate) if matrix is not None]
        up, down, *gate = shadows(matrices, chosen, group)
        sizes = sizes and [sizes[e] for e in chosen]
        counts = counts[torch.tensor(chosen, device=counts.device)]
        return grouped(rows, counts, up, down, act, *gate, sizes=sizes)

    others = [e for e in range(routing.probs.shape[1]) if e not in chosen]
    y = at_home(x, routing.only(chosen), experts, work)
    return y + hook(x, routing.only(others), experts)


def at_home(x: Tensor, routing: Routing, experts: nn.Module, work: Callable) -> Tensor:
    """x [N, D] -> [N, D]: no row travels, `work` has the experts come."""
    home = Dispatch(routing)
    y = experts(home.there(x), home.counts, home.sizes, work)
    return home.back(y, routing.weights)


def table_of(routing: Routing, group: ProcessGroup, shared_by: Sequence[ProcessGroup] = ()) -> Table:
    """table[r][e]: rows for expert e of rank r of the group, with the ranks that share out its rows."""
    counts = routing.counts
    for ranks in shared_by:
        counts = collectives.all_reduce(counts, ranks)
    table = collectives.all_gather(counts[None], group, 0)
    if routing.sizes is None:
        return table.tolist()
    return [[size * math.prod(ranks.size() for ranks in shared_by) for size in routing.sizes]] * group.size()


def experts_are_cheaper(table: Table, width: int, *, gated: bool, backward: bool) -> bool:
    """Do the experts that are wanted elsewhere take fewer bytes than the rows that are?"""
    here = len(table[0]) // len(table)
    away = [rows for rank, counts in enumerate(table) for e, rows in enumerate(counts) if e // here != rank]
    wanted = sum(rows > 0 for rows in away)
    return pull_is_cheaper(sum(away), wanted, width, gated=gated, backward=backward)


def busiest(table: Table, experts: Sequence[int], most: int) -> list[int]:
    """Of these at most so many, those with the most rows; of equal ones the first."""
    loads = [sum(rows) for rows in zip(*table)]
    return sorted(sorted(experts, key=lambda e: (-loads[e], e))[:most])
