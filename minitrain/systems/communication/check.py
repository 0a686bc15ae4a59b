"""The proof of a schedule, without a process: follow whose contributions are in every chunk of every rank.

A rank's copy of a chunk is the set of ranks that have been added into it: an integer with one bit per rank,
union is `|`, "already inside" is `&`. An all-reduce is right when in the end every chunk of every rank
contains every rank exactly once. `check` raises ValueError, naming step and rank, for a contribution that
would be added twice, a chunk sent before its sender holds it, two transfers of one step whose order would
decide the result, and a chunk left incomplete. `history` returns the sizes of the sets, `draw` prints them,
`plot.chunk_matrix` colours them. Cost: one operation for each chunk moved, and n·C integers held.
"""

from collections.abc import Iterator

from minitrain.ranks.checks import require_one_of
from minitrain.systems.communication.chunk_schedule import Schedule

Holdings = list[list[int]]  # [rank][chunk] -> set of contributions, as bits; 0: nothing of value

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "reduce", "broadcast")


def check(schedule: Schedule, collective: str = "all_reduce") -> None:
    """Raise ValueError unless the schedule carries out the collective. Rank c·n // C owns chunk c of C.
    A reduce ends at rank 0, where a broadcast begins."""
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
