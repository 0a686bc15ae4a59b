"""Our collectives over send and receive against stock gloo's, 4 ranks, 256 KB to 16 MB.

A turn is as many calls as move 4 MB, so that a short call is not measured by how far apart the ranks leave
the barrier. Where the processes of a launch land on the cores moves a ratio more than turns do: the medians
are over the turns of several launches.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

from benchmarks.measure import Row, in_turns, one_after_the_other, row, slowest_then_median, stock_group
from minitrain import collectives, launch

GOALS = {"reduce_scatter": 0.6, "all_gather": 1.0, "all_reduce": 1.0}
LAUNCHES, TURNS = 5, 31
SIZES = (256_000, 1_000_000, 4_000_000, 16_000_000)


def turn(op: str, size_bytes: int, calls: int, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds a call of ours and of gloo's took on this rank, in each turn; `size_bytes` is the whole vector
    in float32.
    """
    group, stock, n = dist.group.WORLD, stock_group(), dist.get_world_size()
    whole = torch.randn(size_bytes // 4 // n * n)
    part = whole[: whole.numel() // n].clone()
    out_whole, out_part = (
        torch.zeros_like(whole),
        torch.empty_like(part),
    )  # summed in place, zeros stay what they are
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    ours, theirs = {
        "reduce_scatter": (
            lambda: collectives.reduce_scatter(whole, group, out=out_part),
            lambda: scatter(out_part, whole, group=stock),
        ),
        "all_gather": (
            lambda: collectives.all_gather(part, group, out=out_whole),
            lambda: gather(out_whole, part, group=stock),
        ),
        "all_reduce": (
            lambda: collectives.all_reduce(out_whole, group, out=out_whole),
            lambda: dist.all_reduce(out_whole, group=stock),
        ),
    }[op]
    times = in_turns(repeated(ours, calls), repeated(theirs, calls), rounds=rounds, meet=dist.barrier)
    return tuple([seconds / calls for seconds in side] for side in times)


def repeated(call: Callable[[], object], times: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(times):
            call()

    return run


def rows() -> list[Row]:
    table = []
    for op, goal in GOALS.items():
        for size_bytes in SIZES:
            calls = max(1, 4_000_000 // size_bytes)
            launches = [
                launch.run(turn, op, size_bytes, calls, TURNS, ranks=4, checked=False)
                for _ in range(LAUNCHES)
            ]
            ours, theirs = slowest_then_median(one_after_the_other(launches))
            table.append(
                row(f"{op}, 4 ranks, {size_bytes / 1e6:g} MB", "gloo", ours * 1e3, theirs * 1e3, "ms", goal)
            )
    return table
