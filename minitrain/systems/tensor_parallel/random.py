"""Random numbers under tensor parallelism, Megatron's way: streams that agree on all ranks, or differ.

    same         where every rank holds the same activations (between the cut matrices)
    different    where each rank holds its own: heads of attention; with sequence parallelism also tokens

A function is given its stream once: `attention.core = states.different(attention.core)`. Call n of a stream
draws from a generator seeded by (seed, stream, n): nothing is sent. A recomputation must draw again what it
drew: torch's checkpoint restores torch's own generator, so each call draws one number from that, and a number
seen before means a call seen before. Ranks with other data need another `seed`. Remembers 65,536 calls.
Shoeybi et al. 2019, Megatron-LM, arXiv:1909.08053, appendix B.2. Differs: streams belong to an object, not to
the process; torch's own checkpoint works. The trainer drops by position instead (attention/placed.py).
"""

import hashlib
from collections.abc import Callable
from functools import wraps

import torch
from torch.distributed import ProcessGroup

from minitrain.ranks.checks import require_device, require_ints
from minitrain.ranks.random_state import drawing_from, random_state
from minitrain.ranks.torch_private import outside_modes

REMEMBERED = 65_536  # calls; more than a step makes between a forward and its recomputation


class RandomStates:
    def __init__(self, seed: int, group: ProcessGroup, device: torch.device | str = "cpu"):
        require_device(device=device)
        require_ints(seed=seed)
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
            seed = hashlib.blake2b(f"{self.seeds[stream]} call {number}".encode(), digest_size=7).digest()
            generator = self._generator()
            with drawing_from(random_state(generator), generator):
                generator.manual_seed(int.from_bytes(seed))
                return fn(*args, **kwargs)

        return run

    def _generator(self) -> torch.Generator:
        """torch's own of the device."""
        if self.device.type != "cuda":
            return torch.default_generator
        torch.cuda.init()
        index = torch.cuda.current_device() if self.device.index is None else self.device.index
        return torch.cuda.default_generators[index]

    def _number_of(self, drawn: int) -> int:
        """Which call this is: a new one, or the one that drew the same before."""
        if drawn not in self.numbers:
            self.numbers[drawn] = self.calls
            self.calls += 1
            if len(self.numbers) > REMEMBERED:
                del self.numbers[next(iter(self.numbers))]
        return self.numbers[drawn]
