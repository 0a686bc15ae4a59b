"""Which number has how many bits, and what follows.

First  formats        what each code of a narrow format stands for
       rounding       to a format: nearest, toward zero or by chance; codes and back
       blocks         numbers that share a scale, and the scale
       accumulate     sums in few bits: where they stall, what chunks and promotion leave
then   policies       weights, gradients, masters, moments: plain values by name
       mixed          a policy applied to a model and its optimizer
       loss_scale     gradients that float16 would lose
"""
