"""The loop around `run.step`: batches by number, a log, samples of text, a checkpoint. It knows no technique.

Every step is a pure function of its number: the batch, the rate and what dropout drops follow from it. So a
checkpoint is weights, optimizer states and position, whole and by global name: it does not say who held what.
In the same layout a run goes on bit for bit as if it had never stopped; in any other, up to rounding.

    OUT/checkpoint.pt    replaced in one piece at each report: an interrupt loses only the steps since then
    OUT/log.jsonl        one line a report: step, loss, held-out loss, norm, tokens per second, MFU

All ranks do the same in the same order. A loss or norm that is no number, or ranks that see different
folders, is the same error on every rank; such a number never reaches a checkpoint.
Sends what the run's steps send and, per report, the loss, the held-out loss and, to save, every parameter and
state once (`run.state_dict`). Memory: as the step, and a whole copy of weights and optimizer states on every
rank while a checkpoint is written.
Differs from nanoGPT's train.py: hyperparameters are one object, resuming is exact, the loop is a generator,
so it does not know who watches.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import torch

from minitrain import collectives
from minitrain.data.batches import Text
from minitrain.model.config import GPTConfig
from minitrain.plan.accounting.compute import flops_per_token, mfu
from minitrain.run import Run
from minitrain.strategy import Strategy
from minitrain.training.hyperparameters import Hyperparameters
from minitrain.training.step import StepResult


class Trainer:
    """Trains a run by `hyper`. Reports, and saves if it was given a folder, every `report_every` steps."""

    def __init__(
        self,
        run: Run,
        text: Text,
        hyper: Hyperparameters,
        *,
        held_out: Text | None = None,
        out: Path | None = None,
        report_every: int = 25,
        peak_flops: float | None = None,
    ):
        if report_every < 1:
            raise ValueError(f"report_every={report_every}: use at least 1 step")
        for param, name in run.sync.names.items():
            if hyper.freezes(name) == param.requires_grad:
                state, frozen = "trained" if param.requires_grad else "frozen", f"frozen={hyper.frozen}"
                cure = "give the same to both, parallelize(..., frozen=hyper.frozen)"
                raise ValueError(
                    f"{name} is {state} in this run, and the hyperparameters have {frozen}; {cure}"
                )
        self.parallel, self.text, self.held_out, self.hyper, self.out = run, text, held_out, hyper, out
        self.report_every, self.peak_flops = report_every, peak_flops
        self.rows = text.rows(hyper.batch_size, hyper.length, hyper.seed)
        self.rank, self.ranks = collectives.world().rank(), collectives.world().size()
        self.step, self.records = 0, []

    # ---- training -----------------------------------------------------------------------------------------

    def run(self) -> Iterator[dict[str, Any]]:
        """Train to the last step; yields a record per report, to print, plot or stop at."""
        losses, started = [], time.perf_counter()
        while self.step < self.hyper.steps:
            result = self.train_one_step()
            losses.append(result.loss)
            if self.step % self.report_every and self.step < self.hyper.steps:
                continue
            loss = self.parallel.total(torch.stack(losses).mean()).item()
            speed = self.speed(len(losses), time.perf_counter() - started)
            norm = result.norm.item() if result.updated else None  # of a step that was left out
            record = {"step": self.step, "loss": loss, **speed, "norm": norm}
            record["held_out"] = self.held_out_loss()
            self.check(record, good=self.step - len(losses))
            self.records.append(record)
            self.save()
            yield record
            losses, started = [], time.perf_counter()

    def train_one_step(self) -> StepResult:
        """All that a step does follows from its number."""
        for group in self.parallel.sync.param_groups:
            group["lr"] = self.hyper.lr_at(self.step)
        batch = self.parallel.batch(self.rows, self.step)
        self.step += 1
        return self.parallel.step(batch, self.hyper.clip)

    def check(self, record: dict[str, Any], good: int) -> None:
        """Numbers are numbers. They are the same on all ranks, so all stop, or none."""
        loss, norm, held_out = record["loss"], record["norm"], record["held_out"]
        if not math.isfinite(loss + (norm or 0.0) + (held_out or 0.0)):
            found = f"loss {loss}, gradient norm {norm}, held-out loss {held_out}"
            cure = f"lower lr={self.hyper.lr} or clip={self.hyper.clip}; all was well at step {good}"
            raise ValueError(f"{found} between steps {good} and {self.step}: {cure}")

    def speed(self, steps: int, elapsed_s: float) -> dict[str, float]:
        tokens_per_s = steps * self.hyper.batch_size * self.hyper.length / elapsed_s
        if not (self.peak_flops and self.parallel.config):
            return {"tokens_per_s": tokens_per_s}
        flops = flops_per_token(self.parallel.config, self.hyper.length)
        return {"tokens_per_s": tokens_per_s, "mfu": mfu(tokens_per_s, flops, self.ranks, self.peak_flops)}

    # ---- looking at it ------------------------------------------------------------------------------------

    def held_out_loss(self, batches: int = 2) -> float | None:
        """Mean loss per token on text that is not trained on, always the same windows, over all ranks."""
        if self.held_out is None:
            return None
        rows = self.held_out.rows(self.hyper.batch_size, self.hyper.length)
        losses = (self.parallel.evaluate(self.parallel.batch(rows, step)).item() for step in range(batches))
        return sum(losses) / batches

    def sample(self, prompt: str = "The ", n: int = 200, temperature: float = 0.7, seed: int = 0) -> str:
        """What the model makes of a prompt, n bytes more; every rank must ask, and gets the same."""
        tokens = torch.tensor([list(prompt.encode())], device=self.parallel.device)
        return bytes(self.parallel.sample(tokens, n, temperature, seed)[0].tolist()).decode(errors="replace")

    # ---- checkpoints --------------------------------------------------------------------------------------

    def save(self) -> None:
        """Rank 0 writes the log, then the checkpoint: going on from an older one writes the line again."""
        if self.out is None:
            return
        state, hyper = self.parallel.state_dict(), self.hyper  # every rank takes part
        if self.rank:
            return
        self.out.mkdir(parents=True, exist_ok=True)
        position = self.text.position(self.step, hyper.batch_size, hyper.length, hyper.seed)
        saved = {
            "identity": self.identity(),
            "strategy": asdict(self.parallel.strategy),
            "position": position,
        }
        saved |= {"records": self.records, "state": state}
        lines = "".join(json.dumps(record) + "\n" for record in self.records)
        replace_file(self.out / "log.jsonl", lambda file: file.write(lines.encode()))
        replace_file(self.out / "checkpoint.pt", lambda file: torch.save(saved, file))

    def resume(self) -> str:
        """Go on from the checkpoint in the folder, on every rank, and say from where; "" if there is none."""
        saved = find_checkpoint(self.out, self.identity(), self.text, self.hyper, self.parallel.device)
        self.agree(saved)
        if not saved:
            return ""
        self.parallel.load_state_dict(saved["state"])
        self.step, self.records = saved["position"]["step"], saved["records"]
        before = Strategy(**saved["strategy"])
        other = f"; it was saved by {before}" if before != self.parallel.strategy else ""
        return f"resumed at step {self.step}{other}"

    def agree(self, saved: dict[str, Any]) -> None:
        """All ranks found the same: they compare the step and a hash of what was reported until then."""
        mine = [0, 0]
        if saved:
            reported = json.dumps([saved["strategy"], saved["records"]]).encode()
            digest = hashlib.blake2b(reported, digest_size=7).digest()
            mine = [saved["position"]["step"], int.from_bytes(digest)]
        mine = torch.tensor([mine], device=self.parallel.device)
        found = collectives.all_gather(mine, collectives.world()).tolist()
        for rank, ours in enumerate(found):
            if ours != found[0]:
                first, other = (
                    f"one of step {step}" if step else "no checkpoint" for step, _ in (found[0], ours)
                )
                sees = f"rank 0 sees {first} and rank {rank} {other if other != first else 'another one'}"
                raise ValueError(f"{sees}: {self.out} must be a folder that all ranks see")

    def identity(self) -> dict[str, Any]:
        run = self.parallel
        precision = run.strategy.precision if run.config else str(run.dtype).removeprefix("torch.")
        model = run.config or type(run.model).__name__
        return identity(model, self.hyper, precision, run.strategy.products)


def identity(model: GPTConfig | str, hyper: Hyperparameters, precision: str, products: str) -> dict[str, Any]:
    """What makes a run the same run, in plain values (through JSON): a loader trusts no class."""
    model = {"model": model} if isinstance(model, str) else asdict(model)
    model |= model.pop("experts", None) or {}  # by their own names
    return json.loads(json.dumps({**model, **asdict(hyper), "precision": precision, "products": products}))


def find_checkpoint(
    out: Path | None,
    wanted: dict[str, Any],
    text: Text,
    hyper: Hyperparameters,
    device="cpu",
    mmap: bool = False,
) -> dict[str, Any]:
    """What the folder's checkpoint of this run holds; {}: there is none. `mmap`: tensors stay on disk."""
    if out is None or not (path := out / "checkpoint.pt").exists():
        return {}
    try:
        saved = torch.load(path, map_location=device, weights_only=True, mmap=mmap)
        was, position = saved["identity"], saved["position"]
    except Exception as error:  # torch's reader raises many kinds
        raise ValueError(f"{path} is damaged ({type(error).__name__}): delete it to start anew") from None
    for name, now in wanted.items():
        if was.get(name) != now:
            what = f"made with {name}={was.get(name)}, this run has {name}={now}"
            raise ValueError(f"{path} was {what}: resume with the same settings, or write to another folder")
    text.resume(position, hyper.batch_size, hyper.length, hyper.seed)
    return saved


def replace_file(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    """Write beside it, force it to the disk, rename: a crash at any point leaves the old file or the new."""
    beside = path.with_name(path.name + ".new")
    with open(beside, "wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
