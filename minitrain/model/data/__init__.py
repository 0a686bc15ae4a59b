"""Batches that are a pure function of (step, rank, size): batches, corpus, token_files, tokenizer"""
