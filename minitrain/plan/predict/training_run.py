"""A training run as plain values: model, layout, machine, batch, software.

    TrainingRun(presets["llama3-8b"], Strategy(dp=8, tp=8), machine("h100"), batch=64, length=8192)

Strategy says how work is dealt out, `Stack` how well a software overlaps and fuses it. `STACKS` names those
of published runs (systems/plan/published.py); "minitrain" is this code.
"""

from dataclasses import dataclass, replace

from minitrain.model.config import GPTConfig
from minitrain.plan.simulate.machines import Machine
from minitrain.plan.strategy import Strategy
from minitrain.ranks.checks import require_positive_ints


@dataclass(frozen=True)
class Stack:  # what a software makes of a layout; the defaults are Megatron-LM's of 2021
    name: str = "megatron-2021"
    fused: bool = True  # chains of elementwise operators are one pass through memory
    adds_in_products: bool = False  # products of weights' gradients add to those of microbatches before
    keeps_codes: bool = False  # low-bit codes of weights are made once per step, not in each microbatch
    flash: bool = False  # attention is one kernel; else scores are written out
    p2p_overlapped: bool = False  # a message between stages takes no time of its ranks
    scattered: bool = True  # where tp ranks have the same activations, each sends a part, gathered after it
    tp_overlapped: bool = False  # collectives of tp run beside products, in as many parts as tp has ranks
    dp_overlapped: bool = False  # gradients travel beside backward, weights beside forward
    whole_again: bool = True  # recomputation in full runs the whole block; else it stops where it can
    each_microbatch: bool = False  # ZeRO-2 scatters the gradients of each microbatch (ours), not their sum
    buckets_apart: bool = False  # gradients add up beside the buckets in which they travel (ours)
    expert_processors: int = 0  # multiprocessors for kernels that carry rows of experts; then in 8 bits there
    dp_inside_pp: bool = True  # ranks: tp, cp, dp, pp, innermost first; else tp, cp, pp, dp (ours)

    def __str__(self) -> str:
        hides = dict(dp=self.dp_overlapped, pp=self.p2p_overlapped, tp=self.tp_overlapped)
        overlapped = " and ".join(axis for axis in hides if hides[axis]) or "nothing"
        return f"{self.name} (overlaps {overlapped}; kernels {'fused' if self.fused else 'eager'})"


_MEGATRON = Stack()
_2023 = Stack("megatron-2023", flash=True, adds_in_products=True, keeps_codes=True)
_HIDDEN = dict(p2p_overlapped=True, dp_overlapped=True)
_OURS = Stack("minitrain", fused=False, flash=True, scattered=False, **_HIDDEN)
STACKS = {
    stack.name: stack
    for stack in (
        _MEGATRON,
        Stack("megatron-2021-overlapped", dp_overlapped=True),  # one stage: gradients beside backward
        Stack("megatron-2022", adds_in_products=True),
        Stack("megatron-deepspeed"),
        Stack("fairscale-2022"),
        _2023,
        replace(_2023, name="megascale", tp_overlapped=True, **_HIDDEN),
        replace(_2023, name="deepseek", expert_processors=20, **_HIDDEN),  # V3's report, section 3.2
        replace(_2023, name="overlapped", dp_inside_pp=False, **_HIDDEN),  # Llama 3's, and the planner's
        Stack("fsdp", fused=False, flash=True, each_microbatch=True, **_HIDDEN),  # PyTorch's, eager
        replace(_OURS, whole_again=False, each_microbatch=True, buckets_apart=True, dp_inside_pp=False),
    )
}


@dataclass(frozen=True)
class TrainingRun:
    """`batch` rows of `length` tokens per step, in the strategy's microbatches."""

    model: GPTConfig
    strategy: Strategy
    machine: Machine
    batch: int
    length: int
    stack: Stack = _MEGATRON
    name: str = ""

    def __post_init__(self) -> None:
        require_positive_ints(1 << 40, batch=self.batch, length=self.length)
        parts = self.strategy.dp * self.strategy.microbatches
        if self.batch % parts:
            sizes = f"dp x microbatches = {self.strategy.dp} x {self.strategy.microbatches}"
            raise ValueError(f"batch={self.batch} is not a multiple of {sizes}; use a multiple of {parts}")
        self.strategy.check(self.model, self.strategy.ranks)
        self.strategy.check_batch(self.model, self.batch, self.length)

    # rows that a rank runs at once
    microbatch = property(lambda self: self.batch // (self.strategy.dp * self.strategy.microbatches))
