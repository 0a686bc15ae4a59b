"""Pictures of chapter 21: who is a member when, and what a death finds at each point of a step."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from minitrain.course.plot import style
from minitrain.course.plot.style import BLUE, CENTRED, GREEN, GREY, ORANGE, SKY, VERMILLION

POINTS = {"forward": SKY, "backward, sums": BLUE, "vote": ORANGE, "update": GREEN}


@style.styled
def commit(title: str = "What a death in a step finds, and what the survivors do") -> Figure:
    """The parts of a step; below them who has entered and who has passed the vote, and what follows."""
    figure, ax = style.canvas(height=2.0)
    for at, (part, colour) in enumerate(POINTS.items()):
        ax.barh(0, 1, left=at, height=0.6, color=colour, edgecolor="white")
        ax.text(at + 0.5, 0, part, color="white" if colour != SKY else "black", **CENTRED)
    for left, right, said, then in (
        (0.02, 2.45, "nobody has passed the vote", "the step is made again by those who are left"),
        (2.55, 3.98, "somebody has passed", "all have entered: all update"),
    ):
        ax.annotate("", (right, -0.75), (left, -0.75), arrowprops={"arrowstyle": "<->", "color": VERMILLION})
        ax.text((left + right) / 2, -1.05, said, weight="bold", **CENTRED)
        ax.text((left + right) / 2, -1.4, then, **CENTRED)
    ax.set(xlim=(-0.1, 4.3), ylim=(-1.7, 0.4))
    ax.set_axis_off()
    return style.finished(figure, title)


@style.styled
def members(
    losses: Sequence[float], history: Sequence[tuple[int, int, int]], wanted: Sequence[float], *, title: str
) -> Figure:
    """Losses by step over those of one process, and below how many ranks have made each step."""
    figure = style.Picture(figsize=(style.WIDTH, 3.6))
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    steps = range(len(losses))
    above.plot(steps, wanted, color=GREY, linewidth=5, label="one process")
    above.plot(steps, losses, "o-", color=BLUE, markersize=4, linewidth=1.2, label="ranks, of which some die")
    above.set(ylabel="loss")
    above.legend(loc="upper right")
    ends = [*(done for done, *_ in history[1:]), len(losses)]
    for (done, ranks, generation), end in zip(history, ends):
        below.bar(done - 0.5, ranks, end - done, align="edge", color=SKY, edgecolor="white")
        below.text((done + end - 1) / 2, ranks / 2, f"{ranks}", **CENTRED)
        if done:
            above.axvline(done - 0.5, color=VERMILLION, linestyle=":", linewidth=1)
    below.set(xlabel="step", ylabel="ranks", yticks=range(0, 1 + max(ranks for _, ranks, _ in history), 2))
    return style.finished(figure, title)


def recovery_table(rows: Mapping[str, Mapping]) -> None:
    """Prints {method: {column: value}} with its columns to the right."""
    columns = list(next(iter(rows.values())))
    widths = [max(len(column), *(len(f"{row[column]:,}") for row in rows.values())) for column in columns]
    first = max(map(len, rows))
    print(" " * first, *(f"{column:>{width}}" for column, width in zip(columns, widths)), sep="   ")
    for name, row in rows.items():
        cells = (f"{row[column]:>{width},}" for column, width in zip(columns, widths))
        print(f"{name:{first}}", *cells, sep="   ")
