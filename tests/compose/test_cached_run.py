"""Text from a cache of keys and values is the text without one, in every layout and with every core."""

from dataclasses import replace

import pytest
import torch

from minitrain import collectives, launch
from minitrain.compose.cached_run import cached
from minitrain.compose.parallelize import parallelize
from minitrain.context.core_names import CORES
from minitrain.model.config import ExpertsConfig, GPTConfig
from minitrain.model.gpt import generate
from minitrain.plan.strategy import Strategy
from minitrain.ranks.ledger import Ledger
from tests.parallel import TOLERANCE

CONFIG = GPTConfig(vocab_size=29, d_model=16, num_layers=2, num_heads=4, num_kv_heads=2, max_positions=32)
LEARNED = replace(CONFIG, positions="learned", norm="layer", bias=True, tied=True)
ALIBI = replace(CONFIG, positions="alibi", residual="post")
LATENT = replace(CONFIG, num_kv_heads=4, kv_latent=6, rope_head_dim=2, query_latent=5)
ROUTED = replace(CONFIG, experts=ExpertsConfig(4, 2, "deepseek", shared_experts=1, capacity_factor=1.0))
CHOOSING = replace(CONFIG, experts=ExpertsConfig(4, 2, "expert_choice"))
SEQUENCE = dict(tp=2, sequence_parallel=True)
SLICED = dict(pp=2, schedule="seq1f1b", slices=2, microbatches=2)
CASES = [  # beside what tests/layouts.py draws
    (LATENT, Strategy(dp=2, zero=3, offload="optimizer+parameters+activations")),
    (ALIBI, Strategy(tp=2, overlap=True, recompute="selective")),
    (CONFIG, Strategy(tp=4)),  # two ranks share a K/V head
    (CONFIG, Strategy(**SEQUENCE, overlap=True)),
    (LATENT, Strategy(pp=2, microbatches=4, schedule="dualpipe")),  # a stage stands on two ranks
    (LEARNED, Strategy(pp=2, microbatches=2, **SEQUENCE)),
    (ALIBI, Strategy(**SLICED)),
    (CONFIG, Strategy(**SLICED, cp=2)),
    (ALIBI, Strategy(cp=2, layout="striped", **SEQUENCE)),
    (LATENT, Strategy(cp=2, layout="contiguous")),
    (LATENT, Strategy(cp=4, core="usp", ulysses=2)),
    (ROUTED, Strategy(dp=2, ep=2, tp=2)),
    (ROUTED, Strategy(cp=2, ep=2, **SEQUENCE)),
    (CHOOSING, Strategy(dp=2, ep=2)),
]
for name, kind in CORES.items():
    more = {"ulysses" if axis == "ulysses" else "inner": 2 for axis in kind.axes[1:2]}
    CASES.append((ALIBI, Strategy(cp=4, core=name, layout=kind.layouts[-1], **more)))


def text_of(run, model, prompt, n):
    """The likeliest tokens, and the logits of each."""
    seen = []

    def logits(tokens):
        seen.append(model(tokens)[:, -1:])
        return seen[-1]

    return generate(run, prompt, n, temperature=0, logits=logits), torch.cat(seen, 1)


def both(config, strategy, length=5, n=3):
    """How far the logits of a cache are from those without, and whether all ranks write the same."""
    run = parallelize(config, replace(strategy, precision="float64"), seed=3)
    for param in () if strategy.zero == 3 else run.model.parameters():
        param.data.mul_(3)
    prompt = torch.arange(2 * length).view(2, length) % config.vocab_size
    with cached(run, n - 1) as model:
        text, logits = text_of(run, model, prompt, n)
    wanted, expected = text_of(run, run, prompt, n)
    same = torch.equal(text, wanted) and torch.equal(run.sample(prompt, n, temperature=0.0), wanted)
    return same, (logits - expected).abs().max().item(), run.sample(prompt, n, seed=1).tolist()


@pytest.mark.parametrize("config, strategy", CASES, ids=lambda one: str(one)[:80])
def test_a_cache_gives_the_text_that_recomputing_gives(config, strategy):
    found = launch.run(both, config, strategy, ranks=strategy.ranks)
    assert all(same and far < TOLERANCE for same, far, _ in found)
    assert len({str(text) for *_, text in found}) == 1


@pytest.mark.parametrize("length", [1, 30])
def test_a_window_that_slides_is_computed_anew(length):
    """From one token on, of which the second rank has none, and over the end of 32 positions."""
    for strategy in (Strategy(cp=2), Strategy(pp=2, **SEQUENCE)):
        found = launch.run(both, LEARNED, strategy, length, 6, ranks=strategy.ranks)
        assert all(same and far < TOLERANCE for same, far, _ in found)


def test_ranks_that_round_otherwise_write_one_text():
    def rank():
        run = parallelize(CONFIG, Strategy(dp=2))
        exact, here = run.logits, collectives.world().rank()
        run.logits = lambda *given: exact(*given) * (1 + 50 * here)
        return run.sample(torch.tensor([[1, 2, 3]]), 8).tolist()

    first, second = launch.run(rank, ranks=2)
    assert first == second


# ---- what it costs ---------------------------------------------------------------------------------------


def account(config, strategy, length, n):
    """Bytes of the cache, bytes that the last token sends in gathers, and its FLOPs beside those of the prompt."""
    run = parallelize(config, replace(strategy, precision="float64"), seed=3)
    text = torch.zeros(2, length + n, dtype=torch.int64)
    with Ledger() as ledger:
        run(text[:, :length])
        flops, before = ledger.flops, ledger.live_bytes
        with cached(run, n) as logits:
            first = logits(text[:, :length])
            found = ledger.live_bytes - before - first.nbytes
            for more in range(1, n + 1):
                sent, work = ledger.sent_bytes("all_gather"), ledger.flops
                logits(text[:, : length + more])
    assert not run.model.hooks.absorb
    assert not any("cached" in str(layer.attention.core) for layer in run.model.layers[1:-1])
    return found, ledger.sent_bytes("all_gather") - sent, ledger.flops - work, flops


@pytest.mark.parametrize("tp", [1, 2])
def test_memory_and_bytes_are_those_of_the_docstring(tp):
    """8 tokens over cp = 2 and up to 5 more: per row, layer and rank room for 4 + 3 tokens, of which 4 have a
    position of 8 bytes."""
    config, strategy = replace(CONFIG, d_model=32, num_heads=8), Strategy(cp=2, tp=tp)
    for found, sent, token, prompt in launch.run(account, config, strategy, 8, 5, ranks=2 * tp):
        assert found == 2 * 2 * (2 * 2 * 4 // tp) * (4 + 3) * 8 + 4 * 8
        logits = (tp - 1) * 2 * 15 * 8  # over tp, of half of 29 words
        assert sent == 2 * (2 * (8 // tp) * (4 + 1)) * 8 + logits  # layers · (n - 1) · B·H·(K + 1)
        assert token < prompt / 3  # 1 token for 4, on each rank


def test_latent_attention_caches_latents():
    found, *_ = launch.run(account, LATENT, Strategy(), 8, 4, ranks=1)[0]
    assert found == 2 * 2 * (6 + 2) * (8 + 4) * 8 + 8 * 8
