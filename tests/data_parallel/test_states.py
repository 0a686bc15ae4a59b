"""What a Sync keeps, saved in pieces and loaded into every other kind of Sync, optimizer and keeper of states."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from minitrain import collectives, launch
from minitrain.compose.parallelize import parallelize
from minitrain.data_parallel import states
from minitrain.data_parallel.states import WholeTensors, copied
from minitrain.model.data.batches import Rows, random_tokens
from minitrain.model.training.optim import AdamW
from minitrain.plan.strategy import PARO_SHARDINGS, Strategy
from minitrain.systems.memory.files import update_in_files
from tests.parallel import small
from tests.saving import (
    all_files,
    check_layout,
    differing,
    load,
    save,
    state_of,
    wrong_cover,
    wrong_holders,
    wrong_shares,
)

OPTIMIZERS = {
    "ours": lambda params: AdamW(params, lr=1e-2),
    "torch's": lambda params: torch.optim.AdamW(params, lr=1e-2),  # its step is a tensor
    "momentum": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
    "no states": lambda params: torch.optim.SGD(params, lr=1e-2),
    "early states": lambda params: torch.optim.Adagrad(params, lr=1e-2),
    "none": None,
}


class Own(nn.Module):
    """Not a GPT: odd sizes, a number, a frozen parameter, torch's dropout, a weight that does not lie in rows."""

    def __init__(self, turned: bool = False):
        super().__init__()
        self.table, self.norm, self.drop = nn.Embedding(11, 5), nn.LayerNorm(5), nn.Dropout(0.2)
        self.temperature = nn.Parameter(torch.rand(()))
        self.out = nn.Linear(5, 11)
        if turned:
            self.out.weight = nn.Parameter(self.out.weight.detach().t().contiguous().t())
        self.norm.bias.requires_grad_(False)

    def forward(self, tokens, positions=None):
        return self.out(self.norm(self.drop(self.table(tokens)))) * self.temperature


def rows(step: int) -> Rows:
    def draw(_, rank, ranks):
        return random_tokens(step, rank, ranks, 8, 6, 11, seed=2)

    return Rows(draw, 8, 6)


def start(layout: dict, optimizer: str = "ours", seed: int = 1, turned: bool = False, thawed: bool = False):
    torch.manual_seed(seed)
    model = Own(turned).double()
    with torch.no_grad():
        model.norm.bias.normal_()
    model.norm.bias.requires_grad_(thawed)
    torch.manual_seed(100 * seed + collectives.world().rank())
    dp = collectives.world().size()
    strategy = Strategy(**(dict(dp=dp, precision="float64", bucket_bytes=300) | layout))
    return parallelize(model, strategy, OPTIMIZERS[optimizer])


def steps(run, first: int, count: int = 2) -> list[float]:
    found = (run.step(run.batch(rows(step), step)).loss for step in range(first, first + count))
    return [run.total(loss).item() for loss in found]


def said(act) -> str:
    try:
        act()
    except ValueError as error:
        return str(error)
    return "nothing"


# ---- every stage, every optimizer ------------------------------------------------------------------------

STAGES = [dict(zero=zero) for zero in (0, 1, 2, 3)]
WORDS = [*STAGES, *(dict(zero=word, node=2) for word in PARO_SHARDINGS)]


def round_trips(layouts: list[dict], optimizers: list[str], folder: Path):
    """Each layout saves and goes on; the next one, started from other numbers, loads that and goes on too."""
    found = []
    for optimizer in optimizers:
        for number, (layout, other) in enumerate(zip(layouts, layouts[1:] + layouts[:1])):
            run = start(layout, optimizer)
            steps(run, 0)
            here = folder / f"{optimizer}-{number}"
            checkpoint, told = all_files(here, save(run, here)), check_layout(run)
            whole, after = state_of(run), steps(run, 2)
            again, across = (start(which, optimizer, seed=2) for which in (layout, other))
            lost, wrong, losses = [], [], [after]
            for one in (again, across):  # random states are of a process: loaded right before the steps
                lost += load(one, checkpoint)
                wrong += differing(one, whole)
                losses.append(steps(one, 2))
            found.append((layout, optimizer, told, (wrong, lost, losses)))
    return found


def check_round_trips(results) -> None:
    for of_ranks in zip(*results):
        layout, optimizer = of_ranks[0][:2]
        held, written = zip(*(told for _, _, told, _ in of_ranks))
        assert not wrong_holders(held) and not wrong_shares(held, written), (layout, optimizer)
        assert not wrong_cover(written), (layout, optimizer)
        for _, _, _, (wrong, lost, (after, again, across)) in of_ranks:
            assert not wrong and not lost, (layout, optimizer, wrong, lost)
            assert again == after, (layout, optimizer)
            assert max(abs(a - b) for a, b in zip(across, after)) < 1e-12, (layout, optimizer)


@pytest.mark.slow
def test_each_stage_and_each_word_loads_what_another_saved(tmp_path):
    """The same layout goes on bit for bit, torch's dropout included."""
    check_round_trips(launch.run(round_trips, WORDS, ["torch's"], tmp_path, ranks=4, timeout_s=200))


def test_whatever_an_optimizer_keeps(tmp_path):
    """A step that is a tensor, a momentum, nothing, states that are there before the first step, no optimizer."""
    for stages, some in ((STAGES[:2], [*OPTIMIZERS][::2]), (STAGES[1::2], [*OPTIMIZERS][1::2])):
        check_round_trips(launch.run(round_trips, stages, some, tmp_path, ranks=2, timeout_s=200))


# ---- states that are not there ---------------------------------------------------------------------------


def without_states(folder: Path):
    found = []
    for zero in (0, 1, 3):
        fresh = start(dict(zero=zero))
        checkpoint = all_files(folder / str(zero), save(fresh, folder / str(zero)))
        expected = steps(fresh, 0)
        trained = start(dict(zero=zero), seed=2)
        steps(trained, 5)
        load(trained, checkpoint)
        left = [key for one in trained.sync.shards for key in states.state_of(trained.sync, one)]
        found.append((left, expected == steps(trained, 0)))
        half = folder / f"half-{zero}"
        frozen = start(dict(zero=zero))
        steps(frozen, 0)
        checkpoint = all_files(half, save(frozen, half))
        thawed = start(dict(zero=zero), seed=2, thawed=True)
        before, full = state_of(thawed), state_of(frozen)
        refused = said(lambda: load(thawed, checkpoint))
        whole = said(lambda: thawed.load_state_dict(frozen.state_dict()))
        found.append((refused, whole, differing(thawed, full if zero == 0 else before)))
        turned = start(dict(zero=0), seed=2, turned=True)
        load(turned, checkpoint)
        found.append(differing(turned, full))
    return found


def test_states_before_the_first_step_and_of_some_parameters_only(tmp_path):
    """Loading no states leaves none. Parameters that are updated together need equal numbers; others do not. A
    weight that does not lie in rows is filled as it lies."""
    for found in launch.run(without_states, tmp_path, ranks=2):
        for left, alike in found[::3]:
            assert not left and alike
        for zero, (refused, whole, wrong) in zip((0, 1, 3), found[1::3]):
            assert not wrong, zero
            if zero == 0:
                assert refused == whole == "nothing"
            else:
                for text in (refused, whole):
                    assert "norm.bias []" in text or "norm.bias has the states []" in text, text
                    assert "('step', 2)" in text and "use zero=0" in text and "\n" not in text
        assert not any(found[2::3])


# ---- who keeps the states --------------------------------------------------------------------------------


def kept_elsewhere(folder: Path):
    """A host with delayed updates, files, a plain optimizer: each loads what the others saved."""

    def keepers(seed):
        for name, layout in (
            ("plain", dict(zero=1)),
            ("host", dict(zero=2, offload="optimizer")),
            ("delayed", dict(zero=3, offload="optimizer", delayed_update=True)),
            ("files", dict(zero=1)),
        ):
            run = start(layout, seed=seed)
            if name == "delayed":
                run.sync.listener.warmup_steps = 1
            yield name, run, update_in_files(run.sync, folder, 16) if name == "files" else None

    found, stores = [], []
    for name, run, store in keepers(1):
        stores.append(store)
        steps(run, 0, 3)
        here = folder / name
        checkpoint = all_files(here, save(run, here))
        whole, after = state_of(run), steps(run, 3)
        for other, again, store in keepers(2):
            stores.append(store)
            steps(again, 7, 4)  # more than the checkpoint has made
            load(again, checkpoint)
            wrong, at = differing(again, whole), again.sync.listener.updates if again.sync.listener else 3
            found.append((name, other, wrong, at, (other == name and steps(again, 3) == after)))
            if store:
                store.close()
    for store in filter(None, stores):
        store.close()
    return found


def test_states_on_the_host_and_in_files(tmp_path):
    """Delayed updates are waited for, and go on to be delayed after as many steps."""
    for found in launch.run(kept_elsewhere, tmp_path, ranks=2, timeout_s=120):
        assert len(found) == 16
        for name, other, wrong, updates, same in found:
            assert not wrong and updates == 3, (name, other)
            assert same == (name == other), (name, other)


def go(run, first, clip=None):
    """Two steps of a GPT -> their losses."""

    def draw(step, _, rank, ranks):
        return random_tokens(step, rank, ranks, 4, 8, 29, seed=2)

    batches = (run.batch(Rows(partial(draw, n), 4, 8), n) for n in range(first, first + 2))
    return [run.total(run.step(batch, clip).loss).item() for batch in batches]


def late(folder: Path):
    """Updates that have not been checked yet, on two stages with a tied table."""

    def begin(seed):
        layout = dict(pp=2, microbatches=2, post_validation=True, precision="float64")
        return parallelize(small(), Strategy(**layout), OPTIMIZERS["ours"], seed=seed)

    run = begin(3)
    go(run, 0, 0.1)
    checkpoint, told = all_files(folder, save(run, folder)), check_layout(run)
    whole, after, again = state_of(run), go(run, 2, 0.1), begin(4)
    go(again, 5, 0.1)
    load(again, checkpoint)
    return told, differing(again, whole), after == go(again, 2, 0.1)


def test_a_step_that_may_be_taken_back_is_settled_first(tmp_path):
    results = launch.run(late, tmp_path, ranks=2)
    assert all(not wrong and alike for _, wrong, alike in results)
    held, written = zip(*(told for told, _, _ in results))
    assert not wrong_holders(held) and not wrong_shares(held, written) and not wrong_cover(written)
    assert any(len(piece.alike) == 2 for piece in held[0]), "the tied table is on both"


# ---- tensors with scales ---------------------------------------------------------------------------------


def scaled(folder: Path):
    def begin(zero, seed=3):
        layout = Strategy(dp=2, zero=zero, precision="fp8_lm", bucket_bytes=3000)
        return parallelize(small(), layout, OPTIMIZERS["ours"], seed=seed)

    results = []
    for zero in (0, 1):
        run = begin(zero)
        go(run, 0)
        here = folder / str(zero)
        checkpoint, told = all_files(here, save(run, here)), check_layout(run)
        full, after = run.state_dict(), go(run, 2)
        for other in (0, 1):
            again = begin(other, seed=4)
            load(again, checkpoint)
            loaded = again.state_dict()
            same = all(torch.equal(loaded["parameters"][n], x) for n, x in full["parameters"].items())
            flat = [
                (loaded["optimizer"][n][k], x) for n, s in full["optimizer"].items() for k, x in s.items()
            ]
            states = all(torch.equal(torch.as_tensor(ours), torch.as_tensor(x)) for ours, x in flat)
            results.append((same, states, set(next(iter(full["optimizer"].values()))), go(again, 2) == after))
        results.append((told, sum(x.numel() for x in full["parameters"].values())))
    plain = parallelize(small(), Strategy(dp=2, precision="bfloat16"), OPTIMIZERS["ours"])
    return results, said(lambda: load(plain, checkpoint))


def test_codes_with_scales_come_back_to_the_bit(tmp_path):
    """2 + 1 + 2 bytes per parameter, and numbers; dealt out or not, one layout goes on as the other."""
    found = launch.run(scaled, tmp_path, ranks=2, timeout_s=120)
    for results, refused in found:
        for one in (results[0], results[1], results[3], results[4]):
            assert one[0] and one[1] and one[3]
            assert {"mu", "step", "exp_avg_largest", "exp_avg_sq_largest"} < one[2]
        assert "torch.float16 in the checkpoint, [29, 16] torch.bfloat16 in this run" in refused
    for place in (2, 5):
        held, written = zip(*(results[place][0] for results, _ in found))
        assert not wrong_holders(held) and not wrong_shares(held, written) and not wrong_cover(written)
        bytes_ = sum(p.values.nbytes for pieces in written for p in pieces if p.values.dim())
        bytes_ -= sum(p.values.nbytes for pieces in written for p in pieces if p.name.startswith("random"))
        assert bytes_ == 5 * found[0][0][place][1]


# ---- from whole tensors ----------------------------------------------------------------------------------


def in_order():
    """Of each layout: the names by which what is kept is sorted, and the pieces with their places."""
    found = []
    for strategy in (Strategy(dp=2), Strategy(dp=2, zero=1), Strategy(dp=2, zero=3), Strategy(tp=2)):
        run = parallelize(small(num_layers=11), strategy, OPTIMIZERS["ours"], seed=3)
        names = [run.sync.names[one.params[0]] for one in states.all_shards(run.sync)]
        held = [(piece.name, piece.start) for piece in run.pieces() if not piece.name.startswith("random/")]
        found.append((names, held, strategy.zero or strategy.tp > 1))
    return found


def test_what_is_kept_comes_in_the_order_of_names():
    """So that ranks which hold the same meet at the same piece: layers.10 before layers.2 on all of them."""
    for (names, held, cut), (_, others, _) in zip(*launch.run(in_order, ranks=2)):
        assert names == sorted(names) and len(held) > 20
        assert cut or held == others


def test_what_is_loaded_is_a_copy():
    """Of a state in memory: training on does not change it. And numbers in nests are copied as well."""

    def rank():
        run = start(dict(zero=0))
        steps(run, 0)
        full = run.state_dict()
        before = copied(full)
        run.load_state_dict(full)
        steps(run, 2)
        pairs = [(full["parameters"][n], x) for n, x in before["parameters"].items()]
        pairs += [(full["optimizer"][n]["exp_avg"], x["exp_avg"]) for n, x in before["optimizer"].items()]
        return all(torch.equal(ours, x) for ours, x in pairs)

    assert all(launch.run(rank, ranks=2))
    nest = {"a": [torch.ones(2), {"b": 3}]}
    other = copied(nest)
    other["a"][0].zero_()
    assert nest["a"][0].sum() == 2 and other["a"][1] == {"b": 3}


@pytest.mark.parametrize("numbers", [{}, {"step": 3}])
def test_whole_tensors_as_what_pieces_are_filled_from(numbers):
    state = dict(exp_avg=torch.zeros(2, 3), norm=torch.ones(()), **numbers)
    whole = WholeTensors({"W": torch.ones(2, 3)}, {"W": state})
    assert whole.states_of("W") == {"exp_avg": (torch.float32, (2, 3)), "norm": (torch.float32, ())}
    assert whole.plain["numbers"] == {"W": numbers} and whole.states_of("V") == {}
