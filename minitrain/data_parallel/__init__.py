"""Data parallelism: every rank holds the whole model and its own part of the batch."""
