"""A timeline written out by hand: every account, interval and line of the table; and what a trace file says."""

import json
from dataclasses import replace

from minitrain.plan.simulate.machines import machine
from minitrain.ranks.events import Compute, Copy, Issue
from minitrain.systems.simulate.timeline import Account, Span, Timeline, join, length, outside

MM = Compute("mm", 10, 30, "forward", "bfloat16", (1, 2, 3, 4), 5)
SUM = Issue(0, "all_reduce", "dp", (1, 3), 8, 12, 0, "a.py:1", "backward")
SEND = Issue(1, "send", "pp", (1, 3), 7, 7, 0, "a.py:2")
LEAVES = Copy(2, "to_host", 5)


def spans(rank):
    """3 s of work, of which the sum hides 1; a message, waited for; a copy behind everything."""
    return [
        Span("compute", "compute", 0.0, 2.0, MM, 0.0),
        Span("dp", "transfer", 1.0, 4.0, SUM, 0.5),
        Span("compute", "wait", 2.0, 4.0, SUM, 2.0),
        Span("compute", "compute", 4.0, 5.0, MM, 4.0),
        Span(f"pp to {4 - rank}", "transfer", 5.0, 5.0 + rank, SEND, 5.0),
        Span("to_host", "transfer", 9.0, 9.5, LEAVES, 9.0),
    ]


TIMELINE = Timeline(machine("h100"), {3: spans(3), 1: spans(1)})


def test_the_account_of_each_rank_and_the_mean_of_all():
    assert TIMELINE.step_s == 9.5
    assert TIMELINE.accounts == {3: Account(3, 6.5, 5.5, 2, 1), 1: Account(3, 4.5, 3.5, 2, 3)}
    assert TIMELINE.accounts[3].overlap_s == 1 and TIMELINE.mean == Account(3, 5.5, 4.5, 2, 2)
    means = [getattr(TIMELINE, f"{name}_s") for name in ("compute", "communication", "exposed_communication")]
    assert [*means, TIMELINE.waiting_s, TIMELINE.idle_s] == [3, 5.5, 4.5, 2, 2]
    assert [span.name for span in TIMELINE.transfers(1)] == ["all_reduce", "send", "to_host"]
    assert [span.stream for span in TIMELINE.transfers(1, "pp")] == ["pp to 3"], "by axis, not by stream"
    assert TIMELINE.exposed(3) == [(2, 4), (5, 8), (9, 9.5)] and TIMELINE.exposed(3, "dp") == [(2, 4)]
    assert TIMELINE.mfu(989.5e12) == 1 / 9.5, "of a bfloat16 peak, unless told"
    assert TIMELINE.mfu(67e12, "float32") == 1 / 9.5
    assert Timeline(machine("h100"), {0: []}).accounts == {0: Account(0, 0, 0, 0, 0)}


TABLE = """
9.500 s a step on h100
  rank          compute    exposed comm.             idle     hidden comm.
     3    3.000 s   32%    5.500 s   58%    1.000 s   11%    1.000 s   11%
     1    3.000 s   32%    3.500 s   37%    3.000 s   32%    1.000 s   11%
rank 1 on dp: 1 transfers, 12 bytes sent, 3.000 s on the wire
rank 1 on host: 1 transfers, 5 bytes sent, 500.000 ms on the wire
rank 1 on pp: 1 transfers, 7 bytes sent, 1.000 s on the wire
"""


def test_the_table_line_by_line():
    """A line per rank in the order of the replay, then the axes of the lowest rank, by name."""
    assert TIMELINE.table().splitlines() == TABLE.strip().splitlines() and repr(TIMELINE) == TIMELINE.table()
    for seconds, told in ((1.0, "1.000 s"), (1e-3, "1.000 ms"), (2.5e-4, "250.0 us")):
        one = replace(TIMELINE, spans={0: [Span("compute", "compute", 0.0, seconds, MM, 0.0)]})
        assert one.table().startswith(f"{told} a step on h100\n")


def test_a_trace_has_a_process_per_rank_and_a_thread_per_stream(tmp_path):
    path = replace(TIMELINE, spans={1: TIMELINE.spans[1]}).to_chrome_trace(tmp_path / "trace.json")
    found = json.loads(path.read_text())
    named = [one for one in found["traceEvents"] if one["ph"] == "M"]
    names = [(one["name"], one["tid"], *one["args"].values()) for one in named]
    assert found["displayTimeUnit"] == "ms" and {one["pid"] for one in found["traceEvents"]} == {1}
    assert names == [
        ("process_name", 0, "rank 1"),
        ("process_sort_index", 0, 1),
        *(
            one
            for thread, stream in enumerate(("compute", "dp", "pp to 3", "to_host"))
            for one in (("thread_name", thread, stream), ("thread_sort_index", thread, thread))
        ),
    ]
    spans = [one for one in found["traceEvents"] if one["ph"] == "X"]
    assert [one["name"] for one in spans] == [
        "mm", "all_reduce", "wait for all_reduce", "mm", "send", "to_host",
    ]  # fmt: skip
    got = [(one["ts"], one["dur"], one["cat"]) for one in spans[:3]]
    assert got == [(0, 2e6, "compute"), (1e6, 3e6, "transfer"), (2e6, 2e6, "wait")]
    assert spans[0]["args"] == {"phase": "forward", "flops": 10, "bytes": 30, "dtype": "bfloat16"}
    assert spans[5]["args"] == {"phase": "", "axis": "host", "bytes": 5}
    called = {"call": "a.py:1", "issued_us": 0.5e6}
    sizes = {"seq": 0, "axis": "dp", "payload_bytes": 8, "sent_bytes": 12}
    assert spans[1]["args"] == {"phase": "backward", **sizes, **called}
    tiny = replace(TIMELINE, spans={0: [Span("compute", "compute", 0.0, 1.23456e-6, MM, 0.0)]})
    assert json.loads(tiny.to_chrome_trace(path).read_text())["traceEvents"][-1]["dur"] == 1.2346


def test_intervals_by_hand():
    assert length([(0, 2), (3, 7)]) == 6
    assert join([(5, 6), (0, 4), (1, 2), (4, 5)]) == [(0, 6)], "in any order, nested, touching"
    assert join([(0, 1), (3, 4)], gap=2) == [(0, 4)] and join([(0, 1), (3, 4)], gap=1.9) == [(0, 1), (3, 4)]
    assert join([(0, 5), (6, 7)], gap=1, keep=5) == join([(0, 1), (2, 7)], gap=1, keep=5) == [(0, 7)][:1]
    assert join([(0, 5), (6, 11)], gap=1, keep=5) == [(0, 5), (6, 11)], "both are long"
    assert outside([(6, 9), (0, 4)], [(1, 2), (3, 7)]) == [(0, 1), (2, 3), (7, 9)]
    assert outside([(0, 2), (0, 5)], [(0, 2)]) == [(2, 5)]
