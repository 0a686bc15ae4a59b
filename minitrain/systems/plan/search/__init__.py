"""Searches for a plan: which shardings each layer gets, which layers and devices a stage. No torch.

First  problem     layers, levels of devices, shardings; what a choice costs, proved on ranks; every choice
then   layerwise   OptCNN, TensorOpt, HyPar, Tofu, AutoDDL: elimination, fronts, halves, coordinate descent
       simulated   FlexFlow, placement by reinforcement learning, Automap, DeepSpeed's autotuning
       staged      plans with stages: Piper, Alpa, Galvatron, Aceso, and every plan there is
       programs    nnScaler, Unity: three primitives and an expert's constraints; rewritten graphs
"""
