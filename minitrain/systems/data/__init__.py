"""Data before training: deduplicate finds documents that say nearly the same (WanJuan-CC)."""
