"""Hiding experts' all-to-alls: closed forms and orders against searches, a shared link, a replay."""

from dataclasses import replace
from fractions import Fraction
from itertools import product
from random import Random

import pytest

from minitrain.plan.simulate.machines import machine
from minitrain.ranks.events import Compute, Issue
from minitrain.systems.plan import expert_overlap as overlap
from minitrain.systems.simulate.replay import replay

# ---- PipeMoE ---------------------------------------------------------------------------------------------

LAYERS = [  # (ranks, rows of a rank, D, F, dead time of a product)
    (8, 32_768, 7168, 2048, 20e-6),
    (8, 4096, 4096, 14_336, 40e-6),
    (16, 8192, 2048, 1024, 10e-6),
    (64, 16_384, 7168, 2048, 100e-6),
    (8, 4096, 1024, 4096, 50e-6),
    (4, 512, 512, 512, 5e-6),
    (8, 65_536, 4096, 4096, 1e-6),
]


@pytest.mark.parametrize("name", ["a100", "h800"])
def test_pipemoe(name):
    """Closed form = replay for each r, and the r it predicts is the best of 1 .. 16 in the replay."""
    on, best = machine(name), set()
    for ranks, rows, width, hidden, launch_s in LAYERS:
        sizes = 2 * width, 6 * width * hidden
        transfer, work = overlap.lines(ranks, *sizes, on, launch_s)
        replayed = []
        for r in range(1, 17):
            events = overlap.pipemoe_events(r, rows, ranks, *sizes)
            how = {"algorithms": {"all_to_all": "pairwise"}, "launch_s": launch_s}
            replayed.append(replay({0: events}, on, **how).step_s)
            assert overlap.pipemoe_s(r, rows, transfer, work) == pytest.approx(replayed[-1], rel=1e-12)
        predicted = overlap.pipemoe_degree(rows, transfer, work)
        assert replayed[predicted - 1] == pytest.approx(min(replayed), rel=1e-12)
        best.add(predicted)
    assert len(best) >= 4  # not one answer for all


def test_without_gain_nothing_is_cut():
    assert overlap.pipemoe_degree(10, overlap.Line(0, 1), overlap.Line(0, 0)) == 1, "all r as fast"


def shortest(tasks, chunks):
    """The least makespan of all orders: of partial ones with the same tasks the dominated are dropped."""
    # tasks done by chunk -> (compute free, link free, chunks ready)
    front = {(0,) * chunks: {(0,) * (2 + chunks)}}
    for _ in range(len(tasks) * chunks):
        after = {}
        for done, times in front.items():
            for time, chunk in product(times, range(chunks)):
                if done[chunk] < len(tasks):
                    _, stream, seconds = tasks[done[chunk]]
                    new, where = list(time), stream == "link"
                    new[where] = new[2 + chunk] = max(time[where], time[2 + chunk]) + seconds
                    more = (*done[:chunk], done[chunk] + 1, *done[chunk + 1 :])
                    if list(more) == sorted(more, reverse=True):  # chunks are alike: the first is ahead
                        after.setdefault(more, set()).add(tuple(new))
        front = {}
        for done, times in after.items():
            kept = []
            for time in sorted(times):
                if not any(all(a <= b for a, b in zip(other, time)) for other in kept):
                    kept.append(time)
            front[done] = kept
    return min(max(time) for times in front.values() for time in times)


def test_schemoe():
    """The order is as short as the best of all for 2 and 3 chunks, and never longer than one task at a time."""
    draw, faster = Random(1), 0
    for _ in range(60):
        seconds = [draw.choice((0, 1, 2, 3, 5, 8, 13)) for _ in range(3)] + [draw.choice((1, 2, 5, 13, 34))]
        tasks = overlap.schemoe_tasks(*seconds)
        in_turn = sum(task.seconds for task in tasks)
        for chunks in (1, 2, 3, 6):
            found = overlap.makespan(overlap.schemoe_order(chunks), tasks, chunks)
            assert found <= chunks * in_turn
            faster += found < chunks * in_turn
            if chunks in (2, 3):
                assert found == shortest(tasks, chunks), seconds
    assert faster > 100


# ---- Lina ------------------------------------------------------------------------------------------------

BACKWARD = [(4, 6, 10)] * 5 + [(40, 0, 0)]  # layers, then the embedding: (compute, all-to-all, all-reduce)


def test_lina():
    """Shared, an all-to-all takes twice as long; first in line, as long as alone; all-reduces end in time anyway."""
    test_a_whole_all_reduce_does_not_give_way()
    shared = overlap.lina(BACKWARD, "share")
    assert shared.all_to_all_s == [12] * 5 and shared.end_s == 5 * (4 + 12) + 40
    first = overlap.lina(BACKWARD, "priority", Fraction(1, 2))
    assert first.all_to_all_s == [6] * 5  # 4 seconds are whole micro-ops
    assert first.end_s == 5 * (4 + 6) + 40 < shared.end_s
    # what four gaps left, behind the last
    assert first.reduced_s == 5 * (4 + 6) + 5 * 10 - 4 * 4 < first.end_s


def test_a_whole_all_reduce_does_not_give_way():
    """Micro-ops are what makes priority worth something: without, an all-to-all waits for what is under way."""
    assert overlap.lina(BACKWARD, "priority").all_to_all_s == [6] + [(10 - 4) + 6] * 4
    for micro in (Fraction(3, 2), Fraction(5, 3), Fraction(3)):
        step = overlap.lina(BACKWARD, "priority", micro)
        assert all(6 <= took < 6 + micro for took in step.all_to_all_s)
    assert overlap.lina(BACKWARD, "priority", Fraction(3)).all_to_all_s != [6] * 5
    # 10 in two of 5, not in 6 and 4: a second is left of the first
    assert overlap.lina([(1, 5, 10), (4, 5, 0)], "priority", 6).all_to_all_s == [5, 1 + 5]


def test_no_second_is_lost():
    """The link is never idle while something waits for it: all that was to be moved has been moved."""
    draw = Random(2)
    for _ in range(300):
        drawn = ([draw.randint(0, 9) for _ in range(3)] for _ in range(draw.randint(1, 6)))
        layers = [(compute, transfer, Fraction(reduction)) for compute, transfer, reduction in drawn]
        own = sum(compute + transfer for compute, transfer, _ in layers)
        for policy, micro in (("share", None), ("priority", None), ("priority", Fraction(2, 3))):
            step = overlap.lina(layers, policy, micro)
            assert step.end_s == own + sum(step.all_to_all_s) - sum(transfer for _, transfer, _ in layers)
            busy = sum(transfer + reduction for _, transfer, reduction in layers)
            assert max(step.end_s, step.reduced_s) >= busy
            assert step.end_s <= own + sum(reduction for *_, reduction in layers)


def pipelined(way, chunk, chunks, backward):
    """The same chunks as tasks: what a chunk needs is fetched while the one before is worked on."""
    rows, middle = (what == "offload" for what in way)
    copies = rows * chunk.copy_rows + middle * chunk.copy_middle
    if backward:
        fetch = [("host", copies), ("link", chunk.transfer * (1 if rows else 2))]
        work = [("compute", chunk.work * (2 if middle else 2.5))]
        leave = [("link", chunk.transfer)]
    else:
        fetch, work = [("link", chunk.transfer)], [("compute", chunk.work)]
        leave = [("link", chunk.transfer), ("host", copies)]
    tasks, order = [overlap.Task("", *task) for task in fetch + work + leave], []
    for i in range(chunks + 2):
        for late, phase in enumerate((fetch, work, leave)):
            order += [i - late] * len(phase) * (0 <= i - late < chunks)
    return overlap.makespan(order, tasks, chunks)


def test_mpipemoe_choice():
    """The choice is the least of the modelled times, and these are what a pipeline of many chunks comes to."""
    draw, chosen = Random(3), set()
    for _ in range(200):
        chunk = overlap.Chunk(*(draw.choice((1, 2, 3, 5, 8, 13)) for _ in range(4)))
        modelled = {way: overlap.mpipemoe_s(way, chunk, 64) for way in overlap.REUSE_POLICIES}
        simulated = {
            way: sum(pipelined(way, chunk, 64, back) for back in (False, True))
            for way in overlap.REUSE_POLICIES
        }
        for way in overlap.REUSE_POLICIES:
            assert modelled[way] <= simulated[way] <= 1.06 * modelled[way], (way, chunk)
        choice = overlap.mpipemoe_choice(chunk, 64)
        chosen.add(choice)
        assert modelled[choice] == min(modelled.values())
        assert simulated[choice] <= 1.06 * min(simulated.values())
    assert chosen == set(overlap.REUSE_POLICIES)


def test_of_equal_ways_the_first():
    """Copies before repetition, of the rows before the middle: REUSE_POLICIES is in that order."""
    order = ("offload", "offload"), ("offload", "compute again"), ("send again", "offload")
    assert overlap.REUSE_POLICIES == (*order, ("send again", "compute again"))
    ties = set()
    for chunk in map(overlap.Chunk._make, product(range(4), repeat=4)):
        seconds = [overlap.mpipemoe_s(way, chunk, 2) for way in overlap.REUSE_POLICIES]
        equal = [way for way, time in zip(overlap.REUSE_POLICIES, seconds) if time == min(seconds)]
        assert overlap.mpipemoe_choice(chunk, 2) == equal[0], chunk
        ties.add(tuple(equal) if len(equal) > 1 else ())
    assert len(ties) >= 6, ties


def test_buffers_fall_from_r_chunks_to_two():
    assert [overlap.mpipemoe_rows(48, n, reused=False) for n in (1, 2, 4, 8)] == [48] * 4
    assert [overlap.mpipemoe_rows(48, n, reused=True) for n in (1, 2, 4, 8)] == [48, 48, 24, 12]
    assert overlap.mpipemoe_rows(50, 4, reused=True) == 26, "the largest chunk has 13"


def exposed_us(layer=overlap.DEEPSEEK_V3, ep=64, on=overlap.REPORTED, layers=1):
    timelines = (overlap.pair_timeline(layer, ep, on, way, layers) for way in ("row", "turns", "weights"))
    return [round(timeline.exposed_communication_s * 1e6) for timeline in timelines]


def test_deepseek_v3_hides_its_all_to_alls():
    """64 ranks on 8 nodes: 12.4 ms of all-to-all per layer and pair, hidden but for 0.3, or entirely."""
    assert exposed_us() == [12_443, 271, 0] and exposed_us(layers=4) == [4 * 12_443 + 1, 4 * 271, 0]
    # one node: no network card; two: each token visits both
    wanted = {2: 4412, 8: 7760, 16: 7760, 32: 10_618}
    assert {ep: exposed_us(ep=ep) for ep in wanted} == {ep: [us, 0, 0] for ep, us in wanted.items()}


def test_the_order_of_a_pair():
    """As Figure 4 of the report: dispatch F, dispatch B, combine F, combine B, each behind the other microbatch."""
    events = overlap.pair_events(overlap.DEEPSEEK_V3, 8, overlap.REPORTED, "weights")
    names = [
        event.name if isinstance(event, Compute) else f"({event.site})"
        for event in events
        if not hasattr(event, "id") or isinstance(event, Issue)
    ]
    assert list(dict.fromkeys(names)) == [
        *("(experts B)", "attention F", "(attention F)", "experts B", "(attention B)", "experts W"),
        *("experts F", "(experts F)", "attention B", "attention W"),
    ]


def test_every_way_computes_and_sends_the_same():
    def totals(way):
        events = overlap.pair_events(overlap.DEEPSEEK_V3, 64, overlap.REPORTED, way, 2)
        flops = sum(event.flops for event in events if isinstance(event, Compute))
        return flops, sum(event.sent_bytes for event in events if isinstance(event, Issue))

    flops, sent = totals("row")
    assert totals("turns") == totals("weights") == (flops, sent)
    # forward once, backward twice, 2 FLOPs per weight and token, and the scores that a mask leaves
    experts, attention = 9 * 3 * 7168 * 2048, 187_105_280
    assert flops == 2 * 3 * 4096 * (2 * (experts + attention) + 2 * 128 * (192 + 128) * 4096 // 2)
    # there in one byte, back in two, both ways: 7/8 of 4 copies across nodes, of 8 inside
    assert sent == 2 * 2 * (1 + 2) * 4096 * 7168 * (4 + 8) * 7 // 8


def test_nvlink_hides_behind_the_network_up_to_three_experts_a_node():
    """The report: 3.2 experts per node without more time on NVLink (section 3.2.2); 12 on 4 nodes, not 13."""

    def slower(k):
        layer = replace(overlap.DEEPSEEK_V3, k=k)
        spans = overlap.pair_timeline(layer, 64, overlap.REPORTED, "row").transfers(0)
        took = lambda axis: sum(s.duration_s for s in spans if s.event.axis == axis)
        return max(("across", "inside"), key=took)

    assert [slower(k) for k in (8, 12, 13)] == ["across", "across", "inside"]
