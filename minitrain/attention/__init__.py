"""Attention on one device: by tiles, by parts that merge, with biases and masks that depend on positions.

First  kernel              attention over some keys, with the log-sum-exp by which outputs merge
       flash               FlashAttention's tiles, and what moves between slow and fast memory
beside placed              a bias, masks and documents, by the positions of a score
"""
