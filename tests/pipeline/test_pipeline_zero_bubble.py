"""Backwards in two halves: the papers' bubbles and peaks, a list scheduler, gradients of real ranks."""

import random
import weakref
from dataclasses import replace
from fractions import Fraction
from functools import cache
from itertools import product

import pytest
import torch

from minitrain import collectives, launch
from minitrain.model.gpt import Stages
from minitrain.model.training.optim import AdamW, clip_grad_norm
from minitrain.model.training.step import Batch, NoReducer
from minitrain.pipeline.deferred import Deferred
from minitrain.pipeline.lower import lower, messages
from minitrain.pipeline.partition import even
from minitrain.pipeline.runtime import Runner
from minitrain.pipeline.schedule import B, F, I, Schedule, W, check, in_flight, peak
from minitrain.pipeline.schedules.greedy import greedy, urgency
from minitrain.pipeline.schedules.one_direction import interleaved, one_f_one_b
from minitrain.pipeline.schedules.zero_bubble import bubble, v_half, v_min, zb_h1, zb_h2, zb_interleaved, zb_v
from minitrain.pipeline.simulate import Costs, simulate
from minitrain.ranks.launch import dryrun
from minitrain.ranks.ledger import Ledger
from minitrain.systems.pipeline.post_validation import PostValidation
from tests.parallel import TOLERANCE, Problem, one_process, pipeline_difference, small, train_pipeline
from tests.pipeline.lists import peaks, split
from tests.pipeline.test_pipeline_runtime import account

PROBLEM = Problem(
    config=small(num_layers=6), batch_sizes=(8, 7), microbatches=4, frozen="layers.1.norm1.weight"
)
GRID = [(1, 3), (2, 1), (2, 5), (3, 7), (4, 2), (4, 12), (8, 15), (16, 4)]


@cache
def reference():
    return one_process(PROBLEM)


def waiting(schedule: Schedule, costs: Costs = Costs()):
    return bubble(simulate(schedule, costs))


# ---- ZB-H1 and ZB-H2 -------------------------------------------------------------------------------------


def test_zero_bubble():
    """Table 2: bubbles and peaks; 9, 3 and 0 at p=4; and a greedy scheduler finds 0 with 2p-1 in flight."""
    assert [waiting(make(4, 8)) for make in (one_f_one_b, zb_h1, zb_h2)] == [9, 3, 0]
    for p in (2, 3, 4, 8, 16):
        for m in (2 * p - 1, 4 * p) if p < 16 else (2 * p,):
            h1, h2 = zb_h1(p, m), zb_h2(p, m)
            uneven = Costs(F=Fraction(5, 3), I=Fraction(7, 4), W=Fraction(3, 2))
            for costs in (Costs(), Costs(F=3, I=4, W=2), uneven):
                f, i, w = costs.F, costs.I, costs.W
                assert waiting(one_f_one_b(p, m), costs) == (p - 1) * (f + i + w)
                assert waiting(h1, costs) == (p - 1) * (f + i - w)
                assert waiting(h2, costs) == (p - 1) * (f + i - 2 * w)
            assert simulate(h1).makespan == 3 * m + (p - 1)
            assert max(peaks(one_f_one_b(p, m))) == p and set(peaks(h1)) == {p}
            assert set(peaks(h2)) == {2 * p - 1}
    for p in (4, 8):
        found = greedy(range(p), p, 3 * p, limit=2 * p - 1)
        assert waiting(found) == 0 and max(peaks(found)) == 2 * p - 1
        assert waiting(greedy(range(p), p, 3 * p, limit=2 * p - 2)) > 0
    assert trained_alike(4, zb_h1(4, 4)) < TOLERANCE


def test_the_smallest_m_and_a_long_w():
    for p in (2, 4, 8):
        assert waiting(zb_h1(p, p)) == p - 1 and waiting(zb_h1(p, p - 1)) > p - 1
        assert waiting(zb_h2(p, 2 * p - 1)) == 0 and waiting(zb_h2(p, 2 * p - 2)) > 0
        for m in (1, p):
            assert set(peaks(zb_h1(p, m)) + peaks(zb_h2(p, m))) == {m}
        for f, i, w in [(1, 1, 2), (2, 1, 3), (1, 3, 2), (1, 1, 4)]:
            costs = Costs(F=f, I=i, W=w)
            assert waiting(zb_h1(p, 4 * p), costs) == (p - 1) * i
            assert waiting(zb_h2(p, 4 * p), costs) == (p - 1) * max(0, i - f)


def test_steps_in_a_row_wait_only_for_the_bubble():
    """Two steps with no common stop: the second adds its work and `bubble`, so with ZB-H2 only its work."""
    for p, m in [(2, 4), (4, 8), (4, 12), (8, 16)]:
        for make, wait in ((one_f_one_b, 3 * (p - 1)), (zb_h1, p - 1), (zb_h2, 0)):
            one = make(p, m)
            later = lambda action: action._replace(microbatch=action.microbatch + m)
            rows = [[*entries, *map(later, entries)] for entries in one.ranks]
            two = check(Schedule("two steps", rows, p, 2 * m))
            assert simulate(two).makespan - simulate(one).makespan == 3 * m + wait


def test_interleaved_zero_bubble():
    """ZB-H1's bubble in times of a stage, 1/v of a rank's; 1F1B's memory, less than interleaved 1F1B's."""
    assert zb_interleaved(4, 8, 1).ranks == zb_h1(4, 8).ranks
    for p, m, v in [(2, 4, 3), (4, 4, 2), (4, 8, 2), (4, 16, 4), (8, 16, 2)]:
        schedule, plain = zb_interleaved(p, m, v), interleaved(p, m, v)
        costs = Costs(F=Fraction(3, v), I=Fraction(4, v), W=Fraction(2, v))
        assert waiting(schedule, costs) == Fraction((p - 1) * (3 + 4 - 2), v)
        assert waiting(plain, costs) == Fraction((p - 1) * 9, v) and set(peaks(schedule)) == {v * p}
        assert m == p or max(peaks(plain)) == v * p + p - 1
        found = {link: len(sent) for link, sent in messages(schedule).items()}
        assert found == {link: len(sent) for link, sent in messages(plain).items()}


def test_v_shape():
    """Memory of 1F1B's p microbatches: 1/3, 1/2, all; bubbles 2/3, 1/2, 0 of 1F1B's; twice the messages."""
    for p in (2, 3, 4, 5, 6, 8, 13):
        # a rank's stage takes as long as its two in a V
        whole = waiting(one_f_one_b(p, 2 * p), Costs(F=2, I=2, W=2))
        assert whole == 6 * (p - 1)
        for m in (2 * p - 1, 3 * p) if p < 8 else (2 * p - 1,):
            smallest, half, full = v_min(p, m), v_half(p, m), zb_v(p, m)
            assert max(peaks(smallest)) == 2 * ((p + 4) // 3)  # activations of a stage, two to a microbatch's
            assert max(peaks(half)) == 2 * ((p + 2) // 2) and max(peaks(full)) == 2 * p
            assert waiting(smallest) == Fraction(2, 3) * whole + (1 if p % 3 == 0 else -1)
            assert waiting(half) == Fraction(1, 2) * whole - p % 2 and waiting(full) == 0
            for schedule in (smallest, half, full):
                assert schedule.stages_of(1) == [1, 2 * p - 2]
                sent, straight = (sum(map(len, messages(s).values())) for s in (schedule, one_f_one_b(p, m)))
                assert sent == 2 * straight == 4 * (p - 1) * m
    for make, needed in ((v_min, 6), (v_half, 6), (zb_v, 11)):
        assert waiting(make(6, needed)) == waiting(make(6, 30))
    assert trained_alike(4, v_min(4, 4)) < TOLERANCE


# ---- the list scheduler ----------------------------------------------------------------------------------


def test_greedy_keeps_its_limits_and_never_gets_stuck():
    draw = random.Random(11)
    for _ in range(60):
        p, m, v = draw.randint(1, 4), draw.randint(1, 9), draw.randint(1, 3)
        place = [draw.randrange(p) for _ in range(p * v)]
        place = [sorted(set(place)).index(rank) for rank in place]
        p, split_it = max(place) + 1, draw.random() < 0.7
        limit = [place.count(rank) + draw.randint(0, 4) for rank in range(p)]
        order = {action: draw.random() for action in product("BFIW", range(len(place)), range(m))}
        costs = Costs(**{kind: draw.randint(1, 3) for kind in "FIW"})
        costs = replace(costs, send=draw.randint(0, 2))
        priority = draw.choice([{}, {"priority": order.__getitem__}])
        found = greedy(place, len(place), m, costs, limit, split_it, **priority)
        assert check(found) is found and found.splits_backward == split_it
        for rank in range(p):
            assert peak(found, rank) <= limit[rank] and in_flight(found, rank)[-1] == 0
            with pytest.raises(ValueError, match="would wait for ever"):
                greedy(place, len(place), m, limit=[place.count(r) - (r == rank) for r in range(p)])


def test_what_is_urgent():
    """Backwards, forwards, gradients of weights; older microbatches; of one what is nearer to its end."""
    wanted = [I(0, 0), B(0, 1), I(1, 1), F(2, 0), F(1, 0), F(0, 1), W(0, 0), W(1, 0)]
    assert sorted(reversed(wanted), key=urgency) == [wanted[1], wanted[0], *wanted[2:]]


def test_every_list_is_valid_and_holds_what_its_module_says():
    for p, m in GRID:
        made = [
            zb_h1(p, m), zb_h2(p, m), v_min(p, m), v_half(p, m), zb_v(p, m), greedy(range(p), p, m, limit=p),
        ]  # fmt: skip
        for schedule, most in zip(made, (p, 2 * p - 1, 2 * ((p + 4) // 3), 2 * ((p + 2) // 2), 2 * p, p)):
            assert check(schedule) is schedule and schedule.splits_backward and max(peaks(schedule)) <= most
            assert simulate(schedule, Costs(F=2, I=3, W=1, send=Fraction(1, 2))).makespan > 0
            if m < 20:
                assert len(lower(schedule)) == p
    for large in (zb_interleaved(16, 64, 2), zb_h2(16, 64), v_half(16, 64)):
        assert check(large) is large


# ---- real ranks ------------------------------------------------------------------------------------------

REAL = {
    "zb-h2 of 2": (2, zb_h2(2, 4)), "zb-h2": (4, zb_h2(4, 7)), "interleaved": (2, zb_interleaved(2, 4, 2)),
    "v-half": (2, v_half(2, 4)), "zb-v": (4, zb_v(4, 7)), "greedy": (2, greedy([0, 1, 1, 0], 4, 4, limit=3)),
}  # fmt: skip


def trained_alike(ranks, schedule):
    """How far from one process."""
    problem = replace(PROBLEM, microbatches=schedule.microbatches)
    return pipeline_difference(problem, dict(dp=1, pp=ranks), schedule, reference())


@pytest.mark.parametrize("name", REAL)
def test_equals_one_process(name):
    assert trained_alike(*REAL[name]) < TOLERANCE


def test_without_one_w_the_gradient_is_wrong():
    """A runner that skips one W: its stage has a wrong gradient, its neighbours a right one."""
    problem = replace(PROBLEM, batch_sizes=(8,), clip=None)

    def train():
        weights = Runner.weights
        Runner.weights = lambda self, action: (
            self.in_flight.pop(action[1:]) if action == W(1, 2) else weights(self, action)
        )
        return train_pipeline(problem, dict(dp=1, pp=2), zb_v(2, 4))

    expected, found = one_process(problem).grads, {}
    for outcome in launch.run(train, ranks=2):
        found |= outcome.grads
    wrong = {name for name, grad in expected.items() if (grad - found[name]).abs().max() > TOLERANCE}
    linears = ("attention.q", "attention.k", "attention.v", "attention.out", "mlp.gate", "mlp.up", "mlp.down")
    assert wrong == {f"layers.{layer}.{linear}.weight" for layer in even(6, 4)[1] for linear in linears}


def test_i_and_w_cost_what_b_costs():
    """FLOPs of the ledger, action by action: the halves of every backward against the whole one."""
    whole, halves, costs = interleaved(2, 4, 2), zb_interleaved(2, 4, 2), [{}, {}]
    for accounts in launch.run(lambda: [account(schedule)[0] for schedule in (whole, halves)], ranks=2):
        for found, flops in zip(costs, accounts):
            found |= flops
    for stage in range(4):
        for i in range(4):
            whole, for_input, for_weights = (
                of[str(kind(stage, i))] for of, kind in ((costs[0], B), (costs[1], I), (costs[1], W))
            )
            assert for_input + for_weights == whole and for_input > 0 and for_weights > 0
            assert costs[0][str(F(stage, i))] == costs[1][str(F(stage, i))]


def test_between_i_and_w_the_operands_of_the_products_stay():
    """deferred.py: of each linear its input and its output's gradient, nothing else of what forward kept."""
    stage = dict(Stages(small(num_layers=4), {1: range(2, 4)}, dtype=torch.float64).items())[1]
    ledger = Ledger()
    with ledger:
        x = torch.randn(2, 8, 16, dtype=torch.float64, requires_grad=True)
        dy = torch.randn(2, 8, 16, dtype=torch.float64)
        with Deferred() as later:
            end = torch.autograd.graph.get_gradient_edge(stage(x, torch.arange(8)))
        after_f = ledger.live_by_kind["activations"]
        torch.autograd.backward(end, dy)
        del end
        x.grad = None
        products = [(weight.shape, kept.numel(), grad.numel()) for weight, _, kept, grad in later.products]
        held = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for _, _, *both in later.products
            for tensor in both
        }
        for tensor in (x, dy):
            held.pop(tensor.untyped_storage().data_ptr(), None)
        after_i = ledger.live_by_kind["activations"]
        later.weights()
        after_w = ledger.live_by_kind["activations"]
    linears = [module for module in stage.modules() if isinstance(module, torch.nn.Linear)]
    assert sorted(shape for shape, _, _ in products) == sorted(linear.weight.shape for linear in linears)
    # 2 rows of 8 tokens
    assert all(kept == 16 * shape[1] and grad == 16 * shape[0] for shape, kept, grad in products)
    assert after_i - after_w == sum(held.values()) and after_i < after_f
    assert all(linear.weight.grad is not None for linear in linears)


def test_between_i_and_w_a_stage_without_products_keeps_nothing():
    """Not what arrived: neither the runner nor the graph, which ends there."""
    arrived, alive = [], []

    def on_rank():
        schedule, stage = split(one_f_one_b(2, 3), late=0), torch.nn.LayerNorm(4, dtype=torch.float64)
        loss = lambda y, _: y.square().sum()
        runner = Runner({1: stage}, schedule, collectives.world(), loss, NoReducer(), width=4)
        get, weights = runner.get, runner.weights

        def watched(what):
            x = get(what)
            arrived.append(weakref.ref(x))
            return x

        def then(action):
            alive.append(sum(x() is not None for x in arrived))
            weights(action)

        runner.get, runner.weights = watched, then
        tokens = torch.zeros(3, 2, dtype=torch.int64)
        runner(Batch(tokens, tokens, torch.tensor(6)))

    dryrun.run(on_rank, rank=1, ranks=2)
    assert len(arrived) == 3 and alive == [0, 0, 0]


def test_post_validation():
    """Equal to clipping by an all-reduced norm, wherever the limit is passed; also when it is no number."""

    def rank():
        group, results = collectives.world(), []
        for scales in ((0.1, 0.1, 0.1), (5.0, 0.1, 0.1), (0.1, 0.1, 5.0), (0.5, 0.5, 0.5)):
            pairs = [torch.nn.Parameter(torch.linspace(-1, 1, 6, dtype=torch.float64)) for _ in range(2)]
            plain, ours = (AdamW([param], lr=0.1) for param in pairs)
            post, back = PostValidation(ours, 1.0, group), []
            for step in range(3):
                for param in pairs:
                    numbers = torch.cos(torch.arange(6, dtype=torch.float64) + step + group.rank())
                    param.grad = numbers * scales[group.rank()]
                norm = clip_grad_norm([pairs[0]], 1.0, stages=group)
                plain.step()
                post.step()
                found, taken_back = post.validate()
                back.append(taken_back)
                assert abs(found - norm) < 1e-12
            assert (pairs[0] - pairs[1]).abs().max() < 1e-12
            assert (pairs[0].grad - pairs[1].grad).abs().max() < 1e-12
            results.append(any(back))
        before = pairs[1].detach().clone()
        pairs[1].grad = torch.full_like(pairs[1], float("nan") if group.rank() == 2 else 0.1)
        post.step()
        norm, taken_back = post.validate()
        assert torch.equal(before, pairs[1]) and not torch.isfinite(norm)
        return results + [taken_back]

    # nothing is clipped; rank 0 sees at once that it is, and so all; only rank 2 does, the others go back;
    # rank 1 does; no number
    expected = [[False, False, True, True, True], [False, False, True, False, True], [False] * 5]
    assert launch.run(rank, ranks=3) == expected
