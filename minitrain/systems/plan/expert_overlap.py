"""Overlapping experts with their all-to-alls: how many chunks, in which order, who goes first. No torch.

    PipeMoE     seconds of r chunks in closed form, and the r that minimises them
    ScheMoE     an order for compressing, sending, decompressing and computing
    Lina        a link that all-to-alls share with all-reduces (played by links.py)
    MPipeMoE    rows whose buffer the next chunk needs: copy them to the host, or make them again
    DeepSeek-V3 two microbatches in turn at each all-to-all: of 64 ranks on 8 nodes 271 us of a layer stay
                exposed for 12,443 one after the other, 0 with weight gradients behind transfers

Modelled: a transfer takes alpha + beta · rows, and so does a product; ranks are in step, experts evenly
loaded; streams slow each other down nowhere but on Lina's link. DeepSeek-V3: dense rate of bf16
(`dtype="float8"`: FP8 for products with weights), 20 of 132 cores the transfers'; an all-to-all over nodes is
two transfers at once, a copy to each node, then one for each expert; rows go in one byte per element and come
back in two. Shi et al. 2023 (PipeMoE), INFOCOM; Shi et al. 2024 (ScheMoE), EuroSys; Li et al. 2023 (Lina),
ATC; Zhang et al. 2023 (MPipeMoE), IPDPS; DeepSeek-AI 2024, arXiv:2412.19437, sections 3.2 and 4.2. Differs:
ScheMoE's order is the shortest where both directions take the same times (searched up to 3 chunks); MPipeMoE
measures how much copies slow products; DeepSeek's transfers between pipeline stages are left out.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count, product, zip_longest
from math import ceil
from typing import NamedTuple

from minitrain.model.config import presets
from minitrain.pipeline.simulate import divided
from minitrain.plan.accounting import attention_parameters
from minitrain.plan.simulate import collectives
from minitrain.plan.simulate.machines import GB, Link, Machine, machine
from minitrain.ranks.checks import MOST, require_ints, require_nonnegative, require_one_of, require_positive
from minitrain.ranks.events import Compute, Event, Issue, Wait
from minitrain.systems.simulate import links
from minitrain.systems.simulate.replay import replay
from minitrain.systems.simulate.timeline import Timeline


class Line(NamedTuple):  # seconds for n rows
    alpha: float
    beta: float

    def __call__(self, n: float) -> float:
        return self.alpha + self.beta * n


def lines(ranks: int, row_bytes: float, row_flops: float, on: Machine, launch_s: float) -> tuple[Line, Line]:
    """(all-to-all, experts' work) by rows of one rank, on ranks 0, 1, .. of a machine, products in bf16."""
    require_ints(1, MOST, ranks=ranks)
    require_nonnegative(row_bytes=row_bytes, row_flops=row_flops, launch_s=launch_s)
    place = collectives.place(range(ranks), on)
    none, one = (collectives.seconds("all_to_all", n * row_bytes, place, "pairwise") for n in (0, 1))
    rate = on.device.peak("bf16") * on.compute_efficiency
    return Line(none, one - none), Line(launch_s, row_flops / rate)


def pipemoe_s(r: int, rows: float, transfer: Line, work: Line) -> float:
    """r chunks: all dispatches, then all combines on one link, a chunk's work between its two. Either the
    link is never idle, or the experts are busy from the first arrival to the last."""
    require_ints(1, MOST, r=r)
    require_nonnegative(rows=rows)
    return max(2 * r * transfer(rows / r), 2 * transfer(rows / r) + r * work(rows / r))


def pipemoe_degree(rows: float, transfer: Line, work: Line) -> int:
    """The best r of 1 .. 16: `pipemoe_s` is the larger of a rising line and a curve with one valley, lowest
    at r² = 2 beta rows / alpha of the work."""
    return min(range(1, 17), key=lambda r: (pipemoe_s(r, rows, transfer, work), r))


def pipemoe_events(r: int, rows: float, ranks: int, row_bytes: float, row_flops: float) -> list[Event]:
    """The same as events of rank 0, for `replay(.., launch_s=)`: what the closed form is checked against."""
    require_ints(1, MOST, r=r, ranks=ranks)
    require_nonnegative(rows=rows, row_bytes=row_bytes, row_flops=row_flops)
    members, size = tuple(range(ranks)), rows / r * row_bytes
    way = "all_to_all", "ep", members, size, size * (ranks - 1) / ranks
    events: list[Event] = [Issue(i, *way, i, "dispatch") for i in range(r)]
    for i in range(r):
        events += [Wait(i), Compute("experts", rows / r * row_flops, 0, dtype="bfloat16")]
        events.append(Issue(r + i, *way, r + i, "combine"))
    return events + [Wait(r + i) for i in range(r)]


class Task(NamedTuple):
    name: str
    stream: str  # "compute" or "link"
    seconds: float


def schemoe_tasks(compress: float, all_to_all: float, decompress: float, expert: float) -> tuple[Task, ...]:
    """What each chunk goes through, one after the other."""
    require_nonnegative(compress=compress, all_to_all=all_to_all, decompress=decompress, expert=expert)
    way = Task("compress", "compute", compress), Task("all-to-all", "link", all_to_all)
    way = *way, Task("decompress", "compute", decompress)
    return *way, Task("expert", "compute", expert), *way


def schemoe_order(chunks: int) -> list[int]:
    """Chunk numbers: each is the next task of that chunk, queued on its stream. All are compressed and sent;
    then each is decompressed, worked on, compressed and sent; what came home is decompressed at the end."""
    require_ints(1, MOST, chunks=chunks)
    return [*range(chunks)] * 2 + [chunk for chunk in range(chunks) for _ in range(4)] + [*range(chunks)]


def makespan(order: Sequence[int], tasks: Sequence[Task], chunks: int) -> float:
    """Seconds until all is done; a task starts when its stream and the task before it in its chunk end."""
    require_ints(1, MOST, chunks=chunks)
    require_ints(0, chunks - 1, order=order)
    free, ready, step = defaultdict(int), [0] * chunks, [0] * chunks
    for chunk in order:
        _, stream, seconds = tasks[step[chunk]]
        free[stream] = ready[chunk] = max(free[stream], ready[chunk]) + seconds
        step[chunk] += 1
    if step != [len(tasks)] * chunks:
        raise ValueError(f"order={list(order)}: name each chunk {len(tasks)} times, once for each task")
    return max(ready)


class Step(NamedTuple):
    all_to_all_s: list[float]  # how long each took
    reduced_s: float  # when the last all-reduce ended
    end_s: float  # and everything else


def lina(layers: Sequence[tuple[float, float, float]], policy: str, micro_s: float | None = None) -> Step:
    """Layers (compute, all-to-all, all-reduce of its gradients, which nobody waits for) on one link. "share":
    each at half the rate while both are there. "priority": an all-to-all waits only for the operation under
    way, a micro-op of `micro_s` seconds (None: the whole all-reduce), and nothing beside it."""
    require_one_of(("share", "priority"), policy=policy)
    if micro_s is not None:
        require_positive(micro_s=micro_s)
    reductions, all_to_alls = ("reductions", "all-to-alls") if policy == "share" else ("link", "link")
    tasks, before = [], ()
    for i, (compute, transfer, reduction) in enumerate(layers):
        tasks.append(links.Task(f"compute {i}", "compute", compute, after=before))
        before = (f"compute {i}",)
        pieces = ceil(reduction / micro_s) if micro_s and reduction else bool(reduction)
        part = divided(reduction, pieces or 1)
        tasks += [links.Task(f"reduce {i}.{j}", reductions, part, ("link",), before) for j in range(pieces)]
        if transfer:
            tasks.append(links.Task(f"all-to-all {i}", all_to_alls, transfer, ("link",), before))
            before = (f"all-to-all {i}",)
    run = links.play(tasks, {"link": 1}, by=lambda task: not task.name.startswith("all-to-all"))
    sending = [i for i, (_, sent, _) in enumerate(layers) if sent]
    took = [run.end(f"all-to-all {i}") - run.end(f"compute {i}") for i in sending]
    last = lambda kinds: max((run.end(name) for name in run.tasks if name.startswith(kinds)), default=0)
    return Step(took, last("reduce"), last(("compute", "all-to-all")))


class Chunk(NamedTuple):  # seconds for one chunk of a layer
    transfer: float
    work: float  # of the experts forward
    copy_rows: float  # to the host's memory, or back
    copy_middle: float  # of what lies between the two products


REUSE_POLICIES = tuple(product(("offload", "send again"), ("offload", "compute again")))


def mpipemoe_s(policy: tuple[str, str], chunk: Chunk, chunks: int) -> float:
    """Forward and backward; products, crossings and copies have a stream each, the busiest sets the pace.
    Backward has two products for each of forward; making the middle again is one, sending rows a crossing."""
    require_one_of(REUSE_POLICIES, policy=policy)
    require_ints(1, MOST, chunks=chunks)
    rows, middle = (what == "offload" for what in policy)
    copies = rows * chunk.copy_rows + middle * chunk.copy_middle
    forward = max(chunk.work, 2 * chunk.transfer, copies)
    return chunks * (forward + max((2.5 - middle / 2) * chunk.work, (3 - rows) * chunk.transfer, copies))


def mpipemoe_choice(chunk: Chunk, chunks: int) -> tuple[str, str]:
    """The fastest way to have rows and middle in backward; of equal ones the first of REUSE_POLICIES."""
    return min(REUSE_POLICIES, key=lambda policy: mpipemoe_s(policy, chunk, chunks))


def mpipemoe_rows(rows: int, chunks: int, reused: bool) -> int:
    """Rows in the buffers that experts read from: all chunks, or the one at work and the one arriving."""
    require_ints(rows=rows)
    require_ints(1, MOST, chunks=chunks)
    return -(-rows // chunks) * (min(2, chunks) if reused else chunks)


Leg = tuple[str, tuple[int, ...], float]  # axis, members, bytes of the whole input


@dataclass(frozen=True)
class PairLayer:  # and microbatch of one rank
    tokens: int
    d_model: int
    hidden: int  # of an expert, which has three matrices
    k: int
    shared: int  # experts that every token visits, at home
    node_limit: int
    attention_weights: int
    attention_flops: int  # per token, in products without weights
    dtype: str = "bfloat16"  # of products with weights

    @property
    def flops(self) -> dict[str, tuple[float, float]]:
        """Forward: in products with weights, and without."""
        experts = (self.k + self.shared) * 3 * self.d_model * self.hidden
        attention = 2 * self.tokens * self.attention_weights, self.tokens * self.attention_flops
        return {"attention": attention, "experts": (2 * self.tokens * experts, 0)}

    def legs(self, element_bytes: int, ep: int, on: Machine) -> list[Leg]:
        """An all-to-all over `ep` ranks."""
        size, row = min(ep, on.devices_per_node), self.tokens * self.d_model * element_bytes
        across = "across", tuple(range(0, ep, size)), row * min(self.node_limit, ep // size)
        inside = "inside", tuple(range(size)), row * self.k
        return [leg for leg in (across, inside) if len(leg[1]) > 1]


DEEPSEEK_V3 = PairLayer(
    *(4096, 7168, 2048, 8, 1, 4),
    attention_weights=attention_parameters(presets["deepseek-v3"], matrices_only=True),
    attention_flops=128 * (192 + 128) * 4096,  # 2 for each of the scores that a mask leaves, half of them
)
REPORTED = replace(
    machine("h800"),
    intra=Link("NVLink 4 (H800), reached", 1.9e-6, 160 * GB, "arXiv:2412.19437, section 3.2.2"),
    compute_efficiency=112 / 132,
)


def pair_events(layer: PairLayer, ep: int, on: Machine, order: str, layers: int = 1) -> list[Event]:
    """Backward of one microbatch and forward of another, through so many layers, on rank 0 of ep, in order
    "row", one after the other; "turns"; or "weights", in turns, gradients of weights after the issue."""
    require_ints(1, 1 << 16, ep=ep, layers=layers)
    require_one_of(("row", "turns", "weights"), order=order)
    if ep < 2 or ep > on.devices_per_node and ep % on.devices_per_node:
        raise ValueError(f"ep={ep}; use 2 to {on.devices_per_node} ranks of a node, or whole nodes")
    events, ids, later, flops = [], count(), [], layer.flops

    def compute(name: str, with_weights: float, without: float = 0) -> None:
        for number, dtype in ((with_weights, layer.dtype), (without, "bfloat16")):
            events.extend([Compute(name, number, 0, dtype=dtype)] * (number > 0))

    def all_to_all(element_bytes: int, name: str) -> Iterator[None]:
        """Issues all legs, and waits for them when it is asked again."""
        new = []
        for axis, members, payload in layer.legs(element_bytes, ep, on):
            new.append(next(ids))
            sent = payload * (len(members) - 1) // len(members)
            events.append(Issue(new[-1], "all_to_all", axis, members, payload, sent, new[-1], name))
        while later:
            compute(*later.pop())
        yield
        events.extend(map(Wait, new))

    def forward() -> Iterator[None]:
        for name, element_bytes in (("attention", 1), ("experts", 2)) * layers:
            compute(f"{name} F", *flops[name])
            yield from all_to_all(element_bytes, f"{name} F")

    def backward() -> Iterator[None]:
        for name, element_bytes in (("experts", 1), ("attention", 2)) * layers:
            yield from all_to_all(element_bytes, f"{name} B")
            with_weights, without = flops[name]
            compute(f"{name} B", with_weights if order == "weights" else 2 * with_weights, 2 * without)
            if order == "weights":
                later.append((f"{name} W", with_weights))
        while later:
            compute(*later.pop())

    for _ in (chain if order == "row" else zip_longest)(backward(), forward()):
        pass
    return events


def pair_timeline(layer: PairLayer, ep: int, on: Machine, order: str, layers: int = 1) -> Timeline:
    return replay({0: pair_events(layer, ep, on, order, layers)}, on, algorithms={"all_to_all": "pairwise"})
