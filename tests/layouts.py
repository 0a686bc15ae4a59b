"""Random layouts: any strategy that `check` lets through trains as one process does, and its dry run is its
real run to the byte.

    python -m tests.layouts --draws 500 --seed 7          as many as you like; a draw is its number: --seed 7 --only 123 runs one again
    python -m tests.layouts --pretend                     dry, on a device that is not there: where a tensor of the host meets one of it, it raises
    python -m tests.layouts --draws 10 --gpu              ranks have a GPU each, or share them; to 1e-10, and of accounts the bytes sent alone

A draw is a model (heads 6 with 2 or 6 K/V heads, a vocabulary of 101, odd sizes, tied or not, frozen
parameters, dropout), a strategy of 1 to 8 ranks and two steps (uneven batches, targets masked unevenly, one
rank's rows masked altogether, clipping, an optimizer with weight decay by group). One process trains it with
torch's optimizer and clipping and nothing of minitrain's but the model and the places of its dropout.
Compared are every loss, each gradient and each parameter after two steps, to 1e-12 (in bfloat16 and float16
the losses to 2 %, and the ranks' weights bit by bit, as of products whose scales are a microbatch's, and of
compressed sums), and of every rank's account FLOPs, bytes by operation and axis, and the peak by kind of the first step, exactly. After the two steps a text is written from a cache of keys and values, each of its logits as without, and the run is saved, each element by one rank, and loaded by another strategy for the same model (`other_strategy`), whose whole state must have the same bits. A new technique
adds its column here: a field to draw, a word in FEATURES.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache, partial
from itertools import combinations_with_replacement, permutations
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

from minitrain import collectives, launch
from minitrain.attention.placed import Places, drop_by_place
from minitrain.compose.cached_run import cached
from minitrain.compose.parallelize import parallelize
from minitrain.compose.passes import multiply_in, roll_scales
from minitrain.compose.run import Run, saved_buffers
from minitrain.context.core_names import CORES
from minitrain.data_parallel import states
from minitrain.model.config import FIXED, ROUTERS, ExpertsConfig, GPTConfig
from minitrain.model.data.batches import MASKED, Rows, random_tokens, rows_of
from minitrain.model.gpt import GPT, cross_entropy_sum, generate
from minitrain.model.layers import naive_attention
from minitrain.model.mixture import RouterLosses, move_biases
from minitrain.model.training.optim import AdamW
from minitrain.pipeline.schedules_by_name import CHUNKED, NAMES, SLICED
from minitrain.plan.strategy import AXES, PARO_SHARDINGS, Strategy
from minitrain.precision.policies import POLICIES, PRODUCTS
from minitrain.ranks.events import DIRECTIONS
from minitrain.ranks.launch import dryrun
from minitrain.ranks.ledger import Ledger
from tests.pretend import PRETENDED, pretended
from tests.saving import (
    Checkpoint,
    bits,
    check_layout,
    load,
    save,
    state_of,
    wrong_cover,
    wrong_holders,
    wrong_shares,
)

TOLERANCE, ON_A_GPU, STEPS, SEED = 1e-12, 1e-10, 2, 3
PLAIN_GRADS = ("plain", "bitnet", "bitnet_b158")
EXACT = (*PLAIN_GRADS, "fp8_delayed", "hfp8")  # products whose scales no layout changes
UNSCALED = ("hfp8", "fp8_wang")  # products that a loss times 2^20 overflows
ROUNDING = 0.02  # how far a loss may be from float64's with 8 bits of mantissa
RECOMPUTED = (  # words of memory/recompute_policies.py, each result once
    *("full", "full", "selective", "keep:core", "keep:core", "every:2", "sqrt", "revolve:1", "revolve:2"),
    *("keep:qkv+out+experts", "keep:norm1+latents+up+down", "keep:norm2+act"),
    *("drop:act+norm1", "drop:core+norm2", "drop:qkv+out+up+experts", "drop:latents+qkv+core+down"),
    *("full,none", "none,full", "selective,keep:core+act", "drop:act+core,full"),
)
COMPRESSED = ("topk:0.2", "randomk:0.3", "cocktail:0.1", "int8", "thc:4", "powersgd:2")
MODEST_SCALE, LARGE_SCALE = 2.0**20, 2.0**513  # with the second, squares of gradients may overflow float64


@dataclass(frozen=True)
class Draw:
    """One case; everything else follows from its values."""

    config: GPTConfig
    strategy: Strategy
    batch_sizes: tuple[int, ...]
    length: int
    clip: float | None
    frozen: tuple[str, ...]
    optimizer: str  # adamw, sgd
    masked: str  # none, ragged: other numbers per row, rows: those of the first rank altogether
    loss: str = "cross entropy"  # or own: one that wants whole rows of logits
    packed: int = 0  # rows are packed documents, this many at most; 0: a row is one text

    def rows(self, step: int) -> Rows:
        documents = partial(self.documents, step) if self.packed else None
        return Rows(partial(self.draw_rows, step), self.batch_sizes[step], self.length, documents)

    def documents(self, step: int, _: int, rank: int, ranks: int) -> list[list[int]]:
        """The lengths of those in each row, other ones in each."""
        lengths = []
        for row in rows_of(rank, ranks, self.batch_sizes[step]):
            chance = random.Random(f"{self.packed}/{step}/{row}")
            ends = sorted(chance.sample(range(1, self.length), chance.randrange(self.packed)))
            lengths.append([end - start for start, end in zip((0, *ends), (*ends, self.length))])
        return lengths

    def draw_rows(self, step: int, _: int, rank: int, ranks: int) -> tuple[Tensor, Tensor]:
        size = self.batch_sizes[step]
        tokens, targets = random_tokens(step, rank, ranks, size, self.length, self.config.vocab_size, seed=5)
        for target, row in zip(targets, rows_of(rank, ranks, size)):
            if self.masked != "none":
                target[self.length - (row * 3 + step) % self.length :] = MASKED
            if self.masked == "rows" and row in rows_of(0, self.strategy.dp, size) and self.strategy.dp > 1:
                target[:] = MASKED
        return tokens, targets

    @property
    def exact(self) -> bool:
        """Whether no layout changes more than the last bits. Of a K/V head that ranks of tp share each of them
        casts its own term of the gradient, and not the sum."""
        kind, shared = self.strategy.products, self.config.num_kv_heads % self.strategy.tp > 0
        if self.strategy.compress != "none":
            return False
        return not self.strategy.policy.narrow and (kind in PLAIN_GRADS or kind in EXACT and not shared)

    @property
    def numbers_decide(self) -> bool:
        """Whether what a rank sends depends on what a router says, or on how many rows another rank has."""
        if self.strategy.loss_scale > MODEST_SCALE:
            return True  # the first step may be left out
        if self.config.experts is None:
            return False
        cuts, visits = self.strategy.tp * self.strategy.cp * self.strategy.slices, self.config.experts.top_k
        counts = {self.config.experts_in(block + 1) for block in range(self.config.num_layers)} - {0}
        return (
            self.config.experts.router != "balanced"
            or self.batch_sizes[0] % (self.strategy.dp * self.strategy.microbatches) > 0
            or self.strategy.cp > 1  # positions are not in a row
            or cuts > 1
            and (self.length % cuts > 0 or any(self.length // cuts * visits % experts for experts in counts))
        )

    def make_optimizer(self, params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """Matrices decay, vectors do not; eps is so large that rounding near 0 is not magnified."""
        groups = [
            {"params": [p for p in params if (p.dim() >= 2) == decays], "weight_decay": 0.1 * decays}
            for decays in (True, False)
        ]
        groups = [group for group in groups if group["params"]]
        return (
            AdamW(groups, lr=1e-2, eps=1e-3)
            if self.optimizer == "adamw"
            else torch.optim.SGD(groups, lr=0.5, momentum=0.9)
        )


# ---- drawing ---------------------------------------------------------------------------------------------


def draw(number: int, seed: int) -> Draw:
    """Case `number`: the first of its random tries that no check refuses."""
    chance = random.Random(f"{seed}/{number}")
    while True:
        try:
            case = reordered(attempt(chance), random.Random(f"order of {seed}/{number}"))
            case = hosted(case, random.Random(f"host of {seed}/{number}"))
            return compressed(case, random.Random(f"compression of {seed}/{number}"))
        except ValueError:
            pass


def reordered(case: Draw, chance: random.Random) -> Draw:
    """Half of the draws with more than one axis have their ranks numbered in another order."""
    if chance.random() < 0.5 or sum(getattr(case.strategy, axis) > 1 for axis in AXES) < 2:
        return case
    orders = [order for order in permutations(AXES) if order.index("dp") < order.index("cp")]
    return replace(case, strategy=replace(case.strategy, order="-".join(chance.choice(orders[1:]))))


def hosted(case: Draw, chance: random.Random) -> Draw:
    """Two of three tied tables on both ends of a pipeline are updated on the host, which must wait for both."""
    s = case.strategy
    if not case.config.tied or s.pp == 1 or s.offloads or s.post_validation or s.policy.scaled:
        return case
    return case if chance.random() < 1 / 3 else replace(case, strategy=replace(s, offload="optimizer"))


def compressed(case: Draw, chance: random.Random) -> Draw:
    """A fifth of those whose gradients can be."""
    s = case.strategy
    if chance.random() > 0.2 or s.hybrid or s.policy.scaled or s.dp * s.cp == 1:
        return case
    return replace(case, strategy=replace(s, compress=chance.choice(COMPRESSED)))


def draw_axes(chance: random.Random) -> dict[str, int]:
    axes = dict.fromkeys(AXES, 1)
    for _ in range(chance.choice((1, 2, 2, 3, 3))):
        axis = chance.choice(tuple(axes))
        axes[axis] *= chance.choice((2, 2, 2, 3)) if axis != "cp" else 2
    if math.prod(axes[axis] for axis in AXES) > 8:
        raise ValueError("more than 8 ranks")
    return axes


def attempt(chance: random.Random) -> Draw:
    axes, config = draw_axes(chance), draw_config(chance)
    if config.experts and axes["dp"] * axes["cp"] > 1 and chance.random() < 0.8:
        splits = [n for n in range(2, 9) if axes["dp"] * axes["cp"] % n == 0]
        axes["ep"] = chance.choice(splits[-1:] + splits)
        nodes = [n for n in range(2, axes["ep"]) if axes["ep"] % n == 0]
        flat, levels = ["flat"] * (1 + 7 * (axes["pp"] > 1)), ["two levels"] * 16 * bool(nodes)
        way = chance.choice((*flat, "chunks", "experts", "cheaper", *levels))
        if nodes and way in ("two levels", "experts"):
            axes["ep_node"] = chance.choice(nodes)
        if way in ("experts", "cheaper"):
            axes |= dict(ep_travel=way)
        elif axes["ep"] > 1 and chance.random() < 0.4:
            axes |= dict(ep_shadow=chance.choice((1, 2, config.experts.num_experts)))
        if way == "chunks" or way in ("cheaper", "two levels") and chance.random() < 0.3:
            axes |= dict(ep_chunks=3)
        if "ep_shadow" in axes or way == "cheaper":  # experts so narrow that it pays now and then
            width = chance.choice((1, 2, 4)) * axes["tp"]
            config = replace(config, experts=replace(config.experts, expert_width=width))
    even = (
        axes.get("ep", 1) > 1 and axes["cp"] == 1 and chance.random() < 0.4
    )  # a dry run knows who goes where
    if even:
        plain = dict(router="balanced", bias_speed=0.0, route_nodes=1, node_limit=0, route_scale=1.0)
        config = replace(config, experts=replace(config.experts, **plain))
    strategy = draw_strategy(chance, axes)
    strategy.check(config, strategy.ranks)
    length = chance.choice((8, 9, 12, 15, 16, 24))
    length = -(-length // strategy.pieces) * strategy.pieces
    least = strategy.dp * strategy.microbatches
    batch_sizes = tuple(least + chance.choice((0, 0, 1, 3)) for _ in range(STEPS))
    batch_sizes = (least, *batch_sizes[1:]) if even else batch_sizes
    for size in batch_sizes:
        strategy.check_batch(config, size, length)
    return Draw(
        config,
        strategy,
        batch_sizes,
        length,
        chance.choice((None, 0.3, 100.0)),
        draw_frozen(chance, config),
        "adamw"
        if strategy.policy.narrow or strategy.loss_scale
        else chance.choice(("adamw", "adamw", "sgd")),
        chance.choice(("none", "ragged", "ragged", "rows")),
        chance.choice(("cross entropy", "cross entropy", "own")),
        chance.choice((0, 0, 2, 5)),
    )


def draw_config(chance: random.Random) -> GPTConfig:
    heads, latent = chance.choice((4, 6, 6)), chance.random() < 0.08
    positions = "rope" if latent else chance.choice(("rope", "rope", "learned", "alibi", "none"))
    return GPTConfig(
        vocab_size=chance.choice((29, 32, 101)), num_heads=heads, d_model=heads * 4, head_dim=4,
        num_kv_heads=heads if latent else chance.choice({4: (1, 2, 4), 6: (2, 6, 3)}[heads]),
        num_layers=chance.choice((2, 2, 3, 4)), d_ff=chance.choice((24, 36, 48)), max_positions=48,
        positions=positions, norm=chance.choice(("rms", "layer")),
        activation=chance.choice(("swiglu", "gelu", "geglu")),
        residual=chance.choice(("pre", "pre", "parallel", "post", "deepnorm")), bias=chance.random() < 0.4,
        tied=chance.random() < 0.5, embedding_norm=chance.random() < 0.2,
        dropout=chance.choice((0.0, 0.0, 0.2)),
        experts=draw_experts(chance) if chance.random() < 0.35 else None,
        **(dict(kv_latent=8, rope_head_dim=2) if latent else {}),
    )  # fmt: skip


def draw_experts(chance: random.Random) -> ExpertsConfig:
    router = chance.choice((*ROUTERS, "top_k", "deepseek", "balanced"))
    values = dict(num_experts=chance.choice((4, 8, 6)), top_k=FIXED.get(router) or chance.choice((1, 2, 3)))
    values |= dict(
        router=router, expert_width=chance.choice((None, 12)), shared_experts=chance.choice((0, 0, 1))
    )
    values |= dict(expert_every=chance.choice((1, 1, 2)), dense_first=chance.choice((0, 0, 1)))
    values |= dict(capacity_factor=chance.choice((0.0, 0.0, 0.75, 1.5)))
    values |= dict(balance_alpha=chance.choice((0.0, 0.05)), z_alpha=chance.choice((0.0, 0.01)))
    if chance.random() < 0.2:
        values |= dict(pyramid_layers=1, pyramid_experts=2 * values["num_experts"])
    if router == "deepseek":
        limit = chance.choice([limit for limit in (1, 2) if values["top_k"] % limit == 0])
        values |= dict(
            bias_speed=0.02, route_nodes=2, node_limit=limit, route_scale=chance.choice((1.0, 2.5))
        )
    return ExpertsConfig(**values)


def draw_strategy(chance: random.Random, axes: dict[str, int]) -> Strategy:
    values = dict(axes, precision="float64", bucket_bytes=chance.choice((1_000, 3_000, 25_000_000)))
    values["zero"] = chance.choice((0, 0, 1, 2, 3, chance.choice(PARO_SHARDINGS)))
    if isinstance(values["zero"], str):
        values["node"] = chance.choice([n for n in range(1, axes["dp"] + 1) if axes["dp"] % n == 0])
        nodes = axes["dp"] // values["node"]
        values["nodes"] = chance.choice([n for n in range(1, nodes + 1) if nodes % n == 0])
    values["microbatches"] = chance.choice((1, 2, 3)) if axes["pp"] == 1 else chance.choice((1, 2, 3, 4, 6))
    if axes["tp"] > 1:
        values |= dict(sequence_parallel=chance.random() < 0.5, overlap=chance.random() < 0.4)
    if axes["pp"] > 1 or chance.random() < 0.1:
        values["schedule"] = chance.choice(NAMES)
        if axes["pp"] > 1 and axes.get("ep", 1) > 1 and chance.random() < 0.8:
            values["schedule"] = chance.choice(("dualpipe", "dualpipe_v"))
            values["microbatches"] = 2 * axes["pp"]
        if chance.random() < 0.2 or axes["pp"] == 1:
            values["recompute"] = "stage"
        values["post_validation"] = axes["pp"] > 1 and chance.random() < 0.15
        if values["schedule"] in CHUNKED:
            values["chunks"] = chance.choice((1, 2))
        if values["schedule"] in SLICED:
            values["slices"] = chance.choice((2, 3))
    if chance.random() < 0.2 and not values.get("post_validation"):
        values |= dict(loss_scale=chance.choice((MODEST_SCALE, LARGE_SCALE)), loss_scale_window=1)
    elif chance.random() < 0.15:
        values["precision"] = chance.choice([name for name, policy in POLICIES.items() if policy.narrow])
        if axes["tp"] == axes.get("ep", 1) == 1 and chance.random() < 0.4:  # else nearly all are refused
            values |= dict(
                precision="fp8_lm", zero=chance.choice((0, 1)), node=1, nodes=1, post_validation=False
            )
    others = dict(overlap=False, ep_chunks=1, ep_travel="tokens", ep_shadow=0)  # have products of their own
    if chance.random() < 0.2 and all(values.get(name, only) == only for name, only in others.items()):
        scaled = values.get("loss_scale") or POLICIES[values["precision"]].scales
        names = [name for name in PRODUCTS if name not in ("plain", *UNSCALED * bool(scaled))]
        values["products"] = chance.choice(["fp8_delayed"] * len(names) + names)
    if chance.random() < 0.3:
        words = [word for word in ("optimizer", "activations") if chance.random() < 0.7]
        if values["zero"] == 3 and words[:1] == ["optimizer"] and chance.random() < 0.6:
            words.append("parameters")
        values["offload"] = "+".join(words) or "none"
        values["delayed_update"] = words[:1] == ["optimizer"] and chance.random() < 0.3
    if axes["cp"] > 1:
        core = chance.choice(tuple(CORES))
        values |= dict(core=core, layout=chance.choice(CORES[core].layouts))
        for axis in CORES[core].axes[1:]:
            values["ulysses" if axis == "ulysses" else "inner"] = chance.choice(
                [n for n in (1, 2, 4) if axes["cp"] % n == 0]
            )
    if "recompute" not in values and chance.random() < 0.5:
        values["recompute"] = chance.choice(RECOMPUTED)
        values["recompute_partition"] = axes["tp"] > 1 and chance.random() < 0.4
    return Strategy(**values)


@cache
def other_strategy(case: Draw) -> Strategy:
    """Another one for the same model, on any number of ranks; the numbers are kept in as many bits."""
    chance, mine = random.Random(f"other than {case!r}"), case.strategy
    kept = dict(precision=mine.precision, products=mine.products)
    kept |= dict(loss_scale=mine.loss_scale, loss_scale_window=mine.loss_scale_window)
    for _ in range(30):
        try:
            axes = draw_axes(chance)
            if case.config.experts:
                axes["ep"] = chance.choice((1, axes["dp"] * axes["cp"]))
            other = replace(draw_strategy(chance, axes), **kept)
            if mine.compress != "none" and chance.random() < 0.8:
                other = replace(other, compress=mine.compress)
            return other.check(case.config, other.ranks)
        except ValueError:
            pass
    return Strategy(**kept)


def draw_frozen(chance: random.Random, config: GPTConfig) -> tuple[str, ...]:
    layer = chance.randrange(1, config.num_layers + 1)
    return chance.choice(
        (
            (),
            (),
            (f"layers.{layer}.norm1.weight",),
            ("layers.0.tokens",),
            (f"layers.{layer}.*",),
            (f"layers.{layer}.mlp.*", "layers.0.*"),
        )  # fmt: skip
    )


def own_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Label smoothing, and a price on the largest logit."""
    counts, rows = targets != MASKED, logits.to(torch.promote_types(logits.dtype, torch.float32))
    smooth = dict(ignore_index=MASKED, reduction="sum", label_smoothing=0.1)
    loss = torch.nn.functional.cross_entropy(rows.flatten(0, -2), targets.flatten(), **smooth)
    return loss + 0.01 * (rows.amax(-1) * counts).sum()


LOSSES = {"cross entropy": cross_entropy_sum, "own": own_loss}


# ---- one process -----------------------------------------------------------------------------------------


@dataclass
class Outcome:
    losses: list[float]
    grads: dict[str, Tensor]
    params: dict[str, Tensor]


def one_process(case: Draw) -> Outcome:
    """Whole batches, one backward each, torch's optimizer and clipping."""
    model = GPT(case.config, seed=SEED, dtype=torch.float64)
    places, rows = Places(SEED), PackedRows()
    if case.packed:
        rows.mask(model)
    drop_by_place(model.layers, places)
    multiply_in(model, Strategy(products=case.strategy.products), None)
    for name, param in model.named_parameters():
        param.requires_grad_(not matches(name, case))
    trainable = {name: param for name, param in model.named_parameters() if param.requires_grad}
    optimizer = as_torch_has_it(case.make_optimizer(list(trainable.values())))
    totals, losses, factor = [], RouterLosses({0: model.layers}), case.strategy.first_loss_scale or 1.0
    for step in range(STEPS):
        places.at(step, 0)
        rows.lengths = case.documents(step, 0, 0, 1) if case.packed else None
        tokens, targets = case.draw_rows(step, 0, 0, 1)
        optimizer.zero_grad()
        loss, valid = LOSSES[case.loss](model(tokens), targets), (targets != MASKED).sum()
        if (more := losses.collect()) is not None:
            loss = loss + more * valid.double() / targets.numel()
        loss = loss / valid
        loss.backward()
        squares = sum(param.grad.square().sum() for param in trainable.values())
        updated = factor == 1 or bool((squares * factor * factor).isfinite())
        if case.clip:
            torch.nn.utils.clip_grad_norm_(trainable.values(), case.clip)
        if updated:
            optimizer.step()
        factor *= 1 if factor == 1 else 2 if updated else 0.5
        move_biases(model.layers, lambda layer: (), move=updated)
        roll_scales(model.layers, None)
        totals.append(loss.item())
    return Outcome(
        totals,
        {name: param.grad * updated for name, param in trainable.items()},
        {name: param.detach() for name, param in model.named_parameters()} | saved_buffers(model.layers),
    )


class PackedRows:
    """Documents by their numbers: a mask over whole matrices of scores, and positions that begin anew."""

    def mask(self, model: GPT) -> None:
        model.hooks.in_document = lambda positions: torch.tensor(
            [[place for length in row for place in range(length)] for row in self.lengths]
        )
        for layer in model.layers:
            if hasattr(layer, "attention"):
                layer.attention.core = self.attend

    def attend(self, q, k, v, bias=None, dropout=0.0) -> Tensor:
        numbers = torch.tensor(
            [[number for number, length in enumerate(row) for _ in range(length)] for row in self.lengths]
        )
        apart = numbers[:, None, :, None] != numbers[:, None, None, :]
        apart = q.new_zeros(apart.shape).masked_fill(apart, -math.inf)
        return naive_attention(q, k, v, bias=apart + (bias.full(q) if bias else 0), dropout=dropout)


def matches(name: str, case: Draw) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in case.frozen)


def as_torch_has_it(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    if not isinstance(optimizer, AdamW):
        return optimizer
    return torch.optim.AdamW(
        [
            {"params": group["params"], "weight_decay": group["weight_decay"]}
            for group in optimizer.param_groups
        ],
        lr=1e-2,
        eps=1e-3,
    )


# ---- on ranks, real and dry ------------------------------------------------------------------------------


def begin(case: Draw, lent: dict | None = None, device: torch.device | None = None):
    """The run, the loss of its first step, and the account of building it and of that step."""
    torch.manual_seed(1000 + collectives.world().rank())  # ranks seeded apart: nothing may depend on it
    with Ledger() as ledger:
        run = parallelize(
            case.config, case.strategy, case.make_optimizer, seed=SEED, frozen=case.frozen,
            loss_fn=LOSSES[case.loss], device=device,
        )  # fmt: skip
        if lent:
            run.runner.lent.update(lent)
        loss = step_of(case, run, 0)
    calls = sorted({(call.op, call.axis) for call in ledger._matching(None, None)})
    account = {
        "FLOPs": ledger.flops,
        "peak": ledger.peak_by_kind,
        "host": (ledger.host_peak_bytes, ledger.host_by_kind),
        "copied": {one: ledger.copied_bytes(one) for one in DIRECTIONS},
        "bytes": {
            call: (ledger.num_calls(*call), ledger.sent_bytes(*call), ledger.payload_bytes(*call))
            for call in calls
        },
    }
    return run, loss, account


def step_of(case: Draw, run: Run, step: int) -> Tensor:
    result = run.step(run.batch(case.rows(step), step), case.clip)
    grads = [states.grad_of(run.sync, one) for one in run.sync.shards if run.scale]
    for grad in (grad for grad in grads if grad is not None):  # as an optimizer has them
        if result.updated:
            grad /= run.sync.param_groups[0]["grad_scale"]
        else:
            grad.zero_()
    return run.total(result.loss)


def on_rank(case: Draw) -> tuple[Outcome, dict]:
    run, loss, account = begin(case)
    losses = [loss, *(step_of(case, run, step) for step in range(1, STEPS))]
    run.settle()
    grads, params = states.full_grads(run.sync), run.state_dict()["parameters"]
    return Outcome([loss.item() for loss in losses], grads, params), account


def on_rank_saved(case: Draw, folder: Path) -> tuple:
    """As `on_rank`; then what it has written, what it says of its pieces, and the whole state."""
    run, loss, account = begin(case)
    losses = [loss, *(step_of(case, run, step) for step in range(1, STEPS))]
    run.settle()
    grads, state = states.full_grads(run.sync), run.state_dict()
    outcome = Outcome([loss.item() for loss in losses], grads, state["parameters"])
    far = cache_distance(run, case)
    return outcome, account, far, save(run, folder), check_layout(run), state_of(run)


def cache_distance(run: Run, case: Draw) -> float:
    """How far logits from a cache are from those without; products in few bits are rounded otherwise."""
    if case.strategy.policy.narrow or case.strategy.products != "plain":
        return 0.0
    length = random.Random(f"text of {case!r}").choice((1, 2, 5, 9))
    prompt = random_tokens(0, 0, 1, 2, length, case.config.vocab_size, seed=8)[0].to(run.device)

    def written(logits) -> Tensor:
        seen = []
        generate(run, prompt, 4, temperature=0, logits=lambda tokens: seen.append(logits(tokens)) or seen[-1])
        return torch.cat([logits[:, -1] for logits in seen])

    with cached(run, 3) as logits:
        found = written(logits)
    return (found - written(run)).abs().max().item()


def loaded_on_rank(case: Draw, other: Strategy, checkpoint: Checkpoint, state: dict[str, Tensor]) -> str:
    """What is not as it was saved."""
    run = parallelize(case.config, other, case.make_optimizer, seed=SEED + 1, frozen=case.frozen)
    lost, found = load(run, checkpoint), state_of(run)
    if found.keys() != state.keys():
        return f"{sorted(found.keys() ^ state.keys())[:3]} on one side only"
    if [what for what in lost if not what.startswith(("random", "residuals"))]:
        return f"{lost}"
    wrong = [name for name in state if not torch.equal(bits(found[name].cpu()), bits(state[name]))]
    return f"{wrong[:3]} have other bits" if wrong else ""


def wrong_checkpoint(case: Draw, folder: Path, written, told, state) -> str:
    """Nothing, or what is wrong about what was saved, or with loading it."""
    held, shares = zip(*told)
    wrong = wrong_holders(held) + wrong_shares(held, shares) + wrong_cover(shares)
    if wrong:
        return f"saved: {wrong[0]}"
    other, checkpoint = other_strategy(case), Checkpoint(folder, tuple(written))
    found = launch.run(loaded_on_rank, case, other, checkpoint, state, ranks=other.ranks, timeout_s=120)
    return f"{other} loads it and {max(found)}" if any(found) else ""


@cache
def dry_account(case: Draw, rank: int) -> dict:
    """Of one rank."""
    lent = lent_in(case)
    return dryrun.run(lambda: begin(case, lent)[2], rank=rank, ranks=case.strategy.ranks)


def account_on_a_device(case: Draw, rank: int) -> tuple[dict, bool]:
    """The same on a device that is not there (`tests.pretend`), where whatever meets a tensor of the host
    raises; and whether torch's fused attention ran, which has another kernel there."""
    lent, attend = lent_in(case), torch.nn.functional.scaled_dot_product_attention
    with patch.object(torch.nn.functional, "scaled_dot_product_attention", wraps=attend) as fused:
        account = dryrun.run(
            lambda: begin(case, lent, torch.device(PRETENDED))[2], rank=rank, ranks=case.strategy.ranks
        )
    return account, fused.called


def can_be_pretended(case: Draw) -> bool:
    """It has a dry run, and no parameter changes places (as CUDA's may, and fake tensors may not)."""
    s = case.strategy
    return not (case.numbers_decide or s.post_validation or "parameters" in s.offloads)


def pretended_verdict(case: Draw, rank: int) -> str:
    """Nothing, or what is wrong on a pretended device: bytes and FLOPs are those of a CPU, and memory but for
    the small tables that are made on the host and copied."""
    if not can_be_pretended(case):
        return ""
    (there, fused), here = pretended(account_on_a_device, case, rank), dry_account(case, rank)
    for what in ["bytes"] if fused else ["bytes", "FLOPs", "host", "copied"]:
        if there[what] != here[what]:
            return f"rank {rank}: {what} of a CPU {here[what]}, of a device {there[what]}"
    far = sum(there["peak"].values()) / sum(here["peak"].values())
    return (
        "" if fused or 1 <= far < 1.05 else f"rank {rank}: peak {here['peak']}, on a device {there['peak']}"
    )


@cache
def lent_in(case: Draw) -> dict:
    """A host of BPipe's learns how much is lent from a dry run of who lends."""
    ranks, lent = case.strategy.ranks, {}
    if case.strategy.pipelined and case.strategy.build_schedule().evicts:
        for lender in range(ranks):
            lent |= dryrun.run(lambda: dict(begin(case, dict(lent))[0].runner.lent), rank=lender, ranks=ranks)
    return lent


def distance(outcome: Outcome, reference: Outcome) -> float:
    """Of a rank's outcome: it has the gradients of its own layers."""
    assert (
        outcome.grads.keys() <= reference.grads.keys() and outcome.params.keys() == reference.params.keys()
    ), "other parameters"
    pairs = [(outcome.grads[name], reference.grads[name]) for name in outcome.grads]
    pairs += [(outcome.params[name], reference.params[name]) for name in reference.params]
    pairs.append(tuple(torch.tensor(one.losses, dtype=torch.float64) for one in (outcome, reference)))
    return max(
        (ours - theirs).abs().max().nan_to_num(float("inf")).item()
        if ours.shape == theirs.shape
        else float("inf")
        for ours, theirs in pairs
    )


def verdict(case: Draw, every_rank: bool = False, gpu: bool = False) -> str:
    """Nothing, or what is wrong. The dry run is compared on two ranks, or on all."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        saved = launch.run(on_rank_saved, case, folder, ranks=case.strategy.ranks, timeout_s=120)
        *results, far, written, told, states = zip(*saved)
        if wrong := compared(case, list(zip(*results)), every_rank, gpu):
            return wrong
        if not max(far) < (ON_A_GPU if gpu else TOLERANCE):
            return f"a text from a cache is {max(far):.1e} from one without"
        return wrong_checkpoint(case, folder, written, told, states[0])


def compared(case: Draw, results: list[tuple[Outcome, dict]], every_rank: bool, gpu: bool) -> str:
    reference, close = one_process(case), ON_A_GPU if gpu else TOLERANCE
    grads = set().union(*(outcome.grads for outcome, _ in results))
    if grads != reference.grads.keys():
        return f"gradients of {sorted(grads ^ reference.grads.keys())[:3]} on one side only"
    far = max(distance(outcome, reference) for outcome, _ in results)
    if not case.exact:
        (first, _), *others = results
        if any(
            not torch.equal(first.params[name], one.params[name])
            for one, _ in others
            for name in first.params
        ):
            return "ranks have other weights"
        far = max(abs(a - b) / b for a, b in zip(first.losses, reference.losses) if b) / ROUNDING * close
    if not far < close:
        return f"is {far:.1e} from one process"
    if case.strategy.post_validation or case.numbers_decide:  # asks for a number, which a dry run has not
        return ""
    some = (
        random.Random(repr(case)).sample(range(len(results)), min(2, len(results)))
        if not every_rank
        else range(len(results))
    )
    for rank in some:
        real, dry = results[rank][1], dry_account(case, rank)
        for what in ("bytes",) if gpu else real:  # kernels and memory are a GPU's own
            if real[what] != dry[what]:
                return f"rank {rank}: {what} real {differing(real[what], dry[what])}, dry {differing(dry[what], real[what])}"
    return ""


def differing(mine, other):
    if not isinstance(mine, dict):
        return mine
    return {key: value for key, value in mine.items() if other.get(key) != value}


# ---- what composes with what -----------------------------------------------------------------------------

FEATURES = {
    "dp": lambda s, c: s.dp > 1 and not s.zero,
    "ZeRO-1": lambda s, c: s.zero == 1,
    "ZeRO-2": lambda s, c: s.zero == 2,
    "ZeRO-3": lambda s, c: s.zero == 3,
    "hybrid": lambda s, c: s.hybrid and s.nodes == 1,
    "hybrid, groups of nodes": lambda s, c: s.nodes > 1,
    "tp": lambda s, c: s.tp > 1,
    "tp, sequence": lambda s, c: s.sequence_parallel,
    "tp, overlap": lambda s, c: s.overlap,
    "cp, rings": lambda s, c: (
        s.cp > 1
        and s.core in ("ring", "ring_self_attention", "balanced", "double_ring", "burst", "wallfacer")
    ),
    "cp, gathered": lambda s, c: s.cp > 1 and s.core == "gathered",
    "cp, heads": lambda s, c: s.cp > 1 and s.core in ("ulysses", "usp", "loongtrain"),
    "pp": lambda s, c: s.pp > 1 and not s.build_schedule().splits_backward,
    "pp, I and W": lambda s, c: s.pp > 1 and s.build_schedule().splits_backward,
    "pp, slices": lambda s, c: s.slices > 1,
    "another order": lambda s, c: s.order != Strategy().order,
    "experts": lambda s, c: c.config.experts is not None and s.ep == 1,
    "ep": lambda s, c: s.ep > 1 and s.ep_node in (1, s.ep),
    "ep, two levels": lambda s, c: 1 < s.ep_node < s.ep and s.ep_travel == "tokens",
    "ep, in chunks": lambda s, c: s.ep_chunks > 1,
    "ep, experts travel": lambda s, c: s.ep_travel == "experts",
    "low precision": lambda s, c: s.policy.narrow,
    "FP8, delayed": lambda s, c: s.products == "fp8_delayed",
    "other low products": lambda s, c: s.products not in EXACT,
    "rounded by chance": lambda s, c: s.policy.by_chance,
    "copies just in time": lambda s, c: s.policy.copies is not None,
    "scaled tensors": lambda s, c: s.policy.scaled,
    "scaled loss": lambda s, c: s.loss_scale > 0,
    "ep, the cheaper travels": lambda s, c: s.ep_travel == "cheaper",
    "ep, shadows": lambda s, c: s.ep_shadow > 0,
    "pairs overlap": lambda s, c: s.pp > 1 and s.hides_transfers(s.build_schedule()),
    "offload, optimizer": lambda s, c: "optimizer" in s.offloads,
    "offload, tied ends": lambda s, c: (
        c.config.tied and s.pp > 1 and "optimizer" in s.offloads and not matches("layers.0.tokens", c)
    ),
    "offload, parameters": lambda s, c: "parameters" in s.offloads,
    "offload, activations": lambda s, c: "activations" in s.offloads,
    "recompute": lambda s, c: s.recompute != "none",
    "kept results": lambda s, c: "keep" in s.recompute,
    "dropped results": lambda s, c: "drop" in s.recompute or "selective" in s.recompute,
    "segments of blocks": lambda s, c: s.recompute[:5] in ("every", "sqrt", "revol"),
    "inputs in parts": lambda s, c: s.recompute_partition,
    "late clipping": lambda s, c: s.post_validation,
    "compressed sums": lambda s, c: s.compress != "none",
    "microbatches": lambda s, c: s.microbatches > 1,
    "tied": lambda s, c: c.config.tied,
    "frozen": lambda s, c: bool(c.frozen),
    "dropout": lambda s, c: c.config.dropout > 0,
    "clipping": lambda s, c: c.clip is not None,
    "a loss of one's own": lambda s, c: c.loss == "own",
    "packed documents": lambda s, c: c.packed > 0,
    "ALiBi": lambda s, c: c.config.positions == "alibi",
    "GQA": lambda s, c: c.config.num_kv_heads < c.config.num_heads,
    "shared experts": lambda s, c: c.config.experts is not None and c.config.experts.shared_experts > 0,
    "capacity": lambda s, c: c.config.experts is not None and c.config.experts.capacity_factor > 0,
    "router losses": lambda s, c: (
        c.config.experts is not None and c.config.experts.balance_alpha + c.config.experts.z_alpha > 0
    ),
    "loaded on other ranks": lambda s, c: other_strategy(c).ranks != s.ranks,
    "loaded on as many": lambda s, c: other_strategy(c).ranks == s.ranks > 1,
    "bias without a loss": lambda s, c: c.config.experts is not None and c.config.experts.bias_speed > 0,
}


def features(case: Draw) -> list[str]:
    return [name for name, has in FEATURES.items() if has(case.strategy, case)]


def together(case: Draw) -> Counter:
    """Pairs of a draw's features, each with itself too."""
    return Counter(combinations_with_replacement(sorted(features(case)), 2))


def table(pairs: Counter) -> str:
    """How many draws had both, as Markdown."""
    columns = list(FEATURES)[: list(FEATURES).index("experts")]
    lines = [" | ".join(["", *columns]), " | ".join(["---"] * (len(columns) + 1))]
    for row in FEATURES:
        counts = [pairs[tuple(sorted((row, column)))] for column in columns]
        lines.append(" | ".join([row, *(str(count or "") for count in counts)]))
    return "\n".join(f"| {line} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Random layouts, each equal to one process.")
    parser.add_argument("--draws", type=int, default=24)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--first", type=int, default=0, help="number of the first draw")
    parser.add_argument("--only", type=int, help="number of one draw")
    parser.add_argument("--seconds", type=float, default=math.inf, help="after these no draw is begun")
    parser.add_argument(
        "--every-rank", action="store_true", help="compare the dry run of every rank, not of two"
    )
    parser.add_argument("--gpu", action="store_true", help="on GPUs; without it on the CPU, wherever it runs")
    parser.add_argument("--pretend", action="store_true", help="only dry, on a device that is not there")
    parser.add_argument("--table", action="store_true", help="what was drawn together, as Markdown")
    asked = parser.parse_args()
    torch.set_num_threads(1)  # models are tiny, and ranks want the cores
    if not asked.gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    numbers = [asked.only] if asked.only is not None else range(asked.first, asked.first + asked.draws)
    tried, failed, pairs, started = 0, 0, Counter(), time.monotonic()
    for number in numbers:
        if time.monotonic() - started > asked.seconds:
            break
        tried += 1
        case = draw(number, asked.seed)
        try:
            wrong = verdict(case, asked.every_rank, asked.gpu)
        except Exception as error:
            wrong = (
                traceback.format_exc()
                if asked.only is not None
                else f"{type(error).__name__}: {str(error).splitlines()[0]}"
            )
        if wrong:
            failed += 1
            print(f"draw {number}: {wrong}\n    {describe(case)}", flush=True)
        else:
            pairs += together(case)
    if asked.table:
        print(table(pairs))
    print(
        f"{tried - failed} of {tried} draws equal one process, seed {asked.seed}, {time.monotonic() - started:.0f} s"
    )
    sys.exit(bool(failed))


def describe(case: Draw) -> str:
    plain = GPTConfig()
    config = {name: value for name, value in vars(case.config).items() if value != getattr(plain, name)}
    others = {name: value for name, value in vars(case).items() if name not in ("config", "strategy")}
    return f"{case.strategy} GPTConfig({config}) {others}"


if __name__ == "__main__":
    main()
