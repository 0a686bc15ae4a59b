"""A mixture of experts in the place of an MLP: many experts, of which a token visits a few.

    scores[N, E] = x[N, D] · W_router        routing = router(scores)
    y_n = Σ_j weight_nj · expert_nj(x_n) + shared(x_n)
    up (and gate) [E, D, F], down [E, F, D]: parameters grow with E, arithmetic with top_k

On ranks (moe/dispatch.py) its `experts` are another module, two hooks say the rest. A token whose position is
negative is padding: it visits nobody. Capacity and the balance loss count per row of the batch, over the
ranks with its other tokens; in evaluation nobody is dropped. A forward leaves the router's terms of the loss
on its layer, who runs it collects them (`RouterLosses`). In a dry run every expert gets as many tokens.
Shazeer et al. 2017, arXiv:1701.06538, section 2; Jiang et al. 2024 (Mixtral), arXiv:2401.04088, section 2.1;
DeepSeek-AI 2024 (DeepSeek-V3), arXiv:2412.19437, section 2.1.2; Rajbhandari et al. 2022 (DeepSpeed-MoE),
arXiv:2201.05596, section 4.1. Differs: capacity and balance are of rows, so that no layout changes them.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from minitrain.model.config import GATED, GPTConfig
from minitrain.model.layers import ACTIVATIONS, MLP, Hooks, Linear
from minitrain.moe import router
from minitrain.moe.experts import grouped
from minitrain.moe.router import NOWHERE, Routing, without_numbers
from minitrain.ranks import collectives
from minitrain.ranks.torch_private import in_backward


class Router(nn.Module):
    """x [N, D] -> Routing. `bias` [E], of deepseek alone, is moved by `move_biases`, trained by nobody."""

    def __init__(self, config: GPTConfig, num_experts: int, **place):
        super().__init__()
        self.config, self.draws = config.experts, partial(torch.rand_like, dtype=torch.float64)
        self.weight = Linear(config.d_model, num_experts, bias=False, **place).weight
        if self.config.router == "deepseek":
            exact = torch.promote_types(self.weight.dtype, torch.float32)
            self.register_buffer("bias", torch.zeros(num_experts, **(place | dict(dtype=exact))))
        self.load: Tensor | int = 0  # [E] how many tokens chose each expert since the last step

    def scores(self, x: Tensor) -> Tensor:
        """In float32 at least: a few bits decide where a token goes."""
        exact = torch.promote_types(x.dtype, torch.float32)
        return nn.functional.linear(x.to(exact), self.weight.to(exact))

    def forward(self, scores: Tensor, positions: Tensor, mask: Tensor | None) -> Routing:
        """scores [N, E] of tokens at `positions` [B, T], N = B·T."""
        c = self.config
        if c.router == "balanced" or without_numbers(scores):
            return router.balanced(scores, c.top_k, positions, mask)
        match c.router:
            case "switch":
                return router.switch(scores, mask)
            case "gshard":
                draws = self.draws(positions) if self.training else torch.zeros_like(positions)
                return router.gshard(scores, draws.flatten(), mask)
            case "deepseek":
                limit = c.node_limit or c.route_nodes
                where = dict(nodes=c.route_nodes, node_limit=limit, scale=c.route_scale)
                return router.deepseek(scores, c.top_k, self.bias, mask, **where)
            case "expert_choice":
                return self.by_row(scores, len(positions), mask)
        return router.top_k(scores, c.top_k, mask)

    def by_row(self, scores: Tensor, rows: int, mask: Tensor | None) -> Routing:
        """Experts choose among the tokens of a row, as many in each."""
        tokens, experts = len(scores) // rows, scores.shape[1]
        mean, factor = (tokens, experts, self.config.top_k), self.config.capacity_factor or 1
        room = min(tokens, router.capacity_of(*mean, factor))
        masks = [None] * rows if mask is None else mask.chunk(rows)
        parts = [router.expert_choice(part, room, own) for part, own in zip(scores.chunk(rows), masks)]
        widest = max(part.experts.shape[1] for part in parts)

        pad = lambda x, missing: nn.functional.pad(x, (0, widest - x.shape[1]), value=missing)
        chosen = torch.cat([pad(part.experts, NOWHERE) for part in parts])
        weights = torch.cat([pad(part.weights, 0.0) for part in parts])
        return Routing(chosen, weights, torch.cat([part.probs for part in parts]))


class Experts(nn.Module):
    """The experts that are here, stacked: rows [R, D] sorted by expert, `counts` [E] of them -> [R, D]. How
    they are multiplied is `work`, a function or module like those of moe/experts.py."""

    def __init__(self, config: GPTConfig, num_experts: int, **place):
        super().__init__()
        self.act, self.work = ACTIVATIONS[config.activation], grouped
        make = lambda *widths: nn.Parameter(torch.empty(num_experts, *widths, **place))
        self.up = make(config.d_model, config.expert_width)
        self.gate = make(config.d_model, config.expert_width) if config.activation in GATED else None
        self.down = make(config.expert_width, config.d_model)

    def forward(self, rows: Tensor, counts: Tensor, sizes=None, work: Callable | None = None) -> Tensor:
        """`sizes`: the counts as numbers, in a dry run. `work`: another than the layer's."""
        return (work or self.work)(rows, counts, self.up, self.down, self.act, self.gate, sizes=sizes)


class MixtureOfExperts(nn.Module):
    """With experts over ranks, this one makes one of so many `parts`."""

    def __init__(self, config: GPTConfig, num_experts: int, parts: int = 1, hooks=None, **place):
        super().__init__()
        self.config, self.num_experts, self.hooks = config.experts, num_experts, hooks or Hooks()
        self.router = Router(config, num_experts, **place)
        self.experts = Experts(config, num_experts // parts, **place)
        width = config.experts.shared_experts * config.expert_width
        self.shared = MLP(config, width, self.hooks, **place) if width else None
        self.losses: Tensor | None = None  # the router's, of the last forward: a sum over tokens

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        tokens = self.hooks.tokens
        mine, at, padded = tokens.enter(x, positions)
        routing = self.route(mine, at, padded, x.shape[1] * tokens.row_ranks)
        routing = replace(routing, weights=routing.weights.to(x.dtype))

        def visit(x: Tensor, weights: Tensor) -> Tensor:
            return self.hooks.experts(x, replace(routing, weights=weights), self.experts)

        y = self.hooks.result("experts", visit, mine.flatten(0, 1), routing.weights)
        y = tokens.leave(y.view_as(mine), x.shape[1])
        return y if self.shared is None else y + self.shared(x)

    def route(self, x: Tensor, positions: Tensor, padded: bool, row_length: int) -> Routing:
        """Of x [B, T, D], this rank's tokens of rows of that length."""
        scores = self.router.scores(x.flatten(0, 1))
        may_be_padding = (padded or positions.dim() > 1) and not without_numbers(x)
        positions = positions.expand(x.shape[:2])
        mask = (positions >= 0).flatten() if may_be_padding else None
        routing = self.router(scores, positions, mask)
        c, row_choices, order = self.config, routing.experts.view(*x.shape[:2], -1), None
        if c.whole_rows:
            row_choices, order = self.whole_rows(row_choices, positions)
        self.collect(scores, routing, row_choices, mask)
        drops = c.router not in ("expert_choice", "balanced") and routing.sizes is None
        if c.capacity_factor and self.training and drops:
            room = router.capacity_of(row_length, self.num_experts, c.top_k, c.capacity_factor)
            places = self.places(row_choices, order, x.shape[1])
            routing = routing.within(room, places.flatten(0, 1))
        return routing

    def whole_rows(self, chosen: Tensor, positions: Tensor) -> tuple[Tensor, Tensor | None]:
        """The choices of all tokens [B, T, k] of the rows, as ranks have them, and the tokens' order."""
        group = self.hooks.tokens.row_group
        if group is None:
            return chosen, None
        at = collectives.all_gather(positions.contiguous(), group, 1)
        return collectives.all_gather(chosen, group, 1), at.argsort(stable=True, dim=1)

    def places(self, chosen: Tensor, order: Tensor | None, length: int) -> Tensor:
        """Among the tokens of its expert in its row, the place of each of this rank's choices."""
        if order is None:
            return router.places_of(chosen)
        order = order[..., None].expand_as(chosen)
        places = router.places_of(chosen.gather(1, order))
        places = torch.empty_like(places).scatter_(1, order, places)
        return places.narrow(1, self.hooks.tokens.row_group.rank() * length, length)

    def collect(self, scores: Tensor, routing: Routing, chosen: Tensor, mask: Tensor | None) -> None:
        """Losses and load of this rank's tokens: who chose whom, before anybody is dropped."""
        c, losses = self.config, None
        if c.balance_alpha:
            counts = router.counts_of(chosen.flatten(1), self.num_experts)
            probs = routing.probs.unflatten(0, (len(chosen), -1))
            losses = c.balance_alpha * router.balance_sum(probs, counts)
        if c.z_alpha:
            z_loss = c.z_alpha * router.z_sum(scores, mask)
            losses = z_loss if losses is None else losses + z_loss
        if in_backward():  # a second pass over tokens that have been counted
            return
        self.losses = losses
        if self.training and torch.is_grad_enabled():
            self.router.load = self.router.load + routing.counts


class RouterLosses:
    """Of layers by the stage that they are on: `collect(stage)` right after its forward. `tokens_over`: ranks
    (of tp) that share out the tokens of this one, and report one loss. They are means over all tokens, for
    all are routed, and the step divides by the valid ones: `weight` is what is between."""

    def __init__(self, layers: Mapping[int, Iterable[nn.Module]], tokens_over: ProcessGroup | None = None):
        self.routed = {stage: mixtures(layers) for stage, layers in layers.items()}
        self.tokens_over = tokens_over
        self.weight: Tensor | float = 1.0  # set a step: valid tokens / all tokens of the global batch

    def collect(self, stage: int = 0) -> Tensor | None:
        losses = [layer.losses for layer in self.routed[stage] if layer.losses is not None]
        for layer in self.routed[stage]:
            layer.losses = None
        if not losses:
            return None
        loss = torch.stack(losses).sum() * self.weight
        return loss if self.tokens_over is None else collectives.reduce_from(loss, self.tokens_over)

    def forget(self) -> None:
        """The forwards since the last step are done again."""
        for layers in self.routed.values():
            for layer in layers:
                layer.router.load, layer.losses = 0, None


def mixtures(layers: Iterable[nn.Module]) -> list[MixtureOfExperts]:
    mlps = (getattr(layer, "mlp", None) for layer in layers)
    return [mlp for mlp in mlps if isinstance(mlp, MixtureOfExperts)]


@torch.no_grad()
def move_biases(layers: Iterable[nn.Module], groups: Callable, move: bool = True) -> None:
    """After a step: every router's bias follows the load of the whole batch, summed over these groups; 8
    bytes per expert and layer. Without `move`, of a step that was left out, the load is forgotten."""
    for layer in mixtures(layers):
        if layer.config.bias_speed and move:
            load = layer.router.load
            for group in groups(layer):
                load = collectives.all_reduce(load, group)
            layer.router.bias.copy_(router.moved_bias(layer.router.bias, load, layer.config.bias_speed))
        layer.router.load = 0
