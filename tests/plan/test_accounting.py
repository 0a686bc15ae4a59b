"""Formulas against measurements of the real model, and against the figures their papers print."""

import io
from dataclasses import replace
from functools import partial
from math import ceil

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from minitrain.course.saved_tensors import SavedTensors
from minitrain.model.config import ExpertsConfig, GPTConfig, presets
from minitrain.model.data.batches import random_tokens
from minitrain.model.gpt import GPT, Block, cross_entropy_sum
from minitrain.model.layers import LatentAttention, RMSNorm, causal_attention, naive_attention
from minitrain.model.mixture import mixtures
from minitrain.model.training.optim import AdamW
from minitrain.plan.accounting import (
    activation_bytes,
    activation_terms,
    active_parameters,
    attention_parameters,
    checkpoint_bytes,
    flops_per_token,
    forward_flops_per_token,
    hfu,
    matmul_parameters,
    mfu,
    model_state_bytes,
    parameter_table,
    parameters,
    text_bytes,
    token_bytes,
    training_days,
    zero_bytes,
)
from minitrain.plan.strategy import Strategy
from minitrain.ranks.ledger import Ledger
from minitrain.systems.plan.mesh_traffic import sent_by_axis
from minitrain.systems.plan.published import published

DEEPSEEK_V2 = GPTConfig(
    vocab_size=102_400, d_model=5120, num_layers=60, num_heads=128, head_dim=128, d_ff=12_288, kv_latent=512,
    query_latent=1536, rope_head_dim=64,
)  # fmt: skip
DEEPSEEK_V3 = presets["deepseek-v3"]
PAPER_LAYER = dict(norm="layer", positions="none", activation="gelu", bias=True, dropout=0.1)


def near(value, published, part):
    return abs(value / published - 1) <= part


def megatron_flops(B, s, l, h, V):
    """Narayanan et al. 2021, equation 3: a step with every block run twice."""
    return 96 * B * s * l * h**2 * (1 + s / (6 * h) + V / (16 * l * h))


# ---- FLOPs and parameters, measured ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        presets["tiny"],
        replace(presets["tiny"], tied=True, activation="gelu", norm="layer", positions="learned", bias=True),
        replace(presets["tiny"], num_kv_heads=1, residual="parallel"),
        replace(presets["tiny"], kv_latent=24, query_latent=40, rope_head_dim=8),
        replace(presets["tiny"], kv_latent=24, rope_head_dim=8),
    ],
    ids=["llama", "gpt2", "mqa-parallel", "mla", "mla-without-query-latent"],
)
def test_flops_are_counted_exactly(config):
    """The ledger's sum over operators is the formula's integer, both ways; torch's own counter agrees."""
    batch, length = 2, 48
    tokens, targets = random_tokens(0, 0, 1, batch, length, config.vocab_size, seed=1)
    model = GPT(config, attention=naive_attention)
    with Ledger() as ledger, FlopCounterMode(display=False) as counter:
        with ledger.phase("forward"):
            loss = cross_entropy_sum(model(tokens), targets)
        with ledger.phase("backward"):
            loss.backward()
    # matmul makes the masked scores, too
    forward = batch * length * forward_flops_per_token(config, length, causal="square")
    assert ledger.flops_by_phase == {"forward": forward, "backward": 2 * forward}
    formula = batch * length * flops_per_token(config, length, causal="square")
    assert ledger.flops == counter.get_total_flops() == formula
    assert flops_per_token(config, length, recompute=True) * 3 == 4 * flops_per_token(config, length)


@pytest.mark.parametrize("causal, scores", [("triangle", 64 * 65 // 2), ("square", 64 * 64)])
@pytest.mark.parametrize(
    "config", [presets["tiny"], replace(presets["tiny"], num_kv_heads=1)], ids=["mha", "mqa"]
)
def test_a_fused_core_counts_as_the_formula_of_the_same_name(config, causal, scores):
    """Forward is the formula's integer; backward has 5 products for its 4: a fused kernel keeps no scores."""
    tokens = torch.zeros(2, 64, dtype=torch.long)
    with Ledger(causal=causal) as ledger:
        with ledger.phase("forward"):
            loss = cross_entropy_sum(GPT(config, attention=causal_attention)(tokens), tokens)
        loss.backward()
    again = 2 * scores * 2 * config.num_layers * config.d_model
    assert ledger.flops_by_phase["forward"] == 2 * 64 * forward_flops_per_token(config, 64, causal=causal)
    assert ledger.flops == 2 * 64 * flops_per_token(config, 64, causal=causal) + again


def test_triangle_and_square():
    """The square charges T - 1 keys in 2T more; the default is what a causal mask leaves."""
    attention = 6 * 12 * 768  # a key more, for a token of GPT-2
    flops = partial(flops_per_token, presets["gpt2"], 1024)
    triangle, square = flops(causal="triangle"), flops(causal="square")
    assert square == 6 * matmul_parameters(presets["gpt2"]) + 2 * attention * 1024
    assert flops_per_token(presets["gpt2"], 1024) == triangle == square - attention * 1023
    assert round(square / triangle, 2) == 1.07
    long = partial(flops_per_token, presets["llama3-8b"], 2**17)
    assert round(long(causal="square") / long(), 2) == 1.7
    with pytest.raises(ValueError, match="causal = True; use 'triangle' .* or 'square'"):
        flops_per_token(presets["gpt2"], 1024, causal=True)


def test_mfu():
    """PaLM: 45.7 % without attention, 46.2 % with it. GLM-130B: HFU 43.3 %, MFU 32.5 %. And the toy model
    does the FLOPs that MFU credits."""
    rate, devices, peak = 238.3e3, 6144, 275e12
    attention = 12 * 118 * 48 * 256 * 2048  # 12·L·H·Q·T of table 1 and section 2
    assert round(100 * mfu(rate, 6 * 540e9, devices, peak), 1) == 45.7
    with_attention = mfu(rate, 6 * 540.35e9 + attention, devices, peak)
    assert round(100 * with_attention, 1) == 46.2
    # What PaLM computed again it does not say. Its 57.8 % is below a whole forward, and means three quarters of one.
    assert hfu(with_attention, recomputed_forward=1) > 0.61 > 0.578 > with_attention
    assert round(3 * (0.578 / with_attention - 1), 2) == 0.75
    # GLM-130B runs every forward twice: 135 of 312 TFLOP/s are 43.3 %, of which 32.5 % are the model's.
    assert round(100 * hfu(0.325, recomputed_forward=1), 1) == round(100 * 135 / 312, 1) == 43.3

    config = replace(presets["tiny"], num_layers=6, d_model=128, tied=True)
    length, tokens = 64, torch.zeros(1, 64, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        cross_entropy_sum(GPT(config, attention=naive_attention)(tokens), tokens).backward()
    attention = 12 * config.num_layers * config.d_model * length
    assert near(counter.get_total_flops() / length, 6 * parameters(config) + attention, 0.01)
    assert not near(counter.get_total_flops() / length, 6 * parameters(config), 0.01)


def test_parts_add_up():
    table = parameter_table(presets["gpt2"])
    assert table["token table"] == 50_257 * 768 and table["output table"] == 0
    assert table["position table"] == 1024 * 768 and sum(table.values()) == parameters(presets["gpt2"])
    assert attention_parameters(presets["gpt2"]) == 4 * 768**2 + 4 * 768
    assert matmul_parameters(presets["gpt2"]) == 12 * 12 * 768**2 + 50_257 * 768


# ---- published runs --------------------------------------------------------------------------------------

# TFLOP/s per GPU, % of peak and PFLOP/s of Narayanan et al. 2021, table 1, by billions of parameters
MEGATRON = {
    "1.7B": (137, 44, 4.4), "3.6B": (138, 44, 8.8), "7.5B": (142, 46, 18.2), "18.4B": (135, 43, 34.6),
    "39.1B": (138, 44, 70.8), "76.1B": (140, 45, 143.8), "145.6B": (148, 47, 227.1),
    "310.1B": (155, 50, 297.4), "529.6B": (163, 52, 410.2), "1008B": (163, 52, 502.0),
}  # fmt: skip


@pytest.mark.parametrize("name", MEGATRON)
def test_narayanan_table_1(name):
    tflops, percent, pflops = MEGATRON[name]
    (run,) = (row.run for row in published() if row.name == f"Nar21 {name}")
    width, layers = run.model.d_model, run.model.num_layers
    more = 1 + 13 / (12 * width) + (51_200 + 2048) / (12 * layers * width)
    counted = 12 * layers * width**2 * more  # equation 2, which leaves out the last norm
    assert abs(counted / 1e9 - float(name[:-1])) < 0.051
    assert abs(parameters(run.model) - counted - 2 * width) < 1
    assert round(100 * tflops / 312) == percent and near(tflops * run.strategy.ranks / 1e3, pflops, 0.004)


def test_narayanan_flops_are_four_forwards():
    """Equation 3 runs every block's forward twice; it is our count but for the output table, run once."""
    config = GPTConfig(
        vocab_size=51_200, d_model=12_288, num_layers=96, num_heads=96, activation="gelu", tied=True
    )
    ours = 2048 * flops_per_token(config, 2048, causal="square", recompute=True)
    assert near(megatron_flops(1, 2048, 96, 12_288, 51_200), ours - 2048 * 2 * 51_200 * 12_288, 1e-12)


def test_train_time_equation():
    assert round(training_days(175e9, 300e9, 1024, 140e12, flops_per_parameter=8), 1) == 33.9  # paper: 34
    assert round(training_days(1008e9, 450e9, 3072, 163e12, flops_per_parameter=8), 1) == 83.9  # paper: 84


def test_case_mixtral_deepseek2():
    mixtral = presets["mixtral-8x7b"]
    assert (parameters(mixtral), active_parameters(mixtral)) == (46_702_792_704, 12_879_925_248)
    v2 = ExpertsConfig(160, 6, expert_width=1536, shared_experts=2, dense_first=1)
    v2 = replace(DEEPSEEK_V2, experts=v2)
    assert parameters(v2) == 235_741_434_880 and near(parameters(v2), 236e9, 0.01)
    assert near(active_parameters(v2, token_table=False), 21e9, 0.01)  # as DeepSeek counts
    one = replace(presets["mistral-7b"], experts=ExpertsConfig(1, 1))  # one expert and its router
    assert parameters(one) == active_parameters(one) == parameters(presets["mistral-7b"]) + 32 * 4096
    with pytest.raises(ValueError, match="top_k = 9 of 8 experts; shared ones"):
        ExpertsConfig(8, 9)


def test_case_deepseek_v3():
    v3 = presets["deepseek-v3"]
    assert parameters(v3) == 671_026_404_352 and near(parameters(v3), 671e9, 1e-3)
    assert active_parameters(v3, token_table=False) == 36_625_603_584
    assert near(active_parameters(v3, token_table=False), 37e9, 0.011)


def test_deepspeed_moe():
    """DeepSpeed-MoE, table 4, prints 52B, 31B, 13B and 4B: 8·h² an expert, 12 layers with experts. In the
    standard model experts take the place of an MLP; beside it they would be 52.9 (1.3 + 51.5 rounded) and 13.2."""
    cases = ((2048, (64, 128), (52.9, 52.5, 31.4)), (1024, (32, 64), (13.2, 13.1, 4.1)))
    for width, (few, many), wanted in cases:
        shape = dict(vocab_size=50_257, d_model=width, num_layers=24, num_heads=16, max_positions=2048)
        shape |= dict(norm="layer", positions="learned", activation="gelu", bias=True, tied=True)
        standard = ExpertsConfig(128, 1, "switch", expert_every=2)
        beside = replace(standard, shared_experts=1)
        residual = replace(beside, num_experts=few, pyramid_layers=2, pyramid_experts=many)
        kinds = (beside, standard, residual)
        found = tuple(round(parameters(GPTConfig(**shape, experts=kind)) / 1e9, 1) for kind in kinds)
        assert found == wanted
        model = GPT(GPTConfig(**shape, experts=residual), device="meta")
        assert sum(param.numel() for param in model.parameters()) == parameters(model.config)
        assert model.config.experts.blocks(24) == list(range(2, 25, 2))
    shape |= dict(vocab_size=32, d_model=16, num_layers=4, num_heads=2, max_positions=8)
    experts = replace(residual, num_experts=2, pyramid_layers=1, pyramid_experts=4)
    few, many = mixtures(GPT(GPTConfig(**shape, experts=experts), dtype=torch.float64).layers)
    assert [len(layer.experts.up) for layer in (few, many)] == [2, 4]
    x = torch.randn(8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weight, best = (x @ many.router.weight.mT).softmax(-1).max(-1)
    hidden = torch.nn.functional.gelu(x[:, None] @ many.experts.up[best])
    wanted = many.shared(x) + weight[:, None] * (hidden @ many.experts.down[best])[:, 0]
    assert torch.allclose(many(x[None], torch.arange(8))[0], wanted, atol=1e-12, rtol=0), "beside the MLP"


@pytest.mark.parametrize("name", ["tiny-moe", "shared", "every other"])
def test_flops_of_experts_are_those_of_the_experts_that_a_token_visits(name):
    experts = ExpertsConfig(8, 2, "balanced")
    if name == "shared":
        experts = replace(experts, shared_experts=2, expert_width=16)
    if name == "every other":
        experts = replace(experts, expert_every=2)
    config = replace(presets["tiny-moe"], experts=experts)
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    with Ledger() as ledger:
        model = GPT(config)
        model(tokens)
    assert sum(param.numel() for param in model.parameters()) == parameters(config)
    assert ledger.flops == tokens.numel() * forward_flops_per_token(config, 16)


# ---- model states and checkpoints ------------------------------------------------------------------------


def one_step(config):
    """A bfloat16 model with float32 masters after one step of AdamW, its gradients still there."""
    model = GPT(config, dtype=torch.bfloat16)
    optimizer = AdamW(model.parameters(), master_dtype=torch.float32)
    tokens, targets = random_tokens(0, 0, 1, 2, 16, config.vocab_size, seed=1)
    with Ledger() as ledger:
        cross_entropy_sum(model(tokens), targets).backward()
        optimizer.step()
    return model, optimizer, ledger


def test_model_states_16phi():
    assert model_state_bytes(1_500_000_000) == 24e9  # ZeRO: GPT-2 in 16 bytes
    assert model_state_bytes(1, gradient=2 + 4) == 20  # ZeRO-Infinity
    for config in (presets["tiny"], replace(presets["tiny"], tied=True, num_layers=3)):
        model, optimizer, ledger = one_step(config)
        held = [
            *model.parameters(),
            *(p.grad for p in model.parameters()),
            *(x for state in optimizer.state.values() for x in state.values() if isinstance(x, torch.Tensor)),
        ]
        assert sum(x.nbytes for x in held) == model_state_bytes(parameters(config)) == 16 * parameters(config)
        kinds = ledger.live_by_kind
        for kind, size in (("parameters", 2), ("gradients", 2), ("optimizer state", 12)):
            assert kinds[kind] == size * parameters(config)


def test_zero_figure_1():
    """7.5B parameters on 64 ranks: 120, 31.4, 16.6 and 1.9 GB."""
    assert [round(zero_bytes(7_500_000_000, 64, stage) / 1e9, 1) for stage in range(4)] == [
        120.0, 31.4, 16.6, 1.9,
    ]  # fmt: skip


def test_ckpt_size_980gb():
    """14 bytes per parameter on disk: 980 GB for 70B, 5.67 TB for 405B; a toy's file is that and headers."""
    assert checkpoint_bytes(70_000_000_000) == 980e9 == model_state_bytes(70_000_000_000) - 2 * 70_000_000_000
    assert checkpoint_bytes(405_000_000_000) == 5.67e12
    headers = []
    for layers in (2, 8):
        config = replace(presets["tiny"], num_layers=layers)
        model, optimizer, _ = one_step(config)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file := io.BytesIO())
        over = file.tell() - checkpoint_bytes(parameters(config))
        headers.append(over / sum(1 for _ in model.parameters()))
    assert all(0 < header < 2000 for header in headers)  # bytes per parameter tensor, however large it is


def test_training_data_volume():
    """15T tokens of 2 bytes are 30 TB, not the 300 sometimes quoted; Llama 3's vocabulary needs 3 bytes."""
    for vocab, size in ((256, 1), (257, 2), (32_000, 2), (65_536, 2), (65_537, 3), (128_256, 3)):
        words = [0, 1, vocab // 2, vocab - 1]
        text = b"".join(word.to_bytes(size, "little") for word in words)  # fits, and not into a byte less
        assert [int.from_bytes(text[i : i + size], "little") for i in range(0, len(text), size)] == words
        with pytest.raises(OverflowError):
            (vocab - 1).to_bytes(size - 1, "little")
        assert token_bytes(vocab) == size and text_bytes(len(words), token_bytes(vocab)) == len(text)
    assert [text_bytes(15e12, size) / 1e12 for size in (2, token_bytes(128_256), 4)] == [30, 45, 60]


# ---- activations -----------------------------------------------------------------------------------------


def saved_by_a_layer(length, batch, width, heads, device):
    config = GPTConfig(d_model=width, num_heads=heads, **PAPER_LAYER)
    block = Block(config, "layers.1", attention=naive_attention, dtype=torch.float16, device=device)
    for parameter in block.parameters():
        nn.init.zeros_(parameter)
    x = torch.zeros(batch, length, width, dtype=torch.float16, device=device, requires_grad=True)
    with SavedTensors(block) as saved:
        block(x, torch.arange(length, device=device))
    return saved


@pytest.mark.parametrize(
    "s,b,h,a,device", [(32, 2, 64, 4, "cpu"), (48, 1, 32, 2, "cpu"), (2048, 1, 12_288, 96, "meta")]
)
def test_activations_memory(s, b, h, a, device):
    """Korthikanti's sbh(34 + 5as/h), by tensor, on a real layer in fp16 and on GPT-3's without data."""
    saved = saved_by_a_layer(s, b, h, a, device)
    statistics = [item for item in saved.saved if item.shape == (b, s, 1)]  # mean and deviation of two norms
    kept = [item for item in saved.saved if item not in statistics]
    assert len(statistics) == 4 and sum(item.bytes for item in kept) == activation_bytes(s, b, h, a)
    assert activation_bytes(s, b, h, a) == 34 * s * b * h + 5 * a * s * s * b
    assert saved.bytes == activation_bytes(s, b, h, a) + 4 * s * b * statistics[0].dtype.itemsize
    for place in {term.place for term in activation_terms()}:
        measured = sorted(item.bytes for item in kept if item.place == place)
        expected = [term.bytes(s, b, h, a) for term in activation_terms() if term.place == place]
        assert measured == sorted(expected), place
    found = (sum(term.sbh for term in activation_terms()), sum(term.ass for term in activation_terms()))
    assert found == (34, 5)


def test_activation_table_2():
    """GPT-3's layer, in units of sbh: 114, then with t = 8: 23, 14.25, 13, 4.25 and 2."""
    gpt3 = partial(activation_bytes, 2048, 1, 12_288, 96)
    sbh, eight = 2048 * 12_288, dict(tensor_parallel=8)
    assert [
        gpt3() / sbh,
        gpt3(**eight) / sbh,
        gpt3(**eight, sequence_parallel=True) / sbh,
        gpt3(**eight, recompute="selective") / sbh,
        gpt3(**eight, sequence_parallel=True, recompute="selective") / sbh,
        gpt3(recompute="full") / sbh,
    ] == [114, 23, 14.25, 13, 4.25, 2]
    least = gpt3(**eight, sequence_parallel=True, recompute="selective")
    assert round(96 * gpt3() / 1e9) == 275 and round(96 * least / 1e9, 1) == 10.3


def attend(layer: LatentAttention, query_latent, kv_latent, positions):
    return layer.core(*layer.expand(query_latent, kv_latent, positions))


def test_no_tp_memory():
    """DeepSeek-V3's recomputation of norms and up-projections: bytes per token by formula and as really kept.

    `checkpoint` also runs the down-projections and the core again, which DeepSeek's kernels need not; it
    keeps the same tensors. The core here keeps its inputs only, as a fused kernel does."""
    length, place = 64, dict(dtype=torch.bfloat16, device="meta")
    positions = torch.arange(length, device="meta")
    for config in (DEEPSEEK_V2, DEEPSEEK_V3):
        norm = RMSNorm(config.d_model, config.norm_eps, **place)
        layer = LatentAttention(config, partial(checkpoint, naive_attention, use_reentrant=False), **place)
        x = torch.empty(1, length, config.d_model, requires_grad=True, **place)
        with SavedTensors(nn.ModuleList((norm, layer))) as everything:
            layer(norm(x), positions)
        with SavedTensors(nn.ModuleList((norm, layer))) as little:
            latents = checkpoint(lambda x: layer.compress(norm(x)), x, use_reentrant=False)
            out = checkpoint(partial(attend, layer), *latents, positions, use_reentrant=False)
            layer.out(out.transpose(1, 2).flatten(-2))
        inputs = config.d_model + config.query_latent + config.kv_latent  # of the projections
        given = inputs + config.rope_head_dim + (values := config.num_heads * config.head_dim)
        kept_little = 2 * given  # what enters the three norms, and the last projection
        wide = 3 * values + 2 * config.num_heads * config.rope_head_dim  # Q, K and V
        kept = kept_little + 2 * (inputs + wide)
        angles, scales = 2 * 2 * config.rope_head_dim, 3 * 4  # of two rotations, of three norms
        assert everything.bytes / length == kept + angles + scales
        assert near(everything.bytes / length, kept, 0.01)
        assert little.bytes / length == kept_little + positions.itemsize
        assert near(little.bytes / length, kept_little, 0.01) and kept_little < 0.3 * kept
    # And nothing changes: the same two ways with numbers.
    config = replace(
        DEEPSEEK_V2, d_model=32, num_heads=2, head_dim=8, kv_latent=6, query_latent=10, rope_head_dim=4
    )
    layer = GPT(config, dtype=torch.float64, layers=[1]).layers[0].attention
    x = torch.randn(1, 5, 32, dtype=torch.float64)
    latents = checkpoint(layer.compress, x, use_reentrant=False)
    out = checkpoint(partial(attend, layer), *latents, torch.arange(5), use_reentrant=False)
    assert torch.equal(layer.out(out.transpose(1, 2).flatten(-2)), layer(x, torch.arange(5)))


def test_zero3_instead_of_3d():
    """The batch at which gathered weights and reduced activations cost the same: counted around it, and solved."""
    config, h = presets["gpt3-175b"], presets["gpt3-175b"].d_model
    sent = lambda rows, **layout: sent_by_axis(config, Strategy(precision="bfloat16", **layout), rows, 2048)
    gathered = sent(1024, dp=1024, zero=3)["dp"]
    assert near(gathered, 3 * 2 * parameters(config), 0.01) and gathered == sent(2048, dp=1024, zero=3)["dp"]
    for t in (2, 4, 8):
        solved = 4.5 * h * t / (t - 1)  # tokens per step with P = 12·L·h²: independent of depth
        below, above = (sent(rows, tp=t)["tp"] for rows in (int(0.99 * solved / 2048), ceil(solved / 2048)))
        assert below < gathered < 1.02 * above
