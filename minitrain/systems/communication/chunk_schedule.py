"""A collective algorithm is data: in every step, who sends which chunks to whom, to be added or to replace.

A tensor of S bytes is cut into C equal chunks. A `Schedule` is a tuple of steps, a step a tuple of
`Transfer`s, all of which read what the ranks held before it. `interpreter.run_schedule` moves real tensors by
it, `check` proves it without a process, `cost_model` predicts its time. Small schedules combine by `then`,
`mirror`, `place` and `in_parallel`. Rank r sends `sent_shares(schedule)[r]` · S bytes; `sent_elements` is
exact for sizes that do not divide. Memory: one `Transfer` per message, 2n(n-1) for a ring: 8,064 for 64 ranks
and 1.2e9 for 24,576, where `cost_model.steps` and `algorithms.binary_tree` have closed forms.
The proof follows whose contributions are in every chunk of every rank: an integer with one bit per rank. An
all-reduce is right when in the end every chunk of every rank contains every rank exactly once.
SCCL (Cai et al. 2021) searches for lists of (chunk, source, to, step). Differs: composed here, not searched.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import zip_longest
from typing import NamedTuple

from minitrain.ranks.checks import require_one_of, require_positive_ints


class Transfer(NamedTuple):
    """One message. `chunks` is contiguous, so that it is one slice of a flat tensor and needs no packing."""

    source: int
    to: int
    chunks: range
    reduce: bool  # True: the receiver adds to what it holds; False: it replaces


@dataclass(frozen=True)
class Schedule:
    ranks: int
    chunks: int
    steps: tuple[tuple[Transfer, ...], ...]

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
    """One after the other: a reduce-scatter, then an all-gather."""
    return Schedule(*_common_size(schedules), sum((each.steps for each in schedules), ()))


def in_parallel(schedules: Iterable[Schedule]) -> Schedule:
    """Step i of every schedule in one step (all nodes, both trees); the short ones end early."""
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
    """The schedule as part of a larger one, `of` = (ranks, chunks), a ring in one node say: rank i becomes
    ranks[i], each of its chunks a block of len(chunks) / schedule.chunks of the new ones."""
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


# ---- its proof ---------------------------------------------------------------------------------------------

Holdings = list[list[int]]  # [rank][chunk] -> set of contributions, as bits; 0: nothing of value

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "reduce", "broadcast")


def check(schedule: Schedule, collective: str = "all_reduce") -> None:
    """ValueError unless it does the collective. Rank c·n // C owns chunk c of C; rank 0 is the root."""
    everyone = (1 << schedule.ranks) - 1
    *_, end = replay(schedule, start_of(schedule, collective))
    for rank, row in enumerate(end):
        for chunk, held in enumerate(row):
            owned = _owner(schedule, chunk) == rank
            needed = {"reduce_scatter": owned, "reduce": rank == 0}.get(collective, True)
            if needed and held != everyone:
                missing = [other for other in range(schedule.ranks) if not held >> other & 1]
                end = f"in the end rank {rank} lacks ranks {missing} in chunk {chunk}"
                raise ValueError(f"{collective}: {end}")


def start_of(schedule: Schedule, collective: str) -> Holdings:
    """Before the first step: everyone's own contribution or, to spread a finished sum, its holder's."""
    require_one_of(COLLECTIVES, collective=collective)
    everyone, chunks = (1 << schedule.ranks) - 1, range(schedule.chunks)
    if collective not in ("all_gather", "broadcast"):
        return [[1 << rank for _ in chunks] for rank in range(schedule.ranks)]
    holders = [0 if collective == "broadcast" else _owner(schedule, chunk) for chunk in chunks]
    return [[everyone * (rank == holder) for holder in holders] for rank in range(schedule.ranks)]


def _owner(schedule: Schedule, chunk: int) -> int:
    return chunk * schedule.ranks // schedule.chunks


def replay(schedule: Schedule, start: Holdings) -> Iterator[Holdings]:
    """The holdings before the first step and after each; transfers read those before their step."""
    before = start
    yield before
    for index, step in enumerate(schedule.steps):
        after = [list(row) for row in before]
        added: dict[tuple[int, int], bool] = {}  # (rank, chunk) written in this step -> by adding
        for source, to, chunks, reduce in step:
            for chunk in chunks:
                where = f"step {index}: rank {source} sends chunk {chunk} to rank {to}"
                sent, held = before[source][chunk], after[to][chunk]
                if not sent:
                    raise ValueError(f"{where}, but holds nothing of it yet")
                if (to, chunk) in added and not (reduce and added[to, chunk]):
                    raise ValueError(f"{where}, where another transfer of this step writes: in which order?")
                if reduce and (not held or held & sent):
                    raise ValueError(f"{where} to be added " + ("twice" if held else "to nothing"))
                after[to][chunk] = held | sent if reduce else sent
                added[to, chunk] = reduce
        before = after
        yield before


def history(schedule: Schedule, collective: str = "all_reduce") -> list[list[list[int]]]:
    """[step][rank][chunk] -> number of contributions inside: the chunk matrix of the textbooks."""
    steps = replay(schedule, start_of(schedule, collective))
    return [[[held.bit_count() for held in row] for row in holdings] for holdings in steps]


def draw(schedule: Schedule, collective: str = "all_reduce") -> str:
    """As text: a line per rank, a block per step; `.` is nothing, `2` the sum of two ranks, `#` of all."""
    frames = history(schedule, collective)
    titles = ["start", *(f"step {index}" for index in range(1, len(frames)))]
    width = max(schedule.chunks, *map(len, titles))

    glyphs = [*".123456789", *"+" * schedule.ranks]
    glyphs[schedule.ranks] = "#"
    cells = [["".join(glyphs[count] for count in row) for row in frame] for frame in frames]  # [step][rank]
    lines = [("rank", *titles), *((f"{rank}", *row) for rank, row in enumerate(zip(*cells)))]
    padded = ((f"{name:<7}", *(cell.ljust(width) for cell in row)) for name, *row in lines)
    return "\n".join("  ".join(cells).rstrip() for cells in padded)
