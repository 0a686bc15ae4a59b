"""A short soak: faults at any moment of a step, by chance; the losses are an undisturbed run's, to the bit."""

from benchmarks import soak


def test_a_short_soak():
    """Which deaths are possible together depends on the clock; the losses do not."""
    found = soak.one_round(soak.Storm("zero1", 24, every=8, seed=1))
    assert found.get("lost") or found["equal"] == found["steps"] == 24 and found["apart"] == 0.0, found
