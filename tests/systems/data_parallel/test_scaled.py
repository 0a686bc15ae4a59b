"""FP8-LM: every sum in codes, to the bit; what travels, what is held; a factor that keeps sums in range."""

import weakref
from dataclasses import replace

import pytest
import torch

from minitrain import collectives, launch
from minitrain.compose.parallelize import parallelize
from minitrain.data_parallel import states
from minitrain.model.data.batches import Rows, random_tokens
from minitrain.model.training.optim import AdamW
from minitrain.plan.strategy import Strategy
from minitrain.precision.fp8_lm import narrow, next_mu, wide
from minitrain.precision.mixed import widen
from minitrain.precision.policies import POLICIES
from minitrain.precision.rounding import round_to
from minitrain.ranks.ledger import Ledger
from minitrain.ranks.torch_private import grad_hooks
from minitrain.systems.data_parallel.scaled import Scaled
from tests.parallel import Traffic, check_refusals, small
from tests.precision.test_chance import equal

FP8, POLICY = torch.float8_e4m3fn, POLICIES["fp8_lm"]


def start(strategy, precision="fp8_lm", tied=True):
    strategy = replace(strategy, precision=precision)
    return parallelize(small(tied=tied), strategy, lambda params: AdamW(params, lr=1e-2, eps=1e-3), seed=3)


def batch_of(run, number):
    rows = Rows(lambda _, rank, ranks: random_tokens(number, rank, ranks, 4, 8, 29, seed=5), 4, 8)
    return run.batch(rows, number)


def scaled_model(group, deal=False, shapes=((40, 30), (7, 9), (64,), (3, 5, 7))):
    model = torch.nn.ParameterList(torch.nn.Parameter(torch.randn(shape)) for shape in shapes)
    widen(model, POLICY)
    for param in model:
        param.grad_dtype = torch.bfloat16
    return Scaled(model, group, lambda params: AdamW(params), 3000, deal)


def gradients(rank, microbatch, alike=False):
    generator = torch.Generator().manual_seed(5 if alike else 100 * rank + microbatch)
    shapes = ((40, 30), (7, 9), (64,), (3, 5, 7))
    return [torch.randn(shape, generator=generator).bfloat16() * (1 + rank) for shape in shapes]


def by_hand(ranks, mu, alike=False):
    """The sums of two microbatches of every rank, from the description; float32 as blocks.py has it."""

    def in_units(x, amax):
        return round_to(x / amax * 448, "e4m3", overflow="saturate")

    def values(codes, amax):
        return codes / 448 * amax

    sums = []
    for number in range(4):
        found = []
        for rank in range(ranks):
            first, second = (gradients(rank, m, alike)[number].float() for m in range(2))
            kept = values(in_units(first, first.abs().amax()), first.abs().amax())
            total = kept + second
            found.append((in_units(total, total.abs().amax()), total.abs().amax()))
        largest = max(amax for _, amax in found) * (1 / mu[number])
        total = sum(in_units(values(*one), largest) for one in found)
        codes = round_to(total, "e4m3", overflow="saturate")
        sums.append((codes, largest))
    return sums


@pytest.mark.parametrize("deal", [False, True])
def test_sums_are_of_codes_with_one_scale(deal):
    """Two steps, so that μ has moved; on 1, 2 and 3 ranks. And near the exact sum, within the steps of the
    roundings: each of a rank's codes errs by 1/16 of itself or half the smallest step, three times."""

    def rank():
        group = collectives.world()
        sync, n, mu = scaled_model(group, deal), group.size(), [torch.ones(())] * 4
        for _ in range(2):
            sync.zero_grad()
            for microbatch in range(2):
                for param, grad in zip(sync.trainable, gradients(group.rank(), microbatch)):
                    param.grad = grad.clone()
                sync.on_microbatch_grads(sync.trainable)
                assert all(param.grad is None for param in sync.trainable)
            sync.finish()
            expected = by_hand(n, mu)
            for number, param in enumerate(sync.trainable):
                codes, largest = expected[number]
                assert (param.grad is not None) == sync.updates(param)
                if sync.updates(param):
                    assert param.grad.dtype == FP8 and torch.equal(param.grad.float(), codes)
                    assert torch.equal(param.grad_largest, largest)
                    assert torch.equal(sync.mu[param], next_mu(mu[number], param.grad, n))
                whole = states.full_grad(sync, param)
                assert torch.equal(whole, wide(codes.to(FP8), largest))
                both = [g[number].double() for r in range(n) for g in (gradients(r, 0), gradients(r, 1))]
                exact, reach = sum(both), sum(g.abs() for g in both)
                far = (whole - exact).abs()
                cut_off = codes.abs() == 448
                assert (far <= reach * (4 / 16) + 4 * n * largest / 448 / 2**10)[~cut_off].all()
            mu = [next_mu(m, codes.to(FP8), n) for m, (codes, _) in zip(mu, expected)]
        return [float(m) for m in mu]

    for ranks in (1, 2, 3):
        for mu in launch.run(rank, ranks=ranks):
            assert all(1 / ranks <= m <= 1 for m in mu) and (ranks == 1 or min(mu) < 0.6)


def test_sums_of_equal_gradients_overflow_until_the_factor_is_small_enough_and_then_never():
    """Four ranks with the same gradient: a sum is four times as large. Half of each number would be lost at
    μ = 1; after two steps no sum is cut off any more, and an outlier on one rank changes nothing of that."""

    def rank():
        group = collectives.world()
        sync, lost = scaled_model(group), []
        for number in range(4):
            sync.zero_grad()
            exact = []
            for param, grad in zip(sync.trainable, gradients(0, 0, alike=True)):
                param.grad = grad * (50 if number == 3 and group.rank() == 2 else 1)
                exact.append(grad.float() * (53 if number == 3 else 4))
            sync.finish()
            found = [states.full_grad(sync, param) for param in sync.trainable]
            assert all(x.isfinite().all() for x in found)
            lost.append(max(((x - y).abs().max() / y.abs().max()).item() for x, y in zip(found, exact)))
        return lost, [float(mu) for mu in sync.mu.values()]

    for lost, mu in launch.run(rank, ranks=4):
        assert lost[0] > 0.7 and lost[1] > 0.4 and lost[2] < 1 / 16 and lost[3] < 1 / 8
        assert all(0.25 <= m < 0.26 for m in mu)


def test_a_gradient_that_is_no_number_on_one_rank_is_none_on_all():
    def rank():
        group, found = collectives.world(), []
        for bad in (float("nan"), float("inf")):
            sync = scaled_model(group)
            for number, (param, grad) in enumerate(zip(sync.trainable, gradients(0, 0))):
                param.grad = grad
                if group.rank() == 1 and number == 1:
                    param.grad[0, 0] = bad
            sync.finish()
            whole = [states.full_grad(sync, param) for param in sync.trainable]
            found.append([x.isnan().all().item() for x in whole] + [whole[0].isfinite().all().item()])
        return found

    assert launch.run(rank, ranks=2) == [[[False, True, False, False, True]] * 2] * 2


def test_a_tied_table_on_both_ends_of_a_pipeline_is_one():
    """Its gradient is summed over rows, then stages: the same codes on both, near one process's."""

    def rank(strategy):
        run = start(strategy)
        for number in range(3):
            run.step(batch_of(run, number))
        (table,) = [
            param
            for param, name in run.sync.names.items()
            if name == "layers.0.tokens" or "out.w" in name and "layers.3" in name
        ]
        return states.full_grad(run.sync, table), run.sync.mu[table], states.full_tensor(run.sync, table)

    (first, second), ((alone, *_),) = (
        launch.run(rank, strategy, ranks=strategy.ranks)
        for strategy in (Strategy(pp=2, microbatches=2), Strategy(microbatches=2))
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    assert (first[0] - alone).abs().max() < alone.abs().max() / 8


def test_the_factor_doubles_within_a_thousand_steps_and_halves_at_once():
    mu, none, one = torch.tensor(0.25), torch.zeros(10).to(FP8), torch.zeros(1000, 1000)
    for _ in range(1000):
        mu = next_mu(mu, none, 8)
    assert abs(mu - 0.5) < 1e-4
    one.view(-1)[:10] = -448.0  # 0.001 %: not more
    assert next_mu(mu, one.to(FP8), 8) > mu
    one.view(-1)[10] = 448.0
    assert next_mu(mu, one.to(FP8), 8) == mu / 2 and next_mu(mu / 4, one.to(FP8), 8) == 1 / 8
    assert next_mu(torch.tensor(1.0), none, 8) == 1


def test_fp8_lm():
    """2 + 1 + 1 + 2 = 6 bytes per parameter against 16, and 4 for each scale of a tensor; bytes of the gradients'
    all-reduce exactly half of bfloat16's, and 8 of each tensor. The factor keeps sums from overflowing."""
    test_sums_of_equal_gradients_overflow_until_the_factor_is_small_enough_and_then_never()

    def updated(unit):
        param = torch.nn.Parameter((narrowed := narrow(torch.linspace(-1, 1, 64) * unit, torch.float16))[0])
        param.largest, param.grad_dtype = narrowed[1], FP8
        optimizer = AdamW([param], lr=0.1 * unit, eps=0.0, weight_decay=0.0)
        for _ in range(3):
            param.grad, param.grad_largest = narrow(torch.linspace(0.5, 2, 64) * unit, FP8)
            optimizer.step()
        return wide(param, param.largest) / unit

    assert torch.equal(updated(1.0), updated(2.0**-30))  # scales take any power of two out of all numbers

    def rank():
        found = {}
        for name in ("fp8_lm", "bfloat16"):
            run = start(Strategy(dp=2), name)
            losses = [run.total(run.step(batch_of(run, 0)).loss).item() for _ in range(6)]
            batch = batch_of(run, 1)
            with Ledger() as ledger:
                run.step(batch)
            params = list(run.model.parameters())
            states = [x for s in run.sync.optimizer.state.values() for x in s.values() if torch.is_tensor(x)]
            scales = [x for x in states if not x.dim()]
            kept = params, [p.grad for p in params], states
            held = [sum(x.nbytes for x in some if x.dim()) for some in kept]
            sent = {op: ledger.sent_bytes(op) for op in ("all_reduce", "all_to_all", "all_gather")}
            kinds = [ledger.live_by_kind[kind] for kind in ("parameters", "gradients", "optimizer state")]
            found[name] = held, len(scales), sent, kinds, losses
        return found, sum(p.numel() for p in params), len(params)

    for found, numel, tensors in launch.run(rank, ranks=2):
        held, scales, sent, kinds, losses = found["fp8_lm"]
        assert losses[0] - losses[-1] > 0.1 and abs(losses[-1] - found["bfloat16"][-1][-1]) < 0.03
        assert held == [2 * numel, numel, 3 * numel] == [numel * size for size in POLICY.state_bytes]
        assert scales == 2 * tensors and sum(held) * 16 / 6 == sum(found["bfloat16"][0])
        assert kinds == [2 * numel, numel, 3 * numel + 2 * 4 * tensors]  # and 8 bytes among activations
        assert sent["all_to_all"] + sent["all_gather"] == found["bfloat16"][2]["all_reduce"] / 2 == numel
        assert sent["all_reduce"] == 8 * tensors


def test_a_gradient_is_gone_when_its_codes_are_there_and_sums_start_behind_backward():
    """The bfloat16 ones that are alive behind each hook: none."""

    def rank():
        run = start(Strategy(dp=2))
        params, seen, gone = run.sync.trainable, {}, []
        for param in params:
            hooks = grad_hooks(param)  # before the reducer's, and behind it
            param.register_post_accumulate_grad_hook(
                lambda p: seen.update({p: (p.grad.dtype, weakref.ref(p.grad))})
            )
            hooks.update({key: hooks.pop(key) for key in list(hooks)[:-1]})
            param.register_post_accumulate_grad_hook(lambda p: gone.append((p.grad, seen[p][1]())))
        batch = batch_of(run, 0)
        with Traffic() as ledger:
            run.forward_backward(batch)
            forward_and_backward = ledger.sent_bytes()
            run.sync.finish()
        dtypes = {dtype for dtype, _ in seen.values()}
        return dtypes, len(gone) == len(params), set(gone), forward_and_backward, ledger.sent_bytes() > 0

    for found in launch.run(rank, ranks=2):
        assert found == ({torch.bfloat16}, True, {(None, None)}, 0, True)


def test_dealt_out_whole_tensors_give_the_bits_of_replicas_in_less_memory():
    """Losses, norms, weights and states, μ among them; a rank holds states of its own tensors only, gets their
    gradients only, and resumes in either layout."""

    def rank():
        runs = [start(Strategy(dp=2, zero=zero, bucket_bytes=3000)) for zero in (0, 1)]
        results = [[run.step(batch_of(run, number)) for number in range(3)] for run in runs]
        alike = [torch.equal(a.loss, b.loss) for a, b in zip(*results)]
        grads = equal(states.full_grads(runs[0].sync), states.full_grads(runs[1].sync))
        saved = [run.state_dict() for run in runs]
        resumed = [start(run.strategy) for run in runs]
        for run, state in zip(resumed, reversed(saved)):
            run.load_state_dict(state)
            run.step(batch_of(run, 3))
        for run in runs:
            run.step(batch_of(run, 3))
        after = [run.state_dict() for run in (*runs, *resumed)]
        same = equal(*saved), all(equal(after[0], other) for other in after[1:])
        sync = runs[1].sync
        own = sum(param.numel() for param in sync.trainable if sync.updates(param))
        kept = [x for s in sync.optimizer.state.values() for x in s.values() if torch.is_tensor(x)]
        held = sum(x.nbytes for x in kept if x.dim())
        got = sum(param.grad.nbytes for param in sync.trainable if param.grad is not None)
        batch = batch_of(runs[1], 4)
        with Traffic() as ledger:
            runs[1].step(batch)
        numel, tensors = sum(param.numel() for param in sync.trainable), len(sync.trainable)
        sent = [ledger.sent_bytes(op) for op in ("all_to_all", "all_reduce")]
        sent = sent[0] - (numel - own) - 2 * own, sent[1] - 12 * tensors
        norms = [float(run.step(batch_of(run, 5), 0.3).norm) for run in (runs[1], resumed[0])]
        half = abs(own / numel - 0.5) < 0.1
        return alike, grads, same, held - 3 * own, got - own, half, sent, norms[0] > 0.3

    expected = [True] * 3, True, (True, True), 0, 0, True, (0, 0), True
    assert launch.run(rank, ranks=2) == [expected] * 2


@pytest.mark.parametrize("zero", [0, 1])
def test_gradients_are_clipped_by_their_scales(zero):
    def rank():
        run = start(Strategy(dp=2, zero=zero))
        result = run.step(batch_of(run, 0), 0.01)
        norm = sum(x.square().sum() for x in states.full_grads(run.sync).values()).sqrt()
        return float(result.norm), float(norm)

    for before, after in launch.run(rank, ranks=2):
        assert before > 0.1 and abs(after - 0.01) < 1e-5


def test_pipelines_context_and_microbatches_train_as_bfloat16_does():
    """Ten steps on the same batch: the loss falls as with bfloat16, within a tenth of the fall. A pipeline
    gives the bits of one process, also with products put off."""
    layouts = [Strategy(cp=2), Strategy(pp=2, microbatches=2, schedule="zb_h1")]
    layouts.append(Strategy(dp=2, pp=2, microbatches=2, zero=1))

    def losses(strategy, precision="fp8_lm"):
        run = start(strategy, precision, tied=False)
        found = [run.total(run.step(batch_of(run, 0)).loss).item() for _ in range(10)]
        return found, run.state_dict()["parameters"]

    def alone():
        return [losses(Strategy(microbatches=2), precision) for precision in ("bfloat16", "fp8_lm")]

    def rank():
        return [losses(s) for s in layouts if s.ranks == collectives.world().size()]

    (((bfloat16, _), (fp8, weights)),) = launch.run(alone, ranks=1)
    fall = bfloat16[0] - bfloat16[-1]
    assert fall > 0.3 and abs(fp8[-1] - bfloat16[-1]) < fall / 10
    for ranks in (2, 4):
        for found in launch.run(rank, ranks=ranks):
            mine = [s for s in layouts if s.ranks == ranks]
            for strategy, (here, parameters) in zip(mine, found, strict=True):
                assert abs(here[-1] - bfloat16[-1]) < fall / 10, strategy
                if strategy.pp > 1 and strategy.dp == 1:
                    assert here == fp8 and equal(parameters, weights)


def test_refused_in_one_line():
    scaled = dict(precision="fp8_lm")
    tied = Strategy(dp=2, pp=2, zero=1, microbatches=2, **scaled)
    why = "a scale is of a whole tensor, and gradients have one of their own; use"

    def other_state():
        state = start(Strategy(), "bfloat16")
        state.step(batch_of(state, 0))
        start(Strategy()).load_state_dict(state.state_dict())

    refused = {
        f"precision='fp8_lm' with {setting}: {why}": lambda values=values: Strategy(**values, **scaled)
        for setting, values in {
            "tp=2": dict(tp=2),
            "ep=2": dict(dp=2, ep=2),
            "zero=2": dict(dp=2, zero=2),
            "zero='III'": dict(dp=2, zero="III"),
            "loss_scale=2.0": dict(loss_scale=2.0),
            "post_validation=True": dict(pp=2, post_validation=True),
        }.items()
    }
    refused |= {
        "precision='fp8_lm', zero=1, pp=2 and a tied table: the ends": lambda: tied.check(small(), 4),
        "moments are torch.float32, here torch.float8_e4m3fn; go on with": other_state,
        "no gradient for": lambda: scaled_model(collectives.world()).finish(),
    }
    check_refusals(refused, ranks=1)
