"""Does a stage fit into a pipeline? Checked before any rank waits for another, on tensors without data.

takes_positions(stage)                                         is it forward(x, positions), or forward(x)?
check_fits({1: stage}, schedule, group)                        are these the stages of this rank?
check_boundary(1, stage, schedule, width=D, dtype=float32)     [rows, T, D] in and out? Stage 0 takes tokens
"""

import inspect
from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed import ProcessGroup

from minitrain.pipeline.schedule import Schedule
from minitrain.ranks import collectives


def takes_positions(stage: nn.Module) -> bool:
    """Does forward have a second argument that is required or named positions, or take *args?"""
    first, *others = inspect.signature(stage.forward).parameters.values()
    return first.kind is first.VAR_POSITIONAL or any(
        other.kind is other.VAR_POSITIONAL
        or other.name == "positions"
        or (other.kind is other.POSITIONAL_OR_KEYWORD and other.default is other.empty)
        for other in others
    )


def check_fits(stages: Mapping[int, nn.Module], schedule: Schedule, group: ProcessGroup) -> None:
    rank, size, ranks = group.rank(), group.size(), len(schedule.ranks)
    if ranks != size:
        axis = collectives.axis_of(group)
        raise ValueError(f"{schedule.name} is for {ranks} ranks, the group {axis} has {size}; make it fit")
    own = schedule.stages_of(rank)
    if sorted(stages) != own:
        found = f"rank {rank} runs the stages {own}, but was given {sorted(stages)}"
        raise ValueError(f"{schedule.name}: {found}; build those that schedule.stages_of(rank) names")


def check_boundary(number: int, stage: nn.Module, schedule: Schedule, width: int, dtype: torch.dtype) -> None:
    """Does the stage take and return [rows, T, width]? Tried on a copy without data."""
    tensors = {**dict(stage.named_parameters()), **dict(stage.named_buffers())}
    empty = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}
    form = dict(size=(1, 2, width), dtype=dtype) if number else dict(size=(1, 2), dtype=torch.int64)
    x = torch.empty(**form, device="meta")
    inputs = (x, torch.arange(2, device="meta")) if takes_positions(stage) else (x,)
    advice = f"cut the model where its width is {width}"
    try:
        with torch.no_grad():
            y = torch.func.functional_call(stage, empty, inputs)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"stage {number} does not take {list(x.shape)}: {reason}; {advice}") from None
    if number < schedule.stages - 1 and tuple(y.shape) != (1, 2, width):
        found = f"stage {number} gives {list(y.shape)}, stage {number + 1} expects [1, 2, {width}]"
        raise ValueError(f"{found}; {advice}")
