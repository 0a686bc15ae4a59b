"""The time of a training step, and where it goes: predicted from a dry run's counts and a machine's rates.

    prediction = predict(run, work_of)            .step_s  .parts  .mfu  .memory  .limits

    step = longest way through the pipeline's schedule + exposed dp + tied tables + optimizer

    layers      products, attention, passes through memory, what a layer waits for on tp, cp and ep
    recompute   a stack that runs whole blocks again adds their forward to each backward
    p2p         a boundary between stages: it delays, or holds up its rank as well where the stack blocks
    dp          gradients over dp · cp, of experts over dp · cp / ep (ZeRO 1, 2: and the weights back; 3:
                weights in both passes); overlapped: what the passes after a layer's last backward do not
                cover, which is longer where tp, cp or ep have the same wire
    optimizer   each of its states read and written once, gradients three times (norm, update, zeroing),
                weights once; ZeRO deals all that out

`parts` add up to step_s: work is the mean over ranks, `bubble` what the longest path has beyond it. After the
first of its kind a prediction takes some 50 us. Not modelled: stragglers, input, a network under load,
kernels slowed by transfers beside them, dynamic expert loads.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache
from itertools import chain
from operator import mul

from minitrain.plan.accounting import flops_per_token
from minitrain.plan.predict.predicted_memory import elements_of, memory_of
from minitrain.plan.predict.predicted_pipeline import KINDS, Costs, Layout, edges, layout_of, makespan, pairs
from minitrain.plan.predict.rates import AXES, NAMES, Place, Rates, Times, generation, layers_s, rates_of
from minitrain.plan.predict.training_run import TrainingRun
from minitrain.plan.predict.work import LAYERS, Work, WorkOf
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
        run = self.run
        peak = run.strategy.ranks * run.machine.device.peak(run.strategy.policy.activations)
        return run.batch * run.length * flops_per_token(run.model, run.length) / (self.step_s * peak)

    memory = cached_property(lambda self: memory(self.run, self.work_of))

    @cached_property
    def limits(self) -> tuple[str, ...]:
        """What of this run the prediction does not know, in words; empty if nothing."""
        run, found = self.run, []
        if sum(self.memory.values()) > run.machine.device.capacity_bytes:
            found.append("does not fit: more memory than the device has")
        if run.model.experts:
            found.append("experts: as if tokens were spread evenly")
        if run.strategy.offload != "none":
            found.append("offload: copies to the host are not timed")
        if not run.machine.device.name.startswith(whose := generation(run.machine)):
            found.append(f"{run.machine.device.name}: at the shares of its peaks that an {whose} reaches")
        if run.strategy.slices > 1:
            found.append("slices: as if each took as long")
        return tuple(found)


def memory(run: TrainingRun, work_of: WorkOf) -> dict[str, int]:
    """Bytes by kind of the rank that has most."""
    return memory_of(run, work_of(run.model, run.strategy, run.microbatch, run.length, run.stack.flash))


def predict(run: TrainingRun, work_of: WorkOf, rates: Rates | None = None) -> Prediction:
    """`work_of(config, strategy, microbatch, length, fused_attention)` counts: dry_runs.py. `rates`: else
    those calibrated for the run's device and software."""
    strategy, stack = run.strategy, run.stack
    if strategy.compress != "none":
        raise ValueError(f"compress={strategy.compress!r}: predictions know whole sums; use none, or replay")
    rates = rates or rates_of(run.machine, stack)
    again, counted = strategy.recompute == "stage", strategy
    if stack.whole_again and strategy.recompute == "full":
        counted, again = _keeping_all(strategy), True
    work = work_of(run.model, counted, run.microbatch, run.length, stack.flash)
    layout = layout_of(run.model, strategy)
    at = Place(run.machine, stack, rates, strategy.dp, strategy.pp, strategy.cp, strategy.tp, strategy.ep)
    timed, costs = _without_bubble(work, layout, at, again, strategy.sequence_parallel)
    parts = timed | {"bubble": max(0.0, makespan(layout, costs) - sum(timed.values()))}
    parts |= update_s(work, layout, at, strategy.zero, strategy.policy.state_bytes, run.model.tied, again)
    return Prediction(run, work, work_of, sum(parts.values()), parts)


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
    hidden = ((times.passes[0] + times.passes[1] - times.passes[-1]) / layout.p for times in layers)
    parts["ep"] -= sum(map(mul, pairs(layout), hidden))
    parts["p2p"] = 2 * (len(layout.stages) - 1) * share * message_s * blocking
    return parts, Costs(tuple(passes), message_s, blocking)


def _message_s(boundary_bytes: int, at: Place, sequence_parallel: bool) -> float:
    """From a stage to the next; tp ranks that have the same may send a part each, gathered on arrival."""
    if sequence_parallel or not at.stack.scattered or at.tp == 1:
        return at.travel_s("send", boundary_bytes, at.neighbours)
    gather_s = at.travel_s("all_gather", boundary_bytes, tuple(range(at.tp)))
    return at.travel_s("send", boundary_bytes / at.tp, at.neighbours) + gather_s


@lru_cache(maxsize=1 << 14)
def update_s(
    work: Work, layout: Layout, at: Place, zero: int, state: tuple[int, int, int], tied: bool, again: bool
) -> dict[str, float]:
    """Gradients and weights on their way, tied tables, the optimizer; `state` is a policy's `state_bytes`."""
    if isinstance(zero, str):
        raise ValueError(f"zero={zero!r}: predictions know replicas and ZeRO; use 0, 1, 2 or 3")
    weight, gradient, optimizer = state
    elements, dealt = max(elements_of(work, own, tied) for own in layout.ranks)
    group = tuple(at.ranks_of(tuple(range(0, at.dp * at.cp * at.tp, at.tp))))
    some = group[:: at.ep]  # the ranks with the same experts
    experts = tuple(work.expert_parameters * (name == "block") for name in LAYERS)
    everywhere = tuple(layer.parameters - n for layer, n in zip(work.layers, experts))
    sums = (elements - dealt, group, everywhere), (dealt, some, experts)
    times = layers_s(work, at, again)
    dp_s = _sums_s([one for one in sums if one[0] and len(one[1]) > 1], at, zero, layout, times, state)
    tied_s = 0.0
    if tied and at.pp > 1:
        ends = tuple(sorted({0, (at.pp - 1) * at.pp_stride}))
        tied_s = at.travel_s("all_reduce", work.head.shared_parameters * gradient, ends)
    own = (elements - dealt) / len(group) + dealt / len(some) if zero else elements
    moved = own * (2 * optimizer + 3 * gradient + weight)
    return {"dp": dp_s, "tied table": tied_s, "optimizer": moved / at.memory_bytes_per_s}


def _sums_s(sums, at: Place, zero: int, layout: Layout, times: tuple[Times, ...], state) -> float:
    """What is waited for while `sums` (parameters, their ranks, by LAYERS) and weights travel."""

    def waited(op: str, bytes_each: int, before: bool) -> float:
        transfers = [(at.travel_s(op, n * bytes_each, members), own) for n, members, own in sums]
        all_of_it = sum(time for time, _ in transfers)
        if not at.stack.dp_overlapped:
            return all_of_it
        exposed, block = beyond(layout, times, transfers, before), times[LAYERS.index("block")]
        crosses = len({at.machine.node_of(rank) for rank in sums[0][1]}) > 1
        kind = 0 if before else 1
        sent = block.on_wires[kind][crosses]  # in that part of a pass tp, cp or ep have the same wire
        shared = min(1.0, sent / block.passes[kind]) if sent else 0.0
        return exposed + shared * (all_of_it - exposed)

    weight, gradient, _ = state
    if not sums:
        return 0.0
    if zero == 0:
        return waited("all_reduce", gradient, False)
    scatters = layout.microbatches if zero >= 2 and at.stack.each_microbatch else 1
    gathers = 2 * layout.microbatches if zero == 3 else 1
    return scatters * waited("reduce_scatter", gradient, False) + gathers * waited("all_gather", weight, True)


def beyond(
    layout: Layout, times: tuple[Times, ...], transfers: Iterable[tuple[float, tuple[int, ...]]], before: bool
) -> float:
    """How much longer than the passes beside them transfers take, of the rank that ends last (interleaved,
    its later stages are done long before its first), a layer after the other: gradients travel when the last
    microbatch has left a layer, weights (`before`) until the first comes. In the worst case all that is left
    from some layer on is in nobody's shadow. A transfer is its seconds, and its parameters by LAYERS."""
    edge, kind = edges(layout.short, before), 0 if before else 1
    held = [sum(numbers) for numbers in zip(*(numbers for numbers, *_ in edge))]
    each = [0.0] * len(LAYERS)
    for time, parameters in transfers:
        if whole := sum(map(mul, held, parameters)):
            each = [all_s + time * own / whole for all_s, own in zip(each, parameters)]
    done, most = 0.0, 0.0
    for numbers, forwards, backwards in edge:
        shadow = sum(n * t.passes[0] for n, t in zip(forwards, times))
        shadow += sum(n * t.passes[1] for n, t in zip(backwards, times))
        for number, layer, time in zip(numbers, times, each):
            for _ in range(number):
                done += time
                most = max(most, done - shadow)
                shadow += layer.passes[kind]
    return most
