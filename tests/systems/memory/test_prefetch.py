"""One prefetch engine: order, room, what is evicted, and that Belady's choice is the best there is."""

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minitrain.systems.memory.window import Prefetch


class Recorded:
    """Chunks that come and go; `log` says when."""

    def __init__(self, order, room, sizes=None, **settings):
        self.log, sizes = [], sizes or dict.fromkeys(order, 1)
        self.engine = Prefetch(order, sizes, room, self.fetch, self.evict, **settings)

    def fetch(self, chunk):
        self.log.append(f"+{chunk}")
        return Arriving(self, chunk)

    def evict(self, chunk, transfer):
        assert transfer.chunk == chunk
        self.log.append(f"-{chunk}")

    def run(self, passes=1):
        for _ in range(passes):
            for chunk in self.engine.order:
                assert self.engine.use(chunk) == f"value of {chunk}" and chunk in self.engine._here
                self.log.append(str(chunk))
        return " ".join(self.log)


class Arriving:
    def __init__(self, owner, chunk):
        self.owner, self.chunk = owner, chunk

    def wait(self):
        return f"value of {self.chunk}"


def test_one_ahead_with_room_for_two():
    """A window that moves over layers there and back: only the first use is late."""
    run = Recorded("abcddcba", room=2)
    assert run.run() == "+a +b a -a +c b -b +d c d d -d +b c -c +a b a" and run.engine.late == 1


def test_what_cannot_make_room_stays():
    """c, of 3, would need the place of a, which is in use: b is not given up for nothing."""
    run = Recorded("bac", room=4, sizes=dict(a=2, b=1, c=3))
    for chunk in "ba":
        run.engine.use(chunk)
    assert run.log == ["+b", "+a"] and set(run.engine._here) == {"a", "b"}
    assert [run.engine.next_use("b", after) for after in (-1, 0, 2)] == [0, 3, 3]  # behind it, on and on
    run.engine.use("c")
    assert run.engine.late == 2


def test_the_log_of_a_small_window():
    run = Recorded("abc", room=2)
    assert run.run(2) == "+a +b a -a +c b -b +a c -c +b a -a +c b -b +a c"
    assert run.engine.late == 1 and run.engine.fetched == 7


def test_without_room_ahead_every_use_is_late():
    run = Recorded("abc", room=1)
    assert run.run() == "+a a -a +b b -b +c c" and run.engine.late == 3
    assert Recorded("abc", room=3, ahead=0).run(2) == "+a a +b b +c c a b c"


def test_what_is_used_sooner_stays():
    """b is next but one; fetching c two ahead must not throw out b."""
    run = Recorded("abac", room=2, ahead=3, circular=False)
    assert run.run() == "+a +b a b -b +c a c"


def test_lru_and_belady_differ():
    """Round and round through one chunk more than there is room for: LRU misses always."""
    lru = Recorded("abcd", room=3, ahead=0, policy="lru")
    belady = Recorded("abcd", room=3, ahead=0)
    lru.run(4), belady.run(4)
    assert Recorded("abacb", room=2, ahead=0, policy="lru").run() == "+a a +b b a -b +c c -a +b b"  # not FIFO
    assert lru.engine.late == 16 and belady.engine.late == 4 + 4


def test_of_chunks_that_are_not_used_again_the_least_recent_goes_and_no_more_than_must():
    assert Recorded("abacd", room=3, ahead=0, circular=False).run() == "+a a +b b a +c c -b +d d"
    assert Recorded("abcd", room=3, ahead=0, circular=False).run() == "+a a +b b +c c -a +d d"
    sizes = dict(a=2, b=2, c=1, d=2)
    run = Recorded("abcd", room=5, sizes=sizes, ahead=0, circular=False)
    assert run.run() == "+a a +b b +c c -a +d d"


def test_a_pass_is_looked_beyond_if_another_follows():
    assert Recorded("abc", room=3).run() == "+a +b a +c b c"  # one ahead, unless told otherwise
    assert Recorded("abc", room=2).run().endswith("-b +a c")
    assert not Recorded("abc", room=2, circular=False).run().endswith("+a c")


def test_nothing_is_fetched_past_a_chunk_for_which_there_is_no_room():
    run = Recorded("abc", room=3, sizes=dict(a=2, b=3, c=1), ahead=2, circular=False)
    assert run.run() == "+a a -a +b b -b +c c"


@cache
def fewest(order: tuple, room: int, here: frozenset = frozenset()) -> int:
    """Fetches on demand, whatever is thrown out: all choices tried."""
    if not order:
        return 0
    if order[0] in here:
        return fewest(order[1:], room, here)
    kept = [here] if len(here) < room else [here - {out} for out in here]
    return 1 + min(fewest(order[1:], room, left | {order[0]}) for left in kept)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.integers(1, 4))
def test_belady_is_the_optimum_on_any_order(order, room):
    run = Recorded(order, room, ahead=0, circular=False)
    run.run()
    assert run.engine.fetched == fewest(tuple(order), room) == run.engine.late


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=15), st.integers(3, 9), st.integers(0, 4), st.booleans()
)
def test_never_more_than_the_room_and_nothing_is_brought_twice(order, room, ahead, lru):
    sizes = {chunk: 1 + chunk % 3 for chunk in order}
    run = Recorded(order, room, sizes, ahead=ahead, policy="lru" if lru else "belady")
    run.run(3)
    here = set()
    for entry in run.log:
        if entry[0] == "+":
            assert entry[1:] not in here
            here.add(entry[1:])
        elif entry[0] == "-":
            here.remove(entry[1:])
        assert sum(1 + int(chunk) % 3 for chunk in here) <= room
    run.engine.clear()
    assert not run.engine._here and sum(entry[0] == "-" for entry in run.log) == run.engine.fetched
    run.run()


def test_after_clear_a_pass_begins_anew():
    run = Recorded("abc", room=2)
    run.engine.use("a"), run.engine.use("b")
    run.engine.clear()
    run.log.clear()
    assert run.run().startswith("+a +b a") and not run.engine.late > 2


def test_bad_input():
    with pytest.raises(ValueError, match="a chunk has 3 bytes, room is 2"):
        Recorded("bca", 2, {"a": 3, "b": 1, "c": 3})
    with pytest.raises(ValueError, match="give the order"):
        Recorded("", 2)
    with pytest.raises(ValueError, match="use of 'b', and 'a' is next"):
        Recorded("ab", 2).engine.use("b")
