"""Every public function of the package is called with nonsense, one argument at a time, and must say so or go on.

    python -m tests.nonsense                     all of them: how many, and what was answered wrongly
    python -m tests.nonsense plan.mpress moe     those whose names begin so

A function or class that takes a number, a word or a sequence of these is first called with arguments that make sense:
those of nonsense.tsv (function, arguments), or ones made from its type hints. Then each such argument in turn becomes
0, -1, NaN, infinity, 10**30 (1e30 where it is no whole number), 0.5, None, a word or an empty sequence. It
may answer with

    a result                without NaN, and negative only if it was negative with arguments that make sense
    ValueError, TypeError   in one line, within a second of the processor (no other load makes it longer)

Not called: what needs a process group or a mesh, ELSEWHERE, whose input comes by the command line, which has
tests of its own, and INSIDE, which says why.
"""

from __future__ import annotations

import contextlib
import copy
import csv
import dataclasses
import importlib
import inspect
import io
import math
import pkgutil
import resource
import signal
import sys
import types
import typing
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path

import torch

import minitrain
from minitrain.attention.kernel import fused_backward, fused_forward
from minitrain.attention.traffic import Traffic
from minitrain.context.layout import zigzag
from minitrain.model.config import GPTConfig
from minitrain.model.experts_config import ExpertsConfig
from minitrain.pipeline.schedule import Action
from minitrain.plan.grid_costs import Sent
from minitrain.precision.formats import Format

CALLS = Path(__file__).with_suffix(".tsv")
ELSEWHERE = "cli course launch plot collectives train_command checkpoint_command replay_command plan_command torch_private"
ON_RANKS = ("ProcessGroup", "Channel", "Mesh", ".Job")
WHOLE = [0, -1, math.nan, math.inf, 10**30, 0.5, None, "nope", ()]
REAL = [1e30 if value == 10**30 else value for value in WHOLE]
SEQUENCES = [(), (0,), (-1,), (math.nan,), (10**30,), None, "nope", 3]
WORDS = ["", "nope", None, 5]
VALUES = {
    "whole": WHOLE,
    "real": REAL,
    "sequence": SEQUENCES,
    "words": [(), ("nope",), None, 3],
    "word": WORDS,
}
NAMES = {  # what the arguments of nonsense.tsv are written with, beside the names of the function's own module
    **{one.__name__: one for one in (Action, ExpertsConfig, Format, Fraction, GPTConfig, Sent, Traffic)},
    **{one.__name__: one for one in (fused_backward, fused_forward, zigzag)},
    **{"torch": torch, "nan": math.nan, "inf": math.inf},
}
MOST_BYTES = 8 << 30
INSIDE = {  # names without a word of this package's reader in their arguments, and who has looked at these before
    "a number made of a seed, a step and places; the seed is a whole number where it is given": (
        "attention.dropout.keep attention.dropout.shifted attention.dropout.uniform precision.chance.draws "
        "precision.chance.keep_by_chance precision.int4.bits"
    ),
    "sizes of a GPTConfig, which checks them when it is made": (
        "attention.kernel.empty_result attention.kernel.sum_kv_copies model.layers model.mixture.Experts "
        "model.gpt.GPT model.fields.check_choice model.fields.check_least pipeline.sliced_attention.attend"
    ),
    "sizes and places that a layout, a table or a file's manifest has said, in the middle of a step or a load": (
        "checkpoint.load.runs checkpoint.snapshot checkpoint.ways.stream_s checkpoint.parity.stripe_bytes "
        "memory.chunks.farthest memory.file_optimizer.piece_of memory.pools moe.dispatch.combined "
        "moe.experts.places moe.experts.whole_blocks moe.router.counts_of moe.router.z_loss moe.topology.target "
        "precision.attention.fp8_attention sharding.numbers tensor_parallel.linear.divisors training.optim.tiles pipeline.schedules.dualpipe.steps"
    ),
    "a step of a search, a million times, of arguments which the search has checked": (
        "simulate.links.divided pipeline.simulate.divided pipeline.partition simulate.intervals.outside "
        "plan.adapipe.bytes_of plan.autopipe.step plan.dapple.compute_stage plan.dapple.in_front "
        "plan.dapple.link_stage plan.expert_placement.packed plan.expert_placement.seconds "
        "plan.expert_popularity.settled plan.recompute_windows.exposed plan.recompute_windows.options "
        "plan.search.stages.pipelined plan.search.tensoropt.unbeaten"
    ),
}
NEGATIVE = (
    "plan.emit.table.power_of_two",
)  # functions for which a number below 0 is a result: the sign is what they tell


class Slow(BaseException):
    """A call that a second did not end; no `except Exception` holds it back."""


class NoArguments(Exception):
    """Hints do not tell what to call it with."""


def functions(
    inside: tuple[str, ...] = tuple(" ".join(INSIDE.values()).split()),
) -> Iterator[tuple[str, Callable]]:
    """Public functions and classes by "room.module.name", in alphabetic order."""
    skipped = tuple(f"minitrain.{room}" for room in ELSEWHERE.split())
    for found in pkgutil.walk_packages(minitrain.__path__, "minitrain."):
        if found.name.startswith(skipped) or found.name.endswith("__main__"):
            continue
        module = importlib.import_module(found.name)
        for name, value in sorted(vars(module).items()):
            full = f"{found.name.removeprefix('minitrain.')}.{name}"
            if (
                name.startswith("_")
                or full.startswith(inside)
                or getattr(value, "__module__", None) != found.name
            ):
                continue
            if inspect.isfunction(value) or inspect.isclass(value) and not issubclass(value, BaseException):
                yield full, value


def plain_parameters(function: Callable) -> dict[str, list]:
    """For each parameter that takes numbers, words or sequences of them: the nonsense it is given."""
    try:
        parameters, hints = inspect.signature(function).parameters, hints_of(function)
    except (
        ValueError,
        NameError,
    ):  # a class of C without a signature, a hint that is only there for a type checker
        return {}
    found = {}
    for name, parameter in parameters.items():
        kind = kind_of(hints.get(name))
        if kind and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            optional = type(None) in typing.get_args(hints[name])
            found[name] = [value for value in VALUES[kind] if not (optional and value is None)]
    return found


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


def hints_of(function: Callable) -> dict:
    return typing.get_type_hints(function.__init__ if inspect.isclass(function) else function)


def needs_ranks(function: Callable) -> bool:
    """Or an open file, which is closed afterwards whatever its number is."""
    hints = hints_of(function)
    return "fd" in hints or any(word in str(hint) for hint in hints.values() for word in ON_RANKS)


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
    if inspect.isclass(hint) and dataclasses.is_dataclass(hint):
        return hint(**made(hint, size, depth + 1))
    ready = {
        int: 0 if name in ("rank", "seed", "stage", "root", "step", "first", "start", "number") else size,
        float: 0.5 if size % 3 == 0 else float(size),
        Fraction: Fraction(size),
        bool: False,
        types.NoneType: None,
        range: range(size),
        slice: slice(0, size),
        dict: {},
        torch.dtype: torch.float32,
        torch.device: torch.device("cpu"),
        torch.Tensor: torch.arange(1, size * size + 1, dtype=torch.float64).reshape(size, size) / 7,
        torch.nn.Module: torch.nn.Identity(),
    }
    try:
        return ready[hint]
    except (KeyError, TypeError):
        raise NoArguments(hint) from None


def made(function: Callable, size: int, depth: int = 0) -> dict:
    hints = hints_of(function)
    return {
        name: build(hints.get(name), name, size, depth)
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    }


def sensible(
    name: str, function: Callable, written: dict[str, str]
) -> tuple[Callable[[], dict], object] | None:
    """How to make arguments that make sense, and what the function answers to them; None if none were found."""
    if name in written:
        names = vars(sys.modules[function.__module__]) | NAMES | vars(sys.modules[function.__module__])
        ways = [lambda: eval(f"dict({written[name]})", dict(names))]
    else:
        ways = [lambda size=size: made(function, size) for size in (4, 2, 1, 8, 3, 16)]
    for way in ways:
        try:
            return way, timed(function, way())
        except NoArguments:
            return None
        except (Exception, Slow):
            if name in written:
                raise
    return None


def timed(function: Callable, arguments: dict, seconds: float = 1.0):
    """The answer, or Slow when it takes more of the processor."""

    def stop(*_):
        raise Slow

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        return function(**arguments)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


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
    except (ValueError, TypeError) as error:
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
    called: int = 0  # functions
    calls: int = 0  # with nonsense
    not_called: list[str] = dataclasses.field(
        default_factory=list
    )  # hints did not do; nonsense.tsv has no line
    faults: list[tuple[str, str, object, str]] = dataclasses.field(
        default_factory=list
    )  # function, parameter, value


def walk(beginnings: Sequence[str] = ("",)) -> Walk:
    with CALLS.open(newline="") as file:
        written = dict(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    told = Walk()
    for name, function in functions():
        plain = plain_parameters(function) if name.startswith(tuple(beginnings)) else {}
        if not plain or name not in written and needs_ranks(function):
            continue
        found = sensible(name, function, written)
        if found is None:
            told.not_called.append(name)
            continue
        way, answer = found
        allowed = oddities(answer) | ({"negative"} if name in NEGATIVE else set())
        told.called += 1
        for parameter, values in plain.items():
            for value in values:
                told.calls += 1
                wrong = fault(name, function, way() | {parameter: copy.copy(value)}, allowed)
                if wrong:
                    told.faults.append((name, parameter, value, wrong))
    return told


def main() -> None:
    resource.setrlimit(
        resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES)
    )  # 10**30 of something is a MemoryError at once
    with contextlib.redirect_stdout(io.StringIO()):
        told = walk(sys.argv[1:] or ("",))
    for name, parameter, value, wrong in told.faults:
        print(f"{name}({parameter}={value!r:.20}): {wrong}")
    kinds = Counter(wrong.split(":")[0] for *_, wrong in told.faults)
    print(
        f"{told.called} functions, {told.calls} calls, {len(told.faults)} answered wrongly {dict(kinds) or ''}"
    )
    print(f"not called: {len(told.not_called)}", *told.not_called)
    sys.exit(bool(told.faults))


if __name__ == "__main__":
    main()
