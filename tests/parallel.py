"""The equality harness: whatever a technique does on N ranks must equal one process, in float64, to 1e-12.

A `Problem` holds the traps on purpose: a tied table, a frozen parameter, ranks seeded apart, different data
and unequal token masks per rank, an uneven last batch, clipping. `one_process` trains it in the plainest way
there is, with torch's own optimizer and clipping and nothing of minitrain's but the model. `on_ranks` trains
it through a technique. `difference` says how far apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from minitrain import collectives, launch
from minitrain.compose.parallelize import parallelize
from minitrain.data_parallel import states
from minitrain.model.data.batches import MASKED, Rows, random_tokens, rows_of
from minitrain.model.gpt import GPT, GPTConfig, cross_entropy_sum
from minitrain.model.training.optim import AdamW
from minitrain.model.training.step import Batch, accumulate, train_step, valid_tokens
from minitrain.pipeline.schedule import Schedule
from minitrain.plan.strategy import Strategy
from minitrain.ranks.ledger import Ledger
from minitrain.ranks.sharding import full_tensor

TOLERANCE = 1e-12


def small(**changes) -> GPTConfig:
    settings = dict(
        vocab_size=29, d_model=16, num_layers=2, num_heads=4, num_kv_heads=2, max_positions=8, tied=True,
        norm="rms", positions="rope", activation="swiglu",
    )  # fmt: skip
    return GPTConfig(**(settings | changes))


@dataclass(frozen=True)
class Problem:
    config: GPTConfig = field(default_factory=small)
    batch_sizes: tuple[int, ...] = (8, 7)  # a step each; 7 sequences fall unevenly on 2 and on 4 ranks
    length: int = 8
    microbatches: int = 1
    clip: float | None = 0.5
    lr: float = 1e-2
    frozen: str = "layers.1.norm1.weight"

    def model(self) -> GPT:
        model = GPT(self.config, seed=3, dtype=torch.float64)
        model.get_parameter(self.frozen).requires_grad_(False)
        return model

    def batch(self, step: int, rank: int = 0, size: int = 1) -> tuple[Tensor, Tensor]:
        """This rank's rows of the step's batch; row i has its last i % 5 targets masked: ranks differ."""
        count = self.batch_sizes[step]
        tokens, targets = random_tokens(step, 0, 1, count, self.length, self.config.vocab_size, seed=5)
        targets = targets.clone()
        for row in range(count):
            targets[row, self.length - row % 5 :] = MASKED
        rows = rows_of(rank, size, count)
        return tokens[rows.start : rows.stop], targets[rows.start : rows.stop]


@dataclass
class Outcome:
    """What is compared: the loss of every step, clipped gradients of the last, parameters after it."""

    losses: list[float]
    grads: dict[str, Tensor]
    params: dict[str, Tensor]


def one_process(problem: Problem) -> Outcome:
    """The reference: whole batch, one backward, torch.optim.AdamW, torch.nn.utils.clip_grad_norm_."""
    model, losses = problem.model(), []
    trainable = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=problem.lr)
    for step in range(len(problem.batch_sizes)):
        tokens, targets = problem.batch(step)
        optimizer.zero_grad()
        loss = cross_entropy_sum(model(tokens), targets) / (targets != MASKED).sum()
        loss.backward()
        if problem.clip:
            torch.nn.utils.clip_grad_norm_(trainable, problem.clip)
        optimizer.step()
        losses.append(loss.item())
    return Outcome(
        losses,
        {name: param.grad for name, param in model.named_parameters() if param.grad is not None},
        {name: param.detach() for name, param in model.named_parameters()},
    )


def train_on_rank(problem: Problem, make_reducer: Callable) -> Outcome:
    """One rank's training through `train_step`; `make_reducer(params, group)` is the technique under test."""
    group = collectives.world()
    torch.manual_seed(1000 + group.rank())  # ranks seeded apart: names, not streams, decide the weights
    model = problem.model()
    params = list(model.parameters())
    reducer = make_reducer(params, group)
    optimizer = AdamW([param for param in params if param.requires_grad], lr=problem.lr)
    losses = run_steps(problem, model, group, optimizer, reducer)
    return Outcome(
        losses,
        {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None},
        {name: full_tensor(param).detach().clone() for name, param in model.named_parameters()},
    )


def train_sharded(problem: Problem, make_sharded: Callable) -> Outcome:
    """For a technique that holds the optimizer too: `make_sharded(model, group, make_optimizer)`."""
    group = collectives.world()
    torch.manual_seed(1000 + group.rank())
    model = problem.model()
    zero = make_sharded(model, group, lambda shards: AdamW(shards, lr=problem.lr))
    losses = run_steps(problem, model, group, zero, zero)
    return Outcome(
        losses,
        {
            name: states.full_grad(zero, param)
            for name, param in model.named_parameters()
            if param.requires_grad
        },
        {name: states.full_tensor(zero, param) for name, param in model.named_parameters()},
    )


def rows_of_problem(problem: Problem, step: int) -> Rows:
    return Rows(problem.batch, problem.batch_sizes[step], problem.length)


def train_parallel(
    problem: Problem,
    strategy: Strategy,
    make_optimizer: Callable | None = None,
    frozen: Sequence[str] = (),
    **settings,
) -> Outcome:
    """The same through `parallelize`: what a Run says of this rank's layers."""
    torch.manual_seed(1000 + collectives.world().rank())
    run = parallelize(
        problem.config,
        replace(strategy, microbatches=problem.microbatches, precision="float64", bucket_bytes=3000),
        make_optimizer or (lambda params: AdamW(params, lr=problem.lr)),
        seed=3,
        frozen=frozen or (problem.frozen,),
        **settings,
    )
    losses = [
        run.total(run.step(run.batch(rows_of_problem(problem, step), step), problem.clip).loss).item()
        for step in range(len(problem.batch_sizes))
    ]
    return Outcome(losses, states.full_grads(run.sync), states.full_tensors(run.sync))


def train_pipeline(
    problem: Problem,
    shape: dict[str, int],
    schedule: Schedule,
    cuts: Sequence[range] | None = None,
    **settings,
) -> Outcome:
    """As a pipeline by a schedule of one's own; what is compared is this rank's part of the model."""
    problem = replace(problem, microbatches=schedule.microbatches // schedule.slices)
    if schedule.slices > 1:
        settings |= dict(
            schedule="terapipe", slices=schedule.slices, recompute="stage" if shape["pp"] == 1 else "none"
        )
    return train_parallel(problem, Strategy(**shape, **settings), schedule=schedule, cuts=cuts)


def pipeline_difference(
    problem: Problem, shape: dict[str, int], schedule: Schedule, reference: Outcome, **settings
) -> float:
    """How far training as a pipeline on real ranks is from the reference."""
    outcomes = launch.run(
        lambda: train_pipeline(problem, shape, schedule, **settings), ranks=math.prod(shape.values())
    )
    return difference(together(outcomes), reference)


def together(outcomes: Iterable[Outcome]) -> Outcome:
    """The stages' outcomes as a whole model's; a parameter that stands twice must be the same on both."""
    losses, grads, params = [], {}, {}
    for outcome in outcomes:
        losses = losses or outcome.losses
        assert losses == outcome.losses
        for found, new in ((grads, outcome.grads), (params, outcome.params)):
            for name, tensor in new.items():
                assert name not in found or torch.equal(found[name], tensor), (
                    f"{name} differs between its copies"
                )
                found[name] = tensor
    return Outcome(losses, grads, params)


def run_steps(problem: Problem, model: GPT, group, optimizer, reducer) -> list[float]:
    """All steps of the problem; the loss of each, summed over the group."""
    forward_backward = accumulate(model, cross_entropy_sum, problem.microbatches, reducer)
    losses = []
    for step in range(len(problem.batch_sizes)):
        tokens, targets = problem.batch(step, group.rank(), group.size())
        batch = Batch(tokens, targets, valid_tokens(targets, group))
        losses.append(
            collectives.all_reduce(
                train_step(forward_backward, batch, optimizer, reducer, problem.clip).loss, group
            )
        )
    return [loss.item() for loss in losses]


def on_ranks(problem: Problem, make_reducer: Callable, ranks: int) -> list[Outcome]:
    return launch.run(train_on_rank, problem, make_reducer, ranks=ranks)


def difference(outcome: Outcome, reference: Outcome, part: bool = False) -> float:
    """The largest absolute difference in losses, gradients and parameters; names must be the same, or a part
    of them (a stage)."""
    for ours, theirs in ((outcome.grads, reference.grads), (outcome.params, reference.params)):
        assert ours.keys() <= theirs.keys() if part else ours.keys() == theirs.keys()
    pairs = [(outcome.grads[name], reference.grads[name]) for name in outcome.grads]
    pairs += [(outcome.params[name], reference.params[name]) for name in outcome.params]
    pairs.append(tuple(torch.tensor(one.losses, dtype=torch.float64) for one in (outcome, reference)))
    return max((ours - theirs).abs().max().item() for ours, theirs in pairs)


def check_refusals(refused: dict[str, Callable], ranks: int) -> None:
    """Each call raises a ValueError on every rank by itself, in one line, which has the words of its key."""

    def rank():
        said = []
        for call in refused.values():
            try:
                call()
                said.append("nothing")
            except ValueError as error:
                said.append(str(error))
        return said

    for said in launch.run(rank, ranks=ranks):
        for words, message in zip(refused, said):
            assert words in message and "\n" not in message, f"expected {words!r}, got {message!r}"


class Traffic(Ledger):  # calls of collectives alone, in a fraction of the time: no operator is looked at
    def __enter__(self) -> Traffic:
        self._open.enter_context(collectives.observe(self._on_call))
        return self

    def _on_call(self, kind: str, subject) -> None:
        super()._on_call(kind, subject) if kind in ("issue", "wait") else None
