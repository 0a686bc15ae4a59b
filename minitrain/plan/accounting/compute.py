"""How much arithmetic training takes, how long, and which part of the machine's rate it uses.

    FLOPs of a token   6·N + 6·L·H·K·(T+1)     2 per weight forward, 4 backward; likewise Q·Kᵀ and P·V
                       6·N + 12·L·H·K·T        `causal="square"`: with all T keys

A multiply-add is two FLOPs. Under a causal mask token i has i keys, on average (T+1)/2: this "triangle" is
what the model needs and what the ledger counts of a fused kernel. The "square" is what matmul executes and
most papers credit: 7 % more for GPT-2 at 1K tokens, 70 % more for Llama 3 8B at 128K, so say which. Kaplan et
al. 2020, arXiv:2001.08361, section 2.1; Narayanan et al. 2021, arXiv:2104.04473, sections 3.6 and 5.1
(square); Chowdhery et al. 2022 (PaLM), arXiv:2204.02311, section 4.1, appendix B (square); Jiang et al. 2024
(MegaScale), arXiv:2402.15627, table 2 (triangle). Differs: N is every weight that a token is multiplied with
(`parameters.matmul_parameters`), so the count is exact; PaLM's N is all parameters.
"""

from minitrain.model.config import GPTConfig
from minitrain.plan.accounting.parameters import matmul_parameters
from minitrain.ranks.checks import require_nonnegative, require_positive, require_positive_ints

DAY_S = 86_400


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
    """6·T·P / (n·X); with 8 for 6 the recomputed forward counts too. Narayanan et al. 2021, section 5.1.

    `flops_per_s` is what one device achieves, not its peak; the attention term is left out, as in the source.
    """
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
