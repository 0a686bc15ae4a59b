"""Grace: after a failure the other ranks hear of it one by one, and have time to end in their own way."""

import os
import signal

import pytest
import torch
import torch.distributed as dist

from minitrain import launch


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
    assert error.value.ranks == (2,)
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1"}


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


@pytest.mark.parametrize("grace_s", [0, -1, True, "1"])
def test_a_grace_of_no_time_is_refused(grace_s):
    with pytest.raises(ValueError, match=f"grace_s = {grace_s!r}; use a number of seconds above 0"):
        launch.run(dist.get_rank, grace_s=grace_s)
