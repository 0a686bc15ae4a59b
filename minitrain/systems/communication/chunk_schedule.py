"""A collective algorithm is data: in every step, who sends which chunks to whom, to be added or to replace.

A tensor of S bytes is cut into C equal chunks. A `Schedule` is a tuple of steps, a step a tuple of
`Transfer`s, all of which read what the ranks held before it. `interpreter.run_schedule` moves real tensors by
it, `check` proves it without a process, `cost` predicts its time. Small schedules combine into large ones:

    then(a, b)                    first a, then b                 reduce-scatter, then all-gather
    mirror(a)                     a backwards, arrows reversed    all_gather = mirror(reduce_scatter)
    place(a, ranks, chunks, of=)  a, by these ranks and chunks    a ring in one node; a tree on half of S
    in_parallel([a, b, ...])      step i of all at the same time  all nodes; both trees

Bytes: rank r sends `sent_shares(schedule)[r]` · S; `sent_elements` is exact for sizes that do not divide.
Memory: one `Transfer` per message, 2n(n-1) for a ring: 8,064 for 64 ranks and 1.2e9 for 24,576, where
`selector` and `tree` have closed forms.
SCCL (Cai et al. 2021) also treats an algorithm as a list of (chunk, source, destination, step), to search for
the best one. Differs: there chunks are only placed, here they are added as well; schedules are composed and
not searched.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import zip_longest
from typing import NamedTuple

from minitrain.ranks.checks import require_positive_ints


class Transfer(NamedTuple):
    """One message. `chunks` is contiguous, so that it is one slice of a flat tensor and needs no packing."""

    source: int
    to: int
    chunks: range
    reduce: bool  # True: the receiver adds to what it holds; False: it replaces


Step = tuple[Transfer, ...]


@dataclass(frozen=True)
class Schedule:
    ranks: int
    chunks: int
    steps: tuple[Step, ...]

    def __post_init__(self) -> None:
        require_positive_ints(ranks=self.ranks)
        for index, step in enumerate(self.steps):
            for source, to, chunks, _ in step:
                ranks_fit = 0 <= source < self.ranks and 0 <= to < self.ranks and source != to
                if not ranks_fit or chunks.step != 1 or not 0 <= chunks.start < chunks.stop <= self.chunks:
                    what = f"step {index} sends {chunks} from rank {source} to rank {to}"
                    need = f"two different ranks below {self.ranks}, contiguous chunks within {self.chunks}"
                    raise ValueError(f"{what}; it needs {need}")


def then(*schedules: Schedule) -> Schedule:
    """One after the other."""
    return Schedule(*_common_size(schedules), sum((each.steps for each in schedules), ()))


def in_parallel(schedules: Iterable[Schedule]) -> Schedule:
    """Step i of every schedule in one step; the short ones end early."""
    schedules = list(schedules)
    steps = zip_longest(*(each.steps for each in schedules), fillvalue=())
    return Schedule(*_common_size(schedules), tuple(sum(parallel, ()) for parallel in steps))


def mirror(schedule: Schedule) -> Schedule:
    """The dual: what was gathered by adding is returned by copying, last step first, all arrows reversed."""
    if not all(transfer.reduce for step in schedule.steps for transfer in step):
        raise ValueError("only a schedule that reduces in every transfer has a mirror; mirror that half")
    back = lambda step: tuple(Transfer(to, source, chunks, reduce=False) for source, to, chunks, _ in step)
    return Schedule(schedule.ranks, schedule.chunks, tuple(map(back, reversed(schedule.steps))))


def place(schedule: Schedule, ranks: Sequence[int], chunks: range, *, of: tuple[int, int]) -> Schedule:
    """The schedule as part of a larger one, `of` = (ranks, chunks): rank i becomes ranks[i].

    Each of its chunks becomes a block of len(chunks) / schedule.chunks of the new ones."""
    block = len(chunks) // schedule.chunks

    def moved(transfer: Transfer) -> Transfer:
        first, last = (chunks.start + block * end for end in (transfer.chunks.start, transfer.chunks.stop))
        return Transfer(ranks[transfer.source], ranks[transfer.to], range(first, last), transfer.reduce)

    return Schedule(*of, tuple(tuple(map(moved, step)) for step in schedule.steps))


def span(chunks: range, schedule: Schedule, numel: int) -> tuple[int, int]:
    """Where `chunks` begin and end in a flat tensor of any size, cut as by `tensor_split`."""
    size, longer = divmod(numel, schedule.chunks)
    return chunks.start * size + min(chunks.start, longer), chunks.stop * size + min(chunks.stop, longer)


def sent_elements(schedule: Schedule, rank: int, numel: int) -> int:
    """Elements of a tensor of `numel` that `rank` sends, whether the chunks divide it or not."""
    spans = (span(t.chunks, schedule, numel) for step in schedule.steps for t in step if t.source == rank)
    return sum(stop - start for start, stop in spans)


def sent_shares(schedule: Schedule, counts: Callable = lambda transfer: True) -> list[Fraction]:
    """[rank] -> what it sends, as a fraction of S. `counts` picks transfers (what leaves a node, say)."""
    sent = [0] * schedule.ranks
    for transfer in (transfer for step in schedule.steps for transfer in step if counts(transfer)):
        sent[transfer.source] += len(transfer.chunks)
    return [Fraction(each, schedule.chunks) for each in sent]


def _common_size(schedules: Sequence[Schedule]) -> tuple[int, int]:
    sizes = sorted({(each.ranks, each.chunks) for each in schedules})
    if len(sizes) != 1:
        given = " and ".join(f"{ranks} ranks with {chunks} chunks" for ranks, chunks in sizes)
        raise ValueError(f"cannot join {given or 'no schedule'}; bring all to one size with place()")
    return sizes[0]
