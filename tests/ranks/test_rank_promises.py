"""What docstrings of the parallel parts promise about who is named, what is gathered once and what is let go, where
one line would break it; on one rank, or dry."""

import weakref

import pytest
import torch
from torch import nn

from minitrain import collectives, launch
from minitrain.data_parallel import states
from minitrain.data_parallel.bucketed import GradReducer
from minitrain.data_parallel.zero1 import Zero1
from minitrain.data_parallel.zero2 import Zero2, grad_of
from minitrain.data_parallel.zero3 import Zero3
from minitrain.model.config import ExpertsConfig
from minitrain.model.training.optim import AdamW
from minitrain.plan.strategy import MOST_CELLS, Strategy
from minitrain.ranks.checks import MOST
from minitrain.ranks.launch import dryrun
from minitrain.ranks.ledger import Ledger
from minitrain.systems.context.dynamic_sequence import next_cut
from minitrain.systems.data_parallel.negotiated import NegotiatedReducer
from minitrain.systems.tensor_parallel.optimus import norm_forward
from minitrain.tensor_parallel import sequence, vocabulary
from tests.parallel import small


def vectors(number: int, **how) -> nn.ParameterList:
    """Named "0", "1", ..: each one longer than the one before."""
    return nn.ParameterList([torch.ones(1 + n, **how) for n in range(number)])


def sgd(params):
    return torch.optim.SGD(params, lr=1.0)


def message(call) -> str:
    with pytest.raises(ValueError) as caught:
        call()
    return str(caught.value)


# ---- data parallelism ------------------------------------------------------------------------------------


def who_is_named():
    world = collectives.world()
    zeros = [message(make(vectors(6), world, sgd).finish) for make in (Zero1, Zero2)]
    zero = Zero1(vectors(6), world, sgd)
    for param in zero.trainable[-2:]:
        param.sum().backward()
    zeros.append(message(zero.finish))
    reducers = [message(make(vectors(7), world).finish) for make in (GradReducer, NegotiatedReducer)]
    left = message(lambda: Zero1(vectors(6), world, lambda params: sgd(params[:1])))
    return [text.split(";")[0] for text in (*zeros, *reducers, left)]


def test_of_what_is_missing_the_first_are_named():
    """In the order of buckets, the last parameter first; of an optimizer's in that of the model."""
    assert launch.run(who_is_named, ranks=1)[0] == [
        "no gradient for 5, 4, 3",
        "no gradient for 5, 4, 3",
        "no gradient for 3, 2, 1",
        "no gradient for [(7,), (6,), (5,)]",
        "parameters [0, 1, 2, 3, 4] got no gradient on this rank",
        "make_optimizer left out 1, 2, 3 of the tensors it was given",
    ]


def gathered():
    zero = Zero1(vectors(5), collectives.world(), AdamW)
    for param in zero.trainable:
        param.sum().backward()
    zero.finish()
    zero.step()
    calls = []
    for whole in (states.full_tensors, states.full_grads, states.full_state_dict):
        with Ledger() as ledger:
            whole(zero)
        calls.append(ledger.num_calls("all_gather"))
    return calls


def test_a_buffer_is_gathered_once_for_all_its_parameters():
    """With its states: weights and two moments."""
    assert dryrun.run(gathered, ranks=2) == [1, 1, 3]


def first_states():
    made = []

    def adagrad(params):
        optimizer = torch.optim.Adagrad(params, lr=1.0)
        made.extend(weakref.ref(state["sum"]) for state in optimizer.state.values())
        return optimizer

    zero = Zero1(vectors(3), collectives.world(), adagrad)
    return zero.optimizer is not None and len(made), [ref() is None for ref in made]


def test_first_states_of_wholes_are_gone_when_a_rank_has_its_parts():
    assert launch.run(first_states, ranks=1)[0] == (3, [True] * 3)


class Remembers(torch.optim.SGD):
    """A list in each state."""

    def step(self):
        for param in self.param_groups[0]["params"]:
            self.state[param].setdefault("history", []).append(1)


def lists_in_states():
    zero = Zero1(vectors(2), collectives.world(), lambda params: Remembers(params, lr=1.0))
    zero.optimizer.step()
    saved = states.full_state_dict(zero)
    for _ in range(2):
        zero.optimizer.step()
        states.load_full_state_dict(zero, saved)
    zero.optimizer.step()
    return [state["history"] for state in saved["optimizer"].values()]


def test_lists_in_states_are_copied_out_and_in():
    assert launch.run(lists_in_states, ranks=1)[0] == [[1], [1]]


class FromTheEnd(nn.Sequential):
    def forward(self, x):
        for layer in reversed(self):
            x = layer(x)
        return x


def units_in_another_order():
    model = FromTheEnd(*(nn.Linear(4, 4, bias=False) for _ in range(4)))
    zero, calls = Zero3(model, collectives.world(), sgd), []
    with torch.no_grad():
        for _ in range(2):  # learns it, and frees what came too early before
            model(torch.ones(1, 4))
        with Ledger() as ledger:
            model(torch.ones(1, 4))
        gathered = sum(flat.whole.untyped_storage().size() > 0 for flat in zero.shards)
        calls += [ledger.num_calls("all_gather"), gathered]
        with Ledger() as ledger:
            zero.shards[0].start(zero.gather)
            zero.shards[0].free()
        calls += [type(event).__name__ for event in ledger.events if hasattr(event, "id")]
    return calls


def test_the_order_of_units_is_learnt_and_what_was_gathered_for_nothing_is_waited_for():
    assert dryrun.run(units_in_another_order, ranks=2) == [4, 0, "Issue", "Wait"]


# ---- tokens and matrices ---------------------------------------------------------------------------------


def beside_logits():
    logits, targets = torch.ones(1, 64, 32), torch.zeros(1, 64, dtype=torch.int64)
    with Ledger() as ledger:
        logits.sum()
        before = ledger.live_bytes
        kept = vocabulary.cross_entropy_forward(logits, targets, collectives.world(), 128)
        assert len(kept) == 5
        return (ledger.peak_bytes - before) / logits.nbytes


def test_beside_logits_a_loss_has_room_for_the_softmax_alone():
    """And for some numbers of each token, a 32nd of it each."""
    assert 1 < dryrun.run(beside_logits, ranks=4) < 1.5


def peak_of_backward(matrices):
    x, dy, weight = torch.ones(1, 64, 32), torch.ones(1, 256, 8), torch.ones(8, 32)
    with Ledger() as ledger:
        for given in (x, dy, weight):
            given.sum()
        wanted = [True] * matrices
        sequence.column_backward([dy] * matrices, x, [weight] * matrices, wanted, collectives.world())
    return ledger.peak_bytes


def test_gradients_of_one_input_are_added_up_in_place():
    """With a small matrix more a backward needs no more memory."""
    one, *more = (dryrun.run(peak_of_backward, number, ranks=4) for number in (1, 2, 3))
    assert more == [one, one]


def test_of_equal_dims_the_first_is_cut():
    assert next_cut([3], (1, 2, 3), home=3) == 1 and next_cut([], (1, 2, 3), home=2) == 2


# ---- a strategy ------------------------------------------------------------------------------------------


def test_the_largest_and_the_least_that_a_strategy_takes():
    """The value that is just allowed passes, the next is refused and told what is allowed."""
    config, of_experts = small(max_positions=16), small(experts=ExpertsConfig(4, 2))
    rows, cut, words = Strategy(dp=2, microbatches=2), Strategy(cp=2), ["full", "none"] * 2
    for make, good, bad, said in (
        (lambda n: Strategy(pp=2, microbatches=n), MOST_CELLS // 2, MOST_CELLS // 2 + 1, "2,097,154 cells"),
        (lambda n: Strategy(microbatches=n), MOST, MOST + 1, f"1 to {MOST:,}"),
        (lambda n: Strategy(loss_scale=n), 1.0, 0.5, "1 or more"),
        (lambda n: Strategy(dp=2, ep=2, ep_shadow=n).check(of_experts, 2), 4, 5, "at most 4"),
        (lambda n: Strategy(recompute=",".join(words[:n])).check(config, 1), 3, 4, "at most 2"),
        (lambda n: rows.check_batch(config, n, 16), 4, 3, "at least 4 rows"),
        (lambda n: rows.check_batch(config, 4, n), 16, 17, "max_positions 16"),
        (lambda n: cut.check_batch(config, 1, n), 8, 7, "pad the sequence to 8"),
        (lambda n: cut.check_batch(config, 1, n), 12, 9, "pad the sequence to 12"),
    ):
        make(good)
        assert said in message(lambda: make(bad))


def test_pieces_of_a_sequence_and_the_first_factor_of_a_loss():
    usp, slices = dict(cp=4, core="usp", ulysses=2), dict(pp=2, schedule="terapipe", slices=3)
    ways = {2: dict(cp=2, layout="striped"), 4: dict(cp=2), 1: slices, 12: slices | dict(cp=2)}
    assert all(Strategy(**way).pieces == pieces for pieces, way in ways.items())
    assert Strategy(**usp).pieces == Strategy(**usp, layout="striped").pieces == 4  # not 2 x 4
    factors = [Strategy(precision="float16", loss_scale=scale).first_loss_scale for scale in (0.0, 8.0)]
    assert factors == [65536.0, 8.0] and Strategy(loss_scale=8.0).first_loss_scale == 8.0


def on_one_rank():
    world, adagrad = collectives.world(), lambda params: torch.optim.Adagrad(params, lr=1.0)
    pair = [nn.Parameter(torch.ones(size)) for size in (3, 5)]
    reducer = GradReducer(pair, world)
    pair[1].sum().backward()
    with pytest.raises(ValueError, match=r"^no gradient for \[\(3,\)\];"):
        reducer.finish()
    reducer.close()
    for param in pair:
        param.grad = None

    mixed = nn.ParameterList([torch.ones(3), torch.ones(3, dtype=torch.bfloat16)])
    zero = Zero1(mixed, world, adagrad)
    found = [flat.shard.dtype for flat in zero.shards]
    assert found == [param.dtype for flat in zero.shards for param in flat.params]
    assert set(zero.optimizer.state) == {flat.shard for flat in zero.shards}

    zero, sent = Zero2(nn.ParameterList(pair), world, adagrad, bucket_bytes=1), []
    zero.driven = True
    for param in zero.trainable:
        param.grad = torch.ones_like(param)
    with collectives.observe(lambda kind, subject: sent.append(subject.shape) if kind == "issue" else None):
        zero.on_microbatch_grads(zero.trainable)
        zero.finish()
    return sent


def test_what_lacks_a_gradient_is_counted_dtypes_keep_apart_and_the_last_parameter_goes_first():
    assert launch.run(on_one_rank, ranks=1) == [[(5,), (3,)]]


def test_a_missing_gradient_is_zeros_of_the_gradient_s_dtype():
    param = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    param.grad_dtype = torch.float32
    assert grad_of(param).dtype == torch.float32


def ids_outside():
    found = []
    for ids in ([[2, -3]], [[2, 9]]):
        with pytest.raises(ValueError) as caught:
            vocabulary.owned(torch.tensor(ids), 8, 8, collectives.world(), "token %s; the vocabulary is %s")
        found.append(str(caught.value))
    return found


def test_an_id_on_either_side_of_the_vocabulary_is_told():
    found = launch.run(ids_outside, ranks=1)[0]
    assert found == [f"token {wrong}; the vocabulary is 8 (0..7)" for wrong in (-3, 9)]


def normed():
    x, generator = torch.empty(8, 512, dtype=torch.bfloat16), torch.Generator().manual_seed(0)
    x.normal_(generator=generator)
    y, mean, scale = norm_forward(x, torch.ones(512, dtype=x.dtype), 1e-5, True, collectives.world())
    exact = nn.functional.layer_norm(x.float(), (512,), eps=1e-5).bfloat16()
    return y.dtype, mean.dtype, scale.dtype, (y == exact).float().mean().item()


def test_norms_on_a_grid_are_added_up_in_float32():
    *dtypes, equal = launch.run(normed, ranks=1)[0]
    assert dtypes == [torch.bfloat16, torch.float32, torch.float32] and equal > 0.99
