"""The loop around `run.step`: batches by number, a log, samples of text, checkpoints. It knows no technique.

Every step is a pure function of its number: batch, rate and what dropout drops. So a checkpoint is weights,
optimizer states and position, by global name: any layout goes on from any other's, in its own bit for bit as
if it had never stopped. It may go on longer, with other rates or batches (`MAY_CHANGE`): samples are counted,
so none comes twice and none is left out.

    CHECKPOINT/step-00000800/    a checkpoint every `save_every` steps (checkpoint/store.py)
    OUT/log.jsonl                one line per report: step, loss, held-out loss, norm, tokens per second, MFU

A loss or norm that is no number is one error on every rank, and never reaches a checkpoint; a damaged one is
passed over for the one before, as is said. Sends what steps and checkpoint/saver.py send, and losses. Differs
from nanoGPT's train.py: resuming is exact, and the loop is a generator: it knows not who watches.
"""

import hashlib
import json
import math
import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from minitrain.checkpoint.format import Damaged
from minitrain.checkpoint.load import Saved
from minitrain.checkpoint.saver import NotSaved, Saver
from minitrain.checkpoint.store import MANIFEST, Store
from minitrain.compose.run import Run
from minitrain.model.config import GPTConfig, plain_values
from minitrain.model.data.batches import Data
from minitrain.model.training.hyperparameters import Hyperparameters
from minitrain.model.training.step import StepResult
from minitrain.plan.accounting import flops_per_token, mfu
from minitrain.plan.strategy import Strategy
from minitrain.ranks import collectives, devices
from minitrain.ranks.checks import require_positive_ints


class Trainer:
    """Trains a run by `hyper`; reports every `report_every` steps, saves every `save_every` to `store`."""

    def __init__(
        self,
        run: Run,
        data: Data,
        hyper: Hyperparameters,
        *,
        held_out: Data | None = None,
        out: Path | None = None,
        report_every: int = 25,
        store: Store | None = None,
        save_every: int = 100,
        save_how: str = "sync_sharded",
        peak_flops: float | None = None,
        schedule: Callable[[int], float] | None = None,
    ):
        """`schedule(step)` is a rate in place of the hyperparameters'. Groups keep their proportion to it."""
        require_positive_ints(report_every=report_every, save_every=save_every)
        head = f"layers.{run.config.num_layers + 1}.out.weight" if run.config and run.config.tied else ""
        for param, name in run.sync.names.items():
            names = {name, head} if name == "layers.0.tokens" else {name}  # of a tied table
            if any(map(hyper.freezes, names)) == param.requires_grad:
                state = "trained" if param.requires_grad else "frozen"
                what = f"{name} is {state} in this run, and the hyperparameters have frozen={hyper.frozen}"
                raise ValueError(f"{what}; give the same to both, parallelize(..., frozen=hyper.frozen)")
        self.parallel, self.data, self.held_out, self.hyper, self.out = run, data, held_out, hyper, out
        self.report_every, self.save_every, self.peak_flops = report_every, save_every, peak_flops
        self.store, self.not_saved = store, []
        self.saver = Saver(store, run.device, save_how) if store else None
        if self.saver:
            run.attach(self.saver)
        self.rows = data.rows(hyper.batch_size, hyper.length, hyper.seed)
        self.rank, self.ranks = collectives.world().rank(), collectives.world().size()
        self.step, self.records = 0, []
        self.first = 0  # sample of step 0, if all batches before had been as large as those to come
        rates = [float(group["lr"]) for group in run.sync.param_groups]
        self.shares = [rate / max(rates) if max(rates) else 1.0 for rate in rates]
        self.schedule = schedule or hyper.lr_at

    def run(self) -> Iterator[dict[str, Any]]:
        """Train to the last step; yields a record per report, to print, plot or stop at."""
        losses, started = [], devices.now(self.parallel.device)
        while self.step < self.hyper.steps:
            result = self.train_one_step()
            losses.append(result.loss)
            reports, saves = self.due(self.report_every), self.saver and self.due(self.save_every)
            if not (reports or saves):
                continue
            loss = self.parallel.total(torch.stack(losses).mean()).item()
            norm = result.norm.item() if result.updated else None  # of a step that was left out
            record = {"step": self.step, "loss": loss, "norm": norm, "held_out": None}
            if reports:
                record |= self.speed(len(losses), devices.now(self.parallel.device) - started)
                record["held_out"] = self.held_out_loss()
            self.check(record, good=self.step - len(losses))
            if reports:
                self.records.append(record)
                self.log()
                losses = []
            if saves:
                self.save()
            if reports:
                yield record
                started = devices.now(self.parallel.device)
        self.finish()

    def due(self, every: int) -> bool:
        return self.step % every == 0 or self.step == self.hyper.steps

    def train_one_step(self) -> StepResult:
        for group, share in zip(self.parallel.sync.param_groups, self.shares):
            group["lr"] = self.schedule(self.step) * share
        batch = self.parallel.batch(self.rows, self.step)
        self.step += 1
        result = self.parallel.step(batch, self.hyper.clip)
        if self.saver:
            self.trying(self.saver.after_step)
        return result

    def check(self, record: dict[str, Any], good: int) -> None:
        """Numbers are the same on all ranks, so all stop, or none."""
        numbers = [record[name] for name in ("loss", "norm", "held_out")]
        if not all(number is None or math.isfinite(number) for number in numbers):
            what = "loss {}, gradient norm {}, held-out loss {}".format(*numbers)
            cure = f"lower lr={self.hyper.lr} or clip={self.hyper.clip}; all was well at step {good}"
            raise ValueError(f"{what} between steps {good} and {self.step}: {cure}")

    def speed(self, steps: int, elapsed_s: float) -> dict[str, float]:
        said = {"tokens_per_s": steps * self.hyper.batch_size * self.hyper.length / elapsed_s}
        if self.peak_flops and self.parallel.config:
            lengths = [self.hyper.length]  # that tokens see: of rows, or of the documents in them
            if self.rows.documents:
                made = (self.rows.documents(step, 0, 1) for step in range(self.step - steps, self.step))
                lengths = [length for rows in made for row in rows for length in row]
            flops = sum(n * flops_per_token(self.parallel.config, n) for n in lengths) / sum(lengths)
            said["mfu"] = mfu(said["tokens_per_s"], flops, self.ranks, self.peak_flops)
        return said

    def held_out_loss(self, batches: int = 2) -> float | None:
        """Mean loss per token, always of the same windows, over all ranks."""
        if self.held_out is None:
            return None
        rows = self.held_out.rows(self.hyper.batch_size, self.hyper.length)
        losses = (self.parallel.evaluate(self.parallel.batch(rows, step)).item() for step in range(batches))
        return sum(losses) / batches

    def sample(self, prompt: str = "The ", n: int = 200, temperature: float = 0.7, seed: int = 0) -> str:
        """What the model makes of a prompt, n tokens more; every rank must ask, and gets the same."""
        tokenizer = self.data.tokenizer
        if tokenizer is None:
            raise ValueError(f"{self.data.name} has no tokenizer.json, so its tokens are no text")
        tokens = torch.tensor(tokenizer.encode([prompt]), device=self.parallel.device)
        return tokenizer.decode(self.parallel.sample(tokens, n, temperature, seed)[0].tolist())

    def log(self) -> None:
        """All records so far: going on from an older checkpoint writes the later ones again."""
        if self.out is not None and self.rank == 0:
            self.out.mkdir(parents=True, exist_ok=True)
            new = self.out / "log.jsonl.new"
            new.write_text("".join(json.dumps(record) + "\n" for record in self.records))
            new.replace(self.out / "log.jsonl")  # nobody reads half of it

    def save(self) -> None:
        run, hyper = self.parallel, self.hyper
        position = self.data.position(self.step, hyper.batch_size, hyper.length, hyper.seed)
        position |= {"samples": self.first + self.step * hyper.batch_size}
        manifest = dict(identity=self.identity(), strategy=asdict(run.strategy), position=position)
        versions = dict(python=platform.python_version(), torch=torch.__version__)
        manifest |= dict(records=self.records, ranks=self.ranks, versions=versions)
        self.trying(self.saver.save, self.step, run.pieces(), run.plain_state(), manifest)

    def trying(self, call: Callable, *given) -> None:
        """A disk that refuses is no reason to stop training: it is told, by all ranks."""
        try:
            call(*given)
        except NotSaved as error:
            self.not_saved.append(str(error))

    def finish(self) -> None:
        """Wait until the checkpoint that is being written is there; the folder is free for others."""
        if self.saver:
            self.trying(self.saver.finish)
            self.store.unlock()
            collectives.barrier(collectives.world())

    def resume(self, broadcast: bool = False) -> str:
        """Go on from the newest whole checkpoint, on every rank, and say from where and what was passed over;
        "" if there is none. `broadcast`: of ranks that hold the same, one reads."""
        steps = self.agree(self.store.steps() if self.store else [])
        said = ""
        for step in reversed(steps):
            try:
                manifest, files = self.store.open(step)
                changed = check_identity(self.store.path(step), manifest, self.identity(), self.data)
                lost = self.parallel.load_pieces(Saved(files, broadcast))
            except Damaged as error:
                said += f"{error}; passed over. "
                if self.rank == 0:
                    self.store.set_aside(step)
                continue
            position, size = manifest["position"], self.hyper.batch_size
            self.step, self.records = position["step"], manifest["records"]
            seen = position.get("samples", self.step * position["batch_size"])
            self.first = seen - self.step * size
            self.rows = self.data.rows(size, self.hyper.length, self.hyper.seed, self.first)
            if self.rank == 0:
                self.store.count_as_good(step)
            before = Strategy(**manifest["strategy"])
            other = [f"it was saved by {before}"] if before != self.parallel.strategy else []
            return "; ".join([f"{said}resumed at step {self.step}", *changed, *other, *lost])
        if steps:
            raise ValueError(f"{said}No checkpoint in {self.store.folder} is whole: start anew elsewhere")
        return ""

    def agree(self, steps: list[int]) -> list[int]:
        """All ranks see the same checkpoints: they compare the newest and what it holds."""
        manifest = (self.store.path(steps[-1]) / MANIFEST).read_bytes() if steps else b""
        digest = int.from_bytes(hashlib.blake2b(manifest, digest_size=7).digest())
        newest = torch.tensor([[sum(steps[-1:]), digest]], device=self.parallel.device)
        seen = collectives.all_gather(newest, collectives.world()).tolist()
        if other := [rank for rank, newest in enumerate(seen) if newest != seen[0]]:
            what = f"rank {other[0]} sees other checkpoints than rank 0"
            raise ValueError(f"{what}: {self.store.folder} must be a folder that all ranks see")
        return steps

    def identity(self) -> dict[str, Any]:
        run, model = self.parallel, self.parallel.config or type(self.parallel.model).__name__
        precision = run.strategy.precision if run.config else str(run.dtype).removeprefix("torch.")
        return identity(model, self.hyper, precision, run.strategy)


def identity(model: GPTConfig | str, hyper: Hyperparameters, precision: str, s: Strategy) -> dict[str, Any]:
    """What makes a run the same run, in plain values (through JSON): a loader trusts no class."""
    model = {"model": model} if isinstance(model, str) else plain_values(model)
    numbers = {"precision": precision, "products": s.products, "compress": s.compress}
    return json.loads(json.dumps({**model, **asdict(hyper), **numbers}))


# What may change in a run that goes on: rates and updates to come are those of the new values, and the next
# batch begins with the first sample that has not been seen. With any other it would be another run, of other
# samples, masks, states or weights, and nobody would see it.
MAY_CHANGE = ("steps", "lr", "warmup", "min_lr", "weight_decay", "clip", "batch_size")
OLDER = {"compress": "none"}  # of checkpoints that do not say so


def check_identity(path: Path, manifest: dict, wanted: dict, data: Data) -> list[str]:
    """What has changed of what may change, in a line: "lr 0.003 -> 0.001"."""
    was, position, changed = manifest["identity"], manifest["position"], []
    if "batch_size" not in position:
        raise ValueError(f"{path} has weights alone, of no run: begin with them, --start {path.parent}")
    for name, now in wanted.items():
        if (before := was.get(name, OLDER.get(name))) != now:
            if name not in MAY_CHANGE:
                what = f"{path} was made with {name}={before}, this run has {name}={now}"
                raise ValueError(f"{what}: another run; resume with the same, or write to another folder")
            changed.append(f"{name} {before} -> {now}")
    if wanted["steps"] < position["step"]:
        what = f"{path} has {position['step']} steps behind it, and steps={wanted['steps']}"
        raise ValueError(f"{what}: ask for more, or write to another folder")
    data.resume(position, position["batch_size"], wanted["length"], wanted["seed"])
    return [", ".join(changed)] if changed else []
