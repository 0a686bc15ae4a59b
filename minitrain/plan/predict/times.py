"""Where ranks sit on a machine, and what one layer takes there, forward and back.

    at = Place(machine, stack, rates, dp, pp, cp, tp, ep)
    times = layers_s(work, at, again)        of pipeline.LAYERS: F, B, I, W, R, and parts

Operators by rates.py; collectives of tp, cp and ep by what they leave exposed. `again` adds a block's forward
to its backward. Remembered by (work, place).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from minitrain.plan.predict.predicted_memory import layers_of
from minitrain.plan.predict.rates import Rates, exposed, on_wires, seconds, travel_s
from minitrain.plan.predict.training_run import Stack
from minitrain.plan.predict.work import Layer, Pass, Work
from minitrain.plan.simulate.machines import Machine

AXES = ("tp", "cp", "ep")


class Place(NamedTuple):
    """Where ranks sit, and how fast they are there."""

    machine: Machine
    stack: Stack
    rates: Rates
    dp: int
    pp: int
    cp: int
    tp: int
    ep: int

    @property
    def dp_stride(self) -> int:
        return self.cp * self.tp * (1 if self.stack.dp_inside_pp else self.pp)

    @property
    def pp_stride(self) -> int:
        return self.cp * self.tp * (self.dp if self.stack.dp_inside_pp else 1)

    def ranks_of(self, members: tuple[int, ...]) -> tuple[int, ...]:
        """Of a world of dp · cp · tp, on the machine."""
        inside = self.cp * self.tp
        return tuple(rank // inside * self.dp_stride + rank % inside for rank in members)

    def stages_apart(self, stages: int) -> tuple[int, int]:
        """Two ranks so many stages apart, on two nodes if any such are."""
        step, node = stages * self.pp_stride, self.machine.devices_per_node
        crosses = self.pp * self.pp_stride > node > step
        return (node - step, node) if crosses else (0, step)

    def travel_s(self, op: str, payload_bytes: float, members: tuple[int, ...]) -> float:
        return travel_s(op, payload_bytes, members, self.machine, self.rates)


@dataclass(frozen=True)
class Times:
    """Seconds of one layer: by KINDS, and F and B together by PARTS. `on_wires`: of F and B, those in which
    their own transfers have a rank's links inside the node, and its share of the cards."""

    passes: tuple[float, ...]
    parts: dict[str, float]
    on_wires: tuple[tuple[float, float], tuple[float, float]]


@lru_cache(maxsize=1 << 12)
def layers_s(work: Work, at: Place, again: bool) -> tuple[Times, ...]:
    """Of LAYERS; with `again` a block's forward runs before its backward, too."""
    ends = work.embedding, work.head
    return tuple(_times(layer, at, again and layer not in ends) for layer in layers_of(work))


def _times(layer: Layer, at: Place, again: bool) -> Times:
    forward, backward, weights = (
        _pass(one_pass, at) for one_pass in (layer.forward, layer.backward, layer.weights)
    )
    f, b, w = (sum(one_pass.values()) for one_pass in (forward, backward, weights))
    parts = {name: forward[name] + backward[name] for name in forward}
    sent = tuple(
        on_wires(one_pass, at.machine, at.rates, at.ranks_of) for one_pass in (layer.forward, layer.backward)
    )
    return Times((f, b + f * again, b + f * again - w, w, f), parts | {"recomputation": f * again}, sent)


def _pass(one_pass: Pass, at: Place) -> dict[str, float]:
    found = seconds(one_pass.operators, at.machine, at.rates, at.stack)
    waits = dict.fromkeys(AXES, 0.0) | exposed(one_pass, at.machine, at.rates, at.stack, at.ranks_of)
    if at.stack.tp_overlapped:  # cut into tp parts, the first of which finds no product to hide behind
        waits["tp"] = max(waits["tp"] / at.tp, waits["tp"] - found["products"])
    return found | waits
