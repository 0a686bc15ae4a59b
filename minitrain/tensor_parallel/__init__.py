"""Tensor parallelism: the matrices of a layer cut over ranks, in one dimension and on grids."""
