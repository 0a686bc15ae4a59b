"""Each term of a prediction by hand: work of a few round numbers in the place of dry runs."""

from dataclasses import replace

import pytest

from minitrain.model.config import ExpertsConfig, GPTConfig
from minitrain.pipeline.schedule import parts as parts_of
from minitrain.pipeline.schedules.one_direction import one_f_one_b
from minitrain.pipeline.schedules_by_name import named
from minitrain.pipeline.simulate import simulate
from minitrain.plan.predict.predicted_memory import by_rank, elements_of, memory_of
from minitrain.plan.predict.predicted_pipeline import KINDS, Costs, layout_of, makespan
from minitrain.plan.predict.predicted_step import predict, update_s
from minitrain.plan.predict.rates import PLAIN, Place, exposed, layers_s
from minitrain.plan.predict.training_run import STACKS, TrainingRun
from minitrain.plan.predict.work import Collective, Layer, Operator, Pass, Work
from minitrain.plan.simulate.machines import machine
from minitrain.plan.strategy import Strategy

MODEL = GPTConfig(vocab_size=64, d_model=64, num_layers=4, num_heads=4, max_positions=64, tied=False)
A100, MAIN = machine("a100"), "bfloat16_main_grads"
PEAK, BANDWIDTH = A100.device.peak("bfloat16"), A100.device.memory_bandwidth_bytes_per_s
W, G, O = 2, 4, 12  # bytes of weights, gradients and the optimizer's states


def of(flops: float, moved: float, high: int = 0) -> Pass:
    """A product of so many FLOPs, and a pass through memory."""
    products = Operator("mm", int(flops), 0, "bfloat16")
    return Pass((products, Operator("add", 0, int(moved), "bfloat16")), (), high)


WORK = Work(
    Layer(of(PEAK, 0, 5), of(PEAK, 0, 7), Pass(), 10, 100_000, 50_000),
    Layer(of(2 * PEAK, BANDWIDTH, 20), of(4 * PEAK, BANDWIDTH, 30), of(PEAK, 0), 100, 1_000_000, 0, 70),
    Layer(of(3 * PEAK, 0, 15), of(6 * PEAK, 0, 40), of(2 * PEAK, 0), 60, 200_000, 50_000, 25),
    boundary_bytes=16,
)
ELEMENTS = 100_000 + 4 * 1_000_000 + 200_000
KEPT = 10 + 4 * 100 + 60


def run_of(stack: str = "megatron-2021", batch: int = 64, model=MODEL, **strategy) -> TrainingRun:
    return TrainingRun(model, Strategy(**dict(precision=MAIN) | strategy), A100, batch, 64, STACKS[stack])


def place(stack: str = "megatron-2021", dp=1, pp=1, cp=1, tp=1, ep=1, on=A100) -> Place:
    return Place(on, STACKS[stack], PLAIN, dp, pp, cp, tp, ep)


# ---- memory ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_states_are_dealt_out_over_dp_and_cp_stage_by_stage(zero):
    for bucket_bytes in (1000, 1 << 30):
        run = run_of(dp=2, cp=2, core="gathered", zero=zero, bucket_bytes=bucket_bytes)
        (memory,) = by_rank(run, WORK)
        share = [4 if zero >= stage else 1 for stage in (3, 2, 1)]
        assert memory["parameters"] == ELEMENTS * W // share[0]
        assert memory["gradients"] == ELEMENTS * G // share[1]
        assert memory["optimizer state"] == ELEMENTS * O // share[2]
        buffers = {2: min(2 * bucket_bytes, ELEMENTS * G), 3: 1_000_000 * (W + G)}
        assert memory["buffers"] == buffers.get(zero, 0)


def test_gradients_stand_twice_only_where_buckets_are_apart_and_more_than_one_backward_adds():
    twice = {
        (stack, m, zero): by_rank(run_of(stack, dp=2, microbatches=m, zero=zero), WORK)[0]["gradients"]
        for stack in ("minitrain", "megascale")
        for m in (1, 4)
        for zero in (0, 1)
    }
    assert twice == {key: ELEMENTS * G * (1 + (key == ("minitrain", 4, 0))) for key in twice}


def test_activations_are_what_is_kept_and_the_most_beside_it():
    """In the backward of the head all is kept, and 40 bytes more."""
    assert by_rank(run_of(microbatches=4), WORK)[0]["activations"] == KEPT + 40
    high = replace(WORK, block=replace(WORK.block, forward=of(1, 1, 500)))  # of the last block
    assert by_rank(run_of(), high)[0]["activations"] == 10 + 300 + 500
    assert by_rank(run_of(recompute="stage"), WORK)[0]["activations"] == KEPT + 40  # R keeps all again
    first, last = by_rank(run_of(pp=2, microbatches=64, schedule="gpipe"), WORK)
    blocks = [numbers[1] for numbers in layout_of(MODEL, Strategy(pp=2, microbatches=64)).ranks]
    assert first["activations"] == 64 * (10 + 100 * blocks[0] - WORK.boundary_bytes) + 30  # sent away
    assert last["activations"] == 64 * (WORK.boundary_bytes + 100 * blocks[1] + 60) + 40  # received
    again, _ = by_rank(run_of(pp=2, microbatches=64, schedule="gpipe", recompute="stage"), WORK)
    assert again["activations"] == 63 * 16 + (10 + 100 * blocks[0] - 16) + 30
    assert first["buffers"] == last["buffers"] == 3 * 16  # it comes, is at work, goes
    _, middle, _ = by_rank(run_of(pp=3, microbatches=64, schedule="gpipe"), WORK)
    turns = by_rank(run_of(pp=2, microbatches=64, schedule="interleaved", chunks=2), WORK)
    assert middle["buffers"] == turns[0]["buffers"] == turns[1]["buffers"] == 6 * 16  # with two neighbours
    schedule = named("zb_h1", 2, 64)
    _, split = by_rank(run_of(pp=2, microbatches=64, schedule="zb_h1"), WORK)
    kept, waiting, held, most = 16 + 100 * blocks[1] + 60, 70 * blocks[1] + 25, 0, 0
    for entry in schedule.ranks[1]:
        most = max(most, held + 40 * (entry.kind == "I"))
        held += {"F": kept, "I": waiting - kept, "W": -waiting}[entry.kind]
    assert split["activations"] == most and held == 0  # I leaves to W what its products are made of


def test_the_fullest_rank_is_not_always_the_first():
    work, run = replace(WORK, head=replace(WORK.head, parameters=10**9)), run_of(pp=2, microbatches=4)
    ranks = by_rank(run, work)
    assert memory_of(run, work) == ranks[1] and sum(ranks[1].values()) > sum(ranks[0].values())


def test_a_tied_table_counts_once_where_both_ends_are():
    work = replace(WORK, expert_parameters=600_000)
    assert elements_of(work, (1, 4, 0, 1), True) == (ELEMENTS - 50_000, 4 * 600_000)
    assert elements_of(work, (1, 4, 0, 1), False)[0] == ELEMENTS
    assert elements_of(work, (1, 2, 1, 0), True) == (3_100_000, 2 * 600_000)
    assert elements_of(work, (0, 2, 0, 1), True)[0] == 2_200_000


# ---- passes ----------------------------------------------------------------------------------------------


def test_a_layers_seconds_by_kind():
    _, block, _, head = layers_s(WORK, place(), False)
    assert dict(zip(KINDS, block.passes)) == pytest.approx(dict(F=3, B=5, I=4, W=1, R=3, P=8))
    assert dict(zip(KINDS, head.passes)) == pytest.approx(dict(F=3, B=6, I=4, W=2, R=3, P=9))
    assert block.parts["products"] == pytest.approx(6) and block.parts["passes"] == pytest.approx(2)
    again = layers_s(WORK, place(), True)[1]
    assert dict(zip(KINDS, again.passes)) == pytest.approx(dict(F=3, B=8, I=7, W=1, R=3, P=11))
    assert again.parts["recomputation"] == pytest.approx(3) and not block.parts["recomputation"]


def test_what_travels_shows_as_far_as_nothing_runs_beside_it():
    members, payload, at = tuple(range(8)), 10**9, place(tp=8)
    time = at.travel_s("all_reduce", payload, members)
    half = Operator("mm", int(PEAK * time / 2), 0, "bfloat16")

    def waited(*operators, axis="tp", overlapped=range(1)):
        one_pass = Pass(operators, (Collective("all_reduce", axis, members, payload, overlapped),))
        return {axis: time for axis, time in exposed(one_pass, at).items() if time}

    assert waited(half) == pytest.approx({"tp": time / 2}, rel=1e-6)
    assert waited(half, overlapped=range(0)) == pytest.approx({"tp": time})
    assert waited(half, half, half, overlapped=range(3)) == {}
    for axis in ("tp", "ep", "cp", "inner", "ulysses"):
        assert list(waited(half, axis=axis)) == [axis if axis in ("tp", "ep") else "cp"]


def test_overlapped_tp_shows_its_first_part():
    members, payload = tuple(range(8)), 10**9
    time = place(tp=8).travel_s("all_gather", payload, members)
    for products, left in ((0.0, time), (time / 2, time / 2), (10 * time, time / 8)):
        operators = (Operator("mm", int(PEAK * products), 0, "bfloat16"),)
        way = Pass(operators, (Collective("all_gather", "tp", members, payload),))
        work = replace(WORK, block=replace(WORK.block, forward=way))
        shown = layers_s(work, place("megascale", tp=8), False)[1].passes[0] - products
        assert shown == pytest.approx(left, rel=1e-6)


def test_where_ranks_sit():
    inside, outside = place("megatron-2021", dp=4, pp=2, tp=8), place("overlapped", dp=4, pp=2, tp=8)
    assert (inside.dp_stride, inside.pp_stride) == (8, 32)
    assert (outside.dp_stride, outside.pp_stride) == (16, 8)
    assert inside.ranks_of((0, 8, 16)) == (0, 8, 16) and outside.ranks_of((0, 8, 16)) == (0, 16, 32)
    assert inside.neighbours == (0, 32) and place(pp=8, tp=2).neighbours == (6, 8)
    assert place(pp=2, tp=2).neighbours == (0, 2)
    assert place(pp=4, tp=2).neighbours == (0, 2), "a node full of stages"


# ---- a step ----------------------------------------------------------------------------------------------


def step(**how):
    return predict(run_of(**how), lambda *asked: WORK, PLAIN)


def test_one_stage_has_no_bubble_and_two_have_what_is_known():
    alone = step(microbatches=64)
    assert alone.parts["bubble"] == pytest.approx(0, abs=1e-9)
    assert alone.parts["products"] == pytest.approx(64 * (2 + 4 * 6 + 9))
    assert alone.parts["passes"] == pytest.approx(64 * 4 * 2)
    even = replace(WORK, embedding=replace(WORK.embedding, forward=Pass(), backward=Pass()))
    even = replace(even, head=replace(even.head, forward=Pass(), backward=Pass(), weights=Pass()))
    run = run_of("megascale", pp=2, microbatches=64, model=replace(MODEL, num_layers=6))
    blocks = layout_of(run.model, run.strategy).ranks
    assert blocks[0][1] == blocks[1][1] == 3
    two = predict(run, lambda *asked: replace(even, boundary_bytes=0), PLAIN)
    assert two.parts["products"] == pytest.approx(64 * 3 * 6)
    assert two.parts["bubble"] == pytest.approx(3 * 8, rel=1e-4)  # one microbatch of one stage


def test_recomputed_stages():
    run = run_of(microbatches=64, recompute="full")
    full, none = (
        predict(replace(run, strategy=replace(run.strategy, recompute=r)), lambda *_: WORK, PLAIN)
        for r in ("full", "none")
    )
    assert full.parts["recomputation"] == pytest.approx(64 * 4 * 3) and not none.parts["recomputation"]
    assert none.parts["bubble"] == pytest.approx(0, abs=1e-9) == full.parts["bubble"]
    stops = replace(run, stack=STACKS["minitrain"])  # what runs again until it stops is in the dry run
    assert not predict(stops, lambda *_: WORK, PLAIN).parts["recomputation"]


def test_a_message_goes_whole_or_in_parts_that_are_gathered():
    work = replace(WORK, boundary_bytes=10**9)
    found = {}
    for sequence in (False, True):
        model = replace(MODEL, num_heads=8)
        run = run_of(pp=2, tp=8, microbatches=64, sequence_parallel=sequence, model=model)
        found[sequence] = predict(run, lambda *_: work, PLAIN).parts["p2p"]
    at = place(pp=2, tp=8)
    part = at.travel_s("send", 10**9 / 8, (0, 8)) + at.travel_s("all_gather", 10**9, tuple(range(8)))
    assert found[True] == pytest.approx(64 * at.travel_s("send", 10**9, (0, 8)))
    assert found[False] == pytest.approx(64 * part)


@pytest.mark.parametrize("m", [2, 3, 7, 20, 21])
def test_messages_that_block_are_time_of_their_senders(m):
    """Rank 0 sends each forward, rank 1 each backward."""
    layout = layout_of(replace(MODEL, num_layers=6), Strategy(pp=2, microbatches=m))
    costs = Costs((0, 1, 0, 0, 0, 2, 0, 0, *[0] * 16), 0.5, True)

    class Blocking:
        send = move = 0.0

        def of(self, entry):
            kind, stage, _ = entry
            return {("F", 0): 3.5, ("F", 1): 3, ("B", 0): 6, ("B", 1): 6.5}[kind, stage]

    assert makespan(layout, costs) == pytest.approx(simulate(one_f_one_b(2, m), Blocking()).makespan)


# ---- once in a step --------------------------------------------------------------------------------------


def once(stack: str, zero: int, work=WORK, tied=False, m=64, **sizes):
    strategy = Strategy(microbatches=m, **{name: n for name, n in sizes.items() if name in ("pp", "dp")})
    at = place(stack, **sizes)
    return update_s(work, layout_of(MODEL, strategy), at, zero, (W, G, O), tied, False), at


def test_an_update_reads_and_writes_states_once():
    for zero, shards in ((0, 1), (1, 4)):
        found, _ = once("megatron-2021", zero, dp=4)
        assert found["optimizer"] == pytest.approx(ELEMENTS * (2 * O + 3 * G + W) / shards / BANDWIDTH)


def test_gradients_and_weights_travel_as_often_as_a_stage_says():
    group = (0, 1, 2, 3)
    for stack in ("megatron-2021", "minitrain"):
        still = lambda layer: replace(layer, forward=Pass(), backward=Pass(), weights=Pass())
        layers = {name: still(getattr(WORK, name)) for name in ("embedding", "block", "head")}
        work = replace(WORK, **layers)  # nothing to hide behind
        for zero in (0, 1, 2, 3):
            found, at = once(stack, zero, work, dp=4)
            t = lambda op, size: at.travel_s(op, ELEMENTS * size, group)
            sums = 64 if stack == "minitrain" and zero >= 2 else 1
            gathers, expected = {1: 1, 2: 1, 3: 128}.get(zero), t("all_reduce", G)
            if zero:
                expected = sums * t("reduce_scatter", G) + gathers * t("all_gather", W)
            assert found["dp"] == pytest.approx(expected), (stack, zero)


def test_overlapped_sums_hide_behind_passes_of_layers_after_them():
    link = replace(A100.inter, bandwidth_bytes_per_s=1e6)
    slow = replace(A100, inter=link, devices_per_node=1, nics_per_node=1)
    at = place("megascale", dp=4, on=slow)
    found = update_s(WORK, layout_of(MODEL, Strategy(microbatches=1)), at, 0, (W, G, O), False, False)["dp"]
    whole = at.travel_s("all_reduce", ELEMENTS * G, (0, 1, 2, 3))
    # All up to a layer travel when its backward is done, overlapped the backwards of those below.
    weights, below = (100_000, *4 * [1_000_000], 200_000), (0, 1, 6, 11, 16, 21)
    exposed = [whole * sum(weights[: n + 1]) / ELEMENTS - overlapped for n, overlapped in enumerate(below)]
    assert found == pytest.approx(max(exposed)) and exposed.index(max(exposed)) == 4


def test_a_tied_table_is_added_up_over_two_stages_and_more():
    for pp in (1, 2, 4):
        found, at = once("megatron-2021", 0, tied=True, pp=pp, dp=4)
        expected = at.travel_s("all_reduce", 50_000 * G, (0, 4 * (pp - 1))) if pp > 1 else 0.0
        assert found["tied table"] == pytest.approx(expected)
        assert not once("megatron-2021", 0, tied=False, pp=pp)[0]["tied table"]


def test_experts_are_summed_over_the_ranks_that_have_the_same():
    work = replace(WORK, expert_parameters=600_000)
    found, at = once("megatron-2021", 0, work, dp=4, ep=2)
    everywhere = at.travel_s("all_reduce", (ELEMENTS - 4 * 600_000) * G, (0, 1, 2, 3))
    assert found["dp"] == pytest.approx(everywhere + at.travel_s("all_reduce", 4 * 600_000 * G, (0, 2)))


def test_of_a_pair_each_half_hides_what_the_other_sends_to_experts():
    """Counted entry by entry; a transfer that is longer than all that is computed stays, less that."""
    at = place("megascale", dp=2, pp=2, ep=2)
    for payload, hidden in ((1_000_000, None), (1 << 44, 8.0)):  # a block's F and B compute 8 seconds
        sent = Collective("all_to_all", "ep", (0, 1), payload)
        both = (replace(one, collectives=(sent,)) for one in (WORK.block.forward, WORK.block.backward))
        work = replace(WORK, block=replace(WORK.block, **dict(zip(("forward", "backward"), both))))
        model = replace(MODEL, experts=ExpertsConfig(4, 2))
        sizes = dict(dp=2, ep=2, pp=2, schedule="dualpipe", microbatches=8, model=model)
        run, each = run_of("megascale", 16, **sizes), at.travel_s("all_to_all", payload, (0, 1))
        schedule, blocks = named("dualpipe", 2, 8), 0
        layout = layout_of(model, run.strategy)
        for entry in (entry for rank in schedule.ranks for entry in rank):
            halves = [layout.stages[one.stage][1] for one in parts_of([entry])]
            blocks += min(halves) if len(halves) == 2 else 0
        expected = 8 * 4 * 2 * each - blocks * min(2 * each, hidden or 2 * each)
        assert blocks and predict(run, lambda *_: work, PLAIN).parts["ep"] == pytest.approx(expected / 2)
    kernels = place("deepseek", dp=2, ep=2)
    assert kernels.carried_s(sent, 1 << 44) == pytest.approx(0.75 * each, rel=1e-4), "8 bits there, 16 back"
