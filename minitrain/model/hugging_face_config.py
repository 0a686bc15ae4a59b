"""The GPTConfig of a config.json as Hugging Face writes it, or one line that says what has no counterpart.

    config_of({"model_type": "mixtral", "hidden_size": 4096, ..})         llama, gpt2, mixtral, deepseek_v3
    settings_of(config, "Mixtral")                                        the same the other way round

Read are sizes and the arithmetic of a forward. Not read is how a model was trained: balance losses, the
speed of biases, dropout. Refused is what would change logits in silence: rescaled RoPE (DeepSeek-V3's own
file has YaRN, for 163,840 positions; for the 4,096 of pre-training there was none), sliding windows, biases
in Llama, a router that chooses or weighs otherwise. V3 takes groups of experts by their 2 best, we by their
top_k / topk_group best: the same for its 8 and 4. Its multi-token prediction module is left out.
DeepSeek-AI 2024, arXiv:2412.19437, sections 2.1.2 and 4.3; Jiang et al. 2024, arXiv:2401.04088, table 1.
"""

from __future__ import annotations

from collections.abc import Mapping

from minitrain.model.config import GPTConfig
from minitrain.model.experts_config import ExpertsConfig

# What a config.json may say, where that is not a size.
GPT2_KNOWN = dict(
    activation_function=("gelu_new", "gelu_pytorch_tanh", "gelu"), scale_attn_by_inverse_layer_idx=(False,)
)
LLAMA_KNOWN = dict(hidden_act=("silu",), rope_scaling=(None,), attention_bias=(False,), mlp_bias=(False,))
MIXTRAL_KNOWN = LLAMA_KNOWN | dict(sliding_window=(None,))
DEEPSEEK_KNOWN = LLAMA_KNOWN | dict(
    rms_norm_eps=(1e-6,),  # what the norms of the latents have in their code, whatever is said here
    scoring_func=("sigmoid",),
    topk_method=("noaux_tc",),
    norm_topk_prob=(True,),
    moe_layer_freq=(1,),
    rope_interleave=(True,),
)


def config_of(settings: Mapping) -> GPTConfig:
    """The model of a config.json."""
    match settings.get("model_type"):
        case "gpt2":
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
        case "llama":
            _only(settings, LLAMA_KNOWN)
            return _llama(settings, head_dim=settings.get("head_dim"))
        case "mixtral":
            _only(settings, MIXTRAL_KNOWN)
            experts = ExpertsConfig(settings["num_local_experts"], settings["num_experts_per_tok"])
            return _llama(settings, head_dim=settings.get("head_dim"), norm_eps=1e-5, experts=experts)
        case "deepseek_v3":
            _only(settings, DEEPSEEK_KNOWN | dict(v_head_dim=(settings["qk_nope_head_dim"],)))
            return _llama(
                settings,
                head_dim=settings["qk_nope_head_dim"],
                rope_head_dim=settings["qk_rope_head_dim"],
                kv_latent=settings["kv_lora_rank"],
                query_latent=settings.get("q_lora_rank") or 0,
                experts=_deepseek_experts(settings),
            )
    known = "'llama', 'gpt2', 'mixtral' and 'deepseek_v3' are known here"
    raise ValueError(f"model_type {settings.get('model_type')!r}; {known}")


def settings_of(config: GPTConfig, family: str) -> dict:
    """What a config.json says of the model; `family` as `hugging_face.family_of` calls it."""
    c = config
    if family == "GPT-2":
        return dict(
            model_type="gpt2",
            architectures=["GPT2LMHeadModel"],
            vocab_size=c.vocab_size,
            n_embd=c.d_model,
            n_layer=c.num_layers,
            n_head=c.num_heads,
            n_inner=int(c.d_ff),
            n_positions=c.max_positions,
            layer_norm_epsilon=c.norm_eps,
            activation_function="gelu" if c.activation == "gelu" else "gelu_new",
            tie_word_embeddings=c.tied,
        )
    kinds = {"Llama": "llama", "Mixtral": "mixtral"}
    if family not in kinds:
        raise ValueError(
            f"a config.json of {family} is not written here; {' and '.join(kinds)} are, and GPT-2"
        )
    settings = dict(
        model_type=kinds[family],
        architectures=[f"{family}ForCausalLM"],
        vocab_size=c.vocab_size,
        hidden_size=c.d_model,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=int(c.num_kv_heads),
        head_dim=int(c.head_dim),
        intermediate_size=int(c.d_ff),
        max_position_embeddings=c.max_positions,
        rms_norm_eps=c.norm_eps,
        rope_theta=c.rope_theta,
        tie_word_embeddings=c.tied,
        hidden_act="silu",
    )
    if family == "Mixtral":
        settings |= dict(num_local_experts=c.experts.num_experts, num_experts_per_tok=c.experts.top_k)
    return settings


def _llama(settings: Mapping, norm_eps: float = 1e-6, **other) -> GPTConfig:
    """`norm_eps`: where the file says none."""
    # Older files have theta on top.
    rope = {"rope_theta": settings.get("rope_theta", 10_000.0)} | (settings.get("rope_parameters") or {})
    _only(rope, {"rope_type": ("default",)})
    return GPTConfig(
        vocab_size=settings["vocab_size"],
        d_model=settings["hidden_size"],
        num_layers=settings["num_hidden_layers"],
        num_heads=settings["num_attention_heads"],
        num_kv_heads=settings.get("num_key_value_heads"),
        d_ff=settings["intermediate_size"],
        max_positions=settings["max_position_embeddings"],
        norm_eps=settings.get("rms_norm_eps", norm_eps),
        rope_theta=rope["rope_theta"],
        tied=settings.get("tie_word_embeddings", False),
        **other,
    )


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


def _only(settings: Mapping, known: dict[str, tuple]) -> None:
    for name, values in known.items():
        if (given := settings.get(name, values[0])) not in values:
            raise ValueError(
                f"{name} = {given!r}; only {', '.join(map(repr, values))} has a counterpart here"
            )
