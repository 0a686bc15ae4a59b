"""The rank that is named is the one at fault where several could be: ranks of a group are not the ranks of the launch,
many calls are on their way, and names differ only at their ends."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from minitrain import collectives, launch
from minitrain.ranks.collectives import CollectiveMismatch, call_log
from minitrain.ranks.collectives.call_log import LoggedCall
from minitrain.ranks.launch import local, report

LONG = "layers.11.attention.projections.of.queries.and.of.keys"


def line_of(fn, offset: int) -> str:
    return f"{os.path.basename(__file__)}:{fn.__code__.co_firstlineno + offset}"


# ---- checked mode in a group whose ranks 0, 1, 2 are 1, 2, 3 of the launch --------------------------------


def odd_one(rank, group):
    return collectives.all_reduce(torch.ones(5 if rank == 2 else 4), group)


def odd_message(rank, group):
    if rank == 3:
        return collectives.receive(torch.empty(7), 1, group)  # from the group's rank 1
    if rank == 2:
        collectives.send(torch.ones(4), 2, group, async_op=True)


def odd_rows(rank, group):
    expected = [1 if other == rank else 2 for other in (1, 2, 3)]
    return collectives.all_to_all(torch.ones(3), group, send_sizes=[1, 1, 1], receive_sizes=expected)


def odd_source(rank, group):
    return collectives.broadcast(torch.ones(4), 0 if rank == 3 else 1, group)


def alike_but_for_the_end(rank, group):
    return collectives.all_reduce(torch.ones(4), group, name=f"{LONG}.{'bias' if rank == 3 else 'weight'}")


def alike_to_the_end(rank, group):
    return collectives.all_reduce(torch.ones(4), group, name=f"{LONG}.weight")[0].item()


PROGRAMS = [odd_one, odd_message, odd_rows, odd_source, alike_but_for_the_end, alike_to_the_end]


def what_is_said():
    rank, said = dist.get_rank(), []
    for program in PROGRAMS:
        group = dist.new_group([1, 2, 3])
        try:
            said.append(program(rank, group) if rank else None)
        except CollectiveMismatch as error:
            said.append(str(error))
    return said


def test_checked_mode_names_ranks_of_the_launch():
    _, *members = launch.run(what_is_said, ranks=4, checked=True)
    for rank, (odd, message, rows, source, end, same) in enumerate(members, 1):
        at = line_of(odd_one, 1)
        assert f"rank 2 calls all_reduce(float32[5]) at {at}, others all_reduce(float32[4]) at {at}" in odd
        first = next(other for other in (1, 2, 3) if other != rank)
        assert f"rank {first} sends 1 elements at" in rows and "receive_sizes asks for 2" in rows
        assert "rank 3 calls broadcast(float32[4], source=0) at" in source, "source as it was given"
        assert "others broadcast(float32[4], source=1) at" in source
        assert f"rank 3 calls all_reduce(float32[4]) named '{LONG[:38]}" in end and same == 3
        three, others = end.split(", others ")
        assert three.split("named ")[1] != others.split("named ")[1], "the names that are shown differ"
        assert (message is not None) == (rank == 3)
    assert "message #0 from rank 2: it sends float32[4]" in members[2][1]
    assert "this rank expects float32[7]" in members[2][1]


# ---- a hang: many calls on their way ---------------------------------------------------------------------


def behind():
    """Ranks 1 and 3 have two calls on their way in a group of 1, 2 and 3, rank 2 has not begun the first of these;
    rank 0 has nothing to do with it."""
    rank, group = dist.get_rank(), dist.new_group([1, 2, 3])
    collectives.all_reduce(torch.ones(4), collectives.world())
    if rank == 0:
        return
    for _ in range(2):
        collectives.all_reduce(torch.ones(4), group)  # two that are done
    if rank == 2:
        time.sleep(1000)
    first = collectives.all_reduce(torch.ones(4), group, async_op=True)
    second = collectives.all_gather(torch.ones(4), group, async_op=True)
    second.wait(), first.wait()


def test_a_hang_names_the_oldest_call_that_is_not_done_and_the_rank_that_is_missing_there():
    with pytest.raises(launch.LaunchTimeout) as error:
        launch.run(behind, ranks=4, timeout_s=2)
    said = str(error.value)
    assert f"rank 2 stands at {line_of(behind, 10)}, in no collective" in said, said
    assert "ranks 1, 3 wait in all_reduce #2" in said and f"({line_of(behind, 11)})" in said, said
    assert "rank 0 returned from fn" in said
    assert error.value.ranks == (2,), "who is no member of the group is not waited for"


def killed_between_calls():
    """Rank 1 has done two calls and dies; others are in a third."""
    rank, group = dist.get_rank(), dist.new_group([1, 2])
    if rank == 0:
        time.sleep(1000)
    collectives.all_reduce(torch.ones(4), group)
    collectives.all_gather(torch.ones(4), group)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    collectives.all_reduce(torch.ones(4), group)


def test_a_rank_that_dies_is_named_with_its_last_call():
    with pytest.raises(launch.RankError) as error:
        launch.run(killed_between_calls, ranks=3)
    assert error.value.ranks == (1,)
    assert f"; last collective: all_gather #1 ({line_of(killed_between_calls, 6)})" in str(error.value)


# ---- the report alone ------------------------------------------------------------------------------------


def waits(seq, axis="dp", members="0-3"):
    return report.Stuck(f"wait{{s}} in all_reduce #{seq} of {axis} {members}", True, (axis, members, ""), seq)


def blamed(*stuck) -> tuple:
    return report.hang(60, dict(enumerate(stuck)), {}, {}).ranks


STANDS = report.Stuck("stand{s} at x.py:3, in no collective", False)


def test_who_is_behind_is_asked_group_by_group():
    left, right = ("tp", "0-1"), ("tp", "2-3")
    assert blamed(waits(9, *left), waits(9, *left), waits(3, *right), waits(4, *right)) == (2,)
    assert blamed(waits(8, *left), waits(9, *left), waits(3, *right), waits(2, *right)) == (0, 3)
    assert blamed(waits(5, *left), waits(5, *left), waits(5, *right), waits(5, *right)) == (0, 1, 2, 3)
    assert blamed(waits(5, *left), waits(4, *left), STANDS, waits(5, *right)) == (2,), "others wait for it"


def test_who_is_waited_for_is_a_member():
    assert blamed(STANDS, waits(1, "tp", "1-3"), STANDS, waits(1, "tp", "1-3")) == (2,)
    assert blamed(STANDS, waits(1, "tp", "1,3"), STANDS, waits(2, "tp", "1,3")) == (1,)
    assert blamed(STANDS, waits(1, "", "1,3"), STANDS, report.Stuck("wait{s} in barrier", True)) == (0, 2)
    assert blamed(report.RETURNED, STANDS, report.RETURNED, STANDS) == (1, 3), "nobody waits: those not done"


def call(order, done=True, queued=False, **more):
    fields = dict(seq=order, op="all_reduce", axis="dp", members="0-3", shape="4", dtype="float32", group="")
    fields |= (
        dict(order=order, done=done, queued=queued, payload_bytes=16, peer=None, name=None, site="train.py:7")
        | more
    )
    return LoggedCall(**{name: fields[name] for name in LoggedCall._fields})


def stack(*frames) -> str:
    """As faulthandler writes it, innermost first."""
    lines = [f'  File "{file}", line {line} in {function}' for file, line, function in frames]
    return "\n".join(["Current thread 0x1 (most recent call first):", *lines, FN, ""])


FN = f'  File "{report.PACKAGE}ranks/launch/ranks.py", line 200 in live'
IN_OURS = (report.COLLECTIVES + "transport.py", 113, "wait_all")
IN_TORCH = (report.LIBRARIES[0] + report.C10D_FILE, 4000, "barrier")


@pytest.mark.parametrize(
    "frames, calls, text",
    [
        # the oldest that is not done, unless one of those stands at a line of the stack
        (
            (IN_OURS, ("train.py", 3, "step")),
            [call(0), call(1, False), call(2, False)],
            "all_reduce #1 of dp",
        ),
        (
            (IN_OURS, ("train.py", 8, "step")),
            [call(1, False), call(2, False, site="train.py:8"), call(3, False, site="train.py:8")],
            "all_reduce #2 of dp 0-3 (train.py:8)",
        ),
        # a call that is still on its way is not what a barrier of torch's own waits for
        ((IN_TORCH, ("train.py", 9, "step")), [call(1, False)], "torch.distributed.barrier (train.py:9)"),
        ((("train.py", 9, "step"),), [call(1, False)], "stand{s} at train.py:9, in no collective"),
        (
            (IN_OURS, ("train.py", 3, "step")),
            [call(0, False, op="receive", peer=3), call(1)],
            "receive from rank 3 #0 of",
        ),
        ((IN_OURS, ("train.py", 3, "step")), [call(0, False, op="send", peer=2)], "send to rank 2 #0"),
    ],
)
def test_where_a_rank_with_several_calls_is_stuck(frames, calls, text):
    assert text in report.stuck(stack(*frames), calls, {}).text


@pytest.mark.parametrize(
    "states, said, late",
    [(("there", "start", "there"), "2 of 3", (1,)), (("ready", "ready", "there"), "2 of 3", (2,))],
)
def test_who_has_not_come_is_missing_not_those_that_wait_for_it(states, said, late):
    class Begun(local.Launch):
        def __init__(self):
            self.ranks, self.states = len(states), dict(enumerate(states))

        def wait_until(self, wanted, seconds):
            return False

    with pytest.raises(launch.LaunchTimeout, match=f"{said} ranks arr.* missing: rank {late[0]};") as error:
        Begun().wait(1, 2)
    assert error.value.ranks == late


@pytest.mark.parametrize("count, rest", [(3, ""), (4, "; and 1 more")])
def test_three_errors_are_told_and_the_others_counted(count, rest):
    told = dict(type="ValueError", frames=[], traceback="")
    error = report.failure({rank: told | {"message": f"text {rank}"} for rank in range(count)}, {})
    assert str(error).endswith(f"rank 2 raised ValueError: text 2{rest}")


def test_the_end_of_a_long_stderr_is_told():
    """What a library said last is why it died."""
    said = report.crash_record(-signal.SIGABRT, "", [], {})
    error = report.failure(
        {1: said | {"traceback": "here"}}, {}, {1: "x" * report.NOISE_LETTERS + "the end\n"}
    )
    assert error.traceback.endswith("xthe end") and len(error.traceback) < report.NOISE_LETTERS + 100


def test_groups_whose_names_are_cut_stay_apart():
    """More members than a record has room for: two groups of 60 that differ in the last one."""
    ours, theirs = tuple(range(0, 120, 2)), (*range(0, 118, 2), 119)
    names = call_log.span(ours), call_log.span(theirs)
    assert names[0] != names[1] and all(len(name) == 80 for name in names)
    assert blamed(STANDS, waits(1, "dp", names[0])) == (0,), "it may be one of those that are not listed"
