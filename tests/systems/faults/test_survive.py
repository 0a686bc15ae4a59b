"""Ranks die at every point of a step, and others come: losses are those of one process that splits its batches alike."""

import os
import signal
import subprocess
import time
from collections.abc import Callable

import psutil
import pytest
import torch

from benchmarks.soak import LAYOUTS
from minitrain import collectives, launch
from minitrain.compose.parallelize import parallelize
from minitrain.model.data.batches import MASKED
from minitrain.model.gpt import cross_entropy_sum
from minitrain.model.training.optim import AdamW
from minitrain.plan.strategy import Strategy
from minitrain.ranks.launch import RankError
from minitrain.systems.faults.survive import Survivor
from tests.parallel import Problem, rows_of_problem, small

STEPS = 7
PROBLEM = Problem(config=small(), batch_sizes=(8, 7) * 6)
POINTS = ("start", "backward", "vote", "passed", "publish")


def reference(sizes: dict[int, int]) -> list[float]:
    """One process; the rows of step s in sizes[s] parts, one after the other."""
    model = PROBLEM.model()
    trained, losses = [param for param in model.parameters() if param.requires_grad], []
    optimizer = torch.optim.AdamW(trained, lr=PROBLEM.lr)
    for step, ranks in sorted(sizes.items()):
        valid, total = (PROBLEM.batch(step)[1] != MASKED).sum(), 0.0
        optimizer.zero_grad()
        for rank in range(ranks):
            tokens, targets = PROBLEM.batch(step, rank, ranks)
            loss = cross_entropy_sum(model(tokens), targets) / valid
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(trained, PROBLEM.clip)
        optimizer.step()
        losses.append(total)
    return losses


def strategy(layout: str, ranks: int) -> Strategy:
    return Strategy(precision="float64", bucket_bytes=3000, **LAYOUTS[layout](ranks))


class Hasty(Survivor):
    """Updates before the vote."""

    def _vote(self, commit, loss=0.0):
        if commit.__name__ == "update":
            commit(loss)
            commit = lambda total: None
        super()._vote(commit, loss)


def train(layout, kills, copies=0, refill=True, kind=Survivor, folder=None):
    """What the test of a kind of death runs on each rank; `refill`: even steps wait for newcomers."""
    team, due, drawn = launch.team(), [], []

    def build(ranks: int):
        optimizer = lambda params: AdamW(params, lr=PROBLEM.lr)
        run = parallelize(
            PROBLEM.config, strategy(layout, ranks), optimizer, seed=3, frozen=(PROBLEM.frozen,)
        )
        first = next(param for param in run.model.parameters() if param.requires_grad)
        first.register_hook(lambda grad: at("backward"))
        return run

    def at(point: str) -> None:
        if due and due[0] == point:
            os.kill(os.getpid(), signal.SIGSTOP if point == "stop" else signal.SIGKILL)

    def saw(event, call) -> None:
        if event == "issue" and call.name == "vote":
            at("vote")
        elif event == "issue" and call.op == "all_reduce" and survivor.run and survivor.run.sync.finished:
            at("clip")
        elif event == "issue" and call.name == "live":
            at("live")
        elif event == "wait" and call.name == "vote":
            at("passed")

    def before(step: int) -> None:
        while refill and step % 2 == 0 and len(team.members) < 4 and not team.changed:
            time.sleep(0.01)
        due[:] = [point for when, member, point in kills if (when, member) == (step, team.member)]
        if folder and step == 2:
            torch.save(survivor.run.state_dict(), f"{folder}/{team.member}")
        run = survivor.run
        optimizer, update = run.sync.optimizer, run.sync.optimizer.step
        optimizer.step = lambda: (update(), at("publish"), setattr(optimizer, "step", update))
        at("start"), at("stop")

    def batch_of(run, step: int):
        drawn.append(step)
        return run.batch(rows_of_problem(PROBLEM, step), step)

    def restore(run) -> int | None:
        if not (folder and os.path.exists(f"{folder}/0")):
            return None
        run.load_state_dict(torch.load(f"{folder}/0"))
        return 2

    survivor = kind(team, build, batch_of, PROBLEM.clip, copies, restore)
    with collectives.observe(saw):
        losses = survivor.train(STEPS, before)
    assert all(b in (a, a + 1) or copies and b <= a for a, b in zip(drawn, drawn[1:])), drawn
    return losses, survivor.history, survivor.redone, team.members, os.getpid()


def launched(*args, **settings) -> list:
    given = dict(ranks=4, survive=True, timeout_s=120) | settings
    out = launch.run(train, *args, **given)
    assert all(o is None or not psutil.pid_exists(o[4]) for o in out), "a rank is left"
    return out


def difference(out: list, steps: int = STEPS) -> float:
    """From the reference, of the losses of who was there all along; newcomers say the same."""
    first = next(one for one in out if one)
    losses, history = first[:2]
    assert list(losses) == list(range(steps)) and all(one[0] == losses for one in out if one)
    sizes = {step: [n for done, n, _ in history if done <= step][-1] for step in range(steps)}
    return max(abs(a - b) for a, b in zip(losses.values(), reference(sizes)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_death_at_each_point_and_newcomers(layout):
    """4 -> 3 -> 4 three times, each point in three layouts; without copies no finished step is made again. 4 comes
    for 3, 5 for 2, 6 for 4."""
    copies, first = int(layout.startswith("zero")), list(LAYOUTS).index(layout)
    kills = [(1 + 2 * i, member, POINTS[(first + i) % 5]) for i, member in enumerate((3, 2, 4))]
    out = launched(layout, kills, copies, replace_s=0.3)
    assert [o is None for o in out] == [False, False, True, True, True, False, False]
    assert difference(out) < 1e-12 and out[0][3] == [0, 1, 5, 6]
    assert out[0][2] == 0 or copies and out[0][2] <= 2


@pytest.mark.parametrize(
    "layout, point, sizes",
    [("zero1", "live", [4, 2]), ("dp", "vote", [4, 2]), ("zero1", "passed", [4, 3, 2])],
)
def test_a_death_while_the_state_moves(layout, point, sizes):
    """3 dies in step 2; 1 when pieces move to the layout of three, or in its vote, or behind it before any copy."""
    out = launched(layout, [(2, 3, "start"), (2, 1, point)], int(layout == "zero1"), False)
    assert [n for _, n, _ in out[0][1]] == sizes and [d for d, *_ in out[0][1][1:]] == [2] * len(sizes[1:])
    assert difference(out) < 1e-12 and out[0][2] == 0


def test_without_newcomers_fewer_go_on():
    out = launched("tp", [(2, 3, "clip"), (5, 0, "vote")], 0, False)
    assert [n for _, n, _ in out[1][1]] == [4, 3, 2] and difference(out) < 1e-12


def test_an_update_before_the_vote_is_seen():
    """Two ranks of tp have clipped and updated when the third cannot any more."""
    losses = launched("tp", [(2, 3, "clip")], 0, False, Hasty)[0][0]
    want = reference({step: 4 if step < 3 else 3 for step in range(STEPS)})
    assert max(abs(losses[step] - want[step]) for step in range(4, STEPS)) > 1e-6


def test_a_stopped_rank_is_a_dead_one():
    out = launched("dp", [(3, 2, "stop")], 0, False, hung_s=1.0)
    assert out[2] is None and difference(out) < 1e-12


@pytest.mark.parametrize("layout, victims, copies", [("dp", (0, 2), 0), ("zero1", (1, 3), 3)])
def test_two_at_once(layout, victims, copies):
    out = launched(layout, [(4, victim, "start") for victim in victims], copies, False)
    assert difference(out) < 1e-12 and len(next(o for o in out if o)[3]) == 2
    assert all(o is None or o[2] <= copies for o in out)


def test_neighbours_at_once_are_lost_or_on_a_disk(tmp_path):
    """With ZeRO a share has two holders; the checkpoint is of step 2."""
    kills = [(4, 1, "start"), (4, 2, "start")]
    with pytest.raises(
        RankError, match="Lost: no rank has the whole state any more .the share of rank 1 of 4"
    ):
        launched("zero1", kills, 1, False)
    out = launched("zero1", kills, 1, False, Survivor, tmp_path)
    assert difference(out) < 1e-12 and out[0][2] == 2


def test_only_newcomers_are_lost():
    kills = [(4, member, "start") for member in range(4)]
    with pytest.raises(RankError, match="all are newcomers"):
        launched("dp", kills, 0, True, replace_s=0.1)


def stale(folder) -> list[float]:
    """0 sends to 1 what 1 does not receive before 2 dies; then again, in the new group."""
    team, old = launch.team(), collectives.world()
    if team.member == 0:
        collectives.send(torch.tensor([1.0]), 1, old, async_op=True)
    try:
        collectives.barrier(old)
        if team.member == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        collectives.barrier(old)
    except RuntimeError as error:
        team.regroup(error=error)
    new = collectives.world()
    if team.member == 0:
        collectives.send(torch.tensor([2.0]), 1, new)
    got = collectives.receive(torch.zeros(1), 0, new).item() if team.member == 1 else 2.0
    with pytest.raises(ValueError) as refused:
        collectives.all_reduce(torch.ones(1), old)
    return got, str(refused.value)


def test_a_message_of_an_old_generation_reaches_nobody():
    for got, refused in (one for one in launch.run(stale, None, ranks=4, survive=True) if one):
        assert got == 2.0 and "destroyed" in refused


def met(fault: Callable) -> None:
    """Member 1 has a fault, the others wait for it."""
    if launch.team().member == 1:
        fault()
    try:
        collectives.barrier(collectives.world())
    except RuntimeError as error:
        launch.team().regroup(error=error)


def stop_beside_a_slow_helper() -> None:
    """Which tells the others of a death two seconds late."""
    helper = os.getppid()
    subprocess.Popen(["sh", "-c", f"kill -STOP {helper}; sleep 2; kill -CONT {helper}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def test_who_hangs_is_killed_once(capsys):
    launch.run(met, stop_beside_a_slow_helper, ranks=2, survive=True, hung_s=0.5)
    assert capsys.readouterr().err.count("rank 1 has not got on for 0.5 s: killed") == 1


def test_an_error_of_a_rank_still_ends_all():
    with pytest.raises(RankError, match="rank 1 raised RuntimeError"):
        launch.run(met, lambda: torch.ones(2) @ torch.ones(3), ranks=3, survive=True)
    for wrong in (dict(replace_s=1.0), dict(hung_s=1.0), dict(survive=True, grace_s=1.0)):
        with pytest.raises(ValueError, match="survive="):
            launch.run(int, **wrong)
    with pytest.raises(ValueError, match="no team"):
        launch.team()
