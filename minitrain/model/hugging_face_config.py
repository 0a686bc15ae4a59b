"""The GPTConfig of a config.json as Hugging Face writes it, or one line that says what has no counterpart.

    config_of({"model_type": "mixtral", "hidden_size": 4096, ..})         llama, gpt2, mixtral, deepseek_v3
    settings_of(config, "Mixtral")                                        the same the other way round

Read are sizes and the arithmetic of a forward. Not read is how a model was trained: balance losses, the
speed of biases, dropout. Refused is what would change logits in silence: rescaled RoPE (DeepSeek-V3's own
file has YaRN, for 163,840 positions; for the 4,096 of pre-training there was none), sliding windows, biases
in Llama, a router that chooses or weighs otherwise. V3 takes groups of experts by their 2 best, we by their
top_k / topk_group best: the same for its 8 and 4. Its multi-token prediction module is left out.
hugging_face.tsv has the names of sizes and modules by family.
DeepSeek-AI 2024, arXiv:2412.19437, sections 2.1.2 and 4.3; Jiang et al. 2024, arXiv:2401.04088, table 1.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from minitrain.model.config import GPTConfig
from minitrain.model.experts_config import ExpertsConfig

TABLE = Path(__file__).with_name("hugging_face.tsv")
KINDS = {"llama": "Llama", "gpt2": "GPT-2", "mixtral": "Mixtral", "deepseek_v3": "DeepSeek-V3"}
WRITTEN = {"GPT-2": "GPT2LMHeadModel", "Llama": "LlamaForCausalLM", "Mixtral": "MixtralForCausalLM"}


class Family(NamedTuple):
    """`sizes` and `modules` are ours to theirs; of a file's other settings `only` some have a counterpart."""

    sizes: dict[str, str]
    missing: dict[str, object]  # what a size is where the file does not say it
    only: dict[str, list]
    modules: dict[str, str]
    outer: dict[str, str]  # of tables, the last norm and the head


@cache
def families() -> dict[str, Family]:
    """The table, by the names of KINDS."""
    found = {name: Family({}, {}, {}, {}, {}) for name in KINDS.values()}
    with TABLE.open() as file:
        for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE):
            ours, theirs = row["ours"], row["theirs"]
            for family in (found[name] for name in row["families"].split()):
                match row["kind"]:
                    case "size":
                        family.sizes[ours] = theirs
                        if row["missing"]:
                            family.missing[theirs] = json.loads(row["missing"])
                    case "only":
                        family.only[theirs] = json.loads(row["missing"])
                    case "module":
                        family.modules[ours] = theirs
                    case "outer":
                        family.outer[ours] = theirs
    return found


def config_of(settings: Mapping) -> GPTConfig:
    """The model of a config.json."""
    if (name := KINDS.get(settings.get("model_type"))) is None:
        raise ValueError(f"model_type {settings.get('model_type')!r}; known here are {', '.join(KINDS)}")
    family = families()[name]
    _only(settings, family.only)
    given = {**family.missing, **settings}
    sizes = {ours: given[theirs] for ours, theirs in family.sizes.items()}
    if name == "GPT-2":
        activation = "gelu" if settings.get("activation_function") == "gelu" else "gelu_tanh"
        return GPTConfig(**sizes, norm="layer", positions="learned", bias=True, activation=activation)
    # Older files have theta on top.
    rope = {"rope_theta": settings.get("rope_theta", 10_000.0)} | (settings.get("rope_parameters") or {})
    _only(rope, {"rope_type": ["default"]})
    experts = None
    if name == "Mixtral":
        experts = ExpertsConfig(settings["num_local_experts"], settings["num_experts_per_tok"])
    if name == "DeepSeek-V3":
        _only(settings, {"v_head_dim": [settings["qk_nope_head_dim"]]})
        sizes["query_latent"] = sizes["query_latent"] or 0
        experts = _deepseek_experts(settings)
    return GPTConfig(**sizes, rope_theta=rope["rope_theta"], experts=experts)


def settings_of(config: GPTConfig, family: str) -> dict:
    """What a config.json says of the model; `family` as `hugging_face.family_of` calls it."""
    if family not in WRITTEN:
        raise ValueError(f"a config.json of {family} is not written here; {', '.join(WRITTEN)} are")
    kind = next(kind for kind, name in KINDS.items() if name == family)
    settings = dict(model_type=kind, architectures=[WRITTEN[family]])
    settings |= {theirs: getattr(config, ours) for ours, theirs in families()[family].sizes.items()}
    if family == "GPT-2":
        return settings | dict(activation_function="gelu" if config.activation == "gelu" else "gelu_new")
    settings |= dict(rope_theta=config.rope_theta, hidden_act="silu")
    if family == "Mixtral":
        experts = config.experts
        settings |= dict(num_local_experts=experts.num_experts, num_experts_per_tok=experts.top_k)
    return settings


def _deepseek_experts(settings: Mapping) -> ExpertsConfig:
    top_k, nodes = settings["num_experts_per_tok"], settings.get("n_group") or 1
    limit = settings.get("topk_group") or nodes
    if limit < nodes and top_k != 2 * limit:
        rule = "theirs takes groups by their 2 best experts, ours by their num_experts_per_tok / topk_group"
        raise ValueError(f"num_experts_per_tok = {top_k}, topk_group = {limit}: {rule}; only 2 is both")
    return ExpertsConfig(
        settings["n_routed_experts"],
        top_k,
        "deepseek",
        expert_width=settings["moe_intermediate_size"],
        shared_experts=settings.get("n_shared_experts") or 0,
        dense_first=settings["first_k_dense_replace"],
        route_nodes=nodes if limit < nodes else 1,
        node_limit=limit if limit < nodes else 0,
        route_scale=settings["routed_scaling_factor"],
    )


def _only(settings: Mapping, known: Mapping[str, list]) -> None:
    for name, values in known.items():
        if (given := settings.get(name, values[0])) not in values:
            raise ValueError(
                f"{name} = {given!r}; only {', '.join(map(repr, values))} has a counterpart here"
            )
