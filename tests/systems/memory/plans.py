"""Plans of recomputation (systems/memory/chain_plan.py) in words, and their counts."""

from minitrain.systems.memory.chain_plan import Action, forwards


def parse(text: str) -> tuple[Action, ...]:
    """ "F0 T1 B1 T0 B0" -> actions."""
    return tuple(Action(word[0], int(word[1:])) for word in text.split())


def show(plan) -> str:
    return " ".join(map(str, plan))


def recomputed(plan, layers: int) -> int:
    """How many forwards of a layer a step has beyond one each."""
    return forwards(plan).total() - layers
