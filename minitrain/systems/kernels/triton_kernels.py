"""Three kernels in Triton: a product in grouped order, a softmax over rows, attention by tiles.

    matmul(a, b)    softmax(x)    attention(q, k, v, causal=True)        on a GPU
    python -m pip install triton                on Linux; PyTorch's CUDA builds bring the one that fits

A program is one tile of the result: it loads tiles of its inputs into registers, computes, stores. Which tile
it is says `grouped`, the order that tiles.py counts the loads of. Sums are float32. On a CPU the same
programs run in Triton's interpreter, which TRITON_INTERPRET=1 asks for before the first import.
Tillet et al. 2019 (Triton), MAPL, and its tutorials 2, 3, 6; Dao 2023, arXiv:2307.08691, algorithm 1.
"""

import math

import torch
from torch import Tensor

from minitrain.ranks.checks import require_one_of, require_positive_ints

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

jit = triton.jit if triton else lambda kernel: kernel
constexpr = tl.constexpr if triton else int


@jit
def grouped(program, rows, columns, group_rows):
    """The tile of a program id, as in tiles.py."""
    first = program // (group_rows * columns) * group_rows
    height = min(rows - first, group_rows)
    inside = program % (group_rows * columns)
    return first + inside % height, inside // height


@jit
def matmul_kernel(a, b, c, rows, columns, depth, group_rows, ROWS: constexpr, DEPTH: constexpr):
    """C [rows, columns] = A [rows, depth] B [depth, columns], a tile of ROWS x ROWS per program."""
    program, across = tl.program_id(0), tl.cdiv(columns, ROWS)
    row, column = grouped(program, tl.cdiv(rows, ROWS), across, group_rows)
    i = (row * ROWS + tl.arange(0, ROWS))[:, None]
    j = (column * ROWS + tl.arange(0, ROWS))[None, :]
    total = tl.zeros((ROWS, ROWS), tl.float32)
    for start in range(0, depth, DEPTH):
        k = start + tl.arange(0, DEPTH)
        a_tile = tl.load(a + i * depth + k[None, :], mask=(i < rows) & (k[None, :] < depth), other=0.0)
        b_tile = tl.load(b + k[:, None] * columns + j, mask=(k[:, None] < depth) & (j < columns), other=0.0)
        total += tl.dot(a_tile, b_tile, input_precision="ieee")
    tl.store(c + i * columns + j, total, mask=(i < rows) & (j < columns))


@jit
def softmax_kernel(x, y, columns, WIDTH: constexpr):
    """A row per program: read once, written once."""
    at = tl.arange(0, WIDTH)
    place = tl.program_id(0) * columns + at
    row = tl.load(x + place, mask=at < columns, other=-float("inf")).to(tl.float32)
    weights = tl.exp(row - tl.max(row, 0))
    tl.store(y + place, weights / tl.sum(weights, 0), mask=at < columns)


@jit
def attention_kernel(q, k, v, out, tokens, scale, K: constexpr, TILE: constexpr, CAUSAL: constexpr):
    """TILE queries of one head per program, by the online softmax of attention/flash.py, version 2."""
    head, first = tl.program_id(1) * tokens * K, tl.program_id(0) * TILE
    row, width = first + tl.arange(0, TILE)[:, None], tl.arange(0, K)[None, :]
    q_i = tl.load(q + head + row * K + width, mask=row < tokens, other=0.0)
    summed = tl.zeros((TILE, K), tl.float32)
    row_sum, row_max = tl.zeros((TILE,), tl.float32), tl.full((TILE,), -float("inf"), tl.float32)
    for start in range(0, first + TILE if CAUSAL else tokens, TILE):
        key = start + tl.arange(0, TILE)
        at, there = head + key[:, None] * K + width, key[:, None] < tokens
        k_j, v_j = tl.load(k + at, mask=there, other=0.0), tl.load(v + at, mask=there, other=0.0)
        seen = (key[None, :] < tokens) & ((key[None, :] <= row) | (not CAUSAL))
        scores = tl.where(seen, tl.dot(q_i, tl.trans(k_j), input_precision="ieee") * scale, -float("inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        p, kept = tl.exp(scores - new_max[:, None]), tl.exp(row_max - new_max)
        summed = summed * kept[:, None] + tl.dot(p.to(v_j.dtype), v_j, input_precision="ieee")
        row_sum, row_max = row_sum * kept + tl.sum(p, 1), new_max
    tl.store(out + head + row * K + width, summed / row_sum[:, None], mask=row < tokens)


def matmul(a: Tensor, b: Tensor, group_rows: int = 8, tile: int = 64) -> Tensor:
    """a `[M, K]` and b `[K, N]` -> `[M, N]` in a's dtype. `tile`: a power of two, 16 or more."""
    _check(tile, a, b)
    require_positive_ints(group_rows=group_rows)
    (rows, depth), columns = a.shape, b.size(1)
    c = a.new_empty(rows, columns)
    programs = -(-rows // tile) * -(-columns // tile)
    matmul_kernel[(programs,)](a, b, c, rows, columns, depth, group_rows, tile, 32)
    return c


def softmax(x: Tensor) -> Tensor:
    """Over the rows of x `[rows, columns]`; a row has to fit a multiprocessor."""
    _check(16, x)
    y = torch.empty_like(x)
    softmax_kernel[(x.size(0),)](x, y, x.size(1), 1 << (x.size(1) - 1).bit_length())
    return y


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = True, tile: int = 64) -> Tensor:
    """q, k, v `[B, H, T, K]` -> `[B, H, T, K]`, K a power of two, 16 or more. Forward alone."""
    _check(tile, q, k, v)
    out, (batch, heads, tokens, width) = torch.empty_like(q), q.shape
    grid = -(-tokens // tile), batch * heads
    attention_kernel[grid](q, k, v, out, tokens, 1 / math.sqrt(width), width, tile, causal)
    return out


def _check(tile: int, *tensors: Tensor) -> None:
    if triton is None:
        raise ImportError("Triton is not installed: python -m pip install triton (on Linux)")
    require_one_of((16, 32, 64, 128), tile=tile)
    if not all(x.is_contiguous() for x in tensors):
        raise ValueError("a tensor does not lie in memory row by row: give it .contiguous()")
