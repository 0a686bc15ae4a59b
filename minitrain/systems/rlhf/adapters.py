"""Low-rank adapters: train two thin matrices beside a frozen one, which may be kept in 4 bits.

    y = x Wᵀ + (α/r) (x Aᵀ) Bᵀ      W[N, K] frozen, A[r, K] drawn from its name, B[N, r] zero at the start
    tp by columns                   W[N/t, K], B[N/t, r], A whole: its gradient comes through copy_to(x Aᵀ)
    tp by rows                      W[N, K/t], A[r, K/t], B whole: reduce_from(x_i A_iᵀ)
    NF4                             a row of W in blocks of 64, each with a scale; scales less their mean in
                                    E4M3, 256 of them with a float32: 4 + 8/64 + 32/(64·256) bits per weight

Trains r (N + K) of N·K numbers. ZeRO cuts A and B, as anything that trains; stage 3 also W, or its codes.
With tp each matrix sends r numbers per token more, and dx of Q, K and V are three sums. A matrix in NF4 is
written out while its layer computes, in forward and again in backward: one at a time.
Hu et al. 2021 (LoRA), arXiv:2106.09685, section 4.1; Dettmers et al. 2023 (QLoRA), arXiv:2305.14314, section
3. Differs: blocks lie in rows; scales in E4M3; no paged optimizer; each rank of tp quantises what it has.
"""

import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minitrain.model.gpt import seed_of
from minitrain.precision.blocks import Blocks, Quantized, dequantize, quantize
from minitrain.precision.formats import E4M3
from minitrain.ranks import collectives
from minitrain.ranks.checks import require_positive, require_positive_ints
from minitrain.ranks.sharding import placement, shard, whole_shape
from minitrain.systems.precision.jit_copies import make_copies
from minitrain.tensor_parallel import linear as cut_linear


class NF4:
    """A matrix `[N, K]` in NF4, its scales in 8 bits."""

    def __init__(self, x: Tensor):
        q = quantize(x, "nf4", fill=True)
        self.shape, self.blocks, self.codes, self.dtype = q.shape, q.blocks, q.codes, x.dtype
        self.mean, self.scales_shape = q.scales.mean(), q.scales.shape
        self.scales = quantize((q.scales - self.mean).flatten(), Blocks(E4M3, (256,)), fill=True)

    nbytes = property(lambda self: self.codes.nbytes + self.scales.nbytes + self.mean.nbytes)

    def values(self, codes: Tensor | None = None) -> Tensor:
        """Written out; of these codes, where they are not the object's."""
        scales = dequantize(self.scales).add(self.mean).view(self.scales_shape)
        q = Quantized(self.codes if codes is None else codes, scales, self.shape, self.blocks)
        return dequantize(q, self.dtype)


class LowRank(nn.Module):
    """In the place of `base`, a Linear, whole or cut by columns or rows, whose name in the model is given."""

    def __init__(self, base: nn.Module, name: str, rank: int, alpha: float, nf4: bool = False, seed: int = 0):
        super().__init__()
        cuts, (out, width) = placement(base.weight).shards, whole_shape(base.weight)
        plain = {getattr(base, "column", cut_linear.column), getattr(base, "row", cut_linear.row)}
        known = isinstance(base, (nn.Linear, cut_linear.ColumnLinear, cut_linear.RowLinear))
        if not known or plain != {cut_linear.column, cut_linear.row}:
            what = f"{name} is a {type(base).__name__}"
            raise ValueError(f"{what}; adapters take Linear, and tp without sequence_parallel and overlap")
        self.base, self.scale, self.cuts = base, alpha / rank, cuts
        draw = torch.Generator().manual_seed(seed_of(f"{name}.a", seed))
        a = torch.randn(rank, width, generator=draw) / math.sqrt(width)
        a, b = (nn.Parameter(x.to(base.weight)) for x in (a, torch.zeros(out, rank)))
        for cut in cuts:
            a, b = (a, shard(b, 0, cut.group)) if cut.dim == 0 else (shard(a, 1, cut.group), b)
        self.a, self.b = a, b
        if nf4:
            base.weight.nf4 = NF4(base.weight)
            base.weight.data = base.weight.nf4.codes
            make_copies([base], values_of)

    def forward(self, x: Tensor) -> Tensor:
        thin = F.linear(x, self.a)
        for cut in self.cuts:
            thin = (collectives.copy_to if cut.dim == 0 else collectives.reduce_from)(thin, cut.group)
        return self.base(x) + self.scale * F.linear(thin, self.b)


def values_of(param: nn.Parameter) -> Tensor:
    return param.nf4.values(param.detach()) if hasattr(param, "nf4") else param.detach()


def add_adapters(layers: Iterable[nn.Module], rank: int, alpha=16.0, nf4=False, seed: int = 0) -> None:
    """To all matrices of all blocks; everything else is frozen. After tp has cut them, before ZeRO."""
    require_positive_ints(rank=rank)
    require_positive(alpha=alpha)
    for layer in layers:
        layer.requires_grad_(False)
        for part in ("attention", "mlp") if hasattr(layer, "attention") else ():
            owner = getattr(layer, part)
            for name, base in list(owner.named_children()):
                if hasattr(base, "weight") and base.weight.dim() == 2:
                    setattr(owner, name, LowRank(base, f"{layer.name}.{part}.{name}", rank, alpha, nf4, seed))


@torch.no_grad()
def merge(layers: Iterable[nn.Module]) -> None:
    """Every adapter into its matrix, W + (α/r) B A, in the model's dtype again: a rank's part of it alone."""
    for owner in [module for layer in layers for module in layer.modules()]:
        for name, module in list(owner.named_children()):
            if isinstance(module, LowRank):
                weight = module.base.weight
                weight.data = values_of(weight) + module.scale * module.b @ module.a
                weight.__dict__.pop("nf4", None)
                setattr(owner, name, module.base)
