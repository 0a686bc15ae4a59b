"""Uneven machines: devices and links that differ, and who gets how much of what.

shares         of rows, heads and products by speed: Whale, AccPar, HAP
stage_devices  which layers on which device of a pipeline: Pipe-Par, HPH, AMP, FusionAI
far_apart      devices with slow links between them: DT-FM's placement, SDPipe's groups
waves          virtual workers that may be ahead of each other: HetPipe, planned and on ranks
uneven_parts   uneven rows, heads and hidden units on ranks
"""
