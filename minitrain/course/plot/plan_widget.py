"""Drag it: a model, a machine and a layout; memory of every stage, time of a step and MFU follow.

A `Choice` is what the controls say. What it cannot be (sizes that do not divide, say) is one line, with the
way out; what does not fit says by how much. All numbers are plan.predict's, so a move asks no torch:
only a kind of layer that was never dry-run needs up to a second, and is measured if `measure` is on. Of a
layer other tp, cp, ep, rows, length, recomputation and precision are another kind; ranks, dp, pp, schedule,
batch, ZeRO and machine are not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial

import ipywidgets

from minitrain.course.plot import plan_svg
from minitrain.course.plot.controls import Drawn, Followed, followed, menu, steps
from minitrain.model.config import presets
from minitrain.plan.predict.predicted_memory import by_rank
from minitrain.plan.predict.predicted_step import Prediction, predict
from minitrain.plan.predict.training_run import STACKS, TrainingRun
from minitrain.plan.predict.work import Work, WorkOf
from minitrain.plan.simulate.machines import MACHINES
from minitrain.plan.strategy import Strategy

REST = "rest"  # dp: as many as the other axes leave
SCHEDULES = {"1f1b": 1, "gpipe": 1, "zb_h1": 1, "interleaved": 2}  # and stages of a rank
POWERS = [2**n for n in range(15)]
VALUES = {  # of each control
    "model": list(presets),
    "machine": list(MACHINES),
    "precision": ["bfloat16_main_grads", "bfloat16", "float16", "float32"],
    "recompute": ["none", "selective", "full", "stage"],
    "schedule": list(SCHEDULES),
    "zero": [0, 1, 2, 3],
    "ranks": POWERS,
    "dp": [REST, *POWERS[:11]],
    "pp": POWERS[:5],
    "cp": POWERS[:5],
    "tp": POWERS[:5],
    "ep": POWERS[:7],
    "batch": POWERS[:13],
    "rows": POWERS[:4],
    "length": POWERS[7:],
}
ROWS = [["model", "machine", "precision"], ["recompute", "schedule", "zero"], ["ranks", "dp"], ["pp", "tp"]]
ROWS += [["cp", "ep"], ["batch", "rows"], ["length"]]
WORDS = dict(batch="rows per step", rows="rows per microbatch", length="tokens per row", zero="ZeRO")


class NotMeasured(ValueError):
    """A kind of layer that nobody has asked to be dry-run."""


@dataclass(frozen=True)
class Choice:
    """What the controls say; names as in Strategy, `batch` rows per step, `rows` per microbatch."""

    model: str = "llama3-8b"
    machine: str = "h100"
    precision: str = "bfloat16_main_grads"
    recompute: str = "none"
    schedule: str = "1f1b"
    zero: int = 1
    ranks: int = 16
    dp: int | str = REST
    pp: int = 2
    cp: int = 1
    tp: int = 1
    ep: int = 1
    batch: int = 64
    rows: int = 1
    length: int = 2048

    def run(self) -> TrainingRun:
        """ValueError for what cannot be."""
        others = self.pp * self.cp * self.tp
        dp = max(1, self.ranks // others) if self.dp == REST else self.dp
        if self.ranks != dp * others:
            sizes = f"dp · pp · cp · tp are {dp} · {self.pp} · {self.cp} · {self.tp} = {dp * others}"
            raise ValueError(f"{sizes}, but there are {self.ranks} ranks; change one of these")
        if self.batch % (dp * self.rows):
            sizes = f"dp = {dp} times {self.rows} rows per microbatch"
            cure = "take more, or smaller ones"
            raise ValueError(f"{self.batch} rows per step are no multiple of {sizes}; {cure}")
        sizes = dict(dp=dp, pp=self.pp, cp=self.cp, tp=self.tp, ep=self.ep, zero=self.zero)
        sizes |= dict(sequence_parallel=True) if self.tp > 1 else {}
        sizes |= dict(core="gathered") if self.cp > 1 else {}
        if self.pp > 1:
            sizes |= dict(schedule=self.schedule, chunks=SCHEDULES[self.schedule])
        sizes |= dict(microbatches=self.batch // (dp * self.rows), recompute=self.recompute)
        strategy = Strategy(**sizes, precision=self.precision)
        model = presets[self.model]
        machine, stack = MACHINES[self.machine], STACKS["overlapped"]
        run = TrainingRun(model, strategy, machine, self.batch, self.length, stack)
        strategy.check_batch(model, self.batch, self.length)
        run.machine.device.peak(strategy.policy.activations)
        return run


def picture(choice: Choice, work_of: WorkOf) -> Drawn:
    """Memory and time of a choice, or no picture and why it cannot be."""
    try:
        prediction = predict(run := choice.run(), work_of)
        kept = work_of(run.model, run.strategy, run.microbatch, run.length, run.stack.flash)
        stages = by_rank(run, kept)
    except NotMeasured as error:
        return None, [str(error)]
    except ValueError as error:
        return None, [f"impossible: {error}"]
    fits, speed = _fits(prediction, stages), _speed(prediction)
    title = f"{choice.model} on {choice.ranks} x {run.machine.device.name}: {_layout(prediction)}"
    limits = [f"not known: {said}" for said in prediction.limits if "does not fit" not in said]
    return plan_svg.drawn(prediction, stages, title, fits, speed), [fits, speed, *limits]


def _fits(prediction: Prediction, stages: list[dict[str, int]]) -> str:
    sums = [sum(memory.values()) for memory in stages]
    device, most = prediction.run.machine.device, max(sums)
    room = device.capacity_bytes
    where = f"stage {sums.index(most)} needs" if len(sums) > 1 else "a rank needs"
    said = f"{where} {most / 1e9:.1f} of the {room / 1e9:.0f} GB of {device.name}"
    if most > room:
        return f"does not fit: {said}, {(most - room) / 1e9:.1f} GB too much"
    tight = "; less than a tenth is left for what is not counted" if most > 0.9 * room else ""
    return f"fits: {said}{tight}"


def _speed(prediction: Prediction) -> str:
    run = prediction.run
    tokens = run.batch * run.length / prediction.step_s
    mfu = f"MFU {prediction.mfu:.1%}"
    return f"a step takes {prediction.step_s:.4g} s, {mfu}, {tokens:,.0f} tokens per second"


def _layout(prediction: Prediction) -> str:
    strategy, rows = prediction.run.strategy, prediction.run.microbatch
    sizes = " x ".join(f"{axis} {getattr(strategy, axis)}" for axis in ("dp", "pp", "cp", "tp"))
    more = [f"ep {strategy.ep}"] * (strategy.ep > 1) + [strategy.schedule] * (strategy.pp > 1)
    said = ", ".join([sizes, *more, f"ZeRO-{strategy.zero}"])
    return f"{said}; {strategy.microbatches} microbatches of {rows} row{'s' if rows > 1 else ''}"


def explore(work_of: WorkOf, known: Callable[..., bool], **first: int | str) -> Followed:
    """Menus and sliders above a picture that follows them; `work_of` and `known` are those of
    minitrain/compose/dry_runs.py, `first` are fields of a Choice to begin with."""
    names = {field.name for field in fields(Choice)}
    if unknown := sorted(first.keys() - names):
        raise ValueError(f"explore: a choice has no {', '.join(unknown)}; use {', '.join(sorted(names))}")
    start = Choice(**first)
    measure = ipywidgets.ToggleButton(False, description="measure", tooltip="dry-run new kinds of layers")
    rows = [[_control(name, getattr(start, name)) for name in row] for row in ROWS]
    rows[-1].append(measure)
    picture(start, work_of)  # measures the first kind of layer

    def draw(*rows: list) -> Drawn:
        *values, wanted = (value for row in rows for value in row)
        choice = replace(start, **dict(zip((name for row in ROWS for name in row), values)))
        return picture(choice, work_of if wanted else partial(_only, known, work_of))

    return followed(rows, draw, f"memory by stage and time by part of {start.model} on {start.ranks} ranks")


def _only(known: Callable[..., bool], work_of: WorkOf, *asked) -> Work:
    if not known(*asked):
        raise NotMeasured("such a layer was not dry-run yet; press measure (up to a second for each kind)")
    return work_of(*asked)


def _control(name: str, value: int | str):
    values = VALUES[name]
    if value not in values:
        if isinstance(value, str):
            raise ValueError(f"explore: {name}={value!r}; use {', '.join(map(str, values))}")
        values = [*(one for one in values if one == REST), *sorted({value, *values} - {REST})]
    make = menu if isinstance(values[0], str) and name != "dp" else steps
    return make(WORDS.get(name, name), values, value)
