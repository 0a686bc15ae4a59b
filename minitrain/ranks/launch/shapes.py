"""torch's FakeTensorMode, with a shorter way to an operator that has been seen before.

    with ShapesMode(): ...                what FakeTensorMode gives, in a third of the time

torch remembers what an operator gives for arguments of these shapes, and takes some 60 us to look it up: it
describes each argument by 17 properties, through a dataclass, and builds each result by a constructor that
serves any caller. A step of a small model has thousands of operators, so a dry run is mostly that. Here a
plain dense tensor is described by what can differ between two of them, and a result has the attributes that
torch's constructor gives. What may be remembered remains torch's to say, but for `_unsafe_view`, which stands
in every product of matrices; what is not plain goes torch's way.

Another mode above this one that sees every operator, such as a ledger's, may remember what it found by the
same `key_of`, and ask for the results (`make`) without the way down through torch.
"""

from typing import NamedTuple

import torch

from minitrain.ranks.torch_private import (
    DEVICE_OF,
    UNSAFE_VIEW,
    FakeTensor,
    FakeTensorMode,
    default_device,
    dispatch_keys,
    make_subclass,
    no_dispatch,
    throw_on_data_ptr,
)
from minitrain.ranks.torch_private import _DispatchCacheValidEntry as Remembered

META = torch.device("meta")
# Arguments that say all by type and value: True, 1 and 1.0 are equal, and their types differ.
PLAIN = {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}


class Result(NamedTuple):
    """One result as torch remembers it: an argument, a value or a tensor, on an argument's memory perhaps."""

    argument: int | None
    value: object
    layout: tuple | None  # shape, stride, dtype, device, offset
    on: int | None  # the argument whose memory it shares


Recipe = Result | list[Result]  # what an operator gives for arguments that are described by one key


def recipe_of(known) -> Recipe | None:
    """From torch's memory, if all results are values, or tensors without marks."""
    results = []
    for one in known.output_infos if type(known) is Remembered else (None,):
        meta = one and one.metadata
        if one is None or meta is not None and (meta.is_conj or meta.is_neg or meta.requires_grad):
            return None
        layout = meta and (meta.shape, meta.stride, meta.dtype, meta.device, meta.storage_offset)
        results.append(Result(one.inplace_idx, one.constant_value, layout, one.view_idx))
    return results if known.is_output_tuple else results[0]


class ShapesMode(FakeTensorMode):
    """A mode for one dry run, in which no shape is a symbol."""

    def __init__(self) -> None:
        super().__init__()
        self._attributes: dict[torch.device, dict] = {}  # of a fake tensor of this mode
        self.recipes: dict[tuple, Recipe] = {}
        self._dense: dict[int, bool] = {}  # by a tensor's dispatch keys: strided, not quantized

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is DEVICE_OF:  # autograd asks it of every result
            return args[0].fake_device
        kwargs = kwargs or {}
        key = self.key_of(func, args, kwargs)
        if key is None:
            return self.dispatch(func, types, args, kwargs)
        recipe = self.recipes.get(key)
        if recipe is None and (recipe := recipe_of(self.cache.get(key))) is not None:
            self.recipes[key] = recipe  # another dry run has asked
        if recipe is not None:
            return self.make(recipe, args)
        result = self.dispatch(func, types, args, kwargs)
        if func is UNSAFE_VIEW:
            layout = tuple(result.shape), result.stride(), result.dtype, result.fake_device
            self.recipes[key] = Result(None, None, (*layout, result.storage_offset()), 0)
        elif (recipe := recipe_of(self.cache.get(key))) is not None:
            self.recipes[key] = recipe
        return result

    def _cache_key(self, state, func, args, kwargs):
        """What torch remembers this call by, too."""
        key = self.key_of(func, args, kwargs)
        return super()._cache_key(state, func, args, kwargs) if key is None else key

    def key_of(self, func, args, kwargs) -> tuple | None:
        """All that the results depend on; None if it is not plain."""
        key = [func, torch.get_default_dtype(), default_device(), torch.is_inference_mode_enabled()]
        if self._describe(key, args) and (not kwargs or self._describe(key, (*kwargs, *kwargs.values()))):
            return tuple(key)
        return None

    def _describe(self, key: list, values) -> bool:
        """Add to the key all that a result can depend on; False if a value is not plain."""
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                keys = dispatch_keys(value).raw_repr()  # conjugated, negated, of inference, sparse, quantized
                if keys not in self._dense:
                    self._dense[keys] = value.layout is torch.strided and not value.is_quantized
                if value.fake_mode is not self or value.constant is not None or not self._dense[keys]:
                    return False
                key += (
                    value.shape,
                    value.stride(),
                    value.dtype,
                    value.fake_device,
                    value.storage_offset(),
                    value.untyped_storage().nbytes(),
                    value.requires_grad,
                    keys,
                )
            elif kind in PLAIN:
                key += (kind, value)
            elif kind is torch.Generator:
                key.append(kind)  # no number is drawn
            elif kind is list or kind is tuple:
                key += (kind, len(value))
                if not self._describe(key, value):
                    return False
            else:
                return False
        return True

    def make(self, recipe: Recipe, args: tuple):
        """The results of a call that is known."""
        if type(recipe) is Result:
            return self._made(recipe, args)
        return tuple([self._made(one, args) for one in recipe])

    def _made(self, one: Result, args: tuple):
        if one.argument is not None:
            return args[one.argument]
        if one.layout is None:
            return one.value
        shape, stride, dtype, device, offset = one.layout
        guard = no_dispatch()  # this mode may be on the stack, and what follows is no operator of the run's
        made = torch.empty_strided(shape, stride, dtype=dtype, device=META)
        if one.on is not None:
            made.set_(args[one.on].untyped_storage(), offset, shape, stride)
        if device not in self._attributes:
            del guard
            first = FakeTensor(self, made, device)
            self._attributes[device] = dict(vars(first))
            return first
        made = make_subclass(FakeTensor, made, dispatch_device=True, device_for_backend_keys=device)
        throw_on_data_ptr(made)
        vars(made).update(self._attributes[device])
        del guard
        return made
