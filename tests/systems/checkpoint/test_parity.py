"""Parity: any one rank comes back to the bit, two never by mistake, and the memory and bytes that it costs."""

# ruff: noqa: F401, F811   (a fixture of another module)
import os
import shutil
import signal
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch

from minitrain import collectives, launch
from minitrain.checkpoint.load import Saved
from minitrain.checkpoint.store import file_name
from minitrain.ranks.ledger import Ledger
from minitrain.systems.checkpoint.in_memory import Lost, Shares
from minitrain.systems.checkpoint.parity import (
    PARITY,
    WORD,
    ParityCopies,
    parities_of,
    rebuild,
    stripe,
    stripe_bytes,
)
from tests.parallel import check_refusals
from tests.systems.checkpoint.memory_runs import (
    STEPS,
    as_pieces,
    digest,
    load,
    machines,
    make_run,
    train,
    uninterrupted,
)

LAYOUT = dict(dp=4, zero=1)


def some_shares(ranks, size):
    """Of different sizes, so that most are padded."""
    random = np.random.default_rng(ranks + size)
    return [random.integers(0, 256, max(1, size - 5 * rank), dtype=np.uint8) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("size", [1, 40, 1000])
def test_every_set_of_ranks(ranks, size):
    shares = some_shares(ranks, size)
    parities = parities_of(shares)
    for count in range(ranks + 1):
        for lost in combinations(range(ranks), count):
            left = [None if rank in lost else share for rank, share in enumerate(shares)]
            kept = [None if rank in lost else words for rank, words in enumerate(parities)]
            if count > 1:
                with pytest.raises(ValueError, match="parity brings back one rank, not ") as error:
                    rebuild(left, kept, size)
                assert "\n" not in str(error.value) and str(list(lost)) in str(error.value)
                continue
            found = rebuild(left, kept, len(shares[lost[0]]) if lost else 0)
            assert all(np.array_equal(one, other) for one, other in zip(found, shares))


def test_the_price_of_parity():
    """1/(n-1) of the longest share, up to a word; with two ranks it is a copy of the other's share."""
    for ranks in range(2, 7):
        shares = some_shares(ranks, 7 * 8 * 60)
        (size,) = {WORD * len(words) for words in parities_of(shares)}
        assert size * (ranks - 1) == len(shares[0]) == 3360
    first, second = some_shares(2, 96)
    assert (
        parities_of([first, second])[0].view(torch.uint8)[: len(second)].numpy().tobytes() == second.tobytes()
    )


def test_no_two_stripes_of_a_share_meet():
    """So one lost rank takes one stripe from each home, and each stripe has a home."""
    for ranks in range(2, 7):
        share, length = np.arange((ranks - 1) * WORD, dtype=np.uint8), WORD
        for rank in range(ranks):
            homes = [stripe(share, rank, home, ranks, length) for home in set(range(ranks)) - {rank}]
            assert sorted(torch.cat(homes).view(torch.uint8).tolist()) == share.tolist()


# ---- on ranks


def start(machines, dying=None):
    """A start of the job, with parity after every step."""
    run, group = make_run(**LAYOUT), collectives.world()
    rank, first, twice = group.rank(), 0, []
    copies = ParityCopies(Shares(machines[rank], group))
    for again in range(0 if dying is not None else 2):
        first = load(run, *copies.recover())
        twice.append(digest(run))
        if not again:
            train(run, first, first + 1)
    victim = next(param for param in run.model.parameters() if param.requires_grad)

    def after(step):
        copies.save(step, run.pieces(), run.plain_state(), {})
        if step == 3 and rank == dying:
            victim.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))

    losses = train(run, first, STEPS, after)
    return first, losses, digest(run), twice


def test_reft(machines):
    """One of four is killed in the middle of a step, and its memory is gone: its share is rebuilt from the others'
    and training ends with the same bits. Two: one line."""
    whole = launch.run(lambda: uninterrupted(**LAYOUT), ranks=4)
    with pytest.raises(launch.RankError, match="rank 1 died of SIGKILL"):
        launch.run(lambda: start(machines, dying=1), ranks=4)
    shutil.rmtree(machines[1])
    for (losses, end), (first, after, end_too, twice) in zip(
        whole, launch.run(lambda: start(machines), ranks=4)
    ):
        assert first == 3 and after == losses[3:] and end == end_too and twice[0] == twice[1]
    shares = [next(machine.rglob(f"step-*6/{file_name(rank)}")) for rank, machine in enumerate(machines)]
    longest = max(share.stat().st_size for share in shares)
    for machine in machines:
        (kept,) = machine.rglob(f"step-*6/{PARITY}")
        assert longest / 3 <= kept.stat().st_size < longest / 3 + 400, (
            "1/(n-1) and a header; a copy has it all"
        )


def every_rank(machines):
    """Each rank lost in turn, and each two; sizes and bytes. The last has so little that stripes of it are empty."""
    group = collectives.world()
    rank, said, sent = group.rank(), {}, {}
    size = 100 if rank == 3 else 4000 + 40 * rank
    shares = Shares(machines[rank], group)
    copies = ParityCopies(shares)
    for step in (1, 2):
        with Ledger() as ledger:
            copies.save(step, as_pieces(step, rank, size), {}, {})
    sent["save"] = ledger.sent_bytes("send")
    files = [shares.store.path(2) / name for name in (file_name(rank), PARITY)]
    sizes = [path.stat().st_size for path in files]
    for count in range(4):
        for lost in combinations(range(4), count):
            spare = machines[rank] / f"spare-{lost}"
            found = ParityCopies(Shares(spare if rank in lost else machines[rank], group))
            with Ledger() as ledger:
                try:
                    manifest, opened = found.recover(wanted=[rank])
                except Lost as error:
                    said[lost] = str(error)
                    continue
            sent[lost] = ledger.sent_bytes("send")
            said[lost] = opened[0].path.read_bytes() == files[0].read_bytes()
            said[lost] &= opened[0].read_bytes == opened[0].entries[0].size  # verified
            (piece,) = as_pieces(2, rank, size)
            wanted = replace(piece, values=torch.zeros_like(piece.values))
            Saved(opened).fill(wanted)
            said[lost] &= torch.equal(wanted.values, piece.values)
            opened[0].close()
    if rank == 2:  # a byte of its parity: it does not matter as long as nobody else is lost
        data = bytearray(files[1].read_bytes())
        data[-1] ^= 1
        files[1].write_bytes(data)
    collectives.barrier(group)
    manifest, opened = ParityCopies(Shares(machines[rank], group)).recover(wanted=[rank])
    assert opened[0].path.read_bytes() == files[0].read_bytes() and manifest["step"] == 2
    if rank == 3:
        data = bytearray(files[0].read_bytes())
        data[-1] ^= 1
        files[0].write_bytes(data)
    collectives.barrier(group)
    said["damaged"] = ParityCopies(Shares(machines[rank], group)).recover(wanted=[rank])[0]["step"]
    return said, sent, sizes


def test_every_rank_is_rebuilt_from_the_others(machines):
    results = launch.run(every_rank, machines, ranks=4)
    length = stripe_bytes([sizes[0] for _, _, sizes in results], 4)
    for rank, (said, sent, (share, parity_file)) in enumerate(results):
        assert sent["save"] == 3 * length, "the padded share"
        assert parity_file - length < 400, "1/(n-1) of the share, and a header"
        assert 3 * length - 3 * WORD < max(sizes[0] for _, _, sizes in results) <= 3 * length
        for lost, words in said.items():
            if lost == "damaged":
                assert words == 1, "two of step 2, so the step before"
            elif len(lost) > 1:
                assert f"step 2: ranks {list(lost)} are lost, parity brings back one" in words
                assert words == results[0][0][lost]
            else:
                assert words is True
                assert sent[lost] == (3 * length if lost and rank not in lost else 0)


def test_parity_needs_another_rank(machines):
    alone = lambda: ParityCopies(Shares(machines[0], collectives.world()))
    check_refusals({"parity on 1 rank: there is no other": alone}, ranks=1)
