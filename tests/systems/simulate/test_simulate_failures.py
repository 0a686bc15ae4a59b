"""The simulator of a job with failures: against jobs written out by hand, against a second one that walks from
save to save, and against what chance allows."""

import random
from itertools import islice
from math import gamma, sqrt
from statistics import fmean, pstdev

import pytest

from minitrain.systems.simulate.failures import Failure, Level, Outcome, failing, simulate

DISK, MEMORY = Level(2, 5, 0), Level(1, 3, 0)


def at(*times, machines=(0,)):
    return [Failure(time, machines) for time in times]


def test_a_job_by_hand():
    """Saves end at 12, 24, 36, .. of a job without failures. A failure at 30 loses 6; 5 to restart; one at 38, 3
    after that, loses 3."""
    assert simulate(35, 10, [], disk=DISK) == Outcome(35, 6, 0, 0, 0, 0)
    out = simulate(35, 10, at(30, 38), disk=DISK)
    assert out == Outcome(35, 6, 6 + 3, 10, 2, 2) and out.elapsed_s == 60 and out.waste == 1 - 35 / 60
    assert simulate(35, 10, at(30, 32), disk=DISK) == Outcome(35, 6, 6, 2 + 5, 2, 2), "amid a restart"
    assert simulate(30, 10, at(34), disk=DISK).failures == 0, "no save at the very end: it was over at 34"
    assert simulate(30, 10, at(33.5), disk=DISK) == Outcome(30, 4, 9.5, 5, 1, 1)


def test_a_save_counts_when_its_lag_is_over():
    late = Level(2, 5, lag_s=4)
    assert simulate(35, 10, at(15.5), disk=late).lost_s == 15.5
    assert simulate(35, 10, at(16.5), disk=late).lost_s == 4.5
    assert simulate(35, 10, at(16.5), disk=DISK).lost_s == 4.5
    assert simulate(35, 10, at(15.5), disk=DISK).lost_s == 3.5
    peers = Level(2, 5, lag_s=4)
    for more in ({}, {"disk": Level(3, 5), "every": 3}):
        assert simulate(35, 10, at(15.5), memory=peers, **more).lost_s == 15.5
        assert simulate(35, 10, at(16.5), memory=peers, **more).lost_s == 4.5


def test_two_levels_by_hand():
    """Every third save to disk: in a job without failures they end at 11, 22, 34, 45, 56, 68."""

    def out(*failures, work=60):
        light = {15, 40, 52, 56, 71}
        survives = lambda failure: failure.at_s in light
        return simulate(work, 10, at(*failures), memory=MEMORY, disk=DISK, every=3, memory_survives=survives)

    assert out() == Outcome(60, 4 * 1 + 2, 0, 0, 0, 0)
    assert out(15) == Outcome(60, 6, 4, 3, 1, 0), "back to the first save"
    assert out(16) == Outcome(60, 6, 16, 5, 1, 1), "back to the start"
    assert out(40) == Outcome(60, 6, 6, 3, 1, 0), "the save on disk is in memory, too"
    assert out(51).lost_s == 51 - 34
    assert out(51, 52) == Outcome(60, 6, 17, 1 + 5, 2, 1), "while it restarts from disk memory is empty"
    assert out(51, 56) == Outcome(60, 6, 17, 5 + 3, 2, 1), "it has just ended: memory is full again"
    assert out(51, 71) == Outcome(60, 6, 17 + 4, 5 + 3, 2, 1), "and afterwards it is not: back to 45"


def test_a_write_that_is_cut_short_begins_again_from_memory():
    """The save on disk ends at 34 and counts 8 s later; a failure at 40 goes back to 34 in memory, at 43."""
    late = DISK._replace(lag_s=8)

    def lost_s(*failures):
        survives = lambda failure: failure.at_s == 40
        return simulate(
            60, 10, at(*failures), memory=MEMORY, disk=late, every=3, memory_survives=survives
        ).lost_s

    assert lost_s(41) == 41 and lost_s(42) == 42 - 34
    assert lost_s(40, 43 + 7) == 6 + 34 + 7, "not yet on disk: back to the start"
    assert lost_s(40, 43 + 8) == 6 + 8


def test_what_a_run_came_back_to_counts_whatever_the_lag():
    """The save ends at 11 and counts at 15; back there at 23, a failure a second later loses that second."""
    out = simulate(60, 10, at(20, 24), memory=Level(1, 3, lag_s=4))
    assert (out.lost_s, out.restarting_s) == (9 + 1, 6)
    both = dict(memory=Level(1, 3), disk=Level(1, 3, lag_s=4), memory_survives=lambda failure: False)
    assert simulate(60, 10, at(20, 24), **both).lost_s == 9 + 1, "on disk as well"


def walked(work, interval, failures, every, survives):
    """The same job, from save to save: (elapsed, lost)."""
    failures, save, on_disk, now, lost = [*failures, Failure(10**9, ())], 0, 0, 0, 0

    def run_s(first, last):
        """From one save to another, without failures."""
        return sum(interval + (MEMORY, DISK)[n % every == 0].stall_s for n in range(first + 1, last + 1))

    while True:
        is_last = (save + 1) * interval >= work
        segment_s = work - save * interval if is_last else run_s(save, save + 1)
        if failures[0].at_s >= now + segment_s:
            now += segment_s
            if is_last:
                return now, lost
            save += 1
            on_disk = save if save % every == 0 else on_disk
            continue
        lost += failures[0].at_s - now
        in_memory, restarted = True, False
        while not restarted:
            failure = failures.pop(0)
            in_memory = in_memory and survives(failure)
            if not in_memory:
                lost += run_s(on_disk, save)
                save = on_disk
            now = failure.at_s + (MEMORY if in_memory else DISK).restart_s
            restarted = now <= failures[0].at_s


@pytest.mark.parametrize("every", [1, 2, 5])
def test_it_jumps_where_another_walks(every):
    draw = random.Random(every)
    undone = 0
    for _ in range(150):
        failures = at(*sorted(draw.sample(range(1, 600), draw.randint(0, 14))))
        light = {failure.at_s for failure in failures if draw.random() < 0.6}
        work, interval = draw.randint(1, 400), draw.randint(4, 30)
        survives = lambda failure: failure.at_s in light
        out = simulate(
            work, interval, failures, memory=MEMORY, disk=DISK, every=every, memory_survives=survives
        )
        assert (out.elapsed_s, out.lost_s) == walked(work, interval, failures, every, survives)
        undone += out.to_disk > 1
    assert undone > 30
    assert simulate(10**15, 1, at(3 * 10**14 + 1), disk=DISK).lost_s == 1, "as many saves as it likes"


def gaps(shape, machines=1, count=20_000):
    times = [failure.at_s for failure in islice(failing(1, 100.0 * machines, machines, shape=shape), count)]
    assert times == sorted(times)
    return [b - a for a, b in zip([0, *times], times)]


@pytest.mark.parametrize("shape", [0.7, 1.0, 2.0])
def test_gaps_have_the_mean_and_the_spread_of_their_shape(shape):
    spread = sqrt(gamma(1 + 2 / shape) / gamma(1 + 1 / shape) ** 2 - 1)  # deviation / mean
    found = gaps(shape)
    assert fmean(found) == pytest.approx(100, rel=3 * spread / sqrt(len(found)))
    assert pstdev(found) / fmean(found) == pytest.approx(spread, rel=0.05)


def test_a_machine_is_renewed_where_it_failed():
    """With a shape of 50 machines wear out like clockwork: each of four fails every 1000 s, give or take a tenth."""
    found = [*islice(failing(2, 1000.0, 4, shape=50), 400)]
    for machine in range(4):
        own = [failure.at_s for failure in found if failure.machines == (machine,)]
        assert 90 < len(own) < 110 and all(850 < b - a < 1150 for a, b in zip([0, *own], own))


def test_failures_are_of_different_machines_and_seeded():
    found = [*islice(failing(3, 1000.0, 8, together=3), 1000)]
    assert all(len(set(failure.machines)) == 3 for failure in found)
    per_machine = [sum(machine in failure.machines for failure in found) for machine in range(8)]
    assert sum(per_machine) == 3000 and all(abs(count - 375) < 5 * sqrt(375) for count in per_machine)
    assert found == [*islice(failing(3, 1000.0, 8, together=3), 1000)]
    assert found != [*islice(failing(4, 1000.0, 8, together=3), 1000)]
