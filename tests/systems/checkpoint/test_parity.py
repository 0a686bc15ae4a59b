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
from minitrain.systems.checkpoint.in_memory import (
    PARITY,
    WORD,
    Lost,
    ParityCopies,
    Shares,
    stripe,
    stripe_bytes,
)
from tests.parallel import Traffic, check_refusals
from tests.saving import spoil
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


def test_no_two_stripes_of_a_share_meet():
    """So one lost rank takes one stripe from each home, and each stripe has a home."""
    for ranks in range(2, 7):
        share, length = np.arange((ranks - 1) * WORD, dtype=np.uint8), WORD
        for rank in range(ranks):
            homes = [stripe(share, rank, home, ranks, length) for home in set(range(ranks)) - {rank}]
            assert sorted(torch.cat(homes).view(torch.uint8).tolist()) == share.tolist()


# ---- on ranks


def start(machines, dying=None):
    """A start of the job, with parity of every step beside the forward of the next."""
    run, group = make_run(**LAYOUT), collectives.world()
    rank, first, twice = group.rank(), 0, []
    copies = ParityCopies(Shares(machines[rank], group))
    for again in range(0 if dying is not None else 2):
        first = load(run, *copies.recover())
        twice.append(digest(run))
        if not again:
            train(run, first, first + 1)
    victim = next(param for param in run.model.parameters() if param.requires_grad)
    for layer in run.model.layers:  # four: three rounds, and then the step counts
        layer.register_forward_pre_hook(lambda *_: copies.send_some())

    def after(step):
        copies.begin(step, run.pieces(), run.plain_state(), {})
        whole = copies.shares.store.steps()
        assert step not in whole and (step == first + 1 or step - 1 in whole)
        if step == 3 and rank == dying:
            victim.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))

    losses = train(run, first, STEPS, after)
    copies.finish()
    return first, losses, digest(run), twice


def test_reft(machines):
    """One of four is killed in the middle of a step, and its memory is gone: its share is rebuilt from the others'
    and training ends with the same bits. Two: one line."""
    whole = launch.run(lambda: uninterrupted(**LAYOUT), ranks=4)
    with pytest.raises(launch.RankError, match="rank 1 died of SIGKILL"):
        launch.run(lambda: start(machines, dying=1), ranks=4)
    shutil.rmtree(machines[1])
    resumed = launch.run(lambda: start(machines), ranks=4)
    for (losses, end), (first, after, end_too, twice) in zip(whole, resumed):
        assert first == 3 and after == losses[3:] and end == end_too and twice[0] == twice[1]
    shares = [next(machine.rglob(f"step-*6/{file_name(rank)}")) for rank, machine in enumerate(machines)]
    longest = max(share.stat().st_size for share in shares)
    for machine in machines:
        (kept,) = machine.rglob(f"step-*6/{PARITY}")
        assert longest / 3 <= kept.stat().st_size < longest / 3 + 400, "1/(n-1) and a header; a copy has all"
    test_every_rank_is_rebuilt_from_the_others([machine / "each" for machine in machines], 4)


def every_rank(machines):
    """Each rank lost in turn, and each two; sizes and bytes. The last has so little that stripes of it are empty."""
    group = collectives.world()
    rank, said, sent = group.rank(), {}, {}
    size = 100 if rank == 3 else 4000 + 40 * rank
    ranks = group.size()
    shares = Shares(machines[rank], group)
    copies = ParityCopies(shares)
    for step in (1, 2):
        with Traffic() as ledger:
            copies.save(step, as_pieces(step, rank, size), {}, {})
    sent["save"] = ledger.sent_bytes("send")
    files = [shares.store.path(2) / name for name in (file_name(rank), PARITY)]
    sizes = [path.stat().st_size for path in files]
    for count in range(ranks):
        for lost in combinations(range(ranks), count):
            spare = machines[rank] / f"spare-{lost}"
            found = ParityCopies(Shares(spare if rank in lost else machines[rank], group))
            with Traffic() as ledger:
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
    if rank == 1:  # a byte of its parity: it does not matter as long as nobody else is lost
        spoil(files[1])
    collectives.barrier(group)
    manifest, opened = ParityCopies(Shares(machines[rank], group)).recover(wanted=[rank])
    assert opened[0].path.read_bytes() == files[0].read_bytes() and manifest["step"] == 2
    if rank == 0:
        spoil(files[0])
    collectives.barrier(group)
    said["damaged"] = ParityCopies(Shares(machines[rank], group)).recover(wanted=[rank])[0]["step"]
    return said, sent, sizes


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_rank_is_rebuilt_from_the_others(machines, ranks):
    """Of two ranks the parity is a copy of the other's share."""
    results, stripes = launch.run(every_rank, machines, ranks=ranks), ranks - 1
    longest = max(sizes[0] for _, _, sizes in results)
    length = stripe_bytes([sizes[0] for _, _, sizes in results], ranks)
    assert stripes * (length - WORD) < longest <= stripes * length
    for rank, (said, sent, (share, parity_file)) in enumerate(results):
        assert sent["save"] == stripes * length, "the padded share"
        assert parity_file - length < 400, "1/(n-1) of the share, and a header"
        for lost, words in said.items():
            if lost == "damaged":
                assert words == 1, "two of step 2, so the step before"
            elif len(lost) > 1:
                assert f"step 2: ranks {list(lost)} are lost, parity brings back one" in words
                assert words == results[0][0][lost]
            else:
                assert words is True
                assert sent[lost] == (stripes * length if lost and rank not in lost else 0)


def test_parity_needs_another_rank(machines):
    alone = lambda: ParityCopies(Shares(machines[0], collectives.world()))
    check_refusals({"parity on 1 rank: there is no other": alone}, ranks=1)
