"""Dynamic loss scaling: gradients that float16 would round to zero are carried above its smallest number.

    factor · loss  ->  factor · gradients  ->  sums over ranks  ->  norm / factor  ->  update, / factor

    norm is finite    update; after `window` such steps in a row the factor doubles
    norm is not       a gradient overflowed: nothing is updated, the factor halves

The norm is that of the whole gradient, over all ranks, shards and stages, so all ranks skip a step, or none.
The factor is a power of two, hence exact; it leaves in the optimizer, in the dtype of the master: a gradient
divided earlier, in float16 (2^-24 to 65,504), would underflow after all.
Sends nothing. Waits for one number per step: the norm.
Micikevicius et al. 2018, arXiv:1710.03740, section 3.2. Differs from apex and torch.amp.GradScaler: the norm
tells of overflow, so there is no search for infinities, gradient by gradient, and no all-reduce of a flag.
"""

import math
from typing import Any

import torch
from torch import Tensor


class LossScale:
    """`factor`, a power of two, is that of the step to come; `dtype` that of the loss."""

    def __init__(self, factor: float, window: int, dtype: torch.dtype = torch.float32):
        self.factor, self.window, self.good_steps, self.dtype = float(factor), window, 0, dtype

    def divisor(self, num_tokens: Tensor) -> Tensor:
        """What a scaled loss is divided by."""
        return num_tokens.to(self.dtype) / self.factor

    def finite(self, norm: Tensor) -> bool:
        """Whether this step's gradients can be used. Changes the factor for the next step.

        Raises ValueError when the factor would fall below 1: then not the scale overflows, but the training.
        """
        if type(norm) is not Tensor or math.isfinite(norm.item()):  # a dry run has no numbers
            self.good_steps += 1
            if self.good_steps == self.window:
                self.factor, self.good_steps = self.factor * 2, 0
            return True
        if self.factor == 1:
            cure = "lower the learning rate, or use bfloat16"
            raise ValueError(f"gradients are not finite at loss scale 1, which is the least: {cure}")
        self.factor, self.good_steps = self.factor / 2, 0
        return False

    def state_dict(self) -> dict[str, Any]:
        return {"factor": self.factor, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.factor, self.good_steps = state["factor"], state["good_steps"]
