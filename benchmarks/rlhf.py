"""RLHF from nothing, over seeds: `python -m benchmarks rlhf --seeds 3 --steps 80`.

Two ranks. A small GPT learns sums of two digits from demonstrations of which half are wrong; then GRPO (an
exact check is the reward) or PPO (a reward model that has learned from pairs) goes on, the actor in ZeRO-1
and, while it generates, in tp. Printed are mean rewards of the first and last ten iterations, the divergence
from the reference, and processor seconds of a rank.
"""

import time

from minitrain import collectives, launch
from minitrain.compose.parallelize import parallelize
from minitrain.course.sums import answer_batch, answered, is_right, preference_batch, prompts, share_right
from minitrain.model.config import GPTConfig
from minitrain.model.data.batches import rows_of
from minitrain.model.training.optim import AdamW
from minitrain.plan.strategy import Strategy
from minitrain.systems.rlhf.policy import (
    PolicyLoss,
    PreferenceLoss,
    ValueLoss,
    grpo_step,
    hand_over,
    ppo_step,
)

CONFIG = GPTConfig(vocab_size=12, d_model=64, num_layers=1, num_heads=4, max_positions=8)
ROWS, ANSWERS = 512, 8


def run_of(loss, seed: int = 0, lr: float | None = None, config=CONFIG, **strategy):
    make = (lambda params: AdamW(params, lr=lr, weight_decay=0.0)) if lr else None
    return parallelize(config, Strategy(**strategy), make, seed=seed, loss_fn=loss)


def trained(method: str, steps: int, seed: int = 0, demonstrations: int = 150, pairs: int = 400) -> tuple:
    """On each rank: ([(share of right answers, KL) of every iteration], processor seconds)."""
    world, started = collectives.world(), time.process_time()
    n, first = world.size(), 10_000 * seed
    rows = rows_of(world.rank(), n, ROWS)
    losses = PolicyLoss(kl=0.02 if method == "grpo" else 0.0), ValueLoss()
    zero = dict(dp=n, zero=1)
    actor = run_of(losses[0], seed, 3e-3, **zero)
    for step in range(demonstrations):
        tokens = answered(prompts(ROWS // 2, first + step), 0.5, first + step + 1)
        actor.step(answer_batch(tokens[world.rank() :: n], step, world), 1.0)
    reference, generator = run_of(PolicyLoss(), dp=n), run_of(PolicyLoss(), tp=n)
    hand_over(actor, reference, world)
    for group in actor.sync.param_groups:
        group["lr"] = 2e-3
    if method == "ppo":
        critic, reward = (
            run_of(losses[1], seed + 1, 3e-3, **zero),
            run_of(PreferenceLoss(), seed + 2, 6e-3, **zero),
        )
        for step in range(pairs):
            reward.step(preference_batch(256 // n, first + 2 * (n * step + world.rank()), step, world), 1.0)
    answers, told = ANSWERS if method == "grpo" else 1, []
    for step in range(steps):
        hand_over(actor, generator, world)
        asked = prompts(ROWS // answers, first + 5000 + step).repeat_interleave(answers, 0)
        tokens = generator.sample(asked, 2, seed=step)[rows.start : rows.stop]
        batch = answer_batch(tokens, step, world)
        if method == "grpo":
            kl = grpo_step(actor, reference, losses[0], batch, is_right(tokens), answers, world)
        else:
            kl = ppo_step(actor, critic, reference, reward, losses, batch, world)
        told.append((share_right(tokens, world), kl))
    return told, time.process_time() - started


def report(seeds: int = 3, steps: int = 80) -> str:
    lines = []
    for method in ("grpo", "ppo"):
        for seed in range(seeds):
            started = time.perf_counter()
            told, seconds = launch.run(trained, method, steps, seed, ranks=2, timeout_s=300)[0]
            mean = lambda some: sum(some) / len(some)
            right, kls = zip(*told)
            rewards = f"{mean(right[:10]):.2f} -> {mean(right[-10:]):.2f}"
            kl, wall = mean(kls[-10:]), time.perf_counter() - started
            took = f"{seconds:.0f} processor seconds a rank, {wall:.0f} s"
            lines.append(f"{method:4} seed {seed}: reward {rewards}, KL {kl:.2f} a token, {took}")
    return "\n".join(lines)
