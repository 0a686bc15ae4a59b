"""What one rank does for one microbatch, layer by layer, as plain values, counted by a dry run.

    work = work_of(config, strategy, microbatch, length)        made by minitrain/compose/dry_runs.py
    work.block.forward.operators     products, attention kernels and passes through memory, in order
    work.block.backward.collectives  what tp, cp and ep send: operation, axis, payload

A model is an embedding, L blocks and a head; a microbatch passes each once forward and once backward.
`weights` is the part of a backward that a schedule may put off (its action W), so `backward` less `weights`
is I. Bytes and FLOPs are those of this rank; memory follows from the same dry run as time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

LAYERS = ("embedding", "block", "dense", "head")


@dataclass(frozen=True, slots=True)
class Operator:
    """As the ledger saw it; `shape`: (batch, m, n, k) of a product, (B·H, Tq, Tk, K) of attention or ()."""

    name: str
    flops: int
    bytes: int  # read and written
    dtype: str
    shape: tuple[int, ...] = ()
    accumulates: bool = False  # adds a weight's gradient to what is there, or converts it for that

    attention = property(lambda self: self.flops > 0 and "attention" in self.name)  # a fused kernel of it


@dataclass(frozen=True, slots=True)
class Collective:
    """Something that travels. `members` are ranks of a world of dp · cp · tp, tp innermost; `overlapped`
    are the operators between its issue and its wait, by their places in the pass: none if it blocks."""

    op: str
    axis: str
    members: tuple[int, ...]
    payload_bytes: int
    overlapped: range = range(0)


@dataclass(frozen=True, eq=False)
class Pass:  # one way through one layer; equal only to itself: what is computed of it can be remembered by it
    operators: tuple[Operator, ...] = ()
    collectives: tuple[Collective, ...] = ()
    high_bytes: int = 0  # most alive meanwhile, beyond what was when it began

    def then(self, other: Pass) -> Pass:
        shift = len(self.operators)
        later = lambda places: range(places.start + shift, places.stop + shift)
        moved = (replace(one, overlapped=later(one.overlapped)) for one in other.collectives)
        high = max(self.high_bytes, other.high_bytes)
        return Pass(self.operators + other.operators, (*self.collectives, *moved), high)


@dataclass(frozen=True, eq=False)
class Layer:  # an embedding, a block or a head on one rank
    forward: Pass
    backward: Pass  # all of it: what selective recomputation runs again, input's and weights' gradients
    weights: Pass = Pass()  # the products of `backward` that wait for W where a schedule splits it
    saved_bytes: int = 0  # from forward to backward
    parameters: int = 0  # on this rank
    shared_parameters: int = 0  # of these, in a table that both ends of a tied model have
    waiting_bytes: int = 0  # from backward to W where a schedule splits it: what the products are made of


@dataclass(frozen=True, eq=False)
class Work:  # layers of one kind each; `dense` are the blocks of a mixture that have no experts
    embedding: Layer
    block: Layer
    head: Layer
    boundary_bytes: int  # of what a stage sends to the next, on this rank
    dense: Layer | None = None
    expert_parameters: int = 0  # of `block.parameters`, those dealt out over ep

    # in the order of LAYERS
    layers = property(lambda self: (self.embedding, self.block, self.dense or self.block, self.head))


WorkOf = Callable[..., Work]  # (config, strategy, microbatch, length, fused_attention=True) -> Work
