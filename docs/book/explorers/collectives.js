// Collectives as data, step by step: minitrain/systems/communication in JavaScript.
//
// A schedule is { ranks, chunks, steps }; a step is a list of transfers [source, to, first, last, reduce]: chunks
// first..last-1, which the receiver adds (reduce) or copies. All read what was there before their step.

const range = (n) => [...Array(n).keys()];
const mod = (a, n) => ((a % n) + n) % n;
const bits = (n) => range(n > 1 ? 32 - Math.clz32(n - 1) : 0).map((s) => 1 << s); // 1, 2, 4, .. below n
const powerBelow = (n) => 1 << (31 - Math.clz32(n));
const then = (first, ...rest) => ({ ...first, steps: [first, ...rest].flatMap(({ steps }) => steps) });

// What was gathered by adding is returned by copying, last step first, all arrows turned round.
function mirror({ ranks, chunks, steps }) {
  const back = (step) => step.map(([source, to, first, last]) => [to, source, first, last, false]);
  return { ranks, chunks, steps: [...steps].reverse().map(back) };
}

// ---- algorithms.py ----

function ring(n, first, reduce) {
  const transfer = (s) => (r) => [r, (r + 1) % n, mod(r + first - s, n), mod(r + first - s, n) + 1, reduce];
  return { ranks: n, chunks: n, steps: range(n - 1).map((s) => range(n).map(transfer(s))) };
}

const ringReduceScatter = (n) => ring(n, -1, true);
const ringAllGather = (n) => ring(n, 0, false);
const ringAllReduce = (n) => then(ringReduceScatter(n), ringAllGather(n));

function directReduceScatter(n) {
  const pairs = range(n - 1).flatMap((d) => range(n).map((r) => [r, (r + d + 1) % n]));
  const step = pairs.map(([r, owner]) => [r, owner, owner, owner + 1, true]);
  return { ranks: n, chunks: n, steps: n > 1 ? [step] : [] };
}

const directAllReduce = (n) => then(directReduceScatter(n), mirror(directReduceScatter(n)));

function binomialReduce(n) {
  const senders = (bit) => range(n).filter((r) => r % (2 * bit) === bit);
  return { ranks: n, chunks: 1, steps: bits(n).map((bit) => senders(bit).map((r) => [r, r - bit, 0, 1, true])) };
}

const binomialAllReduce = (n) => then(binomialReduce(n), mirror(binomialReduce(n)));

// In each exchange a rank keeps the half with its chunk.
function halvingReduceScatter(n, nearFirst) {
  const windows = range(n).map(() => [0, n]); // of each rank: the chunks it still gathers
  const steps = (nearFirst ? bits(n) : bits(n).reverse()).map((bit) =>
    windows.map(([first, last], rank) => {
      const middle = (first + last) / 2;
      const [lower, upper] = [[first, middle], [middle, last]];
      const [keep, give] = rank & bit ? [upper, lower] : [lower, upper];
      windows[rank] = keep;
      return [rank, rank ^ bit, ...give, true];
    }),
  );
  return { ranks: n, chunks: n, steps };
}

function halvingDoublingAllReduce(n) {
  const half = halvingReduceScatter(powerBelow(n), true);
  return withTheRest(n, then(half, mirror(half)));
}

function doublingAllReduce(n) {
  const power = powerBelow(n);
  const step = (bit) => range(power).map((r) => [r, r ^ bit, 0, 1, true]);
  return withTheRest(n, { ranks: power, chunks: 1, steps: bits(power).map(step) });
}

// A schedule for a power of two made to serve n ranks: of the first 2 · rest the odd ones step aside.
function withTheRest(n, inner) {
  const rest = n - inner.ranks;
  if (!rest) return inner;
  const aside = range(rest).map((i) => [2 * i + 1, 2 * i, 0, inner.chunks, true]);
  const fold = { ranks: n, chunks: inner.chunks, steps: [aside] };
  const staying = [...range(rest).map((i) => 2 * i), ...range(n - 2 * rest).map((i) => 2 * rest + i)];
  return then(fold, place(inner, staying, 0, n, inner.chunks), mirror(fold));
}

// The schedule as part of a larger one: rank i becomes ranks[i], chunk c becomes shift + c.
function place({ steps }, ranks, shift, n, chunks) {
  const moved = ([source, to, first, last, reduce]) => [ranks[source], ranks[to], shift + first, shift + last, reduce];
  return { ranks: n, chunks, steps: steps.map((step) => step.map(moved)) };
}

// Of each rank its parent: to find it, move the lowest set bit up by one; odd positions are leaves.
function binaryTree(n) {
  const parent = (position) => {
    const lowest = position & -position;
    const without = position - lowest;
    const up = without | (2 * lowest);
    return up < n ? up : without;
  };
  return range(n).map((position) => (position ? parent(position) : null));
}

// The second tree makes the leaves of the first its inner ranks: mirrored if n is even, else shifted.
function doubleBinaryTree(n) {
  const first = binaryTree(n);
  const rankAt = (position) => (n % 2 ? (position + 1) % n : n - 1 - position);
  const second = Array(n).fill(null);
  first.forEach((parent, position) => (second[rankAt(position)] = parent === null ? null : rankAt(parent)));
  return [first, second];
}

// Towards the root, a piece per step: a rank starts when its slowest child's first piece has arrived.
function treeReduce(tree, pieces) {
  const hops = (rank) => (tree[rank] === null ? 0 : 1 + hops(tree[rank]));
  const order = range(tree.length).sort((a, b) => hops(b) - hops(a));
  const start = tree.map(() => 0);
  for (const rank of order) {
    if (tree[rank] !== null) start[tree[rank]] = Math.max(start[tree[rank]], start[rank] + 1);
  }
  const steps = tree.length > 1 ? range(Math.max(...start) - 1 + pieces).map(() => []) : [];
  tree.forEach((parent, rank) => {
    for (let piece = 0; parent !== null && piece < pieces; piece++) {
      steps[start[rank] + piece].push([rank, parent, piece, piece + 1, true]);
    }
  });
  return { ranks: tree.length, chunks: pieces, steps };
}

function doubleTreeAllReduce(n, pieces) {
  const halves = doubleBinaryTree(n).map((tree, half) => {
    const up = treeReduce(tree, pieces);
    return place(then(up, mirror(up)), range(n), half * pieces, n, 2 * pieces).steps;
  });
  const length = Math.max(...halves.map((steps) => steps.length));
  return { ranks: n, chunks: 2 * pieces, steps: range(length).map((i) => halves.flatMap((steps) => steps[i] ?? [])) };
}

const ALGORITHMS = {
  ring: { title: "All-reduce, ring", make: ringAllReduce },
  direct: { title: "All-reduce, direct exchange", make: directAllReduce },
  halving: { title: "All-reduce, halving and doubling", make: halvingDoublingAllReduce },
  doubling: { title: "All-reduce, recursive doubling", make: doublingAllReduce },
  binomial: { title: "All-reduce, binomial tree", make: binomialAllReduce },
  double_tree: { title: "All-reduce, double binary tree", make: doubleTreeAllReduce, pieces: true },
  ring_reduce_scatter: { title: "Reduce-scatter, ring", make: ringReduceScatter },
  direct_reduce_scatter: { title: "Reduce-scatter, direct exchange", make: directReduceScatter },
  ring_all_gather: { title: "All-gather, ring", make: ringAllGather, gathers: true },
  binomial_reduce: { title: "Reduce to rank 0, binomial tree", make: binomialReduce },
};

// ---- chunk_schedule.py: whose contributions are in every chunk of every rank, one bit per rank ----

// Frames [rank][chunk], before the first step and after each; `gathers`: a chunk begins with its owner, finished.
function replay({ ranks, chunks, steps }, gathers) {
  const everyone = 2 ** ranks - 1;
  const start = (rank, chunk) =>
    gathers ? (rank === Math.floor((chunk * ranks) / chunks) ? everyone : 0) : 1 << rank;
  let now = range(ranks).map((rank) => range(chunks).map((chunk) => start(rank, chunk)));
  const frames = [now];
  for (const step of steps) {
    const after = now.map((row) => [...row]);
    for (const [source, to, first, last, reduce] of step) {
      for (let chunk = first; chunk < last; chunk++) {
        after[to][chunk] = reduce ? after[to][chunk] | now[source][chunk] : now[source][chunk];
      }
    }
    frames.push((now = after));
  }
  return frames;
}

const members = (held) => range(31).filter((rank) => (held >> rank) & 1);

// Bytes that each rank sends of a tensor of `size`, cut into chunks as equal as they can be.
function sentBytes({ ranks, chunks, steps }, size) {
  const [whole, longer] = [Math.floor(size / chunks), size % chunks];
  const begins = (chunk) => chunk * whole + Math.min(chunk, longer);
  const sent = Array(ranks).fill(0);
  for (const [source, , first, last] of steps.flat()) sent[source] += begins(last) - begins(first);
  return sent;
}

// Seconds, if every rank has one port out and one in: the fullest port of each step, and alpha (cost_model.py).
function seconds({ ranks, chunks, steps }, size, alpha, rate) {
  return steps.reduce((total, step) => {
    const ports = Array(2 * ranks).fill(0);
    for (const [source, to, first, last] of step) {
      const busy = (size * (last - first)) / chunks / rate;
      ports[source] += busy;
      ports[ranks + to] += busy;
    }
    return total + alpha + Math.max(...ports);
  }, 0);
}

// All that the page shows: size in bytes, alpha in seconds, rate in bytes per second.
function explore({ name, n, pieces, size, alpha, rate }) {
  const { make, gathers } = ALGORITHMS[name];
  const made = make(n, pieces);
  const sent = sentBytes(made, size);
  return { made, frames: replay(made, gathers), sent, seconds: seconds(made, size, alpha, rate) };
}
