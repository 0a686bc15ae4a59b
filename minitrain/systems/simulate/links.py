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

from collections.abc import Callable, Iterable, Mapping, Sequence
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


class Flows:
    """What is under way. Only copies that touch, if by others, share anew when one comes or goes."""

    def __init__(self, bytes_per_s: Mapping[Any, Number]):
        self.bytes_per_s, self.links, self.changed = bytes_per_s, {}, []
        self.users: dict[Any, dict] = {}  # of each link

    def join(self, copy: Any, links: Links) -> None:
        self.links[copy] = links
        self.changed.append(copy)
        for link in links:
            self.users.setdefault(link, {})[copy] = None

    def leave(self, copy: Any) -> None:
        for link in self.links.pop(copy):
            del self.users[link][copy]
            self.changed.extend(self.users[link])

    def rates(self) -> dict[Any, Number]:
        """Of all that the changes since the last call reach."""
        reached, found, self.changed = self.changed, {}, []
        for copy in reached:  # grows
            if copy in self.links and copy not in found:
                found[copy] = self.links[copy]
                reached.extend(other for link in found[copy] for other in self.users[link])
        return shared(found, self.bytes_per_s)


def play(
    tasks: Iterable[Task],
    bytes_per_s: Mapping[str, Number] | None = None,
    by: Callable[[Task], Any] | None = None,
    width: Mapping[str, int] = {},
) -> Run:
    """When everything happens. ValueError for what cannot run: unknown names, tasks that wait in a circle."""
    by_name, bytes_per_s, width = _checked(list(tasks), bytes_per_s or {}), bytes_per_s or {}, width or {}
    require_ints(1, **{f"width of {lane}": most for lane, most in width.items()})
    free = {task.lane: 1 for task in by_name.values()} | dict(width)  # for so many more there is room
    queues: dict[str, list] = {lane: [] for lane in free}  # heaps: a lane's tasks, `by` key those ready
    entries = {name: (by(task) if by else 0, at, name) for at, (name, task) in enumerate(by_name.items())}
    missing = {name: len(set(task.after)) for name, task in by_name.items()}
    later: dict[str, list[str]] = {name: [] for name in by_name}  # who comes after it
    for name, task in by_name.items():
        for other in set(task.after):
            later[other].append(name)
        if not by or not missing[name]:
            heappush(queues[task.lane], entries[name])
    now, flows, touched = 0, Flows(bytes_per_s), list(queues)
    pieces: dict[str, list[Piece]] = {name: [] for name in by_name}  # the last ends when its task will
    agenda, due, number = [], {}, count()  # a heap of (when, number, name), and each task's last number

    def go_on(name: str, rate: Number) -> None:
        parts, left = pieces[name], by_name[name].amount
        if parts and parts[-1].rate == rate:
            return
        if parts:
            begin, end, before = parts.pop()
            left = (end - now) * before if before else left
            if begin < now:
                parts.append(Piece(begin, now, before))
        begin = parts.pop().start_s if parts and parts[-1].rate == rate else now
        end = now + (divided(left, rate) if rate else by_name[name].alpha)
        parts.append(Piece(begin, end, rate))
        due[name] = next(number)
        heappush(agenda, (end, due[name], name))

    while True:
        for lane in touched:
            while free[lane] and queues[lane] and not missing[queues[lane][0][-1]]:
                free[lane] -= 1
                go_on(heappop(queues[lane])[-1], 0)
        for name, rate in flows.rates().items():
            go_on(name, rate)
        if not due:
            break
        now, touched = agenda[0][0], []
        while agenda and agenda[0][0] == now:
            _, called, name = heappop(agenda)
            task = by_name[name]
            if due.get(name) != called:  # its end has moved since
                continue
            if not pieces[name][-1].rate:  # alpha is over
                flows.join(name, task.links)
                continue
            del due[name]
            flows.leave(name)
            free[task.lane] += 1
            touched.append(task.lane)
            for user in map(by_name.get, later[name]):
                missing[user.name] -= 1
                if by and not missing[user.name]:
                    heappush(queues[user.lane], entries[user.name])
                touched.append(user.lane)
    if heads := {task.lane: name for name, task in reversed(by_name.items()) if not pieces[name]}:
        names = ", ".join(heads[lane] for lane in queues if lane in heads)
        raise ValueError(f"tasks wait for each other: {names}; order lanes and `after` without a circle")
    return Run(by_name, {name: tuple(parts) for name, parts in pieces.items()}, bytes_per_s)


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
