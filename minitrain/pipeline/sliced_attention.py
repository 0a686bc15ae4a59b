"""Attention in a pipeline over slices of a sequence: later slices see the keys of earlier ones, gradients come back to those.

    F of slice j    K, V = own ones, and a leaf of them is kept     out = attention(Q, [leaves of slices 0..j-1, own K], the same of V)
    B of slice j    starts from [y, K_j, V_j] with [dy, leaf_j.grad]; it adds to the gradients of the leaves 0..j-1

A slice is a forward and a backward of its own: between two of them autograd's graph is cut, as it is between two stages. What crosses
the cut here is K and V. The copy that later slices look at is a leaf, so their backwards leave dK and dV in its `.grad`; the schedule
runs backwards from the last slice to the first, so when slice j's turn comes the sum is complete and enters its graph beside dy. Each
core has its own leaves: one (`SlicedAttention`) stands in every attention layer, as ring attention's does, and `SliceMemory` tells
those of a stage which slice comes and collects where its backward starts. Runner calls it: `with memory.during(stage, unit)` around a
forward, `memory.ends(stage, unit)` before its backward.

Sends nothing: K and V of a stage never leave its rank. Memory: the fused attention keeps [K_0..K_j] in one piece for its backward, so
the slices of one sequence hold its K and V (k+1)/2 times, and (k-1)/k as leaves beside them (a kernel that takes keys in pieces would
hold them once); masks of T²·(k+1)/2k - (T/k)² numbers, for all heads and rows; and dK, dV while its backwards run.
Outside of a step (no slice was announced) a core is ordinary causal attention. Positions come with the tokens.
Raises ValueError in one line for ALiBi, whose bias is about the own slice's keys only, and for masks of dropout by position.
Li et al. 2021 (TeraPipe), arXiv:2102.07988, section 3.1; Sun et al. 2024 (Seq1F1B), arXiv:2406.03488, section 3.
Differs: those keep a cache of keys and hand its gradient on inside one autograd function; here each core does it with leaves.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Slice(NamedTuple):
    """Keys and values with their graph, and what later slices look at."""

    own: tuple[Tensor, Tensor]
    seen: tuple[Tensor, Tensor]


class SlicedAttention:
    """A core for one attention layer whose sequences come in k slices; `now` is the unit that is being computed."""

    def __init__(self, slices: int):
        self.slices, self.now = slices, None
        self.kept: dict[int, Slice] = {}

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, bias: Tensor | None = None, dropout: float = 0.0) -> Tensor:
        """q `[B, H, t, K]`, k and v `[B, H_kv, t, K]`, the slice's -> `[B, H, t, K]`."""
        if bias is not None:
            raise ValueError(f"sliced attention: a bias {list(bias.shape)} is about this slice's keys, earlier ones are looked at too; use "
                             "positions=\"rope\", not alibi")
        if callable(dropout):
            raise ValueError("sliced attention: dropout by position is not built; use a rate, or cp=1")
        keys, values = [k], [v]
        if self.now is not None:
            first = self.now - self.now % self.slices
            earlier = [self.kept[unit].seen for unit in range(first, self.now)]
            keys, values = [k for k, _ in earlier] + [k], [v for _, v in earlier] + [v]
            again = self.kept.get(self.now)                                 # recomputed: what later slices look at stays
            self.kept[self.now] = Slice((k, v), again.seen if again else (_leaf(k), _leaf(v)))
        return attend(q, torch.cat(keys, dim=-2) if len(keys) > 1 else k, torch.cat(values, dim=-2) if len(values) > 1 else v, dropout)

    def ends(self, unit: int) -> list[tuple[Tensor, Tensor]]:
        """(K or V of the slice, the gradient later slices left for it); forgets the slice."""
        own, seen = self.kept.pop(unit)
        return [(x, leaf.grad) for x, leaf in zip(own, seen) if x.requires_grad and leaf.grad is not None]


class SliceMemory:
    """All cores of this rank, by stage."""

    def __init__(self, cores: Mapping[int, Iterable[SlicedAttention]]):
        self.cores = {stage: list(some) for stage, some in cores.items()}

    @contextmanager
    def during(self, stage: int, unit: int) -> Iterator[None]:
        """Inside, the stage computes that slice."""
        for core in self.cores.get(stage, ()):
            core.now = unit
        try:
            yield
        finally:
            for core in self.cores.get(stage, ()):
                core.now = None

    def ends(self, stage: int, unit: int) -> list[tuple[Tensor, Tensor]]:
        """Where the backward of the slice starts, beside the stage's output, and with what."""
        return [end for core in self.cores.get(stage, ()) for end in core.ends(unit)]

    def clear(self) -> None:
        """Before a step: forget what a step that failed has left."""
        for some in self.cores.values():
            for core in some:
                core.kept.clear()


def attend(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
    """Queries of the last t of T tokens: query i sees the keys up to T - t + i."""
    first = q.size(-2) == k.size(-2)                                    # no mask need be kept
    seen = None if first else torch.ones(q.size(-2), k.size(-2), dtype=torch.bool, device=q.device).tril(k.size(-2) - q.size(-2))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, dropout_p=dropout, is_causal=first, enable_gqa=q.size(1) != k.size(1))


def _leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_()
