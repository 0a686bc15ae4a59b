"""Pipelines, as further systems run them.

bpipe_eviction    activations that leave for another rank (BPipe)
asynchronous      PipeDream: never emptied
post_validation   clipping without a common stop (Zero Bubble)
halves            a forward and a backward in turns, each while rows of the other travel (DeepSeek-V3)
sliced_attention  slices of a sequence as units (TeraPipe)
contrastive       a loss over all samples at once
traced            a traced model in even stages, unchanged (Merak)
torch_csv         PyTorch's files of schedules
"""
