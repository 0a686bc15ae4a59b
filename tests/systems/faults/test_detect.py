"""Each detector names the rank, and the step or the link, of what is injected for it, and nobody where nothing is.

Seeded plans run one after the other in one launch per kind; what a detector cannot see, a test shows.
"""

import os
import random
import signal
import threading
import time
from unittest import mock

import numpy as np
import pytest
import torch

from minitrain import collectives, launch
from minitrain.ranks.process import PROCESS
from minitrain.systems.faults import chaos, detect
from minitrain.systems.faults.chaos import Chaos, Plan
from minitrain.systems.faults.corruption import ProductCheck, odd_replicas, replayed
from tests.systems.faults.test_chaos import PROBLEM, WEIGHT, make, rows_of_problem, train_step

RANKS = 4
LAYER = WEIGHT.removesuffix(".weight")


def draw(seed: int) -> tuple[int, random.Random]:
    """A rank, and what else is drawn."""
    dice = random.Random(seed)
    return dice.randrange(RANKS), dice


# ---- numbers ---------------------------------------------------------------------------------------------

FLIPS = {  # at which point of the step, and which bits: of a product's output and weight those above rounding
    "weight": ("update", range(32)),
    "used weight": ("forward", range(24, 30)),
    "moment": ("update", range(32)),
    "grad": ("backward", range(16, 31)),
    "sum": ("gradients", range(16, 31)),
    "activation": ("forward", range(24, 30)),
}
SEEN = {  # by the step again, by checksums, by sums of products: in the same step, and as this rank's
    "weight": (True, True, False),
    "used weight": (True, True, True),
    "moment": (True, True, False),
    "grad": (True, False, False),
    "sum": (True, True, False),
    "activation": (True, False, True),
}


def flips() -> list[tuple[str, int, str]]:
    plans = []
    for seed, what in enumerate(FLIPS):
        rank, dice = draw(seed)
        point, bits = FLIPS[what]
        name = {"sum": f"grad:{WEIGHT}", "activation": f"activation:{LAYER}"}.get(
            what, f"{what.split()[-1]}:{WEIGHT}"
        )
        element = dice.randrange(16)  # of a token that is no last one, which nobody reads
        plans.append((what, rank, f"flip {rank} @STEP {point} {name} {element} {dice.choice(bits)}"))
    return plans


def corrupted(plans: list[str]) -> tuple[list, list]:
    """Of each plan what checks say of the steps before and with the flip; of all, a step each, what replays say."""
    seen, rank = [], collectives.world().rank()
    for plan in plans:
        run, found = make(), []
        with Chaos(Plan.parse(plan.replace("STEP", "1")), run, rank), ProductCheck(run.model) as check:
            for step in range(2):
                train_step(run, step)
                found.append((odd_replicas(run.pieces()), check.wrong()))
        seen.append(found)
    lines = [plan.replace("STEP", str(step)) for step, plan in enumerate(plans)]
    run, again = make(), []
    with Chaos(Plan.parse("; ".join(lines)), run, rank):
        for step in range(len(plans)):
            again.append(replayed(run, run.batch(rows_of_problem(PROBLEM, step), step))[1])
    return seen, again


def test_silent_corruption():
    """A gradient that is wrong before its sum is wrong on all ranks alike: only the step, made again, differs."""
    plans = flips()
    ranks = launch.run(corrupted, [plan for *_, plan in plans] + [""] * 3, ranks=RANKS, timeout_s=300)
    for number, (what, rank, plan) in enumerate(plans):
        (seen, again), (replay, replicas, products) = ranks[rank], SEEN[what]
        assert ({who for who, _ in again[number]} == {rank}) == replay, plan
        assert ({who for who, _ in seen[number][1][0]} == {rank}) == replicas, plan
        assert (LAYER in seen[number][1][1]) == products, plan
        assert not any(p for r in range(RANKS) if r != rank for _, p in ranks[r][0][number]), plan
    clean = [one for seen, again in ranks for run in seen[len(plans) :] for step in run for one in step]
    clean += [one for seen, again in ranks for run in seen for one in run[0]]
    clean += [one for _, again in ranks for one in again[len(plans) :]]
    assert len(clean) == RANKS * (3 * 4 + 9 * 2 + 3) and not any(clean), "no alarm in 15 clean steps"


# ---- time ------------------------------------------------------------------------------------------------


class Seconds:
    """A rank's clock, on which sleeping, waiting and standing in the run queue take what they are said to take."""

    def __init__(self):
        self.now = self.queue = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def perf_counter(self) -> float:
        return self.now

    def stand(self, seconds: float) -> None:
        self.now, self.queue = self.now + seconds, self.queue + seconds


def slow_ranks(plan: str, windows: int) -> tuple:
    run, world, own, clock = make(), collectives.world(), [], Seconds()
    dice, begin = random.Random(world.rank()), PROCESS.begin

    def waits(ch, what, start):
        settle = begin(ch, what, start)
        return lambda: (clock.sleep(dice.random()), settle())[1]

    with (
        mock.patch.multiple(detect, time=clock, queued_s=lambda pid: clock.queue),
        mock.patch.object(chaos, "time", clock),
        mock.patch.object(PROCESS, "begin", waits),
        detect.LocalTime() as local,
        Chaos(Plan.parse(plan), run, world.rank()),
    ):
        for step in range(8 * windows):
            clock.stand(dice.random())
            clock.sleep(0.02 + 0.3 * (step % 8 < 2 * world.rank()))
            run.step(run.batch(rows_of_problem(PROBLEM, step), step))
            own.append(local.lap())
    return detect.heat_map(own, world).reshape(windows, 8, RANKS)


def test_stragglers():
    """Windows of 8 steps, the first and the last without a slow rank; each row of the heat map is one column too hot.

    Who waits, or stands in the run queue, is late and not slow; nor who is late in half of its steps.
    """
    slow = [draw(seed)[0] for seed in range(5)]
    points = ("forward", "backward", "gradients", "all_reduce#0", "update")
    plan = "; ".join(f"slow {r} @{8 + 8 * i}-{15 + 8 * i} {points[i]} 0.2" for i, r in enumerate(slow))
    windows = launch.run(slow_ranks, plan, 7, ranks=RANKS)[0]
    assert [detect.stragglers(own) for own in windows] == [[], *([r] for r in slow), []]


def test_megascale_diagnosis():
    """The heat map isolates a slow rank; tests before a start pass on healthy ranks, and name a broken pair."""
    heat = np.full((8, RANKS), 0.02) + np.random.default_rng(0).exponential(0.05, (8, RANKS))
    heat[:, 2] += 0.2
    assert detect.stragglers(heat) == [2] and detect.stragglers(heat[:, [0, 1, 3]]) == []
    plans = [
        "",
        "flip 3 @0 all_to_all#0 message 5 40",
        "flip 0 @0 all_to_all#0 message 2100 51",
        "flip 1 @0 all_reduce#0 message 9 44",
    ]
    found = launch.run(checked, plans, ranks=RANKS)
    assert found == [[[], [("link", 0, 3)], [("link", 2, 0)], [("sum", 1)]]] * RANKS


def checked(plans: list[str]) -> list:
    found = []
    for plan in plans:
        with Chaos(Plan.parse(plan), None, collectives.world().rank()) as chaos:
            chaos.begin_step(0)
            found.append(detect.self_check(collectives.world()))
    return found


def probed(plans: list[str]) -> list:
    found = []
    for plan in plans:
        with Chaos(Plan.parse(plan), None, collectives.world().rank()) as chaos:
            chaos.begin_step(0)
            delays = np.median([detect.probe(collectives.world()) for _ in range(3)], axis=0)
            found.append(detect.blame(delays / 5))  # so 75 ms are no fault
    return found


def test_c4():
    """A slow row of the matrix of delays is a sender, a column a receiver, a cell a link; a floor of 15 ms, of a fifth."""
    plans, wanted = ["", ""], [(), ()]
    faults = {"sender": "slow {} @0 send 0.2", "receiver": "slow {} @0 receive 0.2"}
    for seed, (kind, fault) in enumerate((faults | {"link": "delay {} @0 send>{} 0.2"}).items()):
        a, dice = draw(seed)
        b = dice.choice([r for r in range(RANKS) if r != a])
        plans.append(fault.format(a, b))
        wanted.append((kind, a, b) if kind == "link" else (kind, a))
    assert launch.run(probed, plans, ranks=RANKS) == [wanted] * RANKS


def test_vela_health():
    """Pairs that share no node, in n-1 rounds; a node that is slow to all is found, and heavy tests leave busy ones out."""
    for n in (2, 5, 8):
        rounds = detect.rounds_of_pairs(range(n))
        assert sorted(tuple(sorted(pair)) for pairs in rounds for pair in pairs) == [
            (a, b) for a in range(n) for b in range(a + 1, n)
        ]
        assert all(len({node for pair in pairs for node in pair}) == 2 * len(pairs) for pairs in rounds)
    noise = np.random.default_rng(0)
    for node in range(8):
        seconds = noise.uniform(0.8, 1.2, (8, 8))
        assert detect.blame(seconds) == ()
        seconds[node], seconds[:, node] = 4 * seconds[node], 4 * seconds[:, node]
        assert detect.blame(seconds) == ("rank", node)
    assert not {1, 6} & {
        node for pairs in detect.rounds_of_pairs(range(8), busy=(1, 6)) for pair in pairs for node in pair
    }


def test_transom():
    """200 series with a checkpoint every 10 steps: of half of them steps get 6 % longer, by and by or at once."""
    noise, found = np.random.default_rng(0), []
    for number in range(200):
        times = 1 + 0.02 * noise.standard_normal(200) + np.where(np.arange(200) % 10 == 0, 0.5, 0.0)
        times[noise.integers(60, 200, 4)] += 0.3  # late once
        since = int(noise.integers(80, 140)) if number % 2 else None
        if since:
            times[since:] += np.minimum(0.06, 0.06 * np.arange(200 - since) / noise.choice([1, 20]))
        found.append((since, detect.drift(times, period=10)))
    right = sum(since is not None and said is not None and abs(said - since) <= 20 for since, said in found)
    named, planted = sum(said is not None for _, said in found), sum(since is not None for since, _ in found)
    assert 2 * right / (named + planted) > 0.9, (right, named, planted)
    with pytest.raises(ValueError, match="4 periods"):
        detect.drift([1.0] * 90, period=16)


# ---- ranks that are silent or elsewhere --------------------------------------------------------------------


def stopped(plan: str, folder, steps: int) -> list:
    """Whoever is silent is named by the lowest of the others, and woken."""
    run, rank, named = make(), collectives.world().rank(), []
    (folder / f"pid{rank}").write_text(str(os.getpid()))
    ended = threading.Event()

    def monitor(heart):
        while not ended.wait(0.02):
            for victim, step, calls in heart.silent():
                named.append((victim, step))
                if rank == min({*range(RANKS)} - {victim}):
                    os.kill(int((folder / f"pid{victim}").read_text()), signal.SIGCONT)

    collectives.barrier(collectives.world())
    with detect.Heartbeat(folder / "beats", rank, RANKS) as heart, Chaos(Plan.parse(plan), run, rank):
        thread = threading.Thread(target=monitor, args=[heart])
        thread.start()
        for step in range(steps):
            train_step(run, step)
        behind = heart.behind()
        ended.set()
        thread.join()
    return named, behind


def test_heartbeat_monitor(tmp_path):
    """A rank that stops is named with its step as soon as others have had twenty beats, and with that it goes on."""
    plans = [(draw(seed)[0], 2 + 3 * seed) for seed in range(5)]
    points = ("forward", "backward", "all_reduce#1", "gradients", "update")
    plan = "; ".join(f"stop {rank} @{step} {point}" for (rank, step), point in zip(plans, points))
    ranks = launch.run(stopped, plan, tmp_path, 18, ranks=RANKS, timeout_s=120)
    for rank, step in plans:
        assert (rank, step) in ranks[min({*range(RANKS)} - {rank})][0], (rank, step)
    assert {one for named, _ in ranks for one in named} == set(plans), "and nobody else by anybody"


def test_who_has_not_begun_is_not_silent(tmp_path):
    heart, named = detect.Heartbeat(tmp_path / "beats", 0, RANKS), []
    for last in (0, 1, 1):  # late, begun, stopped
        heart.rows[:-1, 0] += 2 * detect.BEATS
        heart.rows[-1, 0] = last
        named.append(heart.silent())
    assert named == [[], [], [(RANKS - 1, 0, 0)]]


def recorded(plans: list[str]) -> list:
    """24 sums per plan; who has left one out makes another at the end, so that no rank waits for ever."""
    world, seen = collectives.world(), []
    for names, plan in plans:
        with Chaos(Plan.parse(plan), None, world.rank()) as chaos:
            chaos.begin_step(0)
            collectives.barrier(world)
            first = collectives.last_calls()[-1].seq + 1
            some = [f"layer {i}" if names else None for i in range(24)]
            handles = [collectives.all_reduce(torch.ones(2), world, name=n, async_op=True) for n in some]
            for _ in chaos.happened if "skip" in plan else ():
                collectives.all_reduce(torch.ones(2), world, name="another" if names else None)
            for handle in handles:
                handle.wait()
        calls = collectives.last_calls()
        seen.append((first, [call for call in calls if call.seq >= first], len(calls)))
    return seen


def test_flight_recorder():
    """Rank 2 leaves out #17: named, and its number. Calls that differ in nothing show it at the last one only."""
    plans, wanted = [(True, "skip 2 @0 all_reduce#17")], [(2, 17)]
    for seed in range(4):
        rank, dice = draw(seed)
        number, kind = dice.randrange(3, 20), ("skip", "swap")[seed % 2]
        plans.append((True, f"{kind} {rank} @0 all_reduce#{number}"))
        wanted.append((rank, number))
    plans += [(True, ""), (False, "skip 2 @0 all_reduce#17")]
    ranks, found = launch.run(recorded, plans, ranks=RANKS, checked=False), []
    for number in range(len(plans)):
        difference = detect.first_difference({rank: seen[number][1] for rank, seen in enumerate(ranks)})
        found.append(difference and (difference.rank, difference.seq - ranks[0][number][0]))
    assert found == [*wanted, None, (2, 23)], (found, wanted)
    assert all(seen[-1][2] == 64 for seen in ranks), "a ring of 64 calls"


def lossy(plan: str, path) -> list:
    world = collectives.world()
    rank, threads = world.rank(), []
    collectives.log_to(path / str(rank))
    with Chaos(Plan.parse(plan), None, rank) as chaos:
        chaos.begin_step(0)
        for i in range(6):
            for peer in sorted({0, 1, 2, 3} - {rank}):
                handles = [
                    collectives.receive(torch.ones(3), peer, world, async_op=True),
                    collectives.send(torch.ones(3), peer, world, async_op=True),
                ]
                threads += [threading.Thread(target=handle.wait, daemon=True) for handle in handles]
        for thread in threads:
            thread.start()
        deadline, alive = time.monotonic() + 20, lambda: sum(thread.is_alive() for thread in threads)
        while alive() > plan.count(f">{rank}#") and time.monotonic() < deadline:
            time.sleep(0.02)
    return collectives.read_log(path / str(rank))


def test_a_message_that_was_lost_is_named(tmp_path):
    plan, lost = [], []
    for seed in range(3):
        rank, dice = draw(seed)
        peer = dice.choice([r for r in range(RANKS) if r != rank])
        plan.append(f"drop {rank} @0 send>{peer}#{3 * seed + sorted({0, 1, 2, 3} - {rank}).index(peer)}")
        lost.append((rank, peer, seed))
    logs = dict(enumerate(launch.run(lossy, "; ".join(plan), tmp_path, ranks=RANKS, checked=False)))
    assert detect.lost_messages(logs) == sorted(lost)
