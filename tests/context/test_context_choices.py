"""The table of cores: names without torch, every name runs on its groups and equals one process, what is
refused is one line.
"""

import subprocess
import sys

import pytest

from minitrain import launch
from minitrain.compose.attention_cores import FUNCTIONS, core_for, data_layout
from minitrain.compose.attention_cores import LAYOUTS as LAYOUT_FUNCTIONS
from minitrain.context.core_names import CORES, LAYOUTS, check_choice
from minitrain.context.layout import zigzag
from minitrain.context.sliced import sliced
from minitrain.ranks.mesh import Mesh
from tests.context.cores import HEADS, in_one_process
from tests.context.runs import furthest, over
from tests.parallel import TOLERANCE

SIZES = {
    4: {
        "ring": {"ring": 4},
        "ring_self_attention": {"ring": 4},
        "gathered": {"ring": 4},
        "balanced": {"ring": 4},
        "burst": {"across": 2, "inside": 2},
        "double_ring": {"outer": 2, "inner": 2},
        "wallfacer": {"ring": 2, "team": 2},
        "ulysses": {"ulysses": 4},
        "usp": {"ring": 2, "ulysses": 2},
        "loongtrain": {"outer": 2, "inner": 1, "ulysses": 2},
    }
}


def test_names_need_no_torch_and_are_all_there():
    code = (
        "import sys; from minitrain.context.core_names import check_choice; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert CORES.keys() == FUNCTIONS.keys() == SIZES[4].keys() and LAYOUTS.keys() == LAYOUT_FUNCTIONS.keys()


def test_every_choice_equals_one_process():
    def rank():
        found = {}
        for name, sizes in SIZES[4].items():
            mesh = Mesh(**sizes)
            groups = {axis: mesh.group(axis) for axis in sizes}
            for layout in CORES[name].layouts:
                whole = data_layout(name, sizes, layout)
                found[name, layout] = furthest(
                    over(core_for(name, groups, layout), mesh.group(*sizes), whole, HEADS)[0],
                    in_one_process(),
                )
        return found

    for found in launch.run(rank, ranks=4):
        assert len(found) == (len(CORES) - 1) * 3 + 1 and max(found.values()) < TOLERANCE, found


@pytest.mark.parametrize("name", CORES)
def test_lengths_are_those_that_the_layout_takes(name):
    """A length that does not fit is refused on every rank alike, in one line; a padded one is taken."""
    sizes = SIZES[4][name]
    for layout in CORES[name].layouts:
        pieces = 4 * LAYOUTS[layout]
        for length in range(1, 66):
            for slices in (1, 2, (16, 8), (8, 12, 4)) if CORES[name].slices else (1,):
                found = set()
                for rank in range(4):
                    try:
                        found.add(sum(map(len, data_layout(name, sizes, layout, slices)(rank, 4, length))))
                    except ValueError as error:
                        assert "\n" not in str(error)
                        found.add(0)
                assert found in ({0}, {length / 4}), (layout, length, slices)
                assert length % pieces or slices != 1 or found == {length / 4}


def test_refusals_are_one_line():
    ring, usp = {"ring": 2}, {"ring": 2, "ulysses": 2}
    refused = {
        "no attention core 'rings'; did you mean 'ring'?": lambda: check_choice(
            "rings", ring, "zigzag", heads=4
        ),
        "no attention core 'x'; use ring, ring_self_attention, gathered, balanced": lambda: check_choice(
            "x", ring, "zigzag", heads=4
        ),
        "no layout 'zig'; did you mean 'zigzag'?": lambda: check_choice("ring", ring, "zig", heads=4),
        "balanced: layout 'zigzag'; it is written for contiguous": lambda: check_choice(
            "balanced", ring, "zigzag", heads=4
        ),
        "usp: groups ring; its groups of cp are ring, ulysses, in this order": lambda: check_choice(
            "usp", ring, "zigzag", heads=4
        ),
        "balanced: 2 slices of a sequence in the pipeline, and it takes whole ones": lambda: check_choice(
            "balanced", ring, "contiguous", heads=4, slices=2
        ),
        "usp: 3 heads of a rank cannot be dealt to ulysses=2; use 1, 3": lambda: check_choice(
            "usp", usp, "zigzag", heads=3
        ),
        "wallfacer: teams of 4 on 8 ranks": lambda: check_choice(
            "wallfacer", {"ring": 2, "team": 4}, "zigzag", heads=4
        ),
        "wallfacer: values 8 wide, keys 4": lambda: check_choice(
            "wallfacer", {"ring": 2, "team": 2}, "zigzag", heads=4, key_width=4, value_width=8
        ),
        "zigzag: T=30 is not a multiple of 4 pieces; pad the sequence to 32": lambda: zigzag(0, 2, 30),
        "slice 1 of 2, T=14: zigzag: T=6 is not a multiple of 4 pieces": lambda: sliced(zigzag, (8, 6))(
            0, 2, 14
        ),
        "slices of [8, 8] tokens are 16, the sequence has 24": lambda: sliced(zigzag, (8, 8))(0, 2, 24),
        "5 slices of T=8 over 2 ranks": lambda: sliced(zigzag, 5)(0, 2, 8),
    }
    for words, call in refused.items():
        with pytest.raises(ValueError) as error:
            call()
        assert words in str(error.value) and "\n" not in str(error.value), error.value
    for name, sizes in SIZES[4].items():
        check_choice(name, sizes, CORES[name].layouts[0], heads=4, slices=2 if CORES[name].slices else 1)
