"""One interpreter for every schedule: runs this rank's program, action by action, with the messages between.

    run = Runner({1: stage}, schedule, group, loss_fn, reducer, width=D)     {number: module} of this rank
    loss = run(batch)                                                        a train_step's `forward_backward`

    F   x = tokens, or what arrived   y = stage(x, positions)      kept: x and the graph of y; y is sent on
    B   dy = what arrived             backward through the graph   x.grad goes back, the graph is free
    I   the same for x only (deferred.py)            W   the kept products: gradients of the weights
    R   the stage once more from the kept x (its F built no graph), with the random numbers that F drew

Every rank is given the same rows. The last stage computes the loss, a sum over tokens / `batch.num_valid`:
what the ranks return adds up to the loss, and each gradient is that of the whole batch. Sends, per microbatch
and boundary between ranks, rows · T · D elements forward and as many backward. Memory: x and what autograd
saved, not y, of each microbatch in flight; two tensors received ahead.
Huang et al. 2019 (GPipe), arXiv:1811.06965; Narayanan et al. 2021, arXiv:2104.04473. Differs: Megatron-LM has
a function for each schedule.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from minitrain.pipeline.deferred import Deferred
from minitrain.pipeline.fits import check_boundary, check_fits, takes_positions
from minitrain.pipeline.halves import Halves
from minitrain.pipeline.lower import Program, Receive, Reduce, Send, Sent, Step, lower, pause, user_of
from minitrain.pipeline.microbatches import Unit, cut_evenly, first_rows
from minitrain.pipeline.schedule import Action, F, Pair, Schedule, W
from minitrain.ranks import collectives
from minitrain.ranks.checks import require_device
from minitrain.ranks.random_state import drawing_from, random_state, set_random_state


@dataclass(slots=True)
class Kept:
    """What a forward leaves for its backward."""

    x: Tensor  # the input
    end: object = None  # where the graph of the output begins
    also: Tensor | None = None  # a loss of the stage's own, as of a router
    later: Deferred | None = None  # the products that W will do
    drawn: tuple[Tensor, ...] = ()  # the random state before F


class Runner:
    """A stage is a module `(x, positions) -> y`, or `x -> y`. Messages have its dtype and device.

    `down`, for NCCL, is a second group of the same ranks for the messages to lower ranks. `length_over` is
    what a boundary's T is divided by (sequence parallelism cuts it over tp). `check=False` is for stages that
    communicate themselves. `around("F1.2")` is entered around each action: `ledger.phase` makes an account by
    action. `memory` holds what a slice leaves to later ones (SliceMemory; `SliceMemory({})` for stages
    without attention). `cut(batch, schedule)` makes the units, if rows are not to be shared evenly.
    `at(step, first_row)` is told which rows of the global batch come next. `router_losses.collect(stage)`
    gives what a stage's forward adds to the loss by itself. `before_backward`, if set, is called once a step
    before the rank's first backward; where it says True, on all ranks alike, the forwards until then run
    again (post_validation.py). `pairs` lets the halves of a pair take turns, unless both are of one
    stage, whose parameters ZeRO-3 gathers for one pass at a time."""

    methods = {"F": "forward", "R": "forward_again", "B": "backward", "I": "backward", "W": "weights"}

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
        cut: Callable[..., list[Unit]] | None = None,
        at: Callable[[int, int], None] = lambda step, first_row: None,
        router_losses=None,
        pairs: Halves | None = None,
    ):
        require_device(device="cpu" if device is None else device)
        check_fits(stages, schedule, group)
        if schedule.slices > 1 and memory is None:
            rule = "slices of a sequence look at each other's keys; give memory=SliceMemory(cores)"
            raise ValueError(f"{schedule.name}: {rule}")
        self.stages, self.schedule, self.loss_fn, self.reducer = stages, schedule, loss_fn, reducer
        self.rank, self.group, self.down = group.rank(), group, down or group
        self.program = lower(schedule)[self.rank]
        tensors = (x for stage in stages.values() for x in (*stage.parameters(), *stage.buffers()))
        some = next((x for x in tensors if x.is_floating_point()), torch.empty(0))
        self.dtype, self.device = dtype or some.dtype, torch.device(device or some.device)
        self.width, self.length_over, self.around, self.pairs = width, length_over, around, pairs
        self.memory, self.cut, self.at, self.router_losses = memory, cut or cut_evenly, at, router_losses
        self.with_positions = {number for number, stage in stages.items() if takes_positions(stage)}
        self.uses = Counter(param for stage in stages.values() for param in stage.parameters())
        self.again = {action[1:] for action in schedule.place if action.kind == "R"}
        self.before_backward: Callable[[], bool] | None = None
        for number, stage in stages.items() if check else ():
            check_boundary(number, stage, schedule, width, self.dtype)

    def __call__(self, batch) -> Tensor:
        """This rank's part of the loss: zero on a rank without the last stage."""
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
        for handle in self.sending.values():
            handle.wait()
        return self.loss

    def start_again(self, filling: Program, drawn: tuple[Tensor, ...]) -> None:
        """Runs the forwards that fill the pipeline again; what they sent is received by all and dropped."""
        for what in list(self.boundary):
            self.take(what)
        stale = list(self.sending.values())
        set_random_state(drawn, self.device)
        self.begin()
        self.play(filling)
        for handle in stale:
            handle.wait()

    def begin(self) -> None:
        """A step starts with nothing kept and nothing on its way."""
        self.left = self.uses.copy()
        self.kept: dict[tuple[int, int], Kept] = {}
        # activations and gradients at the boundaries of stages: arrived, coming or to be sent; on their way
        self.boundary: dict[Action, Tensor | collectives.Handle] = {}
        self.sending: dict[Action, collectives.Handle] = {}
        self.loss = torch.zeros((), dtype=torch.promote_types(self.dtype, torch.float32), device=self.device)
        if self.memory:
            self.memory.clear()
        if self.router_losses:
            self.router_losses.forget()

    @cached_property
    def halves(self) -> tuple[Program, Program]:
        """The program before `before_backward`, and after it."""
        return pause(self.program, self.rank, self.schedule)

    def play(self, program: Program, start: int = 0) -> None:
        for number, step in enumerate(program[start:], start):
            try:
                self.do(step)
            except Exception as error:
                where = f"{step} failed, {neighbours(program, number)}: {error}"
                raise RuntimeError(f"{self.schedule.name}, rank {self.rank}: {where}") from error

    def do(self, step: Step) -> None:
        match step:
            case Send(what, to):
                self.sending[what] = self.send(self.boundary.pop(what), to)
            case Receive(what, source):
                self.boundary[what] = self.receive(source, *self.message(what), async_op=True)
            case Sent(what):
                self.sending.pop(what).wait()
            case Reduce(stage):
                params = list(self.stages[stage].parameters())
                self.left.subtract(params)
                self.reducer.on_step_grads([param for param in params if not self.left[param]])
            case Pair(forward, backward) if self.pairs and forward.stage != backward.stage:
                self.pairs.take_turns(self.run_action, self.turn, backward, forward)
            case Pair(forward, backward):
                self.act(forward)
                self.act(backward)
            case _:
                self.act(step)

    def act(self, action: Action) -> None:
        with self.turn(action):
            self.run_action(action)

    def run_action(self, action: Action) -> None:
        getattr(self, self.methods[action.kind])(action)

    @contextmanager
    def turn(self, action: Action) -> Iterator[None]:
        """Around an action, or each turn of it: tells `at` its rows, so that masks are drawn for them."""
        with self.around(str(action)):
            self.at(getattr(self.batch, "step", 0), self.first_rows[action.microbatch])
            yield

    def forward(self, action: Action) -> None:
        _, stage, unit = action
        x = self.units[unit][0] if stage == 0 else self.take(F(stage - 1, unit)).requires_grad_()
        again = (stage, unit) in self.again
        self.kept[stage, unit] = kept = Kept(x, drawn=random_state(self.device) if again else ())
        with torch.set_grad_enabled(not again):
            y = self.run_stage(stage, unit, kept)
        if kept.also is not None:
            self.loss += kept.also.detach()
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
        """Runs the stage, the last one with the loss; keeps the end of the graph, not the output."""
        _, targets, positions = self.units[unit]
        kept.later = Deferred() if W(stage, unit) in self.schedule.place else None
        with kept.later or nullcontext(), self.memory.during(stage, unit) if self.memory else nullcontext():
            y = self.run(stage, kept.x, positions)
        if stage == self.schedule.stages - 1:
            y = self.loss_fn(y, targets) / self.batch.num_valid
        also = self.router_losses.collect(stage) if self.router_losses else None
        kept.also = None if also is None else also / self.batch.num_valid
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
        ends += [(kept.also, None)] if kept.also is not None and kept.also.requires_grad else []
        ends += self.memory.ends(stage, unit) if self.memory else []
        if ends:
            torch.autograd.backward(*map(tuple, zip(*ends)))
        if action.kind == "B":
            self.reducer.on_microbatch_grads(self.stages[stage].parameters())
        if stage:
            dx = kept.x.grad
            if dx is None:  # the stage lets no gradient through, and its neighbour waits for one
                dx = torch.zeros(self.shape(unit), dtype=self.dtype, device=self.device)
            self.give(action, dx)
        kept.x = kept.end = kept.also = None

    def weights(self, action: Action) -> None:
        self.kept.pop((action.stage, action.microbatch)).later.weights()
        self.reducer.on_microbatch_grads(self.stages[action.stage].parameters())

    @torch.no_grad()
    def through(self, x: Tensor, positions: Tensor) -> Tensor | None:
        """Rows of tokens, the same on all ranks, through all stages: forward only, outside of any schedule.

        Returns the last stage's output on the first rank that has it (`last_rank`), None elsewhere."""
        shape = (len(x), positions.size(-1) // self.length_over, self.width)
        for stage in range(self.schedule.stages):
            here, there = self.home(stage), self.home(stage + 1)
            if self.rank == here:
                x = self.run(stage, x, positions)
                if there not in (here, None):
                    collectives.send(x, there, self.link(there))
            elif self.rank == there:
                x = self.receive(here, shape, self.dtype)
        return x if self.rank == self.last_rank else None

    def home(self, stage: int) -> int | None:
        """The first rank that has a stage."""
        ranks = range(len(self.schedule.ranks))
        return next((rank for rank in ranks if stage in self.schedule.stages_of(rank)), None)

    @property
    def last_rank(self) -> int:
        return self.home(self.schedule.stages - 1)

    def give(self, what: Action, x: Tensor) -> None:
        """To the neighbouring stage: the next step of the program sends x, or that stage is on this rank."""
        if user_of(what, self.schedule) is not None:
            self.boundary[what] = x

    def take(self, what: Action) -> Tensor:
        x = self.boundary.pop(what)
        return x if isinstance(x, Tensor) else x.wait()

    def link(self, other: int, incoming: bool = False) -> ProcessGroup:
        """Messages to higher ranks go over one group, those to lower ranks over the other."""
        return self.down if (other > self.rank) == incoming else self.group

    def send(self, x: Tensor, to: int) -> collectives.Handle:
        return collectives.send(x, to, self.link(to), async_op=True)

    def receive(self, source: int, shape: tuple[int, ...], dtype: torch.dtype, **settings):
        settings |= dict(shape=shape, dtype=dtype, device=self.device)
        return collectives.receive(None, source, self.link(source, incoming=True), **settings)

    def message(self, what: Action) -> tuple[tuple[int, ...], torch.dtype]:
        return self.shape(what.microbatch), self.dtype

    def shape(self, unit: int) -> tuple[int, int, int]:
        rows, length = self.units[unit][0].shape
        return rows, length // self.length_over, self.width

    def check_output(self, stage: int, unit: int, y: Tensor) -> None:
        if tuple(y.shape) != self.shape(unit) or y.dtype != self.dtype:
            found, expected = f"{list(y.shape)} {y.dtype}", f"{list(self.shape(unit))} {self.dtype}"
            rule = "cut the model where its width is the one given"
            raise ValueError(f"stage {stage} gives {found}, stage {stage + 1} expects {expected}; {rule}")


def neighbours(program: Program, number: int) -> str:
    """What is computed right before and after a step of the program."""
    computed = [str(step) if isinstance(step, (Action, Pair)) else "" for step in program]
    before = next(filter(None, reversed(computed[:number])), "nothing")
    return f"after {before} and before {next(filter(None, computed[number + 1 :]), 'the end')}"
