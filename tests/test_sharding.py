"""Parameters that know how they are cut: cutting and undoing, in any number of dims and groups."""
import pytest
import torch
import torch.distributed as dist
from torch import nn

from minitrain import collectives, dryrun, launch
from minitrain.mesh import Mesh
from minitrain.sharding import Shard, full_tensor, place, placement, shard


def cut_and_undo():
    mesh = Mesh(dp=2, tp=2)
    tp, dp = mesh.group("tp"), mesh.group("dp")
    whole = torch.arange(8. * 12).view(8, 12)
    for cuts in ([], [(0, tp)], [(-1, tp)], [(1, dp), (0, tp)], [(0, tp), (0, dp)], [(-1, dist.group.WORLD)]):
        parameter = nn.Parameter(whole, requires_grad=len(cuts) != 1)
        expected = whole
        for dim, group in cuts:
            parameter, requires_grad = shard(parameter, dim, group), parameter.requires_grad
            expected = expected.chunk(group.size(), dim)[group.rank()]
            assert isinstance(parameter, nn.Parameter) and parameter.requires_grad == requires_grad
            assert torch.equal(parameter, expected) and parameter.is_contiguous()
        assert placement(parameter).shards == tuple(Shard(dim % 2, group) for dim, group in cuts)
        assert torch.equal(full_tensor(parameter), whole) and not full_tensor(parameter).requires_grad
        if cuts:
            assert torch.equal(full_tensor(parameter * 2, parameter.placement.shards), whole * 2)      # a gradient, say
            parameter.data.zero_()
            assert whole.sum() > 0, "a shard is a copy"
    twice = shard(shard(whole, 0, tp), 0, dp)
    assert not isinstance(twice, nn.Parameter)
    place(twice, shards=twice.placement.shards[::-1])       # control: undone in the wrong order
    assert not torch.equal(full_tensor(twice), whole)
    calls = len(collectives.last_calls())
    shard(whole, 0, tp)
    assert len(collectives.last_calls()) == calls, "cutting sends nothing"


def test_what_is_cut_can_be_put_together_again():
    launch.run(cut_and_undo, ranks=4)


def bytes_sent():
    mesh = Mesh(dp=2, tp=2)
    parameter = shard(shard(nn.Parameter(torch.ones(8, 12)), 0, mesh.group("tp")), 1, mesh.group("dp"))
    full_tensor(parameter)
    return [(call.op, call.axis, call.sent_bytes) for call in collectives.last_calls()]


def test_undoing_gathers_the_last_cut_first():
    size = 8 * 12 * 4
    assert launch.run(bytes_sent, ranks=4) == [[("all_gather", "dp", size // 4), ("all_gather", "tp", size // 2)]] * 4


WRONG = {
    "uneven": (lambda group: shard(torch.ones(4, 10), 1, group),
               "shard: 10 along dim 1 of [4, 10] is not a multiple of the 4 ranks of world; pad the tensor"),
    "dim": (lambda group: shard(torch.ones(4), 1, group), "shard: dim=1, but the tensor [4] has 1 dim"),
    "scalar": (lambda group: shard(torch.tensor(1.), 0, group), "shard: dim=0, but the tensor [] has 0 dims"),
    "cut already": (lambda group: shard(shard(torch.ones(8, 8), 0, Mesh(dp=2, tp=2).group("tp")), 1, group),
                    "ranks of world hold different slices already, cut over tp; cut over an axis whose ranks hold the"),
    "no group": (lambda group: shard(torch.ones(4), 0, None), "group is None"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_cuts_are_refused_in_one_line(case):
    wrong, expected = WRONG[case]
    with pytest.raises(ValueError) as error:
        dryrun.run(lambda: wrong(dist.group.WORLD), ranks=4)
    assert expected in str(error.value) and "\n" not in str(error.value)
