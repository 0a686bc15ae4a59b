"""The state of a run: random states, what is told when they cannot come back, how much there is to save."""

from fractions import Fraction
from pathlib import Path

import pytest
import torch
from torch import nn

from minitrain import collectives, launch
from minitrain.compose.parallelize import parallelize
from minitrain.compose.run import bytes_to_save, check_names, shapes_of
from minitrain.data_parallel import states
from minitrain.data_parallel.states import copied
from minitrain.model.config import ExpertsConfig, GPTConfig, presets
from minitrain.model.data.batches import Rows, random_tokens
from minitrain.model.training.optim import AdamW
from minitrain.plan.accounting import parameters
from minitrain.plan.strategy import Strategy
from minitrain.ranks.launch import dryrun
from tests.saving import Checkpoint, all_files, load, save, saved_in


class Dropping(nn.Module):
    """Draws from torch's generator in every forward."""

    def __init__(self):
        super().__init__()
        self.table, self.drop, self.out = nn.Embedding(11, 6), nn.Dropout(0.3), nn.Linear(6, 11)

    def forward(self, tokens, positions=None):
        return self.out(self.drop(self.table(tokens)))


def start(seed: int = 1, zero: int = 1):
    torch.manual_seed(seed)
    model = Dropping().double()
    torch.manual_seed(10 * seed + collectives.world().rank())  # each rank drops others
    strategy = Strategy(dp=collectives.world().size(), zero=zero, precision="float64")
    return parallelize(model, strategy, lambda params: AdamW(params, lr=1e-2))


def steps(run, first: int) -> list[float]:
    def draw(step):
        return lambda _, rank, ranks: random_tokens(step, rank, ranks, 4, 6, 11, seed=2)

    found = [run.step(run.batch(Rows(draw(n), 4, 6), n)).loss for n in range(first, first + 5)]
    return [run.total(loss).item() for loss in found]


# ---- what must not be left out ---------------------------------------------------------------------------


def saved_and_left_out(folder: Path):
    run = start()
    steps(run, 0)
    written = save(run, folder)
    after, parameters_after = steps(run, 5), run.state_dict()["parameters"]
    checkpoint = all_files(folder, written)
    found = {}
    for what in ("nothing", "moments", "step count", "random states", "position"):
        again, saved = start(seed=2), saved_in(checkpoint)
        if what == "moments":
            for piece in (piece for piece in list(saved.entries) if "/exp_avg" in piece):
                del saved.entries[piece]
            saved._states = {}
        if what == "step count":
            for numbers in saved.plain["numbers"].values():
                numbers["step"] = 1
        before = torch.get_rng_state()
        if what == "moments":
            saved.plain["numbers"] = {}
        lost = again.load_pieces(saved)
        if what == "random states":
            torch.set_rng_state(before)
        losses = steps(again, 4 if what == "position" else 5)
        same = all(torch.equal(x, parameters_after[n]) for n, x in again.state_dict()["parameters"].items())
        found[what] = losses == after, same, max(abs(a - b) for a, b in zip(losses, after)), lost
    return found, checkpoint


@pytest.fixture(scope="module")
def going_on(tmp_path_factory):
    return launch.run(saved_and_left_out, tmp_path_factory.mktemp("run"), ranks=2)


def test_a_run_goes_on_to_the_bit_and_not_without_any_part_of_its_state(going_on):
    """Five losses and the parameters after them, with torch's dropout; moments, count of steps and position
    are each needed. Random states are not: what a step drops follows from its number."""
    for found, _ in going_on:
        assert found.pop("nothing") == found.pop("random states") == (True, True, 0.0, [])
        assert len(found) == 3
        for what, (alike, same, apart, lost) in found.items():
            assert not alike and not same and apart > 1e-6 and not lost, what


def on_other_ranks(checkpoint: Checkpoint):
    run, before = start(seed=2), torch.get_rng_state()
    return load(run, checkpoint), torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("ranks", [1, 3])
def test_random_states_are_left_where_other_ranks_go_on(going_on, ranks):
    text = f"random states of 2 ranks: this run has {ranks}, which draw on as they are"
    assert launch.run(on_other_ranks, going_on[0][1], ranks=ranks) == [([text], True)] * ranks


def test_random_states_of_each_rank_are_its_own():
    def rank():
        run = start()
        pieces = [piece for piece in run.pieces() if piece.name.startswith("random")]
        return [(piece.name, piece.replicas, piece.values.tolist()) for piece in pieces]

    (one,), (other,) = launch.run(rank, ranks=2)
    assert (one[0], other[0]) == ("random/rank-0/cpu", "random/rank-1/cpu") and one[1] == other[1] == 1
    assert one[2] != other[2]


def scales(folder: Path):
    """Products in few bits, saved without their histories: these begin anew, and that is said."""
    config = GPTConfig(vocab_size=29, d_model=16, num_layers=1, num_heads=4, max_positions=8)

    def begin(products):
        strategy = Strategy(dp=2, precision="float64", products=products)
        return parallelize(config, strategy, lambda params: AdamW(params), seed=3)

    found = []
    for products in ("plain", "fp8_delayed"):
        run = begin(products)
        batch = run.batch(Rows(lambda _, rank, ranks: random_tokens(0, rank, ranks, 4, 8, 29), 4, 8), 0)
        run.step(batch)
        checkpoint = all_files(folder / products, save(run, folder / products))
        again = begin("fp8_delayed")
        again.step(batch)
        lost = load(again, checkpoint)
        found.append((lost, {n: x.tolist() for n, x in again.state_dict()["amax"].items()}))
    return found, {n: x.tolist() for n, x in run.state_dict()["amax"].items()}


def test_histories_of_scales(tmp_path):
    for (without, with_them), expected in launch.run(scales, tmp_path, ranks=2):
        assert without[0] == [f"histories of {len(expected)} scales, which begin anew"]
        assert not any(any(map(any, (x if isinstance(x[0], list) else [x]))) for x in without[1].values())
        assert with_them == ([], expected) and expected


def tensors_of(value):
    if isinstance(value, torch.Tensor):
        return [value]
    return [x for inner in value.values() for x in tensors_of(inner)] if isinstance(value, dict) else []


def given_away(zero: int):
    """Bytes that tensors of a state, or parameters given alone, keep alive beside their own. They are written
    over: is the run's next state what the first was? That is loaded: does training leave it as it is?
    """
    experts = ExpertsConfig(4, 2, "deepseek", bias_speed=0.1)
    config = GPTConfig(vocab_size=29, d_model=16, num_layers=1, num_heads=4, max_positions=8, experts=experts)
    strategy = Strategy(dp=2, zero=zero, precision="float64", products="fp8_delayed")
    run = parallelize(config, strategy, lambda params: AdamW(params), frozen=("layers.1.norm1.*",))
    run.step(run.batch(Rows(lambda _, rank, ranks: random_tokens(0, rank, ranks, 4, 8, 29), 4, 8), 0))
    state = run.state_dict()
    before, wholes = copied(state), [states.full_tensor(run.sync, param) for param in run.sync.names]
    excess = sum(x.untyped_storage().nbytes() - x.nbytes for x in (*tensors_of(state), *wholes))
    for x in (*tensors_of(state), *wholes):
        x.zero_()
    given = all(map(torch.equal, tensors_of(before), tensors_of(run.state_dict())))
    expected = tensors_of(copied(before))
    run.load_state_dict(before)
    run.step(run.batch(Rows(lambda _, rank, ranks: random_tokens(1, rank, ranks, 4, 8, 29), 4, 8), 1))
    left = all(map(torch.equal, tensors_of(before), expected))
    run.load_state_dict({what: state for what, state in before.items() if what != "amax"})
    anew = not any(x.any() for x in run.state_dict()["amax"].values())  # histories that a state has not
    return excess, given and left and anew, {*before}, sum(bool(x.any()) for x in expected)


def test_what_a_run_gives_away_or_takes_shares_no_memory_with_it():
    """Weights, also frozen ones, moments, biases of routers, histories of scales."""
    for found in launch.run(lambda: [given_away(zero) for zero in (0, 1, 3)], ranks=2):
        for excess, alike, kinds, not_zero in found:
            assert not excess
            assert alike and kinds == {"parameters", "optimizer", "optimizer_name", "amax"}
            assert not_zero > 40


def test_a_state_of_another_optimizer_is_refused():
    """With as many states, of the same shapes."""
    config = GPTConfig(vocab_size=29, d_model=16, num_layers=1, num_heads=4, max_positions=8)

    def rank():
        kinds = AdamW, torch.optim.Adam, AdamW
        runs = [parallelize(config, Strategy(), lambda params, kind=kind: kind(params)) for kind in kinds]
        runs[2].load_state_dict(runs[0].state_dict())
        with pytest.raises(ValueError, match="are of AdamW, and this run updates by Adam: take the same"):
            runs[1].load_state_dict(runs[0].state_dict())

    launch.run(rank, ranks=1)


# ---- names -----------------------------------------------------------------------------------------------


def test_another_model_is_named():
    wanted = shapes_of(GPTConfig(vocab_size=29, d_model=16, num_layers=2, num_heads=4))
    check_names(wanted, wanted)
    deep = shapes_of(GPTConfig(vocab_size=29, d_model=16, num_layers=4, num_heads=4))
    wide = wanted | {"layers.0.tokens": (31, 16)}
    for found, words in (
        (deep, ", this model has none"),
        (wide, "layers.0.tokens [31, 16], this model [29, 16]"),
        ({n: x for n, x in wanted.items() if n != "layers.0.tokens"}, "layers.0.tokens not at all"),
        (wanted | {"layers.1.more": ()}, "layers.1.more [], this model has none"),
    ):
        with pytest.raises(ValueError) as raised:
            check_names(found, wanted)
        assert words in str(raised.value) and "another model" in str(raised.value)


# ---- how much there is to save ---------------------------------------------------------------------------


def of_rank(name: str, strategy: Strategy):
    """What it writes, and its part of what it holds, of each byte a share of those that hold it."""
    run = parallelize(presets[name], strategy, lambda params: AdamW(params))
    written = bytes_to_save(run)
    held = sum(Fraction(piece.values.nbytes, piece.replicas) for piece in run.pieces())
    return written, held, len(run.sync.shards)


@pytest.mark.parametrize(
    "name, pp, nominal, terabytes",
    [("llama3-70b", 40, 70e9, 0.98), pytest.param("llama3.1-405b", 63, 405e9, 5.67, marks=pytest.mark.slow)],
)
def test_a_checkpoint_has_14_bytes_a_parameter(name, pp, nominal, terabytes):
    """2 of bfloat16 weights, 4 of masters, 8 of moments, over tp 8, pp, dp 16 and ZeRO-1. Ranks of tp are alike,
    and so are the stages between the first and the last, and the dp ranks before the last, whose slices may
    end in padding; each of them writes its share of that."""
    strategy, total = Strategy(dp=16, pp=pp, tp=8, zero=1, precision="bfloat16", microbatches=pp), 0
    for stage, stages in ((0, 1), (1, pp - 2), (pp - 1, 1)):
        for dp, ranks in ((0, 15), (15, 1)):
            rank = (dp * pp + stage) * 8
            written, held, buffers = dryrun.run(of_rank, name, strategy, rank=rank, ranks=strategy.ranks)
            assert set(written) == {"parameters", "optimizer"}
            assert (
                abs(sum(written.values()) - held) < 8 * 2 * 3
            )  # an element of each dtype, of each kind of copies
            total += held * 8 * stages * ranks
    count = parameters(presets[name])
    assert total == 14 * count and abs(count / nominal - 1) < 0.01 and 14 * nominal == terabytes * 1e12


def test_the_same_bytes_in_a_real_run_and_a_dry_one():
    config = GPTConfig(vocab_size=29, d_model=16, num_layers=2, num_heads=4, max_positions=8)
    strategy = Strategy(dp=2, tp=2, zero=1, precision="bfloat16")

    def run(count: bool):
        run = parallelize(config, strategy, lambda params: AdamW(params))
        if count:
            run.step(run.batch(Rows(lambda _, rank, ranks: random_tokens(0, rank, ranks, 4, 8, 29), 4, 8), 0))
        return dict(bytes_to_save(run))

    real = launch.run(run, True, ranks=4)
    for rank, found in enumerate(real):
        assert found.pop("random") == torch.get_rng_state().nbytes
        assert dryrun.run(run, False, rank=rank, ranks=4) == found
    assert sum(sum(found.values()) for found in real) == 14 * parameters(config)
