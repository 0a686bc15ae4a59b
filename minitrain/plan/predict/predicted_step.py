"""The time of a training step, and where it goes: predicted from a dry run's counts and a machine's rates.

    prediction = predict(run, work_of)            .step_s  .parts  .mfu  .memory  .limits

    step = longest way through the pipeline's schedule + exposed dp + tied tables + optimizer

    layers      products, attention, passes through memory, what a layer waits for on tp, cp and ep
    recompute   a stack that runs whole blocks again adds their forward to each backward
    p2p         a boundary between stages: it delays, or holds up its rank as well where the stack blocks
    dp          gradients over dp · cp (ZeRO 1, 2: and the weights back; 3: weights in both passes);
                overlapped: what the passes after a layer's last backward do not cover
    optimizer   each of its states read and written once, gradients read, weights written

`parts` add up to step_s: work is the mean over ranks, `bubble` what the longest path has beyond it. All is
remembered by structure: after the first of its kind a prediction takes some 50 us. Not modelled:
stragglers, input, losses of a network under load, kernels slowed by transfers beside them, dynamic expert
loads.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache
from itertools import chain

from minitrain.plan.accounting.compute import flops_per_token
from minitrain.plan.predict.predicted_memory import memory_of
from minitrain.plan.predict.predicted_pipeline import KINDS, Costs, Layout, layout_of, least, makespan
from minitrain.plan.predict.rates import NAMES, RATES, Rates
from minitrain.plan.predict.times import AXES, Place, layers_s
from minitrain.plan.predict.training_run import TrainingRun
from minitrain.plan.predict.update import update_s
from minitrain.plan.predict.work import Work, WorkOf
from minitrain.plan.strategy import Strategy

PARTS = (*NAMES, "recomputation", *AXES, "p2p", "bubble", "dp", "tied table", "optimizer")


@dataclass(frozen=True)
class Prediction:
    run: TrainingRun
    work: Work  # of the passes that are timed
    work_of: WorkOf = field(repr=False)
    step_s: float
    parts: dict[str, float]  # seconds by PARTS; they add up to step_s

    @cached_property
    def mfu(self) -> float:
        """Of the model's FLOPs, a causal attention counted as a triangle."""
        return self._utilisation("triangle")

    @cached_property
    def mfu_square(self) -> float:
        """The same with all T² scores, as most papers count."""
        return self._utilisation("square")

    def _utilisation(self, causal: str) -> float:
        run = self.run
        tokens = run.batch * run.length
        flops = tokens * flops_per_token(run.model, run.length, causal=causal)
        return flops / (self.step_s * self._peak)

    @cached_property
    def hfu(self) -> float:
        """Of what is executed, recomputation and all scores that a kernel computes included."""
        run, work = self.run, self.work
        blocks = [work.of_block(run.model, number) for number in range(1, run.model.num_layers + 1)]
        flops = sum(
            layer.forward.flops + layer.backward.flops for layer in (work.embedding, work.head, *blocks)
        )
        again = {"stage", "full"} if run.stack.whole_again else {"stage"}
        if run.strategy.recompute in again:
            flops += sum(layer.forward.flops for layer in blocks)
        ranks = run.strategy.dp * run.strategy.cp * run.strategy.tp
        return flops * run.strategy.microbatches * ranks / (self.step_s * self._peak)

    @property
    def _peak(self) -> float:
        return self.run.strategy.ranks * self.run.machine.device.peak(self.run.strategy.policy.activations)

    @cached_property
    def memory(self) -> dict[str, int]:
        """Bytes by kind on the rank that has most."""
        run = self.run
        kept = self.work_of(run.model, run.strategy, run.microbatch, run.length, run.stack.flash)
        return memory_of(run, kept)

    @cached_property
    def limits(self) -> tuple[str, ...]:
        """What of this run the prediction does not know, in words; empty if nothing."""
        run, found = self.run, []
        if sum(self.memory.values()) > run.machine.device.memory_bytes:
            found.append("does not fit: more memory than the device has")
        if run.model.experts:
            found.append("experts: as if tokens were spread evenly")
        if run.strategy.offload != "none":
            found.append("offload: copies to the host are not timed")
        if run.strategy.slices > 1:
            found.append("slices: as if each took as long")
        return tuple(found)


def predict(run: TrainingRun, work_of: WorkOf, rates: Rates = RATES) -> Prediction:
    """`work_of(config, strategy, microbatch, length, fused_attention)` counts: measured_work.py."""
    work, parts = _parts(run, work_of, rates, makespan)
    return Prediction(run, work, work_of, sum(parts.values()), parts)


def least_s(run: TrainingRun, work_of: WorkOf, rates: Rates = RATES) -> float:
    """What no prediction of the run is below, found without a simulation of its schedule."""
    _, parts = _parts(run, work_of, rates, least)
    return sum(parts.values())


def _parts(run: TrainingRun, work_of: WorkOf, rates: Rates, end) -> tuple[Work, dict[str, float]]:
    """`end(layout, costs)`: when the last rank has done all microbatches."""
    strategy, stack = run.strategy, run.stack
    again = strategy.recompute == "stage"
    counted = strategy
    if stack.whole_again and strategy.recompute == "full":
        counted, again = _keeping_all(strategy), True
    work = work_of(run.model, counted, run.microbatch, run.length, stack.flash)
    layout = layout_of(run.model, strategy)
    at = Place(run.machine, stack, rates, strategy.dp, strategy.pp, strategy.cp, strategy.tp, strategy.ep)
    timed, costs = _without_bubble(work, layout, at, again, strategy.sequence_parallel)
    parts = timed | {"bubble": max(0.0, end(layout, costs) - sum(timed.values()))}
    parts |= update_s(work, layout, at, strategy.zero, strategy.policy.state_bytes, run.model.tied, again)
    return work, parts


@cache
def _keeping_all(strategy: Strategy) -> Strategy:
    return replace(strategy, recompute="none", recompute_partition=False)


@lru_cache(maxsize=1 << 14)
def _without_bubble(
    work: Work, layout: Layout, at: Place, again: bool, sequence_parallel: bool
) -> tuple[dict[str, float], Costs]:
    """If no rank ever waited for another: the mean over ranks. And the costs of its passes."""
    layers, blocking = layers_s(work, at, again and not layout.again), not at.stack.p2p_overlapped
    message_s = _message_s(work.boundary_bytes, at, sequence_parallel) if at.pp > 1 else 0.0
    passes = chain.from_iterable(zip(*(times.passes for times in layers)))
    parts, share = dict.fromkeys(PARTS, 0.0), layout.microbatches / layout.p
    for number, times in zip(map(sum, zip(*layout.stages)), layers):
        for name, time in times.parts.items():
            parts[name] += number * share * time
        parts["recomputation"] += number * share * times.passes[KINDS.index("R")] * layout.again
    parts["p2p"] = 2 * (len(layout.stages) - 1) * share * message_s * blocking
    return parts, Costs(tuple(passes), message_s, blocking)


def _message_s(boundary_bytes: int, at: Place, sequence_parallel: bool) -> float:
    """From a stage to the next; tp ranks that have the same may send a part each, gathered on arrival."""
    ends = at.stages_apart(1)
    if sequence_parallel or not at.stack.scattered or at.tp == 1:
        return at.travel_s("send", boundary_bytes, ends)
    gather_s = at.travel_s("all_gather", boundary_bytes, tuple(range(at.tp)))
    return at.travel_s("send", boundary_bytes / at.tp, ends) + gather_s
