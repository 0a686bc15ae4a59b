"""The engine against what can be computed by hand, and max-min fair rates against their definition."""

import random
import time
from fractions import Fraction

import pytest

from minitrain.systems.simulate.links import Piece, Task, play, shared


def test_lanes_are_in_order_and_tasks_wait_for_what_they_come_after():
    run = play(
        [
            Task("F", "gpu", 3),
            Task("out", "copies", 8, ("bus",), after=("F",)),
            Task("G", "gpu", 4),
            Task("H", "gpu", 1, after=("out",)),
        ],
        {"bus": 1},
    )
    assert [(run.start(name), run.end(name)) for name in ("F", "out", "G", "H")] == [
        (0, 3), (3, 11), (3, 7), (11, 12),
    ]  # fmt: skip
    assert (run.end_s, run.stall("gpu"), run.stall("copies")) == (12, 4, 3)
    assert run.lane("gpu") == ["F", "G", "H"] and run.carried("bus") == 8


def test_two_copies_share_a_link_until_one_has_ended():
    beside = Task("work", "3", 1)  # what ends elsewhere does not cut a piece in two
    run = play([Task("a", "1", 12, ("bus",)), Task("b", "2", 4, ("bus",)), beside], {"bus": 4})
    assert run.pieces["b"] == (Piece(0, 2, 2),) and run.pieces["a"] == (Piece(0, 2, 2), Piece(2, 4, 4))
    assert run.is_slowed("a") and run.is_slowed("b")
    alone = play([Task("a", "1", 12, ("bus",)), Task("b", "1", 4, ("bus",))], {"bus": 4})
    assert alone.end_s == 4 and not alone.is_slowed("a") and not run.is_slowed("work")
    both = play([Task("a", "1", 8, ("bus", "net"))], {"bus": 4, "net": 2})
    assert both.end_s == 4 and not both.is_slowed("a"), "as fast as the slowest of its links"
    nothing = play([Task("a", "1", 0, ("bus",)), Task("b", "2", 0, ("bus",))], {"bus": 4})
    assert nothing.end_s == 0 and not nothing.is_slowed("a")


def test_a_copy_is_as_fast_as_the_slowest_of_its_links_and_others_take_the_rest():
    rates = shared({"a": ("x",), "b": ("x", "y"), "c": ("y", "z"), "work": ()}, {"x": 10, "y": 4, "z": 1})
    assert rates == {"a": 7, "b": 3, "c": 1, "work": 1}


def test_rates_are_max_min_fair_on_random_links():
    """No copy can have more unless one that has no more than it gets less: some link of each copy is full, and
    on it nobody has more than that copy."""
    draw = random.Random(0)
    for _ in range(200):
        links = {f"link {i}": Fraction(draw.randint(1, 30)) for i in range(draw.randint(1, 5))}
        copies = {
            f"copy {i}": tuple(draw.sample(sorted(links), draw.randint(1, len(links))))
            for i in range(draw.randint(1, 7))
        }
        rates = shared(copies, links)
        users = {link: [name for name in copies if link in copies[name]] for link in links}
        used = {link: sum(rates[name] for name in names) for link, names in users.items()}
        assert all(used[link] <= links[link] for link in links)
        for name, passes in copies.items():
            full = [link for link in passes if used[link] == links[link]]
            assert any(rates[name] == max(rates[other] for other in users[link]) for link in full)


def filled(flows, links):
    """Max-min fair rates once more: all rates grow together, and who meets a full link stays where it is."""
    rates, growing = dict.fromkeys(flows, Fraction(0)), set(flows)
    while growing:
        used = {link: sum(rates[name] * flows[name].get(link, 0) for name in flows) for link in links}
        load = {link: sum(flows[name].get(link, 0) for name in growing) for link in links}
        more = min((links[link] - used[link]) / load[link] for link in links if load[link])
        rates |= {name: rates[name] + more for name in growing}
        full = {link for link in links if load[link] and used[link] + more * load[link] == links[link]}
        growing = {name for name in growing if not full & flows[name].keys()}
    return rates


def second_by_second(tasks, links, by, width):
    """{name: (start, end)}: at every event all lanes are gone through, all rates are found anew."""
    now, left, alpha, start, end = Fraction(0), {}, {}, {}, {}
    while len(end) < len(tasks):
        for lane in {task.lane for task in tasks}:
            mine = [task for task in tasks if task.lane == lane]
            for task in sorted(mine, key=by or mine.index):
                if task.name in start:
                    continue
                ready, there = end.keys() >= set(task.after), [t for t in mine if t.name in left]
                if ready and len(there) < width.get(lane, 1):
                    start[task.name], left[task.name], alpha[task.name] = now, task.amount, task.alpha
                elif not by:
                    break
        flows = {t.name: t.links for t in tasks if t.links and t.name in left and not alpha[t.name]}
        flows = {n: x if isinstance(x, dict) else dict.fromkeys(x, 1) for n, x in flows.items()}
        rates = filled(flows, links)
        rate = {name: rates.get(name, 1) for name in left}
        step = min(alpha[name] or Fraction(left[name]) / rate[name] for name in left)
        now += step
        for name in list(left):
            if alpha[name]:
                alpha[name] -= step
                if alpha[name] or left[name]:
                    continue
            else:
                left[name] -= step * rate[name]
            if not left[name]:
                del left[name]
                end[name] = now
    return {task.name: (start[task.name], end[task.name]) for task in tasks}


def test_the_player_and_one_that_looks_at_everything_anew():
    """500 programs: lanes in order or by a key, one or several at once, shares, latencies; exact."""
    draw = random.Random(2)
    for case in range(500):
        links, tasks, more = {"x": Fraction(3), "y": Fraction(5, 2), "z": Fraction(7)}, [], case % 2
        for i in range(draw.randint(1, 12)):
            passes = tuple(draw.sample(sorted(links), draw.randint(0, 3)))
            if more and draw.random() < 0.5:
                passes = {link: Fraction(draw.randint(1, 4), 2) for link in passes}
            after = tuple(f"t{k}" for k in draw.sample(range(i), min(i, draw.randint(0, 2))))
            alpha = draw.choice((0, 0, Fraction(1, 2), 2)) * more
            tasks.append(Task(f"t{i}", draw.choice("abc"), draw.randint(1, 9), passes, after, alpha))
        keys = {task.name: (draw.randint(0, 3), at) for at, task in enumerate(tasks)}
        by = (lambda task: keys[task.name]) if case % 4 > 1 else None
        width = {"a": draw.randint(1, 3)} if more else {}
        run = play(tasks, links, by, width)
        for task in tasks:
            carried = sum((part.end_s - part.start_s) * part.rate for part in run.pieces[task.name])
            assert carried == task.amount
        found = {name: (run.start(name), run.end(name)) for name in run.tasks}
        assert found == second_by_second(tasks, links, by, width)


def test_shares_latencies_keys_and_widths_by_hand():
    # spread over two paths a flow takes half of its rate from each: 2 links of 1 carry it at 2
    spread = Task("spread", "1", 8, {"up": Fraction(1, 2), "down": Fraction(1, 2)})
    run = play([spread], {"up": 1, "down": 1})
    assert run.end_s == 4 and run.carried("up") == 4 and not run.is_slowed("spread")
    run = play([spread, Task("other", "2", 4, ("up",))], {"up": 1, "down": 1})
    assert run.pieces["other"][0].rate == Fraction(2, 3) and run.is_slowed("spread")
    # a latency takes the lane, not the link
    late = [Task("a", "1", 4, ("up",), alpha=3), Task("b", "2", 2, ("up",)), Task("c", "1", 1, ("up",))]
    run = play(late, {"up": 1})
    assert run.pieces["a"] == (Piece(0, 3, 0), Piece(3, 7, 1)) and run.end("b") == 2 and run.end("c") == 8
    assert not run.is_slowed("a") and play([Task("n", "1", 0, ("up",), alpha=2)], {"up": 1}).end_s == 2
    # the smallest key of those that are ready; what has begun is not interrupted
    tasks = [Task("big", "net", 5), Task("late", "gpu", 2), Task("small", "net", 1, after=("late",))]
    tasks.append(Task("middle", "net", 1))
    run = play(tasks, by=lambda task: {"small": 0, "middle": 1}.get(task.name, 2))
    assert [run.start(name) for name in ("middle", "big", "small")] == [0, 1, 6]
    # in order, and two at once
    run = play([Task(f"t{i}", "lane", 3 - i) for i in range(3)], width={"lane": 2})
    assert [run.start(f"t{i}") for i in range(3)] == [0, 0, 2]


def test_a_thousand_flows_are_cheap():
    """Rates over a fabric, and a play in which pairs share links, by the processor's clock."""
    draw = random.Random(3)
    fabric = {at: tuple(draw.sample(range(400), 6)) for at in range(1000)}
    pairs = [Task(f"{at}", f"{at}", draw.random(), (f"{at // 2}",)) for at in range(1000)]
    works = (
        lambda: shared(fabric, dict.fromkeys(range(400), 1.0)),
        lambda: play(pairs, {f"{at}": 1.0 for at in range(500)}),
    )
    for work in works:
        took = []
        for _ in range(5):
            begin = time.process_time()
            work()
            took.append(time.process_time() - begin)
        assert min(took) <= 0.05


@pytest.mark.parametrize(
    "tasks, match",
    [
        ([Task("b", "x", 1), Task("a", "x", 1), Task("a", "y", 1)], "3 tasks have 2 names"),
        ([Task("a", "x", 1, after=("b",))], "a comes after 'b', which is no task"),
        ([Task("a", "x", 1, ("net",))], "a passes 'net': give that link its bytes per second"),
        ([Task("a", "x", 1, ("bus", "bus"))], "a copy passes a link once"),
        ([Task("a", "x", -1)], "an amount is 0 or more"),
        ([Task("a", "x", float("nan"))], "an amount is 0 or more"),
        ([Task("a", "x", 1, after=("b",)), Task("b", "x", 1)], "wait for each other: a; order lanes"),
        (
            [Task("z", "w", 1), Task("a", "x", 1, after=("b",)), Task("b", "y", 1, after=("a",))],
            "^tasks wait for each other: a, b; order lanes",
        ),
        ([Task("a", "x", 1, {"bus": 0})], "by a share above 0"),
        ([Task("a", "x", 1, alpha=-1)], "so is its alpha"),
        ([Task("a", "x", 1, ("slow",))], "a passes 'slow': give that link its bytes per second"),
    ],
)
def test_what_cannot_run(tasks, match):
    with pytest.raises(ValueError, match=match):
        play(tasks, {"bus": 1, "slow": 0})


def test_a_lane_has_a_width_of_one_or_more():
    with pytest.raises(ValueError, match="width of x=0"):
        play([Task("a", "x", 1)], width={"x": 0})
