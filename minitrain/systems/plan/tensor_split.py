"""TSPLIT's question: which operators to split into how many parts, and which results to make again. No torch.

    ops = [Work("mlp", seconds=2, kept=64, needs=96, rows=8, launch=0.1), ..]
    choose(ops, budget=200).choices                       [Choice(parts=2, again=True), ..]

Operators run one after the other. One that keeps its intermediates holds `kept` bytes from its forward to
its backward; made again, it keeps nothing; cut into k parts it needs needs·ceil(rows/k)/rows bytes for the
part it works on. So with what those before it keep, in forward and in backward,

    sum of kept_i, i < j, i not again  +  needs_j·ceil(rows_j/k_j)/rows_j  (+ kept_j if not again)  <=  budget
    cost = sum of seconds_i (those made again) + launch_i·(k_i - 1)·(1 + again)        as little as can be

Of k only the least that fits matters; per sum of kept bytes only the cheapest choice (a Pareto front, exact).
Nie et al. 2022 (TSPLIT), ICDE'22: a greedy planner by time per byte. Differs: exact, along one dimension; a
swapped result is one made again whose `seconds` are those of its copies that nothing hides.
"""

from collections.abc import Sequence
from typing import NamedTuple

from minitrain.pipeline.partition import undominated


class Work(NamedTuple):
    """One operator, or a few that are split together."""

    name: str
    seconds: float  # to make its intermediates again
    kept: int  # bytes of them, if they stay
    needs: int  # bytes while it works, all rows at once, that are not kept: of its part
    rows: int
    launch: float = 0.0  # seconds that each further part costs


class Choice(NamedTuple):
    parts: int
    again: bool


class Chosen(NamedTuple):
    seconds: float  # more than unsplit and all kept
    kept: int
    choices: tuple[Choice, ...]


def choose(works: Sequence[Work], budget: int) -> Chosen:
    """The cheapest choice for each; ValueError names the operator that does not fit even row by row."""
    front = [((0, 0.0), ())]
    for work in works:
        grown = []
        for (before, seconds), choices in front:
            for again in (False, True):
                kept = before + (0 if again else work.kept)
                if parts := fewest_parts(work, budget - kept):
                    choice = Choice(parts, again)
                    grown.append(((kept, seconds + cost(work, choice)), (*choices, choice)))
        if not grown:
            least = front[0][0][0] + part_bytes(work, work.rows)
            raise ValueError(f"{work.name} needs {least} bytes by single rows; budget is {budget}, raise it")
        front = undominated(grown)
    return min(Chosen(seconds, kept, choices) for (kept, seconds), choices in front)


def fewest_parts(work: Work, room: int) -> int:
    """The least number of parts of which each fits into so many bytes; 0: not even single rows do."""
    return next((k for k in range(1, work.rows + 1) if part_bytes(work, k) <= room), 0)


def part_bytes(work: Work, parts: int) -> int:
    """What the largest part needs."""
    return -(-work.needs * -(-work.rows // parts) // work.rows)


def cost(work: Work, choice: Choice) -> float:
    """Seconds more than unsplit and kept."""
    return work.seconds * choice.again + work.launch * (choice.parts - 1) * (1 + choice.again)
