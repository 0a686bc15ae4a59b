"""Just in time: the survivors' state is that of the last boundary, whoever died, and nothing is saved before."""

import os
import shutil
import signal
from operator import call as as_on_gloo

import pytest
import torch

from minitrain import collectives, launch
from minitrain.checkpoint.format import write_file
from minitrain.checkpoint.load import Saved
from minitrain.checkpoint.store import Store, file_name
from minitrain.ranks.pieces import whole_piece
from minitrain.systems.checkpoint.in_memory import Lost
from minitrain.systems.checkpoint.just_in_time import JustInTime, survivors
from tests.parallel import Traffic, rows_of_problem
from tests.strict_backend import strictly
from tests.systems.checkpoint.memory_runs import PROBLEM, STEPS, digest, load, make_run, train


def start(folder, dying=(), dies_at=None, **strategy):
    """A start of the job: from survivors if there are any; `dying` ranks are killed within the step after
    `dies_at`, in the middle of backward."""
    run, group = make_run(**strategy), collectives.world()
    jit, first = JustInTime(folder, group), 0
    if any(folder.iterdir()):
        first = load(run, *survivors(folder))
    victim = next(p for p in run.model.parameters() if p.requires_grad)

    def boundary(step):
        jit.boundary(step, run.pieces(), run.plain_state(), {"of": "a test"})
        if group.rank() in dying and step == dies_at:
            victim.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))

    boundary(first)
    with Traffic() as ledger, jit.guard():
        losses = train(run, first, STEPS, boundary)
    return first, losses, digest(run), ledger.sent_bytes()


LAYOUTS = {"dp": dict(dp=2), "tp": dict(dp=2, tp=2), "pp": dict(dp=2, pp=2, microbatches=2)}


def whole_run(strategy):
    """Without any of this: (losses, digest, bytes sent)."""
    run = make_run(**strategy)
    with Traffic() as ledger:
        losses = train(run, 0, STEPS)
    return losses, digest(run), ledger.sent_bytes()


@pytest.mark.parametrize(
    "layout, dying, rules",
    [
        ("dp", [1], as_on_gloo),
        pytest.param("tp", [3], as_on_gloo, marks=pytest.mark.slow),
        pytest.param("pp", [0], as_on_gloo, marks=pytest.mark.slow),
        ("dp", [1], strictly),
        ("pp", [0], strictly),
    ],
)
def test_jit_ckpt(tmp_path, layout, dying, rules, capfd):
    """Also where, as on NCCL, no wait raises. One of two replicas is killed in the middle of a step: the next start has lost that step and nothing
    else, and ends with the same bits; in a start without a failure nothing is sent or written."""
    strategy, ranks = LAYOUTS[layout], 2 if layout == "dp" else 4
    whole = launch.run(whole_run, strategy, ranks=ranks)
    with pytest.raises(launch.RankError, match="died of SIGKILL") as error:
        launch.run(rules, lambda: start(tmp_path, dying, 3, **strategy), ranks=ranks, grace_s=15)
    assert error.value.ranks == tuple(dying), "the right rank is named"
    saved = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob("rank-*/step-*"))
    each = {f"rank-{rank:05d}/step-00000003" for rank in range(ranks) if rank not in dying}
    assert set(saved) == each, "every survivor, and no other step"
    again = launch.run(lambda: start(tmp_path, **strategy), ranks=ranks)
    for (losses, end, _), (first, after, end_too, _) in zip(whole, again):
        assert first == 3 and after == losses[3:] and end == end_too
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob("rank-*/step-*")) == saved
    if layout == "dp":
        for name in ("none", "alone", "together"):
            (tmp_path / name).mkdir()
        test_what_is_saved_is_a_step(tmp_path / "alone", capfd)
        test_survivors_make_a_whole(tmp_path / "together")
        for (losses, end, sent), (_, losses_too, end_too, sent_too) in zip(
            whole, launch.run(lambda: start(tmp_path / "none", **strategy), ranks=ranks)
        ):
            assert losses == losses_too and end == end_too and sent == sent_too
        assert not list((tmp_path / "none").rglob("*"))


def test_each_place_needs_a_survivor(tmp_path):
    """Both replicas of a place, and optimizer states of which there is one: a line that says whose."""
    (tmp_path / "tp").mkdir()
    with pytest.raises(launch.RankError, match="ranks 1, 3 died of SIGKILL"):
        launch.run(lambda: start(tmp_path / "tp", [1, 3], 2, **LAYOUTS["tp"]), ranks=4, grace_s=15)
    with pytest.raises(Lost, match=r"step 2: nobody is left who has what ranks \[1, 3\] held") as error:
        survivors(tmp_path / "tp")
    assert "\n" not in str(error.value)
    (tmp_path / "zero").mkdir()
    with pytest.raises(launch.RankError, match="rank 0 died of SIGKILL"):
        launch.run(lambda: start(tmp_path / "zero", [0], 2, dp=2, zero=1), ranks=2, grace_s=15)
    with pytest.raises(Lost, match=r"step 2: nobody is left who has what ranks \[0\] held"):
        survivors(tmp_path / "zero")
    with pytest.raises(Lost, match="it is empty"):
        survivors(tmp_path / "none")


def broken(folder):
    """What a rank saves after errors of its own; in one launch of two replicas."""
    run, group, said = make_run(dp=2), collectives.world(), []
    train(run, 0, 1)

    def attempt(name, step, spoil):
        jit = JustInTime(folder / name, group)
        jit.boundary(step, run.pieces(), run.plain_state(), {})
        there, state = jit.store.path(step), digest(run)
        with pytest.raises(ZeroDivisionError), jit.guard():
            spoil(jit)
            1 / 0
        said.append((name, there.exists()))
        return state

    def half_a_step(jit):
        batch = run.batch(rows_of_problem(PROBLEM, 1), 1)
        run.forward_backward(batch)
        run.sync.finish()  # gradients, and all that a step has before its update

    def an_update(jit):
        train(run, 1, 2)

    def a_bit(jit):
        with torch.no_grad():
            next(p for p in run.model.parameters() if p.requires_grad).view(-1)[0] += 1

    before = attempt("backward", 1, half_a_step)
    other = make_run(dp=2)
    collectives.barrier(group)
    manifest, files = survivors(folder / "backward")
    assert len(files) == 1, "replicas: one of them is enough"
    load(other, manifest, files)
    assert digest(other) == before
    attempt("update", 1, an_update)
    attempt("weight", 2, a_bit)
    attempt("again", 5, lambda jit: None)
    attempt("again", 3, lambda jit: None)  # from an older checkpoint, so step 5 was given up
    attempt("again", 3, lambda jit: None)  # no further than before
    attempt("again", 3, lambda jit: setattr(jit, "places", ["another", "layout"]))
    mine = Store(folder / "again" / f"rank-{group.rank():05d}")
    assert mine.manifest(3)["places"] == ["another", "layout"]
    collectives.barrier(group)  # nobody writes any more
    said.append(sorted(path.name for path in (folder / "again").glob("rank-*/step-*")))
    return said


def test_what_is_saved_is_a_step(tmp_path, capfd):
    """After gradients have changed, the state is that of the boundary; after a write to any of it there is none."""
    for said in launch.run(broken, tmp_path, ranks=2):
        *said, again = said
        assert said == [("backward", True), ("update", False), ("weight", False), *[("again", True)] * 4]
        assert "step-00000003" in again and set(again) <= {"step-00000003", "step-00000005"}
    assert "nothing of step 1 is saved: " in (told := capfd.readouterr().err)
    assert "was written to after the boundary" in told and "[rank 1]" in told


def save_alone(folder, rank, step, places, value, damage=False):
    """What a survivor leaves, without a run."""
    store = Store(folder / f"rank-{rank:05d}", keep=4)
    pieces = [whole_piece(f"parameters/{places[rank]}", torch.full((3,), float(value)))]
    pieces += [whole_piece("parameters/norm", torch.ones(2))]  # of both places
    path = store.begin(step) / file_name(rank)
    store.commit(step, [write_file(store.disk, path, pieces, {})], {"places": places})
    if damage:
        path = store.path(step) / file_name(rank)
        path.write_bytes(path.read_bytes()[:-1] + b"!")
    store.unlock()


def test_survivors_make_a_whole(tmp_path):
    """The newest step of which each place has a sound survivor, each piece once."""
    places = ["a", "b", "a", "b"]
    for rank in range(4):
        save_alone(tmp_path, rank, 5, places, 5)
    for rank in (0, 1, 3):
        save_alone(tmp_path, rank, 6, places, 6, damage=rank == 1)
    for rank in (0, 2):  # a step apart
        save_alone(tmp_path, rank, 7, places, 7)
    manifest, files = survivors(tmp_path)
    saved = Saved(files)
    assert manifest["step"] == 6
    assert sorted(file.path.parts[-3] for file in files) == ["rank-00000", "rank-00003"]
    for name, size, value in (("a", 3, 6), ("b", 3, 6), ("norm", 2, 1)):
        piece = whole_piece(f"parameters/{name}", torch.zeros(size))
        saved.fill(piece)  # refuses what it finds twice
        assert piece.values.tolist() == [value] * size
    shutil.rmtree(tmp_path / "rank-00003")
    assert survivors(tmp_path)[0]["step"] == 5
    save_alone(tmp_path, 3, 7, ["c"] * 4, 7)  # another layout, whose only place it has
    assert survivors(tmp_path)[0]["places"] == ["c"] * 4
