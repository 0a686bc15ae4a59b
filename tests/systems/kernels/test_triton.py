"""Triton's kernels beside torch's: in its interpreter, in a process of its own, and on a GPU."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from minitrain.attention.kernel import plain_forward
from minitrain.systems.kernels import tiles, triton_kernels

ROOT = Path(__file__).parents[3]
BESIDE = ROOT / "build" / "triton"  # make triton
THERE = importlib.util.find_spec("triton")


def check(device: str) -> None:
    """Ragged sizes in float32; the programs, one more at a time, fill the tiles that tiles.py says."""
    torch.manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, device=device)
    for (rows, depth, columns), group_rows in (((70, 50, 90), 2), ((33, 64, 16), 8)):
        a, b = draw(rows, depth), draw(depth, columns)
        close(triton_kernels.matmul(a, b, group_rows, 16), a.double() @ b.double())
    a, b = torch.ones(80, 32, device=device), torch.ones(32, 48, device=device)
    for programs in (1, 2, 5, 9, 15):
        c = torch.zeros(80, 48, device=device)
        triton_kernels.matmul_kernel[(programs,)](a, b, c, 80, 48, 32, 2, 16, 32)
        filled = {tuple(at) for at in c[::16, ::16].nonzero().tolist()}
        assert filled == {tiles.grouped(program, 5, 3, 2) for program in range(programs)}
    for columns in (37, 64):
        x = 9 * draw(5, columns)
        close(triton_kernels.softmax(x), x.double().softmax(-1))
    for causal in (True, False):
        for tokens, width in ((40, 16), (32, 32)):
            q, k, v = draw(3, 2, 2, tokens, width)
            expected = plain_forward(q.double(), k.double(), v.double(), causal)[0]
            close(triton_kernels.attention(q, k, v, causal, 16), expected)
    with pytest.raises(ValueError, match="tile=24: use 16, 32, 64, 128"):
        triton_kernels.matmul(a, b, 1, 24)
    with pytest.raises(ValueError, match="row by row"):
        triton_kernels.softmax(a.t())


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    assert (found.double() - expected).abs().max() <= tolerance * max(1, expected.abs().max())


@pytest.mark.skipif(not (THERE or BESIDE.exists()), reason="Triton is not installed: make triton")
def test_programs_in_the_interpreter():
    path = [str(ROOT), *([] if THERE else [str(BESIDE)]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(path)}
    command = "from tests.systems.kernels.test_triton import check; check('cpu')"
    ran = subprocess.run([sys.executable, "-c", command], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]


@pytest.mark.skipif(bool(THERE), reason="Triton is installed")
def test_without_triton_a_line_says_what_to_install():
    with pytest.raises(ImportError, match="python -m pip install triton"):
        triton_kernels.softmax(torch.ones(2, 2))


@pytest.mark.cuda(alone=True)
def test_programs_on_a_gpu():
    check("cuda")
    half = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
    a, b, (q, k, v) = half(512, 300), half(300, 700), half(3, 2, 4, 500, 64)
    close(triton_kernels.matmul(a, b), a.double() @ b.double(), 1e-2)
    close(triton_kernels.softmax(a), a.double().softmax(-1), 1e-2)
    expected = plain_forward(q.double(), k.double(), v.double(), True)[0]
    close(triton_kernels.attention(q, k, v), expected, 2e-2)
