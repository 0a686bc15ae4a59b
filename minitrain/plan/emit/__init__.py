"""A plan as configuration of Megatron-LM, and back: what it can say, and what it cannot. No torch.

First  training_job        a strategy, a model, rows and length, as flat values by name; minitrain's plan.json
then   megatron            command-line arguments of Megatron-LM, by its table in both directions
"""
