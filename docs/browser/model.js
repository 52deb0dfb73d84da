/**
 * A Transformer of two stacks in plain JavaScript, for one spec: width 64, 4 heads, 2 and 2 layers, norms in front of
 * each sub-layer, rotary positions, ReLU. Numbers are computed in double precision from the float32 weights.
 *
 * A matrix is a list of rows, one for each token. An address such as "decoder.memory.1.3" is that of a head: its
 * attention, its layer and its number.
 */

const HEADS = 4;
const THETA = 10000;
const EPSILON = 1e-5;
export const PAD = 0;
export const UNKNOWN = 1;
export const START = 2;
export const END = 3;

/** @typedef {Float64Array[]} Matrix */
/** @typedef {{ queries: Matrix[], keys: Matrix[], weights: Matrix[] }} AttentionMap each by head */
/** @typedef {Record<string, AttentionMap[]>} Maps by the name of the attention, each by layer */

/** The weights by their names, as they stand in the file: rows of outputs, as nn.Linear has them. */
export class Weights {
  /**
   * @param {{ name: string, shape: number[], start: number }[]} index
   * @param {ArrayBuffer} buffer of little-endian float32
   */
  constructor(index, buffer) {
    /** @type {Map<string, { rows: number, columns: number, data: Float32Array }>} */
    this.arrays = new Map();
    for (const { name, shape, start } of index) {
      const [rows, columns] = shape.length === 2 ? shape : [1, shape[0]];
      this.arrays.set(name, { rows, columns, data: new Float32Array(buffer, 4 * start, rows * columns) });
    }
  }

  /** @param {string} name */
  get(name) {
    const found = this.arrays.get(name);
    if (!found) throw new Error(`no weights ${name}`);
    return found;
  }
}

/**
 * x Wᵀ + b, row by row.
 * @param {Weights} weights
 * @param {string} name of the weight and, with another ending, of the bias
 * @param {Matrix} x
 * @returns {Matrix}
 */
function linear(weights, name, x) {
  const { rows, columns, data } = weights.get(`${name}.weight`);
  const bias = weights.arrays.get(`${name}.bias`)?.data;
  return x.map((row) => Float64Array.from({ length: rows }, (_, output) => {
    let sum = bias ? bias[output] : 0;
    for (let input = 0, at = output * columns; input < columns; input++, at++) sum += row[input] * data[at];
    return sum;
  }));
}

/**
 * (x - mean) / √(variance + ε) · weight + bias.
 * @param {Weights} weights
 * @param {string} name
 * @param {Matrix} x
 * @returns {Matrix}
 */
function norm(weights, name, x) {
  const [weight, bias] = [weights.get(`${name}.weight`).data, weights.get(`${name}.bias`).data];
  return x.map((row) => {
    const mean = row.reduce((sum, value) => sum + value, 0) / row.length;
    const variance = row.reduce((sum, value) => sum + (value - mean) ** 2, 0) / row.length;
    const scale = 1 / Math.sqrt(variance + EPSILON);
    return row.map((value, place) => (value - mean) * scale * weight[place] + bias[place]);
  });
}

/**
 * @param {Matrix} x
 * @param {Matrix} y
 * @returns {Matrix}
 */
function sum(x, y) {
  return x.map((row, token) => row.map((value, place) => value + y[token][place]));
}

/**
 * Turn each pair (i, i + half) of a head by the token's position times θ^(-2i/size).
 * @param {Float64Array} row of one head
 * @param {number} position
 */
function rotate(row, position) {
  const half = row.length / 2;
  return row.map((value, place) => {
    const pair = place % half;
    const angle = Math.fround(position * Math.fround(1 / Math.fround(THETA ** (pair / half))));
    const [cos, sin] = [Math.cos(angle), Math.sin(angle)];
    return place < half ? value * cos - row[place + half] * sin : value * cos + row[place - half] * sin;
  });
}

/** @param {Float64Array} scores @returns {Float64Array} */
export function softmax(scores) {
  const largest = scores.reduce((one, other) => Math.max(one, other));
  const powers = scores.map((score) => Math.exp(score - largest));
  const total = powers.reduce((one, other) => one + other);
  return powers.map((power) => power / total);
}

/**
 * @param {Float64Array} one
 * @param {Float64Array} other
 */
function dot(one, other) {
  return one.reduce((total, value, place) => total + value * other[place], 0);
}

/** What one run computes: its heads that are switched off, and what each attention looked at. */
class Run {
  /**
   * @param {Weights} weights
   * @param {Set<string>} off addresses of heads that add nothing
   */
  constructor(weights, off) {
    this.weights = weights;
    this.off = off;
    /** @type {Maps} */
    this.maps = {};
  }

  /**
   * softmax(q kᵀ / √size) v of each head, side by side, then the output projection.
   * @param {string} part address of the weights
   * @param {string} name "encoder.self", "decoder.self" or "decoder.memory"
   * @param {number} layer
   * @param {Matrix} x what asks
   * @param {Matrix} memory what is read
   * @returns {Matrix}
   */
  attention(part, name, layer, x, memory) {
    const [queries, keys, values] = [["query", x], ["key", memory], ["value", memory]]
      .map(([weight, from]) => linear(this.weights, `${part}.${weight}`, /** @type {Matrix} */ (from)));
    const size = queries[0].length / HEADS;
    const isRotary = name !== "decoder.memory";
    const isCausal = name === "decoder.self";
    /** @type {AttentionMap} */
    const map = { queries: [], keys: [], weights: [] };
    const mixed = x.map(() => new Float64Array(size * HEADS));
    for (let head = 0; head < HEADS; head++) {
      const own = (/** @type {Matrix} */ rows, turns = false) => rows.map((row, position) => {
        const slice = row.slice(head * size, (head + 1) * size);
        return turns ? rotate(slice, position) : slice;
      });
      const [q, k, v] = [own(queries, isRotary), own(keys, isRotary), own(values)];
      const shares = q.map((query, at) => {
        const seen = isCausal ? k.slice(0, at + 1) : k;
        const scores = Float64Array.from(seen, (key) => dot(query, key) / Math.sqrt(size));
        const known = softmax(scores);
        return Float64Array.from(k, (_, key) => known[key] ?? 0);
      });
      if (!this.off.has(`${name}.${layer}.${head}`)) {
        shares.forEach((row, query) => row.forEach((share, key) => {
          for (let place = 0; place < size; place++) mixed[query][head * size + place] += share * v[key][place];
        }));
      }
      map.queries.push(q);
      map.keys.push(k);
      map.weights.push(shares);
    }
    (this.maps[name] ??= [])[layer] = map;
    return linear(this.weights, `${part}.out`, mixed);
  }

  /**
   * Embeddings, then the layers, each sub-layer of its normed input and added to what it read; then the last norm.
   * @param {"encoder" | "decoder"} stack
   * @param {number[]} ids
   * @param {Matrix | null} memory what the encoder returned
   * @returns {Matrix}
   */
  stack(stack, ids, memory) {
    const { columns, data } = this.weights.get(`${stack}.embedding.table.weight`);
    /** @type {Matrix} */
    let x = ids.map((id) => Float64Array.from(data.subarray(id * columns, (id + 1) * columns), (value) => value * Math.sqrt(columns)));
    for (let layer = 0; this.weights.arrays.has(`${stack}.layers.${layer}.steps.0.branches.0.pre.weight`); layer++) {
      const at = (/** @type {number} */ step) => `${stack}.layers.${layer}.steps.${step}.branches.0`;
      const normed = norm(this.weights, `${at(0)}.pre`, x);
      x = sum(x, this.attention(`${at(0)}.function`, `${stack}.self`, layer, normed, normed));
      let last = 1;
      if (memory) {
        x = sum(x, this.attention(`${at(1)}.function`, "decoder.memory", layer, norm(this.weights, `${at(1)}.pre`, x), memory));
        last = 2;
      }
      const hidden = linear(this.weights, `${at(last)}.function.up`, norm(this.weights, `${at(last)}.pre`, x));
      x = sum(x, linear(this.weights, `${at(last)}.function.down`, hidden.map((row) => row.map((value) => Math.max(0, value)))));
    }
    return norm(this.weights, `${stack}.final_norm`, x);
  }
}

/**
 * A token that the search considered; see beams.js.
 * @typedef {import("./types.js").BeamNode} BeamNode
 */
/** @typedef {{ ids: number[], sum: number, node: number }} Hypothesis ids with the start, and the node of its last token */
/** @typedef {{ ids: number[], score: number, node: number }} Finished */

export class Translator {
  /**
   * @param {Weights} weights
   * @param {string[]} source the characters of its vocabulary, by id
   * @param {string[]} target
   */
  constructor(weights, source, target) {
    this.weights = weights;
    this.source = new Map(source.map((character, id) => [character, id]));
    this.targetCharacters = target;
  }

  /** @param {string} text @returns {number[]} an id for each character, and that of the end */
  encode(text) {
    return [...Array.from(text, (character) => this.source.get(character) ?? UNKNOWN), END];
  }

  /** @param {number[]} ids */
  decode(ids) {
    return ids.filter((id) => id > END).map((id) => this.targetCharacters[id]).join("");
  }

  /**
   * @param {number[]} source ids
   * @param {number[]} target ids, the start first
   * @param {Set<string>} [off] heads that are switched off
   * @returns {{ logits: Matrix, maps: Maps }} logits of the token after each of the target
   */
  read(source, target, off = new Set()) {
    const run = new Run(this.weights, off);
    const memory = run.stack("encoder", source, null);
    const states = run.stack("decoder", target, memory);
    return { logits: linear(this.weights, "head.layers.0", states), maps: run.maps };
  }

  /**
   * Beam search by the rules of clearhead's own: the 2B best extensions of B hypotheses are looked at; one that ends
   * among the first B is finished; the score is the sum of log-probabilities divided by the length.
   * @param {string} text
   * @param {number} beams
   * @param {Set<string>} [off]
   * @param {number} [limit] tokens at most; where nothing has ended by then, the end is forced
   * @returns {{ results: Finished[], nodes: BeamNode[] }} the best result first
   */
  translate(text, beams, off = new Set(), limit = 20) {
    const run = new Run(this.weights, off);
    const memory = run.stack("encoder", this.encode(text), null);
    /** @type {BeamNode[]} */
    const nodes = [];
    /** @type {Finished[]} */
    const finished = [];
    /** @type {Hypothesis[]} */
    let live = [{ ids: [START], sum: 0, node: -1 }];
    /** @type {Finished[]} */
    let forced = [];
    for (let step = 0; step < limit && live.length > 0; step++) {
      forced = [];
      const best = live.flatMap((hypothesis) => {
        const states = run.stack("decoder", hypothesis.ids, memory).slice(-1);
        const shares = softmax(linear(this.weights, "head.layers.0", states)[0]);
        const ended = hypothesis.sum + Math.log(shares[END]);
        forced.push({ ids: [...hypothesis.ids, END], score: ended / (step + 1), node: hypothesis.node });
        return Array.from(shares, (share, id) => ({ hypothesis, id, logProbability: Math.log(share), sum: hypothesis.sum + Math.log(share) }));
      }).filter(({ id }) => id !== PAD && id !== START).sort((one, other) => other.sum - one.sum).slice(0, beams === 1 ? 1 : 2 * beams);
      /** @type {Hypothesis[]} */
      const next = [];
      best.forEach(({ hypothesis, id, logProbability, sum }, place) => {
        const [ends, score] = [id === END && place < beams, sum / (step + 1)];
        const isKept = id !== END && next.length < beams;
        const reason = ends ? "the end token" : isKept ? "" : `not among the best ${beams} of this step`;
        nodes.push({
          parent: hypothesis.node, token: id === END ? "</s>" : this.targetCharacters[id], logProbability, score, step,
          state: ends ? "finished" : isKept ? "kept" : "pruned", reason, rank: null,
        });
        const ids = [...hypothesis.ids, id];
        if (ends) finished.push({ ids, score, node: nodes.length - 1 });
        else if (isKept) next.push({ ids, sum, node: nodes.length - 1 });
      });
      finished.sort((one, other) => other.score - one.score);
      live = next;
      const canWin = live.length > 0 && live[0].sum / limit > (finished[0]?.score ?? -Infinity);
      if (finished.length > 0 && (beams === 1 || !canWin)) break;
    }
    const results = finished.length > 0 ? finished : forced.sort((one, other) => other.score - one.score);
    if (finished.length > 0) nodes[results[0].node].rank = 0;
    return { results, nodes };
  }
}
