"""How the benchmarks measure: two functions in turns, A B A B, in one run on the same ranks; a ratio of
medians.

A time on a shared machine means little; two times taken in turns can be compared. `ratio` is better when
lower.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from minitrain.ranks import launch
from minitrain.ranks.collectives import channel_of
from minitrain.ranks.devices import now
from minitrain.ranks.launch import shared_cores

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results.json"
BEGIN, END = "<!-- table: make bench -->", "<!-- end of table -->"


@dataclass(frozen=True)
class Row:
    """One line of the table. `ratio` = ours / theirs (for a share of the hardware: our time / time at the
    best rate).
    """

    name: str
    peer: str
    ours: float
    theirs: float
    unit: str
    ratio: float
    goal: float
    machine: str


def row(name: str, peer: str, ours: float, theirs: float, unit: str, goal: float) -> Row:
    return Row(name, peer, round(ours, 4), round(theirs, 4), unit, round(ours / theirs, 3), goal, machine())


def machine() -> str:
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.partition(":")[2].strip()
            for line in cpuinfo.read_text().splitlines()
            if line.startswith("model name")
        ]
        model = names[0] if names else model
    gpu = f", {torch.cuda.get_device_name(0)}" if torch.cuda.is_available() else ""
    return f"{os.cpu_count()} cores, {model}{gpu}, torch {torch.__version__}"


def in_turns(
    ours: Callable[[], object],
    theirs: Callable[[], object],
    rounds: int = 15,
    warmup: int = 3,
    meet: Callable[[], object] = lambda: None,
) -> tuple[list[float], list[float]]:
    """Seconds of each call, taken alternately; `meet` (a barrier) starts all ranks together, and the order
    swaps every round.

    Ours runs as minitrain's ranks do, theirs as Linux starts a thread (see `stock_group`).
    """
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(-warmup, rounds):
        for which in (0, 1) if turn % 2 == 0 else (1, 0):
            if _STOCK_LOOPS:
                policy = ((os.SCHED_BATCH, shared_cores.SLICE_NS), (os.SCHED_OTHER, 0))[which]
                shared_cores.schedule(os.getpid(), *policy)
            meet()
            started = now(launch.device())
            (ours, theirs)[which]()
            if turn >= 0:
                times[which].append(now(launch.device()) - started)
    calmed = [thread for thread in _STOCK_LOOPS if os.sched_getscheduler(thread) != os.SCHED_OTHER]
    assert not calmed, (
        f"the peer's event loops {calmed} run with our priority; give stock_group() all groups of ours"
    )
    return times


def stock_group(*ours: dist.ProcessGroup, ranks: list[int] | None = None) -> dist.ProcessGroup:
    """A group of all ranks, or of some, for the peer, as torch makes it: its own connections and its own
    event loop.

    On a group shared with the peer our transport would change what is measured: it has Linux treat the rank,
    and all event loops there are when it first uses a group, in another way (`shared_cores`), and gloo's own
    collectives become up to 3 times as fast. So the groups that are `ours` are used first, and the peer's
    loop is made by a thread as Linux starts it; `in_turns` looks at it once more in the end.
    """
    for group in (dist.group.WORLD, *ours):
        channel_of(group)
    known = shared_cores.event_loops()
    shared_cores.schedule(os.getpid(), os.SCHED_OTHER)
    group = dist.new_group(ranks, use_local_synchronization=ranks is not None)
    shared_cores.schedule(os.getpid(), os.SCHED_BATCH, shared_cores.SLICE_NS)
    _STOCK_LOOPS.extend(set(shared_cores.event_loops()) - set(known))
    return group


_STOCK_LOOPS: list[int] = []  # threads of the peer


def slowest_then_median(per_rank: list[tuple[list[float], list[float]]]) -> tuple[float, float]:
    """A collective step is as slow as its slowest rank: the maximum over ranks of each round, then the median
    over rounds.
    """
    return tuple(
        statistics.median(
            max(rank[which][turn] for rank in per_rank) for turn in range(len(per_rank[0][which]))
        )
        for which in (0, 1)
    )


def one_after_the_other(
    launches: list[list[tuple[list[float], list[float]]]],
) -> list[tuple[list[float], list[float]]]:
    """Each rank's turns of all launches as if they were of one."""
    return [
        tuple([seconds for turns in rank for seconds in turns[side]] for side in (0, 1))
        for rank in zip(*launches)
    ]


def most_in(name: str, profiler: torch.profiler.profile) -> int:
    """The most bytes that torch's allocator had given out while `record_function(name)` was open."""
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    measured = next(event for event in events if event.name() == name)
    live = most = 0
    for event in events:
        if event.name() == "[memory]":
            live += event.nbytes()
            if measured.start_ns() <= event.start_ns() <= measured.end_ns():
                most = max(most, live)
    return most


def save(rows: list[Row]) -> None:
    """Merge into results.json (a row of the same name and peer is replaced) and rewrite the table in
    README.md.
    """
    known = (
        {(old["name"], old["peer"]): old for old in json.loads(RESULTS.read_text())}
        if RESULTS.exists()
        else {}
    )
    known |= {(new.name, new.peer): asdict(new) for new in rows}
    RESULTS.write_text(json.dumps(list(known.values()), indent=1) + "\n")
    readme = FOLDER / "README.md"
    head, _, rest = readme.read_text().partition(BEGIN)
    readme.write_text(f"{head}{BEGIN}\n{table(list(known.values()))}\n{END}{rest.partition(END)[2]}")


def table(rows: list[dict]) -> str:
    lines = [
        "| what | against | ours | theirs | unit | ratio | goal | |",
        "|---|---|--:|--:|---|--:|--:|---|",
    ]
    for r in rows:
        verdict = "met" if r["ratio"] <= r["goal"] else "**not met**"
        lines.append(
            f"| {r['name']} | {r['peer']} | {r['ours']:g} | {r['theirs']:g} | {r['unit']} | {r['ratio']:.2f} "
            f"| {r['goal']:.2f} | {verdict} |"
        )
    machines = sorted({r["machine"] for r in rows})
    return "\n".join(lines) + "\n\n" + "\n".join(f"Measured on: {name}." for name in machines)
