"""Attention as further systems compute it.

lazy            softmax over chunks (Rabe and Staats)
swattention     cores side by side that share what comes from slow memory
pipelined       FlashAttention-3: two tiles in turns
incoherent      Q and K rotated, so that outliers spread
"""
