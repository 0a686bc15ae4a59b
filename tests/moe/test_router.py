"""Routers against the formulas of their papers, written as loops over tokens; losses that add up over ranks."""

import math
from dataclasses import replace

import pytest
import torch

from minitrain.moe import router
from minitrain.moe.router import NOWHERE

N, E = 64, 8
scores = torch.randn(N, E, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
mask = torch.arange(N) % 5 != 0
bias = torch.linspace(-0.3, 0.3, E, dtype=torch.float64)
draws = torch.rand(N, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def ranked(values):
    """Experts from the best to the worst, of equal ones the lower first."""
    return sorted(range(len(values)), key=lambda e: (-values[e], e))


def switch(s, n):
    best = ranked(s)[0]
    return {best: softmax(s)[best]}


def gshard(s, n):
    one, two = ranked(s)[:2]
    p = softmax(s)
    second = p[two] / (p[one] + p[two])
    return {one: 1 - second} | ({two: second} if 2 * second > draws[n] else {})


def top_2(s, n):
    best = ranked(s)[:2]
    total = sum(math.exp(s[e]) for e in best)
    return {e: math.exp(s[e]) / total for e in best}


def deepseek(s, n, k=4, nodes=4, limit=2):
    p = [1 / (1 + math.exp(-value)) for value in s]
    wanted = [value + b for value, b in zip(p, bias.tolist())]
    rows = [range(node * E // nodes, (node + 1) * E // nodes) for node in range(nodes)]
    worth = [sum(sorted((wanted[e] for e in row), reverse=True)[: k // limit]) for row in rows]
    allowed = [e for node in ranked(worth)[:limit] for e in rows[node]]
    best = sorted(allowed, key=lambda e: (-wanted[e], e))[:k]
    return {e: 2.5 * p[e] / sum(p[e] for e in best) for e in best}


def softmax(s):
    total = sum(map(math.exp, s))
    return [math.exp(value) / total for value in s]


def deepseeks(k, nodes, limit):
    """The router, and its formula."""
    how = dict(nodes=nodes, node_limit=limit, scale=2.5)
    ours = lambda s, m=None: router.deepseek(s, k, bias, m, **how)
    return ours, lambda s, n: deepseek(s, n, k=k, nodes=nodes, limit=limit)


ROUTERS = {
    "switch": (lambda s, m=None: router.switch(s, m), switch),
    "gshard": (lambda s, m=None: router.gshard(s, draws, m), gshard),
    "top-2": (lambda s, m=None: router.top_k(s, 2, m), top_2), "deepseek": deepseeks(4, nodes=4, limit=2),
    "deepseek, the best of a node": deepseeks(2, nodes=4, limit=2),
    "deepseek, one node": deepseeks(2, nodes=2, limit=1),
}  # fmt: skip


def as_dicts(routing):
    pairs = zip(routing.experts.tolist(), routing.weights.tolist())
    return [{e: w for e, w in zip(*pair) if e != NOWHERE} for pair in pairs]


@pytest.mark.parametrize("name", ROUTERS)
def test_a_router_is_its_papers_formula(name):
    ours, formula = ROUTERS[name]
    shares = ours(scores, mask).probs.sum(1)
    torch.testing.assert_close(shares, mask.to(shares), rtol=0, atol=1e-12)  # of a masked token nothing
    for given in (scores, scores.round()):  # rounded: many ties
        wanted = [formula(s, n) for n, s in enumerate(given.tolist())]
        for found, one in zip(as_dicts(ours(given)), wanted, strict=True):
            assert found == pytest.approx(one, abs=1e-12)
        found = as_dicts(ours(given, mask))
        assert [one == {} for one in found] == [not kept for kept in mask.tolist()]
        assert [one for one in found if one] == [o for o, kept in zip(as_dicts(ours(given)), mask) if kept]


@pytest.mark.parametrize("name", ROUTERS)
def test_gradients_flow_through_weights_and_not_through_the_choice(name):
    s = scores.clone().requires_grad_()
    routing = ROUTERS[name][0](s)
    visited = torch.linspace(1, 2, E, dtype=torch.float64)[routing.experts.clamp(min=0)]
    (routing.weights * visited).sum().backward()
    nudge = 1e-6 * torch.randn(N, E, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    moved = [ROUTERS[name][0](scores + sign * nudge) for sign in (1, -1)]
    assert all(torch.equal(one.experts, routing.experts) for one in moved), "choices are as before"
    up, down = ((one.weights * visited).sum() for one in moved)
    assert ((up - down) / 2 - (s.grad * nudge).sum()).abs() < 1e-12 and s.grad.abs().sum() > 0.1


def test_a_bias_chooses_and_does_not_weigh():
    strong = torch.zeros(E, dtype=torch.float64)
    strong[3] = 9.0
    routing = router.deepseek(scores, 2, strong)
    assert (routing.experts[:, 0] == 3).all()
    affinity = scores.sigmoid().gather(1, routing.experts)
    torch.testing.assert_close(routing.weights, affinity / affinity.sum(1, keepdim=True))


@pytest.mark.parametrize("capacity", [1, 5, N])
def test_each_expert_chooses_its_best_tokens(capacity):
    routing = router.expert_choice(scores, capacity)
    assert routing.counts.tolist() == [capacity] * E
    probs = scores.softmax(1)
    for e in range(E):
        best = sorted(range(N), key=lambda n: (-probs[n, e], n))[:capacity]
        assert {n for n, one in enumerate(as_dicts(routing)) if e in one} == {*best}
    for n, one in enumerate(as_dicts(routing)):
        assert one == pytest.approx({e: probs[n, e].item() for e in one}, abs=1e-15)
    masked = as_dicts(router.expert_choice(scores, 5, mask))
    assert not any(one for one, kept in zip(masked, mask) if not kept)


@pytest.mark.parametrize("capacity", [1, 7, 16, 1000])
def test_capacity_drops_the_last_to_come_and_second_choices_before_first(capacity):
    routing = router.top_k(scores, 2, mask)
    kept, room, wanted = routing.within(capacity), [capacity] * E, []
    for j in range(2):
        for n in range(N):
            e = routing.experts[n, j].item()
            fits = e != NOWHERE and room[e] > 0
            if fits:
                room[e] -= 1
            wanted.append(e if fits else NOWHERE)
    assert kept.experts.T.flatten().tolist() == wanted
    assert torch.equal(kept.weights != 0, kept.experts != NOWHERE) and kept.counts.max() <= capacity
    dropped = int((routing.counts - capacity).clamp(min=0).sum())
    assert int(routing.counts.sum() - kept.counts.sum()) == dropped
    assert router.capacity_of(N, E, 2, 1.0) == 16 and router.capacity_of(100, 8, 1, 1.25) == 16
    assert router.capacity_of(10, 8, 1, 1.0) == 2, "a part of a token needs room"
    assert router.capacity_of(1000, 10, 1, 1.03) == 103
    assert router.capacity_of(200, 4, 1, 1.1) == 55 < 50 * 1.1, "in floats 55.00000000000001, and 56"


def test_sizes_known_in_advance_end_where_something_is_dropped():
    known = replace(router.top_k(scores, 2), sizes=(16,) * E)
    assert known.without(torch.zeros(N, 2, dtype=torch.bool)).sizes is None
    for length in (5, 8):  # of 2 rows: 20 choices of 8 experts are uneven, 32 are not
        at, flat = torch.arange(length).repeat(2, 1), torch.zeros(2 * length, E)
        dry = router.balanced(flat.to("meta"), 2, at.to("meta"))
        assert [*dry.sizes] == router.balanced(flat, 2, at).counts.tolist()


@pytest.mark.parametrize("parts", [[64], [32, 32], [1, 40, 23]])
def test_losses_of_parts_with_the_counts_of_all_add_up_to_the_whole(parts):
    """As over ranks and microbatches; the mean of losses with counts of their own is another number."""
    whole = scores.clone().requires_grad_()
    routing = router.top_k(whole, 2, mask)
    loss = router.balance_loss(routing, 0.01) + router.z_loss(whole, 0.001, mask)
    loss.backward()
    split = scores.clone().requires_grad_()
    counts, tokens = routing.counts, int(mask.sum())
    total = 0.0
    for s, m in zip(split.split(parts), mask.split(parts)):
        one = router.top_k(s, 2, m)
        total = total + router.balance_loss(one, 0.01, counts, tokens) + router.z_loss(s, 0.001, m, tokens)
    total.backward()
    torch.testing.assert_close(total, loss, rtol=0, atol=1e-14)
    torch.testing.assert_close(split.grad, whole.grad, rtol=0, atol=1e-14)
    pairs = zip(scores.split(parts), mask.split(parts))
    own = [router.balance_loss(router.top_k(s, 2, m), 0.01) for s, m in pairs]
    if len(parts) > 1:
        assert abs(sum(own) / len(own) - router.balance_loss(routing, 0.01)) > 1e-6


def test_losses_by_hand():
    """z: the mean square of log(sum(exp)), of tokens that are not masked; balance as Switch writes it."""
    log_sums = [math.log(sum(map(math.exp, s))) for s, kept in zip(scores.tolist(), mask) if kept]
    wanted = 0.1 * sum(z * z for z in log_sums) / len(log_sums)
    assert router.z_loss(scores, 0.1, mask).item() == pytest.approx(wanted, rel=1e-12)
    routing = router.top_k(scores, 2, mask)
    probs = [softmax(s) for s, kept in zip(scores.tolist(), mask) if kept]
    shares = [float((routing.experts == e).sum()) / (2 * len(probs)) for e in range(E)]
    wanted = 0.1 * E * sum(f * sum(p[e] for p in probs) / len(probs) for e, f in enumerate(shares))
    assert router.balance_loss(routing, 0.1).item() == pytest.approx(wanted, rel=1e-12)


def test_edges_of_a_choice():
    even = torch.zeros(2, 2, dtype=torch.float64)
    second = router.gshard(even, torch.tensor([1.0, 0.99], dtype=torch.float64)).experts[:, 1]
    assert second.tolist() == [NOWHERE, 1], "2 * weight > draw: 1 is not above 1"
    wide = router.top_k(torch.zeros(3, 64, dtype=torch.float64), 5)
    assert wide.experts.tolist() == [[0, 1, 2, 3, 4]] * 3, "of equal scores the lower, of many experts too"
    # nobody likes expert 0, to the last bit; padding, which is left out, takes none of its places
    unloved = torch.tensor([[-2000.0, 0.0]] * 3, dtype=torch.float64)
    routing = router.expert_choice(unloved, 2, torch.tensor([False, True, True]))
    assert routing.counts.tolist() == [2, 2]
    assert router.deepseek(scores, 4, bias, nodes=4, node_limit=2).experts.shape == (N, 4), "whole nodes"
    assert (routing.experts[0] == NOWHERE).all()


def test_the_bias_moves_against_the_load():
    counts = torch.tensor([10, 0, 6, 4])
    moved = router.moved_bias(torch.zeros(4), counts, 0.001)
    assert moved.tolist() == pytest.approx([-0.001, 0.001, -0.001, 0.001])
    halfway = router.moved_bias(torch.zeros(2), torch.tensor([5, 6]), 0.001)
    assert halfway.tolist() == pytest.approx([0.001, -0.001]), "the mean is 5.5"
    assert router.moved_bias(torch.ones(2), torch.tensor([5, 5]), 0.001).tolist() == [1, 1], "even: it stays"
    pull, start = torch.tensor([2.0, 1.0, 0.0, 0.0]), torch.zeros(4)
    noise = torch.randn(512, 4, generator=torch.Generator().manual_seed(4))
    loads = []
    for _ in range(300):
        counts = router.deepseek(noise + pull, 1, start).counts
        start = router.moved_bias(start, counts, 0.01)
        loads.append(counts.max().item() / 128)
    assert loads[0] > 2.5 and max(loads[-20:]) < 1.2, "without any loss, the loads become equal"


def test_bad_input_is_one_line():
    broken = scores.clone()
    broken[7, 2], broken[9, 1] = math.nan, math.inf
    for call, words in (
        (lambda: router.top_k(scores, 9), "k = 9; a router needs scores .* k from 1 to"),
        (lambda: router.switch(broken), "scores of token 7 are not finite"),
        (lambda: router.switch(scores, mask[:5]), "mask \\[5\\]; a mask has one entry for each of 64 tokens"),
        (lambda: router.deepseek(scores, 4, bias, nodes=3), "8 experts, 3 nodes"),
        (lambda: router.deepseek(scores, 4, bias, nodes=4, node_limit=5), "node_limit 5"),
        (lambda: router.deepseek(scores, 3, bias, nodes=4, node_limit=2), "node_limit divides k"),
        (lambda: router.expert_choice(scores, 65), "capacity = 65; an expert chooses 1 to 64"),
    ):
        with pytest.raises(ValueError, match=words) as caught:
            call()
        assert "\n" not in str(caught.value)
