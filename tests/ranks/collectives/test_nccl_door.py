"""The door to NCCL, as far as a machine without a GPU can open it: its calls of torch go to gloo's own collectives,
which take the same arguments, and what its streams do is played by works that end when the test says so."""

import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from minitrain import collectives, launch
from minitrain.model.training.step import NoReducer
from minitrain.pipeline.runtime import Runner
from minitrain.pipeline.schedules.one_direction import one_f_one_b
from minitrain.ranks.collectives import transport
from minitrain.ranks.launch import report
from minitrain.ranks.mesh import Mesh
from minitrain.ranks.process import PROCESS
from tests.ranks.launch.test_who_is_blamed import call, stack


def through_nccls_door():
    transport.BACKENDS["gloo"] = transport.NCCL()
    return dist.group.WORLD


def every_operation(own):
    group = dist.group.WORLD if own else through_nccls_door()
    rank, n = group.rank(), group.size()
    x = torch.arange(4.0 * n, dtype=torch.float64).view(2 * n, 2) * (rank + 1)
    in_place = x.clone()
    uneven = dict(send_sizes=[2] * n, receive_sizes=[2] * n)
    results = [
        collectives.all_reduce(x, group), collectives.all_reduce(in_place, group, out=in_place),
        collectives.all_reduce(x, group, op="max", async_op=True).wait(),
        collectives.all_gather(x, group, dim=1), collectives.reduce_scatter(x, group),
        collectives.all_to_all(x, group, **uneven), collectives.broadcast(x, n - 1, group),
        *collectives.rotate((x, -x), group), collectives.exchange(x, (rank + 1) % n, (rank - 1) % n, group),
    ]  # fmt: skip
    if rank == 0:
        collectives.send(x, 1, group)
    if rank == 1:
        results.append(collectives.receive(x, 0, group))
    collectives.barrier(group)
    return [one.tolist() for one in results], [call.sent_bytes for call in collectives.last_calls()][:9]


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_operation_is_gloos_and_is_charged_by_the_same_cuts(ranks):
    """Rings of NCCL and ours send the same, but for a broadcast, whose tree is charged."""
    theirs, ours = (launch.run(every_operation, own, ranks=ranks, checked=False) for own in (False, True))
    assert theirs == ours


def who_is_under_way(folder):
    """What this rank's log says of a sum that rank 1 joins late: before, and after, without a wait."""
    group = through_nccls_door()
    collectives.log_to(path := f"{folder}/{group.rank()}")
    done = dist.FileStore(f"{folder}/store", 2)
    if group.rank() == 1:
        done.get("looked")
        collectives.all_reduce(torch.ones(2), group)
        done.set("joined", "")
        return None
    handle = collectives.all_reduce(torch.ones(2), group, async_op=True)
    before = collectives.read_log(path)[-1]
    done.set("looked", "")
    done.get("joined")
    while not collectives.read_log(path)[-1].done:  # the launch's time-out ends it
        time.sleep(0.01)
    return before.queued, before.done, handle.wait().tolist()


def test_a_call_is_over_in_the_log_when_its_stream_has_done_it(tmp_path):
    """Not when the host has told the stream: else a report of a hang would point nowhere."""
    assert launch.run(who_is_under_way, str(tmp_path), ranks=2, checked=False)[0] == (True, False, [2.0, 2.0])


def disagree(async_op):
    group, rank = through_nccls_door(), dist.get_rank()
    x = torch.ones(4, dtype=[torch.float32, torch.int32][rank * async_op])
    if async_op:
        collectives.all_gather(x, group, async_op=True).wait()
    else:
        (collectives.all_gather if rank else collectives.all_to_all)(x, group)


@pytest.mark.parametrize("async_op", [False, True])
def test_ranks_that_call_different_collectives_are_told(async_op):
    """Headers go by gloo, where the group has it; what the streams make of it does not matter any more."""
    with pytest.raises(launch.RankError, match="CollectiveMismatch: collective #0: rank 0 calls a"):
        launch.run(disagree, async_op, ranks=2, checked=True, timeout_s=20)


class Never(SimpleNamespace):  # the work of a stream that waits for a rank that is gone
    is_completed, wait = (lambda self: False), (lambda self: None)


def test_a_wait_ends_where_others_may_outlive_a_rank(monkeypatch):
    """NCCL's own wait neither blocks the host nor raises."""
    monkeypatch.setattr(PROCESS, "on_streams", [])
    monkeypatch.setattr(PROCESS, "watcher", "none")
    wait = transport.NCCL().told([Never()], [])
    wait()
    monkeypatch.setattr(PROCESS, "patience_s", 0.05)
    monkeypatch.setattr(PROCESS, "lost_since", time.monotonic())
    with pytest.raises(RuntimeError, match="another rank is gone, and nothing ends this wait"):
        wait()


def doors(config):
    try:
        return transport.doors_of(SimpleNamespace(config=config))
    except ValueError as error:
        return str(error)


def test_the_device_of_a_tensor_decides(monkeypatch):
    monkeypatch.setattr(dist, "get_backend_config", lambda group: group.config)
    both = doors("cpu:gloo,cuda:nccl")
    assert [type(both[kind]).__name__ for kind in ("cpu", "cuda")] == ["Gloo", "NCCL"]
    assert type(doors("cpu:fake,cuda:fake")["any"]) is transport.Dry
    assert doors("cpu:mpi").startswith("backend 'cpu:mpi' has mpi; collectives run on gloo and nccl")


def two_doors():
    """A group like that of a node with GPUs; here they cannot be seen, so the second door is NCCL's for meta."""
    group = Mesh(dp=2).group("dp")
    channel = collectives.functions.channel_of(group)
    channel.doors = {"cpu": channel.doors["cpu"], "meta": transport.NCCL()}
    collectives.barrier(group)
    total = collectives.all_reduce(torch.ones(2), group)
    kinds = [type(channel.door("sum", torch.empty(1, device=kind))).__name__ for kind in ("cpu", "meta")]
    return total.tolist(), kinds


def test_tensors_of_the_host_go_by_gloo_in_a_group_that_has_nccl():
    assert launch.run(two_doors, ranks=2) == [([2.0, 2.0], ["Gloo", "NCCL"])] * 2


def test_a_queued_call_is_what_a_host_waits_for_far_from_it():
    """The host stands in a synchronization; the report names the call that its GPU has not done."""
    under_way = call(3, False, queued=True, seq=7)
    found = report.stuck(stack(("train.py", 30, "step")), [under_way], {})
    where = "wait{s} in all_reduce #7 of dp 0-3 (train.py:7 on its GPU; the host is at train.py:30)"
    assert found == report.Stuck(where, True, ("dp", "0-3", ""), 7)


def without_a_twin():
    group = through_nccls_door()
    stage = torch.nn.Linear(4, 4)
    Runner({group.rank(): stage}, one_f_one_b(2, 4), group, None, NoReducer(), width=4)


def test_a_pipeline_needs_a_group_for_each_direction():
    with pytest.raises(launch.RankError, match="messages both ways would wait .* give down=, a second"):
        launch.run(without_a_twin, ranks=2, timeout_s=20)
