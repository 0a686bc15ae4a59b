"""The tokens of a sequence over ranks: rings, all-to-alls, and both.

First  layout              who holds which tokens
       ring                blocks of keys and values go round
       gathered            K and V of all ranks in front, dK and dV scattered behind
       ulysses             an all-to-all trades tokens for heads
then   ring_self_attention, balanced, burst, wallfacer          other rings, by what they send and who works when
       hybrid              both over two axes, rings within rings
       sliced, sparing, dynamic                                 slices of a sequence, checkpoints that keep attention, the cut that follows the stage
beside names, choices      a core by name, and what it asks of sizes
       work                how even the work of a ring is
"""
