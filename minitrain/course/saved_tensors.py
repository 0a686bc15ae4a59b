"""What autograd keeps for the backward pass: a line per tensor, with the module that asked for it.

    with SavedTensors(block) as saved:
        y = block(x, positions)
    saved.bytes                     all of it, parameters excluded
    saved.by_place                  {"norm1": 4096, "attention": 65536, ...}
    print(saved.table(unit=x.numel()))

A block of memory is counted once, under the module that saved it first; parameters are not counted. Works
without data too (meta and fake tensors), so at any size. Keeps nothing alive. Korthikanti et al. 2022,
arXiv:2205.05198, section 4, counts the same tensors by hand. Differs: mean and deviation of each norm, 4 or 8
bytes per token, are counted here and left out there.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from minitrain.ranks.tables import aligned
from minitrain.ranks.torch_private import storage_id


@dataclass(frozen=True)
class Saved:
    """One block of memory; `shape` is that of the first view of it that was saved."""

    place: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int


class SavedTensors:
    """Watches `module` and its submodules between `with` and its end."""

    def __init__(self, module: nn.Module):
        self.module, self.saved = module, []

    def __enter__(self) -> "SavedTensors":
        if self.saved:
            raise ValueError("these SavedTensors have been used; make a new one for each forward pass")
        self._seen = {storage_id(parameter.untyped_storage()) for parameter in self.module.parameters()}
        self._inside, self._handles = [], []
        self._alive = []  # until the end, or the block of one that is gone would be taken for the next
        for name, module in self.module.named_modules():
            enter = module.register_forward_pre_hook(lambda *_, name=name: self._inside.append(name))
            self._handles += [enter, module.register_forward_hook(self._leave, always_call=True)]
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error):
        self._hooks.__exit__(*error)
        self._alive.clear()
        for handle in self._handles:
            handle.remove()

    def _leave(self, *_):
        self._inside.pop()  # and return nothing: what a forward hook returns replaces the output

    def _keep(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage_id(storage) not in self._seen:
            self._seen.add(storage_id(storage))
            self._alive.append(storage)
            place = self._inside[-1] if self._inside else ""
            self.saved.append(Saved(place, tuple(tensor.shape), tensor.dtype, storage.nbytes()))
        return tensor

    @property
    def bytes(self) -> int:
        return sum(saved.bytes for saved in self.saved)

    @property
    def by_place(self) -> dict[str, int]:
        places = dict.fromkeys(saved.place for saved in self.saved)
        return {place: sum(saved.bytes for saved in self.saved if saved.place == place) for place in places}

    def table(self, unit: int = 1) -> str:
        """One line per block, in the order they were saved; the last column is bytes / unit."""
        rows = [(x.place or "(itself)", str(list(x.shape)), str(x.dtype)[6:], x.bytes) for x in self.saved]
        rows.append(("all", "", "", self.bytes))
        return aligned([(*row, f"{row[-1] / unit:.3f}") for row in rows], left=(0, 1, 2))
