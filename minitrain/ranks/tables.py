"""Text tables: columns as wide as their widest cell."""

from collections.abc import Collection, Iterable, Sequence


def aligned(rows: Iterable[Sequence], left: Collection[int] = (0,)) -> str:
    """A line a row; columns `left` begin at the left, others end at the right; numbers get commas."""
    cells = [[cell if isinstance(cell, str) else f"{cell:,}" for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells)]
    sides = [str.ljust if number in left else str.rjust for number in range(len(widths))]
    line = lambda row: "  ".join(side(cell, width) for side, cell, width in zip(sides, row, widths)).rstrip()
    return "\n".join(map(line, cells))
