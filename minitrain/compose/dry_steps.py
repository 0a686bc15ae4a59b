"""A training step of any strategy, dry: the account of one rank of each pipeline stage, to be replayed.

    ledgers = dry_steps(presets["llama3-8b"], Strategy(dp=8, pp=4, tp=2, ..), Hyperparameters(..))
    timeline = replay({rank: ledger.events for rank, ledger in ledgers.items()}, machine("h100"))

One rank per stage is enough: ranks that differ in dp, cp or tp alone run the same layers on as many tokens
and issue the same collectives, so on equal machines they are in step. Where they are not quite (rows that do
not divide, a contiguous layout) those taken are the last of dp and cp, the fullest. Stages differ, in layers
and in how far they run ahead: the replay brings them together by their messages.

The account is that of any step but the first, from its batch to the update: what is made once, weights and
states of the optimizer, is there before and counts as memory. The update is AdamW's, `fused` in one kernel
per tensor as training stacks have it, or operator by operator. Which expert a token goes to is not known
without numbers: all ranks and experts get as many.
"""

from __future__ import annotations

from functools import partial

from minitrain.compose.parallelize import parallelize
from minitrain.compose.run_states import make_states
from minitrain.memory.host_optimizer import fused_adamw
from minitrain.model.config import GPTConfig
from minitrain.model.data.batches import Rows, random_tokens
from minitrain.model.training.hyperparameters import Hyperparameters
from minitrain.plan.strategy import Strategy
from minitrain.ranks.launch import dryrun
from minitrain.ranks.ledger import Ledger
from minitrain.ranks.torch_private import in_backward


def dry_steps(
    config: GPTConfig, strategy: Strategy, hyper: Hyperparameters, *, fused: bool = True
) -> dict[int, Ledger]:
    """{rank: the account of its step}, one rank of every stage. ValueError for what cannot be."""
    strategy.check(config, strategy.ranks)
    strategy.check_batch(config, hyper.batch_size, hyper.length)
    step, every = partial(_step, config, strategy, hyper, fused), strategy.ranks
    return {rank: dryrun.run(step, rank=rank, ranks=every) for rank in stage_ranks(strategy)}


def stage_ranks(strategy: Strategy) -> list[int]:
    """Of each stage the rank that is last in dp and cp, first in tp: ((d·pp + stage)·cp + c)·tp + t."""
    dp, pp, cp, tp = strategy.dp, strategy.pp, strategy.cp, strategy.tp
    return [(((dp - 1) * pp + stage) * cp + cp - 1) * tp for stage in range(pp)]


def _step(config: GPTConfig, strategy: Strategy, hyper: Hyperparameters, fused: bool) -> Ledger:
    def make_optimizer(params: list):
        optimizer = hyper.make_optimizer(params)
        if fused:
            optimizer.update = fused_adamw
        return optimizer

    run = parallelize(config, strategy, make_optimizer, seed=hyper.seed, frozen=hyper.frozen)
    shape = dict(batch_size=hyper.batch_size, length=hyper.length)
    rows = Rows(partial(random_tokens, vocab=config.vocab_size, **shape), **shape)
    make_states(run)
    ledger = Ledger()

    def within(phase_now, function):
        def named(*args, **kwargs):
            with ledger.phase(phase_now()):
                return function(*args, **kwargs)

        return named

    for layer in run.model.layers:
        layer.forward = within(lambda: "backward" if in_backward() else "forward", layer.forward)
    run.sync.step = within(lambda: "optimizer", run.sync.step)
    batch = run.batch(rows, 0)  # by the host
    with ledger, ledger.phase("backward"):  # but for what is inside a layer or the update
        run.step(batch, hyper.clip)
        run.settle()
    return ledger
