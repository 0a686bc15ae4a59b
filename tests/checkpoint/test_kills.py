"""Sixty kills of tests/kills.py: ranks and whole jobs, at drawn calls to the file system and drawn steps."""

import pytest

from tests.kills import RANKS, History


@pytest.mark.parametrize("seed", [1, 2])  # two halves, for two workers
def test_thirty_kills_lose_nothing(seed, tmp_path):
    history = History(tmp_path, seed)
    while history.counts["killed"] < 30:
        history.life(history.death())
        assert not history.wrong
    assert history.counts["acknowledged"] > 30 and history.counts["losses"] > 60
    assert all(history.counts[f"rank {rank}"] for rank in range(RANKS)) and history.counts["the launcher"]
    assert history.counts["left half-written"]  # some died in the middle of a save
