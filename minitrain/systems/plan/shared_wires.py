"""Traffic that meets on a wire, played by simulate/links.py: buses, cards, jobs, regions. No torch.

    bounced      a message through the host's memory, in pieces (without GPUDirect), or from card to card
    uploads      devices that leave through switches of a PCIe tree
    sums_and_saves   a ring's step while a checkpoint is saved, on the same network or on another (front-end)
    compatibility, best_shift, shifts, iterations    jobs on one link, and when each should start (CASSINI)
    slow_link    bytes of a step on a link between regions: pipeline or data parallel

Rajasekaran et al. 2024 (CASSINI), NSDI; Strati et al. 2024, ML training with geo-distributed GPUs.
Differs: traffic is on or off; no packets.
"""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import lcm

from minitrain.pipeline.simulate import divided
from minitrain.ranks.checks import require_ints, require_nonnegative, require_positive
from minitrain.systems.simulate.links import Number, Run, Task, play


def bounced(size: Number, card: Number, bus: Number, pieces: int) -> Run:
    """From a device over its bus to the host, over the card, over the bus to the other device; each store
    passes a piece on when it has all of it. Direct, only the card's seconds are left."""
    require_positive(size=size, card=card, bus=bus)
    require_ints(1, 1 << 12, pieces=pieces)
    rates, tasks, part = {"up": bus, "card": card, "down": bus}, [], divided(size, pieces)
    for i in range(pieces):
        before = ()
        for wire in rates:
            tasks.append(Task(f"{wire} {i}", wire, part, (wire,), before))
            before = (f"{wire} {i}",)
    return play(tasks, rates)


def uploads(devices: Sequence[int], size: Number, per_switch: int, rate: Number) -> Run:
    """The devices send `size` each to the host; every link of the tree, a switch's too, has `rate`."""
    require_positive(size=size, rate=rate)
    require_ints(0, 1 << 12, devices=list(devices))
    require_ints(1, 1 << 12, per_switch=per_switch)
    paths = {device: (f"device {device}", f"switch {device // per_switch}") for device in devices}
    rates = {link: rate for path in paths.values() for link in path}
    return play([Task(f"{device}", f"{device}", size, path) for device, path in paths.items()], rates)


def sums_and_saves(hosts: int, size: Number, saved: Number, savers: int, apart: bool) -> Run:
    """Each host sends `size` to the next, the first `savers` send `saved` to a store with a link for each."""
    require_ints(2, 1 << 12, hosts=hosts)
    require_ints(0, hosts, savers=savers)
    require_nonnegative(size=size, saved=saved)
    tasks = [Task(f"sum {i}", f"ring {i}", size, (f"back {i}",)) for i in range(hosts)]
    network = "front" if apart else "back"
    tasks += [Task(f"save {i}", f"save {i}", saved, (f"{network} {i}", "store")) for i in range(savers)]
    rates = {f"{side} {i}": 1 for side in ("front", "back") for i in range(hosts)}
    return play(tasks, rates | {"store": max(1, savers)})


Job = tuple[int, int]  # (period, seconds of it with traffic, which come first), whole seconds


def compatibility(jobs: Sequence[Job], shifts: Sequence[int]) -> Fraction:
    """1 minus the share of time, weighed by how many too many send, in which a link has more than one job."""
    require_ints(1, 1 << 12, jobs=[list(job) for job in jobs])
    circle = lcm(*(period for period, _ in jobs))
    sending = lambda t: sum((t - shift) % period < on for (period, on), shift in zip(jobs, shifts))
    return 1 - Fraction(sum(max(0, sending(t) - 1) for t in range(circle)), circle)


def best_shift(first: Job, second: Job) -> int:
    """Of the second job; the smallest of the best."""
    require_ints(1, 1 << 12, jobs=[list(first), list(second)])
    return max(range(second[0]), key=lambda shift: compatibility((first, second), (0, shift)))


def shifts(edges: Mapping[tuple[str, str], Number]) -> dict[str, Number] | None:
    """One shift for each job from those that its links ask for, {(job, link): shift}: along the graph of jobs
    and links from the first job of each part, at 0. None if a loop does not agree."""
    found: dict[str, Number] = {}
    for first, _ in edges:
        if first not in found:
            found[first] = 0
            for _ in edges:  # no path is longer
                for (job, link), shift in edges.items():
                    if job in found:
                        found.setdefault(link, found[job] - shift)
                    if link in found:
                        found.setdefault(job, found[link] + shift)
    agree = all(found[job] - shift == found[link] for (job, link), shift in edges.items())
    return {job: found[job] for job, _ in edges} if agree else None


def iterations(shift: int, compute: int, sync: int, rounds: int) -> list[Number]:
    """Seconds of the last iteration of two equal jobs, the second of which starts `shift` seconds late, that
    share a link by turns of `sync` and `compute` seconds."""
    require_ints(0, 1 << 12, shift=shift, compute=compute, sync=sync)
    require_ints(2, 1 << 10, rounds=rounds)
    tasks = [Task("late", "job 1", shift)]
    for job in range(2):
        for i in range(rounds):
            tasks.append(Task(f"sync {job}.{i}", f"job {job}", sync, ("link",)))
            tasks.append(Task(f"compute {job}.{i}", f"job {job}", compute))
    run = play(tasks, {"link": 1})
    last = [[run.end(f"compute {job}.{rounds - i}") for i in (1, 2)] for job in range(2)]
    return [end - before for end, before in last]


def slow_link(parameters: int, activations: int, microbatches: int, bytes_per_s: Number) -> dict[str, Number]:
    """Seconds a step on a full-duplex link between two regions, elements of 2 bytes: "pipeline": activations
    of every microbatch there, gradients back; "data": a sum of all gradients, each sent once each way."""
    require_ints(1, parameters=parameters, activations=activations, microbatches=microbatches)
    require_positive(bytes_per_s=bytes_per_s)
    elements = {"pipeline": activations * microbatches, "data": parameters}
    return {what: divided(2 * count, bytes_per_s) for what, count in elements.items()}
