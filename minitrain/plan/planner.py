"""The fastest way to train a model on so many devices: every layout that could be, and the best that fit.

    task = Task(presets["llama3-70b"], machine("h100"), ranks=512, batch=1024, length=8192)
    best, second, *_ = search(task, work_of)          Predictions: .run.strategy .step_s .mfu .memory .parts
    why(best, second)                                 where the second loses its time
    pareto(search(task, work_of))                     those that are slower need less memory

`layouts` are sizes of tp, pp, cp and dp, and for each: rows of a microbatch, stage of ZeRO, schedule, what is
computed again. Experts on several nodes are reached node by node. One fits if its predicted bytes are at most
`room` of the device's memory less RESERVED: the rest is for workspaces and holes. All are predicted;
systems/plan/search looks at less, of larger spaces.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import product

from minitrain.model.config import GPTConfig, divisors
from minitrain.plan.predict.predicted_step import Prediction, memory, predict
from minitrain.plan.predict.rates import Rates
from minitrain.plan.predict.training_run import STACKS, Stack, TrainingRun
from minitrain.plan.predict.work import WorkOf
from minitrain.plan.simulate.machines import Machine
from minitrain.plan.strategy import Strategy
from minitrain.precision.policies import POLICIES
from minitrain.ranks.checks import require_fractions, require_one_of, require_positive, require_positive_ints

LEAST_TOKENS = 2048  # of a row on a rank of cp: with fewer, what travels is not hidden
MOST_ROWS = 8  # of a microbatch
MOST_CHUNKS = 12  # stages of a rank
RECOMPUTE = ("none", "selective", "full")
RESERVED = 2e9  # bytes of a device that no tensor has: its CUDA context, NCCL's buffers (assumed)


@dataclass(frozen=True)
class Task:  # what is to be trained, on what; `batch` rows of `length` tokens per step
    model: GPTConfig
    machine: Machine
    ranks: int
    batch: int
    length: int
    stack: Stack = STACKS["overlapped"]
    precision: str = "bfloat16_main_grads"
    room: float = 0.9  # of a device's memory less RESERVED

    def __post_init__(self) -> None:
        require_positive_ints(ranks=self.ranks, batch=self.batch, length=self.length)
        require_fractions(room=self.room)
        require_positive(room=self.room)
        require_one_of(POLICIES, precision=self.precision)
        if self.length > self.model.max_positions:
            most = f"max_positions={self.model.max_positions}"
            raise ValueError(f"length={self.length} > {most}; shorten the sequence, or use another model")

    def run(self, strategy: Strategy) -> TrainingRun:
        return TrainingRun(self.model, strategy, self.machine, self.batch, self.length, self.stack)

    room_bytes = property(lambda self: self.room * (self.machine.device.capacity_bytes - RESERVED))


def layouts(task: Task) -> Iterator[Strategy]:
    """tp stays inside a node, cuts sequences too and divides what it must; a rank of cp keeps LEAST_TOKENS of
    a row; all ranks have equally many rows. ZeRO-2 is for one stage: a pipeline would scatter the gradients
    of every microbatch. Interleaving is for stages of equally many blocks, and microbatches pp divides."""
    model, ranks = task.model, task.ranks
    for tp in divisors(ranks):
        for cp in divisors(ranks // tp):
            for pp in divisors(ranks // (tp * cp)):
                dp = ranks // (tp * cp * pp)
                if tp > task.machine.devices_per_node or pp > model.num_layers or task.batch % dp:
                    continue
                if cp > 1 and (task.length % (2 * cp) or task.length // cp < LEAST_TOKENS):
                    continue
                sizes = dict(dp=dp, pp=pp, cp=cp, tp=tp, sequence_parallel=tp > 1)
                sizes |= dict(core="gathered") if cp > 1 else {}
                if possible(task, sizes):
                    yield from filter(None, (possible(task, sizes | more) for more in _settings(task, sizes)))


def possible(task: Task, sizes: dict) -> Strategy | None:
    """None where tp does not divide heads, hidden units or tokens, or settings do not go together."""
    try:
        strategy = Strategy(**sizes).check(task.model, task.ranks)
        strategy.check_batch(task.model, task.batch, task.length)
    except ValueError:
        return None
    return strategy


def _settings(task: Task, sizes: dict) -> Iterator[dict]:
    pp, shared = sizes["pp"], sizes["dp"] * sizes["cp"]
    rows = task.batch // sizes["dp"]
    counts = [rows // b for b in divisors(rows) if b <= MOST_ROWS]
    experts = task.model.experts.num_experts if task.model.experts else 1
    over = [ep for ep in divisors(shared) if experts % ep == 0]
    # of ep, how many are neighbours in a node
    near = task.machine.devices_per_node // (sizes["tp"] * (1 if task.stack.dp_inside_pp else pp))
    # a fused kernel keeps no scores, and computes them again anyway
    again = [one for one in RECOMPUTE if one != "selective" or not task.stack.flash]
    stages = [0] if shared == 1 else [0, 1, 3] if pp > 1 else [0, 1, 2, 3]
    for ep, recompute, zero, how, m in product(over, again, stages, schedules(task.model, pp), counts):
        if how[0] != "interleaved" or m % pp == 0:
            more = dict(zip(("schedule", "chunks"), how), precision=task.precision, microbatches=m)
            more |= dict(ep_node=near) if 1 < near < ep and ep % near == 0 else {}
            yield more | dict(zero=zero, recompute=recompute, ep=ep)


def schedules(model: GPTConfig, pp: int) -> list[tuple[str, int]]:
    """(schedule, stages of a rank) worth a look for so many ranks of a pipeline."""
    if pp == 1:
        return [("1f1b", 1)]
    layers = model.num_layers, model.num_layers + 2  # embedding and head for layers of their own
    chunks = [v for v in range(2, MOST_CHUNKS + 1) if any(n % (pp * v) == 0 for n in layers)]
    both = [("dualpipe", 1)] if model.experts and pp % 2 == 0 else []  # hides what travels to experts
    return [("1f1b", 1), ("zb_h1", 1), *(("interleaved", v) for v in chunks), *both]


def search(
    task: Task, work_of: WorkOf, rates: Rates | None = None, progress: Callable = iter, among=None
) -> list[Prediction]:
    """All that fit (or `among` these), the fastest and smallest first; of the others no time is predicted.
    ValueError if none divides, or none fits: by how much."""
    runs = [task.run(strategy) for strategy in (layouts(task) if among is None else among)]
    if not runs:
        below = task.batch // task.ranks * task.ranks
        near = " or ".join(str(n) for n in (below, below + task.ranks) if n)
        said = f"batch={task.batch} on {task.ranks} ranks of {task.machine.devices_per_node} a node"
        cure = f"use a batch of {near}, or fewer ranks"
        raise ValueError(f"{said}: no sizes of tp, pp, cp and dp divide both; {cure}")
    sizes = [sum(memory(run, work_of).values()) for run in progress(runs)]
    if fits := [predict(run, work_of, rates) for run, size in zip(runs, sizes) if size <= task.room_bytes]:
        return sorted(fits, key=lambda one: (one.step_s, needs(one)))
    least, run = min(zip(sizes, runs), key=lambda one: one[0])
    said = f"{least / 1e9:.1f} GB on a rank at least ({run.strategy})"
    own = f"{task.machine.device.name}'s {task.machine.device.capacity_bytes / 1e9:.1f} GB"
    room = f"{task.room_bytes / 1e9:.1f} GB are {task.room:.0%} of {own} less {RESERVED / 1e9:g} in reserve"
    short = f"{(least - task.room_bytes) / 1e9:.1f} GB too little"
    raise ValueError(f"does not fit: {said}, {room}, {short}; use more ranks, or a machine with more memory")


def needs(prediction: Prediction) -> int:  # bytes of the rank that has most
    return sum(prediction.memory.values())


def pareto(predictions: Iterable[Prediction]) -> list[Prediction]:
    """Those than which no other is both faster and smaller, the fastest first."""
    front: list[Prediction] = []
    for one in sorted(predictions, key=lambda one: (one.step_s, needs(one))):
        if not front or needs(one) < needs(front[-1]):
            front.append(one)
    return front


def why(best: Prediction, other: Prediction, most: int = 3) -> list[tuple[str, float]]:
    """Where another loses the time, in seconds by part, most first; negative where it is ahead."""
    differences = {part: other.parts[part] - best.parts[part] for part in best.parts}
    ordered = sorted(differences.items(), key=lambda item: -abs(item[1]))
    return [(part, seconds) for part, seconds in ordered[:most] if seconds]
