// Pipeline schedules as data, and when everything in them happens: minitrain/pipeline in JavaScript.
//
// An action is [kind, stage, microbatch]: F forward, B whole backward, I backward for the input, W for the weights.
// A pair of a forward and a backward that run as one (DualPipe) is a list of two actions.

const range = (n) => [...Array(n).keys()];
const action = (kind) => (stage, microbatch) => [kind, stage, microbatch];
const [F, B, I, W] = [..."FBIW"].map(action);
const isPair = (entry) => Array.isArray(entry[0]);
const parts = (entry) => (isPair(entry) ? entry : [entry]);
const at = (kind, stage, microbatch) => `${kind}${stage}.${microbatch}`;
const schedule = (ranks, stages, microbatches) => ({ ranks, stages, microbatches });

// ---- one direction (schedules/one_direction.py) ----

function gpipe(p, m) {
  return schedule(range(p).map((r) => [F, B].flatMap((kind) => range(m).map((i) => kind(r, i)))), p, m);
}

// Forwards and backwards of rank r, which has v stages, every p-th; `order` of [which of them, microbatch].
function onRank(r, p, v, order, backward) {
  return [order.map(([c, i]) => F(c * p + r, i)), order.map(([c, i]) => backward((v - 1 - c) * p + r, i))];
}

// `ahead` forwards, then one of each in turn, then the backwards that are left.
function alternate([forwards, backwards], ahead) {
  ahead = Math.min(ahead, forwards.length);
  const turns = forwards.slice(ahead).flatMap((forward, i) => [forward, backwards[i]]);
  return [...forwards.slice(0, ahead), ...turns, ...backwards.slice(forwards.length - ahead)];
}

// p microbatches go through all v stages of a rank, then the next p.
const depthFirst = (p, m, v) =>
  range(m * v).map((k) => [Math.floor(k / p) % v, Math.floor(k / (p * v)) * p + (k % p)]);

function oneFOneB(p, m) {
  const order = range(m).map((i) => [0, i]);
  return schedule(range(p).map((r) => alternate(onRank(r, p, 1, order, B), p - r - 1)), p, m);
}

function interleaved(p, m, v) {
  const order = depthFirst(p, m, v);
  const list = (r) => alternate(onRank(r, p, v, order, B), 2 * (p - r - 1) + (v - 1) * p);
  return schedule(range(p).map(list), p * v, m);
}

function breadthFirst(p, m, v) {
  const order = [...range(v).map((c) => [F, c]), ...range(v).reverse().map((c) => [B, c])];
  const list = (r) => order.flatMap(([kind, c]) => range(m).map((i) => kind(c * p + r, i)));
  return schedule(range(p).map(list), p * v, m);
}

// ---- zero bubble (schedules/zero_bubble.py) ----

// `ahead` forwards; then F, I and the W of the I `wait` places back, in turn; then the other W.
function delayed([forwards, backwards], ahead, wait) {
  const own = forwards.slice(0, ahead);
  const weights = backwards.map(([, stage, i]) => W(stage, i));
  backwards.forEach((backward, k) => {
    own.push(...forwards.slice(ahead + k, ahead + k + 1), backward, ...(k >= wait ? [weights[k - wait]] : []));
  });
  return own.concat(weights.slice(Math.max(0, weights.length - wait)));
}

function inALine(p, m, steps) {
  const order = range(m).map((i) => [0, i]);
  const list = (r) => delayed(onRank(r, p, 1, order, I), steps * (p - r - 1), steps * r);
  return schedule(range(p).map(list), p, m);
}

const zbH1 = (p, m) => inALine(p, m, 1);
const zbH2 = (p, m) => inALine(p, m, 2);

function zbInterleaved(p, m, v) {
  const list = (r) => delayed(onRank(r, p, v, depthFirst(p, m, v), I), v * p - r - 1, r);
  return schedule(range(p).map(list), p * v, m);
}

// V shapes: rank r has the stages r and 2p-1-r. When it begins F of both, and I of the later and the earlier, for
// microbatch 0; every other does the same 6 units after the one before.
const BLOCKS = {
  v_min: (p) => (r) => [r, 2 * p - 1 - r, 2 * p + r + (p % 3 ? 0 : 2), 4 * p - 1 - r + (p % 3 ? 0 : 2)],
  v_half: (p) => (r) => [2 * r, 3 * p - 2 - r, 3 * p - 1 + 2 * r + (p % 2 ? 0 : 3), 6 * p - 2 - r + (p % 2 ? 0 : 3)],
  zb_v: (p) => (r) => [4 * r, 6 * p - 5 - 2 * r, 6 * p - 4 + 4 * r, 12 * p - 9 - 2 * r],
};

// That order, each action of one unit as soon as it can be; W where a rank would wait, or holds `limit`. `early`: a
// rank that waits before its first backward runs forwards of its early stage ahead.
function squeezed(p, m, block, limit, early = false) {
  const order = range(p).map((r) => {
    const own = [[F, r], [F, 2 * p - 1 - r], [I, 2 * p - 1 - r], [I, r]];
    const starts = own.flatMap(([kind, stage], j) => range(m).map((i) => [block(r)[j] + 6 * i, kind(stage, i)]));
    return starts.sort(([a], [b]) => a - b).map(([, one]) => one);
  });
  const [ranks, later, ended] = [order.map(() => []), order.map(() => []), new Map()];
  const [held, begun] = [Array(p).fill(0), Array(p).fill(false)];
  const can = (now) => ([kind, stage, i]) => {
    const needs = kind === "F" ? (stage ? [at("F", stage - 1, i)] : []) : [at("F", stage, i)];
    if (kind === "I" && stage < 2 * p - 1) needs.push(at("I", stage + 1, i));
    return needs.every((need) => ended.get(need) <= now);
  };
  const choose = (r, now) => {
    const [first] = order[r];
    if (first && can(now)(first) && (first[0] === "I" || held[r] < limit)) return first;
    if (later[r].length) return later[r][0];
    if (!early || begun[r] || held[r] + 2 > limit) return undefined; // room stays for the one whose turn it is
    return order[r].filter(([kind, stage]) => kind === "F" && stage < p).slice(0, 1).find(can(now));
  };
  for (let [now, going] = [0, true]; going; now++) {
    going = false;
    for (let r = 0; r < p; r++) {
      const one = choose(r, now);
      if (!one) continue;
      const [kind, stage, i] = one;
      const from = kind === "W" ? later[r] : order[r];
      from.splice(from.indexOf(one), 1);
      held[r] += { F: 1, I: 0, W: -1 }[kind];
      if (kind === "I") later[r].push(W(stage, i));
      begun[r] ||= kind === "I";
      ended.set(at(...one), now + 1);
      ranks[r].push(one);
      going = true;
    }
  }
  return schedule(ranks, 2 * p, m);
}

const vMin = (p, m) => squeezed(p, m, BLOCKS.v_min(p), 2 * Math.floor((p + 4) / 3));
const vHalf = (p, m) => squeezed(p, m, BLOCKS.v_half(p), 2 * Math.floor((p + 2) / 2));
const zbV = (p, m) => squeezed(p, m, BLOCKS.zb_v(p), 2 * p, true);

// ---- both directions (schedules/bidirectional.py) ----

// What begins in slot b runs stage s of S forward in slot b + s, backward in b + 2S - 1 - s.
function inSlots(p, stages, m, rank, begin) {
  const slots = range(p).map(() => []);
  for (let i = 0; i < m; i++) {
    for (let s = 0; s < stages; s++) {
      slots[rank(s, i)].push([begin(i) + s, F(s, i)], [begin(i) + 2 * stages - 1 - s, B(s, i)]);
    }
  }
  const before = ([slot, [kind, s, i]], [other, [k, t, j]]) =>
    slot - other || (kind < k ? -1 : kind > k ? 1 : s - t || i - j);
  return slots.map((own) => own.sort(before).map(([, one]) => one));
}

function chimera(p, m) {
  const rank = (stage, i) => (i % 2 ? p - 1 - stage : stage);
  const begin = (i) => 2 * p * Math.floor(i / p) + 2 * Math.floor((i % p) / 2);
  return schedule(inSlots(p, p, m, rank, begin), p, m);
}

function hanayo(p, m, waves) {
  const stages = 2 * waves * p;
  const rank = (stage) => (Math.floor(stage / p) % 2 ? p - 1 - (stage % p) : stage % p);
  const begin = (i) => 2 * stages * Math.floor(i / p) + 2 * (i % p);
  return schedule(inSlots(p, stages, m, rank, begin), stages, m);
}

// The list of the rank with the stages h and P-1-h, in eight steps; `early`, `late`: the microbatches of each.
function steps(stages, h, early, late) {
  const [a, list] = [stages / 2 - 1 - h, []];
  const taker = (kind, stage, microbatches) => () => kind(stage, microbatches.shift());
  const [f0, b0] = [F, B].map((kind) => taker(kind, h, [...early]));
  const [f1, b1] = [F, B].map((kind) => taker(kind, stages - 1 - h, [...late]));
  const times = (n, body) => range(Math.max(0, n)).forEach(body);
  const split = ([, stage, i]) => [I(stage, i), W(stage, i)];
  times(2 * a, () => list.push(f0()));
  times(h + 1, () => list.push(f0(), f1()));
  times(a, () => list.push(...split(b1()), f1()));
  times(early.length - stages + h + 1, (turn) => {
    const both = [f0(), b1()];
    list.push(...(turn === 0 && a === 0 ? both : [both]), [f1(), b0()]);
  });
  times(a, () => list.push(b1(), [f1(), b0()]));
  const later = [];
  times(2 * (h + 1), (k) => {
    const backward = (k % 2 ? b0 : b1)();
    const [input, weights] = split(backward);
    if (k > h) later.push(weights);
    list.push(k > h ? input : backward);
  });
  times(a, () => {
    const [input, weights] = split(b0());
    list.push(later.shift(), input);
    later.push(weights);
  });
  return list.concat(later);
}

function dualpipe(p, m) {
  const down = range(m / 2);
  const up = down.map((i) => i + m / 2);
  const list = (r) => (r < p / 2 ? steps(p, r, down, up) : steps(p, p - 1 - r, up, down));
  return schedule(range(p).map(list), p, m);
}

const dualpipeV = (p, m) => schedule(range(p).map((r) => steps(2 * p, r, range(m), range(m))), 2 * p, m);

// ---- by name; `chunks`: has v stages on a rank, or v waves; `ok` says what else must hold ----

const multiple = (p, m) => m % p === 0 || `m = ${m} is not a multiple of p = ${p}`;
const even = (p, m) => (p % 2 === 0 && m % 2 === 0) || `p = ${p} and m = ${m} must both be even`;
const enough = (p, m) => m >= 2 * p || `m = ${m} is less than 2p = ${2 * p}`;
const both = (p, m) => (even(p, m) === true ? enough(p, m) : even(p, m));
const SCHEDULES = {
  gpipe: { title: "GPipe", make: gpipe },
  "1f1b": { title: "1F1B", make: oneFOneB },
  interleaved: { title: "Interleaved 1F1B", make: interleaved, chunks: true, ok: multiple },
  breadth_first: { title: "Breadth-first", make: breadthFirst, chunks: true },
  zb_h1: { title: "ZB-H1", make: zbH1 },
  zb_h2: { title: "ZB-H2", make: zbH2 },
  zb_interleaved: { title: "Interleaved zero bubble", make: zbInterleaved, chunks: true, ok: multiple },
  v_min: { title: "V-Min", make: vMin },
  v_half: { title: "V-Half", make: vHalf },
  zb_v: { title: "ZB-V", make: zbV },
  chimera: { title: "Chimera", make: chimera, ok: even },
  hanayo: { title: "Hanayo (v waves)", make: hanayo, chunks: true },
  dualpipe: { title: "DualPipe", make: dualpipe, ok: both },
  dualpipe_v: { title: "DualPipeV", make: dualpipeV, ok: enough },
};

// ---- what an action waits for, and when it runs (schedule.py, simulate.py) ----

// Spans [entry, start, end] of each rank. `costs`: F, I, W of one stage, and `send` between two ranks.
function simulate({ ranks, stages }, costs) {
  const time = { F: costs.F, B: costs.I + costs.W, I: costs.I, W: costs.W };
  const place = new Map(); // of each action: its rank
  ranks.forEach((list, rank) => list.forEach((e) => parts(e).forEach((a) => place.set(at(...a), rank))));
  const backward = (stage, i) => (place.has(at("I", stage, i)) ? at("I", stage, i) : at("B", stage, i));
  const needs = ([kind, stage, i]) => {
    if (kind === "W") return [at("I", stage, i)];
    if (kind === "F") return stage ? [at("F", stage - 1, i)] : [];
    return [at("F", stage, i), ...(stage < stages - 1 ? [backward(stage + 1, i)] : [])];
  };
  const ended = new Map();
  const spans = ranks.map(() => []);
  for (let moved = true; moved; ) {
    moved = false;
    ranks.forEach((list, rank) => {
      for (let own = spans[rank]; own.length < list.length; moved = true) {
        const actions = parts(list[own.length]);
        const mine = new Set(actions.map((a) => at(...a)));
        const before = actions.flatMap(needs).filter((need) => !mine.has(need));
        if (!before.every((need) => ended.has(need))) return;
        const ready = before.map((need) => ended.get(need) + (place.get(need) === rank ? 0 : costs.send));
        const start = Math.max(own.length ? own.at(-1)[2] : 0, ...ready);
        const end = start + actions.reduce((sum, [kind]) => sum + time[kind], 0);
        own.push([list[own.length], start, end]);
        mine.forEach((name) => ended.set(name, end));
      }
    });
  }
  if (spans.some((own, rank) => own.length < ranks[rank].length)) throw Error("this schedule gets stuck");
  return spans;
}

// The most activations a rank ever holds, of one stage and one microbatch; one counts whole until its W.
function peak(list) {
  const holds = { F: 1, B: -1, I: 0, W: -1 };
  let [now, most] = [0, 0];
  for (const entry of list) {
    for (const [kind] of parts(entry)) most = Math.max(most, (now += holds[kind]));
  }
  return most;
}

// All that the page shows. `setting`: name, p, m, v, and costs F, I, W of a rank's whole share of the model, and of
// a message, in whole units. Inside, 1/share is the unit, so that with several stages on a rank times stay whole.
function explore({ name, p, m, v, F: forward, I: input, W: weights, send }) {
  const { make, chunks, ok } = SCHEDULES[name];
  const fits = ok ? ok(p, m) : true;
  if (fits !== true) return { error: `${SCHEDULES[name].title}: ${fits}` };
  const made = chunks ? make(p, m, v) : make(p, m);
  const share = made.stages / p; // stages that make up a rank's share of the model
  const spans = simulate(made, { F: forward, I: input, W: weights, send: send * share });
  const makespan = Math.max(...spans.map((own) => own.at(-1)[2]));
  const busy = spans.map((own) => own.reduce((sum, [, start, end]) => sum + end - start, 0));
  const idle = busy.reduce((sum, time) => sum + makespan - time, 0);
  const bubble = makespan ? idle / (p * makespan) : 0;
  return { made, share, spans, makespan: makespan / share, bubble, peaks: made.ranks.map(peak) };
}
