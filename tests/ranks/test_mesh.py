"""The mesh: the groups of torch's DeviceMesh, any of them flattened, at any size, and one-line errors."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from minitrain import collectives, launch
from minitrain.ranks.launch import dryrun
from minitrain.ranks.mesh import Mesh

SHAPES = [{"dp": 4}, {"dp": 2, "tp": 2}, {"dp": 2, "pp": 1, "tp": 2}, {"tp": 1, "dp": 4}]


def compare_with_torch(shapes):
    for shape in shapes:
        ours, names = Mesh(**shape), tuple(shape)
        theirs = init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=names)
        for axis in shape:
            members = dist.get_process_group_ranks(theirs.get_group(axis))
            assert dist.get_process_group_ranks(ours.group(axis)) == members == ours.members(axis)
            assert ours.group(axis) is ours.group(axis)
            ranks = ours.rank(axis), ours.group(axis).rank(), ours.coordinates[axis]
            assert ranks == (theirs.get_local_rank(axis),) * 3
            assert ours.size(axis) == shape[axis] == ours.group(axis).size()
            assert collectives.axis_of(ours.group(axis)) == axis
            total = collectives.all_reduce(torch.tensor(dist.get_rank()), ours.group(axis))
            assert total.item() == sum(members)
        assert ours.shape == shape
    assert collectives.axis_of(dist.group.WORLD) == "world"


@pytest.mark.parametrize(
    "ranks, shapes", [(4, SHAPES), (8, [{"dp": 2, "cp": 2, "tp": 2}, {"pp": 4, "tp": 2}])]
)
def test_groups_are_those_of_torchs_device_mesh(ranks, shapes):
    launch.run(compare_with_torch, shapes, ranks=ranks, timeout_s=120)


def flattened():
    mesh = Mesh(dp=2, cp=2, tp=2)
    group, me = mesh.group("dp", "cp"), mesh.coordinates
    assert group is mesh.group("cp", "dp") and collectives.axis_of(group) == "dp_cp"
    assert mesh.rank("cp", "dp") == group.rank() == me["dp"] * 2 + me["cp"] and mesh.size("dp", "cp") == 4
    everyone = mesh.group("dp", "cp", "tp")
    assert mesh.members("dp", "cp", "tp") == list(range(8)) and everyone.rank() == dist.get_rank()
    assert collectives.axis_of(everyone) == "dp_cp_tp"
    return mesh.members("dp", "cp")


def test_several_axes_make_one_group_in_mesh_order():
    members = launch.run(flattened, ranks=8, timeout_s=120)
    assert members == [[0, 2, 4, 6] if rank % 2 == 0 else [1, 3, 5, 7] for rank in range(8)]


def made_by_its_members_only():
    mesh = Mesh(pp=2, dp=2, cp=1)
    if mesh.rank("pp") == 0:
        return collectives.all_reduce(torch.ones(1), mesh.group("dp", "cp")).item()
    return 0


def test_a_flattened_group_waits_for_nobody_but_its_members():
    assert launch.run(made_by_its_members_only, ranks=4, timeout_s=20) == [2, 2, 0, 0]


def parts_of_a_pipeline():
    """The ends of each pipeline, and two stages in the middle: who is in one has it, the others None."""
    mesh = Mesh(dp=2, pp=4)
    ends, middle = mesh.part("pp", (0, 3)), mesh.part("pp", (1, 2))
    assert mesh.part("pp", (0, 3)) is ends and collectives.axis_of(ends or middle) == "pp"
    here = mesh.rank("pp")
    assert (ends is None) == (here in (1, 2)) and (middle is None) == (here in (0, 3))
    one = torch.tensor([dist.get_rank()])
    return (ends or middle).rank(), collectives.all_gather(one, ends or middle).tolist()


def test_some_ranks_of_an_axis_are_a_group():
    found = launch.run(parts_of_a_pipeline, ranks=8, timeout_s=120)
    first, second = [[0, 3], [1, 2], [1, 2], [0, 3]], [[4, 7], [5, 6], [5, 6], [4, 7]]
    assert [members for _, members in found] == first + second
    assert [number for number, _ in found] == [0, 0, 1, 1] * 2


def test_a_second_group_of_the_same_ranks():
    def rank():
        mesh = Mesh(dp=2, pp=2)
        twin = mesh.twin("pp")
        assert twin is mesh.twin("pp") is not mesh.group("pp") and twin.rank() == mesh.rank("pp")
        return dist.get_process_group_ranks(twin), collectives.axis_of(twin)

    assert launch.run(rank, ranks=4) == [([0, 1], "pp"), ([0, 1], "pp"), ([2, 3], "pp"), ([2, 3], "pp")]


def blocks_of_a_row():
    mesh, names = Mesh(dp=8, tp=2), ("near", "far")
    whole, rows = mesh.blocks("dp", size=2, names=names), mesh.blocks("dp", size=2, names=names, of=4)
    assert whole is mesh.blocks("dp", size=2, names=names) is mesh.blocks("dp", size=2, names=names, of=8)
    assert [collectives.axis_of(group) for group in (*whole, *rows)] == [*names, *names]
    return [dist.get_process_group_ranks(group) for group in (*whole, *rows)]


def test_blocks_inside_an_axis_and_inside_its_rows():
    """This one's block, and the ranks at its place in every block: of all 8 of dp, and of its own row of 4."""
    found = dryrun.run(blocks_of_a_row, rank=13, ranks=16)
    assert found == [[13, 15], [1, 5, 9, 13], [13, 15], [9, 13]]
    assert dryrun.run(blocks_of_a_row, rank=2, ranks=16) == [[0, 2], [2, 6, 10, 14], [0, 2], [2, 6]]


def test_the_picture():
    picture = dryrun.run(lambda: Mesh(dp=2, pp=1, tp=3).draw(), rank=4, ranks=6)
    assert (
        picture
        == """\
Mesh(dp=2, pp=1, tp=3): 6 ranks, tp to the right
  dp=0 pp=0  0  1  2
  dp=1 pp=0  3 *4  5
dp groups: [0 3] [1 4] [2 5]
pp groups: [0] [1] [2] [3] [4] [5]
tp groups: [0 1 2] [3 4 5]"""
    )


WRONG = [
    (lambda: Mesh(dp=4, tp=4), "is 16 ranks, but the job has 6; choose sizes whose product is 6"),
    (lambda: Mesh(), "Mesh has no axes; name at least one, such as Mesh(dp=6)"),
    (lambda: Mesh(dp=6, tp=0), "tp=0: use a whole number from 1 to"), (lambda: Mesh(dp=6.0), "dp=6.0: use"),
    (lambda: Mesh(dp=6).group("tp"), "group('tp'): the mesh has no such axis; its axes are dp"),
    (lambda: Mesh(dp=6).part("pp", (0, 1)), "part('pp'): the mesh has no such axis; its axes are dp"),
    (lambda: Mesh(dp=6).size("dp", "dp"), "size('dp', 'dp'): name each axis once"),
    (lambda: Mesh(dp=6).rank(), "rank(): name each axis once, at least one of dp"),
]  # fmt: skip


@pytest.mark.parametrize("wrong, expected", WRONG)
def test_wrong_meshes_are_refused_in_one_line(wrong, expected):
    with pytest.raises(ValueError) as error:
        dryrun.run(wrong, ranks=6)
    assert expected in str(error.value) and "\n" not in str(error.value)


def test_a_twin_has_both_names():
    twin = lambda: Mesh(tp=2, dp=4).twin("tp", "dp").group_desc
    assert dryrun.run(twin, rank=0, ranks=8) == "mesh_tp_dp"
