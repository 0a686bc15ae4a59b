"""Few bits, as further systems use them.

accumulate    sums in a narrow accumulator: where they stall, chunks, promotion
early_fp8     the first FP8 trainings: casts without scales, sums in 16 bits
int8          products in blocks of 32 x 32 whose integers add up without error, and a block whose operators
              hand INT8 to each other, forward and backward (Jetfire)
int4          products after a Hadamard matrix, gradients split and sampled
bitnet        weights of one bit and of three values
fp8_attention FlashAttention-3's, in FP8 despite outliers
"""
