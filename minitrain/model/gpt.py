"""A GPT as a list of layers `(x, positions) -> x`; it knows nothing of ranks and groups.

    layer 0           token table (and learned positions)        tokens[B, T]  -> x[B, T, D]
    layers 1 .. L     blocks: attention and MLP                  x[B, T, D]    -> x[B, T, D]
    layer L+1         last norm and output table                 x[B, T, D]    -> logits[B, T, V]

A pipeline stage is a slice of that list (`GPT(config, layers=range(2, 4))`) whose parameters keep their
global names (`layers.3.mlp.up.weight`) and are filled from a seed made of that name and the run's seed: any
rank builds any slice equal to the reference, without a broadcast. A head that is tied to a token table on
another stage starts equal to it, and stays so if the two gradients are added.

Radford et al. 2019 (GPT-2), section 2.3: output projections start smaller by sqrt(2L); Black et al. 2022
(GPT-NeoX), arXiv:2204.06745, section 2: parallel residual; Wang et al. 2022 (DeepNorm), arXiv:2203.00555;
Zeng et al. 2022 (GLM-130B), arXiv:2210.02414, section 2.1. Differs: weights are drawn per name, on the CPU.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minitrain.model.config import GPTConfig, presets
from minitrain.model.data.batches import MASKED
from minitrain.model.layers import (
    MLP,
    Attention,
    Dropout,
    Hooks,
    LatentAttention,
    Linear,
    causal_attention,
    norm,
)
from minitrain.model.mixture import MixtureOfExperts
from minitrain.ranks.checks import require_ints, require_one_of, require_positive_ints

__all__ = ["GPT", "Block", "GPTConfig", "Stages", "cross_entropy_sum", "generate", "presets", "seed_of"]


class Embedding(nn.Module):
    """Layer 0: rows of the token table, plus learned positions, plus a norm where the model has them."""

    def __init__(self, config: GPTConfig, name: str, hooks: Hooks | None = None, **place):
        super().__init__()
        self.config, self.name, self.hooks = config, name, hooks or Hooks()
        self.tokens = nn.Parameter(torch.empty(config.vocab_size, config.d_model, **place))
        if config.positions == "learned":
            self.positions = nn.Parameter(torch.empty(config.max_positions, config.d_model, **place))
        self.norm = norm(config, **place) if config.embedding_norm else nn.Identity()
        self.dropout = Dropout(config.dropout)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        if tokens.is_floating_point() or tokens.dim() != 2:
            raise ValueError(f"tokens are {tokens.dtype} {list(tokens.shape)}; expected int64 [B, T]")
        if (length := tokens.size(1) - self.hooks.padding) > (most := self.config.max_positions):
            raise ValueError(f"sequence {length} > max_positions {most}; cut the one or raise the other")
        x = self.hooks.token_rows(self.tokens, tokens, "token", "vocab_size")
        if self.config.positions == "learned":
            ids = self.hooks.in_document(positions.clamp(max=most - 1) if self.hooks.padding else positions)
            x = x + self.hooks.position_rows(self.positions, ids, "position", "max_positions")
        return self.dropout(self.norm(x), positions)


class Block(nn.Module):
    """Attention and MLP around a residual stream, with the norms in one of four places.

    pre        x + f(norm(x))                            the usual one: the stream itself is never normed
    parallel   x + attention(norm1(x)) + mlp(norm2(x))   both at once: one all-reduce under tensor parallelism
    post       norm(x + f(x))                            the original; in deep models all tokens become alike
    deepnorm   norm(alpha·x + f(x))                      for depth: alpha = sqrt(2L), smaller weights"""

    def __init__(
        self, config: GPTConfig, name, attention=causal_attention, expert_part=(0, 1), hooks=None, **place
    ):
        super().__init__()
        self.config, self.name, self.hooks = config, name, hooks or Hooks()
        kind = LatentAttention if config.kv_latent else Attention
        self.norm1, self.attention = norm(config, **place), kind(config, attention, self.hooks, **place)
        self.norm2 = norm(config, **place)
        if experts := config.experts_in(int(name.split(".")[-1])):
            self.mlp = MixtureOfExperts(config, experts, expert_part[1], self.hooks, **place)
        else:
            self.mlp = MLP(config, hooks=self.hooks, **place)
        self.dropout1, self.dropout2 = Dropout(config.dropout), Dropout(config.dropout)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        if self.hooks.block is not None:
            return self.hooks.block(self, x, positions)

        def attention(x):
            return self.dropout1(self.attention(x, positions), positions)

        def mlp(x):
            return self.dropout2(self.mlp(x, positions), positions)

        norm1 = partial(self.hooks.result, "norm1", self.norm1)
        norm2 = partial(self.hooks.result, "norm2", self.norm2)
        kind = self.config.residual
        if kind == "pre":
            x = x + attention(norm1(x))
            return x + mlp(norm2(x))
        if kind == "parallel":
            return x + attention(norm1(x)) + mlp(norm2(x))
        alpha = deepnorm(self.config.num_layers)[0] if kind == "deepnorm" else 1.0
        x = norm1(alpha * x + attention(x))
        return norm2(alpha * x + mlp(x))


def deepnorm(num_layers: int) -> tuple[float, float]:
    """(alpha, beta) of GLM-130B: how much larger the residual is, how much smaller V, outputs, MLP start."""
    require_positive_ints(num_layers=num_layers)
    return math.sqrt(2 * num_layers), 1 / math.sqrt(2 * num_layers)


class Head(nn.Module):
    """Layer L+1: last norm (post-norm blocks have theirs already) and the scores of the whole vocabulary."""

    def __init__(self, config: GPTConfig, name: str, hooks: Hooks | None = None, **place):
        super().__init__()
        self.name, self.hooks = name, hooks or Hooks()
        self.norm = norm(config, **place) if config.residual in ("pre", "parallel") else nn.Identity()
        self.out = Linear(config.d_model, config.vocab_size, bias=False, **place)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return self.out(self.norm(x))


class Layers(nn.ModuleList):
    """Layers that start and stop anywhere: an index counts from the first, a name is the global number."""

    def __getitem__(self, index):
        return list(self)[index]


def one_by_one(layers: Iterable[nn.Module], x: Tensor, positions: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x, positions)
    return x


class GPT(nn.Module):
    """The model, or the slice `layers` of it (numbers from 0, the embedding, to L + 1, the head)."""

    def __init__(
        self,
        config: GPTConfig,
        *,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        attention: Callable = causal_attention,
        layers: Iterable[int] | None = None,
        expert_part: tuple[int, int] = (0, 1),
        hooks: Hooks | None = None,
    ):
        """`expert_part` (i, n): of every layer of experts the i-th n-th, from 0. `hooks`: of all layers."""
        super().__init__()
        require_one_of((torch.float32, torch.bfloat16, torch.float16, torch.float64), dtype=dtype)
        self.config, self.hooks, self.layers = config, hooks or Hooks(), Layers()
        self.run_layers: Callable = one_by_one  # or again for their backward (compose/passes.py)
        last, place = config.num_layers + 1, dict(dtype=dtype, device=device)
        for number in range(last + 1) if layers is None else layers:
            if not 0 <= number <= last:
                raise ValueError(f"layer {number}; this model has layers 0 (embedding) to {last} (head)")
            given = dict(config=config, name=f"layers.{number}", hooks=self.hooks, **place)
            if 0 < number < last:
                layer = Block(attention=attention, expert_part=expert_part, **given)
            else:
                layer = Head(**given) if number else Embedding(**given)
            self.layers.add_module(str(number), layer)
        share_table(config, self.layers)
        for name, parameter in self.named_parameters():
            initialise(parameter, name, config, seed, expert_part[0])

    def items(self) -> list[tuple[int, GPT]]:
        return [(0, self)]

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """tokens `[B, T]` -> logits `[B, T, V]`; a slice takes and gives what its first and last layer do."""
        if x.dim() < 2:
            raise ValueError(f"input is {list(x.shape)}; expected tokens [B, T], or x [B, T, D] of a stage")
        if positions is None:
            positions = torch.arange(x.size(1), device=x.device)
        return self.run_layers(self.layers, x, positions)


def share_table(config: GPTConfig, layers: Iterable[nn.Module]) -> None:
    """Both ends of a tied model, where they are on one rank, have one table."""
    here = {layer.name: layer for layer in layers}
    head = f"layers.{config.num_layers + 1}"
    if config.tied and {"layers.0", head} <= here.keys():
        here[head].out.weight = here["layers.0"].tokens


class Stages(nn.Module):
    """The slices of a model on one rank of a pipeline, by stage: `Stages(config, {1: range(2, 4)})`."""

    def __init__(self, config: GPTConfig, cuts: Mapping[int, Iterable[int]], hooks=None, **settings):
        super().__init__()
        self.config, self.head, self.hooks = config, f"layers.{config.num_layers + 1}", hooks or Hooks()
        for number, layers in cuts.items():
            self.add_module(str(number), GPT(config, layers=layers, hooks=self.hooks, **settings))
        share_table(config, self.layers)

    def items(self) -> list[tuple[int, GPT]]:
        return [(int(number), stage) for number, stage in self.named_children()]

    layers = property(lambda self: [layer for _, stage in self.items() for layer in stage.layers])

    def parts(self) -> list[dict[nn.Parameter, str]]:
        """Of each stage the parameters with global names (a tied table has its first); last those shared."""
        tied = {f"{self.head}.out.weight": "layers.0.tokens"} if self.config.tied else {}
        stages = [stage.named_parameters() for _, stage in self.items()]
        stages = [{param: tied.get(name, name) for name, param in stage} for stage in stages]
        times = Counter(param for stage in stages for param in stage)
        shared = {param: name for stage in stages for param, name in stage.items() if times[param] > 1}
        parts = [{param: name for param, name in stage.items() if param not in shared} for stage in stages]
        return [*parts, shared] if shared else parts


def seed_of(name: str, seed: int = 0) -> int:
    """63 bits that depend on every letter of the name; Python's own hash differs from process to process."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()) >> 1


@torch.no_grad()
def initialise(parameter: Tensor, name: str, config: GPTConfig, seed: int, part: int = 0):
    """Fills one parameter from its global name; of stacked experts, the part that is here, each from its own.
    A dry run does the same operators, for the same account."""
    fake = type(parameter) is not nn.Parameter
    if parameter.is_meta or (fake and not parameter.is_cpu):  # no memory; or a GPU that torch may not know
        return
    if parameter.dim() == 1:
        parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        return
    if config.tied and name == f"layers.{config.num_layers + 1}.out.weight":
        name = "layers.0.tokens"  # a stage with the head only: the same table
    each = [(name, parameter)]
    if parameter.dim() == 3:
        each = [(f"{name}.{i}", expert) for i, expert in enumerate(parameter, start=part * len(parameter))]
    for own_name, values in each:
        in_place = values.is_cpu and values.dtype == torch.float32
        drawn = values if in_place else torch.empty(values.shape, dtype=torch.float32)
        generator = torch.Generator().manual_seed(seed_of(own_name, seed))
        drawn.normal_(0.0, _std(name, values, config), generator=generator)
        if not in_place:
            values.copy_(drawn)


def _std(name: str, parameter: Tensor, config: GPTConfig) -> float:
    number, *_, module, last = int(name.split(".")[1]), *name.split(".")
    module = last if module == "experts" else module
    if not 1 <= number <= config.num_layers:
        return 0.02  # the tables
    if config.residual in ("post", "deepnorm"):  # Xavier, as in 2017
        small = config.residual == "deepnorm" and module in ("v", "v_up", "out", "up", "gate", "down")
        return (deepnorm(config.num_layers)[1] if small else 1.0) * math.sqrt(2 / sum(parameter.shape))
    return 0.02 / math.sqrt(2 * config.num_layers) if module in ("out", "down") else 0.02


def cross_entropy_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum of -log p(target) over the targets that count (not -100): `[B, T, V]`, `[B, T]` -> scalar. Not a
    mean: whoever knows how many tokens count on all ranks divides once. If every target is masked it is 0
    with zero gradients, for another rank may hold tokens that count."""
    logits = logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, targets.flatten(), ignore_index=MASKED, reduction="sum")


@torch.no_grad()
def generate(
    model: Callable, prompt: Tensor, n: int, temperature=1.0, seed=0, top_k=0, logits=None, same=None
) -> Tensor:
    """`[B, T]` tokens -> `[B, T + n]`, one at a time: the likeliest at temperature 0, else drawn, from the
    top_k likeliest or (0) all. `logits`, or the model, is given as many tokens as it has positions, the last
    ones, each time; `same(token)` is what all ranks go on with."""
    require_ints(n=n, seed=seed, top_k=top_k)
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature = {temperature}; use 0 (the likeliest token) or more")
    generator = torch.Generator(prompt.device).manual_seed(seed)
    tokens, training = prompt, model.training
    model.train(False)
    try:
        for _ in range(n):
            scores = (logits or model)(tokens[:, -model.config.max_positions :])[:, -1].float()
            if 0 < top_k < scores.size(-1):
                scores = scores.masked_fill(scores < scores.topk(top_k).values[:, -1:], -math.inf)
            if temperature == 0:
                token = scores.argmax(-1, keepdim=True)
            else:
                token = torch.multinomial(F.softmax(scores / temperature, -1), 1, generator=generator)
            token = same(token) if same else token
            tokens = torch.cat((tokens, token), dim=1)
    finally:
        model.train(training)
    return tokens
