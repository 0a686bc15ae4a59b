"""ZeRO against torch's own: stage 3 against `fully_shard`, stage 1 against `ZeroRedundancyOptimizer`; same
GPT, same ranks, in turns.

Peak memory is the most that torch's CPU allocator had given out during the third step, by the allocator's own
events, which torch's profiler records from the making of the model on; ours and theirs in a launch of their
own each.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.measure import Row, in_turns, most_in, row, slowest_then_median, stock_group
from minitrain import collectives, launch
from minitrain.data_parallel import states
from minitrain.data_parallel.replicated import Replicated
from minitrain.data_parallel.zero1 import Zero1
from minitrain.data_parallel.zero2 import Zero2
from minitrain.data_parallel.zero3 import Zero3
from minitrain.model.data.batches import random_tokens
from minitrain.model.gpt import GPT, GPTConfig, cross_entropy_sum
from minitrain.ranks.devices import now

CONFIG = GPTConfig(vocab_size=2048, d_model=320, num_layers=4, num_heads=8, tied=False)
BUCKET_BYTES = 4_000_000
LENGTH = 64


def sgd(params) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-3, momentum=0.9)


def steps(
    ours: bool, stage: int, reshard: bool, group: dist.ProcessGroup, config=CONFIG, length=LENGTH
) -> tuple[Callable[[], None], Callable[[str], torch.Tensor]]:
    """(one training step, the whole of a parameter by name) of a freshly built model."""
    rank, size = dist.get_rank(), dist.get_world_size()
    device = launch.device()
    drawn = random_tokens(0, rank, size, 4 * size, length, config.vocab_size, seed=1)
    tokens, targets = (x.to(device) for x in drawn)
    model = GPT(config, device=device)
    if ours:
        if stage == 3:
            zero = Zero3(model, group, sgd, reshard=reshard)
        else:
            zero = (Replicated, Zero1, Zero2)[stage](model, group, sgd, BUCKET_BYTES)

        def our_step() -> None:
            zero.zero_grad()
            (cross_entropy_sum(model(tokens), targets) / (targets.numel() * size)).backward()
            zero.finish()
            zero.step()

        return our_step, lambda name: states.full_tensor(zero, model.get_parameter(name))
    if stage > 1:
        mesh = DeviceMesh.from_group(group, device.type)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
        wrapped, optimizer = (
            fully_shard(model, mesh=mesh, reshard_after_forward=reshard),
            sgd(model.parameters()),
        )
    else:
        wrapped = DistributedDataParallel(
            model, bucket_cap_mb=BUCKET_BYTES / 2**20, gradient_as_bucket_view=True, process_group=group
        )
        theirs = dict(process_group=group, lr=1e-3, momentum=0.9)
        optimizer = sgd(model.parameters())
        if stage == 1:
            optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, **theirs)

    def their_step() -> None:
        optimizer.zero_grad()
        (cross_entropy_sum(wrapped(tokens), targets) / targets.numel()).backward()
        optimizer.step()

    return (
        their_step,
        lambda name: model.get_parameter(name).full_tensor() if stage > 1 else model.get_parameter(name),
    )


def turn(stage: int, reshard: bool, rounds: int, config=CONFIG, length=LENGTH) -> tuple[list, list]:
    """Seconds of our steps and of theirs on this rank."""
    torch.set_float32_matmul_precision("high")  # TF32, where there is a GPU
    stock = stock_group()
    (our_step, our_tensor), (their_step, their_tensor) = (
        steps(True, stage, reshard, dist.group.WORLD, config, length),
        steps(False, stage, reshard, stock, config, length),
    )
    ended = lambda step: lambda: (step(), now(launch.device()))
    meet = partial(collectives.barrier, collectives.world())
    times = in_turns(ended(our_step), ended(their_step), rounds=rounds, meet=meet)
    for name, _ in GPT(config, device="meta").named_parameters():
        drift = (our_tensor(name) - their_tensor(name)).abs().max().item()
        assert drift < 1e-4, f"{name} trained apart by {drift}"
    return times


def peak_bytes(ours: bool, stage: int, reshard: bool) -> int:
    """The most memory that tensors took at once on this rank, in the third step."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step, _ = steps(ours, stage, reshard, dist.group.WORLD)
        step()
        step()
        with record_function("measured"):
            step()
    return most_in("measured", profiler)


def rows() -> list[Row]:
    table = []
    cases = (
        (3, True, "fully_shard"),
        (3, False, "fully_shard, reshard_after_forward=False"),
        (1, True, "ZeroRedundancyOptimizer"),
    )
    for ranks in (2, 4):
        for stage, reshard, peer in cases:
            times = launch.run(turn, stage, reshard, 25, ranks=ranks, timeout_s=300, checked=False)
            ours, theirs = slowest_then_median(times)
            name = f"ZeRO-{stage} step, GPT 7.5M, {ranks} ranks"
            table.append(row(name, peer, ours * 1e3, theirs * 1e3, "ms", 1.0))
            ours, theirs = (
                max(launch.run(peak_bytes, side, stage, reshard, ranks=ranks, checked=False))
                for side in (True, False)
            )
            table.append(row(name.replace("step", "peak memory"), peer, ours / 1e6, theirs / 1e6, "MB", 1.0))
    return table
