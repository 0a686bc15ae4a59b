"""Codes of fewer than 8 bits side by side in bytes: two of 4 bits in one, four of 6 bits in three.

    pack     [.., n] uint8  ->  [.., ceil(n·bits/8)] uint8       the first code in the lowest bits
    unpack   the inverse, for n codes

Only these bytes are stored and sent; nothing computes with them.
OCP MX 1.0, section 5.3, has the elements and leaves their order in memory to the implementation.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from minitrain.ranks.checks import require_ints


def pack(codes: Tensor, bits: int) -> Tensor:
    """codes [.., n], of which the lowest `bits` count."""
    together, in_bytes = _group("pack", bits)
    length, missing = codes.shape[-1], -codes.shape[-1] % together
    groups = _grouped(pad(codes, (0, missing)) if missing else codes, together) & (1 << bits) - 1
    packed = torch.zeros(*groups.shape[:-1], in_bytes, dtype=torch.uint8, device=codes.device)
    for code in range(together):
        for byte in range(in_bytes):
            packed[..., byte] |= _shifted(groups[..., code], code * bits - 8 * byte)
    return packed.flatten(-2)[..., : packed_bytes(length, bits)].contiguous()


def unpack(packed: Tensor, bits: int, length: int) -> Tensor:
    """[.., length] codes, of what `pack` gave."""
    together, in_bytes = _group("unpack", bits)
    missing = -packed.shape[-1] % in_bytes
    groups = _grouped(pad(packed, (0, missing)) if missing else packed, in_bytes)
    codes = torch.zeros(*groups.shape[:-1], together, dtype=torch.uint8, device=packed.device)
    for code in range(together):
        for byte in range(in_bytes):
            codes[..., code] |= _shifted(groups[..., byte], 8 * byte - code * bits)
    return codes.bitwise_and_((1 << bits) - 1).flatten(-2)[..., :length]


def packed_bytes(length: int, bits: int) -> int:
    """Of a row of `length` codes."""
    require_ints(length=length, bits=bits)
    return -(-length * bits // 8)


def _group(what: str, bits: int) -> tuple[int, int]:
    """Codes that fill whole bytes, and how many bytes."""
    if bits not in range(1, 9):
        raise ValueError(f"{what}: bits={bits!r}; use 1 to 8, codes of more bits have bytes of their own")
    return 8 // math.gcd(bits, 8), bits // math.gcd(bits, 8)


def _grouped(x: Tensor, size: int) -> Tensor:
    return x.unflatten(-1, (x.shape[-1] // size, size))


def _shifted(x: Tensor, left: int) -> Tensor:
    """In uint8, where bits shifted beyond either end are gone."""
    if abs(left) >= 8:
        return torch.zeros_like(x)
    return x << left if left >= 0 else x >> -left
