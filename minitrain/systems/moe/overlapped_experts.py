"""Experts while rows travel: a layer in parts, or two microbatches in turns.

    by_capacity   each expert's rows in r chunks         chunk i+1 arrives, chunk i works, chunk i-1 goes home
    by_peer       those of the rank that is s further, s = 0 .. n-1; the rank's own first
    reused        as by_capacity, but what experts read is not kept: backward fetches it once more
    layer_pieces  a layer cut at its all-to-alls, for a forward and a backward in turns

All are generators that give way when they have handed rows to the network; `interleave` is the schedule.
Sends what dispatch.py sends, by_capacity in r times as many all-to-alls, by_peer as n-1 messages each way;
reused has 5 crossings of D elements per row, not 4. Memory: of R rows reused holds two chunks while experts
work, a third while one is sorted; the others keep all R for backward. Hwang et al. 2022 (Tutel),
arXiv:2206.03382, section 3; He et al. 2022 (FasterMoE), PPoPP, section 4.2; Zhang et al. 2023 (MPipeMoE),
IPDPS; DeepSeek-V3 2024, arXiv:2412.19437, section 3.2.1. Differs: FasterMoE pairs groups of ranks; MPipeMoE
has two fixed buffers and may offload (systems/plan/expert_overlap.py); for a pair a thread or NCCL moves the
rows, and layers are cut by hand (pipeline/halves.py runs whole stages so, uncut).
"""

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

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


def interleave(travels: Iterable[Generator], enter: int = 1) -> list:
    """Round-robin over generators: each round starts `enter` new ones, then advances all to their next
    `yield`, the new ones first. Returns what each of them returned, in the order of `travels`."""
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

    def leave(self, rows: Tensor, back: bool = False) -> Tensor:
        self.handle = self.back(rows) if back else self.there(rows)
        return rows.new_empty(0)

    def arrive(self) -> Tensor:
        handle, self.handle = self.handle, None  # a handle keeps its result
        return handle.wait()


def leave(rows: Tensor, flight: Flight) -> Tensor:
    """Hand the rows over; backward: their gradient has arrived. The empty ticket joins this and `arrive`."""
    return custom_vjp(lambda rows: (flight.leave(rows), ()), lambda *_: (flight.arrive(),), rows)


def arrive(ticket: Tensor, flight: Flight) -> Tensor:
    """The rows have arrived; backward: hand over their gradient."""
    return custom_vjp(lambda _: (flight.arrive(), ()), lambda dys, *_: (flight.leave(*dys, True),), ticket)


@dataclass(frozen=True)
class Part:
    """Some rows of a batch that travel together."""

    sent: Tensor  # [a] which of the rows that leave: places in Dispatch.choices
    order: Tensor  # [r] those that arrive, in the order of experts
    counts: Tensor  # [E/n] rows of each expert of this rank
    there: Callable  # [a, D] -> handle of [r, D]
    back: Callable  # [r, D] -> handle of [a, D]
    known: dict  # in a dry run {"sizes": the counts as numbers}, for the work

    home = property(lambda self: inverse(self.order))  # from the order of experts back to that of arrival


def by_capacity(x, routing: Routing, group, work: Work, params=(), *, chunks: int = 2) -> Tensor:
    """x [N, D] -> [N, D], what Dispatch and `work(rows, counts, *params)` give, in `chunks` steps."""
    trip, parts = capacity_parts(routing, group, chunks)
    return combine(travels(x, trip, parts, work, params), parts, trip, routing.weights)


def by_peer(x: Tensor, routing: Routing, group: ProcessGroup, work: Work, params=()) -> Tensor:
    """The same: in step s rows go to the rank that is s further, those of the rank s back arrive."""
    trip, parts = peer_parts(routing, group)
    return combine(travels(x, trip, parts, work, params), parts, trip, routing.weights)


def reused(x: Tensor, routing: Routing, group: ProcessGroup, work: Work, params=(), *, chunks: int = 2):
    """The same: backward fetches the rows again, chunk by chunk, and repeats the work on them."""
    trip, parts = capacity_parts(routing, group, chunks)
    forward = lambda x, *params: (torch.cat(travels(x, trip, parts, work, params)), (x, *params))
    backward = lambda dys, saved, _: reused_backward(*dys, *saved, tokens=trip.tokens, parts=parts, work=work)
    return combine([custom_vjp(forward, backward, x, *params)], parts, trip, routing.weights)


def travels(x: Tensor, trip: Dispatch, parts: Sequence[Part], work: Work, params) -> list[Tensor]:
    return interleave(travel(x, trip.tokens, part, work, params) for part in parts)


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
        flights[0].leave(drows.index_select(0, part.home), back=True)
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
    chunk = lambda number, _, size: [-(-size * i // chunks) for i in (abs(number), abs(number) + 1)]

    def transfer(_, send_sizes: list[int], receive_sizes: list[int]) -> Callable:
        sizes = dict(send_sizes=send_sizes, receive_sizes=receive_sizes)
        return partial(collectives.all_to_all, group=group, async_op=True, **sizes)

    return _parts(routing, group, chunks, chunk, transfer)


def peer_parts(routing: Routing, group: ProcessGroup) -> tuple[Dispatch, list[Part]]:
    """A part for each distance between two ranks, this rank's own rows first."""
    rank, n = group.rank(), group.size()
    further = lambda step, other, rows: (0, rows if other == (rank + step) % n else 0)

    def transfer(step: int, _, receive_sizes: list[int]) -> Callable:
        to, source = (rank + step) % n, (rank - step) % n

        def exchange(rows: Tensor) -> collectives.Handle:
            like = rows.new_empty(receive_sizes[source], rows.shape[1])
            return collectives.exchange(rows, to, source, group, like=like, async_op=True)

        return exchange

    return _parts(routing, group, n, further, transfer)


def _parts(routing: Routing, group, count: int, span, transfer) -> tuple[Dispatch, list[Part]]:
    """`span`: (part, rank, rows) -> which of the rows for an expert that go to that rank (-part: come from
    it) are in the part. Both sides know without asking."""
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
                first, stop = span(number, rank, rows)
                places += range(start + first, start + stop)
                start += rows
            sends.append(len(places) - before)
        cuts = [[span(-number, rank, rows) for rows in row] for rank, row in enumerate(coming)]
        table = [[stop - first for first, stop in row] for row in cuts]
        receives, counts = [sum(row) for row in table], torch.tensor(table, device=device)
        order = dispatch.by_expert(counts, sum(receives))
        flights = transfer(number, sends, receives), transfer(-number, receives, sends)
        known = {"sizes": [sum(column) for column in zip(*table)]} if dry else {}
        sent = torch.tensor(places, dtype=torch.long, device=device)
        parts.append(Part(sent, order, counts.sum(0), *flights, known))
    return trip, parts


# ---- two microbatches: one travels while the other computes ------------------------------------------------


class Piece(NamedTuple):
    """Between two transfers: run(arrived, *beside) -> (rows, flight, *beside). The flight takes the rows to
    the next piece (None: they are there), `beside` stays on this rank."""

    run: Callable
    params: Sequence[Tensor] = ()  # whose gradients are taken after the input's has left, of others with it


def layer_pieces(before, route, work: Work, params, group: ProcessGroup, *, dense=None) -> list[Piece]:
    """The pieces of h = before(x), y = h + experts(h): attention, experts, sum. `route(h)` gives a Routing.

        dx, (y, saved) = interleave([backward_turns(saved_b, dy), forward_turns(pieces, x)], enter=2)

    is the pair (F B) of DualPipe (drawn in pipeline/halves.py), for any number of layers. With `dense`, the
    parameters of before and route, gradients of weights come when that of the input has left: more hides, in
    5 products of experts, not 4."""

    def to_experts(x: Tensor):
        h = before(x)
        routing = route(h)
        trip, (part,) = capacity_parts(routing, group, 1)
        return h.index_select(0, trip.tokens), Flight(part.there, part.back), h, routing.weights, trip, part

    def experts(rows: Tensor, h: Tensor, weights: Tensor, trip: Dispatch, part: Part):
        y = work(rows.index_select(0, part.order), part.counts, *params)
        return y.index_select(0, part.home), Flight(part.back, part.there), h, weights, trip, part

    def home(rows: Tensor, h: Tensor, weights: Tensor, trip: Dispatch, part: Part):
        return h + combine([rows], [part], trip, weights), None

    return [Piece(to_experts, dense or ()), Piece(experts, () if dense is None else params), Piece(home)]


def forward_turns(pieces: Sequence[Piece], x: Tensor) -> Generator:
    """A microbatch through the pieces, in turns; returns (y, what `backward` needs)."""
    saved, values = [], (x,)
    for piece in pieces:
        values = [v.detach().requires_grad_() if _wants(v) else v for v in values]
        with torch.enable_grad():
            rows, flight, *beside = piece.run(*values)
        inputs, outputs = ([v for v in some if _wants(v)] for some in (values, [rows, *beside]))
        saved.append((piece, inputs, outputs, flight if rows.requires_grad else None))
        arrived = rows
        if flight is not None:
            flight.leave(rows.detach())
            yield
            arrived = flight.arrive().requires_grad_(rows.requires_grad)
        values = [arrived, *beside]
    return rows.detach(), saved


def backward_turns(saved: list, dy: Tensor) -> Generator:
    """Back through the pieces, in turns; returns dx. Gradients of parameters are added to their .grad."""
    grads, later = [dy], []
    while saved:
        piece, inputs, outputs, flight = saved.pop()
        if flight is not None:
            flight.leave(grads[0], back=True)
            while later:
                later.pop()()
            yield
            grads[0] = flight.arrive()
        if params := [param for param in piece.params if param.requires_grad]:
            later.append(partial(torch.autograd.backward, outputs, grads, inputs=params))
            if inputs:
                torch.autograd.backward(outputs, grads, inputs=inputs, retain_graph=True)
        else:
            torch.autograd.backward(outputs, grads)
        grads = [torch.zeros_like(v) if v.grad is None else v.grad for v in inputs]
    for rest in later:
        rest()
    return grads[0] if grads else None  # nobody asks for that of tokens


def _wants(value) -> bool:
    return isinstance(value, Tensor) and value.requires_grad
