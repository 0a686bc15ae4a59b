"""AdamW against torch's, states that survive, one norm over parameters cut in any way, and the schedule."""

import io
import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import FakeTensorMode

from minitrain import launch
from minitrain.model.training.hyperparameters import Hyperparameters
from minitrain.model.training.optim import AdamW, clip_grad_norm
from minitrain.ranks.ledger import Ledger
from minitrain.ranks.mesh import Mesh
from minitrain.ranks.sharding import Shard, full_tensor, local_shard, place, placement, shard


def parameters(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return [
        nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))
        for shape in ((4, 3), (5,), (2, 3, 2), ())
    ]


def give_gradients(params, step, skip=()):
    for i, param in enumerate(params):
        generator = torch.Generator().manual_seed(100 * step + i)
        grad = torch.randn(param.shape, generator=generator, dtype=torch.float64).to(param.dtype)
        param.grad = None if i in skip else grad


def groups(params):
    """Two settings of their own, one of the defaults, and a parameter that now and then gets no gradient."""
    return [
        dict(params=params[:1], lr=3e-2, weight_decay=0.3),
        dict(params=params[1:2], betas=(0.7, 0.8), eps=1e-3),
        dict(params=params[2:]),
    ]


def test_equals_torch_over_fifty_steps():
    def train(cls, weight_decay=0.1):
        params = parameters()
        optimizer = cls(groups(params), lr=1e-2, weight_decay=weight_decay)
        for step in range(50):
            give_gradients(params, step, skip={3} if step % 3 else {})
            for group in optimizer.param_groups:
                group["lr"] *= 0.97  # a schedule writes here
            optimizer.step()
        return params

    for ours, theirs in zip(train(AdamW), train(torch.optim.AdamW)):
        assert (ours - theirs).abs().max() < 1e-12
    control = [(a - b).abs().max() for a, b in zip(train(AdamW), train(torch.optim.AdamW, weight_decay=0.2))]
    assert max(control) > 1e-4


def test_a_constant_gradient_moves_by_the_rate():
    """Bias correction makes m̂ = g and v̂ = g², so every step is lr · g / |g|, whatever its size."""
    param = nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    optimizer = AdamW([param], lr=0.25, eps=0.0, weight_decay=0.0)
    for _ in range(4):
        param.grad = torch.tensor([1e-6, -3e4], dtype=torch.float64)
        optimizer.step()
    assert (param - torch.tensor([0.0, -1.0], dtype=torch.float64)).abs().max() < 1e-12


def test_master_weights_notice_what_bfloat16_does_not():
    def train(dtype, **settings):
        param = nn.Parameter(torch.ones(3, dtype=dtype))
        optimizer = AdamW([param], lr=1e-3, weight_decay=0.0, **settings)
        for _ in range(20):
            param.grad = torch.ones(3, dtype=dtype)
            optimizer.step()
        return param, optimizer.state[param]

    exact, _ = train(torch.float32)
    param, state = train(torch.bfloat16, master_dtype=torch.float32)
    assert torch.equal(state["master"], exact) and torch.equal(param, exact.bfloat16())
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.float32
    control, state = train(torch.bfloat16)
    assert torch.equal(control, torch.ones(3, dtype=torch.bfloat16))  # 1 - 0.001 rounds to 1, twenty times
    assert "master" not in state
    assert "master" not in train(torch.float32, master_dtype=torch.float32)[1]  # no second copy of the same


@pytest.mark.parametrize("dtype, master_dtype", [(torch.float64, None), (torch.bfloat16, torch.float32)])
@pytest.mark.parametrize("through_file", [False, True])
def test_a_state_is_a_copy_and_continues_bit_for_bit(dtype, master_dtype, through_file):
    params = parameters(dtype)
    optimizer = AdamW(groups(params), master_dtype=master_dtype)
    for step in range(3):
        give_gradients(params, step)
        optimizer.step()
    weights, saved = [p.detach().clone() for p in params], optimizer.state_dict()
    if through_file:
        torch.save(saved, file := io.BytesIO())
        file.seek(0)
        saved = torch.load(file, weights_only=True)

    def continue_from(saved):
        others = [nn.Parameter(weight.clone()) for weight in weights]
        other = AdamW(groups(others), master_dtype=master_dtype)
        other.load_state_dict(saved)
        for step in range(3, 6):
            give_gradients(others, step)
            other.step()
        return others

    for step in range(3, 6):
        give_gradients(params, step)
        optimizer.step()
    for _ in range(2):  # the second recovery from one saved state is where sharing tensors would show
        assert all(torch.equal(a, b) for a, b in zip(continue_from(saved), params))
    saved["state"][0]["exp_avg"].zero_()  # control
    assert not torch.equal(continue_from(saved)[0], params[0])


def test_a_state_of_another_model_is_refused():
    params = parameters()
    optimizer = AdamW(params)
    give_gradients(params, 0)
    optimizer.step()
    turned = [nn.Parameter(torch.zeros(param.shape[::-1])) for param in params]
    with pytest.raises(ValueError, match=r"parameter 0 is \[4, 3\], the parameter \[3, 4\]"):
        AdamW(turned).load_state_dict(optimizer.state_dict())
    with pytest.raises(ValueError, match=r"groups of \[4\] parameters, this optimizer of \[3\]"):
        AdamW(parameters()[:3]).load_state_dict(optimizer.state_dict())
    before = optimizer.state_dict()
    wrong = optimizer.state_dict()
    wrong["state"][3]["exp_avg"] = torch.zeros(1, 2, 3)
    with pytest.raises(ValueError, match="parameter 3 is"):
        optimizer.load_state_dict(wrong)
    after = optimizer.state_dict()["state"]
    assert after.keys() == before["state"].keys() and len(after) == 4, "what was refused has changed nothing"
    del before["state"][1]
    optimizer.load_state_dict(before)
    assert params[1] not in optimizer.state and len(optimizer.state) == 3, "what a state has not begins anew"


def test_steps_and_clips_in_a_dry_run():
    with FakeTensorMode():
        params = [nn.Parameter(torch.empty(3, 4, dtype=torch.bfloat16))]
        params[0].grad = torch.empty_like(params[0])
        optimizer = AdamW(params, master_dtype=torch.float32)
        assert clip_grad_norm(params, 1.0).dtype == torch.float32
        optimizer.step()
        assert optimizer.state[params[0]]["step"] == 1
        assert optimizer.state[params[0]]["master"].dtype == torch.float32


def test_no_compiler_is_imported():
    code = (
        "import sys, torch; from minitrain.model.training.optim import AdamW; o = AdamW([torch.ones(2, requires_grad=True)]); "
        "o.zero_grad(); o.step(); o.load_state_dict(o.state_dict()); assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "settings, words",
    [
        (dict(lr=-1.0), "lr=-1.0: use a finite number, 0 or more"),
        (dict(betas=(0.9, 1.0)), r"betas=\(0.9, 1.0\): use fractions below 1"),
        (dict(master_dtype=torch.int8), r"master_dtype=\[torch.int8\]"),
        (dict(params=[dict(params=[torch.zeros(1)], wd=1)]), "unknown setting 'wd'; AdamW knows lr, betas"),
        (dict(params=[TWICE := torch.zeros(1), TWICE]), "given twice"),
        (dict(params=[dict(params=TWICE), dict(params=[TWICE])]), "given twice"),
    ],
)
def test_bad_settings_are_one_line(settings, words):
    with pytest.raises(ValueError, match=words) as error:
        AdamW(**{"params": parameters(), **settings})
    assert "\n" not in str(error.value)


# ---- the norm --------------------------------------------------------------------------------------------


def whole_gradients():
    generator = torch.Generator().manual_seed(7)
    names = ("both", "rows", "world", "copy")
    return {name: torch.randn(8, 4, generator=generator, dtype=torch.float64) for name in names}


def norm_on_ranks(max_norm, say_it):
    """The four gradients, each rank with its part: cut over two groups, one, all ranks, not at all."""
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = [dist.new_group([r, r + 1]) for r in range(0, size, 2)][rank // 2]
    columns = [dist.new_group([*range(c, size, 2)]) for c in range(2)][rank % 2]
    world = dist.group.WORLD
    cuts = {
        "both": (Shard(0, rows), Shard(1, columns)),
        "rows": (Shard(1, rows),),
        "world": (Shard(0, world),),
    }
    params = {}
    for name, grad in whole_gradients().items():
        for cut in cuts.get(name, ()):
            grad = grad.chunk(cut.group.size(), cut.dim)[cut.group.rank()]
        params[name] = nn.Parameter(torch.zeros_like(grad))
        params[name].grad = grad.clone()
        if say_it and name in cuts:
            place(params[name], shards=cuts[name])
    params["idle"] = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    if rank:  # on rank 0 an expert that saw no token: it must take part in the sum all the same
        params["idle"].grad = torch.zeros(2, dtype=torch.float64)
    place(params["idle"], shards=(Shard(0, columns),))
    norm = clip_grad_norm(params.values(), max_norm)
    places = {n: [(cut.dim, cut.group.size(), cut.group.rank()) for cut in cuts.get(n, ())] for n in params}
    return norm, {name: (param.grad, places[name]) for name, param in params.items()}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("max_norm", [1.5, 1e9])
def test_the_norm_of_cut_parameters_is_the_norm_of_the_whole(ranks, max_norm):
    reference = [nn.Parameter(torch.zeros(8, 4, dtype=torch.float64)) for _ in range(4)]
    for param, grad in zip(reference, whole_gradients().values()):
        param.grad = grad
    expected = nn.utils.clip_grad_norm_(reference, max_norm)
    clipped = dict(zip(whole_gradients(), (param.grad for param in reference)))
    for norm, params in launch.run(norm_on_ranks, max_norm, True, ranks=ranks):
        assert abs(norm - expected) < 1e-12
        for name, whole in clipped.items():
            grad, cuts = params[name]
            for dim, size, rank in cuts:
                whole = whole.chunk(size, dim)[rank]
            assert (grad - whole).abs().max() < 1e-12
    for norm, _ in launch.run(
        norm_on_ranks, max_norm, False, ranks=ranks
    ):  # control: nobody says what is cut
        assert abs(norm - expected) > 1e-3


def norm_of_stages(broken):
    """Two stages of two ranks each, which have cut a matrix; both ends hold a table, whole and cut."""
    mesh = Mesh(pp=2, tp=2)
    stage, stages, tp = mesh.rank("pp"), mesh.group("pp"), mesh.group("tp")
    grads = {
        name: grad
        for name, grad in whole_gradients().items()
        if name in ("both", "rows", ("world", "copy")[stage])
    }
    params = []
    for name, grad in grads.items():
        param = nn.Parameter(torch.zeros_like(grad))
        shared = name in ("both", "rows") and broken != "copies"
        param = place(param, copies=stages) if shared else param
        if name != "both":
            param = shard(param, 0, tp)
            grad = local_shard(grad, param)
        param.grad = grad.clone()
        params.append(param)
    norm = clip_grad_norm(params, 1.5, stages=None if broken == "stages" else stages)
    nothing = clip_grad_norm(
        params if stage else [], math.inf, stages=stages, like=torch.zeros(1, dtype=torch.float64)
    )
    return (
        norm,
        [(name, full_tensor(param.grad, placement(param).shards)) for name, param in zip(grads, params)],
        nothing,
    )


def test_the_norm_of_stages_counts_copies_once():
    """Squares add up over stages; what stands on several counts once; a stage may have nothing to train."""
    reference = [nn.Parameter(torch.zeros(8, 4, dtype=torch.float64)) for _ in range(4)]
    for param, grad in zip(reference, whole_gradients().values()):
        param.grad = grad
    expected = nn.utils.clip_grad_norm_(reference, 1.5)
    clipped = dict(zip(whole_gradients(), (param.grad for param in reference)))
    for norm, grads, nothing in launch.run(norm_of_stages, None, ranks=4):
        assert abs(norm - expected) < 1e-12 and norm.dtype == torch.float64
        assert all((grad - clipped[name]).abs().max() < 1e-12 for name, grad in grads)
        assert (
            nothing.dtype == torch.float64 and abs(nothing - clipped["copy"].norm()) < 1e-12
        )  # copies count on the first stage
    for broken in ("stages", "copies"):
        assert all(abs(norm - expected) > 1e-3 for norm, *_ in launch.run(norm_of_stages, broken, ranks=4))


def test_a_bad_gradient_shows_in_the_norm():
    for bad in (math.nan, math.inf):
        params = parameters()
        give_gradients(params, 0)
        params[1].grad[0] = bad
        assert not torch.isfinite(clip_grad_norm(params, 1.0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_norm_of_half_precision_is_float32(dtype):
    """Squares of 60,000 overflow float16, and so would their norm; bfloat16 has three digits."""
    param = nn.Parameter(torch.zeros(7, dtype=dtype))
    param.grad = torch.full((7,), 6e4, dtype=dtype)
    exact = param.grad.double().norm()
    norm = clip_grad_norm([param], math.inf)
    assert norm.dtype == torch.float32 and abs(norm / exact - 1) < 1e-6


def test_infinite_max_norm_only_measures():
    params = parameters()
    give_gradients(params, 0)
    before = [param.grad.clone() for param in params]
    norm = clip_grad_norm(iter(params), math.inf)
    assert all(torch.equal(param.grad, grad) for param, grad in zip(params, before))
    assert abs(norm - sum((g**2).sum() for g in before).sqrt()) < 1e-12


# ---- the schedule ----------------------------------------------------------------------------------------


def test_warmup_cosine():
    hyper = Hyperparameters(lr=1.0, warmup=4, steps=12, min_lr=0.1)
    rates = [hyper.lr_at(step) for step in range(14)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[8] == pytest.approx(0.55) and rates[12] == rates[13] == pytest.approx(0.1)
    assert rates[4:13] == sorted(rates[4:13], reverse=True)
    assert Hyperparameters(lr=1.0, warmup=0).lr_at(0) == 1.0 == replace(hyper, warmup=5, steps=5).lr_at(5)


@pytest.mark.parametrize("tile", [1, 100, 700, 1000, 5000])
def test_tiled_optimizer(tile):
    """The same step in the memory of a tile: gradient and denominator in float32, 8 bytes per element."""

    def train(tile):
        torch.manual_seed(0)
        param = nn.Parameter(torch.randn(40, 25).bfloat16())
        optimizer = AdamW([param], lr=0.1, master_dtype=torch.float32, tile=tile)
        for _ in range(3):
            param.grad = torch.randn(param.shape).bfloat16()
            with Ledger() as ledger:
                optimizer.step()
        return [param, *optimizer.state[param].values()], ledger.peak_bytes - ledger.live_bytes

    (ours, beside), (theirs, all_at_once) = train(tile), train(None)
    assert all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(ours, theirs))
    assert all_at_once == 8 * 1000 and beside == 8 * min(tile, 1000)
    with pytest.raises(ValueError, match="tile=0: use a whole number"):
        AdamW([nn.Parameter(torch.zeros(2))], tile=0)
