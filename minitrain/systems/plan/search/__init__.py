"""Searches for a plan: which words each layer gets, which layers and devices a stage. No torch.

First  problem             layers, levels of devices, words; what a choice costs, proved on ranks
       exhaustive, stages  every choice, every plan with stages: the truth
then   optcnn, tensoropt   elimination: the fastest; all that are worth having (memory against time)
       flexflow            a random walk over simulated choices
       tofu, hypar         level by level: halves of all tensors; data or model parallelism
       autoddl             coordinate descent
       placement           reinforcement learning places whole operators
       automap             decisions that propagate, found by Monte Carlo tree search
       piper, alpa         stages outside; inside fronts, or an integer program
       galvatron, aceso    a decision tree and fronts; from bottleneck to bottleneck
       unity, nnscaler     rewritten graphs; three primitives and an expert's constraints
       autotuning          what does not fit is never run
       race                all of them on one instance, each beside every choice

PipeDream's dynamic program is in pipeline/partition.py, Merak's traced partitioner in traced.py.
"""
