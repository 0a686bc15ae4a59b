"""A plan is a line, the line is the plan; each fault does what it says, where it says, and nothing else."""

import errno
import time

import psutil
import pytest
import torch

from minitrain import collectives, launch
from minitrain.checkpoint.disk import DiskError, new_file
from minitrain.compose.parallelize import parallelize
from minitrain.model.training.optim import AdamW
from minitrain.plan.strategy import Strategy
from minitrain.ranks.launch.report import LaunchTimeout, RankError
from minitrain.ranks.process import PROCESS
from minitrain.systems.faults.chaos import KINDS, Chaos, Plan, flip
from tests.parallel import Problem, rows_of_problem, small

PROBLEM = Problem(config=small(), batch_sizes=(8,) * 100, clip=None)
WEIGHT = "layers.1.mlp.up.weight"
ONE = 77  # an element of it


def make(**strategy):
    settings = dict(dp=4, precision="float32", bucket_bytes=3000) | strategy
    make_optimizer = lambda params: AdamW(params, lr=PROBLEM.lr)
    return parallelize(PROBLEM.config, Strategy(**settings), make_optimizer, seed=3)


def train_step(run, step: int):
    return run.step(run.batch(rows_of_problem(PROBLEM, step), step), PROBLEM.clip)


def test_a_plan_is_its_line():
    for seed in range(40):
        plan = Plan.draw(seed, ranks=4, steps=20, kinds=tuple(KINDS), names=[WEIGHT])
        assert Plan.parse(str(plan), ranks=4) == plan and [fault.kind for fault in plan] == [*KINDS]
        assert plan == Plan.draw(seed, ranks=4, steps=20, kinds=tuple(KINDS), names=[WEIGHT])
        assert all(fault.rank < 4 and 1 <= fault.first < 20 for fault in plan)
    assert Plan.draw(1, ranks=4, steps=9, kinds=["flip"])[0].more[0] == "message"
    assert Plan.parse(" ; ") == () and str(Plan.parse("kill  1 @3 send>2#0 ;")) == "kill 1 @3 send>2#0"


@pytest.mark.parametrize(
    "line, said",
    [
        ("kil 1 @2 forward", "KIND is one of kill, stop, slow, drop, delay, skip, swap, flip, full"),
        ("kill 1 2 forward", "write KIND RANK @STEP POINT"),
        ("kill 4 @2 forward", "ranks go from 0 to 3"),
        ("kill 1 @5-2 forward", "steps from FIRST to LAST"),
        ("kill 1 @2 forward#1", "PHASE: forward|backward|gradients|update"),
        ("drop 1 @2 all_reduce", "after drop RANK @STEP comes send"),
        ("slow 1 @2 forward", "comes PHASE SECONDS"),
        ("flip 1 @2 update grad:w 3 4", "gradients grad:NAME ELEMENT BIT"),
    ],
)
def test_a_bad_plan_is_one_line(line, said):
    with pytest.raises(ValueError) as error:
        Plan.parse(f"kill 0 @1 update; {line}", ranks=4)
    assert said in str(error.value) and repr(line) in str(error.value) and "\n" not in str(error.value)


# ---- what flips reach


def flips(plans: list[str]):
    """Of each plan, in a run of its own: what happened, the losses, and the state behind the second step."""
    seen = []
    for plan in plans:
        run = make()
        with Chaos(Plan.parse(plan), run, collectives.world().rank()) as chaos:
            losses = [run.total(train_step(run, step).loss).item() for step in range(2)]
        shard = next(one.shard for one in run.sync.shards if run.sync.names[one.params[0]] == WEIGHT)
        state = dict(weight=shard, grad=shard.grad, moment=run.sync.optimizer.state[shard]["exp_avg"])
        seen.append((chaos.happened, losses, {k: x.detach().clone().view(-1) for k, x in state.items()}))
    assert not PROCESS.observers and PROCESS.begin(None, None, lambda: 5) == 5
    return seen


def test_a_flip_changes_one_bit_where_it_says_so():
    plans = [
        *("", f"flip 1 @1 update weight:{WEIGHT} {ONE} 20", f"flip 2 @1 update moment:{WEIGHT} {ONE} 20"),
        *(f"flip 3 @1 gradients grad:{WEIGHT} {ONE} 22", f"flip 0 @1 backward grad:{WEIGHT} {ONE} 22"),
        *("flip 1 @1 forward activation:layers.1.mlp.up 5 29", "flip 2 @1 all_reduce#1 message 3 22"),
    ]
    ranks = launch.run(flips, plans, ranks=4)
    clean = ranks[0][0]
    assert all(seen[0][:2] == clean[:2] for seen in ranks)
    changed = lambda rank, plan, what: (
        (ranks[rank][plan][2][what] != clean[2][what]).nonzero().flatten().tolist()
    )
    for plan, (rank, what) in enumerate([(1, "weight"), (2, "moment"), (3, "grad")], start=1):
        assert [changed(r, plan, what) for r in range(4)] == [[ONE] if r == rank else [] for r in range(4)]
        assert ranks[rank][plan][0] == [(1, plans[plan])] and not ranks[rank - 1][plan][0]
        flipped = ranks[rank][plan][2][what].clone()
        assert torch.equal(flip(flipped, ONE, 22 if what == "grad" else 20), clean[2][what])
    assert [changed(rank, 4, "grad") for rank in range(4)] == [[ONE]] * 4, "a flipped sum is everybody's"
    assert ranks[0][5][1][0] == clean[1][0] and all(rank[5][1][1] != clean[1][1] for rank in ranks)
    assert ranks[2][6][0] == [(1, plans[6])]
    same = [all(torch.equal(rank[6][2][k], x) for k, x in clean[2].items()) for rank in ranks]
    assert [r for r in range(4) if r != 2 and not same[r]] == []


# ---- calls that are late, lost, left out or swapped


def calls(plan: str):
    world = collectives.world()
    rank, x, seen = world.rank(), torch.tensor([1.0 + world.rank()]), {}
    with Chaos(Plan.parse(plan), None, rank) as chaos:
        chaos.begin_step(0)
        began = time.monotonic()
        if rank == 0:
            handles = [collectives.send(x * 10 + i, 1, world, async_op=True) for i in range(3)]
        collectives.barrier(world)
        if rank == 0:
            handles[0].wait()
            seen["sent"] = time.monotonic() - began
        if rank == 1:
            handles = [collectives.receive(x, 0, world, async_op=True) for i in range(3)]
            seen["got"] = [handles[i].wait().item() for i in (2, 0)]
        pair = [collectives.all_reduce(y, world, async_op=True) for y in (x, 10 * x)]
        seen["sums"] = [handle.wait().item() for handle in pair]
        chaos.begin_step(1)
        if rank == 3:
            began = time.monotonic()
        seen["last"] = [collectives.all_reduce(x, world).item() for _ in range(3 - (rank == 2))]
        seen["slow"] = time.monotonic() - began
    return seen, chaos.happened


def test_messages_are_late_or_lost_and_sums_swapped_or_left_out():
    plan = "delay 0 @0 send#0 0.4; drop 0 @0 send>1#1; swap 2 @0 all_reduce#0; slow 3 @1 all_reduce#0 0.2"
    plan += "; skip 2 @1 all_reduce#9; skip 0 @1 all_reduce#2; skip 1 @1 all_reduce#2; skip 3 @1 all_reduce#2"
    ranks = [seen for seen, _ in launch.run(calls, plan, ranks=4, checked=False)]
    assert ranks[1]["got"] == [12.0, 10.0] and ranks[0]["sent"] > 0.4
    assert [seen["sums"] for seen in ranks[:2]] == [[1 + 2 + 30 + 4, 10 + 20 + 3 + 40]] * 2, "nobody notices"
    assert [seen["last"][:2] for seen in ranks] == [[10.0, 10.0]] * 4 and ranks[3]["slow"] > 0.2
    with pytest.raises(RankError, match="collective #1.*rank 2 calls all_reduce"):
        launch.run(named, "swap 2 @0 all_reduce#0", ranks=4)
    with pytest.raises(RankError, match=r"rank 2 calls all_reduce.*named 'b'"):
        launch.run(named, "skip 2 @0 all_reduce#0", ranks=4)


def named(plan: str):
    world = collectives.world()
    with Chaos(Plan.parse(plan), None, world.rank()) as chaos:
        chaos.begin_step(0)
        for handle in [collectives.all_reduce(torch.ones(2), world, name=n, async_op=True) for n in "abc"]:
            handle.wait()


def test_a_full_disk_refuses_and_has_room_again(tmp_path):
    with Chaos(Plan.parse("full 0 @1 write#1"), None, 0) as disk:
        for step in range(3):
            disk.begin_step(step)
            for number in range(2):
                path = tmp_path / f"{step}-{number}"
                if (step, number) == (1, 1):
                    full = pytest.raises(DiskError, match="No space left")
                    with full as error, new_file(disk, path) as file:
                        disk.write(file, 0, b"abc")
                    assert error.value.errno == errno.ENOSPC
                else:
                    with new_file(disk, path) as file:
                        disk.write(file, 0, b"abc")
                    assert path.read_bytes() == b"abc"


# ---- ranks that end


def pids(plan: str, folder):
    run, rank = make(), collectives.world().rank()
    (folder / f"{rank}").write_text(str(psutil.Process().pid))
    with Chaos(Plan.parse(plan), run, rank):
        for step in range(5):
            train_step(run, step)


@pytest.mark.parametrize("seed", range(4))
def test_a_rank_that_is_killed_or_stops_is_named_and_nothing_survives(seed, tmp_path):
    kind = ("kill", "stop")[seed == 3]
    fault = Plan.draw(seed, ranks=4, steps=4, kinds=[kind])[0]
    plan = f"{kind} {fault.rank} @{fault.first} {('backward', 'update', 'gradients', 'all_reduce#1')[seed]}"
    with pytest.raises(LaunchTimeout if kind == "stop" else RankError) as error:
        launch.run(pids, plan, tmp_path, ranks=4, timeout_s=2 if kind == "stop" else 60)
    if kind == "kill":
        assert f"rank {fault.rank} died of SIGKILL" in str(error.value)
    assert not any(psutil.pid_exists(int(path.read_text())) for path in tmp_path.iterdir())
