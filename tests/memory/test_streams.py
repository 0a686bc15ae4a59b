"""The order of copies on streams, without a GPU: doubles of streams know what comes before what.

On a pretended device that is taken for CUDA the code that runs there runs here: every copy is told to one of
the doubles, each of which knows all that it has waited for. Proved: what comes back has left before; no
thread of the host waits in forward and backward; memory is not given away while a copy reads it.
"""

from concurrent.futures import Future
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from minitrain.memory import host_optimizer, pools
from minitrain.memory.host_optimizer import HostOptimizer
from minitrain.memory.pools import Transfer, new_host, to_device, to_host
from minitrain.ranks.launch import dryrun
from minitrain.ranks.torch_private import FakeTensor, outside_modes, storage_id
from minitrain.systems.memory.activations import AwayActivations
from tests.pretend import PRETENDED, needs_pretended, pretended


class Stream:
    """Does what it is told in order. `before`: all that has ended when its next work begins."""

    def __init__(self, log, *_):
        self.log, self.before = log, set()

    def wait_stream(self, other):
        self.before |= other.before

    def wait_event(self, event):
        self.before |= event.before

    def record_event(self):
        return Event(self.log, set(self.before))

    def copy(self, way, block):
        self.log.copies.append((way, block, set(self.before)))
        self.before.add((way, block))


class Event:
    def __init__(self, log, before):
        self.log, self.before = log, before

    def synchronize(self):
        self.log.synchronized += 1


class Log:
    """Takes the place of CUDA: fake tensors on the pretended device are taken for its own."""

    def __init__(self, patch):
        self.copies, self.synchronized, self.kept, compute = [], 0, set(), Stream(self)
        self.now, self.streams, there = compute, {}, FakeTensor.copy_

        @contextmanager
        def on(stream):
            before, self.now = self.now, stream
            yield
            self.now = before

        def copy_(out, x, non_blocking=False):
            if not non_blocking:
                return there(out, x)
            assert self.now is not compute
            way, host = ("up", x) if out.is_cuda else ("down", out)
            self.now.copy(way, storage_id(host.untyped_storage()))
            return there(out, x)

        patch.setattr(FakeTensor, "is_cuda", property(lambda x: x.device.type == "gpu"))
        patch.setattr(FakeTensor, "copy_", copy_)
        patch.setattr(FakeTensor, "record_stream", lambda x, stream: self.kept.add(id(x.untyped_storage())))
        patch.setattr(pools, "is_fake", lambda x: False)
        patch.setattr(pools, "_stream", lambda *key: self.streams.setdefault(key, Stream(self)))
        patch.setattr(torch.cuda, "stream", on)
        patch.setattr(torch.cuda, "current_stream", lambda device=None: self.now)

    def ordered(self) -> list[bool]:
        """Of each copy that comes back: has it left before?"""
        return [("down", block) in before for way, block, before in self.copies if way == "up"]


def watched(body, *args) -> tuple:
    with pytest.MonkeyPatch.context() as patch:
        log = Log(patch)
        return dryrun.run(lambda: body(log, patch, *args), ranks=1)


def activations_leave(log, patch, broken=""):
    if broken == "order":
        from minitrain.systems.memory import activations

        patch.setattr(activations, "to_device", lambda x, device, after: to_device(x, device))
    if broken == "wait":
        patch.setattr(Transfer, "release", Transfer.wait)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4, device=PRETENDED), nn.Tanh()) for _ in range(3)))
    AwayActivations(model.parameters).watch(model, model)
    y = model(torch.empty(2, 4, device=PRETENDED)).sum()
    in_forward = log.synchronized
    y.backward()
    assert all(param.grad.device.type == "gpu" for param in model.parameters())
    return log.ordered(), in_forward, log.synchronized, len(log.copies)


@needs_pretended
def test_activations_come_back_behind_what_left_and_no_host_waits():
    ordered, *synchronized, copies = pretended(watched, activations_leave)
    assert len(ordered) * 2 == copies >= 6 and all(ordered) and synchronized == [0, 0]


@needs_pretended
def test_without_the_event_or_with_a_wait_it_would_show():
    ordered, *_ = pretended(watched, activations_leave, "order")
    assert not any(ordered)
    assert pretended(watched, activations_leave, "wait")[1] > 0, "the host waits at each layer"


def gradients_leave(log, patch, early):
    model = nn.Sequential(*(nn.Linear(4, 4, device=PRETENDED) for _ in range(3)))
    params, began = list(model.parameters()), []
    host = HostOptimizer(torch.optim.SGD(params, lr=0.1))
    host.early, set_up = early, log.synchronized

    def work(fn, like, after):
        began.append(after.event.before)
        done: Future = Future()
        with outside_modes(), like.fake_mode:
            done.set_result(fn())
        return done

    patch.setattr(host_optimizer.pools, "work", work)
    for param in params:
        param.register_post_accumulate_grad_hook(lambda param: host.on_grad_final(param, param.grad))
    model(torch.empty(2, 4, device=PRETENDED)).sum().backward()
    in_backward, updated = log.synchronized - set_up, len(began)
    host.on_finish()
    finished = log.synchronized - set_up
    host.step()
    blocks = [storage_id(host.twin_of[param].grad.untyped_storage()) for param in params]
    behind = all(any(("down", block) in before for before in began) for block in blocks)
    up = [way for way, *_ in log.copies].count("up")
    return in_backward, updated, finished, len(began), behind, up


@needs_pretended
def test_an_update_on_the_host_waits_for_its_gradient_and_backward_for_none():
    assert pretended(watched, gradients_leave, True) == (0, 4, 0, 6, True, 6)
    assert pretended(watched, gradients_leave, False) == (0, 0, 6, 6, True, 6), "clipping reads all of them"


def kept(log, patch):
    x = torch.empty(4, device=PRETENDED)
    transfer = to_host(x)
    sources = transfer._sources
    host = transfer.release()
    y = to_device(host, PRETENDED, after=transfer).wait()
    blocks = {id(tensor.untyped_storage()) for tensor in (*sources, y)}
    before = log.synchronized
    transfer.wait()
    transfer.wait()
    return blocks == log.kept, transfer._sources is None, before, log.synchronized, host.device.type


@needs_pretended
def test_memory_of_the_device_is_marked_for_the_stream_and_only_a_reader_waits():
    assert pretended(watched, kept) == (True, True, 0, 1, "cpu")


def test_work_on_the_host_begins_behind_its_copy():
    done, after = [], to_host(torch.ones(3))
    after.wait = lambda: done.append("copied")
    assert pools.work(lambda: done.append("updated"), torch.ones(1), after).result() is None
    assert done == ["copied", "updated"]


def test_a_pinned_block_is_as_large_as_torchs_allocator_makes_it(monkeypatch):
    """It rounds up to a power of two: 5 MiB are 8."""
    monkeypatch.setattr(pools.psutil, "virtual_memory", lambda: type("Free", (), {"available": 6 << 20}))
    monkeypatch.setattr(
        torch, "empty", lambda *args, empty=torch.empty, pin_memory=False, **how: empty(*args, **how)
    )
    assert new_host((5 << 20,), torch.uint8).numel() == 5 << 20
    with pytest.raises(MemoryError, match=r"offload needs 0.00839 GB, and the host has 0.00629 GB left"):
        new_host((5 << 20,), torch.uint8, pinned=True)
    assert new_host((1 << 22,), torch.uint8, pinned=True).nbytes == 1 << 22, "a power of two is one already"
