"""A checkpoint that spares attention: a layer is computed anew in backward, but for the attention in it, whose O and lse were kept.

    forward       x -> layer -> y         of all its activations only x, and O[B, H, T/n, K] and lse[B, H, T/n], are kept
    backward      x -> layer again        Q, K, V and everything else; the core gives O and lse back and computes nothing

Backward of flash attention computes the scores from Q, K, lse anyway. A checkpoint around the whole layer therefore computes them three
times, and with long sequences attention is most of the layer; under context parallelism it would also send K and V round once more.

    core = Sparing(partial(ring_forward, ...), partial(ring_backward, ...))           how attention is computed: kernel.py, ring.py, ...
    y = torch.utils.checkpoint.checkpoint(layer, x, positions, use_reentrant=False, context_fn=core.contexts)

saves, of the 4/3 of a step's FLOPs that recomputation costs, the part that is attention's. Memory: B·T/n·D and the lse more than a
checkpoint that keeps x only. Sends nothing. One core may serve all layers of a model; each checkpoint has its own store.
Raises ValueError in one line for shapes that do not fit each other, and where a layer is computed again otherwise than the first time.

Li et al. 2023 (DistFlashAttn), arXiv:2310.03294, section 3 (rematerialization-aware checkpointing). Differs: any core with an
(O, lse), by torch's own checkpoint.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial

from torch import Tensor

from minitrain.attention.alibi import Alibi
from minitrain.attention.dropout import DropMask
from minitrain.attention.kernel import FUSED, recomputed
from minitrain.attention.placed import placed
from minitrain.context.ring import check_core


class Sparing:
    """A core for the model's attention, `forward(q, k, v) -> out, lse`, `backward(dout, q, k, v, out, lse) -> dq, dk, dv`.
    With ALiBi or dropout both are called with `blocks=` that add and multiply what belongs to a place (placed.py)."""

    def __init__(self, forward: Callable, backward: Callable):
        self.forward, self.backward = forward, backward
        self._store: deque | None = None
        self._again = False

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, bias: Alibi | None = None, dropout: DropMask | float = 0.0
    ) -> Tensor:
        check_core("Sparing", q, k, v, bias, dropout)
        settings = {} if bias is None and not dropout else {"kernel": placed(FUSED, bias, dropout)}
        return recomputed(partial(self.attend, **settings), partial(self.backward, **settings), q, k, v)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **settings) -> tuple[Tensor, Tensor]:
        """O and lse, computed the first time, handed out the second."""
        if self._again:
            if not self._store or self._store[0][0].shape[:-1] != q.shape[:-1]:
                raise ValueError(
                    f"Sparing: q {list(q.shape)} was not there the first time; a checkpointed layer must do the same twice"
                )
            return self._store.popleft()
        found = self.forward(q, k, v, **settings)
        if self._store is not None:
            self._store.append(tuple(x.detach() for x in found))
        return found

    def contexts(self) -> tuple[AbstractContextManager, AbstractContextManager]:
        """For `context_fn` of torch.utils.checkpoint: around the layer's first pass, and around its second."""
        store: deque = deque()
        return self._using(store, again=False), self._using(store, again=True)

    @contextmanager
    def _using(self, store: deque, again: bool) -> Iterator[None]:
        before = self._store, self._again
        self._store, self._again = store, again
        try:
            yield
        finally:
            self._store, self._again = before
