"""Who is next: pod by pod, gangs in an order, and two jobs on the same devices.

    pods      a job holds what it gets and waits for the rest: two jobs of 8 on 12 devices have 6 each
    gang      all devices of a job or none, first come, first served: the second waits, both end
    sjf srtf  the same with the shortest first; srtf stops who runs if somebody shorter comes
    lucid     two jobs on the same devices if their loads fit: each a little slower, nobody waits

Policies for `simulate` (jobs.py). On one device shortest first has the least mean completion time (Smith
1956). Durations, which Lucid predicts from earlier jobs, are known here. Kubernetes' own scheduler places
pods one by one. Hu et al. 2023, ASPLOS (Lucid). Differs: no trial runs measure loads; jobs say them.
"""

from collections.abc import Callable

from minitrain.systems.cluster.jobs import Job, Policy, Share, free_devices, place


def pods(now_s, waiting, running, nodes) -> dict[Job, Share]:
    """Device by device, by turns."""
    free, shares = free_devices(running.values(), nodes), dict.fromkeys(waiting, Share((), 0.0)) | running
    while any(free) and (short := [job for job in shares if shares[job].count < job.devices]):
        for job in sorted(short, key=lambda job: job.at_s):
            node = next((i for i, left in enumerate(free) if left), None)
            if node is not None:
                free[node] -= 1
                devices = dict(shares[job].devices)
                devices[node] = devices.get(node, 0) + 1
                shares[job] = Share(tuple(devices.items()), 0.0)
    for job, share in shares.items():
        if share.count == job.devices:  # a gang goes at the speed of its slowest
            shares[job] = share._replace(rate=min(job.rate(nodes[i].kind) for i, _ in share.devices))
    return {job: share for job, share in shares.items() if share.devices}


def in_order(key: Callable[[Job], float], preempt: bool = False) -> Policy:
    """Gangs, the least `key` first; the first that does not fit keeps the others waiting."""

    def policy(now_s, waiting, running, nodes):
        shares = {} if preempt else dict(running)
        free = free_devices(shares.values(), nodes)
        for job in sorted([*waiting, *(running if preempt else ())], key=key):
            before = running.get(job)
            if before and all(free[node] >= count for node, count in before.devices):
                for node, count in before.devices:
                    free[node] -= count
                shares[job] = before
            elif share := place(job, free, nodes):
                shares[job] = share
            elif not preempt:
                break
        return shares

    return policy


gang = in_order(lambda job: job.at_s)
sjf = in_order(lambda job: job.work_s)
srtf = in_order(lambda job: job.left_s, preempt=True)


def lucid(order=lambda job: job.work_s) -> Policy:
    """Gangs, shortest first. Where devices are short, a job shares those of another of its size if their
    loads are 1 together at most; both go 1/1.1 as fast until one ends. No triples."""

    def policy(now_s, waiting, running, nodes):
        def shared(job, devices, partner=None) -> Share:
            alone = job.rate(nodes[devices[0][0]].kind)
            return Share(devices, alone / 1.1 if partner else alone, partner)

        shares = {}
        for job, share in running.items():
            shares[job] = shared(job, share.devices, share.partner if share.partner in running else None)
        free = free_devices(shares.values(), nodes)
        for job in sorted(waiting, key=order):
            alike = (one for one in shares if one.devices == job.devices and not shares[one].partner)
            fits = [other for other in alike if other.load + job.load <= 1]
            if share := place(job, free, nodes):
                shares[job] = share
            elif fits:
                other = min(fits, key=lambda other: other.load)
                devices = shares[other].devices
                shares[other], shares[job] = shared(other, devices, job), shared(job, devices, other)
        return shares

    return policy
