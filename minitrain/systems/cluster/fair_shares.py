"""Fair shares of devices of several kinds: Gavel's linear program and its rounds, Gandiva-fair's trade.

Gavel      x[job, kind] is the share of time that a job spends on a kind; its throughput is linear in x, so
           the allocation whose worst normalised throughput is best is a linear program. Normalised: by what
           the job has with 1/n of every kind; the worst has 1 at least. Rounds make shares of time real: who
           lags most behind its share of a kind has it in the next round.
trade      Two users have equal tickets of fast and of slow devices. A fast one is worth `speedup` slow ones,
           to each user another number: at a price between the two both gain, and no device is lost.

Narayanan et al. 2020, OSDI (Gavel), sections 4.1 and 5; Chaudhary et al. 2020, EuroSys (Gandiva-fair),
section 3.4. Differs: Gavel's priority is a quotient of share and time received, ours a difference; no pairs
of jobs on one device; two users trade once, at the mean of their speed-ups.
"""

from collections.abc import Callable, Mapping, Sequence
from math import inf

from minitrain.ranks.checks import require_nonempty, require_positive
from minitrain.systems.cluster.jobs import Job, Policy, place
from minitrain.systems.plan.integer_program import IntegerProgram


def equal_shares(speeds: Sequence[Sequence[float]], devices, capacity) -> list[float]:
    """Throughput of each job with 1/n of every kind, as much of it as one job can use."""
    share = lambda row, wants: sum(v * min(1, c / (len(speeds) * wants)) for v, c in zip(row, capacity))
    return [min(share(row, wants), max(row)) for row, wants in zip(speeds, devices)]


def max_min(speeds: Sequence[Sequence[float]], devices: Sequence[int], capacity: Sequence[int]):
    """(x[job][kind], normalised throughput of the worst job): speeds[job][kind] on all its devices[job], of
    kinds with capacity[kind] devices. Needs scipy."""
    require_nonempty(speeds=speeds, devices=devices, capacity=capacity)
    require_positive(speeds=speeds, devices=devices, capacity=capacity)
    if len(devices) != len(speeds):
        raise ValueError(f"{len(speeds)} jobs have speeds, {len(devices)} have devices; give both for each")
    equal, program = equal_shares(speeds, devices, capacity), IntegerProgram()
    jobs, kinds, x = range(len(speeds)), range(len(capacity)), lambda j, k: ("free", j, k)
    most = max(max(row) / own for row, own in zip(speeds, equal))  # the worst is a part of this
    for j in jobs:
        program.add({x(j, k): speeds[j][k] / equal[j] for k in kinds} | {("free", "worst"): -most}, 0, inf)
        program.add({x(j, k): 1 for k in kinds}, 0, 1)
    for k in kinds:
        program.add({x(j, k): devices[j] for j in jobs}, 0, capacity[k])
    found = program.values({("free", "worst"): -1})
    return [[found[x(j, k)] for k in kinds] for j in jobs], most * found["free", "worst"]


def gavel(round_s: float, speed: Callable[[Job, str], float] = Job.rate) -> Policy:
    """For simulate(.., round_s=round_s). Shares are solved anew when a job comes or ends. `speed` is what the
    program believes; a constant makes it blind to kinds of devices."""
    require_positive(round_s=round_s)
    target, since, received = {}, 0.0, {}

    def policy(now_s, waiting, running, nodes):
        nonlocal target, since, received
        jobs, kinds = [*running, *waiting], list(dict.fromkeys(node.kind for node in nodes))
        for job, share in running.items():
            key = job, nodes[share.devices[0][0]].kind
            received[key] = received.get(key, 0) + round_s
        if not jobs:
            return {}
        if {job for job, _ in target} != set(jobs):
            speeds = [[speed(job, kind) for kind in kinds] for job in jobs]
            room = [sum(node.devices for node in nodes if node.kind == kind) for kind in kinds]
            x, _ = max_min(speeds, [job.devices for job in jobs], room)
            target = {(job, kind): x[j][k] for j, job in enumerate(jobs) for k, kind in enumerate(kinds)}
            since, received = now_s, {}
        lag = {key: share * (now_s - since + round_s) - received.get(key, 0) for key, share in target.items()}
        free, shares = [float(node.devices) for node in nodes], {}
        for job, kind in sorted(lag, key=lambda key: (-lag[key], key[0].at_s, key[0].name)):
            if job not in shares and (share := place(job, free, nodes, [kind])):
                shares[job] = share
        return shares

    return policy


def trade(tickets: Mapping[str, Mapping[str, float]], speedup: Mapping[str, float], price=None) -> dict:
    """{user: {"fast", "slow"}} after who gains most from a fast device has bought all it can from who gains
    least, for `price` slow ones each (by default midway between the two speed-ups)."""
    require_nonempty(tickets=tickets, speedup=speedup)
    require_positive(speedups=list(speedup.values()), price=1 if price is None else price)
    seller, buyer = min(speedup, key=speedup.get), max(speedup, key=speedup.get)
    price = (speedup[seller] + speedup[buyer]) / 2 if price is None else price
    fast = min(tickets[seller]["fast"], tickets[buyer]["slow"] / price)
    after = {user: dict(devices) for user, devices in tickets.items()}
    for user, bought in ((buyer, fast), (seller, -fast)):
        after[user]["fast"] += bought
        after[user]["slow"] -= price * bought
    return after
