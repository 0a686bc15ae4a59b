"""Hyperparameters: what decides the numbers of a run besides model, text and layout, as plain values.

    run = parallelize(config, strategy, hyper.make_optimizer, seed=hyper.seed, frozen=hyper.frozen)

The optimizer is AdamW, with masters in at least float32, over matrices that decay and vectors that do not;
its rate goes up in a line and down half a cosine. torch is needed by a run only.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import reduce
from typing import Any

from minitrain.ranks.checks import require_nonnegative, require_positive_ints

LARGEST = 1 << 30  # rows, tokens or steps


@dataclass(frozen=True)
class Hyperparameters:
    steps: int = 1000  # updates of the weights
    batch_size: int = 8  # rows of the global batch
    length: int = 128  # tokens of a row
    lr: float = 3e-3  # the highest learning rate
    warmup: int | None = None  # steps until it is reached; else 20, or all there are
    min_lr: float | None = None  # the rate at the end; else a tenth of lr
    weight_decay: float = 0.1  # of matrices; norms and biases do not decay
    clip: float = 1.0  # the largest norm of the whole gradient; inf only measures it
    seed: int = 0  # of weights, the order of the text and dropout
    frozen: tuple[str, ...] = ()  # patterns of parameters that are not trained, such as 'layers.0.*'

    def __post_init__(self):
        require_positive_ints(LARGEST, steps=self.steps, batch_size=self.batch_size, length=self.length)
        require_nonnegative(weight_decay=self.weight_decay)
        self.lr_at(0)  # refuses a shape that is none
        if not self.clip > 0:
            raise ValueError(f"clip={self.clip}: must be > 0 (inf measures without clipping)")

    def lr_at(self, step: int) -> float:
        """Of step 0, 1, 2, ...: up in a line, at `lr` after `warmup` steps, then half a cosine down to
        `min_lr` at `steps`, where it stays. Loshchilov and Hutter 2017, arXiv:1608.03983, equation 5."""
        lr, steps = self.lr, self.steps
        warmup = min(20, self.steps) if self.warmup is None else self.warmup
        min_lr = lr / 10 if self.min_lr is None else self.min_lr
        if not 0 <= min_lr <= lr < math.inf:
            raise ValueError(f"lr={lr}, min_lr={min_lr}: need 0 <= min_lr <= lr, finite")
        if not 0 <= warmup <= steps:
            raise ValueError(f"warmup={warmup} of steps={steps}: lr is never reached; use 0 to {steps}")
        if step < warmup:
            return lr * (step + 1) / warmup
        done = min(1.0, (step - warmup) / max(1, steps - warmup))
        return min_lr + (lr - min_lr) * (1 + math.cos(math.pi * done)) / 2

    def freezes(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.frozen)

    def make_optimizer(self, params: list):
        import torch

        from minitrain.model.training.optim import AdamW

        master = reduce(torch.promote_types, (param.dtype for param in params), torch.float32)
        groups = decaying_matrices(params, self.weight_decay)
        return AdamW(groups, self.lr, betas=(0.9, 0.95), master_dtype=master)


def decaying_matrices(params: Iterable, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay; norms and biases do not, their scale is not capacity. Shapes are those of wholes."""
    require_nonnegative(weight_decay=weight_decay)
    matrices, vectors = [], []
    for param in params:
        (matrices if param.dim() >= 2 else vectors).append(param)
    groups = [dict(params=matrices, weight_decay=weight_decay), dict(params=vectors, weight_decay=0.0)]
    return [group for group in groups if group["params"]]
