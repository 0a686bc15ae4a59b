"""Tokens, and batches of them that are a pure function of (step, rank, size): batches, then corpus."""
