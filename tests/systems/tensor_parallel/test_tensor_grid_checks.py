"""What each grid promises, on the ranks it needs: the product, the bytes of every rank, and what a rank
holds.
"""

import torch
from torch import nn

from minitrain import collectives, launch
from minitrain.memory.saved_tensors import SavedTensors
from minitrain.model.gpt import Block, GPTConfig
from minitrain.ranks.collectives import world
from minitrain.ranks.ledger import Ledger
from minitrain.ranks.mesh import Mesh
from minitrain.ranks.sharding import full_tensor
from minitrain.systems.tensor_parallel import rotated
from minitrain.systems.tensor_parallel.grids import cube, optimus, tesseract
from minitrain.systems.tensor_parallel.grids.cannon import cannon
from minitrain.systems.tensor_parallel.grids.summa import block, summa, whole
from minitrain.systems.tensor_parallel.rotated import RotatedLinear
from minitrain.tensor_parallel.linear import ColumnLinear
from tests.parallel import TOLERANCE

M, K, N, DOUBLE = 8, 16, 24, 8


def operands(*seeds):
    return [
        torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        for seed, shape in zip(seeds, ((M, K), (K, N)))
    ]


def apart(ours, theirs):
    return (ours - theirs).abs().max().item()


def square(side=2):
    mesh = Mesh(row=side, column=side)
    return mesh.group("column"), mesh.group("row")


def on_square(product, A, B, side=2):
    groups = square(side)
    a, b = block(A, *groups), block(B, *groups)
    messages = []
    with (
        Ledger() as ledger,
        collectives.observe(lambda kind, call: messages.append(call) if kind == "issue" else None),
    ):
        c = product(a, b, *groups)
    shares = [x.numel() / y.numel() for x, y in ((A, a), (B, b), (A @ B, c))]
    return (
        apart(whole(c, *groups), A @ B),
        ledger.sent_bytes() // DOUBLE,
        shares,
        [call.peer for call in messages if call.op == "send"],
        (groups[1].rank(), groups[0].rank()),
    )


def test_summa():
    """C == A·B on 2×2; (q-1)(mk+kn)/q² elements per rank; a quarter of each matrix."""
    for error, sent, shares, _, _ in launch.run(on_square, summa, *operands(0, 1), ranks=4):
        assert error < TOLERANCE and sent == (M * K + K * N) // 4 and shares == [4, 4, 4]


def test_cannon():
    """C == A·B on 3×3; after the skew q-1 shifts of one block of A and one of B, to neighbours only."""
    m, k, n, q = 6, 9, 12, 3

    def rank():
        A, B = (
            torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
            for seed, shape in enumerate(((m, k), (k, n)))
        )
        return on_square(cannon, A, B, q)

    for error, sent, shares, peers, (i, j) in launch.run(rank, ranks=q * q):
        left, up = q * i + (j - 1) % q, (i - 1) % q * q + j  # neighbours, and no other rank
        skew = [q * i + (j - i) % q] * (i > 0) + [(i - j) % q * q + j] * (j > 0)
        assert error < TOLERANCE and shares == [9, 9, 9]
        assert peers == skew + [left, up] * (q - 1)
        assert left not in (up, q * i + (j + 1) % q)  # to the left is not to the right, as it would be on 2×2
        assert sent == (m * k * (q - 1 + (i > 0)) + k * n * (q - 1 + (j > 0))) // q**2


CONFIG = GPTConfig(
    vocab_size=64,
    d_model=16,
    num_heads=4,
    num_layers=2,
    d_ff=32,
    norm="rms",
    activation="swiglu",
    positions="rope",
)
POSITIONS = torch.arange(5)


def layer():
    torch.manual_seed(0)
    made = Block(CONFIG, "layers.1", dtype=torch.float64)
    for param in made.parameters():
        param.data = torch.randn_like(param) / 2
    return made


def beside_one_process(ours, cut, join):
    """Errors of output, input gradient and all parameters' gradients of a layer on a grid."""
    theirs, x = (
        layer(),
        torch.randn(8, 5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(3)),
    )
    whole_x, part = x.clone().requires_grad_(), cut(x).requires_grad_()
    y, y_part = theirs(whole_x, POSITIONS), ours(part, POSITIONS)
    y.square().mean().backward()
    (y_part.square().sum() / y.numel()).backward()
    errors = [apart(join(y_part), y), apart(join(part.grad), whole_x.grad)]
    for mine, param in zip(ours.parameters(), theirs.parameters()):
        errors.append(apart(full_tensor(mine.grad, mine.placement.shards), param.grad))
    return max(errors)


def kept_of(linear, x):
    with SavedTensors(linear) as saved:
        linear(x.requires_grad_())
    return saved.bytes // DOUBLE


def test_optimus_2d():
    """A Transformer layer on 2×2 equals one process; a linear keeps b·s·h/p elements, where one dimension
    keeps b·s·h.
    """

    def rank():
        groups, ours = square(), layer()
        optimus.cut_block(ours, *groups)
        error = beside_one_process(ours, lambda x: block(x, *groups), lambda x: whole(x, *groups))
        x, double = torch.zeros(8, 5, 16, dtype=torch.float64), dict(dtype=torch.float64)
        return (
            error,
            kept_of(optimus.Linear2D(nn.Linear(16, 32, **double), *groups), block(x, *groups)),
            kept_of(ColumnLinear(nn.Linear(16, 32, **double), world()), x),
        )

    for error, in_two, in_one in launch.run(rank, ranks=4):
        assert error < TOLERANCE and in_one == 8 * 5 * 16 and in_two * 4 == in_one


def test_tesseract_2p5d():
    """2×2×2 on 8 ranks equals one process; each rank broadcasts half of what 2×2 does of the same
    activations.
    """

    def rank(depth):
        mesh = Mesh(depth=depth, row=2, column=2)
        groups, ours = (mesh.group("column"), mesh.group("row"), mesh.group("depth")), layer()
        tesseract.cut_block(ours, *groups)
        error = beside_one_process(
            ours, lambda x: tesseract.batch_block(x, *groups), lambda x: tesseract.whole_batch(x, *groups)
        )
        x = tesseract.batch_block(torch.zeros(8, 5, 16, dtype=torch.float64), *groups)
        linear = tesseract.Linear25D(nn.Linear(16, 32, bias=False, dtype=torch.float64), *groups)
        with Ledger() as ledger:
            linear(x)
        return (
            error,
            ledger.sent_bytes("broadcast", "column") // DOUBLE,
            ledger.sent_bytes("broadcast", "row") // DOUBLE,
        )

    for depth, ranks in ((1, 4), (2, 8)):
        for error, activations, weights in launch.run(rank, depth, ranks=ranks):
            assert error < TOLERANCE and activations == 8 * 5 * 16 // 4 // depth and weights == 16 * 32 // 4


def test_tp_3d():
    """2×2×2 == A·B; (l-1)/l³ (mk+kn+mn) elements per rank; exactly an eighth of A, B and C."""

    def rank():
        mesh = Mesh(x=2, y=2, z=2)
        groups = mesh.group("x"), mesh.group("y"), mesh.group("z")
        A, B = operands(0, 1)
        linear = nn.Linear(K, N, bias=False, dtype=torch.float64)
        linear.weight.data = B.T.contiguous()
        ours, a = cube.Linear3D(linear, *groups), cube.cut_activations(A, *groups)
        with Ledger() as ledger:
            c = ours(a)
        error = apart(full_tensor(c.detach(), cube.activation_shards(*groups[::-1])), A @ B)
        return (
            error,
            ledger.sent_bytes() // DOUBLE,
            [A.numel() / a.numel(), B.numel() / ours.weight.numel(), M * N / c.numel()],
        )

    for error, sent, shares in launch.run(rank, ranks=8):
        assert error < TOLERANCE and sent == (M * K + K * N + M * N) // 8 and shares == [8, 8, 8]


def test_rtp():
    """4 ranks with a batch each: output and gradients as unsplit; n-1 shards forward; a rank holds its shard, the
    one in use and one in flight (in place: its own alone, which a piece of another replaces).
    """

    def rank():
        group = world()
        A, B = operands(0, 1)
        linear = nn.Linear(K, N, bias=False, dtype=torch.float64)
        linear.weight.data = B.T.contiguous()
        x, dy = A.clone().requires_grad_(), torch.linspace(-1, 1, M * N, dtype=torch.float64).view(M, N)
        y = linear(x)
        y.backward(dy)
        mine, found = slice(group.rank() * M // 4, (group.rank() + 1) * M // 4), []
        rotated.PIECE_BYTES = 64
        for in_place in (False, True):
            ours, own = RotatedLinear(linear, group, in_place), A[mine].clone().requires_grad_()
            with Ledger() as ledger:
                out = ours(own)
            out.backward(dy[mine])
            errors = [
                apart(out, y[mine]),
                apart(own.grad, x.grad[mine]),
                apart(full_tensor(ours.weight.grad, ours.weight.placement.shards), linear.weight.grad),
            ]
            shard = ours.weight.nbytes
            sent = ledger.sent_bytes() / shard
            found.append((max(errors), K * N * DOUBLE / shard, sent, most_alive(ledger, shard)))
        return found

    for (error, share, *ahead), (error_in_place, _, *in_place) in launch.run(rank, ranks=4):
        assert max(error, error_in_place) < TOLERANCE and share == 4
        assert ahead == [3, 3] and in_place == [4, 1]


def most_alive(ledger, nbytes):
    """How many blocks of just this size were alive at once; nothing but shards is as large."""
    alive = most = 0
    for what, _, size in ledger.memory_trace():
        alive += (size == nbytes) * (1 if what == "alloc" else -1)
        most = max(most, alive)
    return most
