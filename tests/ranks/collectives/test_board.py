"""Headers in shared memory: whoever reads waits for what is not there yet, and never takes another's note."""

import threading
import zlib
from types import SimpleNamespace

import pytest
import torch

from minitrain import collectives, launch
from minitrain.ranks.collectives import board, checked, transport
from minitrain.ranks.collectives.board import COLLECTIVE, KINDS, MESSAGE, MOST_MEMBERS, SLOTS, WORDS, Board
from minitrain.ranks.process import PROCESS

pytestmark = pytest.mark.skipif(board.FUTEX is None, reason="needs Linux")


@pytest.fixture
def boards(tmp_path):
    """Three members' views of one board of notes of 8 bytes."""
    return [Board(str(tmp_path / "board"), rank, 3, 8) for rank in range(3)]


def note(*numbers):
    return bytes(numbers).ljust(8, b"\0")


def test_each_pair_and_kind_has_notes_of_its_own(boards):
    cases = [(k, a, b, n) for k in range(KINDS) for a in range(3) for b in range(3) for n in range(SLOTS)]
    for kind, source, to, number in cases:
        boards[source].put(kind, to, number, note(kind, source, to, number))
    for kind, source, to, number in cases:
        assert boards[to].read(kind, source, number) == note(kind, source, to, number)


def test_who_reads_first_sleeps_until_the_note_is_there(boards):
    heard = []
    reader = threading.Thread(
        target=lambda: heard.append(boards[1].read(COLLECTIVE, 0, SLOTS + 5)), daemon=True
    )
    boards[0].put(COLLECTIVE, 1, 5, note(1))  # of an earlier call in the same slot
    reader.start()
    boards[0].put(COLLECTIVE, 1, SLOTS + 4, note(2))
    boards[0].put(MESSAGE, 1, SLOTS + 5, note(3))
    boards[0].put(COLLECTIVE, 2, SLOTS + 5, note(4))
    reader.join(0.1)
    assert reader.is_alive() and heard == []
    boards[0].put(COLLECTIVE, 1, SLOTS + 5, note(5))
    reader.join(20)
    assert heard == [note(5)]


def test_a_note_that_was_written_over_is_lost(boards):
    for number in range(SLOTS + 1):
        boards[2].put(MESSAGE, 0, number, note(number))
    assert boards[0].read(MESSAGE, 2, 0) is None
    assert boards[0].read(MESSAGE, 2, 1) == note(1) and boards[0].read(MESSAGE, 2, SLOTS) == note(SLOTS)


def test_half_a_note_is_not_taken(boards):
    """The word is there and the rest is not, as another core may see it."""
    heard, at = [], boards[1]._slot(MESSAGE, 0, 1, 7)
    WORDS.pack_into(boards[0].memory, at, 8, zlib.crc32(note(9)))
    reader = threading.Thread(target=lambda: heard.append(boards[1].read(MESSAGE, 0, 7)), daemon=True)
    reader.start()
    reader.join(0.1)
    assert reader.is_alive() and heard == []
    boards[0].memory[at + WORDS.size : at + WORDS.size + 8] = note(9)
    reader.join(20)
    assert heard == [note(9)]


def test_calls_beyond_what_a_word_of_the_kernel_holds(boards):
    for number in (2**32 - 1, 2**32, 2**40):
        boards[0].put(COLLECTIVE, 1, number, note(number % 7))
        assert boards[1].read(COLLECTIVE, 0, number) == note(number % 7)


# ---- on ranks --------------------------------------------------------------------------------------------


def headers_sent(by_messages):
    """How many headers travel in a collective and a message, and what the two give."""
    sent, post_send = [], transport.post_send

    def counted(ch, call, tensor, to, tag):
        sent.append(call is None)
        return post_send(ch, call, tensor, to, tag)

    transport.post_send = collectives.backends.post_send = counted
    if by_messages:
        collectives.meet_in(None)
    group = collectives.world()
    x = torch.ones(4) * group.rank()
    results = collectives.all_reduce(x, group).tolist(), collectives.rotate(x, group).tolist()
    return sum(sent), results


def test_on_one_machine_no_header_travels():
    expected = [([3.0] * 4, [float((rank - 1) % 3)] * 4) for rank in range(3)]
    assert launch.run(headers_sent, False, ranks=3) == [(0, result) for result in expected]
    assert launch.run(headers_sent, True, ranks=3) == [(2 + 1, result) for result in expected], "the control"


def test_a_sender_may_be_far_ahead():
    def rank():
        group, count = collectives.world(), 2 * SLOTS + 3
        if group.rank() == 0:
            sends = [collectives.send(torch.tensor([i]), 1, group, async_op=True) for i in range(count)]
        collectives.barrier(group)
        if group.rank() == 0:
            return [send.wait() for send in sends]
        like = torch.empty(1, dtype=torch.int64)
        return [collectives.receive(like, 0, group).item() for _ in range(count)]

    assert launch.run(rank, ranks=2)[1] == list(range(2 * SLOTS + 3))


def test_what_is_wrong_and_lost_is_kept_out_and_reported_as_a_hang():
    def rank():
        group = collectives.world()
        if group.rank() == 0:
            sends = [collectives.send(torch.ones(1), 1, group, async_op=True) for _ in range(SLOTS + 1)]
        collectives.barrier(group)
        if group.rank() == 0:
            return [send.wait() for send in sends]
        return collectives.receive(torch.empty(1, dtype=torch.int32), 0, group).item()

    with pytest.raises(launch.LaunchTimeout, match="receive"):
        launch.run(rank, ranks=2, timeout_s=2)


def test_groups_of_the_same_members_have_boards_of_their_own():
    def rank():
        group = collectives.world()
        other = torch.distributed.new_group([0, 1])
        handles = [
            collectives.all_reduce(torch.full((1,), float(i)), of, async_op=True)
            for i, of in enumerate((group, other, group, other))
        ]
        return [handle.wait().item() for handle in handles[:: 1 if group.rank() else -1]]

    assert launch.run(rank, ranks=2) == [[6.0, 4.0, 2.0, 0.0], [0.0, 2.0, 4.0, 6.0]]


def test_a_large_group_sends_headers(tmp_path, monkeypatch):
    group = SimpleNamespace(group_name="of many")
    monkeypatch.setattr(PROCESS, "board_folder", str(tmp_path))
    for size, has_one in ((MOST_MEMBERS, True), (MOST_MEMBERS + 1, False)):
        ch = SimpleNamespace(board=None, size=size, rank=0, members=tuple(range(size)), group=group)
        assert (checked.board_of(ch) is not None) == has_one


def test_a_board_is_that_of_a_name_and_its_members(tmp_path, monkeypatch):
    monkeypatch.setattr(PROCESS, "board_folder", str(tmp_path))

    def board_of(name, members):
        group = SimpleNamespace(group_name=name)
        return checked.board_of(SimpleNamespace(board=None, size=2, rank=0, members=members, group=group))

    board_of("1", (0, 1)).put(COLLECTIVE, 0, 0, b"x" * checked.HEADER_BYTES)
    at = board_of("1", (0, 1))._slot(COLLECTIVE, 0, 0, 0)
    others = [board_of("1", (0, 1)), board_of("2", (0, 1)), board_of("1", (2, 3))]
    assert [WORDS.unpack_from(other.memory, at)[0] for other in others] == [1, 0, 0]
