"""How fast operators, collectives and whole layers really are: few constants, all named.

    product      batch · ceil(m/M) · ceil(n/M) tiles of M x M, one per multiprocessor, in whole waves;
                 2·M·M·(k + k0) FLOPs each at `products` of the peak; never faster than its bytes
    attention    the kernel's FLOPs (those a causal mask leaves) at `attention` of the peak
    passes       bytes at `memory` of the bandwidth; where a stack fuses, a chain of elementwise operators is
                 one pass, of as many bytes as its largest operator
    links        the cost model of plan/simulate/collectives.py at `nvlink` and `network` of the bandwidth
    a layer      layers_s(work, place, again): its operators, and what it waits for on tp, cp and ep

`PLAIN` has no loss of any kind. `rates_of(machine, stack)` are the shares fitted to two or three published
runs of a GPU's generation and a kind of software (course/fit.py; benchmarks/predictions.py names the runs),
or published. Tiles and waves: NVIDIA, Matrix Multiplication Background User's Guide, sections 3 and 4.
Differs: one share for all large products.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from math import ceil
from typing import NamedTuple

from minitrain.plan.predict.training_run import Stack
from minitrain.plan.predict.work import Collective, Layer, Operator, Pass, Work
from minitrain.plan.simulate import collectives
from minitrain.plan.simulate.machines import Machine
from minitrain.ranks.checks import require_fractions, require_ints, require_positive, require_positive_ints


@dataclass(frozen=True)
class Rates:  # shares of datasheet rates, from 0 to 1, and what starting costs
    products: float = 1.0  # of the peak, reached by a product whose tiles fill all multiprocessors
    products_8_bits: float = 1.0  # likewise in FP8, of its own peak
    attention: float = 1.0  # of the peak, reached by a fused attention kernel
    memory: float = 1.0  # of the memory's bandwidth
    nvlink: float = 1.0  # of a device's links inside a node
    network: float = 1.0  # of the network cards
    experts: float = 1.0  # of the network cards, by kernels of a stack's own for rows of experts
    tile: int = 1  # side of a product's tile
    k0: int = 0  # steps of k that filling and emptying a tile's pipeline takes

    def __post_init__(self) -> None:
        shares = {share.name: getattr(self, share.name) for share in fields(self) if share.type is float}
        require_fractions(**shares)
        require_positive(**shares)
        require_positive_ints(tile=self.tile)
        require_ints(k0=self.k0)


PLAIN = Rates()
START = Rates(products=0.8, attention=0.6, memory=0.8, nvlink=0.75, network=0.5, tile=128, k0=128)
# `experts`: DeepEP's table (docs/legacy.md), 64 ranks: 50 GB/s at cards of 50, of which 1/8 does not leave.
START = replace(START, experts=0.88)
RATES = replace(START, products=0.76, network=0.3, products_8_bits=0.55)
# By generation, and whether the software fuses operators: benchmarks/predictions.py, CALIBRATION.
CALIBRATED = {
    ("A100", True): RATES,
    ("H100", True): replace(RATES, products=0.62),
    ("A100", False): replace(RATES, products=0.86, attention=0.30, memory=0.46),
    ("H100", False): replace(RATES, products=0.71, attention=0.19, memory=0.41),
}
GENERATION = dict(A100="A100", A800="A100") | dict.fromkeys(("H100", "H800", "H200", "B200", "GB200"), "H100")
NAMES = ("products", "attention", "passes")
AXES = ("tp", "cp", "ep")


def generation(machine: Machine) -> str:
    """Whose calibration holds for its device, or is taken where no run of its own fixes one."""
    return GENERATION.get(machine.device.name.partition(" ")[0], "A100")


def rates_of(machine: Machine, stack: Stack) -> Rates:
    return CALIBRATED[generation(machine), stack.fused]


class Place(NamedTuple):
    machine: Machine
    stack: Stack
    rates: Rates
    dp: int = 1
    pp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    dp_stride = property(lambda at: at.cp * at.tp * (1 if at.stack.dp_inside_pp else at.pp))
    pp_stride = property(lambda at: at.cp * at.tp * (at.dp if at.stack.dp_inside_pp else 1))

    @property
    def neighbours(self) -> tuple[int, int]:
        """Two ranks a stage apart, on two nodes if any such are."""
        step, node = self.pp_stride, self.machine.devices_per_node
        return (node - step, node) if self.pp * step > node > step else (0, step)

    @property
    def memory_bytes_per_s(self) -> float:
        machine = self.machine
        return machine.device.memory_bandwidth_bytes_per_s * machine.memory_efficiency * self.rates.memory

    def ranks_of(self, members: tuple[int, ...]) -> tuple[int, ...]:
        inside = self.cp * self.tp
        return tuple(rank // inside * self.dp_stride + rank % inside for rank in members)

    def travel_s(self, op: str, payload_bytes: float, members: tuple[int, ...]) -> float:
        return _travel_s(op, payload_bytes, members, self.machine, self.rates)

    def carried_s(self, one: Collective, payload_bytes: float) -> float:
        """As its stack carries it: rows of experts by kernels of their own, there in 8 bits, back in 16."""
        rates = self.rates
        if self.stack.expert_processors and "ep" in one.axis:
            payload_bytes, rates = 0.75 * payload_bytes, replace(rates, network=rates.experts)
        return _travel_s(one.op, payload_bytes, self.ranks_of(one.members), self.machine, rates)


@lru_cache(maxsize=1 << 14)
def _travel_s(op: str, payload_bytes: float, members: tuple[int, ...], machine: Machine, rates: Rates):
    at = collectives.place(members, machine)
    rate_out, rate_card = at.rate_out * rates.network, at.rate_card * rates.network
    at = replace(at, rate_in=at.rate_in * rates.nvlink, rate_out=rate_out, rate_card=rate_card)
    return collectives.seconds(op, payload_bytes, at)


def seconds(operators: Iterable[Operator], at: Place) -> dict[str, float]:
    """Of a pass's operators on one device, by NAMES. A chain ends before a contraction and around a norm, and
    with a softmax; a stack may add up gradients of weights in the products that make them."""
    found, rate = dict.fromkeys(NAMES, 0.0), at.memory_bytes_per_s
    chain = moved = 0
    for operator in operators:
        contracts, norm = operator.flops > 0, "layer_norm" in operator.name
        if contracts:
            kind = "attention" if operator.attention else "products"
            found[kind] += max(_arithmetic(operator, at), operator.bytes / rate)
        elif operator.accumulates and at.stack.adds_in_products:
            continue
        elif operator.name == "cast_weight" and at.stack.keeps_codes:
            continue  # once per step, of many microbatches
        elif norm or not at.stack.fused:
            moved += operator.bytes
        else:
            chain = max(chain, operator.bytes)
        if contracts or norm or "softmax" in operator.name:
            moved, chain = moved + chain, 0
    found["passes"] = (moved + chain) / rate
    return found


def _arithmetic(operator: Operator, at: Place) -> float:
    """Seconds of a kernel, or of a product whose last tiles and last wave are taken for full."""
    device, rates, flops = at.machine.device, at.rates, operator.flops
    of_products = rates.products_8_bits if operator.dtype.startswith("float8") else rates.products
    share = rates.attention if operator.attention else of_products
    processors = device.multiprocessors - at.stack.expert_processors
    if operator.shape and rates.tile > 1 and not operator.attention:
        batch, m, n, k = operator.shape
        tiles = batch * ceil(m / rates.tile) * ceil(n / rates.tile)
        flops = ceil(tiles / processors) * processors * 2 * rates.tile**2 * (k + rates.k0)
    share *= processors / device.multiprocessors
    return flops / (device.peak(operator.dtype) * at.machine.compute_efficiency * share)


class Times(NamedTuple):
    """Seconds of one layer: by KINDS, and F and B together by part. `on_wires`: of F and B, those in which
    their own transfers have a rank's links inside the node, and its share of the cards."""

    passes: tuple[float, ...]
    parts: dict[str, float]
    on_wires: tuple[tuple[float, float], ...]


@lru_cache(maxsize=1 << 12)
def layers_s(work: Work, at: Place, again: bool) -> tuple[Times, ...]:
    """Of each of `work.layers`; with `again` a block's forward runs before its backward, too."""
    ends = work.embedding, work.head
    return tuple(_times(layer, at, again and layer not in ends) for layer in work.layers)


def _times(layer: Layer, at: Place, again: bool) -> Times:
    passes = layer.forward, layer.backward, layer.weights
    forward, backward, weights = (_pass(one_pass, at) for one_pass in passes)
    f, b, w = (sum(one_pass.values()) for one_pass in (forward, backward, weights))
    parts = {name: forward[name] + backward[name] for name in forward} | {"recomputation": f * again}
    sent, again_s = tuple(on_wires(one_pass, at) for one_pass in passes[:2]), f * again
    pair = max(f + b + again_s - parts["ep"], parts["ep"])
    return Times((f, b + again_s, b + again_s - w, w, f, pair), parts, sent)


def _pass(one_pass: Pass, at: Place) -> dict[str, float]:
    found, waits = seconds(one_pass.operators, at), exposed(one_pass, at)
    if at.stack.tp_overlapped:  # cut into tp parts, the first of which finds no product to hide behind
        waits["tp"] = max(waits["tp"] / at.tp, waits["tp"] - found["products"])
    return found | waits


def exposed(one_pass: Pass, at: Place) -> dict[str, float]:
    """What a pass waits for, by AXES (cp has parts): of a transfer beside operators what they leave."""
    found = dict.fromkeys(AXES, 0.0)
    for one in one_pass.collectives:
        if one.op == "send":
            continue  # its receiver waits, and here another message is received
        time = at.carried_s(one, one.payload_bytes)
        if one.overlapped:
            beside = one_pass.operators[one.overlapped.start : one.overlapped.stop]
            time = max(0.0, time - sum(seconds(beside, at).values()))
        found[next((axis for axis in ("tp", "ep") if axis in one.axis), "cp")] += time
    return found


def on_wires(one_pass: Pass, at: Place) -> tuple[float, float]:
    """How long a pass's own transfers have a rank's links inside the node, and its share of the cards."""
    found = [0.0, 0.0]
    for one in one_pass.collectives:
        all_of_it, latency = (at.carried_s(one, size) for size in (one.payload_bytes, 0))
        leaves_node = len({at.machine.node_of(rank) for rank in at.ranks_of(one.members)}) > 1
        found[leaves_node] += all_of_it - latency
    return found[0], found[1]
