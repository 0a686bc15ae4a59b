"""Traces of allocations that several tests replay."""

import random

from minitrain.systems.simulate.device_memory import MiB, checkpointed

# 32 % are free, in ten holes, when 30 % are asked for.
CAPACITY = 1000 * MiB
BROKEN = checkpointed(10, work_bytes=100 * MiB, checkpoint_bytes=68 * MiB, asked_bytes=300 * MiB)


def drawn(seed, events=400, most=30 * MiB):
    """Blocks of many sizes, born and freed at random."""
    draw, live, trace = random.Random(seed), {}, []
    for block in range(events):
        size = draw.choice([draw.randrange(1, MiB), draw.randrange(MiB, most), 512 * draw.randrange(1, 9)])
        trace.append(("alloc", block, size))
        live[block] = size
        while live and draw.random() < 0.52:
            gone = draw.choice(sorted(live))
            trace.append(("free", gone, live.pop(gone)))
    return trace
