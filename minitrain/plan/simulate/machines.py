"""Described machines, from datasheets: what a device computes and its links carry, for replay and planners.

Every bandwidth is *per direction*, every FLOP rate *dense*: half of a figure "with sparsity". Vendors print
NVLink as the total of both directions (H100: "900 GB/s", 450 each way) and InfiniBand in bits per direction
("200 Gb/s", 25 each way). FP64 is the matrix-unit rate where there is one. Latencies are per hop, of NCCL's
cost model for a ring with LL128 (src/graph/tuning.cc): 1.9 us over NVLink, 2.5 us over PCIe, 4.0 us over a
network. Not modelled: two devices of a DGX-1 or DGX A100 share a switch to their host. No machine reaches its
datasheet: `dataclasses.replace(m, compute_efficiency=0.7)`. Published: NCCL counts on 20.6 of the 25 GB/s of
an H100 NVLink (src/graph/topo.h), the DeepSeek-V3 report (section 3.2.2) on 160 of the 200 GB/s of an H800.
"""

import tomllib
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, get_args

from minitrain.ranks.checks import require_fractions, require_one_of, require_positive, require_positive_ints

GB = 1e9
_SHORT = dict(fp64="float64", fp32="float32", tf32="tfloat32", bf16="bfloat16", fp16="float16", fp8="float8")


@dataclass(frozen=True)
class Device:
    """One accelerator. `peak_flops` maps a dtype in torch's spelling to dense FLOP/s."""

    name: str
    peak_flops: dict[str, float] = field(hash=False)
    memory_bytes: float  # as the datasheet has it
    memory_bandwidth_bytes_per_s: float
    source: str = ""
    multiprocessors: int = 1  # each computes one tile of a product at a time
    capacity_bytes: float | None = None  # of memory, as a program finds it; None: the datasheet's

    def __post_init__(self):
        if self.capacity_bytes is None:
            object.__setattr__(self, "capacity_bytes", self.memory_bytes)

    def peak(self, dtype: str) -> float:
        """Dense FLOP/s for "bfloat16" or "bf16"; every 8-bit float ("float8_e4m3fn") counts as "float8"."""
        full = "float8" if dtype.startswith("float8") else _SHORT.get(dtype, dtype)
        if full not in self.peak_flops:
            case = f"{self.name} has no published rate for {dtype or 'an unnamed dtype'}"
            raise ValueError(f"{case}; choose from {', '.join(self.peak_flops)}")
        return self.peak_flops[full]


@dataclass(frozen=True)
class Link:  # what one device (or one network card) can send, and receive at the same time
    name: str
    latency_s: float
    bandwidth_bytes_per_s: float  # per direction
    source: str = ""


@dataclass(frozen=True)
class Machine:
    """Nodes of equal devices. Efficiencies are the reachable fractions of the datasheet's rates."""

    name: str
    device: Device
    devices_per_node: int
    intra: Link  # of one device, to the others of its node
    inter: Link  # of one network card
    nics_per_node: int
    compute_efficiency: float = 1.0
    memory_efficiency: float = 1.0
    network_efficiency: float = 1.0
    host: Link | None = None  # of one device, to the memory of its host
    disk: Link | None = None  # a device's share of its node's drives

    def __post_init__(self):
        shares = {name: value for name, value in vars(self).items() if name.endswith("efficiency")}
        require_fractions(**shares)
        require_positive(**shares)
        require_positive_ints(devices_per_node=self.devices_per_node, nics_per_node=self.nics_per_node)

    @property
    def said(self) -> str:
        """With the share of its datasheet that it is taken to reach, as a picture says it."""
        shares = self.compute_efficiency, self.memory_efficiency, self.network_efficiency
        each = zip(("FLOPs", "memory", "network"), shares)
        below = ", ".join(f"{name} {100 * share:.0f} %" for name, share in each if share < 1)
        return f"{self.name}, {below or '100 %'} of its datasheet"

    def node_of(self, rank: int) -> int:
        return rank // self.devices_per_node

    def card_of(self, rank: int) -> tuple[int, int]:
        """(node, card of that node) that a rank sends over; neighbours share one where there are fewer."""
        place = rank % self.devices_per_node
        return self.node_of(rank), place * self.nics_per_node // self.devices_per_node

    # What a device reaches inside its node, a network card, and a device's share of its node's cards.
    intra_bytes_per_s = property(lambda self: self.intra.bandwidth_bytes_per_s * self.network_efficiency)
    nic_bytes_per_s = property(lambda self: self.inter.bandwidth_bytes_per_s * self.network_efficiency)
    inter_bytes_per_s = property(lambda at: at.nic_bytes_per_s * at.nics_per_node / at.devices_per_node)


def _made(cls: type, given: dict[str, Any], where: str) -> Any:
    """From a table of its fields; a device or a link in it is a name, or a table too."""
    known = {one.name: one for one in fields(cls)}
    for name in given:
        require_one_of(known, **{f"{where}field": name})
    needed = [name for name, one in known.items() if one.default is MISSING]
    if lacks := [name for name in needed if name not in given]:
        raise ValueError(f"{where.rstrip('.: ')}: no {', '.join(lacks)}; needed are {', '.join(needed)}")
    return cls(**{name: _value(known[name].type, value, where + name) for name, value in given.items()})


def _value(kind: Any, given: Any, where: str) -> Any:
    for cls in (Device, Link):
        if cls in (kind, *get_args(kind)):
            known = DEVICES if cls is Device else LINKS
            if isinstance(given, dict):
                return _made(cls, given, f"{where}.")
            require_one_of(known, **{where: given})
            return known[given]
    wanted, said = {str: (str, "text"), dict[str, float]: (dict, "table")}.get(kind, ((int, float), "number"))
    if not isinstance(given, wanted):
        raise ValueError(f"{where}={given!r}: give a {said}")
    if isinstance(given, dict):
        return {_SHORT.get(key, key): _value(float, one, f"{where}.{key}") for key, one in given.items()}
    if said == "number":
        (require_positive_ints if kind is int else require_positive)(**{where: given})
    return given


def _all(cls: type) -> dict:
    tables = tomllib.loads(Path(__file__).with_name("machines.toml").read_text())[cls.__name__.lower()]
    return {name: _made(cls, {"name": name} | given, f"{name}.") for name, given in tables.items()}


LINKS, DEVICES = _all(Link), _all(Device)
MACHINES = _all(Machine)


def machine(name: str) -> Machine:
    """The described machine of that name, for instance "h100", or your own, of a TOML file: "my.toml" has the
    fields of `Machine`; a device or a link is a name of machines.toml, or a table of its fields."""
    if not str(name).endswith(".toml"):
        require_one_of(MACHINES, machine=name)
        return MACHINES[name]
    try:
        given = tomllib.loads(Path(name).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"machine={name}: {error}; docs/commands.md has an example of such a file") from None
    return _made(Machine, {"name": Path(name).stem} | given, f"{name}: ")
