"""What a Strategy can share out (experts over ep, heads and hidden units over tp), compute again and offload.

Each check raises ValueError with the sizes that would do. `strategy` is a Strategy, whose `check` calls
these. No torch here.
"""

from __future__ import annotations

import math
from typing import Any

from minitrain.data_parallel.choices import PARO_SHARDINGS
from minitrain.memory.recompute_policies import parse
from minitrain.model.config import GATED, GPTConfig, divisors
from minitrain.pipeline.schedules_by_name import NAMES
from minitrain.ranks.checks import MOST

MOST_CELLS = 1 << 21  # of a schedule, which is made before any rank starts
SIZES = "ep ep_node ep_chunks node nodes microbatches chunks slices inner ulysses bucket_bytes".split()


def check_sizes(strategy: Any, axes: tuple[str, ...]) -> None:
    """Counts, and few enough to go through one by one; bytes may be more."""
    for name in (*axes, *SIZES):
        if not isinstance(size := getattr(strategy, name), int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{name}={size!r}; use a whole number, 1 or more")
        if size > MOST and name != "bucket_bytes":
            raise ValueError(f"{name}={size}; use a whole number up to {MOST:,}")
    if strategy.schedule not in NAMES:
        raise ValueError(f"schedule={strategy.schedule!r}; use {', '.join(NAMES)}")
    cells = strategy.pp * strategy.microbatches * strategy.chunks * strategy.slices
    if strategy.pipelined and cells > MOST_CELLS:
        sizes = f"pp={strategy.pp} and microbatches={strategy.microbatches}"
        raise ValueError(f"{sizes}: a schedule of {cells:,} cells; use fewer, at most {MOST_CELLS:,} in all")


def check_order(order: str, axes: tuple[str, ...]) -> None:
    """Every axis once. Tokens inside rows: nodes of hybrid sharding and experts cut dp x cp into blocks."""
    names = order.split("-") if isinstance(order, str) else []
    if sorted(names) != sorted(axes):
        raise ValueError(f"order={order!r}; name {', '.join(axes)} once each, joined by -, outermost first")
    if names.index("cp") < names.index("dp"):
        raise ValueError(f"order={order!r}: ranks with other tokens of a row lie inside dp; put dp before cp")


def check_nodes(strategy: Any) -> None:
    """Nodes of hybrid sharding, and how many of them share one copy."""
    for name in ("node", "nodes"):
        if (size := getattr(strategy, name)) > 1 and not strategy.hybrid:
            cure = f"nodes matter to hybrid sharding; use {name}=1, or one of {', '.join(PARO_SHARDINGS)}"
            raise ValueError(f"{name}={size} with zero={strategy.zero}: {cure}")
    dp, node = strategy.dp, strategy.node
    if dp % node:
        fits = " or ".join(map(str, divisors(dp)))
        raise ValueError(f"node={node} does not divide dp={dp}; a node has {fits} of its ranks")
    if dp % strategy.sharers:
        fits = " or ".join(map(str, divisors(dp // node)))
        raise ValueError(
            f"nodes={strategy.nodes} does not divide the {dp // node} nodes of dp={dp}; use {fits}"
        )


def check_loss_scale(strategy: Any) -> None:
    scale, window = strategy.first_loss_scale, strategy.loss_scale_window
    if scale and not (1 <= scale < math.inf and math.frexp(scale)[0] == 0.5):
        raise ValueError(f"loss_scale={scale}; use a power of two, 1 or more, say 65536")
    if not isinstance(window, int) or window < 1:
        raise ValueError(f"loss_scale_window={window}; use a number of steps, 1 or more, say 2000")
    if scale and strategy.post_validation:
        why = "updates come before it is known whether the scaled gradients have overflowed"
        raise ValueError(f"post_validation=True with loss_scale={scale:g}: {why}; use post_validation=False")


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


def check_memory(strategy: Any, config: GPTConfig | None = None) -> None:
    """What is computed again, and what the host keeps."""
    check_recompute(strategy, config)
    check_offload(strategy)


def check_recompute(strategy: Any, config: GPTConfig | None) -> None:
    """Words that can be told apart, and with a config, no more of them than blocks and a rest."""
    policies = parse(strategy.recompute)
    if config and len(policies) > (most := config.num_layers) + 1:
        said = f"recompute={strategy.recompute!r} is for {len(policies)} blocks, the model has {most}"
        raise ValueError(f"{said}; name at most {most}, of which the last goes on")
    if strategy.recompute_partition:
        if strategy.tp == 1 or strategy.sequence_parallel:
            why = (
                "tp=1 has nobody to share with"
                if strategy.tp == 1
                else "sequence_parallel has cut them already"
            )
            raise ValueError(f"recompute_partition=True: {why}; use recompute_partition=False")
        if not any(policy.again for policy in policies):
            cure = "no block keeps its input alone; use full, keep:core, every:2 or sqrt"
            raise ValueError(f"recompute_partition=True with recompute={strategy.recompute!r}: {cure}")
    if strategy.policy.copies and any(policy.drop - {"core", "act"} for policy in policies):
        why = "a result is made again without the copies of its layer"
        cure = "use full, keep:.. or drop:core+act"
        raise ValueError(
            f"recompute={strategy.recompute!r} with precision={strategy.precision!r}: {why}; {cure}"
        )


def check_offload(strategy: Any) -> None:
    """Words that are known, and what the host can do beside the rest."""
    words, known = strategy.offloads, ("optimizer", "parameters", "activations")
    if set(words) - set(known) or len(set(words)) < len(words):
        found = f"offload={strategy.offload!r}"
        raise ValueError(f"{found}; use none, or once each of {', '.join(known)}, joined by +")
    if strategy.delayed_update and "optimizer" not in words:
        why = "what is delayed is an update on the host"
        raise ValueError(f"delayed_update=True with offload={strategy.offload!r}: {why}; add optimizer to it")
    if "parameters" in words and (strategy.zero != 3 or "optimizer" not in words):
        why = "units are gathered from the host by ZeRO-3 and updated there"
        cure = "use zero=3 and offload='parameters+optimizer' (on one data rank ZeRO-3 sends nothing)"
        raise ValueError(f"offload={strategy.offload!r} with zero={strategy.zero!r}: {why}; {cure}")
    if "optimizer" in words and strategy.post_validation:
        why = "an update that may be taken back stays on the device"
        raise ValueError(f"post_validation=True with offload={strategy.offload!r}: {why}; use one of them")
    if "optimizer" in words and strategy.policy.scaled:
        why = "its tensors are codes with a scale, which are updated where they are"
        cure = "use another precision, or no offload"
        raise ValueError(f"precision={strategy.precision!r} with offload={strategy.offload!r}: {why}; {cure}")
    if "activations" in words and (strategy.recompute == "stage" or strategy.schedule == "bpipe"):
        name = "schedule" if strategy.schedule == "bpipe" else "recompute"
        why = (
            "whole stages' activations leave already"
            if name == "schedule"
            else "a stage keeps its input only"
        )
        said = f"offload={strategy.offload!r} with {name}={getattr(strategy, name)!r}"
        raise ValueError(f"{said}: {why}; use one of them")
