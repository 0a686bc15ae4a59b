"""The simulated caching allocator beside the one it stands for: the same requests, the same bytes after each."""

import json
import os
import subprocess
import sys

import pytest

from minitrain.systems.simulate.allocator import CachingAllocator
from minitrain.systems.simulate.device_memory import MiB, replay
from tests.systems.simulate.allocation_traces import BROKEN, CAPACITY, drawn

# A process of its own: settings are read once, and nobody else's blocks are cached.
ASK = """
import json, sys, torch
trace, capacity = json.load(sys.stdin)
total = torch.cuda.get_device_properties(0).total_memory
torch.cuda.set_per_process_memory_fraction((capacity + 0.5) / total)
live, bytes_after = {}, []
for what, block, size in trace:
    if what == "free":
        del live[block]
    else:
        try:
            live[block] = torch.empty(size, dtype=torch.uint8, device="cuda")
        except torch.cuda.OutOfMemoryError:
            break
    bytes_after.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
print(json.dumps(bytes_after))
"""
TRACES = {"random": (drawn(0), 420 * MiB), "fragmented": (BROKEN, CAPACITY)}


@pytest.mark.cuda(alone=True)
@pytest.mark.parametrize("name", TRACES)
@pytest.mark.parametrize("settings", ["", "expandable_segments:True", "max_split_size_mb:21"])
def test_the_simulation_is_what_a_gpu_does(settings, name):
    """Allocated and reserved bytes are equal after every event, and so is the event in which memory is out."""
    trace, capacity = TRACES[name]
    if "expandable" in settings:
        capacity = 2**33  # near a limit of the process torch counts whole segments where it maps pages
    given = json.dumps([trace, capacity])
    # The old name of the variable: every torch that the project runs on reads it.
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": settings}
    command = [sys.executable, "-c", ASK]
    told = subprocess.run(
        command, input=given, text=True, stdout=subprocess.PIPE, env=environment, check=True
    )
    done = replay(trace, CachingAllocator(capacity, settings))
    assert [tuple(pair) for pair in json.loads(told.stdout)] == list(zip(done.allocated, done.reserved))
