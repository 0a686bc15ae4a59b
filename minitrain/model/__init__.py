"""A GPT in plain PyTorch, one process: what every technique is applied to and compared with.

First  config              GPTConfig and ExpertsConfig: every size and choice; presets of published models
       layers              attention, MLP, norms; hooks: what techniques put between its layers
       gpt                 blocks, embedding, head, whole models and stages of them
then   mixture             a router and its experts in the place of an MLP (routers: moe/)
beside data/               deterministic batches of text
       training/           one step, its optimizer, hyperparameters
"""
