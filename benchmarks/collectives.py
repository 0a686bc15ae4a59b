"""Our collectives over send and receive against stock gloo's, 4 ranks, 256 KB to 16 MB."""
import torch
import torch.distributed as dist

from minitrain import collectives, launch

from benchmarks.measure import Row, in_turns, row, slowest_then_median

GOALS = {"reduce_scatter": 0.6, "all_gather": 1.0, "all_reduce": 1.0}
SIZES = (256_000, 1_000_000, 4_000_000, 16_000_000)


def turn(op: str, size_bytes: int, rounds: int) -> tuple[list[float], list[float]]:
    """Times of ours and of gloo's on this rank; `size_bytes` is the whole vector in float32."""
    group, n = dist.group.WORLD, dist.get_world_size()
    whole = torch.randn(size_bytes // 4 // n * n)
    part = whole[: whole.numel() // n].clone()
    out_whole, out_part = torch.empty_like(whole), torch.empty_like(part)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    pairs = {
        "reduce_scatter": (lambda: collectives.reduce_scatter(whole, group), lambda: scatter(out_part, whole)),
        "all_gather": (lambda: collectives.all_gather(part, group), lambda: gather(out_whole, part)),
        "all_reduce": (lambda: collectives.all_reduce(out_whole.zero_(), group, out=out_whole),
                       lambda: dist.all_reduce(out_whole.zero_())),
    }
    return in_turns(*pairs[op], rounds=rounds, meet=dist.barrier)


def rows() -> list[Row]:
    table = []
    for op, goal in GOALS.items():
        for size_bytes in SIZES:
            times = launch.run(turn, op, size_bytes, 31 if size_bytes < 10_000_000 else 15, ranks=4, checked=False)
            ours, theirs = slowest_then_median(times)
            table.append(row(f"{op}, 4 ranks, {size_bytes / 1e6:g} MB", "gloo", ours * 1e3, theirs * 1e3, "ms", goal))
    return table
