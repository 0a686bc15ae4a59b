"""Feeding accelerators from slow storage: what a cache can do for training, and what it cannot. No clock.

Training reads every sample once an epoch, in a new order. With N samples, a cache of C = c·N, a step of
t_step and a read of t_io:

    a single epoch, LRU             hit rate 0
    read ahead by d samples         no stall after the first if and only if d >= ceil(t_io / t_step)
    shuffled epochs, LRU            hit rate c + (1 - c)·ln(1 - c) < c      (N -> infinity; 0.15 at c = 0.5)
    the same, with substitution     hit rate c, every epoch still a permutation

Fractions are exact. Read-ahead caches: Alluxio, JuiceFS; substitution: Kumar and Sivathanu 2020 (Quiver),
FAST, section 4; scaling: Gu et al. 2022 (Fluid), ICDE. Differs: all samples have one size; no shared chunks.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count

from minitrain.ranks.checks import require_ints, require_positive, require_positive_ints
from minitrain.systems.simulate.links import Number


class LRU:
    """A cache of `capacity` samples that throws out the one not read for longest."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.samples: dict[int, None] = {}  # in the order of their last reads

    def read(self, sample: int) -> bool:
        hit = sample in self.samples
        self.samples.pop(sample, None)
        self.samples[sample] = None
        if len(self.samples) > self.capacity:
            del self.samples[self.leaves()]
        return hit

    def leaves(self) -> int:
        return next(iter(self.samples))


def read_epoch(order: Iterable[int], cache: LRU) -> Iterator[tuple[int, bool]]:
    """Read in the order given: (sample, hit) one by one, so that several jobs can take turns at one cache."""
    return ((sample, cache.read(sample)) for sample in order)


def read_epoch_substituting(order: Iterable[int], cache: LRU) -> Iterator[tuple[int, bool]]:
    """In place of a sample that is not in the cache read the next one that is; those passed over come last.
    Each is still read once. The cache is read before misses change it, so all of it is found; so is what
    another job fetches meanwhile. The price: misses come in one block."""
    passed_over = []
    for sample in order:
        if sample in cache.samples:
            yield sample, cache.read(sample)
        else:
            passed_over.append(sample)
    yield from read_epoch(passed_over, cache)


def stalls(read_times: Sequence[Number], step_time: Number, depth: int, streams=None) -> list[Number]:
    """How long each step waits for its sample when reads run `depth` samples ahead (0: read when wanted). The
    read of sample i + depth begins as step i begins, or when one of `streams` of the storage is free: reading
    ahead hides how long a read takes, never a lack of bandwidth. A hit has read time 0. The first entry is
    the time to fill, which no depth can hide."""
    streams = max(1, len(read_times)) if streams is None else streams
    require_ints(depth=depth)
    require_positive(step_time=step_time)
    require_positive_ints(streams=streams)
    free_at: list[Number] = [0] * streams  # a heap
    now, starts, waits = 0, [], []
    for i, read_time in enumerate(read_times):
        begin = now if depth == 0 else starts[i - depth] if i >= depth else 0
        begin = max(begin, free_at[0])
        heapq.heapreplace(free_at, begin + read_time)
        waits.append(max(0, begin + read_time - now))
        starts.append(now + waits[i])
        now = starts[i] + step_time
    return waits


TRIAL_EVERY = 10  # epochs


def autoscale(stall_with: Callable, most: int, threshold: Number) -> Iterator[int]:
    """The cache size in use, epoch after epoch, steered by the observed stall, `stall_with(size)`, alone.
    Halves the range of sizes until the smallest whose stall is below `threshold` is left, and stays there.
    When the stall comes back, or one sample less turns out to do (tried now and then), the storage has
    changed: search again. Stays at `most` as long as even that is not enough."""
    while True:
        yield most
        if stall_with(most) >= threshold:
            continue
        too_small, enough = -1, most
        while enough - too_small > 1:
            middle = (too_small + enough) // 2
            yield middle
            if stall_with(middle) < threshold:
                enough = middle
            else:
                too_small = middle
        for epochs in count(1):
            trial = epochs % TRIAL_EVERY == 0 and enough > 0
            yield enough - trial
            if (stall_with(enough - trial) < threshold) == trial:
                break
