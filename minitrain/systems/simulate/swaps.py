"""Whose copies meet on the way to the host, what is copied again and again, and what need not be. No torch.

    TMOF       devices that share a link swap different tensors, or in different directions
    Harmony    microbatches in groups per layer, updates at once, weights on one device: 3|W| for (4m+2)N|W|
    static     what stays on the device fits at the worst moment;  dynamic: at this moment

Sizes are in bytes (or layers of one size), times in seconds, exact for whole numbers and Fractions; tasks are
played by links.py. Weights on the host stay valid while nobody updates them, so dropping them sends nothing.
Lin et al. 2023 (TMOF), HPCA; Li et al. 2021 (Doing more with less), HotOS, and 2022 (Harmony), PVLDB 15,
arXiv:2202.01306; dynamic: Fang et al. 2021 (PatrickStar), arXiv:2108.05818. Differs: TMOF's sets are dealt in
turn, not searched; Harmony's volumes are of weights and of what layers send each other, and the layer that
leaves is the least recently used: where the order of layers turns round, those still there are not fetched
again, which the formulas leave out.
"""

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from minitrain.plan.simulate.links import Number, Task
from minitrain.ranks.checks import require_nonnegative, require_positive_ints

# ---- TMOF: not the same tensors, not the same way ----------------------------------------------------------


def dealt(sizes: Sequence[Number], devices: int, needed: Number) -> list[set[int]] | None:
    """Tensors that each device swaps, `needed` bytes at least, no tensor on two: dealt out in turn.

    None if there are not enough: then only turns in direction help."""
    sets: list[set[int]] = [set() for _ in range(devices)]
    held = [0] * devices
    for tensor, size in enumerate(sizes):
        wanting = [d for d in range(devices) if held[d] < needed]
        if wanting:
            device = min(wanting, key=lambda d: ((d - tensor) % devices, d))
            sets[device].add(tensor)
            held[device] += size
    return sets if min(held) >= needed else None


def swapping_forward(sets: Sequence[Collection[int]], sizes: Sequence[Number], layer_s: Number) -> list[Task]:
    """Forwards that swap out, device d what is in sets[d], all over the link "up".

    Layer l + 2 needs the memory of layer l's tensor, if that is to go."""
    require_nonnegative(layer_s=layer_s)
    tasks = []
    for d, swapped in enumerate(sets):
        for layer, size in enumerate(sizes):
            gone = (f"out {d}.{layer - 2}",) if layer - 2 in swapped else ()
            tasks.append(Task(f"F {d}.{layer}", f"device {d}", layer_s, after=gone))
            if layer in swapped:
                tasks.append(Task(f"out {d}.{layer}", f"copies {d}", size, ("up",), (f"F {d}.{layer}",)))
    return tasks


def exchanges(devices: int, rounds: int, size: Number, *, opposed: bool) -> list[Task]:
    """Each device sends `size` bytes up and fetches as many, in turns, over the links "up" and "down".

    Opposed: every second device fetches while the others send, so that no two of a pair share a direction."""
    tasks = []
    for d in range(devices):
        ways = ("down", "up") if opposed and d % 2 else ("up", "down")
        turns = [(turn, way) for turn in range(rounds) for way in ways]
        tasks += [Task(f"{way} {d}.{turn}", f"copies {d}", size, (way,)) for turn, way in turns]
    return tasks


# ---- Harmony: what is fetched again and again --------------------------------------------------------------


class Step(NamedTuple):
    """Something that a device does with a layer's weights."""

    device: int
    layer: int
    kind: str  # "F", "B", "U"
    microbatch: int | None = None


class Volume(NamedTuple):
    fetched: int  # weights of layers, host to device
    written: int  # and back
    peer: int  # activations and their gradients, of a microbatch each, device to device
    by_host: int  # the same through the host: each passes twice

    @property
    def weights(self) -> int:
        return self.fetched + self.written


def virtualized(devices: int, layers: int, m: int) -> list[Step]:
    """Data parallel training that trusts a virtual memory on each device: microbatch by microbatch."""
    require_positive_ints(devices=devices, layers=layers, m=m)
    steps = []
    for d in range(devices):
        for j in range(m):
            steps += [Step(d, layer, "F", j) for layer in range(layers)]
            steps += [Step(d, layer, "B", j) for layer in reversed(range(layers))]
        steps += [Step(d, layer, "U") for layer in range(layers)]
    return steps


def harmony_dp(devices: int, layers: int, m: int) -> list[Step]:
    """Each layer does all microbatches before it leaves, and is updated when its gradient is complete."""
    require_positive_ints(devices=devices, layers=layers, m=m)
    return [step for d in range(devices) for step in _grouped([d] * layers, m)]


def harmony_pp(devices: int, layers: int, m: int, binding: Sequence[int] | None = None) -> list[Step]:
    """The same with each layer on one device; `m` microbatches are those of all devices together."""
    require_positive_ints(devices=devices, layers=layers, m=m)
    binding = [layer % devices for layer in range(layers)] if binding is None else list(binding)
    if len(binding) != layers or not {*binding} <= {*range(devices)}:
        raise ValueError(f"binding {binding}: give each of {layers} layers one of {devices} devices")
    return _grouped(binding, m)


def _grouped(device_of: Sequence[int], m: int) -> list[Step]:
    steps = [Step(d, layer, "F", j) for layer, d in enumerate(device_of) for j in range(m)]
    for layer, d in reversed([*enumerate(device_of)]):
        steps += [Step(d, layer, "B", j) for j in range(m)] + [Step(d, layer, "U")]
    return steps


def late_binding(layer_s: Sequence[Number], speeds: Sequence[Number]) -> list[int]:
    """Each layer's device, chosen when its turn comes: where it would be done first."""
    busy, binding = [0] * len(speeds), []
    for seconds in layer_s:
        ends = [busy[d] + seconds / speeds[d] for d in range(len(speeds))]
        binding.append(min(range(len(speeds)), key=lambda d: (ends[d], d)))
        busy[binding[-1]] = ends[binding[-1]]
    return binding


def swap_volume(steps: Iterable[Step], room: int, *, writes_all: bool = False, peers: bool = True) -> Volume:
    """Counts what moves if each device has room for the weights of `room` layers; empty before and after.

    The least recently used layer leaves: written if it was updated, or in any case (`writes_all`: a memory
    that does not know). Activations between devices go from peer to peer or through the host."""
    if room < 1:
        raise ValueError(f"room={room}: a device needs room for the layer it computes, 1 or more")
    held: dict[int, OrderedDict[int, bool]] = {}  # device -> {layer: updated}
    count, made_on = Counter(), {}
    for device, layer, kind, microbatch in steps:
        memory = held.setdefault(device, OrderedDict())
        count["fetched"] += layer not in memory
        memory[layer] = kind == "U" or memory.get(layer, False)
        memory.move_to_end(layer)
        if len(memory) > room:
            count["written"] += memory.popitem(last=False)[1] or writes_all
        if kind != "U":
            source = made_on.get((kind, layer + (1 if kind == "B" else -1), microbatch), device)
            made_on[kind, layer, microbatch] = device
            count["crossing"] += source != device
    for memory in held.values():
        count["written"] += len(memory) if writes_all else sum(memory.values())
    between = (count["crossing"], 0) if peers else (0, 2 * count["crossing"])
    return Volume(count["fetched"], count["written"], *between)


# ---- what stays: for the worst moment, or for this one -----------------------------------------------------


def resident(free: Sequence[Number], layer_bytes: Number, layers: int, *, dynamic: bool) -> list[int]:
    """How many layers stay on the device in each step, given its free bytes: all, or what leaves room for two
    others, one that computes and one on its way."""
    fitting = [layers if room >= layers * layer_bytes else int(room // layer_bytes) - 2 for room in free]
    if not fitting or min(fitting) < 0:
        need = f"{2 * layer_bytes} bytes, for the layer that computes and the next"
        raise ValueError(f"free memory of {min(free, default=0)} bytes; every step needs {need}")
    return fitting if dynamic else [min(fitting)] * len(free)


def offloading(stay: Sequence[int], layers: int, layer_s: Number, layer_bytes: Number) -> list[Task]:
    """Steps in which the first stay[t] layers are on the device; others are fetched one layer ahead of use.

    A layer that stays is fetched in the first step for which there is room, and dropped where there is none.
    """
    require_positive_ints(layers=layers)
    require_nonnegative(layer_s=layer_s, layer_bytes=layer_bytes)
    tasks: list[Task] = []
    for t, number in enumerate(stay):
        before = stay[t - 1] if t else 0
        for layer in range(layers):
            here, needs = t * layers + layer, ()
            if layer >= min(before, number):
                ahead = (f"use {here - 2}",) if here > 1 else ()
                tasks.append(Task(f"fetch {here}", "copies", layer_bytes, ("down",), ahead))
                needs = (f"fetch {here}",)
            tasks.append(Task(f"use {here}", "device", layer_s, after=needs))
    return tasks
