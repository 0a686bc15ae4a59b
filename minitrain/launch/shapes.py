"""torch's FakeTensorMode, with a shorter way to an operator that has been seen before.

    with ShapesMode(): ...                what FakeTensorMode gives, in half the time

torch remembers what an operator gives for arguments of these shapes, and takes some 60 us to look it up: it
describes each argument by 17 properties, through a dataclass, and builds each result by a constructor that
serves any caller. A step of a small model has thousands of operators, so a dry run is mostly that. Here a
plain dense tensor is described by what can differ between two of them, and a result has the attributes that
torch's constructor gives. What may be remembered remains torch's to say, but for `_unsafe_view`, which stands
in every product of matrices; what is not plain goes torch's way.
"""

import torch

from minitrain.torch_private import (
    DEVICE_OF,
    UNSAFE_VIEW,
    FakeTensor,
    FakeTensorMode,
    default_device,
    make_subclass,
    throw_on_data_ptr,
)
from minitrain.torch_private import _DispatchCacheValidEntry as Remembered

# Arguments that say all by type and value: True, 1 and 1.0 are equal, and their types differ.
PLAIN = {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}


def plain(one) -> bool:
    """Of a result that torch remembers: is it a number, or a tensor without marks?"""
    meta = one.metadata
    return meta is None or not (meta.is_conj or meta.is_neg or meta.requires_grad)


class ShapesMode(FakeTensorMode):
    """A mode for one dry run, in which no shape is a symbol."""

    def __init__(self) -> None:
        super().__init__()
        self._attributes: dict[torch.device, dict] = {}  # of a fake tensor of this mode
        self._views: dict[tuple, tuple] = {}  # what _unsafe_view gave, which torch does not remember

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is DEVICE_OF:  # autograd asks it of every result
            return args[0].fake_device
        kwargs = kwargs or {}
        key = self._cache_key(None, func, args, kwargs)
        if key is not None:
            known = self.cache.get(key)
            if type(known) is Remembered and all(map(plain, known.output_infos)):
                made = [self._made(one, args) for one in known.output_infos]
                return tuple(made) if known.is_output_tuple else made[0]
            if key in self._views:
                return self._tensor(*self._views[key], args[0].untyped_storage())
        result = self.dispatch(func, types, args, kwargs)
        if func is UNSAFE_VIEW and key is not None:
            layout = tuple(result.shape), result.stride(), result.dtype, result.fake_device
            self._views[key] = *layout, result.storage_offset()
        return result

    def _cache_key(self, state, func, args, kwargs):
        """What torch remembers this call by, too; without a `state`, None if it is not plain."""
        key = [func, torch.get_default_dtype(), default_device(), torch.is_inference_mode_enabled()]
        if self._describe(key, args) and (not kwargs or self._describe(key, (*kwargs, *kwargs.values()))):
            return tuple(key)
        return super()._cache_key(state, func, args, kwargs) if state is not None else None

    def _describe(self, key: list, values) -> bool:
        """Add to the key all that a result can depend on; False if a value is not plain."""
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                if value.fake_mode is not self or value.constant is not None:
                    return False
                if value.layout is not torch.strided or value.is_quantized:
                    return False
                key += (
                    value.shape,
                    value.stride(),
                    value.dtype,
                    value.fake_device,
                    value.storage_offset(),
                    value.untyped_storage().nbytes(),
                    value.requires_grad,
                    value.is_conj(),
                    value.is_neg(),
                    value.is_inference(),
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

    def _made(self, one, args):
        """One result as torch remembers it."""
        if one.inplace_idx is not None:
            return args[one.inplace_idx]
        meta = one.metadata
        if meta is None:
            return one.constant_value
        storage = None if one.view_idx is None else args[one.view_idx].untyped_storage()
        return self._tensor(meta.shape, meta.stride, meta.dtype, meta.device, meta.storage_offset, storage)

    def _tensor(self, shape, stride, dtype, device, offset, storage) -> FakeTensor:
        """A fake tensor on memory of its own, or on `storage`."""
        empty = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        if storage is not None:
            empty.set_(storage, offset, shape, stride)
        if device not in self._attributes:
            made = FakeTensor(self, empty, device)
            self._attributes[device] = dict(vars(made))
            return made
        made = make_subclass(FakeTensor, empty, dispatch_device=True, device_for_backend_keys=device)
        throw_on_data_ptr(made)
        vars(made).update(self._attributes[device])
        return made
