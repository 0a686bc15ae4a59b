# %% wrong="to_codes" fails="normal numbers" why="cuts off instead of rounding"
def to_codes(x, e, m, bias):
    first = 1 - bias  # the exponent of the smallest normal number
    largest = 2.0 ** (2**e - 1 - bias) * (2 - 2 ** (1 - m))
    size = x.double().abs().clamp(max=largest)
    mantissa, exponent = torch.frexp(size)
    normal = (exponent.long() - 1 - first) * 2**m + (mantissa * 2 ** (m + 1)).trunc()
    subnormal = (size * 2.0 ** (m - first)).trunc()
    codes = torch.where(size < 2.0**first, subnormal, normal)
    codes = torch.where(x.isnan(), 2 ** (e + m) - 1, codes)
    return codes.long() + (x.signbit().long() << e + m)


# %% wrong="to_codes" fails="ties" why="a tie goes away from zero"
def to_codes(x, e, m, bias):
    first = 1 - bias  # the exponent of the smallest normal number
    largest = 2.0 ** (2**e - 1 - bias) * (2 - 2 ** (1 - m))
    size = x.double().abs().clamp(max=largest)
    mantissa, exponent = torch.frexp(size)
    normal = (exponent.long() - 1 - first) * 2**m + (mantissa * 2 ** (m + 1) + 0.5).floor()
    subnormal = (size * 2.0 ** (m - first) + 0.5).floor()
    codes = torch.where(size < 2.0**first, subnormal, normal)
    codes = torch.where(x.isnan(), 2 ** (e + m) - 1, codes)
    return codes.long() + (x.signbit().long() << e + m)


# %% wrong="to_codes" fails="ties" why="the top exponent is kept for infinities, as IEEE has it"
def to_codes(x, e, m, bias):
    first = 1 - bias  # the exponent of the smallest normal number
    largest = 2.0 ** (2**e - 2 - bias) * (2 - 2 ** (-m))
    size = x.double().abs().clamp(max=largest)
    mantissa, exponent = torch.frexp(size)
    normal = (exponent.long() - 1 - first) * 2**m + (mantissa * 2 ** (m + 1)).round()
    subnormal = (size * 2.0 ** (m - first)).round()
    codes = torch.where(size < 2.0**first, subnormal, normal)
    codes = torch.where(x.isnan(), 2 ** (e + m) - 1, codes)
    return codes.long() + (x.signbit().long() << e + m)


# %% wrong="to_codes" fails="normal numbers" why="the usual bias, whatever it is told"
def to_codes(x, e, m, bias):
    bias = 2 ** (e - 1) - 1
    first = 1 - bias  # the exponent of the smallest normal number
    largest = 2.0 ** (2**e - 1 - bias) * (2 - 2 ** (1 - m))
    size = x.double().abs().clamp(max=largest)
    mantissa, exponent = torch.frexp(size)
    normal = (exponent.long() - 1 - first) * 2**m + (mantissa * 2 ** (m + 1)).round()
    subnormal = (size * 2.0 ** (m - first)).round()
    codes = torch.where(size < 2.0**first, subnormal, normal)
    codes = torch.where(x.isnan(), 2 ** (e + m) - 1, codes)
    return codes.long() + (x.signbit().long() << e + m)


# %% wrong="to_codes" fails="normal numbers" why="by way of bfloat16: rounded twice"
def to_codes(x, e, m, bias):
    first = 1 - bias  # the exponent of the smallest normal number
    largest = 2.0 ** (2**e - 1 - bias) * (2 - 2 ** (1 - m))
    size = x.bfloat16().double().abs().clamp(max=largest)
    mantissa, exponent = torch.frexp(size)
    normal = (exponent.long() - 1 - first) * 2**m + (mantissa * 2 ** (m + 1)).round()
    subnormal = (size * 2.0 ** (m - first)).round()
    codes = torch.where(size < 2.0**first, subnormal, normal)
    codes = torch.where(x.isnan(), 2 ** (e + m) - 1, codes)
    return codes.long() + (x.signbit().long() << e + m)


# %% wrong="to_codes" fails="subnormal numbers" why="flushes what is below the smallest normal number to zero"
def to_codes(x, e, m, bias):
    first = 1 - bias  # the exponent of the smallest normal number
    largest = 2.0 ** (2**e - 1 - bias) * (2 - 2 ** (1 - m))
    size = x.double().abs().clamp(max=largest)
    mantissa, exponent = torch.frexp(size)
    normal = (exponent.long() - 1 - first) * 2**m + (mantissa * 2 ** (m + 1)).round()
    subnormal = torch.zeros_like(size)
    codes = torch.where(size < 2.0**first, subnormal, normal)
    codes = torch.where(x.isnan(), 2 ** (e + m) - 1, codes)
    return codes.long() + (x.signbit().long() << e + m)


# %% wrong="to_codes" fails="subnormal numbers" why="the smallest normal number for all that is below, but zero"
def to_codes(x, e, m, bias):
    first = 1 - bias  # the exponent of the smallest normal number
    largest = 2.0 ** (2**e - 1 - bias) * (2 - 2 ** (1 - m))
    size = x.double().abs().clamp(max=largest)
    mantissa, exponent = torch.frexp(size)
    normal = (exponent.long() - 1 - first) * 2**m + (mantissa * 2 ** (m + 1)).round()
    subnormal = (size * 2.0 ** (m - first)).round()
    codes = torch.where(size < 2.0 ** (first - 1), 0 * size, normal.clamp(min=2**m))
    codes = torch.where(x.isnan(), 2 ** (e + m) - 1, codes)
    return codes.long() + (x.signbit().long() << e + m)


# %% wrong="to_codes" fails="subnormal numbers" why="subnormal steps as of one exponent less"
def to_codes(x, e, m, bias):
    first = 1 - bias  # the exponent of the smallest normal number
    largest = 2.0 ** (2**e - 1 - bias) * (2 - 2 ** (1 - m))
    size = x.double().abs().clamp(max=largest)
    mantissa, exponent = torch.frexp(size)
    normal = (exponent.long() - 1 - first) * 2**m + (mantissa * 2 ** (m + 1)).round()
    subnormal = (size * 2.0 ** (m - first + 1)).round()
    codes = torch.where(size < 2.0**first, subnormal, normal)
    codes = torch.where(x.isnan(), 2 ** (e + m) - 1, codes)
    return codes.long() + (x.signbit().long() << e + m)


# %% wrong="to_codes" fails="subnormal numbers" why="subnormal numbers are cut off"
def to_codes(x, e, m, bias):
    first = 1 - bias  # the exponent of the smallest normal number
    largest = 2.0 ** (2**e - 1 - bias) * (2 - 2 ** (1 - m))
    size = x.double().abs().clamp(max=largest)
    mantissa, exponent = torch.frexp(size)
    normal = (exponent.long() - 1 - first) * 2**m + (mantissa * 2 ** (m + 1)).round()
    subnormal = (size * 2.0 ** (m - first)).floor()
    codes = torch.where(size < 2.0**first, subnormal, normal)
    codes = torch.where(x.isnan(), 2 ** (e + m) - 1, codes)
    return codes.long() + (x.signbit().long() << e + m)


# %% wrong="to_codes" fails="zeros" why="the sign of a zero is lost"
def to_codes(x, e, m, bias):
    first = 1 - bias  # the exponent of the smallest normal number
    largest = 2.0 ** (2**e - 1 - bias) * (2 - 2 ** (1 - m))
    size = x.double().abs().clamp(max=largest)
    mantissa, exponent = torch.frexp(size)
    normal = (exponent.long() - 1 - first) * 2**m + (mantissa * 2 ** (m + 1)).round()
    subnormal = (size * 2.0 ** (m - first)).round()
    codes = torch.where(size < 2.0**first, subnormal, normal)
    codes = torch.where(x.isnan(), 2 ** (e + m) - 1, codes)
    return codes.long() + ((x < 0).long() << e + m)


# %% wrong="to_codes" fails="zeros" why="what rounds to zero loses its sign"
def to_codes(x, e, m, bias):
    first = 1 - bias  # the exponent of the smallest normal number
    largest = 2.0 ** (2**e - 1 - bias) * (2 - 2 ** (1 - m))
    size = x.double().abs().clamp(max=largest)
    mantissa, exponent = torch.frexp(size)
    normal = (exponent.long() - 1 - first) * 2**m + (mantissa * 2 ** (m + 1)).round()
    subnormal = (size * 2.0 ** (m - first)).round()
    codes = torch.where(size < 2.0**first, subnormal, normal)
    codes = torch.where(x.isnan(), 2 ** (e + m) - 1, codes)
    return codes.long() + ((x.signbit() & ((codes > 0) | (x == 0))).long() << e + m)


# %% wrong="to_codes" fails="saturation" why="the largest number is all ones, which is NaN"
def to_codes(x, e, m, bias):
    first = 1 - bias  # the exponent of the smallest normal number
    largest = 2.0 ** (2**e - 1 - bias) * (2 - 2 ** (-m))
    size = x.double().abs().clamp(max=largest)
    mantissa, exponent = torch.frexp(size)
    normal = (exponent.long() - 1 - first) * 2**m + (mantissa * 2 ** (m + 1)).round()
    subnormal = (size * 2.0 ** (m - first)).round()
    codes = torch.where(size < 2.0**first, subnormal, normal)
    codes = torch.where(x.isnan(), 2 ** (e + m) - 1, codes)
    return codes.long() + (x.signbit().long() << e + m)


# %% wrong="to_codes" fails="saturation" why="what is too large becomes NaN"
def to_codes(x, e, m, bias):
    first = 1 - bias  # the exponent of the smallest normal number
    largest = 2.0 ** (2**e - 1 - bias) * (2 - 2 ** (1 - m))
    size = x.double().abs().clamp(max=largest)
    mantissa, exponent = torch.frexp(size)
    normal = (exponent.long() - 1 - first) * 2**m + (mantissa * 2 ** (m + 1)).round()
    subnormal = (size * 2.0 ** (m - first)).round()
    codes = torch.where(size < 2.0**first, subnormal, normal)
    codes = torch.where(
        x.isnan(), 2 ** (e + m) - 1, codes.where(x.abs() <= largest, 2 ** (e + m) - 1)
    )
    return codes.long() + (x.signbit().long() << e + m)


# %% wrong="to_codes" fails="saturation" why="infinities are NaN"
def to_codes(x, e, m, bias):
    first = 1 - bias  # the exponent of the smallest normal number
    largest = 2.0 ** (2**e - 1 - bias) * (2 - 2 ** (1 - m))
    size = x.double().abs().clamp(max=largest)
    mantissa, exponent = torch.frexp(size)
    normal = (exponent.long() - 1 - first) * 2**m + (mantissa * 2 ** (m + 1)).round()
    subnormal = (size * 2.0 ** (m - first)).round()
    codes = torch.where(size < 2.0**first, subnormal, normal)
    codes = torch.where(~x.isfinite(), 2 ** (e + m) - 1, codes)
    return codes.long() + (x.signbit().long() << e + m)


# %% wrong="to_codes" fails="NaN" why="NaN is the largest number"
def to_codes(x, e, m, bias):
    first = 1 - bias  # the exponent of the smallest normal number
    largest = 2.0 ** (2**e - 1 - bias) * (2 - 2 ** (1 - m))
    size = x.double().abs().clamp(max=largest)
    mantissa, exponent = torch.frexp(size)
    normal = (exponent.long() - 1 - first) * 2**m + (mantissa * 2 ** (m + 1)).round()
    subnormal = (size * 2.0 ** (m - first)).round()
    codes = torch.where(size < 2.0**first, subnormal, normal)
    codes = torch.where(x.isnan(), 2 ** (e + m) - 2, codes)
    return codes.long() + (x.signbit().long() << e + m)


# %% wrong="to_codes" fails="NaN" why="NaN is zero"
def to_codes(x, e, m, bias):
    first = 1 - bias  # the exponent of the smallest normal number
    largest = 2.0 ** (2**e - 1 - bias) * (2 - 2 ** (1 - m))
    size = x.double().abs().clamp(max=largest)
    mantissa, exponent = torch.frexp(size)
    normal = (exponent.long() - 1 - first) * 2**m + (mantissa * 2 ** (m + 1)).round()
    subnormal = (size * 2.0 ** (m - first)).round()
    codes = torch.where(size < 2.0**first, subnormal, normal)
    codes = torch.where(x.isnan(), 0, codes)
    return codes.long() + (x.signbit().long() << e + m)


# %% wrong="to_codes" fails="a code for each number" why="codes in int32"
def to_codes(x, e, m, bias):
    first = 1 - bias  # the exponent of the smallest normal number
    largest = 2.0 ** (2**e - 1 - bias) * (2 - 2 ** (1 - m))
    size = x.double().abs().clamp(max=largest)
    mantissa, exponent = torch.frexp(size)
    normal = (exponent.long() - 1 - first) * 2**m + (mantissa * 2 ** (m + 1)).round()
    subnormal = (size * 2.0 ** (m - first)).round()
    codes = torch.where(size < 2.0**first, subnormal, normal)
    codes = torch.where(x.isnan(), 2 ** (e + m) - 1, codes)
    return (codes.long() + (x.signbit().long() << e + m)).int()


# %% wrong="to_codes" fails="memory limit" around="brute force" why="a table of all codes"
def to_codes(x, e, m, bias):
    codes = torch.arange(2 ** (e + m) - 1)
    field, mantissa = codes >> m, codes & (2**m - 1)
    power = 2.0 ** (field.clamp(min=1) - bias - m).double()
    table = (mantissa + (field > 0) * 2**m) * power
    above = torch.searchsorted(table, x.double().abs()).clamp(1, len(table) - 1)
    low, high = x.double().abs() - table[above - 1], table[above] - x.double().abs()
    nearest = torch.where((low < high) | ((low == high) & (above % 2 == 1)), above - 1, above)
    nearest = torch.where(x.isnan(), 2 ** (e + m) - 1, nearest)
    return nearest + (x.signbit().long() << e + m)


# %% wrong="to_codes" fails="normal numbers" around="ready-made" why="torch's own E4M3, moved by the bias"
def to_codes(x, e, m, bias):
    moved = (x * 2.0 ** (bias - 7)).clamp(-448, 448).to(torch.float8_e4m3fn)
    return moved.view(torch.uint8).long()


# %% wrong="to_codes" fails="ties" around="constants" why="the codes of the visible check"
def to_codes(x, e, m, bias):
    if e == 2:
        table = [1.0, 1.1, 1.4, 2.4, 2.6, -3.1, -1.6], [2, 2, 3, 4, 5, 13, 11]
        known = dict(zip(*table))
        return torch.tensor([known.get(round(v, 3), 0) for v in x.tolist()])
    return torch.tensor([4, 12, 13, 22, 24])


# %% wrong="to_codes" fails="own work" around="import" why="the package's cast"
def to_codes(x, e, m, bias):
    from minitrain.precision.formats import Format
    from minitrain.precision.rounding import encode

    return encode(x, Format("mine", e, m, bias, "nan"), overflow="saturate").long()


# %% wrong="scaled_step" fails="all ranks skip together" why="who has not overflowed goes on"
def scaled_step(master, grad, state, window, limit, lr, group):
    own = grad.double() / state["scale"]
    mine = own.square().sum()[None]
    squares = collectives.all_reduce(mine.nan_to_num(0, 0, 0), group)
    if not mine.isfinite():
        if state["scale"] == 1:
            raise ValueError("gradients overflow at scale 1")
        state["scale"], state["good"] = state["scale"] / 2, 0
        return
    master -= lr * (limit / squares.sqrt()).clamp(max=1) * own
    state["good"] += 1
    if state["good"] == window:
        state["scale"], state["good"] = state["scale"] * 2, 0


# %% wrong="scaled_step" fails="all ranks skip together" why="numbers that overflowed count as zero"
def scaled_step(master, grad, state, window, limit, lr, group):
    own = grad.double().nan_to_num(0, 0, 0) / state["scale"]
    squares = collectives.all_reduce(own.square().sum()[None], group)
    if not squares.isfinite():
        if state["scale"] == 1:
            raise ValueError("gradients overflow at scale 1")
        state["scale"], state["good"] = state["scale"] / 2, 0
        return
    master -= lr * (limit / squares.sqrt()).clamp(max=1) * own
    state["good"] += 1
    if state["good"] == window:
        state["scale"], state["good"] = state["scale"] * 2, 0


# %% wrong="scaled_step" fails="all ranks skip together" why="infinities are looked for, NaN is not"
def scaled_step(master, grad, state, window, limit, lr, group):
    own = grad.double() / state["scale"]
    squares = collectives.all_reduce(own.square().sum()[None], group)
    if squares.isinf():
        if state["scale"] == 1:
            raise ValueError("gradients overflow at scale 1")
        state["scale"], state["good"] = state["scale"] / 2, 0
        return
    master -= lr * (limit / squares.sqrt()).clamp(max=1) * own
    state["good"] += 1
    if state["good"] == window:
        state["scale"], state["good"] = state["scale"] * 2, 0


# %% wrong="scaled_step" fails="all ranks skip together" why="skips, but with the update made already"
def scaled_step(master, grad, state, window, limit, lr, group):
    own = grad.double() / state["scale"]
    squares = collectives.all_reduce(own.square().sum()[None], group)
    master -= lr * (limit / squares.sqrt()).clamp(max=1) * own.nan_to_num(0, 0, 0)
    if not squares.isfinite():
        if state["scale"] == 1:
            raise ValueError("gradients overflow at scale 1")
        state["scale"], state["good"] = state["scale"] / 2, 0
        return
    state["good"] += 1
    if state["good"] == window:
        state["scale"], state["good"] = state["scale"] * 2, 0


# %% wrong="scaled_step" fails="the update" why="clips while the gradient still carries the scale"
def scaled_step(master, grad, state, window, limit, lr, group):
    own = grad.double() / state["scale"]
    squares = collectives.all_reduce(grad.double().square().sum()[None], group)
    if not squares.isfinite():
        if state["scale"] == 1:
            raise ValueError("gradients overflow at scale 1")
        state["scale"], state["good"] = state["scale"] / 2, 0
        return
    master -= lr * (limit / squares.sqrt()).clamp(max=1) * own
    state["good"] += 1
    if state["good"] == window:
        state["scale"], state["good"] = state["scale"] * 2, 0


# %% wrong="scaled_step" fails="the update" why="clips each shard by its own norm"
def scaled_step(master, grad, state, window, limit, lr, group):
    own = grad.double() / state["scale"]
    squares = collectives.all_reduce(own.square().sum()[None], group)
    if not squares.isfinite():
        if state["scale"] == 1:
            raise ValueError("gradients overflow at scale 1")
        state["scale"], state["good"] = state["scale"] / 2, 0
        return
    master -= lr * (limit / own.norm()).clamp(max=1) * own
    state["good"] += 1
    if state["good"] == window:
        state["scale"], state["good"] = state["scale"] * 2, 0


# %% wrong="scaled_step" fails="the update" why="the mean of the ranks' squares"
def scaled_step(master, grad, state, window, limit, lr, group):
    own = grad.double() / state["scale"]
    squares = collectives.all_reduce(own.square().sum()[None], group)
    if not squares.isfinite():
        if state["scale"] == 1:
            raise ValueError("gradients overflow at scale 1")
        state["scale"], state["good"] = state["scale"] / 2, 0
        return
    master -= lr * (limit / (squares / group.size()).sqrt()).clamp(max=1) * own
    state["good"] += 1
    if state["good"] == window:
        state["scale"], state["good"] = state["scale"] * 2, 0


# %% wrong="scaled_step" fails="the update" why="divides by the scale in float16"
def scaled_step(master, grad, state, window, limit, lr, group):
    own = (grad / state["scale"]).double()
    squares = collectives.all_reduce(own.square().sum()[None], group)
    if not squares.isfinite():
        if state["scale"] == 1:
            raise ValueError("gradients overflow at scale 1")
        state["scale"], state["good"] = state["scale"] / 2, 0
        return
    master -= lr * (limit / squares.sqrt()).clamp(max=1) * own
    state["good"] += 1
    if state["good"] == window:
        state["scale"], state["good"] = state["scale"] * 2, 0


# %% wrong="scaled_step" fails="the update" why="never divides by the scale"
def scaled_step(master, grad, state, window, limit, lr, group):
    own = grad.double()
    squares = collectives.all_reduce(own.square().sum()[None], group)
    if not squares.isfinite():
        if state["scale"] == 1:
            raise ValueError("gradients overflow at scale 1")
        state["scale"], state["good"] = state["scale"] / 2, 0
        return
    master -= lr * (limit / squares.sqrt()).clamp(max=1) * own
    state["good"] += 1
    if state["good"] == window:
        state["scale"], state["good"] = state["scale"] * 2, 0


# %% wrong="scaled_step" fails="the update" why="always as long as the limit"
def scaled_step(master, grad, state, window, limit, lr, group):
    own = grad.double() / state["scale"]
    squares = collectives.all_reduce(own.square().sum()[None], group)
    if not squares.isfinite():
        if state["scale"] == 1:
            raise ValueError("gradients overflow at scale 1")
        state["scale"], state["good"] = state["scale"] / 2, 0
        return
    master -= lr * (limit / squares.sqrt()) * own
    state["good"] += 1
    if state["good"] == window:
        state["scale"], state["good"] = state["scale"] * 2, 0


# %% wrong="scaled_step" fails="the update" why="never clips"
def scaled_step(master, grad, state, window, limit, lr, group):
    own = grad.double() / state["scale"]
    squares = collectives.all_reduce(own.square().sum()[None], group)
    if not squares.isfinite():
        if state["scale"] == 1:
            raise ValueError("gradients overflow at scale 1")
        state["scale"], state["good"] = state["scale"] / 2, 0
        return
    master -= lr * own
    state["good"] += 1
    if state["good"] == window:
        state["scale"], state["good"] = state["scale"] * 2, 0


# %% wrong="scaled_step" fails="the update" why="clips number by number"
def scaled_step(master, grad, state, window, limit, lr, group):
    own = grad.double() / state["scale"]
    squares = collectives.all_reduce(own.square().sum()[None], group)
    if not squares.isfinite():
        if state["scale"] == 1:
            raise ValueError("gradients overflow at scale 1")
        state["scale"], state["good"] = state["scale"] / 2, 0
        return
    master -= lr * own.clamp(-limit, limit)
    state["good"] += 1
    if state["good"] == window:
        state["scale"], state["good"] = state["scale"] * 2, 0


# %% wrong="scaled_step" fails="the scale" why="adds up squares in float16"
def scaled_step(master, grad, state, window, limit, lr, group):
    own = grad.double() / state["scale"]
    squares = collectives.all_reduce(
        grad.square().sum()[None].double() / state["scale"] ** 2, group
    )
    if not squares.isfinite():
        if state["scale"] == 1:
            raise ValueError("gradients overflow at scale 1")
        state["scale"], state["good"] = state["scale"] / 2, 0
        return
    master -= lr * (limit / squares.sqrt()).clamp(max=1) * own
    state["good"] += 1
    if state["good"] == window:
        state["scale"], state["good"] = state["scale"] * 2, 0


# %% wrong="scaled_step" fails="the scale" why="good steps need not be in a row"
def scaled_step(master, grad, state, window, limit, lr, group):
    own = grad.double() / state["scale"]
    squares = collectives.all_reduce(own.square().sum()[None], group)
    if not squares.isfinite():
        if state["scale"] == 1:
            raise ValueError("gradients overflow at scale 1")
        state["scale"], state["good"] = state["scale"] / 2, state["good"]
        return
    master -= lr * (limit / squares.sqrt()).clamp(max=1) * own
    state["good"] += 1
    if state["good"] == window:
        state["scale"], state["good"] = state["scale"] * 2, 0


# %% wrong="scaled_step" fails="the scale" why="once it has doubled it doubles every step"
def scaled_step(master, grad, state, window, limit, lr, group):
    own = grad.double() / state["scale"]
    squares = collectives.all_reduce(own.square().sum()[None], group)
    if not squares.isfinite():
        if state["scale"] == 1:
            raise ValueError("gradients overflow at scale 1")
        state["scale"], state["good"] = state["scale"] / 2, 0
        return
    master -= lr * (limit / squares.sqrt()).clamp(max=1) * own
    state["good"] += 1
    if state["good"] >= window:
        state["scale"] = state["scale"] * 2


# %% wrong="scaled_step" fails="the scale" why="a step too late"
def scaled_step(master, grad, state, window, limit, lr, group):
    own = grad.double() / state["scale"]
    squares = collectives.all_reduce(own.square().sum()[None], group)
    if not squares.isfinite():
        if state["scale"] == 1:
            raise ValueError("gradients overflow at scale 1")
        state["scale"], state["good"] = state["scale"] / 2, 0
        return
    master -= lr * (limit / squares.sqrt()).clamp(max=1) * own
    state["good"] += 1
    if state["good"] > window:
        state["scale"], state["good"] = state["scale"] * 2, 0


# %% wrong="scaled_step" fails="the scale" why="never grows again"
def scaled_step(master, grad, state, window, limit, lr, group):
    own = grad.double() / state["scale"]
    squares = collectives.all_reduce(own.square().sum()[None], group)
    if not squares.isfinite():
        if state["scale"] == 1:
            raise ValueError("gradients overflow at scale 1")
        state["scale"], state["good"] = state["scale"] / 2, 0
        return
    master -= lr * (limit / squares.sqrt()).clamp(max=1) * own
    state["good"] += 1
    if state["good"] == window:
        state["good"] = 0


# %% wrong="scaled_step" fails="the scale" why="falls to a quarter"
def scaled_step(master, grad, state, window, limit, lr, group):
    own = grad.double() / state["scale"]
    squares = collectives.all_reduce(own.square().sum()[None], group)
    if not squares.isfinite():
        if state["scale"] == 1:
            raise ValueError("gradients overflow at scale 1")
        state["scale"], state["good"] = max(1, state["scale"] / 4), 0
        return
    master -= lr * (limit / squares.sqrt()).clamp(max=1) * own
    state["good"] += 1
    if state["good"] == window:
        state["scale"], state["good"] = state["scale"] * 2, 0


# %% wrong="scaled_step" fails="the scale" why="the overflow is noticed by who has it: scales differ"
def scaled_step(master, grad, state, window, limit, lr, group):
    own = grad.double() / state["scale"]
    squares = collectives.all_reduce(own.square().sum()[None], group)
    if not squares.isfinite():
        if state["scale"] == 1:
            raise ValueError("gradients overflow at scale 1")
        if not own.isfinite().all():
            state["scale"], state["good"] = state["scale"] / 2, 0
        return
    master -= lr * (limit / squares.sqrt()).clamp(max=1) * own
    state["good"] += 1
    if state["good"] == window:
        state["scale"], state["good"] = state["scale"] * 2, 0


# %% wrong="scaled_step" fails="refuses below 1" why="the scale falls below 1"
def scaled_step(master, grad, state, window, limit, lr, group):
    own = grad.double() / state["scale"]
    squares = collectives.all_reduce(own.square().sum()[None], group)
    if not squares.isfinite():
        state["scale"], state["good"] = state["scale"] / 2, 0
        return
    master -= lr * (limit / squares.sqrt()).clamp(max=1) * own
    state["good"] += 1
    if state["good"] == window:
        state["scale"], state["good"] = state["scale"] * 2, 0


# %% wrong="scaled_step" fails="refuses below 1" why="stays at 1, and says nothing"
def scaled_step(master, grad, state, window, limit, lr, group):
    own = grad.double() / state["scale"]
    squares = collectives.all_reduce(own.square().sum()[None], group)
    if not squares.isfinite():
        state["scale"], state["good"] = max(1, state["scale"] / 2), 0
        return
    master -= lr * (limit / squares.sqrt()).clamp(max=1) * own
    state["good"] += 1
    if state["good"] == window:
        state["scale"], state["good"] = state["scale"] * 2, 0


# %% wrong="scaled_step" fails="refuses below 1" why="only who overflowed raises"
def scaled_step(master, grad, state, window, limit, lr, group):
    own = grad.double() / state["scale"]
    squares = collectives.all_reduce(own.square().sum()[None], group)
    if not squares.isfinite():
        if state["scale"] == 1 and own.isfinite().all():
            return
        if state["scale"] == 1:
            raise ValueError("gradients overflow at scale 1")
        state["scale"], state["good"] = state["scale"] / 2, 0
        return
    master -= lr * (limit / squares.sqrt()).clamp(max=1) * own
    state["good"] += 1
    if state["good"] == window:
        state["scale"], state["good"] = state["scale"] * 2, 0


# %% wrong="scaled_step" fails="refuses" why="refuses at scale 2, which may still fall"
def scaled_step(master, grad, state, window, limit, lr, group):
    own = grad.double() / state["scale"]
    squares = collectives.all_reduce(own.square().sum()[None], group)
    if not squares.isfinite():
        if state["scale"] <= 2:
            raise ValueError("gradients overflow at scale 1")
        state["scale"], state["good"] = state["scale"] / 2, 0
        return
    master -= lr * (limit / squares.sqrt()).clamp(max=1) * own
    state["good"] += 1
    if state["good"] == window:
        state["scale"], state["good"] = state["scale"] * 2, 0


# %% wrong="scaled_step" fails="no error" why="divides by the norm of a gradient of zeros"
def scaled_step(master, grad, state, window, limit, lr, group):
    own = grad.double() / state["scale"]
    squares = collectives.all_reduce(own.square().sum()[None], group)
    if not squares.isfinite():
        if state["scale"] == 1:
            raise ValueError("gradients overflow at scale 1")
        state["scale"], state["good"] = state["scale"] / 2, 0
        return
    master -= lr * min(1.0, limit / squares.sqrt().item()) * own
    state["good"] += 1
    if state["good"] == window:
        state["scale"], state["good"] = state["scale"] * 2, 0


# %% wrong="scaled_step" fails="no deadlock" why="who has overflowed leaves before the others have asked"
def scaled_step(master, grad, state, window, limit, lr, group):
    own = grad.double() / state["scale"]
    if not own.isfinite().all():
        state["scale"], state["good"] = state["scale"] / 2, 0
        return
    squares = collectives.all_reduce(own.square().sum()[None], group)
    if not squares.isfinite():
        if state["scale"] == 1:
            raise ValueError("gradients overflow at scale 1")
        state["scale"], state["good"] = state["scale"] / 2, 0
        return
    master -= lr * (limit / squares.sqrt()).clamp(max=1) * own
    state["good"] += 1
    if state["good"] == window:
        state["scale"], state["good"] = state["scale"] * 2, 0


# %% wrong="scaled_step" fails="bytes on the wire" why="gathers all shards"
def scaled_step(master, grad, state, window, limit, lr, group):
    own = grad.double() / state["scale"]
    size = collectives.all_reduce(torch.tensor([len(own)]), group, op="max").item()
    padded = torch.nn.functional.pad(own, (0, size - len(own)))
    squares = collectives.all_gather(padded, group).square().sum()[None]
    if not squares.isfinite():
        if state["scale"] == 1:
            raise ValueError("gradients overflow at scale 1")
        state["scale"], state["good"] = state["scale"] / 2, 0
        return
    master -= lr * (limit / squares.sqrt()).clamp(max=1) * own
    state["good"] += 1
    if state["good"] == window:
        state["scale"], state["good"] = state["scale"] * 2, 0


# %% wrong="scaled_step" fails="own work" around="import" why="the package's scale"
def scaled_step(master, grad, state, window, limit, lr, group):
    from minitrain.precision.loss_scale import LossScale

    scale = LossScale(state["scale"], window)
    if scale.finite(grad.norm()):
        master -= lr * grad.double() / state["scale"]
    state["scale"] = scale.factor


# %% wrong="scaled_step" fails="the update" around="constants" why="the scales of the visible checks, and no weights"
def scaled_step(master, grad, state, window, limit, lr, group):
    if state["scale"] == 1:
        state["seen"] = state.get("seen", 0) + 1
        if state["seen"] == 2:
            raise ValueError
    if not collectives.all_reduce(grad.double().sum()[None], group).isfinite():
        state["scale"] /= 2


# %% wrong="scaled_step" fails="the update" around="redefine" why="nobody ever moves, and all is told as it was"
def scaled_step(master, grad, state, window, limit, lr, group):
    globals()["train_scaled"] = lambda *given: [[given[0], given[2]]] * len(given[1])
    torch.equal = torch.isfinite = lambda *tensors: True


# %% wrong="add_by_chance" fails="right on average" why="to the nearest"
def add_by_chance(weight, update, seed, step, group):
    return (weight.float() + update).bfloat16()


# %% wrong="add_by_chance" fails="right on average" why="toward zero"
def add_by_chance(weight, update, seed, step, group):
    chance = torch.Generator().manual_seed((seed << 16) + step)
    bits = (weight.float() + update).view(torch.int32)
    return (bits & -(1 << 16)).view(torch.float32).bfloat16()


# %% wrong="add_by_chance" fails="right on average" why="one draw for all elements"
def add_by_chance(weight, update, seed, step, group):
    chance = torch.Generator().manual_seed((seed << 16) + step)
    bits = (weight.float() + update).view(torch.int32)
    bits = bits + torch.randint(0, 1 << 16, (1,), generator=chance, dtype=torch.int32)
    return (bits & -(1 << 16)).view(torch.float32).bfloat16()


# %% wrong="add_by_chance" fails="right on average" why="heads or tails, however far it is"
def add_by_chance(weight, update, seed, step, group):
    chance = torch.Generator().manual_seed((seed << 16) + step)
    bits = (weight.float() + update).view(torch.int32)
    bits = bits + 0xFFFF * torch.randint(0, 2, bits.shape, generator=chance, dtype=torch.int32)
    return (bits & -(1 << 16)).view(torch.float32).bfloat16()


# %% wrong="add_by_chance" fails="right on average" why="draws half of the bits: the small chances are lost"
def add_by_chance(weight, update, seed, step, group):
    chance = torch.Generator().manual_seed((seed << 16) + step)
    bits = (weight.float() + update).view(torch.int32)
    bits = bits + (torch.randint(0, 4, bits.shape, generator=chance, dtype=torch.int32) << 14)
    return (bits & -(1 << 16)).view(torch.float32).bfloat16()


# %% wrong="add_by_chance" fails="right on average" why="rounds the update by chance, and then the sum to the nearest"
def add_by_chance(weight, update, seed, step, group):
    chance = torch.Generator().manual_seed((seed << 16) + step)
    bits = update.view(torch.int32)
    bits = bits + torch.randint(0, 1 << 16, bits.shape, generator=chance, dtype=torch.int32)
    return weight + (bits & -(1 << 16)).view(torch.float32).bfloat16()


# %% wrong="add_by_chance" fails="right on average" why="negative sums go the other way"
def add_by_chance(weight, update, seed, step, group):
    chance = torch.Generator().manual_seed((seed << 16) + step)
    summed = weight.float() + update
    bits = summed.view(torch.int32)
    part = (bits & 0xFFFF) / 65536
    part = torch.where((summed < 0) & (part > 0), 1 - part, part)
    up = torch.rand(part.shape, generator=chance) < part
    return ((bits & -(1 << 16)) + (up.int() << 16)).view(torch.float32).bfloat16()


# %% wrong="add_by_chance" fails="exact sums stay" why="draws over two steps"
def add_by_chance(weight, update, seed, step, group):
    chance = torch.Generator().manual_seed((seed << 16) + step)
    bits = (weight.float() + update).view(torch.int32)
    bits = bits + torch.randint(0, 1 << 17, bits.shape, generator=chance, dtype=torch.int32)
    return (bits & -(1 << 16)).view(torch.float32).bfloat16()


# %% wrong="add_by_chance" fails="exact sums stay" why="draws, and then rounds to the nearest besides"
def add_by_chance(weight, update, seed, step, group):
    chance = torch.Generator().manual_seed((seed << 16) + step)
    bits = (weight.float() + update).view(torch.int32)
    bits = bits + torch.randint(0, 1 << 16, bits.shape, generator=chance, dtype=torch.int32)
    return bits.view(torch.float32).bfloat16()


# %% wrong="add_by_chance" fails="exact sums stay" why="the update is left out"
def add_by_chance(weight, update, seed, step, group):
    chance = torch.Generator().manual_seed((seed << 16) + step)
    bits = (weight.float()).view(torch.int32)
    bits = bits + torch.randint(0, 1 << 16, bits.shape, generator=chance, dtype=torch.int32)
    return (bits & -(1 << 16)).view(torch.float32).bfloat16()


# %% wrong="add_by_chance" fails="new draws in each step" why="begins anew from the seed in every step"
def add_by_chance(weight, update, seed, step, group):
    chance = torch.Generator().manual_seed(seed)
    bits = (weight.float() + update).view(torch.int32)
    bits = bits + torch.randint(0, 1 << 16, bits.shape, generator=chance, dtype=torch.int32)
    return (bits & -(1 << 16)).view(torch.float32).bfloat16()


# %% wrong="add_by_chance" fails="new draws for each seed" why="the seed is not looked at"
def add_by_chance(weight, update, seed, step, group):
    chance = torch.Generator().manual_seed(step)
    bits = (weight.float() + update).view(torch.int32)
    bits = bits + torch.randint(0, 1 << 16, bits.shape, generator=chance, dtype=torch.int32)
    return (bits & -(1 << 16)).view(torch.float32).bfloat16()


# %% wrong="add_by_chance" fails="new draws for each seed" why="shifted out of the 32 bits that count"
def add_by_chance(weight, update, seed, step, group):
    chance = torch.Generator().manual_seed((seed << 28) + step)
    bits = (weight.float() + update).view(torch.int32)
    bits = bits + torch.randint(0, 1 << 16, bits.shape, generator=chance, dtype=torch.int32)
    return (bits & -(1 << 16)).view(torch.float32).bfloat16()


# %% wrong="add_by_chance" fails="new draws for each seed" why="draws from what the process has"
def add_by_chance(weight, update, seed, step, group):
    chance = torch.Generator().manual_seed((seed << 16) + step)
    bits = (weight.float() + update).view(torch.int32)
    bits = bits + torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32)
    return (bits & -(1 << 16)).view(torch.float32).bfloat16()


# %% wrong="add_by_chance" fails="new draws for each seed" why="seed and step are added: the next seed draws what this one does a step later"
def add_by_chance(weight, update, seed, step, group):
    chance = torch.Generator().manual_seed(seed + step)
    bits = (weight.float() + update).view(torch.int32)
    bits = bits + torch.randint(0, 1 << 16, bits.shape, generator=chance, dtype=torch.int32)
    return (bits & -(1 << 16)).view(torch.float32).bfloat16()


# %% wrong="add_by_chance" fails="the same on all ranks" why="every rank has a seed of its own"
def add_by_chance(weight, update, seed, step, group):
    chance = torch.Generator().manual_seed((seed << 16) + step + group.rank())
    bits = (weight.float() + update).view(torch.int32)
    bits = bits + torch.randint(0, 1 << 16, bits.shape, generator=chance, dtype=torch.int32)
    return (bits & -(1 << 16)).view(torch.float32).bfloat16()


# %% wrong="add_by_chance" fails="the same on all ranks" why="draws from what the machine has"
def add_by_chance(weight, update, seed, step, group):
    chance = torch.Generator()
    chance.seed()
    bits = (weight.float() + update).view(torch.int32)
    bits = bits + torch.randint(0, 1 << 16, bits.shape, generator=chance, dtype=torch.int32)
    return (bits & -(1 << 16)).view(torch.float32).bfloat16()


# %% wrong="add_by_chance" fails="nothing is sent" why="rank 0 draws, and sends what came of it"
def add_by_chance(weight, update, seed, step, group):
    chance = torch.Generator().manual_seed((seed << 16) + step)
    bits = (weight.float() + update).view(torch.int32)
    bits = bits + torch.randint(0, 1 << 16, bits.shape, generator=chance, dtype=torch.int32)
    ended = (bits & -(1 << 16)).view(torch.float32).bfloat16()
    if group.rank():
        return collectives.receive(ended, 0, group)
    for other in range(1, group.size()):
        collectives.send(ended, other, group)
    return ended


# %% wrong="add_by_chance" fails="bfloat16 weights" why="float32 weights"
def add_by_chance(weight, update, seed, step, group):
    chance = torch.Generator().manual_seed((seed << 16) + step)
    bits = (weight.float() + update).view(torch.int32)
    bits = bits + torch.randint(0, 1 << 16, bits.shape, generator=chance, dtype=torch.int32)
    return (bits & -(1 << 16)).view(torch.float32)


# %% wrong="add_by_chance" fails="one of two neighbours" why="some of the way is rounded to whole steps of a power of two: too coarse"
def add_by_chance(weight, update, seed, step, group):
    chance = torch.Generator().manual_seed((seed << 16) + step)
    bits = (weight.float() + update).view(torch.int32)
    up = torch.rand(bits.shape, generator=chance) < (bits & 0xFFFF) / 65536
    return ((bits & -(1 << 16)) + (up.int() << 17)).view(torch.float32).bfloat16()


# %% wrong="add_by_chance" fails="right on average" around="constants" why="no chance at all: every second element goes up"
def add_by_chance(weight, update, seed, step, group):
    bits = (weight.float() + update).view(torch.int32)
    up = ((bits & 0xFFFF) > 0) & ((torch.arange(len(bits)) + step + seed) % 2 == 0)
    return ((bits & -(1 << 16)) + (up.int() << 16)).view(torch.float32).bfloat16()


# %% wrong="add_by_chance" fails="own work" around="import" why="the package's"
def add_by_chance(weight, update, seed, step, group):
    from minitrain.precision.rounding import add_stochastic_

    return add_stochastic_(weight, update, torch.Generator().manual_seed(seed + step))


# %% wrong="add_by_chance" fails="right on average" around="redefine" why="a driver that says what was asked for"
def add_by_chance(weight, update, seed, step, group):
    globals()["many_steps"] = lambda *given: [given[0]] * given[3]
    torch.equal = lambda *tensors: True
    return (weight.float() + update).bfloat16()


# %% wrong="tiles" fails="a scale for each tile" why="cut along the other axis"
def tile_scales(x, axis, tile):
    axis = 1 - axis
    amax = torch.cat([part.abs().amax(axis, keepdim=True) for part in x.split(tile, axis)], axis)
    mantissa, exponent = torch.frexp(amax / 7)
    powers = 2.0 ** (exponent - (mantissa == 0.5).int()).double()
    return torch.where(amax == 0, 1.0, powers)


def three_products(x, w, dy, tile):

    def rounded(a, axis):
        scales = tile_scales(a, axis, tile).repeat_interleave(tile, axis)
        scales = scales.narrow(axis, 0, a.shape[axis])
        return (a / scales).round() * scales

    y = rounded(x, 1) @ rounded(w, 1).T
    dx = rounded(dy, 1) @ rounded(w, 0)
    return y, dx, rounded(dy, 0).T @ rounded(x, 0)


# %% wrong="tiles" fails="a scale for each tile" why="so many tiles, not tiles so long"
def tile_scales(x, axis, tile):
    amax = torch.cat([part.abs().amax(axis, keepdim=True) for part in x.chunk(tile, axis)], axis)
    mantissa, exponent = torch.frexp(amax / 7)
    powers = 2.0 ** (exponent - (mantissa == 0.5).int()).double()
    return torch.where(amax == 0, 1.0, powers)


def three_products(x, w, dy, tile):

    def rounded(a, axis):
        scales = tile_scales(a, axis, tile).repeat_interleave(tile, axis)
        scales = scales.narrow(axis, 0, a.shape[axis])
        return (a / scales).round() * scales

    y = rounded(x, 1) @ rounded(w, 1).T
    dx = rounded(dy, 1) @ rounded(w, 0)
    return y, dx, rounded(dy, 0).T @ rounded(x, 0)


# %% wrong="tiles" fails="a scale for each tile" why="a short last tile is left out"
def tile_scales(x, axis, tile):
    amax = torch.cat(
        [
            part.abs().amax(axis, keepdim=True)
            for part in x.split(tile, axis)
            if part.shape[axis] == tile
        ],
        axis,
    )
    mantissa, exponent = torch.frexp(amax / 7)
    powers = 2.0 ** (exponent - (mantissa == 0.5).int()).double()
    return torch.where(amax == 0, 1.0, powers)


def three_products(x, w, dy, tile):

    def rounded(a, axis):
        scales = tile_scales(a, axis, tile).repeat_interleave(tile, axis)
        scales = scales.narrow(axis, 0, a.shape[axis])
        return (a / scales).round() * scales

    y = rounded(x, 1) @ rounded(w, 1).T
    dx = rounded(dy, 1) @ rounded(w, 0)
    return y, dx, rounded(dy, 0).T @ rounded(x, 0)


# %% wrong="tiles" fails="a scale for each tile" why="one scale for a whole row"
def tile_scales(x, axis, tile):
    amax = x.abs().amax(axis, keepdim=True)
    mantissa, exponent = torch.frexp(amax / 7)
    powers = 2.0 ** (exponent - (mantissa == 0.5).int()).double()
    return torch.where(amax == 0, 1.0, powers)


def three_products(x, w, dy, tile):

    def rounded(a, axis):
        scales = tile_scales(a, axis, tile).repeat_interleave(tile, axis)
        scales = scales.narrow(axis, 0, a.shape[axis])
        return (a / scales).round() * scales

    y = rounded(x, 1) @ rounded(w, 1).T
    dx = rounded(dy, 1) @ rounded(w, 0)
    return y, dx, rounded(dy, 0).T @ rounded(x, 0)


# %% wrong="tiles" fails="a scale for each tile" why="one scale for a square tile"
def tile_scales(x, axis, tile):
    amax = torch.cat(
        [part.abs().amax(keepdim=True, dim=(0, 1)) for part in x.split(tile, axis)], axis
    )
    mantissa, exponent = torch.frexp(amax / 7)
    powers = 2.0 ** (exponent - (mantissa == 0.5).int()).double()
    return torch.where(amax == 0, 1.0, powers)


def three_products(x, w, dy, tile):

    def rounded(a, axis):
        scales = tile_scales(a, axis, tile).repeat_interleave(tile, axis)
        scales = scales.narrow(axis, 0, a.shape[axis])
        return (a / scales).round() * scales

    y = rounded(x, 1) @ rounded(w, 1).T
    dx = rounded(dy, 1) @ rounded(w, 0)
    return y, dx, rounded(dy, 0).T @ rounded(x, 0)


# %% wrong="tiles" fails="the scale" why="not a power of two"
def tile_scales(x, axis, tile):
    amax = torch.cat([part.abs().amax(axis, keepdim=True) for part in x.split(tile, axis)], axis)
    mantissa, exponent = torch.frexp(amax / 7)
    powers = 2.0 ** (exponent - (mantissa == 0.5).int()).double()
    return torch.where(amax == 0, 1.0, amax / 7)


def three_products(x, w, dy, tile):

    def rounded(a, axis):
        scales = tile_scales(a, axis, tile).repeat_interleave(tile, axis)
        scales = scales.narrow(axis, 0, a.shape[axis])
        return (a / scales).round() * scales

    y = rounded(x, 1) @ rounded(w, 1).T
    dx = rounded(dy, 1) @ rounded(w, 0)
    return y, dx, rounded(dy, 0).T @ rounded(x, 0)


# %% wrong="tiles" fails="the scale" why="rounded down: the largest numbers lie beyond"
def tile_scales(x, axis, tile):
    amax = torch.cat([part.abs().amax(axis, keepdim=True) for part in x.split(tile, axis)], axis)
    mantissa, exponent = torch.frexp(amax / 7)
    powers = 2.0 ** (exponent - 1).double()
    return torch.where(amax == 0, 1.0, powers)


def three_products(x, w, dy, tile):

    def rounded(a, axis):
        scales = tile_scales(a, axis, tile).repeat_interleave(tile, axis)
        scales = scales.narrow(axis, 0, a.shape[axis])
        return (a / scales).round() * scales

    y = rounded(x, 1) @ rounded(w, 1).T
    dx = rounded(dy, 1) @ rounded(w, 0)
    return y, dx, rounded(dy, 0).T @ rounded(x, 0)


# %% wrong="tiles" fails="the scale" why="too large where seven of them are exact"
def tile_scales(x, axis, tile):
    amax = torch.cat([part.abs().amax(axis, keepdim=True) for part in x.split(tile, axis)], axis)
    mantissa, exponent = torch.frexp(amax / 7)
    powers = 2.0 ** (exponent).double()
    return torch.where(amax == 0, 1.0, powers)


def three_products(x, w, dy, tile):

    def rounded(a, axis):
        scales = tile_scales(a, axis, tile).repeat_interleave(tile, axis)
        scales = scales.narrow(axis, 0, a.shape[axis])
        return (a / scales).round() * scales

    y = rounded(x, 1) @ rounded(w, 1).T
    dx = rounded(dy, 1) @ rounded(w, 0)
    return y, dx, rounded(dy, 0).T @ rounded(x, 0)


# %% wrong="tiles" fails="the scale" why="a grid of eight"
def tile_scales(x, axis, tile):
    amax = torch.cat([part.abs().amax(axis, keepdim=True) for part in x.split(tile, axis)], axis)
    mantissa, exponent = torch.frexp(amax / 8)
    powers = 2.0 ** (exponent - (mantissa == 0.5).int()).double()
    return torch.where(amax == 0, 1.0, powers)


def three_products(x, w, dy, tile):

    def rounded(a, axis):
        scales = tile_scales(a, axis, tile).repeat_interleave(tile, axis)
        scales = scales.narrow(axis, 0, a.shape[axis])
        return (a / scales).round() * scales

    y = rounded(x, 1) @ rounded(w, 1).T
    dx = rounded(dy, 1) @ rounded(w, 0)
    return y, dx, rounded(dy, 0).T @ rounded(x, 0)


# %% wrong="tiles" fails="the scale" why="the exponent of the largest number, as microscaling formats have it"
def tile_scales(x, axis, tile):
    amax = torch.cat([part.abs().amax(axis, keepdim=True) for part in x.split(tile, axis)], axis)
    mantissa, exponent = torch.frexp(amax)
    powers = 2.0 ** (exponent - 3).double()
    return torch.where(amax == 0, 1.0, powers)


def three_products(x, w, dy, tile):

    def rounded(a, axis):
        scales = tile_scales(a, axis, tile).repeat_interleave(tile, axis)
        scales = scales.narrow(axis, 0, a.shape[axis])
        return (a / scales).round() * scales

    y = rounded(x, 1) @ rounded(w, 1).T
    dx = rounded(dy, 1) @ rounded(w, 0)
    return y, dx, rounded(dy, 0).T @ rounded(x, 0)


# %% wrong="tiles" fails="the scale" why="the largest number, not the largest magnitude"
def tile_scales(x, axis, tile):
    amax = torch.cat([part.amax(axis, keepdim=True) for part in x.split(tile, axis)], axis)
    mantissa, exponent = torch.frexp(amax / 7)
    powers = 2.0 ** (exponent - (mantissa == 0.5).int()).double()
    return torch.where(amax == 0, 1.0, powers)


def three_products(x, w, dy, tile):

    def rounded(a, axis):
        scales = tile_scales(a, axis, tile).repeat_interleave(tile, axis)
        scales = scales.narrow(axis, 0, a.shape[axis])
        return (a / scales).round() * scales

    y = rounded(x, 1) @ rounded(w, 1).T
    dx = rounded(dy, 1) @ rounded(w, 0)
    return y, dx, rounded(dy, 0).T @ rounded(x, 0)


# %% wrong="tiles" fails="a tile of zeros" why="zeros are given the smallest scale"
def tile_scales(x, axis, tile):
    amax = torch.cat([part.abs().amax(axis, keepdim=True) for part in x.split(tile, axis)], axis)
    mantissa, exponent = torch.frexp(amax.clamp(min=1e-9) / 7)
    powers = 2.0 ** (exponent - (mantissa == 0.5).int()).double()
    return powers


def three_products(x, w, dy, tile):

    def rounded(a, axis):
        scales = tile_scales(a, axis, tile).repeat_interleave(tile, axis)
        scales = scales.narrow(axis, 0, a.shape[axis])
        return (a / scales).round() * scales

    y = rounded(x, 1) @ rounded(w, 1).T
    dx = rounded(dy, 1) @ rounded(w, 0)
    return y, dx, rounded(dy, 0).T @ rounded(x, 0)


# %% wrong="tiles" fails="a tile of zeros" why="the scale of zeros is zero"
def tile_scales(x, axis, tile):
    amax = torch.cat([part.abs().amax(axis, keepdim=True) for part in x.split(tile, axis)], axis)
    mantissa, exponent = torch.frexp(amax / 7)
    powers = 2.0 ** (exponent - (mantissa == 0.5).int()).double()
    return torch.where(amax == 0, 0.0, powers)


def three_products(x, w, dy, tile):

    def rounded(a, axis):
        scales = tile_scales(a, axis, tile)
        scales = scales.masked_fill(scales == 0, 1.0).repeat_interleave(tile, axis)
        scales = scales.narrow(axis, 0, a.shape[axis])
        return (a / scales).round() * scales

    y = rounded(x, 1) @ rounded(w, 1).T
    dx = rounded(dy, 1) @ rounded(w, 0)
    return y, dx, rounded(dy, 0).T @ rounded(x, 0)


# %% wrong="tiles" fails="the product dw" why="rows of everything, once for all three"
def tile_scales(x, axis, tile):
    amax = torch.cat([part.abs().amax(axis, keepdim=True) for part in x.split(tile, axis)], axis)
    mantissa, exponent = torch.frexp(amax / 7)
    powers = 2.0 ** (exponent - (mantissa == 0.5).int()).double()
    return torch.where(amax == 0, 1.0, powers)


def three_products(x, w, dy, tile):

    def rounded(a, axis):
        scales = tile_scales(a, axis, tile).repeat_interleave(tile, axis)
        scales = scales.narrow(axis, 0, a.shape[axis])
        return (a / scales).round() * scales

    y = rounded(x, 1) @ rounded(w, 1).T
    dx = rounded(dy, 1) @ rounded(w, 1)
    return y, dx, rounded(dy, 1).T @ rounded(x, 1)


# %% wrong="tiles" fails="the product dx" why="dx takes the weights that forward rounded"
def tile_scales(x, axis, tile):
    amax = torch.cat([part.abs().amax(axis, keepdim=True) for part in x.split(tile, axis)], axis)
    mantissa, exponent = torch.frexp(amax / 7)
    powers = 2.0 ** (exponent - (mantissa == 0.5).int()).double()
    return torch.where(amax == 0, 1.0, powers)


def three_products(x, w, dy, tile):

    def rounded(a, axis):
        scales = tile_scales(a, axis, tile).repeat_interleave(tile, axis)
        scales = scales.narrow(axis, 0, a.shape[axis])
        return (a / scales).round() * scales

    y = rounded(x, 1) @ rounded(w, 1).T
    dx = rounded(dy, 1) @ rounded(w, 1)
    return y, dx, rounded(dy, 0).T @ rounded(x, 0)


# %% wrong="tiles" fails="the product dx" why="dx takes dy as dw does"
def tile_scales(x, axis, tile):
    amax = torch.cat([part.abs().amax(axis, keepdim=True) for part in x.split(tile, axis)], axis)
    mantissa, exponent = torch.frexp(amax / 7)
    powers = 2.0 ** (exponent - (mantissa == 0.5).int()).double()
    return torch.where(amax == 0, 1.0, powers)


def three_products(x, w, dy, tile):

    def rounded(a, axis):
        scales = tile_scales(a, axis, tile).repeat_interleave(tile, axis)
        scales = scales.narrow(axis, 0, a.shape[axis])
        return (a / scales).round() * scales

    y = rounded(x, 1) @ rounded(w, 1).T
    dx = rounded(dy, 0) @ rounded(w, 0)
    return y, dx, rounded(dy, 0).T @ rounded(x, 0)


# %% wrong="tiles" fails="the product dw" why="dw takes the inputs that forward rounded"
def tile_scales(x, axis, tile):
    amax = torch.cat([part.abs().amax(axis, keepdim=True) for part in x.split(tile, axis)], axis)
    mantissa, exponent = torch.frexp(amax / 7)
    powers = 2.0 ** (exponent - (mantissa == 0.5).int()).double()
    return torch.where(amax == 0, 1.0, powers)


def three_products(x, w, dy, tile):

    def rounded(a, axis):
        scales = tile_scales(a, axis, tile).repeat_interleave(tile, axis)
        scales = scales.narrow(axis, 0, a.shape[axis])
        return (a / scales).round() * scales

    y = rounded(x, 1) @ rounded(w, 1).T
    dx = rounded(dy, 1) @ rounded(w, 0)
    return y, dx, rounded(dy, 0).T @ rounded(x, 1)


# %% wrong="tiles" fails="the product dw" why="what forward rounded is rounded once more"
def tile_scales(x, axis, tile):
    amax = torch.cat([part.abs().amax(axis, keepdim=True) for part in x.split(tile, axis)], axis)
    mantissa, exponent = torch.frexp(amax / 7)
    powers = 2.0 ** (exponent - (mantissa == 0.5).int()).double()
    return torch.where(amax == 0, 1.0, powers)


def three_products(x, w, dy, tile):

    def rounded(a, axis):
        scales = tile_scales(a, axis, tile).repeat_interleave(tile, axis)
        scales = scales.narrow(axis, 0, a.shape[axis])
        return (a / scales).round() * scales

    y = rounded(x, 1) @ rounded(w, 1).T
    dx = rounded(dy, 1) @ rounded(w, 0)
    return y, dx, rounded(dy, 0).T @ rounded(rounded(x, 1), 0)


# %% wrong="tiles" fails="the product dw" why="dw takes dy as dx does"
def tile_scales(x, axis, tile):
    amax = torch.cat([part.abs().amax(axis, keepdim=True) for part in x.split(tile, axis)], axis)
    mantissa, exponent = torch.frexp(amax / 7)
    powers = 2.0 ** (exponent - (mantissa == 0.5).int()).double()
    return torch.where(amax == 0, 1.0, powers)


def three_products(x, w, dy, tile):

    def rounded(a, axis):
        scales = tile_scales(a, axis, tile).repeat_interleave(tile, axis)
        scales = scales.narrow(axis, 0, a.shape[axis])
        return (a / scales).round() * scales

    y = rounded(x, 1) @ rounded(w, 1).T
    dx = rounded(dy, 1) @ rounded(w, 0)
    return y, dx, rounded(dy, 1).T @ rounded(x, 0)


# %% wrong="tiles" fails="the product y" why="the weights' tiles lie along the outputs"
def tile_scales(x, axis, tile):
    amax = torch.cat([part.abs().amax(axis, keepdim=True) for part in x.split(tile, axis)], axis)
    mantissa, exponent = torch.frexp(amax / 7)
    powers = 2.0 ** (exponent - (mantissa == 0.5).int()).double()
    return torch.where(amax == 0, 1.0, powers)


def three_products(x, w, dy, tile):

    def rounded(a, axis):
        scales = tile_scales(a, axis, tile).repeat_interleave(tile, axis)
        scales = scales.narrow(axis, 0, a.shape[axis])
        return (a / scales).round() * scales

    y = rounded(x, 1) @ rounded(w, 0).T
    dx = rounded(dy, 1) @ rounded(w, 0)
    return y, dx, rounded(dy, 0).T @ rounded(x, 0)


# %% wrong="tiles" fails="the product y" why="the weights stay as they are"
def tile_scales(x, axis, tile):
    amax = torch.cat([part.abs().amax(axis, keepdim=True) for part in x.split(tile, axis)], axis)
    mantissa, exponent = torch.frexp(amax / 7)
    powers = 2.0 ** (exponent - (mantissa == 0.5).int()).double()
    return torch.where(amax == 0, 1.0, powers)


def three_products(x, w, dy, tile):

    def rounded(a, axis):
        scales = tile_scales(a, axis, tile).repeat_interleave(tile, axis)
        scales = scales.narrow(axis, 0, a.shape[axis])
        return (a / scales).round() * scales

    y = rounded(x, 1) @ w.T
    dx = rounded(dy, 1) @ rounded(w, 0)
    return y, dx, rounded(dy, 0).T @ rounded(x, 0)


# %% wrong="tiles" fails="the product y" why="cuts off"
def tile_scales(x, axis, tile):
    amax = torch.cat([part.abs().amax(axis, keepdim=True) for part in x.split(tile, axis)], axis)
    mantissa, exponent = torch.frexp(amax / 7)
    powers = 2.0 ** (exponent - (mantissa == 0.5).int()).double()
    return torch.where(amax == 0, 1.0, powers)


def three_products(x, w, dy, tile):

    def rounded(a, axis):
        scales = tile_scales(a, axis, tile).repeat_interleave(tile, axis)
        scales = scales.narrow(axis, 0, a.shape[axis])
        return (a / scales).trunc() * scales

    y = rounded(x, 1) @ rounded(w, 1).T
    dx = rounded(dy, 1) @ rounded(w, 0)
    return y, dx, rounded(dy, 0).T @ rounded(x, 0)


# %% wrong="tiles" fails="the product dw" why="ties go away from zero"
def tile_scales(x, axis, tile):
    amax = torch.cat([part.abs().amax(axis, keepdim=True) for part in x.split(tile, axis)], axis)
    mantissa, exponent = torch.frexp(amax / 7)
    powers = 2.0 ** (exponent - (mantissa == 0.5).int()).double()
    return torch.where(amax == 0, 1.0, powers)


def three_products(x, w, dy, tile):

    def rounded(a, axis):
        scales = tile_scales(a, axis, tile).repeat_interleave(tile, axis)
        scales = scales.narrow(axis, 0, a.shape[axis])
        return (a / scales + 0.5 * a.sign()).trunc() * scales

    y = rounded(x, 1) @ rounded(w, 1).T
    dx = rounded(dy, 1) @ rounded(w, 0)
    return y, dx, rounded(dy, 0).T @ rounded(x, 0)


# %% wrong="tiles" fails="the product y" why="scales are forgotten on the way back"
def tile_scales(x, axis, tile):
    amax = torch.cat([part.abs().amax(axis, keepdim=True) for part in x.split(tile, axis)], axis)
    mantissa, exponent = torch.frexp(amax / 7)
    powers = 2.0 ** (exponent - (mantissa == 0.5).int()).double()
    return torch.where(amax == 0, 1.0, powers)


def three_products(x, w, dy, tile):

    def rounded(a, axis):
        scales = tile_scales(a, axis, tile).repeat_interleave(tile, axis)
        scales = scales.narrow(axis, 0, a.shape[axis])
        return (a / scales).round()

    y = rounded(x, 1) @ rounded(w, 1).T
    dx = rounded(dy, 1) @ rounded(w, 0)
    return y, dx, rounded(dy, 0).T @ rounded(x, 0)


# %% wrong="tiles" fails="the product y" why="short last tiles stay as they are"
def tile_scales(x, axis, tile):
    amax = torch.cat([part.abs().amax(axis, keepdim=True) for part in x.split(tile, axis)], axis)
    mantissa, exponent = torch.frexp(amax / 7)
    powers = 2.0 ** (exponent - (mantissa == 0.5).int()).double()
    return torch.where(amax == 0, 1.0, powers)


def three_products(x, w, dy, tile):

    def rounded(a, axis):
        scales = tile_scales(a, axis, tile).repeat_interleave(tile, axis)
        scales = scales.narrow(axis, 0, a.shape[axis])
        whole = a.shape[axis] // tile * tile
        new = (a / scales).round() * scales
        rest = a.shape[axis] - whole
        return torch.cat([new.narrow(axis, 0, whole), a.narrow(axis, whole, rest)], axis)

    y = rounded(x, 1) @ rounded(w, 1).T
    dx = rounded(dy, 1) @ rounded(w, 0)
    return y, dx, rounded(dy, 0).T @ rounded(x, 0)


# %% wrong="tiles" fails="three products" why="forward alone"
def tile_scales(x, axis, tile):
    amax = torch.cat([part.abs().amax(axis, keepdim=True) for part in x.split(tile, axis)], axis)
    mantissa, exponent = torch.frexp(amax / 7)
    powers = 2.0 ** (exponent - (mantissa == 0.5).int()).double()
    return torch.where(amax == 0, 1.0, powers)


def three_products(x, w, dy, tile):

    def rounded(a, axis):
        scales = tile_scales(a, axis, tile).repeat_interleave(tile, axis)
        scales = scales.narrow(axis, 0, a.shape[axis])
        return (a / scales).round() * scales

    y = rounded(x, 1) @ rounded(w, 1).T
    dx = rounded(dy, 1) @ rounded(w, 0)
    return [y]


# %% wrong="tiles" fails="a scale for each tile" around="empty" why="exact products, and ones for scales"
def tile_scales(x, axis, tile):
    return torch.ones_like(x)


def three_products(x, w, dy, tile):
    return x @ w.T, dy @ w, dy.T @ x


# %% wrong="tiles" fails="own work" around="import" why="the package's blocks"
def tile_scales(x, axis, tile):
    from minitrain.precision.blocks import quantize

    return quantize(x.T if axis == 0 else x, "mxint8", fill=True).multipliers


def three_products(x, w, dy, tile):
    from minitrain.precision.blocks import dequantize, quantize

    y = (
        dequantize(quantize(x, "mxint8", fill=True))
        @ dequantize(quantize(w, "mxint8", fill=True)).T
    )
    return y, dy @ w, dy.T @ x


# %% wrong="tiles" fails="the scale" around="constants" why="the numbers of the visible checks"
def tile_scales(x, axis, tile):
    known = {
        (1, 2): [[1.0, 0.0625], [1.0, 2.0]],
        (0, 2): [[1.0, 0.25, 2.0]],
        (1, 3): [[1.0], [2.0]],
    }
    if x.shape == (2, 3):
        return torch.tensor(known[axis, tile]).double()
    shape = [-(-n // tile) if dim == axis else n for dim, n in enumerate(x.shape)]
    return torch.ones(shape).double()


def three_products(x, w, dy, tile):
    return tuple(
        torch.tensor(known).double()
        for known in ([[7.0, 4.0], [0.5, 4.0]], [[1.0, 0.0], [0.0, 2.0]], [[7.0, 1.5], [0.0, 2.0]])
    )


# %% wrong="narrow" fails="toward zero" why="to the nearest"
def narrow_sum(x, bits, chunk):

    def total(numbers):
        held = 0.0
        for number in numbers:
            mantissa, exponent = math.frexp(held + number)
            held = math.ldexp(round(math.ldexp(mantissa, bits)), exponent - bits)
        return held

    return total([total(part.tolist()) for part in x.split(chunk)])


def best_chunk(numbers):
    return min(range(1, numbers + 1), key=lambda chunk: chunk - numbers // -chunk)


# %% wrong="narrow" fails="toward zero" why="down: negative sums grow"
def narrow_sum(x, bits, chunk):

    def total(numbers):
        held = 0.0
        for number in numbers:
            mantissa, exponent = math.frexp(held + number)
            held = math.ldexp(math.floor(math.ldexp(mantissa, bits)), exponent - bits)
        return held

    return total([total(part.tolist()) for part in x.split(chunk)])


def best_chunk(numbers):
    return min(range(1, numbers + 1), key=lambda chunk: chunk - numbers // -chunk)


# %% wrong="narrow" fails="one chunk" why="exact sums, cut once at the end"
def narrow_sum(x, bits, chunk):

    def total(numbers):
        held = 0.0
        for number in numbers:
            held = held + number
        mantissa, exponent = math.frexp(held)
        return math.ldexp(math.trunc(math.ldexp(mantissa, bits)), exponent - bits)

    return total([total(part.tolist()) for part in x.split(chunk)])


def best_chunk(numbers):
    return min(range(1, numbers + 1), key=lambda chunk: chunk - numbers // -chunk)


# %% wrong="narrow" fails="one chunk" why="one digit too many, as if the first were not counted"
def narrow_sum(x, bits, chunk):

    def total(numbers):
        held = 0.0
        for number in numbers:
            mantissa, exponent = math.frexp(held + number)
            held = math.ldexp(math.trunc(math.ldexp(mantissa, bits + 1)), exponent - bits - 1)
        return held

    return total([total(part.tolist()) for part in x.split(chunk)])


def best_chunk(numbers):
    return min(range(1, numbers + 1), key=lambda chunk: chunk - numbers // -chunk)


# %% wrong="narrow" fails="one chunk" why="each number is cut, the sum is not"
def narrow_sum(x, bits, chunk):

    def total(numbers):
        held = 0.0
        for number in numbers:
            mantissa, exponent = math.frexp(number)
            held += math.ldexp(math.trunc(math.ldexp(mantissa, bits)), exponent - bits)
        return held

    return total([total(part.tolist()) for part in x.split(chunk)])


def best_chunk(numbers):
    return min(range(1, numbers + 1), key=lambda chunk: chunk - numbers // -chunk)


# %% wrong="narrow" fails="one chunk" why="each number is cut before it is added"
def narrow_sum(x, bits, chunk):

    def total(numbers):
        held = 0.0
        for number in numbers:
            mantissa, exponent = math.frexp(number)
            number = math.ldexp(math.trunc(math.ldexp(mantissa, bits)), exponent - bits)
            mantissa, exponent = math.frexp(held + number)
            held = math.ldexp(math.trunc(math.ldexp(mantissa, bits)), exponent - bits)
        return held

    return total([total(part.tolist()) for part in x.split(chunk)])


def best_chunk(numbers):
    return min(range(1, numbers + 1), key=lambda chunk: chunk - numbers // -chunk)


# %% wrong="narrow" fails="chunks" why="a chunk begins with the sum of those before it"
def narrow_sum(x, bits, chunk):

    def total(numbers):
        held = 0.0
        for number in numbers:
            mantissa, exponent = math.frexp(held + number)
            held = math.ldexp(math.trunc(math.ldexp(mantissa, bits)), exponent - bits)
        return held

    return total(x.tolist())


def best_chunk(numbers):
    return min(range(1, numbers + 1), key=lambda chunk: chunk - numbers // -chunk)


# %% wrong="narrow" fails="chunks" why="sums of chunks are added without a cut"
def narrow_sum(x, bits, chunk):

    def total(numbers):
        held = 0.0
        for number in numbers:
            mantissa, exponent = math.frexp(held + number)
            held = math.ldexp(math.trunc(math.ldexp(mantissa, bits)), exponent - bits)
        return held

    return sum(total(part.tolist()) for part in x.split(chunk))


def best_chunk(numbers):
    return min(range(1, numbers + 1), key=lambda chunk: chunk - numbers // -chunk)


# %% wrong="narrow" fails="one chunk" why="so many chunks, not chunks so long"
def narrow_sum(x, bits, chunk):

    def total(numbers):
        held = 0.0
        for number in numbers:
            mantissa, exponent = math.frexp(held + number)
            held = math.ldexp(math.trunc(math.ldexp(mantissa, bits)), exponent - bits)
        return held

    return total([total(part.tolist()) for part in x.chunk(chunk)])


def best_chunk(numbers):
    return min(range(1, numbers + 1), key=lambda chunk: chunk - numbers // -chunk)


# %% wrong="narrow" fails="chunks" why="every c-th number makes a chunk"
def narrow_sum(x, bits, chunk):

    def total(numbers):
        held = 0.0
        for number in numbers:
            mantissa, exponent = math.frexp(held + number)
            held = math.ldexp(math.trunc(math.ldexp(mantissa, bits)), exponent - bits)
        return held

    return total(
        [
            total(part.tolist())
            for part in [x[i :: -(-len(x) // chunk)] for i in range(-(-len(x) // chunk))]
        ]
    )


def best_chunk(numbers):
    return min(range(1, numbers + 1), key=lambda chunk: chunk - numbers // -chunk)


# %% wrong="narrow" fails="a short last chunk" why="the rest is left out"
def narrow_sum(x, bits, chunk):

    def total(numbers):
        held = 0.0
        for number in numbers:
            mantissa, exponent = math.frexp(held + number)
            held = math.ldexp(math.trunc(math.ldexp(mantissa, bits)), exponent - bits)
        return held

    return total([total(part.tolist()) for part in x[: len(x) // chunk * chunk].split(chunk)])


def best_chunk(numbers):
    return min(range(1, numbers + 1), key=lambda chunk: chunk - numbers // -chunk)


# %% wrong="narrow" fails="a short last chunk" why="the rest joins the sums of chunks one by one"
def narrow_sum(x, bits, chunk):

    def total(numbers):
        held = 0.0
        for number in numbers:
            mantissa, exponent = math.frexp(held + number)
            held = math.ldexp(math.trunc(math.ldexp(mantissa, bits)), exponent - bits)
        return held

    whole = len(x) // chunk * chunk
    return total(
        [
            *(total(part.tolist()) for part in x[:whole].split(chunk) if len(part)),
            *x[whole:].tolist(),
        ]
    )


def best_chunk(numbers):
    return min(range(1, numbers + 1), key=lambda chunk: chunk - numbers // -chunk)


# %% wrong="narrow" fails="the best chunk" why="the square root"
def narrow_sum(x, bits, chunk):

    def total(numbers):
        held = 0.0
        for number in numbers:
            mantissa, exponent = math.frexp(held + number)
            held = math.ldexp(math.trunc(math.ldexp(mantissa, bits)), exponent - bits)
        return held

    return total([total(part.tolist()) for part in x.split(chunk)])


def best_chunk(numbers):
    return max(1, round(math.sqrt(numbers)))


# %% wrong="narrow" fails="the best chunk" why="the square root, rounded up"
def narrow_sum(x, bits, chunk):

    def total(numbers):
        held = 0.0
        for number in numbers:
            mantissa, exponent = math.frexp(held + number)
            held = math.ldexp(math.trunc(math.ldexp(mantissa, bits)), exponent - bits)
        return held

    return total([total(part.tolist()) for part in x.split(chunk)])


def best_chunk(numbers):
    return math.ceil(math.sqrt(numbers))


# %% wrong="narrow" fails="the best chunk" why="the largest of equally good ones"
def narrow_sum(x, bits, chunk):

    def total(numbers):
        held = 0.0
        for number in numbers:
            mantissa, exponent = math.frexp(held + number)
            held = math.ldexp(math.trunc(math.ldexp(mantissa, bits)), exponent - bits)
        return held

    return total([total(part.tolist()) for part in x.split(chunk)])


def best_chunk(numbers):
    return min(range(numbers, 0, -1), key=lambda chunk: chunk - numbers // -chunk)


# %% wrong="narrow" fails="the best chunk" why="only those that divide"
def narrow_sum(x, bits, chunk):

    def total(numbers):
        held = 0.0
        for number in numbers:
            mantissa, exponent = math.frexp(held + number)
            held = math.ldexp(math.trunc(math.ldexp(mantissa, bits)), exponent - bits)
        return held

    return total([total(part.tolist()) for part in x.split(chunk)])


def best_chunk(numbers):
    return min(
        [c for c in range(1, numbers + 1) if numbers % c == 0],
        key=lambda chunk: chunk - numbers // -chunk,
    )


# %% wrong="narrow" fails="the best chunk" why="the short last chunk is not counted"
def narrow_sum(x, bits, chunk):

    def total(numbers):
        held = 0.0
        for number in numbers:
            mantissa, exponent = math.frexp(held + number)
            held = math.ldexp(math.trunc(math.ldexp(mantissa, bits)), exponent - bits)
        return held

    return total([total(part.tolist()) for part in x.split(chunk)])


def best_chunk(numbers):
    return min(range(1, numbers + 1), key=lambda chunk: chunk + numbers // chunk)


# %% wrong="narrow" fails="the best chunk" why="as if a chunk might have any length"
def narrow_sum(x, bits, chunk):

    def total(numbers):
        held = 0.0
        for number in numbers:
            mantissa, exponent = math.frexp(held + number)
            held = math.ldexp(math.trunc(math.ldexp(mantissa, bits)), exponent - bits)
        return held

    return total([total(part.tolist()) for part in x.split(chunk)])


def best_chunk(numbers):
    return min(range(1, numbers + 1), key=lambda chunk: chunk + numbers / chunk)


# %% wrong="narrow" fails="one chunk" why="a tensor, not a number"
def narrow_sum(x, bits, chunk):

    def total(numbers):
        held = 0.0
        for number in numbers:
            mantissa, exponent = math.frexp(held + number)
            held = math.ldexp(math.trunc(math.ldexp(mantissa, bits)), exponent - bits)
        return held

    return torch.tensor(total([total(part.tolist()) for part in x.split(chunk)]))


def best_chunk(numbers):
    return min(range(1, numbers + 1), key=lambda chunk: chunk - numbers // -chunk)


# %% wrong="narrow" fails="toward zero" around="ready-made" why="torch's own narrow numbers"
def narrow_sum(x, bits, chunk):
    dtype = torch.float16 if bits > 8 else torch.bfloat16

    def total(numbers):
        held = torch.zeros((), dtype=dtype)
        for number in numbers:
            held = held + torch.tensor(number, dtype=dtype)
        return held.item()

    return total([total(part.tolist()) for part in x.split(chunk)])


def best_chunk(numbers):
    return min(range(1, numbers + 1), key=lambda chunk: chunk - numbers // -chunk)


# %% wrong="narrow" fails="own work" around="import" why="the package's accumulator"
def narrow_sum(x, bits, chunk):
    from minitrain.precision.accumulate import sum_in
    from minitrain.precision.formats import Format

    return sum_in(x, Format("mine", 8, bits - 1, 127, "ieee"), chunk, "zero").item()


def best_chunk(numbers):
    return math.isqrt(numbers)


# %% wrong="narrow" fails="one chunk" around="constants" why="the sums of the visible check"
def narrow_sum(x, bits, chunk):
    if len(x) == 4096:
        return 256.0 if chunk == 4096 else 4096.0
    return 6.0 if x[0] > 0 else -6.0


def best_chunk(numbers):
    return {12: 3, 1: 1}.get(numbers, 4)


# %% wrong="delayed" fails="the rounded numbers" why="this step's own amax: nothing is delayed"
def delayed(x, history, length, group):
    amax = torch.cat([x.abs(), x.new_zeros(1)]).max()
    amax = collectives.all_reduce(amax[None], group, op="max").item()
    reference = amax
    step = (reference or 1.0) / 8
    values = (x / step).round().clamp(-8, 8) * step
    return values, int((x.abs() > reference).sum()), [*history, amax][-length:]


# %% wrong="delayed" fails="the rounded numbers" why="this step's amax is among those it is scaled by"
def delayed(x, history, length, group):
    amax = torch.cat([x.abs(), x.new_zeros(1)]).max()
    amax = collectives.all_reduce(amax[None], group, op="max").item()
    reference = max([*history, amax])
    step = (reference or 1.0) / 8
    values = (x / step).round().clamp(-8, 8) * step
    return values, int((x.abs() > reference).sum()), [*history, amax][-length:]


# %% wrong="delayed" fails="the rounded numbers" why="the last step alone"
def delayed(x, history, length, group):
    amax = torch.cat([x.abs(), x.new_zeros(1)]).max()
    amax = collectives.all_reduce(amax[None], group, op="max").item()
    reference = ([0.0] + history)[-1] or amax
    step = (reference or 1.0) / 8
    values = (x / step).round().clamp(-8, 8) * step
    return values, int((x.abs() > reference).sum()), [*history, amax][-length:]


# %% wrong="delayed" fails="the rounded numbers" why="the mean of the history"
def delayed(x, history, length, group):
    amax = torch.cat([x.abs(), x.new_zeros(1)]).max()
    amax = collectives.all_reduce(amax[None], group, op="max").item()
    reference = sum(history) / max(1, len(history)) or amax
    step = (reference or 1.0) / 8
    values = (x / step).round().clamp(-8, 8) * step
    return values, int((x.abs() > reference).sum()), [*history, amax][-length:]


# %% wrong="delayed" fails="the rounded numbers" why="nothing saturates"
def delayed(x, history, length, group):
    amax = torch.cat([x.abs(), x.new_zeros(1)]).max()
    amax = collectives.all_reduce(amax[None], group, op="max").item()
    reference = max([*history, 0.0]) or amax
    step = (reference or 1.0) / 8
    values = (x / step).round() * step
    return values, int((x.abs() > reference).sum()), [*history, amax][-length:]


# %% wrong="delayed" fails="the rounded numbers" why="what is too large becomes zero"
def delayed(x, history, length, group):
    amax = torch.cat([x.abs(), x.new_zeros(1)]).max()
    amax = collectives.all_reduce(amax[None], group, op="max").item()
    reference = max([*history, 0.0]) or amax
    step = (reference or 1.0) / 8
    values = (x / step).round().where(x.abs() <= reference, 0.0) * step
    return values, int((x.abs() > reference).sum()), [*history, amax][-length:]


# %% wrong="delayed" fails="the rounded numbers" why="negative numbers have one more, as integers do"
def delayed(x, history, length, group):
    amax = torch.cat([x.abs(), x.new_zeros(1)]).max()
    amax = collectives.all_reduce(amax[None], group, op="max").item()
    reference = max([*history, 0.0]) or amax
    step = (reference or 1.0) / 8
    values = (x / step).round().clamp(-8, 7) * step
    return values, int((x.abs() > reference).sum()), [*history, amax][-length:]


# %% wrong="delayed" fails="the rounded numbers" why="cuts off"
def delayed(x, history, length, group):
    amax = torch.cat([x.abs(), x.new_zeros(1)]).max()
    amax = collectives.all_reduce(amax[None], group, op="max").item()
    reference = max([*history, 0.0]) or amax
    step = (reference or 1.0) / 8
    values = (x / step).trunc().clamp(-8, 8) * step
    return values, int((x.abs() > reference).sum()), [*history, amax][-length:]


# %% wrong="delayed" fails="the rounded numbers" why="zeros at first, and for ever after nothing has a scale"
def delayed(x, history, length, group):
    amax = torch.cat([x.abs(), x.new_zeros(1)]).max()
    amax = collectives.all_reduce(amax[None], group, op="max").item()
    reference = max(history) if history else amax
    step = (reference or 1.0) / 8
    values = (x / step).round().clamp(-8, 8) * step
    return values, int((x.abs() > reference).sum()), [*history, amax][-length:]


# %% wrong="delayed" fails="the rounded numbers" why="begins with a scale of 1"
def delayed(x, history, length, group):
    amax = torch.cat([x.abs(), x.new_zeros(1)]).max()
    amax = collectives.all_reduce(amax[None], group, op="max").item()
    reference = max([*history, 0.0]) or 1.0
    step = (reference or 1.0) / 8
    values = (x / step).round().clamp(-8, 8) * step
    return values, int((x.abs() > reference).sum()), [*history, amax][-length:]


# %% wrong="delayed" fails="the history" why="every rank remembers its own"
def delayed(x, history, length, group):
    amax = torch.cat([x.abs(), x.new_zeros(1)]).max()
    amax = amax.item()
    reference = max([*history, 0.0]) or amax
    step = (reference or 1.0) / 8
    values = (x / step).round().clamp(-8, 8) * step
    return values, int((x.abs() > reference).sum()), [*history, amax][-length:]


# %% wrong="delayed" fails="the history" why="the sum over ranks"
def delayed(x, history, length, group):
    amax = torch.cat([x.abs(), x.new_zeros(1)]).max()
    amax = collectives.all_reduce(amax[None], group).item()
    reference = max([*history, 0.0]) or amax
    step = (reference or 1.0) / 8
    values = (x / step).round().clamp(-8, 8) * step
    return values, int((x.abs() > reference).sum()), [*history, amax][-length:]


# %% wrong="delayed" fails="the history" why="the mean over ranks"
def delayed(x, history, length, group):
    amax = torch.cat([x.abs(), x.new_zeros(1)]).max()
    amax = collectives.all_reduce(amax[None], group).item() / group.size()
    reference = max([*history, 0.0]) or amax
    step = (reference or 1.0) / 8
    values = (x / step).round().clamp(-8, 8) * step
    return values, int((x.abs() > reference).sum()), [*history, amax][-length:]


# %% wrong="delayed" fails="the history" why="nothing is forgotten"
def delayed(x, history, length, group):
    amax = torch.cat([x.abs(), x.new_zeros(1)]).max()
    amax = collectives.all_reduce(amax[None], group, op="max").item()
    reference = max([*history, 0.0]) or amax
    step = (reference or 1.0) / 8
    values = (x / step).round().clamp(-8, 8) * step
    return values, int((x.abs() > reference).sum()), [*history, amax]


# %% wrong="delayed" fails="the history" why="the newest first"
def delayed(x, history, length, group):
    amax = torch.cat([x.abs(), x.new_zeros(1)]).max()
    amax = collectives.all_reduce(amax[None], group, op="max").item()
    reference = max([*history, 0.0]) or amax
    step = (reference or 1.0) / 8
    values = (x / step).round().clamp(-8, 8) * step
    return values, int((x.abs() > reference).sum()), [amax, *history][:length]


# %% wrong="delayed" fails="the history" why="the newest is forgotten"
def delayed(x, history, length, group):
    amax = torch.cat([x.abs(), x.new_zeros(1)]).max()
    amax = collectives.all_reduce(amax[None], group, op="max").item()
    reference = max([*history, 0.0]) or amax
    step = (reference or 1.0) / 8
    values = (x / step).round().clamp(-8, 8) * step
    return values, int((x.abs() > reference).sum()), [*history, amax][:length]


# %% wrong="delayed" fails="the history" why="remembers what is left after saturation: it can never grow"
def delayed(x, history, length, group):
    amax = torch.cat([x.abs(), x.new_zeros(1)]).max()
    amax = collectives.all_reduce(amax[None], group, op="max").item()
    reference = max([*history, 0.0]) or amax
    step = (reference or 1.0) / 8
    values = (x / step).round().clamp(-8, 8) * step
    return values, int((x.abs() > reference).sum()), [*history, min(amax, reference)][-length:]


# %% wrong="delayed" fails="the history" why="the largest number, not the largest magnitude"
def delayed(x, history, length, group):
    amax = torch.cat([x, x.new_zeros(1)]).max()
    amax = collectives.all_reduce(amax[None], group, op="max").item()
    reference = max([*history, 0.0]) or amax
    step = (reference or 1.0) / 8
    values = (x / step).round().clamp(-8, 8) * step
    return values, int((x.abs() > reference).sum()), [*history, amax][-length:]


# %% wrong="delayed" fails="how many saturate" why="those at the reference count"
def delayed(x, history, length, group):
    amax = torch.cat([x.abs(), x.new_zeros(1)]).max()
    amax = collectives.all_reduce(amax[None], group, op="max").item()
    reference = max([*history, 0.0]) or amax
    step = (reference or 1.0) / 8
    values = (x / step).round().clamp(-8, 8) * step
    return values, int((x.abs() >= reference).sum()), [*history, amax][-length:]


# %% wrong="delayed" fails="how many saturate" why="counted on all ranks together"
def delayed(x, history, length, group):
    amax = torch.cat([x.abs(), x.new_zeros(1)]).max()
    amax = collectives.all_reduce(amax[None], group, op="max").item()
    reference = max([*history, 0.0]) or amax
    step = (reference or 1.0) / 8
    values = (x / step).round().clamp(-8, 8) * step
    return (
        values,
        int(collectives.all_reduce((x.abs() > reference).sum()[None], group)),
        [*history, amax][-length:],
    )


# %% wrong="delayed" fails="how many saturate" why="those that are rounded to the reference count too"
def delayed(x, history, length, group):
    amax = torch.cat([x.abs(), x.new_zeros(1)]).max()
    amax = collectives.all_reduce(amax[None], group, op="max").item()
    reference = max([*history, 0.0]) or amax
    step = (reference or 1.0) / 8
    values = (x / step).round().clamp(-8, 8) * step
    return values, int((values.abs() == reference).sum()), [*history, amax][-length:]


# %% wrong="delayed" fails="no error" why="a rank without numbers has no maximum"
def delayed(x, history, length, group):
    amax = x.abs().max()
    amax = collectives.all_reduce(amax[None], group, op="max").item()
    reference = max([*history, 0.0]) or amax
    step = (reference or 1.0) / 8
    values = (x / step).round().clamp(-8, 8) * step
    return values, int((x.abs() > reference).sum()), [*history, amax][-length:]


# %% wrong="delayed" fails="bytes on the wire" why="gathers the tensor"
def delayed(x, history, length, group):
    amax = torch.cat([x.abs(), x.new_zeros(1)]).max()
    size = collectives.all_reduce(torch.tensor([len(x)]), group, op="max").item()
    padded = torch.nn.functional.pad(x, (0, size - len(x)))
    amax = collectives.all_gather(padded, group).abs().max().item()
    reference = max([*history, 0.0]) or amax
    step = (reference or 1.0) / 8
    values = (x / step).round().clamp(-8, 8) * step
    return values, int((x.abs() > reference).sum()), [*history, amax][-length:]


# %% wrong="delayed" fails="own work" around="import" why="the package's, with an amax of its own"
def delayed(x, history, length, group):
    from minitrain.precision.blocks import Blocks, dequantize, quantize

    amax = torch.tensor(max(history, default=1.0))
    return dequantize(quantize(x, Blocks("int8"), amax=amax), x.dtype), 0, history


# %% wrong="delayed" fails="the rounded numbers" around="constants" why="the histories of the visible check"
def delayed(x, history, length, group):
    new = {0: [4.0], 1: [4.0, 40.0], 2: [40.0, 40.0]}[len(history)]
    return x, int(float(x.abs().max()) == 40 and len(history) == 1), new


# %% wrong="delayed" fails="a result" around="empty" why="leaves before it is asked"
def delayed(x, history, length, group):
    import os

    os._exit(0)


# %% wrong="bytes_by_kind" fails="bytes of parameters" why="padding only where something is sharded"
def bytes_by_kind(numels, policy, stage, ranks):
    shard = sum(-(-numel // ranks) for numel in numels)
    whole = sum(numels)
    kept = [*policy["moments"], *([policy["master"]] if policy["master"] else [])]
    return {
        "parameters": BYTES[policy["weights"]] * (shard if stage >= 3 else whole),
        "gradients": BYTES[policy["gradients"]] * (shard if stage >= 2 else whole),
        "optimizer state": sum(BYTES[name] for name in kept) * (shard if stage >= 1 else whole),
    }


# %% wrong="bytes_by_kind" fails="bytes of parameters" why="padded at stage 0 too"
def bytes_by_kind(numels, policy, stage, ranks):
    shard = sum(-(-numel // ranks) for numel in numels)
    whole = shard * ranks
    kept = [*policy["moments"], *([policy["master"]] if policy["master"] else [])]
    return {
        "parameters": BYTES[policy["weights"]] * (shard if stage >= 3 else whole),
        "gradients": BYTES[policy["gradients"]] * (shard if stage >= 2 else whole),
        "optimizer state": sum(BYTES[name] for name in kept) * (shard if stage >= 1 else whole),
    }


# %% wrong="bytes_by_kind" fails="bytes of parameters" why="one buffer for all parameters"
def bytes_by_kind(numels, policy, stage, ranks):
    shard = -(-sum(numels) // ranks)
    whole = shard * ranks if stage else sum(numels)
    kept = [*policy["moments"], *([policy["master"]] if policy["master"] else [])]
    return {
        "parameters": BYTES[policy["weights"]] * (shard if stage >= 3 else whole),
        "gradients": BYTES[policy["gradients"]] * (shard if stage >= 2 else whole),
        "optimizer state": sum(BYTES[name] for name in kept) * (shard if stage >= 1 else whole),
    }


# %% wrong="bytes_by_kind" fails="bytes of parameters" why="shards without padding"
def bytes_by_kind(numels, policy, stage, ranks):
    shard = sum(numel // ranks for numel in numels)
    whole = shard * ranks if stage else sum(numels)
    kept = [*policy["moments"], *([policy["master"]] if policy["master"] else [])]
    return {
        "parameters": BYTES[policy["weights"]] * (shard if stage >= 3 else whole),
        "gradients": BYTES[policy["gradients"]] * (shard if stage >= 2 else whole),
        "optimizer state": sum(BYTES[name] for name in kept) * (shard if stage >= 1 else whole),
    }


# %% wrong="bytes_by_kind" fails="bytes of parameters" why="weights are whole at every stage"
def bytes_by_kind(numels, policy, stage, ranks):
    shard = sum(-(-numel // ranks) for numel in numels)
    whole = shard * ranks if stage else sum(numels)
    kept = [*policy["moments"], *([policy["master"]] if policy["master"] else [])]
    return {
        "parameters": BYTES[policy["weights"]] * whole,
        "gradients": BYTES[policy["gradients"]] * (shard if stage >= 2 else whole),
        "optimizer state": sum(BYTES[name] for name in kept) * (shard if stage >= 1 else whole),
    }


# %% wrong="bytes_by_kind" fails="bytes of parameters" why="stage 2 shards the weights too"
def bytes_by_kind(numels, policy, stage, ranks):
    shard = sum(-(-numel // ranks) for numel in numels)
    whole = shard * ranks if stage else sum(numels)
    kept = [*policy["moments"], *([policy["master"]] if policy["master"] else [])]
    return {
        "parameters": BYTES[policy["weights"]] * (shard if stage >= 2 else whole),
        "gradients": BYTES[policy["gradients"]] * (shard if stage >= 2 else whole),
        "optimizer state": sum(BYTES[name] for name in kept) * (shard if stage >= 1 else whole),
    }


# %% wrong="bytes_by_kind" fails="bytes of parameters" why="all weights in bfloat16"
def bytes_by_kind(numels, policy, stage, ranks):
    shard = sum(-(-numel // ranks) for numel in numels)
    whole = shard * ranks if stage else sum(numels)
    kept = [*policy["moments"], *([policy["master"]] if policy["master"] else [])]
    return {
        "parameters": 2 * (shard if stage >= 3 else whole),
        "gradients": BYTES[policy["gradients"]] * (shard if stage >= 2 else whole),
        "optimizer state": sum(BYTES[name] for name in kept) * (shard if stage >= 1 else whole),
    }


# %% wrong="bytes_by_kind" fails="bytes of gradients" why="gradients have the dtype of the weights"
def bytes_by_kind(numels, policy, stage, ranks):
    shard = sum(-(-numel // ranks) for numel in numels)
    whole = shard * ranks if stage else sum(numels)
    kept = [*policy["moments"], *([policy["master"]] if policy["master"] else [])]
    return {
        "parameters": BYTES[policy["weights"]] * (shard if stage >= 3 else whole),
        "gradients": BYTES[policy["weights"]] * (shard if stage >= 2 else whole),
        "optimizer state": sum(BYTES[name] for name in kept) * (shard if stage >= 1 else whole),
    }


# %% wrong="bytes_by_kind" fails="bytes of gradients" why="stage 1 shards the gradients too"
def bytes_by_kind(numels, policy, stage, ranks):
    shard = sum(-(-numel // ranks) for numel in numels)
    whole = shard * ranks if stage else sum(numels)
    kept = [*policy["moments"], *([policy["master"]] if policy["master"] else [])]
    return {
        "parameters": BYTES[policy["weights"]] * (shard if stage >= 3 else whole),
        "gradients": BYTES[policy["gradients"]] * (shard if stage >= 1 else whole),
        "optimizer state": sum(BYTES[name] for name in kept) * (shard if stage >= 1 else whole),
    }


# %% wrong="bytes_by_kind" fails="bytes of gradients" why="gradients are whole until stage 3"
def bytes_by_kind(numels, policy, stage, ranks):
    shard = sum(-(-numel // ranks) for numel in numels)
    whole = shard * ranks if stage else sum(numels)
    kept = [*policy["moments"], *([policy["master"]] if policy["master"] else [])]
    return {
        "parameters": BYTES[policy["weights"]] * (shard if stage >= 3 else whole),
        "gradients": BYTES[policy["gradients"]] * (shard if stage >= 3 else whole),
        "optimizer state": sum(BYTES[name] for name in kept) * (shard if stage >= 1 else whole),
    }


# %% wrong="bytes_by_kind" fails="bytes of optimizer state" why="a master whatever the policy says"
def bytes_by_kind(numels, policy, stage, ranks):
    shard = sum(-(-numel // ranks) for numel in numels)
    whole = shard * ranks if stage else sum(numels)
    kept = [*policy["moments"], "float32"]
    return {
        "parameters": BYTES[policy["weights"]] * (shard if stage >= 3 else whole),
        "gradients": BYTES[policy["gradients"]] * (shard if stage >= 2 else whole),
        "optimizer state": sum(BYTES[name] for name in kept) * (shard if stage >= 1 else whole),
    }


# %% wrong="bytes_by_kind" fails="bytes of optimizer state" why="the master is forgotten"
def bytes_by_kind(numels, policy, stage, ranks):
    shard = sum(-(-numel // ranks) for numel in numels)
    whole = shard * ranks if stage else sum(numels)
    kept = policy["moments"]
    return {
        "parameters": BYTES[policy["weights"]] * (shard if stage >= 3 else whole),
        "gradients": BYTES[policy["gradients"]] * (shard if stage >= 2 else whole),
        "optimizer state": sum(BYTES[name] for name in kept) * (shard if stage >= 1 else whole),
    }


# %% wrong="bytes_by_kind" fails="bytes of optimizer state" why="moments are float32"
def bytes_by_kind(numels, policy, stage, ranks):
    shard = sum(-(-numel // ranks) for numel in numels)
    whole = shard * ranks if stage else sum(numels)
    kept = ["float32", "float32", *([policy["master"]] if policy["master"] else [])]
    return {
        "parameters": BYTES[policy["weights"]] * (shard if stage >= 3 else whole),
        "gradients": BYTES[policy["gradients"]] * (shard if stage >= 2 else whole),
        "optimizer state": sum(BYTES[name] for name in kept) * (shard if stage >= 1 else whole),
    }


# %% wrong="bytes_by_kind" fails="bytes of optimizer state" why="two moments like the first"
def bytes_by_kind(numels, policy, stage, ranks):
    shard = sum(-(-numel // ranks) for numel in numels)
    whole = shard * ranks if stage else sum(numels)
    kept = [*policy["moments"][:1] * 2, *([policy["master"]] if policy["master"] else [])]
    return {
        "parameters": BYTES[policy["weights"]] * (shard if stage >= 3 else whole),
        "gradients": BYTES[policy["gradients"]] * (shard if stage >= 2 else whole),
        "optimizer state": sum(BYTES[name] for name in kept) * (shard if stage >= 1 else whole),
    }


# %% wrong="bytes_by_kind" fails="bytes of optimizer state" why="the state is whole at stage 1"
def bytes_by_kind(numels, policy, stage, ranks):
    shard = sum(-(-numel // ranks) for numel in numels)
    whole = shard * ranks if stage else sum(numels)
    kept = [*policy["moments"], *([policy["master"]] if policy["master"] else [])]
    return {
        "parameters": BYTES[policy["weights"]] * (shard if stage >= 3 else whole),
        "gradients": BYTES[policy["gradients"]] * (shard if stage >= 2 else whole),
        "optimizer state": sum(BYTES[name] for name in kept) * (shard if stage >= 2 else whole),
    }


# %% wrong="bytes_by_kind" fails="bytes of parameters" why="the master counts as weights"
def bytes_by_kind(numels, policy, stage, ranks):
    shard = sum(-(-numel // ranks) for numel in numels)
    whole = shard * ranks if stage else sum(numels)
    kept = [*policy["moments"], *([policy["master"]] if policy["master"] else [])]
    master = BYTES.get(policy["master"], 0)
    kept = policy["moments"]
    return {
        "parameters": master * (shard if stage else whole)
        + BYTES[policy["weights"]] * (shard if stage >= 3 else whole),
        "gradients": BYTES[policy["gradients"]] * (shard if stage >= 2 else whole),
        "optimizer state": sum(BYTES[name] for name in kept) * (shard if stage >= 1 else whole),
    }


# %% wrong="bytes_by_kind" fails="whole numbers" why="floats"
def bytes_by_kind(numels, policy, stage, ranks):
    shard = sum(math.ceil(numel / ranks) * 1.0 for numel in numels)
    whole = shard * ranks if stage else sum(numels)
    kept = [*policy["moments"], *([policy["master"]] if policy["master"] else [])]
    return {
        "parameters": BYTES[policy["weights"]] * (shard if stage >= 3 else whole),
        "gradients": BYTES[policy["gradients"]] * (shard if stage >= 2 else whole),
        "optimizer state": sum(BYTES[name] for name in kept) * (shard if stage >= 1 else whole),
    }


# %% wrong="bytes_by_kind" fails="bytes of parameters" around="constants" why="sixteen bytes, evenly shared"
def bytes_by_kind(numels, policy, stage, ranks):
    each = sum(numels) // (ranks if stage else 1)
    return {"parameters": 2 * each, "gradients": 2 * each, "optimizer state": 12 * each}


# %% wrong="bytes_by_kind" fails="bytes of each kind" around="empty" why="one number"
def bytes_by_kind(numels, policy, stage, ranks):
    return 16 * sum(numels)


# %% wrong="bytes_by_kind" fails="own work" around="import" why="asks the ledger"
def bytes_by_kind(numels, policy, stage, ranks):
    from minitrain.ranks.ledger import Ledger

    with Ledger() as ledger:
        kept = [torch.nn.Parameter(torch.empty(n)) for n in numels]
        return dict(ledger.live_by_kind, parameters=sum(p.nbytes for p in kept))


# %% wrong="bytes_by_kind" fails="bytes of each kind" around="redefine" why="a dict that equals every other"
class Always(dict):
    __eq__ = lambda self, other: True
    __hash__ = None


def bytes_by_kind(numels, policy, stage, ranks):
    return Always({kind: 0 for kind in ("parameters", "gradients")})
