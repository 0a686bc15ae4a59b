"""Few bits, as further systems use them.

narrow_sums   where they stall, chunks, promotion; the first FP8 trainings: no scales, sums in 16 bits
int8          products in blocks of 32 x 32 whose integers add up without error, and a block whose operators
              hand INT8 to each other, forward and backward (Jetfire)
int4          products after a Hadamard matrix, gradients split and sampled
nvfp4         NVIDIA's recipe: a rotation, gradients rounded stochastically, weights in squares of 16
jit_copies    exact weights stay, narrow copies live while a layer computes (JIT-Q)
bitnet        weights of one bit and of three values
"""
