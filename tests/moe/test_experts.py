"""Every way to work through the experts gives what a loop over rows gives, at the FLOPs and bytes it promises."""

import pytest
import torch
import torch.nn.functional as F

from minitrain.ledger import Ledger
from minitrain.moe import experts

E, D, WIDE = 5, 8, 16
SIZES = {
    "uneven": [3, 1, 7, 1, 4],
    "experts without rows": [0, 6, 0, 2, 0],
    "all on one": [0, 0, 9, 0, 0],
    "no rows": [0, 0, 0, 0, 0],
}
ACTS = {"gelu": (F.gelu, False), "silu, gated": (F.silu, True)}


def drawn(sizes, gated, dtype=torch.float64, rows=None):
    generator = torch.Generator().manual_seed(0)
    shapes = (sum(sizes) if rows is None else rows, D), (E, D, WIDE), (E, WIDE, D), (E, D, WIDE)
    values = [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]
    values = [(value / 4).requires_grad_() for value in values]
    return values if gated else [*values[:3], None]


def by_row(rows, sizes, up, down, act, gate):
    """One row after the other."""
    owner = [e for e, size in enumerate(sizes) for _ in range(size)]
    y = [
        (act(r @ up[e]) if gate is None else act(r @ gate[e]) * (r @ up[e])) @ down[e]
        for r, e in zip(rows, owner)
    ]
    return torch.stack(y) if y else 0 * rows


def outcome(y, *leaves):
    """y and the gradients of what is a leaf, of a loss in which every element counts differently."""
    (y * torch.linspace(1, 2, y.numel(), dtype=y.dtype).view(y.shape)).square().sum().backward()
    return y.detach(), *(torch.zeros_like(x) if x.grad is None else x.grad for x in leaves if x is not None)


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("case", SIZES)
@pytest.mark.parametrize("way", experts.WAYS)
def test_equals_one_row_after_the_other(way, case, act):
    sizes, (act, gated) = SIZES[case], ACTS[act]
    rows, up, down, gate = drawn(sizes, gated)
    found = outcome(experts.WAYS[way](rows, torch.tensor(sizes), up, down, act, gate), rows, up, down, gate)
    assert all(x.grad is not None for x in (rows, up, down))  # zeros, not None, where nobody came
    rows, up, down, gate = drawn(sizes, gated)
    wanted = outcome(by_row(rows, sizes, up, down, act, gate), rows, up, down, gate)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_flops_are_those_of_the_rows_and_of_what_was_padded():
    sizes = SIZES["uneven"]
    worked = {"loop": 16, "grouped": 16, "padded": E * 7, "blocked": sum(experts.whole_blocks(sizes, 16))}
    for act, gated in ACTS.values():
        for way, rows_worked in worked.items():
            rows, up, down, gate = drawn(sizes, gated)
            with Ledger() as ledger:
                with ledger.phase("forward"):
                    y = experts.WAYS[way](rows, torch.tensor(sizes), up, down, act, gate)
                y.square().sum().backward()
            forward = (2 + gated) * 2 * rows_worked * D * WIDE
            assert ledger.flops_by_phase == {"": 2 * forward, "forward": forward}
