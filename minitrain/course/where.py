"""Where a chapter's tensors are: `where(ranks=4)` prints it, as ranks have seen it."""

import torch

from minitrain.ranks import collectives, launch


def where(ranks: int) -> None:
    """Print where ranks have what a cell makes and what `parallelize` builds, and over what each travels."""
    launch.run(_look, ranks=ranks)


def _look() -> None:
    group, made, built = collectives.world(), torch.empty(0), torch.empty(0, device=launch.device())
    door = lambda x: type(collectives.channel_of(group).door("look", x)).__name__
    made, built = (f"on {x.device.type}, over {door(x).lower()}" for x in (made, built))
    if group.rank() == 0:
        print(f"tensors of a cell: {made}; models of parallelize: {built}")
