"""A checkpoint that spares attention: a layer is computed anew in backward, all but its attention.

    forward       x -> layer -> y         only x, and attention's O[B, H, T/n, K] and lse[B, H, T/n], are kept
    backward      x -> layer again        Q, K, V and everything else; the core gives back O, lse

Backward of flash attention computes the scores from Q, K, lse anyway. A checkpoint around the whole layer
computes them three times, and with long sequences attention is most of the layer.

    core = Sparing(partial(ring_forward, ...), partial(ring_backward, ...))  or any other with an lse
    y = torch.utils.checkpoint.checkpoint(layer, x, positions, use_reentrant=False, context_fn=core.contexts)

Memory: B·T/n·D and the lse more than a checkpoint that keeps x only. Sends nothing. One core may serve all
layers of a model; each checkpoint has its own store. Li et al. 2023 (DistFlashAttn), arXiv:2310.03294,
section 3 (rematerialization-aware checkpointing). Differs: any core with an (O, lse).
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from torch import Tensor

from minitrain.attention.kernel import recomputed
from minitrain.context.ring import check_core


class Sparing:
    """A core: `forward(q, k, v) -> out, lse`, `backward(dout, q, k, v, out, lse) -> dq, dk, dv`."""

    def __init__(self, forward: Callable, backward: Callable):
        self.forward, self.backward = forward, backward
        self._store: deque | None = None
        self._again = False

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        check_core("Sparing", q, k, v)
        return recomputed(self.attend, self.backward, q, k, v)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """O and lse, computed the first time, given back the second."""
        if self._again:
            if not self._store or self._store[0][0].shape[:-1] != q.shape[:-1]:
                what = f"Sparing: q {list(q.shape)} was not there the first time"
                raise ValueError(f"{what}; a checkpointed layer must do the same twice")
            return self._store.popleft()
        results = self.forward(q, k, v)
        if self._store is not None:
            self._store.append(tuple(x.detach() for x in results))
        return results

    def contexts(self) -> tuple[AbstractContextManager, AbstractContextManager]:
        """For `context_fn` of torch.utils.checkpoint: around the layer's first pass and its second."""
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
