"""Which sizes of a model a Strategy can share out: experts over ep, heads and hidden units over tp.

Each check raises ValueError with the sizes that would do. `strategy` is a Strategy, whose `check` calls
these. No torch here.
"""

from __future__ import annotations

import math
from typing import Any

from minitrain.model.config import GATED, GPTConfig, divisors


def check_expert_parallel(config: GPTConfig, strategy: Any) -> None:
    """Experts that ep ranks can share out, and rows that are whole where a router looks at whole rows."""
    if (c := config.experts) is None:
        raise ValueError(f"ep={strategy.ep}, but the model has no experts to share out; use ep=1")
    numbers = {c.num_experts, c.pyramid_experts or c.num_experts}
    fits = [n for n in divisors(math.gcd(*numbers)) if strategy.dp * strategy.cp % n == 0]
    if strategy.ep not in fits:
        said = " and ".join(map(str, sorted(numbers)))
        raise ValueError(
            f"ep={strategy.ep} does not divide {said} experts; use ep {' or '.join(map(str, fits))}"
        )
    if strategy.ep_shadow > (most := max(numbers)):
        raise ValueError(f"ep_shadow={strategy.ep_shadow} of {most} experts; use at most {most}")
    if config.expert_width % strategy.tp:
        sizes = f"tp={strategy.tp} does not divide expert_width={config.expert_width}"
        fits = " or ".join(map(str, divisors(config.expert_width)))
        raise ValueError(f"{sizes}; each expert is cut over tp: use tp {fits}")
    if c.router == "expert_choice" and max(strategy.cp, strategy.tp, strategy.slices) > 1:
        why = "experts choose among all tokens of a row, and these are on several ranks or slices"
        raise ValueError(f"router 'expert_choice': {why}; use cp=1, tp=1 and slices=1, or another router")
    if c.whole_rows and strategy.slices > 1:
        name = "capacity_factor" if c.capacity_factor else "balance_alpha"
        why = f"{name} counts the tokens of whole rows, and slices={strategy.slices} come one by one"
        raise ValueError(f"{why}; use {name}=0 (bias_speed of router 'deepseek' balances too), or slices=1")


def check_tensor_parallel(config: GPTConfig, tp: int) -> None:
    """Heads and hidden units that tp ranks can share out."""
    if config.kv_latent:
        cure = "use tp=1, or multi-head or grouped-query attention"
        raise ValueError(f"tp={tp} does not cut latent attention (kv_latent={config.kv_latent}); {cure}")
    heads, kv, hidden = config.num_heads, config.num_kv_heads, config.d_ff
    fits = [n for n in divisors(heads) if hidden % n == 0 and (kv % n == 0 or n % kv == 0)]
    if tp not in fits:
        gated = " (gated)" if config.activation in GATED else ""
        sizes = f"num_heads={heads}, num_kv_heads={kv} (which may also divide tp) and d_ff={hidden}{gated}"
        raise ValueError(f"tp={tp} does not divide {sizes}; use tp {' or '.join(map(str, fits))}")
