"""Attention in a pipeline over slices of a sequence: later slices see the keys of earlier ones, gradients come back to those.

    F of slice j    K, V = own ones, and a leaf of them is kept     out = attend(Q, [leaves of slices 0..j-1, own K], the same of V)
    B of slice j    starts from [y, K_j, V_j] with [dy, leaf_j.grad]; it adds to the gradients of the leaves 0..j-1

A slice is a forward and a backward of its own: between two of them autograd's graph is cut, as it is between two stages. What crosses
the cut here is K and V. The copy that later slices look at is a leaf, so their backwards leave dK and dV in its `.grad`; the schedule
runs backwards from the last slice to the first, so when slice j's turn comes the sum is complete and enters its graph beside dy. Each
core has its own leaves: one (`SlicedAttention`) stands in every attention layer, as ring attention's does (`look_back`), and `SliceMemory`
tells those of a stage which slice comes and collects where its backward starts. Runner calls it: `with memory.during(stage, unit)` around
a forward, `memory.ends(stage, unit)` before its backward.

`attend(q, k, v, lengths)` is the attention of the last slice's queries over all slices so far: the one below, or one over ranks that
share the sequence, each with its own tokens of every slice, `lengths` of them. Outside of a step (no slice was announced) `lengths` is
None, the tokens are a whole sequence, laid out as batches are, and nothing is kept. Positions come with the tokens.

Sends nothing, but for what `attend` sends. Memory: the fused attention keeps [K_0..K_j] in one piece for its backward, so the slices of
one sequence hold its K and V (k+1)/2 times, and (k-1)/k as leaves beside them (a kernel that takes keys in pieces would hold them once);
masks of T²·(k+1)/2k - (T/k)² numbers, for all heads and rows, with ALiBi T²·(k+1)/2k for each head; and dK, dV while its backwards run.
Dropout by place keeps all scores. Raises ValueError in one line for what `alibi.check_bias` refuses.
Li et al. 2021 (TeraPipe), arXiv:2102.07988, section 3.1; Sun et al. 2024 (Seq1F1B), arXiv:2406.03488, section 3.
Differs: those keep a cache of keys and hand its gradient on inside one autograd function; here each core does it with leaves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minitrain.attention.alibi import Alibi, check_bias
from minitrain.attention.dropout import DropMask
from minitrain.pipeline.schedule import Schedule


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Sequence[int] | None = None,
    *,
    bias: Alibi | None = None,
    dropout: DropMask | float = 0.0,
) -> Tensor:
    """Queries `[B, H, t, K]` of the last t of T tokens: query i sees the keys up to T - t + i. On one device `lengths` do not matter."""
    check_bias("sliced attention", bias, q.size(1))
    before, length, by_place = k.size(-2) - q.size(-2), k.size(-2), isinstance(dropout, DropMask)
    places = torch.arange(before, length, device=q.device), torch.arange(length, device=q.device)
    first = not (before or bias or by_place)  # no mask need be kept
    seen = None if first else torch.ones(q.size(-2), length, dtype=torch.bool, device=q.device).tril(before)
    if bias:
        seen = bias.between(*places).to(q.dtype).masked_fill_(~seen, -math.inf)
    if by_place:
        return _with_mask(q, k, v, seen, dropout, places)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=seen, dropout_p=dropout, is_causal=first, enable_gqa=q.size(1) != k.size(1)
    )


def _with_mask(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, mask: DropMask, places: tuple[Tensor, Tensor]
) -> Tensor:
    """Scores one can multiply. `seen`: of booleans, or numbers to add."""
    k, v = (x.repeat_interleave(q.size(1) // x.size(1), dim=1) for x in (k, v))
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
    p = (scores.masked_fill(~seen, -math.inf) if seen.dtype == torch.bool else scores + seen).softmax(-1)
    return p * mask.factors(p, lambda device: places) @ v


class Slice(NamedTuple):
    """Keys and values with their graph, and what later slices look at."""

    own: tuple[Tensor, Tensor]
    seen: tuple[Tensor, Tensor]


class SlicedAttention:
    """A core for one attention layer whose sequences come in k slices; `now` is the unit that is being computed."""

    def __init__(self, slices: int, attend: Callable = attend):
        self.slices, self.attend, self.now = slices, attend, None
        self.kept: dict[int, Slice] = {}

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **extras) -> Tensor:
        """q `[B, H, t, K]`, k and v `[B, H_kv, t, K]`, the slice's -> `[B, H, t, K]`. `extras` (bias, dropout) are for `attend`."""
        if self.now is None:
            return self.attend(q, k, v, None, **extras)
        first = self.now - self.now % self.slices
        seen = [self.kept[unit].seen for unit in range(first, self.now)] + [(k, v)]
        again = self.kept.get(self.now)  # recomputed: what later slices look at stays
        self.kept[self.now] = Slice((k, v), again.seen if again else (_leaf(k), _leaf(v)))
        keys, values = (torch.cat(parts, dim=-2) if len(parts) > 1 else parts[0] for parts in zip(*seen))
        return self.attend(q, keys, values, [k.size(-2) for k, _ in seen], **extras)

    def ends(self, unit: int) -> list[tuple[Tensor, Tensor]]:
        """(K or V of the slice, the gradient later slices left for it); forgets the slice."""
        own, seen = self.kept.pop(unit)
        return [(x, leaf.grad) for x, leaf in zip(own, seen) if x.requires_grad and leaf.grad is not None]


def _leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_()


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


def look_back(stages: Mapping[int, nn.Module], schedule: Schedule, attend: Callable = attend) -> SliceMemory:
    """Puts a `SlicedAttention` into every layer of these stages that has an attention, in place; for Runner(.., memory=)."""
    layers = {
        number: [layer for layer in stage.layers if hasattr(layer, "attention")]
        for number, stage in stages.items()
    }
    cores = {
        number: [SlicedAttention(schedule.slices, attend) for _ in some] for number, some in layers.items()
    }
    for number, some in layers.items():
        for layer, core in zip(some, cores[number]):
            layer.attention.core = core
    return SliceMemory(cores)
