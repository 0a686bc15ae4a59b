"""Recomputation and offload against torch's own, in one process unless a row says ranks.

Full recomputation against torch.utils.checkpoint without re-entry, and a policy that keeps attention's output
against torch's selective policies: the same GPT, forward and backward in turns; peaks by the allocator's own
events, ours and theirs in a launch of their own each. The host's optimizer: updates that begin while backward
goes on against updates behind it, and a step against `fully_shard` with CPUOffloadPolicy, whose host is this
machine too. Files: tensors written and read through files.py against the same bytes in sequential calls of
the same size on the same disk, both direct where it allows.
"""

import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from benchmarks.measure import Row, in_turns, most_in, row, slowest_then_median, stock_group
from minitrain import launch
from minitrain.attention.placed import Places
from minitrain.compose.parallelize import parallelize
from minitrain.compose.passes import recompute_in
from minitrain.compose.run import Run
from minitrain.model.config import GPTConfig
from minitrain.model.data.batches import Rows, random_tokens
from minitrain.model.gpt import GPT, cross_entropy_sum
from minitrain.model.training.optim import AdamW
from minitrain.plan.strategy import Strategy
from minitrain.systems.memory.files import FileStore, open_unnamed

CONFIG = GPTConfig(vocab_size=512, d_model=384, num_layers=6, num_heads=6, max_positions=512, tied=False)
ROWS, LENGTH = 4, 512
ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def keep_attention(_, op, *args, **kwargs) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op is ATTENTION else CheckpointPolicy.PREFER_RECOMPUTE


def keep_products(_, op, *args, **kwargs) -> CheckpointPolicy:
    kept = op in (ATTENTION, torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


CASES = {
    "full": ("torch.utils.checkpoint", None),
    "keep:core": ("torch's selective policy, attention", keep_attention),
    "keep:qkv+core+out+up": ("torch's selective policy, attention and products", keep_products),
}


def forward_backward(model: GPT, through: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable:
    tokens, targets = random_tokens(0, 0, 1, ROWS, LENGTH, 512)
    positions = torch.arange(LENGTH)

    def run() -> None:
        model.zero_grad()
        (cross_entropy_sum(through(tokens, positions), targets) / targets.numel()).backward()

    return run


def our_pass(word: str) -> Callable[[], None]:
    model = GPT(CONFIG, seed=0)
    recompute_in(model, Strategy(recompute=word), None, Places())
    return forward_backward(model, model)


def their_pass(policy: Callable | None) -> Callable[[], None]:
    model = GPT(CONFIG, seed=0)
    more = {} if policy is None else dict(context_fn=partial(create_selective_checkpoint_contexts, policy))

    def through(tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = model.layers[0](tokens, positions)
        for block in model.layers[1:-1]:
            x = checkpoint(block, x, positions, use_reentrant=False, preserve_rng_state=False, **more)
        return model.layers[-1](x, positions)

    return forward_backward(model, through)


def turns(word: str, rounds: int) -> tuple[list[float], list[float]]:
    torch.set_num_threads(1)
    return in_turns(our_pass(word), their_pass(CASES[word][1]), rounds=rounds)


def peak_bytes(ours: bool, word: str) -> int:
    torch.set_num_threads(1)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step = our_pass(word) if ours else their_pass(CASES[word][1])
        step()
        with record_function("measured"):
            step()
    return most_in("measured", profiler)


# ---- the host's optimizer ---------------------------------------------------------------------------------


def offloaded_step(ranks: int, clip: float | None, **values) -> tuple[Callable[[], None], Run]:
    strategy = Strategy(dp=ranks, offload="optimizer", bucket_bytes=4_000_000, **values)
    run = parallelize(CONFIG, strategy, partial(AdamW, lr=1e-4), seed=0)
    draw = partial(random_tokens, batch_size=ROWS, length=LENGTH // 4, vocab=512)
    batch = run.batch(Rows(draw, ROWS, LENGTH // 4), 0)
    return partial(run.step, batch, clip), run


def early_turns(rounds: int) -> tuple[list[float], list[float]]:
    """Updates that begin in backward, and updates that a (wide) limit of the norm puts off."""
    torch.set_num_threads(1)
    return in_turns(offloaded_step(1, None)[0], offloaded_step(1, 1e9)[0], rounds=rounds)


def fully_shard_turns(rounds: int) -> tuple[list[float], list[float]]:
    torch.set_num_threads(1)
    ranks = dist.get_world_size()
    ours, run = offloaded_step(ranks, None, zero=3)
    stock = stock_group(run.token_group)
    model = GPT(CONFIG, seed=0)
    settings = dict(
        mesh=DeviceMesh.from_group(stock, "cpu"), offload_policy=CPUOffloadPolicy(pin_memory=False)
    )
    for layer in model.layers:
        fully_shard(layer, **settings)
    wrapped = fully_shard(model, **settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens, targets = random_tokens(0, dist.get_rank(), ranks, ROWS, LENGTH // 4, 512)

    def their_step() -> None:
        optimizer.zero_grad()
        (cross_entropy_sum(wrapped(tokens), targets) / targets.numel()).backward()
        optimizer.step()

    return in_turns(ours, their_step, rounds=rounds, meet=dist.barrier)


# ---- files ------------------------------------------------------------------------------------------------

EACH, COUNT = 4 << 20, 64


def through_the_store(folder: str) -> float:
    """Bytes a second, written and read again."""
    data = torch.randint(256, (EACH,), dtype=torch.uint8)
    with FileStore(folder, 0, buffer_bytes=EACH, buffers=8) as store:
        started = time.perf_counter()
        for number in range(COUNT):
            store.write(str(number), data)
        store.flush()
        store.prefetch(*map(str, range(4)))
        for number in range(COUNT):
            store.read(str(number))
            store.release(str(number))
            if number + 4 < COUNT:
                store.prefetch(str(number + 4))
        return time.perf_counter() - started


def one_after_the_other(folder: str) -> float:
    unnamed, _ = open_unnamed(Path(folder))
    file = unnamed.fileno()
    memory = memoryview(mmap.mmap(-1, EACH))
    memory[:] = os.urandom(EACH)
    started = time.perf_counter()
    for number in range(COUNT):
        os.pwritev(file, [memory], number * EACH)
    os.fsync(file)
    for number in range(COUNT):
        os.preadv(file, [memory], number * EACH)
    elapsed = time.perf_counter() - started
    unnamed.close()
    return elapsed


def disk_turns(rounds: int) -> tuple[float, float]:
    with tempfile.TemporaryDirectory(dir=Path(__file__).parent) as folder:
        pairs = [(through_the_store(folder), one_after_the_other(folder)) for _ in range(rounds + 1)][1:]
    return tuple(statistics.median(side) for side in zip(*pairs))


def rows() -> list[Row]:
    table = []
    for word, (peer, _) in CASES.items():
        ours, theirs = slowest_then_median(launch.run(turns, word, 9, ranks=1, timeout_s=300, checked=False))
        name = f"recompute {word}, {LENGTH} tokens"
        table.append(row(name, peer, ours * 1e3, theirs * 1e3, "ms", 1.0))
        ours, theirs = (
            launch.run(peak_bytes, side, word, ranks=1, checked=False)[0] for side in (True, False)
        )
        table.append(row(f"{name}, peak memory", peer, ours / 1e6, theirs / 1e6, "MB", 1.0))
    ours, theirs = slowest_then_median(launch.run(early_turns, 15, ranks=1, timeout_s=300, checked=False))
    name, peer = "step with AdamW on the host", "updates behind backward"
    table.append(row(name, peer, ours * 1e3, theirs * 1e3, "ms", 1.0))
    ours, theirs = slowest_then_median(
        launch.run(fully_shard_turns, 15, ranks=2, timeout_s=300, checked=False)
    )
    name, peer = "ZeRO-3 step, optimizer on the host, 2 ranks", "fully_shard, CPUOffloadPolicy"
    table.append(row(name, peer, ours * 1e3, theirs * 1e3, "ms", 1.0))
    ours, theirs = disk_turns(5)
    name, peer = f"{COUNT * EACH >> 20} MiB to files and back", "the same calls one by one"
    table.append(row(name, peer, ours, theirs, "s", 1.43))
    return table
