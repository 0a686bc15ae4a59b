"""Grace: after a failure the other ranks hear of it one by one, and have time to end in their own way."""

import fcntl
import os
import signal
import struct
import sys
import termios
import time
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist

from minitrain import collectives, launch
from minitrain.ranks.collectives import channel
from minitrain.ranks.process import PROCESS


def chain(folder, first):
    """Rank 2 fails; rank 1 waits for it, and rank 0 for nobody but rank 1. Who hears of it saves something."""
    rank = dist.get_rank()
    dist.barrier()
    try:
        if rank == 2:
            first()
        dist.recv(torch.ones(1), rank + 1)
    except RuntimeError:
        (folder / str(rank)).write_text("saved")
        raise


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def raises():
    raise ValueError("a batch that is no batch")


@pytest.mark.parametrize(
    "first, words", [(killed, "rank 2 died of SIGKILL"), (raises, "rank 2 raised ValueError")]
)
def test_every_rank_hears_of_a_failure_and_the_right_one_is_named(tmp_path, first, words):
    with pytest.raises(launch.RankError, match=words) as error:
        launch.run(chain, tmp_path, first, ranks=3, grace_s=60)
    assert error.value.ranks == (2,) and {path.name for path in tmp_path.iterdir()} == {"0", "1"}


def test_a_rank_that_does_not_end_is_ended(tmp_path):
    def deaf():
        (tmp_path / str(dist.get_rank())).write_text(str(os.getpid()))
        dist.barrier()
        if dist.get_rank() == 1:
            killed()
        signal.pause()

    with pytest.raises(launch.RankError, match="rank 1 died of SIGKILL"):
        launch.run(deaf, ranks=2, grace_s=0.5)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "0").read_text()), 0)


def unsent_bytes() -> int:
    """Of this process: written to a socket, and not yet taken by the other side."""
    waiting = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            data = fcntl.ioctl(int(name), termios.TIOCOUTQ, b"\0" * 4)
        except OSError:  # no socket, or closed by now
            continue
        waiting += struct.unpack("i", data)[0]
    return waiting


def half_sent(folder):
    """Rank 1 stops with a receive posted, so its side of the connection fills up; then it is killed."""
    group, x = collectives.world(), torch.ones(4_000_000)
    pids = collectives.all_gather(torch.tensor([os.getpid()]), group)
    other = psutil.Process(pids[1 - group.rank()].item())
    if group.rank() == 1:
        collectives.receive(x, 0, group, async_op=True)
        os.kill(os.getpid(), signal.SIGSTOP)
    while other.status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)
    sent = collectives.send(x, 1, group, async_op=True)
    while not unsent_bytes():
        time.sleep(0.01)
    other.kill()
    note_an_error(folder, sent.wait)


def half_received(folder):
    """Rank 1 is killed as soon as the first bytes of a large tensor are there."""
    group, x = collectives.world(), torch.zeros(16_000_000)
    pids = collectives.all_gather(torch.tensor([os.getpid()]), group)
    if group.rank() == 1:
        collectives.channel_of(group).group.send([x + 1], 0, 7).wait()
        signal.pause()
    arrival = collectives.channel_of(group).group.recv([x], 1, 7)
    while not x[0]:
        pass
    os.kill(pids[1], signal.SIGKILL)
    note_an_error(folder, lambda: channel.apart(arrival.wait))
    if x[-1]:  # the rest was in the socket already when its sender died, so the wait could end well
        (folder / "said").write_text("another rank is gone")


def in_the_background(folder):
    """The call that waits is one of those that nobody has waited for yet."""
    group, x = collectives.world(), torch.ones(8_000_000)
    pids = collectives.all_gather(torch.tensor([os.getpid()]), group)
    handle = collectives.all_reduce(x, group, async_op=True)
    if group.rank() == 0:
        until = time.monotonic() + 5
        while not unsent_bytes() and time.monotonic() < until:
            pass
        os.kill(pids[1], signal.SIGKILL)
    note_an_error(folder, lambda: (handle.wait(), collectives.barrier(group)))
    note_an_error(folder, lambda: collectives.barrier(group))


def note_an_error(folder, wait):
    try:
        wait()
    except RuntimeError as error:
        with open(folder / "said", "a") as file:
            file.write(f"{error}\n")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("fn", [half_sent, half_received, in_the_background])
def test_a_message_that_gloo_forgets_does_not_hold_its_rank_for_ever(fn, tmp_path):
    """A part of it was on its way when its peer died. Whoever waits for it can still save something."""
    with pytest.raises(launch.RankError, match="rank 1 died of SIGKILL") as error:
        launch.run(fn, tmp_path, ranks=2, grace_s=1.5, checked=False)
    assert error.value.ranks == (1,)
    said = (tmp_path / "said").read_text()
    assert "another rank is gone" in said or "Connection" in said, said


def test_ranks_that_are_well_finish_a_call_after_another_has_died(tmp_path):
    """The patience is for waits, not for the launch: what is between two survivors still works."""

    def pairs():
        group = collectives.world()
        mine = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][group.rank() // 2]
        collectives.barrier(group)
        if group.rank() == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        while PROCESS.lost_since is None:
            time.sleep(0.01)
        if group.rank() < 2:
            (tmp_path / str(group.rank())).write_text(f"{collectives.all_reduce(torch.ones(1), mine).item()}")

    with pytest.raises(launch.RankError, match="rank 3 died of SIGKILL"):
        launch.run(pairs, ranks=4, grace_s=60)
    assert [(tmp_path / name).read_text() for name in "01"] == ["2.0", "2.0"]


@pytest.mark.parametrize("started, until", [(90.0, 101.0), (105.0, 106.0)])
def test_a_wait_ends_its_patience_after_the_loss_or_its_own_later_begin(started, until, monkeypatch):
    monkeypatch.setattr(PROCESS, "patience_s", 1.0)
    monkeypatch.setattr(PROCESS, "lost_since", 100.0)
    monkeypatch.setattr(channel, "time", SimpleNamespace(monotonic=lambda: now))
    now = until
    channel.check_patience(started)
    now += 0.5
    with pytest.raises(RuntimeError, match="another rank is gone"):
        channel.check_patience(started)
    assert PROCESS.patience_s == 0  # nothing else is waited for
