"""What a caller of planners, simulators and commands gets who does not say: chapters, docstrings and the figures of
papers rest on these numbers."""

import importlib
import inspect
from pathlib import Path

import minitrain

PACKAGE = Path(minitrain.__file__).parent


def test_what_a_parameter_is_by_itself():
    """defaults.tsv: a module by its base name, a function or class, what its parameters are by themselves."""
    modules = {path.stem: path for path in PACKAGE.rglob("*.py")}
    for line in Path(__file__).with_name("defaults.tsv").read_text().splitlines():
        module, path, said = line.split("\t")
        names = modules[module].relative_to(PACKAGE.parent).with_suffix("").parts
        one = importlib.import_module(".".join(names))
        for name in path.split("."):
            one = getattr(one, name)
        known = {name: parameter.default for name, parameter in inspect.signature(one).parameters.items()}
        names = [part.split("=")[0] for part in said.split()]
        assert said.split() == [f"{name}={known[name]!r}".replace(" ", "") for name in names], line


def test_limits_and_rates_that_are_said_nowhere_else():
    from minitrain.course import fit
    from minitrain.plan import planner
    from minitrain.plan.predict import rates

    assert (planner.LEAST_TOKENS, planner.MOST_ROWS, planner.MOST_CHUNKS) == (2048, 8, 12)
    assert fit.LEAST == 0.05
    shares = dict(attention=0.6, memory=0.8, nvlink=0.75, experts=0.88, tile=128, k0=128)
    assert rates.START == rates.Rates(products=0.8, network=0.5, **shares)
    assert rates.RATES == rates.Rates(products=0.76, products_8_bits=0.55, network=0.3, **shares)
    assert rates.PLAIN == rates.Rates(1, 1, 1, 1, 1, 1, 1, 1, 0)
