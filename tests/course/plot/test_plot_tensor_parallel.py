"""Slices lie where ranks hold them, flows have a rectangle per activation; pictures repeat to the byte."""

import torch

from minitrain.course.plot import tensor_parallel as plot_tensor
from minitrain.course.plot.style import CYCLE, png

HALF = ("one", "two")


def test_slices_lie_where_ranks_hold_them():
    ranks = [{"mlp.up": (0, 16 * r, 8, 16 * r + 16), "mlp.down": (16 * r, 0, 16 * r + 16, 8)} for r in (0, 1)]

    def draw():
        return plot_tensor.slices(ranks, width=8, title="two ranks")

    boxes = [(*patch.get_xy(), patch.get_width(), patch.get_height()) for patch in draw().axes[0].patches]
    assert boxes[:2] == [(0, 0, 2, 1), (2, 0, 2, 1)], "up: columns, side by side"
    assert [box[1:] for box in boxes[2:]] == [(0, 1, 2), (2, 1, 2)], "down: rows, one under the other"
    assert png(draw()) == png(draw())


def test_a_flow_has_twelve_activations_and_four_exchanges():
    def draw(tokens):
        return plot_tensor.flow(HALF, HALF, tokens=tokens, title="a layer")

    whole, cut = draw(1.0).axes[0], draw(0.25).axes[0]
    assert len(whole.patches) == len(cut.patches) == 12 and len(whole.texts) == len(cut.texts) == 36
    heights = sorted({patch.get_height() for patch in cut.patches if hasattr(patch, "get_height")})
    assert heights == [0.25, 1.0], "outside a quarter of the tokens, inside all"
    assert png(draw(1.0)) == png(draw(1.0)) != png(draw(0.25))


def test_the_idea_and_masks_repeat():
    def idea():
        return plot_tensor.columns_then_rows(ranks=2, title="columns, then rows")

    def masks():
        kept = torch.arange(16).view(4, 4) % 3 > 0
        return plot_tensor.masks({"rank 0": kept, "rank 1": ~kept}, title="masks")

    colours = [patch.get_facecolor() for patch in idea().axes[0].patches]
    assert len(colours) == 14 and len(set(colours)) == 3 and len(CYCLE) > 2
    assert png(idea()) == png(idea()) and png(masks()) == png(masks())
