"""Sequences over ranks, as further systems cut them.

ring_self_attention, balanced, wallfacer    other rings, by what they send and who works when
dynamic_sequence                            changing dims (DSP)
"""
