"""Data that a cluster shares: where objects lie, how fast stripes are read, and who gets the cache.

straw2    each node draws a straw from the object's and its own name, as long as its weight: the longest has
          the object, so nobody needs a directory, and a new node takes 1/(n+1) of the objects, from each
stripes   chunk i of a file lies on target i mod k; k targets of rate b fill a link: S / min(k·b, link)
bursts    a file system takes checkpoints at its peak until its buffer is full, then at what it sustains
SiloD     of random reads c of d bytes are found in a cache: throughput = min(f, b / (1 - c/d))

Weil et al. 2006, SC (CRUSH; straw2 is Ceph's since 2015); Pan et al. 2021, FAST (Tectonic), rates from Llama
3 (2024), section 3.3.1; Zhao et al. 2023, EuroSys (SiloD), section 4. Differs: no failure domains, no copies.
"""

from collections.abc import Mapping, Sequence
from math import log

import xxhash

from minitrain.ranks import checks


def straw2(item: str, weights: Mapping[str, float]) -> str:
    """The node of an object. ln(u)/weight is largest for a node in proportion to its weight."""
    checks.require_nonempty(weights=weights)
    checks.require_positive(weights=list(weights.values()))
    u = lambda node: (xxhash.xxh64_intdigest(f"{item}/{node}".encode()) + 1) / 2**64
    return max(weights, key=lambda node: log(u(node)) / weights[node])


def striped_s(chunks: int, targets: int, target_s: float, link_s: float) -> float:
    """To read a file, chunk by chunk: each target and the client's link do one chunk at a time."""
    checks.require_positive_ints(10**6, chunks=chunks, targets=targets)
    checks.require_positive(target_s=target_s, link_s=link_s)
    free, arrived = [0.0] * targets, 0.0
    for i in range(chunks):
        free[i % targets] += target_s
        arrived = max(arrived, free[i % targets]) + link_s
    return arrived


def written_s(size: float, sustained: float, peak: float, buffer: float) -> float:
    """Seconds for `size` bytes: the buffer fills at peak - sustained bytes/s."""
    checks.require_positive(sustained=sustained, faster=peak - sustained)
    checks.require_nonnegative(size=size, buffer=buffer)
    at_peak = min(size / peak, buffer / (peak - sustained))
    return at_peak + (size - peak * at_peak) / sustained


def throughput(most: float, remote: float, cached: float, size: float) -> float:
    """SiloD's, bytes/s: `most` is what the job computes at most, `remote` its share of the storage."""
    checks.require_positive(most=most, size=size)
    checks.require_nonnegative(remote=remote, cached=cached)
    return most if cached >= size else min(most, remote / (1 - cached / size))


def silod(jobs: Sequence[tuple], cache: float, remote: float) -> tuple[list[float], list[float]]:
    """(cache, remote bytes/s) of each job (most, size). A byte of cache saves most/size of the remote rate,
    so it goes where that is largest; then each has the same part of the remote rate it still wants."""
    checks.require_nonempty(jobs=jobs)
    checks.require_positive(jobs=list(jobs), remote=remote)
    checks.require_nonnegative(cache=cache)
    cached = [0.0] * len(jobs)
    for j in sorted(range(len(jobs)), key=lambda j: -jobs[j][0] / jobs[j][1]):
        cached[j] = min(jobs[j][1], cache - sum(cached))
    wants = [most * (1 - c / size) for (most, size), c in zip(jobs, cached)]
    return cached, [remote * want / max(remote, sum(wants)) for want in wants]
