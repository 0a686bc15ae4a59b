"""Six kills of tests/kills.py: every rank and a whole job, at drawn calls to the file system and drawn steps."""

from tests.checkpoint import test_saver
from tests.kills import RANKS, History


def test_kills_lose_nothing(tmp_path):
    test_saver.test_it_is_committed_when_all_have_written(tmp_path / "all")
    history = History(tmp_path, seed=2079)
    while history.counts["killed"] < 6:
        history.life(history.death())
        assert not history.wrong
    assert history.counts["acknowledged"] > 6 and history.counts["losses"] > 18
    assert all(history.counts[f"rank {rank}"] for rank in range(RANKS)) and history.counts["the launcher"]
    assert history.counts["left half-written"]  # some died in the middle of a save
