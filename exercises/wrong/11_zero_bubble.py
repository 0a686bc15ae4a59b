# %% wrong="halves" fails="the gradient of the weights" why="the last microbatch's gradient replaces the others"
def backward_input(name, x, weight, dy, trained, queue):
    if trained:
        queue.append((name, x, dy))
    return dy @ weight


def backward_weight(queue, grads):
    name, x, dy = queue.pop(0)
    gradient = dy.reshape(-1, dy.size(-1)).T @ x.reshape(-1, x.size(-1))
    grads[name] = gradient


# %% wrong="halves" fails="oldest first" why="the newest entry is worked off"
def backward_input(name, x, weight, dy, trained, queue):
    if trained:
        queue.append((name, x, dy))
    return dy @ weight


def backward_weight(queue, grads):
    name, x, dy = queue.pop()
    gradient = dy.reshape(-1, dy.size(-1)).T @ x.reshape(-1, x.size(-1))
    grads[name] = grads[name] + gradient if name in grads else gradient


# %% wrong="halves" fails="the gradient of the input" why="the weight is transposed"
def backward_input(name, x, weight, dy, trained, queue):
    if trained:
        queue.append((name, x, dy))
    return 2 * dy.reshape(-1, dy.size(-1)) @ weight


def backward_weight(queue, grads):
    name, x, dy = queue.pop(0)
    gradient = dy.reshape(-1, dy.size(-1)).T @ x.reshape(-1, x.size(-1))
    grads[name] = grads[name] + gradient if name in grads else gradient


# %% wrong="halves" fails="no error" why="x with two dims only, as dy.T of three dims is none"
def backward_input(name, x, weight, dy, trained, queue):
    if trained:
        queue.append((name, x, dy))
    return dy @ weight


def backward_weight(queue, grads):
    name, x, dy = queue.pop(0)
    gradient = dy.T @ x
    grads[name] = grads[name] + gradient if name in grads else gradient


# %% wrong="halves" fails="the gradient of the weights" why="a mean over tokens"
def backward_input(name, x, weight, dy, trained, queue):
    if trained:
        queue.append((name, x, dy))
    return dy @ weight


def backward_weight(queue, grads):
    name, x, dy = queue.pop(0)
    gradient = dy.reshape(-1, dy.size(-1)).T @ x.reshape(-1, x.size(-1)) / max(1, x[..., 0].numel())
    grads[name] = grads[name] + gradient if name in grads else gradient


# %% wrong="halves" fails="one product in I" why="the whole backward in I, only the addition is left for later"
def backward_input(name, x, weight, dy, trained, queue):
    if trained:
        queue.append((name, dy.reshape(-1, dy.size(-1)).T @ x.reshape(-1, x.size(-1))))
    return dy @ weight


def backward_weight(queue, grads):
    name, gradient = queue.pop(0)
    grads[name] = grads[name] + gradient if name in grads else gradient


# %% wrong="halves" fails="one product in W" why="W computes dx again, as a whole backward does"
def backward_input(name, x, weight, dy, trained, queue):
    if trained:
        queue.append((name, x, weight, dy))
    return dy @ weight


def backward_weight(queue, grads):
    name, x, weight, dy = queue.pop(0)
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    with torch.enable_grad():
        y = x @ weight.T
    gradient = torch.autograd.grad(y, (x, weight), dy)[1]
    grads[name] = grads[name] + gradient if name in grads else gradient


# %% wrong="halves" fails="oldest first" why="the first W works off everything"
def backward_input(name, x, weight, dy, trained, queue):
    if trained:
        queue.append((name, x, dy))
    return dy @ weight


def backward_weight(queue, grads):
    while queue:
        name, x, dy = queue.pop(0)
        gradient = dy.reshape(-1, dy.size(-1)).T @ x.reshape(-1, x.size(-1))
        grads[name] = grads[name] + gradient if name in grads else gradient


# %% wrong="halves" fails="frozen layers" why="a frozen layer is kept, and skipped later"
def backward_input(name, x, weight, dy, trained, queue):
    queue.append((name, x, dy, trained))
    return dy @ weight


def backward_weight(queue, grads):
    name, x, dy, trained = queue.pop(0)
    if trained:
        gradient = dy.reshape(-1, dy.size(-1)).T @ x.reshape(-1, x.size(-1))
        grads[name] = grads[name] + gradient if name in grads else gradient


# %% wrong="halves" fails="nothing is copied" why="x and dy are copied, to be on the safe side"
def backward_input(name, x, weight, dy, trained, queue):
    if trained:
        queue.append((name, x.clone(), dy.clone()))
    return dy @ weight


def backward_weight(queue, grads):
    name, x, dy = queue.pop(0)
    gradient = dy.reshape(-1, dy.size(-1)).T @ x.reshape(-1, x.size(-1))
    grads[name] = grads[name] + gradient if name in grads else gradient


# %% wrong="halves" fails="the queue empties" why="a worked-off entry goes to the end of the queue"
def backward_input(name, x, weight, dy, trained, queue):
    if trained:
        queue.append((name, x, dy))
    return dy @ weight


def backward_weight(queue, grads):
    name, x, dy = queue.pop(0)
    gradient = dy.reshape(-1, dy.size(-1)).T @ x.reshape(-1, x.size(-1))
    grads[name] = grads[name] + gradient if name in grads else gradient
    queue.append((name, x, dy))


# %% wrong="zb_h1" fails="the bubble" why="1F1B: each W stands right behind its I"
def zb_h1(p, m):
    lists = []
    for rank in range(p):
        ahead, held_back = p - rank - 1, 0
        own = [F(rank, i) for i in range(min(ahead, m))]
        for i in range(m):
            if ahead + i < m:
                own.append(F(rank, ahead + i))
            own.append(I(rank, i))
            if i >= held_back:
                own.append(W(rank, i - held_back))
        lists.append(own + [W(rank, i) for i in range(max(0, m - held_back), m)])
    return lists


# %% wrong="zb_h1" fails="held at most" why="ZB-H2: twice as many ahead, no bubble, twice the memory"
def zb_h1(p, m):
    lists = []
    for rank in range(p):
        ahead, held_back = 2 * (p - rank - 1), 2 * rank
        own = [F(rank, i) for i in range(min(ahead, m))]
        for i in range(m):
            if ahead + i < m:
                own.append(F(rank, ahead + i))
            own.append(I(rank, i))
            if i >= held_back:
                own.append(W(rank, i - held_back))
        lists.append(own + [W(rank, i) for i in range(max(0, m - held_back), m)])
    return lists


# %% wrong="zb_h1" fails="every action once" why="the W that were held back are forgotten"
def zb_h1(p, m):
    lists = []
    for rank in range(p):
        ahead, held_back = p - rank - 1, rank
        own = [F(rank, i) for i in range(min(ahead, m))]
        for i in range(m):
            if ahead + i < m:
                own.append(F(rank, ahead + i))
            own.append(I(rank, i))
            if i >= held_back:
                own.append(W(rank, i - held_back))
        lists.append(own)
    return lists


# %% wrong="zb_h1" fails="the bubble" why="the first rank holds back most, not the last"
def zb_h1(p, m):
    lists = []
    for rank in range(p):
        ahead, held_back = p - rank - 1, p - rank - 1
        own = [F(rank, i) for i in range(min(ahead, m))]
        for i in range(m):
            if ahead + i < m:
                own.append(F(rank, ahead + i))
            own.append(I(rank, i))
            if i >= held_back:
                own.append(W(rank, i - held_back))
        lists.append(own + [W(rank, i) for i in range(max(0, m - held_back), m)])
    return lists


# %% wrong="zb_h1" fails="the bubble" why="all W at the end"
def zb_h1(p, m):
    lists = []
    for rank in range(p):
        ahead, held_back = p - rank - 1, m
        own = [F(rank, i) for i in range(min(ahead, m))]
        for i in range(m):
            if ahead + i < m:
                own.append(F(rank, ahead + i))
            own.append(I(rank, i))
            if i >= held_back:
                own.append(W(rank, i - held_back))
        lists.append(own + [W(rank, i) for i in range(max(0, m - held_back), m)])
    return lists


# %% wrong="zb_h1" fails="nobody waits for ever" why="W stands in front of its I"
def zb_h1(p, m):
    lists = []
    for rank in range(p):
        ahead, held_back = p - rank - 1, rank
        own = [F(rank, i) for i in range(min(ahead, m))]
        for i in range(m):
            if ahead + i < m:
                own.append(F(rank, ahead + i))
            if i >= held_back:
                own.append(W(rank, i - held_back))
            own.append(I(rank, i))
        lists.append(own + [W(rank, i) for i in range(max(0, m - held_back), m)])
    return lists


# %% wrong="zb_h1" fails="every action once" why="runs ahead beyond the last microbatch"
def zb_h1(p, m):
    lists = []
    for rank in range(p):
        ahead, held_back = p - rank - 1, rank
        own = [F(rank, i) for i in range(ahead)]
        for i in range(m):
            if ahead + i < m:
                own.append(F(rank, ahead + i))
            own.append(I(rank, i))
            if i >= held_back:
                own.append(W(rank, i - held_back))
        lists.append(own + [W(rank, i) for i in range(max(0, m - held_back), m)])
    return lists


# %% wrong="zb_h1" fails="the bubble" why="one forward fewer ahead"
def zb_h1(p, m):
    lists = []
    for rank in range(p):
        ahead, held_back = max(0, p - rank - 2), rank
        own = [F(rank, i) for i in range(min(ahead, m))]
        for i in range(m):
            if ahead + i < m:
                own.append(F(rank, ahead + i))
            own.append(I(rank, i))
            if i >= held_back:
                own.append(W(rank, i - held_back))
        lists.append(own + [W(rank, i) for i in range(max(0, m - held_back), m)])
    return lists


# %% wrong="zb_h1" fails="the bubble" why="one W more is held back"
def zb_h1(p, m):
    lists = []
    for rank in range(p):
        ahead, held_back = p - rank - 1, rank + 1
        own = [F(rank, i) for i in range(min(ahead, m))]
        for i in range(m):
            if ahead + i < m:
                own.append(F(rank, ahead + i))
            own.append(I(rank, i))
            if i >= held_back:
                own.append(W(rank, i - held_back))
        lists.append(own + [W(rank, i) for i in range(max(0, m - held_back), m)])
    return lists


# %% wrong="under_limit" fails="the limit" why="1F1B, which holds p whatever the limit"
def under_limit(p, m, costs, limit):
    lists = []
    for rank in range(p):
        ahead = min(p - rank, m)
        own = [F(rank, i) for i in range(ahead)]
        for i in range(m):
            own += [I(rank, i), W(rank, i)] + ([F(rank, ahead + i)] if ahead + i < m else [])
        lists.append(own)
    return lists


# %% wrong="under_limit" fails="shorter than 1F1B" why="1F1B with this limit: valid, and W fills nothing"
def under_limit(p, m, costs, limit):
    lists = []
    for rank in range(p):
        ahead = min(p - rank, limit, m)
        own = [F(rank, i) for i in range(ahead)]
        for i in range(m):
            own += [I(rank, i), W(rank, i)] + ([F(rank, ahead + i)] if ahead + i < m else [])
        lists.append(own)
    return lists


# %% wrong="under_limit" fails="the limit" why="I makes room already"
def under_limit(p, m, costs, limit):
    def scheduled(order):
        ends, free, holding = {}, [0] * p, [0] * p
        lists, forwards, inputs, weights = [[] for _ in range(p)], [0] * p, [0] * p, [0] * p

        def ready_at(action):
            times = [ends.get(before) for before in needs(action, p)]
            if None in times:
                return None
            return max(
                [
                    0,
                    *(
                        end + costs["send"] * (before[1] != action[1])
                        for end, before in zip(times, needs(action, p))
                    ),
                ]
            )

        alarms = {0}
        while alarms:
            now = min(alarms)
            alarms.discard(now)
            for rank in range(p):
                if free[rank] > now:
                    continue
                heads = {
                    "F": F(rank, forwards[rank])
                    if forwards[rank] < m and holding[rank] < limit
                    else None,
                    "I": I(rank, inputs[rank]) if inputs[rank] < m else None,
                    "W": W(rank, weights[rank]) if weights[rank] < m else None,
                }
                times = {
                    kind: ready_at(action) for kind, action in heads.items() if action is not None
                }
                alarms |= {time for time in times.values() if time is not None and time > now}
                kind = next(
                    (kind for kind in order if times.get(kind) is not None and times[kind] <= now),
                    None,
                )
                if kind is None:
                    continue
                lists[rank].append(heads[kind])
                free[rank] = ends[heads[kind]] = now + costs[kind]
                alarms |= {free[rank], free[rank] + costs["send"]}
                forwards[rank] += kind == "F"
                inputs[rank] += kind == "I"
                weights[rank] += kind == "W"
                holding[rank] += (kind == "F") - (kind == "I")
        return lists

    tried = [scheduled(order) for order in ("IFW", "FIW", "IWF", "WIF")]
    return min(tried, key=lambda lists: makespan(lists, costs))


# %% wrong="under_limit" fails="every action once" why="ends when the last I is done"
def under_limit(p, m, costs, limit):
    def scheduled(order):
        ends, free, holding = {}, [0] * p, [0] * p
        lists, forwards, inputs, weights = [[] for _ in range(p)], [0] * p, [0] * p, [0] * p

        def ready_at(action):
            times = [ends.get(before) for before in needs(action, p)]
            if None in times:
                return None
            return max(
                [
                    0,
                    *(
                        end + costs["send"] * (before[1] != action[1])
                        for end, before in zip(times, needs(action, p))
                    ),
                ]
            )

        alarms = {0}
        while alarms:
            now = min(alarms)
            alarms.discard(now)
            for rank in range(p):
                if free[rank] > now:
                    continue
                heads = {
                    "F": F(rank, forwards[rank])
                    if forwards[rank] < m and holding[rank] < limit
                    else None,
                    "I": I(rank, inputs[rank]) if inputs[rank] < m else None,
                    "W": W(rank, weights[rank]) if weights[rank] < m else None,
                }
                times = {
                    kind: ready_at(action) for kind, action in heads.items() if action is not None
                }
                alarms |= {time for time in times.values() if time is not None and time > now}
                kind = next(
                    (kind for kind in order if times.get(kind) is not None and times[kind] <= now),
                    None,
                )
                if kind is None:
                    continue
                lists[rank].append(heads[kind])
                free[rank] = ends[heads[kind]] = now + costs[kind]
                alarms |= {free[rank], free[rank] + costs["send"]}
                forwards[rank] += kind == "F"
                inputs[rank] += kind == "I"
                weights[rank] += kind == "W"
                holding[rank] += (kind == "F") - (kind == "W")
        return lists

    tried = [scheduled(order) for order in ("IFW", "FIW", "IWF", "WIF")]
    tried = [
        [[action for action in own if action[0] != "W" or action[2] < m - 1] for own in lists]
        for lists in tried
    ]
    return min(tried, key=lambda lists: makespan(lists, costs))


# %% wrong="under_limit" fails="as short as 1F1B" why="one microbatch after the other"
def under_limit(p, m, costs, limit):
    return [[make(rank, i) for i in range(m) for make in (F, I, W)] for rank in range(p)]


# %% wrong="under_limit" fails="shorter than 1F1B" why="W is more urgent than anything"
def under_limit(p, m, costs, limit):
    def scheduled(order):
        ends, free, holding = {}, [0] * p, [0] * p
        lists, forwards, inputs, weights = [[] for _ in range(p)], [0] * p, [0] * p, [0] * p

        def ready_at(action):
            times = [ends.get(before) for before in needs(action, p)]
            if None in times:
                return None
            return max(
                [
                    0,
                    *(
                        end + costs["send"] * (before[1] != action[1])
                        for end, before in zip(times, needs(action, p))
                    ),
                ]
            )

        alarms = {0}
        while alarms:
            now = min(alarms)
            alarms.discard(now)
            for rank in range(p):
                if free[rank] > now:
                    continue
                heads = {
                    "F": F(rank, forwards[rank])
                    if forwards[rank] < m and holding[rank] < limit
                    else None,
                    "I": I(rank, inputs[rank]) if inputs[rank] < m else None,
                    "W": W(rank, weights[rank]) if weights[rank] < m else None,
                }
                times = {
                    kind: ready_at(action) for kind, action in heads.items() if action is not None
                }
                alarms |= {time for time in times.values() if time is not None and time > now}
                kind = next(
                    (kind for kind in order if times.get(kind) is not None and times[kind] <= now),
                    None,
                )
                if kind is None:
                    continue
                lists[rank].append(heads[kind])
                free[rank] = ends[heads[kind]] = now + costs[kind]
                alarms |= {free[rank], free[rank] + costs["send"]}
                forwards[rank] += kind == "F"
                inputs[rank] += kind == "I"
                weights[rank] += kind == "W"
                holding[rank] += (kind == "F") - (kind == "W")
        return lists

    tried = [scheduled(order) for order in ("WIF",)]
    return min(tried, key=lambda lists: makespan(lists, costs))


# %% wrong="under_limit" fails="the limit" why="one more than the limit"
def under_limit(p, m, costs, limit):
    def scheduled(order):
        ends, free, holding = {}, [0] * p, [0] * p
        lists, forwards, inputs, weights = [[] for _ in range(p)], [0] * p, [0] * p, [0] * p

        def ready_at(action):
            times = [ends.get(before) for before in needs(action, p)]
            if None in times:
                return None
            return max(
                [
                    0,
                    *(
                        end + costs["send"] * (before[1] != action[1])
                        for end, before in zip(times, needs(action, p))
                    ),
                ]
            )

        alarms = {0}
        while alarms:
            now = min(alarms)
            alarms.discard(now)
            for rank in range(p):
                if free[rank] > now:
                    continue
                heads = {
                    "F": F(rank, forwards[rank])
                    if forwards[rank] < m and holding[rank] <= limit
                    else None,
                    "I": I(rank, inputs[rank]) if inputs[rank] < m else None,
                    "W": W(rank, weights[rank]) if weights[rank] < m else None,
                }
                times = {
                    kind: ready_at(action) for kind, action in heads.items() if action is not None
                }
                alarms |= {time for time in times.values() if time is not None and time > now}
                kind = next(
                    (kind for kind in order if times.get(kind) is not None and times[kind] <= now),
                    None,
                )
                if kind is None:
                    continue
                lists[rank].append(heads[kind])
                free[rank] = ends[heads[kind]] = now + costs[kind]
                alarms |= {free[rank], free[rank] + costs["send"]}
                forwards[rank] += kind == "F"
                inputs[rank] += kind == "I"
                weights[rank] += kind == "W"
                holding[rank] += (kind == "F") - (kind == "W")
        return lists

    tried = [scheduled(order) for order in ("IFW", "FIW", "IWF", "WIF")]
    return min(tried, key=lambda lists: makespan(lists, costs))


# %% wrong="under_limit" fails="nobody waits for ever" why="I of the newest microbatch first, on the ranks below the first"
def under_limit(p, m, costs, limit):
    lists = []
    for rank in range(p):
        own, limit = [], min(limit, m)
        for first in range(0, m, limit):
            some = range(first, min(first + limit, m))
            back = list(reversed(some)) if rank else list(some)
            own += (
                [F(rank, i) for i in some]
                + [I(rank, i) for i in (some if rank == p - 1 and first else back)][
                    :: 1 if rank else -1 if first else 1
                ]
                + [W(rank, i) for i in some]
            )
        lists.append(own[::-1] if rank == p - 1 else own)
    return lists


# %% wrong="under_limit" fails="as short as 1F1B" why="GPipe in rounds as large as the limit"
def under_limit(p, m, costs, limit):
    rounds = [range(first, min(first + limit, m)) for first in range(0, m, limit)]
    return [
        [make(rank, i) for some in rounds for make in (F, I, W) for i in some] for rank in range(p)
    ]


# %% wrong="folded" fails="the way up" why="interleaved: every leg begins at rank 0"
def rank_of(stage, p):
    leg, place = divmod(stage, p)
    return place


def messages(p, legs, m):
    return 2 * m * legs * (p - 1)


# %% wrong="folded" fails="more legs" why="a V and nothing more: min(stage, 2p - 1 - stage)"
def rank_of(stage, p):
    return min(stage, 2 * p - 1 - stage)


def messages(p, legs, m):
    return 2 * m * legs * (p - 1)


# %% wrong="folded" fails="the way up" why="the last rank has one stage where it turns"
def rank_of(stage, p):
    place = stage % max(1, 2 * p - 2)
    return min(place, 2 * p - 2 - place)


def messages(p, legs, m):
    return 2 * m * legs * (p - 1)


# %% wrong="folded" fails="no message within a rank" why="the turns send too"
def rank_of(stage, p):
    leg, place = divmod(stage, p)
    return p - 1 - place if leg % 2 else place


def messages(p, legs, m):
    return 2 * m * (legs * p - 1)


# %% wrong="folded" fails="messages" why="forward only"
def rank_of(stage, p):
    leg, place = divmod(stage, p)
    return p - 1 - place if leg % 2 else place


def messages(p, legs, m):
    return m * legs * (p - 1)


# %% wrong="folded" fails="messages" why="a step of one microbatch"
def rank_of(stage, p):
    leg, place = divmod(stage, p)
    return p - 1 - place if leg % 2 else place


def messages(p, legs, m):
    return 2 * legs * (p - 1)


# %% wrong="under_limit" fails="the leaderboard" why="ZB-H1 squeezed into the limit: lists that never look at the costs"
def under_limit(p, m, costs, limit):
    lists = []
    for rank in range(p):
        ahead = min(p - rank - 1, limit - 1, m)
        held_back = max(0, min(rank, limit - 1 - ahead))
        own = [F(rank, i) for i in range(ahead)]
        for i in range(m):
            own += (
                ([F(rank, ahead + i)] if ahead + i < m else [])
                + [I(rank, i)]
                + ([W(rank, i - held_back)] if i >= held_back else [])
            )
        lists.append(own + [W(rank, i) for i in range(max(0, m - held_back), m)])
    return lists
