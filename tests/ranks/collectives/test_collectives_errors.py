"""Wrong calls: refused in one line before anybody waits, or in checked mode where ranks must compare."""

import numpy
import pytest
import torch
import torch.distributed as dist

from minitrain import collectives, launch
from minitrain.ranks.collectives import (
    CollectiveMismatch,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    exchange,
    receive,
    reduce_scatter,
    rotate,
    scatter_to,
    send,
)

# ---- refused at once: only rank 0 calls, so a call that waited for rank 1 would never return --------------

EYE = torch.eye(3)
REFUSED = [
    (lambda g: all_reduce(EYE, None), "group is None; pass a process group: mesh.group('dp')"),
    (lambda g: all_reduce(EYE, "dp"), "group is 'dp'; pass a process group: mesh.group('dp')"),
    (lambda g: all_reduce(EYE, dist.GroupMember.NON_GROUP_MEMBER), "not a member of the group"),
    (lambda g: all_reduce(3.0, g), "all_reduce: x is a float; pass a tensor"),
    (lambda g: send(numpy.ones(3), 1, g), "send: x is a ndarray; pass a tensor"),
    (lambda g: all_gather(EYE.to_sparse(), g), "torch.sparse_coo; use x.to_dense()"),
    (
        lambda g: all_gather(EYE.to("meta"), g),
        "x is on meta, and this group moves tensors of cpu and cuda; move",
    ),
    (lambda g: all_reduce(EYE.bool(), g), "torch.bool cannot be added; convert first"),
    (lambda g: reduce_scatter(EYE[:2].to(torch.float8_e4m3fn), g), "float8_e4m3fn cannot be added"),
    (lambda g: all_reduce(EYE.cfloat(), g, op="max"), "torch.complex64 cannot be compared; convert first"),
    (lambda g: all_reduce(EYE, g, op="mean"), "'sum' or 'max' (the mean is the sum / group.size())"),
    (lambda g: all_reduce(EYE, g, op=dist.ReduceOp.MAX), "it is 'sum' or 'max'"),
    (lambda g: all_reduce(EYE, g, out=torch.empty(9)), "out is float32[9] on cpu; it must be float32[3, 3]"),
    (lambda g: all_reduce(EYE, g, out=EYE.T), "it must be float32[3, 3] on cpu, contiguous"),
    (lambda g: all_gather(EYE, g, 1, out=torch.empty(6, 3)), "it must be float32[3, 6] on cpu"),
    (lambda g: all_gather(torch.tensor(1.0), g), "dim=0, but x [] has no dims; use x.reshape(1)"),
    (lambda g: all_gather(EYE, g, dim=2), "dim=2, but x [3, 3] has dims -2 to 1"),
    (lambda g: reduce_scatter(EYE, g, -3), "dim=-3, but x [3, 3] has dims -2 to 1"),
    (lambda g: reduce_scatter(EYE, g, 1), "3 along dim 1, not a multiple of the group's 2 ranks"),
    (lambda g: all_to_all(EYE, g), "not a multiple of the group's 2 ranks (world); pad it"),
    (lambda g: scatter_to(EYE, g), "scatter_to: x [3, 3] has 3 along dim 0"),
    (lambda g: all_to_all(EYE, g, send_sizes=[1, 2]), "receive_sizes=None; give both"),
    (lambda g: uneven([3], [1, 1], g), "send_sizes=[3]; give both, 2 sizes >= 0 each"),
    (lambda g: uneven([4, -1], [4, 1], g), "sizes >= 0"),
    (lambda g: uneven([1, 1], [1, 1], g), "send_sizes [1, 1] add up to 2, but x has 3 along dim=0"),
    (lambda g: uneven([1, 2], [2, 1], g), "this rank sends 1 to itself, but receive_sizes expects 2"),
    (lambda g: broadcast(EYE, 2, g), "broadcast from rank 2; the ranks of this group (world) are 0..1"),
    (lambda g: send(EYE, -1, g), "send to rank -1; the ranks of this group (world) are 0..1"),
    (lambda g: send(EYE, 0, g), "send to rank 0, which is this rank itself"),
    (lambda g: receive(EYE, 0, g), "receive from rank 0, which is this rank itself"),
    (lambda g: exchange(EYE, 0, 1, g), "to=0 and source=1, one of them this rank"),
    (lambda g: exchange(EYE, 1, 5, g), "exchange: receive from rank 5; the ranks of this group"),
    (lambda g: receive(None, 1, g), "receive needs a tensor to take shape and dtype from"),
    (lambda g: rotate((), g), "rotate: an empty tuple"),
]


def uneven(sends, receives, group):
    return all_to_all(EYE, group, send_sizes=sends, receive_sizes=receives)


def refusals():
    messages = []
    for call, _ in REFUSED if dist.get_rank() == 0 else ():
        try:
            messages.append(f"accepted: {call(dist.group.WORLD)}")
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_a_wrong_call_is_one_line_before_anybody_waits():
    messages, _ = launch.run(refusals, ranks=2, timeout_s=20)
    for message, (_, expected) in zip(messages, REFUSED, strict=True):
        assert expected in message and "\n" not in message, message


# ---- checked mode ----------------------------------------------------------------------------------------


def caught(program):
    """What each rank hears of a wrong program; the program waits for what it starts."""

    def on_rank():
        try:
            return str(program(dist.get_rank(), dist.group.WORLD))
        except CollectiveMismatch as error:
            return str(error)

    return on_rank


def line_of(program, offset):
    return program.__code__.co_firstlineno + offset


def wrong_shape(rank, group):
    collectives.all_reduce(torch.ones(2), group)
    return collectives.all_reduce(torch.ones(500 if rank == 2 else 1000), group)


def wrong_dtype(rank, group):
    return collectives.all_gather(torch.ones(4, dtype=torch.int32 if rank == 1 else torch.float32), group)


def swapped(rank, group):
    weight, bias = torch.full((4,), 1.0), torch.full((4,), 100.0)
    if rank != 2:
        collectives.all_reduce(weight, group)
        return collectives.all_reduce(bias, group)
    collectives.all_reduce(bias, group)
    return collectives.all_reduce(weight, group)


def other_operation(rank, group):
    if rank == 3:
        return collectives.all_gather(torch.ones(8), group)
    return collectives.all_reduce(torch.ones(8), group)


def skipped(rank, group):
    if rank != 0:
        collectives.all_reduce(torch.ones(4), group)  # rank 0 forgets this one
    return collectives.all_reduce(torch.ones(4), group)


def other_dim(rank, group):
    return collectives.all_gather(torch.ones(4, 4), group, dim=rank % 2)


def other_source(rank, group):
    return collectives.broadcast(torch.ones(4), 1 if rank == 0 else 0, group)


def other_reduction(rank, group):
    return collectives.all_reduce(torch.ones(4), group, op="max" if rank == 2 else "sum")


def in_the_background(rank, group):
    return collectives.all_reduce(torch.ones(rank + 1), group, async_op=True).wait()


def other_name(rank, group):
    for bucket in [1, 0] if rank == 1 else [0, 1]:
        result = collectives.all_reduce(torch.full((4,), float(bucket)), group, name=f"bucket {bucket}")
    return result


def rows_not_expected(rank, group):
    expected = [2, 2, 2, 2] if rank != 3 else [2, 3, 2, 2]
    return collectives.all_to_all(torch.ones(8, 3), group, send_sizes=[2] * 4, receive_sizes=expected)


WRONG = {
    wrong_shape: "collective #1: rank 2 calls all_reduce(float32[500]) at {2}, others all_reduce(float32[1000]) at {2}",
    wrong_dtype: "collective #0: rank 1 calls all_gather(int32[4]) at {1}, others all_gather(float32[4]) at {1}",
    swapped: "collective #0: rank 2 calls all_reduce(float32[4]) at {5}, others all_reduce(float32[4]) at {3}; "
    "if these belong together, give both the same name=",
    other_operation: "collective #0: rank 3 calls all_gather(float32[8]) at {2}, others all_reduce(float32[8]) at {3}",
    skipped: "collective #0: rank 0 calls all_reduce(float32[4]) at {3}, others all_reduce(float32[4]) at {2}; "
    "if these belong together, give both the same name=",
    other_dim: "collective #0: ranks 0, 2 call all_gather(float32[4, 4]) at {1}, "
    "ranks 1, 3 call all_gather(float32[4, 4], dim=1) at {1}",
    other_source: "collective #0: rank 0 calls broadcast(float32[4], source=1) at {1}, "
    "others broadcast(float32[4], source=0) at {1}",
    other_reduction: "collective #0: rank 2 calls all_reduce(float32[4], op=max) at {1}, "
    "others all_reduce(float32[4]) at {1}",
    in_the_background: "collective #0: "
    + ", ".join(f"rank {rank} calls all_reduce(float32[{rank + 1}]) at {{1}}" for rank in range(4)),
    other_name: "collective #0: rank 1 calls all_reduce(float32[4]) named 'bucket 1' at {2}, "
    "others all_reduce(float32[4]) named 'bucket 0' at {2}",
}


@pytest.mark.parametrize("program", WRONG, ids=lambda program: program.__name__)
def test_checked_mode_says_who_calls_what(program):
    sites = [f"test_collectives_errors.py:{line_of(program, offset)}" for offset in range(8)]
    heard = launch.run(caught(program), ranks=4, checked=True, timeout_s=20)
    assert heard == [WRONG[program].format(*sites)] * 4


def test_checked_mode_compares_the_rows_of_an_uneven_all_to_all():
    program = lambda: rows_not_expected(dist.get_rank(), dist.group.WORLD)
    with pytest.raises(launch.RankError, match="rank 1 sends 6 elements .* asks for 9; pass what") as error:
        launch.run(program, ranks=4, checked=True, timeout_s=20)
    assert error.value.ranks == (3,)


@pytest.mark.skipif(torch.cuda.is_available(), reason="gloo's silence is the subject")
def test_without_checked_mode_these_are_silent():
    """The control: the same programs, wrong results, no error."""
    assert launch.run(caught(swapped), ranks=4, checked=False)[0] == str(torch.full((4,), 301.0))
    unnoticed = launch.run(caught(wrong_dtype), ranks=4, checked=False)
    assert "1065353216" in unnoticed[1]  # the bits of 1.0 read as an integer


def legitimate_branches():
    group, rank = dist.group.WORLD, dist.get_rank()
    if rank == 0:
        weights = collectives.broadcast(torch.full((3,), 7), 0, group, name="weights")
    else:
        weights = collectives.broadcast(torch.empty(3, dtype=torch.int64), 0, group, name="weights")
    uneven = collectives.all_to_all(
        torch.full((4 + rank, 2), rank), group, send_sizes=[2 + rank, 2], receive_sizes=[2, 3 - rank]
    )
    nothing = collectives.all_to_all(torch.ones(0, 2), group, send_sizes=[0, 0], receive_sizes=[0, 0])
    return weights.tolist(), uneven[:, 0].tolist(), list(nothing.shape)


def test_what_belongs_together_passes():
    found = launch.run(legitimate_branches, ranks=2, checked=True, timeout_s=20)
    assert found == [([7, 7, 7], [0, 0, 1, 1, 1], [0, 2]), ([7, 7, 7], [0, 0, 1, 1], [0, 2])]


def headers_are_free():
    group, calls = dist.group.WORLD, []
    for checked in (False, True):
        collectives.set_checked(checked)
        collectives.barrier(group)
        collectives.all_reduce(torch.ones(8), group)
        collectives.rotate(torch.ones(8), group)
        calls.append([(call.op, call.sent_bytes) for call in collectives.last_calls()[-3:]])
    assert calls[0] == calls[1], calls


def test_headers_are_not_counted():
    launch.run(headers_are_free, ranks=4, checked=False)


# ---- messages --------------------------------------------------------------------------------------------


def wrong_message(like):
    group = dist.group.WORLD
    if group.rank() == 0:
        collectives.send(torch.ones(4), 1, group)
    else:
        collectives.receive(like, 0, group)


OTHERS = [torch.empty(4, dtype=torch.int32), torch.empty(2), torch.empty(400), torch.empty(2, 2)]


@pytest.mark.parametrize("like", OTHERS, ids=["dtype", "too small", "too large", "shape"])
def test_a_message_of_another_kind_is_caught_by_its_receiver(like):
    with pytest.raises(launch.RankError) as error:
        launch.run(wrong_message, like, ranks=2, checked=True, timeout_s=20)
    expected = f"{str(like.dtype)[6:]}[{', '.join(map(str, like.shape))}]"
    assert error.value.ranks == (1,) and "message #0 from rank 0: it sends float32[4] at" in str(error.value)
    assert f"this rank expects {expected} at" in str(error.value)


def left_open(program, log):
    """The calls of this rank that its log has as not over, after one that was refused."""
    collectives.log_to(f"{log}/{dist.get_rank()}")
    with pytest.raises(CollectiveMismatch):
        program(dist.get_rank(), dist.group.WORLD)
    calls = collectives.read_log(f"{log}/{dist.get_rank()}")
    return len(calls), [call.seq for call in calls if not call.done]


@pytest.mark.parametrize(
    "program", [wrong_dtype, wrong_shape, in_the_background], ids=lambda one: one.__name__
)
def test_a_refused_call_is_over_in_the_log(program, tmp_path):
    results = launch.run(left_open, program, str(tmp_path), ranks=4, checked=True, timeout_s=20)
    for calls, unfinished in results:
        assert calls > 0 and unfinished == []


def test_a_sender_may_be_far_ahead():
    def rank():
        group, count = collectives.world(), 67
        if group.rank() == 0:
            sends = [collectives.send(torch.tensor([i]), 1, group, async_op=True) for i in range(count)]
        collectives.barrier(group)
        if group.rank() == 0:
            return [send.wait() for send in sends]
        like = torch.empty(1, dtype=torch.int64)
        return [collectives.receive(like, 0, group).item() for _ in range(count)]

    assert launch.run(rank, ranks=2, checked=True)[1] == list(range(67))


def one_error_in_each_lane():
    def fail():
        raise RuntimeError("lost")

    for lane in collectives.channel_of(collectives.world()).lanes:
        lane.submit(fail)
    found = []
    for _ in range(3):
        try:
            collectives.settle()
        except RuntimeError as error:
            found.append(str(error))
    return found


def test_every_lane_s_error_is_told():
    found = launch.run(one_error_in_each_lane, ranks=1)[0]
    assert found == ["lost; nobody waited for this asynchronous call"] * 2
