"""One model trained under a hard limit of memory, in four ways: which is the least that each can do with?

    with LimitedRuns(warm_up) as runs:                                  systems/memory/limits.py
        runs.run(train, "plain", config, folder, limit_bytes=...)       MemoryError: can't allocate
        runs.run(train, "all in files", config, folder, limit_bytes=...)     the same losses

    plain              4 parameters + 8 states + 4 gradients, and what L blocks keep
    recompute          the same states, L inputs and what one block keeps    (systems/memory/window.py)
    states in files    8 bytes per parameter less, some buffers more           (systems/memory/files.py)
    all in files       parameters and gradients of one layer                 (systems/memory/files.py)

`tensor_bytes` is what the account of one run says of it, `model_bytes` what arithmetic says of states alone.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from minitrain.model.config import GPTConfig
from minitrain.model.gpt import GPT, cross_entropy_sum
from minitrain.model.training.optim import AdamW
from minitrain.ranks.ledger import Ledger
from minitrain.systems.memory.files import FiledLayers, FileOptimizer, FileStore
from minitrain.systems.memory.window import forward_backward

PLACEMENTS = ("plain", "recompute", "states in files", "all in files")
PIECE = 1 << 16  # elements of a state, or a parameter, that are read and written at a time
BUFFERS = 6


def train(placement: str, config: GPTConfig, folder: str, rows=2, length=128, steps=2) -> list[float]:
    """The loss of each step; bit for bit the same in all ways."""
    if placement not in PLACEMENTS:
        raise ValueError(f"placement={placement!r}: use {', '.join(PLACEMENTS)}")
    tokens = torch.arange(rows * length).view(rows, length) * 31 % config.vocab_size
    positions = torch.arange(length)

    def loss_of(logits: Tensor) -> Tensor:
        return cross_entropy_sum(logits, tokens.roll(-1)) / tokens.numel()

    with FileStore(folder, buffer_bytes=4 * PIECE, buffers=BUFFERS) as store:
        step = _step(placement, config, store, tokens, positions, loss_of)
        return [step().item() for _ in range(steps)]


def _step(placement: str, config: GPTConfig, store: FileStore, tokens, positions, loss_of) -> Callable:
    if placement == "all in files":
        numbers = range(config.num_layers + 2)
        layers = FiledLayers((GPT(config, layers=[i]).layers[0] for i in numbers), store, AdamW, PIECE)
        return lambda: layers.step(tokens, positions, loss_of)
    model = GPT(config)
    optimizer = AdamW(model.parameters())
    if placement == "states in files":
        optimizer = FileOptimizer(optimizer, store, PIECE)

    def step() -> Tensor:
        optimizer.zero_grad()
        if placement == "plain":
            loss = loss_of(model(tokens, positions))
            loss.backward()
        else:
            loss = forward_backward(model.layers, [tokens], lambda y, u: loss_of(y), others=(positions,))
        optimizer.step()
        return loss.detach()

    return step


def tensor_bytes(placement: str, config: GPTConfig, folder: str, **sizes) -> int:
    """Of all tensors at the fullest moment of `train`, counted; the buffers of files among them."""
    with Ledger() as ledger:
        train(placement, config, folder, **sizes)
    return ledger.peak_bytes + ledger.host_peak_bytes


def model_bytes(placement: str, parameters: int, largest_layer: int) -> int:
    """Parameters, gradients and states while a step is under way, by arithmetic; float32."""
    buffers = 4 * PIECE * BUFFERS
    return {
        "plain": 16 * parameters,
        "recompute": 16 * parameters,
        "states in files": 8 * parameters + buffers,
        "all in files": 8 * largest_layer + buffers,
    }[placement]
