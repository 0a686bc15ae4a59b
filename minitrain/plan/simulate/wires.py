"""Transfers that are under way at the same time share the wires of the ranks they pass.

    wires.join(a, 0.0)        a alone, 2 s of bytes                           ends at 2
    wires.join(b, 1.0)        b, of 1.5 s, on a wire of a's: half of it each  a at 3, b at 4
    wires.leave(a, 3.0)       what a leaves is for the others                 b at 3.5

A wire is one rank's way out of, or into, its node's links ("in") or its share of the network cards ("out").
A collective takes both ways of all its members, a message the source's way out and the destination's way in;
each takes the level that bounds it: the links if its group stays in a node, else the cards. Shares are
max-min fair (links.shared), and one transfer waits for its slowest member. Wires that one transfer uses alone
cost nothing: only those that touch each other, directly or through a third, are looked at again.
Not modelled: what a group that leaves the node sends inside of it, beside groups that stay; switches.
"""

from collections.abc import Collection, Iterable, Sequence

from minitrain.plan.simulate import links

Wire = tuple[int, str, str]  # (rank, "in" or "out" of the node, "from" or "to" the rank)


def wires_of(members: Sequence[int], nodes: int, message: bool, known: Collection[int]) -> tuple[Wire, ...]:
    """Of a group on `nodes` nodes, or of a message from the first member to the second: those of the ranks
    whose transfers are `known`."""
    level = "in" if nodes == 1 else "out"
    senders, receivers = (members[:1], members[1:]) if message else (known, known)
    wires = [(rank, level, "from") for rank in senders] + [(rank, level, "to") for rank in receivers]
    return tuple(wire for wire in wires if wire[0] in known)


class Carried:
    """One transfer: `wires` that it takes from `on_wire_s`, when its latency is over, until `end_s`."""

    __slots__ = ("wires", "on_wire_s", "end_s", "speed", "version")

    def __init__(self, wires: tuple[Wire, ...], on_wire_s: float, end_s: float):
        self.wires, self.on_wire_s, self.end_s = wires, on_wire_s, end_s
        self.speed = 1.0  # of what it has alone
        self.version = 0  # grows with every change of `end_s`


class Wires:
    """Who is on which wire now."""

    def __init__(self):
        self.users: dict[Wire, dict[Carried, None]] = {}

    def join(self, carried: Carried, now_s: float) -> list[Carried]:
        """It begins to send. Returns those whose end has moved."""
        for wire in carried.wires:
            self.users.setdefault(wire, {})[carried] = None
        return self._shared_again([carried], now_s)

    def leave(self, carried: Carried, now_s: float) -> list[Carried]:
        """It has ended. Returns those whose end has moved."""
        for wire in carried.wires:
            del self.users[wire][carried]
        return self._shared_again([other for wire in carried.wires for other in self.users[wire]], now_s)

    def _shared_again(self, some: Iterable[Carried], now_s: float) -> list[Carried]:
        together = dict.fromkeys(some)
        found = list(together)
        while found:  # who shares a wire with one of them, and so on
            for wire in found.pop().wires:
                for other in self.users[wire]:
                    if other not in together:
                        together[other] = None
                        found.append(other)
        whole = {wire: 1.0 for one in together for wire in one.wires}
        speeds = links.shared({one: one.wires for one in together}, whole)
        moved = []
        for one, speed in speeds.items():
            if speed != one.speed:
                one.end_s = now_s + max(0.0, one.end_s - now_s) * one.speed / speed
                one.speed, one.version = speed, one.version + 1
                moved.append(one)
        return moved
