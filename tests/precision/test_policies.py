"""Policies: their bytes are those of tensors that exist, gradients add up and travel as they say, cutting changes
no bit, and a scaled loss that overflows anywhere is skipped everywhere.
"""

from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch

from minitrain import collectives, launch
from minitrain.compose.parallelize import parallelize
from minitrain.course.saved_tensors import SavedTensors
from minitrain.data_parallel import states
from minitrain.model.config import ExpertsConfig
from minitrain.model.gpt import cross_entropy_sum
from minitrain.model.mixture import mixtures
from minitrain.model.training.optim import AdamW
from minitrain.plan.strategy import Strategy
from minitrain.precision.mixed import LossScale, bytes_by_kind, keep_states
from minitrain.precision.policies import BYTES, POLICIES
from minitrain.ranks.ledger import Ledger
from tests.parallel import Traffic, small
from tests.precision.training import rows, same, started

CONFIG = small(num_layers=2, tied=False)
LOW = [name for name, policy in POLICIES.items() if policy.narrow and not policy.scaled]


start = partial(started, config=CONFIG)


def steps(run, count=2, first=0):
    return [run.step(run.batch(rows(), step), 0.5) for step in range(first, first + count)]


def parameters(run):
    return run.state_dict()["parameters"]


def test_bytes_per_parameter_are_those_of_the_tensors_that_a_step_leaves():
    assert {name: policy.bytes_per_parameter for name, policy in POLICIES.items()} == {
        "float64": 32, "float32": 16, "bfloat16": 16, "float16": 16, "bfloat16_main_grads": 18,
        "bfloat16_short_moments": 14, "bfloat16_jit": 14, "bfloat16_stochastic": 12,
        "bfloat16_stochastic_short_mean": 10, "bfloat16_stochastic_short": 8, "fp8_lm": 6,
    }  # fmt: skip

    def rank():
        found = {}
        for name in POLICIES:
            run = start(Strategy(precision=name))
            steps(run, 1)
            params = list(run.model.parameters())
            states = [run.sync.optimizer.state[param] for param in params]
            tensors = ([p] for p in params), ([p.grad] for p in params), (state.values() for state in states)
            found[name] = tuple(
                sum(x.nbytes for some in kind for x in some if isinstance(x, torch.Tensor) and x.dim())
                for kind in tensors
            )
        return sum(param.numel() for param in params), found

    ((numel, found),) = launch.run(rank, ranks=1)
    for name, policy in POLICIES.items():
        assert found[name] == tuple(numel * size for size in policy.state_bytes), name


def test_the_policy_speaks_where_the_optimizer_was_not_told_otherwise():
    """But scaled codes have no master, and the policy's moments; groups that are added later are alike."""
    bfloat16, float32 = torch.bfloat16, torch.float32

    def kept(policy, **told):
        optimizer = AdamW([torch.nn.Parameter(torch.ones(2, dtype=bfloat16))], **told)
        keep_states(optimizer, POLICIES[policy])
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3, dtype=bfloat16))]})
        first, later = ((g["master_dtype"], g["moment_dtypes"]) for g in optimizer.param_groups)
        assert first == later
        return first

    assert kept("bfloat16_short_moments") == (float32, (bfloat16, bfloat16))
    told = dict(master_dtype=torch.float64, moment_dtypes=(float32, float32))
    assert kept("bfloat16_short_moments", **told) == (torch.float64, (float32, float32))
    scaled = None, (torch.float8_e4m3fn, torch.float16)
    assert kept("fp8_lm", master_dtype=float32) == kept("fp8_lm", moment_dtypes=(float32, float32)) == scaled
    by_chance = kept("bfloat16_stochastic_short", master_dtype=float32, moment_dtypes=(float32, bfloat16))
    assert by_chance == (None, (float32, bfloat16)), "moments are as they were told, but there is no master"


def sent_by_dtype(ledger: Ledger) -> dict[str, int]:
    total = Counter()
    for call in ledger._matching():
        total[str(call.dtype).removeprefix("torch.")] += call.sent_bytes
    return dict(total)


def test_what_travels_has_the_bits_of_the_policy():
    """Two ranks: each sends as many bytes as the gradients have, 2(n-1)/n = 1, in their dtype. With matrices
    cut each sends activations, in theirs."""

    def rank():
        found = {}
        for name in POLICIES:
            run = start(Strategy(dp=2, precision=name))
            batch = run.batch(rows(), 0)
            with Ledger() as ledger:
                run.step(batch)
            kept = bytes_by_kind(run.model.parameters(), run.sync.optimizer)
            kinds = [ledger.live_by_kind[kind] for kind in ("parameters", "gradients", "optimizer state")]
            found[name] = sent_by_dtype(ledger), kept, kinds
            if not POLICIES[name].scaled:
                run = start(Strategy(tp=2, precision=name))
                batch = run.batch(rows(), 0)
                with Traffic() as ledger:
                    run.step(batch)
                found[name] += (sent_by_dtype(ledger),)
        params = list(start(Strategy(dp=2)).model.parameters())
        return found, sum(param.numel() for param in params), len(params)

    for found, numel, tensors in launch.run(rank, ranks=2):
        in_float32, exact = found["float32"][3]["float32"], found["bfloat16"][3]["float32"]  # of the loss
        assert exact < in_float32 / 50
        for name, (sent, kept, kinds, *cut) in found.items():
            policy, scales = POLICIES[name], kept.pop("scales")
            codes = {"uint8": numel, "float32": 8 * tensors}  # and what scales they are in units of
            assert sent == (codes if policy.scaled else {policy.gradients: numel * BYTES[policy.gradients]})
            master = BYTES[policy.master] if policy.master else 0
            moments = sum(BYTES[dtype] for dtype in policy.moments)
            sizes = BYTES[policy.weights], BYTES[policy.gradients], master, moments
            assert tuple(kept.values()) == tuple(numel * size for size in sizes), name
            assert scales == 16 * tensors * policy.scaled and sum(kinds) == sum(kept.values()) + scales / 2
            if name == "float32":
                assert cut == [{"float32": in_float32}]
            elif cut:
                size = BYTES[policy.activations]
                assert cut[0][policy.activations] == (in_float32 - (exact if size < 4 else 0)) * size / 4, (
                    name
                )


def test_activations_are_half_as_large_in_16_bits():
    """Of all that autograd keeps, what is float32 under `float32` is half of it in 16 bits, but for the few
    numbers per token that norms, attention and the loss keep exact."""

    def rank():
        kept = {}
        for name in POLICIES:
            run = start(Strategy(precision=name))
            batch = run.batch(rows(), 0)
            with SavedTensors(run.model) as saved:
                run.model(batch.tokens)
            kept[name] = [(one.shape, one.dtype, one.bytes) for one in saved.saved]
        return kept

    (kept,) = launch.run(rank, ranks=1)
    exact = kept["float32"]
    for name, found in kept.items():
        policy, halves = POLICIES[name], 0
        for (shape, dtype, size), (again, narrow, less) in zip(exact, found, strict=True):
            assert shape == again
            if dtype != narrow:
                assert (dtype, narrow) == (torch.float32, getattr(torch, policy.activations)), name
                assert less * 4 == size * BYTES[policy.activations]
                halves += size
        total = sum(size for *_, size in exact)
        assert halves > 0.9 * total if policy.activations != "float32" else halves == 0


def test_cutting_changes_no_bit_under_any_policy():
    """Two ranks: every sum has two terms, so its order does not matter; updates work on elements."""
    layouts = [Strategy(dp=2, zero=zero, bucket_bytes=3000) for zero in (0, 1, 2, 3)]
    layouts.append(Strategy(dp=2, zero="IGG", node=2))

    def rank():
        different = []
        for number, name in enumerate(LOW):  # two of the ways to cut each, in turn
            some = layouts[0], layouts[1 + number % 4], layouts[1 + (number + number // 4 + 1) % 4]
            first, *others = (start(replace(strategy, precision=name)) for strategy in some)
            norms = {tuple(result.norm.item() for result in steps(run)) for run in (first,)}
            for run in others:
                results = steps(run)
                if not same(parameters(run), parameters(first)):
                    different.append((name, str(run.strategy)))
                norms.add(tuple(result.norm.item() for result in results))
            shown = {dtype for state in first.sync.optimizer.state.values() for dtype in dtypes_of(state)}
            policy = POLICIES[name]
            assert shown == {policy.master, *policy.moments} - {None}, name
        return different

    assert launch.run(rank, ranks=2) == [[], []]


def dtypes_of(state):
    return [str(x.dtype).removeprefix("torch.") for x in state.values() if isinstance(x, torch.Tensor)]


WIDE = [Strategy(), Strategy(microbatches=4)]
WIDE += [Strategy(dp=2, zero=zero, microbatches=2) for zero in (0, 1, 2, 3)]
WIDE += [
    Strategy(dp=2, zero="III", node=2, microbatches=2),
    Strategy(tp=2, sequence_parallel=True, microbatches=2),
    Strategy(pp=2, schedule="zb_h1", microbatches=4),
    Strategy(pp=2, schedule="1f1b", microbatches=4, recompute="stage"),
]


def test_main_gradients_add_up_and_travel_in_float32():
    """Sums of the bfloat16 gradients of microbatches, and of ranks, in float32; policy `bfloat16` rounds each
    sum: the control. Twice the bytes of gradients travel."""
    layouts = [s for s in WIDE if s.pp == 1 and not s.sequence_parallel]

    def rank():
        found = {}
        for strategy in [s for s in layouts if s.ranks == collectives.world().size()]:
            sent = {}
            for name in ("bfloat16_main_grads", "bfloat16"):
                run = start(replace(strategy, precision=name))
                with Traffic() as ledger:
                    run.step(run.batch(rows(), 0), None)
                sent[name] = ledger.sent_bytes("all_reduce") + ledger.sent_bytes("reduce_scatter")
                grads = {run.sync.names[p]: states.full_grad(run.sync, p) for p in run.sync.trainable}
                found[str(strategy), name] = grads
            found[str(strategy), "bytes"] = sent["bfloat16_main_grads"], sent["bfloat16"]
        return found

    def terms():
        """The gradient of each row, which is one microbatch: what every layout adds up here."""
        run, exact = start(Strategy(precision="bfloat16")), {}
        batch = run.batch(rows(), 0)
        for row in range(4):
            run.sync.zero_grad()
            part = dict(tokens=batch.tokens[row : row + 1], targets=batch.targets[row : row + 1])
            run.forward_backward(batch._replace(**part))
            run.sync.finish()
            for param in run.sync.trainable:
                exact.setdefault(run.sync.names[param], []).append(param.grad.float())
        return {name: sum(grads) for name, grads in exact.items()}

    (exact,) = launch.run(terms, ranks=1)
    for ranks in (1, 2):
        for found in launch.run(rank, ranks=ranks):
            for (layout, name), grads in found.items():
                if name == "bytes":
                    assert ranks == 1 or grads[0] - 8 == 2 * (grads[1] - 8), "but for the count of targets"
                elif layout != str(Strategy()):
                    same_sums = all(
                        torch.allclose(grads[n].float(), exact[n], rtol=1e-6, atol=1e-9) for n in exact
                    )
                    assert same_sums == (name == "bfloat16_main_grads"), (layout, name)
                    dtypes = {grad.dtype for grad in grads.values()}
                    assert dtypes == {getattr(torch, POLICIES[name].gradients)}


def test_a_scaled_loss_is_a_power_of_two_away_from_an_unscaled_one():
    """In float64 nothing underflows: scaling must not change one bit, whatever the layout."""

    def rank():
        wrong = []
        for strategy in [s for s in WIDE if s.ranks == collectives.world().size()]:
            plain = start(replace(strategy, precision="float64"))
            scaled = start(replace(strategy, precision="float64", loss_scale=2.0**20, loss_scale_window=1))
            pairs = zip(steps(plain), steps(scaled))
            equal = all(torch.equal(a.loss, b.loss) and torch.equal(a.norm, b.norm) for a, b in pairs)
            if not (equal and same(parameters(plain), parameters(scaled)) and scaled.scale.factor == 2.0**22):
                wrong.append(str(strategy))
        return wrong

    assert launch.run(rank, ranks=1) == [[]] and launch.run(rank, ranks=2) == [[], []]


CUT = dict(dp=2, zero="IGG", node=2), dict(tp=2), dict(pp=2, microbatches=2), dict(cp=2)
OVERFLOWS = [Strategy(dp=2, zero=zero, precision="float16") for zero in (0, 1, 2, 3)]
OVERFLOWS += [Strategy(precision="float16", **cut) for cut in CUT]


def test_loss_scaling():
    """All ranks skip a step in which one rank's loss is a million times too large, and resume exactly. Control:
    without the skip weights are no numbers."""

    def rank():
        wrong = []
        for strategy in OVERFLOWS:
            too_large = [False]

            factor = lambda: 1e6 if collectives.world().rank() == 1 and too_large[0] else 1.0
            loss_fn = lambda logits, targets: cross_entropy_sum(logits, targets) * factor()
            more = {} if strategy.tp > 1 else dict(loss_fn=loss_fn)
            run = start(strategy, **more)
            if strategy.tp > 1:  # its loss is its own: there the gradient of one rank is too large
                list(run.model.parameters())[3].register_hook(lambda grad: grad * factor())
            steps(run, 1)
            before, too_large[0] = parameters(run), True
            (bad,) = steps(run, 1, first=1)
            too_large[0] = False
            skipped = not bad.updated and same(parameters(run), before) and run.scale.factor == 2.0**15
            saved = run.state_dict()
            (good,) = steps(run, 1, first=2)
            after, resumed = parameters(run), start(strategy, **more)
            resumed.load_state_dict(saved)
            steps(resumed, 1, first=2)
            exact = same(parameters(resumed), after) and resumed.scale.state_dict() == run.scale.state_dict()
            moved = good.updated and not same(after, before)
            finite = all(x.isfinite().all() for x in after.values())
            if not (skipped and exact and moved and finite):
                wrong.append((str(strategy), skipped, exact, moved, bool(finite)))
        run = start(OVERFLOWS[0], loss_fn=loss_fn)
        run.scale.finite, too_large[0] = lambda norm: True, True
        steps(run, 1)
        assert not all(x.isfinite().all() for x in parameters(run).values())
        return wrong

    assert launch.run(rank, ranks=2) == [[], []]
    test_the_factor_doubles_after_a_window_and_halves_at_once()
    test_small_gradients_need_the_factor()
    test_a_scaled_loss_is_a_power_of_two_away_from_an_unscaled_one()


def test_a_step_that_is_left_out_moves_no_bias_of_a_router():
    """And the load of its tokens is forgotten. Control: without overflow the biases move."""
    experts = ExpertsConfig(4, 1, "deepseek", bias_speed=0.5)

    def rank():
        found = []
        for factor in (2.0**100, 1.0):
            run = started(Strategy(precision="float16", loss_scale=factor), replace(CONFIG, experts=experts))
            (result,) = steps(run, 1)
            routers = [layer.router for layer in mixtures(run.model.layers)]
            moved = any(bool(router.bias.any()) for router in routers)
            found.append((result.updated, moved, [router.load for router in routers]))
        return found

    assert launch.run(rank, ranks=1) == [[(False, False, [0, 0]), (True, True, [0, 0])]]


def test_the_factor_doubles_after_a_window_and_halves_at_once():
    scale, number, none = LossScale(8.0, 2), torch.tensor(1.0), torch.tensor(float("nan"))
    assert [scale.finite(norm) for norm in (number, number, none, number, none)] == [1, 1, 0, 1, 0]
    assert scale.state_dict() == {"factor": 4.0, "good_steps": 0}
    assert [scale.finite(none), scale.finite(none)] == [False, False] and scale.factor == 1
    with pytest.raises(ValueError, match="gradients are not finite at loss scale 1, which is the least"):
        scale.finite(torch.tensor(float("inf")))
    saved, goes_on = LossScale(8.0, 3), LossScale(1.0, 3)
    assert saved.finite(number) and saved.finite(number)
    goes_on.load_state_dict(saved.state_dict())
    assert goes_on.finite(number) and goes_on.factor == 16  # the third good step in a row


def test_small_gradients_need_the_factor():
    """float16 has nothing between 0 and 2^-24 = 5.96e-8: with a loss of millions of tokens, weights stand still."""

    def rank():
        moved = {}
        unscaled = dict(loss_scale=1.0, loss_scale_window=10_000)
        for name, policy in dict(scaled={}, unscaled=unscaled).items():
            run = start(Strategy(precision="float16", **policy))
            batch = run.batch(rows(), 0)
            run.step(batch._replace(num_valid=batch.num_valid * 10_000_000), None)
            moved[name] = [bool(x.grad.any()) for x in run.model.parameters()]
        return moved

    (moved,) = launch.run(rank, ranks=1)
    assert all(moved["scaled"]) and not any(moved["unscaled"])


def test_an_optimizer_that_cannot_keep_what_the_policy_says_is_refused():
    def rank():
        said = []
        for strategy in (Strategy(precision="bfloat16"), Strategy(loss_scale=2.0)):
            try:
                parallelize(CONFIG, strategy, lambda params: torch.optim.SGD(params, lr=1e-2))
            except ValueError as error:
                said.append(str(error))
        return said

    cure = "which the strategy's precision needs: use minitrain's AdamW, or a precision without it"
    (said,) = launch.run(rank, ranks=1)
    assert said == [f"SGD has no {name}, {cure}: float32, float64" for name in ("master_dtype", "grad_scale")]
