"""A 2·2·2 cube of ranks: equal to one process, every operand cut in eight, bytes as the formulas say."""

import copy
from functools import partial

import pytest
import torch

from minitrain import collectives, launch
from minitrain.model.config import GPTConfig
from minitrain.model.layers import MLP
from minitrain.model.training.optim import AdamW, clip_grad_norm
from minitrain.ranks.launch.report import RankError
from minitrain.ranks.ledger import Ledger
from minitrain.ranks.mesh import Mesh
from minitrain.ranks.sharding import full_tensor, placement
from minitrain.systems.plan import grid_costs
from minitrain.systems.tensor_parallel import cube
from minitrain.systems.tensor_parallel.cube import Linear3D, activation_shards, cut_activations, cut_mlp
from tests.parallel import TOLERANCE
from tests.systems.tensor_parallel.test_tensor_rotated import fill, random, whole_linear

M, K, N = 16, 12, 8  # sequences, width, output width: multiples of l² = 4, otherwise different
BYTES = 8  # float64


def grid():
    mesh = Mesh(x=2, y=2, z=2) if collectives.world().size() == 8 else Mesh(x=1, y=1, z=1)
    return mesh.group("x"), mesh.group("y"), mesh.group("z")


def swapped(groups):
    return groups[::-1]


whole_linear = partial(whole_linear, k=K, n=N)


def whole_mlp(activation, d_ff=12):
    sizes = dict(d_model=8, num_heads=2, num_kv_heads=2, d_ff=d_ff)
    config = GPTConfig(**sizes, activation=activation, bias=activation == "gelu")
    return fill(MLP(config, dtype=torch.float64))


def gradients(module):
    named = module.named_parameters()
    return {name: full_tensor(param.grad, placement(param).shards) for name, param in named}


def distance(ours, theirs):
    return max((ours[name] - theirs[name]).abs().max().item() for name in theirs)


def compare_linear():
    """Errors of y, dx and all gradients; the share of the weights held here; the ledger of each pass."""
    groups, linear = grid(), whole_linear()
    x, dy = random(M, 3, K, seed=7), random(M, 3, N, seed=8)
    reference = x.clone().requires_grad_()
    expected = linear(reference)
    expected.backward(dy)
    ours = Linear3D(linear, *groups)
    mine = cut_activations(x, *groups).requires_grad_()
    y = ours(mine)
    y.backward(cut_activations(dy, *swapped(groups)))
    errors = [
        (full_tensor(y, activation_shards(*swapped(groups))) - expected).abs().max().item(),
        (full_tensor(mine.grad, activation_shards(*groups)) - reference.grad).abs().max().item(),
        (full_tensor(ours.weight) - linear.weight).abs().max().item(),
        distance(gradients(ours), {name: param.grad for name, param in linear.named_parameters()}),
    ]
    replicas = collectives.all_gather(ours.bias.grad[None], groups[2])
    norm = clip_grad_norm(ours.parameters(), 1e9)
    expected_norm = torch.nn.utils.clip_grad_norm_(linear.parameters(), 1e9)
    pairs = (x, mine), (expected, y), (linear.weight, ours.weight)
    shares = [one.numel() / other.numel() for one, other in pairs]
    same = bool((replicas == replicas[0]).all())
    return dict(errors=errors, shares=shares, replicas=same, norm=(norm - expected_norm).abs().item())


def train(activation):
    """Three steps of an MLP beside three in one process: the largest difference of outputs and parameters."""
    groups, mlp = grid(), whole_mlp(activation)
    ours = cut_mlp(copy.deepcopy(mlp), *groups)
    theirs_optimizer, ours_optimizer = (AdamW(module.parameters(), lr=1e-2) for module in (mlp, ours))
    errors = []
    for step in range(3):
        x, target = random(8, 2, 8, seed=20 + step), random(8, 2, 8, seed=30 + step)
        y = mlp(x)
        (y - target).square().sum().backward()
        mine = ours(cut_activations(x, *groups))
        (mine - cut_activations(target, *groups)).square().sum().backward()
        errors.append((full_tensor(mine, activation_shards(*groups)) - y).abs().max().item())
        errors.append(distance(gradients(ours), {name: param.grad for name, param in mlp.named_parameters()}))
        for optimizer in (theirs_optimizer, ours_optimizer):
            optimizer.step()
            optimizer.zero_grad()
    params = {name: full_tensor(param) for name, param in ours.named_parameters()}
    return max(errors), distance(params, dict(mlp.named_parameters()))


def everything():
    return compare_linear(), train("gelu"), train("swiglu")


@pytest.mark.parametrize("ranks", [1, 8])
def test_equals_one_process(ranks):
    for linear, *trained in launch.run(everything, ranks=ranks):
        assert max(linear["errors"]) < TOLERANCE and linear["norm"] < TOLERANCE
        assert linear["shares"] == [ranks] * 3 and linear["replicas"]
        assert max(max(errors) for errors in trained) < TOLERANCE


def impostors():
    """Each collective in turn replaced by something of the right shape that hears nothing of the others."""
    deaf = dict(
        all_gather=lambda x, group: torch.cat([x] * group.size()),
        reduce_scatter=lambda x, group: x.chunk(group.size())[group.rank()].clone(),
    )
    outcomes = []
    for name, function in deaf.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cube, name, function)
            outcomes.append(compare_linear()["errors"])
    return outcomes


def test_without_a_collective_it_does_not():
    for outcomes in launch.run(impostors, ranks=8):
        for y, dx, _, gradients in outcomes:
            assert min(y, dx, gradients) > 1e-2


def measure():
    """Elements sent by a product and its two gradients, by a bias, by an MLP in 3-D and 1-D; saved memory."""
    groups = grid()
    plain, biased = (Linear3D(whole_linear(bias), *groups) for bias in (False, True))
    mlp, sent = cut_mlp(whole_mlp("gelu"), *groups), {}
    for linear in mlp.children():
        linear.bias = None
    x, dy = (
        cut_activations(random(M, K, seed=7), *groups),
        cut_activations(random(M, N, seed=8), *swapped(groups)),
    )
    inputs = {"plain": (plain, x, dy), "biased": (biased, x, dy)}
    inputs["mlp"] = mlp, *(cut_activations(random(M, 8, seed=9), *groups) for _ in range(2))
    for name, (module, x, dy) in inputs.items():
        x.requires_grad_()
        with Ledger() as forward:
            y = module(x)
        with Ledger() as backward:
            y.backward(dy)
        sent[name] = forward.sent_bytes() / BYTES, backward.sent_bytes() / BYTES
    del y, x.grad, plain.weight.grad
    x, dy = (tensor.detach() for tensor in inputs["plain"][1:])
    x.requires_grad_()
    with Ledger() as ledger:
        _y = plain(x)  # alive while it is counted
    sent["kept"], sent["peak"] = (number / BYTES for number in (ledger.live_bytes, ledger.peak_bytes))
    return sent


def test_bytes_and_memory_are_the_formulas():
    share, bias = 1 / 8, 2 / 8 * N  # (l-1)/l³; (l-1)/l² n is 1/4 n, counted once each way
    mk, kn, mn = M * K, K * N, M * N
    cost = grid_costs.cost(grid_costs.mlp(tokens=M, width=8, inner=12), grid_costs.Grid("3-D", 2))
    for sent in launch.run(measure, ranks=8):
        assert sent["plain"] == (share * (mk + kn + mn), share * (2 * mk + 2 * kn + mn))
        assert sent["biased"] == (sent["plain"][0] + bias, sent["plain"][1] + bias)
        assert sent["mlp"][0] == cost.forward and sum(sent["mlp"]) == cost.both
        assert sent["kept"] == (mk + kn + mn) / 8  # x, W and y: what is gathered is gone
        # x, W, the product and what the sum receives
        assert sent["peak"] <= sent["kept"] + (mk + kn + 2 * mn) / 4


def cut_in(ways):
    """Of each: how far y is from the whole linear's, and how many numbers of W are here."""
    linear, x, found = whole_linear(), random(M, 3, K, seed=7), []
    for how in ways:
        ours, cut, join = cube.cut_linear(linear, how)
        found.append(((join(ours(cut(x))) - linear(x)).abs().max().item(), ours.weight.numel()))
    return found


def test_colossal_ai():
    """One argument, as many dimensions: outputs are alike, and W is cut over all ranks, in 2.5-D over half of them."""
    for ranks, ways, parts in (4, ["1d", "2d"], [4, 4]), (8, ["1d", "2.5d", "3d"], [8, 4, 8]):
        for found in launch.run(cut_in, ways, ranks=ranks):
            assert max(error for error, _ in found) < TOLERANCE
            assert [size * many for (_, size), many in zip(found, parts)] == [K * N] * len(ways)
    with pytest.raises(RankError, match="how='4d'"):
        launch.run(cut_in, ["4d"], ranks=4)
