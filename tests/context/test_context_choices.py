"""The table of cores: names without torch, every name runs on its groups and equals one process, what is
refused is one line."""

import subprocess
import sys

import pytest

from minitrain import launch
from minitrain.compose.attention_cores import FUNCTIONS, core_for, data_layout
from minitrain.compose.attention_cores import LAYOUTS as LAYOUT_FUNCTIONS
from minitrain.context.core_names import CORES, LAYOUTS
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
