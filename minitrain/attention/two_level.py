"""Attention tiles on two levels: cores with a small fast memory each, side by side, share what comes from slow memory.

    slow memory  ->  group of C cores         a tile of keys comes once for all; each core holds its own tile of rows
    group        ->  each core                the same tile goes on to every core that sees it

One core alone (flash.py, version 2) reads all of K and V from slow memory for each of its row tiles. C cores next to each other work at
C row tiles at a time, so slow memory is read once for C · rows. Between the group and a core moves what moved before. Per head, without
a mask, N = T, d = K, r = ceil(N/rows) tiles of rows,

                           one level                two levels
    slow memory, loads     Nd + 2Nd · r             Nd + 2Nd · ceil(r/C)         stores Nd + N on both
    cores, loads           the same                 Nd + 2Nd · r

A model: elements are counted, no clock runs, and a hop over the group's mesh costs what a load costs. A Sunway SW26010-Pro has groups of
C = 64 cores with 256 KB of local memory (LDM) each. Memory: the states of C row tiles. Sends nothing.
Raises ValueError in one line for a group of no core.
Wu et al. 2024 (SWattention), Journal of Supercomputing, doi 10.1007/s11227-024-05890-8: two-level partition over core groups and cores.
Differs: only the forward loop, its traffic, and one group; their tile sizes, asynchronous copies and instruction scheduling are left out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minitrain.attention.flash import nothing_seen, see, tile_sizes
from minitrain.attention.kernel import repeat_kv
from minitrain.attention.score_tiles import diagonal, pieces, score_tile, visible
from minitrain.attention.traffic import UNCOUNTED, SlowMemory

LDM_ELEMENTS = 256 * 1024 // 2  # local memory of one Sunway core, in numbers of 2 bytes


def two_level_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = True,
    *,
    cores: int,
    fast_elements: int = LDM_ELEMENTS,
    slow: SlowMemory = UNCOUNTED,
    group: SlowMemory = UNCOUNTED,
) -> tuple[Tensor, Tensor]:
    """q `[B, H, T, K]`, k, v `[B, H_kv, T, K]` -> O `[B, H, T, K]` and lse `[B, H, T]`. `slow` and `group` count what leaves them."""
    if cores < 1:
        raise ValueError(f"a group of {cores} cores; it has 1 or more")
    k, v = repeat_kv(q, k, v)
    shift = diagonal(q, k, causal)
    held, coming = tile_sizes(fast_elements, q.size(-1))
    tiles = pieces(q.size(-2), held)
    out, lse = (
        q.new_empty(*q.shape[:-1], v.size(-1)),
        q.new_empty(*q.shape[:-1], 1, dtype=torch.promote_types(q.dtype, torch.float32)),
    )
    for first in range(0, len(tiles), cores):
        at_once = tiles[first : first + cores]  # one tile of rows for each core
        queries = [group.load(*slow.load(q[..., rows, :]))[0] for rows in at_once]
        states = [nothing_seen(q_i, v) for q_i in queries]
        for columns in pieces(k.size(-2), coming):
            if not visible(at_once[-1], columns, shift):
                continue
            shared = slow.load(k[..., columns, :], v[..., columns, :])
            for core, (rows, q_i) in enumerate(zip(at_once, queries)):
                if visible(rows, columns, shift):
                    k_j, v_j = group.load(*shared)
                    states[core] = see(states[core], score_tile(q_i, k_j, rows, columns, shift), v_j)
        for rows, (summed, row_sum, row_max) in zip(at_once, states):
            out[..., rows, :] = slow.store(group.store(slow.divide(summed, row_sum)))
            lse[..., rows, :] = slow.store(group.store(row_max + row_sum.log()))
    return out, lse.squeeze(-1)
