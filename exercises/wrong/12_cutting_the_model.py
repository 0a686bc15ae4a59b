# %% wrong="cut" fails="smallest largest stage" why="as many layers in each stage, whatever they cost"
def cut(costs, sizes, stages, cap=None):
    ends = [len(costs) * i // stages for i in range(stages + 1)]
    return list(zip(ends, ends[1:]))


# %% wrong="cut" fails="smallest largest stage" why="greedy: a stage is closed when it has its share of the whole cost"
def cut(costs, sizes, stages, cap=None):
    share, runs, start, so_far = sum(costs) / stages, [], 0, 0
    for layer, cost in enumerate(costs):
        so_far += cost
        left = stages - len(runs) - 1
        if len(runs) < stages - 1 and (so_far >= share or len(costs) - layer - 1 == left):
            runs.append((start, layer + 1))
            start, so_far = layer + 1, 0
    return [*runs, (start, len(costs))]


# %% wrong="cut" fails="smallest largest stage" why="balances bytes, not time"
def cut(costs, sizes, stages, cap=None):
    best = None
    for inner in combinations(range(1, len(costs)), stages - 1):
        runs = list(zip((0, *inner), (*inner, len(costs))))
        largest = max(sum(sizes[a:b]) for a, b in runs)
        if (cap is None or largest <= cap) and (best is None or largest < best[0]):
            best = largest, runs
    return best and best[1]


# %% wrong="cut" fails="no empty stage" why="the best sum may leave stages empty"
def cut(costs, sizes, stages, cap=None):
    best = None
    for inner in product(range(len(costs) + 1), repeat=stages - 1):
        if list(inner) == sorted(inner):
            runs = list(zip((0, *inner), (*inner, len(costs))))
            largest = max(sum(costs[a:b]) for a, b in runs)
            if (cap is None or all(sum(sizes[a:b]) <= cap for a, b in runs)) and (
                best is None or largest < best[0]
            ):
                best = largest, runs
    return best and best[1]


# %% wrong="cut" fails="every layer once, in order" why="stop is included"
def cut(costs, sizes, stages, cap=None):
    best = None
    for inner in combinations(range(1, len(costs)), stages - 1):
        runs = list(zip((0, *inner), (*inner, len(costs))))
        largest = max(sum(costs[a:b]) for a, b in runs)
        if (cap is None or all(sum(sizes[a:b]) <= cap for a, b in runs)) and (
            best is None or largest < best[0]
        ):
            best = largest, runs
    return best and [(a, b - 1) for a, b in best[1]]


# %% wrong="cut" fails="no cut keeps to the cap" why="the cap is forgotten"
def cut(costs, sizes, stages, cap=None):
    best = None
    for inner in combinations(range(1, len(costs)), stages - 1):
        runs = list(zip((0, *inner), (*inner, len(costs))))
        largest = max(sum(costs[a:b]) for a, b in runs)
        if best is None or largest < best[0]:
            best = largest, runs
    return best[1]


# %% wrong="cut" fails="a cut that keeps to the cap" why="finds the fastest cut and gives up if it is too heavy"
def cut(costs, sizes, stages, cap=None):
    best = None
    for inner in combinations(range(1, len(costs)), stages - 1):
        runs = list(zip((0, *inner), (*inner, len(costs))))
        largest = max(sum(costs[a:b]) for a, b in runs)
        if best is None or largest < best[0]:
            best = largest, runs
    return best[1] if cap is None or all(sum(sizes[a:b]) <= cap for a, b in best[1]) else None


# %% wrong="slice_lengths" fails="least time" why="one slice: no pipeline at all"
def slice_lengths(length, p, launch, per_token, per_key):
    return [length]


# %% wrong="slice_lengths" fails="least time" why="a token a slice, whatever a launch costs"
def slice_lengths(length, p, launch, per_token, per_key):
    return [1] * length


# %% wrong="slice_lengths" fails="least time" why="equal slices, the best number of them"
def slice_lengths(length, p, launch, per_token, per_key):
    def cut(k):
        ends = [length * i // k for i in range(k + 1)]
        return [b - a for a, b in zip(ends, ends[1:])]

    return min(
        (cut(k) for k in range(1, length + 1)),
        key=lambda lengths: pipeline_time(lengths, p, launch, per_token, per_key),
    )


# %% wrong="slice_lengths" fails="least time" why="the best cut backwards: short slices in front"
def slice_lengths(length, p, launch, per_token, per_key):
    ways = (
        [b - a for a, b in zip((0, *ends), (*ends, length))]
        for count in range(length)
        for ends in combinations(range(1, length), count)
    )
    return min(ways, key=lambda lengths: pipeline_time(lengths, p, launch, per_token, per_key))[
        ::-1
    ]


# %% wrong="slice_lengths" fails="least time" why="only the sum counts: how many ranks there are is not looked at"
def slice_lengths(length, p, launch, per_token, per_key):
    ways = (
        [b - a for a, b in zip((0, *ends), (*ends, length))]
        for count in range(length)
        for ends in combinations(range(1, length), count)
    )
    return min(ways, key=lambda lengths: pipeline_time(lengths, 1, launch, per_token, per_key))


# %% wrong="slice_lengths" fails="least time" why="earlier tokens are forgotten: each slice meets its own keys only"
def slice_lengths(length, p, launch, per_token, per_key):
    def time(lengths):
        costs = [cost(0, n, launch, per_token, per_key) for n in lengths]
        return sum(costs) + (p - 1) * max(costs)

    ways = (
        [b - a for a, b in zip((0, *ends), (*ends, length))]
        for count in range(length)
        for ends in combinations(range(1, length), count)
    )
    return min(ways, key=time)


# %% wrong="slice_lengths" fails="every token in one slice" why="equal slices, and what does not divide is lost"
def slice_lengths(length, p, launch, per_token, per_key):
    return [max(1, length // p)] * p


# %% wrong="old_weights" fails="old weights" why="synchronous: every stage takes the newest weights"
def pipedream(weights, x, y, lr):
    p, history = len(weights), [weights]
    for t in range(len(x)):
        taken = torch.stack([history[-1][s] for s in range(p)]).requires_grad_()
        (0.5 * (taken.prod() * x[t] - y[t]) ** 2).backward()
        history.append(history[-1] - lr * taken.grad)
    return history[-1]


def double_buffered(weights, x, y, lr, k):
    history = [weights]
    for u in range(len(x) // k):
        taken = history[max(0, u - 1)].clone().requires_grad_()
        rows = slice(u * k, (u + 1) * k)
        (0.5 * (taken.prod() * x[rows] - y[rows]) ** 2).sum().backward()
        history.append(history[-1] - lr * taken.grad)
    return history[-1]


def versions_held(p):
    return [p - s for s in range(p)]


# %% wrong="old_weights" fails="old weights" why="the first stage's delay on every stage"
def pipedream(weights, x, y, lr):
    p, history = len(weights), [weights]
    for t in range(len(x)):
        taken = torch.stack([history[max(0, t - (p - 1))][s] for s in range(p)]).requires_grad_()
        (0.5 * (taken.prod() * x[t] - y[t]) ** 2).backward()
        history.append(history[-1] - lr * taken.grad)
    return history[-1]


def double_buffered(weights, x, y, lr, k):
    history = [weights]
    for u in range(len(x) // k):
        taken = history[max(0, u - 1)].clone().requires_grad_()
        rows = slice(u * k, (u + 1) * k)
        (0.5 * (taken.prod() * x[rows] - y[rows]) ** 2).sum().backward()
        history.append(history[-1] - lr * taken.grad)
    return history[-1]


def versions_held(p):
    return [p - s for s in range(p)]


# %% wrong="old_weights" fails="one stage" why="one update too old: p - s, where p - 1 - s are ahead"
def pipedream(weights, x, y, lr):
    p, history = len(weights), [weights]
    for t in range(len(x)):
        taken = torch.stack([history[max(0, t - (p - s))][s] for s in range(p)]).requires_grad_()
        (0.5 * (taken.prod() * x[t] - y[t]) ** 2).backward()
        history.append(history[-1] - lr * taken.grad)
    return history[-1]


def double_buffered(weights, x, y, lr, k):
    history = [weights]
    for u in range(len(x) // k):
        taken = history[max(0, u - 1)].clone().requires_grad_()
        rows = slice(u * k, (u + 1) * k)
        (0.5 * (taken.prod() * x[rows] - y[rows]) ** 2).sum().backward()
        history.append(history[-1] - lr * taken.grad)
    return history[-1]


def versions_held(p):
    return [p - s for s in range(p)]


# %% wrong="old_weights" fails="old weights" why="stages counted from the other end"
def pipedream(weights, x, y, lr):
    p, history = len(weights), [weights]
    for t in range(len(x)):
        taken = torch.stack([history[max(0, t - s)][s] for s in range(p)]).requires_grad_()
        (0.5 * (taken.prod() * x[t] - y[t]) ** 2).backward()
        history.append(history[-1] - lr * taken.grad)
    return history[-1]


def double_buffered(weights, x, y, lr, k):
    history = [weights]
    for u in range(len(x) // k):
        taken = history[max(0, u - 1)].clone().requires_grad_()
        rows = slice(u * k, (u + 1) * k)
        (0.5 * (taken.prod() * x[rows] - y[rows]) ** 2).sum().backward()
        history.append(history[-1] - lr * taken.grad)
    return history[-1]


def versions_held(p):
    return [p - s for s in range(p)]


# %% wrong="old_weights" fails="old weights" why="the step is taken from the old weights, not from the newest"
def pipedream(weights, x, y, lr):
    p, history = len(weights), [weights]
    for t in range(len(x)):
        taken = torch.stack(
            [history[max(0, t - (p - 1 - s))][s] for s in range(p)]
        ).requires_grad_()
        (0.5 * (taken.prod() * x[t] - y[t]) ** 2).backward()
        history.append(taken.detach() - lr * taken.grad)
    return history[-1]


def double_buffered(weights, x, y, lr, k):
    history = [weights]
    for u in range(len(x) // k):
        taken = history[max(0, u - 1)].clone().requires_grad_()
        rows = slice(u * k, (u + 1) * k)
        (0.5 * (taken.prod() * x[rows] - y[rows]) ** 2).sum().backward()
        history.append(history[-1] - lr * taken.grad)
    return history[-1]


def versions_held(p):
    return [p - s for s in range(p)]


# %% wrong="old_weights" fails="old weights" why="not stashed: the forward with old weights, the backward with the newest"
def pipedream(weights, x, y, lr):
    p, history = len(weights), [weights]
    for t in range(len(x)):
        taken = torch.stack([history[max(0, t - (p - 1 - s))][s] for s in range(p)])
        error, newest = taken.prod() * x[t] - y[t], history[-1]
        grads = torch.stack(
            [error * x[t] * taken[:s].prod() * newest[s + 1 :].prod() for s in range(p)]
        )
        history.append(newest - lr * grads)
    return history[-1]


def double_buffered(weights, x, y, lr, k):
    history = [weights]
    for u in range(len(x) // k):
        taken = history[max(0, u - 1)].clone().requires_grad_()
        rows = slice(u * k, (u + 1) * k)
        (0.5 * (taken.prod() * x[rows] - y[rows]) ** 2).sum().backward()
        history.append(history[-1] - lr * taken.grad)
    return history[-1]


def versions_held(p):
    return [p - s for s in range(p)]


# %% wrong="old_weights" fails="the second update" why="a flush after each update: no old weights"
def pipedream(weights, x, y, lr):
    p, history = len(weights), [weights]
    for t in range(len(x)):
        taken = torch.stack(
            [history[max(0, t - (p - 1 - s))][s] for s in range(p)]
        ).requires_grad_()
        (0.5 * (taken.prod() * x[t] - y[t]) ** 2).backward()
        history.append(history[-1] - lr * taken.grad)
    return history[-1]


def double_buffered(weights, x, y, lr, k):
    history = [weights]
    for u in range(len(x) // k):
        taken = history[u].clone().requires_grad_()
        rows = slice(u * k, (u + 1) * k)
        (0.5 * (taken.prod() * x[rows] - y[rows]) ** 2).sum().backward()
        history.append(history[-1] - lr * taken.grad)
    return history[-1]


def versions_held(p):
    return [p - s for s in range(p)]


# %% wrong="old_weights" fails="the first update" why="the mean of k microbatches, not their sum"
def pipedream(weights, x, y, lr):
    p, history = len(weights), [weights]
    for t in range(len(x)):
        taken = torch.stack(
            [history[max(0, t - (p - 1 - s))][s] for s in range(p)]
        ).requires_grad_()
        (0.5 * (taken.prod() * x[t] - y[t]) ** 2).backward()
        history.append(history[-1] - lr * taken.grad)
    return history[-1]


def double_buffered(weights, x, y, lr, k):
    history = [weights]
    for u in range(len(x) // k):
        taken = history[max(0, u - 1)].clone().requires_grad_()
        rows = slice(u * k, (u + 1) * k)
        (0.5 * (taken.prod() * x[rows] - y[rows]) ** 2).mean().backward()
        history.append(history[-1] - lr * taken.grad)
    return history[-1]


def versions_held(p):
    return [p - s for s in range(p)]


# %% wrong="old_weights" fails="the second update" why="steps from the weights that the gradient was taken at"
def pipedream(weights, x, y, lr):
    p, history = len(weights), [weights]
    for t in range(len(x)):
        taken = torch.stack(
            [history[max(0, t - (p - 1 - s))][s] for s in range(p)]
        ).requires_grad_()
        (0.5 * (taken.prod() * x[t] - y[t]) ** 2).backward()
        history.append(history[-1] - lr * taken.grad)
    return history[-1]


def double_buffered(weights, x, y, lr, k):
    history = [weights]
    for u in range(len(x) // k):
        taken = history[max(0, u - 1)].clone().requires_grad_()
        rows = slice(u * k, (u + 1) * k)
        (0.5 * (taken.prod() * x[rows] - y[rows]) ** 2).sum().backward()
        history.append(history[max(0, u - 1)] - lr * taken.grad)
    return history[-1]


def versions_held(p):
    return [p - s for s in range(p)]


# %% wrong="old_weights" fails="the second update" why="the delay counts microbatches: an update for each"
def pipedream(weights, x, y, lr):
    p, history = len(weights), [weights]
    for t in range(len(x)):
        taken = torch.stack(
            [history[max(0, t - (p - 1 - s))][s] for s in range(p)]
        ).requires_grad_()
        (0.5 * (taken.prod() * x[t] - y[t]) ** 2).backward()
        history.append(history[-1] - lr * taken.grad)
    return history[-1]


def double_buffered(weights, x, y, lr, k):
    history = [weights]
    for t in range(len(x)):
        taken = history[max(0, t - k)].clone().requires_grad_()
        (0.5 * (taken.prod() * x[t] - y[t]) ** 2).backward()
        history.append(history[-1] - lr * taken.grad)
    return history[-1]


def versions_held(p):
    return [p - s for s in range(p)]


# %% wrong="old_weights" fails="one update late" why="two updates late"
def pipedream(weights, x, y, lr):
    p, history = len(weights), [weights]
    for t in range(len(x)):
        taken = torch.stack(
            [history[max(0, t - (p - 1 - s))][s] for s in range(p)]
        ).requires_grad_()
        (0.5 * (taken.prod() * x[t] - y[t]) ** 2).backward()
        history.append(history[-1] - lr * taken.grad)
    return history[-1]


def double_buffered(weights, x, y, lr, k):
    history = [weights]
    for u in range(len(x) // k):
        taken = history[max(0, u - 2)].clone().requires_grad_()
        rows = slice(u * k, (u + 1) * k)
        (0.5 * (taken.prod() * x[rows] - y[rows]) ** 2).sum().backward()
        history.append(history[-1] - lr * taken.grad)
    return history[-1]


def versions_held(p):
    return [p - s for s in range(p)]


# %% wrong="old_weights" fails="versions held" why="two versions everywhere: that is 2BW"
def pipedream(weights, x, y, lr):
    p, history = len(weights), [weights]
    for t in range(len(x)):
        taken = torch.stack(
            [history[max(0, t - (p - 1 - s))][s] for s in range(p)]
        ).requires_grad_()
        (0.5 * (taken.prod() * x[t] - y[t]) ** 2).backward()
        history.append(history[-1] - lr * taken.grad)
    return history[-1]


def double_buffered(weights, x, y, lr, k):
    history = [weights]
    for u in range(len(x) // k):
        taken = history[max(0, u - 1)].clone().requires_grad_()
        rows = slice(u * k, (u + 1) * k)
        (0.5 * (taken.prod() * x[rows] - y[rows]) ** 2).sum().backward()
        history.append(history[-1] - lr * taken.grad)
    return history[-1]


def versions_held(p):
    return [2] * p


# %% wrong="old_weights" fails="versions held" why="the newest is not counted"
def pipedream(weights, x, y, lr):
    p, history = len(weights), [weights]
    for t in range(len(x)):
        taken = torch.stack(
            [history[max(0, t - (p - 1 - s))][s] for s in range(p)]
        ).requires_grad_()
        (0.5 * (taken.prod() * x[t] - y[t]) ** 2).backward()
        history.append(history[-1] - lr * taken.grad)
    return history[-1]


def double_buffered(weights, x, y, lr, k):
    history = [weights]
    for u in range(len(x) // k):
        taken = history[max(0, u - 1)].clone().requires_grad_()
        rows = slice(u * k, (u + 1) * k)
        (0.5 * (taken.prod() * x[rows] - y[rows]) ** 2).sum().backward()
        history.append(history[-1] - lr * taken.grad)
    return history[-1]


def versions_held(p):
    return [p - 1 - s for s in range(p)]


# %% wrong="old_weights" fails="versions held" why="the last stage holds most"
def pipedream(weights, x, y, lr):
    p, history = len(weights), [weights]
    for t in range(len(x)):
        taken = torch.stack(
            [history[max(0, t - (p - 1 - s))][s] for s in range(p)]
        ).requires_grad_()
        (0.5 * (taken.prod() * x[t] - y[t]) ** 2).backward()
        history.append(history[-1] - lr * taken.grad)
    return history[-1]


def double_buffered(weights, x, y, lr, k):
    history = [weights]
    for u in range(len(x) // k):
        taken = history[max(0, u - 1)].clone().requires_grad_()
        rows = slice(u * k, (u + 1) * k)
        (0.5 * (taken.prod() * x[rows] - y[rows]) ** 2).sum().backward()
        history.append(history[-1] - lr * taken.grad)
    return history[-1]


def versions_held(p):
    return [s + 1 for s in range(p)]


# %% wrong="old_weights" fails="versions held" why="every stage holds p"
def pipedream(weights, x, y, lr):
    p, history = len(weights), [weights]
    for t in range(len(x)):
        taken = torch.stack(
            [history[max(0, t - (p - 1 - s))][s] for s in range(p)]
        ).requires_grad_()
        (0.5 * (taken.prod() * x[t] - y[t]) ** 2).backward()
        history.append(history[-1] - lr * taken.grad)
    return history[-1]


def double_buffered(weights, x, y, lr, k):
    history = [weights]
    for u in range(len(x) // k):
        taken = history[max(0, u - 1)].clone().requires_grad_()
        rows = slice(u * k, (u + 1) * k)
        (0.5 * (taken.prod() * x[rows] - y[rows]) ** 2).sum().backward()
        history.append(history[-1] - lr * taken.grad)
    return history[-1]


def versions_held(p):
    return [p] * p


# %% wrong="kept_units" fails="memory limit" why="one microbatch in flight, whatever the stage"
def kept_units(times, sizes, p, s, m, cap):
    n, best = 1, None
    for flags in product((True, False), repeat=len(times)):
        again = sum(time for time, keep in zip(times, flags) if not keep)
        if n * sum(size for size, keep in zip(sizes, flags) if keep) <= cap and (
            best is None or again < best[0]
        ):
            best = again, flags
    return list(best[1])


# %% wrong="kept_units" fails="least recomputation" why="every stage as the first one: p in flight"
def kept_units(times, sizes, p, s, m, cap):
    n, best = min(p, m), None
    for flags in product((True, False), repeat=len(times)):
        again = sum(time for time, keep in zip(times, flags) if not keep)
        if n * sum(size for size, keep in zip(sizes, flags) if keep) <= cap and (
            best is None or again < best[0]
        ):
            best = again, flags
    return list(best[1])


# %% wrong="kept_units" fails="least recomputation" why="p - s in flight, though there may be fewer microbatches"
def kept_units(times, sizes, p, s, m, cap):
    n, best = p - s, None
    for flags in product((True, False), repeat=len(times)):
        again = sum(time for time, keep in zip(times, flags) if not keep)
        if n * sum(size for size, keep in zip(sizes, flags) if keep) <= cap and (
            best is None or again < best[0]
        ):
            best = again, flags
    return list(best[1])


# %% wrong="kept_units" fails="least recomputation" why="counted from the other end: s + 1 in flight"
def kept_units(times, sizes, p, s, m, cap):
    n, best = min(s + 1, m), None
    for flags in product((True, False), repeat=len(times)):
        again = sum(time for time, keep in zip(times, flags) if not keep)
        if n * sum(size for size, keep in zip(sizes, flags) if keep) <= cap and (
            best is None or again < best[0]
        ):
            best = again, flags
    return list(best[1])


# %% wrong="kept_units" fails="least recomputation" why="all or nothing"
def kept_units(times, sizes, p, s, m, cap):
    return [min(p - s, m) * sum(sizes) <= cap] * len(times)


# %% wrong="kept_units" fails="least recomputation" why="greedy: the longest times first"
def kept_units(times, sizes, p, s, m, cap):
    flags, left = [False] * len(times), cap
    for unit in sorted(range(len(times)), key=lambda unit: -times[unit]):
        if min(p - s, m) * sizes[unit] <= left:
            flags[unit], left = True, left - min(p - s, m) * sizes[unit]
    return flags


# %% wrong="kept_units" fails="least recomputation" why="greedy: the most time a byte first"
def kept_units(times, sizes, p, s, m, cap):
    flags, left = [False] * len(times), cap
    for unit in sorted(range(len(times)), key=lambda unit: -times[unit] / sizes[unit]):
        if min(p - s, m) * sizes[unit] <= left:
            flags[unit], left = True, left - min(p - s, m) * sizes[unit]
    return flags


# %% wrong="kept_units" fails="least recomputation" why="keeps as many units as fit, the smallest first"
def kept_units(times, sizes, p, s, m, cap):
    flags, left = [False] * len(times), cap
    for unit in sorted(range(len(times)), key=lambda unit: sizes[unit]):
        if min(p - s, m) * sizes[unit] <= left:
            flags[unit], left = True, left - min(p - s, m) * sizes[unit]
    return flags


# %% wrong="kept_units" fails="least recomputation" why="says what is recomputed, not what is kept"
def kept_units(times, sizes, p, s, m, cap):
    n, best = min(p - s, m), None
    for flags in product((True, False), repeat=len(times)):
        again = sum(time for time, keep in zip(times, flags) if not keep)
        if n * sum(size for size, keep in zip(sizes, flags) if keep) <= cap and (
            best is None or again < best[0]
        ):
            best = again, flags
    return [not keep for keep in best[1]]
