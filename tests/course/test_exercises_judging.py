"""The judge's side without any rank: a test says what a rank would have said; how a trial ends."""

import time

import pytest

from minitrain.course.grading import network, trial
from minitrain.course.grading.inside.frames import BadFrame, Line, pack
from minitrain.course.grading.network import Event, Network
from minitrain.course.grading.trial import Broken, Failure, Trial

# ---- the network -----------------------------------------------------------------------------------------


def message(kind, peer, op, members=(0, 1, 2), **more):
    return {
        "is": kind, "peer": peer, "op": op, "members": list(members), "dtype": "int8", "shape": [2],
    } | more  # fmt: skip


@pytest.mark.parametrize(
    "frame, data, said",
    [
        (message("send", 1, "1"), b"ab", "an operation without a number of its own"),
        (message("send", 1, True), b"ab", "an operation without a number of its own"),
        (message("send", 1, 7), b"ab", "an operation without a number of its own"),
        (message("send", 3, 1), b"ab", "a message needs a peer in its group and bytes"),
        (message("send", 2, 1, (0, 1)), b"ab", "a message needs a peer in its group and bytes"),
        (message("send", 1.0, 1), b"ab", "a message needs a peer in its group and bytes"),
        (message("send", 1, 1), b"a", "a message needs a peer in its group and bytes"),
        (message("send", 1, 1, shape=[0]), b"", "a message needs a peer in its group and bytes"),
        (message("receive", 1, 1, shape=[0]), b"", "a message needs a peer in its group and bytes"),
        (message("send", 1, 1, (1, 2)), b"ab", "an operation needs the members of its group"),
        (message("send", 1, 1, (0, 1, 3)), b"ab", "an operation needs the members of its group"),
        (message("send", 1, 1, (-1, 0, 1)), b"ab", "an operation needs the members of its group"),
        (message("send", 1, 1, (0, 1, 1)), b"ab", "an operation needs the members of its group"),
        (message("send", 1, 1, (False, 1)), b"ab", "an operation needs the members of its group"),
        (message("send", 1, 1, dtype="int7"), b"ab", "not a tensor's dtype and shape"),
        (message("barrier", 1, 1, (1, 2)), b"", "an operation needs the members of its group"),
        ({"is": "fetch", "op": 1, "name": "of another"}, b"", "there is no input of that name"),
        ({"is": "verdict", "op": 1}, b"", "an unknown kind of frame"),
    ],
)
def test_what_a_rank_may_not_post(frame, data, said):
    net = Network(3, [{"mine": b"1"}, {"of another": b"2"}, {}])
    net.post(0, message("receive", 1, 7), b"")
    with pytest.raises(BadFrame, match=f"^{said}$"):
        net.post(0, frame, data)
    assert not net.messages and not net.replies


def test_a_wait_is_for_an_operation_of_ones_own_and_once():
    net = Network(2, [{}] * 2)
    net.post(0, message("receive", 1, 5, (0, 1)), b"")
    for rank, frame in ((1, {"op": 5}), (0, {"op": 6}), (0, {"op": "5"}), (0, {})):
        with pytest.raises(BadFrame, match="a wait for nothing"):
            net.wait(rank, frame)
    net.wait(0, {"op": 5})
    with pytest.raises(BadFrame, match="a wait for nothing"):
        net.wait(0, {"op": 5})


def test_messages_of_two_ranks_arrive_in_order_and_groups_do_not_mix():
    net = Network(3, [{}] * 3)
    net.post(0, message("send", 1, 1), b"a1")
    net.post(0, message("send", 1, 2), b"a2")
    net.post(0, message("send", 1, 3, (0, 1)), b"b1")
    net.post(1, message("receive", 0, 4, (0, 1)), b"")
    for op in (5, 6):
        net.post(1, message("receive", 0, op), b"")
    for op in (4, 6, 5):
        net.wait(1, {"op": op})
    assert list(net.replies) == [(1, 4, b"b1"), (1, 6, b"a2"), (1, 5, b"a1")]


def test_a_barrier_is_over_when_the_last_member_has_come_and_starts_anew():
    net = Network(4, [{}] * 4)
    for turn in (1, 2):
        for rank in (3, 1):
            net.post(rank, {"is": "barrier", "op": turn, "members": [1, 2, 3]}, b"")
            net.wait(rank, {"op": turn})
        assert not net.replies
        with pytest.raises(BadFrame, match="a rank stands in one barrier at a time"):
            net.post(3, {"is": "barrier", "op": 9 + turn, "members": [0, 3]}, b"")
        net.post(2, {"is": "barrier", "op": turn, "members": [1, 2, 3]}, b"")
        net.wait(2, {"op": turn})
        assert list(net.replies) == [(rank, turn, b"") for rank in (3, 1, 2)]
        net.replies.clear()
    assert net.events == [Event("barrier", rank) for rank in (3, 1, 2, 3, 1, 2)]


def test_a_secret_is_its_own_ranks_and_comes_when_it_is_handed_over():
    net = Network(2, [{"w": b"zero"}, {"w": b"one"}])
    for rank in (1, 0):
        net.post(rank, {"is": "fetch", "op": 1, "name": "w"}, b"")
        net.wait(rank, {"op": 1, "alone": True})
    assert not net.replies and not net.events and not net.stuck(surely=True), "what is asked for will come"
    net.hand_over()
    assert list(net.replies) == [(1, 1, b"one"), (0, 1, b"zero")] and not net.asked
    assert net.events == [Event("fetch", 1, name="w"), Event("fetch", 0, name="w")]
    net.hand_over()
    assert len(net.events) == 2


def test_what_a_run_may_hold_is_bounded(monkeypatch):
    monkeypatch.setattr(network, "MOST_OPEN", 3)
    monkeypatch.setattr(network, "MOST_GROUPS", 2)
    monkeypatch.setattr(network, "MOST_EVENTS", 4)
    net = Network(3, [{}] * 3)
    for op in range(3):
        net.post(0, message("receive", 1, op), b"")
    with pytest.raises(BadFrame, match="more than 3 messages under way"):
        net.post(0, message("receive", 1, 3), b"")
    net.post(1, message("receive", 0, 0, (0, 1)), b"")
    with pytest.raises(BadFrame, match="more than 2 groups"):
        net.post(1, message("receive", 0, 1, (1, 0)), b"")
    net = Network(1, [{}])
    for op in range(2):
        net.post(0, message("send", 0, 2 * op, (0,)), b"ab")
        net.post(0, message("receive", 0, 2 * op + 1, (0,)), b"")
        for one in (0, 1):
            net.wait(0, {"op": 2 * op + one})
    net.post(0, message("send", 0, 9, (0,)), b"ab")  # 5 events
    with pytest.raises(BadFrame, match="or 4 in all"):
        net.post(0, message("receive", 0, 10, (0,)), b"")


# ---- a trial ---------------------------------------------------------------------------------------------


def begun(ranks=2):
    """As after the first look at the clock: time enough, and something has just moved."""
    one = Trial(Network(ranks, [{}] * ranks), time_limit_s=9)
    one.deadline = one.moved = time.monotonic() + 1000
    return one


def rank_says(one: Trial, rank: int, *headers: dict, prints: bytes = b"") -> None:
    for header in headers:
        Line(one.ends[2 * rank]).send(header)
    one.ends[2 * rank + 1].sendall(prints)


def returns(*results) -> dict:
    return {"is": "return", "value": pack(list(results))[0]}


def test_results_come_in_rank_order_and_what_follows_one_is_noise():
    with begun() as one:
        rank_says(one, 1, returns(5), returns(6), prints=b"two\nlines\x1b[2J")
        raised = {"is": "raise", "property": "no error", "message": "", "trace": ""}
        rank_says(one, 0, returns(4), raised, prints=b"one")
        outcome = one.play()
    assert outcome.results == [[4], [5]]
    assert outcome.prints == "[rank 0] one\n[rank 1] two\n[rank 1] lines?[2J"


def test_a_failure_carries_what_was_raised_and_printed():
    with begun(1) as one:
        raised = {"is": "raise", "property": "no error", "message": "m", "trace": "line 3\n"}
        rank_says(one, 0, raised, prints=b"hello")
        with pytest.raises(Failure) as error:
            one.play()
    found = (error.value.property, error.value.message, error.value.detail)
    assert found == ("no error", "m", "line 3\n\n[rank 0] hello")


def test_of_what_a_rank_prints_the_first_part_is_kept():
    with begun(1) as one:
        rank_says(one, 0, returns(4), prints=b"x" * (trial.OUTPUT_LIMIT_BYTES - 10))
        one._read_prints(0)
        rank_says(one, 0, prints=b"y" * 100)
        assert one.play().prints == "[rank 0] " + "x" * (trial.OUTPUT_LIMIT_BYTES - 10) + "y" * 10


@pytest.mark.parametrize(
    "property", [*trial.TOLD, "time limit", "no deadlock", "a result", "matching messages"]
)
def test_a_rank_may_say_some_things_of_itself_and_no_others(property):
    with begun(1) as one, pytest.raises(Failure if property in trial.TOLD else BadFrame) as error:
        one._take(0, {"is": "raise", "property": property, "message": "m", "trace": "t"}, b"")
    assert property not in trial.TOLD or (error.value.property, error.value.message) == (property, "m")


def test_a_rank_that_cannot_be_started_is_named_with_its_last_words():
    for words, told in ((b"no memory\n", r"\[rank 1\] no memory"), (b"", "it said nothing")):
        with begun() as one:
            rank_says(one, 0, {"is": "ready"})
            rank_says(one, 1, prints=words)
            with pytest.raises(Broken, match=f"^rank 1 of an exercise could not be started: {told}$"):
                one.wait_until_ready()


def test_who_does_not_take_what_it_asked_for_is_told_apart_from_who_is_gone():
    with begun() as one:
        one.deadline = time.monotonic() - 1
        with pytest.raises(Failure, match="^time limit: rank 1 asked for data and did not take it$"):
            one.tell(1, {"is": "done", "op": 1}, bytes(1 << 24))
        one.ends[0].close()
        one.tell(0, {"is": "done", "op": 1}, bytes(9))


SLEEPS, RUNS, BLOCKED = "State:\tS (sleeping)\n", "State:\tR (running)\n", "State:\tD (disk sleep)\n"


@pytest.mark.parametrize(
    "before, now, asleep",
    [
        ([SLEEPS, SLEEPS], [SLEEPS, SLEEPS], True),
        ([SLEEPS, RUNS], [SLEEPS, RUNS], False),
        ([BLOCKED, SLEEPS], [BLOCKED, SLEEPS], False),
        ([SLEEPS + "switches: 4"], [SLEEPS + "switches: 5"], False),
        ([], [], "later"),
    ],
)
def test_a_secret_waits_until_every_thread_of_every_rank_sleeps(before, now, asleep, monkeypatch):
    with begun() as one:
        for quiet_s in (-1000, 2 * trial.ASLEEP_S):
            looks = iter([before, now])
            monkeypatch.setattr(one, "_threads", lambda: next(looks))
            one.moved = time.monotonic() - quiet_s
            assert one._all_asleep() == (quiet_s > 0 if asleep == "later" else asleep)
