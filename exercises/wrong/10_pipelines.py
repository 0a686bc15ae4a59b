# %% wrong="gpipe" fails="in the order of the microbatches" why="backwards from the last microbatch to the first"
def gpipe(p, m):
    return [
        [F(rank, i) for i in range(m)] + [B(rank, i) for i in reversed(range(m))]
        for rank in range(p)
    ]


def held(lists):
    peaks = []
    for own in lists:
        now = most = 0
        for kind, _, _ in own:
            now += 1 if kind == "F" else -1
            most = max(most, now)
        peaks.append(most)
    return peaks


# %% wrong="gpipe" fails="forwards first" why="each forward is followed by its backward"
def gpipe(p, m):
    return [[action for i in range(m) for action in (F(rank, i), B(rank, i))] for rank in range(p)]


def held(lists):
    peaks = []
    for own in lists:
        now = most = 0
        for kind, _, _ in own:
            now += 1 if kind == "F" else -1
            most = max(most, now)
        peaks.append(most)
    return peaks


# %% wrong="gpipe" fails="every action once" why="all ranks do stage 0"
def gpipe(p, m):
    return [[F(0, i) for i in range(m)] + [B(0, i) for i in range(m)] for rank in range(p)]


def held(lists):
    peaks = []
    for own in lists:
        now = most = 0
        for kind, _, _ in own:
            now += 1 if kind == "F" else -1
            most = max(most, now)
        peaks.append(most)
    return peaks


# %% wrong="gpipe" fails="every action once" why="microbatches from 1 on"
def gpipe(p, m):
    return [
        [F(rank, i) for i in range(1, m + 1)] + [B(rank, i) for i in range(1, m + 1)]
        for rank in range(p)
    ]


def held(lists):
    peaks = []
    for own in lists:
        now = most = 0
        for kind, _, _ in own:
            now += 1 if kind == "F" else -1
            most = max(most, now)
        peaks.append(most)
    return peaks


# %% wrong="gpipe" fails="a forward before its backward" why="backwards first"
def gpipe(p, m):
    return [[B(rank, i) for i in range(m)] + [F(rank, i) for i in range(m)] for rank in range(p)]


def held(lists):
    peaks = []
    for own in lists:
        now = most = 0
        for kind, _, _ in own:
            now += 1 if kind == "F" else -1
            most = max(most, now)
        peaks.append(most)
    return peaks


# %% wrong="gpipe" fails="a list for each rank" why="a list for each microbatch"
def gpipe(p, m):
    return [
        [F(rank, i) for rank in range(p)] + [B(rank, i) for rank in range(p)] for i in range(m + 1)
    ]


def held(lists):
    peaks = []
    for own in lists:
        now = most = 0
        for kind, _, _ in own:
            now += 1 if kind == "F" else -1
            most = max(most, now)
        peaks.append(most)
    return peaks


# %% wrong="gpipe" fails="the most at any time" why="all forwards are counted, whatever is given back"
def gpipe(p, m):
    return [[F(rank, i) for i in range(m)] + [B(rank, i) for i in range(m)] for rank in range(p)]


def held(lists):
    return [sum(kind == "F" for kind, _, _ in own) for own in lists]


# %% wrong="gpipe" fails="the most at any time" why="what is held before the first backward, not later"
def gpipe(p, m):
    return [[F(rank, i) for i in range(m)] + [B(rank, i) for i in range(m)] for rank in range(p)]


def held(lists):
    peaks = []
    for own in lists:
        kinds = [kind for kind, _, _ in own]
        peaks.append(kinds.index("B") if "B" in kinds else len(kinds))
    return peaks


# %% wrong="gpipe" fails="the most at any time" why="what is held after a backward only"
def gpipe(p, m):
    return [[F(rank, i) for i in range(m)] + [B(rank, i) for i in range(m)] for rank in range(p)]


def held(lists):
    peaks = []
    for own in lists:
        now = most = 0
        for kind, _, _ in own:
            now += 1 if kind == "F" else -1
            most = max(most, now) if kind == "B" else most
        peaks.append(most)
    return peaks


# %% wrong="gpipe" fails="the most at any time" why="what is held at the end"
def gpipe(p, m):
    return [[F(rank, i) for i in range(m)] + [B(rank, i) for i in range(m)] for rank in range(p)]


def held(lists):
    peaks = []
    for own in lists:
        now = most = 0
        for kind, _, _ in own:
            now += 1 if kind == "F" else -1
            most = max(most, now)
        peaks.append(now)
    return peaks


# %% wrong="one_f_one_b" fails="forwards before the first backward" why="off by one: the warm-up without the forward that follows it"
def before_backward(rank, p, m):
    return min(p - rank - 1, m)


def one_f_one_b(p, m):
    lists = []
    for rank in range(p):
        first = min(p - rank, m)
        own = [F(rank, i) for i in range(first)]
        for i in range(m - first):
            own += [B(rank, i), F(rank, first + i)]
        lists.append(own + [B(rank, i) for i in range(m - first, m)])
    return lists


# %% wrong="one_f_one_b" fails="forwards before the first backward" why="the first rank has fewest, the last most"
def before_backward(rank, p, m):
    return min(rank + 1, m)


def one_f_one_b(p, m):
    lists = []
    for rank in range(p):
        first = min(p - rank, m)
        own = [F(rank, i) for i in range(first)]
        for i in range(m - first):
            own += [B(rank, i), F(rank, first + i)]
        lists.append(own + [B(rank, i) for i in range(m - first, m)])
    return lists


# %% wrong="one_f_one_b" fails="forwards before the first backward" why="every rank holds p"
def before_backward(rank, p, m):
    return min(p, m)


def one_f_one_b(p, m):
    lists = []
    for rank in range(p):
        first = min(p - rank, m)
        own = [F(rank, i) for i in range(first)]
        for i in range(m - first):
            own += [B(rank, i), F(rank, first + i)]
        lists.append(own + [B(rank, i) for i in range(m - first, m)])
    return lists


# %% wrong="one_f_one_b" fails="no more than there are" why="fewer microbatches than ranks are not thought of"
def before_backward(rank, p, m):
    return p - rank


def one_f_one_b(p, m):
    lists = []
    for rank in range(p):
        first = min(p - rank, m)
        own = [F(rank, i) for i in range(first)]
        for i in range(m - first):
            own += [B(rank, i), F(rank, first + i)]
        lists.append(own + [B(rank, i) for i in range(m - first, m)])
    return lists


# %% wrong="one_f_one_b" fails="forwards before the first backward" why="one too many"
def before_backward(rank, p, m):
    return min(p - rank + 1, m)


def one_f_one_b(p, m):
    lists = []
    for rank in range(p):
        first = min(p - rank, m)
        own = [F(rank, i) for i in range(first)]
        for i in range(m - first):
            own += [B(rank, i), F(rank, first + i)]
        lists.append(own + [B(rank, i) for i in range(m - first, m)])
    return lists


# %% wrong="one_f_one_b" fails="every action once" why="the backwards that are left are missing"
def before_backward(rank, p, m):
    return min(p - rank, m)


def one_f_one_b(p, m):
    lists = []
    for rank in range(p):
        first = min(p - rank, m)
        own = [F(rank, i) for i in range(first)]
        for i in range(m - first):
            own += [B(rank, i), F(rank, first + i)]
        lists.append(own)
    return lists


# %% wrong="one_f_one_b" fails="every action once" why="stages run with more microbatches than there are, if m is below p"
def before_backward(rank, p, m):
    return min(p - rank, m)


def one_f_one_b(p, m):
    lists = []
    for rank in range(p):
        first = p - rank
        own = [F(rank, i) for i in range(first)]
        for i in range(m - first):
            own += [B(rank, i), F(rank, first + i)]
        lists.append(own + [B(rank, i) for i in range(m - first, m)])
    return lists


# %% wrong="one_f_one_b" fails="forwards ahead" why="all ranks as many as the first"
def before_backward(rank, p, m):
    return min(p - rank, m)


def one_f_one_b(p, m):
    lists = []
    for rank in range(p):
        first = min(p, m)
        own = [F(rank, i) for i in range(first)]
        for i in range(m - first):
            own += [B(rank, i), F(rank, first + i)]
        lists.append(own + [B(rank, i) for i in range(m - first, m)])
    return lists


# %% wrong="one_f_one_b" fails="a forward before its backward" why="off by one, so that the last rank begins with a backward"
def before_backward(rank, p, m):
    return min(p - rank, m)


def one_f_one_b(p, m):
    lists = []
    for rank in range(p):
        first = min(p - rank - 1, m)
        own = [F(rank, i) for i in range(first)]
        for i in range(m - first):
            own += [B(rank, i), F(rank, first + i)]
        lists.append(own + [B(rank, i) for i in range(m - first, m)])
    return lists


# %% wrong="one_f_one_b" fails="forwards ahead" why="all forwards first: GPipe"
def before_backward(rank, p, m):
    return min(p - rank, m)


def one_f_one_b(p, m):
    lists = []
    for rank in range(p):
        first = m
        own = [F(rank, i) for i in range(first)]
        for i in range(m - first):
            own += [B(rank, i), F(rank, first + i)]
        lists.append(own + [B(rank, i) for i in range(m - first, m)])
    return lists


# %% wrong="one_f_one_b" fails="one forward, one backward" why="two forwards and two backwards take turns"
def before_backward(rank, p, m):
    return min(p - rank, m)


def one_f_one_b(p, m):
    lists = []
    for rank in range(p):
        first = min(p - rank, m)
        own = [F(rank, i) for i in range(first)]
        rest = [(B(rank, i), F(rank, first + i)) for i in range(m - first)]
        for i in range(0, len(rest), 2):
            pair = rest[i : i + 2]
            own += (
                [b for b, _ in pair] + [f for _, f in pair]
                if first > 1
                else [action for turn in pair for action in turn]
            )
        lists.append(own + [B(rank, i) for i in range(m - first, m)])
    return lists


# %% wrong="one_f_one_b" fails="the order of stages and microbatches" why="the latest microbatch goes backward first, as on a stack"
def before_backward(rank, p, m):
    return min(p - rank, m)


def one_f_one_b(p, m):
    lists = []
    for rank in range(p):
        first = min(p - rank, m)
        own = [F(rank, i) for i in range(first)]
        waiting = list(range(first))
        for i in range(first, m):
            own += [B(rank, waiting.pop()), F(rank, i)]
            waiting.append(i)
        lists.append(own + [B(rank, i) for i in reversed(waiting)])
    return lists


# %% wrong="interleaved" fails="stages of this rank" why="a rank has v stages in a row"
def forward_of(k, rank, p, v):
    rounds, place = divmod(k, p * v)
    return rank * v + place // p, rounds * p + place % p


def backward_of(k, rank, p, v):
    rounds, place = divmod(k, p * v)
    return (v - 1 - place // p) * p + rank, rounds * p + place % p


def interleaved(p, m, v):
    lists = []
    for rank in range(p):
        first = min(2 * (p - rank - 1) + (v - 1) * p, m * v)
        own = [F(*forward_of(k, rank, p, v)) for k in range(first)]
        for k in range(m * v - first):
            own += [F(*forward_of(first + k, rank, p, v)), B(*backward_of(k, rank, p, v))]
        lists.append(own + [B(*backward_of(k, rank, p, v)) for k in range(m * v - first, m * v)])
    return lists


# %% wrong="interleaved" fails="the stage of a forward" why="chunk after chunk for each microbatch"
def forward_of(k, rank, p, v):
    rounds, place = divmod(k, p * v)
    return place % v * p + rank, rounds * p + place // v


def backward_of(k, rank, p, v):
    rounds, place = divmod(k, p * v)
    return (v - 1 - place // p) * p + rank, rounds * p + place % p


def interleaved(p, m, v):
    lists = []
    for rank in range(p):
        first = min(2 * (p - rank - 1) + (v - 1) * p, m * v)
        own = [F(*forward_of(k, rank, p, v)) for k in range(first)]
        for k in range(m * v - first):
            own += [F(*forward_of(first + k, rank, p, v)), B(*backward_of(k, rank, p, v))]
        lists.append(own + [B(*backward_of(k, rank, p, v)) for k in range(m * v - first, m * v)])
    return lists


# %% wrong="interleaved" fails="the stage of a forward" why="rounds are forgotten, so that stages go on for ever"
def forward_of(k, rank, p, v):
    rounds, place = divmod(k, p * v)
    return k // p * p + rank, k % p


def backward_of(k, rank, p, v):
    rounds, place = divmod(k, p * v)
    return (v - 1 - place // p) * p + rank, rounds * p + place % p


def interleaved(p, m, v):
    lists = []
    for rank in range(p):
        first = min(2 * (p - rank - 1) + (v - 1) * p, m * v)
        own = [F(*forward_of(k, rank, p, v)) for k in range(first)]
        for k in range(m * v - first):
            own += [F(*forward_of(first + k, rank, p, v)), B(*backward_of(k, rank, p, v))]
        lists.append(own + [B(*backward_of(k, rank, p, v)) for k in range(m * v - first, m * v)])
    return lists


# %% wrong="interleaved" fails="the microbatch of a forward" why="every round has the first p microbatches"
def forward_of(k, rank, p, v):
    rounds, place = divmod(k, p * v)
    return place // p * p + rank, place % p


def backward_of(k, rank, p, v):
    rounds, place = divmod(k, p * v)
    return (v - 1 - place // p) * p + rank, rounds * p + place % p


def interleaved(p, m, v):
    lists = []
    for rank in range(p):
        first = min(2 * (p - rank - 1) + (v - 1) * p, m * v)
        own = [F(*forward_of(k, rank, p, v)) for k in range(first)]
        for k in range(m * v - first):
            own += [F(*forward_of(first + k, rank, p, v)), B(*backward_of(k, rank, p, v))]
        lists.append(own + [B(*backward_of(k, rank, p, v)) for k in range(m * v - first, m * v)])
    return lists


# %% wrong="interleaved" fails="the stage of a backward" why="backwards begin with the first chunk"
def forward_of(k, rank, p, v):
    rounds, place = divmod(k, p * v)
    return place // p * p + rank, rounds * p + place % p


def backward_of(k, rank, p, v):
    rounds, place = divmod(k, p * v)
    return place // p * p + rank, rounds * p + place % p


def interleaved(p, m, v):
    lists = []
    for rank in range(p):
        first = min(2 * (p - rank - 1) + (v - 1) * p, m * v)
        own = [F(*forward_of(k, rank, p, v)) for k in range(first)]
        for k in range(m * v - first):
            own += [F(*forward_of(first + k, rank, p, v)), B(*backward_of(k, rank, p, v))]
        lists.append(own + [B(*backward_of(k, rank, p, v)) for k in range(m * v - first, m * v)])
    return lists


# %% wrong="interleaved" fails="the microbatch of a backward" why="backwards take microbatches from the last to the first"
def forward_of(k, rank, p, v):
    rounds, place = divmod(k, p * v)
    return place // p * p + rank, rounds * p + place % p


def backward_of(k, rank, p, v):
    rounds, place = divmod(k, p * v)
    return (v - 1 - place // p) * p + rank, rounds * p + p - 1 - place % p


def interleaved(p, m, v):
    lists = []
    for rank in range(p):
        first = min(2 * (p - rank - 1) + (v - 1) * p, m * v)
        own = [F(*forward_of(k, rank, p, v)) for k in range(first)]
        for k in range(m * v - first):
            own += [F(*forward_of(first + k, rank, p, v)), B(*backward_of(k, rank, p, v))]
        lists.append(own + [B(*backward_of(k, rank, p, v)) for k in range(m * v - first, m * v)])
    return lists


# %% wrong="interleaved" fails="forwards ahead" why="ahead without the factor of 2: right while messages take no time"
def forward_of(k, rank, p, v):
    rounds, place = divmod(k, p * v)
    return place // p * p + rank, rounds * p + place % p


def backward_of(k, rank, p, v):
    rounds, place = divmod(k, p * v)
    return (v - 1 - place // p) * p + rank, rounds * p + place % p


def interleaved(p, m, v):
    lists = []
    for rank in range(p):
        first = min((p - rank - 1) + (v - 1) * p, m * v)
        own = [F(*forward_of(k, rank, p, v)) for k in range(first)]
        for k in range(m * v - first):
            own += [F(*forward_of(first + k, rank, p, v)), B(*backward_of(k, rank, p, v))]
        lists.append(own + [B(*backward_of(k, rank, p, v)) for k in range(m * v - first, m * v)])
    return lists


# %% wrong="interleaved" fails="a forward before its backward" why="ahead as in 1F1B, chunks are forgotten"
def forward_of(k, rank, p, v):
    rounds, place = divmod(k, p * v)
    return place // p * p + rank, rounds * p + place % p


def backward_of(k, rank, p, v):
    rounds, place = divmod(k, p * v)
    return (v - 1 - place // p) * p + rank, rounds * p + place % p


def interleaved(p, m, v):
    lists = []
    for rank in range(p):
        first = min(p - rank - 1, m * v)
        own = [F(*forward_of(k, rank, p, v)) for k in range(first)]
        for k in range(m * v - first):
            own += [F(*forward_of(first + k, rank, p, v)), B(*backward_of(k, rank, p, v))]
        lists.append(own + [B(*backward_of(k, rank, p, v)) for k in range(m * v - first, m * v)])
    return lists


# %% wrong="interleaved" fails="forwards ahead" why="a whole round ahead beyond it"
def forward_of(k, rank, p, v):
    rounds, place = divmod(k, p * v)
    return place // p * p + rank, rounds * p + place % p


def backward_of(k, rank, p, v):
    rounds, place = divmod(k, p * v)
    return (v - 1 - place // p) * p + rank, rounds * p + place % p


def interleaved(p, m, v):
    lists = []
    for rank in range(p):
        first = min(2 * (p - rank - 1) + v * p, m * v)
        own = [F(*forward_of(k, rank, p, v)) for k in range(first)]
        for k in range(m * v - first):
            own += [F(*forward_of(first + k, rank, p, v)), B(*backward_of(k, rank, p, v))]
        lists.append(own + [B(*backward_of(k, rank, p, v)) for k in range(m * v - first, m * v)])
    return lists


# %% wrong="interleaved" fails="every action once" why="the backwards that are left are missing"
def forward_of(k, rank, p, v):
    rounds, place = divmod(k, p * v)
    return place // p * p + rank, rounds * p + place % p


def backward_of(k, rank, p, v):
    rounds, place = divmod(k, p * v)
    return (v - 1 - place // p) * p + rank, rounds * p + place % p


def interleaved(p, m, v):
    lists = []
    for rank in range(p):
        first = min(2 * (p - rank - 1) + (v - 1) * p, m * v)
        own = [F(*forward_of(k, rank, p, v)) for k in range(first)]
        for k in range(m * v - first):
            own += [F(*forward_of(first + k, rank, p, v)), B(*backward_of(k, rank, p, v))]
        lists.append(own)
    return lists


# %% wrong="interleaved" fails="every action once" why="more forwards ahead than there are"
def forward_of(k, rank, p, v):
    rounds, place = divmod(k, p * v)
    return place // p * p + rank, rounds * p + place % p


def backward_of(k, rank, p, v):
    rounds, place = divmod(k, p * v)
    return (v - 1 - place // p) * p + rank, rounds * p + place % p


def interleaved(p, m, v):
    lists = []
    for rank in range(p):
        first = 2 * (p - rank - 1) + (v - 1) * p
        own = [F(*forward_of(k, rank, p, v)) for k in range(first)]
        for k in range(m * v - first):
            own += [F(*forward_of(first + k, rank, p, v)), B(*backward_of(k, rank, p, v))]
        lists.append(own + [B(*backward_of(k, rank, p, v)) for k in range(m * v - first, m * v)])
    return lists


# %% wrong="interleaved" fails="a forward before its backward" why="the backward comes first in each turn"
def forward_of(k, rank, p, v):
    rounds, place = divmod(k, p * v)
    return place // p * p + rank, rounds * p + place % p


def backward_of(k, rank, p, v):
    rounds, place = divmod(k, p * v)
    return (v - 1 - place // p) * p + rank, rounds * p + place % p


def interleaved(p, m, v):
    lists = []
    for rank in range(p):
        first = min(2 * (p - rank - 1) + (v - 1) * p, m * v)
        own = [F(*forward_of(k, rank, p, v)) for k in range(first)]
        for k in range(m * v - first):
            own += [B(*backward_of(k, rank, p, v)), F(*forward_of(first + k, rank, p, v))]
        lists.append(own + [B(*backward_of(k, rank, p, v)) for k in range(m * v - first, m * v)])
    return lists


# %% wrong="with_messages" fails="first sent, first received" why="what is needed is received right before its use, whatever was sent first"
def with_messages(lists):
    place = {stage: rank for rank, own in enumerate(lists) for _, stage, _ in own}

    def neighbour(kind, stage, towards):
        other = stage + towards if kind == "F" else stage - towards
        return other if other in place and place[other] != place[stage] else None

    links = {}
    for source, own in enumerate(lists):
        for kind, stage, i in own:
            user = neighbour(kind, stage, 1)
            if user is not None:
                links.setdefault((source, place[user]), []).append((kind, stage, i))
    programs = []
    for rank, own in enumerate(lists):
        program, taken = [], set()
        for kind, stage, i in own:
            giver = neighbour(kind, stage, -1)
            if giver is not None:
                source = place[giver]
                program.append(("receive", kind, giver, i, source))
            program.append((kind, stage, i))
            user = neighbour(kind, stage, 1)
            if user is not None:
                program.append(("send", kind, stage, i, place[user]))
        programs.append(program)
    return programs


# %% wrong="with_messages" fails="no rank waits for ever" why="all receives at the beginning"
def with_messages(lists):
    place = {stage: rank for rank, own in enumerate(lists) for _, stage, _ in own}

    def neighbour(kind, stage, towards):
        other = stage + towards if kind == "F" else stage - towards
        return other if other in place and place[other] != place[stage] else None

    links = {}
    for source, own in enumerate(lists):
        for kind, stage, i in own:
            user = neighbour(kind, stage, 1)
            if user is not None:
                links.setdefault((source, place[user]), []).append((kind, stage, i))
    programs = []
    for rank, own in enumerate(lists):
        program, taken = [], set()
        for kind, stage, i in own:
            giver = neighbour(kind, stage, -1)
            if giver is not None:
                source = place[giver]
                while (kind, giver, i) not in taken:
                    message = links[source, rank].pop(0)
                    taken.add(message)
                    program.append(("receive", *message, source))
            program.append((kind, stage, i))
            user = neighbour(kind, stage, 1)
            if user is not None:
                program.append(("send", kind, stage, i, place[user]))
        programs.append(
            [step for step in program if step[0] == "receive"]
            + [step for step in program if step[0] != "receive"]
        )
    return programs


# %% wrong="with_messages" fails="no rank waits for ever" why="all sends at the end"
def with_messages(lists):
    place = {stage: rank for rank, own in enumerate(lists) for _, stage, _ in own}

    def neighbour(kind, stage, towards):
        other = stage + towards if kind == "F" else stage - towards
        return other if other in place and place[other] != place[stage] else None

    links = {}
    for source, own in enumerate(lists):
        for kind, stage, i in own:
            user = neighbour(kind, stage, 1)
            if user is not None:
                links.setdefault((source, place[user]), []).append((kind, stage, i))
    programs = []
    for rank, own in enumerate(lists):
        program, taken = [], set()
        for kind, stage, i in own:
            giver = neighbour(kind, stage, -1)
            if giver is not None:
                source = place[giver]
                while (kind, giver, i) not in taken:
                    message = links[source, rank].pop(0)
                    taken.add(message)
                    program.append(("receive", *message, source))
            program.append((kind, stage, i))
            user = neighbour(kind, stage, 1)
            if user is not None:
                program.append(("send", kind, stage, i, place[user]))
        programs.append(
            [step for step in program if step[0] != "send"]
            + [step for step in program if step[0] == "send"]
        )
    return programs


# %% wrong="with_messages" fails="only what is needed is sent" why="neighbouring stages on one rank send to each other"
def with_messages(lists):
    place = {stage: rank for rank, own in enumerate(lists) for _, stage, _ in own}

    def neighbour(kind, stage, towards):
        other = stage + towards if kind == "F" else stage - towards
        return other if other in place else None

    links = {}
    for source, own in enumerate(lists):
        for kind, stage, i in own:
            user = neighbour(kind, stage, 1)
            if user is not None:
                links.setdefault((source, place[user]), []).append((kind, stage, i))
    programs = []
    for rank, own in enumerate(lists):
        program, taken = [], set()
        for kind, stage, i in own:
            giver = neighbour(kind, stage, -1)
            if giver is not None:
                source = place[giver]
                while (kind, giver, i) not in taken:
                    message = links[source, rank].pop(0)
                    taken.add(message)
                    program.append(("receive", *message, source))
            program.append((kind, stage, i))
            user = neighbour(kind, stage, 1)
            if user is not None:
                program.append(("send", kind, stage, i, place[user]))
        programs.append(program)
    return programs


# %% wrong="with_messages" fails="only what is needed is sent" why="to the next rank, wherever the next stage is"
def with_messages(lists):
    place = {stage: rank for rank, own in enumerate(lists) for _, stage, _ in own}

    def neighbour(kind, stage, towards):
        other = stage + towards if kind == "F" else stage - towards
        return other if other in place and place[other] != place[stage] else None

    links = {}
    for source, own in enumerate(lists):
        for kind, stage, i in own:
            user = neighbour(kind, stage, 1)
            if user is not None:
                links.setdefault((source, place[user]), []).append((kind, stage, i))
    programs = []
    for rank, own in enumerate(lists):
        program, taken = [], set()
        for kind, stage, i in own:
            giver = neighbour(kind, stage, -1)
            if giver is not None:
                source = place[giver]
                while (kind, giver, i) not in taken:
                    message = links[source, rank].pop(0)
                    taken.add(message)
                    program.append(("receive", *message, source))
            program.append((kind, stage, i))
            user = neighbour(kind, stage, 1)
            if user is not None:
                program.append(("send", kind, stage, i, rank + 1 if kind == "F" else rank - 1))
        programs.append(program)
    return programs


# %% wrong="with_messages" fails="each message is sent once" why="gradients are forgotten"
def with_messages(lists):
    place = {stage: rank for rank, own in enumerate(lists) for _, stage, _ in own}

    def neighbour(kind, stage, towards):
        other = stage + towards if kind == "F" else -1
        return other if other in place and place[other] != place[stage] else None

    links = {}
    for source, own in enumerate(lists):
        for kind, stage, i in own:
            user = neighbour(kind, stage, 1)
            if user is not None:
                links.setdefault((source, place[user]), []).append((kind, stage, i))
    programs = []
    for rank, own in enumerate(lists):
        program, taken = [], set()
        for kind, stage, i in own:
            giver = neighbour(kind, stage, -1)
            if giver is not None:
                source = place[giver]
                while (kind, giver, i) not in taken:
                    message = links[source, rank].pop(0)
                    taken.add(message)
                    program.append(("receive", *message, source))
            program.append((kind, stage, i))
            user = neighbour(kind, stage, 1)
            if user is not None:
                program.append(("send", kind, stage, i, place[user]))
        programs.append(program)
    return programs


# %% wrong="with_messages" fails="sent when it is there" why="a send in front of its action"
def with_messages(lists):
    place = {stage: rank for rank, own in enumerate(lists) for _, stage, _ in own}

    def neighbour(kind, stage, towards):
        other = stage + towards if kind == "F" else stage - towards
        return other if other in place and place[other] != place[stage] else None

    links = {}
    for source, own in enumerate(lists):
        for kind, stage, i in own:
            user = neighbour(kind, stage, 1)
            if user is not None:
                links.setdefault((source, place[user]), []).append((kind, stage, i))
    programs = []
    for rank, own in enumerate(lists):
        program, taken = [], set()
        for kind, stage, i in own:
            giver = neighbour(kind, stage, -1)
            if giver is not None:
                source = place[giver]
                while (kind, giver, i) not in taken:
                    message = links[source, rank].pop(0)
                    taken.add(message)
                    program.append(("receive", *message, source))
            user = neighbour(kind, stage, 1)
            if user is not None:
                program.append(("send", kind, stage, i, place[user]))
            program.append((kind, stage, i))
        programs.append(program)
    return programs


# %% wrong="with_messages" fails="received before it is used" why="a receive behind the action that uses it"
def with_messages(lists):
    place = {stage: rank for rank, own in enumerate(lists) for _, stage, _ in own}

    def neighbour(kind, stage, towards):
        other = stage + towards if kind == "F" else stage - towards
        return other if other in place and place[other] != place[stage] else None

    links = {}
    for source, own in enumerate(lists):
        for kind, stage, i in own:
            user = neighbour(kind, stage, 1)
            if user is not None:
                links.setdefault((source, place[user]), []).append((kind, stage, i))
    programs = []
    for rank, own in enumerate(lists):
        program, taken = [], set()
        for kind, stage, i in own:
            giver, late = neighbour(kind, stage, -1), []
            if giver is not None:
                source = place[giver]
                while (kind, giver, i) not in taken:
                    message = links[source, rank].pop(0)
                    taken.add(message)
                    late.append(("receive", *message, source))
            program += [(kind, stage, i), *late]
            user = neighbour(kind, stage, 1)
            if user is not None:
                program.append(("send", kind, stage, i, place[user]))
        programs.append(program)
    return programs


# %% wrong="with_messages" fails="first sent, first received" why="received in the order of the microbatches"
def with_messages(lists):
    place = {stage: rank for rank, own in enumerate(lists) for _, stage, _ in own}

    def neighbour(kind, stage, towards):
        other = stage + towards if kind == "F" else stage - towards
        return other if other in place and place[other] != place[stage] else None

    links = {}
    for source, own in enumerate(lists):
        for kind, stage, i in own:
            user = neighbour(kind, stage, 1)
            if user is not None:
                links.setdefault((source, place[user]), []).append((kind, stage, i))
    for sent in links.values():
        sent.sort(key=lambda message: message[2])
    programs = []
    for rank, own in enumerate(lists):
        program, taken = [], set()
        for kind, stage, i in own:
            giver = neighbour(kind, stage, -1)
            if giver is not None:
                source = place[giver]
                while (kind, giver, i) not in taken:
                    message = links[source, rank].pop(0)
                    taken.add(message)
                    program.append(("receive", *message, source))
            program.append((kind, stage, i))
            user = neighbour(kind, stage, 1)
            if user is not None:
                program.append(("send", kind, stage, i, place[user]))
        programs.append(program)
    return programs


# %% wrong="with_messages" fails="each message is received once" why="what was received early is received again when it is used"
def with_messages(lists):
    place = {stage: rank for rank, own in enumerate(lists) for _, stage, _ in own}

    def neighbour(kind, stage, towards):
        other = stage + towards if kind == "F" else stage - towards
        return other if other in place and place[other] != place[stage] else None

    links = {}
    for source, own in enumerate(lists):
        for kind, stage, i in own:
            user = neighbour(kind, stage, 1)
            if user is not None:
                links.setdefault((source, place[user]), []).append((kind, stage, i))
    programs = []
    for rank, own in enumerate(lists):
        program, taken = [], set()
        for kind, stage, i in own:
            giver = neighbour(kind, stage, -1)
            if giver is not None:
                source = place[giver]
                message = None
                while message != (kind, giver, i):
                    if not links[source, rank] or (kind, giver, i) in taken:
                        message = (kind, giver, i)
                    else:
                        message = links[source, rank].pop(0)
                    taken.add(message)
                    program.append(("receive", *message, source))
            program.append((kind, stage, i))
            user = neighbour(kind, stage, 1)
            if user is not None:
                program.append(("send", kind, stage, i, place[user]))
        programs.append(program)
    return programs


# %% wrong="with_messages" fails="actions keep their order" why="actions are put in an order in which messages come"
def with_messages(lists):
    place = {stage: rank for rank, own in enumerate(lists) for _, stage, _ in own}

    def neighbour(kind, stage, towards):
        other = stage + towards if kind == "F" else stage - towards
        return other if other in place and place[other] != place[stage] else None

    links = {}
    for source, own in enumerate(lists):
        for kind, stage, i in own:
            user = neighbour(kind, stage, 1)
            if user is not None:
                links.setdefault((source, place[user]), []).append((kind, stage, i))
    programs = []
    for rank, own in enumerate(lists):
        program, taken = [], set()
        for kind, stage, i in sorted(own, key=lambda action: action[2]):
            giver = neighbour(kind, stage, -1)
            if giver is not None:
                source = place[giver]
                while (kind, giver, i) not in taken:
                    message = links[source, rank].pop(0)
                    taken.add(message)
                    program.append(("receive", *message, source))
            program.append((kind, stage, i))
            user = neighbour(kind, stage, 1)
            if user is not None:
                program.append(("send", kind, stage, i, place[user]))
        programs.append(program)
    return programs


# %% wrong="simulate" fails="as soon as it can start" why="messages take time inside a rank as well"
def simulate(lists, costs):
    place = {action: rank for rank, own in enumerate(lists) for action in own}
    ends, free, starts = {}, [0] * len(lists), [[] for _ in lists]
    moved = True
    while moved:
        moved = False
        for rank, own in enumerate(lists):
            while len(starts[rank]) < len(own):
                kind, stage, i = action = own[len(starts[rank])]
                needs = [F(stage - 1, i)] if kind == "F" else [F(stage, i), B(stage + 1, i)]
                needs = [before for before in needs if before in place]
                if any(before not in ends for before in needs):
                    break
                start = max([free[rank], *(ends[before] + costs["send"] for before in needs)])
                starts[rank].append(start)
                ends[action] = free[rank] = start + costs[kind]
                moved = True
    stuck = [rank for rank, own in enumerate(lists) if len(starts[rank]) < len(own)]
    if stuck:
        raise ValueError(f"ranks {stuck} wait for each other")
    makespan = max(free)
    work = sum(costs[kind] for own in lists for kind, _, _ in own)
    return starts, makespan, 1 - Fraction(work, len(lists) * makespan)


# %% wrong="simulate" fails="not before it can start" why="messages take no time"
def simulate(lists, costs):
    place = {action: rank for rank, own in enumerate(lists) for action in own}
    ends, free, starts = {}, [0] * len(lists), [[] for _ in lists]
    moved = True
    while moved:
        moved = False
        for rank, own in enumerate(lists):
            while len(starts[rank]) < len(own):
                kind, stage, i = action = own[len(starts[rank])]
                needs = [F(stage - 1, i)] if kind == "F" else [F(stage, i), B(stage + 1, i)]
                needs = [before for before in needs if before in place]
                if any(before not in ends for before in needs):
                    break
                start = max([free[rank], *(ends[before] + 0 for before in needs)])
                starts[rank].append(start)
                ends[action] = free[rank] = start + costs[kind]
                moved = True
    stuck = [rank for rank, own in enumerate(lists) if len(starts[rank]) < len(own)]
    if stuck:
        raise ValueError(f"ranks {stuck} wait for each other")
    makespan = max(free)
    work = sum(costs[kind] for own in lists for kind, _, _ in own)
    return starts, makespan, 1 - Fraction(work, len(lists) * makespan)


# %% wrong="simulate" fails="not before it can start" why="a backward waits for its own forward only"
def simulate(lists, costs):
    place = {action: rank for rank, own in enumerate(lists) for action in own}
    ends, free, starts = {}, [0] * len(lists), [[] for _ in lists]
    moved = True
    while moved:
        moved = False
        for rank, own in enumerate(lists):
            while len(starts[rank]) < len(own):
                kind, stage, i = action = own[len(starts[rank])]
                needs = [F(stage - 1, i)] if kind == "F" else [F(stage, i)]
                needs = [before for before in needs if before in place]
                if any(before not in ends for before in needs):
                    break
                start = max(
                    [
                        free[rank],
                        *(
                            ends[before] + (costs["send"] if place[before] != rank else 0)
                            for before in needs
                        ),
                    ]
                )
                starts[rank].append(start)
                ends[action] = free[rank] = start + costs[kind]
                moved = True
    stuck = [rank for rank, own in enumerate(lists) if len(starts[rank]) < len(own)]
    if stuck:
        raise ValueError(f"ranks {stuck} wait for each other")
    makespan = max(free)
    work = sum(costs[kind] for own in lists for kind, _, _ in own)
    return starts, makespan, 1 - Fraction(work, len(lists) * makespan)


# %% wrong="simulate" fails="not before it can start" why="a rank may do several things at once"
def simulate(lists, costs):
    place = {action: rank for rank, own in enumerate(lists) for action in own}
    ends, free, starts = {}, [0] * len(lists), [[] for _ in lists]
    moved = True
    while moved:
        moved = False
        for rank, own in enumerate(lists):
            while len(starts[rank]) < len(own):
                kind, stage, i = action = own[len(starts[rank])]
                needs = [F(stage - 1, i)] if kind == "F" else [F(stage, i), B(stage + 1, i)]
                needs = [before for before in needs if before in place]
                if any(before not in ends for before in needs):
                    break
                start = max(
                    [
                        0,
                        *(
                            ends[before] + (costs["send"] if place[before] != rank else 0)
                            for before in needs
                        ),
                    ]
                )
                starts[rank].append(start)
                ends[action] = free[rank] = start + costs[kind]
                moved = True
    stuck = [rank for rank, own in enumerate(lists) if len(starts[rank]) < len(own)]
    if stuck:
        raise ValueError(f"ranks {stuck} wait for each other")
    makespan = max(free)
    work = sum(costs[kind] for own in lists for kind, _, _ in own)
    return starts, makespan, 1 - Fraction(work, len(lists) * makespan)


# %% wrong="simulate" fails="not before it can start" why="a backward takes as long as a forward"
def simulate(lists, costs):
    place = {action: rank for rank, own in enumerate(lists) for action in own}
    ends, free, starts = {}, [0] * len(lists), [[] for _ in lists]
    moved = True
    while moved:
        moved = False
        for rank, own in enumerate(lists):
            while len(starts[rank]) < len(own):
                kind, stage, i = action = own[len(starts[rank])]
                needs = [F(stage - 1, i)] if kind == "F" else [F(stage, i), B(stage + 1, i)]
                needs = [before for before in needs if before in place]
                if any(before not in ends for before in needs):
                    break
                start = max(
                    [
                        free[rank],
                        *(
                            ends[before] + (costs["send"] if place[before] != rank else 0)
                            for before in needs
                        ),
                    ]
                )
                starts[rank].append(start)
                ends[action] = free[rank] = start + costs["F"]
                moved = True
    stuck = [rank for rank, own in enumerate(lists) if len(starts[rank]) < len(own)]
    if stuck:
        raise ValueError(f"ranks {stuck} wait for each other")
    makespan = max(free)
    work = sum(costs[kind] for own in lists for kind, _, _ in own)
    return starts, makespan, 1 - Fraction(work, len(lists) * makespan)


# %% wrong="simulate" fails="the makespan" why="the end of the first rank's last action: others may end later"
def simulate(lists, costs):
    place = {action: rank for rank, own in enumerate(lists) for action in own}
    ends, free, starts = {}, [0] * len(lists), [[] for _ in lists]
    moved = True
    while moved:
        moved = False
        for rank, own in enumerate(lists):
            while len(starts[rank]) < len(own):
                kind, stage, i = action = own[len(starts[rank])]
                needs = [F(stage - 1, i)] if kind == "F" else [F(stage, i), B(stage + 1, i)]
                needs = [before for before in needs if before in place]
                if any(before not in ends for before in needs):
                    break
                start = max(
                    [
                        free[rank],
                        *(
                            ends[before] + (costs["send"] if place[before] != rank else 0)
                            for before in needs
                        ),
                    ]
                )
                starts[rank].append(start)
                ends[action] = free[rank] = start + costs[kind]
                moved = True
    stuck = [rank for rank, own in enumerate(lists) if len(starts[rank]) < len(own)]
    if stuck:
        raise ValueError(f"ranks {stuck} wait for each other")
    makespan = free[-1]
    work = sum(costs[kind] for own in lists for kind, _, _ in own)
    return starts, makespan, 1 - Fraction(work, len(lists) * makespan)


# %% wrong="simulate" fails="as soon as it can start" why="all ranks move in step: nobody begins before the longest of each slot has ended"
def simulate(lists, costs):
    place = {action: rank for rank, own in enumerate(lists) for action in own}
    ends, free, starts = {}, [0] * len(lists), [[] for _ in lists]
    moved = True
    while moved:
        moved = False
        for rank, own in enumerate(lists):
            while len(starts[rank]) < len(own):
                kind, stage, i = action = own[len(starts[rank])]
                needs = [F(stage - 1, i)] if kind == "F" else [F(stage, i), B(stage + 1, i)]
                needs = [before for before in needs if before in place]
                if any(before not in ends for before in needs):
                    break
                start = max(
                    [
                        free[rank],
                        *(
                            ends[before] + (costs["send"] if place[before] != rank else 0)
                            for before in needs
                        ),
                    ]
                )
                starts[rank].append(start)
                ends[action] = free[rank] = start + max(costs["F"], costs["B"])
                moved = True
    stuck = [rank for rank, own in enumerate(lists) if len(starts[rank]) < len(own)]
    if stuck:
        raise ValueError(f"ranks {stuck} wait for each other")
    makespan = max(free)
    work = sum(costs[kind] for own in lists for kind, _, _ in own)
    return starts, makespan, 1 - Fraction(work, len(lists) * makespan)


# %% wrong="simulate" fails="the bubble" why="idle time per work"
def simulate(lists, costs):
    place = {action: rank for rank, own in enumerate(lists) for action in own}
    ends, free, starts = {}, [0] * len(lists), [[] for _ in lists]
    moved = True
    while moved:
        moved = False
        for rank, own in enumerate(lists):
            while len(starts[rank]) < len(own):
                kind, stage, i = action = own[len(starts[rank])]
                needs = [F(stage - 1, i)] if kind == "F" else [F(stage, i), B(stage + 1, i)]
                needs = [before for before in needs if before in place]
                if any(before not in ends for before in needs):
                    break
                start = max(
                    [
                        free[rank],
                        *(
                            ends[before] + (costs["send"] if place[before] != rank else 0)
                            for before in needs
                        ),
                    ]
                )
                starts[rank].append(start)
                ends[action] = free[rank] = start + costs[kind]
                moved = True
    stuck = [rank for rank, own in enumerate(lists) if len(starts[rank]) < len(own)]
    if stuck:
        raise ValueError(f"ranks {stuck} wait for each other")
    makespan = max(free)
    work = sum(costs[kind] for own in lists for kind, _, _ in own)
    return starts, makespan, Fraction(len(lists) * makespan - work, work)


# %% wrong="simulate" fails="the bubble" why="idle time of each rank up to its own last end"
def simulate(lists, costs):
    place = {action: rank for rank, own in enumerate(lists) for action in own}
    ends, free, starts = {}, [0] * len(lists), [[] for _ in lists]
    moved = True
    while moved:
        moved = False
        for rank, own in enumerate(lists):
            while len(starts[rank]) < len(own):
                kind, stage, i = action = own[len(starts[rank])]
                needs = [F(stage - 1, i)] if kind == "F" else [F(stage, i), B(stage + 1, i)]
                needs = [before for before in needs if before in place]
                if any(before not in ends for before in needs):
                    break
                start = max(
                    [
                        free[rank],
                        *(
                            ends[before] + (costs["send"] if place[before] != rank else 0)
                            for before in needs
                        ),
                    ]
                )
                starts[rank].append(start)
                ends[action] = free[rank] = start + costs[kind]
                moved = True
    stuck = [rank for rank, own in enumerate(lists) if len(starts[rank]) < len(own)]
    if stuck:
        raise ValueError(f"ranks {stuck} wait for each other")
    makespan = max(free)
    work = sum(costs[kind] for own in lists for kind, _, _ in own)
    return starts, makespan, 1 - Fraction(work, sum(free))


# %% wrong="simulate" fails="the bubble" why="the formula (p-1)/(m+p-1), whatever the lists"
def simulate(lists, costs):
    place = {action: rank for rank, own in enumerate(lists) for action in own}
    ends, free, starts = {}, [0] * len(lists), [[] for _ in lists]
    moved = True
    while moved:
        moved = False
        for rank, own in enumerate(lists):
            while len(starts[rank]) < len(own):
                kind, stage, i = action = own[len(starts[rank])]
                needs = [F(stage - 1, i)] if kind == "F" else [F(stage, i), B(stage + 1, i)]
                needs = [before for before in needs if before in place]
                if any(before not in ends for before in needs):
                    break
                start = max(
                    [
                        free[rank],
                        *(
                            ends[before] + (costs["send"] if place[before] != rank else 0)
                            for before in needs
                        ),
                    ]
                )
                starts[rank].append(start)
                ends[action] = free[rank] = start + costs[kind]
                moved = True
    stuck = [rank for rank, own in enumerate(lists) if len(starts[rank]) < len(own)]
    if stuck:
        raise ValueError(f"ranks {stuck} wait for each other")
    makespan = max(free)
    work = sum(costs[kind] for own in lists for kind, _, _ in own)
    p, m = len(lists), len({i for own in lists for _, _, i in own})
    return starts, makespan, Fraction(p - 1, m + p - 1)


# %% wrong="simulate" fails="an exact fraction" why="a float"
def simulate(lists, costs):
    place = {action: rank for rank, own in enumerate(lists) for action in own}
    ends, free, starts = {}, [0] * len(lists), [[] for _ in lists]
    moved = True
    while moved:
        moved = False
        for rank, own in enumerate(lists):
            while len(starts[rank]) < len(own):
                kind, stage, i = action = own[len(starts[rank])]
                needs = [F(stage - 1, i)] if kind == "F" else [F(stage, i), B(stage + 1, i)]
                needs = [before for before in needs if before in place]
                if any(before not in ends for before in needs):
                    break
                start = max(
                    [
                        free[rank],
                        *(
                            ends[before] + (costs["send"] if place[before] != rank else 0)
                            for before in needs
                        ),
                    ]
                )
                starts[rank].append(start)
                ends[action] = free[rank] = start + costs[kind]
                moved = True
    stuck = [rank for rank, own in enumerate(lists) if len(starts[rank]) < len(own)]
    if stuck:
        raise ValueError(f"ranks {stuck} wait for each other")
    makespan = max(free)
    work = sum(costs[kind] for own in lists for kind, _, _ in own)
    return starts, makespan, 1 - work / (len(lists) * makespan)


# %% wrong="simulate" fails="the bubble" why="the rank that waits most"
def simulate(lists, costs):
    place = {action: rank for rank, own in enumerate(lists) for action in own}
    ends, free, starts = {}, [0] * len(lists), [[] for _ in lists]
    moved = True
    while moved:
        moved = False
        for rank, own in enumerate(lists):
            while len(starts[rank]) < len(own):
                kind, stage, i = action = own[len(starts[rank])]
                needs = [F(stage - 1, i)] if kind == "F" else [F(stage, i), B(stage + 1, i)]
                needs = [before for before in needs if before in place]
                if any(before not in ends for before in needs):
                    break
                start = max(
                    [
                        free[rank],
                        *(
                            ends[before] + (costs["send"] if place[before] != rank else 0)
                            for before in needs
                        ),
                    ]
                )
                starts[rank].append(start)
                ends[action] = free[rank] = start + costs[kind]
                moved = True
    stuck = [rank for rank, own in enumerate(lists) if len(starts[rank]) < len(own)]
    if stuck:
        raise ValueError(f"ranks {stuck} wait for each other")
    makespan = max(free)
    work = len(lists) * min(sum(costs[kind] for kind, _, _ in own[:1]) for own in lists)
    return starts, makespan, 1 - Fraction(work, len(lists) * makespan)


# %% wrong="simulate" fails="a refusal" why="ranks that wait for ever are left where they are"
def simulate(lists, costs):
    place = {action: rank for rank, own in enumerate(lists) for action in own}
    ends, free, starts = {}, [0] * len(lists), [[] for _ in lists]
    moved = True
    while moved:
        moved = False
        for rank, own in enumerate(lists):
            while len(starts[rank]) < len(own):
                kind, stage, i = action = own[len(starts[rank])]
                needs = [F(stage - 1, i)] if kind == "F" else [F(stage, i), B(stage + 1, i)]
                needs = [before for before in needs if before in place]
                if any(before not in ends for before in needs):
                    break
                start = max(
                    [
                        free[rank],
                        *(
                            ends[before] + (costs["send"] if place[before] != rank else 0)
                            for before in needs
                        ),
                    ]
                )
                starts[rank].append(start)
                ends[action] = free[rank] = start + costs[kind]
                moved = True
    stuck = [rank for rank, own in enumerate(lists) if len(starts[rank]) < len(own)]
    if stuck:
        pass
    makespan = max(free)
    work = sum(costs[kind] for own in lists for kind, _, _ in own)
    return starts, makespan, 1 - Fraction(work, len(lists) * makespan)
