"""The engine against what can be computed by hand, and max-min fair rates against their definition."""

import random
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


def test_every_byte_and_second_is_done_on_random_tasks():
    draw = random.Random(1)
    for _ in range(50):
        tasks, links = [], {"x": 3, "y": Fraction(5, 2)}
        for i in range(12):
            passes = tuple(draw.sample(sorted(links), draw.randint(0, 2)))
            after = tuple(f"t{k}" for k in draw.sample(range(i), min(i, draw.randint(0, 2))))
            tasks.append(Task(f"t{i}", draw.choice("abc"), draw.randint(0, 9), passes, after))
        run = play(tasks, links)
        for task in tasks:
            done = sum((piece.end_s - piece.start_s) * piece.rate for piece in run.pieces[task.name])
            assert done == task.amount
            assert all(run.end(other) <= run.start(task.name) for other in task.after)
        for lane in "abc":
            names = run.lane(lane)
            assert all(run.end(a) <= run.start(b) for a, b in zip(names, names[1:]))


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
        ([Task("a", "x", 1, ("slow",))], "a passes 'slow': give that link its bytes per second"),
    ],
)
def test_what_cannot_run(tasks, match):
    with pytest.raises(ValueError, match=match):
        play(tasks, {"bus": 1, "slow": 0})
