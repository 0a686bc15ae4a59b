"""What torch's generators draw next, kept and put back: a stage that is computed again draws the masks that it drew before.

    before = random_state(device)                   in front of F
    with drawing_from(before, device):              around R: the draws of F, and afterwards those that would have come without R
        ...

The generators are the CPU's and, for a CUDA device, that device's. Outside of dispatch modes, so that an account is the same with and
without: a state is no tensor of the model. (In a dry run nothing is drawn; the CPU's state is kept and put back all the same.)
Memory: 5 kB of host memory for a kept state, and 16 bytes of a CUDA generator. Sends nothing, raises nothing.
Differs from torch.utils.checkpoint: the state is taken by who runs the schedule, a forward and its repetition are two actions of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from minitrain.torch_private import outside_modes


def random_state(device: torch.device) -> tuple[Tensor, ...]:
    with outside_modes():
        return torch.get_rng_state(), *((torch.cuda.get_rng_state(device),) if _draws(device) else ())


def set_random_state(state: tuple[Tensor, ...], device: torch.device) -> None:
    with outside_modes():
        torch.set_rng_state(state[0])
        for cuda in state[1:]:
            torch.cuda.set_rng_state(cuda, device)


@contextmanager
def drawing_from(state: tuple[Tensor, ...], device: torch.device) -> Iterator[None]:
    outside = random_state(device)
    set_random_state(state, device)
    try:
        yield
    finally:
        set_random_state(outside, device)


def _draws(device: torch.device) -> bool:
    """Has the device a generator of its own that exists? A dry run may speak of a GPU that is not there."""
    return device.type == "cuda" and torch.cuda.is_initialized()
