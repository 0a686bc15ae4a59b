"""`make bench` runs all of them, `make bench ONLY=ddp` one. Each file beside this one has a function `rows()
-> list[Row]`.
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


def main(wanted: list[str]) -> int:
    unknown = [name for name in wanted if name not in ALL]
    if unknown:
        print(f"no benchmark {unknown[0]!r}; there are {', '.join(ALL)}", file=sys.stderr)
        return 2
    for name in wanted or ALL:
        rows = importlib.import_module(f"benchmarks.{name}").rows()
        measure.save(rows)
        for r in rows:
            times = f"{r.ours:10.4g} {r.theirs:10.4g} {r.unit:4}"
            print(f"{r.name:44} vs {r.peer:34} {times} ratio {r.ratio:5.2f} (goal {r.goal:.2f})")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
