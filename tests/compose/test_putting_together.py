"""All axes together: any order of a mesh, choices of three axes of six on eight ranks, tied ends and norms."""

from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import combinations

import pytest
import torch

from minitrain import collectives, launch
from minitrain.compose.parallelize import parallelize
from minitrain.data_parallel import states
from minitrain.model.config import ExpertsConfig, GPTConfig
from minitrain.model.data.batches import Rows, random_tokens
from minitrain.model.gpt import GPT
from minitrain.model.training.optim import AdamW
from minitrain.plan.strategy import Strategy
from minitrain.ranks.events import Issue
from minitrain.ranks.launch import dryrun
from minitrain.ranks.mesh import Mesh
from tests.parallel import Traffic

SIX = ("dp", "zero", "pp", "cp", "tp", "ep")
CONFIG = GPTConfig(
    vocab_size=32, d_model=16, num_layers=2, num_heads=4, d_ff=24, max_positions=16, tied=True,
    experts=ExpertsConfig(4, 2, balance_alpha=0.01, expert_every=2),
)  # fmt: skip


def rows_of(count):
    return Rows(partial(random_tokens, batch_size=count, length=8, vocab=32, masked=True), count, 8)


ROWS = rows_of(8)


def strategy_of(chosen, **more):
    """An axis of two ranks for each of the names. ep has no ranks of its own: where it is chosen, the ranks with
    other rows are twice as many, and ZeRO shards what is not an expert over both."""
    two = {axis: 1 + (axis in chosen) for axis in SIX}
    sizes = {axis: two[axis] for axis in ("pp", "cp", "tp", "ep")}
    sizes |= dict(dp=two["dp"] * two["zero"] * two["ep"])
    shards = dict(zero="III", node=two["zero"] * two["ep"]) if "zero" in chosen else {}
    return Strategy(**sizes, **shards, microbatches=two["pp"], precision="float64", **more)


def train(strategy, rows=ROWS):
    """The loss of a step, the norm of its gradient over all axes, and what the next batch loses after it; numbers of
    this rank, and those that it updates."""
    run = parallelize(CONFIG, strategy, partial(AdamW, lr=1e-2))
    result = run.step(run.batch(rows, 0), clip=0.5)
    held = sum(param.numel() for param in run.model.parameters())
    own = sum(one.shard.numel() for one in run.sync.shards)
    return torch.stack([run.total(result.loss), result.norm, run.evaluate(run.batch(rows, 1))]), held, own


CHOICES = [tuple(SIX[int(at)] for at in three) for three in "012 013 024 035 045 125 134 145 234 235".split()]


def compare_choices():
    """10 of the 20 choices (chapter 22 has all), each pair of axes in two, on 8 ranks, 5 in a launch (what groups of a
    launch cost adds up): one loss, one norm, one update."""
    pairs = Counter(pair for chosen in CHOICES for pair in combinations(chosen, 2))
    assert len(pairs) == 15 and {*pairs.values()} == {2}
    wanted, whole, _ = launch.run(train, Strategy(precision="float64"), ranks=1)[0]
    for first in range(0, len(CHOICES), 5):
        part = [strategy_of(chosen) for chosen in CHOICES[first : first + 5]]
        assert {strategy.ranks for strategy in part} == {8}
        ranks = launch.run(lambda: [*map(train, part)], ranks=8, timeout_s=120, checked=False)
        for chosen, *found in zip(CHOICES[first:], *ranks):
            assert all((one - wanted).abs().max() < 1e-12 for one, *_ in found), chosen
            cut, most = bool({"pp", "tp", "ep"} & {*chosen}), 0.6 if "tp" in chosen else 0.75
            assert all((held < most * whole) == cut for _, held, _ in found), chosen
            assert all((own < 0.6 * held) == ("zero" in chosen) for _, held, own in found), chosen


def members_of_all(shape):
    mesh = Mesh(**shape)
    return {axis: tuple(mesh.members(axis)) for axis in shape}


def test_parallel_6d():
    """64 virtual ranks, six axes of two: each axis has 32 disjoint groups that cover all ranks; a strategy of all six is
    64 ranks; and on 8 real ranks choices of three equal one process."""
    shape = dict.fromkeys(SIX, 2)
    found = [dryrun.run(members_of_all, shape, rank=rank, ranks=64) for rank in range(64)]
    for axis in SIX:
        groups = {groups[axis] for groups in found}
        assert len(groups) == 32 and sorted(rank for group in groups for rank in group) == list(range(64))
        assert all(rank in groups[axis] for rank, groups in enumerate(found))
    everything = strategy_of(SIX)
    assert everything.ranks == 64
    assert dryrun.run(lambda: train(everything, rows_of(16))[0].shape, rank=41, ranks=64) == (3,)
    compare_choices()


# ---- two and three axes, in any order --------------------------------------------------------------------


def groups_and_losses(strategies):
    """Of each: members of this rank's group by axis, and two losses and all gradients of the second step."""
    found = []
    for strategy in strategies:
        run = parallelize(replace(CONFIG, experts=None), strategy, partial(AdamW, lr=1e-2))
        losses = [run.total(run.step(run.batch(ROWS, step)).loss) for step in range(2)]
        groups = {axis: run.mesh.members(axis) for axis in run.mesh.shape}
        grads = {name: states.full_grad(run.sync, param) for param, name in run.sync.names.items()}
        groups["held"] = sum(param.numel() for param in run.model.parameters())
        found.append((groups, torch.stack(losses), grads))
    return found


def compared(strategies, ranks):
    """The groups, by strategy and rank; losses and gradients are those of one process."""
    ((_, losses, grads),) = launch.run(groups_and_losses, [Strategy(precision="float64")], ranks=1)[0]
    out = []
    for found in zip(*launch.run(groups_and_losses, strategies, ranks=ranks, timeout_s=120)):
        for _, ours, mine in found:
            assert (ours - losses).abs().max() < 1e-12
            for name, grad in mine.items():
                assert (grad - grads[name]).abs().max() < 1e-12, name
        assert {name for *_, mine in found for name in mine} == set(grads)
        out.append([groups for groups, *_ in found])
    return out


def distinct(ranks, axis):
    return sorted({tuple(groups[axis]) for groups in ranks})


def test_dp_plus_pp():
    """Mesh order (pp, dp): rank 0 and 1 have the same stage, 0 and 2 are one pipeline."""
    strategy = Strategy(dp=2, pp=2, microbatches=2, order="pp-dp-cp-tp", precision="float64")
    (ranks,) = compared([strategy], ranks=4)
    assert distinct(ranks, "pp") == [(0, 2), (1, 3)] and distinct(ranks, "dp") == [(0, 1), (2, 3)]


def test_megatron_lm_fw():
    """What the framework runs together, on 8 ranks: slices of tokens beside tp, two stages of a rank in turns, AdamW's
    states dealt out over dp. Ten losses are one process's, and all of it is seen in what ranks hold and send."""

    def trained(strategy):
        run = parallelize(replace(CONFIG, experts=None), strategy, partial(AdamW, lr=1e-2))
        with Traffic() as ledger:
            losses = [run.total(run.step(run.batch(ROWS, step)).loss).item() for step in range(10)]
        sent = {(event.axis, event.op) for event in ledger.events if isinstance(event, Issue)}
        held = sum(param.numel() for param in run.model.parameters())
        own = sum(one.shard.numel() for one in run.sync.shards)
        return losses, sent, run.runner and len(run.runner.stages), own / held

    more = dict(sequence_parallel=True, schedule="interleaved", chunks=2, microbatches=2, zero=1)
    strategy = Strategy(dp=2, pp=2, tp=2, precision="float64", **more)
    ((alone, *_),) = launch.run(trained, Strategy(precision="float64"), ranks=1)
    assert alone[-1] < alone[0]
    for losses, sent, stages, own in launch.run(trained, strategy, ranks=8, timeout_s=120):
        assert losses == pytest.approx(alone, abs=1e-12) and stages == 2 and own <= 0.5
        assert {("tp", "reduce_scatter"), ("pp", "send"), ("dp", "reduce_scatter")} <= sent


def test_parallel_3d():
    """2 x 2 x 2 is the least: rank = ((dp * PP) + pp) * TP + tp, or in an order of choice."""
    plain = Strategy(dp=2, pp=2, tp=2, microbatches=2, precision="float64")
    orders = ["dp-pp-cp-tp", "pp-dp-cp-tp", "tp-pp-dp-cp"]
    found = compared([plain, *(replace(plain, order=order) for order in orders[1:])], ranks=8)
    for order, ranks in zip(orders, found):
        axes = [axis for axis in order.split("-") if axis != "cp"]
        for axis in axes:
            stride = 2 ** (2 - axes.index(axis))
            assert distinct(ranks, axis) == [(r, r + stride) for r in range(8) if r // stride % 2 == 0]


def test_dp_tp_figure():
    """8-way model parallel and 64-way data parallel: 512 ranks; and the two-axis runs equal one process."""
    found = [dryrun.run(members_of_all, dict(dp=64, tp=8), rank=rank, ranks=512) for rank in range(512)]
    tp, dp = (distinct(found, axis) for axis in ("tp", "dp"))
    assert tp == [tuple(range(first, first + 8)) for first in range(0, 512, 8)], "64 of 8 neighbours"
    assert dp == [tuple(range(first, 512, 8)) for first in range(8)], "8 of 64, one of each eight"
    two = Strategy(dp=2, tp=2, precision="float64")
    sliced = compared([two, replace(two, dp=1, pp=2, microbatches=2, order="tp-dp-cp-pp")], ranks=4)
    whole = sum(param.numel() for param in GPT(replace(CONFIG, experts=None)).parameters())
    for ranks, most in zip(sliced, (0.6, 0.4)):  # layers are cut over tp; and over stages
        assert all(groups["held"] < most * whole for groups in ranks), (whole, ranks)


@pytest.mark.parametrize(
    "order, said",
    [
        ("dp-pp-tp", "order='dp-pp-tp'; name dp, pp, cp, tp once each, joined by -, outermost first"),
        ("dp-pp-tp-tp", "order='dp-pp-tp-tp'; name"),
        (3, "order=3: give a text"),
        (
            "cp-dp-pp-tp",
            "order='cp-dp-pp-tp': ranks with other tokens of a row lie inside dp; put dp before cp",
        ),
    ],
)
def test_an_order_names_each_axis_once(order, said):
    with pytest.raises(ValueError) as error:
        Strategy(order=order)
    assert str(error.value).startswith(said)


# ---- mistakes that the equalities find -------------------------------------------------------------------


def norms(strategy):
    """The norm of the whole gradient; and of all ranks' squares added up, copies and all."""
    run = parallelize(replace(CONFIG, experts=None), strategy, partial(AdamW, lr=1e-2))
    run.forward_backward(run.batch(ROWS, 0))
    run.sync.finish()
    held = sum(param.grad.square().sum() for param in run.model.parameters())
    everyone = collectives.all_reduce(held, collectives.world()).sqrt()
    return run.step(run.batch(ROWS, 0), clip=1.0).norm.item(), everyone.item()


def test_a_norm_counts_copies_once():
    """The control: squares of all ranks count what dp, the ends of a pipeline and norms of tp hold twice."""
    alone = launch.run(norms, Strategy(precision="float64"), ranks=1)[0]
    assert abs(alone[0] - alone[1]) < 1e-12
    for layout in (dict(dp=2, pp=2), dict(tp=2, pp=2)):
        strategy = Strategy(**layout, microbatches=2, precision="float64")
        for right, wrong in launch.run(norms, strategy, ranks=4):
            assert abs(right - alone[0]) < 1e-12 < 1e-2 < wrong - alone[0]
