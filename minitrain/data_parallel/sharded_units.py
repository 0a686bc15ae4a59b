"""Units: the modules whose parameters are gathered together and freed together (zero3.py), and their buffers.

    elements(model)     the default units
    assign(..)          each parameter belongs to the innermost unit around it, and to a buffer of that unit

What several units use (a tied table) has a buffer of its own, which each of them gathers. A gathered buffer
keeps its address: freeing it shrinks its storage to nothing, gathering grows it again. So the views of a
weight that autograd saved in forward find the data again in backward. Sends nothing.
Zhao et al. 2023, PyTorch FSDP, arXiv:2304.11277, section 3.2.1 (FSDP units).
"""

from collections.abc import Callable, Mapping

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from minitrain.data_parallel.buckets import Flat, views
from minitrain.data_parallel.naive import grouped
from minitrain.ranks import collectives
from minitrain.ranks.collectives import Handle


class UnitBuffer(Flat):
    """A flat buffer that is whole between `start` and `free` only; otherwise its parameters read as NaN."""

    def __init__(self, params: list[nn.Parameter], *groups: ProcessGroup):
        super().__init__(params, *groups)
        self.whole = self.pack(params)
        self.places = views(self.whole, params)
        self.divide()
        self.handle: Handle | None = None
        self.grads: Tensor | None = None  # of the whole, while they come in
        self.sum: Tensor | None = None  # of what came back, over the microbatches
        self.num_grads = 0  # parameters whose gradient is complete in this backward
        self.keep_gathered = False  # whoever frees it (Zero3.keep_gathered)
        self.free()

    def divide(self) -> None:
        """The shard gets memory of its own."""
        self.cut(self.local_shard(self.whole).clone())

    def view(self, flat: Tensor, param: nn.Parameter) -> Tensor:
        """A parameter's place in a flat buffer, in its shape."""
        return flat.narrow(0, self.start_of[param], param.numel()).view(param.shape)

    def start(self, gather: Callable) -> None:
        """Start the gather, unless the whole is there or on its way."""
        if not self.whole.untyped_storage().nbytes():
            self._resize(self.numel)
            self.handle = gather(self)

    def wait(self) -> None:
        """The parameters are whole."""
        self._settle()
        for param, place in zip(self.params, self.places):
            param.data = place

    def free(self) -> None:
        if self.keep_gathered:
            return
        self._settle()  # gathered for nothing
        for param in self.params:
            param.data = param.new_full((), float("nan")).expand(param.shape)
        self._resize(0)

    def _settle(self) -> None:
        if self.handle is not None:
            self.handle.wait()
            self.handle = None

    def _resize(self, numel: int) -> None:
        self.whole.untyped_storage().resize_(numel * self.whole.element_size())
        collectives.announce("resized", self.whole)


class Unit:
    """A module, its buffers, and the order of units in its pass (through a stage, in a pipeline)."""

    def __init__(self, module: nn.Module):
        self.module, self.flats, self.turns = module, [], None


class Turns:
    """The order of units in a pass, learnt from the last forward."""

    def __init__(self, units: list[Unit]):
        self.order = units  # a guess before the first
        self.seen: list[Unit] = []  # in this forward
        self.done: set[Unit] = set()  # whose backward has begun

    def forward(self, unit: Unit) -> None:
        if unit in self.seen or self.done:  # a new pass
            self.seen, self.done = [], set()
        self.seen.append(unit)
        if len(self.seen) == len(self.order):
            self.order = list(self.seen)

    def backward(self, unit: Unit) -> None:
        if unit in self.done:  # of another microbatch, with no forward between
            self.done.clear()
        self.done.add(unit)


def elements(module: nn.Module) -> list[nn.Module]:
    """The default units: members of lists inside (ModuleList, ModuleDict, Sequential), and children beside.

    Within a list only what cannot be called is opened: a block may hold lists (experts), and is one unit."""
    lists, units = (nn.ModuleList, nn.ModuleDict, nn.Sequential), []
    for child in module.children():
        can_be_called = type(child).forward is not nn.Module.forward
        holds_lists = any(isinstance(inner, lists) for inner in child.modules())
        if not can_be_called or holds_lists and not isinstance(module, lists):
            units += elements(child)
        elif any(True for _ in child.parameters()):
            units.append(child)
    return units


def assign(model: nn.Module, modules: list[nn.Module], make_flat: Callable, key_of: Mapping) -> list[Unit]:
    """Units, the model first, with a buffer for parameters that the same units use, of equal keys."""
    units = {module: Unit(module) for module in [model, *modules]}
    users: dict[nn.Parameter, dict[Unit, None]] = {}  # the units that use a parameter, by whatever name

    def visit(module: nn.Module, unit: Unit) -> None:
        unit = units.get(module, unit)
        for param in module.parameters(recurse=False):
            users.setdefault(param, {})[unit] = None
        for child in module.children():
            visit(child, unit)

    visit(model, units[model])
    alike = grouped(users, lambda param: (tuple(users[param]), param.requires_grad, key_of[param]))
    for (users_of_all, _, key), params in alike.items():
        flat = make_flat(params, key.groups)
        for unit in users_of_all:
            unit.flats.append(flat)
    if empty := [type(module).__name__ for module in modules if not units[module].flats]:
        raise ValueError(f"unit {empty[0]} has no parameters of its own; leave it out")
    return [unit for unit in units.values() if unit.flats]
