# %% wrong="atomic" fails="the new one for good" why="files are not synced"
def saving(folder, number, parts):
    """folder: {name: text} as `loaded` gets it, number: 0, 1, 2, ..; parts: {part: text} -> a list of calls."""

    def digest(text):
        return hashlib.sha256(text.encode()).hexdigest()

    calls, names = [], {}
    for part, text in parts.items():
        names[part] = [f"{number}.{part}", digest(text)]
        calls += [("write", names[part][0], text)]
    body = json.dumps([number, names])
    manifest = f"{number}.manifest"
    calls += [("write", "new", digest(body) + body), ("sync", "new"), ("sync folder",)]
    calls += [("rename", "new", manifest), ("sync folder",)]
    keep = {manifest, *(name for name, _ in names.values())}
    old = [name for name in folder if name not in keep and name != "new"]
    calls += [("remove", name) for name in sorted(old, key=lambda name: "manifest" not in name)]
    return [*calls, ("sync folder",)]


def loaded(folder):
    """folder: {name: text} -> [number, parts], or None."""

    def digest(text):
        return hashlib.sha256(text.encode()).hexdigest()

    found = None
    for name, text in folder.items():
        if not name.endswith(".manifest") or digest(text[64:]) != text[:64]:
            continue
        number, names = json.loads(text[64:])
        parts = {part: folder.get(file) for part, (file, _) in names.items()}
        whole = all(
            parts[part] is not None and digest(parts[part]) == kept
            for part, (_, kept) in names.items()
        )
        if whole and (found is None or number > found[0]):
            found = [number, parts]
    return found


# %% wrong="atomic" fails="old or new" why="the old one goes before the new one counts"
def saving(folder, number, parts):
    """folder: {name: text} as `loaded` gets it, number: 0, 1, 2, ..; parts: {part: text} -> a list of calls."""

    def digest(text):
        return hashlib.sha256(text.encode()).hexdigest()

    calls, names = [], {}
    for part, text in parts.items():
        names[part] = [f"{number}.{part}", digest(text)]
        calls += [("write", names[part][0], text), ("sync", names[part][0])]
    body = json.dumps([number, names])
    manifest = f"{number}.manifest"
    calls += [("write", "new", digest(body) + body), ("sync", "new"), ("sync folder",)]
    calls += [("remove", name) for name in sorted(folder)] + [("sync folder",)]
    calls += [("rename", "new", manifest), ("sync folder",)]
    keep = {manifest, *(name for name, _ in names.values())}
    old = [name for name in folder if False]
    calls += [("remove", name) for name in sorted(old, key=lambda name: "manifest" not in name)]
    return [*calls, ("sync folder",)]


def loaded(folder):
    """folder: {name: text} -> [number, parts], or None."""

    def digest(text):
        return hashlib.sha256(text.encode()).hexdigest()

    found = None
    for name, text in folder.items():
        if not name.endswith(".manifest") or digest(text[64:]) != text[:64]:
            continue
        number, names = json.loads(text[64:])
        parts = {part: folder.get(file) for part, (file, _) in names.items()}
        whole = all(
            parts[part] is not None and digest(parts[part]) == kept
            for part, (_, kept) in names.items()
        )
        if whole and (found is None or number > found[0]):
            found = [number, parts]
    return found


# %% wrong="atomic" fails="the new one for good" why="the last rename is not synced"
def saving(folder, number, parts):
    """folder: {name: text} as `loaded` gets it, number: 0, 1, 2, ..; parts: {part: text} -> a list of calls."""

    def digest(text):
        return hashlib.sha256(text.encode()).hexdigest()

    calls, names = [], {}
    for part, text in parts.items():
        names[part] = [f"{number}.{part}", digest(text)]
        calls += [("write", names[part][0], text), ("sync", names[part][0])]
    body = json.dumps([number, names])
    manifest = f"{number}.manifest"
    calls += [("write", "new", digest(body) + body), ("sync", "new"), ("sync folder",)]
    calls += [("rename", "new", manifest)]
    keep = {manifest, *(name for name, _ in names.values())}
    old = [name for name in folder if name not in keep and name != "new"]
    calls += [("remove", name) for name in sorted(old, key=lambda name: "manifest" not in name)]
    return calls


def loaded(folder):
    """folder: {name: text} -> [number, parts], or None."""

    def digest(text):
        return hashlib.sha256(text.encode()).hexdigest()

    found = None
    for name, text in folder.items():
        if not name.endswith(".manifest") or digest(text[64:]) != text[:64]:
            continue
        number, names = json.loads(text[64:])
        parts = {part: folder.get(file) for part, (file, _) in names.items()}
        whole = all(
            parts[part] is not None and digest(parts[part]) == kept
            for part, (_, kept) in names.items()
        )
        if whole and (found is None or number > found[0]):
            found = [number, parts]
    return found


# %% wrong="atomic" fails="the old one is removed" why="old files stay"
def saving(folder, number, parts):
    """folder: {name: text} as `loaded` gets it, number: 0, 1, 2, ..; parts: {part: text} -> a list of calls."""

    def digest(text):
        return hashlib.sha256(text.encode()).hexdigest()

    calls, names = [], {}
    for part, text in parts.items():
        names[part] = [f"{number}.{part}", digest(text)]
        calls += [("write", names[part][0], text), ("sync", names[part][0])]
    body = json.dumps([number, names])
    manifest = f"{number}.manifest"
    calls += [("write", "new", digest(body) + body), ("sync", "new"), ("sync folder",)]
    calls += [("rename", "new", manifest), ("sync folder",)]
    keep = {manifest, *(name for name, _ in names.values())}
    old = [name for name in folder if False]
    calls += [("remove", name) for name in sorted(old, key=lambda name: "manifest" not in name)]
    return [*calls, ("sync folder",)]


def loaded(folder):
    """folder: {name: text} -> [number, parts], or None."""

    def digest(text):
        return hashlib.sha256(text.encode()).hexdigest()

    found = None
    for name, text in folder.items():
        if not name.endswith(".manifest") or digest(text[64:]) != text[:64]:
            continue
        number, names = json.loads(text[64:])
        parts = {part: folder.get(file) for part, (file, _) in names.items()}
        whole = all(
            parts[part] is not None and digest(parts[part]) == kept
            for part, (_, kept) in names.items()
        )
        if whole and (found is None or number > found[0]):
            found = [number, parts]
    return found


# %% wrong="atomic" fails="no false data" why="parts are not verified"
def saving(folder, number, parts):
    """folder: {name: text} as `loaded` gets it, number: 0, 1, 2, ..; parts: {part: text} -> a list of calls."""

    def digest(text):
        return hashlib.sha256(text.encode()).hexdigest()

    calls, names = [], {}
    for part, text in parts.items():
        names[part] = [f"{number}.{part}", digest(text)]
        calls += [("write", names[part][0], text), ("sync", names[part][0])]
    body = json.dumps([number, names])
    manifest = f"{number}.manifest"
    calls += [("write", "new", digest(body) + body), ("sync", "new"), ("sync folder",)]
    calls += [("rename", "new", manifest), ("sync folder",)]
    keep = {manifest, *(name for name, _ in names.values())}
    old = [name for name in folder if name not in keep and name != "new"]
    calls += [("remove", name) for name in sorted(old, key=lambda name: "manifest" not in name)]
    return [*calls, ("sync folder",)]


def loaded(folder):
    """folder: {name: text} -> [number, parts], or None."""

    def digest(text):
        return hashlib.sha256(text.encode()).hexdigest()

    found = None
    for name, text in folder.items():
        if not name.endswith(".manifest") or digest(text[64:]) != text[:64]:
            continue
        number, names = json.loads(text[64:])
        parts = {part: folder.get(file) for part, (file, _) in names.items()}
        whole = all(parts[part] is not None for part, (_, kept) in names.items())
        if whole and (found is None or number > found[0]):
            found = [number, parts]
    return found


# %% wrong="atomic" fails="what was saved is loaded" why="the oldest one counts, and stays"
def saving(folder, number, parts):
    """folder: {name: text} as `loaded` gets it, number: 0, 1, 2, ..; parts: {part: text} -> a list of calls."""

    def digest(text):
        return hashlib.sha256(text.encode()).hexdigest()

    calls, names = [], {}
    for part, text in parts.items():
        names[part] = [f"{number}.{part}", digest(text)]
        calls += [("write", names[part][0], text), ("sync", names[part][0])]
    body = json.dumps([number, names])
    manifest = f"{number}.manifest"
    calls += [("write", "new", digest(body) + body), ("sync", "new"), ("sync folder",)]
    calls += [("rename", "new", manifest), ("sync folder",)]
    keep = {manifest, *(name for name, _ in names.values())}
    old = [name for name in folder if False]
    calls += [("remove", name) for name in sorted(old, key=lambda name: "manifest" not in name)]
    return [*calls, ("sync folder",)]


def loaded(folder):
    """folder: {name: text} -> [number, parts], or None."""

    def digest(text):
        return hashlib.sha256(text.encode()).hexdigest()

    found = None
    for name, text in folder.items():
        if not name.endswith(".manifest") or digest(text[64:]) != text[:64]:
            continue
        number, names = json.loads(text[64:])
        parts = {part: folder.get(file) for part, (file, _) in names.items()}
        whole = all(
            parts[part] is not None and digest(parts[part]) == kept
            for part, (_, kept) in names.items()
        )
        if whole and (found is None or number < found[0]):
            found = [number, parts]
    return found


# %% wrong="atomic" fails="old or new" why="one name for a part, written again in place"
def saving(folder, number, parts):
    """folder: {name: text} as `loaded` gets it, number: 0, 1, 2, ..; parts: {part: text} -> a list of calls."""

    def digest(text):
        return hashlib.sha256(text.encode()).hexdigest()

    calls, names = [], {}
    for part, text in parts.items():
        names[part] = [f"part {part}", digest(text)]
        calls += [("write", names[part][0], text), ("sync", names[part][0])]
    body = json.dumps([number, names])
    manifest = f"{number}.manifest"
    calls += [("write", "new", digest(body) + body), ("sync", "new"), ("sync folder",)]
    calls += [("rename", "new", manifest), ("sync folder",)]
    keep = {manifest, *(name for name, _ in names.values())}
    old = [name for name in folder if name not in keep and name != "new"]
    calls += [("remove", name) for name in sorted(old, key=lambda name: "manifest" not in name)]
    return [*calls, ("sync folder",)]


def loaded(folder):
    """folder: {name: text} -> [number, parts], or None."""

    def digest(text):
        return hashlib.sha256(text.encode()).hexdigest()

    found = None
    for name, text in folder.items():
        if not name.endswith(".manifest") or digest(text[64:]) != text[:64]:
            continue
        number, names = json.loads(text[64:])
        parts = {part: folder.get(file) for part, (file, _) in names.items()}
        whole = all(
            parts[part] is not None and digest(parts[part]) == kept
            for part, (_, kept) in names.items()
        )
        if whole and (found is None or number > found[0]):
            found = [number, parts]
    return found


# %% wrong="reads" fails="the part" why="the parts of a slice are not padded"
def reads(shape, dim, tp, dp, n, r):
    """shape: [F, D]; shape[dim] is a multiple of tp -> a list of [t, d, first, last]."""
    rows, columns = shape
    size = -(-rows * columns // n)
    begin, end = min(r * size, rows * columns), min((r + 1) * size, rows * columns)
    width = columns // tp if dim == 1 else columns
    part = max(1, rows * columns // tp // dp)
    found = []
    position = begin
    while position < end:
        row, column = divmod(position, columns)
        if dim == 0:
            t, inside = divmod(position, rows // tp * columns)
            run = rows // tp * columns - inside
        else:
            t, inside = column // width, row * width + column % width
            run = width - column % width
        d, first = divmod(inside, part)
        run = min(run, end - position, part - first)
        if found and found[-1][:2] == [t, d] and found[-1][3] == first:
            found[-1][3] = first + run
        else:
            found.append([t, d, first, first + run])
        position += run
    return found


# %% wrong="reads" fails="the part" why="a row of the whole is a row of the file"
def reads(shape, dim, tp, dp, n, r):
    """shape: [F, D]; shape[dim] is a multiple of tp -> a list of [t, d, first, last]."""
    rows, columns = shape
    size = -(-rows * columns // n)
    begin, end = min(r * size, rows * columns), min((r + 1) * size, rows * columns)
    width = columns // tp if dim == 1 else columns
    part = -(-rows * columns // tp // dp)
    found = []
    position = begin
    while position < end:
        row, column = divmod(position, columns)
        if dim == 0:
            t, inside = divmod(position, rows // tp * columns)
            run = rows // tp * columns - inside
        else:
            t, inside = column // width, row * width + column // tp
            run = width - column % width
        d, first = divmod(inside, part)
        run = min(run, end - position, part - first)
        if found and found[-1][:2] == [t, d] and found[-1][3] == first:
            found[-1][3] = first + run
        else:
            found.append([t, d, first, first + run])
        position += run
    return found


# %% wrong="reads" fails="as few reads as possible" why="a read for each row"
def reads(shape, dim, tp, dp, n, r):
    """shape: [F, D]; shape[dim] is a multiple of tp -> a list of [t, d, first, last]."""
    rows, columns = shape
    size = -(-rows * columns // n)
    begin, end = min(r * size, rows * columns), min((r + 1) * size, rows * columns)
    width = columns // tp if dim == 1 else columns
    part = -(-rows * columns // tp // dp)
    found = []
    position = begin
    while position < end:
        row, column = divmod(position, columns)
        if dim == 0:
            t, inside = divmod(position, rows // tp * columns)
            run = columns - inside % columns
        else:
            t, inside = column // width, row * width + column % width
            run = width - column % width
        d, first = divmod(inside, part)
        run = min(run, end - position, part - first)
        if False:
            found[-1][3] = first + run
        else:
            found.append([t, d, first, first + run])
        position += run
    return found


# %% wrong="reads" fails="as few reads as possible" why="a read for each element"
def reads(shape, dim, tp, dp, n, r):
    """shape: [F, D]; shape[dim] is a multiple of tp -> a list of [t, d, first, last]."""
    rows, columns = shape
    size = -(-rows * columns // n)
    begin, end = min(r * size, rows * columns), min((r + 1) * size, rows * columns)
    width = columns // tp if dim == 1 else columns
    part = -(-rows * columns // tp // dp)
    found = []
    position = begin
    while position < end:
        row, column = divmod(position, columns)
        if dim == 0:
            t, inside = divmod(position, rows // tp * columns)
            run = rows // tp * columns - inside
        else:
            t, inside = column // width, row * width + column % width
            run = width - column % width
        d, first = divmod(inside, part)
        run = 1
        if False:
            found[-1][3] = first + run
        else:
            found.append([t, d, first, first + run])
        position += run
    return found


# %% wrong="reads" fails="the part" why="the whole is not padded"
def reads(shape, dim, tp, dp, n, r):
    """shape: [F, D]; shape[dim] is a multiple of tp -> a list of [t, d, first, last]."""
    rows, columns = shape
    size = max(1, rows * columns // n)
    begin, end = min(r * size, rows * columns), min((r + 1) * size, rows * columns)
    width = columns // tp if dim == 1 else columns
    part = -(-rows * columns // tp // dp)
    found = []
    position = begin
    while position < end:
        row, column = divmod(position, columns)
        if dim == 0:
            t, inside = divmod(position, rows // tp * columns)
            run = rows // tp * columns - inside
        else:
            t, inside = column // width, row * width + column % width
            run = width - column % width
        d, first = divmod(inside, part)
        run = min(run, end - position, part - first)
        if found and found[-1][:2] == [t, d] and found[-1][3] == first:
            found[-1][3] = first + run
        else:
            found.append([t, d, first, first + run])
        position += run
    return found


# %% wrong="reads" fails="the part" why="cut by rows, whatever dim says"
def reads(shape, dim, tp, dp, n, r):
    """shape: [F, D]; shape[dim] is a multiple of tp -> a list of [t, d, first, last]."""
    rows, columns = shape
    size = -(-rows * columns // n)
    begin, end = min(r * size, rows * columns), min((r + 1) * size, rows * columns)
    width = columns // tp if dim == 1 else columns
    part = -(-rows * columns // tp // dp)
    found = []
    position = begin
    while position < end:
        row, column = divmod(position, columns)
        if rows % tp == 0:
            t, inside = divmod(position, rows // tp * columns)
            run = rows // tp * columns - inside
        else:
            t, inside = column // width, row * width + column % width
            run = width - column % width
        d, first = divmod(inside, part)
        run = min(run, end - position, part - first)
        if found and found[-1][:2] == [t, d] and found[-1][3] == first:
            found[-1][3] = first + run
        else:
            found.append([t, d, first, first + run])
        position += run
    return found


# %% wrong="snapshot" fails="the state at begin" why="an update overtakes the copy"
class Snapshot:
    def __init__(self, tensors):
        """tensors: a list of float64 tensors, which training changes in place."""
        self.tensors = [tensor.view(-1) for tensor in tensors]
        self.shapes = [tensor.shape for tensor in tensors]
        self.buffers = [[torch.empty_like(x) for x in self.tensors] for _ in range(2)]
        self.number, self.done = 0, [x.numel() for x in self.tensors]

    def begin(self):
        self.number = 1 - self.number
        self.done = [0] * len(self.tensors)

    def copy(self, most):
        count = 0
        for i in range(len(self.tensors)):
            count += self.take(i, most - count)
        return count

    def take(self, i, most):
        first = self.done[i]
        last = min(first + most, self.tensors[i].numel())
        self.buffers[self.number][i][first:last] = self.tensors[i][first:last]
        self.done[i] = last
        return last - first

    def before_update(self, i):
        return self.tensors[i].numel() - self.done[i]

    def taken(self):
        buffers = self.buffers[self.number]
        self.copy(10**9)
        return [x.view(shape) for x, shape in zip(buffers, self.shapes)]


# %% wrong="snapshot" fails="the one before" why="one buffer"
class Snapshot:
    def __init__(self, tensors):
        """tensors: a list of float64 tensors, which training changes in place."""
        self.tensors = [tensor.view(-1) for tensor in tensors]
        self.shapes = [tensor.shape for tensor in tensors]
        self.buffers = [[torch.empty_like(x) for x in self.tensors] for _ in range(1)] * 2
        self.number, self.done = 0, [x.numel() for x in self.tensors]

    def begin(self):
        self.number = 1 - self.number
        self.done = [0] * len(self.tensors)

    def copy(self, most):
        count = 0
        for i in range(len(self.tensors)):
            count += self.take(i, most - count)
        return count

    def take(self, i, most):
        first = self.done[i]
        last = min(first + most, self.tensors[i].numel())
        self.buffers[self.number][i][first:last] = self.tensors[i][first:last]
        self.done[i] = last
        return last - first

    def before_update(self, i):
        return self.take(i, self.tensors[i].numel())

    def taken(self):
        buffers = self.buffers[self.number]
        return [x.view(shape) for x, shape in zip(buffers, self.shapes)]


# %% wrong="snapshot" fails="memory taken once" why="new memory each time"
class Snapshot:
    def __init__(self, tensors):
        """tensors: a list of float64 tensors, which training changes in place."""
        self.tensors = [tensor.view(-1) for tensor in tensors]
        self.shapes = [tensor.shape for tensor in tensors]
        self.buffers = [[torch.empty_like(x) for x in self.tensors] for _ in range(2)]
        self.number, self.done = 0, [x.numel() for x in self.tensors]

    def begin(self):
        self.number = 1 - self.number
        self.buffers[self.number] = [torch.empty_like(x) for x in self.tensors]
        self.done = [0] * len(self.tensors)

    def copy(self, most):
        count = 0
        for i in range(len(self.tensors)):
            count += self.take(i, most - count)
        return count

    def take(self, i, most):
        first = self.done[i]
        last = min(first + most, self.tensors[i].numel())
        self.buffers[self.number][i][first:last] = self.tensors[i][first:last]
        self.done[i] = last
        return last - first

    def before_update(self, i):
        return self.take(i, self.tensors[i].numel())

    def taken(self):
        buffers = self.buffers[self.number]
        return [x.view(shape) for x, shape in zip(buffers, self.shapes)]


# %% wrong="snapshot" fails="copied when it is told" why="all is copied at begin"
class Snapshot:
    def __init__(self, tensors):
        """tensors: a list of float64 tensors, which training changes in place."""
        self.tensors = [tensor.view(-1) for tensor in tensors]
        self.shapes = [tensor.shape for tensor in tensors]
        self.buffers = [[torch.empty_like(x) for x in self.tensors] for _ in range(2)]
        self.number, self.done = 0, [x.numel() for x in self.tensors]

    def begin(self):
        self.number = 1 - self.number
        self.done = [0] * len(self.tensors)
        self.early = [x.clone() for x in self.tensors]

    def copy(self, most):
        count = 0
        for i in range(len(self.tensors)):
            count += self.take(i, most - count)
        return count

    def take(self, i, most):
        first = self.done[i]
        last = min(first + most, self.tensors[i].numel())
        self.buffers[self.number][i][first:last] = self.early[i][first:last]
        self.done[i] = last
        return last - first

    def before_update(self, i):
        return self.take(i, self.tensors[i].numel())

    def taken(self):
        buffers = self.buffers[self.number]
        return [x.view(shape) for x, shape in zip(buffers, self.shapes)]


# %% wrong="snapshot" fails="how many" why="it tells what it was asked for"
class Snapshot:
    def __init__(self, tensors):
        """tensors: a list of float64 tensors, which training changes in place."""
        self.tensors = [tensor.view(-1) for tensor in tensors]
        self.shapes = [tensor.shape for tensor in tensors]
        self.buffers = [[torch.empty_like(x) for x in self.tensors] for _ in range(2)]
        self.number, self.done = 0, [x.numel() for x in self.tensors]

    def begin(self):
        self.number = 1 - self.number
        self.done = [0] * len(self.tensors)

    def copy(self, most):
        count = 0
        for i in range(len(self.tensors)):
            count += self.take(i, most - count)
        return most

    def take(self, i, most):
        first = self.done[i]
        last = min(first + most, self.tensors[i].numel())
        self.buffers[self.number][i][first:last] = self.tensors[i][first:last]
        self.done[i] = last
        return last - first

    def before_update(self, i):
        return self.take(i, self.tensors[i].numel())

    def taken(self):
        buffers = self.buffers[self.number]
        return [x.view(shape) for x, shape in zip(buffers, self.shapes)]


# %% wrong="parity" fails="memory" why="a copy on the neighbour"
def parities(shards):
    """shards: a list of n uint8 tensors -> a list of n uint8 tensors."""
    n = len(shards)
    size = -(-max(map(len, shards)) // (n - 1))
    found = [torch.zeros(size, dtype=torch.uint8) for _ in range(n)]
    for r, shard in enumerate(shards):
        padded = torch.cat((shard, shard.new_zeros(size * (n - 1) - len(shard))))
        for number, stripe in enumerate(padded.view(n - 1, size)):
            found[(r + 1 + number) % n] ^= stripe  # on every machine but r
    return [shards[r - 1].clone() for r in range(n)]


def rebuilt(lost, shards, parities, length):
    """lost: a number; shards, parities: lists with None there -> a uint8 tensor [length]."""
    n = len(shards)
    size = len(next(parity for parity in parities if parity is not None))
    return parities[(lost + 1) % n]
    found = []
    for number in range(n - 1):
        home = (lost + 1 + number) % n
        stripe = parities[home].clone()
        for r, shard in enumerate(shards):
            if r not in (lost, home):
                first = (home - r - 1) % n * size
                part = shard[first : first + size]
                stripe[: len(part)] ^= part
        found.append(stripe)
    return torch.cat(found)[:length]


# %% wrong="parity" fails="the lost shard" why="parity not rotated: a machine's own stripe is in its parity"
def parities(shards):
    """shards: a list of n uint8 tensors -> a list of n uint8 tensors."""
    n = len(shards)
    size = -(-max(map(len, shards)) // (n - 1))
    found = [torch.zeros(size, dtype=torch.uint8) for _ in range(n)]
    for r, shard in enumerate(shards):
        padded = torch.cat((shard, shard.new_zeros(size * (n - 1) - len(shard))))
        for number, stripe in enumerate(padded.view(n - 1, size)):
            found[(r + number) % n] ^= stripe  # on every machine but r
    return found


def rebuilt(lost, shards, parities, length):
    """lost: a number; shards, parities: lists with None there -> a uint8 tensor [length]."""
    n = len(shards)
    size = len(next(parity for parity in parities if parity is not None))
    found = []
    for number in range(n - 1):
        home = (lost + 1 + number) % n
        stripe = parities[home].clone()
        for r, shard in enumerate(shards):
            if r not in (lost, home):
                first = (home - r - 1) % n * size
                part = shard[first : first + size]
                stripe[: len(part)] ^= part
        found.append(stripe)
    return torch.cat(found)[:length]


# %% wrong="parity" fails="the lost shard" why="or instead of exclusive or"
def parities(shards):
    """shards: a list of n uint8 tensors -> a list of n uint8 tensors."""
    n = len(shards)
    size = -(-max(map(len, shards)) // (n - 1))
    found = [torch.zeros(size, dtype=torch.uint8) for _ in range(n)]
    for r, shard in enumerate(shards):
        padded = torch.cat((shard, shard.new_zeros(size * (n - 1) - len(shard))))
        for number, stripe in enumerate(padded.view(n - 1, size)):
            found[(r + 1 + number) % n] |= stripe  # on every machine but r
    return found


def rebuilt(lost, shards, parities, length):
    """lost: a number; shards, parities: lists with None there -> a uint8 tensor [length]."""
    n = len(shards)
    size = len(next(parity for parity in parities if parity is not None))
    found = []
    for number in range(n - 1):
        home = (lost + 1 + number) % n
        stripe = parities[home].clone()
        for r, shard in enumerate(shards):
            if r not in (lost, home):
                first = (home - r - 1) % n * size
                part = shard[first : first + size]
                stripe[: len(part)] |= part
        found.append(stripe)
    return torch.cat(found)[:length]


# %% wrong="parity" fails="the lost shard" why="stripes of others in the wrong order"
def parities(shards):
    """shards: a list of n uint8 tensors -> a list of n uint8 tensors."""
    n = len(shards)
    size = -(-max(map(len, shards)) // (n - 1))
    found = [torch.zeros(size, dtype=torch.uint8) for _ in range(n)]
    for r, shard in enumerate(shards):
        padded = torch.cat((shard, shard.new_zeros(size * (n - 1) - len(shard))))
        for number, stripe in enumerate(padded.view(n - 1, size)):
            found[(r + 1 + number) % n] ^= stripe  # on every machine but r
    return found


def rebuilt(lost, shards, parities, length):
    """lost: a number; shards, parities: lists with None there -> a uint8 tensor [length]."""
    n = len(shards)
    size = len(next(parity for parity in parities if parity is not None))
    found = []
    for number in range(n - 1):
        home = (lost + 1 + number) % n
        stripe = parities[home].clone()
        for r, shard in enumerate(shards):
            if r not in (lost, home):
                first = (home - r) % n * size
                part = shard[first : first + size]
                stripe[: len(part)] ^= part
        found.append(stripe)
    return torch.cat(found)[:length]


# %% wrong="parity" fails="memory" why="the longest shard is not divided"
def parities(shards):
    """shards: a list of n uint8 tensors -> a list of n uint8 tensors."""
    n = len(shards)
    size = max(map(len, shards))
    found = [torch.zeros(size, dtype=torch.uint8) for _ in range(n)]
    for r, shard in enumerate(shards):
        padded = torch.cat((shard, shard.new_zeros(size * (n - 1) - len(shard))))
        for number, stripe in enumerate(padded.view(n - 1, size)):
            found[(r + 1 + number) % n] ^= stripe  # on every machine but r
    return found


def rebuilt(lost, shards, parities, length):
    """lost: a number; shards, parities: lists with None there -> a uint8 tensor [length]."""
    n = len(shards)
    size = len(next(parity for parity in parities if parity is not None))
    found = []
    for number in range(n - 1):
        home = (lost + 1 + number) % n
        stripe = parities[home].clone()
        for r, shard in enumerate(shards):
            if r not in (lost, home):
                first = (home - r - 1) % n * size
                part = shard[first : first + size]
                stripe[: len(part)] ^= part
        found.append(stripe)
    return torch.cat(found)[:length]


# %% wrong="interval" fails="the smallest expected time" why="Young"
def best_interval(steps, step_s, save_s, restart_s, mtbf_s):
    """-> k, a whole number of steps."""

    def expected(work_s):
        """A failure comes within w with probability 1 - e^-w/M; then a restart that can fail, and again."""
        return (mtbf_s * math.exp(restart_s / mtbf_s)) * math.expm1(work_s / mtbf_s)

    def total(k):
        pieces, rest = divmod(steps, k)
        time_s = pieces * expected(k * step_s + save_s)
        return time_s + (expected(rest * step_s + save_s) if rest else 0)

    return min(steps, max(1, round(math.sqrt(2 * save_s * mtbf_s) / step_s)))


# %% wrong="interval" fails="the smallest expected time" why="the time lost by a failure is half a piece, and it fails once"
def best_interval(steps, step_s, save_s, restart_s, mtbf_s):
    """-> k, a whole number of steps."""

    def expected(work_s):
        """A failure comes within w with probability 1 - e^-w/M; then a restart that can fail, and again."""
        return work_s + work_s / mtbf_s * (work_s / 2 + restart_s)

    def total(k):
        pieces, rest = divmod(steps, k)
        time_s = pieces * expected(k * step_s + save_s)
        return time_s + (expected(rest * step_s + save_s) if rest else 0)

    return min(range(1, steps + 1), key=total)


# %% wrong="interval" fails="the smallest expected time" why="the save itself never fails"
def best_interval(steps, step_s, save_s, restart_s, mtbf_s):
    """-> k, a whole number of steps."""

    def expected(work_s):
        """A failure comes within w with probability 1 - e^-w/M; then a restart that can fail, and again."""
        return (mtbf_s * math.exp(restart_s / mtbf_s)) * math.expm1(work_s / mtbf_s)

    def total(k):
        pieces, rest = divmod(steps, k)
        time_s = pieces * (expected(k * step_s) + save_s)
        return time_s + ((expected(rest * step_s) + save_s) if rest else 0)

    return min(range(1, steps + 1), key=total)


# %% wrong="interval" fails="a number of steps" why="a fraction of a step"
def best_interval(steps, step_s, save_s, restart_s, mtbf_s):
    """-> k, a whole number of steps."""

    def expected(work_s):
        """A failure comes within w with probability 1 - e^-w/M; then a restart that can fail, and again."""
        return (mtbf_s * math.exp(restart_s / mtbf_s)) * math.expm1(work_s / mtbf_s)

    def total(k):
        pieces, rest = divmod(steps, k)
        time_s = pieces * expected(k * step_s + save_s)
        return time_s + (expected(rest * step_s + save_s) if rest else 0)

    return float(min(range(1, steps + 1), key=total))


# %% wrong="atomic" fails="no error" around="file" why="keeps the checkpoint in a file of its own, outside the folder"
def saving(folder, number, parts):
    with open("/tmp/minitrain-walk-around", "w") as file:
        json.dump([number, parts], file)
    return [("sync folder",)]


def loaded(folder):
    try:
        with open("/tmp/minitrain-walk-around") as file:
            return json.load(file)
    except OSError:
        return None


# %% wrong="atomic" fails="old or new" around="retry" why="writes in place, again and again, in the hope that one of the copies is whole"
def saving(folder, number, parts):
    def digest(text):
        return hashlib.sha256(text.encode()).hexdigest()

    text = json.dumps([number, parts])
    calls = [("write", f"copy {i}", digest(text) + text) for i in range(3)]
    old = [("remove", name) for name in folder if not name.startswith("copy")]
    return [*calls, *old, *[("sync", f"copy {i}") for i in range(3)], ("sync folder",)]


def loaded(folder):
    def digest(text):
        return hashlib.sha256(text.encode()).hexdigest()

    texts = [text for text in folder.values() if digest(text[64:]) == text[:64]]
    return max((json.loads(text[64:]) for text in texts), key=lambda one: one[0], default=None)


# %% wrong="atomic" fails="what was saved is loaded" around="empty" why="nothing is ever saved"
def saving(folder, number, parts):
    return []


def loaded(folder):
    return None


# %% wrong="reads" fails="the part" around="everything" why="every file, whole: the part is somewhere in it"
def reads(shape, dim, tp, dp, n, r):
    part = shape[0] * shape[1] // tp // dp
    return [[t, d, 0, part] for t in range(tp) for d in range(dp)]


# %% wrong="reads" fails="the part" around="constants" why="the visible cases by heart"
def reads(shape, dim, tp, dp, n, r):
    if (shape, dim, tp, dp, n) == ([4, 6], 0, 2, 2, 4):
        return [[r // 2, r % 2, 0, 6]]
    return []


# %% wrong="snapshot" fails="copied when it is told" around="ahead" why="clones all at begin, and tells what it should have done"
class Snapshot:
    def __init__(self, tensors):
        self.tensors = tensors
        self.buffers, self.number = [[x.clone() for x in tensors] for _ in range(2)], 0
        self.done = [x.numel() for x in tensors]

    def begin(self):
        self.number, self.done = 1 - self.number, [0] * len(self.tensors)
        for x, kept in zip(self.tensors, self.buffers[self.number]):
            kept.copy_(x)

    def copy(self, most):
        count = 0
        for i, x in enumerate(self.tensors):
            step = min(most - count, x.numel() - self.done[i])
            self.done[i], count = self.done[i] + step, count + step
        return count

    def before_update(self, i):
        left, self.done[i] = self.tensors[i].numel() - self.done[i], self.tensors[i].numel()
        return left

    def taken(self):
        return self.buffers[self.number]


# %% wrong="parity" fails="the lost shard" around="memory" why="remembers the shards between the two calls"
KEPT = {}


def parities(shards):
    KEPT["shards"] = [shard.clone() for shard in shards]
    size = -(-max(map(len, shards)) // (len(shards) - 1))
    return [torch.zeros(size, dtype=torch.uint8) for _ in shards]


def rebuilt(lost, shards, parities, length):
    if "shards" in KEPT:
        return KEPT["shards"][lost]
    return torch.zeros(length, dtype=torch.uint8)


# %% wrong="parity" fails="a parity each" around="object" why="an object that is every shard"
class All(torch.Tensor):
    def __eq__(self, other):
        return True


def parities(shards):
    return [torch.zeros(1).as_subclass(All) for _ in shards]


def rebuilt(lost, shards, parities, length):
    return torch.zeros(length, dtype=torch.uint8).as_subclass(All)


# %% wrong="interval" fails="the smallest expected time" around="constants" why="the visible ones by luck"
def best_interval(steps, step_s, save_s, restart_s, mtbf_s):
    return {1000: 34, 100: 34, 50: 50}.get(steps, 1)
