"""The tokens of a sequence over ranks: rings, all-to-alls, and both.

pages    first, first_ulysses                each technique on 80 lines of plain torch
first    layout, ring, ulysses               who has what, and how even that is; K, V go round, in rings
                                             in rings too, or are gathered; heads dealt; both
beside   core_names                          the cores by name
"""
