"""Tokens in proportion to bandwidth: the least transfer time, the loss that wants it, and a router that learns it."""

from functools import cache
from itertools import product

import pytest
import torch

from minitrain import collectives, launch
from minitrain.moe import router
from minitrain.moe.dispatch import Dispatch
from minitrain.systems.moe import topology
from tests.parallel import Traffic

N, D, E, ALPHA = 256, 8, 8, 0.01
LINKS = dict(per_node=2, local=8.0, intra=4.0, inter=1.0)


def test_proportional_to_bandwidth_is_the_least_transfer_time():
    """A linear programme: its dual proves the bound, and all whole splits of 24 rows over 4 ranks respect it."""
    widths = topology.bandwidths(1, 4, **LINKS)
    assert widths.tolist() == [4.0, 8.0, 1.0, 1.0]
    splits = torch.tensor([s for s in product(range(25), repeat=4) if sum(s) == 24])
    best = 24 * topology.target(widths, 4)
    assert best.sum() == pytest.approx(24)
    least = topology.transfer_time(best, widths)
    times = topology.transfer_time(splits, widths)
    assert least == pytest.approx(24 / 14) and times.min() >= least
    # dual: y_j = B_j / sum B are prices of the links with sum of y = 1, under which every split costs 24 / sum B
    prices = widths / widths.sum()
    assert ((splits * prices / widths).sum(1) - least).abs().max() < 1e-12
    even = topology.transfer_time(torch.full((4,), 6.0), widths)
    assert even / least == pytest.approx(6 / (24 / 14)), "equal loads: 3.5 times as long"
    assert topology.target(widths, 8).tolist() == pytest.approx([b / 28 for b in (4, 4, 8, 8, 1, 1, 1, 1)])


def test_the_loss_is_least_at_the_target_and_switchs_if_that_is_uniform():
    scores = torch.randn(N, E, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    routing = router.top_k(scores, 2, torch.arange(N) % 5 != 0)
    uniform = torch.full((E,), 1 / E, dtype=torch.float64)
    wanted = router.balance_loss(routing, ALPHA)
    torch.testing.assert_close(topology.topology_loss(routing, uniform, ALPHA), wanted, rtol=0, atol=1e-15)
    target = topology.target(topology.bandwidths(0, 4, **LINKS), E)
    generator = torch.Generator().manual_seed(1)
    for case in range(50):
        shares = target if case == 0 else torch.rand(E, generator=generator, dtype=torch.float64)
        shares = shares / shares.sum()
        one = router.Routing(torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1), shares[None])
        loss = topology.topology_loss(one, target, ALPHA, counts=shares)
        assert loss == pytest.approx(ALPHA, rel=1e-12) if case == 0 else loss > ALPHA * (1 + 1e-3)


@pytest.mark.parametrize("parts", [[64], [20, 44], [1, 40, 23]])
def test_microbatches_add_up(parts):
    target = topology.target(topology.bandwidths(0, 4, **LINKS), E)
    generator = torch.Generator().manual_seed(2)
    scores = torch.randn(64, E, dtype=torch.float64, generator=generator).requires_grad_()
    mask = torch.arange(64) % 3 != 0
    whole = router.top_k(scores, 2, mask)
    loss = topology.topology_loss(whole, target, ALPHA)
    (wanted,) = torch.autograd.grad(loss, scores)
    counts, tokens = whole.counts, int(mask.sum())
    total = sum(
        topology.topology_loss(router.top_k(s, 2, m), target, ALPHA, counts, tokens)
        for s, m in zip(scores.split(parts), mask.split(parts))
    )
    (found,) = torch.autograd.grad(total, scores)
    torch.testing.assert_close(total, loss, rtol=0, atol=1e-15)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-15)


def learning(uniform):
    """A router of its own on each of 4 ranks, two a node. Before and after: bytes sent and shares."""
    group = collectives.world()
    rank, ranks = group.rank(), group.size()
    generator = torch.Generator().manual_seed(10 + rank)
    x = torch.randn(N, D, dtype=torch.float64, generator=generator)
    gate = torch.randn(D, E, dtype=torch.float64, generator=generator).mul(0.3).requires_grad_()
    widths = topology.bandwidths(rank, ranks, **LINKS)
    target = topology.target(torch.ones(ranks, dtype=torch.float64) if uniform else widths, E)
    optimizer, found = torch.optim.Adam([gate], lr=0.03), []
    for step in range(201):
        routing = router.switch(x @ gate)
        if step in (0, 200):
            with Traffic() as ledger:
                Dispatch(routing, group).there(x)
            found.append((ledger.sent_bytes(), (routing.counts / N).view(ranks, -1).sum(1).tolist()))
        optimizer.zero_grad()
        topology.topology_loss(routing, target, 1.0).backward()
        optimizer.step()
    return found


@cache
def learned():
    return launch.run(lambda: [learning(uniform) for uniform in (False, True)], ranks=4)


def test_ta_moe():
    """After a short training each rank's rows are where its links are wide: the shares of ranks are those of the
    target within 2 points, and what it sends, counted, falls from 3/4 of all rows to the 6/14 of the target. That
    target takes the least time to transfer."""
    test_proportional_to_bandwidth_is_the_least_transfer_time()
    for rank, ((before, _), (after, shares)) in enumerate(rank[0] for rank in learned()):
        wanted = topology.bandwidths(rank, 4, **LINKS) / 14
        assert max(abs(a - b) for a, b in zip(shares, wanted.tolist())) < 0.02
        table, row = 3 * (E // 4) * 8, D * 8
        assert abs((after - table) / row / N - 6 / 14) < 0.02 and before > 1.3 * after
        assert (after - table) / row == round(N * (1 - shares[rank]))


def test_the_usual_loss_does_not_move_rows_to_near_ranks():
    for rank, (_, (_, shares)) in enumerate(rank[1] for rank in learned()):
        assert max(abs(share - 1 / 4) for share in shares) < 0.02


def test_a_rank_whose_tokens_are_all_padding_adds_nothing():
    nobody = router.top_k(torch.randn(4, E, dtype=torch.float64), 2, torch.zeros(4, dtype=torch.bool))
    target = topology.target(topology.bandwidths(0, 4, **LINKS), E)
    assert topology.topology_loss(nobody, target, ALPHA) == 0


def test_bad_input_is_one_line():
    for call, words in (
        (lambda: topology.target(torch.ones(4), 6), "6 experts on 4 ranks; choose a multiple of the ranks"),
        (lambda: topology.bandwidths(0, 6, 4, 3, 2, 1), "6 ranks are not a multiple of 4 a node"),
        (lambda: topology.bandwidths(0, 4, 2, 3, 2, 0), "inter"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
