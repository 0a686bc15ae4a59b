"""What is printed of published runs, worked out again by hand: what fits, what does not, and what would."""

import pytest

from minitrain.course.audit import implied, interval, reports, suspects
from minitrain.model.config import presets
from minitrain.plan.accounting import hfu, mfu, parameters, training_days, zero_bytes


def fits(report: str, **by_hand: float) -> None:
    """All printed numbers fit, and of some the others leave room for what a calculation by hand finds."""
    printed = reports()[report]
    assert suspects(printed) == [{}]
    for name, value in by_hand.items():
        low, high = implied(printed, name)
        assert low * (1 - 1e-7) <= value <= high * (1 + 1e-7) and high < 1.2 * low, (name, low, high)


def wrong(report: str) -> set[str]:  # that may be, each alone
    return {name for (name,) in suspects(reports()[report])}


def test_a_number_is_as_exact_as_its_digits_and_two_relations_find_one():
    assert interval("57") == (56.5, 57.5) and interval("57", whole=True) == (57, 57)
    assert interval("2 + 1.5e1") == (16, 18) and interval("38..41") == (38, 41)
    layout = dict(devices="96", tp="2", pp="4", dp="13")
    assert suspects(layout) == [{"devices": (104, 104)}, {"dp": (12, 12)}]  # not tp, pp: 96 / 52 is not whole
    assert suspects(layout | dict(rows="2", batch="24")) == [{"dp": (12, 12)}]
    assert "text_bytes" in wrong("15T tokens") and "tokens" in wrong("WanJuan-CC in the survey")
    with pytest.raises(ValueError, match="printed = '-1'; use a positive number"):
        suspects(dict(days="-1"))


def test_case_codegeex_13b():
    fits("CodeGeeX-13B", devices=192 * 8, mfu=6 * 12.9e9 * 850e9 / (1536 * 60 * 86400 * 256e12))
    assert 12 * 39 * 5120**2 == 12_268_339_200 and 12 * 40 * 5120**2 + 52_224 * 5120 == 12_850_298_880


def test_case_gpt_neox_20b():
    fits("GPT-NeoX-20B", devices=12 * 2 * 4, batch_tokens=1536 * 2048)
    by_hand = 12 * 44 * 6144**2 + 13 * 44 * 6144 + 2 * 50_432 * 6144 + 2 * 6144
    assert parameters(presets["gpt-neox-20b"]) == by_hand == 20_554_567_680


def test_case_glm_130b():
    fits("GLM-130B", devices=24 * 4 * 8, microbatches=4224 / 24, hfu=135 / 312, mfu=135 / 416, days=46.4)
    assert round(training_days(130e9, 400e9, 768, 135e12, 8), 1) == 46.4 and hfu(0.325, 1) == 0.325 * 4 / 3
    assert "days" in wrong("GLM-130B, 60 days") and round(100 * 7 / (176 + 7), 1) == 3.8


def test_case_opt_175b():
    fits("OPT-175B", devices=124 * 8, days=8 * 175e9 * 300e9 / (992 * 147e12) / 86400, tokens=300e9)
    assert [round(training_days(175e9, 300e9, 992, 147e12, each), 1) for each in (6, 8)] == [25.0, 33.3]
    assert {"days", "tokens"} <= wrong("OPT-175B, 57 days") & wrong("OPT-175B, 180B tokens")


def test_case_bloom_176b():
    rate = 6 * 176_247_271_424 * 366e9 / (1_082_990 * 3600)
    fits("BLOOM-176B", devices=8 * 4 * 12, days=1_082_990 / 384 / 24, mfu=rate / 312e12)
    by_hand = 12 * 70 * 14_336**2 + 13 * 70 * 14_336 + 250_880 * 14_336 + 4 * 14_336
    assert parameters(presets["bloom-176b"]) == by_hand == 176_247_271_424


def test_case_mtnlg_530b():
    per_token = 96 * 105 * 20_480**2 * (1 + 2048 / (6 * 20_480) + 51_200 / (16 * 105 * 20_480))
    for nodes, step_s in ((280, 60.1), (350, 50.2), (420, 44.4)):
        rate = 1920 * 2048 * per_token / (8 * nodes * step_s)
        fits(f"MT-NLG 530B, {nodes} nodes", devices=8 * nodes, flops_per_token=per_token, rate=rate)
    fits("MT-NLG 530B", devices=16 * 8 * 35, stage_layers=105 / 35)


def test_toy_100b_8x4():
    """Two of its numbers are wrong: four ways of a pipeline and four of tensors need 16 devices, not 4."""
    found = suspects(reports()["100B on 8 x 4"])
    assert {"devices": (128, 128), "per_node": (16, 16)} in found and all(len(one) == 2 for one in found)
    zero = [zero_bytes(100e9 / 4, 8, stage) / 1e9 for stage in (0, 1, 3)]
    assert zero == [16 * 25, (4 + 12 / 8) * 25, 16 * 25 / 8]


def test_case_deepseek_v3():
    fits("DeepSeek-V3", cost=(180 * 14.8 + 119 + 5) * 1e3 * 2, gpu_hours=2788e3)
    fits("DeepSeek-V3, pre-training", gpu_hours=180e3 * 14.8)
    fits("DeepSeek-V3, 1T tokens", days=180e3 / 2048 / 24)


def test_case_llama3_405b():
    fits("Llama 3 405B, 8,192 GPUs", devices=8 * 16 * 64, mfu=430 / 989.5)
    fits("Llama 3 405B, 16,384 GPUs", devices=8 * 16 * 128, mfu=400 / 989.5)
    assert suspects(reports()["Llama 3 405B, long"]) == [{"dp": (8, 8)}] and 8 * 16 * 16 * 4 == 8192
    assert "days" in wrong("Llama 3 405B, 54 days")
    assert round(training_days(405e9, 15.6e12, 16_384, 400e12)) == 67
    fits("Llama 3 405B, model card", days=30.84e6 / 16_384 / 24)


def test_frontier_mi250x():
    fits("Frontier", node_rate=8 * 191.5e12, node_bytes=8 * 64e9, package_rate=2 * 191.5e12)
    assert suspects(reports()["Frontier in the survey"]) == [{"packages": (4, 4)}]
    fits("Frontier, 1T parameters", rate=0.3196 * 191.5e12)


def test_gaudi2():
    fits("Gaudi2, GPT-3", devices=48 * 8, state_bytes=16 * 175e9 / 384)


def test_tpuv4():
    fits("TPUv4", devices=64 * 4**3, rate=0.60 * 275e12, total_rate=0.60 * 275e12 * 4096)


def test_cerebras_cs2():
    fits("CS-2", sram_bytes=850_000 * 48e3, tokens=20 * 12.85e9, parameters=257e9 / 20)


def test_case_megascale():
    rate, per_token = 6144 * 2048 / 6.34, 6 * 175e9 + 6 * 96 * 2048 * 12_288  # with a causal attention
    fits("MegaScale 175B, 300B tokens", days=300e9 / rate / 86400)
    assert abs(per_token / 1.0645e12 - 1) < 1e-4 and abs(mfu(rate, per_token, 12_288, 312e12) - 0.552) < 0.001
    ((found,),) = [[*one.items()] for one in suspects(reports()["MegaScale 175B"])]
    assert found[0] == "total_rate" and found[1][0] <= 1984e3 * 1.0645e12 <= found[1][1] < 2166.3e15
