"""A save beside the steps of training: who waits for what, in each way of saving. No clock, no torch.

A save copies the state to the host (c seconds in all), then writes it (w), in n chunks through buffers of the
host; training has a lane, so have copies and writes (links.py). A step is F, B and U seconds long;
only U changes the state. How long training waits for a save, once the one before it is written:

    synchronous, snapshot-stall      c + w;  c
    TorchSnapshot                    max(c, w) + min(c, w)/n          a chunk is written as others are copied
    CheckFreq                        max(0, c - (F+B))                the copy must end before the next U
    DataStates, b of n buffers       max(0, max(c, (n-b)·w/n + 2·c/n) - (F+B))     for 1 < b < n
    LightCheck, L layers             max(0, c - (F + B/L + 2(L-1)/L·(B+U)))
                                     a layer is copied once updated, until its next update
    FastPersist, 2 buffers           max(0, max(c, w) + min(c, w)/n - (F+B))       on disk before the next U

Mohan et al. 2021 (CheckFreq), FAST; Chen et al. 2023 (LightCheck), ICCD; Maurya et al. 2024 (DataStates-LLM),
HPDC; Wang et al. 2024 (FastPersist), arXiv:2406.13768; TorchSnapshot 2022. Differs: a copy or write has no
latency, copies do not slow training down, and LightCheck's persistent memory is left out.
"""

from dataclasses import dataclass
from typing import NamedTuple

from minitrain.ranks.checks import require_positive_ints
from minitrain.systems.simulate.links import Number, Run, Task, divided, play


class Work(NamedTuple):
    """A training step, in seconds."""

    forward_s: Number
    backward_s: Number
    update_s: Number


class State(NamedTuple):
    """What a save moves, in seconds."""

    copy_s: Number  # device to host
    write_s: Number  # host to disk


@dataclass(frozen=True)
class SavePolicy:
    """How training and its saves depend on each other."""

    until: str  # "copy" or "write": what training waits for
    by: str  # before the next "forward", or before the next "update"
    chunks: int = 1
    buffers: int = 1  # of a chunk, on the host: a copy takes one, which is free again when it is written
    by_layer: bool = False  # a chunk is a layer, copied from its own update on, until its next

    def __post_init__(self):
        require_positive_ints(chunks=self.chunks, buffers=self.buffers)


def synchronous() -> SavePolicy:
    """Training stops until all is written (DeepSpeed's default)."""
    return SavePolicy("write", "forward")


def snapshot_stall() -> SavePolicy:
    """Training stops for the copy alone (Check-N-Run, MegaScale); the next one waits for the write."""
    return SavePolicy("copy", "forward")


def torchsnapshot(chunks: int) -> SavePolicy:
    return SavePolicy("write", "forward", chunks, chunks)


def checkfreq() -> SavePolicy:
    return SavePolicy("copy", "update")


def datastates(chunks: int, buffers: int) -> SavePolicy:
    """CheckFreq through a buffer of a given size: copies wait while it is full of what is not written."""
    return SavePolicy("copy", "update", chunks, buffers)


def lightcheck(layers: int) -> SavePolicy:
    return SavePolicy("copy", "update", layers, layers, by_layer=True)


def fastpersist(chunks: int, buffers: int = 2) -> SavePolicy:
    return SavePolicy("write", "update", chunks, buffers)


def train(work: Work, state: State, policy: SavePolicy, steps: int, every: int = 1) -> Run:
    """Steps 0, 1, .., with a save after each `every`-th; lanes "train", "copy" and "write". Tasks: "F i", "B
    i.p", "U i.p" of step i (p: layers in order of backward), "copy s.j", "write s.j" of chunk j of save s."""
    chunks = policy.chunks
    require_positive_ints(steps=steps, every=every)
    layers = chunks if policy.by_layer else 1
    copy_s, write_s = divided(state.copy_s, chunks), divided(state.write_s, chunks)
    tasks: list[Task] = []
    for i in range(steps):
        s, rest = divmod(i, every)
        under_way = i > 0 and rest == 0  # save s - 1
        last = (f"{policy.until} {s - 1}.{chunks - 1}",) if under_way else ()
        tasks.append(Task(f"F {i}", "train", work.forward_s, after=last if policy.by == "forward" else ()))
        for p in range(layers):
            gate = (f"{policy.until} {s - 1}.{p}",) if under_way and policy.by_layer else last
            tasks.append(Task(f"B {i}.{p}", "train", divided(work.backward_s, layers)))
            gate = gate if policy.by == "update" else ()
            tasks.append(Task(f"U {i}.{p}", "train", divided(work.update_s, layers), after=gate))
        for j in range(chunks if rest == every - 1 else 0):
            ready = [f"U {i}.{j if policy.by_layer else 0}"]
            before, chunk = divmod(s * chunks + j - policy.buffers, chunks)
            if before >= 0:
                ready.append(f"write {before}.{chunk}")
            tasks.append(Task(f"copy {s}.{j}", "copy", copy_s, after=tuple(ready)))
            tasks.append(Task(f"write {s}.{j}", "write", write_s, after=(f"copy {s}.{j}",)))
    return play(tasks)


def stall_s(work: Work, state: State, policy: SavePolicy) -> Number:
    """How long training waits for one save, as it is played."""
    return train(work, state, policy, 2).stall("train")


def stall_formula_s(work: Work, state: State, policy: SavePolicy) -> Number:
    """How long training waits for one save, in closed form."""
    n, b = policy.chunks, policy.buffers
    copy_s, write_s = divided(state.copy_s, n), divided(state.write_s, n)
    copied = max(state.copy_s, (n - b) * write_s + 2 * copy_s if n > b else 0)
    written = max(state.copy_s, state.write_s) + min(copy_s, write_s)
    if b == 1:
        copied, written = state.copy_s + (n - 1) * write_s, state.copy_s + state.write_s
    if policy.by_layer:
        rest = divided(n - 1, n) * (work.backward_s + work.update_s)
        hidden = work.forward_s + divided(work.backward_s, n) + 2 * rest
    else:
        hidden = work.forward_s + work.backward_s if policy.by == "update" else 0
    return max(0, (copied if policy.until == "copy" else written) - hidden)
