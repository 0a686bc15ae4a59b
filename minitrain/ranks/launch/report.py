"""Who is to blame: turns what the ranks of a failed launch left behind into one sentence and a traceback.

Three rules find the culprit.

    A crash is heard twice. The rank that died says nothing, its neighbours "Connection closed by peer": this
        is dropped, for a rank that merely *raised* keeps its sockets open until the caller has decided.
    A hang is the fault of whoever is behind. Every rank counts its collectives; where the ranks of a group
        disagree, the lowest number is to blame, and before it a rank that waits in no collective at all.
    The line is the reader's: the innermost frame outside of libraries and minitrain, where something can be
        changed; the traceback shows the rest.
"""

import os
import re
import signal
import sysconfig
from collections.abc import Collection
from traceback import TracebackException
from typing import NamedTuple

import torch

from minitrain.ranks.torch_private import C10D_FILE

SCHEMES = ("stdlib", "platstdlib", "purelib", "platlib")
# torch may stand outside of the schemes
LIBRARIES = (os.path.dirname(torch.__file__) + os.sep, *(sysconfig.get_path(s) + os.sep for s in SCHEMES))
RANKS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
PACKAGE = os.path.dirname(os.path.dirname(RANKS)) + os.sep
LOST = "closed by peer|Connection re(set|fused)|Broken pipe|(Read|Write) error|socket.*closed|rank is gone"
OURS = re.compile(rf'  File "{re.escape(PACKAGE)}.*\n?(?:    .*\n?)*')  # a frame, and what it quotes
STACK_LINE = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.M)
CALLS_FN = rf'(  File "{re.escape(RANKS)}launch/(?:start|ranks)\.py", line \d+ in (?:live|run)\n)'
NO_COLLECTIVE = ("_", "get_", "is_", "pg_", "default_")  # in torch's file of them
COLLECTIVES = os.path.join(RANKS, "collectives", "")
NOISE_LETTERS = 2000  # of what native code wrote to stderr
MESSAGE_LETTERS, TRACEBACK_LETTERS = 1000, 40_000  # of an exception: its text may be a tensor, or a log
SIGNALS = {one.value: one.name for one in signal.Signals}


class RankError(RuntimeError):
    """A rank failed. `ranks` are those to blame, `traceback` is the text of the first one's traceback."""

    def __init__(self, message: str, ranks: tuple[int, ...] = (), traceback: str = ""):
        super().__init__(message)
        self.ranks, self.traceback = tuple(ranks), traceback
        if traceback:
            self.add_note("\n" + traceback.rstrip())

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows: the message, and of the rank's lines those outside of minitrain."""
        notes = [OURS.sub("", note) for note in getattr(self, "__notes__", ())]
        return [f"{type(self).__name__}: {self}", *notes, "\nAll lines: print(sys.last_value.traceback)"]


class LaunchTimeout(RankError):
    """The ranks did not start, or did not finish, in the time given."""


# ---- one rank: a record is {type, message, frames, traceback}, and survives JSON -------------------------


def record(error: BaseException) -> dict:
    """Of the exception that ended a rank's fn; `frames` are (file, line, function), innermost first."""
    told = TracebackException(type(error), error, error.__traceback__.tb_next or error.__traceback__)
    frames = [(frame.filename, frame.lineno or 0, frame.name) for frame in reversed(told.stack)]
    text = shortened("".join(told.format()), TRACEBACK_LETTERS)
    return {"type": type(error).__name__, "message": message_of(error), "frames": frames, "traceback": text}


def message_of(error: BaseException) -> str:
    """On one line, whatever it does when it is asked."""
    text = str(TracebackException(type(error), error, None))
    return " ".join(line.strip() for line in shortened(text, MESSAGE_LETTERS).splitlines())


def shortened(text: str, letters: int) -> str:
    half, more = letters // 2, len(text) - letters
    return text if more <= 0 else f"{text[:half]} ... ({more:,} letters left out) ... {text[-half:]}"


def crash_record(code: int, dump: str, calls: list, cells: dict[str, str]) -> dict:
    """The record of a rank that ended without a word; `code`: its exit status, or minus the signal."""
    frames, what = stack_frames(dump), f"died of {SIGNALS.get(-code, -code)}"
    if code >= 0:
        what = f"ended the process with status {code} (os._exit?) before fn returned; return from fn instead"
    elif code == -signal.SIGKILL:
        what += " (kill -9, or the system ran out of memory: try fewer ranks)"
    what += f" at {place(frames, cells)}" if frames else ""
    if calls and not frames:
        what += f"; last collective: {calls[-1].op} #{calls[-1].seq} ({calls[-1].site})"
    return {"type": None, "message": what, "frames": frames, "traceback": stack_text(dump, cells)}


def sentence(record: dict, places: list[str]) -> str:
    if record["type"] is None:
        return record["message"]
    where = f" ({', '.join(places)})" if places else ""
    where += "; another process of the group is gone" if lost_a_connection(record) else ""
    if record["type"] == "SystemExit":
        return f"called sys.exit({record['message']}){where}; return from fn instead"
    return f"raised {': '.join(filter(None, (record['type'], record['message'])))}{where}"


def place(frames: list, cells: dict[str, str]) -> str:
    """The line to look at, "train.py:41" or "cell:4" (cell numbers change); innermost frames first."""
    for hidden in ((*LIBRARIES, PACKAGE), LIBRARIES, ()):
        for frame in frames:
            if not frame[0].startswith((*hidden, "<frozen", RANKS + "launch", COLLECTIVES)):
                return spot(frame, cells)
    return ""


def spot(frame: tuple, cells: dict[str, str]) -> str:
    return f"{'cell' if frame[0] in cells else os.path.basename(frame[0])}:{frame[1]}"


def stack_frames(dump: str) -> list[tuple[str, int, str]]:
    """The main thread's frames below fn, innermost first, from what faulthandler wrote about all threads."""
    for thread in re.split(r"\n(?=Thread |Current thread )", dump):
        fn_and_below, *ours = re.split(CALLS_FN, thread, maxsplit=1)
        if ours:
            return [(file, int(line), name) for file, line, name in STACK_LINE.findall(fn_and_below)]
    return []


def stack_text(dump: str, cells: dict[str, str]) -> str:
    lines = "".join(f'\n  File "{file}", line {line}, in {name}' for file, line, name in stack_frames(dump))
    return readable(f"innermost line first:{lines}", cells) if lines else ""


def readable(text: str, cells: dict[str, str]) -> str:
    for file, cell in cells.items():
        text = text.replace(f'File "{file}"', cell)
    return text


def name(ranks: list[int]) -> str:
    """[3] -> "rank 3", [0, 1, 2] -> "ranks 0, 1, 2"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def alike(said: dict[int, object]) -> dict[object, list[int]]:
    groups: dict[object, list[int]] = {}
    for rank, text in said.items():
        groups.setdefault(text, []).append(rank)
    return groups


# ---- a failure -------------------------------------------------------------------------------------------


def lost_a_connection(record: dict) -> bool:
    return bool(record["type"] and re.search(LOST, record["message"], re.I))


def failure(records: dict[int, dict], cells: dict[str, str], noise: dict[int, str] = {}) -> RankError:
    """The error of a launch from the records of the ranks that failed; equal ones are named together."""
    lost = {rank for rank, said in records.items() if lost_a_connection(said)}
    crashed = [rank for rank, said in records.items() if said["type"] is None]
    blamed = sorted(set(records) - lost or records, key=lambda rank: (rank not in crashed, rank))
    said = {rank: (records[rank]["type"], records[rank]["message"]) for rank in blamed}
    sentences = []
    for ranks in alike(said).values():
        places = dict.fromkeys(place(records[rank]["frames"], cells) for rank in ranks)
        sentences.append(f"{name(ranks)} {sentence(records[ranks[0]], [where for where in places if where])}")
    more = f"; and {len(sentences) - 3} more" if len(sentences) > 3 else ""
    first = blamed[0]
    text = readable(records[first]["traceback"], cells)
    if noise.get(first, "").strip():
        text += f"\nstderr of rank {first}:\n{noise[first].strip()[-NOISE_LETTERS:]}"
    text = f"Rank {first}: {text}" if text else ""
    return RankError("; ".join(sentences[:3]) + more, tuple(sorted(blamed)), text)


# ---- a hang ----------------------------------------------------------------------------------------------


class Stuck(NamedTuple):  # where one rank was when time was up
    text: str  # "wait{s} in all_gather #41 (train.py:7)", {s} for one rank
    waits: bool  # in a collective or for a message
    group: tuple = ()  # which group's collective: axis, members, name
    seq: int = -1  # its number there


RETURNED = Stuck("returned from fn", False)


def stuck(dump: str, calls: list, cells: dict[str, str]) -> Stuck:
    if not dump:
        return Stuck("give{s} no answer to signals (stopped?)", False)
    frames = stack_frames(dump)
    of_torch = [name for file, _, name in frames if file.endswith(C10D_FILE)]
    in_torch = [name for name in of_torch if name.islower() and not name.startswith(NO_COLLECTIVE)]
    in_ours = any(file.startswith(COLLECTIVES) for file, *_ in frames)
    unfinished = [call for call in calls if not call.done and (in_ours or call.queued)]
    where = place(frames, cells)
    if unfinished:
        here = {spot(frame, cells) for frame in frames}
        call = next((call for call in unfinished if call.site in here), unfinished[0])
        peer, group = "", (call.axis, call.members, call.group)
        if call.peer is not None:
            peer, group = f" {'from' if call.op == 'receive' else 'to'} rank {call.peer}", ()
        axis = f"group {call.group!r}" if call.group else call.axis
        axis = "" if axis == "world" else f" of {axis} {call.members}"
        text = f"wait{{s}} in {call.op}{peer} #{call.seq}{axis} ({call.site}"
        text += f" on its GPU; the host is at {where})" if call.queued else ")"
        return Stuck(text, True, group, call.seq)
    if not where:
        return RETURNED
    if in_torch:
        return Stuck(f"wait{{s}} in torch.distributed.{in_torch[-1]} ({where})", True)
    return Stuck(f"stand{{s}} at {where}, in no collective", False)


def say(text: str, ranks: list[int]) -> str:
    return f"{name(ranks)} {text.replace('{s}', 's' if len(ranks) == 1 else '')}"


def awaited(rank: int, stuck: dict[int, Stuck]) -> bool:
    """Does anybody wait in a group that the rank is in? Yes, where nobody waits or the group is not known."""
    members = [where.group[1] if where.group else "" for where in stuck.values() if where.waits]
    return not members or any(rank in ranks_of(text) for text in members)


def ranks_of(members: str) -> Collection[int]:
    """Of "1-3" or "0,2,5", as the log of calls has it; all ranks, if that is shortened or empty."""
    if not re.fullmatch(r"\d+(-\d+|(,\d+)*)", members):
        return range(2**31)
    first, _, last = members.partition("-")
    return range(int(first), int(last) + 1) if last else {int(rank) for rank in members.split(",")}


def hang(timeout_s: float, stuck: dict[int, Stuck], dumps: dict[int, str], cells: dict) -> LaunchTimeout:
    """The report of a launch that ran out of time: those who are behind come first."""
    waiting = any(where.waits for where in stuck.values())
    blamed = [rank for rank, where in stuck.items() if not where.waits and awaited(rank, stuck)]
    if not waiting:  # nobody misses those that have returned
        blamed = [rank for rank in blamed if stuck[rank] != RETURNED]
    for group in {where.group for where in stuck.values() if where.group} if not blamed else ():
        numbers = {rank: where.seq for rank, where in stuck.items() if where.group == group}
        if len(set(numbers.values())) > 1:
            blamed += [rank for rank, number in numbers.items() if number == min(numbers.values())]
    order = sorted(stuck, key=lambda rank: (rank not in blamed, rank))
    places = alike({rank: stuck[rank].text for rank in order})
    told = "; ".join(say(text, ranks) for text, ranks in places.items())
    told += "; if this is only slow, raise timeout_s"
    stacks = alike({rank: stack_text(dumps.get(rank, ""), cells) for rank in order})
    text = "\n".join(f"{name(ranks).capitalize()}, {stack}" for stack, ranks in stacks.items() if stack)
    return LaunchTimeout(f"not finished after {timeout_s:g} s: {told}", sorted(blamed or stuck), text)
