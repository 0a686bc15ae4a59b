"""What runs on unequal ranks: uneven rows, heads and hidden units; workers that wait little for each other.

Whale    `rows_by`: rank r has counts[r] rows of the global batch; the loss is divided once, by all targets.
         `split_block`: as tensor_parallel/linear.py, but rank r has heads[r] K/V heads, with their queries,
         and units[r] hidden units. Sends as even parts do, 2(n-1)/n B·T·D elements per two matrices and pass
HetPipe  A virtual worker (VW), a pipeline of mixed devices, has k minibatches in flight: minibatch p begins
         when p - k has ended, so it misses s_local = k - 1 of the VW's updates. k minibatches are a *wave*,
         whose summed update goes to all others. With a `distance` of D, it has seen all updates of the
         others but for the last s_global = (D + 1)·(s_local + 1) + s_local - 1 (k = 1, D = 0: none). `waves`
         says when each begins and what it has seen, `train` runs that on ranks. Sends, per wave, the weights'
         bytes to each other VW; holds k + 1 updates
SDPipe   Workers average their models in groups of those that are ready, and go on; a coordinator groups who
         have not met for longest. A slow worker is in few groups, and keeps few others waiting

Jia et al. 2022, USENIX ATC (Whale); Park et al. 2020, arXiv:2005.14038 (HetPipe); Miao et al. 2023, VLDB 16
(SDPipe). Differs: no annotations, every rank draws the whole batch, no dropout, whose masks go by even rows;
waves go from VW to VW, without servers, and are taken in at each minibatch; who has seen what is planned, so
that runs repeat; a VW is one rank, and SDPipe's workers are whole replicas.
"""

from bisect import bisect_right
from collections import deque, namedtuple
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import combinations
from math import inf

import torch
from torch import nn
from torch.distributed import ProcessGroup

from minitrain.data_parallel.buckets import flatten, views
from minitrain.data_parallel.naive import trainable_once, with_gradients
from minitrain.model.data.batches import Rows
from minitrain.ranks import checks
from minitrain.ranks.collectives import receive, send
from minitrain.tensor_parallel import linear

Minibatch = namedtuple("Minibatch", "start end seen")  # seen: updates of each VW, whole waves of others
Plan = Sequence[Sequence[Minibatch]]  # of each VW


def rows_by(rows: Rows, counts: Sequence[int]) -> Rows:
    checks.require_positive_ints(counts=counts)
    checks.require_one_of([rows.batch_size], rows=sum(counts))
    part = lambda whole, rank: whole[sum(counts[:rank]) :][: counts[rank]]
    return replace(rows, draw=lambda step, rank, ranks: [part(x, rank) for x in rows.draw(step, 0, 1)])


def part_of(kind: type, whole: nn.Linear, part: slice, group: ProcessGroup) -> nn.Module:
    """A ColumnLinear or RowLinear of `part`: of torch's weight, rows or columns."""
    module, by_columns = kind.__new__(kind), kind is linear.ColumnLinear
    nn.Module.__init__(module)
    cut = lambda x, *at: x if x is None else nn.Parameter(x.detach()[at].clone(), x.requires_grad)
    module.weight = cut(whole.weight, part) if by_columns else cut(whole.weight, slice(None), part)
    module.bias = cut(whole.bias, part) if by_columns else whole.bias
    module.group, module.column, module.row = group, linear.column, linear.row
    return module


def split_block(block: nn.Module, heads: Sequence[int], units: Sequence[int], group: ProcessGroup) -> None:
    """A Block (model/gpt.py), in place."""
    config, n, rank = block.config, group.size(), group.rank()
    checks.require_positive_ints(heads=heads, units=units)
    checks.require_one_of([n], heads=len(heads), units=len(units))
    checks.require_one_of([int(config.num_kv_heads)], heads=sum(heads))
    checks.require_one_of([int(block.mlp.up.out_features)], units=sum(units))
    of = lambda counts, width: slice(sum(counts[:rank]) * width, sum(counts[: rank + 1]) * width)
    keys, queries = of(heads, config.head_dim), of(heads, config.head_dim * config.num_heads // sum(heads))
    parts = dict(q=queries, k=keys, v=keys, out=queries) | dict.fromkeys(("up", "gate", "down"), of(units, 1))
    for owner in (block.attention, block.mlp):
        for name, whole in list(owner.named_children()):
            kind = linear.RowLinear if name in ("out", "down") else linear.ColumnLinear
            setattr(owner, name, part_of(kind, whole, parts[name], group))


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
def train(params: Iterable, backward: Callable, plan: Plan, k: int, lr: float, group: ProcessGroup):
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


def sdpipe(step_s: Sequence[float], until_s: float, size: int = 2) -> tuple[list[int], list[tuple[int, ...]]]:
    """(minibatches that each worker has done by `until_s`, groups in order); `size` of all: all-reduce."""
    checks.require_positive(step_s=step_s, until_s=until_s)
    checks.require_ints(1, len(step_s), size=size)
    checks.require_ints(0, checks.MOST, steps=int(min(until_s / min(step_s), 1e18)))
    ends, groups, done = (
        list(step_s),
        [],
        [0] * len(step_s),
    )  # `ends` of the minibatches, none for who is ready
    met = dict.fromkeys(combinations(range(len(step_s)), 2), -1)  # the number of their last group
    while (now := min(ends)) <= until_s:
        for i in [i for i, end in enumerate(ends) if end == now]:
            done[i], ends[i] = done[i] + 1, inf
        while len(ready := [i for i, end in enumerate(ends) if end == inf]) >= size:
            group = min(combinations(ready, size), key=lambda one: sum(met[p] for p in combinations(one, 2)))
            met |= dict.fromkeys(combinations(group, 2), len(groups))
            groups.append(group)
            for i in group:
                ends[i] = now + step_s[i]
    return done, groups
