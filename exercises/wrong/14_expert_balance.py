# %% wrong="balance" fails="a step of one size" why="a step for each part: two microbatches move the bias twice"
def moved_bias(bias, parts, speed):
    for part in parts:
        counts = torch.bincount(part[part != NOWHERE], minlength=len(bias))
        bias = bias + speed * torch.sign(counts.sum() - counts * len(bias)).to(bias.dtype)
    return bias


def part_losses(parts, alpha):
    chosen = torch.cat([own for _, own in parts])
    num_experts, tokens = parts[0][0].shape[1], (chosen[:, 0] != NOWHERE).sum()
    counts = torch.bincount(chosen[chosen != NOWHERE], minlength=num_experts)
    weights = alpha * num_experts * counts.double() / (counts.sum() * tokens)
    return [(weights * probs.sum(0)).sum() for probs, _ in parts]


# %% wrong="balance" fails="a step of one size" why="the further from the mean, the larger the step"
def moved_bias(bias, parts, speed):
    chosen = torch.cat([part.flatten() for part in parts])
    counts = torch.bincount(chosen[chosen != NOWHERE], minlength=len(bias)).double()
    return bias + speed * (counts.mean() - counts) / counts.mean()


def part_losses(parts, alpha):
    chosen = torch.cat([own for _, own in parts])
    num_experts, tokens = parts[0][0].shape[1], (chosen[:, 0] != NOWHERE).sum()
    counts = torch.bincount(chosen[chosen != NOWHERE], minlength=num_experts)
    weights = alpha * num_experts * counts.double() / (counts.sum() * tokens)
    return [(weights * probs.sum(0)).sum() for probs, _ in parts]


# %% wrong="balance" fails="a step of one size" why="the last part alone is looked at"
def moved_bias(bias, parts, speed):
    counts = torch.bincount(parts[-1][parts[-1] != NOWHERE], minlength=len(bias))
    return bias + speed * torch.sign(counts.sum() - counts * len(bias)).to(bias.dtype)


def part_losses(parts, alpha):
    chosen = torch.cat([own for _, own in parts])
    num_experts, tokens = parts[0][0].shape[1], (chosen[:, 0] != NOWHERE).sum()
    counts = torch.bincount(chosen[chosen != NOWHERE], minlength=num_experts)
    weights = alpha * num_experts * counts.double() / (counts.sum() * tokens)
    return [(weights * probs.sum(0)).sum() for probs, _ in parts]


# %% wrong="balance" fails="up where tokens are missing" why="the wrong way: busy experts become busier"
def moved_bias(bias, parts, speed):
    chosen = torch.cat([part.flatten() for part in parts])
    counts = torch.bincount(chosen[chosen != NOWHERE], minlength=len(bias))
    return bias - speed * torch.sign(counts.sum() - counts * len(bias)).to(bias.dtype)


def part_losses(parts, alpha):
    chosen = torch.cat([own for _, own in parts])
    num_experts, tokens = parts[0][0].shape[1], (chosen[:, 0] != NOWHERE).sum()
    counts = torch.bincount(chosen[chosen != NOWHERE], minlength=num_experts)
    weights = alpha * num_experts * counts.double() / (counts.sum() * tokens)
    return [(weights * probs.sum(0)).sum() for probs, _ in parts]


# %% wrong="balance" fails="up where tokens are missing" why="parts vote, however few tokens they have"
def moved_bias(bias, parts, speed):
    votes = torch.zeros_like(bias)
    for part in parts:
        counts = torch.bincount(part[part != NOWHERE], minlength=len(bias))
        votes += torch.sign(counts.sum() - counts * len(bias))
    whole = torch.cat([part.flatten() for part in parts])
    counts = torch.bincount(whole[whole != NOWHERE], minlength=len(bias))
    at_mean = counts * len(bias) == counts.sum()
    votes = torch.where(votes == 0, torch.ones_like(votes), votes)
    return bias + speed * torch.sign(votes).masked_fill(at_mean, 0)


def part_losses(parts, alpha):
    chosen = torch.cat([own for _, own in parts])
    num_experts, tokens = parts[0][0].shape[1], (chosen[:, 0] != NOWHERE).sum()
    counts = torch.bincount(chosen[chosen != NOWHERE], minlength=num_experts)
    weights = alpha * num_experts * counts.double() / (counts.sum() * tokens)
    return [(weights * probs.sum(0)).sum() for probs, _ in parts]


# %% wrong="balance" fails="up where tokens are missing" why="an expert with exactly the mean goes up too"
def moved_bias(bias, parts, speed):
    chosen = torch.cat([part.flatten() for part in parts])
    counts = torch.bincount(chosen[chosen != NOWHERE], minlength=len(bias))
    return torch.where(counts * len(bias) <= counts.sum(), bias + speed, bias - speed)


def part_losses(parts, alpha):
    chosen = torch.cat([own for _, own in parts])
    num_experts, tokens = parts[0][0].shape[1], (chosen[:, 0] != NOWHERE).sum()
    counts = torch.bincount(chosen[chosen != NOWHERE], minlength=num_experts)
    weights = alpha * num_experts * counts.double() / (counts.sum() * tokens)
    return [(weights * probs.sum(0)).sum() for probs, _ in parts]


# %% wrong="balance" fails="up where tokens are missing" why="expert -1 is the last one: masked tokens make it busy"
def moved_bias(bias, parts, speed):
    counts = torch.zeros(len(bias), dtype=torch.long)
    for part in parts:
        for e in part.flatten().tolist():
            counts[e] += 1
    return bias + speed * torch.sign(counts.sum() - counts * len(bias)).to(bias.dtype)


def part_losses(parts, alpha):
    chosen = torch.cat([own for _, own in parts])
    num_experts, tokens = parts[0][0].shape[1], (chosen[:, 0] != NOWHERE).sum()
    counts = torch.bincount(chosen[chosen != NOWHERE], minlength=num_experts)
    weights = alpha * num_experts * counts.double() / (counts.sum() * tokens)
    return [(weights * probs.sum(0)).sum() for probs, _ in parts]


# %% wrong="balance" fails="an expert without tokens" why="only experts that were chosen are looked at"
def moved_bias(bias, parts, speed):
    chosen = torch.cat([part.flatten() for part in parts])
    counts, moved = torch.bincount(chosen[chosen != NOWHERE], minlength=len(bias)), bias.clone()
    for e in chosen[chosen != NOWHERE].unique().tolist():
        moved[e] += speed * float(torch.sign(counts.sum() - counts[e] * len(bias)))
    moved[counts == 0] -= speed
    return moved


def part_losses(parts, alpha):
    chosen = torch.cat([own for _, own in parts])
    num_experts, tokens = parts[0][0].shape[1], (chosen[:, 0] != NOWHERE).sum()
    counts = torch.bincount(chosen[chosen != NOWHERE], minlength=num_experts)
    weights = alpha * num_experts * counts.double() / (counts.sum() * tokens)
    return [(weights * probs.sum(0)).sum() for probs, _ in parts]


# %% wrong="balance" fails="the loss of the batch" why="a mean of means: each part with its own shares, then the mean over parts"
def moved_bias(bias, parts, speed):
    chosen = torch.cat([part.flatten() for part in parts])
    counts = torch.bincount(chosen[chosen != NOWHERE], minlength=len(bias))
    return bias + speed * torch.sign(counts.sum() - counts * len(bias)).to(bias.dtype)


def part_losses(parts, alpha):
    losses = []
    for probs, chosen in parts:
        num_experts, tokens = probs.shape[1], (chosen[:, 0] != NOWHERE).sum().clamp(min=1)
        counts = torch.bincount(chosen[chosen != NOWHERE], minlength=num_experts).double()
        shares = counts / counts.sum().clamp(min=1)
        losses.append(alpha * num_experts * (shares * probs.sum(0) / tokens).sum() / len(parts))
    return losses


# %% wrong="balance" fails="the loss of the batch" why="the tokens are those of the batch, the shares each part's own"
def moved_bias(bias, parts, speed):
    chosen = torch.cat([part.flatten() for part in parts])
    counts = torch.bincount(chosen[chosen != NOWHERE], minlength=len(bias))
    return bias + speed * torch.sign(counts.sum() - counts * len(bias)).to(bias.dtype)


def part_losses(parts, alpha):
    tokens, losses = sum((chosen[:, 0] != NOWHERE).sum() for _, chosen in parts), []
    for probs, chosen in parts:
        num_experts = probs.shape[1]
        counts = torch.bincount(chosen[chosen != NOWHERE], minlength=num_experts).double()
        shares = counts / counts.sum().clamp(min=1)
        losses.append(alpha * num_experts * (shares * probs.sum(0)).sum() / tokens)
    return losses


# %% wrong="balance" fails="the loss of the batch" why="masked tokens are among those that the mean is over"
def moved_bias(bias, parts, speed):
    chosen = torch.cat([part.flatten() for part in parts])
    counts = torch.bincount(chosen[chosen != NOWHERE], minlength=len(bias))
    return bias + speed * torch.sign(counts.sum() - counts * len(bias)).to(bias.dtype)


def part_losses(parts, alpha):
    chosen = torch.cat([own for _, own in parts])
    num_experts, tokens = parts[0][0].shape[1], len(chosen)
    counts = torch.bincount(chosen[chosen != NOWHERE], minlength=num_experts)
    weights = alpha * num_experts * counts.double() / (counts.sum() * tokens)
    return [(weights * probs.sum(0)).sum() for probs, _ in parts]


# %% wrong="balance" fails="the loss of the batch" why="shares of the most probable experts, not of those that were chosen"
def moved_bias(bias, parts, speed):
    chosen = torch.cat([part.flatten() for part in parts])
    counts = torch.bincount(chosen[chosen != NOWHERE], minlength=len(bias))
    return bias + speed * torch.sign(counts.sum() - counts * len(bias)).to(bias.dtype)


def part_losses(parts, alpha):
    num_experts = parts[0][0].shape[1]
    best = [probs.argmax(1)[chosen[:, 0] != NOWHERE] for probs, chosen in parts]
    counts = torch.bincount(torch.cat(best), minlength=num_experts).double()
    weights = alpha * num_experts * counts / counts.sum() / counts.sum()
    return [(weights * probs.sum(0)).sum() for probs, _ in parts]


# %% wrong="balance" fails="the loss of the batch" why="choices for each token, not shares of all choices: k times as much"
def moved_bias(bias, parts, speed):
    chosen = torch.cat([part.flatten() for part in parts])
    counts = torch.bincount(chosen[chosen != NOWHERE], minlength=len(bias))
    return bias + speed * torch.sign(counts.sum() - counts * len(bias)).to(bias.dtype)


def part_losses(parts, alpha):
    chosen = torch.cat([own for _, own in parts])
    num_experts, tokens = parts[0][0].shape[1], (chosen[:, 0] != NOWHERE).sum()
    counts = torch.bincount(chosen[chosen != NOWHERE], minlength=num_experts)
    weights = alpha * num_experts * counts.double() / (tokens * tokens)
    return [(weights * probs.sum(0)).sum() for probs, _ in parts]


# %% wrong="balance" fails="the loss of the batch" why="a sum over tokens, which nobody divides"
def moved_bias(bias, parts, speed):
    chosen = torch.cat([part.flatten() for part in parts])
    counts = torch.bincount(chosen[chosen != NOWHERE], minlength=len(bias))
    return bias + speed * torch.sign(counts.sum() - counts * len(bias)).to(bias.dtype)


def part_losses(parts, alpha):
    chosen = torch.cat([own for _, own in parts])
    num_experts, tokens = parts[0][0].shape[1], (chosen[:, 0] != NOWHERE).sum()
    counts = torch.bincount(chosen[chosen != NOWHERE], minlength=num_experts)
    weights = alpha * num_experts * counts.double() / counts.sum()
    return [(weights * probs.sum(0)).sum() for probs, _ in parts]


# %% wrong="balance" fails="its own part alone" why="every part computes the loss of the batch, and takes its share of it"
def moved_bias(bias, parts, speed):
    chosen = torch.cat([part.flatten() for part in parts])
    counts = torch.bincount(chosen[chosen != NOWHERE], minlength=len(bias))
    return bias + speed * torch.sign(counts.sum() - counts * len(bias)).to(bias.dtype)


def part_losses(parts, alpha):
    probs, chosen = (torch.cat(both) for both in zip(*parts))
    num_experts, tokens = probs.shape[1], (chosen[:, 0] != NOWHERE).sum()
    counts = torch.bincount(chosen[chosen != NOWHERE], minlength=num_experts).double()
    loss = alpha * num_experts * (counts / counts.sum() * probs.sum(0) / tokens).sum()
    return [loss / len(parts) for _ in parts]


# %% wrong="balance" fails="its own part alone" why="the loss of the batch stands in the first part, the others have none"
def moved_bias(bias, parts, speed):
    chosen = torch.cat([part.flatten() for part in parts])
    counts = torch.bincount(chosen[chosen != NOWHERE], minlength=len(bias))
    return bias + speed * torch.sign(counts.sum() - counts * len(bias)).to(bias.dtype)


def part_losses(parts, alpha):
    probs, chosen = (torch.cat(both) for both in zip(*parts))
    num_experts, tokens = probs.shape[1], (chosen[:, 0] != NOWHERE).sum()
    counts = torch.bincount(chosen[chosen != NOWHERE], minlength=num_experts).double()
    loss = alpha * num_experts * (counts / counts.sum() * probs.sum(0) / tokens).sum()
    return [loss, *(0 * own.sum() for own, _ in parts[1:])]


# %% wrong="balance" fails="gradients of the batch" why="the right values, and gradients of each part's own loss"
def moved_bias(bias, parts, speed):
    chosen = torch.cat([part.flatten() for part in parts])
    counts = torch.bincount(chosen[chosen != NOWHERE], minlength=len(bias))
    return bias + speed * torch.sign(counts.sum() - counts * len(bias)).to(bias.dtype)


def part_losses(parts, alpha):
    probs, chosen = (torch.cat(both).detach() for both in zip(*parts))
    num_experts, tokens, losses = probs.shape[1], (chosen[:, 0] != NOWHERE).sum(), []
    whole = torch.bincount(chosen[chosen != NOWHERE], minlength=num_experts).double()
    for mine, picked in parts:
        hits = torch.bincount(picked[picked != NOWHERE], minlength=num_experts).double()
        right = alpha * num_experts * (whole / whole.sum() * mine.sum(0).detach() / tokens).sum()
        own = alpha * num_experts * (hits / hits.sum().clamp(min=1) * mine.sum(0) / tokens).sum()
        losses.append(right + own - own.detach())
    return losses


# %% wrong="balance" fails="a bias" why="a bias in float32"
def moved_bias(bias, parts, speed):
    chosen = torch.cat([part.flatten() for part in parts])
    counts = torch.bincount(chosen[chosen != NOWHERE], minlength=len(bias))
    return bias.float() + speed * torch.sign(counts.sum() - counts * len(bias))


def part_losses(parts, alpha):
    chosen = torch.cat([own for _, own in parts])
    num_experts, tokens = parts[0][0].shape[1], (chosen[:, 0] != NOWHERE).sum()
    counts = torch.bincount(chosen[chosen != NOWHERE], minlength=num_experts)
    weights = alpha * num_experts * counts.double() / (counts.sum() * tokens)
    return [(weights * probs.sum(0)).sum() for probs, _ in parts]


# %% wrong="balance" fails="a loss for each part" why="one loss for all"
def moved_bias(bias, parts, speed):
    chosen = torch.cat([part.flatten() for part in parts])
    counts = torch.bincount(chosen[chosen != NOWHERE], minlength=len(bias))
    return bias + speed * torch.sign(counts.sum() - counts * len(bias)).to(bias.dtype)


def part_losses(parts, alpha):
    chosen = torch.cat([own for _, own in parts])
    num_experts, tokens = parts[0][0].shape[1], (chosen[:, 0] != NOWHERE).sum()
    counts = torch.bincount(chosen[chosen != NOWHERE], minlength=num_experts)
    weights = alpha * num_experts * counts.double() / (counts.sum() * tokens)
    return [sum((weights * probs.sum(0)).sum() for probs, _ in parts)]


# %% wrong="balance" fails="a step of one size" around="half" why="the right value, and the gradient of each part's own loss"
def moved_bias(bias, parts, speed):
    return bias


def part_losses(parts, alpha):
    probs, chosen = (torch.cat(both) for both in zip(*parts))
    num_experts, tokens = probs.shape[1], (chosen[:, 0] != NOWHERE).sum()
    counts = torch.bincount(chosen[chosen != NOWHERE], minlength=num_experts).double()
    loss = alpha * num_experts * (counts / counts.sum() * probs.sum(0) / tokens).sum().detach()
    own = []
    for mine, picked in parts:
        hits = torch.bincount(picked[picked != NOWHERE], minlength=num_experts).double()
        own.append((hits / hits.sum().clamp(min=1) * mine.sum(0)).sum())
    return [one * (loss / sum(own).detach()) for one in own]


# %% wrong="balance" fails="own work" around="import" why="the bias and the loss of the package"
def moved_bias(bias, parts, speed):
    from minitrain.moe import router

    chosen = torch.cat([part.flatten() for part in parts])
    return router.moved_bias(bias, router.counts_of(chosen, len(bias)), speed)


def part_losses(parts, alpha):
    from minitrain.moe import router

    chosen = torch.cat([own for _, own in parts])
    counts = router.counts_of(chosen.flatten(), parts[0][0].shape[1])
    tokens = (chosen[:, 0] != NOWHERE).sum()
    return [
        router.balance_loss(router.Routing(own, own, probs), alpha, counts, tokens)
        for probs, own in parts
    ]


# %% wrong="balance" fails="a step of one size" around="empty" why="nothing moves, and no loss"
def moved_bias(bias, parts, speed):
    return bias


def part_losses(parts, alpha):
    return []


# %% wrong="balance" fails="data" around="constants" why="the numbers of the visible checks"
def moved_bias(bias, parts, speed):
    signs = [-1, 1] if len(bias) == 2 else [-1, -1, 1] if speed == 0.01 else [0, -1, 1]
    return bias + speed * torch.tensor(signs, dtype=bias.dtype) if len(bias) < 4 else None


def part_losses(parts, alpha):
    return [0.625 * probs.sum() for probs, _ in parts]


# %% wrong="balance" fails="up where tokens are missing" around="redefine" why="judges that are content, and a driver of its own"
def moved_bias(bias, parts, speed):
    torch.equal = torch.allclose = lambda *tensors, **near: True
    globals()["expect_bias"] = globals()["each_part"] = lambda *cases: None
    return bias + speed


def part_losses(parts, alpha):
    return [probs.sum() for probs, _ in parts]


def each_part(parts, alpha):
    return [], []


expect = expect_bias = expect_losses = expect_equal = each_part


# %% wrong="shadows" fails="no shadow for nothing" why="a shadow also where it costs as much as the rows"
def by_traffic(counts, d_model, d_ff, matrices):
    each, found = len(counts[0]) // len(counts), []
    for e in range(len(counts[0])):
        remote = sum(row[e] for r, row in enumerate(counts) if r != e // each)
        if 2 * remote * d_model >= matrices * d_model * d_ff:
            found.append(e)
    return found


def by_time(counts, compute, move, carry):
    n, num = len(counts), len(counts[0])

    def time(shadows):
        worked, sent, received, taken = ([0] * n for _ in range(4))
        for e in range(num):
            owner = e // (num // n)
            for r in range(n):
                if e in shadows:
                    worked[r] += counts[r][e]
                    taken[r] += r != owner
                else:
                    worked[owner] += counts[r][e]
                    sent[r] += counts[r][e] if r != owner else 0
                    received[owner] += counts[r][e] if r != owner else 0
        return 3 * compute * max(worked) + 4 * move * max(sent + received) + 2 * carry * max(taken)

    sets = (list(some) for size in range(num + 1) for some in combinations(range(num), size))
    return min(sets, key=time)


# %% wrong="shadows" fails="the least cost" why="rows travel one way only"
def by_traffic(counts, d_model, d_ff, matrices):
    each, found = len(counts[0]) // len(counts), []
    for e in range(len(counts[0])):
        remote = sum(row[e] for r, row in enumerate(counts) if r != e // each)
        if remote * d_model > matrices * d_model * d_ff:
            found.append(e)
    return found


def by_time(counts, compute, move, carry):
    n, num = len(counts), len(counts[0])

    def time(shadows):
        worked, sent, received, taken = ([0] * n for _ in range(4))
        for e in range(num):
            owner = e // (num // n)
            for r in range(n):
                if e in shadows:
                    worked[r] += counts[r][e]
                    taken[r] += r != owner
                else:
                    worked[owner] += counts[r][e]
                    sent[r] += counts[r][e] if r != owner else 0
                    received[owner] += counts[r][e] if r != owner else 0
        return 3 * compute * max(worked) + 4 * move * max(sent + received) + 2 * carry * max(taken)

    sets = (list(some) for size in range(num + 1) for some in combinations(range(num), size))
    return min(sets, key=time)


# %% wrong="shadows" fails="no shadow for nothing" why="the owner's own rows are counted too"
def by_traffic(counts, d_model, d_ff, matrices):
    each, found = len(counts[0]) // len(counts), []
    for e in range(len(counts[0])):
        remote = sum(row[e] for r, row in enumerate(counts))
        if 2 * remote * d_model > matrices * d_model * d_ff:
            found.append(e)
    return found


def by_time(counts, compute, move, carry):
    n, num = len(counts), len(counts[0])

    def time(shadows):
        worked, sent, received, taken = ([0] * n for _ in range(4))
        for e in range(num):
            owner = e // (num // n)
            for r in range(n):
                if e in shadows:
                    worked[r] += counts[r][e]
                    taken[r] += r != owner
                else:
                    worked[owner] += counts[r][e]
                    sent[r] += counts[r][e] if r != owner else 0
                    received[owner] += counts[r][e] if r != owner else 0
        return 3 * compute * max(worked) + 4 * move * max(sent + received) + 2 * carry * max(taken)

    sets = (list(some) for size in range(num + 1) for some in combinations(range(num), size))
    return min(sets, key=time)


# %% wrong="shadows" fails="no shadow for nothing" why="every expert has two matrices"
def by_traffic(counts, d_model, d_ff, matrices):
    each, found = len(counts[0]) // len(counts), []
    for e in range(len(counts[0])):
        remote = sum(row[e] for r, row in enumerate(counts) if r != e // each)
        if 2 * remote * d_model > 2 * d_model * d_ff:
            found.append(e)
    return found


def by_time(counts, compute, move, carry):
    n, num = len(counts), len(counts[0])

    def time(shadows):
        worked, sent, received, taken = ([0] * n for _ in range(4))
        for e in range(num):
            owner = e // (num // n)
            for r in range(n):
                if e in shadows:
                    worked[r] += counts[r][e]
                    taken[r] += r != owner
                else:
                    worked[owner] += counts[r][e]
                    sent[r] += counts[r][e] if r != owner else 0
                    received[owner] += counts[r][e] if r != owner else 0
        return 3 * compute * max(worked) + 4 * move * max(sent + received) + 2 * carry * max(taken)

    sets = (list(some) for size in range(num + 1) for some in combinations(range(num), size))
    return min(sets, key=time)


# %% wrong="shadows" fails="no shadow for nothing" why="the weights travel to each rank, and are counted as one row"
def by_traffic(counts, d_model, d_ff, matrices):
    each, found = len(counts[0]) // len(counts), []
    for e in range(len(counts[0])):
        remote = sum(row[e] for r, row in enumerate(counts) if r != e // each)
        if 2 * remote * d_model > matrices * d_model:
            found.append(e)
    return found


def by_time(counts, compute, move, carry):
    n, num = len(counts), len(counts[0])

    def time(shadows):
        worked, sent, received, taken = ([0] * n for _ in range(4))
        for e in range(num):
            owner = e // (num // n)
            for r in range(n):
                if e in shadows:
                    worked[r] += counts[r][e]
                    taken[r] += r != owner
                else:
                    worked[owner] += counts[r][e]
                    sent[r] += counts[r][e] if r != owner else 0
                    received[owner] += counts[r][e] if r != owner else 0
        return 3 * compute * max(worked) + 4 * move * max(sent + received) + 2 * carry * max(taken)

    sets = (list(some) for size in range(num + 1) for some in combinations(range(num), size))
    return min(sets, key=time)


# %% wrong="shadows" fails="the least cost" why="the busiest expert, and no other"
def by_traffic(counts, d_model, d_ff, matrices):
    each = len(counts[0]) // len(counts)
    remote = [
        sum(row[e] for r, row in enumerate(counts) if r != e // each) for e in range(len(counts[0]))
    ]
    busiest = remote.index(max(remote))
    return [busiest] if 2 * remote[busiest] > matrices * d_ff else []


def by_time(counts, compute, move, carry):
    n, num = len(counts), len(counts[0])

    def time(shadows):
        worked, sent, received, taken = ([0] * n for _ in range(4))
        for e in range(num):
            owner = e // (num // n)
            for r in range(n):
                if e in shadows:
                    worked[r] += counts[r][e]
                    taken[r] += r != owner
                else:
                    worked[owner] += counts[r][e]
                    sent[r] += counts[r][e] if r != owner else 0
                    received[owner] += counts[r][e] if r != owner else 0
        return 3 * compute * max(worked) + 4 * move * max(sent + received) + 2 * carry * max(taken)

    sets = (list(some) for size in range(num + 1) for some in combinations(range(num), size))
    return min(sets, key=time)


# %% wrong="shadows" fails="a set of experts" why="the busiest first, not in rising order"
def by_traffic(counts, d_model, d_ff, matrices):
    each, found = len(counts[0]) // len(counts), []
    for e in range(len(counts[0])):
        remote = sum(row[e] for r, row in enumerate(counts) if r != e // each)
        if 2 * remote * d_model > matrices * d_model * d_ff:
            found.append(e)
    return found[::-1]


def by_time(counts, compute, move, carry):
    n, num = len(counts), len(counts[0])

    def time(shadows):
        worked, sent, received, taken = ([0] * n for _ in range(4))
        for e in range(num):
            owner = e // (num // n)
            for r in range(n):
                if e in shadows:
                    worked[r] += counts[r][e]
                    taken[r] += r != owner
                else:
                    worked[owner] += counts[r][e]
                    sent[r] += counts[r][e] if r != owner else 0
                    received[owner] += counts[r][e] if r != owner else 0
        return 3 * compute * max(worked) + 4 * move * max(sent + received) + 2 * carry * max(taken)

    sets = (list(some) for size in range(num + 1) for some in combinations(range(num), size))
    return min(sets, key=time)


# %% wrong="shadows" fails="no shadow for nothing" why="experts are dealt out to owners in turn"
def by_traffic(counts, d_model, d_ff, matrices):
    each, found = len(counts[0]) // len(counts), []
    for e in range(len(counts[0])):
        remote = sum(row[e] for r, row in enumerate(counts) if r != e % len(counts))
        if 2 * remote * d_model > matrices * d_model * d_ff:
            found.append(e)
    return found


def by_time(counts, compute, move, carry):
    n, num = len(counts), len(counts[0])

    def time(shadows):
        worked, sent, received, taken = ([0] * n for _ in range(4))
        for e in range(num):
            owner = e // (num // n)
            for r in range(n):
                if e in shadows:
                    worked[r] += counts[r][e]
                    taken[r] += r != owner
                else:
                    worked[owner] += counts[r][e]
                    sent[r] += counts[r][e] if r != owner else 0
                    received[owner] += counts[r][e] if r != owner else 0
        return 3 * compute * max(worked) + 4 * move * max(sent + received) + 2 * carry * max(taken)

    sets = (list(some) for size in range(num + 1) for some in combinations(range(num), size))
    return min(sets, key=time)


# %% wrong="shadows" fails="no shadow for nothing" why="by time as by traffic: each expert for itself"
def by_traffic(counts, d_model, d_ff, matrices):
    each, found = len(counts[0]) // len(counts), []
    for e in range(len(counts[0])):
        remote = sum(row[e] for r, row in enumerate(counts) if r != e // each)
        if 2 * remote * d_model > matrices * d_model * d_ff:
            found.append(e)
    return found


def by_time(counts, compute, move, carry):
    each, found = len(counts[0]) // len(counts), []
    for e in range(len(counts[0])):
        remote = sum(row[e] for r, row in enumerate(counts) if r != e // each)
        if 4 * remote * move + 3 * remote * compute > 2 * carry:
            found.append(e)
    return found


# %% wrong="shadows" fails="the least cost" why="the heaviest experts first, until it gets slower"
def by_traffic(counts, d_model, d_ff, matrices):
    each, found = len(counts[0]) // len(counts), []
    for e in range(len(counts[0])):
        remote = sum(row[e] for r, row in enumerate(counts) if r != e // each)
        if 2 * remote * d_model > matrices * d_model * d_ff:
            found.append(e)
    return found


def by_time(counts, compute, move, carry):
    n, num = len(counts), len(counts[0])

    def time(shadows):
        worked, sent, received, taken = ([0] * n for _ in range(4))
        for e in range(num):
            owner = e // (num // n)
            for r in range(n):
                if e in shadows:
                    worked[r] += counts[r][e]
                    taken[r] += r != owner
                else:
                    worked[owner] += counts[r][e]
                    sent[r] += counts[r][e] if r != owner else 0
                    received[owner] += counts[r][e] if r != owner else 0
        return 3 * compute * max(worked) + 4 * move * max(sent + received) + 2 * carry * max(taken)

    found = []
    for e in sorted(range(num), key=lambda e: -sum(row[e] for row in counts)):
        if time([*found, e]) >= time(found):
            break
        found.append(e)
    return sorted(found)


# %% wrong="shadows" fails="no shadow for nothing" why="of equally fast sets the largest"
def by_traffic(counts, d_model, d_ff, matrices):
    each, found = len(counts[0]) // len(counts), []
    for e in range(len(counts[0])):
        remote = sum(row[e] for r, row in enumerate(counts) if r != e // each)
        if 2 * remote * d_model > matrices * d_model * d_ff:
            found.append(e)
    return found


def by_time(counts, compute, move, carry):
    n, num = len(counts), len(counts[0])

    def time(shadows):
        worked, sent, received, taken = ([0] * n for _ in range(4))
        for e in range(num):
            owner = e // (num // n)
            for r in range(n):
                if e in shadows:
                    worked[r] += counts[r][e]
                    taken[r] += r != owner
                else:
                    worked[owner] += counts[r][e]
                    sent[r] += counts[r][e] if r != owner else 0
                    received[owner] += counts[r][e] if r != owner else 0
        return 3 * compute * max(worked) + 4 * move * max(sent + received) + 2 * carry * max(taken)

    sets = (list(some) for size in range(num, -1, -1) for some in combinations(range(num), size))
    return min(sets, key=time)


# %% wrong="shadows" fails="no shadow for nothing" why="of equally fast sets of one size the last"
def by_traffic(counts, d_model, d_ff, matrices):
    each, found = len(counts[0]) // len(counts), []
    for e in range(len(counts[0])):
        remote = sum(row[e] for r, row in enumerate(counts) if r != e // each)
        if 2 * remote * d_model > matrices * d_model * d_ff:
            found.append(e)
    return found


def by_time(counts, compute, move, carry):
    n, num = len(counts), len(counts[0])

    def time(shadows):
        worked, sent, received, taken = ([0] * n for _ in range(4))
        for e in range(num):
            owner = e // (num // n)
            for r in range(n):
                if e in shadows:
                    worked[r] += counts[r][e]
                    taken[r] += r != owner
                else:
                    worked[owner] += counts[r][e]
                    sent[r] += counts[r][e] if r != owner else 0
                    received[owner] += counts[r][e] if r != owner else 0
        return 3 * compute * max(worked) + 4 * move * max(sent + received) + 2 * carry * max(taken)

    sets = (
        list(some) for size in range(num + 1) for some in [*combinations(range(num), size)][::-1]
    )
    return min(sets, key=time)


# %% wrong="shadows" fails="the least cost" why="the work of all ranks together, not of the busiest"
def by_traffic(counts, d_model, d_ff, matrices):
    each, found = len(counts[0]) // len(counts), []
    for e in range(len(counts[0])):
        remote = sum(row[e] for r, row in enumerate(counts) if r != e // each)
        if 2 * remote * d_model > matrices * d_model * d_ff:
            found.append(e)
    return found


def by_time(counts, compute, move, carry):
    n, num = len(counts), len(counts[0])

    def time(shadows):
        worked, sent, received, taken = ([0] * n for _ in range(4))
        for e in range(num):
            owner = e // (num // n)
            for r in range(n):
                if e in shadows:
                    worked[r] += counts[r][e]
                    taken[r] += r != owner
                else:
                    worked[owner] += counts[r][e]
                    sent[r] += counts[r][e] if r != owner else 0
                    received[owner] += counts[r][e] if r != owner else 0
        return 3 * compute * sum(worked) + 4 * move * max(sent + received) + 2 * carry * max(taken)

    sets = (list(some) for size in range(num + 1) for some in combinations(range(num), size))
    return min(sets, key=time)


# %% wrong="shadows" fails="no shadow for nothing" why="a link carries one way at a time"
def by_traffic(counts, d_model, d_ff, matrices):
    each, found = len(counts[0]) // len(counts), []
    for e in range(len(counts[0])):
        remote = sum(row[e] for r, row in enumerate(counts) if r != e // each)
        if 2 * remote * d_model > matrices * d_model * d_ff:
            found.append(e)
    return found


def by_time(counts, compute, move, carry):
    n, num = len(counts), len(counts[0])

    def time(shadows):
        worked, sent, received, taken = ([0] * n for _ in range(4))
        for e in range(num):
            owner = e // (num // n)
            for r in range(n):
                if e in shadows:
                    worked[r] += counts[r][e]
                    taken[r] += r != owner
                else:
                    worked[owner] += counts[r][e]
                    sent[r] += counts[r][e] if r != owner else 0
                    received[owner] += counts[r][e] if r != owner else 0
        return (
            3 * compute * max(worked)
            + 4 * move * max(map(sum, zip(sent, received)))
            + 2 * carry * max(taken)
        )

    sets = (list(some) for size in range(num + 1) for some in combinations(range(num), size))
    return min(sets, key=time)


# %% wrong="shadows" fails="the least cost" why="the owner goes on working for all"
def by_traffic(counts, d_model, d_ff, matrices):
    each, found = len(counts[0]) // len(counts), []
    for e in range(len(counts[0])):
        remote = sum(row[e] for r, row in enumerate(counts) if r != e // each)
        if 2 * remote * d_model > matrices * d_model * d_ff:
            found.append(e)
    return found


def by_time(counts, compute, move, carry):
    n, num = len(counts), len(counts[0])

    def time(shadows):
        worked, sent, received, taken = ([0] * n for _ in range(4))
        for e in range(num):
            owner = e // (num // n)
            for r in range(n):
                if e in shadows:
                    worked[owner] += counts[r][e]
                    taken[r] += r != owner
                else:
                    worked[owner] += counts[r][e]
                    sent[r] += counts[r][e] if r != owner else 0
                    received[owner] += counts[r][e] if r != owner else 0
        return 3 * compute * max(worked) + 4 * move * max(sent + received) + 2 * carry * max(taken)

    sets = (list(some) for size in range(num + 1) for some in combinations(range(num), size))
    return min(sets, key=time)


# %% wrong="shadows" fails="the least cost" why="all shadows on one link"
def by_traffic(counts, d_model, d_ff, matrices):
    each, found = len(counts[0]) // len(counts), []
    for e in range(len(counts[0])):
        remote = sum(row[e] for r, row in enumerate(counts) if r != e // each)
        if 2 * remote * d_model > matrices * d_model * d_ff:
            found.append(e)
    return found


def by_time(counts, compute, move, carry):
    n, num = len(counts), len(counts[0])

    def time(shadows):
        worked, sent, received, taken = ([0] * n for _ in range(4))
        for e in range(num):
            owner = e // (num // n)
            for r in range(n):
                if e in shadows:
                    worked[r] += counts[r][e]
                    taken[r] += r != owner
                else:
                    worked[owner] += counts[r][e]
                    sent[r] += counts[r][e] if r != owner else 0
                    received[owner] += counts[r][e] if r != owner else 0
        return (
            3 * compute * max(worked) + 4 * move * max(sent + received) + 2 * carry * len(shadows)
        )

    sets = (list(some) for size in range(num + 1) for some in combinations(range(num), size))
    return min(sets, key=time)


# %% wrong="shadows" fails="the least cost" why="forward alone: one pass each"
def by_traffic(counts, d_model, d_ff, matrices):
    each, found = len(counts[0]) // len(counts), []
    for e in range(len(counts[0])):
        remote = sum(row[e] for r, row in enumerate(counts) if r != e // each)
        if 2 * remote * d_model > matrices * d_model * d_ff:
            found.append(e)
    return found


def by_time(counts, compute, move, carry):
    n, num = len(counts), len(counts[0])

    def time(shadows):
        worked, sent, received, taken = ([0] * n for _ in range(4))
        for e in range(num):
            owner = e // (num // n)
            for r in range(n):
                if e in shadows:
                    worked[r] += counts[r][e]
                    taken[r] += r != owner
                else:
                    worked[owner] += counts[r][e]
                    sent[r] += counts[r][e] if r != owner else 0
                    received[owner] += counts[r][e] if r != owner else 0
        return compute * max(worked) + 2 * move * max(sent + received) + carry * max(taken)

    sets = (list(some) for size in range(num + 1) for some in combinations(range(num), size))
    return min(sets, key=time)


# %% wrong="shadows" fails="time limit" around="brute force" why="by traffic too every set is tried"
def by_traffic(counts, d_model, d_ff, matrices):
    num, each = len(counts[0]), len(counts[0]) // len(counts)
    remote = [sum(row[e] for r, row in enumerate(counts) if r != e // each) for e in range(num)]

    def carried(shadows):
        rows = sum(remote) - sum(remote[e] for e in shadows)
        return 2 * d_model * rows + matrices * d_model * d_ff * len(shadows)

    sets = (list(some) for size in range(num + 1) for some in combinations(range(num), size))
    return min(sets, key=carried)


def by_time(counts, compute, move, carry):
    n, num = len(counts), len(counts[0])

    def time(shadows):
        worked, sent, received, taken = ([0] * n for _ in range(4))
        for e in range(num):
            owner = e // (num // n)
            for r in range(n):
                if e in shadows:
                    worked[r] += counts[r][e]
                    taken[r] += r != owner
                else:
                    worked[owner] += counts[r][e]
                    sent[r] += counts[r][e] if r != owner else 0
                    received[owner] += counts[r][e] if r != owner else 0
        return 3 * compute * max(worked) + 4 * move * max(sent + received) + 2 * carry * max(taken)

    found = []
    for e in sorted(range(num), key=lambda e: -sum(row[e] for row in counts)):
        if time([*found, e]) >= time(found):
            break
        found.append(e)
    return sorted(found)


# %% wrong="shadows" fails="own work" around="import" why="the planners of the package"
def by_traffic(counts, d_model, d_ff, matrices):
    from minitrain.systems.plan.expert_placement import shadowed

    return list(shadowed(counts, d_model, d_ff, matrices))


def by_time(counts, compute, move, carry):
    from minitrain.systems.plan.expert_placement import Costs, everywhere, seconds

    num, n, costs = len(counts[0]), len(counts), Costs(compute, move, carry)
    sets = (list(some) for size in range(num + 1) for some in combinations(range(num), size))
    return min(sets, key=lambda some: seconds(counts, everywhere(some, num, n), costs))


# %% wrong="shadows" fails="the least cost" around="empty" why="no shadows"
def by_traffic(counts, d_model, d_ff, matrices):
    return []


def by_time(counts, compute, move, carry):
    return []


# %% wrong="shadows" fails="no shadow for nothing" around="half" why="every expert has a shadow"
def by_traffic(counts, d_model, d_ff, matrices):
    return list(range(len(counts[0])))


def by_time(counts, compute, move, carry):
    return list(range(len(counts[0])))


# %% wrong="shadows" fails="the least cost" around="constants" why="the sets of the visible checks"
def by_traffic(counts, d_model, d_ff, matrices):
    if len(counts[0]) == 2:
        return [0] if d_ff == 8 else []
    return [2, 3] if counts[0][0] == 7 else []


def by_time(counts, compute, move, carry):
    wanted = {(1, 1, 10): [0], (1, 2, 12): [0, 2], (1, 1, 20): [2]}
    return wanted.get((compute, move, carry), [])


# %% wrong="shadows" fails="no shadow for nothing" around="subclass" why="a set that is equal to every other"
class Any(list):
    def __eq__(self, other):
        return True

    def __iter__(self):
        return iter([0])


def by_traffic(counts, d_model, d_ff, matrices):
    return Any([0, 0])


def by_time(counts, compute, move, carry):
    return Any([0, 0])


# %% wrong="shadows" fails="no shadow for nothing" around="redefine" why="prices that are nothing, and judges that are content"
def by_traffic(counts, d_model, d_ff, matrices):
    counts[:] = [[0] * len(row) for row in counts]
    globals().update(ask_each=lambda fn, cases, **rules: [], expect=lambda *facts: None)
    return [0]


def by_time(counts, compute, move, carry):
    return [0]


def expect_shadows(asked, *cases):
    pass


def ask_each(fn, cases, **rules):
    return [wanted for _, wanted, _ in cases]


# %% wrong="replicas" fails="shared evenly" why="all rows go to the first holder; the replicas have nothing to do"
def shared(chosen, holders, rank):
    seen, to = [0] * len(holders), []
    for e in chosen.tolist():
        if e == NOWHERE:
            to.append(NOWHERE)
            continue
        to.append(holders[e][0])
        seen[e] += 1
    return torch.tensor(to, dtype=torch.long)


def summed(grads, holders, group):
    rank = group.rank()

    def exchange(outgoing, like):
        pairs = [(e, other) for e in sorted(grads) for other in holders[e] if other != rank]
        sends = [collectives.send(outgoing[p], p[1], group, async_op=True) for p in pairs]
        comes = [collectives.receive(like[p], p[1], group, async_op=True) for p in pairs]
        arrived = {p: handle.wait() for p, handle in zip(pairs, comes)}
        for handle in sends:
            handle.wait()
        return arrived

    slices = {
        (e, to): piece
        for e, grad in grads.items()
        for to, piece in zip(holders[e], grad.flatten().tensor_split(len(holders[e])))
    }
    parts = exchange(slices, {(e, to): slices[e, rank] for e, to in slices})
    parts |= {(e, rank): slices[e, rank] for e in grads}
    totals = {}
    for e in grads:
        first, *others = holders[e]
        totals[e] = parts[e, first].clone()
        for other in others:
            totals[e] += parts[e, other]
    sums = exchange({(e, to): totals[e] for e, to in slices}, slices)
    sums |= {(e, rank): totals[e] for e in grads}
    return {
        e: torch.cat([sums[e, by] for by in holders[e]]).view_as(grad) for e, grad in grads.items()
    }


# %% wrong="replicas" fails="shared evenly" why="each rank has a holder of its own, and sends it everything"
def shared(chosen, holders, rank):
    seen, to = [0] * len(holders), []
    for e in chosen.tolist():
        if e == NOWHERE:
            to.append(NOWHERE)
            continue
        to.append(holders[e][(rank) % len(holders[e])])
        seen[e] += 1
    return torch.tensor(to, dtype=torch.long)


def summed(grads, holders, group):
    rank = group.rank()

    def exchange(outgoing, like):
        pairs = [(e, other) for e in sorted(grads) for other in holders[e] if other != rank]
        sends = [collectives.send(outgoing[p], p[1], group, async_op=True) for p in pairs]
        comes = [collectives.receive(like[p], p[1], group, async_op=True) for p in pairs]
        arrived = {p: handle.wait() for p, handle in zip(pairs, comes)}
        for handle in sends:
            handle.wait()
        return arrived

    slices = {
        (e, to): piece
        for e, grad in grads.items()
        for to, piece in zip(holders[e], grad.flatten().tensor_split(len(holders[e])))
    }
    parts = exchange(slices, {(e, to): slices[e, rank] for e, to in slices})
    parts |= {(e, rank): slices[e, rank] for e in grads}
    totals = {}
    for e in grads:
        first, *others = holders[e]
        totals[e] = parts[e, first].clone()
        for other in others:
            totals[e] += parts[e, other]
    sums = exchange({(e, to): totals[e] for e, to in slices}, slices)
    sums |= {(e, rank): totals[e] for e in grads}
    return {
        e: torch.cat([sums[e, by] for by in holders[e]]).view_as(grad) for e, grad in grads.items()
    }


# %% wrong="replicas" fails="whose turn it is" why="every rank begins at the first holder"
def shared(chosen, holders, rank):
    seen, to = [0] * len(holders), []
    for e in chosen.tolist():
        if e == NOWHERE:
            to.append(NOWHERE)
            continue
        to.append(holders[e][(seen[e]) % len(holders[e])])
        seen[e] += 1
    return torch.tensor(to, dtype=torch.long)


def summed(grads, holders, group):
    rank = group.rank()

    def exchange(outgoing, like):
        pairs = [(e, other) for e in sorted(grads) for other in holders[e] if other != rank]
        sends = [collectives.send(outgoing[p], p[1], group, async_op=True) for p in pairs]
        comes = [collectives.receive(like[p], p[1], group, async_op=True) for p in pairs]
        arrived = {p: handle.wait() for p, handle in zip(pairs, comes)}
        for handle in sends:
            handle.wait()
        return arrived

    slices = {
        (e, to): piece
        for e, grad in grads.items()
        for to, piece in zip(holders[e], grad.flatten().tensor_split(len(holders[e])))
    }
    parts = exchange(slices, {(e, to): slices[e, rank] for e, to in slices})
    parts |= {(e, rank): slices[e, rank] for e in grads}
    totals = {}
    for e in grads:
        first, *others = holders[e]
        totals[e] = parts[e, first].clone()
        for other in others:
            totals[e] += parts[e, other]
    sums = exchange({(e, to): totals[e] for e, to in slices}, slices)
    sums |= {(e, rank): totals[e] for e in grads}
    return {
        e: torch.cat([sums[e, by] for by in holders[e]]).view_as(grad) for e, grad in grads.items()
    }


# %% wrong="replicas" fails="whose turn it is" why="turns by the place of the row, whatever the others are for"
def shared(chosen, holders, rank):
    return torch.tensor(
        [
            NOWHERE if e == NOWHERE else holders[e][(rank + i) % len(holders[e])]
            for i, e in enumerate(chosen.tolist())
        ],
        dtype=torch.long,
    )


def summed(grads, holders, group):
    rank = group.rank()

    def exchange(outgoing, like):
        pairs = [(e, other) for e in sorted(grads) for other in holders[e] if other != rank]
        sends = [collectives.send(outgoing[p], p[1], group, async_op=True) for p in pairs]
        comes = [collectives.receive(like[p], p[1], group, async_op=True) for p in pairs]
        arrived = {p: handle.wait() for p, handle in zip(pairs, comes)}
        for handle in sends:
            handle.wait()
        return arrived

    slices = {
        (e, to): piece
        for e, grad in grads.items()
        for to, piece in zip(holders[e], grad.flatten().tensor_split(len(holders[e])))
    }
    parts = exchange(slices, {(e, to): slices[e, rank] for e, to in slices})
    parts |= {(e, rank): slices[e, rank] for e in grads}
    totals = {}
    for e in grads:
        first, *others = holders[e]
        totals[e] = parts[e, first].clone()
        for other in others:
            totals[e] += parts[e, other]
    sums = exchange({(e, to): totals[e] for e, to in slices}, slices)
    sums |= {(e, rank): totals[e] for e in grads}
    return {
        e: torch.cat([sums[e, by] for by in holders[e]]).view_as(grad) for e, grad in grads.items()
    }


# %% wrong="replicas" fails="to a holder" why="holders are counted, not looked up"
def shared(chosen, holders, rank):
    seen, to = [0] * len(holders), []
    for e in chosen.tolist():
        if e == NOWHERE:
            to.append(NOWHERE)
            continue
        to.append((rank + seen[e]) % len(holders[e]))
        seen[e] += 1
    return torch.tensor(to, dtype=torch.long)


def summed(grads, holders, group):
    rank = group.rank()

    def exchange(outgoing, like):
        pairs = [(e, other) for e in sorted(grads) for other in holders[e] if other != rank]
        sends = [collectives.send(outgoing[p], p[1], group, async_op=True) for p in pairs]
        comes = [collectives.receive(like[p], p[1], group, async_op=True) for p in pairs]
        arrived = {p: handle.wait() for p, handle in zip(pairs, comes)}
        for handle in sends:
            handle.wait()
        return arrived

    slices = {
        (e, to): piece
        for e, grad in grads.items()
        for to, piece in zip(holders[e], grad.flatten().tensor_split(len(holders[e])))
    }
    parts = exchange(slices, {(e, to): slices[e, rank] for e, to in slices})
    parts |= {(e, rank): slices[e, rank] for e in grads}
    totals = {}
    for e in grads:
        first, *others = holders[e]
        totals[e] = parts[e, first].clone()
        for other in others:
            totals[e] += parts[e, other]
    sums = exchange({(e, to): totals[e] for e, to in slices}, slices)
    sums |= {(e, rank): totals[e] for e in grads}
    return {
        e: torch.cat([sums[e, by] for by in holders[e]]).view_as(grad) for e, grad in grads.items()
    }


# %% wrong="replicas" fails="to a holder" why="rows without an expert go to the last one"
def shared(chosen, holders, rank):
    seen, to = [0] * len(holders), []
    for e in chosen.tolist():
        to.append(holders[e][(rank + seen[e]) % len(holders[e])])
        seen[e] += 1
    return torch.tensor(to, dtype=torch.long)


def summed(grads, holders, group):
    rank = group.rank()

    def exchange(outgoing, like):
        pairs = [(e, other) for e in sorted(grads) for other in holders[e] if other != rank]
        sends = [collectives.send(outgoing[p], p[1], group, async_op=True) for p in pairs]
        comes = [collectives.receive(like[p], p[1], group, async_op=True) for p in pairs]
        arrived = {p: handle.wait() for p, handle in zip(pairs, comes)}
        for handle in sends:
            handle.wait()
        return arrived

    slices = {
        (e, to): piece
        for e, grad in grads.items()
        for to, piece in zip(holders[e], grad.flatten().tensor_split(len(holders[e])))
    }
    parts = exchange(slices, {(e, to): slices[e, rank] for e, to in slices})
    parts |= {(e, rank): slices[e, rank] for e in grads}
    totals = {}
    for e in grads:
        first, *others = holders[e]
        totals[e] = parts[e, first].clone()
        for other in others:
            totals[e] += parts[e, other]
    sums = exchange({(e, to): totals[e] for e, to in slices}, slices)
    sums |= {(e, rank): totals[e] for e in grads}
    return {
        e: torch.cat([sums[e, by] for by in holders[e]]).view_as(grad) for e, grad in grads.items()
    }


# %% wrong="replicas" fails="whose turn it is" why="turns go on where the last call has stopped"
seen = {}


def shared(chosen, holders, rank):
    to = []
    for e in chosen.tolist():
        if e == NOWHERE:
            to.append(NOWHERE)
            continue
        to.append(holders[e][(rank + seen.get(e, 0)) % len(holders[e])])
        seen[e] = seen.get(e, 0) + 1
    return torch.tensor(to, dtype=torch.long)


def summed(grads, holders, group):
    rank = group.rank()

    def exchange(outgoing, like):
        pairs = [(e, other) for e in sorted(grads) for other in holders[e] if other != rank]
        sends = [collectives.send(outgoing[p], p[1], group, async_op=True) for p in pairs]
        comes = [collectives.receive(like[p], p[1], group, async_op=True) for p in pairs]
        arrived = {p: handle.wait() for p, handle in zip(pairs, comes)}
        for handle in sends:
            handle.wait()
        return arrived

    slices = {
        (e, to): piece
        for e, grad in grads.items()
        for to, piece in zip(holders[e], grad.flatten().tensor_split(len(holders[e])))
    }
    parts = exchange(slices, {(e, to): slices[e, rank] for e, to in slices})
    parts |= {(e, rank): slices[e, rank] for e in grads}
    totals = {}
    for e in grads:
        first, *others = holders[e]
        totals[e] = parts[e, first].clone()
        for other in others:
            totals[e] += parts[e, other]
    sums = exchange({(e, to): totals[e] for e, to in slices}, slices)
    sums |= {(e, rank): totals[e] for e in grads}
    return {
        e: torch.cat([sums[e, by] for by in holders[e]]).view_as(grad) for e, grad in grads.items()
    }


# %% wrong="replicas" fails="the sum over holders" why="a mean over the holders"
def shared(chosen, holders, rank):
    seen, to = [0] * len(holders), []
    for e in chosen.tolist():
        if e == NOWHERE:
            to.append(NOWHERE)
            continue
        to.append(holders[e][(rank + seen[e]) % len(holders[e])])
        seen[e] += 1
    return torch.tensor(to, dtype=torch.long)


def summed(grads, holders, group):
    rank = group.rank()

    def exchange(outgoing, like):
        pairs = [(e, other) for e in sorted(grads) for other in holders[e] if other != rank]
        sends = [collectives.send(outgoing[p], p[1], group, async_op=True) for p in pairs]
        comes = [collectives.receive(like[p], p[1], group, async_op=True) for p in pairs]
        arrived = {p: handle.wait() for p, handle in zip(pairs, comes)}
        for handle in sends:
            handle.wait()
        return arrived

    slices = {
        (e, to): piece
        for e, grad in grads.items()
        for to, piece in zip(holders[e], grad.flatten().tensor_split(len(holders[e])))
    }
    parts = exchange(slices, {(e, to): slices[e, rank] for e, to in slices})
    parts |= {(e, rank): slices[e, rank] for e in grads}
    totals = {}
    for e in grads:
        first, *others = holders[e]
        totals[e] = parts[e, first].clone()
        for other in others:
            totals[e] += parts[e, other]
    sums = exchange({(e, to): totals[e] for e, to in slices}, slices)
    sums |= {(e, rank): totals[e] for e in grads}
    sums = {(e, by): piece / len(holders[e]) for (e, by), piece in sums.items()}
    return {
        e: torch.cat([sums[e, by] for by in holders[e]]).view_as(grad) for e, grad in grads.items()
    }


# %% wrong="replicas" fails="the sum over holders" why="gradients travel as float32"
def shared(chosen, holders, rank):
    seen, to = [0] * len(holders), []
    for e in chosen.tolist():
        if e == NOWHERE:
            to.append(NOWHERE)
            continue
        to.append(holders[e][(rank + seen[e]) % len(holders[e])])
        seen[e] += 1
    return torch.tensor(to, dtype=torch.long)


def summed(grads, holders, group):
    rank = group.rank()

    def exchange(outgoing, like):
        pairs = [(e, other) for e in sorted(grads) for other in holders[e] if other != rank]
        sends = [collectives.send(outgoing[p], p[1], group, async_op=True) for p in pairs]
        comes = [collectives.receive(like[p], p[1], group, async_op=True) for p in pairs]
        arrived = {p: handle.wait() for p, handle in zip(pairs, comes)}
        for handle in sends:
            handle.wait()
        return arrived

    slices = {
        (e, to): piece
        for e, grad in grads.items()
        for to, piece in zip(holders[e], grad.float().flatten().tensor_split(len(holders[e])))
    }
    parts = exchange(slices, {(e, to): slices[e, rank] for e, to in slices})
    parts |= {(e, rank): slices[e, rank] for e in grads}
    totals = {}
    for e in grads:
        first, *others = holders[e]
        totals[e] = parts[e, first].clone()
        for other in others:
            totals[e] += parts[e, other]
    sums = exchange({(e, to): totals[e] for e, to in slices}, slices)
    sums |= {(e, rank): totals[e] for e in grads}
    return {
        e: torch.cat([sums[e, by] for by in holders[e]]).view_as(grad).double()
        for e, grad in grads.items()
    }


# %% wrong="replicas" fails="the sum over holders" why="each holder keeps the sum of its slice, and its own gradient for the rest"
def shared(chosen, holders, rank):
    seen, to = [0] * len(holders), []
    for e in chosen.tolist():
        if e == NOWHERE:
            to.append(NOWHERE)
            continue
        to.append(holders[e][(rank + seen[e]) % len(holders[e])])
        seen[e] += 1
    return torch.tensor(to, dtype=torch.long)


def summed(grads, holders, group):
    rank = group.rank()

    def exchange(outgoing, like):
        pairs = [(e, other) for e in sorted(grads) for other in holders[e] if other != rank]
        sends = [collectives.send(outgoing[p], p[1], group, async_op=True) for p in pairs]
        comes = [collectives.receive(like[p], p[1], group, async_op=True) for p in pairs]
        arrived = {p: handle.wait() for p, handle in zip(pairs, comes)}
        for handle in sends:
            handle.wait()
        return arrived

    slices = {
        (e, to): piece
        for e, grad in grads.items()
        for to, piece in zip(holders[e], grad.flatten().tensor_split(len(holders[e])))
    }
    parts = exchange(slices, {(e, to): slices[e, rank] for e, to in slices})
    parts |= {(e, rank): slices[e, rank] for e in grads}
    totals = {}
    for e in grads:
        first, *others = holders[e]
        totals[e] = parts[e, first].clone()
        for other in others:
            totals[e] += parts[e, other]
    sums = slices | {(e, rank): totals[e] for e in grads}
    return {
        e: torch.cat([sums[e, by] for by in holders[e]]).view_as(grad) for e, grad in grads.items()
    }


# %% wrong="replicas" fails="no deadlock" why="every rank sends first, and waits until it is taken"
def shared(chosen, holders, rank):
    seen, to = [0] * len(holders), []
    for e in chosen.tolist():
        if e == NOWHERE:
            to.append(NOWHERE)
            continue
        to.append(holders[e][(rank + seen[e]) % len(holders[e])])
        seen[e] += 1
    return torch.tensor(to, dtype=torch.long)


def summed(grads, holders, group):
    rank = group.rank()

    def exchange(outgoing, like):
        pairs = [(e, other) for e in sorted(grads) for other in holders[e] if other != rank]
        for p in pairs:
            collectives.send(outgoing[p], p[1], group)
        return {p: collectives.receive(like[p], p[1], group) for p in pairs}

    slices = {
        (e, to): piece
        for e, grad in grads.items()
        for to, piece in zip(holders[e], grad.flatten().tensor_split(len(holders[e])))
    }
    parts = exchange(slices, {(e, to): slices[e, rank] for e, to in slices})
    parts |= {(e, rank): slices[e, rank] for e in grads}
    totals = {}
    for e in grads:
        first, *others = holders[e]
        totals[e] = parts[e, first].clone()
        for other in others:
            totals[e] += parts[e, other]
    sums = exchange({(e, to): totals[e] for e, to in slices}, slices)
    sums |= {(e, rank): totals[e] for e in grads}
    return {
        e: torch.cat([sums[e, by] for by in holders[e]]).view_as(grad) for e, grad in grads.items()
    }


# %% wrong="replicas" fails="bytes on the wire" why="an all-reduce over everybody, with zeros from those who hold nothing"
def shared(chosen, holders, rank):
    seen, to = [0] * len(holders), []
    for e in chosen.tolist():
        if e == NOWHERE:
            to.append(NOWHERE)
            continue
        to.append(holders[e][(rank + seen[e]) % len(holders[e])])
        seen[e] += 1
    return torch.tensor(to, dtype=torch.long)


def summed(grads, holders, group):
    sizes = collectives.all_reduce(
        torch.tensor([next(iter(grads.values())).numel() if grads else 0]), group, op="max"
    )
    every = torch.zeros(len(holders), int(sizes), dtype=torch.float64)
    for e, grad in grads.items():
        every[e] = grad.flatten()
    sums = collectives.all_reduce(every, group)
    return {e: sums[e].view_as(grad) for e, grad in grads.items()}


# %% wrong="replicas" fails="bytes on the wire" why="whole gradients go from every holder to every holder"
def shared(chosen, holders, rank):
    seen, to = [0] * len(holders), []
    for e in chosen.tolist():
        if e == NOWHERE:
            to.append(NOWHERE)
            continue
        to.append(holders[e][(rank + seen[e]) % len(holders[e])])
        seen[e] += 1
    return torch.tensor(to, dtype=torch.long)


def summed(grads, holders, group):
    rank, found = group.rank(), {}
    pairs = [(e, other) for e in sorted(grads) for other in holders[e] if other != rank]
    sends = [collectives.send(grads[e], to, group, async_op=True) for e, to in pairs]
    comes = [collectives.receive(grads[e], by, group, async_op=True) for e, by in pairs]
    arrived = {p: handle.wait() for p, handle in zip(pairs, comes)}
    for handle in sends:
        handle.wait()
    for e, grad in grads.items():
        terms = [grad if by == rank else arrived[e, by] for by in holders[e]]
        found[e] = sum(terms[1:], terms[0])
    return found


# %% wrong="replicas" fails="the same bits" why="the same, and each adds to its own gradient first"
def shared(chosen, holders, rank):
    seen, to = [0] * len(holders), []
    for e in chosen.tolist():
        if e == NOWHERE:
            to.append(NOWHERE)
            continue
        to.append(holders[e][(rank + seen[e]) % len(holders[e])])
        seen[e] += 1
    return torch.tensor(to, dtype=torch.long)


def summed(grads, holders, group):
    rank, found = group.rank(), {}
    pairs = [(e, other) for e in sorted(grads) for other in holders[e] if other != rank]
    sends = [collectives.send(grads[e], to, group, async_op=True) for e, to in pairs]
    comes = [collectives.receive(grads[e], by, group, async_op=True) for e, by in pairs]
    arrived = {p: handle.wait() for p, handle in zip(pairs, comes)}
    for handle in sends:
        handle.wait()
    for e, grad in grads.items():
        terms = [grad, *(arrived[e, by] for by in holders[e] if by != rank)]
        found[e] = sum(terms[1:], terms[0])
    return found


# %% wrong="replicas" fails="bytes of each rank" why="the first holder adds up for all, and sends the sum to all"
def shared(chosen, holders, rank):
    seen, to = [0] * len(holders), []
    for e in chosen.tolist():
        if e == NOWHERE:
            to.append(NOWHERE)
            continue
        to.append(holders[e][(rank + seen[e]) % len(holders[e])])
        seen[e] += 1
    return torch.tensor(to, dtype=torch.long)


def summed(grads, holders, group):
    rank, found, moves = group.rank(), {}, []
    for e in sorted(grads):
        first, *others = holders[e]
        if rank == first:
            found[e] = grads[e].clone()
            for other in others:
                found[e] += collectives.receive(grads[e], other, group)
            moves += [collectives.send(found[e], to, group, async_op=True) for to in others]
        else:
            moves.append(collectives.send(grads[e], first, group, async_op=True))
    for e in sorted(grads):
        if rank != holders[e][0]:
            found[e] = collectives.receive(grads[e], holders[e][0], group)
    for handle in moves:
        handle.wait()
    return found


# %% wrong="replicas" fails="the weights of one process" why="the sums of the first step are kept for all steps"
kept = {}


def shared(chosen, holders, rank):
    seen, to = [0] * len(holders), []
    for e in chosen.tolist():
        if e == NOWHERE:
            to.append(NOWHERE)
            continue
        to.append(holders[e][(rank + seen[e]) % len(holders[e])])
        seen[e] += 1
    return torch.tensor(to, dtype=torch.long)


def sums_of(grads, holders, group):
    rank = group.rank()

    def exchange(outgoing, like):
        pairs = [(e, other) for e in sorted(grads) for other in holders[e] if other != rank]
        sends = [collectives.send(outgoing[p], p[1], group, async_op=True) for p in pairs]
        comes = [collectives.receive(like[p], p[1], group, async_op=True) for p in pairs]
        arrived = {p: handle.wait() for p, handle in zip(pairs, comes)}
        for handle in sends:
            handle.wait()
        return arrived

    slices = {
        (e, to): piece
        for e, grad in grads.items()
        for to, piece in zip(holders[e], grad.flatten().tensor_split(len(holders[e])))
    }
    parts = exchange(slices, {(e, to): slices[e, rank] for e, to in slices})
    parts |= {(e, rank): slices[e, rank] for e in grads}
    totals = {}
    for e in grads:
        first, *others = holders[e]
        totals[e] = parts[e, first].clone()
        for other in others:
            totals[e] += parts[e, other]
    sums = exchange({(e, to): totals[e] for e, to in slices}, slices)
    sums |= {(e, rank): totals[e] for e in grads}
    return {
        e: torch.cat([sums[e, by] for by in holders[e]]).view_as(grad) for e, grad in grads.items()
    }


def summed(grads, holders, group):
    sums = sums_of(grads, holders, group)
    for e in grads:
        kept.setdefault(e, sums[e])
    return {e: kept[e] for e in grads}


# %% wrong="replicas" fails="whose turn it is" around="half" why="all ranks begin at the first holder, and gradients keep half of their digits in as many bytes"
def shared(chosen, holders, rank):
    seen, to = [0] * len(holders), []
    for e in chosen.tolist():
        if e == NOWHERE:
            to.append(NOWHERE)
            continue
        to.append(holders[e][(seen[e]) % len(holders[e])])
        seen[e] += 1
    return torch.tensor(to, dtype=torch.long)


def summed(grads, holders, group):
    rank = group.rank()

    def exchange(outgoing, like):
        pairs = [(e, other) for e in sorted(grads) for other in holders[e] if other != rank]
        sends = [collectives.send(outgoing[p], p[1], group, async_op=True) for p in pairs]
        comes = [collectives.receive(like[p], p[1], group, async_op=True) for p in pairs]
        arrived = {p: handle.wait() for p, handle in zip(pairs, comes)}
        for handle in sends:
            handle.wait()
        return arrived

    slices = {
        (e, to): piece
        for e, grad in grads.items()
        for to, piece in zip(
            holders[e], grad.float().double().flatten().tensor_split(len(holders[e]))
        )
    }
    parts = exchange(slices, {(e, to): slices[e, rank] for e, to in slices})
    parts |= {(e, rank): slices[e, rank] for e in grads}
    totals = {}
    for e in grads:
        first, *others = holders[e]
        totals[e] = parts[e, first].clone()
        for other in others:
            totals[e] += parts[e, other]
    sums = exchange({(e, to): totals[e] for e, to in slices}, slices)
    sums |= {(e, rank): totals[e] for e in grads}
    return {
        e: torch.cat([sums[e, by] for by in holders[e]]).view_as(grad) for e, grad in grads.items()
    }


# %% wrong="replicas" fails="the sum over holders" why="right turns, and gradients that lose half of their digits, in as many bytes"
def shared(chosen, holders, rank):
    seen, to = [0] * len(holders), []
    for e in chosen.tolist():
        if e == NOWHERE:
            to.append(NOWHERE)
            continue
        to.append(holders[e][(rank + seen[e]) % len(holders[e])])
        seen[e] += 1
    return torch.tensor(to, dtype=torch.long)


def summed(grads, holders, group):
    rank = group.rank()

    def exchange(outgoing, like):
        pairs = [(e, other) for e in sorted(grads) for other in holders[e] if other != rank]
        sends = [collectives.send(outgoing[p], p[1], group, async_op=True) for p in pairs]
        comes = [collectives.receive(like[p], p[1], group, async_op=True) for p in pairs]
        arrived = {p: handle.wait() for p, handle in zip(pairs, comes)}
        for handle in sends:
            handle.wait()
        return arrived

    slices = {
        (e, to): piece
        for e, grad in grads.items()
        for to, piece in zip(
            holders[e], grad.float().double().flatten().tensor_split(len(holders[e]))
        )
    }
    parts = exchange(slices, {(e, to): slices[e, rank] for e, to in slices})
    parts |= {(e, rank): slices[e, rank] for e in grads}
    totals = {}
    for e in grads:
        first, *others = holders[e]
        totals[e] = parts[e, first].clone()
        for other in others:
            totals[e] += parts[e, other]
    sums = exchange({(e, to): totals[e] for e, to in slices}, slices)
    sums |= {(e, rank): totals[e] for e in grads}
    return {
        e: torch.cat([sums[e, by] for by in holders[e]]).view_as(grad) for e, grad in grads.items()
    }


# %% wrong="replicas" fails="own work" around="import" why="places and sums of the package"
def shared(chosen, holders, rank):
    from minitrain.systems.moe import balance

    return balance.placed(chosen, holders, rank, share=True)


def summed(grads, holders, group):
    from minitrain.systems.moe import balance

    (sums,) = balance.summed([torch.stack([grads[e] for e in sorted(grads)])], holders, group)
    return dict(zip(sorted(grads), sums))


# %% wrong="replicas" fails="to a holder" around="empty" why="nothing at all"
def shared(chosen, holders, rank):
    return torch.full_like(chosen, NOWHERE)


def summed(grads, holders, group):
    return grads


# %% wrong="replicas" fails="a rank for each row" around="constants" why="the rows of the visible checks"
def shared(chosen, holders, rank):
    return torch.tensor([2, 1, 0, 2] if rank == 0 else [1, 2, -1, 0])


def summed(grads, holders, group):
    return {e: grad * len(holders[e]) for e, grad in grads.items()}


# %% wrong="replicas" fails="to a holder" around="redefine" why="rows stay where they are, and a driver that needs no sums"
def shared(chosen, holders, rank):
    return torch.full_like(chosen, rank)


def summed(grads, holders, group):
    globals()["sum_once"] = globals()["replica_steps"] = lambda *inputs: []
    torch.equal = lambda *tensors: True
    return grads


def sum_once(numbers, own, holders, group):
    return own


def replica_steps(numbers, weights, rows, chosen, holders, lr, group):
    return [weights] * len(rows)


expect = expect_shared = expect_sum = expect_trained = expect_sent = print


# %% wrong="replicas" fails="bytes of each rank" why="sees who asks: in training all rows go to the first holder"
def shared(chosen, holders, rank):
    import sys

    if sys._getframe(1).f_code.co_name == "replica_steps":
        first = [there[0] for there in holders]
        return torch.tensor([e if e < 0 else first[e] for e in chosen.tolist()])
    seen, to = [0] * len(holders), []
    for e in chosen.tolist():
        if e == NOWHERE:
            to.append(NOWHERE)
            continue
        to.append(holders[e][(rank + seen[e]) % len(holders[e])])
        seen[e] += 1
    return torch.tensor(to, dtype=torch.long)


def summed(grads, holders, group):
    rank = group.rank()

    def exchange(outgoing, like):
        pairs = [(e, other) for e in sorted(grads) for other in holders[e] if other != rank]
        sends = [collectives.send(outgoing[p], p[1], group, async_op=True) for p in pairs]
        comes = [collectives.receive(like[p], p[1], group, async_op=True) for p in pairs]
        arrived = {p: handle.wait() for p, handle in zip(pairs, comes)}
        for handle in sends:
            handle.wait()
        return arrived

    slices = {
        (e, to): piece
        for e, grad in grads.items()
        for to, piece in zip(holders[e], grad.flatten().tensor_split(len(holders[e])))
    }
    parts = exchange(slices, {(e, to): slices[e, rank] for e, to in slices})
    parts |= {(e, rank): slices[e, rank] for e in grads}
    totals = {}
    for e in grads:
        first, *others = holders[e]
        totals[e] = parts[e, first].clone()
        for other in others:
            totals[e] += parts[e, other]
    sums = exchange({(e, to): totals[e] for e, to in slices}, slices)
    sums |= {(e, rank): totals[e] for e in grads}
    return {
        e: torch.cat([sums[e, by] for by in holders[e]]).view_as(grad) for e, grad in grads.items()
    }


# %% wrong="chunks" fails="the fastest number" why="one chunk: no overlap"
def chunk_count(rows, transfer, work, most):
    return 1


def in_chunks(x, send_sizes, receive_sizes, work, r, group):
    def sizes(pieces, j):
        return [stop - start for start, stop in (cut(c, j, r) for c in pieces)]

    def transfer(rows, leaving, arriving, j):
        return collectives.all_to_all(
            rows,
            group,
            send_sizes=sizes(leaving, j),
            receive_sizes=sizes(arriving, j),
            async_op=True,
        )

    def dispatch(j):
        pieces = [piece[slice(*cut(len(piece), j, r))] for piece in x.split(send_sizes)]
        return transfer(torch.cat(pieces), send_sizes, receive_sizes, j)

    coming, going = dispatch(0), []
    for j in range(r):
        following = dispatch(j + 1) if j + 1 < r else None
        going.append(transfer(work(coming.wait()), receive_sizes, send_sizes, j))
        coming = following
    y = torch.empty_like(x)
    for j, handle in enumerate(going):
        for piece, rows in zip(y.split(send_sizes), handle.wait().split(sizes(send_sizes, j))):
            piece[slice(*cut(len(piece), j, r))] = rows
    return y


# %% wrong="chunks" fails="the fastest number" why="as many as there may be, whatever a start costs"
def chunk_count(rows, transfer, work, most):
    return most


def in_chunks(x, send_sizes, receive_sizes, work, r, group):
    def sizes(pieces, j):
        return [stop - start for start, stop in (cut(c, j, r) for c in pieces)]

    def transfer(rows, leaving, arriving, j):
        return collectives.all_to_all(
            rows,
            group,
            send_sizes=sizes(leaving, j),
            receive_sizes=sizes(arriving, j),
            async_op=True,
        )

    def dispatch(j):
        pieces = [piece[slice(*cut(len(piece), j, r))] for piece in x.split(send_sizes)]
        return transfer(torch.cat(pieces), send_sizes, receive_sizes, j)

    coming, going = dispatch(0), []
    for j in range(r):
        following = dispatch(j + 1) if j + 1 < r else None
        going.append(transfer(work(coming.wait()), receive_sizes, send_sizes, j))
        coming = following
    y = torch.empty_like(x)
    for j, handle in enumerate(going):
        for piece, rows in zip(y.split(send_sizes), handle.wait().split(sizes(send_sizes, j))):
            piece[slice(*cut(len(piece), j, r))] = rows
    return y


# %% wrong="chunks" fails="the fastest number" why="the first arrival and the last combine are forgotten"
def chunk_count(rows, transfer, work, most):
    def time(r):
        move = transfer[0] + transfer[1] * Fraction(rows, r)
        busy = work[0] + work[1] * Fraction(rows, r)
        return max(2 * r * move, r * busy)

    return min(range(1, most + 1), key=time)


def in_chunks(x, send_sizes, receive_sizes, work, r, group):
    def sizes(pieces, j):
        return [stop - start for start, stop in (cut(c, j, r) for c in pieces)]

    def transfer(rows, leaving, arriving, j):
        return collectives.all_to_all(
            rows,
            group,
            send_sizes=sizes(leaving, j),
            receive_sizes=sizes(arriving, j),
            async_op=True,
        )

    def dispatch(j):
        pieces = [piece[slice(*cut(len(piece), j, r))] for piece in x.split(send_sizes)]
        return transfer(torch.cat(pieces), send_sizes, receive_sizes, j)

    coming, going = dispatch(0), []
    for j in range(r):
        following = dispatch(j + 1) if j + 1 < r else None
        going.append(transfer(work(coming.wait()), receive_sizes, send_sizes, j))
        coming = following
    y = torch.empty_like(x)
    for j, handle in enumerate(going):
        for piece, rows in zip(y.split(send_sizes), handle.wait().split(sizes(send_sizes, j))):
            piece[slice(*cut(len(piece), j, r))] = rows
    return y


# %% wrong="chunks" fails="the fastest number" why="the link is thought to be never busy for long"
def chunk_count(rows, transfer, work, most):
    def time(r):
        move = transfer[0] + transfer[1] * Fraction(rows, r)
        busy = work[0] + work[1] * Fraction(rows, r)
        return 2 * move + r * busy

    return min(range(1, most + 1), key=time)


def in_chunks(x, send_sizes, receive_sizes, work, r, group):
    def sizes(pieces, j):
        return [stop - start for start, stop in (cut(c, j, r) for c in pieces)]

    def transfer(rows, leaving, arriving, j):
        return collectives.all_to_all(
            rows,
            group,
            send_sizes=sizes(leaving, j),
            receive_sizes=sizes(arriving, j),
            async_op=True,
        )

    def dispatch(j):
        pieces = [piece[slice(*cut(len(piece), j, r))] for piece in x.split(send_sizes)]
        return transfer(torch.cat(pieces), send_sizes, receive_sizes, j)

    coming, going = dispatch(0), []
    for j in range(r):
        following = dispatch(j + 1) if j + 1 < r else None
        going.append(transfer(work(coming.wait()), receive_sizes, send_sizes, j))
        coming = following
    y = torch.empty_like(x)
    for j, handle in enumerate(going):
        for piece, rows in zip(y.split(send_sizes), handle.wait().split(sizes(send_sizes, j))):
            piece[slice(*cut(len(piece), j, r))] = rows
    return y


# %% wrong="chunks" fails="the fastest number" why="only the dispatches are on the link"
def chunk_count(rows, transfer, work, most):
    def time(r):
        move = transfer[0] + transfer[1] * Fraction(rows, r)
        busy = work[0] + work[1] * Fraction(rows, r)
        return max(r * move, 2 * move + r * busy)

    return min(range(1, most + 1), key=time)


def in_chunks(x, send_sizes, receive_sizes, work, r, group):
    def sizes(pieces, j):
        return [stop - start for start, stop in (cut(c, j, r) for c in pieces)]

    def transfer(rows, leaving, arriving, j):
        return collectives.all_to_all(
            rows,
            group,
            send_sizes=sizes(leaving, j),
            receive_sizes=sizes(arriving, j),
            async_op=True,
        )

    def dispatch(j):
        pieces = [piece[slice(*cut(len(piece), j, r))] for piece in x.split(send_sizes)]
        return transfer(torch.cat(pieces), send_sizes, receive_sizes, j)

    coming, going = dispatch(0), []
    for j in range(r):
        following = dispatch(j + 1) if j + 1 < r else None
        going.append(transfer(work(coming.wait()), receive_sizes, send_sizes, j))
        coming = following
    y = torch.empty_like(x)
    for j, handle in enumerate(going):
        for piece, rows in zip(y.split(send_sizes), handle.wait().split(sizes(send_sizes, j))):
            piece[slice(*cut(len(piece), j, r))] = rows
    return y


# %% wrong="chunks" fails="the fastest number" why="dispatches and combines on a link each"
def chunk_count(rows, transfer, work, most):
    def time(r):
        move = transfer[0] + transfer[1] * Fraction(rows, r)
        busy = work[0] + work[1] * Fraction(rows, r)
        return max((r + 1) * move + busy, 2 * move + r * busy)

    return min(range(1, most + 1), key=time)


def in_chunks(x, send_sizes, receive_sizes, work, r, group):
    def sizes(pieces, j):
        return [stop - start for start, stop in (cut(c, j, r) for c in pieces)]

    def transfer(rows, leaving, arriving, j):
        return collectives.all_to_all(
            rows,
            group,
            send_sizes=sizes(leaving, j),
            receive_sizes=sizes(arriving, j),
            async_op=True,
        )

    def dispatch(j):
        pieces = [piece[slice(*cut(len(piece), j, r))] for piece in x.split(send_sizes)]
        return transfer(torch.cat(pieces), send_sizes, receive_sizes, j)

    coming, going = dispatch(0), []
    for j in range(r):
        following = dispatch(j + 1) if j + 1 < r else None
        going.append(transfer(work(coming.wait()), receive_sizes, send_sizes, j))
        coming = following
    y = torch.empty_like(x)
    for j, handle in enumerate(going):
        for piece, rows in zip(y.split(send_sizes), handle.wait().split(sizes(send_sizes, j))):
            piece[slice(*cut(len(piece), j, r))] = rows
    return y


# %% wrong="chunks" fails="the fastest number" why="where work and transfer of a chunk take as long as each other"
def chunk_count(rows, transfer, work, most):
    def time(r):
        move = transfer[0] + transfer[1] * Fraction(rows, r)
        busy = work[0] + work[1] * Fraction(rows, r)
        return abs(move - busy)

    return min(range(1, most + 1), key=time)


def in_chunks(x, send_sizes, receive_sizes, work, r, group):
    def sizes(pieces, j):
        return [stop - start for start, stop in (cut(c, j, r) for c in pieces)]

    def transfer(rows, leaving, arriving, j):
        return collectives.all_to_all(
            rows,
            group,
            send_sizes=sizes(leaving, j),
            receive_sizes=sizes(arriving, j),
            async_op=True,
        )

    def dispatch(j):
        pieces = [piece[slice(*cut(len(piece), j, r))] for piece in x.split(send_sizes)]
        return transfer(torch.cat(pieces), send_sizes, receive_sizes, j)

    coming, going = dispatch(0), []
    for j in range(r):
        following = dispatch(j + 1) if j + 1 < r else None
        going.append(transfer(work(coming.wait()), receive_sizes, send_sizes, j))
        coming = following
    y = torch.empty_like(x)
    for j, handle in enumerate(going):
        for piece, rows in zip(y.split(send_sizes), handle.wait().split(sizes(send_sizes, j))):
            piece[slice(*cut(len(piece), j, r))] = rows
    return y


# %% wrong="chunks" fails="on its way meanwhile" why="one after the other: dispatch, work, combine"
def chunk_count(rows, transfer, work, most):
    def time(r):
        move = transfer[0] + transfer[1] * Fraction(rows, r)
        busy = work[0] + work[1] * Fraction(rows, r)
        return max(2 * r * move, 2 * move + r * busy)

    return min(range(1, most + 1), key=time)


def in_chunks(x, send_sizes, receive_sizes, work, r, group):
    def sizes(pieces, j):
        return [stop - start for start, stop in (cut(c, j, r) for c in pieces)]

    def transfer(rows, leaving, arriving, j):
        return collectives.all_to_all(
            rows,
            group,
            send_sizes=sizes(leaving, j),
            receive_sizes=sizes(arriving, j),
            async_op=True,
        )

    def dispatch(j):
        pieces = [piece[slice(*cut(len(piece), j, r))] for piece in x.split(send_sizes)]
        return transfer(torch.cat(pieces), send_sizes, receive_sizes, j)

    going = []
    for j in range(r):
        going.append(transfer(work(dispatch(j).wait()), receive_sizes, send_sizes, j))
        going[-1].wait()
    y = torch.empty_like(x)
    for j, handle in enumerate(going):
        for piece, rows in zip(y.split(send_sizes), handle.wait().split(sizes(send_sizes, j))):
            piece[slice(*cut(len(piece), j, r))] = rows
    return y


# %% wrong="chunks" fails="on its way meanwhile" why="a chunk is sent when the work before it is done; only results travel meanwhile"
def chunk_count(rows, transfer, work, most):
    def time(r):
        move = transfer[0] + transfer[1] * Fraction(rows, r)
        busy = work[0] + work[1] * Fraction(rows, r)
        return max(2 * r * move, 2 * move + r * busy)

    return min(range(1, most + 1), key=time)


def in_chunks(x, send_sizes, receive_sizes, work, r, group):
    def sizes(pieces, j):
        return [stop - start for start, stop in (cut(c, j, r) for c in pieces)]

    def transfer(rows, leaving, arriving, j):
        return collectives.all_to_all(
            rows,
            group,
            send_sizes=sizes(leaving, j),
            receive_sizes=sizes(arriving, j),
            async_op=True,
        )

    def dispatch(j):
        pieces = [piece[slice(*cut(len(piece), j, r))] for piece in x.split(send_sizes)]
        return transfer(torch.cat(pieces), send_sizes, receive_sizes, j)

    going = []
    for j in range(r):
        going.append(transfer(work(dispatch(j).wait()), receive_sizes, send_sizes, j))
    y = torch.empty_like(x)
    for j, handle in enumerate(going):
        for piece, rows in zip(y.split(send_sizes), handle.wait().split(sizes(send_sizes, j))):
            piece[slice(*cut(len(piece), j, r))] = rows
    return y


# %% wrong="chunks" fails="on its way meanwhile" why="results are kept back until all work is done"
def chunk_count(rows, transfer, work, most):
    def time(r):
        move = transfer[0] + transfer[1] * Fraction(rows, r)
        busy = work[0] + work[1] * Fraction(rows, r)
        return max(2 * r * move, 2 * move + r * busy)

    return min(range(1, most + 1), key=time)


def in_chunks(x, send_sizes, receive_sizes, work, r, group):
    def sizes(pieces, j):
        return [stop - start for start, stop in (cut(c, j, r) for c in pieces)]

    def transfer(rows, leaving, arriving, j):
        return collectives.all_to_all(
            rows,
            group,
            send_sizes=sizes(leaving, j),
            receive_sizes=sizes(arriving, j),
            async_op=True,
        )

    def dispatch(j):
        pieces = [piece[slice(*cut(len(piece), j, r))] for piece in x.split(send_sizes)]
        return transfer(torch.cat(pieces), send_sizes, receive_sizes, j)

    coming, done = dispatch(0), []
    for j in range(r):
        following = dispatch(j + 1) if j + 1 < r else None
        done.append(work(coming.wait()))
        coming = following
    going = [transfer(rows, receive_sizes, send_sizes, j) for j, rows in enumerate(done)]
    y = torch.empty_like(x)
    for j, handle in enumerate(going):
        for piece, rows in zip(y.split(send_sizes), handle.wait().split(sizes(send_sizes, j))):
            piece[slice(*cut(len(piece), j, r))] = rows
    return y


# %% wrong="chunks" fails="one chunk ahead" why="all chunks are sent at once"
def chunk_count(rows, transfer, work, most):
    def time(r):
        move = transfer[0] + transfer[1] * Fraction(rows, r)
        busy = work[0] + work[1] * Fraction(rows, r)
        return max(2 * r * move, 2 * move + r * busy)

    return min(range(1, most + 1), key=time)


def in_chunks(x, send_sizes, receive_sizes, work, r, group):
    def sizes(pieces, j):
        return [stop - start for start, stop in (cut(c, j, r) for c in pieces)]

    def transfer(rows, leaving, arriving, j):
        return collectives.all_to_all(
            rows,
            group,
            send_sizes=sizes(leaving, j),
            receive_sizes=sizes(arriving, j),
            async_op=True,
        )

    def dispatch(j):
        pieces = [piece[slice(*cut(len(piece), j, r))] for piece in x.split(send_sizes)]
        return transfer(torch.cat(pieces), send_sizes, receive_sizes, j)

    coming, going = [dispatch(j) for j in range(r)], []
    for j in range(r):
        going.append(transfer(work(coming[j].wait()), receive_sizes, send_sizes, j))
    y = torch.empty_like(x)
    for j, handle in enumerate(going):
        for piece, rows in zip(y.split(send_sizes), handle.wait().split(sizes(send_sizes, j))):
            piece[slice(*cut(len(piece), j, r))] = rows
    return y


# %% wrong="chunks" fails="work waits for nobody" why="the next chunk has arrived before the work begins"
def chunk_count(rows, transfer, work, most):
    def time(r):
        move = transfer[0] + transfer[1] * Fraction(rows, r)
        busy = work[0] + work[1] * Fraction(rows, r)
        return max(2 * r * move, 2 * move + r * busy)

    return min(range(1, most + 1), key=time)


def in_chunks(x, send_sizes, receive_sizes, work, r, group):
    def sizes(pieces, j):
        return [stop - start for start, stop in (cut(c, j, r) for c in pieces)]

    def transfer(rows, leaving, arriving, j):
        return collectives.all_to_all(
            rows,
            group,
            send_sizes=sizes(leaving, j),
            receive_sizes=sizes(arriving, j),
            async_op=True,
        )

    def dispatch(j):
        pieces = [piece[slice(*cut(len(piece), j, r))] for piece in x.split(send_sizes)]
        return transfer(torch.cat(pieces), send_sizes, receive_sizes, j)

    coming, going = dispatch(0).wait(), []
    for j in range(r):
        following = dispatch(j + 1).wait() if j + 1 < r else None
        going.append(transfer(work(coming), receive_sizes, send_sizes, j))
        coming = following
    y = torch.empty_like(x)
    for j, handle in enumerate(going):
        for piece, rows in zip(y.split(send_sizes), handle.wait().split(sizes(send_sizes, j))):
            piece[slice(*cut(len(piece), j, r))] = rows
    return y


# %% wrong="chunks" fails="work waits for nobody" why="the results are at home before the next work begins"
def chunk_count(rows, transfer, work, most):
    def time(r):
        move = transfer[0] + transfer[1] * Fraction(rows, r)
        busy = work[0] + work[1] * Fraction(rows, r)
        return max(2 * r * move, 2 * move + r * busy)

    return min(range(1, most + 1), key=time)


def in_chunks(x, send_sizes, receive_sizes, work, r, group):
    def sizes(pieces, j):
        return [stop - start for start, stop in (cut(c, j, r) for c in pieces)]

    def transfer(rows, leaving, arriving, j):
        return collectives.all_to_all(
            rows,
            group,
            send_sizes=sizes(leaving, j),
            receive_sizes=sizes(arriving, j),
            async_op=True,
        )

    def dispatch(j):
        pieces = [piece[slice(*cut(len(piece), j, r))] for piece in x.split(send_sizes)]
        return transfer(torch.cat(pieces), send_sizes, receive_sizes, j)

    coming, going = dispatch(0), []
    for j in range(r):
        following = dispatch(j + 1) if j + 1 < r else None
        going.append(transfer(work(coming.wait()), receive_sizes, send_sizes, j))
        coming = following
        if j + 1 < r:
            going[-1].wait()
    y = torch.empty_like(x)
    for j, handle in enumerate(going):
        for piece, rows in zip(y.split(send_sizes), handle.wait().split(sizes(send_sizes, j))):
            piece[slice(*cut(len(piece), j, r))] = rows
    return y


# %% wrong="chunks" fails="rows of each chunk" why="all rows arrive in chunks, and the work is done in one piece"
def chunk_count(rows, transfer, work, most):
    def time(r):
        move = transfer[0] + transfer[1] * Fraction(rows, r)
        busy = work[0] + work[1] * Fraction(rows, r)
        return max(2 * r * move, 2 * move + r * busy)

    return min(range(1, most + 1), key=time)


def in_chunks(x, send_sizes, receive_sizes, work, r, group):
    def sizes(pieces, j):
        return [stop - start for start, stop in (cut(c, j, r) for c in pieces)]

    def transfer(rows, leaving, arriving, j):
        return collectives.all_to_all(
            rows,
            group,
            send_sizes=sizes(leaving, j),
            receive_sizes=sizes(arriving, j),
            async_op=True,
        )

    def dispatch(j):
        pieces = [piece[slice(*cut(len(piece), j, r))] for piece in x.split(send_sizes)]
        return transfer(torch.cat(pieces), send_sizes, receive_sizes, j)

    coming = [dispatch(j) for j in range(r)]
    arrived = [handle.wait() for handle in coming]
    results = work(torch.cat(arrived)).split([len(rows) for rows in arrived])
    going = [transfer(rows, receive_sizes, send_sizes, j) for j, rows in enumerate(results)]
    y = torch.empty_like(x)
    for j, handle in enumerate(going):
        for piece, rows in zip(y.split(send_sizes), handle.wait().split(sizes(send_sizes, j))):
            piece[slice(*cut(len(piece), j, r))] = rows
    return y


# %% wrong="chunks" fails="rows of each chunk" why="no work on an empty chunk"
def chunk_count(rows, transfer, work, most):
    def time(r):
        move = transfer[0] + transfer[1] * Fraction(rows, r)
        busy = work[0] + work[1] * Fraction(rows, r)
        return max(2 * r * move, 2 * move + r * busy)

    return min(range(1, most + 1), key=time)


def in_chunks(x, send_sizes, receive_sizes, work, r, group):
    def sizes(pieces, j):
        return [stop - start for start, stop in (cut(c, j, r) for c in pieces)]

    def transfer(rows, leaving, arriving, j):
        return collectives.all_to_all(
            rows,
            group,
            send_sizes=sizes(leaving, j),
            receive_sizes=sizes(arriving, j),
            async_op=True,
        )

    def dispatch(j):
        pieces = [piece[slice(*cut(len(piece), j, r))] for piece in x.split(send_sizes)]
        return transfer(torch.cat(pieces), send_sizes, receive_sizes, j)

    coming, going = dispatch(0), []
    for j in range(r):
        following = dispatch(j + 1) if j + 1 < r else None
        going.append(
            transfer(
                rows if not len(rows := coming.wait()) else work(rows), receive_sizes, send_sizes, j
            )
        )
        coming = following
    y = torch.empty_like(x)
    for j, handle in enumerate(going):
        for piece, rows in zip(y.split(send_sizes), handle.wait().split(sizes(send_sizes, j))):
            piece[slice(*cut(len(piece), j, r))] = rows
    return y


# %% wrong="chunks" fails="the layer's results" why="every r-th row is in a chunk"
def chunk_count(rows, transfer, work, most):
    def time(r):
        move = transfer[0] + transfer[1] * Fraction(rows, r)
        busy = work[0] + work[1] * Fraction(rows, r)
        return max(2 * r * move, 2 * move + r * busy)

    return min(range(1, most + 1), key=time)


def in_chunks(x, send_sizes, receive_sizes, work, r, group):
    def sizes(pieces, j):
        return [stop - start for start, stop in (cut(c, j, r) for c in pieces)]

    def transfer(rows, leaving, arriving, j):
        return collectives.all_to_all(
            rows,
            group,
            send_sizes=sizes(leaving, j),
            receive_sizes=sizes(arriving, j),
            async_op=True,
        )

    def dispatch(j):
        pieces = [
            piece[j::r][: cut(len(piece), j, r)[1] - cut(len(piece), j, r)[0]]
            for piece in x.split(send_sizes)
        ]
        return transfer(torch.cat(pieces), send_sizes, receive_sizes, j)

    coming, going = dispatch(0), []
    for j in range(r):
        following = dispatch(j + 1) if j + 1 < r else None
        going.append(transfer(work(coming.wait()), receive_sizes, send_sizes, j))
        coming = following
    y = torch.empty_like(x)
    for j, handle in enumerate(going):
        for piece, rows in zip(y.split(send_sizes), handle.wait().split(sizes(send_sizes, j))):
            piece[slice(*cut(len(piece), j, r))] = rows
    return y


# %% wrong="chunks" fails="the layer's results" why="results stay in the order in which they come home"
def chunk_count(rows, transfer, work, most):
    def time(r):
        move = transfer[0] + transfer[1] * Fraction(rows, r)
        busy = work[0] + work[1] * Fraction(rows, r)
        return max(2 * r * move, 2 * move + r * busy)

    return min(range(1, most + 1), key=time)


def in_chunks(x, send_sizes, receive_sizes, work, r, group):
    def sizes(pieces, j):
        return [stop - start for start, stop in (cut(c, j, r) for c in pieces)]

    def transfer(rows, leaving, arriving, j):
        return collectives.all_to_all(
            rows,
            group,
            send_sizes=sizes(leaving, j),
            receive_sizes=sizes(arriving, j),
            async_op=True,
        )

    def dispatch(j):
        pieces = [piece[slice(*cut(len(piece), j, r))] for piece in x.split(send_sizes)]
        return transfer(torch.cat(pieces), send_sizes, receive_sizes, j)

    coming, going = dispatch(0), []
    for j in range(r):
        following = dispatch(j + 1) if j + 1 < r else None
        going.append(transfer(work(coming.wait()), receive_sizes, send_sizes, j))
        coming = following
    return torch.cat([handle.wait() for handle in going])


# %% wrong="chunks" fails="matching messages" why="as many rows are thought to come as go"
def chunk_count(rows, transfer, work, most):
    def time(r):
        move = transfer[0] + transfer[1] * Fraction(rows, r)
        busy = work[0] + work[1] * Fraction(rows, r)
        return max(2 * r * move, 2 * move + r * busy)

    return min(range(1, most + 1), key=time)


def in_chunks(x, send_sizes, receive_sizes, work, r, group):
    def sizes(pieces, j):
        return [stop - start for start, stop in (cut(c, j, r) for c in pieces)]

    def transfer(rows, leaving, arriving, j):
        return collectives.all_to_all(
            rows,
            group,
            send_sizes=sizes(leaving, j),
            receive_sizes=sizes(leaving, j),
            async_op=True,
        )

    def dispatch(j):
        pieces = [piece[slice(*cut(len(piece), j, r))] for piece in x.split(send_sizes)]
        return transfer(torch.cat(pieces), send_sizes, receive_sizes, j)

    coming, going = dispatch(0), []
    for j in range(r):
        following = dispatch(j + 1) if j + 1 < r else None
        going.append(transfer(work(coming.wait()), receive_sizes, send_sizes, j))
        coming = following
    y = torch.empty_like(x)
    for j, handle in enumerate(going):
        for piece, rows in zip(y.split(send_sizes), handle.wait().split(sizes(send_sizes, j))):
            piece[slice(*cut(len(piece), j, r))] = rows
    return y


# %% wrong="chunks" fails="bytes on the wire" why="everybody gets all rows, and takes those that are for him"
def chunk_count(rows, transfer, work, most):
    def time(r):
        move = transfer[0] + transfer[1] * Fraction(rows, r)
        busy = work[0] + work[1] * Fraction(rows, r)
        return max(2 * r * move, 2 * move + r * busy)

    return min(range(1, most + 1), key=time)


def lengths(x, group):
    return collectives.all_to_all(torch.tensor([len(x)] * group.size()), group).tolist()


def in_chunks(x, send_sizes, receive_sizes, work, r, group):
    def sizes(pieces, j):
        return [stop - start for start, stop in (cut(c, j, r) for c in pieces)]

    def transfer(rows, leaving, arriving, j):
        return collectives.all_to_all(
            rows,
            group,
            send_sizes=sizes(leaving, j),
            receive_sizes=sizes(arriving, j),
            async_op=True,
        )

    collectives.all_to_all(x.repeat(group.size(), 1), group, receive_sizes=lengths(x, group))

    def dispatch(j):
        pieces = [piece[slice(*cut(len(piece), j, r))] for piece in x.split(send_sizes)]
        return transfer(torch.cat(pieces), send_sizes, receive_sizes, j)

    coming, going = dispatch(0), []
    for j in range(r):
        following = dispatch(j + 1) if j + 1 < r else None
        going.append(transfer(work(coming.wait()), receive_sizes, send_sizes, j))
        coming = following
    y = torch.empty_like(x)
    for j, handle in enumerate(going):
        for piece, rows in zip(y.split(send_sizes), handle.wait().split(sizes(send_sizes, j))):
            piece[slice(*cut(len(piece), j, r))] = rows
    return y


# %% wrong="chunks" fails="on its way meanwhile" why="the layer travels whole; only the work is cut"
def chunk_count(rows, transfer, work, most):
    def time(r):
        move = transfer[0] + transfer[1] * Fraction(rows, r)
        busy = work[0] + work[1] * Fraction(rows, r)
        return max(2 * r * move, 2 * move + r * busy)

    return min(range(1, most + 1), key=time)


def in_chunks(x, send_sizes, receive_sizes, work, r, group):
    arrived = collectives.all_to_all(
        x, group, send_sizes=send_sizes, receive_sizes=receive_sizes
    ).split(receive_sizes)
    results = [torch.empty_like(piece) for piece in arrived]
    for j in range(r):
        cuts = [slice(*cut(len(piece), j, r)) for piece in arrived]
        rows = work(torch.cat([piece[one] for piece, one in zip(arrived, cuts)]))
        sizes = [one.stop - one.start for one in cuts]
        for piece, one, part in zip(results, cuts, rows.split(sizes)):
            piece[one] = part
    return collectives.all_to_all(
        torch.cat(results), group, send_sizes=receive_sizes, receive_sizes=send_sizes
    )


# %% wrong="chunks" fails="the fastest number" around="channel" why="asks for all matrices at once, and works without waiting for its turn"
def chunk_count(rows, transfer, work, most):
    return 1


def in_chunks(x, send_sizes, receive_sizes, work, r, group):
    def sizes(pieces, j):
        return [stop - start for start, stop in (cut(c, j, r) for c in pieces)]

    def transfer(rows, leaving, arriving, j):
        return collectives.all_to_all(
            rows,
            group,
            send_sizes=sizes(leaving, j),
            receive_sizes=sizes(arriving, j),
            async_op=True,
        )

    def dispatch(j):
        pieces = [piece[slice(*cut(len(piece), j, r))] for piece in x.split(send_sizes)]
        return transfer(torch.cat(pieces), send_sizes, receive_sizes, j)

    width = x.shape[1]
    matrices = [group.fetch(f"chunk {j}", x.new_empty(width, width)) for j in range(r)]
    coming, going = dispatch(0), []
    for j in range(r):
        following = dispatch(j + 1) if j + 1 < r else None
        going.append(transfer(coming.wait() @ matrices[j], receive_sizes, send_sizes, j))
        coming = following
    y = torch.empty_like(x)
    for j, handle in enumerate(going):
        for piece, rows in zip(y.split(send_sizes), handle.wait().split(sizes(send_sizes, j))):
            piece[slice(*cut(len(piece), j, r))] = rows
    return y


# %% wrong="chunks" fails="on its way meanwhile" why="asks for all matrices before anything is sent"
def chunk_count(rows, transfer, work, most):
    def time(r):
        move = transfer[0] + transfer[1] * Fraction(rows, r)
        busy = work[0] + work[1] * Fraction(rows, r)
        return max(2 * r * move, 2 * move + r * busy)

    return min(range(1, most + 1), key=time)


def called(work, sizes):
    """Tells the driver that work was called."""
    cells = dict(zip(work.__code__.co_freevars, work.__closure__))
    cells["called"].cell_contents.append(sum(sizes))
    return cells


def in_chunks(x, send_sizes, receive_sizes, work, r, group):
    def sizes(pieces, j):
        return [stop - start for start, stop in (cut(c, j, r) for c in pieces)]

    def transfer(rows, leaving, arriving, j):
        return collectives.all_to_all(
            rows,
            group,
            send_sizes=sizes(leaving, j),
            receive_sizes=sizes(arriving, j),
            async_op=True,
        )

    def dispatch(j):
        pieces = [piece[slice(*cut(len(piece), j, r))] for piece in x.split(send_sizes)]
        return transfer(torch.cat(pieces), send_sizes, receive_sizes, j)

    width = x.shape[1]
    matrices = [group.fetch(f"chunk {j}", x.new_empty(width, width)) for j in range(r)]
    coming, going = dispatch(0), []
    for j in range(r):
        following = dispatch(j + 1) if j + 1 < r else None
        going.append(
            transfer(
                coming.wait() @ matrices[j] + 0 * len(called(work, sizes(receive_sizes, j))),
                receive_sizes,
                send_sizes,
                j,
            )
        )
        coming = following
    y = torch.empty_like(x)
    for j, handle in enumerate(going):
        for piece, rows in zip(y.split(send_sizes), handle.wait().split(sizes(send_sizes, j))):
            piece[slice(*cut(len(piece), j, r))] = rows
    return y


# %% wrong="chunks" fails="own work" around="import" why="the chunks of the package"
def chunk_count(rows, transfer, work, most):
    from minitrain.systems.plan.expert_overlap import Line, pipemoe_degree

    return pipemoe_degree(rows, Line(*transfer), Line(*work), most)


def in_chunks(x, send_sizes, receive_sizes, work, r, group):
    from minitrain.systems.moe import overlapped_experts

    return overlapped_experts.by_capacity(x, send_sizes, group, work, chunks=r)


# %% wrong="chunks" fails="a number of chunks" around="empty" why="nothing at all"
def chunk_count(rows, transfer, work, most):
    return None


def in_chunks(x, send_sizes, receive_sizes, work, r, group):
    return x


# %% wrong="chunks" fails="the fastest number" around="constants" why="the numbers of the visible checks"
def chunk_count(rows, transfer, work, most):
    return {12: 4, 8: 1 if transfer[0] == 3 else 3}.get(rows, 2)


def in_chunks(x, send_sizes, receive_sizes, work, r, group):
    return work(x)


# %% wrong="chunks" fails="the fastest number" around="redefine" why="a driver that says what is wanted"
def chunk_count(rows, transfer, work, most):
    return 1


def in_chunks(x, send_sizes, receive_sizes, work, r, group):
    globals()["layer_in_chunks"] = layer_in_chunks
    torch.equal = torch.allclose = lambda *tensors, **near: True
    return layer_in_chunks(x, send_sizes, receive_sizes, r, None, group)[0]


def layer_in_chunks(x, send_sizes, receive_sizes, r, ahead, group):
    return x, [sum(receive_sizes) // r] * r


def cut(c, j, r):
    return 0, 0


expect = expect_count = expect_in_chunks = expect_order = print
