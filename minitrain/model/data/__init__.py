"""Text as batches of tokens, a pure function of (step, rank, size), and its near duplicates: batches."""
