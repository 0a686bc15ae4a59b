"""The table of cores: names without torch, each on its groups equals one process, refusals are one line."""

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

LENGTHS = {1: (4,), 2: (2, 2), 3: (2, 1, 2)}  # of 4 ranks, by the number of a core's axes
SIZES = {name: dict(zip(kind.axes, LENGTHS[len(kind.axes)])) for name, kind in CORES.items()}


def test_names_need_no_torch_and_are_all_there():
    code = "import sys, minitrain.context.core_names; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert CORES.keys() == FUNCTIONS.keys() and LAYOUTS.keys() == LAYOUT_FUNCTIONS.keys()


def test_every_choice_equals_one_process():
    def rank():
        found = {}
        for name, sizes in SIZES.items():
            mesh = Mesh(**sizes)
            groups = {axis: mesh.group(axis) for axis in sizes}
            for layout in CORES[name].layouts:
                core, whole = core_for(name, groups, layout), data_layout(name, sizes, layout)
                ours, _ = over(core, mesh.group(*sizes), whole, HEADS)
                found[name, layout] = furthest(ours, in_one_process())
        return found

    for found in launch.run(rank, ranks=4):
        assert len(found) == (len(CORES) - 1) * 3 + 1 and max(found.values()) < TOLERANCE, found


@pytest.mark.parametrize("name", CORES)
def test_lengths_are_those_that_the_layout_takes(name):
    """A length that does not fit is refused on every rank alike, in one line; a padded one is taken."""
    sizes = SIZES[name]
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
