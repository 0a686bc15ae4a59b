"""Whatever updates, and however early: what is saved is the state of the step boundary, to the bit.

Copies stop until the update that would change them asks for them; without that question (the control) they
are done after the update, and differ.
"""

from functools import partial

import pytest
import torch

from minitrain import launch
from minitrain.checkpoint.saver import Saver
from minitrain.checkpoint.store import Store
from minitrain.data_parallel import states
from minitrain.model.config import ExpertsConfig
from tests.checkpoint.saver_runs import ALL, Hold, adamw, copies, differing, run_of, train
from tests.parallel import small

EXPERTS = small(experts=ExpertsConfig(num_experts=4, top_k=2, router="deepseek", bias_speed=0.01))


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


PIPELINE = dict(pp=2, microbatches=4, schedule="1f1b")
LAYOUTS = {
    "zero 0": dict(dp=2), "zero 0, torch's optimizer": dict(dp=2, make_optimizer=sgd),
    "zero 1": dict(dp=2, zero=1), "zero 1, clipped": dict(dp=2, zero=1, clip=0.1),
    "zero 2": dict(dp=2, zero=2, microbatches=2), "zero 3": dict(dp=2, zero=3, microbatches=2),
    "tp": dict(tp=2), "pipeline": PIPELINE, "zero bubble": dict(PIPELINE, schedule="zb_h1"),
    "post-validation": dict(PIPELINE, post_validation=True, clip=0.05),
    "post-validation, never clipped": dict(PIPELINE, post_validation=True, clip=1e9),
    "offload": dict(dp=2, zero=1, offload="optimizer"),
    "offload, zero 3": dict(dp=2, zero=3, offload="optimizer+parameters"),
    "offload, clipped": dict(dp=2, zero=2, offload="optimizer", clip=0.1),
    "offload, delayed": dict(dp=2, zero=1, offload="optimizer", delayed_update=True),
    "offload, torch's optimizer": dict(dp=2, offload="optimizer", make_optimizer=sgd),
    "delayed scales": dict(dp=2, zero=1, products="fp8_delayed"),
    "experts": dict(dp=2, zero=1, config=EXPERTS),
    "scaled loss": dict(dp=2, zero=1, loss_scale=2.0**20, loss_scale_window=1),
}  # fmt: skip
FOUR = {"zero 2 in a pipeline": dict(PIPELINE, dp=2, zero=2), "hybrid": dict(dp=4, zero="IIG", node=2)}


CASES = (("asynchronous", True),), (("lightcheck", True), ("asynchronous", False))  # False: nobody asks


def at_the_boundary(folder, cases, clip=None, make_optimizer=adamw, **layout):
    """-> {case: (names saved with other values than those of the boundary, why training waited)}"""
    run, found = run_of(make_optimizer, **layout), {}
    if layout.get("delayed_update"):
        run.sync.optimizer.warmup_steps = 0
    train(run, 0, clip=clip)
    for number, case in enumerate(cases):
        way, attached = case
        step = 2 * number + 1
        with Saver(Store(f"{folder}/{number}"), policy=way) as saver:
            hold = Hold(saver.snapshot, ALL)
            states.tell_updates(run.sync, partial(asked, saver, hold) if attached else lambda names: None)
            if saver.policy.by_layer:
                train(run, step, clip=clip)  # an order to learn
            wanted = copies(run.pieces())
            hold.allow(0)
            saver.save(step, run.pieces(), run.plain_state(), {})
            train(run, step + 1, clip=clip)
            run.settle()
            states.settle(run.sync)
            hold.allow()
            saver.finish()
            found[case] = differing(saver.store, step, wanted), [wait.why for wait in saver.waits]
    return found


def asked(saver, hold, names):
    """Let go of what the update asks for, and of no more."""
    hold.allow(max(hold.allowed, saver.snapshot.until(names if saver.policy.by_layer else None)))
    saver.before_update(names)


def all_layouts(folder, layouts):
    numbered = enumerate(layouts.items())  # every second one copies by layer, and has its control
    return {name: at_the_boundary(f"{folder}/{n}", CASES[1 - n % 2], **a) for n, (name, a) in numbered}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    two = launch.run(all_layouts, str(tmp_path_factory.mktemp("two")), LAYOUTS, ranks=2, timeout_s=300)
    four = launch.run(all_layouts, str(tmp_path_factory.mktemp("four")), FOUR, ranks=4, timeout_s=300)
    return [*two, *four]


@pytest.mark.parametrize("name", [*LAYOUTS, *FOUR])
def test_what_is_saved_is_the_state_of_the_boundary(outcomes, name):
    controls, number = set(), [*LAYOUTS, *FOUR].index(name)
    for rank in outcomes:
        for (way, attached), (differs, waits) in rank.get(name, {}).items():
            if attached:
                assert not differs, (way, differs)
                assert set(waits) <= {"copy", "write"} and "copy" in waits
            else:
                controls |= {found.split("/")[0] for found in differs}
                assert "copy" not in waits
    kinds = {"parameters", "optimizer"} | ({"amax"} if name == "delayed scales" else set())
    assert controls == (kinds if (number - len(LAYOUTS) * (name in FOUR)) % 2 == 0 else set())
