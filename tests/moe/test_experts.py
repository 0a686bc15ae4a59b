"""Every way to work through the experts gives what a loop over rows gives, at the FLOPs and bytes it promises."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from minitrain import launch
from minitrain.course.saved_tensors import SavedTensors
from minitrain.moe import experts, router
from minitrain.moe.dispatch import Dispatch
from minitrain.ranks.launch import dryrun
from minitrain.ranks.ledger import Ledger

E, D, WIDE = 5, 8, 16
SIZES = {
    "uneven": [3, 1, 7, 1, 4], "experts without rows": [0, 6, 0, 2, 0], "all on one": [0, 0, 9, 0, 0],
    "no rows": [0, 0, 0, 0, 0],
}  # fmt: skip
ACTS = {"gelu": (F.gelu, False), "silu, gated": (F.silu, True)}


def drawn(rows, gated, dtype=torch.float64):
    """Rows, up, down and gate."""
    generator = torch.Generator().manual_seed(0)
    shapes = (rows, D), (E, D, WIDE), (E, WIDE, D), (E, D, WIDE)
    values = [torch.randn(shape, generator=generator, dtype=torch.float64) / 4 for shape in shapes]
    values = [value.to(dtype).requires_grad_() for value in values]
    return values if gated else [*values[:3], None]


def by_row(rows, sizes, up, down, act, gate):
    """One row after the other."""
    y, owners = [], [e for e, size in enumerate(sizes) for _ in range(size)]
    for row, e in zip(rows, owners):
        y.append((act(row @ up[e]) if gate is None else act(row @ gate[e]) * (row @ up[e])) @ down[e])
    return torch.stack(y) if y else 0 * rows


def outcome(y, *leaves):
    """y and the gradients of the leaves, of a loss in which every element counts differently."""
    (y * torch.linspace(1, 2, y.numel()).to(y).view(y.shape)).square().sum().backward()
    return y.detach(), *(torch.zeros_like(x) if x.grad is None else x.grad for x in leaves if x is not None)


def close(found, wanted, atol=1e-12):
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=atol)


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("case", SIZES)
@pytest.mark.parametrize("way", experts.IMPLEMENTATIONS)
def test_equals_one_row_after_the_other(way, case, act):
    sizes, (act, gated) = SIZES[case], ACTS[act]
    rows, up, down, gate = drawn(sum(sizes), gated)
    found = outcome(
        experts.IMPLEMENTATIONS[way](rows, torch.tensor(sizes), up, down, act, gate), rows, up, down, gate
    )
    assert all(x.grad is not None for x in (rows, up, down))  # zeros, not None, where nobody came
    rows, up, down, gate = drawn(sum(sizes), gated)
    close(found, outcome(by_row(rows, sizes, up, down, act, gate), rows, up, down, gate))


def test_flops_are_those_of_the_rows_and_of_what_was_padded():
    sizes = SIZES["uneven"]
    worked = {"loop": 16, "grouped": 16, "padded": E * 7, "blocked": sum(experts.whole_blocks(sizes, 16))}
    for act, gated in ACTS.values():
        for way, rows_worked in worked.items():
            rows, up, down, gate = drawn(sum(sizes), gated)
            with Ledger() as ledger:
                with ledger.phase("forward"):
                    y = experts.IMPLEMENTATIONS[way](rows, torch.tensor(sizes), up, down, act, gate)
                y.square().sum().backward()
            forward = (2 + gated) * 2 * rows_worked * D * WIDE
            assert ledger.flops_by_phase == {"": 2 * forward, "forward": forward}


@pytest.mark.parametrize("block", [1, 3, 16])
def test_megablocks(block):
    """No row is dropped, each expert multiplies less than a block of zeros whatever the load, and that bound is
    reached; the grouped product multiplies none, and each row is that of the dense loop."""
    for sizes in (*SIZES.values(), [1] * E, [block] * E, [100, 0, 0, 0, 1]):
        rows, up, down, _ = drawn(sum(sizes), False)
        with Ledger() as ledger:
            y = experts.blocked(rows, torch.tensor(sizes), up, down, block=block)
        multiplied, rest = divmod(ledger.flops, 2 * 2 * D * WIDE)
        assert rest == multiplied % block == 0 <= multiplied - sum(sizes) <= E * (block - 1)
        assert multiplied == E * block or sizes != [1] * E
        wanted = by_row(rows, sizes, up, down, F.gelu, None)
        close([y, experts.grouped(rows, torch.tensor(sizes), up, down)], [wanted, wanted])


class Held(nn.Module):
    """Matrices as parameters, so that they do not count as kept."""

    def __init__(self, *matrices):
        super().__init__()
        self.matrices = nn.ParameterList(matrices)


@pytest.mark.parametrize("gated", [False, True])
def test_kept_are_the_rows_and_the_layer_before_act(gated):
    sizes = SIZES["uneven"]
    rows, up, down, gate = drawn(16, gated)
    held = Held(up, down, *([gate] * gated))
    matrices = held.matrices[0], held.matrices[1], F.silu, held.matrices[2] if gated else None
    kept = {}
    for way in experts.IMPLEMENTATIONS:
        with SavedTensors(held) as saved:
            experts.IMPLEMENTATIONS[way](rows, torch.tensor(sizes), *matrices)
        kept[way] = saved.bytes
    assert kept["grouped"] == 16 * (D + (1 + gated) * WIDE) * 8
    # and act's results, and their products
    assert kept["loop"] >= kept["grouped"] + (1 + gated) * 16 * WIDE * 8


@pytest.mark.parametrize("gated", [False, True])
def test_what_act_makes_lives_for_one_turn(gated):
    sizes = SIZES["uneven"]
    rows, up, down, gate = drawn(16, gated)
    counts = torch.tensor(sizes)
    with Ledger() as ledger:
        y = experts.grouped(rows, counts, up, down, F.silu, gate, sizes=sizes)
        forward = ledger.peak_bytes
    matrices = (2 + gated) * up.nbytes
    kept = rows.nbytes + (1 + gated) * 16 * WIDE * 8 + y.nbytes
    turn = max(2 * WIDE if gated else 0, WIDE + D) * max(sizes) * 8
    assert forward == matrices + kept + turn


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    "sizes", [[8, 0, 0, 0, 0], [8, 8, 0, 0, 0], [400, 0, 0, 0, 0], [400, 400, 0, 0, 0]], ids=str
)
def test_what_lives_at_the_peak_of_backward(sizes, gated):
    """Parameters and their gradients, x, y, dy and dx, z of all rows; of one turn the hidden layer, its gradient and
    those of z, and through indices copies of the rows of x and dy."""
    matrices, R, turn = (2 + gated) * E * D * WIDE, sum(sizes), max(sizes)
    for tokens in (None, torch.arange(R)):
        rows, up, down, gate = drawn(R, gated)
        with Ledger() as ledger:
            y = experts.in_turns(rows, tokens, None, up, down, gate, F.silu, sizes)
            y.backward(torch.ones_like(y))
        kept = 4 * R * D + R * (1 + gated) * WIDE + (0 if tokens is None else R)
        of_turn = (3 + 2 * gated) * WIDE + (0 if tokens is None else 2 * D)
        assert ledger.peak_bytes == 8 * (2 * matrices + kept + turn * of_turn)


def accounts(given):
    """FLOPs, peak and events of a step, for each way."""
    found = {}
    for name, way in experts.IMPLEMENTATIONS.items():
        sizes = SIZES["uneven"]
        rows, up, down, gate = (t.detach().requires_grad_() for t in drawn(16, True))
        with Ledger() as ledger:
            y = way(rows, torch.tensor(sizes), up, down, F.silu, gate, sizes=sizes if given else None)
            y.square().sum().backward()
        found[name] = ledger.flops, ledger.peak_bytes, ledger.events
    return found


def test_counts_are_asked_for_only_if_they_are_not_given():
    """A dry run has no numbers: with `sizes` it gives the account of a real run, without it says what it lacks."""
    assert dryrun.run(accounts, True, ranks=1) == launch.run(accounts, True, ranks=1)[0]
    with pytest.raises(ValueError, match="asks for the numbers in a tensor"):
        dryrun.run(accounts, False, ranks=1)


def test_frozen_experts_cost_no_products():
    sizes, product = SIZES["uneven"], 2 * 16 * D * WIDE
    for frozen, spared in (((1, 2, 3), 3), ((2,), 1), ((0,), 2)):  # rows are behind two products, up and gate
        leaves = drawn(16, True)
        for index in frozen:
            leaves[index].requires_grad_(False)
        rows, up, down, gate = leaves
        with Ledger() as ledger:
            experts.grouped(rows, torch.tensor(sizes), up, down, F.silu, gate).square().sum().backward()
        assert ledger.flops == (9 - spared) * product
        assert all((leaf.grad is None) == (index in frozen) for index, leaf in enumerate(leaves))


# ---- torch's grouped product -----------------------------------------------------------------------------


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("case", [case for case in SIZES if case != "no rows"])
def test_torchs_grouped_product_gives_the_same(case, act):
    """Its CPU kernel, in float32; what `grouped` uses on a GPU."""
    sizes, (act, gated) = SIZES[case], ACTS[act]
    outcomes = []
    for way in (experts.by_kernel, experts.loop):
        rows, up, down, gate = drawn(sum(sizes), gated, torch.float32)
        y = way(rows, torch.tensor(sizes), up, down, act, gate)
        outcomes.append(outcome(y, rows, up, down, gate))
    close(*outcomes, atol=1e-5)
    rows, up, down, gate = drawn(sum(sizes), gated, torch.float32)
    with Ledger() as ledger:
        y = experts.by_kernel(rows, torch.tensor(sizes), up, down, act, gate)
        y.sum().backward()  # an expanded gradient
    assert ledger.flops == 3 * (2 + gated) * 2 * sum(sizes) * D * WIDE


def test_which_way_a_device_and_a_dtype_take():
    def has_kernel(device, dtype, width=WIDE, rows=16):
        with FakeTensorMode():
            shapes = (rows, D), (E, D, width), (E, width, D)
            return experts.has_kernel(*(torch.empty(s, device=device, dtype=dtype) for s in shapes))

    assert has_kernel("cuda", torch.bfloat16)
    assert not has_kernel("cuda", torch.bfloat16, width=12)  # 24 bytes per row
    assert not has_kernel("cuda", torch.bfloat16, rows=0)
    assert not any(has_kernel("cuda", dtype) for dtype in (torch.float32, torch.float64, torch.float16))
    assert not any(has_kernel("cpu", dtype) for dtype in (torch.bfloat16, torch.float32, torch.float64))


@pytest.mark.cuda(alone=True)
def test_on_a_gpu():
    outcomes = []
    for way in (experts.grouped, experts.loop):
        leaves = [t.detach().cuda().requires_grad_() for t in drawn(16, True, torch.bfloat16)]
        rows, up, down, gate = leaves
        y = way(rows, torch.tensor(SIZES["uneven"], device="cuda"), up, down, F.silu, gate)
        outcomes.append(outcome(y, *leaves))
    close(*outcomes, atol=1e-2)


# ---- through indices -------------------------------------------------------------------------------------

TOKENS = 11
mask = torch.arange(TOKENS) % 4 != 1
ROUTED = {
    "top-2": lambda scores: router.top_k(scores, 2),
    "top-3, masked": lambda scores: router.top_k(scores, 3, mask),
    "some dropped": lambda scores: router.top_k(scores, 2).within(3),
    "nobody": lambda scores: router.top_k(scores, 2, mask & False),
}


def gathered(x, way, weights, *matrices):
    """Copies of the rows, the experts, and results on their way back."""
    return way.back(experts.grouped(way.there(x), way.counts, *matrices), weights)


def scattered(x, way, weights, *matrices):
    return experts.scattered(x, way.tokens, weights.flatten()[way.choices], way.counts, *matrices)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("case", ROUTED)
def test_through_indices_equals_copies_of_rows(case, gated):
    """Reading x and adding to the result through indices: equal, gradients of the routing included."""
    outcomes = []
    for layer in (scattered, gathered):
        x, up, down, gate = drawn(TOKENS, gated)
        scores = (x.detach() @ torch.linspace(-1, 1, D * E).view(D, E).sin().to(x)).requires_grad_()
        routing = ROUTED[case](scores)
        y = layer(x, Dispatch(routing), routing.weights, up, down, F.silu, gate)
        outcomes.append(outcome(y, x, up, down, gate, scores))
    close(*outcomes)


@pytest.mark.parametrize("weighed", [False, True])
def test_scattermoe(weighed):
    """Kept are k·T·D elements less, the copies of the tokens; and as many again, the results, if weights learn. Nor
    are the copies made: the peak is lower by as many at least."""
    x, up, down, gate = drawn(TOKENS, True)
    held, k = Held(up, down, gate), 3
    kept, results, peaks = [], [], []
    for layer in (gathered, scattered):
        with SavedTensors(held) as saved, Ledger() as ledger:
            scores = x @ torch.ones(D, E, dtype=x.dtype, requires_grad=True)  # the router keeps x, in both
            routing = router.top_k(scores, k)
            weights = routing.weights if weighed else routing.weights.detach()
            y = layer(x, Dispatch(routing), weights, *held.matrices[:2], F.silu, held.matrices[2])
        results.append([y])
        kept.append(sum(s.bytes for s in saved.saved if s.dtype == x.dtype))
        peaks.append(ledger.peak_bytes)
    assert kept[0] - kept[1] == (1 + weighed) * k * TOKENS * D * 8
    assert peaks[0] - peaks[1] >= k * TOKENS * D * 8
    close(*results)
    test_through_indices_equals_copies_of_rows("top-2", weighed)
    test_what_lives_at_the_peak_of_backward([8, 8, 0, 0, 0], weighed)
