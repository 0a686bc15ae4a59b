"""The tokens of a sequence over ranks: rings, all-to-alls, and both.

first    layout, ring, gathered, ulysses             who holds what; K, V go round, are gathered; heads dealt
then     ring_self_attention, balanced, wallfacer    other rings, by what they send and who works when
         double_ring, hybrid                         rings in rings (Burst, LoongTrain); Ulysses and rings
         sliced, sparing, dynamic                    slices; checkpoints that keep attention; changing dims
beside   names, choices, work                        a core by name; what it asks of sizes; how even rings are
"""
