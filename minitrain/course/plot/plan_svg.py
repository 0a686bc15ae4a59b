"""A prediction as SVG: what fills each stage's memory beside the device's, and where a step's time goes.

    drawn(prediction, stages, "title", "it fits", "80 ms")      stages: plan.predict.memory.by_rank

Above, a bar for each rank of the pipeline, by kind, and a dashed line where the device's memory ends. Below,
each part of the step begins where the one before ended, so the last one ends at the step's time.
"""

from collections.abc import Mapping, Sequence

from minitrain.course.plot import svg
from minitrain.course.plot.style import BLACK, COLOURS, GREY, VERMILLION, unit_for
from minitrain.course.plot.svg import WIDTH, box, text
from minitrain.plan.predict.predicted_memory import KINDS
from minitrain.plan.predict.predicted_step import Prediction

LEFT, RIGHT, ROW, BAR = 150.0, 150.0, 17.0, 12.0  # pixels
_COMPUTE, _WAIT = COLOURS["compute"], COLOURS["exposed communication"]
PARTS = {  # of plan.predict.step.PARTS: words and a colour
    "products": ("matrix products", _COMPUTE),
    "attention": ("attention", _COMPUTE),
    "passes": ("passes through memory", _COMPUTE),
    "recomputation": ("recomputation", _COMPUTE),
    "tp": ("waits for tp", _WAIT),
    "cp": ("waits for cp", _WAIT),
    "ep": ("waits for ep", _WAIT),
    "p2p": ("messages of stages", _WAIT),
    "bubble": ("bubble", svg.IDLE),
    "dp": ("waits for dp", _WAIT),
    "tied table": ("sum of a tied table", _WAIT),
    "optimizer": ("optimizer", COLOURS["optimizer"]),
}


def drawn(
    prediction: Prediction, stages: Sequence[Mapping[str, int]], title: str, fits: str, speed: str
) -> str:
    """`stages[rank]` are bytes by kind; what is beyond the device's memory stands beside the bar."""
    above, top = _memory(stages, prediction.run.machine.device, fits, 34)
    below, top = _time(prediction, speed, top + 14)
    return svg.page(top, [text(8, 18, title, 12), *above, *below], "; ".join((title, fits, speed)))


def _memory(stages, device, fits: str, top: float) -> tuple[list[str], float]:
    sums = [sum(memory.values()) for memory in stages]
    most = max(*sums, device.capacity_bytes)
    unit, by = unit_for(most, "bytes")
    scale = (WIDTH - LEFT - RIGHT) / (1.02 * most)
    parts = [text(8, top + 10, f"Memory {fits}", 11)]
    limit = LEFT + device.capacity_bytes * scale
    for rank, (memory, total) in enumerate(zip(stages, sums)):
        x, y = LEFT, top + 16 + ROW * rank
        parts.append(text(LEFT - 6, y + 9, f"stage {rank}" if len(stages) > 1 else "each rank", anchor="end"))
        for kind in KINDS:
            parts.append(box(x, y, memory[kind] * scale, BAR, COLOURS[kind]))
            x += memory[kind] * scale
        over = total - device.capacity_bytes
        said = f"{total / by:.3g} {unit}" + (f", {over / by:.3g} too much" if over > 0 else "")
        parts.append(text(max(x, limit) + 6, y + 9, said, colour=VERMILLION if over > 0 else "black"))
    bottom = top + 16 + ROW * len(stages)
    line = f'<path stroke="{BLACK}" stroke-dasharray="5 3" d="M{limit:.1f} {top + 12:.1f}V{bottom + 1:.1f}"/>'
    parts.append(line)
    parts += svg.axis(1.02 * most / by, scale * by, LEFT, RIGHT, bottom, f"memory ({unit})")
    entries, bottom = svg.legend([(kind, [COLOURS[kind]]) for kind in KINDS], LEFT, bottom + 36)
    return [*parts, *entries], bottom


def _time(prediction: Prediction, speed: str, top: float) -> tuple[list[str], float]:
    unit, by = unit_for(prediction.step_s, "s")
    scale, x = (WIDTH - LEFT - RIGHT) / (1.02 * prediction.step_s), LEFT
    parts = [text(8, top + 10, f"Time: {speed}", 11)]
    for row, (part, (words, colour)) in enumerate(PARTS.items()):
        seconds, y = max(0.0, prediction.parts[part]), top + 16 + ROW * row
        parts.append(text(LEFT - 6, y + 9, words, anchor="end", colour="black" if seconds else GREY))
        parts.append(box(x, y, seconds * scale, BAR, colour))
        x += seconds * scale
        if seconds:
            said = f"{seconds / by:.3g} {unit}, {seconds / prediction.step_s:.1%}"
            parts.append(text(x + 6, y + 9, said))
    bottom = top + 16 + ROW * len(PARTS)
    parts += svg.axis(1.02 * prediction.step_s / by, scale * by, LEFT, RIGHT, bottom, f"time ({unit})")
    return parts, bottom + 36
