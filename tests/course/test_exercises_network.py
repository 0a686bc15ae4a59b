"""What the judge believes: frames that cannot hurt, a network that counts what gloo counts, and failures
called by their names.
"""

import inspect
import json
import socket

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minitrain import collectives, launch
from minitrain.course.grading.frames import BadFrame, Line, NotData, pack, unpack
from minitrain.course.grading.judge import Code, Judge
from minitrain.course.grading.network import Network
from minitrain.course.grading.trial import Failure
from minitrain.ledger import Ledger

# ---- frames -----------------------------------------------------------------------------------------------

plain_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
)


@given(plain_values)
def test_plain_data_survives(value):
    assert unpack(*through_json(pack(value))) == value


def through_json(packed):
    tree, payload = packed
    return json.loads(json.dumps(tree)), payload


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
)
@pytest.mark.parametrize("shape", [(), (3,), (2, 0, 4), (2, 3)])
def test_tensors_survive_bit_by_bit(dtype, shape):
    tensor = (torch.rand(shape) * 4).to(dtype)
    first, (second,) = unpack(*through_json(pack((tensor, [tensor.flatten()[1:]]))))
    assert first.dtype == dtype and torch.equal(first, tensor) and torch.equal(second, tensor.flatten()[1:])


@pytest.mark.parametrize(
    "value", [object(), {1, 2}, lambda: 1, torch.empty(2, dtype=torch.float8_e4m3fn), b"bytes"]
)
def test_what_is_no_data_is_refused_where_it_is_packed(value):
    with pytest.raises(NotData):
        pack([value])


@settings(max_examples=300)
@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=6) | st.sampled_from(["tensor", "list", "float32"]),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["tensor", "list", "tuple", "value", "dict"]), inner, max_size=2
            )
        ),
    ),
    st.binary(max_size=16),
)
def test_a_strangers_tree_gives_data_or_one_kind_of_error(tree, payload):
    try:
        unpack(tree, payload)
    except BadFrame:
        pass


@settings(max_examples=200)
@given(st.binary(max_size=80), st.booleans())
def test_a_strangers_bytes_give_frames_or_one_kind_of_error(data, with_length):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall((len(data).to_bytes(4, "little") if with_length else b"") + data + b" ")
        try:
            assert all(isinstance(header, dict) for header, _ in Line(ours).arrived())
        except BadFrame:
            pass


# ---- the network -----------------------------------------------------------------------------------------


def message(kind, peer, op, shape=(2,), dtype="float32"):
    return {"is": kind, "peer": peer, "op": op, "key": "0/0", "dtype": dtype, "shape": list(shape)}


def test_steps_count_what_had_to_follow_one_another():
    network = Network(3, [{}] * 3)
    for hop in range(2):  # 0 -> 1 -> 2: rank 1 passes on what it has received
        network.post(hop, message("send", hop + 1, op=10), bytes(8))
        network.post(hop + 1, message("receive", hop, op=20), b"")
        network.wait(hop + 1, {"op": 20, "alone": True})
    network.post(
        0, message("send", 2, op=11), bytes(8)
    )  # rank 0 has received nothing: this one follows nobody
    network.post(2, message("receive", 0, op=21), b"")
    assert [m.step for m in network.messages] == [1, 2, 1]


def test_a_send_is_over_when_somebody_asks_and_data_comes_when_somebody_waits():
    network = Network(2, [{}] * 2)
    network.post(0, message("send", 1, op=1), b"abcdefgh")
    network.wait(0, {"op": 1, "alone": True})
    network.post(1, message("receive", 0, op=2), b"")
    assert list(network.replies) == [(0, 1, b"")]
    network.wait(1, {"op": 2, "alone": True})
    assert list(network.replies) == [(0, 1, b""), (1, 2, b"abcdefgh")]
    assert [event.kind for event in network.events] == ["send", "receive"]


def test_nobody_can_go_on_only_when_all_that_run_wait_in_vain():
    network = Network(3, [{}] * 3)
    network.post(0, message("receive", 1, op=1), b"")
    network.wait(0, {"op": 1, "alone": True})
    assert not network.stuck(surely=True)
    network.running.discard(2)
    network.post(1, message("receive", 0, op=1), b"")
    network.wait(1, {"op": 1, "alone": False})
    assert not network.stuck(surely=True) and network.stuck(surely=False)
    assert network.waiting() == (
        "rank 0 waits to receive float32[2] from rank 1; "
        "rank 1 waits to receive float32[2] from rank 0; rank 2 has returned"
    )


# ---- the whole way ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def judge():
    with Judge() as judge:
        yield judge


def collective_calls(x, group):
    """Every way collectives use the network, blocking and not."""
    pending = [collectives.all_reduce(x * i, group, async_op=True) for i in range(2)]
    return [
        collectives.all_reduce(x, group),
        collectives.all_gather(x, group),
        collectives.broadcast(x, 1, group),
        collectives.reduce_scatter(x, group),
        collectives.all_to_all(x, group),
        collectives.rotate(x, group),
        *(handle.wait() for handle in pending),
    ]


def counted_on_gloo(inputs):
    group = torch.distributed.group.WORLD
    with Ledger() as ledger:
        results = collective_calls(inputs[group.rank()], group)
    return results, ledger.sent_bytes()


def test_collectives_give_and_send_the_same_on_gloo_and_before_the_judge(judge):
    inputs = [torch.arange(12.0, dtype=torch.float64) * (rank + 1) for rank in range(4)]
    code = Code(
        ["from minitrain import collectives", inspect.getsource(collective_calls)], "collective_calls"
    )
    outcome = judge.run(code, 4, [(x,) for x in inputs])
    on_gloo = launch.run(counted_on_gloo, inputs, ranks=4)
    assert outcome.sent_bytes == [sent for _, sent in on_gloo]
    for ours, (theirs, _) in zip(outcome.results, on_gloo):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs))


SUBGROUPS = """
import torch
from minitrain import collectives
from minitrain.mesh import Mesh
def f(x, group):
    mesh = Mesh(dp=2, tp=2)
    sums = [collectives.all_reduce(x, mesh.group(axis)) for axis in ("tp", "dp")]
    return *sums, collectives.axis_of(group)
"""


def test_a_mesh_works_on_the_judges_network(judge):
    results = judge.run(
        Code([SUBGROUPS], "f"), 4, [(torch.tensor([2.0**rank]),) for rank in range(4)]
    ).results
    assert [(tp.item(), dp.item()) for tp, dp, _ in results] == [(3, 5), (3, 10), (12, 5), (12, 10)]
    assert {axis for _, _, axis in results} == {"world"}


WRONG = {
    "no deadlock": (
        "collectives.receive(x, 1 - group.rank(), group)",
        "nobody can go on: rank 0 waits to receive float32[3] from rank 1; rank 1 waits to receive",
    ),
    "matching messages": (
        "collectives.send(x, 1, group) if group.rank() == 0 else collectives.receive(x.double(), 0, group)",
        "rank 0 sends float32[3] and rank 1 receives float64[3]",
    ),
    "no message left": (
        "group.rank() or collectives.send(x, 1, group, async_op=True) and 1",
        "rank 0 sent to rank 1, which never received it",
    ),
    "data": ("object()", "a object"),
    "own work": ("collectives.all_gather(x, group)", "it calls all_gather (line 3: return collectives.all_"),
    "no error": (
        "1.0 / group.rank()",
        "rank 0 raised ZeroDivisionError: float division by zero (line 3: return 1.0 / group",
    ),
    "a result": ("__import__('os')._exit(0)", "ended without returning"),
    "memory limit": ("torch.ones(1 << 33)", "asked for more memory than it may have"),
    "time limit": ("__import__('time').sleep(100)", "not done after 1.5 s; rank 0 computes; rank 1 computes"),
}


@pytest.mark.parametrize("property", WRONG)
def test_each_rule_is_named_with_rank_and_line(judge, property):
    expression, message = WRONG[property]
    given = "import torch\nfrom minitrain import collectives"
    code = Code([given, f"\ndef f(x, group):\n    return {expression}\n"], "f")
    limit_s = 1.5 if property == "time limit" else 20
    with pytest.raises(Failure) as caught:
        judge.run(code, 2, [(torch.ones(3),)] * 2, forbid=["all_gather"], time_limit_s=limit_s)
    assert caught.value.property == property and message in caught.value.message


FETCHES = """
import torch
from minitrain import collectives
NAMES = ("third", "second", "first")
def at_the_end(group):
    return collectives.all_reduce(sum(group.fetch(name, torch.empty(2)) for name in NAMES), group)
def overlapped(group):
    handles = [collectives.all_reduce(group.fetch(name, torch.empty(2)), group, async_op=True) for name in NAMES]
    return sum(handle.wait() for handle in handles)
"""


@pytest.mark.parametrize("function, order", [("at_the_end", "fff.."), ("overlapped", "f..f..f..")])
def test_sending_while_computing_shows_in_the_order_of_events(judge, function, order):
    """Gradients come from the judge, layer by layer. The messages of all-reduces stand between them, or all
    come last.
    """
    names = ("first", "second", "third")
    secrets = [{name: torch.full((2,), 1.0 + i + rank) for i, name in enumerate(names)} for rank in range(2)]
    outcome = judge.run(Code([FETCHES], function), 2, [(), ()], secrets=secrets)
    assert outcome.results[1].tolist() == [15.0, 15.0]
    signs = {"fetch": "f", "send": "."}
    assert (
        "".join(signs[event.kind] for event in outcome.events if event.rank == 0 and event.kind in signs)
        == order
    )


def test_torchs_own_collectives_say_where_to_go(judge):
    code = Code(
        ["import torch.distributed as dist", "def f(x, group): return dist.all_reduce(x, group=group)"], "f"
    )
    with pytest.raises(Failure, match="this network only sends and receives"):
        judge.run(code, 2, [(torch.ones(1),)] * 2)


def test_the_judge_survives_an_interrupt(judge, monkeypatch):
    from minitrain.course.grading import trial

    with monkeypatch.context() as patch:
        patch.setattr(trial.Trial, "_look_at_memory", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            judge.run(Code(["def f():\n    while True: pass"], "f"), 1, [()], network=False)
    seven = Code(["def f(): return 7"], "f")
    assert judge.run(seven, 1, [()], network=False).results == [7]
    judge.server.kill()
    judge.server.wait()
    assert judge.run(seven, 1, [()], network=False).results == [7], (
        "nor does it need the same server for ever"
    )
