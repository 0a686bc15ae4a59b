"""WallFacer: teams of ranks that hold more queries and keys each let the rings be shorter.

P ranks are P/C teams of C. A team gathers its tokens, C·T/P of them, on all its members. Of the P/C blocks of
keys each member takes a C-th, S = P/C²: a ring for each place c in a team goes a C-th of the way.

    gather     Q, K, V[B, ·, C·T/P, K] of team t on all members (t, c)
    skip       K, V go c·S teams up the ring of place c at once; not hidden
    ring       O, lse of Q_team with the blocks of teams t - c·S - s, s = 0 .. S-1       S - 1 more steps
    scatter    member c gets all (O, lse) for its own T/P tokens and merges them

Backward mirrors it: dO, O, lse are gathered too; dK, dV add up along each ring and skip home; dQ and the
rings' dK, dV are reduce-scattered. Sent, with U = B·H·T/P·K, V = B·H_kv·T/P·K and c > 0 (c = 0: no skip):
                in the team                                    in the ring (flat: (P-1) · 2V, twice that)
    forward     (C-1) (U + 2V)  +  (C-1) (U + U/K)             S · 2CV = 2V · P/C
    backward    (C-1) (3U + 2V + U/K)  +  (C-1) (U + 2V)       twice that
Zig-zag and striped are even under a causal mask. Memory: q, k, v, O of C·T/P tokens and two such blocks: 2.3
and 2.1 (backward) times a ring's peak for C = 2, 3.6 and 3.4 for C = 4. Liu et al. 2024, WallFacer,
arXiv:2407.00611; Driscoll et al. 2013, N-body algorithm, IPDPS. Differs: values are no wider than keys.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from minitrain.attention.kernel import GradSum, Kernel, OnlineSoftmax, add_tiles_backward, recomputed, widened
from minitrain.attention.placed import placed
from minitrain.context.layout import Layout, Tile, tiles, zigzag
from minitrain.context.ring import Tensors, check_core, check_crossing, ring_pass
from minitrain.ranks import collectives

TIME = 2


def wallfacer_attention(q, k, v, *, team, ring, layout=zigzag, causal=True, **how) -> Tensor:
    """q `[B, H, T/P, K]`, k, v `[B, H_kv, T/P, K]`, tokens by `layout` over the ranks ring · C + team, as in
    mesh.group("ring", "team") -> `[B, H, T/P, K]`. `how`: kernel, bias, dropout (ring.check_core)."""
    check_core("wallfacer_attention", q, k, v, **how)
    check_crossing(ring=ring, team=team)
    if v.size(-1) > q.size(-1):
        raise ValueError(f"wallfacer: values are {v.size(-1)} wide, keys {q.size(-1)}; use another core")
    members, teams = team.size(), ring.size()
    if teams % members:
        raise ValueError(f"C={members} on P={teams * members} ranks; use a C whose square divides P")
    where = Teams(team, ring, tiles_by_step(team, ring, layout, q.size(TIME), causal))
    out = recomputed(wallfacer_forward, wallfacer_backward, q, k, widened(v, q), where, placed(**how))
    return out if v.size(-1) == q.size(-1) else out[..., : v.size(-1)]


class Teams(NamedTuple):
    """This rank's team, the ring of its place in all teams, and what the team sees of each of S blocks."""

    team: ProcessGroup
    ring: ProcessGroup
    plan: list[list[Tile]]

    def ring_pass(self, x: Tensors, work: Callable) -> Tensors | None:
        """Skips to this member's first block and goes round all S."""
        return ring_pass(x, self.ring, work, skip=self.team.rank() * len(self.plan), steps=len(self.plan))


def wallfacer_forward(q: Tensor, k: Tensor, v: Tensor, where: Teams, kernel: Kernel) -> tuple[Tensor, Tensor]:
    """-> out `[B, H, T/P, K]` in q's dtype, and lse `[B, H, T/P]`."""
    q, k, v = gathered((q, k, v), where.team)  # [B, ·, C·T/P, K]
    softmax = OnlineSoftmax(q)
    where.ring_pass((k, v), lambda step, k, v: softmax.add_tiles(where.plan[step], k, v, kernel))
    out, lse = merged_scatter(*softmax.exact(), where.team)
    return out.to(q.dtype), lse


def wallfacer_backward(dout, q, k, v, out, lse, where: Teams, kernel: Kernel) -> Tensors:
    """-> dq, dk, dv of this rank's tokens."""
    q, k, v, dout, out = gathered((q, k, v, dout, out), where.team)
    lse, dq = collectives.all_gather(lse, where.team, TIME), GradSum(q)

    def add_block(step: int, k: Tensor, v: Tensor) -> Tensors:
        dk, dv = GradSum(k), GradSum(v)
        add_tiles_backward(where.plan[step], dout, q, k, v, out, lse, dq, dk, dv, kernel)
        return dk.by_token, dv.by_token

    dkv = where.ring_pass((k, v), add_block)
    shares = torch.cat([dx.to(q.dtype) for dx in (dq.by_token, *dkv)], 2)  # [B, C·T/P, H + 2·H_kv, K]
    own = collectives.reduce_scatter(shares, where.team, 1).transpose(1, 2)
    return own.split([x.size(1) for x in (q, k, v)], 1)


def gathered(tensors: Tensors, team: ProcessGroup) -> Tensors:
    """Each `[B, H, T/P, K]` -> `[B, H, C·T/P, K]`, member after member; one message for all."""
    heads = [x.size(1) for x in tensors]
    return collectives.all_gather(torch.cat(tensors, 1), team, TIME).split(heads, 1)


def merged_scatter(out: Tensor, lse: Tensor, team: ProcessGroup) -> tuple[Tensor, Tensor]:
    """Shares `[B, H, C·T/P, K]` and lse (-inf: saw no key) -> the whole for this rank's tokens."""
    shares = torch.cat((out, lse.unsqueeze(-1)), -1).unflatten(TIME, (team.size(), -1)).movedim(TIME, 0)
    outs, lses = collectives.all_to_all(shares, team).split((out.size(-1), 1), -1)
    whole = lses.logsumexp(0)
    return (outs * (lses - whole).exp()).sum(0), whole.squeeze(-1)


def tiles_by_step(team, ring, layout: Layout, tokens: int, causal: bool) -> list[list[Tile]]:
    """For each of this member's S = P/C² blocks what the team's queries see of it."""
    members, teams = team.size(), ring.size()
    blocks, total = teams // members, members * teams

    def runs(number: int) -> list[range]:
        ranks = range(number * members, (number + 1) * members)
        return [run for rank in ranks for run in layout(rank, total, tokens * total)]

    here, first = ring.rank(), ring.rank() - team.rank() * blocks
    return [tiles(runs(here), runs((first - step) % teams), causal) for step in range(blocks)]
