"""DeAR: an all-reduce in two halves, of which the second hides behind the next forward.

    backward    reduce_scatter of a bucket as soon as it is full, behind the layers before it
    step        update of this rank's slices, then all_gather of all buckets, the first layers' first
    forward     a layer waits for its own bucket; those of later layers are still on their way

ZeRO-1 (zero1.py) with gathers that nobody waits for in the step. Sends as data parallelism, 2(n-1)/n of the
gradients' bytes. Whoever reads a parameter before its module's forward, as copies for a precision do, calls
`whole` first: so it is a class to be used by hand, no field of Strategy. Zhang et al. 2023, DeAR,
arXiv:2302.12445, ICDCS. Differs: the update lies between the halves, so weights are gathered, not
gradients; buckets of equal bytes, not tuned ones.
"""

from functools import partial

from torch import nn

from minitrain.data_parallel.buckets import Flat
from minitrain.data_parallel.zero1 import Zero1
from minitrain.ranks.collectives import Handle, all_gather


class Dear(Zero1):
    """Reducer and optimizer of a training step: train_step(forward_backward, batch, dear, dear)."""

    def __init__(self, model: nn.Module, group, make_optimizer, bucket_bytes=25_000_000):
        super().__init__(model, group, make_optimizer, bucket_bytes)
        self.gathering: dict[Flat, Handle] = {}
        for module in model.modules():
            params = [param for param in module.parameters(recurse=False) if param.requires_grad]
            flats = dict.fromkeys(map(self.in_order.bucket_of.get, params))
            module.register_forward_pre_hook(partial(self._before_forward, flats))

    def publish(self, frozen: bool = False) -> None:
        for flat, whole in reversed(self.weights.items()):
            self.gathering[flat] = all_gather(flat.shard.detach(), flat.groups[0], out=whole, async_op=True)

    def _before_forward(self, flats, *_) -> None:
        for flat in [flat for flat in flats if flat in self.gathering]:
            self.gathering.pop(flat).wait()

    def whole(self) -> None:
        """Every parameter is up to date."""
        self._before_forward(self.weights)
