"""Whose copies meet on the way to the host, and what is copied again and again: tasks for links.py. No torch.

    TMOF             devices that share a link swap different tensors, or in different directions
    Harmony          microbatches in groups per layer, updates at once, on one device: 3|W|, not (4m+2)N|W|
    PatrickStar      static: what is on the device fits at the worst moment; dynamic: at this moment
    MoESys           experts from host or disk, fetched layers ahead; a host cache of counts that fade
    Smart-Infinity   bytes over the host's link, a parameter and step:     gradient   states    parameter
                         update on the CPU (ZeRO-Infinity)                  2 · 4     24         2
                         update in the storage devices                          4      0         2

Sizes are in bytes (or layers of one size), times in seconds, exact for whole numbers and Fractions.
Lin et al. 2023 (TMOF), HPCA; Li et al. 2022 (Harmony), arXiv:2202.01306; Fang et al. 2021 (PatrickStar),
arXiv:2108.05818; Shen et al. 2022 (SE-MoE), arXiv:2205.10034, and Yu et al. 2024 (MoESys), IEEE TSC; Jang et
al. 2024 (Smart-Infinity), HPCA. Differs: TMOF's sets are of a forward; Harmony's layer that leaves is the
least recently used, and where the order of layers turns round those still there are not fetched again;
MoESys caches by a threshold on counts; Smart-Infinity's kernel and buffers cost nothing here.
"""

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Sequence
from itertools import chain, combinations
from typing import NamedTuple

from minitrain.ranks.checks import require_nonnegative, require_positive, require_positive_ints
from minitrain.systems.simulate.links import Number, Task, play
from minitrain.systems.simulate.storage import LRU


def swapping_forward(sets: Sequence[Collection[int]], sizes: Sequence[Number], layer_s: Number) -> list[Task]:
    """Forwards that swap out, device d what is in sets[d], all over the link "to host". Layer l + 2
    needs the memory of layer l's tensor, if that is to go."""
    require_nonnegative(layer_s=layer_s)
    tasks = []
    for d, swapped in enumerate(sets):
        for layer, size in enumerate(sizes):
            gone = (f"out {d}.{layer - 2}",) if layer - 2 in swapped else ()
            tasks.append(Task(f"F {d}.{layer}", f"device {d}", layer_s, after=gone))
            if layer in swapped:
                tasks.append(Task(f"out {d}.{layer}", f"copies {d}", size, ("to host",), (f"F {d}.{layer}",)))
    return tasks


def swap_sets(devices: int, sizes: Sequence[Number], layer_s, bytes_per_s, enough: Number) -> list[set[int]]:
    """TMOF's search: which tensors each device swaps, `enough` bytes and none too many, so that forwards and
    copies of all end soonest: in turn each takes the best set beside the others', until none has a better."""
    require_positive_ints(devices=devices)
    require_positive(bytes_per_s=bytes_per_s)
    every = chain.from_iterable(combinations(range(len(sizes)), n) for n in range(len(sizes) + 1))
    fitting = [set(some) for some in every if sum(sizes[i] for i in some) >= enough]
    fitting = [some for some in fitting if not any(other < some for other in fitting)]
    if not fitting:
        raise ValueError(f"{enough=} bytes of tensors of {sum(sizes)}; ask for as many at most")
    end = lambda sets: play(swapping_forward(sets, sizes, layer_s), {"to host": bytes_per_s}).end_s
    sets, before = [], None
    while sets != before:
        before = list(sets)
        for d in range(devices):
            sets = min(([*sets[:d], some, *sets[d + 1 :]] for some in [*sets[d : d + 1], *fitting]), key=end)
    return sets


def exchanges(devices: int, rounds: int, size: Number, *, opposed: bool) -> list[Task]:
    """Each device sends `size` bytes and fetches as many, in turns, over the links "to host" and "to device".
    Opposed: every second device fetches while the others send, so that no two of a pair share a direction."""
    return [
        Task(f"{link} {d}.{turn}", f"copies {d}", size, (link,))
        for d in range(devices)
        for turn in range(rounds)
        for link in (("to device", "to host") if opposed and d % 2 else ("to host", "to device"))
    ]


class Step(NamedTuple):
    """What a device does with a layer's weights, for a microbatch or (an update) for all."""

    device: int
    layer: int
    kind: str  # "F", "B", "U"


class Volume(NamedTuple):
    fetched: int  # weights of layers, host to device
    written: int  # and back

    weights = property(lambda self: self.fetched + self.written)


def virtualized(devices: int, layers: int, m: int) -> list[Step]:
    """Data parallel training that trusts a virtual memory on each device: microbatch by microbatch."""
    require_positive_ints(devices=devices, layers=layers, m=m)
    steps = []
    for d in range(devices):
        forward, backward, update = ([Step(d, layer, kind) for layer in range(layers)] for kind in "FBU")
        steps += m * (forward + backward[::-1]) + update
    return steps


def harmony_dp(devices: int, layers: int, m: int) -> list[Step]:
    """Each layer does all microbatches before it leaves, and is updated when its gradient is complete."""
    require_positive_ints(devices=devices, layers=layers, m=m)
    return [step for d in range(devices) for step in _grouped([d] * layers, m)]


def harmony_pp(devices: int, layers: int, m: int) -> list[Step]:
    """The same with each layer on one device, in turn; `m` microbatches are those of all devices together."""
    require_positive_ints(devices=devices, layers=layers, m=m)
    return _grouped([layer % devices for layer in range(layers)], m)


def _grouped(device_of: Sequence[int], m: int) -> list[Step]:
    steps = [Step(d, layer, "F") for layer, d in enumerate(device_of) for _ in range(m)]
    for layer, d in reversed([*enumerate(device_of)]):
        steps += [Step(d, layer, "B")] * m + [Step(d, layer, "U")]
    return steps


def swap_volume(steps: Iterable[Step], room: int, *, writes_all: bool = False) -> Volume:
    """What moves if each device has room for the weights of `room` layers; empty before and after. The
    least recently used leaves: written if it was updated, or anyway (`writes_all`: a memory that cannot
    know)."""
    require_positive_ints(room=room)
    memories: dict[int, OrderedDict[int, bool]] = defaultdict(OrderedDict)  # device -> {layer: updated}
    fetched = written = 0
    for device, layer, kind in steps:
        memory = memories[device]
        fetched += layer not in memory
        memory[layer] = kind == "U" or memory.get(layer, False)
        memory.move_to_end(layer)
        if len(memory) > room:
            written += memory.popitem(last=False)[1] or writes_all
    for memory in memories.values():
        written += len(memory) if writes_all else sum(memory.values())
    return Volume(fetched, written)


def resident(free: Sequence[Number], layer_bytes: Number, layers: int, *, dynamic: bool) -> list[int]:
    """How many layers stay on the device in each step, given its free bytes: all, or what leaves room for two
    others, one that computes and one on its way."""
    fitting = [layers if room >= layers * layer_bytes else int(room // layer_bytes) - 2 for room in free]
    return fitting if dynamic else [min(fitting)] * len(free)


def offloading(residents: Sequence[int], layers: int, layer_s: Number, layer_bytes: Number) -> list[Task]:
    """Steps in which the first `residents[t]` layers are on the device; others are fetched one layer ahead.
    One that stays is fetched in the first step for which there is room, and dropped where there is none."""
    tasks: list[Task] = []
    for t, number in enumerate(residents):
        before = residents[t - 1] if t else 0
        for layer in range(layers):
            here, needs = t * layers + layer, ()
            if layer >= min(before, number):
                ahead = (f"use {here - 2}",) if here > 1 else ()
                tasks.append(Task(f"fetch {here}", "copies", layer_bytes, ("to device",), ahead))
                needs = (f"fetch {here}",)
            tasks.append(Task(f"use {here}", "device", layer_s, after=needs))
    return tasks


class TierLayer(NamedTuple):
    seconds: Number
    dense_bytes: Number = 0  # parts of other ranks
    host_bytes: Number = 0  # experts that the host has
    disk_bytes: Number = 0  # and those it does not: read first, then copied as the others


def prefetching(layers: Sequence[TierLayer], depth: int, *, known: bool = True) -> list[Task]:
    """A pass over the layers on the links "net", "bus" and "disk". The fetch of a layer begins as the one
    `depth` before it does (0: when it is due). Experts that are not `known` before the layer's own router has
    spoken are fetched when it is due."""
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


class DecayingLFU(LRU):
    """A cache of `capacity` experts; the one with the smallest count leaves, of equal ones the one not read
    for longest. After every `every` reads all counts are multiplied by `decay`: 1 never forgets."""

    def __init__(self, capacity: int, decay: float = 0.5, every: int = 100):
        super().__init__(capacity)
        self.decay, self.every, self.reads = decay, every, 0
        self.counts: Counter = Counter()  # of all experts, here or not

    def read(self, sample: int) -> bool:
        self.counts[sample] += 1
        self.reads += 1
        hit = super().read(sample)
        if self.reads % self.every == 0:
            self.counts = Counter({expert: count * self.decay for expert, count in self.counts.items()})
        return hit

    def leaves(self) -> int:
        return min(self.samples, key=self.counts.__getitem__)


class Sizes(NamedTuple):
    """Bytes of a parameter."""

    states: Number = 12
    gradient: Number = 4
    parameter: Number = 2


def host_bytes(sizes: Sizes, *, near: bool) -> dict[str, Number]:
    """Over the host's link to its storage, a parameter and step; `near`: updated in the storage devices."""
    states, gradient, parameter = sizes
    if near:
        return {"written": gradient, "read": parameter}
    return {"written": gradient + states + parameter, "read": gradient + states}


def updating(parameters: int, devices: int, sizes: Sizes, *, near: bool, chunks: int = 1) -> list[Task]:
    """The update of all parameters, whose states lie on `devices` in stripes, chunk by chunk, over the links
    "to disks" and "to host", "read d" and "write d" of each storage device. The gradient is written first,
    which is when its chunk can be updated; the new parameter is read last."""
    tasks, amount = [], parameters // (devices * chunks)
    for d in range(devices):
        inside = (f"read {d}",), (f"write {d}",)
        to_host, from_host = (f"read {d}", "to host"), (f"write {d}", "to disks")
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
