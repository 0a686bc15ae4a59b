"""Sharding by annotation: say of a few tensors where they are, the rest and all collectives follow.

First  graph               operators as data, with letters for dims; their gradients as more of them
       signature           split, broadcast, partial; the ways in which an equation can be cut
       boxing              from one placement to another: which collective, how many elements
       plan                a graph placed on a mesh, and the program of a rank
       run_placed          that program on ranks
then   mesh_tensorflow          Mesh-TensorFlow: dims by name, a layout
       propagate           GSPMD: a few annotations spread
       sbp                 OneFlow: each operator takes the cheapest signature
       tactics             PartIR: one decision after the other
beside scheduled           Slapo: the same for modules: shard, sync, fuse, checkpoint, cut
       examples            an MLP and attention as graphs
"""
