"""Who sends how many bytes to whom: a matrix from rank to rank, from the events of ranks. No torch.

    matrix = traffic({rank: ledger.events, ...}, ranks=128)     matrix.by_axis["tp"][0, 1]: bytes from 0 to 1

An event says how much a rank hands to the network and who takes part; STRAIGHT says what of it goes to whom.
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
from functools import cache
from itertools import product

from minitrain.ranks.checks import require_one_of
from minitrain.ranks.events import Event, Issue

Events = Mapping[int, list[Event]]

# How many halves of what is sent go to all others in equal shares; the rest goes to the next member. A ring
# is NCCL's with one channel, direct is ours over gloo: an all-reduce is a reduce-scatter and an all-gather.
STRAIGHT = {
    "ring": {"all_gather": 0, "reduce_scatter": 0, "all_reduce": 0, "all_to_all": 2},
    "direct": {"all_gather": 0, "reduce_scatter": 2, "all_reduce": 1, "all_to_all": 2},
}
Pairs = dict[tuple[int, int], int]  # (from, to) -> bytes


@dataclass(frozen=True)
class Matrix:
    """Bytes by mesh axis and by pair of ranks (from, to); pairs that exchange nothing are left out."""

    ranks: int
    by_axis: dict[str, Pairs]

    def pairs(self, *axes: str) -> Pairs:
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
    require_one_of(STRAIGHT, algorithm=algorithm)
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
    if event.op not in STRAIGHT[algorithm]:
        raise ValueError(f"{event.op} at {event.site}: an event does not say to whom; leave it out")
    here = event.members.index(rank)
    others = event.members[here + 1 :] + event.members[:here]  # the next one first
    straight = event.sent_bytes * STRAIGHT[algorithm][event.op] // 2
    share, rest = divmod(straight, len(others))
    pairs = Counter({(rank, to): share + (i < rest) for i, to in enumerate(others)})
    pairs[rank, others[0]] += event.sent_bytes - straight
    return +pairs  # without those that get nothing


def places_of(sizes: Mapping[str, int]) -> list[tuple[int, ...]]:
    """Coordinates of each rank in a mesh, whose axes are given with the outermost first."""
    return list(product(*map(range, sizes.values())))


def every_rank(events_by_rank: Events, sizes: Mapping[str, int], alike: Iterable[str]) -> Events:
    """The events of all ranks of a mesh, from those of the ranks at 0 of the axes `alike`, along which all
    ranks do the same: dp and tp. (Ranks of cp send the same; which scores they compute is the layout's.)"""
    same = [axis in set(alike) for axis in sizes]
    places, found = places_of(sizes), {}
    ranks = {place: rank for rank, place in enumerate(places)}
    for rank, place in enumerate(places):
        model = ranks[tuple(0 if as_others else at for at, as_others in zip(place, same))]
        if model not in events_by_rank:
            raise ValueError(f"rank {rank} does what rank {model} does; give the events of rank {model}")

        def moved(member: int) -> int:
            far = zip(places[member], place, same, sizes.values())
            return ranks[tuple((there + at * as_others) % size for there, at, as_others, size in far)]

        found[rank] = _with_members(events_by_rank[model], moved)
    return found


def renumbered(events_by_rank: Events, sizes: Mapping[str, int], order: Iterable[str]) -> Events:
    """The same run on a mesh with its axes in another order, the outermost first: who talks to whom stays,
    and what their numbers are changes."""
    order = tuple(order)
    if sorted(order) != sorted(sizes):
        raise ValueError(f"order {', '.join(order)}; name each of {', '.join(sizes)} once")
    places, new = places_of(sizes), [list(sizes).index(axis) for axis in order]
    in_order = sorted(range(len(places)), key=lambda rank: [places[rank][at] for at in new])
    number = {rank: at for at, rank in enumerate(in_order)}
    moved = {number[rank]: _with_members(events, number.get) for rank, events in events_by_rank.items()}
    return dict(sorted(moved.items()))


def _with_members(events: Iterable[Event], number: Callable[[int], int]) -> list[Event]:
    """A group lists its ranks in ascending order, a message its source first."""

    @cache
    def named(members: tuple[int, ...], is_message: bool) -> tuple[int, ...]:
        numbers = map(number, members)
        return tuple(numbers if is_message else sorted(numbers))

    moved = lambda event: replace(event, members=named(event.members, event.op in ("send", "receive")))
    return [moved(event) if isinstance(event, Issue) else event for event in events]
