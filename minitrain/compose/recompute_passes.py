"""The pass of `parallelize` for recomputation: what each block keeps, by the words of recompute_policies.py.

    stage          blocks 1 2 3 4 5, recompute="every:2"         [1 2] [3 4] [5]     each kept as one input

Tables and the head keep what they always keep. With `recompute_partition` (ZeRO-R's Pa) a rank of tp keeps
1/tp of such an input, which is alike on all of them, and backward sends one more all-gather of it,
(t-1)/t · B·T·D elements a segment. What is computed again sends again: of a block with "full" the all-reduce
behind attention's output, and with sequence parallelism the gathers in front of each pair of matrices; not
the sum of the MLP's, for the second pass stops before its last product. A kept result sends nothing twice.
Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054, section 6.1 (Pa).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from minitrain.attention.dropout import Places
from minitrain.memory.dropping import dropping
from minitrain.memory.recompute import recompute
from minitrain.memory.recompute_policies import Policy, parse, segments
from minitrain.memory.segment import Hold, Results
from minitrain.model.gpt import GPT, Stages, one_by_one
from minitrain.plan.strategy import Strategy
from minitrain.ranks import collectives
from minitrain.ranks.mesh import Mesh
from minitrain.systems.plan.rematerialize import next_checkpoint


def recompute_in(
    module: GPT | Stages, strategy: Strategy, mesh: Mesh | None, places: Places, early_stop: bool = True
) -> None:
    """Comes behind all that adds hooks to layers."""
    policies = parse(strategy.recompute)
    if not any(policy.drops for policy in policies):
        return
    results = Results()
    module.hooks.result = results
    hold = in_parts(mesh.group("tp")) if strategy.recompute_partition else None
    how = dict(results=results, hold=hold, replay=[places.again], early_stop=early_stop)
    for _, stage in module.items():
        for layer in stage.layers:
            layer.register_forward_pre_hook(results.know)
        stage.run_layers = partial(run_segments, planned(stage.layers, policies), how)


Segments = list[tuple[list[nn.Module], Policy | None]]


def planned(layers: Iterable[nn.Module], policies: list[Policy]) -> Segments:
    """Layers that run one after the other, in segments."""
    blocks = {int(layer.name.split(".")[-1]) - 1: layer for layer in layers if hasattr(layer, "attention")}
    plan, own = [], range(min(blocks, default=0), max(blocks, default=-1) + 1)
    found = iter([([blocks[number] for number in part], policy) for part, policy in segments(policies, own)])
    seen = set()
    for layer in layers:
        if layer in seen:
            continue
        plan.append(next(found) if hasattr(layer, "attention") else ([layer], None))
        seen.update(plan[-1][0])
    return plan


def run_segments(plan: list, how: dict, _layers: Iterable[nn.Module], x: Tensor, positions: Tensor) -> Tensor:
    """The layers of a stage, as GPT.run_layers."""
    for layers, policy in plan:
        run = partial(one_by_one, layers)
        if policy is None or not policy.drops:
            x = run(x, positions)
        elif policy.slots:
            x = revolve(layers, policy.slots, how, x, positions)
        elif policy.again:
            x = recompute(run, x, positions, keep=policy.keep, **how)
        else:
            again = {name: how[name] for name in ("results", "replay", "early_stop")}
            with dropping(policy.drop, inside=policy.inside, **again):
                x = run(x, positions)
    return x


def revolve(layers: list[nn.Module], max_inputs: int, how: dict, x: Tensor, positions: Tensor) -> Tensor:
    """x behind these layers, with at most `max_inputs` inputs of layers in memory, x among them: segments
    inside segments, cut as rematerialize.py cuts a chain. Forwards are the plan's, the graph autograd's."""
    while len(layers) > 1:
        cut = next_checkpoint(len(layers), max_inputs) if max_inputs > 1 else len(layers) - 1
        x = recompute(partial(revolve, layers[:cut], max_inputs, how), x, positions, **how)
        layers, max_inputs = layers[cut:], max(1, max_inputs - 1)
    return one_by_one(layers, x, positions)


def in_parts(group: ProcessGroup) -> Hold:
    """Of a tensor that is alike on all ranks of the group, each keeps a part."""
    ranks, rank = group.size(), group.rank()

    def hold(x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        each, shape = -(-x.numel() // ranks), x.shape
        part = x.reshape(-1)[rank * each : (rank + 1) * each]
        own = part.new_zeros(each)
        own[: len(part)] = part
        return own, lambda own: collectives.all_gather(own, group)[: math.prod(shape)].view(shape)

    return hold
