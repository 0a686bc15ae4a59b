"""Weights of Llama and GPT-2 as Hugging Face names and lays them out, and what else must agree for the same logits.

    config = config_of(json.load(open("config.json")))          model = GPT(config)
    model.load_state_dict(from_hugging_face(state_dict, config))          to_hugging_face(model.state_dict(), config)

                     Llama                               GPT-2                                    here
    linear           y = x Wᵀ, W [out, in]               Conv1D: y = x W + b, W [in, out]         as Llama; GPT-2's are transposed
    Q, K, V          three matrices                      one, c_attn [D, 3D]: Q, then K, then V   three
    positions        RoPE on halves (i, i + K/2)         a table, wpe                             both, and the same halves
    norm             RMSNorm; rms_norm_eps in the file   LayerNorm, 1e-5                          norm_eps (default 1e-5)
    MLP              silu(gate) * up                     gelu_new, the tanh form                  "swiglu"; "gelu_tanh", not "gelu"
    head             lm_head, or tied and left out       tied to wte                              tied: under both names, one tensor
    first layer      model.layers.0                      transformer.h.0                          layers.1; layers.0 is the embedding

Each of these, wrong, gives a model that runs and writes nonsense or, worse, nearly sense: GELU for its tanh form moves logits
by 1e-3, eps 1e-6 for 1e-5 (Llama 1 for 2 and 3) by less. Meta's own files turn pairs (2i, 2i + 1): `halves` reorders the rows
of their wq and wk, as Hugging Face's conversion did.
Copies nothing but GPT-2's transposes. Raises ValueError in one line for settings that have no counterpart here (rescaled RoPE,
biases in Llama), names that are missing or left over, and shapes that are not the config's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from minitrain.model.config import GPTConfig
from minitrain.model.gpt import GPT

LLAMA = {
    "norm1": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "norm2": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
GPT2 = {
    "norm1": "ln_1",
    "attention.out": "attn.c_proj",
    "norm2": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
PACKED = ("attention.q", "attention.k", "attention.v")  # of GPT-2's attn.c_attn, in this order
BUFFERS = re.compile(
    r"\.(attn\.(masked_)?bias|rotary_emb\.inv_freq)$"
)  # in files of old versions: masks and angles, no parameters


def config_of(settings: Mapping) -> GPTConfig:
    """The model of a config.json."""
    kind = settings.get("model_type")
    if kind == "gpt2":
        _only(
            settings,
            {
                "activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu"),
                "scale_attn_by_inverse_layer_idx": (False,),
            },
        )
        activation = "gelu" if settings.get("activation_function") == "gelu" else "gelu_tanh"
        return GPTConfig(
            vocab_size=settings["vocab_size"],
            d_model=settings["n_embd"],
            num_layers=settings["n_layer"],
            num_heads=settings["n_head"],
            d_ff=settings.get("n_inner"),
            max_positions=settings["n_positions"],
            norm="layer",
            positions="learned",
            bias=True,
            norm_eps=settings.get("layer_norm_epsilon", 1e-5),
            activation=activation,
            tied=settings.get("tie_word_embeddings", True),
        )
    if kind == "llama":
        _only(
            settings,
            {
                "hidden_act": ("silu",),
                "rope_scaling": (None,),
                "attention_bias": (False,),
                "mlp_bias": (False,),
            },
        )
        rope = {"rope_theta": settings.get("rope_theta", 10_000.0)} | settings.get(
            "rope_parameters", {}
        )  # newer files
        _only(rope, {"rope_type": ("default",)})
        return GPTConfig(
            vocab_size=settings["vocab_size"],
            d_model=settings["hidden_size"],
            num_layers=settings["num_hidden_layers"],
            num_heads=settings["num_attention_heads"],
            num_kv_heads=settings.get("num_key_value_heads"),
            head_dim=settings.get("head_dim"),
            d_ff=settings["intermediate_size"],
            max_positions=settings["max_position_embeddings"],
            norm_eps=settings.get("rms_norm_eps", 1e-6),
            rope_theta=rope["rope_theta"],
            tied=settings.get("tie_word_embeddings", False),
        )
    raise ValueError(f"model_type {kind!r}; 'llama' and 'gpt2' are known here")


def from_hugging_face(state: Mapping[str, Tensor], config: GPTConfig) -> dict[str, Tensor]:
    """The state_dict of `GPT(config)` from theirs. With or without the outer "model." or "transformer."."""
    state = {
        re.sub(r"^(model|transformer)\.", "", name): value
        for name, value in state.items()
        if not BUFFERS.search(name)
    }
    table = names_of(config)
    if config.tied:
        state.setdefault("lm_head.weight", state.get(table["layers.0.tokens"][0]))
    wanted = {theirs for theirs, _, _ in table.values()}
    if wanted != state.keys():
        raise ValueError(
            f"the state lacks {sorted(wanted - state.keys())[:3]} and has {sorted(state.keys() - wanted)[:3]} too many: "
            f"another model than this config's ({'GPT-2' if _is_gpt2(config) else 'Llama'} by its norm and positions)"
        )
    ours = {}
    for name, (theirs, third, shape) in table.items():
        value = state[theirs] if third is None else state[theirs].chunk(3, dim=-1)[third]
        ours[name] = value.T.contiguous() if _is_conv1d(config, name) else value
        if ours[name].shape != shape:
            raise ValueError(
                f"{theirs} is {list(state[theirs].shape)}, which gives {name} {list(ours[name].shape)}; "
                f"the config wants {list(shape)}"
            )
    return ours


def to_hugging_face(state: Mapping[str, Tensor], config: GPTConfig) -> dict[str, Tensor]:
    """Theirs from the state_dict of a `GPT(config)`, to save for other programs."""
    parts: dict[str, list[Tensor]] = {}
    for name, (theirs, _, _) in names_of(config).items():
        prefix = "" if theirs == "lm_head.weight" else "transformer." if _is_gpt2(config) else "model."
        parts.setdefault(prefix + theirs, []).append(
            state[name].T if _is_conv1d(config, name) else state[name]
        )
    return {
        name: values[0].contiguous() if len(values) == 1 else torch.cat(values, dim=-1)
        for name, values in parts.items()
    }


def names_of(config: GPTConfig) -> dict[str, tuple[str, int | None, torch.Size]]:
    """{our name: (their name without its first word, which third of it if Q, K and V are one, our shape)}."""
    is_gpt2, last, table = _is_gpt2(config), config.num_layers + 1, {}
    outer = {
        "layers.0.tokens": "wte.weight" if is_gpt2 else "embed_tokens.weight",
        "layers.0.positions": "wpe.weight",
        f"layers.{last}.norm": "ln_f" if is_gpt2 else "norm",
        f"layers.{last}.out.weight": "lm_head.weight",
    }
    for name, value in GPT(config, device="meta").state_dict().items():
        module, _, kind = name.rpartition(".")
        number, _, inner = module.removeprefix("layers.").partition(".")
        if name in outer or module in outer:
            table[name] = outer.get(name) or f"{outer[module]}.{kind}", None, value.shape
        elif is_gpt2:
            third = PACKED.index(inner) if inner in PACKED else None
            table[name] = (
                f"h.{int(number) - 1}.{GPT2[inner] if third is None else 'attn.c_attn'}.{kind}",
                third,
                value.shape,
            )
        else:
            table[name] = f"layers.{int(number) - 1}.{LLAMA[inner]}.{kind}", None, value.shape
    return table


def halves(weight: Tensor, head_dim: int) -> Tensor:
    """Rows `[H·K, D]` of a wq or wk that turns (2i, 2i + 1) in the order that turns (i, i + K/2)."""
    return weight.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


def _is_gpt2(config: GPTConfig) -> bool:
    neither = (
        config.residual != "pre" or config.embedding_norm or config.kv_latent or config.rope_fraction != 1
    )
    match config.norm, config.positions, config.activation, config.bias, bool(neither):
        case "layer", "learned", "gelu" | "gelu_tanh", True, False:
            return True
        case "rms", "rope", "swiglu", False, False:
            return False
    raise ValueError(
        f"a model with norm {config.norm!r}, positions {config.positions!r}, activation {config.activation!r}, "
        f"bias {config.bias}, residual {config.residual!r} is neither Llama nor GPT-2"
    )


def _is_conv1d(config: GPTConfig, name: str) -> bool:
    return _is_gpt2(config) and name.endswith(".weight") and (".attention." in name or ".mlp." in name)


def _only(settings: Mapping, known: dict[str, tuple]) -> None:
    for name, values in known.items():
        if settings.get(name, values[0]) not in values:
            raise ValueError(
                f"{name} = {settings[name]!r}; only {', '.join(map(repr, values))} has a counterpart here"
            )
