"""The judge's side of a run without any rank: a test says what a rank would have said, and looks at what the network
answers, how a trial ends and what a report shows."""

import argparse
import collections
import os
import queue
import re
import socket
import subprocess
import sys
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from minitrain.course import exercises
from minitrain.course.exercises import Grades, Report, Result
from minitrain.course.grading import book, checks, judge, kit, network, trial
from minitrain.course.grading.checks import Answer, Draw, expect_equal
from minitrain.course.grading.inside import frames, wire
from minitrain.course.grading.inside import rank as of_an_answer
from minitrain.course.grading.inside.frames import BadFrame, Line, pack
from minitrain.course.grading.judge import Code
from minitrain.course.grading.network import Event, Message, Network
from minitrain.course.grading.trial import Broken, Failure, Outcome, Trial, plain, short

# ---- the network -----------------------------------------------------------------------------------------


def message(kind, peer, op, members=(0, 1, 2), **more):
    return {
        "is": kind,
        "peer": peer,
        "op": op,
        "members": list(members),
        "dtype": "int8",
        "shape": [2],
    } | more


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


def test_a_number_is_free_again_when_its_operation_is_over():
    net = Network(2, [{}] * 2)
    for _ in range(2):
        net.post(0, message("send", 1, 5, (0, 1)), b"ab")
        net.post(1, message("receive", 0, 5, (0, 1)), b"")
        net.wait(0, {"op": 5})
        net.wait(1, {"op": 5})
    assert list(net.replies) == [(0, 5, b""), (1, 5, b"ab")] * 2
    assert net.messages == [Message(0, 1, 2, 1)] * 2


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


def test_who_receives_from_one_gets_nothing_of_another():
    net = Network(3, [{}] * 3)
    net.post(2, message("receive", 1, 1), b"")
    net.wait(2, {"op": 1})
    net.post(0, message("send", 2, 1), b"0-")
    net.post(2, message("send", 1, 2), b"2-")
    assert not net.replies and not net.messages
    net.post(1, message("send", 2, 1), b"1-")
    assert list(net.replies) == [(2, 1, b"1-")] and net.messages == [Message(1, 2, 2, 1)]


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


def test_what_was_never_received_or_never_sent_is_told():
    net = Network(3, [{}] * 3)
    assert net.left_over() == ""
    net.post(2, message("receive", 1, 1), b"")
    assert net.left_over() == "rank 2 asked rank 1 for a tensor and returned without it"
    net.post(1, message("send", 2, 1), b"ab")
    assert net.left_over() == ""
    net.post(1, message("send", 0, 2), b"ab")
    assert net.left_over() == "rank 1 sent to rank 0, which never received it"


def test_who_waits_in_a_barrier_and_who_computes_is_told_in_rank_order():
    net = Network(3, [{}] * 3)
    net.post(2, {"is": "barrier", "op": 1, "members": [0, 1, 2]}, b"")
    net.wait(2, {"op": 1})
    net.post(0, message("send", 1, 1), b"ab")
    net.running.discard(1)
    assert net.waiting() == "rank 0 computes; rank 2 waits in a barrier; rank 1 has returned"


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


def test_others_may_fail_too_before_a_failure_is_told():
    with begun() as one:
        one.failures, one.network.running = {1: Failure("a result", "rank 1 ended")}, {0}
        one._end_what_cannot_go_on()
        one.moved -= 1000 + 2 * trial.GRACE_S
        with pytest.raises(Failure, match="rank 1 ended"):
            one._end_what_cannot_go_on()


@pytest.mark.parametrize("how", ["all have ended", "nobody else can go on"])
def test_nobody_is_waited_for_who_cannot_fail(how, monkeypatch):
    with begun() as one:
        one.failures, one.network.running = {1: Failure("a result", "rank 1 ended")}, {0}
        if how == "all have ended":
            one.network.running = set()
        else:
            monkeypatch.setattr(one.network, "stuck", lambda surely: not surely)
        with pytest.raises(Failure, match="rank 1 ended"):
            one._end_what_cannot_go_on()


@pytest.mark.parametrize("surely", [True, False])
def test_a_deadlock_is_told_at_once_if_it_is_sure_and_else_after_a_while(surely, monkeypatch):
    with begun() as one:
        monkeypatch.setattr(one.network, "stuck", lambda surely, sure=surely: sure or not surely)
        if not surely:
            one._end_what_cannot_go_on()
            one.moved -= 1000 + 2 * trial.QUIET_S
        with pytest.raises(
            Failure, match="^no deadlock: nobody can go on: rank 0 computes; rank 1 computes$"
        ):
            one._end_what_cannot_go_on()


def test_time_is_up_at_the_deadline():
    with begun() as one:
        one._end_what_cannot_go_on()
        one.deadline = time.monotonic() - 1
        with pytest.raises(
            Failure, match="^time limit: not done after 9 s; rank 0 computes; rank 1 computes$"
        ):
            one._end_what_cannot_go_on()


def rank_says(one: Trial, rank: int, *headers: dict, prints: bytes = b"") -> None:
    for header in headers:
        Line(one.ends[2 * rank]).send(header)
    one.ends[2 * rank + 1].sendall(prints)


def returns(*results) -> dict:
    return {"is": "return", "value": pack(list(results))[0]}


def test_results_come_in_rank_order_and_what_follows_one_is_noise():
    with begun() as one:
        rank_says(one, 1, returns(5), returns(6), prints=b"two\nlines\x1b[2J")
        rank_says(
            one,
            0,
            returns(4),
            {"is": "raise", "property": "no error", "message": "", "trace": ""},
            prints=b"one",
        )
        outcome = one.play()
    assert outcome.results == [[4], [5]]
    assert outcome.prints == "[rank 0] one\n[rank 1] two\n[rank 1] lines?[2J"


def test_a_failure_carries_what_was_raised_and_printed():
    with begun(1) as one:
        rank_says(
            one,
            0,
            {"is": "raise", "property": "no error", "message": "m", "trace": "line 3\n"},
            prints=b"hello",
        )
        with pytest.raises(Failure) as error:
            one.play()
    assert (error.value.property, error.value.message, error.value.detail) == (
        "no error",
        "m",
        "line 3\n\n[rank 0] hello",
    )


def test_a_rank_whose_line_ends_has_not_returned():
    with begun() as one:
        rank_says(one, 0, returns(4))
        one.ends[2].close()
        with pytest.raises(Failure, match="^a result: rank 1 ended without returning$"):
            one.play()


def test_of_what_a_rank_prints_the_first_part_is_kept():
    with begun(1) as one:
        rank_says(one, 0, returns(4), prints=b"x" * (trial.OUTPUT_LIMIT_BYTES - 10))
        one._read_prints(0)
        rank_says(one, 0, prints=b"y" * 100)
        assert one.play().prints == "[rank 0] " + "x" * (trial.OUTPUT_LIMIT_BYTES - 10) + "y" * 10


@pytest.mark.parametrize("value", [[1], [1, 2, 3], 2, (1, 2)])
def test_as_many_results_as_calls_in_a_list(value):
    with begun(1) as one:
        one.calls = 2
        with pytest.raises(BadFrame, match="2 results are wanted"):
            one._take(0, {"is": "return", "value": pack(value)[0]}, b"")
        assert one._take(0, returns(1, 2), b"") is False and one.results == [[1, 2]]


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


def test_once_all_are_ready_there_is_time_to_tell_them_what_to_run():
    with begun() as one:
        one.deadline = 0.0
        for rank in range(2):
            rank_says(one, rank, {"is": "ready"})
        one.wait_until_ready()
        assert 20 < one.deadline - time.monotonic() <= trial.PATIENCE_S
        assert all(end.fileno() == -1 for end in one.ends), "a rank that ends is heard"


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


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="no /proc")
def test_all_threads_are_looked_at():
    done = threading.Event()
    thread = threading.Thread(target=done.wait, daemon=True)
    thread.start()
    with begun() as one:
        one.pids = [os.getpid(), 2**22 + 1]
        told = one._threads()
    done.set()
    thread.join()
    assert len(told) >= 2 and all("State:" in text and "ctxt_switches" in text for text in told)


def test_what_is_shown_is_one_line_of_bounded_length():
    assert short(" a  b\n c\t") == "a b c" and short("x" * 200) == "x" * 200
    assert short("x" * 201) == "x" * 197 + "..." and plain("\t\n\x00\u202eé") == "\t\n??é"
    long = Failure("p", "m" * 3000, "two\nlines\x1b")
    assert len(long.message) == 2000 and long.detail == "two\nlines?"
    assert (str(Failure("p")), str(Failure("p", "m"))) == ("p", "p: m")
    assert long._render_traceback_()[1:] == ["two\nlines?"] and Failure("p", "m")._render_traceback_() == [
        "-- p: m"
    ]


def test_bytes_are_those_a_rank_sent_and_steps_the_longest_chain():
    passed = [Message(0, 1, 8, 1), Message(0, 2, 4, 1), Message(2, 1, 2, 2)]
    assert (Outcome([0, 0, 0], passed).sent_bytes, Outcome([0, 0, 0], passed).steps) == ([12, 0, 2], 2)
    assert (Outcome([0, 0]).sent_bytes, Outcome([0, 0]).steps) == ([0, 0], 0)


# ---- the wire of a rank ----------------------------------------------------------------------------------


class Recorded:
    """A line that answers every question with these bytes."""

    def __init__(self, answer=b""):
        self.sent, self.answer = [], answer

    def send(self, header, payload=b""):
        self.sent.append((header, payload))

    def receive(self):
        return {"is": "done", "op": self.sent[-1][0]["op"]}, self.answer


def test_a_message_is_asked_for_once_however_often_one_waits():
    line = Recorded(torch.tensor([3.0, 4.0]).numpy().tobytes())
    into = torch.zeros(2, 2)[:, 0]  # not contiguous: what arrives lands where it belongs
    operation = wire.Operation(wire.Wire(line), {"is": "receive"}, into=into)
    assert len(line.sent) == 1 and not into.any(), "data arrives when somebody waits"
    assert operation.wait() is True and operation.wait() is True
    assert into.tolist() == [3.0, 4.0]
    assert [header["is"] for header, _ in line.sent] == ["receive", "wait"]
    assert line.sent[1][0] == {"is": "wait", "op": 1, "alone": threading.active_count() == 1}


def test_a_rank_says_whether_another_of_its_threads_may_still_act():
    line, over = Recorded(), threading.Event()
    for alone in (threading.active_count() == 1, False):
        wire.Operation(wire.Wire(line), {"is": "barrier"}).wait()
        assert line.sent[-1][0]["alone"] == alone
        thread = threading.Thread(target=over.wait, daemon=True)
        thread.start()
    over.set()


def test_a_group_names_its_members_by_their_ranks_and_knows_no_tags():
    line = Recorded(bytes(8))
    group = wire.WireGroup(wire.Wire(line), 1, [4, 2, 7], "a name")
    x = torch.tensor([3.0, 4.0])
    group.send([x], 2)
    group.recv([x.clone()], 0)
    assert group.barrier().wait() and (group.rank(), group.size(), group.getBackendName()) == (1, 3, "judge")
    sent = {"is": "send", "peer": 7, "members": [4, 2, 7], "dtype": "float32", "shape": [2], "op": 1}
    assert line.sent[:2] == [(sent, x.numpy().tobytes()), (sent | {"is": "receive", "peer": 4, "op": 2}, b"")]
    assert line.sent[2][0] == {"is": "barrier", "members": [4, 2, 7], "op": 3}
    before = len(line.sent)
    for act in (group.send, group.recv):
        with pytest.raises(ValueError, match="^messages have no tags here: they arrive in the order"):
            act([x], 0, 1)
    assert group.send([torch.empty(0)], 0).wait() is True and len(line.sent) == before
    line.answer = torch.tensor([5.0, 6.0]).numpy().tobytes()
    assert group.fetch("weight", x).tolist() == [5.0, 6.0] and x.tolist() == [3.0, 4.0]
    assert line.sent[before][0] == {"is": "fetch", "name": "weight", "op": 4}


def test_questions_have_numbers_of_their_own_and_answers_find_them():
    line = Recorded()
    ours = wire.Wire(line)
    assert [ours.ask({"is": "send"}, b"x"), ours.ask({"is": "send"}, b"y")] == [1, 2]
    assert [(header["op"], payload) for header, payload in line.sent] == [(1, b"x"), (2, b"y")]
    ours.answers = {1: b"one"}
    line.answer = b"two"
    assert (ours.wait(2), ours.wait(1), ours.answers) == (b"two", b"one", {})


# ---- the kit's collectives -------------------------------------------------------------------------------


class Threads:
    """A group whose ranks are threads: what is sent waits in a queue for who receives it."""

    def __init__(self, rank, size, queues):
        self._rank, self._size, self.queues, self.sent = rank, size, queues, []

    def rank(self):
        return self._rank

    def size(self):
        return self._size

    def send(self, tensors, to):
        assert tensors[0].is_contiguous()
        self.sent.append((to, tensors[0].numel()))
        self.queues[self._rank, to].put(tensors[0].clone())
        return types.SimpleNamespace(wait=lambda: None)

    def recv(self, tensors, source):
        return types.SimpleNamespace(
            wait=lambda: tensors[0].copy_(self.queues[source, self._rank].get(timeout=20))
        )


def on_threads(fn, *inputs):
    """[fn(input, group) on each rank], and what each sent as (to, elements)."""
    size, queues = len(inputs), collections.defaultdict(queue.SimpleQueue)
    groups = [Threads(rank, size, queues) for rank in range(size)]
    with ThreadPoolExecutor(size) as pool:
        results = list(pool.map(fn, inputs, groups))
    assert all(one.empty() for one in queues.values())
    return results, [group.sent for group in groups]


XS = [torch.arange(6.0).view(3, 2) * 10**rank for rank in range(3)]


def test_a_ring_goes_forward_by_one_or_by_what_is_asked_and_a_tuple_stays_one():
    for shift, wanted in ((1, [2, 0, 1]), (-1, [1, 2, 0]), (2, [1, 2, 0]), (3, [0, 1, 2]), (0, [0, 1, 2])):
        results, sent = on_threads(lambda x, group: kit.rotate(x, group, shift), *XS)
        assert all(one.equal(XS[at]) for one, at in zip(results, wanted))
        assert sent == [[((rank + shift) % 3, 6)] * bool(shift % 3) for rank in range(3)]
    results, _ = on_threads(lambda x, group: kit.rotate((x, x.t()), group, async_op=True).wait(), *XS)
    assert [type(one) for one in results] == [tuple] * 3 and results[0][1].equal(XS[2].t())
    (same,), _ = on_threads(kit.rotate, XS[0])
    assert same.equal(XS[0]) and same.data_ptr() != XS[0].data_ptr(), "memory of its own"


def test_sums_and_maxima_in_rank_order_in_new_memory_or_in_place():
    total = XS[0] + XS[1] + XS[2]
    results, sent = on_threads(kit.all_reduce, *XS)
    assert all(one.equal(total) for one in results) and all(len(own) == 4 for own in sent)
    assert sum(n for own in sent for _, n in own) == 2 * 2 * 6
    signs = [XS[0] * (-1) ** rank - rank for rank in range(3)]
    results, _ = on_threads(lambda x, group: kit.all_reduce(x, group, op="max"), *signs)
    assert all(one.equal(torch.stack(signs).amax(0)) for one in results)
    mine = [x.clone() for x in XS]
    results, _ = on_threads(lambda x, group: kit.all_reduce(x, group, out=x), *mine)
    assert all(x.equal(total) and one.data_ptr() == x.data_ptr() for one, x in zip(results, mine))
    turned = [x.t() for x in XS]
    results, _ = on_threads(lambda x, group: kit.all_reduce(x, group, async_op=True).wait(), *turned)
    assert all(one.equal(total.t()) for one in results) and XS[1][2, 1] == 50, "nobody's own is written to"


def test_pieces_are_cut_along_the_first_dimension_and_arrive_in_rank_order():
    results, _ = on_threads(kit.all_gather, *XS)
    assert all(one.equal(torch.cat(XS)) for one in results)
    results, _ = on_threads(kit.reduce_scatter, *XS)
    assert torch.cat(results).equal(sum(XS)) and [len(one) for one in results] == [1] * 3
    results, _ = on_threads(kit.all_to_all, *XS)
    assert all(one.equal(torch.stack([x[rank] for x in XS])) for rank, one in enumerate(results))
    sizes = [[2, 0, 1], [0, 1, 2], [3, 0, 0]]

    def uneven(x, group):
        r = group.rank()
        return kit.all_to_all(x, group, send_sizes=sizes[r], receive_sizes=[own[r] for own in sizes])

    (first, second, third), _ = on_threads(uneven, *XS)
    assert first.equal(torch.cat([XS[0][:2], XS[2]])) and second.equal(XS[1][:1])
    assert third.equal(torch.cat([XS[0][2:], XS[1][1:]]))
    alone = Threads(0, 2, None)
    with pytest.raises(ValueError, match="^reduce_scatter: 3 rows do not divide by 2 ranks; pad them$"):
        kit.reduce_scatter(XS[0], alone)
    for sizes in ([1, 1], [2, 2], None):
        with pytest.raises(ValueError, match=r"^all_to_all: pieces of \[.*\] rows are not the 3 of x$"):
            kit.all_to_all(XS[0], alone, send_sizes=sizes)


def test_everybody_gets_the_source_in_memory_of_its_own():
    results, sent = on_threads(lambda x, group: kit.broadcast(x, 1, group), *XS)
    assert all(one.equal(XS[1]) and one.data_ptr() != XS[1].data_ptr() for one in results)
    assert sent == [[], [(0, 6), (2, 6)], []]


def test_collectives_of_a_group_follow_one_another_also_in_the_background(monkeypatch):
    monkeypatch.setattr(kit, "_lanes", {})
    first, second = Threads(0, 1, None), Threads(0, 1, None)
    order, gate = [], threading.Event()
    slow = kit._perform(lambda: gate.wait(20) and order.append("slow") or "slow", first, True)
    assert kit._perform(lambda: order.append("other") or 1, second, False) == 1, "another group goes on"
    assert kit._perform(lambda: "theirs", second, True).wait() == "theirs"
    threading.Timer(0.05, gate.set).start()
    assert kit._perform(lambda: order.append("quick") or "quick", first, False) == "quick"
    assert slow.wait() == "slow" and order == ["other", "slow", "quick"] and len(kit._lanes) == 2
    for lane in kit._lanes.values():
        lane.shutdown()


def test_the_server_is_told_what_to_hide_and_has_nothing_of_its_callers(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    started = []

    def popen(command, **how):
        started.append((command, how))
        raise OSError("no process")

    monkeypatch.setattr(judge.subprocess, "Popen", popen)
    for walls in (True, False):
        with pytest.raises(OSError, match="no process"):
            judge.Judge(walls).start()
    (command, how), (bare, _) = started
    assert command[1:4] == ["-P", "-s", "-c"] and how["start_new_session"] and how["cwd"] == "/"
    assert command[4].endswith(f", {[str(judge.PACKAGE), str(judge.EXERCISES)]!r}, True)") and bare[
        4
    ].endswith(", False)")
    assert (
        how["env"]["OMP_NUM_THREADS"] == "1"
        and not {"PYTHONPATH", "USER"} & how["env"].keys()
        and how["env"]["HOME"] == "/"
    )


# ---- what a check can ask --------------------------------------------------------------------------------


class Fake:
    def __init__(self, results=((7,),)):
        self.asked, self.results = [], [list(own) for own in results]

    def run(self, code, calls, **rules):
        self.asked.append((code, calls, rules))
        return Outcome(self.results)


GIVEN = Code(["def double(x): return 2 * x"], "def f(x): ...", ["def drive(x): ..."], ["f"])


def test_a_check_calls_an_answer_a_driver_or_what_is_given_and_nothing_else():
    fake = Fake([[7], [8]])
    with checks.judging(fake, GIVEN, 5.0):
        outcome = checks.run_on_ranks(Answer("f"), [1, (2, 3)], collectives="rotate", budget_bytes=9)
        checks.run_on_ranks(Answer("drive"), [1, 2])
        checks.run_on_ranks(Answer("double"), [1, 2])
        with pytest.raises(
            ValueError, match="^ranks cannot know g: no answer, given cell or driver defines it$"
        ):
            checks.run_on_ranks(Answer("g"), [1])
    assert outcome.results == [7, 8], "one call each: its result"
    (code, calls, rules), (driven, *_), (ours, *_) = fake.asked
    assert calls == [[(1,)], [(2, 3)]] and rules == {"budget_bytes": 9, "time_limit_s": 5.0}
    assert (code.call, code.collectives, code.answer) == ("f", "rotate", GIVEN.answer)
    assert (driven.call, driven.drivers, driven.answer) == ("drive", GIVEN.drivers, GIVEN.answer)
    assert (ours.call, ours.answer, ours.names, ours.drivers) == ("double", "", (), ()), "no answer is there"


def test_what_is_asked_alone_has_no_network_and_a_value_is_no_call():
    fake = Fake([[7, 8]])
    with checks.judging(fake, GIVEN, 5.0):
        assert checks.ask_each(Answer("f"), [(1,), (2, 3)]) == [7, 8] and checks.ask(Answer("f"), 1, 2) == 7
        assert checks.ask_each(5, [(1,), (2,)]) == [5, 5] and checks.ask("value") == "value"
    assert [calls for _, calls, _ in fake.asked] == [[[(1,), (2, 3)]], [[(1, 2)]]]
    assert all(rules["network"] is False for *_, rules in fake.asked)


def test_while_a_check_runs_there_is_one_thread_and_what_it_prints_is_dropped(capsys):
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(ZeroDivisionError), checks.judging(Fake(), GIVEN, 5.0):
            print("hidden")
            assert torch.get_num_threads() == 1 and checks._judging.get()[2] == 5.0
            1 / 0
        assert torch.get_num_threads() == 2 and checks._judging.get() is None
    finally:
        torch.set_num_threads(threads)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "actual, expected, atol, said",
    [
        (3, 3, 0, None),
        (3, 4, 0, "hint"),
        (3, 4, 1, None),
        (3, 5, 1, "hint"),
        (3.0, 3, 0, "a value of type int is wanted, not a value of type float; hint"),
        (True, 1, 0, "a value of type int is wanted, not a value of type bool; hint"),
        ((1, 2), [1, 2], 0, None),
        ([1, 2, 3], [1, 2], 0, "a list of 2 is wanted, not a value of type list; hint"),
        ([1, [2, 9]], [1, [2, 3]], 0, r"hint \(seen at rank 1\)"),
        ([[9], [3]], [[2], [3]], 0, r"hint \(seen at rank 0\)"),
        (
            torch.ones(2),
            torch.ones(2, 1),
            0,
            r"a float32 tensor of shape \[2, 1\] is wanted, not a float32 tensor",
        ),
        (torch.ones(2) + 0.5, torch.ones(2), 0.5, None),
        (torch.tensor([1.0, 1.6]), torch.ones(2), 0.5, "hint"),
        (torch.tensor([1.0, 0.4]), torch.ones(2), 0.5, "hint"),
        (torch.tensor([1.0, torch.nan]), torch.ones(2), 0.5, "hint"),
    ],
)
def test_equal_means_of_one_kind_and_within_the_bound(actual, expected, atol, said):
    if said is None:
        return expect_equal(actual, expected, "p", "hint", atol)
    with pytest.raises(Failure, match=f"^p: {said}") as error:
        expect_equal(actual, expected, "p", "hint", atol)
    assert error.value.property == "p"


def test_what_is_drawn_is_in_its_range():
    draw = Draw("a seed")
    assert {draw.integer(2, 4) for _ in range(99)} == {2, 3, 4}
    several = draw.several(range(5), 5)
    assert sorted(several) == list(range(5)) and draw.several("ab", 1)[0] in "ab"
    assert any(draw.several(range(9), 9) != list(range(9)) for _ in range(3))
    exact, few = draw.exact(2000), draw.few(4000)
    assert exact.dtype == few.dtype == torch.float64 and exact.abs().max() < 8 and few.abs().max() < 64
    assert exact.min() < -7 and exact.max() > 7 and few.min() < -63 and few.max() > 63
    assert ((exact * 2.0**45) % 2 == 1).all(), "the last digit is there"
    assert torch.equal(few, few.bfloat16().double()) or torch.equal(few, few.half().double())
    shares = [draw.mask(100).double().mean().item() for _ in range(60)]
    assert min(shares) < 0.35 and max(shares) > 0.75 and draw.mask(3, 4).shape == (3, 4)
    real = draw.real(4000)
    assert (
        abs(real.mean()) < 0.1
        and abs(real.std() - 1) < 0.1
        and draw.real(2, dtype=torch.float32).dtype == torch.float32
    )


# ---- the judge -------------------------------------------------------------------------------------------


def test_what_ranks_are_told_and_may_use(monkeypatch):
    """The server is not there; what would go to it and to the ranks is looked at."""
    told, spawned, ours = [], [], judge.Judge()
    monkeypatch.setattr(ours, "start", lambda: None)
    ours.users, ours.threads, ours.control = [61184 + rank for rank in range(16)], 128, None
    monkeypatch.setattr(
        ours, "_request", lambda request, ends=(): spawned.append((request, list(ends))) or {"ranks": [8, 9]}
    )
    monkeypatch.setattr(judge, "virtual_memory", lambda: argparse.Namespace(available=3 << 30))
    monkeypatch.setattr(Trial, "wait_until_ready", lambda self: None)
    monkeypatch.setattr(
        Trial, "tell", lambda self, rank, header, payload: told.append((rank, header, payload))
    )
    seen = {}

    def play(self, calls):
        seen.update(pids=self.pids, calls=calls, held=self.network.most_held_bytes, limit_s=self.time_limit_s)
        seen.update(secrets=self.network.secrets)
        return "the outcome"

    monkeypatch.setattr(Trial, "play", play)
    code = Code(answer="x", call="f", collectives="rotate", pickled=b"fn")
    run = dict(
        autograd=False,
        secrets=[{"w": torch.ones(2, dtype=torch.int8)}, {}],
        time_limit_s=2.0,
        budget_bytes=50,
    )
    assert ours.run(code, [[(1,), (2,)], [(3,), (4,)]], **run) == "the outcome"
    assert seen == dict(pids=[8, 9], calls=2, held=100, limit_s=2.0, secrets=[{"w": b"\1\1"}, {}])
    (spawn, ends), (swept, _) = spawned
    assert spawn["spawn"] == [61184, 61185] and len(ends) == 4 and swept == {}
    assert spawn["limits"] == {"DATA": 1 << 29, "CPU": 18, "NPROC": 128}
    assert [(rank, header["is"], payload) for rank, header, payload in told] == [
        (0, "start", b"fn"), (0, "inputs", b""), (1, "start", b"fn"), (1, "inputs", b"")
    ]  # fmt: skip
    start = told[2][1]
    wanted = dict(
        rank=1, ranks=2, network=True, no_autograd=True, budget_bytes=50, call="f", answer="x", pickled=None
    )
    assert {key: start[key] for key in wanted} == wanted and start["time_limit_s"] == pytest.approx(1.7)
    assert start["collectives"] == kit.source("rotate") and told[3][1]["value"] == pack([(3,), (4,)])[0]
    ours.run(code, [[()]] * 16, network=False, time_limit_s=0.2)
    spawn = spawned[2][0]
    assert spawn["limits"]["DATA"] == (3 << 29) // 16 and spawn["limits"]["CPU"] == 10
    start = told[4][1]
    assert (start["network"], start["no_autograd"], start["budget_bytes"]) == (False, False, None)
    assert start["time_limit_s"] == 0.1 and seen["held"] == network.HELD_LIMIT_BYTES


@pytest.mark.parametrize(
    "error, closed", [(Failure("p"), False), (KeyboardInterrupt(), True), (Broken(), True)]
)
def test_after_a_failure_the_server_stays_and_after_anything_else_it_is_ended(error, closed, monkeypatch):
    ours, done = judge.Judge(), []
    monkeypatch.setattr(ours, "start", lambda: None)
    ours.users, ours.threads = [None], 1
    monkeypatch.setattr(ours, "close", lambda: done.append("closed"))
    monkeypatch.setattr(
        ours, "_request", lambda request, ends=(): done.append(bool(request)) or {"ranks": []}
    )
    monkeypatch.setattr(Trial, "wait_until_ready", lambda self: (_ for _ in ()).throw(error))
    with pytest.raises(type(error)):
        ours.run(Code(call="f"), [[()]])
    assert done == [True, False, *["closed"] * closed], "its ranks are ended however the run ends"


@pytest.mark.parametrize("late", [False, True])
def test_a_server_is_waited_for_then_killed_and_its_last_line_is_told(late):
    ours, done = judge.Judge(), []
    assert ours.close() == "", "there is none"

    class Server:
        def communicate(self, timeout=None):
            done.append(timeout)
            if late and timeout:
                raise subprocess.TimeoutExpired("server", timeout)
            return None, "Traceback\n  line\nMemoryError: no memory\n\n"

        def kill(self):
            done.append("killed")

    class Open:
        def close(self):
            done.append("closed")

    ours.server, ours.words, ours.control = Server(), Open(), Open()
    assert ours.close() == "MemoryError: no memory" and ours.server is None
    assert done == ["closed", "closed", 20, *(["killed", None] if late else [])]


# ---- reports ---------------------------------------------------------------------------------------------

RESULTS = [
    Result("First", "a-1", "It adds", 2, 2),
    Result("First", "a-2", "It sends", 3, 0, "bytes", "bytes: too many", "line 1\nline 2"),
    Result("Second", "b-1", "It waits", 5, 5),
]


def test_a_report_is_a_table_of_tasks_checks_and_points():
    report = Report("00_start", RESULTS, "", "5eed", 1.26, "work/00.ipynb", "  (a note)")
    assert (report.earned, report.points) == (7, 10)
    assert report.table() == (
        "work/00.ipynb  (a note)\n\n  First\n   2/2  ok  It adds\n   0/3  --  It sends\n            bytes: too many\n"
        "\n  Second\n   5/5  ok  It waits\n\ntotal 7/10 in 1.3 s  (seed 5eed)"
    )
    assert "            | line 1\n            | line 2\n" in report.table(detail=True)
    bare = Report("00_start", [], "no seccomp", "s", 0.0)
    assert bare.table().splitlines()[0] == "00_start"
    assert bare.table().endswith("\na self-check, not a grade: answers ran without walls, because no seccomp")


def test_all_reports_in_one_table_with_a_sum():
    reports = [
        Report("00_start", RESULTS, "", "s", 1.0),
        Report("01_next", RESULTS[2:], "why", "s", 1.0, "", " (n)"),
    ]
    assert Grades(reports).table().splitlines() == [
        "  7/10  00_start",
        "  5/5  01_next (n)",
        " 12/15  in all; `minitrain grade 00` shows a chapter check by check",
        "a self-check, not a grade: answers ran without walls, because why",
    ]
    assert Grades([]).table().startswith("  0/0  in all")


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "many", ""])
def test_how_often_is_a_number_from_1(text):
    with pytest.raises(argparse.ArgumentTypeError, match=f"'{text}': use a whole number, 1 or more"):
        exercises.at_least_one(text)
    assert exercises.at_least_one("1") == 1


def test_answers_that_know_nothing_have_the_names_of_the_reference():
    source = "import torch\ndef f(a, b): return 1\nclass C:\n    def __init__(self, x): ...\n    def g(self): ...\nN = 4"
    made = {}
    exec(exercises.with_bodies(source, "return 'body'"), made)
    assert made["f"](1, x=2) == "body" and made["C"](1, 2).g(3) == "body" and made["N"] is None
    assert "torch" not in made


CHAPTER_CELLS = [
    book.Cell("text", "", "## The task"),
    book.Cell("answer", "a", "### BEGIN SOLUTION\nx = 1\n### END SOLUTION\n"),
    book.Cell("check", "a-1", "# It is one", {"points": "1"}),
    book.Cell("check", "a-2", "# It is two", {"points": "2"}),
]


class Judged:
    missing = ""


def test_prove_names_what_is_wrong_with_a_chapter(monkeypatch):
    """Of grading that is played here: who gets points decides `verdicts`."""
    wrong = [
        book.Cell("wrong", "a", "w = 1", {"fails": "bytes", "why": "sends twice"}),
        book.Cell("wrong", "a", "w = 2", {"fails": "bytes", "why": "walks", "around": "import"}),
    ]
    monkeypatch.setattr(book.Chapter, "wrong", wrong)
    of = book.Chapter("07", book.Path("07_x.py"), CHAPTER_CELLS)
    seeds = []

    def failure_in(chapter, check, judge, code, limit_s, seed):
        seeds.append(seed)
        return verdicts.get((code.answer.strip(), check.name))

    monkeypatch.setattr(exercises, "failure_in", failure_in)
    solution, bytes_fail = of.tasks[0].answer.source.strip(), Failure("bytes", "m")
    stub = exercises.assignment.stub_of(of.tasks[0].answer.source).strip()
    attempted = {(stub, name): Failure(trial.NOT_ATTEMPTED) for name in ("a-1", "a-2")}
    caught = {("w = 1", "a-2"): bytes_fail, ("w = 2", "a-1"): bytes_fail, ("w = 2", "a-2"): bytes_fail}
    verdicts = attempted | caught
    few = "07: a has 2 wrong solutions; write at least three"
    assert exercises.prove(of, Judged, "9") == [few] and set(seeds) == {"9"}
    monkeypatch.setattr(book.Chapter, "wrong", [*wrong, wrong[0]])
    assert exercises.prove(of, Judged) == []
    verdicts = attempted | caught | {(stub, "a-1"): Failure("no error", "x")}
    assert exercises.prove(of, Judged) == [
        f"07: a stub gets 0 points, or another message than {trial.NOT_ATTEMPTED!r}"
    ]
    verdicts = attempted | caught | {(stub, "a-2"): None}
    assert "07: a stub gets 2 points" in exercises.prove(of, Judged)[0]
    verdicts = attempted | caught | {(solution, "a-2"): Failure("sum", "m", "d")}
    assert exercises.prove(of, Judged) == ["07: the solution fails a-2: sum: m d"]
    verdicts = attempted | caught | {("w = 1", "a-1"): Failure("sum", "m")}
    assert exercises.prove(of, Judged) == ["07: a, sends twice: found 'sum', not 'bytes'"] * 2, (
        "the first that fails speaks"
    )
    verdicts = attempted | caught | {("w = 2", "a-2"): None}
    assert exercises.prove(of, Judged) == ["07: a, walks: earns 2 points"]
    verdicts = attempted
    assert exercises.prove(of, Judged)[:1] == ["07: a, sends twice: found 'nothing', not 'bytes'"]


def test_the_command_proves_every_draw_and_ends_with_1_for_a_fault(monkeypatch, capsys):
    monkeypatch.setattr(exercises, "Judge", lambda: exercises.nullcontext(Judged))
    monkeypatch.setattr(
        exercises, "prove", lambda of, judge, seed: [f"{of.number} is weak"] if seed == "1" else []
    )
    assert exercises.main(["prove", "00", "--draws", "1"]) == 0 and capsys.readouterr().out == "prove: good\n"
    assert exercises.main(["prove", "0", "--draws", "3"]) == 1
    assert capsys.readouterr().out == "draw 1: 00 is weak\n"
    asked = []
    monkeypatch.setattr(exercises, "prove", lambda of, judge, seed: asked.append((of.number, seed)) or [])
    assert exercises.main(["prove"]) == 0
    assert asked == [(number, "0") for number in book.chapters()]
    monkeypatch.setattr(exercises, "attack", lambda of, judge: (10, [f"{of.number} earns"]))
    monkeypatch.setattr(exercises, "wrong_ones", lambda of, wrong, judge: [f"{len(wrong)} walk"])
    around = sum("around" in cell.attributes for cell in book.chapter("00").wrong)
    assert exercises.main(["attack", "00"]) == 1
    told = f"{10 + around} answers tried (10 know nothing of their task, {around} walk around it),\n{8 + around} held"
    assert capsys.readouterr().out.endswith(f"{told}\n00 earns\n{around} walk\n")
    monkeypatch.setattr(exercises.assignment, "build", lambda: [])
    assert exercises.main(["build"]) == 0
    assert capsys.readouterr().out == "all notebooks are as they should be\nbuild: good\n"
    monkeypatch.setattr(exercises.assignment, "build", lambda: ["a.ipynb", "b.ipynb"])
    exercises.main(["build"])
    assert capsys.readouterr().out == "wrote a.ipynb\nwrote b.ipynb\nbuild: good\n"


def test_a_report_says_which_file_it_is_of_and_what_it_is_not(tmp_path, monkeypatch):
    of = book.chapter("00")
    for folder in ("exercises", "work/exercises"):
        (tmp_path / folder).mkdir(parents=True)
    ours, copy = tmp_path / "exercises" / of.student.name, tmp_path / "work/exercises" / of.student.name
    stub = exercises.assignment.notebooks(of)[of.student]
    edited = stub.replace("# YOUR CODE HERE", "# MY CODE HERE", 1)
    monkeypatch.setattr(book, "EXERCISES", tmp_path / "exercises")
    monkeypatch.setattr(exercises, "ROOT", tmp_path)
    monkeypatch.setattr(exercises, "written", lambda original: copy if copy.exists() else original)
    monkeypatch.setattr(book, "chapter", lambda number: of)
    graded = []

    def grade_answers(of, answers, judge, seed):
        graded.append((answers, seed))
        return Report("00", [], "", seed, 0.0)

    monkeypatch.setattr(exercises, "grade_answers", grade_answers)

    def said(path=None, judge=Judged, seed="5eed"):
        report = exercises.grade("00", path, judge=judge, seed=seed)
        return report.file, report.note

    ours.write_text(edited)
    assert said() == (f"exercises/{of.student.name}", "") and graded[-1][1] == "5eed"
    answers = graded[-1][0]
    assert sum("MY CODE" in text for text in answers.values()) == 1 and len(answers) > len(of.tasks)
    copy.write_text(stub)
    hint = f"  (answers in exercises/{of.student.name} are not graded; --file names it)"
    assert said() == (f"work/exercises/{of.student.name}", hint), "who has written into the wrong one is told"
    assert said(ours) == (f"exercises/{of.student.name}", "") and said(str(copy))[1] == hint
    ours.write_text(stub)
    assert said() == (f"work/exercises/{of.student.name}", "")
    copy.write_text(
        stub.replace('"points": 2', '"points": 3', 1).replace('"checksum": "', '"checksum": "0', 99)
    )
    assert said()[1] == "  (its checks are not those of this version: graded with this version's)"
    elsewhere = tmp_path.parent / f"{tmp_path.name}.ipynb"
    elsewhere.write_text(stub)
    assert said(elsewhere) == (str(elsewhere), "")


def test_a_check_finds_what_read_only_cells_define():
    cells = [book.Cell(role, role, f"{role} = 1", {}) for role in book.LOCKED]
    check = book.Cell(
        "check", "c", "assert given + driver + judge == 3 and __name__ == 'exercise'", {"points": "1"}
    )
    of = book.Chapter("99", book.Path("99.py"), [*cells, check])
    assert exercises.failure_in(of, check, None, Code(), 1.0, "a seed") is None
    for source, error in (
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("x.y", "NameError: name 'x' is not defined"),
    ):
        failure = exercises.failure_in(of, book.Cell("check", "c", source, {}), None, Code(), 1.0, "a seed")
        assert str(failure) == f"data: the check cannot read what came back: {error}"
    broken = book.Cell("check", "c", "from minitrain.course.grading.trial import Broken\nraise Broken", {})
    with pytest.raises(Broken):
        exercises.failure_in(of, broken, None, Code(), 1.0, "a seed")


def test_attack_tells_who_earned_something(monkeypatch):
    of = book.Chapter("07", book.Path("07_x.py"), CHAPTER_CELLS)
    attempts = [
        book.Cell("wrong", "any", f"# {n}", {"body": "return 1", "why": f"way {n}"}) for n in range(3)
    ]
    monkeypatch.setattr(book, "read_cells", lambda path: attempts)
    monkeypatch.setattr(exercises.pkgutil, "walk_packages", lambda *_: [])
    seen = []

    def failure_in(chapter, check, judge, code, limit_s, seed):
        seen.append((code.answer.splitlines()[-1], seed))
        return None if (code.answer.endswith("# 1"), check.name) == (True, "a-2") else Failure("p")

    monkeypatch.setattr(exercises, "failure_in", failure_in)
    assert exercises.attack(of, Judged, "4") == (3, ["07: a, way 1: earns 2 points"])
    assert seen == [(f"# {n}", "4") for n in range(3) for _ in range(2)]


@pytest.mark.parametrize(
    "facts, sealed",
    [
        ({"grade": True, "solution": True, "locked": False, "points": 2}, "TrueTrueFalse"),
        ({"grade": False, "solution": False, "locked": True}, "FalseFalseTrue"),
        ({"grade": True, "solution": False, "locked": False, "points": 3}, "TrueFalseTrue"),
        ({"grade": False, "solution": True, "locked": True}, "FalseTrueFalse"),
        ({}, "FalseFalseFalse"),
        ({"grade": True, "points": "?"}, "TrueFalseTrue"),
    ],
)
def test_a_seal_is_of_source_type_role_name_and_points(facts, sealed):
    """What nbgrader hashes, one part after the other."""
    cell = {"source": "x = 1", "cell_type": "code", "metadata": {"nbgrader": {"grade_id": "a", **facts}}}
    points = {2: "2.0", 3: "3.0", "?": "?"}.get(facts.get("points"), "")
    parts = f"x = 1code{sealed}a{points}"
    assert exercises.assignment.checksum(cell) == exercises.assignment.hashlib.md5(parts.encode()).hexdigest()


# ---- frames ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "header, payload, fits", [(1 << 20, 5, True), ((1 << 20) + 1, 0, False), (9, 100, True), (9, 101, False)]
)
def test_what_announces_too_much_is_refused_before_it_arrives(header, payload, fits):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        line = Line(ours, 100)
        theirs.sendall(frames.SIZES.pack(header, payload))
        if fits:
            assert list(line.arrived()) == [], "it waits for the rest"
        else:
            with pytest.raises(BadFrame, match="the header or the payload is too long"):
                list(line.arrived())
    assert begun(1).lines[0].most == 1 << 26, "a rank's results are at most 64 MB"


def test_frames_are_found_wherever_the_stream_is_cut():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender, line = Line(theirs), Line(ours)
        told = [({"is": "a"}, b""), ({"is": "b", "n": 1}, b"12345"), ({"is": "c"}, b"\0" * 3)]
        whole = b""
        for header, payload in told:
            sender.send(header, payload)
            whole += ours.recv(999, socket.MSG_WAITALL | socket.MSG_DONTWAIT)
        assert line.sock is ours
        heard = []
        for at in range(0, len(whole), 7):
            theirs.sendall(whole[at : at + 7])
            heard += line.arrived()
        assert heard == told
        theirs.sendall(whole)
        assert [line.receive() for _ in told] == told
        theirs.close()
        assert line.receive() is None
        with pytest.raises(ConnectionResetError):
            next(line.arrived())


@pytest.mark.parametrize("text", [b"7", b"[]", b"{}", b'"is"', b'{"as": 1}', b"{", b"\xff"])
def test_a_header_is_an_object_that_says_what_it_is(text):
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(BadFrame, match="the header is not a JSON object with 'is'"):
        theirs.sendall(frames.SIZES.pack(len(text), 0) + text)
        Line(ours).receive()


@pytest.mark.parametrize(
    "dtype, shape, size",
    [
        ("float64", [2, 3], 48),
        ("bool", [5], 5),
        ("complex64", [], 8),
        ("int8", [1] * 16, 1),
        ("int8", [1] * 17, None),
        ("int8", [(1 << 40) - 1], (1 << 40) - 1),
        ("int8", [1 << 40], None),
        ("int8", [-1], None),
        ("int8", [True], None),
        ("int8", (1,), None),
        ("float8_e4m3fn", [1], None),
        (["int8"], [1], None),
        (None, None, None),
    ],
)
def test_the_bytes_of_a_tensor_somebody_announced(dtype, shape, size):
    if size is None:
        with pytest.raises(BadFrame, match="not a tensor's dtype and shape"):
            frames.tensor_size(dtype, shape)
    else:
        assert frames.tensor_size(dtype, shape) == size


@pytest.mark.parametrize(
    "tree, payload, said",
    [
        ({"tensor": ["int8", [2]]}, b"a", "a tensor's shape and bytes disagree"),
        ({"tensor": ["int8", [2]]}, b"abc", "bytes are left over"),
        ({"list": [{"tensor": ["int8", [1]]}]}, b"ab", "bytes are left over"),
        ({"tensor": ["int8", [0, 1 << 39, 1 << 39]]}, b"", "an empty tensor of an absurd shape"),
        ({"value": 1, "list": []}, b"", "not a packed value"),
        ({"value": [1]}, b"", "not a packed value"),
        ({"tensor": ["int8"]}, b"", "not a packed value"),
        ([], b"", "not a packed value"),
    ],
)
def test_what_pack_does_not_write_is_no_value(tree, payload, said):
    with pytest.raises(BadFrame, match=f"^{said}$"):
        frames.unpack(tree, payload)


def test_tensors_of_a_value_are_in_the_order_of_the_tree_and_in_memory_of_their_own():
    x = torch.arange(6.0).view(2, 3)
    tree, payload = pack({"b": x.t(), 3: [x[0], (x[:, 1], torch.empty(0))]})
    assert payload == b"".join(one.contiguous().numpy().tobytes() for one in (x.t(), x[0], x[:, 1]))
    value = frames.unpack(tree, payload)
    assert list(value) == ["b", "3"] and value["b"].equal(x.t()) and type(value["3"][1]) is tuple
    value["b"].add_(1)
    assert value["3"][0].equal(x[0]) and value["3"][1][0].equal(x[:, 1]) and value["3"][1][1].shape == (0,)
    with pytest.raises(frames.NotData, match="^a set$"):
        pack([{1}])
    with pytest.raises(frames.NotData, match="^a torch.float8_e4m3fn tensor$"):
        pack(torch.ones(1).to(torch.float8_e4m3fn))


# ---- what a rank says of an error ------------------------------------------------------------------------

ERRORS = [
    ("x = 1\ndef f(:", "no error", r"rank 2 raised SyntaxError: .* \(line 2: def f\(:\)"),
    ("x = 1\nraise MemoryError", "memory limit", r"rank 2 asked for more memory than it may have \(line 2: raise MemoryError\)"),
    ("raise RuntimeError('DefaultCPUAllocator: can\\'t allocate memory: you')", "memory limit", "rank 2 asked for more .*"),
    ("import minitrain.launch", "own work", r"this task asks you to write it yourself: it imports minitrain.launch \(line 1: .*\)"),
    ("import nothing_like_it", "no error", "rank 2 raised ModuleNotFoundError: No module named 'nothing_like_it' .*"),
    ("raise NotListed('calls all_gather')", "own work", "this task asks .* yourself: it calls all_gather .*"),
    ("raise NotData('a set')", "data", "rank 2 returned a set; return tensors, numbers, text, or lists of them"),
    ("raise SystemExit(3)", "no error", r"rank 2 raised SystemExit: 3 \(line 1: raise SystemExit\(3\)\)"),
    ("raise ValueError('x' * 300)", "no error", f"rank 2 raised ValueError: {'x' * 200} .*"),
    (f"raise ValueError({'y' * 300!r})", "no error", f"rank 2 .* \\(line 1: raise ValueError\\('{'y' * 182}\\)"),
    ("raise NotImplementedError", "not attempted yet", ""),
]  # fmt: skip


@pytest.mark.parametrize("answer, property, said", ERRORS)
def test_an_error_is_told_by_the_rule_it_breaks(answer, property, said, monkeypatch):
    class Nowhere:
        def find_spec(self, name, path=None, target=None):
            if name.startswith("minitrain.launch"):
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(sys, "meta_path", [Nowhere(), *sys.meta_path])
    monkeypatch.delitem(sys.modules, "minitrain.launch", raising=False)
    names = {"NotListed": of_an_answer.NotListed, "NotData": frames.NotData}
    with pytest.raises(BaseException) as error:
        of_an_answer.run_cells([answer], None) if "def f(:" in answer else run_as_answer(answer, names)
    told = of_an_answer.described(error.value, 2)
    assert told["is"] == "raise" and told["property"] == property and told["property"] in trial.TOLD
    assert re.fullmatch(said, told["message"]), told["message"]
    assert "inside/rank.py" not in told["trace"] and len(told["trace"]) <= 8000
    assert bool(told["trace"]) == (property != "not attempted yet")


def run_as_answer(answer: str, names: dict) -> None:
    of_an_answer.remember(of_an_answer.CELL, answer)
    exec(compile(answer, of_an_answer.CELL, "exec"), names)


def test_cells_run_in_one_namespace_and_names_of_the_answer_are_there_from_the_start():
    assert of_an_answer.run_cells(["a = 1", "b = a + 1\nc = __name__"])["b"] == 2
    assert of_an_answer.run_cells(["a = f + 1", "f = 0"], {"f": 5}) | {} == of_an_answer.run_cells(
        ["a = f + 1"], {"f": 5}
    )
    with pytest.raises(ZeroDivisionError) as error:
        of_an_answer.run_cells(["x = 0", "def f():\n    1 / x\nf()"])
    assert [str(one.path) for one in error.traceback][-2:] == ["<your answer>"] * 2
    with pytest.raises(ZeroDivisionError) as error:
        of_an_answer.run_cells(["x = 0", "1 / x"], {})
    assert error.traceback[-1].path == "<given cell 2>"


def test_of_an_answer_what_the_task_asks_for_and_drivers_around_it():
    start = dict(
        given=["def double(x): return 2 * x"],
        answer="def f(x): return double(x)\ndef g(x): return 0",
        names=["f"],
    )
    start |= dict(drivers=["def drive(x): return double(f(x))\ndef seen(): return 'g' in globals()"])
    assert (
        of_an_answer.defined(start | {"call": "f"})(3) == 6
        and of_an_answer.defined(start | {"call": "drive"})(3) == 12
    )
    assert of_an_answer.defined(start | {"call": "seen"})() is False, (
        "what else an answer defines stays with it"
    )
    assert of_an_answer.defined(start | {"call": "double", "names": []})(4) == 8, (
        "no answer runs where none is asked for"
    )
    with pytest.raises(NameError, match="^the answer cell defines no h$"):
        of_an_answer.defined(start | {"call": "f", "names": ["f", "h"]})
