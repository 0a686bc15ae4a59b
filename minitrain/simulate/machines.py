"""Described machines: what a device computes and what its links carry, from datasheets, for the replay and the planner.

A machine has two levels: nodes of `devices_per_node` devices joined by a fast link, and a slower network between nodes.
Rank r sits on node r // devices_per_node. Three rates decide: FLOP/s, bytes/s of memory, bytes/s of each link.

Every bandwidth here is *per direction*. Vendors print NVLink as the total of both directions (H100: "900 GB/s" = 450
each way) and InfiniBand per direction in bits ("200 Gb/s" = 25 each way): 900 against 25 looks like 36x and is 18x.
Every FLOP rate is *dense*: half of a figure printed "with sparsity". FP64 is the matrix-unit rate where there is one.

Latencies are not in datasheets. They are the per-hop constants which NCCL's own cost model uses for a ring with the
LL128 protocol (NCCL src/graph/tuning.cc): 1.9 us over NVLink, 2.5 us over PCIe, 4.0 us over a network.

The named machines run at datasheet rates: a bound which no real one reaches. `dataclasses.replace(m,
compute_efficiency=0.7)` asks for less. Published fractions: NCCL counts on 20.6 of the 25 GB/s of an H100 NVLink
(src/graph/topo.h), the DeepSeek-V3 report (section 3.2.2) on 160 of the 200 GB/s of an H800, a `network_efficiency`
of 0.8.

Raises ValueError for a machine or a dtype that is not described, and for rates that are not positive.
"""

from dataclasses import dataclass

GB = 1e9
TFLOPS = 1e12

_SHORT = {
    "fp64": "float64",
    "fp32": "float32",
    "tf32": "tfloat32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp8": "float8",
}


@dataclass(frozen=True)
class Device:
    """One accelerator. `peak_flops` maps a dtype in torch's spelling to dense FLOP/s."""

    name: str
    peak_flops: dict[str, float]
    memory_bytes: float
    memory_bandwidth_bytes_per_s: float
    source: str

    def peak(self, dtype: str) -> float:
        """Dense FLOP/s for "bfloat16" or "bf16"; every 8-bit float ("float8_e4m3fn") counts as "float8"."""
        full = "float8" if dtype.startswith("float8") else _SHORT.get(dtype, dtype)
        if full not in self.peak_flops:
            raise ValueError(
                f"{self.name} has no published rate for {dtype or 'an unnamed dtype'}; "
                f"choose from {', '.join(self.peak_flops)}"
            )
        return self.peak_flops[full]


@dataclass(frozen=True)
class Link:
    """What one device (or one network card) can send, and receive at the same time."""

    name: str
    latency_s: float
    bandwidth_bytes_per_s: float  # per direction
    source: str


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

    def __post_init__(self):
        for name in ("devices_per_node", "nics_per_node"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} of machine {self.name}: give at least 1")
        for name in ("compute_efficiency", "memory_efficiency", "network_efficiency"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(
                    f"{name}={getattr(self, name)} of machine {self.name}: give a fraction in (0, 1]"
                )

    def node_of(self, rank: int) -> int:
        return rank // self.devices_per_node

    @property
    def intra_bytes_per_s(self) -> float:
        """What a device reaches inside its node, per direction."""
        return self.intra.bandwidth_bytes_per_s * self.network_efficiency

    @property
    def nic_bytes_per_s(self) -> float:
        """What one network card reaches, per direction."""
        return self.inter.bandwidth_bytes_per_s * self.network_efficiency

    @property
    def inter_bytes_per_s(self) -> float:
        """A device's share of its node's network cards, per direction: in SPMD all devices of a node send at once."""
        return self.nic_bytes_per_s * self.nics_per_node / self.devices_per_node


# ---- links -----------------------------------------------------------------------------------------------------
_LL128 = "latency: NCCL tuning.cc, ring, LL128"


def _nvlink(name: str, links: int, each_way: float, source: str) -> Link:
    return Link(
        name, 1.9e-6, links * each_way * GB, f"{source}: {links} links x {each_way:g} GB/s each way; {_LL128}"
    )


def _pcie(generation: int, gigatransfers: int) -> Link:
    # 16 lanes of 8, 16, 32 GT/s; the 128b/130b code takes another 1.5 %.
    return Link(
        f"PCIe {generation} x16",
        2.5e-6,
        16 * gigatransfers / 8 * GB,
        f"PCI-SIG, PCI Express {generation}.0; {_LL128}",
    )


def _network(name: str, gigabits: int, source: str) -> Link:
    return Link(name, 4.0e-6, gigabits / 8 * GB, f"{source}: {gigabits} Gb/s a port; {_LL128}")


NVLINK1 = _nvlink("NVLink 1", 4, 20, "NVIDIA Tesla P100 whitepaper")
NVLINK2 = _nvlink("NVLink 2", 6, 25, "NVIDIA Tesla V100 datasheet")
NVLINK3 = _nvlink("NVLink 3", 12, 25, "NVIDIA A100 datasheet")
NVLINK4 = _nvlink("NVLink 4", 18, 25, "NVIDIA H100 datasheet")
NVLINK_A800 = _nvlink("NVLink 3 (A800)", 8, 25, "NVIDIA A800 datasheet, 400 GB/s total")
NVLINK_H800 = _nvlink("NVLink 4 (H800)", 8, 25, "400 GB/s total, as reported for H800 systems")
HCCS = Link(
    "HCCS", 1.9e-6, 3 * 30 * GB, "Hot Chips 31, Ascend 910: 3 ports x 240 Gb/s; latency unpublished: NVLink's"
)
PCIE3, PCIE4, PCIE5 = _pcie(3, 8), _pcie(4, 16), _pcie(5, 32)
INFINIBAND_EDR = _network("InfiniBand EDR", 100, "InfiniBand Trade Association roadmap")
INFINIBAND_HDR = _network("InfiniBand HDR", 200, "InfiniBand Trade Association roadmap")
INFINIBAND_NDR = _network("InfiniBand NDR", 400, "InfiniBand Trade Association roadmap")
ETHERNET_100G = _network("100G Ethernet", 100, "IEEE 802.3ba, with RDMA")

# ---- devices ---------------------------------------------------------------------------------------------------
_AMPERE = {
    "float64": 19.5 * TFLOPS,
    "float32": 19.5 * TFLOPS,
    "tfloat32": 156 * TFLOPS,
    "bfloat16": 312 * TFLOPS,
    "float16": 312 * TFLOPS,
}
_HOPPER = {
    "float64": 67 * TFLOPS,
    "float32": 67 * TFLOPS,
    "tfloat32": 494.5 * TFLOPS,
    "bfloat16": 989.5 * TFLOPS,
    "float16": 989.5 * TFLOPS,
    "float8": 1979 * TFLOPS,
}

V100 = Device(
    "V100 SXM2 32GB",
    {"float64": 7.8 * TFLOPS, "float32": 15.7 * TFLOPS, "float16": 125 * TFLOPS},
    32 * GB,
    900 * GB,
    "NVIDIA Tesla V100 datasheet",
)
V100_PCIE = Device(
    "V100 PCIe 16GB",
    {"float64": 7 * TFLOPS, "float32": 14 * TFLOPS, "float16": 112 * TFLOPS},
    16 * GB,
    900 * GB,
    "NVIDIA Tesla V100 datasheet",
)
A100_40GB = Device("A100 SXM 40GB", _AMPERE, 40 * GB, 1555 * GB, "NVIDIA A100 datasheet")
A100 = Device("A100 SXM 80GB", _AMPERE, 80 * GB, 2039 * GB, "NVIDIA A100 datasheet")
A800 = Device("A800 SXM 80GB", _AMPERE, 80 * GB, 2039 * GB, "NVIDIA A800 datasheet: an A100 with fewer links")
H100 = Device("H100 SXM 80GB", _HOPPER, 80 * GB, 3350 * GB, "NVIDIA H100 datasheet, sparse figures halved")
H800 = Device(
    "H800 SXM 80GB",
    {**_HOPPER, "float64": 1 * TFLOPS},
    80 * GB,
    3350 * GB,
    "H100 datasheet; FP64 and links cut, as reported for H800 systems",
)
H200 = Device("H200 SXM 141GB", _HOPPER, 141 * GB, 4800 * GB, "NVIDIA H200 datasheet, sparse figures halved")
ASCEND_910 = Device(
    "Ascend 910", {"float16": 256 * TFLOPS}, 32 * GB, 1200 * GB, "Huawei, Hot Chips 31 (2019)"
)

# ---- machines --------------------------------------------------------------------------------------------------
MACHINES = {
    m.name: m
    for m in (
        Machine("v100", V100, 8, NVLINK2, INFINIBAND_EDR, nics_per_node=4),  # DGX-1
        Machine("v100-ethernet", V100_PCIE, 4, PCIE3, ETHERNET_100G, nics_per_node=1),  # a plain server
        Machine(
            "a100-40gb", A100_40GB, 8, NVLINK3, INFINIBAND_HDR, nics_per_node=8
        ),  # DGX A100, first edition
        Machine("a100", A100, 8, NVLINK3, INFINIBAND_HDR, nics_per_node=8),  # DGX A100
        Machine("a800", A800, 8, NVLINK_A800, INFINIBAND_HDR, nics_per_node=8),
        Machine("h100", H100, 8, NVLINK4, INFINIBAND_NDR, nics_per_node=8),  # DGX H100
        Machine("h800", H800, 8, NVLINK_H800, INFINIBAND_NDR, nics_per_node=8),
        Machine("h200", H200, 8, NVLINK4, INFINIBAND_NDR, nics_per_node=8),  # DGX H200
        # An Atlas 800 server holds two HCCS meshes of four; the mesh is the fast domain, each device has its own 100G port.
        Machine("ascend910", ASCEND_910, 4, HCCS, ETHERNET_100G, nics_per_node=4),
    )
}


def machine(name: str) -> Machine:
    """The described machine of that name, for instance "h100"."""
    if name not in MACHINES:
        raise ValueError(f"no machine is called {name!r}; choose from {', '.join(MACHINES)}")
    return MACHINES[name]


def this_laptop(
    *,
    flops_per_s: dict[str, float],
    memory_bytes: float,
    memory_bandwidth_bytes_per_s: float,
    link_latency_s: float,
    link_bandwidth_bytes_per_s: float,
    ranks: int = 4,
) -> Machine:
    """The machine under the reader's hands as one node of `ranks` equal devices, from rates which the caller measured.

    `flops_per_s` maps dtypes to what ONE rank reaches while all compute, e.g. {"float32": 4.1e10}. Measured rates
    already hold every inefficiency, so the efficiencies are 1.
    """
    rates = {
        "memory_bytes": memory_bytes,
        "memory_bandwidth_bytes_per_s": memory_bandwidth_bytes_per_s,
        "link_bandwidth_bytes_per_s": link_bandwidth_bytes_per_s,
        **flops_per_s,
    }
    for name, rate in rates.items():
        if not rate > 0:
            raise ValueError(
                f"{name}={rate} of this laptop is not a rate; give the positive number you measured"
            )
    device = Device(
        "this laptop", dict(flops_per_s), memory_bytes, memory_bandwidth_bytes_per_s, "measured here"
    )
    link = Link("loopback", link_latency_s, link_bandwidth_bytes_per_s, "measured here")
    return Machine("laptop", device, ranks, link, link, nics_per_node=ranks)


def describe() -> str:
    """The named machines as a table; every bandwidth is per device and direction, FP16 is the dense matrix rate."""
    rows = [
        ("machine", "device", "FP16", "memory", "", "node", "inside", "", "outside", "", "gap"),
        ("", "", "TFLOP/s", "GB", "TB/s", "", "", "GB/s", "", "GB/s", ""),
    ]
    for m in MACHINES.values():
        rows.append(
            (
                m.name,
                m.device.name,
                f"{m.device.peak('float16') / TFLOPS:g}",
                f"{m.device.memory_bytes / GB:g}",
                f"{m.device.memory_bandwidth_bytes_per_s / 1e12:.2f}",
                f"{m.devices_per_node}",
                m.intra.name,
                f"{m.intra_bytes_per_s / GB:g}",
                f"{m.nics_per_node} x {m.inter.name}",
                f"{m.inter_bytes_per_s / GB:g}",
                f"{m.intra_bytes_per_s / m.inter_bytes_per_s:.1f}x",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    left = {0, 1, 6, 8}
    return "\n".join(
        "  ".join(
            cell.ljust(w) if i in left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    )
