"""What the shorter way gives is what torch's FakeTensorMode gives, the first time and the second."""

import pytest
import torch
from torch.nn import functional as F

from minitrain.ranks.launch.dryrun import ShapesMode
from minitrain.ranks.torch_private import FakeTensorMode


def facts(x, known):
    """What can be seen of a fake tensor; `known` are the storages of the case so far, in order of appearance."""
    if not isinstance(x, torch.Tensor):
        return type(x), x
    storage = x.untyped_storage()
    number = next((i for i, one in enumerate(known) if one._cdata == storage._cdata), len(known))
    known += [storage] * (number == len(known))
    layout = tuple(x.shape), x.stride(), x.storage_offset(), x.dtype, x.device, x.layout
    marks = x.requires_grad, x.is_leaf, x.is_inference() or x._version, x.is_conj(), x.is_neg()
    its_own = type(x), sorted(vars(x).keys() - {"fake_mode"}), x.is_inference()
    return layout, number, storage.nbytes(), marks, its_own


def views():
    x = torch.ones(4, 6, dtype=torch.float64)
    y = x[1:, ::2]
    return x, y, y.t(), y.reshape(9), x.view(24)[3:], x.unsqueeze(0).expand(5, 4, 6), x.diagonal(), y[0]


def products():
    x, w = torch.ones(2, 3, 4), torch.ones(5, 4)
    return F.linear(x, w), x @ w.t(), torch.bmm(x, x.mT), torch.einsum("btd,fd->bf", x, w), (x * w[0]).sum(0)


def in_place():
    x = torch.zeros(3, 4)
    y = x[1]
    return x.add_(1), y.mul_(2), x.copy_(torch.ones(4)), x.view(-1)[2:5].zero_(), torch.add(y, 1, out=y), x


def several():
    x = torch.ones(6, 4)
    values, indices = x.max(0)
    return (values, indices, *x.split(2), *x.chunk(3, 1), *x.topk(2), *torch.sort(x), *x.unbind(0))


def equal_values_of_other_types():
    x = torch.ones(3, dtype=torch.int32)
    return x + 1, x + True, x + 1.0, x.sum(0, keepdim=True), x.sum(0, keepdim=False), x * 1, x * 1.0, x + 0.0


def dtypes():
    x = torch.ones(3)
    kept = [x.to(dtype) for dtype in (torch.bfloat16, torch.float64, torch.int8, torch.bool)]
    kept += [torch.ones(2), torch.arange(3) / 2]
    torch.set_default_dtype(torch.float64)
    try:
        return *kept, torch.ones(2), torch.arange(3) / 2, x / 2
    finally:
        torch.set_default_dtype(torch.float32)


def gradients():
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.LayerNorm(8))
    x = torch.ones(2, 3, 4, requires_grad=True)
    y = model(x)
    y.square().mean().backward()
    return x, x.grad, y, *model.parameters(), *(param.grad for param in model.parameters())


def without_gradients():
    x = torch.ones(3, requires_grad=True)
    with torch.no_grad():
        y = x * 2
    with torch.inference_mode():
        z = torch.ones(3) * 2
    return x * 2, y, z, x.detach(), x.clone(), torch.ones(3) * 2


def other_memory():
    x = torch.ones(4, 6)
    x.untyped_storage().resize_(4 * 100)
    y = torch.empty(3, 5).resize_(2, 2)
    z = torch.ones(2, dtype=torch.complex64)
    return x + 1, x.view(24), x, y, y + 1, z.conj(), z.conj() * 2, z.conj().imag, torch.view_as_real(z)


def constants():
    x = torch.tensor(3.0)
    y = x + 1
    return x.item(), y.item(), y, y.shape, torch.tensor([1, 2])[0], torch.scalar_tensor(2.0) * x


def drawn():
    x, chance = torch.empty(3, 4), torch.Generator()
    results = [x.normal_(0.0, 0.5, generator=torch.Generator()), x.uniform_(generator=chance)]
    results += [x.t().normal_(), torch.randn(2, 3), torch.randn(2, 3, generator=chance)]
    return *results, torch.randperm(5, generator=chance)


def images():
    x = torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last)
    return x, x * 2, F.conv2d(x, torch.ones(5, 3, 3, 3)), x.contiguous(), torch.empty_like(x)


def nearly_alike():
    """Tensors that differ in one thing, and go through the same operators."""
    x, z = torch.ones(4, 4), torch.ones(4, 4, dtype=torch.complex64)
    tensors = [x, x.t(), x[:2], x[2:], x[:2, :2], x[2:, 2:], torch.ones(2, 4), x.double(), x.long()]
    tensors += [z, z.conj(), z.real, z.imag, z.conj().imag, x.expand(4, 4), torch.ones(1, 4).expand(4, 4)]
    made = []
    for one in tensors:
        made += [one * 2, one.clone(), one.contiguous(), one[1], one.t(), one.reshape(-1), one.flatten()]
        made += [torch.empty_like(one), one.sum(0), one.sum(0, keepdim=True), one @ one.t(), one / 2]
    made += [x.sum(0, dtype=torch.float64), x.sum([0, 1]), x.sum([0]), x.sum([])]
    return *made, x.view(2, 8), x.view(8, 2)


CASES = (nearly_alike, views, products, in_place, several, equal_values_of_other_types, dtypes, gradients)
CASES += (without_gradients, other_memory, constants, drawn, images)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_the_same_tensors_as_torchs_mode_gives(case):
    said = []
    for mode in (FakeTensorMode(), ShapesMode(), ShapesMode()):
        for _ in range(2):
            with mode:
                results, known = case(), []
                said.append([facts(x, known) for x in results])
    assert all(one == said[0] for one in said[1:])


def test_a_tensor_of_another_mode_is_refused_as_torch_does():
    with ShapesMode():
        x = torch.ones(3)
        x + 1
    with ShapesMode(), pytest.raises(AssertionError, match="Mixing fake modes NYI"):
        x + 1
