"""What it hides when two microbatches take turns at each all-to-all, at full size. No torch.

    pair_timeline(DEEPSEEK_V3, ep=64, on=REPORTED, way="turns").exposed_communication_s

Microseconds of all-to-all that stay exposed in forward and backward of a layer, 64 ranks on 8 nodes:

    one after the other 12,443      in turns 271      in turns, gradients of weights behind the transfers 0

"In turns" is the order of transfers and products in a pipeline's pairs (pipeline/halves.py), the third way is
pair.py's. A shared expert works beside the others here, in the model when the rows have come home.
Modelled: the products of experts, latent attention and its scores, at the dense rate of bf16 (with
`dtype="float8"` those with weights in FP8: then all 10,995 us of products hide, and 1,448 of 12,443 stay
exposed); nothing else computes. Ranks are in step, experts evenly loaded; streams do not slow each other
down, but 20 of 132 cores are the transfers'. An all-to-all over nodes is two transfers at once: over the
network cards one copy of a row to each node that it visits, inside the node one for each expert. Rows go to
the experts, forward and backward, in one byte per element; what comes back has two.
DeepSeek-AI 2024 (DeepSeek-V3), arXiv:2412.19437, sections 3.2.1 and 3.2.2; sizes: section 4.2. Differs:
the transfers of the pipeline itself, between its stages, are left out.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest

from minitrain.model.config import presets
from minitrain.plan.accounting.parameters import attention_parameters
from minitrain.plan.simulate.machines import GB, Link, Machine, machine
from minitrain.plan.simulate.replay import replay
from minitrain.plan.simulate.timeline import Timeline
from minitrain.ranks.events import Compute, Event, Issue, Wait

Leg = tuple[str, tuple[int, ...], float]  # axis, members, bytes of the whole input


@dataclass(frozen=True)
class Layer:
    """One layer and microbatch of one rank."""

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
        size = min(ep, on.devices_per_node)
        row = self.tokens * self.d_model * element_bytes
        across = "across", tuple(range(0, ep, size)), row * min(self.node_limit, ep // size)
        inside = "inside", tuple(range(size)), row * self.k
        return [leg for leg in (across, inside) if len(leg[1]) > 1]


DEEPSEEK_V3 = Layer(
    *(4096, 7168, 2048, 8, 1, 4),
    attention_weights=attention_parameters(presets["deepseek-v3"], matrices_only=True),
    attention_flops=128 * (192 + 128) * 4096,  # 2 for each of the scores that a mask leaves, half of them
)
REPORTED = replace(
    machine("h800"),
    intra=Link("NVLink 4 (H800), reached", 1.9e-6, 160 * GB, "arXiv:2412.19437, section 3.2.2"),
    compute_efficiency=112 / 132,
)


class Log:
    """What one rank does, in order."""

    def __init__(self, dtype: str) -> None:
        self.events: list[Event] = []
        self.dtype, self.issued = dtype, 0

    def compute(self, name: str, with_weights: float, without: float = 0) -> None:
        for flops, dtype in ((with_weights, self.dtype), (without, "bfloat16")):
            self.events += [Compute(name, flops, 0, dtype=dtype)] * (flops > 0)

    def issue(self, legs: Sequence[Leg], name: str) -> list[int]:
        """All at once; -> their ids."""
        first = self.issued
        for axis, members, payload in legs:
            sent = payload * (len(members) - 1) // len(members)
            way = "all_to_all", axis, members, payload, sent
            self.events.append(Issue(self.issued, *way, self.issued, name))
            self.issued += 1
        return list(range(first, self.issued))

    def wait(self, ids: Sequence[int]) -> None:
        self.events += [Wait(id) for id in ids]


def pair_events(layer: Layer, ep: int, on: Machine, way: str, layers: int = 1) -> list[Event]:
    """Backward of one microbatch and forward of another, through so many layers, on rank 0 of ep.

    way: "row", one after the other; "turns"; "weights", in turns, the gradients of weights after the issue.
    """
    if way not in ("row", "turns", "weights"):
        raise ValueError(f"way {way!r}; use 'row', 'turns' or 'weights'")
    if ep < 2 or ep > on.devices_per_node and ep % on.devices_per_node:
        raise ValueError(f"ep={ep}; use 2 to {on.devices_per_node} ranks of a node, or whole nodes")
    log, flops, later = Log(layer.dtype), layer.flops, []
    there, back = (layer.legs(element_bytes, ep, on) for element_bytes in (1, 2))

    def forward() -> Iterator[None]:
        for name, legs in (("attention", there), ("experts", back)) * layers:
            log.compute(f"{name} F", *flops[name])
            ids = log.issue(legs, f"{name} F")
            yield
            log.wait(ids)

    def backward() -> Iterator[None]:
        for name, legs in (("experts", there), ("attention", back)) * layers:
            ids = log.issue(legs, f"{name} B")
            while later:
                log.compute(*later.pop())
            yield
            log.wait(ids)
            with_weights, without = flops[name]
            log.compute(f"{name} B", with_weights if way == "weights" else 2 * with_weights, 2 * without)
            if way == "weights":
                later.append((f"{name} W", with_weights))
        while later:
            log.compute(*later.pop())

    for _ in (chain if way == "row" else zip_longest)(backward(), forward()):
        pass
    return log.events


def pair_timeline(layer: Layer, ep: int, on: Machine, way: str, layers: int = 1) -> Timeline:
    """The replay of these events."""
    return replay({0: pair_events(layer, ep, on, way, layers)}, on, algorithms={"all_to_all": "pairwise"})
