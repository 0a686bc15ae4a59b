"""What a Strategy cannot be, alone and with a model: ValueError in one line, before any rank starts.

`check_alone(strategy)` is Strategy's door, `check_model` and `check_batch` are its methods'. No torch here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from minitrain.context import core_names as cores
from minitrain.data_parallel.choices import PARO_SHARDINGS
from minitrain.memory.recompute_policies import parse
from minitrain.model.config import GATED, GPTConfig, divisors
from minitrain.pipeline.lower import lower, pause
from minitrain.pipeline.partition import even
from minitrain.pipeline.schedules_by_name import NAMES, stages_of
from minitrain.precision.policies import POLICIES, PRODUCTS
from minitrain.ranks.checks import MOST, require_ints, require_positive_ints, require_text

AXES = ("dp", "pp", "cp", "tp")
MOST_CELLS = 1 << 21  # of a schedule, which is made before any rank starts
SIZES = "ep ep_node ep_chunks node nodes microbatches chunks slices inner ulysses loss_scale_window".split()
OFFLOADS = ("optimizer", "parameters", "activations")
CHOICES = {
    "schedule": NAMES,
    "ep_travel": ("tokens", "experts", "cheaper"),
    "precision": tuple(POLICIES),
    "products": tuple(PRODUCTS),
    "core": tuple(cores.CORES),
    "layout": tuple(cores.LAYOUTS),
}


def conflicts(s: Any) -> Iterator[tuple[str, str]]:
    """Fields that clash, and why, with what to use instead."""
    policies, core_axes = parse(s.recompute), cores.CORES[s.core].axes
    on_host = "optimizer" in s.offloads
    for name in ("node", "nodes"):
        if getattr(s, name) > 1 and not s.hybrid:
            hybrid = f"use {name}=1, or one of {', '.join(PARO_SHARDINGS)}"
            yield f"{name} zero", f"nodes matter to hybrid sharding; {hybrid}"
    for name in ("sequence_parallel", "overlap"):
        if getattr(s, name) and s.tp == 1:
            yield f"{name} tp", "it is about the ranks of tp; use tp > 1"
    for name in ("chunks", "slices"):
        if getattr(s, name) > 1 and not s.pipelined:
            yield f"{name} pp", "it is for a pipeline; use pp > 1"
    if s.ep_travel == "cheaper" and s.ep_node > 1:
        yield "ep_travel ep_node", "it compares ranks, not nodes; use ep_node=1, or tokens or experts"
    if s.ep_shadow and (s.ep == 1 or s.ep_travel != "tokens"):
        yield "ep_shadow ep ep_travel", "a shadow is of an expert whose rows would travel; use ep_shadow=0"
    if s.ep_chunks > 1 and (s.ep == 1 or s.ep_node > 1 or s.ep_travel == "experts"):
        yield ("ep_chunks ep ep_node ep_travel", "chunks are of rows that all ranks send; use ep_chunks=1")
    for name, only in dict(overlap=False, ep_chunks=1, ep_travel="tokens", ep_shadow=0).items():
        if s.products != "plain" and getattr(s, name) != only:
            yield f"{name} products", f"it has products of its own; use {name}={only!r} or plain products"
    if s.products == "fp8_delayed" and s.first_loss_scale:
        why = "with a scaled loss it remembers gradients of another factor"
        yield "products precision loss_scale", f"{why}; use fp8_tensor, or bfloat16"
    for name, only in dict(tp=[1], ep=[1], zero=[0, 1], post_validation=[False], loss_scale=[0]).items():
        if s.policy.scaled and getattr(s, name) not in only:
            why = "a scale is of a whole tensor, and gradients have one of their own"
            yield f"precision {name}", f"{why}; use {name}={' or '.join(map(str, only))}"
    if s.policy.copies and any(policy.drop - {"core", "act"} for policy in policies):
        why = "a result is made again without the copies of its layer"
        yield "recompute precision", f"{why}; use full, keep:.. or drop:core+act"
    if s.ulysses > 1 and "ulysses" not in core_axes[1:]:
        yield "ulysses core", "it has no such group; use ulysses=1"
    if s.inner > 1 and not {"inside", "inner", "team"} & set(core_axes):
        yield "inner core", "it has no such group; use inner=1"
    if s.cp % (s.inner * s.ulysses):
        yield "inner ulysses cp", "the product of the first two must divide cp"
    if s.recompute_partition and s.tp == 1:
        yield "recompute_partition tp", "a rank has nobody to share with; use recompute_partition=False"
    if s.recompute_partition and s.sequence_parallel:
        yield "recompute_partition sequence_parallel", "inputs are cut already; use recompute_partition=False"
    if s.recompute_partition and not any(policy.again for policy in policies):
        why = "no block keeps its input alone; use full, keep:core, every:2 or sqrt"
        yield "recompute_partition recompute", why
    if s.delayed_update and not on_host:
        yield "delayed_update offload", "what is delayed is an update on the host; add optimizer to it"
    if "parameters" in s.offloads and (s.zero != 3 or not on_host):
        cure = "use zero=3 and offload='parameters+optimizer' (on one data rank ZeRO-3 sends nothing)"
        yield "offload zero", f"units are gathered from the host by ZeRO-3 and updated there; {cure}"
    if on_host and s.policy.scaled:
        why = "its tensors are codes with a scale, updated where they are"
        yield "precision offload", f"{why}; use another precision, or no offload"
    if "activations" in s.offloads and s.schedule == "bpipe":
        yield "offload schedule", "whole stages' activations leave already; use one of them"
    if "activations" in s.offloads and s.recompute == "stage":
        yield "offload recompute", "a stage keeps its input only; use one of them"
    if s.post_validation and s.pp == 1:
        yield "post_validation pp", "it is about the norm of several stages; use pp > 1"
    if s.post_validation and s.first_loss_scale:
        why = "updates come before it is known whether the scaled gradients have overflowed"
        yield "post_validation precision loss_scale", f"{why}; use post_validation=False"
    if s.post_validation and on_host:
        yield ("post_validation offload", "what may be taken back stays on the device; use one of them")


def check_alone(s: Any) -> None:
    """A Strategy by itself."""
    sizes = {name: getattr(s, name) for name in (*AXES, *SIZES)}
    if several := [name for name, size in sizes.items() if isinstance(size, list | tuple)]:
        raise ValueError(f"{several[0]}={sizes[several[0]]}: use one whole number")
    require_positive_ints(**sizes)
    require_ints(1, bucket_bytes=s.bucket_bytes)
    require_ints(0, MOST, ep_shadow=s.ep_shadow)
    require_text(offload=s.offload, recompute=s.recompute, order=s.order)
    if isinstance(s.zero, bool) or s.zero not in (0, 1, 2, 3, *PARO_SHARDINGS):
        sharded = f"a stage 1, 2 or 3, or hybrid sharding: {', '.join(PARO_SHARDINGS)}"
        raise ValueError(f"zero={s.zero!r}; use 0 (no sharding), {sharded}")
    for name, choices in CHOICES.items():
        if (value := getattr(s, name)) not in choices:
            raise ValueError(f"{name}={value!r}; use {', '.join(choices)}")
    _check_order(s.order)
    if set(s.offloads) - set(OFFLOADS) or len(set(s.offloads)) < len(s.offloads):
        raise ValueError(f"offload={s.offload!r}; use none, or once each of {', '.join(OFFLOADS)}, by +")
    for names, why in conflicts(s):
        first, *others = names.split()
        raise ValueError(f"{said(s, [first])} with {said(s, others)}: {why}")
    _check_divides("node", s.node, "dp", s.dp)
    _check_divides("nodes", s.nodes, "the nodes of dp", s.dp // s.node)
    _check_experts(s)
    scale = s.first_loss_scale
    if scale and not (1 <= scale < math.inf and math.frexp(scale)[0] == 0.5):
        raise ValueError(f"loss_scale={scale}; use a power of two, 1 or more, say 65536")
    if s.cp > 1:
        cores.check_choice(s.core, s.context_groups, s.layout, slices=s.slices, heads=s.cp * s.cp)
    if s.pipelined:
        cells = s.pp * s.microbatches * s.chunks * s.slices
        if cells > MOST_CELLS:
            rule = f"a schedule of {cells:,} cells; use fewer, at most {MOST_CELLS:,} in all"
            raise ValueError(f"{said(s, ('pp', 'microbatches'), ' and ')}: {rule}")
        stages_of(**s.schedule_sizes)
    if s.post_validation:
        schedule = s.build_schedule()
        for rank, program in enumerate(lower(schedule)):
            pause(program, rank, schedule)


def said(s: Any, names, between: str = ", ") -> str:
    return between.join(f"{name}={getattr(s, name)!r}" for name in names)


def _check_divides(name: str, size: int, what: str, whole: int) -> None:
    if whole % size:
        fits = " or ".join(map(str, divisors(whole)))
        raise ValueError(f"{name}={size} does not divide {what}={whole}; use {name} {fits}")


def _check_order(order: str) -> None:
    """Every axis once. Tokens inside rows: nodes of hybrid sharding and experts cut dp x cp into blocks."""
    names = order.split("-")
    if sorted(names) != sorted(AXES):
        raise ValueError(f"order={order!r}; name {', '.join(AXES)} once each, joined by -, outermost first")
    if names.index("cp") < names.index("dp"):
        raise ValueError(f"order={order!r}: ranks with other tokens of a row lie inside dp; put dp before cp")


def _check_experts(s: Any) -> None:
    _check_divides("ep", s.ep, "dp x cp", s.dp * s.cp)
    _check_divides("ep_node", s.ep_node, "ep", s.ep)
    node = s.sharers * s.cp
    if s.hybrid and node % s.ep and s.ep % node:
        cure = f"use ep {' or '.join(map(str, divisors(node)))}, or a multiple of {node}"
        raise ValueError(f"ep={s.ep} with nodes of {node} dp x cp ranks; {cure}")


# ---- with a model ----------------------------------------------------------------------------------------


def check_model(s: Any, config: GPTConfig, ranks: int) -> None:
    """Whether `config` can be trained on so many ranks."""
    if s.ranks != ranks:
        dp, rest = divmod(s.dp * ranks, s.ranks)
        cure = f"choose sizes whose product is {ranks}" if rest else f"dp={dp} would fit"
        raise ValueError(f"{said(s, AXES, ' · ')} are {s.ranks} ranks, but the job has {ranks}; {cure}")
    if (policies := len(parse(s.recompute))) > config.num_layers + 1:
        what = f"recompute={s.recompute!r} is for {policies} blocks, the model has {config.num_layers}"
        raise ValueError(f"{what}; name at most {config.num_layers}, of which the last goes on")
    if s.ep > 1 or config.experts:
        _check_mixture(s, config)
    if s.tp > 1:
        _check_tensor_parallel(s.tp, config)
    if s.cp > 1:
        key_width = config.head_dim + (config.rope_head_dim if config.kv_latent else 0)
        sizes = dict(heads=config.num_heads // s.tp, key_width=key_width, value_width=config.head_dim)
        cores.check_choice(s.core, s.context_groups, s.layout, slices=s.slices, **sizes)
    if s.policy.scaled and s.zero and s.pp > 1 and config.tied:
        why = "the ends of the pipeline would deal the tied table out to different ranks"
        raise ValueError(f"{said(s, ('precision', 'zero', 'pp'))} and a tied table: {why}; use zero=0")
    if s.pipelined:
        even(config.num_layers, stages_of(**s.schedule_sizes))


def _check_mixture(s: Any, config: GPTConfig) -> None:
    """Experts that ep ranks can share out, and rows that are whole where a router looks at whole rows."""
    if (c := config.experts) is None:
        raise ValueError(f"ep={s.ep}, but the model has no experts to share out; use ep=1")
    numbers = {c.num_experts, c.pyramid_experts or c.num_experts}
    fits = [n for n in divisors(math.gcd(*numbers)) if s.dp * s.cp % n == 0]
    if s.ep not in fits:
        experts = " and ".join(map(str, sorted(numbers)))
        raise ValueError(f"ep={s.ep} does not divide {experts} experts; use ep {' or '.join(map(str, fits))}")
    if s.ep_shadow > (most := max(numbers)):
        raise ValueError(f"ep_shadow={s.ep_shadow} of {most} experts; use at most {most}")
    _check_divides("tp", s.tp, "expert_width", config.expert_width)
    if c.router == "expert_choice" and max(s.cp, s.tp, s.slices) > 1:
        why = "experts choose among all tokens of a row, and these are on several ranks or slices"
        raise ValueError(f"router 'expert_choice': {why}; use cp=1, tp=1 and slices=1, or another router")
    if c.whole_rows and s.slices > 1:
        name = "capacity_factor" if c.capacity_factor else "balance_alpha"
        why = f"{name} counts the tokens of whole rows, and slices={s.slices} come one by one"
        raise ValueError(f"{why}; use {name}=0 (bias_speed of router 'deepseek' balances too), or slices=1")


def _check_tensor_parallel(tp: int, config: GPTConfig) -> None:
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


def check_batch(s: Any, config: GPTConfig, rows: int, length: int) -> None:
    if rows < (least := s.dp * s.microbatches):
        sizes = said(s, ("dp", "microbatches"), " x ")
        raise ValueError(f"a batch of {rows} rows for {sizes}; use at least {least} rows, or fewer of these")
    if length > config.max_positions:
        cure = "cut the sequence or raise max_positions"
        raise ValueError(f"sequence {length} > max_positions {config.max_positions}; {cure}")
    if length % s.pieces:
        sizes = said(s, (name for name in ("cp", "tp", "slices") if getattr(s, name) > 1), " · ")
        longer = length + -length % s.pieces
        pieces = f"{s.pieces} pieces ({sizes}, layout={s.layout!r})"
        raise ValueError(f"T={length} is not a multiple of {pieces}; pad the sequence to {longer}")
    if s.slices > length:
        raise ValueError(f"slices={s.slices} of {length} tokens; use at most {length}")
