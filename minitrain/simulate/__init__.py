"""What a run would take on a described machine, computed from its events. No torch.

First  events              what one rank did, in order
       machines            devices and links, from datasheets
       collectives         what a collective costs
       replay, wires       when everything would happen; transfers that meet on a link or a card share it
then   timeline, intervals, trace               where the time went, and a file for a browser
beside traffic_matrix      who sends how much to whom, on a mesh in any order of its axes
       storage             feeding accelerators from slow disks
       links               work, and copies that share links
       swaps, tiers        whose copies meet; parameters and states on devices, hosts and disks
       device_memory       a device's memory, and the replay of allocations on it
       allocator_rules, allocator, stitching     PyTorch's caching allocator; GMLake
       memory_traces       what breaks an allocator
       eviction, eviction_traces                results that are dropped when memory is short, and made again
       eviction_addresses                       the same where free bytes must lie side by side
       failures            a job with failures and saves
       checkpoint_pipeline                      a save beside training, in every way
"""
