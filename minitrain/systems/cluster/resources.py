"""What a job needs beside devices: CPUs, switches that add, a dispatcher, and someone to look at results.

Synergy   each job the CPUs that it needs to be as fast as with an equal share, the rest where they help most
HIRE      a job's sums in a switch near its servers, or in none, as switches have few slots: an assignment
Pathways  one controller enqueues programs, in one order on all devices, without waiting for results
Acme      an evaluation has a GPU while it runs one; loading before and metrics after are on CPUs

Mohan et al. 2022, OSDI (Synergy), section 3; Blöcher et al. 2021, ASPLOS (HIRE); Barham et al. 2022, MLSys
(Pathways), section 4; Hu et al. 2024, NSDI (Acme), section 6.2. Differs: CPUs alone, of one server, no
memory; an integer program in place of a flow network; no failures are diagnosed from logs (systems/faults).
"""

from collections.abc import Callable, Hashable, Mapping, Sequence

from minitrain.ranks.checks import require_nonempty, require_positive, require_positive_ints
from minitrain.systems.cluster.jobs import Job, Node, simulate
from minitrain.systems.cluster.orders import gang
from minitrain.systems.plan.integer_program import IntegerProgram


def synergy(throughput: Sequence[Callable[[int], float]], cpus: int) -> list[int]:
    """CPUs of each job, throughput[job](cpus) with less and less gain per CPU: then no split is better."""
    require_nonempty(throughput=throughput)
    require_positive_ints(10**4, cpus=cpus, cpus_per_job=cpus // len(throughput))
    equal = cpus // len(throughput)
    given = [min(c for c in range(equal + 1) if curve(c) >= curve(equal)) for curve in throughput]
    gain = lambda j: throughput[j](given[j] + 1) - throughput[j](given[j])
    for _ in range(cpus - sum(given)):
        given[max(range(len(given)), key=gain)] += 1
    return given


def hire(hops: Sequence[Mapping[Hashable, int]], slots: Mapping[Hashable, int]) -> list:
    """The switch of each job, None for servers alone, so that the sum of hops[job][switch or None] is least
    and no switch has more jobs than slots. Needs scipy."""
    require_nonempty(hops=hops)
    program, costs = IntegerProgram(), {}
    for job, choices in enumerate(hops):
        program.add({(job, switch): 1 for switch in choices}, 1, 1)
        costs |= {(job, switch): count for switch, count in choices.items()}
    for switch, room in slots.items():
        program.add({name: 1 for name in costs if name[1] == switch}, 0, room)
    chosen = program.solve(costs)
    if chosen is None:
        raise ValueError("HIRE: more jobs need a switch than there are slots; give jobs a choice None")
    return [switch for _, switch in sorted(chosen, key=lambda name: name[0])]


def dispatched_s(programs: int, enqueue_s: float, compute_s: float, asynchronous: bool = True) -> float:
    """Until the last program ends. Asynchronous: the controller enqueues the next while devices compute."""
    require_positive_ints(10**6, programs=programs)
    require_positive(enqueue_s=enqueue_s, compute_s=compute_s)
    enqueued = ended = 0.0
    for _ in range(programs):
        enqueued = (enqueued if asynchronous else ended) + enqueue_s
        ended = max(enqueued, ended) + compute_s
    return ended


def run_gangs(queues: Sequence[Sequence[Hashable]]) -> tuple[list, list]:
    """(programs in the order they ran, those that never do): one runs when it is first on every device that
    has it, as its collectives need them all."""
    require_nonempty(queues=queues)
    left, done = [list(queue) for queue in queues], []
    first = lambda name: all(queue[0] == name for queue in left if name in queue)
    while ready := list(filter(first, dict.fromkeys(queue[0] for queue in left if queue))):
        done.append(ready[0])
        left = [queue[1:] if queue[:1] == ready[:1] else queue for queue in left]
    return done, list(dict.fromkeys(name for queue in left for name in queue))


def evaluated(tasks: int, load_s: float, run_s: float, metric_s: float, gpus: int, split: bool):
    """(GPU seconds, seconds until the last metric is there). `split`: the model is loaded once, into the
    memory of the servers, and metrics are computed on CPUs, of which there are enough."""
    require_positive_ints(10**4, tasks=tasks, gpus=gpus)
    require_positive(load_s=load_s, run_s=run_s, metric_s=metric_s)
    on_gpu = run_s if split else load_s + run_s + metric_s
    jobs = [Job(str(i), load_s if split else 0.0, 1, on_gpu) for i in range(tasks)]
    found = simulate(jobs, [Node("gpu", gpus)], gang)
    return found.working_s, found.makespan_s + (metric_s if split else 0)
