"""Sequences over ranks, as further systems cut them.

ring_self_attention, balanced, wallfacer    other rings, by what they send and who works when
sparing, dynamic_sequence                   checkpoints that keep attention; changing dims (DSP)
"""
