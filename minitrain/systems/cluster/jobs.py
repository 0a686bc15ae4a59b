"""Jobs on a cluster, from event to event; who gets which devices is a policy, an argument. No torch.

    outcome = simulate(trace(60, seed=0), nodes, policy)        .mean_jct_s .makespan_s .stuck .history
    policy(now_s, waiting, running, nodes) -> {job: Share}      asked at each arrival, each end and each round

`waiting` are jobs, `running` is {job: Share}; whoever is not in the answer stops, and waits. A Share is
devices by node and the rate of work on them (0: they are reserved, and idle); of devices that it shares with
its `partner` it has half each. A job that has begun and gets other devices stands still for `restart_s`.

Nothing is random but the trace: 5 % of its jobs, pretraining, take about 90 % of the device time, as in Acme
(Hu et al. 2024, NSDI, section 3). Differs: times and sizes are drawn, none is from a published trace; nodes
never fail (systems/simulate/failures.py).
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import NamedTuple

from minitrain.ranks import checks


class Node(NamedTuple):
    kind: str
    devices: int


@dataclass(eq=False)
class Job:
    """`work_s` is seconds on the `devices` it asks for, of a kind of speed 1; on n of them it goes
    (n / devices)^scaling times as fast, if `speeds` have no (kind, n). `load`: of a device, what it uses."""

    name: str
    at_s: float
    devices: int
    work_s: float
    speeds: Mapping = field(default_factory=dict)  # by kind of device; 1 where nothing is said
    scaling: float = 1.0
    load: float = 1.0
    restart_s: float = 0.0
    left_s: float = 0.0  # of work_s: simulate counts it down

    def rate(self, kind: str, devices: int = 0) -> float:
        n = devices or self.devices
        scaled = self.speeds.get(kind, 1.0) * (n / self.devices) ** self.scaling
        return self.speeds.get((kind, n), scaled)


class Share(NamedTuple):
    devices: tuple[tuple[int, int], ...]  # (node, how many)
    rate: float  # work_s per second
    partner: Job | None = None

    count = property(lambda self: sum(count for _, count in self.devices))
    part = property(lambda self: 0.5 if self.partner else 1.0)  # of each device


Policy = Callable[[float, list[Job], dict[Job, Share], Sequence[Node]], dict[Job, Share]]


@dataclass(frozen=True)
class Outcome:
    """Device seconds with work and without among those given away; `history`: (from when, {name: Share})."""

    jct_s: dict[str, float]  # job completion time: from arrival to end
    left_s: dict[str, float]  # of jobs that did not end
    makespan_s: float
    working_s: float
    idle_s: float
    restarts: int
    history: list[tuple[float, dict[str, Share]]]

    stuck = property(lambda self: list(self.left_s))
    mean_jct_s = property(lambda self: sum(self.jct_s.values()) / len(self.jct_s))


def simulate(jobs: Sequence[Job], nodes: list[Node], policy: Policy, round_s=None, until_s=inf) -> Outcome:
    """Until all jobs end, nobody works and nobody comes, or `until_s`. The jobs given stay as they are."""
    checks.require_nonempty(jobs=jobs, nodes=nodes)
    checks.require_positive(works_s=[job.work_s for job in jobs], round_s=1 if round_s is None else round_s)
    coming = sorted((replace(job, left_s=job.work_s) for job in jobs), key=lambda job: job.at_s)
    present, shares, still, jct, history = [], {}, {}, {}, []
    now = working = idle = 0.0
    restarts, next_round = 0, round_s or inf
    while coming or present:
        while coming and coming[0].at_s <= now:
            present.append(coming.pop(0))
        new = policy(now, [job for job in present if job not in shares], dict(shares), nodes)
        free_devices(new.values(), nodes)
        for job, share in new.items():
            moved = job not in shares or shares[job].devices != share.devices
            if moved and job.left_s < job.work_s:
                still[job], restarts = job.restart_s, restarts + 1
        shares = new
        history.append((now, {job.name: share for job, share in shares.items()}))
        ends = [still.get(job, 0) + job.left_s / share.rate for job, share in shares.items() if share.rate]
        arrivals = [job.at_s - now for job in coming[:1]]
        if not ends and not arrivals:
            break
        step = min(*ends, *arrivals, next_round - now, until_s - now, inf)
        for job, share in shares.items():
            works = max(0.0, step - still.get(job, 0.0)) if share.rate else 0.0
            still[job] = max(0.0, still.get(job, 0.0) - step)
            job.left_s -= works * share.rate
            working += works * share.count * share.part
            idle += (step - works) * share.count * share.part
        now += step
        next_round += round_s if round_s and now >= next_round else 0
        for job in [job for job in shares if job.left_s <= 1e-9 * job.work_s]:
            jct[job.name] = now - job.at_s
            present.remove(job)
            del shares[job]
        if now >= until_s:
            break
    left = {job.name: job.left_s for job in [*present, *coming]}
    return Outcome(jct, left, now, working, idle, restarts, history)


def free_devices(shares, nodes: Sequence[Node]) -> list[float]:
    """Of each node. ValueError if more are given away than there are."""
    free = [float(node.devices) for node in nodes]
    for share in shares:
        for node, count in share.devices:
            free[node] -= count * share.part
            if free[node] < -1e-9:
                has, given = nodes[node].devices, nodes[node].devices - free[node]
                raise ValueError(f"node {node} has {has} devices, {given:g} are given away; give fewer")
    return free


def place(job: Job, free: list[float], nodes: Sequence[Node], kinds=None, count: int = 0) -> Share | None:
    """All `count` devices (by default what it asks for) or none, whole ones of one kind, on as few nodes as
    there are: the fullest node where all fit, else the emptiest first. Taken off `free`."""
    left = count = count or job.devices
    for kind in kinds or dict.fromkeys(node.kind for node in nodes):
        there = {i: int(free[i] + 1e-9) for i, node in enumerate(nodes) if node.kind == kind and free[i] >= 1}
        if sum(there.values()) < count:
            continue
        fits = [i for i in there if there[i] >= count]
        order = [min(fits, key=there.get)] if fits else sorted(there, key=lambda i: -there[i])
        taken = []
        while left:
            node = order.pop(0)
            taken.append((node, min(left, there[node])))
            free[node] -= taken[-1][1]
            left -= taken[-1][1]
        return Share(tuple(taken), job.rate(kind, count))
    return None


SORTS = {  # of jobs: devices, hours, load, and what they reach on slow devices
    "evaluation": ((1, 2), 0.1, (0.2, 0.5), (0.7, 0.9)),
    "tuning": ((8, 16), 1.0, (0.4, 0.9), (0.4, 0.7)),
    "pretraining": ((32, 64), 12.0, (0.95, 1.0), (0.3, 0.4)),
}


def trace(jobs: int, seed: int) -> list[Job]:
    """Evaluations (70 %), fine-tuning (25 %) and pretraining (5 %), a job per 20 minutes on average. What
    computes much gains most from fast devices."""
    checks.require_positive_ints(10**5, jobs=jobs)
    checks.require_ints(seed=seed)
    draw, made, now = random.Random(seed), [], 0.0
    for number in range(jobs):
        now += draw.expovariate(1 / 1200)
        what = draw.choices(list(SORTS), [0.7, 0.25, 0.05])[0]
        devices, hours, load, slow = SORTS[what]
        size, work_s = draw.choice(devices), 3600 * hours * draw.lognormvariate(0, 0.7)
        speeds, scaling = {"slow": draw.uniform(*slow)}, draw.uniform(0.6, 0.95)
        load = draw.uniform(*load)
        made.append(Job(f"{what} {number}", now, size, work_s, speeds, scaling, load, restart_s=60.0))
    return made
