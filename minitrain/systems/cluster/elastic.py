"""How many devices a job gets, and of which kind: Pollux, Sia, Crius.

Pollux   goodput = samples per second · (noise + M0)/(noise + M): how many samples go through, times how much
         one of a batch of M is worth beside one of M0. `noise` is tr(Sigma)/|G|^2, of gradients at two batch
         sizes (McCandlish et al. 2018, appendix A.1). Devices are dealt out so that the sum is largest
Sia      a job has a worth for each (kind, count); one of them each, within the devices of every kind: an
         integer program at each event; a change is worth less to a young job, whose restart costs it more
Crius    the same, where the worth of (kind, count) is that of the best plan there, not of the job's own plan

Qiao et al. 2021, OSDI (Pollux), sections 3 and 4.2; Jayaram Subramanya et al. 2023, SOSP (Sia), section 3.4;
Xue et al. 2024 (Crius). Differs: sums, without their powers for fairness; Pollux is exact here, by dynamic
programming, where it has a genetic search; Crius estimates its cells, ours are predicted plan by plan.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf

from minitrain.plan.planner import Task, layouts, needs
from minitrain.plan.predict.predicted_step import predict
from minitrain.plan.predict.work import WorkOf
from minitrain.ranks.checks import require_nonempty, require_positive, require_positive_ints
from minitrain.systems.cluster.jobs import Job, Policy, free_devices, place
from minitrain.systems.plan.integer_program import IntegerProgram

Configuration = tuple[str, int]  # kind of device, how many


def noise_scale(small: int, big: int, square_small: float, square_big: float) -> float:
    """From the mean squares of gradients of batches of two sizes: E|g_B|^2 = |G|^2 + tr(Sigma)/B."""
    require_positive_ints(small=small, more=big - small)
    require_positive(square_small=square_small, square_big=square_big)
    if not square_big <= square_small < big / small * square_big:
        found = f"mean squares of {square_small:g} at {small} and {square_big:g} at {big}"
        raise ValueError(f"{found}: of enough steps the second is less, by {big / small:g} times at most")
    signal = (big * square_big - small * square_small) / (big - small)
    return (square_small - square_big) / (1 / small - 1 / big) / signal


def goodput(samples_per_s: Callable[[int, int], float], noise: float, batch_0: int) -> Callable:
    """(devices, batch) -> samples of batch_0's worth per second; samples_per_s has the same arguments."""
    require_positive(noise=noise, batch_0=batch_0)
    return lambda n, batch: samples_per_s(n, batch) * (noise + batch_0) / (noise + batch)


def pollux(worth: Sequence[Sequence[float]], devices: int) -> tuple[list[int], float]:
    """(devices of each job, their sum of worth[job][n]), the largest there is: a knapsack, job by job."""
    require_nonempty(worth=worth)
    require_positive_ints(4096, devices=devices)
    best, choices = [0.0] * (devices + 1), []
    for job in worth:
        most = len(job) - 1
        both = [max((best[d - n] + job[n], n) for n in range(min(d, most) + 1)) for d in range(devices + 1)]
        best, choice = map(list, zip(*both))
        choices.append(choice)
    left, counts = devices, []
    for choice in reversed(choices):
        counts.append(choice[left])
        left -= choice[left]
    return counts[::-1], best[devices]


def sia(worth: Sequence[Mapping], capacity: Mapping[str, int]) -> dict[int, Configuration]:
    """{job: configuration} of the largest sum; who is not in it waits. Needs scipy."""
    require_nonempty(worth=worth, capacity=capacity)
    program, costs = IntegerProgram(), {}
    for j, choices in enumerate(worth):
        program.add({(j, *choice): 1 for choice in choices}, 0, 1)
        costs |= {(j, *choice): -value for choice, value in choices.items()}
    for kind, room in capacity.items():
        if used := {name: name[2] for name in costs if name[1] == kind}:
            program.add(used, -inf, room)
    return {j: (kind, count) for j, kind, count in sorted(program.solve(costs))}


def elastic(speed: Callable[[Job, str, int], float] = Job.rate) -> Policy:
    """Sia as a policy: a quarter, a half, all or twice the devices that a job asks for, of one kind; worth is
    its speed beside the slowest of these. `speed` is what the program believes. With one kind: Pollux's."""

    def policy(now_s, waiting, running, nodes):
        jobs, capacity, worth = [*running, *waiting], {}, []
        had = {job: (nodes[share.devices[0][0]].kind, share.count) for job, share in running.items()}
        for node in nodes:
            capacity[node.kind] = capacity.get(node.kind, 0) + node.devices
        for job in jobs:
            counts = {max(1, job.devices * quarters // 4) for quarters in (1, 2, 4, 8)}
            choices = [(kind, n) for kind, most in capacity.items() for n in sorted(counts) if n <= most]
            speeds = {choice: fast for choice in choices if (fast := speed(job, *choice)) > 0}
            age, least = now_s - job.at_s, min(speeds.values(), default=1)
            moved = age / (age + job.restart_s) if job in had and age else 1
            worth.append({c: v / least * (1 if c == had.get(job) else moved) for c, v in speeds.items()})
        chosen = {jobs[j]: choice for j, choice in sia(worth, capacity).items()} if any(worth) else {}
        shares = {job: running[job] for job, choice in chosen.items() if had.get(job) == choice}
        free = free_devices(shares.values(), nodes)
        for job in sorted(chosen.keys() - shares.keys(), key=lambda job: (-chosen[job][1], job.at_s)):
            shares[job] = place(job, free, nodes, [chosen[job][0]], chosen[job][1])
        return shares

    return policy


def cells(tasks: Iterable[Task], work_of: WorkOf, allowed: Callable = lambda plan: True) -> dict:
    """{(device, ranks): the fastest allowed plan that fits} of a task for each kind and count of devices."""
    found = {}
    for task in tasks:
        plans = (predict(task.run(plan), work_of) for plan in layouts(task) if allowed(plan))
        if fits := [plan for plan in plans if needs(plan) <= task.room_bytes]:
            found[task.machine.device.name, task.ranks] = min(fits, key=lambda plan: plan.step_s)
    return found
