"""ZeRO-Infinity's figure 2a to its last printed digit, and the bandwidths that its section 4 asks for."""

import pytest

from minitrain.systems.plan.offload import FIGURE_2A, TIB, bandwidth_for, efficiency, fetch_s, flops_per_byte
from minitrain.systems.plan.offload import TransformerShape as Shape

# parameters (T), states and kept activations (TiB), working memory (GiB); activations of 4 rows at work (GiB, exact)
PRINTED = {
    "0.1T": (0.10, 1.83, 0.05, 1.56, 1.625), "0.5T": (0.50, 9.16, 0.12, 6.25, 2.50),
    "1T": (1.01, 18.31, 0.20, 9.77, 3.5625), "10T": (10.05, 182.81, 0.76, 64.0, 8.0),
    "100T": (101.47, 1845.70, 3.08, 400.0, 18.0),
}  # fmt: skip


@pytest.mark.parametrize("name", PRINTED)
def test_figure_2a(name):
    shape, (parameters, states, kept, working, active) = FIGURE_2A[name], PRINTED[name]
    assert round(shape.parameters / 1e12, 2) == parameters
    assert round(shape.model_state_bytes() / TIB, 2) == states
    assert round(shape.checkpoint_bytes() / TIB, 2) == kept
    assert round(shape.working_bytes() / 2**30, 2) == working
    assert shape.activation_bytes(batch=4) / 2**30 == active


def test_states_are_20_bytes_a_parameter_and_activations_2_a_number():
    shape = Shape(6, 10, 2)
    assert shape.parameters == 7200 and shape.model_state_bytes() == 144_000
    assert shape.checkpoint_bytes(3, 5) == 2 * 3 * 5 * 10 * 6
    assert shape.checkpoint_bytes(3, 5, every=3) == 2 * 3 * 5 * 10 * 2
    assert shape.working_bytes() == 2 * 2 * 10 * 40
    assert shape.activation_bytes(3, 5, every=2) == 3 * 5 * 2 * (160 + 20)


def test_the_bandwidths_of_section_4():
    """70 TFLOP/s a GPU, sequences of 1024, at least one sequence each."""
    peak = 70e12
    assert efficiency(flops_per_byte("parameters", 1, 1024), 70e9, peak) > 0.5  # 70 GB/s for half
    assert efficiency(flops_per_byte("parameters", 1, 1024), 67e9, peak) < 0.5
    # optimizer states need four times as much, and 1.5 TB/s for 90 % with two sequences
    ratio = [bandwidth_for(0.5, flops_per_byte(kind, 1, 1024), peak) for kind in ("optimizer", "parameters")]
    assert ratio[0] == 4 * ratio[1]
    assert efficiency(flops_per_byte("optimizer", 2, 1024), 1.5e12, peak) > 0.9
    assert 1.2e12 < bandwidth_for(0.9, flops_per_byte("optimizer", 2, 1024), peak) < 1.5e12
    # kept activations: 2 GB/s for half of it at a width of 2K, under 1 GB/s from 8K on
    assert efficiency(flops_per_byte("activations", 1, 1024, 2048), 2e9, peak) > 0.5
    assert bandwidth_for(0.5, flops_per_byte("activations", 1, 1024, 8192), peak) < 1e9


@pytest.mark.parametrize("shape", [Shape(4, 8, 2), FIGURE_2A["1T"]])
@pytest.mark.parametrize("every", [1, 2])
def test_flops_per_byte_is_flops_over_bytes(shape, every):
    batch, length = 3, 16
    flops = 8 * batch * length * shape.parameters
    assert flops / (4 * 2 * shape.parameters) == flops_per_byte("parameters", batch, length)
    assert flops / (2 * 16 * shape.parameters) == flops_per_byte("optimizer", batch, length)
    moved = 2 * shape.checkpoint_bytes(batch, length, every)
    assert flops / moved == flops_per_byte("activations", batch, length, shape.width, every)


@pytest.mark.parametrize("ranks", [1, 2, 64])
def test_parts_come_over_all_links_at_once(ranks):
    links = {"slow": 12e9, "network": float("inf")}
    owned, partitioned = (fetch_s(10**9, links, ranks, partitioned=how) for how in (False, True))
    assert owned == 10**9 / 12e9 and partitioned == owned / ranks
    links = {"slow": float("inf"), "network": 100e9}
    assert fetch_s(10**9, links, ranks, partitioned=True) == pytest.approx((ranks - 1) / ranks / 100)
    assert fetch_s(10**9, links, ranks, partitioned=False) == (0.01 if ranks > 1 else 0), "alone, to nobody"
