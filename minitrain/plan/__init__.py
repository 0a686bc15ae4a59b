"""What a run will cost and how to lay it out, before anything runs. No torch.

First  accounting/         formulas: parameters, FLOPs, memory, bytes
then   dapple, autopipe    where to cut a pipeline
       memory_balance, adapipe, mpress          by memory: mCAP; what to recompute; where each tensor waits
       dynapipe, graphpipe, trirace             samples of unequal length; models with branches; where weights may be old
       schedule_search     the shortest schedule there is, and Tessel's pattern
       grid_costs          on which grid to cut the matrices of a layer
"""
