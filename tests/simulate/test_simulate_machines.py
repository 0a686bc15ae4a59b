"""The described machines: datasheet figures, the ratios which the course quotes, and one-line errors."""

import dataclasses
import subprocess
import sys

import pytest

from minitrain.simulate import machines
from minitrain.simulate.machines import GB, Device, Link, machine

LINKS = {name: link for name, link in vars(machines).items() if isinstance(link, Link)}
DEVICES = {name: device for name, device in vars(machines).items() if isinstance(device, Device)}


def total(link):
    """Both directions together, as NVIDIA prints NVLink."""
    return 2 * link.bandwidth_bytes_per_s / GB


def test_nvlink_totals_per_device():
    # Links x total of a link, as the datasheets count.
    assert total(machines.NVLINK1) == 4 * 40 == 160
    assert total(machines.NVLINK2) == 6 * 50 == 300
    assert total(machines.NVLINK3) == 12 * 50 == 600
    assert total(machines.NVLINK4) == 18 * 50 == 900


def test_cut_links_of_the_export_variants():
    fleet = {name: total(machine(name).intra) for name in ("a100", "a800", "h100", "h800")}
    assert fleet == {"a100": 600, "a800": 400, "h100": 900, "h800": 400}
    assert fleet["h100"] / fleet["h800"] == 2.25
    assert machine("h800").device.peak("bf16") == machine("h100").device.peak("bf16")


def test_nvlink_against_infiniband():
    nvlink, infiniband = machines.NVLINK4, machines.INFINIBAND_HDR
    assert infiniband.bandwidth_bytes_per_s == 200e9 / 8
    assert (
        total(nvlink) / (infiniband.bandwidth_bytes_per_s / GB) == 36
    )  # as printed: both ways against one way
    assert nvlink.bandwidth_bytes_per_s / infiniband.bandwidth_bytes_per_s == 18


def test_a_gigabyte_over_infiniband():
    links = machines.INFINIBAND_EDR, machines.INFINIBAND_HDR, machines.INFINIBAND_NDR
    assert [round(GB / link.bandwidth_bytes_per_s * 1e3) for link in links] == [80, 40, 20]


def test_published_reach_of_h800_nvlink():
    # DeepSeek-V3 counts on 160 GB/s of NVLink, 3.2 times its InfiniBand.
    h800 = dataclasses.replace(machine("h800"), network_efficiency=0.8)
    assert h800.intra_bytes_per_s == 160 * GB
    assert h800.intra_bytes_per_s / machine("h800").inter_bytes_per_s == 3.2


def test_dense_peaks_by_generation():
    peaks = {
        name: machine(name).device.peak("fp16") / 1e12
        for name in ("v100", "ascend910", "a100", "h100", "h200")
    }
    assert peaks == {"v100": 125, "ascend910": 256, "a100": 312, "h100": 989.5, "h200": 989.5}
    h100 = machine("h100").device
    assert h100.peak("float8_e4m3fn") == h100.peak("fp8") == 2 * h100.peak("bfloat16")


def test_every_figure_names_its_source():
    assert len(LINKS) >= 13 and len(DEVICES) >= 9
    for thing in (*LINKS.values(), *DEVICES.values()):
        assert thing.source, thing
    assert all(device in DEVICES.values() for device in (m.device for m in machines.MACHINES.values()))


def test_nodes_and_the_share_of_network_cards():
    v100 = machine("v100")
    assert [v100.node_of(rank) for rank in (0, 7, 8, 23)] == [0, 0, 1, 2]
    assert v100.inter_bytes_per_s == 4 / 8 * 12.5 * GB  # four cards for eight devices


def test_errors_say_what_is_allowed():
    with pytest.raises(ValueError, match="'b200'; choose from v100, .*h100.*ascend910$"):
        machine("b200")
    with pytest.raises(ValueError, match="V100 .* bf16; choose from float64, float32, float16"):
        machine("v100").device.peak("bf16")
    with pytest.raises(ValueError, match="unnamed dtype"):
        machine("v100").device.peak("")
    with pytest.raises(ValueError, match=r"compute_efficiency=1.2 .* fraction in \(0, 1\]"):
        dataclasses.replace(machine("h100"), compute_efficiency=1.2)
    with pytest.raises(ValueError, match="nics_per_node=0"):
        dataclasses.replace(machine("h100"), nics_per_node=0)


MEASURED = dict(
    flops_per_s={"float32": 4e10},
    memory_bytes=8e9,
    memory_bandwidth_bytes_per_s=1e10,
    link_latency_s=5e-5,
    link_bandwidth_bytes_per_s=1e9,
)


def test_this_laptop_holds_what_was_measured():
    laptop = machines.this_laptop(**MEASURED, ranks=4)
    assert laptop.device.peak("float32") == 4e10
    assert laptop.devices_per_node == 4 and laptop.node_of(3) == 0
    assert laptop.intra_bytes_per_s == laptop.inter_bytes_per_s == 1e9
    with pytest.raises(ValueError, match="float32=0 of this laptop"):
        machines.this_laptop(**{**MEASURED, "flops_per_s": {"float32": 0}})


def test_the_table_shows_every_machine():
    lines = machines.describe().splitlines()
    assert [line.split()[0] for line in lines[2:]] == list(machines.MACHINES)
    assert all(len(line) <= 120 for line in lines)


def test_no_torch_is_imported():
    program = (
        "import sys; import minitrain.simulate.replay, minitrain.simulate.machines; "
        "print('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "False\n"


@pytest.mark.parametrize("cards, share", [(1, 0.5), (2, 1), (4, 2)])
def test_a_device_s_share_of_the_cards_may_be_more_than_one(cards, share):
    made = dataclasses.replace(machine("h100"), devices_per_node=2, nics_per_node=cards)
    assert made.inter_bytes_per_s == share * made.nic_bytes_per_s
