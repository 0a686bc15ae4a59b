"""PLink: racks found from noisy round trips, what a plan along them saves, and the cost model for it."""

from fractions import Fraction
from random import Random

from communication_runs import check_on_real_ranks

from minitrain.systems.communication import cost_model
from minitrain.systems.communication.algorithms import aggregate, clusters, probe, ring_all_reduce
from minitrain.systems.communication.chunk_schedule import Schedule, Transfer, check, place, sent_shares


def planted(sizes, seed) -> tuple[list[int], list[list[int]]]:
    """[rank] -> rack in random order, and the racks as `clusters` would write them."""
    rack_of = [rack for rack, size in enumerate(sizes) for _ in range(size)]
    Random(seed).shuffle(rack_of)
    return rack_of, sorted([r for r, rack in enumerate(rack_of) if rack == w] for w in range(len(sizes)))


def test_plink():
    for seed in range(20):
        for sizes in ((8, 8, 8, 8), (5, 9, 2), (4,) * 6):
            rack_of, racks = planted(sizes, seed)
            rtt = probe(rack_of, near_s=20e-6, far_s=60e-6, noise=0.5, samples=5, seed=seed)
            assert clusters(rtt) == racks, (seed, sizes)
            check(aggregate(racks))
        rack_of, racks = planted((8, 8, 8, 8), seed)
        fabric = cost_model.racks(rack_of, near=(10e-6, 10e9), far=(30e-6, 10e9), oversubscription=4)
        plan, flat_ring = aggregate(racks), ring_all_reduce(32)
        for size_bytes in (1e4, 1e6, 1e8):
            assert cost_model.time_s(plan, size_bytes, fabric) < 0.6 * cost_model.time_s(
                flat_ring, size_bytes, fabric
            )
        assert sum(sent_shares(plan, lambda t: rack_of[t.source] != rack_of[t.to])) == 4 * Fraction(3, 2)


def test_control_the_wrong_racks_are_no_faster():
    """What saves time is the knowledge of the racks, not the shape of the plan."""
    rack_of, racks = planted((8, 8, 8, 8), seed=1)
    fabric = cost_model.racks(rack_of, near=(10e-6, 10e9), far=(30e-6, 10e9), oversubscription=4)
    by_number = aggregate([range(first, first + 8) for first in range(0, 32, 8)])
    assert cost_model.time_s(by_number, 1e8, fabric) > 1.5 * cost_model.time_s(aggregate(racks), 1e8, fabric)


def test_a_ring_that_follows_the_racks_saves_the_bytes_too_but_not_the_steps():
    rack_of, racks = planted((8, 8, 8, 8), seed=1)
    fabric = cost_model.racks(rack_of, near=(10e-6, 10e9), far=(30e-6, 10e9), oversubscription=4)
    ordered = place(ring_all_reduce(32), [rank for rack in racks for rank in rack], range(32), of=(32, 32))
    check(ordered)
    assert cost_model.time_s(ordered, 1e8, fabric) < cost_model.time_s(aggregate(racks), 1e8, fabric)
    assert cost_model.time_s(ordered, 1e5, fabric) > 5 * cost_model.time_s(aggregate(racks), 1e5, fabric)


def test_control_one_sample_of_a_noisy_network_is_not_enough():
    """Delays of eight round trips on average: the least of twenty samples shows racks, one does not."""
    for seed in range(5):
        rack_of, racks = planted((8, 8, 8, 8), seed)
        found = [
            clusters(probe(rack_of, 20e-6, 60e-6, noise=8.0, samples=n, seed=seed)) == racks for n in (1, 20)
        ]
        assert found == [False, True]


def test_no_structure_is_one_group():
    rtt = probe([0] * 12, near_s=20e-6, far_s=60e-6, noise=0.5, samples=5, seed=3)
    assert clusters(rtt) == [list(range(12))]
    for pair_s, rack_s, groups in (
        (1.0, 10.0, 2),
        (1.0, 2.0, 4),
    ):  # then 40: of two jumps the larger ends a rack
        levels = [
            [pair_s if a // 2 == b // 2 else rack_s if a // 4 == b // 4 else 40.0 for a in range(8)]
            for b in range(8)
        ]
        assert clusters(levels) == [list(range(first, first + groups)) for first in range(0, 8, groups)]
    assert clusters([[0.0]]) == [[0]] and clusters([[0.0, 1.0], [1.0, 0.0]]) == [[0, 1]]


def test_racks_of_unequal_sizes_on_real_ranks():
    schedule = aggregate([[0, 3, 5], [1, 4], [2]])
    check(schedule)
    check_on_real_ranks(schedule)


def test_a_step_lasts_as_long_as_its_busiest_link():
    def one_step(*pairs):
        return Schedule(4, 1, (tuple(Transfer(source, to, range(1), True) for source, to in pairs),))

    flat = cost_model.flat(alpha_s=1.0, bytes_per_s=10.0)
    assert cost_model.time_s(one_step((0, 1), (2, 3)), 100.0, flat) == 11
    assert cost_model.time_s(one_step((0, 3), (1, 3)), 100.0, flat) == 21, "two messages, one port: rank 3"
    racks = cost_model.racks([0, 0, 1, 1], near=(1.0, 10.0), far=(2.0, 5.0), oversubscription=2)
    assert cost_model.time_s(one_step((0, 1)), 100.0, racks) == 11
    assert cost_model.time_s(one_step((0, 2)), 100.0, racks) == 22, (
        "a far port; an uplink of 2·5/2 bytes a second"
    )
    assert cost_model.time_s(one_step((0, 2), (1, 3)), 100.0, racks) == 42, "both through one uplink"
    assert cost_model.time_s(one_step((0, 2), (3, 1)), 100.0, racks) == 22, "up and down are two links"
    assert cost_model.time_s(Schedule(4, 1, ((),)), 100.0, flat) == 0
