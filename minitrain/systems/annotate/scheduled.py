"""Slapo: a model is defined once, and a schedule says how it runs: cut, fused, computed again, in stages.

    schedule = Schedule(model)
    block = schedule["layers.1"]
    block["mlp.up"].shard("weight", 0, group)                columns; the others of one input alike
    block["mlp.down"].shard("weight", 1, group).sync("forward", group)        rows, and the sum of Z
    block["mlp"].sync("backward", group).fuse()              the sum of dX; one product for up and gate
    block.checkpoint(recompute)                              recompute(forward, *inputs)
    block.cut()                                              a stage ends here: stages(model, schedule)

What is said is sent: an all-reduce in forward or backward for each `sync`; what is computed again sends its
forward's again, but for the last product's, which the second pass does not reach. Chen et al. 2024, Slapo,
arXiv:2302.08005, section 3. Differs: nothing is traced, so fuse() is for modules that hand their matrices to
`project`, and a stage ends behind a layer of a list.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from minitrain.ranks import collectives
from minitrain.ranks.sharding import shard


class Schedule:
    """A module of a model, by its name in it; `schedule[name]` is one inside of it."""

    def __init__(self, module: nn.Module, name: str = "", root: Schedule | None = None):
        self.module, self.name, self.root = module, name, root or self
        self.ends: list[str] = []  # of the root: names of the layers behind which a stage ends

    def __getitem__(self, name: str) -> Schedule:
        full = f"{self.name}.{name}" if self.name else name
        return Schedule(self.module.get_submodule(name), full, self.root)

    def shard(self, param: str, dim: int, group: ProcessGroup) -> Schedule:
        """This rank keeps its slice of the parameter along `dim`."""
        setattr(self.module, param, shard(getattr(self.module, param), dim, group))
        return self

    def sync(self, direction: str, group: ProcessGroup) -> Schedule:
        """The sum over the group: "forward" of what the module gives, "backward" of its input's gradient."""
        if direction == "backward":
            copied = lambda _, given: (collectives.copy_to(given[0], group), *given[1:])
            self.module.register_forward_pre_hook(copied)
        elif getattr(self.module, "bias", None) is not None:
            raise ValueError(f"{self.name}: each of {group.size()} ranks would add its bias; use bias=False")
        else:
            self.module.register_forward_hook(lambda _, given, y: collectives.reduce_from(y, group))
        self.module.synced = True
        return self

    def fuse(self) -> Schedule:
        """One product for all matrices that the module multiplies one input with."""
        self.module.project = project_once
        return self

    def checkpoint(self, recompute: Callable) -> Schedule:
        """Only its inputs are kept: backward runs `forward` again, as `recompute(forward, *inputs)` does."""
        self.module.forward = partial(recompute, self.module.forward)
        return self

    def cut(self) -> Schedule:
        """A stage ends with this layer."""
        self.root.ends.append(self.name)
        return self


def project_once(x: Tensor, linears: Sequence[nn.Module]) -> tuple[Tensor, ...]:
    """The matrices below each other, for this product: a copy of them, and one kernel for several."""
    if any(hasattr(linear, "synced") for linear in linears):
        raise ValueError("a fused matrix is not called by itself; sync the fused module, or use no fuse()")
    biases = [linear.bias for linear in linears]
    bias = None if biases[0] is None else torch.cat(biases)
    y = F.linear(x, torch.cat([linear.weight for linear in linears]), bias)
    return y.split([linear.weight.size(0) for linear in linears], dim=-1)


def stages(layers: nn.ModuleList, schedule: Schedule) -> list[list[nn.Module]]:
    """The model's list of `layers`, up to each cut."""
    parts: list[list[nn.Module]] = [[]]
    for number, layer in layers.named_children():
        parts[-1].append(layer)
        if f"layers.{number}" in schedule.ends:
            parts.append([])
    return parts
