"""What tasks cannot use of free GPUs: by hand, and three ways to place a mix of them."""

from random import Random

from minitrain.systems.cluster.fragments import Shape, at_random, best_fit, fgd, fill, fragment

SHARING = [(0.25, 0.3, 4), (0.2, 0.45, 8), (0.15, 0.6, 6), (0.15, 0.7, 10), (0.2, 1, 12), (0.05, 4, 24)]
FEW_CPUS = [(0.3, 0.25, 2), (0.15, 0.5, 20), (0.15, 0.4, 4), (0.3, 1, 12), (0.05, 1, 24), (0.05, 8, 64)]
NODES = [Shape(8, 96)] * 12 + [Shape(4, 64)] * 6


def unallocated(table, policies) -> list[float]:
    """Percent of GPUs, the mean of four traces."""
    mix = [(share, Shape(gpus, cpus)) for share, gpus, cpus in table]
    shares, shapes = zip(*mix)
    left = [0.0] * len(policies)
    for seed in range(4):
        tasks = Random(seed).choices(shapes, shares, k=1000)
        for i, policy in enumerate(policies):
            left[i] += 100 / 4 * fill(tasks, NODES, policy(mix, seed))
    return left


def test_fgd():
    """A node by hand; on a mix of shared GPUs fewer stay unallocated than by best fit, and than by chance; where
    CPUs are short best fit is better, and the row says so."""
    half = [(1.0, Shape(0.5, 4))]
    assert fragment([0.25, 0.75, 1.0], 8, half) == 0.25  # too small a piece
    assert fragment([0.25, 0.75, 1.0], 3, half) == 2  # no CPUs for it
    assert fragment([0.5, 1, 1], 8, [(0.5, Shape(2, 8)), (0.5, Shape(4, 8))]) == 0.5 * 0.5 + 0.5 * 2.5
    policies = (lambda mix, seed: fgd(mix)), (lambda *_: best_fit), (lambda mix, seed: at_random(seed))
    gradient, fit, chance = unallocated(SHARING, policies)
    assert [round(100 * left) for left in (gradient, fit, chance)] == [701, 766, 1202]
    gradient, fit = unallocated(FEW_CPUS, policies[:2])
    assert 1 < gradient / fit < 1.1


def test_nothing_is_placed_twice():
    """A task that fits nowhere goes away; whole GPUs stay whole for one that asks for several."""
    assert fill([Shape(2, 1), Shape(1, 1)], [Shape(2, 2)], best_fit) == 0
    assert fill([Shape(0.5, 1), Shape(0.5, 1), Shape(1, 1)], [Shape(2, 3)], best_fit) == 0
    assert fill([Shape(0.5, 1), Shape(2, 1)], [Shape(2, 2)], fgd([(1.0, Shape(2, 1))])) == 0.75
    assert fill([Shape(1, 3)], [Shape(1, 2)], best_fit) == 1
