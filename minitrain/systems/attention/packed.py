"""Sequences of different lengths without padding: tokens in one row, offsets that say where each begins.

    tokens        a a a a b b c c c           cu_seqlens = [0, 4, 6, 9]
    scores        three triangles on the diagonal, none between sequences: O_i = attention(Q_i, K_i, V_i)

Norms, matrices, MLP and loss take the row as it is, `[1, N, D]`; `packed_attention` calls a core for each
sequence. `Padding` maps a padded batch to such a row and back, by a prefix sum over the mask, made once:

    valid     1 1 1 0    places   0 1 2 .        packed row        x_00 x_01 x_02 x_10 x_11
              1 1 0 0             3 4 . .        source            0    1    2    4    5

For lengths l_i in a batch of B · l_max, packing leaves Σ l_i / (B · l_max) of activations and matrix FLOPs,
and Σ l_i² / (B · l_max²) of attention's. Sends nothing.
Zhai et al. 2023 (ByteTransformer), arXiv:2210.03052, sections 3.2 and 3.3; offsets as in FlashAttention's
varlen. Differs: a loop over sequences, not one kernel.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from minitrain.attention.flash import flash_attention
from minitrain.attention.placed import check_places
from minitrain.ranks.checks import require_ints, require_nonempty, require_positive_ints


def packed_attention(q, k, v, *, cu_seqlens, causal=True, core=flash_attention, bias=None, dropout=0.0):
    """q `[1, H, N, K]`, k, v `[1, H_kv, N, K]` -> `[1, H, N, K]`. `bias`: an Alibi, `dropout`: a DropMask."""
    if q.size(0) != 1:
        raise ValueError(f"packed q has {q.size(0)} rows; pack all sequences into one, [1, H, N, K]")
    lengths = sequence_lengths(cu_seqlens, q.size(-2))
    check_places("packed_attention", q, bias, dropout)
    outs = []
    for start, length, *qkv in zip(cu_seqlens, lengths, *(x.split(lengths, dim=-2) for x in (q, k, v))):
        more = {}
        if bias:
            more["bias"] = bias._replace(positions=bias.positions.narrow(0, start, length))
        if dropout:
            more["dropout"] = dropout._replace(first_token=start)
        outs.append(core(*qkv, causal=causal, **more))
    return torch.cat(outs, dim=-2)


def blank_infilling(q, k, v, *, context: int, core=flash_attention) -> Tensor:
    """GLM (Du et al. 2022, arXiv:2103.10360, section 2.1): the first `context` tokens see one another, those
    of blanks behind them what is before. Differs: the blanks, their order and positions are the data's."""
    require_ints(1, q.size(-2) - 1, context=context)
    seen = core(*(x[..., :context, :] for x in (q, k, v)), causal=False)
    return torch.cat([seen, core(q[..., context:, :], k, v, causal=True)], dim=-2)


def sequence_lengths(cu_seqlens: Sequence[int], tokens: int) -> list[int]:
    """The lengths between the offsets, which are those of so many tokens."""
    offsets = [int(offset) for offset in cu_seqlens]
    lengths = [after - here for here, after in pairwise(offsets)]
    if not offsets or offsets[0] != 0 or offsets[-1] != tokens or min(lengths, default=1) < 1:
        raise ValueError(f"cu_seqlens {offsets} do not ascend from 0 to the {tokens} tokens that there are")
    return lengths


def document_lengths(segments: Tensor) -> list[list[int]]:
    """Of packed rows `[B, T]`, from the number of each token's document -> the lengths of those in each row,
    as a Batch has them. Of positions that begin anew: segments = (positions == 0).cumsum(-1)."""
    if segments.dim() != 2:
        raise ValueError(f"segments are {list(segments.shape)}; number the document of each token, [B, T]")
    return [torch.unique_consecutive(row, return_counts=True)[1].tolist() for row in segments]


def positions(cu_seqlens: Sequence[int], device: torch.device | None = None) -> Tensor:
    """`[N]` positions: 0, 1, .. from the start of each sequence."""
    require_nonempty(cu_seqlens=cu_seqlens)
    lengths = sequence_lengths(cu_seqlens, int(cu_seqlens[-1]))
    return torch.cat([torch.arange(length, device=device) for length in lengths])


def flop_shares(lengths: Sequence[int]) -> tuple[float, float]:
    """(matrices, attention): what packing leaves of the FLOPs of a batch padded to its longest sequence."""
    require_nonempty(lengths=lengths)
    require_positive_ints(lengths=lengths)
    longest, batch = max(lengths), len(lengths)
    return sum(lengths) / (batch * longest), sum(length**2 for length in lengths) / (batch * longest**2)


class Padding:
    """The map between a padded batch and its packed row. `valid` `[B, T]` is True where there is a token."""

    def __init__(self, valid: Tensor):
        if valid.dtype != torch.bool or valid.dim() != 2:
            raise ValueError(f"valid is {valid.dtype} {list(valid.shape)}; give torch.bool [B, T]")
        lengths = valid.sum(1).tolist()
        if 0 in lengths:
            raise ValueError(f"sequence {lengths.index(0)} of {len(lengths)} has no token; leave it out")
        self.valid = valid
        self.places = valid.flatten().cumsum(0).sub_(1).view_as(valid)  # meaningless where there is no token
        self.source = self.places.new_empty(sum(lengths))
        self.source[self.places[valid]] = torch.arange(valid.numel(), device=valid.device)[valid.flatten()]
        self.cu_seqlens = [0, *torch.tensor(lengths).cumsum(0).tolist()]

    def pack(self, x: Tensor) -> Tensor:
        """`[B, T, ..]` -> the valid tokens `[1, N, ..]`."""
        return x.flatten(0, 1).index_select(0, self.source).unsqueeze(0)

    def unpack(self, y: Tensor) -> Tensor:
        """`[1, N, ..]` -> `[B, T, ..]`, zeros where there is no token."""
        whole = y.new_zeros(self.valid.numel(), *y.shape[2:])
        return whole.index_copy(0, self.source, y.squeeze(0)).unflatten(0, tuple(self.valid.shape))
