"""The published schedules, each a function from ranks and microbatches to lists. No torch.

First  one_direction       GPipe, 1F1B, interleaved, breadth-first; in slices: TeraPipe, Seq1F1B
then   zero_bubble         ZB-H1, ZB-H2, interleaved; V shapes: ZB-V, V-Half, V-Min
       bidirectional       Chimera, DualPipe, and a wave (Hanayo)
       greedy              a list scheduler: ZB with any memory
beside less_memory         BPipe lends activations, Varuna recomputes just in time
"""
