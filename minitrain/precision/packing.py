"""Codes of fewer than 8 bits side by side in bytes: two of 4 bits in one, four of 6 bits in three.

    pack     [.., n] uint8  ->  [.., ceil(n·bits/8)] uint8       the first code in the lowest bits
    unpack   the inverse, for n codes

Only these bytes are stored and sent; nothing computes with them.
OCP MX 1.0, section 5.3, has the elements and leaves their order in memory to the implementation.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from minitrain.ranks.checks import require_ints


def pack(codes: Tensor, bits: int) -> Tensor:
    """codes [.., n], of which the lowest `bits` count: eight of them are `bits` bytes of one int64."""
    require_ints(1, 8, bits=bits)
    length = codes.shape[-1]
    eights = _grouped(codes, 8).bitwise_and((1 << bits) - 1)
    words = torch.zeros(eights.shape[:-1], dtype=torch.int64, device=codes.device)
    for place in range(8):
        words |= eights[..., place].long() << place * bits
    packed = words.unsqueeze(-1).view(torch.uint8)[..., :bits].flatten(-2)
    return packed[..., : packed_bytes(length, bits)].contiguous()


def unpack(packed: Tensor, bits: int, length: int) -> Tensor:
    """[.., length] codes, of what `pack` gave."""
    require_ints(1, 8, bits=bits)
    words = pad(_grouped(packed, bits), (0, 8 - bits)).contiguous().view(torch.int64)
    codes = [(words >> place * bits).bitwise_and_((1 << bits) - 1).to(torch.uint8) for place in range(8)]
    return torch.cat(codes, -1).flatten(-2)[..., :length]


def packed_bytes(length: int, bits: int) -> int:
    """Of a row of `length` codes."""
    require_ints(length=length, bits=bits)
    return -(-length * bits // 8)


def _grouped(x: Tensor, size: int) -> Tensor:
    """[.., n] -> [.., groups, size], filled up with zeros."""
    x = pad(x, (0, -x.shape[-1] % size))
    return x.unflatten(-1, (x.shape[-1] // size, size))
