"""What attention asks of a GPU's kernels: shapes without numbers show every argument, a real card the rest.

The kernel for CUDA reads lse as if it were dense whatever its strides are, wants widths in multiples of 8, and
takes two dtypes and no bias. None of this is said on a CPU. What it does not take is computed by rows, and
that is equal to the plain equations anywhere.
"""

import pytest
import torch

from minitrain.attention import kernel
from minitrain.attention.kernel import FUSED, PLAIN, Kernel, has_flash
from minitrain.attention.placed import Alibi, Documents, Placed, alibi_slopes
from minitrain.context.layout import contiguous, striped, zigzag
from minitrain.context.ring import Rings, queries_backward, ring_backward, ring_forward
from minitrain.ranks import collectives, torch_private
from minitrain.ranks.launch import dryrun
from minitrain.ranks.ledger import Ledger
from minitrain.ranks.torch_private import DispatchMode, FakeTensor
from tests.pretend import PRETENDED, needs_pretended, pretended

CUDA, B, H, T, K = torch.device("cuda"), 2, 4, 16, 16
FLASH = {torch_private.flash_cuda.default: 3, torch_private.flash_cuda_backward.default: 6}


class Refused(DispatchMode):
    """Sees the calls of the two kernels, as their C++ does: raises at what it raises at or misreads."""

    def __init__(self, width: int):
        super().__init__()
        self.scale = width**-0.5  # of heads before they were padded
        self.calls = {op: 0 for op in FLASH}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in FLASH:
            self.calls[func] += 1
            assert abs(kwargs["scale"] - self.scale) < 1e-12
            *rows, lse = args[: FLASH[func]] if FLASH[func] == 6 else (*args[:3], None)
            for x in rows:
                assert x.is_cuda and x.dtype in (torch.float16, torch.bfloat16) and x.dtype == rows[0].dtype
                assert x.stride(-1) == 1 and x.size(-1) % 8 == 0 and x.size(-1) <= 256
            assert len({x.size(-1) for x in rows}) == 1
            if lse is not None:
                assert lse.dtype == torch.float32 and lse.is_contiguous(), f"lse lies {lse.stride()}"
        return func(*args, **(kwargs or {}))


def calls_of(name, width=K, dtype=torch.bfloat16, broken=False, rank=1, ranks=4) -> tuple[int, int]:
    """How often the kernels ran, forward and backward, on one rank of a dry run on a device that is taken for
    CUDA: of CUDA itself a torch without it can make empty tensors only."""
    (forward, backward), _ = CORES[name]

    def body():
        q, k, v = (torch.empty(B, heads, T, width, dtype=dtype, device=PRETENDED) for heads in (H, 2, 2))
        with Refused(width) as seen:
            out, lse = forward(q, k, v)
            grads = backward(torch.empty_like(out).mT.contiguous().mT, q, k, v, out, lse)
        assert (out.dtype, out.shape, lse.shape) == (dtype, q.shape, q.shape[:-1])
        assert [x.shape for x in grads] == [x.shape for x in (q, k, v)]
        return tuple(seen.calls.values())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeTensor, "is_cuda", property(lambda x: x.device.type == "gpu"))
        patch.setattr(kernel, "has_flash", lambda device, *rest: has_flash(CUDA, *rest))
        if broken:
            patch.setattr(torch.Tensor, "contiguous", lambda x: x)
        return dryrun.run(body, rank=rank, ranks=ranks)


def ring(layout, backward=ring_backward):
    """Both passes of a ring of a dry run's ranks."""
    rings = lambda: Rings((collectives.world(),), layout, True)
    return (
        lambda q, k, v: ring_forward(q, k, v, rings(), FUSED),
        lambda *saved: backward(*saved, rings(), FUSED),
    )


def alone(kernel):
    return tuple(lambda *saved, one=one: one(*saved, True) for one in kernel)


PACKED = Placed(FUSED, None, None, Documents([[3, 1, 12], [16]])).between([range(T)], [range(T)])
CORES = {
    "one": (alone(FUSED), (1, 1)),
    "a ring": (ring(contiguous), (2, 2)),  # of ranks 0 and 1
    "zigzag": (ring(zigzag), (4, 4)),
    "striped": (ring(striped), (4, 4)),
    "queries go round": (ring(zigzag, queries_backward), (4, 4)),
    "documents": (alone(PACKED), (4, 4)),
}


@needs_pretended
@pytest.mark.parametrize("width", [16, 12])
@pytest.mark.parametrize("name", CORES)
def test_the_kernels_of_a_gpu_are_given_what_they_read(name, width):
    assert pretended(calls_of, name, width) == CORES[name][1]


@needs_pretended
def test_a_slice_of_lse_would_be_misread():
    """A control: half a rank's queries are rows of lse that do not lie behind each other."""
    with pytest.raises(AssertionError, match="lse lies"):
        pretended(calls_of, "zigzag", K, torch.bfloat16, True)


@needs_pretended
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_dtypes_ask_no_kernel(dtype):
    assert pretended(calls_of, "one", K, dtype) == (0, 0)


def test_which_card_has_a_kernel():
    bf16, h100 = torch.bfloat16, (9, 0)
    assert has_flash(CUDA, bf16, 64, h100) and has_flash(CUDA, torch.float16, 256, (8, 0))
    assert has_flash(torch.device("cpu"), torch.float64, 1000)
    assert not has_flash(CUDA, torch.float32, 64, h100) and not has_flash(CUDA, bf16, 264, h100)
    assert not has_flash(CUDA, bf16, 64, (7, 5)), "Turing has none"
    for card in ((8, 6), (8, 9), (12, 0)):  # little shared memory: no backward for these widths
        assert [has_flash(CUDA, bf16, w, card) for w in (192, 200, 224, 256)] == [True, False, False, True]


def numbers(queries=13, keys=13, heads=4, kv_heads=2, width=6, values=6):
    made = dict(dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    q, dout = torch.randn(2, heads, queries, width, **made), torch.randn(2, heads, queries, values, **made)
    return (
        q,
        torch.randn(2, kv_heads, keys, width, **made),
        torch.randn(2, kv_heads, keys, values, **made),
        dout,
    )


BY_ROWS = Kernel(kernel.forward_by_rows, kernel.backward_by_rows)


@pytest.mark.parametrize("shape", [dict(), dict(queries=5), dict(values=3), dict(queries=12, keys=12)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("biased", [True, False])
def test_by_rows_equals_the_plain_equations(monkeypatch, shape, causal, biased):
    monkeypatch.setattr(kernel, "ROWS", 4)
    q, k, v, dout = numbers(**shape)
    positions = torch.arange(k.size(2)) * 2
    alibi = Alibi(torch.tensor(alibi_slopes(4), dtype=torch.float64), positions)
    places = lambda device: (positions[-q.size(2) :], positions)
    found = []
    for one in (BY_ROWS, PLAIN):
        one = Placed(one, alibi if biased else None, None).at(places)
        out, lse = one.forward(q, k, v, causal)
        found.append((out, lse, *one.backward(dout, q, k, v, out, lse, causal)))
    torch.testing.assert_close(*found, rtol=0, atol=1e-12)


def test_by_rows_memory_grows_with_t_and_not_its_square(monkeypatch):
    """The inputs have 3 T K numbers a head, and there are never more than a few times ROWS·T scores."""
    monkeypatch.setattr(kernel, "ROWS", 8)
    peaks = []
    for tokens in (64, 128):
        q, k, v, dout = numbers(tokens, tokens, kv_heads=4)
        with Ledger() as ledger:
            out, lse = BY_ROWS.forward(q, k, v, True)
            BY_ROWS.backward(dout, q, k, v, out, lse, True)
        peaks.append(ledger.peak_bytes)
        assert peaks[-1] < 8 * 2 * 4 * tokens * (8 * 6 + 10 * 6)
    assert peaks[1] < 2.1 * peaks[0]
    with Ledger() as ledger:
        PLAIN.forward(q, k, v, True)
    assert ledger.peak_bytes > 2 * peaks[1]


@pytest.mark.parametrize("width", [64, 20])
@pytest.mark.parametrize("cut", [None, 24])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.cuda(alone=True)
def test_on_a_card(width, cut, causal, dtype):
    """Tiles of queries, each with its slice of lse, against the plain equations in float64."""
    q, k, v, dout = (x.to(CUDA, dtype) for x in numbers(48, 48, width=width, values=width))
    exact = [x.double() for x in (q, k, v, dout)]
    found, wanted = [], []
    for one, (q, k, v, dout), into in ((FUSED, (q, k, v, dout), found), (PLAIN, exact, wanted)):
        out, lse = one.forward(q, k, v, causal)
        if cut:  # the second half of the queries alone, with every key that it sees
            at = (..., slice(cut, None), slice(None))
            keys = at if causal else (..., slice(None), slice(None))
            saved = q[at], k[keys], v[keys], out[at], lse[..., cut:]
            into += [out, lse, *one.backward(dout[at], *saved, causal)]
        else:
            into += [out, lse, *one.backward(dout, q, k, v, out, lse, causal)]
    close = {torch.bfloat16: 0.03, torch.float32: 1e-4, torch.float64: 1e-10}[dtype]
    if cut and causal:  # lse is that of more keys: the tile's part of the gradients, in both alike
        assert not found[1][..., cut:].is_contiguous()
    for ours, theirs in zip(found, wanted):
        assert (ours.double() - theirs).abs().max() <= close * max(1, theirs.abs().max())
