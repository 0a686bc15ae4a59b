"""`make bench` runs all of them, `make bench ONLY=ddp` one. Each file beside this one has a function `rows()
-> list[Row]`, or `report() -> str`, which runs when it is asked for: `python -m benchmarks predictions`,
`python -m benchmarks detectors --runs 200`.
"""

import importlib
import sys

from benchmarks import measure

ALL = (
    "launch",
    "collectives",
    "ddp",
    "zero",
    "tensor_parallel",
    "context_parallel",
    "pipeline",
    "layouts",
    "moe",
    "one_device",
    "precision",
    "memory",
    "checkpoint",
    "ledger",
)
REPORTS = ("predictions", "detectors")


def main(wanted: list[str]) -> int:
    settings = {}
    if "--runs" in wanted:  # of the detectors: how many
        at = wanted.index("--runs")
        settings["runs"] = int(wanted[at + 1])
        wanted = wanted[:at] + wanted[at + 2 :]
    unknown = [name for name in wanted if name not in (*ALL, *REPORTS)]
    if unknown:
        print(f"no benchmark {unknown[0]!r}; there are {', '.join((*ALL, *REPORTS))}", file=sys.stderr)
        return 2
    for name in wanted or ALL:
        module = importlib.import_module(f"benchmarks.{name}")
        if name in REPORTS:
            print(module.report(**settings))
            continue
        rows = module.rows()
        measure.save(rows)
        for r in rows:
            times = f"{r.ours:10.4g} {r.theirs:10.4g} {r.unit:4}"
            print(f"{r.name:44} vs {r.peer:34} {times} ratio {r.ratio:5.2f} (goal {r.goal:.2f})")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
