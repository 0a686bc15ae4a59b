"""Pipelines over slices of a sequence: the papers' bubbles, lengths by dynamic programming, one process."""

from fractions import Fraction
from functools import cache
from itertools import combinations, pairwise, product

import pytest
import torch

from minitrain import launch
from minitrain.compose.parallelize import parallelize
from minitrain.model.layers import naive_attention
from minitrain.pipeline.schedule import Action, check, peak
from minitrain.pipeline.schedules.one_direction import (
    causal_cost,
    gpipe,
    makespan,
    on_each_rank,
    one_f_one_b,
    seq1f1b,
    slice_lengths,
    terapipe,
)
from minitrain.pipeline.simulate import Costs, simulate
from minitrain.plan.strategy import Strategy
from minitrain.systems.pipeline.sliced_attention import SlicedAttention, SliceMemory, attend
from tests.parallel import (
    TOLERANCE,
    Problem,
    check_refusals,
    one_process,
    pipeline_difference,
    rows_of_problem,
    small,
    train_pipeline,
)

PROBLEM = Problem(config=small(num_layers=4), batch_sizes=(4, 3), microbatches=2)
GRID = [*product((1, 2, 5), (1, 3, 8), (1, 2, 5)), (16, 2, 3), (8, 8, 4), (3, 64, 2)]


@cache
def reference(**changes):
    config = small(num_layers=4, **changes)
    return one_process(Problem(config=config, batch_sizes=PROBLEM.batch_sizes, microbatches=2))


def equal(ranks, schedule, **changes):
    problem = Problem(config=small(num_layers=4, **changes), batch_sizes=PROBLEM.batch_sizes, microbatches=2)
    return pipeline_difference(problem, dict(dp=1, pp=ranks), schedule, reference(**changes))


def test_terapipe():
    """The atlas's row: the bubble for slices of equal cost, the lengths by brute force, causal attention
    slice by slice, and gradients on real ranks."""
    for p, m, k in GRID:
        for costs in (Costs(F=1, B=1), Costs(F=2, B=5)):
            assert simulate(check(terapipe(p, m, k)), costs).bubble == Fraction(p - 1, m * k + p - 1)
    for length, k, p in [(8, 3, 2), (11, 4, 1), (11, 4, 4), (12, 1, 2), (5, 5, 3)]:
        for cost in (
            causal_cost(1, 1),
            causal_cost(9, 1),
            causal_cost(0, 2),
            lambda context, new: 4 + (3 * context + new) * new,
        ):
            ends = [(0, *cuts, length) for cuts in combinations(range(1, length), k - 1)]
            ways = [tuple(b - a for a, b in pairwise(cuts)) for cuts in ends]
            found = slice_lengths(length, k, cost, p)
            assert makespan(found, cost, p) == min(makespan(way, cost, p) for way in ways)
            assert list(found) == sorted(found, reverse=True) and sum(found) == length
    assert slice_lengths(5, 2, lambda context, new: new, 2) == (3, 2), "of equals the longest in front"
    for value_width in (4, 3):
        assert slices_equal_whole(terapipe(2, 1, 3, (5, 2, 1)), value_width) < TOLERANCE
    assert equal(2, terapipe(2, 2, 4)) < TOLERANCE


def slices_equal_whole(schedule, value_width: int) -> float:
    """How far attention over slices, forward and backward, is from attention over all tokens at once."""
    generator = torch.Generator().manual_seed(1)
    q, k, v, dy = (
        torch.randn(2, heads, 8, width, dtype=torch.float64, generator=generator)
        for heads, width in ((4, 4), (2, 4), (2, value_width), (4, value_width))
    )
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    attend(*whole).backward(dy)
    core = SlicedAttention(schedule.slices)
    memory, parts, outs = SliceMemory({0: [core]}), [], []
    for unit in range(schedule.slices):
        parts.append([x.split(schedule.lengths, dim=-2)[unit].clone().requires_grad_() for x in (q, k, v)])
        with memory.around(None, Action("F", 0, unit)):
            outs.append(core(parts[-1][0], *(2 * x / 2 for x in parts[-1][1:])))
    for unit in reversed(range(schedule.slices)):
        ends = [(outs[unit], dy.split(schedule.lengths, dim=-2)[unit]), *memory.extra_roots(0, unit)]
        torch.autograd.backward(*map(list, zip(*ends)))
    off = [torch.cat([part[i].grad for part in parts], dim=-2) - whole[i].grad for i in range(3)]
    off = [torch.cat(outs, dim=-2) - naive_attention(q, k, v), *off]
    return max(x.abs().max().item() for x in off)


def test_seq1f1b():
    """The atlas's row: what a rank holds, a bubble of 1/k of 1F1B's, and gradients on real ranks."""
    for p, m, k in GRID:
        schedule, plain = check(seq1f1b(p, m, k)), one_f_one_b(p, m)
        found = [peak(schedule, rank) for rank in range(p)]
        assert found == [min(p - rank + k - 1, m * k) for rank in range(p)]
        for F, B in ((1, 2), (4, 3)):  # of a slice; a microbatch takes k times as long
            ours, theirs = simulate(schedule, Costs(F=F, B=B)), simulate(plain, Costs(F=F * k, B=B * k))
            assert ours.bubble == Fraction(p - 1, m * k + p - 1)
            assert ours.overhead * k == theirs.overhead and ours.makespan == (m * k + p - 1) * (F + B)
    assert equal(2, seq1f1b(2, 2, 2)) < TOLERANCE


def test_one_slice_is_gpipe_and_1f1b():
    assert terapipe(4, 6, 1).ranks == gpipe(4, 6).ranks and seq1f1b(4, 6, 1).ranks == one_f_one_b(4, 6).ranks


@pytest.mark.parametrize("k, value_width", [(1, 4), (2, 4), (4, 4), (2, 3)])
def test_keys_are_kept_in_joined_pieces(k, value_width):
    """Values that are narrower are kept with zeros, and scores in no case."""
    q, keys = (torch.randn(2, 2, 8, 4, requires_grad=True) for _ in range(2))
    values = torch.randn(2, 2, 8, value_width, requires_grad=True)
    core, saved = SlicedAttention(k), {}
    memory = SliceMemory({0: [core]})

    def pack(x):
        saved[x.untyped_storage().data_ptr()] = x  # and alive, so that no address comes twice
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        for unit in range(k):
            with memory.around(None, Action("F", 0, unit)):
                core(*(x.chunk(k, dim=-2)[unit].clone() for x in (q, keys, values)))
    long = [x.numel() for x in saved.values() if x.dim() == 4]
    assert sum(long) == 2 * q.numel() + (k + 1) * keys.numel()  # q and out; K and V (k+1)/2 times
    assert sum(x.numel() for x in saved.values() if x.dim() == 2) == 64 * (k + 1) // (2 * k) - (8 // k) ** 2
    for unit in range(1, k):
        assert all(leaf.untyped_storage().data_ptr() not in saved for leaf in core.slices[unit].seen)


@pytest.mark.parametrize(
    "ranks, schedule",
    [(4, terapipe(4, 2, 2)), (4, seq1f1b(4, 2, 4, (4, 2, 1, 1)))],
    ids=["terapipe 4x2", "seq1f1b uneven"],
)
def test_equals_one_process(ranks, schedule):
    assert equal(ranks, schedule) < TOLERANCE


def test_learned_positions_multi_head_and_untied():
    changes = dict(positions="learned", num_kv_heads=4, tied=False)
    assert equal(2, seq1f1b(2, 2, 2, (5, 3)), **changes) < TOLERANCE


def test_biases_of_positions():
    assert equal(2, seq1f1b(2, 2, 2), positions="alibi") < TOLERANCE


def test_composes_with_tensor_parallelism():
    problem = Problem(config=small(num_layers=2, vocab_size=32), batch_sizes=(4, 4), microbatches=2)
    assert (
        pipeline_difference(
            problem, dict(dp=1, pp=2, tp=2), seq1f1b(2, 2, 2), one_process(problem), sequence_parallel=True
        )
        < TOLERANCE
    )


def without_gradients_to_earlier_keys():
    SlicedAttention.roots = lambda self, unit: self.slices.pop(unit) and []
    return train_pipeline(PROBLEM, dict(dp=1, pp=2), seq1f1b(2, 2, 2))


def test_control_earlier_keys_need_their_gradients():
    outcomes = launch.run(without_gradients_to_earlier_keys, ranks=2)
    assert (
        max(
            (outcome.grads[name] - reference().grads[name]).abs().max()
            for outcome in outcomes
            for name in outcome.grads
            if ".k." in name
        )
        > 1e-6
    )


def test_refusals():
    refused = {
        "p=0": lambda: terapipe(0, 1, 1),
        "k=0": lambda: seq1f1b(2, 2, 0),
        "lengths=(8,)": lambda: terapipe(2, 2, 2, (8,)),
        "1 token or more": lambda: seq1f1b(2, 2, 2, (8, 0)),
        "at most 3": lambda: slice_lengths(3, 4, causal_cost(1, 1), 2),
        "slices of (5, 3) tokens on 2 ranks that share them": lambda: on_each_rank(
            seq1f1b(2, 2, 2, (5, 3)), 2
        ),
        "sliced attention: a bias [1] is about": lambda: SlicedAttention(2)(
            *[torch.zeros(1, 1, 2, 2)] * 3, bias=torch.zeros(1)
        ),
    }
    for words, call in refused.items():
        with pytest.raises(ValueError) as error:
            call()
        assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("lengths", [(), (12, 4)], ids=str)
def test_slices_of_a_part_of_the_tokens(lengths):
    """Ranks of cp share out every slice."""
    config = small(num_layers=4, max_positions=16)
    problem = Problem(config=config, length=16, batch_sizes=(4, 3), microbatches=2)
    schedule = seq1f1b(2, 2, 2, lengths)
    assert pipeline_difference(problem, dict(dp=1, pp=2, cp=2), schedule, one_process(problem)) < TOLERANCE


def build(schedule, **changes):
    strategy = Strategy(**(dict(pp=2, microbatches=2, slices=2, schedule="seq1f1b") | changes))
    return parallelize(small(num_layers=4), strategy, schedule=schedule)


def test_refusals_on_ranks():
    def wrong_sum():
        run = build(seq1f1b(2, 2, 2, (4, 3)))
        run.forward_backward(run.batch(rows_of_problem(PROBLEM, 0), 0))

    check_refusals(
        {
            "is for pp=2, microbatches=2, slices=4, and the strategy has 2, 2, 2": lambda: build(
                terapipe(2, 2, 4)
            ),
            "balanced: 2 slices of a sequence in the pipeline": lambda: build(
                None, pp=1, cp=2, core="balanced", layout="contiguous", recompute="stage"
            ),
            "2 slices of 7 tokens, and the batch has 8": wrong_sum,
        },
        ranks=2,
    )
