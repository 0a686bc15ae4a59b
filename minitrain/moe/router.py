"""Where each token goes: pure functions of the scores, and what keeps the experts equally busy.

    scores [N, E] -> Routing(experts [N, k], weights [N, k])       y_n = sum_j weights_nj · expert_nj(x_n)

    top_k            the k best, softmax over these k                          Mixtral: Jiang et al. 2024, 2.1
    switch           the best expert, weighted with its probability            Fedus et al. 2021, section 2.1
    gshard           the two best, the second only sometimes                   Lepikhin et al. 2020, alg. 1
    deepseek         sigmoid; a bias for the choice alone; at most some nodes  DeepSeek-V3 2024, 2.1.2
    expert_choice    each expert takes its C best tokens                       Zhou et al. 2022, section 3.2
    balanced         in turn, by position, whatever the scores say             for dry runs

Scores 1, 3, 2, top_k with k = 2: experts 1, 2 with weights softmax(3, 2) = 0.73, 0.27. Of equal scores the
lower index wins. A token that `mask` leaves out and a choice that is dropped have expert -1 and weight 0.
Gradients flow through weights and probs, never through the choice. Losses are sums over tokens, divided by
the tokens of the whole batch: given the `counts` and `tokens` of all microbatches and ranks, what each
computes from its own tokens adds up to the loss of one process.
"""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial

import torch
from torch import Tensor, nn

from minitrain.ranks.checks import require_ints, require_nonnegative, require_positive_ints

NOWHERE = -1


@dataclass(frozen=True)
class Routing:
    """Choice j of token n is expert `experts[n, j]` with `weights[n, j]`; `probs` are what losses average."""

    experts: Tensor  # [N, k] integers, NOWHERE for none
    weights: Tensor  # [N, k], 0 for none
    probs: Tensor  # [N, E], rows add up to 1, or to 0 where a token is masked
    sizes: tuple[int, ...] | None = None  # `counts` in a dry run, where tensors have no numbers
    visits: Callable[[int], list[int]] | None = None  # and there, how many tokens visit each of so many nodes

    counts = property(lambda self: counts_of(self.experts.flatten(), self.probs.shape[1]))

    def within(self, capacity: int, places: Tensor | None = None) -> "Routing":
        """No expert gets more than `capacity` tokens: first choices before second ones, then in their order.
        `places` [N, k] are those of `places_of`, where the tokens are not a group of their own."""
        if capacity < 1:
            raise ValueError(f"capacity = {capacity}; an expert needs room for at least 1 token")
        return self.without((places_of(self.experts) if places is None else places) > capacity)

    def without(self, dropped: Tensor) -> "Routing":
        """The choices that are True in `dropped` [N, k] go nowhere: no weight, the residual goes on alone."""
        experts = self.experts.masked_fill(dropped, NOWHERE)
        weights = self.weights.masked_fill(dropped, 0.0)
        return replace(self, experts=experts, weights=weights, sizes=None, visits=None)

    def only(self, chosen: Collection[int]) -> "Routing":
        """The choices of these experts; all others go nowhere."""
        stays = [e in chosen for e in range(self.probs.shape[1])]
        dropped = ~torch.tensor([*stays, False], device=self.experts.device)[self.experts]
        sizes = self.sizes and tuple(size * stay for size, stay in zip(self.sizes, stays))
        visits = self.visits and partial(self.visits, only=chosen)
        return replace(self.without(dropped), sizes=sizes, visits=visits)


def top_k(scores: Tensor, k: int, mask: Tensor | None = None) -> Routing:
    """The k best, with the softmax over their scores alone."""
    return _routed(scores.softmax(-1), _best(_checked(scores, k), k), mask, normalised=True)


def switch(scores: Tensor, mask: Tensor | None = None) -> Routing:
    """Top-1. The weight is the probability itself: without it the router would get no gradient."""
    probs = scores.softmax(-1)
    return _routed(probs, _best(_checked(scores, 1), 1), mask)


def gshard(scores: Tensor, draws: Tensor, mask: Tensor | None = None) -> Routing:
    """Top-2, weighted in proportion; the second is visited if 2 · weight > draw, `draws` [N] in [0, 1)."""
    routing = _routed(scores.softmax(-1), _best(_checked(scores, 2), 2), mask, normalised=True)
    stays = torch.zeros_like(routing.experts, dtype=torch.bool)
    stays[:, 1] = 2 * routing.weights[:, 1].detach() <= draws
    return routing.without(stays)


def deepseek(scores, k, bias, mask=None, *, nodes=1, node_limit=None, scale=1.0) -> Routing:
    """The k best of sigmoid(scores) + bias, weighted with the sigmoids alone: normalised, times `scale`.

    With equal parts of the experts on `nodes`, a token visits at most `node_limit` of them: those with the
    largest sums of their k / node_limit best."""
    affinity = _checked(scores, k).sigmoid()
    wanted, limit = affinity.detach() + bias, node_limit or nodes
    fits = 1 <= limit <= nodes and not (scores.shape[1] % nodes or k % limit)
    if not fits or k // limit > scores.shape[1] // nodes:
        rule = "nodes divide the experts, node_limit divides k, and k / node_limit experts stand on a node"
        raise ValueError(f"{scores.shape[1]} experts, {nodes} nodes, node_limit {limit}, k {k}: {rule}")
    if limit < nodes:
        rows = wanted.unflatten(1, (nodes, -1))
        worth = rows.sort(-1, descending=True).values[..., : k // limit].sum(-1)
        open_nodes = torch.zeros_like(worth, dtype=torch.bool).scatter(1, _best(worth, limit), True)
        wanted = rows.masked_fill(~open_nodes[..., None], -math.inf).flatten(1)
    probs = affinity / affinity.sum(-1, keepdim=True)
    routing = _routed(probs, _best(wanted, k), mask, normalised=True)
    return replace(routing, weights=scale * routing.weights)


def expert_choice(scores: Tensor, capacity: int, mask: Tensor | None = None) -> Routing:
    """Each expert takes the `capacity` tokens that like it best: equal loads, and some tokens go nowhere.

    Differs from all others: who is chosen depends on the other tokens of the batch, later ones included."""
    tokens, experts = scores.shape
    if not 1 <= capacity <= tokens:
        raise ValueError(f"capacity = {capacity}; an expert chooses 1 to {tokens} of {tokens} tokens")
    probs = _checked(scores, 1).softmax(-1)
    liked = probs.detach() if mask is None else probs.detach().masked_fill(~mask[:, None], -1.0)
    chosen = torch.zeros_like(liked, dtype=torch.bool).scatter(0, _best(liked.T, capacity).T, True)
    columns = max(1, int(chosen.sum(1).max()))
    numbers = torch.where(chosen, torch.arange(experts, device=scores.device), experts).sort(-1).values
    picked = numbers[:, :columns].masked_fill(numbers[:, :columns] == experts, NOWHERE)
    return _routed(probs, picked, mask)


def balanced(scores: Tensor, k: int, positions: Tensor, mask: Tensor | None = None) -> Routing:
    """Token t of a row visits experts t·k, t·k + 1, .. in turn: of a row's T tokens every expert gets T·k/E.

    `positions` [B, T], B·T = N. Without numbers (a dry run) they are taken to be 0 to T - 1."""
    (_, experts), (rows, length) = _checked(scores, k, values=False).shape, positions.shape
    turns = (positions.reshape(-1, 1) * k + torch.arange(k, device=scores.device)) % experts
    routing = _routed(scores.softmax(-1), turns, mask, normalised=True)
    if not without_numbers(scores):
        return routing
    each, more = divmod(length * k, experts)
    sizes = tuple(rows * (each + (expert < more)) for expert in range(experts))
    return replace(routing, sizes=sizes, visits=partial(visits_in_turn, rows, length, k, experts))


# ---- what all routers share
def _best(values: Tensor, k: int) -> Tensor:
    """Indices of the k largest along the last dim, of equal ones the lower first."""
    return values.detach().sort(dim=-1, descending=True, stable=True).indices[..., :k]


def _routed(probs: Tensor, experts: Tensor, mask: Tensor | None, normalised: bool = False) -> Routing:
    weights = probs.gather(1, experts.clamp(min=0))
    if normalised:
        weights = weights / weights.sum(-1, keepdim=True)
    nowhere = experts == NOWHERE
    routing = Routing(experts, weights, probs)
    if mask is not None:
        if mask.shape != probs.shape[:1]:
            raise ValueError(f"mask {list(mask.shape)}; a mask has one entry for each of {len(probs)} tokens")
        routing, nowhere = replace(routing, probs=probs * mask[:, None]), nowhere | ~mask[:, None]
    return routing.without(nowhere)


def _checked(scores: Tensor, k: int, values: bool = True) -> Tensor:
    if scores.dim() != 2 or not 1 <= k <= scores.shape[1]:
        rule = "a router needs scores [tokens, experts] and k from 1 to the number of experts"
        raise ValueError(f"scores {list(scores.shape)}, k = {k}; {rule}")
    finite = torch.isfinite(scores.detach())  # detached, for autograd would save what is looked at
    if values and not bool(finite.all()):
        token = int((~finite).any(1).nonzero()[0])
        raise ValueError(f"scores of token {token} are not finite; the router would send it anywhere")
    return scores


def without_numbers(x: Tensor) -> bool:
    """Is it a dry run's?"""
    return x.is_meta or type(x) not in (Tensor, nn.Parameter)


def visits_in_turn(rows: int, length: int, k: int, experts: int, nodes: int, only=None) -> list[int]:
    """How many tokens `balanced` sends to one or more (of `only`) in each of `nodes` parts of the experts."""
    turn, visits = experts // math.gcd(k, experts), [0] * nodes  # after `turn` tokens it begins again
    for token in range(min(turn, length)):
        visited = {(token * k + j) % experts for j in range(k)}
        for node in {e * nodes // experts for e in visited if only is None or e in only}:
            visits[node] += rows * math.ceil((length - token) / turn)
    return visits


# ---- how many tokens an expert gets: counts, and room for them
def counts_of(experts: Tensor, num_experts: int) -> Tensor:
    """[.., M] choices -> [.., E]: how many there are of each."""
    counts = experts.new_zeros(*experts.shape[:-1], num_experts + 1)
    return counts.scatter_add_(-1, experts + 1, torch.ones_like(experts))[..., 1:]


def places_of(experts: Tensor) -> Tensor:
    """[.., T, k] choices -> [.., T, k]: which of its expert's tokens each is, from 1 on, of all T: all first
    choices come before all second ones. [[1, 0], [1, 2]] -> [[1, 1], [2, 1]]"""
    in_order = experts.transpose(-1, -2).flatten(-2)
    order = in_order.argsort(stable=True, dim=-1)
    alike = in_order.gather(-1, order)
    numbers = torch.arange(1, alike.shape[-1] + 1, device=alike.device) - torch.searchsorted(alike, alike)
    places = torch.empty_like(in_order).scatter_(-1, order, numbers)
    return places.unflatten(-1, (experts.shape[-1], -1)).transpose(-1, -2)


def capacity_of(tokens: int, experts: int, k: int, factor: float) -> int:
    """Room of one expert, ceil(k · tokens / experts · factor): Switch, eq. 3; GShard: 2T/E."""
    require_ints(tokens=tokens, k=k)
    require_positive_ints(experts=experts)
    require_nonnegative(factor=factor)
    return math.ceil(Fraction(k * tokens, experts) * Fraction(factor).limit_denominator(1000))


# ---- what keeps loads even: losses, and a bias
def balance_loss(routing: Routing, alpha: float, counts=None, tokens=None) -> Tensor:
    """alpha · E · sum_e f_e · P_e: f_e the share of choices, P_e the mean probability (Switch, eqs. 4 to 6):
    alpha if both are uniform, alpha · E if all tokens surely go to one expert. Without `counts` [E] and
    `tokens` of the whole batch, this routing is all of it."""
    counts = routing.counts if counts is None else counts
    tokens = tokens_of(routing) if tokens is None else tokens
    return alpha * balance_sum(routing.probs, counts) / max(1, int(tokens))


def balance_sum(probs: Tensor, counts: Tensor) -> Tensor:
    """E · sum_e f_e · sum_n probs_ne of tokens [.., N, E], f_e their shares of `counts` [.., E]: summed over
    all groups of tokens. In the uniform case a token adds 1."""
    shares = counts.to(probs.dtype) / counts.sum(-1, keepdim=True).clamp(min=1)
    return counts.shape[-1] * (shares * probs.sum(-2)).sum()


def tokens_of(routing: Routing) -> Tensor:
    """Tokens that are not masked: their probabilities add up to 1."""
    return (routing.probs.detach().sum(1) > 0).sum()


def z_loss(scores: Tensor, alpha: float, mask: Tensor | None = None, tokens: int | None = None) -> Tensor:
    """alpha · mean of logsumexp(scores)²: keeps scores small (Zoph et al. 2022, ST-MoE, eq. 5)."""
    if tokens is None:
        tokens = len(scores) if mask is None else mask.sum()
    return alpha * z_sum(scores, mask) / max(1, int(tokens))


def z_sum(scores: Tensor, mask: Tensor | None = None) -> Tensor:
    squares = scores.logsumexp(-1).square()
    return (squares if mask is None else squares * mask).sum()


def moved_bias(bias: Tensor, counts: Tensor, speed: float) -> Tensor:
    """The bias of `deepseek` after a step: up by `speed` where a load is below the mean, down where above."""
    return bias + speed * torch.sign(counts.to(bias.dtype).mean() - counts)
