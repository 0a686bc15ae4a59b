"""WallFacer: queries and keys are bodies, every query meets every key; teams that hold more of both let the rings be shorter.

P ranks are P/C teams of C. A team gathers its tokens, C·T/P of them, on all its members, and there are P/C blocks of keys. Each
member takes a C-th of them, P/C², so that C rings turn side by side, one for each place in a team, and each goes a C-th of the way:

    gather       Q, K, V[B, ·, C·T/P, K] of team t on all members (t, c)
    skip         K, V go c·S teams up the ring of place c at once                               S = P/C² blocks for each member
    ring         O, lse of Q_team with the blocks of teams t - c·S - s, s = 0 .. S-1            S - 1 more steps
    scatter      member c gets everyone's (O, lse) for its own T/P tokens and merges them       a reduce-scatter whose sum is the merge

Mesh(ring=P/C, team=C), tokens by `layout` over mesh.group("ring", "team"). With U = B·H·T/P·K and V = B·H_kv·T/P·K elements, c > 0:

                            in the team                              in the ring, C times larger blocks
    forward                 (C-1) (U + 2V)  +  (C-1) (U + U/K)       S · 2CV = 2V · P/C                c = 0 skips nothing: a block less
    backward                (C-1) (3U + 2V + U/K)  +  (C-1) (U + 2V)  twice that, dK, dV as K, V        (in each way if S = 1)
    ring attention                                                    (P-1) · 2V, backward twice that

So at most S = P/C² hops of K and V in the place of P-1 and 1/C of the ring's bytes, for (C-1) (2U + 2V + U/K) inside the team. Zig-zag and
striped tokens give the members equal work under a causal mask; contiguous ones do not. The skip is not hidden behind anything.
In backward a team gathers dO, O and lse too; dQ, a share on each member, is reduce-scattered; dK and dV add up along each ring, skip
home at once, and the shares of the C rings are reduce-scattered. It is derived here, as the mirror of forward. C = 1 is the ring, but
that its own gradients travel, too.

Memory: q, k, v, O of C·T/P tokens and two blocks as large: 2.4 times the peak of ring attention in forward and 2.3 times in backward
for C = 2, 4.4 and 3.8 times for C = 4.
Raises ValueError in one line, before any rank waits, unless C² divides P, for groups that do not cross in this rank only, for values
wider than keys (narrower ones are sent with zeros behind), and what ring.py and the layout refuse.
Liu et al. 2024, WallFacer, arXiv:2407.00611; Driscoll et al. 2013, A communication-optimal N-body algorithm, IPDPS. Differs:
one all-gather for q, k and v; what it overlaps is the ring, not the gather and the scatter; any layout; grouped K/V heads.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from minitrain import collectives
from minitrain.attention.alibi import Alibi
from minitrain.attention.dropout import DropMask
from minitrain.attention.kernel import (
    FUSED,
    GradSum,
    Kernel,
    OnlineSoftmax,
    add_tiles_backward,
    recomputed,
    widened,
)
from minitrain.attention.placed import placed
from minitrain.context.hybrid import check_crossing
from minitrain.context.layout import Layout, Tile, tiles, zigzag
from minitrain.context.ring import added, check_core

TIME = 2


def wallfacer_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    team: ProcessGroup,
    ring: ProcessGroup,
    layout: Layout = zigzag,
    causal: bool = True,
    kernel: Kernel = FUSED,
    bias: Alibi | None = None,
    dropout: DropMask | float = 0.0,
) -> Tensor:
    """q `[B, H, T/P, K]`, k, v `[B, H_kv, T/P, K]`, tokens by `layout` over the ranks ring · C + team -> `[B, H, T/P, K]`."""
    check_core("wallfacer_attention", q, k, v, bias, dropout)
    check_crossing(ring=ring, team=team)
    if v.size(-1) > q.size(-1):
        raise ValueError(
            f"wallfacer_attention: values {v.size(-1)} wide, queries and keys {q.size(-1)}: they travel in one message as wide as "
            "queries; take another core"
        )
    if ring.size() % team.size():
        raise ValueError(
            f"teams of C={team.size()} on P={ring.size() * team.size()} ranks: P/C² = {ring.size() / team.size():g} blocks for "
            "each member; take a C whose square divides P"
        )
    plan = tiles_by_step(team, ring, layout, q.size(TIME), causal)
    out = recomputed(
        wallfacer_forward,
        wallfacer_backward,
        q,
        k,
        widened(v, q),
        team,
        ring,
        plan,
        placed(kernel, bias, dropout),
    )
    return out if v.size(-1) == q.size(-1) else out[..., : v.size(-1)]


def wallfacer_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    team: ProcessGroup,
    ring: ProcessGroup,
    plan: list[list[Tile]],
    kernel: Kernel,
) -> tuple[Tensor, Tensor]:
    """-> out `[B, H, T/P, K]` in q's dtype, and lse `[B, H, T/P]`."""
    q, k, v = gathered((q, k, v), team)  # [B, ·, C·T/P, K]
    found = OnlineSoftmax(q)
    kv = collectives.rotate((k, v), ring, shift=skipped(team, plan))
    for step, seen in enumerate(plan):
        last = step == len(plan) - 1
        arriving = None if last else collectives.rotate(kv, ring, async_op=True)
        found.add_tiles(seen, *kv, kernel)
        kv = kv if last else arriving.wait()
    out, lse = merged_scatter(*found.exact(), team)
    return out.to(q.dtype), lse


def wallfacer_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    team: ProcessGroup,
    ring: ProcessGroup,
    plan: list[list[Tile]],
    kernel: Kernel,
) -> tuple[Tensor, Tensor, Tensor]:
    """-> dq, dk, dv of this rank's tokens."""
    q, k, v, dout, out = gathered((q, k, v, dout, out), team)
    lse = collectives.all_gather(lse, team, TIME)
    dq = GradSum(q)
    skip = skipped(team, plan)
    kv = collectives.rotate((k, v), ring, shift=skip)
    travelling = None
    for step, seen in enumerate(plan):
        last = step == len(plan) - 1
        arriving = None if last else collectives.rotate(kv, ring, async_op=True)
        shares = (
            None if step == 0 else collectives.rotate(travelling, ring, async_op=True)
        )  # gradients of the block that is here
        dk, dv = GradSum(k), GradSum(v)
        add_tiles_backward(seen, dout, q, *kv, out, lse, dq, dk, dv, kernel)
        travelling = tuple(
            share.to(k.dtype)
            for share in added((dk.by_token, dv.by_token), () if shares is None else shares.wait())
        )
        kv = kv if last else arriving.wait()
    home = torch.cat(
        [
            dx.to(q.dtype)
            for dx in (dq.by_token, *collectives.rotate(travelling, ring, shift=-(skip + len(plan) - 1)))
        ],
        2,
    )
    found = collectives.reduce_scatter(home, team, 1).transpose(1, 2)  # [B, H + 2·H_kv, T/P, K]
    return tuple(found.split([q.size(1), k.size(1), v.size(1)], 1))


def gathered(tensors: tuple[Tensor, ...], team: ProcessGroup) -> tuple[Tensor, ...]:
    """Each `[B, H, T/P, K]` -> `[B, H, C·T/P, K]`, the members' tokens one after the other; one message for all."""
    heads = [x.size(1) for x in tensors]
    return collectives.all_gather(torch.cat(tensors, 1), team, TIME).split(heads, 1)


def merged_scatter(out: Tensor, lse: Tensor, team: ProcessGroup) -> tuple[Tensor, Tensor]:
    """Shares `[B, H, C·T/P, K]` and lse -> the whole for this rank's tokens. A member that saw no key of a row has lse = -inf there."""
    shares = torch.cat((out, lse.unsqueeze(-1)), -1).unflatten(TIME, (team.size(), -1)).movedim(TIME, 0)
    outs, lses = collectives.all_to_all(shares, team).split((out.size(-1), 1), -1)
    whole = lses.logsumexp(0)
    return (outs * (lses - whole).exp()).sum(0), whole.squeeze(-1)


def skipped(team: ProcessGroup, plan: list[list[Tile]]) -> int:
    """How many teams away this member's first block of keys is."""
    return team.rank() * len(plan)


def tiles_by_step(
    team: ProcessGroup, ring: ProcessGroup, layout: Layout, tokens: int, causal: bool
) -> list[list[Tile]]:
    """For each of this member's S = P/C² blocks what the team's queries see of it."""
    members, teams = team.size(), ring.size()
    steps = teams // members

    def runs(number: int) -> list[range]:
        ranks = range(number * members, (number + 1) * members)
        return [run for rank in ranks for run in layout(rank, members * teams, tokens * members * teams)]

    here = ring.rank()
    return [
        tiles(runs(here), runs((here - team.rank() * steps - step) % teams), causal) for step in range(steps)
    ]
