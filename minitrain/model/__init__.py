"""A GPT in plain PyTorch, one process: what every technique is applied to and compared with.

First  config              GPTConfig: every size and choice; presets of published models
       layers              attention, MLP, norms
       gpt                 blocks, embedding, head, whole models and stages of them
beside hugging_face        the same weights under Hugging Face's names, and where conventions differ
"""
