"""Strategy: how a model is trained on many ranks, as plain frozen values; the command line's flags.

    Strategy(dp=2, tp=2, zero=1)          ranks = dp · pp · cp · tp; neighbours in the last axis of `order`

    dp    rows          different rows of the batch          zero; `node` and `nodes`, of hybrid sharding
    pp    layers        stages, run by `schedule`            microbatches, chunks, slices
    cp    tokens        of the same rows, by `layout`        core: attention over them
    tp    matrices      the same tokens                      sequence_parallel, overlap
    ep    experts       none of its own: it splits dp · cp   ep_node, ep_chunks, ep_travel, ep_shadow

`check(config, ranks)` refuses what cannot be, before any rank starts; `check_batch` does so for rows and
length. It prints as the call that makes it, without defaults, and travels as JSON (`asdict`,
`Strategy(**values)`). No torch here: planners read it too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields

from minitrain.context import core_names as cores
from minitrain.data_parallel.choices import PARO_SHARDINGS
from minitrain.model.config import GPTConfig, divisors
from minitrain.pipeline.lower import lower, pause
from minitrain.pipeline.partition import even
from minitrain.pipeline.schedule import Schedule
from minitrain.pipeline.schedules_by_name import named, stages_of
from minitrain.plan.strategy_checks import (
    check_expert_parallel,
    check_loss_scale,
    check_memory,
    check_nodes,
    check_order,
    check_sizes,
    check_tensor_parallel,
)
from minitrain.precision.policies import FIRST_SCALE, POLICIES, PRODUCTS, Policy
from minitrain.ranks.checks import require_text

AXES = ("dp", "pp", "cp", "tp")
TRAVEL = ("tokens", "experts", "cheaper")


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
    ep_chunks: int = 1  # in which an expert's rows travel, while it works on those before
    ep_travel: str = "tokens"  # what crosses ep: tokens, experts, or cheaper: by the counts of each step
    ep_shadow: int = 0  # of a layer's busy experts, how many may be copied to all of ep for a step
    zero: int | str = 0  # 0: replicated; 1, 2, 3: ZeRO; a word such as "III": hybrid sharding
    node: int = 1  # of the dp ranks, how many are one node (for a word)
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
    offload: str = "none"  # what the host keeps: optimizer, parameters, activations, joined by +
    delayed_update: bool = False  # the host updates beside the next step, whose weights are one step old

    def __post_init__(self):
        check_sizes(self, AXES)
        require_text(offload=self.offload)
        check_order(self.order, AXES)
        if isinstance(self.zero, str) and self.zero.isdigit():
            object.__setattr__(self, "zero", int(self.zero))  # as flags say it
        words = ", ".join(PARO_SHARDINGS)
        if isinstance(self.zero, bool) or self.zero not in (0, 1, 2, 3, *PARO_SHARDINGS):
            ways = "0 (no sharding), a stage 1, 2 or 3, or a word of hybrid sharding"
            raise ValueError(f"zero={self.zero!r}; use {ways}: {words}")
        check_nodes(self)
        self._check_experts()
        if self.precision not in POLICIES:
            raise ValueError(f"precision={self.precision!r}; use {', '.join(POLICIES)}")
        check_loss_scale(self)
        self._check_products()
        self._check_scaled()
        check_memory(self)
        if self.tp == 1 and (self.sequence_parallel or self.overlap):
            name = "sequence_parallel" if self.sequence_parallel else "overlap"
            raise ValueError(f"{name}=True is about the ranks of tp, and tp=1; use tp > 1")
        if not self.pipelined and (self.chunks > 1 or self.slices > 1):
            raise ValueError(f"{'chunks' if self.chunks > 1 else 'slices'} > 1 is for a pipeline; use pp > 1")
        self._check_context()
        if self.post_validation and self.pp == 1:
            raise ValueError("post_validation=True is about the norm of several stages, and pp=1; use pp > 1")
        if self.pipelined:
            stages_of(**self._schedule)
        if self.post_validation:
            schedule = self.build_schedule()
            for rank, program in enumerate(lower(schedule)):
                pause(program, rank, schedule)

    # ---- what follows from it -----------------------------------------------------------------------------

    @property
    def ranks(self) -> int:
        return self.dp * self.pp * self.cp * self.tp

    @property
    def policy(self) -> Policy:
        return POLICIES[self.precision]

    @property
    def first_loss_scale(self) -> float:
        """Of a loss that is scaled; else 0."""
        return self.loss_scale or FIRST_SCALE * self.policy.scales

    @property
    def offloads(self) -> tuple[str, ...]:
        return () if self.offload == "none" else tuple(self.offload.split("+"))

    @property
    def hybrid(self) -> bool:
        return isinstance(self.zero, str)

    @property
    def pipelined(self) -> bool:
        """Whether stages are run by a schedule: also on one rank, if that recomputes."""
        return self.pp > 1 or self.recompute == "stage"

    @property
    def sharers(self) -> int:
        """Of the dp ranks, how many hold one copy of what a word cuts inside."""
        return self.node * self.nodes

    @property
    def data_axes(self) -> tuple[str, ...]:
        """Those whose ranks have different rows, the outermost first."""
        return ("inter", "intra") if self.hybrid else ("dp",)

    @property
    def context_axes(self) -> tuple[str, ...]:
        """Those into which cp is cut for its core."""
        return tuple(self._context)

    @property
    def context_groups(self) -> dict[str, int]:
        """The groups that the core asks for, and their sizes: one axis of the mesh each, or cp itself."""
        first, *rest = cores.CORES[self.core].axes
        sizes = {axis: self.ulysses if axis == "ulysses" else self.inner for axis in rest}
        return {first: self.cp // math.prod(sizes.values())} | sizes

    @property
    def _context(self) -> dict[str, int]:
        groups = self.context_groups if self.cp > 1 else {}
        return {"cp": self.cp} if len(groups) == 1 else groups

    @property
    def axes(self) -> dict[str, int]:
        """Of the mesh, outermost first."""
        rows = {"inter": self.dp // self.sharers, "intra": self.sharers} if self.hybrid else {"dp": self.dp}
        parts = dict(dp=rows, pp={"pp": self.pp}, cp=self._context, tp={"tp": self.tp} if self.tp > 1 else {})
        return {axis: size for name in self.order.split("-") for axis, size in parts[name].items()}

    def build_schedule(self) -> Schedule:
        return named(**self._schedule)

    @property
    def _schedule(self) -> dict:
        sizes = dict(p=self.pp, m=self.microbatches, chunks=self.chunks, slices=self.slices)
        return sizes | dict(name=self.schedule, recompute=self.recompute == "stage")

    def hides_transfers(self, schedule: Schedule | None) -> bool:
        """Whether halves of a pair take turns while rows travel to experts and back (pipeline/halves.py)."""
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
        return f"Strategy({self._said((f.name for f in fields(self) if getattr(self, f.name) != f.default))})"

    def _said(self, names: Iterable[str], between: str = ", ") -> str:
        return between.join(f"{name}={getattr(self, name)!r}" for name in names)

    # ---- what cannot be -----------------------------------------------------------------------------------

    def _check_experts(self) -> None:
        ranks, node = self.dp * self.cp, self.sharers * self.cp
        if ranks % self.ep:
            fits = " or ".join(map(str, divisors(ranks)))
            raise ValueError(f"ep={self.ep} does not divide dp x cp = {ranks} ranks; use ep {fits}")
        if self.hybrid and node % self.ep and self.ep % node:
            cure = f"use ep {' or '.join(map(str, divisors(node)))}, or a multiple of {node}"
            raise ValueError(f"ep={self.ep} with nodes of {node} dp x cp ranks; {cure}")
        if self.ep % self.ep_node:
            fits = " or ".join(map(str, divisors(self.ep)))
            raise ValueError(
                f"ep_node={self.ep_node} does not divide ep={self.ep}; a node has {fits} of its ranks"
            )
        if self.ep_travel not in TRAVEL:
            raise ValueError(f"ep_travel={self.ep_travel!r}; use {' or '.join(TRAVEL)}")
        if self.ep_travel == "cheaper" and self.ep_node > 1:
            cure = "it compares what crosses between ranks, not nodes; use ep_node=1, or tokens or experts"
            raise ValueError(f"ep_travel='cheaper' with ep_node={self.ep_node}: {cure}")
        if not isinstance(self.ep_shadow, int) or isinstance(self.ep_shadow, bool) or self.ep_shadow < 0:
            raise ValueError(f"ep_shadow={self.ep_shadow!r}; use a whole number, 0 (no shadows) or more")
        if self.ep_shadow and (self.ep == 1 or self.ep_travel != "tokens"):
            rule = "a shadow is a copy of an expert whose rows would travel; use ep_shadow=0"
            raise ValueError(f"ep_shadow={self.ep_shadow} with {self._said(('ep', 'ep_travel'))}: {rule}")
        if self.ep_chunks > 1 and (self.ep == 1 or self.ep_node > 1 or self.ep_travel == "experts"):
            others = self._said(("ep", "ep_node", "ep_travel"))
            rule = "chunks are of rows that travel between all ranks of ep at once"
            raise ValueError(f"ep_chunks={self.ep_chunks} with {others}: {rule}; use ep_chunks=1")

    def _check_products(self) -> None:
        if self.products not in PRODUCTS:
            raise ValueError(f"products={self.products!r}; use {', '.join(PRODUCTS)}")
        if self.products == "plain":
            return
        own = dict(overlap=False, ep_chunks=1, ep_travel="tokens", ep_shadow=0)
        for name, only in own.items():
            if getattr(self, name) != only:
                said = self._said((name, "products"), " with ")
                raise ValueError(f"{said}: it has products of its own; use {name}={only!r} or plain products")
        if self.products == "fp8_delayed" and self.first_loss_scale:
            why = "it remembers gradients of another factor"
            raise ValueError(f"products='fp8_delayed' with a scaled loss: {why}; use fp8_tensor, or bfloat16")

    def _check_scaled(self) -> None:
        """Tensors with one scale each are whole: nothing may cut them, nor copy them without their scale."""
        plain = dict(tp=1, ep=1, post_validation=False, loss_scale=0)
        others = [name for name, value in plain.items() if getattr(self, name) != value]
        others += ["zero"] * (self.zero not in (0, 1))
        if self.policy.scaled and others:
            cure = f"use {others[0]}={plain.get(others[0], '0 or 1')}"
            why = "a scale is of a whole tensor, and gradients have one of their own"
            raise ValueError(f"{self._said(('precision', others[0]), ' with ')}: {why}; {cure}")

    def _check_context(self) -> None:
        for name, table in (("core", cores.CORES), ("layout", cores.LAYOUTS)):
            if getattr(self, name) not in table:
                raise ValueError(f"{name}={getattr(self, name)!r}; use {', '.join(table)}")
        axes = cores.CORES[self.core].axes
        both = axes[-1] == "ulysses" and len(axes) > 1
        used = dict(ulysses=both, inner={"inside", "inner", "team"} & set(axes))
        for name, has in used.items():
            if getattr(self, name) > 1 and not has:
                said = self._said((name, "core"), " with ")
                raise ValueError(f"{said}, which has no such group; use {name}=1")
        if self.cp % (self.inner * self.ulysses):
            sizes = self._said(("inner", "ulysses"), " x ")
            raise ValueError(f"{sizes} does not divide cp={self.cp}; their product must")
        if self.cp > 1:
            self._check_core(heads=self.cp * self.cp)

    def _check_core(self, **widths: int) -> None:
        cores.check_choice(self.core, self.context_groups, self.layout, slices=self.slices, **widths)

    def check(self, config: GPTConfig, ranks: int) -> Strategy:
        """The strategy, if `config` can be trained with it on so many ranks."""
        if self.ranks != ranks:
            dp, rest = divmod(self.dp * ranks, self.ranks)
            cure = f"choose sizes whose product is {ranks}" if rest else f"dp={dp} would fit"
            said = f"{self._said(AXES, ' · ')} are {self.ranks} ranks, but the job has {ranks}"
            raise ValueError(f"{said}; {cure}")
        check_memory(self, config)
        if self.ep > 1 or config.experts:
            check_expert_parallel(config, self)
        if self.tp > 1:
            check_tensor_parallel(config, self.tp)
        if self.cp > 1:
            key_width = config.head_dim + config.rope_head_dim * bool(config.kv_latent)
            heads = config.num_heads // self.tp
            self._check_core(heads=heads, key_width=key_width, value_width=config.head_dim)
        if self.policy.scaled and self.zero and self.pp > 1 and config.tied:
            why = "the ends of the pipeline would deal the tied table out to different ranks"
            raise ValueError(f"{self._said(('precision', 'zero', 'pp'))} and a tied table: {why}; use zero=0")
        if self.pipelined:
            even(config.num_layers, stages_of(**self._schedule))
        return self

    def check_batch(self, config: GPTConfig, rows: int, length: int) -> None:
        """Rows of the global batch and tokens of a row."""
        least = self.dp * self.microbatches
        if rows < least:
            sizes = self._said(("dp", "microbatches"), " x ")
            raise ValueError(
                f"a batch of {rows} rows for {sizes}; use at least {least} rows, or fewer of these"
            )
        if length > config.max_positions:
            cure = "cut the sequence or raise max_positions"
            raise ValueError(f"sequence {length} > max_positions {config.max_positions}; {cure}")
        if length % self.pieces:
            sizes = self._said((name for name in ("cp", "tp", "slices") if getattr(self, name) > 1), " · ")
            pieces = f"{self.pieces} pieces ({sizes}, layout={self.layout!r})"
            longer = length + -length % self.pieces
            raise ValueError(f"T={length} is not a multiple of {pieces}; pad the sequence to {longer}")
        if self.slices > length:
            raise ValueError(f"slices={self.slices} of {length} tokens; use at most {length}")
