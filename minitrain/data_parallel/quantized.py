"""Block quantisation: numbers of a tensor as small integers, with one float32 scale for every block of them.

    scale = max |x| of the block,  levels = 2^(bits-1) - 1        127 for 8 bits, 7 for 4
    code  = round(x / scale * levels)                             -levels .. levels
    back  = code / levels * scale                                 |back - x| <= scale / levels / 2

    quantize   x [.., d]  ->  codes [.., d] int8, or [.., ceil(d/2)] uint8 with two codes a byte (4 bits)
                              scales [.., ceil(d/block)] float32

Blocks are cut along the last dim, so that every row can be sent by itself; the last one may be short. An
outlier takes the resolution of its block only. In float32 the error is at most 2^-15 of a step more (and
2^-149). A zero and the largest number of a block come back to the bit (of a float64, its float32). A block
with NaN or infinity (or a float64 beyond float32) comes back as NaN from end to end, the others as if nothing
had happened.
Bytes of a row: codes ceil(d·bits/8), scales 4·ceil(d/block). Memory while it works, besides the result: one
float32 copy of x to quantise (two of a half-precision x), one to dequantise, and the codes as int8.
Dettmers et al. 2022, arXiv:2110.02861, section 2.1; Wang et al. 2023, ZeRO++, arXiv:2306.10209, section 3.1.
Differs: evenly spaced levels (Dettmers: a tree of exponents), plain operators in place of one fused kernel.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class Quantized:
    """What stands for a tensor [.., length]."""

    codes: Tensor
    scales: Tensor
    length: int
    bits: int
    block: int

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    @property
    def steps(self) -> Tensor:
        """The distance of two neighbouring values in each block; no number is wrong by more than half."""
        return self.scales / levels(self.bits)


def levels(bits: int) -> int:
    """The largest code. -levels - 1 fits too, but zero must stay in the middle."""
    return 2 ** (bits - 1) - 1


def quantize(x: Tensor, bits: int, block: int) -> Quantized:
    """x [.., d] in blocks of `block` along the last dim, outside autograd."""
    check_blocks("quantize", bits, block)
    if x.dtype not in FLOATS or x.dim() == 0:
        found = f"{x.dtype} {list(x.shape)}"
        raise ValueError(f"quantize: x is {found}; it must be floating, with dims: x.float(), x.reshape(1)")
    length = x.shape[-1]
    blocks = _in_blocks(x.detach().to(torch.promote_types(x.dtype, torch.float32)), block)
    scales = blocks.abs().amax(-1).float()
    codes = (blocks / scales.unsqueeze(-1)).mul_(levels(bits)).round_()
    codes = codes.clamp_(-levels(bits), levels(bits))  # a float64 may exceed its scale, which is a float32
    codes = codes.nan_to_num_(nan=0.0)  # 0/0 in a block of zeros; NaN as an integer is undefined
    codes = codes.to(torch.int8).flatten(-2)
    if bits == 4:
        nibbles = (codes[..., : length + length % 2] + 8).view(torch.uint8)
        codes = nibbles[..., 0::2] | nibbles[..., 1::2] << 4
    else:
        codes = codes[..., :length]
    return Quantized(codes.contiguous(), scales.contiguous(), length, bits, block)


def dequantize(q: Quantized, dtype: torch.dtype) -> Tensor:
    """[.., length] in `dtype`, computed in float32 or, for float64, in float64."""
    codes = q.codes
    if q.bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)[..., : q.length]
    values = codes.to(torch.promote_types(dtype, torch.float32))
    if q.bits == 4:
        values.sub_(8)
    values = _in_blocks(values, q.block).div_(levels(q.bits)).mul_(q.scales.unsqueeze(-1))
    return values.flatten(-2)[..., : q.length].to(dtype).contiguous()


def to_bytes(q: Quantized) -> Tensor:
    """Each row as one message, uint8 [.., codes then scales]: one collective instead of two."""
    return torch.cat((q.codes.view(torch.uint8), q.scales.view(torch.uint8)), -1)


def from_bytes(message: Tensor, length: int, bits: int, block: int) -> Quantized:
    """The inverse of `to_bytes`, for rows of `length` numbers, 1 or more."""
    codes, scales = message.split([-(-length * bits // 8), 4 * -(-length // block)], -1)
    scales = scales.clone(memory_format=torch.contiguous_format)  # floats begin at multiples of 4
    codes = codes if bits == 4 else codes.view(torch.int8)
    return Quantized(codes, scales.view(torch.float32), length, bits, block)


def check_blocks(what: str, bits: int, block: int) -> None:
    """Refuse what no tensor can be quantised with."""
    if bits not in (4, 8):
        raise ValueError(f"{what}: bits={bits!r}; use 8 (codes to 127) or 4 (codes to 7)")
    if not isinstance(block, int) or block < 1:
        raise ValueError(f"{what}: block={block!r}; use a whole number, 1 or more, 256 say")
    if bits == 4 and block % 2:
        raise ValueError(f"{what}: block={block} is odd, but two 4-bit codes share a byte; use {block + 1}")


def _in_blocks(x: Tensor, block: int) -> Tensor:
    """[.., d] -> [.., ceil(d/block), block], a view unless a short last block is filled up with zeros."""
    blocks = -(-x.shape[-1] // block)
    missing = blocks * block - x.shape[-1]
    return (pad(x, (0, missing)) if missing else x).unflatten(-1, (blocks, block))
