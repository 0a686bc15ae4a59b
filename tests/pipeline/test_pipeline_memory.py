"""Pipelines that save memory: recomputation in time, a partner's memory, a loss over all microbatches."""

import random
from collections import Counter
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from itertools import accumulate

import pytest
import torch
from torch import nn

from minitrain import collectives, launch
from minitrain.compose.parallelize import parallelize
from minitrain.model.training.optim import AdamW
from minitrain.model.training.step import Batch, NoReducer
from minitrain.pipeline import runtime
from minitrain.pipeline.lower import Receive, Sent, lower
from minitrain.pipeline.runtime import Around, Runner
from minitrain.pipeline.schedule import Action, B, F, R, Schedule, check
from minitrain.pipeline.schedules.less_memory import bpipe, jitter, recomputed, varuna
from minitrain.pipeline.schedules.one_direction import gpipe, one_f_one_b
from minitrain.pipeline.simulate import Costs, simulate
from minitrain.plan.strategy import Strategy
from minitrain.ranks.events import Compute, Issue, Wait
from minitrain.ranks.launch import dryrun
from minitrain.ranks.ledger import Ledger
from minitrain.systems.pipeline import contrastive
from minitrain.systems.pipeline.bpipe_eviction import Balanced
from tests.parallel import (
    TOLERANCE,
    Problem,
    Traffic,
    one_process,
    pipeline_difference,
    rows_of_problem,
    small,
    train_pipeline,
)
from tests.pipeline.lists import peaks, said_by
from tests.ranks.launch.test_dryrun import everything

PROBLEM = Problem(config=small(num_layers=4), batch_sizes=(6, 5), microbatches=4)
GRID = [(p, m) for p in (1, 2, 3, 4, 8) for m in (1, 2, 4, 7, 16)] + [(16, 16), (4, 64)]


@cache
def reference():
    return one_process(PROBLEM)


def on_rank(schedule, problem=PROBLEM):
    """(this rank's run, a batch): what parallelize makes of a model over the schedule's ranks."""
    strategy = Strategy(pp=len(schedule.ranks), microbatches=schedule.microbatches, precision="float64")
    make_optimizer = lambda params: AdamW(params, lr=problem.lr)
    run = parallelize(problem.config, strategy, make_optimizer, seed=3, schedule=schedule)
    return run, run.batch(rows_of_problem(problem, 0), 0)


# ---- Varuna ----------------------------------------------------------------------------------------------


def test_varuna():
    """The atlas's row: never longer than GPipe with recomputation, deviations pay when links are uneven, and
    the strict order trains like one process."""
    for p, m in GRID:
        for costs in (Costs(F=1, R=1, B=2), Costs(F=2, R=2, B=3), Costs(F=1, R=1, B=2, send=1)):
            ours, theirs = varuna(p, m, costs), recomputed(gpipe(p, m))
            assert not any(action.kind == "R" for action in ours.ranks[-1])
            saved = simulate(theirs, costs).makespan - simulate(ours, costs).makespan
            assert saved >= 0 and (p == 1 or costs != Costs(F=1, R=1, B=2) or saved == 1 + (m - 1) % 3)
    costs, schedule, strict, opportunistic = Costs(F=2, R=2, B=4), varuna(4, 8), 0, 0
    for seed in range(20):
        for late in (1, 8):
            strict += jitter(schedule, costs, uneven(seed, late), opportunistic=False)
            opportunistic += jitter(schedule, costs, uneven(seed, late), opportunistic=True)
    assert opportunistic < strict
    assert pipeline_difference(PROBLEM, dict(dp=1, pp=4), varuna(4, 4), reference()) < TOLERANCE


def uneven(seed, late):
    draw = random.Random(seed)
    return lambda action: draw.randint(0, 2 * late)


def test_jitter_of_nothing_is_the_simulation():
    for schedule in (varuna(4, 6), recomputed(gpipe(3, 4)), one_f_one_b(4, 6)):
        for send in (0, 3):
            found = jitter(schedule, Costs(B=2), lambda action: send, opportunistic=False)
            assert found == simulate(schedule, Costs(B=2, send=send)).makespan


def test_recomputation_holds_one_microbatch():
    for schedule in (varuna(4, 8), recomputed(gpipe(4, 8)), recomputed(one_f_one_b(4, 8))):
        assert peaks(check(schedule)) == [1] * 4
    again = recomputed(gpipe(4, 8))
    assert R(2, 3) in again.place and again.ranks[0][8:10] == (R(0, 0), B(0, 0))


def saved_by_action(schedule):
    """{action: bytes that autograd saved in it}, and for each F what the interpreter holds afterwards."""
    run, batch = on_rank(schedule)
    saved, held = {}, {}

    @contextmanager
    def watch(name):
        saved[name] = 0

        def pack(x):
            saved[name] += x.nbytes
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            yield
        if name[0] == "F":
            left = run.runner.in_flight[tuple(map(int, name[1:].split(".")))]
            held[name] = left.x.nbytes, left.output is None

    run.runner.hooks.append(Around(watch))
    run.forward_backward(batch)
    return saved, held


def test_between_forward_and_recomputation_only_the_input_is_held():
    first, last = launch.run(saved_by_action, varuna(2, 4), ranks=2)
    for unit, rows in enumerate((2, 2, 1, 1)):
        saved, held = first
        assert saved[f"F0.{unit}"] == 0 < saved[f"R0.{unit}"]
        assert held[f"F0.{unit}"] == (rows * 8 * 8, True)  # int64 tokens
        saved, held = last
        assert saved[f"F1.{unit}"] > 0 and held[f"F1.{unit}"] == (rows * 8 * 16 * 8, False)


def without_one_recomputation():
    right = Runner.forward_again
    Runner.forward_again = lambda self, action: right(self, action) if action.microbatch != 2 else None
    return train_pipeline(PROBLEM, dict(dp=1, pp=2), varuna(2, 4))


def test_control_recomputation_is_needed():
    outcome = launch.run(without_one_recomputation, ranks=2)[0]
    assert max((outcome.grads[name] - reference().grads[name]).abs().max() for name in outcome.grads) > 1e-6


# ---- random numbers of what is computed again ------------------------------------------------------------


class Dropped(nn.Module):
    """Half of x·w, doubled: through other masks than the forward's the gradient of w is not the loss."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x, positions):
        return torch.dropout(x * self.w, 0.5, True)


def drawn_by(entries):
    """(loss, gradient, what is drawn next) of a rank alone that sums what is left of ones."""
    units, stage = max(action.microbatch for action in entries) + 1, Dropped()
    schedule, loss_fn = Schedule("one rank", (entries,), 1, units), lambda y, targets: y.sum()
    run = Runner({0: stage}, schedule, collectives.world(), loss_fn, NoReducer(), width=1)
    ones = torch.ones(units, 30, dtype=torch.float64)
    torch.manual_seed(0)
    loss = run(Batch(ones, ones, torch.ones(())))
    return loss.item(), stage.w.grad.item(), torch.rand(3).tolist()


def test_recomputation_draws_the_same_masks():
    """And what follows draws as if nothing had been computed again."""
    plain = F(0, 0), F(0, 1), B(0, 0), F(0, 2), B(0, 1), B(0, 2)
    again = F(0, 0), F(0, 1), R(0, 0), B(0, 0), F(0, 2), R(0, 1), B(0, 1), R(0, 2), B(0, 2)

    def without():
        runtime.drawing_from = lambda state, device: nullcontext()
        return drawn_by(again)

    expected, found, control = launch.run(lambda: [drawn_by(plain), drawn_by(again), without()], ranks=1)[0]
    assert expected == found and expected[0] == expected[1]
    assert control[0] != control[1] and control[2] != expected[2]


# ---- BPipe -----------------------------------------------------------------------------------------------


def test_bpipe():
    """The atlas's row: at most ceil((p+2)/2) on every rank, no slow-down, the same training as they move."""
    assert peaks(bpipe(8, 16)) == [5, 5, 5, 5, 4, 5, 5, 5]
    for p in (*range(1, 10), 16):
        for m in (1, p // 2 + 1, p, p + 1, 2 * p + 3, 32):
            schedule, plain = bpipe(p, m), one_f_one_b(p, m)
            assert max(peaks(schedule)) <= (p + 3) // 2  # ceil((p+2)/2)
            if p % 2 == 0 and m >= p:
                assert peaks(schedule).count((p + 2) // 2) >= p // 2
            step = simulate(plain, Costs(F=1, B=2)).makespan
            assert all(simulate(schedule, Costs(F=1, B=2, move=move)).makespan == step for move in (0, 1))
    assert pipeline_difference(MANY, dict(dp=1, pp=4), bpipe(4, 6), one_process(MANY)) < TOLERANCE


MANY = Problem(config=small(num_layers=4), batch_sizes=(6, 11), microbatches=6)


def held_at_most(schedule, interpreter):
    """Bytes for backwards that this rank held at most, after any step of its program, and after its first F;
    and the most activations alive after an action; sent."""
    run, batch = on_rank(schedule, MANY)
    runner, held, alive = run.runner, [], []
    if type(runner) is not interpreter:
        runner.__class__, runner.lent, runner.told = interpreter, {}, set()
    do = runner.do

    def watched(step):
        do(step)
        if interpreter is Balanced:
            held.append(runner.activation_bytes)
            first.append(held[-1]) if isinstance(step, Action) and step.kind == "F" else None

    first, runner.do = [], watched
    with Ledger() as ledger:

        @contextmanager
        def watch(name):
            yield
            alive.append(ledger.live_by_kind["activations"])

        runner.hooks.append(Around(watch))
        run.forward_backward(batch)
    return max(held, default=0), first[:1], max(alive), ledger.sent_bytes("send")


def test_activations_are_held_where_the_lists_say():
    """Bytes of saved tensors here and on the way, never more than the limit; the ledger's account of each."""
    cases = (one_f_one_b(4, 6), Runner), (one_f_one_b(4, 6), Balanced), (bpipe(4, 6), Balanced)
    plain, lists, balanced = zip(*launch.run(lambda: [held_at_most(*case) for case in cases], ranks=4))
    unit = [one for _, (one,), _, _ in lists]
    assert [rank[0] for rank in lists] == [4 * unit[0], 3 * unit[1], 2 * unit[2], unit[3]]
    assert [rank[0] for rank in balanced] == [3 * unit[0], 3 * unit[1], 2 * unit[2], unit[3] + 2 * unit[0]]
    assert plain[0][2] == lists[0][2]
    moved = sum(action.kind == "E" for action in bpipe(4, 6).place)
    more = [with_moves[3] - without[3] for with_moves, without in zip(balanced, plain)]
    assert more == [moved * unit[0] + 8, 0, 0, moved * unit[0]]  # 8: the length, told once
    assert plain[0][2] - balanced[0][2] == unit[0] - 8 and balanced[3][2] - lists[3][2] == 2 * unit[0]


def events_of(schedule, lent=None):
    """(account of a step, what moved) of this rank; `lent` is what dry runs of other ranks have found out."""
    run, batch = on_rank(schedule, MANY)
    run.runner.lent |= lent or {}
    with Ledger() as ledger:
        run.runner.hooks.append(Around(ledger.phase))
        run.forward_backward(batch)
    return ledger, run.runner.lent


def counted(ledger):
    account = everything(ledger)
    account["kinds of events"] = Counter(map(type, ledger.events))
    ops = "send", "receive"
    account["by operation"] = {op: (ledger.num_calls(op), ledger.sent_bytes(op)) for op in ops}
    del account["timeline"]  # a network lets a message go an event later
    return account


def test_a_dry_run_of_bpipe_equals_the_real_one():
    """On all ranks, event by event; a host is given what the dry run of the lender says."""
    schedule, lent = bpipe(4, 6), {}
    for rank, (real, learned) in enumerate(launch.run(events_of, schedule, ranks=4)):
        dry, found = dryrun.run(events_of, schedule, lent, rank=rank, ranks=4)
        assert counted(dry) == counted(real) and found.items() >= learned.items()
        lent |= found


def test_moves_run_beside_what_is_computed():
    """Between the issue of every move and the wait for it are all operators of an F or a B, on both ends."""
    schedule = bpipe(4, 6)
    for rank, (ledger, _) in enumerate(launch.run(events_of, schedule, ranks=4)):
        issued, beside = {}, []
        operators = Counter(event.phase for event in ledger.events if isinstance(event, Compute))
        for event in ledger.events:
            if isinstance(event, Issue) and sorted(event.members) == [0, 3] and event.payload_bytes > 8:
                issued[event.id] = Counter()
            elif isinstance(event, Compute):
                for seen in issued.values():
                    seen[event.phase] += 1
            elif isinstance(event, Wait) and event.id in issued:
                whole = [name for name, count in issued.pop(event.id).items() if count == operators[name]]
                beside.append([name for name in whole if name[:1] in ("F", "B")])
        moves = sum(action.kind == "E" for action in schedule.place)
        assert not issued and len(beside) == (2 * moves if rank in (0, 3) else 0)
        assert all(beside[:-1] if rank == 3 else beside)  # the last goes behind that rank's last backward


def test_what_moves_is_counted_on_both_ends():
    """In the programs, from the post of a receive until its send is known to be over."""
    for p, m in [(4, 4), (4, 8), (5, 13), (6, 6), (8, 8), (8, 19), (16, 32)]:
        schedule = bpipe(p, m)
        limit = max(peaks(schedule))
        for entries, program in zip(schedule.ranks, lower(schedule)):
            held, guests, most, most_guests = 0, 0, 0, 0
            for step in program:
                if isinstance(step, Action):
                    held += {"F": 1, "B": -1}.get(step.kind, 0)
                elif isinstance(step, (Receive, Sent)) and step.what.kind in "EG":
                    held += 1 if isinstance(step, Receive) else -1
                    guests += {(Receive, "E"): 1, (Sent, "G"): -1}.get((type(step), step.what.kind), 0)
                most, most_guests = max(most, held), max(most_guests, guests)
            listed = list(accumulate({"H": 1, "G": -1}.get(action.kind, 0) for action in entries))
            assert most <= limit == (p + 3) // 2 and most_guests <= max(listed)


def loads_another_microbatch():
    first, right = {}, Balanced.give_back

    def give_back(self, action):
        right(self, action)
        self.boundary[action] = first.setdefault(self.unit(action), self.boundary[action])

    Balanced.give_back = give_back
    return train_pipeline(MANY, dict(dp=1, pp=4), bpipe(4, 6))


def test_control_what_comes_back_matters():
    outcome, exact = launch.run(loads_another_microbatch, ranks=4)[0], one_process(MANY)
    assert max((outcome.grads[name] - exact.grads[name]).abs().max() for name in outcome.grads) > 1e-6


@pytest.mark.parametrize("missing", "EHGL")
def test_moves_come_in_fours(missing):
    schedule, hole = bpipe(4, 6), Action(missing, 0, 3)
    ranks = [[action for action in entries if action != hole] for entries in schedule.ranks]
    assert f"{missing}0.3 is missing" in said_by(lambda: check(replace(schedule, ranks=ranks)))


# ---- DISTMM ----------------------------------------------------------------------------------------------

GENERATOR = torch.Generator().manual_seed(2)
SAMPLES = torch.randn(2, 11, 6, dtype=torch.float64, generator=GENERATOR)  # images and texts


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(4)
            tower = lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)).double()
            self.image, self.text = tower(), tower()

    def forward(self, pairs):
        return self.image(pairs[0]), self.text(pairs[1])


def trained_by_parts(whole):
    """Summed over ranks: 11 samples on 2 ranks in 3 microbatches. Not `whole`: by own negatives."""
    group, towers = collectives.world(), Towers()
    microbatches = SAMPLES.split((6, 5), dim=1)[group.rank()].tensor_split(3, dim=1)
    if whole:
        loss = contrastive.contrastive_step(towers, microbatches, group)
    else:
        loss = sum(contrastive.contrastive_loss(*towers(microbatch)) for microbatch in microbatches)
        loss.backward()
    return loss.item(), [collectives.all_reduce(param.grad, group) for param in towers.parameters()]


def trained_by_tower():
    """Images on rank 0, texts on ranks 1 and 2, in microbatches: (loss, the tower's gradients, bytes sent)."""
    group, towers = collectives.world(), Towers()
    texts = group.rank() > 0
    tower = towers.text if texts else towers.image
    own = SAMPLES[1].split((7, 4))[group.rank() - 1] if texts else SAMPLES[0]
    with Traffic() as ledger:
        loss = contrastive.tower_step(tower, texts, own.tensor_split(3), group)
    others = towers.image if texts else towers.text
    assert all(param.grad is None for param in others.parameters())
    return loss.item(), [param.grad for param in tower.parameters()], ledger.sent_bytes()


def test_only_embeddings_travel():
    def gathered_bytes():
        group, towers = collectives.world(), Towers()
        own = SAMPLES[:, :10].split((5, 5), dim=1)[group.rank()]
        with Traffic() as ledger:
            contrastive.contrastive_step(towers, own.tensor_split(3, dim=1), group)
        return ledger.sent_bytes()

    assert launch.run(gathered_bytes, ranks=2) == [2 * 10 * 5 * 8 // 2 + 8] * 2  # and the number of rows


def furthest(grads, module):
    pairs = zip(grads, module.parameters(), strict=True)
    return max((grad - param.grad).abs().max() for grad, param in pairs)


def test_distmm():
    """The atlas's row: gradients of gathered embeddings are those of the full batch, also with towers on ranks
    of their own, one and two; and doubled microbatches wait half as long."""
    towers = Towers()
    exact = contrastive.contrastive_loss(*towers(SAMPLES))
    exact.backward()
    for loss, grads in launch.run(trained_by_parts, True, ranks=2):
        assert abs(loss - exact.item()) < TOLERANCE and furthest(grads, towers) < TOLERANCE
    (losses, (images, *texts), sent) = zip(*launch.run(trained_by_tower, ranks=3))  # one rank, and two
    assert max(abs(loss - exact.item()) for loss in losses) < TOLERANCE
    assert furthest(images, towers.image) < TOLERANCE
    assert furthest(map(sum, zip(*texts)), towers.text) < TOLERANCE
    assert set(sent) == {2 * 11 * 5 * 8 + 2 * 2 * 8}  # as many rows as the images' rank has; rows, and whose
    grads = launch.run(trained_by_parts, False, ranks=2)[0][1]  # control
    assert furthest(grads, towers) > 1e-3

    for p in (1, 2, 3, 5, 8, 16):
        for m in (1, 2, 5, 16):
            for costs in (Costs(B=2), Costs(F=3, B=4)):
                runs = simulate(contrastive.naive(p, m), costs), simulate(contrastive.doubled(p, m), costs)
                waits = [run.idle(rank) for run in runs for rank in (0, p - 1)]
                assert waits == [(p - 1) * (costs.F + costs.B) * times for times in (2, 2, 1, 1)]
            assert peaks(contrastive.doubled(p, m)) == [min(m + p - rank - 1, 2 * m) for rank in range(p)]
            for last in (contrastive.naive(p, m).ranks[-1], contrastive.doubled(p, m).ranks[-1]):
                for batch in range(2):  # the barrier: all forwards of a batch before its first backward
                    places = lambda kind: [last.index(kind(p - 1, batch * m + i)) for i in range(m)]
                    forwards, backwards = places(F), places(B)
                    assert max(forwards) < min(backwards)
