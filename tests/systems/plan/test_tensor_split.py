"""Choosing parts and recomputation for operators that run one after the other: against all choices."""

from itertools import product
from math import ceil, inf
from random import Random

import pytest

from minitrain.systems.plan.recompute_front import SplitChoice as Choice
from minitrain.systems.plan.recompute_front import SplitOperator as Work
from minitrain.systems.plan.recompute_front import split as choose


def by_brute_force(works, budget):
    """The least cost of any choice of parts and recomputation within the budget."""
    best = inf
    for parts in product(*(range(1, work.rows + 1) for work in works)):
        for again in product((False, True), repeat=len(works)):
            kept, seconds, fits = 0, 0.0, True
            for work, k, repeated in zip(works, parts, again):
                kept += 0 if repeated else work.saved
                fits &= kept + ceil(work.needs * ceil(work.rows / k) / work.rows) <= budget
                seconds += (work.seconds if repeated else 0) + work.launch * (k - 1) * (2 if repeated else 1)
            best = min(best, seconds if fits else inf)
    return best


def test_as_cheap_as_the_best_of_all_choices():
    seen = 0
    for seed in range(60):
        random = Random(seed)
        works = [
            Work(f"op{i}", random.randint(1, 9), random.randint(0, 20), random.randint(1, 30), 4, random.choice([0, 0.5, 2]))
            for i in range(3)
        ]  # fmt: skip
        for budget in (10, 25, 40, 60):
            expected = by_brute_force(works, budget)
            if expected == inf:
                with pytest.raises(ValueError, match="by single rows; budget is"):
                    choose(works, budget)
            else:
                assert choose(works, budget).seconds == pytest.approx(expected)
                seen += 0 < expected
    assert seen > 50


def test_by_hand():
    """Parts before repetition where they are cheaper; then the one that is dearer to repeat stays."""
    works = [Work("attention", 5.0, 40, 60, 6, 0.1), Work("mlp", 1.0, 40, 60, 6, 0.1)]
    assert choose(works, 200) == (0.0, 80, (Choice(1, False), Choice(1, False)))
    assert choose(works, 100) == (0.2, 80, (Choice(1, False), Choice(3, False)))
    assert choose(works, 80).choices == (Choice(2, False), Choice(2, True))
    assert choose(works, 20).choices == (Choice(3, True), Choice(3, True))
    free = Work("free", 0.0, 0, 10, 4)
    assert choose([free, free], 10).choices == (Choice(1, False),) * 2, "of equal choices what stays"
    with pytest.raises(ValueError, match="^b needs 30 bytes by single rows; budget is 25"):
        choose([Work("a", 1, 5, 10, 2), Work("b", 1, 0, 60, 2)], 25)
    with pytest.raises(ValueError, match="attention needs 10 bytes by single rows; budget is 9, raise it"):
        choose(works, 9)
