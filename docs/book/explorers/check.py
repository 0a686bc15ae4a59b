"""Are the explorers' numbers minitrain's? Draws settings, computes them here and in the page, compares.

    make explorers                                       or: python docs/book/explorers/check.py [--draws 200]
    python docs/book/explorers/check.py --pictures DIR   screenshots: three widths, light and dark

Pages run in headless Chromium (or Chrome), driven over a pipe by the DevTools protocol; without a browser
their functions run in node, and nothing is measured. Measured: first paint, 50 drags of a slider, bytes of a
page. Also: every input has a label, every picture its words, no page is wider than its window.
"""

import argparse
import base64
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from fractions import Fraction
from functools import cache, partial
from itertools import product
from pathlib import Path

import presets

from minitrain.compose.dry_runs import work_of
from minitrain.model.config import presets as configs
from minitrain.pipeline.schedule import peak
from minitrain.pipeline.schedules_by_name import CHUNKED, named
from minitrain.pipeline.simulate import Costs, simulate
from minitrain.plan.predict.predicted_step import predict
from minitrain.plan.predict.training_run import TrainingRun
from minitrain.plan.simulate.machines import MACHINES
from minitrain.systems.communication import algorithms, chunk_schedule
from minitrain.systems.communication.cost_model import flat, time_s
from minitrain.systems.network import graph
from minitrain.systems.network.topologies import fat_tree

HERE = Path(__file__).parent
BROWSERS = "chromium", "chromium-browser", "google-chrome"
FIRST_PAINT_MS, DRAG_MS = 1000, 50
WIDTHS = 390, 820, 1280
WORKS = 6


class Browser:
    """`browser(method, **parameters)`: a command of the DevTools protocol; messages end with a zero byte."""

    def __init__(self, program: str) -> None:
        self.home, self.asked, self.session = tempfile.TemporaryDirectory(), 0, {}
        (to_read, self.to), (self.back, to_write) = os.pipe(), os.pipe()
        flags = "--headless --no-sandbox --disable-gpu --hide-scrollbars --remote-debugging-pipe".split()
        command = ["sh", "-c", f'exec "$0" "$@" 3<&{to_read} 4>&{to_write}', program, *flags]
        command.append(f"--user-data-dir={self.home.name}")
        pipes = to_read, to_write
        self.process = subprocess.Popen(command, pass_fds=pipes, stderr=subprocess.DEVNULL)
        for pipe in pipes:
            os.close(pipe)
        self.buffer = b""
        target = self("Target.createTarget", url="about:blank")["targetId"]
        self.session = dict(
            sessionId=self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        )
        self("Page.enable")

    def __call__(self, method: str, **parameters) -> dict:
        self.asked += 1
        message = dict(id=self.asked, method=method, params=parameters) | self.session
        os.write(self.to, json.dumps(message).encode() + b"\0")
        while (answer := self.next()).get("id") != self.asked:
            pass
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def next(self) -> dict:
        while b"\0" not in self.buffer:
            if not (more := os.read(self.back, 1 << 20)):
                raise RuntimeError("the browser has ended")
            self.buffer += more
        message, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(message)

    def open(self, page: str) -> None:
        self("Page.navigate", url="about:blank")
        self("Page.navigate", url=(HERE / page).as_uri())
        while self.next().get("method") != "Page.loadEventFired":
            pass

    def run(self, script: str):
        found = self("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"]["exception"].get("description", script[:80]))
        return found["result"].get("value")

    def close(self) -> None:
        self("Browser.close")
        self.process.wait()
        self.home.cleanup()


class Node:
    """`run` alone, of a page's own functions."""

    def open(self, page: str) -> None:
        self.files = [HERE / page.replace(".html", ".js")]
        if page == "layout.html":
            self.files.insert(0, HERE / "layout-data.js")

    def run(self, script: str):
        whole = "\n".join(path.read_text() for path in self.files)
        whole += f"\nconsole.log(JSON.stringify({script}))"
        return json.loads(
            subprocess.run(["node"], input=whole, capture_output=True, text=True, check=True).stdout
        )

    def close(self) -> None: ...


# ---- pipeline schedules ------------------------------------------------------------------------------------

SCHEDULES = "gpipe 1f1b interleaved breadth_first zb_h1 zb_h2 zb_interleaved".split()
SCHEDULES += "v_min v_half zb_v chimera hanayo dualpipe dualpipe_v".split()


def draw_schedule(draw: random.Random) -> dict:
    p, m = draw.randint(1, 12), draw.randint(1, 32)
    m = draw.choice([m, p * max(1, 32 // p // draw.randint(1, 4))])  # half of them in whole groups of p
    sizes = dict(name=draw.choice(SCHEDULES), p=p, m=m, v=draw.randint(1, 4))
    times = dict(F=draw.randint(1, 8), I=draw.randint(1, 8), W=draw.randint(0, 8), send=draw.randint(0, 4))
    return sizes | times


def schedule(name: str, p: int, m: int, v: int, F: int, I: int, W: int, send: int) -> dict | None:
    try:
        made = named(name, p, m, chunks=v if name in CHUNKED else 1)
    except ValueError:
        return None
    share = Fraction(p, made.stages)
    found = simulate(made, Costs(F=F * share, I=I * share, W=W * share, send=send))
    spans = [[[float(span.start), float(span.end)] for span in own] for own in found.spans]
    lists = [" ".join(map(str, own)).replace("(", "").replace(")", "") for own in made.ranks]
    peaks = [peak(made, rank) for rank in range(p)]
    return dict(
        makespan=float(found.makespan), bubble=float(found.bubble), peaks=peaks, spans=spans, lists=lists
    )


SCHEDULE = """(given) => { const found = explore(given); return found.error ? null : {
  makespan: found.makespan, bubble: found.bubble, peaks: found.peaks,
  spans: found.spans.map((own) => own.map(([, start, end]) => [start / found.share, end / found.share])),
  lists: found.made.ranks.map((own) => own.flatMap(parts).map((one) => at(...one)).join(" ")) } }"""

# ---- collectives -------------------------------------------------------------------------------------------

COLLECTIVES = dict(
    ring=algorithms.ring_all_reduce,
    direct=algorithms.direct_all_reduce,
    halving=algorithms.halving_doubling_all_reduce,
    doubling=algorithms.doubling_all_reduce,
    binomial=algorithms.binomial_all_reduce,
    double_tree=algorithms.double_tree_all_reduce,
    ring_reduce_scatter=algorithms.ring_reduce_scatter,
    direct_reduce_scatter=algorithms.direct_reduce_scatter,
    ring_all_gather=algorithms.ring_all_gather,
    binomial_reduce=algorithms.binomial_reduce,
)


def draw_collective(draw: random.Random) -> dict:
    sizes = dict(name=draw.choice(list(COLLECTIVES)), n=draw.randint(2, 16), pieces=draw.randint(1, 8))
    links = dict(alpha=draw.randint(0, 50) / 1e6, rate=draw.randint(1, 90) * 5e9)
    return sizes | dict(size=draw.choice([draw.randint(1, 2**33), 2 ** draw.randint(10, 33)])) | links


def collective(name: str, n: int, pieces: int, size: int, alpha: float, rate: float) -> dict:
    made = COLLECTIVES[name](n, *[pieces] * (name == "double_tree"))
    kind = next(
        kind
        for kind in ("all_gather", "reduce_scatter", "reduce", "all_reduce")
        if kind in name + "all_reduce"
    )
    frames = list(chunk_schedule.replay(made, chunk_schedule.start_of(made, kind)))
    sent = [chunk_schedule.sent_elements(made, rank, size) for rank in range(n)]
    return dict(frames=frames, sent=sent, seconds=time_s(made, size, flat(alpha, rate)))


COLLECTIVE = (
    """(given) => { const { frames, sent, seconds } = explore(given); return { frames, sent, seconds } }"""
)

# ---- network -----------------------------------------------------------------------------------------------


def draw_network(draw: random.Random) -> dict:
    k = draw.choice([4, 6, 8])
    traffic = dict(traffic=draw.choice(["permutation", "shift"]), shift=draw.randint(1, k**3 // 4 - 1))
    routes = dict(route=draw.choice(["ecmp", "polarised", "spray"]), parts=draw.randint(1, 4))
    return dict(k=k, seed=draw.randint(0, 99)) | traffic | routes


def network(k: int, seed: int, traffic: str, shift: int, route: str, parts: int) -> dict:
    tree, at = (
        _tree(k),
        dict(ecmp=graph.ecmp, polarised=partial(graph.ecmp, salted=False), spray=graph.spray)[route],
    )
    hosts, parts = tree.hosts, 1 if route == "spray" else parts
    pairs = graph.permutation(hosts, seed)
    if traffic == "shift":
        pairs = [(host, hosts[(number + shift) % len(hosts)]) for number, host in enumerate(hosts)]
    flows = [(*pair, seed * parts + part) for pair in pairs for part in range(parts)]
    loads = graph.loads(tree, flows, at, Fraction(1, parts))
    paths = [
        {link for part in range(parts) for link in at(tree, *pair, seed * parts + part)} for pair in pairs
    ]
    times = [float(max(loads[link] for link in path)) for path in paths]
    return dict(loads={f"{a} {b}": float(load) for (a, b), load in loads.items()}, times=times)


_tree = cache(fat_tree)
NETWORK = """(given) => { const { loads, times } = explore(given); return { loads, times } }"""

# ---- layout ------------------------------------------------------------------------------------------------


@cache
def counted(seed: int) -> list[tuple[str, int, int, int]]:
    """Few of the works in layout-data.js: each is two dry runs here."""
    works = [(name, tp, cp, rows) for name in presets.LENGTHS for tp, cp, rows in presets.sizes(name)]
    return random.Random(seed).sample(works, WORKS)


def draw_layout(draw: random.Random) -> dict:
    model, tp, cp, rows = draw.choice(counted(given.seed))
    shape = dict(model=model, tp=tp, cp=cp, rows=rows, dp=2 ** draw.randint(0, 8), pp=2 ** draw.randint(0, 4))
    run = dict(
        machine=draw.choice(presets.NAMES), m=draw.choice([2 ** draw.randint(0, 7), draw.randint(1, 128)])
    )
    return shape | run | dict(zero=draw.randint(0, 3), recompute=draw.choice(["none", "full"]))


def layout(model: str, machine: str, rows: int, m: int, **shape) -> dict:
    config, length = configs[model], presets.LENGTHS[model]
    strategy, batch = presets.strategy(microbatches=m, **shape), shape["dp"] * m * rows
    run = TrainingRun(config, strategy, MACHINES[machine], batch, length, presets.STACK)
    found = predict(run, work_of)
    parts = {name: time / found.step_s for name, time in found.parts.items() if name not in ("ep", "p2p")}
    sizes = dict(ranks=strategy.ranks, tokens=batch * length)
    return dict(step=found.step_s, mfu=found.mfu, parts=parts, memory=found.memory) | sizes


LAYOUT = """(given) => { const { capacity, ...found } = explore(given);
  for (const name in found.parts) found.parts[name] /= found.step;
  return found }"""


def up_to_date(seed: int) -> None:
    """Do models, machines and these works stand in layout-data.js as they are counted now?"""
    text = presets.FILE.read_text()
    stored, fresh = json.loads(text[text.index("{") : text.rindex(";")]), presets.data(counted(seed))
    for name, model in fresh["models"].items():
        kept = stored["models"][name]["work"]
        model["work"] = kept | model["work"]
    if wrong := differs(json.loads(json.dumps(fresh)), stored, 0.0):
        sys.exit(f"{presets.FILE.name} is out of date, run presets.py: {wrong}")


PAGES = {  # page -> (a setting, minitrain's answer, the page's answer, the slider that is dragged)
    "schedules.html": (draw_schedule, schedule, SCHEDULE, "m"),
    "layout.html": (draw_layout, layout, LAYOUT, "m"),
    "collectives.html": (draw_collective, collective, COLLECTIVE, "n"),
    "network.html": (draw_network, network, NETWORK, "seed"),
}


# ---- compare, measure --------------------------------------------------------------------------------------


def differs(ours, theirs, tolerance: float, where: str = "") -> str | None:
    """Where two nested values differ by more than the tolerance (whole numbers: at all), or None."""
    if isinstance(ours, dict) and isinstance(theirs, dict) and ours.keys() == theirs.keys():
        pairs = ((f"{where}.{key}", ours[key], theirs[key]) for key in ours)
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        pairs = ((f"{where}[{at}]", *both) for at, both in enumerate(zip(ours, theirs)))
    else:
        numbers = isinstance(ours, int | float) and isinstance(theirs, int | float)
        exact = not numbers or isinstance(ours, int)
        close = ours == theirs if exact else abs(ours - theirs) <= tolerance * max(abs(ours), 1)
        return None if close else f"{where or 'all'}: minitrain {ours!r}, page {theirs!r}"
    return next(filter(None, (differs(a, b, tolerance, name) for name, a, b in pairs)), None)


def compare(browser, page: str, draws: int, seed: int) -> str:
    draw_one, answer, script, _ = PAGES[page]
    draw = random.Random(f"{page} {seed}")
    settings = [draw_one(draw) for _ in range(draws)]
    browser.open(page)
    theirs, refused = browser.run(f"{json.dumps(settings)}.map({script})"), 0
    tolerance = 1e-8 if page == "layout.html" else 1e-12  # whose data have nine digits
    for setting, found in zip(settings, theirs):
        ours = answer(**setting)
        refused += ours is None
        if wrong := differs(ours, found, tolerance):
            sys.exit(f"{page}: {setting}: {wrong}")
    return f"{draws} settings equal ({refused} of them refused by both)"


def measure(browser: Browser, page: str) -> str:
    asked = (HERE / "check.js").read_text()
    browser.open(page)
    browser.run(asked)
    paint, times = browser.run("firstPaint()"), sorted(browser.run(f"drags('{PAGES[page][3]}')"))
    quick = times[12]  # the machine may have other work: a quarter of the drags must be below the limit
    if paint > FIRST_PAINT_MS or quick > DRAG_MS:
        sys.exit(f"{page}: first paint {paint:.0f} ms, a drag {quick:.0f} ms: slower than promised")
    for width in WIDTHS:
        window(browser, width)
        browser.open(page)
        browser.run(asked)
        if faults := browser.run("faults()"):
            sys.exit(f"{page}, {width} pixels wide: {', '.join(faults)}")
    files = [HERE / name for name in (page, page.replace(".html", ".js"), "page.js", "page.css")]
    files += [HERE / "layout-data.js"] * (page == "layout.html")
    kilobytes = sum(path.stat().st_size for path in files) / 1000
    drags = f"50 drags {quick:.1f}, {times[25]:.1f}, {times[-1]:.1f} ms (quarter, median, most)"
    return f"first paint {paint:.0f} ms; {drags}; {kilobytes:.0f} kB"


def window(browser: Browser, width: int, dark: bool = False, height: int = 900) -> None:
    sizes = dict(width=width, height=height, deviceScaleFactor=1, mobile=width < 500)
    browser("Emulation.setDeviceMetricsOverride", **sizes)
    scheme = dict(name="prefers-color-scheme", value="dark" if dark else "light")
    browser("Emulation.setEmulatedMedia", features=[scheme])


def pictures(browser: Browser, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for page in ("index.html", *PAGES):
        for width, dark in product(WIDTHS, (False, True)):
            window(browser, width, dark)
            browser.open(page)
            height = browser.run("document.documentElement.scrollHeight")
            window(browser, width, dark, height)
            shot = browser("Page.captureScreenshot", format="png")["data"]
            name = f"{Path(page).stem}-{width}{'-dark' * dark}.png"
            (folder / name).write_bytes(base64.b64decode(shot))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pictures", type=Path)
    parser.add_argument("--page", choices=PAGES)
    return parser.parse_args()


def main() -> None:
    program = next(filter(shutil.which, BROWSERS), None)
    if not program:
        print("no chromium: the pages' functions run in node, nothing is measured")
    browser = Browser(program) if program else Node()
    try:
        if given.pictures:
            return pictures(browser, given.pictures)
        for page in [given.page] if given.page else PAGES:
            if page == "layout.html":
                up_to_date(given.seed)
            said = compare(browser, page, given.draws, given.seed)
            print(f"{page:<18}{said}{'; ' + measure(browser, page) if program else ''}", flush=True)
    finally:
        browser.close()


if __name__ == "__main__":
    given = arguments()
    main()
