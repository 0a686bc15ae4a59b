"""Two axes at once against torch's own: dp 2 x tp 2 against `parallelize_module` with `fully_shard`, dp 2 x
pp 2 against `torch.distributed.pipelining` with DistributedDataParallel. The same GPT, whole training steps
with SGD, 4 ranks, in turns.

Ours is what `parallelize` makes of a Strategy. A rank of the pipeline has 8 microbatches of one sequence of
64 tokens, as in pipeline.py; with 128 tokens both compute twice as much between the same messages, and the
ratio is 0.92 to 0.95.
Peak memory is the most that torch's CPU allocator had given out during the third step, by its own events
(torch's profiler), ours and theirs in a launch of their own each.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining.schedules import Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.measure import (
    Row,
    in_turns,
    most_in,
    one_after_the_other,
    row,
    slowest_then_median,
    stock_group,
)
from minitrain import launch
from minitrain.compose.parallelize import parallelize
from minitrain.data_parallel import states
from minitrain.model.data.batches import Rows, random_tokens
from minitrain.model.gpt import GPT, GPTConfig, cross_entropy_sum
from minitrain.pipeline.partition import even
from minitrain.plan.strategy import Strategy
from minitrain.ranks.mesh import Mesh

CONFIG = GPTConfig(
    vocab_size=512,
    d_model=256,
    num_layers=4,
    num_heads=8,
    max_positions=128,
    norm="layer",
    positions="learned",
    activation="gelu",
    bias=True,
)
LENGTH, ROWS, MICROBATCHES = 64, 16, 8
STRATEGIES = {
    "dp 2 x tp 2, ZeRO-3": Strategy(dp=2, tp=2, zero=3),
    "dp 2 x pp 2, 1F1B": Strategy(dp=2, pp=2, microbatches=MICROBATCHES),
}
PEERS = {
    "dp 2 x tp 2, ZeRO-3": "parallelize_module + fully_shard",
    "dp 2 x pp 2, 1F1B": "pipelining + DistributedDataParallel",
}
GOALS = {"dp 2 x tp 2, ZeRO-3": 0.85, "dp 2 x pp 2, 1F1B": 0.9}
LAUNCHES, TURNS = 3, 15
Step = tuple[
    Callable[[], None], Callable[[], dict[str, torch.Tensor]]
]  # a training step; this rank's parameters, whole, by name


def draw(step: int, rank: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    return random_tokens(0, rank, ranks, ROWS, LENGTH, CONFIG.vocab_size, seed=1)


def sgd(params) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-2, momentum=0.9)


def ours(name: str) -> Step:
    run = parallelize(CONFIG, STRATEGIES[name], sgd)
    batch = run.batch(Rows(draw, ROWS, LENGTH), 0)
    return lambda: run.step(batch), lambda: {
        name: states.full_tensor(run.sync, param) for param, name in run.sync.names.items()
    }


def theirs(name: str, *groups: dist.ProcessGroup) -> Step:
    """`groups`: those of the peer over dp, then over the other axis."""
    return their_matrices(*groups) if "tp" in name else their_stages(*groups)


def their_matrices(dp: dist.ProcessGroup, tp: dist.ProcessGroup) -> Step:
    mesh = DeviceMesh.from_group(
        [dp, tp], "cpu", mesh=torch.arange(4).view(2, 2), mesh_dim_names=("dp", "tp")
    )
    model = GPT(CONFIG)
    into = dict(input_layouts=(Replicate(), None), desired_input_layouts=(Replicate(), None))
    block = {
        "attention": PrepareModuleInput(**into),
        "mlp": PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),)),
        **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
        "attention.out": RowwiseParallel(),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(),
    }
    head = ColwiseParallel(output_layouts=Replicate())
    for number, layer in enumerate(model.layers):
        plan = block if 1 <= number <= CONFIG.num_layers else {"out": head} if number else {}
        parallelize_module(layer, mesh["tp"], plan) if plan else None
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = sgd(model.parameters())
    tokens, targets = draw(0, dp.rank(), dp.size())

    def step() -> None:
        optimizer.zero_grad()
        (
            cross_entropy_sum(model(tokens), targets) / targets.numel()
        ).backward()  # fully_shard takes the mean over dp
        optimizer.step()

    def params() -> dict[str, torch.Tensor]:
        return {
            name: param.full_tensor() if isinstance(param, DTensor) else param.detach()
            for name, param in model.named_parameters()
        }

    return step, params


def their_stages(dp: dist.ProcessGroup, pp: dist.ProcessGroup) -> Step:
    cuts = even(CONFIG.num_layers, 2)
    stage = GPT(CONFIG, layers=cuts[pp.rank()])
    wrapped = DistributedDataParallel(stage, process_group=dp, gradient_as_bucket_view=True)
    tokens, targets = draw(0, dp.rank(), dp.size())
    piece = pipelining.PipelineStage(wrapped, pp.rank(), 2, torch.device("cpu"), group=pp)
    schedule = Schedule1F1B(
        piece,
        MICROBATCHES,
        scale_grads=False,
        loss_fn=lambda logits, target: cross_entropy_sum(logits, target) / targets.numel(),
    )  # DDP: the mean over dp
    optimizer = sgd(stage.parameters())

    def step() -> None:
        optimizer.zero_grad()
        schedule.step(
            *([tokens] if pp.rank() == 0 else []),
            **({"target": targets, "losses": []} if pp.rank() == 1 else {}),
        )
        optimizer.step()

    return step, lambda: {name: param.detach() for name, param in stage.named_parameters()}


def groups_of(name: str) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """The peer's, as torch makes them: of the ranks of the same two axes."""
    mesh = Mesh(dp=2, other=2)
    return tuple(stock_group(ranks=mesh.members(axis)) for axis in ("dp", "other"))


def turn(name: str, rounds: int) -> tuple[list[float], list[float]]:
    our_step, our_params = ours(name)
    our_step()  # all groups of ours are used before the peer's are made
    their_step, their_params = theirs(name, *groups_of(name))
    their_step()
    times = in_turns(our_step, their_step, rounds=rounds, meet=dist.barrier)
    mine, other = our_params(), their_params()
    drift = max((mine[name] - param).abs().max().item() for name, param in other.items())
    assert mine.keys() == other.keys() and drift < 1e-4, f"{name}: parameters differ by {drift}"
    return times


def peak_bytes(name: str, mine: bool) -> int:
    """The most memory that tensors took at once on this rank, in the third step."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step, _ = ours(name) if mine else theirs(name, *groups_of(name))
        step()
        step()
        with record_function("measured"):
            step()
    return most_in("measured", profiler)


def rows() -> list[Row]:
    table = []
    for name in STRATEGIES:
        launches = [
            launch.run(turn, name, TURNS, ranks=4, timeout_s=600, checked=False) for _ in range(LAUNCHES)
        ]
        mine, other = slowest_then_median(one_after_the_other(launches))
        table.append(row(f"{name}, step of GPT 3M", PEERS[name], mine * 1e3, other * 1e3, "ms", GOALS[name]))
        mine, other = (
            max(launch.run(peak_bytes, name, which, ranks=4, timeout_s=600, checked=False))
            for which in (True, False)
        )
        table.append(row(f"{name}, peak memory", PEERS[name], mine / 1e6, other / 1e6, "MB", 1.0))
    return table
