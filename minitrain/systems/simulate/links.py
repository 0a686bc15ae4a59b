"""Work and copies that depend on each other, on links that copies share: when does everything happen?

    play([Task("F", "gpu", 3), Task("out", "copies", 8, ("bus",), after=("F",))], {"bus": 4}).end_s  ->  5

A task starts when all it comes `after` has ended and its lane is free: in a lane in the order given, or with
`by` always the ready task with the smallest key (a list scheduler: Graham 1969). A lane runs one task at a
time, or `width[lane]`. Work takes its seconds. A copy has bytes and passes links; the copies that are under
way share each link max-min fairly: the link with the least for each of its copies settles these, what they
leave elsewhere is for the others, and so on (Bertsekas, Gallager 1992, Data Networks, section 6.5.2). With
{link: share} for links a copy at rate r takes share x r of each, as a flow does that is spread over paths.
`alpha` seconds pass before the first byte moves; they take the lane and no link. A link carries one way; a
full-duplex bus is two. With whole numbers or Fractions every time is exact. Not modelled: what a copy costs
processors, packets and their queues.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any, NamedTuple

from minitrain.pipeline.simulate import Time as Number
from minitrain.pipeline.simulate import divided
from minitrain.ranks.checks import require_ints

Links = Sequence[str] | Mapping[str, Number]  # a share of 1, or those given


class Task(NamedTuple):  # `amount`: seconds of work, or bytes of a copy through `links`
    name: str
    lane: str
    amount: Number
    links: Links = ()
    after: tuple[str, ...] = ()
    alpha: Number = 0


class Piece(NamedTuple):  # a time in which a task's rate stays the same; of work the rate is 1, in alpha 0
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
        """For how long a lane (of width 1) waits before its last task has ended."""
        names = self.lane(lane)
        return max(map(self.end, names), default=0) - sum(self.end(name) - self.start(name) for name in names)

    def is_slowed(self, name: str) -> bool:
        """Did a copy, at any time, have less than the slowest of its links could give?"""
        shares = _shares(self.tasks[name].links).items()
        full = min((divided(self.bytes_per_s[link], share) for link, share in shares), default=1)
        return any(0 < piece.rate < full for piece in self.pieces[name] if piece.end_s > piece.start_s)

    def carried(self, link: str) -> Number:
        return sum(task.amount * _shares(task.links).get(link, 0) for task in self.tasks.values())


class _Lane:  # who is ready, by (key, place in the order given, name), and for how many more there is room
    def __init__(self, width: int, in_order: bool):
        self.ready: list[tuple] = []
        self.free, self.in_order, self.given, self.started = width, in_order, 0, 0

    def take(self) -> str | None:
        if not self.free or not self.ready or self.in_order and self.ready[0][0] != self.started:
            return None
        self.free, self.started = self.free - 1, self.started + 1
        return heappop(self.ready)[-1]


class _Running:
    def __init__(self, left: Number, now: Number):
        self.left, self.rate, self.since, self.end = left, 0, now, None


class _Flows:
    """What runs now. Only copies that touch, if by others, share anew when one comes or goes."""

    def __init__(self, tasks: Mapping[str, Task], bytes_per_s: Mapping[str, Number]):
        self.tasks, self.bytes_per_s = tasks, bytes_per_s
        self.pieces: dict[str, list[Piece]] = {name: [] for name in tasks}
        self.running: dict[str, _Running] = {}
        self.agenda: list[tuple] = []  # a heap of (when, tie, name): its alpha or its amount is done
        self.users: dict[str, dict[str, None]] = {}  # of each link
        self.changed: dict[str, None] = {}  # links that someone has joined or left
        self.tie = count()

    def start(self, name: str, now: Number) -> None:
        task = self.tasks[name]
        self.running[name] = _Running(task.amount, now)
        if task.alpha:
            self.ends(name, now + task.alpha)
        else:
            self.flow(name, now)

    def flow(self, name: str, now: Number) -> None:
        links = self.tasks[name].links
        for link in links:
            self.users.setdefault(link, {})[name] = self.changed[link] = None
        if not links:
            self.set_rate(name, 1, now)

    def share(self, now: Number) -> None:
        links, found = list(self.changed), {}
        self.changed.clear()
        for link in links:  # grows
            for name in self.users[link]:
                if name not in found:
                    found[name] = self.tasks[name].links
                    links.extend(found[name])
        for name, rate in shared(found, self.bytes_per_s).items():
            self.set_rate(name, rate, now)

    def set_rate(self, name: str, rate: Number, now: Number) -> None:
        one = self.running[name]
        if rate != one.rate:
            self.note(name, now)
            one.left = max(0, one.left - (now - one.since) * one.rate)
            one.since, one.rate = now, rate
            self.ends(name, now + divided(one.left, rate))

    def ends(self, name: str, when: Number) -> None:
        self.running[name].end = when
        heappush(self.agenda, (when, next(self.tie), name))

    def note(self, name: str, now: Number) -> None:
        one, done = self.running[name], self.pieces[name]
        if done and done[-1].rate == one.rate:
            done[-1] = done[-1]._replace(end_s=now)
        elif now > one.since:
            done.append(Piece(one.since, now, one.rate))

    def ended(self, now: Number) -> Iterator[str]:
        while self.agenda and self.agenda[0][0] == now:
            name = heappop(self.agenda)[-1]
            one = self.running.get(name)
            if one is None or one.end != now:  # its end has moved since
                continue
            if not one.rate:  # alpha is over
                self.flow(name, now)
                continue
            self.note(name, now)
            self.pieces[name] = self.pieces[name] or [Piece(now, now, one.rate)]
            del self.running[name]
            for link in self.tasks[name].links:
                del self.users[link][name]
                self.changed[link] = None
            yield name


def play(
    tasks: Iterable[Task],
    bytes_per_s: Mapping[str, Number] | None = None,
    by: Callable[[Task], Any] | None = None,
    width: Mapping[str, int] | None = None,
) -> Run:
    """When everything happens. ValueError for what cannot run: unknown names, tasks that wait in a circle."""
    by_name, rates, width = _checked(list(tasks), bytes_per_s or {}), bytes_per_s or {}, width or {}
    require_ints(1, **{f"width of {lane}": most for lane, most in width.items()})
    lanes: dict[str, _Lane] = {}
    places: dict[str, tuple] = {}
    missing = {name: len(set(task.after)) for name, task in by_name.items()}
    later: dict[str, list[str]] = {name: [] for name in by_name}  # who comes after it
    for name, task in by_name.items():
        lane = lanes.setdefault(task.lane, _Lane(width.get(task.lane, 1), by is None))
        places[name] = (by(task) if by else lane.given, lane.given, name)
        lane.given += 1
        for other in set(task.after):
            later[other].append(name)
        if not missing[name]:
            heappush(lane.ready, places[name])
    now, undone, flows, touched = 0, len(by_name), _Flows(by_name, rates), list(lanes.values())
    while undone:
        for lane in touched:
            while (name := lane.take()) is not None:
                flows.start(name, now)
        flows.share(now)
        if not flows.running:
            heads = {task.lane: name for name, task in reversed(by_name.items()) if not flows.pieces[name]}
            names = ", ".join(heads[lane] for lane in lanes if lane in heads)
            raise ValueError(f"tasks wait for each other: {names}; order lanes and `after` without a circle")
        now, touched = flows.agenda[0][0], []
        for name in flows.ended(now):
            undone -= 1
            lanes[by_name[name].lane].free += 1
            touched.append(lanes[by_name[name].lane])
            for user in later[name]:
                missing[user] -= 1
                if not missing[user]:
                    heappush(lanes[by_name[user].lane].ready, places[user])
                    touched.append(lanes[by_name[user].lane])
    return Run(by_name, {name: tuple(parts) for name, parts in flows.pieces.items()}, rates)


def shared(copies: Mapping[Any, Links], bytes_per_s: Mapping[Any, Number]) -> dict[Any, Number]:
    """Max-min fair rates of copies, each given by the links it passes; what passes none has rate 1.

    The heap has what each link could give per unit of share when it was last looked at. As copies are settled
    that only grows, so the first that is still true is the tightest link."""
    rates: dict[Any, Number] = {name: 1 for name, links in copies.items() if not links}
    users: dict[Any, dict[Any, Number]] = {}
    passes = {name: _shares(links) for name, links in copies.items()}
    for name, links in passes.items():
        for link, share in links.items():
            users.setdefault(link, {})[name] = share
    room = {link: bytes_per_s[link] for link in users}
    heap = [(divided(room[link], sum(users[link].values())), at, link) for at, link in enumerate(users)]
    heapify(heap)
    while len(rates) < len(copies):
        _, at, link = heappop(heap)
        if not users[link]:
            continue
        each = divided(room[link], sum(users[link].values()))
        if heap and (each, at) > heap[0][:2]:
            heappush(heap, (each, at, link))
            continue
        for name in list(users[link]):
            rates[name] = each
            for other, share in passes[name].items():
                room[other] -= share * each
                del users[other][name]
    return rates


def _shares(links: Links) -> Mapping[Any, Number]:
    return links if isinstance(links, Mapping) else dict.fromkeys(links, 1)


def _checked(tasks: Sequence[Task], bytes_per_s: Mapping[str, Number]) -> dict[str, Task]:
    by_name = {task.name: task for task in tasks}
    if len(by_name) < len(tasks):
        raise ValueError(f"{len(tasks)} tasks have {len(by_name)} names; give each one of its own")
    for task in tasks:
        if wrong := [other for other in task.after if other not in by_name]:
            raise ValueError(f"{task.name} comes after {wrong[0]!r}, which is no task; use names of tasks")
        if wrong := [link for link in task.links if not bytes_per_s.get(link, 0) > 0]:
            raise ValueError(f"{task.name} passes {wrong[0]!r}: give that link its bytes per second, above 0")
        shares = _shares(task.links)
        if len(shares) < len(task.links) or not all(share > 0 for share in shares.values()):
            raise ValueError(f"{task}: a copy passes a link once, by a share above 0")
        if not (task.amount >= 0 and task.alpha >= 0):
            raise ValueError(f"{task}: an amount is 0 or more, and so is its alpha")
    return by_name
