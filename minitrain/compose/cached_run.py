"""Text from a Run, a token at a time, in any layout: keys and values are cached where attention has them.

    prompt      core(q, k, v) as in training         rank r of cp caches K, V of its tokens, in its layout
    token t     q, k, v [B, H, 1, K] alike on all    rank t mod n caches K, V; each rank attends what it has
                O = Σ_r O_r exp(lse_r - lse)         lse = log Σ_r exp lse_r; one all-gather of O_r and lse_r

Whatever the core of the prompt is, a ring or heads dealt by Ulysses, its inputs are this rank's tokens, and
one query needs no ring. Query heads that share a key read it once. Of latent attention [c, rope(r)] is all
there is to cache: computed as it is served, a value is a part of its key. Sequence parallelism cuts a token
with t - 1 more that nobody reads. With a rank's heads H and H_kv
    sent, per token and layer       (n-1) · B·H·(K+1) elements, in at least float32
    memory, per row and layer       2·H_kv·K numbers (latent: C + R) for T/n tokens and ceil(m/n) of m to come
beside a forward of the token, and each drawn token from rank 0, lest a rounding that differs from rank to
rank make two texts. Products in few bits scale a token by what is with it: theirs is another rounding. A text
of max_positions tokens has a window that slides, and each token another position: each step computes all of
them, as without a cache. Experts that choose tokens look at later ones: no cache at all.
Pope et al. 2022, arXiv:2211.05102, section 3.3; Dao et al. 2023, Flash-Decoding. Differs: keys are cut over
ranks, where Pope et al. cut heads or rows, and Dao et al. over the cores of a device.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor

from minitrain.attention.kernel import FUSED, empty_result, wide
from minitrain.attention.placed import Alibi
from minitrain.ranks import collectives


@contextmanager
def cached(run, most: int) -> Iterator[Callable[[Tensor], Tensor]]:
    """Rows `[B, T]` -> logits `[B, .., V]`, the last of which are those of the last token; with room for
    `most` tokens behind a prompt. Rows a token longer than those before must begin with these."""
    config, hooks = run.config, run.model.hooks
    if config.experts and config.experts.router == "expert_choice":
        yield run
        return
    cache = Cache(run, most)
    attentions = [layer.attention for layer in run.model.layers if hasattr(layer, "attention")]
    cores = [attention.core for attention in attentions]
    hooks.absorb = cache.latent > 0
    for attention in attentions:
        attention.core = partial(cache.attend, attention.core, {})
    try:
        yield cache.logits
    finally:
        hooks.absorb = False
        for attention, core in zip(attentions, cores):
            attention.core = core


class Cache:
    """Which tokens of a text are this rank's, for all layers."""

    def __init__(self, run, most: int):
        self.run, self.most, self.group, self.length = run, most, run.context_group, 0
        self.ranks, self.rank = (self.group.size(), self.group.rank()) if self.group else (1, 0)
        self.latent = run.config.kv_latent if run.strategy.products == "plain" else 0

    def logits(self, tokens: Tensor) -> Tensor:
        run, strategy, length, device = self.run, self.run.strategy, tokens.size(1), tokens.device
        self.grows = 0 < self.length == length - 1
        self.length = length
        if self.grows:
            self.ours = (length - 1) % self.ranks == self.rank
            padding = strategy.tp - 1 if strategy.sequence_parallel else 0
            positions = torch.arange(length - 1, length + padding, device=device)
            self.positions = torch.cat((self.positions, positions[: int(self.ours)]))
            return run.logits(F.pad(tokens[:, -1:], (0, padding)), positions, padding)[:, :1]
        padded = length + -length % strategy.pieces
        runs = run.layout(self.rank, self.ranks, padded) if run.layout else [range(padded)]
        here = [position for position in chain(*runs) if position < length]  # in order: padding comes last
        self.positions = torch.tensor(here, dtype=torch.int64, device=device)
        self.more = -(-min(self.most, run.config.max_positions - length) // self.ranks)
        return run(tokens)

    def attend(self, core: Callable, seen: dict, q: Tensor, k: Tensor, v: Tensor, **extras) -> Tensor:
        """A layer's core of a prompt; of a token `[B, H, 1, K]`, perhaps with padding, which gets zeros. The
        layer's keys and values are in `seen`."""
        if self.grows:
            out = self.attend_one(seen, *(x[:, :, :1] for x in (q, k, v)), **extras).to(q.dtype)
            return F.pad(out, (0, 0, 0, q.size(2) - 1))
        with_room = lambda x: F.pad(x[:, :, : len(self.positions)], (0, 0, 0, self.more))
        seen["k"] = with_room(k)
        seen["v"] = seen["k"][..., : self.latent] if self.latent else with_room(v)
        return core(q, k, v, **extras)

    def attend_one(self, seen: dict, q: Tensor, k: Tensor, v: Tensor, bias: Alibi | None = None) -> Tensor:
        here, more = len(self.positions), {}
        if self.ours:
            seen["k"][:, :, here - 1 : here], seen["v"][:, :, here - 1 : here] = k, v
        keys, values = seen["k"][:, :, :here], seen["v"][:, :, :here]
        q = q.reshape(len(q), k.size(1), -1, q.size(3))  # the heads of a key are queries of it
        if bias:
            distances = bias.between(bias.positions[:1], self.positions)  # [H, 1, Tk]
            more["bias"] = lambda _: distances.reshape(*q.shape[1:3], -1)
        out, lse = FUSED.forward(q, keys, values, False, **more) if here else empty_result(q, v.size(3))
        if self.group is not None:
            parts = torch.cat((out.to(wide(q)), lse.unsqueeze(-1)), -1).unsqueeze(0)
            parts = collectives.all_gather(parts, self.group, 0)
            out = (parts[..., :-1] * parts[..., -1:].softmax(0)).sum(0)
        return out.flatten(1, 2).unsqueeze(2)
