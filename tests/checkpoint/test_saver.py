"""Savers on ranks: what is saved is what was there, waits are counted, and an error is everybody's."""

import threading
from dataclasses import replace

from minitrain import collectives, launch
from minitrain.checkpoint.saver import SAVE_POLICIES, NotSaved, SavePolicy, Saver, Wait
from minitrain.checkpoint.store import Store
from minitrain.ranks.events import Issue
from minitrain.ranks.ledger import Ledger
from minitrain.ranks.pieces import Piece
from tests.checkpoint.saver_runs import HeldDisk, Hold, copies, differing, run_of, some_pieces, train
from tests.parallel import check_refusals

SLOW = SavePolicy(copy="overlapped")
KEPT = "older checkpoints are as they were, training can go on"


def shared(*sizes, value=1.0):
    """Pieces that both ranks hold alike."""
    holders = (collectives.world(),)
    return [Piece(p.name, p.whole, p.start, p.values, holders) for p in some_pieces(*sizes, value=value)]


def our_threads():
    return sum("a checkpoint" in thread.name for thread in threading.enumerate())


def plain_waits(saver):
    return [(wait.step, wait.why, wait.bytes) for wait in saver.waits]


# ---- in training -------------------------------------------------------------------------------------------


def train_and_save(folder, way):
    run, wanted, losses = run_of(dp=2, zero=2), {}, []
    small = replace(way, chunk_bytes=way.chunk_bytes and 4000)
    with Saver(Store(folder, keep=9), policy=small) as saver:
        run.attach(saver)
        for step in range(6):
            losses += train(run, step)
            saver.after_step()
            if step in (1, 2, 5):
                wanted[step] = copies(run.pieces())
                saver.save(step, run.pieces(), run.plain_state(), {"seen": step})
    steps = saver.store.steps()
    differ = {step: differing(saver.store, step, pieces) for step, pieces in wanted.items()}
    return losses, steps, differ, our_threads(), saver.store.manifest(5)["seen"]


def every_way(folder):
    plain = train(run_of(dp=2, zero=2), *range(6))
    return plain, [train_and_save(f"{folder}/{name}", way) for name, way in SAVE_POLICIES.items()]


def test_every_way_saves_what_was_there_and_training_does_not_notice(tmp_path):
    for plain, outcomes in launch.run(every_way, str(tmp_path), ranks=2, timeout_s=300):
        for losses, steps, differ, left, seen in outcomes:
            assert losses == plain and steps == [1, 2, 5] and seen == 5
            assert not any(differ.values())
            assert left == 0  # `close` leaves none


# ---- waits -------------------------------------------------------------------------------------------------


def one_after_the_other(folder):
    """Saves of steps 1, 2 and 3; the disk of this rank begins to write when something waits for it."""
    disk = HeldDisk(allowed=0)
    saver = Saver(Store(folder, keep=9, disk=disk), policy=SLOW)
    real = saver._end
    saver._end = lambda: (disk.allow(), real())
    for step in (1, 2, 3):
        saver.save(step, shared(16, 16, value=step), {}, {})
        saver.before_update()
        saver.after_step()
        if step == 1:
            assert saver.under_way and saver.last is None
    saver.close()
    found = {}
    for step in (1, 2, 3):
        wanted = [Piece(p.name, p.whole, p.start, p.values) for p in some_pieces(16, 16, value=step)]
        found[step] = differing(saver.store, step, wanted)
    return plain_waits(saver), found, saver.store.steps(), saver.last.step


def test_a_save_waits_for_the_one_before(tmp_path):
    """Of 32 numbers that two ranks hold alike each writes 16, or 128 bytes."""
    for waits, found, steps, last in launch.run(one_after_the_other, str(tmp_path), ranks=2):
        previous = [wait for wait in waits if wait[1] == "previous save"]
        assert previous[0] == (1, "previous save", 128) and len(previous) == 2
        assert steps == [1, 2, 3] and not any(found.values()) and last == 3


def waits_before_update(folder):
    now = [0.0]
    saver = Saver(Store(folder), policy=SLOW, clock=lambda: now[0])
    hold = Hold(saver.snapshot)
    saver.save(1, shared(16, 16), {}, {})
    saver.after_step()  # a step without an update
    real = saver.snapshot.wait

    def wait(names):
        now[0] += 5
        hold.allow()
        real(names)

    saver.snapshot.wait = wait
    saver.before_update(["p0"])  # this way knows no layers
    assert not saver.snapshot.missing_bytes()
    saver.before_update()
    now[0] += 2
    saver.after_step()
    assert saver.update_s == 2 and saver.waits[0].s == 5  # an update without its waits
    saver.close()
    return plain_waits(saver), all(type(wait) is Wait and wait.s >= 0 for wait in saver.waits)


def waits_for(folder):
    """Whose copies an update of one layer waits for, where the way knows layers, and where all change."""
    saver, asked = Saver(Store(folder), policy=replace(SLOW, by_layer=True)), []
    hold, real = Hold(saver.snapshot), saver.snapshot.wait
    saver.save(1, shared(16, 16), {}, {})
    saver.snapshot.wait = asked.append  # nothing is copied, and nobody waits
    saver.before_update(iter([f"p{saver.rank}"]))
    saver.before_update()
    saver.snapshot.wait = real
    hold.allow()
    saver.close()
    return asked


def test_the_update_waits_once_and_for_all(tmp_path):
    def rank(folder):
        assert waits_for(f"{folder}/layers") == [[f"p{collectives.world().rank()}"], None]
        return waits_before_update(f"{folder}/one")

    for waits, typed in launch.run(rank, str(tmp_path), ranks=2):
        assert waits[0] == (1, "copy", 128) and [why for _, why, _ in waits].count("copy") == 1 and typed


def one_is_slow(folder):
    """Rank 0 has written, rank 1 has not."""
    rank = collectives.world().rank()
    disk = HeldDisk(allowed=0 if rank else 9)
    saver = Saver(Store(folder, disk=disk), policy=SLOW)
    saver.save(1, shared(16, 16), {}, {})
    saver.before_update()
    if rank == 0:
        saver.under_way.task.result()
    for _ in range(3):
        saver.after_step()
    before = bool(saver.under_way), saver.store.steps()
    disk.allow()
    saver.close()
    Store(folder).verify(1)
    if rank == 0:
        after = Store(folder)
        after.begin(2)  # a saver that is closed has no lock
        after.unlock()
    return before, saver.store.steps()


def test_it_is_committed_when_all_have_written(tmp_path):
    assert launch.run(one_is_slow, str(tmp_path), ranks=2) == [((True, []), [1])] * 2


def account(folder):
    """(bytes, calls) of: a save, a step while it is written, steps until it is complete, one without."""
    disk = HeldDisk(allowed=0)
    saver, found = Saver(Store(folder, disk=disk), policy=SLOW), []

    def of(fn):
        with Ledger() as ledger:
            fn()
        found.append((ledger.sent_bytes(), ledger.num_calls()))

    of(lambda: saver.save(1, shared(16), {}, {}))
    of(saver.before_update)
    of(saver.after_step)
    disk.allow()
    of(saver.finish)
    of(saver.after_step)
    saver.close()
    return found


def test_ranks_say_32_bytes_to_each_other_while_a_save_is_under_way(tmp_path):
    for save, update, step, finish, after in launch.run(account, str(tmp_path), ranks=2):
        assert save == step == (32, 1) and update == after == (0, 0)
        assert finish == (64, 2)  # all have written; it is committed


# ---- errors ------------------------------------------------------------------------------------------------


def breaks(folder, call, rank):
    """A save that works, one in which a call to the disk of a rank fails, one that works again."""
    disk = HeldDisk()
    saver = Saver(Store(folder, disk=disk), policy=SLOW)
    me = collectives.world().rank()

    def steps(step):
        saver.save(step, shared(16, 16, value=step), {}, {})
        for _ in range(50):
            saver.before_update()
            saver.after_step()
            if not saver.under_way:
                return
            saver.under_way.task.exception()  # let the disk catch up

    steps(1)
    said = "nothing"
    disk.broken = call if me == rank else ""
    try:
        with Ledger() as ledger:
            steps(2)
    except NotSaved as error:
        said = str(error)
    texts = [e.payload_bytes for e in ledger.events if isinstance(e, Issue) and e.payload_bytes > 2 * 32]
    assert texts == [2 * 400], "of each rank, once"
    between = saver.store.steps()
    disk.broken = ""
    steps(3)
    saver.close()
    wanted = [Piece(p.name, p.whole, p.start, p.values) for p in some_pieces(16, 16, value=3)]
    return said, between, saver.store.steps(), differing(saver.store, 3, wanted), bool(saver.under_way)


def all_breaks(folder):
    cases = [(call, rank) for call in ("create", "write", "sync") for rank in (0, 1)]
    cases += [("make_folder", 0), ("rename", 0)]
    return {case: breaks(f"{folder}/{case[0]}{case[1]}", *case) for case in cases}


def test_what_one_rank_cannot_write_all_hear_in_one_line(tmp_path):
    ranks = launch.run(all_breaks, str(tmp_path), ranks=2)
    for case, (said, between, steps, differs, busy) in ranks[0].items():
        call, rank = case
        assert ranks[1][case][0] == said
        assert said.startswith(f"cannot save step 2: rank {rank}: ") and said.endswith(KEPT)
        assert "No space left on device" in said and "\n" not in said
        if call in ("create", "write", "sync"):
            assert f"step-00000002.writing/rank-0000{rank}.safetensors: No space" in said
        assert between == [1] and steps == [1, 3] and not differs and not busy


def more_errors(folder):
    rank = collectives.world().rank()
    saver, found = Saver(Store(f"{folder}/a", disk=HeldDisk()), policy=SLOW), {}

    def heard(name, fn):
        try:
            fn()
            found[name] = "nothing"
        except NotSaved as error:
            found[name] = str(error).removesuffix(f"; {KEPT}")

    def fails(*args):
        raise RuntimeError("the device\nis gone")

    move, saver.snapshot.move = saver.snapshot.move, fails if rank else saver.snapshot.move
    saver.save(1, shared(16), {}, {})
    saver.before_update()
    heard("copy, told by the next save", lambda: saver.save(2, shared(16), {}, {}))
    saver.snapshot.move = move
    saver.save(3, shared(16), {}, {})
    saver.finish()
    heard("the same step again", lambda: saver.save(3, shared(16), {}, {}))
    saver.store.disk.broken = "sync" if rank else ""
    saver.save(4, shared(16), {}, {})
    heard("at close", saver.close)
    closed = saver.closed, our_threads()
    synchronous = Saver(Store(f"{folder}/b", disk=(disk := HeldDisk())), policy="sync")
    disk.broken = "sync"
    heard("both, at once", lambda: synchronous.save(1, shared(16), {}, {}))
    disk.broken = ""
    synchronous.save(1, shared(16), {}, {})
    synchronous.close()
    return found, closed, saver.store.steps(), synchronous.store.steps()


def test_no_error_is_lost(tmp_path):
    ranks = launch.run(more_errors, str(tmp_path), ranks=2)
    assert ranks[0][0] == ranks[1][0]
    for found, (closed, left), steps, others in ranks:
        assert "cannot save step 1: rank 1: " in found["copy, told by the next save"]
        assert "the device is gone" in found["copy, told by the next save"]
        assert "step 3: rank 0: " in (again := found["the same step again"]) and "is there already" in again
        assert "cannot save step 4: rank 1: " in found["at close"] and "No space" in found["at close"]
        assert "step 1: rank 0 (and 1 more ranks): " in (both := found["both, at once"])
        assert "rank-00000.safetensors: " in both  # and it is the error of that rank
        assert closed and left == 0 and steps == [3] and others == [1]


def leaves(folder):
    """An exception inside of `with`, a slot being written: nobody waits for other ranks, no thread is left."""
    disk = HeldDisk(allowed=0)
    saver = Saver(Store(folder, disk=disk), policy=replace(SLOW, chunk_bytes=64, slots=1))
    snapshot = saver.snapshot
    give_up, snapshot.give_up = snapshot.give_up, lambda: (give_up(), disk.allow())
    try:
        with saver:
            saver.save(1, shared(16, 16, 16, 16), {}, {})
            assert our_threads() == 2
            raise KeyError("training has failed")
    except KeyError as error:
        return str(error), our_threads(), saver.store.steps(), snapshot.copied < len(snapshot.blocks)


def test_an_error_of_training_ends_threads_and_waits_for_nobody(tmp_path):
    for said, left, steps, unfinished in launch.run(leaves, str(tmp_path), ranks=2):
        assert "training has failed" in said and left == 0 and steps == [] and unfinished


def test_bad_input_is_refused(tmp_path):
    def closed():
        saver = Saver(Store(tmp_path))
        saver.close()
        saver.save(1, [], {}, {})

    refused = {
        "policy='fast': use sync, sync_sharded, snapshot,": lambda: Saver(Store(tmp_path), policy="fast"),
        "step 1 cannot be saved: the saver is closed": closed,
        "copy='later': use now, overlapped": lambda: SavePolicy(copy="later"),
        "write='never': use now, background": lambda: SavePolicy(write="never"),
        "slots=0: use a whole number": lambda: SavePolicy(slots=0),
        "slots=2: slots hold chunks": lambda: SavePolicy(slots=2),
        "by_layer=True with copy='now': nothing waits": lambda: SavePolicy(by_layer=True),
        "write='now' with copy='overlapped'": lambda: SavePolicy(copy="overlapped", write="now"),
    }
    check_refusals(refused, ranks=1)
