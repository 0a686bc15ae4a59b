"""Rounding to a narrow format: nearest or by chance; whole tensors to codes and back.

    x = s · 2^(e - M),  e = max(exponent of x, smallest exponent of the format)
    rounded = round(s) · 2^(e - M)
    1.3 in E4M3, M = 3: e = 0, s = 10.4; nearest 10/8 = 1.25; by chance 10/8 or, in 4 of 10 draws, 11/8

The power of two is a mask over the bits of x, so s is exact, and rounding s to an integer rounds x to the
format, subnormals included; a float64 is rounded once. Where torch has the format, its own cast is used.

    mode      "nearest"     a tie goes to the even code (in E8M0 up); error <= half a step
              "stochastic"  up with the probability of what would be cut off: E[rounded] = x
    overflow  None          what the format has: infinity, else NaN, else its largest number
              "saturate"    the largest number, for infinities too; NaN stays NaN

What is not positive is NaN in E8M0. A NaN that the format has no code for is refused. Stochastic rounding
uses one number of [0, 1) for each of x, from a `generator` or from a tensor given as one (`draws`). Gupta
et al. 2015, arXiv:1502.02551, section 3; Wang et al. 2018, arXiv:1812.08011, section 2.3; Zamirai et al.
2020, arXiv:2010.06192, section 4 (weights in BF16). Differs: emulated on float32 and float64.
"""

import math

import torch
from torch import Generator, Tensor

from minitrain.precision.formats import BF16, Format, format_of
from minitrain.ranks.checks import require_one_of

MODES = ("nearest", "stochastic")
LAYOUT = {torch.float32: (torch.int32, 0xFF << 23, 23), torch.float64: (torch.int64, 0x7FF << 52, 52)}


def round_to(x, format: str | Format, mode="nearest", *, overflow=None, generator=None) -> Tensor:
    """The numbers of the format that x becomes: float32, of a float64 x float64; outside autograd."""
    f = checked("round_to", x, format, mode, overflow, generator)
    return rounded(x, f, mode, overflow, generator)


def rounded(x: Tensor, f: Format, mode: str, overflow: str | None = None, generator=None) -> Tensor:
    """`round_to` after its checks."""
    x = _bounded(x, f, overflow)
    if f.integer:
        return round_(x, mode, generator)
    if f.table:
        return decode(codes_of(x, f), f).to(x.dtype)
    if mode == "nearest" and x.dtype == torch.float32 and f.dtype is not None:
        return _cast(x, f, overflow).float()
    if not f.signed:
        x = x.masked_fill(x <= 0, math.nan).clamp_(min=f.smallest_normal)
    ints, exponent, _ = LAYOUT[x.dtype]
    power = (x.view(ints) & exponent).view(x.dtype).clamp_(2.0**f.min_exponent, 2.0**f.max_exponent)
    # power is 2^e and x / power / eps is s; subnormals have the smallest e
    y = round_((x / power).mul_(1 / f.eps), mode, generator).mul_(f.eps).mul_(power)
    if overflow is None and f.has_nan:
        y = torch.where(y.abs() > f.max, y * (math.inf if f.has_infinity else math.nan), y)
    return y.add_(0.0) if f.specials == "fnuz" else y  # -0 + 0 = 0


def round_(s: Tensor, mode: str, draw: Generator | Tensor | None = None) -> Tensor:
    """To integers, in place."""
    if mode == "nearest":
        return s.round_()
    if not isinstance(draw, Tensor):
        draw = torch.rand(s.shape, generator=draw, dtype=s.dtype, device=s.device)
    below = s.floor()
    return s.sub_(below).gt_(draw).add_(below)


def add_stochastic_(weight: Tensor, update: Tensor, generator: Generator | Tensor) -> Tensor:
    """weight += update in bfloat16: of an update below half a step nothing is lost on average."""
    if weight.dtype != torch.bfloat16 or weight.shape != update.shape:
        found = f"{weight.dtype} {list(weight.shape)} and {update.dtype} {list(update.shape)}"
        raise ValueError(f"add_stochastic_: {found}; use a bfloat16 weight and an update of its shape")
    summed = weight.detach().to(torch.promote_types(update.dtype, torch.float32)).add_(update.detach())
    weight.detach().copy_(round_to(summed, BF16, "stochastic", generator=generator))
    return weight


def encode(x, format: str | Format, mode="nearest", *, overflow: str | None = None, generator=None) -> Tensor:
    """Codes of x: uint8 to 8 bits, uint16 or int32 above; of an integer format int8, its value."""
    f = checked("encode", x, format, mode, overflow, generator)
    x = _bounded(x, f, overflow) if mode == "nearest" else rounded(x, f, mode, overflow, generator)
    return codes_of(x, f, overflow)


def codes_of(x: Tensor, f: Format, overflow: str | None = None) -> Tensor:
    """Of the nearest numbers, of x that is bounded: codes of float32, of a number times 2^(bias - 127), begin
    with exponent and mantissa, subnormals included."""
    if f.integer:
        return x.round().to(torch.int8)
    if f.dtype is not None and f.bits <= 16 and x.dtype != torch.float64:
        return _cast(x, f, overflow).view(torch.uint8 if f.bits == 8 else torch.uint16)
    if f.table:
        table = torch.tensor(f.table, dtype=x.dtype, device=x.device)
        return torch.bucketize(x.contiguous(), (table[1:] + table[:-1]) / 2).to(torch.uint8)
    y = rounded(x, f, "nearest", overflow).float()
    if f.exponent_bits == 8 and f.signed:  # float32, or its upper part
        return y.view(torch.int32) >> 32 - f.bits & (1 << f.bits) - 1
    codes = y.abs().mul_(2.0 ** (f.bias - 127)).view(torch.int32).bitwise_right_shift_(23 - f.mantissa_bits)
    if f.has_infinity:
        codes.masked_fill_(y.isinf(), f.max_code + 1)
    if f.signed:
        codes.add_(y.signbit(), alpha=1 << f.bits - 1)
    if f.has_nan:
        code = 1 << f.bits - 1 if f.specials == "fnuz" else f.max_code + 1 + f.has_infinity
        codes.masked_fill_(y.isnan(), code)
    return codes.to(torch.uint8) if f.bits <= 8 else codes


def decode(codes: Tensor, format: str | Format) -> Tensor:
    """What codes of any integer dtype stand for, float32."""
    f = format_of("decode", format)
    if f.integer:
        return codes.float()
    if f.dtype is not None and f.bits in (8, 16):
        return codes.to(torch.uint8 if f.bits == 8 else torch.uint16).view(f.dtype).float()
    codes = codes.int()
    if f.exponent_bits == 8:  # float32, or its upper part
        return (codes << 32 - f.bits).view(torch.float32)
    values = [f.value(code) for code in range(1 << f.bits)]
    return torch.tensor(values, device=codes.device)[codes & len(values) - 1]


def every_value(format: str | Format) -> Tensor:
    """Of all codes in their order, [2^bits] float32; of integers from the smallest to the largest."""
    f = format_of("every_value", format)
    if f.bits > 16:
        raise ValueError(f"every_value: {f.name} has 2^{f.bits} codes; use a format of 16 bits or fewer")
    codes = torch.arange(-f.max_code, f.max_code + 1) if f.integer else torch.arange(1 << f.bits)
    return decode(codes, f)


# ---- what is too large, torch's casts, and what is refused
def _bounded(x: Tensor, f: Format, overflow: str | None) -> Tensor:
    x = x.detach().to(torch.promote_types(x.dtype, torch.float32))
    if overflow is None and f.has_nan:
        return x
    return x.clamp(min(f.table) if f.table else -f.max, f.max)


def _cast(x: Tensor, f: Format, overflow: str | None) -> Tensor:
    """Torch's own. Some of its versions saturate in E4M3 unasked, and in E8M0 the sign is lost."""
    y = x.to(f.dtype)
    if f.dtype == torch.float8_e4m3fn and overflow is None:
        edge = f.max + 2.0 ** (f.max_exponent - f.mantissa_bits - 1)
        y.view(torch.uint8).masked_fill_((x > edge).logical_or_(x < -edge), f.max_code + 1)
    if not f.signed:
        y.view(torch.uint8).masked_fill_(x <= 0, f.max_code + 1)
    return y


def checked(what: str, x: Tensor, format, mode: str, overflow, generator) -> Format:
    f = format_of(what, format)
    check_mode(what, f, mode, generator)
    require_one_of((None, "saturate"), overflow=overflow)
    if not x.is_floating_point() or x.element_size() == 1:
        raise ValueError(f"{what}: x is {x.dtype}; use a floating tensor of 16 bits or more: x.float()")
    if isinstance(generator, Tensor) and generator.shape != x.shape:
        given = f"{list(generator.shape)} numbers to round x {list(x.shape)}"
        raise ValueError(f"{what}: generator gives {given}; use one in [0, 1) for each")
    if not f.has_nan and readable(x) and x.isnan().any():
        raise ValueError(f"{what}: x holds NaN and {f.name} has no code for it; use x.nan_to_num()")
    return f


def check_mode(what: str, f: Format, mode: str, generator) -> None:
    require_one_of(MODES, mode=mode)
    if (mode == "stochastic") != (generator is not None):
        cure = "generator=torch.Generator().manual_seed(0)" if generator is None else "mode='stochastic'"
        raise ValueError(f"{what}: mode={mode!r} with generator={generator}; use {cure}")
    if f.table and mode != "nearest":
        raise ValueError(f"{what}: {f.name} is a table without steps, so mode={mode!r} has none; use nearest")


def readable(x: Tensor) -> bool:  # in a dry run tensors have shapes only
    return type(x.detach()) is Tensor
