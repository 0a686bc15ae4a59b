"""Data before training, and on its way into it.

corpus         rows from files of tokens: shuffled, packed, mixed by weights (Megatron-LM)
deduplicate    documents that say nearly the same (WanJuan-CC)
"""
