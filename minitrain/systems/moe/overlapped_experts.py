"""A layer in parts: the rows of one part travel while experts work on those of another.

    by_capacity   each expert's rows in r chunks         chunk i+1 arrives, chunk i works, chunk i-1 goes home
    by_peer       those of the group of g ranks that is s further, s = 0 .. n/g-1; the own group first
    reused        as by_capacity, but what experts read is not kept: backward fetches it once more

A part is a generator that gives way when it has handed rows to the network; `take_turns` is the schedule.
Backward needs none of its own: autograd runs in reverse, and a transfer that is issued before a product and
awaited behind it has a gradient that is issued before that product's gradient and awaited behind it.

Sends what dispatch.py sends, by_capacity in r times as many all-to-alls, by_peer as n-1 messages each way,
g in a step (g-1 in the first), so groups of one rank start without the network and have the most steps;
reused has 5 crossings of D elements per row, not 4. Memory: of R arrived rows reused holds two chunks while
experts work (one is arriving), a third while one is sorted; the others keep all R for backward.
Hwang et al. 2022 (Tutel), arXiv:2206.03382, section 3; He et al. 2022 (FasterMoE), PPoPP, section 4.2; Zhang
et al. 2023 (MPipeMoE), IPDPS. Differs: MPipeMoE has two fixed buffers and may offload: that choice is in
systems/plan/expert_overlap.py.
"""

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from minitrain.moe.dispatch import Dispatch, combined, inverse
from minitrain.moe.router import Routing, counts_of
from minitrain.ranks import collectives
from minitrain.ranks.checks import require_positive_ints

Work = Callable[..., Tensor]  # (rows [R, D], counts [E/n], *params) -> [R, D], as in experts.py


def take_turns(travels: Iterable[Generator], enter: int = 1) -> list:
    """What each travel returns. In each round `enter` more begin; all move on to a `yield`, these first."""
    require_positive_ints(enter=enter)
    waiting, under_way, results = list(enumerate(travels)), [], {}
    while waiting or under_way:
        moving, under_way, waiting = waiting[:enter] + under_way, [], waiting[enter:]
        for number, travel in moving:
            try:
                next(travel)
                under_way.append((number, travel))
            except StopIteration as end:
                results[number] = end.value
    return [results[number] for number in sorted(results)]


@dataclass(eq=False)
class Flight:
    """Rows on the network, or their gradient on its way back. `there` and `back`: rows -> handle."""

    there: Callable
    back: Callable
    handle: collectives.Handle | None = None

    def leave(self, rows: Tensor) -> Tensor:
        self.handle = self.there(rows)
        return rows.new_empty(0)

    def leave_back(self, grad: Tensor) -> Tensor:
        self.handle = self.back(grad)
        return grad.new_empty(0)

    def arrive(self, ticket: Tensor | None = None) -> Tensor:
        handle, self.handle = self.handle, None  # a handle keeps its result
        return handle.wait()


class _Linear(torch.autograd.Function):
    """y = go(x), dx = come(dy). An empty ticket joins leave and arrive in the graph."""

    @staticmethod
    def forward(ctx, x: Tensor, go: Callable, come: Callable) -> Tensor:
        ctx.come = come
        return go(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy: Tensor):
        return ctx.come(dy), None, None


def leave(rows: Tensor, flight: Flight) -> Tensor:
    """Hand the rows over; backward: their gradient has arrived."""
    return _Linear.apply(rows, flight.leave, flight.arrive)


def arrive(ticket: Tensor, flight: Flight) -> Tensor:
    """The rows have arrived; backward: hand over their gradient."""
    return _Linear.apply(ticket, flight.arrive, flight.leave_back)


@dataclass(frozen=True)
class Part:
    """Some rows of a batch that travel together."""

    sent: Tensor  # [a] which of the rows that leave: places in Dispatch.choices
    turn: Tensor  # [r] those that arrive, in the order of experts
    counts: Tensor  # [E/n] rows of each expert of this rank
    there: Callable  # [a, D] -> handle of [r, D]
    back: Callable  # [r, D] -> handle of [a, D]
    known: dict  # in a dry run {"sizes": the counts as numbers}, for the work

    @property
    def home(self) -> Tensor:
        """From the order of experts back to that of arrival."""
        return inverse(self.turn)


def by_capacity(x, routing: Routing, group, work: Work, params=(), *, chunks: int = 2) -> Tensor:
    """x [N, D] -> [N, D], what Dispatch and `work(rows, counts, *params)` give, in `chunks` steps."""
    return in_parts(x, routing, *capacity_parts(routing, group, chunks), work, params)


def by_peer(x: Tensor, routing: Routing, group: ProcessGroup, work: Work, params=(), *, size: int = 1):
    """The same: in step s rows go to the group of `size` ranks that is s further, those of s back arrive."""
    return in_parts(x, routing, *peer_parts(routing, group, size), work, params)


def reused(x: Tensor, routing: Routing, group: ProcessGroup, work: Work, params=(), *, chunks: int = 2):
    """The same: backward fetches the rows again, chunk by chunk, and repeats the work on them."""
    way, parts = capacity_parts(routing, group, chunks)
    return combine([_Reused.apply(x, way.tokens, parts, work, *params)], parts, way, routing.weights)


def in_parts(x: Tensor, routing: Routing, way: Dispatch, parts: Sequence[Part], work: Work, params) -> Tensor:
    homes = take_turns(travel(x, way.tokens, part, work, params) for part in parts)
    return combine(homes, parts, way, routing.weights)


def travel(x: Tensor, tokens: Tensor, part: Part, work: Work, params: Sequence[Tensor]) -> Generator:
    """A part's rows of x [N, D] to their experts, to work, and home: [a, D]."""
    flight = Flight(part.there, part.back)
    ticket = leave(x.index_select(0, tokens[part.sent]), flight)
    yield
    rows = by_expert(arrive(ticket, flight), part)
    flight = Flight(part.back, part.there)
    y = work(rows, part.counts, *params, **part.known)
    ticket = leave(y.index_select(0, part.home), flight)
    del rows  # if nobody keeps them for backward, their memory is free
    yield
    return arrive(ticket, flight)


def by_expert(arrived: Tensor, part: Part) -> Tensor:
    """Both are communication buffers in an account."""
    return collectives.announce("buffer", collectives.announce("buffer", arrived).index_select(0, part.turn))


class _Reused(torch.autograd.Function):
    """Keeps x and the parameters; what arrives for a chunk dies when its work is done."""

    @staticmethod
    def forward(ctx, x: Tensor, tokens: Tensor, parts: list[Part], work: Work, *params: Tensor) -> Tensor:
        ctx.save_for_backward(x, tokens, *params)
        ctx.parts, ctx.work = parts, work
        return torch.cat(take_turns(travel(x, tokens, part, work, params) for part in parts))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dhome: Tensor):
        x, tokens, *params = ctx.saved_tensors
        params = [param.detach().requires_grad_(param.requires_grad) for param in params]
        wanted = [param for param in params if param.requires_grad]
        dx, *sums = (torch.zeros_like(whole) for whole in (x, *wanted))

        def travel_again(part: Part, dy: Tensor) -> Generator:
            flights = Flight(part.there, part.back), Flight(part.there, part.back)
            for flight, rows in zip(flights, (x.index_select(0, tokens[part.sent]), dy)):
                flight.leave(rows)
            yield
            rows, dy = (by_expert(flight.arrive(), part) for flight in flights)
            with torch.enable_grad():
                y = ctx.work(rows.requires_grad_(), part.counts, *params, **part.known)
            drows, *terms = torch.autograd.grad(y, [rows, *wanted], dy)
            for total in sums:
                total.add_(terms.pop(0))
            flights[0].leave_back(drows.index_select(0, part.home))
            del rows, dy, y, drows
            yield
            dx.index_add_(0, tokens[part.sent], flights[0].arrive())

        pieces = dhome.split([len(part.sent) for part in ctx.parts])
        take_turns(travel_again(part, dy) for part, dy in zip(ctx.parts, pieces))
        return dx, None, None, None, *(sums.pop(0) if param.requires_grad else None for param in params)


def combine(homes: Sequence[Tensor], parts: Sequence[Part], way: Dispatch, weights: Tensor) -> Tensor:
    """Results [a, D] of the parts -> [N, D]: for each token the weighted sum over its choices."""
    order = torch.cat([part.sent for part in parts])
    chosen = weights.flatten().index_select(0, way.choices[order])
    return combined(torch.cat(list(homes)), chosen, way.tokens[order], way.num_tokens)


def capacity_parts(routing: Routing, group: ProcessGroup, chunks: int) -> tuple[Dispatch, list[Part]]:
    """Of the c rows that a rank has for an expert, row i travels in chunk i * chunks // c."""
    require_positive_ints(chunks=chunks)

    def chunk_of(piece: Tensor, pieces: int) -> Tensor:
        sizes = counts_of(piece, pieces)
        place = torch.arange(len(piece), device=piece.device) - (sizes.cumsum(0) - sizes)[piece]
        return place * chunks // sizes[piece]

    def in_chunk(i: int, sizes: list[int]) -> list[int]:
        return [-(-size * (i + 1) // chunks) + (-size * i // chunks) for size in sizes]

    def cross(_, send_sizes: list[int], receive_sizes: list[int]) -> Callable:
        sizes = dict(send_sizes=send_sizes, receive_sizes=receive_sizes)
        return partial(collectives.all_to_all, group=group, async_op=True, **sizes)

    way = Dispatch(routing, group)
    leaving, source, arriving = rows = rows_of(routing, way)
    here, n = len(way.counts), group.size()
    numbers = chunk_of(leaving, n * here), chunk_of(source * here + arriving, n * here)
    known = None
    if routing.sizes is not None:
        known = [[in_chunk(i, own) for own in by_rank(routing.sizes, n)] for i in range(chunks)]
        known = known, [[leave[group.rank()]] * n for leave in known]
    return way, _parts(way, rows, numbers, chunks, cross, known)


def peer_parts(routing: Routing, group: ProcessGroup, size: int = 1) -> tuple[Dispatch, list[Part]]:
    """A part for each distance between groups of `size` ranks that follow one another, the own group first.

    Inside a step pairs take turns too: place i of a group sends to places i, i + 1, .. of the other."""
    rank, n = group.rank(), group.size()
    if not isinstance(size, int) or size < 1 or n % size:
        rule = f"use a divisor of {n}, 1 for single ranks"
        raise ValueError(f"overlap: groups of size={size!r} of {n} ranks; {rule}")

    def peer(distance: int, turn: int) -> int:
        return (rank // size + distance) % (n // size) * size + (rank + turn) % size

    def cross(step: int, sends: list[int], receives: list[int]) -> Callable:
        pairs = [(peer(step, turn), peer(-step, -turn)) for turn in range(size)]

        def exchange(rows: Tensor) -> collectives.Handle:
            pieces, handles = rows.split(sends), {}
            for to, source in pairs:
                like = rows.new_empty(receives[source], rows.shape[1])
                way = dict(like=like, async_op=True)
                handles[source] = collectives.exchange(pieces[to], to, source, group, **way)
            return joined([handles[source] for source in sorted(handles)])

        return exchange

    way = Dispatch(routing, group)
    leaving, source, _ = rows = rows_of(routing, way)
    steps = n // size
    numbers = (leaving // len(way.counts) // size - rank // size), (rank // size - source // size)
    known = None
    if routing.sizes is not None:
        each, none = by_rank(routing.sizes, n), [0] * len(way.counts)
        further = [(r // size - rank // size) % steps for r in range(n)]
        back = [(rank // size - r // size) % steps for r in range(n)]
        leave = [[own if further[r] == s else none for r, own in enumerate(each)] for s in range(steps)]
        come = [[each[rank] if back[r] == s else none for r in range(n)] for s in range(steps)]
        known = leave, come
    return way, _parts(way, rows, [number % steps for number in numbers], steps, cross, known)


def by_rank(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Of each expert -> of each rank its experts'."""
    require_positive_ints(ranks=ranks)
    here = len(sizes) // ranks
    return [list(sizes[rank * here : (rank + 1) * here]) for rank in range(ranks)]


def joined(handles: list[collectives.Handle]) -> collectives.Handle:
    """One handle for all, of their rows one after the other."""
    if len(handles) == 1:
        return handles[0]

    def rows() -> Tensor:
        return torch.cat([handle.wait() for handle in handles])

    return collectives.Handle(lambda: None, rows)


def rows_of(routing: Routing, way: Dispatch) -> tuple[Tensor, Tensor, Tensor]:
    """The expert of each row that leaves [A]; source rank and (local) expert of each that arrives [R]."""
    sizes = torch.tensor(way.receive_sizes, device=way.turn.device)
    by_expert, source = (
        torch.arange(len(count), device=count.device).repeat_interleave(count, output_size=len(way.turn))
        for count in (way.counts, sizes)
    )
    arriving = torch.empty_like(way.turn).index_copy_(0, way.turn, by_expert)
    return routing.experts.flatten()[way.choices], source, arriving


def _parts(way: Dispatch, rows: tuple, numbers: Sequence, count: int, cross: Callable, known) -> list[Part]:
    """`numbers`: in which part each row leaves [A] and arrives [R]; both sides know without asking. `known`:
    in a dry run, how many there are of each part, rank and expert of it."""
    (leaving, source, arriving), n, here = rows, len(way.receive_sizes), len(way.counts)

    def counted(number: Tensor, piece: Tensor) -> Tensor:
        return counts_of(number * n * here + piece, count * n * here).view(count, n, here)

    leave, come = counted(numbers[0], leaving), counted(numbers[1], source * here + arriving)
    if known is None:
        sends, receives, known = leave.sum(2).tolist(), come.sum(2).tolist(), [{}] * count
    else:
        sends, receives = ([[sum(rank) for rank in part] for part in side] for side in known)
        known = [{"sizes": [sum(expert) for expert in zip(*part)]} for part in known[1]]
    sent, arrived = (
        number.argsort(stable=True).split([sum(part) for part in sizes])
        for number, sizes in zip(numbers, (sends, receives))
    )
    there = [cross(i, *sizes) for i, sizes in enumerate(zip(sends, receives))]
    back = [cross(-i, *sizes) for i, sizes in enumerate(zip(receives, sends))]
    turns = [arriving[places].argsort(stable=True) for places in arrived]
    return list(map(Part, sent, turns, come.sum(1).unbind(), there, back, known))
