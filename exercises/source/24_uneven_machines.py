# %% [markdown]
# # Exercises 24: uneven machines, and models that learn from rewards
#
# Five tasks, 10 points, about two hours. Read chapter 24 first. No GPU, nothing to download.
#
# Write where a cell says `YOUR CODE HERE`, run the cell, then run the check below it. A check tells which property of your
# answer is broken. When the visible checks pass, grade yourself in a terminal:
#
#     minitrain grade 24
#
# The grader runs the same checks and hidden ones with other sizes and values. An answer cell stands alone: it may use read-only cells, but for those
# that say they are for checks, and not your other cells. Nothing here runs on ranks.
#
# Task 1 is Whale's deal (Jia et al. 2022, arXiv:2011.09208) with what a device costs before its first row; task 2 GAE (Schulman et al. 2016,
# arXiv:1506.02438); task 3 GRPO as published (Shao et al. 2024, arXiv:2402.03300); task 4 the estimators that frameworks call k1, k2, k3
# (Schulman 2020); task 5 what DeepSpeed-Chat's hybrid engine moves (Yao et al. 2023, arXiv:2308.01320).

# %% given="setup"
import math
from itertools import product

import torch

# %% judge="tools"
from minitrain.course.grading.answer_checks import Draw, ask_each, expect, expect_equal

draw = Draw()  # hidden checks draw sizes and values


def expect_each(answer, cases, wanted, property, hint):
    """wanted[i] of cases[i], exactly."""
    for said, case, right in zip(ask_each(answer, list(cases)), cases, wanted):
        expect(type(said) is type(right), "kind of result", f"see the API (seen with {case})")
        expect(said == right, property, f"{hint} (seen with {case})")


# %% [markdown]
# ## 1. Rows for devices that cost something to wake (2 points)
#
# Device i with c > 0 rows works for `wake[i] + c · row[i]` ms; without rows it takes part in nothing, and works for 0 ms. It has memory for
# `most[i]` rows. Deal `total` rows so that the longest time is as short as can be. Any deal with this time is right.
#
# Why is one row after the other, each to who would be done with it first, the best deal here too? Move a row of the slowest device to another,
# and ask when that one would be done.
#
# > **API** `deal(total, wake, row, most)` gets a whole number up to 2,000 and three lists of whole numbers, one for each device; `row` is above 0,
# > the sum of `most` at least `total`. Returns a list: the rows of each device.


# %% answer="deal"
def deal(total, wake, row, most):
    """-> [rows of device i]."""
    ### BEGIN SOLUTION
    rows = [0] * len(row)
    for _ in range(total):
        end = {i: wake[i] + (c + 1) * row[i] for i, c in enumerate(rows) if c < most[i]}
        rows[min(end, key=end.get)] += 1
    return rows
    ### END SOLUTION


# %% judge="deal_right"
def able(ms, wake, row, most):
    """Rows that can be done in `ms`."""
    return sum(min(limit, max(0, (ms - w) // r)) for w, r, limit in zip(wake, row, most))


def expect_deals(cases, property, hint):
    for rows, case in zip(ask_each(deal, list(cases)), cases):
        total, wake, row, most = case
        whole = isinstance(rows, list) and all(type(c) is int for c in rows)
        expect(whole and len(rows) == len(row), "kind of result", f"see the API (seen with {case})")
        fits = all(0 <= c <= limit for c, limit in zip(rows, most))
        expect(fits and sum(rows) == total, "all rows, within memory", f"seen with {case}")
        end = max(w + c * r for w, c, r in zip(wake, rows, row) if c)
        expect(able(end - 1, wake, row, most) < total, property, f"{hint} (seen with {case})")


### BEGIN HIDDEN TESTS
def drawn_devices(count, asleep):
    """Devices of which the best deal leaves some asleep, or none."""
    found = []
    while len(found) < count:
        n, total = draw.integer(2, 6), draw.integer(5, 60)
        wake = [draw.integer(1, 60) for _ in range(n)]
        row, most = ([draw.integer(1, top) for _ in range(n)] for top in (9, total))
        most[draw.randrange(n)] += total * (sum(most) < total)
        end = next(ms for ms in range(10**4) if able(ms, wake, row, most) >= total)
        if asleep == any(end < w + r for w, r in zip(wake, row)):
            found.append((total, wake, row, most))
    return found


### END HIDDEN TESTS

# %% check="deal-speeds" points=1
# By speed and what is lost before the first row, in whole rows, within each memory.
SPEED = "could the device that ends last give a row to one that would end earlier with it?"
cases = [(12, [0, 0], [1, 2], [12, 12]), (12, [4, 1], [1, 2], [7, 12])]
expect_deals(cases, "the shortest time", SPEED)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
expect_deals(drawn_devices(14, False), "the shortest time", SPEED)
### END HIDDEN TESTS

# %% check="deal-wake" points=1
# A device that is not worth waking stays without rows.
WAKE = "who is done first with one row more, and what if that row is its first?"
expect_deals([(6, [0, 50], [2, 1], [6, 6]), (2, [0, 6], [2, 2], [9, 9])], "worth waking", WAKE)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
expect_deals(drawn_devices(14, True), "worth waking", WAKE)
### END HIDDEN TESTS

# %% [markdown]
# ## 2. Advantages of several episodes in a row (2 points)
#
# A row of tokens holds several answers, packed one behind the other. Answer number e of a token is `episode[t]`; it is the same for neighbours
# of one answer. Some tokens did not come from the actor (a prompt, the result of a tool, padding): `wrote[t]` is False. These have no advantage, 0,
# and no value; the token after a written one is the next *written* one of the same episode. With V = 0 and A = 0 after an episode's last:
#
#     δ_t = reward_t + γ V_next - V_t        A_t = δ_t + γ λ A_next
#
# A reward that came at a token which the actor did not write belongs to the last written token before it in the episode (if none: to nobody).
#
# > **API** `advantages(rewards, values, episode, wrote, gamma, lam)` gets four lists of one length, with floats, floats, whole numbers and
# > booleans, and two floats. Returns a list of floats, right to 1e-9.


# %% answer="advantages"
def advantages(rewards, values, episode, wrote, gamma, lam):
    """-> [A_t], 0 where the actor did not write."""
    ### BEGIN SOLUTION
    found = [0.0] * len(rewards)
    value = gain = late = 0.0
    for t in reversed(range(len(rewards))):
        if t + 1 == len(rewards) or episode[t] != episode[t + 1]:
            value = gain = late = 0.0
        late += rewards[t]
        if wrote[t]:
            gain = late + gamma * value - values[t] + gamma * lam * gain
            value, late, found[t] = values[t], 0.0, gain
    return found
    ### END SOLUTION


# %% judge="advantages_right"
def drawn_tokens(episodes, share):
    lengths = [draw.integer(1, 6) for _ in range(episodes)]
    episode = [e for e, length in enumerate(lengths) for _ in range(length)]
    wrote = [draw.random() < share for _ in episode]
    some = lambda: draw.real(len(episode)).tolist()
    return some(), some(), episode, wrote, draw.uniform(0.3, 0.9), draw.uniform(0.3, 0.9)


def expect_advantages(cases, wanted, property, hint):
    for said, case, right in zip(ask_each(advantages, cases), cases, wanted):
        numbers = isinstance(said, list) and all(isinstance(x, float) for x in said)
        expect(
            numbers and len(said) == len(right), "kind of result", f"see the API (seen with {case})"
        )
        near = all(abs(one - other) < 1e-9 for one, other in zip(said, right))
        expect(near, property, f"{hint} (seen with {case})")


### BEGIN HIDDEN TESTS
def advantages_by_sums(rewards, values, episode, wrote, gamma, lam):
    """A sum over all later errors of the same episode, from lists of written tokens."""
    found = [0.0] * len(rewards)
    for e in set(episode):
        where = [t for t, one in enumerate(episode) if one == e]
        mine = [t for t in where if wrote[t]]
        paid = dict.fromkeys(mine, 0.0)
        for t in where:
            earlier = [s for s in mine if s <= t]
            if earlier:
                paid[earlier[-1]] += rewards[t]
        worth = [values[t] for t in mine] + [0.0]
        errors = [paid[t] + gamma * worth[i + 1] - worth[i] for i, t in enumerate(mine)]
        for i, t in enumerate(mine):
            found[t] = sum((gamma * lam) ** k * error for k, error in enumerate(errors[i:]))
    return found


### END HIDDEN TESTS

# %% check="advantages-episodes" points=1
# Nothing flows from one episode into the one before it.
EPISODES = (
    "what comes after the last token of an episode: the value of the next episode's first token?"
)
case = [0.0, 1.0, 1.0], [0.5, 0.5, 0.5], [0, 0, 1], [True] * 3, 1.0, 0.5
expect_advantages([case], [[0.25, 0.5, 0.5]], "episodes", EPISODES)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
cases = [drawn_tokens(draw.integer(2, 5), 2) for _ in range(10)]
expect_advantages(cases, [advantages_by_sums(*case) for case in cases], "episodes", EPISODES)
### END HIDDEN TESTS

# %% check="advantages-masks" points=1
# Tokens that the actor did not write are stepped over, and their rewards are not lost.
MASKS = "which token is the next that the actor wrote, and who earned what came in between?"
case = [0.0, 1.0, 1.0], [0.5, 1.0, 0.5], [0, 0, 0], [True, False, True], 1.0, 0.5
expect_advantages([case], [[1.25, 0.0, 0.5]], "masks", MASKS)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
cases = [drawn_tokens(draw.integer(2, 5), 0.5) for _ in range(16)]
expect_advantages(cases, [advantages_by_sums(*case) for case in cases], "masks", MASKS)
### END HIDDEN TESTS

# %% [markdown]
# ## 3. The gradient of GRPO, by hand (2 points)
#
# `n` answers to one prompt, of different lengths. With the advantage A_i = (reward_i - mean) / std over the group (std of the n rewards:
# squares divided by n; all A_i are 0 if it is 0) and the ratio r = exp(now - old) of a token, the published loss is a mean over answers of a
# mean over the tokens of an answer:
#
#     loss = - 1/n Σ_i 1/T_i Σ_t min(r A_i, clip(r, 1 - ε, 1 + ε) A_i)
#
# Write its gradient with respect to `now`. When is the minimum flat? Not whenever r is outside of the clip.
#
# > **API** `grpo_gradient(now, old, rewards, clip)` gets two lists of n float64 tensors `[T_i]`, log-probabilities of the tokens now and when
# > written, a list of n floats, and ε. Returns a list of n float64 tensors `[T_i]`. Autograd is switched off.


# %% answer="grpo_gradient"
def grpo_gradient(now, old, rewards, clip):
    """-> [gradient of the loss with respect to now[i]]."""
    ### BEGIN SOLUTION
    n = len(rewards)
    mean = sum(rewards) / n
    std = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / n)
    found = []
    for new, before, reward in zip(now, old, rewards):
        gain = (reward - mean) / std if max(rewards) > min(rewards) else 0.0
        ratio = torch.exp(new - before)
        moves = ratio < 1 + clip if gain > 0 else ratio > 1 - clip
        found.append(-gain * ratio * moves / (n * len(new)))
    return found
    ### END SOLUTION


# %% judge="gradient_right"
def drawn_answers(same=False, near=False):
    n = draw.integer(2, 6)
    now = [-draw.real(draw.integer(1, 7)).abs() for _ in range(n)]
    old = [x + (0.01 if near else 0.5) * draw.real(len(x)).clamp(-3, 3) for x in now]
    rewards = [draw.choice((0.0, 1.0, 0.25, -2.0)) for _ in range(n)]
    rewards[1] = rewards[0] if same else rewards[0] + 1
    return now, old, [rewards[0]] * n if same else rewards, 0.2


def gradient_by_autograd(now, old, rewards, clip):
    now, rewards = [x.clone().requires_grad_() for x in now], torch.tensor(rewards).double()
    spread = rewards.std(correction=0)
    gains = (rewards - rewards.mean()) / spread if spread > 1e-12 else torch.zeros_like(rewards)
    loss = 0.0
    for new, before, gain in zip(now, old, gains):
        r = (new - before).exp()
        loss = loss - torch.minimum(r * gain, r.clamp(1 - clip, 1 + clip) * gain).mean() / len(now)
    return list(torch.autograd.grad(loss, now))


def expect_gradients(cases, property, hint):
    for said, case in zip(ask_each(grpo_gradient, cases, autograd=False), cases):
        expect(isinstance(said, list), "kind of result", "see the API")
        wanted = [x.detach() for x in gradient_by_autograd(*case)]
        expect_equal(said, wanted, property, hint, atol=1e-10)


# %% check="gradient-groups" points=1
# Near the old policy: advantages of the group, a mean of means, and a group without differences.
GROUPS = "what is the mean taken over, and what does a group teach whose rewards are all the same?"
TWO = [torch.tensor([-1.0, -2.0]).double(), torch.tensor([-1.0]).double()]
expect_gradients([(TWO, TWO, [1.0, 0.0], 0.2), (TWO, TWO, [1.0, 1.0], 0.2)], "the group", GROUPS)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
cases = [drawn_answers(near=True) for _ in range(6)] + [drawn_answers(same=True) for _ in range(2)]
cases.append(([TWO[0]] * 3, [TWO[0]] * 3, [0.1, 0.1, 0.1], 0.2))  # whose mean rounds
expect_gradients(cases, "the group", GROUPS)
### END HIDDEN TESTS

# %% check="gradient-clip" points=1
# Far from it: flat on one side only, which one depends on the sign of the advantage.
CLIP = "on which side of the clip is the unclipped term the smaller one?"
FAR = [torch.tensor([-1.0, -2.0, -1.0]).double()] * 2
NEAR_FAR = [torch.tensor([-2.0, -2.0, -0.5]).double()] * 2
expect_gradients([(FAR, NEAR_FAR, [1.0, 0.0], 0.2)], "the clip", CLIP)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
expect_gradients([drawn_answers() for _ in range(8)], "the clip", CLIP)
LONG = [torch.linspace(-3, -1, 9).double()] * 2
expect_gradients([(LONG, LONG[::-1], [0.0, 1.0], 0.3)], "the clip", CLIP)
SHIFT = [x + torch.linspace(-1, 1, 9).double() for x in LONG]
expect_gradients([(LONG, SHIFT, [draw.uniform(1, 2), 0.0], 0.1)], "the clip", CLIP)
### END HIDDEN TESTS

# %% [markdown]
# ## 4. Three estimates of one divergence (2 points)
#
# KL(π | π_ref) is estimated from the tokens that π draws. With ρ = π_ref(token) / π(token):
#
#     k1 = -log ρ        k2 = (log ρ)² / 2        k3 = ρ - 1 - log ρ
#
# For a policy and a reference over a small vocabulary, compute each estimate's *bias*, its mean over the policy's tokens minus
# KL, and its *variance*, without drawing anything. A token may have probability 0 under the policy, and is then never drawn; the reference has
# some for every token.
#
# > **API** `estimates(policy, reference)` gets two lists of floats, each of sum 1. Returns a list of three pairs, (bias, variance) of k1, k2
# > and k3, floats; right to 1e-9.


# %% answer="estimates"
def estimates(policy, reference):
    """-> [(bias, variance)] of k1, k2, k3."""
    ### BEGIN SOLUTION
    drawn = [(p, q / p) for p, q in zip(policy, reference) if p]
    kl = -sum(p * math.log(rho) for p, rho in drawn)
    found = []
    for k in (
        lambda rho: -math.log(rho),
        lambda rho: math.log(rho) ** 2 / 2,
        lambda rho: rho - 1 - math.log(rho),
    ):
        mean = sum(p * k(rho) for p, rho in drawn)
        found.append((mean - kl, sum(p * (k(rho) - mean) ** 2 for p, rho in drawn)))
    return found
    ### END SOLUTION


# %% judge="estimates_right"
def drawn_policies(never):
    size = draw.integer(3, 7)
    logits = 0.7 * draw.real(2, size)
    if never:
        logits[0, draw.several(range(size), draw.integer(1, size - 2))] = -math.inf
    return tuple(logits.softmax(1).tolist())


def moments(policy, reference):
    """By tensors: the second moment less the square of the first."""
    p, q = (torch.tensor(x, dtype=torch.float64) for x in (policy, reference))
    p, q = p[p > 0], q[p > 0]
    far = p.log() - q.log()
    rows = torch.stack((far, far**2 / 2, far + q / p - 1))
    means = rows @ p
    return torch.stack((means - p @ far, rows.square() @ p - means**2), 1)


def expect_estimates(cases, property, hint, column):
    for said, case in zip(ask_each(estimates, cases), cases):
        shape = (
            isinstance(said, list)
            and len(said) == 3
            and all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in said)
        )
        expect(shape, "kind of result", "see the API")
        known = all(isinstance(x, float) for pair in said for x in pair)
        expect(known, "kind of result", "see the API")
        one, two = torch.tensor(said, dtype=torch.float64), moments(*case)
        off = (one - two).abs()
        expect(bool((off[:, column] < 1e-9).all()), property, hint)
        expect(bool((off < 1e-9).all()), "both moments", "bias and variance of all three")


# %% check="estimates-variance" points=1
# Two without bias, one of them with less variance.
SPREAD = "the variance of one draw, around the estimate's own mean?"
expect_estimates([([0.5, 0.5], [0.25, 0.75])], "variance", SPREAD, 1)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
expect_estimates([drawn_policies(False) for _ in range(10)], "variance", SPREAD, 1)
### END HIDDEN TESTS

# %% check="estimates-bias" points=1
# A policy that never writes some tokens: one estimate of the two is biased after all.
BIAS = "what is the mean of ρ over the tokens that are drawn, if some never are?"
expect_estimates([([0.5, 0.5, 0.0], [0.25, 0.5, 0.25])], "bias", BIAS, 0)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
expect_estimates([drawn_policies(True) for _ in range(10)], "bias", BIAS, 0)
### END HIDDEN TESTS

# %% [markdown]
# ## 5. Who sends what when the layout changes (2 points)
#
# The actor trains with ZeRO-3 on n ranks: all matrices are written one behind the other, row by row, into one line of elements, the line is padded to
# a multiple of n, and rank r has the r-th of n equal parts. It generates with tp = t: rank r has part r % t of each matrix, cut in t equal parts
# along dim 0 or 1, or all of it (cut None). Padding is wanted by nobody, and what a rank has it does not send to itself. How many bytes, at 2 per
# element, does each rank send to each other one?
#
# > **API** `handed(matrices, n, t)` gets a list of (rows, columns, cut), the cut dim a multiple of t, and two whole numbers, t a divisor of n. Returns
# > n lists of n whole numbers: `[a][b]` bytes from rank a to rank b, 0 where a = b. A model has up to 5,000 elements.


# %% answer="handed"
def handed(matrices, n, t):
    """-> bytes[from][to]."""
    ### BEGIN SOLUTION
    size = sum(rows * columns for rows, columns, _ in matrices)
    part = -(-size // n)
    table, at = [[0] * n for _ in range(n)], 0
    for rows, columns, cut in matrices:
        for i, j in product(range(rows), range(columns)):
            wants = None if cut is None else (i * t // rows, j * t // columns)[cut]
            for to in range(n):
                if (wants is None or to % t == wants) and to != at // part:
                    table[at // part][to] += 2
            at += 1
    return table
    ### END SOLUTION


# %% judge="handed_right"
def drawn_model(cuts):
    t = draw.choice((1, 2, 3))
    n = t * draw.integer(1, 3)
    n += (n == 1) * 2 * t
    sizes = lambda: t * draw.integer(1, 6)
    return [(sizes(), sizes(), draw.choice(cuts)) for _ in range(draw.integer(1, 4))], n, t


### BEGIN HIDDEN TESTS
def handed_by_tensors(matrices, n, t):
    """Each element knows its owner; a rank's part is cut out of the tensor of owners."""
    size = sum(rows * columns for rows, columns, _ in matrices)
    owner = torch.arange(size) // math.ceil(size / n)
    table, at = torch.zeros(n, n, dtype=torch.long), 0
    for rows, columns, cut in matrices:
        whole = owner[at : at + rows * columns].view(rows, columns)
        at += rows * columns
        for to in range(n):
            mine = whole if cut is None else whole.chunk(t, cut)[to % t]
            table[:, to] += 2 * torch.bincount(mine.flatten(), minlength=n)
    return table.fill_diagonal_(0).tolist()


### END HIDDEN TESTS

# %% check="handed-rows" points=1
# Whole matrices, or cut by rows.
LINE = "which part of the line has the element, who wants it, and who has it already?"
expect_each(
    handed,
    [([(2, 2, None)], 2, 1), ([(2, 3, 0), (1, 1, None)], 2, 2)],
    [[[0, 4], [4, 0]], [[0, 2], [0 + 2, 0]]],
    "pairs of ranks",
    LINE,
)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
cases = [drawn_model((None, 0)) for _ in range(12)]
expect_each(handed, cases, [handed_by_tensors(*case) for case in cases], "pairs of ranks", LINE)
### END HIDDEN TESTS

# %% check="handed-columns" points=1
# Cut by columns too: what a rank wants lies in many places of the line.
COLUMNS = "which columns does the rank want of each row?"
expect_each(handed, [([(2, 2, 1)], 2, 2)], [[[0, 2], [2, 0]]], "columns", COLUMNS)
print("the visible checks pass")
### BEGIN HIDDEN TESTS
cases = [drawn_model((0, 1, 1, None)) for _ in range(12)]
expect_each(handed, cases, [handed_by_tensors(*case) for case in cases], "columns", COLUMNS)
### END HIDDEN TESTS
