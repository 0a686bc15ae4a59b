"""Matrices on grids of ranks: SUMMA, Cannon, 2-D and 2.5-D; equal to one process, bytes as promised."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from minitrain import collectives, launch
from minitrain.course.saved_tensors import SavedTensors
from minitrain.model.gpt import Block, GPTConfig
from minitrain.ranks.events import Issue, Wait
from minitrain.ranks.launch import dryrun
from minitrain.ranks.ledger import Ledger
from minitrain.ranks.mesh import Mesh
from minitrain.ranks.sharding import full_tensor, shard
from minitrain.systems.tensor_parallel import optimus
from minitrain.systems.tensor_parallel import summa as products
from minitrain.systems.tensor_parallel.optimus import Linear2D, Norm2D
from minitrain.systems.tensor_parallel.summa import (
    block,
    cannon,
    summa,
    summa_nt,
    summa_overlapped,
    summa_tn,
    whole,
)
from tests.parallel import TOLERANCE, Traffic

DOUBLE = 8  # bytes


def grid(side: int):
    """Row group and column group: who differs in the column is in my row."""
    mesh = Mesh(row=side, column=side)
    return mesh.group("column"), mesh.group("row")


def cuboid(side: int, depth: int):
    mesh = Mesh(depth=depth, row=side, column=side)
    return mesh.group("column"), mesh.group("row"), mesh.group("depth")


def random(*shape: int, seed: int = 0, dtype=torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def apart(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape
    return (ours - theirs).abs().max().item()


def sent(fn: Callable) -> tuple[object, int]:
    with Traffic() as ledger:
        result = fn()
    return result, ledger.sent_bytes()


# ---- products --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", [1, 2, 3])
def test_products_and_their_bytes(side):
    """Every product, of matrices and of batches, on every rank; what each rank sends."""
    B, T, K, N = 6, 2, 12, 18

    def rank():
        groups = grid(side)
        i, j, wrong = groups[1].rank(), groups[0].rank(), []
        for front in ((B,), (B, T)):
            A, W, C = random(*front, K), random(K, N, seed=1), random(*front, N, seed=2)
            a, w, c = (block(matrix, *groups) for matrix in (A, W, C))
            kept = [x.clone() for x in (a, w, c)]
            steps, skew = (side - 1) * (a.nbytes + w.nbytes), a.nbytes * (i > 0) + w.nbytes * (j > 0)
            for product, left, right, expected, nbytes in [
                (summa, a, w, A @ W, steps),
                (summa_overlapped, a, w, A @ W, steps),
                (summa_nt, c, w, C @ W.T, steps),
                (summa_tn, a, c, A.flatten(0, -2).T @ C.flatten(0, -2), steps),
                (cannon, a, w, A @ W, steps + skew),
            ]:
                result, sent_bytes = sent(lambda: product(left, right, *groups))
                if apart(whole(result, *groups), expected) > TOLERANCE or sent_bytes != nbytes:
                    wrong.append((product.__name__, front, sent_bytes, nbytes))
            if not torch.equal(summa(a, w, *groups), summa_overlapped(a, w, *groups)):
                wrong.append("overlapped has other bits")
            if not all(torch.equal(x, y) for x, y in zip((a, w, c), kept)):
                wrong.append("an input was written to")
        return wrong

    assert launch.run(rank, ranks=side * side) == [[]] * side * side


def test_cannon():
    """On 3×3 ranks: after the skew, blocks go to the neighbours on the left and above only."""
    side, A, B = 3, random(6, 9), random(9, 12, seed=1)

    def rank():
        groups, calls = grid(side), []
        a, b = block(A, *groups), block(B, *groups)
        with collectives.observe(lambda kind, call: calls.append(call) if kind == "issue" else None):
            c = cannon(a, b, *groups)
        assert {call.op for call in calls} == {"send", "receive"}
        return apart(whole(c, *groups), A @ B), [call.peer for call in calls if call.op == "send"]

    def place(i: int, j: int) -> int:
        return i % side * side + j % side

    for me, (error, peers) in enumerate(launch.run(rank, ranks=side * side)):
        i, j = divmod(me, side)
        skew = [place(i, j - i)] * (i > 0) + [place(i - j, j)] * (j > 0)
        assert error < TOLERANCE and peers == skew + [place(i, j - 1), place(i - 1, j)] * (side - 1)


@pytest.mark.parametrize(
    "product, blocks", [(summa, 3), (summa_overlapped, 4), (summa_nt, 2), (summa_tn, 2), (cannon, 4)]
)
def test_nothing_is_larger_than_a_block(product, blocks):
    """Beside operands and result a product holds at most two blocks of each operand, whatever q."""

    def rank(side):
        groups = grid(side)
        left, right = torch.zeros(16, 16), torch.zeros(16, 16)
        with Ledger() as ledger:
            product(left, right, *groups)
        return ledger.peak_bytes / left.nbytes

    for side in (2, 8):
        assert dryrun.run(rank, side, ranks=side * side) == 2 + 1 + blocks


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_any_float(dtype, tolerance):
    """Results keep the dtype; a norm's statistics are at least float32."""

    def rank():
        groups, x = grid(2), random(4, T, 16, dtype=dtype)
        far, norms = [], (nn.LayerNorm(16), nn.RMSNorm(16))
        for module, cut in ((nn.Linear(16, 24), Linear2D), *((norm, Norm2D) for norm in norms)):
            module = filled(module).to(dtype)
            ours, x_block = cut(module, *groups), block(x, *groups).requires_grad_()
            y = ours(x_block)
            y.backward(y.detach())
            assert y.dtype == x_block.grad.dtype == ours.weight.grad.dtype == dtype
            expected = module.double()(x.double())
            far.append(apart(whole(y, *groups).double(), expected) / expected.abs().max().item())
        return max(far)

    assert max(launch.run(rank, ranks=4)) < tolerance


def test_overlapped_issues_the_next_step_before_it_multiplies():
    """And so does a linear forward."""

    def order(forward):
        groups, x = grid(3), torch.zeros(4, 4)
        with Ledger() as ledger:
            forward(x, x, *groups)
        word = lambda event: "x" if "addmm" in getattr(event, "name", "") else ""
        return "".join({Issue: "i", Wait: "w"}.get(type(event)) or word(event) for event in ledger.events)

    assert dryrun.run(order, summa, ranks=9) == "iwiwx" * 3
    for forward in (summa_overlapped, optimus.linear_forward):
        assert dryrun.run(order, forward, ranks=9) == "iiww" + "iixww" * 2 + "x"
    steps = "iiiixwwww" * 2 + "x"  # of both blocks the send and the receive
    assert [dryrun.run(order, cannon, rank=r, ranks=9) for r in (0, 4)] == [steps, "iiiiwwww" + steps]


# ---- layers: forward, gradients of the input and of every parameter --------------------------------------

GATED = dict(norm="rms", activation="swiglu", positions="rope", num_kv_heads=2)
CONFIGS = {
    "gated, rms, rope, grouped heads": GATED,
    "layer norm, biases, alibi": dict(norm="layer", activation="gelu", positions="alibi", bias=True),
    "parallel residual": dict(norm="layer", activation="geglu", residual="parallel"),
    "post-norm": dict(norm="rms", activation="gelu", residual="post", bias=True),
}
T = 5
POSITIONS = torch.arange(T)


def filled(module: nn.Module) -> nn.Module:
    """Every parameter is random, biases and norms too, and as large as others: nothing hides in a zero."""
    with torch.no_grad():
        for number, param in enumerate(module.parameters()):
            param.copy_(random(*param.shape, seed=100 + number) / 2 + (param.dim() == 1))
    return module


def make_block(**changes) -> Block:
    settings = dict(d_model=16, num_heads=4, d_ff=24, num_layers=2)
    return filled(Block(GPTConfig(**(settings | changes)), "layers.1", dtype=torch.float64))


def difference(module: nn.Module, ours: nn.Module, x: Tensor, cut: Callable, join: Callable, *args) -> float:
    """One process beside the grid, as every rank sees it once the blocks are put together."""
    x.requires_grad_()
    y = module(x, *args)
    dy = random(*y.shape, seed=9)
    y.backward(dy)
    x_block = cut(x.detach()).requires_grad_()
    y_block = ours(x_block, *args)
    y_block.backward(cut(dy))
    distances = [apart(join(y_block), y), apart(join(x_block.grad), x.grad)]
    assert dict(ours.named_parameters()).keys() == dict(module.named_parameters()).keys()
    for param, theirs in zip(ours.parameters(), module.parameters()):
        distances.append(apart(full_tensor(param), theirs))
        if theirs.requires_grad:
            distances.append(apart(full_tensor(param.grad, param.placement.shards), theirs.grad))
        else:
            assert not param.requires_grad and param.grad is None
    return max(distances)


def on_grid(module: nn.Module, cut_module: Callable, side: int, *args) -> float:
    groups = grid(side)
    cut, join = (lambda x: block(x, *groups)), (lambda x: whole(x, *groups))
    return difference(module, cut_module(*groups), random(4, T, 16), cut, join, *args)


def in_place(cut: Callable, module: nn.Module) -> Callable:
    def cut_module(*groups):
        cut(module, *groups)
        return module

    return cut_module


def layers() -> list[tuple[nn.Module, Callable, tuple]]:
    """Every part of a block: one process's, how it is cut on a grid, what its forward takes besides x."""
    double = dict(dtype=torch.float64)
    linear, plain = filled(nn.Linear(16, 24, **double)), filled(nn.Linear(16, 8, bias=False, **double))
    found = [
        (linear, lambda *groups: Linear2D(linear, *groups), ()),
        (plain, lambda *groups: Linear2D(plain, *groups), ()),
    ]
    norms = nn.LayerNorm(16, **double), nn.LayerNorm(16, bias=False, **double), nn.RMSNorm(16, **double)
    for norm in norms:
        found.append((filled(norm), lambda *groups, norm=norm: Norm2D(norm, *groups), ()))
    for settings in CONFIGS.values():
        theirs, ours = make_block(**settings), make_block(**settings)
        found.append((theirs.mlp, in_place(optimus.cut_mlp, ours.mlp), ()))
        found.append((theirs.attention, in_place(optimus.cut_attention, ours.attention), (POSITIONS,)))
    return found


def test_layers_equal_one_process():
    def rank(side):
        return max(on_grid(module, cut, side, *args) for module, cut, args in layers())

    for side in (1, 2):
        assert max(launch.run(rank, side, ranks=side * side)) < TOLERANCE


def block_on_grid(settings: dict) -> float:
    both = [make_block(**settings) for _ in range(2)]
    for one in both:
        one.norm1.weight.requires_grad_(settings is GATED)  # else it is frozen
    return on_grid(both[0], in_place(optimus.cut_block, both[1]), 2, POSITIONS)


def test_a_block_equals_one_process():
    def rank():
        return max(block_on_grid(settings) for settings in CONFIGS.values())

    assert max(launch.run(rank, ranks=4)) < TOLERANCE


def test_without_its_collectives_it_does_not(monkeypatch):
    """Controls: no broadcast in a product, no sum in a norm, none of a vector's gradient over a column."""

    def rank(module, name, deaf):
        monkeypatch.setattr(module, name, deaf)
        return block_on_grid(GATED)

    def unsent(x, source, group, async_op=False):
        return SimpleNamespace(wait=x.contiguous) if async_op else x.contiguous()

    controls = [
        (products, "broadcast", unsent),
        (optimus, "all_reduce", lambda x, group: x),
        (optimus, "copy_to", lambda x, group: x),
    ]
    for control in controls:
        assert min(launch.run(rank, *control, ranks=4)) > 1e-3


# ---- memory and bytes of layers --------------------------------------------------------------------------


def test_activations_and_weights_are_a_pth():
    """A linear keeps b·s·h/p elements where one dimension keeps b·s·h; a block 1/p of what one process keeps,
    and the mean and scale of its norms, a number per token, on each of the q columns; matrices 1/p, vectors
    1/q."""
    settings = dict(d_ff=32, bias=True, norm="layer", activation="gelu", positions="none")

    def rank():
        groups = grid(2)
        linear, layer = Linear2D(nn.Linear(16, 32).double(), *groups), make_block(**settings)
        optimus.cut_block(layer, *groups)
        x = block(random(4, T, 16), *groups).requires_grad_()
        with SavedTensors(linear) as one:
            linear(x)
        with SavedTensors(layer) as all_of_it:
            layer(x, POSITIONS)
        return one.bytes, all_of_it.bytes, elements(layer, 2), elements(layer, 1)

    whole_layer = make_block(**settings)
    with SavedTensors(whole_layer) as saved:
        whole_layer(random(4, T, 16).requires_grad_(), POSITIONS)
    statistics = 4 * 4 * T * DOUBLE  # of two norms, mean and scale, all tokens
    for one, all_of_it, matrices, vectors in launch.run(rank, ranks=4):
        assert one == 4 * T * 16 * DOUBLE // 4
        assert all_of_it == (saved.bytes - statistics) // 4 + statistics // 2
        assert (matrices, vectors) == (elements(whole_layer, 2) // 4, elements(whole_layer, 1) // 2)


def elements(module: nn.Module, dims: int) -> int:
    return sum(param.numel() for param in module.parameters() if param.dim() == dims)


def forward_and_backward_bytes(module: nn.Module, x: Tensor) -> tuple[int, int]:
    y, forward = sent(lambda: module(x))
    return forward, sent(lambda: y.backward(torch.ones_like(y)))[1]


@pytest.mark.parametrize("side", [2, 4])
def test_bytes_of_linear_and_norms(side):
    m, k, n = 16 * T, 32, 16

    def rank():
        groups = grid(side)
        x = torch.zeros(16 // side, T, k // side, dtype=torch.float64).requires_grad_()
        double = dict(dtype=torch.float64)
        norms = nn.LayerNorm(k, **double), nn.RMSNorm(k, **double)
        made = [Linear2D(nn.Linear(k, n, **double), *groups), *(Norm2D(norm, *groups) for norm in norms)]
        return [forward_and_backward_bytes(module, x) for module in made]

    q = side
    product = (q - 1) * DOUBLE * (m * k + k * n) // q**2
    ring = 2 * (q - 1) * DOUBLE  # ring/q of what is all-reduced
    for me in (0, q * q - 1):
        linear, layer_norm, rms_norm = dryrun.run(rank, rank=me, ranks=q * q)
        assert linear == (product, 2 * product + ring * n // q // q)
        assert layer_norm == (2 * ring * m // q // q, 2 * ring * m // q // q + 2 * ring * k // q // q)
        assert rms_norm == (ring * m // q // q, ring * m // q // q + ring * k // q // q)


# ---- two and a half dimensions ---------------------------------------------------------------------------


def test_two_and_a_half_dimensions_equal_one_process(monkeypatch):
    def distances(groups, configs):
        double, found = dict(dtype=torch.float64), []
        linear, norm = filled(nn.Linear(16, 24, **double)), filled(nn.RMSNorm(16, **double))
        made = [(linear, Linear2D(linear, *groups), ()), (norm, Norm2D(norm, *groups), ())]
        for settings in configs:
            whole_block, theirs, layer, ours = (make_block(**settings) for _ in range(4))
            optimus.cut_block(layer, *groups)
            optimus.cut_attention(ours.attention, *groups)
            optimus.cut_mlp(ours.mlp, *groups)
            made += [(whole_block, layer, (POSITIONS,)), (theirs.mlp, ours.mlp, ())]
            made += [(theirs.attention, ours.attention, (POSITIONS,))]
        cut, join = (lambda x: block(x, *groups)), (lambda x: whole(x, *groups))
        for module, ours, args in made:
            found.append(difference(module, ours, random(8, T, 16), cut, join, *args))
        return found

    def rank():
        groups, configs = cuboid(2, 2), list(CONFIGS.values())
        equal = max(distances(groups, configs[:2]))
        monkeypatch.setattr(
            optimus, "over_depth", lambda module, group: [module.weight, module.bias]
        )  # control: no sums over depth
        return equal, min(distances(groups, configs[1:2]))

    for equal, without in launch.run(rank, ranks=8):
        assert equal < TOLERANCE and without > 1e-3


def test_what_depth_saves_and_what_it_costs():
    """64 ranks, 8·8·1 or 4·4·4: fewer bytes of activations each, more of weights. And 2·2·1 beside 2·2·2."""
    m, k, n = 64 * T, 32, 32

    def rank(side, depth):
        groups = cuboid(side, depth)
        x = torch.zeros(64 // (side * depth), T, k // side, dtype=torch.float64).requires_grad_()
        linear = Linear2D(nn.Linear(k, n, bias=False, dtype=torch.float64), *groups)
        with Ledger() as ledger:
            linear(x)
            activations = ledger.sent_bytes("broadcast", "column"), ledger.sent_bytes("broadcast", "row")
        return *activations, forward_and_backward_bytes(linear, x), linear.weight.numel()

    volumes = {}
    for q, d in ((2, 1), (2, 2), (8, 1), (4, 4)):
        for me in (0, q * q * d - 1):
            activations, weights, (forward, backward), held = dryrun.run(rank, q, d, rank=me, ranks=q * q * d)
            assert activations == (q - 1) * DOUBLE * m * k // d // q**2
            assert weights == (q - 1) * DOUBLE * k * n // q**2 and forward == activations + weights
            assert backward == 2 * forward + 2 * (d - 1) * DOUBLE * k * n // q**2 // d
            assert held == k * n // q**2
            volumes[q, d] = activations, weights
    assert volumes[2, 2][0] * 2 == volumes[2, 1][0] and volumes[2, 2][1] == volumes[2, 1][1]
    assert volumes[4, 4][0] < volumes[8, 1][0] / 2 and volumes[4, 4][1] > volumes[8, 1][1]


# ---- refusals --------------------------------------------------------------------------------------------


def check_refusals_here(refused: dict[str, Callable]) -> None:
    for words, call in refused.items():
        with pytest.raises(ValueError) as caught:
            call()
        assert words in str(caught.value) and "\n" not in str(caught.value), caught.value


def test_bad_grids_are_refused_before_anyone_waits():
    """In a dry run nobody could be waited for: each message is raised by one rank alone."""

    def rank():
        mesh = Mesh(depth=2, row=2, column=4)
        row, column, depth = mesh.group("column"), mesh.group("row"), mesh.group("depth")
        linear, x = nn.Linear(8, 8), torch.zeros(4, 4)
        calls = [partial(product, x, x) for product in (summa, summa_overlapped, summa_nt, summa_tn, cannon)]
        calls += [partial(block, x), partial(Linear2D, linear), partial(Norm2D, nn.LayerNorm(8))]
        calls += [lambda row, column: Linear2D(linear, row, column, depth)]
        for call in calls:
            square = "a grid of 4 x 2 is not square"
            check_refusals_here({square: partial(call, row, column)})
        shared = "share ranks [1, 5], but must cross in this rank only"
        check_refusals_here(
            {
                f"column group [1, 5] and row group [1, 5] {shared}": lambda: summa(x, x, column, column),
                f"column group [1, 5] and depth group [1, 5] {shared}": lambda: Linear2D(
                    linear, row, column, column
                ),
            }
        )

    dryrun.run(rank, rank=1, ranks=16)


def test_bad_sizes_are_refused():
    def rank():
        groups = row, column, depth = cuboid(2, 2)
        flat, zeros, linear = (row, column), torch.zeros, nn.Linear(8, 8)
        once, twice, cut_linear = block(zeros(4, 4), *flat), make_block(), nn.Linear(8, 8)
        cut_linear.weight = shard(cut_linear.weight, 0, depth)
        optimus.cut_block(twice, *flat)
        check_refusals_here(
            {
                "[4, 3] and [2, 5] sum over 3 and 2": lambda: summa(zeros(4, 3), zeros(2, 5), *flat),
                "not a multiple of the 2 ranks of row": lambda: block(zeros(3, 4), *flat),
                "block: the tensor [2, 2] is cut already": lambda: block(once, *flat),
                "7 of weight is not a multiple of q=2": lambda: Linear2D(nn.Linear(8, 7), *flat),
                "Norm2D: 7 of weight is": lambda: Norm2D(nn.RMSNorm(7), *flat),
                "x is 8 wide": lambda: Linear2D(linear, *flat)(zeros(2, 8)),
                "Linear2D: weight [4, 8] is cut already": lambda: Linear2D(cut_linear, *flat),
                "already, along dim 1 over row": lambda: optimus.cut_attention(twice.attention, *flat),
                "3 along dim 0 of [3, 4] is not a multiple": lambda: block(zeros(6, 4), *groups),
                "1 heads are not a multiple": lambda: optimus.cut_block(make_block(num_kv_heads=1), *flat),
                "dropout=0.5: ranks": lambda: optimus.cut_block(make_block(dropout=0.5), *groups),
                "has no q, k, v": lambda: optimus.cut_block(make_block(kv_latent=8, rope_head_dim=4), *flat),
            }
        )

    dryrun.run(rank, ranks=8)
