"""`make bench` runs all of them, `make bench ONLY=ddp` one. Each file beside this one has a function `rows()
-> list[Row]`, or `report() -> str`, which runs when it is asked for: `python -m benchmarks predictions`,
`python -m benchmarks detectors --runs 200`, `python -m benchmarks soak --minutes 120 --seed 0`.
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
REPORTS = ("predictions", "detectors", "recovery", "rlhf", "soak")


def main(words: list[str]) -> int:
    end = next((place for place, word in enumerate(words) if word.startswith("--")), len(words))
    wanted, options = words[:end], words[end:]
    settings = {name[2:]: int(number) for name, number in zip(options[::2], options[1::2])}
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
