"""On a GPU: copies to its host and back beside products of the computing stream, in pinned memory."""

import pytest
import torch

from minitrain import launch
from minitrain.memory.pools import to_device, to_host


def there_and_back() -> None:
    device = launch.device()
    x = torch.randn(512, 512, dtype=torch.float64, device=device)
    away, wanted = to_host(x @ x), (x @ x).cpu()  # the copy waits for the product that makes its source
    host = away.wait()
    assert torch.equal(host, wanted) and host.device.type == "cpu"
    assert host.is_pinned() == (device.type == "cuda")
    coming = to_device(host, device)
    y = x @ x + 1  # beside it
    assert torch.equal(coming.wait() + 1, y) and coming.wait().device == x.device
    room = torch.zeros_like(x)
    assert to_device(host, out=room).wait() is not None and torch.equal(room.cpu(), host)


@pytest.mark.cuda
def test_on_a_gpu():
    there_and_back()


def test_here():
    there_and_back()
