"""ZeRO++: its collectives send what they say and put slices in place; errors are those of the codes."""

import math

import pytest
import torch
from torch import Tensor

from minitrain import collectives, launch
from minitrain.precision.blocks import Blocks, dequantize, quantize
from minitrain.ranks.launch import dryrun
from minitrain.ranks.ledger import Ledger
from minitrain.ranks.mesh import Mesh
from minitrain.systems.data_parallel import zeropp
from minitrain.systems.data_parallel.zeropp import quantized_all_gather, two_hop_reduce_scatter
from tests.parallel import Traffic
from tests.precision.test_block_scales import half_steps

D, BLOCK = 75, 16  # numbers in a slice; the last block of each has 11


def there_and_back(x: Tensor, bits: int, block: int) -> Tensor:
    return dequantize(quantize(x, Blocks(f"int{bits}", (block,)), fill=True), x.dtype)


def code_bytes(d: int, bits: int) -> int:
    return math.ceil(d * bits / 8)


def scale_bytes(d: int, block: int) -> int:
    return 4 * math.ceil(d / block)


def gradient(rank: int, ranks: int, dtype=torch.float64) -> Tensor:
    """What a rank adds: slices and ranks of very different sizes, so that a wrong place is a large error."""
    flat = torch.randn(ranks, D, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    return (flat * 10.0 ** torch.arange(ranks).unsqueeze(1) * (1 + rank)).view(-1).to(dtype)


def every_collective(nodes: int):
    """What is tested on ranks in one launch: {name: (result, bytes within nodes, to others, by world)}."""
    mesh = Mesh(inter=nodes, intra=collectives.world().size() // nodes)
    intra, inter, world = mesh.group("intra"), mesh.group("inter"), collectives.world()
    flat = gradient(world.rank(), world.size())
    calls = {
        ("gather", bits): lambda bits=bits: quantized_all_gather(flat[:D].float(), world, bits, BLOCK)
        for bits in (4, 8)
    }
    for bits in (4, 8, None):
        calls["two", bits] = lambda bits=bits: two_hop_reduce_scatter(flat, intra, inter, bits, BLOCK)
    swapped = flat.view(intra.size(), inter.size(), D).transpose(0, 1).reshape(-1)  # undoes the reordering
    calls["not reordered", None] = lambda: two_hop_reduce_scatter(swapped, intra, inter, None)
    calls["half", None] = lambda: two_hop_reduce_scatter(flat.bfloat16(), intra, inter, None)
    calls["half", 8] = lambda: two_hop_reduce_scatter(flat.bfloat16(), intra, inter, 8, BLOCK)
    results = {}
    for name, call in calls.items():
        with Traffic() as ledger:
            result = call()
        results[name] = (result, *(ledger.sent_bytes(axis=axis) for axis in ("intra", "inter", "world")))

    exchange = zeropp.all_to_all
    zeropp.all_to_all = lambda x, group: x if group is inter else exchange(x, group)
    results["no second hop", None] = (two_hop_reduce_scatter(flat, intra, inter, None), 0, 0, 0)
    zeropp.all_to_all = exchange

    before = len(collectives.last_calls())
    for call in (
        lambda: two_hop_reduce_scatter(flat[1:], intra, inter, 4, BLOCK),
        lambda: two_hop_reduce_scatter(flat, intra, inter),  # a block is longer than a slice
        lambda: two_hop_reduce_scatter(flat, intra, inter, 3, BLOCK),
        lambda: quantized_all_gather(flat, world, None, BLOCK),
        lambda: two_hop_reduce_scatter(flat.view(-1, D), intra, inter, 4, BLOCK),
        lambda: two_hop_reduce_scatter(flat.int(), intra, inter, 4, BLOCK),
    ):
        with pytest.raises(ValueError, match="block=256|bits=|cannot be cut into"):
            call()
    assert len(collectives.last_calls()) == before, "refused before any rank waits"
    return results


@pytest.fixture(
    scope="module",
    params=[(4, 2), (6, 2), (2, 1), (2, 2)],
    ids=["2 nodes of 2", "2 nodes of 3", "1 node of 2", "2 nodes of 1"],
)
def job(request):
    ranks, nodes = request.param
    return ranks, nodes, launch.run(every_collective, nodes, ranks=ranks)


def exact_slices(ranks: int) -> Tensor:
    """[rank, d]: what a reduce-scatter over the world gives each rank."""
    return sum(gradient(rank, ranks) for rank in range(ranks)).view(ranks, D)


def error(results: list[dict], name: tuple, expected: Tensor) -> Tensor:
    """[rank, d], as a fraction of the largest number of each slice."""
    difference = torch.stack([result[name][0].double() for result in results]) - expected
    return difference.abs() / expected.abs().amax(1, keepdim=True)


def test_unquantised_hops_are_the_reduce_scatter(job):
    ranks, _, results = job
    assert error(results, ("two", None), exact_slices(ranks)).max() < 1e-12


def test_without_reordering_slices_are_on_wrong_ranks_and_without_the_second_hop_nodes_are_missing(job):
    ranks, nodes, results = job
    exact, places = exact_slices(ranks), ranks // nodes
    transposed = torch.stack([exact[(rank % places) * nodes + rank // places] for rank in range(ranks)])
    assert error(results, ("not reordered", None), transposed).max() < 1e-12
    far = error(results, ("not reordered", None), exact).amax(1)
    assert (far > 0.1).nonzero().flatten().tolist() == {4: [1, 2], 6: [1, 2, 3, 4], 2: []}[ranks]
    lost = error(results, ("no second hop", None), exact).amax(1)
    assert (lost > 0.1).all() if nodes > 1 else (lost < 1e-12).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_gathered_shards_are_the_same_bits_on_all_ranks_and_within_half_a_step(job, bits):
    ranks, _, results = job
    shards = torch.stack([gradient(rank, ranks)[:D].float() for rank in range(ranks)])
    for result in results:
        whole = result["gather", bits][0]
        assert torch.equal(whole, results[0]["gather", bits][0])
        assert not torch.equal(whole.view(ranks, D), shards)
        assert torch.equal(whole.view(ranks, D), there_and_back(shards, bits, BLOCK))
        assert ((whole.view(ranks, D) - shards).abs() <= half_steps(shards, bits, BLOCK) * (1 + 2**-14)).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_sums_are_within_half_a_step_for_every_time_a_number_is_quantised(job, bits):
    ranks, nodes, results = job
    given = torch.stack([gradient(rank, ranks).view(ranks, D) for rank in range(ranks)])  # [from, slice, d]
    exact, once = given.sum(0), half_steps(given, bits, BLOCK)
    of_node = given.unflatten(0, (nodes, -1)).sum(1)  # [node, slice, d]
    first = once.unflatten(0, (nodes, -1)).sum(1)
    again = half_steps(of_node.abs() + first, bits, BLOCK)  # partial sums that are not exact any more
    worst = torch.stack([result["two", bits][0] for result in results]) - exact
    assert (worst.abs() <= (first + again).sum(0) * (1 + 2**-13)).all() and worst.abs().max() > 0

    replayed = there_and_back(given, bits, BLOCK).unflatten(0, (nodes, -1)).sum(1)  # in one process
    replayed = there_and_back(replayed, bits, BLOCK).sum(0)
    assert error(results, ("two", bits), replayed).max() < 1e-12


def test_half_precision_is_added_in_full(job):
    ranks, nodes, results = job
    assert all(result["half", bits][0].dtype == torch.bfloat16 for result in results for bits in (None, 8))
    assert error(results, ("half", None), exact_slices(ranks)).max() < 3 * 2**-8
    flats = [gradient(rank, ranks, torch.bfloat16) for rank in range(ranks)]
    given = torch.stack(flats).view(ranks, ranks, D).float()
    of_node = there_and_back(given, 8, BLOCK).unflatten(0, (nodes, -1)).sum(1)  # in one process, in float32
    expected = there_and_back(of_node, 8, BLOCK).sum(0).bfloat16()
    equal = torch.stack([result["half", 8][0] for result in results]) == expected
    assert equal.float().mean() > 0.98, "only the result is rounded to bfloat16"
    again = of_node.bfloat16().float()  # control: the partial sums are rounded too
    rounded = there_and_back(again, 8, BLOCK).sum(0).bfloat16()
    assert ranks == nodes or (rounded == expected).float().mean() < 0.95
    assert results[0]["half", None][1] == nodes_times_others(ranks, nodes) * 2 * D
    assert results[0]["half", None][2] == (nodes - 1) * 2 * D  # the second hop sends what the first one did


def nodes_times_others(ranks: int, nodes: int) -> int:
    return nodes * (ranks // nodes - 1)


@pytest.mark.parametrize("bits", [4, 8, None])
def test_bytes_are_the_formulas(job, bits):
    ranks, nodes, results = job
    codes, scales = (8 * D, 0) if bits is None else (code_bytes(D, bits), scale_bytes(D, BLOCK))
    assert bits != 4 or (codes, scales) == (38, 20)
    for result in results:
        _, within, across, _ = result["two", bits]
        assert within == nodes_times_others(ranks, nodes) * codes + nodes_times_others(ranks, nodes) * scales
        assert across == (nodes - 1) * codes + (nodes - 1) * scales
        assert within + across == (ranks - 1) * (codes + scales)
        if bits is not None:
            assert result["gather", bits][3] == (ranks - 1) * codes + (ranks - 1) * scales


def dry(d: int, nodes: int):
    mesh = Mesh(inter=nodes, intra=8)
    intra, inter = mesh.group("intra"), mesh.group("inter")
    flat = torch.zeros(8 * nodes * d)
    with Ledger() as ledger:
        two_hop_reduce_scatter(flat, intra, inter)
    with Traffic() as gather:
        quantized_all_gather(flat[:d], collectives.world())
    within, across = (ledger.sent_bytes(axis=axis) for axis in ("intra", "inter"))
    return within, across, ledger.peak_bytes, gather.sent_bytes()


def test_zero_plus_plus_on_512_ranks():
    """Dry: 64 nodes of 8. Between nodes an eighth of one hop; 4.125 bits per number, scales too, for 16."""
    d, nodes, ranks = 256 * 20, 64, 512
    piece = d // 2 + 4 * 20
    within, across, peak, gather = dryrun.run(dry, d, nodes, rank=77, ranks=ranks)
    assert (within, across) == (nodes * 7 * piece, (nodes - 1) * piece)
    assert (ranks - 8) * piece == 8 * across  # of one hop, what would leave the node
    assert gather == (ranks - 1) * (d + 4 * 20)
    assert peak == ranks * (4 * d + 5 * d + piece + 4 * 20)  # flat; 5 + m/d + 4/block for each number
