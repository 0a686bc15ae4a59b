"""Where techniques meet: the only place that knows them all.

Page   first               all techniques of a GPT in one file of plain torch
First  parallelize         a model, a Strategy and an optimizer become a Run: a list of passes
then   passes              what it does to layers: experts, few bits, recomputation, the host
       attention_cores     the core of attention that a Strategy names
       run                 what a loop sees: batch, step, evaluate, sample; its state
       cached_run          text from a run, a token at a time
       trainer             the loop
beside dry_runs            of one layer, for predictions, and of one step, for replays
"""
