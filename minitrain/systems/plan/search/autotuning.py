"""DeepSpeed-Autotuning: what a memory model says will not fit is never run, and of the rest few are.

    memory     ZeRO's bytes of states at this stage  +  kept activations of a microbatch
    tuning     for each ZeRO stage the microbatch size halves, from the largest that fits, until it is slower
    run        a step of the job, timed; here simulated: launches, FLOPs and bytes, one after the other

    bytes sent by each of n devices in a step of m microbatches, in units of (n-1)/n of the parameters
    stage 0, 1: 2          2: m + 1          3: 3·m           (proved against dry runs of data_parallel/)

Microsoft 2021, DeepSpeed tutorial "Autotuning". Differs: its tuner by a learned model is left out.
"""

from collections.abc import Callable
from typing import NamedTuple

from minitrain.plan.accounting.memory_formulas import zero_bytes
from minitrain.systems.plan.search.exhaustive import least
from minitrain.systems.plan.search.problem import Found, Problem, cheapest

STAGES = (0, 1, 2, 3)


class Config(NamedTuple):
    zero: int
    rows: int  # of a microbatch on a device


def memory(problem: Problem, config: Config) -> float:
    """Bytes of a device in float32: states as ZeRO cuts them, and each layer's input and inner results."""
    parameters = sum(layer.weights for layer in problem.layers)
    kept = sum(layer.takes + layer.keeps for layer in problem.layers)
    states = zero_bytes(parameters, problem.devices, config.zero, weight=4, gradient=4, optimizer=8)
    return states + config.rows * kept * problem.element_bytes


def sent_bytes(parameters: int, devices: int, zero: int, microbatches: int, element_bytes: int = 4) -> float:
    times = (2, 2, microbatches + 1, 3 * microbatches)[zero]
    return times * parameters * element_bytes * (devices - 1) / devices


def step_seconds(problem: Problem, config: Config, launch_s: float = 1e-4) -> float:
    """Of all rows of a step, those of `problem.microbatches`, shared out to the devices."""
    microbatches = problem.rows * problem.microbatches // (config.rows * problem.devices)
    flops = 3 * sum(layer.flops for layer in problem.layers) * config.rows
    parameters = sum(layer.weights for layer in problem.layers)
    sent = sent_bytes(parameters, problem.devices, config.zero, microbatches, problem.element_bytes)
    work = microbatches * (launch_s * len(problem.layers) + flops / problem.flops_per_s)
    return work + sent / min(level.bytes_per_s for level in problem.levels)


def grid(problem: Problem) -> list[Config]:
    """Every stage with every microbatch that halves a device's rows."""
    rows, sizes = problem.rows * problem.microbatches // problem.devices, []
    while rows >= 1:
        sizes.append(rows)
        if rows % 2:
            break
        rows //= 2
    return [Config(zero, size) for zero in STAGES for size in sizes]


def autotune(problem: Problem, run: Callable[[Config], float] | None = None) -> Found:
    """The fastest of what was run; of equal ones that which ran first. Looked at: runs."""
    run = run or (lambda config: step_seconds(problem, config))
    tried: dict[Config, float] = {}
    for zero in STAGES:
        fitting = [c for c in grid(problem) if c.zero == zero and memory(problem, c) <= problem.memory_bytes]
        before = float("inf")
        for config in fitting:  # the largest microbatch first
            tried[config] = run(config)
            if tried[config] > before:
                break
            before = tried[config]
    time, best = cheapest(((time, config) for config, time in tried.items()), problem.memory_bytes)
    return Found(best, time, len(tried))


def every_config(problem: Problem) -> Found:
    """The fastest of the whole grid that fits; looked at: the grid."""
    every = grid(problem)
    fitting = (config for config in every if memory(problem, config) <= problem.memory_bytes)
    return least(fitting, lambda config: step_seconds(problem, config))._replace(looked_at=len(every))
