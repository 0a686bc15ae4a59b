"""Uneven machines: devices and links that differ, and who gets how much of what.

shares         of rows, heads and products by speed: Whale, AccPar, HAP
stage_devices  which layers on which device of a pipeline: Pipe-Par, FusionAI, HPH, AMP, DT-FM
unequal_ranks  uneven rows, heads and hidden units on ranks; workers that wait little: HetPipe, SDPipe
"""
