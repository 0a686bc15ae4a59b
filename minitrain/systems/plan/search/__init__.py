"""Searches for a plan: which shardings each layer gets, which layers and devices a stage. No torch.

First  problem     layers, levels of devices, shardings; what a choice costs, proved on ranks; every choice
then   layerwise   OptCNN, TensorOpt, HyPar, AutoDDL: elimination, fronts, level by level, coordinate descent
       simulated   FlexFlow, placement by reinforcement learning, DeepSpeed's autotuning
       tofu        halves of all tensors, level by level
       automap     decisions that propagate, found by Monte Carlo tree search
       staged      plans with stages: Piper, Alpa, Galvatron, Aceso, and every plan there is
       unity, nnscaler   rewritten graphs; three primitives and an expert's constraints
       race        all of them on one instance, each beside every choice
"""
