"""A parameter server: servers own the weights in slices, workers push gradients and pull weights.

    push: worker -> server k:   grad[slice k]     server:  w[slice k] <- step(w[slice k], sum over workers)
    pull: server k -> worker:   w[slice k]        staleness d: step t is computed with the weights of t - d

The first `servers` ranks serve, the others work. With staleness 0 it equals data parallelism. With staleness
d a worker never waits for the answer to its last d pushes, so network and computation overlap, and w[t+1] =
w[t] - lr · g(w[t-d]): repeatable, and another training run. Sends per step, with n workers, s servers and S
bytes of weights: a worker S; a server n·S/s, and it receives as much . Memory: a server holds its slice of
weights and optimizer state, the sum and one push; a worker weights, gradients and d answers. Li et al. 2014,
Scaling Distributed Machine Learning with the Parameter Server, OSDI, sections 3.1 and 3.3. Differs: slices of
one vector, not hashed keys; staleness fixed, not bounded, so that a test can compare.
"""

from collections import deque
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from minitrain.data_parallel.buckets import flatten, views
from minitrain.data_parallel.naive import trainable_once, with_gradients
from minitrain.ranks.checks import require_ints
from minitrain.ranks.collectives import receive, send


def check(group: ProcessGroup, servers: int, staleness: int) -> None:
    require_ints(1, group.size() - 1, servers=servers)  # the others work
    require_ints(staleness=staleness)


def serve(params, make_optimizer, steps: int, group: ProcessGroup, *, servers=1, staleness=0) -> Tensor:
    """Run a server rank for `steps` steps; returns its slice of the final weights [numel/servers]."""
    check(group, servers, staleness)
    mine = nn.Parameter(flatten(trainable_once(params)).tensor_split(servers)[group.rank()].clone())
    optimizer, workers = make_optimizer([mine]), range(servers, group.size())
    for _ in range(steps):
        mine.grad = None
        for worker in workers:  # in rank order: the same sum on every run
            if mine.grad is None:
                mine.grad = receive(mine, worker, group)
            else:
                mine.grad.add_(receive(mine, worker, group))
        optimizer.step()
        for handle in [send(mine.detach(), worker, group, async_op=True) for worker in workers]:
            handle.wait()
    return mine.detach()


class Worker:
    """A working rank: `push_pull()` after each backward, in place of finish() and optimizer.step()."""

    def __init__(self, params: Iterable[nn.Parameter], group: ProcessGroup, *, servers=1, staleness=0):
        check(group, servers, staleness)
        self.params, self.group = trainable_once(params), group
        self.servers, self.staleness = servers, staleness
        self._under_way: deque[list] = deque()

    def push_pull(self) -> None:
        """Push this step's gradients; take in the weights of `staleness` steps ago."""
        grad, answers = flatten(param.grad for param in with_gradients(self.params)), []
        for server, part in enumerate(grad.tensor_split(self.servers)):
            send(part, server, self.group, async_op=True).wait()
            answers.append(receive(part, server, self.group, async_op=True))
        self._under_way.append(answers)
        if len(self._under_way) > self.staleness:
            self._pull(self._under_way.popleft())

    def finish(self) -> None:
        """Pull every answer still under way: the weights after the last step."""
        while self._under_way:
            self._pull(self._under_way.popleft())

    @torch.no_grad()
    def _pull(self, answers: list) -> None:
        flat = torch.cat([answer.wait() for answer in answers])
        for param, part in zip(self.params, views(flat, self.params)):
            param.copy_(part)
