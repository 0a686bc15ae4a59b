"""What a layer should keep: every unbeaten trade of bytes for time, over its results; and stages on the host.

    front(units)                 [Choice(bytes, time, kept)], from full recomputation to none
    over_layers(front, 12)       the same for 12 layers, each with a choice of its own
    offloaded(actions, size, r)  a stage whose activations wait on the host: time, most held at once

A layer is a list of units; each has a result of so many bytes. Backward needs some of the results. One that
is not kept is computed again from what is kept, with all between: kept bytes against time once more. With m
results there are 2^m choices. Units are decided from the last to the first; of two that must still be able to
compute the same results, one that is larger and slower is let go, so few remain.

A forward's activations leave for the host while later actions run, and come back during the action in front
of their backward: nothing is lost while size / rate is no more than the shortest of these actions.
Yuan et al. 2024, "Accelerating the training of large language models using efficient activation
rematerialization and optimal hybrid parallelism", USENIX ATC '24, sections 3 and 4. Differs: the units and
their figures are a model's (account.py), not a profile of one GPU; parallel layouts are not searched.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from minitrain.pipeline.partition import Number, check_costs, undominated
from minitrain.plan.simulate.links import Task, play


class Unit(NamedTuple):
    name: str
    time: Number  # of its forward
    bytes: Number  # of what is kept if its result is
    inputs: tuple[str, ...] = ()  # the units whose results it reads; what it reads besides is always there
    needed: bool = True  # by backward


class Choice(NamedTuple):
    bytes: Number
    time: Number  # of what is computed again
    kept: tuple[str, ...]
    again: tuple[str, ...]

    @property
    def word(self) -> str:
        """As Strategy.recompute says it."""
        if not self.again:
            return "none"
        return "keep:" + "+".join(self.kept) if self.kept else "full"


def front(units: Sequence[Unit]) -> list[Choice]:
    """The choices that no other beats or equals in bytes and time, smallest first."""
    check_units(units)
    unbeaten = {frozenset(): [((0, 0), ((), ()))]}  # results wanted by units behind -> (costs, (kept, again))
    for unit in reversed(units):
        found: dict[frozenset, list] = {}
        for wanted, plans in unbeaten.items():
            others = wanted - {unit.name}
            for (size, time), (kept, again) in plans:
                if not (unit.needed or unit.name in wanted):
                    found.setdefault(others, []).append(((size, time), (kept, again)))
                    continue
                more = (size + unit.bytes, time), ((unit.name, *kept), again)
                found.setdefault(others, []).append(more)
                more = (size, time + unit.time), (kept, (unit.name, *again))
                found.setdefault(others | set(unit.inputs), []).append(more)
        unbeaten = {wanted: undominated(plans) for wanted, plans in found.items()}
    return [Choice(*costs, *plan) for costs, plan in unbeaten[frozenset()]]


def over_layers(choices: Sequence[Choice], layers: int) -> list[tuple[Number, Number, str]]:
    """(bytes, time, words) of so many equal layers, each of which chooses: what no other beats."""
    if layers < 1 or not choices:
        raise ValueError(f"over_layers: {len(choices)} choices for {layers} layers; give 1 or more of both")
    unbeaten = [((0, 0), (0,) * len(choices))]
    for _ in range(layers):
        unbeaten = undominated(
            ((size + one.bytes, time + one.time), (*counts[:i], counts[i] + 1, *counts[i + 1 :]))
            for (size, time), counts in unbeaten
            for i, one in enumerate(choices)
        )
    return [(*costs, words(choices, counts)) for costs, counts in unbeaten]


def words(choices: Sequence[Choice], counts: Sequence[int]) -> str:
    parts = [(choice.word, times) for choice, times in zip(choices, counts) if times]
    return ",".join(word if times == 1 else f"{word}*{times}" for word, times in parts)


def check_units(units: Iterable[Unit]) -> None:
    seen: list[Unit] = []
    for unit in units:
        before = [one.name for one in seen]
        if unit.name in before:
            raise ValueError(f"front: two units are called {unit.name!r}; give each a name of its own")
        if late := [name for name in unit.inputs if name not in before]:
            raise ValueError(f"front: {unit.name} reads {late[0]!r}; a unit reads results of units before it")
        check_costs(f"front, {unit.name}", time=[unit.time], bytes=[unit.bytes])
        seen.append(unit)


class Offload(NamedTuple):
    time: Number
    most_held: int  # microbatches whose activations are on the device, on their way included


def offloaded(actions: Sequence[tuple], size: Number, rate: Number, away=None) -> Offload:
    """One rank's actions ("F" or "B", microbatch, time) in order, with the activations of the microbatches
    `away` on the host meanwhile (of all that have two actions or more between their F and B). A link each
    way, `rate` bytes a time unit. They leave behind their F and are fetched from the start of the action in
    front of their B. A forward waits until all but the last of those in front of it have left."""
    if rate <= 0 or size < 0:
        raise ValueError(f"offloaded: {size} bytes at {rate}; use 0 bytes or more, and a rate above 0")
    names = [action[:2] for action in actions]
    between = {m: names.index(("B", m)) - names.index(("F", m)) - 1 for kind, m in names if kind == "F"}
    away = {m for m, others in between.items() if others >= 2} if away is None else set(away)
    if near := sorted(m for m in away if not between.get(m)):
        raise ValueError(f"offloaded: microbatch {near[0]} has no action between F and B; it has to stay")
    tasks, left, before = [], [], ()
    for (kind, microbatch, time), then in zip(actions, [*names[1:], None]):
        needs = tuple(left[:-1]) if kind == "F" else (f"in {microbatch}",) * (microbatch in away)
        tasks.append(Task(f"{kind}{microbatch}", "rank", time, after=needs))
        if kind == "F" and microbatch in away:
            left.append(f"out {microbatch}")
            tasks.append(Task(left[-1], "out", size, ("up",), after=(f"F{microbatch}",)))
        if then and then[0] == "B" and then[1] in away:
            needs = *before, *needs, f"out {then[1]}"
            tasks.append(Task(f"in {then[1]}", "in", size, ("down",), after=needs))
        before = (f"{kind}{microbatch}",)
    run = play(tasks, {"up": rate, "down": rate})
    spans = [(run.start(f"F{m}"), run.end(f"out {m}" if m in away else f"B{m}")) for m in between]
    spans += [(run.start(f"in {m}"), run.end(f"B{m}")) for m in away]
    held = [sum(begin <= moment < end for begin, end in spans) for moment, _ in spans]
    return Offload(max(map(run.end, run.lane("rank")), default=0), max(held, default=0))
