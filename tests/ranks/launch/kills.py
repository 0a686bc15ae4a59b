"""Kill one rank of a launch at a random moment, while ranks start, connect or work, again and again.

    python -m tests.ranks.launch.kills --draws 500 --seed 7

A draw holds if the error names the rank that was killed and nobody else, on one line, and no process is left.
"""

import argparse
import random
import threading
import time

import psutil
import torch
from tqdm import tqdm

from minitrain import collectives, launch
from minitrain.ranks.launch import local

LONGEST_S = 0.4  # from the birth of the last rank to the kill: starting takes about half of it


def steps() -> None:
    group, x = collectives.world(), torch.ones(1000)
    for _ in range(1_000_000):
        collectives.all_reduce(x, group)


def ranks_of(helper: psutil.Process) -> list[psutil.Process]:
    return sorted(helper.children(), key=lambda process: process.pid)  # forked in rank order


def kill(helper: psutil.Process, ranks: int, victim: int, delay_s: float, killed: list) -> None:
    while len(born := ranks_of(helper)) < ranks:
        time.sleep(0.001)
    time.sleep(delay_s)
    killed.append(born[victim].pid)
    born[victim].kill()


def draw(dice: random.Random, ranks: int) -> str | None:
    """One launch with one kill: what is wrong with it, or None."""
    launch.run(int, ranks=1)  # the helper is there
    helper = psutil.Process(local.Helper.find().process.pid)
    victim, delay_s, killed = dice.randrange(ranks), dice.uniform(0, LONGEST_S), []
    killer = threading.Thread(target=kill, args=(helper, ranks, victim, delay_s, killed))
    killer.start()
    try:
        launch.run(steps, ranks=ranks, timeout_s=60)
        said = "no error"
    except launch.RankError as error:
        said = None if error.ranks == (victim,) and "\n" not in str(error) else str(error)
    killer.join()
    where = f"rank {victim} of {ranks}, {delay_s * 1000:.0f} ms after its birth"
    if left := ranks_of(helper):
        return f"{where}: {len(left)} processes are left"
    return f"{where}: {said}" if said else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=500)
    parser.add_argument("--seed", type=int, default=7)
    given = parser.parse_args()
    dice, wrong = random.Random(given.seed), []
    for _ in tqdm(range(given.draws), mininterval=5):
        if why := draw(dice, dice.choice((2, 3, 4))):
            wrong.append(why)
            tqdm.write(why)
    print(f"{given.draws} kills: {given.draws - len(wrong)} named the rank that was killed and left nothing")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
