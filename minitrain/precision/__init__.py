"""Which number has how many bits, to the bit, and what follows for training.

Page   first       masters, a scaled loss, products of 8 bits on 80 lines of plain torch
First  formats     what each code of a few bits stands for; all formats by name
       rounding    nearest, toward zero, by chance; tensors to codes and back
then   blocks      one scale for a row, a tile, 32 numbers: recipes from INT8 to NVFP4
       products    the three products of a linear layer, FP8 recipes, where scales come from; such layers
then   policies    weights, gradients, masters and moments of a run: plain values by name
       mixed       a policy applied to a model and its optimizer; the scale of a loss in float16
       fp8_lm      weights, gradients and moments as codes with a scale for each tensor: 6 bytes
       chance      16-bit weights without a master: rounding by chance, alike in every layout
"""
