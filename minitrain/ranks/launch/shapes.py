"""torch's FakeTensorMode, with a shorter way to an operator that has been seen before.

    with ShapesMode(): ...                what FakeTensorMode gives, in three quarters of the time

torch remembers what an operator gives for arguments of these shapes, and takes some 60 us to look it up: it
describes each argument by 17 properties, through a dataclass. Here a plain dense tensor is described by what
can differ between two of them; what is not plain goes torch's way, and what may be remembered is torch's to
say.
"""

import torch

from minitrain.ranks.torch_private import DEVICE_OF, FakeTensor, FakeTensorMode, default_device, dispatch_keys

# Arguments that say all by type and value: True, 1 and 1.0 are equal, and their types differ.
PLAIN = {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}


class ShapesMode(FakeTensorMode):
    """A mode for one dry run, in which no shape is a symbol."""

    def __init__(self) -> None:
        super().__init__()
        self._dense: dict[int, bool] = {}  # by a tensor's dispatch keys: strided, not quantized

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is DEVICE_OF:  # autograd asks it of every result
            return args[0].fake_device
        return self.dispatch(func, types, args, kwargs or {})

    def _cache_key(self, state, func, args, kwargs):
        """What torch remembers this call by: all that the results depend on."""
        key = [func, torch.get_default_dtype(), default_device(), torch.is_inference_mode_enabled()]
        if self._describe(key, args) and (not kwargs or self._describe(key, (*kwargs, *kwargs.values()))):
            return tuple(key)
        return super()._cache_key(state, func, args, kwargs)

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
                key += (value.shape, value.stride(), value.dtype, value.fake_device, value.storage_offset())
                key += (value.untyped_storage().nbytes(), value.requires_grad, keys)
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
