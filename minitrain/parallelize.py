"""Put the techniques together: the only module that knows the model, the mesh and the techniques. One function, one order.

    model (a list of layers)  +  mesh (dp=8, ...)   ->   what a training step needs: model, reducer, optimizer, data group

Today's axes are `dp` and, for hybrid sharding, `inter` (nodes) and `intra` (places in a node). Each further axis cuts the
model before the data axes look at its parameters: tp, then pp, then these.
Sends nothing itself. Raises ValueError for an axis of more than one rank that no technique here takes, for an unknown way of
sharding, and where sharding is asked for without the function that builds the optimizer over the shards.
"""
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed import ProcessGroup

from minitrain.data_parallel.bucketed import GradReducer
from minitrain.data_parallel.flat import MakeOptimizer, Shards
from minitrain.data_parallel.hybrid import WORDS, Hybrid
from minitrain.data_parallel.zero1 import Zero1
from minitrain.data_parallel.zero2 import Zero2
from minitrain.data_parallel.zero3 import Zero3
from minitrain.mesh import Mesh


@dataclass(frozen=True)
class Parallel:
    """What `train_step` runs: the model on this rank, the reducer of its gradients, the group whose ranks hold different data,
    and the optimizer, if the function that builds it was given."""

    model: nn.Module
    reducer: GradReducer | Shards
    data_group: ProcessGroup
    optimizer: torch.optim.Optimizer | Shards | None = None


def parallelize(model: nn.Module, mesh: Mesh, *, bucket_bytes: int = 25_000_000, zero: int | str = 0,
                make_optimizer: MakeOptimizer | None = None) -> Parallel:
    """Attach data parallelism to `model` (any nn.Module, built equal on every rank).

    `zero` is the stage, 1, 2 or 3, over the mesh's `dp` axis, or a word of hybrid.py, "III" say, over `inter` and `intra`.
    """
    if zero not in (0, 1, 2, 3, *WORDS):
        raise ValueError(f"zero={zero!r}; use 0 (no sharding), a stage 1, 2 or 3, or a word of hybrid sharding: {', '.join(WORDS)}")
    if zero and make_optimizer is None:
        raise ValueError(f"zero={zero!r} needs make_optimizer=lambda shards: AdamW(shards, lr=...): an optimizer over whole parameters "
                         "would hold what sharding is to save")
    axes = ("inter", "intra") if isinstance(zero, str) else ("dp",)
    unknown = [axis for axis, size in mesh.shape.items() if axis not in axes and size > 1]
    if unknown:
        raise ValueError(f"no technique takes the axis {unknown[0]!r} of size {mesh.shape[unknown[0]]}; use {', '.join(axes)}")
    group = mesh.group(*axes)
    if zero:
        if isinstance(zero, str):
            sharded = Hybrid(model, mesh.group("intra"), mesh.group("inter"), make_optimizer, zero)
        elif zero == 3:
            sharded = Zero3(model, group, make_optimizer)
        else:
            sharded = (Zero1 if zero == 1 else Zero2)(model, group, make_optimizer, bucket_bytes)
        return Parallel(model, sharded, group, sharded)
    optimizer = make_optimizer([param for param in model.parameters() if param.requires_grad]) if make_optimizer else None
    return Parallel(model, GradReducer(model.parameters(), group, bucket_bytes), group, optimizer)
