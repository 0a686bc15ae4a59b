"""INT4: Hadamard, steps, splitting and sampling each against its definition; the estimate's mean; layouts."""

from dataclasses import replace

import pytest
import torch

from minitrain import collectives, launch
from minitrain.compose.passes import PRODUCTS
from minitrain.model.config import ExpertsConfig
from minitrain.precision.blocks import dequantize
from minitrain.precision.products import Scales
from minitrain.ranks.events import Issue
from minitrain.systems.precision import int4
from tests.parallel import Traffic, small
from tests.precision import test_precision_atlas
from tests.precision.training import distance, normal, trained

INT4, ALONE = PRODUCTS["int4"], Scales()


# ---- forward -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width, block", [(128, 32), (96, 32), (24, 8), (75, 1), (2, 2), (64, 64)])
def test_hadamard_is_its_own_inverse(width, block):
    h = int4.hadamard(torch.eye(width, dtype=torch.float64), max(block, 32))
    assert (h @ h.mT - torch.eye(width)).abs().max() < 1e-15 and torch.equal(h, h.mT)
    assert ((h != 0) == torch.block_diag(*[torch.ones(block, block)] * (width // block)).bool()).all()
    assert (h[h != 0].abs() - block**-0.5).abs().max() < 1e-15
    x = normal(3, width)
    assert (int4.hadamard(x, max(block, 32)) - x @ h).abs().max() < 1e-14


def test_products_forward_are_of_integers_and_cost_half_a_byte():
    x, weight = normal(2, 24, 96, dtype=torch.float32), normal(32, 96, seed=1, dtype=torch.float32)
    kept, w = INT4.enter(x, ALONE), INT4.quantized(weight, ALONE, "NK")
    whole = kept.elements().long() @ w.elements().long().mT
    assert kept.elements().abs().max() <= 7 and kept.nbytes == x.numel() // 2 + 4
    assert torch.equal(INT4.forward(kept, weight, ALONE), whole * (kept.multipliers * w.multipliers))
    exact = x @ weight.mT
    assert (INT4.forward(kept, weight, ALONE) - exact).square().mean() < 0.03 * exact.square().mean()


# ---- backward ----------------------------------------------------------------------------------------------


def test_rounding_by_chance_is_unbiased_and_never_exceeds_119():
    """10^4 rows of the same numbers: each place draws its own."""
    row = torch.tensor([0.0, 0.3, -0.7, 1e-4, 0.99999, -1.0])
    q = INT4.enter_grad(row.expand(100, 100, -1), ALONE)
    values, sigma = dequantize(q).double().flatten(0, 1), 0.0
    assert q.codes.abs().max() == int4.LARGEST and q.nbytes == 6e4 + 4
    assert not values[:, 0].any() and (values[:, 5] + 1).abs().max() < 1e-6
    sigma = values.std(0) / 100
    assert ((values.mean(0) - row)[1:5].abs() <= 3 * sigma[1:5]).all() and (sigma[1:5] > 0).all()
    again, other = (INT4.enter_grad(row.expand(100, 100, -1) * size, ALONE).codes for size in (1, 1.001))
    assert torch.equal(again, q.codes) and not torch.equal(other, q.codes), "chance follows the scale"
    ups = (values[:, 1] > 0.3).double()
    assert abs(((ups[1:] - ups.mean()) * (ups[:-1] - ups.mean())).mean()) < 0.03 * ups.var()


def test_int4_xi(monkeypatch):
    """H spreads what stands out, 16 hi + lo is INT8's code. dx and dW over 10^4 draws of what is kept: the mean is the
    product of dy itself, within 3 sigma (of all numbers at once; one of a thousand may be 4 away). Half of the rows are kept; without 1/p it fails.
    On text, 24 steps end within 1 % of bfloat16."""
    ways = {name: dict(precision="bfloat16", products=name) for name in ("plain", "int4")}
    (losses,) = launch.run(test_precision_atlas.trained, ways, ranks=1)
    assert 0 < test_precision_atlas.gap(losses, "int4", "plain") < 0.01
    dy = normal(24, 8) * torch.logspace(0, -3, 24)[:, None]
    x, weight = normal(24, 16, seed=1), normal(8, 16, seed=2)
    kept, exact = INT4.enter(x, ALONE), torch.float64
    grad = INT4.enter_grad(dy, ALONE)
    parts, g = int4.halves(grad.codes), grad.codes.double()
    every = torch.arange(-int4.LARGEST, int4.LARGEST + 1, dtype=torch.int8)[None]
    hi, lo = int4.halves(every)
    assert torch.equal(16 * hi.int() + lo.int(), every.int()) and int4.LARGEST == 119
    assert hi.abs().max() == 7 and (lo.min(), lo.max()) == (-8, 7) and not hi[every.abs() < 8].any()
    sizes = int4.lengths(parts, ALONE, "N")
    sizes_w = sizes * int4.lengths(kept.elements()[None], ALONE, "K")
    w = INT4.quantized(weight, ALONE, "NK").elements().to(exact)
    for size, of in ((sizes, lambda k: k @ w), (sizes_w, lambda k: k.mT @ kept.elements().to(exact))):
        rows = int4.sampled(parts, size, torch.arange(10_000)[:, None, None])
        draws = of(rows)
        sigma = (draws.std(0) / 100).clamp(min=1e-12)
        off = (draws.mean(0) - of(g)) / sigma
        assert off.square().mean() < 1.5 and off.abs().max() < 4.5 and sigma.max() > 1e-3
        assert abs((draws.mean((1, 2)) - of(g).mean()).mean()) < 3 * draws.mean((1, 2)).std() / 100
        biased = of((rows != 0) * g)
        assert ((biased.mean(0) - of(g)) / sigma).square().mean() > 100
    test_half_of_the_rows_are_kept_the_heavy_ones_surely()
    test_rounding_by_chance_is_unbiased_and_never_exceeds_119()
    with monkeypatch.context() as patch:
        test_backward_is_right_on_average(patch)
    far = normal(64, 32) * torch.where(torch.arange(32) == 5, 30, 1)
    errors = [(int4.hadamard(dequantize(INT4.enter(far, ALONE), exact)) - far).norm()]
    monkeypatch.setattr(int4, "hadamard", lambda x, *_: x)
    assert errors[0] < 0.7 * (dequantize(INT4.enter(far, ALONE), exact) - far).norm()


def test_backward_is_right_on_average(monkeypatch):
    """Through `backward` itself, 300 scales of dy and so 300 seeds: dx and dW are the products of dy with what
    the codes stand for, turned back. Rows are drawn by |hi| and |lo| for dx, times |a| for dW."""
    dy, x, weight = normal(2, 12, 8), normal(2, 12, 64, seed=1), normal(8, 64, seed=2)
    x[0] *= 10
    kept, seen, own = INT4.enter(x, ALONE), [], int4.sampled
    monkeypatch.setattr(
        int4, "sampled", lambda parts, sizes, *rest: seen.append(sizes) or own(parts, sizes, *rest)
    )
    scales = 1 + 1e-4 * torch.arange(300).double()
    draws = [INT4.backward(dy * scale, kept, weight, (True, True), ALONE) for scale in scales]
    back = int4.hadamard(dequantize(INT4.quantized(weight, ALONE, "NK"), torch.float64))
    x_back = int4.hadamard(dequantize(kept, torch.float64))
    expected = dy @ back, dy.flatten(0, 1).mT @ x_back.flatten(0, 1)
    for found, exact in zip(zip(*draws), expected):
        found = torch.stack([one / scale for one, scale in zip(found, scales)])
        off = (found.mean(0) - exact) / (found.std(0) / 300**0.5)
        assert off.square().mean() < 1.3 and off.abs().max() < 5
        assert 0.02 < ((found[0] - exact).norm() / exact.norm()) < 1
    codes = INT4.enter_grad(dy, ALONE).codes.flatten(0, 1)
    hi = (codes + 8) // 16
    norms = torch.stack([part.double().norm(dim=1) for part in (hi, codes - 16 * hi)])
    assert (seen[0] - norms).abs().max() < 1e-12
    assert (seen[1] - norms * kept.elements().double().flatten(0, 1).norm(dim=1)).abs().max() < 1e-9


def test_each_use_of_a_scale_draws_numbers_of_its_own():
    """Rounding of dy, the rows kept for dx, those for dW."""
    scale = torch.tensor(0.37)
    parts, sizes = torch.ones(2, 64, 4, dtype=torch.int8), torch.ones(2, 64, dtype=torch.float64)
    seeds = [int4.bits(scale, use) for use in range(3)]
    assert len({int(seed) for seed in seeds}) == 3 and int4.bits(scale) == seeds[0]
    for_dx, for_dw = (int4.sampled(parts, sizes, seed).any(1) for seed in seeds[1:])
    assert not torch.equal(for_dx, for_dw)


def test_half_of_the_rows_are_kept_the_heavy_ones_surely():
    sizes = torch.tensor([[100.0, 1.0, 0.0, 2.0], [3.0, 1.0, 1.0, 0.0]]).double()
    p = int4.keep_shares(sizes, 4)
    assert p.sum() == 4 and p[0, 0] == 1 and p[0, 2] == 0 == p[1, 3]
    light = p[(p < 1) & (p > 0)] / sizes[(p < 1) & (p > 0)]
    assert (light - light[0]).abs().max() < 1e-15, "in proportion"
    few = int4.keep_shares(torch.tensor([[5.0, 0.0], [0.0, 0.0]]).double(), 2)
    assert few.tolist() == [[1.0, 0.0], [0.0, 0.0]] and not int4.keep_shares(torch.zeros(2, 3), 3).any()
    assert int4.keep_shares(torch.zeros(2, 0), 0).shape == (2, 0)
    many = int4.keep_shares(normal(2, 500).abs() ** 3, 500)
    assert abs(many.sum() - 500) < 1e-9 and many.max() == 1
    drawn = [int4.sampled(torch.ones(2, 500, 1), normal(2, 500).abs(), torch.tensor(s)) for s in range(50)]
    assert len({tuple(one[:, 0].tolist()) for one in drawn}) == 50, "another seed, other rows"
    again = int4.sampled(torch.ones(2, 500, 1), normal(2, 500).abs(), torch.tensor(3))
    assert torch.equal(again, drawn[3])


def test_nan_is_told_and_nothing_is_nothing():
    x, weight, dy = normal(2, 8, 32), normal(16, 32, seed=1), normal(2, 8, 16, seed=2)
    kept = INT4.enter(x, ALONE)
    dx, dweight = INT4.backward(dy, kept, weight, (True, True), ALONE)
    assert dx.shape == x.shape and dweight.shape == weight.shape and dx.dtype == torch.float64
    assert INT4.backward(dy, kept, weight, (False, True), ALONE)[0] is None
    assert INT4.backward(dy, kept, weight, (True, False), ALONE)[1] is None
    for bad in (torch.nan, torch.inf):
        dy[1, 2, 3] = bad
        assert all(g.isnan().all() for g in INT4.backward(dy, kept, weight, (True, True), ALONE))
        assert INT4.forward(INT4.enter(x.masked_fill(x > 2, bad), ALONE), weight, ALONE).isnan().all()
    zero = INT4.backward(torch.zeros_like(dy), kept, weight, (True, True), ALONE)
    assert not zero[0].any() and not zero[1].any()
    none = INT4.enter(x[0, :0], ALONE)
    assert INT4.forward(none, weight, ALONE).shape == (0, 16)
    dx, dweight = INT4.backward(dy[0, :0], none, weight, (True, True), ALONE)
    assert dx.shape == (0, 32) and not dweight.any()


# ---- on ranks ----------------------------------------------------------------------------------------------

WIDE = small(d_model=64, num_heads=4, num_kv_heads=4, d_ff=128, num_layers=2, tied=False)
MIXED = replace(WIDE, experts=ExpertsConfig(num_experts=4, top_k=2))


def agreed(tokens: int) -> dict:
    """Bytes of each all-reduce of a layer whose matrix is cut along N or K: forward and backward of its products."""
    group, found = collectives.world(), {}
    for cut in "NK":
        scales, x, weight, dy = Scales(0, group, cut), normal(tokens, 64), normal(32, 64), normal(tokens, 32)
        with Traffic() as forward:
            kept = INT4.enter(x, scales)
            INT4.forward(kept, weight, scales)
        with Traffic() as backward:
            grad = INT4.enter_grad(dy, scales)
            INT4.backward(grad, kept, weight, (True, True), scales)
        issues = ([e for e in ledger.events if isinstance(e, Issue)] for ledger in (forward, backward))
        found[cut] = [[event.payload_bytes for event in some] for some in issues]
    return found


def test_what_ranks_agree_on_in_bytes():
    """4 for each tensor that is cut, 72 more for the step of x or W; of a row 8 for hi and lo where N is cut, 4 for a
    where K is. W is quantised once more in backward."""
    for found in launch.run(agreed, 6, ranks=2):
        assert found == {"N": [[4, 72], [4, 8 * 6, 4, 72]], "K": [[4, 72, 4, 72], [4, 72, 4 * 6]]}


def test_ranks_that_share_tokens_or_matrices_draw_alike():
    """tp, with and without sequence parallelism, and pp: what the same microbatches on fewer ranks give.
    Another microbatch has other scales: the control. Rows that are sorted otherwise draw otherwise: experts are
    asked to be alike on ranks."""
    cuts = [
        (dict(), dict(tp=2)),
        (dict(), dict(tp=2, sequence_parallel=True)),
        (dict(microbatches=2), dict(pp=2, microbatches=2)),
        (dict(microbatches=2), dict(tp=2, microbatches=2)),
    ]
    more = [(WIDE, dict(dp=2)), (WIDE, dict(dp=2, zero=3)), (WIDE, dict(cp=2)), (MIXED, dict(tp=2))]
    more.append((MIXED, dict(dp=2, ep=2)))

    def each(cases):
        return [trained(config, "int4", **layout) for config, layout in cases]

    (alone,) = launch.run(each, [(WIDE, one) for one, _ in cuts[1:3]], ranks=1)
    alone = [alone[0], *alone, alone[1]]
    results = launch.run(each, [(WIDE, two) for _, two in cuts] + more, ranks=2)
    ranks = [(found[:4], found[4:]) for found in results]
    for same, others in ranks:
        assert [distance(a, b) < 1e-12 for a, b in zip(same, alone)] == [True] * 4
        dp, zero, cp, *_ = others
        assert distance(dp, zero) < 1e-15 and max(max(losses) for losses, _ in others) < 4
        assert all(1e-6 < distance(a, b) for a, b in ((dp, alone[0]), (alone[0], alone[2]), (cp, alone[0])))
    assert all(distance(a, b) == 0 for a, b in zip(ranks[0][1], ranks[1][1]))
