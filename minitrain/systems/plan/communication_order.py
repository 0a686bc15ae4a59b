"""What is sent when: a training step as tasks for simulate/links.py, a policy each in a few lines. No torch.

    step            FIFO (Poseidon), priority, slices (P3), credits (ByteScheduler), messages (GradientFlow)
    fused, packed   which gradients travel together: once there are theta bytes, or the least time (PACE)
    tac             transfers in the order that lets most computation go on (TicTac)
    dear            reduce-scatters behind backward, all-gathers behind the next forward
    out_of_order    gradients of weights late, so that the first layer's sum starts early
    folded          two segments on a device, all-in-all-out (Fold3D)
    chunked         a product and its collective in k pieces (CoCoNet); best_chunks: the best k
    t3_traffic      what the memory carries when it adds what arrives (T3)

Times are seconds, exact with whole numbers and Fractions; one device stands for all, which are in step, and
`sync` is what a layer's all-reduce takes alone. Zhang et al. 2017 (Poseidon), ATC, section 3; Sun et al.
2019 (GradientFlow), arXiv:1902.06855; Jayarajan et al. 2019 (P3), MLSys; Hashemi et al. 2019 (TicTac), MLSys;
Peng et al. 2019 (ByteScheduler), SOSP; Bao et al. 2020 (PACE), INFOCOM; Zhang et al. 2023 (DeAR), ICDCS;
Oh et al. 2022 (out-of-order backprop), EuroSys; Li et al. 2023 (Fold3D), TPDS; Jangda et al. 2022 (CoCoNet),
arXiv:2105.05720; Pati et al. 2024 (T3), arXiv:2401.16677. Differs: simulated, not run; a parameter server's
push and pull are one sum.
"""

from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any, NamedTuple

from minitrain.pipeline.simulate import divided
from minitrain.ranks.checks import MOST, require_ints, require_nonnegative
from minitrain.systems.simulate.links import Number, Run, Task, play

NETWORK = {"network": 1}


class Layer(NamedTuple):  # seconds
    forward: Number
    backward: Number
    sync: Number  # of its gradients, alone on the network


def _checked(layers: Sequence[Layer]) -> list[Layer]:
    layers = [Layer(*layer) for layer in layers]
    require_nonnegative(**{f"layers[{i}]": tuple(layer) for i, layer in enumerate(layers)})
    return layers


def _work(name: str, seconds: Number, *after: str) -> Task:
    return Task(name, "device", seconds, after=after)


def _sent(name: str, seconds: Number, *after: str, alpha: Number = 0) -> Task:
    return Task(name, "network", seconds, ("network",), after, alpha)


def _backward(layers: Sequence[Layer]) -> list[Task]:
    return [_work(f"B{i}", layer.backward) for i, layer in reversed([*enumerate(layers)])]


def _forward(layers: Sequence[Layer], needs: Mapping[int, Sequence[str]]) -> list[Task]:
    chain = lambda i: [f"F{i - 1}"] if i else []
    return [_work(f"F{i}", layer.forward, *needs[i], *chain(i)) for i, layer in enumerate(layers)]


def step(
    layers: Sequence[Layer], *, by: Callable[[int], Any] | None = None, slices: int | Sequence[int] = 1,
    groups: Sequence[Sequence[int]] | None = None, together=False, width=1, alpha: Number = 0,
) -> Run:  # fmt: skip
    """From one step's loss to the next's: backward B2, B1, B0; sums C2.0, ..; forward F0, F1, F2.

    What is ready waits for the network in line, or by the smallest `by(layer)`. Gradients have so many
    `slices`, or each its number; `groups` of layers travel as one message, named after the lowest. Forward
    needs a layer's own sums, or all of them `together`. A message costs `alpha` seconds before its bytes,
    beside `width - 1` others."""
    layers = _checked(layers)
    slices = [slices] * len(layers) if isinstance(slices, int) else list(slices)
    require_ints(1, 1 << 12, slices=slices)
    tasks, needs, layer_of = _backward(layers), {}, {}
    for group in groups or [[i] for i in reversed(range(len(layers)))]:
        low, size = min(group), sum(layers[i].sync for i in group)
        names = [f"C{low}.{j}" for j in range(slices[low])]
        tasks += [_sent(name, divided(size, len(names)), f"B{low}", alpha=alpha) for name in names]
        needs |= dict.fromkeys(group, names)
        layer_of |= dict.fromkeys(names, low)
    tasks += _forward(layers, dict.fromkeys(needs, [*layer_of]) if together else needs)
    key = (lambda task: by(layer_of[task.name]) if task.links else 0) if by else None
    return play(tasks, NETWORK, key, {"network": width})


def sends_factors(rows: int, columns: int, batch: int, workers: int, servers: int) -> bool:
    """Poseidon: is a gradient [rows, columns] cheaper as the `batch` pairs of vectors that it is a sum of,
    sent to every worker, than whole to parameter servers and back?"""
    require_ints(1, rows=rows, columns=columns, batch=batch, workers=workers, servers=servers)
    factors = 2 * batch * (workers - 1) * (rows + columns)
    return factors * servers <= 2 * rows * columns * (workers + servers - 2)


def fused(sizes: Sequence[Number], theta: Number) -> list[list[int]]:
    """GradientFlow: layers in the order of backward, sent together once they have `theta` bytes."""
    require_nonnegative(sizes=list(sizes), theta=theta)
    groups: list[list[int]] = [[]]
    for i in reversed(range(len(sizes))):
        if groups[-1] and sum(sizes[j] for j in groups[-1]) >= theta:
            groups.append([])
        groups[-1].append(i)
    return groups


def packed(ready: Sequence[Number], sizes: Sequence[Number], alpha: Number, beta: Number):
    """PACE: tensors, by when they are ready, in messages of alpha + beta · size; a message starts when its
    last tensor is there. (When the last ends at the earliest, how many tensors each has): by dynamic
    programming over how many have been sent."""
    require_nonnegative(ready=list(ready), sizes=list(sizes), alpha=alpha, beta=beta)
    best: list[tuple[Number, tuple[int, ...]]] = [(0, ())]
    for j, there in enumerate(ready, start=1):
        starts = [max(end, there) for end, _ in best]
        end, i = min((start + alpha + beta * sum(sizes[i:j]), i) for i, start in enumerate(starts))
        best.append((end, (*best[i][1], j - i)))
    return best[-1]


def transfers_in(order: Sequence[str], operators: Sequence[Task], transfers: Mapping[str, Number]) -> Run:
    """Transfers one after another; operators, work `after` transfers and operators, when it can."""
    return play([*(_sent(name, transfers[name]) for name in order), *operators], NETWORK, by=lambda task: 0)


def tac(operators: Sequence[Task], transfers: Mapping[str, Number]) -> list[str]:
    """TicTac: first what lets more computation go on while the other travels: a before b if min(P_b, M_a) <
    min(P_a, M_b); M: its seconds, P: those of operators that wait for it alone. Of equals that which opens an
    operator of several transfers soonest. What is chosen is there for the next choice."""
    needs: dict[str, frozenset] = {name: frozenset([name]) for name in transfers}
    for task in operators:
        needs[task.name] = frozenset().union(*(needs[other] for other in task.after))
    left, order = dict(transfers), []
    while left:
        waits = [(task.amount, needs[task.name] & left.keys()) for task in operators]
        alone = {name: sum(amount for amount, names in waits if names == {name}) for name in left}
        together = [(sum(left[n] for n in names), names) for _, names in waits if len(names) > 1]
        opens = {name: min((s for s, names in together if name in names), default=inf) for name in left}
        before = lambda a, b: (min(alone[b], left[a]), opens[a]) < (min(alone[a], left[b]), opens[b])
        first = next((a for a in left if not any(before(b, a) for b in left)), min(left))
        order.append(first)
        del left[first]
    return order


def efficiency(operators: Sequence[Task], transfers: Mapping[str, Number], makespan: Number) -> Number:
    """TicTac's E = (U - m) / (U - L): 0 for everything in turn, 1 for the longer of the two sums."""
    parts = sum(task.amount for task in operators), sum(transfers.values())
    return divided(sum(parts) - makespan, min(parts))


def dear(layers: Sequence[Layer]) -> Run:
    """Half of a sum behind backward, last layer first, half behind the next forward, first layer first."""
    layers = _checked(layers)
    half = {i: divided(layer.sync, 2) for i, layer in enumerate(layers)}
    tasks = _backward(layers)
    tasks += [_sent(f"RS{i}", half[i], f"B{i}") for i in reversed(half)]
    tasks += [_sent(f"AG{i}", half[i]) for i in half]
    return play(tasks + _forward(layers, {i: [f"AG{i}"] for i in half}), NETWORK)


def out_of_order(layers: Sequence[Layer], late: int) -> Run:
    """Backward as X (gradients of inputs) and W (of weights), half each; the W of the last `late` layers run
    after everything else of backward, and sums by layer. The chain of X and all sums are what they were."""
    layers = _checked(layers)
    require_ints(0, len(layers), late=late)
    half = [divided(layer.backward, 2) for layer in layers]
    lasts, tasks = range(len(layers) - late, len(layers)), []
    for i in reversed(range(len(layers))):
        tasks.append(_work(f"X{i}", half[i]))
        tasks += [] if i in lasts else [_work(f"W{i}", half[i])]
    tasks += [_work(f"W{i}", half[i]) for i in lasts]
    tasks += [_sent(f"C{i}", layer.sync, f"W{i}") for i, layer in enumerate(layers)]
    tasks += _forward(layers, {i: [f"C{i}"] for i in range(len(layers))})
    return play(tasks, NETWORK, by=tasks.index)


def folded(segment: Number, sync: Number) -> Run:
    """Fold3D: all microbatches of a segment, then of the other, behind which the first one's sum travels."""
    require_nonnegative(segment=segment, sync=sync)
    return step([Layer(0, segment, 0), Layer(0, segment, sync)])


def chunked(work: Number, sync: Number, chunks: int, alpha: Number = 0) -> Run:
    """A product in pieces B, each sent, after `alpha` seconds, behind the product of the next."""
    require_ints(1, 1 << 12, chunks=chunks)
    require_nonnegative(work=work, sync=sync, alpha=alpha)
    return step([Layer(0, divided(work, chunks), divided(sync, chunks))] * chunks, alpha=alpha)


def best_chunks(work: Number, sync: Number, alpha: Number, most: int = 64) -> int:
    require_ints(1, 256, most=most)
    return min(range(1, most + 1), key=lambda chunks: chunked(work, sync, chunks, alpha).end_s)


def t3_traffic(ranks: int, in_memory: bool) -> tuple[int, int]:
    """(reads, writes) of a rank's memory, in chunks of 1/ranks of a product's output, by the product and its
    ring reduce-scatter. Kernels read two chunks and write a sum; `in_memory` what is stored or arrives is
    added there, a chunk is read to be sent, and the first goes to the neighbour as it is made."""
    require_ints(2, MOST, ranks=ranks)
    return (ranks - 1, 2 * ranks - 2) if in_memory else (2 * ranks - 1, 2 * ranks)
