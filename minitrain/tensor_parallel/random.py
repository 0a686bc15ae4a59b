"""Random numbers under tensor parallelism: dropout masks that agree where ranks hold the same, and differ where they do not.

    same         where every rank holds the same activations (between the cut matrices, without sequence parallelism)
    different    where each rank holds its own: heads of attention, and with sequence parallelism also tokens

If ranks drew different masks for the same activations they would not be the same any more, and every product after that would be
wrong; if they drew the same mask for different heads, heads would be dropped in step. So there are two streams of random numbers.
A function is given its stream once, `attention.core = states.different(attention.core)`. Call number n of a stream draws from a
generator seeded by (seed, stream, n), so that ranks agree without sending anything. Recomputation must draw again what it drew: torch's
checkpoint puts torch's own generator back, so each call draws one number from that, and a number seen before means a call seen before.

The streams also depend on `seed`: ranks with other data should be given another. Sends nothing; keeps the numbers of the last 65,536
calls. Raises ValueError for a seed that is not an integer.
Shoeybi et al. 2019, Megatron-LM, arXiv:1909.08053, appendix B.2 (model parallel RNG). Differs: streams belong to an object and not to the
process, and torch's own checkpoint works, where Megatron-LM has one that saves its streams too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import wraps

import torch
from torch.distributed import ProcessGroup

from minitrain.torch_private import outside_modes

REMEMBERED = 65_536  # calls; more than a step makes between a forward and its recomputation


class RandomStates:
    """The two streams of this rank."""

    def __init__(self, seed: int, group: ProcessGroup, device: torch.device | str = "cpu"):
        if not isinstance(seed, int):
            raise ValueError(
                f"seed = {seed!r} is {type(seed).__name__}; give an integer, the same on all ranks of the group"
            )
        self.device = torch.device(device)
        self.seeds = {"same": f"{seed} same", "different": f"{seed} rank {group.rank()} of {group.size()}"}
        self.numbers: dict[int, int] = {}  # what torch's generator gave -> which call that was
        self.calls = 0

    def same(self, fn: Callable) -> Callable:
        """fn, drawing the same numbers on all ranks of the group."""
        return self._on("same", fn)

    def different(self, fn: Callable) -> Callable:
        """fn, drawing this rank's own numbers."""
        return self._on("different", fn)

    def _on(self, stream: str, fn: Callable) -> Callable:
        @wraps(fn)
        def run(*args, **kwargs):
            with outside_modes():  # a real number in a dry run too, and no line in an account
                number = self._number_of(torch.randint(2**62, ()).item())
            outside = self._get()
            try:
                self._seed(f"{self.seeds[stream]} call {number}")
                return fn(*args, **kwargs)
            finally:
                self._set(outside)

        return run

    def _number_of(self, drawn: int) -> int:
        """Which call this is: a new one, or the one that drew the same before."""
        if drawn not in self.numbers:
            self.numbers[drawn] = self.calls
            self.calls += 1
            if len(self.numbers) > REMEMBERED:
                del self.numbers[next(iter(self.numbers))]
        return self.numbers[drawn]

    def _seed(self, text: str) -> None:
        seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest())
        torch.cuda.manual_seed(seed) if self.device.type == "cuda" else torch.default_generator.manual_seed(
            seed
        )

    def _get(self) -> torch.Tensor:
        return torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else torch.get_rng_state()

    def _set(self, state: torch.Tensor) -> None:
        torch.cuda.set_rng_state(state, self.device) if self.device.type == "cuda" else torch.set_rng_state(
            state
        )
