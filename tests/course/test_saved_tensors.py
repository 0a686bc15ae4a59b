"""The instrument that lists what autograd keeps, on graphs whose answer is known by hand."""

import weakref

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from minitrain.course.saved_tensors import Saved, SavedTensors


class Twice(nn.Module):
    """Two projections of one input, multiplied: keeps the input once, and both products."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(8, 5), nn.Linear(8, 5)

    def forward(self, x):
        return self.left(x) * self.right(x)


def test_each_block_once_under_the_module_that_kept_it():
    module, x = Twice(), torch.randn(3, 8)
    with SavedTensors(module) as saved:
        y = module(x)
    assert saved.saved == [
        Saved("left", (3, 8), torch.float32, 96),
        Saved("", (3, 5), torch.float32, 60),
        Saved("", (3, 5), torch.float32, 60),
    ]
    assert saved.bytes == 216 and saved.by_place == {"left": 96, "": 120}
    assert torch.equal(y, module(x))  # watching changes nothing
    y.sum().backward()
    assert torch.allclose(module.left.bias.grad, module.right(x).sum(0))
    assert saved.table(unit=24).splitlines() == [
        "left      [3, 8]  float32   96  4.000",
        "(itself)  [3, 5]  float32   60  2.500",
        "(itself)  [3, 5]  float32   60  2.500",
        "all                        216  9.000",
    ]
    assert saved.table().endswith(" 216.000")


def test_a_view_counts_its_whole_block_once():
    module, x = Twice(), torch.randn(6, 8)
    with SavedTensors(module) as saved:
        module(x[:3])
        module(x[3:])
    assert saved.saved[0] == Saved("left", (3, 8), torch.float32, 192) and saved.by_place["left"] == 192


def test_what_follows_an_error_has_its_own_place():
    module = Twice()
    with SavedTensors(module) as saved:
        with pytest.raises(RuntimeError):
            module(torch.randn(3, 7))
        torch.ones(2, requires_grad=True) * torch.ones(2)
        module(torch.randn(3, 8))
    assert [x.place for x in saved.saved if x.shape == (3, 8)] == ["left"] and saved.by_place[""] == 8 + 120


def test_what_is_watched_lives_no_longer():
    module, x = Twice(), torch.randn(3, 8)
    with SavedTensors(module) as saved:
        y, memory = module(x), weakref.ref(x.untyped_storage())
        del x, y
    assert memory() is None and saved.bytes == 216


def test_nothing_is_kept_without_gradients_and_nothing_stays_watched():
    module, x = Twice(), torch.randn(3, 8)
    with SavedTensors(module) as saved, torch.no_grad():
        module(x)
    assert saved.bytes == 0
    module(x)
    assert saved.bytes == 0 and not module.left._forward_hooks and not module._forward_pre_hooks


def test_a_frozen_weight_needs_no_input():
    module, x = Twice(), torch.randn(3, 8)
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    with SavedTensors(module) as saved:
        module(x.requires_grad_())
    assert saved.by_place == {"": 120}


def test_fake_tensors_give_the_same_account():
    real = SavedTensors(module := Twice())
    with real:
        module(torch.randn(3, 8))
    with FakeTensorMode():
        fake = SavedTensors(module := Twice())
        with fake:
            module(torch.randn(3, 8))
    assert real.saved == fake.saved
