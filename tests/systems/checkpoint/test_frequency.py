"""How often to save: the fewest steps that keep the budget, the same on all ranks, and new when steps change."""

from types import SimpleNamespace

from minitrain import collectives, launch
from minitrain.checkpoint.saver import Saver, Wait
from minitrain.checkpoint.store import Store
from minitrain.ranks.ledger import Ledger
from minitrain.systems.checkpoint.frequency import Frequency
from minitrain.systems.plan.checkpoint_interval import checkfreq_steps
from tests.checkpoint.saver_runs import copies, differing, run_of, train
from tests.checkpoint.test_save_policies import test_async_ckpt as held_copies

BUDGET = 0.035


def overhead(every, step_s, update_s, copy_s, write_s):
    return max(0.0, copy_s - (step_s - update_s)) / (every * step_s)


class Clock:
    """Goes on when it is told to."""

    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


def played(rank_factor):
    """A run of steps of 1 s, from step 30 on 4 s; a save copies 1.5 s and writes 2 s. Rank 1 is slower."""
    group, clock = collectives.world(), Clock()
    slower = 1 + rank_factor * group.rank()
    saver = SimpleNamespace(waits=[], last=None, update_s=0.0, device="cpu", group=group)
    frequency, saves, sent = Frequency(saver, checkfreq_steps, window=4, clock=clock), [], []
    for step in range(60):
        step_s = (1.0 if step < 30 else 4.0) * slower
        clock.now_s += step_s
        saver.update_s = 0.25 * step_s
        with Ledger() as ledger:
            due = frequency.due()
        sent.append(ledger.num_calls())
        if due:
            saves.append(step)
            saver.waits.append(Wait(step, "copy", 9, 0.75))
            clock.now_s += 0.75  # a stall, which is no part of a step
            saver.last = SimpleNamespace(copy_s=1.5, write_s=2.0)
    return saves, frequency.steps, sent


def test_all_ranks_save_in_the_same_steps():
    """By the slowest of each: a step of rank 1 takes twice as long."""
    ranks = launch.run(played, 1.0, ranks=2)
    assert ranks[0][:2] == ranks[1][:2]
    assert checkfreq_steps(2.0, 0.5, 1.5, 2.0) == 2 and ranks[0][0][:4] == [3, 7, 9, 11]  # tuned at 7


def stalled():
    """Each step of 1 s stands still for 3 s more, for copies that it waits for."""
    group, clock, seen = collectives.world(), Clock(), []
    saver = SimpleNamespace(
        waits=[], last=SimpleNamespace(copy_s=1.5, write_s=2.0), update_s=0.25, device="cpu", group=group
    )
    frequency = Frequency(saver, lambda *times: (seen.append(times), 1)[1], window=2, clock=clock)
    for step in range(4):
        clock.now_s += 4
        saver.waits.append(Wait(step, "copy", 9, 3.0))
        frequency.due()
    return seen


def test_the_time_of_a_step_is_without_what_it_waited():
    assert launch.run(stalled, ranks=1) == [[(1.0, 0.25, 1.5, 2.0)] * 2]


def measured(folder):
    """Of a real run: what it hands to the formula, and what was saved otherwise than it was at its boundary."""
    run, seen, wanted = run_of(dp=2), [], {}
    with Saver(Store(folder, keep=9), policy="checkfreq") as saver:
        run.attach(saver)
        frequency = Frequency(saver, lambda *times: seen.append(times) or 2, window=2)
        for step in range(8):
            train(run, step)
            saver.after_step()
            if frequency.due():
                wanted[step] = copies(run.pieces())
                saver.save(step, run.pieces(), run.plain_state(), {})
    return seen, {step: differing(saver.store, step, pieces) for step, pieces in wanted.items()}


def test_checkfreq(tmp_path):
    """The interval is the smallest with an overhead of 3.5 % at most, and follows the time of a step; no state
    is torn, and what is measured are times of this run. A copy runs beside forward and backward; the update waits."""
    held_copies(tmp_path / "held", "checkfreq")
    test_all_ranks_save_in_the_same_steps()  # the write binds: 2 steps, 1 without it
    test_the_time_of_a_step_is_without_what_it_waited()
    ranks = launch.run(measured, str(tmp_path), ranks=2)
    for seen, differs in ranks:
        assert differs.keys() >= {1, 3} and not any(differs.values()) and seen and seen == ranks[0][0]
        for step_s, update_s, copy_s, write_s in seen:
            assert 0 < update_s < step_s and copy_s > 0 and write_s > 0
    for saves, steps, sent in launch.run(played, 0.0, ranks=2):
        before = checkfreq_steps(1.0, 0.25, 1.5, 2.0)
        after = checkfreq_steps(4.0, 1.0, 1.5, 2.0)
        assert (before, after) == (22, 1)
        assert overhead(before, 1.0, 0.25, 1.5, 2.0) <= BUDGET < overhead(before - 1, 1.0, 0.25, 1.5, 2.0)
        assert saves[:2] == [3, 25] and steps == after
        late = [b - a for a, b in zip(saves[2:], saves[3:])]
        assert saves[2] > 29 and set(late[4:]) == {1}  # copies are hidden now, and written within a step
        assert sum(sent) == 14 and sent[3] == 0 and sent[7] == 1  # every fourth step, once there was a save
