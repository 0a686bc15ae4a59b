"""A layer in parts: the rows of one part travel while experts work on those of another.

    by_capacity   each expert's rows in r chunks         chunk i+1 arrives, chunk i works, chunk i-1 goes home
    by_peer       those of the rank that is s further, s = 0 .. n-1; the rank's own first
    reused        as by_capacity, but what experts read is not kept: backward fetches it once more

A part is a generator that gives way when it has handed rows to the network; `interleave` is the schedule.
Backward needs none: autograd runs in reverse, and a transfer that is issued before a product and awaited
behind it has a gradient that is issued before that product's gradient and awaited behind it.
Sends what dispatch.py sends, by_capacity in r times as many all-to-alls, by_peer as n-1 messages each way, so
work starts without the network; reused has 5 crossings of D elements per row, not 4. Memory: of R rows reused
holds two chunks while experts work (one is arriving), a third while one is sorted; the others keep all R for
backward.
Hwang et al. 2022 (Tutel), arXiv:2206.03382, section 3; He et al. 2022 (FasterMoE), PPoPP, section 4.2; Zhang
et al. 2023 (MPipeMoE), IPDPS. Differs: FasterMoE pairs groups of ranks, these are of one; MPipeMoE has two
fixed buffers and may offload: that choice is in systems/plan/expert_overlap.py.
"""

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from minitrain.moe import dispatch
from minitrain.moe.dispatch import Dispatch, combined, inverse
from minitrain.moe.router import Routing
from minitrain.ranks import collectives
from minitrain.ranks.autograd import custom_vjp
from minitrain.ranks.checks import require_positive_ints

Work = Callable[..., Tensor]  # (rows [R, D], counts [E/n], *params) -> [R, D], as in experts.py
Span = tuple[int, int]  # from the first to behind the last


def interleave(travels: Iterable[Generator], enter: int = 1) -> list:
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

    def arrive(self) -> Tensor:
        handle, self.handle = self.handle, None  # a handle keeps its result
        return handle.wait()


def leave(rows: Tensor, flight: Flight) -> Tensor:
    """Hand the rows over; backward: their gradient has arrived. The empty ticket joins this and `arrive`."""
    return custom_vjp(lambda rows: (flight.leave(rows), ()), lambda *_: (flight.arrive(),), rows)


def arrive(ticket: Tensor, flight: Flight) -> Tensor:
    """The rows have arrived; backward: hand over their gradient."""
    return custom_vjp(lambda _: (flight.arrive(), ()), lambda dys, *_: (flight.leave_back(*dys),), ticket)


@dataclass(frozen=True)
class Part:
    """Some rows of a batch that travel together."""

    sent: Tensor  # [a] which of the rows that leave: places in Dispatch.choices
    order: Tensor  # [r] those that arrive, in the order of experts
    counts: Tensor  # [E/n] rows of each expert of this rank
    there: Callable  # [a, D] -> handle of [r, D]
    back: Callable  # [r, D] -> handle of [a, D]
    known: dict  # in a dry run {"sizes": the counts as numbers}, for the work

    @property
    def home(self) -> Tensor:
        """From the order of experts back to that of arrival."""
        return inverse(self.order)


def by_capacity(x, routing: Routing, group, work: Work, params=(), *, chunks: int = 2) -> Tensor:
    """x [N, D] -> [N, D], what Dispatch and `work(rows, counts, *params)` give, in `chunks` steps."""
    return in_parts(x, routing, *capacity_parts(routing, group, chunks), work, params)


def by_peer(x: Tensor, routing: Routing, group: ProcessGroup, work: Work, params=()) -> Tensor:
    """The same: in step s rows go to the rank that is s further, those of the rank s back arrive."""
    return in_parts(x, routing, *peer_parts(routing, group), work, params)


def reused(x: Tensor, routing: Routing, group: ProcessGroup, work: Work, params=(), *, chunks: int = 2):
    """The same: backward fetches the rows again, chunk by chunk, and repeats the work on them."""
    trip, parts = capacity_parts(routing, group, chunks)
    tokens = trip.tokens

    def forward(x: Tensor, *params: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        homes = interleave(travel(x, tokens, part, work, params) for part in parts)
        return torch.cat(homes), (x, *params)

    def backward(dys: Sequence[Tensor], saved: Sequence[Tensor], _) -> list:
        return reused_backward(*dys, *saved, tokens=tokens, parts=parts, work=work)

    return combine([custom_vjp(forward, backward, x, *params)], parts, trip, routing.weights)


def in_parts(
    x: Tensor, routing: Routing, trip: Dispatch, parts: Sequence[Part], work: Work, params
) -> Tensor:
    homes = interleave(travel(x, trip.tokens, part, work, params) for part in parts)
    return combine(homes, parts, trip, routing.weights)


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


def by_expert(received: Tensor, part: Part) -> Tensor:
    """Both are communication buffers in an account."""
    collectives.announce("buffer", received)
    return collectives.announce("buffer", received.index_select(0, part.order))


def reused_backward(dhome, x, *params, tokens: Tensor, parts: Sequence[Part], work: Work) -> list:
    """dx and the gradients of the parameters; what arrives for a chunk dies when its work is done."""
    params = [param.detach().requires_grad_(param.requires_grad) for param in params]
    learn = [param for param in params if param.requires_grad]
    dx, *sums = (torch.zeros_like(whole) for whole in (x, *learn))

    def travel_again(part: Part, dy: Tensor) -> Generator:
        flights = Flight(part.there, part.back), Flight(part.there, part.back)
        for flight, rows in zip(flights, (x.index_select(0, tokens[part.sent]), dy)):
            flight.leave(rows)
        yield
        rows, dy = (by_expert(flight.arrive(), part) for flight in flights)
        with torch.enable_grad():
            y = work(rows.requires_grad_(), part.counts, *params, **part.known)
        drows, *terms = torch.autograd.grad(y, [rows, *learn], dy)
        for total in sums:
            total.add_(terms.pop(0))
        flights[0].leave_back(drows.index_select(0, part.home))
        del rows, dy, y, drows
        yield
        dx.index_add_(0, tokens[part.sent], flights[0].arrive())

    pieces = dhome.split([len(part.sent) for part in parts])
    interleave(travel_again(part, dy) for part, dy in zip(parts, pieces))
    return [dx, *(sums.pop(0) if param.requires_grad else None for param in params)]


def combine(homes: Sequence[Tensor], parts: Sequence[Part], trip: Dispatch, weights: Tensor) -> Tensor:
    """Results [a, D] of the parts -> [N, D]: for each token the weighted sum over its choices."""
    order = torch.cat([part.sent for part in parts])
    chosen = weights.flatten().index_select(0, trip.choices[order])
    return combined(torch.cat(list(homes)), chosen, trip.tokens[order], trip.num_tokens)


# ---- which rows are in which part --------------------------------------------------------------------------


def capacity_parts(routing: Routing, group: ProcessGroup, chunks: int) -> tuple[Dispatch, list[Part]]:
    """Of the c rows that a rank has for an expert, row i travels in chunk i * chunks // c."""
    require_positive_ints(chunks=chunks)

    def chunk(number: int, _rank: int, size: int) -> Span:
        return -(-size * number // chunks), -(-size * (number + 1) // chunks)

    def transfer(_, send_sizes: list[int], receive_sizes: list[int]) -> Callable:
        sizes = dict(send_sizes=send_sizes, receive_sizes=receive_sizes)
        return partial(collectives.all_to_all, group=group, async_op=True, **sizes)

    return _parts(routing, group, chunks, (chunk, chunk), transfer)


def peer_parts(routing: Routing, group: ProcessGroup) -> tuple[Dispatch, list[Part]]:
    """A part for each distance between two ranks, this rank's own rows first."""
    rank, n = group.rank(), group.size()

    def further(step: int, to: int, rows: int) -> Span:
        return (0, rows if to == (rank + step) % n else 0)

    def back(step: int, source: int, rows: int) -> Span:
        return (0, rows if source == (rank - step) % n else 0)

    def transfer(step: int, _, receive_sizes: list[int]) -> Callable:
        to, source = (rank + step) % n, (rank - step) % n

        def exchange(rows: Tensor) -> collectives.Handle:
            like = rows.new_empty(receive_sizes[source], rows.shape[1])
            return collectives.exchange(rows, to, source, group, like=like, async_op=True)

        return exchange

    return _parts(routing, group, n, (further, back), transfer)


def _parts(
    routing: Routing, group: ProcessGroup, count: int, spans: tuple[Callable, Callable], transfer: Callable
) -> tuple[Dispatch, list[Part]]:
    """`spans`: (part, rank, rows) -> of the rows for an expert that go to (come from) that rank, those in the
    part; both sides know without asking."""
    trip, n, dry = Dispatch(routing, group), group.size(), routing.sizes is not None
    device, here = trip.counts.device, len(trip.counts)
    if dry:  # every rank has as many tokens
        going = [routing.sizes[here * rank : here * (rank + 1)] for rank in range(n)]
        coming = [going[group.rank()]] * n
    else:
        going, coming = routing.counts.view(n, here).tolist(), trip.received.tolist()
    parts = []
    for number in range(count):
        places, sends, start = [], [], 0
        for rank, row in enumerate(going):
            before = len(places)
            for rows in row:
                first, stop = spans[0](number, rank, rows)
                places += range(start + first, start + stop)
                start += rows
            sends.append(len(places) - before)
        cuts = [[spans[1](number, rank, rows) for rows in row] for rank, row in enumerate(coming)]
        table = [[stop - first for first, stop in row] for row in cuts]
        receives, counts = [sum(row) for row in table], torch.tensor(table, device=device)
        order = dispatch.by_expert(counts, sum(receives))
        flights = transfer(number, sends, receives), transfer(-number, receives, sends)
        known = {"sizes": [sum(column) for column in zip(*table)]} if dry else {}
        parts.append(
            Part(torch.tensor(places, dtype=torch.long, device=device), order, counts.sum(0), *flights, known)
        )
    return trip, parts
