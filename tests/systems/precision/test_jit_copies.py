"""Copies just in time: the bits of stored copies, 2 bytes per parameter less, and nothing of a copy is kept."""

import torch

from minitrain import collectives, launch
from minitrain.compose.parallelize import parallelize
from minitrain.pipeline.deferred import Deferred
from minitrain.plan.strategy import Strategy
from minitrain.precision.policies import POLICIES
from minitrain.ranks.ledger import Ledger
from minitrain.systems.precision.jit_copies import make_copies
from tests.parallel import Traffic, check_refusals, small
from tests.precision.training import rows, same, started

LAYOUTS = [Strategy(dp=2, zero=zero, bucket_bytes=3000) for zero in (1, 2, 3)]
LAYOUTS += [Strategy(), Strategy(dp=2, microbatches=2), Strategy(tp=2), Strategy(cp=2)]
LAYOUTS += [
    Strategy(dp=2, zero="IGG", node=2),
    Strategy(tp=2, sequence_parallel=True, overlap=True),
    Strategy(pp=2, microbatches=2, schedule="zb_h1"),
    Strategy(pp=2, microbatches=2, recompute="stage"),
    Strategy(pp=4, microbatches=4, schedule="bpipe"),
]


def start(strategy, precision, config=None):
    return started(strategy, config or small(num_layers=2, tied=True, dropout=0.1), precision)


def test_jit_q():
    """The same losses, norms and masters as with stored copies, to the bit, in every layout; and of what is
    held between steps 2 bytes per parameter less."""

    def rank():
        wrong = []
        for strategy in [s for s in LAYOUTS if s.ranks == collectives.world().size()]:
            found, held = [], []
            for precision in ("bfloat16", "bfloat16_jit"):
                run = start(strategy, precision, small(num_layers=4 if strategy.pp == 4 else 2))
                results = [run.step(run.batch(rows(), number), 0.3) for number in range(2)]
                states = [
                    x for s in run.sync.optimizer.state.values() for x in s.values() if torch.is_tensor(x)
                ]
                held.append(sum(x.nbytes for x in [*run.model.parameters(), *states] if x.dim()))
                state = run.state_dict()
                masters = {name: states.get("master") for name, states in state["optimizer"].items()}
                numbers = [(float(result.loss), float(result.norm)) for result in results]
                evaluated = float(run.evaluate(run.batch(rows(), 2)))
                found.append((numbers, evaluated, masters, state["parameters"]))
            stored, jit = found
            if stored[:2] != jit[:2] or not same(stored[2], jit[3]):
                wrong.append(str(strategy))
            if not strategy.zero and held[0] - held[1] != 2 * sum(p.numel() for p in run.model.parameters()):
                wrong.append(f"{strategy} holds {held}")
        return wrong

    for ranks in (1, 2, 4):
        assert launch.run(rank, ranks=ranks) == [[]] * ranks
    assert POLICIES["bfloat16"].bytes_per_parameter - POLICIES["bfloat16_jit"].bytes_per_parameter == 2
    nothing_of_a_copy_is_kept_from_forward_to_backward()


def test_gathered_weights_are_as_wide_as_they_are_kept():
    """ZeRO gathers what it keeps: twice the bytes of copies; gradients travel as they do without."""

    def rank():
        found = []
        for zero in (1, 3):
            for precision in ("bfloat16", "bfloat16_jit"):
                run = start(Strategy(dp=2, zero=zero), precision)
                batch = run.batch(rows(), 0)
                with Traffic() as ledger:
                    run.step(batch)
                found.append([ledger.sent_bytes(op) for op in ("all_gather", "reduce_scatter")])
        return found

    for one, one_jit, three, three_jit in launch.run(rank, ranks=2):
        assert one_jit == [2 * one[0], one[1]] and three_jit == [2 * three[0], three[1]] and one[0] > 0


def nothing_of_a_copy_is_kept_from_forward_to_backward():
    """By kind, the ledger of a step has the activations of the stored copy, and at no moment more copies
    than of one layer. Control: copies that autograd may keep."""

    def rank():
        found = {}
        for name in ("bfloat16", "bfloat16_jit", "kept"):
            run = start(Strategy(), "bfloat16" if name == "bfloat16" else "bfloat16_jit")
            run.step(run.batch(rows(), 0))
            batch = run.batch(rows(), 1)
            if name == "kept":
                for layer in run.model.layers:
                    keeps_copies(layer)
            run.sync.zero_grad()
            run.sync.enabled = False  # nothing is sent
            with Ledger() as ledger:
                loss = run.loss_fn(run.model(batch.tokens), batch.targets)
                between = dict(ledger.live_by_kind)
                loss.backward()
            found[name] = between, max(live["buffers"] for _, live in ledger.timeline())
        layers = [sum(p.numel() for p in layer.parameters()) for layer in run.model.layers]
        return found, sum(p.numel() for p in run.model.parameters()), max(layers)

    ((found, numel, largest),) = launch.run(rank, ranks=1)
    stored, jit, kept = (found[name] for name in ("bfloat16", "bfloat16_jit", "kept"))
    assert jit[0]["activations"] == stored[0]["activations"] and jit[0]["buffers"] == 0
    assert jit[0]["parameters"] == 4 * numel == 2 * stored[0]["parameters"]
    assert jit[1] == 2 * largest and stored[1] == 0
    assert kept[0]["activations"] + kept[0]["buffers"] > stored[0]["activations"] + numel


def keeps_copies(layer):
    """As a cast in the layer would: autograd saves what the product was computed with."""
    inner = type(layer).forward
    layer._forward_hooks.clear(), layer._forward_pre_hooks.clear()
    params = [(m, name, p) for m in layer.modules() for name, p in m.named_parameters(recurse=False)]

    def forward(*args):
        for module, name, param in params:
            module.__dict__[name] = param.bfloat16()
        try:
            return inner(layer, *args)
        finally:
            for module, name, _ in params:
                del module.__dict__[name]

    layer.forward = forward


def test_products_of_copies_can_be_put_off():
    """The half of a backward that zero bubble schedules fill bubbles with is as large as without copies."""
    put_off = {}
    for name in ("plain", "copied"):
        torch.manual_seed(0)
        layer = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 6)).bfloat16()
        if name == "copied":
            for param in layer.parameters():
                param.data, param.grad_dtype = param.data.float(), torch.bfloat16
            make_copies([layer], lambda param: param.detach().bfloat16())
        x = torch.randn(5, 6, dtype=torch.bfloat16, requires_grad=True)
        with Deferred() as later:
            layer(x).sum().backward()
        before = [param.grad for param in layer.parameters()]
        products = len(later.products)
        later.weights()
        put_off[name] = before, products, x.grad, [param.grad for param in layer.parameters()]
    assert put_off["plain"][:2] == put_off["copied"][:2] == ([None] * 4, 2)
    assert torch.equal(put_off["plain"][2], put_off["copied"][2])
    for grad, other in zip(put_off["plain"][3], put_off["copied"][3]):
        assert torch.equal(grad, other) and other.dtype == torch.bfloat16


def test_a_part_of_a_copy_comes_back_from_its_place_and_hooks_around_see_what_else_is_saved():
    class Lower(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(4, 3))

        def forward(self, x):
            return (x @ self.weight[2:].T).sin()

    layer, seen = Lower(), []
    plain = torch.randn(5, 3, dtype=torch.bfloat16, requires_grad=True)
    (plain @ layer.weight.detach().bfloat16()[2:].T).sin().sum().backward()
    make_copies([layer], lambda param: param.detach().bfloat16())
    layer.weight.grad_dtype = torch.bfloat16
    x = plain.detach().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (seen.append(list(t.shape)), t)[1], lambda t: t):
        y = layer(x)
    y.sum().backward()
    assert torch.equal(x.grad, plain.grad)
    assert [5, 2] in seen and [3, 2] not in seen, "what sin saves, and nothing of the copy"


def test_a_module_of_ones_own_is_refused():
    def call():
        parallelize(torch.nn.Linear(2, 2), Strategy(precision="bfloat16_jit"))

    check_refusals({"a module of your own gets dp and ZeRO": call}, ranks=1)
