"""Kernels and what compilers make of them: tiles, the memory in front of them, and the graph around them.

First  roofline      peak or bandwidth: which of them limits each operator of a step
       tiles         tiles that a kernel touches, in order, and what a cache has to load of them
Then   roller        tiles that fit the hardware, and loads that run ahead of products (ALCOP)
       tile_chains   products one behind another: orders of blocks (Chimera), what to fuse (Welder)
Last   fusion        chains of operators in one pass, by rules; what torch.compile sees of a function
       triton_kernels    a product, a softmax and attention as Triton programs
"""
