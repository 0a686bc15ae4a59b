"""What a run will cost and how to lay it out, before anything runs. No torch.

First  strategy            a layout as plain values; what cannot be, in one line
       accounting          formulas: parameters, FLOPs, memory, bytes
       predict/            step time, its parts and memory, from a dry run's counts, held to published runs
       planner             the fastest layout of a model on a machine; of several fleets the first
       simulate/           described machines, and what moves on them takes
"""
