"""On a GPU: attention by tiles and by torch's kernels, forward and backward, against whole matrices in float64 on the CPU."""

import pytest
import torch

from minitrain import launch
from minitrain.attention.flash import flash_1, flash_2, flash_attention
from minitrain.attention.kernel import FUSED, PLAIN
from minitrain.model.layers import naive_attention

KERNELS = {
    "whole matrices": PLAIN, "torch's kernels": FUSED, "tiles, version 1": flash_1(4096),
    "tiles, version 2": flash_2(4096),
}  # fmt: skip
ERRORS = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def check(name: str, dtype: torch.dtype, kv_heads: int = 2) -> None:
    """The largest error, of the largest number, of the output and the gradients of q, k and v."""
    tf32 = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        shapes = (2, 4, 64, 32), (2, kv_heads, 64, 32), (2, kv_heads, 64, 32), (2, 4, 64, 32)
        made = dict(generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        given = [torch.randn(shape, **made).to(dtype) for shape in shapes]
        results = []
        for where, kind in ((launch.device(), dtype), ("cpu", torch.float64)):
            *qkv, dout = (x.detach().to(where, kind) for x in given)
            qkv = [x.clone().requires_grad_() for x in qkv]
            out = naive_attention(*qkv) if results else flash_attention(*qkv, kernel=KERNELS[name])
            out.backward(dout)
            results.append([out.detach(), *(x.grad for x in qkv)])
        for ours, exact in zip(*results):
            assert ours.dtype == dtype and ours.device.type == launch.device().type
            assert (ours.double().cpu() - exact).abs().max() <= ERRORS[dtype] * exact.abs().max()
    finally:
        torch.backends.cuda.matmul.allow_tf32 = tf32


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", ERRORS, ids=str)
@pytest.mark.parametrize("name", KERNELS)
def test_on_a_gpu(name, dtype):
    check(name, dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_here(dtype):
    check("torch's kernels", dtype)
