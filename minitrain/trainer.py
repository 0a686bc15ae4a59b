"""The loop around `train_step`: batches by number, a log, samples of text, and a checkpoint to go on from exactly.

Every step is a pure function of its number: the batch, the rate and the seed of dropout are computed from it, on each
rank for itself. So a checkpoint is weights, optimizer state and position and nothing else. On the same number of
ranks a run goes on bit for bit as if it had never stopped; on another number, up to rounding.

    OUT/checkpoint.pt    replaced in one piece at each report, so an interrupt at any moment loses the steps since
    OUT/log.jsonl        one line a report: step, loss, held-out loss, norm, tokens per second, MFU

Sends what `train_step` sends and, per report, the loss, the held-out loss and its counts. Memory: as the step, plus
on rank 0 a copy of the optimizer state while a checkpoint is written; the folder must be one that all ranks see.
Raises ValueError in one line for settings out of range, a loss that is no number (before it can reach a checkpoint),
and a checkpoint that is damaged, of another model, recipe or text, or not seen by all ranks.
Differs from nanoGPT's train.py, whose shape it has: a recipe is one object, resuming is exact, the loop is a
generator, so it never learns who watches.
"""

import json
import math
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from minitrain import collectives
from minitrain.accounting.compute import flops_per_token, mfu
from minitrain.data import Text
from minitrain.model import cross_entropy_sum, generate, seed_of
from minitrain.optim import AdamW, warmup_cosine
from minitrain.parallelize import Parallel
from minitrain.train import Batch, StepResult, accumulate, train_step, valid_tokens


@dataclass(frozen=True)
class Recipe:
    """All that decides the numbers of a run, besides model and text."""

    steps: int = 1000
    batch_size: int = 8  # rows of the global batch
    length: int = 128
    num_microbatches: int = 1  # on each rank
    lr: float = 3e-3
    warmup_steps: int = 20
    min_lr: float = 3e-4
    weight_decay: float = 0.1
    clip: float | None = 1.0
    seed: int = 0

    def __post_init__(self):
        for name in ("steps", "batch_size", "length", "num_microbatches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: use at least 1")
        self.lr_at(0)

    def lr_at(self, step: int) -> float:
        return warmup_cosine(step, self.lr, self.warmup_steps, self.steps, self.min_lr)


class Trainer:
    """Trains `parallel.model` by `recipe`. Reports, and saves if it was given a folder, every `report_every` steps."""

    def __init__(
        self,
        parallel: Parallel,
        text: Text,
        recipe: Recipe,
        *,
        held_out: Text | None = None,
        out: Path | None = None,
        report_every: int = 25,
        peak_flops: float | None = None,
    ):
        self.model, self.reducer, self.group = parallel.model, parallel.reducer, parallel.data_group
        if report_every < 1:
            raise ValueError(f"report_every={report_every}: use at least 1 step")
        if any(hasattr(param, "shards") for param in self.model.parameters()):
            raise ValueError("the Trainer saves whole parameters, and these are cut over ranks: train with tp=1, or call train_step")
        if parallel.token_group is not parallel.data_group:
            raise ValueError("the Trainer gives each rank whole rows, and these are cut over cp: train with cp=1, or call train_step")
        self.text, self.held_out, self.recipe, self.out = text, held_out, recipe, out
        self.report_every, self.peak_flops = report_every, peak_flops
        self.rank, self.ranks = self.group.rank(), self.group.size()
        param = next(self.model.parameters())
        self.device, self.dtype = param.device, param.dtype
        self.optimizer = AdamW(decaying_matrices(self.model, recipe.weight_decay), recipe.lr, betas=(0.9, 0.95),
                               master_dtype=torch.promote_types(self.dtype, torch.float32))
        self.forward_backward = accumulate(self.model, cross_entropy_sum, recipe.num_microbatches, self.reducer)
        self.step, self.records = 0, []

    def run(self) -> Iterator[dict[str, Any]]:
        """Train to the end of the recipe; yields a record per report, to print, plot or stop at."""
        losses, started = [], time.perf_counter()
        while self.step < self.recipe.steps:
            result = self.train_one_step()
            losses.append(result.loss)
            if self.step % self.report_every and self.step < self.recipe.steps:
                continue
            loss = collectives.all_reduce(torch.stack(losses).mean(), self.group).item()
            record = {"step": self.step, "loss": loss, **self.speed(len(losses), time.perf_counter() - started)}
            if result.norm is not None:
                record["norm"] = result.norm.item()
            if not math.isfinite(loss + record.get("norm", 0.0)):
                good = self.step - len(losses)
                raise ValueError(f"loss {loss}, gradient norm {record.get('norm')} between steps {good} and "
                                 f"{self.step}: lower lr={self.recipe.lr} or clip={self.recipe.clip}; "
                                 f"all was well at step {good}")
            record["held_out"] = self.held_out_loss()
            self.records.append(record)
            self.save()
            yield record
            losses, started = [], time.perf_counter()

    def train_one_step(self) -> StepResult:
        """All that a step does follows from its number."""
        recipe = self.recipe
        for group in self.optimizer.param_groups:
            group["lr"] = recipe.lr_at(self.step)
        torch.manual_seed(seed_of(f"dropout of step {self.step}, rank {self.rank}", recipe.seed))
        batch = self.batch(self.text, self.step, recipe.seed)
        self.step += 1
        return train_step(self.forward_backward, batch, self.optimizer, self.reducer, recipe.clip)

    def batch(self, text: Text, step: int, seed: int) -> Batch:
        parts = text.batch(step, self.rank, self.ranks, self.recipe.batch_size, self.recipe.length, seed)
        tokens, targets = (part.to(self.device) for part in parts)
        return Batch(tokens, targets, valid_tokens(targets, self.group))

    def speed(self, steps: int, elapsed_s: float) -> dict[str, float]:
        tokens_per_s = steps * self.recipe.batch_size * self.recipe.length / elapsed_s
        if not self.peak_flops:
            return {"tokens_per_s": tokens_per_s}
        flops = flops_per_token(self.model.config, self.recipe.length)
        return {"tokens_per_s": tokens_per_s, "mfu": mfu(tokens_per_s, flops, self.ranks, self.peak_flops)}

    @torch.no_grad()
    def held_out_loss(self, batches: int = 2) -> float | None:
        """Mean loss per token on text that is not trained on: always the same windows, shared out over the ranks."""
        if self.held_out is None:
            return None
        self.model.eval()
        total = torch.zeros((), device=self.device)
        for step in range(batches):
            batch = self.batch(self.held_out, step, seed=0)
            total = total + cross_entropy_sum(self.model(batch.tokens), batch.targets) / batch.num_valid / batches
        self.model.train()
        return collectives.all_reduce(total, self.group).item()

    def sample(self, prompt: str = "The ", n: int = 200, temperature: float = 0.7, seed: int = 0) -> str:
        """What the model makes of a prompt: n bytes more."""
        tokens = torch.tensor([list(prompt.encode())], device=self.device)
        return bytes(generate(self.model, tokens, n, temperature, seed)[0].tolist()).decode(errors="replace")

    def identity(self) -> dict[str, Any]:
        """What must be the same for a run to be the same run, in plain values (through JSON): a loader trusts no class."""
        return json.loads(json.dumps({**asdict(self.model.config), **asdict(self.recipe), "dtype": str(self.dtype)}))

    def save(self) -> None:
        """Rank 0 writes the checkpoint, then the log, each in one piece: a reader finds the old file or the new one."""
        if self.out is None or self.rank:
            return
        self.out.mkdir(parents=True, exist_ok=True)
        position = self.text.position(self.step, self.recipe.batch_size, self.recipe.length, self.recipe.seed)
        replace_file(self.out / "checkpoint.pt", lambda file: torch.save(
            {"identity": self.identity(), "position": position, "records": self.records,
             "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, file))
        lines = "".join(json.dumps(record) + "\n" for record in self.records)
        replace_file(self.out / "log.jsonl", lambda file: file.write(lines.encode()))

    def resume(self) -> bool:
        """Go on from the checkpoint in the folder, on every rank; False if there is none."""
        path = self.out and self.out / "checkpoint.pt"
        if path and path.exists():
            self._load(path)
        if collectives.all_reduce(torch.tensor(self.step, device=self.device), self.group) != self.step * self.ranks:
            raise ValueError(f"this rank is at step {self.step} and others are not: {self.out} must be a folder that all "
                             "ranks see")
        return self.step > 0

    def _load(self, path: Path) -> None:
        try:
            saved = torch.load(path, map_location=self.device, weights_only=True)
        except Exception as error:  # torch's reader raises many kinds
            raise ValueError(f"{path} is damaged ({type(error).__name__}): delete it to start anew") from None
        for name, now in self.identity().items():
            before = saved["identity"].get(name)
            if before != now:
                raise ValueError(f"{path} was made with {name}={before}, this run has {name}={now}: resume with the "
                                 "same settings, or write to another folder")
        self.step = self.text.resume(saved["position"], self.recipe.batch_size, self.recipe.length, self.recipe.seed)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.records = saved["records"]


def decaying_matrices(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: matrices decay; norms and biases do not, their scale is not capacity."""
    params = [param for param in model.parameters() if param.requires_grad]
    groups = [{"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay},
              {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def replace_file(path: Path, write) -> None:
    """Write beside it, force it to the disk, then rename: a crash at any point leaves the old file or the new one."""
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
