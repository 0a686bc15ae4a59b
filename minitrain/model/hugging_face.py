"""Weights of Llama and GPT-2 as Hugging Face names them, and what else must agree for equal logits.

    config = config_of(json.load(open("config.json")))          model = GPT(config)
    model.load_state_dict(from_hugging_face(state, config))     to_hugging_face(model.state_dict(), config)

                Llama                             GPT-2                              here
    linear      y = x Wᵀ, W [out, in]             Conv1D: y = x W + b, W [in, out]   as Llama
    Q, K, V     three matrices                    one, c_attn [D, 3D]: Q, K, V       three
    positions   RoPE on halves (i, i + K/2)       a table, wpe                       both, the same halves
    norm        RMSNorm; rms_norm_eps             LayerNorm, 1e-5                    norm_eps (default 1e-5)
    MLP         silu(gate) * up                   gelu_new, the tanh form            "swiglu"; "gelu_tanh"
    head        lm_head, or tied and left out     tied to wte                        tied: under both names
    a block     model.layers.0                    transformer.h.0                    layers.1 (0: embedding)

Each of these, wrong, gives a model that runs and writes nonsense or, worse, nearly sense: GELU for its tanh
form moves logits by 1e-3, eps 1e-6 for 1e-5 (Llama 1 for 2 and 3) by less. Meta's own files turn pairs (2i,
2i + 1): `halves` reorders the rows of their wq and wk, as Hugging Face's conversion did. Raises ValueError
also for settings that have no counterpart here (rescaled RoPE, biases in Llama). Copies nothing but GPT-2's
transposes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from einops import rearrange
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
# In files of old versions: masks and angles, no parameters.
BUFFERS = re.compile(r"\.(attn\.(masked_)?bias|rotary_emb\.inv_freq)$")

# What a config.json may say, where that is not a size.
GPT2_KNOWN = dict(
    activation_function=("gelu_new", "gelu_pytorch_tanh", "gelu"), scale_attn_by_inverse_layer_idx=(False,)
)
LLAMA_KNOWN = dict(hidden_act=("silu",), rope_scaling=(None,), attention_bias=(False,), mlp_bias=(False,))


def config_of(settings: Mapping) -> GPTConfig:
    """The model of a config.json."""
    kind = settings.get("model_type")
    if kind == "gpt2":
        _only(settings, GPT2_KNOWN)
        return GPTConfig(
            vocab_size=settings["vocab_size"],
            d_model=settings["n_embd"],
            num_layers=settings["n_layer"],
            num_heads=settings["n_head"],
            d_ff=settings.get("n_inner"),
            max_positions=settings["n_positions"],
            norm="layer",
            norm_eps=settings.get("layer_norm_epsilon", 1e-5),
            positions="learned",
            activation="gelu" if settings.get("activation_function") == "gelu" else "gelu_tanh",
            bias=True,
            tied=settings.get("tie_word_embeddings", True),
        )
    if kind == "llama":
        _only(settings, LLAMA_KNOWN)
        newer = settings.get("rope_parameters", {})
        # Older files have theta on top.
        rope = {"rope_theta": settings.get("rope_theta", 10_000.0)} | newer
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
    given = {name: value for name, value in state.items() if not BUFFERS.search(name)}
    state = {re.sub(r"^(model|transformer)\.", "", name): value for name, value in given.items()}
    table = names_of(config)
    if config.tied:
        state.setdefault("lm_head.weight", state.get(table["layers.0.tokens"][0]))
    wanted = {theirs for theirs, _, _ in table.values()}
    if wanted != state.keys():
        lacks, more = sorted(wanted - state.keys())[:3], sorted(state.keys() - wanted)[:3]
        kind = "GPT-2" if _is_gpt2(config) else "Llama"
        other = f"another model than this config's ({kind} by its norm and positions)"
        raise ValueError(f"the state lacks {lacks} and has {more} too many: {other}")
    ours = {}
    for name, (theirs, third, shape) in table.items():
        value = state[theirs] if third is None else state[theirs].chunk(3, dim=-1)[third]
        value = ours[name] = value.T.contiguous() if _is_conv1d(config, name) else value
        if value.shape != shape:
            gives = f"{theirs} is {list(state[theirs].shape)}, which gives {name} {list(value.shape)}"
            raise ValueError(f"{gives}; the config wants {list(shape)}")
    return ours


def to_hugging_face(state: Mapping[str, Tensor], config: GPTConfig) -> dict[str, Tensor]:
    """Theirs from the state_dict of a `GPT(config)`, to save for other programs."""
    parts: dict[str, list[Tensor]] = {}
    for name, (theirs, _, _) in names_of(config).items():
        prefix = "" if theirs == "lm_head.weight" else "transformer." if _is_gpt2(config) else "model."
        value = state[name].T if _is_conv1d(config, name) else state[name]
        parts.setdefault(prefix + theirs, []).append(value)
    return {n: v[0].contiguous() if len(v) == 1 else torch.cat(v, dim=-1) for n, v in parts.items()}


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
        third = None
        if name in outer or module in outer:
            theirs = outer.get(name) or f"{outer[module]}.{kind}"
        elif is_gpt2:
            third = PACKED.index(inner) if inner in PACKED else None
            theirs = f"h.{int(number) - 1}.{'attn.c_attn' if inner in PACKED else GPT2[inner]}.{kind}"
        else:
            theirs = f"layers.{int(number) - 1}.{LLAMA[inner]}.{kind}"
        table[name] = theirs, third, value.shape
    return table


def halves(weight: Tensor, head_dim: int) -> Tensor:
    """Rows `[H·K, D]` of a wq or wk that turns (2i, 2i + 1) in the order that turns (i, i + K/2)."""
    return rearrange(weight, "(h i pair) ... -> (h pair i) ...", i=head_dim // 2, pair=2)


def _is_gpt2(config: GPTConfig) -> bool:
    other = config.residual != "pre" or config.embedding_norm or config.kv_latent or config.rope_fraction != 1
    match config.norm, config.positions, config.activation, config.bias, bool(other):
        case "layer", "learned", "gelu" | "gelu_tanh", True, False:
            return True
        case "rms", "rope", "swiglu", False, False:
            return False
    names = ("norm", "positions", "activation", "bias", "residual")
    said = ", ".join(f"{name} {getattr(config, name)!r}" for name in names)
    raise ValueError(f"a model with {said} is neither Llama nor GPT-2")


def _is_conv1d(config: GPTConfig, name: str) -> bool:
    return _is_gpt2(config) and name.endswith(".weight") and (".attention." in name or ".mlp." in name)


def _only(settings: Mapping, known: dict[str, tuple]) -> None:
    for name, values in known.items():
        if (given := settings.get(name, values[0])) not in values:
            raise ValueError(
                f"{name} = {given!r}; only {', '.join(map(repr, values))} has a counterpart here"
            )
