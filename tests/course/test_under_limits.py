"""A run that needs it: what does not fit under a hard limit trains to the same losses with the chapter's means."""

import pytest

from minitrain.course.under_limits import PLACEMENTS, model_bytes, tensor_bytes, train
from minitrain.model.config import GPTConfig
from minitrain.model.gpt import GPT
from minitrain.systems.memory.limits import LimitedRuns

CONFIG = GPTConfig(d_model=128, num_layers=6, num_heads=4, max_positions=64)
SIZES = (4, 64)  # rows, tokens
STEP_BYTES = 1 << 18
ROOM = 5 << 19  # what libraries need beside tensors: 2.5 MiB at most
SPARE = 1 << 20  # room that the interpreter mapped before the limit and has free: 1 MiB at most


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("states"))
    return {way: tensor_bytes(way, CONFIG, folder, rows=SIZES[0], length=SIZES[1]) for way in PLACEMENTS}


def test_what_tensors_take_is_what_arithmetic_says(counted):
    model = GPT(CONFIG)
    parameters = sum(param.numel() for param in model.parameters())
    largest = max(sum(param.numel() for param in layer.parameters()) for layer in model.layers)
    by_hand = {way: model_bytes(way, parameters, largest) for way in PLACEMENTS}
    # states leave memory for files, and their buffers come: nothing else is different
    one, other = (counted[way] - by_hand[way] for way in ("recompute", "states in files"))
    assert one == other
    assert counted["plain"] > counted["recompute"] > counted["states in files"] > counted["all in files"]
    assert counted["all in files"] < 0.3 * counted["plain"]


@pytest.mark.slow
def test_the_smallest_limit_of_each_way_is_its_tensors_and_a_little(counted, tmp_path):
    losses = train("plain", CONFIG, str(tmp_path), *SIZES)
    both = lambda: [train(way, CONFIG, str(tmp_path), *SIZES, steps=1) for way in PLACEMENTS]
    with LimitedRuns(both) as runs:
        limits = {}
        for way in PLACEMENTS:
            most = -(-(counted[way] + ROOM) // STEP_BYTES) * STEP_BYTES
            assert runs.run(train, way, CONFIG, str(tmp_path), *SIZES, limit_bytes=most) == losses
            with pytest.raises(MemoryError, match="train does not fit in .* bytes: .*; offload, or give"):
                runs.run(train, way, CONFIG, str(tmp_path), *SIZES, limit_bytes=counted[way] - SPARE)
            limits[way] = most
        # so the limits are in the order of the ways, each under what the one before can do with
        assert limits["states in files"] + 5 * STEP_BYTES < limits["recompute"] < limits["plain"]
        little = limits["all in files"]
        with pytest.raises(MemoryError, match="can't allocate memory"):
            runs.run(train, "plain", CONFIG, str(tmp_path), *SIZES, limit_bytes=little)
        found = runs.smallest_limit(
            train, "all in files", CONFIG, str(tmp_path), *SIZES, most_bytes=little, step_bytes=STEP_BYTES
        )
        assert counted["all in files"] - SPARE <= found <= little


def test_a_way_that_is_none_is_refused(tmp_path):
    with pytest.raises(ValueError, match="placement='fast': use plain, recompute"):
        train("fast", CONFIG, str(tmp_path))
