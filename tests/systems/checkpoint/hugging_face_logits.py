"""Logits of transformers' Mixtral and DeepSeek-V3 with tiny random weights, stored for tests without it.

    make transformers && python -m tests.systems.checkpoint.hugging_face_logits          writes hugging_face_logits.json

Weights are drawn from their names as files on the hub have them, so that none are stored. The script also
checks what tests cannot: that transformers reads what we write, with our logits, and saves it bit for bit.
It computes norms, angles and routers in float32 whatever the model's dtype is; here float32 means float64.
"""

import json
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import torch

from minitrain.model.gpt import GPT, seed_of
from minitrain.systems.checkpoint.hugging_face import config_of, incoming, outgoing

STORED = Path(__file__).with_suffix(".json")
TRANSFORMERS = Path(__file__).parents[3] / "build" / "transformers"
TOKENS = torch.randint(17, (2, 7), generator=torch.Generator().manual_seed(0))
ALIKE = dict(vocab_size=17, hidden_size=16, hidden_act="silu", max_position_embeddings=8, rope_scaling=None)
DEEPSEEK = ALIKE | dict(
    model_type="deepseek_v3",
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=2,
    intermediate_size=24,
    moe_intermediate_size=6,
    first_k_dense_replace=1,
    n_routed_experts=8,
    n_shared_experts=2,
    num_experts_per_tok=4,
    n_group=4,
    topk_group=2,
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
    scoring_func="sigmoid",
    topk_method="noaux_tc",
    q_lora_rank=10,
    kv_lora_rank=12,
    qk_nope_head_dim=8,
    qk_rope_head_dim=6,  # of 4, the order of halves and that of pairs would be inverse to themselves
    v_head_dim=8,
    rms_norm_eps=1e-6,
    rope_theta=5000.0,
)
CASES = {
    "mixtral": ALIKE
    | dict(
        model_type="mixtral",
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=12,
        num_local_experts=4,
        num_experts_per_tok=2,
        rms_norm_eps=1e-5,
        rope_theta=5000.0,
        sliding_window=None,
    ),
    "deepseek_v3": DEEPSEEK,
    "deepseek_v3 without groups and query latent": DEEPSEEK
    | dict(q_lora_rank=None, n_group=1, topk_group=1, num_experts_per_tok=3, n_shared_experts=1),
}


def drawn(shapes):
    """{name: tensor}: a function of the names."""
    state = {}
    for name, shape in shapes.items():
        generator = torch.Generator().manual_seed(seed_of(name))
        values = torch.randn(shape, dtype=torch.float64, generator=generator)
        values = values * 0.4 if len(shape) > 1 else 1 + 0.1 * values
        state[name] = (values - 1).float().double() if name.endswith("_bias") else values
    return state


@contextmanager
def exactly():
    """Inside, `torch.float32` and `.float()` are float64."""
    names = (torch, "float32"), (torch, "float"), (torch.Tensor, "float")
    before = [getattr(*name) for name in names]
    for (owner, name), value in zip(names, (torch.float64, torch.float64, torch.Tensor.double)):
        setattr(owner, name, value)
    try:
        yield
    finally:
        for (owner, name), value in zip(names, before):
            setattr(owner, name, value)


def their_logits(settings, state):
    """Of transformers, from files as on the hub; and what it saves."""
    sys.path.append(str(TRANSFORMERS))
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder, exactly():
        (Path(folder) / "config.json").write_text(json.dumps(settings))
        save_file(state, Path(folder) / "model.safetensors", metadata={"format": "pt"})
        config = AutoConfig.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=torch.float64, attn_implementation="eager",
            experts_implementation="eager",
        )  # fmt: skip
        with torch.no_grad():
            logits = model.eval()(TOKENS).logits
        model.save_pretrained(Path(folder) / "saved")
        return logits, load_file(Path(folder) / "saved" / "model.safetensors")


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def main():
    stored = {}
    for case, settings in CASES.items():
        config = config_of(settings)
        model = GPT(config, dtype=torch.float64)
        shapes = {name: list(value.shape) for name, value in outgoing(model.state_dict(), config)}
        state = drawn(shapes)
        logits, saved = their_logits(settings, state)
        ours = dict(incoming(state, config))
        assert same(saved, state)
        model.load_state_dict(ours)
        written = dict(outgoing(model.state_dict(), config))
        again = their_logits(settings, written)[0]
        with torch.no_grad():
            apart = max((model(TOKENS) - theirs).abs().max().item() for theirs in (logits, again))
        assert same(written, state) and apart < 1e-10, f"{case}: logits are {apart} apart"
        print(f"{case}: logits up to {logits.abs().max():.2f} are {apart:.1e} apart")
        stored[case] = dict(shapes=shapes, logits=logits.tolist())
    STORED.write_text(json.dumps(stored) + "\n")


if __name__ == "__main__":
    main()
