"""Tokens stay, experts travel: a rank pulls the experts its tokens visit, and sends their gradients home.

rows [R, D] of this rank's tokens, sorted by expert, counts [E] of all experts, as Dispatch without group
up, gate [E/n, D, F], down [E/n, F, D] of this rank's experts               -> [R, D]

N nodes of g ranks: rank r of all is place r % g of node r // g; expert e is on rank e // (E/n). In round
(s, j) every rank gets, over `across`, expert j of its place in the node s further, if anyone in its node
wants it; then over `inside` all that want one get it, place after place. So an expert enters a node once. On
2 nodes of 2 ranks with an expert each, rank 0 sees expert 0 (its own), 1 (inside), 2 (across), 3 (across to
rank 1, then inside). Without nodes `inside` is a group of one. Gradients go back so, summed in the node.

An expert is M = 2·D·F elements, 3·D·F with a gate. Over each group a rank sends M for each expert it is asked
for, forward and again in backward, M for each gradient that it passes on, and a byte for each expert of
another rank there (who wants it). The next expert arrives while the present one computes: two of others' are
there at a time, three from g = 3 on; in backward five, up to eight where nodes share. Saved: rows and the
layer before act. Liu et al. 2023 (Janus), SIGCOMM, doi 10.1145/3603269.3604869. Differs: rounds in a fixed
order, without priorities; no cache in host memory between forward and backward.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from minitrain.moe.dispatch import Dispatch
from minitrain.moe.experts import grouped, of, slices, turn, turn_backward
from minitrain.moe.router import Routing
from minitrain.ranks import collectives
from minitrain.ranks.autograd import custom_vjp
from minitrain.systems.moe.balance import shadows

Table = list[list[int]]
Hook = Callable[[Tensor, Routing, nn.Module], Tensor]


def pulled(rows, counts, up, down, act=F.gelu, gate=None, *, across, inside, sizes=None) -> Tensor:
    """What `experts.grouped` gives with the experts of all ranks. `sizes`: the counts in a dry run."""
    n = across.size() * inside.size()
    if {len(counts), len(counts if sizes is None else sizes)} != {n * len(up)}:
        raise ValueError(f"counts of {len(counts)} experts; give all, {len(up)} on each of {n} ranks")
    wants, sizes = Wants(counts, across, inside, sizes), counts.tolist() if sizes is None else sizes
    forward, backward = (partial(way, act, wants, sizes) for way in (pulled_forward, pulled_backward))
    return custom_vjp(forward, backward, rows, down, up, *(() if gate is None else (gate,)))


def pulled_forward(act: Callable, wants: "Wants", sizes: list[int], rows: Tensor, *matrices: Tensor) -> tuple:
    """Each expert works as it arrives. -> y, and what backward reads."""
    where, made = slices(sizes), [rows.new_empty(len(rows), up.shape[2]) for up in matrices[1:]]
    y = torch.empty_like(rows)
    for _, e, present in arrivals(matrices, sizes, wants):
        if sizes[e]:
            y[where[e]] = turn(rows[where[e]], None, present[1:], present[0], of(where[e], made), act)
        del present  # lest it stay when the one after the next sets out
    return y, (rows, *matrices, *made)


def pulled_backward(act: Callable, wants: "Wants", sizes: list[int], dys, saved, wanted: Sequence) -> tuple:
    """Experts arrive once more; the gradients of each go home while the next one works."""
    (dy,), (rows, *rest), (wants_rows, *wanted), where = dys, saved, wanted, slices(sizes)
    matrices, made = rest[: len(wanted)], rest[len(wanted) :]
    sums = [torch.zeros_like(matrix) for matrix, want in zip(matrices, wanted) if want]
    drows, home = torch.empty_like(rows) if wants_rows else None, Homeward(sums, wants)
    for place, e, present in arrivals(matrices, sizes, wants):
        grads, here = None, where[e]
        if sizes[e]:
            rooms = [torch.empty_like(x) if want else None for x, want in zip(present, wanted)]
            given = rows[here], None, present[1:], present[0], of(here, made), act
            d = turn_backward(dy[here], *given, [None, *rooms], wants_rows)
            if wants_rows:
                drows[here] = d
            grads = [room for room in rooms if room is not None]
            del given, rooms, d
        del present
        home.add(*place, grads)
        del grads
    home.arrive()
    return drows, *(sums.pop(0) if want else None for want in wanted)


class Wants:
    """Who wants which expert. Rank r is place r % g of node r // g."""

    def __init__(self, counts: Tensor, across: ProcessGroup, inside: ProcessGroup, sizes=None) -> None:
        self.across, self.inside = across, inside
        self.nodes, self.node, self.g, self.place = across.size(), across.rank(), inside.size(), inside.rank()
        wanted = counts.gt(0).to(torch.uint8).view(self.nodes, self.g, -1)
        self.here = wanted.shape[2]
        asked = collectives.all_to_all(wanted.transpose(0, 1).contiguous(), inside)
        needed = asked.amax(0)
        asked_by = collectives.all_to_all(needed, across)
        if sizes is not None:  # a dry run: every rank wants the same experts
            nodes, own = range(-self.node, self.nodes - self.node), range(self.here)
            self.needed = [[sizes[self.expert(s, 0, j)] > 0 for j in own] for s in nodes]
            self.asked, self.asked_by = [self.needed] * self.g, [self.needed[self.node]] * self.nodes
            return
        self.asked = asked.tolist()  # [place][node][j]: does it want expert j of my place in that node?
        self.needed = needed.tolist()  # [node][j]: does anyone here?
        self.asked_by = asked_by.tolist()  # [node][j]: does it want my expert j?

    def expert(self, s: int, q: int, j: int) -> int:
        """Expert j of the place q further in the node s further."""
        node, place = (self.node + s) % self.nodes, (self.place + q) % self.g
        return (node * self.g + place) * self.here + j

    def between_nodes(self, s: int, j: int) -> tuple[tuple, tuple]:
        """(rank, is it wanted) of who gets this rank's expert j, and of where another's comes from."""
        further, back = (self.node + s) % self.nodes, (self.node - s) % self.nodes
        return (back, self.asked_by[back][j]), (further, self.needed[further][j])

    def in_the_node(self, s: int, q: int, j: int, wanted: bool) -> tuple[tuple, tuple]:
        """The same for what has entered the node through each place."""
        further, back = (self.place + q) % self.g, (self.place - q) % self.g
        return (back, self.asked[back][(self.node + s) % self.nodes][j]), (further, wanted)


def start(tensors: list[Tensor], like: list[Tensor], group: ProcessGroup, to: tuple, source: tuple) -> list:
    """Handles of what comes from `source` while the tensors go `to`; each is shaped like this rank's."""
    handles = []
    for x, mine in zip(tensors, like):
        sends, receives = [0] * group.size(), [0] * group.size()
        sends[to[0]], receives[source[0]] = len(mine) * to[1], len(mine) * source[1]
        sizes = dict(send_sizes=sends, receive_sizes=receives)
        handles.append(collectives.all_to_all(x if to[1] else mine[:0], group, **sizes, async_op=True))
    return handles


def arrivals(matrices: list[Tensor], sizes: list[int], wants: Wants) -> Iterator[tuple]:
    """(s, q, j), expert, its matrices: every expert in turn, empty if it is not wanted here. The next one
    travels while the caller works; the caller drops what it got before it asks again."""
    rounds, entering = [(s, j) for s in range(wants.nodes) for j in range(wants.here)], None
    for number, (s, j) in enumerate(rounds):
        own = of(j, matrices)
        entered = own if s == 0 else [handle.wait() for handle in entering]
        entering = shared = None
        for q in range(wants.g):
            present = entered if q == 0 else [handle.wait() for handle in shared]
            shared = None
            if q + 1 < wants.g:
                hop = wants.in_the_node(s, q + 1, j, sizes[wants.expert(s, q + 1, j)] > 0)
                shared = start(entered, own, wants.inside, *hop)
            else:
                entered = None
                if number + 1 < len(rounds) and rounds[number + 1][0]:
                    t, i = rounds[number + 1]
                    entering = start(of(i, matrices), own, wants.across, *wants.between_nodes(t, i))
            yield (s, q, j), wants.expert(s, q, j), present


class Homeward:
    """Gradients of experts: summed in the node, sent home behind the next one's work, added to `sums`."""

    def __init__(self, sums: list[Tensor], wants: Wants) -> None:
        self.sums, self.wants, self.total, self.leaving = sums, wants, None, None

    def add(self, s: int, q: int, j: int, made: list[Tensor] | None) -> None:
        """`made` here for expert j of place q and node s further, or None."""
        wants, own = self.wants, of(j, self.sums)
        if q:
            back, further = wants.in_the_node(s, q, j, made is not None)
            arrived = [one.wait() for one in start(made or own, own, wants.inside, further, back)]
            made = arrived if back[1] else None
        if self.total is None:
            self.total = made
        else:
            added(self.total, made or [])
        if q + 1 == wants.g:
            self.arrive()
            if s:
                back, further = wants.between_nodes(s, j)
                self.leaving = own, start(self.total or own, own, wants.across, further, back)
            else:
                added(own, self.total or [])
            self.total = None

    def arrive(self) -> None:
        if self.leaving is not None:
            (own, handles), self.leaving = self.leaving, None
            added(own, [x for handle in handles if len(x := handle.wait())])  # nothing of all, or all of them


def added(sums: list[Tensor], more: list[Tensor]) -> None:
    """In place; `more` is as long, or empty."""
    for total, x in zip(sums, more):
        total.add_(x)


# ---- what crosses ep for a layer: set once, or decided in each step from a table ---------------------------
#     table [n, E]   rows that each rank of ep has for each expert, alike on all ranks
#     hook           (x [N, D], its routing, experts) -> [N, D]; each wraps another:
#                    partial(shadow, hook=partial(pull, hook=AllToAll(group), ..), ..)
# AllToAll (TwoLevels over nodes, by_capacity in chunks) sends rows to their experts; `pull` experts to their
# rows, if that sends fewer bytes; `shadow` copies the busiest experts that a rule picks from the table to
# every rank for the step: their rows stay, and the gradients of the copies are added up at the owner. The
# table sends 8·E·(n-1) bytes per rank over ep, and 16·E·(t-1)/t over each group `shared_by` (tp) of t ranks
# that share out the rows of a rank of ep; a shadow what balance.shadows sends. Differs: the rule counts
# bytes, not seconds, those of rows and matrices only; in training as if nothing were frozen.


def pull(x: Tensor, routing: Routing, experts: nn.Module, *, hook: Hook, across, inside, pays=None) -> Tensor:
    """Where `pays(routing, training)` on all ranks (None: always) experts travel to rows; else rows do."""
    if pays is None or pays(routing, experts.training):
        return at_home(x, routing, experts, partial(pulled, across=across, inside=inside))
    return hook(x, routing, experts)


def shadow(x, routing: Routing, experts: nn.Module, *, hook: Hook, group, table, rule, most: int) -> Tensor:
    """Of the experts that `rule(table(routing))` picks the `most` busiest come to their rows."""
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
    return home.back(experts(home.there(x), home.counts, home.sizes, work), routing.weights)


def table_of(routing: Routing, group: ProcessGroup, shared_by: Sequence[ProcessGroup] = ()) -> Table:
    """table[r][e]: rows for expert e of rank r of the group, with the ranks that share out its rows."""
    counts = routing.counts
    for ranks in shared_by:
        counts = collectives.all_reduce(counts, ranks)
    table = collectives.all_gather(counts[None], group, 0)
    if routing.sizes is None:
        return table.tolist()
    return [[size * math.prod(ranks.size() for ranks in shared_by) for size in routing.sizes]] * group.size()


def pull_is_cheaper(rows: int, experts: int, width: int, *, gated=False, backward=True) -> bool:
    """Do `experts` pulled experts of hidden `width` F take fewer bytes than `rows` that would go to them?
    Rows go and come, in backward again; experts come, in backward again, and their gradients go home. Forward
    alone, with F = 4h and no gate: k·T > 4·h·E_remote."""
    matrices = 3 if gated else 2
    return experts * matrices * width * (3 if backward else 1) < rows * (4 if backward else 2)


def experts_are_cheaper(table: Table, width: int, *, gated: bool, backward: bool) -> bool:
    """Do the experts that are wanted elsewhere take fewer bytes than the rows that are?"""
    here = len(table[0]) // len(table)
    away = [rows for rank, counts in enumerate(table) for e, rows in enumerate(counts) if e // here != rank]
    return pull_is_cheaper(sum(away), sum(map(bool, away)), width, gated=gated, backward=backward)


def busiest(table: Table, experts: Sequence[int], most: int) -> list[int]:
    """Of these at most so many, those with the most rows; of equal ones the first."""
    loads = [sum(rows) for rows in zip(*table)]
    return sorted(sorted(experts, key=lambda e: (-loads[e], e))[:most])
