"""Text as batches of tokens, a pure function of (step, rank, size).

First  batches             Text, Rows, random tokens
beside deduplicate         near duplicates, found by hashes
"""
