"""PLink: find by probing which machines are neighbours, then aggregate in two levels along what was found.

    probe       [n][n] round-trip times; noise only adds, so the least of a few samples comes near the truth
    clusters    join the two groups with the least mean time between them, again and again; racks end at the
                largest relative jump from one join to the next: keep the groups from before it
    aggregate   every member of a rack sums one column of the tensor; the owners of a column all-reduce it
                across the racks, in a ring, and send it back

A cloud does not say in which rack a machine stands. A flat ring in rank order crosses uplinks in nearly every
hop; in two levels each of R racks sends 2(R-1)/R S upwards, and all its members share in it. Cost: n(n-1)/2
times `samples` probes; about n^3 sums to cluster. A job without structure comes back as one group.
Luo et al. 2020, MLSys, "PLink". Differs: the probe is simulated, groups come from average linkage cut at the
largest jump, racks may differ in size, and the plan does not adapt while training runs.
"""

from collections.abc import Sequence
from random import Random

from minitrain.ranks.checks import require_ints, require_nonnegative, require_positive_ints
from minitrain.systems.communication.algorithms import ring_all_reduce
from minitrain.systems.communication.chunk_schedule import (
    Schedule,
    Transfer,
    in_parallel,
    mirror,
    place,
    then,
)
from minitrain.systems.communication.hierarchical import ranks_in

NOISE_RATIO = 1.5  # inside one level of network the time grows by less than this from join to join

Matrix = Sequence[Sequence[float]]


def probe(rack_of: Sequence[int], near_s: float, far_s: float, *, noise: float, samples: int, seed: int):
    """Simulated round trips [n][n]: the least of `samples`, each longer by a share of mean `noise`."""
    require_nonnegative(near_s=near_s, far_s=far_s, noise=noise)
    require_positive_ints(samples=samples)
    require_ints(seed=seed)
    random, n = Random(seed), len(rack_of)
    rtt = [[0.0] * n for _ in range(n)]
    for a in range(n):
        for b in range(a):
            undisturbed_s = near_s if rack_of[a] == rack_of[b] else far_s
            delays = (random.expovariate(1.0) * noise for _ in range(samples))
            rtt[a][b] = rtt[b][a] = undisturbed_s * (1 + min(delays))
    return rtt


def clusters(rtt: Matrix) -> list[list[int]]:
    """Ranks grouped by nearness, in order."""
    n = len(rtt)
    if any(len(row) != n for row in rtt):
        raise ValueError(f"{n} rows of {sorted({len(row) for row in rtt})} entries; a probe matrix is square")
    groups = [[rank] for rank in range(n)]
    joined_at_s, largest_jump, racks = 0.0, NOISE_RATIO, None
    while len(groups) > 1:
        pairs = [(a, b) for a in range(len(groups)) for b in range(a)]
        time_s, a, b = min((_mean_time(rtt, groups[a], groups[b]), a, b) for a, b in pairs)
        if joined_at_s and time_s / joined_at_s > largest_jump:
            largest_jump, racks = time_s / joined_at_s, groups
        groups = [group for i, group in enumerate(groups) if i not in (a, b)] + [groups[a] + groups[b]]
        joined_at_s = time_s
    return sorted(map(sorted, racks or groups))


def _mean_time(rtt: Matrix, group: list[int], other: list[int]) -> float:
    return sum(rtt[a][b] + rtt[b][a] for a in group for b in other) / (2 * len(group) * len(other))


def aggregate(racks: Sequence[Sequence[int]]) -> Schedule:
    """Two-level all-reduce: column c of the tensor belongs to member c, modulo its size, of every rack."""
    n, across, num_columns = ranks_in(racks), ring_all_reduce(len(racks)), max(map(len, racks))
    columns = [range(c * across.chunks, (c + 1) * across.chunks) for c in range(num_columns)]
    owners = [[rack[c % len(rack)] for rack in racks] for c in range(num_columns)]
    size = (n, num_columns * across.chunks)
    gather = tuple(
        Transfer(member, owner, column, reduce=True)
        for column, owners_of_column in zip(columns, owners)
        for rack, owner in zip(racks, owners_of_column)
        for member in rack
        if member != owner
    )
    inside = Schedule(*size, (gather,) if gather else ())
    middle = in_parallel(place(across, ranks, column, of=size) for ranks, column in zip(owners, columns))
    return then(inside, middle, mirror(inside))
