"""The model in Megatron-LM's arguments: widths, attention, norms, experts; rows for megatron.py.

Left to its defaults Megatron-LM has 0.1 of dropout, LayerNorm, learned positions, GELU and a tied head, so a
command that names none of these is read as such a model. Experts are in the blocks that --moe-layer-freq
lists; the weights of their losses carry over as numbers, how they are averaged was not compared. No torch.
"""

from __future__ import annotations

import ast

from minitrain.plan.emit.table import Cases, Made, Options, Same
from minitrain.plan.emit.training_job import DEFAULTS, Values

NEEDED = ("--num-layers", "--hidden-size", "--num-attention-heads", "--vocab-size")
NEEDED += ("--max-position-embeddings", "--seq-length", "--micro-batch-size")


def _width(options: Options, values: Values) -> Values:
    return {"d_ff": options.get("--ffn-hidden-size", 4 * values["d_model"])}


def _write_attention(values: Values) -> Options:
    if not values["kv_latent"]:
        same = values["num_kv_heads"] == values["num_heads"]
        groups = (
            {} if same else {"--group-query-attention": True, "--num-query-groups": values["num_kv_heads"]}
        )
        return {"--kv-channels": values["head_dim"]} | groups
    query = {"--q-lora-rank": values["query_latent"]} if values["query_latent"] else {}
    widths = {"--qk-head-dim": values["head_dim"], "--v-head-dim": values["head_dim"]}
    widths |= {"--kv-lora-rank": values["kv_latent"], "--qk-pos-emb-head-dim": values["rope_head_dim"]}
    return {"--multi-latent-attention": True, "--qk-layernorm": True, "--rope-type": "rope"} | widths | query


def _attention(options: Options, values: Values) -> Values:
    heads, width = values["num_heads"], values["d_model"]
    if options.get("--multi-latent-attention"):
        keys, head_dim = options.get("--qk-head-dim", 128), options.get("--v-head-dim", 128)
        if keys != head_dim or options.get("--rope-type") != "rope" or not options.get("--qk-layernorm"):
            rule = "keys and values of one width, --rope-type rope and --qk-layernorm"
            raise ValueError(f"--multi-latent-attention: minitrain's has {rule}")
        names = dict(kv_latent="--kv-lora-rank", rope_head_dim="--qk-pos-emb-head-dim")
        found = {
            ours: options.get(theirs, {"kv_latent": 32, "rope_head_dim": 64}[ours])
            for ours, theirs in names.items()
        }
        return found | {
            "head_dim": head_dim,
            "num_kv_heads": heads,
            "query_latent": options.get("--q-lora-rank", 0),
        }
    groups = options.get("--num-query-groups", 1) if options.get("--group-query-attention") else heads
    return {"num_kv_heads": groups, "head_dim": options.get("--kv-channels", width // heads)}


def _write_dropout(values: Values) -> Options:
    return {name: float(values["dropout"]) for name in ("--attention-dropout", "--hidden-dropout")}


def _dropout(options: Options, values: Values) -> Values:
    attention, hidden = (options.get(name, 0.1) for name in ("--attention-dropout", "--hidden-dropout"))
    if attention != hidden:
        raise ValueError(
            f"--attention-dropout {attention}, --hidden-dropout {hidden}; minitrain has one for both"
        )
    return {"dropout": float(attention)}


# ---- experts ---------------------------------------------------------------------------------------------

COUNTS = {"--moe-router-topk": ("top_k", 2), "--moe-ffn-hidden-size": ("expert_width", None)}
GROUPS = {"--moe-router-num-groups": ("route_nodes", 1), "--moe-router-group-topk": ("node_limit", 0)}
FACTORS = {
    "--moe-router-topk-scaling-factor": ("route_scale", 1.0),
    "--moe-z-loss-coeff": ("z_alpha", 0.0),
    "--moe-expert-capacity-factor": ("capacity_factor", 0.0),
    "--moe-router-bias-update-rate": ("bias_speed", 1e-3),
}
BALANCE, ALPHA, FREQUENCY = "--moe-router-load-balancing-type", "--moe-aux-loss-coeff", "--moe-layer-freq"
SHARED = "--moe-shared-expert-intermediate-size"
ROUTERS = {
    "top_k": {},
    "switch": {"--moe-router-pre-softmax": True},
    "deepseek": {"--moe-router-score-function": "sigmoid", "--moe-router-enable-expert-bias": True},
}
ROUTER = Cases(
    ("router",), [((r,), o) for r, o in ROUTERS.items()], {"--moe-router-score-function": "softmax"}
)


def _write_experts(values: Values) -> Options:
    if not values["num_experts"]:
        return {}
    blocks = range(
        values["dense_first"] + values["expert_every"], values["num_layers"] + 1, values["expert_every"]
    )
    where = [int(block in blocks) for block in range(1, values["num_layers"] + 1)]
    found = {
        "--num-experts": values["num_experts"],
        "--moe-token-dispatcher-type": "alltoall",
        FREQUENCY: str(where),
    }
    found |= {name: values[ours] for name, (ours, _) in COUNTS.items()}
    named = GROUPS | FACTORS if values["router"] == "deepseek" else FACTORS
    found |= {name: values[ours] for name, (ours, _) in named.items() if values[ours] != DEFAULTS[ours]}
    if values["router"] == "deepseek":
        found["--moe-router-bias-update-rate"] = values["bias_speed"]
    if values["shared_experts"]:
        found[SHARED] = values["shared_experts"] * values["expert_width"]
    alpha = {BALANCE: ["seq_aux_loss"], ALPHA: [values["balance_alpha"]]}
    return found | (alpha if values["balance_alpha"] else {BALANCE: ["none"]}) | ROUTER.write(values)


def _experts(options: Options, values: Values) -> Values:
    if not options.get("--num-experts"):
        return {}
    found = {"num_experts": options["--num-experts"]} | ROUTER.read(options, values)
    found |= {
        ours: options.get(name, default) for name, (ours, default) in (COUNTS | GROUPS | FACTORS).items()
    }
    found["expert_width"] = found["expert_width"] or values["d_ff"]
    if found["router"] != "deepseek":
        found["bias_speed"] = 0.0
    found["shared_experts"], rest = divmod(options.get(SHARED, 0), found["expert_width"])
    if rest:
        raise ValueError(f"{SHARED} {options[SHARED]} is no multiple of an expert's {found['expert_width']}")
    kind, alpha = options.get(BALANCE, ["aux_loss"]), float(options.get(ALPHA, [0.0])[0])
    if alpha and kind != ["seq_aux_loss"]:
        raise ValueError(f"{BALANCE} {' '.join(kind)}: minitrain's loss is of each row; use seq_aux_loss")
    return found | {"balance_alpha": alpha} | _where(options.get(FREQUENCY, "1"), values["num_layers"])


def _where(text: str, layers: int) -> Values:
    """Which blocks have experts, from a list of 0 and 1, or 1 for all."""
    where = [1] * layers if text == "1" else ast.literal_eval(text) if text.startswith("[") else []
    blocks = [number for number, has in enumerate(where, start=1) if has]
    every = blocks[1] - blocks[0] if len(blocks) > 1 else 1
    if not blocks or blocks != list(range(blocks[0], layers + 1, every)) or blocks[0] < every:
        rule = "use a list of 0 and 1 in which, from one block on, every n-th has experts"
        raise ValueError(f"{FREQUENCY} {text} of {layers} blocks; {rule}")
    return {"expert_every": every, "dense_first": blocks[0] - every}


EXPERT_VALUES = (
    "num_experts",
    "top_k",
    "router",
    "expert_width",
    "shared_experts",
    "expert_every",
    "dense_first",
)
EXPERT_OPTIONS = (
    "--num-experts",
    "--moe-token-dispatcher-type",
    FREQUENCY,
    SHARED,
    BALANCE,
    ALPHA,
    *ROUTER.options,
)
EXPERT_OPTIONS += (*COUNTS, *GROUPS, *FACTORS)
BLOCKS = [
    Same("num_layers", "--num-layers", None),
    Same("d_model", "--hidden-size", None),
    Same("num_heads", "--num-attention-heads", None),
    Made(("d_ff",), ("--ffn-hidden-size",), lambda v: {"--ffn-hidden-size": v["d_ff"]}, _width),
    Same("max_positions", "--max-position-embeddings", None),
    Made(
        ("num_kv_heads",),
        (
            "--kv-channels",
            "--group-query-attention",
            "--num-query-groups",
            "--multi-latent-attention",
            "--qk-layernorm",
            "--rope-type",
            "--q-lora-rank",
            "--kv-lora-rank",
            "--qk-head-dim",
            "--v-head-dim",
            "--qk-pos-emb-head-dim",
        ),
        _write_attention,
        _attention,
    ),
    Cases(
        ("norm", "bias"),
        [
            (("layer", True), {"--normalization": "LayerNorm"}),
            (("rms", True), {"--normalization": "RMSNorm"}),
            (("rms", False), {"--normalization": "RMSNorm", "--disable-bias-linear": True}),
        ],
        {"--normalization": "LayerNorm"},
    ),
    Same("norm_eps", "--norm-epsilon", 1e-5),
    Cases(
        ("positions",),
        [
            ((ours,), {"--position-embedding-type": theirs})
            for ours, theirs in (("learned", "learned_absolute"), ("rope", "rope"), ("none", "none"))
        ],
        {"--position-embedding-type": "learned_absolute"},
    ),
    Made(
        ("rope_theta",),
        ("--rotary-base",),
        lambda v: {"--rotary-base": int(v["rope_theta"])},
        lambda o, v: {"rope_theta": float(o.get("--rotary-base", 10_000))},
    ),
    Same("rope_fraction", "--rotary-percent", 1.0),
    Cases(
        ("activation",),
        [(("gelu",), {}), (("swiglu",), {"--swiglu": True}), (("gelu_tanh",), {"--openai-gelu": True})],
    ),
    Cases(("tied",), [((True,), {}), ((False,), {"--untie-embeddings-and-output-weights": True})]),
    Made(("dropout",), ("--attention-dropout", "--hidden-dropout"), _write_dropout, _dropout),
    Made(EXPERT_VALUES, EXPERT_OPTIONS, _write_experts, _experts),
]
