"""What systems would take on a described machine: memory, links, disks and failures. No torch.

traffic_matrix   who sends how much to whom, on a mesh in any order of its axes
storage          feeding accelerators from slow disks
swaps, tiers     whose copies meet; parameters and states on devices, hosts and disks
device_memory    a device's memory, and the replay of allocations on it
allocator_rules, allocator, stitching     PyTorch's caching allocator; GMLake
memory_traces    what breaks an allocator
eviction, eviction_traces                results that are dropped when memory is short, and made again
eviction_addresses                       the same where free bytes must lie side by side
failures         a job with failures and saves
checkpoint_pipeline                      a save beside training, in every way
"""
