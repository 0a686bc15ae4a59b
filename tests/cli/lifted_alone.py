"""Lifted files at work where there is no minitrain: python -I lifted_alone.py FOLDER RANK RANKS.

Each check compares with one process, which it plays itself in plain torch, and gives the largest difference.
The control comes behind: all of them again, while collectives and messages do nothing.
"""

import importlib.util
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

folder, rank, ranks = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
sys.modules["minitrain"] = None  # an import of it is an error
torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)


def lifted(name):
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def furthest(pairs):
    return max(float((a.detach() - b.detach()).abs().max()) for a, b in pairs)


def net(*sizes):
    torch.manual_seed(0)
    return nn.Sequential(*(layer for a, b in zip(sizes, sizes[1:]) for layer in (nn.Linear(a, b), nn.Tanh())))


ROWS = torch.randn(10, 6, generator=torch.Generator().manual_seed(1))
mine = lambda x, dim=0: x.chunk(ranks, dim)[rank]
adam = lambda params: torch.optim.Adam(params, lr=0.01)


def trained(model, steps=3):
    optimizer = adam(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        (model(ROWS).square().sum() / 10).backward()
        optimizer.step()
    return model


def bucketed(m, group):
    model, whole = net(6, 8, 4), net(6, 8, 4)
    reducer = m.GradReducer(model.parameters(), group, bucket_bytes=300)
    model(mine(ROWS)).square().sum().backward()
    reducer.finish()
    whole(ROWS).square().sum().backward()
    return furthest((a.grad, b.grad) for a, b in zip(model.parameters(), whole.parameters()))


def tensor_parallel(m, group):
    model, whole, x = net(6, 8, 4), net(6, 8, 4), ROWS.clone().requires_grad_()
    up, down = m.ColumnLinear(model[0], group), m.RowLinear(model[2], group)
    y = down(up(x).tanh())
    y.square().sum().backward()
    wanted = whole[2](whole[1](whole[0](other := ROWS.clone().requires_grad_())))
    wanted.square().sum().backward()
    pairs = [(y, wanted), (x.grad, other.grad), (up.weight.grad, mine(whole[0].weight.grad))]
    return furthest([*pairs, (down.weight.grad, mine(whole[2].weight.grad, 1))])


def zero(m, group):
    model, sync = net(6, 8, 4), getattr(m, "Zero1", None) or m.Zero3
    sync = sync(model, group, adam)
    for _ in range(3):
        sync.zero_grad()
        (model(mine(ROWS)).square().sum() / 10).backward()
        sync.finish()
        sync.step()
    return furthest([(model(ROWS), trained(net(6, 8, 4))(ROWS))])


def attention(m, group):
    drawn = torch.randn(3, 2, 4, 16, 6, generator=torch.Generator().manual_seed(2))
    whole = [x.clone().requires_grad_() for x in drawn]
    dout = torch.randn(2, 4, 16, 6, generator=torch.Generator().manual_seed(3))
    wanted = F.scaled_dot_product_attention(*whole, is_causal=True)
    wanted.backward(dout)
    if hasattr(m, "ulysses_attention"):
        cut = lambda x: mine(x, 2)
        qkv = [cut(x).clone().requires_grad_() for x in drawn]
        core = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out = m.ulysses_attention(*qkv, group=group, core=core)
        out.backward(cut(dout))
        grads = [x.grad for x in qkv]
    else:
        places = sum((list(run) for run in m.zigzag(rank, ranks, 16)), [])
        cut = lambda x: x[:, :, places]
        rings, qkv = m.Rings((group,), m.zigzag, True), [cut(x) for x in drawn]
        out, lse = m.ring_forward(*qkv, rings, m.PLAIN)
        grads = m.ring_backward(cut(dout), *qkv, out, lse, rings, m.PLAIN)
    return furthest([(out, cut(wanted)), *((a, cut(b.grad)) for a, b in zip(grads, whole))])


def pipeline(m, group):
    whole, stage = net(6, 6, 6, 6, 6), net(6, 6, 6, 6, 6)[4 * rank : 4 * rank + 4]
    loss = lambda y, targets: (y - targets).square().sum()
    reducer = SimpleNamespace(
        on_step_grads=lambda params: None, on_microbatch_grads=lambda params: None, finish=lambda: None
    )
    rows, targets = ROWS.view(5, 2, 6), torch.arange(10.0).view(5, 2, 1)
    batch = SimpleNamespace(
        tokens=rows[..., 0], targets=targets[..., 0], positions=None, num_valid=torch.tensor(10)
    )

    class First(nn.Module):  # tokens are numbers here: the row is made of them
        def __init__(self):
            super().__init__()
            self.stage = stage

        def forward(self, x):
            return self.stage(x[..., None] * torch.arange(1.0, 7)) if rank == 0 else self.stage(x)

    runner = m.Runner(
        {rank: First()}, m.one_f_one_b(ranks, 3), group, lambda y, t: loss(y, t[..., None]), reducer, width=6
    )
    total = runner(batch)
    wanted = loss(whole(batch.tokens[..., None] * torch.arange(1.0, 7)), targets) / 10
    wanted.backward()
    pairs = [
        (a.grad, b.grad) for a, b in zip(stage.parameters(), whole[4 * rank : 4 * rank + 4].parameters())
    ]
    return furthest(pairs + [(total, wanted)] * (rank == ranks - 1))


def experts(m, group):
    torch.manual_seed(4)
    up, down, scores = torch.randn(4, 6, 8), torch.randn(4, 8, 6), torch.randn(10, 4)
    whole = [x.clone().requires_grad_() for x in (ROWS, up, down)]
    own = [x.clone().requires_grad_() for x in (mine(ROWS), mine(up), mine(down))]
    routing = m.top_k(mine(scores), 2)
    trip = m.Dispatch(routing, group)
    y = trip.back(m.grouped(trip.there(own[0]), trip.counts, *own[1:], F.gelu), routing.weights)
    chosen = scores.topk(2)
    made = torch.einsum("nd,edf->nef", whole[0], whole[1])
    results = torch.einsum("nef,efd->ned", F.gelu(made), whole[2])
    weights = torch.zeros(10, 4).scatter(1, chosen[1], chosen[0].softmax(-1))
    wanted = (weights[..., None] * results).sum(1)
    wanted.square().sum().backward()
    y.square().sum().backward()
    return furthest([(y, mine(wanted)), *((a.grad, mine(b.grad)) for a, b in zip(own, whole))])


def few_bits(m, group):
    """Tokens are cut; an amax is that of all ranks: the same codes as one process."""
    recipe = m.RECIPES["fp8_tensor"]
    products, found = m.Products(recipe, recipe, recipe), []
    for x, scales in ((mine(ROWS), m.Scales(group=group, cut="M")), (ROWS, m.Scales())):
        x, weight = x.clone().requires_grad_(), net(6, 8)[0].weight
        (y,) = m.multiply(x, [weight], [scales], products)
        y.square().sum().backward()
        if len(x) < len(ROWS):
            dist.all_reduce(weight.grad, group=group)
        found.append((y, x.grad, weight.grad))
    (y, dx, dw), (all_y, all_dx, all_dw) = found
    assert 1e-6 < furthest([(all_y, ROWS @ weight.T)]) < 0.1  # few bits, and the product
    return furthest([(y, mine(all_y)), (dx, mine(all_dx)), (dw, all_dw)])


def recomputed(m, group):
    block, saved, found = net(6, 8, 8, 6), [], []
    place = lambda x: x.untyped_storage().data_ptr()
    for run in (lambda x: m.recompute(block, x), block):
        block.zero_grad()
        x, kept = ROWS.clone().requires_grad_(), []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            y = run(x)
        y.square().sum().backward()
        saved.append(len({place(t) for t in kept} - {place(param) for param in block.parameters()}))
        found.append([y, x.grad, *(param.grad.clone() for param in block.parameters())])
    assert saved[0] == 1 < saved[1], saved
    return furthest(zip(*found))


def on_the_host(m, group):
    model = net(6, 8, 4)
    host = m.HostOptimizer(adam(model.parameters()))
    for _ in range(3):
        host.zero_grad()
        (model(mine(ROWS)).square().sum() / 10).backward()
        for param in model.parameters():
            grad, param.grad = param.grad, None
            dist.all_reduce(grad, group=group)
            host.on_grad_final(param, grad)
        host.step()
    return furthest(zip(model.parameters(), trained(net(6, 8, 4)).parameters()))


def saved(m, group):
    """Saved by rows on all ranks, read by columns."""
    table = torch.arange(60.0).view(10, 6)
    pieces = [m.Piece("table", (10, 6), (rank * 10 // ranks, 0), mine(table))]
    same = m.Piece(
        "same", (10,), (0,), table[:, 0].contiguous(), (group,)
    )  # every rank has it, and writes a part
    path, written = folder / f"rank{rank}.safetensors", [None] * ranks
    dist.all_gather_object(
        written, (path, m.write_file(m.Disk(), path, m.share_out([*pieces, same]), {"step": 3}))
    )
    found = m.Saved([m.File(*one) for one in written])
    columns, again = torch.zeros(10, 6 // ranks), torch.zeros(10)
    for piece in (
        m.Piece("table", (10, 6), (0, rank * 6 // ranks), columns),
        m.Piece("same", (10,), (0,), again),
    ):
        found.fill(piece)
    found.finish()
    assert found.plain["step"] == 3
    return furthest([(columns, mine(table, 1)), (again, table[:, 0])])


CHECKS = {
    "GradReducer": bucketed, "linear": tensor_parallel, "Zero1": zero, "Zero3": zero, "ring": attention,
    "ulysses": attention, "Runner": pipeline, "experts": experts, "fp8": few_bits, "recompute": recomputed,
    "HostOptimizer": on_the_host, "checkpoint": saved,
}  # fmt: skip

if __name__ == "__main__":
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    found = [{name: check(lifted(name), dist.group.WORLD) for name, check in CHECKS.items()}, {}]
    dist.barrier()
    for name in "all_reduce all_gather reduce_scatter all_to_all_single isend irecv".split():
        setattr(dist, name, lambda *given, **settings: SimpleNamespace(wait=lambda: None))
    dist.batch_isend_irecv = lambda ops: []
    for name, check in CHECKS.items():
        try:
            found[1][name] = check(lifted(name), dist.group.WORLD)
        except (RuntimeError, ValueError, IndexError):
            found[1][name] = 1.0
    (folder / f"found{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)
