"""Data parallelism in all its forms equals one process; without its collective each does not."""

import math

import pytest
import torch

from minitrain import collectives, launch
from minitrain.data_parallel import naive
from minitrain.data_parallel.bucketed import GradReducer
from minitrain.data_parallel.buckets import pack
from minitrain.model.gpt import GPT, cross_entropy_sum, presets
from minitrain.ranks.events import Issue
from minitrain.ranks.launch import dryrun
from minitrain.ranks.ledger import Ledger
from minitrain.systems.data_parallel.accumulation import LocalUpdates, ScatteredGradients
from minitrain.systems.data_parallel.negotiated import NegotiatedReducer
from minitrain.systems.data_parallel.parameter_server import Worker, serve
from tests.parallel import TOLERANCE, Problem, Traffic, difference, on_ranks, one_process, train_on_rank


class Naive:
    """The naive functions in the reducer's clothes, so that one harness tests all."""

    def __init__(self, params, group, fused=False):
        self.params, self.group, self.fused, self.enabled = params, group, fused, True

    def finish(self):
        naive.all_reduce_gradients(self.params, self.group, fused=self.fused)


class Silent(Naive):
    """The control: a reducer that reduces nothing."""

    def finish(self):
        pass


def fused(params, group):
    return Naive(params, group, fused=True)


def bucketed(params, group):
    return GradReducer(params, group, bucket_bytes=3000)


def negotiated(params, group):
    return NegotiatedReducer(params, group, fusion_bytes=3000, cycle=3)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("technique", [Naive, fused, bucketed, negotiated])
def test_equals_one_process(technique, ranks):
    problem = Problem()
    reference = one_process(problem)
    for outcome in on_ranks(problem, technique, ranks):
        assert difference(outcome, reference) < TOLERANCE


@pytest.mark.parametrize("ranks", [2, 4])
def test_without_the_reduction_it_does_not(ranks):
    problem = Problem()
    reference = one_process(problem)
    assert min(difference(outcome, reference) for outcome in on_ranks(problem, Silent, ranks)) > 1e-4


@pytest.mark.parametrize("microbatches", [1, 2, 3])
def test_accumulation_communicates_once(microbatches):
    """3 microbatches of 2 and of 1 sequences: still one batch, still one reduction."""

    def rank(problem):
        with Ledger() as ledger:
            outcome = train_on_rank(problem, bucketed)
        issued = [event for event in ledger.events if type(event) is Issue]
        return outcome, [event.op for event in issued if event.payload_bytes > 64]

    problem = Problem(microbatches=microbatches, batch_sizes=(12, 11))
    reference = one_process(problem)
    buckets = len(pack([p for p in problem.model().parameters() if p.requires_grad][::-1], 3000))
    for outcome, calls in launch.run(rank, problem, ranks=2):
        assert difference(outcome, reference) < TOLERANCE
        assert calls.count("all_reduce") == buckets * len(problem.batch_sizes)


def gradients_of(model, tokens, targets, count):
    (cross_entropy_sum(model(tokens), targets) / count).backward()


def test_pytorch_ddp():
    """The whole batch's gradients; 2(n-1)/n of their bytes; an all-reduce a bucket, begun in backward."""

    def linears(width):
        layers = (torch.nn.Linear(width, width, bias=False, dtype=torch.float64) for _ in range(8))
        return torch.nn.Sequential(*layers)

    def rank(bucket_bytes, width):
        group, model = collectives.world(), linears(width)
        reducer = GradReducer(model.parameters(), group, bucket_bytes)
        x = torch.ones(2, width, dtype=torch.float64) * (group.rank() + 1)
        with Ledger() as ledger:
            with ledger.phase("backward"):
                model(x).sum().backward()
            with ledger.phase("finish"):
                reducer.finish()
        phases = [event.phase for event in ledger.events if type(event) is Issue]
        return ledger.sent_bytes("all_reduce"), phases, [param.grad for param in model.parameters()]

    width, ranks = 16, 4
    size = 8 * width * width * 8
    torch.manual_seed(0)  # as every rank of a launch starts with
    model = linears(width)
    sum(model(torch.ones(2, width, dtype=torch.float64) * (r + 1)).sum() for r in range(ranks)).backward()
    for bucket_bytes in (size // 8, size // 4, size, 10 * size):
        for sent, phases, grads in launch.run(rank, bucket_bytes, width, ranks=ranks):
            assert sent == 2 * (ranks - 1) * size // ranks
            assert len(phases) == math.ceil(size / bucket_bytes) and set(phases) == {"backward"}
            for ours, theirs in zip(grads, model.parameters(), strict=True):
                assert (ours - theirs.grad).abs().max() < TOLERANCE
                assert theirs.grad.abs().max() > 1e-3  # else zeros would do


def test_horovod():
    """Ranks whose gradients become ready in different orders still issue one sequence of collectives; the
    result is DDP's, and gradients travel while backward goes on."""

    def rank():
        group = collectives.world()
        layers = torch.nn.ModuleList(torch.nn.Linear(4, 4, dtype=torch.float64) for _ in range(6))
        plain = [param.clone().detach().requires_grad_() for param in layers.parameters()]
        reducer = NegotiatedReducer(layers.parameters(), group, cycle=2)
        x = torch.full((1, 4), 1.0 + group.rank(), dtype=torch.float64)
        order = range(6) if group.rank() % 2 == 0 else reversed(range(6))
        with Ledger() as ledger:
            for index in order:  # six separate losses: this rank finishes them in its own order
                layers[index](x).square().sum().backward()
            with ledger.phase("finish"):
                reducer.finish()
        for index in range(6):
            torch.nn.functional.linear(x, plain[2 * index], plain[2 * index + 1]).square().sum().backward()
        naive.all_reduce_gradients(plain, group)
        pairs = zip(layers.parameters(), plain)
        worst = max((ours.grad - theirs.grad).abs().max().item() for ours, theirs in pairs)
        return reducer.sequence, worst, hidden_behind_products(ledger), ledger.payload_bytes()

    for ranks in (2, 4):
        results = launch.run(rank, ranks=ranks)
        assert all(found[0] == results[0][0] for found in results)
        assert sorted(results[0][0]) == list(range(12))
        for _, worst, (bits, gradients), payload in results:
            assert worst < TOLERANCE
            # Five of seven times bits travel behind products: not after the last gradient, nor in `finish`.
            # The orders meet in the middle: from then on all ranks have two more layers at each cycle.
            assert (bits, gradients) == (5, 1)
            assert payload == 7 * 12 * 4 + 6 * 20 * 8  # the bits of six cycles and of `finish`; the gradients


def hidden_behind_products(ledger):
    """How many all-reduces, of bits and of gradients, were under way while this rank multiplied."""
    under_way, hidden = {}, {48: 0, "gradients": 0}
    for event in ledger.events:
        match type(event).__name__:
            case "Issue":
                under_way[event.id] = [event.payload_bytes, False]
            case "Compute":
                for call in under_way.values():
                    call[1] = call[1] or event.flops > 0
            case "Wait":
                size, was_hidden = under_way.pop(event.id)
                hidden[48 if size == 48 else "gradients"] += was_hidden
    return tuple(hidden.values())


def test_reducing_in_order_of_readiness_without_negotiation_adds_up_different_tensors():
    def rank():
        group, grads = collectives.world(), [torch.full((2,), 1.0), torch.full((2,), 100.0)]
        order = (0, 1) if group.rank() == 0 else (1, 0)
        for index in order:
            collectives.all_reduce(grads[index], group, out=grads[index])
        return grads[0].tolist()

    assert launch.run(rank, ranks=2, checked=False) == [[101.0, 101.0], [101.0, 101.0]]  # 2.0 is right


def test_grad_accum_zero():
    """m microbatches equal one batch; all-reduce once, or m reduce-scatters when the gradient is sharded."""

    def rank(m):
        problem, group = Problem(batch_sizes=(12,)), collectives.world()
        model = problem.model()
        trainable = [param for param in model.parameters() if param.requires_grad]
        scattered = ScatteredGradients(trainable, group)
        tokens, targets = problem.batch(0, group.rank(), group.size())
        with Traffic() as ledger:
            for part, goal in zip(tokens.chunk(m), targets.chunk(m)):
                gradients_of(model, part, goal, 60)
                scattered.add()
        whole = problem.model()
        gradients_of(whole, *problem.batch(0), 60)
        flat = torch.cat([p.grad.reshape(-1) for p in whole.parameters() if p.requires_grad])
        flat = torch.cat([flat, flat.new_zeros(-flat.numel() % group.size())])
        worst = (scattered.shard - flat.chunk(group.size())[group.rank()]).abs().max().item()
        return worst, ledger.sent_bytes("reduce_scatter"), flat.numel() * 8

    for ranks in (2, 4):
        for m in (1, 3):
            for worst, sent, gradient_bytes in launch.run(rank, m, ranks=ranks):
                assert worst < TOLERANCE and sent == m * (ranks - 1) * gradient_bytes // ranks


def test_temporary_buffers():
    """What summing needs beside the gradients: a fused fp32 buffer of a model of 1.5 billion parameters is a
    second copy of 6 GB, packs are copies of one pack, and buckets that are the gradients need one incoming
    gradient. Dry, one rank of 64; receive buffers apart."""
    bucket = 50_000_000

    def rank(way):
        model, group = GPT(presets["gpt2-xl"]), collectives.world()
        params = list(model.parameters())
        if way != "fused":  # a bucket holds any matrix of a block; the table of words is larger
            params = [param for param in params if param.nbytes <= bucket]
        with Ledger() as ledger:
            reducer = GradReducer(params, group, bucket) if way == "buckets" else None
            for param in reversed(params):
                param.grad = torch.zeros_like(param)
                if reducer:
                    reducer._on_ready(param)
            if reducer:
                reducer.finish()
            for packed in pack(params, bucket) if way == "packs" else [params] * (way == "fused"):
                naive.all_reduce_gradients(packed, group, fused=True)
        copies = max(live["activations"] for _, live in ledger.timeline())  # neither grads nor received
        packs = [sum(p.nbytes for p in some) for some in pack(params, bucket)]
        return copies, [param.nbytes for param in params], packs

    copy_bytes, sizes, _ = dryrun.run(rank, "fused", ranks=64)
    assert copy_bytes == sum(sizes) and 6.0e9 < copy_bytes < 6.5e9
    copy_bytes, _, packs = dryrun.run(rank, "packs", ranks=64)
    assert copy_bytes == max(packs) <= bucket
    copy_bytes, sizes, _ = dryrun.run(rank, "buckets", ranks=64)
    assert copy_bytes == max(sizes) <= bucket


def quadratic(w, x):
    return ((w * x).sum() - 1) ** 2


def drawn(seed, *shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def serial_stale(start, data, lr, staleness):
    """w[t+1] = w[t] - lr · sum over workers of g_worker(w[t-d]): one process that keeps old weights."""
    history = [start]
    for step in range(len(data[0])):
        w = history[max(0, step - staleness)].clone().requires_grad_()
        sum(quadratic(w, worker[step]) for worker in data).backward()
        history.append(history[-1] - lr * w.grad)
    return history[-1]


@pytest.mark.parametrize("ranks,servers,staleness", [(4, 2, 0), (4, 1, 1), (3, 1, 2)])
def test_parameter_server_equals_its_serial_text(ranks, servers, staleness):
    worst = max(result[0] for result in launch.run(server_run, servers, staleness, ranks=ranks))
    assert worst < TOLERANCE


def server_run(servers, staleness, steps=5, lr=0.05):
    group = collectives.world()
    data = [drawn(worker, steps, 7) for worker in range(group.size() - servers)]
    start = torch.linspace(-1, 1, 7, dtype=torch.float64)
    params = [torch.nn.Parameter(start[:3].clone()), torch.nn.Parameter(start[3:].clone())]
    expected = serial_stale(start, data, lr, staleness)
    with Traffic() as ledger:
        if group.rank() < servers:
            sgd = lambda params: torch.optim.SGD(params, lr=lr)  # noqa: E731
            mine = serve(params, sgd, steps, group, servers=servers, staleness=staleness)
            error = (mine - expected.tensor_split(servers)[group.rank()]).abs().max().item()
        else:
            worker = Worker(params, group, servers=servers, staleness=staleness)
            for step in range(steps):
                for param in params:
                    param.grad = None
                quadratic(torch.cat(params), data[group.rank() - servers][step]).backward()
                worker.push_pull()
            worker.finish()
            error = (torch.cat(params) - expected).abs().max().item()
    return error, ledger.sent_bytes("send")


def test_parameter_server():
    """Synchronous, it is all-reduce SGD; a server gets nS and gives nS, a ring's rank sends 2(n-1)/n S."""
    steps, size = 5, 7 * 8
    for ranks in (2, 4):
        results, workers = launch.run(server_run, 1, 0, ranks=ranks), ranks - 1
        assert results[0][1] == steps * workers * size  # out of the server; the workers put in as much
        assert sum(sent for _, sent in results[1:]) == steps * workers * size
        assert max(error for error, _ in results) < TOLERANCE

    def by_all_reduce():
        group, lr, size = collectives.world(), 0.05, 12  # divides by the ranks
        data = [drawn(worker, steps, size) for worker in range(group.size())]
        start = torch.linspace(-1, 1, size, dtype=torch.float64)
        w = torch.nn.Parameter(start.clone())
        with Traffic() as ledger:
            for step in range(steps):
                w.grad = None
                quadratic(w, data[group.rank()][step]).backward()
                naive.all_reduce_gradients([w], group)
                torch.optim.SGD([w], lr=lr).step()
        error = (w - serial_stale(start, data, lr, 0)).abs().max().item()
        return error, ledger.sent_bytes() / (steps * size * 8)

    for workers in (3, 4):
        for error, shares in launch.run(by_all_reduce, ranks=workers):
            assert error < TOLERANCE and shares == 2 * (workers - 1) / workers  # of S, out of every rank


def test_local_updates_every_step_is_data_parallel_sgd_and_every_fourth_is_not():
    def rank(every):
        group = collectives.world()
        w = torch.nn.Parameter(torch.linspace(-1, 1, 5, dtype=torch.float64))
        alone, local = w.detach().clone().requires_grad_(), LocalUpdates([w], group, every)
        with Ledger() as ledger:
            for step in range(4):
                x = drawn(10 * step + group.rank(), 5)
                for weight in (w, alone):
                    weight.grad = None
                    quadratic(weight, x).backward()
                alone.grad = collectives.all_reduce(alone.grad, group) / group.size()
                for weight in (w, alone):
                    weight.data -= 0.05 * weight.grad
                averaged = local.after_step()
        return (w - alone).abs().max().item(), averaged, ledger.payload_bytes("all_reduce") - 4 * 40

    for ranks in (2, 4):
        for worst, _, sent in launch.run(rank, 1, ranks=ranks):
            assert worst < TOLERANCE and sent == 4 * 40
        for worst, averaged, sent in launch.run(rank, 4, ranks=ranks):
            assert worst > 1e-4 and sent == 40 and averaged


def test_buckets_come_in_the_order_in_which_they_fill():
    """A small parameter of another key, complete first, whose bucket fills last, holds up nobody."""
    weights = [torch.nn.Parameter(torch.zeros(size)) for size in (1, 8, 8, 8, 1)]
    place = {param: number for number, param in enumerate(weights)}
    buckets = pack(weights, bucket_bytes=8 * 4, key=len)
    assert [[place[param] for param in bucket] for bucket in buckets] == [[1], [2], [3], [0, 4]]
