"""What crosses ep for a layer of experts: set once, or decided by each layer anew in each step.

    table [n, E]   rows that each rank of ep has for each expert, alike on all ranks

tokens     rows go to their experts (dispatch.py), in chunks (overlap.py), over nodes (two_level.py)
experts    experts go to their rows (move_experts.py)
cheaper    by the table, those of the two that send fewer bytes, all ranks together
shadows    experts that a rule picks from the table are copied to every rank for the step, the busiest first;
           their rows stay, the gradients of the copies are added up at the owner; other rows travel

Who owns an expert never changes, so to decide otherwise moves nothing. Backward goes the way of its forward.
Sends for the table 8·E·(n-1) bytes per rank over ep, and 16·E·(t-1)/t over each group `beside` (tp) whose t
ranks share out the rows of a rank of ep; for the rest what the way sends that was chosen. A shadow of W
elements sends W from the owner and (n-2)/(n-1) W from the others, in backward W from each of the others, and
takes W on every rank until then.
Liu et al. 2023 (Janus), SIGCOMM, and Hwang et al. 2023 (Tutel), arXiv:2206.03382, section 3, for the choice;
He et al. 2022 (FasterMoE), PPoPP, section 4, for shadows. Differs: the rule counts bytes, not seconds, and
those of rows and matrices only; in training it reckons with a backward in which nothing is frozen.
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
from minitrain.ranks.checks import require_ints, require_nonempty
from minitrain.systems.moe.balance import shadows
from minitrain.systems.moe.move_experts import pull_is_cheaper, pulled
from minitrain.systems.moe.overlapped_experts import by_capacity
from minitrain.systems.moe.two_level import TwoLevelDispatch

Table = list[list[int]]
Rule = Callable[..., Sequence[int]]  # (table, D, F, matrices) -> experts: plan/expert_placement.shadowed


def choose_way(
    mixture, group, across, inside, beside=(), *, what="tokens", chunks=1, most=0, rule: Rule, meanwhile=None
) -> None:
    """For a layer whose experts are spread over `group`, in nodes of `inside`, and not cut yet. `most` of the
    experts that `rule` picks get shadows; `meanwhile` as in dispatch.py."""
    _, d_model, width = mixture.experts.up.shape
    gated, table = mixture.experts.gate is not None, partial(table_of, group=group, beside=beside)

    def experts_pay(routing: Routing) -> bool:
        return experts_are_cheaper(table(routing), width, gated=gated, backward=mixture.training)

    def busy(routing: Routing) -> list[int]:
        rows = table(routing)
        return busiest(rows, rule(rows, d_model, width, 2 + gated), most)

    if inside.size() > 1:
        mixture.dispatch = partial(TwoLevelDispatch, across=across, inside=inside, meanwhile=meanwhile)
    if chunks > 1:
        in_chunks(mixture, group, chunks)
    if what != "tokens":
        pull(mixture, across, inside, experts_pay if what == "cheaper" else lambda routing: True)
    if most:
        shadow(mixture, group, busy)


# ---- ways of a layer -------------------------------------------------------------------------------------


def in_chunks(mixture: nn.Module, group: ProcessGroup, chunks: int) -> None:
    """Rows travel in chunks, while experts work on those before."""

    def work(rows: Tensor, counts: Tensor, sizes: list[int] | None = None) -> Tensor:
        return mixture.experts(rows, counts, sizes)

    mixture.through = partial(by_capacity, group=group, work=work, chunks=chunks)


def pull(mixture, across: ProcessGroup, inside: ProcessGroup, pays: Callable[[Routing], bool]) -> None:
    """Where it pays, alike on all ranks, experts travel to the rows; else rows as before."""
    rows_travel = mixture.through

    def way(rows, counts, up, down, act, gate=None, sizes=None) -> Tensor:
        return pulled(rows, counts, up, down, across, inside, act, gate, sizes=sizes)

    def through(x: Tensor, routing: Routing) -> Tensor:
        return at_home(mixture, x, routing, way) if pays(routing) else rows_travel(x, routing)

    mixture.through = through


def shadow(mixture: nn.Module, group: ProcessGroup, busy: Callable[[Routing], list[int]]) -> None:
    """The experts that are `busy`, alike on all ranks, are copied to their rows; other rows as before."""
    rows_travel = mixture.through

    def through(x: Tensor, routing: Routing) -> Tensor:
        chosen = busy(routing)
        if not chosen:
            return rows_travel(x, routing)

        def way(rows, counts, up, down, act, gate=None, sizes=None) -> Tensor:
            own = [matrix for matrix in (up, down, gate) if matrix is not None]
            up, down, *gate = shadows(own, chosen, group)
            sizes = sizes and [sizes[e] for e in chosen]
            counts = counts[torch.tensor(chosen, device=counts.device)]
            return grouped(rows, counts, up, down, act, *gate, sizes=sizes)

        others = [e for e in range(mixture.num_experts) if e not in chosen]
        y = at_home(mixture, x, routing.only(chosen), way)
        return y + rows_travel(x, routing.only(others))

    mixture.through = through


def at_home(mixture: nn.Module, x: Tensor, routing: Routing, way: Callable) -> Tensor:
    """x [N, D] -> [N, D]: no row travels, `way` has the experts come."""
    home = Dispatch(routing)
    y = mixture.experts(home.there(x), home.counts, home.sizes, way)
    return home.back(y, routing.weights)


# ---- what all ranks know ---------------------------------------------------------------------------------


def table_of(routing: Routing, group: ProcessGroup, beside: Sequence[ProcessGroup]) -> Table:
    """table[r][e]: the rows that rank r of the group has for expert e, with those of the ranks beside it."""
    counts = routing.counts
    for ranks in beside:
        counts = collectives.all_reduce(counts, ranks)
    table = collectives.all_gather(counts[None], group, 0)
    if routing.sizes is None:
        return table.tolist()
    return [[size * math.prod(ranks.size() for ranks in beside) for size in routing.sizes]] * group.size()


def experts_are_cheaper(table: Table, width: int, *, gated: bool, backward: bool) -> bool:
    """Do the experts that are wanted elsewhere take fewer bytes than the rows that are?"""
    require_nonempty(table=table)
    here = len(table[0]) // len(table)
    away = [rows for rank, own in enumerate(table) for e, rows in enumerate(own) if e // here != rank]
    wanted = sum(rows > 0 for rows in away)
    return pull_is_cheaper(sum(away), wanted, width, gated=gated, backward=backward)


def busiest(table: Table, experts: Sequence[int], most: int) -> list[int]:
    """Of these at most so many, those with the most rows; of equal ones the first."""
    require_nonempty(table=table)
    if experts:
        require_ints(0, len(table[0]) - 1, experts=experts)
    loads = [sum(rows) for rows in zip(*table)]
    return sorted(sorted(experts, key=lambda e: (-loads[e], e))[:most])
