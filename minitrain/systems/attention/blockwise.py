"""Blockwise Parallel Transformer: a block of queries goes through attention and MLP before the next.

    K, V = keys_values(X)      for block i:  Y_i = finish(X_i, attention(query(X_i), K, V))     X, Y [B, T, D]

Attention by tiles keeps no scores; the widest tensor is then the MLP's, [B, T, F], which need not exist for
more than a block of tokens: all of a block is one checkpointed function. In 2 bytes, F = 4D and as many K/V
heads as heads, in units of B·T·D (the paper's bsh):

                              attention by tiles alone        blockwise
    widest tensor kept        8   (the MLP's)                 2   (X, K or V)
    all that is kept          36  (GELU, RMSNorm)             6   (X, K and V)
    peak with backward        44                              25, with dX, dK, dV (T = 256, rows = 16)

Sends nothing; costs one more forward. A checkpoint around the layer keeps X alone and makes K, V thrice.
Liu and Abbeel 2023, arXiv:2305.19370, section 3. Differs: K and V of all tokens are made at once and kept.
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from minitrain.attention.flash import flash_2, flash_attention
from minitrain.attention.kernel import pieces

TILED = partial(flash_attention, kernel=flash_2())


def blockwise_layer(x, positions, query, keys_values, finish, *, rows: int, causal=True, core=TILED):
    """x `[B, T, D]`, positions `[T]` or `[B, T]` -> `[B, T, D]`, `rows` tokens at a time, by three functions:

    `query(x_i, positions_i)` -> `[B, H, r, K]`, `keys_values(x, positions)` -> k, v `[B, H_kv, T, K]`, and
    `finish(x_i, attended [B, H, r, K])` -> `[B, r, D]`, all that follows, with the residuals."""
    k, v = checkpoint(keys_values, x, positions, use_reentrant=False)

    def block(x_i: Tensor, positions_i: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return finish(x_i, core(query(x_i, positions_i), k, v, causal=causal))

    done = []
    for tokens in pieces(x.size(1), rows):
        seen = slice(0, tokens.stop if causal else x.size(1))  # the queries are the last ones of these keys
        inputs = x[:, tokens], positions[..., tokens], k[..., seen, :], v[..., seen, :]
        done.append(checkpoint(block, *inputs, use_reentrant=False))
    return torch.cat(done, dim=1)


def blockwise_block(block: nn.Module, x: Tensor, positions: Tensor, *, rows: int, core=TILED) -> Tensor:
    """block(x, positions), for a pre-norm block of the model: norm1, attention, norm2, mlp, dropouts."""
    attention, config = block.attention, block.config
    if config.residual != "pre" or config.positions == "alibi" or not hasattr(attention, "q"):
        found = f"residual={config.residual}, positions={config.positions}, kv_latent={config.kv_latent}"
        raise ValueError(f"blockwise: {found}; it needs pre-norm, Q, K, V and no bias")
    if hasattr(block.mlp, "router"):
        raise ValueError("blockwise: experts count whole rows, not blocks of them; use a dense block")

    def heads(x: Tensor, *linears: nn.Module) -> list[Tensor]:
        projected = attention.project(block.norm1(x), linears)
        return [y.unflatten(-1, (-1, config.head_dim)).transpose(1, 2) for y in projected]

    def turned(y: Tensor, positions: Tensor) -> Tensor:
        return attention.rotated(y, positions) if config.positions == "rope" else y

    def query(x: Tensor, positions: Tensor) -> Tensor:
        return turned(*heads(x, attention.q), positions)

    def keys_values(x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        k, v = heads(x, attention.k, attention.v)
        return turned(k, positions), v

    def finish(x: Tensor, attended: Tensor) -> Tensor:
        x = x + block.dropout1(attention.out(attended.transpose(1, 2).flatten(-2)))
        return x + block.dropout2(block.mlp(block.norm2(x)))

    return blockwise_layer(x, positions, query, keys_values, finish, rows=rows, core=core)
