"""A GPT in plain PyTorch, one process: what every technique is applied to and compared with.

First  config              GPTConfig: every size and choice; presets of published models
       layers              attention, MLP, norms
       gpt                 blocks, embedding, head, whole models and stages of them
then   experts_config      which MLPs are experts, and how a token finds them
       mixture             a router and its experts in the place of an MLP (routers: moe/)
       hooks               what techniques put between its layers: one object for all
beside data/               deterministic batches of text
       training/           one step, its optimizer, hyperparameters
       fields              what both configs check alike
       hugging_face_config what a config.json of theirs means here
       hugging_face        the same weights under Hugging Face's names, and where conventions differ
"""
