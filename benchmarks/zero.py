"""ZeRO against torch's own: stage 3 against `fully_shard`, stage 1 against `ZeroRedundancyOptimizer`; same GPT, same ranks, in turns.

Peak memory is the most that tensors took at once during a step, by a ledger around one step of each.
"""
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from minitrain import launch
from minitrain.data import random_tokens
from minitrain.data_parallel.zero1 import Zero1
from minitrain.data_parallel.zero3 import Zero3
from minitrain.ledger import Ledger
from minitrain.model import GPT, GPTConfig, cross_entropy_sum

from benchmarks.measure import Row, in_turns, row, slowest_then_median, stock_group

CONFIG = GPTConfig(vocab_size=2048, d_model=320, num_layers=4, num_heads=8, tied=False)
BUCKET_BYTES = 4_000_000
LENGTH = 64


def sgd(params) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-3, momentum=0.9)


def turn(stage: int, reshard: bool, rounds: int) -> tuple[list[float], list[float], int, int]:
    """Seconds of our steps and of theirs on this rank, and the peak bytes of a step of each."""
    rank, size = dist.get_rank(), dist.get_world_size()
    tokens, targets = random_tokens(0, rank, size, 4 * size, LENGTH, CONFIG.vocab_size, seed=1)
    mine, theirs, stock = GPT(CONFIG), GPT(CONFIG), stock_group()
    if stage == 3:
        zero = Zero3(mine, dist.group.WORLD, sgd, reshard=reshard)
        mesh = DeviceMesh.from_group(stock, "cpu")
        for layer in theirs.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
        wrapped, optimizer = fully_shard(theirs, mesh=mesh, reshard_after_forward=reshard), sgd(theirs.parameters())
    else:
        zero = Zero1(mine, dist.group.WORLD, sgd, BUCKET_BYTES)
        wrapped = DistributedDataParallel(theirs, bucket_cap_mb=BUCKET_BYTES / 2**20, gradient_as_bucket_view=True, process_group=stock)
        optimizer = ZeroRedundancyOptimizer(theirs.parameters(), torch.optim.SGD, process_group=stock, lr=1e-3, momentum=0.9)

    def our_step() -> None:
        zero.zero_grad()
        (cross_entropy_sum(mine(tokens), targets) / (targets.numel() * size)).backward()
        zero.finish()
        zero.step()

    def their_step() -> None:
        optimizer.zero_grad()
        (cross_entropy_sum(wrapped(tokens), targets) / targets.numel()).backward()
        optimizer.step()

    times = in_turns(our_step, their_step, rounds=rounds, meet=dist.barrier)
    peaks = []
    for step in (our_step, their_step):
        with Ledger() as ledger:
            step()
        peaks.append(ledger.peak_bytes)
    for name, param in theirs.named_parameters():
        whole = param.full_tensor() if stage == 3 else param
        drift = (zero.full_tensor(mine.get_parameter(name)) - whole).abs().max().item()
        assert drift < 1e-4, f"{name} trained apart by {drift}"
    return *times, *peaks


def rows() -> list[Row]:
    table = []
    cases = ((3, True, "fully_shard"), (3, False, "fully_shard, reshard_after_forward=False"), (1, True, "ZeroRedundancyOptimizer"))
    for ranks in (2, 4):
        for stage, reshard, peer in cases:
            results = launch.run(turn, stage, reshard, 25, ranks=ranks, timeout_s=300, checked=False)
            ours, theirs = slowest_then_median([result[:2] for result in results])
            name = f"ZeRO-{stage} step, GPT 7.5M, {ranks} ranks"
            table.append(row(name, peer, ours * 1e3, theirs * 1e3, "ms", 1.0))
            peaks = [max(result[which] for result in results) / 1e6 for which in (2, 3)]
            table.append(row(name.replace("step", "peak memory"), peer, *peaks, "MB", 1.0))
    return table
