"""What each way of the literature waits for, as events and bytes: a row of the atlas each."""

import threading
from dataclasses import replace

import torch

from minitrain import collectives, launch
from minitrain.checkpoint.load import Saved
from minitrain.checkpoint.saver import SAVE_POLICIES, Saver
from minitrain.checkpoint.store import Store
from minitrain.data_parallel import states
from minitrain.ranks.ledger import Ledger
from minitrain.ranks.pieces import Piece, share_out
from tests.checkpoint import saver_runs

SHARE = 2 * 1024  # bytes of a rank: four pieces of 512, of which each of two ranks has two
CHUNK = 512


def pieces(value=1.0):
    """Four that both ranks hold alike."""
    made = saver_runs.some_pieces(64, 64, 64, 64, value=value)
    holders = (collectives.world(),)
    return [Piece(p.name, p.whole, p.start, p.values, holders) for p in made]


def saver_of(folder, name, **changes):
    """(saver, its disk, a hold of its copies), all that is asked for done at once."""
    way = SAVE_POLICIES[name]
    changes = ({"chunk_bytes": CHUNK} if way.chunk_bytes else {}) | changes
    disk = saver_runs.HeldDisk()
    saver = Saver(Store(folder, keep=9, disk=disk), policy=replace(way, **changes))
    return saver, disk, saver_runs.Hold(saver.snapshot, saver_runs.ALL)


def waits(saver):
    return [(wait.why, wait.bytes) for wait in saver.waits]


def written_bytes(folder, step):
    """Bytes of pieces in the files of each rank."""
    _, files = Store(folder).open(step)
    return [sum(entry.size for entry in file.entries) for file in files]


def whole(folder, step, value=1.0):
    """Is the union of what was written all there is?"""
    made = saver_runs.some_pieces(64, 64, 64, 64, value=value)
    return not saver_runs.differing(Store(folder), step, made)


def sync_on_ranks(folder):
    """One writer, and all; how far the disk is when `save` returns."""
    found = []
    for name, writers in (("one", 1), ("all", None)):
        saver, disk, _ = saver_of(f"{folder}/{name}", "sync", writers=writers)
        saver.save(1, pieces(), {}, {})
        found.append((waits(saver), saver.store.steps(), bool(saver.under_way)))
        saver.close()
        found.append((written_bytes(f"{folder}/{name}", 1), whole(f"{folder}/{name}", 1)))
    return found


def test_sync_ckpt(tmp_path):
    """Training stands still for copy and write of all of it; shared out over dp ranks, for 1/dp."""
    results = launch.run(sync_on_ranks, str(tmp_path), ranks=2)
    for rank, (one, one_files, all_, all_files) in enumerate(results):
        size = SHARE if rank == 0 else 0
        assert one == ([("copy", size), ("write", size)], [1], False) and one_files == ([SHARE, 0], True)
        assert all_ == ([("copy", SHARE // 2), ("write", SHARE // 2)], [1], False)
        assert all_files == ([SHARE // 2, SHARE // 2], True)


# ---- snapshot: for the copy --------------------------------------------------------------------------------


def snapshot_on_ranks(folder, name):
    """The disk is stopped: what does training wait for, and when may it save again?"""
    saver, disk, hold = saver_of(folder, name)
    disk.allow(0)
    values = pieces()
    saver.save(1, values, {}, {})  # returns while nothing can be written
    for piece in values:
        piece.values.zero_()  # and all may change
    saver.before_update()
    saver.after_step()
    began, real = waits(saver), saver._end
    saver._end = lambda: (disk.allow(), real())
    saver.save(2, pieces(2.0), {}, {})
    then = waits(saver)[len(began) :]
    saver.close()
    return began, then, saver.store.steps(), whole(folder, 1), whole(folder, 2, 2.0)


def test_snapshot_stall_ckpt(tmp_path, name="snapshot"):
    """The stall is the copy of the share; the next snapshot waits until the last is written."""
    results = launch.run(snapshot_on_ranks, str(tmp_path), name, ranks=2)
    for rank, (began, then, steps, first, second) in enumerate(results):
        size = SHARE * (rank == 0) if name == "snapshot" else SHARE // 2
        assert began == [("copy", size)] and then == [("previous save", size), ("copy", size)]
        assert steps == [1, 2] and first and second


def test_megascale_ckpt(tmp_path):
    """Two stages: training waits for the first alone. In recovery one of dp ranks reads and tells the others."""
    test_snapshot_stall_ckpt(tmp_path)
    everyone, one = zip(*launch.run(read_on_ranks, str(tmp_path), ranks=2))
    assert sum(everyone) == 2 * sum(one) == 2 * SHARE


def read_on_ranks(folder):
    """Bytes this rank reads of the checkpoint, alone and with one reader for both."""
    found = []
    for broadcast in (False, True):
        _, files = Store(folder).open(1)
        saved, wanted = Saved(files, broadcast), pieces()
        for piece in wanted:
            piece.values.zero_()
            saved.fill(piece)
        assert all(torch.equal(piece.values, of.values) for piece, of in zip(wanted, pieces()))
        found.append(saved.read_bytes)
    return found


def deepfreeze_on_ranks(folder):
    """A run whose parameters all four ranks hold alike."""
    run = saver_runs.run_of(dp=4)
    saver_runs.train(run, 0)
    saver = Saver(Store(folder), policy="deepfreeze")
    held = [p for p in run.pieces() if not p.name.startswith("random/")]  # a rank's own
    wanted = saver_runs.copies(held)
    total = sum(p.values.numel() * p.values.element_size() for p in wanted)
    saver.save(1, held, run.plain_state(), {})
    saver.close()
    return total, written_bytes(folder, 1), saver_runs.differing(saver.store, 1, wanted)


def test_deepfreeze(tmp_path):
    """The stall is the light copy of a share; each of dp ranks writes 1/dp, to an element per dtype; together it is
    the state."""
    test_snapshot_stall_ckpt(tmp_path / "stall", "deepfreeze")
    for total, sizes, differs in launch.run(deepfreeze_on_ranks, str(tmp_path), ranks=4):
        assert sum(sizes) == total and max(sizes) - min(sizes) <= 8 and not differs


def asynchronous_on_ranks(folder, name):
    """One of two pieces is copied when the update begins; then, one more step without a stall."""
    saver, _, hold = saver_of(folder, name)
    hold.allow(1)
    values, snapshot = pieces(), saver.snapshot
    saver.save(1, values, {}, {})
    snapshot.wait([f"p{2 * saver.rank}"])  # the first piece of this rank
    real = snapshot.wait
    snapshot.wait = lambda names: (hold.allow(), real(names))
    saver.before_update()
    stalled = waits(saver)
    for piece in values:
        piece.values.zero_()
    saver.finish()
    saver.save(2, pieces(2.0), {}, {})
    real()  # forward and backward are long enough
    saver.before_update()
    more = [why for why, _ in waits(saver)[len(stalled) :]]
    saver.close()
    return stalled, more, whole(folder, 1), whole(folder, 2, 2.0)


def test_async_ckpt(tmp_path, name="asynchronous"):
    """The stall is what is left to copy when the update begins, 512 of 1,024 bytes; nothing if nothing is."""
    for stalled, more, first, second in launch.run(asynchronous_on_ranks, str(tmp_path), name, ranks=2):
        assert stalled == [("copy", SHARE // 4)] and "copy" not in more and first and second


def torchsnapshot_on_ranks(folder):
    """The second chunk is not copied before the first is written."""
    saver, disk, hold = saver_of(folder, "torchsnapshot")
    hold.allow(1)
    seen = []

    def when_written():
        disk.until(1)
        seen.append(saver.snapshot.copied)
        hold.allow()

    thread = threading.Thread(target=when_written)
    thread.start()
    saver.save(1, pieces(), {}, {})
    thread.join(saver_runs.DEADLOCK_S)
    saver.close()
    return seen, waits(saver)[:1], written_bytes(folder, 1), whole(folder, 1)


def test_torchsnapshot(tmp_path):
    """Writing begins with the first chunk, and each replica writes 1/dp: so of n equal chunks all but one of
    the shorter kind of work are hidden, max(copy, write) and one chunk of the other."""
    for seen, stalled, sizes, all_ in launch.run(torchsnapshot_on_ranks, str(tmp_path), ranks=2):
        assert seen == [1] and stalled == [("copy", SHARE // 2)] and sizes == [SHARE // 2] * 2 and all_


def lightcheck_on_ranks(folder):
    run = saver_runs.run_of(dp=2, zero=2)
    saver = Saver(Store(folder), policy=replace(SAVE_POLICIES["lightcheck"], chunk_bytes=4000))
    updates, hold, snapshot = [], saver_runs.Hold(saver.snapshot, saver_runs.ALL), saver.snapshot

    def before_update(names):
        if saver.under_way:
            until = snapshot.until(names)
            updates.append((names, until))
            hold.allow(max(hold.allowed, until))  # of what comes later nothing is copied
        saver.before_update(names)

    states.tell_updates(run.sync, before_update)
    saver_runs.train(run, 0)
    wanted = saver_runs.copies(run.pieces())
    hold.allow(0)
    saver.save(1, run.pieces(), run.plain_state(), {})
    first = snapshot.copied, snapshot.bytes
    saver_runs.train(run, 1)
    hold.allow()
    saver.close()
    stalls = [wait.bytes for wait in saver.waits if wait.why == "copy"]
    named = {name for names, _ in updates for name in names}
    return first, updates, stalls, named, len(snapshot.blocks), saver_runs.differing(saver.store, 1, wanted)


def test_lightcheck(tmp_path):
    """Copies are in the order of updates, and each update waits for its own: no stall is of all of it."""
    results = launch.run(lightcheck_on_ranks, str(tmp_path), ranks=2)
    for first, updates, stalls, named, blocks, differs in results:
        copied, size = first
        needs = [until for _, until in updates]
        assert copied == 0 and needs == sorted(needs) and len(updates) > 3
        assert needs[-1] == blocks - 1  # no update changes the copy of the random state
        assert max(stalls) < size / 2 and len(stalls) >= 3
        assert not differs


def datastates_on_ranks(folder):
    saver, disk, hold = saver_of(folder, "datastates", slots=1)
    snapshot, addresses = saver.snapshot, set()
    values, host = pieces(), []
    disk.allow(0)
    with Ledger() as ledger:
        for step in (1, 2, 3):
            values = pieces(float(step))
            saver.save(step, values, {}, {})
            if step == 1:
                # One of two chunks fits: the update waits until it is written.
                real = snapshot.wait
                real([f"p{2 * saver.rank}"])
                missing = snapshot.missing_bytes(), snapshot.bytes
                snapshot.wait = lambda names: (disk.allow(), real(names))
            saver.before_update()
            for piece in values:
                piece.values.zero_()
            addresses.add(snapshot.memory.data_ptr())
            host.append((ledger.host_bytes, ledger.host_peak_bytes))
            saver.finish()
            real()
        saver.save(4, pieces(4.0), {}, {})
        real()
        count = len(saver.waits)
        saver.before_update()
        again = len(saver.waits) - count
    saver.close()
    good = [whole(folder, step, float(step)) for step in (1, 2, 3, 4)]
    return missing, waits(saver)[0], again, len(addresses), host, good


def test_datastates_llm(tmp_path):
    """From memory for one chunk of two: allocated once; the update waits only for an unfinished copy."""
    results = launch.run(datastates_on_ranks, str(tmp_path), ranks=2)
    for missing, first, again, addresses, host, good in results:
        assert missing == (CHUNK, 2 * CHUNK) and first == ("copy", CHUNK) and again == 0
        assert addresses == 1 and set(host) == {(CHUNK, CHUNK)} and all(good)


# ---- fastpersist: two buffers by turns, some of the writers ------------------------------------------------


def fastpersist_on_ranks(folder):
    """One rank writes all: four chunks. A write ends when the next buffer is full, or being so."""
    saver, disk, hold = saver_of(folder, "fastpersist", writers=1)
    snapshot, log, lock = saver.snapshot, [], threading.Lock()
    move, write = hold.real, disk.write
    filled = [threading.Event() for _ in range(5)]

    def fill(*args):
        with lock:
            log.append(("fill", snapshot.blocks[snapshot.copied].chunk))
        move(*args)
        filled[snapshot.blocks[snapshot.copied].chunk].set()

    def slow_write(file, offset, data):
        if len(data) == CHUNK and disk._paths[file].name.startswith("rank"):
            chunk = sum(kind == "write" for kind, _ in log)
            if chunk < 3:
                assert filled[chunk + 1].wait(saver_runs.DEADLOCK_S)  # filled beside this write
            with lock:
                log.append(("write", chunk))
        write(file, offset, data)

    snapshot.move, disk.write = fill, slow_write
    saver.save(1, pieces(), {}, {})
    saver.close()
    return log, written_bytes(folder, 1), whole(folder, 1), snapshot.memory.nbytes


def shares(writers):
    return [sum(p.values.numel() for p in share_out(pieces(), writers))]


def test_fastpersist(tmp_path):
    """Buffer k is written while k + 1 fills, and k + 2 waits: max(fill, write) each; all beside the next forward and
    backward, and the update waits."""
    test_async_ckpt(tmp_path / "beside", "fastpersist")
    ranks = launch.run(fastpersist_on_ranks, str(tmp_path), ranks=2)
    log, sizes, all_, memory = ranks[0]
    assert memory == 2 * CHUNK and sizes == [SHARE, 0] and all_ and ranks[1][0] == []
    for chunk in range(4):
        assert log.index(("fill", chunk)) < log.index(("write", chunk))
        if chunk < 2:
            assert log.index(("fill", chunk + 2)) > log.index(("write", chunk))

    for writers, wanted in ((1, [256, 0, 0, 0]), (3, [85, 85, 86, 0]), (4, [64] * 4), (9, [64] * 4)):
        found = launch.run(shares, writers, ranks=4)
        assert [share for (share,) in found] == wanted


def test_every_way_has_a_paper_or_a_name():
    assert all(way.paper for way in SAVE_POLICIES.values())
    assert len({way.paper for way in SAVE_POLICIES.values()}) == len(SAVE_POLICIES)
    assert torch.equal(saver_runs.some_pieces(2)[0].values, torch.tensor([1.0, 2.0]).double())
