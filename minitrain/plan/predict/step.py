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

from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from itertools import chain
from typing import NamedTuple

from minitrain.plan.accounting.compute import flops_per_token
from minitrain.plan.predict.memory import elements_of, layers_of, memory_of
from minitrain.plan.predict.pipeline import KINDS, LAYERS, Costs, Layout, edges, layout_of, makespan
from minitrain.plan.predict.rates import NAMES, RATES, Rates, exposed, seconds, travel_s
from minitrain.plan.predict.run import Stack, TrainingRun
from minitrain.plan.predict.work import Layer, Pass, Work, WorkOf
from minitrain.simulate.machines import Machine
from minitrain.strategy import Strategy

AXES = ("tp", "cp", "ep")
PARTS = (*NAMES, "recomputation", *AXES, "p2p", "bubble", "dp", "tied table", "optimizer")


@dataclass(frozen=True)
class Prediction:
    run: TrainingRun
    work: Work
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
        return memory_of(self.run, self.work)

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
    """`work_of(config, strategy, microbatch, length, fused_attention)` counts: minitrain/measured_work.py."""
    strategy, stack = run.strategy, run.stack
    again = strategy.recompute == "stage"
    counted = strategy
    if stack.whole_again and strategy.recompute == "full":
        counted, again = _keeping_all(strategy), True
    work = work_of(run.model, counted, run.microbatch, run.length, stack.flash)
    layout = layout_of(run.model, strategy)
    at = Place(run.machine, stack, rates, strategy.dp, strategy.pp, strategy.cp, strategy.tp, strategy.ep)
    parts = dict(_pipeline(work, layout, at, again, strategy.sequence_parallel))
    parts |= _update(work, layout, at, strategy.zero, strategy.policy.state_bytes, run.model.tied, again)
    return Prediction(run, work, sum(parts.values()), parts)


@cache
def _keeping_all(strategy: Strategy) -> Strategy:
    return replace(strategy, recompute="none", recompute_partition=False)


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


# ---- the passes of a step --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Times:
    """Seconds of one layer: by KINDS, and F and B together by PARTS."""

    passes: tuple[float, ...]
    parts: dict[str, float]


@lru_cache(maxsize=1 << 12)
def _layers(work: Work, at: Place, again: bool) -> tuple[Times, ...]:
    """Of LAYERS; with `again` a block's forward runs before its backward, too."""
    ends = work.embedding, work.head
    return tuple(_times(layer, at, again and layer not in ends) for layer in layers_of(work))


def _times(layer: Layer, at: Place, again: bool) -> Times:
    forward, backward, weights = (_pass(way, at) for way in (layer.forward, layer.backward, layer.weights))
    f, b, w = (sum(way.values()) for way in (forward, backward, weights))
    parts = {name: forward[name] + backward[name] for name in forward}
    return Times((f, b + f * again, b + f * again - w, w, f), parts | {"recomputation": f * again})


def _pass(way: Pass, at: Place) -> dict[str, float]:
    found = seconds(way.operators, at.machine, at.rates, at.stack)
    waits = dict.fromkeys(AXES, 0.0) | exposed(way, at.machine, at.rates, at.stack, at.ranks_of)
    if at.stack.tp_overlapped:  # cut into tp parts, the first of which finds no product to hide behind
        waits["tp"] = max(waits["tp"] / at.tp, waits["tp"] - found["products"])
    return found | waits


@lru_cache(maxsize=1 << 14)
def _pipeline(
    work: Work, layout: Layout, at: Place, again: bool, sequence_parallel: bool
) -> dict[str, float]:
    """What the microbatches of a step take, by PARTS."""
    layers, blocking = _layers(work, at, again and not layout.again), not at.stack.p2p_overlapped
    message_s = _message_s(work.boundary_bytes, at, sequence_parallel) if at.pp > 1 else 0.0
    passes = chain.from_iterable(zip(*(times.passes for times in layers)))
    parts, share = dict.fromkeys(PARTS, 0.0), layout.microbatches / layout.p
    for number, times in zip(map(sum, zip(*layout.stages)), layers):
        for name, time in times.parts.items():
            parts[name] += number * share * time
        parts["recomputation"] += number * share * times.passes[KINDS.index("R")] * layout.again
    costs = Costs(tuple(passes), message_s, blocking)
    parts["p2p"] = 2 * (len(layout.stages) - 1) * share * message_s * blocking
    parts["bubble"] = makespan(layout, costs) - sum(parts.values())
    return parts


def _message_s(boundary_bytes: int, at: Place, sequence_parallel: bool) -> float:
    """From a stage to the next; tp ranks that have the same may send a part each, gathered on arrival."""
    ends = at.stages_apart(1)
    if sequence_parallel or not at.stack.scattered or at.tp == 1:
        return at.travel_s("send", boundary_bytes, ends)
    gather_s = at.travel_s("all_gather", boundary_bytes, tuple(range(at.tp)))
    return at.travel_s("send", boundary_bytes / at.tp, ends) + gather_s


# ---- once a step -----------------------------------------------------------------------------------------


@lru_cache(maxsize=1 << 14)
def _update(
    work: Work, layout: Layout, at: Place, zero: int, state: tuple[int, int, int], tied: bool, again: bool
) -> dict[str, float]:
    if isinstance(zero, str):
        raise ValueError(f"zero={zero!r}: predictions know replicas and ZeRO; use 0, 1, 2 or 3")
    weight, gradient, optimizer = state
    block = LAYERS.index("block")
    elements, dealt = max(
        (elements_of(work, own, tied), own[block] * work.expert_parameters) for own in layout.ranks
    )
    everywhere = elements - dealt
    group = tuple(at.ranks_of(tuple(range(0, at.dp * at.cp * at.tp, at.tp))))
    some = group[:: at.ep]  # the ranks with the same experts
    dp_s = _sums_s(everywhere, group, at, zero, layout, work, again, weight, gradient)
    dp_s += _sums_s(dealt, some, at, zero, layout, work, again, weight, gradient) if dealt else 0.0
    tied_s = 0.0
    if tied and at.pp > 1:
        ends = tuple(sorted({0, (at.pp - 1) * at.pp_stride}))
        tied_s = at.travel_s("all_reduce", work.head.shared_parameters * gradient, ends)
    shards = len(group) if zero else 1
    moved = elements * (2 * optimizer + 3 * gradient + weight) / shards
    device, rates = at.machine.device, at.rates
    bandwidth = device.memory_bandwidth_bytes_per_s * at.machine.memory_efficiency * rates.memory
    return {"dp": dp_s, "tied table": tied_s, "optimizer": moved / bandwidth}


def _sums_s(parameters, group, at: Place, zero, layout, work, again, weight, gradient) -> float:
    """What is waited for while gradients are added up over the group, and weights gathered."""
    if len(group) == 1:
        return 0.0
    times = _layers(work, at, again)

    def waited(op: str, payload_bytes: float, before: bool) -> float:
        time = at.travel_s(op, payload_bytes, group)
        return beyond(layout, work, times, time, before) if at.stack.dp_overlapped else time

    if zero == 0:
        return waited("all_reduce", parameters * gradient, False)
    sums = layout.microbatches if zero >= 2 and at.stack.each_microbatch else 1
    gathers = 2 * layout.microbatches if zero == 3 else 1
    scattered = sums * waited("reduce_scatter", parameters * gradient, False)
    return scattered + gathers * waited("all_gather", parameters * weight, True)


def beyond(layout: Layout, work: Work, times: tuple[Times, ...], time: float, before: bool) -> float:
    """How much longer than the passes beside it a transfer takes, of the rank that ends last, a layer after
    the other: gradients travel when the last microbatch has left a layer, weights (`before`) until the first
    comes. In the worst case all that is left from some layer on is in nobody's shadow."""
    edge, kind = edges(layout, before), 0 if before else 1
    weights = [layer.parameters for layer in layers_of(work)]
    whole = sum(n * weight for numbers, *_ in edge for n, weight in zip(numbers, weights))
    done, most = 0, 0.0
    for numbers, forwards, backwards in edge:
        shadow = sum(n * t.passes[0] for n, t in zip(forwards, times))
        shadow += sum(n * t.passes[1] for n, t in zip(backwards, times))
        for number, layer, weight in zip(numbers, times, weights):
            for _ in range(number):
                done += weight
                most = max(most, time * done / whole - shadow)
                shadow += layer.passes[kind]
    return most
