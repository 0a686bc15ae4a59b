"""Local updates: every rank trains alone for k steps, then all take the mean of their weights.

    w_rank <- w_rank - lr · g_rank      k times;        w <- (1/n) · sum over ranks of w_rank

With k = 1 and plain SGD this is data parallelism exactly. With k > 1 the ranks drift apart between means.
Sends 2(n-1)/(n·k) of the parameters' bytes per step. Memory: the sum of one parameter and its receive buffer.
Stich 2019, Local SGD Converges Fast and Communicates Little, arXiv:1805.09767, section 2.
"""

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed import ProcessGroup

from minitrain.data_parallel.naive import trainable_once
from minitrain.ranks.checks import require_positive_ints
from minitrain.ranks.collectives import all_reduce


class LocalUpdates:
    """`after_step()` follows every optimizer step; each k-th call averages the weights and returns True."""

    def __init__(self, params: Iterable[nn.Parameter], group: ProcessGroup, every: int):
        require_positive_ints(every=every)
        self.params, self.group, self.every, self.steps = trainable_once(params), group, every, 0

    @torch.no_grad()
    def after_step(self) -> bool:
        self.steps += 1
        if self.steps % self.every:
            return False
        for param in self.params:
            param.copy_(all_reduce(param, self.group).div_(self.group.size()))
        return True
