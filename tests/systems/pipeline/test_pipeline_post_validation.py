"""The step checked afterwards: losses, parameters, norms of clipping with a stop, on real ranks."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from minitrain import collectives, launch
from minitrain.compose.parallelize import parallelize
from minitrain.data_parallel import states
from minitrain.model.gpt import cross_entropy_sum
from minitrain.model.training.optim import AdamW, clip_grad_norm
from minitrain.model.training.step import Batch, NoReducer, train_step
from minitrain.pipeline.lower import Receive, Send, lower, pause
from minitrain.pipeline.runtime import Runner, RunnerHooks
from minitrain.pipeline.schedule import B, F, Schedule, check
from minitrain.pipeline.schedules.bidirectional import chimera
from minitrain.pipeline.schedules.less_memory import bpipe, recomputed
from minitrain.pipeline.schedules.one_direction import gpipe, interleaved, one_f_one_b
from minitrain.pipeline.schedules.zero_bubble import v_half, v_min, zb_h1, zb_h2, zb_v
from minitrain.plan.strategy import Strategy
from minitrain.ranks.collectives import channel_of
from minitrain.systems.pipeline import post_validation
from minitrain.systems.pipeline.post_validation import PostValidation
from tests.parallel import TOLERANCE, Problem, check_refusals, rows_of_problem, small
from tests.pipeline.lists import said_by, split
from tests.pipeline.test_pipeline_memory import Dropped

STEPS, POISONED = 5, 2  # in one step of each training the gradient of one parameter is no number
CLIP = 0.8527  # about half of the steps are clipped
PROBLEM = Problem(config=small(num_layers=4, vocab_size=32), batch_sizes=(8, 7, 8, 8, 7), microbatches=4)


def rate(step):
    return 1e-2 / (1 + step)


@cache
def reference(clip):
    """(losses, norms, parameters) of torch's own optimizer and clipping in one process."""
    model, losses, norms = PROBLEM.model(), [], []
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1.0)
    for step in range(STEPS):
        tokens, targets = PROBLEM.batch(step)
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = rate(step)
        loss = cross_entropy_sum(model(tokens), targets) / (targets >= 0).sum()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(trained, clip).item())
        losses.append(loss.item())
        if step != POISONED:
            optimizer.step()
    return losses, norms, {name: param.detach() for name, param in model.named_parameters()}


class Poisoned:
    """The sync of a run; it leaves what is no number in one parameter's gradient, wherever that stands."""

    def __init__(self, sync):
        self.sync, self.step = sync, 0

    def finish(self):
        self.sync.finish()
        for kept in self.sync.shards:
            names = [self.sync.names[param] for param in kept.params]
            if self.step == POISONED and "layers.3.mlp.up.weight" in names:
                kept.shard.grad.fill_(float("nan"))
        self.step += 1


def train(schedule, shape, problem, plant=lambda post: None, stop=False):
    """(losses, norms, parameters, steps run again) of this rank; with `stop`, clipping by an all-reduce."""
    strategy = Strategy(**shape, microbatches=problem.microbatches, precision="float64")
    settings = dict(seed=3, frozen=(problem.frozen,), schedule=schedule)
    run = parallelize(problem.config, strategy, lambda params: AdamW(params, lr=1.0), **settings)
    torch.manual_seed(collectives.world().rank())
    stages, reducer = run.mesh.group("pp"), Poisoned(run.sync)
    trained = [param for group in run.sync.param_groups for param in group["params"]]

    post, again = PostValidation(run.sync, CLIP, stages), []

    ask = post.before_backward

    def asked():
        again.append(ask())
        norms.append(post.norm)
        return again[-1]

    losses, norms, post.before_backward = [], [], asked
    if not stop:
        run.runner.hooks.append(post)
    plant(post)
    for step in range(STEPS):
        run.sync.param_groups[0]["lr"] = rate(step)
        batch = run.batch(rows_of_problem(problem, step), step)
        if stop:
            run.sync.zero_grad()
            loss = run.forward_backward(batch)
            reducer.finish()
            norms.append(clip_grad_norm(trained, CLIP, stages=stages))
            if torch.isfinite(norms[-1]):
                run.sync.step()
        else:
            loss = train_step(run.forward_backward, batch, post, reducer).loss
        losses.append(run.total(loss).item())
    if not stop:
        norms = [norm.item() for norm in (*norms[1:], post.finish())]
    for group in (run.runner.group, run.runner.down):
        assert not channel_of(group).unwaited  # every message was waited for
    params = {name: states.full_tensor(run.sync, param) for param, name in run.sync.names.items()}
    return losses, norms, params, again


def far(ranks):
    """How far losses and parameters are from one process, and norms where they are numbers."""
    losses, norms, params = reference(CLIP)
    found = {name: param for _, _, part, _ in ranks for name, param in part.items()}
    differences = [abs(ours - theirs) for rank in ranks for ours, theirs in zip(rank[0], losses)]
    for _, found_norms, *_ in ranks:
        pairs = [*zip(found_norms, norms)]
        differences += [abs(a - b) for a, b in pairs[:POISONED] + pairs[POISONED + 1 :]]
    assert found.keys() == params.keys()
    return max(differences + [(found[name] - params[name]).abs().max().item() for name in params])


REAL = {
    "1f1b of 2": (2, one_f_one_b(2, 4)), "split of 2": (2, split(one_f_one_b(2, 4), late=0)),
    "zb-h1 of 2": (2, zb_h1(2, 4)), "gpipe": (2, gpipe(2, 4)), "1f1b": (4, one_f_one_b(4, 4)),
    "zb-h1": (4, zb_h1(4, 4)), "interleaved": (2, interleaved(2, 4, 2)), "v-min": (2, v_min(2, 4)),
    "recomputed": (2, recomputed(one_f_one_b(2, 4))), "bpipe": (4, bpipe(4, 4)),
    "chimera": (2, chimera(2, 4)),
}  # fmt: skip
SLOW = "1f1b", "zb-h1"  # on four ranks what two show


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in REAL])
def test_equals_clipping_with_a_stop(name):
    """Steps that clip, that do not, and one without a number; a rate that changes; all ranks answer alike."""
    ranks, schedule = REAL[name]
    found = launch.run(train, schedule, dict(dp=1, pp=ranks), PROBLEM, ranks=ranks)
    assert far(found) < TOLERANCE
    norms = enumerate(reference(CLIP)[1][:-1])
    expected = [False] + [step == POISONED or norm > CLIP - 1e-6 for step, norm in norms]
    assert all(again == expected for *_, again in found) and 2 <= sum(expected) <= STEPS - 2


def looked_at(late):
    """What a run says of itself in the middle: a held-out loss, pieces to save, a step with another limit."""
    strategy = Strategy(pp=2, microbatches=4, precision="float64", post_validation=late)
    run = parallelize(PROBLEM.config, strategy, lambda params: AdamW(params, lr=1e-2), seed=3)
    found, small = [], CLIP / 10
    for step, clip in enumerate((small, small, None, small, small / 2)):
        batch = run.batch(rows_of_problem(PROBLEM, step), step)
        run.step(batch, clip)
        if step == 0:
            found.append(run.evaluate(batch))
        if step == 3:
            found += [piece.values.sum() for piece in run.pieces() if piece.name.startswith("parameters")]
    return torch.stack([*found, *(x.sum() for x in run.state_dict()["parameters"].values())])


def test_whoever_looks_at_a_run_sees_the_step_as_it_was_clipped():
    for stopped, late in launch.run(lambda: [looked_at(False), looked_at(True)], ranks=2):
        assert len(late) > 30 and (stopped - late).abs().max() < 1e-11


def test_cut_parameters_bring_their_own_squares():
    found = launch.run(train, one_f_one_b(2, 4), dict(dp=1, pp=2, tp=2), PROBLEM, ranks=4)
    assert far(found) < TOLERANCE


@pytest.mark.parametrize("zero", [1, 3])
def test_sharded_states_are_taken_back(zero):
    """What was updated is a slice on each rank, and what the model has is gathered from it."""
    problem = replace(PROBLEM, microbatches=2)
    found = launch.run(train, zb_h1(2, 2), dict(dp=2, pp=2, zero=zero), problem, ranks=4)
    assert far(found) < TOLERANCE


def test_a_stage_without_anything_to_train_passes_the_sum_on():
    """The other stage clips by its own norm, step for step, and nobody waits; the same by the strategy's word."""
    limit = 0.25

    def rank(again, word=False):
        run = parallelize(
            PROBLEM.config,
            Strategy(pp=2, microbatches=4, precision="float64", post_validation=word),
            lambda params: AdamW(params, lr=1e-2),
            seed=3,
            frozen=[f"layers.{layer}.*" for layer in range(3)],
        )
        post, norms = run.late or PostValidation(run.sync, limit, run.mesh.group("pp")), []
        if again and not word:
            run.runner.hooks.append(post)
        for step in range(3):
            batch = run.batch(rows_of_problem(PROBLEM, step), step)
            if not again:
                norms.append(run.step(batch, limit).norm.item())
            elif word:
                norms.append(run.step(batch, limit).norm)
            else:
                train_step(run.forward_backward, batch, post, run.sync)
                norms.append(post.norm)
        return [norm.item() for norm in (*norms[1:], post.finish())] if again else norms

    for stopped, *checked in launch.run(lambda: [rank(False), rank(True), rank(True, word=True)], ranks=2):
        assert all(abs(a - b) < TOLERANCE for norms in checked for a, b in zip(stopped, norms, strict=True))
        assert min(stopped) < limit < max(stopped)


def test_forwards_run_again_drop_again_what_they_dropped():
    drops = replace(PROBLEM, config=replace(PROBLEM.config, dropout=0.2))
    with_stop, without = launch.run(
        lambda: [train(zb_h1(2, 4), dict(dp=1, pp=2), drops, stop=stop) for stop in (True, False)], ranks=2
    )[0]
    assert max(abs(a - b) for a, b in zip(with_stop[0], without[0])) < TOLERANCE and any(without[3])
    assert max((with_stop[2][name] - param).abs().max() for name, param in without[2].items()) < TOLERANCE


def test_forwards_run_again_draw_again_what_they_drew():
    """A stage of one's own that draws from torch's random numbers."""

    class Again(RunnerHooks):
        play = PostValidation.play

        def before_backward(self):
            return True

    def drawn(again):
        stage, ones = Dropped(), torch.ones(4, 30, dtype=torch.float64)
        total = lambda y, targets: y.sum()
        run = Runner({0: stage}, gpipe(1, 4), collectives.world(), total, NoReducer(), width=1)
        run.hooks.append(Again() if again else RunnerHooks())
        torch.manual_seed(0)
        loss = run(Batch(ones, ones, torch.ones(())))
        return loss.item(), stage.w.grad.item(), torch.rand(3).tolist()

    def rank():
        found = [drawn(False), drawn(True)]
        post_validation.set_random_state = lambda state, device: None
        return [*found, drawn(True)]

    once, twice, control = launch.run(rank, ranks=1)[0]
    assert once == twice and once[0] == once[1] and control[0] != once[0] and control[2] != once[2]


# ---- controls --------------------------------------------------------------------------------------------


def never_again(post):
    right = post.before_backward
    post.before_backward = lambda: right() and False


def keeps_the_wrong_step(post):
    post.undo = lambda: None


def another_rate(post):
    post.set = lambda settings: None


@pytest.mark.parametrize("mistake", [keeps_the_wrong_step, another_rate])
def test_control(mistake):
    assert far(launch.run(train, zb_h1(2, 4), dict(dp=1, pp=2), PROBLEM, mistake, ranks=2)) > 1e-6


def test_control_forwards_that_saw_other_weights_are_no_use():
    """Autograd itself notices that the weights are not those of the forward."""
    with pytest.raises(launch.RankError, match="modified by an inplace operation"):
        launch.run(train, zb_h1(2, 4), dict(dp=1, pp=2), PROBLEM, never_again, ranks=2)


def test_what_fills_the_pipeline_is_received_before_the_check_and_nothing_else():
    made = [make(4, 8) for make in (one_f_one_b, zb_h1, zb_h2, zb_v, v_half)]
    for schedule in (*made, gpipe(3, 4), interleaved(4, 8, 2), bpipe(8, 16)):
        halves = [pause(program, rank, schedule) for rank, program in enumerate(lower(schedule))]
        for (filling, rest), program in zip(halves, lower(schedule)):
            assert sorted(map(str, filling + rest)) == sorted(map(str, program))
        for part in (0, 1):
            for rank, both in enumerate(halves):
                for other, others in enumerate(halves):
                    sent = [s.what for s in both[part] if type(s) is Send and s.to == other]
                    assert sent == [s.what for s in others[part] if type(s) is Receive and s.source == rank]


def test_refusals():
    def make(max_norm):
        param = torch.nn.Parameter(torch.ones(2))
        param.grad = torch.ones(2)
        return PostValidation(AdamW([param]), max_norm, collectives.world())

    def twice():
        post = make(1.0)
        post.step()
        post.step()

    refused = {"max_norm=0: must be > 0": lambda: make(0), "the step before has not been checked": twice}
    check_refusals(refused, ranks=1)
    first = F(0, 0), F(1, 1), B(1, 1), F(0, 2), B(0, 0), B(0, 2)
    second = F(0, 1), F(1, 0), F(1, 2), B(1, 0), B(0, 1), B(1, 2)
    mine = check(Schedule("both ways", (first, second), 2, 3))
    pause(lower(mine)[0], 0, mine)
    said = said_by(lambda: pause(lower(mine)[1], 1, mine))
    assert "rank 1 needs F0.2, behind a first backward, for F1.2" in said
