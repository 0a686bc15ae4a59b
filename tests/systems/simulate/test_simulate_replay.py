"""The replay: hand-made timelines, an independent longest path, and what must hold for every program."""

from dataclasses import replace as changed

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minitrain.plan.simulate import collectives
from minitrain.plan.simulate.machines import GB, Device, Link, Machine, machine
from minitrain.ranks.events import Compute, Issue, Wait
from minitrain.systems.simulate.links import Task, play
from minitrain.systems.simulate.replay import replay

DEVICE = Device("test", {"float32": 1e12, "bfloat16": 4e12}, 1e9, 1e9, "made up")
# Nothing but whole seconds: an operator of x TFLOP takes x s, and what the wires carry takes bytes / 1e9 s.
UNIT = Machine("unit", DEVICE, 64, Link("in", 0.0, 1e9, "made up"), Link("out", 0.0, 1e9, "made up"), 64)
PAIR = 0, 1


def work(seconds, phase="", name="mm"):
    return Compute(name, int(seconds * 1e12), 0, phase, "float32")


class Program:
    """Events of one rank, written down by hand."""

    def __init__(self):
        self.events = []
        self.issued = 0

    def compute(self, seconds, phase=""):
        self.events.append(work(seconds, phase))
        return self

    def issue(self, op, axis, members, payload_bytes, seq=0, site="train.py:1"):
        self.events.append(Issue(self.issued, op, axis, members, payload_bytes, payload_bytes, seq, site))
        self.issued += 1
        return self.issued - 1

    def wait(self, id):
        self.events.append(Wait(id))
        return self


def close(seconds):
    return pytest.approx(seconds, abs=1e-9)


# ---- by hand ---------------------------------------------------------------------------------------------
def test_overlap_by_hand():
    # An all-reduce of 4 GB among two ranks takes 4 s. Both compute 3 s beside it, then wait 1 s.
    program = Program().compute(2, "backward")
    id = program.issue("all_reduce", "dp", PAIR, 4 * 10**9)
    program.compute(3, "backward").wait(id).compute(1, "optimizer")
    timeline = replay({0: program.events, 1: program.events}, UNIT)
    assert timeline.step_s == close(7)
    assert (timeline.compute_s, timeline.communication_s) == (close(6), close(4))
    parts = timeline.exposed_communication_s, timeline.waiting_s, timeline.idle_s
    assert parts == (close(1), close(1), close(0)) and timeline.accounts[1].overlap_s == close(3)
    assert [(s.kind, s.start_s, s.end_s) for s in timeline.spans[0]] == [
        ("compute", 0, close(2)), ("compute", 2, close(5)), ("transfer", 2, close(6)), ("wait", 5, close(6)),
        ("compute", 6, close(7)),
    ]  # fmt: skip
    assert timeline.mfu(3.5e12, "fp32") == close(0.5)
    assert "7.000 s a step" in timeline.table() and "4,000,000,000 bytes sent" in timeline.table()


@pytest.mark.parametrize("wait_between, seconds", [(False, 1 + 2 + 2), (True, 1 + 2 + 1 + 2)])
def test_messages_follow_each_other_on_the_wire(wait_between, seconds):
    """A latency of 1 s and 2 s of bytes, twice: the second's latency passes while the first is sent."""
    ranks = {rank: Program() for rank in PAIR}
    for program, op in zip(ranks.values(), ("send", "receive")):
        first = program.issue(op, "pp", PAIR, 2 * 10**9, seq=0)
        if wait_between:
            program.wait(first)
        second = program.issue(op, "pp", PAIR, 2 * 10**9, seq=1)
        program.wait(first).wait(second)
    timeline = replay(
        {rank: program.events for rank, program in ranks.items()},
        changed(UNIT, intra=Link("in", 1.0, 1e9, "made up")),
    )
    assert timeline.step_s == close(seconds)
    one, two = timeline.transfers(0)
    assert one.start_s == close(1) and one.end_s <= two.start_s


def test_a_collective_starts_with_its_last_member():
    programs = {rank: Program().compute(seconds) for rank, seconds in ((0, 1), (1, 5))}
    for program in programs.values():
        program.wait(program.issue("all_gather", "tp", PAIR, 2 * 10**9))
    timeline = replay({rank: program.events for rank, program in programs.items()}, UNIT)
    assert timeline.step_s == close(6)
    fast = timeline.accounts[0]
    assert (fast.waiting_s, fast.exposed_communication_s, fast.idle_s) == (close(5), close(1), close(4))


@pytest.mark.parametrize("sizes", [(2, 6), (6, 2)])
def test_a_transfer_takes_what_its_largest_payload_takes(sizes):
    """Rows for experts, say: members give different numbers of bytes to one call."""
    programs = {rank: Program() for rank in PAIR}
    for program, gigabytes in zip(programs.values(), sizes):
        program.wait(program.issue("all_to_all", "ep", PAIR, gigabytes * 10**9))
    timeline = replay({rank: program.events for rank, program in programs.items()}, UNIT)
    assert timeline.step_s == close(3)  # half of 6 GB leaves each rank
    assert [timeline.transfers(rank)[0].end_s for rank in PAIR] == [close(3)] * 2


def test_one_group_is_served_in_order_and_two_groups_share_wires():
    # Two transfers of 2 s: one after the other on one axis; side by side on two, at half the speed.
    steps = []
    for second, sharing in (("dp", True), ("tp", True), ("tp", False)):
        program = Program()
        ids = [program.issue("all_gather", axis, PAIR, 4 * 10**9) for axis in ("dp", second)]
        program.wait(ids[1]).wait(ids[0])
        steps.append(replay({0: program.events, 1: program.events}, UNIT, sharing=sharing).step_s)
    assert steps == [close(4), close(4), close(2)]


def messages(sends, latency=0.0, devices=64):
    """{name: when it ends} of messages of (source, destination, gigabytes, issued at second)."""
    programs = {rank: Program() for send in sends for rank in send[:2]}
    for seq, (source, destination, gigabytes, at) in enumerate(sorted(sends, key=lambda send: send[3])):
        for rank, op in ((source, "send"), (destination, "receive")):
            program = programs[rank]
            now = sum(event.flops for event in program.events if isinstance(event, Compute)) / 1e12
            program.compute(at - now)
            program.issue(op, "pp", (source, destination), gigabytes * 10**9, seq)
    here = changed(UNIT, devices_per_node=devices, nics_per_node=devices, intra=Link("in", latency, 1e9, ""))
    timeline = replay({rank: program.events for rank, program in programs.items()}, here)
    return {s.event.members: round(s.end_s, 9) for rank in programs for s in timeline.transfers(rank)}


def test_who_shares_a_wire():
    """Messages of one rank share its way out, those to one rank its way in; both ways of a rank do not meet."""
    assert messages([(0, 1, 2, 0), (0, 2, 2, 1)]) == {(0, 1): 3, (0, 2): 4}
    assert messages([(1, 0, 2, 0), (2, 0, 2, 1)]) == {(1, 0): 3, (2, 0): 4}
    assert messages([(0, 1, 2, 0), (1, 0, 2, 0), (1, 2, 2, 5)]) == {(0, 1): 2, (1, 0): 2, (1, 2): 7}
    # three leave rank 0 at a third each, so that the fourth has two thirds of rank 3's way in
    sends = [(0, 1, 1, 0), (0, 2, 1, 0), (0, 3, 1, 0), (4, 3, 3, 0)]
    assert messages(sends) == {(0, 1): 3, (0, 2): 3, (0, 3): 3, (4, 3): 4}
    # a latency takes no wire: it passes while others send
    assert messages([(0, 1, 2, 0), (0, 2, 2, 1)], latency=1.0) == {(0, 1): 4, (0, 2): 5}
    # rank 0's links and its share of the cards are two wires
    assert messages([(0, 1, 2, 0), (0, 2, 2, 0)], devices=2) == {(0, 1): 2, (0, 2): 2}
    assert messages([(0, 2, 2, 0), (0, 4, 2, 0)], devices=2) == {(0, 2): 4, (0, 4): 4}


def test_two_groups_share_a_network_card():
    """1 GB each, of ranks 0 and 2, and of 1 and 3, over one card of 1 GB/s per node: one alone has all of it,
    two have half each, and the second has all of it again as soon as the first is done."""
    here, ends = changed(UNIT, devices_per_node=2, nics_per_node=1), {}
    for late in (None, 0, 0.5):
        events = {rank: Program() for rank in range(4)}
        for rank, program in events.items():
            if rank % 2:
                program.compute(late or 0)
            if rank % 2 == 0 or late is not None:
                program.issue("all_reduce", "dp", (rank % 2, rank % 2 + 2), 10**9)
        timeline = replay({rank: program.events for rank, program in events.items()}, here)
        ends[late] = [round(span.end_s, 6) for rank in (0, 1) for span in timeline.transfers(rank)]
        for rank in (2, 3):
            assert [round(span.end_s, 6) for span in timeline.transfers(rank)] == ends[late][rank - 2 :][:1]
        alone = replay({0: events[0].events}, here).transfers(0)[0]
        assert alone.end_s == close(2), "without events the neighbour is taken to do the same"
    assert ends == {None: [1], 0: [2, 2], 0.5: [1.5, 2]}


def test_roofline():
    bound = [
        Compute("mm", 10**12, 10**8, "", "float32"),
        Compute("add", 0, 3 * 10**9),
        Compute("mm", 10**12, 0, "", "bfloat16"),
    ]
    assert [s.duration_s for s in replay({0: bound}, UNIT).spans[0]] == [close(1), close(3), close(0.25)]
    assert replay({0: bound}, UNIT, dtype="bf16").step_s == close(0.25 + 3 + 0.25)
    assert replay({0: bound}, UNIT, launch_s=0.5).step_s == close(4.25 + 1.5)
    half = changed(UNIT, compute_efficiency=0.5, memory_efficiency=0.5)
    assert replay({0: bound}, half).step_s == close(8.5)
    said = "test has no published rate for float8; choose from float32, bfloat16"
    with pytest.raises(ValueError, match=said):
        replay({0: [Compute("mm", 1, 0, "", "float8")]}, UNIT)


def test_the_algorithm_can_be_fixed():
    program = Program()
    program.wait(program.issue("all_reduce", "dp", tuple(range(64)), 100))
    times = {
        name: replay({0: program.events}, machine("h100"), algorithms={"all_reduce": name}).step_s
        for name in ("ring", "tree", "auto")
    }
    placement = collectives.place(range(64), machine("h100"))
    ring = collectives.seconds("all_reduce", 100, placement, "ring")
    assert times["ring"] == ring > times["tree"] >= times["auto"]


# ---- what goes wrong -------------------------------------------------------------------------------------
def both(first, second):
    return {0: first.events, 1: second.events}


def test_a_member_that_never_arrives_is_named():
    first, second = Program(), Program()
    for seq in range(2):
        first.wait(first.issue("all_reduce", "dp", PAIR, 8, seq, "train.py:41"))
    second.wait(second.issue("all_reduce", "dp", PAIR, 8, 0))
    said = r"rank 1 never arrives in all_reduce #1 on dp \(train.py:41\), where rank 0"
    with pytest.raises(ValueError, match=said):
        replay(both(first, second), UNIT)
    del first.events[-1]  # the same when nobody waits for it
    with pytest.raises(ValueError, match="rank 1 never arrives"):
        replay(both(first, second), UNIT)


def test_who_never_arrives_first_is_named_and_whose_word_is_not_heard():
    """Of several that are missing the one of the earliest call, whatever its rank."""
    here, early, late = Program(), Program(), Program()
    here.wait(here.issue("all_reduce", "dp", (0, 2), 8, 0))
    for seq in range(2):
        here.issue("all_reduce", "tp", PAIR, 8, seq)
    early.issue("all_reduce", "tp", PAIR, 8, 0)
    here.events.pop(1)  # nobody waits
    with pytest.raises(ValueError, match="^rank 2 never arrives in all_reduce #0 on dp"):
        replay({0: here.events, 1: early.events, 2: late.events}, UNIT)
    talks = Program()
    for seq in range(2):
        talks.issue("send", "pp", (0, 1), 8, seq)
    said = "rank 0 issues send #0 on pp .* stages are not in step; give the ev"
    with pytest.raises(ValueError, match=said):
        replay({0: talks.events}, UNIT)


def test_different_collectives_are_named():
    first, second = Program(), Program()
    first.issue("all_reduce", "dp", PAIR, 8, 3, "a.py:1")
    second.issue("all_gather", "dp", PAIR, 8, 3, "b.py:2")
    said = r"rank 1 issues all_gather #3 on dp \(b.py:2\) where rank 0 issues all_red"
    with pytest.raises(ValueError, match=said):
        replay(both(first, second), UNIT)


def test_a_deadlock_names_everyone():
    programs = Program(), Program()
    for program, axes in zip(programs, (("a", "b"), ("b", "a"))):
        for axis in axes:
            program.wait(program.issue("all_reduce", axis, PAIR, 8))
    heads = r"rank 0 never arrives in all_reduce #0 on b .* rank 1 is; rank 1 never .* on a .* rank 0 is$"
    with pytest.raises(ValueError, match=heads):
        replay(both(*programs), UNIT)


def test_other_errors():
    with pytest.raises(ValueError, match="rank 0 waits for transfer 5, which it has not issued"):
        replay({0: [Wait(5)]}, UNIT)
    stranger = Program()
    stranger.issue("all_reduce", "dp", (4, 5), 8)
    with pytest.raises(ValueError, match="rank 0 issues all_reduce #0 on dp .*, whose members are 4, 5"):
        replay({0: stranger.events}, UNIT)


# ---- every program ---------------------------------------------------------------------------------------
# Four ranks on two nodes as a 2x2 grid. All run the same calls in the same order, as SPMD programs do, with
# computation that differs by rank; a call is waited for at once or some steps later.
INSIDE, OUTSIDE = Link("in", 1e-3, 5 * GB, "made up"), Link("out", 4e-3, 2 * GB, "made up")
GRID = Machine("grid", DEVICE, 2, INSIDE, OUTSIDE, 1)  # both ranks of a node share its card
GROUPS = {"dp": lambda r: (r % 2, r % 2 + 2), "tp": lambda r: (r - r % 2, r - r % 2 + 1)}
GROUPS["world"] = lambda r: range(4)
OPERATIONS = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"]

steps = st.one_of(
    st.tuples(st.just("compute"), st.tuples(*[st.integers(0, 40)] * 4)),
    st.tuples(
        st.just("call"),
        st.sampled_from(OPERATIONS),
        st.sampled_from(sorted(GROUPS)),
        st.integers(0, 10**9),
        st.integers(0, 3),
    ),
    st.tuples(st.just("shift"), st.integers(1, 3), st.integers(0, 10**9), st.integers(0, 3)),
)
programs = st.lists(steps, max_size=25)


def written(program, blocking=False):
    """{rank: events}; `blocking` moves every Wait directly behind its call."""
    events = {rank: [] for rank in range(4)}
    for rank, out in events.items():
        issued, seqs, open_calls = 0, {}, []

        def issue(op, axis, members, payload_bytes):
            nonlocal issued
            seq = seqs[axis, members] = seqs.get((axis, members), -1) + 1
            out.append(
                Issue(issued, op, axis, members, payload_bytes, payload_bytes + rank, seq, "program.py:1")
            )
            issued += 1
            return Wait(issued - 1)

        for step in program:
            open_calls = [(delay - 1, wait) for delay, wait in open_calls]
            out += [wait for delay, wait in open_calls if delay < 0]
            open_calls = [(delay, wait) for delay, wait in open_calls if delay >= 0]
            if step[0] == "compute":
                out.append(Compute("mm", step[1][rank] * 10**10, step[1][0] * 10**6, "", "float32"))
                continue
            if step[0] == "call":
                waits = [issue(step[1], step[2], tuple(GROUPS[step[2]](rank)), step[3])]
            else:
                shift = step[1]
                waits = [
                    issue("send", "pp", (rank, (rank + shift) % 4), step[2]),
                    issue("receive", "pp", ((rank - shift) % 4, rank), step[2]),
                ]
            if blocking:
                out += waits
            else:
                open_calls += [(step[-1], wait) for wait in waits]
        out += [wait for _, wait in open_calls]
    return events


def compute_s(event):
    return max(event.flops / 1e12, event.bytes / 1e9)


def as_tasks(events):
    """The program for the other player, that of links.py, which knows work and copies only: a task for each
    event of a rank, and two for a transfer, whose latency takes no wire."""
    ways = {"all_reduce": "ring", "all_gather": "ring", "reduce_scatter": "ring"}
    ways |= {"broadcast": "ring", "all_to_all": "pairwise", "send": "direct", "receive": "direct"}
    tasks, transfers = [], {}
    for rank, mine in events.items():
        keys = {}
        for at, event in enumerate(mine):
            name, lane = f"{rank}.{at}", f"rank {rank}"
            if isinstance(event, Compute):
                tasks.append(Task(name, lane, compute_s(event)))
            elif isinstance(event, Wait):
                tasks.append(Task(name, lane, 0.0, after=(keys[event.id],)))
            else:
                key = keys[event.id] = f"{event.axis} {event.members} {event.seq}"
                tasks.append(Task(name, lane, 0.0))
                transfers.setdefault(key, []).append((event, name))
    bytes_per_s = {}
    for key, came in sorted(transfers.items(), key=lambda item: item[1][0][0].seq):
        event, stream = came[0][0], f"{came[0][0].axis} {came[0][0].members}"
        place = collectives.place(event.members, GRID)
        sizes = 0, event.payload_bytes
        latency, all_of_it = (collectives.seconds(event.op, n, place, ways[event.op]) for n in sizes)
        message = event.op in MESSAGE
        wires = wires_of(event) | ({f"alone {key}": 1} if place.most > 1 or place.nodes == 1 else {})
        bytes_per_s |= {wire: 2.0 if wire.startswith("card") else 1.0 for wire in wires}
        lane = f"latency {key}" if message else stream
        tasks.append(Task(f"latency {key}", lane, latency, after=tuple(name for _, name in came)))
        passed = wires if all_of_it > latency else ()
        tasks.append(Task(key, stream, all_of_it - latency, passed, after=(f"latency {key}",)))
    return tasks, bytes_per_s, ways


@settings(max_examples=60, deadline=None)
@given(programs)
def test_the_player_of_links_agrees(program):
    """Two engines that share the rule of fairness and nothing else."""
    events = written(program)
    tasks, bytes_per_s, ways = as_tasks(events)
    timeline = replay(events, GRID, algorithms=ways)
    run = play(tasks, bytes_per_s)
    assert timeline.step_s == close(float(run.end_s))
    for rank in events:
        for span in timeline.transfers(rank):
            assert span.end_s == close(run.end(f"{span.event.axis} {span.event.members} {span.event.seq}"))


MESSAGE = "send", "receive"


def wires_of(event):
    """{wire: how many members take it}: a rank's links, or the card that both ranks of a node share."""
    inside = len({rank // 2 for rank in event.members}) == 1
    pairs = [(rank, away) for away in (True, False) for rank in event.members]
    if event.op in MESSAGE:
        pairs = [(event.members[0], True), (event.members[1], False)]
    names = [f"rank {rank} {away}" if inside else f"card {rank // 2} {away}" for rank, away in pairs]
    return {name: names.count(name) for name in names}


@settings(max_examples=60)
@given(programs)
def test_the_parts_add_up_and_bytes_are_kept(program):
    events = written(program)
    timeline = replay(events, GRID)
    for rank, account in timeline.accounts.items():
        issued = [event for event in events[rank] if isinstance(event, Issue)]
        assert sorted(s.event.id for s in timeline.transfers(rank)) == [event.id for event in issued]
        found = sum(s.event.sent_bytes for s in timeline.transfers(rank))
        assert found == sum(event.sent_bytes for event in issued)
        assert account.compute_s == close(sum(compute_s(e) for e in events[rank] if isinstance(e, Compute)))
        assert account.compute_s + account.exposed_communication_s + account.idle_s == close(timeline.step_s)
        assert 0 <= account.overlap_s <= account.communication_s + 1e-12
        assert account.communication_s <= sum(s.duration_s for s in timeline.transfers(rank)) + 1e-9
        assert all(s.issued_s <= s.start_s <= s.end_s <= timeline.step_s for s in timeline.spans[rank])
    for spans in zip(*([s for s in timeline.transfers(r, "world")] for r in range(4))):
        assert len({(s.start_s, s.end_s) for s in spans}) == 1  # all members start and end together


@settings(max_examples=40)
@given(programs, st.permutations(range(4)))
def test_equal_input_equal_output_whatever_the_order_of_ranks(program, order):
    events = written(program)
    first, second = replay(events, GRID), replay({rank: events[rank] for rank in order}, GRID)
    assert first == second


@settings(max_examples=40)
@given(st.lists(steps.filter(lambda step: step[0] != "shift"), max_size=20))
def test_one_rank_stands_for_all_that_are_in_step(program):
    # When every rank computes the same, the events of one tell the whole story.
    program = [(step[0], (step[1][0],) * 4) if step[0] == "compute" else step for step in program]
    events = written(program)
    assert replay({2: events[2]}, GRID).step_s == close(replay(events, GRID).step_s)


span = st.tuples(st.integers(0, 60), st.integers(0, 9)).map(lambda pair: (pair[0], sum(pair)))
spans = st.lists(span, max_size=12)
