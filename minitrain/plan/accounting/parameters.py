"""How many parameters a model has, where they are, and how many of them work on each token.

    dense      V·D + L·(attention + MLP + norms) + norm + V·D      the last V·D only if the head is not tied
    a block    12·D² + 13·D      MHA, biases, LayerNorm, F = 4D
    GQA        2·D·H·K + 2·D·H_kv·K
    mixture    E experts and a router in the place of an MLP, of which a token visits top_k

Narayanan et al. 2021, arXiv:2104.04473, equation 2 (which leaves out the last norm, 2·D); DeepSeek-AI 2024
(DeepSeek-V2), arXiv:2405.04434, section 2.1 (MLA); Jiang et al. 2024 (Mixtral), arXiv:2401.04088, section
2.1.
"""

from minitrain.model.config import GATED, GPTConfig
from minitrain.ranks.checks import require_ints


def parameters(config: GPTConfig) -> int:
    """All of them, counted once each."""
    return sum(parameter_table(config).values())


def parameter_table(config: GPTConfig) -> dict[str, int]:
    """The same number by place; the parts add up to `parameters(config)`."""
    table, layers = config.vocab_size * config.d_model, config.num_layers
    routed = [block for block in range(1, layers + 1) if config.experts_in(block)]
    norms = 2 * layers + (config.residual in ("pre", "parallel")) + config.embedding_norm
    experts = sum(experts_parameters(config, block) for block in routed)
    return {
        "token table": table,
        "position table": config.max_positions * config.d_model if config.positions == "learned" else 0,
        "attention": layers * attention_parameters(config),
        "MLP": (layers - len(routed)) * mlp_parameters(config),
        **({"experts": experts} if routed else {}),
        "norms": norms * _norm(config, config.d_model),
        "output table": 0 if config.tied else table,
    }


def attention_parameters(config: GPTConfig, matrices_only: bool = False) -> int:
    """One layer's projections; unless `matrices_only`, with biases and (MLA) the norms of the latents."""
    D, H, K, H_kv = config.d_model, config.num_heads, config.head_dim, config.num_kv_heads
    bias = config.bias and not matrices_only
    if not config.kv_latent:
        return 2 * (D * H * K + D * H_kv * K) + bias * (H * K + 2 * H_kv * K + D)
    R, latents = config.rope_head_dim, [config.kv_latent] + [config.query_latent] * bool(config.query_latent)
    down = D * (config.kv_latent + R) + D * config.query_latent
    up = (config.query_latent or D) * H * (K + R) + 2 * config.kv_latent * H * K
    norms = 0 if matrices_only else sum(_norm(config, width) for width in latents)
    return down + up + H * K * D + norms + bias * (config.kv_latent + R + config.query_latent + D)


def mlp_parameters(config: GPTConfig, matrices_only: bool = False, width: int | None = None) -> int:
    """One layer's MLP: two matrices, or three with a gate; of the config's width F or another one."""
    if width is not None:
        require_ints(width=width)
    inwards, width = 2 if config.activation in GATED else 1, width or config.d_ff
    bias = config.bias and not matrices_only
    return (inwards + 1) * config.d_model * width + bias * (inwards * width + config.d_model)


def experts_parameters(config: GPTConfig, block: int, visited: int | None = None) -> int:
    """Router, experts and shared experts of a block; or so many `visited` experts in the place of all."""
    c, experts, width = config.experts, config.experts_in(block), config.expert_width
    one = mlp_parameters(config, matrices_only=True, width=width)
    shared = mlp_parameters(config, visited is not None, c.shared_experts * width) if c.shared_experts else 0
    return config.d_model * experts + (experts if visited is None else visited) * one + shared


def active_parameters(config: GPTConfig, token_table: bool = True) -> int:
    """Those that work on one token: of experts the `top_k` that it visits.

    Counts both tables, as Mistral's 12.9B for Mixtral does; DeepSeek's 37B leave the token table out."""
    idle = sum(
        (experts - config.experts.top_k) * mlp_parameters(config, True, config.expert_width)
        for block in range(1, config.num_layers + 1)
        if (experts := config.experts_in(block))
    )
    return parameters(config) - idle - (0 if token_table else config.vocab_size * config.d_model)


def matmul_parameters(config: GPTConfig) -> int:
    """The N of 6·N: weights that multiply a token. The output table counts, tied or not."""
    inside = config.num_layers * attention_parameters(config, matrices_only=True)
    for block in range(1, config.num_layers + 1):
        visited = config.experts_in(block) and config.experts.top_k
        inside += experts_parameters(config, block, visited) if visited else mlp_parameters(config, True)
    return inside + config.vocab_size * config.d_model


def cached_elements(config: GPTConfig) -> int:
    """Numbers kept per token and layer while generating: 2·H_kv·K; with MLA a latent and a rotated key."""
    if config.kv_latent:
        return config.kv_latent + config.rope_head_dim
    return 2 * config.num_kv_heads * config.head_dim


def _norm(config: GPTConfig, width: int) -> int:
    return width * (2 if config.norm == "layer" and config.bias else 1)
