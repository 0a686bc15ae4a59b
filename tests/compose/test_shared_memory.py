"""Who has memory in common: results that docstrings call copies have none with what they were made from, and what
they call views lies in it. Told by addresses, then by writing into one and reading the other.
"""

from pathlib import Path

import pytest
import torch
from torch import nn

from minitrain import launch
from minitrain.checkpoint.format import bytes_of
from minitrain.checkpoint.snapshot import Snapshot
from minitrain.compose.parallelize import parallelize
from minitrain.data_parallel import states
from minitrain.memory.host_optimizer import HostOptimizer
from minitrain.memory.pools import to_device, to_host
from minitrain.model.data.batches import Rows, random_tokens
from minitrain.model.training.optim import AdamW
from minitrain.moe import experts, router
from minitrain.moe.dispatch import Dispatch
from minitrain.plan.strategy import Strategy
from minitrain.precision.blocks import RECIPES, dequantize, quantize
from minitrain.ranks.pieces import part_of, pieces_of, share_out, whole_piece
from minitrain.systems.checkpoint.in_memory import tensor_of
from minitrain.systems.memory import window
from minitrain.systems.memory.dtr import Dynamic
from minitrain.systems.memory.files import FileOptimizer, FileStore
from minitrain.systems.simulate.eviction import Evictor
from tests.parallel import small


def numbers(*shape) -> torch.Tensor:
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)


def shared(made, origins) -> bool:
    """Is there a byte that lies in both? Of each the whole block counts."""
    made, origins = ([x.untyped_storage() for x in some if x.numel()] for some in (made, origins))
    spans = [[(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in some] for some in (made, origins)]
    return any(a < d and c < b for a, b in spans[0] for c, d in spans[1])


def trained(model, optimizer):
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()


# ---- copies: (what is made, what it is made from) --------------------------------------------------------


def of_transfers(folder):
    x = numbers(4)
    host = to_host(x).wait()
    return [host, to_device(host, x.device).wait()], [x]


def of_dispatched_rows(folder):
    """One token that visits one expert is a copy of itself."""
    x = numbers(1, 4)
    way = Dispatch(router.top_k(torch.zeros(1, 1), 1))
    rows = way.there(x)
    return [rows, way.back(rows, torch.ones(1, 1))], [x]


def of_rows_by_token(folder):
    x = numbers(3, 4)
    return [experts.rows_at(x, torch.arange(3), slice(0, 3))], [x]


def of_layers_at_home(folder):
    params = [nn.Parameter(numbers(3, 2)), nn.Parameter(numbers(2))]
    return [window.sent_home(params)], params


def of_states_on_the_host(folder):
    param = nn.Parameter(numbers(4))
    host = HostOptimizer(AdamW([param]))
    host.on_grad_final(param, torch.ones(4))
    host.step()
    host.settle()
    given = {"exp_avg": numbers(4), "exp_avg_sq": numbers(4)}
    host.set_state(param, given)
    own = host.get_state(param)
    return [given["exp_avg"], given["exp_avg_sq"]], [own["exp_avg"], own["exp_avg_sq"]]


def of_states_in_files(folder):
    """Read twice: nobody sees what the first reader does to his."""
    model = nn.Linear(3, 2)
    with FileStore(folder, buffer_bytes=4096, buffers=6) as store:
        optimizer = FileOptimizer(AdamW(model.parameters()), store, 100)
        trained(model, optimizer)
        first, second = (optimizer.get_state(model.weight)["exp_avg"] for _ in range(2))
        first.zero_()
        assert optimizer.get_state(model.weight)["exp_avg"].count_nonzero() == second.numel()
    return [first], [second]


def of_a_file_that_is_sent(folder):
    data = numbers(4).numpy()
    return [tensor_of(data)], [torch.from_numpy(data)]


def of_what_is_given_to_files(folder):
    x = numbers(8)
    with FileStore(folder, buffer_bytes=4096, buffers=3) as store:
        store.write("x", x)
        x.neg_()
        taken = store.read("x").clone()
    assert torch.equal(taken, numbers(8))
    return [taken], [x]


def of_nests(folder):
    nest = {"a": [numbers(3)], "b": {"c": numbers(2)}, "d": 1}
    found = states.copied(nest)
    return [found["a"][0], found["b"]["c"]], [nest["a"][0], nest["b"]["c"]]


def of_an_optimizers_states(folder):
    """Given and taken: training does not write into a checkpoint that is held in memory."""
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    optimizer, second = AdamW(model.parameters()), AdamW(other.parameters())
    trained(model, optimizer)
    saved = optimizer.state_dict()
    second.load_state_dict(saved)
    held = [x for state in saved["state"].values() for x in state.values() if torch.is_tensor(x)]
    live = [
        x for o in (optimizer, second) for s in o.state.values() for x in s.values() if torch.is_tensor(x)
    ]
    assert len(held) >= 4 and len(live) == 2 * len(held) and not shared(live[:4], live[4:])
    return held, live


def of_codes(folder):
    """Of every recipe, also where the numbers are codes already."""
    x, made = numbers(128, 128), []
    for recipe in RECIPES:
        q = quantize(x, recipe)
        made += [q.codes, q.scales, dequantize(q)]
        assert not shared([made[-1]], [q.codes, q.scales])
    return made, [x]


def of_writes_in_place(folder):
    """Inside, x.add_(y) writes into a copy; a constant from outside is as it was."""
    x = numbers(4)
    with Dynamic(Evictor(), lambda *_: 1):
        y = x * 1
        z = y.add_(x).sum()
    assert torch.equal(x, numbers(4)) and z.item() == 20
    return [numbers(4)], [x]


def of_a_snapshot(folder):
    pieces = [whole_piece("parameters/w", numbers(4))]
    snapshot = Snapshot("cpu")
    snapshot.begin(pieces)
    snapshot.copy()
    return [snapshot.memory], [pieces[0].values]


def of_a_runs_state(folder):
    """On a rank: whole parameters and states are copies, and so is what is loaded of them."""
    (found,) = launch.run(state_of_a_run, ranks=1)
    assert found == {"given": False, "taken": False, "pieces": True, "back": True}
    return [numbers(1)], [numbers(1)]


def state_of_a_run():
    frozen = ["layers.1.norm1.weight"]
    run = parallelize(small(), Strategy(), lambda params: AdamW(params, lr=1e-2), seed=3, frozen=frozen)
    rows = Rows(lambda step, rank, ranks: random_tokens(step, rank, ranks, 4, 8, 29, seed=5), 4, 8)
    run.step(run.batch(rows, 0), 1.0)

    def live():
        kept = [x for s in run.sync.optimizer.state.values() for x in s.values() if torch.is_tensor(x)]
        return [*run.model.parameters(), *kept]

    saved = run.state_dict()
    whole = [*saved["parameters"].values()]
    whole += [x for state in saved["optimizer"].values() for x in state.values() if torch.is_tensor(x)]
    whole += (states.full_tensor(run.sync, param) for param in run.model.parameters())
    found = {"given": shared(whole, live())}
    run.load_state_dict(saved)
    found["taken"] = shared(whole, live())
    held = [piece.values for piece in run.pieces() if not piece.name.startswith("random/")]
    found["pieces"] = all(shared([values], live()) for values in held)
    before = next(run.model.parameters()).detach().clone()
    for values in held:
        values.zero_()
    found["back"] = bool(before.any()) and not any(param.any() for param in run.model.parameters())
    return found


COPIES = [
    of_transfers, of_dispatched_rows, of_rows_by_token, of_layers_at_home, of_states_on_the_host,
    of_states_in_files, of_a_file_that_is_sent, of_what_is_given_to_files, of_nests, of_an_optimizers_states,
    of_codes, of_writes_in_place, of_a_snapshot, of_a_runs_state,
]  # fmt: skip


@pytest.mark.parametrize("make", COPIES, ids=lambda make: make.__name__)
def test_copies_share_no_memory(make, tmp_path: Path):
    made, origins = make(tmp_path)
    assert not shared(made, origins)
    before = [x.detach().clone() for x in origins]
    with torch.no_grad():
        for x in made:
            x.zero_()
    assert all(torch.equal(x, y) for x, y in zip(origins, before)) and any(x.any() for x in origins)


# ---- views -----------------------------------------------------------------------------------------------


def of_slices(folder):
    x = numbers(3, 4)
    return [experts.rows_at(x, None, slice(0, 2))], [x]


def of_blocks(folder):
    block, params = numbers(8), [nn.Parameter(numbers(3, 2)), nn.Parameter(numbers(2))]
    window.lie_in(block, params)
    return [*window.views(block, params), *(param.data for param in params)], [block]


def of_pieces(folder):
    """Whole, cut, a part of one, and what a rank is to write of it."""
    x = numbers(6, 4)
    piece = whole_piece("w", x)
    cut = list(pieces_of("w", x.view(-1)[5:13], x, 5, 13))
    return [
        piece.values,
        *(p.values for p in cut),
        part_of(piece, (1, 1), (2, 2)),
        share_out([piece])[0].values,
    ], [x]


def of_bytes(folder):
    x = numbers(3, 4)
    apart = torch.from_numpy(bytes_of(x.mT))  # in another order: "a copy only if it has to be"
    assert not shared([apart], [x])
    return [torch.from_numpy(bytes_of(x))], [x]


VIEWS = [of_slices, of_blocks, of_pieces, of_bytes]


@pytest.mark.parametrize("make", VIEWS, ids=lambda make: make.__name__)
def test_views_are_the_memory_itself(make, tmp_path: Path):
    made, (origin,) = make(tmp_path)
    for x in made:
        assert shared([x], [origin])
        origin.fill_(1.0)
        x.zero_()
        assert (origin == 0).sum() == x.view(torch.uint8).numel() // origin.element_size()


def test_the_control_tells_both():
    x = numbers(4)
    assert shared([x[2:]], [x[:1]]) and not shared([x.clone()], [x])
