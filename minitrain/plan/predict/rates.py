"""How fast an operator or a collective really is: datasheet, shares, tiles, waves; few constants, all named.

    product      batch · ceil(m/M) · ceil(n/M) tiles of M x M, one per multiprocessor, in whole waves;
                 2·M·M·(k + k0) FLOPs each at `products` of the peak; never faster than its bytes
    attention    the kernel's FLOPs (those a causal mask leaves) at `attention` of the peak
    passes       bytes at `memory` of the bandwidth; where a stack fuses, a chain of elementwise operators is
                 one pass, of as many bytes as its largest operator
    links        the cost model of plan/simulate/collectives.py at `nvlink` and `network` of the bandwidth

`PLAIN` has no loss of any kind: what plan/simulate/replay.py charges. `RATES` are the shares that were fitted
(see fit.py and benchmarks/predictions.py, which names the rows) or published. Tiles and waves: NVIDIA,
Matrix Multiplication Background User's Guide, sections 3 and 4. Differs: one share for all large products;
no kernel's choice of tile is known. (Tiles twice as long would never fill waves better than these.)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from math import ceil

from minitrain.plan.predict.training_run import Stack
from minitrain.plan.predict.work import Collective, Operator, Pass
from minitrain.plan.simulate import collectives
from minitrain.plan.simulate.machines import Device, Machine
from minitrain.ranks.checks import require_nonnegative


@dataclass(frozen=True)
class Rates:
    """Shares of datasheet rates, from 0 to 1, and what starting costs."""

    products: float = 1.0  # of the peak, reached by a product whose tiles fill all multiprocessors
    attention: float = 1.0  # of the peak, reached by a fused attention kernel
    memory: float = 1.0  # of the memory's bandwidth
    nvlink: float = 1.0  # of a device's links inside a node
    network: float = 1.0  # of the network cards
    tile: int = 1  # side of a product's tile
    k0: int = 0  # steps of k that filling and emptying a tile's pipeline takes

    def __post_init__(self) -> None:
        for share in fields(self):
            value = getattr(self, share.name)
            require_nonnegative(**{share.name: value})
            if share.type == "float" and not 0 < value <= 1:
                raise ValueError(f"{share.name}={value}: give a share of the datasheet's rate, in (0, 1]")
        if self.tile < 1:
            raise ValueError(f"tile={self.tile}: give the side of a tile, 128, or 1 for no tiles")


PLAIN = Rates()
START = Rates(products=0.8, attention=0.6, memory=0.8, nvlink=0.75, network=0.5, tile=128, k0=128)
# fit on Nar21 145.6B and MegaScale base 1024, hold=0
RATES = replace(START, products=0.76, network=0.3)
NAMES = ("products", "attention", "passes")


def seconds(operators: Iterable[Operator], machine: Machine, rates: Rates, stack: Stack) -> dict[str, float]:
    """Of a pass's operators on one device, by NAMES. A chain ends before a contraction and around a norm, and
    with a softmax; a stack may add up gradients of weights in the products that make them."""
    found = dict.fromkeys(NAMES, 0.0)
    bandwidth = machine.device.memory_bandwidth_bytes_per_s * machine.memory_efficiency * rates.memory
    chain = moved = 0
    for operator in operators:
        contracts, norm = operator.flops > 0, "layer_norm" in operator.name
        if contracts:
            kind = "attention" if operator.attention else "products"
            found[kind] += max(_arithmetic(operator, machine, rates), operator.bytes / bandwidth)
        elif operator.accumulates and stack.adds_in_products:
            continue
        elif norm or not stack.fused:
            moved += operator.bytes
        else:
            chain = max(chain, operator.bytes)
        if contracts or norm or "softmax" in operator.name:
            moved, chain = moved + chain, 0
    found["passes"] = (moved + chain) / bandwidth
    return found


def _arithmetic(operator: Operator, machine: Machine, rates: Rates) -> float:
    peak = machine.device.peak(operator.dtype) * machine.compute_efficiency
    if operator.attention:
        return operator.flops / (peak * rates.attention)
    return _in_tiles(operator, machine.device, rates) / (peak * rates.products)


def _in_tiles(operator: Operator, device: Device, rates: Rates) -> float:
    """FLOPs of a product if its last tiles and its last wave were full."""
    if not operator.shape or rates.tile == 1:
        return operator.flops
    batch, m, n, k = operator.shape
    tiles = batch * ceil(m / rates.tile) * ceil(n / rates.tile)
    wave = device.multiprocessors
    return ceil(tiles / wave) * wave * 2 * rates.tile**2 * (k + rates.k0)


@lru_cache(maxsize=1 << 14)
def travel_s(op: str, payload_bytes: int, members: tuple[int, ...], machine: Machine, rates: Rates) -> float:
    """A collective or a message between these ranks."""
    at = collectives.place(members, machine)
    rate_out, rate_card = at.rate_out * rates.network, at.rate_card * rates.network
    at = replace(at, rate_in=at.rate_in * rates.nvlink, rate_out=rate_out, rate_card=rate_card)
    return collectives.seconds(op, payload_bytes, at)


def exposed(one_pass: Pass, machine: Machine, rates: Rates, stack: Stack, place) -> dict[str, float]:
    """What a pass waits for, by the first axis of a group: a transfer beside operators only for what they
    leave of it. `place` maps the members of a group to ranks of the machine."""
    found: dict[str, float] = {}
    for collective in one_pass.collectives:
        if collective.op == "send":
            continue  # its receiver waits, and here another message is received
        time = travel_s(collective.op, collective.payload_bytes, place(collective.members), machine, rates)
        if collective.overlapped:
            beside = one_pass.operators[collective.overlapped.start : collective.overlapped.stop]
            time = max(0.0, time - sum(seconds(beside, machine, rates, stack).values()))
        axis = axis_of(collective)
        found[axis] = found.get(axis, 0.0) + time
    return found


def on_wires(one_pass: Pass, machine: Machine, rates: Rates, place) -> tuple[float, float]:
    """How long a pass's own transfers have a rank's links inside the node, and its share of the cards."""
    inside = outside = 0.0
    for collective in one_pass.collectives:
        members = place(collective.members)
        sizes = collective.payload_bytes, 0
        all_of_it, latency = (travel_s(collective.op, size, members, machine, rates) for size in sizes)
        if len({machine.node_of(rank) for rank in members}) == 1:
            inside += all_of_it - latency
        else:
            outside += all_of_it - latency
    return inside, outside


def axis_of(collective: Collective) -> str:
    """tp, ep or cp: the parts of cp have names of their own."""
    for axis in ("tp", "ep"):
        if axis in collective.axis:
            return axis
    return "cp"
