"""A lost worker's microbatches: on ranks the gradients are the whole batch's; by the simulator, how long a step is."""

from fractions import Fraction
from itertools import pairwise

import pytest
import torch

from minitrain import launch
from minitrain.model.gpt import GPT, Stages, cross_entropy_sum
from minitrain.model.training.step import Batch, NoReducer, valid_tokens
from minitrain.pipeline.runtime import Runner
from minitrain.pipeline.schedule import peak
from minitrain.pipeline.schedules.one_direction import one_f_one_b
from minitrain.pipeline.simulate import Costs, simulate
from minitrain.ranks.mesh import Mesh
from minitrain.systems.faults.reroute import failover, migrate, redundant_forwards, rerouted, stream
from tests.parallel import TOLERANCE, Problem, one_process, pipeline_difference, small
from tests.pipeline.lists import refuse

PROBLEM = Problem(config=small(num_layers=4, tied=False), batch_sizes=(8, 9), microbatches=4)
ONE_LOST = rerouted(2, 2, 2, [(1, 1)])


def test_recycle():
    """On 3 ranks, one of which has a stage alone for both pipelines; how much longer the step is."""
    assert pipeline_difference(PROBLEM, dict(dp=1, pp=3), ONE_LOST, one_process(PROBLEM)) < TOLERANCE
    assert [len(own) for own in ONE_LOST.ranks] == [6, 12, 6], "F, I, W of two microbatches, of four"
    span = lambda *sizes, dead=(): simulate(rerouted(*sizes, dead)).makespan
    assert (span(4, 4, 8), span(4, 4, 8, dead=[(1, 3)])) == (30, 38) and 38 / 30 - 1 < 1 / 3
    assert (span(8, 4, 16), span(8, 4, 16, dead=[(1, 3)])) == (54, 62)
    assert 62 / 54 - 1 > 1 / 7, "a list scheduler misses the bound here"
    two = rerouted(3, 2, 6, [(0, 1), (2, 0)])
    assert [two.stages_of(rank) for rank in range(4)] == [[0], [0], [1], [1]]
    assert [len(own) for own in two.ranks] == [27] * 4, "6 + 3 microbatches each"
    assert all(peak(two, rank) <= most for rank, most in enumerate([4, 4, 2, 2])), "twice 1F1B's"
    refuse({"stage 1 is lost in every pipeline": lambda: rerouted(2, 2, 2, [(0, 1), (1, 1)])})
    refuse({"dead=(2, 0); a worker is (pipeline, stage) of 2 x 2": lambda: rerouted(2, 2, 2, [(2, 0)])})


def lost_before_the_sum():
    """A step by four ranks; the last goes, with gradients that nobody else has; the three make it again."""
    mesh, found = Mesh(pp=4), []
    world, left, rank = mesh.group("pp"), mesh.part("pp", (0, 1, 2)), mesh.rank("pp")
    stage, (tokens, targets) = rank % 2, PROBLEM.batch(0)
    cut = range(3 * stage, 3 * stage + 3)  # the table and two blocks, or two blocks and the head
    module = Stages(PROBLEM.config, {stage: cut}, seed=3, dtype=torch.float64)
    for schedule, group in (rerouted(2, 2, 2), world), (ONE_LOST, left):
        if group is not None:
            module.zero_grad()
            width = PROBLEM.config.d_model
            run = Runner(dict(module.items()), schedule, group, cross_entropy_sum, NoReducer(), width=width)
            run(Batch(tokens, targets, valid_tokens(targets)))
            found.append({name: param.grad for name, param in module.named_parameters()})
    return found


def test_module_redundancy():
    model, (tokens, targets) = GPT(PROBLEM.config, seed=3, dtype=torch.float64), PROBLEM.batch(0)
    (cross_entropy_sum(model(tokens), targets) / valid_tokens(targets)).backward()
    wanted = [param.grad for param in model.parameters()]

    def furthest(*parts):
        """Stage 0's gradients and stage 1's, each a sum over ranks."""
        sums = [sum(grads) for part in parts for grads in zip(*(one.values() for one in part))]
        return max((ours - theirs).abs().max().item() for ours, theirs in zip(sums, wanted, strict=True))

    (a, again_a), (b, again_b), (c, again_c), (d,) = launch.run(lost_before_the_sum, ranks=4)
    assert furthest([a, c], [b, d]) < TOLERANCE
    assert furthest([a, c], [b]) > 1e-3, "without what the lost one had the sum is wrong"
    assert furthest([again_a, again_c], [again_b]) < TOLERANCE


def test_bamboo():
    """p=4, m=8, B = 2F: every rank is idle for 9F, in which 8 forwards of F do not all find a place."""
    run, unplaced = simulate(one_f_one_b(4, 8), Costs(F=1, B=2)), {}
    assert [run.idle(rank) for rank in range(4)] == [9] * 4
    for forward in (Fraction(1, 4), Fraction(1, 2), 1, 2):
        placed, unplaced[forward] = redundant_forwards(run, forward)
        assert sum(map(len, placed)) + len(unplaced[forward]) == 32
        for rank, (own, more) in enumerate(zip(run.spans, placed)):
            spans = sorted([*own, *more], key=lambda span: span.start)
            assert all(one.end <= after.start for one, after in pairwise(spans)) and spans[-1].end <= 33
            made = {span.entry.microbatch: span.end for span in own if span.entry.kind == "F"}
            assert rank == 3 or all(made[span.entry.microbatch] <= span.start for span in more)
    assert not unplaced[Fraction(1, 4)] and not unplaced[Fraction(1, 2)]
    assert unplaced[1] == [(0, 7), (1, 7), (2, 7)] and len(unplaced[2]) > 12
    after = failover(3, 4, 1)
    assert [after.stages_of(rank) for rank in range(2)] == [[0, 1], [2]]
    assert [failover(3, 4, 0).stages_of(rank) for rank in range(2)] == [[1], [0, 2]]
    assert pipeline_difference(PROBLEM, dict(dp=1, pp=2), after, one_process(PROBLEM)) < TOLERANCE
    wrong = lambda: redundant_forwards(simulate(ONE_LOST), 1)
    refuse({"dead=3": lambda: failover(3, 4, 3), "rank r needs stage r": wrong})


def test_swarm():
    """A peer vanishes; another one migrates to its stage, which is then no bottleneck any more."""
    peers = [[1.0, 0.8, 1.2], [1.0, 0.9], [1.1, 1.0, 0.9]]  # microbatches/s, by stage
    calm, hit = stream(peers, 100), stream(peers, 100, {(1, 1): 20.5})
    for run in calm, hit:
        assert [sum(done) for done in run.done] == [100] * 3 and min(run.finished) > 0, "none is lost"
    assert calm.again == 0 < hit.again and max(calm.finished) < max(hit.finished)
    assert hit.done[1][1] == int(0.9 * (20.5 - 1 / 1.2)) == 17 < calm.done[1][1], "at work since 1/1.2 s"
    left = [peers[0], peers[1][:1], peers[2]]
    moved = migrate(left)
    assert sorted(sum(moved, [])) == sorted(sum(left, [])) and len(moved[1]) > 1
    rates = [sum(speeds) for speeds in moved]
    assert max(rates) - min(rates) < min(sum(moved, [])) < max(map(sum, left)) - min(map(sum, left))
    for stages, rate in (left, 1.0), (moved, min(rates)):
        assert 1000 / max(stream(stages, 1000).finished) == pytest.approx(rate, rel=0.01)
    refuse({"stage 1 has no peer left": lambda: stream(peers, 100, {(1, 0): 5.0, (1, 1): 9.0})})
