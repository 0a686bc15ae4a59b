"""Busy experts on more ranks than one: copies for a layer, replicas for good, plans that switch for nothing.

    holders[e] = (owner, rank, rank, ..)     who works for expert e; experts stand on a rank by their number
    ((0, 1), (0,), (1,), (1,))               4 experts on 2 ranks, 0 copied: rank 1 has 0, 2, 3, as its places

layer        rows go to a holder: to the same rank if it is one, else to the owner; or to the holders in turn
copied       weights [E/n, ..] of the owners -> [experts of this rank, ..]; backward adds up at the owner
shadows      the same of a few experts, to all ranks: [few, ..]
summed       gradients of replicas -> their sum, the same bits on every holder
moved        weights and optimizer state from the holders before to those after
switchable   one layout of shards for many plans: tokens travel, or weights do, or some of each

Of an expert of W elements with h holders `copied` sends W from the owner, in slices that the others pass on,
(h-2)/(h-1) W each; backward W from each of them. A copy takes W. `summed` sends 2 (h-1)/h W from each holder;
`moved` W per tensor and new holder; `switchable` the c-1 shards that gather, forward and backward.
He et al. 2022 (FasterMoE, PPoPP), section 4: a copy on every rank is a shadow. Nie et al. 2023 (FlexMoE),
arXiv:2304.03946. Hwang et al. 2023 (Tutel), arXiv:2206.03382, section 3. Differs: two all-to-alls serve any
set of holders; they are decided in systems/plan/expert_placement.py, from the same counts on all ranks.
"""

from collections import namedtuple
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from minitrain.moe import experts
from minitrain.moe.dispatch import Dispatch
from minitrain.moe.router import NOWHERE, Routing
from minitrain.ranks import collectives
from minitrain.ranks.checks import require_positive_ints

Holders = Sequence[Sequence[int]]
Weights = Sequence[Tensor]  # up, down, each [experts that are here, ..]; or gate, up, down


def experts_of(holders: Holders, ranks: int) -> list[list[int]]:
    """The experts of each rank. Raises ValueError if a rank has none, or one twice."""
    require_positive_ints(ranks=ranks)
    experts = [[e for e, there in enumerate(holders) if rank in there] for rank in range(ranks)]
    if not all(experts) or sum(map(len, experts)) != sum(map(len, holders)) or not all(holders):
        rule = f"each expert has holders, all different, of 0 to {ranks - 1}, and each rank holds an expert"
        raise ValueError(f"holders {[tuple(there) for there in holders]} of {ranks} ranks: {rule}")
    return experts


def layer(x, routing: Routing, weights, holders, group, work=experts.loop, *, share=False) -> Tensor:
    """x [N, D] -> [N, D], with the `weights` of the experts that this rank holds."""
    trip = Dispatch(placed(routing, holders, group, share=share), group)
    here = len(experts_of(holders, group.size())[group.rank()])
    return trip.back(work(trip.there(x), trip.counts[:here], *weights), routing.weights)


def placed(routing: Routing, holders: Holders, group: ProcessGroup, *, share: bool = False) -> Routing:
    """The same choices, of places: place s of rank r has number r · places + s, and every rank has as many.
    With `share`, of the rows that a rank has for an expert row i goes to holder number (rank + i) mod h."""
    by_rank, rank = experts_of(holders, group.size()), group.rank()
    places = max(map(len, by_rank))
    table = torch.zeros(len(holders), max(map(len, holders)), dtype=torch.long)
    for e, there in enumerate(holders):
        targets = there if share else [rank if rank in there else there[0]]
        for j in range(table.shape[1]):
            to = targets[(j + rank) % len(targets)]
            table[e, j] = to * places + by_rank[to].index(e)
    chosen = routing.experts.flatten()
    hits = chosen[:, None] == torch.arange(len(holders), device=chosen.device)
    turn = (hits.cumsum(0) * hits).sum(1) - 1  # 0 for the first row that this rank has for the expert
    number = torch.tensor([len(there) for there in holders], device=chosen.device)[chosen]
    slots = table.to(chosen.device)[chosen, turn.clamp(min=0) % number].view_as(routing.experts)
    slots = slots.masked_fill(routing.experts == NOWHERE, NOWHERE)
    width = routing.probs.new_zeros(()).expand(len(routing.probs), group.size() * places)
    return replace(routing, experts=slots, probs=width, sizes=None)


def switchable(x, routing: Routing, weights, sharing, group, work=experts.loop) -> Tensor:
    """x [N, D] -> [N, D], where each rank has 1/n of the weights and the c neighbours in `sharing` gather.

    E >= n: E/n experts are here, [E/n, D, F] and [E/n, F, D]; else 1/s of one, s = n/E: [1, D, F/s] and
    [1, F/s, D]. c = n: all weights come, no row goes. c = 1: none come; a row goes to all s ranks of its
    expert, whose results add up (act works on each element of F alone). Between: c copies of each expert, on
    r = n/(cE) ranks each if r > 1; a row goes to the copy with its rank's place in `sharing`."""
    n, c, num = group.size(), sharing.size(), routing.probs.shape[1]
    if uneven(num, n, c) or sharing.rank() != group.rank() % c:
        rule = "neighbours gather, as many everywhere, and get whole experts or equal parts of one"
        raise ValueError(f"{num} experts on {n} ranks, {c} gather: {rule}")
    here, parts = max(1, num * c // n), max(1, n // (num * c))
    *ups, down = (collectives.gather_to(tensor, sharing).unflatten(0, (here, -1)) for tensor in weights)
    full = [up.transpose(1, 2).flatten(2) for up in ups] + [down.flatten(1, 2)]
    piece = routing.experts[..., None] * parts + torch.arange(parts, device=x.device)  # [N, k, r]
    slots = (piece // here * c + group.rank() % c) * here + piece % here
    slots = slots.masked_fill(routing.experts[..., None] == NOWHERE, NOWHERE).flatten(1)
    width = routing.probs.new_zeros(()).expand(len(x), n * here)
    trip = Dispatch(replace(routing, experts=slots, probs=width, sizes=None), group)
    return trip.back(work(trip.there(x), trip.counts, *full), routing.weights.repeat_interleave(parts, 1))


def uneven(num: int, n: int, c: int) -> bool:
    return bool(n % c or (num % n and n % num) or (num * c % n and n % (num * c)))


def lightest_sharing(loads: Tensor, shard: int, width: int) -> int:
    """Tutel's choice for `switchable`: how many neighbours gather, so that the busiest rank moves least.
    loads [n, E]: rows of each rank for each expert; `shard`: elements of its weights; `width`: D."""
    n, num = loads.shape

    def busiest(c: int) -> float:
        here, parts, sent = max(1, num * c // n), max(1, n // (num * c)), loads.new_zeros(n, n)
        first = torch.arange(num * parts, device=loads.device) // here * c  # who gather this part
        for r, rows in enumerate(loads):
            sent[r].index_add_(0, first + r % c, rows.repeat_interleave(parts))
        crossing = sent.sum(0) + sent.sum(1) - 2 * sent.diagonal()
        return (c - 1) * shard + width * crossing.max().item()

    return min((c for c in range(1, n + 1) if not uneven(num, n, c)), key=busiest)


# ---- weights to holders, gradients back
def copied(weights: Weights, holders: Holders, group: ProcessGroup) -> list[Tensor]:
    """Each owner's experts -> all experts that this rank holds. Differentiable: the owner gets the sum."""
    if any(there[0] != e * group.size() // len(holders) for e, there in enumerate(holders)):
        rule = f"the owner of expert e, rank e·{group.size()}/{len(holders)}, stands first"
        raise ValueError(f"holders {[tuple(there) for there in holders]}: {rule}")
    return _passed_on(weights, holders, group)


def shadows(weights: Weights, chosen: Sequence[int], group: ProcessGroup) -> list[Tensor]:
    """Each owner's experts [E/n, ..] -> the chosen ones, [S, ..], on every rank; as differentiable."""
    here, ranks, rank = len(weights[0]), range(group.size()), group.rank()
    holders = [(e // here, *(r for r in ranks if r != e // here)) for e in chosen]
    mine = torch.tensor([e % here for e in chosen if e // here == rank], dtype=torch.long)
    return _passed_on([tensor[mine.to(tensor.device)] for tensor in weights], holders, group)


def summed(grads: Weights, holders: Holders, group: ProcessGroup) -> list[Tensor]:
    """Of each expert here its holders' gradients added up: each adds a slice for all, so bits are equal."""
    rank, own = group.rank(), _packed(grads)
    mine = dict(zip(experts_of(holders, group.size())[rank], own))
    cuts = [part for e, there in enumerate(holders) for part in _slices(e, there, own.shape[1])]
    there = [Parcel(by, to, e, *cut) for to, e, *cut in cuts for by in holders[e] if by != to]
    back = [Parcel(by, to, e, *cut) for by, e, *cut in cuts for to in holders[e] if by != to]
    parts, _ = _carried(there, lambda p: mine[p.expert][p.start : p.stop], group, own.flatten())
    totals = {}
    for e, *cut in (part[1:] for part in cuts if part[0] == rank):
        here = mine[e][slice(*cut)]
        terms = [here if by == rank else parts[Parcel(by, rank, e, *cut)] for by in holders[e]]
        totals[e, *cut] = sum(terms[1:], terms[0])
    others, _ = _carried(back, lambda p: totals[p[2:]], group, own.flatten())
    totals |= {p[2:]: part for p, part in others.items()}
    return _unpacked(torch.cat([totals[cut] for cut in sorted(totals)]).view_as(own), grads)


def moved(tensors: Weights, before: Holders, after: Holders, group: ProcessGroup) -> list[Tensor]:
    """Tensors of the experts held `before` -> of those held `after`, from the first holder where new. Give
    weights, moments and masters together: whoever holds an expert goes on as its first holder would."""
    if len(after) != len(before):
        raise ValueError(f"{len(before)} experts become {len(after)}; give each its ranks")
    rank, own = group.rank(), _packed(tensors)
    mine = dict(zip(experts_of(before, group.size())[rank], own))
    new = [(e, to) for e, there in enumerate(after) for to in there if to not in before[e]]
    parcels = [Parcel(before[e][0], to, e, 0, own.shape[1]) for e, to in new]
    parts, _ = _carried(parcels, lambda p: mine[p.expert], group, own.flatten())
    mine |= {p.expert: part for p, part in parts.items()}
    return _unpacked(torch.stack([mine[e] for e in experts_of(after, group.size())[rank]]), tensors)


# ---- how: parcels of elements in one all-to-all, which all ranks can list
Parcel = namedtuple("Parcel", "source to expert start stop")  # elements start to stop of an expert's weights


def _passed_on(weights: Weights, holders: Holders, group: ProcessGroup) -> list[Tensor]:
    """Weights whose first holder is here -> of all here: slices go `out` to holders, who pass them `on`."""
    rank, own = group.rank(), _packed(weights)
    here = experts_of(holders, group.size())[rank]
    first = [part for e in range(len(holders)) for part in _slices(e, holders[e][1:], own.shape[1])]
    out = [Parcel(holders[e][0], to, e, *cut) for to, e, *cut in first]
    on = [Parcel(by, to, e, *cut) for by, e, *cut in first for to in holders[e][1:] if to != by]
    mine = {e: own[i] for i, e in enumerate(e for e, there in enumerate(holders) if there[0] == rank)}
    slices, got = _carried(out, lambda p: mine[p.expert][p.start : p.stop], group, own.flatten())
    by_cut = {p[2:]: part for p, part in slices.items()}
    others, got = _carried(on, lambda p: by_cut[p[2:]], group, got)
    by_cut |= {p[2:]: part for p, part in others.items()}
    by_cut |= {(e, 0, own.shape[1]): row for e, row in mine.items()}
    # got[:0]: a rank that receives nothing must come to the all-to-alls of backward too
    rows = torch.cat([got[:0], *(by_cut[cut] for cut in sorted(by_cut))])
    return _unpacked(rows.view(len(here), -1), weights)


def _carried(parcels: list[Parcel], piece: Callable, group, like: Tensor) -> tuple[dict, Tensor]:
    """One all-to-all for parcels that all ranks know of: what comes here, and all of it as one tensor."""
    rank, ranks = group.rank(), range(group.size())
    sends = [[p for p in parcels if (p.source, p.to) == (rank, r)] for r in ranks]
    receives = [[p for p in parcels if (p.source, p.to) == (r, rank)] for r in ranks]
    sizes = [[sum(p.stop - p.start for p in part) for part in parts] for parts in (sends, receives)]
    x = torch.cat([like[:0], *(piece(p) for part in sends for p in part)])
    got = collectives.all_to_all(x, group, send_sizes=sizes[0], receive_sizes=sizes[1])
    come = [p for part in receives for p in part]
    return dict(zip(come, got.split([p.stop - p.start for p in come]))), got


def _slices(expert: int, ranks: Sequence[int], size: int) -> list[tuple[int, int, int, int]]:
    """(rank, expert, start, stop): a slice for each rank, as equal as can be."""
    ends = [size * j // max(1, len(ranks)) for j in range(len(ranks) + 1)]
    return [(rank, expert, start, stop) for rank, start, stop in zip(ranks, ends, ends[1:])]


def _packed(tensors: Weights) -> Tensor:
    """[k, ..] each -> [k, W]."""
    return torch.cat([tensor.flatten(1) for tensor in tensors], 1)


def _unpacked(rows: Tensor, like: Weights) -> list[Tensor]:
    parts = rows.split([tensor.shape[1:].numel() for tensor in like], 1)
    return [part.unflatten(1, tensor.shape[1:]) for part, tensor in zip(parts, like)]
