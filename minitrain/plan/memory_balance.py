"""Memory-balanced cuts (mCAP): measure the peak memory of a few cuts, predict that of all, choose the best. No torch.

    profiled(5, 3)   0 | 1 | 2 3 4         one layer at a time moves from the last stage over those in the middle to the first
                     0 1 | 2 | 3 4
                     0 1 2 | 3 | 4         L - p + 1 cuts of the (L-1 over p-1) that there are: 7 of 84 for L = 10 layers on p = 4 stages

In 1F1B stage s keeps n_s = min(p - s, m) microbatches, so a layer weighs more in the first stages than in the last. With

    peak(s, layers)  =  base_s  +  sum over its layers of (fixed_l + n_s · kept_l)          fixed: weights, gradients, optimizer state
                                                                                            kept: activations of a microbatch
measured peaks are linear equations for base, fixed and kept. The cuts above have every layer, wherever it may stand, in a stage of the
front and in one of the back, which tells the two apart; least squares solves them all at once. `smallest_peak` then finds the
cut whose largest predicted peak is smallest, by dynamic programming over (layers, stages).

`measure(cut)` is whatever gives the peak of every stage: a real run, or a dry run that needs no memory and no devices.
Raises ValueError for fewer than 2p - 1 layers (too few cuts to tell fixed from kept), and for a `measure` that gives not one peak a stage.
Dreuning, Bal and van Nieuwpoort 2022 (mCAP), Euro-Par 2022. Differs: for 1F1B, in which stages keep unequal numbers of microbatches, so
that a layer has two numbers; the model is solved by least squares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy

Cut = tuple[range, ...]


def profiled(layers: int, stages: int) -> list[Cut]:
    """The cuts to measure: single layers in the middle, the rest in front and behind."""
    if stages < 2 or layers < 2 * stages - 1:
        raise ValueError(
            f"mCAP: {layers} layers in {stages} stages; use 2 stages or more and at least 2·stages - 1 layers"
        )
    cuts = []
    for first in range(1, layers - stages + 2):
        ends = [0, *range(first, first + stages - 1), layers]
        cuts.append(tuple(range(a, b) for a, b in zip(ends, ends[1:])))
    return cuts


class Peaks(NamedTuple):
    """What the measurements say, in bytes: per stage, per layer, per layer and microbatch; and the microbatches a stage keeps."""

    base: tuple[float, ...]
    fixed: tuple[float, ...]
    kept: tuple[float, ...]
    in_flight: tuple[int, ...]

    def of(self, stage: int, layers: range) -> float:
        return self.base[stage] + sum(
            self.fixed[layer] + self.in_flight[stage] * self.kept[layer] for layer in layers
        )


def fit(measured: Mapping[Cut, Sequence[int]], in_flight: Sequence[int]) -> Peaks:
    """The model that is nearest to the measured peaks; of several, the one with the smallest numbers."""
    layers, stages = next(iter(measured))[-1].stop, len(in_flight)
    rows, peaks = [], []
    for cut, found in measured.items():
        if len(found) != stages:
            raise ValueError(
                f"mCAP: measure({cut}) gave {len(found)} peaks of {stages} stages; give one number a stage"
            )
        for stage, run in enumerate(cut):
            row = numpy.zeros(stages + 2 * layers)
            row[stage] = 1
            row[stages + run.start : stages + run.stop] = 1
            row[stages + layers + run.start : stages + layers + run.stop] = in_flight[stage]
            rows.append(row)
            peaks.append(found[stage])
    base, fixed, kept = numpy.split(
        numpy.linalg.lstsq(numpy.array(rows), numpy.array(peaks, dtype=float), rcond=None)[0],
        [stages, stages + layers],
    )
    return Peaks(tuple(base.tolist()), tuple(fixed.tolist()), tuple(kept.tolist()), tuple(in_flight))


def smallest_peak(layers: int, stages: int, peak: Callable[[int, range], float]) -> Cut:
    """The cut with the smallest largest `peak(stage, layers)`, whatever that is."""
    best: dict[int, tuple[float, Cut]] = {
        end: (peak(0, range(end)), (range(end),)) for end in range(1, layers - stages + 2)
    }
    for stage in range(1, stages):
        best = {
            end: min(
                (
                    (max(best[cut][0], peak(stage, range(cut, end))), (*best[cut][1], range(cut, end)))
                    for cut in best
                    if cut < end
                ),
                key=lambda found: found[0],
            )
            for end in range(stage + 1, layers - stages + stage + 2)
        }
    return best[layers][1]


def mcap(
    layers: int, stages: int, in_flight: Sequence[int], measure: Callable[[Cut], Sequence[int]]
) -> tuple[Cut, Peaks]:
    """Measure a few, predict all, choose."""
    peaks = fit({cut: measure(cut) for cut in profiled(layers, stages)}, in_flight)
    return smallest_peak(layers, stages, peaks.of), peaks
