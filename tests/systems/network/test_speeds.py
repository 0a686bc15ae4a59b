"""What datasheets say of links and devices, beside the arithmetic of their parts, and what follows from it."""

from fractions import Fraction

import pytest

from minitrain.plan.simulate import collectives
from minitrain.plan.simulate.machines import DEVICES, GB, LINKS, machine
from minitrain.systems.communication.algorithms import ring_all_reduce
from minitrain.systems.communication.cost_model import time_s
from minitrain.systems.network.graph import ecmp, fabric
from minitrain.systems.network.topologies import star

each_direction = lambda name: LINKS[name].bandwidth_bytes_per_s / GB


def test_nvlink():
    """Links of a GPU times the total of both directions: 160 GB/s is a P100's four, not one link's."""
    links = {"NVLink 1": (4, 40), "NVLink 2": (6, 50), "NVLink 3": (12, 50), "NVLink 4": (18, 50)}
    assert {a: 2 * each_direction(a) for a in links} == {a: n * each for a, (n, each) in links.items()}
    assert [n * each for n, each in links.values()] == [160, 300, 600, 900]


def test_nvlink_vs_ib_gap():
    """900 beside 200 Gb/s looks like 36 and is 18: one counts both directions."""
    infiniband = 200 / 8
    assert infiniband == each_direction("InfiniBand HDR") and 900 == 2 * each_direction("NVLink 4")
    assert (900 / infiniband, each_direction("NVLink 4") / each_direction("InfiniBand HDR")) == (36, 18)


def test_infiniband():
    """A gigabyte at 100, 200 and 400 Gb/s: 80, 40 and 20 ms, over one cable of the graph too."""
    for name, gigabits, ms in (("EDR", 100, 80), ("HDR", 200, 40), ("NDR", 400, 20)):
        link = LINKS[f"InfiniBand {name}"]
        assert 8e9 / (gigabits * 1e9) * 1e3 == pytest.approx(ms, rel=1e-12)
        wire = fabric(star(2, link.bandwidth_bytes_per_s), ecmp)
        assert max(1e9 / rate for rate in wire(0, 1).links.values()) * 1e3 == pytest.approx(ms, rel=1e-12)


def test_hetero_fleet_800():
    """Less of the links, all of the arithmetic: a large all-reduce takes 2.25 times as long, a small one hardly."""
    totals = {"NVLink 3": 600, "NVLink 3 (A800)": 400, "NVLink 4": 900, "NVLink 4 (H800)": 400}
    assert {name: 2 * each_direction(name) for name in totals} == totals
    full, cut = machine("h100"), machine("h800")
    assert (
        full.device.peak("bf16") == cut.device.peak("bf16") and DEVICES["Ascend 910"].peak("fp16") == 256e12
    )
    seconds = lambda at, size: collectives.seconds(
        "all_reduce", size, collectives.place(range(8), at), "ring"
    )
    ratios = [seconds(cut, size) / seconds(full, size) for size in (1e6, 1e9, 1e12)]
    by_hand = [
        (14 * 1.9e-6 + 1.75 * size / 200e9) / (14 * 1.9e-6 + 1.75 * size / 450e9) for size in (1e6, 1e9, 1e12)
    ]
    assert ratios == pytest.approx(by_hand, rel=1e-9)
    assert [round(ratio, 3) for ratio in ratios] == [1.159, 2.242, 2.25]


def test_gpu_generations():
    """Dense, by the number that the model computes in: 125, 312, 989.5, 2,250; and Blackwell's four bits."""
    peaks = [
        machine(name).device.peak(dtype) / 1e12
        for name, dtype in (("v100", "fp16"), ("a100", "bf16"), ("h100", "bf16"), ("b200", "bf16"))
    ]
    assert peaks == [125, 312, 989.5, 2250] and DEVICES["B200 SXM 180GB"].peak_flops["float4"] == 9000e12
    tensor_core = {
        "a100": (108, 4 * 512, 1.41e9),
        "h100": (132, 4 * 1024, 1.83e9),
    }  # SMs, FLOPs a clock and SM, Hz
    for name, (multiprocessors, fused, hertz) in tensor_core.items():
        assert machine(name).device.peak("bf16") == pytest.approx(multiprocessors * fused * hertz, rel=0.01)


def test_bow_pod64():
    pod = 64 * DEVICES["Bow IPU"].peak("fp16")
    assert pod == 22.4e15 and DEVICES["Bow IPU"].memory_bytes * 64 < machine("a100").device.memory_bytes
    assert 256 // 64 == 4  # racks


def test_comm_overhead_90():
    """Gradients of 7B in FP16 over 64 ranks beside a second of compute: 90 % of the step below 3.06 GB/s."""
    size, ring = 2 * 7e9, ring_all_reduce(64)
    share = lambda rate: (t := time_s(ring, size, fabric(star(64, rate), ecmp))) / (t + 1)
    rate = float(Fraction(2 * 63, 64)) * size / 9
    assert share(rate) == pytest.approx(0.9, rel=1e-12) and share(0.99 * rate) > 0.9 > share(1.01 * rate)
    assert round(rate / GB, 2) == 3.06
