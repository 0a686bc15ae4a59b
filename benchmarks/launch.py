"""A second launch of four ranks: what every cell of a notebook pays."""

import statistics
import time

from benchmarks.measure import Row, row
from minitrain import launch


def rows() -> list[Row]:
    seconds = []
    for _ in range(11):
        started = time.perf_counter()
        launch.run(int, ranks=4, checked=False)
        seconds.append(time.perf_counter() - started)
    return [row("second launch of 4 ranks", "half a second", statistics.median(seconds[1:]), 0.5, "s", 1.0)]
