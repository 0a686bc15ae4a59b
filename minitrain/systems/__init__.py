"""The survey: published systems, each a policy on the engines of the techniques. A folder per family.

data_parallel  tensor_parallel  context  pipeline  moe  precision  memory  checkpoint  attention
                 variants of a technique
communication    algorithms of collectives, as schedules of chunks
network          networks as graphs, and traffic on them
cluster          who gets which devices, CPUs, switches, caches and watts, and when
annotate         sharding by annotation
plan             planners and searches
uneven           devices and links that differ: who gets how much of what
data             files of tokens, documents that say nearly the same
simulate         allocators, eviction, storage, failures
rlhf             learning from rewards, with four models
faults           failures made on purpose, their detectors, and training that goes on
kernels          tiles and caches, and what compilers fuse

Imported by compose/, course/ and cli/ alone; no technique knows of it.
"""
