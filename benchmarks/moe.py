"""A layer of experts, forward and backward, float32: on one process beside transformers, on four beside gloo.

One process, 1,024 tokens, E = 8, k = 2, D = 512, F = 1,792 (Mixtral's ratio), gated: our router, dispatch and
grouped experts beside transformers' Mixtral block with the same weights, as it runs by itself ("eager") and
with torch's grouped product; and grouped beside padded with loads 1, 1/2, 1/3, .. (Zipf).
Four ranks, E = 8, k = 2: dispatch, experts and combine beside the same layer written plainly with
torch.distributed.all_to_all_single and index_select. One shape is bound by messages, one by products: the
share of the peer's time that its all-to-alls take alone is printed, and is meant to be a third or more.
Peak memory is what torch's CPU allocator had given out at most during one step, each side in a launch of its
own. transformers is no dependency: `make transformers` installs it into build/, without it its rows are left
out.
"""

import os
import statistics
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.measure import (
    FOLDER,
    Row,
    in_turns,
    most_in,
    one_after_the_other,
    row,
    slowest_then_median,
    stock_group,
)
from minitrain import launch
from minitrain.moe import experts, router
from minitrain.moe.dispatch import Dispatch

EXPERTS, TOP_K, LAUNCHES, TURNS = 8, 2, 3, 11
TOKENS, WIDTH, WIDE = 1024, 512, 1792
TRANSFORMERS = FOLDER.parent / "build" / "transformers"
SHAPES = {"messages": (512, 128, 16), "products": (512, 512, 1024)}  # tokens of a rank, D, F
Step = Callable[[], list[Tensor]]


def stepped(layer: Callable[[Tensor], Tensor], x: Tensor, parameters: list[Tensor]) -> Step:
    """Forward and backward; the gradients."""

    def run() -> list[Tensor]:
        leaf = x.detach().requires_grad_()
        for parameter in parameters:
            parameter.grad = None
        layer(leaf).square().sum().backward()
        return [leaf.grad, *(parameter.grad for parameter in parameters)]

    return run


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * shape[-2] ** -0.5


# ---- one process -----------------------------------------------------------------------------------------


def matrices() -> list[Tensor]:
    """The router, up, down, gate."""
    shapes = (WIDTH, EXPERTS), (EXPERTS, WIDTH, WIDE), (EXPERTS, WIDE, WIDTH), (EXPERTS, WIDTH, WIDE + 1)
    *three, gate = (drawn(*shape) for shape in shapes)
    return [x.requires_grad_() for x in (*three, gate[..., :-1].contiguous())]


def our_block(scattered: bool = False) -> Step:
    parameters = matrices()
    scores, up, down, gate = parameters

    def layer(x: Tensor) -> Tensor:
        routing = router.top_k(x @ scores, TOP_K)
        way = Dispatch(routing)
        if scattered:
            weights = routing.weights.flatten().index_select(0, way.choices)
            return experts.scattered(x, way.tokens, weights, way.counts, up, down, F.silu, gate)
        y = experts.grouped(way.there(x), way.counts, up, down, F.silu, gate)
        return way.back(y, routing.weights)

    return stepped(layer, drawn(TOKENS, WIDTH) * WIDTH**0.5, parameters)


def mixtral_block(implementation: str) -> Step:
    """transformers' block: matrices are transposed, gate and up are one. Gradients as ours."""
    sys.path.append(str(TRANSFORMERS))  # behind everything that minitrain has itself
    from transformers.models.mixtral.configuration_mixtral import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    config = MixtralConfig(
        hidden_size=WIDTH, intermediate_size=WIDE, num_local_experts=EXPERTS, num_experts_per_tok=TOP_K
    )
    config._experts_implementation = implementation
    block = MixtralSparseMoeBlock(config)
    scores, up, down, gate = matrices()
    with torch.no_grad():
        block.gate.weight.copy_(scores.T)
        block.experts.gate_up_proj.copy_(torch.cat((gate, up), 2).transpose(1, 2))
        block.experts.down_proj.copy_(down.transpose(1, 2))
    parameters = [block.gate.weight, block.experts.gate_up_proj, block.experts.down_proj]
    return stepped(lambda x: block(x[None])[0], drawn(TOKENS, WIDTH) * WIDTH**0.5, parameters)


def on_zipf(way: str) -> Step:
    """The experts alone, the first with 8 times the rows of the last."""
    _, up, down, gate = matrices()
    share = 1 / torch.arange(1, EXPERTS + 1)
    counts = (share / share.sum() * TOKENS * TOP_K).long()
    counts[0] += TOKENS * TOP_K - counts.sum()
    rows = drawn(TOKENS * TOP_K, WIDTH) * WIDTH**0.5
    return stepped(
        lambda x: experts.IMPLEMENTATIONS[way](x, counts, up, down, F.silu, gate), rows, [up, down, gate]
    )


STEPS = {
    "grouped": our_block,
    "scattered": lambda: our_block(scattered=True),
    "transformers": lambda: mixtral_block("eager"),
    "transformers, grouped_mm": lambda: mixtral_block("grouped_mm"),
    "grouped on Zipf": lambda: on_zipf("grouped"),
    "padded on Zipf": lambda: on_zipf("padded"),
}


def turn(mine: str, peer: str) -> tuple[list[float], list[float]]:
    torch.set_num_threads(os.cpu_count())
    ours, theirs = STEPS[mine](), STEPS[peer]()
    mismatch = [(a - b).abs().max() / b.abs().max() for a, b in zip(ours(), theirs()) if a.shape == b.shape]
    assert mismatch and max(mismatch) < 1e-3, f"gradients differ by {max(mismatch)}"
    return in_turns(ours, theirs, rounds=TURNS)


def peak_bytes(make: Callable[..., Step], *args) -> int:
    run = make(*args)
    run()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        with record_function("measured"):
            run()
    return most_in("measured", profiler)


# ---- four ranks ------------------------------------------------------------------------------------------


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, sends: list[int], receives: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sizes, ctx.group = (sends, receives), group
        out = x.new_empty(sum(receives), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), receives, sends, group=group)
        return out

    @staticmethod
    def backward(ctx, dy: Tensor):
        sends, receives = ctx.sizes
        return _AllToAll.apply(dy, receives, sends, ctx.group), None, None, None


def plainly(x: Tensor, routing: router.Routing, up: Tensor, down: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The layer as one writes it with torch alone."""
    n, here, k = group.size(), len(up), routing.experts.shape[1]
    chosen = routing.experts.flatten()
    order = chosen.argsort(stable=True)
    counts = torch.bincount(chosen, minlength=n * here)
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts, group=group)
    sends, receives = counts.view(n, here).sum(1).tolist(), arriving.view(n, here).sum(1).tolist()
    rows = _AllToAll.apply(x.index_select(0, order // k), sends, receives, group)
    turn = torch.arange(here).repeat(n).repeat_interleave(arriving).argsort(stable=True)
    parts = rows.index_select(0, turn).split(arriving.view(n, here).sum(0).tolist())
    y = torch.cat([F.gelu(part @ up[e]) @ down[e] for e, part in enumerate(parts)])
    y = _AllToAll.apply(y.index_select(0, turn.argsort()), receives, sends, group)
    weighed = y * routing.weights.flatten().index_select(0, order)[:, None]
    return torch.zeros_like(x).index_add(0, order // k, weighed)


def ours(x: Tensor, routing: router.Routing, up: Tensor, down: Tensor, group: dist.ProcessGroup) -> Tensor:
    way = Dispatch(routing, group)
    return way.back(experts.grouped(way.there(x), way.counts, up, down), routing.weights)


def on_ranks(layer: Callable, shape: str, group: dist.ProcessGroup) -> Step:
    tokens, width, wide = SHAPES[shape]
    here, first = EXPERTS // group.size(), EXPERTS // group.size() * group.rank()
    up, down = drawn(EXPERTS, width, wide), drawn(EXPERTS, wide, width)
    up, down = (m[first : first + here].clone().requires_grad_() for m in (up, down))
    scores = drawn(width, EXPERTS).requires_grad_()
    x = torch.randn(tokens, width, generator=torch.Generator().manual_seed(group.rank()))

    def run(x: Tensor) -> Tensor:
        return layer(x, router.top_k(x @ scores, TOP_K), up, down, group)

    return stepped(run, x, [scores, up, down])


def turn_on_ranks(shape: str) -> tuple[tuple[list[float], list[float]], list[float]]:
    """Times of ours and the peer; and of the peer's all-to-alls alone."""
    stock = stock_group()
    mine, theirs = on_ranks(ours, shape, dist.group.WORLD), on_ranks(plainly, shape, stock)
    mismatch = [((a - b).abs().max() / b.abs().max()).item() for a, b in zip(mine(), theirs(), strict=True)]
    assert max(mismatch) < 1e-3, f"gradients differ by {max(mismatch)}"
    tokens, width, _ = SHAPES[shape]
    rows = torch.randn(tokens * TOP_K, width)

    def messages() -> None:
        for _ in range(4):
            dist.all_to_all_single(torch.empty_like(rows), rows, group=stock)

    times = in_turns(mine, theirs, rounds=TURNS, meet=dist.barrier)
    return times, in_turns(lambda: None, messages, rounds=TURNS, meet=dist.barrier)[1]


def peak_on_ranks(layer: Callable, shape: str) -> int:
    return peak_bytes(on_ranks, layer, shape, dist.group.WORLD)


# ---- the table -------------------------------------------------------------------------------------------


def one_process() -> list[Row]:
    pairs = [("grouped on Zipf", "padded on Zipf", 0.7, 1.0)]
    if TRANSFORMERS.exists():
        pairs += [
            (mine, peer, 0.95, 1.0)
            for mine in ("grouped", "scattered")
            for peer in ("transformers", "transformers, grouped_mm")
        ]
    table = []
    for mine, peer, goal, memory_goal in pairs:
        turns = [launch.run(turn, mine, peer, ranks=1, timeout_s=300, checked=False) for _ in range(LAUNCHES)]
        times = slowest_then_median(one_after_the_other(turns))
        name = f"experts, {mine}"
        table.append(row(name, peer, *(seconds * 1e3 for seconds in times), "ms", goal))
        peaks = [launch.run(peak_bytes, STEPS[way], ranks=1, checked=False)[0] for way in (mine, peer)]
        table.append(row(f"{name}, peak memory", peer, *(peak / 1e6 for peak in peaks), "MB", memory_goal))
    return table


def four_ranks() -> list[Row]:
    table = []
    for shape, goal in (("messages", 0.9), ("products", 1.0)):
        launches = [
            launch.run(turn_on_ranks, shape, ranks=4, timeout_s=300, checked=False) for _ in range(LAUNCHES)
        ]
        times = slowest_then_median(one_after_the_other([[rank[0] for rank in ranks] for ranks in launches]))
        alone = statistics.median(
            max(times) for ranks in launches for times in zip(*(messages for _, messages in ranks))
        )
        name, peer = f"expert layer bound by {shape}, ep=4", "all_to_all_single, index_select"
        print(f"{name}: all-to-alls alone are {alone / times[1]:.0%} of the peer's time")
        table.append(row(name, peer, *(seconds * 1e3 for seconds in times), "ms", goal))
        peaks = [
            max(launch.run(peak_on_ranks, way, shape, ranks=4, checked=False)) for way in (ours, plainly)
        ]
        table.append(row(f"{name}, peak memory", peer, *(peak / 1e6 for peak in peaks), "MB", 1.0))
    return table


def rows() -> list[Row]:
    return one_process() + four_ranks()
