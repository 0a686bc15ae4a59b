# %% wrong="blocks" fails="the error of a block" why="one scale for the matrix"
def quantised(x, h):
    codes = torch.empty_like(x, dtype=torch.int8)
    scales = torch.ones(-(-x.shape[0] // h), -(-x.shape[1] // h))
    for i, j in torch.cartesian_prod(*map(torch.arange, scales.shape)).tolist():
        block = x[i * h : (i + 1) * h, j * h : (j + 1) * h]
        amax = x.abs().max().item()
        if amax > 0:
            part, exponent = math.frexp(amax)  # amax = part · 2^exponent, part from 1/2 to 1
            scales[i, j] = 2.0 ** (exponent - 7 + (part * 128 > 127))
        codes[i * h : (i + 1) * h, j * h : (j + 1) * h] = (block / scales[i, j]).round()
    return codes, scales


def product(a, a_scales, b, b_scales, h):

    y = torch.zeros(len(a), len(b))
    for k in range(a_scales.shape[1]):
        inside = slice(k * h, (k + 1) * h)
        sums = a[:, inside].int() @ b[:, inside].int().T
        left = a_scales[:, k].repeat_interleave(h)[: len(a), None]
        right = b_scales[:, k].repeat_interleave(h)[: len(b)]
        y += sums.float() * (left * right)
    return y


# %% wrong="blocks" fails="the error of a block" why="one scale for each row of blocks"
def quantised(x, h):
    codes = torch.empty_like(x, dtype=torch.int8)
    scales = torch.ones(-(-x.shape[0] // h), -(-x.shape[1] // h))
    for i, j in torch.cartesian_prod(*map(torch.arange, scales.shape)).tolist():
        block = x[i * h : (i + 1) * h, j * h : (j + 1) * h]
        amax = x[i * h : (i + 1) * h].abs().max().item()
        if amax > 0:
            part, exponent = math.frexp(amax)  # amax = part · 2^exponent, part from 1/2 to 1
            scales[i, j] = 2.0 ** (exponent - 7 + (part * 128 > 127))
        codes[i * h : (i + 1) * h, j * h : (j + 1) * h] = (block / scales[i, j]).round()
    return codes, scales


def product(a, a_scales, b, b_scales, h):

    y = torch.zeros(len(a), len(b))
    for k in range(a_scales.shape[1]):
        inside = slice(k * h, (k + 1) * h)
        sums = a[:, inside].int() @ b[:, inside].int().T
        left = a_scales[:, k].repeat_interleave(h)[: len(a), None]
        right = b_scales[:, k].repeat_interleave(h)[: len(b)]
        y += sums.float() * (left * right)
    return y


# %% wrong="blocks" fails="the error of a block" why="the largest number, without its sign"
def quantised(x, h):
    codes = torch.empty_like(x, dtype=torch.int8)
    scales = torch.ones(-(-x.shape[0] // h), -(-x.shape[1] // h))
    for i, j in torch.cartesian_prod(*map(torch.arange, scales.shape)).tolist():
        block = x[i * h : (i + 1) * h, j * h : (j + 1) * h]
        amax = block.max().item()
        if amax > 0:
            part, exponent = math.frexp(amax)  # amax = part · 2^exponent, part from 1/2 to 1
            scales[i, j] = 2.0 ** (exponent - 7 + (part * 128 > 127))
        codes[i * h : (i + 1) * h, j * h : (j + 1) * h] = (block / scales[i, j]).round()
    return codes, scales


def product(a, a_scales, b, b_scales, h):

    y = torch.zeros(len(a), len(b))
    for k in range(a_scales.shape[1]):
        inside = slice(k * h, (k + 1) * h)
        sums = a[:, inside].int() @ b[:, inside].int().T
        left = a_scales[:, k].repeat_interleave(h)[: len(a), None]
        right = b_scales[:, k].repeat_interleave(h)[: len(b)]
        y += sums.float() * (left * right)
    return y


# %% wrong="blocks" fails="the smallest power of two" why="the power of two of MX: 127.25 is cut off at 127"
def quantised(x, h):
    codes = torch.empty_like(x, dtype=torch.int8)
    scales = torch.ones(-(-x.shape[0] // h), -(-x.shape[1] // h))
    for i, j in torch.cartesian_prod(*map(torch.arange, scales.shape)).tolist():
        block = x[i * h : (i + 1) * h, j * h : (j + 1) * h]
        amax = block.abs().max().item()
        if amax > 0:
            part, exponent = math.frexp(amax)  # amax = part · 2^exponent, part from 1/2 to 1
            scales[i, j] = 2.0 ** (exponent - 7)
        codes[i * h : (i + 1) * h, j * h : (j + 1) * h] = (
            (block / scales[i, j]).round().clamp(-127, 127)
        )
    return codes, scales


def product(a, a_scales, b, b_scales, h):

    y = torch.zeros(len(a), len(b))
    for k in range(a_scales.shape[1]):
        inside = slice(k * h, (k + 1) * h)
        sums = a[:, inside].int() @ b[:, inside].int().T
        left = a_scales[:, k].repeat_interleave(h)[: len(a), None]
        right = b_scales[:, k].repeat_interleave(h)[: len(b)]
        y += sums.float() * (left * right)
    return y


# %% wrong="blocks" fails="the error of a block" why="as if there were 128 codes: the next power for 127 itself"
def quantised(x, h):
    codes = torch.empty_like(x, dtype=torch.int8)
    scales = torch.ones(-(-x.shape[0] // h), -(-x.shape[1] // h))
    for i, j in torch.cartesian_prod(*map(torch.arange, scales.shape)).tolist():
        block = x[i * h : (i + 1) * h, j * h : (j + 1) * h]
        amax = block.abs().max().item()
        if amax > 0:
            part, exponent = math.frexp(amax)  # amax = part · 2^exponent, part from 1/2 to 1
            scales[i, j] = 2.0 ** (exponent - 7 + (part * 128 > 126))
        codes[i * h : (i + 1) * h, j * h : (j + 1) * h] = (block / scales[i, j]).round()
    return codes, scales


def product(a, a_scales, b, b_scales, h):

    y = torch.zeros(len(a), len(b))
    for k in range(a_scales.shape[1]):
        inside = slice(k * h, (k + 1) * h)
        sums = a[:, inside].int() @ b[:, inside].int().T
        left = a_scales[:, k].repeat_interleave(h)[: len(a), None]
        right = b_scales[:, k].repeat_interleave(h)[: len(b)]
        y += sums.float() * (left * right)
    return y


# %% wrong="blocks" fails="codes" why="from the middle upwards"
def quantised(x, h):
    codes = torch.empty_like(x, dtype=torch.int8)
    scales = torch.ones(-(-x.shape[0] // h), -(-x.shape[1] // h))
    for i, j in torch.cartesian_prod(*map(torch.arange, scales.shape)).tolist():
        block = x[i * h : (i + 1) * h, j * h : (j + 1) * h]
        amax = block.abs().max().item()
        if amax > 0:
            part, exponent = math.frexp(amax)  # amax = part · 2^exponent, part from 1/2 to 1
            scales[i, j] = 2.0 ** (exponent - 7 + (part * 128 > 127))
        codes[i * h : (i + 1) * h, j * h : (j + 1) * h] = (block / scales[i, j] + 0.5).floor()
    return codes, scales


def product(a, a_scales, b, b_scales, h):

    y = torch.zeros(len(a), len(b))
    for k in range(a_scales.shape[1]):
        inside = slice(k * h, (k + 1) * h)
        sums = a[:, inside].int() @ b[:, inside].int().T
        left = a_scales[:, k].repeat_interleave(h)[: len(a), None]
        right = b_scales[:, k].repeat_interleave(h)[: len(b)]
        y += sums.float() * (left * right)
    return y


# %% wrong="blocks" fails="codes" why="from the middle away from zero"
def quantised(x, h):
    codes = torch.empty_like(x, dtype=torch.int8)
    scales = torch.ones(-(-x.shape[0] // h), -(-x.shape[1] // h))
    for i, j in torch.cartesian_prod(*map(torch.arange, scales.shape)).tolist():
        block = x[i * h : (i + 1) * h, j * h : (j + 1) * h]
        amax = block.abs().max().item()
        if amax > 0:
            part, exponent = math.frexp(amax)  # amax = part · 2^exponent, part from 1/2 to 1
            scales[i, j] = 2.0 ** (exponent - 7 + (part * 128 > 127))
        codes[i * h : (i + 1) * h, j * h : (j + 1) * h] = (
            block.sign() * (block.abs() / scales[i, j] + 0.5).floor()
        )
    return codes, scales


def product(a, a_scales, b, b_scales, h):

    y = torch.zeros(len(a), len(b))
    for k in range(a_scales.shape[1]):
        inside = slice(k * h, (k + 1) * h)
        sums = a[:, inside].int() @ b[:, inside].int().T
        left = a_scales[:, k].repeat_interleave(h)[: len(a), None]
        right = b_scales[:, k].repeat_interleave(h)[: len(b)]
        y += sums.float() * (left * right)
    return y


# %% wrong="blocks" fails="the smallest power of two" why="zeros have the scale 0"
def quantised(x, h):
    codes = torch.empty_like(x, dtype=torch.int8)
    scales = torch.zeros(-(-x.shape[0] // h), -(-x.shape[1] // h))
    for i, j in torch.cartesian_prod(*map(torch.arange, scales.shape)).tolist():
        block = x[i * h : (i + 1) * h, j * h : (j + 1) * h]
        amax = block.abs().max().item()
        if amax > 0:
            part, exponent = math.frexp(amax)  # amax = part · 2^exponent, part from 1/2 to 1
            scales[i, j] = 2.0 ** (exponent - 7 + (part * 128 > 127))
        codes[i * h : (i + 1) * h, j * h : (j + 1) * h] = (block / scales[i, j]).round()
    return codes, scales


def product(a, a_scales, b, b_scales, h):

    y = torch.zeros(len(a), len(b))
    for k in range(a_scales.shape[1]):
        inside = slice(k * h, (k + 1) * h)
        sums = a[:, inside].int() @ b[:, inside].int().T
        left = a_scales[:, k].repeat_interleave(h)[: len(a), None]
        right = b_scales[:, k].repeat_interleave(h)[: len(b)]
        y += sums.float() * (left * right)
    return y


# %% wrong="blocks" fails="the product" why="codes are multiplied as int8, and wrap"
def quantised(x, h):
    codes = torch.empty_like(x, dtype=torch.int8)
    scales = torch.ones(-(-x.shape[0] // h), -(-x.shape[1] // h))
    for i, j in torch.cartesian_prod(*map(torch.arange, scales.shape)).tolist():
        block = x[i * h : (i + 1) * h, j * h : (j + 1) * h]
        amax = block.abs().max().item()
        if amax > 0:
            part, exponent = math.frexp(amax)  # amax = part · 2^exponent, part from 1/2 to 1
            scales[i, j] = 2.0 ** (exponent - 7 + (part * 128 > 127))
        codes[i * h : (i + 1) * h, j * h : (j + 1) * h] = (block / scales[i, j]).round()
    return codes, scales


def product(a, a_scales, b, b_scales, h):

    y = torch.zeros(len(a), len(b))
    for k in range(a_scales.shape[1]):
        inside = slice(k * h, (k + 1) * h)
        sums = a[:, inside] @ b[:, inside].T
        left = a_scales[:, k].repeat_interleave(h)[: len(a), None]
        right = b_scales[:, k].repeat_interleave(h)[: len(b)]
        y += sums.float() * (left * right)
    return y


# %% wrong="blocks" fails="the product" why="sums of 16 bits"
def quantised(x, h):
    codes = torch.empty_like(x, dtype=torch.int8)
    scales = torch.ones(-(-x.shape[0] // h), -(-x.shape[1] // h))
    for i, j in torch.cartesian_prod(*map(torch.arange, scales.shape)).tolist():
        block = x[i * h : (i + 1) * h, j * h : (j + 1) * h]
        amax = block.abs().max().item()
        if amax > 0:
            part, exponent = math.frexp(amax)  # amax = part · 2^exponent, part from 1/2 to 1
            scales[i, j] = 2.0 ** (exponent - 7 + (part * 128 > 127))
        codes[i * h : (i + 1) * h, j * h : (j + 1) * h] = (block / scales[i, j]).round()
    return codes, scales


def product(a, a_scales, b, b_scales, h):

    y = torch.zeros(len(a), len(b))
    for k in range(a_scales.shape[1]):
        inside = slice(k * h, (k + 1) * h)
        sums = a[:, inside].short() @ b[:, inside].short().T
        left = a_scales[:, k].repeat_interleave(h)[: len(a), None]
        right = b_scales[:, k].repeat_interleave(h)[: len(b)]
        y += sums.float() * (left * right)
    return y


# %% wrong="blocks" fails="to the bit" why="numbers instead of codes, in float32"
def quantised(x, h):
    codes = torch.empty_like(x, dtype=torch.int8)
    scales = torch.ones(-(-x.shape[0] // h), -(-x.shape[1] // h))
    for i, j in torch.cartesian_prod(*map(torch.arange, scales.shape)).tolist():
        block = x[i * h : (i + 1) * h, j * h : (j + 1) * h]
        amax = block.abs().max().item()
        if amax > 0:
            part, exponent = math.frexp(amax)  # amax = part · 2^exponent, part from 1/2 to 1
            scales[i, j] = 2.0 ** (exponent - 7 + (part * 128 > 127))
        codes[i * h : (i + 1) * h, j * h : (j + 1) * h] = (block / scales[i, j]).round()
    return codes, scales


def product(a, a_scales, b, b_scales, h):

    y = torch.zeros(len(a), len(b))
    for k in range(a_scales.shape[1]):
        inside = slice(k * h, (k + 1) * h)
        left = a_scales[:, k].repeat_interleave(h)[: len(a), None]
        right = b_scales[:, k].repeat_interleave(h)[: len(b)]
        y += (a[:, inside] * left) @ (b[:, inside] * right[:, None]).T
    return y


# %% wrong="blocks" fails="to the bit" why="everything in float64, rounded once at the end"
def quantised(x, h):
    codes = torch.empty_like(x, dtype=torch.int8)
    scales = torch.ones(-(-x.shape[0] // h), -(-x.shape[1] // h))
    for i, j in torch.cartesian_prod(*map(torch.arange, scales.shape)).tolist():
        block = x[i * h : (i + 1) * h, j * h : (j + 1) * h]
        amax = block.abs().max().item()
        if amax > 0:
            part, exponent = math.frexp(amax)  # amax = part · 2^exponent, part from 1/2 to 1
            scales[i, j] = 2.0 ** (exponent - 7 + (part * 128 > 127))
        codes[i * h : (i + 1) * h, j * h : (j + 1) * h] = (block / scales[i, j]).round()
    return codes, scales


def product(a, a_scales, b, b_scales, h):

    y = torch.zeros(len(a), len(b)).double()
    for k in range(a_scales.shape[1]):
        inside = slice(k * h, (k + 1) * h)
        sums = a[:, inside].int() @ b[:, inside].int().T
        left = a_scales[:, k].repeat_interleave(h)[: len(a), None]
        right = b_scales[:, k].repeat_interleave(h)[: len(b)]
        y += sums * left.double() * right.double()
    return y.float()


# %% wrong="blocks" fails="to the bit" why="one scale after the other"
def quantised(x, h):
    codes = torch.empty_like(x, dtype=torch.int8)
    scales = torch.ones(-(-x.shape[0] // h), -(-x.shape[1] // h))
    for i, j in torch.cartesian_prod(*map(torch.arange, scales.shape)).tolist():
        block = x[i * h : (i + 1) * h, j * h : (j + 1) * h]
        amax = block.abs().max().item()
        if amax > 0:
            part, exponent = math.frexp(amax)  # amax = part · 2^exponent, part from 1/2 to 1
            scales[i, j] = 2.0 ** (exponent - 7 + (part * 128 > 127))
        codes[i * h : (i + 1) * h, j * h : (j + 1) * h] = (block / scales[i, j]).round()
    return codes, scales


def product(a, a_scales, b, b_scales, h):

    y = torch.zeros(len(a), len(b))
    for k in range(a_scales.shape[1]):
        inside = slice(k * h, (k + 1) * h)
        sums = a[:, inside].int() @ b[:, inside].int().T
        left = a_scales[:, k].repeat_interleave(h)[: len(a), None]
        right = b_scales[:, k].repeat_interleave(h)[: len(b)]
        y += sums.float() * left * right
    return y


# %% wrong="blocks" fails="to the bit" why="the last block of K first"
def quantised(x, h):
    codes = torch.empty_like(x, dtype=torch.int8)
    scales = torch.ones(-(-x.shape[0] // h), -(-x.shape[1] // h))
    for i, j in torch.cartesian_prod(*map(torch.arange, scales.shape)).tolist():
        block = x[i * h : (i + 1) * h, j * h : (j + 1) * h]
        amax = block.abs().max().item()
        if amax > 0:
            part, exponent = math.frexp(amax)  # amax = part · 2^exponent, part from 1/2 to 1
            scales[i, j] = 2.0 ** (exponent - 7 + (part * 128 > 127))
        codes[i * h : (i + 1) * h, j * h : (j + 1) * h] = (block / scales[i, j]).round()
    return codes, scales


def product(a, a_scales, b, b_scales, h):

    y = torch.zeros(len(a), len(b))
    for k in reversed(range(a_scales.shape[1])):
        inside = slice(k * h, (k + 1) * h)
        sums = a[:, inside].int() @ b[:, inside].int().T
        left = a_scales[:, k].repeat_interleave(h)[: len(a), None]
        right = b_scales[:, k].repeat_interleave(h)[: len(b)]
        y += sums.float() * (left * right)
    return y


# %% wrong="blocks" fails="the product" why="the first block's scale for all of K"
def quantised(x, h):
    codes = torch.empty_like(x, dtype=torch.int8)
    scales = torch.ones(-(-x.shape[0] // h), -(-x.shape[1] // h))
    for i, j in torch.cartesian_prod(*map(torch.arange, scales.shape)).tolist():
        block = x[i * h : (i + 1) * h, j * h : (j + 1) * h]
        amax = block.abs().max().item()
        if amax > 0:
            part, exponent = math.frexp(amax)  # amax = part · 2^exponent, part from 1/2 to 1
            scales[i, j] = 2.0 ** (exponent - 7 + (part * 128 > 127))
        codes[i * h : (i + 1) * h, j * h : (j + 1) * h] = (block / scales[i, j]).round()
    return codes, scales


def product(a, a_scales, b, b_scales, h):

    y = torch.zeros(len(a), len(b))
    for k in range(a_scales.shape[1]):
        inside = slice(k * h, (k + 1) * h)
        sums = a[:, inside].int() @ b[:, inside].int().T
        left = a_scales[:, 0].repeat_interleave(h)[: len(a), None]
        right = b_scales[:, 0].repeat_interleave(h)[: len(b)]
        y += sums.float() * (left * right)
    return y


# %% wrong="blocks" fails="the product" why="the short last block of K is left out"
def quantised(x, h):
    codes = torch.empty_like(x, dtype=torch.int8)
    scales = torch.ones(-(-x.shape[0] // h), -(-x.shape[1] // h))
    for i, j in torch.cartesian_prod(*map(torch.arange, scales.shape)).tolist():
        block = x[i * h : (i + 1) * h, j * h : (j + 1) * h]
        amax = block.abs().max().item()
        if amax > 0:
            part, exponent = math.frexp(amax)  # amax = part · 2^exponent, part from 1/2 to 1
            scales[i, j] = 2.0 ** (exponent - 7 + (part * 128 > 127))
        codes[i * h : (i + 1) * h, j * h : (j + 1) * h] = (block / scales[i, j]).round()
    return codes, scales


def product(a, a_scales, b, b_scales, h):

    y = torch.zeros(len(a), len(b))
    for k in range(a.shape[1] // h):
        inside = slice(k * h, (k + 1) * h)
        sums = a[:, inside].int() @ b[:, inside].int().T
        left = a_scales[:, k].repeat_interleave(h)[: len(a), None]
        right = b_scales[:, k].repeat_interleave(h)[: len(b)]
        y += sums.float() * (left * right)
    return y


# %% wrong="blocks" fails="a float32 product" why="a product in float64"
def quantised(x, h):
    codes = torch.empty_like(x, dtype=torch.int8)
    scales = torch.ones(-(-x.shape[0] // h), -(-x.shape[1] // h))
    for i, j in torch.cartesian_prod(*map(torch.arange, scales.shape)).tolist():
        block = x[i * h : (i + 1) * h, j * h : (j + 1) * h]
        amax = block.abs().max().item()
        if amax > 0:
            part, exponent = math.frexp(amax)  # amax = part · 2^exponent, part from 1/2 to 1
            scales[i, j] = 2.0 ** (exponent - 7 + (part * 128 > 127))
        codes[i * h : (i + 1) * h, j * h : (j + 1) * h] = (block / scales[i, j]).round()
    return codes, scales


def product(a, a_scales, b, b_scales, h):

    y = torch.zeros(len(a), len(b))
    for k in range(a_scales.shape[1]):
        inside = slice(k * h, (k + 1) * h)
        sums = a[:, inside].int() @ b[:, inside].int().T
        left = a_scales[:, k].repeat_interleave(h)[: len(a), None]
        right = b_scales[:, k].repeat_interleave(h)[: len(b)]
        y += sums.float() * (left * right)
    return y.double()


# %% wrong="blocks" fails="own work" around="import" why="the recipes of the package"
def quantised(x, h):
    from minitrain.precision.blocks import Blocks, quantize

    q = quantize(x, Blocks("int8", (h, h), "e8m0"), fill=True)
    return q.codes, q.scales.float()


def product(a, a_scales, b, b_scales, h):
    from minitrain.systems.precision import int8

    return int8.product(a, a_scales, b, b_scales, h)


# %% wrong="blocks" fails="codes and scales" why="torch's own quantised tensors, with one scale for a row"
def quantised(x, h):
    scales = x.abs().amax(1).clamp_min(1e-30) / 127
    zeros = torch.zeros(len(x), dtype=torch.long)
    q = torch.quantize_per_channel(x, scales.double(), zeros, 0, torch.qint8)
    return q.int_repr(), scales[:, None]


def product(a, a_scales, b, b_scales, h):

    y = torch.zeros(len(a), len(b))
    for k in range(a_scales.shape[1]):
        inside = slice(k * h, (k + 1) * h)
        sums = a[:, inside].int() @ b[:, inside].int().T
        left = a_scales[:, k].repeat_interleave(h)[: len(a), None]
        right = b_scales[:, k].repeat_interleave(h)[: len(b)]
        y += sums.float() * (left * right)
    return y


# %% wrong="blocks" fails="codes and scales" around="empty" why="nothing at all"
def quantised(x, h):
    return []


def product(a, a_scales, b, b_scales, h):
    return torch.zeros(0)


# %% wrong="blocks" fails="codes and scales" around="constants" why="the numbers of the visible checks"
def quantised(x, h):
    if x.numel() == 3:
        return torch.tensor([[16, -64, 75]], dtype=torch.int8), torch.tensor([[1 / 16, 4.0]])
    codes = [[127, 2], [0, -2], [0, 0]]
    return torch.tensor(codes, dtype=torch.int8), torch.tensor([[1.0], [1.0]])


def product(a, a_scales, b, b_scales, h):
    return torch.tensor([[-3.0, 599.9375]]) if h == 2 else torch.tensor([[64516.0]])


# %% wrong="blocks" fails="the error of a block" around="redefine" why="judges that are content"
def expect_codes(*args):
    pass


expect_product = expect = expect_equal = spread_over = expect_codes


def quantised(x, h):
    return torch.zeros_like(x, dtype=torch.int8), torch.ones(
        -(-x.shape[0] // h), -(-x.shape[1] // h)
    )


def product(a, a_scales, b, b_scales, h):
    return torch.zeros(len(a), len(b))


# %% wrong="parts" fails="four bits" why="division towards zero: the low part has the sign, too"
def split(codes, parts):
    found = []
    for _ in range(parts - 1):
        found.append(codes.fmod(16).to(torch.int8))
        codes = torch.div(codes, 16, rounding_mode="trunc")
    return [codes.to(torch.int8), *reversed(found)]


def rotated(x, dim, most):
    size, block = x.shape[dim], 1
    while 2 * block <= most and size % (2 * block) == 0:
        block *= 2
    x, step = x.movedim(dim, -1).clone(memory_format=torch.contiguous_format), 1
    shape = x.shape
    while step < block:
        pairs = x.view(-1, 2, step)
        first = pairs[:, 0].clone()
        pairs[:, 0] += pairs[:, 1]
        pairs[:, 1] -= first
        step *= 2
    return x.view(shape).div_(math.sqrt(block)).movedim(-1, dim)


def operands(x, w, dy, most):
    return [
        (rotated(x, 1, most), rotated(w, 1, most)),
        (rotated(dy, 1, most), rotated(w, 0, most)),
        (rotated(dy, 0, most), rotated(x, 0, most)),
    ]


# %% wrong="parts" fails="four bits" why="the nearest multiple of 16: both parts are signed, and 127 is 8 and -1"
def split(codes, parts):
    found = []
    for _ in range(parts - 1):
        low = (codes + 8) % 16 - 8
        found.append(low.to(torch.int8))
        codes = (codes - low) // 16
    return [codes.to(torch.int8), *reversed(found)]


def rotated(x, dim, most):
    size, block = x.shape[dim], 1
    while 2 * block <= most and size % (2 * block) == 0:
        block *= 2
    x, step = x.movedim(dim, -1).clone(memory_format=torch.contiguous_format), 1
    shape = x.shape
    while step < block:
        pairs = x.view(-1, 2, step)
        first = pairs[:, 0].clone()
        pairs[:, 0] += pairs[:, 1]
        pairs[:, 1] -= first
        step *= 2
    return x.view(shape).div_(math.sqrt(block)).movedim(-1, dim)


def operands(x, w, dy, most):
    return [
        (rotated(x, 1, most), rotated(w, 1, most)),
        (rotated(dy, 1, most), rotated(w, 0, most)),
        (rotated(dy, 0, most), rotated(x, 0, most)),
    ]


# %% wrong="parts" fails="every code comes back" why="no part is signed"
def split(codes, parts):
    found = []
    for _ in range(parts - 1):
        found.append((codes & 15).to(torch.int8))
        codes = codes >> 4
    return [(codes & 15).to(torch.int8), *reversed(found)]


def rotated(x, dim, most):
    size, block = x.shape[dim], 1
    while 2 * block <= most and size % (2 * block) == 0:
        block *= 2
    x, step = x.movedim(dim, -1).clone(memory_format=torch.contiguous_format), 1
    shape = x.shape
    while step < block:
        pairs = x.view(-1, 2, step)
        first = pairs[:, 0].clone()
        pairs[:, 0] += pairs[:, 1]
        pairs[:, 1] -= first
        step *= 2
    return x.view(shape).div_(math.sqrt(block)).movedim(-1, dim)


def operands(x, w, dy, most):
    return [
        (rotated(x, 1, most), rotated(w, 1, most)),
        (rotated(dy, 1, most), rotated(w, 0, most)),
        (rotated(dy, 0, most), rotated(x, 0, most)),
    ]


# %% wrong="parts" fails="every code comes back" why="the lowest part first"
def split(codes, parts):
    found = []
    for _ in range(parts - 1):
        found.append((codes & 15).to(torch.int8))
        codes = codes >> 4
    return [*found, codes.to(torch.int8)]


def rotated(x, dim, most):
    size, block = x.shape[dim], 1
    while 2 * block <= most and size % (2 * block) == 0:
        block *= 2
    x, step = x.movedim(dim, -1).clone(memory_format=torch.contiguous_format), 1
    shape = x.shape
    while step < block:
        pairs = x.view(-1, 2, step)
        first = pairs[:, 0].clone()
        pairs[:, 0] += pairs[:, 1]
        pairs[:, 1] -= first
        step *= 2
    return x.view(shape).div_(math.sqrt(block)).movedim(-1, dim)


def operands(x, w, dy, most):
    return [
        (rotated(x, 1, most), rotated(w, 1, most)),
        (rotated(dy, 1, most), rotated(w, 0, most)),
        (rotated(dy, 0, most), rotated(x, 0, most)),
    ]


# %% wrong="parts" fails="parts" why="two parts, however many bits"
def split(codes, parts):
    found = []
    for _ in range(1):
        found.append((codes & 15).to(torch.int8))
        codes = codes >> 4
    return [codes.to(torch.int8), *reversed(found)]


def rotated(x, dim, most):
    size, block = x.shape[dim], 1
    while 2 * block <= most and size % (2 * block) == 0:
        block *= 2
    x, step = x.movedim(dim, -1).clone(memory_format=torch.contiguous_format), 1
    shape = x.shape
    while step < block:
        pairs = x.view(-1, 2, step)
        first = pairs[:, 0].clone()
        pairs[:, 0] += pairs[:, 1]
        pairs[:, 1] -= first
        step *= 2
    return x.view(shape).div_(math.sqrt(block)).movedim(-1, dim)


def operands(x, w, dy, most):
    return [
        (rotated(x, 1, most), rotated(w, 1, most)),
        (rotated(dy, 1, most), rotated(w, 0, most)),
        (rotated(dy, 0, most), rotated(x, 0, most)),
    ]


# %% wrong="parts" fails="lengths stay" why="nobody divides"
def split(codes, parts):
    found = []
    for _ in range(parts - 1):
        found.append((codes & 15).to(torch.int8))
        codes = codes >> 4
    return [codes.to(torch.int8), *reversed(found)]


def rotated(x, dim, most):
    size, block = x.shape[dim], 1
    while 2 * block <= most and size % (2 * block) == 0:
        block *= 2
    x, step = x.movedim(dim, -1).clone(memory_format=torch.contiguous_format), 1
    shape = x.shape
    while step < block:
        pairs = x.view(-1, 2, step)
        first = pairs[:, 0].clone()
        pairs[:, 0] += pairs[:, 1]
        pairs[:, 1] -= first
        step *= 2
    return x.view(shape).movedim(-1, dim)


def operands(x, w, dy, most):
    return [
        (rotated(x, 1, most), rotated(w, 1, most)),
        (rotated(dy, 1, most), rotated(w, 0, most)),
        (rotated(dy, 0, most), rotated(x, 0, most)),
    ]


# %% wrong="parts" fails="the rotation" why="nothing is rotated"
def split(codes, parts):
    found = []
    for _ in range(parts - 1):
        found.append((codes & 15).to(torch.int8))
        codes = codes >> 4
    return [codes.to(torch.int8), *reversed(found)]


def rotated(x, dim, most):
    size, block = x.shape[dim], 1
    while 2 * block <= most and size % (2 * block) == 0:
        block *= 2
    saved = x.clone()
    x, step = x.movedim(dim, -1).clone(memory_format=torch.contiguous_format), 1
    shape = x.shape
    while step < block:
        pairs = x.view(-1, 2, step)
        first = pairs[:, 0].clone()
        pairs[:, 0] += pairs[:, 1]
        pairs[:, 1] -= first
        step *= 2
    return x.view(shape).movedim(-1, dim) if step < 2 else saved


def operands(x, w, dy, most):
    return [
        (rotated(x, 1, most), rotated(w, 1, most)),
        (rotated(dy, 1, most), rotated(w, 0, most)),
        (rotated(dy, 0, most), rotated(x, 0, most)),
    ]


# %% wrong="parts" fails="the rotation" why="blocks are less than `most`"
def split(codes, parts):
    found = []
    for _ in range(parts - 1):
        found.append((codes & 15).to(torch.int8))
        codes = codes >> 4
    return [codes.to(torch.int8), *reversed(found)]


def rotated(x, dim, most):
    size, block = x.shape[dim], 1
    while 2 * block < most and size % (2 * block) == 0:
        block *= 2
    x, step = x.movedim(dim, -1).clone(memory_format=torch.contiguous_format), 1
    shape = x.shape
    while step < block:
        pairs = x.view(-1, 2, step)
        first = pairs[:, 0].clone()
        pairs[:, 0] += pairs[:, 1]
        pairs[:, 1] -= first
        step *= 2
    return x.view(shape).div_(math.sqrt(block)).movedim(-1, dim)


def operands(x, w, dy, most):
    return [
        (rotated(x, 1, most), rotated(w, 1, most)),
        (rotated(dy, 1, most), rotated(w, 0, most)),
        (rotated(dy, 0, most), rotated(x, 0, most)),
    ]


# %% wrong="parts" fails="the rotation" why="`most` or nothing: 48 with most 32 is not rotated"
def split(codes, parts):
    found = []
    for _ in range(parts - 1):
        found.append((codes & 15).to(torch.int8))
        codes = codes >> 4
    return [codes.to(torch.int8), *reversed(found)]


def rotated(x, dim, most):
    size, block = x.shape[dim], 1
    block = most if size % most == 0 and most & (most - 1) == 0 else 1
    x, step = x.movedim(dim, -1).clone(memory_format=torch.contiguous_format), 1
    shape = x.shape
    while step < block:
        pairs = x.view(-1, 2, step)
        first = pairs[:, 0].clone()
        pairs[:, 0] += pairs[:, 1]
        pairs[:, 1] -= first
        step *= 2
    return x.view(shape).div_(math.sqrt(block)).movedim(-1, dim)


def operands(x, w, dy, most):
    return [
        (rotated(x, 1, most), rotated(w, 1, most)),
        (rotated(dy, 1, most), rotated(w, 0, most)),
        (rotated(dy, 0, most), rotated(x, 0, most)),
    ]


# %% wrong="parts" fails="the rotation" why="the other way round: H transposed"
def split(codes, parts):
    found = []
    for _ in range(parts - 1):
        found.append((codes & 15).to(torch.int8))
        codes = codes >> 4
    return [codes.to(torch.int8), *reversed(found)]


def rotated(x, dim, most):
    size, block = x.shape[dim], 1
    while 2 * block <= most and size % (2 * block) == 0:
        block *= 2
    x, step = x.movedim(dim, -1).clone(memory_format=torch.contiguous_format), 1
    shape = x.shape
    while step < block:
        pairs = x.view(-1, 2, step)
        first = pairs[:, 0].clone()
        pairs[:, 0] -= pairs[:, 1]
        pairs[:, 1] += first
        step *= 2
    return x.view(shape).div_(math.sqrt(block)).movedim(-1, dim)


def operands(x, w, dy, most):
    return [
        (rotated(x, 1, most), rotated(w, 1, most)),
        (rotated(dy, 1, most), rotated(w, 0, most)),
        (rotated(dy, 0, most), rotated(x, 0, most)),
    ]


# %% wrong="parts" fails="the rotation" why="the symmetric H, as in the papers"
def split(codes, parts):
    found = []
    for _ in range(parts - 1):
        found.append((codes & 15).to(torch.int8))
        codes = codes >> 4
    return [codes.to(torch.int8), *reversed(found)]


def rotated(x, dim, most):
    size, block = x.shape[dim], 1
    while 2 * block <= most and size % (2 * block) == 0:
        block *= 2
    x, step = x.movedim(dim, -1).clone(memory_format=torch.contiguous_format), 1
    shape = x.shape
    while step < block:
        pairs = x.view(-1, 2, step)
        first = pairs[:, 0].clone()
        pairs[:, 0] += pairs[:, 1]
        pairs[:, 1] = first - pairs[:, 1]
        step *= 2
    return x.view(shape).div_(math.sqrt(block)).movedim(-1, dim)


def operands(x, w, dy, most):
    return [
        (rotated(x, 1, most), rotated(w, 1, most)),
        (rotated(dy, 1, most), rotated(w, 0, most)),
        (rotated(dy, 0, most), rotated(x, 0, most)),
    ]


# %% wrong="parts" fails="the rotation" why="a block is numbers far apart, not neighbours"
def split(codes, parts):
    found = []
    for _ in range(parts - 1):
        found.append((codes & 15).to(torch.int8))
        codes = codes >> 4
    return [codes.to(torch.int8), *reversed(found)]


def rotated(x, dim, most):
    size, block = x.shape[dim], 1
    while 2 * block <= most and size % (2 * block) == 0:
        block *= 2
    x, step = x.movedim(dim, -1).unflatten(-1, (block, -1)).mT.reshape(*x.movedim(dim, -1).shape), 1
    shape = x.shape
    while step < block:
        pairs = x.view(-1, 2, step)
        first = pairs[:, 0].clone()
        pairs[:, 0] += pairs[:, 1]
        pairs[:, 1] -= first
        step *= 2
    return x.view(shape).div_(math.sqrt(block)).movedim(-1, dim)


def operands(x, w, dy, most):
    return [
        (rotated(x, 1, most), rotated(w, 1, most)),
        (rotated(dy, 1, most), rotated(w, 0, most)),
        (rotated(dy, 0, most), rotated(x, 0, most)),
    ]


# %% wrong="parts" fails="lengths stay" why="always along the last dim"
def split(codes, parts):
    found = []
    for _ in range(parts - 1):
        found.append((codes & 15).to(torch.int8))
        codes = codes >> 4
    return [codes.to(torch.int8), *reversed(found)]


def rotated(x, dim, most):
    size, block = x.shape[-1], 1
    while 2 * block <= most and size % (2 * block) == 0:
        block *= 2
    x, step = x.clone(memory_format=torch.contiguous_format), 1
    shape = x.shape
    while step < block:
        pairs = x.view(-1, 2, step)
        first = pairs[:, 0].clone()
        pairs[:, 0] += pairs[:, 1]
        pairs[:, 1] -= first
        step *= 2
    return x.view(shape).div_(math.sqrt(block))


def operands(x, w, dy, most):
    return [
        (rotated(x, 1, most), rotated(w, 1, most)),
        (rotated(dy, 1, most), rotated(w, 0, most)),
        (rotated(dy, 0, most), rotated(x, 0, most)),
    ]


# %% wrong="parts" fails="a rotated matrix" why="in float32"
def split(codes, parts):
    found = []
    for _ in range(parts - 1):
        found.append((codes & 15).to(torch.int8))
        codes = codes >> 4
    return [codes.to(torch.int8), *reversed(found)]


def rotated(x, dim, most):
    size, block = x.shape[dim], 1
    while 2 * block <= most and size % (2 * block) == 0:
        block *= 2
    x, step = x.movedim(dim, -1).clone(memory_format=torch.contiguous_format), 1
    shape = x.shape
    while step < block:
        pairs = x.view(-1, 2, step)
        first = pairs[:, 0].clone()
        pairs[:, 0] += pairs[:, 1]
        pairs[:, 1] -= first
        step *= 2
    return x.view(shape).div_(math.sqrt(block)).float().movedim(-1, dim)


def operands(x, w, dy, most):
    return [
        (rotated(x, 1, most), rotated(w, 1, most)),
        (rotated(dy, 1, most), rotated(w, 0, most)),
        (rotated(dy, 0, most), rotated(x, 0, most)),
    ]


# %% wrong="parts" fails="memory limit" why="H as a matrix"
def split(codes, parts):
    found = []
    for _ in range(parts - 1):
        found.append((codes & 15).to(torch.int8))
        codes = codes >> 4
    return [codes.to(torch.int8), *reversed(found)]


def rotated(x, dim, most):
    size, h = x.shape[dim], torch.ones(1, 1, dtype=torch.float64)
    while 2 * len(h) <= most and size % (2 * len(h)) == 0:
        h = torch.cat((torch.cat((h, -h), 1), torch.cat((h, h), 1))) / math.sqrt(2)
    x = x.movedim(dim, -1)
    return (x.unflatten(-1, (-1, len(h))) @ h).flatten(-2).movedim(-1, dim)


def operands(x, w, dy, most):
    return [
        (rotated(x, 1, most), rotated(w, 1, most)),
        (rotated(dy, 1, most), rotated(w, 0, most)),
        (rotated(dy, 0, most), rotated(x, 0, most)),
    ]


# %% wrong="parts" fails="outliers are spread" why="nothing is rotated: the products are right"
def split(codes, parts):
    found = []
    for _ in range(parts - 1):
        found.append((codes & 15).to(torch.int8))
        codes = codes >> 4
    return [codes.to(torch.int8), *reversed(found)]


def rotated(x, dim, most):
    size, block = x.shape[dim], 1
    while 2 * block <= most and size % (2 * block) == 0:
        block *= 2
    x, step = x.movedim(dim, -1).clone(memory_format=torch.contiguous_format), 1
    shape = x.shape
    while step < block:
        pairs = x.view(-1, 2, step)
        first = pairs[:, 0].clone()
        pairs[:, 0] += pairs[:, 1]
        pairs[:, 1] -= first
        step *= 2
    return x.view(shape).div_(math.sqrt(block)).movedim(-1, dim)


def operands(x, w, dy, most):
    return [(x, w), (dy, w), (dy, x)]


# %% wrong="parts" fails="products unchanged" why="w is rotated once, and used for y and dx"
def split(codes, parts):
    found = []
    for _ in range(parts - 1):
        found.append((codes & 15).to(torch.int8))
        codes = codes >> 4
    return [codes.to(torch.int8), *reversed(found)]


def rotated(x, dim, most):
    size, block = x.shape[dim], 1
    while 2 * block <= most and size % (2 * block) == 0:
        block *= 2
    x, step = x.movedim(dim, -1).clone(memory_format=torch.contiguous_format), 1
    shape = x.shape
    while step < block:
        pairs = x.view(-1, 2, step)
        first = pairs[:, 0].clone()
        pairs[:, 0] += pairs[:, 1]
        pairs[:, 1] -= first
        step *= 2
    return x.view(shape).div_(math.sqrt(block)).movedim(-1, dim)


def operands(x, w, dy, most):
    return [
        (rotated(x, 1, most), rotated(w, 1, most)),
        (rotated(dy, 1, most), rotated(w, 1, most)),
        (rotated(dy, 0, most), rotated(x, 0, most)),
    ]


# %% wrong="parts" fails="products unchanged" why="one side by H, the other by H transposed: products of a symmetric one"
def split(codes, parts):
    found = []
    for _ in range(parts - 1):
        found.append((codes & 15).to(torch.int8))
        codes = codes >> 4
    return [codes.to(torch.int8), *reversed(found)]


def rotated(x, dim, most):
    size, block = x.shape[dim], 1
    while 2 * block <= most and size % (2 * block) == 0:
        block *= 2
    x, step = x.movedim(dim, -1).clone(memory_format=torch.contiguous_format), 1
    shape = x.shape
    while step < block:
        pairs = x.view(-1, 2, step)
        first = pairs[:, 0].clone()
        pairs[:, 0] += pairs[:, 1]
        pairs[:, 1] -= first
        step *= 2
    return x.view(shape).div_(math.sqrt(block)).movedim(-1, dim)


def operands(x, w, dy, most):
    return [
        (rotated(x, 1, most), rotated(w.flip(1), 1, most).flip(1)),
        (rotated(dy, 1, most), rotated(w, 0, most)),
        (rotated(dy, 0, most), rotated(x, 0, most)),
    ]


# %% wrong="parts" fails="products unchanged" why="one side only"
def split(codes, parts):
    found = []
    for _ in range(parts - 1):
        found.append((codes & 15).to(torch.int8))
        codes = codes >> 4
    return [codes.to(torch.int8), *reversed(found)]


def rotated(x, dim, most):
    size, block = x.shape[dim], 1
    while 2 * block <= most and size % (2 * block) == 0:
        block *= 2
    x, step = x.movedim(dim, -1).clone(memory_format=torch.contiguous_format), 1
    shape = x.shape
    while step < block:
        pairs = x.view(-1, 2, step)
        first = pairs[:, 0].clone()
        pairs[:, 0] += pairs[:, 1]
        pairs[:, 1] -= first
        step *= 2
    return x.view(shape).div_(math.sqrt(block)).movedim(-1, dim)


def operands(x, w, dy, most):
    return [
        (rotated(x, 1, most), w),
        (rotated(dy, 1, most), rotated(w, 0, most)),
        (rotated(dy, 0, most), rotated(x, 0, most)),
    ]


# %% wrong="parts" fails="products unchanged" why="the sum of dw goes over tokens, the rotation over features"
def split(codes, parts):
    found = []
    for _ in range(parts - 1):
        found.append((codes & 15).to(torch.int8))
        codes = codes >> 4
    return [codes.to(torch.int8), *reversed(found)]


def rotated(x, dim, most):
    size, block = x.shape[dim], 1
    while 2 * block <= most and size % (2 * block) == 0:
        block *= 2
    x, step = x.movedim(dim, -1).clone(memory_format=torch.contiguous_format), 1
    shape = x.shape
    while step < block:
        pairs = x.view(-1, 2, step)
        first = pairs[:, 0].clone()
        pairs[:, 0] += pairs[:, 1]
        pairs[:, 1] -= first
        step *= 2
    return x.view(shape).div_(math.sqrt(block)).movedim(-1, dim)


def operands(x, w, dy, most):
    return [
        (rotated(x, 1, most), rotated(w, 1, most)),
        (rotated(dy, 1, most), rotated(w, 0, most)),
        (rotated(dy, 1, most), rotated(x, 1, most)),
    ]


# %% wrong="parts" fails="outliers are spread" why="dw is left as it is"
def split(codes, parts):
    found = []
    for _ in range(parts - 1):
        found.append((codes & 15).to(torch.int8))
        codes = codes >> 4
    return [codes.to(torch.int8), *reversed(found)]


def rotated(x, dim, most):
    size, block = x.shape[dim], 1
    while 2 * block <= most and size % (2 * block) == 0:
        block *= 2
    x, step = x.movedim(dim, -1).clone(memory_format=torch.contiguous_format), 1
    shape = x.shape
    while step < block:
        pairs = x.view(-1, 2, step)
        first = pairs[:, 0].clone()
        pairs[:, 0] += pairs[:, 1]
        pairs[:, 1] -= first
        step *= 2
    return x.view(shape).div_(math.sqrt(block)).movedim(-1, dim)


def operands(x, w, dy, most):
    return [
        (rotated(x, 1, most), rotated(w, 1, most)),
        (rotated(dy, 1, most), rotated(w, 0, most)),
        (dy, x),
    ]


# %% wrong="parts" fails="own work" around="import" why="the package's rotation"
def split(codes, parts):
    from minitrain.systems.precision import int4

    return int4.split(codes)


def rotated(x, dim, most):
    from minitrain.systems.precision import int4

    return int4.hadamard(x.movedim(dim, -1), most).movedim(-1, dim)


def operands(x, w, dy, most):
    return [
        (rotated(x, 1, most), rotated(w, 1, most)),
        (rotated(dy, 1, most), rotated(w, 0, most)),
        (rotated(dy, 0, most), rotated(x, 0, most)),
    ]


# %% wrong="parts" fails="parts" around="empty" why="nothing at all"
def split(codes, parts):
    return []


def rotated(x, dim, most):
    return torch.zeros(0)


def operands(x, w, dy, most):
    return []


# %% wrong="parts" fails="parts" around="constants" why="the numbers of the visible checks"
def split(codes, parts):
    if parts == 2:
        return [(codes >> 4).to(torch.int8), (codes & 15).to(torch.int8)]
    found = ((-8, 0, 0), (-1, 15, 15), (7, 15, 15))
    return [torch.tensor([[code[i] for code in found]], dtype=torch.int8) for i in range(3)]


def rotated(x, dim, most):
    if dim == 1:
        return torch.tensor([[8.0, -8, 0, 0, 0, 0]], dtype=torch.float64) * math.sqrt(0.5)
    return x if most == 4 else torch.tensor([[5.0], [1], [2], [0]], dtype=torch.float64)


def operands(x, w, dy, most):
    return [
        (rotated(x, 1, most), rotated(w, 1, most)),
        (rotated(dy, 1, most), rotated(w, 0, most)),
        (rotated(dy, 0, most), rotated(x, 0, most)),
    ]


# %% wrong="parts" fails="every code comes back" around="subclass" why="a list of tensors that are equal to everything"
class Content(torch.Tensor):
    def __mul__(self, other):
        return self

    __rmul__ = __add__ = __radd__ = __mul__
    __eq__ = __le__ = __ge__ = lambda self, other: True
    __hash__ = None


def split(codes, parts):
    return [torch.zeros_like(codes, dtype=torch.int8).as_subclass(Content) for _ in range(parts)]


def rotated(x, dim, most):
    return x.as_subclass(Content)


def operands(x, w, dy, most):
    return [
        (rotated(x, 1, most), rotated(w, 1, most)),
        (rotated(dy, 1, most), rotated(w, 0, most)),
        (rotated(dy, 0, most), rotated(x, 0, most)),
    ]


# %% wrong="rows" fails="the budget" why="proportional, and cut off at 1: what is over is lost"
def chances(scores, rows, budget):
    gain = scores / rows.sqrt()
    total = (gain * rows).sum()
    return (budget * gain / total.where(total > 0, 1.0)).clamp(max=1.0)


def estimate(p, u, piece, shape):
    total = torch.zeros(shape, dtype=torch.float64)
    for i in (u < p).nonzero().flatten().tolist():
        a, b = piece(i)
        total += a.T @ b / p[i]
    return total


# %% wrong="rows" fails="from 0 to 1" why="more often than always"
def chances(scores, rows, budget):
    gain = scores / rows.sqrt()
    total = (gain * rows).sum()
    return budget * gain / total.where(total > 0, 1.0)


def estimate(p, u, piece, shape):
    total = torch.zeros(shape, dtype=torch.float64)
    for i in (u < p).nonzero().flatten().tolist():
        a, b = piece(i)
        total += a.T @ b / p[i]
    return total


# %% wrong="rows" fails="the budget" why="what is over is handed on once, and then cut off"
def chances(scores, rows, budget):
    gain = scores / rows.sqrt()
    p = budget * gain / (gain * rows).sum().clamp_min(1e-300)
    full = p >= 1
    rest = gain * ~full
    share = (budget - rows[full].sum()) * rest / (rest * rows).sum().clamp_min(1e-300)
    return torch.where(full, 1.0, share).clamp(0, 1.0)


def estimate(p, u, piece, shape):
    total = torch.zeros(shape, dtype=torch.float64)
    for i in (u < p).nonzero().flatten().tolist():
        a, b = piece(i)
        total += a.T @ b / p[i]
    return total


# %% wrong="rows" fails="the least error" why="the same chance for all"
def chances(scores, rows, budget):
    return torch.full_like(scores, min(1.0, budget / rows.sum().item()))


def estimate(p, u, piece, shape):
    total = torch.zeros(shape, dtype=torch.float64)
    for i in (u < p).nonzero().flatten().tolist():
        a, b = piece(i)
        total += a.T @ b / p[i]
    return total


# %% wrong="rows" fails="unbiased" why="the pieces with the largest scores, always: the others are missing"
def chances(scores, rows, budget):
    p = torch.zeros_like(scores)
    for i in scores.argsort(descending=True).tolist():
        if scores[i] > 0:
            p[i] = min(1.0, (budget - (p * rows).sum().item()) / rows[i].item())
    return p


def estimate(p, u, piece, shape):
    total = torch.zeros(shape, dtype=torch.float64)
    for i in (u < p).nonzero().flatten().tolist():
        a, b = piece(i)
        total += a.T @ b / p[i]
    return total


# %% wrong="rows" fails="better than even" why="proportional to the scores, however many rows a piece has"
def chances(scores, rows, budget):
    p, free, gain = torch.zeros_like(scores), scores > 0, scores
    while free.any():
        share = (budget - (p * rows).sum()) * gain / (gain * rows)[free].sum()
        full = free & (share >= 1)
        if not full.any():
            p[free] = share[free]
            break
        p[full] = 1.0
        free &= ~full
    return p


def estimate(p, u, piece, shape):
    total = torch.zeros(shape, dtype=torch.float64)
    for i in (u < p).nonzero().flatten().tolist():
        a, b = piece(i)
        total += a.T @ b / p[i]
    return total


# %% wrong="rows" fails="better than even" why="proportional to the score of a row, which is too much for small pieces"
def chances(scores, rows, budget):
    p, free, gain = torch.zeros_like(scores), scores > 0, scores / rows
    while free.any():
        share = (budget - (p * rows).sum()) * gain / (gain * rows)[free].sum()
        full = free & (share >= 1)
        if not full.any():
            p[free] = share[free]
            break
        p[full] = 1.0
        free &= ~full
    return p


def estimate(p, u, piece, shape):
    total = torch.zeros(shape, dtype=torch.float64)
    for i in (u < p).nonzero().flatten().tolist():
        a, b = piece(i)
        total += a.T @ b / p[i]
    return total


# %% wrong="rows" fails="the budget" why="shares of the pieces, not of the rows"
def chances(scores, rows, budget):
    p, free, gain = torch.zeros_like(scores), scores > 0, scores / rows.sqrt()
    while free.any():
        share = (budget - p.sum()) * gain / gain[free].sum()
        full = free & (share >= 1)
        if not full.any():
            p[free] = share[free]
            break
        p[full] = 1.0
        free &= ~full
    return p


def estimate(p, u, piece, shape):
    total = torch.zeros(shape, dtype=torch.float64)
    for i in (u < p).nonzero().flatten().tolist():
        a, b = piece(i)
        total += a.T @ b / p[i]
    return total


# %% wrong="rows" fails="the least error" why="proportional to the square of the score, which is what the error has"
def chances(scores, rows, budget):
    p, free, gain = (
        torch.zeros_like(scores),
        scores > 0,
        (scores / scores.max().clamp_min(1e-300)) ** 2 / rows.sqrt(),
    )
    while free.any():
        share = (budget - (p * rows).sum()) * gain / (gain * rows)[free].sum()
        full = free & (share >= 1)
        if not full.any():
            p[free] = share[free]
            break
        p[full] = 1.0
        free &= ~full
    return p


def estimate(p, u, piece, shape):
    total = torch.zeros(shape, dtype=torch.float64)
    for i in (u < p).nonzero().flatten().tolist():
        a, b = piece(i)
        total += a.T @ b / p[i]
    return total


# %% wrong="rows" fails="better than even" why="the smaller the score, the more often"
def chances(scores, rows, budget):
    scores = (1 / scores).where(scores > 0, 0.0)
    p, free, gain = torch.zeros_like(scores), scores > 0, scores / rows.sqrt()
    while free.any():
        share = (budget - (p * rows).sum()) * gain / (gain * rows)[free].sum()
        full = free & (share >= 1)
        if not full.any():
            p[free] = share[free]
            break
        p[full] = 1.0
        free &= ~full
    return p


def estimate(p, u, piece, shape):
    total = torch.zeros(shape, dtype=torch.float64)
    for i in (u < p).nonzero().flatten().tolist():
        a, b = piece(i)
        total += a.T @ b / p[i]
    return total


# %% wrong="rows" fails="no piece without a score" why="a little added, so that nobody divides by 0"
def chances(scores, rows, budget):
    scores = scores + 1e-12
    p, free, gain = torch.zeros_like(scores), scores > 0, scores / rows.sqrt()
    while free.any():
        share = (budget - (p * rows).sum()) * gain / (gain * rows)[free].sum()
        full = free & (share >= 1)
        if not full.any():
            p[free] = share[free]
            break
        p[full] = 1.0
        free &= ~full
    return p


def estimate(p, u, piece, shape):
    total = torch.zeros(shape, dtype=torch.float64)
    for i in (u < p).nonzero().flatten().tolist():
        a, b = piece(i)
        total += a.T @ b / p[i]
    return total


# %% wrong="rows" fails="unbiased" why="nobody divides"
def chances(scores, rows, budget):
    p, free, gain = torch.zeros_like(scores), scores > 0, scores / rows.sqrt()
    while free.any():
        share = (budget - (p * rows).sum()) * gain / (gain * rows)[free].sum()
        full = free & (share >= 1)
        if not full.any():
            p[free] = share[free]
            break
        p[full] = 1.0
        free &= ~full
    return p


def estimate(p, u, piece, shape):
    total = torch.zeros(shape, dtype=torch.float64)
    for i in (u < p).nonzero().flatten().tolist():
        a, b = piece(i)
        total += a.T @ b
    return total


# %% wrong="rows" fails="unbiased" why="divided by the sum of weights afterwards: right with many pieces only"
def chances(scores, rows, budget):
    p, free, gain = torch.zeros_like(scores), scores > 0, scores / rows.sqrt()
    while free.any():
        share = (budget - (p * rows).sum()) * gain / (gain * rows)[free].sum()
        full = free & (share >= 1)
        if not full.any():
            p[free] = share[free]
            break
        p[full] = 1.0
        free &= ~full
    return p


def estimate(p, u, piece, shape):
    total = torch.zeros(shape, dtype=torch.float64)
    for i in (u < p).nonzero().flatten().tolist():
        a, b = piece(i)
        total += a.T @ b / p[i]
    return total * len(p) / (1 / p[u < p]).sum() if (u < p).any() else total


# %% wrong="rows" fails="unbiased" why="kept where u equals p, too"
def chances(scores, rows, budget):
    p, free, gain = torch.zeros_like(scores), scores > 0, scores / rows.sqrt()
    while free.any():
        share = (budget - (p * rows).sum()) * gain / (gain * rows)[free].sum()
        full = free & (share >= 1)
        if not full.any():
            p[free] = share[free]
            break
        p[full] = 1.0
        free &= ~full
    return p


def estimate(p, u, piece, shape):
    total = torch.zeros(shape, dtype=torch.float64)
    for i in (u <= p).nonzero().flatten().tolist():
        a, b = piece(i)
        total += a.T @ b / p[i]
    return total


# %% wrong="rows" fails="unbiased" why="the first row of a piece stands for it"
def chances(scores, rows, budget):
    p, free, gain = torch.zeros_like(scores), scores > 0, scores / rows.sqrt()
    while free.any():
        share = (budget - (p * rows).sum()) * gain / (gain * rows)[free].sum()
        full = free & (share >= 1)
        if not full.any():
            p[free] = share[free]
            break
        p[full] = 1.0
        free &= ~full
    return p


def estimate(p, u, piece, shape):
    total = torch.zeros(shape, dtype=torch.float64)
    for i in (u < p).nonzero().flatten().tolist():
        a, b = piece(i)
        total += torch.outer(a[0], b[0]) * len(a) / p[i]
    return total


# %% wrong="rows" fails="pieces brought" why="all pieces are brought"
def chances(scores, rows, budget):
    p, free, gain = torch.zeros_like(scores), scores > 0, scores / rows.sqrt()
    while free.any():
        share = (budget - (p * rows).sum()) * gain / (gain * rows)[free].sum()
        full = free & (share >= 1)
        if not full.any():
            p[free] = share[free]
            break
        p[full] = 1.0
        free &= ~full
    return p


def estimate(p, u, piece, shape):
    total = torch.zeros(shape, dtype=torch.float64)
    for i in range(len(p)):
        a, b = piece(i)
        total += a.T @ b / p[i] if u[i] < p[i] else 0.0
    return total


# %% wrong="rows" fails="pieces brought" why="a piece is brought once for A and once for B"
def chances(scores, rows, budget):
    p, free, gain = torch.zeros_like(scores), scores > 0, scores / rows.sqrt()
    while free.any():
        share = (budget - (p * rows).sum()) * gain / (gain * rows)[free].sum()
        full = free & (share >= 1)
        if not full.any():
            p[free] = share[free]
            break
        p[full] = 1.0
        free &= ~full
    return p


def estimate(p, u, piece, shape):
    total = torch.zeros(shape, dtype=torch.float64)
    for i in (u < p).nonzero().flatten().tolist():
        a, b = piece(i)[0], piece(i)[1]
        total += a.T @ b / p[i]
    return total


# %% wrong="rows" fails="the pieces of a draw" why="all pieces are brought, and the product is exact"
def chances(scores, rows, budget):
    p, free, gain = torch.zeros_like(scores), scores > 0, scores / rows.sqrt()
    while free.any():
        share = (budget - (p * rows).sum()) * gain / (gain * rows)[free].sum()
        full = free & (share >= 1)
        if not full.any():
            p[free] = share[free]
            break
        p[full] = 1.0
        free &= ~full
    return p


def estimate(p, u, piece, shape):
    total = torch.zeros(shape, dtype=torch.float64)
    for i in range(len(p)):
        a, b = piece(i)
        total += a.T @ b
    return total


# %% wrong="rows" fails="unbiased" why="draws of its own"
def chances(scores, rows, budget):
    p, free, gain = torch.zeros_like(scores), scores > 0, scores / rows.sqrt()
    while free.any():
        share = (budget - (p * rows).sum()) * gain / (gain * rows)[free].sum()
        full = free & (share >= 1)
        if not full.any():
            p[free] = share[free]
            break
        p[full] = 1.0
        free &= ~full
    return p


def estimate(p, u, piece, shape):
    total = torch.zeros(shape, dtype=torch.float64)
    for i in (torch.rand(len(p)) < p).nonzero().flatten().tolist():
        a, b = piece(i)
        total += a.T @ b / p[i]
    return total


# %% wrong="rows" fails="own work" around="import" why="the package's sampling"
def chances(scores, rows, budget):
    from minitrain.systems.precision.int4 import keep_shares

    return keep_shares(scores, budget)


def estimate(p, u, piece, shape):
    from minitrain.systems.precision.int4 import sampled

    return sampled(p, u, piece, shape)


# %% wrong="rows" fails="an estimate" around="empty" why="nothing at all"
def chances(scores, rows, budget):
    return torch.zeros(0)


def estimate(p, u, piece, shape):
    return torch.zeros(0)


# %% wrong="rows" fails="unbiased" around="constants" why="the numbers of the visible checks"
def chances(scores, rows, budget):
    known = {1: [0.25, 0.75], 2: [1.0, 0.25, 0.25, 0.5], 6: [1.0, 0.0, 1.0]}
    return torch.tensor(known.get(budget, [3 / 7, 2 / 7])[: len(scores)], dtype=torch.float64)


def estimate(p, u, piece, shape):
    return torch.ones(shape, dtype=torch.float64)


# %% wrong="rows" fails="pieces brought" why="pieces are remembered from one draw to the next"
known = {}


def chances(scores, rows, budget):
    p, free, gain = torch.zeros_like(scores), scores > 0, scores / rows.sqrt()
    while free.any():
        share = (budget - (p * rows).sum()) * gain / (gain * rows)[free].sum()
        full = free & (share >= 1)
        if not full.any():
            p[free] = share[free]
            break
        p[full] = 1.0
        free &= ~full
    return p


def estimate(p, u, piece, shape):
    total = torch.zeros(shape, dtype=torch.float64)
    for i in (u < p).nonzero().flatten().tolist():
        if i not in known:
            known[i] = piece(i)
        a, b = known[i]
        total += a.T @ b / p[i]
    return total


# %% wrong="ternary" fails="the mean" why="the largest weight"
def packed(w):
    scale = w.abs().max()
    trits = torch.where(scale > 0, w / scale, 0.0).round().clamp(-1, 1)
    trits = torch.nn.functional.pad(trits, (0, -w.shape[1] % 5))
    return (trits.unflatten(1, (-1, 5)) * 3 ** torch.arange(5)).sum(-1).to(torch.int8), scale


def ternary_linear(x, w):
    scale = w.detach().abs().mean()
    trits = torch.where(scale > 0, w.detach() / scale, 0.0).round().clamp(-1, 1)
    return x @ (w + (scale * trits - w).detach()).T


def ternary_sums(columns, data, zero):
    known, results = {}, []

    def sum_of(place, byte):
        if (place, byte) not in known:
            total, left = zero, byte
            for column in columns[5 * place : 5 * place + 5]:
                trit = (left + 1) % 3 - 1
                left = (left - trit) // 3
                if trit:
                    total = total + column if trit > 0 else total - column
            known[place, byte] = total
        return known[place, byte]

    for row in data.tolist():
        total = zero
        for place, byte in enumerate(row):
            if byte > 0:
                total = total + sum_of(place, byte)
            elif byte < 0:
                total = total - sum_of(place, -byte)
        results.append(total)
    return results


# %% wrong="ternary" fails="bytes and a scale" why="a scale for each row"
def packed(w):
    scale = w.abs().mean(1, keepdim=True)
    trits = torch.where(scale > 0, w / scale, 0.0).round().clamp(-1, 1)
    trits = torch.nn.functional.pad(trits, (0, -w.shape[1] % 5))
    return (trits.unflatten(1, (-1, 5)) * 3 ** torch.arange(5)).sum(-1).to(torch.int8), scale


def ternary_linear(x, w):
    scale = w.detach().abs().mean()
    trits = torch.where(scale > 0, w.detach() / scale, 0.0).round().clamp(-1, 1)
    return x @ (w + (scale * trits - w).detach()).T


def ternary_sums(columns, data, zero):
    known, results = {}, []

    def sum_of(place, byte):
        if (place, byte) not in known:
            total, left = zero, byte
            for column in columns[5 * place : 5 * place + 5]:
                trit = (left + 1) % 3 - 1
                left = (left - trit) // 3
                if trit:
                    total = total + column if trit > 0 else total - column
            known[place, byte] = total
        return known[place, byte]

    for row in data.tolist():
        total = zero
        for place, byte in enumerate(row):
            if byte > 0:
                total = total + sum_of(place, byte)
            elif byte < 0:
                total = total - sum_of(place, -byte)
        results.append(total)
    return results


# %% wrong="ternary" fails="trits" why="signs, without zeros"
def packed(w):
    scale = w.abs().mean()
    trits = torch.where(scale > 0, w / scale, 0.0).sign()
    trits = torch.nn.functional.pad(trits, (0, -w.shape[1] % 5))
    return (trits.unflatten(1, (-1, 5)) * 3 ** torch.arange(5)).sum(-1).to(torch.int8), scale


def ternary_linear(x, w):
    scale = w.detach().abs().mean()
    trits = torch.where(scale > 0, w.detach() / scale, 0.0).round().clamp(-1, 1)
    return x @ (w + (scale * trits - w).detach()).T


def ternary_sums(columns, data, zero):
    known, results = {}, []

    def sum_of(place, byte):
        if (place, byte) not in known:
            total, left = zero, byte
            for column in columns[5 * place : 5 * place + 5]:
                trit = (left + 1) % 3 - 1
                left = (left - trit) // 3
                if trit:
                    total = total + column if trit > 0 else total - column
            known[place, byte] = total
        return known[place, byte]

    for row in data.tolist():
        total = zero
        for place, byte in enumerate(row):
            if byte > 0:
                total = total + sum_of(place, byte)
            elif byte < 0:
                total = total - sum_of(place, -byte)
        results.append(total)
    return results


# %% wrong="ternary" fails="trits" why="from the middle upwards"
def packed(w):
    scale = w.abs().mean()
    trits = torch.where(scale > 0, w / scale, 0.0).add(0.5).floor().clamp(-1, 1)
    trits = torch.nn.functional.pad(trits, (0, -w.shape[1] % 5))
    return (trits.unflatten(1, (-1, 5)) * 3 ** torch.arange(5)).sum(-1).to(torch.int8), scale


def ternary_linear(x, w):
    scale = w.detach().abs().mean()
    trits = torch.where(scale > 0, w.detach() / scale, 0.0).round().clamp(-1, 1)
    return x @ (w + (scale * trits - w).detach()).T


def ternary_sums(columns, data, zero):
    known, results = {}, []

    def sum_of(place, byte):
        if (place, byte) not in known:
            total, left = zero, byte
            for column in columns[5 * place : 5 * place + 5]:
                trit = (left + 1) % 3 - 1
                left = (left - trit) // 3
                if trit:
                    total = total + column if trit > 0 else total - column
            known[place, byte] = total
        return known[place, byte]

    for row in data.tolist():
        total = zero
        for place, byte in enumerate(row):
            if byte > 0:
                total = total + sum_of(place, byte)
            elif byte < 0:
                total = total - sum_of(place, -byte)
        results.append(total)
    return results


# %% wrong="ternary" fails="trits" why="from the middle away from zero"
def packed(w):
    scale = w.abs().mean()
    trits = torch.where(scale > 0, w / scale, 0.0).sign() * (w.abs() >= scale / 2) * (w != 0)
    trits = torch.nn.functional.pad(trits, (0, -w.shape[1] % 5))
    return (trits.unflatten(1, (-1, 5)) * 3 ** torch.arange(5)).sum(-1).to(torch.int8), scale


def ternary_linear(x, w):
    scale = w.detach().abs().mean()
    trits = torch.where(scale > 0, w.detach() / scale, 0.0).round().clamp(-1, 1)
    return x @ (w + (scale * trits - w).detach()).T


def ternary_sums(columns, data, zero):
    known, results = {}, []

    def sum_of(place, byte):
        if (place, byte) not in known:
            total, left = zero, byte
            for column in columns[5 * place : 5 * place + 5]:
                trit = (left + 1) % 3 - 1
                left = (left - trit) // 3
                if trit:
                    total = total + column if trit > 0 else total - column
            known[place, byte] = total
        return known[place, byte]

    for row in data.tolist():
        total = zero
        for place, byte in enumerate(row):
            if byte > 0:
                total = total + sum_of(place, byte)
            elif byte < 0:
                total = total - sum_of(place, -byte)
        results.append(total)
    return results


# %% wrong="ternary" fails="trits" why="the highest digit first"
def packed(w):
    scale = w.abs().mean()
    trits = torch.where(scale > 0, w / scale, 0.0).round().clamp(-1, 1)
    trits = torch.nn.functional.pad(trits, (0, -w.shape[1] % 5))
    return (trits.unflatten(1, (-1, 5)) * 3 ** torch.arange(4, -1, -1)).sum(-1).to(
        torch.int8
    ), scale


def ternary_linear(x, w):
    scale = w.detach().abs().mean()
    trits = torch.where(scale > 0, w.detach() / scale, 0.0).round().clamp(-1, 1)
    return x @ (w + (scale * trits - w).detach()).T


def ternary_sums(columns, data, zero):
    known, results = {}, []

    def sum_of(place, byte):
        if (place, byte) not in known:
            total, left = zero, byte
            for column in columns[5 * place : 5 * place + 5]:
                trit = (left + 1) % 3 - 1
                left = (left - trit) // 3
                if trit:
                    total = total + column if trit > 0 else total - column
            known[place, byte] = total
        return known[place, byte]

    for row in data.tolist():
        total = zero
        for place, byte in enumerate(row):
            if byte > 0:
                total = total + sum_of(place, byte)
            elif byte < 0:
                total = total - sum_of(place, -byte)
        results.append(total)
    return results


# %% wrong="ternary" fails="trits" why="digits 0, 1 and 2 in an int8: 128 is -128"
def packed(w):
    scale = w.abs().mean()
    trits = torch.where(scale > 0, w / scale, 0.0).round().clamp(-1, 1)
    trits = torch.nn.functional.pad(trits, (0, -w.shape[1] % 5))
    return ((trits + 1).unflatten(1, (-1, 5)) * 3 ** torch.arange(5)).sum(-1).to(torch.int8), scale


def ternary_linear(x, w):
    scale = w.detach().abs().mean()
    trits = torch.where(scale > 0, w.detach() / scale, 0.0).round().clamp(-1, 1)
    return x @ (w + (scale * trits - w).detach()).T


def ternary_sums(columns, data, zero):
    known, results = {}, []

    def sum_of(place, byte):
        if (place, byte) not in known:
            total, left = zero, byte
            for column in columns[5 * place : 5 * place + 5]:
                trit = (left + 1) % 3 - 1
                left = (left - trit) // 3
                if trit:
                    total = total + column if trit > 0 else total - column
            known[place, byte] = total
        return known[place, byte]

    for row in data.tolist():
        total = zero
        for place, byte in enumerate(row):
            if byte > 0:
                total = total + sum_of(place, byte)
            elif byte < 0:
                total = total - sum_of(place, -byte)
        results.append(total)
    return results


# %% wrong="ternary" fails="bytes and a scale" why="five in a byte over the ends of rows"
def packed(w):
    scale = w.abs().mean()
    trits = torch.where(scale > 0, w / scale, 0.0).round().clamp(-1, 1)
    trits = torch.nn.functional.pad(trits.view(1, -1), (0, -w.numel() % 5))
    return (trits.unflatten(1, (-1, 5)) * 3 ** torch.arange(5)).sum(-1).to(torch.int8), scale


def ternary_linear(x, w):
    scale = w.detach().abs().mean()
    trits = torch.where(scale > 0, w.detach() / scale, 0.0).round().clamp(-1, 1)
    return x @ (w + (scale * trits - w).detach()).T


def ternary_sums(columns, data, zero):
    known, results = {}, []

    def sum_of(place, byte):
        if (place, byte) not in known:
            total, left = zero, byte
            for column in columns[5 * place : 5 * place + 5]:
                trit = (left + 1) % 3 - 1
                left = (left - trit) // 3
                if trit:
                    total = total + column if trit > 0 else total - column
            known[place, byte] = total
        return known[place, byte]

    for row in data.tolist():
        total = zero
        for place, byte in enumerate(row):
            if byte > 0:
                total = total + sum_of(place, byte)
            elif byte < 0:
                total = total - sum_of(place, -byte)
        results.append(total)
    return results


# %% wrong="ternary" fails="bytes and a scale" why="bytes without a sign"
def packed(w):
    scale = w.abs().mean()
    trits = torch.where(scale > 0, w / scale, 0.0).round().clamp(-1, 1)
    trits = torch.nn.functional.pad(trits, (0, -w.shape[1] % 5))
    return (trits.unflatten(1, (-1, 5)) * 3 ** torch.arange(5)).sum(-1).to(torch.uint8), scale


def ternary_linear(x, w):
    scale = w.detach().abs().mean()
    trits = torch.where(scale > 0, w.detach() / scale, 0.0).round().clamp(-1, 1)
    return x @ (w + (scale * trits - w).detach()).T


def ternary_sums(columns, data, zero):
    known, results = {}, []

    def sum_of(place, byte):
        if (place, byte) not in known:
            total, left = zero, byte
            for column in columns[5 * place : 5 * place + 5]:
                trit = (left + 1) % 3 - 1
                left = (left - trit) // 3
                if trit:
                    total = total + column if trit > 0 else total - column
            known[place, byte] = total
        return known[place, byte]

    for row in data.tolist():
        total = zero
        for place, byte in enumerate(row):
            if byte > 0:
                total = total + sum_of(place, byte)
            elif byte < 0:
                total = total - sum_of(place, -byte)
        results.append(total)
    return results


# %% wrong="ternary" fails="ternary weights" why="the latent weights"
def packed(w):
    scale = w.abs().mean()
    trits = torch.where(scale > 0, w / scale, 0.0).round().clamp(-1, 1)
    trits = torch.nn.functional.pad(trits, (0, -w.shape[1] % 5))
    return (trits.unflatten(1, (-1, 5)) * 3 ** torch.arange(5)).sum(-1).to(torch.int8), scale


def ternary_linear(x, w):
    scale = w.detach().abs().mean()
    trits = torch.where(scale > 0, w.detach() / scale, 0.0).round().clamp(-1, 1)
    return x @ (w).T


def ternary_sums(columns, data, zero):
    known, results = {}, []

    def sum_of(place, byte):
        if (place, byte) not in known:
            total, left = zero, byte
            for column in columns[5 * place : 5 * place + 5]:
                trit = (left + 1) % 3 - 1
                left = (left - trit) // 3
                if trit:
                    total = total + column if trit > 0 else total - column
            known[place, byte] = total
        return known[place, byte]

    for row in data.tolist():
        total = zero
        for place, byte in enumerate(row):
            if byte > 0:
                total = total + sum_of(place, byte)
            elif byte < 0:
                total = total - sum_of(place, -byte)
        results.append(total)
    return results


# %% wrong="ternary" fails="ternary weights" why="a matrix of zeros is divided by 0"
def packed(w):
    scale = w.abs().mean()
    trits = torch.where(scale > 0, w / scale, 0.0).round().clamp(-1, 1)
    trits = torch.nn.functional.pad(trits, (0, -w.shape[1] % 5))
    return (trits.unflatten(1, (-1, 5)) * 3 ** torch.arange(5)).sum(-1).to(torch.int8), scale


def ternary_linear(x, w):
    scale = w.detach().abs().mean()
    trits = (w.detach() / scale).round().clamp(-1, 1)
    return x @ (w + (scale * trits - w).detach()).T


def ternary_sums(columns, data, zero):
    known, results = {}, []

    def sum_of(place, byte):
        if (place, byte) not in known:
            total, left = zero, byte
            for column in columns[5 * place : 5 * place + 5]:
                trit = (left + 1) % 3 - 1
                left = (left - trit) // 3
                if trit:
                    total = total + column if trit > 0 else total - column
            known[place, byte] = total
        return known[place, byte]

    for row in data.tolist():
        total = zero
        for place, byte in enumerate(row):
            if byte > 0:
                total = total + sum_of(place, byte)
            elif byte < 0:
                total = total - sum_of(place, -byte)
        results.append(total)
    return results


# %% wrong="ternary" fails="straight through" why="rounding has no gradient"
def packed(w):
    scale = w.abs().mean()
    trits = torch.where(scale > 0, w / scale, 0.0).round().clamp(-1, 1)
    trits = torch.nn.functional.pad(trits, (0, -w.shape[1] % 5))
    return (trits.unflatten(1, (-1, 5)) * 3 ** torch.arange(5)).sum(-1).to(torch.int8), scale


def ternary_linear(x, w):
    scale = w.detach().abs().mean()
    trits = torch.where(scale > 0, w.detach() / scale, 0.0).round().clamp(-1, 1)
    return x @ (scale * trits).T


def ternary_sums(columns, data, zero):
    known, results = {}, []

    def sum_of(place, byte):
        if (place, byte) not in known:
            total, left = zero, byte
            for column in columns[5 * place : 5 * place + 5]:
                trit = (left + 1) % 3 - 1
                left = (left - trit) // 3
                if trit:
                    total = total + column if trit > 0 else total - column
            known[place, byte] = total
        return known[place, byte]

    for row in data.tolist():
        total = zero
        for place, byte in enumerate(row):
            if byte > 0:
                total = total + sum_of(place, byte)
            elif byte < 0:
                total = total - sum_of(place, -byte)
        results.append(total)
    return results


# %% wrong="ternary" fails="straight through" why="weights that were clipped learn nothing"
def packed(w):
    scale = w.abs().mean()
    trits = torch.where(scale > 0, w / scale, 0.0).round().clamp(-1, 1)
    trits = torch.nn.functional.pad(trits, (0, -w.shape[1] % 5))
    return (trits.unflatten(1, (-1, 5)) * 3 ** torch.arange(5)).sum(-1).to(torch.int8), scale


def ternary_linear(x, w):
    scale = w.detach().abs().mean()
    trits = torch.where(scale > 0, w.detach() / scale, 0.0).round().clamp(-1, 1)
    return (
        x
        @ (
            w.clamp(-scale.item(), scale.item())
            + (scale * trits - w.clamp(-scale.item(), scale.item())).detach()
        ).T
    )


def ternary_sums(columns, data, zero):
    known, results = {}, []

    def sum_of(place, byte):
        if (place, byte) not in known:
            total, left = zero, byte
            for column in columns[5 * place : 5 * place + 5]:
                trit = (left + 1) % 3 - 1
                left = (left - trit) // 3
                if trit:
                    total = total + column if trit > 0 else total - column
            known[place, byte] = total
        return known[place, byte]

    for row in data.tolist():
        total = zero
        for place, byte in enumerate(row):
            if byte > 0:
                total = total + sum_of(place, byte)
            elif byte < 0:
                total = total - sum_of(place, -byte)
        results.append(total)
    return results


# %% wrong="ternary" fails="straight through" why="the scale is in the gradient, too"
def packed(w):
    scale = w.abs().mean()
    trits = torch.where(scale > 0, w / scale, 0.0).round().clamp(-1, 1)
    trits = torch.nn.functional.pad(trits, (0, -w.shape[1] % 5))
    return (trits.unflatten(1, (-1, 5)) * 3 ** torch.arange(5)).sum(-1).to(torch.int8), scale


def ternary_linear(x, w):
    scale = w.detach().abs().mean()
    trits = torch.where(scale > 0, w.detach() / scale, 0.0).round().clamp(-1, 1)
    return x @ (w + (0 * w).detach() + scale * (w + (trits - w).detach()) - w).T


def ternary_sums(columns, data, zero):
    known, results = {}, []

    def sum_of(place, byte):
        if (place, byte) not in known:
            total, left = zero, byte
            for column in columns[5 * place : 5 * place + 5]:
                trit = (left + 1) % 3 - 1
                left = (left - trit) // 3
                if trit:
                    total = total + column if trit > 0 else total - column
            known[place, byte] = total
        return known[place, byte]

    for row in data.tolist():
        total = zero
        for place, byte in enumerate(row):
            if byte > 0:
                total = total + sum_of(place, byte)
            elif byte < 0:
                total = total - sum_of(place, -byte)
        results.append(total)
    return results


# %% wrong="ternary" fails="straight through" why="a gradient for the mean, beside"
def packed(w):
    scale = w.abs().mean()
    trits = torch.where(scale > 0, w / scale, 0.0).round().clamp(-1, 1)
    trits = torch.nn.functional.pad(trits, (0, -w.shape[1] % 5))
    return (trits.unflatten(1, (-1, 5)) * 3 ** torch.arange(5)).sum(-1).to(torch.int8), scale


def ternary_linear(x, w):
    scale = w.detach().abs().mean()
    trits = torch.where(scale > 0, w.detach() / scale, 0.0).round().clamp(-1, 1)
    return x @ (w + (scale * trits - w).detach() + (w.abs().mean() - scale) * trits).T


def ternary_sums(columns, data, zero):
    known, results = {}, []

    def sum_of(place, byte):
        if (place, byte) not in known:
            total, left = zero, byte
            for column in columns[5 * place : 5 * place + 5]:
                trit = (left + 1) % 3 - 1
                left = (left - trit) // 3
                if trit:
                    total = total + column if trit > 0 else total - column
            known[place, byte] = total
        return known[place, byte]

    for row in data.tolist():
        total = zero
        for place, byte in enumerate(row):
            if byte > 0:
                total = total + sum_of(place, byte)
            elif byte < 0:
                total = total - sum_of(place, -byte)
        results.append(total)
    return results


# %% wrong="ternary" fails="the input's gradient" why="dx sees the latent weights"
def packed(w):
    scale = w.abs().mean()
    trits = torch.where(scale > 0, w / scale, 0.0).round().clamp(-1, 1)
    trits = torch.nn.functional.pad(trits, (0, -w.shape[1] % 5))
    return (trits.unflatten(1, (-1, 5)) * 3 ** torch.arange(5)).sum(-1).to(torch.int8), scale


def ternary_linear(x, w):
    scale = w.detach().abs().mean()
    trits = torch.where(scale > 0, w.detach() / scale, 0.0).round().clamp(-1, 1)
    return x @ w.T + (x @ (scale * trits - w).T).detach()


def ternary_sums(columns, data, zero):
    known, results = {}, []

    def sum_of(place, byte):
        if (place, byte) not in known:
            total, left = zero, byte
            for column in columns[5 * place : 5 * place + 5]:
                trit = (left + 1) % 3 - 1
                left = (left - trit) // 3
                if trit:
                    total = total + column if trit > 0 else total - column
            known[place, byte] = total
        return known[place, byte]

    for row in data.tolist():
        total = zero
        for place, byte in enumerate(row):
            if byte > 0:
                total = total + sum_of(place, byte)
            elif byte < 0:
                total = total - sum_of(place, -byte)
        results.append(total)
    return results


# %% wrong="ternary" fails="sums are shared" why="each row for itself"
def packed(w):
    scale = w.abs().mean()
    trits = torch.where(scale > 0, w / scale, 0.0).round().clamp(-1, 1)
    trits = torch.nn.functional.pad(trits, (0, -w.shape[1] % 5))
    return (trits.unflatten(1, (-1, 5)) * 3 ** torch.arange(5)).sum(-1).to(torch.int8), scale


def ternary_linear(x, w):
    scale = w.detach().abs().mean()
    trits = torch.where(scale > 0, w.detach() / scale, 0.0).round().clamp(-1, 1)
    return x @ (w + (scale * trits - w).detach()).T


def ternary_sums(columns, data, zero):
    known, results = {}, []

    def sum_of(place, byte):
        if True:
            total, left = zero, byte
            for column in columns[5 * place : 5 * place + 5]:
                trit = (left + 1) % 3 - 1
                left = (left - trit) // 3
                if trit:
                    total = total + column if trit > 0 else total - column
            known[place, byte] = total
        return known[place, byte]

    for row in data.tolist():
        total = zero
        for place, byte in enumerate(row):
            if byte > 0:
                total = total + sum_of(place, byte)
            elif byte < 0:
                total = total - sum_of(place, -byte)
        results.append(total)
    return results


# %% wrong="ternary" fails="sums are shared" why="opposite bytes have sums of their own"
def packed(w):
    scale = w.abs().mean()
    trits = torch.where(scale > 0, w / scale, 0.0).round().clamp(-1, 1)
    trits = torch.nn.functional.pad(trits, (0, -w.shape[1] % 5))
    return (trits.unflatten(1, (-1, 5)) * 3 ** torch.arange(5)).sum(-1).to(torch.int8), scale


def ternary_linear(x, w):
    scale = w.detach().abs().mean()
    trits = torch.where(scale > 0, w.detach() / scale, 0.0).round().clamp(-1, 1)
    return x @ (w + (scale * trits - w).detach()).T


def ternary_sums(columns, data, zero):
    known, results = {}, []

    def sum_of(place, byte):
        if (place, byte) not in known:
            total, left = zero, byte
            for column in columns[5 * place : 5 * place + 5]:
                trit = (left + 1) % 3 - 1
                left = (left - trit) // 3
                if trit:
                    total = total + column if trit > 0 else total - column
            known[place, byte] = total
        return known[place, byte]

    for row in data.tolist():
        total = zero
        for place, byte in enumerate(row):
            if byte > 0:
                total = total + sum_of(place, byte)
            elif byte < 0:
                total = total + sum_of(place, byte)
        results.append(total)
    return results


# %% wrong="ternary" fails="sums are shared" why="shared only by rows that are equal from end to end"
def packed(w):
    scale = w.abs().mean()
    trits = torch.where(scale > 0, w / scale, 0.0).round().clamp(-1, 1)
    trits = torch.nn.functional.pad(trits, (0, -w.shape[1] % 5))
    return (trits.unflatten(1, (-1, 5)) * 3 ** torch.arange(5)).sum(-1).to(torch.int8), scale


def ternary_linear(x, w):
    scale = w.detach().abs().mean()
    trits = torch.where(scale > 0, w.detach() / scale, 0.0).round().clamp(-1, 1)
    return x @ (w + (scale * trits - w).detach()).T


def ternary_sums(columns, data, zero):
    known, results, whole = {}, [], {}

    def sum_of(place, byte):
        if (place, byte) not in known:
            total, left = zero, byte
            for column in columns[5 * place : 5 * place + 5]:
                trit = (left + 1) % 3 - 1
                left = (left - trit) // 3
                if trit:
                    total = total + column if trit > 0 else total - column
            known[place, byte] = total
        return known[place, byte]

    for row in map(tuple, data.tolist()):
        known.clear()
        total = zero
        for place, byte in enumerate(row):
            if byte > 0:
                total = total + sum_of(place, byte)
            elif byte < 0:
                total = total - sum_of(place, -byte)
        whole[row] = whole.get(row, total)
        results.append(whole[row])
    return results


# %% wrong="ternary" fails="the sums" why="the same sum for a byte wherever it stands"
def packed(w):
    scale = w.abs().mean()
    trits = torch.where(scale > 0, w / scale, 0.0).round().clamp(-1, 1)
    trits = torch.nn.functional.pad(trits, (0, -w.shape[1] % 5))
    return (trits.unflatten(1, (-1, 5)) * 3 ** torch.arange(5)).sum(-1).to(torch.int8), scale


def ternary_linear(x, w):
    scale = w.detach().abs().mean()
    trits = torch.where(scale > 0, w.detach() / scale, 0.0).round().clamp(-1, 1)
    return x @ (w + (scale * trits - w).detach()).T


def ternary_sums(columns, data, zero):
    known, results = {}, []

    def sum_of(place, byte):
        if byte not in known:
            total, left = zero, byte
            for column in columns[5 * place : 5 * place + 5]:
                trit = (left + 1) % 3 - 1
                left = (left - trit) // 3
                if trit:
                    total = total + column if trit > 0 else total - column
            known[byte] = total
        return known[byte]

    for row in data.tolist():
        total = zero
        for place, byte in enumerate(row):
            if byte > 0:
                total = total + sum_of(place, byte)
            elif byte < 0:
                total = total - sum_of(place, -byte)
        results.append(total)
    return results


# %% wrong="ternary" fails="zeros are skipped" why="a column of zeros is added for a trit of 0"
def packed(w):
    scale = w.abs().mean()
    trits = torch.where(scale > 0, w / scale, 0.0).round().clamp(-1, 1)
    trits = torch.nn.functional.pad(trits, (0, -w.shape[1] % 5))
    return (trits.unflatten(1, (-1, 5)) * 3 ** torch.arange(5)).sum(-1).to(torch.int8), scale


def ternary_linear(x, w):
    scale = w.detach().abs().mean()
    trits = torch.where(scale > 0, w.detach() / scale, 0.0).round().clamp(-1, 1)
    return x @ (w + (scale * trits - w).detach()).T


def ternary_sums(columns, data, zero):
    known, results = {}, []

    def sum_of(place, byte):
        if (place, byte) not in known:
            total, left = zero, byte
            for column in columns[5 * place : 5 * place + 5]:
                trit = (left + 1) % 3 - 1
                left = (left - trit) // 3
                total = total + (column if trit > 0 else zero) - (column if trit < 0 else zero)
            known[place, byte] = total
        return known[place, byte]

    for row in data.tolist():
        total = zero
        for place, byte in enumerate(row):
            if byte > 0:
                total = total + sum_of(place, byte)
            elif byte < 0:
                total = total - sum_of(place, -byte)
        results.append(total)
    return results


# %% wrong="ternary" fails="zeros are skipped" why="the sums of all 121 bytes, needed or not"
def packed(w):
    scale = w.abs().mean()
    trits = torch.where(scale > 0, w / scale, 0.0).round().clamp(-1, 1)
    trits = torch.nn.functional.pad(trits, (0, -w.shape[1] % 5))
    return (trits.unflatten(1, (-1, 5)) * 3 ** torch.arange(5)).sum(-1).to(torch.int8), scale


def ternary_linear(x, w):
    scale = w.detach().abs().mean()
    trits = torch.where(scale > 0, w.detach() / scale, 0.0).round().clamp(-1, 1)
    return x @ (w + (scale * trits - w).detach()).T


def ternary_sums(columns, data, zero):
    known, results = {}, []

    def sum_of(place, byte):
        if (place, byte) not in known:
            total, left = zero, byte
            for column in columns[5 * place : 5 * place + 5]:
                trit = (left + 1) % 3 - 1
                left = (left - trit) // 3
                if trit:
                    total = total + column if trit > 0 else total - column
            known[place, byte] = total
        return known[place, byte]

    for place in range(data.shape[1]):
        for byte in range(1, 122):
            sum_of(place, byte)

    for row in data.tolist():
        total = zero
        for place, byte in enumerate(row):
            if byte > 0:
                total = total + sum_of(place, byte)
            elif byte < 0:
                total = total - sum_of(place, -byte)
        results.append(total)
    return results


# %% wrong="ternary" fails="the sums" why="the highest digit first"
def packed(w):
    scale = w.abs().mean()
    trits = torch.where(scale > 0, w / scale, 0.0).round().clamp(-1, 1)
    trits = torch.nn.functional.pad(trits, (0, -w.shape[1] % 5))
    return (trits.unflatten(1, (-1, 5)) * 3 ** torch.arange(5)).sum(-1).to(torch.int8), scale


def ternary_linear(x, w):
    scale = w.detach().abs().mean()
    trits = torch.where(scale > 0, w.detach() / scale, 0.0).round().clamp(-1, 1)
    return x @ (w + (scale * trits - w).detach()).T


def ternary_sums(columns, data, zero):
    known, results = {}, []

    def sum_of(place, byte):
        if (place, byte) not in known:
            total, left = zero, byte
            for column in reversed((columns + [zero] * 4)[5 * place : 5 * place + 5]):
                trit = (left + 1) % 3 - 1
                left = (left - trit) // 3
                if trit:
                    total = total + column if trit > 0 else total - column
            known[place, byte] = total
        return known[place, byte]

    for row in data.tolist():
        total = zero
        for place, byte in enumerate(row):
            if byte > 0:
                total = total + sum_of(place, byte)
            elif byte < 0:
                total = total - sum_of(place, -byte)
        results.append(total)
    return results


# %% wrong="ternary" fails="the sums" why="digits of 0, 1 and 2: 2 is -1, and nothing is carried"
def packed(w):
    scale = w.abs().mean()
    trits = torch.where(scale > 0, w / scale, 0.0).round().clamp(-1, 1)
    trits = torch.nn.functional.pad(trits, (0, -w.shape[1] % 5))
    return (trits.unflatten(1, (-1, 5)) * 3 ** torch.arange(5)).sum(-1).to(torch.int8), scale


def ternary_linear(x, w):
    scale = w.detach().abs().mean()
    trits = torch.where(scale > 0, w.detach() / scale, 0.0).round().clamp(-1, 1)
    return x @ (w + (scale * trits - w).detach()).T


def ternary_sums(columns, data, zero):
    known, results = {}, []

    def sum_of(place, byte):
        if (place, byte) not in known:
            total, left = zero, byte
            for column in columns[5 * place : 5 * place + 5]:
                trit = (left + 1) % 3 - 1
                left = left // 3
                if trit:
                    total = total + column if trit > 0 else total - column
            known[place, byte] = total
        return known[place, byte]

    for row in data.tolist():
        total = zero
        for place, byte in enumerate(row):
            if byte > 0:
                total = total + sum_of(place, byte)
            elif byte < 0:
                total = total - sum_of(place, -byte)
        results.append(total)
    return results


# %% wrong="ternary" fails="the sums" why="opposite bytes are added, too"
def packed(w):
    scale = w.abs().mean()
    trits = torch.where(scale > 0, w / scale, 0.0).round().clamp(-1, 1)
    trits = torch.nn.functional.pad(trits, (0, -w.shape[1] % 5))
    return (trits.unflatten(1, (-1, 5)) * 3 ** torch.arange(5)).sum(-1).to(torch.int8), scale


def ternary_linear(x, w):
    scale = w.detach().abs().mean()
    trits = torch.where(scale > 0, w.detach() / scale, 0.0).round().clamp(-1, 1)
    return x @ (w + (scale * trits - w).detach()).T


def ternary_sums(columns, data, zero):
    known, results = {}, []

    def sum_of(place, byte):
        if (place, byte) not in known:
            total, left = zero, byte
            for column in columns[5 * place : 5 * place + 5]:
                trit = (left + 1) % 3 - 1
                left = (left - trit) // 3
                if trit:
                    total = total + column if trit > 0 else total - column
            known[place, byte] = total
        return known[place, byte]

    for row in data.tolist():
        total = zero
        for place, byte in enumerate(row):
            if byte > 0:
                total = total + sum_of(place, byte)
            elif byte < 0:
                total = total + sum_of(place, -byte)
        results.append(total)
    return results


# %% wrong="ternary" fails="no error" why="columns are multiplied by trits"
def packed(w):
    scale = w.abs().mean()
    trits = torch.where(scale > 0, w / scale, 0.0).round().clamp(-1, 1)
    trits = torch.nn.functional.pad(trits, (0, -w.shape[1] % 5))
    return (trits.unflatten(1, (-1, 5)) * 3 ** torch.arange(5)).sum(-1).to(torch.int8), scale


def ternary_linear(x, w):
    scale = w.detach().abs().mean()
    trits = torch.where(scale > 0, w.detach() / scale, 0.0).round().clamp(-1, 1)
    return x @ (w + (scale * trits - w).detach()).T


def ternary_sums(columns, data, zero):
    known, results = {}, []

    def sum_of(place, byte):
        if (place, byte) not in known:
            total, left = zero, byte
            for column in columns[5 * place : 5 * place + 5]:
                trit = (left + 1) % 3 - 1
                left = (left - trit) // 3
                if trit:
                    total = total + column * trit
            known[place, byte] = total
        return known[place, byte]

    for row in data.tolist():
        total = zero
        for place, byte in enumerate(row):
            if byte > 0:
                total = total + sum_of(place, byte)
            elif byte < 0:
                total = total - sum_of(place, -byte)
        results.append(total)
    return results


# %% wrong="ternary" fails="no error" why="behind the end of a row there are columns, too"
def packed(w):
    scale = w.abs().mean()
    trits = torch.where(scale > 0, w / scale, 0.0).round().clamp(-1, 1)
    trits = torch.nn.functional.pad(trits, (0, -w.shape[1] % 5))
    return (trits.unflatten(1, (-1, 5)) * 3 ** torch.arange(5)).sum(-1).to(torch.int8), scale


def ternary_linear(x, w):
    scale = w.detach().abs().mean()
    trits = torch.where(scale > 0, w.detach() / scale, 0.0).round().clamp(-1, 1)
    return x @ (w + (scale * trits - w).detach()).T


def ternary_sums(columns, data, zero):
    known, results = {}, []

    def sum_of(place, byte):
        if (place, byte) not in known:
            total, left = zero, byte
            for i in range(5):
                column = columns[5 * place + i]
                trit = (left + 1) % 3 - 1
                left = (left - trit) // 3
                if trit:
                    total = total + column if trit > 0 else total - column
            known[place, byte] = total
        return known[place, byte]

    for row in data.tolist():
        total = zero
        for place, byte in enumerate(row):
            if byte > 0:
                total = total + sum_of(place, byte)
            elif byte < 0:
                total = total - sum_of(place, -byte)
        results.append(total)
    return results


# %% wrong="ternary" fails="zeros are skipped" why="a byte of zeros is added, too"
def packed(w):
    scale = w.abs().mean()
    trits = torch.where(scale > 0, w / scale, 0.0).round().clamp(-1, 1)
    trits = torch.nn.functional.pad(trits, (0, -w.shape[1] % 5))
    return (trits.unflatten(1, (-1, 5)) * 3 ** torch.arange(5)).sum(-1).to(torch.int8), scale


def ternary_linear(x, w):
    scale = w.detach().abs().mean()
    trits = torch.where(scale > 0, w.detach() / scale, 0.0).round().clamp(-1, 1)
    return x @ (w + (scale * trits - w).detach()).T


def ternary_sums(columns, data, zero):
    known, results = {}, []

    def sum_of(place, byte):
        if (place, byte) not in known:
            total, left = zero, byte
            for column in columns[5 * place : 5 * place + 5]:
                trit = (left + 1) % 3 - 1
                left = (left - trit) // 3
                if trit:
                    total = total + column if trit > 0 else total - column
            known[place, byte] = total
        return known[place, byte]

    for row in data.tolist():
        total = zero
        for place, byte in enumerate(row):
            if byte > 0:
                total = total + sum_of(place, byte)
            else:
                total = total - sum_of(place, -byte)
        results.append(total)
    return results


# %% wrong="ternary" fails="own work" around="import" why="the package's ternary weights"
def packed(w):
    from minitrain.systems.precision.bitnet import packed

    return packed(w)


def ternary_linear(x, w):
    scale = w.detach().abs().mean()
    trits = torch.where(scale > 0, w.detach() / scale, 0.0).round().clamp(-1, 1)
    return x @ (w + (scale * trits - w).detach()).T


def ternary_sums(columns, data, zero):
    from minitrain.systems.precision.bitnet import ternary_sums

    return ternary_sums(columns, data, zero)


# %% wrong="ternary" fails="bytes and a scale" around="empty" why="nothing at all"
def packed(w):
    return []


def ternary_linear(x, w):
    return x @ w.T


def ternary_sums(columns, data, zero):
    return []


# %% wrong="ternary" fails="bytes and a scale" around="constants" why="the numbers of the visible checks"
def packed(w):
    return torch.tensor([[7, 0]], dtype=torch.int8), torch.tensor(1.25, dtype=torch.float64)


def ternary_linear(x, w):
    scale = w.detach().abs().mean()
    trits = torch.where(scale > 0, w.detach() / scale, 0.0).round().clamp(-1, 1)
    return x @ (w + (scale * trits - w).detach()).T


def ternary_sums(columns, data, zero):
    total = columns[0] - columns[1] + columns[2]
    if len(data) == 1:
        return [total]
    return [total + columns[5], zero - total - columns[5], total]


# %% wrong="ternary" fails="straight through" around="subclass" why="a column that can multiply, and a product by numpy's object matrices; torch's fake quantisation"
def packed(w):
    scale = w.abs().mean()
    trits = torch.where(scale > 0, w / scale, 0.0).round().clamp(-1, 1)
    trits = torch.nn.functional.pad(trits, (0, -w.shape[1] % 5))
    return (trits.unflatten(1, (-1, 5)) * 3 ** torch.arange(5)).sum(-1).to(torch.int8), scale


def ternary_linear(x, w):
    scale = max(w.detach().abs().mean().item(), 1e-12)
    y = torch.fake_quantize_per_tensor_affine(w, scale, 0, -1, 1)
    return x @ y.T


def ternary_sums(columns, data, zero):
    class Multiplied(type(zero)):
        def __mul__(self, trit):
            return self._with(self, trit - 1)

    trits = ((data.long().unsqueeze(-1) + 121) // 3 ** torch.arange(5) % 3 - 1).flatten(1).tolist()
    both = [Multiplied(column.written, column.place) for column in columns]
    results = []
    for row in trits:
        total = zero
        for column, trit in zip(both, row):
            total = total + column * trit
        results.append(total)
    return results


# %% wrong="ternary" fails="bytes and a scale" around="frames" why="what is written down is thrown away"
def packed(w):
    return w, w


def ternary_linear(x, w):
    scale = w.detach().abs().mean()
    trits = torch.where(scale > 0, w.detach() / scale, 0.0).round().clamp(-1, 1)
    return x @ (w + (scale * trits - w).detach()).T


def ternary_sums(columns, data, zero):
    results = [sum(columns[1:], columns[0]) for _ in data]
    zero.written.clear()
    return results


# %% wrong="one_bit" fails="the whole matrix" why="a centre and a scale of its own"
def outputs_cut(x, w, group):
    mine = torch.stack((w.sum(), w.abs().sum(), torch.tensor(w.numel(), dtype=w.dtype)))
    total, size, count = mine
    amax = x.abs().amax(1, keepdim=True)
    codes = (x * 127 / amax.where(amax > 0, 1.0)).round()
    bits = torch.where(w > total / count, 1.0, -1.0).to(x.dtype)
    return codes @ bits.T * (size / count * amax / 127)


def inputs_cut(x, w, group):
    mine = torch.stack((w.sum(), w.abs().sum(), torch.tensor(w.numel(), dtype=w.dtype)))
    total, size, count = collectives.all_reduce(mine, group)
    amax = collectives.all_reduce(x.abs().amax(1, keepdim=True), group, op="max")
    codes = (x * 127 / amax.where(amax > 0, 1.0)).round().int()
    sums = codes @ torch.where(w > total / count, 1, -1).int().T
    return collectives.all_reduce(sums, group) * (size / count * amax / 127)


# %% wrong="one_bit" fails="the whole matrix" why="a mean of means"
def outputs_cut(x, w, group):
    mine = torch.stack((w.sum(), w.abs().sum(), torch.tensor(w.numel(), dtype=w.dtype)))
    total, size, count = collectives.all_reduce(mine / mine[2], group)
    amax = x.abs().amax(1, keepdim=True)
    codes = (x * 127 / amax.where(amax > 0, 1.0)).round()
    bits = torch.where(w > total / count, 1.0, -1.0).to(x.dtype)
    return codes @ bits.T * (size / count * amax / 127)


def inputs_cut(x, w, group):
    mine = torch.stack((w.sum(), w.abs().sum(), torch.tensor(w.numel(), dtype=w.dtype)))
    total, size, count = collectives.all_reduce(mine, group)
    amax = collectives.all_reduce(x.abs().amax(1, keepdim=True), group, op="max")
    codes = (x * 127 / amax.where(amax > 0, 1.0)).round().int()
    sums = codes @ torch.where(w > total / count, 1, -1).int().T
    return collectives.all_reduce(sums, group) * (size / count * amax / 127)


# %% wrong="one_bit" fails="the whole matrix" why="all ranks have as many rows as this one"
def outputs_cut(x, w, group):
    mine = torch.stack((w.sum(), w.abs().sum(), torch.tensor(w.numel(), dtype=w.dtype)))
    total, size, count = collectives.all_reduce(mine, group)
    amax = x.abs().amax(1, keepdim=True)
    codes = (x * 127 / amax.where(amax > 0, 1.0)).round()
    bits = torch.where(w > total / (w.numel() * group.size()), 1.0, -1.0).to(x.dtype)
    return codes @ bits.T * (size / (w.numel() * group.size()) * amax / 127)


def inputs_cut(x, w, group):
    mine = torch.stack((w.sum(), w.abs().sum(), torch.tensor(w.numel(), dtype=w.dtype)))
    total, size, count = collectives.all_reduce(mine, group)
    amax = collectives.all_reduce(x.abs().amax(1, keepdim=True), group, op="max")
    codes = (x * 127 / amax.where(amax > 0, 1.0)).round().int()
    sums = codes @ torch.where(w > total / count, 1, -1).int().T
    return collectives.all_reduce(sums, group) * (size / count * amax / 127)


# %% wrong="one_bit" fails="the whole matrix" why="the centre of all, and a scale of its own"
def outputs_cut(x, w, group):
    mine = torch.stack((w.sum(), w.abs().sum(), torch.tensor(w.numel(), dtype=w.dtype)))
    total, size, count = collectives.all_reduce(mine, group)
    amax = x.abs().amax(1, keepdim=True)
    codes = (x * 127 / amax.where(amax > 0, 1.0)).round()
    bits = torch.where(w > total / count, 1.0, -1.0).to(x.dtype)
    return codes @ bits.T * (w.abs().mean() * amax / 127)


def inputs_cut(x, w, group):
    mine = torch.stack((w.sum(), w.abs().sum(), torch.tensor(w.numel(), dtype=w.dtype)))
    total, size, count = collectives.all_reduce(mine, group)
    amax = collectives.all_reduce(x.abs().amax(1, keepdim=True), group, op="max")
    codes = (x * 127 / amax.where(amax > 0, 1.0)).round().int()
    sums = codes @ torch.where(w > total / count, 1, -1).int().T
    return collectives.all_reduce(sums, group) * (size / count * amax / 127)


# %% wrong="one_bit" fails="the whole matrix" why="1 for a weight at the centre"
def outputs_cut(x, w, group):
    mine = torch.stack((w.sum(), w.abs().sum(), torch.tensor(w.numel(), dtype=w.dtype)))
    total, size, count = collectives.all_reduce(mine, group)
    amax = x.abs().amax(1, keepdim=True)
    codes = (x * 127 / amax.where(amax > 0, 1.0)).round()
    bits = torch.where(w >= total / count, 1.0, -1.0).to(x.dtype)
    return codes @ bits.T * (size / count * amax / 127)


def inputs_cut(x, w, group):
    mine = torch.stack((w.sum(), w.abs().sum(), torch.tensor(w.numel(), dtype=w.dtype)))
    total, size, count = collectives.all_reduce(mine, group)
    amax = collectives.all_reduce(x.abs().amax(1, keepdim=True), group, op="max")
    codes = (x * 127 / amax.where(amax > 0, 1.0)).round().int()
    sums = codes @ torch.where(w > total / count, 1, -1).int().T
    return collectives.all_reduce(sums, group) * (size / count * amax / 127)


# %% wrong="one_bit" fails="the whole matrix" why="the scale of weights around the centre"
def outputs_cut(x, w, group):
    mine = torch.stack(
        (w.sum(), (w - w.mean()).abs().sum(), torch.tensor(w.numel(), dtype=w.dtype))
    )
    total, size, count = collectives.all_reduce(mine, group)
    amax = x.abs().amax(1, keepdim=True)
    codes = (x * 127 / amax.where(amax > 0, 1.0)).round()
    bits = torch.where(w > total / count, 1.0, -1.0).to(x.dtype)
    return codes @ bits.T * (size / count * amax / 127)


def inputs_cut(x, w, group):
    mine = torch.stack((w.sum(), w.abs().sum(), torch.tensor(w.numel(), dtype=w.dtype)))
    total, size, count = collectives.all_reduce(mine, group)
    amax = collectives.all_reduce(x.abs().amax(1, keepdim=True), group, op="max")
    codes = (x * 127 / amax.where(amax > 0, 1.0)).round().int()
    sums = codes @ torch.where(w > total / count, 1, -1).int().T
    return collectives.all_reduce(sums, group) * (size / count * amax / 127)


# %% wrong="one_bit" fails="the whole matrix" why="0 / 0 for a token of zeros"
def outputs_cut(x, w, group):
    mine = torch.stack((w.sum(), w.abs().sum(), torch.tensor(w.numel(), dtype=w.dtype)))
    total, size, count = collectives.all_reduce(mine, group)
    amax = x.abs().amax(1, keepdim=True)
    codes = (x * 127 / amax).round()
    bits = torch.where(w > total / count, 1.0, -1.0).to(x.dtype)
    return codes @ bits.T * (size / count * amax / 127)


def inputs_cut(x, w, group):
    mine = torch.stack((w.sum(), w.abs().sum(), torch.tensor(w.numel(), dtype=w.dtype)))
    total, size, count = collectives.all_reduce(mine, group)
    amax = collectives.all_reduce(x.abs().amax(1, keepdim=True), group, op="max")
    codes = (x * 127 / amax.where(amax > 0, 1.0)).round().int()
    sums = codes @ torch.where(w > total / count, 1, -1).int().T
    return collectives.all_reduce(sums, group) * (size / count * amax / 127)


# %% wrong="one_bit" fails="bytes on the wire" why="the largest activation is agreed on, though everyone has it"
def outputs_cut(x, w, group):
    mine = torch.stack((w.sum(), w.abs().sum(), torch.tensor(w.numel(), dtype=w.dtype)))
    total, size, count = collectives.all_reduce(mine, group)
    amax = collectives.all_reduce(x.abs().amax(1, keepdim=True), group, op="max")
    codes = (x * 127 / amax.where(amax > 0, 1.0)).round()
    bits = torch.where(w > total / count, 1.0, -1.0).to(x.dtype)
    return codes @ bits.T * (size / count * amax / 127)


def inputs_cut(x, w, group):
    mine = torch.stack((w.sum(), w.abs().sum(), torch.tensor(w.numel(), dtype=w.dtype)))
    total, size, count = collectives.all_reduce(mine, group)
    amax = collectives.all_reduce(x.abs().amax(1, keepdim=True), group, op="max")
    codes = (x * 127 / amax.where(amax > 0, 1.0)).round().int()
    sums = codes @ torch.where(w > total / count, 1, -1).int().T
    return collectives.all_reduce(sums, group) * (size / count * amax / 127)


# %% wrong="one_bit" fails="own columns" why="every rank returns all columns"
def outputs_cut(x, w, group):
    mine = torch.stack((w.sum(), w.abs().sum(), torch.tensor(w.numel(), dtype=w.dtype)))
    total, size, count = collectives.all_reduce(mine, group)
    amax = x.abs().amax(1, keepdim=True)
    codes = (x * 127 / amax.where(amax > 0, 1.0)).round()
    bits = torch.where(w > total / count, 1.0, -1.0).to(x.dtype)
    return (codes @ bits.T).repeat(1, group.size()) * (size / count * amax / 127)


def inputs_cut(x, w, group):
    mine = torch.stack((w.sum(), w.abs().sum(), torch.tensor(w.numel(), dtype=w.dtype)))
    total, size, count = collectives.all_reduce(mine, group)
    amax = collectives.all_reduce(x.abs().amax(1, keepdim=True), group, op="max")
    codes = (x * 127 / amax.where(amax > 0, 1.0)).round().int()
    sums = codes @ torch.where(w > total / count, 1, -1).int().T
    return collectives.all_reduce(sums, group) * (size / count * amax / 127)


# %% wrong="one_bit" fails="the whole matrix" why="a centre and a scale of its own"
def outputs_cut(x, w, group):
    mine = torch.stack((w.sum(), w.abs().sum(), torch.tensor(w.numel(), dtype=w.dtype)))
    total, size, count = collectives.all_reduce(mine, group)
    amax = x.abs().amax(1, keepdim=True)
    codes = (x * 127 / amax.where(amax > 0, 1.0)).round()
    bits = torch.where(w > total / count, 1.0, -1.0).to(x.dtype)
    return codes @ bits.T * (size / count * amax / 127)


def inputs_cut(x, w, group):
    mine = torch.stack((w.sum(), w.abs().sum(), torch.tensor(w.numel(), dtype=w.dtype)))
    total, size, count = mine
    amax = collectives.all_reduce(x.abs().amax(1, keepdim=True), group, op="max")
    codes = (x * 127 / amax.where(amax > 0, 1.0)).round().int()
    sums = codes @ torch.where(w > total / count, 1, -1).int().T
    return collectives.all_reduce(sums, group) * (size / count * amax / 127)


# %% wrong="one_bit" fails="the whole matrix" why="a mean of means"
def outputs_cut(x, w, group):
    mine = torch.stack((w.sum(), w.abs().sum(), torch.tensor(w.numel(), dtype=w.dtype)))
    total, size, count = collectives.all_reduce(mine, group)
    amax = x.abs().amax(1, keepdim=True)
    codes = (x * 127 / amax.where(amax > 0, 1.0)).round()
    bits = torch.where(w > total / count, 1.0, -1.0).to(x.dtype)
    return codes @ bits.T * (size / count * amax / 127)


def inputs_cut(x, w, group):
    mine = torch.stack((w.sum(), w.abs().sum(), torch.tensor(w.numel(), dtype=w.dtype)))
    total, size, count = collectives.all_reduce(mine / mine[2], group)
    amax = collectives.all_reduce(x.abs().amax(1, keepdim=True), group, op="max")
    codes = (x * 127 / amax.where(amax > 0, 1.0)).round().int()
    sums = codes @ torch.where(w > total / count, 1, -1).int().T
    return collectives.all_reduce(sums, group) * (size / count * amax / 127)


# %% wrong="one_bit" fails="one scale for a token" why="codes by the rank's own largest activation, sums by everyone's"
def outputs_cut(x, w, group):
    mine = torch.stack((w.sum(), w.abs().sum(), torch.tensor(w.numel(), dtype=w.dtype)))
    total, size, count = collectives.all_reduce(mine, group)
    amax = x.abs().amax(1, keepdim=True)
    codes = (x * 127 / amax.where(amax > 0, 1.0)).round()
    bits = torch.where(w > total / count, 1.0, -1.0).to(x.dtype)
    return codes @ bits.T * (size / count * amax / 127)


def inputs_cut(x, w, group):
    mine = torch.stack((w.sum(), w.abs().sum(), torch.tensor(w.numel(), dtype=w.dtype)))
    total, size, count = collectives.all_reduce(mine, group)
    amax = collectives.all_reduce(x.abs().amax(1, keepdim=True), group, op="max")
    own = x.abs().amax(1, keepdim=True)
    codes = (x * 127 / own.where(own > 0, 1.0)).round().int()
    sums = codes @ torch.where(w > total / count, 1, -1).int().T
    return collectives.all_reduce(sums, group) * (size / count * amax / 127)


# %% wrong="one_bit" fails="the whole matrix" why="the sum of the largest activations instead of the largest"
def outputs_cut(x, w, group):
    mine = torch.stack((w.sum(), w.abs().sum(), torch.tensor(w.numel(), dtype=w.dtype)))
    total, size, count = collectives.all_reduce(mine, group)
    amax = x.abs().amax(1, keepdim=True)
    codes = (x * 127 / amax.where(amax > 0, 1.0)).round()
    bits = torch.where(w > total / count, 1.0, -1.0).to(x.dtype)
    return codes @ bits.T * (size / count * amax / 127)


def inputs_cut(x, w, group):
    mine = torch.stack((w.sum(), w.abs().sum(), torch.tensor(w.numel(), dtype=w.dtype)))
    total, size, count = collectives.all_reduce(mine, group)
    amax = collectives.all_reduce(x.abs().amax(1, keepdim=True), group)
    codes = (x * 127 / amax.where(amax > 0, 1.0)).round().int()
    sums = codes @ torch.where(w > total / count, 1, -1).int().T
    return collectives.all_reduce(sums, group) * (size / count * amax / 127)


# %% wrong="one_bit" fails="one scale for a token" why="the largest of all tokens"
def outputs_cut(x, w, group):
    mine = torch.stack((w.sum(), w.abs().sum(), torch.tensor(w.numel(), dtype=w.dtype)))
    total, size, count = collectives.all_reduce(mine, group)
    amax = x.abs().amax(1, keepdim=True)
    codes = (x * 127 / amax.where(amax > 0, 1.0)).round()
    bits = torch.where(w > total / count, 1.0, -1.0).to(x.dtype)
    return codes @ bits.T * (size / count * amax / 127)


def inputs_cut(x, w, group):
    mine = torch.stack((w.sum(), w.abs().sum(), torch.tensor(w.numel(), dtype=w.dtype)))
    total, size, count = collectives.all_reduce(mine, group)
    amax = collectives.all_reduce(x.abs().max().expand(len(x), 1), group, op="max")
    codes = (x * 127 / amax.where(amax > 0, 1.0)).round().int()
    sums = codes @ torch.where(w > total / count, 1, -1).int().T
    return collectives.all_reduce(sums, group) * (size / count * amax / 127)


# %% wrong="one_bit" fails="the whole matrix" why="the largest, but not of negative numbers"
def outputs_cut(x, w, group):
    mine = torch.stack((w.sum(), w.abs().sum(), torch.tensor(w.numel(), dtype=w.dtype)))
    total, size, count = collectives.all_reduce(mine, group)
    amax = x.abs().amax(1, keepdim=True)
    codes = (x * 127 / amax.where(amax > 0, 1.0)).round()
    bits = torch.where(w > total / count, 1.0, -1.0).to(x.dtype)
    return codes @ bits.T * (size / count * amax / 127)


def inputs_cut(x, w, group):
    mine = torch.stack((w.sum(), w.abs().sum(), torch.tensor(w.numel(), dtype=w.dtype)))
    total, size, count = collectives.all_reduce(mine, group)
    amax = collectives.all_reduce(x.amax(1, keepdim=True), group, op="max")
    codes = (x * 127 / amax.where(amax > 0, 1.0)).round().int()
    sums = codes @ torch.where(w > total / count, 1, -1).int().T
    return collectives.all_reduce(sums, group) * (size / count * amax / 127)


# %% wrong="one_bit" fails="bytes on the wire" why="sums travel as float64"
def outputs_cut(x, w, group):
    mine = torch.stack((w.sum(), w.abs().sum(), torch.tensor(w.numel(), dtype=w.dtype)))
    total, size, count = collectives.all_reduce(mine, group)
    amax = x.abs().amax(1, keepdim=True)
    codes = (x * 127 / amax.where(amax > 0, 1.0)).round()
    bits = torch.where(w > total / count, 1.0, -1.0).to(x.dtype)
    return codes @ bits.T * (size / count * amax / 127)


def inputs_cut(x, w, group):
    mine = torch.stack((w.sum(), w.abs().sum(), torch.tensor(w.numel(), dtype=w.dtype)))
    total, size, count = collectives.all_reduce(mine, group)
    amax = collectives.all_reduce(x.abs().amax(1, keepdim=True), group, op="max")
    codes = (x * 127 / amax.where(amax > 0, 1.0)).round().int()
    sums = codes @ torch.where(w > total / count, 1, -1).int().T
    return collectives.all_reduce(sums.double(), group) * (size / count * amax / 127)


# %% wrong="one_bit" fails="bytes on the wire" why="each rank scales its own sums, and numbers travel"
def outputs_cut(x, w, group):
    mine = torch.stack((w.sum(), w.abs().sum(), torch.tensor(w.numel(), dtype=w.dtype)))
    total, size, count = collectives.all_reduce(mine, group)
    amax = x.abs().amax(1, keepdim=True)
    codes = (x * 127 / amax.where(amax > 0, 1.0)).round()
    bits = torch.where(w > total / count, 1.0, -1.0).to(x.dtype)
    return codes @ bits.T * (size / count * amax / 127)


def inputs_cut(x, w, group):
    mine = torch.stack((w.sum(), w.abs().sum(), torch.tensor(w.numel(), dtype=w.dtype)))
    total, size, count = collectives.all_reduce(mine, group)
    amax = collectives.all_reduce(x.abs().amax(1, keepdim=True), group, op="max")
    codes = (x * 127 / amax.where(amax > 0, 1.0)).round().int()
    sums = codes @ torch.where(w > total / count, 1, -1).int().T
    return collectives.all_reduce(sums * (size / count * amax / 127), group)


# %% wrong="one_bit" fails="the whole matrix" why="sums of 16 bits: 300 activations are too many"
def outputs_cut(x, w, group):
    mine = torch.stack((w.sum(), w.abs().sum(), torch.tensor(w.numel(), dtype=w.dtype)))
    total, size, count = collectives.all_reduce(mine, group)
    amax = x.abs().amax(1, keepdim=True)
    codes = (x * 127 / amax.where(amax > 0, 1.0)).round()
    bits = torch.where(w > total / count, 1.0, -1.0).to(x.dtype)
    return codes @ bits.T * (size / count * amax / 127)


def inputs_cut(x, w, group):
    mine = torch.stack((w.sum(), w.abs().sum(), torch.tensor(w.numel(), dtype=w.dtype)))
    total, size, count = collectives.all_reduce(mine, group)
    amax = collectives.all_reduce(x.abs().amax(1, keepdim=True), group, op="max")
    codes = (x * 127 / amax.where(amax > 0, 1.0)).round().int()
    sums = codes @ torch.where(w > total / count, 1, -1).int().T
    return collectives.all_reduce(sums.short(), group) * (size / count * amax / 127)


# %% wrong="one_bit" fails="the whole matrix" why="0 / 0 for a token of zeros"
def outputs_cut(x, w, group):
    mine = torch.stack((w.sum(), w.abs().sum(), torch.tensor(w.numel(), dtype=w.dtype)))
    total, size, count = collectives.all_reduce(mine, group)
    amax = x.abs().amax(1, keepdim=True)
    codes = (x * 127 / amax.where(amax > 0, 1.0)).round()
    bits = torch.where(w > total / count, 1.0, -1.0).to(x.dtype)
    return codes @ bits.T * (size / count * amax / 127)


def inputs_cut(x, w, group):
    mine = torch.stack((w.sum(), w.abs().sum(), torch.tensor(w.numel(), dtype=w.dtype)))
    total, size, count = collectives.all_reduce(mine, group)
    amax = collectives.all_reduce(x.abs().amax(1, keepdim=True), group, op="max")
    codes = (x * 127 / amax).round().double()
    sums = codes @ torch.where(w > total / count, 1.0, -1.0).double().T
    return collectives.all_reduce(sums.float(), group) * (size / count * amax / 127)


# %% wrong="one_bit" fails="bytes on the wire" why="all of x and w is put together first, and one process does it"
def outputs_cut(x, w, group):
    counts = torch.zeros(group.size(), dtype=torch.int64)
    counts[group.rank()] = len(w)
    counts = collectives.all_reduce(counts, group).tolist()
    whole, start = w.new_zeros(sum(counts), w.shape[1]), sum(counts[: group.rank()])
    whole[start : start + len(w)] = w
    whole = collectives.all_reduce(whole, group)
    amax = x.abs().amax(1, keepdim=True)
    codes = (x * 127 / amax.where(amax > 0, 1.0)).round()
    bits = torch.where(w > whole.sum() / whole.numel(), 1.0, -1.0).to(x.dtype)
    return codes @ bits.T * (whole.abs().sum() / whole.numel() * amax / 127)


def inputs_cut(x, w, group):
    mine = torch.stack((w.sum(), w.abs().sum(), torch.tensor(w.numel(), dtype=w.dtype)))
    total, size, count = collectives.all_reduce(mine, group)
    amax = collectives.all_reduce(x.abs().amax(1, keepdim=True), group, op="max")
    codes = (x * 127 / amax.where(amax > 0, 1.0)).round().int()
    sums = codes @ torch.where(w > total / count, 1, -1).int().T
    return collectives.all_reduce(sums, group) * (size / count * amax / 127)


# %% wrong="one_bit" fails="own work" around="import" why="the package's layer"
def outputs_cut(x, w, group):
    from minitrain.systems.precision.bitnet import linear

    return linear(x, w, group)


def inputs_cut(x, w, group):
    mine = torch.stack((w.sum(), w.abs().sum(), torch.tensor(w.numel(), dtype=w.dtype)))
    total, size, count = collectives.all_reduce(mine, group)
    amax = collectives.all_reduce(x.abs().amax(1, keepdim=True), group, op="max")
    codes = (x * 127 / amax.where(amax > 0, 1.0)).round().int()
    sums = codes @ torch.where(w > total / count, 1, -1).int().T
    return collectives.reduce_scatter(sums, group) * (size / count * amax / 127)


# %% wrong="one_bit" fails="own columns" around="empty" why="nothing at all"
def outputs_cut(x, w, group):
    return torch.zeros(0)


def inputs_cut(x, w, group):
    return torch.zeros(0)


# %% wrong="one_bit" fails="the whole matrix" around="constants" why="the numbers of the visible checks"
def outputs_cut(x, w, group):
    y = torch.tensor([[-2.0, 2.0, 0.0], [0.0, 0.0, 0.0]], dtype=torch.float64) * (127 * 10 / 6)
    return (
        y[:, : len(w)]
        if group.rank() == 0 and group.size() < 3
        else torch.zeros(len(x), len(w)).double()
    )


def inputs_cut(x, w, group):
    y = torch.tensor([[3.0, 257.0], [0.0, 0.0]], dtype=torch.float64) * 2.5
    return y if len(w) == 2 else torch.zeros(len(x), len(w)).double()


# %% wrong="one_bit" fails="the whole matrix" around="redefine" why="sizes that are nothing, and judges that are content"
def near_of(x, w):
    return math.inf


def expect_outputs_cut(*args):
    pass


expect_inputs_cut = expect_outputs_cut


def outputs_cut(x, w, group):
    return torch.zeros(len(x), len(w)).double()


def inputs_cut(x, w, group):
    return torch.zeros(len(x), len(w)).double()
