"""The planner: all layouts there are, the best of them, what fits, and what it says where nothing does."""

import itertools
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest

from minitrain.compose.dry_runs import work_of
from minitrain.model.config import ExpertsConfig, GPTConfig
from minitrain.pipeline.schedules_by_name import CHUNKED, NAMES, SLICED, named, stages_of
from minitrain.plan import planner
from minitrain.plan.accounting import zero_bytes
from minitrain.plan.planner import LEAST_TOKENS, Task, layouts, needs, pareto, search, why
from minitrain.plan.predict.predicted_step import predict
from minitrain.plan.predict.training_run import STACKS
from minitrain.plan.simulate.machines import DEVICES, machine
from minitrain.systems.plan.clusters import least_ranks, race

MODEL = GPTConfig(d_model=256, num_layers=4, num_heads=4, vocab_size=512, max_positions=8192)
NODE = replace(machine("a100"), devices_per_node=2, nics_per_node=2)


def small(**changes) -> Task:
    return Task(**dict(model=MODEL, machine=NODE, ranks=4, batch=8, length=512) | changes)


def memory_of(size: float, at=NODE):
    """The machine with devices of so many bytes beside what is reserved."""
    return replace(at, device=replace(at.device, capacity_bytes=size + planner.RESERVED))


def test_the_layouts_are_those_of_four_loops():
    task = small(ranks=8, batch=12, length=2 * LEAST_TOKENS)
    found, expected = {(s.dp, s.pp, s.cp, s.tp) for s in layouts(task)}, set()
    for dp, pp, cp, tp in itertools.product(range(1, 9), repeat=4):
        fits = tp <= 2 and pp <= 4 and cp <= 2 and 12 % dp == 0
        if dp * pp * cp * tp == 8 and fits:
            expected.add((dp, pp, cp, tp))
    assert found == expected and any(cp == 2 for _, _, cp, _ in found)


@pytest.mark.parametrize("seed", range(12))
def test_no_layout_is_one_that_the_run_would_refuse(seed):
    """Six ranks, three heads, lengths that three does not divide: such a layout is left out, not the plan."""
    draw = random.Random(seed)
    heads, ranks = draw.choice((3, 6, 12)), draw.choice((3, 6, 12))
    model = replace(MODEL, d_model=heads * 16, num_heads=heads, num_kv_heads=None, head_dim=None, d_ff=96)
    length = draw.choice((256, 300, 512))
    task = small(model=model, ranks=ranks, batch=12, length=length, machine=machine("a100"))
    assert (every := list(layouts(task)))
    for strategy in every:
        strategy.check(model, ranks)
        strategy.check_batch(model, task.batch, task.length)


def test_each_layout_is_there_once():
    every = list(layouts(small()))
    assert len(every) == len(set(every))
    assert {s.zero for s in every if s.pp == 1 and s.dp > 1} == {0, 1, 2, 3}
    assert {s.zero for s in every if s.pp > 1 and s.dp > 1} == {0, 1, 3}
    assert {s.zero for s in every if s.dp == 1} == {0}
    assert {s.schedule for s in every if s.pp == 2} == {"1f1b", "zb_h1", "interleaved"}
    assert all(s.sequence_parallel == (s.tp > 1) for s in every)


def test_limits_and_what_a_task_is_by_itself():
    task = Task(MODEL, NODE, 4, 8, 512)
    assert (task.room, task.precision, task.stack) == (0.9, "bfloat16_main_grads", STACKS["overlapped"])
    assert task.room_bytes == 0.9 * (79.14 * 2**30 - 2e9)
    assert {s.precision for s in layouts(task)} == {task.precision}
    rows = {64 // (s.dp * s.microbatches) for s in layouts(small(batch=64))}
    assert rows == {1, 2, 4, 8}, "eight rows at most"
    deep = replace(MODEL, num_layers=32)
    assert planner.schedules(deep, 1) == [("1f1b", 1)]
    every = [("1f1b", 1), ("zb_h1", 1), ("interleaved", 2), ("interleaved", 4), ("interleaved", 8)]
    assert planner.schedules(deep, 2) == every and planner.schedules(deep, 3) == every[:2]
    assert planner.schedules(deep, 32) == every[:2], "a block per stage"
    assert {s.ep for s in layouts(small())} == {1}
    cp = lambda length: {s.cp for s in layouts(small(length=length))}
    assert cp(4096) == {1, 2} and cp(4092) == {1}, "2048 tokens of a row on a rank"
    pipelines = [s for s in layouts(small(batch=12, ranks=8)) if s.pp > 1]
    assert all(s.microbatches % s.pp == 0 for s in pipelines if s.schedule == "interleaved")
    assert {s.microbatches for s in pipelines if s.schedule == "1f1b" and s.pp == 4} >= {2, 3, 6}
    flash = {s.recompute for s in layouts(small())}
    assert flash == ({"none", "full"} if task.stack.flash else {"none", "selective", "full"})
    scores = replace(task.stack, flash=not task.stack.flash)
    assert len({s.recompute for s in layouts(small(stack=scores))}) == 5 - len(flash)


def test_experts_are_dealt_out_over_what_divides_them():
    model = replace(MODEL, experts=ExpertsConfig(4, 2))
    found = {(s.dp, s.ep) for s in layouts(small(model=model, ranks=8, batch=8))}
    assert {ep for dp, ep in found if dp == 8} == {1, 2, 4}
    two = [s for s in layouts(small(model=model, ranks=8, batch=8)) if s.ep == 4 and s.pp == s.tp == 1]
    assert {s.ep_node for s in two} == {2}, "nodes of two: a row crosses to each once"
    assert "dualpipe" in {s.schedule for s in layouts(small(model=model, ranks=8, batch=32))}


def test_of_equally_fast_layouts_the_smallest_comes_first(monkeypatch):
    """All take a second; a row of a microbatch takes a third of a device, the rest depends on the layout."""

    def instead(run, work_of, rates):
        rows, third = 8 // (run.strategy.dp * run.strategy.microbatches), NODE.device.capacity_bytes // 3
        memory = {"activations": rows * third - run.strategy.tp - run.strategy.zero}
        return SimpleNamespace(run=run, step_s=1.0, memory=memory)

    monkeypatch.setattr(planner, "predict", instead)
    monkeypatch.setattr(planner, "memory", lambda run, work_of: instead(run, work_of, None).memory)
    sizes = [needs(one) for one in search(small(room=1.0), work_of)]
    assert sizes == sorted(sizes) and len(set(sizes)) > 3 and sizes[-1] <= NODE.device.capacity_bytes


@pytest.fixture(scope="module")
def everything():
    """All predictions of the small task, none left out."""
    return [predict(small().run(s), work_of) for s in layouts(small())]


@pytest.mark.parametrize("seed", range(3))
def test_the_best_are_those_of_brute_force_whatever_fits(everything, seed):
    sizes = sorted(map(needs, everything))
    limit = sizes[random.Random(seed).randrange(len(sizes) // 4, len(sizes))]
    task = small(machine=memory_of(2 * limit + 1), room=0.5)
    fitting = sorted((one.step_s, needs(one)) for one in everything if needs(one) <= limit)
    best = search(task, work_of)
    assert [(one.step_s, needs(one)) for one in best] == fitting
    found = [(one.step_s, needs(one)) for one in pareto(best)]
    assert found == [one for n, one in enumerate(fitting) if all(one[1] < size for _, size in fitting[:n])]


def test_of_layouts_as_large_the_slower_one_is_not_on_the_front():
    sized = [SimpleNamespace(step_s=s, memory={"parameters": n}) for s, n in ((1, 8), (2, 8), (3, 5), (3, 7))]
    assert pareto(sized) == [sized[0], sized[2]]


def test_why_a_runner_up_lost_adds_up(everything):
    best, *_, worst = sorted(everything, key=lambda one: one.step_s)
    found = why(best, worst, most=100)
    assert sum(seconds for _, seconds in found) == pytest.approx(worst.step_s - best.step_s)
    sizes = [abs(seconds) for _, seconds in found]
    assert sizes == sorted(sizes, reverse=True) and why(best, best) == []
    assert len(why(best, worst, most=2)) == 2


def test_what_fits_nowhere_says_by_how_much_and_what_would_do(everything):
    least = min(map(needs, everything))
    with pytest.raises(ValueError) as error:
        search(small(machine=memory_of(least * 0.8), room=1.0), work_of)
    said = str(error.value)
    assert f"{least / 1e9:.1f} GB on a rank at least" in said and "\n" not in said
    whole = f"{NODE.device.name}'s {least * 0.8 / 1e9 + 2:.1f} GB less 2 in reserve"
    room = f"{least * 0.8 / 1e9:.1f} GB are 100% of {whole}"
    assert f"{room}, {least * 0.2 / 1e9:.1f} GB too little; use more ranks" in said


def test_a_batch_that_nothing_divides():
    said = "^batch=3 on 64 ranks of 2 a node: no sizes of tp, pp, cp and dp divide both; "
    with pytest.raises(ValueError, match=said + "use a batch of 64, or fewer ranks$"):
        search(small(ranks=64, batch=3), work_of)
    with pytest.raises(ValueError, match="use a batch of 64 or 128, or fewer ranks$"):
        search(small(ranks=64, batch=100), work_of)


def test_few_microbatches_tell_whether_there_is_a_schedule_of_many():
    """The rules of every schedule depend on m as `stages_of` takes it."""
    refused = 0
    for name, p, chunks in itertools.product(NAMES, (1, 2, 3, 4), (1, 2)):
        if chunks > 1 and name not in CHUNKED:
            continue
        slices = 2 if name in SLICED else 1
        for m in (*range(1, 2 * p + 1), *range(4 * p - 1, 6 * p + 2)):
            found = []
            for ask in (lambda *a, **k: named(*a, **k).stages, stages_of):
                try:
                    found.append(ask(name, p, m, chunks=chunks, slices=slices))
                except ValueError as error:
                    found.append(str(error))
            assert found[0] == found[1], (name, p, m)
            refused += isinstance(found[0], str)
    assert refused > 50


@pytest.mark.parametrize("memory_bytes", [16e9, 32e9, 80e9, 200e9])
def test_cluster_choice_7b(memory_bytes):
    """Seven billion parameters: 112 GB of states; the fewest ranks are those of brute force over (stage, degree). Of
    fleets with one device a node that differ in links alone, the slower one needs another layout."""
    P = 7 * 10**9
    assert 16 * P == 112e9
    for stage in (0, 1, 2, 3):
        fits = (n for n in range(1, 200) if zero_bytes(P, n, stage) <= memory_bytes)
        assert least_ranks(P, memory_bytes, stage) == next(fits, None)
    assert least_ranks(P, 32e9) == 4 and zero_bytes(P, 4, 3) == 28e9
    assert least_ranks(P, 80e9) == 2 and zero_bytes(P, 2, 3) == 56e9
    assert least_ranks(P, 14e9, 2) is None  # its weights alone fill the device

    v100s = replace(machine("v100-ethernet"), device=DEVICES["V100 SXM2 32GB"])
    fleets = [
        Task(MODEL, machine("h100"), 2, 8, 512, precision="float16"),
        Task(MODEL, v100s, 4, 8, 512, precision="float16"),
        Task(MODEL, memory_of(1000), 4, 8, 512, precision="float16"),
    ]
    first, second, third = race(fleets, tokens=1e9, work_of=work_of)
    assert (first.task, second.task, third.best) == (fleets[0], fleets[1], None)
    for one in (first, second):
        every = (predict(one.task.run(s), work_of) for s in layouts(one.task))
        best = min((p for p in every if needs(p) <= one.task.room_bytes), key=lambda p: (p.step_s, needs(p)))
        assert (best.step_s, best.run.strategy.zero) == (one.best.step_s, one.best.run.strategy.zero)
        assert one.seconds == pytest.approx(best.step_s * 1e9 / (8 * 512))
    assert third.seconds == float("inf")
    fast = replace(machine("h100"), devices_per_node=1, nics_per_node=1)
    fleets = [replace(fleets[0], machine=one) for one in (replace(fast, inter=v100s.inter), fast)]
    first, second = race(fleets, tokens=1e9, work_of=work_of)
    assert (first.task, second.task) == (fleets[1], fleets[0]) and first.seconds < second.seconds / 1.4
    assert (first.best.run.strategy.dp, second.best.run.strategy.pp) == (2, 2)
