"""Parameters that know how they are cut: cutting and undoing, in any number of dims and groups."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from minitrain import collectives, launch
from minitrain.data_parallel import states
from minitrain.data_parallel.zero1 import Zero1
from minitrain.ranks.launch import dryrun
from minitrain.ranks.mesh import Mesh
from minitrain.ranks.sharding import (
    WHOLE,
    Placement,
    Shard,
    full_tensor,
    local_shard,
    numbers,
    place,
    placement,
    shard,
    whole_shape,
)


def cut_and_undo():
    mesh = Mesh(dp=2, tp=2)
    tp, dp = mesh.group("tp"), mesh.group("dp")
    whole = torch.arange(8.0 * 12).view(8, 12)
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
            # a gradient, say
            assert torch.equal(full_tensor(parameter * 2, parameter.placement.shards), whole * 2)
            parameter.data.zero_()
            assert whole.sum() > 0, "a shard is a copy"
    twice = shard(shard(whole, 0, tp), 0, dp)
    assert not isinstance(twice, nn.Parameter)
    place(twice, shards=twice.placement.shards[::-1])  # control: undone in the wrong order
    assert not torch.equal(full_tensor(twice), whole)
    calls = len(collectives.last_calls())
    shard(whole, 0, tp)
    assert len(collectives.last_calls()) == calls, "cutting sends nothing"


def test_what_is_cut_can_be_put_together_again():
    launch.run(cut_and_undo, ranks=4)


def padded():
    """Sizes the ranks do not divide, also a rank of nothing but padding; cut again along either dim."""
    world, mesh = collectives.world(), Mesh(dp=2, tp=2)
    tp, dp, rank = mesh.group("tp"), mesh.group("dp"), dist.get_rank()
    found = []
    once = [(length, [(0, world)]) for length in (10, 9, 5, 3, 8)]
    for length, cuts in (*once, (7, [(0, tp), (0, dp)]), (9, [(0, dp), (1, tp)]), (5, [(1, tp), (0, dp)])):
        whole = torch.arange(1.0, length * 4 + 1).view(length, 4)
        part = nn.Parameter(whole)
        for dim, group in cuts:
            part = shard(part, dim, group, pad=True)
        assert torch.equal(full_tensor(part), whole) and whole_shape(part) == [length, 4]
        assert torch.equal(local_shard(whole, part), part) and part.is_contiguous()
        assert torch.equal(full_tensor(part.detach() * 2, part.placement.shards), whole * 2)
        if len(cuts) == 1:  # equal slices, real rows first, zeros behind
            rows = -(-length // 4)
            mine = whole[rank * rows : (rank + 1) * rows]
            assert part.shape == (rows, 4) and torch.equal(part[: len(mine)], mine)
            assert not part[len(mine) :].any()
            found.append(len(mine))
    whole = torch.arange(10.0).view(2, 5)
    back = full_tensor(shard(whole, 1, tp, pad=True))  # the padding is inside of every row
    assert torch.equal(back, whole) and back.is_contiguous() and back.untyped_storage().nbytes() == 40
    return found


def test_slices_are_padded_where_the_ranks_do_not_divide():
    assert launch.run(padded, ranks=4) == [[3, 3, 2, 1, 2], [3, 3, 2, 1, 2], [3, 3, 1, 1, 2], [1, 0, 0, 0, 2]]
    size = lambda n: shard(torch.ones(n), 0, collectives.world(), pad=True).placement.shards[0].size
    assert dryrun.run(size, 10, ranks=4) == 10 and dryrun.run(size, 8, ranks=4) is None


def test_a_placement_is_one_record_that_grows():
    """What is written stays beside what is written later; a tensor that nobody placed is whole."""

    def rank():
        mesh = Mesh(dp=2, tp=2)
        tp, dp = mesh.group("tp"), mesh.group("dp")
        param = nn.Parameter(torch.ones(8, 4))
        assert placement(param) == WHOLE == Placement((), (), None, ()) and not placement(param).cut_over
        assert place(param, summed_over=(dp,)) is param
        cut = shard(place(param, copies=dp), 1, tp)
        assert cut.placement == Placement((Shard(1, tp),), (dp,), dp) and cut.placement.cut_over == (tp,)
        assert param.placement == Placement((), (dp,), dp), "the whole keeps its own"
        place(cut, inside=(dp,))
        assert cut.placement.cut_over == (dp, tp) and cut.placement.shards == (Shard(1, tp),)
        with pytest.raises(TypeError):
            place(param, shard=())
        return whole_shape(cut), list(local_shard(torch.ones(8, 4), cut).shape)

    assert launch.run(rank, ranks=4) == [([8, 4], [8, 2])] * 4


def bytes_sent():
    mesh = Mesh(dp=2, tp=2)
    parameter = shard(shard(nn.Parameter(torch.ones(8, 12)), 0, mesh.group("tp")), 1, mesh.group("dp"))
    full_tensor(parameter)
    return [(call.op, call.axis, call.sent_bytes) for call in collectives.last_calls()]


def test_undoing_gathers_the_last_cut_first():
    size, found = 8 * 12 * 4, launch.run(bytes_sent, ranks=4)
    assert found == [[("all_gather", "dp", size // 4), ("all_gather", "tp", size // 2)]] * 4


WRONG = [
    (
        lambda group: shard(torch.ones(4, 10), 1, group),
        "10 along dim 1 of [4, 10] is not a multiple of the 4 ranks",
    ),
    (lambda group: shard(torch.ones(4), 1, group), "shard: dim=1, but the tensor [4] has 1 dim"),
    (lambda group: shard(torch.tensor(1.0), 0, group), "shard: dim=0, but the tensor [] has 0 dims"),
    (
        lambda group: shard(shard(torch.ones(8, 8), 0, Mesh(dp=2, tp=2).group("tp")), 1, group),
        "ranks of world hold different slices already, cut over tp; cut over an axis whose ranks hold the",
    ),
    (lambda group: shard(torch.ones(4), 0, None), "group is None"),
]


@pytest.mark.parametrize("wrong, expected", WRONG)
def test_wrong_cuts_are_refused_in_one_line(wrong, expected):
    with pytest.raises(ValueError) as error:
        dryrun.run(lambda: wrong(dist.group.WORLD), ranks=4)
    assert expected in str(error.value) and "\n" not in str(error.value)


def cut_twice():
    mesh = Mesh(dp=2, tp=2)
    part = shard(shard(torch.arange(16.0).view(8, 2), 0, mesh.group("tp")), 0, mesh.group("dp"))
    assert part.flatten().tolist() == numbers(part, 0, 4).tolist()  # each element is its own number
    model = nn.Linear(4, 4, bias=False)
    model.weight = nn.Parameter(shard(model.weight.detach(), 0, mesh.group("tp")))
    model.weight.placement = shard(torch.ones(4, 4), 0, mesh.group("tp")).placement
    zero = Zero1(model, mesh.group("dp"), lambda params: torch.optim.SGD(params, lr=1.0))
    pieces = states.pieces(zero, mesh.group("tp"))
    return [[collectives.axis_of(group) for group in piece.holders] for piece in pieces]


def test_a_dim_is_cut_twice_and_ranks_with_another_slice_hold_no_copy():
    assert launch.run(cut_twice, ranks=4) == [[[]]] * 4
