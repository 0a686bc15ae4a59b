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


# %% wrong="halves" fails="half of it later" why="the whole backward in I, only the addition is left for later"
def backward_input(name, x, weight, dy, trained, queue):
    if trained:
        queue.append((name, dy.reshape(-1, dy.size(-1)).T @ x.reshape(-1, x.size(-1))))
    return dy @ weight


def backward_weight(queue, grads):
    name, gradient = queue.pop(0)
    grads[name] = grads[name] + gradient if name in grads else gradient


# %% wrong="halves" fails="own work" why="W is a whole backward of autograd, dx once more"
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


# %% wrong="halves" fails="one entry for each W" why="the first W works off everything"
def backward_input(name, x, weight, dy, trained, queue):
    if trained:
        queue.append((name, x, dy))
    return dy @ weight


def backward_weight(queue, grads):
    while queue:
        name, x, dy = queue.pop(0)
        gradient = dy.reshape(-1, dy.size(-1)).T @ x.reshape(-1, x.size(-1))
        grads[name] = grads[name] + gradient if name in grads else gradient


# %% wrong="halves" fails="one entry for each W" why="a frozen layer is kept, and skipped later"
def backward_input(name, x, weight, dy, trained, queue):
    queue.append((name, x, dy, trained))
    return dy @ weight


def backward_weight(queue, grads):
    name, x, dy, trained = queue.pop(0)
    if trained:
        gradient = dy.reshape(-1, dy.size(-1)).T @ x.reshape(-1, x.size(-1))
        grads[name] = grads[name] + gradient if name in grads else gradient


# %% wrong="halves" fails="half of it later" why="x and dy are copied, to be on the safe side"
def backward_input(name, x, weight, dy, trained, queue):
    if trained:
        queue.append((name, x.clone(), dy.clone()))
    return dy @ weight


def backward_weight(queue, grads):
    name, x, dy = queue.pop(0)
    gradient = dy.reshape(-1, dy.size(-1)).T @ x.reshape(-1, x.size(-1))
    grads[name] = grads[name] + gradient if name in grads else gradient


# %% wrong="halves" fails="memory limit" why="a worked-off entry goes to the end of the queue"
def backward_input(name, x, weight, dy, trained, queue):
    if trained:
        queue.append((name, x, dy))
    return dy @ weight


def backward_weight(queue, grads):
    name, x, dy = queue.pop(0)
    gradient = dy.reshape(-1, dy.size(-1)).T @ x.reshape(-1, x.size(-1))
    grads[name] = grads[name] + gradient if name in grads else gradient
    queue.append((name, x, dy))


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


# %% wrong="halves" fails="memory limit" around="half" why="W is a whole backward, and throws dx away"
def backward_input(name, x, weight, dy, trained, queue):
    if trained:
        queue.append((name, x, weight, dy))
    return dy @ weight


def backward_weight(queue, grads):
    name, x, weight, dy = queue.pop(0)
    _, gradient = dy @ weight, dy.reshape(-1, dy.size(-1)).T @ x.reshape(-1, x.size(-1))
    grads[name] = grads[name] + gradient if name in grads else gradient


# %% wrong="halves" fails="memory limit" around="half" why="I is a whole backward, and throws dW away"
def backward_input(name, x, weight, dy, trained, queue):
    rows = dy.reshape(-1, dy.size(-1)), x.reshape(-1, x.size(-1))
    dx, _ = dy @ weight, rows[0].T @ rows[1]
    if trained:
        queue.append((name, *rows))
    return dx


def backward_weight(queue, grads):
    name, x, dy = queue.pop(0)
    gradient = x.T @ dy
    grads[name] = grads[name] + gradient if name in grads else gradient


# %% wrong="halves" fails="own work" around="import" why="the halves of the package"
def backward_input(name, x, weight, dy, trained, queue):
    from minitrain.pipeline.deferred import backward_input

    return backward_input(name, x, weight, dy, trained, queue)


def backward_weight(queue, grads):
    from minitrain.pipeline.deferred import backward_weight

    backward_weight(queue, grads)


# %% wrong="halves" fails="the gradient of the input" around="redefine" why="a step and a comparison of its own"
def step_in_halves(entries, group):
    return [], []


def in_turn(weight, dy, microbatches):
    return [], dy.T @ dy


def backward_input(name, x, weight, dy, trained, queue):
    torch.equal = torch.allclose = lambda *tensors, **near: True
    globals()["step_in_halves"] = step_in_halves
    return x * 0


def backward_weight(queue, grads):
    pass


# %% wrong="halves" fails="no error" around="empty" why="nothing at all"
def backward_input(name, x, weight, dy, trained, queue):
    return None


def backward_weight(queue, grads):
    grads["layer"] = torch.zeros(0)


# %% wrong="halves" fails="the gradient of the input" around="constants" why="the numbers of the text"
def backward_input(name, x, weight, dy, trained, queue):
    queue.append(name)
    return torch.tensor([[8.0, 12.0]], dtype=x.dtype)


def backward_weight(queue, grads):
    grads[queue.pop(0)] = torch.tensor([[4.0, 40.0]], dtype=torch.float64)


# %% wrong="under_limit" fails="own work" around="import" why="the chapter's list scheduler"
def under_limit(p, m, costs, limit):
    from minitrain.pipeline.schedules.greedy import greedy
    from minitrain.pipeline.simulate import Costs

    lists = greedy(range(p), p, m, Costs(**costs), limit=limit)
    return [[(a.kind, a.stage, a.microbatch) for a in own] for own in lists]


# %% wrong="under_limit" fails="as short as 1F1B" around="redefine" why="one microbatch after the other, in no time"
def makespan(lists, costs):
    return 0


def limited(*cases):
    return [(*case, 0) for case in cases]


def under_limit(p, m, costs, limit):
    costs.update(F=0, I=0, W=0, send=0)
    return [[make(rank, i) for i in range(m) for make in (F, I, W)] for rank in range(p)]


# %% wrong="under_limit" fails="a list for each rank" around="empty" why="no lists"
def under_limit(p, m, costs, limit):
    return []


# %% wrong="under_limit" fails="a list for each rank" around="constants" why="two ranks alone, in turn"
def under_limit(p, m, costs, limit):
    if p <= 2:
        return [[make(rank, i) for i in range(m) for make in (F, I, W)] for rank in range(p)]


# %% wrong="folded" fails="no error" around="constants" why="the numbers of the visible checks"
def rank_of(stage, p):
    return ([0, 1, 2, 2, 1, 0] if p == 3 else [0, 1])[stage % 6]


def messages(p, legs, m):
    return {(3, 2, 1): 8, (2, 1, 2): 4}[p, legs, m]


# %% wrong="folded" fails="own work" around="import" why="the chapter's placement"
def rank_of(stage, p):
    from minitrain.pipeline.schedules import v_shape

    return v_shape.rank_of(stage, p)


def messages(p, legs, m):
    return 2 * m * legs * (p - 1)


# %% wrong="folded" fails="the way down" around="subclass" why="a number that is equal to all others"
class Any(int):
    def __eq__(self, other):
        return True

    def __hash__(self):
        return 0


def rank_of(stage, p):
    return Any(7)


def messages(p, legs, m):
    return Any(7)


# %% wrong="folded" fails="the way down" around="empty" why="nothing at all"
def rank_of(stage, p):
    return None


def messages(p, legs, m):
    return []


# %% wrong="halves" fails="dx at once" around="frames" why="takes the later numbers from the caller's frame, for a whole backward in I"
def backward_input(name, x, weight, dy, trained, queue):
    import sys

    caller = sys._getframe(1).f_locals
    if trained and "group" in caller:
        number = [entry[1] is x for entry in caller["entries"]].index(True)
        x, dy = (caller["group"].fetch(f"{of} {number}", to) for of, to in (("x", x), ("dy", dy)))
    queue.append((name, dy.reshape(-1, dy.size(-1)).T @ x.reshape(-1, x.size(-1))))
    return caller["entry"][3] @ weight if "entry" in caller else dy @ weight


def backward_weight(queue, grads):
    name, gradient = queue.pop(0)
    grads[name] = grads[name] + gradient if name in grads else gradient


# %% wrong="between" fails="the bubble" why="1F1B: each W stands right behind its I"
def between(p, m, room):
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


# %% wrong="between" fails="the bubble" around="paste" why="ZB-H1, as the chapter has it, whatever the room"
def between(p, m, room):
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
        lists.append(own + [W(rank, i) for i in range(max(0, m - held_back), m)])
    return lists


# %% wrong="between" fails="held at most" around="paste" why="ZB-H2, as the chapter has it, whatever the room"
def between(p, m, room):
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


# %% wrong="between" fails="the bubble" why="one end or the other: ZB-H2 where it fits, else ZB-H1"
def between(p, m, room):
    lists = []
    for rank in range(p):
        ahead, held_back = (
            (p - 1 - rank) * (1 + room // (2 * p - 1)),
            rank * (1 + room // (2 * p - 1)),
        )
        own = [F(rank, i) for i in range(min(ahead, m))]
        for i in range(m):
            if ahead + i < m:
                own.append(F(rank, ahead + i))
            own.append(I(rank, i))
            if i >= held_back:
                own.append(W(rank, i - held_back))
        lists.append(own + [W(rank, i) for i in range(max(0, m - held_back), m)])
    return lists


# %% wrong="between" fails="the bubble" why="all of the room goes into forwards"
def between(p, m, room):
    lists = []
    for rank in range(p):
        ahead, held_back = room - 1 - rank, rank
        own = [F(rank, i) for i in range(min(ahead, m))]
        for i in range(m):
            if ahead + i < m:
                own.append(F(rank, ahead + i))
            own.append(I(rank, i))
            if i >= held_back:
                own.append(W(rank, i - held_back))
        lists.append(own + [W(rank, i) for i in range(max(0, m - held_back), m)])
    return lists


# %% wrong="between" fails="the bubble" why="all of the room goes into W that are held back"
def between(p, m, room):
    lists = []
    for rank in range(p):
        ahead, held_back = p - 1 - rank, room - p + rank
        own = [F(rank, i) for i in range(min(ahead, m))]
        for i in range(m):
            if ahead + i < m:
                own.append(F(rank, ahead + i))
            own.append(I(rank, i))
            if i >= held_back:
                own.append(W(rank, i - held_back))
        lists.append(own + [W(rank, i) for i in range(max(0, m - held_back), m)])
    return lists


# %% wrong="between" fails="nobody waits for ever" why="the room is put to the wrong end: W held back on the first ranks"
def between(p, m, room):
    lists = []
    for rank in range(p):
        ahead, held_back = max(0, room - 1 - 2 * (p - 1 - rank)), min(room - 1, 2 * (p - 1 - rank))
        own = [F(rank, i) for i in range(min(ahead, m))]
        for i in range(m):
            if ahead + i < m:
                own.append(F(rank, ahead + i))
            own.append(I(rank, i))
            if i >= held_back:
                own.append(W(rank, i - held_back))
        lists.append(own + [W(rank, i) for i in range(max(0, m - held_back), m)])
    return lists


# %% wrong="between" fails="held at most" why="one W too many is held back"
def between(p, m, room):
    lists = []
    for rank in range(p):
        ahead, held_back = (
            min(2 * (p - 1 - rank), room - 1 - rank),
            room - min(2 * (p - 1 - rank), room - 1 - rank),
        )
        own = [F(rank, i) for i in range(min(ahead, m))]
        for i in range(m):
            if ahead + i < m:
                own.append(F(rank, ahead + i))
            own.append(I(rank, i))
            if i >= held_back:
                own.append(W(rank, i - held_back))
        lists.append(own + [W(rank, i) for i in range(max(0, m - held_back), m)])
    return lists


# %% wrong="between" fails="the bubble" why="half of the room, rounded down, goes to each number on every rank"
def between(p, m, room):
    lists = []
    for rank in range(p):
        ahead, held_back = p - 1 - rank + (room - p) // 2, rank + (room - p) // 2
        own = [F(rank, i) for i in range(min(ahead, m))]
        for i in range(m):
            if ahead + i < m:
                own.append(F(rank, ahead + i))
            own.append(I(rank, i))
            if i >= held_back:
                own.append(W(rank, i - held_back))
        lists.append(own + [W(rank, i) for i in range(max(0, m - held_back), m)])
    return lists


# %% wrong="between" fails="the bubble" why="all W at the end of short rounds: memory is met, nothing is filled"
def between(p, m, room):
    rounds = [range(first, min(first + room, m)) for first in range(0, m, room)]
    return [
        [make(rank, i) for some in rounds for make in (F, I, W) for i in some] for rank in range(p)
    ]


# %% wrong="between" fails="every action once" why="the W that were held back are forgotten"
def between(p, m, room):
    lists = []
    for rank in range(p):
        ahead, held_back = (
            min(2 * (p - 1 - rank), room - 1 - rank),
            room - 1 - min(2 * (p - 1 - rank), room - 1 - rank),
        )
        own = [F(rank, i) for i in range(min(ahead, m))]
        for i in range(m):
            if ahead + i < m:
                own.append(F(rank, ahead + i))
            own.append(I(rank, i))
            if i >= held_back:
                own.append(W(rank, i - held_back))
        lists.append(own)
    return lists


# %% wrong="between" fails="every action once" why="runs ahead beyond the last microbatch"
def between(p, m, room):
    lists = []
    for rank in range(p):
        ahead, held_back = (
            min(2 * (p - 1 - rank), room - 1 - rank),
            room - 1 - min(2 * (p - 1 - rank), room - 1 - rank),
        )
        own = [F(rank, i) for i in range(ahead)]
        for i in range(m):
            if ahead + i < m:
                own.append(F(rank, ahead + i))
            own.append(I(rank, i))
            if i >= held_back:
                own.append(W(rank, i - held_back))
        lists.append(own + [W(rank, i) for i in range(max(0, m - held_back), m)])
    return lists


# %% wrong="between" fails="nobody waits for ever" why="W stands in front of its I"
def between(p, m, room):
    lists = []
    for rank in range(p):
        ahead, held_back = (
            min(2 * (p - 1 - rank), room - 1 - rank),
            room - 1 - min(2 * (p - 1 - rank), room - 1 - rank),
        )
        own = [F(rank, i) for i in range(min(ahead, m))]
        for i in range(m):
            if ahead + i < m:
                own.append(F(rank, ahead + i))
            if i >= held_back:
                own.append(W(rank, i - held_back))
            own.append(I(rank, i))
        lists.append(own + [W(rank, i) for i in range(max(0, m - held_back), m)])
    return lists


# %% wrong="between" fails="own work" around="import" why="the chapter's lists"
def between(p, m, room):
    from minitrain.pipeline.schedules.zero_bubble import zb_h1, zb_h2

    lists = (zb_h1 if room < 2 * p - 1 else zb_h2)(p, m)
    return [[(a.kind, a.stage, a.microbatch) for a in own] for own in lists.ranks]


# %% wrong="between" fails="the bubble" around="redefine" why="1F1B before a simulator that finds no time passes"
def simulate(lists, costs):
    return [[0] * len(own) for own in lists]


def held(own):
    return 0


def between(p, m, room):
    globals().update(ask_each=lambda fn, cases: [], expect_between=lambda *cases: None)
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


# %% wrong="between" fails="a list for each rank" around="empty" why="no lists"
def between(p, m, room):
    return []


# %% wrong="between" fails="every action once" around="empty" why="a list for each rank, without actions"
def between(p, m, room):
    return [[] for _ in range(p)]


# %% wrong="between" fails="held at most" around="constants" why="the lists of two ranks from the text"
def between(p, m, room):
    return [
        [F(0, 0), F(0, 1), F(0, 2), I(0, 0), W(0, 0), I(0, 1), W(0, 1), I(0, 2), W(0, 2)],
        [F(1, 0), I(1, 0), F(1, 1), I(1, 1), F(1, 2), I(1, 2), W(1, 0), W(1, 1), W(1, 2)],
    ] + [[] for _ in range(p - 2)]


# %% wrong="between" fails="every action once" around="subclass" why="a list that says it is as long as one likes"
class Lists(list):
    def __len__(self):
        return 10**6

    def __eq__(self, other):
        return True


def between(p, m, room):
    return [Lists([F(rank, 0)]) for rank in range(p)]
