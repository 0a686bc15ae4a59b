"""Hanayo: the model is folded over the ranks like a wave, so that no weights are stored twice.

    p=3, one wave of 6 stages, m=3: rank 0 has stages 0 and 5, rank 1 has 1 and 4, rank 2 has 2 and 3
    rank 0           F0.0  ..  F0.1  ..  F0.2 F5.0 B5.0 F5.1 B5.1 F5.2 B5.2 B0.0  ..  B0.1  ..  B0.2
    rank 1            ..  F1.0  ..  F1.1 F4.0 F1.2 F4.1 B4.0 F4.2 B4.1 B1.0 B4.2 B1.1  ..  B1.2  ..
    rank 2            ..   ..  F2.0 F3.0 F2.1 F3.1 F2.2 F3.2 B3.0 B2.0 B3.1 B2.1 B3.2 B2.2  ..   ..

Where Chimera's two pipelines pass each other, the one pipeline turns and comes back, with each stage half as
large. Chimera's rule of slots holds for S = 2·W·p stages of W waves, in groups of p microbatches, one every
2S slots. Bubble if B = F: 2(p-1) slots, the share (p-1)/(2·m·W+p-1) for m a multiple of p. Memory: parameters
once; activations of (2W-1)·p + r + 1 stages on rank r. Sends 4·W·(p-1) messages per microbatch.
Liu et al. 2023, arXiv:2308.15762, section 3. Differs: the rule ignores the time of messages.
"""

from minitrain.pipeline.schedule import Schedule
from minitrain.pipeline.schedules.chimera import in_slots
from minitrain.ranks.checks import require_positive_ints


def hanayo(p: int, m: int, waves: int) -> Schedule:
    """Stage s is on rank s % p on the way down, on p-1 - s % p on the way up."""
    require_positive_ints(p=p, m=m, waves=waves)
    stages = 2 * waves * p
    rank = lambda stage, i: p - 1 - stage % p if stage // p % 2 else stage % p
    ranks = in_slots(p, stages, m, rank, lambda i: 2 * stages * (i // p) + 2 * (i % p))
    return Schedule(f"Hanayo, p={p}, m={m}, {waves} wave{'s' * (waves > 1)}", ranks, stages, m)
