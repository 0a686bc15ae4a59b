"""INT8 blocks: exact sums, one set of codes for three products, outliers, the same codes in any layout."""

from dataclasses import replace

import pytest
import torch

from minitrain import launch
from minitrain.compose.passes import PRODUCTS
from minitrain.model.config import ExpertsConfig
from minitrain.precision.blocks import dequantize, quantize
from minitrain.precision.products import Scales
from tests.parallel import small
from tests.precision.training import distance, trained

INT8 = PRODUCTS["int8"]
WIDE = small(d_model=64, num_heads=4, num_kv_heads=4, d_ff=128, num_layers=1, max_positions=64, tied=False)


def operands(b=2, t=40, k=75, n=50, dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    x, weight, dy = (torch.randn(*s, generator=g, dtype=dtype) for s in ((b, t, k), (n, k), (b, t, n)))
    return x, weight, dy * 1e-3


# ---- the three products ------------------------------------------------------------------------------------


def test_a_block_is_summed_as_integers_and_scaled_once():
    """To the bit: in float32 the same numbers come out of INT32 sums. Operands read back do not give them."""
    x, weight, _ = operands(1, 64, 96, 32, torch.float32)
    kept, w, alone = INT8.enter(x, Scales()), quantize(weight, "int8_32x32"), Scales()
    y, total = INT8.forward(kept, weight, alone), torch.zeros(1, 64, 32)
    for k in range(3):
        part = slice(32 * k, 32 * k + 32)
        whole = kept.codes[..., part].int() @ w.codes[:, part].int().mT  # exact in 32 bits
        x_steps = kept.multipliers[..., k].repeat_interleave(32, -1)
        total += whole * x_steps[..., None] * w.multipliers[:, k].repeat_interleave(32)
    assert torch.equal(y, total)
    assert not torch.equal(y, dequantize(kept) @ dequantize(w).mT)
    largest = torch.full((1, 32, 32), 3.7)
    codes = INT8.enter(largest, alone)
    assert torch.equal(
        INT8.forward(codes, largest[0], alone), (32 * 127**2 * codes.multipliers**2).expand(1, 32, 32)
    )


@pytest.mark.parametrize("shape", [(2, 64, 64, 32), (2, 40, 75, 50), (3, 7, 5, 3), (1, 1, 33, 1)])
def test_the_codes_of_one_direction_serve_the_other(shape):
    x, weight, dy = operands(*shape)
    kept = INT8.enter(x, Scales())
    back = [dequantize(quantize(a, "int8_32x32", fill=True), torch.float64) for a in (x, weight, dy)]
    dx, dweight = INT8.backward(dy, kept, weight, (True, True), Scales())
    found = INT8.forward(kept, weight, Scales()), dx, dweight
    expected = back[0] @ back[1].mT, back[2] @ back[1], back[2].flatten(0, -2).mT @ back[0].flatten(0, -2)
    for ours, theirs in zip(found, expected):
        assert ours.dtype == torch.float64 and ours.shape == theirs.shape
        assert (ours - theirs).abs().max() <= 1e-6 * theirs.abs().max()  # steps are rounded to float32
    assert INT8.backward(dy, kept, weight, (False, True), Scales())[0] is None
    assert INT8.backward(dy, kept, weight, (True, False), Scales())[1] is None


def test_nan_stays_in_its_rows_and_nothing_is_nothing():
    x, weight, dy = operands(1, 64, 64, 32, torch.float32)
    x[0, 40, 3] = torch.nan
    kept = INT8.enter(x, Scales())
    y = INT8.forward(kept, weight, Scales())
    assert y[0, :32].isfinite().all() and y[0, 32:].isnan().all()
    assert INT8.backward(dy, kept, weight, (True, False), Scales())[0].isfinite().all()
    none = INT8.enter(x[0, :0], Scales())
    assert INT8.forward(none, weight, Scales()).shape == (0, 32)
    dx, dweight = INT8.backward(dy[0, :0], none, weight, (True, True), Scales())
    assert dx.shape == (0, 64) and torch.equal(dweight, torch.zeros(32, 64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_weights_have_narrow_results_of_wide_sums(dtype):
    x, weight, dy = operands(1, 64, 256, 32, dtype)
    kept = INT8.enter(x, Scales())
    exact = INT8.forward(kept, weight.float(), Scales())
    y = INT8.forward(kept, weight, Scales())
    assert torch.equal(y, exact.to(dtype))
    assert [g.dtype for g in INT8.backward(dy, kept, weight, (True, True), Scales())] == [dtype] * 2


# ---- on ranks ----------------------------------------------------------------------------------------------


CUTS = [dict(dp=2), dict(dp=2, zero=3), dict(pp=2, microbatches=2), dict(tp=2)]
CUTS += [dict(tp=2, sequence_parallel=True), dict(cp=2, layout="contiguous")]
DEEP = replace(WIDE, num_layers=2)


def test_cuts_between_blocks_change_no_code():
    """tp cuts at 32 channels, cp at 32 tokens. A cut through a block makes two blocks: the control."""

    def each(cuts, products="int8"):
        return [trained(DEEP, products, length=64, **cut) for cut in cuts]

    ((one, many, plain),) = launch.run(
        lambda: each([{}, dict(microbatches=2)]) + each([{}], "plain"), ranks=1
    )
    for on_rank in launch.run(each, [*CUTS, dict(cp=2, layout="zigzag")], ranks=2):
        *same, through = [distance(result, one) for result in on_rank]
        assert max(same) < 1e-12 and 1e-6 < through < 1e-1, (same, through)
    assert distance(many, one) < 1e-12 and 1e-6 < distance(plain, one) < 1e-1


def test_experts_and_cuts_through_blocks_leave_ranks_alike():
    mixed = replace(WIDE, experts=ExpertsConfig(num_experts=4, top_k=2))
    tiny = small(num_layers=1, tied=False)
    layouts = [(mixed, dict(ep=2, dp=2)), (mixed, dict(tp=2)), (tiny, dict(tp=2)), (tiny, dict(dp=2, zero=3))]

    def rank():
        return [trained(config, "int8", precision="float32", **layout) for config, layout in layouts]

    for first, second in zip(*launch.run(rank, ranks=2)):
        assert distance(first, second) == 0 and max(first[0]) < 4
