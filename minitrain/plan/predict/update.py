"""What a step does once: gradients added up over dp, weights gathered, tied tables, the optimizer.

    parts = update_s(work, layout, at, zero, state_bytes, tied, again)       {"dp": .., "tied table": ..,
                                                                              "optimizer": ..} seconds

Overlapped transfers go layer by layer beside the passes of the rank that ends last (`beyond`): with
interleaving a rank's later stages are done long before its first. The optimizer reads and writes its states
once, gradients three times (norm, update, zeroing), weights once; ZeRO deals all that out.
"""

from __future__ import annotations

from functools import lru_cache

from minitrain.plan.predict.memory import elements_of, layers_of
from minitrain.plan.predict.pipeline import LAYERS, Layout, edges
from minitrain.plan.predict.times import Place, Times, layers_s
from minitrain.plan.predict.work import Work


@lru_cache(maxsize=1 << 14)
def update_s(
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
    times = layers_s(work, at, again)

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
