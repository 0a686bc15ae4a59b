"""Searches over graphs and programs, the tuner, and the race of all on one instance."""

from dataclasses import replace
from itertools import product

import numpy
import pytest
import torch

from minitrain import collectives, launch
from minitrain.compose.parallelize import parallelize
from minitrain.course.race import race, table
from minitrain.model.data.batches import Text
from minitrain.model.gpt import GPT
from minitrain.model.training.optim import AdamW
from minitrain.pipeline.schedules.one_direction import one_f_one_b
from minitrain.pipeline.simulate import Costs, simulate
from minitrain.plan.strategy import Strategy
from minitrain.ranks.launch import dryrun
from minitrain.ranks.ledger import Ledger
from minitrain.systems.plan.search import programs, simulated
from minitrain.systems.plan.search.problem import block, example
from minitrain.systems.plan.search.programs import Operator, in_row, op_assign, op_order, op_trans, times
from tests.parallel import small

X, W = ("input", "x"), lambda name: ("weight", name)
MLP = ("matmul", ("relu", ("matmul", X, W("a"))), W("c"))
GATED = ("matmul", ("mul", ("matmul", X, W("a")), ("matmul", X, W("b"))), W("c"))


def test_unity():
    """Every graph that rewrites lead to computes the same, also with odd numbers; a rule that does not is
    noticed. The joint search costs no more than algebra first, and less where a merger stands in the way."""
    test_unity_prices()
    shapes = {"x": (8, 8), "a": (8, 12), "b": (8, 12), "c": (12, 8)}
    draw = numpy.random.default_rng(0)
    arrays = {name: draw.integers(-5, 6, shape).astype(float) for name, shape in shapes.items()}
    for graph in (MLP, GATED):
        seen, whole = closure(graph, (programs.algebra, programs.parallel)), run(graph, arrays, 1)
        assert all((run(one, arrays, 4) == whole).all() for one in seen)
        assert len(seen) == {MLP: 26, GATED: 105}[graph]
    wrong = lambda g: iter([("reduce", ("relu", g[1][1]))] if g[0] == "relu" and g[1][0] == "reduce" else [])
    broken = closure(MLP, (programs.parallel, wrong))
    assert not all((run(one, arrays, 4) == run(MLP, arrays, 1)).all() for one in broken)
    better = []
    for rows, width, inner, call_s in product((16, 256, 4096), (128, 1024), (128, 1024), (0, 2.0**-17)):
        shapes = {"x": (rows, width), "a": (width, inner), "b": (width, inner), "c": (inner, width)}
        rates = programs.Rates(4, 2.0**42, 2.0**34, call_s)
        joint, first = programs.optimize(GATED, shapes, rates), programs.sequential(GATED, shapes, rates)
        assert joint.cost == programs.every_graph(GATED, shapes, rates).cost <= first.cost
        assert joint.cost == programs.seconds(joint.choice, shapes, rates) and joint.looked_at <= 105
        better.append(joint.cost < first.cost)
    assert any(better) and not all(better)


def test_unity_looks_at_no_more_than_it_may():
    """One graph; the first graph and all that one rewrite makes of it; what costs more than slack times the best."""
    shapes, rates = {"x": (8, 8), "a": (8, 12), "c": (12, 8)}, programs.Rates(4, 64.0, 32.0, launch_s=0.5)
    once = len({MLP, *programs.rewrites(MLP, (programs.algebra, programs.parallel))})
    assert [programs.optimize(MLP, shapes, rates, most=most).looked_at for most in (1, 2)] == [1, once]
    first = programs.sequential(GATED, shapes | {"b": (8, 12)}, rates)
    alone = programs.optimize(GATED, shapes | {"b": (8, 12)}, replace(rates, devices=1), (programs.algebra,))
    then = programs.optimize(alone.choice, shapes | {"b": (8, 12)}, rates, (programs.parallel,))
    assert first == (then.choice, then.cost, alone.looked_at + then.looked_at)


def test_unity_plans_train():
    """Of both graphs the plans found for few rows and for many, on two ranks: parameters after two steps of gradient
    descent are those of the graph as it was written, in one process."""
    draw = torch.Generator().manual_seed(0)
    shapes, plans = {"x": (8, 8), "a": (8, 32), "b": (8, 32), "c": (32, 8)}, []
    start = {name: torch.randn(s, generator=draw, dtype=torch.float64) / 4 for name, s in shapes.items()}
    for graph, rows in product((MLP, GATED), (8, 2**16)):
        rates = programs.Rates(2, 2.0**36, 2.0**33, 2.0**-17)
        plans.append((graph, programs.optimize(graph, shapes | {"x": (rows, 8)}, rates).choice))
    assert {plan[0] for _, plan in plans} == {"reduce", "combine"}, "by columns and rows; by the batch"
    for (graph, _), *ranks in zip(plans, *launch.run(lambda: [trained(p, start) for _, p in plans], ranks=2)):
        for found, wanted in product(ranks, [trained(graph, start)]):
            assert max((found[name] - wanted[name]).abs().max() for name in "abc") < 1e-12


def trained(graph, start):
    weights = {name: value.clone().requires_grad_(name != "x") for name, value in start.items()}
    for _ in range(2):
        loss = on_rank(graph, weights).square().mean()
        loss.backward()
        for weight in weights.values():
            if weight.grad is not None:
                weight.data -= 0.1 * weight.grad
                weight.grad = None
    return {name: weight.detach() for name, weight in weights.items()}


def on_rank(g, arrays):
    match g:
        case ("input" | "weight", name):
            return arrays[name]
        case ("partition", dim, x):
            return collectives.scatter_to(on_rank(x, arrays), collectives.world(), dim)
        case ("replicate", x):
            return collectives.copy_to(on_rank(x, arrays), collectives.world())
        case ("combine", dim, x):
            return collectives.gather_from(on_rank(x, arrays), collectives.world(), dim)
        case ("reduce", x):
            return collectives.reduce_from(on_rank(x, arrays), collectives.world())
    return ON_TENSORS[g[0]](*(on_rank(x, arrays) for x in g[1:]))


ON_TENSORS = {
    "matmul": torch.matmul, "mul": torch.mul, "relu": torch.relu,
    "beside": lambda x, y: torch.cat((x, y), 1), "glu": lambda x: torch.mul(*x.chunk(2, 1)),
}  # fmt: skip


def test_unity_prices():
    """Three products for one, a launch each way, and an all-reduce of the terms' sum; what is stored is cut free."""
    shapes, rates = {"x": (8, 8), "a": (8, 12), "c": (12, 8)}, programs.Rates(4, 64.0, 32.0, launch_s=0.5)
    assert programs.seconds(MLP, shapes, rates) == 2 * 6 * 8 * 8 * 12 / 64 + 3 * 2 * 0.5
    terms = ("reduce", ("matmul", ("partition", 1, X), ("partition", 0, W("a"))))
    assert programs.seconds(terms, shapes, rates) == 6 * 8 * 2 * 12 / 64 + 1 + 2 * 3 / 4 * 8 * 12 * 4 / 32
    rows = ("combine", 0, ("matmul", ("partition", 0, X), ("replicate", W("a"))))
    sent = (3 / 4 * 8 * 12 + 2 * 3 / 4 * 8 * 12) * 4  # a gather; the copies' gradients are summed
    assert programs.seconds(rows, shapes, rates) == 6 * 2 * 8 * 12 / 64 + 1 + sent / 32


def run(g, arrays, devices):
    """The result, computed shard by shard: an array where it is whole, else a list of each device's."""
    match g:
        case ("input" | "weight", name):
            return arrays[name]
        case ("partition", dim, x):
            return numpy.split(run(x, arrays, devices), devices, axis=dim)
        case ("replicate", x):
            return [run(x, arrays, devices)] * devices
        case ("combine", dim, x):
            return numpy.concatenate(run(x, arrays, devices), axis=dim)
        case ("reduce", x):
            return sum(run(x, arrays, devices))
    arguments = [run(x, arrays, devices) for x in g[1:]]
    if type(arguments[0]) is list:
        return [OPERATORS[g[0]](*parts) for parts in zip(*arguments)]
    return OPERATORS[g[0]](*arguments)


OPERATORS = {
    "matmul": lambda x, y: x @ y, "mul": lambda x, y: x * y, "relu": lambda x: numpy.maximum(x, 0),
    "beside": lambda x, y: numpy.concatenate([x, y], axis=1),
    "glu": lambda x: x[:, : x.shape[1] // 2] * x[:, x.shape[1] // 2 :],
}  # fmt: skip


def closure(graph, rules):
    seen, waiting = {graph}, [graph]
    while waiting:
        for new in programs.rewrites(waiting.pop(), rules):
            if new not in seen:
                seen.add(new)
                waiting.append(new)
    return seen


def test_nnscaler():
    """1F1B, an interlaced pipeline and co-shard are written with the three primitives alone, with the times that
    they have; the expert's constraints leave 34 of 5,136 plans, the fastest among them."""
    check_1f1b()
    check_interlaced()
    check_co_shard()
    assert programs.times(dict.fromkeys("ab", programs.Operator(1, device=0))) == {"a": 1, "b": 2}
    program, devices, fits, *expert = programs.pipeline_program(1, 1)
    few, every = programs.search(program, devices, fits, *expert), programs.search(program, devices, fits)
    assert few.cost == every.cost == 9 and (few.looked_at, every.looked_at) == (34, 5136)
    assert max(times(few.choice).values()) == few.cost


def check_1f1b():
    for p, m in ((2, 3), (3, 4), (4, 8)):
        program, *_ = programs.pipeline_program(*(range(1, p + 1)), microbatches=m)
        schedule = one_f_one_b(p, m)
        for device, actions in enumerate(schedule.ranks):
            for kind in "FB":
                program = op_assign(program, f"{kind}{device}", device)
            program = in_row(program, [str(action) for action in actions])
        costs = Costs(F=1, B=2, stage={i: i + 1 for i in range(p)})
        played, ends = simulate(schedule, costs), times(program)
        assert max(ends.values()) == played.makespan
        assert all(ends[str(span.entry)] == span.end for spans in played.spans for span in spans)


def check_interlaced():
    """An embedding as long as a stage, of all devices in turn, between microbatches of both."""
    stages = {"E": Operator(2, bytes=8), "F0": Operator(2, 1, ("E",)), "F1": Operator(2, 1, ("F0",))}
    for name in stages.copy():
        stages = op_trans(stages, name, 2)
    alone, interlaced = dict(stages), dict(stages)
    for name, device in (("E", 0), ("F0", 0), ("F1", 1)):
        alone = op_assign(alone, name, device)
    for microbatch in range(2):
        interlaced = op_trans(interlaced, f"E.{microbatch}", 2, aligned=False)
        for part in range(2):
            interlaced = op_assign(interlaced, f"E.{microbatch}.{part}", part)
    assert interlaced["F0.0"].needs == ("E.0.0", "E.0.1")
    interlaced = op_assign(op_assign(interlaced, "F0", 0), "F1", 1)
    interlaced = in_row(interlaced, ["E.0.0", "F0.0", "E.1.0", "F0.1"])
    interlaced = in_row(interlaced, ["E.0.1", "E.1.1", "F1.0", "F1.1"])
    alone = in_row(alone, ["E.0", "F0.0", "E.1", "F0.1"])
    assert (max(times(alone).values()), max(times(interlaced).values())) == (5, 4)
    assert [max(o.bytes for o in program.values()) for program in (alone, interlaced)] == [4, 2]


def check_co_shard():
    """Heads of one layer, one after the other on its device: the same time in a quarter of the bytes."""
    layer = {"x": Operator(1, 1), "attention": Operator(8, 16, ("x",)), "y": Operator(1, 1, ("attention",))}
    cut = in_row(op_trans(layer, "attention", 4, aligned=False), [f"attention.{i}" for i in range(4)])
    for name in ("x", "attention", "y"):
        layer, cut = op_assign(layer, name, 0), op_assign(cut, name, 0)
    assert max(times(layer).values()) == max(times(cut).values()) == 10
    assert [max(o.bytes for o in program.values()) for program in (layer, cut)] == [16, 4]
    assert cut["y"].needs == tuple(f"attention.{i}" for i in range(4))
    with pytest.raises(ValueError, match="^attention waits for itself: orders and needs are a circle"):
        times(op_order({**layer, "z": Operator(1, device=0)}, "y", "attention"))
    with pytest.raises(ValueError, match="no device"):
        times({"x": Operator(1)})


def test_deepspeed_autotuning():
    """No configuration runs that is over memory; the best that ran is the best of the whole grid; and the bytes
    of the simulated step are those of dry runs of every ZeRO stage with 1 and 2 microbatches."""
    for memory_mib, rows in product((32, 48, 64, 96, 256), (256, 1024)):
        problem, ran = example(memory_bytes=memory_mib * 2**20, rows=rows), []

        def run(config):
            ran.append(config)
            assert simulated.memory(problem, config) <= problem.memory_bytes, "out of memory"
            return simulated.step_seconds(problem, config)

        found, best = simulated.autotune(problem, run), simulated.every_config(problem)
        assert found.cost == best.cost == simulated.step_seconds(problem, found.choice)
        assert found.looked_at == len(ran) == len(set(ran)) < best.looked_at / 2
    with pytest.raises(ValueError, match="fits into 1 bytes"):
        simulated.autotune(replace(problem, memory_bytes=1))
    alike, ran = replace(example(), memory_bytes=2**40), []
    found = simulated.autotune(alike, lambda config: ran.append(config) or 1.0)
    assert ran == simulated.grid(alike) and found == (ran[0], 1.0, len(ran)), "as fast is not slower"
    assert simulated.grid(alike)[:3] == [simulated.Config(0, rows) for rows in (1024, 512, 256)]
    full = replace(example(), memory_bytes=simulated.memory(example(), simulated.Config(3, 1)))
    assert simulated.autotune(full).choice == simulated.every_config(full).choice == simulated.Config(3, 1)
    odd = replace(example(), rows=6, microbatches=2)
    assert {config.rows for config in simulated.grid(odd)} == {3}, "an odd number has no half"
    uneven = replace(example(layers=(block("b", 4, 8),), rows=4, microbatches=1), memory_bytes=2**40)
    assert simulated.memory(uneven, simulated.Config(0, 2)) == 16 * 2 * 4 * 8 + 2 * (4 + 8) * 4
    config = small(tied=False, num_layers=1)
    parameters = sum(parameter.numel() for parameter in GPT(config).parameters())
    for zero, microbatches in product(range(4), (1, 2)):
        strategy = Strategy(dp=4, zero=zero, microbatches=microbatches)
        loss = 2 * 3 * 4 if zero == 0 else 0
        sent = dryrun.run(bytes_of_a_step, strategy, config, rank=1, ranks=4)
        assert abs(sent - simulated.sent_bytes(parameters, 4, zero, microbatches)) <= 2 * 16 + loss


def bytes_of_a_step(strategy, config):
    """The second step: the first also builds."""
    run, rows = parallelize(config, strategy, AdamW), Text.builtin().rows(batch_size=16, length=8)
    run.step(run.batch(rows, 0))
    with Ledger() as ledger:
        run.step(run.batch(rows, 1))
    return ledger.sent_bytes()


# Priced by hand: OptCNN 2·16³ + 16²; Tofu 2 levels of 4 layers, 8 cuts of an operator's tensors, 3 operators of 3
# indices; HyPar 2 levels of 2·2³ + 2²; AutoDDL 40 sweeps of 4·16. Spaces: 16⁴, 9⁴, 2 levels of 2⁴, 4⁴ and so on.
TABLE = """
search                       cost  in           gap  looked at       of    share
OptCNN                 0.00274658  microbatch  0.0%      8,448   65,536   12.89%
TensorOpt              0.00274658  microbatch  0.0%      2,160   65,536    3.30%
FlexFlow               0.00244141  simulated   0.0%      1,007    6,561   15.35%
HyPar                  2.7263e+07  bytes       0.0%         40       32  125.00%
AutoDDL               9.43718e+06  bytes       0.0%      2,560   65,536    3.91%
Tofu                  1.88744e+07  elements    0.0%        576  262,144    0.22%
RL placement           0.00830078  simulated   0.0%        215      256   83.98%
Automap                0.00549316  microbatch  0.0%         90      388   23.20%
Unity                  0.00219727  microbatch  0.0%         13      365    3.56%
Piper                  0.00244141  slowest     0.0%      1,144      542  211.07%
Alpa                    0.0106201  step        0.0%      3,413   66,377    5.14%
Aceso                   0.0106201  step        0.0%      1,114   66,377    1.68%
Galvatron               0.0106201  step        0.0%      1,638   38,673    4.24%
Galvatron-BMW           0.0106201  step        0.0%      3,356   39,185    8.56%
nnScaler               0.00317383  simulated   0.0%         34    5,136    0.66%
DeepSpeed-Autotuning    0.0405535  simulated   0.0%          6       44   13.64%
"""


def test_auto_parallel():
    """On the 4 layers and 4 devices of the chapter each search returns the best of its own space."""
    rows = race(example())
    assert len(rows) == 16 and all(row.cost == row.best for row in rows), table(rows)
    assert table(rows).splitlines() == TABLE.strip().splitlines()
    assert [(row.gap, row.share) for row in rows[:2]] == [(0, 8448 / 65536), (0, 2160 / 65536)]
