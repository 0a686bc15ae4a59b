"""Parameters in flat buffers that divide by the ranks of a group: what all stages of ZeRO stand on.

    W1[F, D]  b1[F]  W2[D, F]   ->   whole[P] = W1 | b1 | W2 | padding            P = the next multiple of n
                                     shard[P/n] = whole[rank P/n : (rank+1) P/n]

A shard is cut wherever n says, in the middle of a matrix if it must: an optimizer that works on elements does not mind.
One buffer holds parameters of one dtype that are summed over the same ranks, cut alike over others (tensor parallelism), complete
together (a stage of a pipeline) and updated with the same settings; they are laid out in the order given, so every rank has the same
layout. A shard is an ordinary nn.Parameter with a placement: clipping and `full_tensor` know what to do.

`Shards` adds to Sync this rank's own state, for the same stage, cut and world size, without any communication.
Sends nothing. Padding costs at most n-1 elements a buffer.
Raises ValueError in one line for a state of another stage, world size or model.
Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054, section 5; Zhao et al. 2023, PyTorch FSDP, arXiv:2304.11277, section
3.2.3 (FlatParameter). Differs from FSDP2, which cuts every parameter along its dim 0 and so keeps its shape, at the
price of a copy into and out of the buffer at each collective.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from minitrain.data_parallel.sync import Sync, copied
from minitrain.sharding import Placement, Shard, full_tensor, placement


class Flat:
    """The layout of some parameters in one padded buffer, cut over one group or over several, one inside the other."""

    def __init__(self, params: list[nn.Parameter], *groups: ProcessGroup):
        self.params, self.groups = params, groups
        self.numels = [param.numel() for param in params]
        self.padding = -sum(self.numels) % math.prod(group.size() for group in groups)
        self.numel = sum(self.numels) + self.padding
        self.shard: nn.Parameter | None = None

    def pack(self, tensors: list[Tensor]) -> Tensor:
        """A new flat buffer [P] with copies of tensors shaped like the parameters."""
        parts = [tensor.detach().reshape(-1) for tensor in tensors]
        return torch.cat([*parts, parts[0].new_zeros(self.padding)])

    def views(self, flat: Tensor) -> list[Tensor]:
        """The parameters' places in a flat buffer, in their shapes."""
        parts = flat.narrow(0, 0, sum(self.numels)).split(self.numels)
        return [part.view(param.shape) for part, param in zip(parts, self.params)]

    def own(self, flat: Tensor, cuts: slice = slice(None)) -> Tensor:
        """This rank's slice of a flat buffer: [P/n] if all groups cut it, or those in `cuts` only."""
        for group in self.groups[cuts]:
            size = flat.numel() // group.size()
            flat = flat.narrow(0, group.rank() * size, size)
        return flat

    def cut(self, own: Tensor, cuts: slice = slice(None)) -> nn.Parameter:
        """Make this rank's slice the shard."""
        where = placement(self.params[0])
        self.shard = nn.Parameter(own.detach(), requires_grad=self.params[0].requires_grad)
        self.shard.placement = Placement(
            tuple(Shard(0, group) for group in self.groups[cuts]),
            where.summed_over,
            where.copies,
            where.cut_over,
        )
        return self.shard

    def unfold(self, kept: Tensor) -> list[Tensor]:
        """What all ranks keep together, in the shapes of the parameters: gathers."""
        return self.views(full_tensor(kept, self.shard.placement.shards))

    def fold(self, tensors: list[Tensor]) -> Tensor:
        """What the shard stands for of tensors shaped like the parameters."""
        return self.own(self.pack(tensors), slice(len(self.shard.placement.shards)))


class Shards(Sync):
    """Parameters that are kept in shards."""

    stage: int | str

    @property
    def flats(self) -> list[Flat]:
        return self.held

    def state_dict(self) -> dict[str, Any]:
        """A copy of this rank's shards and optimizer state, for the same stage and world size."""
        return {
            **self._place(),
            "shards": [flat.shard.detach().clone() for flat in self.flats],
            "optimizer": copied(self.optimizer.state_dict()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what `state_dict` gave on the same rank."""
        for what, mine in self._place().items():
            if state.get(what) != mine:
                raise ValueError(
                    f"the state is of {what} {state.get(what)}, this is {what} {mine}: save with full_state_dict(), "
                    f"which any stage and any number of ranks can load"
                )
        sizes, saved = (
            [flat.shard.numel() for flat in self.flats],
            [shard.numel() for shard in state["shards"]],
        )
        if sizes != saved:
            raise ValueError(
                f"the state has shards of {saved[:3]} elements, this model of {sizes[:3]}: it is of another model or "
                f"was cut into other buffers; use full_state_dict()"
            )
        with torch.no_grad():
            for flat, shard in zip(self.flats, state["shards"]):
                flat.shard.copy_(shard)
        self.optimizer.load_state_dict(copied(state["optimizer"]))
        self.publish()

    def _place(self) -> dict[str, Any]:
        """What must be equal for a rank's shards to fit."""
        groups = self.flats[0].groups
        ranks, rank = [group.size() for group in groups], [group.rank() for group in groups]
        return {
            "stage": self.stage,
            "ranks": ranks[0] if len(ranks) == 1 else ranks,
            "rank": rank[0] if len(rank) == 1 else rank,
        }


def buckets(params: Iterable[tuple[nn.Parameter, tuple]], bucket_bytes: int) -> list[Flat]:
    """Trainable parameters with their keys (sync.sums_alike), last first (the order in which backward finishes them), in buffers of about
    `bucket_bytes`."""
    if bucket_bytes <= 0:
        raise ValueError(
            f"bucket_bytes={bucket_bytes}; a bucket needs at least one byte, 25_000_000 is usual"
        )
    filled: dict[tuple, list[list[nn.Parameter]]] = {}
    for param, key in reversed([(param, key) for param, key in params if param.requires_grad]):
        same = filled.setdefault(key, [[]])
        held = sum(p.numel() for p in same[-1])
        if held and (held + param.numel()) * param.element_size() > bucket_bytes:
            same.append([])
        same[-1].append(param)
    return [Flat(params, *key[2]) for key, same in filled.items() for params in same]
