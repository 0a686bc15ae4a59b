"""Batches that are a pure function of (step, rank, size): batches, token_files, tokenizer"""
