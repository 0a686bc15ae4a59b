"""Cuts of other shapes: DynaPipe's microbatches of unequal size and GraphPipe's graphs of stages, against
every other choice there is.
"""

import random
from fractions import Fraction
from itertools import combinations

import pytest
import torch

from minitrain import collectives, launch
from minitrain.model.data.batches import MASKED
from minitrain.model.gpt import GPT, Stages, cross_entropy_sum
from minitrain.model.training.step import Batch, NoReducer
from minitrain.pipeline.lower import Receive, Send, lower
from minitrain.pipeline.partition import even
from minitrain.pipeline.runtime import Runner
from minitrain.pipeline.schedule import B, F, Schedule, check, peak
from minitrain.pipeline.schedules.one_direction import one_f_one_b
from minitrain.pipeline.simulate import Costs, Measured, simulate
from minitrain.systems.plan import dynapipe, stage_cuts
from minitrain.systems.plan.stage_cuts import Op, Parallel
from tests.parallel import TOLERANCE, Problem, one_process, pipeline_difference, small


def groupings(things: list):
    """All ways to put things into groups."""
    if not things:
        yield []
        return
    first, *rest = things
    for groups in groupings(rest):
        yield [[first], *groups]
        for i in range(len(groups)):
            yield [*groups[:i], [first, *groups[i]], *groups[i + 1 :]]


def time(rows: int, length: int) -> int:
    """Products with the weights, attention, and what a launch costs."""
    return 400 + rows * (4 * length + length * length)


def step(groups, lengths, stages):
    times = [time(len(group), max(lengths[sample] for sample in group)) for group in groups]
    return sum(times) + (stages - 1) * max(times)


def test_dynapipe():
    """Microbatches as fast as the best of all groupings of 8 samples and of all runs of 10 sorted ones; less
    padding; no order is stuck; and a plan, run on two ranks, has the loss and the gradients of one
    process."""
    for seed in range(3):
        draw = random.Random(seed)
        lengths = [draw.randint(1, 20) for _ in range(8)]
        stages, cap = draw.choice([2, 4]), draw.choice([None, 40])
        found = dynapipe.microbatches(lengths, time, stages, cap)
        tokens = lambda group: len(group) * max(lengths[sample] for sample in group)
        allowed = [one for one in groupings([*range(8)]) if cap is None or max(map(tokens, one)) <= cap]
        assert sorted(sample for group in found.groups for sample in group) == list(range(8))
        assert found.time == step(found.groups, lengths, stages)
        assert found.time == min(step(groups, lengths, stages) for groups in allowed)

        lengths = [draw.randint(1, 30) for _ in range(10)]
        found = dynapipe.microbatches(lengths, time, stages)
        order = sorted(range(10), key=lambda sample: lengths[sample])
        every_end = [ends for count in range(10) for ends in combinations(range(1, 10), count)]
        runs = [[order[a:b] for a, b in zip((0, *ends), (*ends, 10))] for ends in every_end]
        assert found.time == min(step(groups, lengths, stages) for groups in runs)
        rows = -(-10 // len(found.groups))  # as many microbatches of a fixed size
        assert rows > 1
        assert dynapipe.padding(lengths, found.groups) < dynapipe.padding(lengths, dynapipe.fixed(10, rows))

    for seed in range(150):
        draw = random.Random(seed)
        schedule = random_schedule(draw, p=draw.randint(2, 5), m=draw.randint(1, 7))
        times = Measured({action: draw.randint(0, 5) for action in schedule.place})
        programs = dynapipe.planned(schedule, times)
        dynapipe.rendezvous(programs)
        same_order(programs)
        same_order(lower(schedule))
        for own, program in zip(schedule.ranks, programs):
            assert [entry for entry in program if not isinstance(entry, (Send, Receive))] == list(own)

    plan = dynapipe.microbatches(LENGTHS, time, 2, cap_tokens=16)
    model, (tokens, targets) = GPT(small(), seed=3, dtype=torch.float64), padded()
    loss = cross_entropy_sum(model(tokens), targets) / sum(LENGTHS)
    loss.backward()
    grads = {name: param.grad for name, param in model.named_parameters()}
    assert len({(len(group), max(LENGTHS[sample] for sample in group)) for group in plan.groups}) > 2
    ranks = launch.run(planned_step, plan.groups, ranks=2)
    assert abs(sum(part for part, _ in ranks) - loss.item()) < TOLERANCE
    found = {}
    for _, part in ranks:  # a tied table stands on both
        for name, grad in part.items():
            found[name] = found.get(name, 0) + grad
    assert found.keys() == grads.keys()
    assert max((found[name] - grads[name]).abs().max() for name in grads) < TOLERANCE


LENGTHS = [8, 3, 5, 2, 7, 2, 8, 4]


def padded():
    tokens = torch.randint(29, (len(LENGTHS), 8), generator=torch.Generator().manual_seed(1))
    inside = torch.arange(8) < torch.tensor(LENGTHS)[:, None]
    return tokens, torch.where(inside, tokens.roll(-1, 1), MASKED)


def planned_step(groups):
    """A step of this rank of 2: microbatches, their order and the order of all messages as planned."""
    group = collectives.world()
    times = [[(time(len(rows), max(LENGTHS[sample] for sample in rows)),) * 2 for rows in groups]] * 2
    schedule = dynapipe.adaptive(times, [len(rows) for rows in groups], cap=sum(map(len, groups)))
    stages = Stages(small(), {group.rank(): even(2, 2)[group.rank()]}, seed=3, dtype=torch.float64)
    run = Runner(dict(stages.items()), schedule, group, cross_entropy_sum, NoReducer(), width=small().d_model)
    run.cut = dynapipe.samples(groups, LENGTHS)
    measured = Measured({action: times[0][action.microbatch][0] for action in schedule.place})
    run.program = dynapipe.planned(schedule, measured)[group.rank()]
    loss = run(Batch(*padded(), torch.tensor(sum(LENGTHS))))
    return loss.item(), {name: param.grad for part in stages.parts() for param, name in part.items()}


def random_schedule(draw, p, m) -> Schedule:
    """Each stage on the next rank; whatever could be done next, at random."""
    lists, done = [[] for _ in range(p)], set()
    while len(done) < 2 * p * m:
        could = [F(stage, i) for stage in range(p) for i in range(m) if stage == 0 or F(stage - 1, i) in done]
        could += [B(s, i) for kind, s, i in done if kind == "F" and (s == p - 1 or B(s + 1, i) in done)]
        action = draw.choice(sorted(action for action in could if action not in done))
        done.add(action)
        lists[action.stage].append(action)
    return check(Schedule("random", tuple(map(tuple, lists)), p, m))


def same_order(programs):
    """What a rank sends to another and what that one receives from it."""
    for source, program in enumerate(programs):
        for to in range(len(programs)):
            sent = [step.what for step in program if isinstance(step, Send) and step.to == to]
            theirs = (step for step in programs[to] if isinstance(step, Receive))
            assert sent == [step.what for step in theirs if step.source == source]


def test_an_order_that_gets_stuck_is_refused():
    told = r"stuck: rank 0 at Send\(F0.1\) with rank 1, rank 1 at Send\(B1.0\) with rank 0; post"
    with pytest.raises(ValueError, match=told):
        dynapipe.rendezvous(dynapipe.naive(one_f_one_b(2, 2)))  # receive, compute, send: 1F1B stands still
    for p, m in [(3, 3), (4, 8)]:
        with pytest.raises(ValueError, match="stuck: rank 0 at Send"):
            dynapipe.rendezvous(dynapipe.naive(one_f_one_b(p, m)))
        dynapipe.rendezvous(dynapipe.planned(one_f_one_b(p, m)))
    programs = [list(program) for program in dynapipe.planned(one_f_one_b(2, 3))]
    first, second = [i for i, step in enumerate(programs[1]) if isinstance(step, Receive)][:2]
    programs[1][first], programs[1][second] = programs[1][second], programs[1][first]
    with pytest.raises(ValueError, match=r"stuck: rank 0 at Send\(F0.0\) .* rank 1 at Receive\(F0.1\)"):
        dynapipe.rendezvous(programs)


def uneven(draw, p, m):
    sizes = [draw.randint(1, 4) for _ in range(m)]
    return [[(size * 2, size * 4) for size in sizes] for _ in range(p)], sizes


def measured_by(times, schedule):
    return Measured({a: times[a.stage][a.microbatch][a.kind == "B"] for a in schedule.place})


def most_held(schedule, sizes, rank):
    held = high = 0
    for kind, _, i in schedule.ranks[rank]:
        held += sizes[i] if kind == "F" else -sizes[i]
        high = max(high, held)
    return high


def test_adaptive_schedule_stays_under_its_cap():
    shorter = 0
    for seed in range(20):
        draw = random.Random(seed)
        p, m = draw.randint(2, 5), draw.randint(4, 9)
        times, sizes = uneven(draw, p, m)
        steps = []
        for cap in (4, 8, 16):
            schedule = dynapipe.adaptive(times, sizes, cap)
            assert max(most_held(schedule, sizes, rank) for rank in range(p)) <= cap
            measured = measured_by(times, schedule)
            steps.append(simulate(schedule, measured).makespan)
            dynapipe.rendezvous(dynapipe.planned(schedule, measured))
        plain = one_f_one_b(p, m)
        shorter += steps[-1] <= simulate(plain, measured_by(times, plain)).makespan
    assert shorter >= 15  # with room, unequal microbatches wait less than in 1F1B
    equal = dynapipe.adaptive([[(1, 2)] * 8] * 4, [1] * 8, cap=4)
    ends = [simulate(one, Costs(F=1, B=2)).makespan for one in (equal, one_f_one_b(4, 8))]
    assert ends == [33, 33]


def test_adaptive_schedule_equals_one_process():
    problem = Problem(config=small(num_layers=4), batch_sizes=(8, 7), microbatches=6)
    times, sizes = uneven(random.Random(3), 4, 6)
    schedule = dynapipe.adaptive(times, sizes, 6)
    assert schedule.ranks != one_f_one_b(4, 6).ranks
    assert pipeline_difference(problem, dict(dp=1, pp=4), schedule, one_process(problem)) < TOLERANCE


# ---- GraphPipe -------------------------------------------------------------------------------------------

DIAMOND = ((0, 1), (0, 2), (1, 3), (2, 3))  # a stage, two branches, and where they meet
MEETING = ((0, 1), (1, 3), (2, 3))  # branches of 2 stages and of 1, and where they meet
CHAIN = ((0, 1), (1, 2), (2, 3))


@pytest.mark.parametrize("m", [3, 4, 8, 16])
def test_graphpipe(m):
    """4 devices, two branches: depth 3 for 4, overhead (depth-1)/m, fewer activations; the planner's."""
    for edges, kept in [(DIAMOND, [3, 2, 2, 1]), (MEETING, [3, 2, 2, 1]), (CHAIN, [4, 3, 2, 1])]:
        deep = stage_cuts.depth(4, edges)
        assert deep == (4 if edges == CHAIN else 3)
        schedule = check(stage_cuts.graph_one_f_one_b(4, edges, m))
        simulation = simulate(schedule, Costs(F=1, B=2))
        assert simulation.makespan == 3 * (m + deep - 1) and simulation.overhead == Fraction(deep - 1, m)
        assert [peak(schedule, rank) for rank in range(4)] == [min(count, m) for count in kept]
    chain, plain = stage_cuts.graph_one_f_one_b(4, CHAIN, m), one_f_one_b(4, m)
    assert chain.ranks == plain.ranks and chain.needs.keys() == plain.needs.keys()
    assert all(set(chain.needs[action]) == set(plain.needs[action]) for action in plain.needs)

    model = [Op("in", 3), Parallel(([Op("a", 3)], [Op("b", 3)])), Op("out", 3)]
    plan = stage_cuts.plan_graphpipe(model, 4, m)
    assert plan == (3 * (m + 2), 3, 3, (("in",), ("a",), ("b",), ("out",)), DIAMOND)


def links(series, before=()):
    """((from, to) between operators, the last ones)."""
    found = []
    for element in series:
        if isinstance(element, Parallel):
            ends = [links(branch, before) for branch in element.branches]
            found += [edge for edges, _ in ends for edge in edges]
            before = tuple(last for _, lasts in ends for last in lasts)
        else:
            found += [(name, element.name) for name in before]
            before = (element.name,)
    return found, before


def runs(series):
    """All sets of operators that can be a stage: runs of the series, and of the series in its branches."""
    for start in range(len(series)):
        for end in range(start + 1, len(series) + 1):
            yield frozenset(op.name for op in stage_cuts.ops(series[start:end]))
    for element in series:
        if isinstance(element, Parallel):
            for branch in element.branches:
                yield from runs(branch)


def random_model(draw, names):
    def op():
        return Op(next(names), draw.randint(1, 9))

    def branch():
        return [op() for _ in range(draw.randint(1, 2))]

    inner = [branch(), [op(), Parallel((branch(), branch()))] if draw.random() < 0.3 else branch()]
    before = [op() for _ in range(draw.randint(0, 1))]
    return [*before, Parallel(tuple(inner)), *(op() for _ in range(draw.randint(0, 2)))]


@pytest.mark.parametrize("seed", range(6))
def test_graphpipe_planner_equals_all_partitions(seed):
    draw = random.Random(seed)
    model, m, devices = random_model(draw, iter("abcdefghijk")), draw.choice([2, 4, 8]), 4
    times, may_be = {op.name: op.time for op in stage_cuts.ops(model)}, set(runs(model))
    between, best = links(model)[0], None
    for stages in groupings(list(times)):
        if len(stages) <= devices and all(frozenset(stage) in may_be for stage in stages):
            where = {name: i for i, stage in enumerate(stages) for name in stage}
            edges = tuple({(where[a], where[b]) for a, b in between if where[a] != where[b]})
            slowest = max(sum(times[name] for name in stage) for stage in stages)
            here = (m + stage_cuts.depth(len(stages), edges) - 1) * slowest
            best = here if best is None else min(best, here)
    plan = stage_cuts.plan_graphpipe(model, devices, m)
    assert plan.time == best and sorted(name for stage in plan.stages for name in stage) == sorted(times)
    assert plan.depth == stage_cuts.depth(len(plan.stages), plan.edges)
    where = {name: i for i, stage in enumerate(plan.stages) for name in stage}
    assert {(where[a], where[b]) for a, b in between if where[a] != where[b]} == set(plan.edges)
    schedule = check(stage_cuts.graph_one_f_one_b(len(plan.stages), plan.edges, m))
    stage_times = {i: sum(times[name] for name in stage) for i, stage in enumerate(plan.stages)}
    costs = Costs(F=Fraction(1, 3), B=Fraction(2, 3), stage=stage_times)
    assert simulate(schedule, costs).makespan <= plan.time
