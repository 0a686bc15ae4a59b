"""Parameters that several ranks of a pipeline hold: their gradients are added, so that the copies stay equal.

    tied embeddings        the token table stands on the first stage and is the output matrix of the last
    two copies of a stage  Chimera and DualPipe run the microbatches from both ends, on stages that stand twice

Each rank has seen its own uses of the parameter; the sum over all its uses is the gradient. `Copies(ranks, params)` says which ranks
hold a list of parameters, in the same order on all of them; `finish()` exchanges the gradients, flat, one message to each other
holder, and adds them in rank order, so that all get the same bits.
Sends (holders - 1) times the bytes of what is shared, a step. Memory: one flat copy and one that arrives.
It stands where a reducer does (`enabled`, `ready`, `finish()`) and comes after the sum over data-parallel ranks.
Narayanan et al. 2021, arXiv:2104.04473 (Megatron-LM's embedding group); Li and Hoefler 2021 (Chimera), arXiv:2107.06925, section 3.
Differs: an exchange between the holders, no group of their own. Raises ValueError for a rank that is not in the group.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed import ProcessGroup

from minitrain import collectives


class Copies(NamedTuple):
    """`params[i]` is a list too: this rank may itself hold a parameter more than once (both ends of a tied model)."""

    ranks: tuple[int, ...]
    params: Sequence[Sequence[nn.Parameter]]


class SharedGradients:
    enabled = True

    def __init__(self, copies: Iterable[Copies], group: ProcessGroup):
        self.copies, self.group = sorted(copies, key=lambda held: held.ranks), group
        for held in self.copies:
            if group.rank() not in held.ranks or max(held.ranks) >= group.size():
                raise ValueError(f"shared parameters of ranks {held.ranks}: this is rank {group.rank()} of {group.size()}; name all holders, "
                                 "this rank too, and none beyond the group")

    def ready(self, params: Iterable[nn.Parameter]) -> None:
        """Nothing yet: the sum over data-parallel ranks comes first."""

    @torch.no_grad()
    def finish(self) -> None:
        for held in self.copies:
            trained = [same for same in held.params if same[0].requires_grad]
            if not trained:
                continue
            own = torch.cat([sum(_grad(param) for param in same).flatten() for same in trained])
            others = {rank: collectives.exchange(own, rank, rank, self.group) for rank in held.ranks if rank != self.group.rank()}
            total = sum((others | {self.group.rank(): own})[rank] for rank in sorted(held.ranks))
            for same, part in zip(trained, total.split([same[0].numel() for same in trained])):
                for param in same:
                    param.grad = part.view_as(param).clone() if param.grad is None else param.grad.copy_(part.view_as(param))


def _grad(param: nn.Parameter) -> torch.Tensor:
    return torch.zeros_like(param) if param.grad is None else param.grad
