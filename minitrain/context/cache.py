"""Keys and values of a text that grows token by token, cached where attention has them, in any layout.

    prompt      core(q, k, v) as in training         rank r caches K, V of its tokens, in its layout
    token t     q, k, v [B, H, 1, K] alike on all    rank t mod n caches K, V; each rank attends what it has
                O = Σ_r O_r exp(lse_r - lse)         lse = log Σ_r exp lse_r; one all-gather of O_r and lse_r

Whatever the core of the prompt is, a ring or heads dealt by Ulysses, its inputs are this rank's tokens, and
one query needs no ring. Query heads that share a key read it once. Of latent attention [c, rope(r)] is all
there is to cache: computed as it is served, a value is a part of its key. With a rank's heads H and H_kv
    sent, per token and layer       (n-1) · B·H·(K+1) elements, in at least float32
    memory, per row and layer       2·H_kv·K numbers (latent: C + R) for T/n tokens and ceil(m/n) of m to come
Pope et al. 2022, arXiv:2211.05102, section 3.3; Dao et al. 2023, Flash-Decoding. Differs: keys are cut over
ranks, where Pope et al. cut heads or rows, and Dao et al. over the cores of a device.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from minitrain.attention.kernel import FUSED, empty_result, wide
from minitrain.attention.placed import Alibi
from minitrain.ranks import collectives


class Cache:
    """Which tokens of a text are this rank's: all layers ask it. `group`: ranks with other tokens of it."""

    def __init__(self, group: ProcessGroup | None = None):
        self.group, self.length = group, 0
        self.ranks, self.rank = (group.size(), group.rank()) if group else (1, 0)

    def begin(self, positions: list[int], length: int, more: int, device: torch.device | None = None) -> None:
        """The next forward is of a prompt of that length: this rank has the tokens at these positions, those
        behind it are padding. At most `more` tokens will follow."""
        places = [place for place, position in enumerate(positions) if position < length]
        self.places = torch.tensor(places, dtype=torch.int64, device=device)  # in this rank's k and v
        self.positions = torch.tensor(positions, device=device).index_select(0, self.places)
        self.length, self.more, self.grows = length, -(-more // self.ranks), False

    def add(self) -> int:
        """The next forward is of one token more; returns its position."""
        position, self.grows, self.length = self.length, True, self.length + 1
        self.ours = position % self.ranks == self.rank
        if self.ours:
            self.positions = torch.cat((self.positions, self.positions.new_tensor([position])))
        return position


class CachedCore:
    """An attention core, and what it has seen. `latent`: so many first columns of a key are its value."""

    def __init__(self, core: Callable, cache: Cache, latent: int = 0):
        self.core, self.cache, self.latent = core, cache, latent

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **extras) -> Tensor:
        """q `[B, H, T/n, K]`, k and v `[B, H_kv, T/n, K]` of a prompt, as the core takes them; or of a token
        `[.., 1, K]`, perhaps with padding behind it, which gets zeros."""
        cache = self.cache
        if cache.grows:
            out = self.attend(*(x[:, :, :1] for x in (q, k, v)), **extras).to(q.dtype)
            return F.pad(out, (0, 0, 0, q.size(2) - 1))
        with_room = lambda x: F.pad(x.index_select(2, cache.places), (0, 0, 0, cache.more))
        self.keys = with_room(k)
        self.values = self.keys[..., : self.latent] if self.latent else with_room(v)
        return self.core(q, k, v, **extras)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Alibi | None = None) -> Tensor:
        """One query `[B, H, 1, K]` over the keys of all ranks and its own."""
        cache, here, more = self.cache, len(self.cache.positions), {}
        if cache.ours:
            self.keys[:, :, here - 1 : here], self.values[:, :, here - 1 : here] = k, v
        keys, values = self.keys[:, :, :here], self.values[:, :, :here]
        q = q.reshape(len(q), k.size(1), -1, q.size(3))  # the heads of a key are queries of it
        if bias:
            distances = bias.between(bias.positions[:1], cache.positions)  # [H, 1, Tk]
            more["bias"] = lambda _: distances.reshape(*q.shape[1:3], -1)
        out, lse = FUSED.forward(q, keys, values, False, **more) if here else empty_result(q, v.size(3))
        if cache.group is not None:
            parts = torch.cat((out.to(wide(q)), lse.unsqueeze(-1)), -1).unsqueeze(0)
            parts = collectives.all_gather(parts, cache.group, 0)
            out = (parts[..., :-1] * parts[..., -1:].softmax(0)).sum(0)
        return out.flatten(1, 2).unsqueeze(2)
