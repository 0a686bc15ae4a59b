"""Rooflines of real operators, and what a cache loads for orders of tiles, beside counts made another way."""

import torch
import torch.nn.functional as F

from minitrain.model.config import presets
from minitrain.model.gpt import GPT
from minitrain.plan.simulate.machines import machine
from minitrain.ranks.events import Compute
from minitrain.ranks.launch import dryrun
from minitrain.ranks.ledger import Ledger
from minitrain.systems.kernels import roofline, tiles


def counted(fn) -> list:
    """The events of a run without numbers: shapes as large as they come."""

    def inside():
        with Ledger() as ledger:
            fn()
        return ledger.events

    return dryrun.run(inside, ranks=1)


def test_nvidia_gpu_sm_hbm():
    """Ridges of 153 and 295; a product is above, a LayerNorm below; every operator of a GPT's step has its place."""
    a100, h100 = machine("a100").device, machine("h100").device
    assert [round(roofline.roof(1, 1, device).ridge) for device in (a100, h100)] == [153, 295]
    half = lambda *shape: torch.empty(*shape, dtype=torch.bfloat16)
    square = counted(lambda: half(4096, 4096) @ half(4096, 4096))
    norm = counted(lambda: F.layer_norm(half(4096, 4096), (4096,)))
    (mm,), (layer_norm, *_) = (roofline.operators(events, h100) for events in (square, norm))
    assert (mm.flops, mm.bytes, mm.limit) == (2 * 4096**3, 3 * 2 * 4096**2, "compute")
    assert mm.seconds == 2 * 4096**3 / 989.5e12 and layer_norm.limit == "memory"
    assert 4 * 4096**2 <= layer_norm.bytes <= 4.01 * 4096**2  # read and written, and two numbers a row
    assert layer_norm.seconds == layer_norm.bytes / 3350e9

    config = presets["small"]

    def step():
        model = GPT(config, dtype=torch.bfloat16)
        logits = model(torch.zeros(8, 256, dtype=torch.int64))
        F.cross_entropy(logits.flatten(0, 1), torch.zeros(8 * 256, dtype=torch.int64)).backward()

    events = [event for event in counted(step) if isinstance(event, Compute)]
    found = roofline.operators(events, h100)
    assert sum(one.calls for one in found) == len(events) > 100
    assert [sum(one.flops for one in found), sum(one.bytes for one in found)] == [
        sum(event.flops for event in events),
        sum(event.bytes for event in events),
    ]
    for one in found:
        assert (one.limit == "compute") == (one.flops * one.bandwidth >= one.bytes * one.peak)
        slower = max(one.flops / one.peak, one.bytes / 3350e9)
        assert one.seconds == slower and one.ridge == one.peak / 3350e9
    shares = roofline.table(found).splitlines()[1:]
    assert len(shares) == len(found) and abs(sum(float(line.split()[-2]) for line in shares) - 100) < 2


def forgets(touches, cache: int) -> int:
    """Loads by reuse distance: a tile is found if fewer than `cache` others were touched since."""
    order, known, loads = [], set(), 0
    for touch in touches:
        at = touch.array, touch.tile
        if at not in order[-cache:]:
            loads += at in known or not touch.writes
        if at in order:
            order.remove(at)
        order.append(at)
        known.add(at)
    return loads


def test_halide_tvm():
    """64^3 in all orders, tiled or not: one result; 33,280, 527,872 and 4,768 lines, two of them in closed form."""
    a, b = torch.randint(-8, 8, (2, 12, 12), generator=torch.Generator().manual_seed(0)).tolist()
    for order in tiles.ORDERS:
        for tile in (None, 5, 8):
            c = [[0] * 12 for _ in range(12)]
            for i, j, k in tiles.points(12, order, tile):
                c[i][j] += a[i][k] * b[k][j]
            assert c == (torch.tensor(a) @ torch.tensor(b)).tolist(), (order, tile)
    loaded = [
        tiles.traffic(tiles.lines(tiles.points(64, order, tile), 64, 8), 128 * 8).loaded // 8
        for order, tile in (("ijk", None), ("jki", None), ("ijk", 16))
    ]
    assert loaded == [64**2 // 8 + 64**3 // 8, 2 * 64**3 + 64**2 - 64**2 // 8, 4768]
    assert loaded[:2] == [33280, 527872]
    for order, tile in (("kij", None), ("jki", 4), ("ijk", 8)):
        touches = list(tiles.lines(tiles.points(16, order, tile), 16, 4))
        moved = tiles.traffic(touches, 20 * 4)
        assert moved.loaded == 4 * forgets(touches, 20)
        assert moved.loaded + 4 * moved.hits + 4 * 64 == 4 * len(touches)  # and 64 first writes
        everything = tiles.traffic(touches, 1e9)
        assert (everything.loaded, everything.stored) == (2 * 256, 256)


def test_triton_lang():
    """The tutorial's count: the first 9 blocks of C need 90 blocks in row-major order, 54 in groups of three rows."""
    for group_rows, want in ((1, 9 + 81), (3, 27 + 27)):
        touches = list(tiles.matmul_tiles(9, 9, 9, group_rows))
        assert len({touch[:2] for touch in touches[: 9 * 19] if not touch.writes}) == want
    for rows, columns, group_rows in ((9, 9, 3), (7, 5, 3), (4, 6, 8)):
        groups = [range(first, min(first + group_rows, rows)) for first in range(0, rows, group_rows)]
        order = [(row, column) for group in groups for column in range(columns) for row in group]
        assert [tiles.grouped(n, rows, columns, group_rows) for n in range(rows * columns)] == order
    loaded = [tiles.traffic(tiles.matmul_tiles(9, 9, 9, group_rows), 60).loaded for group_rows in (1, 3)]
    assert loaded == [9 * 9 + 9 * 81, 3 * (27 + 81)]  # B once a row of C, or once a group
