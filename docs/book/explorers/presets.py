"""Writes layout-data.js: what layout.html needs of models and machines that JavaScript cannot count.

    python docs/book/explorers/presets.py            writes the file, some minutes of dry runs
    python docs/book/explorers/presets.py --check    or says that it is out of date

For every model, tp, cp and rows of a microbatch two dry runs (compose/dry_runs) of an embedding, a block and
a head, one of them with recomputation: parameters, bytes saved, bytes at the peak of a layer. For every
machine the seconds of these layers (plan/predict/rates). All else is computed in the page: the pipeline,
ZeRO, what dp sends, the optimizer.
"""

import json
import sys
from collections.abc import Collection
from itertools import product
from pathlib import Path

from minitrain.compose.dry_runs import work_of
from minitrain.model.config import GPTConfig, presets
from minitrain.plan.accounting import flops_per_token, parameters
from minitrain.plan.predict.rates import Place, layers_s, rates_of
from minitrain.plan.predict.training_run import STACKS
from minitrain.plan.predict.work import Work
from minitrain.plan.simulate.machines import MACHINES, Machine
from minitrain.plan.strategy import Strategy
from minitrain.precision.policies import POLICIES

FILE = Path(__file__).with_name("layout-data.js")
LENGTHS = {"llama3-8b": 8192, "llama3-70b": 8192, "llama3.1-405b": 8192, "gpt3-175b": 2048}
NAMES = "a100", "h100", "h200", "b200"
STACK = STACKS["overlapped"]
PRECISION = "bfloat16_main_grads"
TP, CP, ROWS = (1, 2, 4, 8), (1, 2, 4), (1, 2, 4)
LEAST_TOKENS = 2048  # of a row on a rank of cp


def strategy(tp: int, cp: int, **more) -> Strategy:
    more |= dict(core="gathered") if cp > 1 else {}
    return Strategy(tp=tp, cp=cp, sequence_parallel=tp > 1, precision=PRECISION, **more)


def model(config: GPTConfig, length: int) -> dict:
    layers, tied = config.num_layers, int(config.tied)
    each = dict(layers=layers, tied=tied, length=length, parameters=parameters(config))
    return each | dict(flops_per_token=flops_per_token(config, length), work={})


def machine(at: Machine) -> dict:
    rates = rates_of(at, STACK)
    return dict(
        device=at.device.name,
        devices_per_node=at.devices_per_node,
        capacity_bytes=at.device.capacity_bytes,
        peak=at.device.peak("bfloat16"),
        memory_bytes_per_s=Place(at, STACK, rates).memory_bytes_per_s,
        alpha_in=at.intra.latency_s,
        alpha_out=at.inter.latency_s,
        rate_in=at.intra_bytes_per_s * rates.nvlink,
        rate_out=at.inter_bytes_per_s * rates.network,
        rate_card=at.nic_bytes_per_s * rates.network,
    )


def counted(work: Work) -> list[list[int]]:
    """Of embedding, block and head: bytes saved, and at the peak of its forward and its backward."""
    layers = work.embedding, work.block, work.head
    return [[layer.saved_bytes, layer.forward.high_bytes, layer.backward.high_bytes] for layer in layers]


def timed(work: Work, at: Machine, tp: int, cp: int) -> list[list[float]]:
    """Of embedding, block and head: F, B; of both: products, attention, passes, tp, cp; seconds on wires
    inside a node and between nodes, of F and of B."""
    found = []
    embedding, block, _, head = layers_s(work, Place(at, STACK, rates_of(at, STACK), cp=cp, tp=tp), False)
    for times in (embedding, block, head):
        parts = [times.parts[name] for name in ("products", "attention", "passes", "tp", "cp")]
        found.append([float(f"{x:.9g}") for x in (*times.passes[:2], *parts, *sum(times.on_wires, ()))])
    return found


def sizes(name: str) -> list[tuple[int, int, int]]:
    """tp, cp and rows of a microbatch."""
    fits = lambda cp: cp == 1 or LENGTHS[name] // cp >= LEAST_TOKENS
    return [(tp, cp, rows) for tp, cp, rows in product(TP, CP, ROWS) if fits(cp)]


def data(only: Collection[tuple] = ()) -> dict:
    """Of all, or of these (name, tp, cp, rows)."""
    state = list(POLICIES[PRECISION].state_bytes)
    found = dict(models={}, state_bytes=state, machines={name: machine(MACHINES[name]) for name in NAMES})
    for name, length in LENGTHS.items():
        config = presets[name]
        own = found["models"][name] = model(config, length)
        for tp, cp, rows in sizes(name):
            if only and (name, tp, cp, rows) not in only:
                continue
            work = work_of(config, strategy(tp, cp), rows, length)
            again = work_of(config, strategy(tp, cp, recompute="full"), rows, length)
            layers = work.embedding, work.block, work.head
            own["work"][f"{tp} {cp} {rows}"] = dict(
                boundary_bytes=work.boundary_bytes,
                shared=work.head.shared_parameters,
                parameters=[layer.parameters for layer in layers],
                none=counted(work),
                full=counted(again),
                times={name: timed(work, MACHINES[name], tp, cp) for name in NAMES},
            )
    return found


def text() -> str:
    return "// written by presets.py\nconst DATA = " + json.dumps(data(), separators=(",", ":")) + ";\n"


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(f"{FILE.name} is out of date: run {sys.argv[0]}" if FILE.read_text() != text() else None)
    FILE.write_text(text())
