"""Attention as further systems compute it.

lazy            softmax over chunks (Rabe and Staats)
blockwise       attention and MLP by blocks (Liu and Abbeel)
packed          sequences of different lengths in one row, without padding (ByteTransformer)
swattention     cores side by side that share what comes from slow memory
flash_3         FlashAttention-3: two tiles in turns; Q and K turned against outliers, in FP8
"""
