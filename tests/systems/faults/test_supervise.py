"""A launch that fails too often; one that goes on is in tests/cli/test_train_command.py."""

import pytest

from minitrain.cli.train_command import train as command
from minitrain.ranks.launch import RankError
from minitrain.systems.faults.supervise import supervise


def test_a_job_that_fails_too_often_says_the_last_error(capfd):
    with pytest.raises(RankError, match="ZeroDivisionError"):
        supervise(lambda: 1 // 0, restarts=2, ranks=1)
    assert "restart 2 of 2" in capfd.readouterr().err
    with pytest.raises(ValueError, match="--checkpoint"):
        command(restarts=1)
