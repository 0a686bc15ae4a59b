"""Does a stage fit into a pipeline? Asked before any rank waits for another.

    takes_positions(stage)                                         is it forward(x, positions), or forward(x)?
    check_fits({1: stage}, schedule, group)                        are these the stages that this rank of the schedule runs?
    check_boundary(1, stage, schedule, width=D, dtype=float32)     [rows, T, D] in, [rows, T, D] out? The first one takes tokens

Sends nothing. Memory: none, a stage is asked with tensors without data (torch's `meta` device).
Raises ValueError in one line: what the stage is, and what the schedule expects.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed import ProcessGroup

from minitrain import collectives
from minitrain.pipeline.schedule import Schedule


def takes_positions(stage: nn.Module) -> bool:
    """A stage is `forward(x)` or `forward(x, positions)`: has its forward a second argument that must be given, or one of that name?"""
    first, *others = inspect.signature(stage.forward).parameters.values()
    return first.kind is first.VAR_POSITIONAL or any(
        other.kind is other.VAR_POSITIONAL
        or other.name == "positions"
        or (other.kind is other.POSITIONAL_OR_KEYWORD and other.default is other.empty)
        for other in others
    )


def check_fits(stages: Mapping[int, nn.Module], schedule: Schedule, group: ProcessGroup) -> None:
    if len(schedule.ranks) != group.size():
        raise ValueError(
            f"{schedule.name} is for {len(schedule.ranks)} ranks, the group {collectives.axis_of(group)} has {group.size()}; "
            "make the schedule for that many"
        )
    if sorted(stages) != schedule.stages_of(group.rank()):
        raise ValueError(
            f"{schedule.name}: rank {group.rank()} runs the stages {schedule.stages_of(group.rank())}, but was given "
            f"{sorted(stages)}; build those that schedule.stages_of(rank) names"
        )


def check_boundary(number: int, stage: nn.Module, schedule: Schedule, width: int, dtype: torch.dtype) -> None:
    """Does the stage take and give [rows, T, width]? Asked of a copy without data."""
    tensors = {**dict(stage.named_parameters()), **dict(stage.named_buffers())}
    empty = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}
    x = (
        torch.empty((1, 2), dtype=torch.int64, device="meta")
        if number == 0
        else torch.empty((1, 2, width), dtype=dtype, device="meta")
    )
    try:
        with torch.no_grad():
            y = torch.func.functional_call(
                stage, empty, (x, torch.arange(2, device="meta")) if takes_positions(stage) else (x,)
            )
    except RuntimeError as error:
        raise ValueError(
            f"stage {number} does not take {list(x.shape)}: {str(error).splitlines()[0]}; cut the model where its width is "
            f"{width}"
        ) from None
    if number < schedule.stages - 1 and tuple(y.shape) != (1, 2, width):
        raise ValueError(
            f"stage {number} gives {list(y.shape)}, stage {number + 1} expects [1, 2, {width}]; cut the model where its width "
            f"is {width}"
        )
