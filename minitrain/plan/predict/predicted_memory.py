"""What a rank keeps while it trains, by kind, from the same dry run as its time.

    memory = memory_of(run, work)        {"parameters": .., "gradients": .., "optimizer state": ..,
                                          "activations": .., "buffers": ..} of the rank with most

    states        elements of its layers times the policy's bytes, what ZeRO shards / (dp · cp), and of
                  experts, which ep ranks share out already, / (dp · cp / ep)
    activations   largest sum, over the actions of its schedule, of what forwards have kept, and of what
                  lives only while the action runs (a layer's own peak above what it found)
    offload       states and parameters that the host keeps are not here; of activations what two layers keep
    buffers       buckets of gradients on their way; of ZeRO-3 the gathered layer; of each neighbour in the
                  pipeline a message that comes, one that goes and one at work

After Korthikanti et al. 2022, arXiv:2205.05198, section 4.2. Against the ledger of whole steps: parameters
exact, optimizer states but for their counters, the sum within 10 % (tested); a tiny model's is up to a third
too much where ZeRO's buckets are as large as it is, for maxima of kinds are added that come at different
times. Not counted: the batch, what the first rank of a pipeline has sent ahead and still holds (up to p
messages), an allocator's rounding and holes, workspaces of kernels and networks.
"""

from functools import lru_cache
from itertools import zip_longest

from minitrain.pipeline.schedule import parts
from minitrain.plan.predict.predicted_pipeline import Layout, in_steady_state, layout_of
from minitrain.plan.predict.training_run import TrainingRun
from minitrain.plan.predict.work import LAYERS, Work

KINDS = ("parameters", "gradients", "optimizer state", "activations", "buffers")


def memory_of(run: TrainingRun, work: Work) -> dict[str, int]:
    return max(by_rank(run, work), key=lambda memory: sum(memory.values()))


def by_rank(run: TrainingRun, work: Work) -> list[dict[str, int]]:
    strategy, layout, found = run.strategy, layout_of(run.model, run.strategy), []
    how = strategy.recompute == "stage", "activations" in strategy.offloads
    activations_of = in_steady_state(layout, lambda some: _most_kept(some, work, *how))
    weight, gradient, optimizer = strategy.policy.state_bytes
    shards = strategy.dp * strategy.cp
    for numbers, activations in zip(layout.ranks, activations_of):
        elements, dealt = elements_of(work, numbers, run.model.tied)
        own = (elements - dealt + dealt * strategy.ep) / shards  # of those that ZeRO shards
        kept = lambda stage: own if strategy.zero >= stage else elements
        twice = 2 if run.stack.buckets_apart and strategy.zero == 0 and strategy.microbatches > 1 else 1
        here = [name not in strategy.offloads for name in ("parameters", "optimizer")]
        states = here[0] * kept(3) * weight, kept(2) * gradient * twice, here[1] * kept(1) * optimizer
        buffers = min(2 * strategy.bucket_bytes, elements * gradient) * (shards > 1 and strategy.zero == 2)
        if strategy.zero == 3:
            buffers = work.block.parameters * (weight + gradient)
        if strategy.pp > 1:
            neighbours = 2 - (layout.chunks == 1 and (numbers[0] or numbers[-1]))
            buffers += 3 * neighbours * work.boundary_bytes
        found.append(dict(zip(KINDS, map(round, (*states, activations, buffers)))))
    return found


@lru_cache(maxsize=1 << 12)
def elements_of(work: Work, numbers: tuple[int, ...], tied: bool) -> tuple[int, int]:
    """Parameters of a rank with so many of LAYERS (a tied table counts once where both ends are), and how
    many of these are routed experts', of which ranks of ep have others."""
    every = sum(number * layer.parameters for number, layer in zip(numbers, work.layers))
    twice = work.head.shared_parameters * bool(tied and numbers[0] and numbers[-1])
    return every - twice, numbers[LAYERS.index("block")] * work.expert_parameters


@lru_cache(maxsize=1 << 12)
def _most_kept(layout: Layout, work: Work, again: bool, away: bool) -> tuple[float, ...]:
    import numpy  # here, so that help and names need none

    effects, (roles, acts) = [_effects(work, each, again, away) for each in layout.stages], _actions(layout)
    beside, kept = numpy.array([*(effects[stage][kind] for kind, stage in roles), (0, 0)]).T
    own = kept[acts] / layout.slices
    held = own.cumsum(axis=1)
    return tuple(numpy.maximum(held, held - own + beside[acts]).max(axis=1, initial=0.0).tolist())


@lru_cache(maxsize=1 << 12)
def _actions(layout: Layout) -> tuple:
    """[(kind, stage), ..] that ranks do, and an array: of each rank in order which of these; -1: nothing."""
    import numpy

    roles: dict[tuple[str, int], int] = {}
    ranks = layout.build().ranks
    acts = [[roles.setdefault((one.kind, one.stage), len(roles)) for one in parts(rank)] for rank in ranks]
    return list(roles), numpy.array([*zip(*zip_longest(*acts, fillvalue=-1))])


def _effects(work: Work, numbers: tuple[int, ...], again: bool, away: bool) -> dict[str, tuple[int, int]]:
    """By kind of action, of a stage: the most alive during it beyond what was, and how much it leaves. What
    goes `away` is here for a layer and the one before it."""
    embedding, routed, dense, head = ([l] * n for l, n in zip(work.layers, numbers))
    layers = [*embedding, *dense, *routed, *head]  # a mixture begins with what is dense
    every, below, forward, backward = sum(layer.saved_bytes for layer in layers) * (not away), 0, 0, 0
    for before, layer in zip([None, *layers], layers):
        below = (before.saved_bytes if before else 0) if away else below
        forward = max(forward, below + layer.forward.high_bytes)
        below += layer.saved_bytes
        backward = max(backward, below - every + layer.backward.high_bytes)
    # A layer's bytes are with what it gives, without what it is given. All but the last stage send that
    # away, all but the first have received some.
    kept = every and every + work.boundary_bytes * (bool(head) - bool(embedding))
    waiting = sum(layer.waiting_bytes for layer in layers)
    keeps = work.boundary_bytes if again else kept
    leaves, comes = (0, -kept), (0, kept)
    passes = dict(F=(forward, keeps), R=(forward, kept - keeps), B=(backward, -kept))
    passes |= dict(I=(backward, waiting - kept), W=(0, -waiting))
    return passes | dict(E=leaves, G=leaves, H=comes, L=comes)
