"""What training costs, as formulas (no torch): parameters, arithmetic, memory, bytes on disk.

    parameters       V·D + L·(attention + MLP + norms) + norm + V·D      the last V·D if the head is not tied
    a block          12·D² + 13·D      MHA, biases, LayerNorm, F = 4D; GQA: 2·D·H·K + 2·D·H_kv·K
    mixture          E experts and a router in the place of an MLP, of which a token visits top_k

    FLOPs per token  6·N + 6·L·H·K·(T+1)     2 per weight forward, 4 backward; likewise Q·Kᵀ and P·V
                     6·N + 12·L·H·K·T        `causal="square"`: with all T keys

    model states     2 + 2 + 12 = 16 bytes per parameter   fp16 weight, gradient; fp32 master, two moments
    ZeRO, n ranks    stage 1: 4 + 12/n       2: 2 + 14/n       3: 16/n
    checkpoint       14 bytes per parameter                 all but the gradient
    activations      s·b·h·(34 + 5·a·s/h) bytes per layer   sequence s, microbatch b, width h, heads a

Differs from the sources: N is every weight that a token is multiplied with, so the count is exact (PaLM's N
is all parameters). What travels: systems/plan/mesh_traffic.py.
"""

from dataclasses import dataclass

from minitrain.model.config import GATED, GPTConfig
from minitrain.ranks.checks import require_ints, require_nonnegative, require_positive, require_positive_ints

DAY_S = 86_400


# ---- parameters ------------------------------------------------------------------------------------------
# Narayanan et al. 2021, arXiv:2104.04473, equation 2 (which leaves out the last norm, 2·D); DeepSeek-AI
# 2024 (DeepSeek-V2), arXiv:2405.04434, section 2.1 (MLA); Jiang et al. 2024 (Mixtral), arXiv:2401.04088,
# section 2.1.


def parameters(config: GPTConfig) -> int:
    """All of them, counted once each."""
    return sum(parameter_table(config).values())


def parameter_table(config: GPTConfig) -> dict[str, int]:
    """By place; the parts add up to `parameters(config)`."""
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
    """Those that work on one token: of experts the `top_k` that it visits. Counts both tables, as Mistral's
    12.9B for Mixtral does; DeepSeek's 37B leave the token table out."""
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


# ---- arithmetic ------------------------------------------------------------------------------------------
# A multiply-add is two FLOPs. Under a causal mask token i has i keys, on average (T+1)/2: this "triangle"
# is what the model needs and what the ledger counts of a fused kernel. The "square" is what matmul executes
# and most papers credit: 7 % more for GPT-2 at 1K tokens, 70 % more for Llama 3 8B at 128K, so say which.
# Kaplan et al. 2020, arXiv:2001.08361, section 2.1; Narayanan et al. 2021, sections 3.6 and 5.1 (square);
# Chowdhery et al. 2022 (PaLM), arXiv:2204.02311, section 4.1, appendix B (square); Jiang et al. 2024
# (MegaScale), arXiv:2402.15627, table 2 (triangle).


def forward_flops_per_token(config: GPTConfig, length: int, *, causal: str = "triangle") -> int:
    """2·N + 2·L·H·K·(T+1), with all keys 2·N + 4·L·H·K·T. With MLA the scores are R wider than the values."""
    if causal not in ("triangle", "square"):
        raise ValueError(f"causal = {causal!r}; use 'triangle' (masked scores left out) or 'square' (all)")
    require_positive_ints(length=length)
    widths = 2 * config.head_dim + bool(config.kv_latent) * config.rope_head_dim  # of scores and of values
    twice_the_keys = 2 * length if causal == "square" else length + 1
    return 2 * matmul_parameters(config) + config.num_layers * config.num_heads * widths * twice_the_keys


def flops_per_token(config: GPTConfig, length: int, *, causal="triangle", recompute=False) -> int:
    """Forward and backward: 3 times the forward; 4 times if every layer is run again before its backward."""
    return (4 if recompute else 3) * forward_flops_per_token(config, length, causal=causal)


def training_days(parameters, tokens, devices: int, flops_per_s: float, flops_per_parameter=6) -> float:
    """6·T·P / (n·X); with 8 for 6 the recomputed forward counts too. Narayanan et al. 2021, section 5.1, who
    leave out the attention term as well. `flops_per_s` is what one device achieves, not its peak."""
    require_nonnegative(parameters=parameters, tokens=tokens, flops_per_parameter=flops_per_parameter)
    require_positive(devices=devices, flops_per_s=flops_per_s)
    return flops_per_parameter * tokens * parameters / (devices * flops_per_s) / DAY_S


def mfu(tokens_per_s: float, flops_per_token: float, devices: int, peak_flops_per_s: float) -> float:
    """Model FLOPs utilisation: the model's FLOPs per second over the peak. PaLM, section 4.1."""
    require_nonnegative(tokens_per_s=tokens_per_s, flops_per_token=flops_per_token)
    require_positive(devices=devices, peak_flops_per_s=peak_flops_per_s)
    return tokens_per_s * flops_per_token / (devices * peak_flops_per_s)


def hfu(model_utilisation: float, recomputed_forward: float) -> float:
    """Hardware FLOPs utilisation, MFU (1 + r/3): the share r of the forward, a third of a step, ran twice."""
    require_nonnegative(model_utilisation=model_utilisation, recomputed_forward=recomputed_forward)
    return model_utilisation * (1 + recomputed_forward / 3)


# ---- memory ----------------------------------------------------------------------------------------------
# Rajbhandari et al. 2020 (ZeRO), arXiv:1910.02054, sections 3.1 and 5; 2021 (ZeRO-Infinity),
# arXiv:2104.07857, section 3; Korthikanti et al. 2022, arXiv:2205.05198, section 4 and table 2. As there,
# mean and deviation of the norms (8 or 16 bytes per token) are left out.


def model_state_bytes(parameters: int, *, weight: int = 2, gradient: int = 2, optimizer: int = 12) -> int:
    """Bytes per rank without sharding. ZeRO-Infinity counts an fp32 gradient too: `gradient=6`, 20 in all."""
    require_nonnegative(parameters=parameters, weight=weight, gradient=gradient, optimizer=optimizer)
    return parameters * (weight + gradient + optimizer)


def zero_bytes(parameters: int, ranks: int, stage: int, *, weight=2, gradient=2, optimizer=12) -> float:
    """Bytes per rank: stage 1 shards the optimizer states, 2 gradients too, 3 weights too; 0 nothing."""
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"stage = {stage}; ZeRO has stages 1, 2 and 3 (0: nothing is sharded)")
    require_nonnegative(parameters=parameters, weight=weight, gradient=gradient, optimizer=optimizer)
    require_positive_ints(ranks=ranks)
    sharded = sum((optimizer, gradient, weight)[:stage])
    return parameters * (weight + gradient + optimizer - sharded + sharded / ranks)


def checkpoint_bytes(parameters: int, *, weight: int = 2, optimizer: int = 12) -> int:
    """What must be written to go on training: the next step computes its gradients itself."""
    require_nonnegative(parameters=parameters, weight=weight, optimizer=optimizer)
    return parameters * (weight + optimizer)


@dataclass(frozen=True)
class Term:  # one tensor kept for backward: `sbh` and `ass` are its bytes in units of s·b·h and a·s²·b
    tensor: str
    place: str  # the module of model.Block that keeps it
    sbh: int = 0
    ass: int = 0
    core: bool = False  # inside the core of the attention: gone with selective recomputation
    cut: bool = True  # cut by tensor parallelism; the others only by its sequence parallelism

    def bytes(self, length: int, batch: int, width: int, heads: int) -> int:
        return self.sbh * length * batch * width + self.ass * heads * length**2 * batch


def activation_terms() -> list[Term]:
    return [  # LayerNorm, GELU, dropout in three places, fp16
        Term("input of the first norm", "norm1", sbh=2, cut=False),
        Term("input of the Q, K, V projections", "attention.q", sbh=2, cut=False),
        Term("Q", "attention", sbh=2),
        Term("K", "attention", sbh=2),
        Term("V", "attention", sbh=2),
        Term("output of the softmax", "attention", ass=2, core=True),
        Term("dropout mask of the softmax", "attention", ass=1, core=True),
        Term("probabilities after dropout", "attention", ass=2, core=True),
        Term("input of the output projection", "attention.out", sbh=2),
        Term("dropout mask after the projection", "dropout1", sbh=1, cut=False),
        Term("input of the second norm", "norm2", sbh=2, cut=False),
        Term("input of the up projection", "mlp.up", sbh=2, cut=False),
        Term("input of the GELU", "mlp", sbh=8),
        Term("input of the down projection", "mlp.down", sbh=8),
        Term("dropout mask after the MLP", "dropout2", sbh=1, cut=False),
    ]


def activation_bytes(
    length, batch, width, heads, *, tensor_parallel=1, sequence_parallel=False, recompute="none"
) -> float:
    """Of one layer on one rank: all five rows of the paper's table 2. recompute "selective" drops the core of
    the attention, "full" everything but the layer's input."""
    if recompute not in ("none", "selective", "full"):
        raise ValueError(f"recompute = {recompute!r}; use 'none', 'selective' or 'full'")
    sizes = dict(length=length, batch=batch, width=width, heads=heads, tensor_parallel=tensor_parallel)
    require_positive_ints(1 << 40, **sizes)
    if heads % tensor_parallel or width % heads:
        said = f"width={width}, heads={heads}, tensor_parallel={tensor_parallel}"
        raise ValueError(f"{said}: heads divide the width, and tensor_parallel the heads")
    terms = activation_terms()[: 1 if recompute == "full" else None]
    return sum(
        term.bytes(length, batch, width, heads) / (tensor_parallel if term.cut or sequence_parallel else 1)
        for term in terms
        if not (term.core and recompute == "selective")
    )


# ---- bytes of a text --------------------------------------------------------------------------------------


def token_bytes(vocab: int) -> int:
    """Whole bytes that hold any token id: 2 up to a vocabulary of 65,536, 3 beyond."""
    require_positive_ints(1 << 62, vocab=vocab)
    return max(1, -(-(vocab - 1).bit_length() // 8))


def text_bytes(tokens: float, bytes_per_token: int) -> float:
    require_nonnegative(tokens=tokens, bytes_per_token=bytes_per_token)
    return tokens * bytes_per_token
