"""The hierarchical all-gather and its adjoint equal the flat collectives, and send less between nodes."""

import pytest
import torch

from minitrain import collectives, launch
from minitrain.data_parallel.hybrid import hierarchical_all_gather, hierarchical_reduce_scatter
from minitrain.ranks.collectives import all_gather, all_reduce, reduce_scatter
from minitrain.ranks.launch import dryrun
from minitrain.ranks.ledger import Ledger
from minitrain.ranks.mesh import Mesh
from minitrain.systems.communication.algorithms import ring_all_gather
from tests.parallel import TOLERANCE


def without_reordering(shard, intra, inter):
    """The control: step 3 forgotten."""
    return all_gather(all_gather(shard, inter), intra)


def on_one_rank():
    world, mesh = collectives.world(), Mesh(node=2, gpu=2)
    intra, inter = mesh.group("gpu"), mesh.group("node")
    generator = torch.Generator().manual_seed(world.rank())
    shard = torch.randn(3, 2, dtype=torch.float64, generator=generator)
    flat = torch.randn(12, 2, dtype=torch.float64, generator=generator)
    with Ledger() as gathering:
        whole = hierarchical_all_gather(shard, intra, inter)
    with Ledger() as scattering:
        mine = hierarchical_reduce_scatter(flat, intra, inter)
    given, before = torch.full_like(whole, 9.0), flat.clone()
    there = hierarchical_all_gather(shard, intra, inter, out=given)
    products = torch.stack([(whole * flat).sum(), (shard * mine).sum()])
    integers = torch.arange(8).add(world.rank())
    with pytest.raises(ValueError, match="^6 along dim 0 is not a multiple of the 4 ranks; pad it$"):
        hierarchical_reduce_scatter(torch.zeros(6), intra, inter)
    return {
        "gather": torch.equal(whole, all_gather(shard, world)),
        "out": there is given and torch.equal(given, whole) and torch.equal(flat, before),
        "scatter": (mine - reduce_scatter(flat, world)).abs().max().item(),
        "integers": torch.equal(
            hierarchical_reduce_scatter(integers, intra, inter), reduce_scatter(integers, world)
        ),
        "adjoint": all_reduce(products, world),
        "disorder": torch.equal(without_reordering(shard, intra, inter), all_gather(shard, world)),
        "swapped": torch.equal(hierarchical_all_gather(shard, inter, intra), all_gather(shard, world)),
        "sent": [
            ledger.sent_bytes(axis=axis) for ledger in (gathering, scattering) for axis in ("node", "gpu")
        ],
        "planned": gathering.planned,
    }


def test_equals_the_flat_collectives_on_two_nodes_of_two():
    M = 12 * 2 * 8
    for result in launch.run(on_one_rank, ranks=4):
        assert result["gather"] and result["out"] and result["integers"] and result["scatter"] < TOLERANCE
        gathered, scattered = result["adjoint"]  # <A x, y> = <x, A* y>, summed over ranks
        assert abs(gathered - scattered) < TOLERANCE and not result["disorder"] and not result["swapped"]
        assert result["sent"] == [M // 4, M // 2] * 2 and not result["planned"]


@pytest.mark.parametrize("nodes,places", [(8, 8), (2, 8), (1, 8), (8, 1)])
def test_bytes_and_memory_of_large_groups(nodes, places):
    """Dry: 64 ranks on 8 nodes of 8; 2 nodes; groups of one."""

    def rank(op, size):
        mesh = Mesh(node=nodes, gpu=places)
        with Ledger() as ledger:
            result = op(torch.zeros(size), mesh.group("gpu"), mesh.group("node"))
        return (
            ledger.sent_bytes(axis="node"),
            ledger.sent_bytes(axis="gpu"),
            ledger.peak_bytes,
            result.shape[0],
        )

    p = nodes * places
    elements = 10 * p
    M = 4 * elements
    for op, size, made in (
        (hierarchical_all_gather, 10, elements),
        (hierarchical_reduce_scatter, elements, 10),
    ):
        across, inside, peak, length = dryrun.run(rank, op, size, rank=p - 1, ranks=p)
        assert length == made and across == M // places - M // p
        assert inside == M - M // places and across + inside == M * (p - 1) // p
        assert places * across == M * (p - places) // p  # a node, all its ranks together
        if min(nodes, places) > 1:
            besides = M + M // places if op is hierarchical_all_gather else 2 * M
            assert peak == 4 * size + besides + (M if op is hierarchical_all_gather else 0)


def test_a_flat_ring_puts_more_on_the_link_of_a_node():
    """Counted in the ring's own schedule: (p-1)/p M against (p-k)/p M; and all of it sent by one rank."""
    for nodes, places in ((2, 2), (2, 8), (4, 4)):
        p = nodes * places
        schedule = ring_all_gather(p)
        crossing = [
            transfer
            for step in schedule.steps
            for transfer in step
            if transfer.source // places == 0 and transfer.to // places != 0
        ]
        chunks = sum(len(transfer.chunks) for transfer in crossing)
        assert chunks == p - 1 > p - places and {transfer.source for transfer in crossing} == {places - 1}
