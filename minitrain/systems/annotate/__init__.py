"""Sharding by annotation: say of a few tensors where they are, the rest and all collectives follow.

First  plan                operators as data, with letters for dims; their gradients as more of them;
                           split, broadcast, partial; what a change of place sends; the program of a rank
       run_placed          that program on ranks
then   annotators          Mesh-TensorFlow, GSPMD, OneFlow, PartIR: four ways to say where tensors are
       scheduled           Slapo: the same for modules: shard, sync, fuse, checkpoint, cut
"""
