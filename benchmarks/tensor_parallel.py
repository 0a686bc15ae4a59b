"""Tensor parallelism against DTensor's `parallelize_module`: an MLP and a whole Transformer layer, forward
and backward, in turns.

Both cut the same model the same way: columns, then rows; with sequence parallelism the norms work on slices
of the sequence. The peer's plan gathers the input of Q, K and V once (`PrepareModuleInput` before the
attention), as torchtitan's does. Without sequence parallelism ours is overlap.py with whole sums (one piece):
the sum of dX travels behind the product for dW, as Megatron-LM has it. Two shapes, 256 and 512 tokens: with
more tokens products, which are the peer's too, take more of the time.
"""

from collections.abc import Callable
from functools import partial
from itertools import product

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from benchmarks.measure import Row, in_turns, one_after_the_other, row, slowest_then_median, stock_group
from minitrain import launch
from minitrain.data_parallel.bucketed import GradReducer
from minitrain.model.gpt import GPT, GPTConfig
from minitrain.ranks.mesh import Mesh
from minitrain.ranks.sharding import full_tensor, placement
from minitrain.tensor_parallel import overlap, sequence
from minitrain.tensor_parallel.model import cut_attention, cut_mlp

CONFIG = GPTConfig(
    vocab_size=64,
    d_model=512,
    num_layers=1,
    num_heads=8,
    max_positions=256,
    norm="layer",
    positions="learned",
    activation="gelu",
    bias=True,
)
LENGTH = 256
BATCHES = (1, 2)
LAUNCHES, TURNS = 3, 31


def our_layer(
    block: nn.Module, group: dist.ProcessGroup, sequence_parallel: bool
) -> tuple[nn.Module, GradReducer | None]:
    """The block cut by minitrain, and what sums the gradients of the parameters that see a slice of the
    sequence.
    """
    column, row = (
        (sequence.column, sequence.row)
        if sequence_parallel
        else (partial(way, chunks=1) for way in (overlap.column, overlap.row))
    )
    cut_attention(block.attention, CONFIG.head_dim, group, column, row)
    cut_mlp(block.mlp, group, column, row)
    sliced = [param for param in block.parameters() if not placement(param).shards]
    return block, GradReducer(sliced, group) if sequence_parallel else None


def their_layer(block: nn.Module, group: dist.ProcessGroup, sequence_parallel: bool) -> nn.Module:
    """The same block cut by DTensor."""
    outside = Shard(1) if sequence_parallel else Replicate()
    into = dict(input_layouts=(outside, None), desired_input_layouts=(Replicate(), None))
    plan = {
        "attention": PrepareModuleInput(**into),
        "mlp": PrepareModuleInput(input_layouts=(outside,), desired_input_layouts=(Replicate(),)),
        **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
        "attention.out": RowwiseParallel(output_layouts=outside),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=outside),
    }
    if sequence_parallel:
        plan |= {
            "norm1": SequenceParallel(use_local_output=True),
            "norm2": SequenceParallel(use_local_output=True),
        }
    return parallelize_module(block, DeviceMesh.from_group(group, "cpu"), plan)


def turn(
    batch: int, whole_layer: bool, sequence_parallel: bool, rounds: int
) -> tuple[list[float], list[float]]:
    """Seconds of our forward and backward and of theirs on this rank."""
    n = dist.get_world_size()
    group = Mesh(tp=n).group("tp")
    stock = stock_group(group)
    tokens = LENGTH // n if sequence_parallel else LENGTH
    x = torch.randn(batch, LENGTH, CONFIG.d_model, generator=torch.Generator().manual_seed(0))
    x = x.narrow(1, dist.get_rank() * tokens if sequence_parallel else 0, tokens).clone()
    positions = torch.arange(LENGTH)
    ours, reducer = our_layer(GPT(CONFIG, layers=[1]).layers[0], group, sequence_parallel)
    theirs = their_layer(GPT(CONFIG, layers=[1]).layers[0], stock, sequence_parallel)

    def step(block: nn.Module) -> Callable[[], torch.Tensor]:
        part = (lambda x: block(x, positions)) if whole_layer else block.mlp

        def run() -> torch.Tensor:
            block.zero_grad()
            own = x.detach().requires_grad_()
            part(own).square().sum().backward()
            if reducer and block is ours and whole_layer:
                reducer.finish()
            return own.grad

        return run

    if reducer and not whole_layer:
        reducer.close()
    times = in_turns(step(ours), step(theirs), rounds=rounds, meet=dist.barrier)
    drift = (step(ours)() - step(theirs)()).abs().max().item()
    weight = theirs.mlp.up.weight.grad
    drift = max(
        drift,
        (full_tensor(ours.mlp.up.weight.grad, ours.mlp.up.weight.placement.shards) - weight.full_tensor())
        .abs()
        .max()
        .item(),
    )
    assert drift < 1e-2 and isinstance(weight, DTensor), f"the two layers differ by {drift}"
    return times


def rows() -> list[Row]:
    table = []
    for batch, whole_layer, ranks, sequence_parallel in product(
        BATCHES, (False, True), (2, 4), (False, True)
    ):
        launches = [
            launch.run(
                turn, batch, whole_layer, sequence_parallel, TURNS, ranks=ranks, timeout_s=300, checked=False
            )
            for _ in range(LAUNCHES)
        ]
        ours, theirs = slowest_then_median(one_after_the_other(launches))
        name = (
            f"{'layer' if whole_layer else 'MLP'} {CONFIG.d_model} wide, {batch * LENGTH} tokens, tp={ranks}"
            f"{', sequence' if sequence_parallel else ''}"
        )
        table.append(row(name, "DTensor parallelize_module", ours * 1e3, theirs * 1e3, "ms", 0.9))
    return table
