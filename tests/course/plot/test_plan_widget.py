"""The widget: every combination is predicted or says why not, with plan.predict's numbers, and asks no dry run."""

import random
from dataclasses import replace
from functools import cache
from xml.etree import ElementTree

import pytest

from minitrain.compose.dry_runs import known, work_of
from minitrain.course.plot import plan_svg, svg
from minitrain.course.plot.plan_widget import VALUES, Choice, explore, picture
from minitrain.model.config import presets
from minitrain.plan.predict.predicted_memory import KINDS, by_rank
from minitrain.plan.predict.predicted_step import PARTS, predict
from minitrain.plan.predict.training_run import STACKS, TrainingRun
from minitrain.plan.simulate.machines import machine
from minitrain.plan.strategy import Strategy

AT = "{http://www.w3.org/2000/svg}"


@cache
def plain():
    return work_of(presets["gpt2-xl"], Strategy(precision="bfloat16"), 1, 1024)


def stub(config, *asked):
    """One dry run for all: what a layer takes is not the question here."""
    return plain()


def controls(box):
    return {control.description: control for row in box.children[:-2] for control in row.children}


def bars(drawn: str) -> list[tuple[float, float, float, str]]:
    """(x, y, width, fill) of all bars, without the white page."""
    boxes = [one for one in ElementTree.fromstring(drawn).iter(f"{AT}rect") if one.get("height") == "12"]
    return [(float(b.get("x")), float(b.get("y")), float(b.get("width")), b.get("fill")) for b in boxes]


def test_the_bars_and_lines_are_the_predictions():
    choice = Choice(ranks=32, pp=4, tp=2, zero=2, batch=64, recompute="full")
    drawn, (fits, speed) = picture(choice, stub)
    strategy = Strategy(dp=4, pp=4, tp=2, zero=2, microbatches=16, recompute="full", sequence_parallel=True)
    strategy = replace(strategy, precision="bfloat16_main_grads")
    run = TrainingRun(presets["llama3-8b"], strategy, machine("h100"), 64, 2048, STACKS["overlapped"])
    assert choice.run() == run
    prediction, stages = predict(run, stub), by_rank(run, plain())
    found = bars(drawn)
    memory, time = found[: 4 * len(KINDS)], found[4 * len(KINDS) :]
    across = svg.WIDTH - plan_svg.LEFT - plan_svg.RIGHT
    for number, (_, _, width, _) in enumerate(memory):
        size = stages[number // len(KINDS)][KINDS[number % len(KINDS)]]
        assert width == pytest.approx(size * across / (1.02 * 79.14 * 2**30), abs=0.051)
    assert len(time) == len(PARTS) == len(plan_svg.PARTS) and list(plan_svg.PARTS) == list(PARTS)
    scale, end = across / (1.02 * prediction.step_s), plan_svg.LEFT
    for part, (x, _, width, _) in zip(PARTS, time):
        assert x == pytest.approx(end, abs=0.051)
        assert width == pytest.approx(prediction.parts[part] * scale, abs=0.051)
        end += prediction.parts[part] * scale
    assert end == pytest.approx(plan_svg.LEFT + across / 1.02, abs=0.1), "the last part ends with the step"
    sums = [sum(memory.values()) for memory in stages]
    assert f"stage {sums.index(max(sums))} needs {max(sums) / 1e9:.1f} of the 85 GB" in fits
    assert (
        f"{prediction.step_s:.4g} s, MFU {prediction.mfu:.1%}, {64 * 2048 / prediction.step_s:,.0f}" in speed
    )
    words = [one.text for one in ElementTree.fromstring(drawn).iter(f"{AT}text")]
    assert f"Memory {fits}" in words and f"Time: {speed}" in words and drawn.isascii()
    assert any("dp 4 x pp 4 x cp 1 x tp 2, 1f1b, ZeRO-2; 16 microbatches of 1 row" in word for word in words)


def test_what_does_not_fit_says_by_how_much():
    drawn, (line, *_) = picture(Choice(ranks=1, pp=1, zero=0, batch=1), stub)
    need = sum(by_rank(Choice(ranks=1, pp=1, zero=0, batch=1).run(), plain())[0].values())
    assert line.startswith("fits: a rank needs") and "tenth" not in line
    less = replace(machine("h100"), device=replace(machine("h100").device, capacity_bytes=need - 2e9))
    tight = replace(less, device=replace(less.device, capacity_bytes=1.05 * need))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(picture.__globals__["MACHINES"], "less", less)
        patch.setitem(picture.__globals__["MACHINES"], "tight", tight)
        drawn, (line, *_) = picture(Choice(machine="less", ranks=1, pp=1, zero=0, batch=1), stub)
        assert line.startswith("does not fit: ") and line.endswith("2.0 GB too much")
        assert "2 too much" in drawn
        line = picture(Choice(machine="tight", ranks=1, pp=1, zero=0, batch=1), stub)[1][0]
        assert line.startswith("fits: ") and "less than a tenth" in line


def test_every_combination_is_drawn_or_says_why_not():
    """Moves of one control each, from one that could be drawn to the next."""
    draw, choice, seen, refused = random.Random(0), Choice(length=512), {}, set()
    for _ in range(250):
        name = draw.choice(list(VALUES))
        moved = replace(choice, **{name: draw.choice(VALUES[name])})
        drawn, lines = picture(moved, stub)
        if drawn is None:
            assert len(lines) == 1 and lines[0].startswith("impossible: ") and "\n" not in lines[0]
            refused.add(lines[0][:20])
        else:
            ElementTree.fromstring(drawn)
            assert lines[0].startswith(("fits: ", "does not fit: ")) and "nan" not in drawn
            choice = moved
            for key in VALUES:
                seen.setdefault(key, set()).add(getattr(moved, key))
    assert len(refused) > 8, "sizes that do not divide, heads, experts, lengths, rates"
    assert all(len(values) > 1 for name, values in seen.items() if name != "ep")


@pytest.mark.parametrize("model", presets)
def test_every_model_has_a_picture(model):
    drawn, lines = picture(Choice(model=model, length=min(1024, presets[model].max_positions)), stub)
    assert drawn and model in drawn and ("not known: experts" in lines[-1]) == bool(presets[model].experts)


def test_a_move_asks_no_dry_run_until_it_is_told_to():
    asked = []

    def counts(*what):
        asked.append(what)
        return plain()

    def has(config, strategy, *sizes):
        return strategy.tp == 1 or asked and asked[-1][1].tp == strategy.tp

    box = explore(counts, has, batch=64)
    text, image = box.children[-2:]
    moves = {"pp": 4, "dp": 2, "ranks": 8, "ZeRO": 3, "machine": "a100"}
    moves |= {"rows per step": 128, "rows per microbatch": 2}
    for name, value in moves.items():
        before = text.value, bytes(image.value)
        controls(box)[name].value = value
        assert (text.value, bytes(image.value)) != before, name
    assert all(what[1].tp == 1 for what in asked) and image.format == "svg+xml"
    before = bytes(image.value)
    controls(box)["ranks"].value, controls(box)["tp"].value = 16, 2
    assert "press measure" in text.value and bytes(image.value) == before, "the last picture stays"
    controls(box)["measure"].value = True
    assert asked[-1][1].tp == 2 and "a step takes" in text.value
    controls(box)["ep"].value = 2
    assert text.value.startswith("impossible: ") and "no experts" in text.value
    data, about = explore(counts, has)._repr_mimebundle_()
    assert data["image/svg+xml"] == picture(Choice(), stub)[0]
    assert "llama3-8b on 16 ranks" in about["image/svg+xml"]["alt"]


def test_known_is_what_answers_at_once():
    ask = presets["tiny"], Strategy(precision="bfloat16"), 1, 32
    work, other = work_of(*ask), Strategy(dp=4, pp=2, zero=1, microbatches=4, precision="bfloat16")
    apart = replace(other, schedule="zb_h1")
    assert all(known(presets["tiny"], strategy, 1, 32) for strategy in (ask[1], other, apart))
    assert work_of(presets["tiny"], other, 1, 32) is work is not work_of(presets["tiny"], apart, 1, 32)
    changes = [dict(tp=2), dict(recompute="full"), dict(precision="float32")]
    assert not any(known(ask[0], replace(ask[1], **change), 1, 32) for change in changes)
    assert not known(*ask[:2], 2, 32) and not known(*ask, False)


def test_what_to_begin_with():
    box = explore(stub, lambda *asked: True, model="llama3-70b", ranks=24, pp=3, batch=48, dp=8)
    assert controls(box)["ranks"].value == 24 and controls(box)["dp"].value == 8
    assert controls(box)["rows per step"].value == 48 and "a step takes" in box.children[-2].value
    with pytest.raises(ValueError, match="no heads; use batch, cp"):
        explore(stub, lambda *asked: True, heads=2)
    with pytest.raises(ValueError, match="model='llama9'; use tiny, "):
        explore(stub, lambda *asked: True, model="llama9")
