"""Block quantisation: a tensor as codes of a narrow format, with one scale for every tile of it.

    x [.., R, C] in tiles [h, w]  ->  codes of x / scale,  scales [.., ceil(R/h), ceil(C/w)]

    scale      of a tile                                          the value of a code is multiplied by
    "float32"  amax = max |x|                                     amax / largest number of the format
    "e8m0"     2^(floor(log2 amax) - floor(log2 largest))         scale              (MX)
    "e4m3"     amax / largest in units of t, rounded to E4M3      scale · t          (NVFP4)
               t = amax of the tensor / largest / 448

Errors are half a step of the format times the multiplier. With float32 scales a zero and the largest number
of a tile come back to the bit, and an integer errs by at most 2^-15 of a step more (and 2^-149). A tile with
NaN or infinity comes back as NaN (e4m3: the tensor). With an `amax` from elsewhere (delayed scaling) what is
larger saturates; infinity too, in a format that has NaN. Bytes of a row: codes ceil(C·bits/8), scales 4 or 1
a tile. Dettmers et al. 2022, arXiv:2110.02861, section 2.1; Wang et al. 2023 (ZeRO++), arXiv:2306.10209,
section 3.1; Rouhani et al. 2023 (MX), arXiv:2310.10537, section 3; Xi et al. 2024 (Jetfire),
arXiv:2403.12422, section 4; DeepSeek-V3, arXiv:2412.19437, section 3.3; NVIDIA 2025 (NVFP4),
arXiv:2509.25149. Differs: no fused kernels.
"""

import math
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Size, Tensor
from torch.linalg import vector_norm
from torch.nn.functional import pad

from minitrain.precision import formats
from minitrain.precision.formats import E4M3, Format, format_of
from minitrain.precision.rounding import check_mode, codes_of, decode, readable, round_, rounded
from minitrain.ranks.checks import require_one_of

SCALES = {"float32": 32, "e8m0": 8, "e4m3": 8}  # bits
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class Blocks:
    """How to quantise. `tile` of the last dims: () is the whole tensor, 0 in it the whole of a dim."""

    format: Format
    tile: tuple[int, ...] = ()
    scale: str = "float32"

    def __post_init__(self) -> None:
        object.__setattr__(self, "format", format_of("Blocks", self.format))
        wide = self.format.bits > 8 and self.format.name not in ("fp16", "bf16")
        if not self.format.signed or wide:
            cure = "use up to 8 bits with a sign, e4m3 say, or fp16, bf16"
            raise ValueError(f"Blocks: format={self.format.name}; {cure}")
        require_one_of(SCALES, scale=self.scale)
        sizes = isinstance(self.tile, tuple) and all(type(n) is int and n >= 0 for n in self.tile)
        if not sizes or len(self.tile) > 2:
            raise ValueError(f"Blocks: tile={self.tile!r}; use whole numbers: () or (32,) or (128, 128)")

    @property
    def bits_per_number(self) -> Fraction:
        numbers = math.prod(self.tile) if self.tile else 0
        return self.format.bits + (Fraction(SCALES[self.scale], numbers) if numbers else 0)

    # the value whose code stands for the scale itself: with an amax as scale, the format's largest
    largest = property(lambda self: self.format.max if self.scale == "float32" else 1.0)


RECIPES = {
    "fp8_tensor": Blocks(formats.E4M3),
    "fp8_row": Blocks(formats.E4M3, (0,)),
    "fp8_1x128": Blocks(formats.E4M3, (128,)),
    "fp8_128x128": Blocks(formats.E4M3, (128, 128)),
    "mxfp8": Blocks(formats.E4M3, (32,), "e8m0"),
    "mxfp8_e5m2": Blocks(formats.E5M2, (32,), "e8m0"),
    "mxfp6": Blocks(formats.E2M3, (32,), "e8m0"),
    "mxfp6_e3m2": Blocks(formats.E3M2, (32,), "e8m0"),
    "mxfp4": Blocks(formats.E2M1, (32,), "e8m0"),
    "mxint8": Blocks(formats.INT8, (32,), "e8m0"),
    "nvfp4": Blocks(formats.E2M1, (16,), "e4m3"),
    "nf4": Blocks(formats.NF4, (64,)),
    "int8_32x32": Blocks(formats.INT8, (32, 32)),
}


@dataclass(frozen=True, slots=True)
class Quantized:
    """What stands for a tensor of `shape`: codes as they are stored, and what each tile is scaled by."""

    codes: Tensor
    scales: Tensor
    shape: Size
    blocks: Blocks
    tensor_scale: Tensor | None = None

    @property
    def nbytes(self) -> int:
        stored = (self.codes, self.scales, self.tensor_scale)
        return sum(tensor.nbytes for tensor in stored if tensor is not None)

    @property
    def multipliers(self) -> Tensor:
        """[.., tiles] float32: what the value of a code is multiplied by; of integers, the step."""
        scales = self.scales.float() / self.blocks.largest
        return scales if self.tensor_scale is None else scales * self.tensor_scale

    def elements(self) -> Tensor:
        """The values of the codes, not scaled: float32 of `shape`. What a product in the format takes."""
        f, codes = self.blocks.format, self.codes
        if f.bits < 8:
            codes = unpack(codes, f.bits, self.shape[-1])
            if f.integer:  # two's complement
                top = 1 << f.bits - 1
                codes = codes.bitwise_xor_(top).sub_(top).view(torch.int8)
        return decode(codes, f)


def quantize(x, blocks: Blocks | str, *, amax=None, fill=False, mode="nearest", generator=None) -> Quantized:
    """x [.., d] outside autograd. `fill`: short last tiles may be, as if filled up with zeros. An `amax` from
    elsewhere has the shape of the scales, [] for a whole tensor."""
    blocks = recipe("quantize", blocks)
    f, tile = blocks.format, blocks.tile
    _check(x, blocks, fill, mode, generator)
    tiles = _tiled(x.detach().to(torch.promote_types(x.dtype, torch.float32)), tile)
    inside = [-1 - 2 * i for i in range(len(tile))]
    if amax is None:
        dims = inside or list(range(x.dim()))
        amax = vector_norm(tiles, math.inf, dims) if x.numel() else _empty(tiles, inside)
    else:
        _check_amax(amax, _empty(tiles, inside).shape, blocks)
        if not f.has_nan and x.numel():  # else their codes say it
            amax = amax + (tiles * 0).amax(inside or list(range(x.dim())))
    scales, tensor_scale = _scales(amax.float(), blocks)
    del amax
    q = Quantized(scales, scales, x.shape, blocks, tensor_scale)
    divisor = scales if blocks.scale == "float32" else q.multipliers
    scaled = tiles / _spread(divisor.masked_fill(divisor == 0, 1.0), tile)
    if blocks.largest != 1:
        scaled.mul_(blocks.largest)
    scaled.clamp_(-f.max, f.max)  # NaN in a format without it gets any code: the scale of its tile says it
    if f.integer:
        codes = round_(scaled, mode, generator).to(torch.int8)
    else:
        numbers = scaled if mode == "nearest" else rounded(scaled, f, mode, "saturate", generator)
        codes = codes_of(numbers, f, "saturate")
        del numbers
    del scaled, tiles
    codes = _whole(codes, tile, x.shape)
    codes = pack(codes.view(torch.uint8), f.bits) if f.bits < 8 else codes.contiguous()
    return Quantized(codes, scales.contiguous(), x.shape, blocks, tensor_scale)


def dequantize(q: Quantized, dtype: torch.dtype = torch.float32) -> Tensor:
    """[.., d] in `dtype`, computed in float32 or, for float64, in float64."""
    values = _tiled(q.elements().to(torch.promote_types(dtype, torch.float32)), q.blocks.tile)
    if q.blocks.scale == "float32":  # in this order the largest comes back to the bit
        values.div_(q.blocks.largest).mul_(_spread(q.scales, q.blocks.tile))
    else:
        values.mul_(_spread(q.multipliers, q.blocks.tile))
    return _whole(values, q.blocks.tile, q.shape).to(dtype).contiguous()


def to_bytes(q: Quantized) -> Tensor:
    """Rows in tiles of one dim as messages, uint8 [.., codes then scales]."""
    return torch.cat((q.codes.view(torch.uint8), q.scales.view(torch.uint8)), -1)


def from_bytes(message: Tensor, length: int, blocks: Blocks) -> Quantized:
    """The inverse of `to_bytes`, for rows of `length` numbers, 1 or more."""
    size = packed_bytes(length, blocks.format.bits)
    codes, scales = message.split([size, message.shape[-1] - size], -1)
    scales = scales.clone(memory_format=torch.contiguous_format)  # floats begin at multiples of 4
    codes = codes.view(torch.int8) if blocks.format == formats.INT8 else codes
    scale_dtype = {"float32": torch.float32, "e8m0": formats.E8M0.dtype, "e4m3": E4M3.dtype}[blocks.scale]
    return Quantized(codes, scales.view(scale_dtype), Size((*message.shape[:-1], length)), blocks)


def recipe(what: str, blocks: Blocks | str) -> Blocks:
    if isinstance(blocks, Blocks):
        return blocks
    if blocks not in RECIPES:
        raise ValueError(f"{what}: there is no recipe {blocks!r}; use Blocks(..) or {', '.join(RECIPES)}")
    return RECIPES[blocks]


def _check(x: Tensor, blocks: Blocks, fill: bool, mode: str, generator) -> None:
    if x.dtype not in FLOATS or x.dim() == 0:
        raise ValueError(f"quantize: x is {x.dtype} {list(x.shape)}; use a floating one with dims: x.float()")
    if x.dim() < len(blocks.tile):
        raise ValueError(f"quantize: x is {list(x.shape)}, tile={blocks.tile} needs {len(blocks.tile)} dims")
    check_mode("quantize", blocks.format, mode, generator)
    for size, length in zip(reversed(blocks.tile), reversed(x.shape)):
        if size and length % size and not fill:
            whole = f"pad to {length + -length % size}, or fill=True"
            raise ValueError(f"quantize: {list(x.shape)} is no multiple of tile={blocks.tile}; {whole}")


def _check_amax(amax: Tensor, shape: Size, blocks: Blocks) -> None:
    if blocks.scale != "float32":
        raise ValueError(f"quantize: an amax and {blocks.scale} scales; use float32 scales")
    if amax.shape != shape:
        raise ValueError(f"quantize: amax is {list(amax.shape)}, scales are {list(shape)}; use their shape")
    if readable(amax) and not ((amax > 0) & amax.isfinite()).all():
        bad = amax[~((amax > 0) & amax.isfinite())][0].item()
        raise ValueError(f"quantize: an amax of {bad:g} is no scale; use amax.where(amax > 0, 1.0), skip NaN")


def _empty(tiles: Tensor, inside: list[int]) -> Tensor:
    shape = [n for dim, n in enumerate(tiles.shape, -tiles.dim()) if dim not in inside] if inside else []
    return torch.zeros(shape, device=tiles.device)


def _scales(amax: Tensor, blocks: Blocks) -> tuple[Tensor, Tensor | None]:
    f = blocks.format
    if blocks.scale == "float32":
        return amax.masked_fill(amax.isinf(), math.nan), None
    if blocks.scale == "e8m0":
        exponent = (amax.view(torch.int32) >> 23).sub_(f.max_exponent).clamp_(0, 254)  # as a code of E8M0
        exponent.masked_fill_(~amax.isfinite(), 255)
        return exponent.to(torch.uint8).view(formats.E8M0.dtype), None
    tensor_scale = (amax.amax() if amax.numel() else amax.sum()) / (f.max * E4M3.max)
    units = amax / f.max / tensor_scale.masked_fill(tensor_scale == 0, 1.0)
    return units.clamp_(max=E4M3.max).to(E4M3.dtype), tensor_scale


def _tiled(x: Tensor, tile: tuple[int, ...]) -> Tensor:
    """[.., R, C] -> [.., R/h, h, C/w, w]: a view, unless short last tiles are filled up with zeros."""
    missing = [(0, -length % size if size else 0) for size, length in zip(reversed(tile), reversed(x.shape))]
    if any(after for _, after in missing):
        x = pad(x, sum(missing, ()))
    for i, size in enumerate(reversed(tile)):
        dim, length = -1 - 2 * i, x.shape[-1 - 2 * i]
        x = x.unflatten(dim, (length // size, size) if size else (1, length))
    return x


def _spread(scales: Tensor, tile: tuple[int, ...]) -> Tensor:
    """[.., R/h, C/w] -> [.., R/h, 1, C/w, 1]."""
    for i in range(len(tile)):
        scales = scales.unsqueeze(-1 - 2 * i)
    return scales


def _whole(x: Tensor, tile: tuple[int, ...], shape: Size) -> Tensor:
    for i in reversed(range(len(tile))):
        x = x.flatten(-2 - i, -1 - i) if i == 0 else x.flatten(-4, -3)
    return x[tuple(slice(length) for length in shape)]


# ---- codes of fewer than 8 bits side by side in bytes -----------------------------------------------------


def pack(codes: Tensor, bits: int) -> Tensor:
    """[.., n] uint8, of which the lowest `bits` count -> [.., ceil(n·bits/8)], the first code lowest. A word
    has as many codes as fill a byte or, where none do, eight, `bits` bytes of an int64. OCP MX 1.0, section
    5.3, leaves the order in memory to the implementation."""
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
    return (8, bits, torch.int64) if 8 % bits else (8 // bits, 1, torch.uint8)


def packed_bytes(length: int, bits: int) -> int:
    return -(-length * bits // 8)


def _grouped(x: Tensor, size: int) -> Tensor:
    """[.., n] -> [.., groups, size], filled up with zeros."""
    x = pad(x, (0, -x.shape[-1] % size))
    return x.unflatten(-1, (x.shape[-1] // size, size))
