"""What readers bring along: a loss, cuts, a schedule of rates, batches, a module with draws and buffers of its own.
In every layout it does what it does in one process, or one line says why not.
"""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from minitrain import collectives, launch
from minitrain.checkpoint.store import Store
from minitrain.compose.parallelize import parallelize
from minitrain.compose.trainer import Trainer
from minitrain.model.config import ExpertsConfig
from minitrain.model.data.batches import MASKED, Rows, Text, rows_of
from minitrain.model.gpt import GPT, cross_entropy_sum
from minitrain.model.training.hyperparameters import Hyperparameters
from minitrain.model.training.step import Batch
from minitrain.moe.router import balance_loss
from minitrain.plan.strategy import Strategy
from minitrain.ranks.launch.report import RankError
from tests.parallel import TOLERANCE, small

B, T, V = 4, 8, 29
CONFIG = small()
EXACT = dict(precision="float64")
LAYOUTS = (
    Strategy(dp=2, zero=3, **EXACT), Strategy(tp=2, **EXACT),
    Strategy(tp=2, sequence_parallel=True, dp=2, **EXACT), Strategy(pp=2, microbatches=2, **EXACT),
    Strategy(pp=2, tp=2, microbatches=4, **EXACT), Strategy(cp=2, dp=2, **EXACT),
)  # fmt: skip


def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def rows_with(mask: float = 0.0) -> Rows:
    """Rows of drawn tokens; of the targets a part is masked."""

    def draw(step: int, rank: int, ranks: int):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(V, (B, T + 1), generator=generator)
        targets = tokens[:, 1:].clone()
        targets[torch.rand(B, T, generator=generator) < mask] = MASKED
        mine = rows_of(rank, ranks, B)
        return tokens[mine.start : mine.stop, :-1], targets[mine.start : mine.stop]

    return Rows(draw, B, T)


def losses_of(
    strategy: Strategy, mask: float = 0.0, config=CONFIG, steps: int = 2, **settings
) -> list[float]:
    def rank():
        run, rows = parallelize(config, strategy, sgd, **settings), rows_with(mask)
        losses = [run.total(run.step(run.batch(rows, step)).loss).item() for step in range(steps)]
        return [*losses, run.evaluate(run.batch(rows, steps)).item()]

    return launch.run(rank, ranks=strategy.ranks)[0]


def close(a: list[float], b: list[float]) -> bool:
    return max(abs(x - y) for x, y in zip(a, b, strict=True)) < TOLERANCE


# ---- a loss of one's own ---------------------------------------------------------------------------------


def smoothed(logits, targets):
    return F.cross_entropy(
        logits.flatten(0, -2), targets.flatten(), ignore_index=MASKED, reduction="sum", label_smoothing=0.1
    )


def entropy(logits, targets):
    """A term that wants whole rows of the logits, and the largest of them."""
    log_probs = logits.log_softmax(-1)
    bonus = (log_probs.exp() * log_probs).sum(-1) + 0.01 * logits.amax(-1)
    return cross_entropy_sum(logits, targets) + 0.1 * (bonus * (targets != MASKED)).sum()


def counts(logits, targets):
    return logits.sum() * 0 + 7.0 * (targets != MASKED).sum()


@pytest.mark.parametrize("loss_fn", [smoothed, entropy, counts])
def test_a_loss_of_ones_own_is_that_loss_in_every_layout(loss_fn):
    alone = losses_of(Strategy(**EXACT), 0.3, loss_fn=loss_fn)
    assert not close(alone, losses_of(Strategy(**EXACT), 0.3))  # which would be the loss in its place
    for strategy in LAYOUTS[:: 2 if loss_fn is entropy else 3]:
        assert close(alone, losses_of(strategy, 0.3, loss_fn=loss_fn)), strategy


@pytest.mark.parametrize("strategy", [Strategy(**EXACT), *LAYOUTS[:2], LAYOUTS[3]], ids=str)
def test_a_loss_that_is_a_mean_is_refused(strategy):
    def mean(logits, targets):
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten())

    def mean_of_rows(logits, targets):
        return sum(map(mean, logits.unbind(), targets.unbind()))

    for loss_fn in (mean, mean_of_rows):
        with pytest.raises(RankError, match="loss_fn is a mean: twice the targets give the same"):
            losses_of(strategy, loss_fn=loss_fn)


# ---- cuts, frozen patterns -------------------------------------------------------------------------------


CUTS = {
    "a layer is missing": [range(0, 2), range(3, 4)], "one is there twice": [range(0, 2), range(1, 4)],
    "another order": [range(2, 4), range(0, 2)], "an empty stage": [range(0, 4), range(4, 4)],
    "more than there are": [range(0, 2), range(2, 5)],
}  # fmt: skip


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
def test_cuts_name_each_layer_once_in_order(cuts):
    with pytest.raises(RankError, match=r"cuts \[range.*each layer once, in order"):
        losses_of(Strategy(pp=2, microbatches=2), cuts=cuts)


def test_a_frozen_pattern_that_matches_nothing_is_refused_also_of_a_module_of_ones_own():
    for model in (CONFIG, nn.Linear(3, 3)):
        with pytest.raises(RankError, match="frozen='layer.0.*' matches no parameter; there are"):
            launch.run(lambda: parallelize(model, Strategy(), sgd, frozen=["layer.0.*"]), ranks=1)


# ---- batches ---------------------------------------------------------------------------------------------


def batch_of(run, rows, **changes) -> Batch:
    return run.batch(rows, 0)._replace(**changes)


@pytest.mark.parametrize(
    "strategy, changes, said",
    [
        (Strategy(cp=2), lambda: dict(positions=None), "a batch without positions, and cp gives each rank"),
        (Strategy(cp=2), lambda: dict(positions=torch.arange(T // 2)), "are not those of this rank's tokens"),
        (Strategy(), lambda: dict(positions=torch.arange(T) % 4), "of packed rows give document_lengths"),
        (Strategy(tp=2), lambda: dict(targets=torch.zeros(B, T, dtype=torch.int32)), "expected torch.int64"),
        (Strategy(), lambda: dict(targets=torch.zeros(B, T, dtype=torch.int32)), "expected torch.int64"),
    ],
    ids=["cp without positions", "cp with others", "documents", "int32, tp", "int32"],
)
def test_a_batch_for_another_layout_is_refused(strategy, changes, said):
    def rank():
        run = parallelize(CONFIG, strategy, sgd)
        run.step(run.batch(rows_with(), 0))
        run.step(batch_of(run, rows_with(), **changes()))

    with pytest.raises(RankError, match=said):
        launch.run(rank, ranks=strategy.ranks)


@pytest.mark.parametrize("strategy", [Strategy(), Strategy(dp=2)], ids=str)
def test_dropout_without_the_number_of_the_step_is_refused(strategy):
    def rank():
        run = parallelize(small(dropout=0.1), strategy, sgd)
        batch = run.batch(rows_with(), 0)
        run.step(batch)
        run.step(Batch(batch.tokens, batch.targets, batch.num_valid))

    with pytest.raises(RankError, match="the batch does not say of which step and rows"):
        launch.run(rank, ranks=strategy.ranks)


@pytest.mark.parametrize("strategy", [Strategy(**EXACT), *LAYOUTS], ids=str)
def test_a_routers_loss_is_a_mean_over_all_tokens_though_few_targets_count(strategy):
    """All but some 4 of 32 targets are masked; the term of balance is Switch's, of the formula on all tokens."""
    experts = ExpertsConfig(4, 2, balance_alpha=0.5)
    config, plain = small(experts=experts), small(experts=ExpertsConfig(4, 2))
    with_loss = losses_of(strategy, 0.9, config, steps=1)[0] - losses_of(strategy, 0.9, plain, steps=1)[0]

    model, terms = GPT(config, dtype=torch.float64), []
    tokens, _ = rows_with(0.9).draw(0, 0, 1)

    def by_rows(layer, scores, routing, chosen, mask):
        probs, rows = routing.probs.unflatten(0, (B, T)), routing.experts.unflatten(0, (B, T))
        for row_probs, row in zip(probs, rows):
            f = torch.stack([(row == e).sum() for e in range(4)]) / row.numel()
            terms.append(0.5 * 4 * (f * row_probs.mean(0)).sum() / B)

    for layer in model.layers[1:-1]:
        layer.mlp.collect = lambda *given, layer=layer: by_rows(layer, *given)
    model(tokens)
    assert abs(with_loss - sum(terms).item()) < TOLERANCE


def test_balance_loss_of_one_batch_is_the_mean_that_is_used():
    torch.manual_seed(0)
    from minitrain.moe.router import switch

    routing = switch(torch.randn(64, 4))
    f = torch.bincount(routing.experts.flatten(), minlength=4) / 64
    assert torch.allclose(balance_loss(routing, 1.0), 4 * (f * routing.probs.mean(0)).sum())


# ---- samples ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("positions", ["rope", "learned", "alibi"])
def test_a_sample_longer_than_an_odd_number_of_positions_is_the_same_in_every_layout(positions):
    config = small(max_positions=7, positions=positions)

    def rank(strategy):
        run = parallelize(config, strategy)
        return run.sample(torch.tensor([[1, 2, 3]]), 7, temperature=0.0).tolist()

    alone = launch.run(rank, Strategy(**EXACT), ranks=1)[0]
    for strategy in LAYOUTS[["rope", "learned", "alibi"].index(positions) :: 3]:
        assert launch.run(rank, strategy, ranks=strategy.ranks)[0] == alone, strategy


# ---- a module of one's own -------------------------------------------------------------------------------


class Noisy(nn.Module):
    """Draws masks, and has statistics that its forwards change."""

    def __init__(self, drop=0.5):
        super().__init__()
        self.table, self.norm, self.head = nn.Embedding(V, 8), nn.BatchNorm1d(8), nn.Linear(8, V)
        self.drop, self.masks = nn.Dropout(drop), []

    def forward(self, tokens):
        x = self.table(tokens)
        mask = self.drop(torch.ones_like(x))
        self.masks.append(mask.detach().clone())
        return self.head(self.norm((x * mask).flatten(0, 1)).view_as(x))


def test_ranks_and_steps_draw_different_masks_and_a_run_that_goes_on_draws_the_same(tmp_path):
    def rank(folder, steps, resume):
        run = parallelize(noisy(), Strategy(dp=2), sgd)
        hyper = Hyperparameters(batch_size=4, length=8, steps=4)
        trainer = Trainer(run, text(), hyper, store=Store(Path(folder)), save_every=2)
        if resume:
            trainer.resume()
        records = []
        for _ in trainer.run():
            pass
        return run.model.masks, run.state_dict(), records

    def stop_at_two(folder):
        run = parallelize(noisy(), Strategy(dp=2), sgd)
        hyper = Hyperparameters(batch_size=4, length=8, steps=4)
        trainer = Trainer(run, text(), hyper, store=Store(Path(folder)), save_every=2, report_every=2)
        for record in trainer.run():
            if record["step"] == 2:
                break
        trainer.finish()
        return run.model.masks

    whole = launch.run(rank, tmp_path / "a", 4, False, ranks=2)
    launch.run(stop_at_two, tmp_path / "b", ranks=2)
    later = launch.run(rank, tmp_path / "b", 4, True, ranks=2)
    for (masks, state, _), (more, resumed, _) in zip(whole, later):
        assert [mask.equal(other) for mask, other in zip(masks[2:], more, strict=True)] == [True, True]
        assert all(x.equal(resumed["parameters"][name]) for name, x in state["parameters"].items())
        assert all(x.equal(resumed["buffers"][name]) for name, x in state["buffers"].items())
        assert state["buffers"]["norm.num_batches_tracked"] == 4
    (first, state, _), (second, other, _) = whole
    every = [*first, *second]
    assert not any(a.equal(b) for i, a in enumerate(every) for b in every[:i])
    assert all(x.equal(other["buffers"][name]) for name, x in state["buffers"].items())  # the ranks' are one


def noisy():
    torch.manual_seed(1)
    return Noisy()


def text() -> Text:
    return Text(bytes(1 + i * i * 7919 % (V - 1) for i in range(4000)), "numbers")


def test_parameters_or_buffers_that_differ_over_ranks_are_refused_by_name():
    def rank(change):
        torch.manual_seed(0)
        model = Noisy()
        with torch.no_grad():
            change(model, collectives.world().rank())
        parallelize(model, Strategy(dp=2), sgd)

    def of_a_weight(model, rank):
        model.head.weight[3, 3] += rank * 1e-7

    def of_a_buffer(model, rank):
        model.norm.running_mean += rank

    for change, name in ((of_a_weight, "head.weight"), (of_a_buffer, "norm.running_mean")):
        with pytest.raises(
            RankError, match=f"{name} of rank 1 differs from that of rank 0: seed ranks alike"
        ):
            launch.run(rank, change, ranks=2)


def test_narrow_weights_without_masters_are_refused():
    with pytest.raises(
        RankError, match="weights in torch.bfloat16, and precision='float32' no master copies"
    ):
        launch.run(lambda: parallelize(nn.Linear(4, 4).bfloat16(), Strategy(), sgd), ranks=1)


# ---- rates, and optimizers of a checkpoint ---------------------------------------------------------------


def test_groups_keep_their_proportion_and_a_schedule_of_ones_own_is_followed():
    def rank():
        def groups(params):
            params = list(params)
            return torch.optim.SGD(
                [dict(params=params[:1], lr=0.0), dict(params=params[1:2], lr=0.05), dict(params=params[2:])],
                lr=0.1,
            )

        run = parallelize(CONFIG, Strategy(**EXACT), groups)
        before = run.state_dict()["parameters"]
        before = {name: x.clone() for name, x in before.items()}
        hyper = Hyperparameters(batch_size=2, length=T, steps=3)
        trainer, rates = Trainer(run, text(), hyper, schedule=lambda step: 0.5**step), []
        for _ in range(3):
            trainer.train_one_step()
            rates.append([group["lr"] for group in run.sync.param_groups])
        after, first = run.state_dict()["parameters"], next(iter(run.sync.names.values()))
        return rates, before[first].equal(after[first]), [n for n in before if before[n].equal(after[n])]

    rates, stays, unmoved = launch.run(rank, ranks=1)[0]
    assert rates == [[0.0, 0.5**step / 2, 0.5**step] for step in range(3)]
    assert stays and len(unmoved) <= 2  # the table, under one name or, tied, two


@pytest.mark.parametrize(
    "strategy", [Strategy(zero=1, dp=2), Strategy(zero=1, dp=2, offload="optimizer")], ids=str
)
def test_a_scheduler_of_torchs_moves_the_rate(strategy):
    def rank():
        run, rows = parallelize(CONFIG, strategy, sgd), rows_with()
        scheduler = torch.optim.lr_scheduler.ExponentialLR(run.sync.optimizer, 0.5)
        before, moved = run.state_dict()["parameters"]["layers.1.attention.q.weight"].clone(), []
        for step in range(2):
            run.step(run.batch(rows, 0))
            scheduler.step()
            now = run.state_dict()["parameters"]["layers.1.attention.q.weight"].clone()
            moved.append((now - before).norm().item())
            before = now
        return moved, run.sync.param_groups[0]["lr"]

    (first, second), rate = launch.run(rank, ranks=2)[0]
    assert rate == 0.025 and 0.3 * first < second < 0.7 * first


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path):
    def rank(make_optimizer):
        run = parallelize(CONFIG, Strategy(), make_optimizer)
        hyper = Hyperparameters(batch_size=2, length=T, steps=2)
        trainer = Trainer(run, text(), hyper, store=Store(tmp_path), save_every=1)
        trainer.resume()
        list(trainer.run())

    launch.run(rank, torch.optim.AdamW, ranks=1)
    with pytest.raises(RankError, match="the states are of AdamW, and this run updates by SGD"):
        launch.run(rank, sgd, ranks=1)
