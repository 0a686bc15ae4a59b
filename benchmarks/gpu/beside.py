"""What runs beside a step on a GPU, copies of offload and a checkpoint; and attention: how exact, how fast.

A copy is hidden as far as a step with it is no longer than one without: the exposed share is that difference
over what the same bytes take alone, from pinned memory, one direction after the other.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from itertools import count

import torch
import torch.nn.functional as F

from benchmarks.measure import Row, row
from minitrain import launch
from minitrain.attention.flash import flash_2, flash_attention
from minitrain.checkpoint.saver import Saver
from minitrain.checkpoint.store import Store
from minitrain.compose.parallelize import parallelize
from minitrain.memory.pools import to_device, to_host
from minitrain.model.config import GPTConfig
from minitrain.model.data.batches import Rows, random_tokens
from minitrain.model.training.optim import AdamW
from minitrain.plan.strategy import Strategy
from minitrain.ranks.devices import now
from minitrain.ranks.ledger import Ledger

DIRECTIONS = ("to_host", "to_device")


def told(sections: dict[str, Callable[[bool], list[Row]]]) -> None:
    """Run the section that the command line names, and print its rows for the runner."""
    name, *more = sys.argv[1:]
    print("figures: " + json.dumps([asdict(one) for one in sections[name]("--tiny" in more)]))


def clocked(act: Callable[[], object]) -> float:
    started = now(launch.device())
    act()
    return now(launch.device()) - started


def median_s(act: Callable[[], object], rounds: int, warmup: int = 3) -> float:
    return statistics.median([clocked(act) for _ in range(warmup + rounds)][warmup:])


def run_of(tiny: bool, layers: int, rows: int = 2, d_ff: int = 8192, **how):
    """A run of a few blocks in bf16, 4,096 wide, and a function that makes its next step."""
    widths = dict(d_model=64, num_heads=4, d_ff=128) if tiny else dict(d_model=4096, num_heads=32, d_ff=d_ff)
    shape = dict(num_layers=layers, norm="rms", activation="swiglu", bias=False, tied=False)
    length = 32 if tiny else 4096
    config = GPTConfig(vocab_size=256, max_positions=length, positions="rope", **shape, **widths)
    run = parallelize(config, Strategy(precision="bfloat16", **how), partial(AdamW, lr=1e-4))
    draw = partial(random_tokens, batch_size=rows, length=length, vocab=256, seed=0)
    return run, partial(run.step, run.batch(Rows(draw, rows, length), 0))


# ---- offload ---------------------------------------------------------------------------------------------


def copies_alone(bytes_by: dict[str, int]) -> float:
    """Seconds to copy as many bytes each way, in blocks of 64 MB, with nothing beside."""
    block = torch.empty(1 << 26, dtype=torch.uint8, device=launch.device())
    host = to_host(block).wait()
    copies = dict(
        to_host=lambda: to_host(block, host).wait(), to_device=lambda: to_device(host, None, block).wait()
    )
    return sum(median_s(copies[one], 5) * size / block.nbytes for one, size in bytes_by.items())


def offloaded(tiny: bool) -> dict[str, tuple[float, float, float, float]]:
    """Seconds of a step without and with, of its copies alone, and of the host's update alone."""
    run, step = run_of(tiny, 4)
    without, found = median_s(step, 5), {}
    shapes = [param.shape for param in run.model.parameters()]
    del run, step
    for what in ("activations", "optimizer"):
        run, step = run_of(tiny, 4, offload=what)
        with_it = median_s(step, 5)
        print(f"offload of {what}: step {without * 1e3:.1f} ms, {with_it * 1e3:.1f} ms with it", flush=True)
        with Ledger() as ledger:
            step()
        moved, update_s = {one: ledger.copied_bytes(one) for one in DIRECTIONS}, 0.0
        if what == "optimizer":
            twins = [torch.zeros(shape, requires_grad=True) for shape in shapes]
            for twin in twins:
                twin.grad = torch.ones_like(twin)
            update_s = median_s(AdamW(twins, lr=1e-4).step, 3, 1)
        found[what] = without, with_it, copies_alone(moved), update_s
        print(f"offload of {what}: {sum(moved.values()) / 1e9:.3f} GB copied in a step", flush=True)
        del run, step
    return found


def offload(tiny: bool) -> list[Row]:
    table = []
    [found] = launch.run(offloaded, tiny, ranks=1, timeout_s=300, checked=False)
    for what, (without, with_it, copies, update) in found.items():
        exposed = max(with_it - without, 0.0)
        parts = dict(step=without, offloaded=with_it, copies=copies, update=update, exposed=exposed)
        print(f"{what}:", ", ".join(f"{part} {s * 1e3:.1f} ms" for part, s in parts.items()), flush=True)
        peer, alone = "its copies alone" + " and the update" * bool(update), copies + update
        table.append(row(f"offload of {what}, exposed", peer, exposed * 1e3, alone * 1e3, "ms", 0.5))
    return table


# ---- checkpoint ------------------------------------------------------------------------------------------


def stalls(tiny: bool) -> dict[str, tuple[float, float, int]]:
    """By policy: seconds for which a step stood still, of a plain step, and how many steps the save took."""
    run, step = run_of(tiny, 1)
    plain, found = median_s(step, 5), {}
    for policy in ("sync", "asynchronous"):
        with tempfile.TemporaryDirectory() as folder:
            store = Store(folder, keep=1)
            saver, number = Saver(store, run.device, policy), count(1)
            run.attach(saver)
            for _ in range(2):  # the first allocates the host's memory
                save = lambda: saver.save(next(number), run.pieces(), run.plain_state(), {})
                took, steps = clocked(save), 0
                while steps < 3 or saver.under_way and steps < 2000:
                    took, steps = took + clocked(lambda: (step(), saver.after_step())), steps + 1
            found[policy] = took - steps * plain, plain, steps
            saver.close()
            store.unlock()
    return found


def checkpoint(tiny: bool) -> list[Row]:
    [found] = launch.run(stalls, tiny, ranks=1, timeout_s=300, checked=False)
    for policy, (stall, plain, steps) in found.items():
        print(f"{policy}: stood still for {stall * 1e3:.1f} ms in {steps} steps of {plain * 1e3:.1f} ms")
    ours, theirs = (max(found[policy][0], 0.0) * 1e3 for policy in ("asynchronous", "sync"))
    return [row("stall of an asynchronous save", "a synchronous save", ours, theirs, "ms", 0.3)]


# ---- attention -------------------------------------------------------------------------------------------


def attended(tiny: bool) -> dict[str, tuple[float, float]]:
    """By kernel: the largest error of out, dq, dk and dv in bf16, of the largest number, and seconds."""
    shape = (1, 2, 64, 16) if tiny else (2, 16, 4096, 128)
    made = dict(device=launch.device(), dtype=torch.float64)
    given = [torch.randn(shape, **made).bfloat16() for _ in range(4)]
    torchs = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)
    tiles = partial(flash_attention, kernel=flash_2(1024 if tiny else 1 << 20))
    cores = {"torch's own": torchs, "FUSED": flash_attention, "tiles": tiles}

    def passed(core, dtype) -> list[torch.Tensor]:
        *qkv, dout = (x.to(dtype, copy=True) for x in given)
        out = core(*(x.requires_grad_() for x in qkv))
        out.backward(dout)
        return [out.detach(), *(x.grad for x in qkv)]

    exact, found = passed(flash_attention, torch.float64), {}
    for name, core in cores.items():
        pairs = list(zip(passed(core, torch.bfloat16), exact))
        error = max(float((a.double() - b).abs().max() / b.abs().max()) for a, b in pairs)
        found[name] = error, median_s(lambda: passed(core, torch.bfloat16), 10)
    return found


def attention(tiny: bool) -> list[Row]:
    [found] = launch.run(attended, tiny, ranks=1, timeout_s=300, checked=False)
    print("; ".join(f"{name}: error {error:.2g}, {s * 1e3:.2f} ms" for name, (error, s) in found.items()))
    assert max(error for error, _ in found.values()) < 3e-2, "further off than 8 bits of mantissa are"
    (theirs, peer_s), (ours, our_s) = found["torch's own"], found["FUSED"]
    return [
        row("attention in bf16, forward and backward", "torch's own", our_s * 1e3, peer_s * 1e3, "ms", 1.1),
        row("its largest error to float64", "torch's own", ours, theirs, "", 1.5),
    ]


if __name__ == "__main__":
    told(dict(offload=offload, checkpoint=checkpoint, attention=attention))
