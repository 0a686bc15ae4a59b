"""Who sends how many bytes to whom: a matrix from rank to rank, from the events of ranks. No torch.

    matrix = traffic({rank: ledger.events, ...}, ranks=128)     matrix.by_axis["tp"][0, 1]: bytes from 0 to 1

An event says how much a rank hands to the network and who takes part; the algorithm says to whom:

                 ring (NCCL, one channel)     direct (ours, over gloo)
    all-gather   to the next member           to the next member
    reduce-scatter     "                      an equal share to each of the others
    all-reduce         "                      half as a reduce-scatter, half as an all-gather
    all-to-all   an equal share to each of the others
    send         to its destination

Members are in the order of their group, the last one's next is the first. Shares are equal where the pieces
are; what does not divide is a byte more for the first. Ranks of one stage do the same, so `every_rank` fills
a mesh from one dry run per stage, and `renumbered` says what the same run sends with its axes in another
order. Not modelled: several rings at once, trees. A broadcast is refused: an event has no source.
InternLM-2's matrix on 128 GPUs: Duan et al. 2024, arXiv:2407.20018, section 7, figure 13. Differs: its filled
squares and its diagonals of one ring are two algorithms here, and two pictures.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod

from minitrain.ranks.checks import require_one_of
from minitrain.ranks.events import Event, Issue

ALGORITHMS = ("ring", "direct")
Pairs = dict[tuple[int, int], int]  # (from, to) -> bytes


@dataclass(frozen=True)
class Matrix:
    """Bytes by mesh axis and by pair of ranks (from, to); pairs that exchange nothing are left out."""

    ranks: int
    by_axis: dict[str, Pairs]

    def pairs(self, *axes: str) -> Pairs:
        """Of these axes, or of all."""
        total: Counter = Counter()
        for axis in axes or self.by_axis:
            total.update(self.by_axis.get(axis, {}))
        return dict(total)

    def talking(self, *axes: str) -> set[tuple[int, int]]:
        """Pairs of which at least one sends to the other, in both orders."""
        return {pair for a, b in self.pairs(*axes) for pair in ((a, b), (b, a))}

    def offsets(self, *axes: str) -> dict[int, int]:
        """The diagonals: to - from -> how many pairs lie on it."""
        return dict(sorted(Counter(b - a for a, b in self.pairs(*axes)).items()))

    def leaving(self, devices_per_node: int, *axes: str) -> int:
        """Bytes whose source and destination are on different nodes."""
        pairs = self.pairs(*axes).items()
        return sum(sent for (a, b), sent in pairs if a // devices_per_node != b // devices_per_node)


def traffic(events_by_rank: Mapping[int, Iterable[Event]], ranks: int, algorithm: str = "ring") -> Matrix:
    """The matrix of what these ranks send, in a world of so many."""
    require_one_of(ALGORITHMS, algorithm=algorithm)
    by_axis: dict[str, Counter] = {}
    for rank, events in events_by_rank.items():
        for event in events:
            if isinstance(event, Issue) and event.sent_bytes:
                by_axis.setdefault(event.axis, Counter()).update(_receivers(event, rank, algorithm))
    return Matrix(ranks, {axis: dict(pairs) for axis, pairs in by_axis.items()})


def _receivers(event: Issue, rank: int, algorithm: str) -> Pairs:
    """(from, to) -> bytes of one call."""
    if event.op == "send":
        return {event.members: event.sent_bytes}
    here = event.members.index(rank)
    others = event.members[here + 1 :] + event.members[:here]  # the next one first
    if event.op not in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all"):
        raise ValueError(f"{event.op} at {event.site}: an event does not say to whom; leave it out")
    if event.op == "all_to_all" or algorithm == "direct" and event.op == "reduce_scatter":
        direct = event.sent_bytes
    else:
        direct = event.sent_bytes // 2 if algorithm == "direct" and event.op == "all_reduce" else 0
    pairs = Counter(_dealt(rank, others, direct))
    pairs[rank, others[0]] += event.sent_bytes - direct
    return pairs


def _dealt(rank: int, others: tuple[int, ...], sent: int) -> Pairs:
    share, rest = divmod(sent, len(others))
    return {(rank, to): share + (i < rest) for i, to in enumerate(others) if share + (i < rest)}


def place_of(rank: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """Coordinates of a rank in a mesh, whose axes are given with the outermost first."""
    place = {}
    for axis, size in reversed(sizes.items()):
        rank, place[axis] = divmod(rank, size)
    return place


def rank_at(place: Mapping[str, int], sizes: Mapping[str, int]) -> int:
    rank = 0
    for axis, size in sizes.items():
        rank = rank * size + place[axis]
    return rank


def every_rank(
    events_by_rank: Mapping[int, list[Event]], sizes: Mapping[str, int], alike: Iterable[str]
) -> dict[int, list[Event]]:
    """The events of all ranks of a mesh, from those of the ranks at 0 of the axes `alike`, along which all
    ranks do the same: dp and tp. (Ranks of cp send the same; which scores they compute is the layout's.)"""
    alike, found = set(alike), {}
    for rank in range(prod(sizes.values())):
        place = place_of(rank, sizes)
        model = rank_at({axis: 0 if axis in alike else at for axis, at in place.items()}, sizes)
        if model not in events_by_rank:
            raise ValueError(f"rank {rank} does what rank {model} does; give the events of rank {model}")

        def moved(member: int) -> int:
            there = place_of(member, sizes)
            far = {axis: (there[axis] + place[axis] * (axis in alike)) % size for axis, size in sizes.items()}
            return rank_at(far, sizes)

        found[rank] = _with_members(events_by_rank[model], moved)
    return found


def renumbered(
    events_by_rank: Mapping[int, list[Event]], sizes: Mapping[str, int], order: Iterable[str]
) -> dict[int, list[Event]]:
    """The same run on a mesh with its axes in another order, the outermost first: who talks to whom stays,
    and what their numbers are changes."""
    order = tuple(order)
    if sorted(order) != sorted(sizes):
        raise ValueError(f"order {', '.join(order)}; name each of {', '.join(sizes)} once")
    new = {axis: sizes[axis] for axis in order}
    number = {rank: rank_at(place_of(rank, sizes), new) for rank in range(prod(sizes.values()))}
    moved = {number[rank]: _with_members(events, number.get) for rank, events in events_by_rank.items()}
    return dict(sorted(moved.items()))


def _with_members(events: Iterable[Event], number: Callable[[int], int]) -> list[Event]:
    """A group lists its ranks in ascending order, a message its source first."""
    known: dict[tuple, tuple] = {}

    def named(event: Issue) -> tuple[int, ...]:
        key = event.op in ("send", "receive"), event.members
        if key not in known:
            numbers = map(number, event.members)
            known[key] = tuple(numbers if key[0] else sorted(numbers))
        return known[key]

    return [replace(event, members=named(event)) if isinstance(event, Issue) else event for event in events]
