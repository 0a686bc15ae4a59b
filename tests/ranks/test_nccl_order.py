"""Under NCCL's rules of order (nccl_order.py) nothing waits for ever: every schedule, and what real code issues."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

from minitrain import launch
from minitrain.model.config import ExpertsConfig, GPTConfig
from minitrain.model.training.step import Batch, NoReducer, train_step
from minitrain.pipeline.runtime import Runner
from minitrain.pipeline.schedule import Schedule
from minitrain.pipeline.schedules.one_direction import one_f_one_b
from minitrain.pipeline.schedules_by_name import CHUNKED, NAMES, SLICED, named
from minitrain.plan.strategy import Strategy
from minitrain.ranks.collectives import transport, world
from minitrain.ranks.launch import dryrun
from minitrain.ranks.mesh import Mesh
from minitrain.systems.pipeline import contrastive
from minitrain.systems.pipeline.bpipe_eviction import Balanced
from minitrain.systems.pipeline.post_validation import PostValidation
from minitrain.systems.plan import stage_cuts
from tests.context.cores import in_one_axis, in_two_axes, some
from tests.layouts import Draw, begin
from tests.pipeline.lists import everything
from tests.ranks.nccl_order import Post, Steps, Wait, play, step_of

# ---- every schedule ---------------------------------------------------------------------------------------


@cache
def schedules() -> tuple[Schedule, ...]:
    """On 2, 3, 4 and 8 ranks, for the numbers of microbatches where they change."""
    made = [schedule for schedule in everything() if len(schedule.ranks) <= 8]
    for p in (2, 3, 4, 8):
        for m in sorted({1, 2, p - 1, p, p + 1, 2 * p, 8, 16}):
            made += [contrastive.naive(p, m), contrastive.doubled(p, m), stage_cuts.sliced(p, m)]
            for name in NAMES:
                more = [dict(chunks=k) for k in (1, 2, 3)] if name in CHUNKED else [{}]
                for sizes in [dict(slices=k) for k in (1, 2, 3)] if name in SLICED else more:
                    try:
                        made.append(named(name, p, m, **sizes))
                    except ValueError:  # not for these sizes
                        pass
    return tuple(made)


@cache
def steps() -> list[tuple[Schedule, dict[int, Steps]]]:
    return [(schedule, step_of(schedule)) for schedule in schedules()]


def test_every_schedule_ends():
    """With a group for each direction, a queue for each pair of ranks in it, and all links opened first."""
    assert len(steps()) > 700
    assert not [schedule.name for schedule, issued in steps() if play(issued, lazy=True)]


# ---- what real code issues --------------------------------------------------------------------------------


@contextmanager
def recorded() -> Iterator[Steps]:
    """What this rank issues and waits for, whatever moves it."""
    steps, before = [], dict(transport.BACKENDS)

    def noted(ch, parts, wait):
        op = len(steps)
        steps.append(Post(op, ch.group.group_name, ch.members, tuple(parts)))
        return lambda: (steps.append(Wait(op)), wait())

    def recorder(kind):
        class Recorder(kind):
            def start(self, ch, job, in_background):
                return noted(ch, [(job.call.op, -1)], super().start(ch, job, in_background))

            def post(self, ch, sends, receives):
                parts = [("send", ch.members[peer]) for _, _, peer in sends]
                parts += [("receive", ch.members[peer]) for _, _, peer in receives]
                return noted(ch, parts, super().post(ch, sends, receives))

        return Recorder()

    transport.BACKENDS.update({name: recorder(type(backend)) for name, backend in before.items()})
    try:
        yield steps
    finally:
        transport.BACKENDS.update(before)


def dry_steps(fn, ranks: int) -> dict[int, Steps]:
    """Of every rank, in dry runs of fn(rank)."""
    made = {}
    for rank in range(ranks):
        with recorded() as made[rank]:
            dryrun.run(fn, rank, rank=rank, ranks=ranks)
    return made


def plays(programs: dict[int, Steps]) -> tuple[str, str]:
    return play(programs, lazy=True), play(programs, lazy=False)


CORES = {
    2: lambda: some("ring z", "gathered c", "Ulysses z", "balanced", "unb", **in_one_axis(world())),
    3: lambda: some("ring z", "balanced", "unb", **in_one_axis(world())),
    4: lambda: some("balanced", "unb", **in_one_axis(world())) | in_two_axes(2, 2),
}


@pytest.mark.parametrize("ranks", CORES)
def test_attention_over_ranks_ends(ranks):
    """Rings, double rings, Ulysses, both together, tiles that are dealt again: forward and backward."""

    def on_rank(rank):
        for core, _ in CORES[ranks]().values():
            q, k, v = (torch.zeros(1, heads, 4, 8, requires_grad=True) for heads in (8, 4, 4))
            core(q, k, v).sum().backward()

    assert plays(dry_steps(on_rank, ranks)) == ("", "")


class Stage(nn.Linear):
    def forward(self, x):
        return super().forward(x if x.is_floating_point() else x.unsqueeze(-1).expand(-1, -1, 4).double())


def run_pipeline(schedule: Schedule, mode: str, lent: dict, twin: bool = True) -> dict:
    """Of stages of one product, in two steps if they are `checked later` or run `again`; the names of its groups."""
    mesh, reducer = Mesh(pp=len(schedule.ranks)), NoReducer()
    group, down = mesh.group("pp"), mesh.twin("pp") if twin else mesh.group("pp")
    stages = {stage: Stage(4, 4, dtype=torch.float64) for stage in schedule.stages_of(group.rank())}
    settings = dict(width=4, dtype=torch.float64, down=down)
    loss_fn = lambda y, targets: (y * targets.unsqueeze(-1)).sum()
    run = (Balanced if schedule.evicts else Runner)(stages, schedule, group, loss_fn, reducer, **settings)
    if schedule.evicts:
        run.lent.update(lent)
    tokens = torch.ones(schedule.microbatches // schedule.slices, 6, dtype=torch.int64)
    batch = Batch(tokens, tokens, 1)
    if mode:
        params = [param for stage in stages.values() for param in stage.parameters()]
        post = PostValidation(torch.optim.SGD(params, lr=1.0), 1e-9 if mode == "again" else 1e9, group)
        run.hooks.append(post)
        for _ in range(2):
            train_step(run, batch, post, reducer)
        post.finish()
    else:
        run(batch)
    lent.update(getattr(run, "lent", {}))
    return {group.group_name: "up", down.group_name: "down"}


def as_derived(steps: Steps, names: dict) -> Steps:
    return [step._replace(group=names[step.group]) if isinstance(step, Post) else step for step in steps]


@pytest.mark.parametrize(
    "name, p, m, sizes",
    [
        ("1f1b", 3, 5, {}),
        ("interleaved", 2, 4, dict(chunks=2)),
        ("zb_v", 3, 6, {}),
        ("dualpipe", 4, 8, {}),
        ("chimera", 4, 4, {}),
        ("bpipe", 4, 6, {}),
    ],
)
def test_what_is_played_is_what_a_runner_issues(name, p, m, sizes):
    schedule, lent = named(name, p, m, **sizes), {}
    for rank in range(p):
        with recorded() as steps:
            names = dryrun.run(lambda: run_pipeline(schedule, "", lent), rank=rank, ranks=p)
        assert as_derived(steps, names) == step_of(schedule)[rank]


@pytest.mark.parametrize("mode", ["checked later", "again"])
@pytest.mark.parametrize(
    "schedule", [one_f_one_b(3, 4), named("interleaved", 2, 4, chunks=2), named("zb_v", 4, 8)]
)
def test_steps_checked_later_end(schedule, mode):
    """Two of them on real ranks, and a number up and down the stages between; `again`: some forwards run twice."""

    def on_rank():
        with recorded() as steps:
            run_pipeline(schedule, mode, {})
        return steps

    issued = dict(enumerate(launch.run(on_rank, ranks=len(schedule.ranks))))
    assert not play(issued, lazy=True)
    if schedule.name.startswith("1F1B"):
        assert sum(isinstance(step, Post) for step in issued[0]) == 2 + 2 * 8 + 4 + 3 * (mode == "again")


CONFIG = GPTConfig(
    vocab_size=29, d_model=24, num_layers=2, num_heads=6, num_kv_heads=2, max_positions=16, tied=True
)
LAYOUTS = {
    "ring products, ZeRO-3": dict(tp=2, dp=2, sequence_parallel=True, overlap=True, zero=3),
    "experts in two levels": dict(dp=4, ep=4, ep_node=2),
    "halves in turns": dict(dp=2, ep=2, pp=2, schedule="dualpipe_v", microbatches=4),
    "slices": dict(pp=2, cp=2, schedule="seq1f1b", slices=2, microbatches=2, core="ring", layout="zigzag"),
}


def case_of(name: str) -> Draw:
    strategy = Strategy(**{**dict(precision="float64", microbatches=2), **LAYOUTS[name]})
    experts = ExpertsConfig(4, 2, router="balanced") if strategy.ep > 1 else None
    return Draw(replace(CONFIG, experts=experts), strategy, (8, 9), 16, 0.3, (), "adamw", "ragged")


@pytest.mark.parametrize("name", LAYOUTS)
def test_steps_of_layouts_end(name):
    case = case_of(name)
    assert plays(dry_steps(lambda rank: begin(case), case.strategy.ranks)) == ("", "")


# ---- controls: what hangs is seen -------------------------------------------------------------------------

EAGER = {  # how many schedules of each kind hang
    **{"1F1B": 17, "Seq1F1B": 26, "BPipe": 9, "interleaved 1F1B": 14, "breadth-first": 22, "Hanayo": 40},
    **{"ZB-H1": 5, "ZB-V": 13, "V-Half": 16, "V-Min": 22, "interleaved zero bubble": 15},
    **{"Chimera": 9, "DualPipe": 5, "DualPipeV": 5, "two barriers": 3, "doubled microbatches": 8},
}


def test_what_hangs_where_messages_share_the_communicator_of_their_group():
    """As torch has it once `init_process_group` was given a device: a rank's receive from one side then stands
    behind its send to the other."""
    hanging = [schedule.name.split(",")[0] for schedule, issued in steps() if play(issued, lazy=False)]
    assert Counter(hanging) == EAGER
    for m in (8, 16):
        one_group = step_of(one_f_one_b(4, m), twin=False)
        assert play(one_group, lazy=False).startswith("rank 0 waits for 6 behind 6, [('receive', 1)] on up")


@pytest.mark.parametrize(
    "without, words",
    [("twin", "waits for"), ("opened", "rank 0 at 0 makes down with [1]; rank 1 at 0 makes up with [0]")],
)
def test_nearly_all_hang_without(without, words):
    few = [step_of(schedule, **{without: False}) for schedule in schedules()[::9]]
    assert sum(bool(play(issued, lazy=True)) for issued in few) > 0.8 * len(few)
    assert words in play(step_of(one_f_one_b(2, 2), **{without: False}), lazy=True)
