"""Attention over slices of a sequence: later slices see the keys of earlier ones, and send gradients back.

    F of slice j    keeps its K, V and a leaf of each     out = attend(Q, [leaves < j, K_j], [.., V_j])
    B of slice j    starts from [y, K_j, V_j] with [dy, leaf_j.grad]; adds to the gradients of the leaves < j

Between two slices autograd's graph is cut at K and V. Later slices leave dK and dV in a leaf's `.grad`;
backwards run from the last slice, so it is complete when slice j's turn comes. `attend(q, k, v, lengths)` is
the attention of the newest slice's queries over all slices so far, on one rank or on ranks that share the
sequence, each with `lengths` tokens of the slices; outside of a step `lengths` is None: a whole sequence.
Sends only what `attend` sends. Memory: the fused attention keeps [K_0..K_j] in one piece, so the slices hold
K and V (k+1)/2 times, and (k-1)/k as leaves; masks of T²·(k+1)/2k - (T/k)² numbers, with ALiBi T²·(k+1)/2k
for each head. Dropout by place keeps all scores, and values narrower than keys (latent) are padded.
Li et al. 2021 (TeraPipe), arXiv:2102.07988, section 3.1; Sun et al. 2024 (Seq1F1B), arXiv:2406.03488, 3.
"""

import math
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minitrain.attention.flash import flash_attention
from minitrain.attention.kernel import widened
from minitrain.attention.placed import Alibi, DropMask, check_places
from minitrain.pipeline.runtime import Runner, RunnerHooks
from minitrain.pipeline.schedule import Action, Schedule
from minitrain.ranks.torch_private import in_backward


def attend(
    q, k, v, lengths=None, *, bias: Alibi | None = None, dropout: DropMask | float = 0.0, documents=None
) -> Tensor:
    """Queries `[B, H, t, K]` of the last t of T tokens: query i sees the keys up to T - t + i."""
    if documents:
        return flash_attention(q, k, v, bias=bias, dropout=dropout, documents=documents)
    check_places("sliced attention", q, bias)
    before, length, by_place = k.size(-2) - q.size(-2), k.size(-2), isinstance(dropout, DropMask)
    places = torch.arange(before, length, device=q.device), torch.arange(length, device=q.device)
    first = not (before or bias or by_place)  # no mask is needed
    seen = None if first else torch.ones(q.size(-2), length, dtype=torch.bool, device=q.device).tril(before)
    if bias:
        seen = bias.between(*places).to(q.dtype).masked_fill_(~seen, -math.inf)
    if by_place:
        return _with_mask(q, k, v, seen, dropout, places)
    shared = q.size(1) != k.size(1)
    # On a CPU torch keeps scores unless values are as wide as keys.
    narrow = v.size(-1) < q.size(-1) and not q.is_cuda
    values = widened(v, q) if narrow else v
    out = F.scaled_dot_product_attention(q, k, values, seen, dropout, is_causal=first, enable_gqa=shared)
    return out[..., : v.size(-1)] if narrow else out


def _with_mask(q, k, v, seen: Tensor, mask: DropMask, places: tuple[Tensor, Tensor]) -> Tensor:
    """With scores written out, for a mask to multiply. `seen`: booleans, or numbers to add."""
    k, v = (x.repeat_interleave(q.size(1) // x.size(1), dim=1) for x in (k, v))
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
    p = (scores.masked_fill(~seen, -math.inf) if seen.dtype == torch.bool else scores + seen).softmax(-1)
    return p * mask.factors(p, lambda device: places) @ v


Slice = namedtuple("Slice", "made seen")  # (K, V) with their graph; the leaves that later slices look at


class SlicedAttention:
    """A core for one attention layer whose sequences come in k slices; `now` is the unit being computed."""

    def __init__(self, num_slices: int, attend: Callable = attend):
        self.num_slices, self.attend, self.now = num_slices, attend, None
        self.slices: dict[int, Slice] = {}

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **extras) -> Tensor:
        """q `[B, H, t, K]`, k and v `[B, H_kv, t, K]` of a slice -> `[B, H, t, K]`; `extras` for `attend`."""
        if self.now is None:
            return self.attend(q, k, v, None, **extras)
        first = self.now - self.now % self.num_slices
        seen = [self.slices[unit].seen for unit in range(first, self.now)] + [(k, v)]
        if not in_backward():  # else a block is recomputed in its backward: nothing new is stored
            again = self.slices.get(self.now)  # a stage recomputed by R: later slices look at the same leaves
            leaves = again.seen if again else (k.detach().requires_grad_(), v.detach().requires_grad_())
            self.slices[self.now] = Slice((k, v), leaves)
        keys, values = (torch.cat(parts, dim=-2) if len(parts) > 1 else parts[0] for parts in zip(*seen))
        return self.attend(q, keys, values, [k.size(-2) for k, _ in seen], **extras)

    def roots(self, unit: int) -> list[tuple[Tensor, Tensor]]:
        """(K or V of the slice, the gradient later slices left for it); forgets the slice."""
        made, seen = self.slices.pop(unit)
        return [(x, leaf.grad) for x, leaf in zip(made, seen) if x.requires_grad and leaf.grad is not None]


class SliceMemory(RunnerHooks):
    """All cores of this rank, by stage: a unit is the present one while an action of it runs."""

    for_slices = True

    def __init__(self, cores: Mapping[int, Iterable[SlicedAttention]]):
        self.cores = {stage: list(some) for stage, some in cores.items()}

    def begin(self, runner: Runner) -> None:
        for core in (core for cores in self.cores.values() for core in cores):
            core.slices.clear()  # what a failed step left behind

    @contextmanager
    def around(self, runner: Runner, action: Action) -> Iterator[None]:
        cores = self.cores.get(action.stage, ())
        for core in cores:
            core.now = action.microbatch
        try:
            yield
        finally:
            for core in cores:
                core.now = None

    def extra_roots(self, stage: int, unit: int) -> list[tuple[Tensor, Tensor]]:
        return [root for core in self.cores.get(stage, ()) for root in core.roots(unit)]


def look_back(stages: Mapping[int, nn.Module], schedule: Schedule, attend: Callable = attend) -> SliceMemory:
    """Puts a `SlicedAttention` into every attention layer of these stages, for Runner(.., hooks=[..])."""
    cores = {number: [] for number in stages}
    for number, stage in stages.items():
        for layer in (layer for layer in stage.layers if hasattr(layer, "attention")):
            layer.attention.core = SlicedAttention(schedule.slices, attend)
            cores[number].append(layer.attention.core)
    return SliceMemory(cores)
