"""A lost worker's work goes to peers (ReCycle), a neighbour (Bamboo), whoever is free (SWARM). No torch.

    dp 2 x pp 2, worker (1, 1) is dead      worker (pipeline, stage); who lives is a rank, in this order
    rank 0  stage 0 of pipeline 0           rank 1  stage 1 of both pipelines
    rank 2  stage 0 of pipeline 1

Every stage has a copy in each data-parallel pipeline, so a lost worker's microbatches can go there. A stage
then stands on several ranks, as in Chimera, and the Runner plays the schedule; a step that a loss cut short
is made again on the copies (module redundancy).
"""

from collections import namedtuple
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from heapq import heappop, heappush

from minitrain.pipeline.schedule import F, Schedule
from minitrain.pipeline.schedules.greedy import greedy
from minitrain.pipeline.simulate import Simulation, Span, Time
from minitrain.ranks.checks import require_ints, require_positive, require_positive_ints


def rerouted(pipelines: int, stages: int, microbatches: int, dead: Collection[tuple] = ()) -> Schedule:
    """ReCycle: all pipelines as one schedule. Unit u is a microbatch of pipeline u % pipelines; those of a
    `dead` (pipeline, stage) go in turn to the living workers of that stage. Backwards are split: W fills what
    would be idle. On each rank as many microbatches are in flight as in 1F1B, twice that if somebody is dead.
    Raises ValueError where a stage has no worker left. The peers of a lost worker do 1/(pipelines - 1) more,
    a step takes that less what bubbles absorb. Gandhi et al. 2024 (ReCycle, SlipStream), arXiv:2405.14009,
    section 3. Differs: a list scheduler, theirs is an integer program; all stages update together."""
    require_positive_ints(pipelines=pipelines, stages=stages, microbatches=microbatches)
    lost, workers = set(map(tuple, dead)), [(p, s) for p in range(pipelines) for s in range(stages)]
    if strange := lost - set(workers):
        raise ValueError(f"dead={min(strange)}; a worker is (pipeline, stage) of {pipelines} x {stages}")
    alive = [worker for worker in workers if worker not in lost]
    peers = [[rank for rank, worker in enumerate(alive) if worker[1] == s] for s in range(stages)]
    if [] in peers:
        raise ValueError(f"stage {peers.index([])} is lost in every pipeline; a checkpoint has its state")
    units, home = range(pipelines * microbatches), {}
    for s in range(stages):
        moved = [u for u in units if (u % pipelines, s) in lost]
        home |= {(s, u): alive.index((u % pipelines, s)) for u in units if u not in moved}
        home |= {(s, u): peers[s][number % len(peers[s])] for number, u in enumerate(moved)}
    limit = [(stages - s) * (2 if lost else 1) for _, s in alive]
    name = f"ReCycle, {pipelines} x {stages}, m={microbatches}" + f", without {sorted(lost)}" * bool(lost)
    return replace(greedy(lambda *at: home[at], stages, len(units), limit=limit), name=name)


def redundant_forwards(run: Simulation, forward: Time) -> tuple[list[list[Span]], list[tuple[int, int]]]:
    """Bamboo: (of each rank the redundant forwards, (rank, microbatch) of those that do not fit). Rank r has
    the weights of stage r and of the next one (the last rank: of stage 0; twice the model in all), and runs
    the next one's forward too, `forward` long, in one piece, where it is idle after its own made the input.
    Raises ValueError unless rank r has stage r alone. A bubble that is long enough may come too early. Thorpe
    et al. 2023 (Bamboo), arXiv:2204.12013, section 5. Differs: idle time only; theirs also runs forwards that
    do not fit beside the rank's own work."""
    require_positive(forward=forward)
    schedule, last = run.schedule, len(run.spans) - 1
    if any(schedule.stages_of(rank) != [rank] for rank in range(last + 1)):
        raise ValueError(f"{schedule.name}: rank r needs stage r and no other")
    placed, left = [[] for _ in run.spans], []
    for rank, spans in enumerate(run.spans):
        edges = [0, *(edge for span in spans for edge in span[1:]), run.makespan]
        gaps = [[*gap] for gap in zip(edges[::2], edges[1::2])]
        for unit, made in sorted((s.entry.microbatch, s.end) for s in spans if s.entry.kind == "F"):
            ready = 0 if rank == last else made  # rows of the batch
            gap = next((gap for gap in gaps if gap[1] - max(gap[0], ready) >= forward), None)
            if gap is None:
                left.append((rank, unit))
            else:
                start = max(gap[0], ready)
                gap[0] = start + forward
                placed[rank].append(Span(F((rank + 1) % (last + 1), unit), start, gap[0]))
    return placed, left


def failover(stages: int, microbatches: int, dead: int) -> Schedule:
    """Bamboo after a preemption: the rank before (of rank 0: the last) runs both stages, and no state moves.
    Raises ValueError where there is no other rank."""
    require_ints(2, stages=stages)
    require_ints(0, stages - 1, dead=dead)
    alive = [s for s in range(stages) if s != dead]
    place = [alive.index((dead - 1) % stages if s == dead else s) for s in range(stages)]
    schedule = greedy(place, stages, microbatches, split=False)
    return replace(schedule, name=f"Bamboo, p={stages}, m={microbatches}, without {dead}")


# When each microbatch left the last stage (s), how many each peer did, how often one vanished with a unit
Streamed = namedtuple("Streamed", "finished done again")
Speeds = Sequence[Sequence[float]]  # of each peer of each stage, microbatches/s


def stream(peers: Speeds, microbatches: int, leaves: Mapping[tuple[int, int], float] = {}) -> Streamed:
    """SWARM's wiring: a microbatch goes to the peer of its next stage that would end it first.
    `leaves[stage, peer]` is when one vanishes with all that waits for it: the senders, which still have these
    inputs, ask another one.
    Raises ValueError if a stage has no peer left. Ryabinin et al. 2023 (SWARM), arXiv:2301.11913, section
    3.2. Differs: speeds are known, theirs are estimated; forwards only, no time for messages."""
    require_positive_ints(microbatches=microbatches)
    require_positive(peers=list(map(tuple, peers)))
    free, done = [[0.0] * len(speeds) for speeds in peers], [[0] * len(speeds) for speeds in peers]
    coming, finished, again = [(0.0, unit, 0) for unit in range(microbatches)], [0.0] * microbatches, 0
    while coming:
        now, unit, stage = heappop(coming)
        there = [peer for peer in range(len(free[stage])) if leaves.get((stage, peer), now + 1) > now]
        if not there:
            raise ValueError(f"stage {stage} has no peer left after {now} s; let one migrate there")
        ends = {peer: max(now, free[stage][peer]) + 1 / peers[stage][peer] for peer in there}
        peer = min(ends, key=ends.get)
        end = free[stage][peer] = ends[peer]
        if (gone := leaves.get((stage, peer), end)) < end:
            again += 1
            heappush(coming, (gone, unit, stage))
            continue
        done[stage][peer] += 1
        if stage + 1 < len(peers):
            heappush(coming, (end, unit, stage + 1))
        else:
            finished[unit] = end
    return Streamed(finished, done, again)


def migrate(peers: Speeds) -> list[list[float]]:
    """SWARM's balance: the slowest peer of the fastest stage moves to the slowest stage, while that brings
    both closer. Differs: by speeds; theirs compares queues, and moves one peer per interval."""
    stages = [sorted(speeds) for speeds in peers]
    require_positive(peers=stages)
    while sum(fast := max(stages, key=sum)) - sum(slow := min(stages, key=sum)) > fast[0]:
        slow.append(fast.pop(0))
        slow.sort()
    return stages
