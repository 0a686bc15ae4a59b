"""One step of a pipeline beside one process, and a mistake planted in it: what chapters 11 and 12 compare."""

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from minitrain.model.config import GPTConfig
from minitrain.model.data.batches import Rows, random_tokens
from minitrain.model.gpt import GPT, cross_entropy_sum
from minitrain.pipeline.runtime import Around
from minitrain.ranks.ledger import Ledger

ROWS, LENGTH = 8, 16
NEAR = 1e-12  # float64, sums of some hundred numbers near 1
Plant = Callable[..., None]


def batches(config: GPTConfig) -> Rows:
    """Eight rows of 16 random tokens, with different numbers of masked targets."""
    drawn = partial(random_tokens, batch_size=ROWS, length=LENGTH, vocab=config.vocab_size, masked=True)
    return Rows(drawn, batch_size=ROWS, length=LENGTH)


def one_process(config: GPTConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the same batch without a pipeline, in float64."""
    model, (tokens, targets) = GPT(config, dtype=torch.float64), batches(config).draw(0, 0, 1)
    loss = cross_entropy_sum(model(tokens), targets) / (targets >= 0).sum()
    loss.backward()
    return loss.detach(), {name: param.grad for name, param in model.named_parameters()}


def step(run, rows: Rows, plant: Plant = lambda run: None) -> dict:
    """Forward and backward on this rank, of what `parallelize` gave it: its part of the loss, its gradients,
    and what the ledger counted. `plant` changes the run before its step.

    `live` is the most bytes of activations, `held` and `one` what a runner that counts (bpipe_eviction.py)
    kept for backwards at most, and for its first microbatch."""
    live, held = [0], []
    with Ledger() as ledger:

        @contextmanager
        def account(action):
            with ledger.phase(action):
                yield
            live.append(ledger.live_by_kind["activations"])

        run.runner.hooks.append(Around(account))
        do = run.runner.do

        def watched(entry):
            do(entry)
            held.append(getattr(run.runner, "activation_bytes", 0))

        run.runner.do = watched
        plant(run)
        loss = run.forward_backward(run.batch(rows, 0))
        run.sync.finish()
    grads = {name: param.grad for param, name in run.sync.names.items()}
    counted = dict(sent=ledger.sent_bytes("send"), messages=ledger.num_calls("send"))
    kept = dict(live=max(live), held=max(held), one=next(filter(None, held), 0))
    return dict(loss=loss, grads=grads, flops=ledger.flops_by_phase, **counted, **kept)


def agree(ranks: Sequence[dict], loss: Tensor, grads: dict[str, Tensor]) -> list[bool]:
    """[the loss, then the gradients of each rank]: equal to one process to 1e-12."""
    good = [bool(abs(sum(one["loss"] for one in ranks) - loss) < NEAR)]
    for one in ranks:
        apart = ((grad - grads[name]).abs().max() for name, grad in one["grads"].items())
        good.append(bool(max(apart) < NEAR))
    return good


def losses(run, rows: Rows, steps: int, plant: Plant = lambda run: None) -> list[float]:
    """Of `steps` training steps, all on the same batch, so that there is something to learn."""
    plant(run)
    return [run.total(run.step(run.batch(rows, 0)).loss).item() for _ in range(steps)]
