// A fat tree of k-port switches under ECMP and packet spraying: minitrain/systems/network in JavaScript.
//
// A node's name is what Python prints of it, "(0, 1, 0)" or "('edge', 0, 1)", as that is what switches hash. A link
// is "from to"; a cable is two links, of one unit per second each.

const range = (n) => [...Array(n).keys()];
const host = (pod, edge, i) => `(${pod}, ${edge}, ${i})`;
const node = (kind, a, b) => `('${kind}', ${a}, ${b})`;

// k^3/4 hosts in the order of their ranks: [pod, edge switch, place].
function hosts(k) {
  const half = k / 2;
  return range(k * half * half).map((r) => [Math.floor(r / (half * half)), Math.floor(r / half) % half, r % half]);
}

// ---- routes (graph.py): {link: share of the flow's bytes} ----

// One shortest path: every switch hashes source, target and flow. Not `salted`, all of them have the same hash.
function ecmp(k, from, to, flow, salted) {
  const [source, target] = [host(...from), host(...to)];
  const choose = (at) => hashed(`(${source}, ${target}, ${flow}, ${salted ? at : 0})`) % (k / 2);
  const path = [source, node("edge", from[0], from[1])];
  if (from[0] !== to[0] || from[1] !== to[1]) {
    const agg = choose(path[1]);
    path.push(node("agg", from[0], agg));
    if (from[0] !== to[0]) path.push(node("core", agg, choose(path[2])), node("agg", to[0], agg));
    path.push(node("edge", to[0], to[1]));
  }
  path.push(target);
  return Object.fromEntries(path.slice(1).map((next, i) => [`${path[i]} ${next}`, 1]));
}

// All shortest paths, divided evenly at every switch.
function spray(k, from, to) {
  const shares = {};
  const edges = [from, to].map(([pod, edge]) => node("edge", pod, edge));
  shares[`${host(...from)} ${edges[0]}`] = shares[`${edges[1]} ${host(...to)}`] = 1;
  for (let agg = 0; edges[0] !== edges[1] && agg < k / 2; agg++) {
    const [up, down] = [from, to].map(([pod]) => node("agg", pod, agg));
    shares[`${edges[0]} ${up}`] = shares[`${down} ${edges[1]}`] = 2 / k;
    for (let c = 0; up !== down && c < k / 2; c++) {
      const core = node("core", agg, c);
      shares[`${up} ${core}`] = shares[`${core} ${down}`] = (2 / k) ** 2;
    }
  }
  return shares;
}

// ---- traffic: [source, target] of every host ----

// Each host sends to one other, each receives from one other, drawn as Python's random.Random(seed) does.
function permutation(all, seed) {
  const [draw, targets] = [mersenne(seed), range(all.length)];
  const below = (n) => {
    const width = 32 - Math.clz32(n);
    let found = n;
    while (found >= n) found = draw() >>> (32 - width);
    return found;
  };
  while (targets.some((target, source) => target === source)) {
    for (let i = targets.length - 1; i > 0; i--) {
      const j = below(i + 1);
      [targets[i], targets[j]] = [targets[j], targets[i]];
    }
  }
  return all.map((source, i) => [source, all[targets[i]]]);
}

const shifted = (all, by) => all.map((source, i) => [source, all[(i + by) % all.length]]);

// All that the page shows. Every flow has one unit, in `parts` with hashes of their own.
function explore({ k, traffic, shift, seed, route, parts }) {
  const all = hosts(k);
  const pairs = traffic === "shift" ? shifted(all, shift) : permutation(all, seed);
  const pieces = route === "spray" ? 1 : parts;
  const loads = {};
  const flows = pairs.map(([from, to]) => {
    const own = {}; // link -> share of this flow
    for (let part = 0; part < pieces; part++) {
      const path = route === "spray" ? spray(k, from, to) : ecmp(k, from, to, seed * pieces + part, route === "ecmp");
      for (const [link, share] of Object.entries(path)) own[link] = (own[link] ?? 0) + share / pieces;
    }
    for (const [link, share] of Object.entries(own)) loads[link] = (loads[link] ?? 0) + share;
    return own;
  });
  // A flow is as slow as the fullest of its links.
  const times = flows.map((own) => Math.max(...Object.keys(own).map((link) => loads[link])));
  return { all, pairs, loads, times };
}

// ---- what Python hashes and draws ----

// The first 32 bits of BLAKE2b with a digest of 4 bytes, of a text below 128 characters (RFC 7693). A word of 64 bits
// is two of 32, the low one first.
const START = [
  0xf3bcc908, 0x6a09e667, 0x84caa73b, 0xbb67ae85, 0xfe94f82b, 0x3c6ef372, 0x5f1d36f1, 0xa54ff53a,
  0xade682d1, 0x510e527f, 0x2b3e6c1f, 0x9b05688c, 0xfb41bd6b, 0x1f83d9ab, 0x137e2179, 0x5be0cd19,
];
const ORDER = [
  "0123456789abcdef", "ea489fd61c02b753", "b8c052fdae367194", "7931dcbe265a40f8", "905724afe1bc683d",
  "2c6a0b834d75fe19", "c51fed4a0763928b", "db7ec13950f4862a", "6fe9b308c2d714a5", "a2847615fb9e3cd0",
].map((row) => [...row].map((digit) => parseInt(digit, 16)));

function hashed(text) {
  const message = new Uint32Array(32);
  for (let i = 0; i < text.length; i++) message[i >> 2] |= text.charCodeAt(i) << (8 * (i & 3));
  const first = START[0] ^ 0x01010000 ^ 4;
  const v = Uint32Array.from([first, ...START.slice(1), ...START]);
  v[24] ^= text.length;
  v[28] = ~v[28];
  v[29] = ~v[29];
  const add = (a, low, high) => {
    const sum = v[a] + low;
    v[a] = sum;
    v[a + 1] += high + (sum > 0xffffffff);
  };
  const turn = (a, b, by) => { // v[a] ^= v[b], turned right by so many bits
    let [low, high] = [v[a] ^ v[b], v[a + 1] ^ v[b + 1]];
    if (by >= 32) [low, high, by] = [high, low, by - 32];
    v[a] = by ? (low >>> by) | (high << (32 - by)) : low;
    v[a + 1] = by ? (high >>> by) | (low << (32 - by)) : high;
  };
  const mix = (a, b, c, d, x, y) => {
    for (const [word, first, second] of [[x, 32, 24], [y, 16, 63]]) {
      add(a, v[b], v[b + 1]);
      add(a, message[2 * word], message[2 * word + 1]);
      turn(d, a, first);
      add(c, v[d], v[d + 1]);
      turn(b, c, second);
    }
  };
  for (let round = 0; round < 12; round++) {
    const words = ORDER[round % 10];
    for (let i = 0; i < 4; i++) mix(2 * i, 8 + 2 * i, 16 + 2 * i, 24 + 2 * i, words[2 * i], words[2 * i + 1]);
    for (let i = 0; i < 4; i++) {
      const [b, c, d] = [1, 2, 3].map((shift) => 8 * shift + 2 * ((i + shift) % 4));
      mix(2 * i, b, c, d, words[8 + 2 * i], words[9 + 2 * i]);
    }
  }
  const low = first ^ v[0] ^ v[16];
  return ((low << 24) | ((low & 0xff00) << 8) | ((low >>> 8) & 0xff00) | (low >>> 24)) >>> 0;
}

// Numbers of 32 bits as Python's random.Random(seed) draws them: MT19937, seeded by an array of one word.
function mersenne(seed) {
  const state = new Uint32Array(624);
  const scrambled = (i) => state[i] ^ (state[i] >>> 30);
  state[0] = 19650218;
  for (let i = 1; i < 624; i++) state[i] = Math.imul(1812433253, scrambled(i - 1)) + i;
  for (let k = 0, i = 1; k < 624; k++) {
    state[i] = (state[i] ^ Math.imul(scrambled(i - 1), 1664525)) + seed;
    if (++i === 624) [state[0], i] = [state[623], 1];
  }
  for (let k = 0, i = 2; k < 623; k++) {
    state[i] = (state[i] ^ Math.imul(scrambled(i - 1), 1566083941)) - i;
    if (++i === 624) [state[0], i] = [state[623], 1];
  }
  state[0] = 0x80000000;
  let at = 624;
  return () => {
    if (at === 624) {
      for (at = 0; at < 624; at++) {
        const y = (state[at] & 0x80000000) | (state[(at + 1) % 624] & 0x7fffffff);
        state[at] = state[(at + 397) % 624] ^ (y >>> 1) ^ (y & 1 ? 0x9908b0df : 0);
      }
      at = 0;
    }
    let y = state[at++];
    y ^= y >>> 11;
    y ^= (y << 7) & 0x9d2c5680;
    y ^= (y << 15) & 0xefc60000;
    return (y ^ (y >>> 18)) >>> 0;
  };
}
