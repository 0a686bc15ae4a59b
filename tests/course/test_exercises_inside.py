"""What runs beside an answer, without a process: frames, the wire and the collectives of a rank, errors put in words."""

import collections
import queue
import re
import socket
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from minitrain.course.grading import judge, kit, trial
from minitrain.course.grading.inside import frames, wire
from minitrain.course.grading.inside import rank as of_an_answer
from minitrain.course.grading.inside.frames import BadFrame, Line, pack
from tests import patience

# ---- the wire of a rank ----------------------------------------------------------------------------------


class Recorded:
    """A line that answers every question with these bytes."""

    def __init__(self, answer=b""):
        self.sent, self.answer = [], answer

    def send(self, header, payload=b""):
        self.sent.append((header, payload))

    def receive(self):
        return {"is": "done", "op": self.sent[-1][0]["op"]}, self.answer


def test_a_rank_says_whether_another_of_its_threads_may_still_act():
    line, over = Recorded(), threading.Event()
    for alone in (threading.active_count() == 1, False):
        wire.Operation(wire.Wire(line), {"is": "barrier"}).wait()
        assert line.sent[-1][0]["alone"] == alone
        thread = threading.Thread(target=over.wait, daemon=True)
        thread.start()
    over.set()


def test_a_group_names_its_members_by_their_ranks_and_knows_no_tags():
    line = Recorded(bytes(8))
    group = wire.WireGroup(wire.Wire(line), 1, [4, 2, 7], "a name")
    x = torch.tensor([3.0, 4.0])
    group.send([x], 2)
    group.recv([x.clone()], 0)
    assert group.barrier().wait() and (group.rank(), group.size(), group.getBackendName()) == (1, 3, "judge")
    sent = {"is": "send", "peer": 7, "members": [4, 2, 7], "dtype": "float32", "shape": [2], "op": 1}
    assert line.sent[:2] == [(sent, x.numpy().tobytes()), (sent | {"is": "receive", "peer": 4, "op": 2}, b"")]
    assert line.sent[2][0] == {"is": "barrier", "members": [4, 2, 7], "op": 3}
    before = len(line.sent)
    for act in (group.send, group.recv):
        with pytest.raises(ValueError, match="^messages have no tags here: they arrive in the order"):
            act([x], 0, 1)
    assert group.send([torch.empty(0)], 0).wait() is True and len(line.sent) == before
    line.answer = torch.tensor([5.0, 6.0]).numpy().tobytes()
    assert group.fetch("weight", x).tolist() == [5.0, 6.0] and x.tolist() == [3.0, 4.0]
    assert line.sent[before][0] == {"is": "fetch", "name": "weight", "op": 4}


# ---- the kit's collectives -------------------------------------------------------------------------------


class Threads:
    """A group whose ranks are threads: what is sent waits in a queue for who receives it."""

    def __init__(self, rank, size, queues):
        self._rank, self._size, self.queues, self.sent = rank, size, queues, []

    def rank(self):
        return self._rank

    def size(self):
        return self._size

    def send(self, tensors, to):
        assert tensors[0].is_contiguous()
        self.sent.append((to, tensors[0].numel()))
        self.queues[self._rank, to].put(tensors[0].clone())
        return types.SimpleNamespace(wait=lambda: None)

    def recv(self, tensors, source):
        return types.SimpleNamespace(
            wait=lambda: tensors[0].copy_(self.queues[source, self._rank].get(timeout=patience.LONG_S))
        )


def on_threads(fn, *inputs):
    """[fn(input, group) on each rank], and what each sent as (to, elements)."""
    size, queues = len(inputs), collections.defaultdict(queue.SimpleQueue)
    groups = [Threads(rank, size, queues) for rank in range(size)]
    with ThreadPoolExecutor(size) as pool:
        results = list(pool.map(fn, inputs, groups))
    assert all(one.empty() for one in queues.values())
    return results, [group.sent for group in groups]


XS = [torch.arange(6.0).view(3, 2) * 10**rank for rank in range(3)]


def test_sums_and_maxima_in_rank_order_in_new_memory_or_in_place():
    total = XS[0] + XS[1] + XS[2]
    results, sent = on_threads(kit.all_reduce, *XS)
    assert all(one.equal(total) for one in results) and all(len(own) == 4 for own in sent)
    assert sum(n for own in sent for _, n in own) == 2 * 2 * 6
    signs = [XS[0] * (-1) ** rank - rank for rank in range(3)]
    results, _ = on_threads(lambda x, group: kit.all_reduce(x, group, op="max"), *signs)
    assert all(one.equal(torch.stack(signs).amax(0)) for one in results)
    mine = [x.clone() for x in XS]
    results, _ = on_threads(lambda x, group: kit.all_reduce(x, group, out=x), *mine)
    assert all(x.equal(total) and one.data_ptr() == x.data_ptr() for one, x in zip(results, mine))
    turned = [x.t() for x in XS]
    results, _ = on_threads(lambda x, group: kit.all_reduce(x, group, async_op=True).wait(), *turned)
    assert all(one.equal(total.t()) for one in results) and XS[1][2, 1] == 50, "nobody's own is written to"


def test_collectives_of_a_group_follow_one_another_also_in_the_background(monkeypatch):
    monkeypatch.setattr(kit, "_lanes", {})
    first, second = Threads(0, 1, None), Threads(0, 1, None)
    order, gate = [], threading.Event()
    slow = kit._perform(lambda: gate.wait(20) and order.append("slow") or "slow", first, True)
    assert kit._perform(lambda: order.append("other") or 1, second, False) == 1, "another group goes on"
    assert kit._perform(lambda: "theirs", second, True).wait() == "theirs"
    threading.Timer(0.05, gate.set).start()
    assert kit._perform(lambda: order.append("quick") or "quick", first, False) == "quick"
    assert slow.wait() == "slow" and order == ["other", "slow", "quick"] and len(kit._lanes) == 2
    for lane in kit._lanes.values():
        lane.shutdown()


def test_the_server_is_told_what_to_hide_and_has_nothing_of_its_callers(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    started = []

    def popen(command, **how):
        started.append((command, how))
        raise OSError("no process")

    monkeypatch.setattr(judge.subprocess, "Popen", popen)
    for walls in (True, False):
        with pytest.raises(OSError, match="no process"):
            judge.Judge(walls).start()
    (command, how), (bare, _) = started
    assert command[1:4] == ["-P", "-s", "-c"] and how["start_new_session"] and how["cwd"] == "/"
    assert command[4].endswith(f", {[str(judge.PACKAGE), str(judge.EXERCISES)]!r}, True)")
    assert bare[4].endswith(", False)")
    assert how["env"]["OMP_NUM_THREADS"] == "1" and not {"PYTHONPATH", "USER"} & how["env"].keys()
    assert how["env"]["HOME"] == "/"


# ---- frames ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "header, payload, fits", [(1 << 20, 5, True), ((1 << 20) + 1, 0, False), (9, 100, True), (9, 101, False)]
)
def test_what_announces_too_much_is_refused_before_it_arrives(header, payload, fits):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        line = Line(ours, 100)
        theirs.sendall(frames.SIZES.pack(header, payload))
        if fits:
            assert list(line.incoming()) == [], "it waits for the rest"
        else:
            with pytest.raises(BadFrame, match="the header or the payload is too long"):
                list(line.incoming())


def test_frames_are_found_wherever_the_stream_is_cut():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender, line = Line(theirs), Line(ours)
        told = [({"is": "a"}, b""), ({"is": "b", "n": 1}, b"12345"), ({"is": "c"}, b"\0" * 3)]
        whole = b""
        for header, payload in told:
            sender.send(header, payload)
            whole += ours.recv(999, socket.MSG_WAITALL | socket.MSG_DONTWAIT)
        assert line.sock is ours
        heard = []
        for at in range(0, len(whole), 7):
            theirs.sendall(whole[at : at + 7])
            heard += line.incoming()
        assert heard == told
        theirs.sendall(whole)
        assert [line.receive() for _ in told] == told
        theirs.close()
        assert line.receive() is None
        with pytest.raises(ConnectionResetError):
            next(line.incoming())


@pytest.mark.parametrize(
    "dtype, shape, size",
    [
        ("float64", [2, 3], 48), ("bool", [5], 5), ("complex64", [], 8), ("int8", [1] * 16, 1),
        ("int8", [1] * 17, None),
        ("int8", [(1 << 40) - 1], (1 << 40) - 1),
        ("int8", [1 << 40], None), ("int8", [-1], None), ("int8", [True], None), ("int8", (1,), None),
        ("float8_e4m3fn", [1], None), (["int8"], [1], None), (None, None, None),
    ],
)  # fmt: skip
def test_the_bytes_of_a_tensor_somebody_announced(dtype, shape, size):
    if size is None:
        with pytest.raises(BadFrame, match="not a tensor's dtype and shape"):
            frames.tensor_size(dtype, shape)
    else:
        assert frames.tensor_size(dtype, shape) == size


def test_tensors_of_a_value_are_in_the_order_of_the_tree_and_in_memory_of_their_own():
    x = torch.arange(6.0).view(2, 3)
    tree, payload = pack({"b": x.t(), 3: [x[0], (x[:, 1], torch.empty(0))]})
    assert payload == b"".join(one.contiguous().numpy().tobytes() for one in (x.t(), x[0], x[:, 1]))
    value = frames.unpack(tree, payload)
    assert list(value) == ["b", "3"] and value["b"].equal(x.t()) and type(value["3"][1]) is tuple
    value["b"].add_(1)
    assert value["3"][0].equal(x[0]) and value["3"][1][0].equal(x[:, 1]) and value["3"][1][1].shape == (0,)
    with pytest.raises(frames.NotData, match="^a set$"):
        pack([{1}])
    with pytest.raises(frames.NotData, match="^a torch.float8_e4m3fn tensor$"):
        pack(torch.ones(1).to(torch.float8_e4m3fn))


# ---- what a rank says of an error ------------------------------------------------------------------------

ERRORS = [
    ("x = 1\ndef f(:", "no error", r"rank 2 raised SyntaxError: .* \(line 2: def f\(:\)"),
    ("x = 1\nraise MemoryError", "memory limit", r"rank 2 asked for more memory than it may have \(line 2: raise MemoryError\)"),
    ("raise RuntimeError('DefaultCPUAllocator: can\\'t allocate memory: you')", "memory limit", "rank 2 asked for more .*"),
    ("import minitrain.ranks.launch", "own work", r"this task asks you to write it yourself: it imports minitrain.ranks.launch \(line 1: .*\)"),
    ("import nothing_like_it", "no error", "rank 2 raised ModuleNotFoundError: No module named 'nothing_like_it' .*"),
    ("raise NotListed('calls all_gather')", "own work", "this task asks .* yourself: it calls all_gather .*"),
    ("raise NotData('a set')", "data", "rank 2 returned a set; return tensors, numbers, text, or lists of them"),
    ("raise SystemExit(3)", "no error", r"rank 2 raised SystemExit: 3 \(line 1: raise SystemExit\(3\)\)"),
    ("raise ValueError('x' * 300)", "no error", f"rank 2 raised ValueError: {'x' * 200} .*"),
    (f"raise ValueError({'y' * 300!r})", "no error", f"rank 2 .* \\(line 1: raise ValueError\\('{'y' * 182}\\)"),
    ("raise NotImplementedError", "not attempted yet", ""),
]  # fmt: skip


@pytest.mark.parametrize("answer, property, said", ERRORS)
def test_an_error_is_told_by_the_rule_it_breaks(answer, property, said, monkeypatch):
    class Nowhere:
        def find_spec(self, name, path=None, target=None):
            if name.startswith("minitrain.ranks.launch"):
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(sys, "meta_path", [Nowhere(), *sys.meta_path])
    monkeypatch.delitem(sys.modules, "minitrain.ranks.launch", raising=False)
    names = {"NotListed": of_an_answer.NotListed, "NotData": frames.NotData}
    with pytest.raises(BaseException) as error:
        of_an_answer.run_cells([answer], None) if "def f(:" in answer else run_as_answer(answer, names)
    told = of_an_answer.described(error.value, 2)
    assert told["is"] == "raise" and told["property"] == property and told["property"] in trial.TOLD
    assert re.fullmatch(said, told["message"]), told["message"]
    assert "inside/rank.py" not in told["trace"] and len(told["trace"]) <= 8000
    assert bool(told["trace"]) == (property != "not attempted yet")


def run_as_answer(answer: str, names: dict) -> None:
    of_an_answer.remember(of_an_answer.CELL, answer)
    exec(compile(answer, of_an_answer.CELL, "exec"), names)


def test_of_an_answer_what_the_task_asks_for_and_drivers_around_it():
    answer = "def f(x): return double(x)\ndef g(x): return 0"
    start = dict(given=["def double(x): return 2 * x"], answer=answer, names=["f"])
    start |= dict(drivers=["def drive(x): return double(f(x))\ndef seen(): return 'g' in globals()"])
    assert of_an_answer.defined(start | {"call": "f"})(3) == 6
    assert of_an_answer.defined(start | {"call": "drive"})(3) == 12
    # what else an answer defines stays with it
    assert of_an_answer.defined(start | {"call": "seen"})() is False
    # no answer runs where none is asked for
    assert of_an_answer.defined(start | {"call": "double", "names": []})(4) == 8
    with pytest.raises(NameError, match="^the answer cell defines no h$"):
        of_an_answer.defined(start | {"call": "f", "names": ["f", "h"]})
