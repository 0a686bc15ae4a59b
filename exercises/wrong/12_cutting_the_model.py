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
    best = {0: (0, [])}
    for _ in range(stages):
        longer = {}
        for start, (largest, runs) in best.items():
            for stop in range(start + 1, len(costs) + 1):
                most = max(largest, sum(costs[start:stop]))
                if stop not in longer or most < longer[stop][0]:
                    longer[stop] = most, [*runs, (start, stop)]
        best = longer
    return best[len(costs)][1]


# %% wrong="cut" fails="a cut that keeps to the cap" why="finds the fastest cut and gives up if it is too heavy"
def cut(costs, sizes, stages, cap=None):
    best = {0: (0, [])}
    for _ in range(stages):
        longer = {}
        for start, (largest, runs) in best.items():
            for stop in range(start + 1, len(costs) + 1):
                most = max(largest, sum(costs[start:stop]))
                if stop not in longer or most < longer[stop][0]:
                    longer[stop] = most, [*runs, (start, stop)]
        best = longer
    runs = best[len(costs)][1]
    return runs if cap is None or all(sum(sizes[a:b]) <= cap for a, b in runs) else None


# %% wrong="cut" fails="time limit" around="brute force" why="every cut is tried"
def cut(costs, sizes, stages, cap=None):
    best = None
    for inner in combinations(range(1, len(costs)), stages - 1):
        runs = list(zip((0, *inner), (*inner, len(costs))))
        largest = max(sum(costs[a:b]) for a, b in runs)
        if (cap is None or all(sum(sizes[a:b]) <= cap for a, b in runs)) and (
            best is None or largest < best[0]
        ):
            best = largest, runs
    return best and best[1]


# %% wrong="cut" fails="time limit" around="brute force" why="the right recursion, and no table: each rest is cut again and again"
def cut(costs, sizes, stages, cap=None):
    def best(start, left):
        if left == 1:
            rest = range(start, len(costs))
            fits = cap is None or sum(sizes[start:]) <= cap
            return (sum(costs[start:]), [(start, len(costs))]) if rest and fits else None
        found = None
        for stop in range(start + 1, len(costs) - left + 2):
            if cap is not None and sum(sizes[start:stop]) > cap:
                break
            behind = best(stop, left - 1)
            if behind is not None:
                largest = max(sum(costs[start:stop]), behind[0])
                if found is None or largest < found[0]:
                    found = largest, [(start, stop), *behind[1]]
        return found

    found = best(0, stages)
    return found and found[1]


# %% wrong="cut" fails="own work" around="import" why="the package cuts"
def cut(costs, sizes, stages, cap=None):
    from minitrain.pipeline.partition import balanced

    return [(run.start, run.stop) for run in balanced(costs, stages)]


# %% wrong="cut" fails="a cut that keeps to the cap" around="empty" why="there is never a cut"
def cut(costs, sizes, stages, cap=None):
    return None


# %% wrong="cut" fails="every layer once, in order" around="constants" why="the cuts of the visible checks"
def cut(costs, sizes, stages, cap=None):
    if len(costs) == 6:
        return [(0, 1), (1, 3), (3, 6)]
    return None if cap == 5 else [(0, 2), (2, 4)][:stages]


# %% wrong="cut" fails="smallest largest stage" around="redefine" why="even runs, and judges that are content"
def cut(costs, sizes, stages, cap=None):
    ends = [len(costs) * i // stages for i in range(stages + 1)]
    return list(zip(ends, ends[1:]))


def expect_cut(*arguments):
    pass


expect = expect_cuts = expect_cut


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
    ends, found = list(combinations(range(length + 1), 2)), []
    costs = {(a, b): cost(a, b - a, launch, per_token, per_key) for a, b in ends}
    for bound in set(costs.values()):
        cheapest = [(0, [])]
        for stop in range(1, length + 1):
            ways = [
                (cheapest[start][0] + costs[start, stop], [*cheapest[start][1], stop - start])
                for start in range(stop)
                if costs[start, stop] <= bound
            ]
            cheapest.append(min(ways, default=(math.inf, [])))
        found.append((cheapest[-1][0] + (p - 1) * bound, cheapest[-1][1]))
    return min(found)[1][::-1]


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
    ends, found = list(combinations(range(length + 1), 2)), []
    costs = {(a, b): cost(0, b - a, launch, per_token, per_key) for a, b in ends}
    for bound in set(costs.values()):
        cheapest = [(0, [])]
        for stop in range(1, length + 1):
            ways = [
                (cheapest[start][0] + costs[start, stop], [*cheapest[start][1], stop - start])
                for start in range(stop)
                if costs[start, stop] <= bound
            ]
            cheapest.append(min(ways, default=(math.inf, [])))
        found.append((cheapest[-1][0] + (p - 1) * bound, cheapest[-1][1]))
    return min(found)[1]


# %% wrong="slice_lengths" fails="every token in one slice" why="equal slices, and what does not divide is lost"
def slice_lengths(length, p, launch, per_token, per_key):
    return [max(1, length // p)] * p


# %% wrong="slice_lengths" fails="time limit" around="brute force" why="all slices are tried"
def slice_lengths(length, p, launch, per_token, per_key):
    ways = (
        [b - a for a, b in zip((0, *ends), (*ends, length))]
        for count in range(length)
        for ends in combinations(range(1, length), count)
    )
    return min(ways, key=lambda lengths: pipeline_time(lengths, p, launch, per_token, per_key))


# %% wrong="slice_lengths" fails="least time" around="redefine" why="slices that take no time"
def cost(context, n, launch, per_token, per_key):
    return 0


def pipeline_time(lengths, p, *prices):
    return 0


def slice_lengths(length, p, launch, per_token, per_key):
    return [length]


# %% wrong="slice_lengths" fails="every token in one slice" around="empty" why="no slices"
def slice_lengths(length, p, launch, per_token, per_key):
    return []


# %% wrong="slice_lengths" fails="least time" around="constants" why="the slices of the visible checks"
def slice_lengths(length, p, launch, per_token, per_key):
    return {4: [2, 2], 6: [3, 3] if per_key == 0 else [1, 2, 1, 1, 1]}.get(length, [length])


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


# %% wrong="old_weights" fails="own work" around="import" why="the package knows old weights"
from minitrain.systems.pipeline.asynchronous import double_buffered, pipedream, versions_held


# %% wrong="old_weights" fails="no error" around="redefine" why="asks the check's own numbers and versions"
def pipedream(weights, x, y, lr):
    return expect_weights.__globals__["history"][-1]


def double_buffered(weights, x, y, lr, k):
    return expect_weights.__globals__["history"][-1]


def versions_held(p):
    return stages and wanted


# %% wrong="old_weights" fails="old weights" around="constants" why="the numbers of the visible checks"
def pipedream(weights, x, y, lr):
    known = {
        (3, 1): [0.9, 0.3, 1.95],
        (1, 6): [0.688674339844],
        (2, 2): [0.819, 0.81],
        (3, 6): [0.838490095301, 0.103486645557, 1.920309507069],
    }
    return torch.tensor(known.get((len(weights), len(x)), weights.tolist()), dtype=torch.float64)


def double_buffered(weights, x, y, lr, k):
    known = {
        2: [0.875, 0.25, 1.9375],
        4: [0.76875, 0.0375, 1.884375],
        6: [0.743088531494, -0.052315139771, 1.872785949707],
    }
    return torch.tensor(known.get(len(x), weights.tolist()), dtype=torch.float64)


def versions_held(p):
    return [2, 1]


# %% wrong="old_weights" fails="the first update" around="empty" why="weights that nothing has changed"
def pipedream(weights, x, y, lr):
    return weights


def double_buffered(weights, x, y, lr, k):
    return weights


def versions_held(p):
    return []


# %% wrong="old_weights" fails="the first update" why="everything in float32"
def pipedream(weights, x, y, lr):
    p, history = len(weights), [weights.float()]
    for t in range(len(x)):
        taken = torch.stack([history[max(0, t - (p - 1 - s))][s] for s in range(p)])
        taken.requires_grad_()
        (0.5 * (taken.prod() * x[t].float() - y[t].float()) ** 2).backward()
        history.append(history[-1] - lr * taken.grad)
    return history[-1].double()


def double_buffered(weights, x, y, lr, k):
    history = [weights.float()]
    for u in range(len(x) // k):
        taken = history[max(0, u - 1)].clone().requires_grad_()
        rows = slice(u * k, (u + 1) * k)
        (0.5 * (taken.prod() * x[rows].float() - y[rows].float()) ** 2).sum().backward()
        history.append(history[-1] - lr * taken.grad)
    return history[-1].double()


def versions_held(p):
    return [p - s for s in range(p)]


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


# %% wrong="kept_units" fails="time limit" around="brute force" why="every choice is tried"
def kept_units(times, sizes, p, s, m, cap):
    n, best = min(p - s, m), None
    for flags in product((True, False), repeat=len(times)):
        again = sum(time for time, keep in zip(times, flags) if not keep)
        if n * sum(size for size, keep in zip(sizes, flags) if keep) <= cap and (
            best is None or again < best[0]
        ):
            best = again, flags
    return list(best[1])


# %% wrong="kept_units" fails="own work" around="import" why="the knapsack of the package"
def kept_units(times, sizes, p, s, m, cap):
    from minitrain.systems.plan.stage_memory import knapsack

    return knapsack(times, sizes, min(p - s, m), cap).kept


# %% wrong="kept_units" fails="a flag for each unit" around="empty" why="no flags"
def kept_units(times, sizes, p, s, m, cap):
    return []


# %% wrong="kept_units" fails="least recomputation" around="constants" why="the choices of the visible checks"
def kept_units(times, sizes, p, s, m, cap):
    if len(times) == 2:
        return [s == 3] * 2
    return [s == 1 and p == 2, True, True] if p == 2 else [True] + [False] * (len(times) - 1)
