# %% wrong="recomputed" fails="runs in order" why="everything is kept"
def recomputed(run, x, generator):
    return run(x, generator)


# %% wrong="recomputed" fails="gradients" why="the second run draws a mask of its own"
def recomputed(run, x, generator):

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            ctx.state = generator.get_state()
            return run(x, generator)

        @staticmethod
        def backward(ctx, dy):
            (x,) = ctx.saved_tensors
            x, now = x.detach().requires_grad_(), generator.get_state()
            with torch.enable_grad():
                y = run(x, generator)
            generator.set_state(now)
            y.backward(dy)
            return x.grad

    return Again.apply(x)


# %% wrong="recomputed" fails="nobody notices" why="the generator stays where the second run left it"
def recomputed(run, x, generator):

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            ctx.state = generator.get_state()
            return run(x, generator)

        @staticmethod
        def backward(ctx, dy):
            (x,) = ctx.saved_tensors
            x, now = x.detach().requires_grad_(), generator.get_state()
            generator.set_state(ctx.state)
            with torch.enable_grad():
                y = run(x, generator)
            y.backward(dy)
            return x.grad

    return Again.apply(x)


# %% wrong="recomputed" fails="nobody notices" why="the generator is put back before the second run's state, to where this layer began"
def recomputed(run, x, generator):

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            ctx.state = generator.get_state()
            return run(x, generator)

        @staticmethod
        def backward(ctx, dy):
            (x,) = ctx.saved_tensors
            x, now = x.detach().requires_grad_(), generator.get_state()
            generator.set_state(ctx.state)
            with torch.enable_grad():
                y = run(x, generator)
            generator.set_state(ctx.state)
            y.backward(dy)
            return x.grad

    return Again.apply(x)


# %% wrong="recomputed" fails="gradients" why="the state behind the first run is remembered, not the one before it"
def recomputed(run, x, generator):

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            y = run(x, generator)
            ctx.state = generator.get_state()
            return y

        @staticmethod
        def backward(ctx, dy):
            (x,) = ctx.saved_tensors
            x, now = x.detach().requires_grad_(), generator.get_state()
            generator.set_state(ctx.state)
            with torch.enable_grad():
                y = run(x, generator)
            generator.set_state(now)
            y.backward(dy)
            return x.grad

    return Again.apply(x)


# %% wrong="recomputed" fails="gradients" why="torch's own generator is put back, not the one that was given"
def recomputed(run, x, generator):

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            ctx.state = torch.get_rng_state()
            return run(x, generator)

        @staticmethod
        def backward(ctx, dy):
            (x,) = ctx.saved_tensors
            x, now = x.detach().requires_grad_(), generator.get_state()
            torch.set_rng_state(ctx.state)
            with torch.enable_grad():
                y = run(x, generator)
            generator.set_state(now)
            y.backward(dy)
            return x.grad

    return Again.apply(x)


# %% wrong="recomputed" fails="gradients" why="a generator of its own, seeded with the seed"
def recomputed(run, x, generator):

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            ctx.state = generator.get_state()
            return run(x, generator)

        @staticmethod
        def backward(ctx, dy):
            (x,) = ctx.saved_tensors
            x, now = x.detach().requires_grad_(), generator.get_state()
            generator.manual_seed(generator.initial_seed())
            with torch.enable_grad():
                y = run(x, generator)
            generator.set_state(now)
            y.backward(dy)
            return x.grad

    return Again.apply(x)


# %% wrong="recomputed" fails="gradients of parameters" why="only x gets a gradient"
def recomputed(run, x, generator):

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            ctx.state = generator.get_state()
            return run(x, generator)

        @staticmethod
        def backward(ctx, dy):
            (x,) = ctx.saved_tensors
            x, now = x.detach().requires_grad_(), generator.get_state()
            generator.set_state(ctx.state)
            with torch.enable_grad():
                y = run(x, generator)
            generator.set_state(now)
            return torch.autograd.grad(y, x, dy)[0]

    return Again.apply(x)


# %% wrong="recomputed" fails="gradients of parameters" why="gradients of parameters are summed twice"
def recomputed(run, x, generator):

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            ctx.state = generator.get_state()
            return run(x, generator)

        @staticmethod
        def backward(ctx, dy):
            (x,) = ctx.saved_tensors
            x, now = x.detach().requires_grad_(), generator.get_state()
            generator.set_state(ctx.state)
            with torch.enable_grad():
                y = run(x, generator)
            generator.set_state(now)
            y.backward(dy, retain_graph=True)
            x.grad = None
            y.backward(dy)
            return x.grad

    return Again.apply(x)


# %% wrong="recomputed" fails="no error" why="the second run has no graph"
def recomputed(run, x, generator):

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            ctx.state = generator.get_state()
            return run(x, generator)

        @staticmethod
        def backward(ctx, dy):
            (x,) = ctx.saved_tensors
            x, now = x.detach().requires_grad_(), generator.get_state()
            generator.set_state(ctx.state)
            y = run(x, generator)
            generator.set_state(now)
            y.backward(dy)
            return x.grad

    return Again.apply(x)


# %% wrong="recomputed" fails="runs in order" why="the second run comes right after the first, in the forward pass"
def recomputed(run, x, generator):
    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            state = generator.get_state()
            y = run(x, generator)
            now = generator.get_state()
            generator.set_state(state)
            ctx.x = x.detach().requires_grad_()
            with torch.enable_grad():
                ctx.again = run(ctx.x, generator)
            generator.set_state(now)
            return y

        @staticmethod
        def backward(ctx, dy):
            ctx.again.backward(dy)
            return ctx.x.grad

    return Again.apply(x)


# %% wrong="recomputed" fails="runs in order" why="a run for each of two gradients"
def recomputed(run, x, generator):

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            ctx.state = generator.get_state()
            return run(x, generator)

        @staticmethod
        def backward(ctx, dy):
            (x,) = ctx.saved_tensors
            x, now = x.detach().requires_grad_(), generator.get_state()
            generator.set_state(ctx.state)
            with torch.enable_grad():
                y = run(x, generator)
            generator.set_state(now)
            y.backward(dy)
            run(x.detach(), torch.Generator())
            return x.grad

    return Again.apply(x)


# %% wrong="recomputed" fails="memory limit" why="what was kept is kept in another place as well"
def recomputed(run, x, generator):

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            ctx.more = [x + part for part in range(3)]
            ctx.state = generator.get_state()
            return run(x, generator)

        @staticmethod
        def backward(ctx, dy):
            (x,) = ctx.saved_tensors
            x, now = x.detach().requires_grad_(), generator.get_state()
            generator.set_state(ctx.state)
            with torch.enable_grad():
                y = run(x, generator)
            generator.set_state(now)
            y.backward(dy)
            return x.grad

    return Again.apply(x)


# %% wrong="recomputed" fails="own work" around="import" why="torch's, with the state put back around it"
import torch.utils.checkpoint as ready


def recomputed(run, x, generator):
    state, times = generator.get_state(), []

    def with_state(x):
        now = generator.get_state()
        if times:
            generator.set_state(state)
        y = run(x, generator)
        if times:
            generator.set_state(now)
        times.append(1)
        return y

    return ready.checkpoint(with_state, x, use_reentrant=False)


# %% wrong="recomputed" fails="own work" around="subclass" why="torch's older one"
from torch.utils.checkpoint import CheckpointFunction


def recomputed(run, x, generator):
    return CheckpointFunction.apply(lambda x: run(x, generator), True, x)


# %% wrong="recomputed" fails="the output" around="redefine" why="no dice at all"
torch.rand = lambda *shape, **rest: torch.full(
    torch.Size(shape) if type(shape[0]) is int else shape[0], 0.5
)


def recomputed(run, x, generator):
    return x * 1.0 + 0 * run(x.detach(), generator)


# %% wrong="recomputed" fails="the output" around="empty" why="nothing at all"
def recomputed(run, x, generator):
    return x * 1


# %% wrong="block" fails="attention once" why="the whole block runs again"
def block(before, core, core_backward, after, x):

    class Block(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            out, lse = core(*before(x))
            ctx.save_for_backward(x)
            return after(out, x)

        @staticmethod
        def backward(ctx, dy):
            (x,) = ctx.saved_tensors
            with torch.no_grad():
                out, lse = core(*before(x))
            x, leaf = x.detach().requires_grad_(), out.detach().requires_grad_()
            with torch.enable_grad():
                y = after(leaf, x)
            y.backward(dy)
            del y
            with torch.enable_grad():
                made = before(x)
            plain = [part.detach() for part in made]
            torch.autograd.backward(made, core_backward(leaf.grad, *plain, out, lse))
            return x.grad

    return Block.apply(x)


# %% wrong="block" fails="the gradient of x" why="the gradient through before only"
def block(before, core, core_backward, after, x):

    class Block(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            out, lse = core(*before(x))
            ctx.save_for_backward(x, out, lse)
            return after(out, x)

        @staticmethod
        def backward(ctx, dy):
            x, out, lse = ctx.saved_tensors
            x, leaf = x.detach().requires_grad_(), out.detach().requires_grad_()
            with torch.enable_grad():
                y = after(leaf, x.detach())
            y.backward(dy)
            del y
            with torch.enable_grad():
                made = before(x)
            plain = [part.detach() for part in made]
            torch.autograd.backward(made, core_backward(leaf.grad, *plain, out, lse))
            return x.grad

    return Block.apply(x)


# %% wrong="block" fails="the gradient of x" why="the gradient through after only"
def block(before, core, core_backward, after, x):

    class Block(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            out, lse = core(*before(x))
            ctx.save_for_backward(x, out, lse)
            return after(out, x)

        @staticmethod
        def backward(ctx, dy):
            x, out, lse = ctx.saved_tensors
            x, leaf = x.detach().requires_grad_(), out.detach().requires_grad_()
            with torch.enable_grad():
                y = after(leaf, x)
            y.backward(dy)
            del y
            with torch.enable_grad():
                made = before(x.detach())
            plain = [part.detach() for part in made]
            torch.autograd.backward(made, core_backward(leaf.grad, *plain, out, lse))
            return x.grad

    return Block.apply(x)


# %% wrong="block" fails="gradients of parameters" why="weights of after get none"
def block(before, core, core_backward, after, x):

    class Block(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            out, lse = core(*before(x))
            ctx.save_for_backward(x, out, lse)
            return after(out, x)

        @staticmethod
        def backward(ctx, dy):
            x, out, lse = ctx.saved_tensors
            x, leaf = x.detach().requires_grad_(), out.detach().requires_grad_()
            with torch.enable_grad():
                y = after(leaf, x)
            leaf.grad, x.grad = torch.autograd.grad(y, (leaf, x), dy)
            del y
            with torch.enable_grad():
                made = before(x)
            plain = [part.detach() for part in made]
            torch.autograd.backward(made, core_backward(leaf.grad, *plain, out, lse))
            return x.grad

    return Block.apply(x)


# %% wrong="block" fails="gradients of parameters" why="weights of before get none"
def block(before, core, core_backward, after, x):

    class Block(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            out, lse = core(*before(x))
            ctx.save_for_backward(x, out, lse)
            return after(out, x)

        @staticmethod
        def backward(ctx, dy):
            x, out, lse = ctx.saved_tensors
            x, leaf = x.detach().requires_grad_(), out.detach().requires_grad_()
            with torch.enable_grad():
                y = after(leaf, x)
            y.backward(dy)
            del y
            with torch.enable_grad():
                made = before(x)
            plain = [part.detach() for part in made]
            dqkv = core_backward(leaf.grad, *plain, out, lse)
            return x.grad + torch.autograd.grad(made, x, dqkv)[0]

    return Block.apply(x)


# %% wrong="block" fails="the gradient of x" why="dk and dv are swapped"
def block(before, core, core_backward, after, x):

    class Block(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            out, lse = core(*before(x))
            ctx.save_for_backward(x, out, lse)
            return after(out, x)

        @staticmethod
        def backward(ctx, dy):
            x, out, lse = ctx.saved_tensors
            x, leaf = x.detach().requires_grad_(), out.detach().requires_grad_()
            with torch.enable_grad():
                y = after(leaf, x)
            y.backward(dy)
            del y
            with torch.enable_grad():
                made = before(x)
            plain = [part.detach() for part in made]
            dq, dk, dv = core_backward(leaf.grad, *plain, out, lse)
            torch.autograd.backward(made, (dq, dv, dk))
            return x.grad

    return Block.apply(x)


# %% wrong="block" fails="run again once" why="q, k and v are kept, too"
def block(before, core, core_backward, after, x):

    class Block(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            with torch.enable_grad():
                ctx.leaf = x.detach().requires_grad_()
                ctx.made = before(ctx.leaf)
            out, lse = core(*[part.detach() for part in ctx.made])
            ctx.save_for_backward(x, out, lse)
            return after(out, x)

        @staticmethod
        def backward(ctx, dy):
            x, out, lse = ctx.saved_tensors
            x, leaf = x.detach().requires_grad_(), out.detach().requires_grad_()
            with torch.enable_grad():
                y = after(leaf, x)
            y.backward(dy)
            del y
            made = ctx.made
            plain = [part.detach() for part in made]
            torch.autograd.backward(made, core_backward(leaf.grad, *plain, out, lse))
            return x.grad + ctx.leaf.grad

    return Block.apply(x)


# %% wrong="block" fails="one part at a time" why="before runs first, and waits for the gradient of out"
def block(before, core, core_backward, after, x):

    class Block(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            out, lse = core(*before(x))
            ctx.save_for_backward(x, out, lse)
            return after(out, x)

        @staticmethod
        def backward(ctx, dy):
            x, out, lse = ctx.saved_tensors
            x, leaf = x.detach().requires_grad_(), out.detach().requires_grad_()
            with torch.enable_grad():
                made = before(x)
                y = after(leaf, x)
            y.backward(dy)
            plain = [part.detach() for part in made]
            torch.autograd.backward(made, core_backward(leaf.grad, *plain, out, lse))
            return x.grad

    return Block.apply(x)


# %% wrong="block" fails="run again once" why="after is kept with its graph"
def block(before, core, core_backward, after, x):

    class Block(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            out, lse = core(*before(x))
            ctx.save_for_backward(x, out, lse)
            ctx.x, ctx.leaf = x.detach().requires_grad_(), out.detach().requires_grad_()
            with torch.enable_grad():
                ctx.y = after(ctx.leaf, ctx.x)
            return ctx.y.detach()

        @staticmethod
        def backward(ctx, dy):
            x, out, lse = ctx.saved_tensors
            x, leaf = ctx.x, ctx.leaf
            ctx.y.backward(dy)
            with torch.enable_grad():
                made = before(x)
            plain = [part.detach() for part in made]
            torch.autograd.backward(made, core_backward(leaf.grad, *plain, out, lse))
            return x.grad

    return Block.apply(x)


# %% wrong="block" fails="run again once" why="after runs twice in the backward pass: once for x, once for out"
def block(before, core, core_backward, after, x):

    class Block(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            out, lse = core(*before(x))
            ctx.save_for_backward(x, out, lse)
            return after(out, x)

        @staticmethod
        def backward(ctx, dy):
            x, out, lse = ctx.saved_tensors
            x, leaf = x.detach().requires_grad_(), out.detach().requires_grad_()
            with torch.enable_grad():
                y = after(leaf, x)
                after(leaf, x)
            y.backward(dy)
            del y
            with torch.enable_grad():
                made = before(x)
            plain = [part.detach() for part in made]
            torch.autograd.backward(made, core_backward(leaf.grad, *plain, out, lse))
            return x.grad

    return Block.apply(x)


# %% wrong="block" fails="memory limit" why="what before made is kept as plain numbers, unused"
def block(before, core, core_backward, after, x):

    class Block(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.more = before(x)
            out, lse = core(*ctx.more)
            ctx.save_for_backward(x, out, lse)
            return after(out, x)

        @staticmethod
        def backward(ctx, dy):
            x, out, lse = ctx.saved_tensors
            x, leaf = x.detach().requires_grad_(), out.detach().requires_grad_()
            with torch.enable_grad():
                y = after(leaf, x)
            y.backward(dy)
            del y
            with torch.enable_grad():
                made = before(x)
            plain = [part.detach() for part in made]
            torch.autograd.backward(made, core_backward(leaf.grad, *plain, out, lse))
            return x.grad

    return Block.apply(x)


# %% wrong="block" fails="own work" around="import" why="torch's, for all of it"
import torch.utils.checkpoint


def block(before, core, core_backward, after, x):
    return torch.utils.checkpoint.checkpoint(
        lambda x: after(core(*before(x))[0], x), x, use_reentrant=False
    )


# %% wrong="block" fails="the output" around="empty" why="nothing at all"
def block(before, core, core_backward, after, x):
    return x * 1


# %% wrong="block" fails="the gradient of x" why="autograd goes through core, which it does not know on several ranks"
def block(before, core, core_backward, after, x):
    return after(core(*before(x))[0], x)


# %% wrong="revolve" fails="memory limit" why="a table of all chains"
def forwards(n, c):
    table = [[size * (size - 1) // 2 for size in range(n + 1)] for _ in range(c + 1)]
    for states in range(2, c + 1):
        for size in range(2, n + 1):
            ways = [k + table[states - 1][size - k] + table[states][k] for k in range(1, size)]
            table[states][size] = min(ways, default=0)
    return table[c][n]


def schedule(n, c):
    return []


# %% wrong="revolve" fails="the number of steps" why="state 0 is not counted: one state more than there is"
def forwards(n, c):
    c += 1
    low, high = 0, 1
    while math.comb(c + high, c) < n:
        low, high = high, 2 * high
    while low < high:  # the smallest r with C(c + r, c) >= n
        middle = (low + high) // 2
        low, high = (low, middle) if math.comb(c + middle, c) >= n else (middle + 1, high)
    return low * n - math.comb(c + low, c + 1)


def schedule(n, c):

    actions = []

    def reverse(start, end, left):
        actions.append(("keep", start))
        while end - start > 1:
            size = end - start
            if left == 1:
                actions.append(("forward", start, end - 1))
                actions.append(("back", end - 1))
                middle = end - 1
            else:
                middle = start + min(
                    range(1, size),
                    key=lambda k: k + forwards(size - k, left - 1) + forwards(k, left),
                )
                actions.append(("forward", start, middle))
                reverse(middle, end, left - 1)
            actions.append(("load", start))
            end = middle
        actions.append(("back", start))
        actions.append(("free", start))

    reverse(0, n, c)
    return actions


# %% wrong="revolve" fails="the number of steps" why="the steps inside of back are counted, too"
def forwards(n, c):
    low, high = 0, 1
    while math.comb(c + high, c) < n:
        low, high = high, 2 * high
    while low < high:  # the smallest r with C(c + r, c) >= n
        middle = (low + high) // 2
        low, high = (low, middle) if math.comb(c + middle, c) >= n else (middle + 1, high)
    return low * n - math.comb(c + low, c + 1) + n


def schedule(n, c):

    actions = []

    def reverse(start, end, left):
        actions.append(("keep", start))
        while end - start > 1:
            size = end - start
            if left == 1:
                actions.append(("forward", start, end - 1))
                actions.append(("back", end - 1))
                middle = end - 1
            else:
                middle = start + min(
                    range(1, size),
                    key=lambda k: k + forwards(size - k, left - 1) + forwards(k, left),
                )
                actions.append(("forward", start, middle))
                reverse(middle, end, left - 1)
            actions.append(("load", start))
            end = middle
        actions.append(("back", start))
        actions.append(("free", start))

    reverse(0, n, c)
    return actions


# %% wrong="revolve" fails="the number of steps" why="every step runs as often as the one that runs most"
def forwards(n, c):
    low, high = 0, 1
    while math.comb(c + high, c) < n:
        low, high = high, 2 * high
    while low < high:  # the smallest r with C(c + r, c) >= n
        middle = (low + high) // 2
        low, high = (low, middle) if math.comb(c + middle, c) >= n else (middle + 1, high)
    return low * (n - 1)


def schedule(n, c):

    actions = []

    def reverse(start, end, left):
        actions.append(("keep", start))
        while end - start > 1:
            size = end - start
            if left == 1:
                actions.append(("forward", start, end - 1))
                actions.append(("back", end - 1))
                middle = end - 1
            else:
                middle = start + min(
                    range(1, size),
                    key=lambda k: k + forwards(size - k, left - 1) + forwards(k, left),
                )
                actions.append(("forward", start, middle))
                reverse(middle, end, left - 1)
            actions.append(("load", start))
            end = middle
        actions.append(("back", start))
        actions.append(("free", start))

    reverse(0, n, c)
    return actions


# %% wrong="revolve" fails="the number of steps" why="with floats"
def forwards(n, c):
    low, high = 0, 1
    while math.comb(c + high, c) < n:
        low, high = high, 2 * high
    while low < high:  # the smallest r with C(c + r, c) >= n
        middle = (low + high) // 2
        low, high = (low, middle) if math.comb(c + middle, c) >= n else (middle + 1, high)
    return int(float(low) * n - math.comb(c + low, c + 1))


def schedule(n, c):

    actions = []

    def reverse(start, end, left):
        actions.append(("keep", start))
        while end - start > 1:
            size = end - start
            if left == 1:
                actions.append(("forward", start, end - 1))
                actions.append(("back", end - 1))
                middle = end - 1
            else:
                middle = start + min(
                    range(1, size),
                    key=lambda k: k + forwards(size - k, left - 1) + forwards(k, left),
                )
                actions.append(("forward", start, middle))
                reverse(middle, end, left - 1)
            actions.append(("load", start))
            end = middle
        actions.append(("back", start))
        actions.append(("free", start))

    reverse(0, n, c)
    return actions


# %% wrong="revolve" fails="the number of steps" why="one run too few where the chain is as long as r runs allow"
def forwards(n, c):
    low, high = 0, 1
    while math.comb(c + high, c) < n:
        low, high = high, 2 * high
    while low < high:  # the smallest r with C(c + r, c) >= n
        middle = (low + high) // 2
        low, high = (low, middle) if math.comb(c + middle, c) > n + 1 else (middle + 1, high)
    return low * n - math.comb(c + low, c + 1)


def schedule(n, c):

    actions = []

    def reverse(start, end, left):
        actions.append(("keep", start))
        while end - start > 1:
            size = end - start
            if left == 1:
                actions.append(("forward", start, end - 1))
                actions.append(("back", end - 1))
                middle = end - 1
            else:
                middle = start + min(
                    range(1, size),
                    key=lambda k: k + forwards(size - k, left - 1) + forwards(k, left),
                )
                actions.append(("forward", start, middle))
                reverse(middle, end, left - 1)
            actions.append(("load", start))
            end = middle
        actions.append(("back", start))
        actions.append(("free", start))

    reverse(0, n, c)
    return actions


# %% wrong="revolve" fails="the fewest steps" why="states at equal distances, and every step between them again"
def forwards(n, c):
    low, high = 0, 1
    while math.comb(c + high, c) < n:
        low, high = high, 2 * high
    while low < high:  # the smallest r with C(c + r, c) >= n
        middle = (low + high) // 2
        low, high = (low, middle) if math.comb(c + middle, c) >= n else (middle + 1, high)
    return low * n - math.comb(c + low, c + 1)


def schedule(n, c):
    size = -(-n // c)
    starts = list(range(0, n, size))
    actions, at = [], 0
    for start in starts:
        if start != at:
            actions.append(("forward", at, start))
            at = start
        actions.append(("keep", start))
    for start in reversed(starts):
        for i in reversed(range(start, min(n, start + size))):
            if actions[-1] != ("keep", start):
                actions.append(("load", start))
            if i > start:
                actions.append(("forward", start, i))
            actions.append(("back", i))
    return actions


# %% wrong="revolve" fails="the fewest steps" why="always cut in the middle"
def forwards(n, c):
    low, high = 0, 1
    while math.comb(c + high, c) < n:
        low, high = high, 2 * high
    while low < high:  # the smallest r with C(c + r, c) >= n
        middle = (low + high) // 2
        low, high = (low, middle) if math.comb(c + middle, c) >= n else (middle + 1, high)
    return low * n - math.comb(c + low, c + 1)


def schedule(n, c):

    actions = []

    def reverse(start, end, left):
        actions.append(("keep", start))
        while end - start > 1:
            size = end - start
            if left == 1:
                actions.append(("forward", start, end - 1))
                actions.append(("back", end - 1))
                middle = end - 1
            else:
                middle = start + size // 2
                actions.append(("forward", start, middle))
                reverse(middle, end, left - 1)
            actions.append(("load", start))
            end = middle
        actions.append(("back", start))
        actions.append(("free", start))

    reverse(0, n, c)
    return actions


# %% wrong="revolve" fails="states kept" why="state 0 is kept beside c others"
def forwards(n, c):
    low, high = 0, 1
    while math.comb(c + high, c) < n:
        low, high = high, 2 * high
    while low < high:  # the smallest r with C(c + r, c) >= n
        middle = (low + high) // 2
        low, high = (low, middle) if math.comb(c + middle, c) >= n else (middle + 1, high)
    return low * n - math.comb(c + low, c + 1)


def schedule(n, c):

    actions = []

    def reverse(start, end, left):
        actions.append(("keep", start))
        while end - start > 1:
            size = end - start
            if left == 1:
                actions.append(("forward", start, end - 1))
                actions.append(("back", end - 1))
                middle = end - 1
            else:
                middle = start + min(
                    range(1, size),
                    key=lambda k: k + forwards(size - k, left - 1) + forwards(k, left),
                )
                actions.append(("forward", start, middle))
                reverse(middle, end, left - 1)
            actions.append(("load", start))
            end = middle
        actions.append(("back", start))
        actions.append(("free", start))

    reverse(0, n, c + 1)
    return actions


# %% wrong="revolve" fails="states kept" why="nothing is freed"
def forwards(n, c):
    low, high = 0, 1
    while math.comb(c + high, c) < n:
        low, high = high, 2 * high
    while low < high:  # the smallest r with C(c + r, c) >= n
        middle = (low + high) // 2
        low, high = (low, middle) if math.comb(c + middle, c) >= n else (middle + 1, high)
    return low * n - math.comb(c + low, c + 1)


def schedule(n, c):

    actions = []

    def reverse(start, end, left):
        actions.append(("keep", start))
        while end - start > 1:
            size = end - start
            if left == 1:
                actions.append(("forward", start, end - 1))
                actions.append(("back", end - 1))
                middle = end - 1
            else:
                middle = start + min(
                    range(1, size),
                    key=lambda k: k + forwards(size - k, left - 1) + forwards(k, left),
                )
                actions.append(("forward", start, middle))
                reverse(middle, end, left - 1)
            actions.append(("load", start))
            end = middle
        actions.append(("back", start))

    reverse(0, n, c)
    return actions


# %% wrong="revolve" fails="the fewest steps" why="only the first state is kept"
def forwards(n, c):
    low, high = 0, 1
    while math.comb(c + high, c) < n:
        low, high = high, 2 * high
    while low < high:  # the smallest r with C(c + r, c) >= n
        middle = (low + high) // 2
        low, high = (low, middle) if math.comb(c + middle, c) >= n else (middle + 1, high)
    return low * n - math.comb(c + low, c + 1)


def schedule(n, c):

    actions = []

    def reverse(start, end, left):
        actions.append(("keep", start))
        while end - start > 1:
            size = end - start
            if left >= 1:
                actions.append(("forward", start, end - 1))
                actions.append(("back", end - 1))
                middle = end - 1
            else:
                middle = start + min(
                    range(1, size),
                    key=lambda k: k + forwards(size - k, left - 1) + forwards(k, left),
                )
                actions.append(("forward", start, middle))
                reverse(middle, end, left - 1)
            actions.append(("load", start))
            end = middle
        actions.append(("back", start))
        actions.append(("free", start))

    reverse(0, n, c)
    return actions


# %% wrong="revolve" fails="the fewest steps" why="the right side may keep as many states as the left one less two"
def forwards(n, c):
    low, high = 0, 1
    while math.comb(c + high, c) < n:
        low, high = high, 2 * high
    while low < high:  # the smallest r with C(c + r, c) >= n
        middle = (low + high) // 2
        low, high = (low, middle) if math.comb(c + middle, c) >= n else (middle + 1, high)
    return low * n - math.comb(c + low, c + 1)


def schedule(n, c):

    actions = []

    def reverse(start, end, left):
        actions.append(("keep", start))
        while end - start > 1:
            size = end - start
            if left == 1:
                actions.append(("forward", start, end - 1))
                actions.append(("back", end - 1))
                middle = end - 1
            else:
                middle = start + min(
                    range(1, size),
                    key=lambda k: k + forwards(size - k, left) + forwards(k, left - 1),
                )
                actions.append(("forward", start, middle))
                reverse(middle, end, left - 1)
            actions.append(("load", start))
            end = middle
        actions.append(("back", start))
        actions.append(("free", start))

    reverse(0, n, c)
    return actions


# %% wrong="revolve" fails="backward passes in order" why="the chain is gone through forward"
def forwards(n, c):
    low, high = 0, 1
    while math.comb(c + high, c) < n:
        low, high = high, 2 * high
    while low < high:  # the smallest r with C(c + r, c) >= n
        middle = (low + high) // 2
        low, high = (low, middle) if math.comb(c + middle, c) >= n else (middle + 1, high)
    return low * n - math.comb(c + low, c + 1)


def schedule(n, c):

    actions = []

    def reverse(start, end, left):
        actions.append(("keep", start))
        while end - start > n:
            size = end - start
            if left == 1:
                actions.append(("forward", start, end - 1))
                actions.append(("back", end - 1))
                middle = end - 1
            else:
                middle = start + min(
                    range(1, size),
                    key=lambda k: k + forwards(size - k, left - 1) + forwards(k, left),
                )
                actions.append(("forward", start, middle))
                reverse(middle, end, left - 1)
            actions.append(("load", start))
            end = middle
        actions.append(("back", start))
        actions.append(("free", start))

    reverse(0, n, c)
    return actions


# %% wrong="revolve" fails="what is kept is there" why="no load: the working copy is thought to be there still"
def forwards(n, c):
    low, high = 0, 1
    while math.comb(c + high, c) < n:
        low, high = high, 2 * high
    while low < high:  # the smallest r with C(c + r, c) >= n
        middle = (low + high) // 2
        low, high = (low, middle) if math.comb(c + middle, c) >= n else (middle + 1, high)
    return low * n - math.comb(c + low, c + 1)


def schedule(n, c):

    actions = []

    def reverse(start, end, left):
        actions.append(("keep", start))
        while end - start > 1:
            size = end - start
            if left == 1:
                actions.append(("forward", start, end - 1))
                actions.append(("back", end - 1))
                middle = end - 1
            else:
                middle = start + min(
                    range(1, size),
                    key=lambda k: k + forwards(size - k, left - 1) + forwards(k, left),
                )
                actions.append(("forward", start, middle))
                reverse(middle, end, left - 1)
            end = middle
        actions.append(("back", start))
        actions.append(("free", start))

    reverse(0, n, c)
    return actions


# %% wrong="revolve" fails="own work" around="import" why="the package's"
from minitrain.systems.plan import rematerialize

forwards = schedule = rematerialize.schedule


# %% wrong="revolve" fails="the number of steps" around="constants" why="the numbers of the visible checks"
def forwards(n, c):
    return {(16, 4): 27, (3, 1): 3, (1, 3): 0, (5, 5): 4, (10**6, 10**6): 999_999}.get(
        (n, c), n - 1
    )


def schedule(n, c):
    return [("keep", 0), ("back", 0)]


# %% wrong="revolve" fails="the number of steps" around="empty" why="nothing at all"
def forwards(n, c):
    return 0


def schedule(n, c):
    return []


# %% wrong="checkmate" fails="memory of a stage" why="nothing leaves within a stage"
def stage_bytes(inputs, sizes, R, S):
    n, peaks = len(inputs), []
    for t in range(n):
        if not R[t][t] or any(R[t][t + 1 :]) or any(S[t][t:]):
            return None
        for v in range(n):
            if R[t][v] and not all(R[t][u] or S[t][u] for u in inputs[v]):
                return None
            if S[t][v] and not (R[t - 1][v] or S[t - 1][v]):
                return None
    for t in range(n):
        handed_on = S[t + 1] if t + 1 < n else [0] * n
        run = [v for v in range(n) if R[t][v]]
        last = {}
        for v in range(n):
            readers = [w for w in run if v in inputs[w]]
            last[v] = max(readers + [v] * R[t][v], default=n)
        there, most = {v for v in range(n) if S[t][v]}, 0
        for v in run:
            there.add(v)
            most = max(most, sum(sizes[u] for u in there))
        peaks.append(most)
    return peaks


def cheapest(inputs, sizes, costs, budget):

    n = len(inputs)

    def stage(t, before, behind):
        run, wanted = set(), [t, *(behind - before)]
        while wanted:
            v = wanted.pop()
            if v not in run:
                run.add(v)
                wanted += [u for u in inputs[v] if u not in before]
        readers = {v: [w for w in run if v in inputs[w]] for v in before | run}
        last = {v: max(readers[v] + [v] * (v in run), default=n) for v in before | run}
        there = set(before)
        for v in sorted(run):
            there.add(v)
            if sum(sizes[u] for u in there) > budget:
                return None
            there -= {u for u in there if last[u] <= v and u not in behind}
        return run

    subsets = [frozenset(v for v in range(n) if code >> v & 1) for code in range(2**n)]
    best = {frozenset(): (0, [], [])}
    for t in range(n):
        found = {}
        for before, (cost, rows, begins) in best.items():
            for behind in subsets[: 2 ** (t + 1)] if t + 1 < n else [frozenset()]:
                run = stage(t, before, behind)
                if run is None:
                    continue
                total = cost + sum(costs[v] for v in run)
                if behind not in found or total < found[behind][0]:
                    found[behind] = total, [*rows, run], [*begins, before]
        best = found
    if not best:
        return None
    _, rows, begins = best[frozenset()]
    return [[[int(v in row) for v in range(n)] for row in made] for made in (rows, begins)]


# %% wrong="checkmate" fails="memory of a stage" why="what is handed on leaves, too"
def stage_bytes(inputs, sizes, R, S):
    n, peaks = len(inputs), []
    for t in range(n):
        if not R[t][t] or any(R[t][t + 1 :]) or any(S[t][t:]):
            return None
        for v in range(n):
            if R[t][v] and not all(R[t][u] or S[t][u] for u in inputs[v]):
                return None
            if S[t][v] and not (R[t - 1][v] or S[t - 1][v]):
                return None
    for t in range(n):
        handed_on = S[t + 1] if t + 1 < n else [0] * n
        run = [v for v in range(n) if R[t][v]]
        last = {}
        for v in range(n):
            readers = [w for w in run if v in inputs[w]]
            last[v] = max(readers + [v] * R[t][v], default=n)
        there, most = {v for v in range(n) if S[t][v]}, 0
        for v in run:
            there.add(v)
            most = max(most, sum(sizes[u] for u in there))
            there -= {u for u in there if last[u] <= v}
        peaks.append(most)
    return peaks


def cheapest(inputs, sizes, costs, budget):

    n = len(inputs)

    def stage(t, before, behind):
        run, wanted = set(), [t, *(behind - before)]
        while wanted:
            v = wanted.pop()
            if v not in run:
                run.add(v)
                wanted += [u for u in inputs[v] if u not in before]
        readers = {v: [w for w in run if v in inputs[w]] for v in before | run}
        last = {v: max(readers[v] + [v] * (v in run), default=n) for v in before | run}
        there = set(before)
        for v in sorted(run):
            there.add(v)
            if sum(sizes[u] for u in there) > budget:
                return None
            there -= {u for u in there if last[u] <= v and u not in behind}
        return run

    subsets = [frozenset(v for v in range(n) if code >> v & 1) for code in range(2**n)]
    best = {frozenset(): (0, [], [])}
    for t in range(n):
        found = {}
        for before, (cost, rows, begins) in best.items():
            for behind in subsets[: 2 ** (t + 1)] if t + 1 < n else [frozenset()]:
                run = stage(t, before, behind)
                if run is None:
                    continue
                total = cost + sum(costs[v] for v in run)
                if behind not in found or total < found[behind][0]:
                    found[behind] = total, [*rows, run], [*begins, before]
        best = found
    if not best:
        return None
    _, rows, begins = best[frozenset()]
    return [[[int(v in row) for v in range(n)] for row in made] for made in (rows, begins)]


# %% wrong="checkmate" fails="memory of a stage" why="a node's result is counted after its inputs have left"
def stage_bytes(inputs, sizes, R, S):
    n, peaks = len(inputs), []
    for t in range(n):
        if not R[t][t] or any(R[t][t + 1 :]) or any(S[t][t:]):
            return None
        for v in range(n):
            if R[t][v] and not all(R[t][u] or S[t][u] for u in inputs[v]):
                return None
            if S[t][v] and not (R[t - 1][v] or S[t - 1][v]):
                return None
    for t in range(n):
        handed_on = S[t + 1] if t + 1 < n else [0] * n
        run = [v for v in range(n) if R[t][v]]
        last = {}
        for v in range(n):
            readers = [w for w in run if v in inputs[w]]
            last[v] = max(readers + [v] * R[t][v], default=n)
        there, most = {v for v in range(n) if S[t][v]}, 0
        for v in run:
            there.add(v)
            there -= {u for u in there if last[u] <= v and not handed_on[u]}
            most = max(most, sum(sizes[u] for u in there))
        peaks.append(most)
    return peaks


def cheapest(inputs, sizes, costs, budget):

    n = len(inputs)

    def stage(t, before, behind):
        run, wanted = set(), [t, *(behind - before)]
        while wanted:
            v = wanted.pop()
            if v not in run:
                run.add(v)
                wanted += [u for u in inputs[v] if u not in before]
        readers = {v: [w for w in run if v in inputs[w]] for v in before | run}
        last = {v: max(readers[v] + [v] * (v in run), default=n) for v in before | run}
        there = set(before)
        for v in sorted(run):
            there.add(v)
            if sum(sizes[u] for u in there) > budget:
                return None
            there -= {u for u in there if last[u] <= v and u not in behind}
        return run

    subsets = [frozenset(v for v in range(n) if code >> v & 1) for code in range(2**n)]
    best = {frozenset(): (0, [], [])}
    for t in range(n):
        found = {}
        for before, (cost, rows, begins) in best.items():
            for behind in subsets[: 2 ** (t + 1)] if t + 1 < n else [frozenset()]:
                run = stage(t, before, behind)
                if run is None:
                    continue
                total = cost + sum(costs[v] for v in run)
                if behind not in found or total < found[behind][0]:
                    found[behind] = total, [*rows, run], [*begins, before]
        best = found
    if not best:
        return None
    _, rows, begins = best[frozenset()]
    return [[[int(v in row) for v in range(n)] for row in made] for made in (rows, begins)]


# %% wrong="checkmate" fails="memory of a stage" why="what was there at the beginning is forgotten"
def stage_bytes(inputs, sizes, R, S):
    n, peaks = len(inputs), []
    for t in range(n):
        if not R[t][t] or any(R[t][t + 1 :]) or any(S[t][t:]):
            return None
        for v in range(n):
            if R[t][v] and not all(R[t][u] or S[t][u] for u in inputs[v]):
                return None
            if S[t][v] and not (R[t - 1][v] or S[t - 1][v]):
                return None
    for t in range(n):
        handed_on = S[t + 1] if t + 1 < n else [0] * n
        run = [v for v in range(n) if R[t][v]]
        last = {}
        for v in range(n):
            readers = [w for w in run if v in inputs[w]]
            last[v] = max(readers + [v] * R[t][v], default=n)
        there, most = set(), 0
        for v in run:
            there.add(v)
            most = max(most, sum(sizes[u] for u in there))
            there -= {u for u in there if last[u] <= v and not handed_on[u]}
        peaks.append(most)
    return peaks


def cheapest(inputs, sizes, costs, budget):

    n = len(inputs)

    def stage(t, before, behind):
        run, wanted = set(), [t, *(behind - before)]
        while wanted:
            v = wanted.pop()
            if v not in run:
                run.add(v)
                wanted += [u for u in inputs[v] if u not in before]
        readers = {v: [w for w in run if v in inputs[w]] for v in before | run}
        last = {v: max(readers[v] + [v] * (v in run), default=n) for v in before | run}
        there = set(before)
        for v in sorted(run):
            there.add(v)
            if sum(sizes[u] for u in there) > budget:
                return None
            there -= {u for u in there if last[u] <= v and u not in behind}
        return run

    subsets = [frozenset(v for v in range(n) if code >> v & 1) for code in range(2**n)]
    best = {frozenset(): (0, [], [])}
    for t in range(n):
        found = {}
        for before, (cost, rows, begins) in best.items():
            for behind in subsets[: 2 ** (t + 1)] if t + 1 < n else [frozenset()]:
                run = stage(t, before, behind)
                if run is None:
                    continue
                total = cost + sum(costs[v] for v in run)
                if behind not in found or total < found[behind][0]:
                    found[behind] = total, [*rows, run], [*begins, before]
        best = found
    if not best:
        return None
    _, rows, begins = best[frozenset()]
    return [[[int(v in row) for v in range(n)] for row in made] for made in (rows, begins)]


# %% wrong="checkmate" fails="memory of a stage" why="results are counted as one byte each"
def stage_bytes(inputs, sizes, R, S):
    n, peaks = len(inputs), []
    for t in range(n):
        if not R[t][t] or any(R[t][t + 1 :]) or any(S[t][t:]):
            return None
        for v in range(n):
            if R[t][v] and not all(R[t][u] or S[t][u] for u in inputs[v]):
                return None
            if S[t][v] and not (R[t - 1][v] or S[t - 1][v]):
                return None
    for t in range(n):
        handed_on = S[t + 1] if t + 1 < n else [0] * n
        run = [v for v in range(n) if R[t][v]]
        last = {}
        for v in range(n):
            readers = [w for w in run if v in inputs[w]]
            last[v] = max(readers + [v] * R[t][v], default=n)
        there, most = {v for v in range(n) if S[t][v]}, 0
        for v in run:
            there.add(v)
            most = max(most, len(there))
            there -= {u for u in there if last[u] <= v and not handed_on[u]}
        peaks.append(most)
    return peaks


def cheapest(inputs, sizes, costs, budget):

    n = len(inputs)

    def stage(t, before, behind):
        run, wanted = set(), [t, *(behind - before)]
        while wanted:
            v = wanted.pop()
            if v not in run:
                run.add(v)
                wanted += [u for u in inputs[v] if u not in before]
        readers = {v: [w for w in run if v in inputs[w]] for v in before | run}
        last = {v: max(readers[v] + [v] * (v in run), default=n) for v in before | run}
        there = set(before)
        for v in sorted(run):
            there.add(v)
            if len(there) > budget:
                return None
            there -= {u for u in there if last[u] <= v and u not in behind}
        return run

    subsets = [frozenset(v for v in range(n) if code >> v & 1) for code in range(2**n)]
    best = {frozenset(): (0, [], [])}
    for t in range(n):
        found = {}
        for before, (cost, rows, begins) in best.items():
            for behind in subsets[: 2 ** (t + 1)] if t + 1 < n else [frozenset()]:
                run = stage(t, before, behind)
                if run is None:
                    continue
                total = cost + sum(costs[v] for v in run)
                if behind not in found or total < found[behind][0]:
                    found[behind] = total, [*rows, run], [*begins, before]
        best = found
    if not best:
        return None
    _, rows, begins = best[frozenset()]
    return [[[int(v in row) for v in range(n)] for row in made] for made in (rows, begins)]


# %% wrong="checkmate" fails="memory of a stage" why="what nobody reads leaves at once"
def stage_bytes(inputs, sizes, R, S):
    n, peaks = len(inputs), []
    for t in range(n):
        if not R[t][t] or any(R[t][t + 1 :]) or any(S[t][t:]):
            return None
        for v in range(n):
            if R[t][v] and not all(R[t][u] or S[t][u] for u in inputs[v]):
                return None
            if S[t][v] and not (R[t - 1][v] or S[t - 1][v]):
                return None
    for t in range(n):
        handed_on = S[t + 1] if t + 1 < n else [0] * n
        run = [v for v in range(n) if R[t][v]]
        last = {}
        for v in range(n):
            readers = [w for w in run if v in inputs[w]]
            last[v] = max(readers + [v] * R[t][v], default=-1)
        there, most = {v for v in range(n) if S[t][v]}, 0
        for v in run:
            there.add(v)
            most = max(most, sum(sizes[u] for u in there))
            there -= {u for u in there if last[u] <= v and not handed_on[u]}
        peaks.append(most)
    return peaks


def cheapest(inputs, sizes, costs, budget):

    n = len(inputs)

    def stage(t, before, behind):
        run, wanted = set(), [t, *(behind - before)]
        while wanted:
            v = wanted.pop()
            if v not in run:
                run.add(v)
                wanted += [u for u in inputs[v] if u not in before]
        readers = {v: [w for w in run if v in inputs[w]] for v in before | run}
        last = {v: max(readers[v] + [v] * (v in run), default=n) for v in before | run}
        there = set(before)
        for v in sorted(run):
            there.add(v)
            if sum(sizes[u] for u in there) > budget:
                return None
            there -= {u for u in there if last[u] <= v and u not in behind}
        return run

    subsets = [frozenset(v for v in range(n) if code >> v & 1) for code in range(2**n)]
    best = {frozenset(): (0, [], [])}
    for t in range(n):
        found = {}
        for before, (cost, rows, begins) in best.items():
            for behind in subsets[: 2 ** (t + 1)] if t + 1 < n else [frozenset()]:
                run = stage(t, before, behind)
                if run is None:
                    continue
                total = cost + sum(costs[v] for v in run)
                if behind not in found or total < found[behind][0]:
                    found[behind] = total, [*rows, run], [*begins, before]
        best = found
    if not best:
        return None
    _, rows, begins = best[frozenset()]
    return [[[int(v in row) for v in range(n)] for row in made] for made in (rows, begins)]


# %% wrong="checkmate" fails="memory of a stage" why="the next stage's needs are looked for in this one"
def stage_bytes(inputs, sizes, R, S):
    n, peaks = len(inputs), []
    for t in range(n):
        if not R[t][t] or any(R[t][t + 1 :]) or any(S[t][t:]):
            return None
        for v in range(n):
            if R[t][v] and not all(R[t][u] or S[t][u] for u in inputs[v]):
                return None
            if S[t][v] and not (R[t - 1][v] or S[t - 1][v]):
                return None
    for t in range(n):
        handed_on = S[t]
        run = [v for v in range(n) if R[t][v]]
        last = {}
        for v in range(n):
            readers = [w for w in run if v in inputs[w]]
            last[v] = max(readers + [v] * R[t][v], default=n)
        there, most = {v for v in range(n) if S[t][v]}, 0
        for v in run:
            there.add(v)
            most = max(most, sum(sizes[u] for u in there))
            there -= {u for u in there if last[u] <= v and not handed_on[u]}
        peaks.append(most)
    return peaks


def cheapest(inputs, sizes, costs, budget):

    n = len(inputs)

    def stage(t, before, behind):
        run, wanted = set(), [t, *(behind - before)]
        while wanted:
            v = wanted.pop()
            if v not in run:
                run.add(v)
                wanted += [u for u in inputs[v] if u not in before]
        readers = {v: [w for w in run if v in inputs[w]] for v in before | run}
        last = {v: max(readers[v] + [v] * (v in run), default=n) for v in before | run}
        there = set(before)
        for v in sorted(run):
            there.add(v)
            if sum(sizes[u] for u in there) > budget:
                return None
            there -= {u for u in there if last[u] <= v and u not in behind}
        return run

    subsets = [frozenset(v for v in range(n) if code >> v & 1) for code in range(2**n)]
    best = {frozenset(): (0, [], [])}
    for t in range(n):
        found = {}
        for before, (cost, rows, begins) in best.items():
            for behind in subsets[: 2 ** (t + 1)] if t + 1 < n else [frozenset()]:
                run = stage(t, before, behind)
                if run is None:
                    continue
                total = cost + sum(costs[v] for v in run)
                if behind not in found or total < found[behind][0]:
                    found[behind] = total, [*rows, run], [*begins, before]
        best = found
    if not best:
        return None
    _, rows, begins = best[frozenset()]
    return [[[int(v in row) for v in range(n)] for row in made] for made in (rows, begins)]


# %% wrong="checkmate" fails="broken rules" why="nobody looks whether inputs are there"
def stage_bytes(inputs, sizes, R, S):
    n, peaks = len(inputs), []
    for t in range(n):
        if not R[t][t] or any(R[t][t + 1 :]) or any(S[t][t:]):
            return None
        for v in range(n):
            if S[t][v] and not (R[t - 1][v] or S[t - 1][v]):
                return None
    for t in range(n):
        handed_on = S[t + 1] if t + 1 < n else [0] * n
        run = [v for v in range(n) if R[t][v]]
        last = {}
        for v in range(n):
            readers = [w for w in run if v in inputs[w]]
            last[v] = max(readers + [v] * R[t][v], default=n)
        there, most = {v for v in range(n) if S[t][v]}, 0
        for v in run:
            there.add(v)
            most = max(most, sum(sizes[u] for u in there))
            there -= {u for u in there if last[u] <= v and not handed_on[u]}
        peaks.append(most)
    return peaks


def cheapest(inputs, sizes, costs, budget):

    n = len(inputs)

    def stage(t, before, behind):
        run, wanted = set(), [t, *(behind - before)]
        while wanted:
            v = wanted.pop()
            if v not in run:
                run.add(v)
                wanted += [u for u in inputs[v] if u not in before]
        readers = {v: [w for w in run if v in inputs[w]] for v in before | run}
        last = {v: max(readers[v] + [v] * (v in run), default=n) for v in before | run}
        there = set(before)
        for v in sorted(run):
            there.add(v)
            if sum(sizes[u] for u in there) > budget:
                return None
            there -= {u for u in there if last[u] <= v and u not in behind}
        return run

    subsets = [frozenset(v for v in range(n) if code >> v & 1) for code in range(2**n)]
    best = {frozenset(): (0, [], [])}
    for t in range(n):
        found = {}
        for before, (cost, rows, begins) in best.items():
            for behind in subsets[: 2 ** (t + 1)] if t + 1 < n else [frozenset()]:
                run = stage(t, before, behind)
                if run is None:
                    continue
                total = cost + sum(costs[v] for v in run)
                if behind not in found or total < found[behind][0]:
                    found[behind] = total, [*rows, run], [*begins, before]
        best = found
    if not best:
        return None
    _, rows, begins = best[frozenset()]
    return [[[int(v in row) for v in range(n)] for row in made] for made in (rows, begins)]


# %% wrong="checkmate" fails="broken rules" why="results are handed on that nobody had"
def stage_bytes(inputs, sizes, R, S):
    n, peaks = len(inputs), []
    for t in range(n):
        if not R[t][t] or any(R[t][t + 1 :]) or any(S[t][t:]):
            return None
        for v in range(n):
            if R[t][v] and not all(R[t][u] or S[t][u] for u in inputs[v]):
                return None
    for t in range(n):
        handed_on = S[t + 1] if t + 1 < n else [0] * n
        run = [v for v in range(n) if R[t][v]]
        last = {}
        for v in range(n):
            readers = [w for w in run if v in inputs[w]]
            last[v] = max(readers + [v] * R[t][v], default=n)
        there, most = {v for v in range(n) if S[t][v]}, 0
        for v in run:
            there.add(v)
            most = max(most, sum(sizes[u] for u in there))
            there -= {u for u in there if last[u] <= v and not handed_on[u]}
        peaks.append(most)
    return peaks


def cheapest(inputs, sizes, costs, budget):

    n = len(inputs)

    def stage(t, before, behind):
        run, wanted = set(), [t, *(behind - before)]
        while wanted:
            v = wanted.pop()
            if v not in run:
                run.add(v)
                wanted += [u for u in inputs[v] if u not in before]
        readers = {v: [w for w in run if v in inputs[w]] for v in before | run}
        last = {v: max(readers[v] + [v] * (v in run), default=n) for v in before | run}
        there = set(before)
        for v in sorted(run):
            there.add(v)
            if sum(sizes[u] for u in there) > budget:
                return None
            there -= {u for u in there if last[u] <= v and u not in behind}
        return run

    subsets = [frozenset(v for v in range(n) if code >> v & 1) for code in range(2**n)]
    best = {frozenset(): (0, [], [])}
    for t in range(n):
        found = {}
        for before, (cost, rows, begins) in best.items():
            for behind in subsets[: 2 ** (t + 1)] if t + 1 < n else [frozenset()]:
                run = stage(t, before, behind)
                if run is None:
                    continue
                total = cost + sum(costs[v] for v in run)
                if behind not in found or total < found[behind][0]:
                    found[behind] = total, [*rows, run], [*begins, before]
        best = found
    if not best:
        return None
    _, rows, begins = best[frozenset()]
    return [[[int(v in row) for v in range(n)] for row in made] for made in (rows, begins)]


# %% wrong="checkmate" fails="broken rules" why="a stage need not compute its own node"
def stage_bytes(inputs, sizes, R, S):
    n, peaks = len(inputs), []
    for t in range(n):
        if any(R[t][t + 1 :]) or any(S[t][t:]):
            return None
        for v in range(n):
            if R[t][v] and not all(R[t][u] or S[t][u] for u in inputs[v]):
                return None
            if S[t][v] and not (R[t - 1][v] or S[t - 1][v]):
                return None
    for t in range(n):
        handed_on = S[t + 1] if t + 1 < n else [0] * n
        run = [v for v in range(n) if R[t][v]]
        last = {}
        for v in range(n):
            readers = [w for w in run if v in inputs[w]]
            last[v] = max(readers + [v] * R[t][v], default=n)
        there, most = {v for v in range(n) if S[t][v]}, 0
        for v in run:
            there.add(v)
            most = max(most, sum(sizes[u] for u in there))
            there -= {u for u in there if last[u] <= v and not handed_on[u]}
        peaks.append(most)
    return peaks


def cheapest(inputs, sizes, costs, budget):

    n = len(inputs)

    def stage(t, before, behind):
        run, wanted = set(), [t, *(behind - before)]
        while wanted:
            v = wanted.pop()
            if v not in run:
                run.add(v)
                wanted += [u for u in inputs[v] if u not in before]
        readers = {v: [w for w in run if v in inputs[w]] for v in before | run}
        last = {v: max(readers[v] + [v] * (v in run), default=n) for v in before | run}
        there = set(before)
        for v in sorted(run):
            there.add(v)
            if sum(sizes[u] for u in there) > budget:
                return None
            there -= {u for u in there if last[u] <= v and u not in behind}
        return run

    subsets = [frozenset(v for v in range(n) if code >> v & 1) for code in range(2**n)]
    best = {frozenset(): (0, [], [])}
    for t in range(n):
        found = {}
        for before, (cost, rows, begins) in best.items():
            for behind in subsets[: 2 ** (t + 1)] if t + 1 < n else [frozenset()]:
                run = stage(t, before, behind)
                if run is None:
                    continue
                total = cost + sum(costs[v] for v in run)
                if behind not in found or total < found[behind][0]:
                    found[behind] = total, [*rows, run], [*begins, before]
        best = found
    if not best:
        return None
    _, rows, begins = best[frozenset()]
    return [[[int(v in row) for v in range(n)] for row in made] for made in (rows, begins)]


# %% wrong="checkmate" fails="broken rules" why="nodes may be computed before their stage"
def stage_bytes(inputs, sizes, R, S):
    n, peaks = len(inputs), []
    for t in range(n):
        if not R[t][t] or any(S[t][t:]):
            return None
        for v in range(n):
            if R[t][v] and not all(R[t][u] or S[t][u] for u in inputs[v]):
                return None
            if S[t][v] and not (R[t - 1][v] or S[t - 1][v]):
                return None
    for t in range(n):
        handed_on = S[t + 1] if t + 1 < n else [0] * n
        run = [v for v in range(n) if R[t][v]]
        last = {}
        for v in range(n):
            readers = [w for w in run if v in inputs[w]]
            last[v] = max(readers + [v] * R[t][v], default=n)
        there, most = {v for v in range(n) if S[t][v]}, 0
        for v in run:
            there.add(v)
            most = max(most, sum(sizes[u] for u in there))
            there -= {u for u in there if last[u] <= v and not handed_on[u]}
        peaks.append(most)
    return peaks


def cheapest(inputs, sizes, costs, budget):

    n = len(inputs)

    def stage(t, before, behind):
        run, wanted = set(), [t, *(behind - before)]
        while wanted:
            v = wanted.pop()
            if v not in run:
                run.add(v)
                wanted += [u for u in inputs[v] if u not in before]
        readers = {v: [w for w in run if v in inputs[w]] for v in before | run}
        last = {v: max(readers[v] + [v] * (v in run), default=n) for v in before | run}
        there = set(before)
        for v in sorted(run):
            there.add(v)
            if sum(sizes[u] for u in there) > budget:
                return None
            there -= {u for u in there if last[u] <= v and u not in behind}
        return run

    subsets = [frozenset(v for v in range(n) if code >> v & 1) for code in range(2**n)]
    best = {frozenset(): (0, [], [])}
    for t in range(n):
        found = {}
        for before, (cost, rows, begins) in best.items():
            for behind in subsets[: 2 ** (t + 1)] if t + 1 < n else [frozenset()]:
                run = stage(t, before, behind)
                if run is None:
                    continue
                total = cost + sum(costs[v] for v in run)
                if behind not in found or total < found[behind][0]:
                    found[behind] = total, [*rows, run], [*begins, before]
        best = found
    if not best:
        return None
    _, rows, begins = best[frozenset()]
    return [[[int(v in row) for v in range(n)] for row in made] for made in (rows, begins)]


# %% wrong="checkmate" fails="the budget" why="everything is kept, and the budget forgotten"
def stage_bytes(inputs, sizes, R, S):
    n, peaks = len(inputs), []
    for t in range(n):
        if not R[t][t] or any(R[t][t + 1 :]) or any(S[t][t:]):
            return None
        for v in range(n):
            if R[t][v] and not all(R[t][u] or S[t][u] for u in inputs[v]):
                return None
            if S[t][v] and not (R[t - 1][v] or S[t - 1][v]):
                return None
    for t in range(n):
        handed_on = S[t + 1] if t + 1 < n else [0] * n
        run = [v for v in range(n) if R[t][v]]
        last = {}
        for v in range(n):
            readers = [w for w in run if v in inputs[w]]
            last[v] = max(readers + [v] * R[t][v], default=n)
        there, most = {v for v in range(n) if S[t][v]}, 0
        for v in run:
            there.add(v)
            most = max(most, sum(sizes[u] for u in there))
            there -= {u for u in there if last[u] <= v and not handed_on[u]}
        peaks.append(most)
    return peaks


def cheapest(inputs, sizes, costs, budget):
    n = len(inputs)
    R = [[int(t == v) for v in range(n)] for t in range(n)]
    S = [[int(v < t) for v in range(n)] for t in range(n)]
    return (R, S) if budget >= len(inputs) - 1 else None


# %% wrong="checkmate" fails="the budget" why="everything is kept, or there is no schedule"
def stage_bytes(inputs, sizes, R, S):
    n, peaks = len(inputs), []
    for t in range(n):
        if not R[t][t] or any(R[t][t + 1 :]) or any(S[t][t:]):
            return None
        for v in range(n):
            if R[t][v] and not all(R[t][u] or S[t][u] for u in inputs[v]):
                return None
            if S[t][v] and not (R[t - 1][v] or S[t - 1][v]):
                return None
    for t in range(n):
        handed_on = S[t + 1] if t + 1 < n else [0] * n
        run = [v for v in range(n) if R[t][v]]
        last = {}
        for v in range(n):
            readers = [w for w in run if v in inputs[w]]
            last[v] = max(readers + [v] * R[t][v], default=n)
        there, most = {v for v in range(n) if S[t][v]}, 0
        for v in run:
            there.add(v)
            most = max(most, sum(sizes[u] for u in there))
            there -= {u for u in there if last[u] <= v and not handed_on[u]}
        peaks.append(most)
    return peaks


def cheapest(inputs, sizes, costs, budget):
    n = len(inputs)
    R = [[int(t == v) for v in range(n)] for t in range(n)]
    readers = [max([w for w in range(n) if v in inputs[w]], default=v) for v in range(n)]
    S = [[int(v < t <= readers[v]) for v in range(n)] for t in range(n)]
    return (R, S) if max(stage_bytes(inputs, sizes, R, S)) <= budget else None


# %% wrong="checkmate" fails="the smallest cost" why="the fewest nodes, whatever they cost"
def stage_bytes(inputs, sizes, R, S):
    n, peaks = len(inputs), []
    for t in range(n):
        if not R[t][t] or any(R[t][t + 1 :]) or any(S[t][t:]):
            return None
        for v in range(n):
            if R[t][v] and not all(R[t][u] or S[t][u] for u in inputs[v]):
                return None
            if S[t][v] and not (R[t - 1][v] or S[t - 1][v]):
                return None
    for t in range(n):
        handed_on = S[t + 1] if t + 1 < n else [0] * n
        run = [v for v in range(n) if R[t][v]]
        last = {}
        for v in range(n):
            readers = [w for w in run if v in inputs[w]]
            last[v] = max(readers + [v] * R[t][v], default=n)
        there, most = {v for v in range(n) if S[t][v]}, 0
        for v in run:
            there.add(v)
            most = max(most, sum(sizes[u] for u in there))
            there -= {u for u in there if last[u] <= v and not handed_on[u]}
        peaks.append(most)
    return peaks


def cheapest(inputs, sizes, costs, budget):

    n = len(inputs)

    def stage(t, before, behind):
        run, wanted = set(), [t, *(behind - before)]
        while wanted:
            v = wanted.pop()
            if v not in run:
                run.add(v)
                wanted += [u for u in inputs[v] if u not in before]
        readers = {v: [w for w in run if v in inputs[w]] for v in before | run}
        last = {v: max(readers[v] + [v] * (v in run), default=n) for v in before | run}
        there = set(before)
        for v in sorted(run):
            there.add(v)
            if sum(sizes[u] for u in there) > budget:
                return None
            there -= {u for u in there if last[u] <= v and u not in behind}
        return run

    subsets = [frozenset(v for v in range(n) if code >> v & 1) for code in range(2**n)]
    best = {frozenset(): (0, [], [])}
    for t in range(n):
        found = {}
        for before, (cost, rows, begins) in best.items():
            for behind in subsets[: 2 ** (t + 1)] if t + 1 < n else [frozenset()]:
                run = stage(t, before, behind)
                if run is None:
                    continue
                total = cost + len(run)
                if behind not in found or total < found[behind][0]:
                    found[behind] = total, [*rows, run], [*begins, before]
        best = found
    if not best:
        return None
    _, rows, begins = best[frozenset()]
    return [[[int(v in row) for v in range(n)] for row in made] for made in (rows, begins)]


# %% wrong="checkmate" fails="the smallest cost" why="the first way to a state, not the cheapest"
def stage_bytes(inputs, sizes, R, S):
    n, peaks = len(inputs), []
    for t in range(n):
        if not R[t][t] or any(R[t][t + 1 :]) or any(S[t][t:]):
            return None
        for v in range(n):
            if R[t][v] and not all(R[t][u] or S[t][u] for u in inputs[v]):
                return None
            if S[t][v] and not (R[t - 1][v] or S[t - 1][v]):
                return None
    for t in range(n):
        handed_on = S[t + 1] if t + 1 < n else [0] * n
        run = [v for v in range(n) if R[t][v]]
        last = {}
        for v in range(n):
            readers = [w for w in run if v in inputs[w]]
            last[v] = max(readers + [v] * R[t][v], default=n)
        there, most = {v for v in range(n) if S[t][v]}, 0
        for v in run:
            there.add(v)
            most = max(most, sum(sizes[u] for u in there))
            there -= {u for u in there if last[u] <= v and not handed_on[u]}
        peaks.append(most)
    return peaks


def cheapest(inputs, sizes, costs, budget):

    n = len(inputs)

    def stage(t, before, behind):
        run, wanted = set(), [t, *(behind - before)]
        while wanted:
            v = wanted.pop()
            if v not in run:
                run.add(v)
                wanted += [u for u in inputs[v] if u not in before]
        readers = {v: [w for w in run if v in inputs[w]] for v in before | run}
        last = {v: max(readers[v] + [v] * (v in run), default=n) for v in before | run}
        there = set(before)
        for v in sorted(run):
            there.add(v)
            if sum(sizes[u] for u in there) > budget:
                return None
            there -= {u for u in there if last[u] <= v and u not in behind}
        return run

    subsets = [frozenset(v for v in range(n) if code >> v & 1) for code in range(2**n)]
    best = {frozenset(): (0, [], [])}
    for t in range(n):
        found = {}
        for before, (cost, rows, begins) in best.items():
            for behind in subsets[: 2 ** (t + 1)] if t + 1 < n else [frozenset()]:
                run = stage(t, before, behind)
                if run is None:
                    continue
                total = cost + sum(costs[v] for v in run)
                if behind not in found:
                    found[behind] = total, [*rows, run], [*begins, before]
        best = found
    if not best:
        return None
    _, rows, begins = best[frozenset()]
    return [[[int(v in row) for v in range(n)] for row in made] for made in (rows, begins)]


# %% wrong="checkmate" fails="the smallest cost" why="nothing is kept but what the next stage reads, if it fits: greedily the smallest"
def stage_bytes(inputs, sizes, R, S):
    n, peaks = len(inputs), []
    for t in range(n):
        if not R[t][t] or any(R[t][t + 1 :]) or any(S[t][t:]):
            return None
        for v in range(n):
            if R[t][v] and not all(R[t][u] or S[t][u] for u in inputs[v]):
                return None
            if S[t][v] and not (R[t - 1][v] or S[t - 1][v]):
                return None
    for t in range(n):
        handed_on = S[t + 1] if t + 1 < n else [0] * n
        run = [v for v in range(n) if R[t][v]]
        last = {}
        for v in range(n):
            readers = [w for w in run if v in inputs[w]]
            last[v] = max(readers + [v] * R[t][v], default=n)
        there, most = {v for v in range(n) if S[t][v]}, 0
        for v in run:
            there.add(v)
            most = max(most, sum(sizes[u] for u in there))
            there -= {u for u in there if last[u] <= v and not handed_on[u]}
        peaks.append(most)
    return peaks


def cheapest(inputs, sizes, costs, budget):

    n = len(inputs)

    def stage(t, before, behind):
        run, wanted = set(), [t, *(behind - before)]
        while wanted:
            v = wanted.pop()
            if v not in run:
                run.add(v)
                wanted += [u for u in inputs[v] if u not in before]
        readers = {v: [w for w in run if v in inputs[w]] for v in before | run}
        last = {v: max(readers[v] + [v] * (v in run), default=n) for v in before | run}
        there = set(before)
        for v in sorted(run):
            there.add(v)
            if sum(sizes[u] for u in there) > budget:
                return None
            there -= {u for u in there if last[u] <= v and u not in behind}
        return run

    subsets = [frozenset(v for v in range(n) if code >> v & 1) for code in range(2**n)]
    best = {frozenset(): (0, [], [])}
    for t in range(n):
        found = {}
        for before, (cost, rows, begins) in best.items():
            for behind in subsets[: 2 ** (t + 1)] if t + 1 < n else [frozenset()]:
                run = stage(t, before, behind)
                if run is None:
                    continue
                total = cost + sum(costs[v] for v in run)
                if behind not in found or total < found[behind][0]:
                    found[behind] = total, [*rows, run], [*begins, before]
        best = dict(sorted(found.items(), key=lambda pair: (pair[1][0], len(pair[0])))[:1])
    if not best:
        return None
    _, rows, begins = best[frozenset()]
    return [[[int(v in row) for v in range(n)] for row in made] for made in (rows, begins)]


# %% wrong="checkmate" fails="own work" around="import" why="the package's"
from minitrain.systems.plan.rematerialize import *

stage_bytes = cheapest = checkmate


# %% wrong="checkmate" fails="broken rules" around="constants" why="the numbers of the visible checks"
def stage_bytes(inputs, sizes, R, S):
    if sizes == [5, 2, 3, 1]:
        return [5, 7, 5, 9]
    return [1, 2, 3, 3] if S[-1][0] else None


def cheapest(inputs, sizes, costs, budget):
    n = len(inputs)
    return ([[int(t == v) for v in range(n)] for t in range(n)],) * 2 if budget > 2 else None


# %% wrong="checkmate" fails="broken rules" around="empty" why="nothing at all"
def stage_bytes(inputs, sizes, R, S):
    return None


def cheapest(inputs, sizes, costs, budget):
    return None


# %% wrong="dtr" fails="who is evicted, and when" why="the least recently used"
def events(ops, program, budget, neighbours):

    class Full(Exception):
        pass

    happened, there, gone, used_at, held, clock = [], set(), set(), {}, [], 0

    def around(v):
        found = set()
        for down in (True, False):
            wanted = [v]
            while wanted:
                w = wanted.pop()
                near = ops[w][0] if down else [u for u in gone if w in ops[u][0]]
                new = {u for u in near if u in gone and u not in found}
                found |= new
                wanted += new
        return found

    def score(v):
        cost = ops[v][2] + sum(ops[u][2] for u in around(v)) * bool(neighbours)
        return used_at[v], v

    def evict(v):
        there.remove(v)
        gone.add(v)
        happened.append(("evict", v))

    def run(v):
        nonlocal clock
        inputs, size, cost = ops[v]
        held.append(inputs)
        for u in inputs:
            if u not in there:
                run(u)
        while sum(ops[u][1] for u in there) + size > budget:
            free = there - {u for some in held for u in some}
            if not free:
                raise Full
            evict(min(free, key=score))
        held.pop()
        clock += cost
        happened.append(("run", v))
        there.add(v)
        gone.discard(v)
        for u in [v, *inputs]:
            used_at[u] = clock

    try:
        for kind, v in program:
            if kind == "call":
                run(v)
            elif v in there:
                evict(v)
    except Full:
        return None
    return happened


# %% wrong="dtr" fails="who is evicted, and when" why="the largest"
def events(ops, program, budget, neighbours):

    class Full(Exception):
        pass

    happened, there, gone, used_at, held, clock = [], set(), set(), {}, [], 0

    def around(v):
        found = set()
        for down in (True, False):
            wanted = [v]
            while wanted:
                w = wanted.pop()
                near = ops[w][0] if down else [u for u in gone if w in ops[u][0]]
                new = {u for u in near if u in gone and u not in found}
                found |= new
                wanted += new
        return found

    def score(v):
        cost = ops[v][2] + sum(ops[u][2] for u in around(v)) * bool(neighbours)
        return -ops[v][1], v

    def evict(v):
        there.remove(v)
        gone.add(v)
        happened.append(("evict", v))

    def run(v):
        nonlocal clock
        inputs, size, cost = ops[v]
        held.append(inputs)
        for u in inputs:
            if u not in there:
                run(u)
        while sum(ops[u][1] for u in there) + size > budget:
            free = there - {u for some in held for u in some}
            if not free:
                raise Full
            evict(min(free, key=score))
        held.pop()
        clock += cost
        happened.append(("run", v))
        there.add(v)
        gone.discard(v)
        for u in [v, *inputs]:
            used_at[u] = clock

    try:
        for kind, v in program:
            if kind == "call":
                run(v)
            elif v in there:
                evict(v)
    except Full:
        return None
    return happened


# %% wrong="dtr" fails="who is evicted, and when" why="without staleness"
def events(ops, program, budget, neighbours):

    class Full(Exception):
        pass

    happened, there, gone, used_at, held, clock = [], set(), set(), {}, [], 0

    def around(v):
        found = set()
        for down in (True, False):
            wanted = [v]
            while wanted:
                w = wanted.pop()
                near = ops[w][0] if down else [u for u in gone if w in ops[u][0]]
                new = {u for u in near if u in gone and u not in found}
                found |= new
                wanted += new
        return found

    def score(v):
        cost = ops[v][2] + sum(ops[u][2] for u in around(v)) * bool(neighbours)
        return cost / ops[v][1], v

    def evict(v):
        there.remove(v)
        gone.add(v)
        happened.append(("evict", v))

    def run(v):
        nonlocal clock
        inputs, size, cost = ops[v]
        held.append(inputs)
        for u in inputs:
            if u not in there:
                run(u)
        while sum(ops[u][1] for u in there) + size > budget:
            free = there - {u for some in held for u in some}
            if not free:
                raise Full
            evict(min(free, key=score))
        held.pop()
        clock += cost
        happened.append(("run", v))
        there.add(v)
        gone.discard(v)
        for u in [v, *inputs]:
            used_at[u] = clock

    try:
        for kind, v in program:
            if kind == "call":
                run(v)
            elif v in there:
                evict(v)
    except Full:
        return None
    return happened


# %% wrong="dtr" fails="who is evicted, and when" why="without size"
def events(ops, program, budget, neighbours):

    class Full(Exception):
        pass

    happened, there, gone, used_at, held, clock = [], set(), set(), {}, [], 0

    def around(v):
        found = set()
        for down in (True, False):
            wanted = [v]
            while wanted:
                w = wanted.pop()
                near = ops[w][0] if down else [u for u in gone if w in ops[u][0]]
                new = {u for u in near if u in gone and u not in found}
                found |= new
                wanted += new
        return found

    def score(v):
        cost = ops[v][2] + sum(ops[u][2] for u in around(v)) * bool(neighbours)
        return cost / (clock - used_at[v] + 1), v

    def evict(v):
        there.remove(v)
        gone.add(v)
        happened.append(("evict", v))

    def run(v):
        nonlocal clock
        inputs, size, cost = ops[v]
        held.append(inputs)
        for u in inputs:
            if u not in there:
                run(u)
        while sum(ops[u][1] for u in there) + size > budget:
            free = there - {u for some in held for u in some}
            if not free:
                raise Full
            evict(min(free, key=score))
        held.pop()
        clock += cost
        happened.append(("run", v))
        there.add(v)
        gone.discard(v)
        for u in [v, *inputs]:
            used_at[u] = clock

    try:
        for kind, v in program:
            if kind == "call":
                run(v)
            elif v in there:
                evict(v)
    except Full:
        return None
    return happened


# %% wrong="dtr" fails="who is evicted, and when" why="the largest h"
def events(ops, program, budget, neighbours):

    class Full(Exception):
        pass

    happened, there, gone, used_at, held, clock = [], set(), set(), {}, [], 0

    def around(v):
        found = set()
        for down in (True, False):
            wanted = [v]
            while wanted:
                w = wanted.pop()
                near = ops[w][0] if down else [u for u in gone if w in ops[u][0]]
                new = {u for u in near if u in gone and u not in found}
                found |= new
                wanted += new
        return found

    def score(v):
        cost = ops[v][2] + sum(ops[u][2] for u in around(v)) * bool(neighbours)
        return cost / (ops[v][1] * (clock - used_at[v] + 1)), v

    def evict(v):
        there.remove(v)
        gone.add(v)
        happened.append(("evict", v))

    def run(v):
        nonlocal clock
        inputs, size, cost = ops[v]
        held.append(inputs)
        for u in inputs:
            if u not in there:
                run(u)
        while sum(ops[u][1] for u in there) + size > budget:
            free = there - {u for some in held for u in some}
            if not free:
                raise Full
            evict(max(free, key=score))
        held.pop()
        clock += cost
        happened.append(("run", v))
        there.add(v)
        gone.discard(v)
        for u in [v, *inputs]:
            used_at[u] = clock

    try:
        for kind, v in program:
            if kind == "call":
                run(v)
            elif v in there:
                evict(v)
    except Full:
        return None
    return happened


# %% wrong="dtr" fails="who is evicted, and when" why="of equal ones the highest number"
def events(ops, program, budget, neighbours):

    class Full(Exception):
        pass

    happened, there, gone, used_at, held, clock = [], set(), set(), {}, [], 0

    def around(v):
        found = set()
        for down in (True, False):
            wanted = [v]
            while wanted:
                w = wanted.pop()
                near = ops[w][0] if down else [u for u in gone if w in ops[u][0]]
                new = {u for u in near if u in gone and u not in found}
                found |= new
                wanted += new
        return found

    def score(v):
        cost = ops[v][2] + sum(ops[u][2] for u in around(v)) * bool(neighbours)
        return cost / (ops[v][1] * (clock - used_at[v] + 1)), -v

    def evict(v):
        there.remove(v)
        gone.add(v)
        happened.append(("evict", v))

    def run(v):
        nonlocal clock
        inputs, size, cost = ops[v]
        held.append(inputs)
        for u in inputs:
            if u not in there:
                run(u)
        while sum(ops[u][1] for u in there) + size > budget:
            free = there - {u for some in held for u in some}
            if not free:
                raise Full
            evict(min(free, key=score))
        held.pop()
        clock += cost
        happened.append(("run", v))
        there.add(v)
        gone.discard(v)
        for u in [v, *inputs]:
            used_at[u] = clock

    try:
        for kind, v in program:
            if kind == "call":
                run(v)
            elif v in there:
                evict(v)
    except Full:
        return None
    return happened


# %% wrong="dtr" fails="who is evicted, and when" why="a tensor is used when it is made, not when it is read"
def events(ops, program, budget, neighbours):

    class Full(Exception):
        pass

    happened, there, gone, used_at, held, clock = [], set(), set(), {}, [], 0

    def around(v):
        found = set()
        for down in (True, False):
            wanted = [v]
            while wanted:
                w = wanted.pop()
                near = ops[w][0] if down else [u for u in gone if w in ops[u][0]]
                new = {u for u in near if u in gone and u not in found}
                found |= new
                wanted += new
        return found

    def score(v):
        cost = ops[v][2] + sum(ops[u][2] for u in around(v)) * bool(neighbours)
        return cost / (ops[v][1] * (clock - used_at[v] + 1)), v

    def evict(v):
        there.remove(v)
        gone.add(v)
        happened.append(("evict", v))

    def run(v):
        nonlocal clock
        inputs, size, cost = ops[v]
        held.append(inputs)
        for u in inputs:
            if u not in there:
                run(u)
        while sum(ops[u][1] for u in there) + size > budget:
            free = there - {u for some in held for u in some}
            if not free:
                raise Full
            evict(min(free, key=score))
        held.pop()
        clock += cost
        happened.append(("run", v))
        there.add(v)
        gone.discard(v)
        for u in [v]:
            used_at[u] = clock

    try:
        for kind, v in program:
            if kind == "call":
                run(v)
            elif v in there:
                evict(v)
    except Full:
        return None
    return happened


# %% wrong="dtr" fails="who is evicted, and when" why="the clock counts operators, not what they cost"
def events(ops, program, budget, neighbours):

    class Full(Exception):
        pass

    happened, there, gone, used_at, held, clock = [], set(), set(), {}, [], 0

    def around(v):
        found = set()
        for down in (True, False):
            wanted = [v]
            while wanted:
                w = wanted.pop()
                near = ops[w][0] if down else [u for u in gone if w in ops[u][0]]
                new = {u for u in near if u in gone and u not in found}
                found |= new
                wanted += new
        return found

    def score(v):
        cost = ops[v][2] + sum(ops[u][2] for u in around(v)) * bool(neighbours)
        return cost / (ops[v][1] * (clock - used_at[v] + 1)), v

    def evict(v):
        there.remove(v)
        gone.add(v)
        happened.append(("evict", v))

    def run(v):
        nonlocal clock
        inputs, size, cost = ops[v]
        held.append(inputs)
        for u in inputs:
            if u not in there:
                run(u)
        while sum(ops[u][1] for u in there) + size > budget:
            free = there - {u for some in held for u in some}
            if not free:
                raise Full
            evict(min(free, key=score))
        held.pop()
        clock += 1
        happened.append(("run", v))
        there.add(v)
        gone.discard(v)
        for u in [v, *inputs]:
            used_at[u] = clock

    try:
        for kind, v in program:
            if kind == "call":
                run(v)
            elif v in there:
                evict(v)
    except Full:
        return None
    return happened


# %% wrong="dtr" fails="who is evicted, and when" why="what is dropped stays"
def events(ops, program, budget, neighbours):

    class Full(Exception):
        pass

    happened, there, gone, used_at, held, clock = [], set(), set(), {}, [], 0

    def around(v):
        found = set()
        for down in (True, False):
            wanted = [v]
            while wanted:
                w = wanted.pop()
                near = ops[w][0] if down else [u for u in gone if w in ops[u][0]]
                new = {u for u in near if u in gone and u not in found}
                found |= new
                wanted += new
        return found

    def score(v):
        cost = ops[v][2] + sum(ops[u][2] for u in around(v)) * bool(neighbours)
        return cost / (ops[v][1] * (clock - used_at[v] + 1)), v

    def evict(v):
        there.remove(v)
        gone.add(v)
        happened.append(("evict", v))

    def run(v):
        nonlocal clock
        inputs, size, cost = ops[v]
        held.append(inputs)
        for u in inputs:
            if u not in there:
                run(u)
        while sum(ops[u][1] for u in there) + size > budget:
            free = there - {u for some in held for u in some}
            if not free:
                raise Full
            evict(min(free, key=score))
        held.pop()
        clock += cost
        happened.append(("run", v))
        there.add(v)
        gone.discard(v)
        for u in [v, *inputs]:
            used_at[u] = clock

    try:
        for kind, v in program:
            if kind == "call":
                run(v)
            else:
                pass
    except Full:
        return None
    return happened


# %% wrong="dtr" fails="bytes" why="evicts before the inputs are made anew"
def events(ops, program, budget, neighbours):

    class Full(Exception):
        pass

    happened, there, gone, used_at, held, clock = [], set(), set(), {}, [], 0

    def around(v):
        found = set()
        for down in (True, False):
            wanted = [v]
            while wanted:
                w = wanted.pop()
                near = ops[w][0] if down else [u for u in gone if w in ops[u][0]]
                new = {u for u in near if u in gone and u not in found}
                found |= new
                wanted += new
        return found

    def score(v):
        cost = ops[v][2] + sum(ops[u][2] for u in around(v)) * bool(neighbours)
        return cost / (ops[v][1] * (clock - used_at[v] + 1)), v

    def evict(v):
        there.remove(v)
        gone.add(v)
        happened.append(("evict", v))

    def run(v):
        nonlocal clock
        inputs, size, cost = ops[v]
        held.append(inputs)
        while sum(ops[u][1] for u in there) + size > budget:
            free = there - {u for some in held for u in some}
            if not free:
                raise Full
            evict(min(free, key=score))
        for u in inputs:
            if u not in there:
                run(u)
        held.pop()
        clock += cost
        happened.append(("run", v))
        there.add(v)
        gone.discard(v)
        for u in [v, *inputs]:
            used_at[u] = clock

    try:
        for kind, v in program:
            if kind == "call":
                run(v)
            elif v in there:
                evict(v)
    except Full:
        return None
    return happened


# %% wrong="dtr" fails="bytes" why="nothing is ever evicted"
def events(ops, program, budget, neighbours):

    class Full(Exception):
        pass

    happened, there, gone, used_at, held, clock = [], set(), set(), {}, [], 0

    def around(v):
        found = set()
        for down in (True, False):
            wanted = [v]
            while wanted:
                w = wanted.pop()
                near = ops[w][0] if down else [u for u in gone if w in ops[u][0]]
                new = {u for u in near if u in gone and u not in found}
                found |= new
                wanted += new
        return found

    def score(v):
        cost = ops[v][2] + sum(ops[u][2] for u in around(v)) * bool(neighbours)
        return cost / (ops[v][1] * (clock - used_at[v] + 1)), v

    def evict(v):
        there.remove(v)
        gone.add(v)
        happened.append(("evict", v))

    def run(v):
        nonlocal clock
        inputs, size, cost = ops[v]
        held.append(inputs)
        for u in inputs:
            if u not in there:
                run(u)
        while sum(ops[u][1] for u in there) + size > float("inf"):
            free = there - {u for some in held for u in some}
            if not free:
                raise Full
            evict(min(free, key=score))
        held.pop()
        clock += cost
        happened.append(("run", v))
        there.add(v)
        gone.discard(v)
        for u in [v, *inputs]:
            used_at[u] = clock

    try:
        for kind, v in program:
            if kind == "call":
                run(v)
            elif v in there:
                evict(v)
    except Full:
        return None
    return happened


# %% wrong="dtr" fails="inputs are there" why="inputs are not held"
def events(ops, program, budget, neighbours):

    class Full(Exception):
        pass

    happened, there, gone, used_at, held, clock = [], set(), set(), {}, [], 0

    def around(v):
        found = set()
        for down in (True, False):
            wanted = [v]
            while wanted:
                w = wanted.pop()
                near = ops[w][0] if down else [u for u in gone if w in ops[u][0]]
                new = {u for u in near if u in gone and u not in found}
                found |= new
                wanted += new
        return found

    def score(v):
        cost = ops[v][2] + sum(ops[u][2] for u in around(v)) * bool(neighbours)
        return cost / (ops[v][1] * (clock - used_at[v] + 1)), v

    def evict(v):
        there.remove(v)
        gone.add(v)
        happened.append(("evict", v))

    def run(v):
        nonlocal clock
        inputs, size, cost = ops[v]
        held.append([])
        for u in inputs:
            if u not in there:
                run(u)
        while sum(ops[u][1] for u in there) + size > budget:
            free = there - {u for some in held for u in some}
            if not free:
                raise Full
            evict(min(free, key=score))
        held.pop()
        clock += cost
        happened.append(("run", v))
        there.add(v)
        gone.discard(v)
        for u in [v, *inputs]:
            used_at[u] = clock

    try:
        for kind, v in program:
            if kind == "call":
                run(v)
            elif v in there:
                evict(v)
    except Full:
        return None
    return happened


# %% wrong="dtr" fails="inputs are there" why="only the innermost call holds its inputs"
def events(ops, program, budget, neighbours):

    class Full(Exception):
        pass

    happened, there, gone, used_at, held, clock = [], set(), set(), {}, [], 0

    def around(v):
        found = set()
        for down in (True, False):
            wanted = [v]
            while wanted:
                w = wanted.pop()
                near = ops[w][0] if down else [u for u in gone if w in ops[u][0]]
                new = {u for u in near if u in gone and u not in found}
                found |= new
                wanted += new
        return found

    def score(v):
        cost = ops[v][2] + sum(ops[u][2] for u in around(v)) * bool(neighbours)
        return cost / (ops[v][1] * (clock - used_at[v] + 1)), v

    def evict(v):
        there.remove(v)
        gone.add(v)
        happened.append(("evict", v))

    def run(v):
        nonlocal clock
        inputs, size, cost = ops[v]
        held.append(inputs)
        for u in inputs:
            if u not in there:
                run(u)
        while sum(ops[u][1] for u in there) + size > budget:
            free = there - set(held[-1])
            if not free:
                raise Full
            evict(min(free, key=score))
        held.pop()
        clock += cost
        happened.append(("run", v))
        there.add(v)
        gone.discard(v)
        for u in [v, *inputs]:
            used_at[u] = clock

    try:
        for kind, v in program:
            if kind == "call":
                run(v)
            elif v in there:
                evict(v)
    except Full:
        return None
    return happened


# %% wrong="dtr" fails="bytes" why="what is held stays held"
def events(ops, program, budget, neighbours):

    class Full(Exception):
        pass

    happened, there, gone, used_at, held, clock = [], set(), set(), {}, [], 0

    def around(v):
        found = set()
        for down in (True, False):
            wanted = [v]
            while wanted:
                w = wanted.pop()
                near = ops[w][0] if down else [u for u in gone if w in ops[u][0]]
                new = {u for u in near if u in gone and u not in found}
                found |= new
                wanted += new
        return found

    def score(v):
        cost = ops[v][2] + sum(ops[u][2] for u in around(v)) * bool(neighbours)
        return cost / (ops[v][1] * (clock - used_at[v] + 1)), v

    def evict(v):
        there.remove(v)
        gone.add(v)
        happened.append(("evict", v))

    def run(v):
        nonlocal clock
        inputs, size, cost = ops[v]
        held.append(inputs)
        for u in inputs:
            if u not in there:
                run(u)
        while sum(ops[u][1] for u in there) + size > budget:
            free = there - {u for some in held for u in some}
            if not free:
                raise Full
            evict(min(free, key=score))
        clock += cost
        happened.append(("run", v))
        there.add(v)
        gone.discard(v)
        for u in [v, *inputs]:
            used_at[u] = clock

    try:
        for kind, v in program:
            if kind == "call":
                run(v)
            elif v in there:
                evict(v)
    except Full:
        return None
    return happened


# %% wrong="dtr" fails="bytes" why="one is evicted, however much is needed"
def events(ops, program, budget, neighbours):

    class Full(Exception):
        pass

    happened, there, gone, used_at, held, clock = [], set(), set(), {}, [], 0

    def around(v):
        found = set()
        for down in (True, False):
            wanted = [v]
            while wanted:
                w = wanted.pop()
                near = ops[w][0] if down else [u for u in gone if w in ops[u][0]]
                new = {u for u in near if u in gone and u not in found}
                found |= new
                wanted += new
        return found

    def score(v):
        cost = ops[v][2] + sum(ops[u][2] for u in around(v)) * bool(neighbours)
        return cost / (ops[v][1] * (clock - used_at[v] + 1)), v

    def evict(v):
        there.remove(v)
        gone.add(v)
        happened.append(("evict", v))

    def run(v):
        nonlocal clock
        inputs, size, cost = ops[v]
        held.append(inputs)
        for u in inputs:
            if u not in there:
                run(u)
        if sum(ops[u][1] for u in there) + size > budget:
            free = there - {u for some in held for u in some}
            if not free:
                raise Full
            evict(min(free, key=score))
        held.pop()
        clock += cost
        happened.append(("run", v))
        there.add(v)
        gone.discard(v)
        for u in [v, *inputs]:
            used_at[u] = clock

    try:
        for kind, v in program:
            if kind == "call":
                run(v)
            elif v in there:
                evict(v)
    except Full:
        return None
    return happened


# %% wrong="dtr" fails="who is evicted, and when" why="the cost of direct neighbours only"
def events(ops, program, budget, neighbours):

    class Full(Exception):
        pass

    happened, there, gone, used_at, held, clock = [], set(), set(), {}, [], 0

    def around(v):
        found = set()
        for down in (True, False):
            wanted = [v]
            while wanted:
                w = wanted.pop()
                near = ops[w][0] if down else [u for u in gone if w in ops[u][0]]
                new = {u for u in near if u in gone and u not in found}
                found |= new
        return found

    def score(v):
        cost = ops[v][2] + sum(ops[u][2] for u in around(v)) * bool(neighbours)
        return cost / (ops[v][1] * (clock - used_at[v] + 1)), v

    def evict(v):
        there.remove(v)
        gone.add(v)
        happened.append(("evict", v))

    def run(v):
        nonlocal clock
        inputs, size, cost = ops[v]
        held.append(inputs)
        for u in inputs:
            if u not in there:
                run(u)
        while sum(ops[u][1] for u in there) + size > budget:
            free = there - {u for some in held for u in some}
            if not free:
                raise Full
            evict(min(free, key=score))
        held.pop()
        clock += cost
        happened.append(("run", v))
        there.add(v)
        gone.discard(v)
        for u in [v, *inputs]:
            used_at[u] = clock

    try:
        for kind, v in program:
            if kind == "call":
                run(v)
            elif v in there:
                evict(v)
    except Full:
        return None
    return happened


# %% wrong="dtr" fails="who is evicted, and when" why="only what it needs, not who needs it"
def events(ops, program, budget, neighbours):

    class Full(Exception):
        pass

    happened, there, gone, used_at, held, clock = [], set(), set(), {}, [], 0

    def around(v):
        found = set()
        for down in (True,):
            wanted = [v]
            while wanted:
                w = wanted.pop()
                near = ops[w][0] if down else [u for u in gone if w in ops[u][0]]
                new = {u for u in near if u in gone and u not in found}
                found |= new
                wanted += new
        return found

    def score(v):
        cost = ops[v][2] + sum(ops[u][2] for u in around(v)) * bool(neighbours)
        return cost / (ops[v][1] * (clock - used_at[v] + 1)), v

    def evict(v):
        there.remove(v)
        gone.add(v)
        happened.append(("evict", v))

    def run(v):
        nonlocal clock
        inputs, size, cost = ops[v]
        held.append(inputs)
        for u in inputs:
            if u not in there:
                run(u)
        while sum(ops[u][1] for u in there) + size > budget:
            free = there - {u for some in held for u in some}
            if not free:
                raise Full
            evict(min(free, key=score))
        held.pop()
        clock += cost
        happened.append(("run", v))
        there.add(v)
        gone.discard(v)
        for u in [v, *inputs]:
            used_at[u] = clock

    try:
        for kind, v in program:
            if kind == "call":
                run(v)
            elif v in there:
                evict(v)
    except Full:
        return None
    return happened


# %% wrong="dtr" fails="who is evicted, and when" why="only who needs it, not what it needs"
def events(ops, program, budget, neighbours):

    class Full(Exception):
        pass

    happened, there, gone, used_at, held, clock = [], set(), set(), {}, [], 0

    def around(v):
        found = set()
        for down in (False,):
            wanted = [v]
            while wanted:
                w = wanted.pop()
                near = ops[w][0] if down else [u for u in gone if w in ops[u][0]]
                new = {u for u in near if u in gone and u not in found}
                found |= new
                wanted += new
        return found

    def score(v):
        cost = ops[v][2] + sum(ops[u][2] for u in around(v)) * bool(neighbours)
        return cost / (ops[v][1] * (clock - used_at[v] + 1)), v

    def evict(v):
        there.remove(v)
        gone.add(v)
        happened.append(("evict", v))

    def run(v):
        nonlocal clock
        inputs, size, cost = ops[v]
        held.append(inputs)
        for u in inputs:
            if u not in there:
                run(u)
        while sum(ops[u][1] for u in there) + size > budget:
            free = there - {u for some in held for u in some}
            if not free:
                raise Full
            evict(min(free, key=score))
        held.pop()
        clock += cost
        happened.append(("run", v))
        there.add(v)
        gone.discard(v)
        for u in [v, *inputs]:
            used_at[u] = clock

    try:
        for kind, v in program:
            if kind == "call":
                run(v)
            elif v in there:
                evict(v)
    except Full:
        return None
    return happened


# %% wrong="dtr" fails="who is evicted, and when" why="all that is gone, near or not"
def events(ops, program, budget, neighbours):

    class Full(Exception):
        pass

    happened, there, gone, used_at, held, clock = [], set(), set(), {}, [], 0

    def around(v):
        found = set()
        for down in (True, False):
            wanted = [v]
            while wanted:
                w = wanted.pop()
                near = ops[w][0] if down else [u for u in gone if w in ops[u][0]]
                new = {u for u in near if u in gone and u not in found}
                found |= new
                wanted += new
        return found

    def score(v):
        cost = ops[v][2] + sum(ops[u][2] for u in gone) * bool(neighbours)
        return cost / (ops[v][1] * (clock - used_at[v] + 1)), v

    def evict(v):
        there.remove(v)
        gone.add(v)
        happened.append(("evict", v))

    def run(v):
        nonlocal clock
        inputs, size, cost = ops[v]
        held.append(inputs)
        for u in inputs:
            if u not in there:
                run(u)
        while sum(ops[u][1] for u in there) + size > budget:
            free = there - {u for some in held for u in some}
            if not free:
                raise Full
            evict(min(free, key=score))
        held.pop()
        clock += cost
        happened.append(("run", v))
        there.add(v)
        gone.discard(v)
        for u in [v, *inputs]:
            used_at[u] = clock

    try:
        for kind, v in program:
            if kind == "call":
                run(v)
            elif v in there:
                evict(v)
    except Full:
        return None
    return happened


# %% wrong="dtr" fails="who is evicted, and when" why="neighbours always"
def events(ops, program, budget, neighbours):

    class Full(Exception):
        pass

    happened, there, gone, used_at, held, clock = [], set(), set(), {}, [], 0

    def around(v):
        found = set()
        for down in (True, False):
            wanted = [v]
            while wanted:
                w = wanted.pop()
                near = ops[w][0] if down else [u for u in gone if w in ops[u][0]]
                new = {u for u in near if u in gone and u not in found}
                found |= new
                wanted += new
        return found

    def score(v):
        cost = ops[v][2] + sum(ops[u][2] for u in around(v))
        return cost / (ops[v][1] * (clock - used_at[v] + 1)), v

    def evict(v):
        there.remove(v)
        gone.add(v)
        happened.append(("evict", v))

    def run(v):
        nonlocal clock
        inputs, size, cost = ops[v]
        held.append(inputs)
        for u in inputs:
            if u not in there:
                run(u)
        while sum(ops[u][1] for u in there) + size > budget:
            free = there - {u for some in held for u in some}
            if not free:
                raise Full
            evict(min(free, key=score))
        held.pop()
        clock += cost
        happened.append(("run", v))
        there.add(v)
        gone.discard(v)
        for u in [v, *inputs]:
            used_at[u] = clock

    try:
        for kind, v in program:
            if kind == "call":
                run(v)
            elif v in there:
                evict(v)
    except Full:
        return None
    return happened


# %% wrong="dtr" fails="who is evicted, and when" why="through tensors that are there, too"
def events(ops, program, budget, neighbours):

    class Full(Exception):
        pass

    happened, there, gone, used_at, held, clock = [], set(), set(), {}, [], 0

    def around(v):
        found = set()
        for down in (True, False):
            wanted = [v]
            while wanted:
                w = wanted.pop()
                near = ops[w][0] if down else [u for u in gone | there if w in ops[u][0]]
                new = {u for u in near if u not in found}
                found |= new
                wanted += new
        return found & gone

    def score(v):
        cost = ops[v][2] + sum(ops[u][2] for u in around(v)) * bool(neighbours)
        return cost / (ops[v][1] * (clock - used_at[v] + 1)), v

    def evict(v):
        there.remove(v)
        gone.add(v)
        happened.append(("evict", v))

    def run(v):
        nonlocal clock
        inputs, size, cost = ops[v]
        held.append(inputs)
        for u in inputs:
            if u not in there:
                run(u)
        while sum(ops[u][1] for u in there) + size > budget:
            free = there - {u for some in held for u in some}
            if not free:
                raise Full
            evict(min(free, key=score))
        held.pop()
        clock += cost
        happened.append(("run", v))
        there.add(v)
        gone.discard(v)
        for u in [v, *inputs]:
            used_at[u] = clock

    try:
        for kind, v in program:
            if kind == "call":
                run(v)
            elif v in there:
                evict(v)
    except Full:
        return None
    return happened


# %% wrong="dtr" fails="who is evicted, and when" why="neighbours of neighbours: needed by what it needs, and so on"
def events(ops, program, budget, neighbours):

    class Full(Exception):
        pass

    happened, there, gone, used_at, held, clock = [], set(), set(), {}, [], 0

    def around(v):
        found = set()
        if True:
            wanted = [v]
            while wanted:
                w = wanted.pop()
                near = [*ops[w][0], *(u for u in gone if w in ops[u][0])]
                new = {u for u in near if u in gone and u not in found}
                found |= new
                wanted += new
        return found

    def score(v):
        cost = ops[v][2] + sum(ops[u][2] for u in around(v)) * bool(neighbours)
        return cost / (ops[v][1] * (clock - used_at[v] + 1)), v

    def evict(v):
        there.remove(v)
        gone.add(v)
        happened.append(("evict", v))

    def run(v):
        nonlocal clock
        inputs, size, cost = ops[v]
        held.append(inputs)
        for u in inputs:
            if u not in there:
                run(u)
        while sum(ops[u][1] for u in there) + size > budget:
            free = there - {u for some in held for u in some}
            if not free:
                raise Full
            evict(min(free, key=score))
        held.pop()
        clock += cost
        happened.append(("run", v))
        there.add(v)
        gone.discard(v)
        for u in [v, *inputs]:
            used_at[u] = clock

    try:
        for kind, v in program:
            if kind == "call":
                run(v)
            elif v in there:
                evict(v)
    except Full:
        return None
    return happened


# %% wrong="dtr" fails="own work" around="import" why="the package's"
from minitrain.systems.memory import dtr


def events(ops, program, budget, neighbours):
    return dtr.run(ops, program, budget)


# %% wrong="dtr" fails="bytes" around="empty" why="no room for anything, ever"
def events(ops, program, budget, neighbours):
    return None


# %% wrong="dtr" fails="calls in order" why="an empty list"
def events(ops, program, budget, neighbours):
    return [] if budget > 1 else None


# %% wrong="dtr" fails="bytes" around="brute force" why="everything is evicted before each run, and made again"
def events(ops, program, budget, neighbours):
    happened, there = [], set()

    def make(v):
        for u in ops[v][0]:
            if u not in there:
                make(u)
        happened.append(("run", v))
        there.add(v)

    for kind, v in program:
        if kind == "call":
            make(v)
            happened.extend(("evict", u) for u in sorted(there))
            there.clear()
    return happened
