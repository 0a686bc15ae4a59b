"""Rates that a narrow model finds for a wide one; trials in one model beside trials alone; bubbles filled."""

import pytest
import torch

from minitrain.pipeline.schedules.one_direction import gpipe, one_f_one_b
from minitrain.pipeline.simulate import Costs, simulate
from minitrain.systems.cluster.trials import filled, trained

RATES = [2.0**-k for k in (10, 8, 6, 4, 2)]


def test_hydro():
    """Under muP width 64 finds width 256's best rate, where neighbours lose a third or more; with one rate for
    all weights it does not; fused trials are those run alone; bubbles are filled and the pipeline ends when it
    did."""
    generator = torch.Generator().manual_seed(7)
    normal = lambda *shape, **kind: torch.randn(*shape, generator=generator, **kind)
    inside, outside, x = normal(16, 32) / 4, normal(32, 4) / 32**0.5, normal(100, 64, 16)
    y = 2 * (x @ inside).relu() @ outside
    loss = {
        (base, width): trained(width, RATES, x, y, base)[-10:].mean(0).nan_to_num(1e9)
        for base, width in ((None, 64), (None, 256), (64, 256))
    }
    best = {key: int(losses.argmin()) for key, losses in loss.items()}
    assert torch.equal(trained(64, RATES, x, y, 64, steps=2), trained(64, RATES, x, y, steps=2))
    assert best[64, 256] == best[None, 64] == 2 and best[None, 256] == 1
    for key in ((None, 64), (64, 256)):
        assert all(loss[key][i] > 1.33 * loss[key][2] for i in (1, 3))
    assert loss[64, 256][2] < loss[None, 256].min(), "and the wide model is the better for it"
    x, y = x.double(), y.double()
    together = trained(24, RATES, x, y, 8, steps=20)
    alone = [trained(24, [rate], x, y, 8, steps=20) for rate in RATES]
    torch.testing.assert_close(together, torch.cat(alone, 1), rtol=1e-9, atol=1e-12)
    for schedule in (one_f_one_b(4, 8), gpipe(3, 5)):
        run = simulate(schedule, Costs(F=2, B=4))
        for step in (1, 2, 5):
            for rank, begins in enumerate(filled(schedule, step, Costs(F=2, B=4))):
                spans = [(span.start, span.end) for span in run.spans[rank]]
                work = sorted([*spans, *((at, at + step) for at in begins)])
                assert all(a[1] <= b[0] for a, b in zip(work, work[1:])) and work[-1][1] <= run.makespan
                assert len(begins) == run.idle(rank) if step == 1 else len(begins) <= run.idle(rank) / step
    with pytest.raises(ValueError, match="width"):
        trained(0, RATES, x, y)
