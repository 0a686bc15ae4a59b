"""The model alone: published sizes, layers as defined, slices that equal the whole, wrong input."""

import itertools
import json
import math
import pickle
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from minitrain.course.saved_tensors import SavedTensors
from minitrain.model.config import CHOICES, GPTConfig, presets
from minitrain.model.gpt import GPT, Block, Stages, cross_entropy_sum, deepnorm, generate, seed_of
from minitrain.model.layers import (
    Attention,
    LatentAttention,
    RMSNorm,
    alibi_slopes,
    causal_attention,
    drop,
    fast_gelu,
    naive_attention,
    rms_norm_forward,
    rotate,
)
from minitrain.plan.accounting import cached_elements, mlp_parameters, parameters
from minitrain.ranks.launch import dryrun
from minitrain.ranks.ledger import Ledger

PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "gpt3-175b": 174_604_259_328,  # table D.1 prints 174,600 M
    "gpt-neox-20b": 20_554_567_680,
    "bloom-176b": 176_247_271_424,
    "llama2-7b": 6_738_415_616,
    "mistral-7b": 7_241_732_096,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
}
SMALL = GPTConfig(vocab_size=50, d_model=32, num_layers=3, num_heads=4, max_positions=32)
LATENT = replace(SMALL, kv_latent=12, query_latent=20, rope_head_dim=4)
VARIANTS = {
    "llama": SMALL,
    "gqa": replace(SMALL, num_kv_heads=2),
    "mqa": replace(SMALL, num_kv_heads=1),
    "gpt2": replace(SMALL, norm="layer", positions="learned", activation="gelu", bias=True, tied=True),
    "neox": replace(
        SMALL, norm="layer", residual="parallel", rope_fraction=0.25, activation="gelu_tanh", bias=True
    ),
    "bloom": replace(
        SMALL, norm="layer", positions="alibi", embedding_norm=True, bias=True, activation="fastgelu"
    ),
    "glm": replace(SMALL, norm="layer", residual="deepnorm", activation="geglu", bias=True),
    "post": replace(SMALL, residual="post", positions="none"),
    "mla": LATENT,
    "mla-without-query-latent": replace(LATENT, query_latent=0),
}


def tokens_for(config, batch=2, length=16, seed=0):
    return torch.randint(config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))


def random_input(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def excite(module, std=0.3):
    """Larger weights than those training starts from, so that no part is too faint to be compared."""
    for i, parameter in enumerate(module.parameters()):
        nn.init.normal_(parameter, std=std, generator=torch.Generator().manual_seed(i))
    return module


def close(a, b, tolerance=1e-12):
    return (a - b).abs().max().item() <= tolerance


# ---- sizes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", presets)
def test_context_models(name):
    """A meta-device model, counted; the formula; and where there is one, the published number."""
    model = GPT(presets[name], device="meta", dtype=torch.bfloat16)
    counted = sum(parameter.numel() for parameter in model.parameters())
    assert counted == parameters(presets[name]) == PUBLISHED.get(name, counted)
    assert parameters(replace(presets[name], num_layers=presets[name].num_layers + 1)) > counted


def test_published_sizes_are_all_presets():
    assert PUBLISHED.keys() <= presets.keys() and abs(parameters(presets["glm-130b"]) / 130e9 - 1) < 0.015


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_has_the_parameters_of_its_formula(name):
    model = GPT(VARIANTS[name], device="meta")
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters(VARIANTS[name])


def test_transformer_layer():
    """12h² + 13h parameters; 24bsh² + 4bs²h FLOPs forward, twice that backward, by operator."""
    b, s, h = 2, 24, 48
    config = GPTConfig(d_model=h, num_heads=4, norm="layer", positions="none", activation="gelu", bias=True)
    block = Block(config, "layers.1", attention=naive_attention, dtype=torch.float64)
    assert sum(parameter.numel() for parameter in block.parameters()) == 12 * h**2 + 13 * h
    x = random_input(b, s, h).requires_grad_()
    with Ledger() as ledger:
        with ledger.phase("forward"):
            y = block(x, torch.arange(s))
        with ledger.phase("backward"):
            y.backward(torch.ones_like(y))
    forward = 24 * b * s * h**2 + 4 * b * s**2 * h
    assert ledger.flops_by_phase == {"forward": forward, "backward": 2 * forward}
    assert 24 * b * s * h**2 + 4 * b * s**2 * h == forward  # Narayanan et al. 2021, section 3.6


# ---- seeded by name --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS)
def test_any_slice_equals_the_whole(name):
    config = VARIANTS[name]
    whole = GPT(config, seed=3).state_dict()
    torch.manual_seed(99)  # nothing may depend on torch's own generator
    for layers in (range(2, 4), [3], [0], [config.num_layers + 1], [2, 4, 1]):
        stage = GPT(config, seed=3, layers=layers)
        assert [layer.name for layer in stage.layers] == [f"layers.{number}" for number in layers]
        for key, parameter in stage.named_parameters():
            assert key.startswith(tuple(f"layers.{number}." for number in layers))
            is_tied = config.tied and key == f"layers.{config.num_layers + 1}.out.weight"
            assert torch.equal(parameter, whole["layers.0.tokens" if is_tied else key])
    other = GPT(config, seed=4, layers=[2]).state_dict()
    assert any(not torch.equal(other[key], whole[key]) for key in other)


def test_building_a_model_draws_nothing_from_the_global_generator():
    before = torch.get_rng_state()
    GPT(SMALL)
    assert torch.equal(before, torch.get_rng_state())


def test_layers_differ_and_seeds_are_the_same_in_every_process():
    model = GPT(SMALL)
    assert not torch.equal(model.layers[1].mlp.up.weight, model.layers[2].mlp.up.weight)
    assert seed_of("layers.1.mlp.up.weight", 0) == 8_234_636_348_823_239_532
    assert len({seed_of(name, seed) for name in ("a", "b", "1:a") for seed in (0, 1, 11)}) == 9


def test_stages_chained_equal_the_whole():
    config, tokens = VARIANTS["gpt2"], tokens_for(VARIANTS["gpt2"])
    first, second = (GPT(config, dtype=torch.float64, layers=layers) for layers in (range(0, 2), range(2, 5)))
    whole = GPT(config, dtype=torch.float64)(tokens)
    assert torch.equal(second(first(tokens)), whole)
    assert not torch.equal(
        second.layers[1](first(tokens), torch.arange(16)), whole
    )  # a stage that lost a block


def test_values_do_not_depend_on_dtype():
    exact = GPT(SMALL, dtype=torch.float64).state_dict()
    for dtype in (torch.float32, torch.bfloat16):
        for name, value in GPT(SMALL, dtype=dtype).state_dict().items():
            assert torch.equal(value, exact[name].to(dtype))


def test_tied_means_one_tensor():
    tied = GPT(VARIANTS["gpt2"])
    assert tied.layers[-1].out.weight is tied.layers[0].tokens
    assert GPT(SMALL).layers[-1].out.weight is not GPT(SMALL).layers[0].tokens


def test_the_start_is_as_wide_as_published():
    """std 0.02, output projections 0.02 / sqrt(2L); the first loss is that of a uniform guess."""
    config = replace(presets["tiny"], d_model=128)
    model = GPT(config)
    assert abs(model.layers[1].mlp.up.weight.std().item() - 0.02) < 5e-4
    assert (
        abs(model.layers[1].attention.out.weight.std().item() - 0.02 / math.sqrt(2 * config.num_layers))
        < 5e-4
    )
    tokens = tokens_for(config, 4, 64)
    loss = cross_entropy_sum(model(tokens), tokens.roll(-1, 1)) / tokens.numel()
    assert abs(loss.item() - math.log(256)) < 0.1


# ---- layers ----------------------------------------------------------------------------------------------


def test_rope():
    """Scores see differences of positions only; a rank with the second half needs global positions."""
    q, k = random_input(1, 1, 1, 64), random_input(1, 1, 1, 64, seed=1)

    def score(m, n, dtype=torch.float64):
        return (rotate(q.to(dtype), torch.tensor([m])) * rotate(k.to(dtype), torch.tensor([n]))).sum()

    for m, n, t in itertools.product((0, 7, 500), (0, 3), (1, 64, 3000)):
        assert close(score(m, n), score(m + t, n + t), 1e-10)
        assert close(score(m, n, torch.float32), score(m + t, n + t, torch.float32), 2e-3)
    assert not close(score(7, 3), score(8, 3), 1e-3)
    assert close(rotate(q, torch.tensor([0])), q) and close(rotate(q, torch.tensor([5])).norm(), q.norm())

    x, positions = random_input(2, 3, 16, 8), torch.arange(16)
    second_half = rotate(x[:, :, 8:], positions[8:])
    assert torch.equal(second_half, rotate(x, positions)[:, :, 8:])
    assert not close(rotate(x[:, :, 8:], positions[:8]), second_half, 0.1)  # local positions
    each_row = torch.stack((positions, positions + 5))
    assert torch.equal(rotate(x, each_row)[1], rotate(x[1:], positions + 5)[0])


def test_deepnorm():
    """In 64 layers of post-norm gradients grow and tokens become one vector; with DeepNorm neither."""
    alpha, beta = deepnorm(70)
    assert round(alpha, 2) == 11.83 and beta == 1 / alpha  # GLM-130B
    grown, alike = {}, {}
    for residual in ("deepnorm", "post"):
        config = GPTConfig(
            d_model=64, num_layers=64, norm="layer", bias=True, activation="geglu", residual=residual
        )
        model, tokens = GPT(config, dtype=torch.float64), tokens_for(config, 2, 32)
        xs = [model.layers[0](tokens, torch.arange(32))]
        for layer in model.layers[1:]:
            xs.append(layer(xs[-1], torch.arange(32)))
            xs[-1].retain_grad()
        cross_entropy_sum(xs[-1], tokens.roll(-1, 1)).backward()
        grown[residual] = (xs[1].grad.norm() / xs[-2].grad.norm()).item()
        alike[residual] = F.cosine_similarity(xs[-2][:, -1], xs[-2][:, -2], dim=-1).mean().item()
    assert 0.9 < grown["deepnorm"] < 1.1 and grown["post"] > 10
    assert abs(alike["deepnorm"]) < 0.2 and alike["post"] > 0.99

    block = excite(Block(VARIANTS["glm"], "layers.1", dtype=torch.float64))
    x, alpha = random_input(1, 4, 32), math.sqrt(2 * SMALL.num_layers)
    middle = block.norm1(alpha * x + block.attention(x, torch.arange(4)))
    assert close(block(x, torch.arange(4)), block.norm2(alpha * middle + block.mlp(middle)))


def test_geglu_fastgelu():
    """Three matrices of width 8h/3 are two of 4h, in GLM exactly; FastGELU errs by 0.02 at most."""
    glm = presets["glm-130b"]
    assert GPTConfig(d_model=12_288, num_heads=96, activation="geglu").d_ff == glm.d_ff == 32_768
    assert mlp_parameters(glm, matrices_only=True) == 8 * 12_288**2
    block = GPT(glm, device="meta", layers=[1]).layers[0]
    matrices = [p for p in block.mlp.parameters() if p.dim() == 2]
    assert sum(p.numel() for p in matrices) == 8 * 12_288**2 and len(matrices) == 3
    x = torch.linspace(-8, 8, 100_001, dtype=torch.float64)
    assert 0.0202 < (fast_gelu(x) - F.gelu(x)).abs().max().item() < 0.0204
    assert (x * torch.sigmoid(1.5 * x) - F.gelu(x)).abs().max() > 0.03  # another factor is worse
    mlp, y = excite(Block(VARIANTS["glm"], "layers.1", dtype=torch.float64).mlp), random_input(2, 5, 32)
    assert close(mlp(y), mlp.down(F.gelu(mlp.gate(y)) * mlp.up(y)))


def test_gelu_by_tanh_is_gpt2s():
    """0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x³))), which is not GELU: up to 4.7e-4 apart. One operator
    either way, so that neither kept bytes nor FLOPs change."""
    x = torch.linspace(-8, 8, 100_001, dtype=torch.float64)
    by_hand, accounts = 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))), []
    for activation, expected in (("gelu_tanh", by_hand), ("gelu", F.gelu(x))):
        config = replace(VARIANTS["gpt2"], activation=activation)
        mlp = excite(Block(config, "layers.1", dtype=torch.float64).mlp)
        (
            nn.init.eye_(mlp.up.weight),
            nn.init.zeros_(mlp.up.bias),
            nn.init.eye_(mlp.down.weight),
            nn.init.zeros_(mlp.down.bias),
        )
        y = F.pad(x.unsqueeze(-1), (0, 31)).requires_grad_()
        with SavedTensors(mlp) as saved, Ledger() as ledger:
            out = mlp(y)
        assert (out[:, 0] - expected).abs().max() < 1e-12
        accounts.append((saved.bytes, ledger.flops, parameters(config)))
    assert accounts[0] == accounts[1] and 4.6e-4 < (by_hand - F.gelu(x)).abs().max() < 4.8e-4
    assert {name for name, config in presets.items() if config.activation == "gelu_tanh"} == {
        "gpt2", "gpt2-xl", "gpt3-175b", "gpt-neox-20b", "bloom-176b",
    }  # fmt: skip


def test_mha_mqa_gqa():
    """KV elements per token and layer; groups with copied weights equal MHA, one group its definition."""
    seen = []

    def spy(q, k, v):
        seen.append((k.size(1) + v.size(1)) * k.size(-1))
        return causal_attention(q, k, v)

    positions, x = torch.arange(12), random_input(2, 12, 32)
    for kv_heads in (4, 2, 1):
        config = replace(SMALL, num_kv_heads=kv_heads)
        shared = excite(Attention(config, spy, dtype=torch.float64))
        out = shared(x, positions)
        assert seen.pop() == cached_elements(config) == 2 * kv_heads * config.head_dim
        full = Attention(SMALL, naive_attention, dtype=torch.float64)
        with torch.no_grad():
            full.q.weight.copy_(shared.q.weight), full.out.weight.copy_(shared.out.weight)
            for name in ("k", "v"):
                heads = getattr(shared, name).weight.unflatten(0, (kv_heads, -1))
                getattr(full, name).weight.copy_(heads.repeat_interleave(4 // kv_heads, 0).flatten(0, 1))
        assert close(out, full(x, positions))
        with torch.no_grad():
            full.k.weight.copy_(full.k.weight.roll(config.head_dim, 0))  # a head gets another's key
        assert kv_heads == 1 or not close(out, full(x, positions), 1e-3)


def test_mla():
    """Absorbed and explicit forms agree; DeepSeek-V2 caches 576 numbers, MHA of its heads 32,768."""
    deepseek = GPTConfig(
        d_model=5120, num_layers=60, num_heads=128, head_dim=128, kv_latent=512, query_latent=1536,
        rope_head_dim=64,
    )  # fmt: skip
    assert cached_elements(deepseek) == 576 == 4.5 * 128
    assert 2 * 128 * 128 == 32_768 and 576 / (2 * 128) == 2.25  # MHA; groups of GQA
    positions, x = torch.arange(12) + 3, random_input(2, 12, 32)
    for config in (LATENT, VARIANTS["mla-without-query-latent"]):
        for core in (naive_attention, causal_attention):
            layer = excite(LatentAttention(config, core, dtype=torch.float64))
            explicit, absorbed = layer(x, positions), layer.absorbed(x, positions)
            assert close(explicit, absorbed, 1e-10) and explicit.norm() > 1
            assert not close(explicit, layer.absorbed(x, positions * 2), 1e-3)  # the rotated part counts
            grads = [
                torch.autograd.grad(y.square().sum(), list(layer.parameters())) for y in (explicit, absorbed)
            ]
            assert all(close(a, b, 1e-9 * a.abs().max().item()) for a, b in zip(*grads, strict=True))


def narrow_values(length, heads=2, width=6, value_width=4):
    """q, k and narrower v, as MLA has them; one key head for all where heads is 1."""
    shapes = (2, length, width), (heads, length, width), (heads, length, value_width)
    return [random_input(1, *shape, seed=seed).requires_grad_() for seed, shape in enumerate(shapes)]


def core_account(core, length):
    """Bytes of q, k, v and what their attention keeps, at most with backward; FLOPs."""
    with Ledger() as ledger:
        out = core(*narrow_values(length))
        kept = ledger.live_bytes
        out.sum().backward()
    return kept, ledger.peak_bytes, ledger.flops, list(ledger.flops_by_operator)


def test_values_narrower_than_keys_keep_no_scores():
    """Memory linear in T and FLOPs to the last one, real and dry; torch's own choice would keep scores."""
    H, K, W = 2, 6, 4
    for length in (16, 64):
        kept, peak, flops, operators = core_account(causal_attention, length)
        assert kept == 8 * H * length * (2 * K + 2 * W + 1)  # q, k, v, out, and the log-sum-exp
        assert flops == 2 * H * (length * (length + 1) // 2) * (2 * K + 5 * K)
        assert len(operators) == 2 and all("flash_attention_for_cpu" in name for name in operators)
        assert dryrun.run(core_account, causal_attention, length, ranks=1) == (kept, peak, flops, operators)
    assert peak < 4.01 * core_account(causal_attention, 16)[1]
    torchs = partial(F.scaled_dot_product_attention, is_causal=True)
    assert core_account(torchs, 64)[0] > 6 * core_account(torchs, 16)[0]


@pytest.mark.parametrize("heads", [2, 1])
def test_values_narrower_than_keys_give_the_same(heads):
    found = []
    for core in (causal_attention, naive_attention):
        qkv = narrow_values(9, heads)
        out = core(*qkv)
        found.append([out, *torch.autograd.grad(out, qkv, random_input(*out.shape, seed=5))])
    assert all(a.shape == b.shape and close(a, b) for a, b in zip(*found))
    with_bias = [core(*narrow_values(9), bias=torch.eye(9)) for core in (causal_attention, naive_attention)]
    assert close(*with_bias) and not close(with_bias[0], naive_attention(*narrow_values(9)), 1e-3)
    assert not close(
        causal_attention(*narrow_values(9), dropout=0.5), naive_attention(*narrow_values(9)), 1e-3
    )


@pytest.mark.parametrize("name", VARIANTS)
def test_no_token_sees_the_future_and_every_core_agrees(name):
    config, tokens = VARIANTS[name], tokens_for(VARIANTS[name])
    fused, naive = (
        excite(GPT(config, dtype=torch.float64, attention=core))
        for core in (causal_attention, naive_attention)
    )
    logits = fused(tokens)
    assert close(logits, naive(tokens), 1e-9 * logits.abs().max().item())
    losses = [cross_entropy_sum(model(tokens), tokens.roll(-1, 1)) for model in (fused, naive)]
    grads = [torch.autograd.grad(x, list(m.parameters())) for x, m in zip(losses, (fused, naive))]
    scale = max(grad.abs().max().item() for grad in grads[0])
    assert all(close(a, b, 1e-9 * scale) for a, b in zip(*grads, strict=True))
    changed = tokens.clone()
    changed[:, 10] = (changed[:, 10] + 1) % config.vocab_size
    other = fused(changed)
    assert close(other[:, :10], logits[:, :10], 1e-9 * logits.abs().max().item())
    assert not close(other[:, 10:], logits[:, 10:], 1e-3)


@pytest.mark.parametrize("name", ["llama", "gqa", "bloom", "mla"])
def test_a_layer_cut_to_half_its_heads_is_still_the_layer(name):
    """Tensor parallelism without ranks: halves have H/2 heads and F/2 hidden, and their outputs add up."""
    config, positions = VARIANTS[name], torch.arange(8)
    block = excite(Block(replace(config, bias=False), "layers.1", dtype=torch.float64))
    x = random_input(2, 8, 32)
    cut = {"q": 0, "k": 0, "v": 0, "q_up": 0, "k_up": 0, "v_up": 0, "up": 0, "gate": 0, "out": 1, "down": 1}

    def half(index):
        copy = Block(replace(config, bias=False), "layers.1", dtype=torch.float64)
        copy.load_state_dict(block.state_dict())
        for name, module in copy.named_modules():
            if (dim := cut.get(name.split(".")[-1])) is not None:
                module.weight = nn.Parameter(module.weight.chunk(2, dim)[index])
            if hasattr(module, "slopes"):
                module.slopes = module.slopes.chunk(2)[index]
        return copy

    halves = [half(0), half(1)]
    assert close(sum(h.attention(x, positions) for h in halves), block.attention(x, positions), 1e-11)
    assert close(sum(h.mlp(x) for h in halves), block.mlp(x), 1e-11)
    assert not close(2 * halves[0].attention(x, positions), block.attention(x, positions), 1e-3)


def test_alibi():
    assert alibi_slopes(8) == [2.0**-i for i in range(1, 9)]
    slopes = alibi_slopes(112)  # BLOOM: not a power of two
    assert len(set(slopes)) == 112 and slopes[:64] == alibi_slopes(64)
    assert slopes[64:66] == alibi_slopes(128)[0:3:2]
    layer = excite(Attention(VARIANTS["bloom"], dtype=torch.float64))
    x, positions = random_input(1, 6, 32), torch.arange(6)
    assert close(layer(x, positions), layer(x, positions + 40))
    assert not close(layer(x, positions), layer(x, positions * 9), 1e-3)


def test_rms_norm_is_torchs_with_less_kept():
    ours, theirs = RMSNorm(24, 1e-5, dtype=torch.float64), nn.RMSNorm(24, 1e-5, dtype=torch.float64)
    excite(ours), excite(theirs)
    x = random_input(3, 5, 24).requires_grad_()
    y, reference = ours(x), theirs(x)
    grads, references = (
        torch.autograd.grad(out.pow(3).sum(), (x, module.weight))
        for out, module in ((y, ours), (reference, theirs))
    )
    assert close(y, reference) and all(close(a, b, 1e-11) for a, b in zip(grads, references, strict=True))
    assert torch.autograd.gradcheck(ours, (x,))
    low = random_input(64, 256, dtype=torch.bfloat16)
    exact = RMSNorm(256, 1e-5, dtype=torch.float64)(low.double())
    rounded = RMSNorm(256, 1e-5, dtype=torch.bfloat16)(low).double()
    assert ((rounded - exact).abs() <= 2**-7 * exact.abs()).all()  # rounded once


def test_dropout_is_off_in_evaluation_and_scales_what_stays():
    config = replace(VARIANTS["gpt2"], dropout=0.5)
    model, plain, tokens = GPT(config), GPT(VARIANTS["gpt2"]), tokens_for(config)
    assert not torch.equal(model(tokens), plain(tokens))
    assert torch.equal(model.eval()(tokens), plain(tokens))
    kept = drop(torch.ones(10_000), 0.25)
    assert set(kept.tolist()) == {0.0, float(torch.tensor(1 / 0.75))} and abs(kept.mean() - 1) < 0.05


# ---- loss and text ---------------------------------------------------------------------------------------


def test_the_loss_is_a_sum_over_the_targets_that_count():
    logits, targets = random_input(2, 6, 11).requires_grad_(), tokens_for(replace(SMALL, vocab_size=11), 2, 6)
    masked = targets.clone()
    masked[0, 2:] = -100
    log_p = logits.log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    assert close(cross_entropy_sum(logits, targets), -log_p.sum())
    assert close(cross_entropy_sum(logits, masked), -log_p[0, :2].sum() - log_p[1].sum())
    nothing = cross_entropy_sum(logits, torch.full_like(targets, -100))
    assert nothing.item() == 0 and not torch.autograd.grad(nothing, logits)[0].any()
    assert cross_entropy_sum(logits.bfloat16(), targets).dtype == torch.float32


def test_generate():
    model, prompt = excite(GPT(SMALL), 0.5), tokens_for(SMALL, 2, 3)
    text = generate(model, prompt, 40, seed=1)  # beyond max_positions = 32
    assert text.shape == (2, 43) and torch.equal(text[:, :3], prompt) and model.training
    assert torch.equal(text, generate(model, prompt, 40, seed=1))
    assert not torch.equal(text, generate(model, prompt, 40, seed=2))
    greedy = generate(model, prompt, 5, temperature=0)
    assert torch.equal(greedy[:, 3], model(prompt)[:, -1].argmax(-1))
    assert torch.equal(greedy, generate(model, prompt, 5, temperature=1e-4))


# ---- without data, and errors ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS)
def test_runs_without_data(name):
    """The same operators on fake tensors: shapes come out, nothing is drawn, nothing looks at a value."""
    for mode, device in ((FakeTensorMode(), None), (nullcontext(), "meta")):
        with mode:
            model = GPT(VARIANTS[name], dtype=torch.bfloat16, device=device)
            tokens = torch.full((2, 16), 10**6, device=device)  # no id is looked at
            logits = model(tokens)
            cross_entropy_sum(logits, tokens).backward()
        assert logits.shape == (2, 16, 50) and all(p.grad.shape == p.shape for p in model.parameters())


@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom", "mla"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_dry_run_has_the_same_account(name, dtype):
    """Building included: what a parameter is filled with costs the same whether there is memory or not."""
    accounts = []
    for mode in (nullcontext(), FakeTensorMode()):
        with mode, Ledger() as ledger:
            tokens = torch.zeros(2, 16, dtype=torch.long)
            cross_entropy_sum(GPT(VARIANTS[name], dtype=dtype)(tokens), tokens).backward()
        accounts.append((ledger.events, ledger.flops, ledger.peak_by_kind, ledger.live_by_kind))
    assert accounts[0] == accounts[1] and accounts[0][1] > 0


WRONG_CONFIGS = [
    (dict(num_heads=6), "d_model 64 is not divisible by num_heads 6: try [1, 2, 4, 8"),
    (dict(d_model=60), "rotated head size 15 is odd; RoPE turns pairs"),
    (dict(num_heads=8, num_kv_heads=3), "num_heads 8 is not a multiple of num_kv_heads 3"),
    (dict(dropout=1.5), "dropout = 1.5; must be in [0, 1)"),
    (dict(activation="swigelu"), "activation = 'swigelu'; did you mean 'swiglu'?"),
    (dict(num_layers="4"), "num_layers = '4' is str; expected int"),
    (dict(kv_latent=8, rope_head_dim=4, positions="none"), "positions = 'none'; with kv_latent 8 (MLA) use"),
    (dict(kv_latent=8, rope_head_dim=4, num_kv_heads=2), "num_kv_heads = 2; with kv_latent 8 (MLA) use None"),
]


@pytest.mark.parametrize("settings,message", WRONG_CONFIGS, ids=lambda value: "-".join(value)[:20])
def test_a_wrong_setting_is_one_line_that_names_it(settings, message):
    with pytest.raises(ValueError) as error:
        GPTConfig(**settings)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_replace_keeps_what_was_chosen_and_derives_the_rest_anew():
    wider = replace(presets["tiny"], d_model=128, num_heads=8)
    assert (wider.head_dim, wider.d_ff, wider.num_kv_heads) == (16, 384, 8)
    wider = replace(presets["llama3-8b"], d_model=2048)
    assert (wider.head_dim, wider.d_ff, wider.num_kv_heads) == (64, 14_336, 8)
    plain = json.loads(json.dumps(asdict(wider)))
    assert GPTConfig(**plain) == wider == pickle.loads(pickle.dumps(wider))
    assert hash(wider) == hash(GPTConfig(**plain))
    apart = replace(SMALL, head_dim=12)  # heads wider than the model
    assert GPT(apart)(tokens_for(apart)).shape == (2, 16, 50) and parameters(apart) > parameters(SMALL)


@pytest.mark.parametrize("name", CHOICES)
def test_every_choice_builds(name):
    for choice in CHOICES[name]:
        logits = GPT(replace(SMALL, **{name: choice}))(tokens_for(SMALL))
        assert logits.shape == (2, 16, 50) and logits.isfinite().all(), choice


def test_wrong_input_is_one_line_that_names_it():
    model, learned = GPT(presets["tiny"]), GPT(replace(presets["tiny"], positions="learned"))
    wrong = tokens_for(presets["tiny"])
    wrong[1, 3] = 256
    for call, message in (
        (lambda: model(wrong), r"token 256 at \[1, 3\]; vocab_size is 256 \(0..255\)"),
        (lambda: model(-wrong), r"token -\d+ at \[0, 0\]; vocab_size is 256"),
        (lambda: learned(wrong[:1], torch.arange(16) + 250), r"position 256 at \[6\]; max_positions is 256"),
        (
            lambda: model(torch.zeros(1, 257, dtype=torch.long)),
            "sequence 257 > max_positions 256; cut the one",
        ),
        (lambda: model(torch.zeros(1, 4)), r"tokens are torch.float32 \[1, 4\]; expected int64 \[B, T\]"),
        (lambda: model(torch.zeros(4, dtype=torch.long)), r"input is \[4\]; expected tokens \[B, T\]"),
        (lambda: generate(model, wrong, 1, temperature=-1.0), "temperature = -1.0; use 0"),
        (lambda: GPT(SMALL, dtype="fp23"), "dtype='fp23': use torch.float32, torch.bfloat16"),
        (lambda: GPT(SMALL, layers=[5]), r"layer 5; this model has layers 0 \(embedding\) to 4 \(head\)"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            call()
        assert "\n" not in str(error.value)


def test_what_is_exact_in_half_precision():
    """The scale of a norm, and the angles of RoPE behind position 256, where bfloat16 counts in twos."""
    x = torch.randn(5, 48, generator=torch.Generator().manual_seed(0)).bfloat16()
    _, (*_, scale) = rms_norm_forward(x, torch.ones(48, dtype=torch.bfloat16), 1e-6)
    wanted = (x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    assert scale.dtype == torch.float32 and (scale / wanted - 1).abs().max() < 1e-6
    x, positions = x[:, :8].reshape(1, 1, 5, 8), torch.tensor([0, 255, 257, 1001, 4097])
    assert (rotate(x, positions) - rotate(x.double(), positions)).abs().max() < 0.03 < x.abs().max()


def test_of_a_head_that_turns_in_part_the_first_numbers_turn():
    turning = SimpleNamespace(config=SimpleNamespace(rotated_dim=4, rope_theta=10_000.0))
    x, positions = torch.randn(1, 2, 3, 8), torch.tensor([1, 2, 3])
    y = Attention.rotated(turning, x, positions)
    assert torch.equal(y[..., 4:], x[..., 4:]) and torch.equal(y[..., :4], rotate(x[..., :4], positions))


def test_what_adds_to_the_residual_starts_smaller():
    model = GPT(GPTConfig(vocab_size=500, d_model=64, num_layers=8, num_heads=4))
    for name, param in model.named_parameters():
        if param.dim() == 2:
            small = name.startswith("layers.") and name.endswith((".attention.out.weight", ".down.weight"))
            assert abs(param.std() / (0.02 / 4 if small else 0.02) - 1) < 0.05, name


def test_sampling_sees_the_last_tokens_of_a_long_text():
    seen = []

    class Next(nn.Module):
        """The likeliest token is the last one, plus one."""

        config = replace(SMALL, max_positions=2)

        def forward(self, tokens):
            seen.append(tokens.tolist()[0])
            return nn.functional.one_hot(tokens + 1, 20).double()

    assert generate(Next(), torch.tensor([[3, 4, 5]]), 3, temperature=0).tolist() == [[3, 4, 5, 6, 7, 8]]
    assert seen == [[4, 5], [5, 6], [6, 7]]


def test_a_table_that_two_stages_share_is_a_part_of_its_own():
    config = GPTConfig(vocab_size=32, d_model=16, num_layers=2, num_heads=4, tied=True)
    *alone, shared = Stages(config, {0: range(2), 1: range(2, 4)}).parts()
    assert [*shared.values()] == ["layers.0.tokens"] and len(alone) == 2
    assert not any("layers.0.tokens" in part.values() for part in alone)


def test_text_is_generated_without_dropout_and_the_mode_is_as_before():
    """With a window of the model's positions, and by chance unless told otherwise."""
    model = GPT(GPTConfig(vocab_size=29, d_model=16, num_heads=2, dropout=0.5, max_positions=4), seed=1)
    prompt = torch.arange(12).view(2, 6) % 29  # longer than the window
    likeliest = generate(model.eval(), prompt, 5, temperature=0)
    assert torch.equal(model(likeliest[:, 4:8])[:, -1].argmax(-1), likeliest[:, 8])
    for training in (True, False):
        model.train(training)
        assert torch.equal(generate(model, prompt, 5, temperature=0), likeliest)
        assert all(part.training == training for part in model.modules())
        drawn = [
            generate(model, prompt, 5, **how) for how in (dict(), dict(temperature=1.0, seed=0), dict(seed=1))
        ]
        assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])


@pytest.mark.parametrize("kind", [dict(), dict(kv_latent=8, rope_head_dim=2)])
def test_scores_are_dropped_in_training_alone(kind):
    seen = []

    def core(q, k, v, dropout=0.0):
        seen.append(dropout)
        return causal_attention(q, k, v)

    model = GPT(GPTConfig(vocab_size=29, d_model=16, num_heads=2, dropout=0.25, **kind), attention=core)
    model(torch.zeros(1, 4, dtype=torch.int64))
    model.eval()(torch.zeros(1, 4, dtype=torch.int64))
    assert seen == [0.25, 0.25, 0.0, 0.0]


def test_slopes_are_no_state_and_queries_are_as_many_as_keys():
    model = GPT(GPTConfig(vocab_size=29, d_model=16, num_heads=2, positions="alibi"))
    assert model.layers[1].attention.slopes.shape == (2,)
    assert not [name for name in model.state_dict() if "slopes" in name]
    x = torch.ones(1, 2, 6, 4)
    for queries, keys in ((3, 6), (6, 3)):
        with pytest.raises(ValueError, match=f"causal_attention: {queries} queries, {keys} keys; it is"):
            causal_attention(x[..., :queries, :], x[..., :keys, :], x[..., :keys, :])
