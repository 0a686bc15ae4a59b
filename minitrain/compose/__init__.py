"""Where techniques meet: the only place that knows them all.

First  parallelize         a model, a Strategy and an optimizer become a Run: a list of passes
then   expert_passes, product_passes, recompute_passes, offload_passes      what it does to layers
       attention_cores     the core of attention that a Strategy names
       run, run_states     what a loop sees: batch, step, evaluate, sample; states of all ranks
       trainer             the loop
beside measured_work       dry runs of one layer, for predictions
       dry_steps           and of one step, for replays
"""
