"""Plans for offloading: the search against every plan there is, the model against a run of its own tasks."""

import random
from fractions import Fraction
from math import ceil, inf

import pytest

from minitrain.systems.plan import offload
from minitrain.systems.plan.offload import Profile, Rates, Server, Work, fuyou_phases, fuyou_s, fuyou_share
from minitrain.systems.simulate.links import Number, Task, divided, play

# ---- Elixir ------------------------------------------------------------------------------------------------

RATES = Rates(ranks=4, network=200, host=24, device_update=100, host_update=10)


def drawn(draw):
    modules = [[draw.randint(1, 9) for _ in range(draw.randint(1, 3))] for _ in range(draw.randint(2, 6))]
    return Profile(modules, draw.randint(0, 40), draw.randint(1, 50))


def every_plan(profile, rates, cap, sizes):
    """Seconds and bytes of all plans that fit, with sums written once more."""
    for chunk in sizes:
        fill, chunks_of, count = 0, [], 0
        for module in profile.modules:
            chunks_of.append(set())
            for size in module:
                if fill + size > chunk:
                    count, fill = count + 1, 0
                fill += size
                chunks_of[-1].add(count)
        count, shard = count + 1, Fraction(chunk, rates.ranks)
        least = max(map(len, chunks_of))
        for cached in range(least, count + 1):
            for offloaded in range(count + 1):
                held = profile.activation_bytes + 2 * chunk * cached + (2 + 12) * shard * (count - offloaded)
                network = host = updates = 0
                for number in range(count):
                    away, kept = number < offloaded, number >= count - (cached - least)
                    gathers = 1 if kept else 2
                    network += (gathers + 1) * 2 * (chunk - shard) / rates.network
                    host += away * (gathers + 1) * 2 * shard / rates.host
                    updates += shard / (rates.host_update if away else rates.device_update)
                if held <= cap:
                    yield updates + max(profile.compute_s, network, host), held, chunk, cached, offloaded


def test_elixir():
    """The search, which tries one number of offloaded chunks for each of the others, finds what a grid over
    everything finds; and unless all fits, what it leaves unused is less than one more chunk would take: here
    under 5 % of the cap."""
    draw, fits, beneficial = random.Random(0), 0, 0
    for _ in range(60):
        profile, sizes = drawn(draw), range(9, 40, 6)
        cap = draw.randint(60, 700)
        plans = [*every_plan(profile, RATES, cap, sizes)]
        if not plans:
            with pytest.raises(ValueError, match=f"nothing fits {cap} bytes"):
                offload.elixir(profile, RATES, cap, sizes)
            continue
        fits += 1
        assert all(tuple(offload.elixir_cost(profile, RATES, *plan[2:])) == plan for plan in plans[::7])
        assert tuple(offload.elixir(profile, RATES, cap, sizes)) == min(plans)
    assert fits > 40
    layers = Profile([[64, 64, 64, 64, 256, 256]] * 24, 5_000, 100)  # 18,432 parameters
    for cap in range(20_000, 140_000, 5_000):
        plan = offload.elixir(layers, RATES, cap, range(256, 1025, 128))
        if plan.offloaded or plan.cached < 18_432 // plan.chunk:
            beneficial += 1
            assert 0.95 * cap <= plan.bytes <= cap
    assert 8 < beneficial < 20, "below the cap that holds all, and above it"


def test_more_memory_is_never_slower_and_offloading_everything_is_the_last_resort():
    profile, sizes = Profile([[8, 8]] * 12, 100, 1), (16, 32, 64)
    plans = [offload.elixir(profile, RATES, cap, sizes) for cap in range(140, 1400, 20)]
    assert all(b.seconds <= a.seconds for a, b in zip(plans, plans[1:]))
    assert plans[0].offloaded > 9 and plans[-1].offloaded == 0
    assert plans[-1].cached == 192 // plans[-1].chunk, "all are kept, none is gathered twice"


# ---- Fuyou -------------------------------------------------------------------------------------------------

# Rates and sizes of about a 13B model with an RTX 4090, PCIe 4, twelve disks, batch 32; seconds and GB.
WORK = Work(13, 220, 5, 10, 5)
SERVER = Server(bus=20, read=32, write=24, update=Fraction(5, 2), host_bytes=60)


def random_case(draw):
    work = Work(*(draw.randint(1, 40) for _ in range(5)))
    server = Server(*(draw.randint(1, 40) for _ in range(4)), host_bytes=draw.choice([0, 3, 10, 50]))
    return work, server


def test_fuyou():
    """The chosen share is at least as good as all of a grid, and better than all smaller."""
    draw, inside, level = random.Random(0), 0, 0
    for _ in range(100):
        work, server = random_case(draw)
        share = fuyou_share(work, server)
        grid = [fuyou_s(work, server, Fraction(i, 120)) for i in range(121)]
        assert 0 <= share <= 1 and fuyou_s(work, server, share) <= min(grid)
        slope = max(abs(a - b) for a, b in zip(grid, grid[1:]))
        assert fuyou_s(work, server, share) >= min(grid) - slope, "no better than the line between two points"
        inside += 0 < share < 1
        assert min(grid[: ceil(120 * share)], default=inf) > fuyou_s(work, server, share), "no smaller share"
        level += grid.count(fuyou_s(work, server, share)) > 1
    assert 20 < inside < 80 and level > 20
    share = fuyou_share(WORK, SERVER)
    assert share not in (0, 1)
    assert fuyou_s(WORK, SERVER, share) < min(fuyou_s(WORK, SERVER, s) for s in (0, 1))
    test_the_iteration_of_many_layers_comes_close_to_the_maxima(share)
    test_tasks_move_the_bytes_of_the_model()
    test_an_update_needs_the_gradient_and_the_states()


def test_phases_by_hand():
    work, server = Work(2, 60, 7, 9, 6), Server(bus=4, read=8, write=2, update=1, host_bytes=10)
    forward = {"GPU": 7, "bus to device": 1, "bus to host": 5, "SSD": Fraction(1, 2) + 5}
    backward = {"GPU": 13, "bus to device": 6, "bus to host": 1, "SSD": Fraction(38, 8) + 14, "CPU": 2}
    phases = fuyou_phases(work, server, Fraction(1, 3))
    assert phases == {"forward": forward, "backward": backward}
    assert fuyou_s(work, server, Fraction(1, 3)) == 7 + Fraction(75, 4)
    assert fuyou_s(work, server, Fraction(1, 3), overlapped=False) == 7 + 13 + max(3 + 14, 2)


LINKS = {"to host": SERVER.bus, "to device": SERVER.bus, "disk": 1}


def fuyou_tasks(work: Work, server: Server, share: Number, layers: int) -> list[Task]:
    """The same layer by layer, for `play(.., {"to host": bus, "to device": bus, "disk": 1})`: disks count in seconds.

    States are read ahead; the backward begins when all of the forward has ended. Nothing waits for room."""
    one = Work(*(divided(amount, layers) for amount in work))
    deep = max(0, share - divided(server.host_bytes, work.activation_bytes or 1)) * one.activation_bytes
    weights, states, swapped = 2 * one.parameters, 12 * one.parameters, share * one.activation_bytes
    tasks, lasts = [], ()
    for way, order in (("F", range(layers)), ("B", reversed(range(layers)))):
        back, seconds = way == "B", one.forward_s
        if back:
            seconds = one.backward_s + (1 - share) * one.recompute_s
            lasts = tuple(f"{what} F{layers - 1}" for what in ("compute", "send", "store"))
        for layer in order:
            i, read = f"{way}{layer}", divided(weights + back * deep, server.read)
            stored = divided(states + weights, server.write) if back else divided(deep, server.write)
            compute = f"compute {i}"
            tasks += [
                Task(f"read {i}", "reads", read, ("disk",), lasts),
                Task(f"load {i}", "loads", weights + back * swapped, ("to device",), (f"read {i}",)),
                Task(compute, "device", seconds, after=(f"load {i}",)),
                Task(f"send {i}", "sends", weights if back else swapped, ("to host",), (compute,)),
            ]
            made = (f"send {i}",)
            if back:
                tasks.append(Task(f"states {i}", "states", divided(states, server.read), ("disk",), lasts))
                update = divided(one.parameters, server.update)
                tasks.append(Task(f"update {i}", "CPU", update, after=(*made, f"states {i}")))
                made = (f"update {i}",)
            tasks.append(Task(f"store {i}", "stores", stored, ("disk",), made))
    return tasks


@pytest.mark.parametrize("share", [0, Fraction(1, 4), Fraction(3, 5), 1])
def test_the_iteration_of_many_layers_comes_close_to_the_maxima(share):
    model = fuyou_s(WORK, SERVER, share)
    runs = {layers: play(fuyou_tasks(WORK, SERVER, share, layers), LINKS).end_s for layers in (1, 10, 80)}
    assert model <= runs[80] < runs[10] < runs[1] and runs[80] < Fraction(105, 100) * model


def test_tasks_move_the_bytes_of_the_model():
    share = Fraction(3, 5)
    run = play(fuyou_tasks(WORK, SERVER, share, 10), LINKS)
    phases = fuyou_phases(WORK, SERVER, share)
    assert run.carried("to host") == SERVER.bus * sum(phase["bus to host"] for phase in phases.values())
    assert run.carried("to device") == SERVER.bus * sum(phase["bus to device"] for phase in phases.values())
    assert run.carried("disk") == sum(phase["SSD"] for phase in phases.values())
    busy = sum(run.end(name) - run.start(name) for name in run.lane("CPU"))
    assert busy == phases["backward"]["CPU"]


def test_an_update_needs_the_gradient_and_the_states():
    for server in (SERVER, SERVER._replace(read=2), SERVER._replace(bus=2)):
        links = {"to host": server.bus, "to device": server.bus, "disk": 1}
        run = play(fuyou_tasks(WORK, server, Fraction(1, 2), 6), links)
        for i in range(6):
            needed = max(run.end(f"send B{i}"), run.end(f"states B{i}"))
            assert needed <= run.start(f"update B{i}") <= run.end(f"update B{i}") <= run.start(f"store B{i}")


def test_an_update_behind_the_backward_beats_one_after_it():
    """As ZeRO-Infinity does it, after the backward; everything else is the same."""
    for share in (0, Fraction(1, 2), 1):
        assert fuyou_s(WORK, SERVER, share) < fuyou_s(WORK, SERVER, share, overlapped=False)
    draw = random.Random(1)
    for _ in range(200):
        work, server = random_case(draw)
        assert fuyou_s(work, server, 1) <= fuyou_s(work, server, 1, overlapped=False)
