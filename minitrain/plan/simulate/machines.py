"""Described machines, from datasheets: what a device computes and its links carry, for replay and planners.

Every bandwidth is *per direction*. Vendors print NVLink as the total of both (H100: "900 GB/s" = 450 each
way) and InfiniBand per direction in bits ("200 Gb/s" = 25 each way): 900 against 25 looks like 36x and is
18x. Every FLOP rate is *dense*: half of a figure "with sparsity". FP64 is the matrix-unit rate where there is
one. Latencies are the per-hop constants of NCCL's cost model for a ring with LL128 (src/graph/tuning.cc): 1.9
us over NVLink, 2.5 us over PCIe, 4.0 us over a network. `host` is the link of one device to its host's
memory; two devices of a DGX-1 or DGX A100 share a switch, which is not modelled.

No real machine reaches its datasheet; `dataclasses.replace(m, compute_efficiency=0.7)` asks for less.
Published: NCCL counts on 20.6 of the 25 GB/s of an H100 NVLink (src/graph/topo.h), the DeepSeek-V3 report
(section 3.2.2) on 160 of the 200 GB/s of an H800, a `network_efficiency` of 0.8.
"""

from dataclasses import dataclass, field

from minitrain.ranks.tables import aligned

GB = 1e9
TFLOPS = 1e12

_SHORT = dict(fp64="float64", fp32="float32", tf32="tfloat32", bf16="bfloat16", fp16="float16", fp8="float8")


@dataclass(frozen=True)
class Device:
    """One accelerator. `peak_flops` maps a dtype in torch's spelling to dense FLOP/s."""

    name: str
    peak_flops: dict[str, float] = field(hash=False)
    memory_bytes: float
    memory_bandwidth_bytes_per_s: float
    source: str
    multiprocessors: int = 1  # each computes one tile of a product at a time

    def peak(self, dtype: str) -> float:
        """Dense FLOP/s for "bfloat16" or "bf16"; every 8-bit float ("float8_e4m3fn") counts as "float8"."""
        full = "float8" if dtype.startswith("float8") else _SHORT.get(dtype, dtype)
        if full not in self.peak_flops:
            case = f"{self.name} has no published rate for {dtype or 'an unnamed dtype'}"
            raise ValueError(f"{case}; choose from {', '.join(self.peak_flops)}")
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
    host: Link | None = None  # of one device, to the memory of its host
    disk: Link | None = None  # a device's share of its node's drives

    def __post_init__(self):
        for name, value in vars(self).items():
            if name.endswith("per_node") and value < 1:
                raise ValueError(f"{name}={value} of machine {self.name}: give at least 1")
            if name.endswith("efficiency") and not 0 < value <= 1:
                raise ValueError(f"{name}={value} of machine {self.name}: give a fraction in (0, 1]")

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
        """A device's share of its node's network cards: in SPMD all devices of a node send at once."""
        return self.nic_bytes_per_s * self.nics_per_node / self.devices_per_node


# ---- links -----------------------------------------------------------------------------------------------
_LL128 = "latency: NCCL tuning.cc, ring, LL128"


def _nvlink(name: str, links: int, each_way: int, source: str) -> Link:
    source = f"{source}: {links} links x {each_way} GB/s each way; {_LL128}"
    return Link(name, 1.9e-6, links * each_way * GB, source)


def _pcie(generation: int, gigatransfers: int) -> Link:
    # 16 lanes of 8, 16, 32 GT/s; the 128b/130b code takes another 1.5 %.
    source = f"PCI-SIG, PCI Express {generation}.0; {_LL128}"
    return Link(f"PCIe {generation} x16", 2.5e-6, 16 * gigatransfers / 8 * GB, source)


def _network(name: str, gigabits: int, source: str) -> Link:
    return Link(name, 4.0e-6, gigabits / 8 * GB, f"{source}: {gigabits} Gb/s a port; {_LL128}")


NVLINK1 = _nvlink("NVLink 1", 4, 20, "NVIDIA Tesla P100 whitepaper")
NVLINK2 = _nvlink("NVLink 2", 6, 25, "NVIDIA Tesla V100 datasheet")
NVLINK3 = _nvlink("NVLink 3", 12, 25, "NVIDIA A100 datasheet")
NVLINK4 = _nvlink("NVLink 4", 18, 25, "NVIDIA H100 datasheet")
NVLINK_A800 = _nvlink("NVLink 3 (A800)", 8, 25, "NVIDIA A800 datasheet, 400 GB/s total")
NVLINK_H800 = _nvlink("NVLink 4 (H800)", 8, 25, "400 GB/s total, as reported for H800 systems")
_HOT_CHIPS = "Hot Chips 31, Ascend 910: 3 ports x 240 Gb/s; latency unpublished: NVLink's"
HCCS = Link("HCCS", 1.9e-6, 3 * 30 * GB, _HOT_CHIPS)
PCIE3, PCIE4, PCIE5 = _pcie(3, 8), _pcie(4, 16), _pcie(5, 32)
INFINIBAND_EDR = _network("InfiniBand EDR", 100, "InfiniBand Trade Association roadmap")
INFINIBAND_HDR = _network("InfiniBand HDR", 200, "InfiniBand Trade Association roadmap")
INFINIBAND_NDR = _network("InfiniBand NDR", 400, "InfiniBand Trade Association roadmap")
# Two SSDs for the system, four for data; the latency of reading one flash page is of this order.
_DRIVES = "NVIDIA DGX A100 datasheet: 25 GB/s a node"
DGX_A100_DRIVES = Link("a share of 4 NVMe drives", 1e-4, 25 / 8 * GB, _DRIVES)
OMNI_PATH = _network("Omni-Path", 100, "Intel Omni-Path 100 series")
ETHERNET_100G = _network("100G Ethernet", 100, "IEEE 802.3ba, with RDMA")


# ---- devices ---------------------------------------------------------------------------------------------
def _device(name: str, memory_gb: int, gb_per_s: int, source: str, cores: int, **tflops: float) -> Device:
    rates = {dtype: rate * TFLOPS for dtype, rate in tflops.items()}
    return Device(name, rates, memory_gb * GB, gb_per_s * GB, source, cores)


_AMPERE = dict(float64=19.5, float32=19.5, tfloat32=156, bfloat16=312, float16=312)
_H800 = dict(float64=1, float32=67, tfloat32=494.5, bfloat16=989.5, float16=989.5, float8=1979)
_HOPPER = {**_H800, "float64": 67}
_V100 = "NVIDIA Tesla V100 datasheet"
_SPARSE = "NVIDIA {} datasheet, sparse figures halved"
_CUT = "H100 datasheet; FP64 and links cut, as reported for H800 systems"

V100 = _device("V100 SXM2 32GB", 32, 900, _V100, 80, float64=7.8, float32=15.7, float16=125)
V100_PCIE = _device("V100 PCIe 16GB", 16, 900, _V100, 80, float64=7, float32=14, float16=112)
A100_40GB = _device("A100 SXM 40GB", 40, 1555, "NVIDIA A100 datasheet", 108, **_AMPERE)
A100 = _device("A100 SXM 80GB", 80, 2039, "NVIDIA A100 datasheet", 108, **_AMPERE)
A800 = _device("A800 SXM 80GB", 80, 2039, "NVIDIA A800 datasheet: an A100 with fewer links", 108, **_AMPERE)
H100 = _device("H100 SXM 80GB", 80, 3350, _SPARSE.format("H100"), 132, **_HOPPER)
H800 = _device("H800 SXM 80GB", 80, 3350, _CUT, 132, **_H800)
H200 = _device("H200 SXM 141GB", 141, 4800, _SPARSE.format("H200"), 132, **_HOPPER)
ASCEND_910 = _device("Ascend 910", 32, 1200, "Huawei, Hot Chips 31 (2019)", 32, float16=256)

# ---- machines ---------------------------------------------------------------------------------------------
_MACHINES = [
    # DGX-1; a plain server; the first DGX A100 and the second; DGX H100 and H200
    Machine("v100", V100, 8, NVLINK2, INFINIBAND_EDR, 4, host=PCIE3),
    Machine("v100-ethernet", V100_PCIE, 4, PCIE3, ETHERNET_100G, 1, host=PCIE3),
    Machine("a100-40gb", A100_40GB, 8, NVLINK3, INFINIBAND_HDR, 8, host=PCIE4),
    Machine("a100", A100, 8, NVLINK3, INFINIBAND_HDR, 8, host=PCIE4, disk=DGX_A100_DRIVES),
    Machine("a800", A800, 8, NVLINK_A800, INFINIBAND_HDR, 8, host=PCIE4),
    Machine("h100", H100, 8, NVLINK4, INFINIBAND_NDR, 8, host=PCIE5),
    Machine("h800", H800, 8, NVLINK_H800, INFINIBAND_NDR, 8, host=PCIE5),
    Machine("h200", H200, 8, NVLINK4, INFINIBAND_NDR, 8, host=PCIE5),
    # Jean Zay's node of the BLOOM report, section 3.1; that of GPT-NeoX-20B's, section 2.3 (from memory)
    Machine("jean-zay", A100, 8, NVLINK3, OMNI_PATH, 4, host=PCIE4),
    Machine("neox", A100_40GB, 8, NVLINK3, INFINIBAND_HDR, 4, host=PCIE4),
    # An Atlas 800 server holds two HCCS meshes of four: the fast domains. Each device has its own 100G port.
    Machine("ascend910", ASCEND_910, 4, HCCS, ETHERNET_100G, 4, host=PCIE4),
]
MACHINES = {machine.name: machine for machine in _MACHINES}


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
    host_bytes_per_s: float | None = None,
    disk_bytes_per_s: float | None = None,
) -> Machine:
    """The machine under the reader's hands as one node of `ranks` equal devices, from measured rates.

    `flops_per_s` maps dtypes to what ONE rank reaches while all compute, e.g. {"float32": 4.1e10}. Measured
    rates already hold every inefficiency, so the efficiencies are 1."""
    memory = dict(memory_bytes=memory_bytes, memory_bandwidth_bytes_per_s=memory_bandwidth_bytes_per_s)
    copies = dict(host_bytes_per_s=host_bytes_per_s, disk_bytes_per_s=disk_bytes_per_s)
    rates = memory | copies | dict(link_bandwidth_bytes_per_s=link_bandwidth_bytes_per_s) | flops_per_s
    for name, rate in rates.items():
        if rate is not None and not rate > 0:
            raise ValueError(f"{name}={rate} of this laptop: give the positive number you measured")
    device = Device("this laptop", dict(flops_per_s), **memory, source="measured here")
    link = Link("loopback", link_latency_s, link_bandwidth_bytes_per_s, "measured here")
    host, disk = (rate and Link(name, 0.0, rate, "measured here") for name, rate in copies.items())
    return Machine("laptop", device, ranks, link, link, nics_per_node=ranks, host=host, disk=disk)


def describe() -> str:
    """The named machines; every bandwidth is per device and direction, FP16 is the dense matrix rate."""
    rows = [
        ("machine", "device", "FP16", "memory", "", "node", "inside", "", "outside", "", "gap"),
        ("", "", "TFLOP/s", "GB", "TB/s", "", "", "GB/s", "", "GB/s", ""),
    ]
    for m in MACHINES.values():
        memory, inside, outside = m.device.memory_bytes, m.intra_bytes_per_s, m.inter_bytes_per_s
        rates = m.device.peak("float16") / TFLOPS, memory / GB, m.device.memory_bandwidth_bytes_per_s / 1e12
        links = m.intra.name, f"{inside / GB:g}", f"{m.nics_per_node} x {m.inter.name}", f"{outside / GB:g}"
        cells = f"{rates[0]:g}", f"{rates[1]:g}", f"{rates[2]:.2f}", f"{m.devices_per_node}", *links
        rows.append((m.name, m.device.name, *cells, f"{inside / outside:.1f}x"))
    return aligned(rows, left=(0, 1, 6, 8))
