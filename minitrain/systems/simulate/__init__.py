"""What systems would do on a described machine: memory, links, disks and failures. No torch.

replay           a step's events on a described machine: when everything would happen
timeline         where the time went, and a file for a browser
links            work, and copies that share links
device_memory    a device's memory, the replay of allocations on it, traces that break an allocator
allocator        PyTorch's caching allocator; GMLake
eviction         results that are dropped when memory is short, and made again; where bytes lie side by side
swaps            whose copies meet; parameters and states on devices, hosts and disks
storage          feeding accelerators from slow disks
traffic_matrix   who sends how much to whom, on a mesh in any order of its axes
failures         a job with failures and saves
crash_model      every state of the disk that a power cut may leave of a save
crashes          a disk on which its process dies; what such crashes leave; a copy that is held up
checkpoint_pipeline   a save beside training
"""
