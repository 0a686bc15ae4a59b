"""Work and copies that depend on each other, on links that copies share: when does everything happen?

    play([Task("F", "gpu", 3), Task("out", "copies", 8, ("bus",), after=("F",))], {"bus": 4}).end_s  ->  5

A task starts when the one before it in its lane and all it comes `after` have ended. Work takes its seconds.
A copy has bytes and passes links; the copies that are under way share each link max-min fairly: the link with
the least for each of its copies settles these, what they leave elsewhere is for the others, and so on
(Bertsekas, Gallager 1992, Data Networks, section 6.5.2). A link carries one way; a full-duplex bus is two.
With whole numbers or Fractions every time is exact. Not modelled: latencies, what a copy costs processors.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from minitrain.pipeline.simulate import Time as Number
from minitrain.pipeline.simulate import divided


class Task(NamedTuple):  # `amount`: seconds of work, or bytes of a copy through `links`
    name: str
    lane: str  # tasks of a lane run one after another, in the order given
    amount: Number
    links: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


class Piece(NamedTuple):  # a time in which a task's rate stays the same; of work the rate is 1
    start_s: Number
    end_s: Number
    rate: Number


class Run(NamedTuple):
    tasks: dict[str, Task]
    pieces: dict[str, tuple[Piece, ...]]
    bytes_per_s: Mapping[str, Number]

    end_s = property(lambda self: max(map(self.end, self.tasks), default=0))

    def start(self, name: str) -> Number:
        return self.pieces[name][0].start_s

    def end(self, name: str) -> Number:
        return self.pieces[name][-1].end_s

    def lane(self, lane: str) -> list[str]:
        return [name for name, task in self.tasks.items() if task.lane == lane]

    def stall(self, lane: str) -> Number:
        """For how long a lane waits before its last task has ended."""
        names = self.lane(lane)
        return max(map(self.end, names), default=0) - sum(self.end(name) - self.start(name) for name in names)

    def is_slowed(self, name: str) -> bool:
        """Did a copy, at any time, have less than the slowest of its links could give?"""
        links = self.tasks[name].links
        full = min((self.bytes_per_s[link] for link in links), default=1)
        return any(piece.rate < full for piece in self.pieces[name] if piece.end_s > piece.start_s)

    def carried(self, link: str) -> Number:
        return sum(task.amount for task in self.tasks.values() if link in task.links)


def play(tasks: Iterable[Task], bytes_per_s: Mapping[str, Number] | None = None) -> Run:
    """When everything happens. ValueError for what cannot run: unknown names, tasks that wait in a circle."""
    by_name, rates = _checked(list(tasks), bytes_per_s or {}), bytes_per_s or {}
    lanes: dict[str, deque] = {}
    for task in by_name.values():
        lanes.setdefault(task.lane, deque()).append(task)
    now: Number = 0
    left: dict[str, Number] = {}  # of what runs: seconds or bytes still to do
    pieces: dict[str, list[Piece]] = {name: [] for name in by_name}
    ended: set[str] = set()
    while len(ended) < len(by_name):
        for lane in lanes.values():
            if lane and lane[0].name not in left and ended.issuperset(lane[0].after):
                left[lane[0].name] = lane[0].amount
        if not left:
            heads = ", ".join(lane[0].name for lane in lanes.values() if lane)
            raise ValueError(f"tasks wait for each other: {heads}; order lanes and `after` without a circle")
        rate = shared({name: by_name[name].links for name in left}, rates)
        step = min(divided(amount, rate[name]) for name, amount in left.items())
        for name, amount in list(left.items()):
            done = pieces[name]
            if done and done[-1].rate == rate[name]:
                done[-1] = done[-1]._replace(end_s=now + step)
            elif step or not amount:
                done.append(Piece(now, now + step, rate[name]))
            if divided(amount, rate[name]) == step:
                ended.add(name)
                lanes[by_name[name].lane].popleft()
                del left[name]
            else:
                left[name] = amount - step * rate[name]
        now += step
    return Run(by_name, {name: tuple(parts) for name, parts in pieces.items()}, rates)


def shared(copies: Mapping[str, Sequence[str]], bytes_per_s: Mapping[str, Number]) -> dict[str, Number]:
    """Max-min fair rates of copies, each given by the links it passes; what passes none has rate 1."""
    rates: dict[str, Number] = {name: 1 for name, links in copies.items() if not links}
    room = dict(bytes_per_s)
    while len(rates) < len(copies):
        users: dict[str, list[str]] = {}
        for name, links in copies.items():
            for link in links if name not in rates else ():
                users.setdefault(link, []).append(name)
        shares = {link: divided(room[link], len(names)) for link, names in users.items()}
        tightest, share = min(shares.items(), key=lambda item: item[1])
        for name in users[tightest]:
            rates[name] = share
            for link in copies[name]:
                room[link] -= share
    return rates


def _checked(tasks: Sequence[Task], bytes_per_s: Mapping[str, Number]) -> dict[str, Task]:
    by_name = {task.name: task for task in tasks}
    if len(by_name) < len(tasks):
        raise ValueError(f"{len(tasks)} tasks have {len(by_name)} names; give each one of its own")
    for task in tasks:
        if wrong := [other for other in task.after if other not in by_name]:
            raise ValueError(f"{task.name} comes after {wrong[0]!r}, which is no task; use names of tasks")
        if wrong := [link for link in task.links if not bytes_per_s.get(link, 0) > 0]:
            raise ValueError(f"{task.name} passes {wrong[0]!r}: give that link its bytes per second, above 0")
        if not task.amount >= 0 or len(set(task.links)) < len(task.links):
            raise ValueError(f"{task}: an amount is 0 or more, and a copy passes a link once")
    return by_name
