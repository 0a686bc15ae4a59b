"""What may be put into the layers of a model: one object, given when it is built, that all of its layers ask.

    GPT(config, hooks=Hooks(experts=partial(shadow, hook=AllToAll(group), ..)))

    result          y = result("act", compute, gate, up): compute(gate, up), under a name. Recomputation keeps
                    some results and computes others again (memory/recompute.py, recompute_policies.py).
                    All tensors with gradients that `compute` reads are its inputs, or parameters
    token_rows,     rows of a table, for a table that is cut over ranks (tensor_parallel/vocabulary.py)
    position_rows
    experts         x [N, D] to its experts and back (moe/dispatch.py, systems/moe/travel.py)
    tokens          which of the tokens this rank routes to experts (moe/dispatch.py)
    block           block(layer, x, positions) -> x: how blocks compute, if not as they are written

Left alone a hook does what one process does. A layer knows nothing of ranks, and who puts something here
nothing of layers: compose/ is the one place where hooks are wrapped in each other, in one order.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch.nn.functional as F
from torch import Tensor

from minitrain.moe.dispatch import AllToAll, Tokens


def call(name: str, compute: Callable, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
    """As it is: nothing is made of the name."""
    return compute(*inputs)


def lookup(table: Tensor, ids: Tensor, what: str, limit: str) -> Tensor:
    """Rows `ids` of the table. Where torch notices a wrong id (on a CPU) the error names it; to look first
    would cost an operator everywhere and a synchronisation on a GPU."""
    try:
        return F.embedding(ids, table)
    except IndexError:
        size, place = table.size(0), ((ids < 0) | (ids >= table.size(0))).nonzero()[0].tolist()
        wrong = ids[tuple(place)].item()
        raise ValueError(f"{what} {wrong} at {place}; {limit} is {size} (0..{size - 1})") from None


@dataclass(eq=False)
class Hooks:
    result: Callable = call
    token_rows: Callable = lookup
    position_rows: Callable = lookup
    experts: Callable = field(default_factory=AllToAll)
    tokens: Tokens = field(default_factory=Tokens)
    block: Callable | None = None
