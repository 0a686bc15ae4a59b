"""The record of calls: what it says, who can read it and when, and that a dry run writes the same one."""

import gc
import os
import sys
import types
import weakref
from operator import attrgetter

import pytest
import torch
import torch.distributed as dist

from minitrain import collectives, launch
from minitrain.ranks.collectives import call_log
from minitrain.ranks.collectives.call_log import SLOT_BYTES, SLOTS, Call
from minitrain.ranks.launch import dryrun
from minitrain.ranks.ledger import Ledger
from minitrain.ranks.mesh import Mesh
from minitrain.ranks.process import Process

FIELDS = attrgetter(*"op seq axis members payload_bytes shape dtype peer name site".split())


def records(fn):
    """The calls that `fn` makes, as their own observer sees them: (kind, op, ...) in order."""
    events = []

    def watch(kind, subject):
        if kind == "buffer":
            events.append((kind, subject.dtype, tuple(subject.shape)))
        else:
            events.append((kind, *FIELDS(subject), subject.sent_bytes if kind == "wait" else None))

    with collectives.observe(watch):
        fn()
    return events


def every_kind_of_call():
    """All operations, blocking and not, even and uneven, in an awkward layout, on two groups of a mesh."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    mesh = Mesh(dp=ranks // 2, tp=2)

    def work():
        for group in (mesh.group("tp"), mesh.group("dp"), mesh.group("dp", "tp")):
            n = group.size()
            for dtype in (torch.float32, torch.bfloat16):
                x = torch.ones(4 * n, 6 * n, dtype=dtype).T
                for background in (False, True):
                    odd = torch.ones(7, dtype=dtype)
                    handles = [collectives.all_reduce(odd, group, name="odd", async_op=background)]
                    for dim in (0, 1):
                        handles += [
                            collectives.all_gather(x, group, dim, async_op=background),
                            collectives.reduce_scatter(x, group, dim, async_op=background),
                            collectives.all_to_all(x, group, dim, async_op=background),
                        ]
                    handles += [collectives.rotate((x, x[0]), group, async_op=background)]
                    if background:
                        [handle.wait() for handle in handles]
            for source in range(n):
                collectives.broadcast(x, source, group)
            me, sizes = group.rank(), [i + 1 for i in range(n)]
            collectives.all_to_all(
                torch.ones(sum(sizes), 2), group, send_sizes=sizes, receive_sizes=[me + 1] * n
            )
            out = torch.ones(9)
            collectives.all_reduce(out, group, out=out)
            collectives.all_reduce(x, group, op="max", async_op=True).wait()
            collectives.barrier(group)
        if rank % 2 == 0:
            collectives.send(x, rank + 1, dist.group.WORLD)
        else:
            collectives.receive(x, rank - 1, dist.group.WORLD)
        collectives.exchange(x, (rank + 1) % ranks, (rank - 1) % ranks, dist.group.WORLD)

    return records(work), {call.planned for call in collectives.last_calls()}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.skipif(
    torch.cuda.is_available(), reason="a dry run stands for gloo: NCCL needs no receive buffers"
)
def test_a_dry_run_makes_the_same_calls_and_allocates_the_same_buffers(ranks):
    real = launch.run(every_kind_of_call, ranks=ranks)
    for rank in range(ranks):
        events, planned = dryrun.run(every_kind_of_call, rank=rank, ranks=ranks)
        assert planned == {True} and real[rank][1] == {False}
        for ours, theirs in zip(events, real[rank][0], strict=True):
            assert ours == theirs
    sent = [sum(event[-1] for event in events if event[0] == "wait") for events, _ in real]
    assert min(sent) > 0


# and not whatever lies below a folder of that name
PACKAGE = os.path.dirname(os.path.dirname(collectives.__file__))


def python_calls(ranks):
    """How many Python functions one all-reduce in a dry run enters."""

    def count():
        x = torch.ones(ranks * 2, 3)
        collectives.all_gather(x[:2], dist.group.WORLD)
        entered = 0

        def profile(frame, event, _):
            nonlocal entered
            entered += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

        def every_op():
            for op in ("all_reduce", "reduce_scatter", "all_to_all", "all_gather"):
                getattr(collectives, op)(x, dist.group.WORLD)

        every_op(), every_op()  # an operator is remembered when it has been asked twice
        sys.setprofile(profile)
        every_op()
        sys.setprofile(None)
        return entered

    return dryrun.run(count, rank=1, ranks=ranks)


def test_a_dry_run_of_a_hundred_thousand_ranks_costs_what_one_of_four_does():
    assert python_calls(131_072) == python_calls(4)


# ---- sequence numbers and call sites ---------------------------------------------------------------------


def sites():
    group, x = dist.group.WORLD, torch.ones(2)
    collectives.all_reduce(x, group)
    list(map(lambda y: collectives.all_reduce(y, group), [x]))
    cell = types.ModuleType("cell")
    cell.collectives = collectives
    source = "def f(x, group):\n    return collectives.all_reduce(x, group)"
    exec(compile(source, "/tmp/ipykernel_1/2.py", "exec"), cell.__dict__)
    collectives.name_file("/tmp/ipykernel_1/2.py", "cell 6")
    cell.f(x, group)
    collectives.copy_to(x.requires_grad_(), group).sum().backward()
    return [call.site for call in collectives.last_calls()]


def test_the_site_is_the_callers_line():
    first = sites.__code__.co_firstlineno
    here = os.path.basename(__file__)
    assert launch.run(sites, ranks=2)[1] == [
        f"{here}:{first + 2}",
        f"{here}:{first + 3}",
        "cell 6:2",
        f"{here}:{first + 10} backward",
    ]


# ---- the file --------------------------------------------------------------------------------------------


def read_by_a_neighbour(folder):
    """Rank 0 is inside a collective rank 1 has not joined; rank 1 reads that from 0's file, then joins."""
    group, rank = dist.group.WORLD, dist.get_rank()
    collectives.log_to(os.path.join(folder, str(rank)))
    x = torch.ones(5, 2)
    if rank == 0:
        collectives.broadcast(x, 0, group, name="weights")
        handle = collectives.all_reduce(x, group, async_op=True)
        collectives.send(x, 1, group)
        handle.wait()
        return None
    collectives.broadcast(x, 0, group, name="weights")
    collectives.receive(x, 0, group)
    calls = collectives.read_log(os.path.join(folder, "0"))
    collectives.all_reduce(x, group)
    return calls


def test_the_file_tells_a_neighbour_what_a_rank_is_waiting_in(tmp_path):
    _, calls = launch.run(read_by_a_neighbour, str(tmp_path), ranks=2, checked=False)
    weights, waiting, message = calls
    assert weights[:6] == (0, True, 0, "broadcast", "world", "0,1") and weights.name == "weights"
    assert waiting[1:4] == (False, 1, "all_reduce") and waiting[6:10] == ("5, 2", "float32", 40, None)
    assert waiting.site.startswith("test_collectives_log.py:")
    assert (message.op, message.peer, message.seq) == ("send", 1, 0)


def many_calls(path):
    collectives.log_to(path)
    for i in range(SLOTS + 10):
        collectives.all_gather(torch.ones(i), dist.group.WORLD, name="a name " * 100 if i == 20 else None)
    return [(call.seq, call.shape) for call in collectives.last_calls()]


def test_the_log_keeps_the_last_calls_and_survives_what_does_not_fit(tmp_path):
    path = str(tmp_path / "log")
    (recent,) = launch.run(many_calls, path, ranks=1)
    assert recent == [(i, (i,)) for i in range(10, SLOTS + 10)]
    calls = collectives.read_log(path)
    assert [(call.seq, call.shape) for call in calls] == [(i, str(i)) for i in range(10, SLOTS + 10)]
    (name,) = [call.name for call in calls if call.name]
    assert name.startswith("a name a name a name a name a n~") and len(name) == 40
    assert os.path.getsize(path) == SLOTS * SLOT_BYTES and os.stat(path).st_mode & 0o077 == 0
    with open(path, "wb") as file:  # a file that is not a log
        file.write(os.urandom(1000) + b"i\t\t")
    assert collectives.read_log(path) == []


def test_a_call_that_ends_late_marks_its_own_slot_or_none_and_tabs_are_blanks(tmp_path, monkeypatch):
    path = tmp_path / "log"
    monkeypatch.setattr(call_log, "PROCESS", Process())
    call_log.log_to(path)
    same = "barrier", "world", (0, 1), "0,1", 4, (1,), torch.float32, "train.py:1"
    calls = [call_log.issued(Call(seq, *same, name="a\tname", group="group 7")) for seq in range(SLOTS)]
    call_log.finished(calls[0])  # the oldest there is
    assert [call.seq for call in collectives.read_log(path) if call.done] == [0]
    call_log.issued(Call(SLOTS, *same))
    call_log.finished(calls[0])  # its slot is the last one's by now
    found = collectives.read_log(path)
    assert [call.seq for call in found] == [*range(1, SLOTS + 1)] and not any(call.done for call in found)
    assert (found[0].name, found[0].group) == ("a name", "group 7")


def test_nobody_observes_after_the_with_block():
    def watch(kind, subject):
        raise AssertionError("observed after the end")

    def work():
        with pytest.raises(AssertionError, match="observed"), collectives.observe(watch):
            collectives.barrier(dist.group.WORLD)
        collectives.barrier(dist.group.WORLD)
        return len(collectives.last_calls())

    assert dryrun.run(work, ranks=8) >= 2


def in_flight(async_op):
    """Elements of scratch of six all-reduces in a row, and what is alive when all have been waited for."""
    group, buffers = dist.group.WORLD, []
    note = lambda kind, what: buffers.append(weakref.ref(what)) if kind == "buffer" else None
    with collectives.observe(note):
        handles = [
            collectives.all_reduce(torch.ones(numel), group, async_op=async_op)
            for numel in (400, 400, 400, 200, 400, 800)
        ]
        sizes = [buffer().numel() if buffer() is not None else None for buffer in buffers]
        if async_op:
            assert [handle.wait()[0].item() for handle in handles] == [4] * 6
    return sizes, [buffer() for buffer in buffers]


def test_calls_in_the_background_share_their_scratch():
    for sizes, alive in launch.run(in_flight, True, ranks=4):
        # two lanes; the last call needs more than there is
        assert sizes == [300, 300, 600] and alive == [None] * 3
    for sizes, alive in launch.run(in_flight, False, ranks=4):
        assert sizes == alive == [None] * 6  # a blocking call gives its own back at once


def kept_by_handles():
    """Per operation: what lives while a call is under way of what it was given and what it made (x, copies and
    scratch), what of it lives on with a handle that has been waited for, whether that has the result, and
    whether the result lives on without it."""
    group, found = dist.group.WORLD, {}
    to, source = (group.rank() + 1) % group.size(), (group.rank() - 1) % group.size()
    calls = {
        "all_reduce": lambda x: collectives.all_reduce(x, group, async_op=True),
        "all_gather": lambda x: collectives.all_gather(x, group, 1, async_op=True),
        "reduce_scatter": lambda x: collectives.reduce_scatter(x, group, 1, async_op=True),
        "all_to_all": lambda x: collectives.all_to_all(x, group, 1, async_op=True),
        "rotate": lambda x: collectives.rotate(x, group, async_op=True),
        "exchange": lambda x: collectives.exchange(x, to, source, group, async_op=True),
    }
    for op, call in calls.items():
        refs = []
        with collectives.observe(
            lambda kind, what: refs.append(weakref.ref(what.untyped_storage())) if kind == "buffer" else None
        ):
            x = torch.ones(4, 4).T  # not contiguous: it is copied before it travels
            refs.append(weakref.ref(x.untyped_storage()))
            handle = call(x)
            del x
            under_way = sum(ref() is not None for ref in refs)
            result = handle.wait()
        same, left = handle.wait() is result, sum(ref() is not None for ref in refs)
        last = weakref.ref(result)
        del handle, result
        found[op] = under_way > 0, left, same, last() is not None
    return found


def test_a_handle_that_was_waited_for_keeps_its_result_and_nothing_else():
    def rank():
        gc.disable()  # this process is the launch's own
        return kept_by_handles()

    for found in [*launch.run(rank, ranks=4), dryrun.run(kept_by_handles, rank=1, ranks=4)]:
        assert set(found.values()) == {(True, 0, True, False)} and len(found) == 6, found


@pytest.mark.parametrize(
    "ranks, text", [((0, 1, 2), "0-2"), ((0, 1), "0,1"), ((0, 2, 5), "0,2,5"), ((1, 3, 5, 7), "1,3,5,7")]
)
def test_only_neighbours_are_a_span(ranks, text):
    assert call_log.span(ranks) == text


def test_a_site_holds_inside_its_block_only():
    with call_log.standing_at("model.py:7"):
        assert call_log.call_site() == "model.py:7"
    assert call_log.call_site().startswith("test_collectives_log.py:")


def peer_and_bytes():
    mesh, seen = Mesh(dp=2, tp=2), []
    note = lambda kind, subject: seen.append(subject) if kind == "issue" else None
    with collectives.observe(note), Ledger() as ledger:
        collectives.send(torch.ones(4), 0, mesh.group("tp"))
        collectives.all_to_all(torch.ones(4), mesh.group("tp"), send_sizes=[1, 3], receive_sizes=[2, 3])
    return seen[0].peer, ledger.sent_bytes("all_to_all")


def test_a_peer_is_a_global_rank_and_the_plan_leaves_out_the_own_piece():
    assert dryrun.run(peer_and_bytes, rank=3, ranks=4) == (2, 1 * 4)
