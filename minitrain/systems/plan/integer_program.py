"""Integer and linear programs, written row by row over variables with names. By scipy's HiGHS; no torch.

    program.add({("x", 0): 1, ("x", 1): 1}, 1, inf)                       x_0 + x_1 >= 1
    program.solve({("x", 0): 3, ("x", 1): 2})                             {("x", 1)}

Every variable is from 0 to 1.
"""

from minitrain.pipeline.partition import Number


class IntegerProgram:
    """Variables called ("free", ..) need not be whole."""

    def __init__(self) -> None:
        self.rows: list[tuple[dict[tuple, float], float, float]] = []

    def add(self, terms: dict[tuple, float], low: float, high: float) -> None:
        self.rows.append((terms, low, high))

    def solve(self, costs: dict[tuple, Number]) -> set[tuple] | None:
        """The names of the whole variables that are 1; None: there is no solution."""
        found = self.values(costs)
        return found and {name for name, x in found.items() if name[0] != "free" and x > 0.5}

    def values(self, costs: dict[tuple, Number]) -> dict[tuple, float] | None:
        """All variables where the sum of costs is least; None: there is no solution. By scipy's HiGHS."""
        try:
            from scipy.optimize import Bounds, LinearConstraint, milp
            from scipy.sparse import csr_array
        except ImportError:
            cure = "pip install 'minitrain[course]'"
            raise ModuleNotFoundError(f"integer programs need scipy: {cure}") from None
        rows, low, high = zip(*self.rows)
        names = list(dict.fromkeys(name for terms in rows for name in terms))
        number = {name: x for x, name in enumerate(names)}
        entries = [(y, number[name], of) for y, terms in enumerate(rows) for name, of in terms.items()]
        y, x, values = zip(*entries)
        limits = LinearConstraint(csr_array((values, (y, x)), shape=(len(rows), len(names))), low, high)
        whole, most = [name[0] != "free" for name in names], max(map(abs, costs.values())) or 1
        goal = [costs.get(name, 0) / most for name in names]
        rules = dict(integrality=whole, bounds=Bounds(0, 1), constraints=limits)
        found = milp(goal, **rules, options={"mip_rel_gap": 0})
        if found.status == 2:  # infeasible
            return None
        assert found.success, found.message
        return dict(zip(names, found.x))
