"""Memory by address: where every block lies and for how long, the holes between, the request that failed.

Pale is what is reserved and nobody's: a hole. Addresses that never had memory behind them are left out, so
what an allocator spreads over a huge range stands side by side.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from itertools import accumulate

from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from minitrain.course.plot import style
from minitrain.course.plot.style import BLACK, COLOURS, PALE, VERMILLION
from minitrain.systems.simulate.device_memory import Replay
from minitrain.systems.simulate.timeline import join

Kinds = Mapping[int, str] | None
OTHER = "blocks"  # those of no kind
_MOST_BLOCKS, MIB = 20_000, 2**20
_HOLES = "reserved, in no block"


@style.styled
def address_space(done: Replay, kinds: Kinds = None, *, title: str) -> Figure:
    """Events to the right, addresses upwards: a block is as wide as its life, as high as its bytes. The
    request at which a replay died is drawn to its right, to scale.

    `kinds`: {block: kind}, as dict(enumerate(ledger.block_kinds)). ValueError beyond 20,000 blocks."""
    if len(done.placed) > _MOST_BLOCKS:
        cure = f"replay a part of the trace, at most {_MOST_BLOCKS:,}"
        raise ValueError(f"{len(done.placed):,} blocks cannot be read as a picture; {cure}")
    folded = _Folded(done)
    figure, ax = style.canvas(height=3.6)
    boxes: dict[str, list[Rectangle]] = {_HOLES: []}
    for address, size, born, dies in done.backed:
        boxes[_HOLES].append(Rectangle((born, folded(address) / MIB), dies - born, size / MIB))
    for placed in done.placed:
        kind = (kinds or {}).get(placed.block, OTHER)
        for address, size in placed.pieces:
            low, width = folded(address) / MIB, placed.dies - placed.born
            boxes.setdefault(kind, []).append(Rectangle((placed.born, low), width, size / MIB))
    for kind, rectangles in boxes.items():
        edge = "none" if kind == _HOLES or len(done.placed) > 400 else "white"
        look = {"facecolor": _colour(kind, kinds), "edgecolor": edge, "linewidth": 0.4}
        ax.add_collection(PatchCollection(rectangles, **look))
    right, top = done.events, folded.end / MIB
    if done.died:
        asked, hole = done.died.requested_bytes / MIB, done.died.largest_bytes / MIB
        left, wide = 1.02 * done.events, 0.05 * done.events
        look = {"facecolor": "white", "edgecolor": VERMILLION, "hatch": "/////", "linewidth": 1.2}
        ax.add_patch(Rectangle((left, 0), wide, asked, **look))
        told = f"asked for: {asked:,.0f} MiB\nlargest hole: {hole:,.0f} MiB"
        box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1.5}
        look = {"fontsize": 8, "color": VERMILLION, "va": "top", "bbox": box}
        ax.text(0.01 * done.events, max(top, asked), told, **look)
        right, top = left + 1.3 * wide, max(top, asked)
    ax.set(xlim=(0, right or 1), ylim=(0, 1.02 * top or 1), xlabel="event of the trace")
    ax.set_ylabel("address (MiB)")
    ax.grid(visible=False)
    return style.finished(figure, title, _legend(boxes, kinds, died=bool(done.died)))


@style.styled
def strips(moments: Mapping[str, tuple[Replay, int]], kinds: Kinds = None, *, title: str) -> Figure:
    """{label: (replay, event)}: what lies where after the event, on one scale; white is not reserved."""
    folds = {label: _Folded(done) for label, (done, _) in moments.items()}
    longest = max([fold.end for fold in folds.values()], default=1) or 1
    figure, ax = style.canvas(height=1.2 + 0.55 * len(moments))
    seen: set[str] = set()
    for row, (label, (done, event)) in enumerate(moments.items()):
        fold = folds[label]
        for address, size, born, dies in done.backed:
            if born <= event < dies:
                _bar(ax, fold(address) / MIB, row, size / MIB, PALE)
        live = [placed for placed in done.placed if placed.born <= event < placed.dies]
        for placed in live:
            kind = (kinds or {}).get(placed.block, OTHER)
            seen.add(kind)
            for address, size in placed.pieces:
                edge = "white" if len(live) <= 60 else "none"
                _bar(ax, fold(address) / MIB, row, size / MIB, _colour(kind, kinds), edge)
        held = f"{done.allocated[event] / MIB:,.0f} of {done.reserved[event] / MIB:,.0f} MiB in use"
        ax.text(0, row - 0.42, held, fontsize=7, va="bottom", color=BLACK)
    style.row_labels(ax, list(moments), top=-0.75)
    ax.set(xlim=(0, longest / MIB), xlabel="address (MiB)")
    ax.grid(visible=False)
    return style.finished(figure, title, _legend(seen, kinds))


def _bar(ax: Axes, left: float, row: int, width: float, colour: str, edge: str = "none") -> None:
    ax.add_patch(Rectangle((left, row - 0.35), width, 0.7, facecolor=colour, edgecolor=edge, linewidth=0.5))


def _colour(kind: str, kinds: Kinds) -> str:
    """By meaning; others in turn, the same in all pictures of the same kinds."""
    others = sorted({OTHER, *(kinds or {}).values()} - COLOURS.keys())
    return PALE if kind == _HOLES else style.colour_of(kind, others)


def _legend(shown: Iterable[str], kinds: Kinds, died: bool = False) -> list[Patch]:
    named = sorted(set(shown) - {_HOLES})
    patches = style.patches({kind: _colour(kind, kinds) for kind in [*named, _HOLES]})
    if died:
        patches.append(Patch(facecolor="white", edgecolor=VERMILLION, hatch="/////", label="no room for it"))
    return patches


class _Folded:
    """Addresses -> places from 0 to `end`: ranges that ever had memory behind them, side by side."""

    def __init__(self, done: Replay) -> None:
        ranges = join((address, address + size) for address, size, *_ in done.backed)
        self._starts = [start for start, _ in ranges]
        self._places = list(accumulate((end - start for start, end in ranges), initial=0))
        self.end = self._places[-1]

    def __call__(self, address: int) -> int:
        at = bisect_right(self._starts, address) - 1
        return self._places[at] + address - self._starts[at]
