"""Layers in parts and microbatches in turns equal the plain layer, send the same rows, and hide each transfer
behind a product: told by the order of events, never by a clock.
"""

from functools import cache

import pytest
import torch
import torch.nn.functional as F

from minitrain import collectives, launch
from minitrain.moe import experts, router
from minitrain.moe.dispatch import Dispatch
from minitrain.ranks.events import Issue, Wait
from minitrain.ranks.ledger import Ledger
from minitrain.systems.moe import overlapped_experts
from minitrain.systems.moe.overlapped_experts import backward_turns, forward_turns, layer_pieces
from minitrain.systems.plan import expert_overlap
from tests.moe.by_token import by_token, experts_of, grads_of, joined, loss_of, numbers, tokens_of
from tests.parallel import Traffic

N, D, WIDE, E = 24, 6, 10, 8
mask = torch.arange(N) % 4 != 1


def favoured(expert):
    """Scores that make an expert the best, or the best by far."""
    return F.one_hot(torch.as_tensor(expert), E).double()


CASES = {
    "spread": lambda s, part: router.top_k(s + 4 * favoured(torch.arange(N)[part] % E), 3),  # all visit all
    "masked": lambda s, part: router.top_k(s, 3, mask[part]),
    "nobody": lambda s, part: router.top_k(s, 2, torch.zeros(len(s), dtype=torch.bool)),
    "all on one expert": lambda s, part: router.switch(s + 50 * favoured(5)),
    "places dropped": lambda s, part: router.top_k(s, 2).without((torch.arange(N)[part] % 3 == 0)[:, None]),
}
WAYS = {
    "1 chunk": lambda *layer: overlapped_experts.by_capacity(*layer, chunks=1),
    "3 chunks": lambda *layer: overlapped_experts.by_capacity(*layer, chunks=3),
    "7 chunks": lambda *layer: overlapped_experts.by_capacity(*layer, chunks=7),
    "by peer": overlapped_experts.by_peer,
    "reused": lambda *layer: overlapped_experts.reused(*layer, chunks=3),
    "grouped": lambda x, routing, group, _, params: overlapped_experts.by_capacity(
        x, routing, group, experts.grouped, params
    ),
}
RUNS = [(1, "spread"), (2, "spread"), (2, "all on one expert"), *((4, case) for case in CASES)]
CHUNKS = {"1 chunk": 1, "3 chunks": 3, "7 chunks": 7}


def drawn(seed=0):
    return numbers((N, D), (D, E), (E, D, WIDE), (E, WIDE, D), seed=seed)


@cache
def one_process(case):
    """(y, gradients of x, router, up, down)"""
    tensors = x, gate, up, down = [tensor.requires_grad_() for tensor in drawn()]
    y = by_token(x, up, down, CASES[case](x @ gate, slice(None)))
    loss_of(y).backward()
    return y.detach(), *grads_of(*tensors)


def own_part(group):
    """Tokens and experts of this rank."""
    return tokens_of(N, group.rank(), group.size()), experts_of(E, group.rank(), group.size())


def words(events, products=True):
    """The life of rows as `+0` (transfer 0 leaves), `*` (a product), `-0` (it is awaited), numbered as they leave.

    Counts of rows, integers, cross before: the first all-to-all. Of an exchange the message that is sent counts."""
    found, names = [], {}
    for event in events:
        if isinstance(event, Issue) and event.op in ("all_to_all", "send"):
            names[event.id] = len(names)
            found.append(f"+{names[event.id]}")
        elif isinstance(event, Wait) and event.id in names:
            found.append(f"-{names[event.id]}")
        elif products and getattr(event, "flops", 0) and found[-1:] != ["*"]:
            found.append("*")
    return found


def read_backwards(found):
    """What leaves is awaited and what is awaited leaves; numbered as they leave."""
    names, mirrored = {}, []
    for word in reversed(found):
        if word != "*":
            names.setdefault(word[1:], len(names))
            word = ("-" if word[0] == "+" else "+") + str(names[word[1:]])
        mirrored.append(word)
    return mirrored


def on_a_rank(case, way):
    group = collectives.world()
    part, own = own_part(group)
    x, gate, up, down = drawn()
    tensors = x, gate, up, down = [t.clone().requires_grad_() for t in (x[part], gate, up[own], down[own])]
    routing = CASES[case](x @ gate, part)
    ledger = Ledger if case == "spread" else Traffic  # words have products
    with ledger() as forward:
        y = WAYS[way](x, routing, group, experts.loop, (up, down))
    loss = loss_of(y)
    with ledger() as backward:
        loss.backward()
    away = routing.experts // (E // group.size())
    table = torch.stack([(away == r).sum() for r in range(group.size())])
    events = [words(ledger.events) for ledger in (forward, backward)]
    calls = [ledger.num_calls(op) for ledger in (forward, backward) for op in ("all_to_all", "send")]
    sent = [ledger.sent_bytes() for ledger in (forward, backward)]
    equal = y.detach(), *grads_of(*tensors)
    return dict(equal=equal, words=events, calls=calls, sent=sent, table=table)


def all_cases():
    cases = [case for ranks, case in RUNS if ranks == collectives.world().size()]
    return {(case, way): on_a_rank(case, way) for case in cases for way in WAYS}


@cache
def launched(ranks):
    return launch.run(all_cases, ranks=ranks)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ranks, case", RUNS)
def test_equals_a_loop_over_tokens_in_one_process(ranks, case, way):
    outcomes = [rank[case, way]["equal"] for rank in launched(ranks)]
    for found, wanted in zip(joined(outcomes), one_process(case), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("ranks, case", RUNS[1:])
def test_the_same_bytes_in_more_messages(ranks, case):
    """Rows there and back, gradients there and back, the counts once; `reused` brings rows there once more."""
    outcomes = [rank[case, "by peer"] for rank in launched(ranks)]
    table = torch.stack([outcome["table"] for outcome in outcomes])
    away = table * (1 - torch.eye(ranks, dtype=torch.long))
    for rank, all_ways in enumerate(launched(ranks)):
        crossings = int(away[rank].sum() + away[:, rank].sum()) * D * 8
        counts = (ranks - 1) * (E // ranks) * 8
        for way in WAYS:
            again = int(away[rank].sum()) * D * 8 if way == "reused" else 0
            assert all_ways[case, way]["sent"] == [crossings + counts, crossings + again], way
        for way, chunks in CHUNKS.items():
            assert all_ways[case, way]["calls"] == [1 + 2 * chunks, 0, 2 * chunks, 0]
        assert all_ways[case, "by peer"]["calls"] == [1, 2 * (ranks - 1), 0, 2 * (ranks - 1)]


@pytest.mark.parametrize("ranks", [2, 4])
def test_tutel(ranks):
    """Chunk i+1 has left before the product of chunk i, and chunk i-1 is awaited after it; backward as well."""
    test_equals_a_loop_over_tokens_in_one_process(ranks, "spread", "3 chunks")
    for rank in launched(ranks):
        forward, backward = rank["spread", "3 chunks"]["words"]
        # 0 are the counts; rows leave as 1, 2, 4; results as 3, 5, 6
        assert forward == "+0 -0 +1 +2 -1 * +3 +4 -2 * +5 -3 -4 * +6 -5 -6".split()
        assert backward == [*read_backwards(forward[2:]), "*"]  # the last product is the router's
        assert backward == "+0 +1 -0 * +2 +3 -1 * +4 -2 -3 * +5 -4 -5 *".split()
        alone, alone_backward = rank["spread", "1 chunk"]["words"]
        assert alone == "+0 -0 +1 -1 * +2 -2".split()  # nothing is hidden
        assert alone_backward == "+0 -0 * +1 -1 *".split()


def test_fastermoe():
    """The rows of the next distance are on their way while those of this one are worked on, own rows first."""
    test_equals_a_loop_over_tokens_in_one_process(4, "spread", "by peer")
    test_the_same_bytes_in_more_messages(4, "spread")
    for rank in launched(4):
        forward, backward = rank["spread", "by peer"]["words"]
        assert forward == "+0 -0 +1 * +2 -1 * +3 +4 -2 * +5 -3 -4 * +6 -5 -6".split()
        assert backward == [*read_backwards(forward[2:]), "*"]


def test_reused_fetches_rows_and_gradients_behind_products():
    for rank in launched(2):
        forward, backward = rank["spread", "reused"]["words"]
        assert forward == rank["spread", "3 chunks"]["words"][0]
        # rows and gradients of a chunk leave together: 0 and 1, 2 and 3, 5 and 6; what comes home is 4, 7, 8
        assert backward == "+0 +1 +2 +3 -0 -1 * +4 +5 +6 -2 -3 * +7 -4 -5 -6 * +8 -7 -8 *".split()


# ---- who travels when ------------------------------------------------------------------------------------


def stays(number):
    """An all_to_all whose call of this number brings zeros in place of what others sent."""
    real, calls = collectives.all_to_all, []

    def all_to_all(x, group, **settings):
        calls.append(x)
        handle = real(x, group, **settings)
        if len(calls) != number:
            return handle
        nothing = torch.zeros_like(handle.wait())
        return collectives.Handle(lambda: None, lambda: nothing)

    return collectives, "all_to_all", all_to_all


def unsorted_parts():
    real = overlapped_experts.Part.__init__
    init = lambda self, sent, order, *rest: real(self, sent, torch.arange(len(order)), *rest)
    return overlapped_experts.Part, "__init__", init


MISTAKES = {  # (what to replace, where the difference is seen: in y, in the gradient of x, of up)
    "results in the order of experts": (
        lambda: (overlapped_experts.Part, "home", property(lambda part: torch.arange(len(part.order)))),
        0,
    ),
    "rows in the order of arrival": (unsorted_parts, 0),
    "rows stay": (lambda: stays(2), 0),
    "results stay": (lambda: stays(4), 0),
    "gradients stay": (lambda: stays(9), 1),
    "gradients on their way to experts stay": (lambda: stays(8), 3),
}


def all_mistakes(way):
    """How far y and the gradients are from the right ones with each mistake planted."""
    right, apart = on_a_rank("spread", way)["equal"], {}
    for name, (mistake, _) in MISTAKES.items():
        where, attribute, wrong = mistake()
        real = getattr(where, attribute)
        setattr(where, attribute, wrong)
        found = on_a_rank("spread", way)["equal"]
        setattr(where, attribute, real)
        apart[name] = [float((a - b).abs().max()) for a, b in zip(found, right)]
    return apart


@pytest.mark.parametrize("way", ["3 chunks", "reused"])
def test_mistakes_are_seen(way):
    for apart in launch.run(all_mistakes, way, ranks=2):
        for name, (_, where) in MISTAKES.items():
            assert apart[name][where] > 1e-3, name


# ---- memory ----------------------------------------------------------------------------------------------

TOKENS = 64  # a rank; each expert of a rank gets as many of each rank


def held(way, chunks, backward):
    """Bytes of rows that experts read: (the most at any time, the most at a product), in forward or backward."""
    group = collectives.world()
    x, gate = torch.randn(TOKENS, D).requires_grad_(), torch.randn(D, E).requires_grad_()
    up, down = (t.float()[: E // group.size()].clone().requires_grad_() for t in drawn()[2:])
    routing = router.balanced(x @ gate, 2, torch.arange(TOKENS)[None])
    with Ledger() as forward:
        y = way(x, routing, group, experts.loop, (up, down), chunks=chunks)
    with Ledger() as ledger:
        y.sum().backward()
    ledger = ledger if backward else forward
    live = dict(ledger.timeline())
    products = (i for i, event in enumerate(ledger.events) if i in live and getattr(event, "flops", 0))
    buffers = {i: kinds["buffers"] for i, kinds in live.items()}
    return max(buffers.values()), max(buffers[i] for i in products)


def all_held():
    ways = overlapped_experts.by_capacity, overlapped_experts.reused
    return [[held(way, chunks, back) for chunks in (4, 8)] for way in ways for back in (False, True)]


def test_mpipemoe():
    """Buffers of r chunks become two, a third while rows are sorted; in backward gradients have as many. Rows and middle
    come again in the way that what is dear does not ask for."""
    for times, choice in (
        ((1, 1, 13, 13), ("send again", "compute again")),  # copies are dear
        ((13, 1, 1, 60), ("offload", "compute again")),  # crossings, and copies of the middle
        ((1, 13, 60, 1), ("send again", "offload")),  # products, and copies of rows
        ((9, 9, 1, 1), ("offload", "offload")),
    ):
        assert expert_overlap.mpipemoe_choice(expert_overlap.Chunk(*times), 8) == choice
    rows = 2 * TOKENS * D * 4  # of a rank, at its experts
    for rank in launch.run(all_held, ranks=2):
        for kept, kept_back, forward, backward, chunks in zip(*rank, (4, 8)):
            chunk = rows // chunks
            assert kept == (rows + chunk, rows) and kept_back == (0, 0)
            assert forward == (3 * chunk, 2 * chunk) and backward == (5 * chunk, 4 * chunk)
            for_products = expert_overlap.mpipemoe_rows(2 * TOKENS, chunks, reused=True) * D * 4
            assert forward[1] == for_products
    test_equals_a_loop_over_tokens_in_one_process(2, "spread", "reused")
    test_the_same_bytes_in_more_messages(2, "spread")


# ---- two microbatches in turns ---------------------------------------------------------------------------

LAYERS = 2


class Tiny:
    """Two layers: a product where attention would be, then experts; the parameters of a rank."""

    def __init__(self, group, *, later=False):
        drawn_of = [drawn(seed) for seed in range(LAYERS)]
        _, own = own_part(group)
        self.params = [
            [t.clone().requires_grad_() for t in (x[:D] / 4, gate, up[own] / 4, down[own] / 4)]
            for x, gate, up, down in drawn_of
        ]
        self.pieces = []
        for mix, gate, up, down in self.params:
            before = lambda x, mix=mix: x + torch.tanh(x @ mix)
            route = lambda h, gate=gate: router.top_k(h @ gate, 2)
            dense = [mix, gate] if later else None
            self.pieces += layer_pieces(before, route, experts.loop, [up, down], group, dense=dense)

    def plain(self, x, group):
        for mix, gate, up, down in self.params:
            h = x + torch.tanh(x @ mix)
            routing = router.top_k(h @ gate, 2)
            way = Dispatch(routing, group)
            x = h + way.back(experts.loop(way.there(h), way.counts, up, down), routing.weights)
        return x


def microbatches(part):
    return [drawn(seed)[0][part].requires_grad_() for seed in (7, 8)]


def dy_of(y):
    return torch.cos(torch.arange(N * D, dtype=y.dtype)).view(N, D)[own_part(collectives.world())[0]] / 10


def labelled(turns, ledger, name):
    """The same turns, with their events under a name."""
    while True:
        with ledger.phase(name):
            try:
                next(turns)
            except StopIteration as end:
                return end.value
        yield


def pair_on_a_rank(how):
    """Backward of microbatch b and forward of a in turns or in a row; then the backward of a."""
    group = collectives.world()
    a, b = microbatches(own_part(group)[0])
    tiny = Tiny(group, later=how == "weights")
    with Ledger() as ledger:
        if how == "plain":
            ys = [tiny.plain(x, group) for x in (a, b)]
            for y in ys:
                y.backward(dy_of(y))
            return [y.detach() for y in ys], [a.grad, b.grad], [grads_of(*p) for p in tiny.params]
        with ledger.phase("before"):
            ((y_b, kept_b),) = overlapped_experts.interleave([forward_turns(tiny.pieces, b)])
        both = [backward_turns(kept_b, dy_of(y_b)), forward_turns(tiny.pieces, a)]
        both = [labelled(turns, ledger, name) for turns, name in zip(both, "BF")]
        if how == "row":
            ((dx_b,), ((y_a, kept_a),)) = (overlapped_experts.interleave([turns]) for turns in both)
        else:
            dx_b, (y_a, kept_a) = overlapped_experts.interleave(both, enter=2)
        assert not (kept_b or y_a.requires_grad or y_b.requires_grad)
        with ledger.phase("after"):
            (dx_a,) = overlapped_experts.interleave([backward_turns(kept_a, dy_of(y_a))])
    events = [event for event in ledger.events if getattr(event, "phase", "B") in "BF"]
    grads = [grads_of(*p) for p in tiny.params]
    return [y_a, y_b], [dx_a, dx_b], grads, story(events), ledger.flops_by_phase, ledger.sent_bytes()


def story(events):
    """Events of a pair in words: `+0 F` a transfer leaves, `-0` it is awaited, `* F` products. Counts of rows cross
    at once: what is awaited where it is issued is `blocking`."""
    found, names = [], {}
    for event, after in zip(events, [*events[1:], None]):
        if isinstance(event, Issue):
            if after == Wait(event.id):
                found.append("blocking")
                continue
            names[event.id] = len(names)
            found.append(f"+{names[event.id]} {(event.phase or event.site)[-1]}")
        elif isinstance(event, Wait) and event.id in names:
            found.append(f"-{names[event.id]}")
        elif getattr(event, "flops", 0):
            word = f"* {(event.phase or event.name)[-1].replace('W', 'B')}"
            found += [word] * (found[-1:] != [word])
    return found


def all_pairs():
    ways = "plain", "row", "turns", "weights"
    return {way: pair_on_a_rank(way) for way in (ways if collectives.world().size() > 1 else ways[:1])}


@cache
def paired(ranks):
    return launch.run(all_pairs, ranks=ranks)


def flat(outcomes, how):
    """As one process has it: outputs and input gradients side by side, the gradients of dense parameters added."""
    ys, dxs, params = zip(*(rank[how][:3] for rank in outcomes))
    together = [torch.cat(parts) for of in (ys, dxs) for parts in zip(*of)]
    for mix, gate, up, down in (zip(*layer) for layer in zip(*params)):
        together += [sum(mix), sum(gate), torch.cat(up), torch.cat(down)]
    return together


@pytest.mark.parametrize("how", ["plain", "row", "turns", "weights"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_pair_equals_one_after_the_other_in_one_process(ranks, how):
    for found, wanted in zip(flat(paired(ranks), how), flat(paired(1), "plain"), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("how", ["turns", "weights"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_all_to_all_of_a_pair_is_in_flight_behind_a_product_of_the_other(ranks, how):
    test_a_pair_equals_one_after_the_other_in_one_process(ranks, how)
    for rank in paired(ranks):
        found = rank[how][3]
        assert found.count("blocking") == LAYERS  # the counts of the forward
        found = [word for word in found if word != "blocking"]
        for number in range(4 * LAYERS):
            (start,) = (i for i, word in enumerate(found) if word.startswith(f"+{number} "))
            behind = found[start + 1 : found.index(f"-{number}")]
            assert f"* {'B' if found[start][-1] == 'F' else 'F'}" in behind
        # what is replayed at full size is this order
        events = expert_overlap.pair_events(
            expert_overlap.DEEPSEEK_V3, 8, expert_overlap.REPORTED, how, LAYERS
        )
        assert found == story(events)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_pair_sends_the_same_and_computes_five_products_of_experts_for_four(ranks):
    for number, rank in enumerate(paired(ranks)):
        row, turns, weights = (rank[how] for how in ("row", "turns", "weights"))
        assert row[5] == turns[5] == weights[5] and row[4] == turns[4]
        tokens = N // ranks if ranks == 2 else [12, 4, 4, 4][number]
        before_experts = LAYERS * 2 * tokens * D * (D + E)
        one_of_experts = (row[4]["before"] - before_experts) // 2
        one_of_routers = LAYERS * 2 * tokens * D * E
        assert weights[4]["B"] - row[4]["B"] == one_of_experts + one_of_routers
        assert row[4]["B"] == 2 * row[4]["before"]


def frozen_on_a_rank(how):
    """Nobody asks for the gradient of x or of the first product; of the second layer up is frozen."""
    group = collectives.world()
    tiny = Tiny(group, later=how == "weights")
    for layer, param in ((0, 0), (1, 2)):
        tiny.params[layer][param].requires_grad_(False)
    x = microbatches(own_part(group)[0])[0].detach()
    if how == "plain":
        y = tiny.plain(x, group)
        y.backward(dy_of(y))
    else:
        ((y, kept),) = overlapped_experts.interleave([forward_turns(tiny.pieces, x)])
        both = [backward_turns(kept, dy_of(y)), forward_turns(tiny.pieces, x)]
        assert overlapped_experts.interleave(both, enter=2)[0] is None
    return [param.grad for layer in tiny.params for param in layer]


def reused_on_a_rank(way):
    """The gradients of up and down with down frozen, and with up."""
    group = collectives.world()
    part, own = own_part(group)
    grads = []
    for frozen in (0, 1):
        x, gate, *params = drawn()
        params = [param[own].clone().requires_grad_(i != frozen) for i, param in enumerate(params)]
        x = x[part]
        y = way(x, router.top_k(x @ gate, 2), group, experts.loop, params)
        loss_of(y).backward()
        grads += [param.grad for param in params]
    return grads


def test_frozen_experts_with_reused_buffers():
    ways = overlapped_experts.by_capacity, overlapped_experts.reused
    for plain, reused in launch.run(lambda: [reused_on_a_rank(way) for way in ways], ranks=2):
        for grads in (plain, reused):
            assert [grad is None for grad in grads] == [True, False, False, True]
        for i in (1, 2):
            torch.testing.assert_close(plain[i], reused[i], rtol=0, atol=1e-12)


def test_frozen_parameters():
    ways = "plain", "turns", "weights"
    for found in launch.run(lambda: [frozen_on_a_rank(how) for how in ways], ranks=2):
        for plain, *others in zip(*found):
            for other in others:
                assert (plain is None) == (other is None)
                if plain is not None:
                    torch.testing.assert_close(other, plain, rtol=0, atol=1e-12)
