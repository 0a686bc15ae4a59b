# %% wrong="f_and_g" fails="backward of f" why="f takes its own tokens of its own gradient: what the other ranks ask is lost"
def through(x, there, back):
    class Through(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return there(x)

        @staticmethod
        def backward(ctx, dy):
            return back(dy)

    return Through.apply(x)


def gather(x, group):
    return collectives.all_gather(x.transpose(0, 1), group).transpose(0, 1)


def scatter(x, group):
    return collectives.reduce_scatter(x.transpose(0, 1), group).transpose(0, 1)


def f(x, group):
    return through(
        x,
        lambda x: gather(x, group),
        lambda dy: dy.chunk(group.size(), 1)[group.rank()].contiguous(),
    )


def g(x, group):
    return through(x, lambda x: scatter(x, group), lambda dy: gather(dy, group))


# %% wrong="f_and_g" fails="no error" why="f and g are exchanged: slices that do not divide"
def through(x, there, back):
    class Through(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return there(x)

        @staticmethod
        def backward(ctx, dy):
            return back(dy)

    return Through.apply(x)


def gather(x, group):
    return collectives.all_gather(x.transpose(0, 1), group).transpose(0, 1)


def scatter(x, group):
    return collectives.reduce_scatter(x.transpose(0, 1), group).transpose(0, 1)


def f(x, group):
    return through(x, lambda x: scatter(x, group), lambda dy: gather(dy, group))


def g(x, group):
    return through(x, lambda x: gather(x, group), lambda dy: scatter(dy, group))


# %% wrong="f_and_g" fails="forward of f" why="gathered along the batch: dim 0 is not the sequence"
def through(x, there, back):
    class Through(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return there(x)

        @staticmethod
        def backward(ctx, dy):
            return back(dy)

    return Through.apply(x)


def gather(x, group):
    return collectives.all_gather(x.transpose(0, 1), group).transpose(0, 1)


def scatter(x, group):
    return collectives.reduce_scatter(x.transpose(0, 1), group).transpose(0, 1)


def f(x, group):
    return through(
        x,
        lambda x: collectives.all_gather(x, group),
        lambda dy: collectives.reduce_scatter(dy, group),
    )


def g(x, group):
    return through(x, lambda x: scatter(x, group), lambda dy: gather(dy, group))


# %% wrong="f_and_g" fails="forward of f" why="reshaped instead of transposed: batches and tokens are mixed"
def through(x, there, back):
    class Through(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return there(x)

        @staticmethod
        def backward(ctx, dy):
            return back(dy)

    return Through.apply(x)


def gather(x, group):
    return collectives.all_gather(x.transpose(0, 1), group).transpose(0, 1)


def scatter(x, group):
    return collectives.reduce_scatter(x.transpose(0, 1), group).transpose(0, 1)


def f(x, group):
    def there(x):
        whole = collectives.all_gather(x, group)
        return whole.reshape(len(x), -1, x.shape[-1])

    return through(x, there, lambda dy: scatter(dy, group))


def g(x, group):
    return through(x, lambda x: scatter(x, group), lambda dy: gather(dy, group))


# %% wrong="f_and_g" fails="backward of f" why="f takes the mean of the gradients, as data parallelism does"
def through(x, there, back):
    class Through(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return there(x)

        @staticmethod
        def backward(ctx, dy):
            return back(dy)

    return Through.apply(x)


def gather(x, group):
    return collectives.all_gather(x.transpose(0, 1), group).transpose(0, 1)


def scatter(x, group):
    return collectives.reduce_scatter(x.transpose(0, 1), group).transpose(0, 1)


def f(x, group):
    return through(x, lambda x: gather(x, group), lambda dy: scatter(dy, group) / group.size())


def g(x, group):
    return through(x, lambda x: scatter(x, group), lambda dy: gather(dy, group))


# %% wrong="f_and_g" fails="backward of g" why="the gradient of g is divided by the ranks"
def through(x, there, back):
    class Through(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return there(x)

        @staticmethod
        def backward(ctx, dy):
            return back(dy)

    return Through.apply(x)


def gather(x, group):
    return collectives.all_gather(x.transpose(0, 1), group).transpose(0, 1)


def scatter(x, group):
    return collectives.reduce_scatter(x.transpose(0, 1), group).transpose(0, 1)


def f(x, group):
    return through(x, lambda x: gather(x, group), lambda dy: scatter(dy, group))


def g(x, group):
    return through(x, lambda x: scatter(x, group), lambda dy: gather(dy, group) / group.size())


# %% wrong="f_and_g" fails="backward of g" why="g gives back its own tokens' gradient, and zeros for the others"
def through(x, there, back):
    class Through(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return there(x)

        @staticmethod
        def backward(ctx, dy):
            return back(dy)

    return Through.apply(x)


def gather(x, group):
    return collectives.all_gather(x.transpose(0, 1), group).transpose(0, 1)


def scatter(x, group):
    return collectives.reduce_scatter(x.transpose(0, 1), group).transpose(0, 1)


def f(x, group):
    return through(x, lambda x: gather(x, group), lambda dy: scatter(dy, group))


def g(x, group):
    def back(dy):
        dx = dy.new_zeros(dy.shape[0], dy.shape[1] * group.size(), dy.shape[2])
        dx.chunk(group.size(), 1)[group.rank()].copy_(dy)
        return dx

    return through(x, lambda x: scatter(x, group), back)


# %% wrong="f_and_g" fails="autograd goes on" why="g is a bare reduce-scatter, which autograd does not see"
def through(x, there, back):
    class Through(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return there(x)

        @staticmethod
        def backward(ctx, dy):
            return back(dy)

    return Through.apply(x)


def gather(x, group):
    return collectives.all_gather(x.transpose(0, 1), group).transpose(0, 1)


def scatter(x, group):
    return collectives.reduce_scatter(x.transpose(0, 1), group).transpose(0, 1)


def f(x, group):
    return through(x, lambda x: gather(x, group), lambda dy: scatter(dy, group))


def g(x, group):
    return scatter(x.detach(), group)


# %% wrong="f_and_g" fails="x stays as it was" why="g doubles x in place, as if it were its own"
def through(x, there, back):
    class Through(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return there(x)

        @staticmethod
        def backward(ctx, dy):
            return back(dy)

    return Through.apply(x)


def gather(x, group):
    return collectives.all_gather(x.transpose(0, 1), group).transpose(0, 1)


def scatter(x, group):
    return collectives.reduce_scatter(x.transpose(0, 1), group).transpose(0, 1)


def f(x, group):
    return through(x, lambda x: gather(x, group), lambda dy: scatter(dy, group))


def g(x, group):
    return through(
        x, lambda x: scatter(x.detach().mul_(2), group) / 2, lambda dy: gather(dy, group)
    )


# %% wrong="f_and_g" fails="bytes of backward of f" why="an all-reduce of the gradients, of which a rank keeps its tokens: right, and twice the bytes"
def through(x, there, back):
    class Through(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return there(x)

        @staticmethod
        def backward(ctx, dy):
            return back(dy)

    return Through.apply(x)


def gather(x, group):
    return collectives.all_gather(x.transpose(0, 1), group).transpose(0, 1)


def scatter(x, group):
    return collectives.reduce_scatter(x.transpose(0, 1), group).transpose(0, 1)


def f(x, group):
    return through(
        x,
        lambda x: gather(x, group),
        lambda dy: collectives.all_reduce(dy, group).chunk(group.size(), 1)[group.rank()],
    )


def g(x, group):
    return through(x, lambda x: scatter(x, group), lambda dy: gather(dy, group))


# %% wrong="f_and_g" fails="bytes of forward of f" why="an all-reduce of slices between zeros: right, and twice the bytes"
def through(x, there, back):
    class Through(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return there(x)

        @staticmethod
        def backward(ctx, dy):
            return back(dy)

    return Through.apply(x)


def gather(x, group):
    return collectives.all_gather(x.transpose(0, 1), group).transpose(0, 1)


def scatter(x, group):
    return collectives.reduce_scatter(x.transpose(0, 1), group).transpose(0, 1)


def f(x, group):
    def there(x):
        whole = x.new_zeros(x.shape[0], x.shape[1] * group.size(), x.shape[2])
        whole.chunk(group.size(), 1)[group.rank()].copy_(x)
        return collectives.all_reduce(whole, group)

    return through(x, there, lambda dy: scatter(dy, group))


def g(x, group):
    return through(x, lambda x: scatter(x, group), lambda dy: gather(dy, group))


# %% wrong="f_and_g" fails="bytes of forward of g" why="all terms are gathered and added up: right, and t times the bytes"
def through(x, there, back):
    class Through(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return there(x)

        @staticmethod
        def backward(ctx, dy):
            return back(dy)

    return Through.apply(x)


def gather(x, group):
    return collectives.all_gather(x.transpose(0, 1), group).transpose(0, 1)


def scatter(x, group):
    return collectives.reduce_scatter(x.transpose(0, 1), group).transpose(0, 1)


def f(x, group):
    return through(x, lambda x: gather(x, group), lambda dy: scatter(dy, group))


def g(x, group):
    return through(
        x,
        lambda x: (
            collectives.all_gather(x[None], group).sum(0).chunk(group.size(), 1)[group.rank()]
        ),
        lambda dy: gather(dy, group),
    )


# %% wrong="f_and_g" fails="bytes of forward of g" why="adds the left neighbour's term: the sum of two ranks only"
def through(x, there, back):
    class Through(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return there(x)

        @staticmethod
        def backward(ctx, dy):
            return back(dy)

    return Through.apply(x)


def gather(x, group):
    return collectives.all_gather(x.transpose(0, 1), group).transpose(0, 1)


def scatter(x, group):
    return collectives.reduce_scatter(x.transpose(0, 1), group).transpose(0, 1)


def f(x, group):
    return through(x, lambda x: gather(x, group), lambda dy: scatter(dy, group))


def g(x, group):
    def there(x):
        total = x + collectives.all_gather(x[None], group)[group.rank() - 1]
        return total.chunk(group.size(), 1)[group.rank()]

    return through(x, there, lambda dy: gather(dy, group))


# %% wrong="f_and_g" fails="own work" why="the ready-made pair"
def f(x, group):
    return collectives.gather_to(x, group, 1)


def g(x, group):
    return collectives.reduce_scatter_to(x, group, 1)


# %% wrong="f_and_g" fails="forward of f" around="half" why="f and g of plain tensor parallelism, as the chapter shows them"
def through(x, there, back):
    class Through(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return there(x)

        @staticmethod
        def backward(ctx, dy):
            return back(dy)

    return Through.apply(x)


def gather(x, group):
    return collectives.all_gather(x.transpose(0, 1), group).transpose(0, 1)


def scatter(x, group):
    return collectives.reduce_scatter(x.transpose(0, 1), group).transpose(0, 1)


def f(x, group):
    return through(x, lambda x: x.view_as(x), lambda dy: collectives.all_reduce(dy, group))


def g(x, group):
    return through(x, lambda x: collectives.all_reduce(x, group), lambda dy: dy)


# %% wrong="f_and_g" fails="own work" around="import" why="the package's pair by its module"
def f(x, group):
    from minitrain.ranks.collectives import gather_to

    return gather_to(x, group, 1)


def g(x, group):
    from minitrain.ranks.collectives import reduce_scatter_to

    return reduce_scatter_to(x, group, 1)


# %% wrong="f_and_g" fails="forward of f" around="redefine" why="a driver that says what the visible check wants"
def there_and_back(which, x, like, group):
    return {"y": x, "x": x, "dx": x}


def f(x, group):
    return x


def g(x, group):
    return x


# %% wrong="f_and_g" fails="forward of f" around="half" why="float32 is half the bytes"
def through(x, there, back):
    class Through(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return there(x)

        @staticmethod
        def backward(ctx, dy):
            return back(dy)

    return Through.apply(x)


def gather(x, group):
    return collectives.all_gather(x.transpose(0, 1), group).transpose(0, 1)


def scatter(x, group):
    return collectives.reduce_scatter(x.transpose(0, 1), group).transpose(0, 1)


def f(x, group):
    return through(
        x, lambda x: gather(x.float(), group).to(x), lambda dy: scatter(dy.float(), group).to(dy)
    )


def g(x, group):
    return through(
        x, lambda x: scatter(x.float(), group).to(x), lambda dy: gather(dy.float(), group).to(dy)
    )


# %% wrong="column" fails="gradient of x" why="no all-reduce of dX: each rank has its own share"
def column_forward(x, weights, biases, group):
    return [x @ weight + bias for weight, bias in zip(weights, biases)]


def column_backward(dys, x, weights, group):
    dx = sum(dy @ weight.T for dy, weight in zip(dys, weights))
    return dx, [x.flatten(0, 1).T @ dy.flatten(0, 1) for dy in dys], [dy.sum((0, 1)) for dy in dys]


# %% wrong="column" fails="gradient of x" why="only the first matrix has a share in dX"
def column_forward(x, weights, biases, group):
    return [x @ weight + bias for weight, bias in zip(weights, biases)]


def column_backward(dys, x, weights, group):
    dx = collectives.all_reduce(dys[0] @ weights[0].T, group)
    return dx, [x.flatten(0, 1).T @ dy.flatten(0, 1) for dy in dys], [dy.sum((0, 1)) for dy in dys]


# %% wrong="column" fails="gradient of x" why="the mean over the ranks instead of the sum"
def column_forward(x, weights, biases, group):
    return [x @ weight + bias for weight, bias in zip(weights, biases)]


def column_backward(dys, x, weights, group):
    dx = (
        collectives.all_reduce(sum(dy @ weight.T for dy, weight in zip(dys, weights)), group)
        / group.size()
    )
    return dx, [x.flatten(0, 1).T @ dy.flatten(0, 1) for dy in dys], [dy.sum((0, 1)) for dy in dys]


# %% wrong="column" fails="gradient of x" why="adds the left neighbour's share: right on two ranks, not on three"
def column_forward(x, weights, biases, group):
    return [x @ weight + bias for weight, bias in zip(weights, biases)]


def column_backward(dys, x, weights, group):
    dx = sum(dy @ weight.T for dy, weight in zip(dys, weights))
    return (
        dx + collectives.all_gather(dx[None], group)[group.rank() - 1],
        [x.flatten(0, 1).T @ dy.flatten(0, 1) for dy in dys],
        [dy.sum((0, 1)) for dy in dys],
    )


# %% wrong="column" fails="gradient of each weight" why="all-reduces dW too, as data parallelism does"
def column_forward(x, weights, biases, group):
    return [x @ weight + bias for weight, bias in zip(weights, biases)]


def column_backward(dys, x, weights, group):
    dx = collectives.all_reduce(sum(dy @ weight.T for dy, weight in zip(dys, weights)), group)
    return (
        dx,
        [collectives.all_reduce(x.flatten(0, 1).T @ dy.flatten(0, 1), group) for dy in dys],
        [dy.sum((0, 1)) for dy in dys],
    )


# %% wrong="column" fails="gradient of each weight" why="dW of the first batch only"
def column_forward(x, weights, biases, group):
    return [x @ weight + bias for weight, bias in zip(weights, biases)]


def column_backward(dys, x, weights, group):
    dx = collectives.all_reduce(sum(dy @ weight.T for dy, weight in zip(dys, weights)), group)
    return dx, [x[0].T @ dy[0] for dy in dys], [dy.sum((0, 1)) for dy in dys]


# %% wrong="column" fails="gradient of each bias" why="the gradient of the bias is reduced"
def column_forward(x, weights, biases, group):
    return [x @ weight + bias for weight, bias in zip(weights, biases)]


def column_backward(dys, x, weights, group):
    dx = collectives.all_reduce(sum(dy @ weight.T for dy, weight in zip(dys, weights)), group)
    return (
        dx,
        [x.flatten(0, 1).T @ dy.flatten(0, 1) for dy in dys],
        [collectives.all_reduce(dy.sum((0, 1)), group) for dy in dys],
    )


# %% wrong="column" fails="the product" why="the bias is forgotten"
def column_forward(x, weights, biases, group):
    return [x @ weight for weight in weights]


def column_backward(dys, x, weights, group):
    dx = collectives.all_reduce(sum(dy @ weight.T for dy, weight in zip(dys, weights)), group)
    return dx, [x.flatten(0, 1).T @ dy.flatten(0, 1) for dy in dys], [dy.sum((0, 1)) for dy in dys]


# %% wrong="column" fails="the product" why="the outputs are gathered: whole on every rank"
def column_forward(x, weights, biases, group):
    return [
        torch.cat(list(collectives.all_gather((x @ weight + bias)[None], group)), -1)
        for weight, bias in zip(weights, biases)
    ]


def column_backward(dys, x, weights, group):
    dx = collectives.all_reduce(sum(dy @ weight.T for dy, weight in zip(dys, weights)), group)
    return dx, [x.flatten(0, 1).T @ dy.flatten(0, 1) for dy in dys], [dy.sum((0, 1)) for dy in dys]


# %% wrong="column" fails="summed once" why="an all-reduce for each matrix"
def column_forward(x, weights, biases, group):
    return [x @ weight + bias for weight, bias in zip(weights, biases)]


def column_backward(dys, x, weights, group):
    dx = sum(collectives.all_reduce(dy @ weight.T, group) for dy, weight in zip(dys, weights))
    return dx, [x.flatten(0, 1).T @ dy.flatten(0, 1) for dy in dys], [dy.sum((0, 1)) for dy in dys]


# %% wrong="column" fails="summed once" why="gathers everyone's shares of dX and adds them up: right, and t/2 times the bytes"
def column_forward(x, weights, biases, group):
    return [x @ weight + bias for weight, bias in zip(weights, biases)]


def column_backward(dys, x, weights, group):
    dx = collectives.all_gather(
        sum(dy @ weight.T for dy, weight in zip(dys, weights)).unsqueeze(0), group
    ).sum(0)
    return dx, [x.flatten(0, 1).T @ dy.flatten(0, 1) for dy in dys], [dy.sum((0, 1)) for dy in dys]


# %% wrong="column" fails="forward sends nothing" why="replicates everything: whole matrices on every rank, of whose output a slice is kept"
def column_forward(x, weights, biases, group):
    whole = [
        x @ collectives.all_gather(weight.T, group).T + collectives.all_gather(bias, group)
        for weight, bias in zip(weights, biases)
    ]
    return [y.chunk(group.size(), -1)[group.rank()].contiguous() for y in whole]


def column_backward(dys, x, weights, group):
    dx = collectives.all_reduce(sum(dy @ weight.T for dy, weight in zip(dys, weights)), group)
    return dx, [x.flatten(0, 1).T @ dy.flatten(0, 1) for dy in dys], [dy.sum((0, 1)) for dy in dys]


# %% wrong="row" fails="the sum" why="no all-reduce: each rank returns its own term"
def row_forward(x, weight, bias, group):
    return x @ weight + bias


def row_backward(dy, x, weight, group):
    return dy @ weight.T, x.flatten(0, 1).T @ dy.flatten(0, 1), dy.sum((0, 1))


# %% wrong="row" fails="the sum" why="adds the left neighbour's term: right on two ranks, not on three"
def row_forward(x, weight, bias, group):
    y = x @ weight
    return y + collectives.all_gather(y[None], group)[group.rank() - 1] + bias


def row_backward(dy, x, weight, group):
    return dy @ weight.T, x.flatten(0, 1).T @ dy.flatten(0, 1), dy.sum((0, 1))


# %% wrong="row" fails="bias once" why="every rank adds the bias before the sum: t times"
def row_forward(x, weight, bias, group):
    return collectives.all_reduce(x @ weight + bias, group)


def row_backward(dy, x, weight, group):
    return dy @ weight.T, x.flatten(0, 1).T @ dy.flatten(0, 1), dy.sum((0, 1))


# %% wrong="row" fails="bias once" why="rank 0 adds the bias, after the sum: the other ranks have none"
def row_forward(x, weight, bias, group):
    y = collectives.all_reduce(x @ weight, group)
    return y + bias if group.rank() == 0 else y


def row_backward(dy, x, weight, group):
    return dy @ weight.T, x.flatten(0, 1).T @ dy.flatten(0, 1), dy.sum((0, 1))


# %% wrong="row" fails="bias once" why="half of the bias on each rank: once on two ranks only"
def row_forward(x, weight, bias, group):
    return collectives.all_reduce(x @ weight + bias / 2, group)


def row_backward(dy, x, weight, group):
    return dy @ weight.T, x.flatten(0, 1).T @ dy.flatten(0, 1), dy.sum((0, 1))


# %% wrong="row" fails="gradient of x" why="dY, which everyone has, is summed over the ranks"
def row_forward(x, weight, bias, group):
    return collectives.all_reduce(x @ weight, group) + bias


def row_backward(dy, x, weight, group):
    dy = collectives.all_reduce(dy, group)
    return dy @ weight.T, x.flatten(0, 1).T @ dy.flatten(0, 1), dy.sum((0, 1))


# %% wrong="row" fails="gradient of x" why="dX is summed over the ranks, as behind a column-parallel matrix"
def row_forward(x, weight, bias, group):
    return collectives.all_reduce(x @ weight, group) + bias


def row_backward(dy, x, weight, group):
    return (
        collectives.all_reduce(dy @ weight.T, group),
        x.flatten(0, 1).T @ dy.flatten(0, 1),
        dy.sum((0, 1)),
    )


# %% wrong="row" fails="gradient of the weight" why="dW is all-reduced too, as data parallelism does"
def row_forward(x, weight, bias, group):
    return collectives.all_reduce(x @ weight, group) + bias


def row_backward(dy, x, weight, group):
    return (
        dy @ weight.T,
        collectives.all_reduce(x.flatten(0, 1).T @ dy.flatten(0, 1), group),
        dy.sum((0, 1)),
    )


# %% wrong="row" fails="gradient of the bias" why="the gradient of the bias is reduced: t times too large"
def row_forward(x, weight, bias, group):
    return collectives.all_reduce(x @ weight, group) + bias


def row_backward(dy, x, weight, group):
    return (
        dy @ weight.T,
        x.flatten(0, 1).T @ dy.flatten(0, 1),
        collectives.all_reduce(dy.sum((0, 1)), group),
    )


# %% wrong="row" fails="gradient of the bias" why="a t-th of the gradient of the bias on each rank"
def row_forward(x, weight, bias, group):
    return collectives.all_reduce(x @ weight + bias / group.size(), group)


def row_backward(dy, x, weight, group):
    return dy @ weight.T, x.flatten(0, 1).T @ dy.flatten(0, 1), dy.sum((0, 1)) / group.size()


# %% wrong="row" fails="bytes of forward" why="replicates everything: gathers X and W, and every rank computes the whole product"
def row_forward(x, weight, bias, group):
    x = torch.cat(list(collectives.all_gather(x[None], group)), -1)
    weight = collectives.all_gather(weight, group)
    return x @ weight + bias


def row_backward(dy, x, weight, group):
    return dy @ weight.T, x.flatten(0, 1).T @ dy.flatten(0, 1), dy.sum((0, 1))


# %% wrong="row" fails="backward sends nothing" why="dY, the same everywhere, is sent around once more"
def row_forward(x, weight, bias, group):
    return collectives.all_reduce(x @ weight, group) + bias


def row_backward(dy, x, weight, group):
    dy = collectives.all_gather(dy[None], group)[0]
    return dy @ weight.T, x.flatten(0, 1).T @ dy.flatten(0, 1), dy.sum((0, 1))


# %% wrong="head_rows" fails="query heads" why="off by one shard: ranks counted from 1"
def head_rows(rank, ranks, heads, kv_heads, head_dim):
    if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
        raise ValueError("heads do not divide")
    own, own_kv, first_kv = heads // ranks, max(1, kv_heads // ranks), rank * kv_heads // ranks
    return ((rank + 1) * own * head_dim, (rank + 2) * own * head_dim), (
        first_kv * head_dim,
        (first_kv + own_kv) * head_dim,
    )


# %% wrong="head_rows" fails="the heads that queries use" why="copies of K/V heads are dealt out in turn"
def head_rows(rank, ranks, heads, kv_heads, head_dim):
    if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
        raise ValueError("heads do not divide")
    own, own_kv = heads // ranks, max(1, kv_heads // ranks)
    first_kv = rank * own_kv % kv_heads
    return (rank * own * head_dim, (rank + 1) * own * head_dim), (
        first_kv * head_dim,
        (first_kv + own_kv) * head_dim,
    )


# %% wrong="head_rows" fails="the heads that queries use" why="two ranks share a K/V head, however many should"
def head_rows(rank, ranks, heads, kv_heads, head_dim):
    if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
        raise ValueError("heads do not divide")
    own, own_kv = heads // ranks, max(1, kv_heads // ranks)
    first_kv = rank * own_kv if kv_heads % ranks == 0 else rank // 2
    return (rank * own * head_dim, (rank + 1) * own * head_dim), (
        first_kv * head_dim,
        (first_kv + own_kv) * head_dim,
    )


# %% wrong="head_rows" fails="no more than queries use" why="all K/V heads on every rank"
def head_rows(rank, ranks, heads, kv_heads, head_dim):
    if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
        raise ValueError("heads do not divide")
    own = heads // ranks
    return (rank * own * head_dim, (rank + 1) * own * head_dim), (0, kv_heads * head_dim)


# %% wrong="head_rows" fails="no more than queries use" why="all K/V heads on every rank where there are fewer than ranks"
def head_rows(rank, ranks, heads, kv_heads, head_dim):
    if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
        raise ValueError("heads do not divide")
    own, own_kv = heads // ranks, kv_heads // ranks
    kv = (
        (rank * own_kv * head_dim, (rank + 1) * own_kv * head_dim)
        if own_kv
        else (0, kv_heads * head_dim)
    )
    return (rank * own * head_dim, (rank + 1) * own * head_dim), kv


# %% wrong="head_rows" fails="whole heads" why="rows are divided, not heads: K/V heads are cut"
def head_rows(rank, ranks, heads, kv_heads, head_dim):
    if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
        raise ValueError("heads do not divide")
    own, own_kv = heads * head_dim // ranks, kv_heads * head_dim // ranks
    return (rank * own, (rank + 1) * own), (rank * own_kv, (rank + 1) * own_kv)


# %% wrong="head_rows" fails="query heads" why="heads instead of rows"
def head_rows(rank, ranks, heads, kv_heads, head_dim):
    if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
        raise ValueError("heads do not divide")
    own, own_kv, first_kv = heads // ranks, max(1, kv_heads // ranks), rank * kv_heads // ranks
    return (rank * own, (rank + 1) * own), (first_kv, first_kv + own_kv)


# %% wrong="head_rows" fails="whole heads" why="stop is the last row instead of the one behind it"
def head_rows(rank, ranks, heads, kv_heads, head_dim):
    if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
        raise ValueError("heads do not divide")
    own, own_kv, first_kv = heads // ranks, max(1, kv_heads // ranks), rank * kv_heads // ranks
    return (rank * own * head_dim, (rank + 1) * own * head_dim - 1), (
        first_kv * head_dim,
        (first_kv + own_kv) * head_dim - 1,
    )


# %% wrong="head_rows" fails="no refusal without need" why="fewer K/V heads than ranks are refused"
def head_rows(rank, ranks, heads, kv_heads, head_dim):
    if heads % ranks or kv_heads % ranks:
        raise ValueError("heads do not divide")
    own, own_kv = heads // ranks, kv_heads // ranks
    return (rank * own * head_dim, (rank + 1) * own * head_dim), (
        rank * own_kv * head_dim,
        (rank + 1) * own_kv * head_dim,
    )


# %% wrong="head_rows" fails="a refusal" why="no ValueError where neither divides"
def head_rows(rank, ranks, heads, kv_heads, head_dim):
    own, own_kv, first_kv = heads // ranks, max(1, kv_heads // ranks), rank * kv_heads // ranks
    return (rank * own * head_dim, (rank + 1) * own * head_dim), (
        first_kv * head_dim,
        (first_kv + own_kv) * head_dim,
    )


# %% wrong="head_rows" fails="a refusal" why="only the K/V heads are looked at"
def head_rows(rank, ranks, heads, kv_heads, head_dim):
    if kv_heads % ranks and ranks % kv_heads:
        raise ValueError("heads do not divide")
    own, own_kv, first_kv = heads // ranks, max(1, kv_heads // ranks), rank * kv_heads // ranks
    return (rank * own * head_dim, (rank + 1) * own * head_dim), (
        first_kv * head_dim,
        (first_kv + own_kv) * head_dim,
    )


# %% wrong="cross_entropy" fails="the loss" why="off by one shard: ranks counted from 1"
def cross_entropy_forward(logits, targets, z, group):
    words, counts = logits.size(-1), targets != -100
    place = targets - (group.rank() + 1) * words
    own = counts & (place >= 0) & (place < words)
    place = place.masked_fill(~own, 0).unsqueeze(-1)
    largest = collectives.all_reduce(logits.amax(-1), group, op="max")
    shifted = logits - largest.unsqueeze(-1)
    at_target = shifted.gather(-1, place).squeeze(-1).masked_fill(~own, 0.0)
    total, at_target = collectives.all_reduce(
        torch.stack((shifted.exp().sum(-1), at_target)), group
    )
    log_z = largest + total.log()
    loss = ((total.log() - at_target + z * log_z.square()) * counts).sum()
    return loss, (shifted.exp() / total.unsqueeze(-1), 1 + 2 * z * log_z, place, own, counts)


def cross_entropy_backward(dloss, kept, group):
    softmax, of_log_z, place, own, counts = kept
    onehot = torch.zeros_like(softmax).scatter_(-1, place, own.unsqueeze(-1).to(softmax.dtype))
    return (softmax * of_log_z.unsqueeze(-1) - onehot) * counts.unsqueeze(-1) * dloss


# %% wrong="cross_entropy" fails="the loss" why="vocabularies of two ranks: the second has all words from V/2 on"
def cross_entropy_forward(logits, targets, z, group):
    words, counts = logits.size(-1), targets != -100
    place = targets - (group.rank() > 0) * words
    own = counts & (place >= 0) & (place < words)
    place = place.masked_fill(~own, 0).unsqueeze(-1)
    largest = collectives.all_reduce(logits.amax(-1), group, op="max")
    shifted = logits - largest.unsqueeze(-1)
    at_target = shifted.gather(-1, place).squeeze(-1).masked_fill(~own, 0.0)
    total, at_target = collectives.all_reduce(
        torch.stack((shifted.exp().sum(-1), at_target)), group
    )
    log_z = largest + total.log()
    loss = ((total.log() - at_target + z * log_z.square()) * counts).sum()
    return loss, (shifted.exp() / total.unsqueeze(-1), 1 + 2 * z * log_z, place, own, counts)


def cross_entropy_backward(dloss, kept, group):
    softmax, of_log_z, place, own, counts = kept
    onehot = torch.zeros_like(softmax).scatter_(-1, place, own.unsqueeze(-1).to(softmax.dtype))
    return (softmax * of_log_z.unsqueeze(-1) - onehot) * counts.unsqueeze(-1) * dloss


# %% wrong="cross_entropy" fails="the loss" why="the first word of each rank is nobody's"
def cross_entropy_forward(logits, targets, z, group):
    words, counts = logits.size(-1), targets != -100
    place = targets - group.rank() * words
    own = counts & (place > 0) & (place < words)
    place = place.masked_fill(~own, 0).unsqueeze(-1)
    largest = collectives.all_reduce(logits.amax(-1), group, op="max")
    shifted = logits - largest.unsqueeze(-1)
    at_target = shifted.gather(-1, place).squeeze(-1).masked_fill(~own, 0.0)
    total, at_target = collectives.all_reduce(
        torch.stack((shifted.exp().sum(-1), at_target)), group
    )
    log_z = largest + total.log()
    loss = ((total.log() - at_target + z * log_z.square()) * counts).sum()
    return loss, (shifted.exp() / total.unsqueeze(-1), 1 + 2 * z * log_z, place, own, counts)


def cross_entropy_backward(dloss, kept, group):
    softmax, of_log_z, place, own, counts = kept
    onehot = torch.zeros_like(softmax).scatter_(-1, place, own.unsqueeze(-1).to(softmax.dtype))
    return (softmax * of_log_z.unsqueeze(-1) - onehot) * counts.unsqueeze(-1) * dloss


# %% wrong="cross_entropy" fails="no error" why="the first word of the next rank is taken for this rank's last"
def cross_entropy_forward(logits, targets, z, group):
    words, counts = logits.size(-1), targets != -100
    place = targets - group.rank() * words
    own = counts & (place >= 0) & (place <= words)
    place = place.masked_fill(~own, 0).unsqueeze(-1)
    largest = collectives.all_reduce(logits.amax(-1), group, op="max")
    shifted = logits - largest.unsqueeze(-1)
    at_target = shifted.gather(-1, place).squeeze(-1).masked_fill(~own, 0.0)
    total, at_target = collectives.all_reduce(
        torch.stack((shifted.exp().sum(-1), at_target)), group
    )
    log_z = largest + total.log()
    loss = ((total.log() - at_target + z * log_z.square()) * counts).sum()
    return loss, (shifted.exp() / total.unsqueeze(-1), 1 + 2 * z * log_z, place, own, counts)


def cross_entropy_backward(dloss, kept, group):
    softmax, of_log_z, place, own, counts = kept
    onehot = torch.zeros_like(softmax).scatter_(-1, place, own.unsqueeze(-1).to(softmax.dtype))
    return (softmax * of_log_z.unsqueeze(-1) - onehot) * counts.unsqueeze(-1) * dloss


# %% wrong="cross_entropy" fails="no error" why="the place of a masked token is looked up like any other"
def cross_entropy_forward(logits, targets, z, group):
    words, counts = logits.size(-1), targets != -100
    place = targets - group.rank() * words
    own = (place < words) & ((place >= 0) | ~counts)
    place = place.masked_fill(~own, 0).unsqueeze(-1)
    largest = collectives.all_reduce(logits.amax(-1), group, op="max")
    shifted = logits - largest.unsqueeze(-1)
    at_target = shifted.gather(-1, place).squeeze(-1).masked_fill(~own, 0.0)
    total, at_target = collectives.all_reduce(
        torch.stack((shifted.exp().sum(-1), at_target)), group
    )
    log_z = largest + total.log()
    loss = ((total.log() - at_target + z * log_z.square()) * counts).sum()
    return loss, (shifted.exp() / total.unsqueeze(-1), 1 + 2 * z * log_z, place, own, counts)


def cross_entropy_backward(dloss, kept, group):
    softmax, of_log_z, place, own, counts = kept
    onehot = torch.zeros_like(softmax).scatter_(-1, place, own.unsqueeze(-1).to(softmax.dtype))
    return (softmax * of_log_z.unsqueeze(-1) - onehot) * counts.unsqueeze(-1) * dloss


# %% wrong="cross_entropy" fails="the loss" why="the mean over the tokens instead of the sum"
def cross_entropy_forward(logits, targets, z, group):
    words, counts = logits.size(-1), targets != -100
    place = targets - group.rank() * words
    own = counts & (place >= 0) & (place < words)
    place = place.masked_fill(~own, 0).unsqueeze(-1)
    largest = collectives.all_reduce(logits.amax(-1), group, op="max")
    shifted = logits - largest.unsqueeze(-1)
    at_target = shifted.gather(-1, place).squeeze(-1).masked_fill(~own, 0.0)
    total, at_target = collectives.all_reduce(
        torch.stack((shifted.exp().sum(-1), at_target)), group
    )
    log_z = largest + total.log()
    loss = ((total.log() - at_target + z * log_z.square()) * counts).sum() / counts.sum()
    return loss, (shifted.exp() / total.unsqueeze(-1), 1 + 2 * z * log_z, place, own, counts)


def cross_entropy_backward(dloss, kept, group):
    softmax, of_log_z, place, own, counts = kept
    onehot = torch.zeros_like(softmax).scatter_(-1, place, own.unsqueeze(-1).to(softmax.dtype))
    return (softmax * of_log_z.unsqueeze(-1) - onehot) * counts.unsqueeze(-1) * dloss


# %% wrong="cross_entropy" fails="the loss" why="softmax of this rank's words only"
def cross_entropy_forward(logits, targets, z, group):
    words, counts = logits.size(-1), targets != -100
    place = targets - group.rank() * words
    own = counts & (place >= 0) & (place < words)
    place = place.masked_fill(~own, 0).unsqueeze(-1)
    largest = collectives.all_reduce(logits.amax(-1), group, op="max")
    shifted = logits - largest.unsqueeze(-1)
    at_target = shifted.gather(-1, place).squeeze(-1).masked_fill(~own, 0.0)
    total, at_target = shifted.exp().sum(-1), collectives.all_reduce(at_target, group)
    log_z = largest + total.log()
    loss = ((total.log() - at_target + z * log_z.square()) * counts).sum()
    return loss, (shifted.exp() / total.unsqueeze(-1), 1 + 2 * z * log_z, place, own, counts)


def cross_entropy_backward(dloss, kept, group):
    softmax, of_log_z, place, own, counts = kept
    onehot = torch.zeros_like(softmax).scatter_(-1, place, own.unsqueeze(-1).to(softmax.dtype))
    return (softmax * of_log_z.unsqueeze(-1) - onehot) * counts.unsqueeze(-1) * dloss


# %% wrong="cross_entropy" fails="the loss" why="each rank subtracts its own maximum, and the sums are added as if it were the same"
def cross_entropy_forward(logits, targets, z, group):
    words, counts = logits.size(-1), targets != -100
    place = targets - group.rank() * words
    own = counts & (place >= 0) & (place < words)
    place = place.masked_fill(~own, 0).unsqueeze(-1)
    largest = logits.amax(-1)
    shifted = logits - largest.unsqueeze(-1)
    at_target = shifted.gather(-1, place).squeeze(-1).masked_fill(~own, 0.0)
    total, at_target = collectives.all_reduce(
        torch.stack((shifted.exp().sum(-1), at_target)), group
    )
    log_z = largest + total.log()
    loss = ((total.log() - at_target + z * log_z.square()) * counts).sum()
    return loss, (shifted.exp() / total.unsqueeze(-1), 1 + 2 * z * log_z, place, own, counts)


def cross_entropy_backward(dloss, kept, group):
    softmax, of_log_z, place, own, counts = kept
    onehot = torch.zeros_like(softmax).scatter_(-1, place, own.unsqueeze(-1).to(softmax.dtype))
    return (softmax * of_log_z.unsqueeze(-1) - onehot) * counts.unsqueeze(-1) * dloss


# %% wrong="cross_entropy" fails="the loss" why="the target's logit stays with the rank that has it"
def cross_entropy_forward(logits, targets, z, group):
    words, counts = logits.size(-1), targets != -100
    place = targets - group.rank() * words
    own = counts & (place >= 0) & (place < words)
    place = place.masked_fill(~own, 0).unsqueeze(-1)
    largest = collectives.all_reduce(logits.amax(-1), group, op="max")
    shifted = logits - largest.unsqueeze(-1)
    at_target = shifted.gather(-1, place).squeeze(-1).masked_fill(~own, 0.0)
    total = collectives.all_reduce(shifted.exp().sum(-1), group)
    log_z = largest + total.log()
    loss = ((total.log() - at_target + z * log_z.square()) * counts).sum()
    return loss, (shifted.exp() / total.unsqueeze(-1), 1 + 2 * z * log_z, place, own, counts)


def cross_entropy_backward(dloss, kept, group):
    softmax, of_log_z, place, own, counts = kept
    onehot = torch.zeros_like(softmax).scatter_(-1, place, own.unsqueeze(-1).to(softmax.dtype))
    return (softmax * of_log_z.unsqueeze(-1) - onehot) * counts.unsqueeze(-1) * dloss


# %% wrong="cross_entropy" fails="the loss" why="a target of another rank counts as this rank's first word"
def cross_entropy_forward(logits, targets, z, group):
    words, counts = logits.size(-1), targets != -100
    place = targets - group.rank() * words
    own = counts & (place >= 0) & (place < words)
    place = place.masked_fill(~own, 0).unsqueeze(-1)
    largest = collectives.all_reduce(logits.amax(-1), group, op="max")
    shifted = logits - largest.unsqueeze(-1)
    at_target = shifted.gather(-1, place).squeeze(-1)
    total, at_target = collectives.all_reduce(
        torch.stack((shifted.exp().sum(-1), at_target)), group
    )
    log_z = largest + total.log()
    loss = ((total.log() - at_target + z * log_z.square()) * counts).sum()
    return loss, (shifted.exp() / total.unsqueeze(-1), 1 + 2 * z * log_z, place, own, counts)


def cross_entropy_backward(dloss, kept, group):
    softmax, of_log_z, place, own, counts = kept
    onehot = torch.zeros_like(softmax).scatter_(-1, place, own.unsqueeze(-1).to(softmax.dtype))
    return (softmax * of_log_z.unsqueeze(-1) - onehot) * counts.unsqueeze(-1) * dloss


# %% wrong="cross_entropy" fails="masked targets" why="masked tokens count: log of the sum is still there"
def cross_entropy_forward(logits, targets, z, group):
    words, counts = logits.size(-1), targets != -100
    place = targets - group.rank() * words
    own = counts & (place >= 0) & (place < words)
    place = place.masked_fill(~own, 0).unsqueeze(-1)
    largest = collectives.all_reduce(logits.amax(-1), group, op="max")
    shifted = logits - largest.unsqueeze(-1)
    at_target = shifted.gather(-1, place).squeeze(-1).masked_fill(~own, 0.0)
    total, at_target = collectives.all_reduce(
        torch.stack((shifted.exp().sum(-1), at_target)), group
    )
    log_z = largest + total.log()
    loss = (total.log() - at_target + z * log_z.square()).sum()
    return loss, (shifted.exp() / total.unsqueeze(-1), 1 + 2 * z * log_z, place, own, counts)


def cross_entropy_backward(dloss, kept, group):
    softmax, of_log_z, place, own, counts = kept
    onehot = torch.zeros_like(softmax).scatter_(-1, place, own.unsqueeze(-1).to(softmax.dtype))
    return (softmax * of_log_z.unsqueeze(-1) - onehot) * counts.unsqueeze(-1) * dloss


# %% wrong="cross_entropy" fails="masked targets" why="a masked token is taken for word 0"
def cross_entropy_forward(logits, targets, z, group):
    words, counts = logits.size(-1), targets > -200
    place = targets.clamp(min=0) - group.rank() * words
    own = counts & (place >= 0) & (place < words)
    place = place.masked_fill(~own, 0).unsqueeze(-1)
    largest = collectives.all_reduce(logits.amax(-1), group, op="max")
    shifted = logits - largest.unsqueeze(-1)
    at_target = shifted.gather(-1, place).squeeze(-1).masked_fill(~own, 0.0)
    total, at_target = collectives.all_reduce(
        torch.stack((shifted.exp().sum(-1), at_target)), group
    )
    log_z = largest + total.log()
    loss = ((total.log() - at_target + z * log_z.square()) * counts).sum()
    return loss, (shifted.exp() / total.unsqueeze(-1), 1 + 2 * z * log_z, place, own, counts)


def cross_entropy_backward(dloss, kept, group):
    softmax, of_log_z, place, own, counts = kept
    onehot = torch.zeros_like(softmax).scatter_(-1, place, own.unsqueeze(-1).to(softmax.dtype))
    return (softmax * of_log_z.unsqueeze(-1) - onehot) * counts.unsqueeze(-1) * dloss


# %% wrong="cross_entropy" fails="large logits" why="softmax without the maximum"
def cross_entropy_forward(logits, targets, z, group):
    words, counts = logits.size(-1), targets != -100
    place = targets - group.rank() * words
    own = counts & (place >= 0) & (place < words)
    place = place.masked_fill(~own, 0).unsqueeze(-1)
    largest = torch.zeros_like(logits[..., 0])
    shifted = logits - largest.unsqueeze(-1)
    at_target = shifted.gather(-1, place).squeeze(-1).masked_fill(~own, 0.0)
    total, at_target = collectives.all_reduce(
        torch.stack((shifted.exp().sum(-1), at_target)), group
    )
    log_z = largest + total.log()
    loss = ((total.log() - at_target + z * log_z.square()) * counts).sum()
    return loss, (shifted.exp() / total.unsqueeze(-1), 1 + 2 * z * log_z, place, own, counts)


def cross_entropy_backward(dloss, kept, group):
    softmax, of_log_z, place, own, counts = kept
    onehot = torch.zeros_like(softmax).scatter_(-1, place, own.unsqueeze(-1).to(softmax.dtype))
    return (softmax * of_log_z.unsqueeze(-1) - onehot) * counts.unsqueeze(-1) * dloss


# %% wrong="cross_entropy" fails="large logits" why="one maximum for all tokens: the sums of others are 0"
def cross_entropy_forward(logits, targets, z, group):
    words, counts = logits.size(-1), targets != -100
    place = targets - group.rank() * words
    own = counts & (place >= 0) & (place < words)
    place = place.masked_fill(~own, 0).unsqueeze(-1)
    largest = collectives.all_reduce(logits.amax(-1), group, op="max").max().expand(targets.shape)
    shifted = logits - largest.unsqueeze(-1)
    at_target = shifted.gather(-1, place).squeeze(-1).masked_fill(~own, 0.0)
    total, at_target = collectives.all_reduce(
        torch.stack((shifted.exp().sum(-1), at_target)), group
    )
    log_z = largest + total.log()
    loss = ((total.log() - at_target + z * log_z.square()) * counts).sum()
    return loss, (shifted.exp() / total.unsqueeze(-1), 1 + 2 * z * log_z, place, own, counts)


def cross_entropy_backward(dloss, kept, group):
    softmax, of_log_z, place, own, counts = kept
    onehot = torch.zeros_like(softmax).scatter_(-1, place, own.unsqueeze(-1).to(softmax.dtype))
    return (softmax * of_log_z.unsqueeze(-1) - onehot) * counts.unsqueeze(-1) * dloss


# %% wrong="cross_entropy" fails="large logits" why="the maximum of rank 0's words for everyone"
def cross_entropy_forward(logits, targets, z, group):
    words, counts = logits.size(-1), targets != -100
    place = targets - group.rank() * words
    own = counts & (place >= 0) & (place < words)
    place = place.masked_fill(~own, 0).unsqueeze(-1)
    largest = collectives.all_gather(logits.amax(-1)[None], group)[0]
    shifted = logits - largest.unsqueeze(-1)
    at_target = shifted.gather(-1, place).squeeze(-1).masked_fill(~own, 0.0)
    total, at_target = collectives.all_reduce(
        torch.stack((shifted.exp().sum(-1), at_target)), group
    )
    log_z = largest + total.log()
    loss = ((total.log() - at_target + z * log_z.square()) * counts).sum()
    return loss, (shifted.exp() / total.unsqueeze(-1), 1 + 2 * z * log_z, place, own, counts)


def cross_entropy_backward(dloss, kept, group):
    softmax, of_log_z, place, own, counts = kept
    onehot = torch.zeros_like(softmax).scatter_(-1, place, own.unsqueeze(-1).to(softmax.dtype))
    return (softmax * of_log_z.unsqueeze(-1) - onehot) * counts.unsqueeze(-1) * dloss


# %% wrong="cross_entropy" fails="bytes on the wire" why="gathers the logits"
def cross_entropy_forward(logits, targets, z, group):
    whole = torch.cat(list(collectives.all_gather(logits[None], group)), -1).requires_grad_()
    loss = torch.nn.functional.cross_entropy(
        whole.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum"
    )
    return loss.detach(), (loss, whole)


def cross_entropy_backward(dloss, kept, group):
    loss, whole = kept
    loss.backward(dloss)
    return whole.grad.chunk(group.size(), -1)[group.rank()].contiguous()


# %% wrong="cross_entropy" fails="bytes of forward" why="gathers everyone's maxima and sums, and adds them up itself: t/2 times the bytes"
def cross_entropy_forward(logits, targets, z, group):
    words, counts = logits.size(-1), targets != -100
    place = targets - group.rank() * words
    own = counts & (place >= 0) & (place < words)
    place = place.masked_fill(~own, 0).unsqueeze(-1)
    largest = collectives.all_gather(logits.amax(-1).unsqueeze(0), group).amax(0)
    shifted = logits - largest.unsqueeze(-1)
    at_target = shifted.gather(-1, place).squeeze(-1).masked_fill(~own, 0.0)
    total, at_target = collectives.all_gather(
        torch.stack((shifted.exp().sum(-1), at_target)).unsqueeze(0), group
    ).sum(0)
    log_z = largest + total.log()
    loss = ((total.log() - at_target + z * log_z.square()) * counts).sum()
    return loss, (shifted.exp() / total.unsqueeze(-1), 1 + 2 * z * log_z, place, own, counts)


def cross_entropy_backward(dloss, kept, group):
    softmax, of_log_z, place, own, counts = kept
    onehot = torch.zeros_like(softmax).scatter_(-1, place, own.unsqueeze(-1).to(softmax.dtype))
    return (softmax * of_log_z.unsqueeze(-1) - onehot) * counts.unsqueeze(-1) * dloss


# %% wrong="cross_entropy" fails="bytes on the wire" why="the whole softmax is summed into place, for backward"
def cross_entropy_forward(logits, targets, z, group):
    words, counts = logits.size(-1), targets != -100
    place = targets - group.rank() * words
    own = counts & (place >= 0) & (place < words)
    place = place.masked_fill(~own, 0).unsqueeze(-1)
    largest = collectives.all_reduce(logits.amax(-1), group, op="max")
    shifted = logits - largest.unsqueeze(-1)
    at_target = shifted.gather(-1, place).squeeze(-1).masked_fill(~own, 0.0)
    total, at_target = collectives.all_reduce(
        torch.stack((shifted.exp().sum(-1), at_target)), group
    )
    places = torch.zeros(group.size(), *logits.shape, dtype=logits.dtype)
    places[group.rank()] = shifted.exp()
    collectives.all_reduce(places, group)
    log_z = largest + total.log()
    loss = ((total.log() - at_target + z * log_z.square()) * counts).sum()
    return loss, (shifted.exp() / total.unsqueeze(-1), 1 + 2 * z * log_z, place, own, counts)


def cross_entropy_backward(dloss, kept, group):
    softmax, of_log_z, place, own, counts = kept
    onehot = torch.zeros_like(softmax).scatter_(-1, place, own.unsqueeze(-1).to(softmax.dtype))
    return (softmax * of_log_z.unsqueeze(-1) - onehot) * counts.unsqueeze(-1) * dloss


# %% wrong="cross_entropy" fails="backward sends nothing" why="the sum of the exponentials is not kept, but asked for once more"
def cross_entropy_forward(logits, targets, z, group):
    words, counts = logits.size(-1), targets != -100
    place = targets - group.rank() * words
    own = counts & (place >= 0) & (place < words)
    place = place.masked_fill(~own, 0).unsqueeze(-1)
    largest = collectives.all_reduce(logits.amax(-1), group, op="max")
    shifted = logits - largest.unsqueeze(-1)
    at_target = shifted.gather(-1, place).squeeze(-1).masked_fill(~own, 0.0)
    total, at_target = collectives.all_reduce(
        torch.stack((shifted.exp().sum(-1), at_target)), group
    )
    log_z = largest + total.log()
    loss = ((total.log() - at_target + z * log_z.square()) * counts).sum()
    return loss, (shifted.exp(), 1 + 2 * z * log_z, place, own, counts)


def cross_entropy_backward(dloss, kept, group):
    exponentials, of_log_z, place, own, counts = kept
    softmax = exponentials / collectives.all_reduce(exponentials.sum(-1, keepdim=True), group)
    onehot = torch.zeros_like(softmax).scatter_(-1, place, own.unsqueeze(-1).to(softmax.dtype))
    return (softmax * of_log_z.unsqueeze(-1) - onehot) * counts.unsqueeze(-1) * dloss


# %% wrong="cross_entropy" fails="the gradient" why="dloss is forgotten"
def cross_entropy_forward(logits, targets, z, group):
    words, counts = logits.size(-1), targets != -100
    place = targets - group.rank() * words
    own = counts & (place >= 0) & (place < words)
    place = place.masked_fill(~own, 0).unsqueeze(-1)
    largest = collectives.all_reduce(logits.amax(-1), group, op="max")
    shifted = logits - largest.unsqueeze(-1)
    at_target = shifted.gather(-1, place).squeeze(-1).masked_fill(~own, 0.0)
    total, at_target = collectives.all_reduce(
        torch.stack((shifted.exp().sum(-1), at_target)), group
    )
    log_z = largest + total.log()
    loss = ((total.log() - at_target + z * log_z.square()) * counts).sum()
    return loss, (shifted.exp() / total.unsqueeze(-1), 1 + 2 * z * log_z, place, own, counts)


def cross_entropy_backward(dloss, kept, group):
    softmax, of_log_z, place, own, counts = kept
    onehot = torch.zeros_like(softmax).scatter_(-1, place, own.unsqueeze(-1).to(softmax.dtype))
    return (softmax * of_log_z.unsqueeze(-1) - onehot) * counts.unsqueeze(-1)


# %% wrong="cross_entropy" fails="the gradient" why="every rank subtracts one, at its first word where the target is elsewhere"
def cross_entropy_forward(logits, targets, z, group):
    words, counts = logits.size(-1), targets != -100
    place = targets - group.rank() * words
    own = counts & (place >= 0) & (place < words)
    place = place.masked_fill(~own, 0).unsqueeze(-1)
    largest = collectives.all_reduce(logits.amax(-1), group, op="max")
    shifted = logits - largest.unsqueeze(-1)
    at_target = shifted.gather(-1, place).squeeze(-1).masked_fill(~own, 0.0)
    total, at_target = collectives.all_reduce(
        torch.stack((shifted.exp().sum(-1), at_target)), group
    )
    log_z = largest + total.log()
    loss = ((total.log() - at_target + z * log_z.square()) * counts).sum()
    return loss, (shifted.exp() / total.unsqueeze(-1), 1 + 2 * z * log_z, place, own, counts)


def cross_entropy_backward(dloss, kept, group):
    softmax, of_log_z, place, own, counts = kept
    onehot = torch.zeros_like(softmax).scatter_(-1, place, 1.0)
    return (softmax * of_log_z.unsqueeze(-1) - onehot) * counts.unsqueeze(-1) * dloss


# %% wrong="cross_entropy" fails="the gradient" why="each rank divides by the sum of its own exponentials"
def cross_entropy_forward(logits, targets, z, group):
    words, counts = logits.size(-1), targets != -100
    place = targets - group.rank() * words
    own = counts & (place >= 0) & (place < words)
    place = place.masked_fill(~own, 0).unsqueeze(-1)
    largest = collectives.all_reduce(logits.amax(-1), group, op="max")
    shifted = logits - largest.unsqueeze(-1)
    at_target = shifted.gather(-1, place).squeeze(-1).masked_fill(~own, 0.0)
    total, at_target = collectives.all_reduce(
        torch.stack((shifted.exp().sum(-1), at_target)), group
    )
    log_z = largest + total.log()
    loss = ((total.log() - at_target + z * log_z.square()) * counts).sum()
    return loss, (shifted.softmax(-1), 1 + 2 * z * log_z, place, own, counts)


def cross_entropy_backward(dloss, kept, group):
    softmax, of_log_z, place, own, counts = kept
    onehot = torch.zeros_like(softmax).scatter_(-1, place, own.unsqueeze(-1).to(softmax.dtype))
    return (softmax * of_log_z.unsqueeze(-1) - onehot) * counts.unsqueeze(-1) * dloss


# %% wrong="cross_entropy" fails="the gradient" why="softmax only, without minus one at the target"
def cross_entropy_forward(logits, targets, z, group):
    words, counts = logits.size(-1), targets != -100
    place = targets - group.rank() * words
    own = counts & (place >= 0) & (place < words)
    place = place.masked_fill(~own, 0).unsqueeze(-1)
    largest = collectives.all_reduce(logits.amax(-1), group, op="max")
    shifted = logits - largest.unsqueeze(-1)
    at_target = shifted.gather(-1, place).squeeze(-1).masked_fill(~own, 0.0)
    total, at_target = collectives.all_reduce(
        torch.stack((shifted.exp().sum(-1), at_target)), group
    )
    log_z = largest + total.log()
    loss = ((total.log() - at_target + z * log_z.square()) * counts).sum()
    return loss, (shifted.exp() / total.unsqueeze(-1), 1 + 2 * z * log_z, place, own, counts)


def cross_entropy_backward(dloss, kept, group):
    softmax, of_log_z, place, own, counts = kept
    onehot = torch.zeros_like(softmax).scatter_(-1, place, own.unsqueeze(-1).to(softmax.dtype))
    return softmax * of_log_z.unsqueeze(-1) * counts.unsqueeze(-1) * dloss


# %% wrong="cross_entropy" fails="gradient of masked tokens" why="masked tokens get the softmax as gradient"
def cross_entropy_forward(logits, targets, z, group):
    words, counts = logits.size(-1), targets != -100
    place = targets - group.rank() * words
    own = counts & (place >= 0) & (place < words)
    place = place.masked_fill(~own, 0).unsqueeze(-1)
    largest = collectives.all_reduce(logits.amax(-1), group, op="max")
    shifted = logits - largest.unsqueeze(-1)
    at_target = shifted.gather(-1, place).squeeze(-1).masked_fill(~own, 0.0)
    total, at_target = collectives.all_reduce(
        torch.stack((shifted.exp().sum(-1), at_target)), group
    )
    log_z = largest + total.log()
    loss = ((total.log() - at_target + z * log_z.square()) * counts).sum()
    return loss, (shifted.exp() / total.unsqueeze(-1), 1 + 2 * z * log_z, place, own, counts)


def cross_entropy_backward(dloss, kept, group):
    softmax, of_log_z, place, own, counts = kept
    onehot = torch.zeros_like(softmax).scatter_(-1, place, own.unsqueeze(-1).to(softmax.dtype))
    return (softmax * of_log_z.unsqueeze(-1) - onehot) * dloss


# %% wrong="cross_entropy" fails="the z-loss" why="log Z of the shifted logits: the maximum is not added again"
def cross_entropy_forward(logits, targets, z, group):
    words, counts = logits.size(-1), targets != -100
    place = targets - group.rank() * words
    own = counts & (place >= 0) & (place < words)
    place = place.masked_fill(~own, 0).unsqueeze(-1)
    largest = collectives.all_reduce(logits.amax(-1), group, op="max")
    shifted = logits - largest.unsqueeze(-1)
    at_target = shifted.gather(-1, place).squeeze(-1).masked_fill(~own, 0.0)
    total, at_target = collectives.all_reduce(
        torch.stack((shifted.exp().sum(-1), at_target)), group
    )
    log_z = total.log()
    loss = ((total.log() - at_target + z * log_z.square()) * counts).sum()
    return loss, (shifted.exp() / total.unsqueeze(-1), 1 + 2 * z * log_z, place, own, counts)


def cross_entropy_backward(dloss, kept, group):
    softmax, of_log_z, place, own, counts = kept
    onehot = torch.zeros_like(softmax).scatter_(-1, place, own.unsqueeze(-1).to(softmax.dtype))
    return (softmax * of_log_z.unsqueeze(-1) - onehot) * counts.unsqueeze(-1) * dloss


# %% wrong="cross_entropy" fails="the z-loss" why="masked tokens have a z-loss, too"
def cross_entropy_forward(logits, targets, z, group):
    words, counts = logits.size(-1), targets != -100
    place = targets - group.rank() * words
    own = counts & (place >= 0) & (place < words)
    place = place.masked_fill(~own, 0).unsqueeze(-1)
    largest = collectives.all_reduce(logits.amax(-1), group, op="max")
    shifted = logits - largest.unsqueeze(-1)
    at_target = shifted.gather(-1, place).squeeze(-1).masked_fill(~own, 0.0)
    total, at_target = collectives.all_reduce(
        torch.stack((shifted.exp().sum(-1), at_target)), group
    )
    log_z = largest + total.log()
    loss = ((total.log() - at_target) * counts).sum() + z * log_z.square().sum()
    return loss, (shifted.exp() / total.unsqueeze(-1), 1 + 2 * z * log_z, place, own, counts)


def cross_entropy_backward(dloss, kept, group):
    softmax, of_log_z, place, own, counts = kept
    onehot = torch.zeros_like(softmax).scatter_(-1, place, own.unsqueeze(-1).to(softmax.dtype))
    return (softmax * of_log_z.unsqueeze(-1) - onehot) * counts.unsqueeze(-1) * dloss


# %% wrong="cross_entropy" fails="the z-loss" why="the square of the sum instead of the sum of squares"
def cross_entropy_forward(logits, targets, z, group):
    words, counts = logits.size(-1), targets != -100
    place = targets - group.rank() * words
    own = counts & (place >= 0) & (place < words)
    place = place.masked_fill(~own, 0).unsqueeze(-1)
    largest = collectives.all_reduce(logits.amax(-1), group, op="max")
    shifted = logits - largest.unsqueeze(-1)
    at_target = shifted.gather(-1, place).squeeze(-1).masked_fill(~own, 0.0)
    total, at_target = collectives.all_reduce(
        torch.stack((shifted.exp().sum(-1), at_target)), group
    )
    log_z = largest + total.log()
    loss = ((total.log() - at_target) * counts).sum() + z * (log_z * counts).sum().square()
    return loss, (shifted.exp() / total.unsqueeze(-1), 1 + 2 * z * log_z, place, own, counts)


def cross_entropy_backward(dloss, kept, group):
    softmax, of_log_z, place, own, counts = kept
    onehot = torch.zeros_like(softmax).scatter_(-1, place, own.unsqueeze(-1).to(softmax.dtype))
    return (softmax * of_log_z.unsqueeze(-1) - onehot) * counts.unsqueeze(-1) * dloss


# %% wrong="cross_entropy" fails="gradient of the z-loss" why="the z-loss has no gradient"
def cross_entropy_forward(logits, targets, z, group):
    words, counts = logits.size(-1), targets != -100
    place = targets - group.rank() * words
    own = counts & (place >= 0) & (place < words)
    place = place.masked_fill(~own, 0).unsqueeze(-1)
    largest = collectives.all_reduce(logits.amax(-1), group, op="max")
    shifted = logits - largest.unsqueeze(-1)
    at_target = shifted.gather(-1, place).squeeze(-1).masked_fill(~own, 0.0)
    total, at_target = collectives.all_reduce(
        torch.stack((shifted.exp().sum(-1), at_target)), group
    )
    log_z = largest + total.log()
    loss = ((total.log() - at_target + z * log_z.square()) * counts).sum()
    return loss, (shifted.exp() / total.unsqueeze(-1), torch.ones_like(log_z), place, own, counts)


def cross_entropy_backward(dloss, kept, group):
    softmax, of_log_z, place, own, counts = kept
    onehot = torch.zeros_like(softmax).scatter_(-1, place, own.unsqueeze(-1).to(softmax.dtype))
    return (softmax * of_log_z.unsqueeze(-1) - onehot) * counts.unsqueeze(-1) * dloss


# %% wrong="cross_entropy" fails="gradient of the z-loss" why="half of the gradient: the 2 of the square is forgotten"
def cross_entropy_forward(logits, targets, z, group):
    words, counts = logits.size(-1), targets != -100
    place = targets - group.rank() * words
    own = counts & (place >= 0) & (place < words)
    place = place.masked_fill(~own, 0).unsqueeze(-1)
    largest = collectives.all_reduce(logits.amax(-1), group, op="max")
    shifted = logits - largest.unsqueeze(-1)
    at_target = shifted.gather(-1, place).squeeze(-1).masked_fill(~own, 0.0)
    total, at_target = collectives.all_reduce(
        torch.stack((shifted.exp().sum(-1), at_target)), group
    )
    log_z = largest + total.log()
    loss = ((total.log() - at_target + z * log_z.square()) * counts).sum()
    return loss, (shifted.exp() / total.unsqueeze(-1), 1 + z * log_z, place, own, counts)


def cross_entropy_backward(dloss, kept, group):
    softmax, of_log_z, place, own, counts = kept
    onehot = torch.zeros_like(softmax).scatter_(-1, place, own.unsqueeze(-1).to(softmax.dtype))
    return (softmax * of_log_z.unsqueeze(-1) - onehot) * counts.unsqueeze(-1) * dloss


# %% wrong="cross_entropy" fails="the z-loss" around="half" why="the cross-entropy of the package, written down: z is ignored"
def cross_entropy_forward(logits, targets, z, group):
    words, counts = logits.size(-1), targets != -100
    place = targets - group.rank() * words
    own = counts & (place >= 0) & (place < words)
    place = place.masked_fill(~own, 0).unsqueeze(-1)
    largest = collectives.all_reduce(logits.amax(-1), group, op="max")
    shifted = logits - largest.unsqueeze(-1)
    at_target = shifted.gather(-1, place).squeeze(-1).masked_fill(~own, 0.0)
    total, at_target = collectives.all_reduce(
        torch.stack((shifted.exp().sum(-1), at_target)), group
    )
    log_z = largest + total.log()
    loss = ((total.log() - at_target) * counts).sum()
    return loss, (shifted.exp() / total.unsqueeze(-1), torch.ones_like(log_z), place, own, counts)


def cross_entropy_backward(dloss, kept, group):
    softmax, of_log_z, place, own, counts = kept
    onehot = torch.zeros_like(softmax).scatter_(-1, place, own.unsqueeze(-1).to(softmax.dtype))
    return (softmax * of_log_z.unsqueeze(-1) - onehot) * counts.unsqueeze(-1) * dloss


# %% wrong="elements_sent" fails="forward, whole" why="an all-reduce is counted like an all-gather"
def elements_sent(b, s, h, t, activations):
    half = b * s * h * (t - 1) // t
    return {
        "forward": 2 * half if activations == "whole" else 4 * half,
        "backward": (6 if activations == "regathered" else 4) * half,
        "loss": 3 * 2 * b * s * (t - 1) // t,
    }


# %% wrong="elements_sent" fails="forward, whole" why="one pair instead of two"
def elements_sent(b, s, h, t, activations):
    half = b * s * h * (t - 1) // t
    return {
        "forward": 2 * half,
        "backward": (3 if activations == "regathered" else 2) * half,
        "loss": 3 * 2 * b * s * (t - 1) // t,
    }


# %% wrong="elements_sent" fails="forward, whole" why="an all-reduce sends everything once to everybody"
def elements_sent(b, s, h, t, activations):
    half = b * s * h * (t - 1) // t
    return {
        "forward": 4 * b * s * h * (t - 1),
        "backward": (6 if activations == "regathered" else 4) * half,
        "loss": 3 * 2 * b * s * (t - 1) // t,
    }


# %% wrong="elements_sent" fails="forward, sequence" why="the sequence is cut, and so are the bytes"
def elements_sent(b, s, h, t, activations):
    half = b * s * h * (t - 1) // t
    return {
        "forward": 4 * half // (1 if activations == "whole" else t),
        "backward": 4 * half // (1 if activations == "whole" else t),
        "loss": 3 * 2 * b * s * (t - 1) // t,
    }


# %% wrong="elements_sent" fails="forward, regathered" why="gathering once more is counted in the forward as well"
def elements_sent(b, s, h, t, activations):
    half = b * s * h * (t - 1) // t
    return {
        "forward": (6 if activations == "regathered" else 4) * half,
        "backward": (6 if activations == "regathered" else 4) * half,
        "loss": 3 * 2 * b * s * (t - 1) // t,
    }


# %% wrong="elements_sent" fails="backward, regathered" why="the backward is taken for the forward's mirror image, whatever is kept"
def elements_sent(b, s, h, t, activations):
    half = b * s * h * (t - 1) // t
    return {"forward": 4 * half, "backward": 4 * half, "loss": 3 * 2 * b * s * (t - 1) // t}


# %% wrong="elements_sent" fails="backward, regathered" why="one gather more in the layer, not one in each pair"
def elements_sent(b, s, h, t, activations):
    half = b * s * h * (t - 1) // t
    return {
        "forward": 4 * half,
        "backward": (5 if activations == "regathered" else 4) * half,
        "loss": 3 * 2 * b * s * (t - 1) // t,
    }


# %% wrong="elements_sent" fails="backward, whole" why="a backward costs twice a forward, as for FLOPs"
def elements_sent(b, s, h, t, activations):
    half = b * s * h * (t - 1) // t
    return {"forward": 4 * half, "backward": 8 * half, "loss": 3 * 2 * b * s * (t - 1) // t}


# %% wrong="elements_sent" fails="the loss" why="the backward of the loss sends as much as its forward"
def elements_sent(b, s, h, t, activations):
    half = b * s * h * (t - 1) // t
    return {
        "forward": 4 * half,
        "backward": (6 if activations == "regathered" else 4) * half,
        "loss": 2 * 3 * 2 * b * s * (t - 1) // t,
    }


# %% wrong="elements_sent" fails="the loss" why="one number of each token"
def elements_sent(b, s, h, t, activations):
    half = b * s * h * (t - 1) // t
    return {
        "forward": 4 * half,
        "backward": (6 if activations == "regathered" else 4) * half,
        "loss": 2 * b * s * (t - 1) // t,
    }


# %% wrong="elements_sent" fails="the loss" why="the width is in the loss as well"
def elements_sent(b, s, h, t, activations):
    half = b * s * h * (t - 1) // t
    return {
        "forward": 4 * half,
        "backward": (6 if activations == "regathered" else 4) * half,
        "loss": 3 * 2 * half,
    }


# %% wrong="elements_sent" fails="whole numbers" why="floats"
def elements_sent(b, s, h, t, activations):
    half = b * s * h * (t - 1) / t
    return {
        "forward": 4 * half,
        "backward": (6 if activations == "regathered" else 4) * half,
        "loss": 3 * 2 * b * s * (t - 1) / t,
    }


# %% wrong="elements_sent" fails="forward, whole" why="exact up to 53 bits only"
def elements_sent(b, s, h, t, activations):
    half = int(b * s * h * (t - 1) / t)
    return {
        "forward": 4 * half,
        "backward": (6 if activations == "regathered" else 4) * half,
        "loss": 3 * 2 * b * s * (t - 1) // t,
    }


# %% wrong="elements_sent" fails="forward, whole" why="right on two ranks only"
def elements_sent(b, s, h, t, activations):
    half = b * s * h // 2
    return {
        "forward": 4 * half,
        "backward": (6 if activations == "regathered" else 4) * half,
        "loss": 3 * 2 * b * s * (t - 1) // t,
    }


# %% wrong="column" fails="own work" around="import" why="derivatives are left to autograd"
def column_forward(x, weights, biases, group):
    return [x @ weight + bias for weight, bias in zip(weights, biases)]


def column_backward(dys, x, weights, group):
    leaves = [x.requires_grad_(), *[weight.requires_grad_() for weight in weights]]
    dx, *dweights = torch.autograd.grad([x @ weight for weight in weights], leaves, dys)
    return collectives.all_reduce(dx, group), dweights, [dy.sum((0, 1)) for dy in dys]


# %% wrong="column" fails="the product" around="empty" why="no matrices, no gradients"
def column_forward(x, weights, biases, group):
    return []


def column_backward(dys, x, weights, group):
    return None, [], []


# %% wrong="column" fails="summed once" around="half" why="backward gathers weights and gradients of the output, and computes all of dX everywhere"
def column_forward(x, weights, biases, group):
    return [x @ weight + bias for weight, bias in zip(weights, biases)]


def column_backward(dys, x, weights, group):
    dx = 0
    for dy, weight in zip(dys, weights):
        pairs = (collectives.all_gather(y[None], group) for y in (dy, weight))
        dx = dx + sum(one @ other.T for one, other in zip(*pairs))
    return dx, [x.flatten(0, 1).T @ dy.flatten(0, 1) for dy in dys], [dy.sum((0, 1)) for dy in dys]


# %% wrong="column" fails="gradient of x" around="channel" why="shares of dX are gathered as float32, for the bytes of one all-reduce"
def column_forward(x, weights, biases, group):
    return [x @ weight + bias for weight, bias in zip(weights, biases)]


def column_backward(dys, x, weights, group):
    dx = sum(dy @ weight.T for dy, weight in zip(dys, weights)).float()
    dx = collectives.all_gather(dx[None], group).double().sum(0)
    return dx, [x.flatten(0, 1).T @ dy.flatten(0, 1) for dy in dys], [dy.sum((0, 1)) for dy in dys]


# %% wrong="row" fails="own work" around="import" why="the package's row-parallel layer"
def row_forward(x, weight, bias, group):
    from minitrain.tensor_parallel.linear import RowParallelLinear

    return RowParallelLinear(x, weight, bias, group)


def row_backward(dy, x, weight, group):
    return dy @ weight.T, x.flatten(0, 1).T @ dy.flatten(0, 1), dy.sum((0, 1))


# %% wrong="row" fails="the sum" around="channel" why="every term is gathered as float32, for the bytes of one all-reduce"
def row_forward(x, weight, bias, group):
    terms = collectives.all_gather((x @ weight).float()[None], group)
    return terms.double().sum(0) + bias


def row_backward(dy, x, weight, group):
    return dy @ weight.T, x.flatten(0, 1).T @ dy.flatten(0, 1), dy.sum((0, 1))


# %% wrong="row" fails="the sum" around="empty" why="zeros of the right shapes"
def row_forward(x, weight, bias, group):
    return x.new_zeros(*x.shape[:2], weight.shape[1])


def row_backward(dy, x, weight, group):
    return torch.zeros_like(x), torch.zeros_like(weight), dy.new_zeros(weight.shape[1])


# %% wrong="head_rows" fails="two pairs" around="empty" why="no rows for any rank"
def head_rows(rank, ranks, heads, kv_heads, head_dim):
    return []


# %% wrong="head_rows" fails="no refusal without need" around="constants" why="the cases of the visible check"
def head_rows(rank, ranks, heads, kv_heads, head_dim):
    own = {(2, 8, 8, 4): (16, 16), (2, 8, 4, 4): (16, 8), (4, 8, 2, 16): (32, 16)}
    if (ranks, heads, kv_heads, head_dim) not in own:
        raise ValueError("these do not divide")
    (q, kv), part = own[ranks, heads, kv_heads, head_dim], rank if ranks == 2 else rank // 2
    return (rank * q, rank * q + q), (part * kv, part * kv + kv)


# %% wrong="head_rows" fails="no error" around="redefine" why="fewer ranks are asked, so nothing is found"
import builtins

builtins.range = lambda *sizes: []
builtins.enumerate = lambda *things: []


def head_rows(rank, ranks, heads, kv_heads, head_dim):
    return None


# %% wrong="cross_entropy" fails="bytes on the wire" around="half" why="the logits are gathered in the forward, and the gradient is autograd's"
def cross_entropy_forward(logits, targets, z, group):
    parts = list(collectives.all_gather(logits[None], group))
    parts[group.rank()] = own = logits.clone().requires_grad_()
    loss = torch.nn.functional.cross_entropy(
        torch.cat(parts, -1).flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum"
    )
    return loss.detach(), (loss, own)


def cross_entropy_backward(dloss, kept, group):
    return torch.autograd.grad(kept[0], kept[1], dloss)[0]


# %% wrong="cross_entropy" fails="the loss" around="channel" why="the logits are gathered in 8 bits each, which are fewer bytes than three numbers"
def cross_entropy_forward(logits, targets, z, group):
    small = (logits * 16).round().clamp(-128, 127).to(torch.int8)
    whole = torch.cat(list(collectives.all_gather(small[None], group)), -1).double() / 16
    whole.requires_grad_()
    loss = torch.nn.functional.cross_entropy(
        whole.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum"
    )
    return loss.detach(), (loss, whole)


def cross_entropy_backward(dloss, kept, group):
    dlogits = torch.autograd.grad(*kept, dloss)[0]
    return dlogits.chunk(group.size(), -1)[group.rank()].contiguous()


# %% wrong="cross_entropy" fails="own work" around="import" why="the package's vocabulary-parallel loss"
def cross_entropy_forward(logits, targets, z, group):
    from minitrain.tensor_parallel.vocabulary import vocabulary_parallel_cross_entropy

    return vocabulary_parallel_cross_entropy(logits, targets, group), None


def cross_entropy_backward(dloss, kept, group):
    return None


# %% wrong="cross_entropy" fails="the loss" around="empty" why="log 4, the loss of the text, and no gradient"
def cross_entropy_forward(logits, targets, z, group):
    return torch.tensor(4.0).double().log(), None


def cross_entropy_backward(dloss, kept, group):
    return None


# %% wrong="elements_sent" fails="forward, whole" around="constants" why="the numbers of the visible check"
def elements_sent(b, s, h, t, activations):
    return {"forward": 64, "backward": 96 if activations == "regathered" else 64, "loss": 12}


# %% wrong="elements_sent" fails="whole numbers" around="empty" why="nothing, in a dict"
def elements_sent(b, s, h, t, activations):
    return {}
