"""All-to-all on two levels of network: what crosses between nodes goes once, or in one message per node.

N nodes of g ranks, n = N·g. Group `across` has the ranks of one place in every node, `inside` those of one
node; rank r of all is place r % g of node r // g.

    TwoLevelDispatch       x [N_tokens, D] -> one copy to each node a token visits -> its experts in that node
                           results -> weighed and summed inside the node -> one row back across per copy
    overlapped             the same, tokens in parts: one crosses while the one before it travels inside
    two_level_all_to_all   blocks for place l of every node meet at place l of this node, then cross

Between nodes a rank with P pairs (token, other node) that receives Q sends P·D elements forward and Q·D back,
backward as many; 8 bytes for a node's number of pairs in a part; with a pair k numbers of experts (8 bytes
each) and k weights, with gradients. Flat, a token crosses once for each expert. Inside, as dispatch.py.
all_to_all: n - g messages of S/n bytes to other nodes become N - 1 of g·S/n; S (g-1)/g travel inside.
DeepSeek-V3 2024 (arXiv:2412.19437, section 3.2.2); Hwang et al. 2022 (Tutel's 2DH, arXiv:2206.03382).
A copy enters at the sender's own place. Differs: a thread or NCCL moves the rows, no kernel with cores of its
own. In a dry run the k experts of a token are neighbours, on as few nodes as can be; `scattered` makes of its
bytes those of a real router.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from functools import partial
from math import gcd

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from minitrain.model.config import GPTConfig
from minitrain.moe.dispatch import AllToAll, Dispatch, Meanwhile, combined, inverse, permuted
from minitrain.moe.router import NOWHERE, Routing, visits_in_turn
from minitrain.plan.predict.work import Pass
from minitrain.plan.strategy import Strategy
from minitrain.ranks import collectives
from minitrain.systems.moe.overlapped_experts import Flight, arrive, interleave, leave


class TwoLevelDispatch:
    """As `Dispatch`. `meanwhile()` is called while rows, or their gradients, are under way between nodes."""

    def __init__(self, routing: Routing, across: ProcessGroup, inside: ProcessGroup, meanwhile=None):
        experts, nodes, n = routing.probs.shape[1], across.size(), across.size() * inside.size()
        if experts % n:
            raise ValueError(f"{experts} experts on {n} ranks of {nodes} nodes; use a multiple of the ranks")
        self.across, self.meanwhile, per_node = across, meanwhile, experts // nodes
        self.num_tokens = len(routing.experts)
        node = routing.experts.div(per_node, rounding_mode="floor")  # NOWHERE stays below every node
        visits = (node == torch.arange(nodes, device=node.device)[:, None, None]).any(-1)  # [node, token]
        counts, known, sizes = visits.sum(1), None, None
        if routing.visits is not None:  # a dry run: every rank has the same table
            known, mine = routing.visits(nodes), across.rank()
            sizes = [nodes * size for size in routing.sizes[mine * per_node : (mine + 1) * per_node]]
        self.send_sizes = known or counts.tolist()
        pairs = torch.nonzero_static(visits, size=sum(self.send_sizes))  # by node, then by token
        to, self.tokens = pairs.unbind(1)
        chosen = routing.experts.index_select(0, self.tokens)
        elsewhere = node.index_select(0, self.tokens) != to[:, None]  # choices that are not in the node
        received = collectives.all_to_all(counts, across)
        self.receive_sizes = [known[mine]] * nodes if known else received.tolist()
        local = (chosen - to[:, None] * per_node).masked_fill(elsewhere, NOWHERE)
        local = self.crossed(local)  # [pairs here, k]
        probs = routing.probs.new_empty(len(local), per_node)  # its width is all that is asked for
        self.inside = Dispatch(Routing(local, probs.new_empty(local.shape), probs, sizes), inside)
        self.counts, self.sizes = self.inside.counts, self.inside.sizes

    def there(self, x: Tensor) -> Tensor:
        return self.inside.there(self.crossed(x.index_select(0, self.tokens), self.meanwhile))

    def back(self, y: Tensor, weights: Tensor) -> Tensor:
        weights = self.crossed(weights.index_select(0, self.tokens))
        partial = self.inside.back(y, weights)  # summed where the copy has entered the node
        sizes = dict(send_sizes=self.receive_sizes, receive_sizes=self.send_sizes)
        home = collectives.all_to_all(partial, self.across, meanwhile=self.meanwhile, **sizes)
        return combined(home, None, self.tokens, self.num_tokens)

    def crossed(self, pairs: Tensor, meanwhile: Meanwhile = None) -> Tensor:
        sizes = dict(send_sizes=self.send_sizes, receive_sizes=self.receive_sizes)
        return collectives.all_to_all(pairs, self.across, meanwhile=meanwhile, **sizes)


class TwoLevels(AllToAll):
    """As `AllToAll`, over the ranks of `across` and `inside`; in parts the levels overlap."""

    def __init__(
        self, across: ProcessGroup, inside: ProcessGroup, meanwhile: Meanwhile = None, parts: int = 1
    ):
        self.dispatch = partial(TwoLevelDispatch, across=across, inside=inside, meanwhile=meanwhile)
        self.parts = parts

    def __call__(self, x: Tensor, routing: Routing, experts: Callable) -> Tensor:
        if self.parts == 1:
            return super().__call__(x, routing, experts)
        return overlapped(
            x, [self.dispatch(part) for part in split(routing, self.parts)], routing.weights, experts
        )


def overlapped(x: Tensor, trips: Sequence[TwoLevelDispatch], weights: Tensor, experts: Callable) -> Tensor:
    """x [N, D] -> [N, D]: a part of the tokens has the wire between nodes while others have those inside,
    and while experts work. Backward goes the same ways back, overlapped alike."""
    sizes = [trip.num_tokens for trip in trips]
    each = zip(trips, x.split(sizes), weights.split(sizes))
    ready = [(trip, x, trip.crossed(weights.index_select(0, trip.tokens))) for trip, x, weights in each]
    return torch.cat(interleave(travel(*part, experts) for part in ready))


def travel(trip: TwoLevelDispatch, x: Tensor, weights: Tensor, experts: Callable) -> Generator:
    """A part's tokens x [n, D] across, to the experts inside, to work, and home on the same way: [n, D].
    `weights` [pairs here, k] are those of the copies that come to this rank."""

    def flight(one: TwoLevelDispatch | Dispatch, group: ProcessGroup, home: bool) -> Flight:
        ways = (one.send_sizes, one.receive_sizes), (one.receive_sizes, one.send_sizes)
        there, back = (
            partial(collectives.all_to_all, group=group, async_op=True, send_sizes=to, receive_sizes=of)
            for to, of in (ways[::-1] if home else ways)
        )
        return Flight(there, back)

    inside, across = trip.inside, flight(trip, trip.across, False)
    ticket = leave(x.index_select(0, trip.tokens), across)
    yield
    near = flight(inside, inside.group, False)
    ticket = leave(arrive(ticket, across).index_select(0, inside.tokens), near)
    yield
    rows = permuted(arrive(ticket, near), inside.order, inverse(inside.order))
    y = permuted(experts(rows, inside.counts, inside.sizes), inverse(inside.order), inside.order)
    ticket = leave(y, near := flight(inside, inside.group, True))
    del rows, y
    yield
    chosen = weights.flatten().index_select(0, inside.choices)
    sums = combined(arrive(ticket, near), chosen, inside.tokens, inside.num_tokens)
    ticket = leave(sums, across := flight(trip, trip.across, True))
    yield
    return combined(arrive(ticket, across), None, trip.tokens, trip.num_tokens)


def split(routing: Routing, parts: int) -> list[Routing]:
    """Its tokens in parts, one after the other; in a dry run with how many go where."""
    tensors = (tensor.tensor_split(parts) for tensor in (routing.experts, routing.weights, routing.probs))
    found, start = [], 0
    for part in map(Routing, *tensors):
        tokens = range(start, start := start + len(part.experts))
        if routing.visits is not None:
            visits = partial(visits_of, tokens, *routing.visits.args, **routing.visits.keywords)
            part = replace(part, visits=visits, sizes=tuple(visits(part.probs.shape[1])))
        found.append(part)
    return found


def visits_of(
    tokens: range, rows: int, length: int, k: int, experts: int, nodes: int, only=None
) -> list[int]:
    """As router.visits_in_turn, of some tokens."""
    visits = [0] * nodes
    for token in tokens:
        visited = {(token % length * k + j) % experts for j in range(k)}
        for node in {e * nodes // experts for e in visited if only is None or e in only}:
            visits[node] += 1
    return visits


def two_level_all_to_all(x: Tensor, across: ProcessGroup, inside: ProcessGroup) -> Tensor:
    """x [n·d, ..], d rows for each of all ranks -> [n·d, ..], from each. As `all_to_all` over all of them."""
    nodes, g = across.size(), inside.size()
    if x.dim() == 0 or x.shape[0] % (nodes * g):
        raise ValueError(f"x {list(x.shape)}: {nodes} nodes of {g} ranks need a multiple of {nodes * g} rows")
    blocks = x.unflatten(0, (nodes, g, -1))  # for whom
    met = collectives.all_to_all(blocks.transpose(0, 1).flatten(0, 2), inside)  # by place of the sender, node
    met = met.unflatten(0, (g, nodes, -1)).transpose(0, 1).flatten(0, 2)
    return collectives.all_to_all(met, across)  # by node of the sender, place


def copies(config: GPTConfig, strategy: Strategy) -> float:
    """To how many nodes a token goes: those of k experts that chance picks, at most the router's limit."""
    c, nodes = config.experts, strategy.ep // strategy.ep_node
    limit = (c.node_limit or c.route_nodes) * max(1, nodes / c.route_nodes)
    return min(limit, nodes * (1 - (1 - 1 / nodes) ** c.top_k))


def scattered(one: Pass, config: GPTConfig, strategy: Strategy) -> Pass:
    """A dry run's pass through a layer, with what a real router sends between nodes."""
    if config.experts is None or strategy.ep_node == 1:
        return one
    experts, k, nodes = config.experts.num_experts, config.experts.top_k, strategy.ep // strategy.ep_node
    tokens = experts // gcd(k, experts)
    times = copies(config, strategy) * tokens / sum(visits_in_turn(1, tokens, k, experts, nodes))
    more = lambda sent: replace(sent, payload_bytes=round(times * sent.payload_bytes))
    sent = (more(each) if each.axis == "ep_across" else each for each in one.collectives)
    return replace(one, collectives=tuple(sent))
