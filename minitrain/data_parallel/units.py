"""Units: the modules whose parameters are gathered together, and freed together (zero3.py).

    elements(model)     the default: what is listed inside the model, and its children beside
    assign(..)          each parameter belongs to the innermost unit around it, and to a buffer of that unit

What several units use (a tied table) has a buffer of its own, which each of them gathers. Sends nothing.
Raises ValueError in one line for units without parameters.
Zhao et al. 2023, PyTorch FSDP, arXiv:2304.11277, section 3.2.1 (FSDP units).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn


class Unit:
    """A module, the buffers it needs, and the pass through the model (through a stage, in a pipeline) that it belongs to."""

    def __init__(self, module: nn.Module):
        self.module, self.flats, self.way = module, [], None


class Way:
    """The order of units in a pass, learnt from the last forward."""

    def __init__(self, units: list[Unit]):
        self.order = units  # a guess before the first
        self.seen: list[Unit] = []  # in this forward
        self.done: set[Unit] = set()  # whose backward has begun


def elements(module: nn.Module) -> list[nn.Module]:
    """The default units: what is listed inside the module, and its children beside. Within a list only what cannot be called is
    opened: a block may hold lists of its own (experts, heads), and is one unit."""
    lists, found = (nn.ModuleList, nn.ModuleDict, nn.Sequential), []
    for child in module.children():
        callable_ = type(child).forward is not nn.Module.forward
        holds_lists = not isinstance(module, lists) and any(
            isinstance(inner, lists) for inner in child.modules()
        )
        if holds_lists or not callable_:
            found += elements(child)
        elif any(True for _ in child.parameters()):
            found.append(child)
    return found


def assign(
    model: nn.Module, modules: list[nn.Module], make_flat: Callable, alike: dict[nn.Parameter, tuple]
) -> list[Unit]:
    """Units, the model itself first, each with its buffers; a parameter belongs to the innermost unit around it. Parameters share a
    buffer if the same units use them and they are `alike` (sync.sums_alike)."""
    units = {module: Unit(module) for module in [model, *modules]}
    inner: dict[nn.Parameter, dict[Unit, None]] = {}  # the units that use a parameter, by whatever name

    def visit(module: nn.Module, unit: Unit) -> None:
        unit = units.get(module, unit)
        for param in module.parameters(recurse=False):
            inner.setdefault(param, {})[unit] = None
        for child in module.children():
            visit(child, unit)

    visit(model, units[model])
    kinds: dict[tuple, list[nn.Parameter]] = {}
    for param, users in inner.items():
        kinds.setdefault((tuple(users), param.requires_grad, alike[param]), []).append(param)
    for (users, _, (_, _, groups, *_)), params in kinds.items():
        flat = make_flat(params, groups)
        for unit in users:
            unit.flats.append(flat)
    empty = [module for module in modules if not units[module].flats]
    if empty:
        raise ValueError(
            f"unit {type(empty[0]).__name__} has no parameters of its own; leave it out of units, or give modules of "
            f"the model that was passed"
        )
    return [unit for unit in units.values() if unit.flats]
