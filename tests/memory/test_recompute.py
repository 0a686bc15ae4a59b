"""Recomputation on one process: gradients bit by bit, bytes that are kept and FLOPs that are repeated, exactly."""

import gc
import threading
import weakref
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import count

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from minitrain.attention.kernel import fused_backward, fused_forward, recomputed
from minitrain.attention.placed import Places, drop_by_place
from minitrain.compose.passes import recompute_in
from minitrain.course.saved_tensors import SavedTensors
from minitrain.memory import recompute as segment
from minitrain.memory.recompute import Results, dropping, recompute
from minitrain.memory.recompute_policies import NAMES, of_block, parse, segments
from minitrain.model.config import ExpertsConfig, GPTConfig
from minitrain.model.gpt import GPT, cross_entropy_sum
from minitrain.model.layers import naive_attention
from minitrain.model.mixture import RouterLosses
from minitrain.pipeline.deferred import Deferred
from minitrain.plan.accounting import activation_bytes
from minitrain.plan.strategy import Strategy
from minitrain.ranks.ledger import Ledger
from minitrain.systems.plan.rematerialize import fewest_forwards

WORDS = (
    *("full", "selective", "every:2", "sqrt", "revolve:1", "revolve:2", "revolve:9", "full,none"),
    *(f"{kind}:{name}" for kind in ("keep", "drop") for name in (*NAMES, "+".join(NAMES))),
    *("keep:qkv+act", "drop:norm2+up,full", "selective,keep:core"),
)
SMALL = dict(vocab_size=29, d_model=16, num_layers=3, num_heads=4, num_kv_heads=2, max_positions=8)
EXPERTS = ExpertsConfig(
    num_experts=4, top_k=2, router="gshard", balance_alpha=0.05, z_alpha=0.01, shared_experts=1
)
MODELS = {
    "gpt2": dict(dropout=0.2, activation="gelu", norm="layer", bias=True, tied=True, positions="learned"),
    "llama": dict(activation="swiglu", norm="rms", positions="rope"),
    "alibi": dict(positions="alibi", residual="parallel", dropout=0.1),
    "post": dict(residual="deepnorm", norm="layer", activation="geglu"),
    "latent": dict(kv_latent=8, rope_head_dim=2, num_kv_heads=4, positions="rope", dropout=0.1),
    "experts": dict(experts=EXPERTS, dropout=0.1),
}
TOKENS = torch.arange(24).view(3, 8)


def model_of(word: str, changes: dict, early_stop=True, dtype=torch.float64, **how) -> GPT:
    model = GPT(GPTConfig(**(SMALL | changes)), seed=1, dtype=dtype, **how)
    recompute_in(model, Strategy(recompute=word), None, Places(), early_stop=early_stop)
    return model


def loss_of(model: GPT, tokens=TOKENS):
    losses = RouterLosses({0: model.layers})
    loss = cross_entropy_sum(model(tokens), tokens)
    more = losses.collect()
    return loss if more is None else loss + more


def gradients(model: GPT) -> dict:
    torch.manual_seed(5)
    loss = loss_of(model)
    loss.backward()
    grads = {name: param.grad for name, param in model.named_parameters()}
    return {"loss": loss.detach(), "draw": torch.rand(3)} | grads


def same(ours: dict, theirs: dict) -> bool:
    assert ours.keys() == theirs.keys()
    pairs = [(ours[name], theirs[name]) for name in ours]
    return all(a is b or a is not None and b is not None and torch.equal(a, b) for a, b in pairs)


# ---- equality --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_gradients_are_those_of_no_recomputation_bit_by_bit(model):
    """Dropout and a router that draw from torch's generator included; and what is drawn after the step."""
    plain = gradients(model_of("none", MODELS[model]))
    for word in WORDS:
        for early_stop in (True, False) if model in ("gpt2", "latent") else (True,):
            assert same(gradients(model_of(word, MODELS[model], early_stop)), plain), (word, early_stop)


def test_without_the_random_state_gradients_differ(monkeypatch):
    plain = gradients(model_of("none", MODELS["gpt2"]))
    monkeypatch.setattr(segment, "drawing_again", lambda device: nullcontext)
    for word in ("full", "selective", "keep:qkv"):
        assert not same(gradients(model_of(word, MODELS["gpt2"])), plain)


def test_random_numbers_of_a_kept_result_are_passed_over(monkeypatch):
    """The core draws a mask. It is kept and not run again: the masks behind it must be those of the first."""
    plain = gradients(model_of("none", MODELS["gpt2"]))
    assert same(gradients(model_of("keep:core", MODELS["gpt2"])), plain)
    monkeypatch.setattr("minitrain.memory.recompute.set_random_state", lambda state, device: None)
    assert not same(gradients(model_of("keep:core", MODELS["gpt2"])), plain)


@pytest.mark.parametrize("word", ["full", "selective", "drop:act+core", "keep:qkv"])
def test_two_forwards_then_two_backwards_with_masks_by_place(word):
    """The second pass of the first batch sees the step and the rows of the first."""

    def grads(word, replay=True):
        model, places = GPT(GPTConfig(**SMALL, dropout=0.2), seed=1, dtype=torch.float64), Places(3)
        drop_by_place(model.layers, places)
        recompute_in(model, Strategy(recompute=word), None, places if replay else Places())
        losses = []
        for step in range(2):
            places.at(step, 3 * step)
            losses.append(loss_of(model))
        for loss in losses:
            loss.backward()
            assert (places.step, places.first_row) == (1, 3)  # as it was before
        return {name: param.grad for name, param in model.named_parameters()}

    plain = grads("none")
    assert same(grads(word), plain) and same(grads(word, replay=False), plain) == (word == "keep:core")


def test_frozen_parameters_and_inputs_without_gradients():
    for frozen in ("layers.0.", "layers.1.", "layers.2.mlp.down", "layers.2.attention", "layers."):
        found = []
        for word in ("none", *WORDS):
            model = model_of(word, MODELS["gpt2"])
            for name, param in model.named_parameters():
                param.requires_grad_(not name.startswith(frozen) or name == "layers.4.norm.weight")
            found.append(gradients(model))
        assert all(same(other, found[0]) for other in found[1:]), frozen


def test_a_graph_that_is_used_again():
    """Each backward has a second pass of its own, and the last one lets everything go."""
    for word in ("full", "keep:core", "drop:act+norm1", "selective"):
        plain, model = model_of("none", MODELS["gpt2"]), model_of(word, MODELS["gpt2"])
        for each in (plain, model):
            torch.manual_seed(5)
            loss = loss_of(each)
            for keep in (True, True, False):
                loss.backward(retain_graph=keep)
        for a, b in zip(plain.parameters(), model.parameters()):
            assert torch.equal(a.grad, b.grad)
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()


def test_several_inputs_and_results_of_which_some_have_no_gradient():
    def run(x, scale, y, how):
        z = (x * y).tanh() * scale["by"]
        return z.exp(), x.detach() * 2, (y * y).sin()

    x, y = (torch.randn(4, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    for use in ((0,), (2,), (0, 2)):
        for given in ((x, y), (x, y.detach()), (x.detach(), y)):
            found = []
            for way in (lambda run, *inputs: run(*inputs), recompute):
                results = way(run, given[0], {"by": 3.0}, given[1], "so")
                total = sum(results[index].sum() for index in use)
                wanted = [z for z in given if z.requires_grad]
                found.append(
                    torch.autograd.grad(total, wanted, allow_unused=True) if total.requires_grad else ()
                )
            for a, b in zip(*found):
                assert a is b is None or torch.equal(a, b)


def test_parts_of_a_graph_one_after_the_other():
    """Two results, two backwards: what the first second pass has found serves the other."""
    x, calls = torch.randn(3, 4, dtype=torch.float64, requires_grad=True), []

    def run(x):
        calls.append(1)
        return x.sin().exp(), x.cos().exp()

    a, b = recompute(run, x)
    a.sum().backward()
    b.sum().backward()
    assert len(calls) == 2

    def in_turn(x):
        a = x.sin().exp()
        calls.append("behind a")
        return a, x.cos().exp()

    a, b = recompute(in_turn, x.detach().requires_grad_())
    del b
    a.sum().backward()
    assert calls == [1, 1, "behind a"], "of what is gone nothing is wanted"
    z = x.detach().requires_grad_()
    (z.sin().exp().sum() + z.cos().exp().sum()).backward()
    assert torch.allclose(x.grad, z.grad, rtol=1e-15)


def test_a_last_result_is_begun_only_for_what_is_inside_of_it():
    """What it has saved of its input is found without it, and then the second pass is over."""
    results, x, calls = Results(), torch.randn(3, dtype=torch.float64, requires_grad=True), []

    def inner(y):
        calls.append("inner")
        return (y.sin() * 2).exp()

    def only_input(y):
        calls.append("only input")
        return y.sin()

    for last, times in ((inner, 2), (only_input, 1)):
        grads = []
        for way in (lambda run: run(x), lambda run: recompute(run, x, results=results)):
            calls.clear()
            grads += torch.autograd.grad(way(lambda x: results("last", last, x.cos())).sum(), x)  # noqa: B023
        assert torch.equal(*grads) and len(calls) == times


def test_segments_inside_segments():
    """Every depth makes its own again: three forwards of the innermost."""
    calls, weight = Counter(), torch.randn(6, 6, dtype=torch.float64, requires_grad=True)

    def inner(x):
        calls["inner"] += 1
        return (x @ weight).tanh() @ weight

    def outer(x):
        calls["outer"] += 1
        return recompute(inner, x.tanh()).tanh() @ weight

    x = torch.randn(2, 6, dtype=torch.float64, requires_grad=True)
    recompute(outer, x).sum().backward()
    assert calls == {"outer": 2, "inner": 3}
    grads, x.grad, weight.grad = (x.grad, weight.grad), None, None
    (((x.tanh() @ weight).tanh() @ weight).tanh() @ weight).sum().backward()
    assert all(map(torch.equal, grads, (x.grad, weight.grad)))


def test_products_that_are_put_off():
    """Zero bubble's I and W: the second pass sees the mode of the first, or it would save other tensors."""
    found = []
    for word in ("none", "full", "keep:core", "drop:up+act", "every:2"):
        model = model_of(word, MODELS["gpt2"])
        torch.manual_seed(5)
        with Deferred() as later:
            loss = loss_of(model)
        loss.backward()
        assert model.layers[1].mlp.up.weight.grad is None and len(later.products) == 6 * 3 + 1
        later.weights()
        found.append({name: param.grad for name, param in model.named_parameters()})
        assert same(found[-1], found[0]), word


def test_what_a_router_counts_is_counted_once():
    """A second pass leaves the load that moves biases, and the losses that a forward has noted, alone."""
    router = replace(EXPERTS, router="deepseek", bias_speed=0.02)
    for word in ("none", "full", "keep:core", "every:2", "revolve:1", "drop:experts"):
        model = model_of(word, dict(experts=router))
        loss_of(model).backward()
        for layer in model.layers[1:-1]:
            assert layer.mlp.router.load.sum() == TOKENS.numel() * router.top_k and layer.mlp.losses is None


def test_what_never_runs_backward_goes_without_the_collector():
    gc.collect()
    gc.disable()
    try:
        for word in ("none", "full", "keep:core", "drop:act+norm1", "selective"):
            model = model_of(word, MODELS["gpt2"])
            with Ledger() as ledger:
                loss = loss_of(model)
                del loss
                left = ledger.live_by_kind
                assert left["activations"] - TOKENS.nbytes <= 0, (word, left)
    finally:
        gc.enable()


# ---- refusals --------------------------------------------------------------------------------------------


def test_a_forward_that_does_otherwise_is_refused_in_one_line():
    x, calls = torch.randn(3, requires_grad=True), []

    def narrower(x):
        calls.append(1)
        y = x if len(calls) == 1 else x[:2]
        return (y * 2).exp().sum()

    def wider(x):
        calls.append(1)
        return ((x if len(calls) == 1 else x.double()) * 2).exp().sum()

    def two_less(x):
        calls.append(1)
        return (x * 2).exp().sin().cos().sum() if len(calls) == 1 else x.exp().sum()

    for run, said in (
        (narrower, "was .3. torch.float32 in"),
        (wider, "was .3. torch.float32 in the first pass and is .3. torch.float64 in the second"),
        (two_less, "the second pass saved 1 tensors, without the 1th of"),
    ):
        calls.clear()
        loss = recompute(run, x)
        with pytest.raises(RuntimeError, match=f"{said}.*a forward must do the same each time$"):
            loss.backward()

    results, names = Results(), iter("abaa")
    for sines, said in (((0, 0), "comes to 'b' after 1 tensors"), ((0, 1), "comes to 'a' after 2 tensors")):
        more = iter(sines)

        def run(x, more=more):
            y = x.sin().sin() if next(more) else x.sin()
            return results(next(names), torch.exp, y).cos().exp().sum()

        loss = recompute(run, x, results=results, keep={"a"})
        with pytest.raises(RuntimeError, match=f"{said}, the first came to 'a'"):
            loss.backward()


def test_a_draw_without_a_tensor_is_repeated():
    """A segment whose inputs are no tensors draws from the CPU's generator, and so does its second pass."""
    w = torch.ones(4, requires_grad=True)

    def run(number):
        return (w * torch.rand(4)).square().sum() * number

    torch.manual_seed(0)
    (plain,) = torch.autograd.grad(run(2.0), w)
    torch.manual_seed(0)
    loss = recompute(run, 2.0)
    torch.rand(3)
    assert torch.equal(torch.autograd.grad(loss, w)[0], plain)


class Bits(torch.autograd.Function):
    """Reads what it saved as integers."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.view(torch.int64))
        return x.exp()

    @staticmethod
    def backward(ctx, dy):
        return dy * ctx.saved_tensors[0].view(torch.float64).exp()


@pytest.mark.parametrize("keep", [(), ("outer",), ("inner",), ("outer", "inner")])
def test_a_named_result_inside_another_and_one_that_reads_its_input_as_bits(keep):
    results, x = Results(), torch.randn(5, dtype=torch.float64, requires_grad=True)

    def run(x):
        y = results("outer", lambda x: results("inner", Bits.apply, x).sin() * x, x.cos())
        return results("last", Bits.apply, y).square().sum()

    plain = torch.autograd.grad(run(x), x)
    loss = recompute(run, x, results=results, keep=keep)
    assert torch.equal(torch.autograd.grad(loss, x)[0], plain[0])


def test_where_all_that_is_saved_is_kept_anyway_nothing_runs_again():
    """Inputs, a module's own parameters, and kept results."""
    results, calls, linear = Results(), [], torch.nn.Linear(3, 2)
    linear.register_forward_pre_hook(lambda *_: calls.append("linear"))

    def sine(x):
        calls.append("sine")
        return results("sine", torch.sin, x).square()

    for run, keep in ((linear, ()), (sine, {"sine"})):
        x = torch.randn(4, 3, requires_grad=True)
        recompute(run, x, results=results, keep=keep).sum().backward()
        assert x.grad is not None
    assert calls == ["linear", "sine"]
    recompute(sine, x, results=results).sum().backward()
    assert calls == ["linear", "sine", "sine", "sine"]


def test_a_second_pass_stops_when_it_has_all_unless_told_otherwise():
    """Also in front of a kept result that saved nothing but its input, and is not fetched; so does `dropping`."""
    results, x = Results(), torch.randn(3, dtype=torch.float64, requires_grad=True)
    calls, fetched = [], []

    def run(x):
        y = x.cos().sin() * 2
        calls.append("behind")
        return y

    def core(x):
        y = results("core", torch.sin, x.cos())
        calls.append("behind")
        return y

    for way, stops, each in (
        (partial(recompute, run), True, run),
        (partial(recompute, run, early_stop=False), False, run),
        (partial(recompute, core, results=results, keep={"core"}), True, core),
    ):
        calls.clear(), fetched.clear()
        with saved_tensors_hooks(lambda x: x, lambda x: fetched.append(x) or x):
            y = way(x)
        (grad,) = torch.autograd.grad(y.sum(), x)
        assert len(calls) == 2 - stops and len(fetched) == 2  # x for the second pass and for the first cosine
        assert torch.equal(grad, torch.autograd.grad(each(x).sum(), x)[0])
    for early_stop, times in ((True, 1), (False, 2)):
        calls.clear()
        how = {} if early_stop else dict(early_stop=False)
        with dropping({"run"}, results, **how):
            y = results("run", run, x).sin()
        torch.autograd.grad(y.sum(), x)
        assert len(calls) == 2  # the result itself is wanted, by the sine
        calls.clear()
        with dropping((), results, inside={"run"}, **how):
            y = results("run", run, x)
        torch.autograd.grad(y.sum(), x)
        assert len(calls) == times


def test_a_dropped_result_is_made_again_for_what_it_made_alone():
    """Not for a weight that it has read, nor for its input, of which it gives a view; nor is it kept for what
    is made of it and dropped too. A kept pair of results is a pair in the second pass."""
    results, linear, calls, x = Results(), nn.Linear(3, 3), Counter(), torch.randn(3, 3, requires_grad=True)

    def count(name, compute):
        def run(*inputs):
            calls[name] += 1
            return compute(*inputs)

        return partial(results, name, run)

    linear.register_forward_pre_hook(results.know)
    with dropping({"linear", "view"}, results):
        y = count("linear", linear)(x)
        flat = count("view", torch.flatten)(y)
        (y + flat.view(3, 3)).sum().backward()
        (x * x).sum().backward()
    assert calls == {"linear": 1, "view": 1}
    with dropping({"view"}, results):
        y = x.cos()
        z = (count("view", torch.flatten)(y) * 2).sum() + (y * y).sum()
    z.backward()
    assert calls == {"linear": 1, "view": 2}
    with SavedTensors(linear) as saved, dropping({"first", "second"}, results):
        z = count("second", torch.exp)(count("first", torch.sin)(x)).sin().sum()
    assert saved.bytes == x.nbytes
    z.backward()
    assert (calls["first"], calls["second"]) == (2, 2)

    def two(x):
        pair = results("pair", lambda x: (x.sin(), x.cos()), x)
        met.append(type(pair))
        return (pair[0] * pair[1]).exp().sum()

    met = []
    recompute(two, x, results=results, keep={"pair"}, early_stop=False).backward()
    assert met == [tuple, tuple]


def test_of_a_held_input_a_part_is_kept_and_of_numbers_of_tokens_all():
    """Kept through the hooks around; not twice, though it is saved; and nothing of it asks for a gradient."""
    x, places, kept, met = torch.randn(6, requires_grad=True), torch.arange(6), [], []

    def run(x, places, other):
        met.append((x.requires_grad, other.requires_grad, places))
        return (x * x).cos() * other * places

    def hold(x):
        return x[: len(x) // 2], lambda part: torch.cat((part, part))

    x.data[3:] = x.data[:3]
    other = torch.ones(6)
    with saved_tensors_hooks(lambda x: kept.append(tuple(x.shape)) or x, lambda x: x):
        y = recompute(run, x, places, other, hold=hold)
    assert kept == [(3,), (3,)]  # of x and of other
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(grad, torch.autograd.grad(run(x, places, other).sum(), x)[0])
    assert [flags[:2] for flags in met] == [(True, False)] * 3 and met[1][2] is places


@pytest.mark.parametrize("inside", [True, False])
def test_a_mode_sees_the_second_pass_once_whether_it_is_still_on_or_not(inside):
    class Counts(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func.__name__) if func.__name__ == "cos" else None
            return func(*args, **kwargs or {})

    seen, x = [], torch.randn(3, requires_grad=True)
    with Counts():
        y = recompute(lambda x: x.cos().sin(), x).sum()
        if inside:
            torch.autograd.backward(y)
    if not inside:
        torch.autograd.backward(y)
    assert seen == ["cos"] * 2


def test_a_door_is_its_threads_own_and_goes_back_to_who_stood_in_it():
    class Doubles:
        def result(self, name, compute, inputs):
            return 2 * compute(*inputs)

    class Adds(Doubles):
        def result(self, name, compute, inputs):
            return 100 + compute(*inputs)

    results, found = Results(), []
    ask = partial(results, "name", lambda x: x, 3)
    with results.inside(Doubles()):
        with results.inside(Adds()):
            found.append(ask())
        found.append(ask())
        other = threading.Thread(target=lambda: found.append(ask()))
        other.start()
        other.join()
    assert [*found, ask()] == [103, 6, 3, 3]


def test_what_the_second_pass_finds_has_no_graph():
    """Of a saved tensor and of a view of a result: the second pass is over, and nothing of it is held."""
    inputs = []

    def run(x):
        inputs.append(weakref.ref(x))
        return x.exp().sin()

    again = segment.Segment(run, [torch.randn(3, requires_grad=True)], (), False, Results())
    numbers = count()
    with saved_tensors_hooks(lambda x: again.slot(next(numbers), x), segment.open_slot):
        made = run(*(given() for given in again.inputs))
    slots = [again.slot(number, made) for number in range(2)] + [again.output_slot(0, made)]
    again.again()
    assert len(again.recomputed) == len(slots) and torch.equal(again.recomputed[-1], made.detach())
    assert not any(x.requires_grad or x.grad_fn for x in again.recomputed.values())
    assert inputs[-1]() is None


def test_saved_tensors_that_are_read_twice_are_refused():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x.exp())
            return x.exp()

        @staticmethod
        def backward(ctx, dy):
            return dy * ctx.saved_tensors[0] + 0 * ctx.saved_tensors[0]

    x = torch.randn(3, requires_grad=True)
    loss = recompute(lambda x: Twice.apply(x * 2), x).sum()
    loss.backward(retain_graph=True)  # then it is made once more
    with pytest.raises(RuntimeError, match="opened a second time; read ctx.saved_tensors once in a backward"):
        loss.backward()


def test_words():
    assert [policy.again for policy in parse("full*2,none")] == [True, True, False]
    assert parse("full*2, none") == parse("full*2,none")
    assert of_block(parse("full*2,selective"), 7).inside == {"core"}
    assert parse("keep:core+act")[0].keep == {"core", "act"} and parse("drop:up")[0].drop == {"up"}
    assert [list(part) for part, _ in segments(parse("every:2"), range(2, 7))] == [[2, 3], [4, 5], [6]]
    for blocks, lengths in ((1, [1]), (2, [2]), (4, [2, 2]), (7, [4, 3]), (9, [3] * 3), (16, [4] * 4)):
        assert [len(part) for part, _ in segments(parse("sqrt"), range(blocks))] == lengths
    ((whole, policy),) = segments(parse("revolve:3"), range(4, 8))
    assert policy.slots == 3 and whole == range(4, 8)
    kept = segments(parse("keep:core,full*2,none"), range(2, 6))  # of the whole model's blocks
    assert [(list(part), policy.again) for part, policy in kept] == [([2], True), ([3], False)] + [
        ([block], False) for block in (4, 5)
    ]
    assert [parse(word)[0].drops for word in ("none", "full", "selective", "drop:up")] == [False] + [True] * 3
    assert parse("keep:core")[0].again and not parse("drop:core")[0].again
    for word, said in {
        "some": "recompute='some'; use none, stage, full",
        "keep:kore": "no result is called 'kore'; use norm1, latents, qkv",
        "drop:up+zoo+gates+tables+worlds+things+yards": "no result is called 'gates'",  # of several the first in the alphabet
        "revolve:2,none": "use one of them alone",
        "revolve:0": "recompute='revolve:0'; use none, stage, full",
        "full*0,none": "'full.0' is repeated '0' times; use 1 or more",
        "stage,full": "stage is about whole stages; use it alone",
    }.items():
        with pytest.raises(ValueError, match=said):
            Strategy(recompute=word)
    for (word, tp, sequence), said in {
        ("full", 1, False): "a rank has nobody to share with",
        ("full", 2, True): "inputs are cut already",
        ("selective", 2, False): "no block keeps its input alone; use full",
    }.items():
        with pytest.raises(ValueError, match=said):
            Strategy(recompute=word, tp=tp, sequence_parallel=sequence, recompute_partition=True)
    with pytest.raises(ValueError, match="is for 5 blocks, the model has 3; name at most 3"):
        Strategy(recompute="full*4,none").check(GPTConfig(**SMALL), 1)
    assert Strategy(recompute="full*3,none").check(GPTConfig(**SMALL), 1)
    with pytest.raises(ValueError, match="without the copies of its layer; use full"):
        Strategy(recompute="drop:up", precision="bfloat16_jit")


# ---- bytes -----------------------------------------------------------------------------------------------

PAPER = dict(norm="layer", activation="gelu", positions="learned", bias=True, dropout=0.1)


def kept_by_a_block(
    word, s, b, h, a, *, attention=naive_attention, dtype=torch.float16, device="cpu", **changes
):
    """Bytes that autograd keeps of one block, and how many numbers are means and deviations of norms."""
    config = GPTConfig(d_model=h, num_heads=a, num_layers=1, **(PAPER | changes))
    model = GPT(config, layers=[1], attention=attention, dtype=dtype, device=device)
    recompute_in(model, Strategy(recompute=word), None, Places())
    x = torch.zeros(b, s, h, dtype=dtype, device=device, requires_grad=True)
    with SavedTensors(model) as saved:
        model(x, torch.arange(s, device=device))
    statistics = [item.bytes for item in saved.saved if item.shape == (b, s, 1)]
    return saved.bytes - sum(statistics), len(statistics)


@pytest.mark.parametrize(
    "s,b,h,a,device", [(32, 2, 64, 4, "cpu"), (48, 1, 32, 2, "cpu"), (2048, 1, 12_288, 96, "meta")]
)
def test_bytes_of_a_block(s, b, h, a, device):
    """Of Korthikanti's sbh(34 + 5as/h), on a real layer and on GPT-3's: full keeps 2sbh, selective 34sbh; to
    drop the core's result too, 2sbh less."""
    kept = partial(kept_by_a_block, s=s, b=b, h=h, a=a, device=device)
    assert kept("none") == (34 * s * b * h + 5 * a * s * s * b, 4)
    assert kept("full") == (2 * s * b * h, 0) == (activation_bytes(s, b, h, a, recompute="full"), 0)
    selective = activation_bytes(s, b, h, a, recompute="selective")
    assert kept("selective") == (34 * s * b * h, 4) == (selective, 4)
    assert kept("drop:norm1+norm2") == (30 * s * b * h + 5 * a * s * s * b, 0)
    assert kept("drop:act") == (26 * s * b * h + 5 * a * s * s * b, 4)
    only, both = kept("drop:qkv")[0], kept("drop:qkv+norm1")[0]
    assert only - both == 2 * s * b * h  # of the two the input of the first
    assert kept("keep:out") == (4 * s * b * h, 0)


def test_selective_checkpoint():
    """70 % and 65 % of the bytes: 80 of 114 and 64 of 98 sbh. Of FLOPs the paper prints 2.7 % and 1.6 % more,
    from 72sbh²(1 + s/3h) over 72sbh²(1 + s/6h). One more forward of the core is 4s²bh, s/18h of the products:
    0.90 % and 0.55 % of all are counted, and half of that if the second pass stops before P · V."""
    for h, a, bytes_, printed, counted in (
        (12_288, 96, (114, 80), 2.7, 0.90),
        (20_480, 128, (98, 64), 1.6, 0.55),
    ):
        s, b, sbh = 2048, 1, 2048 * h
        kept = partial(kept_by_a_block, s=s, b=b, h=h, a=a, device="meta")
        none, selective = kept("none")[0], kept("selective")[0]
        assert (none / sbh, (none - selective) / sbh) == bytes_
        assert round(100 * (1 - selective / none)) == {114: 70, 98: 65}[bytes_[0]]
        flops = partial(flops_of_a_block, s=s, b=b, h=h, a=a, device="meta")
        more = flops("selective", early_stop=False) - flops("none")
        assert flops("none") == 72 * s * b * h * h + 12 * s * s * b * h and more == 4 * s * s * b * h
        assert Fraction(more, 72 * s * b * h * h) == Fraction(s, 18 * h)
        assert round(100 * more / flops("none"), 2) == counted
        paper = (1 + s / (3 * h)) / (1 + s / (6 * h)) - 1
        assert round(100 * paper, 1) == printed and flops("selective") - flops("none") == more / 2
    none, selective = (gradients(model_of(word, dict(dropout=0.1))) for word in ("none", "selective"))
    assert same(none, selective)  # scores, softmax and dropout are made again alike


def fused(q, k, v, dropout=0.0):
    return recomputed(fused_forward, fused_backward, q, k, v, True)


@pytest.mark.parametrize("s,b,h,a", [(32, 2, 64, 4), (16, 1, 32, 2)])
def test_keep_core_bytes(s, b, h, a):
    """bfloat16: the input, the output of the core and lse, 4 bytes for each head and token."""
    kept = partial(kept_by_a_block, s=s, b=b, h=h, a=a, attention=fused, dtype=torch.bfloat16, dropout=0.0)
    assert kept("keep:core") == (2 * s * b * h + 2 * s * b * h + 4 * a * b * s, 0)
    assert kept("full") == (2 * s * b * h, 0)
    inside, dropped = kept("selective"), kept("drop:core")  # lse goes with both, the output with one
    assert kept("none")[0] - inside[0] == 4 * a * b * s and inside[0] - dropped[0] == 2 * s * b * h


# ---- FLOPs -----------------------------------------------------------------------------------------------


def flops_of_a_block(
    word, s, b, h, a, *, early_stop=True, device="cpu", blocks=1, dropout=0.0, attention=naive_attention
):
    config = GPTConfig(d_model=h, num_heads=a, num_layers=blocks, **(PAPER | dict(dropout=dropout)))
    model = GPT(config, layers=range(1, blocks + 1), attention=attention, dtype=torch.float16, device=device)
    recompute_in(model, Strategy(recompute=word), None, Places(), early_stop=early_stop)
    x = torch.zeros(b, s, h, dtype=torch.float16, device=device, requires_grad=True)
    with Ledger(causal="square") as ledger:
        y = model(x, torch.arange(s, device=device))
        y.backward(torch.empty_like(y))
    return ledger.flops


def test_flops_by_word():
    """A block's forward is 24sbh² + 4s²bh, its backward twice that. What a word repeats is the products in
    front of the last thing that is wanted: not the last product of a block, not P · V of the core alone."""
    s, b, h, a = 16, 2, 32, 4
    flops = partial(flops_of_a_block, s=s, b=b, h=h, a=a)
    product, core = 2 * s * b * h * h, 4 * s * s * b * h
    forward = 12 * product + core
    extra = {
        "full": (8 * product + core, forward), "selective": (core // 2, core),
        "drop:core": (core // 2, core), "keep:core": (8 * product, 12 * product),
        "keep:qkv": (5 * product + core, 9 * product + core),
        "keep:qkv+core+out": (4 * product, 8 * product), "keep:up": (4 * product + core, 8 * product + core),
        "drop:up": (4 * product, 4 * product), "drop:act+norm1": (0, 0), "drop:down+out": (0, 0),
        "keep:" + "+".join(NAMES): (0, 0),
    }  # fmt: skip
    assert flops("none") == 3 * forward
    for word, (stopped, whole) in extra.items():
        assert flops(word) - 3 * forward == stopped, word
        assert flops(word, early_stop=False) - 3 * forward == (0 if word == "drop:down+out" else whole), word
    flash = partial(flops, attention=fused)
    assert flash("drop:qkv+norm1") - flash("none") == 3 * product
    assert flash("keep:core") - flash("none") == 8 * product
    assert 3 * flops("full", early_stop=False) == 4 * flops("none")
    assert flops("full", dropout=0.1) == 4 * forward  # a mask is saved behind the last product


def test_activation_recompute():
    """Chen's sqrt(n): 16 blocks in 4 segments of 4, inputs of 4 kept in the place of 16 blocks' tensors, and
    with no early stop 4/3 of the FLOPs; where it stops, one product less in each segment. Gradients are equal, bit
    by bit, with dropout; each of n inputs that full keeps is 2sbh."""
    deep = MODELS["gpt2"] | dict(num_layers=16)
    assert same(gradients(model_of("sqrt", deep)), gradients(model_of("none", deep)))
    s, b, h, a = 8, 1, 16, 2
    flops = partial(flops_of_a_block, s=s, b=b, h=h, a=a, blocks=16)
    none, last = flops("none"), 8 * s * b * h * h
    for word, kept in (("sqrt", 4), ("every:4", 4), ("every:1", 16), ("full", 16), ("every:7", 3)):
        assert 3 * flops(word, early_stop=False) == 4 * none
        assert flops(word) == flops(word, early_stop=False) - kept * last
        config = GPTConfig(d_model=h, num_heads=a, num_layers=16, **(PAPER | dict(dropout=0.0)))
        model = GPT(config, layers=range(1, 17), dtype=torch.float16)
        recompute_in(model, Strategy(recompute=word), None, Places())
        with SavedTensors(model) as saved:
            model(torch.zeros(b, s, h, dtype=torch.float16, requires_grad=True), torch.arange(s))
        assert saved.bytes == kept * 2 * s * b * h


@pytest.mark.parametrize("early_stop", [True, False])
def test_ckpt_at_flash_output(early_stop):
    """The kernel runs forward once a layer and step with keep:core, twice with full, and keeps out and lse."""
    calls = Counter()

    def core(q, k, v):
        def forward(*inputs):
            calls["forward"] += 1
            return fused_forward(*inputs)

        def backward(*inputs):
            calls["backward"] += 1
            return fused_backward(*inputs)

        return recomputed(forward, backward, q, k, v, True)

    found, kept, shape = [], {}, dict(residual="pre", positions="rope", norm="rms", num_kv_heads=4)
    for word, forwards in (("none", 1), ("full", 2), ("keep:core", 1), ("selective", 2), ("drop:norm1", 1)):
        calls.clear()
        model = model_of(word, shape, early_stop, attention=core)
        with SavedTensors(model) as saved:
            loss_of(model)
        calls.clear()
        found.append(gradients(model))
        assert calls == {"forward": forwards * 3, "backward": 3}, word
        assert same(found[-1], found[0])
        kept[word] = saved.bytes
    b, s, h, a, layers, bytes_ = 3, 8, 16, 4, 3, 8
    assert kept["keep:core"] - kept["full"] == layers * bytes_ * (b * s * h + a * b * s)


# ---- the peak --------------------------------------------------------------------------------------------


class Wide(nn.Module):
    """x + tanh(x · up) · down: a block whose memory one can count by hand."""

    def __init__(self, width, hidden):
        super().__init__()
        self.up = nn.Parameter(torch.randn(width, hidden, dtype=torch.float64) / width**0.5)
        self.down = nn.Parameter(torch.randn(hidden, width, dtype=torch.float64) / hidden**0.5)

    def forward(self, x):
        return torch.mm(torch.tanh(torch.mm(x, self.up)), self.down)


def peak_of(way, blocks, rows, width, hidden):
    torch.manual_seed(2)
    model = nn.ModuleList(Wide(width, hidden) for _ in range(blocks))
    x = torch.randn(rows, width, dtype=torch.float64)
    with Ledger() as ledger:
        y = x
        for block in model:
            y = way(block, y)
        y.sum().backward()
        del y
    return ledger.peak_bytes, [param.grad for param in model.parameters()]


SIZES = [(1, 7, 3, 40), (4, 7, 3, 40), (6, 32, 4, 8), (9, 5, 8, 64), (3, 90, 10, 1), (3, 1, 10, 90)]


@pytest.mark.parametrize("blocks, rows, width, hidden", SIZES)
def test_the_peak_of_full_is_predicted_to_the_byte(blocks, rows, width, hidden):
    """S = rows · width numbers of an input, H = rows · hidden of what is between, P of each of two matrices.

    While block j of n is differentiated there are all parameters, the gradients of the blocks behind it, the
    inputs of it and of those before, the output of the last, the loss and its gradient. Besides, one after
    the other: what comes back, with the second pass's product and its tanh; with tanh, its gradient and that of
    `down`; then tanh and the gradients on both of its sides; at last that of its input, of the block's, and
    both matrices'."""
    S, H, P = rows * width, rows * hidden, width * hidden
    found, grads = peak_of(recompute, blocks, rows, width, hidden)
    _, plain = peak_of(lambda block, x: block(x), blocks, rows, width, hidden)
    assert all(map(torch.equal, grads, plain))
    moments = []
    for j in range(blocks):
        always = 2 * P * blocks + 2 * P * (blocks - 1 - j) + (j + 1) * S + S + 2
        dy, dx = S * (j < blocks - 1), S * (j > 0)
        moments += [dy + 2 * H, dy + 2 * H + P, 3 * H + P, H + dx + 2 * P]
        moments[-4:] = [always + moment for moment in moments[-4:]]
    assert found == 8 * max(moments)


@pytest.mark.parametrize("layers, held", [(2, 1), (5, 1), (7, 2), (10, 3), (6, 6), (4, 9), (16, 3)])
def test_revolve_runs_as_often_as_its_plan(layers, held):
    """Segments inside segments make the plan's forwards, no more, and hold as many inputs as it says."""
    forwards, s, b, h, a = fewest_forwards(layers, held) + layers, 8, 1, 16, 2
    flops = flops_of_a_block("none", s, b, h, a) // 3
    whole = flops_of_a_block(f"revolve:{held}", s, b, h, a, early_stop=False, blocks=layers)
    assert whole == 2 * layers * flops + forwards * flops
    config = GPTConfig(d_model=h, num_heads=a, num_layers=layers, **(PAPER | dict(dropout=0.0)))
    model = GPT(config, layers=range(1, layers + 1), attention=naive_attention, dtype=torch.float16)
    with SavedTensors(GPT(config, layers=[1], attention=naive_attention, dtype=torch.float16)) as one:
        x = torch.zeros(b, s, h, dtype=torch.float16, requires_grad=True)
        one.module(x, torch.arange(s))
    recompute_in(model, Strategy(recompute=f"revolve:{held}"), None, Places())
    with SavedTensors(model) as saved:
        model(x, torch.arange(s))
    inputs = min(held, layers) - (held >= layers)  # that of the last layer is in its graph
    assert saved.bytes == one.bytes + inputs * x.nbytes - (held == 1 and layers == 1) * x.nbytes
