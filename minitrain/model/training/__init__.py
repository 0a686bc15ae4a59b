"""One training step and what updates parameters. Which ranks there are is not known here.

First  step                forward, backward, sum, clip, update, with one seam; gradient accumulation
       optim               AdamW, one norm over parameters cut in any way
beside hyperparameters, flags the numbers of a run as plain values, and as flags of a command
"""
