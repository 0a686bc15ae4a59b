"""Passes of `parallelize` for layers: experts, products in few bits, the host, recomputation.

    dp × cp ranks   [0 1 2 3 | 4 5 6 7]     ep = 4: each block has all experts, rank i and i + 4 the same ones
                                            their gradients are sums over {i, i + 4}

Products: a block's projections and MLPs get the layers of products.py, experts `LowBits`; layers cut over tp
have them already. Delayed scaling: after a step the largest numbers that a block has seen are agreed over all
ranks that have it with other tokens, or another part of it: 8 bytes a matrix, a message a block and group.

    stage          blocks 1 2 3 4 5, recompute="every:2"         [1 2] [3 4] [5]     each kept as one input

With `recompute_partition` (ZeRO-R's Pa) a rank of tp keeps 1/tp of such an input, and backward gathers it,
(t-1)/t · B·T·D elements a segment. What is computed again sends again: with "full" the all-reduce behind
attention's output, and with sequence parallelism the gathers in front of each pair of matrices; not the sum
of the MLP's, for the second pass stops before its last product.
Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054, section 6.1 (Pa); 2021, ZeRO-Infinity, arXiv:2104.07857.
"""

import math
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from minitrain.attention.placed import Places
from minitrain.data_parallel.hybrid import Chain
from minitrain.data_parallel.sync import Sync
from minitrain.data_parallel.zero3 import UnitBuffer, elements
from minitrain.memory.host_optimizer import HostOptimizer, fused_adamw
from minitrain.memory.pools import Transfer, is_fake, new_host, to_device, to_host
from minitrain.memory.recompute import Hold, Results, dropping, recompute
from minitrain.memory.recompute_policies import Policy, parse, segments
from minitrain.model.config import GATED, GPTConfig
from minitrain.model.gpt import GPT, Stages, one_by_one
from minitrain.model.layers import Hooks
from minitrain.model.mixture import mixtures
from minitrain.model.training.optim import AdamW
from minitrain.moe.dispatch import AllToAll, CutExperts, Tokens, place_experts
from minitrain.moe.experts import LowBits
from minitrain.moe.router import Routing
from minitrain.plan.strategy import Strategy
from minitrain.precision import products as eight_bits
from minitrain.precision.products import LowLinear, Scales, emulated
from minitrain.ranks import collectives
from minitrain.ranks.mesh import Mesh
from minitrain.ranks.sharding import placement
from minitrain.systems.memory.activations import AwayActivations
from minitrain.systems.moe.move_experts import experts_are_cheaper, pull, shadow, table_of
from minitrain.systems.moe.overlapped_experts import by_capacity
from minitrain.systems.moe.two_level import TwoLevels
from minitrain.systems.pipeline.halves import Halves
from minitrain.systems.plan.expert_placement import shadowed
from minitrain.systems.plan.rematerialize import next_checkpoint
from minitrain.systems.precision import bitnet, int4, int8, narrow_sums


class ExpertGroups:
    """ep splits dp × cp into blocks of ranks that hold all experts together; the ranks at one place of every
    block hold the same ones, and `summed_over` are these, inside a node first."""

    def __init__(self, strategy: Strategy, mesh: Mesh):
        self.strategy, self.tp = strategy, mesh.group("tp") if strategy.tp > 1 else None
        axes = (*strategy.context_axes, *["tp"] * (strategy.tp > 1))
        self.row_group = mesh.group(*axes) if axes else None  # ranks with tokens of the same rows
        self.group, self.part, self.summed_over, names = None, (0, 1), (), ("ep", "edp")
        if strategy.ep == 1:
            return
        *outer, inner = strategy.data_axes
        rows, node = (*strategy.data_axes, *strategy.context_axes), (inner, *strategy.context_axes)
        self.group, replicas = mesh.blocks(*rows, size=strategy.ep, names=names)
        self.part, self.summed_over = (self.group.rank(), strategy.ep), (replicas,)
        if outer:  # two levels, of which the blocks take up the inner one first
            size = mesh.size(*node)
            _, near = mesh.blocks(*node, size=min(size, strategy.ep), names=names)
            self.summed_over = (near, replicas if strategy.ep > size else mesh.group(*outer))
        names = ("ep_inside", "ep_across")
        self.inside, self.across = mesh.blocks(*rows, size=strategy.ep_node, names=names, of=strategy.ep)

    def hooks(self, config: GPTConfig, pairs: Halves | None) -> Hooks:
        """How tokens and experts meet: the one place that says what is wrapped in what."""
        sliced = self.strategy.sequence_parallel
        where = dict(tp_group=self.tp, sequence_parallel=sliced, row_group=self.row_group)
        row_ranks = self.strategy.cp * (self.strategy.tp if sliced else 1)
        return Hooks(tokens=Tokens(**where, row_ranks=row_ranks), experts=self.travel(config, pairs))

    def travel(self, config: GPTConfig, pairs: Halves | None) -> Callable:
        """shadow(pull(rows that travel)), each as far as the strategy asks for it."""
        strategy, group = self.strategy, self.group
        if group is None:
            return AllToAll()
        meanwhile = pairs.yield_turn if pairs else None
        table = partial(table_of, group=group, shared_by=(self.tp,) if self.tp else ())
        width, gated = config.expert_width, config.activation in GATED
        rule = lambda rows: shadowed(rows, config.d_model, width, 2 + gated)

        def pays(routing: Routing, training: bool) -> bool:
            return experts_are_cheaper(table(routing), width, gated=gated, backward=training)

        chunks = strategy.ep_chunks
        if self.inside.size() > 1:
            hook = TwoLevels(self.across, self.inside, meanwhile, chunks)
        elif chunks > 1:
            hook = lambda x, routing, experts: by_capacity(x, routing, group, experts, chunks=chunks)
        else:
            hook = AllToAll(group, meanwhile)
        if strategy.ep_travel != "tokens":
            when = None if strategy.ep_travel == "experts" else pays
            hook = partial(pull, hook=hook, across=self.across, inside=self.inside, pays=when)
        if strategy.ep_shadow:
            hook = partial(shadow, hook=hook, group=group, table=table, rule=rule, most=strategy.ep_shadow)
        return hook

    def place(self, module: GPT | Stages) -> set[nn.Parameter]:
        """Experts over ep, each cut over tp; returns the parameters that see a slice of the tokens."""
        sliced = set()
        for layer in mixtures(module.layers):
            if self.group is not None:
                place_experts(layer.experts, self.group)
            if self.tp is not None:
                layer.experts = CutExperts(layer.experts, self.tp)
                sliced |= set(layer.router.parameters())
        return sliced


# Every way to compute the products of linear layers, by the names of policies.PRODUCTS.
PRODUCTS = eight_bits.PRODUCTS | bitnet.PRODUCTS | narrow_sums.PRODUCTS | int4.PRODUCTS | int8.PRODUCTS


def multiply_in(module: nn.Module, strategy: Strategy, mesh: Mesh) -> None:
    if (products := PRODUCTS.get(strategy.products)) is None:
        return
    group = mesh.group("tp") if strategy.tp > 1 else None
    for layer in module.layers if group is None else ():
        if hasattr(layer, "attention"):
            swap(layer.attention, products)
            swap(getattr(layer.mlp, "shared", layer.mlp), products)
    for mixture in mixtures(module.layers):
        device = mixture.experts.up.device
        scales = [Scales(products.history, group, cut if group else "", device) for cut in "NK"]
        mixture.experts.work = LowBits(products, *scales)


def swap(module: nn.Module | None, products) -> None:
    for name, child in [] if module is None else list(module.named_children()):
        if isinstance(child, nn.Linear):
            setattr(module, name, LowLinear(child, products))


def emulation(layers: Iterable[nn.Module], strategy: Strategy) -> str | None:
    """What to tell whoever asked for products that this machine has no kernels for."""
    products = PRODUCTS.get(strategy.products)
    blocks = [layer for layer in layers if hasattr(layer, "attention")] if products else []
    params = [pair for block in blocks for pair in block.named_parameters()]
    weights = [param for name, param in params if param.dim() > 1 and "router" not in name]
    if not any(emulated(products, weight) for weight in weights):
        return None
    where = f"{str(weights[0].dtype).removeprefix('torch.')} on {weights[0].device.type}"
    return f"products={strategy.products!r} are emulated, at no gain in time: no kernel for {where}"


def scales_of(layers: Iterable[nn.Module]) -> dict[str, Scales]:
    """Those that remember, by the names of what they belong to in the whole model."""
    named = ((f"{layer.name}.{path}", part) for layer in layers for path, part in layer.named_modules())
    return {name: part for name, part in named if isinstance(part, Scales) and part.steps}


@torch.no_grad()
def roll_scales(layers: Iterable[nn.Module], tp: ProcessGroup | None) -> None:
    """After a step, which every rank makes."""
    for layer in layers:
        scales = list(scales_of([layer]).values())
        if not scales:
            continue
        largest = torch.stack([one.largest for one in scales])
        at = placement(next(layer.attention.parameters()))
        for group in (*at.summed_over, at.copies, tp):
            if group is not None:
                largest = collectives.all_reduce(largest, group, op="max")
        for one, amax in zip(scales, largest):
            one.roll(amax)


def offload(module: nn.Module, sync: Sync, strategy: Strategy) -> None:
    """All that `strategy.offload` names, in the order in which one needs the other."""
    optimizer = sync.optimizer
    if "parameters" in strategy.offloads:
        parameters_on_host(sync)
    if "optimizer" in strategy.offloads and optimizer is not None:
        if type(optimizer) is AdamW and not is_fake(sync.trainable[0]):
            optimizer.update = fused_adamw
        sync.optimizer = sync.listener = HostOptimizer(optimizer, delayed=strategy.delayed_update)
    if "activations" in strategy.offloads:
        keep_on_host(module, sync)


def parameters_on_host(sync: Sync) -> None:
    """Each rank reads its 1/n of a unit from its own host, and the ranks gather it: ZeRO-Infinity
    (Rajbhandari et al. 2021, arXiv:2104.07857, section 6.1, bandwidth-centric partitioning).

    Over the link in a step: the shards up twice for each microbatch, the gradients down."""
    for flat in sync.shards:
        shard = flat.shard.detach()
        host = new_host(shard.shape, shard.dtype, pinned=shard.is_cuda, kind="parameters")
        flat.shard.data = to_host(shard, out=host).wait()

    def gather(flat: UnitBuffer) -> Chain | Transfer:
        if flat.groups[0].size() == 1:
            return to_device(flat.shard, out=flat.whole)
        out = collectives.announce("buffer", torch.empty_like(flat.shard, device=flat.whole.device))
        copy = to_device(flat.shard, out=out)
        return Chain(copy, lambda shard: collectives.all_gather(shard, flat.groups[0], out=flat.whole))

    sync.gather = gather


def keep_on_host(module: nn.Module, sync: Sync) -> None:
    """Of a pipeline each stage watches its own forwards."""
    for stage in [part for _, part in module.items()] if isinstance(module, Stages) else [module]:

        def resident(stage=stage) -> list[Tensor]:  # gathered parameters are views of what lives
            return [*(sync.gathered_buffers() or stage.parameters()), *stage.buffers()]

        AwayActivations(resident).watch(stage, getattr(stage, "layers", None) or elements(stage))


def recompute_in(module, strategy: Strategy, mesh: Mesh | None, places: Places, early_stop=True) -> None:
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


def planned(layers: Iterable[nn.Module], policies: list[Policy]) -> list[tuple[list, Policy | None]]:
    """Layers that run one after the other, in segments; an embedding stands before blocks, a head behind."""
    blocks = {int(layer.name.split(".")[-1]) - 1: layer for layer in layers if hasattr(layer, "attention")}
    own = range(min(blocks, default=0), max(blocks, default=-1) + 1)
    plan = [([blocks[number] for number in part], policy) for part, policy in segments(policies, own)]
    ends = [([layer], None) for layer in layers if not hasattr(layer, "attention")]
    first = bool(ends) and ends[0][0][0] is next(iter(layers))
    return [*ends[:first], *plan, *ends[first:]]


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
            again = {name: value for name, value in how.items() if name != "hold"}
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
