"""Weights without a master: the same random numbers wherever an element is, and nothing lost on average."""

from functools import partial

import pytest
import torch

from minitrain import collectives, launch
from minitrain.attention.placed import Places, hashed
from minitrain.compose.parallelize import parallelize
from minitrain.data_parallel import states
from minitrain.model.training.hyperparameters import Hyperparameters
from minitrain.model.training.optim import AdamW
from minitrain.plan.strategy import Strategy
from minitrain.precision.chance import Chance, draws, keep_by_chance
from minitrain.precision.rounding import round_to
from minitrain.ranks.ledger import Ledger
from minitrain.ranks.mesh import Mesh
from minitrain.ranks.sharding import full_tensor, numbers, placement, shard
from tests.parallel import small
from tests.precision.training import rows, started

CHANCE = "bfloat16_stochastic_short"
LAYOUTS = [Strategy(dp=2, zero=zero, bucket_bytes=3000) for zero in (0, 1, 2, 3)]
LAYOUTS += [
    Strategy(dp=2, zero="IGG", node=2),
    Strategy(dp=2, zero="NIG"),
    Strategy(dp=4, zero="IGG", node=2),
]
LAYOUTS += [Strategy(), Strategy(tp=2), Strategy(tp=2, dp=2, zero=1), Strategy(pp=2, microbatches=2)]
LAYOUTS.append(Strategy(pp=2, schedule="zb_h1", microbatches=2, dp=2, zero=3))


def start(strategy, tied=False):
    return started(strategy, small(tied=tied), CHANCE)


def step(run, number):
    return run.step(run.batch(rows(), number))


def test_every_element_draws_the_number_of_its_place_in_every_layout():
    def rank():
        wrong = []
        for strategy in [s for s in LAYOUTS if s.ranks == collectives.world().size()]:
            run = start(strategy, tied=strategy.pp > 1)
            for one in run.sync.shards:
                bits = one.shard.chance.bits(7, one.shard)
                assert len(bits) == one.shard.numel()
                for param, part in states.unfold(run.sync, one, bits.view(one.shard.shape)):
                    whole, name = full_tensor(part, placement(param).shards), run.sync.names[param]
                    places = Places(3)
                    places.at(7, 0)
                    expected = hashed(places.seed_of(f"{name} rounded"), torch.arange(whole.numel()))
                    if not torch.equal(whole.flatten(), expected):
                        wrong.append((str(strategy), name))
        return wrong

    for ranks in (1, 2, 4):
        assert launch.run(rank, ranks=ranks) == [[]] * ranks


def test_equal_gradients_give_equal_weights_and_a_run_goes_on_in_another_layout_bit_for_bit():
    """Sums of two terms are equal in every layout. Control: with other numbers weights are others."""
    layouts = [Strategy(dp=2, zero=zero, bucket_bytes=3000) for zero in (0, 1, 2, 3)]

    def trained(strategy, saved=None):
        run = start(strategy)
        step(run, 0)
        first, run = run.state_dict(), start(strategy)
        run.load_state_dict(saved or first)
        step(run, 1)
        return first, run.state_dict()

    def by_dp():
        reference = trained(layouts[0])
        different = [str(s) for s in layouts if not equal(trained(s, reference[0])[1], reference[1])]
        run = start(layouts[0])
        run.load_state_dict(reference[0])
        for kept in run.sync.shards:
            kept.shard.chance.places.seed += 1
        step(run, 1)
        return different, equal(run.state_dict(), reference[1])

    assert launch.run(by_dp, ranks=2) == [([], False)] * 2
    (whole,) = launch.run(trained, Strategy(microbatches=2), ranks=1)
    for stages in launch.run(trained, Strategy(pp=2, microbatches=2), ranks=2):
        assert equal(stages[0], whole[0]) and equal(stages[1], whole[1])


def equal(state, expected):
    def flat(value):
        return [x for key in sorted(value) for x in flat(value[key])] if isinstance(value, dict) else [value]

    pairs = zip(flat(state), flat(expected), strict=True)
    return all(isinstance(a, str) or torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in pairs)


def ones(precise: bool, steps: int, lr: float, betas=(0.9, 0.95), **more):
    """Weights of 1 and gradients of 1: each update is lr, once the moments are corrected for their start."""
    weight = torch.nn.Parameter(torch.ones(16, 256, dtype=torch.float32 if precise else torch.bfloat16))
    weight.chance = Chance([("a", lambda device: torch.arange(16 * 256))])
    optimizer = AdamW([weight], lr=lr, betas=betas, weight_decay=0.0, **more)
    for _ in range(steps):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    return weight.detach(), optimizer.state[weight]


@pytest.mark.parametrize("moments", [None, (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)])
def test_updates_far_below_half_a_step_are_kept_on_average(moments):
    """100 updates of 1/20 of half a step below 1. Control: rounded to the nearest nothing ever moves."""
    exact, _ = ones(True, 100, 1e-4)
    assert torch.allclose(exact, torch.full_like(exact, 0.99), atol=1e-4)
    weight, state = ones(False, 100, 1e-4, by_chance=True, moment_dtypes=moments)
    far = weight.float() - exact
    assert weight.dtype == torch.bfloat16 and abs(far.mean()) < 3 * far.std() / far.numel() ** 0.5 < 4e-4
    assert set(weight.float().unique().tolist()) <= {1 - k / 256 for k in range(20)}
    nearest, _ = ones(False, 100, 1e-4, moment_dtypes=moments)
    assert (nearest == 1).all()
    for name, dtype in zip(("exp_avg", "exp_avg_sq"), moments or (torch.float32,) * 2):
        assert state[name].dtype == dtype


def test_moments_in_bfloat16_follow_when_they_are_rounded_by_chance():
    """With beta2 = 0.999 a mean of squares falls by 1/1000 of itself a step, less than half a step of
    bfloat16: to the nearest it would stay for good."""
    state = {}
    for by_chance in (True, False):
        weight = torch.nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
        weight.chance = Chance([("a", lambda device: torch.arange(4096))], seed=1)
        bfloat16 = (torch.bfloat16, torch.bfloat16)
        optimizer = AdamW([weight], betas=(0.9, 0.999), by_chance=by_chance, moment_dtypes=bfloat16)
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        before = optimizer.state[weight]["exp_avg_sq"].float().mean()
        for _ in range(50):
            weight.grad = torch.zeros_like(weight)
            optimizer.step()
        after = optimizer.state[weight]["exp_avg_sq"].float()
        state[by_chance] = after.mean() / before, after.std() / before / 64
    assert abs(state[True][0] - 0.999**50) < 3 * state[True][1] < 0.02 and state[False][0] == 1


def test_the_numbers_are_uniform_and_independent():
    bits = hashed(5, torch.arange(1 << 16))
    fields = torch.stack([draws(bits, number) for number in range(3)]).double()
    assert fields.min() >= 0 and fields.max() < 1 and (fields * 2**21 % 1 == 0).all()
    each = [[bool(draws(torch.tensor([1 << place]), number)) for number in range(3)] for place in range(63)]
    assert each == [[place // 21 == number for number in range(3)] for place in range(63)]  # no bit in two
    assert ((fields.mean(1) - 0.5).abs() < 3 / 12**0.5 / 256).all()
    assert (torch.corrcoef(fields) - torch.eye(3)).abs().max() < 3 / 256
    x = torch.full((1 << 16,), 1 + 2.0**-12)  # 1/32 of a step above 1
    kept = x.bfloat16()
    keep_by_chance(kept, x, bits, 1)
    assert set(kept.tolist()) == {1.0, 1 + 2.0**-7}
    share = (kept > 1).double().mean().item()
    assert abs(share - 1 / 32) < 3 * (31 / 32**2 / 65536) ** 0.5
    assert torch.equal(kept > 1, fields[1] < 1 / 32)


def test_weight_and_moments_are_rounded_by_numbers_of_their_own():
    """The first step by hand, to the bit."""
    grad = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight = torch.nn.Parameter(torch.ones(64, 32, dtype=torch.bfloat16))
    weight.chance = Chance([("a", lambda device: torch.arange(64 * 32))], seed=4)
    settings = dict(lr=1e-3, betas=(0.9, 0.99), eps=1e-3, weight_decay=0.0, by_chance=True)
    optimizer = AdamW([weight], moment_dtypes=(torch.bfloat16, torch.bfloat16), **settings)
    weight.grad = grad
    optimizer.step()
    bits, state, exact = weight.chance.bits(1, weight), optimizer.state[weight], grad.float()
    mean, squares = exact * (1 - 0.9), exact * exact * (1 - 0.99)
    updated = 1 - 1e-3 * exact / (exact.abs() + 1e-3)
    for number, (kept, x) in enumerate(
        ((weight, updated), (state["exp_avg"], mean), (state["exp_avg_sq"], squares))
    ):
        own, other = (
            round_to(x, "bf16", "stochastic", generator=draws(bits, n).view(64, 32))
            for n in (number, (number + 1) % 3)
        )
        assert (kept.float() == own).float().mean() > 0.99 > 0.95 > (other == own).float().mean()


def test_numbers_of_a_part_that_was_cut_twice_along_a_dim():
    def rank():
        mesh = Mesh(outer=2, inner=2)
        part = torch.arange(8 * 6).view(8, 6)
        for axis, dim in (("outer", 0), ("inner", 0)):
            part = shard(part, dim, mesh.group(axis))
        return torch.equal(numbers(part, 3, 9), part.flatten()[3:9])

    assert launch.run(rank, ranks=4) == [True] * 4


def test_the_memory_that_rounding_takes():
    weight, exact = torch.ones(1000, 100, dtype=torch.bfloat16), torch.rand(1000, 100)
    chance = Chance([("a", partial(numbers, weight, 0, weight.numel()))])
    with Ledger() as ledger:
        bits = chance.bits(1, weight)
    assert 24 * 10**5 <= ledger.peak_bytes < 24.01 * 10**5 and ledger.live_bytes == 8 * 10**5
    with Ledger() as ledger:
        keep_by_chance(weight, exact, bits, 1)
    assert ledger.peak_bytes - ledger.live_bytes == 21 * 10**5


def test_a_master_that_the_optimizer_asks_for_is_not_made():
    def rank():
        run = parallelize(small(), Strategy(precision=CHANCE), Hyperparameters().make_optimizer)
        step(run, 0)
        kept = {name for state in run.sync.optimizer.state.values() for name in state}
        return kept

    assert launch.run(rank, ranks=1) == [{"step", "exp_avg", "exp_avg_sq"}]
