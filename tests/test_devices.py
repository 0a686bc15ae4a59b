"""A tensor is made where it is used: what a technique makes says on which device.

On a laptop every tensor is the host's, so one that is made there in a computation of a GPU's is seen by
nobody. Read from the source: what makes a tensor of numbers and shapes has `device=`. Run on a device that
is not there: the parts of the course that a reader takes home, where whatever meets a host's tensor raises.
"""

import ast
from pathlib import Path

import pytest
import torch

from minitrain.ranks import checks

PACKAGE = Path(__file__).parent.parent / "minitrain"
ROOMS = "attention checkpoint compose context data_parallel memory model moe pipeline precision systems"
MAKERS = "arange as_tensor empty empty_strided eye from_numpy full linspace logspace ones rand randint randn"
MAKERS += " randperm scalar_tensor tensor tril_indices triu_indices zeros"
ON_THE_HOST = {  # where, and why
    "attention/packed.py:__init__": "counts on their way to a list",
    "checkpoint/load.py:read": "what a file has",
    "checkpoint/snapshot.py:begin": "nothing",
    "checkpoint/snapshot.py:_allocate": "the host's copy",
    "compose/parallelize.py:check": "is this a dry run?",
    "memory/host_optimizer.py:fused_adamw": "the step of a kernel for the host",
    "memory/pools.py:new_host": "is this a dry run?",
    "model/data/batches.py:batch": "rows of a file; a run moves them",
    "model/data/batches.py:random_tokens": "rows by a generator of the host's; a run moves them",
    "model/data/corpus.py:batch": "rows of a file; a run moves them",
    "model/gpt.py:initialise": "drawn on the host, so that every device has the same; copied",
    "precision/rounding.py:every_value": "a table to look at",
    "systems/attention/flash_3.py:random_signs": "drawn on the host; `turned` moves them",
    "systems/checkpoint/in_memory.py:gather_plain": "a length, for the network of the host",
    "systems/checkpoint/in_memory.py:tensor_of": "what a file has",
    "systems/checkpoint/in_memory.py:stripe": "what a file has",
    "systems/checkpoint/in_memory.py:_meet": "what a file has",
    "systems/checkpoint/in_memory.py:_rebuild": "what a file has",
    "systems/checkpoint/increments.py:put_rows": "what a file has",
    "systems/data_parallel/negotiated.py:_ask": "bits, for the network of the host",
    "systems/memory/files.py:_enter": "what a file has; moved below",
    "systems/moe/balance.py:placed": "a table filled number by number; moved below",
    "systems/moe/balance.py:shadows": "an index; moved below",
    "systems/moe/topology.py:bandwidths": "a table of machines",
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
            for name, line in homeless(ast.parse(path.read_text())):
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
