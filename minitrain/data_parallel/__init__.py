"""Data parallelism: each rank has its own rows of the batch. A Sync sums gradients and owns the optimizer.

Pages  first, first_zero         each technique on 80 lines of plain torch
First  naive, buckets, bucketed  gradients summed after backward, or hidden behind it, in flat buffers
then   sync                      what all stages share: when gradients are complete, who owns the optimizer
       replicated, zero1, zero2  all whole; optimizer states in shards; gradients, too
       zero3                     parameters too, whole only while a layer needs them
       hybrid                    two levels, inside nodes and across
       states                    functions of a Sync: whole parameters, checkpoints in pieces
"""
