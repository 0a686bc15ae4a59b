"""Searches for stages: each against every plan of its space, and the time of a step against a simulation."""

from dataclasses import replace
from itertools import combinations, pairwise, product
from math import inf

import pytest

from minitrain.course.race import every_run
from minitrain.pipeline.schedule import Action, Schedule
from minitrain.pipeline.schedules.one_direction import gpipe, one_f_one_b
from minitrain.pipeline.simulate import Costs, simulate
from minitrain.systems.plan.search import staged
from minitrain.systems.plan.search.layerwise import tensoropt
from minitrain.systems.plan.search.problem import Layer, Level, Option, Problem, block, every, example, linear
from minitrain.systems.plan.search.programs import pipeline_program, search
from minitrain.systems.plan.search.staged import aceso, primitives, resized, slowest, starts
from tests import parallel
from tests.systems.plan.search.drawn import blocks, chain


def test_step_of_a_pipeline():
    """T = sum + (B - 1) max is the makespan of GPipe, whatever its stages' times, and 1F1B needs as long or, with
    uneven stages, less, but more than four fifths; what a plan costs is the sum of its parts."""
    for times in ((1, 1, 1), (1, 5, 2), (4, 1, 3, 2), (7,)):
        for microbatches in (1, 2, 4, 8):
            costs = Costs(F=1, B=2, stage={i: time for i, time in enumerate(times)})
            step = staged.pipelined([3 * time for time in times], microbatches)
            assert simulate(gpipe(len(times), microbatches), costs).makespan == step
            other = simulate(one_f_one_b(len(times), microbatches), costs).makespan
            assert 0.8 * step < other <= step and (other == step or len(set(times)) > 1)
    problem, half = example(), [range(0, 2), range(2, 4)]
    plan = tuple(staged.Stage(run, 2, (Option(("dp",)),) * 2) for run in half)
    own = [problem.cost([Option(("dp",))] * 2, run, 2) for run in half]
    message = 2 * 512 * 1024 * 4 / 2 / 2.0**30  # both ways, half at each of two devices
    assert staged.seconds(problem, plan) == own[0] + own[1] + message + 3 * max(own[0], own[1] + message)
    held = [16 * 2 * 512 * 4096 + 2 * 4 * 512 * (512 + 4096), 16 * 2 * 512 * 2048 + 4 * 512 * (512 + 2048)]
    assert staged.peak_bytes(problem, plan) == held  # states; x of two microbatches, and of one
    alone = replace(problem, microbatches=1)
    assert [staged.in_flight(alone, behind) for behind in (0, 1, 5)] == [1, 1, 1], "no more than there are"
    assert staged.peak_bytes(alone, plan)[0] < held[0]


def test_all_cuts():
    """Layers in runs, devices in groups that fill levels, none left over."""
    cuts = staged.all_cuts(example())
    # stages of 4; 2, 2; 2, 1, 1 in any order; 1, 1, 1, 1
    assert len(cuts) == len(set(cuts)) == 1 + 3 + 3 * 3 + 1
    assert all(sum(devices for _, devices in cut) == 4 for cut in cuts)
    assert all([i for run, _ in cut for i in run] == [0, 1, 2, 3] for cut in cuts)
    assert staged.sizes_of(replace(example(), levels=(Level(2, 1.0), Level(4, 1.0)))) == [1, 2, 4, 8]
    assert staged.every_plan(example()).looked_at == 16**4 + 3 * 4**4 + 2 * 12 + 4 * 9 + 12 + 1


def test_every_plan_is_the_best_of_what_the_layers_up_say():
    """Each stage priced once finds what all plans, each computed whole, do; also where a stage fits nowhere."""
    problem = chain(1, layers=3, levels=1, shardings=("dp", "col"))
    every = [
        tuple(staged.Stage(run, devices, some) for (run, devices), some in zip(cut, options))
        for cut in staged.all_cuts(problem)
        for options in product(
            *(product(problem.options(problem.mesh(devices)), repeat=len(run)) for run, devices in cut)
        )
    ]
    assert len(every) == len(set(every)) == 2**3 + 1 + 1
    peak = lambda plan: max(staged.peak_bytes(problem, plan))
    for cap, microbatches in product([inf, *sorted(map(peak, every))[::3]], (1, problem.microbatches)):
        case = replace(problem, memory_bytes=cap, microbatches=microbatches)
        fitting = [plan for plan in every if max(staged.peak_bytes(case, plan)) <= cap]
        found = staged.every_plan(case)
        assert found.looked_at == len(every) and found.choice in fitting
        assert found.cost == min(staged.seconds(case, plan) for plan in fitting)


def capped(search, problem):
    """The problem in 8, 6 and 4 tenths of the memory of its fastest plan, as far as any plan fits."""
    fastest, cases = search(replace(problem, memory_bytes=inf)).choice, []
    for share in (0.8, 0.6, 0.4):
        cases.append(replace(problem, memory_bytes=share * max(staged.peak_bytes(problem, fastest))))
        try:
            search(cases[-1])
        except ValueError:
            return cases[:-1]
    return cases


def test_piper():
    """Time per sample is that of the best of all plans, for 6 layers on 4 devices within a memory, which at
    last forces recomputation; the plan takes it and fits."""
    recomputed = []
    for problem in (blocks(seed, layers=6, shardings=("dp", "tp")) for seed in range(2)):
        for case in [replace(problem, memory_bytes=inf), *capped(staged.piper, problem)]:
            found, slowest = staged.piper(case), lambda times, _: max(times)
            best = staged.every_plan(case, staged.families_of(case), time=slowest)
            assert found.cost == best.cost and found.looked_at < best.looked_at
            assert max(staged.stage_seconds(case, stage) for stage in found.choice) == found.cost
            assert max(staged.peak_bytes(case, found.choice)) <= case.memory_bytes
            recomputed.append(any(option.again for stage in found.choice for option in stage.options))
    assert any(recomputed) and not recomputed[0]
    with pytest.raises(ValueError, match="fits into 1 bytes"):
        staged.piper(replace(problem, memory_bytes=1))


def test_of_equal_plans_piper_takes_that_with_fewest_stages():
    """Two layers that weigh nothing and send nothing: together on two devices, or one on each."""
    layer = Layer("x", takes=0, gives=0, weights=0, flops=64.0)
    problem = Problem((layer, layer), 8, (Level(2, 1.0),), flops_per_s=1.0, shardings=("dp",))
    found, alone = staged.piper(problem), staged.Stage(range(0, 1), 1, (Option(()),))
    assert found.cost == staged.stage_seconds(problem, alone)
    assert [(stage.layers, stage.devices) for stage in found.choice] == [(range(0, 2), 2)]


def test_alpa():
    """The integer program is exact, and takes Megatron's cut for a wide MLP, data parallelism for a wide batch;
    stages and shardings are the best of all plans within memory; for equal blocks no plan is faster than the
    best that a person would try, uniform in all of them."""
    fast = (Level(4, 2.0**34),)

    def shardings(rows, width):
        layers = linear("up", 512, width), linear("down", width, 512)
        found = program(Problem(layers, rows, fast, 2.0**44, shardings=("dp", "col", "row")))
        return [option.shardings[0] for option in found]

    assert shardings(64, 8192) == ["col", "row"] and shardings(65536, 512) == ["dp", "dp"]
    problem = chain(0, shardings=("dp", "col", "row"))
    graph = problem.graph()
    free = staged.intra(graph)
    assert free[0] == every(graph).cost == graph.cost(free[1])
    cap = 0.9 * graph.bytes(free[1])
    assert staged.intra(graph, cap)[0] == every(graph, cap).cost and staged.intra(graph, 1) is None
    for case in (problem, *capped(staged.alpa, problem)[:1]):
        found = staged.alpa(case)
        assert found.cost == staged.every_plan(case).cost == staged.seconds(case, found.choice)
        assert max(staged.peak_bytes(case, found.choice)) <= case.memory_bytes
    with pytest.raises(ValueError, match="fits into 1 bytes"):
        staged.alpa(replace(problem, memory_bytes=1))
    check_megatron()


def test_alpa_clusters():
    """Of all runs within the slack those whose widest input is narrowest, then those of most even FLOPs; stages of
    whole clusters are the best that such stages can be, at a fraction of the work."""
    for seed, groups, slack in product(range(4), (2, 3, 4), (0.2, 1.0)):
        layers, found = chain(seed, layers=7).layers, []
        for cut in combinations(range(1, 7), groups - 1):
            runs = [layers[a:b] for a, b in pairwise((0, *cut, 7))]
            work = [sum(layer.flops for layer in run) for run in runs]
            if max(work) * groups <= (1 + slack) * sum(work):
                found.append((max(layers[at].takes for at in cut), sum(one**2 for one in work), cut))
        if found:
            assert [run.start for run in staged.clusters(layers, groups, slack)[1:]] == [*min(found)[2]]
        else:
            with pytest.raises(ValueError, match="give more slack"):
                staged.clusters(layers, groups, slack)
    problem = chain(0, layers=6, shardings=("dp", "col"))
    into = staged.clusters(problem.layers, 3, 1.0)
    whole = {0, *(run.stop for run in into)}
    among = [cut for cut in staged.all_cuts(problem) if all(run.stop in whole for run, _ in cut)]
    found, free = staged.alpa(problem, into), staged.alpa(problem)
    assert found.cost == staged.every_plan(problem, among=among).cost <= 1.1 * free.cost
    assert found.looked_at < free.looked_at / 5


def test_found_plans_train_as_one_process():
    """On ranks: the stages that Alpa, Galvatron, Aceso and Piper find, each with its devices, data- or tensor-parallel;
    the shardings of TensorOpt's fastest point; the orders that nnScaler finds for two devices."""
    levels = Level(2, 2.0**26), Level(2, 2.0**35)
    gpt = Problem((block("block", 32, 128),) * 4, 8, levels, 2.0**44, microbatches=4, shardings=("dp", "tp"))
    toy = parallel.Problem(config=parallel.small(num_layers=4), batch_sizes=(9,), microbatches=4)
    reference, wide = parallel.one_process(toy), (Level(2, 2.0**34), levels[1])
    even = staged.piper(replace(gpt, rows=64, levels=wide, flops_per_s=2.0**40)).choice
    (shardings,) = {option.shardings for option in tensoropt(replace(gpt, rows=64)).choice[0][2]}
    shape, plans = {kind: 2 ** shardings.count(kind) for kind in ("dp", "tp")}, set()
    assert shape == {"dp": 2, "tp": 2}
    runs = [dict(shape=shape | {"pp": 1}, schedule=one_f_one_b(1, 4))]
    for plan in (even, *(find(gpt).choice for find in (staged.alpa, staged.galvatron, staged.aceso))):
        ((kind,),) = {option.shardings for stage in plan for option in stage.options}
        ends = [0, *(stage.layers.stop + 1 for stage in plan[:-1]), 6]  # embedding first, head last
        plans.add((kind, *ends))
    for kind, *ends in plans:
        shape, cuts = {"dp": 1, "tp": 1, "pp": 2, kind: 2}, [range(*pair) for pair in pairwise(ends)]
        runs.append(dict(shape=shape, schedule=one_f_one_b(2, 4), cuts=cuts))
    assert sorted(plans) == [("dp", 0, 3, 6), ("tp", 0, 3, 6), ("tp", 0, 4, 6)]
    found = search(*pipeline_program(1, 1)).choice.items()
    order = [[Action(n[0], int(n[1]), int(n[3])) for n, one in found if one.device == d] for d in range(2)]
    runs.append(dict(shape=dict(dp=1, pp=2), schedule=Schedule("nnScaler", order, 2, 2)))
    for how in runs:
        assert parallel.pipeline_difference(toy, reference=reference, **how) < parallel.TOLERANCE


def program(problem):
    graph = problem.graph()
    return graph.choice(staged.intra(graph)[1])


def check_megatron():
    """A GPT of equal blocks: pipeline, data and tensor degrees that are the same everywhere; beaten over slow links."""
    for microbatches, rate, share in ((4, 2.0**32, 1), (16, 2.0**33, 1), (4, 2.0**30, 0.840304)):
        levels, more = (Level(2, rate), Level(2, 2.0**35)), dict(microbatches=microbatches)
        layers = (block("block", 1024, 4096),) * 4
        gpt, manual = Problem(layers, 512, levels, 2.0**44, shardings=("dp", "tp"), **more), []
        for cut in staged.even_cuts(gpt):
            for shardings in product(("dp", "tp"), repeat=len(gpt.mesh(cut[0][1]))):
                same = (staged.Stage(*one, (Option(shardings),) * len(one[0])) for one in cut)
                manual.append(staged.seconds(gpt, tuple(same)))
        assert staged.alpa(gpt).cost / min(manual) == pytest.approx(share) and min(manual) < max(manual) / 1.4


def test_aceso(monkeypatch):
    """On 4 layers and 4 devices it prices under 5 % of the plans there are, and ends within 5 % of the best; of a plan
    that it starts with it changes the bottleneck first; for memory it recomputes."""
    shares, asked, every_one = [], [], staged.primitives
    monkeypatch.setattr(staged, "primitives", lambda *given: asked.append(given) or every_one(*given))
    for case in (example(), example(rows=512), chain(4)):
        found, best = aceso(case), staged.every_plan(case)
        assert best.cost <= found.cost <= 1.05 * best.cost
        assert found.cost == staged.seconds(case, found.choice)
        assert max(staged.peak_bytes(case, found.choice)) <= case.memory_bytes
        shares.append(found.looked_at / best.looked_at)
        first = {plan: at for one, plan, at in reversed(asked) if one == case}
        for plan in starts(case):
            measured = staged.peak_bytes(case, plan)
            if max(measured) <= case.memory_bytes:
                measured = [staged.stage_seconds(case, stage) for stage in plan]
            assert measured[first[plan]] == max(measured)
    assert max(shares) < 0.05
    by_bytes = staged.slowest(replace(case, memory_bytes=3), [1.0, 2.0], [4, 3])  # 4 are over the memory
    assert by_bytes == [0, 1] and staged.slowest(case, [1.0, 2.0], [4, 3]) == [1, 0]
    plans = [aceso(tight).choice for tight in capped(aceso, blocks(1, shardings=("dp", "tp")))]
    assert any(option.again for plan in plans for stage in plan for option in stage.options)
    with pytest.raises(ValueError, match="found no plan in 1 bytes"):
        aceso(replace(case, memory_bytes=1))


def test_aceso_changes_one_thing():
    """Where it starts the work is most even; a stage of other layers or devices keeps its shardings as far as there
    are levels, and a new layer is as the one beside it; primitives are of the bottleneck, by bytes before time.
    """
    problem = example()
    work = lambda cut: max(sum(problem.layers[i].flops for i in run) / devices for run, devices in cut)
    begun = starts(problem)
    assert [len(plan) for plan in begun] == [1, 2, 3, 4]
    for plan in begun:
        cut = tuple((stage.layers, stage.devices) for stage in plan)
        assert work(cut) == min(work(one) for one in staged.all_cuts(problem) if len(one) == len(cut))
        assert {one for stage in plan for option in stage.options for one in option.shardings} <= {"dp"}
    outer, inner = Option(("sdp", "col")), Option(("col", "row"), again=True)
    stage = staged.Stage(range(1, 3), 4, (outer, inner))
    assert resized(problem, stage, range(0, 4), 4).options == (outer, outer, inner, inner)
    less = resized(problem, stage, range(2, 4), 2)
    assert less == staged.Stage(range(2, 4), 2, (Option(("row",), True),) * 2)
    assert resized(problem, less, range(3, 4), 4).options == (Option(("dp", "row"), True),)
    assert slowest(problem, [1.0, 3.0, 2.0], [0, 0, problem.memory_bytes]) == [1, 2, 0]
    assert slowest(problem, [2.0, 3.0, 2.0, 3.0], [0] * 4) == [1, 3, 0, 2], "of equals the first"
    assert slowest(problem, [1.0, 3.0, 2.0], [0, 1, problem.memory_bytes + 1]) == [2, 1, 0]
    plan = (staged.Stage(range(0, 3), 1, (Option(()),) * 3), staged.Stage(range(3, 4), 2, (Option(("dp",)),)))
    handed, swapped = primitives(problem, plan, 0)
    assert [one.layers for one in handed] == [range(0, 2), range(2, 4)]
    assert [one[:2] for one in swapped] == [(range(0, 3), 2), (range(3, 4), 1)]


def test_galvatron():
    """22 candidates for 8 GPUs; on 4 layers the best of all plans that the tree allows, within memory."""
    kinds = ("dp", "sdp", "tp")
    assert [len(staged.tree_shardings(kinds, 3 - pp)) for pp in range(4)] == [11, 7, 3, 1]
    assert not {("dp", "tp", "dp"), ("dp", "sdp", "tp")} & {*staged.tree_shardings(kinds, 3)}
    for seed in range(3):
        problem = blocks(seed, levels=2 + (seed == 0))
        for case in [problem, *capped(staged.galvatron, problem)]:
            found = staged.galvatron(case)
            alike = lambda cut: len({(len(run), devices) for run, devices in cut}) == 1
            best = staged.every_plan(case, staged.tree_options(case), filter(alike, staged.all_cuts(case)))
            assert found.cost == best.cost == staged.seconds(case, found.choice)
            assert found.looked_at < best.looked_at
            assert max(staged.peak_bytes(case, found.choice)) <= case.memory_bytes


def test_galvatron_bmw():
    """Within a memory as fast as the best of all plans with stages of equal devices, so never slower than Galvatron's
    plan, and faster where recomputation, even bytes or a layer less for the slowest stage are needed."""
    for problem in (blocks(seed, shardings=("sdp", "tp")) for seed in range(3)):
        for case in [problem, *capped(staged.galvatron, problem)]:
            found, before = staged.galvatron_bmw(case), staged.galvatron(case)
            options = staged.tree_options(case, staged.with_recomputation(case))
            best = staged.every_plan(case, options, every_run(case))
            assert best.cost == found.cost <= before.cost and found.cost == staged.seconds(case, found.choice)
            assert max(staged.peak_bytes(case, found.choice)) <= case.memory_bytes
    with pytest.raises(ValueError, match="fits into 1 bytes"):
        staged.galvatron_bmw(replace(problem, memory_bytes=1))


@pytest.mark.parametrize("search", [staged.piper, staged.galvatron, staged.galvatron_bmw])
def test_fronts_of_every_stage_that_was_tried_are_counted(search, monkeypatch):
    """Also of cuts in which a later stage turns out not to fit."""
    problem = blocks(0, layers=3, shardings=("dp", "tp"))
    tight = capped(search, problem)[-1]
    counted, whole = [], staged.frontier
    noted = lambda *given: counted.append(whole(*given)) or counted[-1]
    monkeypatch.setattr(staged, "frontier", noted)
    for case in (problem, tight):
        counted.clear()
        assert search(case).looked_at == sum(looked for _, looked in counted) > 0
