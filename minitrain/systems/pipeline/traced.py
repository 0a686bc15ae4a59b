"""Merak's partitioner: a pipeline of any model, traced, with no line of it changed.

    traced = trace(model, tokens)                       one graph of operators, parameters by their names
    stages = split(traced, 4, flops(traced, tokens))    four modules
    run(stages, tokens)                                 the same numbers as model(tokens)

The graph may be cut behind every operator where one float tensor crosses: a residual stream has such places
between and inside blocks. What lies between two is a unit; units are dealt out so that the slowest stage has
least FLOPs. A rank sends on what crosses a cut; integers (positions) go along. A tied parameter is in two
stages. torch.export's tensors have no memory, so the model may be larger than this machine. Lai et al. 2022
(Merak), arXiv:2206.04959. Differs: without its schedule (shifted critical path) and tp; shapes are fixed.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.utils.flop_counter import FlopCounterMode

from minitrain.pipeline.partition import balanced


class TracedStage(NamedTuple):
    module: fx.GraphModule
    takes: tuple[str, ...]  # from the stage before, or the model's inputs
    gives: tuple[str, ...]
    flops: int


def trace(model: nn.Module, *inputs: Tensor) -> fx.GraphModule:
    return torch.export.export(model, inputs).module()


def operators(traced: fx.GraphModule) -> list[fx.Node]:
    """What computes, in order; checks of the inputs' shapes do not."""
    return [node for node in traced.graph.nodes if node.op == "call_function"]


def flops(traced: fx.GraphModule, *inputs: Tensor) -> list[int]:
    found: dict[str, int] = {}

    class Counting(fx.Interpreter):
        def run_node(self, node: fx.Node):
            with FlopCounterMode(display=False) as counter:
                result = super().run_node(node)
            found[node.name] = counter.get_total_flops()
            return result

    with torch.no_grad():
        Counting(traced).run(*inputs)
    return [found[node.name] for node in operators(traced)]


def split(traced: fx.GraphModule, stages: int, costs: Sequence[float]) -> list[TracedStage]:
    """Stages whose largest sum of costs is as small as cuts at one tensor allow."""
    nodes = operators(traced)
    takes = inputs = [node for node in traced.graph.nodes if node.op == "placeholder"]

    def behind(before: Sequence[fx.Node]) -> list[fx.Node]:
        """Inputs and results of `before` that others use: they cross the cut, as their order is kept."""
        inside = set(before)
        outside = lambda user: user not in inside and user.op in ("call_function", "output")
        return [node for node in (*inputs, *before) if any(map(outside, node.users))]

    crossing = [behind(nodes[: end + 1]) for end in range(len(nodes) - 1)]
    ends = [end + 1 for end, values in enumerate(crossing) if sum(map(_is_float, values)) == 1] + [len(nodes)]
    starts = [0, *ends]
    units = [sum(costs[start:end]) for start, end in zip(starts, ends)]
    if stages > len(units):
        raise ValueError(f"{stages} stages of a graph that can be cut into {len(units)}; use fewer")
    made = []
    for run in balanced(units, stages):
        start, end = starts[run.start], starts[run.stop]
        gives = crossing[end - 1] if end < len(nodes) else list(traced.graph.output_node().all_input_nodes)
        module = _module(traced, nodes[start:end], takes, gives)
        names = tuple(node.name for node in takes), tuple(node.name for node in gives)
        made.append(TracedStage(module, *names, sum(costs[start:end])))
        takes = gives
    return made


def run(stages: Sequence[TracedStage], *inputs: Tensor) -> Tensor:
    for stage in stages:
        inputs = stage.module(*inputs)
    return inputs[0]


def _is_float(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return not isinstance(value, Tensor) or value.is_floating_point()  # a list of tensors is no place to cut


def _module(traced: fx.GraphModule, nodes, takes, gives) -> fx.GraphModule:
    graph = fx.Graph()
    copies = {node: graph.placeholder(node.name) for node in takes}

    def copy_of(node: fx.Node) -> fx.Node:
        if node.op == "get_attr" and node not in copies:
            copies[node] = graph.get_attr(node.target)
        return copies[node]

    for node in nodes:
        copies[node] = graph.node_copy(node, copy_of)
    graph.output(tuple(map(copy_of, gives)))
    return fx.GraphModule(traced, graph)
