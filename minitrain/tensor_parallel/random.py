"""Random numbers under tensor parallelism: dropout masks that agree where ranks hold the same, and differ where they do not.

    same         where every rank holds the same activations (between the cut matrices, without sequence parallelism)
    different    where each rank holds its own: heads of attention, and with sequence parallelism also tokens

If ranks drew different masks for the same activations they would not be the same any more, and every product after that would be
wrong; if they drew the same mask for different heads, heads would be dropped in step. So there are two streams of random numbers.
A function is given its stream once, `attention.core = states.different(attention.core)`, and torch's own generator is left alone.

The streams also depend on `seed`: ranks with other data should be given another. Sends nothing; keeps one generator state (5 KB on
a CPU, 16 bytes on a GPU) per stream. Raises ValueError for a seed that is not an integer.
Shoeybi et al. 2019, Megatron-LM, arXiv:1909.08053, appendix B.2 (model parallel RNG). Differs: streams belong to an object and not to the process.
"""
from __future__ import annotations

from collections.abc import Callable
from functools import wraps

import torch
from torch.distributed import ProcessGroup


class RandomStates:
    """The two streams of this rank."""

    def __init__(self, seed: int, group: ProcessGroup, device: torch.device | str = "cpu"):
        if not isinstance(seed, int):
            raise ValueError(f"seed = {seed!r} is {type(seed).__name__}; give an integer, the same on all ranks of the group")
        self.device = torch.device(device)
        self.seeds = {"same": 2 * seed, "different": 2 * (seed * group.size() + group.rank()) + 1}    # odd and even: never equal
        self.states: dict[str, torch.Tensor] = {}

    def same(self, fn: Callable) -> Callable:
        """fn, drawing the same numbers on all ranks of the group."""
        return self._on("same", fn)

    def different(self, fn: Callable) -> Callable:
        """fn, drawing this rank's own numbers."""
        return self._on("different", fn)

    def _on(self, stream: str, fn: Callable) -> Callable:
        @wraps(fn)
        def run(*args, **kwargs):
            outside = self._get()
            try:
                self._set(stream)
                return fn(*args, **kwargs)
            finally:
                self.states[stream] = self._get()
                self._set_state(outside)
        return run

    def _set(self, stream: str) -> None:
        if stream in self.states:
            self._set_state(self.states[stream])
        elif self.device.type == "cuda":
            torch.cuda.manual_seed(self.seeds[stream])
        else:
            torch.default_generator.manual_seed(self.seeds[stream])

    def _get(self) -> torch.Tensor:
        return torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else torch.get_rng_state()

    def _set_state(self, state: torch.Tensor) -> None:
        torch.cuda.set_rng_state(state, self.device) if self.device.type == "cuda" else torch.set_rng_state(state)
