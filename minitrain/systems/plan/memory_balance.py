"""Memory-balanced cuts (mCAP): measure the peaks of a few cuts, predict all, choose the best. No torch.

    profiled(5, 3)   0 | 1 | 2 3 4     one layer at a time moves over from the last stage to the first:
                     0 1 | 2 | 3 4     L - p + 1 cuts of the (L-1 over p-1) that there are,
                     0 1 2 | 3 | 4     7 of 84 for L = 10 layers on p = 4 stages

In 1F1B stage s keeps n_s = min(p - s, m) microbatches: a layer weighs more in front. By least squares

    peak(s, layers) = base_s + sum over its layers of (fixed_l + n_s · kept_l)

These cuts have every layer in a stage of the front and in one of the back, which tells fixed (weights,
gradients, optimizer state) from kept (activations of a microbatch). `measure(cut)` gives the peak of every
stage: by a real run, or a dry run that needs no memory and no devices.
Dreuning, Bal and van Nieuwpoort 2022 (mCAP), Euro-Par 2022. Differs: for 1F1B, so a layer has two numbers.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy

from minitrain.pipeline.partition import least_largest
from minitrain.ranks.checks import require_positive_ints

Cut = tuple[range, ...]


def profiled(layers: int, stages: int) -> list[Cut]:
    """The cuts to measure: single layers in the middle, the rest in front and behind."""
    if stages < 2 or layers < 2 * stages - 1:
        raise ValueError(f"mCAP: {layers=}, {stages=}; use 2 stages or more and at least 2·stages - 1 layers")
    require_positive_ints(layers=layers, stages=stages)
    ends = [[0, *range(first, first + stages - 1), layers] for first in range(1, layers - stages + 2)]
    return [tuple(range(a, b) for a, b in zip(cut, cut[1:])) for cut in ends]


class Peaks(NamedTuple):
    base: tuple[float, ...]  # bytes of each stage
    fixed: tuple[float, ...]  # of each layer
    kept: tuple[float, ...]  # of each layer and microbatch
    in_flight: tuple[int, ...]  # microbatches that each stage keeps

    def of(self, stage: int, layers: range) -> float:
        count = self.in_flight[stage]
        return self.base[stage] + sum(self.fixed[layer] + count * self.kept[layer] for layer in layers)


def fit(measured: Mapping[Cut, Sequence[int]], in_flight: Sequence[int]) -> Peaks:
    """The model that is nearest to the measured peaks; of several, the one with the smallest numbers."""
    layers, stages = next(iter(measured))[-1].stop, len(in_flight)
    rows, peaks = [], []
    for cut, found in measured.items():
        if len(found) != stages:
            raise ValueError(f"mCAP: {len(found)} peaks of {stages} stages; give one number per stage")
        for stage, run in enumerate(cut):
            base, fixed = numpy.zeros(stages), numpy.zeros(layers)
            base[stage], fixed[run.start : run.stop] = 1, 1
            rows.append(numpy.concatenate([base, fixed, in_flight[stage] * fixed]))
        peaks += found
    solution = numpy.linalg.lstsq(numpy.array(rows), numpy.array(peaks, dtype=float), rcond=None)[0]
    parts = numpy.split(solution, [stages, stages + layers])
    return Peaks(*(tuple(part.tolist()) for part in parts), tuple(in_flight))


def mcap(layers: int, stages: int, in_flight: Sequence[int], measure: Callable) -> tuple[Cut, Peaks]:
    """Measure a few, predict all, choose. `measure(cut)`: the peak of every stage."""
    peaks = fit({cut: measure(cut) for cut in profiled(layers, stages)}, in_flight)
    return least_largest(layers, stages, peaks.of), peaks
