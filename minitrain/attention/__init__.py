"""Attention on one device: by tiles, by parts that can be put together, with biases and masks that know their places.

First  kernel              attention over some keys, with the log-sum-exp that lets outputs be merged
       lazy, flash         softmax over chunks; FlashAttention's tiles, forward and backward
then   score_tiles         which scores a causal mask leaves of a tile
       traffic             what moves between slow and fast memory
       two_level, pipelined, blockwise          cores side by side; FlashAttention-3's overlap; attention and MLP block by block
       packed              sequences of different lengths in one row
beside alibi, dropout, placed                   a bias and masks that are functions of the place of a score
"""
