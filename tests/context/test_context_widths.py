"""Values of another width than keys, as in latent attention: every core over ranks, and a whole model."""

from functools import partial

import pytest
import torch

from minitrain import collectives, launch
from minitrain.attention.flash import flash_attention
from minitrain.attention.placed import Alibi, alibi_slopes
from minitrain.context.layout import positions, striped
from minitrain.model.layers import LatentAttention
from minitrain.plan.strategy import Strategy
from tests.context.cores import CORES, HEADS, MASK, in_one_process
from tests.context.runs import T, furthest, inputs, over
from tests.parallel import TOLERANCE, Problem, difference, one_process, small, train_parallel

SLOPES = torch.tensor(alibi_slopes(HEADS[0]), dtype=torch.float64)


@pytest.mark.parametrize("ranks", [4])
def test_every_core(ranks):
    """Narrower values go through the kernels with zeros behind them, wider ones past; ALiBi, dropout too."""
    biased, expected = dict(bias=Alibi(SLOPES, torch.arange(T)), mask=MASK), {}
    for width in (2, 7):
        expected[width, False] = in_one_process(width=width)
        expected[width, True] = in_one_process(width=width, **biased)

    def rank():
        group, cores, found = collectives.world(), CORES[ranks](), {}
        for (width, extras), theirs in expected.items():
            for name, (core, layout) in cores.items():
                if extras:
                    core = partial(core, bias=Alibi(SLOPES, positions(layout, group, T)), dropout=MASK)
                if not (name.startswith("teams") and width > 4):
                    ours, _ = over(core, group, layout, HEADS, width=width)
                    found[name, width, extras] = furthest(ours, theirs)
        return found

    for found in launch.run(rank, ranks=ranks):
        assert max(found.values()) < TOLERANCE, found


def test_one_device():
    for width in (2, 7):
        *qkv, dout = inputs(HEADS, width=width)
        out = flash_attention(*[x.requires_grad_() for x in qkv])
        assert furthest([out, *torch.autograd.grad(out, qkv, dout)], in_one_process(width=width)) < TOLERANCE


def test_latent_attention_hands_dropout_to_its_core():
    given, config = [], small(kv_latent=8, rope_head_dim=2, num_kv_heads=4, dropout=0.3)
    layer = LatentAttention(config, lambda q, k, v, **more: given.append(more) or v)
    layer(torch.ones(1, 3, 16), torch.arange(3))
    layer.eval()(torch.ones(1, 3, 16), torch.arange(3))
    assert given == [{"dropout": 0.3}, {}]


PROBLEM = Problem(config=small(vocab_size=32, kv_latent=8, query_latent=6, rope_head_dim=2, num_kv_heads=4))


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_latent_attention_over_ranks(ranks):
    ways = [Strategy(cp=ranks), Strategy(cp=ranks, layout="striped"), Strategy(cp=ranks, core="ulysses")]
    expected = one_process(PROBLEM)
    for outcomes in launch.run(lambda: [train_parallel(PROBLEM, way) for way in ways], ranks=ranks):
        assert max(difference(outcome, expected) for outcome in outcomes) < TOLERANCE


def test_what_is_sent_is_as_wide_as_it_is():
    """The ring sends K + V numbers of a token, not twice the wider one."""

    def rank():
        core, group = CORES[2]()["ring striped"][0], collectives.world()
        return [over(core, group, striped, HEADS, **width)[1] for width in (dict(width=2), {})]

    for narrow, same in launch.run(rank, ranks=2):
        assert [ours / theirs for ours, theirs in zip(narrow, same)] == [6 / 8, 6 / 8]
