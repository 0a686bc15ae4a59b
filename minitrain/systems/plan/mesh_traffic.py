"""What each axis of a mesh sends, as formulas: bytes per rank and step, exact. No torch.

N = rows · T / (dp · m · cp) tokens per microbatch on a rank, m microbatches, width h; l layers and P
parameters in the rank's stages; an activation has e bytes, a weight w, a gradient g; x(n) = (n-1)/n:

    tp    8 x(t) · N·h·e · l·m    two all-reduces forward, two backward. Sequence parallel 10: inputs are
                                  gathered again in backward; a block computed again 10: one of its sums
                                  (with dropout 12: both).
                                  Embedding 2, head 2 (3), and 3 numbers per token
    dp    x(d) · (g + w) · P      d = dp · cp; ZeRO-0 x(d)·2g·P, ZeRO-2 m·g + w, ZeRO-3 m·g + 2m·w
    pp    2 · N·h·e · m           4·m·b·s·h bytes in 16 bits; an end half of it, and the sum of a tied table
    cp    6 (c-1) · N·v·e · l·m   a ring: keys and values v numbers each, again backward, and their gradients
          x(c)·4(q + v) · N·e·l·m heads dealt out (Ulysses), q numbers of queries
    ep    x(n)·4k · N·h·e · l·m   there and back, forward and backward; and counts of 8 bytes per expert

Of P, matrices are cut by t and norms are not; experts are cut by ep, and summed over d / ep. Shoeybi et al.
2019, arXiv:1909.08053, section 3; Rajbhandari et al. 2020, arXiv:1910.02054, section 7; Narayanan et al.
2021, arXiv:2104.04473, section 3. Differs: their (n-1)/n are kept, and the ends of the model are counted.
"""

from fractions import Fraction
from itertools import chain
from typing import Any

from minitrain.model.config import GPTConfig
from minitrain.pipeline.partition import even
from minitrain.plan.accounting import attention_parameters, mlp_parameters
from minitrain.precision.policies import BYTES


def sent_by_axis(config: GPTConfig, strategy, rows: int, length: int, stage: int = 0) -> dict[str, Fraction]:
    """Bytes by axis of a rank that is number `stage` in pp; "dp" are all sums over ranks with other data. A
    global batch of `rows`; without clipping's norm, for sizes that divide: else a dry run has the bytes."""
    _check(config, strategy)
    s, layers, last = strategy, stages_of(config, strategy, stage), config.num_layers + 1
    numbers, e = {*chain(*layers)}, BYTES[s.policy.activations]
    blocks, ends = sorted(numbers - {0, last}), numbers & {0, last}
    tokens = Fraction(rows * length, s.dp * s.cp)  # of a rank, in all microbatches
    activations = tokens * config.d_model * e

    block, head = (10, 3) if s.sequence_parallel else (8, 2)
    if s.recompute == "full":  # what the second sum gives, no backward needs, but for the mask of a dropout
        block += 4 if config.dropout else 2
    times = block * len(blocks) + 2 * (0 in ends) + head * (last in ends)
    loss = 2 * (e + 2 * max(4, e)) * (last in ends)  # a maximum of each token, two sums in float32 or better
    # A boundary: activations forward, gradients back; a slice of them if the sequence is cut.
    messages = (2 * len(layers) - len(ends)) * (s.pp > 1)
    queries, keys = (heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads))
    core = 6 * (s.cp - 1) * keys if s.core == "ring" else share(s.cp) * 4 * (queries + keys)
    experts = filter(None, map(config.experts_in, blocks))
    there_and_back = (4 * config.experts.top_k * activations / s.tp + 8 * n * s.microbatches for n in experts)
    sent = {
        "dp": _data(config, s, sorted(numbers)),
        "pp": messages * activations / (s.tp if s.sequence_parallel else 1),
        "cp": core * tokens * e * len(blocks) / s.tp,
        "tp": share(s.tp) * (times * activations + loss * tokens),
        "ep": share(s.ep) * sum(there_and_back),
    }
    if config.tied and s.pp > 1 and ends:
        pieces = s.tp * (s.dp * s.cp if s.zero else 1)  # summed piece by piece
        table = Fraction(config.vocab_size * config.d_model, pieces)
        sent["pp"] += table * BYTES[s.policy.gradients]  # 2 x(2) = 1
    return {axis: size for axis, size in sent.items() if size}


def stages_of(config: GPTConfig, strategy: Any, stage: int) -> list[range]:
    """The layers of each stage of that rank of pp; 0 is the embedding, L + 1 the head."""
    if not strategy.pipelined:
        return [range(config.num_layers + 2)]
    schedule = strategy.build_schedule()
    cuts = even(config.num_layers, schedule.stages)
    return [cuts[number] for number in schedule.stages_of(stage)]


def share(n: int) -> Fraction:
    return Fraction(n - 1, n)


def _data(config: GPTConfig, s: Any, layers: list[int]) -> Fraction:
    """Whole parameters see a slice of the tokens under sequence parallelism: their sum is over tp as well."""
    ranks, m = s.dp * s.cp, s.microbatches
    g, w = BYTES[s.policy.gradients], BYTES[s.policy.weights]
    per_number = {0: 2 * g, 1: g + w, 2: m * g + w, 3: m * g + 2 * m * w}[s.zero]
    over, sent = ranks * s.tp if s.sequence_parallel else ranks, Fraction(0)
    for layer in layers:
        cut, whole, experts = layer_parameters(config, layer)
        sent += share(ranks) * Fraction(cut, s.tp) + share(over) * whole
        sent += share(ranks // s.ep) * Fraction(experts, s.tp * s.ep)
    return per_number * sent


def layer_parameters(config: GPTConfig, layer: int) -> tuple[int, int, int]:
    """(cut by tp, whole, of all routed experts): of the embedding, a block or the head."""
    D, one_norm = config.d_model, config.d_model * (2 if config.norm == "layer" and config.bias else 1)
    if layer == 0:
        positions = config.max_positions * D if config.positions == "learned" else 0
        return config.vocab_size * D, positions + config.embedding_norm * one_norm, 0
    if layer == config.num_layers + 1:
        return config.vocab_size * D, one_norm * (config.residual in ("pre", "parallel")), 0
    behind = D * config.bias  # the bias of a matrix that is cut by rows is added once, behind the sum
    attention = attention_parameters(config) - behind
    if experts := config.experts_in(layer):
        shared = config.experts.shared_experts * config.expert_width
        shared = mlp_parameters(config, width=shared) if shared else 0  # tp = 1, so nothing of it is cut
        routed = experts * mlp_parameters(config, True, config.expert_width)
        return attention + shared, 2 * one_norm + behind + D * experts, routed
    return attention + mlp_parameters(config) - behind, 2 * (one_norm + behind), 0


def _check(config: GPTConfig, s: Any) -> None:
    """Formulas are for what is listed above; everything else is a dry run's to say."""
    known = dict(hybrid=False, slices=1, overlap=False, ep_travel="tokens", ep_node=1, ep_shadow=0)
    known |= dict(offload="none", products="plain", post_validation=False)
    if s.recompute != "full" or s.cp > 1 or s.ep > 1 or s.sequence_parallel or s.zero == 3:
        known["recompute"] = "none"
    if config.experts:
        known["tp"] = 1
    if s.cp > 1 and s.core != "ulysses":
        known["core"] = "ring"
    for name, value in known.items():
        if getattr(s, name) != value:
            raise ValueError(f"{name}={getattr(s, name)!r} has no formula here; use {value!r}, or a dry run")
    if config.num_kv_heads % s.tp:
        raise ValueError(f"tp={s.tp} ranks share {config.num_kv_heads} K/V heads: no formula; use a dry run")
    if s.pipelined:
        schedule = s.build_schedule()
        if sum(len(schedule.stages_of(rank)) for rank in range(s.pp)) > schedule.stages:
            raise ValueError(f"schedule={s.schedule!r} has stages on two ranks: no formula; use a dry run")
