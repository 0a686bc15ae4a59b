"""Put the techniques together: the only module that knows the model, the mesh and the techniques. One function, one order.

    model (a list of layers)  +  mesh (dp=8, ...)   ->   what a training step needs: model, reducer, data group

Today's axis is `dp`. Each further axis cuts the model before the reducer looks at its parameters: tp, then pp, then the data axes.
Sends nothing itself. Raises ValueError for an axis of more than one rank that no technique here takes.
"""
from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.distributed import ProcessGroup

from minitrain.data_parallel.bucketed import GradReducer
from minitrain.mesh import Mesh

AXES = ("dp",)


@dataclass(frozen=True)
class Parallel:
    """What `train_step` runs: the model on this rank, the reducer of its gradients, the group whose ranks hold different data."""

    model: nn.Module
    reducer: GradReducer
    data_group: ProcessGroup


def parallelize(model: nn.Module, mesh: Mesh, *, bucket_bytes: int = 25_000_000) -> Parallel:
    """Attach data parallelism over the mesh's `dp` axis to `model` (any nn.Module, built equal on every rank)."""
    unknown = [axis for axis, size in mesh.shape.items() if axis not in AXES and size > 1]
    if unknown:
        raise ValueError(f"no technique takes the axis {unknown[0]!r} of size {mesh.shape[unknown[0]]}; use {', '.join(AXES)}")
    group = mesh.group("dp")
    return Parallel(model, GradReducer(model.parameters(), group, bucket_bytes), group)
