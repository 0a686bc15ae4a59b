"""Codes of fewer than 8 bits side by side in bytes: two of 4 bits in one, four of 6 bits in three.

    pack     [.., n] uint8  ->  [.., ceil(n·bits/8)] uint8       the first code in the lowest bits
    unpack   the inverse, for n codes

A word has as many codes as fill a byte or, where codes do not, eight, which are `bits` bytes of an int64.
Only these bytes are stored and sent; nothing computes with them.
OCP MX 1.0, section 5.3, has the elements and leaves their order in memory to the implementation.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad


def pack(codes: Tensor, bits: int) -> Tensor:
    """codes [.., n], of which the lowest `bits` count."""
    count, size, word = _words(bits)
    groups = _grouped(codes, count).bitwise_and((1 << bits) - 1)
    words = groups[..., 0].to(word)
    for place in range(1, count):
        words |= groups[..., place].to(word) << place * bits
    packed = words.unsqueeze(-1).view(torch.uint8)[..., :size].flatten(-2)
    return packed[..., : packed_bytes(codes.shape[-1], bits)].contiguous()


def unpack(packed: Tensor, bits: int, length: int) -> Tensor:
    """[.., length] codes, of what `pack` gave."""
    count, size, word = _words(bits)
    words = pad(_grouped(packed, size), (0, word.itemsize - size)).contiguous().view(word)
    codes = [(words >> place * bits).bitwise_and_((1 << bits) - 1).to(torch.uint8) for place in range(count)]
    return torch.cat(codes, -1).flatten(-2)[..., :length]


def _words(bits: int) -> tuple[int, int, torch.dtype]:
    """Codes and bytes of a word, and what it is computed in."""
    return (8, bits, torch.int64) if 8 % bits else (8 // bits, 1, torch.uint8)


def packed_bytes(length: int, bits: int) -> int:
    """Of a row of `length` codes."""
    return -(-length * bits // 8)


def _grouped(x: Tensor, size: int) -> Tensor:
    """[.., n] -> [.., groups, size], filled up with zeros."""
    x = pad(x, (0, -x.shape[-1] % size))
    return x.unflatten(-1, (x.shape[-1] // size, size))
