"""A power cut at any point of a save: what is on the disk then (systems/simulate/crash_model.py) holds the old checkpoint
or the new one, whole, and after `commit` returned the new one; and nothing that looks complete is not. Protocols
that lack a step do not keep this."""

import itertools
import shutil

import pytest
import torch

from minitrain.checkpoint.disk import new_file
from minitrain.checkpoint.format import File, Written, bytes_of, write_file
from minitrain.checkpoint.store import MANIFEST, Store, file_name, manifest_text
from minitrain.ranks.pieces import Piece
from minitrain.systems.simulate.crash_model import Model, Recorder, read_tree, write_tree

RANKS, EACH = 2, 100  # a file of three sectors


def values_of(step: int, rank: int) -> torch.Tensor:
    return torch.arange(EACH, dtype=torch.float64) * 7 + 1000 * step + rank


def piece(step: int, rank: int) -> Piece:
    return Piece("w", (RANKS * EACH,), (EACH * rank,), values_of(step, rank))


def save(store: Store, step: int, order: str = "01") -> None:
    """As ranks do it; `order` of their calls: one rank after the other, or in turns."""
    folder, logs, files = store.begin(step), [], []
    before = store.disk.log
    for rank in range(RANKS):
        store.disk.log = []
        files.append(write_file(store.disk, folder / file_name(rank), [piece(step, rank)], {"step": step}))
        logs.append(store.disk.log)
    if order == "turns":
        merged = [one for both in itertools.zip_longest(*logs) for one in both if one]
    else:
        merged = [one for rank in order for one in logs[int(rank)]]
    store.disk.log = before + merged
    assert store.commit(step, files, {}) == []


class Look:
    """What a tree holds, found by our own reader; a tree is looked at once."""

    def __init__(self, folder):
        self.folder, self.known = folder, {}

    def __call__(self, tree) -> tuple[int | None, bool]:
        """(the step that is loaded, is there anything that looks complete and is not)"""
        key = frozenset(tree.items())
        if key not in self.known:
            self.folder.mkdir()
            write_tree(tree, self.folder)
            self.known[key] = self._look(Store(self.folder / "runs"))
            shutil.rmtree(self.folder)
        return self.known[key]

    def _look(self, store: Store) -> tuple[int | None, bool]:
        step, passed = store.newest_good()
        torn = bool(passed) or not all(map(store.is_good, store.steps()))
        if step is not None:
            for rank, file in enumerate(store.open(step)[1]):
                (entry,), got = file.entries, torch.empty(EACH, dtype=torch.float64)
                file.read(entry, 0, 8 * EACH, bytes_of(got))
                assert file.plain == {"step": step} and entry.start == (EACH * rank,)
                assert torch.equal(got, values_of(step, rank))
        return step, torn


@pytest.fixture
def look(tmp_path):
    return Look(tmp_path / "cut")


def bad_states(look, before, log, old, new, all_of_them=True, **limits) -> tuple[list[str], int]:
    """Of every crash point: what is wrong with the states there, or the first that is; and how many there are."""
    model, found, count = Model(before), [], 0
    for number in range(len(log) + 1):
        returned = number == len(log)
        for tree in model.states(seed=number, **limits):
            step, torn = look(tree)
            count += 1
            if torn:
                found.append(f"after {number}: complete and damaged")
            elif step != new and (returned or step != old):
                found.append(f"after {number}: {step}")
            if found and not all_of_them:
                return found, count
        if not returned:
            model.do(log[number])
    return found, count


def recorded(folder, steps, keep=1, order="01") -> tuple[dict, list]:
    """The tree before the last of these saves, and its operations."""
    store = Store(folder / "runs", keep, Recorder(folder))
    for step in steps:
        before, store.disk.log = without_lock(read_tree(folder)), []
        save(store, step, order)
    store.unlock()
    return before, store.disk.log


def without_lock(tree):
    return {path: content for path, content in tree.items() if not path.endswith("lock")}


@pytest.mark.parametrize("order", ["01", "10", "turns"])
def test_every_state_has_the_old_checkpoint_or_the_new_one(tmp_path, look, order):
    (tmp_path / "real").mkdir()
    before, log = recorded(tmp_path / "real", [1, 2], order=order)
    found, count = bad_states(look, before, log, 1, 2)
    assert not found
    assert count > 100 and {step for step, _ in look.known.values()} == {1, 2}


def test_the_first_checkpoint_and_its_folder_stay(tmp_path, look):
    (tmp_path / "real").mkdir()
    before, log = recorded(tmp_path / "real", [1])
    found, _ = bad_states(look, before, log, None, 1)
    assert not found and before == {}


def test_a_crash_while_a_crash_is_cleaned_up(tmp_path, look):
    """From states that a crash left, drawn: the next save, and a crash in it."""
    (tmp_path / "real").mkdir()
    before, log = recorded(tmp_path / "real", [1, 2])
    bad_states(look, before, log, 1, 2)
    left = sorted(look.known, key=lambda tree: sorted((path, content or b"") for path, content in tree))
    count = 0
    for number, tree in enumerate(left[:: len(left) // 6]):
        folder = tmp_path / f"again-{number}"
        folder.mkdir()
        write_tree(dict(tree), folder)
        old, _ = look.known[tree]
        _, log = recorded(folder, [3])
        found, more = bad_states(look, dict(tree), log, old, 3, most=12)
        assert not found
        assert {path for path in read_tree(folder / "runs") if "/" not in path} == {"lock", "step-00000003"}
        count += more
    assert count > 300


# ---- protocols that are not enough


def numbers_of(log) -> dict[str, object]:
    """{name: number} of the files of a log."""
    return {path.rpartition("/")[2]: number for what, path, number, *_ in padded(log) if what == "create"}


def padded(log):
    return [(*operation, None, None)[:4] for operation in log]


def lacks(*gone):
    """Leaves out operations of which `gone` are the first words; a file by its name."""

    def change(log):
        numbers = numbers_of(log)
        wanted = [(what, numbers.get(of, of)) for what, of in gone]
        return [operation for operation in log if operation[:2] not in wanted]

    return change


def moved(chosen, where):
    """Operations for which `chosen` go to before the first for which `where`; None: to the end."""

    def change(log):
        numbers = numbers_of(log)
        ours = [one for one in log if chosen(one, numbers)]
        rest = [one for one in log if not chosen(one, numbers)]
        at = next((at for at, one in enumerate(rest) if where and where(one, numbers)), len(rest))
        return rest[:at] + ours + rest[at:]

    return change


def renamed(pairs, without=()):
    """The same calls at other paths."""

    def path_at(word):
        if isinstance(word, str):
            for a, b in pairs:
                word = word.replace(a, b)
        return word

    def change(log):
        return [tuple(map(path_at, one)) for one in log if one[0] != "rename" or one[1] not in without]

    return change


def both(first, second):
    return lambda log: second(first(log))


def about_manifest(one, numbers):
    return numbers["manifest.json.new"] in one or any(isinstance(x, str) and MANIFEST in x for x in one)


def removes_old(one, numbers):
    return isinstance(one[1], str) and one[1].startswith("runs/step-00000001")


def first_file(one, numbers):
    return one[0] == "create"


def named_manifest(one, numbers):
    return one[0] == "rename" and MANIFEST in one[2]


def synced_rank(one, numbers):
    return one[0] == "sync" and one[1] != numbers["manifest.json.new"]


OLD, NEW = "runs/step-00000001", "runs/step-00000002"
AT_ONCE = renamed([(NEW + ".writing", NEW)], without=[NEW + ".writing"])  # no name of its own while written
BROKEN = {
    "no sync of a rank's file": lacks(("sync", "rank-00001.safetensors")),
    "no sync of the manifest": lacks(("sync", "manifest.json.new")),
    "no sync of the names of ranks' files": lacks(("sync_folder", NEW + ".writing")),
    "no sync of the folder's name": lambda log: [
        one for at, one in enumerate(log) if at != log.index(("sync_folder", "runs"))
    ],
    "no sync of the manifest's name": lacks(("sync_folder", NEW)),
    "no sync of any folder": lambda log: [one for one in log if one[0] != "sync_folder"],
    "no sync at all": lambda log: [one for one in log if "sync" not in one[0]],
    "the manifest first": both(AT_ONCE, moved(about_manifest, first_file)),
    "files synced after the manifest": moved(synced_rank, None),
    "the manifest under its own name at once": renamed(
        [(MANIFEST + ".new", MANIFEST)], without=[f"{NEW}/{MANIFEST}.new"]
    ),
    "the old one removed before there is a new one": moved(removes_old, named_manifest),
    "the old one removed under its own name": renamed([(OLD + ".removing", OLD)], without=[OLD]),
    "the old one's new name not synced": lambda log: [
        one
        for at, one in enumerate(log)
        if one != ("sync_folder", "runs") or at == log.index(("sync_folder", "runs"))
    ],
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_protocol_that_lacks_a_step_is_caught(tmp_path, look, name):
    (tmp_path / "real").mkdir()
    before, log = recorded(tmp_path / "real", [1, 2])
    if name == "the manifest under its own name at once":
        log = [tuple(f"{NEW}/{MANIFEST}" if w == f"{NEW}/{MANIFEST}.new" else w for w in one) for one in log]
        broken = [one for one in log if one[0] != "rename" or one[1] != one[2]]
    else:
        broken = BROKEN[name](log)
    assert broken != log or "own name" in name
    found, _ = bad_states(look, before, broken, 1, 2, all_of_them=False, most=60)
    assert found


def test_a_folder_whose_own_name_is_not_synced_is_caught(tmp_path, look):
    (tmp_path / "real").mkdir()
    before, log = recorded(tmp_path / "real", [1])
    found, _ = bad_states(look, before, lacks(("sync_folder", "."))(log), None, 1)
    assert found and all(line == f"after {len(log) - 1}: None" for line in found)


def test_writing_in_place_is_caught(tmp_path, look):
    """The same step's files again, each synced, the manifest last."""
    (tmp_path / "real").mkdir()
    recorded(tmp_path / "real", [1])
    before = without_lock(read_tree(tmp_path / "real"))
    recorder, path = Recorder(tmp_path / "real"), tmp_path / "real" / OLD
    files = [write_file(recorder, path / file_name(rank), [piece(1, 1 - rank)], {}) for rank in range(RANKS)]
    with new_file(recorder, path / MANIFEST) as file:
        recorder.write(file, 0, manifest_text(1, files, {}))
    found, _ = bad_states(look, before, recorder.log, 1, 1, all_of_them=False, most=60)
    assert found


def test_the_model_knows_what_may_be_lost(tmp_path):
    """By hand: one file of two sectors in a folder, not synced; then synced; then its name, too."""
    recorder = Recorder(tmp_path)
    with new_file(recorder, tmp_path / "a") as file:
        recorder.write(file, 0, b"x" * 512)
        recorder.write(file, 512, b"y")
    recorder.sync_folder(tmp_path)
    create, first, second, sync, sync_folder = recorder.log
    model = Model()
    for operation in (create, first, second):
        model.do(operation)
    x, zeros = b"x" * 512, bytes(512)
    whole = {b"", x, zeros, x + b"y", x + b"\0", zeros + b"y", zeros + b"\0"}
    assert {tree.get("a") for tree in model.states()} == {None} | whole
    model.do(sync)
    assert {tree.get("a") for tree in model.states()} == {None, x + b"y"}
    model.do(sync_folder)
    assert model.states() == [{"a": x + b"y"}]
    model.do(("rename", "a", "b"))
    assert {frozenset(tree) for tree in model.states()} == {frozenset("a"), frozenset("b")}


def test_a_file_of_the_model_is_one_of_ours(tmp_path):
    """The recorded bytes are those on the disk: what is cut there is what is read here."""
    recorder = Recorder(tmp_path)
    written = write_file(recorder, tmp_path / file_name(0), [piece(1, 0)], {})
    recorder.sync_folder(tmp_path)
    model = Model()
    for operation in recorder.log:
        model.do(operation)
    (tree,) = model.states()
    assert tree == read_tree(tmp_path)
    assert isinstance(written, Written) and File(tmp_path / file_name(0), written).plain == {}
