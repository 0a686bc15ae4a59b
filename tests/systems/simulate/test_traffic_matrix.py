"""Who sends to whom: the matrix beside the messages that ranks really sent, meshes filled from one rank per stage, and
the figure of InternLM-2's 128 GPUs.
"""

from collections import Counter
from dataclasses import replace
from fractions import Fraction
from functools import partial

import pytest

from minitrain import launch
from minitrain.compose.parallelize import parallelize
from minitrain.model.config import GPTConfig
from minitrain.model.data.batches import Rows, random_tokens
from minitrain.model.training.optim import AdamW
from minitrain.plan.strategy import Strategy
from minitrain.ranks.collectives import transport
from minitrain.ranks.events import Compute, Issue, Wait
from minitrain.ranks.launch import dryrun
from minitrain.ranks.ledger import Ledger
from minitrain.systems.simulate.traffic_matrix import every_rank, places_of, renumbered, traffic
from tests.parallel import Traffic

TINY = GPTConfig(vocab_size=64, d_model=32, num_layers=2, num_heads=4, d_ff=64, max_positions=16)


def rows_of(count):
    return Rows(partial(random_tokens, batch_size=count, length=16, vocab=64), count, 16)


def step(config, strategy, ledger):
    run = parallelize(config, strategy, partial(AdamW, lr=1e-2))
    batch = run.batch(rows_of(8), 0)
    with ledger() as ledger:
        run.step(batch)
    return ledger.events


def dry(config, strategy, ranks, ledger):
    return {r: dryrun.run(step, config, strategy, ledger, rank=r, ranks=strategy.ranks) for r in ranks}


def counted(strategies):
    """Of each strategy the events, and the bytes by destination where they are handed to the network."""
    post, found = transport.post_send, []
    sent: Counter = Counter()

    def counting(ch, call, tensor, to, tag):
        if call is not None and tensor.numel():
            sent[call.members[to] if call.peer is None else call.peer] += tensor.nbytes
        return post(ch, call, tensor, to, tag)

    transport.post_send = counting
    try:
        for strategy in strategies:
            run = parallelize(TINY, strategy, partial(AdamW, lr=1e-2))
            batch = run.batch(rows_of(8), 0)
            sent.clear()
            with Traffic() as ledger:
                run.step(batch)
            found.append((ledger.events, dict(sent)))
    finally:
        transport.post_send = post
    return found


def test_the_matrix_has_the_messages_that_were_sent():
    """Of every rank and every destination, the bytes that went there; as rings the rows have the same sums."""
    strategies = [
        Strategy(tp=4), Strategy(tp=4, sequence_parallel=True), Strategy(dp=4, zero=1),
        Strategy(dp=2, pp=2, microbatches=2, zero=3, order="pp-dp-cp-tp"), Strategy(cp=4, core="ulysses"),
        Strategy(cp=2, tp=2),
    ]  # fmt: skip
    for strategy, *ranks in zip(strategies, *launch.run(counted, strategies, ranks=4)):
        events = {rank: events for rank, (events, _) in enumerate(ranks)}
        ours, rings = (traffic(events, 4, way) for way in ("direct", "ring"))
        wanted = {(rank, to): sent for rank, (_, by) in enumerate(ranks) for to, sent in by.items()}
        assert ours.pairs() == wanted, strategy
        for rank in range(4):
            rows = [sum(n for (a, _), n in matrix.pairs().items() if a == rank) for matrix in (ours, rings)]
            sent = sum(event.sent_bytes for event in events[rank] if isinstance(event, Issue))
            assert rows[0] == rows[1] == sent
    assert len(traffic(events, 4).talking("tp")) == 4  # two groups of two, both ways


def call(op, sent, members=(0, 2, 4), id=0):
    return Issue(id, op, "tp", members, sent, sent, 0, "here.py:1")


def test_each_call_by_itself():
    """By hand, on the three even ranks of six."""
    one = lambda op, way, rank=2: traffic(
        {rank: [call(op, 12), Compute("mm", 1, 1), Wait(0)]}, 6, way
    ).pairs()
    for op in ("all_gather", "reduce_scatter", "all_reduce"):
        assert one(op, "ring") == {(2, 4): 12} and one(op, "ring", 4) == {(4, 0): 12}
        assert one("all_to_all", "ring") == one("all_to_all", "direct") == {(2, 4): 6, (2, 0): 6}
    assert one("all_gather", "direct") == {(2, 4): 12}
    assert one("reduce_scatter", "direct") == {(2, 4): 6, (2, 0): 6}
    assert one("all_reduce", "direct") == {(2, 4): 6 + 3, (2, 0): 3}
    odd = traffic({2: [call("all_to_all", 13)]}, 6)
    assert odd.pairs() == {(2, 4): 7, (2, 0): 6} and odd.pairs("dp") == {}
    assert odd.talking() == {(2, 4), (4, 2), (2, 0), (0, 2)}
    message = [call("send", 5, (2, 3)), call("receive", 0, (3, 2), 1), call("barrier", 0, id=2)]
    assert traffic({2: message}, 6).pairs() == {(2, 3): 5}
    assert odd.leaving(2) == 13 and odd.leaving(4) == 7 and odd.leaving(6) == 0
    assert odd.offsets() == {-2: 1, 2: 1} and [*odd.offsets()] == [-2, 2]
    turned = renumbered({rank: [] for rank in range(4)}, {"dp": 2, "tp": 2}, ["tp", "dp"])
    assert [*turned] == [0, 1, 2, 3], "in the order of the new ranks"


def plain(events_by_rank, sent_only):
    """Ranks of cp compute different tiles of a causal mask; a group over two axes is named in the mesh's order."""
    name = lambda call: replace(call, axis="_".join(sorted(call.axis.split("_"))))
    known = lambda one: [name(one)] if isinstance(one, Issue) else [one] * (not sent_only)
    return {rank: [one for event in e for one in known(event)] for rank, e in events_by_rank.items()}


@pytest.mark.parametrize(
    "strategy, order",
    [
        (Strategy(dp=2, pp=2, tp=2, microbatches=2, zero=1, sequence_parallel=True), "tp-dp-cp-pp"),
        (Strategy(dp=2, cp=2, pp=2, microbatches=2, zero=3, order="pp-dp-tp-cp"), "dp-pp-tp-cp"),
    ],
    ids=str,
)
def test_a_mesh_is_filled_from_one_rank_per_stage(strategy, order):
    """And in another order it has the events of a dry run of that order."""
    sent_only = strategy.cp > 1
    events = partial(dry, TINY, ranks=range(8), ledger=Traffic if sent_only else Ledger)
    whole, sizes, alike = events(strategy), strategy.axes, [axis for axis in strategy.axes if axis != "pp"]
    places = [dict(zip(sizes, place)) for place in places_of(sizes)]
    stages = [rank for rank in whole if not any(places[rank][axis] for axis in alike)]
    assert len(stages) == 2
    filled = every_rank({rank: whole[rank] for rank in stages}, sizes, alike)
    assert plain(filled, sent_only) == plain(whole, sent_only)
    other = replace(strategy, order=order)
    assert list(other.axes) != list(sizes)
    assert plain(renumbered(whole, sizes, other.axes), sent_only) == plain(events(other), sent_only)


@pytest.fixture(scope="module")
def internlm2():
    """Events of all 128 ranks: tp 8 inside, dp 4 with ZeRO-1, pp 4 outside; tiny layers, for pairs need no size."""
    strategy = Strategy(dp=4, pp=4, tp=8, zero=1, microbatches=2, order="pp-dp-cp-tp", sequence_parallel=True)
    events = dry(replace(TINY, num_layers=4, num_heads=8), strategy, range(0, 128, 32), Traffic)
    return every_rank(events, strategy.axes, alike=("dp", "tp"))


def test_case_internlm2_heatmap(internlm2):
    """8 x 4 x 4 = 128. Rings: 704 of 16,384 cells, 4.3 %, lines at ±32 of pp, +8 and -24 of dp. Filled squares of tp and
    six lines of dp are what members do who all send to each other: then it is 9.0 %."""
    assert len(internlm2) == 128
    rings, direct = traffic(internlm2, 128), traffic(internlm2, 128, "direct")
    sums = {axis for axis in rings.by_axis if "dp" in axis}  # norms are summed over dp and tp together
    assert rings.offsets("pp") == {-32: 96, 32: 96}
    assert rings.offsets("dp") == {-24: 32, 8: 96} and rings.offsets("tp") == {-7: 16, 1: 112}
    axes = ("dp", "pp", "tp")
    assert len(rings.pairs(*axes)) == 448 and len(rings.talking(*axes)) == 704
    assert round(100 * Fraction(704, 128**2), 1) == Fraction(43, 10)
    assert direct.offsets("dp").keys() == {-24, -16, -8, 8, 16, 24}  # six lines
    squares = {(a, b) for a in range(128) for b in range(128) if a // 8 == b // 8 and a != b}
    assert direct.pairs("tp").keys() == squares and len(squares) == 16 * 8 * 7
    assert len(direct.talking(*axes)) == 16 * 56 + 128 * 3 + 192 == 1472 and sums == {"dp", "dp_tp"}
    for matrix in (rings, direct):  # nothing of tp leaves its node, everything of dp and pp does
        assert matrix.leaving(8, "tp") == 0
        assert all(matrix.leaving(8, axis) == sum(matrix.pairs(axis).values()) > 0 for axis in ("dp", "pp"))
