"""Attention tiles on two levels: cores with a small fast memory each share what comes from slow memory.

    slow memory  ->  group of C cores        a tile of keys comes once for all; each core holds a tile of rows
    group        ->  each core               the same tile goes on to every core that sees it

One core alone (flash.py, version 2) reads all of K and V for each tile of rows; C cores read them once for C
tiles. Per head, without a mask, N = T, d = K, r = ceil(N/rows):

                           one level            two levels
    slow memory, loads     Nd + 2Nd · r         Nd + 2Nd · ceil(r/C)         stores Nd + N on both
    cores, loads           the same             Nd + 2Nd · r

A model: elements are counted, no clock runs. A Sunway SW26010-Pro has groups of 64 cores with 256 KB of local
memory (LDM) each. Memory: the states of C tiles. Wu et al. 2024 (SWattention), J. Supercomputing, doi
10.1007/s11227-024-05890-8. Differs: forward only. Sends nothing.
"""

from minitrain.attention.flash import UNCOUNTED, see, tile_sizes
from minitrain.attention.kernel import diagonal, nothing_seen, pieces, repeat_kv, score_tile, visible, wide

LDM = 256 * 1024 // 2  # numbers of 2 bytes in the local memory of one Sunway core


def two_level_forward(q, k, v, causal=True, *, cores, fast_elements=LDM, slow=UNCOUNTED, group=UNCOUNTED):
    """q `[B, H, T, K]`, k, v `[B, H_kv, T, K]` -> O `[B, H, T, K]`, lse `[B, H, T]`."""
    if cores < 1:
        raise ValueError(f"a group of {cores} cores; it has 1 or more")
    k, v = repeat_kv(q, k, v)
    shift = diagonal(q, k, causal)
    held, coming = tile_sizes(fast_elements, q.size(-1))
    tiles, out = pieces(q.size(-2), held), q.new_empty(*q.shape[:-1], v.size(-1))
    lse = q.new_empty(*q.shape[:-1], 1, dtype=wide(q))
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
