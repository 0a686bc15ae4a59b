"""A tensor is made where it is used: what a technique makes says on which device.

On a laptop every tensor is the host's, so one that is made there in a computation of a GPU's is seen by
nobody. Read from the source: what makes a tensor of numbers and shapes has `device=`. Run on a device that
is not there: the parts of the course that a reader takes home, where whatever meets a host's tensor raises.
"""

import ast
import inspect
import os
import re
import tempfile
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from minitrain.compose.parallelize import parallelize
from minitrain.context.ring import gathered_attention, ring_attention
from minitrain.context.ulysses import ulysses_attention
from minitrain.data_parallel.bucketed import GradReducer
from minitrain.data_parallel.replicated import Replicated
from minitrain.data_parallel.zero1 import Zero1
from minitrain.data_parallel.zero2 import Zero2
from minitrain.data_parallel.zero3 import Zero3
from minitrain.memory.host_optimizer import HostOptimizer
from minitrain.memory.recompute import recompute
from minitrain.model.config import GPTConfig
from minitrain.model.data.batches import Rows, random_tokens
from minitrain.model.layers import causal_attention
from minitrain.model.training.optim import AdamW, clip_grad_norm
from minitrain.moe.dispatch import Dispatch
from minitrain.moe.router import balanced
from minitrain.plan.strategy import Strategy
from minitrain.ranks import checks, collectives
from minitrain.ranks.launch import dryrun
from minitrain.systems.attention.packed import packed_attention
from minitrain.systems.memory.activations import AwayActivations
from minitrain.tensor_parallel.linear import ColumnLinear, RowLinear
from tests import nonsense
from tests.pretend import PRETENDED, needs_pretended, pretended

PACKAGE = Path(__file__).parent.parent / "minitrain"
ROOMS = "attention checkpoint compose context data_parallel memory model moe pipeline precision systems"
MAKERS = "arange as_tensor empty empty_strided eye from_numpy full linspace logspace ones rand randint randn"
MAKERS += " randperm scalar_tensor tensor tril_indices triu_indices zeros"
ON_THE_HOST = {  # where, and why
    "systems/attention/packed.py:__init__": "counts on their way to a list",
    "systems/faults/live.py:keep": "a length",
    "systems/faults/survive.py:_vote": "two numbers of the host's",
    "checkpoint/first.py:load": "which elements were found: a mask, kept beside the files' bytes",
    "checkpoint/load.py:read": "what a file has",
    "checkpoint/snapshot.py:begin": "nothing",
    "checkpoint/snapshot.py:_allocate": "the host's copy",
    "compose/parallelize.py:check": "is this a dry run?",
    "memory/host_optimizer.py:fused_adamw": "the step of a kernel for the host",
    "memory/pools.py:new_host": "is this a dry run?",
    "model/data/batches.py:batch": "rows of a file; a run moves them",
    "model/data/batches.py:random_tokens": "rows by a generator of the host's; a run moves them",
    "systems/data/corpus.py:batch": "rows of a file; a run moves them",
    "model/gpt.py:initialise": "drawn on the host, so that every device has the same; copied",
    "precision/rounding.py:every_value": "a table to look at",
    "systems/attention/flash_3.py:random_signs": "drawn on the host; `turned` moves them",
    "systems/checkpoint/in_memory.py:gather_plain": "a length, for the network of the host",
    "systems/checkpoint/in_memory.py:tensor_of": "what a file has",
    "systems/checkpoint/in_memory.py:stripe": "what a file has",
    "systems/checkpoint/in_memory.py:_meet": "what a file has",
    "systems/checkpoint/in_memory.py:_rebuild": "what a file has",
    "systems/checkpoint/increments.py:put_rows": "what a file has",
    "systems/cluster/trials.py:trained": "drawn on the host, where all of it runs",
    "systems/data_parallel/loss_by_bytes.py:learn": "drawn on the host, where all of it runs",
    "systems/data_parallel/loss_by_bytes.py:step": "drawn on the host, where all of it runs",
    "systems/data_parallel/loss_by_bytes.py:network": "drawn on the host, where all of it runs",
    "systems/data_parallel/negotiated.py:_ask": "bits, for the network of the host",
    "systems/faults/corruption.py:odd_replicas": "checksums, for the network of the host",
    "systems/faults/detect.py:heat_map": "times, for the network of the host",
    "systems/faults/detect.py:probe": "messages of the network of the host",
    "systems/faults/detect.py:self_check": "numbers, for the network of the host",
    "systems/memory/files.py:_enter": "what a file has; moved below",
    "systems/moe/balance.py:placed": "a table filled number by number; moved below",
    "systems/moe/balance.py:shadows": "an index; moved below",
    "systems/moe/topology.py:bandwidths": "a table of machines",
    "systems/precision/nvfp4.py:": "16 signs, the same everywhere; `by_token` moves them",
    "systems/rlhf/adapters.py:__init__": "drawn on the host by its name, as a model is; moved at once",
    "systems/tensor_parallel/random.py:run": "one number of the generator of the host",
}


def homeless(tree: ast.AST, name: str = "") -> set[tuple[str, int]]:
    """(the function, the line) of each call that makes a tensor without saying where."""
    found = set()
    for node in ast.iter_child_nodes(tree):
        inside = node.name if isinstance(node, ast.FunctionDef) else name
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            of_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
            if of_torch and node.func.attr in MAKERS.split():
                if not {None, "device"} & {keyword.arg for keyword in node.keywords}:
                    found.add((inside, node.lineno))
        found |= homeless(node, inside)
    return found


def test_what_makes_a_tensor_says_where():
    found = {}
    for room in ("tensor_parallel", *ROOMS.split()):
        for path in sorted((PACKAGE / room).rglob("*.py")):
            own = path != PACKAGE / "compose/first.py"  # it sets torch's default device, as nanoGPT would
            for name, line in homeless(ast.parse(path.read_text())) if own else ():
                found.setdefault(f"{path.relative_to(PACKAGE)}:{name}", line)
    new = {f"{where} (line {line})" for where, line in found.items() if where not in ON_THE_HOST}
    assert not new, f"{sorted(new)}: give device=, like=, new_..; on purpose the host's: name it above"
    assert ON_THE_HOST.keys() <= found.keys(), sorted(ON_THE_HOST.keys() - found.keys())


def test_the_reader_of_sources_sees_what_it_shall():
    source = "def f(x):\n  torch.zeros(3)\n  torch.zeros(3, device=x.device)\n  torch.zeros(3, **how)"
    assert homeless(ast.parse(source)) == {("f", 2)}
    assert homeless(ast.parse("x.new_zeros(3), torch.zeros_like(x), other.zeros(3)")) == set()


def test_a_device_is_one_of_torchs_or_a_name():
    for good in ("cpu", "cuda:1", torch.device("cuda", 0), torch.device("privateuseone", 0)):
        checks.require_device(device=good)
    for bad in ("gpu:0", "cuda:-1", 3, None, ["cpu"]):
        with pytest.raises(ValueError, match="use cpu, cuda"):
            checks.require_device(device=bad)


# ---- on a device that is not there ---------------------------------------------------------------------


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16, device=PRETENDED), nn.GELU(), nn.Linear(16, 8, device=PRETENDED))


def attend(core) -> list:
    q, k, v = (torch.empty(2, 4, 8, 4, device=PRETENDED, requires_grad=True) for _ in range(3))
    core(q, k, v).sum().backward()
    return [q.grad, k.grad, v.grad]


def trained(net: nn.Module, optimizer, finish=lambda: None, parts=None) -> list:
    """Two steps."""
    for _ in range(2):
        optimizer.zero_grad()
        (parts or net)(torch.empty(3, 8, device=PRETENDED)).sum().backward()
        finish()
        optimizer.step()
    return list(net.parameters())


def synced(make) -> list:
    net = model()
    sync = make(net, collectives.world(), partial(AdamW, lr=0.1))
    return trained(net, sync, sync.finish)


def cut_over_ranks() -> list:
    first, act, last = model()
    both = nn.Sequential(ColumnLinear(first, collectives.world()), act, RowLinear(last, collectives.world()))
    return trained(both, torch.optim.SGD(both.parameters(), lr=0.1))


def dispatched() -> list:
    x, scores = (torch.empty(8, n, device=PRETENDED, requires_grad=True) for n in (5, 4))
    routing = balanced(scores, 2, torch.arange(8, device=PRETENDED).view(1, 8))
    trip = Dispatch(routing, collectives.world())
    trip.back(trip.there(x) * 2, routing.weights).sum().backward()
    return [x.grad]


def reduced() -> list:
    net = model()
    reducer = GradReducer(net.parameters(), collectives.world())
    return trained(net, torch.optim.AdamW(net.parameters()), reducer.finish)


def on_the_host(delayed: bool) -> list:
    net = model()
    host = HostOptimizer(AdamW(net.parameters(), lr=0.1), delayed=delayed, warmup_steps=1)
    for param in net.parameters():
        param.register_post_accumulate_grad_hook(lambda param: host.on_grad_final(param, param.grad))
    trained(net, host, host.on_finish)
    assert {twin.device.type for twin in host.twin_of.values()} == {"cpu"}
    return list(net.parameters())


def away() -> list:
    net = model()
    AwayActivations(net.parameters).watch(net, net)
    return trained(net, torch.optim.SGD(net.parameters(), lr=0.1))


def again() -> list:
    net = model()
    return trained(
        net, torch.optim.SGD(net.parameters(), lr=0.1), parts=lambda x: recompute(lambda: net(x.tanh()))
    )


def clipped() -> list:
    net = model()
    finish = lambda: clip_grad_norm(list(net.parameters()), 1.0)
    return trained(net, AdamW(net.parameters(), lr=0.1), finish)


def by_chance() -> list:
    """Its numbers are drawn where the update is."""
    config = GPTConfig(vocab_size=16, d_model=8, num_layers=1, num_heads=2, max_positions=8)
    strategy = Strategy(dp=4, zero=2, precision="bfloat16_stochastic", offload="optimizer")
    run = parallelize(config, strategy, AdamW, device=torch.device(PRETENDED))
    run.step(run.batch(Rows(lambda *at: random_tokens(*at, 8, 8, 16), 8, 8), 0))
    run.settle()
    return list(run.model.parameters())


TAKEN_HOME = {
    "ring": lambda: attend(partial(ring_attention, group=collectives.world())),
    "gathered": lambda: attend(partial(gathered_attention, group=collectives.world())),
    "ulysses": lambda: attend(partial(ulysses_attention, group=collectives.world(), core=causal_attention)),
    "packed": lambda: attend(lambda *x: packed_attention(*(one[:1] for one in x), cu_seqlens=[0, 3, 8])),
    "replicated": lambda: synced(Replicated), "zero 1": lambda: synced(Zero1),
    "zero 2": lambda: synced(Zero2), "zero 3": lambda: synced(Zero3), "gradients": reduced,
    "tensor parallel": cut_over_ranks, "dispatch": dispatched, "recompute": again,
    "activations on the host": away, "optimizer on the host": lambda: on_the_host(False),
    "delayed": lambda: on_the_host(True), "clipping": clipped, "rounded by chance on the host": by_chance,
}  # fmt: skip


def devices_of(name: str) -> set[str]:
    found = dryrun.run(TAKEN_HOME[name], rank=1, ranks=4)
    return {str(x.device) for x in found}


@needs_pretended
@pytest.mark.parametrize("name", TAKEN_HOME)
def test_what_is_taken_home_keeps_to_its_device(name):
    assert pretended(devices_of, name) == {PRETENDED}


def met(room: str) -> tuple[int, list[str]]:
    """How many doors of a room ran with their tensors on the pretended device, and what met the host's."""
    every, ran, wrong = nonsense.functions(), 0, []
    os.chdir(tempfile.mkdtemp())
    for name, line in nonsense.written().items():
        if name.startswith(f"{room}.") and name in every and has_tensors(every[name]):

            def body(door=every[name], line=line):
                nonsense.names.cache_clear()
                with torch.device(PRETENDED):
                    arguments = nonsense.evaluated(door, line)
                return nonsense.gone_through(door(**arguments))

            try:
                dryrun.run(body, ranks=1)
                ran += 1
            except Exception as error:  # wants numbers, or moves what torch's fake tensors do not let move
                wrong += [f"{name}: {error}"] * ("same device" in str(error))
    return ran, wrong


def has_tensors(door) -> bool:
    """Does its module know torch? Those of plans, simulators and networks do not."""
    return re.search(r"^(import|from) torch", inspect.getsource(inspect.getmodule(door)), re.M) is not None


@needs_pretended
@pytest.mark.parametrize("room", ROOMS.split())
def test_doors_keep_to_their_device(room):
    ran, wrong = pretended(met, room)
    assert not wrong and (ran or room in ("checkpoint", "compose", "memory")), wrong


def mixed() -> str:
    try:
        dryrun.run(lambda: torch.zeros(3, device=PRETENDED) + torch.zeros(3), ranks=1)
    except Exception as error:
        return str(error)
    return ""


@needs_pretended
def test_a_tensor_of_the_host_would_be_met():
    assert "same device" in pretended(mixed)
