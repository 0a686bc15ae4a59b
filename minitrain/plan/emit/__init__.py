"""A plan as configuration of other systems, and back: what each can say of it, and what it cannot. No torch.

First  training_job                 a strategy, a model, rows and length, as flat values by name
       table               rows that translate both ways; what is lost is found by reading back
then   megatron, megatron_model   command-line arguments of Megatron-LM; those of the model
       deepspeed           DeepSpeed's JSON, and what its JSON does not say
       torchtitan          torchtitan's TOML, and the sizes that its TOML calls by a name
       plan_file           minitrain's own plan.json

options.tsv has the names and kinds of the options of three systems, with version and date.
"""
