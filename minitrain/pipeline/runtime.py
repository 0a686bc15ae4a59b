"""One interpreter for every schedule: runs this rank's program, action by action, with the messages between.

    run = Runner({1: stage}, schedule, group, loss_fn, reducer, width=D)     {number: module} of this rank
    loss = run(batch)                                                        a train_step's `forward_backward`

    F   x: tokens, or received   y = stage(x, positions)      in flight: x, the graph of y; y is sent
    B   dy: received             backward through the graph   x.grad goes back, the graph is free
    I   the same for x only (deferred.py)            W   the deferred products: gradients of the weights
    R   the stage once more from x (its F built no graph), with the random numbers that F drew

Every rank is given the same rows. What the ranks return adds up to the loss, a sum over tokens /
`batch.num_valid`. Sends, per microbatch and boundary between ranks, rows · T · D elements forward and as many
backward. Memory: x and what autograd saved, not y, of each microbatch in flight; two tensors received ahead.
Huang et al. 2019 (GPipe), arXiv:1811.06965; Narayanan et al. 2021, arXiv:2104.04473 (a function a schedule).
"""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from minitrain.pipeline.deferred import Deferred
from minitrain.pipeline.lower import Receive, Reduce, Send, Sent, Step, lower, messages, user_of
from minitrain.pipeline.schedule import Action, F, Pair, Schedule, W, parts
from minitrain.ranks import collectives, launch
from minitrain.ranks.random_state import drawing_from, random_state

Unit = tuple[Tensor, Tensor, Tensor]  # tokens, targets, positions of a microbatch or a slice


class RunnerHooks:
    """What a technique does at named points of a step; here nothing."""

    for_slices = False  # lets the slices of a sequence see each other

    def begin(self, runner: "Runner") -> None:
        """Nothing is in flight: a step begins, or its forwards are about to run again."""

    def around(self, runner: "Runner", action: Action) -> AbstractContextManager:
        """A context for an action, or for each turn of one that is interrupted."""
        return nullcontext()

    def extra_loss(self, stage: int) -> Tensor | None:
        """What the stage's forward adds to the loss by itself, a sum over tokens."""

    def extra_roots(self, stage: int, unit: int) -> list[tuple[Tensor, Tensor]]:
        """(tensor, gradient): where a backward begins besides the stage's output."""
        return []

    def play(self, runner: "Runner") -> bool:
        """Runs the program of a step, on all ranks alike; False: it leaves that to the runner."""
        return False

    def run_pair(self, runner: "Runner", pair: Pair) -> bool:
        """Runs a forward and a backward as one; False: it leaves them to the runner, one after the other."""
        return False


class Around(RunnerHooks):
    """Enters `context("F1.2")` around each action: Around(ledger.phase) makes an account by action."""

    def __init__(self, context: Callable[[str], AbstractContextManager]):
        self.context = context

    def around(self, runner: "Runner", action: Action) -> AbstractContextManager:
        return self.context(str(action))


class WholeStages(RunnerHooks):
    """Breadth-first on ZeRO stage 3: a stage is gathered once for all its microbatches.

        actions       F0.0 F0.1 F0.2   F2.0 F2.1 F2.2   B2.0 B2.1 B2.2   B0.0 B0.1 B0.2    rank 0 of 2, v=2
        all_gather    stage 0          stage 2          stage 2          stage 0

    Until another stage or direction is next on this rank, what is gathered stays whole, gradients add up in
    it. Sends 2 gathers and a reduce-scatter of each stage per step, where else each of m microbatches does.
    Memory: one stage whole, and in backward its gradients. Lamy-Poirier 2023, arXiv:2211.05953, section 4.
    Differs: gathers run ahead inside of a stage only."""

    def __init__(self, schedule: Schedule, rank: int):
        alike = lambda a, b: a.stage == b.stage and (a.kind == "F") == (b.kind == "F")
        actions = parts(schedule.ranks[rank])
        self.followed = {action for action, after in pairwise(actions) if alike(action, after)}

    def around(self, runner: "Runner", action: Action) -> AbstractContextManager:
        runner.reducer.keep_gathered(runner.stages[action.stage].parameters(), action in self.followed)
        return nullcontext()


@dataclass(slots=True)
class InFlight:
    """What a forward leaves for its backward."""

    x: Tensor
    output: object = None  # where the graph of the output begins
    extra_loss: Tensor | None = None  # of the stage itself, as of a router
    deferred: Deferred | None = None  # the products that W will do
    random_state: tuple[Tensor, ...] = ()  # before F, for R


def cut_evenly(batch, schedule: Schedule) -> list[Unit]:
    """The units of a batch. Rows need not divide evenly among the microbatches."""
    (rows, length), name = batch.tokens.shape, schedule.name
    slices, lengths = schedule.slices, schedule.lengths
    microbatches = schedule.microbatches // slices
    if rows < microbatches:
        raise ValueError(f"{name}: {microbatches} microbatches, but this rank has {rows} rows; use fewer")
    if length < slices or lengths and sum(lengths) != length:
        wanted = f"{slices} slices" + f" of {sum(lengths)}" * bool(lengths)
        raise ValueError(f"{name}: {wanted} tokens, and the batch has {length}; make both fit")
    ends, positions = list(accumulate(lengths))[:-1] or slices, batch.positions
    if positions is None:
        positions = torch.arange(length, device=batch.tokens.device)
    rows = zip(batch.tokens.tensor_split(microbatches), batch.targets.tensor_split(microbatches))
    return [unit for row in rows for unit in zip(*(x.tensor_split(ends, dim=-1) for x in (*row, positions)))]


class Runner:
    """A stage is a module `(x, positions) -> y`, or `x -> y`; between stages x is
    `[rows, T / sequence_shards, width]` of `dtype`, by default the stage's. `down`, for NCCL, is a second
    group of the same ranks for messages to lower ranks."""

    methods = {"F": "forward", "R": "forward_again", "B": "backward", "I": "backward", "W": "weights"}
    cut = staticmethod(cut_evenly)

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        schedule: Schedule,
        group: ProcessGroup,
        loss_fn: Callable[[Tensor, Tensor], Tensor],
        reducer,
        *,
        width: int,
        dtype: torch.dtype | None = None,
        sequence_shards: int = 1,
        down: ProcessGroup | None = None,
        hooks: Sequence[RunnerHooks] = (),
    ):
        check_fits(stages, schedule, group)
        if schedule.slices > 1 and not any(hook.for_slices for hook in hooks):
            rule = "slices of a sequence look at each other's keys; give hooks=[SliceMemory(cores)]"
            raise ValueError(f"{schedule.name}: {rule}")
        self.stages, self.schedule, self.loss_fn, self.reducer = stages, schedule, loss_fn, reducer
        self.rank, self.group, self.down, self.hooks = group.rank(), group, down or group, list(hooks)
        self.program = lower(schedule)[self.rank]
        tensors = [x for stage in stages.values() for x in (*stage.parameters(), *stage.buffers())]
        self.dtype = dtype or next((x.dtype for x in tensors if x.is_floating_point()), torch.float32)
        self.device = next((x.device for x in tensors), None) or launch.device()
        self.width, self.sequence_shards = width, sequence_shards
        named = lambda stage: inspect.signature(stage.forward).parameters
        self.with_positions = {number for number, stage in stages.items() if "positions" in named(stage)}
        self.uses = Counter(param for stage in stages.values() for param in stage.parameters())
        self.recomputed = {action[1:] for action in schedule.place if action.kind == "R"}
        homes = {stage: rank for rank in range(group.size())[::-1] for stage in schedule.stages_of(rank)}
        self.homes = [homes[stage] for stage in range(schedule.stages)]  # the first rank that has a stage
        if down is None and collectives.queues_messages(group, self.device):
            cure = "give down=, a second group of the same ranks (mesh.twin('pp'))"
            raise ValueError(f"{schedule.name}: messages both ways would wait for each other on NCCL; {cure}")
        self.open_links()

    def __call__(self, batch) -> Tensor:
        self.batch, self.units, self.device = batch, self.cut(batch, self.schedule), batch.tokens.device
        self.reducer.enabled = False  # the program says when gradients are complete
        self.begin()
        if not any(hook.play(self) for hook in self.hooks):
            self.play(self.program)
        for handle in self.sending.values():
            handle.wait()
        return self.loss

    def open_links(self) -> None:
        """An empty message over each link, in one order. At the first NCCL makes a pair's communicator, and
        both hosts wait there: a receive posted early would wait for what its rank does later."""
        for source, to in sorted(messages(self.schedule)):
            if self.rank == source:
                self.send(torch.empty(0, dtype=self.dtype, device=self.device), to).wait()
            elif self.rank == to:
                self.receive(source, (0,), self.dtype)

    def begin(self) -> None:
        self.gradients_due = self.uses.copy()
        self.in_flight: dict[tuple[int, int], InFlight] = {}
        # activations and gradients at the boundaries of stages: here, coming or to be sent; on their way
        self.boundary: dict[Action, Tensor | collectives.Handle] = {}
        self.sending: dict[Action, collectives.Handle] = {}
        self.loss = torch.zeros((), dtype=torch.promote_types(self.dtype, torch.float32), device=self.device)
        for hook in self.hooks:
            hook.begin(self)

    def play(self, program: Sequence[Step]) -> None:
        for step in program:
            try:
                self.do(step)
            except Exception as error:
                where = f"{self.schedule.name}, rank {self.rank}: {step} failed"
                raise RuntimeError(f"{where}: {error}") from error

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
                self.gradients_due.subtract(params)
                self.reducer.on_step_grads([param for param in params if not self.gradients_due[param]])
            case Pair(forward, backward):
                if not any(hook.run_pair(self, step) for hook in self.hooks):
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
        with ExitStack() as stack:
            for hook in self.hooks:
                stack.enter_context(hook.around(self, action))
            yield

    def forward(self, action: Action) -> None:
        _, stage, unit = action
        x = self.units[unit][0] if stage == 0 else self.get(F(stage - 1, unit)).requires_grad_()
        again = (stage, unit) in self.recomputed
        state = random_state(self.device) if again else ()
        self.in_flight[stage, unit] = mine = InFlight(x, random_state=state)
        with torch.set_grad_enabled(not again):
            y = self.run_stage(stage, unit, mine)
        if mine.extra_loss is not None:
            self.loss += mine.extra_loss.detach()
        if stage == self.schedule.stages - 1:
            self.loss += y.detach()
        else:
            self.check_output(stage, unit, y)
            self.put(action, y.detach())

    def forward_again(self, action: Action) -> None:
        mine = self.in_flight[action[1:]]
        with drawing_from(mine.random_state, self.device):
            self.run_stage(action.stage, action.microbatch, mine)

    def run_stage(self, stage: int, unit: int, mine: InFlight) -> Tensor:
        """The stage, the last one with the loss; leaves the end of the graph, not the output."""
        _, targets, positions = self.units[unit]
        mine.deferred = Deferred() if W(stage, unit) in self.schedule.place else None
        with mine.deferred or nullcontext():
            y = self.run(stage, mine.x, positions)
        if stage == self.schedule.stages - 1:
            y = self.loss_fn(y, targets) / self.batch.num_valid
        for hook in self.hooks:
            if (loss := hook.extra_loss(stage)) is not None:
                mine.extra_loss = loss / self.batch.num_valid
        if y.requires_grad:
            mine.output = y if y.dim() == 0 else torch.autograd.graph.get_gradient_edge(y)
        return y

    def run(self, stage: int, x: Tensor, positions: Tensor) -> Tensor:
        return self.stages[stage](x, *((positions,) if stage in self.with_positions else ()))

    def backward(self, action: Action) -> None:
        _, stage, unit = action
        mine = self.in_flight[stage, unit] if action.kind == "I" else self.in_flight.pop((stage, unit))
        dy = None if stage == self.schedule.stages - 1 else self.get(self.schedule.backward(stage + 1, unit))
        roots = [] if mine.output is None else [(mine.output, dy)]
        if mine.extra_loss is not None and mine.extra_loss.requires_grad:
            roots.append((mine.extra_loss, None))
        for hook in self.hooks:
            roots += hook.extra_roots(stage, unit)
        if roots:
            torch.autograd.backward(*map(tuple, zip(*roots)))
        if action.kind == "B":
            self.reducer.on_microbatch_grads(self.stages[stage].parameters())
        if stage:  # if no gradient comes through, its neighbour still waits for one
            zeros = partial(torch.zeros, self.shape(unit), dtype=self.dtype, device=self.device)
            self.put(action, zeros() if mine.x.grad is None else mine.x.grad)
        mine.x = mine.output = mine.extra_loss = None

    def weights(self, action: Action) -> None:
        self.in_flight.pop(action[1:]).deferred.weights()
        self.reducer.on_microbatch_grads(self.stages[action.stage].parameters())

    @torch.no_grad()
    def through(self, x: Tensor, positions: Tensor) -> Tensor | None:
        """Rows of tokens, the same on all ranks, forward through all stages, outside of any schedule: the
        last one's output, on the first rank that has it (`homes[-1]`)."""
        self.device, shape = x.device, (len(x), positions.size(-1) // self.sequence_shards, self.width)
        for stage, (here, there) in enumerate(pairwise([*self.homes, self.homes[-1]])):
            if self.rank == here:
                x = self.run(stage, x, positions)
                if there != here:
                    collectives.send(x, there, self.link(there))
            elif self.rank == there:
                x = self.receive(here, shape, self.dtype)
        return x if self.rank == self.homes[-1] else None

    def put(self, what: Action, x: Tensor) -> None:
        """For the neighbouring stage: the program's next step sends x, or that stage is on this rank."""
        if user_of(what, self.schedule) is not None:
            self.boundary[what] = x

    def get(self, what: Action) -> Tensor:
        x = self.boundary.pop(what)
        return x if isinstance(x, Tensor) else x.wait()

    def link(self, other: int, incoming: bool = False) -> ProcessGroup:
        """Messages to higher ranks go over one group, those to lower ranks over the other."""
        return self.down if (other > self.rank) == incoming else self.group

    def send(self, x: Tensor, to: int) -> collectives.Handle:
        return collectives.send(x, to, self.link(to), async_op=True)

    def receive(self, source: int, shape: tuple[int, ...], dtype: torch.dtype, async_op: bool = False):
        form = dict(shape=shape, dtype=dtype, device=self.device, async_op=async_op)
        return collectives.receive(None, source, self.link(source, incoming=True), **form)

    def message(self, what: Action) -> tuple[tuple[int, ...], torch.dtype]:
        return self.shape(what.microbatch), self.dtype

    def shape(self, unit: int) -> tuple[int, int, int]:
        rows, length = self.units[unit][0].shape
        return rows, length // self.sequence_shards, self.width

    def check_output(self, stage: int, unit: int, y: Tensor) -> None:
        if tuple(y.shape) != self.shape(unit) or y.dtype != self.dtype:
            found, expected = f"{list(y.shape)} {y.dtype}", f"{list(self.shape(unit))} {self.dtype}"
            rule = "cut the model where its width is the one given"
            raise ValueError(f"stage {stage} gives {found}, stage {stage + 1} expects {expected}; {rule}")


def check_fits(stages: Mapping[int, nn.Module], schedule: Schedule, group: ProcessGroup) -> None:
    rank, size, ranks = group.rank(), group.size(), len(schedule.ranks)
    if ranks != size:
        raise ValueError(f"{schedule.name} is for {ranks} ranks, and the group has {size}; make it fit")
    if sorted(stages) != schedule.stages_of(rank):
        found = f"rank {rank} runs the stages {schedule.stages_of(rank)}, but was given {sorted(stages)}"
        raise ValueError(f"{schedule.name}: {found}; build those that schedule.stages_of(rank) names")
