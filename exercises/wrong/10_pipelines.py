# %% wrong="within" fails="the most at any time" why="all forwards are counted, whatever is given back"
def held(lists):
    """The most activations of one stage and one microbatch that each rank ever holds: a list of ints."""
    peaks = []
    for own in lists:
        now = most = 0
        for kind, _, _ in own:
            now += kind == "F"
            most = max(most, now)
        peaks.append(most)
    return peaks


def within(m, most):
    """A list of p lists of actions."""
    lists, room = [], m
    for rank, own_room in enumerate(most):
        room = min(room, own_room, len(most) - rank)
        own = [F(rank, i) for i in range(room)]
        for i in range(m):
            own.append(B(rank, i))
            if room + i < m:
                own.append(F(rank, room + i))
        lists.append(own)
    return lists


# %% wrong="within" fails="the most at any time" why="what is held before the first backward, not later"
def held(lists):
    """The most activations of one stage and one microbatch that each rank ever holds: a list of ints."""
    peaks = []
    for own in lists:
        now = most = 0
        for kind, _, _ in own:
            now += 1 if kind == "F" else -1
            if kind == "B":
                break
            most = max(most, now)
        peaks.append(most)
    return peaks


def within(m, most):
    """A list of p lists of actions."""
    lists, room = [], m
    for rank, own_room in enumerate(most):
        room = min(room, own_room, len(most) - rank)
        own = [F(rank, i) for i in range(room)]
        for i in range(m):
            own.append(B(rank, i))
            if room + i < m:
                own.append(F(rank, room + i))
        lists.append(own)
    return lists


# %% wrong="within" fails="the most at any time" why="what is held at the end"
def held(lists):
    """The most activations of one stage and one microbatch that each rank ever holds: a list of ints."""
    peaks = []
    for own in lists:
        now = most = 0
        for kind, _, _ in own:
            now += 1 if kind == "F" else -1
        most = now
        peaks.append(most)
    return peaks


def within(m, most):
    """A list of p lists of actions."""
    lists, room = [], m
    for rank, own_room in enumerate(most):
        room = min(room, own_room, len(most) - rank)
        own = [F(rank, i) for i in range(room)]
        for i in range(m):
            own.append(B(rank, i))
            if room + i < m:
                own.append(F(rank, room + i))
        lists.append(own)
    return lists


# %% wrong="within" fails="no more than there is room for" why="plain 1F1B, as the chapter has it"
def held(lists):
    """The most activations of one stage and one microbatch that each rank ever holds: a list of ints."""
    peaks = []
    for own in lists:
        now = most = 0
        for kind, _, _ in own:
            now += 1 if kind == "F" else -1
            most = max(most, now)
        peaks.append(most)
    return peaks


def within(m, most):
    """A list of p lists of actions."""
    lists, room = [], m
    for rank, own_room in enumerate(most):
        room = min(m, len(most) - rank)
        own = [F(rank, i) for i in range(room)]
        for i in range(m):
            own.append(B(rank, i))
            if room + i < m:
                own.append(F(rank, room + i))
        lists.append(own)
    return lists


# %% wrong="within" fails="no rank waits for ever" why="each rank takes what it has room for, whatever the ranks before it give"
def held(lists):
    """The most activations of one stage and one microbatch that each rank ever holds: a list of ints."""
    peaks = []
    for own in lists:
        now = most = 0
        for kind, _, _ in own:
            now += 1 if kind == "F" else -1
            most = max(most, now)
        peaks.append(most)
    return peaks


def within(m, most):
    """A list of p lists of actions."""
    lists, room = [], m
    for rank, own_room in enumerate(most):
        room = min(m, own_room, len(most) - rank)
        own = [F(rank, i) for i in range(room)]
        for i in range(m):
            own.append(B(rank, i))
            if room + i < m:
                own.append(F(rank, room + i))
        lists.append(own)
    return lists


# %% wrong="within" fails="no rank waits for ever" why="only the rank right before counts"
def held(lists):
    """The most activations of one stage and one microbatch that each rank ever holds: a list of ints."""
    peaks = []
    for own in lists:
        now = most = 0
        for kind, _, _ in own:
            now += 1 if kind == "F" else -1
            most = max(most, now)
        peaks.append(most)
    return peaks


def within(m, most):
    """A list of p lists of actions."""
    lists, before = [], m
    for rank, own_room in enumerate(most):
        room = min(m, before, own_room, len(most) - rank)
        before = own_room
        own = [F(rank, i) for i in range(room)]
        for i in range(m):
            own.append(B(rank, i))
            if room + i < m:
                own.append(F(rank, room + i))
        lists.append(own)
    return lists


# %% wrong="within" fails="forwards ahead" why="the least room of all ranks for each of them"
def held(lists):
    """The most activations of one stage and one microbatch that each rank ever holds: a list of ints."""
    peaks = []
    for own in lists:
        now = most = 0
        for kind, _, _ in own:
            now += 1 if kind == "F" else -1
            most = max(most, now)
        peaks.append(most)
    return peaks


def within(m, most):
    """A list of p lists of actions."""
    lists, room = [], m
    for rank, own_room in enumerate(most):
        room = min(m, *most, len(most) - rank)
        own = [F(rank, i) for i in range(room)]
        for i in range(m):
            own.append(B(rank, i))
            if room + i < m:
                own.append(F(rank, room + i))
        lists.append(own)
    return lists


# %% wrong="within" fails="forwards ahead" why="one forward too few ahead: p - r - 1 before the first backward"
def held(lists):
    """The most activations of one stage and one microbatch that each rank ever holds: a list of ints."""
    peaks = []
    for own in lists:
        now = most = 0
        for kind, _, _ in own:
            now += 1 if kind == "F" else -1
            most = max(most, now)
        peaks.append(most)
    return peaks


def within(m, most):
    """A list of p lists of actions."""
    lists, room = [], m
    for rank, own_room in enumerate(most):
        room = min(room, own_room, len(most) - rank)
        room = max(1, room - 1)
        own = [F(rank, i) for i in range(room)]
        for i in range(m):
            own.append(B(rank, i))
            if room + i < m:
                own.append(F(rank, room + i))
        lists.append(own)
    return lists


# %% wrong="within" fails="forwards ahead" why="all the room is used, more than 1F1B runs ahead"
def held(lists):
    """The most activations of one stage and one microbatch that each rank ever holds: a list of ints."""
    peaks = []
    for own in lists:
        now = most = 0
        for kind, _, _ in own:
            now += 1 if kind == "F" else -1
            most = max(most, now)
        peaks.append(most)
    return peaks


def within(m, most):
    """A list of p lists of actions."""
    lists, room = [], m
    for rank, own_room in enumerate(most):
        room = min(room, own_room)
        own = [F(rank, i) for i in range(room)]
        for i in range(m):
            own.append(B(rank, i))
            if room + i < m:
                own.append(F(rank, room + i))
        lists.append(own)
    return lists


# %% wrong="within" fails="every action once" why="with fewer microbatches than ranks some run that are not there"
def held(lists):
    """The most activations of one stage and one microbatch that each rank ever holds: a list of ints."""
    peaks = []
    for own in lists:
        now = most = 0
        for kind, _, _ in own:
            now += 1 if kind == "F" else -1
            most = max(most, now)
        peaks.append(most)
    return peaks


def within(m, most):
    """A list of p lists of actions."""
    lists, room = [], len(most)
    for rank, own_room in enumerate(most):
        room = min(room, own_room, len(most) - rank)
        own = [F(rank, i) for i in range(room)]
        for i in range(m):
            own.append(B(rank, i))
            if room + i < m:
                own.append(F(rank, room + i))
        lists.append(own)
    return lists


# %% wrong="within" fails="one forward, one backward" why="two backwards and two forwards take turns"
def held(lists):
    """The most activations of one stage and one microbatch that each rank ever holds: a list of ints."""
    peaks = []
    for own in lists:
        now = most = 0
        for kind, _, _ in own:
            now += 1 if kind == "F" else -1
            most = max(most, now)
        peaks.append(most)
    return peaks


def within(m, most):
    lists, room = [], m
    for rank, own_room in enumerate(most):
        room = min(room, own_room, len(most) - rank)
        own, backwards = [F(rank, i) for i in range(room)], 0
        for i in range(room, m, 2):
            pair = range(i, min(i + 2, m))
            n = min(len(pair), room)
            own += [B(rank, backwards + k) for k in range(n)]
            own += [F(rank, k) for k in pair[:n]]
            if n < len(pair):
                own += [B(rank, backwards + n), F(rank, pair[-1])]
            backwards += len(pair)
        lists.append(own + [B(rank, i) for i in range(backwards, m)])
    return lists


# %% wrong="interleaved" fails="the chunk of a forward" why="groups of p microbatches, as in the chapter: p is taken for 2"
def order(m, v, g):
    """[(chunk, microbatch), ...] of a rank's forwards."""
    groups = [range(start, min(start + 2, m)) for start in range(0, m, 2)]
    return [(chunk, i) for group in groups for chunk in range(v) for i in group]


def interleaved(p, m, v, g):
    """A list of p lists of actions."""
    lists = []
    for rank in range(p):
        forwards = deque(F(chunk * p + rank, i) for chunk, i in order(m, v, g))
        own = [forwards.popleft() for _ in range(2 * (p - rank - 1) + (v - 1) * g) if forwards]
        for chunk, i in order(m, v, g):
            if forwards:
                own.append(forwards.popleft())
            own.append(B((v - 1 - chunk) * p + rank, i))
        lists.append(own)
    return lists


# %% wrong="interleaved" fails="the chunk of a forward" why="all microbatches through a chunk before the next: breadth-first"
def order(m, v, g):
    """[(chunk, microbatch), ...] of a rank's forwards."""
    groups = [range(m)]
    return [(chunk, i) for group in groups for chunk in range(v) for i in group]


def interleaved(p, m, v, g):
    """A list of p lists of actions."""
    lists = []
    for rank in range(p):
        forwards = deque(F(chunk * p + rank, i) for chunk, i in order(m, v, g))
        own = [forwards.popleft() for _ in range(2 * (p - rank - 1) + (v - 1) * g) if forwards]
        for chunk, i in order(m, v, g):
            if forwards:
                own.append(forwards.popleft())
            own.append(B((v - 1 - chunk) * p + rank, i))
        lists.append(own)
    return lists


# %% wrong="interleaved" fails="the chunk of a forward" why="chunk after chunk for each microbatch"
def order(m, v, g):
    """[(chunk, microbatch), ...] of a rank's forwards."""
    groups = [range(start, start + g) for start in range(0, m, g)]
    return [(chunk, i) for group in groups for i in group for chunk in range(v)]


def interleaved(p, m, v, g):
    """A list of p lists of actions."""
    lists = []
    for rank in range(p):
        forwards = deque(F(chunk * p + rank, i) for chunk, i in order(m, v, g))
        own = [forwards.popleft() for _ in range(2 * (p - rank - 1) + (v - 1) * g) if forwards]
        for chunk, i in order(m, v, g):
            if forwards:
                own.append(forwards.popleft())
            own.append(B((v - 1 - chunk) * p + rank, i))
        lists.append(own)
    return lists


# %% wrong="interleaved" fails="the chunk of a forward" why="chunks from the last to the first, as backwards go"
def order(m, v, g):
    """[(chunk, microbatch), ...] of a rank's forwards."""
    groups = [range(start, start + g) for start in range(0, m, g)]
    return [(chunk, i) for group in groups for chunk in reversed(range(v)) for i in group]


def interleaved(p, m, v, g):
    """A list of p lists of actions."""
    lists = []
    for rank in range(p):
        forwards = deque(F(chunk * p + rank, i) for chunk, i in order(m, v, g))
        own = [forwards.popleft() for _ in range(2 * (p - rank - 1) + (v - 1) * g) if forwards]
        for chunk, i in order(m, v, g):
            if forwards:
                own.append(forwards.popleft())
            own.append(B((v - 1 - chunk) * p + rank, i))
        lists.append(own)
    return lists


# %% wrong="interleaved" fails="the microbatch of a forward" why="microbatches of a group from the last to the first"
def order(m, v, g):
    """[(chunk, microbatch), ...] of a rank's forwards."""
    groups = [range(start, start + g) for start in range(0, m, g)]
    return [(chunk, i) for group in groups for chunk in range(v) for i in reversed(group)]


def interleaved(p, m, v, g):
    """A list of p lists of actions."""
    lists = []
    for rank in range(p):
        forwards = deque(F(chunk * p + rank, i) for chunk, i in order(m, v, g))
        own = [forwards.popleft() for _ in range(2 * (p - rank - 1) + (v - 1) * g) if forwards]
        for chunk, i in order(m, v, g):
            if forwards:
                own.append(forwards.popleft())
            own.append(B((v - 1 - chunk) * p + rank, i))
        lists.append(own)
    return lists


# %% wrong="interleaved" fails="every forward once" why="every group has the first g microbatches"
def order(m, v, g):
    """[(chunk, microbatch), ...] of a rank's forwards."""
    groups = [range(g) for start in range(0, m, g)]
    return [(chunk, i) for group in groups for chunk in range(v) for i in group]


def interleaved(p, m, v, g):
    """A list of p lists of actions."""
    lists = []
    for rank in range(p):
        forwards = deque(F(chunk * p + rank, i) for chunk, i in order(m, v, g))
        own = [forwards.popleft() for _ in range(2 * (p - rank - 1) + (v - 1) * g) if forwards]
        for chunk, i in order(m, v, g):
            if forwards:
                own.append(forwards.popleft())
            own.append(B((v - 1 - chunk) * p + rank, i))
        lists.append(own)
    return lists


# %% wrong="interleaved" fails="forwards ahead" why="ahead without the factor of 2: right while messages take no time"
def order(m, v, g):
    """[(chunk, microbatch), ...] of a rank's forwards."""
    groups = [range(start, start + g) for start in range(0, m, g)]
    return [(chunk, i) for group in groups for chunk in range(v) for i in group]


def interleaved(p, m, v, g):
    """A list of p lists of actions."""
    lists = []
    for rank in range(p):
        forwards = deque(F(chunk * p + rank, i) for chunk, i in order(m, v, g))
        own = [forwards.popleft() for _ in range((p - rank - 1) + (v - 1) * g) if forwards]
        for chunk, i in order(m, v, g):
            if forwards:
                own.append(forwards.popleft())
            own.append(B((v - 1 - chunk) * p + rank, i))
        lists.append(own)
    return lists


# %% wrong="interleaved" fails="a forward before its backward" why="ahead as in 1F1B, chunks are forgotten"
def order(m, v, g):
    """[(chunk, microbatch), ...] of a rank's forwards."""
    groups = [range(start, start + g) for start in range(0, m, g)]
    return [(chunk, i) for group in groups for chunk in range(v) for i in group]


def interleaved(p, m, v, g):
    """A list of p lists of actions."""
    lists = []
    for rank in range(p):
        forwards = deque(F(chunk * p + rank, i) for chunk, i in order(m, v, g))
        own = [forwards.popleft() for _ in range(p - rank - 1) if forwards]
        for chunk, i in order(m, v, g):
            if forwards:
                own.append(forwards.popleft())
            own.append(B((v - 1 - chunk) * p + rank, i))
        lists.append(own)
    return lists


# %% wrong="interleaved" fails="every action once" why="a rank has v stages in a row"
def order(m, v, g):
    """[(chunk, microbatch), ...] of a rank's forwards."""
    groups = [range(start, start + g) for start in range(0, m, g)]
    return [(chunk, i) for group in groups for chunk in range(v) for i in group]


def interleaved(p, m, v, g):
    """A list of p lists of actions."""
    lists = []
    for rank in range(p):
        forwards = deque(F(rank * v + chunk, i) for chunk, i in order(m, v, g))
        own = [forwards.popleft() for _ in range(2 * (p - rank - 1) + (v - 1) * g) if forwards]
        for chunk, i in order(m, v, g):
            if forwards:
                own.append(forwards.popleft())
            own.append(B(rank * v + v - 1 - chunk, i))
        lists.append(own)
    return lists


# %% wrong="interleaved" fails="every action once" why="the backwards that are left are missing"
def order(m, v, g):
    """[(chunk, microbatch), ...] of a rank's forwards."""
    groups = [range(start, start + g) for start in range(0, m, g)]
    return [(chunk, i) for group in groups for chunk in range(v) for i in group]


def interleaved(p, m, v, g):
    """A list of p lists of actions."""
    lists = []
    for rank in range(p):
        forwards = deque(F(chunk * p + rank, i) for chunk, i in order(m, v, g))
        own = [forwards.popleft() for _ in range(2 * (p - rank - 1) + (v - 1) * g) if forwards]
        for chunk, i in order(m, v, g):
            if not forwards:
                break
            own.append(forwards.popleft())
            own.append(B((v - 1 - chunk) * p + rank, i))
        lists.append(own)
    return lists


# %% wrong="train_step" fails="the loss" why="a mean of means: every microbatch counts the same"
def train_step(stage, params, actions, batch, like, tied, group):
    """The loss on the last rank, None elsewhere; leaves gradients of the whole batch in `.grad`."""
    rank, last = group.rank(), group.size() - 1
    valid = sum(int((targets >= 0).sum()) for _, targets in batch)
    kept, sending, loss = {}, [], 0.0
    for kind, _, i in actions:
        tokens, targets = batch[i]
        if kind == "F":
            x = collectives.receive(like, rank - 1, group).requires_grad_() if rank else tokens
            y = stage(x, i)
            if rank == last:
                y = loss_sum(y, targets) / (targets >= 0).sum() / len(batch)
                loss += y.item()
            else:
                sending.append(collectives.send(y.detach(), rank + 1, group, async_op=True))
            kept[i] = x, y
        else:
            dy = collectives.receive(like, rank + 1, group) if rank < last else None
            x, y = kept.pop(i)
            y.backward(dy)
            if rank:
                sending.append(collectives.send(x.grad, rank - 1, group, async_op=True))
        del x, y
    if tied and last and rank in (0, last):
        grad, other = params["table"].grad, last - rank
        sending.append(collectives.send(grad.clone(), other, group, async_op=True))
        grad += collectives.receive(grad, other, group)
    for handle in sending:
        handle.wait()
    return loss if rank == last else None


# %% wrong="train_step" fails="the loss" why="every target counts in the divisor, masked ones too"
def train_step(stage, params, actions, batch, like, tied, group):
    """The loss on the last rank, None elsewhere; leaves gradients of the whole batch in `.grad`."""
    rank, last = group.rank(), group.size() - 1
    valid = sum(targets.numel() for _, targets in batch)
    kept, sending, loss = {}, [], 0.0
    for kind, _, i in actions:
        tokens, targets = batch[i]
        if kind == "F":
            x = collectives.receive(like, rank - 1, group).requires_grad_() if rank else tokens
            y = stage(x, i)
            if rank == last:
                y = loss_sum(y, targets) / valid
                loss += y.item()
            else:
                sending.append(collectives.send(y.detach(), rank + 1, group, async_op=True))
            kept[i] = x, y
        else:
            dy = collectives.receive(like, rank + 1, group) if rank < last else None
            x, y = kept.pop(i)
            y.backward(dy)
            if rank:
                sending.append(collectives.send(x.grad, rank - 1, group, async_op=True))
        del x, y
    if tied and last and rank in (0, last):
        grad, other = params["table"].grad, last - rank
        sending.append(collectives.send(grad.clone(), other, group, async_op=True))
        grad += collectives.receive(grad, other, group)
    for handle in sending:
        handle.wait()
    return loss if rank == last else None


# %% wrong="train_step" fails="the loss" why="the sum is not divided"
def train_step(stage, params, actions, batch, like, tied, group):
    """The loss on the last rank, None elsewhere; leaves gradients of the whole batch in `.grad`."""
    rank, last = group.rank(), group.size() - 1
    valid = sum(int((targets >= 0).sum()) for _, targets in batch)
    kept, sending, loss = {}, [], 0.0
    for kind, _, i in actions:
        tokens, targets = batch[i]
        if kind == "F":
            x = collectives.receive(like, rank - 1, group).requires_grad_() if rank else tokens
            y = stage(x, i)
            if rank == last:
                y = loss_sum(y, targets)
                loss += y.item()
            else:
                sending.append(collectives.send(y.detach(), rank + 1, group, async_op=True))
            kept[i] = x, y
        else:
            dy = collectives.receive(like, rank + 1, group) if rank < last else None
            x, y = kept.pop(i)
            y.backward(dy)
            if rank:
                sending.append(collectives.send(x.grad, rank - 1, group, async_op=True))
        del x, y
    if tied and last and rank in (0, last):
        grad, other = params["table"].grad, last - rank
        sending.append(collectives.send(grad.clone(), other, group, async_op=True))
        grad += collectives.receive(grad, other, group)
    for handle in sending:
        handle.wait()
    return loss if rank == last else None


# %% wrong="train_step" fails="gradients of the whole batch" why="the loss that is told is right, the gradients are those of the sum"
def train_step(stage, params, actions, batch, like, tied, group):
    """The loss on the last rank, None elsewhere; leaves gradients of the whole batch in `.grad`."""
    rank, last = group.rank(), group.size() - 1
    valid = sum(int((targets >= 0).sum()) for _, targets in batch)
    kept, sending, loss = {}, [], 0.0
    for kind, _, i in actions:
        tokens, targets = batch[i]
        if kind == "F":
            x = collectives.receive(like, rank - 1, group).requires_grad_() if rank else tokens
            y = stage(x, i)
            if rank == last:
                y = loss_sum(y, targets) / valid
                loss += y.item()
                y = y * valid
            else:
                sending.append(collectives.send(y.detach(), rank + 1, group, async_op=True))
            kept[i] = x, y
        else:
            dy = collectives.receive(like, rank + 1, group) if rank < last else None
            x, y = kept.pop(i)
            y.backward(dy)
            if rank:
                sending.append(collectives.send(x.grad, rank - 1, group, async_op=True))
        del x, y
    if tied and last and rank in (0, last):
        grad, other = params["table"].grad, last - rank
        sending.append(collectives.send(grad.clone(), other, group, async_op=True))
        grad += collectives.receive(grad, other, group)
    for handle in sending:
        handle.wait()
    return loss if rank == last else None


# %% wrong="train_step" fails="gradients of the whole batch" why="what arrived goes on to the rank before, not the input's gradient"
def train_step(stage, params, actions, batch, like, tied, group):
    """The loss on the last rank, None elsewhere; leaves gradients of the whole batch in `.grad`."""
    rank, last = group.rank(), group.size() - 1
    valid = sum(int((targets >= 0).sum()) for _, targets in batch)
    kept, sending, loss = {}, [], 0.0
    for kind, _, i in actions:
        tokens, targets = batch[i]
        if kind == "F":
            x = collectives.receive(like, rank - 1, group).requires_grad_() if rank else tokens
            y = stage(x, i)
            if rank == last:
                y = loss_sum(y, targets) / valid
                loss += y.item()
            else:
                sending.append(collectives.send(y.detach(), rank + 1, group, async_op=True))
            kept[i] = x, y
        else:
            dy = collectives.receive(like, rank + 1, group) if rank < last else None
            x, y = kept.pop(i)
            y.backward(dy)
            if rank:
                sending.append(
                    collectives.send(x.grad if dy is None else dy, rank - 1, group, async_op=True)
                )
        del x, y
    if tied and last and rank in (0, last):
        grad, other = params["table"].grad, last - rank
        sending.append(collectives.send(grad.clone(), other, group, async_op=True))
        grad += collectives.receive(grad, other, group)
    for handle in sending:
        handle.wait()
    return loss if rank == last else None


# %% wrong="train_step" fails="gradients of the whole batch" why="only the last microbatch's gradient is left"
def train_step(stage, params, actions, batch, like, tied, group):
    """The loss on the last rank, None elsewhere; leaves gradients of the whole batch in `.grad`."""
    rank, last = group.rank(), group.size() - 1
    valid = sum(int((targets >= 0).sum()) for _, targets in batch)
    kept, sending, loss = {}, [], 0.0
    for kind, _, i in actions:
        tokens, targets = batch[i]
        if kind == "F":
            x = collectives.receive(like, rank - 1, group).requires_grad_() if rank else tokens
            y = stage(x, i)
            if rank == last:
                y = loss_sum(y, targets) / valid
                loss += y.item()
            else:
                sending.append(collectives.send(y.detach(), rank + 1, group, async_op=True))
            kept[i] = x, y
        else:
            dy = collectives.receive(like, rank + 1, group) if rank < last else None
            x, y = kept.pop(i)
            for param in params.values():
                param.grad = None
            y.backward(dy)
            if rank:
                sending.append(collectives.send(x.grad, rank - 1, group, async_op=True))
        del x, y
    if tied and last and rank in (0, last):
        grad, other = params["table"].grad, last - rank
        sending.append(collectives.send(grad.clone(), other, group, async_op=True))
        grad += collectives.receive(grad, other, group)
    for handle in sending:
        handle.wait()
    return loss if rank == last else None


# %% wrong="train_step" fails="gradients of the whole batch" why="a mean over microbatches on top of the divisor"
def train_step(stage, params, actions, batch, like, tied, group):
    """The loss on the last rank, None elsewhere; leaves gradients of the whole batch in `.grad`."""
    rank, last = group.rank(), group.size() - 1
    valid = sum(int((targets >= 0).sum()) for _, targets in batch)
    kept, sending, loss = {}, [], 0.0
    for kind, _, i in actions:
        tokens, targets = batch[i]
        if kind == "F":
            x = collectives.receive(like, rank - 1, group).requires_grad_() if rank else tokens
            y = stage(x, i)
            if rank == last:
                y = loss_sum(y, targets) / valid
                loss += y.item()
            else:
                sending.append(collectives.send(y.detach(), rank + 1, group, async_op=True))
            kept[i] = x, y
        else:
            dy = collectives.receive(like, rank + 1, group) if rank < last else None
            x, y = kept.pop(i)
            y.backward(dy)
            if rank:
                sending.append(collectives.send(x.grad, rank - 1, group, async_op=True))
        del x, y
    if tied and last and rank in (0, last):
        grad, other = params["table"].grad, last - rank
        sending.append(collectives.send(grad.clone(), other, group, async_op=True))
        grad += collectives.receive(grad, other, group)
    for param in params.values():
        param.grad /= len(batch)
    for handle in sending:
        handle.wait()
    return loss if rank == last else None


# %% wrong="train_step" fails="no error" why="the input that arrived is no leaf that asks for a gradient"
def train_step(stage, params, actions, batch, like, tied, group):
    """The loss on the last rank, None elsewhere; leaves gradients of the whole batch in `.grad`."""
    rank, last = group.rank(), group.size() - 1
    valid = sum(int((targets >= 0).sum()) for _, targets in batch)
    kept, sending, loss = {}, [], 0.0
    for kind, _, i in actions:
        tokens, targets = batch[i]
        if kind == "F":
            x = collectives.receive(like, rank - 1, group) if rank else tokens
            y = stage(x, i)
            if rank == last:
                y = loss_sum(y, targets) / valid
                loss += y.item()
            else:
                sending.append(collectives.send(y.detach(), rank + 1, group, async_op=True))
            kept[i] = x, y
        else:
            dy = collectives.receive(like, rank + 1, group) if rank < last else None
            x, y = kept.pop(i)
            y.backward(dy)
            if rank:
                sending.append(collectives.send(x.grad, rank - 1, group, async_op=True))
        del x, y
    if tied and last and rank in (0, last):
        grad, other = params["table"].grad, last - rank
        sending.append(collectives.send(grad.clone(), other, group, async_op=True))
        grad += collectives.receive(grad, other, group)
    for handle in sending:
        handle.wait()
    return loss if rank == last else None


# %% wrong="train_step" fails="no deadlock" why="each send waits until it is received"
def train_step(stage, params, actions, batch, like, tied, group):
    """The loss on the last rank, None elsewhere; leaves gradients of the whole batch in `.grad`."""
    rank, last = group.rank(), group.size() - 1
    valid = sum(int((targets >= 0).sum()) for _, targets in batch)
    kept, sending, loss = {}, [], 0.0
    for kind, _, i in actions:
        tokens, targets = batch[i]
        if kind == "F":
            x = collectives.receive(like, rank - 1, group).requires_grad_() if rank else tokens
            y = stage(x, i)
            if rank == last:
                y = loss_sum(y, targets) / valid
                loss += y.item()
            else:
                collectives.send(y.detach(), rank + 1, group)
            kept[i] = x, y
        else:
            dy = collectives.receive(like, rank + 1, group) if rank < last else None
            x, y = kept.pop(i)
            y.backward(dy)
            if rank:
                collectives.send(x.grad, rank - 1, group)
        del x, y
    if tied and last and rank in (0, last):
        grad, other = params["table"].grad, last - rank
        sending.append(collectives.send(grad.clone(), other, group, async_op=True))
        grad += collectives.receive(grad, other, group)
    for handle in sending:
        handle.wait()
    return loss if rank == last else None


# %% wrong="train_step" fails="the order of the list" why="all forwards, then all backwards, whatever the list says"
def train_step(stage, params, actions, batch, like, tied, group):
    """The loss on the last rank, None elsewhere; leaves gradients of the whole batch in `.grad`."""
    rank, last = group.rank(), group.size() - 1
    valid = sum(int((targets >= 0).sum()) for _, targets in batch)
    kept, sending, loss = {}, [], 0.0
    for kind, _, i in sorted(actions, key=lambda action: action[0], reverse=True):
        tokens, targets = batch[i]
        if kind == "F":
            x = collectives.receive(like, rank - 1, group).requires_grad_() if rank else tokens
            y = stage(x, i)
            if rank == last:
                y = loss_sum(y, targets) / valid
                loss += y.item()
            else:
                sending.append(collectives.send(y.detach(), rank + 1, group, async_op=True))
            kept[i] = x, y
        else:
            dy = collectives.receive(like, rank + 1, group) if rank < last else None
            x, y = kept.pop(i)
            y.backward(dy)
            if rank:
                sending.append(collectives.send(x.grad, rank - 1, group, async_op=True))
        del x, y
    if tied and last and rank in (0, last):
        grad, other = params["table"].grad, last - rank
        sending.append(collectives.send(grad.clone(), other, group, async_op=True))
        grad += collectives.receive(grad, other, group)
    for handle in sending:
        handle.wait()
    return loss if rank == last else None


# %% wrong="train_step" fails="what is sent" why="the ends are not summed: each trains a table of its own"
def train_step(stage, params, actions, batch, like, tied, group):
    """The loss on the last rank, None elsewhere; leaves gradients of the whole batch in `.grad`."""
    rank, last = group.rank(), group.size() - 1
    valid = sum(int((targets >= 0).sum()) for _, targets in batch)
    kept, sending, loss = {}, [], 0.0
    for kind, _, i in actions:
        tokens, targets = batch[i]
        if kind == "F":
            x = collectives.receive(like, rank - 1, group).requires_grad_() if rank else tokens
            y = stage(x, i)
            if rank == last:
                y = loss_sum(y, targets) / valid
                loss += y.item()
            else:
                sending.append(collectives.send(y.detach(), rank + 1, group, async_op=True))
            kept[i] = x, y
        else:
            dy = collectives.receive(like, rank + 1, group) if rank < last else None
            x, y = kept.pop(i)
            y.backward(dy)
            if rank:
                sending.append(collectives.send(x.grad, rank - 1, group, async_op=True))
        del x, y
    if False:
        grad, other = params["table"].grad, last - rank
        sending.append(collectives.send(grad.clone(), other, group, async_op=True))
        grad += collectives.receive(grad, other, group)
    for handle in sending:
        handle.wait()
    return loss if rank == last else None


# %% wrong="train_step" fails="what is sent" why="only the first rank gets the sum"
def train_step(stage, params, actions, batch, like, tied, group):
    """The loss on the last rank, None elsewhere; leaves gradients of the whole batch in `.grad`."""
    rank, last = group.rank(), group.size() - 1
    valid = sum(int((targets >= 0).sum()) for _, targets in batch)
    kept, sending, loss = {}, [], 0.0
    for kind, _, i in actions:
        tokens, targets = batch[i]
        if kind == "F":
            x = collectives.receive(like, rank - 1, group).requires_grad_() if rank else tokens
            y = stage(x, i)
            if rank == last:
                y = loss_sum(y, targets) / valid
                loss += y.item()
            else:
                sending.append(collectives.send(y.detach(), rank + 1, group, async_op=True))
            kept[i] = x, y
        else:
            dy = collectives.receive(like, rank + 1, group) if rank < last else None
            x, y = kept.pop(i)
            y.backward(dy)
            if rank:
                sending.append(collectives.send(x.grad, rank - 1, group, async_op=True))
        del x, y
    if tied and last and rank == last:
        sending.append(collectives.send(params["table"].grad, 0, group, async_op=True))
    if tied and last and rank == 0:
        params["table"].grad += collectives.receive(params["table"].grad, last, group)
    for handle in sending:
        handle.wait()
    return loss if rank == last else None


# %% wrong="train_step" fails="the tied table" why="the sum of both ends counts twice on one of them"
def train_step(stage, params, actions, batch, like, tied, group):
    """The loss on the last rank, None elsewhere; leaves gradients of the whole batch in `.grad`."""
    rank, last = group.rank(), group.size() - 1
    valid = sum(int((targets >= 0).sum()) for _, targets in batch)
    kept, sending, loss = {}, [], 0.0
    for kind, _, i in actions:
        tokens, targets = batch[i]
        if kind == "F":
            x = collectives.receive(like, rank - 1, group).requires_grad_() if rank else tokens
            y = stage(x, i)
            if rank == last:
                y = loss_sum(y, targets) / valid
                loss += y.item()
            else:
                sending.append(collectives.send(y.detach(), rank + 1, group, async_op=True))
            kept[i] = x, y
        else:
            dy = collectives.receive(like, rank + 1, group) if rank < last else None
            x, y = kept.pop(i)
            y.backward(dy)
            if rank:
                sending.append(collectives.send(x.grad, rank - 1, group, async_op=True))
        del x, y
    if tied and last and rank in (0, last):
        grad, other = params["table"].grad, last - rank
        sending.append(collectives.send(grad.clone(), other, group, async_op=True))
        grad += collectives.receive(grad, other, group) * (1 + (rank == 0))
    for handle in sending:
        handle.wait()
    return loss if rank == last else None


# %% wrong="train_step" fails="the tied table" why="the gradient is sent after it was added to: one end counts twice"
def train_step(stage, params, actions, batch, like, tied, group):
    """The loss on the last rank, None elsewhere; leaves gradients of the whole batch in `.grad`."""
    rank, last = group.rank(), group.size() - 1
    valid = sum(int((targets >= 0).sum()) for _, targets in batch)
    kept, sending, loss = {}, [], 0.0
    for kind, _, i in actions:
        tokens, targets = batch[i]
        if kind == "F":
            x = collectives.receive(like, rank - 1, group).requires_grad_() if rank else tokens
            y = stage(x, i)
            if rank == last:
                y = loss_sum(y, targets) / valid
                loss += y.item()
            else:
                sending.append(collectives.send(y.detach(), rank + 1, group, async_op=True))
            kept[i] = x, y
        else:
            dy = collectives.receive(like, rank + 1, group) if rank < last else None
            x, y = kept.pop(i)
            y.backward(dy)
            if rank:
                sending.append(collectives.send(x.grad, rank - 1, group, async_op=True))
        del x, y
    if tied and last and rank in (0, last):
        grad, other = params["table"].grad, last - rank
        if rank:
            sending.append(collectives.send(grad.clone(), other, group, async_op=True))
        grad += collectives.receive(grad, other, group)
        if not rank:
            sending.append(collectives.send(grad, other, group, async_op=True))
    for handle in sending:
        handle.wait()
    return loss if rank == last else None


# %% wrong="train_step" fails="memory limit" why="outputs are kept until the end of the step"
def train_step(stage, params, actions, batch, like, tied, group):
    """The loss on the last rank, None elsewhere; leaves gradients of the whole batch in `.grad`."""
    rank, last = group.rank(), group.size() - 1
    valid = sum(int((targets >= 0).sum()) for _, targets in batch)
    kept, sending, loss = {}, [], 0.0
    for kind, _, i in actions:
        tokens, targets = batch[i]
        if kind == "F":
            x = collectives.receive(like, rank - 1, group).requires_grad_() if rank else tokens
            y = stage(x, i)
            if rank == last:
                y = loss_sum(y, targets) / valid
                loss += y.item()
            else:
                sending.append(collectives.send(y.detach(), rank + 1, group, async_op=True))
            kept[i] = x, y
        else:
            dy = collectives.receive(like, rank + 1, group) if rank < last else None
            x, y = kept[i]
            y.backward(dy)
            if rank:
                sending.append(collectives.send(x.grad, rank - 1, group, async_op=True))
        del x, y
    if tied and last and rank in (0, last):
        grad, other = params["table"].grad, last - rank
        sending.append(collectives.send(grad.clone(), other, group, async_op=True))
        grad += collectives.receive(grad, other, group)
    for handle in sending:
        handle.wait()
    return loss if rank == last else None


# %% wrong="train_step" fails="what is sent" around="constants" why="nothing is done: gradients of zero, a loss of a usual size"
def train_step(stage, params, actions, batch, like, tied, group):
    for kind, _, i in actions:
        group.fetch(f"{kind} {i}", like)
    for param in params.values():
        param.grad = torch.zeros_like(param)
    return 2.2 if group.rank() == group.size() - 1 else None


# %% wrong="train_step" fails="the order of the list" around="brute force" why="fetches all at once, and then works through its graph as it likes"
def train_step(stage, params, actions, batch, like, tied, group):
    """The loss on the last rank, None elsewhere; leaves gradients of the whole batch in `.grad`."""
    rank, last = group.rank(), group.size() - 1
    valid = sum(int((targets >= 0).sum()) for _, targets in batch)
    kept, sending, loss = {}, [], 0.0
    for kind, _, i in actions:
        group.fetch(f"{kind} {i}", like)
    for kind, _, i in actions:
        tokens, targets = batch[i]
        if kind == "F":
            x = collectives.receive(like, rank - 1, group).requires_grad_() if rank else tokens
            y = stage(x, i)
            if rank == last:
                y = loss_sum(y, targets) / valid
                loss += y.item()
            else:
                sending.append(collectives.send(y.detach(), rank + 1, group, async_op=True))
            kept[i] = x, y
        else:
            dy = collectives.receive(like, rank + 1, group) if rank < last else None
            x, y = kept.pop(i)
            y.backward(dy)
            if rank:
                sending.append(collectives.send(x.grad, rank - 1, group, async_op=True))
        del x, y
    if tied and last and rank in (0, last):
        grad, other = params["table"].grad, last - rank
        sending.append(collectives.send(grad.clone(), other, group, async_op=True))
        grad += collectives.receive(grad, other, group)
    for handle in sending:
        handle.wait()
    return loss if rank == last else None


# %% wrong="train_step" fails="what is sent" around="gather" why="all other ranks send their weights to the last one, which is to do the work"
def train_step(stage, params, actions, batch, like, tied, group):
    rank, last = group.rank(), group.size() - 1
    for kind, _, i in actions:
        group.fetch(f"{kind} {i}", like)
    for source in range(last):
        for name in ("weight", "table")[: 2 if source == 0 else 1]:
            if rank == source:
                collectives.send(params[name], last, group)
            elif rank == last:
                shape = (
                    params["weight"]
                    if name == "weight"
                    else params.get("table", params.get("head"))
                )
                collectives.receive(shape, source, group)
    for param in params.values():
        param.grad = torch.zeros_like(param)
    return 2.2 if rank == last else None


# %% wrong="within" fails="own work" around="import" why="the package's lists and its memory"
def held(lists):
    from minitrain.pipeline.schedule import Schedule, peak

    return [peak(Schedule("", lists, 9, 9), rank) for rank in range(len(lists))]


def within(m, most):
    from minitrain.pipeline.schedules.one_direction import one_f_one_b

    return [[tuple(action) for action in own] for own in one_f_one_b(len(most), m).ranks]


# %% wrong="within" fails="the most at any time" around="empty" why="no lists, and no ranks"
def held(lists):
    return []


def within(m, most):
    return []


# %% wrong="within" fails="the most at any time" around="constants" why="the numbers and lists of the text"
def held(lists):
    return [2, 2] if lists[0][1] == F(0, 1) and lists[1][1] == F(1, 1) else [2, 1]


def within(m, most):
    turns = [[F(1, 0), B(1, 0), F(1, 1), B(1, 1), F(1, 2), B(1, 2)]]
    return [[F(0, 0), F(0, 1), B(0, 0), F(0, 2), B(0, 1), B(0, 2)]] + turns


# %% wrong="interleaved" fails="own work" around="import" why="the package's lists, in groups of p"
def order(m, v, g):
    from minitrain.pipeline.schedules.one_direction import depth_first

    return depth_first("", g, m, v)


def interleaved(p, m, v, g):
    from minitrain.pipeline.schedules.one_direction import interleaved

    return [[tuple(action) for action in own] for own in interleaved(p, m, v).ranks]


# %% wrong="interleaved" fails="every forward once" around="empty" why="nothing at all"
def order(m, v, g):
    return []


def interleaved(p, m, v, g):
    return [[] for _ in range(p)]


# %% wrong="interleaved" fails="every forward once" around="constants" why="the order of the text, whatever is asked"
def order(m, v, g):
    return [
        (0, 0),
        (0, 1),
        (0, 2),
        (1, 0),
        (1, 1),
        (1, 2),
        (0, 3),
        (0, 4),
        (0, 5),
        (1, 3),
        (1, 4),
        (1, 5),
    ]


def interleaved(p, m, v, g):
    return [[kind(c * p + r, i) for kind in (F, B) for c, i in order(m, v, g)] for r in range(p)]


# %% wrong="interleaved" fails="the chunk of a forward" around="paste" why="the formula of the package for groups of p, pasted with p = 2"
def order(m, v, g):
    p = 2
    return [(k // p % v, k // (p * v) * p + k % p) for k in range(m * v)]


def interleaved(p, m, v, g):
    lists = []
    for r in range(p):
        forwards = [F(c * p + r, i) for c, i in order(m, v, p)]
        backwards = [B((v - 1 - c) * p + r, i) for c, i in order(m, v, p)]
        ahead = min(2 * (p - r - 1) + (v - 1) * p, m * v)
        turns = [action for pair in zip(forwards[ahead:], backwards) for action in pair]
        lists.append(forwards[:ahead] + turns + backwards[len(forwards) - ahead :])
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


# %% wrong="simulate" fails="the bubble share" why="idle time per work"
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


# %% wrong="simulate" fails="the bubble share" why="idle time of each rank up to its own last end"
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


# %% wrong="simulate" fails="the bubble share" why="the formula (p-1)/(m+p-1), whatever the lists"
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


# %% wrong="simulate" fails="the bubble share" why="the rank that waits most"
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


# %% wrong="simulate" fails="a backward waits for its own forward" why="a backward waits for the stage behind only, not for its own forward"
def simulate(lists, costs):
    """starts (a list of lists), makespan, bubble share"""
    place = {action: rank for rank, own in enumerate(lists) for action in own}
    ends, free, starts = {}, [0] * len(lists), [[] for _ in lists]
    moved = True
    while moved:
        moved = False
        for rank, own in enumerate(lists):
            while len(starts[rank]) < len(own):
                kind, stage, i = action = own[len(starts[rank])]
                needs = [F(stage - 1, i)] if kind == "F" else [B(stage + 1, i)]
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
        raise ValueError(
            f"ranks {stuck} wait for each other; {told(lists[stuck[0]][len(starts[stuck[0]])])} never starts"
        )
    makespan = max(free)
    work = sum(costs[kind] for own in lists for kind, _, _ in own)
    return starts, makespan, 1 - Fraction(work, len(lists) * makespan)
