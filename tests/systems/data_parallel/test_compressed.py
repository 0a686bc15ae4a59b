"""Compressed sums: what travels, that nothing is lost for good, in which layouts, and through a checkpoint."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from minitrain import collectives, launch
from minitrain.compose.parallelize import parallelize
from minitrain.compose.trainer import check_identity, identity
from minitrain.data_parallel.states import full_grads
from minitrain.model.config import ExpertsConfig
from minitrain.model.training.hyperparameters import Hyperparameters
from minitrain.plan.strategy import Strategy
from minitrain.precision.blocks import Blocks, quantize, to_bytes
from minitrain.ranks.sharding import full_tensor, placement
from minitrain.systems.data_parallel.compressed import (
    Feedback,
    cocktail,
    compressor_of,
    dense,
    dropping,
    int8,
    thc,
)
from minitrain.systems.data_parallel.loss_by_bytes import learn
from tests.layouts import Draw, matches, one_process, step_of
from tests.parallel import Traffic
from tests.saving import all_files, load, save
from tests.test_layouts import CONFIG

ROWS, COLUMNS = 63, 65  # 4,095 numbers, of which a rank adds up 1,024, in 4 blocks of 256
SENT = {  # by 4 ranks
    "topk:0.1": 4 * 3 * 8 * 409,
    "randomk:0.1": 2 * 3 * 4 * 409,
    "cocktail:0.08": 4 * 3 * (164 + 2 * 327 + 4),
    "int8": 4 * 2 * 3 * (1024 + 4 * 4),
    "thc:4": 4 * 3 * (1024 // 2 + 1024 + 4),
    "powersgd:2": 2 * 3 * 4 * 2 * (ROWS + COLUMNS),
}


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape or (ROWS, COLUMNS), generator=torch.Generator().manual_seed(seed))


def of_all(x: Tensor) -> Tensor:
    return collectives.all_gather(x[None], collectives.world())


# ---- what travels ------------------------------------------------------------------------------------------


def each_compressor() -> dict:
    group, found = collectives.world(), {}
    for text in SENT:
        feedback, left, told = Feedback(compressor_of(text)), torch.zeros(ROWS, COLUMNS), []
        for step in range(3):
            grad = numbers(10 * step + group.rank()) * 10.0**-step
            with Traffic() as ledger:
                told.append(feedback(grad, group))
                feedback.settle()
            left += of_all(grad).sum(0) - told[-1]
        owed = of_all(feedback.residual).sum(0)
        alike = all(torch.equal(x, y) for y in told for x in of_all(y))
        overflown = feedback(grad * (math.nan if group.rank() == 1 else 1.0), group)
        found[text] = ledger.sent_bytes(), (left - owed).abs().max(), owed.norm(), alike, overflown
    return found


def test_what_is_not_told_is_owed():
    """Gradients less what all have learnt are the residuals of all; every rank learns the same bits, in the
    bytes of the formula. Where one rank's has overflowed, all learn it."""
    told = launch.run(each_compressor, ranks=4)
    assert {text: sum(found[text][0] for found in told) for text in SENT} == SENT
    for text, (_, far, owed, alike, overflown) in (pair for found in told for pair in found.items()):
        assert far < 1e-5 and owed > 1e-3 and alike, text
        assert overflown.isnan().any(), text


def in_blocks() -> tuple:
    group = collectives.world()
    x = numbers(group.rank(), 4096)
    total, own = int8(x, group, 0)
    return total, x, own, to_bytes(quantize(x, Blocks("int8", (256,)))).nbytes


def test_lossy_compression():
    """Half a step of its block at most, of each rank's number and of the sum; 4,160 bytes for 8,192."""
    totals, given, owns, sizes = zip(*launch.run(in_blocks, ranks=4))
    step = lambda x: (x.view(-1, 256).abs().amax(1, keepdim=True) / 127).expand(-1, 256).flatten()
    exact, bound = sum(x.double() for x in given), sum(step(x) for x in given) / 2
    assert ((totals[0] - exact).abs() <= bound + step(exact + bound) / 2 + 1e-5).all()
    for rank, (x, own) in enumerate(zip(given, owns)):
        others = torch.arange(4096) // 1024 != rank  # its own slice is that of the sum
        error = (own - x).abs()[others]
        assert (error <= step(x)[others] / 2 + 1e-6).all() and error.max() > 0.4 * step(x).min()
    assert sizes[0] == 4160 and 2 * 4096 == 8192
    assert not torch.equal(totals[0], sum(given)), "a control: something is rounded"


def on_one_grid() -> tuple:
    group = collectives.world()
    x = numbers(group.rank(), 4096)
    x[7] = 40.0
    total, own = thc(4, x, group, 0, rotate=False)
    far = lambda y: (y - of_all(x).sum(0)).square().mean().sqrt().item()
    turned = sum(thc(4, x, group, step)[0] for step in range(100)) / 100
    return x, total, own, far(total), far(thc(4, x, group, 0)[0]), far(turned)


def test_thc():
    """The sum of codes is the code of the sum, to the bit; right on average; turned, an outlier costs less."""
    xs, totals, owns, plain, turned, mean = zip(*launch.run(on_one_grid, ranks=4))
    unit = 2.0 ** math.ceil(math.log2(2 * max(x.abs().max().item() for x in xs) / 15))
    codes = [own.double() / unit + 7.5 for own in owns]
    assert all(torch.equal(code, code.round()) and 0 <= code.min() and code.max() <= 15 for code in codes)
    assert all(((own - x).abs() < unit).all() for own, x in zip(owns, xs))
    assert all(torch.equal(total.double(), (sum(codes) - 4 * 7.5) * unit) for total in totals)
    assert turned[0] < plain[0] / 2 and mean[0] < turned[0] / 7, "a tenth of it, of 100 draws"


def learnt(cases: list) -> list:
    return [learn(made, collectives.world(), **how) for made, how in cases]


def test_cocktailsgd():
    """4 bits of the largest of drawn places: with feedback within 1 % of dense, far off without."""
    cases = [(dense, {}), *((partial(cocktail, 0.08), dict(feedback=on)) for on in (True, False))]
    (full, best), (few, close), (_, far) = launch.run(learnt, cases, ranks=4)[0]
    assert abs(close / best - 1) < 0.01 and far > 1.4 * best
    sizes = [max(1, int(0.08 * size)) for size in (16 * 48, 48 * 8)]
    assert few == sum(3 * (-(-k // 2) + 2 * k + 4) for k in sizes) and full == 2 * 3 * 4 * (24 * 48) // 4
    x = numbers(1)
    _, own = launch.run(lambda: cocktail(0.5, x, collectives.world(), 0), ranks=2)[0]
    largest = x.abs().flatten().topk(ROWS * COLUMNS // 2).indices
    step = x.abs().max() / 7
    rounded = (x.flatten()[largest] / step).round() * step
    expected = torch.zeros(ROWS * COLUMNS).index_copy(0, largest, rounded)
    assert torch.allclose(own.flatten(), expected, atol=1e-6), "of all places the larger half"


def test_mlt():
    """Of the early layer's gradient the smallest tenth may be lost on the way, any tenth may not."""
    lost = [partial(dropping, share, by) for share in (0.1, 0.3) for by in ("size", "chance")]
    cases = [(dense, {}), *((made, dict(early=True, feedback=False)) for made in lost)]
    best, *others = (loss for _, loss in launch.run(learnt, cases, ranks=4)[0])
    small, any_tenth, third, any_third = (loss / best - 1 for loss in others)
    assert abs(small) < 0.001 < 0.01 < any_tenth and abs(third) < 0.01 < 0.04 < any_third


# ---- in a run ----------------------------------------------------------------------------------------------

LAYOUTS = {
    "replicated": dict(dp=4), "ZeRO-1": dict(dp=4, zero=1, bucket_bytes=1000),
    "ZeRO-2": dict(dp=4, zero=2, bucket_bytes=3000), "ZeRO-3": dict(dp=4, zero=3), "tp": dict(dp=2, tp=2),
    "tp, slices": dict(dp=2, tp=2, zero=1, sequence_parallel=True),
    "pp, a tied table": dict(dp=2, pp=2, zero=2), "cp": dict(cp=2, dp=2, zero=3), "ep": dict(dp=4, ep=2),
}  # fmt: skip


def case(layout: dict, **more) -> Draw:
    experts = ExpertsConfig(4, 2, balance_alpha=0.5) if "ep" in layout else None
    strategy = Strategy(**(dict(precision="float64", microbatches=2, compress="topk:0.1") | layout | more))
    return Draw(replace(CONFIG, experts=experts), strategy, (8, 8), 16, None, ("*norm1*",), "adamw", "ragged")


def residuals(run) -> dict[str, Tensor]:
    """Summed over the ranks whose gradients are, and whole."""
    found = {}
    for param, feedback in run.compression.feedback.items() if run.compression else ():
        key, total = run.sync.key_of[param], feedback.residual.double()
        for group in (*key.groups, *([key.copies] if key.copies is not None else [])):
            total = collectives.all_reduce(total, group)
        found[run.sync.names[param]] = full_tensor(total, placement(param).shards)
    return found


def trained(asked: Draw, steps: int = 1):
    torch.manual_seed(collectives.world().rank())
    frozen = dict(seed=3, frozen=asked.frozen)
    run = parallelize(asked.config, asked.strategy, asked.make_optimizer, **frozen)
    return run, [step_of(asked, run, step).item() for step in range(steps)]


def first_step(asked: Draw) -> tuple:
    run, losses = trained(asked)
    told, owed = full_grads(run.sync), residuals(run)
    return losses, told, owed, run.state_dict()["parameters"]


@pytest.mark.parametrize("name", [n for n in LAYOUTS if n not in ("ZeRO-1", "tp")])
def test_gradients_are_told_or_owed_in_every_layout(name, monkeypatch):
    """Against the gradients of one process; and every rank goes on with the same bits."""
    import tests.layouts

    monkeypatch.setattr(tests.layouts, "STEPS", 1)
    asked = case(LAYOUTS[name])
    reference, results = one_process(asked), launch.run(first_step, asked, ranks=4)
    for losses, told, owed, params in results:
        assert abs(losses[0] - reference.losses[0]) < 1e-12 and told.keys() == owed.keys()
        assert not any(matches(one, asked) for one in told)
        for one in told:
            assert (told[one] + owed[one] - reference.grads[one]).abs().max() < 1e-7, one
            assert torch.equal(params[one], results[0][3][one])
    assert set().union(*(told for _, told, *_ in results)) == reference.grads.keys()
    assert max(x.abs().max() for _, _, owed, _ in results for x in owed.values()) > 1e-3


def in_all_stages() -> bool:
    every = [trained(case(LAYOUTS[name]), 2)[0].state_dict()["parameters"] for name in list(LAYOUTS)[:4]]
    return all(torch.equal(one[name], every[0][name]) for one in every[1:] for name in one)


def test_stages_of_zero_and_buckets_change_nothing():
    assert all(launch.run(in_all_stages, ranks=4))


def overflown(asked: Draw) -> tuple:
    run, _ = trained(asked)
    before, steps = residuals(run), run.compression.steps
    param = next(iter(run.compression.feedback))
    if collectives.world().rank() == 1:
        param.register_hook(lambda grad: grad.where(torch.arange(grad.numel()).view_as(grad) > 0, math.inf))
    updated = run.step(run.batch(asked.rows(1), 1)).updated
    alike = all(torch.equal(before[name], x) for name, x in residuals(run).items())
    return updated, alike, run.compression.steps - steps, max(x.abs().max() for x in before.values())


def test_a_step_that_overflows_leaves_residuals_as_they_were():
    """Also if what has overflowed is not what travels; and residuals are without the scale."""
    sizes = []
    for scale in (2.0**20, 2.0**6):
        asked = case(dict(dp=2), loss_scale=scale, compress="randomk:0.1")
        for updated, alike, steps, largest in launch.run(overflown, asked, ranks=2):
            assert not updated and alike and steps == 0
            sizes.append(largest)
    assert max(sizes) == pytest.approx(min(sizes)) and min(sizes) > 1e-3


# ---- saved -------------------------------------------------------------------------------------------------


def saved(asked: Draw, folder) -> tuple:
    run, _ = trained(asked)
    checkpoint, owed = all_files(folder, save(run, folder)), residuals(run)
    return checkpoint, owed, step_of(asked, run, 1).item(), run.state_dict()["parameters"]


def loaded(asked: Draw, checkpoint) -> tuple:
    run = parallelize(asked.config, asked.strategy, asked.make_optimizer, seed=3, frozen=asked.frozen)
    lost = [line for line in load(run, checkpoint) if not line.startswith("random")]
    owed = residuals(run)
    return lost, owed, step_of(asked, run, 1).item(), run.state_dict()["parameters"]


def test_residuals_are_saved_and_loaded_on_other_ranks(tmp_path):
    """On as many a run goes on to the bit; on others their sum is what it was; whole sums say what they lose."""
    asked = case(dict(dp=2, tp=2), compress="randomk:0.2")
    checkpoint, owed, loss, params = launch.run(saved, asked, tmp_path / "a", ranks=4)[0]
    for layout in (dict(dp=2, tp=2), dict(dp=3, zero=3), dict(dp=2, pp=2)):
        other = case(layout, compress="randomk:0.2")
        lost, found, again, now = launch.run(loaded, other, checkpoint, ranks=other.strategy.ranks)[0]
        assert not lost and all((found[name] - owed[name]).abs().max() < 1e-6 for name in found)
        if other == asked:
            assert again == loss and all(torch.equal(params[name], now[name]) for name in params)
    plain = case(dict(dp=2), compress="none")
    lost, *_ = launch.run(loaded, plain, checkpoint, ranks=2)[0]
    assert lost == ["residuals of compressed gradients: this run sends whole ones"]
    checkpoint, *_ = launch.run(saved, plain, tmp_path / "b", ranks=2)[0]
    lost, found, *_ = launch.run(loaded, asked, checkpoint, ranks=4)[0]
    assert "begin anew" in lost[0] and not any(x.any() for x in found.values())


def test_a_run_goes_on_with_the_compression_it_had(tmp_path):
    of = lambda text: identity(CONFIG, Hyperparameters(), "float32", Strategy(dp=2, compress=text))
    position = dict(batch_size=8, step=0)
    older = {name: value for name, value in of("none").items() if name != "compress"}
    for was, now in ((of("int8"), "none"), (older, "int8"), (of("thc:4"), "thc:2")):
        with pytest.raises(ValueError, match="compress=.*another run"):
            check_identity(tmp_path, dict(identity=was, position=position), of(now), None)


def test_refused_in_one_line():
    wrong = "topk topk:0 cocktail:0.6 thc:9 powersgd:1.5 int8:4 zip".split()
    cases = [(dict(compress=text), f"compress='{text}'; use none, topk:0.01") for text in wrong]
    cases.append((dict(dp=2, zero="III", node=2, compress="int8"), "compressed twice; use zero=0 to 3"))
    cases.append((dict(dp=2, precision="fp8_lm", compress="int8"), "use compress=none"))
    for values, why in cases:
        with pytest.raises(ValueError, match=why) as error:
            Strategy(**values)
        assert "\n" not in str(error.value)
