"""What a step does once: gradients added up over dp, weights gathered, tied tables, the optimizer.

    parts = update_s(work, layout, at, zero, state_bytes, tied, again)       {"dp": .., "tied table": ..,
                                                                              "optimizer": ..} seconds

Overlapped transfers go layer by layer beside the passes of the rank that ends last (`beyond`): with
interleaving a rank's later stages are done long before its first. Where tp, cp or ep have the same wire
meanwhile, they take as much longer as they meet (`shared`). The optimizer reads and writes its states once,
gradients three times (norm, update, zeroing), weights once; ZeRO deals all that out. Experts' gradients are
summed over dp · cp / ep, beside the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from operator import mul

from minitrain.plan.predict.predicted_memory import dealt_of, elements_of, layers_of
from minitrain.plan.predict.predicted_pipeline import LAYERS, Layout, edges
from minitrain.plan.predict.times import Place, Times, layers_s
from minitrain.plan.predict.work import Work


@lru_cache(maxsize=1 << 14)
def update_s(
    work: Work, layout: Layout, at: Place, zero: int, state: tuple[int, int, int], tied: bool, again: bool
) -> dict[str, float]:
    if isinstance(zero, str):
        raise ValueError(f"zero={zero!r}: predictions know replicas and ZeRO; use 0, 1, 2 or 3")
    weight, gradient, optimizer = state
    elements, dealt = max((elements_of(work, own, tied), dealt_of(work, own)) for own in layout.ranks)
    group = tuple(at.ranks_of(tuple(range(0, at.dp * at.cp * at.tp, at.tp))))
    some = group[:: at.ep]  # the ranks with the same experts
    experts = tuple(work.expert_parameters * (name == "block") for name in LAYERS)
    everywhere = tuple(layer.parameters - n for layer, n in zip(layers_of(work), experts))
    sums = (elements - dealt, group, everywhere), (dealt, some, experts)
    dp_s = _sums_s(sums, at, zero, layout, work, again, weight, gradient)
    tied_s = 0.0
    if tied and at.pp > 1:
        ends = tuple(sorted({0, (at.pp - 1) * at.pp_stride}))
        tied_s = at.travel_s("all_reduce", work.head.shared_parameters * gradient, ends)
    own = (elements - dealt) / len(group) + dealt / len(some) if zero else elements
    moved = own * (2 * optimizer + 3 * gradient + weight)
    device, rates = at.machine.device, at.rates
    bandwidth = device.memory_bandwidth_bytes_per_s * at.machine.memory_efficiency * rates.memory
    return {"dp": dp_s, "tied table": tied_s, "optimizer": moved / bandwidth}


Sums = tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...]  # parameters, their ranks, of each of LAYERS


def _sums_s(sums: Sums, at: Place, zero, layout, work, again, weight, gradient) -> float:
    """What is waited for while gradients are added up over their ranks, and weights gathered."""
    sums = [one for one in sums if one[0] and len(one[1]) > 1]
    times = layers_s(work, at, again)

    def waited(op: str, bytes_each: int, before: bool) -> float:
        transfers = [(at.travel_s(op, n * bytes_each, members), own) for n, members, own in sums]
        all_of_it = sum(time for time, _ in transfers)
        if not at.stack.dp_overlapped:
            return all_of_it
        exposed = beyond(layout, times, transfers, before)
        return exposed + shared(times[LAYERS.index("block")], before) * (all_of_it - exposed)

    def shared(block: Times, before: bool) -> float:
        """Of a block's pass, the part in which tp, cp or ep have the same wire: all are slower there."""
        crosses = len({at.machine.node_of(rank) for rank in sums[0][1]}) > 1
        kind = 0 if before else 1
        sent = block.on_wires[kind][crosses]
        return min(1.0, sent / block.passes[kind]) if sent else 0.0

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
    """How much longer than the passes beside them transfers take, of the rank that ends last, a layer after
    the other: gradients travel when the last microbatch has left a layer, weights (`before`) until the first
    comes. In the worst case all that is left from some layer on is in nobody's shadow. A transfer is its
    seconds, and the parameters of each of LAYERS of which they are."""
    edge, kind = edges(layout, before), 0 if before else 1
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
