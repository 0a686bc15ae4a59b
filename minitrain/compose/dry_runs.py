"""Dry runs: the work of a layer, for predictions, and the account of a whole step, for replays.

    work = work_of(presets["llama3-8b"], Strategy(tp=8, sequence_parallel=True), microbatch=1, length=8192)
    ledgers = dry_steps(presets["llama3-8b"], Strategy(dp=8, pp=4, tp=2, ..), Hyperparameters(..))
    timeline = replay({rank: ledger.events for rank, ledger in ledgers.items()}, machine("h100"))

`work_of` is what plan/predict asks for. One embedding, one block of each kind and one head go through
`parallelize` and two microbatches as one rank of tp · cp · ep ranks, which add to gradients that are there
and send none: one with whole backwards, one with W apart, for all schedules. (One more goes before where
layers remember the last: routers their loads, low-bit products their scales.) Hooks on outputs say where in
the ledger's events a layer begins. A quarter of a second each, kept in memory: a few dozen serve thousands of
candidates. Differs from a run of the whole: dropout draws from torch's own kernel, as in the stacks that are
compared, and a fused attention draws its mask again (not with `fused_attention=False`, attention of 2021).
"""

from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import gcd
from operator import attrgetter

import torch

from minitrain.compose.parallelize import parallelize
from minitrain.compose.run import make_states
from minitrain.memory.host_optimizer import fused_adamw
from minitrain.model.config import GPTConfig
from minitrain.model.data.batches import Rows, random_tokens
from minitrain.model.layers import Dropout, naive_attention
from minitrain.model.mixture import mixtures
from minitrain.model.training.hyperparameters import Hyperparameters
from minitrain.pipeline.deferred import Deferred
from minitrain.plan.predict.predicted_pipeline import splits
from minitrain.plan.predict.work import Collective, Layer, Operator, Pass, Work
from minitrain.plan.strategy import Strategy
from minitrain.ranks.events import Compute, Issue, Wait
from minitrain.ranks.launch import dryrun
from minitrain.ranks.ledger import Ledger
from minitrain.ranks.torch_private import in_backward
from minitrain.systems.moe.two_level import scattered

MATTERS = "tp cp ep ep_node ep_chunks ep_travel ep_shadow sequence_parallel overlap recompute".split()
MATTERS += "recompute_partition core layout inner ulysses precision products".split()
GRADIENT = ("_to_copy", "add_", "copy_")  # what converts a weight's gradient and adds it to the others
_what_matters = attrgetter(*MATTERS)
_measured: dict[tuple, tuple[Work, Work]] = {}


def work_of(
    config: GPTConfig, strategy: Strategy, microbatch: int, length: int, fused_attention: bool = True
) -> Work:
    """Of `microbatch` rows of `length` tokens on a rank of `strategy`; asked again, the same object."""
    sizes = microbatch, length, fused_attention
    if (key := (config, _what_matters(strategy), *sizes)) not in _measured:
        _measured[key] = measure(config, strategy, *sizes)
    return _measured[key][splits(strategy.schedule)]


def known(config: GPTConfig, strategy: Strategy, *sizes: int) -> bool:
    return (config, _what_matters(strategy), *sizes, *(() if len(sizes) > 2 else (True,))) in _measured


def measure(config: GPTConfig, strategy: Strategy, microbatch, length, fused_attention) -> tuple[Work, Work]:
    """A dry run of one block of each kind: (with whole backwards, with W apart)."""
    kinds = {bool(config.experts_in(number)) for number in range(1, config.num_layers + 1)}
    settings = {name: getattr(strategy, name) for name in MATTERS}
    settings["recompute"] = {"stage": "none", "sqrt": "full"}.get(strategy.recompute, strategy.recompute)
    remembers, works = config.experts or strategy.products != "plain", []
    for routed in sorted(kinds, reverse=True):
        sizes = settings | dict(dp=strategy.ep // gcd(strategy.ep, strategy.cp))
        if not routed:  # a dense block knows no ep
            sizes = {name: value for name, value in settings.items() if not name.startswith("ep")}
        one_rank = Strategy(**sizes, microbatches=2 if remembers else 1)
        experts = replace(config.experts, dense_first=0, expert_every=1, pyramid_layers=0) if routed else None
        alone = replace(config, num_layers=1, experts=experts, dropout=0.0)
        ask = alone, one_rank, microbatch, length, config.dropout, fused_attention
        works.append(dryrun.run(_two_microbatches, *ask, ranks=one_rank.ranks))
    mixed = (replace(routed, dense=dense.block) for routed, dense in zip(works[0], works[-1]))
    return works[0] if len(works) == 1 else tuple(mixed)


def _two_microbatches(config, strategy, microbatch, length, dropout, fused_attention) -> tuple[Work, Work]:
    run = parallelize(config, strategy)
    for part in run.model.modules():
        if isinstance(part, Dropout):
            part.p = dropout
        if hasattr(part, "core") and strategy.cp == 1:  # cores over ranks draw no masks without places
            in_core = 0.0 if fused_attention else dropout  # a kernel keeps no mask
            part.config = replace(config, dropout=in_core)
            part.core = part.core if fused_attention else naive_attention
    shape = dict(batch_size=strategy.microbatches * microbatch * strategy.dp, length=length)
    for reducer in getattr(run.sync, "reducers", ()):
        reducer.close()  # no gradient travels at the end
    for param in run.sync.trainable:
        param.grad = torch.zeros_like(param, dtype=param.grad_dtype)
    run.sync.on_microbatch_grads(run.sync.trainable)  # they are there already
    with Ledger() as ledger:
        batch = run.batch(Rows(partial(random_tokens, vocab=config.vocab_size, **shape), **shape), step=0)
        marks = _Marks(ledger, run.model.layers)
        run.forward_backward(batch)
        later = _weights_later(run, batch, microbatch, ledger, marks)
        marks.add("end", 0)
    at_once, last = [(Pass(), 0)] * len(run.model.layers), strategy.microbatches - 1
    return _work(run, ledger, marks, last, at_once), _work(run, ledger, marks, last + 1, later)


class _Marks:
    """Where in the events, and with how many bytes alive, each pass through a layer begins."""

    def __init__(self, ledger: Ledger, layers) -> None:
        self.ledger, self.marks, self.forward = ledger, [], True
        for number, layer in enumerate(layers):
            layer.register_forward_pre_hook(partial(self.begin_forward, number))
            layer.register_forward_hook(partial(self.end_forward, number))

    def add(self, direction: str, number: int) -> None:
        live = self.ledger.live_by_kind
        self.marks.append((direction, number, len(self.ledger.events), live["activations"] + live["buffers"]))

    def begin_forward(self, number: int, layer, inputs) -> None:
        self.forward = self.forward or number == 0  # of the next microbatch
        if self.forward:  # else it runs again for a backward: part of that
            self.add("forward", number)

    def end_forward(self, number: int, layer, inputs, y) -> None:
        if self.forward:
            if number == 0:
                self.boundary_bytes = y.nbytes
            y.register_hook(partial(self.begin_backward, number))

    def begin_backward(self, number: int, gradient) -> None:
        self.forward = False
        self.add("backward", number)


def _weights_later(run, batch, microbatch: int, ledger: Ledger, marks: _Marks) -> list[tuple[Pass, int]]:
    """A microbatch whose W is apart: the products of each layer's, and the bytes that wait for them."""
    tokens, targets = batch.tokens[:microbatch], batch.targets[:microbatch]
    with Deferred() as later:
        loss = run.loss_fn(run.model(tokens, batch.positions), targets) / batch.num_valid
    loss.backward()
    marks.add("end", 0)
    every, passes = [*later.products], []
    later.products.clear()
    for layer in run.model.layers:
        own = {id(param) for param in layer.parameters()}
        later.products += [product for product in every if id(product[0]) in own]
        every = [product for product in every if id(product[0]) not in own]  # what is done is let go
        start, waiting = len(ledger.events), ledger.live_by_kind["activations"]
        later.weights()
        waiting -= ledger.live_by_kind["activations"]
        passes.append((_pass(ledger.events[start:], weights=_gradients(layer)), waiting))
    return passes


def _gradients(layer) -> frozenset[int]:
    matrices = [param for param in layer.parameters() if param.dim() > 1]
    return frozenset(param.numel() * param.grad_dtype.itemsize for param in matrices)


def _work(run, ledger: Ledger, all_marks: _Marks, microbatch: int, later: list[tuple[Pass, int]]) -> Work:
    events, each = ledger.events, 2 * len(run.model.layers)
    marks = all_marks.marks[microbatch * each : (microbatch + 1) * each + 1]  # and where the next begins
    alive = {index: live["activations"] + live["buffers"] for index, live in ledger.timeline()}
    *_, head = range(len(run.model.layers))
    after = range(marks[head][2], len(events))
    seed = next(i for i in after if getattr(events[i], "name", "") == "ones_like")
    ways: dict[tuple[str, int], Pass] = {}
    kept, before = {}, {}  # by layer: bytes left for backward; alive when its forward begins
    for (way, number, start, live), (_, _, end, next_live) in pairwise(marks):
        most = lambda start, end: max((alive[i] for i in range(start, end) if i in alive), default=live)
        if way == "forward":
            before[number], kept[number] = live, next_live - live
            if number == head:  # and the loss, whose backward begins with a one
                kept[number] = most(start, seed) - live
                ways["loss", number] = _pass(events[seed:end], most(seed, end) - live - kept[number])
                end = seed
            ways[way, number] = _pass(events[start:end], max(0, most(start, end) - live))
        else:
            high = max(0, most(start, end) - before[number] - kept[number])
            ways[way, number] = _pass(events[start:end], high, _gradients(run.model.layers[number]))
    ways["backward", head] = ways["loss", head].then(ways["backward", head])
    layers, scatter = [], partial(scattered, config=run.config, strategy=run.strategy)
    for number, layer in enumerate(run.model.layers):
        shared = run.config.tied * run.model.layers[0].tokens.numel() if number in (0, head) else 0
        weights, waiting = later[number]
        backward = ways["backward", number].then(weights)
        sizes = kept[number], sum(param.numel() for param in layer.parameters()), shared, waiting
        passes = map(scatter, (ways["forward", number], backward))
        layers.append(Layer(*passes, weights, *sizes))
    experts = [param for layer in mixtures(run.model.layers) for param in layer.experts.parameters()]
    dealt = sum(param.numel() for param in experts)
    return Work(*layers, boundary_bytes=all_marks.boundary_bytes, expert_parameters=dealt)


def _pass(events: list, high_bytes: int = 0, weights: frozenset[int] = frozenset()) -> Pass:
    """`weights`: the bytes of gradients of matrices, of which something is added up in this pass."""
    operators, issued, collectives = [], {}, []
    for event in events:
        match event:
            case Compute():
                adds = not event.flops and event.name in GRADIENT and event.written in weights
                what = event.name, event.flops, event.bytes, event.dtype, event.shape
                operators.append(Operator(*what, adds))
            case Issue() if len(event.members) > 1:
                issued[event.id] = event, len(operators)
            case Wait() if event.id in issued:
                issue, start = issued.pop(event.id)
                what = issue.op, issue.axis, issue.members, issue.payload_bytes
                collectives.append(Collective(*what, range(start, len(operators))))
    return Pass(tuple(operators), tuple(collectives), high_bytes)


def dry_steps(
    config: GPTConfig, strategy: Strategy, hyper: Hyperparameters, *, fused: bool = True
) -> dict[int, Ledger]:
    """{rank: the account of its step}, one rank of every stage. ValueError for what cannot be.
    Ranks that differ in dp, cp or tp alone run the same layers on as many tokens and issue the same
    collectives, so on equal machines they are in step; those taken are the last of dp and cp, the fullest.
    The replay brings stages together by their messages. The account is that of any step but the first, from
    its batch to the update: weights and states of the optimizer are there before. The update is AdamW's,
    `fused` in one kernel per tensor, or operator by operator. Tokens are shared out evenly among experts."""
    strategy.check(config, strategy.ranks)
    strategy.check_batch(config, hyper.batch_size, hyper.length)
    step, every = partial(_step, config, strategy, hyper, fused), strategy.ranks
    return {rank: dryrun.run(step, rank=rank, ranks=every) for rank in stage_ranks(strategy)}


def stage_ranks(strategy: Strategy) -> list[int]:
    """Of each stage the rank that is last in dp and cp, first in tp: ((d·pp + stage)·cp + c)·tp + t."""
    dp, pp, cp, tp = strategy.dp, strategy.pp, strategy.cp, strategy.tp
    return [(((dp - 1) * pp + stage) * cp + cp - 1) * tp for stage in range(pp)]


def _step(config: GPTConfig, strategy: Strategy, hyper: Hyperparameters, fused: bool) -> Ledger:
    def make_optimizer(params: list):
        optimizer = hyper.make_optimizer(params)
        if fused:
            optimizer.update = fused_adamw
        return optimizer

    run = parallelize(config, strategy, make_optimizer, seed=hyper.seed, frozen=hyper.frozen)
    shape = dict(batch_size=hyper.batch_size, length=hyper.length)
    rows = Rows(partial(random_tokens, vocab=config.vocab_size, **shape), **shape)
    make_states(run)
    ledger = Ledger()

    def within(phase_now, function, *args, **kwargs):
        with ledger.phase(phase_now()):
            return function(*args, **kwargs)

    for layer in run.model.layers:
        now = lambda: "backward" if in_backward() else "forward"
        layer.forward = partial(within, now, layer.forward)
    run.sync.step = partial(within, lambda: "optimizer", run.sync.step)
    batch = run.batch(rows, 0)  # by the host
    with ledger, ledger.phase("backward"):  # but for what is inside a layer or the update
        run.step(batch, hyper.clip)
        run.settle()
    return ledger
