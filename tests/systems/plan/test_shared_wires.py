"""Traffic that meets, against what can be computed by hand and against all shifts."""

from fractions import Fraction as Part

from minitrain.systems.plan.shared_wires import (
    best_shift,
    bounced,
    compatibility,
    iterations,
    shifts,
    slow_link,  # fmt: skip
    sums_and_saves,
    uploads,
)


def test_rdma_gpudirect():
    """Through the host: S/card + 2 S/bus, and in k pieces S/card + 2 S/(k bus): two pieces' way over a bus."""
    for size, card, bus in ((64, 1, 2), (30, 2, 3), (64, 4, 4)):
        for k in (1, 2, 4, 16):
            assert bounced(size, card, bus, k).end_s == Part(size, card) + 2 * Part(size, k * bus)
    assert (bounced(64, 1, 2, 1).end_s, bounced(64, 1, 2, 16).end_s) == (128, 68)


def test_frontend_backend():
    """A save halves what a ring's hosts send on their link; on a network of its own it does not touch them."""
    runs = [sums_and_saves(8, 8, 16, *case) for case in ((0, True), (4, False), (4, True))]
    assert [max(run.end(f"sum {i}") for i in range(8)) for run in runs] == [8, 16, 8]
    assert [run.is_slowed("sum 0") for run in runs] == [False, True, False] and not runs[1].is_slowed("sum 7")


def test_pcie_tree():
    """Four behind a switch have a quarter each; two switches do not meet; lanes: 16 x 1, 2, 4 GB/s."""
    for rate in (16, 32, 64):
        four = uploads(range(4), 16, 4, rate)
        assert {piece.rate for pieces in four.pieces.values() for piece in pieces} == {Part(rate, 4)}
        some = range(4), [2], [0, 4], [0, 1, 4]
        assert [uploads(they, 16, 4, rate).end_s * rate / 16 for they in some] == [4, 1, 1, 2]


def test_cassini():
    """Half a period apart two jobs of half a period fit; a play of both agrees; a loop must agree with itself."""
    assert best_shift((12, 6), (12, 6)) == 6
    fits = [compatibility(((12, 6), (12, 6)), (0, shift)) for shift in (0, 3, 6)]
    assert fits == [Part(1, 2), Part(3, 4), 1]
    assert [iterations(shift, 6, 6, 6) for shift in (0, 3, 6)] == [[18] * 2, [15] * 2, [12] * 2]
    for first, second in (((6, 2), (4, 1)), ((6, 4), (4, 2)), ((5, 1), (3, 1))):
        busy = lambda job, shift: {(shift + j + i) % 60 for i in range(0, 60, job[0]) for j in range(job[1])}
        by_hand = [1 - Part(len(busy(first, 0) & busy(second, shift)), 60) for shift in range(second[0])]
        assert [compatibility((first, second), (0, shift)) for shift in range(second[0])] == by_hand
        assert best_shift(first, second) == by_hand.index(max(by_hand))
    tree = {("a", "1"): 0, ("b", "1"): 3, ("b", "2"): 1, ("c", "2"): 5}
    assert shifts(tree) == {"a": 0, "b": 3, "c": 7}, "on every link they are as far apart as it asks"
    assert shifts(tree | {("c", "1"): 2}) is None and shifts(tree | {("c", "1"): 7}) == shifts(tree)


def test_geo_pipeline_strati():
    """7B parameters, 2,048 x 4,096 activations, 5 Gb/s: a pipeline's cut is cheaper up to 834 microbatches."""
    for count, cheaper in ((8, "pipeline"), (834, "pipeline"), (835, "data")):
        seconds = slow_link(7 * 10**9, 2048 * 4096, count, 625 * 10**6)
        assert seconds == {"pipeline": Part(count * 2**24, 625 * 10**6), "data": Part(112, 5)}
        assert min(seconds, key=seconds.get) == cheaper
