"""Searched schedules: the shortest against all there are, optimality of 1F1B and of zero bubble, patterns
with the period of the busiest rank.
"""

from fractions import Fraction
from itertools import accumulate, permutations, product

import pytest

from minitrain.pipeline.schedule import B, F, I, Schedule, W, check, peak
from minitrain.pipeline.schedules.one_direction import one_f_one_b
from minitrain.pipeline.schedules.zero_bubble import block_of, v_half, v_min, zb_v
from minitrain.pipeline.simulate import Costs, simulate
from minitrain.systems.plan.schedule_search import completed, fits, prepared, repetend, shortest, unroll
from minitrain.systems.plan.schedule_search import most_activations as held

WHOLE = Costs(F=1, B=2)


def peaks(schedule: Schedule) -> list[int]:
    return [peak(schedule, rank) for rank in range(len(schedule.ranks))]


def longest_span(schedule: Schedule, costs: Costs) -> int:
    return max(spans[-1].end - spans[0].start for spans in simulate(schedule, costs).spans)


def all_there_are(place, m, split):
    """Every schedule, by trying all orders in which a microbatch's own actions come one after the other."""
    ranks = []
    for rank in range(1 + max(place)):
        own = [s for s, at in enumerate(place) if at == rank]
        way = [F(s, 0) for s in own] + [(I if split else B)(s, 0) for s in reversed(own)]
        way += [W(s, 0) for s in own if split]
        ranks.append([])
        for turns in sorted(set(permutations([i for i in range(m) for _ in way]))):
            if rank == 0 and list(dict.fromkeys(turns)) != list(range(m)):
                continue  # the same with other names for the microbatches
            left = [iter(way) for _ in range(m)]
            ranks[-1].append(tuple(next(left[i])._replace(microbatch=i) for i in turns))
    for lists in product(*ranks):
        try:
            yield check(Schedule("", lists, len(place), m))
        except ValueError:
            pass


@pytest.mark.parametrize(
    "place, m, split, limit, costs",
    [
        ([0, 1], 2, False, 2, WHOLE),
        ([0, 1], 2, False, 1, Costs(F=2, B=1)),
        ([0, 1], 2, True, 2, Costs(F=1, I=2, W=1)),
        ([0, 1], 2, True, 1, Costs()),
        ([0, 1], 3, False, 2, Costs(F=1, B=1, stage={1: 2})),
        ([0, 1, 0], 2, False, 4, Costs(F=Fraction(1, 2), B=1)),
        ([0, 1, 0], 2, False, 2, WHOLE),
    ],
)
def test_the_shortest_of_all(place, m, split, limit, costs):
    every = [schedule for schedule in all_there_are(place, m, split) if max(peaks(schedule)) <= limit]
    found, spans = (shortest(place, m, costs, limit, split=split, span=span) for span in (False, True))
    assert max(peaks(found.schedule) + peaks(spans.schedule)) <= limit
    times = [simulate(schedule, costs).makespan for schedule in [found.schedule, *every]]
    assert found.time == times[0] == min(times[1:])
    # a rank may begin later than it could, which lists alone do not say
    assert spans.time <= min(longest_span(schedule, costs) for schedule in every)


def test_one_f_one_b_is_optimal():
    """With its memory and with any; and a rank with room for one microbatch fewer takes longer."""
    for p, m in [(2, 2), (2, 4), (3, 2), (3, 3), (3, 4)]:
        found = shortest(range(p), m, WHOLE, [p - s for s in range(p)])
        assert found.time == simulate(found.schedule, WHOLE).makespan == 3 * (m + p - 1)
        assert found.schedule.ranks == one_f_one_b(p, m).ranks
        assert shortest(range(p), m, WHOLE).time == 3 * (m + p - 1)
    assert shortest(range(2), 4, WHOLE, 1).time == 24 > 15
    assert shortest(range(3), 4, WHOLE, 2).time == 21 > 18
    # stages that are not equal: the bound is the way to the busiest rank, its work and the way back
    assert shortest(range(3), 4, Costs(F=1, B=2, stage={1: 2}), 3).time == 1 + 4 * 6 + 2


def test_zero_bubble_needs_2p_minus_1():
    """With F = I = W = 1 a rank idles (p-1)(F+I-W) = p-1 with the memory of 1F1B, not at all with 2p-1."""
    for p, m, limit, idle in [(2, 3, 2, 1), (2, 4, 2, 1), (2, 3, 3, 0), (2, 4, 3, 0)]:
        found = shortest(range(p), m, Costs(), limit, split=True, span=True)
        assert found.time - 3 * m == idle
        assert longest_span(found.schedule, Costs()) >= found.time and max(peaks(found.schedule)) == limit
    assert shortest(range(3), 4, Costs(), 3, split=True).time < shortest(range(3), 4, Costs(F=1, B=2), 3).time


def test_tessel():
    """The period is the work of the busiest rank; a line gives 1F1B; a V repeats without waiting; m more
    microbatches take m periods more. The published Vs are among the patterns that are searched, and what is
    found for their memory is no worse. Warm-up and cool-down, searched, are the best of all around the windows.
    """
    for p in (1, 2, 3, 4, 6):
        pattern = repetend(range(p), WHOLE, p)
        assert pattern.period == 3
        for m in (1, 3, 8):
            assert unroll(pattern, m).ranks == one_f_one_b(p, m).ranks
            assert p > 4 or simulate(completed(pattern, m), WHOLE).makespan == 3 * (m + p - 1)
    assert unroll(repetend(range(4), WHOLE, [4, 3, 2, 1]), 8).ranks == one_f_one_b(4, 8).ranks
    for place in [0, 1, 1, 0], [0, 1, 2, 2, 1, 0], [0, 1, 0, 1], [0, 1, 1], [1, 0]:
        for costs, split in (WHOLE, False), (Costs(), True):
            pattern = repetend(place, costs, split=split)
            work = 3 * max(place.count(rank) for rank in place)
            assert pattern.period == work
            ends = [simulate(unroll(pattern, m), costs).makespan for m in (12, 13, 24)]
            assert (ends[1] - ends[0], ends[2] - ends[0]) == (work, 12 * work)
    uneven = Costs(F=1, B=2, stage={1: Fraction(3, 2)})
    assert repetend(range(3), uneven, 3).period == Fraction(9, 2)
    for p in (2, 3, 4):
        for shape, published in ("v_min", v_min), ("v_half", v_half), ("zb_v", zb_v):
            kinds, starts = known_v(shape, p)
            limit = max(peaks(published(p, 6 * p)))
            for first in range(1, len(kinds) + 1):  # no step of the search would have left it out
                assert fits(kinds, starts[:first], 6)
                assert all(held(kinds, starts[:first], 6, rank) <= limit for rank in range(p))
            pattern = repetend([*range(p), *reversed(range(p))], Costs(), limit, split=True)
            assert pattern.period == 6 and max(peaks(unroll(pattern, 6 * p))) <= limit
    v = repetend([0, 1, 1, 0], WHOLE)
    least = shortest(v.place, 3, WHOLE, peaks(unroll(v, 3))).time
    assert simulate(completed(v, 3), WHOLE).makespan == least < simulate(unroll(v, 3), WHOLE).makespan


def known_v(shape, p):
    """A published V as a pattern: F and I start as its block says, W in the first free unit behind its I."""
    kinds, _ = prepared([*range(p), *reversed(range(p))], 1, Costs(), None, True)
    block, at = block_of(shape, p), {}
    for rank in range(p):
        early, late = rank, 2 * p - 1 - rank
        whens = dict(zip((("F", early), ("F", late), ("I", late), ("I", early)), block(rank)))
        for stage in (late, early):
            taken = {start % 6 for start in whens.values()}
            behind = whens["I", stage] + 1
            whens["W", stage] = next(start for start in range(behind, behind + 6) if start % 6 not in taken)
        at |= whens
    return kinds, tuple(at[kind.letter, kind.stage] for kind in kinds)


def orders(kinds, of, counts, goal):
    """Every order of a rank's actions that brings the kinds `of` from some counts to others."""
    if all(counts[k] == goal[k] for k in of):
        yield []
    for k in of:
        if counts[k] < goal[k]:
            action = kinds[k].letter, kinds[k].stage, counts[k]
            for rest in orders(kinds, of, [*counts[:k], counts[k] + 1, *counts[k + 1 :]], goal):
                yield [action, *rest]


def best_around(pattern, m, costs, limits):
    """The least makespan of all lists that have the windows in a row, wherever these are cut; within the limits."""
    kinds, least = pattern.kinds, None
    timed = [(at + n * pattern.period, k, n) for k, at in enumerate(pattern.starts) for n in range(m)]
    for cut in range(pattern.period):
        windows = {}
        for at, k, n in sorted(timed):
            windows.setdefault((at - cut) // pattern.period, []).append((k, n))
        whole = [entries for entries in windows.values() if len(entries) == len(kinds)]
        entries = [entry for window in whole for entry in window]
        before = [min((n for k, n in entries if k == one), default=m) for one in range(len(kinds))]
        after, lists = [count + len(whole) for count in before], []
        for rank in range(1 + max(pattern.place)):
            own = [k for k, kind in enumerate(kinds) if kind.rank == rank]
            middle = [(kinds[k].letter, kinds[k].stage, n) for some in whole for k, n in some if k in own]
            first = list(orders(kinds, own, [0] * len(kinds), before))
            last = list(orders(kinds, own, after, [m] * len(kinds)))
            every = [(*a, *middle, *b) for a in first for b in last]
            lists.append([own for own in every if most_held(own) <= limits[rank]])
        for ranks in product(*lists):
            try:
                schedule = check(Schedule("", ranks, len(pattern.place), m))
            except ValueError:
                continue
            time = simulate(schedule, costs).makespan
            least = time if least is None else min(least, time)
    return least


def most_held(actions):
    frees = "W" if any(letter == "W" for letter, _, _ in actions) else "B"
    return max(accumulate((letter == "F") - (letter == frees) for letter, _, _ in actions))


@pytest.mark.parametrize(
    "place, m, split, costs",
    [
        ([0, 1], 4, False, WHOLE),
        ([0, 1], 3, True, Costs(F=1, I=2, W=1)),
        ([0, 1, 1], 3, False, Costs(F=1, B=1)),
    ],
)
def test_warm_up_and_cool_down_are_the_best_of_all(place, m, split, costs):
    """By trying every order of what is outside the windows, also with less and with more memory than the pattern's."""
    pattern = repetend(place, costs, split=split)
    holds = peaks(unroll(pattern, m))
    for limits in (None, [one + 1 for one in holds], [holds[0] - 1, *holds[1:]]):
        best = best_around(pattern, m, costs, limits or holds)
        if best is None:
            with pytest.raises(ValueError, match=r"the pattern holds \[.*\]; search"):
                completed(pattern, m, limits)
            continue
        found = completed(pattern, m, limits)
        assert simulate(found, costs).makespan == best <= simulate(unroll(pattern, m), costs).makespan
        assert all(held <= limit for held, limit in zip(peaks(found), limits or holds))
