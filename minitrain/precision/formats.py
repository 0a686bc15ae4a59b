"""Number formats as data: what each code of a few bits stands for.

    code   sign (1 bit), exponent field e (E bits), mantissa field m (M bits)
    e > 0  (-1)^sign · 2^(e - bias) · (1 + m/2^M)         normal: neighbours are 2^(e - bias - M) apart
    e = 0  (-1)^sign · 2^(1 - bias) · m/2^M               subnormal: as far apart as the smallest normals

Rounding errs by at most 2^-(M+1) of a normal number, and by half of the smallest subnormal below. What the
topmost codes mean is `specials`:

    "ieee"  top exponent: infinity (m = 0) and NaN        FP16, BF16, E5M2
    "nan"   all ones are NaN, there is no infinity        OCP's E4M3, one more power of two
    "fnuz"  the code of -0 is NaN, no infinity            AMD's; HFP8's (1,4,3)
    "none"  every code is a number                        6 and 4 bits

An integer is a format without exponent (E = 0, two's complement, the most negative code left out); E8M0 has
nothing but one, neither sign nor zero; NF4 is a table, 16 quantiles of a normal distribution.
OCP 8-bit Floating Point (OFP8) 1.0, section 4; OCP MX 1.0, section 5.3; Wang et al. 2018, arXiv:1812.08011,
section 2; Sun et al. 2019 (HFP8), NeurIPS, section 3; Dettmers et al. 2023, arXiv:2305.14314, section 3.
Differs: HFP8's (1,4,3) with bias 11 has subnormals and a NaN here, as ml_dtypes has it; its largest is 30.
"""

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Format:
    """E exponent and M mantissa bits. `dtype`: torch's own for the same codes; `table`: values in order."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    specials: str
    dtype: torch.dtype | None = None
    signed: bool = True
    table: tuple[float, ...] = ()

    bits = property(lambda f: f.signed + f.exponent_bits + f.mantissa_bits)
    integer = property(lambda f: f.exponent_bits == 0 and not f.table)
    has_infinity = property(lambda f: f.specials == "ieee")
    has_nan = property(lambda f: f.specials != "none")
    smallest_normal = property(lambda f: 2.0**f.min_exponent)
    eps = property(lambda f: 2.0**-f.mantissa_bits)  # from 1 to the next larger number
    min_exponent = property(lambda f: f.signed - f.bias)  # of the smallest normal number
    max_exponent = property(lambda f: math.frexp(f.max)[1] - 1)  # floor(log2(max))
    max = property(lambda f: max(f.table) if f.table else f.value(f.max_code))
    smallest_subnormal = property(lambda f: 2.0 ** (f.min_exponent - f.mantissa_bits * f.signed))

    @property
    def max_code(self) -> int:
        """Of the largest number; without sign, so codes above it are special."""
        codes = 1 << self.exponent_bits + self.mantissa_bits
        return {"ieee": codes - (1 << self.mantissa_bits) - 1, "nan": codes - 2}.get(self.specials, codes - 1)

    def value(self, code: int) -> float:
        """What one code means: the definition, which `rounding` agrees with on whole tensors."""
        if self.table:
            return self.table[code]
        if not self.signed:
            return 2.0 ** (code - self.bias) if code <= self.max_code else math.nan
        negative, code = divmod(code, 1 << self.bits - 1)
        if self.integer:  # two's complement
            return float(code - (negative << self.bits - 1))
        if code > self.max_code or (self.specials == "fnuz" and negative and not code):
            infinite = self.has_infinity and code == self.max_code + 1
            return (-1) ** negative * math.inf if infinite else math.nan
        field, mantissa = divmod(code, 1 << self.mantissa_bits)
        whole = mantissa + (field > 0) * (1 << self.mantissa_bits)
        return (-1.0) ** negative * math.ldexp(whole, max(field, 1) - self.bias - self.mantissa_bits)


# Quantiles of a normal distribution, zero among them, divided by the largest (Dettmers et al., appendix E).
NORMAL_FLOAT = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)

FP32 = Format("fp32", 8, 23, 127, "ieee", torch.float32)
TF32 = Format("tf32", 8, 10, 127, "ieee")
BF16 = Format("bf16", 8, 7, 127, "ieee", torch.bfloat16)
FP16 = Format("fp16", 5, 10, 15, "ieee", torch.float16)
FP16_WANG = Format("fp16_1_6_9", 6, 9, 31, "ieee")
E4M3 = Format("e4m3", 4, 3, 7, "nan", torch.float8_e4m3fn)
E5M2 = Format("e5m2", 5, 2, 15, "ieee", torch.float8_e5m2)  # also Wang's (1,5,2)
E4M3_IEEE = Format("e4m3_ieee", 4, 3, 7, "ieee")
E3M4 = Format("e3m4", 3, 4, 3, "ieee")
E4M3_FNUZ = Format("e4m3_fnuz", 4, 3, 8, "fnuz", torch.float8_e4m3fnuz)
E5M2_FNUZ = Format("e5m2_fnuz", 5, 2, 16, "fnuz", torch.float8_e5m2fnuz)
HFP8_FORWARD = Format("hfp8_1_4_3", 4, 3, 11, "fnuz")
E8M0 = Format("e8m0", 8, 0, 127, "nan", torch.float8_e8m0fnu, signed=False)
E3M2 = Format("e3m2", 3, 2, 3, "none")
E2M3 = Format("e2m3", 2, 3, 1, "none")
E2M1 = Format("e2m1", 2, 1, 1, "none")
NF4 = Format("nf4", 0, 3, 0, "none", table=NORMAL_FLOAT)
INT8 = Format("int8", 0, 7, -6, "none", torch.int8)  # no exponent; bias 1 - M: the step is 1
INT4 = Format("int4", 0, 3, -2, "none")

SMALL = (E4M3, E5M2, E4M3_IEEE, E3M4, E4M3_FNUZ, E5M2_FNUZ, HFP8_FORWARD, E8M0, E3M2, E2M3, E2M1, NF4, INT8)
FORMATS = {f.name: f for f in (FP32, TF32, BF16, FP16, FP16_WANG, *SMALL, INT4)}


def format_of(what: str, name: "str | Format") -> Format:
    """By name, or as it is; `what` asks."""
    if isinstance(name, Format):
        return name
    if name not in FORMATS:
        raise ValueError(f"{what}: there is no format {name!r}; there is {', '.join(FORMATS)}")
    return FORMATS[name]
