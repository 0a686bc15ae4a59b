"""A sequence over ranks: who holds which keys when, who computes which score, rounds of schedules."""

from collections.abc import Callable, Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Polygon, Rectangle

from minitrain.course.plot import style
from minitrain.course.plot.style import BLUE, CYCLE, ORANGE, PALE

Owners = Mapping[int, int]  # {position: rank}


def _colour(rank: int) -> str:
    return CYCLE[rank % len(CYCLE)]


def _ranks(ranks: int, what: str = "rank {}") -> dict[str, str]:
    return {what.format(rank): _colour(rank) for rank in range(ranks)}


@style.styled
def rings_and_heads(ranks: int = 4) -> Figure:
    """Left, the ring: queries stay in their row, blocks of keys move on. Right, the all-to-all: tokens for
    heads."""
    figure, (ring, before, after) = style.grid_of_panels(1, 3, height=3.3)
    style.square_cells(ring, ranks, ranks)
    for rank in range(ranks):
        for step in range(ranks):
            owner = (rank - step) % ranks
            style.cell(ring, step, rank, _colour(owner), f"K,V {owner}")
    ring.set_title("The ring: what is here", fontsize=9)
    ring.set_xticks(range(ranks), [f"step {step}" for step in range(ranks)])
    ring.set_yticks(range(ranks), [f"Q {rank}" for rank in range(ranks)])
    for ax, whole, name in ((before, False, "Ulysses: before"), (after, True, "Ulysses: in attention")):
        style.square_cells(ax, ranks, ranks)
        for head in range(ranks):
            for part in range(ranks):
                holder = head if whole else part
                style.cell(ax, part, head, _colour(holder), str(holder))
        ax.set_title(name, fontsize=9)
        ax.set_xticks(range(ranks), range(ranks))
        ax.set_xlabel("quarter of the tokens" if ranks == 4 else "part of the tokens", fontsize=8)
    before.set_yticks(range(ranks), [f"head {head}" for head in range(ranks)])
    title = "Two ways for a query to meet all keys; a colour is a rank"
    return style.finished(figure, title, _ranks(ranks))


@style.styled
def masks(layouts: Mapping[str, Owners], length: int, ranks: int) -> Figure:
    """Every score under a causal mask: the colour of its query's rank, and the step of the ring."""
    figure, panels = style.grid_of_panels(1, len(layouts), height=3.3)
    for ax, (name, owner) in zip(panels, layouts.items()):
        style.square_cells(ax, length, length)
        for query in range(length):
            for key in range(query + 1):
                step = (owner[query] - owner[key]) % ranks
                style.cell(ax, key, query, _colour(owner[query]), str(step), fontsize=5)
        ax.set_title(name, fontsize=9)
        ax.set_xlabel("key", fontsize=8)
    panels[0].set_ylabel("query", fontsize=8)
    title = "Which rank computes each score (colour), in which step of the ring (number)"
    return style.finished(figure, title, _ranks(ranks, "rank {}'s query"))


@style.styled
def ring_strip(layouts: Mapping[str, Callable], ranks: int, length: int) -> Figure:
    """For each layout and step what is computed; layouts[name](rank, owner) are its tiles: slices of the
    rank's queries and of the owner's keys, and whether it is a triangle."""
    figure, panels = style.grid_of_panels(len(layouts), ranks, height=4.1)
    size = length // ranks
    for row, (name, tiles) in enumerate(layouts.items()):
        for step in range(ranks):
            ax = panels[row * ranks + step]
            _frames(ax, ranks, size)
            for rank in range(ranks):
                owner = (rank - step) % ranks
                for tile in tiles(rank, owner):
                    _tile(ax, tile, rank * size, owner * size, _colour(rank))
                place = (owner * size, rank * size)
                ax.add_patch(Rectangle(place, size, size, fill=False, edgecolor="black", linewidth=1.0))
            ax.set_yticks([size * (rank + 0.5) for rank in range(ranks)] if step == 0 else [])
            ax.set_yticklabels([f"rank {rank}" for rank in range(ranks)] if step == 0 else [])
            ax.set_title(f"{name}, step {step}", fontsize=8)
            if row == len(layouts) - 1:
                ax.set_xlabel("keys of rank", fontsize=7)
    title = f"The ring in {ranks} steps: framed is the block that is here, coloured what is computed"
    return style.finished(figure, title)


def _frames(ax, ranks: int, size: int) -> None:
    """An empty square of scores for each rank's queries and each rank's keys."""
    style.square_cells(ax, ranks, ranks)
    for place in ((owner * size, rank * size) for rank in range(ranks) for owner in range(ranks)):
        ax.add_patch(Rectangle(place, size, size, facecolor="white", edgecolor="#CCCCCC", linewidth=0.6))
    length = ranks * size
    ax.set(xlim=(-0.2, length + 0.2), ylim=(length + 0.2, -0.2))
    ax.set_xticks([size * (rank + 0.5) for rank in range(ranks)], range(ranks))


def _tile(ax, tile, top: int, left: int, colour: str) -> None:
    top, bottom = top + tile.queries.start, top + tile.queries.stop
    left, right = left + tile.keys.start, left + tile.keys.stop
    corners = [(left, top), (left, bottom), (right, bottom)] + ([] if tile.causal else [(right, top)])
    ax.add_patch(Polygon(corners, facecolor=colour, edgecolor="none"))


@style.styled
def rounds(schedules: Mapping[str, Sequence]) -> Figure:
    """schedules[name][round][rank]: (queries of rank, keys of rank), or None where it idles."""
    figure, panels = style.grid_of_panels(1, len(schedules), height=3.1)
    for ax, (name, schedule) in zip(panels, schedules.items()):
        ranks = len(schedule[0])
        style.square_cells(ax, ranks, max(map(len, schedules.values())))
        for t, row in enumerate(schedule):
            for rank, tile in enumerate(row):
                colour = PALE if not tile else BLUE if tile[0] == rank else ORANGE
                style.cell(ax, rank, t, colour, f"{tile[0]},{tile[1]}" if tile else "", fontsize=6)
        ax.set_yticks(range(len(schedule)), [f"round {t}" for t in range(len(schedule))])
        ax.set_xticks(range(ranks), range(ranks))
        ax.set_xlabel("rank", fontsize=8)
        ax.set_title(f"{name}: {len(schedule)} rounds", fontsize=9)
    meaning = {"own queries": BLUE, "queries of a later rank": ORANGE, "idle": PALE}
    return style.finished(figure, "Who computes which tile (queries of rank, keys of rank)", meaning)


@style.styled
def heads_and_tokens(before: Sequence, after: Sequence, length: int) -> Figure:
    """What each rank reports to hold before and after a switch: numbers head * length + token."""
    figure, panels = style.grid_of_panels(1, 2, height=2.9)
    names = "before: whole tokens", "after: whole heads"
    for ax, held, name in zip(panels, (before, after), names):
        style.square_cells(ax, length, max(map(max, held)) // length + 1)
        for rank, numbers in enumerate(held):
            for number in numbers:
                place = number % length, number // length
                style.cell(ax, *place, _colour(rank), str(rank), fontsize=6)
        ax.set_title(name, fontsize=9)
        ax.set_xlabel("token", fontsize=8)
        ax.set_ylabel("head", fontsize=8)
    title = f"The all-to-all of Ulysses on {len(before)} ranks, as the ranks report what they hold"
    return style.finished(figure, title, _ranks(len(before)))


@style.styled
def teams(sizes: Sequence[int], ranks: int) -> Figure:
    """For teams of each size: a row per team's queries, a column per team's keys; the colour is the member
    that computes the square, the number its step."""
    figure, panels = style.grid_of_panels(1, len(sizes), height=3.3)
    for ax, members in zip(panels, sizes):
        count, steps = ranks // members, ranks // members**2
        style.square_cells(ax, count, count)
        for team in range(count):
            for back in range(count):  # how many teams behind
                member, step = divmod(back, steps)
                small = 5 if count > 8 else 7
                style.cell(ax, (team - back) % count, team, _colour(member), str(step), fontsize=small)
        name, holder = (f"teams of {members}", "team") if members > 1 else ("a ring", "rank")
        ax.set_title(f"{name}: {steps} step{'s' * (steps > 1)}", fontsize=9)
        ax.set_xlabel(f"keys of {holder}", fontsize=8)
        ax.set_ylabel(f"queries of {holder}", fontsize=8)
    title = f"{ranks} ranks: which member of a team (colour) computes which square, in which step"
    return style.finished(figure, title, _ranks(max(sizes), "member {}"))
