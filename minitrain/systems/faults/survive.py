"""Training that goes on when ranks die, and when others come, without a disk.

    backward, sums     gradients are complete
    vote               all ranks add up two numbers: who has entered has whole gradients, who has passed may
    update, publish    update

    after a death      nobody has passed: the step is made again, by those who are left
                       somebody has, so all have entered: those that have not updated do so now

So survivors stand at the same step without a copy of anything, and no finished step is lost. A new layout is
voted for likewise: loaded, entered, passed; until then what it is loaded from is the truth. What a rank of it
needs comes from pieces that others have (live.py). Where a state has one holder, as in ZeRO, it comes from
`Copies`, of the last step that was copied; those after it are made again.

Sends 16 bytes per rank and step for the vote, an all-reduce; after a death what live.py says. Memory: while a
layout changes, both. Lost: some state is on no rank any more, and `restore` has none from a disk. An error
that no death explains is raised as it is. Thorpe et al. 2023, Bamboo, NSDI, and Gandhi et al. 2024, ReCycle,
SOSP: peers go on in place of a restart. Differs: one all-reduce commits the step for all, in place of
redundant computation; any layout for any number of ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from minitrain.ranks import collectives
from minitrain.ranks.checks import require_positive
from minitrain.ranks.launch.team import NEW, Finished, Status, Team
from minitrain.systems.checkpoint.in_memory import Lost, gather_plain
from minitrain.systems.faults.live import Copies, Live

DEATHS = (RuntimeError, ConnectionError)  # what a collective raises when a member is gone


@dataclass
class Survivor:
    """`build(ranks)` makes a Run for so many ranks, `batch_of(run, step)` this rank's part of a batch; every
    `copies_every` steps each share is copied to a neighbour (0: never). `restore(run)` loads the newest
    checkpoint into a run and gives its step, or None. All ranks of a launch with `survive` make one,
    newcomers too, and call `train`. ValueError: a step of the run changes more than a vote commits."""

    team: Team
    build: Callable[[int], Any]
    batch_of: Callable[[Any, int], Any]
    clip: float | None = None
    copies_every: int = 0
    restore: Callable[[Any], int | None] = lambda run: None

    def __post_init__(self):
        require_positive(clip=1 if self.clip is None else self.clip)
        self.copies = Copies(self.copies_every)
        self.run, self.shares = None, []  # what it has to give, as it is when its groups go
        self.done, self.losses = 0, {}
        self.votes, self.entered = -1, None  # passed so far; the number of one under way, and what to do then
        self.history: list[tuple[int, int, int]] = []  # (steps done, ranks, generation) of each group
        self.redone = self.moved_bytes = 0

    def train(self, steps: int, before_step: Callable[[int], None] = lambda step: None) -> dict[int, float]:
        """{step: loss of its global batch}, whoever has made it. `before_step` is called after the last, too,
        and may send; after `train` nobody may, for ranks may be gone."""
        error = None
        while True:
            try:
                if error or self.run is None:
                    self._start(error)
                error = None
                self.team.beat(self.done)
                before_step(self.done)
                if self.done >= steps:
                    self._vote(lambda loss: None)  # that all have made the last step
                    break
                self.run.step(self.batch_of(self.run, self.done), self.clip)
                self.copies.keep(self.votes, self.done, self.run)
            except DEATHS as death:
                if death is error:  # nobody's
                    raise
                error = death
            except Finished:
                break
        self.team.finish()
        return self.losses

    def _vote(self, commit: Callable[[float], None], loss: float = 0.0) -> None:
        """When one rank has passed all have entered; not before it, each does what `commit(sum)` says."""
        self.entered = self.votes + 1, commit
        word = torch.tensor([loss, float(self.team.changed)], dtype=torch.float64)
        total, changed = collectives.all_reduce(word, collectives.world(), name="vote").tolist()
        if changed:
            raise RuntimeError("members have come or gone: everybody regroups")
        self._pass(total)

    def _pass(self, total: float) -> None:
        (self.votes, commit), self.entered, self.total = self.entered, None, total
        commit(total)

    def _catch_up(self, said: dict[int, Status]) -> Status:
        """A vote that another member has passed all have entered: pass it, too. `said`: how many votes each
        member has passed, and the sum of its last one."""
        most, total = max(said.values())
        if self.entered and self.entered[0] == most:
            self._pass(total)
        self.entered = None
        if self.run is not None and not self.shares and not self.copies_every:
            self.shares = [(self.run.pieces(), self.run.plain_state())]
        return self._status()

    def _status(self) -> Status:
        return NEW if self.run is None else (self.votes, self.total)

    def _attach(self, run) -> None:
        """The update of this run comes after a vote; what its collectives bring to other ranks, after it."""
        forward_backward = run.forward_backward
        counts = run.tp_group is None or run.tp_group.rank() == 0  # its ranks have the same loss

        def noted(batch):
            self.loss = forward_backward(batch)
            return self.loss

        def commit(make) -> None:
            def update(total: float) -> None:
                self.losses[self.done] = total
                make()
                self.done += 1

            self._vote(update, self.loss.item() * counts)

        run.forward_backward, run.sync.commit, self.run, self.shares = noted, commit, run, []

    def _start(self, error: Exception | None) -> None:
        """Regroup, and put a run of these ranks in the place of the old one."""
        if error:
            self.team.regroup(self._status(), self._catch_up, error)
        world = collectives.world()
        known = self._status()[0], self.done, list(self.losses.items()), self.history
        votes, done, losses, history = max(gather_plain(known, world), key=lambda known: known[0])
        self.team.beat(done)
        new = self.build(world.size())
        if new.late or new.scale or new.strategy.products != "plain" or new.config and new.config.experts:
            more = "biases of experts, scales of a loss or of products, post-validation"
            raise ValueError(f"a vote commits parameters and states of the optimizer, and not {more}")
        self.votes = votes
        done = self._fill(new, done, "all are newcomers" * (min(self.team.members) >= self.team.ranks))

        def adopt(total: float) -> None:
            self.redone += max(0, self.done - done)
            self.done, self.losses = done, {step: loss for step, loss in losses if step < done}
            self.history = [*map(tuple, history), (done, world.size(), self.team.generation)]
            self._attach(new)

        self._vote(adopt)
        self.copies.keep(self.votes, done, new, first=True)

    def _fill(self, new, done: int, why: str) -> int:
        """The step that `new` is at now: the last that is whole on ranks, or a checkpoint's, or if some state
        has not been lost (`why`) the first."""
        try:
            if self.votes >= 0:
                if self.copies_every:
                    done, self.shares = self.copies.whole(collectives.world())
                live = Live(self.shares, collectives.world())
                new.load_pieces(live)
                self.moved_bytes += live.moved_bytes
                return done
        except ValueError as error:
            why = str(error)
        step = self.restore(new)
        if step is None and why:
            raise Lost(f"no rank has the whole state any more ({why}), and no checkpoint has it")
        return step or 0
