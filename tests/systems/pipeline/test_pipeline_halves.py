"""A pair's halves in turns: the same bits as one after the other, each transfer of rows behind products of the
other half, told by the order of events."""

import threading
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import pytest
import torch

from minitrain import collectives, launch
from minitrain.compose.parallelize import parallelize
from minitrain.data_parallel import states
from minitrain.model.config import ExpertsConfig, GPTConfig
from minitrain.model.mixture import mixtures
from minitrain.pipeline.runtime import Around, RunnerHooks
from minitrain.pipeline.schedule import B, F, I, Pair, Schedule, W, check
from minitrain.pipeline.schedules.bidirectional import dualpipe_v
from minitrain.plan.strategy import Strategy
from minitrain.ranks.events import Issue, Wait
from minitrain.ranks.launch import RankError, dryrun
from minitrain.ranks.ledger import Ledger
from minitrain.systems.pipeline.halves import Halves
from minitrain.systems.plan import expert_overlap
from tests.layouts import STEPS, Draw, Outcome, distance, one_process, step_of
from tests.parallel import TOLERANCE

# ---- who runs when: no ranks -----------------------------------------------------------------------------


def turns_of(first, second):
    """What two halves note: ("b", ..) of the first, ("f", ..) of the second; > and < around each turn."""
    halves, noted, threads = Halves(), [], threading.active_count()

    def run(name):
        for word in {"b": first, "f": second}[name]:
            if isinstance(word, Exception):
                raise word
            noted.append(name + word)
            halves.yield_turn() if word == "+" else None

    @contextmanager
    def turn(name):
        noted.append(name + ">")
        yield
        noted.append(name + "<")

    halves.yield_turn()  # nobody to give way to
    try:
        halves.run_in_turns(run, turn, "b", "f")
    finally:
        assert not halves.going
        assert threading.active_count() == threads
    return " ".join(noted)


def test_the_first_begins_and_who_is_left_goes_on_alone():
    assert turns_of("1+2+3", "1+2+3") == ("b> b1 b+ b< f> f1 f+ f< b> b2 b+ b< f> f2 f+ f< b> b3 b< f> f3 f<")
    assert turns_of("1", "1+2") == "b> b1 b< f> f1 f+ f2 f<"
    assert turns_of("1+2+3", "1") == "b> b1 b+ b< f> f1 f< b> b2 b+ b3 b<"


@pytest.mark.parametrize("turns", ["", "1+", "1+2+"])
@pytest.mark.parametrize("failing", "bf")
def test_the_error_of_a_half_is_raised_and_ends_the_other(failing, turns):
    fails, goes_on = [*turns, KeyError("planted")], "1+2+3+4"
    with pytest.raises(KeyError, match="planted"):
        turns_of(*((fails, goes_on) if failing == "b" else (goes_on, fails)))


# ---- on ranks --------------------------------------------------------------------------------------------

CONFIG = GPTConfig(
    vocab_size=29, d_model=16, num_layers=6, num_heads=4, num_kv_heads=2, d_ff=24, max_positions=8
)
LOSSES = dict(balance_alpha=0.05, z_alpha=0.01)
BIAS = dict(router="deepseek", bias_speed=0.02, route_nodes=2, node_limit=1)


def case(experts: dict, config: dict, **layout) -> Draw:
    experts = ExpertsConfig(**(dict(num_experts=4, top_k=2) | experts))
    layout = dict(dp=2, ep=2, pp=2, schedule="dualpipe_v", microbatches=4, precision="float64") | layout
    config, strategy = replace(CONFIG, experts=experts, **config), Strategy(**layout)
    rows = strategy.dp * strategy.microbatches
    return Draw(config, strategy, (rows, rows + 1), 8, 0.3, (), "adamw", "rows")


def split(schedule: Schedule) -> Schedule:
    """Each pair as (F I), its W behind it."""

    def entries(entry):
        if not isinstance(entry, Pair):
            return [entry]
        at = entry.backward[1:]
        return [Pair(entry.forward, I(*at)), W(*at)]

    lists = [[new for entry in own for new in entries(entry)] for own in schedule.ranks]
    return check(Schedule("split", lists, schedule.stages, schedule.microbatches))


def of_one_stage() -> Schedule:
    """1F1B in pairs: both parts of a pair are of the rank's one stage."""
    half = lambda s, ahead: [Pair(F(s, m + ahead), B(s, m)) for m in range(4 - ahead)]
    first, last = half(0, 2), half(1, 1)
    lists = [F(0, 0), F(0, 1), *first, B(0, 2), B(0, 3)], [F(1, 0), *last, B(1, 3)]
    return check(Schedule("of one stage", lists, 2, 4))


CASES = {
    "ZeRO-3, dense layers between": case(
        LOSSES | dict(shared_experts=1, expert_every=2), dict(dropout=0.2, tied=True), zero=3
    ),
    "ZeRO-1, both directions": case(BIAS, dict(num_layers=2), zero=1, schedule="dualpipe"),
    "ZeRO-2, I and W": case(LOSSES, dict(dropout=0.2, bias=True, num_layers=2), zero=2),
    "ZeRO-3, of one stage": case({}, dict(num_layers=2), zero=3, schedule="1f1b"),
    "two levels": case(LOSSES, dict(num_layers=2), dp=4, ep=4, ep_node=2, schedule="dualpipe"),
}
SCHEDULES = {"ZeRO-2, I and W": split(dualpipe_v(2, 4)), "ZeRO-3, of one stage": of_one_stage()}


class InARow(RunnerHooks):
    """Instead of Halves: the actions in this order."""

    def __init__(self, first: str):
        self.first = first

    def run_pair(self, runner, pair):
        for action in sorted(pair, key=lambda action: action.kind != self.first):
            runner.act(action)
        return True


def halves_of(run):
    return next((hook for hook in run.runner.hooks if isinstance(hook, Halves)), None)


def made(case: Draw, way: str, schedule: Schedule | None = None):
    torch.manual_seed(collectives.world().rank())
    run = parallelize(case.config, case.strategy, case.make_optimizer, seed=3, schedule=schedule)
    if way != "turns":
        run.runner.hooks.remove(halves_of(run))
        run.runner.hooks.append(InARow(way))
    return run


def trained(name: str, way: str) -> Outcome:
    run = made(CASES[name], way, SCHEDULES.get(name))
    losses = [step_of(CASES[name], run, step).item() for step in range(STEPS)]
    names = {param: name for param, name in run.sync.names.items() if param.requires_grad}
    grads = {name: states.full_grad(run.sync, param) for param, name in names.items()}
    return Outcome(losses, grads, run.state_dict()["parameters"])


class Seen(NamedTuple):
    """Of one step of a rank."""

    stories: list  # of each pair: its story, and the layers of experts that F and B go through
    calls: list
    held: int  # the most bytes of activations at an event of a pair
    buffers: int  # the most at any time


def watched(case: Draw, way: str) -> Seen | None:
    run = made(case, way)
    layers = {number: len(mixtures(stage.layers)) for number, stage in run.runner.stages.items()}
    batch = run.batch(case.rows(0), 0)
    if collectives.world().rank() > 1 and (case, way) != (EQUAL, "turns"):
        run.step(batch)
        return None  # ranks 0 and 1 are all stages
    with Ledger() as ledger:
        run.runner.hooks.append(Around(ledger.phase))
        run.step(batch)
    pairs = [entry for entry in run.runner.program if isinstance(entry, Pair)]
    stories = [(story(ledger.events, pair), *(layers[action.stage] for action in pair)) for pair in pairs]
    calls = [(e.op, e.axis, e.seq, e.phase, e.site) for e in ledger.events if isinstance(e, Issue)]
    phases, live = {str(action) for pair in pairs for action in pair}, ledger.timeline()
    within = {at for at, event in enumerate(ledger.events) if getattr(event, "phase", "") in phases}
    held = max(kinds["activations"] for at, kinds in live if at in within)
    return Seen(stories, calls, held, max(kinds["buffers"] for _, kinds in live))


def story(events, pair: Pair) -> list[str]:
    """`+0 F` rows leave, `-0` they are awaited, `* B` products; `now`: an all-to-all that is awaited at once, as
    that of the counts before F's rows."""
    phases, found, names = {str(action): action.kind for action in pair}, [], {}
    events = [event for event in events if isinstance(event, Wait) or event.phase in phases]
    for event, after in zip(events, [*events[1:], None]):
        if isinstance(event, Issue) and event.op == "all_to_all" and event.axis in ("ep", "ep_across"):
            if after == Wait(event.id):
                found.append("now")
                continue
            names[event.id] = len(names)
            found.append(f"+{names[event.id]} {phases[event.phase]}")
        elif isinstance(event, Wait) and event.id in names:
            found.append(f"-{names[event.id]}")
        elif getattr(event, "flops", 0):
            word = f"* {phases[event.phase]}"
            found += [word] * (found[-1:] != [word])
    return found


# layers of experts in the two stages of rank 0: 1 and 1, of rank 1: 2 and 2
EQUAL = case(dict(router="balanced"), {})
UNEVEN = case(
    dict(router="balanced", dense_first=1, shared_experts=1), dict(num_layers=4)
)  # 0 and 1, 1 and 1
GATHERED = case(dict(router="balanced"), dict(num_layers=4), zero=3)


def hidden(found: list[str]) -> int:
    """Transfers with a product of the other half between issue and wait."""
    count = 0
    for start, word in enumerate(found):
        if word[0] == "+":
            behind = found[start : found.index(f"-{word[1:-2]}")]
            count += f"* {'F' if word[-1] == 'B' else 'B'}" in behind
    return count


SEEN = [(EQUAL, "turns"), (EQUAL, "F"), (EQUAL, "B"), (UNEVEN, "turns"), (GATHERED, "turns"), (GATHERED, "F")]
SEEN.append((CASES["two levels"], "turns"))


def all_of(ranks: int):
    names = [name for name in CASES if CASES[name].strategy.ranks == ranks]
    ways = ("turns", "F") if ranks == 4 else ("turns",)
    equal = {name: [trained(name, way) for way in ways] for name in names}
    return equal, {(case, way): watched(case, way) for case, way in SEEN if case.strategy.ranks == ranks}


@cache
def launched(ranks: int):
    return launch.run(all_of, ranks, ranks=ranks, timeout_s=120)


def seen(case: Draw, way: str) -> list[Seen]:
    return [rank[case, way] for _, rank in launched(case.strategy.ranks) if rank[case, way]]


@pytest.mark.parametrize("name", CASES)
def test_the_bits_of_one_after_the_other_and_the_numbers_of_one_process(name):
    reference = one_process(CASES[name])
    for equal, _ in launched(CASES[name].strategy.ranks):
        in_turns, in_a_row = equal[name][0], equal[name][-1]
        assert distance(in_turns, reference) < TOLERANCE and in_turns.losses == in_a_row.losses
        for ours, theirs in ((in_turns.grads, in_a_row.grads), (in_turns.params, in_a_row.params)):
            assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_every_transfer_of_rows_lies_behind_products_of_the_other_half():
    """What stays exposed are the counts of rows, one small all-to-all for each layer of F. The order is the one
    that is replayed at full size."""
    for number, rank in enumerate(seen(EQUAL, "turns")):
        layers = 2 if number % 2 else 1
        events = expert_overlap.pair_events(
            expert_overlap.DEEPSEEK_V3, 8, expert_overlap.REPORTED, "turns", layers
        )
        replayed = in_words(events)
        assert len(rank.stories) == 3 and len(replayed) == 12 * layers
        for found, forward, backward in rank.stories:
            assert forward == backward == found.count("now") == layers and hidden(found) == 4 * layers
            found = [word for word in found if word != "now"]
            start = found.index("+0 B")  # before it the loss; at the end the head
            assert found[:start] in ([], ["* B"]) and found[start:] in (replayed, [*replayed, "* F"])


def test_ranks_of_a_stage_make_the_same_calls_in_the_same_order():
    """Of all groups, in whichever half."""
    ranks = [rank.calls for rank in seen(EQUAL, "turns")]
    assert ranks[0] == ranks[2] and ranks[1] == ranks[3]
    assert {"ep", "dp", "pp"} <= {call[1] for call in ranks[0]}


def test_one_after_the_other_hides_nothing():
    """The control."""
    for rank in seen(EQUAL, "F"):
        for found, forward, _ in rank.stories:
            assert hidden(found) == 0 and found.count("now") == 5 * forward


def test_what_the_side_with_more_layers_sends_last_is_exposed():
    """B leaves first, so that one transfer of B more than F has can hide, behind F's last turn."""
    met = set()
    for rank in seen(UNEVEN, "turns"):
        for found, forward, backward in rank.stories:
            f, b = 2 * forward, 2 * backward
            assert f + b - hidden(found) == max(f - b, 0) + max(b - f - 1, 0)
            met.add((f, b))
    assert met == {(0, 2), (2, 0), (2, 2)}


def test_of_two_levels_what_crosses_between_nodes_is_hidden():
    for rank in seen(CASES["two levels"], "turns"):
        for found, forward, backward in rank.stories:
            assert hidden(found) == 2 * (forward + backward) == sum(word[0] == "+" for word in found)


def test_a_pair_holds_less_than_f_before_b():
    """What F keeps comes while what B needs goes: more than B before F, and less than F before B."""
    for least, between, most in zip(*(seen(EQUAL, way) for way in ("B", "turns", "F"))):
        assert least.held < between.held < most.held


def test_zero3_gathers_for_both_halves():
    for in_turns, in_a_row in zip(seen(GATHERED, "turns"), seen(GATHERED, "F")):
        assert in_a_row.buffers < in_turns.buffers <= 2 * in_a_row.buffers


def in_words(events) -> list[str]:
    found = []
    for event in events:
        if isinstance(event, Wait):
            found.append(f"-{event.id}")
        elif isinstance(event, Issue):
            found.append(f"+{event.id} {event.site[-1]}")
        else:
            found += [f"* {event.name[-1]}"] * (found[-1:] != [f"* {event.name[-1]}"])
    return found


def fails_in(half: str) -> None:
    """Rank 1, in the middle of its first pair."""
    run = made(EQUAL, "turns")
    halves = halves_of(run)

    def fail(grad=None):
        if halves.going:
            raise KeyError(f"planted in {half}")

    if collectives.world().rank() == 1:
        travel = run.model.hooks.experts

        def planted(x, routing, experts):
            y = travel(x, routing, experts)
            fail() if half == "F" else x.register_hook(fail)
            return y

        run.model.hooks.experts = planted
    run.step(run.batch(EQUAL.rows(0), 0))


@pytest.mark.parametrize("half", "FB")
def test_a_rank_that_fails_in_a_half_ends_all(half):
    with pytest.raises(RankError, match=f"(?s)rank 1.*planted in {half}"):
        launch.run(fails_in, half, ranks=4)


NO_PAIRS = {
    "no rows travel": dict(ep=1), "no pairs": dict(schedule="1f1b"), "rows in chunks": dict(ep_chunks=2),
    "experts travel": dict(ep_travel="experts"),
}  # fmt: skip


@pytest.mark.parametrize("what", NO_PAIRS)
def test_where_no_pair_takes_turns_nothing_is_asked(what):
    """No thread, and no transfer that gives way."""

    def rank():
        run = parallelize(EQUAL.config, replace(EQUAL.strategy, **NO_PAIRS[what]))
        return halves_of(run), getattr(run.model.hooks.experts, "meanwhile", None)

    assert dryrun.run(rank, ranks=4) == (None, None)
