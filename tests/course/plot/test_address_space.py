"""The pictures of address spaces: what is drawn is what the replay wrote down, and everything fits."""

import matplotlib
import pytest

from minitrain.course.plot.address_space import address_space, strips
from minitrain.course.plot.style import PALE, SKY, VERMILLION
from minitrain.systems.simulate.allocator import CachingAllocator, StitchingAllocator
from minitrain.systems.simulate.device_memory import (
    REGION,
    Lifetime,
    MiB,
    Replay,
    checkpointed,
    replay,
    with_region,
)
from tests.course.plot.pictures import LONG, check

TRACE = checkpointed(10, work_bytes=100 * MiB, checkpoint_bytes=68 * MiB, asked_bytes=300 * MiB)
KINDS = {block: "checkpoints" for block in range(10)} | {block: "activations" for block in range(10, 20)}
DIED = replay(TRACE, CachingAllocator(1000 * MiB))
PAGES = replay(TRACE, CachingAllocator(1000 * MiB, "expandable_segments:True"))
STITCHED = replay(TRACE, StitchingAllocator(1000 * MiB))
REGIONAL = replay(with_region(TRACE, range(10)), CachingAllocator(1000 * MiB))
PICTURES = {
    "died": lambda: address_space(DIED, KINDS, title=LONG),
    "pages": lambda: address_space(PAGES, KINDS, title=LONG),
    "no kinds": lambda: address_space(STITCHED, title=""),
    "nothing": lambda: address_space(Replay([]), title=""),
    "strips": lambda: strips(
        {
            "segments": (DIED, 29),
            "expandable": (PAGES, 30),
            "stitched": (STITCHED, 30),
            "region": (REGIONAL, REGIONAL.events - 1),
        },
        KINDS | {REGION: "region"},
        title=LONG,
    ),
}


def colour(patch):
    return matplotlib.colors.to_hex(patch.get_facecolor()).upper()


def areas(figure):
    """{colour: bytes times events} of all that address_space drew, in MiB."""
    found = {}
    for boxes in figure.axes[0].collections:
        name = matplotlib.colors.to_hex(boxes.get_facecolor()[0]).upper()
        sizes = [path.get_extents() for path in boxes.get_paths()]
        found[name] = sum(box.width * box.height for box in sizes)
    return found


@pytest.mark.parametrize("name", PICTURES)
def test_everything_fits_and_the_file_is_small(name):
    check(PICTURES[name])


def test_blocks_are_as_large_as_their_bytes_and_lives():
    """The areas are sums over the replay: of kinds, and of what is reserved."""
    drawn = areas(PICTURES["died"]())
    work = sum(100 * MiB for _ in range(10))  # each for one event
    kept = sum(68 * MiB * (30 - (3 * i + 2)) for i in range(10))
    assert drawn[SKY] == pytest.approx(work / MiB)
    assert sum(drawn.values()) - drawn[SKY] - drawn[PALE.upper()] == pytest.approx(kept / MiB)
    assert drawn[PALE.upper()] == pytest.approx(sum(DIED.reserved) / MiB)


def test_the_request_that_failed_is_drawn_to_scale():
    ax = PICTURES["died"]().axes[0]
    (box,) = [patch for patch in ax.patches if patch.get_hatch()]
    assert box.get_height() == pytest.approx(300) and box.get_x() >= DIED.events
    assert matplotlib.colors.to_hex(box.get_edgecolor()).upper() == VERMILLION
    assert [text.get_text() for text in ax.texts] == ["asked for: 300 MiB\nlargest hole: 32 MiB"]
    assert not [patch for patch in PICTURES["pages"]().axes[0].patches if patch.get_hatch()]


def test_strips_show_the_holes_between():
    """In the first line ten holes of 32 MiB; the last request lies in two pieces where it was stitched."""
    ax = PICTURES["strips"]().axes[0]
    rows = [[p for p in ax.patches if p.get_y() == pytest.approx(row - 0.35)] for row in range(4)]
    pale = PALE.upper()
    shown = lambda row, hole: [p for p in row if (colour(p) == pale) == hole]
    widths = [[sum(p.get_width() for p in shown(row, hole)) for hole in (True, False)] for row in rows]
    assert widths[0] == pytest.approx([1000, 680])
    for row in widths[1:]:
        assert row == pytest.approx([980, 980])
    assert len([p for p in rows[2] if colour(p) != pale]) == 10 + 2
    assert [text.get_text() for text in ax.texts][0] == "680 of 1,000 MiB in use"
    assert [label.get_text() for label in ax.get_yticklabels()] == [
        "segments", "expandable", "stitched", "region",
    ]  # fmt: skip


def test_too_many_blocks_are_refused():
    blocks = [Lifetime(block, 0, 1, 1) for block in range(20_001)]
    with pytest.raises(ValueError, match="20,001 blocks cannot be read as a picture; replay a part"):
        address_space(Replay([], placed=blocks), title="")
