"""Graded exercises: the judge stays outside; the answer runs in processes that get inputs and give back data."""
