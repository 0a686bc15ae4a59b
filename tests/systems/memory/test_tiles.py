"""A linear in tiles: the same numbers, and a working memory that falls by the number of tiles."""

import pytest
import torch
from torch import nn

from minitrain.memory.pools import on_host
from minitrain.ranks.ledger import Ledger
from minitrain.systems.memory.tiles import TiledLinear
from minitrain.systems.plan.offload import TransformerShape as Shape

WIDTH = 24  # D, and F = 4·D


def linears(tiles, bias=True):
    torch.manual_seed(0)
    whole = nn.Linear(WIDTH, 4 * WIDTH, bias=bias, dtype=torch.float64)
    return whole, TiledLinear(whole.weight, whole.bias, tiles)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tiles", [1, 2, 8, 96])
def test_tiles_give_what_the_whole_gives(tiles, bias):
    whole, tiled = linears(tiles, bias)
    for _ in range(2):  # gradients add up
        results = []
        for linear in (whole, tiled):
            x = torch.randn(5, 3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
            y = linear(x.requires_grad_())
            (y.tanh() ** 2).sum().backward()
            results.append((y, x.grad, *(param.grad for param in linear.parameters())))
        for one, other in zip(*results):
            assert torch.allclose(one, other, rtol=0, atol=1e-12)


def test_control_a_tile_left_out_is_noticed():
    whole, tiled = linears(8)
    with torch.no_grad():
        tiled.weight[12:24] = 0
    x = torch.randn(3, WIDTH, dtype=torch.float64)
    assert not torch.allclose(whole(x), tiled(x))


def peaks(tiles, rows=1):
    """Of the device, beside x, y and their gradients: in forward, in backward; and bytes over the link."""
    _, tiled = linears(tiles, bias=False)
    x = torch.randn(rows, WIDTH, dtype=torch.float64, requires_grad=True)
    with Ledger() as ledger:
        y = tiled(x)
    forward, up = ledger.peak_bytes - x.nbytes - y.nbytes, ledger.copied_bytes("to_device")
    dy = torch.ones_like(y)
    with Ledger() as ledger:
        y.backward(dy)
    down, again = ledger.copied_bytes("to_host"), ledger.copied_bytes("to_device")
    return forward, ledger.peak_bytes - 2 * x.nbytes - dy.nbytes, (up, again, down)


@pytest.mark.parametrize("tiles", [1, 2, 8, 32])
def test_the_working_memory_is_a_tile(tiles):
    """8 bytes per element. With one row of x the rest, a tile of y and dx once more, is small: exact."""
    weight = 8 * 4 * WIDTH * WIDTH
    forward, backward, copied = peaks(tiles)
    assert forward == weight // tiles + 8 * 4 * WIDTH // tiles  # a tile of W, a tile of y
    assert backward == weight // tiles + 8 * WIDTH  # a tile of W and its part of dx; or a tile of dW
    assert copied == (weight, weight, weight)
    assert peaks(1)[0] == tiles * forward


def test_parameters_and_gradients_are_the_hosts():
    """Copies of what was given. Each tile, of W and b, crosses once in each direction and pass."""
    whole, tiled = linears(4)
    for mine, given in zip(tiled.parameters(), whole.parameters(), strict=True):
        assert on_host(mine) and mine.untyped_storage().on_host == "parameters"
        assert mine.data_ptr() != given.data_ptr()
    x = torch.randn(3, WIDTH, dtype=torch.float64)
    with Ledger() as ledger:
        y = tiled(x)
    assert ledger.copied_bytes("to_device") == tiled.weight.nbytes + tiled.bias.nbytes
    with Ledger() as ledger:
        y.sum().backward()
    assert ledger.copied_bytes("to_device") == tiled.weight.nbytes
    assert ledger.copied_bytes("to_host") == tiled.weight.nbytes + tiled.bias.nbytes
    assert {param.grad.untyped_storage().on_host for param in tiled.parameters()} == {"gradients"}
    assert ledger.host_by_kind["gradients"] == tiled.weight.nbytes + tiled.bias.nbytes


def test_the_formula_of_the_paper_counts_weight_and_gradient():
    shape = Shape(1, WIDTH, 4)
    assert shape.working_bytes() == 2 * 2 * 4 * WIDTH * WIDTH == 8 * shape.working_bytes(8)


def test_wrong_use_is_refused():
    for tiles in (-1, 0, 5, 97):
        with pytest.raises(ValueError, match=f"tiles={tiles}: use a divisor of the 96 rows"):
            linears(tiles)
