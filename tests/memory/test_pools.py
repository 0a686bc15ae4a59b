"""Copies between device and host: numbers, bytes, order, two totals, limits, real and dry alike."""

import gc
import threading

import psutil
import pytest
import torch

from minitrain import collectives
from minitrain.memory import pools
from minitrain.memory.pools import new_host, on_host, to_device, to_host
from minitrain.ranks.events import Compute, Copy, Wait
from minitrain.ranks.launch import dryrun
from minitrain.ranks.ledger import Ledger


def there_and_back():
    """-> the ledger of: 4,000 bytes to the host beside a sum, freed here, and back."""
    x = torch.ones(1000)
    with Ledger() as ledger:
        x * 1
        with ledger.phase("out"):
            transfer = to_host(x)
        y = x + 1
        host = transfer.wait()
        del x, transfer
        back = to_device(host)
        del y
        result = back.wait()
        del back, host
        result * 2
    return ledger


def test_numbers_come_back_and_blocks_are_others():
    x = torch.randn(3, 5)
    host = to_host(x).wait()
    back = to_device(host, x.device).wait()
    assert torch.equal(host, x) and torch.equal(back, x)
    assert len({t.untyped_storage().data_ptr() for t in (x, host, back)}) == 3
    assert on_host(host) and on_host(host[1:].view(-1)) and not on_host(back) and not on_host(x)
    out = new_host((3, 5), torch.float32)
    assert to_host(2 * x, out=out).wait().data_ptr() == out.data_ptr() and torch.equal(out, 2 * x)
    strided = torch.randn(4, 6).t()
    assert torch.equal(to_host(strided).wait(), strided)
    assert not to_host(torch.ones(2, requires_grad=True)).wait().requires_grad
    param = torch.nn.Parameter(torch.zeros(3, 5))
    into = to_device(host, out=param).wait()
    assert torch.equal(param, x) and not into.requires_grad and into.data_ptr() == param.data_ptr()


def test_account_of_a_copy_is_exact_and_the_same_in_a_dry_run():
    """Device: x, y, x again. Host: one block of 4,000 bytes, until it is dropped."""
    for ledger in (there_and_back(), dryrun.run(there_and_back, ranks=1)):
        names = [event.name if isinstance(event, Compute) else event for event in ledger.events]
        there, back = Copy(0, "to_host", 4000, "out"), Copy(1, "to_device", 4000)
        assert names == ["mul", there, "add", Wait(0), back, Wait(1), "mul"]
        copied = [ledger.copied_bytes(way) for way in ("to_host", "to_device", "to_disk", None)]
        assert copied == [4000, 4000, 0, 8000]
        assert (ledger.live_bytes, ledger.peak_bytes) == (4000, 8000)  # the result lives
        assert (ledger.host_bytes, ledger.host_peak_bytes) == (0, 4000)
        assert max(sum(kinds.values()) for _, kinds in ledger.timeline()) == 8000
    assert there_and_back().events == dryrun.run(there_and_back, ranks=1).events
    assert there_and_back().memory_trace() == dryrun.run(there_and_back, ranks=1).memory_trace()


def test_without_the_mark_the_host_would_be_the_device(monkeypatch):
    """Control: the two totals differ by the mark alone."""
    monkeypatch.setattr(pools.collectives, "announce_host", lambda tensor, kind: tensor)
    ledger = there_and_back()
    assert ledger.host_peak_bytes == 0 and ledger.peak_bytes > 8000


def test_a_ledger_knows_the_hosts_memory_that_is_older_than_itself():
    host, x = to_host(torch.ones(100)).wait(), torch.ones(50)
    with Ledger() as ledger:
        x.add_(host[:50])
        assert (ledger.host_bytes, ledger.live_bytes) == (400, 200)
        assert ledger.host_by_kind["activations"] == 400 and sum(ledger.live_by_kind.values()) == 200
        assert sum(ledger.peak_by_kind.values()) == ledger.peak_bytes == 200
        del host
        assert ledger.host_bytes == 0


def test_computation_goes_on_while_a_copy_waits():
    """The copy is another thread's: it can be held up, and its caller goes on."""
    gate, worker = threading.Event(), pools._worker("to_host")
    worker.submit(gate.wait)
    x = torch.ones(10)
    transfer = to_host(x)
    assert torch.equal(x + 1, torch.full((10,), 2.0))
    gate.set()
    assert torch.equal(transfer.wait(), x) and transfer.wait() is transfer.wait()


def test_each_direction_has_a_thread_and_in_it_one_follows_the_other():
    """What goes to the host is held up; what comes from there arrives, and so does what the host computes."""
    gate, out, x = threading.Event(), torch.zeros(4), torch.ones(4)
    try:
        pools._worker("to_host").submit(gate.wait)
        held_up = to_host(x, out=out)
        assert torch.equal(to_device(x).wait(), x) and pools.work(lambda: 3, x).result() == 3
        assert not out.any()
    finally:
        gate.set()
    assert torch.equal(held_up.wait(), x)
    begun = threading.Event()
    first = pools.work(lambda: begun.wait(0.02), x)
    pools.work(begun.set, x).result()
    assert first.result() is False, "the second begins when the first is over"


def test_a_copy_is_reported_once_with_what_moves_and_what_the_host_computes_is_not():
    """Also in a dry run, where it is done at once."""

    def reported():
        x, whole = torch.ones(4), new_host((10,), torch.float32)
        said = []
        with Ledger() as ledger, collectives.observe(lambda kind, what: said.append((kind, what.bytes))):
            transfer = to_host(x, out=whole[:4])
            transfer.wait(), transfer.wait()
            pools.work(lambda: x * 2, x).result()
        return said, ledger.copied_bytes(), len(ledger.events), ledger.peak_bytes

    for found in (reported(), dryrun.run(reported, ranks=1)):
        assert found == ([("copy", 16), ("copied", 16)], 16, 2, 16)  # x


def test_a_transfer_keeps_its_source_until_it_is_waited_for():
    x = torch.ones(1000)
    with Ledger() as ledger:
        x.mul_(1)
        transfer = to_host(x)
        del x
        gc.collect()
        assert ledger.live_bytes == 4000
        transfer.wait()
        assert ledger.live_bytes == 0 and ledger.host_bytes == 4000


def test_what_does_not_fit_fails_with_what_is_there():
    x = torch.ones(1000)
    with pytest.raises(MemoryError, match="12,000 bytes on the device, which has 11,999: activations 12,000"):
        with Ledger(limit_bytes=11_999):
            y = x + 1
            z = y + 1
    with Ledger(limit_bytes=12_000):
        y = x + 1
        z = y + 1
        del y
        z + 1
    with Ledger(limit_bytes=8000):  # what has moved makes room on the device
        first = to_host(x + 1).wait()
        x * 2
    with pytest.raises(MemoryError, match="8,000 bytes on the device"):
        with Ledger(limit_bytes=7999):
            x * 1
            to_device(first)
    del z
    with Ledger(limit_bytes=4000):  # what the host has does not count, though both were there before
        x.add_(first)
    with pytest.raises(MemoryError, match="on the device, which has 10: buffers 40"):
        with Ledger(limit_bytes=10):
            collectives.announce("buffer", torch.empty(10))


def test_a_host_without_room_says_so(monkeypatch):
    few = psutil.virtual_memory()._replace(available=2**20)
    monkeypatch.setattr(pools.psutil, "virtual_memory", lambda: few)
    with pytest.raises(MemoryError, match="needs 0.00419 GB, and the host has 0.00105 GB left; offload less"):
        new_host((2**20,), torch.float32)
    assert new_host((2**18,), torch.float32).nbytes == 2**20
    monkeypatch.setattr(pools.psutil, "virtual_memory", lambda: few._replace(available=1))
    with pytest.raises(MemoryError, match="needs 0.00105 GB"):
        new_host((2**18,), torch.float32)
    assert new_host((2**18 - 1,), torch.float32).nbytes == 2**20 - 4  # too little to ask for
    assert dryrun.run(lambda: new_host((2**40,), torch.float32).nbytes, ranks=1) == 2**42


def test_what_the_host_computes_does_not_stand_behind_copies():
    """Nor copies behind each other's way: a thread for each."""
    names = [pools.work(threading.current_thread, torch.ones(1)).result().name]
    names += [
        pools._worker(w).submit(threading.current_thread).result().name for w in ("to_host", "to_device")
    ]
    assert len(set(names)) == 3
