"""The tokens of a sequence over ranks: rings, all-to-alls, and both.

first    layout, ring, gathered, ulysses     who holds what; K, V go round, are gathered; heads dealt
then     double_ring, ulysses_ring           rings in rings (Burst, LoongTrain); Ulysses and rings
         sliced                              slices
beside   core_names, ring_work               the cores by name; how even rings are
"""
