"""Mobius: a pipeline of more stages than devices, whose weights come from the host in time. No torch.

    stage s on device order[s mod N];  it computes, while the weights of stage s + N are on their way to it
    the backward goes through the stages from the last to the first, of which the last N are still there

    in order    devices 0 1 | 2 3 of two root complexes get neighbouring stages: 0 and 1 load through one root
                at about the same time
    crossed     0 2 1 3: neighbours load through different roots

A device holds the stage that computes and the next one it will: together at most `room` bytes.
Feng et al. 2023 (Mobius), ASPLOS. Differs: an exact search in place of a mixed-integer
program; activations stay on the device; gradients go to the host, and the host's update is not part of it.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from minitrain.plan.simulate.links import Number, Task, divided
from minitrain.ranks.checks import require_ints, require_positive_ints


class Layer(NamedTuple):
    forward_s: Number  # of a microbatch
    backward_s: Number
    bytes: Number  # weights, and as many of gradients


class Partition(NamedTuple):
    seconds: Number
    cut: tuple[range, ...]  # layers of each stage
    tried: int  # cuts that were timed to the end


def crossed(roots: Sequence[int]) -> list[int]:
    """Devices in an order in which neighbours are behind different root complexes, while there are such."""
    left: dict[int, list[int]] = {}
    for device, root in enumerate(roots):
        left.setdefault(root, []).append(device)
    order: list[int] = []
    while any(left.values()):
        other = [root for root in left if left[root] and (not order or root != roots[order[-1]])]
        most = max(other or [root for root in left if left[root]], key=lambda root: len(left[root]))
        order.append(left[most].pop(0))
    return order


def tasks(stages: Sequence[Layer], m: int, order, roots, *, prefetch: bool = True) -> list[Task]:
    """A step, on the links "down r" and "up r" of each root complex r.

    Without prefetch a stage is loaded when the one before it on its device has ended, into the same room."""
    require_ints(0, len(roots) - 1, order=order)
    require_positive_ints(m=m)
    made, n, last = [], len(order), len(stages) - 1

    def device(s: int) -> int:
        return order[s % n]

    def load(way: str, s: int, after: tuple[str, ...]) -> Task:
        d = device(s)
        return Task(f"load {way}{s}", f"loads {d}", stages[s].bytes, (f"down {roots[d]}",), after)

    def when(way: str, s: int) -> tuple[str]:
        return (f"begin {way}{s}" if prefetch else f"{way}{s}.{m - 1}",)

    for s, stage in enumerate(stages):
        made.append(load("F", s, when("F", s - n) if s >= n else ()))
        made.append(Task(f"begin F{s}", f"device {device(s)}", 0, after=(f"load F{s}", *_first("F", s - 1))))
        for j in range(m):
            after = (f"F{s - 1}.{j}",) if s else ()
            made.append(Task(f"F{s}.{j}", f"device {device(s)}", stage.forward_s, after=after))
    for s in range(last, -1, -1):
        d, needs = device(s), _first("B", s + 1) if s < last else (f"F{last}.{m - 1}",)
        if s <= last - n:
            made.append(load("B", s, when("B", s + n)))
            needs = (*needs, f"load B{s}")
        made.append(Task(f"begin B{s}", f"device {d}", 0, after=needs))
        for j in range(m):
            after = (f"B{s + 1}.{j}",) if s < last else ()
            made.append(Task(f"B{s}.{j}", f"device {d}", stages[s].backward_s, after=after))
        after = (f"B{s}.{m - 1}",)
        made.append(Task(f"store {s}", f"stores {d}", stages[s].bytes, (f"up {roots[d]}",), after))
    return made


def _first(way: str, s: int) -> tuple[str, ...]:
    return (f"{way}{s}.0",) if s >= 0 else ()


class _Times:
    """When devices are free, and what is loaded, as stages are added one behind the other."""

    def __init__(self, devices: int, m: int, bytes_per_s: Number, prefetch: bool = True):
        self.devices, self.prefetch, self.bytes_per_s = devices, prefetch, bytes_per_s
        self.free, self.loaded, self.began = [0] * devices, [0] * devices, [0] * devices
        self.before: list[Number] = [0] * m  # when the stage before has ended each microbatch

    def copy_s(self, stage: Layer) -> Number:
        return divided(stage.bytes, self.bytes_per_s)

    def add(self, s: int, stage: Layer, seconds: Number, *, load: bool) -> None:
        d = s % self.devices
        if load:
            room_at = self.began[d] if self.prefetch else self.free[d]
            self.loaded[d] = max(self.loaded[d], room_at) + self.copy_s(stage)
        begin = self.began[d] = max(self.before[0], self.free[d], self.loaded[d])
        ends = []
        for ready in self.before:
            begin = max(begin, ready) + seconds
            ends.append(begin)
        self.before, self.free[d] = ends, ends[-1]


def makespan(stages: Sequence[Layer], devices: int, m: int, bytes_per_s: Number, *, prefetch=True) -> Number:
    """Seconds of a step if every copy has its link to itself, stage by stage: a recursion, no simulation."""
    times, stored = _Times(devices, m, bytes_per_s, prefetch), [0] * devices
    for s, stage in enumerate(stages):
        times.add(s, stage, stage.forward_s, load=True)
    for s, stage in reversed([*enumerate(stages)]):
        times.add(s, stage, stage.backward_s, load=s < len(stages) - devices)
        stored[s % devices] = max(stored[s % devices], times.before[-1]) + times.copy_s(stage)
    return max(stored)


def partition(layers: Sequence[Layer], devices: int, m: int, room: Number, bytes_per_s: Number) -> Partition:
    """The fastest cut into stages: exact, for what is not tried is not faster.

    A step takes at least the forward of the stages so far, one microbatch through all others, one back
    through all, the other m - 1 back through the slowest stage so far, and the first stage's gradients' copy.
    """
    best, tried = None, 0
    waiting = [(0,)]  # ends of the stages so far
    while waiting:
        ends = waiting.pop()
        stages = [Layer(*map(sum, zip(*layers[a:b]))) for a, b in pairwise(ends)]
        pairs = zip(stages, stages[devices:])
        if any(stage.bytes > room for stage in stages) or any(a.bytes + b.bytes > room for a, b in pairs):
            continue
        if best and stages and _least(stages, layers[ends[-1] :], devices, m, bytes_per_s) >= best[0]:
            continue
        if ends[-1] < len(layers):
            waiting += [(*ends, end) for end in range(len(layers), ends[-1], -1)]
        else:
            tried += 1
            seconds = makespan(stages, devices, m, bytes_per_s)
            if not best or seconds < best[0]:
                best = seconds, tuple(range(a, b) for a, b in pairwise(ends))
    if not best:
        few = f"{len(layers)} layers on {devices} devices with {room} bytes each"
        raise ValueError(f"Mobius: no cut of {few} fits; use more room or smaller layers")
    return Partition(*best, tried)


def _least(stages, others: Sequence[Layer], devices: int, m: int, bytes_per_s: Number) -> Number:
    times = _Times(devices, m, bytes_per_s)
    for s, stage in enumerate(stages):
        times.add(s, stage, stage.forward_s, load=True)
    through = sum(layer.forward_s + layer.backward_s for layer in others)
    back = sum(stage.backward_s for stage in stages) + (m - 1) * max(stage.backward_s for stage in stages)
    return times.before[-1] + through + back + times.copy_s(stages[0])
