"""A batch in units: what one action of a schedule runs, the rows of a microbatch or a slice of them."""

from itertools import accumulate

import torch
from torch import Tensor

from minitrain.pipeline.schedule import Schedule

Unit = tuple[Tensor, Tensor, Tensor]  # tokens, targets, positions


def first_rows(units: list[Unit], slices: int, first_row: int) -> list[int]:
    """For each unit its first row in the global batch; all slices of a microbatch have the same."""
    before = accumulate((len(tokens) for tokens, *_ in units[::slices]), initial=first_row)
    return [row for row, _ in zip(before, units[::slices]) for _ in range(slices)]


def cut_evenly(batch, schedule: Schedule) -> list[Unit]:
    """The units of a batch. Rows need not divide evenly among the microbatches."""
    (rows, length), slices, lengths = batch.tokens.shape, schedule.slices, schedule.lengths
    name, microbatches = schedule.name, schedule.microbatches // slices
    if rows < microbatches:
        raise ValueError(f"{name}: {microbatches} microbatches, but this rank has {rows} rows; use fewer")
    if length < slices:
        raise ValueError(f"{name}: {slices} slices of {length} tokens; use at most {length}")
    if lengths and sum(lengths) != length:
        raise ValueError(f"{name}: slices of {lengths} tokens are {sum(lengths)}, the batch has {length}")
    ends = list(accumulate(lengths))[:-1] or slices
    plain = batch.positions is None
    positions = torch.arange(length, device=batch.tokens.device) if plain else batch.positions
    rows = zip(batch.tokens.tensor_split(microbatches), batch.targets.tensor_split(microbatches))
    return [unit for row in rows for unit in zip(*(x.tensor_split(ends, dim=-1) for x in (*row, positions)))]
