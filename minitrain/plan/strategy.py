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
from dataclasses import dataclass, fields

from minitrain.context import core_names as cores
from minitrain.model.config import GPTConfig
from minitrain.pipeline.schedule import Schedule
from minitrain.pipeline.schedules_by_name import named
from minitrain.plan.strategy_checks import check_alone, check_batch, check_model, said
from minitrain.precision.policies import FIRST_SCALE, POLICIES, Policy


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
        if isinstance(self.zero, str) and self.zero.isdigit():
            object.__setattr__(self, "zero", int(self.zero))  # as flags say it
        check_alone(self)

    def check(self, config: GPTConfig, ranks: int) -> Strategy:
        """The strategy, if `config` can be trained with it on so many ranks."""
        check_model(self, config, ranks)
        return self

    def check_batch(self, config: GPTConfig, rows: int, length: int) -> None:
        """Rows of the global batch and tokens of a row."""
        check_batch(self, config, rows, length)

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
        return named(**self.schedule_sizes)

    @property
    def schedule_sizes(self) -> dict:
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
        changed = [field.name for field in fields(self) if getattr(self, field.name) != field.default]
        return f"Strategy({said(self, changed)})"
