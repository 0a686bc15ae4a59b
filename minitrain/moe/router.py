"""Where each token goes: pure functions of the scores, and what keeps the experts equally busy.

    scores [N, E] -> Routing(experts [N, k], weights [N, k])       y_n = sum_j weights_nj · expert_nj(x_n)

    switch           the best expert, weighted with its probability            Fedus et al. 2021, section 2.1
    gshard           the two best, the second only sometimes                   Lepikhin et al. 2020, alg. 1
    top_k            the k best, softmax over these k                          Mixtral: Jiang et al. 2024, 2.1
    deepseek         sigmoid; a bias chooses and does not weigh; few nodes     DeepSeek-V3 2024, 2.1.2
    expert_choice    each expert takes its C best tokens                       Zhou et al. 2022, section 3.2
    balanced         in turn, whatever the scores say                          for dry runs

Of equal scores the lower index wins, on every device. A token that `mask` leaves out goes nowhere: expert -1
and weight 0, as does a choice that is dropped. Gradients flow through weights and probs, never through the
choice. Losses are sums over tokens, divided by the tokens of the whole batch: given the `counts` and `tokens`
of all microbatches and ranks, what each computes from its own tokens adds up to the loss of one process.
"""

import math
from dataclasses import dataclass, replace
from fractions import Fraction

import torch
from torch import Tensor

NOWHERE = -1


@dataclass(frozen=True)
class Routing:
    """Choice j of token n is expert `experts[n, j]` with `weights[n, j]`; `probs` are what losses average."""

    experts: Tensor  # [N, k] integers, NOWHERE for none
    weights: Tensor  # [N, k], 0 for none
    probs: Tensor  # [N, E], rows add up to 1, or to 0 where a token is masked

    @property
    def counts(self) -> Tensor:
        """[E] how many tokens each expert gets."""
        chosen = self.experts[self.experts != NOWHERE]
        return torch.bincount(chosen, minlength=self.probs.shape[1])

    def within(self, capacity: int) -> "Routing":
        """No expert gets more than `capacity` tokens: first choices before second ones, then in their order.

        What is dropped keeps nothing of its weight: the token lives on in the residual stream alone.
        """
        if capacity < 1:
            raise ValueError(f"capacity = {capacity}; an expert needs room for at least 1 token")
        in_order = self.experts.T.reshape(-1)  # all first choices, then all second ones
        hits = in_order[:, None] == torch.arange(self.probs.shape[1], device=in_order.device)
        place = (hits.cumsum(0) * hits).sum(1).view(self.experts.T.shape).T  # 1 for the first to arrive
        return self._without(place > capacity)

    def _without(self, dropped: Tensor) -> "Routing":
        experts = self.experts.masked_fill(dropped, NOWHERE)
        return replace(self, experts=experts, weights=self.weights.masked_fill(dropped, 0.0))


# ---- routers ---------------------------------------------------------------------------------------------


def switch(scores: Tensor, mask: Tensor | None = None) -> Routing:
    """Top-1. The weight is the probability itself: without it the router would get no gradient."""
    probs = scores.softmax(-1)
    return _routed(probs, _best(_checked(scores, 1), 1), mask)


def gshard(scores: Tensor, draws: Tensor, mask: Tensor | None = None) -> Routing:
    """Top-2, weighted in proportion; the second is visited if 2 · weight > draw, `draws` [N] in [0, 1)."""
    routing = _routed(scores.softmax(-1), _best(_checked(scores, 2), 2), mask, normalised=True)
    stays = torch.zeros_like(routing.experts, dtype=torch.bool)
    stays[:, 1] = 2 * routing.weights[:, 1].detach() <= draws
    return routing._without(stays)


def top_k(scores: Tensor, k: int, mask: Tensor | None = None) -> Routing:
    """The k best, with the softmax over their scores alone."""
    return _routed(scores.softmax(-1), _best(_checked(scores, k), k), mask, normalised=True)


def deepseek(
    scores: Tensor,
    k: int,
    bias: Tensor,
    mask: Tensor | None = None,
    *,
    nodes: int = 1,
    node_limit: int | None = None,
    scale: float = 1.0,
) -> Routing:
    """The k best of sigmoid(scores) + bias, weighted with the sigmoids alone: normalised, times `scale`.

    With `nodes` the experts stand in equal rows on so many nodes, and a token visits at most `node_limit` of
    them: those with the largest sums of their k / node_limit best.
    """
    affinity = _checked(scores, k).sigmoid()
    wanted, limit = affinity.detach() + bias, node_limit or nodes
    if (
        scores.shape[1] % nodes
        or not 1 <= limit <= nodes
        or k % limit
        or k // limit > scores.shape[1] // nodes
    ):
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

    Differs from all others: who is chosen depends on the other tokens of the batch, later ones included.
    """
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


def balanced(scores: Tensor, k: int, mask: Tensor | None = None) -> Routing:
    """Token n visits experts nk, nk + 1, .. in turn, with equal weights: every expert gets N·k/E tokens."""
    tokens, experts = _checked(scores, k, values=False).shape
    turns = torch.arange(tokens * k, device=scores.device).view(tokens, k) % experts
    return _routed(scores.softmax(-1), turns, mask, normalised=True)


def _checked(scores: Tensor, k: int, values: bool = True) -> Tensor:
    if scores.dim() != 2 or not 1 <= k <= scores.shape[1]:
        found = f"scores {list(scores.shape)}, k = {k}"
        raise ValueError(
            f"{found}; a router needs scores [tokens, experts] and k from 1 to the number of experts"
        )
    if values and not bool(torch.isfinite(scores).all()):
        token = int((~torch.isfinite(scores)).any(1).nonzero()[0])
        raise ValueError(f"scores of token {token} are not finite; the router would send it anywhere")
    return scores


def _best(values: Tensor, k: int) -> Tensor:
    """Indices of the k largest along the last dim, of equal ones the lower first."""
    return values.detach().sort(dim=-1, descending=True, stable=True).indices[..., :k]


def _routed(probs: Tensor, experts: Tensor, mask: Tensor | None, normalised: bool = False) -> Routing:
    weights = probs.gather(1, experts.clamp(min=0))
    if normalised:
        weights = weights / weights.sum(-1, keepdim=True)
    nowhere = experts == NOWHERE
    if mask is not None:
        if mask.shape != probs.shape[:1]:
            wanted = f"a mask has one entry for each of {probs.shape[0]} tokens"
            raise ValueError(f"mask {list(mask.shape)}; {wanted}")
        nowhere, probs = nowhere | ~mask[:, None], probs * mask[:, None]
    return Routing(experts, weights, probs)._without(nowhere)


# ---- what keeps it balanced ------------------------------------------------------------------------------


def capacity_of(tokens: int, experts: int, k: int, factor: float) -> int:
    """Room of one expert, ceil(k · tokens / experts · factor): Switch, eq. 3; GShard: 2T/E."""
    return math.ceil(Fraction(k * tokens, experts) * Fraction(factor).limit_denominator(1000))


def balance_loss(
    routing: Routing, alpha: float, counts: Tensor | None = None, tokens: int | None = None
) -> Tensor:
    """alpha · E · sum_e f_e · P_e: f_e the share of choices, P_e the mean probability (Switch, eqs. 4 to 6).

    alpha if both are uniform, alpha · E if all tokens surely go to one expert. `counts` [E] and `tokens` are
    those of the whole batch; left out, the batch is this routing.
    """
    counts = routing.counts if counts is None else counts
    tokens = _tokens_of(routing) if tokens is None else tokens
    share = counts.to(routing.probs.dtype) / counts.sum().clamp(min=1)
    return alpha * len(counts) * (share * routing.probs.sum(0)).sum() / max(1, int(tokens))


def z_loss(scores: Tensor, alpha: float, mask: Tensor | None = None, tokens: int | None = None) -> Tensor:
    """alpha · mean of logsumexp(scores)²: keeps scores small (Zoph et al. 2022, ST-MoE, eq. 5)."""
    squares = scores.logsumexp(-1).square()
    squares = squares if mask is None else squares[mask]
    return alpha * squares.sum() / max(1, len(squares) if tokens is None else int(tokens))


def moved_bias(bias: Tensor, counts: Tensor, speed: float) -> Tensor:
    """The bias of `deepseek` after a step: up by `speed` where a load was below the mean, else down."""
    return bias + speed * torch.sign(counts.to(bias.dtype).mean() - counts)


def _tokens_of(routing: Routing) -> Tensor:
    """Tokens that are not masked: their probabilities add up to 1."""
    return (routing.probs.detach().sum(1) > 0).sum()
