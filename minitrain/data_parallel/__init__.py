"""Data parallelism: each rank has its own rows of the batch. A Sync sums gradients and owns the optimizer.

First  naive, buckets, bucketed  gradients summed after backward, or hidden behind it
then   sync, states              what all stages share: hooks, optimizers by name and shape; states, in pieces
       replicated                everything whole on every rank
       flat, zero1, zero2        buffers that divide; optimizer states, then gradients, kept in shards
       sharded_units, zero3      parameters too, whole only while a layer needs them
       hybrid, choices           two levels, inside nodes and across; which sharding fits a cluster
beside hierarchical_gather       an all-gather over nodes
"""
