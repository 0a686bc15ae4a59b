"""The state of torch's random generators, kept and restored: a recomputed stage draws the same masks again.

    before = random_state(device)                 in front of F
    with drawing_from(before, device): ...        around R: the draws of F; then those that come without R

Outside of dispatch modes: a state is no tensor of the model. Memory: 5 kB on the host for a kept state, 16
bytes of a CUDA generator. Differs from torch.utils.checkpoint: a forward and its repetition are two actions.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from minitrain.ranks.torch_private import outside_modes

Source = torch.device | torch.Generator  # of draws: what a device has by itself, or one of the program's


def random_state(source: Source) -> tuple[Tensor, ...]:
    with outside_modes():
        if isinstance(source, torch.Generator):
            return (source.get_state(),)
        if source.type == "cuda" and torch.cuda.is_initialized():  # a dry run may speak of one that is not
            return torch.get_rng_state(), torch.cuda.get_rng_state(source)
        return (torch.get_rng_state(),)


def set_random_state(state: tuple[Tensor, ...], source: Source) -> None:
    with outside_modes():
        if isinstance(source, torch.Generator):
            source.set_state(state[0])
            return
        torch.set_rng_state(state[0])
        for cuda in state[1:]:
            torch.cuda.set_rng_state(cuda, source)


def same(state: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> bool:  # nothing was drawn between
    with outside_modes():
        return all(map(torch.equal, state, other))


@contextmanager
def drawing_from(state: tuple[Tensor, ...], source: Source) -> Iterator[None]:
    outside = random_state(source)
    set_random_state(state, source)
    try:
        yield
    finally:
        set_random_state(outside, source)
