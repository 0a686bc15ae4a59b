"""Attention over some of the keys: its output, and the log-sum-exp of its scores, by which outputs merge.

    S = Q Kᵀ / sqrt(K)    lse = log Σ_j exp S_j    O = softmax(S) V      Q[B, H, Tq, K]   K, V[B, H_kv, Tk, K]
    lse' = log(exp lse_1 + exp lse_2)              O' = O_1 exp(lse_1 - lse') + O_2 exp(lse_2 - lse')

The second line merges the results of two sets of keys, in any order, from any rank. Backward computes each
block of keys again, needs of the others only O and lse, and adds up. P = exp(S - lse), D = rowsum(dO · O):

    dV = Pᵀ dO          dS = P (dO Vᵀ - D)          dQ = dS K / sqrt(K)          dK = dSᵀ Q / sqrt(K)

`plain_*` is these equations and holds scores [Tq, Tk]; `fused_*` calls torch's flash kernels (CPU: any float;
CUDA: fp16, bf16), which do not, or on a GPU, for what these do not take, the equations for 512 rows at a
time. k and v may have fewer heads than q, and v another width than k. Under a causal mask query i sees keys
0 .. i + Tk - Tq: queries may be the last ones of a longer text. A tile without a visible score is not
computed, one that the diagonal crosses gets -inf, others no mask. Sends nothing.
Milakov and Gimelshein 2018, arXiv:1805.02867; Rabe and Staats 2021, arXiv:2112.05682, section 2; Dao et al.
2022, arXiv:2205.14135, section 3.1 and appendix B; Dao 2023, arXiv:2307.08691, section 3.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from minitrain.ranks import torch_private
from minitrain.ranks.autograd import custom_vjp
from minitrain.ranks.checks import MOST, require_ints, require_positive_ints
from minitrain.ranks.devices import cuda_capability


def wide(x: Tensor) -> torch.dtype:
    """In which softmax and its sums are computed: float32, or x's own dtype where that is wider."""
    return torch.promote_types(x.dtype, torch.float32)


def pieces(length: int, size: int) -> list[slice]:
    """0 .. length in runs of `size`, the last one perhaps shorter."""
    require_positive_ints(size=size)
    require_ints(0, MOST, length=length)
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def diagonal(q: Tensor, k: Tensor, causal: bool) -> int | None:
    """The shift of the mask, or None if every query sees every key."""
    queries, keys = q.size(-2), k.size(-2)
    if causal and queries > keys:
        raise ValueError(f"causal: of {queries} queries with {keys} keys the first ones see nothing")
    return keys - queries if causal else None


def visible(rows: slice, columns: slice, shift: int | None) -> bool:
    """Some query of the rows sees some key of the columns."""
    return shift is None or columns.start < rows.stop + shift


def score_tile(q: Tensor, k: Tensor, rows: slice, columns: slice, shift: int | None) -> Tensor:
    """q `[.., r, K]` and k `[.., c, K]`, which are these rows and columns -> `[.., r, c]`, in `wide`."""
    scores = (q @ k.transpose(-2, -1)).to(wide(q)) / math.sqrt(q.size(-1))
    if shift is None or columns.stop <= rows.start + shift + 1:
        return scores
    return scores + scores.new_full(scores.shape[-2:], -math.inf).triu(rows.start + shift - columns.start + 1)


def score_matrix(q: Tensor, k: Tensor, shift: int | None) -> Tensor:
    """The one tile of all rows and columns, `[.., Tq, Tk]`."""
    return score_tile(q, k, slice(0, q.size(-2)), slice(0, k.size(-2)), shift)


def largest(scores: Tensor) -> Tensor:
    """The maximum of each row `[.., r, 1]`, finite where a row sees nothing, too: -inf - (-inf) is nan."""
    return scores.amax(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).min)


def nothing_seen(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The online softmax of rows before the first key: sums 0 `[.., K]` and 0 `[.., 1]`, maximum -inf."""
    summed, lse = empty_result(q, v.size(-1))
    return summed, torch.zeros_like(lse).unsqueeze(-1), lse.unsqueeze(-1)


class Kernel(NamedTuple):
    """`forward(q, k, v, causal) -> out, lse`; `backward(dout, q, k, v, out, lse, causal) -> dq, dk, dv`."""

    forward: Callable
    backward: Callable

    def on(self, tile) -> Kernel:
        """The kernel for one tile (layout.Tile): the same for all; `Placed` has one for each."""
        return self


def merge(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> None:
    """Merges the result of other keys into `out` `[B, H, Tq, K]` and `lse` `[B, H, Tq]`, in place."""
    total = torch.logaddexp(lse, other_lse)
    both = total.clamp_min(torch.finfo(lse.dtype).min)  # two neutral elements: -inf - (-inf) would be nan
    out.mul_((lse - both).exp_().unsqueeze(-1)).addcmul_(other_out, (other_lse - both).exp_().unsqueeze(-1))
    lse.copy_(total)


def empty_result(q: Tensor, width: int | None = None) -> tuple[Tensor, Tensor]:
    """The neutral element for queries q and values of that width (q's): out and lse in at least float32."""
    out = q.new_zeros(*q.shape[:-1], width or q.size(-1), dtype=wide(q))
    return out, q.new_full(q.shape[:-1], -math.inf, dtype=wide(q))


def plain_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, bias=None, factors=None):
    """-> out `[B, H, Tq, K]` and lse `[B, H, Tq]`. `bias(device)` `[H, Tq, Tk]` is added to the scores, and
    P is multiplied by `factors(P)` `[B, H, Tq, Tk]`, of which lse knows nothing (placed.py)."""
    k, v = repeat_kv(q, k, v)
    scores = _scores(q, k, causal, bias)
    lse = scores.logsumexp(-1)
    p = (scores - lse.unsqueeze(-1)).exp()
    if factors:
        p = p * factors(p)
    return p.to(v.dtype) @ v, lse


def plain_backward(dout, q, k, v, out, lse, causal: bool, bias=None, factors=None) -> tuple[Tensor, ...]:
    """-> dq, dk, dv in the shapes of q, k, v."""
    kv_heads, (k, v) = k.size(1), repeat_kv(q, k, v)
    p = (_scores(q, k, causal, bias) - lse.unsqueeze(-1)).exp()
    dp, weights = dout @ v.transpose(-2, -1), p
    if factors:
        kept = factors(p)
        dp, weights = dp * kept, p * kept
    ds = (p * (dp - row_sums(dout, out).unsqueeze(-1))).to(q.dtype) / math.sqrt(q.size(-1))
    dq = ds @ k
    dk = sum_kv_copies(ds.transpose(-2, -1) @ q, kv_heads)
    return dq, dk, sum_kv_copies(weights.transpose(-2, -1).to(dout.dtype) @ dout, kv_heads)


def _scores(q: Tensor, k: Tensor, causal: bool, bias: Callable | None) -> Tensor:
    scores = score_matrix(q, k, diagonal(q, k, causal))
    return scores + bias(q.device) if bias else scores


def fused_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: Callable | None = None):
    """By torch's flash kernels. They want q, k and v of one width: narrower ones are padded with zeros."""
    if not _fits_kernel(q, k, v, causal, bias):
        return (plain_forward if q.is_cpu else forward_by_rows)(q, k, v, causal, bias)
    width, scale, (k, v) = v.size(-1), 1 / math.sqrt(q.size(-1)), repeat_kv(q, k, v)
    q, k, v = for_kernel(q, k, v)
    if q.is_cuda:
        out, lse = torch_private.flash_cuda(q, k, v, 0.0, causal, scale=scale)[:2]
    else:
        mask = bias(q.device).unsqueeze(0) if bias else None
        out, lse = torch_private.flash_cpu(q, k, v, 0.0, causal, attn_mask=mask)
    return (out if width == q.size(-1) else out[..., :width].clone()), lse  # a view would keep the zeros


def fused_backward(dout, q, k, v, out, lse, causal: bool, bias: Callable | None = None) -> tuple[Tensor, ...]:
    if not _fits_kernel(q, k, v, causal, bias):
        backward = plain_backward if q.is_cpu else backward_by_rows
        return backward(dout, q, k, v, out, lse, causal, bias)
    kv_heads, widths, (k, v) = k.size(1), (q.size(-1), v.size(-1)), repeat_kv(q, k, v)
    q, k, v, dout, out = for_kernel(q, k, v, dout, out)
    if q.is_cuda:
        unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # the random state of no dropout
        how = None, None, q.size(2), k.size(2), 0.0, causal, unused, unused
        saved = dout.to(q.dtype), q, k, v, out.to(q.dtype), lse.contiguous()  # of lse it reads no strides
        dq, dk, dv = torch_private.flash_cuda_backward(*saved, *how, scale=1 / math.sqrt(widths[0]))
        dq, dk = dq[..., : widths[0]], dk[..., : widths[0]]
    else:
        mask = bias(q.device).unsqueeze(0) if bias else None
        dq, dk, dv = torch_private.flash_cpu_backward(dout, q, k, v, out, lse, 0.0, causal, attn_mask=mask)
    return dq, sum_kv_copies(dk, kv_heads), sum_kv_copies(dv[..., : widths[1]], kv_heads)


def _fits_kernel(q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: Callable | None) -> bool:
    """On a CPU also a bias, as a mask. Their triangle is square."""
    square = q.size(-2) == k.size(-2)
    known = has_flash(q.device, q.dtype, q.size(-1)) and not (q.is_cuda and bias)
    return v.size(-1) <= q.size(-1) and (square or not causal) and known


def has_flash(device: torch.device, dtype: torch.dtype, width: int, capability: tuple | None = None) -> bool:
    """Is there a flash kernel, forward and backward, for heads of this width? On CUDA torch's sdp_utils.cpp
    asks the same of a card of this compute capability."""
    if device.type != "cuda":
        return True
    card = capability or cuda_capability(device)
    small = (8, 6) <= card <= (8, 9) or (12, 0) <= card <= (12, 1)  # multiprocessors' memory, in backward
    fits = width <= 256 and not (small and 192 < width <= 224)
    return card >= (8, 0) and dtype in (torch.float16, torch.bfloat16) and fits


def for_kernel(q: Tensor, *others: Tensor) -> list[Tensor]:
    """All with q's width, on CUDA with the next multiple of 8, and K numbers one behind the other: the kernel
    for CPUs reads them so wherever they lie, and says nothing."""
    q = F.pad(q, (0, -q.size(-1) % 8)) if q.is_cuda and q.size(-1) % 8 else q
    return [x if x.stride(-1) == 1 else x.contiguous() for x in (q, *(widened(x, q) for x in others))]


def widened(x: Tensor, q: Tensor) -> Tensor:
    """x padded with zeros to the width of q."""
    return x if x.size(-1) == q.size(-1) else F.pad(x, (0, q.size(-1) - x.size(-1)))


ROWS = 512  # of scores that there are at once where no kernel fits a device


def by_rows(q: Tensor, k: Tensor, causal: bool, bias) -> Iterator[tuple]:
    """Runs of queries, the keys that they see, and the bias of these, `bias(device, queries, keys)`."""
    shift, keys = diagonal(q, k, causal), k.size(-2)
    for rows in pieces(q.size(-2), ROWS):
        seen = slice(0, keys if shift is None else rows.stop + shift)
        here = bias and (lambda device, tile=(rows, seen): bias(device, *tile))
        yield (..., rows, slice(None)), (..., seen, slice(None)), here


def forward_by_rows(q: Tensor, k: Tensor, v: Tensor, causal: bool, bias=None) -> tuple[Tensor, Tensor]:
    k, v = repeat_kv(q, k, v)
    out, lse = q.new_empty(*q.shape[:-1], v.size(-1)), q.new_empty(q.shape[:-1], dtype=wide(q))
    for mine, seen, here in by_rows(q, k, causal, bias):
        out[mine], lse[mine[:2]] = plain_forward(q[mine], k[seen], v[seen], causal, here)
    return out, lse


def backward_by_rows(dout, q, k, v, out, lse, causal: bool, bias=None) -> tuple[Tensor, ...]:
    kv_heads, (k, v) = k.size(1), repeat_kv(q, k, v)
    dq, dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (q, k, v))
    for mine, seen, here in by_rows(q, k, causal, bias):
        saved = q[mine], k[seen], v[seen], out[mine], lse[mine[:2]]
        found = plain_backward(dout[mine], *saved, causal, here)
        for total, part in zip((dq[mine], dk[seen], dv[seen]), found):
            total += part
    return dq.to(q.dtype), *(sum_kv_copies(x, kv_heads).to(q.dtype) for x in (dk, dv))


PLAIN = Kernel(plain_forward, plain_backward)
FUSED = Kernel(fused_forward, fused_backward)


def row_sums(dout: Tensor, out: Tensor) -> Tensor:
    """D = rowsum(dO · O) `[B, H, T]`, in at least float32: all that backward needs of O."""
    return (dout.to(wide(dout)) * out).sum(-1)


def stand_in(dout: Tensor, delta: Tensor) -> Tensor:
    """dO · D / |dO|²: has the row sums D, and is given for O to kernels that use O for nothing but D."""
    exact, tiny = dout.to(delta.dtype), torch.finfo(delta.dtype).tiny
    largest = exact.abs().amax(-1, keepdim=True).clamp_min(tiny)  # gradients may be too small to be squared
    along = exact / largest
    scale = delta.unsqueeze(-1) / largest / along.square().sum(-1, keepdim=True).clamp_min(tiny)
    return (along * scale).to(dout.dtype)


def repeat_kv(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """k and v `[B, H_kv, T, K]` -> `[B, H, T, K]`: each head is repeated for the query heads that use it."""
    groups, rest = divmod(q.size(1), k.size(1))
    if rest:
        raise ValueError(f"{q.size(1)} query heads are not a multiple of {k.size(1)} K/V heads")
    return (k, v) if groups == 1 else (k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1))


def sum_kv_copies(dx: Tensor, kv_heads: int) -> Tensor:
    """The adjoint of `repeat_kv`: sums the copies' gradients `[B, H, T, K]` -> `[B, H_kv, T, K]`."""
    return dx if dx.size(1) == kv_heads else dx.unflatten(1, (kv_heads, -1)).sum(2)


class OnlineSoftmax:
    """Attention of queries q `[B, H, T, K]` over the keys that were added so far, in at least float32."""

    def __init__(self, q: Tensor):
        self.q, self.out, self.lse = q, None, None

    def add_tiles(self, seen: list, k: Tensor, v: Tensor, kernel: Kernel) -> None:
        """Adds these keys, for the tiles `seen`, which say what queries see of them."""
        for tile in seen:
            rows, columns = (..., tile.queries, slice(None)), (..., tile.keys, slice(None))
            found = kernel.on(tile).forward(self.q[rows], k[columns], v[columns], tile.causal)
            self.add(tile.queries, *found)

    def add(self, queries: slice, out: Tensor, lse: Tensor) -> None:
        """Merges one result. A first one of all queries is kept as it is."""
        if self.out is None and out.shape[:-1] == self.q.shape[:-1]:
            self.out, self.lse = out.to(wide(out)), lse.to(wide(out))
            return
        if self.out is None:
            self.out, self.lse = empty_result(self.q, out.size(-1))
        merge(self.out[..., queries, :], self.lse[..., queries], out, lse)

    def exact(self) -> tuple[Tensor, Tensor]:
        """out `[B, H, T, K]` and lse `[B, H, T]`, not rounded to q's dtype."""
        return empty_result(self.q) if self.out is None else (self.out, self.lse)

    def result(self) -> tuple[Tensor, Tensor]:
        """The same, with out in q's dtype."""
        out, lse = self.exact()
        return out.to(self.q.dtype), lse


class GradSum:
    """The sum of gradients of parts of x `[B, H, T, K]`, in at least float32. A first one of all x is kept.
    It lies as `[B, T, H, K]`, as flash kernels leave gradients: sending `by_token` takes no copy."""

    def __init__(self, x: Tensor):
        self.x, self._total = x, None

    def add(self, tokens: slice, part: Tensor) -> None:
        if self._total is not None:
            self._total[..., tokens, :] += part
        elif part.shape == self.x.shape:
            self._total = part.to(wide(part))
        else:
            self._total = self.total
            self._total[..., tokens, :] = part

    @property
    def total(self) -> Tensor:
        if self._total is not None:
            return self._total
        by_token = self.x.transpose(1, 2).shape
        return self.x.new_zeros(by_token, dtype=wide(self.x)).transpose(1, 2)

    by_token = property(lambda self: self.total.transpose(1, 2))  # [B, T, H, K]


def add_tiles_backward(seen: list, dout, q, k, v, out, lse, dq, dk, dv, kernel: Kernel):
    """Adds the gradients of these tiles to the GradSums dq, dk and dv; out and lse are those of all keys."""
    for tile in seen:
        rows, columns = (..., tile.queries, slice(None)), (..., tile.keys, slice(None))
        saved = q[rows], k[columns], v[columns], out[rows], lse[..., tile.queries]
        found = kernel.on(tile).backward(dout[rows], *saved, tile.causal)
        for total, tokens, part in zip((dq, dk, dv), (tile.queries, tile.keys, tile.keys), found):
            total.add(tokens, part)


def recomputed(forward: Callable, backward: Callable, q: Tensor, k: Tensor, v: Tensor, *way) -> Tensor:
    """The out of `forward(q, k, v, *way) -> out, lse`, with `backward(dout, q, k, v, out, lse, *way)`."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        out, lse = forward(q, k, v, *way)
        return out, (q, k, v, out, lse)

    return custom_vjp(run, lambda dys, saved, _: backward(*dys, *saved, *way), q, k, v)
