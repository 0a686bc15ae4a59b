"""What a Strategy leaves to the host, applied to what `parallelize` has made: who updates, and where.

parameters_on_host  ZeRO-3's shards lie on the host; a unit is copied from there and gathered
update_on_host      the optimizer's states and its work go to the host (memory/host_optimizer.py)
update_in_files     or the states go to files, each rank's own (systems/memory/file_optimizer.py)
keep_on_host        so does what layers keep for their backward (memory/activations.py)
"""

from pathlib import Path

import torch
from torch import Tensor, nn

from minitrain.data_parallel.hybrid import Chain
from minitrain.data_parallel.sharded_units import UnitBuffer, elements
from minitrain.data_parallel.sync import Sync
from minitrain.memory.activations import AwayActivations
from minitrain.memory.host_optimizer import HostOptimizer, fused_adamw
from minitrain.memory.pools import Transfer, is_fake, new_host, to_device, to_host
from minitrain.model.gpt import Stages
from minitrain.model.training.optim import AdamW
from minitrain.plan.strategy import Strategy
from minitrain.ranks import collectives
from minitrain.systems.memory.file_optimizer import FileOptimizer, piece_of
from minitrain.systems.memory.files import FileStore


def offload(module: nn.Module, sync: Sync, strategy: Strategy) -> None:
    """All that `strategy.offload` names, in the order in which one needs the other."""
    if "parameters" in strategy.offloads:
        parameters_on_host(sync)
    if "optimizer" in strategy.offloads and sync.optimizer is not None:
        update_on_host(sync, strategy)
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


def update_on_host(sync: Sync, strategy: Strategy) -> None:
    optimizer = sync.optimizer
    if type(optimizer) is AdamW and not is_fake(sync.trainable[0]):
        optimizer.update = fused_adamw
    sync.optimizer = sync.listener = HostOptimizer(optimizer, delayed=strategy.delayed_update)


def update_in_files(sync: Sync, folder: str | Path, piece: int = 1 << 18) -> FileStore | None:
    """After `parallelize`: `update_in_files(run.sync, folder)`. A folder is of a machine and no part of a
    strategy; a checkpoint goes on with or without. Each rank has a file of its own, with the states of what
    it updates: with ZeRO 1/n. Host memory: nine buffers of a piece. None where nothing is updated."""
    optimizer = sync.optimizer
    if optimizer is None:
        return None
    params = [param for group in optimizer.param_groups for param in group["params"]]
    sizes = [4 * max(1, param.itemsize // 4) * piece_of(param, piece) for param in params]
    store = FileStore(folder, collectives.world().rank(), buffer_bytes=max(sizes), buffers=9)
    sync.optimizer = FileOptimizer(optimizer, store, piece)
    return store
