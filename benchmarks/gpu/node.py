"""Several GPUs: a step of DP and of ZeRO beside torch's, and ranks that see one GPU each, as Slurm has it.

`ratios` is benchmarks/zero.py's turns on a model of 0.2 billion parameters, on as many ranks as GPUs. `bound`
runs under torchrun: each rank hides all GPUs but its own, is asked what it talks over, and trains with ZeRO-3
as one process does.
"""

from __future__ import annotations

import os
import sys

if sys.argv[1:2] == ["bound"] and os.environ.get("CUDA_VISIBLE_DEVICES") != "":  # before torch looks
    local, seen = os.environ["LOCAL_RANK"], os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = seen.split(",")[int(local)] if seen else local

from dataclasses import replace

import torch

from benchmarks import zero
from benchmarks.gpu.beside import told
from benchmarks.measure import Row, row, slowest_then_median
from minitrain import collectives, launch
from minitrain.model.config import GPTConfig
from minitrain.ranks.collectives import channel_of

LARGE = GPTConfig(vocab_size=2048, d_model=2048, num_layers=4, num_heads=16, max_positions=1024, tied=False)
PEERS = (
    (0, True, "DistributedDataParallel"),
    (1, True, "ZeroRedundancyOptimizer"),
    (2, False, "fully_shard, reshard_after_forward=False"),
    (3, True, "fully_shard"),
)


def ratios(tiny: bool) -> list[Row]:
    ranks, table = 2 if tiny else torch.cuda.device_count(), []
    size = (zero.CONFIG, 16) if tiny else (LARGE, 1024)
    for stage, reshard, peer in PEERS:
        given = stage, reshard, 3 if tiny else 15, *size
        times = launch.run(zero.turn, *given, ranks=ranks, timeout_s=120, checked=False)
        ours, theirs = slowest_then_median(times)
        name = f"{f'ZeRO-{stage}' if stage else 'data-parallel'} step, {ranks} GPUs"
        table.append(row(name, peer, ours * 1e3, theirs * 1e3, "ms", 1.0))
        print(f"{name}: {ours * 1e3:.2f} ms, {peer} {theirs * 1e3:.2f} ms", flush=True)
    return table


def look() -> tuple[str, str, float]:
    x = torch.ones(4, device=launch.device())
    total = collectives.all_reduce(x, collectives.world()).sum().item()
    return str(launch.device()), type(channel_of(collectives.world()).door("sum", x)).__name__, total


def bound(tiny: bool) -> list[Row]:
    """On each rank of the job."""
    from tests.compose.test_on_a_gpu import CLOSE, case_of, trained
    from tests.layouts import distance, one_process

    size = int(os.environ["WORLD_SIZE"])
    wanted = ("cpu", "Gloo", 4.0 * size) if torch.cuda.device_count() == 0 else ("cuda:0", "NCCL", 4.0 * size)
    found = launch.run(look, ranks=size)
    assert found == [wanted] * size, found
    case = case_of("ZeRO-3")
    case = replace(case, strategy=replace(case.strategy, dp=size), batch_sizes=(2 * size + 1, 2 * size))
    results, reference = launch.run(trained, case, ranks=size), one_process(case)
    mine = results[int(os.environ["RANK"])][1]  # a job hands a rank its own result as it is
    for one in (mine.grads, mine.params):
        one.update({name: value.cpu() for name, value in one.items()})
    far = max(distance(outcome, reference) for _, outcome in results)
    assert far < CLOSE, f"{far:.1e} from one process"
    if os.environ["RANK"] == "0":
        print(f"{size} ranks with {found[0][1]} on {found[0][0]} each: ZeRO-3 is {far:.1e} from one process")
    return []


if __name__ == "__main__":
    told(dict(ratios=ratios, bound=bound))
