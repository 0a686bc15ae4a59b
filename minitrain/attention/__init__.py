"""Attention on one device: by tiles, by parts that merge, with biases and masks that depend on positions.

First  kernel              attention over some keys, with the log-sum-exp by which outputs merge
       lazy, flash         softmax over chunks; FlashAttention's tiles, forward and backward
then   score_tiles         which scores a causal mask leaves of a tile
       traffic             what moves between slow and fast memory
       two_level, pipelined, blockwise    cores side by side; FlashAttention-3; attention and MLP by blocks
       packed              sequences of different lengths in one row
       incoherent          Q and K turned, so that outliers spread
beside alibi, dropout, placed              a bias and masks that are functions of the position of a score
"""
