"""What docstrings say of collectives, the log, the ledger, the mesh and buckets, where one line would break it."""

import pytest
import torch
from torch import nn

from minitrain import collectives, launch
from minitrain.data_parallel.bucketed import GradReducer
from minitrain.data_parallel.zero1 import Zero1
from minitrain.data_parallel.zero2 import Zero2, grad_of
from minitrain.ranks.collectives import arguments, call_log, checked, transport
from minitrain.ranks.collectives.call_log import SLOTS, Call
from minitrain.ranks.launch import dryrun
from minitrain.ranks.ledger import Ledger
from minitrain.ranks.mesh import Mesh
from minitrain.ranks.process import Process
from minitrain.ranks.sharding import numbers, shard
from minitrain.systems.tensor_parallel.grids.optimus import norm_forward
from minitrain.tensor_parallel.vocabulary import owned


def call(number: int = 0, **more) -> Call:
    return Call(number, "all_reduce", "world", (0, 1), "0,1", 8, (2,), torch.float32, "a.py:1", **more)


# ---- collectives and their log ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rank, ranks, source, children", [(0, 8, 0, [4, 2, 1]), (3, 7, 3, [0, 5, 4]), (6, 8, 2, [0, 7])]
)
def test_a_broadcast_goes_to_the_largest_subtree_first(rank, ranks, source, children):
    assert transport.tree_children(rank, ranks, source) == children


def test_of_a_long_field_the_tail_counts_too():
    first, second = (checked.pack("all_reduce", "x" * 200 + end, "a.py:1") for end in "ab")
    assert first != second


@pytest.mark.parametrize(
    "ranks, text", [((0, 1, 2), "0-2"), ((0, 1), "0,1"), ((0, 2, 5), "0,2,5"), ((1, 3, 5, 7), "1,3,5,7")]
)
def test_only_neighbours_are_a_span(ranks, text):
    assert call_log.span(ranks) == text


def test_a_site_holds_inside_its_block_only():
    with call_log.standing_at("model.py:7"):
        assert call_log.call_site() == "model.py:7"
    assert call_log.call_site().startswith("test_account_promises.py:")


def test_the_oldest_call_of_a_full_log_can_still_be_marked_and_one_that_is_gone_marks_nothing(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(call_log, "PROCESS", Process())
    call_log.log_to(tmp_path / "log")
    calls = [call_log.issued(call(number, group="group 7")) for number in range(SLOTS)]
    call_log.finished(calls[0])
    assert [one.done for one in call_log.read_log(tmp_path / "log")] == [True] + [False] * (SLOTS - 1)
    assert {one.group for one in call_log.read_log(tmp_path / "log")} == {"group 7"}
    call_log.issued(call(SLOTS))
    call_log.finished(calls[0])
    assert not any(one.done for one in call_log.read_log(tmp_path / "log"))


def one_error_in_each_lane():
    def fail():
        raise RuntimeError("lost")

    for lane in arguments.channel_of(collectives.world()).lanes:
        lane.submit(fail)
    found = []
    for _ in range(3):
        try:
            arguments.settle()
        except RuntimeError as error:
            found.append(str(error))
    return found


def test_every_lane_s_error_is_told():
    assert (
        launch.run(one_error_in_each_lane, ranks=1)[0]
        == ["lost; nobody waited for this asynchronous call"] * 2
    )


def peer_and_bytes():
    mesh, seen = Mesh(dp=2, tp=2), []
    with (
        collectives.observe(lambda kind, subject: seen.append(subject) if kind == "issue" else None),
        Ledger() as ledger,
    ):
        collectives.send(torch.ones(4), 0, mesh.group("tp"))
        collectives.all_to_all(torch.ones(4), mesh.group("tp"), send_sizes=[1, 3], receive_sizes=[2, 3])
    return seen[0].peer, ledger.sent_bytes("all_to_all")


def test_a_peer_is_a_global_rank_and_the_plan_leaves_out_the_own_piece():
    assert dryrun.run(peer_and_bytes, rank=3, ranks=4) == (2, 1 * 4)


# ---- the ledger -------------------------------------------------------------------------------------------


def test_phases_nest():
    with Ledger() as ledger, ledger.phase("outer"):
        with ledger.phase("inner"):
            torch.ones(3) + 1
        torch.ones(3) + 1
    assert [event.phase for event in ledger.events if event.name == "add"] == ["inner", "outer"]


def summed():
    with Ledger() as ledger:
        collectives.all_reduce(torch.ones(8), collectives.world())
        collectives.all_gather(torch.ones(8, dtype=torch.bfloat16), collectives.world())
    return ledger.sent_by_dtype


def test_bytes_by_dtype_are_those_that_were_sent():
    assert dryrun.run(summed, rank=0, ranks=4) == {"float32": 2 * 3 * 8, "bfloat16": 3 * 16}


def test_gathered_parameters_that_were_there_before_stand_apart():
    x = torch.ones(100)
    with Ledger() as ledger:
        x + 1
        call_log.announce("resized", x)
    first = ledger.timeline(gathered=True)[0][1]
    assert (first["gathered parameters"], first["buffers"]) == (400, 0)


def test_what_is_made_after_an_optimizer_s_step_is_no_scratch_of_it():
    weight = nn.Parameter(torch.ones(10))
    weight.grad = torch.ones(10)
    with Ledger() as ledger:
        torch.optim.SGD([weight], lr=1.0).step()
        kept = torch.ones(100) * 2
    assert ledger.live_by_kind["activations"] == kept.nbytes


def test_a_gather_reads_what_it_gives_and_its_index():
    table, index = torch.ones(1000, 1), torch.zeros(2, 1, dtype=torch.int64)
    with Ledger() as ledger:
        table.gather(0, index)
    assert [event.bytes for event in ledger.events] == [2 * 4 + 2 * 8 + 2 * 4]


# ---- mesh and sharding ------------------------------------------------------------------------------------


def drawn():
    return Mesh(tp=8).draw(), Mesh(tp=2, dp=4).twin("tp", "dp").group_desc


def test_eight_columns_are_all_there_is_and_a_twin_has_both_names():
    picture, twin = dryrun.run(drawn, rank=0, ranks=8)
    assert "..." not in picture and twin == "mesh_tp_dp"


def cut_twice():
    mesh = Mesh(dp=2, tp=2)
    part = shard(shard(torch.arange(16.0).view(8, 2), 0, mesh.group("tp")), 0, mesh.group("dp"))
    assert part.flatten().tolist() == numbers(part, 0, 4).tolist()  # each element is its own number
    model = nn.Linear(4, 4, bias=False)
    model.weight = nn.Parameter(shard(model.weight.detach(), 0, mesh.group("tp")))
    model.weight.placement = shard(torch.ones(4, 4), 0, mesh.group("tp")).placement
    zero = Zero1(model, mesh.group("dp"), lambda params: torch.optim.SGD(params, lr=1.0))
    return [
        [collectives.axis_of(group) for group in piece.holders] for piece in zero.pieces(mesh.group("tp"))
    ]


def test_a_dim_is_cut_twice_and_ranks_with_another_slice_hold_no_copy():
    assert launch.run(cut_twice, ranks=4) == [[[]]] * 4


# ---- buckets ----------------------------------------------------------------------------------------------


def on_one_rank():
    world, adagrad = collectives.world(), lambda params: torch.optim.Adagrad(params, lr=1.0)
    pair = [nn.Parameter(torch.ones(size)) for size in (3, 5)]
    reducer = GradReducer(pair, world)
    pair[1].sum().backward()
    with pytest.raises(ValueError, match=r"^1 parameters got no gradient \(shapes \[\(3,\)\]\)"):
        reducer.finish()
    reducer.close()
    for param in pair:
        param.grad = None

    mixed = nn.ParameterList([torch.ones(3), torch.ones(3, dtype=torch.bfloat16)])
    zero = Zero1(mixed, world, adagrad)
    assert [flat.shard.dtype for flat in zero.flats] == [
        param.dtype for flat in zero.flats for param in flat.params
    ]
    assert set(zero.optimizer.state) == {flat.shard for flat in zero.flats}

    zero, sent = Zero2(nn.ParameterList(pair), world, adagrad, bucket_bytes=1), []
    zero.driven = True
    for param in zero.trainable:
        param.grad = torch.ones_like(param)
    with collectives.observe(lambda kind, subject: sent.append(subject.shape) if kind == "issue" else None):
        zero.arrived(zero.trainable)
        zero.finish()
    return sent


def test_what_lacks_a_gradient_is_counted_dtypes_keep_apart_and_the_last_parameter_goes_first():
    assert launch.run(on_one_rank, ranks=1) == [[(5,), (3,)]]


def test_a_missing_gradient_is_zeros_of_the_gradient_s_dtype():
    param = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    param.grad_dtype = torch.float32
    assert grad_of(param).dtype == torch.float32


def ids_outside():
    found = []
    for ids in ([[2, -3]], [[2, 9]]):
        with pytest.raises(ValueError) as caught:
            owned(torch.tensor(ids), 8, 8, collectives.world(), "token %s; the vocabulary is %s")
        found.append(str(caught.value))
    return found


def test_an_id_on_either_side_of_the_vocabulary_is_told():
    assert launch.run(ids_outside, ranks=1)[0] == [
        f"token {wrong}; the vocabulary is 8 (0..7)" for wrong in (-3, 9)
    ]


def normed():
    x, generator = torch.empty(8, 512, dtype=torch.bfloat16), torch.Generator().manual_seed(0)
    x.normal_(generator=generator)
    y, mean, scale = norm_forward(x, torch.ones(512, dtype=x.dtype), 1e-5, True, collectives.world())
    exact = nn.functional.layer_norm(x.float(), (512,), eps=1e-5).bfloat16()
    return y.dtype, mean.dtype, scale.dtype, (y == exact).float().mean().item()


def test_norms_on_a_grid_are_added_up_in_float32():
    *dtypes, equal = launch.run(normed, ranks=1)[0]
    assert dtypes == [torch.bfloat16, torch.float32, torch.float32] and equal > 0.99
