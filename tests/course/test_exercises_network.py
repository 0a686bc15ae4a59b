"""What the judge believes: harmless frames, a network that counts as gloo does, failures by their names."""

import inspect
import json
import signal
import socket
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minitrain import collectives, launch
from minitrain.course.grading.inside import rank
from minitrain.course.grading.inside.frames import SIZES, BadFrame, Line, NotData, pack, unpack
from minitrain.course.grading.judge import Code
from minitrain.course.grading.network import Mismatch, Network
from minitrain.course.grading.trial import Broken, Failure, Trial
from minitrain.ranks.ledger import Ledger

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


def test_a_boolean_is_0_or_1_whatever_a_stranger_sends():
    """A byte of 2 would be a boolean that equals neither."""
    given = unpack({"tensor": ["bool", [4]]}, bytes((0, 1, 2, 255)))
    assert given.view(torch.uint8).tolist() == [0, 1, 1, 1]


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
        value = unpack(tree, payload)
    except BadFrame:
        return
    assert len(pack(value)[1]) <= len(payload), "what came in is data, and no more of it than was sent"


@settings(max_examples=200)
@given(st.binary(max_size=80), st.booleans())
def test_a_strangers_bytes_give_frames_or_one_kind_of_error(data, with_length):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall((SIZES.pack(len(data), 1) if with_length else b"") + data + b" ")
        try:
            assert all(isinstance(header, dict) for header, _ in Line(ours).incoming())
        except BadFrame:
            pass


# ---- the network -----------------------------------------------------------------------------------------


def message(kind, peer, op, shape=(2,), dtype="float32"):
    where = {"is": kind, "peer": peer, "op": op, "members": [0, 1, 2]}
    return {**where, "dtype": dtype, "shape": list(shape)}


def test_steps_count_what_had_to_follow_one_another():
    network = Network(3, [{}] * 3)
    for hop in range(2):  # 0 -> 1 -> 2: rank 1 passes on what it has received
        network.post(hop, message("send", hop + 1, op=10), bytes(8))
        network.post(hop + 1, message("receive", hop, op=20), b"")
        network.wait(hop + 1, {"op": 20, "alone": True})
    # rank 0 has received nothing: this one follows nobody
    network.post(0, message("send", 2, op=11), bytes(8))
    network.post(2, message("receive", 0, op=21), b"")
    assert [m.step for m in network.messages] == [1, 2, 1]
    # what came later and was sent earlier makes rank 2 forget nothing
    network.wait(2, {"op": 21, "alone": True})
    network.post(2, message("send", 0, op=22), bytes(8))
    network.post(0, message("receive", 2, op=12), b"")
    assert network.messages[-1].step == 3


def test_as_many_bytes_as_like_pass_but_few_at_once():
    network = Network(3, [{}] * 3, limit_bytes=20)
    for op in range(10):
        network.post(0, message("send", 1, op=op), bytes(8))
        network.post(1, message("receive", 0, op=op), b"")
        network.wait(0, {"op": op})
        network.wait(1, {"op": op})
    for op in (10, 11):
        network.post(0, message("send", 1, op=op), bytes(8))
    with pytest.raises(BadFrame, match="too many bytes are under way at once"):
        network.post(0, message("send", 1, op=12), bytes(8))


def test_a_message_is_received_as_what_it_was_sent():
    """As many bytes are not enough."""
    network = Network(3, [{}] * 3)
    network.post(0, message("send", 1, op=1), bytes(8))
    said = r"rank 0 sends float32\[2\] and rank 1 receives int64\[1\]"
    with pytest.raises(Mismatch, match=said):
        network.post(1, message("receive", 0, op=1, shape=(1,), dtype="int64"), b"")


def library():
    raise NotImplementedError("not on this device")


@pytest.mark.parametrize(
    "answer, property, said",
    [
        ("raise NotImplementedError()", "not attempted yet", ""),
        (
            "library()",
            "no error",
            "rank 2 raised NotImplementedError: not on this device (line 1: library())",
        ),
        (
            "def outer():\n    inner()\ndef inner():\n    1 / 0\nouter()",
            "no error",
            "rank 2 raised ZeroDivisionError: division by zero (line 4: 1 / 0)",
        ),
    ],
)
def test_an_error_is_told_with_the_innermost_line_of_the_answer(answer, property, said):
    """One of torch's that something is not implemented is no answer that was not attempted."""
    rank.remember(rank.CELL, answer)
    with pytest.raises((NotImplementedError, ZeroDivisionError)) as error:
        exec(compile(answer, rank.CELL, "exec"), {"library": library})
    told = rank.described(error.value, 2)
    assert (told["property"], told["message"]) == (property, said)


def test_a_driver_finds_the_answers_names_whatever_given_cells_define():
    cells = ["f = 1", "def call():\n    return f"]
    assert rank.run_cells(cells, {"f": 2})["call"]() == 2 and rank.run_cells(cells)["call"]() == 1


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_of_ranks_that_fail_alike_the_first_speaks(order):
    with Trial(Network(3, [{}] * 3), time_limit_s=9) as trial:
        trial.network.running.clear()
        trial.failures = {rank: Failure("a result", f"rank {rank} ended") for rank in order}
        with pytest.raises(Failure, match="rank 1 ended"):
            trial._end_what_cannot_go_on()


# ---- the whole way ---------------------------------------------------------------------------------------


def collective_calls(x, group):
    """Every collective of the kit, blocking and not."""
    pending = [collectives.all_reduce(x * i, group, async_op=True) for i in range(2)]
    uneven = [1 + (group.rank() + to) % 2 for to in range(4)]
    return [
        *(handle.wait() for handle in pending),
        collectives.rotate((x, x + 1), group, async_op=True).wait()[1], collectives.all_reduce(x, group),
        collectives.all_reduce(x, group, op="max"), collectives.all_gather(x, group),
        collectives.reduce_scatter(x, group), collectives.all_to_all(x, group),
        collectives.all_to_all(x[: sum(uneven)], group, send_sizes=uneven, receive_sizes=uneven),
        collectives.rotate(x, group), collectives.rotate(x, group, -1),
    ]  # fmt: skip


def in_trees(x, group):
    """What the package sends through a tree, and the kit from one rank: all ranks together send the same."""
    given = x.clone()
    collectives.broadcast(x, 1, group).add_(1)  # memory of its own, also where x is
    assert x.equal(given)
    return collectives.broadcast(x, 1, group), collectives.all_reduce(x[1:2], group)


def counted_on_gloo(inputs):
    group = torch.distributed.group.WORLD
    with Ledger() as ledger:
        results = collective_calls(inputs[group.rank()], group)
    with Ledger() as tree:
        in_trees(inputs[group.rank()], group)
    return results, ledger.sent_bytes(), tree.sent_bytes()


def code_of(function, *more, collectives=""):
    sources = ["import torch", "from minitrain import collectives", *map(inspect.getsource, more)]
    name, source = function.__name__, inspect.getsource(function)
    return Code(given=sources, answer=source, names=[name], call=name, collectives=collectives)


ALL = "all_reduce all_gather reduce_scatter all_to_all broadcast rotate"


def test_the_kits_collectives_give_and_send_what_the_packages_do(judge):
    inputs = [torch.arange(12.0, dtype=torch.float64) * (rank + 1) for rank in range(4)]
    calls = [[(x,)] for x in inputs]
    outcome = judge.run(code_of(collective_calls, collectives=ALL), calls)
    on_gloo = launch.run(counted_on_gloo, inputs, ranks=4)
    assert outcome.sent_bytes == [sent for _, sent, _ in on_gloo]
    for (ours,), (theirs, _, _) in zip(outcome.results, on_gloo, strict=True):
        assert len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))
    outcome = judge.run(code_of(in_trees, collectives="broadcast all_reduce"), calls)
    assert all(x.equal(inputs[1]) and total.item() == 10 for ((x, total),) in outcome.results)
    assert sum(outcome.sent_bytes) == sum(sent for _, _, sent in on_gloo) == 2 * 3 * 96 + 6 * 8


def sums_by_row_and_column(x, group):
    import torch.distributed as dist

    rank = group.rank()
    groups = [
        dist.new_group(ranks, use_local_synchronization=True)
        for ranks in ([rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2])
    ]
    return [collectives.all_reduce(x, group) for group in groups]


def test_groups_within_the_group(judge):
    code = code_of(sums_by_row_and_column, collectives="all_reduce")
    results = judge.run(code, [[(torch.tensor([2.0**rank]),)] for rank in range(4)]).results
    assert [(a.item(), b.item()) for ((a, b),) in results] == [(3, 5), (3, 10), (12, 5), (12, 10)]


def test_an_answer_draws_the_same_numbers_in_every_run(judge):
    code = Code(["import torch"], "def f():\n    return torch.rand(3)", names=["f"], call="f")
    (drawn,) = judge.run(code, [[()]], network=False).results[0]
    assert drawn.equal(torch.rand(3, generator=torch.Generator().manual_seed(0)))


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
    "time limit": ("__import__('time').sleep(100)", "not done after 1 s of"),
}


@pytest.mark.parametrize("property", WRONG)
def test_each_rule_is_named_with_rank_and_line(judge, property):
    expression, message = WRONG[property]
    given = "import torch\nfrom minitrain import collectives"
    code = Code([given], f"\ndef f(x, group):\n    return {expression}\n", names=["f"], call="f")
    limit_s = 1 if property == "time limit" else 20
    with pytest.raises(Failure) as caught:
        judge.run(code, [[(torch.ones(3),)]] * 2, time_limit_s=limit_s)
    assert caught.value.property == property and message in caught.value.message
    if property == "time limit":
        assert "rank 0 computes; rank 1 computes" in caught.value.message
        lines = caught.value.detail.splitlines()
        places = [line for line in lines if 'File "<your answer>", line 3, in f' in line]
        assert [line[:8] for line in places] == ["[rank 0]", "[rank 1]"], "each rank says where it is"


FETCHES = """
NAMES = ("third", "second", "first")
def at_the_end(group):
    return collectives.all_reduce(sum(group.fetch(name, torch.empty(2)) for name in NAMES), group)
def overlapped(group):
    handles = [collectives.all_reduce(group.fetch(name, torch.empty(2)), group, async_op=True) for name in NAMES]
    return sum(handle.wait() for handle in handles)
"""


@pytest.mark.parametrize("function, order", [("at_the_end", "fff.."), ("overlapped", "f..f..f..")])
def test_sending_while_computing_shows_in_the_order_of_events(judge, function, order):
    """Gradients come from the judge by layers. All-reduces' messages stand between them, or all come last."""
    names = ("first", "second", "third")
    secrets = [{name: torch.full((2,), 1.0 + i + rank) for i, name in enumerate(names)} for rank in range(2)]
    given = ["import torch\nfrom minitrain import collectives"]
    code = Code(given, FETCHES, names=[function], call=function, collectives="all_reduce")
    outcome = judge.run(code, [[()], [()]], secrets=secrets)
    assert outcome.results[1][0].tolist() == [15.0, 15.0]
    signs = {"fetch": "f", "send": "."}
    found = "".join(signs[event.kind] for event in outcome.events if event.rank == 0 and event.kind in signs)
    assert found == order


def test_torchs_own_collectives_say_where_to_go(judge):
    answer = "import torch.distributed as dist\ndef f(x, group): return dist.all_reduce(x, group=group)"
    code = Code(answer=answer, names=["f"], call="f")
    with pytest.raises(Failure, match="this network only sends and receives") as error:
        judge.run(code, [[(torch.ones(1),)]] * 2)
    assert "distributed_c10d.py" in error.value.detail and "course/grading" not in error.value.detail


def test_the_judge_survives_an_interrupt(judge, monkeypatch):
    from minitrain.course.grading import trial

    def code(answer):
        return Code(answer=answer, names=["f"], call="f")

    with monkeypatch.context() as patch:
        interrupt = lambda self: (_ for _ in ()).throw(KeyboardInterrupt)
        patch.setattr(trial.Trial, "_end_what_cannot_go_on", interrupt)
        with pytest.raises(KeyboardInterrupt):
            judge.run(code("def f():\n    while True: pass"), [[()]], network=False)
    seven = code("def f(): return 7")
    assert judge.run(seven, [[()]], network=False).results == [[7]]
    pid = judge.server.pid
    for _ in range(3):
        judge.server.send_signal(signal.SIGINT)
    assert judge.run(seven, [[()]], network=False).results == [[7]] and judge.server.pid == pid
    judge.server.kill()
    judge.server.wait()
    with pytest.raises(Broken, match="the server of answers has ended: it said nothing"):
        judge._request({})
    assert judge.server is None
    # nor does it need the same server for ever
    assert judge.run(seven, [[()]], network=False).results == [[7]]


# ---- who sees whom ----------------------------------------------------------------------------------------


def run(judge, answer, call, names=("f",), ranks=1, **parts):
    code = Code(answer=answer, names=names, call=call, **parts)
    return judge.run(code, [[(3,)]] * ranks, network=False).results[0][0]


def test_only_the_names_a_task_asks_for_leave_an_answer(judge):
    given = ["def double(x):\n    return 2 * x\ndef unused(x): return x"]
    drivers = ["def drive(x):\n    return [double(f(x)), secret(x)]\ndef secret(x):\n    return x + 1"]
    honest = "def f(x):\n    return double(x)"
    assert run(judge, honest, "drive", given=given, drivers=drivers) == [12, 4]
    replaces = "def double(x): return 0\ndef drive(x): return 'mine'\ndef secret(x): return 0\nglobals()['drive'] = drive\n"
    found = run(judge, replaces + "def f(x):\n    return 2 * x", "drive", given=given, drivers=drivers)
    assert found == [12, 4]
    looks = "def f(x):\n    return sorted(set(globals()) & {'drive', 'secret', 'double'})"
    assert run(judge, looks, "f", given=given, drivers=drivers) == ["double"]
    with pytest.raises(Failure, match="the answer cell defines no f"):
        run(judge, "g = 1", "f")
    assert run(judge, "f = 5", "f") == 5


def test_as_many_results_as_cases(judge):
    code = Code(answer="def f(x): return [x] * x", names=["f"], call="f")
    assert judge.run(code, [[(0,), (2,)]], network=False).results == [[[], [2, 2]]]
    forged = (
        "import gc\ndef f(x):\n    for line in gc.get_objects():\n        if type(line).__name__ == 'Line':\n"
    )
    forged += "            line.send({'is': 'return', 'value': {'list': []}})\n    import os; os._exit(0)"
    with pytest.raises(Failure, match="2 results are wanted"):
        judge.run(replace(code, answer=forged), [[(0,), (2,)]], network=False)


WITHOUT = {
    "grad": "torch.autograd.grad((y * y).sum(), y)[0]",
    "backward": "((y * y).sum().backward(), y.grad)[1]",
    "the engine": "torch.autograd.Variable._execution_engine.run_backward(((y * y).sum(),), (torch.ones(()),), False, False, (y,))[0]",
    "forward mode": "torch.func.jvp(lambda y: y * y, (x,), (x,))[1]",
    "func": "torch.func.grad(lambda y: (y * y).sum())(x)",
}


@pytest.mark.parametrize("way", WITHOUT)
def test_without_autograd_there_is_no_derivative(judge, way):
    answer = "import torch\ndef f(x):\n    with torch.inference_mode(False), torch.enable_grad():\n"
    answer += f"        y = x.clone().requires_grad_()\n        out = {WITHOUT[way]}\n        return out"
    code, calls = Code(answer=answer, names=["f"], call="f"), [[(torch.arange(3.0),)]]
    judge.run(code, calls, network=False)
    with pytest.raises(Failure) as caught:
        judge.run(code, calls, network=False, autograd=False)
    assert caught.value.property == "own work" and "it calls autograd" in str(caught.value)
