"""Which number has how many bits, and what follows.

First  policies     weights, gradients, masters, moments: plain values by name
then   mixed        a policy applied to a model and its optimizer
       loss_scale   gradients that float16 would lose
"""
