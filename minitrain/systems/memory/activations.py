"""Activations on the host: what autograd keeps of a layer leaves the device until its backward.

    away = AwayActivations(resident)        resident(): what is on the device anyway and outlives the forward
    away.watch(model, model.layers)

    forward     layer i saves x -> to_host(x) begins           x is free when layer i + 1 begins
    backward    layer i opens the first of its tensors         all of layer i is fetched, and of layer i - 1

Sent over the link: what autograd keeps, there and back once in a microbatch; of many views of a block one.
Memory: on the device what two layers keep, on the host what all keep of every microbatch under way. Rhu et
al. 2016 (vDNN), arXiv:1602.08124, section 3.2; Rajbhandari et al. 2021 (ZeRO-Infinity), arXiv:2104.07857,
section 5.1.2. Differs: all that is saved moves, the last layer's too.
"""

import weakref
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from minitrain.memory.pools import Transfer, to_device, to_host
from minitrain.ranks.torch_private import in_backward, storage_id


class _Away:  # a block of memory: on the device, on the host, or on its way
    def __init__(self, block: Tensor):
        self.device = block.device
        self.leaving: Transfer = to_host(block)
        self.host: Tensor | None = None  # once the device need not keep the block
        self.coming: Transfer | None = None
        self.uses = 0  # how many saved tensors lie on it and have not been opened

    def settle(self) -> None:
        """The device has its memory back, as soon as the copy has ended: no host waits for it."""
        if self.host is None:
            self.host = self.leaving.release()

    def fetch(self) -> None:
        self.settle()
        if self.coming is None and self.uses:
            self.coming = to_device(self.host, self.device, after=self.leaving)

    def open(self) -> Tensor:
        self.uses = max(self.uses, 1)  # opened once more than it was saved: another backward
        self.fetch()
        block, self.uses = self.coming.wait(), self.uses - 1
        if not self.uses:
            self.coming = None
        return block


class _Layer:  # what one layer saved in one forward, and the layer before it
    def __init__(self, before: "_Layer | None"):
        self.before, self.blocks = before, []


class AwayActivations:
    """Sees what is saved in the forwards of the modules it watches."""

    def __init__(self, resident: Callable[[], Iterable[Tensor]]):
        self.resident = resident
        self._hooks: list[saved_tensors_hooks] = []
        self._layer: _Layer | None = None
        self._resident_storages: set[int] = set()
        self._known: dict[int, tuple[weakref.ref, _Away]] = {}  # by storage, as long as it lives

    def watch(self, model: nn.Module, layers: Iterable[nn.Module]) -> None:
        """`model` is called as a module, and calls `layers`, which are modules too."""
        model.register_forward_pre_hook(self._begin)
        model.register_forward_hook(self._end, always_call=True)
        for layer in layers:
            layer.register_forward_pre_hook(self._next)

    def _begin(self, *_) -> None:
        if in_backward() or not torch.is_grad_enabled():
            return
        self._resident_storages = {storage_id(x.untyped_storage()) for x in self.resident()}
        self._known.clear()
        self._layer = _Layer(None)
        self._hooks.append(saved_tensors_hooks(self._pack, self._unpack))
        self._hooks[-1].__enter__()

    def _next(self, *_) -> None:
        if self._hooks and not in_backward():
            for block in self._layer.blocks:
                block.settle()
            self._layer = _Layer(self._layer)

    def _end(self, *_) -> None:
        if self._hooks and not in_backward():
            self._next()
            self._hooks.pop().__exit__()
            self._layer = None
            self._known.clear()

    @torch.no_grad()
    def _pack(self, x: Tensor):
        storage = x.untyped_storage()
        key = storage_id(storage)
        if key in self._resident_storages or not storage.nbytes():
            return x
        known, away = self._known.get(key, (None, None))
        if known is None or known() is not storage:
            first = x.detach().as_strided((1,), (1,), 0).view(torch.uint8)
            away = _Away(first.as_strided((storage.nbytes(),), (1,), 0))
            self._layer.blocks.append(away)
            self._known[key] = weakref.ref(storage), away
        away.uses += 1
        return away, self._layer, x.dtype, (x.size(), x.stride(), x.storage_offset())

    def _unpack(self, packed) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        away, layer, dtype, place = packed
        for one in [layer, layer.before] if layer.before else [layer]:
            for block in one.blocks:
                block.fetch()
        return away.open().view(dtype).as_strided(*place)
