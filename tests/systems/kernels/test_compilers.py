"""Tiles that are made, loads that run ahead, blocks in order, groups that are fused: each beside every other choice."""

import itertools
import random

import pytest

from minitrain.attention.flash import flash_traffic, tile_sizes
from minitrain.systems.kernels.roller import A100, Core, pipelined, roller, tile_seconds
from minitrain.systems.kernels.tile_chains import MLP, PAIR, blocks, fused, orders, volume, welder
from minitrain.systems.kernels.tiles import traffic


def test_roller():
    """The best of all tiles, or within a tenth, for less than a hundredth of the trials."""
    draw = random.Random(0)
    small = Core(2.0, 0.05, 24 * 1024, 8, 16, 4)
    for sizes in ((160, 160, 160), (200, 72, 96), *(draw.choices(range(40, 161), k=3) for _ in range(4))):
        built = roller(*sizes, small)
        every = list(itertools.product(range(1, sizes[0] + 1), range(1, sizes[1] + 1), (8, 16, 32)))
        best = min(tile_seconds(sizes, tile, small) for tile in every)
        assert built.seconds <= 1.1 * best and built.tried < 0.01 * len(every), (sizes, built, best)
        assert all(size % small.unit == 0 for size in built.tile)
    built = roller(1024, 1024, 1024, A100)
    m, n, k = built.tile
    assert 2 * 2 * k * (m + n) + 4 * m * n <= A100.fast_bytes
    waves = -(-(-(-1024 // m) * -(-1024 // n)) // 108)
    by_hand = waves * -(-1024 // k) * max(2 * m * n * k * 108 / 312e12, 2 * k * (m + n) * 108 / 2039e9)
    assert built.seconds == pytest.approx(by_hand, rel=1e-12)
    assert tile_seconds((1024, 1024, 1024), (512, 512, 64), A100) == float("inf")
    with pytest.raises(ValueError, match="no tile of 16.3 fits 1,000 bytes"):
        roller(64, 64, 64, A100._replace(fast_bytes=1000))


def played(loads, compute: float, stages: int) -> float:
    """The same kernel second by second: a loader and a computer that look at the buffers."""
    now, full, loading, computing, done, waiting = 0, 0, 0, 0, 0, list(loads)
    busy = 0  # buffers that are being filled, are full or in use
    while done < len(loads):
        if not loading and waiting and busy < stages:
            loading, busy = waiting.pop(0), busy + 1
        if not computing and full:
            computing, full = compute, full - 1
        now += 1
        if loading:
            loading -= 1
            full += not loading
        if computing:
            computing -= 1
            done, busy = done + (not computing), busy - (not computing)
    return now


def test_alcop():
    """20 tiles, loads of 3 and products of 5: 160 with one buffer, 103 with two or more."""
    assert [pipelined([3] * 20, 5, stages)[-1][2] for stages in (1, 2, 3)] == [160, 103, 103]
    for n, load, compute in ((20, 3, 5), (7, 5, 3), (1, 2, 9)):
        assert pipelined([load] * n, compute, 1)[-1][2] == n * (load + compute)
        for stages in (2, 3, 5):
            ends = pipelined([load] * n, compute, stages)[-1][2]
            assert ends == load + (n - 1) * max(load, compute) + compute
    draw = random.Random(0)
    for _ in range(30):
        loads, compute, stages = draw.choices(range(1, 9), k=12), draw.randint(1, 6), draw.randint(1, 5)
        assert pipelined(loads, compute, stages)[-1][2] == played(loads, compute, stages)
    uneven = [2, 2, 2, 14] * 5
    assert [pipelined(uneven, 5, stages)[-1][2] for stages in (1, 2, 4)] == [200, 147, 105]


SHAPES = ((4, 3, 2, 5), (1, 6, 3, 2), (3, 1, 4, 3), (2, 4, 1, 1))


def test_chimera_compiler():
    """The closed form equals what the loops touch in 32 of 32 orders and shapes, and finds the best order."""
    equal, sizes = 0, {"A": 8, "B": 4, "D": 6, "E": 10}
    for counts in (dict(zip("mlnk", shape)) for shape in SHAPES):
        best = {}
        for order in orders(PAIR):
            formula = volume(PAIR, order, counts)
            at, seen, moved = {}, set(), dict.fromkeys("ABDE", 0)
            for place in itertools.product(*(range(counts[loop]) for loop in order)):
                m, l, n, k = (place[order.index(loop)] for loop in "mlnk")
                again = order.index("n") > order.index("k") and n > 0  # C of this m, l is there already
                complete = k == counts["k"] - 1
                first, second = dict(A=(m, k), B=(k, l)), dict(D=(l, n), E=(m, n))
                for array, tile in ((first if not again else {}) | (second if complete else {})).items():
                    if at.get(array) != tile:
                        moved[array] += 1 + (array == "E" and (array, tile) in seen)  # and back before
                        at[array] = tile
                        seen.add((array, tile))
            touches = list(blocks(PAIR, order, counts))
            for array in sizes:
                cached = traffic([touch for touch in touches if touch.array == array], 1)
                assert cached.loaded + cached.stored == moved[array]
            equal += formula == moved
            best[order] = sum(moved[array] * sizes[array] for array in sizes)
        cost = lambda order: sum(volume(PAIR, order, counts)[x] * sizes[x] for x in sizes)
        chosen = min(orders(PAIR), key=cost)
        assert best[chosen] == min(best.values())
    assert equal == 32


def test_welder():
    """An MLP fused moves 0.12 of the operators' sum at width 64 and more than the sum at 256: weights come again
    for every block of rows. What is fused is what is cheaper, and fits."""
    fast, ratios = 192 * 1024 // 4, {}
    for width in (64, 256, 512):
        sizes = {"m": 4096, "k": width, "l": 4 * width, "n": width}
        whole, alone = fused(MLP, sizes, fast), [fused([one], sizes, fast) for one in MLP]
        ratios[width] = round(whole.moved / sum(one.moved for one in alone), 2)
        b = whole.block
        arrays = ("mk", "kl", "ml", "ml", "ln", "mn")
        assert sum(b[x] * b[y] for x, y in arrays) <= fast
        if width == 512:
            continue  # as at 256
        groups = welder(MLP, sizes, fast)
        cuts = [[MLP], [MLP[:1], MLP[1:]], [MLP[:2], MLP[2:]], [[one] for one in MLP]]
        totals = [sum(fused(part, sizes, fast).moved for part in cut) for cut in cuts]
        assert sum(group.moved for group in groups) == min(totals)
        assert [g.outputs for g in groups] == ([("C", "G", "E")] if width == 64 else [("C",), ("G", "E")])
    assert ratios == {64: 0.12, 256: 1.02, 512: 1.3}
    tokens = 4096  # all weights stay on chip: only the rows go in and out
    assert fused(MLP, {"m": tokens, "k": 64, "l": 256, "n": 64}, fast).moved == 2 * tokens * 64 + 2 * 64 * 256
    outer, inner = tile_sizes(fast, 64)  # attention: Q Kᵀ, softmax, P V, in FlashAttention's blocks
    counts = {"m": -(-1024 // outer), "l": 1024 // inner, "k": 1, "n": 1}
    block = {"m": outer, "l": inner, "k": 64, "n": 64}
    axes = {"A": "mk", "B": "kl", "D": "ln", "E": "mn"}
    moved = volume(MLP, "mlkn", counts)
    elements = {array: moved[array] * block[x] * block[y] for array, (x, y) in axes.items()}
    flash = flash_traffic(2, 1024, 64, outer, inner, False)[0]
    assert elements["B"] + elements["D"] == flash.loads - 1024 * 64
    sizes = {"m": 1024, "k": 64, "l": 1024, "n": 64}
    apart = sum(fused([x], sizes, fast).moved for x in MLP)
    assert fused(MLP, sizes, fast).moved <= flash.elements < 0.25 * apart
    with pytest.raises(ValueError, match="no block of 16"):
        welder(MLP, sizes, 100)
