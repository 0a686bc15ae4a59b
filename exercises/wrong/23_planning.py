# %% wrong="fitting" fails="states" why="ZeRO cuts nothing"
def fitting(layouts, P, A, m, M):
    return [list(x) for x in layouts if Fraction(16 * P + A * min(x[2], m), x[1] * x[2]) <= M]


# %% wrong="fitting" fails="states" why="every stage of ZeRO cuts everything"
def fitting(layouts, P, A, m, M):
    def needs(dp, tp, pp, zero):
        return (Fraction(16 * P, dp if zero else 1) + A * min(pp, m)) / (tp * pp)

    return [list(x) for x in layouts if needs(*x) <= M]


# %% wrong="fitting" fails="activations" why="one microbatch is in flight"
def fitting(layouts, P, A, m, M):
    def needs(dp, tp, pp, zero):
        cut = ((12, 1), (2, 2), (2, 3))
        states = sum(Fraction(size, dp if zero >= stage else 1) for size, stage in cut)
        return (states * P + A) / (tp * pp)

    return [list(x) for x in layouts if needs(*x) <= M]


# %% wrong="fitting" fails="activations" why="pp microbatches, even where there are fewer"
def fitting(layouts, P, A, m, M):
    def needs(dp, tp, pp, zero):
        cut = ((12, 1), (2, 2), (2, 3))
        states = sum(Fraction(size, dp if zero >= stage else 1) for size, stage in cut)
        return (states * P + A * pp) / (tp * pp)

    return [list(x) for x in layouts if needs(*x) <= M]


# %% wrong="fitting" fails="states" around="empty" why="nothing fits"
def fitting(layouts, P, A, m, M):
    return []


# %% wrong="slowest" fails="pace" why="equal numbers of layers"
def slowest(seconds, sends, p):
    n = len(seconds)
    ends = [n * i // p for i in range(p + 1)]
    return max(sum(seconds[a:b]) + (sends[b - 1] if b < n else 0) for a, b in zip(ends, ends[1:]))


# %% wrong="slowest" fails="pace" why="the mean, as if layers could be cut"
def slowest(seconds, sends, p):
    return max(-(-sum(seconds) // p), max(seconds))


# %% wrong="slowest" fails="messages" why="messages are free"
def slowest(seconds, sends, p):
    low, high = max(seconds), sum(seconds)
    while low < high:
        middle, stages, here = (low + high) // 2, 1, 0
        for second in seconds:
            if here + second > middle:
                stages, here = stages + 1, 0
            here += second
        low, high = (low, middle) if stages <= p else (middle + 1, high)
    return low


# %% wrong="slowest" fails="time limit" around="brute force" why="every cut"
def slowest(seconds, sends, p):
    n, best = len(seconds), math.inf
    for cuts in combinations(range(1, n), p - 1):
        ends = (0, *cuts, n)
        times = [sum(seconds[a:b]) + (sends[b - 1] if b < n else 0) for a, b in zip(ends, ends[1:])]
        best = min(best, max(times))
    return best


# %% wrong="ring" fails="steps and bytes" why="a reduce-scatter alone"
def ring(n, r, first, stride, node, fast, slow):
    nodes = {(first + i * stride) // node for i in range(r)}
    return (r - 1) * n / r * (slow if len(nodes) > 1 else fast)


# %% wrong="ring" fails="steps and bytes" why="the whole tensor in each step"
def ring(n, r, first, stride, node, fast, slow):
    nodes = {(first + i * stride) // node for i in range(r)}
    return 2.0 * (r - 1) * n * (slow if len(nodes) > 1 else fast)


# %% wrong="ring" fails="slowest link" why="slow only where the ring is larger than a node"
def ring(n, r, first, stride, node, fast, slow):
    return 2 * (r - 1) * n / r * (slow if r > node else fast)


# %% wrong="ring" fails="slowest link" why="the mean over links"
def ring(n, r, first, stride, node, fast, slow):
    members = [first + i * stride for i in range(r)]
    links = zip(members, members[1:] + members[:1])
    total = sum(fast if a // node == b // node else slow for a, b in links)
    return 2 * (r - 1) * n / r * total / r


# %% wrong="walk" fails="downhill" why="each plan is proposed, its own too"
def walk(costs):
    k, rows = len(costs), []
    for i, now in enumerate(costs):
        row = [Fraction(1, k) * Fraction(1, 2 ** max(0, new - now)) for new in costs]
        row[i] = Fraction(0)
        row[i] = 1 - sum(row)
        rows.append([float(x) for x in row])
    return rows


# %% wrong="walk" fails="rows add up to 1" why="nobody stays"
def walk(costs):
    k = len(costs)
    share = lambda now, new: Fraction(1, k - 1) * Fraction(1, 2 ** max(0, new - now))
    return [
        [float(share(now, new)) if i != j else 0.0 for j, new in enumerate(costs)]
        for i, now in enumerate(costs)
    ]


# %% wrong="walk" fails="stationary" why="only downhill"
def walk(costs):
    k, rows = len(costs), []
    for i, now in enumerate(costs):
        row = [Fraction(int(new <= now), k - 1) for new in costs]
        row[i] = Fraction(0)
        row[i] = 1 - sum(row)
        rows.append([float(x) for x in row])
    return rows


# %% wrong="walk" fails="downhill" why="straight to the stationary shares"
def walk(costs):
    share = [Fraction(1, 2**cost) for cost in costs]
    return [[float(one / sum(share)) for one in share] for _ in costs]


# %% wrong="culprit" fails="the term" why="the largest term of the first run"
def culprit(runs):
    terms, measured = runs[0]
    name = max(terms, key=terms.get)
    return [name, 1 + (measured - sum(terms.values())) / terms[name]]


# %% wrong="culprit" fails="the factor" why="measured over predicted"
def culprit(runs):
    terms, measured = runs[0]
    for name in terms:
        factor = 1 + Fraction(measured - sum(terms.values()), terms[name])
        if all(sum(t.values()) + (factor - 1) * t[name] == time for t, time in runs):
            return [name, measured / sum(terms.values())]
    return None


# %% wrong="culprit" fails="nothing explains it" why="the term that explains most runs"
def culprit(runs):
    def explained(name):
        terms, measured = runs[0]
        more = Fraction(measured - sum(terms.values()), terms[name])
        return sum(sum(t.values()) + more * t[name] == time for t, time in runs)

    terms, measured = runs[0]
    name = max(terms, key=explained)
    return [name, 1 + (measured - sum(terms.values())) / terms[name]]


# %% wrong="culprit" fails="a term and a factor" around="empty" why="nothing"
def culprit(runs):
    return None
