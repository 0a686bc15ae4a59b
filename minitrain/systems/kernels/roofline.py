"""The roofline: an operator is limited by the peak of arithmetic or by the bandwidth of memory. No torch.

    seconds >= max(FLOPs / peak, bytes / bandwidth)        ridge = peak / bandwidth, in FLOPs per byte

An operator with fewer FLOPs per byte than the ridge waits for memory, whatever its kernel does. In bfloat16
the ridge of an A100 is 153 (312 TFLOP/s and 2.039 TB/s), of an H100 295. A product of 4,096³ has 1,365 FLOPs
per byte; a LayerNorm, a softmax or an addition has a few, which the ledger does not even count: they cost
their bytes. `operators` places every operator of a step, from the ledger's events.

A bound: a kernel reads each tensor once and no launch takes time. Williams et al. 2009, "Roofline", CACM
52(4); NVIDIA 2020 and 2022, A100 and H100 datasheets (plan/simulate/machines.toml).
"""

from collections.abc import Iterable
from typing import NamedTuple

from minitrain.plan.simulate.machines import Device
from minitrain.ranks.checks import require_nonnegative, require_positive, require_text
from minitrain.ranks.events import Compute, Event
from minitrain.ranks.tables import aligned


class Roof(NamedTuple):
    """FLOPs and bytes of `calls` operators of one name under a device's peak and bandwidth."""

    name: str
    calls: int
    flops: int
    bytes: int
    peak: float  # FLOP/s
    bandwidth: float  # bytes/s

    ridge = property(lambda self: self.peak / self.bandwidth)
    intensity = property(lambda self: self.flops / self.bytes)
    limit = property(lambda self: "compute" if self.intensity >= self.ridge else "memory")
    seconds = property(lambda self: max(self.flops / self.peak, self.bytes / self.bandwidth))


def roof(flops: float, moved_bytes: float, device: Device, dtype: str = "bfloat16", name: str = "") -> Roof:
    """One operator on one device. Raises ValueError for a dtype without a published rate."""
    require_nonnegative(flops=flops)
    require_positive(moved_bytes=moved_bytes)
    require_text(dtype=dtype)
    return Roof(name, 1, flops, moved_bytes, device.peak(dtype), device.memory_bandwidth_bytes_per_s)


def operators(events: Iterable[Event], device: Device, dtype: str = "bfloat16") -> list[Roof]:
    """Every operator of a run, those of one name and one limit together, the longest first. Products count
    at the peak of their dtype; `dtype` is for operators that have none."""
    total: dict[tuple, Roof] = {}
    for event in events:
        if isinstance(event, Compute):
            one = roof(event.flops, event.bytes, device, event.dtype or dtype, event.name)
            at = one.name, one.limit, one.peak
            old = total.get(at, one._replace(calls=0, flops=0, bytes=0))
            total[at] = Roof(one.name, old.calls + 1, old.flops + one.flops, old.bytes + one.bytes, *one[4:])
    return sorted(total.values(), key=lambda one: -one.seconds)


def table(roofs: Iterable[Roof]) -> str:
    """A line an operator: calls, FLOPs per byte, what limits it, its share of the time of all."""
    roofs = list(roofs)
    total = sum(one.seconds for one in roofs)
    share = lambda one: f"{100 * one.seconds / total:.1f} %"
    rows = [(one.name, one.calls, f"{one.intensity:.1f}", one.limit, share(one)) for one in roofs]
    return aligned([("operator", "calls", "FLOPs per byte", "limited by", "of the time"), *rows], (0, 3))
