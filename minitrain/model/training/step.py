"""One training step, with one seam.

    loss = sum over all valid tokens of the global batch of -log p(target)  /  number of those tokens
    train_step:   zero_grad -> forward_backward -> reducer.finish() -> clip_grad_norm -> optimizer.step()

The divisor is known before the first forward (one all-reduce of a count, 8 bytes), so everything after it
only adds: microbatches, ranks, stages, slices; uneven batches and masks are no special case. What runs inside
a step is an argument, `forward_backward(batch)`: gradient accumulation is the schedule of a pipeline of one
stage. Holds the activations of one microbatch. Never reads a number out of a tensor: a step can run dry.
Li et al. 2020, arXiv:2006.15704, section 3.2.4 (no_sync). Differs from Megatron-LM and torch's DDP: no mean
over microbatches, ranks or tokens. A mean of means is the loss above only if all counts are equal.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from minitrain.model.data.batches import MASKED
from minitrain.model.training.optim import clip_grad_norm
from minitrain.precision.mixed import LossScale
from minitrain.ranks import collectives
from minitrain.ranks.checks import require_positive_ints
from minitrain.ranks.devices import now


class Batch(NamedTuple):
    """This rank's rows, or with cp their tokens at `positions`, and the divisor of everyone's loss."""

    tokens: Tensor  # int64 [B/dp, T/cp]
    targets: Tensor  # int64 [B/dp, T/cp], MASKED where no loss is taken
    num_valid: Tensor  # of the global batch; `valid_tokens` counts
    positions: Tensor | None = None  # int64 [T/cp] of the tokens in their rows; None: they are 0 .. T-1
    step: int | None = None  # which batch of the run this is (dropout asks),
    first_row: int = 0  # and which of its rows is this rank's first: dropout is a function of these
    num_tokens: Tensor | int | None = None  # of the global batch, masked too: routers' losses are their means
    # of packed rows: the lengths of the documents in each of this rank's whole rows, T in all
    documents: Sequence[Sequence[int]] | None = None

    def documents_of(self, first: int, rows: int) -> Sequence[Sequence[int]] | None:
        return None if self.documents is None else self.documents[first : first + rows]


class StepResult(NamedTuple):
    loss: Tensor  # this rank's part: the sum over the data group is the loss of the global batch
    norm: Tensor | None  # of the whole gradient before clipping; None without clipping
    updated: bool = True  # False: a scaled gradient overflowed, and the step was left out


class Reducer(Protocol):
    """Adds up gradients over ranks. While `enabled`, a backward may start it; after `finish` all are sums.
    Whoever runs backwards in an order of its own calls `on_microbatch_grads` after each and `on_step_grads`
    after the last. `gathered_buffers`: memory of parameters that no forward may release."""

    enabled: bool = True

    def on_step_grads(self, params: Iterable[nn.Parameter]) -> None: ...

    def on_microbatch_grads(self, params: Iterable[nn.Parameter]) -> None: ...

    def gathered_buffers(self) -> Iterable[Tensor]:
        return ()

    def finish(self) -> None: ...


class NoReducer(Reducer):
    """For one device: its gradients are the sums already, so there is nothing to do."""


def valid_tokens(targets: Tensor, *groups) -> Tensor:
    """How many targets are not masked, over all ranks of the groups that hold different tokens (one device:
    no group). An int64 scalar, to be counted once per batch; 0 makes the loss NaN."""
    count = (targets != MASKED).sum()
    for group in groups:
        count = collectives.all_reduce(count, group)
    return count


def train_step(
    forward_backward: Callable, batch: Batch, optimizer: Optimizer, reducer: Reducer, clip=None, stages=None
) -> StepResult:
    """Gradients of the global batch, then a step of the optimizer. `stages`: the ranks with other layers."""
    optimizer.zero_grad()
    loss = forward_backward(collectives.announce("forward", batch))
    reducer.finish()  # as long as this takes, communication was not hidden behind backward
    collectives.announce("gradients", batch)
    norm = None
    if clip is not None:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        norm = clip_grad_norm(params, clip, stages=stages, like=loss)
    optimizer.step()
    collectives.announce("update", batch)
    return StepResult(loss, norm)


def scaled_train_step(
    forward_backward, batch: Batch, optimizer, reducer, scale: LossScale, clip=None, stages=None
) -> StepResult:
    """The same with gradients `scale.factor` times too large (precision/mixed.py), which the optimizer,
    one whose groups know a `grad_scale`, divides again; no step if they have overflowed."""
    optimizer.zero_grad()
    collectives.announce("forward", batch)
    loss = forward_backward(batch._replace(num_valid=scale.divisor(batch.num_valid))) / scale.factor
    reducer.finish()
    collectives.announce("gradients", batch)
    for group in optimizer.param_groups:
        group["grad_scale"] = scale.factor
    params = [param for group in optimizer.param_groups for param in group["params"]]
    limit = math.inf if clip is None else clip
    norm = clip_grad_norm(params, limit, stages=stages, like=loss, grad_scale=scale.factor)
    updated = scale.finite(norm)
    if updated:
        optimizer.step()
        collectives.announce("update", batch)
    return StepResult(loss, norm, updated)


def accumulate(
    model: nn.Module,
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    num_microbatches: int,
    reducer: Reducer,
    at: Callable = lambda step, first_row, documents: None,
    router_loss: Callable[[], Tensor | None] = lambda: None,
) -> Callable[[Batch], Tensor]:
    """A `forward_backward` that runs this rank's rows in microbatches, one after the other: gradients add up
    locally and travel once, in the last backward. `loss_fn(logits, targets)` is a sum over tokens.
    `at(step, first_row, documents)` is told which rows of the global batch come next (placed.Places);
    `router_loss()` is asked after each forward for terms that layers have found themselves."""
    if num_microbatches < 1:
        raise ValueError(f"num_microbatches={num_microbatches}: use at least 1")

    def forward_backward(batch: Batch) -> Tensor:
        rows = len(batch.tokens)
        if rows < num_microbatches:
            raise ValueError(f"num_microbatches={num_microbatches}, but this rank has {rows} rows")
        microbatches = zip(*(x.tensor_split(num_microbatches) for x in (batch.tokens, batch.targets)))
        places = () if batch.positions is None else (batch.positions,)
        total, row = torch.zeros((), device=batch.tokens.device), 0
        for number, (tokens, targets) in enumerate(microbatches, start=1):
            reducer.enabled = number == num_microbatches
            at(batch.step, batch.first_row + row, batch.documents_of(row, len(tokens)))
            row += len(tokens)
            loss = loss_fn(model(tokens, *places), targets)
            if (more := router_loss()) is not None:
                loss = loss + more
            loss = loss / batch.num_valid
            loss.backward()
            total = total + loss.detach()
        return total

    return forward_backward


def measure_peak_flops(dtype=torch.float32, device: torch.device | None = None, size: int | None = None):
    """FLOP/s of this rank's best [size, size] · [size, size], of a few tries: the 100% of an MFU. On a GPU it
    is a wide one, and several at a time: else the time to start a kernel would count."""
    on_gpu = device is not None and torch.device(device).type == "cuda"
    if size is None:
        size = 512 if not on_gpu else 8192 if dtype.itemsize <= 2 else 4096
    require_positive_ints(size=size)
    a, b = torch.randn(2, size, size, device=device).to(dtype)
    best_s, products = math.inf, 8 if on_gpu else 1
    for _ in range(8):
        started = now(a.device)
        for _ in range(products):
            a @ b
        best_s = min(best_s, now(a.device) - started)
    return 2 * size**3 * products / best_s
