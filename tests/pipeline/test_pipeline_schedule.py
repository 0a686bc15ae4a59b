"""Schedules as lists: refusals, no circular waits, formulas of GPipe, 1F1B, interleaving, breadth-first."""

import random
import re
import subprocess
import sys
from collections import Counter
from fractions import Fraction
from functools import cache
from itertools import groupby

import pytest
import torch
from torch import nn

from minitrain import collectives, launch
from minitrain.compose.parallelize import parallelize
from minitrain.course.saved_tensors import SavedTensors
from minitrain.data_parallel import states
from minitrain.model.training.optim import AdamW
from minitrain.model.training.step import Batch, NoReducer
from minitrain.pipeline.lower import EARLY, Receive, Reduce, Send, Sent, lower
from minitrain.pipeline.runtime import Runner
from minitrain.pipeline.schedule import Action, B, F, Pair, Schedule, check, parts, peak
from minitrain.pipeline.schedules.less_memory import recomputed
from minitrain.pipeline.schedules.one_direction import (
    breadth_first,
    gpipe,
    interleaved,
    one_f_one_b,
    terapipe,
)
from minitrain.pipeline.simulate import Costs, Measured, simulate
from minitrain.plan.simulate.machines import Device, Link, Machine
from minitrain.plan.strategy import Strategy
from minitrain.ranks.ledger import Ledger
from minitrain.systems.plan.stage_cuts import GraphSchedule
from minitrain.systems.simulate.replay import replay
from tests import parallel
from tests.pipeline.lists import GRID, everything, folded, peaks, refuse, split
from tests.ranks.nccl_order import play, step_of

TWICE = Costs(F=1, B=2)


# ---- nobody gets stuck -----------------------------------------------------------------------------------


def test_every_schedule_passes_and_ends():
    for schedule in everything():
        assert check(schedule) is schedule
        run = simulate(schedule, Costs(F=6, I=6, W=3, send=1))
        assert run.makespan >= max(run.busy(rank) for rank in range(len(schedule.ranks)))


def test_a_graph_of_stages_is_not_lowered():
    branches = GraphSchedule("two branches", ((F(0, 0), B(0, 0)), (F(1, 0), B(1, 0))), 2, 1, edges=())
    with pytest.raises(ValueError, match="its stages branch, and programs are made for chains"):
        lower(branches)


def used_by(what, schedule):
    kind, stage, unit = what
    users = {"F": F(stage + 1, unit), "E": Action("H", stage, unit), "G": Action("L", stage, unit)}
    return users.get(kind) or (schedule.backward(stage - 1, unit) if kind in "BI" else None)


def test_links_agree_and_nothing_is_lost():
    for schedule in everything():
        programs, sent, received = lower(schedule), Counter(), Counter()
        for rank, program in enumerate(programs):
            at = {}
            for i, step in enumerate(program):
                if isinstance(step, Sent):
                    assert at[Send, step.what] < i
                elif isinstance(step, (Send, Receive)):
                    at[type(step), step.what] = i
                elif not isinstance(step, Reduce):
                    at |= {action: i for action in parts([step])}
            for (kind, what), i in [item for item in at.items() if isinstance(item[0][0], type)]:
                if kind is Send:
                    assert at[what] < i
                    sent[what] += 1
                else:
                    user = used_by(what, schedule)
                    assert i < at[user], f"{schedule.name}, rank {rank}: {what} is posted behind {user}"
                    received[what] += 1
            for other in range(len(programs)):
                assert [step.what for step in program if isinstance(step, Send) and step.to == other] == [
                    step.what for step in programs[other] if isinstance(step, Receive) and step.source == rank
                ]
            reduced = [step.stage for step in program if isinstance(step, Reduce)]
            assert sorted(reduced) == schedule.stages_of(rank)
        crossing = Counter(
            what
            for what, rank in schedule.place.items()
            if (user := used_by(what, schedule)) in schedule.place and schedule.place[user] != rank
        )
        assert sent == received == crossing


def test_a_sent_tensor_is_freed_as_soon_as_an_answer_says_that_it_has_arrived():
    """Right behind the first entry with an input that was made from it, or after it, where it went."""
    computed = [[s for s in program if isinstance(s, (Action, Sent))] for program in lower(one_f_one_b(2, 3))]
    first, last = ([f"{s.what} sent" if isinstance(s, Sent) else str(s) for s in steps] for steps in computed)
    assert first == ["F0.0", "F0.1", "B0.0", "F0.0 sent", "F0.2", "B0.1", "F0.1 sent", "B0.2", "F0.2 sent"]
    assert last == ["F1.0", "B1.0", "F1.1", "B1.1", "F1.2", "B1.0 sent", "B1.2"]


def test_a_receive_is_posted_two_entries_early_for_the_room_of_two_tensors():
    for schedule in (gpipe(4, 8), one_f_one_b(4, 8)):
        for entries, program in zip(schedule.ranks, lower(schedule)):
            posted, begun, ahead = {}, 0, 0
            for step in program:
                if isinstance(step, Receive):
                    posted[used_by(step.what, schedule)] = begun
                elif isinstance(step, Action):
                    if step in posted:
                        assert posted.pop(step) == max(begun - EARLY, 0)
                    ahead, begun = max(ahead, len(posted)), begun + 1
            assert begun == len(entries) and ahead <= EARLY == 2 and not posted


def circular(schedule: Schedule) -> bool:
    """Another way to see a deadlock: actions are taken off a graph while one has nothing before it."""
    before = {action: set(schedule.needs[action]) for entries in schedule.ranks for action in entries}
    for entries in schedule.ranks:
        for first, second in zip(entries, entries[1:]):
            before[second].add(first)
    while free := {action for action, waits_for in before.items() if not waits_for}:
        before = {action: waits_for - free for action, waits_for in before.items() if action not in free}
    return bool(before)


def test_random_deadlocks_are_found():
    draw, stuck = random.Random(7), 0
    for _ in range(300):
        p, m = draw.randint(1, 3), draw.randint(1, 3)
        make = draw.choice([gpipe, one_f_one_b, lambda p, m: split(one_f_one_b(p, m))])
        ranks = [list(entries) for entries in make(p, m).ranks]
        for _ in range(draw.randint(1, 4)):
            entries = draw.choice(ranks)
            i, j = draw.randrange(len(entries)), draw.randrange(len(entries))
            entries[i], entries[j] = entries[j], entries[i]
        schedule = Schedule("shuffled", tuple(map(tuple, ranks)), p, m)
        if circular(schedule):
            stuck += 1
            for what in (check, simulate, lower):
                with pytest.raises(ValueError, match="shuffled is stuck: rank"):
                    what(schedule)
        else:
            assert not play(step_of(schedule), lazy=True)
    assert 50 < stuck < 250


# ---- what is refused

STUCK = "is stuck: "
REFUSED = {  # the lists of ranks, microbatches (or slices: two of each)
    "F0.1 is missing": ("F0.0 B0.0 B0.1", 2),
    "B0.0 is missing": ("F0.0", 1),
    "W0.0 is missing": ("F0.0 I0.0", 1),
    "I0.0 is missing": ("F0.0 W0.0", 1),
    "F1.0 is missing": ("F0.0 B0.0 |", 1),
    r"F0.0 stands 2 times \(rank 0\)": ("F0.0 F0.0 B0.0", 1),
    "W0.0 stands 2 times": ("F0.0 I0.0 W0.0 W0.0", 1),
    "X0.0 is no action of 1 stages and 1 microbatches; the kinds are F, B, I, W, R": ("F0.0 B0.0 X0.0", 1),
    "F1.0 is no action": ("F0.0 B0.0 F1.0", 1),
    "F0.-1 is no action": ("F0.0 B0.0 F0.-1", 1),
    "F0.1 is no action": ("F0.0 B0.0 F0.1", 1),
    "B0.0 stands beside I0.0; B is I and W together": ("F0.0 B0.0 I0.0 W0.0", 1),
    "B0.0 stands beside W0.0": ("F0.0 B0.0 W0.0", 1),
    r"stage 0, microbatch 0 stands on ranks \[0, 1\]": ("F0.0 | B0.0 F1.0 B1.0", 1),
    r"microbatch 0 stands on ranks \[0, 1\]; what a forward keeps": ("F0.0 I0.0 | W0.0 F1.0 B1.0", 1),
    STUCK + "rank 0 at B0.0 waits for F0.0; move an action": ("B0.0 F0.0", 1),
    STUCK + "rank 0 at W0.0 waits for I0.0": ("F0.0 W0.0 I0.0", 1),
    STUCK + "rank 0 at B0.0 waits for R0.0": ("F0.0 B0.0 R0.0", 1),
    STUCK + "rank 0 at B0.0 waits for B1.0, rank 1 at F1.1 waits for F0.1": (
        "F0.0 B0.0 F0.1 B0.1 | F1.0 F1.1 B1.0 B1.1",
        2,
    ),
    STUCK + "rank 0 at F0.1 waits for F0.0": ("F0.1 F0.0 B0.1 B0.0", "slices"),
    STUCK + "rank 0 at B0.0 waits for B0.1": ("F0.0 F0.1 B0.0 B0.1", "slices"),
    STUCK + "rank 0 at B0.1 waits for F0.1, rank 1 at B1.1 waits for F1.1; move": (
        "F0.0 B0.0 B0.1 F0.1 | F1.0 B1.0 B1.1 F1.1",
        2,
    ),
    r"\(B0.0 F0.1\) is no pair": ("F0.0 (B0.0 F0.1) B0.1", 2),
    r"\(F0.0 B0.0\) is no pair": ("(F0.0 B0.0)", 1),
    "3 units are not a multiple of slices=2": ("F0.0 F0.1 F0.2 B0.2 B0.1 B0.0", "3 slices"),
}


def listed(text: str, slices: int, units: int) -> Schedule:
    """From "F0.0 (F0.1 B0.0) | ...", a rank and a stage between bars."""

    def action(word):
        return Action(word[0], *map(int, word[1:].split(".")))

    def entries(rank):
        for pair, word in re.findall(r"\((.*?)\)|(\S+)", rank):
            yield Pair(*map(action, pair.split())) if pair else action(word)

    ranks = text.split("|")
    return Schedule("", map(entries, ranks), len(ranks), units, slices)


@pytest.mark.parametrize("message", REFUSED)
def test_bad_schedules_are_refused(message):
    text, units = REFUSED[message]
    slices = 2 if "slices" in str(units) else 1
    units = {"slices": 2, "3 slices": 3}.get(units, units)
    with pytest.raises(ValueError, match=message):
        check(listed(text, slices, units))


def test_bad_sizes_and_costs_are_refused():
    refuse(
        {
            "m=6 microbatches are not a multiple of p=4 ranks; use 8": lambda: interleaved(4, 6, 2),
            "F=-1; a time is 0 or more": lambda: Costs(F=-1),
            "W=nan": lambda: Costs(W=float("nan")),
        }
    )


def test_longer_actions_never_end_earlier():
    draw = random.Random(3)
    for _ in range(60):
        more = interleaved(4, 8, 2), folded(3, 4), terapipe(3, 2, 2), split(interleaved(2, 4, 2))
        schedule = draw.choice([*everything()[:12], *more])
        times = {kind: draw.randint(0, 6) for kind in ("F", "I", "W", "R", "send")}
        longer = times | {(kind := draw.choice(list(times))): times[kind] + draw.randint(1, 3)}
        stages = {draw.randrange(schedule.stages): 2}
        before, after, uneven = (
            simulate(schedule, costs)
            for costs in (Costs(**times), Costs(**longer), Costs(**times, stage=stages))
        )
        assert before.makespan <= after.makespan and before.makespan <= uneven.makespan
        for was, now in zip(before.spans, after.spans):
            assert all(ours.start <= theirs.start for ours, theirs in zip(was, now))


def test_what_moves_takes_its_own_time():
    """There and back, from rank to rank; by default as long as a message. With `Costs` as with `Measured`."""
    lent = Schedule("lent", ((F(0, 0), ("E", 0, 0), ("L", 0, 0), B(0, 0)), (("H", 0, 0), ("G", 0, 0))), 1, 1)
    times = {action: {"F": 1, "B": 2}.get(action.kind) for action in lent.place}
    for move, makespan in ((None, 1 + 2 * 5 + 2), (3, 1 + 2 * 3 + 2), (0, 3)):
        for costs in Costs(F=1, B=2, send=5, move=move), Measured(times, send=5, move=move):
            assert simulate(lent, costs).makespan == makespan
    other = Schedule("sent", ((F(0, 0), B(0, 0)), (F(1, 0), B(1, 0))), 2, 1)
    assert simulate(other, Costs(F=1, B=2, send=5, move=3)).makespan == 1 + 5 + 3 + 5 + 2


def test_a_pair_takes_the_mean_of_its_stages_factors():
    pair = Pair(F(0, 1), B(1, 0))
    assert Costs(F=1, B=2).of(pair) == 3 and Costs(F=1, B=2, FB=4).of(pair) == 4
    assert Costs(F=1, B=2, stage={0: 3}).of(pair) == 3 + 2
    assert Costs(FB=4, stage={0: 3}).of(pair) == Costs(FB=4, stage={1: 3}).of(pair) == 8
    assert Costs(FB=4, stage={0: 3, 1: 5}).of(pair) == 16 and Costs(FB=4, stage={2: 3}).of(pair) == 4
    odd = Costs(FB=3, stage={0: 2}).of(pair)
    assert odd == Fraction(9, 2) and isinstance(odd, Fraction)  # exact, as all times


# ---- the systems -----------------------------------------------------------------------------------------


DEEP = parallel.Problem(config=parallel.small(num_layers=2), batch_sizes=(8, 7), microbatches=4)


@cache
def reference():
    return parallel.one_process(DEEP)


def trained_alike(schedule: Schedule) -> float:
    """How far training on two real ranks is from one process."""
    return parallel.pipeline_difference(DEEP, dict(dp=1, pp=2), schedule, reference())


def test_gpipe():
    for p, m in GRID:
        schedule = gpipe(p, m)
        for costs in (TWICE, Costs(F=3, B=5)):
            assert simulate(schedule, costs).makespan == (m + p - 1) * (costs.F + costs.B)
        assert peaks(schedule) == [m] * p
    assert simulate(gpipe(4, 8), TWICE).makespan == 33
    again = recomputed(gpipe(4, 8))
    assert simulate(again, TWICE).makespan == 11 * (1 + 1 + 2) - 3  # an R waits for no other rank
    assert peaks(again) == [1] * 4 and trained_alike(recomputed(gpipe(2, 4))) < parallel.TOLERANCE
    assert trained_alike(gpipe(2, 4)) < parallel.TOLERANCE


def test_one_f_one_b():
    for p, m in GRID:
        schedule = one_f_one_b(p, m)
        for costs in (TWICE, Costs(F=3, B=5)):
            assert simulate(schedule, costs).makespan == simulate(gpipe(p, m), costs).makespan
        assert peaks(schedule) == [min(m, p - s) for s in range(p)]
    assert simulate(one_f_one_b(4, 8), TWICE).makespan == 33
    assert trained_alike(one_f_one_b(2, 4)) < parallel.TOLERANCE


def test_dapple():
    """K_i forwards first, then strictly a backward and a forward in turn: the lists of 1F1B."""

    def early_backward(p, m):
        for i in range(p):
            K = min(p - i, m)
            turns = [[B(i, j), F(i, j + K)][: 1 + (j + K < m)] for j in range(m)]
            yield tuple([F(i, j) for j in range(K)] + sum(turns, []))

    for p, m in GRID:
        assert tuple(early_backward(p, m)) == one_f_one_b(p, m).ranks
    assert peaks(one_f_one_b(8, 16)) == peaks(one_f_one_b(8, 64)) == [8, 7, 6, 5, 4, 3, 2, 1]
    # on ranks: microbatches that autograd keeps at most, and in the end
    few_and_many = launch.run(lambda: [kept_at_most(one_f_one_b(2, m)) for m in (3, 9)], ranks=2)
    assert few_and_many == [[(2, 0)] * 2, [(1, 0)] * 2]


def messages(schedule: Schedule) -> int:
    return sum(isinstance(step, Send) for program in lower(schedule) for step in program)


def test_forwards_ahead_of_1f1b_and_room_of_interleaving():
    for extra, makespan, counts in ((-1, 54, [3, 2, 1, 1]), (0, 33, [4, 3, 2, 1]), (2, 33, [6, 5, 4, 3])):
        schedule = check(one_f_one_b(4, 8, extra))
        assert (simulate(schedule, TWICE).makespan, peaks(schedule)) == (makespan, counts)
    close, wide = (check(interleaved(4, 16, 2, room)) for room in (1, 2))
    for send, times in ((0, (52.5, 52.5)), (Fraction(1, 4), (66, 56))):
        costs = Costs(F=Fraction(1, 2), B=1, send=send)
        assert tuple(simulate(schedule, costs).makespan for schedule in (close, wide)) == times
    assert wide.ranks == interleaved(4, 16, 2).ranks and one_f_one_b(4, 8, 0) == one_f_one_b(4, 8)


def test_interleaved():
    for p, m, v in [(2, 4, 2), (4, 8, 2), (4, 8, 4), (3, 9, 3), (8, 16, 2), (8, 64, 4)]:
        schedule = interleaved(p, m, v)
        for times in (1, 2), (3, 5):
            run = simulate(schedule, Costs(F=Fraction(times[0], v), B=Fraction(times[1], v)))
            assert run.overhead == Fraction(p - 1, v * m)
            assert run.makespan == (m + Fraction(p - 1, v)) * sum(times)
        assert Fraction(peak(schedule, 0), v) == p * (1 + Fraction(p - 1, p * v))
        assert peaks(schedule) == [2 * (p - rank - 1) + (v - 1) * p + 1 for rank in range(p)]
        # between ranks: p-1 boundaries of 1F1B, and from the last rank round to the first as well
        assert messages(schedule) == 2 * m * (p * v - 1) and messages(one_f_one_b(p, m)) == 2 * m * (p - 1)
    assert trained_alike(interleaved(2, 4, 2)) < parallel.TOLERANCE


def sharded_step(schedule: Schedule):
    """ZeRO-3 on dp=2 beside a pipeline of two ranks: how often parameters are gathered and gradients scattered,
    the share of the largest stage that was ever whole and the bytes that are in the end, what was trained."""
    strategy = Strategy(dp=2, pp=2, zero=3, microbatches=4, precision="float64")
    settings = dict(seed=3, frozen=[SHARDED.frozen], schedule=schedule)
    run = parallelize(SHARDED.config, strategy, lambda params: AdamW(params, lr=SHARDED.lr), **settings)
    whole, parts_of = [], [{run.sync.flat_of[p] for p in s.parameters()} for s in run.runner.stages.values()]
    largest = max(8 * sum(flat.numel for flat in flats) for flats in parts_of)
    for flat in run.sync.shards:
        flat._resize = lambda numel, resize=flat._resize: (
            resize(numel),
            whole.append(sum(one.whole.untyped_storage().nbytes() for one in run.sync.shards)),
        )
    every, trained = (
        4 * sum(flat.numel for flat in run.sync.shards if flat.shard.requires_grad or frozen)
        for frozen in (True, False)
    )
    batch = run.batch(parallel.rows_of_problem(SHARDED, 0), 0)
    with parallel.Traffic() as ledger:
        losses = [run.total(run.step(batch, SHARDED.clip).loss).item()]
    counts = [ledger.sent_bytes("all_gather", axis="dp") / every]
    counts += [ledger.sent_bytes("reduce_scatter", axis="dp") / trained]
    held = max(whole) / largest, whole[-1]
    return counts, held, parallel.Outcome(losses, states.full_grads(run.sync), states.full_tensors(run.sync))


SHARDED = parallel.Problem(config=parallel.small(num_layers=10), batch_sizes=(11,), microbatches=4)


def runs(schedule: Schedule, rank: int) -> Counter:
    """How often each stage's weights are gathered for a pass, if only one stage's are held at a time."""
    return Counter(stage for (_, stage), _ in groupby(schedule.ranks[rank], key=lambda action: action[:2]))


def test_breadth_first():
    """Sharded weights are gathered twice a step and gradients scattered once, by the ledger on 4 real ranks;
    depth-first gathers 2m times and scatters m times. Both train like one process."""
    for p, m, v in [(2, 4, 2), (4, 8, 2), (4, 8, 4), (3, 9, 3), (8, 64, 4)]:
        wide, deep = breadth_first(p, m, v), interleaved(p, m, v)
        run = simulate(wide, Costs(F=Fraction(1, v), B=Fraction(2, v)))
        assert run.overhead == Fraction(p - 1, v * m) and peaks(wide) == [m * v] * p
        assert wide.breadth_first and not deep.breadth_first and not gpipe(p, m).breadth_first
        assert all(runs(wide, rank) == dict.fromkeys(wide.stages_of(rank), 2) for rank in range(p))
        for rank in range(p):
            ahead = min(2 * (p - rank - 1) + (v - 1) * p, m * v)
            # the runs of p ahead and at the end; between them no two neighbours alike: 2m a stage less those
            assert runs(deep, rank).total() == 2 * (m * v - ahead) + 2 * -(-ahead // p) - 2 * bool(ahead % p)
    for m in 8, 64, 512:
        assert runs(interleaved(4, m, 2), 3).total() == 2 * (2 * m - 3)

    schedules, reference = (breadth_first(2, 4, 2), interleaved(2, 4, 2)), parallel.one_process(SHARDED)
    measured = launch.run(lambda: [sharded_step(schedule) for schedule in schedules], ranks=4)
    for schedule, outcomes in zip(schedules, zip(*measured)):
        m = 1 if schedule.breadth_first else 4
        for counts, (share, left), _ in outcomes:
            assert counts == [2 * m, m] and left == 0
            assert share == 1 if m == 1 else share < 1  # a stage, or two units of it
        found = parallel.together(outcome for *_, outcome in outcomes)
        assert parallel.difference(found, reference) < parallel.TOLERANCE


class Clock(nn.Module):
    """A stage without arithmetic: the time at which it was ready travels, and the rank's clock moves on."""

    def __init__(self, now: list[int], forward: int, backward: int):
        super().__init__()
        self.now, self.times = now, (forward, backward)
        self.weight = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, x, positions):
        x = x.unsqueeze(-1).double() * 0 if not x.is_floating_point() else x
        return Tick.apply(x, self.weight, self)

    def work(self, arrived: torch.Tensor, time: int) -> torch.Tensor:
        self.now[0] = max(self.now[0], round(arrived.max().item())) + time
        return torch.full_like(arrived, self.now[0])


class Tick(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, stage):
        ctx.stage = stage
        return stage.work(x, stage.times[0])

    @staticmethod
    def backward(ctx, dy):
        return ctx.stage.work(dy, ctx.stage.times[1]), None, None


def clocks(schedule: Schedule) -> list[int]:
    group, now = collectives.world(), [0]
    stages = {stage: Clock(now, 1, 2) for stage in schedule.stages_of(group.rank())}
    run = Runner(stages, schedule, group, lambda y, targets: (y * 0).sum(), NoReducer(), width=1)
    run(zeros(schedule))
    return now[0]


def zeros(schedule: Schedule) -> Batch:
    rows = torch.zeros(schedule.microbatches, 2)
    return Batch(rows.long(), rows, torch.tensor(1.0))


class Work(nn.Module):
    """A product, forward 2·n·k² FLOPs and backward twice as many: the first stage's start is learnt."""

    def __init__(self, k: int = 16):
        super().__init__()
        self.linear, self.start = nn.Linear(k, k, bias=False), nn.Parameter(torch.zeros(k))

    def forward(self, x, positions):
        return self.linear(x if x.is_floating_point() else self.start.expand(*x.shape, -1) * 1.0)


def events_of_work(schedule: Schedule) -> list:
    """What this rank computes and sends in one step of equal stages, by the ledger."""
    group = collectives.world()
    stages, loss_fn = {stage: Work() for stage in schedule.stages_of(group.rank())}, lambda y, _: y.sum()
    run = Runner(stages, schedule, group, loss_fn, NoReducer(), width=16)
    with Ledger() as ledger:
        run(zeros(schedule))
    return ledger.events


def test_pipeline_bubble():
    """From the lists; from a run on four ranks in which every message carries the time it left; and from the
    products that four ranks computed, replayed at one rate over links that take no time."""
    for p, m in GRID:
        for schedule in gpipe(p, m), one_f_one_b(p, m):
            run = simulate(schedule, TWICE)
            assert (run.bubble, run.overhead) == (Fraction(p - 1, m + p - 1), Fraction(p - 1, m))
    assert simulate(one_f_one_b(8, 4224 // 24)).bubble == Fraction(7, 183)  # GLM-130B
    shares = [simulate(one_f_one_b(35, m)).bubble for m in (1920 // 8, 1920 // 10, 1920 // 12)]
    assert [round(float(100 * share), 1) for share in shares] == [12.4, 15.0, 17.5]  # MT-NLG
    schedules = gpipe(4, 8), one_f_one_b(4, 8)
    on_rank = lambda: (tuple(map(clocks, schedules)), list(map(events_of_work, schedules)))
    ended, events = zip(*launch.run(on_rank, ranks=4))
    assert ended[0] == (33, 33)
    for rank in range(4):
        assert ended[rank] == tuple(simulate(schedule, TWICE).spans[rank][-1].end for schedule in schedules)
    free, rate = Link("free", 0.0, 1e30, "none"), 2 * 2 * 16 * 16  # a forward takes one second
    machine = Machine("equal", Device("", {"float32": rate}, 1e12, 1e30, "none"), 4, free, free, 1)
    for of_ranks in zip(*events):
        timeline = replay(dict(enumerate(of_ranks)), machine)
        assert timeline.step_s == pytest.approx(33, rel=1e-12)
        for account in timeline.accounts.values():
            assert account.compute_s == pytest.approx(24, rel=1e-12)  # bubble 3/11, overhead 3/8


class Meter:
    """What autograd keeps now and kept at most: each tensor is held by a slip that dies with the graph."""

    def __init__(self, parameters):
        self.live, self.peak = 0, 0
        self.skip = {parameter.untyped_storage().data_ptr() for parameter in parameters}

    def keep(self, tensor):
        return tensor if tensor.untyped_storage().data_ptr() in self.skip else Slip(self, tensor)


class Slip:
    def __init__(self, meter: Meter, tensor: torch.Tensor):
        self.meter, self.tensor = meter, tensor
        meter.live += tensor.nbytes
        meter.peak = max(meter.peak, meter.live)

    def __del__(self):
        self.meter.live -= self.tensor.nbytes


class Layer(nn.Module):
    """Keeps its input, for the product, and its output, for the tanh."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)

    def forward(self, x, positions):
        return torch.tanh(self.linear(x if x.is_floating_point() else torch.zeros(*x.shape, 4)))


def kept_at_most(schedule: Schedule) -> tuple[float, int]:
    group = collectives.world()
    stage = Layer()
    with SavedTensors(stage) as saved:
        y = stage(torch.zeros(1, 2, dtype=torch.int64) if group.rank() == 0 else torch.zeros(1, 2, 4), None)
        if group.rank() == group.size() - 1:
            y.sum() / torch.tensor(1.0)  # the loss keeps its divisor
    meter = Meter(stage.parameters())
    run = Runner({group.rank(): stage}, schedule, group, lambda y, targets: y.sum(), NoReducer(), width=4)
    unpack = lambda slip: slip.tensor if isinstance(slip, Slip) else slip
    with torch.autograd.graph.saved_tensors_hooks(meter.keep, unpack):
        run(zeros(schedule))
    return meter.peak / saved.bytes, meter.live


def test_memory_imbalance():
    """In units of what one microbatch keeps, by the saved-tensor meter on four ranks: 4, 3, 2, 1 for 1F1B, 8
    on each for GPipe. On the last rank a microbatch keeps its loss too."""
    schedules = one_f_one_b(4, 8), gpipe(4, 8), one_f_one_b(4, 2)
    measured = launch.run(lambda: [kept_at_most(schedule) for schedule in schedules], ranks=4)
    for schedule, outcome in zip(schedules, zip(*measured)):
        assert [high for high, _ in outcome] == peaks(schedule)
        assert [left for _, left in outcome] == [0] * 4
    assert peaks(schedules[0]) == [4, 3, 2, 1]
    assert peaks(schedules[2]) == [min(2, 4 - s) for s in range(4)] == [2, 2, 2, 1]


def test_schedules_by_name_need_no_torch():
    """Lists are for planners too: torch is loaded by what runs them, and by nothing that a strategy names."""
    code = (
        "import sys; from minitrain.plan.strategy import Strategy; from minitrain.pipeline.schedules_by_name import NAMES; "
        "made = [Strategy(pp=2, schedule=name, microbatches=4) for name in NAMES]; print('bpipe' in NAMES, 'torch' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said == "True False\n"
