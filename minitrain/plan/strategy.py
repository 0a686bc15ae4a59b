"""Strategy: how a model is trained on many ranks, as plain frozen values; the command line's flags.

    Strategy(dp=2, tp=2, zero=1)          ranks = dp · pp · cp · tp; neighbours in the last axis of `order`

`check(config, ranks)` refuses what cannot be, before any rank starts; `check_batch` does so for rows and
length. ep has no ranks of its own: it splits dp · cp. A strategy prints as the call that makes it, without
defaults, and travels as JSON (`asdict`, `Strategy(**values)`). No torch here: planners read it too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, fields
from itertools import combinations_with_replacement

from minitrain.context import core_names as cores
from minitrain.memory.recompute_policies import parse
from minitrain.model.config import GATED, GPTConfig, divisors
from minitrain.pipeline.lower import lower, pause
from minitrain.pipeline.partition import even
from minitrain.pipeline.schedule import Schedule
from minitrain.pipeline.schedules_by_name import NAMES, named, stages_of
from minitrain.precision.policies import FIRST_SCALE, POLICIES, PRODUCTS
from minitrain.ranks.checks import MOST, near, require_ints, require_positive_ints, require_text

AXES = ("dp", "pp", "cp", "tp")
# Letters of parameters, gradients and optimizer state, none cut finer than the next; as in hybrid.py.
PARO_SHARDINGS = tuple("".join(letters) for letters in combinations_with_replacement("NIG", 3))
MOST_CELLS = 1 << 21  # of a schedule, which is made before any rank starts
SIZES = "ep ep_node ep_chunks node nodes microbatches chunks slices inner ulysses loss_scale_window".split()
OFFLOADS = ("optimizer", "parameters", "activations")
CHOICES = dict(schedule=NAMES, ep_travel=("tokens", "experts", "cheaper"), precision=tuple(POLICIES))
CHOICES |= dict(products=tuple(PRODUCTS), core=tuple(cores.CORES), layout=tuple(cores.LAYOUTS))
# How gradients travel (systems/data_parallel/compressed.py): above what the number behind the colon is, and
# its most.
COMPRESSORS = dict(none=None, int8=None, topk=(float, 1.0), randomk=(float, 1.0), cocktail=(float, 0.5))
COMPRESSORS |= dict(thc=(int, 8), powersgd=(int, 1 << 16))


@dataclass(frozen=True)
class Strategy:
    """The defaults are those of one process; the comment beside a field is the help of its flag."""

    dp: int = 1  # ranks with different rows
    pp: int = 1  # ranks with different layers
    cp: int = 1  # ranks with different tokens of the same rows
    tp: int = 1  # ranks with different parts of each matrix
    order: str = "dp-pp-cp-tp"  # of these four, the outermost first: ranks of the last are neighbours
    ep: int = 1  # of the dp x cp ranks, how many share out the experts
    ep_node: int = 1  # of the ep ranks, how many are one node: what crosses to a node does so once
    ep_chunks: int = 1  # in which rows travel, while experts work on those before, or nodes share them out
    ep_travel: str = "tokens"  # what crosses ep: tokens, experts, or cheaper: by the counts of each step
    ep_shadow: int = 0  # of a layer's busy experts, how many may be copied to all of ep for a step
    zero: int | str = 0  # 0: replicated; 1, 2, 3: ZeRO; PaRO's letters, such as III: hybrid sharding
    node: int = 1  # of the dp ranks, how many are one node (of hybrid sharding)
    nodes: int = 1  # of these nodes, how many share one copy of what is cut inside (MiCS)
    sequence_parallel: bool = False  # cut activations between the matrices over tp as well
    overlap: bool = False  # hide what tp sends behind its products
    schedule: str = "1f1b"  # of the stages of pp: gpipe, 1f1b, zb_h1, .. (pipeline/schedules_by_name)
    microbatches: int = 1  # parts in which a rank runs its rows, one after the other
    chunks: int = 1  # stages per rank, for the schedules that interleave
    slices: int = 1  # of each sequence, for terapipe and seq1f1b
    recompute: str = "none"  # what a backward computes again: full, selective, stage, .. (memory/policies)
    recompute_partition: bool = False  # each rank of tp keeps a part of the inputs of what is computed again
    post_validation: bool = False  # of a pipeline: update first, clip when all norms are known
    core: str = "ring"  # attention over the ranks of cp: ring, ulysses, double_ring, usp, ...
    layout: str = "zigzag"  # of a sequence over the ranks of cp: contiguous, zigzag or striped
    inner: int = 1  # of the cp ranks, how many are an inner ring, a node or a team, for cores that have one
    ulysses: int = 1  # of the cp ranks, how many share out heads, for cores that do both
    precision: str = "float32"  # which number has how many bits: bfloat16, float16, .. (precision/policies)
    products: str = "plain"  # of a block's matrices: fp8_tensor, fp8_tiles, .. (precision/policies)
    loss_scale: float = 0.0  # first factor of the loss, halved on overflow; 0: as the precision has it
    loss_scale_window: int = 2000  # steps without overflow after which the factor doubles
    bucket_bytes: int = 25_000_000  # of gradients that travel together
    compress: str = "none"  # gradients: topk:0.01, randomk:0.01, cocktail:0.08, int8, thc:4 or powersgd:2
    offload: str = "none"  # what the host keeps: optimizer, parameters, activations, joined by +
    delayed_update: bool = False  # the host updates beside the next step, whose weights are one step old

    def __post_init__(self):
        if isinstance(self.zero, str) and self.zero.isdigit():
            object.__setattr__(self, "zero", int(self.zero))  # as flags say it
        check_alone(self)

    def check(self, config: GPTConfig, ranks: int) -> Strategy:
        """The strategy, if `config` can be trained with it on so many ranks."""
        if self.ranks != ranks:
            dp, rest = divmod(self.dp * ranks, self.ranks)
            cure = f"choose sizes whose product is {ranks}" if rest else f"dp={dp} would fit"
            sizes = f"{said(self, AXES, ' · ')} are {self.ranks} ranks"
            raise ValueError(f"{sizes}, but the job has {ranks}; {cure}")
        if (policies := len(parse(self.recompute))) > config.num_layers + 1:
            what = f"recompute={self.recompute!r} is for {policies} blocks, the model has {config.num_layers}"
            raise ValueError(f"{what}; name at most {config.num_layers}, of which the last goes on")
        if self.ep > 1 or config.experts:
            _check_mixture(self, config)
        if self.tp > 1:
            _check_tensor_parallel(self.tp, config)
        if self.cp > 1:
            key_width = config.head_dim + (config.rope_head_dim if config.kv_latent else 0)
            sizes = dict(heads=config.num_heads // self.tp, key_width=key_width, value_width=config.head_dim)
            cores.check_choice(self.core, self.context_groups, self.layout, slices=self.slices, **sizes)
        if self.policy.scaled and self.zero and self.pp > 1 and config.tied:
            why = "the ends of the pipeline would deal the tied table out to different ranks"
            raise ValueError(f"{said(self, ('precision', 'zero', 'pp'))} and a tied table: {why}; use zero=0")
        if self.pipelined:
            even(config.num_layers, stages_of(**self.schedule_sizes))
        return self

    def check_batch(self, config: GPTConfig, rows: int, length: int) -> None:
        if rows < (least := self.dp * self.microbatches):
            batch = f"a batch of {rows} rows for {said(self, ('dp', 'microbatches'), ' x ')}"
            raise ValueError(f"{batch}; use at least {least} rows, or fewer of these")
        if length > config.max_positions:
            most = f"max_positions {config.max_positions}"
            raise ValueError(f"sequence {length} > {most}; cut the sequence or raise max_positions")
        if length % self.pieces:
            sizes = said(self, (name for name in ("cp", "tp", "slices") if getattr(self, name) > 1), " · ")
            longer = length + -length % self.pieces
            pieces = f"{self.pieces} pieces ({sizes}, layout={self.layout!r})"
            raise ValueError(f"T={length} is not a multiple of {pieces}; pad the sequence to {longer}")
        if self.slices > length:
            raise ValueError(f"slices={self.slices} of {length} tokens; use at most {length}")

    # ---- what follows from it -----------------------------------------------------------------------------

    ranks = property(lambda self: self.dp * self.pp * self.cp * self.tp)
    policy = property(lambda self: POLICIES[self.precision])
    # the first factor of a loss that is scaled; else 0
    first_loss_scale = property(lambda self: self.loss_scale or FIRST_SCALE * self.policy.scales)
    offloads = property(lambda self: () if self.offload == "none" else tuple(self.offload.split("+")))
    hybrid = property(lambda self: isinstance(self.zero, str))
    # whether stages are run by a schedule: also on one rank, if that recomputes
    pipelined = property(lambda self: self.pp > 1 or self.recompute == "stage")
    # of the dp ranks, how many share one copy of what hybrid sharding cuts over a node (I)
    sharers = property(lambda self: self.node * self.nodes)
    # axes whose ranks have different rows, the outermost first, and those into which cp is cut for its core
    data_axes = property(lambda self: ("inter", "intra") if self.hybrid else ("dp",))
    context_axes = property(lambda self: tuple(self._parts["cp"]))

    @property
    def context_groups(self) -> dict[str, int]:
        """The groups that the core asks for, and their sizes: one axis of the mesh each, or cp itself."""
        first, *rest = cores.CORES[self.core].axes
        sizes = {axis: self.ulysses if axis == "ulysses" else self.inner for axis in rest}
        return {first: self.cp // math.prod(sizes.values())} | sizes

    @property
    def axes(self) -> dict[str, int]:
        """Of the mesh, outermost first."""
        return {axis: size for part in self.order.split("-") for axis, size in self._parts[part].items()}

    @property
    def _parts(self) -> dict[str, dict[str, int]]:
        rows = {"inter": self.dp // self.sharers, "intra": self.sharers} if self.hybrid else {"dp": self.dp}
        tokens = self.context_groups if self.cp > 1 else {}
        tokens = {"cp": self.cp} if len(tokens) == 1 else tokens
        return dict(dp=rows, pp={"pp": self.pp}, cp=tokens, tp={"tp": self.tp} if self.tp > 1 else {})

    def build_schedule(self) -> Schedule:
        return named(**self.schedule_sizes)

    @property
    def schedule_sizes(self) -> dict:
        sizes = dict(p=self.pp, m=self.microbatches, chunks=self.chunks, slices=self.slices)
        return sizes | dict(name=self.schedule, recompute=self.recompute == "stage")

    def hides_transfers(self, schedule: Schedule | None) -> bool:
        """Whether halves of a pair take turns while rows travel to experts and back (halves.py)."""
        travel = self.ep > 1 and self.ep_chunks == 1 and self.ep_travel == "tokens"
        return travel and schedule is not None and schedule.pairs

    @property
    def pieces(self) -> int:
        """What the length of a sequence is a multiple of."""
        pieces = self.tp if self.sequence_parallel else 1
        if self.cp > 1:
            dealt = self.cp // cores.dealt_to(self.core, self.context_groups) * cores.LAYOUTS[self.layout]
            pieces *= math.lcm(self.cp, dealt)
        return pieces * self.slices if pieces > 1 else 1

    def __str__(self) -> str:
        changed = [field.name for field in fields(self) if getattr(self, field.name) != field.default]
        return f"Strategy({said(self, changed)})"


# ---- what it cannot be: ValueError in one line, before any rank starts -----------------------------------


def conflicts(s: Strategy) -> Iterator[tuple[str, str]]:
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
    if s.ep_chunks > 1 and (s.ep == 1 or s.ep_travel == "experts"):
        yield ("ep_chunks ep ep_travel", "chunks are of rows that ranks send; use ep_chunks=1")
    for name, only in dict(overlap=False, ep_chunks=1, ep_travel="tokens", ep_shadow=0).items():
        if s.products != "plain" and getattr(s, name) != only:
            yield f"{name} products", f"it has products of its own; use {name}={only!r} or plain products"
    if s.products == "fp8_delayed" and s.first_loss_scale:
        why = "with a scaled loss it remembers gradients of another factor"
        yield "products precision loss_scale", f"{why}; use fp8_tensor, or bfloat16"
    alone = dict(tp=[1], ep=[1], zero=[0, 1], post_validation=[False], loss_scale=[0], compress=["none"])
    for name, only in alone.items():
        if s.policy.scaled and getattr(s, name) not in only:
            why = "a scale is of a whole tensor, and gradients have one of their own"
            yield f"precision {name}", f"{why}; use {name}={' or '.join(map(str, only))}"
    if s.compress != "none" and s.hybrid:
        yield "compress zero", "a sum in two levels would be compressed twice; use zero=0 to 3"
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


def check_alone(s: Strategy) -> None:
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
            raise ValueError(f"{name}={value!r}; use {', '.join(choices)}{near(value, choices)}")
    parse_compress(s.compress)
    order = s.order.split("-")
    if sorted(order) != sorted(AXES):
        raise ValueError(f"order={s.order!r}; name {', '.join(AXES)} once each, joined by -, outermost first")
    if order.index("cp") < order.index("dp"):  # nodes of hybrid sharding and experts cut dp x cp into blocks
        why = "ranks with other tokens of a row lie inside dp"
        raise ValueError(f"order={s.order!r}: {why}; put dp before cp")
    if set(s.offloads) - set(OFFLOADS) or len(set(s.offloads)) < len(s.offloads):
        raise ValueError(f"offload={s.offload!r}; use none, or once each of {', '.join(OFFLOADS)}, by +")
    for names, why in conflicts(s):
        first, *others = names.split()
        raise ValueError(f"{said(s, [first])} with {said(s, others)}: {why}")
    _check_divides("node", s.node, "dp", s.dp)
    _check_divides("nodes", s.nodes, "the nodes of dp", s.dp // s.node)
    _check_divides("ep", s.ep, "dp x cp", s.dp * s.cp)
    _check_divides("ep_node", s.ep_node, "ep", s.ep)
    node = s.sharers * s.cp
    if s.hybrid and node % s.ep and s.ep % node:
        cure = f"use ep {' or '.join(map(str, divisors(node)))}, or a multiple of {node}"
        raise ValueError(f"ep={s.ep} with nodes of {node} dp x cp ranks; {cure}")
    scale = s.first_loss_scale
    if scale and not (1 <= scale < math.inf and math.frexp(scale)[0] == 0.5):
        raise ValueError(f"loss_scale={scale}; use a power of two, 1 or more, say 65536")
    if s.cp > 1:
        cores.check_choice(s.core, s.context_groups, s.layout, slices=s.slices, heads=s.cp * s.cp)
    if s.pipelined:
        if (cells := s.pp * s.microbatches * s.chunks * s.slices) > MOST_CELLS:
            rule = f"a schedule of {cells:,} cells; use fewer, at most {MOST_CELLS:,} in all"
            raise ValueError(f"{said(s, ('pp', 'microbatches'), ' and ')}: {rule}")
        stages_of(**s.schedule_sizes)
    if s.post_validation:
        schedule = s.build_schedule()
        for rank, program in enumerate(lower(schedule)):
            pause(program, rank, schedule)


def parse_compress(text: str) -> tuple[str, float | None]:
    """("topk", 0.01) of "topk:0.01", ("int8", None) of "int8"."""
    require_text(compress=text)
    name, colon, number = text.partition(":")
    if not colon and COMPRESSORS.get(name, ()) is None:
        return name, None
    with suppress(ValueError, TypeError):  # of what is no number
        kind, most = COMPRESSORS[name] if name in COMPRESSORS else None
        if 0 < (value := kind(number)) <= most:
            return name, value
    usage = "none, topk:0.01, randomk:0.01, cocktail:0.08 (0.5 at most), int8, thc:4 (8 at most), powersgd:2"
    raise ValueError(f"compress={text!r}; use {usage}")


def said(s: Strategy, names, between: str = ", ") -> str:
    return between.join(f"{name}={getattr(s, name)!r}" for name in names)


def _check_divides(name: str, size: int, what: str, whole: int) -> None:
    if whole % size:
        fits = " or ".join(map(str, divisors(whole)))
        raise ValueError(f"{name}={size} does not divide {what}={whole}; use {name} {fits}")


def _check_mixture(s: Strategy, config: GPTConfig) -> None:
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
    if config.kv_latent:
        cure = "use tp=1, or multi-head or grouped-query attention"
        raise ValueError(f"tp={tp} does not cut latent attention (kv_latent={config.kv_latent}); {cure}")
    heads, kv, hidden = config.num_heads, config.num_kv_heads, config.d_ff
    fits = [n for n in divisors(heads) if hidden % n == 0 and (kv % n == 0 or n % kv == 0)]
    if tp not in fits:
        gated = " (gated)" if config.activation in GATED else ""
        sizes = f"num_heads={heads}, num_kv_heads={kv} (which may also divide tp) and d_ff={hidden}{gated}"
        raise ValueError(f"tp={tp} does not divide {sizes}; use tp {' or '.join(map(str, fits))}")
