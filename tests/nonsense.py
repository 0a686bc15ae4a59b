"""Every door of the package is called with nonsense, one argument at a time, and must say so or go on.

    python -m tests.nonsense                     all of them: how many, and what was answered wrongly
    python -m tests.nonsense plan.mpress moe     those whose names begin so

Doors are the functions and classes that chapters, exercises, the README or a command take from the package, and those
that take a process group. Behind them nothing is checked again. One that takes a number, a word or a sequence of these is first called with arguments that make sense:
those of nonsense.tsv (function, arguments), or ones made from its type hints; a class that has a line there is made
by it wherever a hint asks for one, and a process group is that of a world of one rank. Then each such argument in
turn becomes 0, -1, NaN, infinity, 10**30 (1e30 where it is no whole number), 0.5, None, a word or an empty sequence.
It may answer with

    a result                without NaN, and negative only if it was negative with arguments that make sense
    ValueError, TypeError   in one line, within a second of the processor (no other load makes it longer)
    OSError                 likewise, where a word is that of a file or folder

A generator gives its first items, a context is entered and left. What is not called is counted by its reason:

    nothing to get wrong    it takes no number, word or sequence: tensors, functions, objects of ours
    a record                holds what it is given; those who compute with it look at it
    inside                  no door
    ELSEWHERE, INSIDE       as said there
    nothing said            an argument has no hint and no default, and nonsense.tsv no line: write one
"""

from __future__ import annotations

import ast
import contextlib
import copy
import csv
import dataclasses
import functools
import importlib
import inspect
import io
import itertools
import json
import math
import pkgutil
import re
import resource
import signal
import sys
import tempfile
import types
import typing
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from fractions import Fraction
from pathlib import Path

import torch
import torch._dynamo  # noqa: F401  (an import that a second ends would stay half done)
import torch.distributed as dist

import minitrain
from minitrain.checkpoint.format import write_file
from minitrain.checkpoint.store import Store, file_name
from minitrain.model.config import ExpertsConfig, GPTConfig
from minitrain.ranks.pieces import Piece
from tests.saving import Quick

CALLS = Path(__file__).with_suffix(".tsv")
ELSEWHERE = {  # rooms of the package, and what asks them
    "cli course ranks.launch": (
        "words of a command line, ranks to start, pictures: tests of their own give them wrong words"
    ),
    "ranks.collectives": "every call is compared across ranks: tests/ranks/collectives gives wrong sizes and types on 2 and 4",
    "checkpoint.first compose.first context.first context.first_ulysses data_parallel.first data_parallel.first_zero memory.first "
    "memory.first_offload moe.first pipeline.first precision.first tensor_parallel.first": (
        "a page is read and pasted, and checks nothing"
    ),
    "ranks.torch_private": "names of torch's, for this package alone",
    "systems.simulate.crash_model systems.simulate.crashes": "disks and a copy that break on purpose: tests of their own",
}
WHOLE = [0, -1, math.nan, math.inf, 10**30, 0.5, None, "nope", ()]
REAL = [1e30 if value == 10**30 else value for value in WHOLE]
SEQUENCES = [(), (0,), (-1,), (math.nan,), (10**30,), None, "nope", 3]
WORDS = ["", "nope", None, 5]
VALUES = {
    "whole": WHOLE, "real": REAL, "sequence": SEQUENCES, "words": [(), ("nope",), None, 3], "word": WORDS,
}  # fmt: skip
ON_RANKS = ("ProcessGroup", "Channel", "Mesh")
READ_AS = {  # parameters without a hint, by the names that this package gives them
    **dict.fromkeys(
        "q k v dout out lse x y dy table p delta dq dk dv rows up down scores".split(), torch.Tensor
    ),
    **dict.fromkeys("group inside across inner outer team ring ulysses".split(), dist.ProcessGroup),
    **dict.fromkeys(
        "row_group column_group input_group weight_group output_group".split(), dist.ProcessGroup
    ),
    **dict.fromkeys(
        "bias counts weight weights mean scale tokens made rooms dweight ddown down".split(), torch.Tensor
    ),
    **dict.fromkeys(
        "tree args ledger evictor block batch schedule stages place time products".split(), object
    ),
    **dict.fromkeys(
        "saved mixture experts compute merge sharing params before after run replay".split(), object
    ),
    **dict.fromkeys("scales matrices dtype linears".split(), object),
    **dict.fromkeys("make_optimizer core act loss_fn work layout".split(), Callable),
}
MEANT = (  # by a name that several modules have
    "pipeline.schedule.Action attention.flash.Traffic systems.plan.search.problem.example "
    "plan.planner.Task plan.simulate.machines.machine compose.dry_runs.work_of "
    "pipeline.schedules.one_direction.one_f_one_b model.gpt.GPT model.config.GPTConfig plan.strategy.Strategy"
)
MOST_BYTES = 8 << 30
INSIDE = {  # doors that are not called here, and who has looked at their arguments
    "sizes, names and a device that parallelize or a GPTConfig has looked at": (
        "model.gpt.Block model.gpt.GPT model.layers.MLP model.layers.causal_attention model.layers.drop "
        "model.layers.naive_attention model.mixture.MixtureOfExperts attention.kernel.empty_result memory.recompute.Segment tensor_parallel.model.SharedHead "
        "data_parallel.zero1.WholeParameters model.config.meant compose.parallelize.parameter_names"
    ),
    "two ranks or more, where its own tests give it wrong sizes": (
        "systems.data_parallel.parameter_server.Worker systems.data_parallel.parameter_server.check "
        "systems.data_parallel.parameter_server.serve "
        "systems.rlhf.policy.grpo_step systems.rlhf.policy.ppo_step systems.rlhf.policy.hand_over"
    ),
    "the steps of a layer or of a search, of arguments that its maker has checked": (
        "systems.context.balanced.exchange_all systems.moe.move_experts.shadow tensor_parallel.overlap.column_backward "
        "tensor_parallel.overlap.row_forward systems.plan.stage_memory.bytes_of "
        "systems.attention.flash_3.fp8_attention pipeline.partition.stage_time systems.moe.topology.target "
        "systems.checkpoint.in_memory.stripe_bytes systems.moe.overlapped_experts.layer_pieces "
        "systems.faults.corruption.replayed"
    ),
    "what a rank sends of a tensor: the number is that of a text, which compressor_of has looked at": " ".join(
        f"systems.data_parallel.compressed.{name}" for name in "top_k cocktail random_k thc power_sgd".split()
    ),
}


class Slow(BaseException):
    """A call that a second did not end; no `except Exception` holds it back."""


class NoArguments(Exception):
    """Hints do not tell what to call it with."""


def functions() -> dict[str, Callable]:
    """Public functions and classes by "room.module.name", in alphabetic order."""
    found = {}
    for at in pkgutil.walk_packages(minitrain.__path__, "minitrain."):
        if at.name.endswith("__main__"):
            continue
        module = importlib.import_module(at.name)
        for name, value in sorted(vars(module).items()):
            if name.startswith("_") or getattr(value, "__module__", None) != at.name:
                continue
            asked = inspect.isfunction(value) or hasattr(value, "cache_info")
            if asked or inspect.isclass(value) and not issubclass(value, BaseException):
                found[f"{at.name.removeprefix('minitrain.')}.{name}"] = value
    return found


def names_from(source: str) -> set[str]:
    """What a text of Python takes from the package: "room.module.name", and "room.module." of a whole module."""
    tree, found, modules = ast.parse(source), set(), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("minitrain"):
            for alias in node.names:
                modules[alias.asname or alias.name] = f"{node.module}.{alias.name}".removeprefix("minitrain.")
    found |= set(modules.values())
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            found.add(f"{modules[node.value.id]}.{node.attr}")
    return found


@functools.cache
def doors() -> frozenset[str]:
    """What a reader calls: the names that chapters, exercises, the README and the command line take."""
    root, sources = CALLS.parents[1], []
    for path in sorted((root / "notebooks").glob("*.ipynb")):
        cells = json.loads(path.read_text())["cells"]
        sources += ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    sources += [path.read_text() for path in (root / "exercises" / "source").glob("*.py")]
    sources += [path.read_text() for path in (root / "minitrain" / "cli").glob("*.py")]
    for page in [root / "README.md", *(root / "docs").glob("*.md")]:
        sources += re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    found = set()
    for source in sources:
        with contextlib.suppress(SyntaxError):  # a cell of the shell
            found |= names_from(source)
    return frozenset(found)


def is_door(name: str, function: Callable) -> bool:
    return name in doors() or any(word in parameters_of(function) for word in ("group", "groups"))


def left_out(name: str, function: Callable, written: Collection[str] = ()) -> str | None:
    """Why it is not called; None: it is."""
    for rooms, why in ELSEWHERE.items():
        if name.startswith(tuple(f"{room}." for room in rooms.split())):
            return f"elsewhere: {why}"
    for why, names in INSIDE.items():
        if name in names.split():
            return f"inside: {why}"
    if not is_door(name, function):
        return "inside: no chapter, exercise, command or page calls it; those who do have looked at its arguments"
    if is_record(function):
        return "a record: it holds what it is given, and those who compute with it look at it"
    if name not in written and not plain_parameters(function) and all_known(function):
        return "nothing to get wrong: tensors, functions and objects of ours"
    return None


def is_record(function: Callable) -> bool:
    """A class whose fields are all there is to making one."""
    if not inspect.isclass(function):
        return False
    data = "__dataclass_params__" in vars(function) and function.__dataclass_params__.init
    return hasattr(function, "_fields") or data and not hasattr(function, "__post_init__")


def all_known(function: Callable) -> bool:
    """Whether each parameter says by its hint, its default or its name what it is."""
    hints = hints_of(function)
    return all(
        name in hints or name in READ_AS or one.default is not one.empty or one.kind == one.VAR_POSITIONAL
        for name, one in parameters_of(function).items()
        if one.kind != one.VAR_KEYWORD
    )


def parameters_of(function: Callable) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(function).parameters)
    except ValueError:  # a class of C without a signature
        return {}


def hints_of(function: Callable) -> dict:
    try:
        return typing.get_type_hints(function.__init__ if inspect.isclass(function) else function)
    except NameError:  # a hint that is only there for a type checker
        return {}


def plain_parameters(function: Callable, given: dict | None = None) -> dict[str, list]:
    """For each parameter that takes numbers, words or sequences of them: the nonsense it is given. Where there
    is no hint, its kind is that of the value in `given` or of its default."""
    hints, found = hints_of(function), {}
    for name, parameter in parameters_of(function).items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if name in hints:
            kind = kind_of(hints[name])
        else:
            kind = kind_of_value((given or {}).get(name, parameter.default))
        if kind:
            optional = parameter.default is None or type(None) in typing.get_args(hints.get(name))
            found[name] = [value for value in VALUES[kind] if not (optional and value is None)]
    for name in set(given or {}) - set(parameters_of(function)):  # of a **
        if kind := kind_of_value(given[name]):
            found[name] = VALUES[kind]
    return found


def kind_of_value(value) -> str | None:
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        kinds = {kind_of_value(one) for one in value}
        return "sequence" if kinds & {"whole", "real", "sequence"} else "words" if "word" in kinds else None
    kinds = {int: "whole", float: "real", Fraction: "real", str: "word"}
    return kinds.get(type(value))


def kind_of(hint) -> str | None:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return next(filter(None, map(kind_of, inner)), None)
    if hint is int:
        return "whole"
    if hint in (float, Fraction):
        return "real"
    if hint is str:
        return "word"
    if origin in (tuple, list, Sequence, Iterable, Collection):
        kinds = {kind_of(one) for one in inner}
        return "sequence" if kinds & {"whole", "real", "sequence"} else "words" if "word" in kinds else None
    return None


def needs_ranks(name: str, function: Callable) -> bool:
    hints = {one: hint for one, hint in READ_AS.items() if one in parameters_of(function)} | hints_of(
        function
    )
    asked = any(word in str(hint) for hint in hints.values() for word in ON_RANKS)
    return asked or "GROUP" in written().get(name, "")


def build(hint, name: str, size: int, depth: int = 0):
    """A value of that type: numbers and lengths are `size`, places and seeds 0."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if depth > 4:
        raise NoArguments(hint)
    if origin in (typing.Union, types.UnionType):
        for one in inner:
            with contextlib.suppress(NoArguments):
                return build(one, name, size, depth + 1)
    if origin in (list, Sequence, Iterable, Collection):
        return [build(inner[0], name, size, depth + 1) for _ in range(size)]
    if origin is tuple and inner[-1] is not Ellipsis:
        return tuple(build(one, name, size, depth + 1) for one in inner)
    if origin is tuple:
        return tuple(build(inner[0], name, size, depth + 1) for _ in range(size))
    if inspect.isclass(hint) and (line := written().get(name_of(hint))) is not None:
        return hint(**evaluated(hint, line))
    if inspect.isclass(hint) and dataclasses.is_dataclass(hint):
        return hint(**made(hint, size, depth + 1))
    ready = {
        int: 0 if name in ("rank", "seed", "stage", "root", "step", "first", "start", "number") else size,
        float: 0.5 if size % 3 == 0 else float(size), Fraction: Fraction(size), bool: False,
        types.NoneType: None, range: range(size), slice: slice(0, size), dict: {},
        torch.dtype: torch.float32, torch.device: torch.device("cpu"),
        torch.Tensor: torch.arange(1, size * size + 1, dtype=torch.float64).reshape(size, size) / 7,
        torch.nn.Module: torch.nn.Identity(), dist.ProcessGroup: dist.group.WORLD,
    }  # fmt: skip
    try:
        return ready[hint]
    except (KeyError, TypeError):
        raise NoArguments(hint) from None


def made(function: Callable, size: int, depth: int = 0) -> dict:
    hints = READ_AS | hints_of(function)
    return {
        name: build(hints.get(name), name, size, depth)
        for name, parameter in parameters_of(function).items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    }


@functools.cache
def written() -> dict[str, str]:
    with CALLS.open(newline="") as file:
        return dict(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


@functools.cache
def names() -> dict:
    """What a line of nonsense.tsv may name beside its own module: what only one module of the package has."""
    every = functions()
    often = Counter(name.rpartition(".")[2] for name in every)
    alone = {end: one for name, one in every.items() if often[end := name.rpartition(".")[2]] == 1}
    alone |= {name.rpartition(".")[2]: every[name] for name in MEANT.split()}
    models = dict(vocab_size=16, d_model=8, num_layers=2, num_heads=2, max_positions=8)
    small = dict(
        TINY=GPTConfig(**models),
        ROUTED=GPTConfig(**models, experts=ExpertsConfig(num_experts=2, top_k=1)),
        sgd=lambda params: torch.optim.SGD(params, lr=0.1),
        layers=lambda: torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2)),
        params=lambda: list(torch.nn.Linear(4, 4).parameters()),
        ones=torch.ones,
        saved=saved,
        ids=torch.zeros(2, 4, dtype=torch.int64),
    )
    return (
        alone | small | dict(torch=torch, nan=math.nan, inf=math.inf, Fraction=Fraction, minitrain=minitrain)
    )


def saved() -> Store:
    """With a step of one tensor."""
    store = Store(tempfile.mkdtemp(dir="."), disk=Quick())
    file = write_file(Quick(), store.begin(1) / file_name(0), [Piece("w", (4,), (0,), torch.ones(4))], {})
    store.commit(1, [file], {})
    return store


def name_of(function: Callable) -> str:
    return f"{function.__module__}.{function.__qualname__}".removeprefix("minitrain.")


def evaluated(function: Callable, line: str) -> dict:
    return eval(
        f"dict({line})", names() | {"GROUP": dist.group.WORLD} | vars(sys.modules[function.__module__])
    )


def sensible(name: str, function: Callable) -> tuple[Callable[[], dict], object] | None:
    """How to make arguments that make sense, and what the function answers to them; None if none were found."""
    if (line := written().get(name)) is not None:
        ways = [lambda: evaluated(function, line)]
    else:
        ways = [lambda size=size: made(function, size) for size in (4, 2, 1, 8, 3, 16)]
    for way in ways:
        try:
            return way, timed(function, way())
        except NoArguments:
            return None
        except (Exception, Slow) as error:
            if line is not None:
                error.add_note(f"nonsense.tsv: {name}")
                raise
    return None


def timed(function: Callable, arguments: dict, seconds: float = 1.0):
    """The answer, or Slow when it takes more of the processor."""

    def stop(*_):
        raise Slow

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        return gone_through(function(**arguments))
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def gone_through(answer):
    """A generator starts when its first item is asked for, a context when it is entered."""
    if isinstance(answer, contextlib._GeneratorContextManager):
        with answer:
            return None
    return list(itertools.islice(answer, 50)) if isinstance(answer, types.GeneratorType) else answer


def oddities(answer, depth: int = 0) -> set[str]:
    """{"NaN", "negative"}: what the numbers of an answer are."""
    if isinstance(answer, (int, float, Fraction)):
        return {"NaN"} if answer != answer else {"negative"} if answer < 0 else set()
    if isinstance(answer, (list, tuple, set, dict)) and depth < 3:
        inside = list(answer.values() if isinstance(answer, dict) else answer)[:50]
        return set().union(*(oddities(one, depth + 1) for one in inside))
    return set()


def fault(name: str, function: Callable, arguments: dict, allowed: set[str]) -> str | None:
    try:
        found = oddities(timed(function, arguments)) - allowed
    except (ValueError, TypeError, OSError) as error:  # the last where a word is that of a file or folder
        text = str(error)
        return (
            None if text and "\n" not in text.strip() else f"{type(error).__name__} of several lines or none"
        )
    except Slow:
        return "no answer within a second"
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0][:90]
    return f"a result that is {' and '.join(sorted(found))}" if found else None


@dataclasses.dataclass
class Walk:
    public: int = 0  # functions and classes
    called: int = 0
    calls: int = 0  # with nonsense
    left_out: dict[str, list[str]] = dataclasses.field(default_factory=dict)  # reason: names
    faults: list[tuple[str, str, object, str]] = dataclasses.field(
        default_factory=list
    )  # name, parameter, value


NOTHING_SAID = "nothing said: give arguments that make sense in nonsense.tsv"


def walk(beginnings: Sequence[str] = ("",)) -> Walk:
    told = Walk()
    every = {name: one for name, one in functions().items() if name.startswith(tuple(beginnings))}
    reasons = {name: left_out(name, one, written()) for name, one in every.items()}
    ranks = {name: not reasons[name] and needs_ranks(name, one) for name, one in every.items()}
    for name, function in sorted(every.items(), key=lambda item: ranks[item[0]]):
        if ranks[name] and not dist.is_initialized():  # a dry run makes a world of its own
            dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        told.public, why = told.public + 1, reasons[name]
        found = None if why else sensible(name, function)
        if found is None:
            told.left_out.setdefault(why or NOTHING_SAID, []).append(name)
            continue
        way, answer = found
        allowed = oddities(answer)
        told.called += 1
        for parameter, values in plain_parameters(function, way()).items():
            for value in values:
                told.calls += 1
                wrong = fault(name, function, way() | {parameter: copy.copy(value)}, allowed)
                if wrong:
                    told.faults.append((name, parameter, value, wrong))
    return told


def main() -> None:
    """In a folder of its own, where a store named "nope" may be."""
    resource.setrlimit(
        resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES)
    )  # 10**30 of something is a MemoryError at once
    with contextlib.redirect_stdout(io.StringIO()), tempfile.TemporaryDirectory() as folder:
        with contextlib.chdir(folder):
            told = walk(sys.argv[1:] or ("",))
    for name, parameter, value, wrong in told.faults:
        print(f"{name}({parameter}={value!r:.20}): {wrong}")
    kinds = Counter(wrong.split(":")[0] for *_, wrong in told.faults)
    print(f"{told.public} public functions and classes, {told.called} called, {told.calls} calls, ", end="")
    print(f"{len(told.faults)} answered wrongly {dict(kinds) or ''}")
    for why, names in sorted(told.left_out.items(), key=lambda one: -len(one[1])):
        print(f"{len(names):5} {why}")
    unsaid = told.left_out.get(NOTHING_SAID, [])
    print(*unsaid, sep="\n", end="\n" if unsaid else "")
    sys.exit(bool(told.faults or unsaid))


if __name__ == "__main__":
    main()
