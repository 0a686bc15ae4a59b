"""The tokens of a sequence over ranks: rings, all-to-alls, and both.

first    layout, ring, gathered, ulysses     who has what, and how even that is; K, V go round, or are
                                             gathered; heads dealt
then     double_ring, ulysses_ring           rings in rings (Burst, LoongTrain); Ulysses and rings
beside   core_names                          the cores by name
"""
