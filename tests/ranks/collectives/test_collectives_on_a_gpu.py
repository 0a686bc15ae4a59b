"""On a GPU: every collective and message, of the host's tensors too, as plain sums and slices have it.

One rank alone speaks NCCL, with itself; two have a GPU each, or share one over gloo.
"""

import pytest
import torch

from minitrain import collectives, launch
from minitrain.ranks.collectives import channel_of


def x_of(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers, so that sums are exact in 8 bits of mantissa."""
    return (torch.arange(16).view(4, 4) * (rank + 1)).to(dtype)


def every_one(dtype: torch.dtype) -> dict:
    """What this rank gets, and by which door."""
    group, where = collectives.world(), launch.device()
    rank, n = group.rank(), group.size()
    x, here = x_of(rank, dtype).to(where), x_of(rank, dtype)
    after, before = (rank + 1) % n, (rank - 1) % n
    in_place = x.clone()
    sums = [collectives.all_reduce(x, group, async_op=True) for _ in range(3)]
    found = {
        "sum": collectives.all_reduce(x, group),
        "sum, in place": collectives.all_reduce(in_place, group, out=in_place),
        "sum, waited for last": [handle.wait() for handle in reversed(sums)][-1],
        "sum on the host": collectives.all_reduce(here, group),
        "maximum": collectives.all_reduce(x, group, op="max"),
        "gather": collectives.all_gather(x, group),
        "gather, columns": collectives.all_gather(x, group, 1),
        "scatter": collectives.reduce_scatter(x, group),
        "scatter, columns": collectives.reduce_scatter(x, group, 1),
        "all to all": collectives.all_to_all(x, group),
        "all to all, counts": collectives.all_to_all(
            x, group, send_sizes=[4 // n] * n, receive_sizes=[4 // n] * n
        ),
        "broadcast": collectives.broadcast(x, n - 1, group),
        "exchange": collectives.exchange(x, after, before, group),
        "rotate": collectives.rotate((x, x + 1), group)[1],
        "rotate, later": collectives.rotate(x, group, -1, async_op=True).wait(),
    }
    if n > 1:
        turns = [lambda: collectives.send(x, 1 - rank, group)]
        turns.append(lambda: found.update(message=collectives.receive(x, 1 - rank, group)))
        for turn in turns if rank == 0 else turns[::-1]:  # NCCL has one queue for a pair: no two sends first
            turn()
    collectives.barrier(group)
    where = {name: y.device.type for name, y in found.items()}
    return found, where, type(channel_of(group).door("sum", x)).__name__


def expected(rank: int, n: int, dtype: torch.dtype) -> dict:
    xs = [x_of(other, dtype) for other in range(n)]
    total, before, after = sum(xs), xs[rank - 1], xs[(rank + 1) % n]
    dealt = torch.cat([x.chunk(n)[rank] for x in xs])
    same = ("sum", "sum, in place", "sum, waited for last", "sum on the host")
    return dict.fromkeys(same, total) | {
        "maximum": xs[-1], "gather": torch.cat(xs), "gather, columns": torch.cat(xs, 1),
        "scatter": total.chunk(n)[rank], "scatter, columns": total.chunk(n, 1)[rank], "all to all": dealt,
        "all to all, counts": dealt, "broadcast": xs[-1], "exchange": before, "rotate": before + 1,
        "rotate, later": after, **({"message": before} if n > 1 else {}),
    }  # fmt: skip


def check(ranks: int, dtype: torch.dtype, **how) -> None:
    gpus = torch.cuda.device_count()
    for rank, (found, where, door) in enumerate(launch.run(every_one, dtype, ranks=ranks, **how)):
        wanted = expected(rank, ranks, dtype)
        assert found.keys() == wanted.keys()
        wrong = [name for name in wanted if not torch.equal(found[name], wanted[name])]
        assert not wrong, f"rank {rank}: {wrong}"
        assert {name for name, kind in where.items() if kind == "cpu"} == (
            {"sum on the host"} if gpus else set(where)
        )
        assert door == ("NCCL" if gpus >= ranks else "Gloo")


DTYPES = torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ranks", [1, 2])
def test_on_a_gpu(ranks, dtype):
    check(ranks, dtype)


@pytest.mark.cuda
def test_unchecked():
    check(2, torch.float32, checked=False)


@pytest.mark.parametrize("ranks", [1, 2])
def test_here(ranks):
    check(ranks, torch.bfloat16)
