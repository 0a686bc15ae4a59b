"""The described machines: datasheet figures, the ratios which the course quotes, and one-line errors."""

import dataclasses
import re
from pathlib import Path

import pytest

from minitrain.plan.simulate import machines
from minitrain.plan.simulate.machines import DEVICES, GB, LINKS, machine
from minitrain.ranks.tables import aligned

DOCS = Path(__file__).parents[3] / "docs" / "commands.md"


def test_published_reach_of_h800_nvlink():
    # DeepSeek-V3 counts on 160 GB/s of NVLink, 3.2 times its InfiniBand.
    h800 = dataclasses.replace(machine("h800"), network_efficiency=0.8)
    assert h800.intra_bytes_per_s == 160 * GB
    assert h800.intra_bytes_per_s / machine("h800").inter_bytes_per_s == 3.2
    assert h800.inter_bytes_per_s == h800.nic_bytes_per_s == 0.8 * 50 * GB


def test_every_figure_names_its_source():
    assert len(LINKS) >= 13 and len(DEVICES) >= 9
    for thing in (*LINKS.values(), *DEVICES.values()):
        assert thing.source, thing
    assert all(device in DEVICES.values() for device in (m.device for m in machines.MACHINES.values()))


def table():
    """Per device and direction, FP16 dense."""
    rows = [("machine", "device", "FP16", "memory", "", "node", "inside", "", "outside", "", "gap")]
    rows += [("", "", "TFLOP/s", "GB", "TB/s", "", "", "GB/s", "", "GB/s", "")]
    for m in machines.MACHINES.values():
        device, inside, outside = m.device, m.intra_bytes_per_s, m.inter_bytes_per_s
        links = m.intra.name, f"{inside / GB:g}", f"{m.nics_per_node} x {m.inter.name}", f"{outside / GB:g}"
        rates = f"{device.peak('float16') / 1e12:g}", f"{device.memory_bytes / GB:g}"
        bandwidth = f"{device.memory_bandwidth_bytes_per_s / 1e12:.2f}"
        node = bandwidth, f"{m.devices_per_node}", *links, f"{inside / outside:.1f}x"
        rows.append((m.name, device.name, *rates, *node))
    return aligned(rows, left=(0, 1, 6, 8))


TABLE = """
machine        device             FP16  memory        node  inside                   outside                       gap
                               TFLOP/s      GB  TB/s                           GB/s                        GB/s
v100           V100 SXM2 32GB      125      32  0.90     8  NVLink 2            150  4 x InfiniBand EDR    6.25  24.0x
v100-ethernet  V100 PCIe 16GB      112      16  0.90     4  PCIe 3 x16           16  1 x 100G Ethernet    3.125   5.1x
a100-40gb      A100 SXM 40GB       312      40  1.55     8  NVLink 3            300  8 x InfiniBand HDR      25  12.0x
a100           A100 SXM 80GB       312      80  2.04     8  NVLink 3            300  8 x InfiniBand HDR      25  12.0x
a800           A800 SXM 80GB       312      80  2.04     8  NVLink 3 (A800)     200  8 x InfiniBand HDR      25   8.0x
h100           H100 SXM 80GB     989.5      80  3.35     8  NVLink 4            450  8 x InfiniBand NDR      50   9.0x
h800           H800 SXM 80GB     989.5      80  3.35     8  NVLink 4 (H800)     200  8 x InfiniBand NDR      50   4.0x
h200           H200 SXM 141GB    989.5     141  4.80     8  NVLink 4            450  8 x InfiniBand NDR      50   9.0x
b200           B200 SXM 180GB     2250     180  8.00     8  NVLink 5            900  8 x InfiniBand NDR      50  18.0x
gb200          GB200 186GB        2500     186  8.00    72  NVLink 5            900  72 x InfiniBand NDR     50  18.0x
mi300x         MI300X 192GB     1307.4     192  5.30     8  Infinity Fabric 4   448  8 x InfiniBand NDR      50   9.0x
jean-zay       A100 SXM 80GB       312      80  2.04     8  NVLink 3            300  4 x Omni-Path         6.25  48.0x
grand-teton    H100 SXM 96GB     989.5      96  2.40     8  NVLink 4            450  8 x InfiniBand NDR      50   9.0x
neox           A100 SXM 40GB       312      40  1.55     8  NVLink 3            300  4 x InfiniBand HDR    12.5  24.0x
ascend910      Ascend 910          256      32  1.20     4  HCCS                 90  4 x 100G Ethernet     12.5   7.2x
"""


def test_figures_of_the_datasheets_and_what_the_table_does_not_show():
    """Memory rates to the GB/s, processors, peaks of other dtypes, PCIe of the host, NCCL's latencies."""
    assert table().splitlines() == TABLE.strip().splitlines()
    figures = {name: (d.memory_bandwidth_bytes_per_s / GB, d.multiprocessors) for name, d in DEVICES.items()}
    dtypes = ("fp64", "fp32", "tf32", "bf16", "fp8")
    peak = lambda device, dtype: device.peak_flops.get(machines._SHORT[dtype], 0) / 1e12
    peaks = {name: [peak(device, dtype) for dtype in dtypes] for name, device in DEVICES.items()}
    ampere, hopper = [19.5, 19.5, 156, 312, 0], [67, 67, 494.5, 989.5, 1979]
    datasheets = {
        "V100 SXM2 32GB": (900, 80, [7.8, 15.7, 0, 0, 0]), "V100 PCIe 16GB": (900, 80, [7, 14, 0, 0, 0]),
        "A100 SXM 40GB": (1555, 108, ampere), "A100 SXM 80GB": (2039, 108, ampere),
        "A800 SXM 80GB": (2039, 108, ampere), "H100 SXM 80GB": (3350, 132, hopper),
        "H800 SXM 80GB": (3350, 132, [1, *hopper[1:]]), "H200 SXM 141GB": (4800, 132, hopper),
        "H100 SXM 96GB": (2400, 132, hopper), "B200 SXM 180GB": (8000, 148, [37, 75, 1125, 2250, 4500]),
        "GB200 186GB": (8000, 152, [40, 80, 1250, 2500, 5000]),
        "MI300X 192GB": (5300, 304, [163.4, 163.4, 653.7, 1307.4, 2614.9]),
        "Ascend 910": (1200, 32, [0] * 5), "Bow IPU": (65_400, 1472, [0, 87.5, 0, 0, 0]),
    }  # fmt: skip
    assert {name: (*figures[name], peaks[name]) for name in DEVICES} == datasheets
    found = {80: 79.14, 141: 139.72, 180: 178.35}  # GiB
    for device in DEVICES.values():
        gib = found.get(device.memory_bytes / GB, device.capacity_bytes / 2**30)
        assert (
            device.capacity_bytes == gib * 2**30 and 0.98 < device.capacity_bytes / device.memory_bytes < 1.08
        )
    latencies = {link.latency_s for name, link in LINKS.items() if name.startswith(("NVLink", "HCCS"))}
    assert latencies == {1.9e-6}
    for one in machines.MACHINES.values():
        newer = dict.fromkeys((132, 148, 304), "PCIe 5 x16") | {152: "NVLink-C2C"}
        assert one.host.name == ({80: "PCIe 3 x16"} | newer).get(one.device.multiprocessors, "PCIe 4 x16")
        assert one.inter.latency_s == 4.0e-6
        assert one.host.latency_s == (1.9e-6 if "NVLink" in one.host.name else 2.5e-6)
    assert [LINKS[f"PCIe {n} x16"].bandwidth_bytes_per_s / GB for n in (3, 4, 5)] == [16, 32, 64]
    assert machine("a100").disk.bandwidth_bytes_per_s == 25 / 8 * GB
    assert machine("a100").disk.latency_s == 1e-4


def test_errors_say_what_is_allowed():
    with pytest.raises(ValueError, match="V100 .* bf16; choose from float64, float32, float16"):
        machine("v100").device.peak("bf16")
    with pytest.raises(ValueError, match="unnamed dtype"):
        machine("v100").device.peak("")


def test_a_machine_of_your_own(tmp_path):
    """The file of docs/commands.md; and what is wrong with one is said in a line, with what is allowed."""
    text = re.search(r"```toml\n(.*?)```", DOCS.read_text(), re.S)[1]
    (file := tmp_path / "mine.toml").write_text(text)
    mine = machine(str(file))
    assert (mine.name, mine.device, mine.inter) == ("mine", DEVICES["H100 SXM 80GB"], LINKS["InfiniBand HDR"])
    assert (mine.intra_bytes_per_s, mine.inter_bytes_per_s) == (50 * GB, 12.5 * GB) and not mine.host
    for old, new, said in (
        (
            "nics_per_node",
            "nic_per_node",
            "field='nic_per_node': use name, device, .*; did you mean nics_per_n",
        ),
        ('inter = "InfiniBand HDR"', "", "no inter; needed are name, device, "),
        ("latency_s", "latency", "intra.field='latency': .* did you mean latency_s"),
        ("50e9", "'fast'", "intra.bandwidth_bytes_per_s='fast': give a number"),
        ("50e9", "-1", "intra.bandwidth_bytes_per_s=-1: use a finite number above 0"),
        ("H100 SXM 80GB", "H100", "device='H100': use V100 SXM2 32GB, "),
        ("[intra]", "[", "machine=.*: Invalid .*; docs/commands.md has an example"),
    ):
        file.write_text(text.replace(old, new, 1))
        with pytest.raises(ValueError, match=said):
            machine(str(file))


@pytest.mark.parametrize("cards, share", [(1, 0.5), (2, 1), (4, 2)])
def test_a_device_s_share_of_the_cards_may_be_more_than_one(cards, share):
    v100 = machine("v100")  # four cards for eight devices
    assert [v100.node_of(rank) for rank in (0, 7, 8, 23)] == [0, 0, 1, 2]
    assert v100.inter_bytes_per_s == 4 / 8 * 12.5 * GB
    h100 = machine("h100").device
    assert h100.peak("float8_e4m3fn") == h100.peak("fp8") == 2 * h100.peak("bfloat16")
    made = dataclasses.replace(machine("h100"), devices_per_node=2, nics_per_node=cards)
    assert made.inter_bytes_per_s == share * made.nic_bytes_per_s
