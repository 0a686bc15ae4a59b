"""Batches that are a pure function of (step, rank, size): batches, then corpus; beside token_files, tokenizer."""
