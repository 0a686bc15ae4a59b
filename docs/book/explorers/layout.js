// Bytes of a device and the time of a step: minitrain/plan/predict in JavaScript, for dense models under 1F1B.
//
// layout-data.js has what only a dry run can count, of an embedding, a block and a head: parameters, bytes saved and
// at the peak, seconds of F and B. A list of three numbers here is always of these three: [embedding, block, head].

const range = (n) => [...Array(n).keys()];
const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);
const dot = (a, b) => sum(a.map((x, i) => x * b[i]));
const BUCKET_BYTES = 25e6;

// Python's round: halves go to the even number.
function round(x) {
  const below = Math.floor(x);
  return x - below === 0.5 ? below + (below % 2) : Math.round(x);
}

// ---- the pipeline: its stages, 1F1B, and the longest way through it (predicted_pipeline.py) ----

// Of each stage: how many of [embedding, block, head]. Blocks left over go to the stages after the first.
function stagesOf(blocks, p) {
  const [share, rest] = [Math.floor(blocks / p), blocks % p];
  return range(p).map((s) => [+(s === 0), share + (s >= 1 && s <= rest), +(s === p - 1)]);
}

// Actions of each rank, [kind, microbatch]; a rank is a stage.
function oneFOneB(p, m) {
  return range(p).map((rank) => {
    const ahead = Math.min(p - rank - 1, m);
    const list = range(ahead).map((i) => ["F", i]);
    for (let i = ahead; i < m; i++) list.push(["F", i], ["B", i - ahead]);
    return list.concat(range(ahead).map((i) => ["B", m - ahead + i]));
  });
}

// What is counted of m microbatches, from few: in the steady state p more add what the p before added.
function inSteadyState(p, m, counted) {
  const few = 2 * p + (m % p);
  if (m <= few + p) return counted(m);
  const [shorter, longer] = [counted(few), counted(few + p)];
  const add = (a, b) => (Array.isArray(a) ? a.map((x, i) => add(x, b[i])) : a + Math.floor((m - few) / p) * (b - a));
  return add(shorter, longer);
}

// Actions in an order in which each comes after what it needs: [rank, previous of the rank, what other ranks did].
function inOrder(p, m) {
  const [lists, done, newest, position] = [oneFOneB(p, m), new Map(), Array(p).fill(-1), Array(p).fill(0)];
  const [asleep, found] = [new Map(), []];
  const name = (kind, stage, i) => (i * p + stage) * 2 + (kind === "B");
  for (const awake = range(p).reverse(); awake.length; ) {
    const rank = awake.pop();
    for (; position[rank] < lists[rank].length; position[rank]++) {
      const [kind, i] = lists[rank][position[rank]];
      const ahead = kind === "F" ? rank - 1 : rank + 1;
      const needs = ahead >= 0 && ahead < p ? [name(kind, ahead, i)] : [];
      const missing = needs.find((need) => !done.has(need));
      if (missing !== undefined) {
        asleep.set(missing, [...(asleep.get(missing) ?? []), rank]);
        break;
      }
      const mine = name(kind, rank, i);
      done.set(mine, found.length);
      found.push({ rank, kind, previous: newest[rank], messages: needs.map((need) => done.get(need)) });
      newest[rank] = found.length - 1;
      awake.push(...(asleep.get(mine) ?? []));
      asleep.delete(mine);
    }
  }
  return { actions: found, newest };
}

// How many F and B of [embedding, block, head] and how many messages are on the longest path.
function longestPath(stages, m, costs) {
  const { actions, newest } = inOrder(stages.length, m);
  const time = { F: stages.map((own) => dot(own, costs.F)), B: stages.map((own) => dot(own, costs.B)) };
  const ends = [];
  const arrivals = ({ rank, previous, messages }) => [
    ...messages.map((at) => ({ time: ends[at] + costs.message, sent: 1, rank: actions[at].rank, at })),
    ...(previous >= 0 ? [{ time: ends[previous], sent: 0, rank, at: previous }] : []),
  ];
  for (const action of actions) {
    const start = Math.max(0, ...arrivals(action).map(({ time }) => time));
    ends.push(start + time[action.kind][action.rank]);
  }
  const counts = { F: [0, 0, 0], B: [0, 0, 0], messages: 0 };
  let at = newest.reduce((most, one) => (ends[one] > ends[most] ? one : most));
  for (;;) {
    const { kind, rank } = actions[at];
    counts[kind] = counts[kind].map((count, layer) => count + stages[rank][layer]);
    const before = arrivals(actions[at]).sort((a, b) => b.time - a.time || b.sent - a.sent || b.rank - a.rank || b.at - a.at);
    if (!before.length || before[0].time <= 0) return [counts.F, counts.B, counts.messages];
    counts.messages += before[0].sent;
    at = before[0].at;
  }
}

// Seconds of all microbatches: the longest path for costs to an eighth of a doubling, with the exact ones.
function makespan(stages, m, costs) {
  const unit = costs.F[1] + costs.B[1] || 1;
  const about = (time) => {
    if (time <= 0) return 0;
    const eighths = Math.round(8 * Math.log2(time / unit));
    return 2 ** Math.floor(eighths / 8) * 2 ** ((((eighths % 8) + 8) % 8) / 8);
  };
  const rounded = { F: costs.F.map(about), B: costs.B.map(about), message: about(costs.message) };
  const [F, B, messages] = inSteadyState(stages.length, m, (some) => longestPath(stages, some, rounded));
  return dot(F, costs.F) + dot(B, costs.B) + messages * costs.message;
}

// ---- what travels: alpha and bytes over bandwidth, the cheapest algorithm (plan/simulate/collectives.py) ----

const ceilLog2 = (n) => (n > 1 ? 32 - Math.clz32(n - 1) : 0);

// `members` are ranks; rank r sits on node r // devices_per_node.
function travel(op, size, members, machine) {
  const n = members.length;
  if (n === 1) return 0;
  const onNode = {};
  for (const rank of members) {
    const node = Math.floor(rank / machine.devices_per_node);
    onNode[node] = (onNode[node] ?? 0) + 1;
  }
  const counts = Object.values(onNode);
  const [N, fewest, most] = [counts.length, Math.min(...counts), Math.max(...counts)];
  const { alpha_in, alpha_out, rate_in, rate_out, rate_card } = machine;
  const across = fewest * rate_out;
  const rate = N === 1 ? rate_in : most === 1 ? across : Math.min(rate_in, across);
  const latency = ([inside, outside]) => inside * alpha_in + outside * alpha_out;
  if (op === "send") return N === 1 ? alpha_in + size / rate_in : alpha_out + size / rate_out;
  const chunked = (hops, rate) => {
    const [alpha, behind] = [hops[1] ? alpha_out : alpha_in, sum(hops) - 1];
    const chunks = Math.max(1, Math.sqrt((behind * size) / (alpha * rate)));
    return latency(hops) + (chunks - 1) * alpha + ((1 + behind / chunks) * size) / rate;
  };
  const out = N === 1 ? 0 : Math.min(N, n - 1);
  const [levels, equal, power] = [[ceilLog2(most), ceilLog2(N)], fewest === most, (x) => (x & (x - 1)) === 0];
  const found = [latency([n - 1 - out, out]) + (((n - 1) / n) * size) / rate]; // a ring
  if (equal && power(most) && power(N)) {
    found.push(latency(levels) + ((1 - 1 / most) * size) / rate_in + ((1 - 1 / N) * size) / most / rate_out);
  }
  if (equal && most > 1 && N > 1) {
    const inside = (most - 1) * (alpha_in + size / (most * rate_in));
    found.push(inside + (N - 1) * (alpha_out + size / (most * N * rate_out)));
  }
  if (op !== "all_reduce") return Math.min(...found);
  found.push(chunked(levels, rate));
  if (most > 1 && N > 1) found.push(chunked([levels[0], 0], rate_in) + (N - 1) * (alpha_out + size / (N * rate_card)));
  return 2 * Math.min(...found);
}

// ---- memory (predicted_memory.py) ----

// Bytes by kind of the rank that has most.
function memoryOf({ model, work, kept, stages, shards, setting, state }) {
  const { pp, m, zero } = setting;
  const [weight, gradient, optimizer] = state;
  const activations = inSteadyState(pp, m, (some) => oneFOneB(pp, some).map((list, rank) => mostKept(list, stages[rank], work, kept)));
  const ranks = stages.map((own, rank) => {
    const elements = elementsOf(model, work, own);
    const bytes = (stage, each) => (zero >= stage ? elements / shards : elements) * each;
    let buffers = shards > 1 && zero === 2 ? Math.min(2 * BUCKET_BYTES, elements * gradient) : 0;
    if (zero === 3) buffers = work.parameters[1] * (weight + gradient);
    if (pp > 1) buffers += 3 * (own[0] || own[2] ? 1 : 2) * work.boundary_bytes;
    const found = [bytes(3, weight), bytes(2, gradient), bytes(1, optimizer), activations[rank], buffers].map(round);
    return Object.fromEntries(["parameters", "gradients", "optimizer state", "activations", "buffers"].map((kind, i) => [kind, found[i]]));
  });
  return ranks.reduce((most, one) => (sum(Object.values(one)) > sum(Object.values(most)) ? one : most));
}

// Parameters of a rank; a tied table counts once where both ends are.
const elementsOf = (model, work, own) => dot(own, work.parameters) - work.shared * (model.tied && own[0] && own[2]);

// The largest sum of what forwards have kept and of what lives only while the action runs.
function mostKept(list, own, { boundary_bytes }, kept) {
  const layers = own.flatMap((number, layer) => Array(number).fill(kept[layer]));
  const every = sum(layers.map(([saved]) => saved));
  let [below, forward, backward] = [0, 0, 0];
  for (const [saved, highForward, highBackward] of layers) {
    forward = Math.max(forward, below + highForward);
    below += saved;
    backward = Math.max(backward, below - every + highBackward);
  }
  const keeps = every + boundary_bytes * (own[2] - own[0]);
  let [held, most] = [0, 0];
  for (const [kind] of list) {
    most = Math.max(most, held + (kind === "F" ? forward : backward));
    held += kind === "F" ? keeps : -keeps;
    most = Math.max(most, held);
  }
  return most;
}

// ---- the step (predicted_step.py) ----

// How much longer than the passes beside it a transfer takes, a layer after the other.
function beyond(own, work, passes, time) {
  const whole = dot(own, work.parameters);
  let [done, shadow, most] = [0, 0, 0];
  own.forEach((number, layer) => {
    for (let i = 0; i < number; i++) {
      done += (time * work.parameters[layer]) / whole;
      most = Math.max(most, done - shadow);
      shadow += passes[layer];
    }
  });
  return most;
}

// All that the page shows. `setting`: model, machine, dp, tp, pp, cp, zero, recompute, m microbatches of `rows`.
function explore(setting, data = DATA) {
  const { dp, tp, pp, cp, zero, recompute, m, rows } = setting;
  const [model, machine, state] = [data.models[setting.model], data.machines[setting.machine], data.state_bytes];
  const work = model.work[`${tp} ${cp} ${rows}`];
  if (!work) return { error: `${setting.model} has rows of ${model.length} tokens: use cp = 1` };
  const [layers, stages, inside, again] = [work.times[setting.machine], stagesOf(model.layers, pp), tp * cp, recompute === "full"];
  const F = layers.map((layer) => layer[0]);
  const B = layers.map((layer, number) => layer[1] + (again && number === 1 ? F[1] : 0));

  // Passes, if no rank ever waited for another, the mean over ranks; then what the longest way takes beyond that.
  const everywhere = range(3).map((layer) => (sum(stages.map((own) => own[layer])) * m) / pp);
  const names = ["products", "attention", "passes", "tp", "cp"];
  const parts = Object.fromEntries(names.map((name, i) => [name, dot(everywhere, layers.map((layer) => layer[2 + i]))]));
  parts.recomputation = again ? everywhere[1] * F[1] : 0;
  const node = machine.devices_per_node;
  const neighbours = pp * inside > node && node > inside ? [node - inside, node] : [0, inside];
  const message = pp > 1 ? travel("send", work.boundary_bytes, neighbours, machine) : 0;
  parts.bubble = Math.max(0, makespan(stages, m, { F, B, message }) - sum(Object.values(parts)));

  // Gradients and weights over dp · cp, beside the passes of the first stage; a tied table; the optimizer.
  const [weight, gradient, optimizer] = state;
  const group = range(dp * cp).map((i) => Math.floor(i / cp) * inside * pp + (i % cp) * tp);
  const elements = Math.max(...stages.map((own) => elementsOf(model, work, own)));
  const crosses = new Set(group.map((rank) => Math.floor(rank / node))).size > 1;
  const waited = (op, each, before) => {
    const [whole, passes] = [travel(op, elements * each, group, machine), before ? F : B];
    const sent = layers[1][7 + 2 * !before + crosses]; // seconds in which tp or cp have the same wire
    const exposed = beyond(stages[0], work, passes, whole);
    return exposed + Math.min(1, sent / passes[1]) * (whole - exposed);
  };
  parts.dp = 0;
  if (group.length > 1 && zero === 0) parts.dp = waited("all_reduce", gradient, false);
  if (group.length > 1 && zero > 0) {
    parts.dp = waited("reduce_scatter", gradient, false) + (zero === 3 ? 2 * m : 1) * waited("all_gather", weight, true);
  }
  const ends = [0, (pp - 1) * inside];
  parts["tied table"] = model.tied && pp > 1 ? travel("all_reduce", work.shared * gradient, ends, machine) : 0;
  const updated = zero ? elements / group.length : elements;
  parts.optimizer = (updated * (2 * optimizer + 3 * gradient + weight)) / machine.memory_bytes_per_s;

  const step = sum(Object.values(parts));
  const [ranks, tokens] = [dp * tp * pp * cp, dp * m * rows * model.length];
  const memory = memoryOf({ model, work, kept: work[recompute], stages, shards: dp * cp, setting, state });
  const mfu = (tokens * model.flops_per_token) / (step * machine.peak * ranks);
  return { parts, step, mfu, memory, ranks, tokens, capacity: machine.capacity_bytes };
}
