"""DistFlashAttention: under a causal mask early ranks, which see little, take over work of late ones.

Contiguous tokens, n = 5, tile (q owner, k owner); rank 0 has one tile of its own, rank 4 five. Who computes what:

    rank       0       1       2       3       4
    round 0   0,0     1,1     2,2     3,3     4,4        triangles: nobody waits for anything
    round 1   4,0*    1,0     2,1     3,2     4,3        * a helper: has the keys, is sent the queries, returns (O, lse)
    round 2   3,0*    4,1*    2,0     3,1     4,2

In round t rank r >= t is sent K, V of rank r - t, and rank r < t is sent Q of rank r - t mod n and gives back a partial (O, lse), which
the owner merges (kernel.py): log-sum-exps do not care who computed them. n // 2 + 1 rounds instead of n. Nobody is idle for odd n; for
even n half of the ranks are in the last round: 1/(2n) of the n² slots which the ring takes (and uses half of), 1/(n+2) of those here.

A schedule is a list of rounds, each a list over ranks: a tile, or None; `unbalanced` is the ring's. Whatever `run` is given, it sends
what the schedule needs: data of a round during the round before, results during the round after.

    one tile by its query's rank     forward K, V: 2·B·H_kv·T/n·K                backward K, V, and dK, dV back: 4·B·H_kv·T/n·K
    one by a helper                  Q, O: 2·B·H·T/n·K, lse: B·H·T/n             Q, dO, and dQ back: 3·B·H·T/n·K, lse, D: 2·B·H·T/n

Nothing is handed on: every block goes from its owner to where it is used, in all (n²-n)/2 hops instead of n²-n.
Memory: beside what the ring holds, a result on its way out and one on its way in: a few blocks, whatever n is.
Raises ValueError in one line, before any rank waits, for shapes that do not fit and, in `check`, for a schedule that misses a tile.

Li et al. 2023 (DistFlashAttn; first LightSeq), arXiv:2310.03294, section 3: schedule and overlap; sparing.py has its
checkpoints. Differs: the schedule is data; D = rowsum(dO · O) is sent in place of O; any number of K/V heads.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from itertools import zip_longest
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from minitrain import collectives
from minitrain.attention.alibi import Alibi
from minitrain.attention.dropout import DropMask
from minitrain.attention.kernel import FUSED, GradSum, Kernel, OnlineSoftmax, recomputed, row_sums, stand_in
from minitrain.attention.placed import placed
from minitrain.collectives import Handle
from minitrain.context.layout import Tile, contiguous, tiles
from minitrain.context.ring import check_core

ALL = slice(None)


class Work(NamedTuple):
    """A tile: the queries of one rank against the keys of another (or its own: a triangle)."""

    queries: int
    keys: int


Schedule = list[list[Work | None]]


# ---- schedules -------------------------------------------------------------------------------------------------------


def balanced(ranks: int) -> Schedule:
    """n // 2 + 1 rounds."""
    rounds: Schedule = [[Work(rank, rank) for rank in range(ranks)]]
    for t in range(1, ranks // 2 + 1):
        helped = 2 * t < ranks  # n even, last round: what helpers would do is what the others are doing
        rounds.append(
            [
                Work(rank, rank - t) if rank >= t else Work(rank - t + ranks, rank) if helped else None
                for rank in range(ranks)
            ]
        )
    return rounds


def unbalanced(ranks: int) -> Schedule:
    """n rounds: each rank computes for its own queries, as in a ring."""
    return [[Work(rank, rank - t) if rank >= t else None for rank in range(ranks)] for t in range(ranks)]


def check(schedule: Schedule) -> None:
    """Every tile under the causal mask once, by a rank that owns its queries or its keys; a rank sends to one other in a round."""
    ranks = len(schedule[0])
    done = [work for round in schedule for work in round if work]
    missing = {Work(q, k) for q in range(ranks) for k in range(q + 1)} ^ set(done)
    strangers = [
        (rank, *work) for round in schedule for rank, work in enumerate(round) if work and rank not in work
    ]
    wanted = [
        (t, need[0])
        for t in range(len(schedule))
        for rank in range(ranks)
        if not strangers and (need := needs(schedule, t, rank))
    ]
    if len(set(wanted)) < len(wanted):
        raise ValueError(
            f"schedule of {ranks} ranks: {len(wanted) - len(set(wanted))} times two ranks want data of the same rank in one round"
        )
    if missing or strangers or len(set(done)) < len(done):
        raise ValueError(
            f"schedule of {ranks} ranks: {len(missing)} tiles missing or masked, {len(done) - len(set(done))} twice, "
            f"{len(strangers)} computed by a rank that owns neither queries nor keys"
        )


def idle_slots(schedule: Schedule) -> int:
    """(rank, round) in which nothing is computed."""
    return sum(work is None for round in schedule for work in round)


def idle_fraction(schedule: Schedule) -> Fraction:
    """As the paper counts: of n² slots, which the unbalanced schedule takes."""
    return Fraction(idle_slots(schedule), len(schedule[0]) ** 2)


# ---- one rank's part of a schedule -----------------------------------------------------------------------------------


def needs(schedule: Schedule, t: int, rank: int) -> tuple[int, str] | None:
    """Whose "keys" or "queries" the rank must be sent for round t; None if both are its own, and where it has nothing to do."""
    work = schedule[t][rank] if t < len(schedule) else None
    if work is None or work.queries == work.keys:
        return None
    return (work.keys, "keys") if work.queries == rank else (work.queries, "queries")


def given(schedule: Schedule, t: int, rank: int) -> tuple[int, str] | None:
    """To whom this rank sends its "keys" or "queries" for round t, if to anybody."""
    wanted = ((other, needs(schedule, t, other)) for other in range(len(schedule[0])))
    return next(((other, need[1]) for other, need in wanted if need and need[0] == rank), None)


Tensors = tuple[Tensor, ...]


def run(
    schedule: Schedule,
    group: ProcessGroup,
    sent: dict[str, Tensors],
    returned: dict[str, Tensors],
    compute: Callable[[Work, str, Tensors], Tensors],
    take: Callable[[str, Tensors], None],
) -> None:
    """compute(work, what came, the tensors) -> what goes back; what came is "" where both sides are here. take(what was sent, what came back).

    sent["keys"], sent["queries"] are this rank's; `returned` has the shapes of what comes back for them. All ranks' are alike.
    """
    rank = group.rank()

    def fetch(t: int) -> list[Handle]:
        gift, need = given(schedule, t, rank), needs(schedule, t, rank)
        return swap(
            sent[gift[1]] if gift else (),
            gift and gift[0],
            sent[need[1]] if need else (),
            need and need[0],
            group,
        )

    def give_back(t: int, result: Tensors) -> list[Handle]:
        gift, need = given(schedule, t, rank), needs(schedule, t, rank)
        return swap(
            result if need else (),
            need and need[0],
            returned[gift[1]] if gift else (),
            gift and gift[0],
            group,
        )

    fetching, returning, gift = fetch(0), [], None
    for t, round in enumerate(schedule):
        arriving, fetching = fetching, fetch(t + 1)  # the next round's data travel during this one
        need, data = needs(schedule, t, rank), received(arriving)
        result = compute(round[rank], need[1] if need else "", data) if round[rank] else ()
        put_in(gift, received(returning), take)  # the last round's results travelled during this one
        gift, returning = given(schedule, t, rank), give_back(t, result)
    put_in(gift, received(returning), take)


def swap(
    mine: Tensors, to: int | None, likes: Tensors, source: int | None, group: ProcessGroup
) -> list[Handle]:
    """Starts to send tensors to one rank and to receive some like `likes` from another, each pair together: all send at once, and over NCCL
    a rank whose send must end before its receive begins would wait for all others, and they for it."""
    handles = []
    for x, like in zip_longest(mine, likes):
        if x is None:
            handles.append(collectives.receive(like, source, group, async_op=True))
        elif like is None:
            handles.append(collectives.send(x, to, group, async_op=True))
        else:
            handles.append(collectives.exchange(x, to, source, group, like=like, async_op=True))
    return handles


def received(handles: list[Handle]) -> Tensors:
    """What came; all that was sent has arrived, too."""
    return tuple(x for handle in handles if (x := handle.wait()) is not None)


def put_in(gift: tuple[int, str] | None, result: Tensors, take: Callable[[str, Tensors], None]) -> None:
    if gift and result:
        take(gift[1], result)


# ---- attention -------------------------------------------------------------------------------------------------------


def balanced_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: ProcessGroup,
    schedule: Callable[[int], Schedule] = balanced,
    kernel: Kernel = FUSED,
    bias: Alibi | None = None,
    dropout: DropMask | float = 0.0,
) -> Tensor:
    """q `[B, H, T/n, K]`, k, v `[B, H_kv, T/n, K]`, contiguous tokens -> `[B, H, T/n, K]`, causal. A core for the model's attention."""
    check_core("balanced_attention", q, k, v, bias, dropout)
    work = schedule(group.size())
    check(work)
    return recomputed(
        balanced_forward, balanced_backward, q, k, v, group, work, placed(kernel, bias, dropout)
    )


def balanced_forward(
    q: Tensor, k: Tensor, v: Tensor, group: ProcessGroup, schedule: Schedule, kernel: Kernel
) -> tuple[Tensor, Tensor]:
    """-> out `[B, H, T/n, K]` in q's dtype, and lse `[B, H, T/n]`."""
    found, like_lse = (
        OnlineSoftmax(q),
        q.new_empty(q.shape[:-1], dtype=torch.promote_types(q.dtype, torch.float32)),
    )
    like_out = q.new_empty(*q.shape[:-1], v.size(-1))

    def compute(work: Work, came: str, data: Tensors) -> Tensors:
        block = kernel.on(tile_of(work, group, q))
        if came == "queries":
            part, part_lse = block.forward(*data, k, v, False)
            return part.to(q.dtype), part_lse
        found.add(ALL, *block.forward(q, *(data if came else (k, v)), not came))
        return ()

    run(
        schedule,
        group,
        {"keys": (k, v), "queries": (q,)},
        {"keys": (), "queries": (like_out, like_lse)},
        compute,
        lambda what, result: found.add(ALL, *result),
    )
    return found.result()


def balanced_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    group: ProcessGroup,
    schedule: Schedule,
    kernel: Kernel,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same tiles by the same ranks -> dq, dk, dv of this rank's tokens."""
    sums = {"queries": (GradSum(q),), "keys": (GradSum(k), GradSum(v))}

    def add(what: str, parts: Tensors) -> None:
        for total, part in zip(sums[what], parts):
            total.add(ALL, part)

    def compute(work: Work, came: str, data: Tensors) -> Tensors:
        block = kernel.on(tile_of(work, group, q))
        if came == "queries":
            its_q, its_dout, its_lse, delta = data
            part, *own = block.backward(its_dout, its_q, k, v, stand_in(its_dout, delta), its_lse, False)
            add("keys", own)
            return (part,)
        part, *theirs = block.backward(dout, q, *(data if came else (k, v)), out, lse, not came)
        add("queries", (part,))
        if came:
            return tuple(theirs)
        add("keys", theirs)
        return ()

    run(
        schedule,
        group,
        {"keys": (k, v), "queries": (q, dout, lse, row_sums(dout, out))},
        {"keys": (k, v), "queries": (q,)},
        compute,
        add,
    )
    return tuple(total.total.to(x.dtype) for total, x in zip((*sums["queries"], *sums["keys"]), (q, k, v)))


def tile_of(work: Work, group: ProcessGroup, q: Tensor) -> Tile:
    """All queries of one rank and all keys of the other."""
    queries, keys = (contiguous(rank, group.size(), q.size(-2) * group.size()) for rank in work)
    return tiles(queries, keys, causal=True)[0]
