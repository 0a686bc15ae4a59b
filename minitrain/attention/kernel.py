"""A block of attention that can be put together with others: its output, and the log-sum-exp that says how much it counts.

    S = Q Kᵀ / sqrt(K)      lse = log Σ_j exp S_j      O = softmax(S) V                     Q[B, H, Tq, K]   K, V[B, H_kv, Tk, K]

Keys may come in blocks, in any order, on any rank: with (O, lse) of two sets of keys, those of their union are

    lse' = log(exp lse_1 + exp lse_2)          O' = O_1 exp(lse_1 - lse') + O_2 exp(lse_2 - lse')          neutral: O = 0, lse = -inf

and backward of a block needs nothing of the others but the final O and lse: P = exp(S - lse), D = rowsum(dO · O),

    dV = Pᵀ dO          dS = P (dO Vᵀ - D)          dQ = dS K / sqrt(K)          dK = dSᵀ Q / sqrt(K)

so that blocks are done again in backward and their sums are the gradients. `OnlineSoftmax` and `GradSum` take blocks in as they come, whatever
brings them (ring.py, balanced.py, wallfacer.py). `plain_*` writes this down and keeps [Tq, Tk] scores while it works; `fused_*` calls
torch's flash kernels (CPU: any float; CUDA: fp16 and bf16), which do not. Sends nothing. Grouped queries: k, v may have fewer heads;
they are repeated where they are used and their gradients summed. Values may have another width than keys, as in latent attention.

Raises ValueError in one line for heads that do not divide and for a triangle that is not square.
Milakov and Gimelshein 2018, arXiv:1805.02867 (online softmax); Rabe and Staats 2021, arXiv:2112.05682, section 2; Dao et al. 2022
(FlashAttention), arXiv:2205.14135, section 3.1 and appendix B. Differs: nothing is tiled here; flash.py does that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from minitrain import torch_private


class Kernel(NamedTuple):
    """How a block is computed: `forward(q, k, v, causal) -> out, lse`, `backward(dout, q, k, v, out, lse, causal) -> dq, dk, dv`."""

    forward: Callable
    backward: Callable

    def on(self, tile) -> Kernel:
        """The blocks for one tile (layout.Tile). Where scores are alike everywhere they are the same; placed.py has others."""
        return self


def merge(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> None:
    """Takes another set of keys into `out` `[B, H, Tq, K]` and `lse` `[B, H, Tq]`, in place."""
    total = torch.logaddexp(lse, other_lse)
    both = total.clamp_min(torch.finfo(lse.dtype).min)  # nothing and nothing are nothing, not nan
    out.mul_((lse - both).exp_().unsqueeze(-1)).addcmul_(other_out, (other_lse - both).exp_().unsqueeze(-1))
    lse.copy_(total)


def empty_result(q: Tensor, width: int | None = None) -> tuple[Tensor, Tensor]:
    """The neutral element for queries q and values of that width (q's): out and lse in at least float32."""
    exact = torch.promote_types(q.dtype, torch.float32)
    return q.new_zeros(*q.shape[:-1], width or q.size(-1), dtype=exact), q.new_full(
        q.shape[:-1], -math.inf, dtype=exact
    )


def plain_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    bias: Callable | None = None,
    factors: Callable | None = None,
) -> tuple[Tensor, Tensor]:
    """`bias(device)` `[H, Tq, Tk]`: what is added to the scores. `factors(P)` `[B, H, Tq, Tk]`: what P is multiplied by before it meets V;
    lse does not see it (placed.py)."""
    k, v = repeat_kv(q, k, v)
    scores = _scores(q, k, causal, bias)
    lse = scores.logsumexp(-1)
    p = (scores - lse.unsqueeze(-1)).exp()
    if factors:
        p = p * factors(p)
    return p.to(v.dtype) @ v, lse


def plain_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    bias: Callable | None = None,
    factors: Callable | None = None,
) -> tuple[Tensor, ...]:
    kv_heads, (k, v) = k.size(1), repeat_kv(q, k, v)
    p = (_scores(q, k, causal, bias) - lse.unsqueeze(-1)).exp()
    dp, weights = dout @ v.transpose(-2, -1), p
    if factors:
        kept = factors(p)
        dp, weights = dp * kept, p * kept
    ds = (p * (dp - row_sums(dout, out).unsqueeze(-1))).to(q.dtype) / math.sqrt(q.size(-1))
    return (
        ds @ k,
        sum_kv_copies(ds.transpose(-2, -1) @ q, kv_heads),
        sum_kv_copies(weights.transpose(-2, -1).to(dout.dtype) @ dout, kv_heads),
    )


def _scores(q: Tensor, k: Tensor, causal: bool, bias: Callable | None) -> Tensor:
    scores = (q @ k.transpose(-2, -1)).to(torch.promote_types(q.dtype, torch.float32)) / math.sqrt(q.size(-1))
    if bias:
        scores = scores + bias(q.device)
    if not causal:
        return scores
    _check_square(q, k)
    return scores + scores.new_full(scores.shape[-2:], -math.inf).triu(1)


def fused_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: Callable | None = None
) -> tuple[Tensor, Tensor]:
    """The kernels want q, k, v of one width: a narrower v has zeros behind it meanwhile."""
    if not _fits_kernel(q, v, bias):
        return plain_forward(q, k, v, causal, bias)
    if causal:
        _check_square(q, k)
    width, (k, v) = v.size(-1), repeat_kv(q, k, v)
    v = widened(v, q)
    if q.is_cuda:
        out, lse = torch_private.flash_cuda(q, k, v, 0.0, causal)[:2]
    else:
        out, lse = torch_private.flash_cpu(q, k, v, 0.0, causal, attn_mask=_mask(bias, q))
    return out[..., :width], lse


def fused_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    bias: Callable | None = None,
) -> tuple[Tensor, ...]:
    if not _fits_kernel(q, v, bias):
        return plain_backward(dout, q, k, v, out, lse, causal, bias)
    kv_heads, width, (k, v) = k.size(1), v.size(-1), repeat_kv(q, k, v)
    dout, v, out = (widened(x, q) for x in (dout, v, out))
    if q.is_cuda:
        unused = torch.empty(
            2, dtype=torch.uint64, device=q.device
        )  # random state of a dropout that is not there
        dq, dk, dv = torch_private.flash_cuda_backward(
            dout, q, k, v, out, lse, None, None, q.size(2), k.size(2), 0.0, causal, unused, unused
        )
    else:
        dq, dk, dv = torch_private.flash_cpu_backward(
            dout, q, k, v, out, lse, 0.0, causal, attn_mask=_mask(bias, q)
        )
    return dq, sum_kv_copies(dk, kv_heads), sum_kv_copies(dv[..., :width], kv_heads)


def _fits_kernel(q: Tensor, v: Tensor, bias: Callable | None) -> bool:
    """CPU: any float, and a bias as a mask. CUDA: fp16 and bf16, without."""
    return v.size(-1) <= q.size(-1) and not (
        q.is_cuda and (bias or q.dtype not in (torch.float16, torch.bfloat16))
    )


def widened(x: Tensor, q: Tensor) -> Tensor:
    """With zeros behind each head, as wide as q's."""
    return x if x.size(-1) == q.size(-1) else F.pad(x, (0, q.size(-1) - x.size(-1)))


def _mask(bias: Callable | None, q: Tensor) -> Tensor | None:
    return bias(q.device).unsqueeze(0) if bias else None


PLAIN, FUSED = Kernel(plain_forward, plain_backward), Kernel(fused_forward, fused_backward)


def row_sums(dout: Tensor, out: Tensor) -> Tensor:
    """D = rowsum(dO · O) `[B, H, T]`, in at least float32: all that backward needs to know of O."""
    exact = torch.promote_types(dout.dtype, torch.float32)
    return (dout.to(exact) * out).sum(-1)


def stand_in(dout: Tensor, delta: Tensor) -> Tensor:
    """An O' with the row sums D, from D alone: the projection of O on dO. Kernels ask for O, form D of it and use nothing else of it."""
    exact, tiny = dout.to(delta.dtype), torch.finfo(delta.dtype).tiny
    largest = exact.abs().amax(-1, keepdim=True).clamp_min(tiny)  # gradients may be too small to be squared
    along = exact / largest
    return (
        along * (delta.unsqueeze(-1) / largest / along.square().sum(-1, keepdim=True).clamp_min(tiny))
    ).to(dout.dtype)


def repeat_kv(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """k and v `[B, H_kv, T, K]` with a copy of each head for every query head that uses it: `[B, H, T, K]`."""
    groups, rest = divmod(q.size(1), k.size(1))
    if rest:
        raise ValueError(
            f"{q.size(1)} query heads over {k.size(1)} K/V heads: not a multiple; every K/V head serves as many queries"
        )
    return (k, v) if groups == 1 else (k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1))


def sum_kv_copies(dx: Tensor, kv_heads: int) -> Tensor:
    """The adjoint of `repeat_kv`: sums the copies' gradients `[B, H, T, K]` -> `[B, H_kv, T, K]`."""
    return dx if dx.size(1) == kv_heads else dx.unflatten(1, (kv_heads, -1)).sum(2)


def _check_square(q: Tensor, k: Tensor) -> None:
    if q.size(-2) != k.size(-2):
        raise ValueError(
            f"causal: {q.size(-2)} queries and {k.size(-2)} keys are no triangle; give as many of both"
        )


# ---- put together, tile by tile (layout.Tile) ------------------------------------------------------------------------


class OnlineSoftmax:
    """What queries q `[B, H, T, K]` have found among the keys they met so far, in at least float32."""

    def __init__(self, q: Tensor):
        self.q, self.out, self.lse = q, None, None

    def add_tiles(self, seen: list, k: Tensor, v: Tensor, kernel: Kernel) -> None:
        """Takes in what the tiles `seen` say that q sees of these keys."""
        for tile in seen:
            rows, columns = (..., tile.queries, slice(None)), (..., tile.keys, slice(None))
            self.add(
                tile.queries, *kernel.on(tile).forward(self.q[rows], k[columns], v[columns], tile.causal)
            )

    def add(self, queries: slice, out: Tensor, lse: Tensor) -> None:
        """The first block that all queries see is kept as it is, others are merged."""
        if self.out is None and out.shape[:-1] == self.q.shape[:-1]:
            exact = torch.promote_types(out.dtype, torch.float32)
            self.out, self.lse = out.to(exact), lse.to(exact)
            return
        if self.out is None:
            self.out, self.lse = empty_result(self.q, out.size(-1))
        merge(self.out[..., queries, :], self.lse[..., queries], out, lse)

    def exact(self) -> tuple[Tensor, Tensor]:
        """out `[B, H, T, K]` and lse `[B, H, T]`."""
        return empty_result(self.q) if self.out is None else (self.out, self.lse)

    def result(self) -> tuple[Tensor, Tensor]:
        """The same, out in q's dtype."""
        out, lse = self.exact()
        return out.to(self.q.dtype), lse


class GradSum:
    """A sum of gradients of parts of x `[B, H, T, K]`, in at least float32; the first that is of all of it is kept as it is.

    In memory it lies as `[B, T, H, K]`, as flash kernels leave gradients. So `by_token` is what is sent: another order would be copied.
    """

    def __init__(self, x: Tensor):
        self.x, self._total = x, None

    def add(self, tokens: slice, part: Tensor) -> None:
        if self._total is not None:
            self._total[..., tokens, :] += part
        elif part.shape == self.x.shape:
            self._total = part.to(torch.promote_types(part.dtype, torch.float32))
        else:
            self._total = self.total
            self._total[..., tokens, :] = part

    @property
    def total(self) -> Tensor:
        if self._total is not None:
            return self._total
        return torch.zeros_like(
            self.x.transpose(1, 2),
            dtype=torch.promote_types(self.x.dtype, torch.float32),
            memory_format=torch.contiguous_format,
        ).transpose(1, 2)

    @property
    def by_token(self) -> Tensor:
        """`[B, T, H, K]`."""
        return self.total.transpose(1, 2)


def add_tiles_backward(
    seen: list,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dq: GradSum,
    dk: GradSum,
    dv: GradSum,
    kernel: Kernel,
) -> None:
    """Adds what these tiles give to the sums for q, k and v; out and lse are those of all keys."""
    for tile in seen:
        rows, columns = (..., tile.queries, slice(None)), (..., tile.keys, slice(None))
        found = kernel.on(tile).backward(
            dout[rows], q[rows], k[columns], v[columns], out[rows], lse[..., tile.queries], tile.causal
        )
        for total, tokens, part in zip((dq, dk, dv), (tile.queries, tile.keys, tile.keys), found):
            total.add(tokens, part)


# ---- attention that is computed anew in backward ---------------------------------------------------------------------


def recomputed(forward: Callable, backward: Callable, q: Tensor, k: Tensor, v: Tensor, *way) -> Tensor:
    """out of forward(q, k, v, *way) -> out, lse. Keeps these five; backward(dout, q, k, v, out, lse, *way) -> dq, dk, dv does the rest."""
    return _Recomputed.apply(q, k, v, forward, backward, way)


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, q: Tensor, k: Tensor, v: Tensor, forward: Callable, backward: Callable, way: tuple
    ) -> Tensor:
        out, lse = forward(q, k, v, *way)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.way = backward, way
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout: Tensor):
        backward, way = ctx.way
        return *backward(dout, *ctx.saved_tensors, *way), None, None, None
