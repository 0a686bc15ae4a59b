"""A layer of experts token by token in one process, and which of its tokens and experts a rank has."""

import torch
import torch.nn.functional as F

from minitrain.moe.router import NOWHERE


def numbers(*shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def by_token(x, up, down, routing):
    """Token by token, choice by choice."""
    y = []
    for token, choices, weights in zip(x, routing.experts.tolist(), routing.weights):
        visited = ((e, w) for e, w in zip(choices, weights) if e != NOWHERE)
        y.append(sum((w * (F.gelu(token @ up[e]) @ down[e]) for e, w in visited), 0 * token))
    return torch.stack(y)


def loss_of(y):
    return (y * torch.linspace(1, 2, y.shape[1], dtype=y.dtype)).square().sum() / 100


def grads_of(*tensors):
    return [torch.zeros_like(t) if t.grad is None else t.grad for t in tensors]


def tokens_of(count, rank, ranks):
    """Unequal numbers of tokens: half of them on rank 0."""
    half = count // 2 if ranks > 1 else count
    sizes = [half, *map(len, torch.arange(count - half).tensor_split(max(1, ranks - 1)))]
    return slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))


def experts_of(count, rank, ranks):
    return slice(rank * count // ranks, (rank + 1) * count // ranks)


def joined(outcomes):
    """What the ranks have, as one process has it: tokens and experts side by side, the router's gradients added."""
    y, x, gate, up, down = list(zip(*outcomes))[:5]
    return torch.cat(y), torch.cat(x), sum(gate), torch.cat(up), torch.cat(down)
