"""One interpreter for every schedule: runs this rank's program, action by action, with the messages between.

    run = Runner({1: stage}, schedule, group, loss_fn, reducer, width=D)      stages by number, as `schedule.stages_of(rank)` says
    loss = run(batch)                                                         a `forward_backward` for train_step

    F   x = tokens, or what arrived     y = stage(x, positions)               kept: x and the graph of y; y itself goes to the next rank
    B   dy = what arrived               backward through the graph            x.grad goes back, the graph is free
    I   the same for x only (deferred.py)              W   the kept products: gradients of the weights
    R   the stage once more from the kept x (then its F built no graph), with the random numbers that F drew

Every rank of the group is given the same rows. They are cut into microbatches, as gradient accumulation does, and these into slices
where the schedule has them; the last stage, on whatever rank, takes the loss, a sum over tokens / `batch.num_valid`. So the sum of
what the ranks return is the loss, and each gradient is that of the whole batch. A program is lowered once (lower.py) and says when
a message is posted, when a sent tensor can go, and when the gradients of a stage are complete: `reducer.ready(params)`.

Sends per boundary between ranks and per microbatch rows · T · D elements forward, as many backward. Memory: what the schedule keeps in
flight, for each of those x and what autograd saved; two received tensors ahead; not y, whose graph does not need it.
Raises ValueError in one line, before any rank waits, for stages that are not those of the schedule (fits.py), that do not take and
give `[rows, T, D]`, for a batch that does not divide. An action that fails is named, with its neighbours.
Huang et al. 2019 (GPipe), arXiv:1811.06965; Narayanan et al. 2021, arXiv:2104.04473. Differs from Megatron-LM, which has a function
for each schedule, and from torch.distributed.pipelining, which runs lists like these one communication batch at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from minitrain import collectives
from minitrain.pipeline.deferred import Deferred
from minitrain.pipeline.fits import check_boundary, check_fits, takes_positions
from minitrain.pipeline.lower import Receive, Reduce, Send, Sent, lower, pause, user_of
from minitrain.pipeline.random_state import drawing_from, random_state, set_random_state
from minitrain.pipeline.schedule import Action, Pair, Schedule

DOES = {
    "F": "forward",
    "R": "forward_again",
    "B": "backward",
    "I": "backward",
    "W": "weights",
}  # the methods of Runner


@dataclass(slots=True)
class Kept:
    """What a forward leaves for its backward: the input, where the graph of the output begins, the products to come; and what it drew."""

    x: Tensor
    end: object = None
    later: Deferred | None = None
    drawn: tuple[Tensor, ...] = ()


class Runner:
    """A stage is a module `(x, positions) -> y`, or `x -> y`. Messages have the dtype and device of this rank's stages; if these hold no
    numbers, give `dtype` and `device` (else torch's defaults). `down`, for NCCL, is a second group of the same ranks for the messages to
    lower ranks; `length_over` is what a boundary's T is divided by (sequence parallelism cuts it over tp); `check=False` for stages that
    communicate themselves, over tp or cp. `around("F1.2")` is entered around each action: `ledger.phase` makes an account by action.
    `memory`, for slices: what a slice leaves to later ones (SliceMemory in sliced_attention.py; `SliceMemory({})` for stages that look at
    each token by itself). `cut(batch, schedule)` gives the units, if the rows are not to fall evenly on them (`samples` in dynapipe.py).
    `at(step, first_row)` is told which rows of the global batch come next (dropout.Places).
    The attribute `before_backward`, if set, is called once a step before the rank's first backward; where it says True, on all ranks alike,
    the forwards until then are run again (post_validation.py)."""

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        schedule: Schedule,
        group: ProcessGroup,
        loss_fn: Callable[[Tensor, Tensor], Tensor],
        reducer,
        *,
        width: int,
        down: ProcessGroup | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        length_over: int = 1,
        check: bool = True,
        around: Callable[[str], AbstractContextManager] = nullcontext,
        memory=None,
        cut: Callable | None = None,
        at: Callable[[int, int], None] = lambda step, first_row: None,
    ):
        check_fits(stages, schedule, group)
        if schedule.slices > 1 and memory is None:
            raise ValueError(
                f"{schedule.name}: {schedule.slices} slices of a sequence look at each other's keys; give memory=SliceMemory(cores)"
            )
        self.stages, self.schedule, self.group, self.loss_fn, self.reducer = (
            stages,
            schedule,
            group,
            loss_fn,
            reducer,
        )
        self.rank, self.down = group.rank(), down or group
        self.program = lower(schedule)[self.rank]
        some = next(
            (
                x
                for stage in stages.values()
                for x in (*stage.parameters(), *stage.buffers())
                if x.is_floating_point()
            ),
            torch.empty(0),
        )
        self.dtype, self.device = dtype or some.dtype, torch.device(device or some.device)
        self.with_positions = {number for number, stage in stages.items() if takes_positions(stage)}
        self.width, self.length_over, self.around, self.memory = width, length_over, around, memory
        self.cut, self.at = cut or cut_evenly, at
        self.uses = Counter(
            param for stage in stages.values() for param in stage.parameters()
        )  # by how many stages here
        self.again = {action[1:] for action in schedule.place if action.kind == "R"}
        self.before_backward: Callable[[], bool] | None = None
        for number, stage in stages.items() if check else ():
            check_boundary(number, stage, schedule, width, self.dtype)

    def __call__(self, batch) -> Tensor:
        """This rank's part of the loss: zero where there is no last stage."""
        self.batch, self.units = batch, self.cut(batch, self.schedule)
        self.first_rows = first_rows(self.units, self.schedule.slices, getattr(batch, "first_row", 0))
        self.reducer.enabled = False  # the program says when gradients are complete
        self.begin()
        if self.before_backward is None:
            self.play(self.program)
        else:
            filling, rest = self.halves
            drawn = random_state(self.device)
            self.play(filling)
            if self.before_backward():
                self.start_again(filling, drawn)
            self.play(filling + rest, len(filling))
        for handle in self.outbox.values():
            handle.wait()
        return self.loss

    def start_again(self, filling: tuple, drawn: tuple[Tensor, ...]) -> None:
        """The forwards that fill the pipeline once more; what they sent is received by all, and dropped."""
        for x in self.inbox.values():
            x if isinstance(x, Tensor) else x.wait()
        stale = list(self.outbox.values())
        set_random_state(drawn, self.device)
        self.begin()
        self.play(filling)
        for handle in stale:
            handle.wait()

    def begin(self) -> None:
        """Nothing is kept, nothing on its way."""
        self.left = self.uses.copy()
        self.kept: dict[tuple[int, int], Kept] = {}
        self.inbox: dict[Action, Tensor | collectives.Handle] = {}
        self.outbox: dict[Action, collectives.Handle] = {}
        self.loss = torch.zeros((), dtype=torch.promote_types(self.dtype, torch.float32), device=self.device)
        if self.memory:
            self.memory.clear()

    @cached_property
    def halves(self) -> tuple[tuple, tuple]:
        """What is done before `before_backward`, and behind it."""
        return pause(self.program, self.rank, self.schedule)

    def play(self, program: tuple, start: int = 0) -> None:
        for number, step in enumerate(program[start:], start):
            try:
                self.do(step)
            except Exception as error:
                raise RuntimeError(
                    f"{self.schedule.name}, rank {self.rank}: {step} failed, {neighbours(program, number)}: {error}"
                ) from error

    def do(self, step) -> None:
        match step:
            case Send(what, to):
                self.outbox[what] = collectives.send(self.inbox.pop(what), to, self.link(to), async_op=True)
            case Receive(what, source):
                shape, dtype = self.message(what)
                self.inbox[what] = collectives.receive(
                    None,
                    source,
                    self.link(source, incoming=True),
                    shape=shape,
                    dtype=dtype,
                    device=self.device,
                    async_op=True,
                )
            case Sent(what):
                self.outbox.pop(what).wait()
            case Reduce(stage):
                params = list(self.stages[stage].parameters())
                self.left.subtract(params)
                self.reducer.ready([param for param in params if not self.left[param]])
            case Pair(forward, backward):
                self.act(forward)
                self.act(backward)
            case _:
                self.act(step)

    def act(self, action: Action) -> None:
        with self.around(str(action)):
            getattr(self, DOES[action.kind])(action)

    # ---- the actions -----------------------------------------------------------------------------------------------------

    def forward(self, action: Action) -> None:
        _, stage, unit = action
        tokens = self.units[unit][0]
        x = tokens if stage == 0 else self.take(Action("F", stage - 1, unit)).requires_grad_()
        again = (stage, unit) in self.again
        self.kept[stage, unit] = kept = Kept(x, drawn=random_state(self.device) if again else ())
        with torch.set_grad_enabled(not again):
            y = self.run_stage(stage, unit, kept)
        if stage == self.schedule.stages - 1:
            self.loss += y.detach()
        else:
            self.check_output(stage, unit, y)
            self.give(action, y.detach())

    def forward_again(self, action: Action) -> None:
        kept = self.kept[action[1:]]
        with drawing_from(kept.drawn, self.device):
            self.run_stage(action.stage, action.microbatch, kept)

    def run_stage(self, stage: int, unit: int, kept: Kept) -> Tensor:
        """The stage, or on the last one the loss; the graph's end is remembered, the output is not."""
        _, targets, positions = self.units[unit]
        self.at(getattr(self.batch, "step", 0), self.first_rows[unit])
        kept.later = (
            Deferred()
            if self.schedule.splits_backward and Action("W", stage, unit) in self.schedule.place
            else None
        )
        with kept.later or nullcontext(), self.memory.during(stage, unit) if self.memory else nullcontext():
            y = self.run(stage, kept.x, positions)
        if stage == self.schedule.stages - 1:
            y = self.loss_fn(y, targets) / self.batch.num_valid
        if y.requires_grad:
            kept.end = y if y.dim() == 0 else torch.autograd.graph.get_gradient_edge(y)
        return y

    def run(self, stage: int, x: Tensor, positions: Tensor) -> Tensor:
        return self.stages[stage](x, *((positions,) if stage in self.with_positions else ()))

    def backward(self, action: Action) -> None:
        _, stage, unit = action
        kept = self.kept[stage, unit] if action.kind == "I" else self.kept.pop((stage, unit))
        dy = None if stage == self.schedule.stages - 1 else self.take(self.schedule.backward(stage + 1, unit))
        ends = [(kept.end, dy)] if kept.end is not None else []
        ends += self.memory.ends(stage, unit) if self.memory else []
        self.at(getattr(self.batch, "step", 0), self.first_rows[unit])  # a layer may be computed again
        if ends:
            torch.autograd.backward(*map(tuple, zip(*ends)))
        if action.kind == "B":
            self.reducer.arrived(self.stages[stage].parameters())
        if stage:
            self.give(action, kept.x.grad if kept.x.grad is not None else self.no_gradient(unit))
        kept.x = kept.end = None

    def weights(self, action: Action) -> None:
        self.kept.pop((action.stage, action.microbatch)).later.weights()
        self.reducer.arrived(self.stages[action.stage].parameters())

    @torch.no_grad()
    def through(self, x: Tensor, positions: Tensor) -> Tensor | None:
        """Rows of tokens through all stages, forward only, outside of any schedule: what the last stage gives, on the first rank that has
        it (`last_rank`), None elsewhere. All ranks take part with the same rows."""
        for stage in range(self.schedule.stages):
            here, there = self.home(stage), self.home(stage + 1)
            if self.rank == here:
                x = self.run(stage, x, positions)
                if there not in (here, None):
                    collectives.send(x, there, self.link(there))
            elif self.rank == there:
                x = collectives.receive(
                    None,
                    here,
                    self.link(here, incoming=True),
                    dtype=self.dtype,
                    device=self.device,
                    shape=(len(x), positions.size(-1) // self.length_over, self.width),
                )
        return x if self.rank == self.last_rank else None

    def home(self, stage: int) -> int | None:
        """The first rank that has a stage."""
        return next(
            (rank for rank in range(len(self.schedule.ranks)) if stage in self.schedule.stages_of(rank)), None
        )

    @property
    def last_rank(self) -> int:
        return self.home(self.schedule.stages - 1)

    # ---- what comes and goes ---------------------------------------------------------------------------------------------

    def give(self, what: Action, x: Tensor) -> None:
        """For the neighbouring stage: the next step of the program sends it, or it is on this rank."""
        if user_of(what, self.schedule) is not None:
            self.inbox[what] = x

    def take(self, what: Action) -> Tensor:
        x = self.inbox.pop(what)
        return x if isinstance(x, Tensor) else x.wait()

    def link(self, other: int, incoming: bool = False) -> ProcessGroup:
        """Messages to higher ranks go over one group, those to lower ranks over the other."""
        return self.down if (other > self.rank) == incoming else self.group

    def message(self, what: Action) -> tuple[tuple[int, ...], torch.dtype]:
        return self.shape(what.microbatch), self.dtype

    def no_gradient(self, unit: int) -> Tensor:
        """What goes back from a stage that lets no gradient through: its neighbour waits for one."""
        return torch.zeros(self.shape(unit), dtype=self.dtype, device=self.device)

    def shape(self, unit: int) -> tuple[int, int, int]:
        rows, length = self.units[unit][0].shape
        return rows, length // self.length_over, self.width

    def check_output(self, stage: int, unit: int, y: Tensor) -> None:
        if tuple(y.shape) != self.shape(unit) or y.dtype != self.dtype:
            raise ValueError(
                f"stage {stage} gives {list(y.shape)} {y.dtype}, stage {stage + 1} expects {list(self.shape(unit))} {self.dtype}; "
                "cut the model where its width is the one given"
            )


def first_rows(units: list[tuple[Tensor, Tensor, Tensor]], slices: int, first_row: int) -> list[int]:
    """Of each unit of a batch, its first row in the global batch: slices of a microbatch have the same."""
    before = accumulate((len(tokens) for tokens, *_ in units[::slices]), initial=first_row)
    return [row for row, _ in zip(before, units[::slices]) for _ in range(slices)]


def cut_evenly(batch, schedule: Schedule) -> list[tuple[Tensor, Tensor, Tensor]]:
    """The units of a batch: (tokens, targets, positions). Rows may fall unevenly on the microbatches."""
    rows, length = batch.tokens.shape
    microbatches, slices = schedule.microbatches // schedule.slices, schedule.slices
    if rows < microbatches:
        raise ValueError(
            f"{schedule.name}: {microbatches} microbatches, but this rank has {rows} rows; use at most {rows} or a larger batch"
        )
    if length < slices:
        raise ValueError(f"{schedule.name}: {slices} slices of {length} tokens; use at most {length}")
    if schedule.lengths and sum(schedule.lengths) != length:
        raise ValueError(
            f"{schedule.name}: slices of {schedule.lengths} tokens are {sum(schedule.lengths)}, the batch has {length}; make them "
            "add up"
        )
    ends = list(accumulate(schedule.lengths))[:-1] or slices
    positions = (
        torch.arange(length, device=batch.tokens.device) if batch.positions is None else batch.positions
    )
    return [
        (tokens, targets, places)
        for row in zip(batch.tokens.tensor_split(microbatches), batch.targets.tensor_split(microbatches))
        for tokens, targets, places in zip(*(x.tensor_split(ends, dim=-1) for x in (*row, positions)))
    ]


def neighbours(program: tuple, number: int) -> str:
    """What is computed around a step of the program."""
    computed = [isinstance(step, (Action, Pair)) for step in program]
    before = [str(step) for step, yes in zip(program[:number], computed) if yes]
    after = [str(step) for step, yes in zip(program[number + 1 :], computed[number + 1 :]) if yes]
    return f"after {before[-1] if before else 'nothing'} and before {after[0] if after else 'the end'}"
