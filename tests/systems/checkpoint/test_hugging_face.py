"""Weights under Hugging Face's names give the logits of Hugging Face's forward: for Llama and GPT-2 written
down here anew, for mixtures as transformers computed them (hugging_face_logits.py). And what is refused.
"""

import json
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from minitrain.model.config import presets
from minitrain.model.gpt import GPT
from minitrain.systems.checkpoint.hugging_face import KINDS, config_of, incoming, outgoing, rows_of
from tests.parallel import TOLERANCE
from tests.systems.checkpoint.hugging_face_logits import CASES, DEEPSEEK, STORED, drawn
from tests.systems.checkpoint.hugging_face_logits import TOKENS as THEIR_TOKENS

LLAMA = json.loads("""{"model_type": "llama", "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2,
 "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 16,
 "rms_norm_eps": 1e-6, "rope_theta": 5000.0, "hidden_act": "silu", "rope_scaling": null,
 "tie_word_embeddings": false}""")
GPT2 = json.loads("""{"model_type": "gpt2", "vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4,
 "n_positions": 16, "n_inner": null, "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new"}""")
TOKENS = torch.randint(61, (2, 11), generator=torch.Generator().manual_seed(0))


def values(shapes):
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.randn(shape, dtype=torch.float64, generator=generator) * (0.3 if len(shape) > 1 else 0.1)
        + (len(shape) == 1)
        for name, shape in shapes.items()
    }


def llama_state(tied=False):
    D, H, G, K, F_, V = 32, 4, 2, 8, 48, 61
    shapes = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    inside = {
        **{f"self_attn.{name}_proj": (H * K if name == "q" else G * K, D) for name in "qkv"},
        **{"self_attn.o_proj": (D, H * K), "mlp.gate_proj": (F_, D), "mlp.up_proj": (F_, D)},
        **{"mlp.down_proj": (D, F_), "input_layernorm": (D,), "post_attention_layernorm": (D,)},
    }
    for i in range(2):
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in inside.items()}
    return values(shapes if tied else shapes | {"lm_head.weight": (V, D)})


def gpt2_state():
    D, V = 32, 61
    shapes = {"wte.weight": (V, D), "wpe.weight": (16, D), "ln_f.weight": (D,), "ln_f.bias": (D,)}
    linears = {
        "attn.c_attn": (D, 3 * D), "attn.c_proj": (D, D), "mlp.c_fc": (D, 4 * D), "mlp.c_proj": (4 * D, D),
    }  # fmt: skip
    for i in range(2):
        for name, (rows, columns) in linears.items():
            shapes |= {f"h.{i}.{name}.weight": (rows, columns), f"h.{i}.{name}.bias": (columns,)}
        for name in ("ln_1", "ln_2"):
            shapes |= {f"h.{i}.{name}.{kind}": (D,) for kind in ("weight", "bias")}
    shapes = {f"transformer.{name}": shape for name, shape in shapes.items()}
    state = values(shapes)
    return state | {
        "lm_head.weight": state["transformer.wte.weight"],
        "transformer.h.0.attn.bias": torch.ones(16, 16).tril(),
    }


def attend(q, k, v):
    scores = q @ k.transpose(-2, -1) / q.size(-1) ** 0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(future, -torch.inf).softmax(-1) @ v


def llama_forward(state, settings):
    """As LlamaForCausalLM computes: rotate_half with angles written twice, repeated K/V heads, RMSNorm."""
    eps, head_dim, length = settings["rms_norm_eps"], 8, TOKENS.size(1)

    def norm(x, name):
        return state[name] * x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()

    def turned(x):
        places = torch.arange(0, head_dim, 2, dtype=torch.float64)
        frequencies = settings["rope_theta"] ** -(places / head_dim)
        angles = torch.outer(torch.arange(length, dtype=torch.float64), frequencies).repeat(1, 2)
        return (
            x * angles.cos()
            + torch.cat((-x[..., head_dim // 2 :], x[..., : head_dim // 2]), -1) * angles.sin()
        )

    x = state["model.embed_tokens.weight"][TOKENS]
    for i in range(2):
        weight = {
            name.removeprefix(f"model.layers.{i}.").removesuffix(".weight"): value
            for name, value in state.items()
        }
        h = norm(x, f"model.layers.{i}.input_layernorm.weight")
        q, k, v = (
            (h @ weight[f"self_attn.{name}_proj"].T).view(2, length, -1, head_dim).transpose(1, 2)
            for name in "qkv"
        )
        q, k, v = turned(q), turned(k).repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        x = x + attend(q, k, v).transpose(1, 2).reshape(2, length, -1) @ weight["self_attn.o_proj"].T
        h = norm(x, f"model.layers.{i}.post_attention_layernorm.weight")
        h = F.silu(h @ weight["mlp.gate_proj"].T) * (h @ weight["mlp.up_proj"].T)
        x = x + h @ weight["mlp.down_proj"].T
    return norm(x, "model.norm.weight") @ state.get("lm_head.weight", state["model.embed_tokens.weight"]).T


def gpt2_forward(state, settings):
    """As GPT2LMHeadModel computes: Conv1D, one matrix for Q, K and V, gelu_new."""
    length = TOKENS.size(1)

    def norm(x, name):
        return F.layer_norm(
            x, (32,), state[f"{name}.weight"], state[f"{name}.bias"], settings["layer_norm_epsilon"]
        )

    def conv1d(x, name):
        return x @ state[f"{name}.weight"] + state[f"{name}.bias"]

    x = state["transformer.wte.weight"][TOKENS] + state["transformer.wpe.weight"][:length]
    for i in range(2):
        block = f"transformer.h.{i}"
        q, k, v = (
            part.view(2, length, 4, 8).transpose(1, 2)
            for part in conv1d(norm(x, f"{block}.ln_1"), f"{block}.attn.c_attn").split(32, -1)
        )
        x = x + conv1d(attend(q, k, v).transpose(1, 2).reshape(2, length, 32), f"{block}.attn.c_proj")
        h = conv1d(norm(x, f"{block}.ln_2"), f"{block}.mlp.c_fc")
        h = 0.5 * h * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (h + 0.044715 * h**3)))
        x = x + conv1d(h, f"{block}.mlp.c_proj")
    return norm(x, "transformer.ln_f") @ state["transformer.wte.weight"].T


def logits(state, config):
    model = GPT(config, dtype=torch.float64)
    model.load_state_dict(dict(incoming(state, config)))
    return model(TOKENS)


def apart(state, config, expected):
    return (logits(state, config) - expected).abs().max().item()


def test_llama():
    state, config = llama_state(), config_of(LLAMA)
    expected = llama_forward(state, LLAMA)
    assert apart(state, config, expected) < TOLERANCE
    bare = {name.removeprefix("model."): value for name, value in state.items()}
    assert apart(bare, config, expected) < TOLERANCE
    for wrong in (replace(config, norm_eps=1e-5), replace(config, rope_theta=10_000.0)):
        assert apart(state, wrong, expected) > 1e-6
    swapped = {**state, **{name: state[name.replace("gate", "up")] for name in state if "gate" in name}}
    assert apart(swapped, config, expected) > 1e-2
    tied = llama_state(tied=True)
    config = config_of(LLAMA | {"tie_word_embeddings": True})
    assert config.tied and apart(tied, config, llama_forward(tied, LLAMA)) < TOLERANCE
    silent = config_of({key: value for key, value in LLAMA.items() if key != "tie_word_embeddings"})
    assert not silent.tied and config_of(GPT2).tied, "where the file does not say"


def test_gpt2():
    state, config = gpt2_state(), config_of(GPT2)
    expected = gpt2_forward(state, GPT2)
    assert config.activation == "gelu_tanh" and apart(state, config, expected) < TOLERANCE
    bare = {n.removeprefix("transformer."): v for n, v in state.items() if n != "lm_head.weight"}
    assert apart(bare, config, expected) < TOLERANCE  # as the files on the hub have it
    assert 1e-4 < apart(state, replace(config, activation="gelu"), expected) < 1e-1
    assert config_of(GPT2 | {"activation_function": "gelu"}).activation == "gelu"


@pytest.mark.parametrize(
    "state, settings", [(llama_state(), LLAMA), (gpt2_state(), GPT2)], ids=["llama", "gpt2"]
)
def test_there_and_back(state, settings):
    config = config_of(settings)
    back = dict(
        outgoing(GPT(config, dtype=torch.float64).state_dict() | dict(incoming(state, config)), config)
    )
    expected = {name: value for name, value in state.items() if not name.endswith("h.0.attn.bias")}
    assert back.keys() == expected.keys()
    assert all(torch.equal(back[name], value) for name, value in expected.items())


def test_every_setting_is_read_or_refused():
    """Another value of any key gives another model, or a line that names it, unless it changes no forward."""
    for settings in (LLAMA, GPT2, *CASES.values()):
        family = KINDS[settings["model_type"]]
        unread = {row["theirs"] for row in rows_of(family, "known")} - READ
        keys = {row["theirs"] for kind in ("size", "only", "read") for row in rows_of(family, kind)} | READ
        one_group = {"topk_group"} if settings.get("n_group") == 1 else set()  # of which there is no choice
        for key in (keys | settings.keys()) - unread - {"model_type"} - one_group:
            assert any(noticed(settings, key, o) for o in others(key, settings.get(key))), (family, key)


def others(key, value):
    if key == "rope_parameters":
        return [{"rope_theta": 7.0}]
    return {bool: [not value], str: ["gelu"]}.get(type(value), [2 * (value or 1), 1])


def noticed(settings, key, other):
    try:
        return config_of({**settings, key: other}) != config_of(settings)
    except (ValueError, TypeError):
        return True


READ = {"rope_theta", "rope_parameters"}  # by code


# ---- mixtures ----------------------------------------------------------------------------------------------

STORED_CASES = json.loads(STORED.read_text())
# What config.json says on the hub, where it is about the model.
PUBLISHED = {
    "mixtral-8x7b": dict(
        model_type="mixtral", hidden_act="silu", hidden_size=4096, intermediate_size=14336,
        max_position_embeddings=32768, num_attention_heads=32, num_experts_per_tok=2, num_hidden_layers=32,
        num_key_value_heads=8, num_local_experts=8, rms_norm_eps=1e-05, rope_theta=1000000.0,
        sliding_window=None, tie_word_embeddings=False, vocab_size=32000,
    ),
    "deepseek-v3": dict(
        model_type="deepseek_v3", attention_bias=False, first_k_dense_replace=3, hidden_act="silu",
        hidden_size=7168, intermediate_size=18432, kv_lora_rank=512, max_position_embeddings=163840,
        moe_intermediate_size=2048, moe_layer_freq=1, n_group=8, n_routed_experts=256, n_shared_experts=1,
        norm_topk_prob=True, num_attention_heads=128, num_experts_per_tok=8, num_hidden_layers=61,
        num_key_value_heads=128, q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64,
        rms_norm_eps=1e-06, rope_theta=10000, routed_scaling_factor=2.5, scoring_func="sigmoid",
        tie_word_embeddings=False, topk_group=4, topk_method="noaux_tc", v_head_dim=128, vocab_size=129280,
        rope_scaling=dict(
            beta_fast=32, beta_slow=1, factor=40, mscale=1.0, mscale_all_dim=1.0,
            original_max_position_embeddings=4096, type="yarn",
        ),
    ),
}  # fmt: skip


def case_of(name):
    """Config, weights as on the hub, logits."""
    stored = STORED_CASES[name]
    logits = torch.tensor(stored["logits"], dtype=torch.float64)
    return config_of(CASES[name]), drawn(stored["shapes"]), logits


def off(state, config, expected):
    model = GPT(config, dtype=torch.float64)
    model.load_state_dict(dict(incoming(state, config)))
    return (model(THEIR_TOKENS) - expected).abs().max().item()


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in b)


@pytest.mark.parametrize("case", CASES)
def test_mixtures(case):
    config, state, expected = case_of(case)
    assert off(state, config, expected) < 1e-10
    ours = dict(incoming(state, config))
    bare = {name.removeprefix("model."): value for name, value in state.items()}
    assert same(dict(incoming(bare, config)), ours)
    model = GPT(config, dtype=torch.float64)
    model.load_state_dict(ours)
    assert same(dict(outgoing(model.state_dict(), config)), state)
    swapped = {"w1": "w3", "w3": "w1", "gate_proj": "up_proj", "up_proj": "gate_proj"}
    for wrong in (
        {name: state[".".join(swapped.get(word, word) for word in name.split("."))] for name in state},
        {name: value.flip(0) if "gate.weight" in name else value for name, value in state.items()},
    ):
        assert off(wrong, config, expected) > 1e-2


def test_prediction_modules_of_deepseek_are_left_out():
    config, state, expected = case_of("deepseek_v3")
    beside = {
        f"model.layers.3.{name}.weight": torch.ones(1)
        for name in ("eh_proj", "enorm", "embed_tokens", "mlp.gate")
    }
    assert off(state | beside, config, expected) < 1e-10
    with pytest.raises(ValueError, match="has .'layers.3.enorm.weight'"):
        dict(incoming(state | {"model.layers.3.enorm.weight": torch.ones(1)}, config))


class Files(Mapping):
    """Tensors that are read when they are asked for."""

    def __init__(self, state):
        self.state, self.read = state, []

    def __getitem__(self, name):
        self.read.append(name)
        return self.state[name]

    def __iter__(self):
        return iter(self.state)

    def __len__(self):
        return len(self.state)


def test_one_tensor_at_a_time():
    config, state, _ = case_of("mixtral")
    files = Files(state)
    first = {}
    for name, value in incoming(files, config):
        first[name] = value
        assert len(files.read) == sum(4 if ".experts." in name else 1 for name in first)
    assert same(first, dict(incoming(state, config))) and sorted(files.read) == sorted(state)
    ours = Files(first)
    for number, _ in enumerate(outgoing(ours, config), start=1):
        assert len(ours.read) <= number
    assert number == len(state) and len(ours.read) == len(first)


def test_published_configs_are_our_presets():
    """But for how they were trained, and for the positions that V3's rescaled RoPE added."""
    assert config_of(PUBLISHED["mixtral-8x7b"]) == presets["mixtral-8x7b"]
    for settings, eps in ((CASES["mixtral"], 1e-5), (DEEPSEEK, 1e-6), (LLAMA, 1e-6)):
        silent = {name: value for name, value in settings.items() if name != "rms_norm_eps"}
        assert config_of(silent).norm_eps == eps  # what transformers takes then
    settings = PUBLISHED["deepseek-v3"]
    with pytest.raises(ValueError, match="rope_scaling = .*'type': 'yarn'.*; only None has"):
        config_of(settings)
    config = config_of(settings | dict(rope_scaling=None, max_position_embeddings=4096))
    trained = replace(config.experts, balance_alpha=1e-4, bias_speed=1e-3)
    assert replace(config, experts=trained) == presets["deepseek-v3"]
    assert (
        config_of(settings | dict(rope_scaling=None, n_group=None, topk_group=None)).experts.route_nodes == 1
    )


def test_files_of_newer_versions():
    newer = {name: value for name, value in LLAMA.items() if not name.startswith("rope")}
    assert config_of(
        newer | {"rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"}}
    ) == config_of(LLAMA)


BAD_SETTINGS = {  # what is said, and of which settings
    "model_type 'bert'; known here are llama, gpt2, mixtral, deepseek_v3": {"model_type": "bert"},
    "rope_scaling = {'factor': 8.0}; only None": LLAMA | {"rope_scaling": {"factor": 8.0}},
    "rope_type = 'llama3'; only 'default'": LLAMA
    | {"rope_parameters": {"rope_theta": 1.0, "rope_type": "llama3"}},
    "attention_bias = True; only False": LLAMA | {"attention_bias": True},
    "activation_function = 'relu'": GPT2 | {"activation_function": "relu"},
    "num_experts_per_tok = 6, topk_group = 2: .* 2 of a group agree": DEEPSEEK | {"num_experts_per_tok": 6},
    "sliding_window = 4096; only None": CASES["mixtral"] | {"sliding_window": 4096},
    "scale_attn_weights = False; only True": GPT2 | {"scale_attn_weights": False},
    "hidden_size = 32, which is no setting of GPT-2 that is known": GPT2 | {"hidden_size": 32},
    "query_scale = 2.0, which is no setting of Llama": LLAMA | {"query_scale": 2.0},
    "factor = 8.0, which is no setting of Llama's rope_parameters": LLAMA
    | {"rope_parameters": {"rope_theta": 1.0, "factor": 8.0}},
    "type = 'linear'; only 'default'": LLAMA | {"rope_parameters": {"rope_theta": 1.0, "type": "linear"}},
    "a config.json of GPT-2 without n_embd": {key: x for key, x in GPT2.items() if key != "n_embd"},
    "head_dim = 9; only 6": DEEPSEEK | {"head_dim": 9},
} | {
    f"{name} = {value!r}; only": DEEPSEEK | {name: value}
    for name, value in dict(
        norm_topk_prob=False, scoring_func="softmax", v_head_dim=6, rope_interleave=False, rms_norm_eps=1e-5
    ).items()
}
BAD_STATES = {  # what is said, of which weights, for which model
    r"lacks \['embed_tokens.weight'": (gpt2_state(), LLAMA),
    r"has \['extra.weight'\] too many": (gpt2_state() | {"extra.weight": torch.ones(1)}, GPT2),
    r"lacks \['lm_head.weight'\]": (llama_state(tied=True), LLAMA),
    r"embed_tokens.weight gives .* \[61, 32\]; .* wants \[62, 32\]": (
        llama_state(),
        LLAMA | {"vocab_size": 62},
    ),
    r"lacks \['layers.0.block_sparse_moe.experts.4.w1.weight'": (
        case_of("mixtral")[1],
        CASES["mixtral"] | {"num_local_experts": 5},
    ),
}
MIXTRAL = presets["mixtral-8x7b"]
OF_NO_FAMILY = [
    replace(config_of(LLAMA), activation="geglu"),
    replace(presets["deepseek-v3"], experts=None),
    *(
        replace(MIXTRAL, experts=replace(MIXTRAL.experts, **change))
        for change in (
            dict(router="gshard"),
            dict(shared_experts=1),
            dict(expert_width=8),
            dict(dense_first=1),
            dict(expert_every=2),
        )
    ),
]
CALLS = [(said, lambda settings=settings: config_of(settings)) for said, settings in BAD_SETTINGS.items()]
CALLS += [
    (said, lambda state=state, settings=settings: dict(incoming(state, config_of(settings))))
    for said, (state, settings) in BAD_STATES.items()
]
CALLS += [
    ("is none of Llama, GPT-2, Mixtral, DeepSeek-V3", lambda config=config: dict(outgoing({}, config)))
    for config in OF_NO_FAMILY
]


@pytest.mark.parametrize("words, call", CALLS)
def test_refusals_are_one_line(words, call):
    with pytest.raises(ValueError, match=words) as error:
        call()
    assert "\n" not in str(error.value)
