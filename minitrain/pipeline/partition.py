"""Where to cut a model into stages. No torch.

    even(6, 4)  ->  [range(0, 3), range(3, 5), range(5, 6), range(6, 8)]        layer 0 is the embedding, layer 7 the head

Raises ValueError for fewer layers than stages.
"""
from __future__ import annotations


def even(num_blocks: int, stages: int) -> list[range]:
    """Runs of layers, one a stage: blocks as evenly as they divide, the embedding with the first, the head with the last.

    What does not divide goes to the stages behind the first, as that one has the most microbatches in flight.
    """
    if not 1 <= stages <= num_blocks + 2:
        raise ValueError(f"{stages} stages of a model of {num_blocks + 2} layers; use 1 to {num_blocks + 2} stages")
    if stages > num_blocks:                                                          # ends of their own
        sizes = [1] * (stages - 1) + [num_blocks + 3 - stages]
        return _runs(sizes)
    share, rest = divmod(num_blocks, stages)
    sizes = [share + (1 <= number <= rest if rest < stages else 0) for number in range(stages)]
    sizes[0] += 1
    sizes[-1] += 1
    return _runs(sizes)


def _runs(sizes: list[int]) -> list[range]:
    ends = [sum(sizes[:i + 1]) for i in range(len(sizes))]
    return [range(end - size, end) for size, end in zip(sizes, ends)]
