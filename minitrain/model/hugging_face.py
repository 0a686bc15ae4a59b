"""Weights of four families as Hugging Face names them, and what else must agree for equal logits.

    config = config_of(json.load(open("config.json")))          model = GPT(config)
    model.load_state_dict(from_hugging_face(state, config))     to_hugging_face(model.state_dict(), config)

                Llama, Mixtral, DeepSeek-V3        GPT-2                              here
    linear      y = x Wᵀ, W [out, in]             Conv1D: y = x W + b, W [in, out]   as Llama
    Q, K, V     three; V3: K and V of a head one  one, c_attn [D, 3D]: Q, K, V       three
    positions   RoPE on halves (i, i + K/2);      a table, wpe                       both, the same halves
                V3: on pairs (2i, 2i + 1)
    norm        RMSNorm; rms_norm_eps             LayerNorm, 1e-5                    norm_eps (default 1e-5)
    MLP         silu(gate) * up                   gelu_new, the tanh form            "swiglu"; "gelu_tanh"
    experts     one by one, [out, in]; in transformers 5 also stacked, gate on up    stacked, [E, in, out]
    head        lm_head, or tied and left out     tied to wte                        tied: under both names

Each of these, wrong, gives a model that runs and writes nonsense or nearly sense: GELU for its tanh form
moves logits by 1e-3, eps 1e-6 for 1e-5 (Llama 1 for 2 and 3) by less. Meta's own files turn pairs as V3's do:
`halves`. `incoming` and `outgoing` read what makes one tensor at a time. Copied are experts, GPT-2's matrices
and what V3 joins or turns, nothing else. Raises ValueError for another model's state, and for FP8.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from einops import rearrange
from torch import Tensor

from minitrain.model.config import GPTConfig
from minitrain.model.gpt import GPT
from minitrain.model.hugging_face_config import config_of, families
from minitrain.ranks.checks import require_positive_ints

__all__ = ["config_of", "from_hugging_face", "halves", "incoming", "names_of", "outgoing", "to_hugging_face"]

# Which part of theirs is ours, where theirs is one.
PARTS = {
    "GPT-2": {"attention.q": 0, "attention.k": 1, "attention.v": 2},
    "DeepSeek-V3": {"attention.k_up": 0, "attention.v_up": 1},
}
# In files of old versions: masks and angles, no parameters.
BUFFERS = re.compile(r"\.(attn\.(masked_)?bias|rotary_emb\.inv_freq)$")
STACKED = re.compile(r"(layers\.\d+\.)mlp\.experts\.(gate_up|down)_proj")  # of transformers 5


def from_hugging_face(state: Mapping[str, Tensor], config: GPTConfig) -> dict[str, Tensor]:
    """The state_dict of `GPT(config)` from theirs. With or without the outer "model." or "transformer."."""
    return dict(incoming(state, config))


def to_hugging_face(state: Mapping[str, Tensor], config: GPTConfig) -> dict[str, Tensor]:
    """Theirs from the state_dict of a `GPT(config)`, to save for other programs: as files on the hub are."""
    return dict(outgoing(state, config))


def incoming(state: Mapping[str, Tensor], config: GPTConfig) -> Iterator[tuple[str, Tensor]]:
    """Our names and tensors one after the other; `state` may read each of its own when it is asked for."""
    table, family = names_of(config), family_of(config)
    found = _readers(state, config)
    if config.tied and "lm_head.weight" not in found:
        found["lm_head.weight"] = found.get(table["layers.0.tokens"][0])
    wanted = {
        theirs.format(e)
        for theirs, _, shape in table.values()
        for e in range(shape[0] if "{}" in theirs else 1)
    }
    if wanted != found.keys():
        lacks, more = sorted(wanted - found.keys())[:3], sorted(found.keys() - wanted)[:3]
        other = f"another model than this config's ({family} by its norm, positions and experts)"
        raise ValueError(f"the state lacks {lacks} and has {more} too many: {other}")
    for name, (theirs, part, shape) in table.items():
        each = [found[theirs.format(e)]() for e in range(shape[0] if "{}" in theirs else 1)]
        value = torch.stack([x.T for x in each]) if "{}" in theirs else _ours(each[0], name, part, config)
        if value.shape != shape:
            gives = f"{theirs} is {list(each[0].shape)}, which gives {name} {list(value.shape)}"
            raise ValueError(f"{gives}; the config wants {list(shape)}")
        yield name, value


def outgoing(state: Mapping[str, Tensor], config: GPTConfig) -> Iterator[tuple[str, Tensor]]:
    """Their names and tensors one after the other."""
    table, outer = names_of(config), "transformer." if family_of(config) == "GPT-2" else "model."
    sources: dict[str, list[str]] = {}
    for name, (theirs, _, _) in table.items():
        sources.setdefault(theirs, []).append(name)
    for theirs, names in sources.items():
        whole = theirs if theirs == "lm_head.weight" else outer + theirs
        if "{}" in theirs:
            yield from ((whole.format(e), x.T.contiguous()) for e, x in enumerate(state[names[0]]))
        else:
            yield whole, _theirs([state[name] for name in names], names[0], config)


def names_of(config: GPTConfig) -> dict[str, tuple[str, int | None, torch.Size]]:
    """{our name: (their name without its first word, which part of it if it is several of ours, our shape)}.

    A {} in their name is the number of an expert.
    """
    family, last, table = family_of(config), config.num_layers + 1, {}
    inside, folder = families()[family].modules, "h" if family == "GPT-2" else "layers"
    outer = {ours.format(last=last): theirs for ours, theirs in families()[family].outer.items()}
    for name, value in GPT(config, device="meta").state_dict().items():
        module, _, kind = name.rpartition(".")
        number, _, inner = module.removeprefix("layers.").partition(".")
        if name in outer or module in outer:
            theirs = outer.get(name) or f"{outer[module]}.{kind}"
        else:
            theirs = inside.get(f"{inner}.{kind}") or f"{inside[inner]}.{kind}"
            if inner == "attention.q_up" and not config.query_latent:
                theirs = "self_attn.q_proj.weight"
            theirs = f"{folder}.{int(number) - 1}.{theirs}"
        table[name] = theirs, PARTS.get(family, {}).get(inner), value.shape
    return table


def halves(weight: Tensor, head_dim: int) -> Tensor:
    """Rows `[H·K, D]` of a wq or wk that turns (2i, 2i + 1) in the order that turns (i, i + K/2)."""
    require_positive_ints(head_dim=head_dim)
    return rearrange(weight, "(h i pair) ... -> (h pair i) ...", i=head_dim // 2, pair=2)


def pairs(weight: Tensor, head_dim: int) -> Tensor:
    """The opposite."""
    require_positive_ints(head_dim=head_dim)
    return rearrange(weight, "(h pair i) ... -> (h i pair) ...", i=head_dim // 2, pair=2)


# ---- tensors ---------------------------------------------------------------------------------------------


def _ours(value: Tensor, name: str, part: int | None, config: GPTConfig) -> Tensor:
    """One of ours from theirs."""
    if name.endswith(("k_up.weight", "v_up.weight")):  # rows of a head: K, then V
        return value.unflatten(0, (config.num_heads, 2, -1))[:, part].flatten(0, 1)
    if width := _turned(name, config):
        return _last_rows(value, width, config.rope_head_dim, halves)
    value = value if part is None else value.chunk(3, dim=-1)[part]
    return value.T.contiguous() if _is_conv1d(config, name) else value


def _theirs(values: list[Tensor], name: str, config: GPTConfig) -> Tensor:
    """Theirs from one or more of ours, of which `name` is the first."""
    if name.endswith("k_up.weight"):
        return torch.stack([x.unflatten(0, (config.num_heads, -1)) for x in values], 1).flatten(0, 2)
    if width := _turned(name, config):
        return _last_rows(values[0], width, config.rope_head_dim, pairs)
    values = [x.T if _is_conv1d(config, name) else x for x in values]
    return values[0].contiguous() if len(values) == 1 else torch.cat(values, dim=-1)


def _turned(name: str, config: GPTConfig) -> int:
    """Of how many rows the last `rope_head_dim` are turned in pairs in DeepSeek's files; 0: of none."""
    widths = {"q_up": config.head_dim, "kv_down": config.kv_latent}
    inside = widths.get(name.split(".")[-2], 0)
    return inside and inside + config.rope_head_dim


def _last_rows(weight: Tensor, width: int, turned: int, order: Callable) -> Tensor:
    """Of every `width` rows the last `turned` in another order."""
    plain, last = weight.unflatten(0, (-1, width)).split((width - turned, turned), dim=1)
    return torch.cat((plain, order(last.flatten(0, 1), turned).view_as(last)), dim=1).flatten(0, 1)


def _readers(state: Mapping[str, Tensor], config: GPTConfig) -> dict[str, Callable[[], Tensor]]:
    """{their name, as on the hub and without its first word: what reads the tensor}."""
    bare = {re.sub(r"^(model|transformer)\.", "", name): name for name in state if not BUFFERS.search(name)}
    if scaled := [name for name in bare if name.endswith("_scale_inv")]:
        raise ValueError(f"weights in FP8 with scales ({scaled[0]}, ..); write them in bfloat16 first")
    # Multi-token prediction modules, numbered after the last layer: nothing here has them.
    beside = tuple(name.removesuffix("eh_proj.weight") for name in bare if name.endswith(".eh_proj.weight"))
    found, family = {}, family_of(config)
    for short, name in bare.items():
        if short.startswith(beside):
            continue
        if not config.experts or not (stacked := STACKED.fullmatch(short)):
            short = short.replace(".mlp.", ".block_sparse_moe.") if family == "Mixtral" else short
            found[short] = partial(state.__getitem__, name)
            continue
        kinds = ("gate", "up") if stacked[2] == "gate_up" else ("down",)
        for e in range(config.experts.num_experts):
            for place, kind in enumerate(kinds):
                theirs = stacked[1] + families()[family].modules[f"mlp.experts.{kind}"].format(e)
                found[theirs] = partial(_one_of_stacked, state, name, e, place, len(kinds))
    return found


def _one_of_stacked(state: Mapping[str, Tensor], name: str, expert: int, place: int, parts: int) -> Tensor:
    return state[name][expert].chunk(parts)[place]


def family_of(config: GPTConfig) -> str:
    c, experts = config, config.experts
    router = experts and _all_alike(config) and experts.router
    mixtral = router == "top_k" and not (experts.shared_experts or experts.dense_first)
    kind = c.norm, c.positions, c.activation, c.bias, c.residual, c.embedding_norm, c.rope_fraction
    match kind, router, bool(c.kv_latent):
        case ("layer", "learned", "gelu" | "gelu_tanh", True, "pre", False, 1), None, False:
            return "GPT-2"
        case ("rms", "rope", "swiglu", False, "pre", False, 1), None, False:
            return "Llama"
        case ("rms", "rope", "swiglu", False, "pre", False, 1), "top_k", False if mixtral:
            if c.expert_width == c.d_ff:
                return "Mixtral"
        case ("rms", "rope", "swiglu", False, "pre", False, 1), "deepseek", True:
            return "DeepSeek-V3"
    names = ("norm", "positions", "activation", "bias", "residual", "kv_latent", "experts")
    said = ", ".join(f"{name} {getattr(config, name)!r}" for name in names)
    raise ValueError(f"a model with {said} is none of {', '.join(families())}")


def _all_alike(config: GPTConfig) -> bool:
    """Every block after the dense ones has as many experts."""
    later = range(config.experts.dense_first + 1, config.num_layers + 1)
    return {config.experts_in(block) for block in later} == {config.experts.num_experts}


def _is_conv1d(config: GPTConfig, name: str) -> bool:
    is_gpt2 = config.positions == "learned"
    return is_gpt2 and name.endswith(".weight") and (".attention." in name or ".mlp." in name)
