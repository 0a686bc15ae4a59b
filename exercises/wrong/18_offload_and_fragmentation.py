# %% wrong="offloaded" fails="masters" why="the gradient in two bytes"
class Device:
    def __init__(self, weights, delayed, group):
        self.weights, self.delayed, self.group = list(weights), delayed, group
        self.sending, self.coming, self.last = [], [], []

    def ready(self, layer, grad):
        self.sending.append(collectives.send(grad.bfloat16().float(), 1, self.group, async_op=True))
        weight = collectives.receive(self.weights[layer], 1, self.group, async_op=True)
        self.coming.append((layer, weight))

    def finish(self):
        arriving, self.last = (self.last, self.coming) if self.delayed else (self.coming, [])
        self.coming = []
        return self.take(arriving)

    def take(self, arriving):
        for layer, weight in arriving:
            self.weights[layer] = weight.wait()
        return list(self.weights)

    def settle(self):
        newest, self.last = self.take(self.last), []
        for handle in self.sending:
            handle.wait()
        return newest


def host(masters, steps, group):
    states, sending = [new_state(master) for master in masters], []
    for _ in range(steps):
        for layer in reversed(range(len(masters))):
            grad = collectives.receive(masters[layer].float(), 0, group)
            adam(masters[layer], grad, states[layer])
            sending.append(collectives.send(masters[layer].float(), 0, group, async_op=True))
    for handle in sending:
        handle.wait()
    return masters


# %% wrong="offloaded" fails="masters" why="masters in float32"
class Device:
    def __init__(self, weights, delayed, group):
        self.weights, self.delayed, self.group = list(weights), delayed, group
        self.sending, self.coming, self.last = [], [], []

    def ready(self, layer, grad):
        self.sending.append(collectives.send(grad, 1, self.group, async_op=True))
        weight = collectives.receive(self.weights[layer], 1, self.group, async_op=True)
        self.coming.append((layer, weight))

    def finish(self):
        arriving, self.last = (self.last, self.coming) if self.delayed else (self.coming, [])
        self.coming = []
        return self.take(arriving)

    def take(self, arriving):
        for layer, weight in arriving:
            self.weights[layer] = weight.wait()
        return list(self.weights)

    def settle(self):
        newest, self.last = self.take(self.last), []
        for handle in self.sending:
            handle.wait()
        return newest


def host(masters, steps, group):
    masters = [master.float() for master in masters]
    states, sending = [new_state(master) for master in masters], []
    for _ in range(steps):
        for layer in reversed(range(len(masters))):
            grad = collectives.receive(masters[layer].float(), 0, group)
            adam(masters[layer], grad, states[layer])
            sending.append(collectives.send(masters[layer].float(), 0, group, async_op=True))
    for handle in sending:
        handle.wait()
    return [master.double() for master in masters]


# %% wrong="offloaded" fails="masters" why="the moments of the last step only"
class Device:
    def __init__(self, weights, delayed, group):
        self.weights, self.delayed, self.group = list(weights), delayed, group
        self.sending, self.coming, self.last = [], [], []

    def ready(self, layer, grad):
        self.sending.append(collectives.send(grad, 1, self.group, async_op=True))
        weight = collectives.receive(self.weights[layer], 1, self.group, async_op=True)
        self.coming.append((layer, weight))

    def finish(self):
        arriving, self.last = (self.last, self.coming) if self.delayed else (self.coming, [])
        self.coming = []
        return self.take(arriving)

    def take(self, arriving):
        for layer, weight in arriving:
            self.weights[layer] = weight.wait()
        return list(self.weights)

    def settle(self):
        newest, self.last = self.take(self.last), []
        for handle in self.sending:
            handle.wait()
        return newest


def host(masters, steps, group):
    states, sending = [new_state(master) for master in masters], []
    for _ in range(steps):
        states = [new_state(master) for master in masters]
        for layer in reversed(range(len(masters))):
            grad = collectives.receive(masters[layer].float(), 0, group)
            adam(masters[layer], grad, states[layer])
            sending.append(collectives.send(masters[layer].float(), 0, group, async_op=True))
    for handle in sending:
        handle.wait()
    return masters


# %% wrong="offloaded" fails="gradients leave at once" why="all gradients leave when backward has ended"
class Device:
    def __init__(self, weights, delayed, group):
        self.weights, self.delayed, self.group = list(weights), delayed, group
        self.sending, self.coming, self.last = [], [], []

    def ready(self, layer, grad):
        self.found = [*getattr(self, "found", []), grad]
        weight = collectives.receive(self.weights[layer], 1, self.group, async_op=True)
        self.coming.append((layer, weight))

    def finish(self):
        self.sending += [
            collectives.send(grad, 1, self.group, async_op=True) for grad in self.found
        ]
        self.found = []
        arriving, self.last = (self.last, self.coming) if self.delayed else (self.coming, [])
        self.coming = []
        return self.take(arriving)

    def take(self, arriving):
        for layer, weight in arriving:
            self.weights[layer] = weight.wait()
        return list(self.weights)

    def settle(self):
        newest, self.last = self.take(self.last), []
        for handle in self.sending:
            handle.wait()
        return newest


def host(masters, steps, group):
    states, sending = [new_state(master) for master in masters], []
    for _ in range(steps):
        for layer in reversed(range(len(masters))):
            grad = collectives.receive(masters[layer].float(), 0, group)
            adam(masters[layer], grad, states[layer])
            sending.append(collectives.send(masters[layer].float(), 0, group, async_op=True))
    for handle in sending:
        handle.wait()
    return masters


# %% wrong="offloaded" fails="gradients leave at once" why="two layers at a time"
class Device:
    def __init__(self, weights, delayed, group):
        self.weights, self.delayed, self.group = list(weights), delayed, group
        self.sending, self.coming, self.last = [], [], []

    def ready(self, layer, grad):
        self.found = [*getattr(self, "found", []), grad]
        if layer % 2 == 0:
            self.sending += [collectives.send(x, 1, self.group, async_op=True) for x in self.found]
            self.found = []
        weight = collectives.receive(self.weights[layer], 1, self.group, async_op=True)
        self.coming.append((layer, weight))

    def finish(self):
        arriving, self.last = (self.last, self.coming) if self.delayed else (self.coming, [])
        self.coming = []
        return self.take(arriving)

    def take(self, arriving):
        for layer, weight in arriving:
            self.weights[layer] = weight.wait()
        return list(self.weights)

    def settle(self):
        newest, self.last = self.take(self.last), []
        for handle in self.sending:
            handle.wait()
        return newest


def host(masters, steps, group):
    states, sending = [new_state(master) for master in masters], []
    for _ in range(steps):
        for layer in reversed(range(len(masters))):
            grad = collectives.receive(masters[layer].float(), 0, group)
            adam(masters[layer], grad, states[layer])
            sending.append(collectives.send(masters[layer].float(), 0, group, async_op=True))
    for handle in sending:
        handle.wait()
    return masters


# %% wrong="offloaded" fails="the host updates meanwhile" why="the host updates when it has all gradients of the step"
class Device:
    def __init__(self, weights, delayed, group):
        self.weights, self.delayed, self.group = list(weights), delayed, group
        self.sending, self.coming, self.last = [], [], []

    def ready(self, layer, grad):
        self.sending.append(collectives.send(grad, 1, self.group, async_op=True))
        weight = collectives.receive(self.weights[layer], 1, self.group, async_op=True)
        self.coming.append((layer, weight))

    def finish(self):
        arriving, self.last = (self.last, self.coming) if self.delayed else (self.coming, [])
        self.coming = []
        return self.take(arriving)

    def take(self, arriving):
        for layer, weight in arriving:
            self.weights[layer] = weight.wait()
        return list(self.weights)

    def settle(self):
        newest, self.last = self.take(self.last), []
        for handle in self.sending:
            handle.wait()
        return newest


def host(masters, steps, group):
    states, sending = [new_state(master) for master in masters], []
    for _ in range(steps):
        grads = {}
        for layer in reversed(range(len(masters))):
            grads[layer] = collectives.receive(masters[layer].float(), 0, group)
        for layer in reversed(range(len(masters))):
            adam(masters[layer], grads[layer], states[layer])
            sending.append(collectives.send(masters[layer].float(), 0, group, async_op=True))
    for handle in sending:
        handle.wait()
    return masters


# %% wrong="offloaded" fails="the host updates meanwhile" why="the weights come back at the end of the step"
class Device:
    def __init__(self, weights, delayed, group):
        self.weights, self.delayed, self.group = list(weights), delayed, group
        self.sending, self.coming, self.last = [], [], []

    def ready(self, layer, grad):
        self.sending.append(collectives.send(grad, 1, self.group, async_op=True))
        weight = collectives.receive(self.weights[layer], 1, self.group, async_op=True)
        self.coming.append((layer, weight))

    def finish(self):
        arriving, self.last = (self.last, self.coming) if self.delayed else (self.coming, [])
        self.coming = []
        return self.take(arriving)

    def take(self, arriving):
        for layer, weight in arriving:
            self.weights[layer] = weight.wait()
        return list(self.weights)

    def settle(self):
        newest, self.last = self.take(self.last), []
        for handle in self.sending:
            handle.wait()
        return newest


def host(masters, steps, group):
    states, sending = [new_state(master) for master in masters], []
    for _ in range(steps):
        for layer in reversed(range(len(masters))):
            grad = collectives.receive(masters[layer].float(), 0, group)
            adam(masters[layer], grad, states[layer])
        for layer in reversed(range(len(masters))):
            sending.append(collectives.send(masters[layer].float(), 0, group, async_op=True))
    for handle in sending:
        handle.wait()
    return masters


# %% wrong="offloaded" fails="backward waits for nobody" why="ready waits for the new weight"
class Device:
    def __init__(self, weights, delayed, group):
        self.weights, self.delayed, self.group = list(weights), delayed, group
        self.sending, self.coming, self.last = [], [], []

    def ready(self, layer, grad):
        self.sending.append(collectives.send(grad, 1, self.group, async_op=True))
        weight = collectives.receive(self.weights[layer], 1, self.group, async_op=True)
        new = weight.wait()
        weight = type("Here", (), {"wait": lambda self: new})()
        self.coming.append((layer, weight))

    def finish(self):
        arriving, self.last = (self.last, self.coming) if self.delayed else (self.coming, [])
        self.coming = []
        return self.take(arriving)

    def take(self, arriving):
        for layer, weight in arriving:
            self.weights[layer] = weight.wait()
        return list(self.weights)

    def settle(self):
        newest, self.last = self.take(self.last), []
        for handle in self.sending:
            handle.wait()
        return newest


def host(masters, steps, group):
    states, sending = [new_state(master) for master in masters], []
    for _ in range(steps):
        for layer in reversed(range(len(masters))):
            grad = collectives.receive(masters[layer].float(), 0, group)
            adam(masters[layer], grad, states[layer])
            sending.append(collectives.send(masters[layer].float(), 0, group, async_op=True))
    for handle in sending:
        handle.wait()
    return masters


# %% wrong="offloaded" fails="weights" why="a delay that nobody asked for, and none where it is"
class Device:
    def __init__(self, weights, delayed, group):
        self.weights, self.delayed, self.group = list(weights), delayed, group
        self.sending, self.coming, self.last = [], [], []

    def ready(self, layer, grad):
        self.sending.append(collectives.send(grad, 1, self.group, async_op=True))
        weight = collectives.receive(self.weights[layer], 1, self.group, async_op=True)
        self.coming.append((layer, weight))

    def finish(self):
        arriving, self.last = (self.last, self.coming) if not self.delayed else (self.coming, [])
        self.coming = []
        return self.take(arriving)

    def take(self, arriving):
        for layer, weight in arriving:
            self.weights[layer] = weight.wait()
        return list(self.weights)

    def settle(self):
        newest, self.last = self.take(self.last), []
        for handle in self.sending:
            handle.wait()
        return newest


def host(masters, steps, group):
    states, sending = [new_state(master) for master in masters], []
    for _ in range(steps):
        for layer in reversed(range(len(masters))):
            grad = collectives.receive(masters[layer].float(), 0, group)
            adam(masters[layer], grad, states[layer])
            sending.append(collectives.send(masters[layer].float(), 0, group, async_op=True))
    for handle in sending:
        handle.wait()
    return masters


# %% wrong="offloaded" fails="weights" why="delayed: what it began with, for ever"
class Device:
    def __init__(self, weights, delayed, group):
        self.weights, self.delayed, self.group = list(weights), delayed, group
        self.sending, self.coming, self.last = [], [], []

    def ready(self, layer, grad):
        self.sending.append(collectives.send(grad, 1, self.group, async_op=True))
        weight = collectives.receive(self.weights[layer], 1, self.group, async_op=True)
        self.coming.append((layer, weight))

    def finish(self):
        arriving, self.last = (self.last, self.coming) if self.delayed else (self.coming, [])
        self.coming = []
        return list(self.weights) if self.delayed else self.take(arriving)

    def take(self, arriving):
        for layer, weight in arriving:
            self.weights[layer] = weight.wait()
        return list(self.weights)

    def settle(self):
        newest, self.last = self.take(self.last), []
        for handle in self.sending:
            handle.wait()
        return newest


def host(masters, steps, group):
    states, sending = [new_state(master) for master in masters], []
    for _ in range(steps):
        for layer in reversed(range(len(masters))):
            grad = collectives.receive(masters[layer].float(), 0, group)
            adam(masters[layer], grad, states[layer])
            sending.append(collectives.send(masters[layer].float(), 0, group, async_op=True))
    for handle in sending:
        handle.wait()
    return masters


# %% wrong="offloaded" fails="backward waits for nobody" why="delayed: the update is awaited, and returned one step later"
class Device:
    def __init__(self, weights, delayed, group):
        self.weights, self.delayed, self.group = list(weights), delayed, group
        self.sending, self.coming, self.last = [], [], []

    def ready(self, layer, grad):
        self.sending.append(collectives.send(grad, 1, self.group, async_op=True))
        weight = collectives.receive(self.weights[layer], 1, self.group, async_op=True)
        self.coming.append((layer, weight))

    def finish(self):
        before = list(self.weights)
        new = self.take(self.coming)
        self.coming = []
        return before if self.delayed else new

    def take(self, arriving):
        for layer, weight in arriving:
            self.weights[layer] = weight.wait()
        return list(self.weights)

    def settle(self):
        newest, self.last = self.take(self.last), []
        for handle in self.sending:
            handle.wait()
        return newest


def host(masters, steps, group):
    states, sending = [new_state(master) for master in masters], []
    for _ in range(steps):
        for layer in reversed(range(len(masters))):
            grad = collectives.receive(masters[layer].float(), 0, group)
            adam(masters[layer], grad, states[layer])
            sending.append(collectives.send(masters[layer].float(), 0, group, async_op=True))
    for handle in sending:
        handle.wait()
    return masters


# %% wrong="offloaded" fails="bytes on the link" why="the masters come back as they are"
class Device:
    def __init__(self, weights, delayed, group):
        self.weights, self.delayed, self.group = list(weights), delayed, group
        self.sending, self.coming, self.last = [], [], []

    def ready(self, layer, grad):
        self.sending.append(collectives.send(grad, 1, self.group, async_op=True))
        weight = collectives.receive(self.weights[layer].double(), 1, self.group, async_op=True)
        self.coming.append((layer, weight))

    def finish(self):
        arriving, self.last = (self.last, self.coming) if self.delayed else (self.coming, [])
        self.coming = []
        return self.take(arriving)

    def take(self, arriving):
        for layer, weight in arriving:
            self.weights[layer] = weight.wait().float()
        return list(self.weights)

    def settle(self):
        newest, self.last = self.take(self.last), []
        for handle in self.sending:
            handle.wait()
        return newest


def host(masters, steps, group):
    states, sending = [new_state(master) for master in masters], []
    for _ in range(steps):
        for layer in reversed(range(len(masters))):
            grad = collectives.receive(masters[layer].float(), 0, group)
            adam(masters[layer], grad, states[layer])
            sending.append(collectives.send(masters[layer].clone(), 0, group, async_op=True))
    for handle in sending:
        handle.wait()
    return masters


# %% wrong="offloaded" fails="layer by layer" why="a message for each number"
class Device:
    def __init__(self, weights, delayed, group):
        self.weights, self.delayed, self.group = list(weights), delayed, group
        self.sending, self.coming, self.last = [], [], []

    def ready(self, layer, grad):
        self.sending += [
            collectives.send(x.clone(), 1, self.group, async_op=True) for x in grad.split(1)
        ]
        weight = collectives.receive(self.weights[layer], 1, self.group, async_op=True)
        self.coming.append((layer, weight))

    def finish(self):
        arriving, self.last = (self.last, self.coming) if self.delayed else (self.coming, [])
        self.coming = []
        return self.take(arriving)

    def take(self, arriving):
        for layer, weight in arriving:
            self.weights[layer] = weight.wait()
        return list(self.weights)

    def settle(self):
        newest, self.last = self.take(self.last), []
        for handle in self.sending:
            handle.wait()
        return newest


def host(masters, steps, group):
    states, sending = [new_state(master) for master in masters], []
    for _ in range(steps):
        for layer in reversed(range(len(masters))):
            grad = torch.cat(
                [collectives.receive(x.clone(), 0, group) for x in masters[layer].float().split(1)]
            )
            adam(masters[layer], grad, states[layer])
            sending.append(collectives.send(masters[layer].float(), 0, group, async_op=True))
    for handle in sending:
        handle.wait()
    return masters


# %% wrong="offloaded" fails="weights" why="the last update is never fetched"
class Device:
    def __init__(self, weights, delayed, group):
        self.weights, self.delayed, self.group = list(weights), delayed, group
        self.sending, self.coming, self.last = [], [], []

    def ready(self, layer, grad):
        self.sending.append(collectives.send(grad, 1, self.group, async_op=True))
        weight = collectives.receive(self.weights[layer], 1, self.group, async_op=True)
        self.coming.append((layer, weight))

    def finish(self):
        arriving, self.last = ([], []) if self.delayed else (self.coming, [])
        self.coming = []
        return self.take(arriving)

    def take(self, arriving):
        for layer, weight in arriving:
            self.weights[layer] = weight.wait()
        return list(self.weights)

    def settle(self):
        return list(self.weights)


def host(masters, steps, group):
    states, sending = [new_state(master) for master in masters], []
    for _ in range(steps):
        for layer in reversed(range(len(masters))):
            grad = collectives.receive(masters[layer].float(), 0, group)
            adam(masters[layer], grad, states[layer])
            sending.append(collectives.send(masters[layer].float(), 0, group, async_op=True))
    for handle in sending:
        handle.wait()
    return masters


# %% wrong="offloaded" fails="bytes on the link" around="weights" why="the device updates too, and the host is asked for nothing"
class Device:
    def __init__(self, weights, delayed, group):
        self.weights, self.delayed, self.group = list(weights), delayed, group
        self.sending, self.coming, self.last = [], [], []

    def ready(self, layer, grad):
        self.sending.append(collectives.send(grad, 1, self.group, async_op=True))
        if not hasattr(self, "masters"):
            self.masters = [w.double() for w in self.weights]
            self.states = [new_state(w) for w in self.masters]
        adam(self.masters[layer], grad, self.states[layer])
        new = self.masters[layer].float()
        self.coming.append((layer, type("Here", (), {"wait": lambda self: new})()))

    def finish(self):
        arriving, self.last = (self.last, self.coming) if self.delayed else (self.coming, [])
        self.coming = []
        return self.take(arriving)

    def take(self, arriving):
        for layer, weight in arriving:
            self.weights[layer] = weight.wait()
        return list(self.weights)

    def settle(self):
        newest, self.last = self.take(self.last), []
        for handle in self.sending:
            handle.wait()
        return newest


def host(masters, steps, group):
    states, sending = [new_state(master) for master in masters], []
    for _ in range(steps):
        for layer in reversed(range(len(masters))):
            grad = collectives.receive(masters[layer].float(), 0, group)
            adam(masters[layer], grad, states[layer])
    for handle in sending:
        handle.wait()
    return masters


# %% wrong="leaving" fails="the fewest fetches" why="what was not used for longest leaves"
def leaving(order, room):
    later = {}
    behind = [0] * len(order)  # the next use of the same chunk
    for position in reversed(range(len(order))):
        behind[position] = later.get(order[position], len(order))
        later[order[position]] = position
    here, gone = {}, []
    for position, chunk in enumerate(order):
        victim = None
        if chunk not in here and len(here) == room:
            victim = max(here, key=here.get)
            del here[victim]
        here[chunk] = -position
        gone.append(victim)
    return gone


# %% wrong="leaving" fails="the fewest fetches" why="what came first leaves"
def leaving(order, room):
    later = {}
    behind = [0] * len(order)  # the next use of the same chunk
    for position in reversed(range(len(order))):
        behind[position] = later.get(order[position], len(order))
        later[order[position]] = position
    here, gone = {}, []
    for position, chunk in enumerate(order):
        victim = None
        if chunk not in here and len(here) == room:
            victim = max(here, key=here.get)
            del here[victim]
        here.setdefault(chunk, -position)
        gone.append(victim)
    return gone


# %% wrong="leaving" fails="the fewest fetches" why="what is used least often leaves"
def leaving(order, room):
    later = {}
    behind = [0] * len(order)  # the next use of the same chunk
    for position in reversed(range(len(order))):
        behind[position] = later.get(order[position], len(order))
        later[order[position]] = position
    here, gone = {}, []
    for position, chunk in enumerate(order):
        victim = None
        if chunk not in here and len(here) == room:
            victim = min(here, key=order.count)
            del here[victim]
        here[chunk] = behind[position]
        gone.append(victim)
    return gone


# %% wrong="leaving" fails="the fewest fetches" why="the next use is looked up when a chunk comes, and not again when it is used"
def leaving(order, room):
    later = {}
    behind = [0] * len(order)  # the next use of the same chunk
    for position in reversed(range(len(order))):
        behind[position] = later.get(order[position], len(order))
        later[order[position]] = position
    here, gone = {}, []
    for position, chunk in enumerate(order):
        victim = None
        if chunk not in here and len(here) == room:
            victim = max(here, key=here.get)
            del here[victim]
        here.setdefault(chunk, behind[position])
        gone.append(victim)
    return gone


# %% wrong="leaving" fails="the fewest fetches" why="a chunk that is not used again is kept"
def leaving(order, room):
    later = {}
    behind = [0] * len(order)  # the next use of the same chunk
    for position in reversed(range(len(order))):
        behind[position] = later.get(order[position], -1)
        later[order[position]] = position
    here, gone = {}, []
    for position, chunk in enumerate(order):
        victim = None
        if chunk not in here and len(here) == room:
            victim = max(here, key=here.get)
            del here[victim]
        here[chunk] = behind[position]
        gone.append(victim)
    return gone


# %% wrong="leaving" fails="what leaves was there" why="the chunk that is about to be used may leave"
def leaving(order, room):
    later = {}
    behind = [0] * len(order)  # the next use of the same chunk
    for position in reversed(range(len(order))):
        behind[position] = later.get(order[position], len(order))
        later[order[position]] = position
    here, gone = {}, []
    for position, chunk in enumerate(order):
        victim = None
        if chunk not in here and len(here) == room:
            victim = max(here, key=here.get)
            del here[victim]
        here[chunk] = behind[position]
        gone.append(victim and chunk)
    return gone


# %% wrong="leaving" fails="nothing leaves without need" why="room is kept free for the next one"
def leaving(order, room):
    later = {}
    behind = [0] * len(order)  # the next use of the same chunk
    for position in reversed(range(len(order))):
        behind[position] = later.get(order[position], len(order))
        later[order[position]] = position
    here, gone = {}, []
    for position, chunk in enumerate(order):
        victim = None
        if chunk not in here and len(here) >= max(1, room - 1):
            victim = max(here, key=here.get)
            del here[victim]
        here[chunk] = behind[position]
        gone.append(victim)
    return gone


# %% wrong="leaving" fails="nothing leaves without need" why="a chunk leaves at its last use"
def leaving(order, room):
    later = {}
    behind = [0] * len(order)  # the next use of the same chunk
    for position in reversed(range(len(order))):
        behind[position] = later.get(order[position], len(order))
        later[order[position]] = position
    here, gone = {}, []
    for position, chunk in enumerate(order):
        victim = None
        if chunk not in here and len(here) == room:
            victim = max(here, key=here.get)
            del here[victim]
        here[chunk] = behind[position]
        gone.append(victim)
        if (
            victim is None
            and position
            and behind[position - 1] == len(order)
            and order[position - 1] in here
        ):
            gone[-1] = order[position - 1]
            del here[order[position - 1]]
    return gone


# %% wrong="leaving" fails="time limit" around="brute force" why="all ways are tried"
def leaving(order, room):
    def best(position, here):
        if position == len(order):
            return 0, []
        chunk = order[position]
        if chunk in here or len(here) < room:
            count, rest = best(position + 1, here | {chunk})
            return count + (chunk not in here), [None, *rest]
        tried = [(best(position + 1, here - {victim} | {chunk}), victim) for victim in sorted(here)]
        (count, rest), victim = min(tried, key=lambda one: one[0][0])
        return count + 1, [victim, *rest]

    return best(0, frozenset())[1]


# %% wrong="window" fails="the stall" why="places are free as soon as a layer starts"
def stall(compute, fetch, m):
    done, came = [], 0
    for layer, runs in enumerate(compute):
        here = 0
        if layer >= m:
            came = here = max(came, done[layer - m] - compute[layer - m]) + fetch[layer]
        done.append(max(here, done[-1] if done else 0) + runs)
    return done[-1] - sum(compute)


def window(compute, fetch):

    def wait(m):
        done, came = [], 0
        for layer, runs in enumerate(compute):
            here = 0
            if layer >= m:
                came = here = max(came, done[layer - m] - compute[layer - m]) + fetch[layer]
            done.append(max(here, done[-1] if done else 0) + runs)
        return done[-1] - sum(compute)

    low, high = 1, len(compute)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if wait(middle) == 0 else (middle + 1, high)
    return low


# %% wrong="window" fails="the stall" why="the link carries any number at a time"
def stall(compute, fetch, m):
    done, came = [], 0
    for layer, runs in enumerate(compute):
        here = 0
        if layer >= m:
            came = here = max(0, done[layer - m]) + fetch[layer]
        done.append(max(here, done[-1] if done else 0) + runs)
    return done[-1] - sum(compute)


def window(compute, fetch):

    def wait(m):
        done, came = [], 0
        for layer, runs in enumerate(compute):
            here = 0
            if layer >= m:
                came = here = max(0, done[layer - m]) + fetch[layer]
            done.append(max(here, done[-1] if done else 0) + runs)
        return done[-1] - sum(compute)

    low, high = 1, len(compute)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if wait(middle) == 0 else (middle + 1, high)
    return low


# %% wrong="window" fails="the stall" why="the first m come over the link too"
def stall(compute, fetch, m):
    done, came = [], 0
    for layer, runs in enumerate(compute):
        came = here = max(came, done[layer - m] if layer >= m else 0) + fetch[layer]
        done.append(max(here, done[-1] if done else 0) + runs)
    return done[-1] - sum(compute)


def window(compute, fetch):

    def wait(m):
        done, came = [], 0
        for layer, runs in enumerate(compute):
            here = 0
            if layer >= m:
                came = here = max(came, done[layer - m]) + fetch[layer]
            done.append(max(here, done[-1] if done else 0) + runs)
        return done[-1] - sum(compute)

    low, high = 1, len(compute)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if wait(middle) == 0 else (middle + 1, high)
    return low


# %% wrong="window" fails="the stall" why="what the sums say: all of the link's time against all of the device's"
def stall(compute, fetch, m):
    done, came = [], 0
    for layer, runs in enumerate(compute):
        here = 0
        if layer >= m:
            came = here = max(came, done[layer - m]) + fetch[layer]
        done.append(max(here, done[-1] if done else 0) + runs)
    return max(0, sum(fetch[m:]) - sum(compute[:-1]))


def window(compute, fetch):

    def wait(m):
        done, came = [], 0
        for layer, runs in enumerate(compute):
            here = 0
            if layer >= m:
                came = here = max(came, done[layer - m]) + fetch[layer]
            done.append(max(here, done[-1] if done else 0) + runs)
        return done[-1] - sum(compute)

    low, high = 1, len(compute)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if wait(middle) == 0 else (middle + 1, high)
    return low


# %% wrong="window" fails="the window" why="the paper's rule for one layer: m layers run as long as the next takes to come"
def stall(compute, fetch, m):
    done, came = [], 0
    for layer, runs in enumerate(compute):
        here = 0
        if layer >= m:
            came = here = max(came, done[layer - m]) + fetch[layer]
        done.append(max(here, done[-1] if done else 0) + runs)
    return done[-1] - sum(compute)


def window(compute, fetch):

    def wait(m):
        done, came = [], 0
        for layer, runs in enumerate(compute):
            here = 0
            if layer >= m:
                came = here = max(came, done[layer - m]) + fetch[layer]
            done.append(max(here, done[-1] if done else 0) + runs)
        return done[-1] - sum(compute)

    for m in range(1, len(compute)):
        if all(sum(compute[i - m : i]) >= fetch[i] for i in range(m, len(compute))):
            return m
    return len(compute)


# %% wrong="window" fails="the window" why="one layer too many"
def stall(compute, fetch, m):
    done, came = [], 0
    for layer, runs in enumerate(compute):
        here = 0
        if layer >= m:
            came = here = max(came, done[layer - m]) + fetch[layer]
        done.append(max(here, done[-1] if done else 0) + runs)
    return done[-1] - sum(compute)


def window(compute, fetch):

    def wait(m):
        done, came = [], 0
        for layer, runs in enumerate(compute):
            here = 0
            if layer >= m:
                came = here = max(came, done[layer - m]) + fetch[layer]
            done.append(max(here, done[-1] if done else 0) + runs)
        return done[-1] - sum(compute)

    low, high = 1, len(compute)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if wait(middle) == 0 else (middle + 1, high)
    return min(low + 1, len(compute))


# %% wrong="window" fails="the window" around="constants" why="all of them"
def stall(compute, fetch, m):
    done, came = [], 0
    for layer, runs in enumerate(compute):
        here = 0
        if layer >= m:
            came = here = max(came, done[layer - m]) + fetch[layer]
        done.append(max(here, done[-1] if done else 0) + runs)
    return done[-1] - sum(compute)


def window(compute, fetch):

    def wait(m):
        done, came = [], 0
        for layer, runs in enumerate(compute):
            here = 0
            if layer >= m:
                came = here = max(came, done[layer - m]) + fetch[layer]
            done.append(max(here, done[-1] if done else 0) + runs)
        return done[-1] - sum(compute)

    low, high = 1, len(compute)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if wait(middle) == 0 else (middle + 1, high)
    return len(compute)


# %% wrong="replay" fails="places" why="first fit"
def replay(trace, capacity, expandable):
    """-> {"places": [[segment, offset], ...], "reserved": [...], "died": index or None}."""
    segments, free, used = (
        {},
        {},
        {},
    )  # number -> size; number -> {offset: size}; name -> (segment, offset, size)
    places, reserved, following = [], [], 0
    if expandable:
        segments[0], free[0] = 0, {}

    def give(number, offset, size):
        blocks = free[number]
        if offset + size in blocks:
            size += blocks.pop(offset + size)
        before = next((start for start, length in blocks.items() if start + length == offset), None)
        if before is not None:
            offset, size = before, size + blocks.pop(before)
        blocks[offset] = size

    for index, (kind, name, *sizes) in enumerate(trace):
        if kind == "free":
            give(*used.pop(name))
        else:
            size = -(-sizes[0] // 4) * 4
            fits = [
                (length, n, at)
                for n, blocks in free.items()
                for at, length in blocks.items()
                if length >= size
            ]
            if not fits and expandable:
                end = segments[0]
                tail = next((length for at, length in free[0].items() if at + length == end), 0)
                more = -(-(size - tail) // 64) * 64
                if end + more > capacity:
                    return {"places": places, "reserved": reserved, "died": index}
                segments[0] += more
                give(0, end, more)
                fits = [(size, 0, end - tail)]
            elif not fits:
                more = -(-size // 64) * 64
                if sum(segments.values()) + more > capacity:
                    for n in [n for n in segments if free[n] == {0: segments[n]}]:
                        del segments[n], free[n]
                if sum(segments.values()) + more > capacity:
                    return {"places": places, "reserved": reserved, "died": index}
                segments[following], free[following] = more, {0: more}
                fits, following = [(more, following, 0)], following + 1
            _, number, offset = min(fits, key=lambda one: one[1:])
            length = free[number].pop(offset)
            if length > size:
                free[number][offset + size] = length - size
            used[name] = number, offset, size
            places.append([number, offset])
        reserved.append(sum(segments.values()))
    return {"places": places, "reserved": reserved, "died": None}


# %% wrong="replay" fails="places" why="worst fit"
def replay(trace, capacity, expandable):
    """-> {"places": [[segment, offset], ...], "reserved": [...], "died": index or None}."""
    segments, free, used = (
        {},
        {},
        {},
    )  # number -> size; number -> {offset: size}; name -> (segment, offset, size)
    places, reserved, following = [], [], 0
    if expandable:
        segments[0], free[0] = 0, {}

    def give(number, offset, size):
        blocks = free[number]
        if offset + size in blocks:
            size += blocks.pop(offset + size)
        before = next((start for start, length in blocks.items() if start + length == offset), None)
        if before is not None:
            offset, size = before, size + blocks.pop(before)
        blocks[offset] = size

    for index, (kind, name, *sizes) in enumerate(trace):
        if kind == "free":
            give(*used.pop(name))
        else:
            size = -(-sizes[0] // 4) * 4
            fits = [
                (length, n, at)
                for n, blocks in free.items()
                for at, length in blocks.items()
                if length >= size
            ]
            if not fits and expandable:
                end = segments[0]
                tail = next((length for at, length in free[0].items() if at + length == end), 0)
                more = -(-(size - tail) // 64) * 64
                if end + more > capacity:
                    return {"places": places, "reserved": reserved, "died": index}
                segments[0] += more
                give(0, end, more)
                fits = [(size, 0, end - tail)]
            elif not fits:
                more = -(-size // 64) * 64
                if sum(segments.values()) + more > capacity:
                    for n in [n for n in segments if free[n] == {0: segments[n]}]:
                        del segments[n], free[n]
                if sum(segments.values()) + more > capacity:
                    return {"places": places, "reserved": reserved, "died": index}
                segments[following], free[following] = more, {0: more}
                fits, following = [(more, following, 0)], following + 1
            _, number, offset = min(fits, key=lambda one: (-one[0], *one[1:]))
            length = free[number].pop(offset)
            if length > size:
                free[number][offset + size] = length - size
            used[name] = number, offset, size
            places.append([number, offset])
        reserved.append(sum(segments.values()))
    return {"places": places, "reserved": reserved, "died": None}


# %% wrong="replay" fails="places" why="a free neighbour in front is not joined"
def replay(trace, capacity, expandable):
    """-> {"places": [[segment, offset], ...], "reserved": [...], "died": index or None}."""
    segments, free, used = (
        {},
        {},
        {},
    )  # number -> size; number -> {offset: size}; name -> (segment, offset, size)
    places, reserved, following = [], [], 0
    if expandable:
        segments[0], free[0] = 0, {}

    def give(number, offset, size):
        blocks = free[number]
        if offset + size in blocks:
            size += blocks.pop(offset + size)
        before = None and next(
            (start for start, length in blocks.items() if start + length == offset), None
        )
        if before is not None:
            offset, size = before, size + blocks.pop(before)
        blocks[offset] = size

    for index, (kind, name, *sizes) in enumerate(trace):
        if kind == "free":
            give(*used.pop(name))
        else:
            size = -(-sizes[0] // 4) * 4
            fits = [
                (length, n, at)
                for n, blocks in free.items()
                for at, length in blocks.items()
                if length >= size
            ]
            if not fits and expandable:
                end = segments[0]
                tail = next((length for at, length in free[0].items() if at + length == end), 0)
                more = -(-(size - tail) // 64) * 64
                if end + more > capacity:
                    return {"places": places, "reserved": reserved, "died": index}
                segments[0] += more
                give(0, end, more)
                fits = [(size, 0, end - tail)]
            elif not fits:
                more = -(-size // 64) * 64
                if sum(segments.values()) + more > capacity:
                    for n in [n for n in segments if free[n] == {0: segments[n]}]:
                        del segments[n], free[n]
                if sum(segments.values()) + more > capacity:
                    return {"places": places, "reserved": reserved, "died": index}
                segments[following], free[following] = more, {0: more}
                fits, following = [(more, following, 0)], following + 1
            _, number, offset = min(fits)
            length = free[number].pop(offset)
            if length > size:
                free[number][offset + size] = length - size
            used[name] = number, offset, size
            places.append([number, offset])
        reserved.append(sum(segments.values()))
    return {"places": places, "reserved": reserved, "died": None}


# %% wrong="replay" fails="places" why="a free neighbour behind is not joined"
def replay(trace, capacity, expandable):
    """-> {"places": [[segment, offset], ...], "reserved": [...], "died": index or None}."""
    segments, free, used = (
        {},
        {},
        {},
    )  # number -> size; number -> {offset: size}; name -> (segment, offset, size)
    places, reserved, following = [], [], 0
    if expandable:
        segments[0], free[0] = 0, {}

    def give(number, offset, size):
        blocks = free[number]
        if False:
            size += blocks.pop(offset + size)
        before = next((start for start, length in blocks.items() if start + length == offset), None)
        if before is not None:
            offset, size = before, size + blocks.pop(before)
        blocks[offset] = size

    for index, (kind, name, *sizes) in enumerate(trace):
        if kind == "free":
            give(*used.pop(name))
        else:
            size = -(-sizes[0] // 4) * 4
            fits = [
                (length, n, at)
                for n, blocks in free.items()
                for at, length in blocks.items()
                if length >= size
            ]
            if not fits and expandable:
                end = segments[0]
                tail = next((length for at, length in free[0].items() if at + length == end), 0)
                more = -(-(size - tail) // 64) * 64
                if end + more > capacity:
                    return {"places": places, "reserved": reserved, "died": index}
                segments[0] += more
                give(0, end, more)
                fits = [(size, 0, end - tail)]
            elif not fits:
                more = -(-size // 64) * 64
                if sum(segments.values()) + more > capacity:
                    for n in [n for n in segments if free[n] == {0: segments[n]}]:
                        del segments[n], free[n]
                if sum(segments.values()) + more > capacity:
                    return {"places": places, "reserved": reserved, "died": index}
                segments[following], free[following] = more, {0: more}
                fits, following = [(more, following, 0)], following + 1
            _, number, offset = min(fits)
            length = free[number].pop(offset)
            if length > size:
                free[number][offset + size] = length - size
            used[name] = number, offset, size
            places.append([number, offset])
        reserved.append(sum(segments.values()))
    return {"places": places, "reserved": reserved, "died": None}


# %% wrong="replay" fails="places" why="blocks are not cut"
def replay(trace, capacity, expandable):
    """-> {"places": [[segment, offset], ...], "reserved": [...], "died": index or None}."""
    segments, free, used = (
        {},
        {},
        {},
    )  # number -> size; number -> {offset: size}; name -> (segment, offset, size)
    places, reserved, following = [], [], 0
    if expandable:
        segments[0], free[0] = 0, {}

    def give(number, offset, size):
        blocks = free[number]
        if offset + size in blocks:
            size += blocks.pop(offset + size)
        before = next((start for start, length in blocks.items() if start + length == offset), None)
        if before is not None:
            offset, size = before, size + blocks.pop(before)
        blocks[offset] = size

    for index, (kind, name, *sizes) in enumerate(trace):
        if kind == "free":
            give(*used.pop(name))
        else:
            size = -(-sizes[0] // 4) * 4
            fits = [
                (length, n, at)
                for n, blocks in free.items()
                for at, length in blocks.items()
                if length >= size
            ]
            if not fits and expandable:
                end = segments[0]
                tail = next((length for at, length in free[0].items() if at + length == end), 0)
                more = -(-(size - tail) // 64) * 64
                if end + more > capacity:
                    return {"places": places, "reserved": reserved, "died": index}
                segments[0] += more
                give(0, end, more)
                fits = [(size, 0, end - tail)]
            elif not fits:
                more = -(-size // 64) * 64
                if sum(segments.values()) + more > capacity:
                    for n in [n for n in segments if free[n] == {0: segments[n]}]:
                        del segments[n], free[n]
                if sum(segments.values()) + more > capacity:
                    return {"places": places, "reserved": reserved, "died": index}
                segments[following], free[following] = more, {0: more}
                fits, following = [(more, following, 0)], following + 1
            _, number, offset = min(fits)
            length = free[number].pop(offset)
            size = length
            used[name] = number, offset, size
            places.append([number, offset])
        reserved.append(sum(segments.values()))
    return {"places": places, "reserved": reserved, "died": None}


# %% wrong="replay" fails="places" why="no rounding"
def replay(trace, capacity, expandable):
    """-> {"places": [[segment, offset], ...], "reserved": [...], "died": index or None}."""
    segments, free, used = (
        {},
        {},
        {},
    )  # number -> size; number -> {offset: size}; name -> (segment, offset, size)
    places, reserved, following = [], [], 0
    if expandable:
        segments[0], free[0] = 0, {}

    def give(number, offset, size):
        blocks = free[number]
        if offset + size in blocks:
            size += blocks.pop(offset + size)
        before = next((start for start, length in blocks.items() if start + length == offset), None)
        if before is not None:
            offset, size = before, size + blocks.pop(before)
        blocks[offset] = size

    for index, (kind, name, *sizes) in enumerate(trace):
        if kind == "free":
            give(*used.pop(name))
        else:
            size = sizes[0]
            fits = [
                (length, n, at)
                for n, blocks in free.items()
                for at, length in blocks.items()
                if length >= size
            ]
            if not fits and expandable:
                end = segments[0]
                tail = next((length for at, length in free[0].items() if at + length == end), 0)
                more = -(-(size - tail) // 64) * 64
                if end + more > capacity:
                    return {"places": places, "reserved": reserved, "died": index}
                segments[0] += more
                give(0, end, more)
                fits = [(size, 0, end - tail)]
            elif not fits:
                more = -(-size // 64) * 64
                if sum(segments.values()) + more > capacity:
                    for n in [n for n in segments if free[n] == {0: segments[n]}]:
                        del segments[n], free[n]
                if sum(segments.values()) + more > capacity:
                    return {"places": places, "reserved": reserved, "died": index}
                segments[following], free[following] = more, {0: more}
                fits, following = [(more, following, 0)], following + 1
            _, number, offset = min(fits)
            length = free[number].pop(offset)
            if length > size:
                free[number][offset + size] = length - size
            used[name] = number, offset, size
            places.append([number, offset])
        reserved.append(sum(segments.values()))
    return {"places": places, "reserved": reserved, "died": None}


# %% wrong="replay" fails="places" why="segments of the request's own size"
def replay(trace, capacity, expandable):
    """-> {"places": [[segment, offset], ...], "reserved": [...], "died": index or None}."""
    segments, free, used = (
        {},
        {},
        {},
    )  # number -> size; number -> {offset: size}; name -> (segment, offset, size)
    places, reserved, following = [], [], 0
    if expandable:
        segments[0], free[0] = 0, {}

    def give(number, offset, size):
        blocks = free[number]
        if offset + size in blocks:
            size += blocks.pop(offset + size)
        before = next((start for start, length in blocks.items() if start + length == offset), None)
        if before is not None:
            offset, size = before, size + blocks.pop(before)
        blocks[offset] = size

    for index, (kind, name, *sizes) in enumerate(trace):
        if kind == "free":
            give(*used.pop(name))
        else:
            size = -(-sizes[0] // 4) * 4
            fits = [
                (length, n, at)
                for n, blocks in free.items()
                for at, length in blocks.items()
                if length >= size
            ]
            if not fits and expandable:
                end = segments[0]
                tail = next((length for at, length in free[0].items() if at + length == end), 0)
                more = -(-(size - tail) // 64) * 64
                if end + more > capacity:
                    return {"places": places, "reserved": reserved, "died": index}
                segments[0] += more
                give(0, end, more)
                fits = [(size, 0, end - tail)]
            elif not fits:
                more = size
                if sum(segments.values()) + more > capacity:
                    for n in [n for n in segments if free[n] == {0: segments[n]}]:
                        del segments[n], free[n]
                if sum(segments.values()) + more > capacity:
                    return {"places": places, "reserved": reserved, "died": index}
                segments[following], free[following] = more, {0: more}
                fits, following = [(more, following, 0)], following + 1
            _, number, offset = min(fits)
            length = free[number].pop(offset)
            if length > size:
                free[number][offset + size] = length - size
            used[name] = number, offset, size
            places.append([number, offset])
        reserved.append(sum(segments.values()))
    return {"places": places, "reserved": reserved, "died": None}


# %% wrong="replay" fails="died" why="nothing is given back"
def replay(trace, capacity, expandable):
    """-> {"places": [[segment, offset], ...], "reserved": [...], "died": index or None}."""
    segments, free, used = (
        {},
        {},
        {},
    )  # number -> size; number -> {offset: size}; name -> (segment, offset, size)
    places, reserved, following = [], [], 0
    if expandable:
        segments[0], free[0] = 0, {}

    def give(number, offset, size):
        blocks = free[number]
        if offset + size in blocks:
            size += blocks.pop(offset + size)
        before = next((start for start, length in blocks.items() if start + length == offset), None)
        if before is not None:
            offset, size = before, size + blocks.pop(before)
        blocks[offset] = size

    for index, (kind, name, *sizes) in enumerate(trace):
        if kind == "free":
            give(*used.pop(name))
        else:
            size = -(-sizes[0] // 4) * 4
            fits = [
                (length, n, at)
                for n, blocks in free.items()
                for at, length in blocks.items()
                if length >= size
            ]
            if not fits and expandable:
                end = segments[0]
                tail = next((length for at, length in free[0].items() if at + length == end), 0)
                more = -(-(size - tail) // 64) * 64
                if end + more > capacity:
                    return {"places": places, "reserved": reserved, "died": index}
                segments[0] += more
                give(0, end, more)
                fits = [(size, 0, end - tail)]
            elif not fits:
                more = -(-size // 64) * 64
                if False:
                    for n in [n for n in segments if free[n] == {0: segments[n]}]:
                        del segments[n], free[n]
                if sum(segments.values()) + more > capacity:
                    return {"places": places, "reserved": reserved, "died": index}
                segments[following], free[following] = more, {0: more}
                fits, following = [(more, following, 0)], following + 1
            _, number, offset = min(fits)
            length = free[number].pop(offset)
            if length > size:
                free[number][offset + size] = length - size
            used[name] = number, offset, size
            places.append([number, offset])
        reserved.append(sum(segments.values()))
    return {"places": places, "reserved": reserved, "died": None}


# %% wrong="replay" fails="reserved" why="free segments are given back at once"
def replay(trace, capacity, expandable):
    """-> {"places": [[segment, offset], ...], "reserved": [...], "died": index or None}."""
    segments, free, used = (
        {},
        {},
        {},
    )  # number -> size; number -> {offset: size}; name -> (segment, offset, size)
    places, reserved, following = [], [], 0
    if expandable:
        segments[0], free[0] = 0, {}

    def give(number, offset, size):
        blocks = free[number]
        if offset + size in blocks:
            size += blocks.pop(offset + size)
        before = next((start for start, length in blocks.items() if start + length == offset), None)
        if before is not None:
            offset, size = before, size + blocks.pop(before)
        blocks[offset] = size

    for index, (kind, name, *sizes) in enumerate(trace):
        if kind == "free":
            number = used[name][0]
            give(*used.pop(name))
            if not expandable and free[number] == {0: segments[number]}:
                del segments[number], free[number]
        else:
            size = -(-sizes[0] // 4) * 4
            fits = [
                (length, n, at)
                for n, blocks in free.items()
                for at, length in blocks.items()
                if length >= size
            ]
            if not fits and expandable:
                end = segments[0]
                tail = next((length for at, length in free[0].items() if at + length == end), 0)
                more = -(-(size - tail) // 64) * 64
                if end + more > capacity:
                    return {"places": places, "reserved": reserved, "died": index}
                segments[0] += more
                give(0, end, more)
                fits = [(size, 0, end - tail)]
            elif not fits:
                more = -(-size // 64) * 64
                if sum(segments.values()) + more > capacity:
                    for n in [n for n in segments if free[n] == {0: segments[n]}]:
                        del segments[n], free[n]
                if sum(segments.values()) + more > capacity:
                    return {"places": places, "reserved": reserved, "died": index}
                segments[following], free[following] = more, {0: more}
                fits, following = [(more, following, 0)], following + 1
            _, number, offset = min(fits)
            length = free[number].pop(offset)
            if length > size:
                free[number][offset + size] = length - size
            used[name] = number, offset, size
            places.append([number, offset])
        reserved.append(sum(segments.values()))
    return {"places": places, "reserved": reserved, "died": None}


# %% wrong="replay" fails="died" why="one segment is given back, not all"
def replay(trace, capacity, expandable):
    """-> {"places": [[segment, offset], ...], "reserved": [...], "died": index or None}."""
    segments, free, used = (
        {},
        {},
        {},
    )  # number -> size; number -> {offset: size}; name -> (segment, offset, size)
    places, reserved, following = [], [], 0
    if expandable:
        segments[0], free[0] = 0, {}

    def give(number, offset, size):
        blocks = free[number]
        if offset + size in blocks:
            size += blocks.pop(offset + size)
        before = next((start for start, length in blocks.items() if start + length == offset), None)
        if before is not None:
            offset, size = before, size + blocks.pop(before)
        blocks[offset] = size

    for index, (kind, name, *sizes) in enumerate(trace):
        if kind == "free":
            give(*used.pop(name))
        else:
            size = -(-sizes[0] // 4) * 4
            fits = [
                (length, n, at)
                for n, blocks in free.items()
                for at, length in blocks.items()
                if length >= size
            ]
            if not fits and expandable:
                end = segments[0]
                tail = next((length for at, length in free[0].items() if at + length == end), 0)
                more = -(-(size - tail) // 64) * 64
                if end + more > capacity:
                    return {"places": places, "reserved": reserved, "died": index}
                segments[0] += more
                give(0, end, more)
                fits = [(size, 0, end - tail)]
            elif not fits:
                more = -(-size // 64) * 64
                if sum(segments.values()) + more > capacity:
                    for n in [n for n in segments if free[n] == {0: segments[n]}][:1]:
                        del segments[n], free[n]
                if sum(segments.values()) + more > capacity:
                    return {"places": places, "reserved": reserved, "died": index}
                segments[following], free[following] = more, {0: more}
                fits, following = [(more, following, 0)], following + 1
            _, number, offset = min(fits)
            length = free[number].pop(offset)
            if length > size:
                free[number][offset + size] = length - size
            used[name] = number, offset, size
            places.append([number, offset])
        reserved.append(sum(segments.values()))
    return {"places": places, "reserved": reserved, "died": None}


# %% wrong="replay" fails="places" why="numbers of segments are used again"
def replay(trace, capacity, expandable):
    """-> {"places": [[segment, offset], ...], "reserved": [...], "died": index or None}."""
    segments, free, used = (
        {},
        {},
        {},
    )  # number -> size; number -> {offset: size}; name -> (segment, offset, size)
    places, reserved, following = [], [], 0
    if expandable:
        segments[0], free[0] = 0, {}

    def give(number, offset, size):
        blocks = free[number]
        if offset + size in blocks:
            size += blocks.pop(offset + size)
        before = next((start for start, length in blocks.items() if start + length == offset), None)
        if before is not None:
            offset, size = before, size + blocks.pop(before)
        blocks[offset] = size

    for index, (kind, name, *sizes) in enumerate(trace):
        if kind == "free":
            give(*used.pop(name))
        else:
            size = -(-sizes[0] // 4) * 4
            fits = [
                (length, n, at)
                for n, blocks in free.items()
                for at, length in blocks.items()
                if length >= size
            ]
            if not fits and expandable:
                end = segments[0]
                tail = next((length for at, length in free[0].items() if at + length == end), 0)
                more = -(-(size - tail) // 64) * 64
                if end + more > capacity:
                    return {"places": places, "reserved": reserved, "died": index}
                segments[0] += more
                give(0, end, more)
                fits = [(size, 0, end - tail)]
            elif not fits:
                more = -(-size // 64) * 64
                if sum(segments.values()) + more > capacity:
                    for n in [n for n in segments if free[n] == {0: segments[n]}]:
                        del segments[n], free[n]
                if sum(segments.values()) + more > capacity:
                    return {"places": places, "reserved": reserved, "died": index}
                following = next(n for n in range(len(trace)) if n not in segments)
                segments[following], free[following] = more, {0: more}
                fits = [(more, following, 0)]
            _, number, offset = min(fits)
            length = free[number].pop(offset)
            if length > size:
                free[number][offset + size] = length - size
            used[name] = number, offset, size
            places.append([number, offset])
        reserved.append(sum(segments.values()))
    return {"places": places, "reserved": reserved, "died": None}


# %% wrong="replay" fails="died" why="what is free counts as room, wherever it lies"
def replay(trace, capacity, expandable):
    """-> {"places": [[segment, offset], ...], "reserved": [...], "died": index or None}."""
    segments, free, used = (
        {},
        {},
        {},
    )  # number -> size; number -> {offset: size}; name -> (segment, offset, size)
    places, reserved, following = [], [], 0
    if expandable:
        segments[0], free[0] = 0, {}

    def give(number, offset, size):
        blocks = free[number]
        if offset + size in blocks:
            size += blocks.pop(offset + size)
        before = next((start for start, length in blocks.items() if start + length == offset), None)
        if before is not None:
            offset, size = before, size + blocks.pop(before)
        blocks[offset] = size

    for index, (kind, name, *sizes) in enumerate(trace):
        if kind == "free":
            give(*used.pop(name))
        else:
            size = -(-sizes[0] // 4) * 4
            fits = [
                (length, n, at)
                for n, blocks in free.items()
                for at, length in blocks.items()
                if length >= size
            ]
            if not fits and expandable:
                end = segments[0]
                tail = next((length for at, length in free[0].items() if at + length == end), 0)
                more = -(-(size - tail) // 64) * 64
                if end + more > capacity:
                    return {"places": places, "reserved": reserved, "died": index}
                segments[0] += more
                give(0, end, more)
                fits = [(size, 0, end - tail)]
            elif not fits:
                more = -(-size // 64) * 64
                if sum(segments.values()) + more > capacity:
                    for n in [n for n in segments if free[n] == {0: segments[n]}]:
                        del segments[n], free[n]
                if sum(one[2] for one in used.values()) + more > capacity:
                    return {"places": places, "reserved": reserved, "died": index}
                segments[following], free[following] = more, {0: more}
                fits, following = [(more, following, 0)], following + 1
            _, number, offset = min(fits)
            length = free[number].pop(offset)
            if length > size:
                free[number][offset + size] = length - size
            used[name] = number, offset, size
            places.append([number, offset])
        reserved.append(sum(segments.values()))
    return {"places": places, "reserved": reserved, "died": None}


# %% wrong="replay" fails="died" why="expandable: grows by the whole request"
def replay(trace, capacity, expandable):
    """-> {"places": [[segment, offset], ...], "reserved": [...], "died": index or None}."""
    segments, free, used = (
        {},
        {},
        {},
    )  # number -> size; number -> {offset: size}; name -> (segment, offset, size)
    places, reserved, following = [], [], 0
    if expandable:
        segments[0], free[0] = 0, {}

    def give(number, offset, size):
        blocks = free[number]
        if offset + size in blocks:
            size += blocks.pop(offset + size)
        before = next((start for start, length in blocks.items() if start + length == offset), None)
        if before is not None:
            offset, size = before, size + blocks.pop(before)
        blocks[offset] = size

    for index, (kind, name, *sizes) in enumerate(trace):
        if kind == "free":
            give(*used.pop(name))
        else:
            size = -(-sizes[0] // 4) * 4
            fits = [
                (length, n, at)
                for n, blocks in free.items()
                for at, length in blocks.items()
                if length >= size
            ]
            if not fits and expandable:
                end = segments[0]
                tail = next((length for at, length in free[0].items() if at + length == end), 0)
                more = -(-size // 64) * 64
                if end + more > capacity:
                    return {"places": places, "reserved": reserved, "died": index}
                segments[0] += more
                give(0, end, more)
                fits = [(size, 0, end - tail)]
            elif not fits:
                more = -(-size // 64) * 64
                if sum(segments.values()) + more > capacity:
                    for n in [n for n in segments if free[n] == {0: segments[n]}]:
                        del segments[n], free[n]
                if sum(segments.values()) + more > capacity:
                    return {"places": places, "reserved": reserved, "died": index}
                segments[following], free[following] = more, {0: more}
                fits, following = [(more, following, 0)], following + 1
            _, number, offset = min(fits)
            length = free[number].pop(offset)
            if length > size:
                free[number][offset + size] = length - size
            used[name] = number, offset, size
            places.append([number, offset])
        reserved.append(sum(segments.values()))
    return {"places": places, "reserved": reserved, "died": None}


# %% wrong="replay" fails="places" why="expandable: every request at the end"
def replay(trace, capacity, expandable):
    """-> {"places": [[segment, offset], ...], "reserved": [...], "died": index or None}."""
    segments, free, used = (
        {},
        {},
        {},
    )  # number -> size; number -> {offset: size}; name -> (segment, offset, size)
    places, reserved, following = [], [], 0
    if expandable:
        segments[0], free[0] = 0, {}

    def give(number, offset, size):
        blocks = free[number]
        if offset + size in blocks:
            size += blocks.pop(offset + size)
        before = next((start for start, length in blocks.items() if start + length == offset), None)
        if before is not None:
            offset, size = before, size + blocks.pop(before)
        blocks[offset] = size

    for index, (kind, name, *sizes) in enumerate(trace):
        if kind == "free":
            give(*used.pop(name))
        else:
            size = -(-sizes[0] // 4) * 4
            fits = [
                (length, n, at)
                for n, blocks in free.items()
                for at, length in blocks.items()
                if length >= size
            ]
            if expandable and not (fits := [one for one in fits if one[0] + one[2] == segments[0]]):
                end = segments[0]
                tail = next((length for at, length in free[0].items() if at + length == end), 0)
                more = -(-(size - tail) // 64) * 64
                if end + more > capacity:
                    return {"places": places, "reserved": reserved, "died": index}
                segments[0] += more
                give(0, end, more)
                fits = [(size, 0, end - tail)]
            elif not fits:
                more = -(-size // 64) * 64
                if sum(segments.values()) + more > capacity:
                    for n in [n for n in segments if free[n] == {0: segments[n]}]:
                        del segments[n], free[n]
                if sum(segments.values()) + more > capacity:
                    return {"places": places, "reserved": reserved, "died": index}
                segments[following], free[following] = more, {0: more}
                fits, following = [(more, following, 0)], following + 1
            _, number, offset = min(fits)
            length = free[number].pop(offset)
            if length > size:
                free[number][offset + size] = length - size
            used[name] = number, offset, size
            places.append([number, offset])
        reserved.append(sum(segments.values()))
    return {"places": places, "reserved": reserved, "died": None}


# %% wrong="replay" fails="places" why="expandable: the new pages alone"
def replay(trace, capacity, expandable):
    """-> {"places": [[segment, offset], ...], "reserved": [...], "died": index or None}."""
    segments, free, used = (
        {},
        {},
        {},
    )  # number -> size; number -> {offset: size}; name -> (segment, offset, size)
    places, reserved, following = [], [], 0
    if expandable:
        segments[0], free[0] = 0, {}

    def give(number, offset, size):
        blocks = free[number]
        if offset + size in blocks:
            size += blocks.pop(offset + size)
        before = next((start for start, length in blocks.items() if start + length == offset), None)
        if before is not None:
            offset, size = before, size + blocks.pop(before)
        blocks[offset] = size

    for index, (kind, name, *sizes) in enumerate(trace):
        if kind == "free":
            give(*used.pop(name))
        else:
            size = -(-sizes[0] // 4) * 4
            fits = [
                (length, n, at)
                for n, blocks in free.items()
                for at, length in blocks.items()
                if length >= size
            ]
            if not fits and expandable:
                end = segments[0]
                tail = next((length for at, length in free[0].items() if at + length == end), 0)
                more = -(-size // 64) * 64
                if end + more > capacity:
                    return {"places": places, "reserved": reserved, "died": index}
                segments[0] += more
                free[0][end] = more
                fits = [(size, 0, end)]
            elif not fits:
                more = -(-size // 64) * 64
                if sum(segments.values()) + more > capacity:
                    for n in [n for n in segments if free[n] == {0: segments[n]}]:
                        del segments[n], free[n]
                if sum(segments.values()) + more > capacity:
                    return {"places": places, "reserved": reserved, "died": index}
                segments[following], free[following] = more, {0: more}
                fits, following = [(more, following, 0)], following + 1
            _, number, offset = min(fits)
            length = free[number].pop(offset)
            if length > size:
                free[number][offset + size] = length - size
            used[name] = number, offset, size
            places.append([number, offset])
        reserved.append(sum(segments.values()))
    return {"places": places, "reserved": reserved, "died": None}
