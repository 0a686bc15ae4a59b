"""HetPipe: virtual workers, pipelines of mixed devices, train one model and wait little for each other.

A virtual worker (VW) has k minibatches in flight: minibatch p begins when p - k has ended, so it misses
s_local = k - 1 of the VW's updates. k minibatches are a *wave*, whose summed update goes to all others. With
a `distance` of D, minibatch p has seen all updates of the others but for the last

    s_global = (D + 1)·(s_local + 1) + s_local - 1        k = 1, D = 0: none, synchronous data parallelism

`waves` says when each minibatch begins and what it has seen; `train` runs that on ranks, a VW each. Sends,
per wave, the weights' bytes to each other VW; holds k + 1 updates. Park et al. 2020, USENIX ATC,
arXiv:2005.14038. Differs: waves go from VW to VW, without servers, and are taken in at each minibatch; who
has seen what is planned, so that runs repeat; a VW is one rank.
"""

from bisect import bisect_right
from collections import deque, namedtuple
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn
from torch.distributed import ProcessGroup

from minitrain.data_parallel.buckets import flatten, views
from minitrain.data_parallel.naive import trainable_once, with_gradients
from minitrain.ranks import checks
from minitrain.ranks.collectives import receive, send

Minibatch = namedtuple("Minibatch", "start end seen")  # seen: updates of each VW, whole waves of others
Plan = Sequence[Sequence[Minibatch]]  # of each VW


def staleness(k: int, distance: int) -> tuple[int, int]:
    """(s_local, s_global)."""
    checks.require_positive_ints(k=k)
    checks.require_ints(distance=distance)
    return k - 1, (distance + 1) * k + k - 2


def waves(seconds: Sequence[Sequence[float]], k: int, distance: int) -> Plan:
    """seconds[v][p]: of one of the k stages of VW v for minibatch p; whole waves, as many for each VW."""
    checks.require_nonempty(seconds=seconds)
    checks.require_positive(seconds=seconds)
    (_, most), count = staleness(k, distance), len(seconds[0])
    if count % k or any(len(times) != count for times in seconds):
        raise ValueError(f"{[len(times) for times in seconds]} minibatches; give each VW a multiple of {k}")
    starts, ends = ([[] for _ in seconds] for _ in range(2))
    for p in range(count):
        needed = max(0, -(-(p - most) // k)) * k  # updates of every VW
        shown = max(end[needed - 1] for end in ends) if needed else 0.0
        for times, start, end in zip(seconds, starts, ends):
            start.append(max(shown, end[p - k] if p >= k else 0.0))
            end.append(max(end[-1] if p else 0.0, start[p] + (k - 1) * times[p]) + times[p])

    def seen(v: int, now: float) -> tuple[int, ...]:
        counts = [bisect_right(end, now) for end in ends]
        return tuple(count if u == v else count // k * k for u, count in enumerate(counts))

    each = enumerate(zip(starts, ends))
    return [[Minibatch(now, end, seen(v, now)) for now, end in zip(*times)] for v, times in each]


@torch.no_grad()
def train(
    params: Iterable[nn.Parameter], backward: Callable, plan: Plan, k: int, lr: float, group: ProcessGroup
):
    """This rank's VW: `backward(p)` leaves the gradients of its minibatch p, whose update is -lr times these.
    At the end every VW has the updates of all."""
    checks.require_positive_ints(k=k)
    checks.require_one_of([group.size()], plans=len(plan))
    me, params, pending, sending = group.rank(), trainable_once(params), deque(), []
    weights, done = flatten(params), [0] * group.size()
    wave, others = torch.zeros_like(weights), [rank for rank in range(group.size()) if rank != me]

    def see(counts: Sequence[int]) -> None:
        """So many updates of each VW; a wave of this one that is complete is sent."""
        while done[me] < counts[me]:
            weights.add_(pending[0])
            wave.add_(pending.popleft())
            done[me] += 1
            if done[me] % k == 0:
                sending.extend(send(wave.clone(), rank, group, async_op=True) for rank in others)
                wave.zero_()
        for rank in others:
            while done[rank] < counts[rank]:
                weights.add_(receive(weights, rank, group))
                done[rank] += k
        for param, part in zip(params, views(weights, params)):
            param.copy_(part)

    for p, minibatch in enumerate(plan[me]):
        see(minibatch.seen)
        with torch.enable_grad():
            backward(p)
        pending.append(-lr * flatten(param.grad for param in with_gradients(params)))
    see([len(minibatches) for minibatches in plan])
    for handle in sending:
        handle.wait()
