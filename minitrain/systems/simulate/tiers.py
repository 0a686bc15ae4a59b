"""Parameters and states in tiers: device, host, disks. Prefetched, cached, updated where they lie. No torch.

    MoESys           dense parameters from other ranks, experts from host or disk, on two lanes at once
                     one layer ahead: a layer waits max(0, t_fetch - t_layer of the one before)
    DecayingLFU      the host's cache of experts: the often used stay, and old counts fade
    Smart-Infinity   bytes over the host's link, a parameter and step:     gradient   states    parameter
                         update on the CPU (ZeRO-Infinity)                  2 · 4     24         2
                         update in the storage devices                          4      0         2

Bytes are exact; times too, for whole numbers and Fractions; all plays on links.py. Gradients are float32 and
states are three float32 numbers (master weight, two moments), unless given otherwise.
Shen et al. 2022 (SE-MoE), arXiv:2205.10034, and Yu et al. 2024 (MoESys), IEEE TSC; Jang et al. 2024
(Smart-Infinity), HPCA. Differs: MoESys caches by a threshold on counts, and writes what it drops to disk;
Smart-Infinity's kernel and buffers cost nothing here, and its link carries both ways at once.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from minitrain.plan.simulate.links import Number, Task, divided

# ---- MoESys ------------------------------------------------------------------------------------------------


class Layer(NamedTuple):
    seconds: Number
    dense_bytes: Number = 0  # parts of other ranks
    host_bytes: Number = 0  # experts that the host has
    disk_bytes: Number = 0  # and those it does not: read first, then copied as the others


def prefetching(layers: Sequence[Layer], depth: int, *, known: bool = True) -> list[Task]:
    """A pass over the layers on the links "net", "bus" and "disk", which fetches `depth` layers ahead.

    The fetch of a layer begins as the one `depth` before it does; 0: when it is due. Experts that are not
    known before the layer's own router has spoken are fetched when it is due, whatever the depth."""
    if depth < 0:
        raise ValueError(f"depth={depth}: use 0, to fetch when a layer is due, or more")
    tasks = []
    for i, layer in enumerate(layers):
        due = (f"layer {i - 1}",) if i else ()
        early = ((f"begin {i - depth}",) if i >= depth else ()) if depth else due
        sparse = early if known else due
        tasks += [
            Task(f"dense {i}", "dense", layer.dense_bytes, ("net",), early),
            Task(f"read {i}", "reads", layer.disk_bytes, ("disk",), sparse),
            Task(f"host {i}", "experts", layer.host_bytes, ("bus",), sparse),
            Task(f"rest {i}", "experts", layer.disk_bytes, ("bus",), (f"read {i}",)),
            Task(f"begin {i}", "device", 0, after=(f"dense {i}", f"rest {i}")),
            Task(f"layer {i}", "device", layer.seconds),
        ]
    return tasks


class DecayingLFU:
    """A cache of `capacity` experts; the one with the smallest count leaves, and counts fade.

    After every `every` reads all counts are multiplied by `decay`: 1 never forgets, 0 remembers no more than
    the reads since. Of equal counts, the one that was not read for longest leaves."""

    def __init__(self, capacity: int, decay: float = 0.5, every: int = 100):
        if capacity < 1 or not 0 <= decay <= 1 or every < 1:
            given = f"capacity={capacity}, decay={decay}, every={every}"
            raise ValueError(f"{given}: need capacity and every of 1 or more, and decay from 0 to 1")
        self.capacity, self.decay, self.every = capacity, decay, every
        self.counts: Counter = Counter()  # of all experts, here or not
        self.read_at: dict[int, int] = {}  # of those here
        self.reads = 0

    def read(self, expert: int) -> bool:
        """Whether the expert was there. Now it is, if it is not the one that counts least."""
        hit = expert in self.read_at
        self.counts[expert] += 1
        self.reads += 1
        self.read_at[expert] = self.reads
        if len(self.read_at) > self.capacity:
            del self.read_at[min(self.read_at, key=lambda e: (self.counts[e], self.read_at[e]))]
        if self.reads % self.every == 0:
            for e in self.counts:
                self.counts[e] *= self.decay
        return hit


# ---- Smart-Infinity ----------------------------------------------------------------------------------------


class Sizes(NamedTuple):
    """Bytes of a parameter."""

    states: Number = 12
    gradient: Number = 4
    parameter: Number = 2

    def compressed(self, kept: Number) -> "Sizes":
        """Of gradients only the largest, a share `kept`: values and as many places."""
        return self._replace(gradient=2 * kept * self.gradient)


def host_bytes(sizes: Sizes, *, near: bool) -> dict[str, Number]:
    """Over the host's link to its storage, a parameter and step; `near`: updated in the storage devices."""
    states, gradient, parameter = sizes
    if near:
        return {"written": gradient, "read": parameter}
    return {"written": gradient + states + parameter, "read": gradient + states}


def updating(parameters: int, devices: int, sizes: Sizes, *, near: bool, chunks: int = 1) -> list[Task]:
    """The update of all parameters, whose states lie on `devices` in stripes, chunk by chunk.

    Links: "down" and "up" of the host, and "read d" and "write d" of each storage device. The gradient is
    written first, which is when its chunk can be updated; the new parameter is read last."""
    if parameters % (devices * chunks):
        raise ValueError(f"{parameters} parameters: give a multiple of {devices} devices x {chunks} chunks")
    tasks, amount = [], parameters // (devices * chunks)
    for d in range(devices):
        inside = (f"read {d}",), (f"write {d}",)
        to_host, from_host = (f"read {d}", "up"), (f"write {d}", "down")
        read, write = inside if near else (to_host, from_host)
        for c in range(chunks):
            here = f"{d}.{c}"
            states, fetched = amount * sizes.states, amount * (sizes.states + sizes.gradient)
            new = states if near else states + amount * sizes.parameter
            tasks += [
                Task(f"gradient {here}", f"gradients {d}", amount * sizes.gradient, from_host),
                Task(f"fetch {here}", f"reads {d}", fetched, read, (f"gradient {here}",)),
                Task(f"store {here}", f"writes {d}", new, write, (f"fetch {here}",)),
            ]
            if near:
                after = (f"store {here}",)
                tasks.append(Task(f"new {here}", f"news {d}", amount * sizes.parameter, to_host, after))
    return tasks


def update_s(parameters: int, devices: int, sizes: Sizes, host: Number, device: Number, *, near) -> Number:
    """Seconds at least, with `host` bytes/s each way and `device` each way of every storage device.

    The busiest link: the host's, or of one storage device. Chunks that overlap come close to it."""
    most = max(host_bytes(sizes, near=near).values())
    inside = sizes.states + sizes.gradient + sizes.parameter
    return parameters * max(divided(most, host), divided(inside, devices * device))


def links_of(devices: int, host: Number, device: Number) -> Mapping[str, Number]:
    """For `updating`: bytes per second, each way."""
    inside = {f"{way} {d}": device for d in range(devices) for way in ("read", "write")}
    return {"up": host, "down": host, **inside}
