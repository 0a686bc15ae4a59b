"""DistFlashAttention: under a causal mask early ranks, which see little, take over work of late ones.

Contiguous tokens, n = 5, tile (owner of the queries, owner of the keys); rank 0 owns one, rank 4 five:
    rank       0       1       2       3       4
    round 0   0,0     1,1     2,2     3,3     4,4        triangles: every rank has one
    round 1   4,0*    1,0     2,1     3,2     4,3        * a helper: has the keys, is sent Q, returns (O, lse)
    round 2   3,0*    4,1*    2,0     3,1     4,2

In round t rank r >= t is sent K, V of rank r - t; rank r < t is sent Q of rank r - t mod n and returns a
partial (O, lse) to be merged. n // 2 + 1 rounds, not n; nobody is idle for odd n, half of the ranks in the
last round for even n: 1/(2n) of a ring's n² slots. A schedule is a list of rounds, each a list over ranks of
tiles or None; `run_schedule` sends data during the round before, results during the round after:
    tile of the query's rank    forward K, V: 2·B·H_kv·T/n·K        backward K, V, dK, dV back: 4·B·H_kv·T/n·K
    tile of a helper            Q, O: 2·B·H·T/n·K, lse: B·H·T/n     Q, dO, dQ: 3·B·H·T/n·K, lse, D: 2·B·H·T/n
A block goes straight to where it is used: (n²-n)/2 hops in all. Memory: a ring's, and a result on its way in
and out. Its checkpoint keeps x, O and lse of a layer: memory.recompute(layer, x, results=.., keep={"core"}).
Li et al. 2023 (DistFlashAttn; first LightSeq), arXiv:2310.03294, section 3. Differs: the schedule is data;
D = rowsum(dO · O) is sent in place of O; any number of K/V heads.
"""

from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from minitrain.attention.kernel import GradSum, Kernel, OnlineSoftmax, recomputed, row_sums, stand_in
from minitrain.attention.placed import placed
from minitrain.context.layout import Tile, contiguous, tiles
from minitrain.context.ring import Tensors, check_core
from minitrain.ranks import collectives
from minitrain.ranks.checks import require_positive_ints
from minitrain.ranks.collectives import Handle

ALL = slice(None)


class Work(NamedTuple):
    """A tile: the queries of one rank against the keys of another (or its own: a triangle)."""

    queries: int
    keys: int


Schedule = list[list[Work | None]]


def balanced(ranks: int) -> Schedule:
    """n // 2 + 1 rounds."""
    require_positive_ints(ranks=ranks)
    rounds: Schedule = [[Work(rank, rank) for rank in range(ranks)]]
    for t in range(1, ranks // 2 + 1):
        own = [Work(rank, rank - t) for rank in range(t, ranks)]
        helped = 2 * t < ranks  # n even, last round: what helpers would do is what the others are doing
        rounds.append([Work(rank - t + ranks, rank) if helped else None for rank in range(t)] + own)
    return rounds


def unbalanced(ranks: int) -> Schedule:
    """n rounds: each rank computes for its own queries, as in a ring."""
    require_positive_ints(ranks=ranks)
    return [[Work(rank, rank - t) if rank >= t else None for rank in range(ranks)] for t in range(ranks)]


def check(schedule: Schedule) -> None:
    """Every causal tile once, by an owner of its queries or keys; a rank sends to one other in a round."""
    ranks, wrong = len(schedule[0]), ""
    slots = [(rank, work) for round in schedule for rank, work in enumerate(round) if work]
    needed = [(t, inputs_from(schedule, t, rank)) for t in range(len(schedule)) for rank in range(ranks)]
    owners = [(t, need[0]) for t, need in needed if need]
    if sorted(work for _, work in slots) != [(q, k) for q in range(ranks) for k in range(q + 1)]:
        wrong = "not every causal tile is computed once, and no other"
    elif any(rank not in work for rank, work in slots):
        wrong = "a tile is computed by a rank that owns neither queries nor keys"
    elif len(set(owners)) < len(owners):
        wrong = "two ranks want data of the same rank in one round"
    if wrong:
        raise ValueError(f"schedule of {ranks} ranks: {wrong}")


def idle_fraction(schedule: Schedule) -> Fraction:
    """As the paper counts: of n² slots, which the unbalanced schedule takes."""
    idle = sum(work is None for round in schedule for work in round)
    return Fraction(idle, len(schedule[0]) ** 2)


def inputs_from(schedule: Schedule, t: int, rank: int) -> tuple[int, str] | None:
    """Whose "keys" or "queries" the rank is sent for round t; None if it needs none."""
    work = schedule[t][rank] if t < len(schedule) else None
    if work is None or work.queries == work.keys:
        return None
    return (work.keys, "keys") if work.queries == rank else (work.queries, "queries")


def inputs_to(schedule: Schedule, t: int, rank: int) -> tuple[int, str] | None:
    """To whom this rank sends its "keys" or "queries" for round t, if to anybody."""
    needed = ((other, inputs_from(schedule, t, other)) for other in range(len(schedule[0])))
    return next(((other, need[1]) for other, need in needed if need and need[0] == rank), None)


def run_schedule(schedule: Schedule, group, sent: dict, returned: dict, compute, merge) -> None:
    """compute(work, side, what came) -> what goes back; side is "keys", "queries", or "" where both are here.
    merge(side that was sent, what came back), tensors shaped as those of `returned`."""
    rank, rounds = group.rank(), range(len(schedule) + 1)
    sources = [inputs_from(schedule, t, rank) or (None, "") for t in rounds]
    targets = [inputs_to(schedule, t, rank) or (None, "") for t in rounds]

    def fetch(t: int) -> list[Handle]:
        (source, received_side), (target, sent_side) = sources[t], targets[t]
        return exchange_all(sent.get(sent_side, ()), target, sent.get(received_side, ()), source, group)

    def merge_results(t: int, returning: list[Handle]) -> None:
        if results := received(returning):
            merge(targets[t][1], results)

    fetching, returning = fetch(0), []
    for t, round in enumerate(schedule):
        arriving, fetching = fetching, fetch(t + 1)  # the next round's data travel during this one
        data = received(arriving)
        result = compute(round[rank], sources[t][1], data) if round[rank] else ()
        merge_results(t - 1, returning)  # the last round's results travelled during this one
        target, sent_side = targets[t]
        returning = exchange_all(result, sources[t][0], returned.get(sent_side, ()), target, group)
    merge_results(len(schedule) - 1, returning)


def exchange_all(mine: Tensors, to, likes: Tensors, source, group: ProcessGroup) -> list[Handle]:
    """Starts to send to one rank and receive from another, in one order of all pairs of ranks: over NCCL a
    pair's messages are one queue, and at the first of them its hosts wait for each other."""
    rank = group.rank()
    sends = [(sorted((rank, to)), collectives.send, x, to) for x in mine]
    receives = [(sorted((rank, source)), collectives.receive, x, source) for x in likes]
    in_order = sorted(sends + receives, key=lambda message: message[0])
    return [transfer(x, other, group, async_op=True) for _, transfer, x, other in in_order]


def received(handles: list[Handle]) -> Tensors:
    """What came; all that was sent has arrived, too."""
    return tuple(x for handle in handles if (x := handle.wait()) is not None)


def balanced_attention(q, k, v, *, group: ProcessGroup, schedule: Callable = balanced, **how) -> Tensor:
    """q `[B, H, T/n, K]`, k, v `[B, H_kv, T/n, K]`, contiguous tokens -> `[B, H, T/n, K]`, causal.
    `schedule`: of n ranks. `how`: kernel, bias, dropout (ring.check_core)."""
    check_core("balanced_attention", q, k, v, **how)
    work = schedule(group.size())
    check(work)
    return recomputed(balanced_forward, balanced_backward, q, k, v, group, work, placed(**how))


def balanced_forward(q, k, v, group, schedule: Schedule, kernel: Kernel) -> tuple[Tensor, Tensor]:
    """-> out `[B, H, T/n, K]` in q's dtype, and lse `[B, H, T/n]`."""
    softmax, like_out = OnlineSoftmax(q), q.new_empty(*q.shape[:-1], v.size(-1))
    like_lse = q.new_empty(q.shape[:-1], dtype=torch.promote_types(q.dtype, torch.float32))

    def compute(work: Work, side: str, data: Tensors) -> Tensors:
        tile = kernel.on(tile_of(work, group, q))
        if side == "queries":
            part, part_lse = tile.forward(*data, k, v, False)
            return part.to(q.dtype), part_lse
        softmax.add(ALL, *tile.forward(q, *(data if side else (k, v)), not side))
        return ()

    sent, returned = {"keys": (k, v), "queries": (q,)}, {"queries": (like_out, like_lse)}
    run_schedule(schedule, group, sent, returned, compute, lambda side, result: softmax.add(ALL, *result))
    return softmax.result()


def balanced_backward(dout, q, k, v, out, lse, group, schedule: Schedule, kernel: Kernel) -> Tensors:
    """The same tiles by the same ranks -> dq, dk, dv of this rank's tokens."""
    sums = {"queries": (GradSum(q),), "keys": (GradSum(k), GradSum(v))}

    def add(side: str, parts: Tensors) -> None:
        for total, part in zip(sums[side], parts):
            total.add(ALL, part)

    def compute(work: Work, side: str, data: Tensors) -> Tensors:
        tile = kernel.on(tile_of(work, group, q))
        if side == "queries":
            its_q, its_dout, its_lse, delta = data
            part, *own = tile.backward(its_dout, its_q, k, v, stand_in(its_dout, delta), its_lse, False)
            add("keys", own)
            return (part,)
        part, *theirs = tile.backward(dout, q, *(data if side else (k, v)), out, lse, not side)
        add("queries", (part,))
        if side:
            return tuple(theirs)
        add("keys", theirs)
        return ()

    sent = {"keys": (k, v), "queries": (q, dout, lse, row_sums(dout, out))}
    run_schedule(schedule, group, sent, {"keys": (k, v), "queries": (q,)}, compute, add)
    return tuple(total.total.to(x.dtype) for total, x in zip((*sums["queries"], *sums["keys"]), (q, k, v)))


def tile_of(work: Work, group: ProcessGroup, q: Tensor) -> Tile:
    """All queries of one rank and all keys of the other."""
    queries, keys = (contiguous(rank, group.size(), q.size(-2) * group.size()) for rank in work)
    return tiles(queries, keys, causal=True)[0]
