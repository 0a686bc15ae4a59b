"""A plan as configuration of other systems, and back: what each can say of it, and what it cannot. No torch.

First  training_job        a strategy, a model, rows and length, as flat values by name; minitrain's plan.json
       table               one table per system (megatron.tsv, ..), read in both directions
then   megatron            command-line arguments of Megatron-LM
       deepspeed           DeepSpeed's JSON, and what its JSON does not say
       torchtitan          torchtitan's TOML, and the sizes that its TOML calls by a name
       plan_files          the best that a system can express, and a file of another beside a plan
"""
