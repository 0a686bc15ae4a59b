"""Text from a Run, in any layout: of a text seen but for its last token that token alone is computed.

A token is alike on all ranks of dp, cp and ep, where a prompt is cut over cp; sequence parallelism cuts it
with t - 1 more that nobody reads. Products in few bits scale a token by what is with it: theirs is another
rounding. A text of max_positions tokens has a window that slides, and each token another position: each step
computes all of them, as without a cache. Experts that choose tokens look at later ones: no cache at all.
Sends a forward of a token, what context/cache.py says, and each drawn token from rank 0, lest a rounding that
differs from rank to rank make two texts.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor

from minitrain.context.cache import Cache, CachedCore


@contextmanager
def cached(run, most: int) -> Iterator[Callable[[Tensor], Tensor]]:
    """Rows `[B, T]` -> logits `[B, .., V]`, the last of which are those of the last token; with room for
    `most` tokens behind a prompt. Rows a token longer than those before must begin with these."""
    config, strategy, group, hooks = run.config, run.strategy, run.context_group, run.model.hooks
    if config.experts and config.experts.router == "expert_choice":
        yield run
        return
    cache, latent = Cache(group), config.kv_latent if strategy.products == "plain" else 0

    def logits(tokens: Tensor) -> Tensor:
        length = tokens.size(1)
        if 0 < cache.length == length - 1:
            position, padding = cache.add(), strategy.tp - 1 if strategy.sequence_parallel else 0
            positions = torch.arange(position, length + padding, device=tokens.device)
            return run.logits(F.pad(tokens[:, -1:], (0, padding)), positions, padding)[:, :1]
        padded = length + -length % strategy.pieces
        runs = run.layout(group.rank(), group.size(), padded) if group else [range(padded)]
        cache.begin([*chain(*runs)], length, min(most, config.max_positions - length), tokens.device)
        return run(tokens)

    attentions = [layer.attention for layer in run.model.layers if hasattr(layer, "attention")]
    hooks.absorb = latent > 0
    for attention in attentions:
        attention.core = CachedCore(attention.core, cache, latent)
    try:
        yield logits
    finally:
        hooks.absorb = False
        for attention in attentions:
            attention.core = attention.core.core
