"""The table of cores: names without torch, every name runs on its groups and equals one process, what is
refused is one line.
"""

import subprocess
import sys

import pytest

from minitrain import launch
from minitrain.context.choices import FUNCTIONS, core_for, data_layout
from minitrain.context.choices import LAYOUTS as LAYOUT_FUNCTIONS
from minitrain.context.names import CORES, LAYOUTS, check_choice, check_length, check_tokens
from minitrain.mesh import Mesh
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
    code = "import sys; from minitrain.context.names import check_choice, check_length; assert 'torch' not in sys.modules"
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
    """check_tokens says yes where the layout does, for whole sequences and slices."""
    sizes = SIZES[4][name]
    for layout in CORES[name].layouts:
        for length in range(1, 66):
            for slices in (1, 2, (16, 8), (8, 12, 4)) if CORES[name].slices else (1,):
                try:
                    [data_layout(name, sizes, layout, slices)(rank, 4, length) for rank in range(4)]
                    fits = True
                except ValueError:
                    fits = False
                try:
                    check_tokens(name, sizes, layout, length, slices)
                    assert fits, (layout, length, slices)
                except ValueError as error:
                    assert not fits, (layout, length, slices, error)
                    assert "\n" not in str(error)


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
        "ring, zigzag: T=30 is not a multiple of 4 on cp=2; pad the sequence to 32": lambda: check_tokens(
            "ring", ring, "zigzag", 30
        ),
        "slices of [8, 6] tokens are not all multiples of 4": lambda: check_tokens(
            "ring", ring, "zigzag", 14, (8, 6)
        ),
        "slices of [8, 8] tokens are 16, the sequence has 24": lambda: check_tokens(
            "ring", ring, "zigzag", 24, (8, 8)
        ),
        "5 slices of T=8 over 2 ranks": lambda: check_tokens("ring", ring, "zigzag", 8, 5),
        "sequence 2048 > max_positions 1024": lambda: check_length(1024, 2048),
    }
    for words, call in refused.items():
        with pytest.raises(ValueError) as error:
            call()
        assert words in str(error.value) and "\n" not in str(error.value), error.value
    for name, sizes in SIZES[4].items():
        check_choice(name, sizes, CORES[name].layouts[0], heads=4, slices=2 if CORES[name].slices else 1)
    check_length(1024, 1024)
