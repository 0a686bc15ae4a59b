"""The rules of PyTorch's caching allocator that need no memory: its constants, its settings, how it rounds.

    parsed("max_split_size_mb:128,expandable_segments:True")     as in PYTORCH_ALLOC_CONF; "" is the default

    setting of PYTORCH_ALLOC_CONF        what it changes
    expandable_segments:True             a pool is one range of addresses, backed by pages of 2 or 20 MiB
    max_split_size_mb:N                  larger blocks are never split, nor given to smaller requests
    garbage_collection_threshold:X       beyond this share of the device, old unsplit segments go back first
    roundup_power2_divisions:N           sizes rounded up to N steps between powers of two

Constants and rules: c10/core/AllocatorConfig.h, c10/cuda/CUDACachingAllocator.cpp. Differs: one number of
divisions for all sizes; other settings (of pinned memory, of streams, of segment sizes) are not known here.
"""

from typing import NamedTuple

from minitrain.systems.simulate.device_memory import MiB

SMALLEST = 512
SMALL = MiB  # the largest request of the small pool
SMALL_SEGMENT, LARGE_SEGMENT = 2 * MiB, 20 * MiB  # of an expandable segment: the pages
OWN_SEGMENT = 10 * MiB  # from here on a request has a segment made to measure
ROUNDED_TO = 2 * MiB


class Settings(NamedTuple):
    """As in PYTORCH_ALLOC_CONF."""

    expandable_segments: bool = False
    max_split_size_mb: int | None = None
    garbage_collection_threshold: float = 0.0
    roundup_power2_divisions: int = 0


def parsed(text: str) -> Settings:
    """ "max_split_size_mb:128,expandable_segments:True" -> Settings; "" -> what torch does by default."""
    values: dict = {}
    for part in filter(None, text.replace(" ", "").split(",")):
        name, _, value = part.partition(":")
        try:
            if name not in _RULES:
                raise ValueError
            convert, allowed, _ = _RULES[name]
            values[name] = convert(value)
            if not allowed(values[name]):
                raise ValueError
        except (ValueError, KeyError):
            wanted = ", ".join(f"{known}:{rule}" for known, (_, _, rule) in _RULES.items())
            raise ValueError(f"allocator setting {part!r}; use {wanted}, with commas between") from None
    return Settings(**values)


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


_RULES = {
    "expandable_segments": ({"True": True, "False": False}.__getitem__, lambda value: True, "True or False"),
    "max_split_size_mb": (int, lambda value: value > 20, "more than 20"),
    "garbage_collection_threshold": (float, lambda value: 0 < value < 1, "between 0 and 1"),
    "roundup_power2_divisions": (int, _is_power_of_two, "a power of two"),
}


def rounded(size: int, divisions: int = 0) -> int:
    """Bytes of the block for a request: 1,200 in 4 divisions of 1,024..2,048 is 1,280."""
    if divisions > 1 and size > SMALLEST * divisions:
        below = 1 << (size.bit_length() - 1)
        step = below // divisions
        return -(-size // step) * step
    return max(SMALLEST, -(-size // SMALLEST) * SMALLEST)


def segment_size(size: int) -> int:
    """Bytes of the segment that is made for a block."""
    if size <= SMALL:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < OWN_SEGMENT else -(-size // ROUNDED_TO) * ROUNDED_TO
