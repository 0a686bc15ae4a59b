"""What the cells of an exercise use. A check runs in the notebook, under nbgrader and before the judge.

    outcome = run_on_ranks(total, [x0, x1, x2])    total(x_r, group) on three ranks, on the judge's network
    expect_equal(outcome.results, [x0 + x1 + x2] * 3, "the sum", "every rank returns the sum of all tensors")
    expect(max(outcome.sent_bytes) <= limit, "bytes on the wire", "each rank may send its tensor once")
    ask(predicted_bytes, 4, 1000)                  predicted_bytes(4, 1000) in a process of its own
    ask_each(zb_h1, [(2, 4), (3, 9)])              the results of both calls: two, whatever the answer does

In a notebook `total` is the student's function and travels by value. Before the judge it is an `Answer`: a
name. Ranks execute the student's cell themselves, so nothing of it ever runs where the score is made.
"""

import contextvars
import functools
import io
import linecache
import random
from collections.abc import Callable, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from typing import Any

import cloudpickle
import torch

from minitrain.course.grading.book import defined_by
from minitrain.course.grading.inside.frames import name_of
from minitrain.course.grading.judge import Code, Judge
from minitrain.course.grading.trial import Failure, Outcome


@dataclass(frozen=True)
class Answer:
    """Stands for something the student's cell defines, where that cell must not run."""

    name: str


notebook_judge = functools.cache(Judge)  # one for a notebook; its server ends with the kernel
_judging: contextvars.ContextVar[tuple | None] = contextvars.ContextVar("judging", default=None)


@contextmanager
def judging(judge: Judge, code: Code, time_limit_s: float):
    """Within it `run_on_ranks` and `ask` execute the cells of `code`; what check cells print is dropped."""
    token, threads = _judging.set((judge, code, time_limit_s)), torch.get_num_threads()
    torch.set_num_threads(1)  # several would wait while ranks have the cores: 13 times as long
    try:
        with redirect_stdout(io.StringIO()):
            yield
    finally:
        torch.set_num_threads(threads)
        _judging.reset(token)


def run_on_ranks(fn: Callable | Answer, inputs: Sequence, **rules) -> Outcome:
    """fn(*inputs[r], group) on rank r of len(inputs); an input that is no tuple is one argument.

    Rules: `collectives="all_reduce .."`, what a rank has beside send, receive and barrier; autograd, secrets,
    time_limit_s, budget_bytes as in Judge.run. Raises Failure.
    """
    outcome = _run(fn, [[entry if isinstance(entry, tuple) else (entry,)] for entry in inputs], rules)
    return replace(outcome, results=[result for (result,) in outcome.results])


def ask(fn: Callable | Answer | Any, *arguments, **rules) -> Any:
    """fn(*arguments) in a process of its own, without a network; for an answer that is a value, the value."""
    return ask_each(fn, [arguments], **rules)[0]


def ask_each(fn: Callable | Answer | Any, cases: Sequence[tuple], **rules) -> list:
    """[fn(*case) for case in cases], one call after the other in one process; as many results as cases."""
    if not callable(fn) and not isinstance(fn, Answer):
        return [fn] * len(cases)
    return _run(fn, [list(cases)], {"network": False, **rules}).results[0]


def _run(fn: Callable | Answer, calls: list, rules: dict) -> Outcome:
    collectives = rules.pop("collectives", "")
    if _judging.get() is None:
        file = getattr(getattr(fn, "__code__", None), "co_filename", "")
        sources = {file: "".join(linecache.getlines(file))}
        code = Code(pickled=cloudpickle.dumps(fn), sources=sources, collectives=collectives)
        outcome = notebook_judge().run(code, calls, **rules)
        print(outcome.prints, end="\n" if outcome.prints else "")
        return outcome
    judge, code, most_s = _judging.get()
    name = fn.name if isinstance(fn, Answer) else fn.__name__
    code = replace(code, call=name, collectives=collectives)
    if name in defined_by(*code.given):  # what the course itself does is measured where no answer is
        code = replace(code, answer="", names=(), drivers=())
    elif name not in {*code.names, *defined_by(*code.drivers)}:
        raise ValueError(f"ranks cannot know {name}: no answer, given cell or driver defines it")
    rules["time_limit_s"] = min(most_s, rules.get("time_limit_s", most_s))
    return judge.run(code, calls, **rules)


def expect(condition: bool, property: str, hint: str) -> None:
    """Raise the Failure of `property` unless the condition holds. The hint teaches; it tells no value."""
    if not condition:
        raise Failure(property, hint)


def expect_equal(actual: Any, expected: Any, property: str, hint: str, atol: float = 0.0) -> None:
    """Tensors (or numbers, or lists of them, one per rank) are equal: the same shape, dtype and values.

    An `atol` is for what has a bound. What differs is named (rank, shape, dtype), the wanted value is not.
    """

    def expect_kind(same: bool, wanted: str) -> None:
        expect(same, property, f"{wanted} is wanted, not {kind_of(actual)}; {hint}")

    if isinstance(expected, (list, tuple)):
        same_length = isinstance(actual, (list, tuple)) and len(actual) == len(expected)
        expect_kind(same_length, f"a list of {len(expected)}")
        for rank, pair in enumerate(zip(actual, expected)):
            where = hint if "(seen at" in hint else f"{hint} (seen at rank {rank})"
            expect_equal(*pair, property, where, atol)
    elif isinstance(expected, torch.Tensor):
        expect_kind(isinstance(actual, torch.Tensor), "a tensor")
        expect_kind(actual.shape == expected.shape and actual.dtype == expected.dtype, kind_of(expected))
        near = torch.equal(actual, expected) if atol == 0 else bool(((actual - expected).abs() <= atol).all())
        expect(near, property, hint)
    else:
        expect_kind(type(actual) is type(expected), kind_of(expected))
        expect(actual == expected if atol == 0 else abs(actual - expected) <= atol, property, hint)


def kind_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a {name_of(value.dtype)} tensor of shape {list(value.shape)}"
    return "None" if value is None else f"a value of type {type(value).__name__}"


class Draw(random.Random):
    """What hidden checks draw: sizes, numbers of ranks, values. Without a seed nobody knows them before."""

    integer = random.Random.randint  # both ends included

    def several(self, options: Sequence, count: int) -> list:
        """`count` different ones, in a random order."""
        return self.sample(list(options), count)

    def exact(self, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """Numbers below 8 with as many digits as let a sum of 16 be exact in every order: 49 bits in float64,
        20 in float32. They do not survive in half as many bytes. Their products round."""
        digits = {torch.float64: 48, torch.float32: 19}[dtype]
        whole = torch.randint(-(2**digits), 2**digits, shape, generator=self._generator())
        return (whole | 1).to(dtype) * 2.0 ** (3 - digits)

    def few(self, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """Multiples of 1/16 below 64: sums of 1,024, and of their products in float64, are exact. They fit in
        two bytes, so what travels must be more than these."""
        return torch.randint(-1023, 1024, shape, generator=self._generator()).to(dtype) / 16

    def real(self, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """Normal numbers, whose sums do depend on the order."""
        return torch.randn(shape, generator=self._generator(), dtype=dtype)

    def mask(self, *shape: int) -> torch.Tensor:
        """Booleans, each True with a probability drawn for this mask; at least one True."""
        mask = torch.rand(shape, generator=self._generator()) < self.uniform(0.2, 0.9)
        mask.view(-1)[self.randrange(mask.numel())] = True
        return mask

    def _generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.getrandbits(62))
