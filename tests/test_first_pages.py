"""The page of each technique: alone, short, equal to one process and to the general module."""

import ast
import copy
import os
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from minitrain import launch
from minitrain.attention.kernel import PLAIN
from minitrain.checkpoint import first as checkpoint
from minitrain.compose import first
from minitrain.compose.parallelize import parallelize
from minitrain.context import first as ring
from minitrain.context import first_ulysses as ulysses
from minitrain.context import layout
from minitrain.context import ring as general_ring
from minitrain.data_parallel import first as data_parallel
from minitrain.data_parallel import first_zero as zero
from minitrain.data_parallel.bucketed import GradReducer
from minitrain.memory import first as memory
from minitrain.memory import first_offload as offload
from minitrain.memory.recompute import recompute as general_recompute
from minitrain.model.config import GPTConfig
from minitrain.moe import first as moe
from minitrain.pipeline import first as pipeline
from minitrain.pipeline.schedules import one_direction
from minitrain.plan.strategy import Strategy
from minitrain.precision import first as precision
from minitrain.tensor_parallel import first as tensor_parallel
from tests import patience

PACKAGE = Path(ring.__file__).parent.parent
PAGES = [page for page in sorted(PACKAGE.glob("*/first*.py")) if page.parent.name != "compose"]
STANDARD = {"torch", *sys.stdlib_module_names}
CLOSE = dict(rtol=0, atol=1e-12)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_a_page_is_a_page(page):
    text = page.read_text()
    imported = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(text))
        for name in (
            [node.module]
            if isinstance(node, ast.ImportFrom)
            else [one.name for one in getattr(node, "names", [])]
        )
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert imported <= STANDARD and text.count("\n") <= 80
    assert " on a page: " in text.splitlines()[0] and "General" in ast.get_docstring(ast.parse(text))


def test_every_technique_has_one():
    folders = "checkpoint context data_parallel memory moe pipeline precision tensor_parallel".split()
    assert sorted({page.parent.name for page in PAGES}) == folders and len(PAGES) == 11


def alone():
    """Runs in a folder with the pages and nothing of minitrain, started by torchrun."""
    code = """
import importlib.util, os, sys
assert importlib.util.find_spec("minitrain") is None
import torch, torch.distributed as dist
import data_parallel, ring
dist.init_process_group("gloo")
model = torch.nn.Linear(4, 1)
buckets = data_parallel.Buckets(model, dist.group.WORLD)
model(torch.ones(3, 4) * (1 + dist.get_rank())).sum().backward()
buckets.finish()
q = torch.ones(1, 1, 4, 2)
assert ring.Ring.apply(q, q, q, dist.group.WORLD, ring.zigzag).shape == q.shape
assert model.weight.grad.tolist() == [[9.0] * 4]
print("alone", flush=True)
dist.destroy_process_group()
"""
    return code


def test_pages_run_under_torchrun_where_minitrain_is_not_installed(tmp_path):
    for page in PAGES:
        name = page.stem.removeprefix("first").strip("_") or {"context": "ring"}.get(
            page.parent.name, page.parent.name
        )
        shutil.copy(page, tmp_path / f"{name}.py")
    (tmp_path / "train.py").write_text(alone())
    site = Path(torch.__file__).parent.parent
    (tmp_path / "site").mkdir()
    for entry in site.iterdir():  # all that is installed here but for minitrain
        if "minitrain" not in entry.name and not entry.name.endswith(".pth"):
            (tmp_path / "site" / entry.name).symlink_to(entry)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MINITRAIN")}
    environ |= {"PYTHONPATH": f"{tmp_path}:{tmp_path / 'site'}", "OMP_NUM_THREADS": "1"}
    run = [sys.executable, "-S", "-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = patience.run([*run, "--no-python", sys.executable, "-S", "train.py"], cwd=tmp_path, env=environ)
    assert done.stdout.count("alone") == 2, done.stderr[-2000:]


# ---- equal to one process ---------------------------------------------------------------------------------


def here():
    torch.manual_seed(0)
    return dist.group.WORLD, dist.get_rank(), dist.get_world_size()


def furthest(pairs) -> float:
    return max(float((a.detach() - b.detach()).abs().max()) for a, b in pairs)


def net(*sizes):
    layers = [layer for a, b in zip(sizes, sizes[1:]) for layer in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers).double()


def summed_gradients(broken=False):
    group, rank, n = here()
    model, rows = net(8, 31, 3), torch.randn(12, 8).double()
    wanted = torch.autograd.grad(model(rows).square().sum(), list(model.parameters()))
    reducer = data_parallel.Buckets(model, group, bucket_bytes=1000)
    if broken:
        dist.all_reduce = lambda *_, **__: None
    for _ in range(2):  # twice: nothing is left of the first time
        model(rows.chunk(n)[rank]).square().sum().backward()
        if not broken:
            reducer.finish()
        found = [param.grad.clone() for param in model.parameters()]
        reducer.zero_grad()
    model = copy.deepcopy(model)  # without the page's hooks
    model.zero_grad()
    general = GradReducer(model.parameters(), group, bucket_bytes=1000)
    if not broken:
        model(rows.chunk(n)[rank]).square().sum().backward()
        general.finish()
    return furthest(zip(found, wanted)), broken or furthest(
        (param.grad, g) for param, g in zip(model.parameters(), found)
    )


def trained(stage, broken=False):
    """The sum of losses of four steps of AdamW, of all rows and shared; bytes of weights after the last."""
    group, rank, n = here()
    model, rows = net(8, 63, 5), torch.randn(12, 8).double()
    layers = [zero.Shared(layer, group, stage) for layer in (model[0], model[2]) if stage]
    if broken:
        dist.reduce_scatter = lambda out, pieces, group: out.copy_(pieces[group.rank()])
    optimizer = torch.optim.AdamW([layer.shard for layer in layers] or model.parameters(), lr=0.1)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(rows.chunk(n)[rank] if stage else rows).square().sum() / 12
        loss.backward()
        for layer in layers:
            layer.finish()
        assert not stage or all(param.grad is None for param in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    left = sum(layer.flat.untyped_storage().nbytes() for layer in layers)
    return torch.tensor(losses, dtype=torch.float64), left


@pytest.mark.parametrize("ranks", [2, 4])
def test_data_parallel(ranks):
    assert max(max(pair) for pair in launch.run(summed_gradients, ranks=ranks)) < 1e-12
    assert launch.run(summed_gradients, True, ranks=ranks)[0][0] > 1e-3


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero(stage, ranks):
    [(wanted, _)] = launch.run(trained, 0, ranks=1)
    found = launch.run(trained, stage, ranks=ranks)
    torch.testing.assert_close(sum(losses for losses, _ in found), wanted, **CLOSE)
    assert all((left == 0) == (stage == 3) for _, left in found)
    wrong = sum(losses for losses, _ in launch.run(trained, stage, True, ranks=ranks))
    assert (wrong - wanted).abs().max() > 1e-3


def cut_layer(sequence, broken=None):
    group, rank, n = here()
    drawn = [torch.randn(*shape).double() for shape in ((2, 8, 6), (12, 6), (6, 12), (16, 6))]
    targets = torch.randint(0, 16, (16,))
    whole = [one.clone().requires_grad_() for one in drawn]
    h = F.gelu(whole[0] @ whole[1].T) @ whole[2].T
    wanted = F.cross_entropy((h @ whole[3].T).flatten(0, 1), targets, reduction="sum")
    wanted.backward()
    pieces = lambda x, a, b, w: [
        x.chunk(n, 1)[rank] if sequence else x,
        a.chunk(n)[rank],
        b.chunk(n, 1)[rank],
        w.chunk(n)[rank],
    ]
    mine = [one.clone().requires_grad_() for one in pieces(*drawn)]
    if broken:
        setattr(tensor_parallel, broken, tensor_parallel.adjoint(lambda x, _: x.view_as(x), lambda dy, _: dy))
    h = tensor_parallel.mlp(*mine[:3], group, sequence)
    h = (tensor_parallel.gather if sequence else tensor_parallel.copy).apply(h, group)
    loss = tensor_parallel.VocabularyLoss.apply((h @ mine[3].T).flatten(0, 1), targets, group)
    loss.backward()
    return furthest([(loss, wanted), *zip((one.grad for one in mine), pieces(*(one.grad for one in whole)))])


@pytest.mark.parametrize("ranks", [2, 4])
def test_tensor_parallel(ranks):
    for sequence in (False, True):
        assert max(launch.run(cut_layer, sequence, ranks=ranks)) < 1e-12
    for one in ("copy", "reduce"):
        assert max(launch.run(cut_layer, False, one, ranks=ranks)) > 1e-3


def staged(name, m):
    up, rank, p = here()
    down = dist.new_group()
    stages, inputs = [net(6, 6) for _ in range(p)], [torch.randn(3, 6).double() for _ in range(m)]
    loss = lambda i, y: y.square().sum() * (i + 1)
    wanted = sum(loss(i, nn.Sequential(*stages)(x)) for i, x in enumerate(inputs))
    wanted.backward()
    gradients = [param.grad.clone() for param in stages[rank].parameters()]
    stages[rank].zero_grad()
    schedule = getattr(pipeline, name)(rank, p, m)
    total = pipeline.run(stages[rank], schedule, inputs, loss, (3, 6), up, down)
    found = [param.grad for param in stages[rank].parameters()]
    return furthest([*zip(found, gradients), *[(total, wanted)] * (rank == p - 1)])


@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b"])
@pytest.mark.parametrize("p, m", [(2, 1), (2, 5), (4, 3), (4, 6)])
def test_pipeline(name, p, m):
    general = getattr(one_direction, name)(p, m).ranks
    for rank in range(p):
        assert getattr(pipeline, name)(rank, p, m) == [(one.kind, one.microbatch) for one in general[rank]]
    assert max(launch.run(staged, name, m, ranks=p)) < 1e-12


def attended(name, broken=False):
    group, rank, n = here()
    *qkv, dout = (torch.randn(2, 4, 16, 6).double() for _ in range(4))
    whole = [one.clone().requires_grad_() for one in qkv]
    out = F.scaled_dot_product_attention(*whole, is_causal=True)
    out.backward(dout)
    chunks = getattr(ring, name, ring.contiguous)(rank, n)
    size = 16 // n // len(chunks)
    cut = lambda x: torch.cat([x[..., i * size : (i + 1) * size, :] for i in chunks], -2)
    mine = [cut(one).requires_grad_() for one in qkv]
    if broken:
        ring.rotate = lambda tensors, group: (tensors, list)
    turned = lambda *x: [one.transpose(1, 2) for one in x]
    attention = lambda *x: turned(F.scaled_dot_product_attention(*turned(*x), is_causal=True))[0]
    if name == "ulysses":
        [found] = turned(ulysses.ulysses(attention, *turned(*mine), group))
    else:
        found = ring.Ring.apply(*mine, group, getattr(ring, name))
    found.backward(cut(dout))
    other = 0.0
    if name != "ulysses" and not broken:
        rings = general_ring.Rings((group,), getattr(layout, name), True)
        other = furthest(
            [(general_ring.ring_forward(*(one.detach() for one in mine), rings, PLAIN)[0], found)]
        )
    return max(other, furthest([(found, cut(out)), *((a.grad, cut(b.grad)) for a, b in zip(mine, whole))]))


@pytest.mark.parametrize("name", ["contiguous", "zigzag", "ulysses"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_attention(name, ranks):
    assert max(launch.run(attended, name, ranks=ranks)) < 1e-12
    if ranks == 4 and name != "ulysses":
        assert max(launch.run(attended, name, True, ranks=ranks)) > 1e-3


def routed(k):
    group, rank, n = here()
    router, experts = nn.Linear(6, 8, bias=False).double(), [net(6, 12, 6) for _ in range(8)]
    x, dy = torch.randn(24, 6).double().requires_grad_(), torch.randn(24, 6).double()
    weights, chosen = router(x).softmax(-1).topk(k)
    rows = [sum(w * experts[e](one) for w, e in zip(*b)) for *b, one in zip(weights, chosen.tolist(), x)]
    y = torch.stack(rows)
    y.backward(dy)
    mine = experts[rank * 8 // n : (rank + 1) * 8 // n]
    wanted = [param.grad.clone() for one in (router, *mine) for param in one.parameters()]
    for one in (router, *experts):
        one.zero_grad()
    own = x.detach().chunk(n)[rank].requires_grad_()
    layer = moe.Experts(router, mine, k, group)
    out, balance = layer(own)
    out.backward(dy.chunk(n)[rank])
    dist.all_reduce(router.weight.grad)
    found = [param.grad for one in (router, *mine) for param in one.parameters()]
    assert balance > 0.5
    return furthest([(out, y.chunk(n)[rank]), (own.grad, x.grad.chunk(n)[rank]), *zip(found, wanted)])


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_experts(ranks):
    assert max(launch.run(routed, 2, ranks=ranks)) < 1e-12


# ---- on one rank ------------------------------------------------------------------------------------------


def test_recomputation_draws_the_same_numbers_and_keeps_less():
    block, x = (
        nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6)).double(),
        torch.randn(4, 6).double(),
    )
    seen = []
    for how in (lambda block, x: block(x), memory.recompute, lambda block, x: general_recompute(block, x)):
        torch.manual_seed(3)
        block.zero_grad()
        mine, kept = x.clone().requires_grad_(), []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
            y = how(block, mine)
        between = torch.rand(2)
        y.square().sum().backward()
        seen.append(
            ([y, between, torch.rand(2), mine.grad, *(p.grad.clone() for p in block.parameters())], sum(kept))
        )
    for found, kept in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found, seen[0][0]))
    assert seen[1][1] < seen[0][1]
    memory.recompute(block, x).sum().backward()  # x needs no gradient, the parameters do


def adam(params):
    return torch.optim.AdamW(params, lr=0.1)


def learned(make, dtype=torch.float32, clear=True):
    torch.manual_seed(0)
    model, x = net(6, 8, 1).to(dtype), torch.randn(16, 6).to(dtype)
    optimizer = make(list(model.parameters()))
    for _ in range(5):
        for param in model.parameters():
            param.grad = None
        loss = model(x).square().mean()
        (loss * getattr(optimizer, "scale", 1.0)).backward()
        optimizer.step()
    return loss.item(), optimizer


def test_offload_learns_the_same_and_leaves_no_gradient():
    assert learned(lambda params: offload.HostOptimizer(params, adam))[0] == learned(adam)[0]


def test_masters_keep_what_bfloat16_rounds_away_and_leave_out_a_step_that_overflows():
    param = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    masters = precision.Masters(
        [param], lambda params: torch.optim.SGD(params, lr=1.0), scale=4.0, patience=3
    )
    for _ in range(4):
        param.grad = torch.full_like(
            param, masters.scale * 2.0**-10
        )  # a quarter of what bfloat16 can tell from 1
        assert masters.step()
    assert param.item() == 1 - 2.0**-8 and masters.masters[0].item() == 1 - 4 * 2.0**-10
    assert masters.scale == 8.0  # after three good ones
    param.grad = torch.full_like(param, float("inf"))
    assert not masters.step() and masters.scale == 4.0 and param.item() == 1 - 2.0**-8
    assert learned(lambda params: precision.Masters(params, adam, scale=2.0**10))[0] == pytest.approx(
        learned(adam)[0]
    )


def test_products_of_8_bits():
    """Tiles bound the damage of an outlier; one scale for all does not."""
    torch.manual_seed(0)
    x, weight, dy = torch.randn(128, 256), torch.randn(128, 256), torch.randn(128, 128)
    far = x.clone()
    far[0, 0] = 1e5
    distances = {}
    for name, given in (("plain", x), ("outlier", far)):
        for tiles in (False, True):
            leaves = [given.clone().requires_grad_(), weight.clone().requires_grad_()]
            y = precision.Linear8.apply(*leaves, tiles)
            y.backward(dy)
            wanted = [given @ weight.T, dy @ weight, dy.T @ given]
            found = [y, *(one.grad for one in leaves)]
            apart = [float(((a - b)[1:].norm() / b[1:].norm()).detach()) for a, b in zip(found, wanted)]
            distances[name, tiles] = apart
    assert all(0.005 < one < 0.07 for one in (*distances["plain", False], *distances["plain", True]))
    assert distances["outlier", False][0] > 2 * distances["outlier", True][0]


MATRIX = torch.arange(48.0).view(8, 6)


def piece(dim, group):
    start, mine = [0, 0], MATRIX.chunk(group.size(), dim)[group.rank()]
    start[dim] = group.rank() * (MATRIX.size(dim) // group.size())
    return tuple(start), mine.clone()


def saved(folder, dim, step):
    group = dist.group.WORLD
    pieces = {"w": piece(dim, group)} | ({"b": ((0,), torch.ones(3))} if group.rank() == 0 else {})
    checkpoint.save(folder, step, pieces, group)


def restored(folder, dim):
    start, wanted = piece(dim, dist.group.WORLD)
    mine, bias = torch.zeros_like(wanted), torch.zeros(3)
    checkpoint.load(checkpoint.newest(folder), {"w": (start, mine), "b": ((0,), bias)})
    return torch.equal(mine, wanted) and bias.sum().item() == 3


def test_any_layout_reads_what_another_wrote(tmp_path):
    launch.run(saved, tmp_path, 0, 3, ranks=4)
    for dim, ranks in ((0, 2), (1, 2), (0, 1), (1, 3), (0, 4)):
        assert all(launch.run(restored, tmp_path, dim, ranks=ranks))
    whole = {"w": ((0, 0), torch.zeros(8, 6))}
    (tmp_path / "step-00000004").mkdir()  # somebody died before the manifest
    assert checkpoint.newest(tmp_path).name == "step-00000003"
    file = tmp_path / "step-00000003" / "rank-2.pt"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(ValueError, match="rank-2.pt is damaged"):
        checkpoint.load(tmp_path / "step-00000003", whole)
    with pytest.raises(ValueError, match="has not all of"):
        checkpoint.load(tmp_path / "step-00000003", {"v": ((0,), torch.zeros(1))})


# ---- all on one page --------------------------------------------------------------------------------------

GPT_SIZES = dict(vocabulary=24, width=16, heads=4, depth=3)
CONFIG = GPTConfig(vocab_size=24, d_model=16, num_heads=4, num_layers=3, d_ff=64, max_positions=16, norm="rms",
                   positions="rope", activation="swiglu", bias=False, tied=False)  # fmt: skip


def batch_of(step):
    return torch.randint(24, (8, 17), generator=torch.Generator().manual_seed(step))


class Drawn(NamedTuple):
    batch_size: int = 8
    length: int = 16
    documents: None = None

    def draw(self, step, rank, ranks):
        mine = batch_of(step).chunk(ranks)[rank]
        return mine[:, :-1], mine[:, 1:]


def beside_minitrain(layout):
    """Losses of two steps, and the largest difference of a parameter afterwards."""
    torch.set_default_dtype(torch.float64)
    axes = {axis: layout.get(axis, 1) for axis in ("dp", "pp", "cp", "tp")}
    groups = first.make_groups(**axes)
    page = first.Trainer(groups, GPT_SIZES, 16, 2, layout["zero"], 0.01)
    optimizer = partial(torch.optim.AdamW, lr=0.01, betas=(0.9, 0.95))
    cut = dict(layout="zigzag") if layout.get("cp", 1) > 1 else {}
    run = parallelize(CONFIG, Strategy(**layout, **cut, microbatches=2, precision="float64"), optimizer)
    state = run.state_dict()
    drawn = {name: first.Layer().draw(name, tuple(one.shape)) for name, one in state["parameters"].items()}
    run.load_state_dict(state | {"parameters": drawn})
    losses = []
    for step in range(2):
        mine = page.step(batch_of(step))
        losses.append((mine.item(), run.total(run.step(run.batch(Drawn(), step)).loss).item()))
    for one in page.shared:
        one.gather() if layout["zero"] == 3 else None
    found, apart = run.state_dict()["parameters"], 0.0
    for layer, number in zip(
        page.layers, torch.arange(5).tensor_split(axes["pp"])[groups["pp"].rank()].tolist()
    ):
        for name, param in layer.named_parameters():
            whole = next(
                value
                for key, value in found.items()
                if f".{name}." in f"{key}." and key.startswith(f"layers.{number}.")
            )
            dim = next((i for i in range(param.dim()) if param.size(i) < whole.size(i)), None)
            wanted = whole if dim is None else whole.chunk(axes["tp"], dim)[groups["tp"].rank()]
            apart = max(apart, float((param.detach() - wanted).abs().max()))
    return losses, apart


LAYOUTS = [
    dict(pp=2, cp=2, tp=2, zero=1), dict(dp=2, pp=2, cp=2, zero=3), dict(dp=2, cp=2, tp=2, zero=2),
    dict(dp=2, pp=2, tp=2, zero=0),
]  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda one: " ".join(f"{k}{v}" for k, v in one.items()))
def test_all_on_one_page_is_minitrain_in_the_same_layout(layout):
    assert Path(first.__file__).read_text().count("\n") <= 400
    for losses, apart in launch.run(beside_minitrain, layout, ranks=8):
        assert apart < 1e-12 and all(abs(a - b) < 1e-12 for a, b in losses) and losses[0] != losses[1]


# ---- what a script would stumble over ----------------------------------------------------------------------


def pasted(folder):
    group, rank, n = here()
    q = torch.randn(1, 4, 2, 6).double().transpose(1, 2).requires_grad_()  # turned, as a model has it
    ring.Ring.apply(q, q, q, group, ring.contiguous).sum().backward()
    sums = []
    for stage in (1, 2, 3):  # two backwards in a step
        layer = nn.Linear(2, 1, bias=False).double()
        shared = zero.Shared(layer, group, stage)
        for _ in range(2):
            layer(torch.ones(1, 2).double()).sum().backward()
        shared.finish()
        sums.append(shared.shard.grad.tolist())
    model, said = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]), []
    buckets = data_parallel.Buckets(model, group)
    model[0](torch.ones(1, 2)).sum().backward()  # and not the other
    w = torch.arange(8.0)
    checkpoint.save(folder, 1, {"w": ((0,), w)}, group)  # the same from both ranks
    checkpoint.load(checkpoint.newest(folder), {"w": ((2,), again := torch.zeros(6))})
    checkpoint.save(folder, 2, {"w": ((0,), w[:4]), "all of w": ((0,), w)}, group)
    for wrong in (
        buckets.finish,
        lambda: checkpoint.load(checkpoint.newest(folder), {"w": ((0,), torch.zeros(8))}),
    ):
        try:
            wrong()
        except (AssertionError, ValueError) as error:
            said.append(str(error))
    return sums, again.tolist(), said


def test_what_a_script_of_ones_own_does_is_right_or_refused(tmp_path):
    for sums, again, said in launch.run(pasted, tmp_path, ranks=2):
        assert sums == [[4.0]] * 3 and again == [2, 3, 4, 5, 6, 7]
        assert said[0] == "a parameter had no gradient" and said[1].endswith("has not all of ['w']")


def test_small_gradients_of_float16_keep_their_scale_and_unused_parameters_stay():
    for value in (3e-4, 1e-7, 0.0):
        x = torch.full((2, 128), value, dtype=torch.float16)
        codes, scale = precision.quantize(x, precision.E5M2, True)
        assert scale.min() > 0 and torch.equal((codes.float() * scale.view(2, 1)).half(), x)
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    before = [param.detach().clone() for param in model.parameters()]
    host = offload.HostOptimizer(list(model.parameters()), lambda params: torch.optim.SGD(params, lr=1))
    model[0](torch.ones(1, 2)).sum().backward()
    host.step()
    changed = [not torch.equal(a, b) for a, b in zip(before, model.parameters())]
    assert changed == [True, True, False, False]
