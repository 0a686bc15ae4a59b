"""What docstrings promise to live at once, by the account of dry runs (where numbers decide, of real ones).

The model has layers of one matrix each, M bytes, and a batch of one row: what is not a matrix is small, and is
counted in rows. Every step is taken twice, so that what the first leaves behind would show in the second.
"""

import torch
from torch import nn

from minitrain import collectives, launch
from minitrain.data_parallel import states
from minitrain.data_parallel.bucketed import GradReducer
from minitrain.data_parallel.naive import all_reduce_gradients
from minitrain.data_parallel.replicated import Replicated
from minitrain.data_parallel.zero1 import Zero1
from minitrain.data_parallel.zero2 import Zero2
from minitrain.data_parallel.zero3 import Zero3
from minitrain.model.training.optim import AdamW
from minitrain.ranks.launch import dryrun
from minitrain.ranks.ledger import Ledger
from minitrain.systems.data_parallel import parameter_server
from minitrain.systems.data_parallel.accumulation import LocalUpdates, ScatteredGradients
from minitrain.systems.data_parallel.negotiated import NegotiatedReducer, broadcast_parameters

LAYERS, WIDTH, RANKS = 8, 64, 4
M, ROW = WIDTH * WIDTH * 8, WIDTH * 8


def layers():
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64) for _ in range(LAYERS)))


def row():
    return torch.ones(1, WIDTH, dtype=torch.float64)


def sgd(shards):
    return torch.optim.SGD(shards, lr=0.1)


def in_matrices(make):
    """Of two steps: {kind: most of it at once}, {kind: what is left}, the peak of all; rows are dropped."""

    def rank():
        model = layers()
        reducer = make(model, collectives.world(), sgd)
        with Ledger() as ledger:
            for _ in range(2):
                getattr(reducer, "zero_grad", model.zero_grad)()
                model(row()).sum().backward()
                reducer.finish()
                getattr(reducer, "step", list)()
        timeline, live = ledger.timeline(gathered=True), ledger.live_by_kind
        most = {kind: max(at[kind] for _, at in timeline) for kind in timeline[0][1]}
        return most, live, ledger.peak_bytes

    most, live, peak = dryrun.run(rank, ranks=RANKS)
    return {kind: matrices(size) for kind, size in most.items()}, live, matrices(peak)


def matrices(size):
    """In M, without the rows: at most 16 of them."""
    assert size % M % (M // RANKS) <= 16 * ROW, size
    return size // (M // RANKS) / RANKS


# ---- gradients on their way ------------------------------------------------------------------------------


def test_buckets_are_the_gradients():
    """Beside them one that comes in and, on the two lanes of sums in the background, what is received."""
    share = (RANKS - 1) / RANKS
    for make in (
        lambda model, group, _: GradReducer(model.parameters(), group, M),
        lambda *all: Zero1(*all, M),
    ):
        most, live, peak = in_matrices(make)
        assert most["gradients"] == LAYERS + 1 and live["gradients"] == LAYERS * M
        assert most["activations"] == 0 and most["buffers"] == 2 * share
        assert peak == LAYERS + LAYERS + 1 + 2 * share


def test_zero_2_holds_its_part_a_bucket_that_fills_and_one_on_its_way():
    """While the last bucket is filled: all but two parts, the bucket but one packed, received and summed."""
    received, part = (RANKS - 1) / RANKS, 1 / RANKS
    most, live, peak = in_matrices(lambda *all: Zero2(*all, M))
    assert live["gradients"] == LAYERS * M // RANKS and most["gradients"] == 1 + (LAYERS - 1) * part
    assert most["activations"] == 1 and most["buffers"] == received
    assert peak == LAYERS + (LAYERS - 2) * part + (1 + received + part) + 1


def test_zero_3_holds_two_units_and_two_gradients():
    """One unit in use and one on its way, of gradients one that is made and one that is being scattered."""
    received, part = (RANKS - 1) / RANKS, 1 / RANKS
    for ahead in (False, True):
        most, live, peak = in_matrices(lambda *all: Zero3(*all, prefetch=ahead))
        assert most["gathered parameters"] == 1 + ahead and live["buffers"] == 0
        assert most["parameters"] == live["parameters"] / M == LAYERS * part
        assert most["activations"] == 0 and most["gradients"] == 1 + (LAYERS - 1) * part
        assert most["buffers"] == 1 + (1 + received)


def test_evaluation_leaves_nothing_whole():
    """Also where training would keep parameters whole until backward."""

    def rank(later):
        model = layers()
        Zero3(model, collectives.world(), sgd, reshard=not later)
        with Ledger() as ledger, torch.no_grad():
            for _ in range(2):
                model(row())
        return max(live["gathered parameters"] for _, live in ledger.timeline(gathered=True)), ledger

    for later in (False, True):
        most, ledger = dryrun.run(rank, later, ranks=RANKS)
        assert most == 2 * M and ledger.live_by_kind["buffers"] == 0
        assert ledger.num_calls("all_gather") == 2 * LAYERS


# ---- states that are loaded ------------------------------------------------------------------------------


def replicated(*args):
    return Replicated(*args, M)


STAGES = {
    replicated: 1,  # which part of a parameter a rank has
    lambda *all: Zero1(*all, M): RANKS,
    lambda *all: Zero2(*all, M): RANKS,
    Zero3: RANKS,
}


def started(make):
    """One step of AdamW, and what reads all that is kept, so that a ledger knows it."""
    model = layers()
    zero = make(model, collectives.world(), lambda shards: AdamW(shards, lr=0.1))
    model(row()).sum().backward()
    zero.finish()
    zero.step()
    zero.zero_grad()

    def read(full):
        for state in (
            full["parameters"],
            *full["optimizer"].values(),
            *(states.state_of(zero, one) for one in zero.shards),
        ):
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    value.sum()
        for one in zero.shards:
            one.shard.sum()

    return zero, read


def saved_whole(full):
    parameters = {f"parameters/{name}": whole for name, whole in full["parameters"].items()}
    return states.WholeTensors(parameters, full["optimizer"])


def test_states_are_loaded_one_after_the_other():
    """Beside the old states of all live the new ones of one. Before, where names and shapes are compared, it is
    tensors without memory, which a ledger counts: of one, and the last of the one before."""

    def rank(make):
        zero, read = started(make)
        full = states.full_state_dict(zero)
        peaks = []
        for load in (
            lambda: states.load_pieces(zero, saved_whole(full)),
            lambda: states.load_full_state_dict(zero, full),
        ):
            with Ledger() as ledger:
                read(full)
                before = ledger.live_bytes
                load()
            assert ledger.live_bytes == before
            peaks.append(ledger.peak_bytes - before)
        pieces = states.pieces_to_load(zero, saved_whole(full))
        return peaks, [piece.values.device.type for piece in pieces if piece.name.startswith("optimizer/")]

    for make, parts in STAGES.items():
        (alone, checked), devices = dryrun.run(rank, make, ranks=RANKS)
        assert alone == 2 * M // parts and checked <= 3 * M // parts and devices == ["meta"] * 2 * LAYERS


# ---- ways with a memory of their own ---------------------------------------------------------------------


def beside_parameters(work):
    """Of a model whose parameters are not counted, (live bytes after each step that work(model) yields, peak)."""
    model, live = layers(), []
    with Ledger() as ledger:
        for param in model.parameters():
            param.sum()
        before = ledger.live_bytes
        for _ in work(model):
            live.append(matrices(ledger.live_bytes - before))
    return live, matrices(ledger.peak_bytes - before)


def backward(model):
    model.zero_grad()
    model(row()).sum().backward()


def test_a_fused_sum_is_one_more_copy_and_what_is_received():
    def work(model):
        backward(model)
        all_reduce_gradients(model.parameters(), collectives.world(), fused=True)
        yield

    live, peak = dryrun.run(beside_parameters, work, ranks=RANKS)
    assert live == [LAYERS] and peak == LAYERS * (1 + 1 + (RANKS - 1) / RANKS)


def test_scattered_gradients_are_whole_until_they_are_added():
    def work(model):
        scattered = ScatteredGradients(model.parameters(), collectives.world())
        for _ in range(2):
            backward(model)
            yield
            scattered.add()
            yield

    live, peak = dryrun.run(beside_parameters, work, ranks=RANKS)
    part = LAYERS / RANKS
    assert live == [LAYERS, part, LAYERS + part, part]
    assert (
        peak == part + 2 * LAYERS
    )  # the sum so far, and gradients packed; those go before others are received


def test_two_copies_are_broadcast():
    def work(model):
        broadcast_parameters(model, collectives.world())
        yield

    for rank in (0, 1):
        assert dryrun.run(beside_parameters, work, rank=rank, ranks=RANKS) == ([0], 2 * LAYERS)


def test_local_updates_need_a_sum_and_what_is_received_of_one_parameter():
    def work(model):
        updates = LocalUpdates(model.parameters(), collectives.world(), 1)
        for _ in range(2):
            updates.after_step()
            yield

    assert dryrun.run(beside_parameters, work, ranks=RANKS) == ([0, 0], 1 + (RANKS - 1) / RANKS)


def test_one_fusion_buffer_is_under_way():
    """And what is received: of its sum, of two ranks, half. Bits are small."""

    def rank():
        def work(model):
            reducer = NegotiatedReducer(model.parameters(), collectives.world(), 2 * M, cycle=4)
            for _ in range(2):
                backward(model)
                reducer.finish()
                yield

        return beside_parameters(work)

    for live, peak in launch.run(rank, ranks=2):
        assert live == [LAYERS, LAYERS] and peak == LAYERS + 2 + 2 / 2


def test_a_server_holds_its_slice_and_a_worker_what_is_under_way():
    """A server: weights, the sum of gradients and one push, each LAYERS / servers. A worker: gradients and
    `staleness` answers, and to push and pull the gradients, an answer and the weights they make once more."""

    def serve(servers):
        def work(model):
            parameter_server.serve(model.parameters(), sgd, 3, collectives.world(), servers=servers)
            yield

        return beside_parameters(work)[1]

    def train(servers, staleness):
        def work(model):
            worker = parameter_server.Worker(
                model.parameters(), collectives.world(), servers=servers, staleness=staleness
            )
            for _ in range(4):
                backward(model)
                worker.push_pull()
                yield
            worker.finish()
            yield

        return beside_parameters(work)

    assert dryrun.run(serve, 1, rank=0, ranks=RANKS) == 3 * LAYERS
    assert dryrun.run(serve, 2, rank=1, ranks=RANKS) == LAYERS + LAYERS / 2  # while it takes its slice of all
    for servers in (1, 2):
        for d in (0, 1, 2):
            live, peak = dryrun.run(train, servers, d, rank=3, ranks=RANKS)
            assert live[-2:] == [(1 + d) * LAYERS, LAYERS] and peak == (1 + d + 3) * LAYERS


# ---- collectives -----------------------------------------------------------------------------------------


def test_a_call_holds_its_result_and_where_it_adds_what_it_receives():
    """In sizes of x, beside x. Along another dim than the first x is copied, and what comes is turned."""
    received, n = (RANKS - 1) / RANKS, RANKS
    first = dict(all_reduce=(1 + received, 1), all_gather=(n, n), reduce_scatter=(1 / n + received, 1 / n))
    first |= dict.fromkeys(("all_to_all", "broadcast", "rotate"), (1, 1))
    turned = dict(all_gather=(1 + n + n, n), reduce_scatter=(1 + 2 / n + received, 1 / n), all_to_all=(3, 1))

    def rank(op, in_background, *args):
        x, call = torch.ones(n, n, dtype=torch.float64), getattr(collectives, op)
        with Ledger() as ledger:
            x.sum()
            before = ledger.live_bytes
            y = call(x, *args[: op == "broadcast"], collectives.world(), *args[1:], async_op=in_background)
            y = y.wait() if in_background else y
            live = ledger.live_bytes - before
            del y
        return (ledger.peak_bytes - before) / x.nbytes, live / x.nbytes

    for in_background in (False, True):
        for op, expected in first.items():
            assert dryrun.run(rank, op, in_background, 0, ranks=n) == expected, op
        for op, expected in turned.items():
            assert dryrun.run(rank, op, in_background, 0, 1, ranks=n) == expected, op
