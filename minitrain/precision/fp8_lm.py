"""FP8-LM: 6 bytes per parameter, each number in as many bits as it needs and a scale for each tensor.

                       stored as             bytes    where
    weight (master)    FP16 with a scale       2      the parameter, and `param.largest`
    gradient           E4M3 with a scale       1      `param.grad` once it is summed, and `param.grad_largest`
    mean               E4M3 with a scale       1      state["exp_avg"], "exp_avg_largest"
    mean of squares    FP16 with a scale       2      state["exp_avg_sq"], "exp_avg_sq_largest"

value = code · amax / largest number of the format. Forward and backward compute with bfloat16 copies made
just in time (systems/precision/jit_copies.py). Gradients are added up as codes with one scale
(systems/data_parallel/scaled.py): in units of A / μ, where A is the largest of any rank, sums of n ranks
overflow E4M3 unless μ <= 1/n. Ranks seldom agree, so μ starts at 1, halves after a step in which more than
0.001 % of a tensor's sums were cut off, and else doubles within 1,000 steps. Peng et al. 2023,
arXiv:2310.18313, sections 2.1 and 2.2. Differs: products in bfloat16; a μ for each tensor, from 1/n to 1.
"""

import torch
from torch import Tensor

from minitrain.precision.blocks import Blocks, Quantized, dequantize, quantize
from minitrain.precision.formats import E4M3, FP16
from minitrain.ranks.checks import require_positive_ints

BLOCKS = {f.dtype: Blocks(f) for f in (E4M3, FP16)}
INTEGERS = {torch.float8_e4m3fn: torch.uint8, torch.float16: torch.uint16}
OVERFLOWS, DOUBLES_IN = 1e-5, 1000  # share of a tensor, steps


def narrow(x: Tensor, dtype: torch.dtype, amax: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x -> E4M3 or FP16 numbers, and what the largest stands for: max |x|, or `amax`, which cuts x off."""
    q = quantize(x, BLOCKS[dtype], amax=amax)
    return q.codes.view(dtype), q.scales


def wide(x: Tensor, amax: Tensor) -> Tensor:
    x = x.detach()
    return dequantize(Quantized(x.contiguous().view(INTEGERS[x.dtype]), amax, x.shape, BLOCKS[x.dtype]))


def next_mu(mu: Tensor, sums: Tensor, ranks: int) -> Tensor:
    """After a step in which the codes of a tensor's gradient added up to `sums`, E4M3."""
    require_positive_ints(ranks=ranks)
    share = (sums.float().abs() == E4M3.max).double().mean()
    return torch.where(share > OVERFLOWS, mu / 2, mu * 2 ** (1 / DOUBLES_IN)).clamp(1 / ranks, 1.0)
