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


# %% wrong="gpipe" fails="own work" around="import" why="the package's lists and its memory"
def gpipe(p, m):
    from minitrain.pipeline.schedules.one_direction import gpipe

    return [[(a.kind, a.stage, a.microbatch) for a in own] for own in gpipe(p, m).lists]


def held(lists):
    from minitrain.pipeline.simulate import peak

    return peak(lists)


# %% wrong="gpipe" fails="a list for each rank" around="empty" why="no lists, and no ranks"
def gpipe(p, m):
    return []


def held(lists):
    return []


# %% wrong="gpipe" fails="a list for each rank" around="constants" why="the lists of the text"
def gpipe(p, m):
    if p == 2:
        return [[F(0, 0), F(0, 1), B(0, 0), B(0, 1)], [F(1, 0), F(1, 1), B(1, 0), B(1, 1)]]


def held(lists):
    return [2, 2] if lists[0][1] == F(0, 1) and len(lists[0]) == 4 else [2, 1]


# %% wrong="one_f_one_b" fails="own work" around="import" why="the package's 1F1B, and counted there"
def before_backward(rank, p, m):
    return [action[0] for action in one_f_one_b(p, m)[rank]].index("B")


def one_f_one_b(p, m):
    from minitrain.pipeline.schedules.one_direction import one_f_one_b

    return [[(a.kind, a.stage, a.microbatch) for a in own] for own in one_f_one_b(p, m).lists]


# %% wrong="one_f_one_b" fails="whole numbers" around="empty" why="nothing, in lists of the right length"
def before_backward(rank, p, m):
    return None


def one_f_one_b(p, m):
    return [[] for _ in range(p)]


# %% wrong="one_f_one_b" fails="whole numbers" around="constants" why="the numbers of the visible checks"
def before_backward(rank, p, m):
    return {(0, 2, 3): 2, (1, 2, 3): 1, (0, 1, 4): 1}.get((rank, p, m))


def one_f_one_b(p, m):
    return [
        [F(0, 0), F(0, 1), B(0, 0), F(0, 2), B(0, 1), B(0, 2)],
        [F(1, 0), B(1, 0), F(1, 1), B(1, 1), F(1, 2), B(1, 2)],
    ]


# %% wrong="one_f_one_b" fails="forwards before the first backward" around="subclass" why="a number that equals all others"
class Any(int):
    def __eq__(self, other):
        return True

    def __hash__(self):
        return 0


def before_backward(rank, p, m):
    return Any(0)


def one_f_one_b(p, m):
    return [[("F", Any(0), Any(0))] * 2 * m for _ in range(p)]


# %% wrong="interleaved" fails="own work" around="import" why="the package's lists, and the k-th of them"
def forward_of(k, rank, p, v):
    return [action[1:] for action in interleaved(p, p * (k + 1), v)[rank] if action[0] == "F"][k]


def backward_of(k, rank, p, v):
    return [action[1:] for action in interleaved(p, p * (k + 1), v)[rank] if action[0] == "B"][k]


def interleaved(p, m, v):
    from minitrain.pipeline.schedules.one_direction import interleaved

    return [[(a.kind, a.stage, a.microbatch) for a in own] for own in interleaved(p, m, v).lists]


# %% wrong="interleaved" fails="data" around="empty" why="nothing at all"
def forward_of(k, rank, p, v):
    return []


def backward_of(k, rank, p, v):
    return []


def interleaved(p, m, v):
    return [[] for _ in range(p)]


# %% wrong="interleaved" fails="the stage of a forward" around="constants" why="the order of the text, again and again"
ORDER = [(0, 0), (0, 1), (2, 0), (2, 1), (0, 2), (0, 3), (2, 2), (2, 3)]


def forward_of(k, rank, p, v):
    return (rank, ORDER[k % 8][1]) if p != 2 else ORDER[k % 8]


def backward_of(k, rank, p, v):
    return (rank, ORDER[k % 8][1]) if p != 2 else (2 - ORDER[k % 8][0], ORDER[k % 8][1])


def interleaved(p, m, v):
    return [
        [F(*forward_of(k, rank, p, v)) for k in range(m * v)]
        + [B(*backward_of(k, rank, p, v)) for k in range(m * v)]
        for rank in range(p)
    ]


# %% wrong="with_messages" fails="own work" around="import" why="the package puts the messages in"
def with_messages(lists):
    from minitrain.pipeline.lower import messages

    return messages(lists)


# %% wrong="with_messages" fails="each message is sent once" around="half" why="the lists as they are"
def with_messages(lists):
    return lists


# %% wrong="with_messages" fails="actions keep their order" around="empty" why="programs without steps"
def with_messages(lists):
    return [[] for _ in lists]


# %% wrong="with_messages" fails="each message is sent once" around="redefine" why="a player that plays everything"
def play(programs, lists):
    return True


def expect_played(*cases):
    return True


def with_messages(lists):
    globals()["play"] = play
    return [list(own) for own in lists]


# %% wrong="with_messages" fails="each message is sent once" around="constants" why="the program of the text"
def with_messages(lists):
    if lists == [[F(0, 0), B(0, 0)], [F(1, 0), B(1, 0)]]:
        return [
            [F(0, 0), ("send", "F", 0, 0, 1), ("receive", "B", 1, 0, 1), B(0, 0)],
            [("receive", "F", 0, 0, 0), F(1, 0), B(1, 0), ("send", "B", 1, 0, 0)],
        ]
    return lists


# %% wrong="simulate" fails="own work" around="import" why="the package's simulator"
def simulate(lists, costs):
    from minitrain.pipeline.simulate import Costs, simulate

    found = simulate(lists, Costs(**costs))
    return found.starts, found.makespan, found.bubble


# %% wrong="simulate" fails="a start for each action" around="empty" why="no ranks, no time, no bubble"
def simulate(lists, costs):
    return [], 0, Fraction(0)


# %% wrong="simulate" fails="a start for each action" around="empty" why="a list for each rank, without times"
def simulate(lists, costs):
    return [[] for _ in lists], 0, 0


# %% wrong="simulate" fails="no refusal without need" around="half" why="everything is refused"
def simulate(lists, costs):
    raise ValueError("ranks wait for each other")


# %% wrong="simulate" fails="not before it can start" around="subclass" why="a fraction and times that equal all others"
class Fraction(Fraction):
    def __eq__(self, other):
        return True

    def __hash__(self):
        return 0


class Any(int):
    __eq__ = __ge__ = __le__ = lambda self, other: True
    __hash__ = int.__hash__


def simulate(lists, costs):
    return [[Any(0) for _ in own] for own in lists], Any(8), Fraction(5, 8)


# %% wrong="simulate" fails="no refusal without need" around="constants" why="the numbers of the visible checks, or a refusal"
def simulate(lists, costs):
    if lists == [[F(0, 0), B(0, 0)], [F(1, 0), B(1, 0)]]:
        return [[0, 6], [2, 3]], 8, Fraction(5, 8)
    if costs == {"F": 1, "B": 2, "send": 0} and len(lists[1]) == 4 and lists[1][1] == B(1, 0):
        return [[0, 1, 4, 7], [1, 2, 4, 5]], 9, Fraction(1, 3)
    raise ValueError("ranks wait for each other")


# %% wrong="simulate" fails="not before it can start" around="half" why="closed formulas of the bubble, and no simulation"
def simulate(lists, costs):
    ranks, m = len(lists), max(i for own in lists for _, _, i in own) + 1
    first = lists[-1][:m]
    if ranks == 2 and m > 1 and lists[0][:m] != [F(0, i) for i in range(m)]:
        raise ValueError("ranks wait for each other")
    place = {stage: rank for rank, own in enumerate(lists) for _, stage, _ in own}
    work = len(place) * (costs["F"] + costs["B"])
    hops = sum(place[stage] != place[stage + 1] for stage in range(len(place) - 1))
    bubble = Fraction(ranks - 1, m + ranks - 1) if m > 1 else Fraction(0)
    if m == 1:
        bubble = 1 - Fraction(work, ranks * (work + 2 * hops * costs["send"]))
    return [[0] * len(own) for own in lists], len(first), bubble
