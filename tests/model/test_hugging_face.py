"""Weights under Hugging Face's names give the logits of Hugging Face's forward, written down here anew; and
what is refused.
"""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from minitrain.model.gpt import GPT
from minitrain.model.hugging_face import config_of, from_hugging_face, halves, to_hugging_face
from minitrain.model.layers import rotate
from tests.parallel import TOLERANCE

LLAMA = dict(
    model_type="llama",
    vocab_size=61,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=48,
    max_position_embeddings=16,
    rms_norm_eps=1e-6,
    rope_theta=5000.0,
    hidden_act="silu",
    rope_scaling=None,
    tie_word_embeddings=False,
)
GPT2 = dict(
    model_type="gpt2",
    vocab_size=61,
    n_embd=32,
    n_layer=2,
    n_head=4,
    n_positions=16,
    n_inner=None,
    layer_norm_epsilon=1e-5,
    activation_function="gelu_new",
)
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
    for i in range(2):
        shapes |= {
            f"model.layers.{i}.{name}.weight": shape
            for name, shape in {
                "self_attn.q_proj": (H * K, D),
                "self_attn.k_proj": (G * K, D),
                "self_attn.v_proj": (G * K, D),
                "self_attn.o_proj": (D, H * K),
                "mlp.gate_proj": (F_, D),
                "mlp.up_proj": (F_, D),
                "mlp.down_proj": (D, F_),
                "input_layernorm": (D,),
                "post_attention_layernorm": (D,),
            }.items()
        }
    return values(shapes if tied else shapes | {"lm_head.weight": (V, D)})


def gpt2_state():
    D, V = 32, 61
    shapes = {
        "transformer.wte.weight": (V, D),
        "transformer.wpe.weight": (16, D),
        "transformer.ln_f.weight": (D,),
        "transformer.ln_f.bias": (D,),
    }
    for i in range(2):
        for name, (rows, columns) in {
            "attn.c_attn": (D, 3 * D),
            "attn.c_proj": (D, D),
            "mlp.c_fc": (D, 4 * D),
            "mlp.c_proj": (4 * D, D),
        }.items():
            shapes |= {
                f"transformer.h.{i}.{name}.weight": (rows, columns),
                f"transformer.h.{i}.{name}.bias": (columns,),
            }
        shapes |= {
            f"transformer.h.{i}.{name}.{kind}": (D,)
            for name in ("ln_1", "ln_2")
            for kind in ("weight", "bias")
        }
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
        frequencies = settings["rope_theta"] ** -(
            torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
        )
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
        x = (
            x
            + (F.silu(h @ weight["mlp.gate_proj"].T) * (h @ weight["mlp.up_proj"].T))
            @ weight["mlp.down_proj"].T
        )
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
    model.load_state_dict(from_hugging_face(state, config))
    return model(TOKENS)


def apart(state, config, expected):
    return (logits(state, config) - expected).abs().max().item()


def test_llama():
    state, config = llama_state(), config_of(LLAMA)
    expected = llama_forward(state, LLAMA)
    assert apart(state, config, expected) < TOLERANCE
    assert (
        apart({name.removeprefix("model."): value for name, value in state.items()}, config, expected)
        < TOLERANCE
    )
    for wrong in (replace(config, norm_eps=1e-5), replace(config, rope_theta=10_000.0)):
        assert apart(state, wrong, expected) > 1e-6
    swapped = {**state, **{name: state[name.replace("gate", "up")] for name in state if "gate" in name}}
    assert apart(swapped, config, expected) > 1e-2
    tied = llama_state(tied=True)
    config = config_of(LLAMA | {"tie_word_embeddings": True})
    assert config.tied and apart(tied, config, llama_forward(tied, LLAMA)) < TOLERANCE


def test_gpt2():
    state, config = gpt2_state(), config_of(GPT2)
    expected = gpt2_forward(state, GPT2)
    assert config.activation == "gelu_tanh" and apart(state, config, expected) < TOLERANCE
    bare = {
        name.removeprefix("transformer."): value for name, value in state.items() if name != "lm_head.weight"
    }
    assert apart(bare, config, expected) < TOLERANCE  # as the files on the hub have it
    assert 1e-4 < apart(state, replace(config, activation="gelu"), expected) < 1e-1
    assert config_of(GPT2 | {"activation_function": "gelu"}).activation == "gelu"


@pytest.mark.parametrize(
    "state, settings", [(llama_state(), LLAMA), (gpt2_state(), GPT2)], ids=["llama", "gpt2"]
)
def test_there_and_back(state, settings):
    config = config_of(settings)
    back = to_hugging_face(
        GPT(config, dtype=torch.float64).state_dict() | from_hugging_face(state, config), config
    )
    expected = {name: value for name, value in state.items() if not name.endswith("h.0.attn.bias")}
    assert back.keys() == expected.keys() and all(
        torch.equal(back[name], value) for name, value in expected.items()
    )


def test_pairs_become_halves():
    """Meta's order, neighbours turned, gives the same scores once the rows are in the other order."""
    generator, K = torch.Generator().manual_seed(3), 8
    x, wq, wk = (
        torch.randn(shape, dtype=torch.float64, generator=generator)
        for shape in ((1, 5, 32), (4 * K, 32), (2 * K, 32))
    )
    place = torch.arange(5)

    def scores(wq, wk, turn):
        q, k = (turn((x @ w.T).unflatten(-1, (-1, K)).transpose(1, 2)) for w in (wq, wk))
        return q @ k.repeat_interleave(2, 1).transpose(-2, -1)

    def pairs(y):
        angles = torch.outer(place.double(), 10_000.0 ** -(torch.arange(0, K, 2, dtype=torch.float64) / K))
        return torch.view_as_real(
            torch.view_as_complex(y.unflatten(-1, (-1, 2)).contiguous())
            * torch.polar(torch.ones_like(angles), angles)
        ).flatten(-2)

    expected = scores(wq, wk, pairs)
    assert (
        scores(halves(wq, K), halves(wk, K), lambda y: rotate(y, place)) - expected
    ).abs().max() < TOLERANCE
    assert (scores(wq, wk, lambda y: rotate(y, place)) - expected).abs().max() > 0.1


def test_files_of_newer_versions():
    newer = {name: value for name, value in LLAMA.items() if not name.startswith("rope")}
    assert config_of(
        newer | {"rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"}}
    ) == config_of(LLAMA)


@pytest.mark.parametrize(
    "words, call",
    [
        ("model_type 'bert'; 'llama' and 'gpt2' are known", lambda: config_of({"model_type": "bert"})),
        (
            "rope_scaling = {'factor': 8.0}; only None",
            lambda: config_of(LLAMA | {"rope_scaling": {"factor": 8.0}}),
        ),
        (
            "rope_type = 'llama3'; only 'default'",
            lambda: config_of(LLAMA | {"rope_parameters": {"rope_theta": 1.0, "rope_type": "llama3"}}),
        ),
        ("attention_bias = True; only False", lambda: config_of(LLAMA | {"attention_bias": True})),
        ("activation_function = 'relu'", lambda: config_of(GPT2 | {"activation_function": "relu"})),
        (r"lacks \['embed_tokens.weight'", lambda: from_hugging_face(gpt2_state(), config_of(LLAMA))),
        (
            r"has \['extra.weight'\] too many",
            lambda: from_hugging_face(gpt2_state() | {"extra.weight": torch.ones(1)}, config_of(GPT2)),
        ),
        (r"lacks \['lm_head.weight'\]", lambda: from_hugging_face(llama_state(tied=True), config_of(LLAMA))),
        (
            r"embed_tokens.weight is \[61, 32\], .* wants \[62, 32\]",
            lambda: from_hugging_face(llama_state(), config_of(LLAMA | {"vocab_size": 62})),
        ),
        (
            "neither Llama nor GPT-2",
            lambda: from_hugging_face(llama_state(), replace(config_of(LLAMA), activation="geglu")),
        ),
    ],
)
def test_refusals_are_one_line(words, call):
    with pytest.raises(ValueError, match=words) as error:
        call()
    assert "\n" not in str(error.value)
