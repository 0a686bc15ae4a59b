"""Saves beside training: closed forms against what is played, each way's rule on the events themselves, and
what a way is worth against its neighbours."""

import random
from fractions import Fraction

import pytest

from minitrain.systems.simulate import checkpoint_pipeline as pipeline
from minitrain.systems.simulate.checkpoint_pipeline import State, Work, stall_formula_s, stall_s, train

WORK, STATE = Work(3, 6, 1), State(20, 40)
WAYS = {
    "synchronous": pipeline.synchronous(), "snapshot-stall": pipeline.snapshot_stall(),
    "torchsnapshot": pipeline.torchsnapshot(4), "torchsnapshot in 1": pipeline.torchsnapshot(1),
    "checkfreq": pipeline.checkfreq(), "datastates": pipeline.datastates(6, 2),
    "datastates, 3 buffers": pipeline.datastates(7, 3), "datastates, 1 buffer": pipeline.datastates(5, 1),
    "datastates, room for all": pipeline.datastates(5, 5), "lightcheck": pipeline.lightcheck(4),
    "lightcheck of 1": pipeline.lightcheck(1), "fastpersist": pipeline.fastpersist(6),
    "fastpersist, 1 buffer": pipeline.fastpersist(6, 1),
}  # fmt: skip


def drawn(seed):
    draw = random.Random(seed)
    work = Work(*(Fraction(draw.randint(1, 20)) for _ in range(3)))
    return work, State(*(Fraction(draw.randint(1, 80)) for _ in range(2)))


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_the_closed_form_is_what_is_played(way):
    stalls = []
    for seed in range(40):
        work, state = drawn(seed)
        stalls.append(stall_s(work, state, way))
        assert stalls[-1] == stall_formula_s(work, state, way)
    assert sum(stall > 0 for stall in stalls) > 10


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_nothing_is_copied_while_it_changes(way):
    """Every copy lies between the update it saves and the next update of the same layer; writes come after."""
    for seed in range(4):
        every = 1 + seed % 2
        played = train(*drawn(seed), way, steps=6, every=every)
        for name in played.tasks:
            kind, _, label = name.partition(" ")
            if kind == "copy":
                save, chunk = map(int, label.split("."))
                step, layer = (save + 1) * every - 1, chunk if way.by_layer else 0
                assert played.end(f"U {step}.{layer}") <= played.start(name)
                following = f"U {step + 1}.{layer}"
                assert following not in played.tasks or played.end(name) <= played.start(following)
                assert played.end(name) <= played.start(f"write {label}")


def test_stalls_by_hand():
    """F, B, U of 3, 6, 1 s; a copy of 20 s and a write of 40 s."""
    stalls = {name: stall_s(WORK, STATE, way) for name, way in WAYS.items()}
    assert stalls["synchronous"] == 60 and stalls["snapshot-stall"] == 20
    assert stalls["torchsnapshot"] == 40 + 5 and stalls["torchsnapshot in 1"] == 60
    assert stalls["checkfreq"] == stalls["datastates, room for all"] == 20 - 9
    assert stalls["lightcheck of 1"] == 20 - 9 and stalls["lightcheck"] == 20 - (3 + 1.5 + 2 * 0.75 * 7)
    assert stalls["datastates, 1 buffer"] == 4 * (4 + 8) + 4 - 9
    assert stalls["fastpersist"] == Fraction(20, 6) + 40 - 9 and stalls["fastpersist, 1 buffer"] == 60 - 9


@pytest.mark.parametrize("every", [1, 2, 3, 5, 6, 7])
def test_checkfreq_waits_in_the_long_run_for_the_slower_of_two(every):
    """A save's stall, once many have passed: the copy that does not hide, or what saves take beyond the steps."""
    state = State(12, 45)
    played = [train(WORK, state, pipeline.checkfreq(), n * every + 1, every).stall("train") for n in (9, 10)]
    assert played[1] - played[0] == max(0, 12 - 9, 12 + 45 - 10 * every)


def test_datastates_waits_only_when_its_buffer_is_full():
    """A slow disk: with room for all chunks copies never wait; with room for b, b are never exceeded."""
    state = State(6, 60)
    for buffers in (1, 2, 3, 6):
        played = train(WORK, state, pipeline.datastates(6, buffers), 20, 10)
        chunks = [f"{s}.{j}" for s in range(2) for j in range(6)]
        held = [(played.start(f"copy {c}"), played.end(f"write {c}")) for c in chunks]
        most = max(sum(a <= at < b for a, b in held) for at, _ in held)
        assert most == buffers and (played.stall("train") == 0) == (buffers == 6)
    stalls = [stall_s(WORK, state, pipeline.datastates(6, buffers)) for buffers in (1, 2, 3, 4, 5, 6)]
    assert stalls == sorted(stalls, reverse=True) and stalls[-1] == 0
