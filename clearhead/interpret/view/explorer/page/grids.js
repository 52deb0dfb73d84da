/** Grids of numbers for the views: weights of one or more heads, with joined subwords, or differences of samples. */

import { exactNumbers, layerWeights } from "./arrays.js";
import { labels } from "./labels.js";

/** @typedef {import("./types.js").Grid} Grid */
/** @typedef {import("./types.js").Label} Label */
/** @typedef {import("./types.js").Sample} Sample */
/** @typedef {import("./types.js").Stack} Stack */
/** @typedef {import("./state.js").State} State */

/** @type {Record<string, string>} */
export const STACK_NAMES = { "encoder.self": "Encoder", "decoder.self": "Decoder", "decoder.memory": "Cross" };

/**
 * Return the stack and measure of the state; by default cross-attention, or the only stack.
 * @param {Sample} sample
 * @param {State} state
 */
export function stackOf(sample, state) {
  const names = sample.attentions.map((stack) => stack.stack);
  const name = [state.stack, "decoder.memory"].find((one) => names.includes(/** @type {any} */ (one))) ?? names[0];
  const named = sample.attentions.filter((stack) => stack.stack === name);
  return named[state.measure] ?? named[0];
}

/**
 * Return the last token that is text, where a view opens; an end token may follow it.
 * @param {import("./types.js").TokenRow} row
 * @param {Label[]} shown
 */
export function lastOfText(row, shown) {
  const texts = [...shown.keys()].filter((index) => !row.special?.[shown[index].members[0]]);
  return texts.at(-1) ?? shown.length - 1;
}

/**
 * @param {Stack} stack
 * @param {State} state
 */
export function layerOf(stack, state) {
  return stack.layers.find((layer) => layer.layer === state.layer) ?? stack.layers[0];
}

/**
 * @param {import("./types.js").Layer} layer
 * @param {State} state
 */
export function headOf(layer, state) {
  return layer.heads.includes(state.head) ? state.head : layer.heads[0];
}

/**
 * Return the head of the cross-attention with the largest value of the column "alignment"; null if it was not measured.
 * @param {Sample | undefined} sample
 */
export function bestHead(sample) {
  const stack = sample?.attentions.find((one) => one.stack === "decoder.memory");
  const heads = stack?.layers.flatMap((layer) => layer.heads.map((head, place) => ({ layer: layer.layer, head, value: layer.values.alignment?.[place] ?? -1 }))) ?? [];
  const [best] = heads.sort((one, two) => two.value - one.value);
  return best && best.value >= 0 ? best : null;
}

/**
 * @param {Sample} sample
 * @param {import("./types.js").RowName} name
 */
export function rowOf(sample, name) {
  return sample.rows[name] ?? { tokens: [], texts: [], words: [], generated: null };
}

/** @type {WeakMap<import("./types.js").TokenRow, Label[]>} */
const known = new WeakMap();

/**
 * @param {import("./types.js").TokenRow} row
 */
function tokenLabels(row) {
  const found = known.get(row) ?? labels(row, false);
  known.set(row, found);
  return found;
}

/** @typedef {(sample: Sample, stack: Stack, layer: import("./types.js").Layer, head: number, queries: Label[], keys: Label[]) => Promise<Grid>} MakeGrid */

/**
 * Replace the function that makes grids: a live page loads the maps of a long text in tiles.
 * @type {MakeGrid | null}
 */
let pieceGrid = null;

/** @param {MakeGrid | null} make */
export function gridsFrom(make) {
  pieceGrid = make;
}

/**
 * Return the grid of one head, token by token; in float32 if the file has it.
 * @param {import("./types.js").Page} page
 * @param {Sample} sample
 * @param {Stack} stack
 * @param {import("./types.js").Layer} layer
 * @param {number} head
 * @returns {Promise<Grid>}
 */
export async function headGrid(page, sample, stack, layer, head) {
  const queries = tokenLabels(rowOf(sample, stack.queries));
  const keys = tokenLabels(rowOf(sample, stack.keys));
  if (layer.weights === null && pieceGrid) return pieceGrid(sample, stack, layer, head, queries, keys);
  const weights = await layerWeights(page, layer);
  const exact = await exactNumbers(page, layer, head, keys.length);
  const place = layer.heads.indexOf(head);
  return {
    queries,
    keys,
    signed: false,
    exact: exact !== null,
    row: exact ? (query, out) => exact.row(query, out) : (query, out) => weights.row(place, query, out),
    sink: (query) => weights.sink(place, query),
  };
}

/**
 * @param {Grid[]} grids grids with the same tokens
 * @param {"mean" | "max"} how
 * @returns {Grid}
 */
export function combined(grids, how) {
  if (grids.length === 1) return grids[0];
  const part = new Float32Array(grids[0].keys.length);
  return {
    ...grids[0],
    exact: grids.every((grid) => grid.exact),
    row(query, out) {
      grids[0].row(query, out);
      for (const grid of grids.slice(1)) {
        grid.row(query, part);
        for (let key = 0; key < out.length; key++) {
          out[key] = how === "max" ? Math.max(out[key], part[key]) : out[key] + part[key];
        }
      }
      if (how === "mean") for (let key = 0; key < out.length; key++) out[key] /= grids.length;
    },
    sink: (query) => {
      const shares = grids.map((grid) => grid.sink(query));
      return how === "max" ? Math.max(...shares) : shares.reduce((sum, share) => sum + share, 0) / grids.length;
    },
  };
}

/**
 * Merge tokens to words: the mean over the query tokens of a word, the sum over its key tokens.
 * Source: Clark et al. 2019 (arXiv 1906.04341), section 4.1.
 * @param {Grid} grid
 * @param {Label[]} queries
 * @param {Label[]} keys
 * @returns {Grid}
 */
function joined(grid, queries, keys) {
  const part = new Float32Array(grid.keys.length);
  return {
    ...grid,
    queries,
    keys,
    row(query, out) {
      out.fill(NaN);
      const members = queries[query].members;
      for (const member of members) {
        grid.row(member, part);
        keys.forEach((key, place) => {
          for (const token of key.members) {
            if (!Number.isNaN(part[token])) out[place] = (Number.isNaN(out[place]) ? 0 : out[place]) + part[token] / members.length;
          }
        });
      }
    },
    sink: (query) => queries[query].members.reduce((sum, token) => sum + grid.sink(token) / queries[query].members.length, 0),
  };
}

/**
 * @param {Grid} grid
 * @param {Grid} minus grid with equally many queries and keys
 * @returns {Grid}
 */
export function difference(grid, minus) {
  const part = new Float32Array(grid.keys.length);
  return {
    ...grid,
    signed: true,
    exact: grid.exact && minus.exact,
    row(query, out) {
      grid.row(query, out);
      minus.row(query, part);
      for (let key = 0; key < out.length; key++) out[key] -= part[key];
    },
    sink: (query) => grid.sink(query) - minus.sink(query),
  };
}

/**
 * Transpose a grid: keys by queries.
 * @param {Grid} grid
 * @returns {Grid}
 */
export function turned(grid) {
  const part = new Float32Array(grid.keys.length);
  return {
    ...grid,
    queries: grid.keys,
    keys: grid.queries,
    row(key, out) {
      for (let query = 0; query < out.length; query++) {
        grid.row(query, part);
        out[query] = part[key];
      }
    },
    sink: () => NaN,
  };
}

/**
 * Return the grid that a pane shows for some heads.
 * @param {import("./types.js").Page} page
 * @param {import("./types.js").Pane} pane
 * @param {State} state
 * @param {{ layer: number, head: number }[]} heads
 * @param {"mean" | "max"} [how]
 * @returns {Promise<Grid>}
 */
export async function paneGrid(page, pane, state, heads, how = "mean") {
  const grid = await sampleGrid(page, pane.sample, state, heads, how);
  return pane.minus === null ? grid : difference(grid, await sampleGrid(page, pane.minus, state, heads, how));
}

/**
 * @param {import("./types.js").Page} page
 * @param {Sample} sample
 * @param {State} state
 * @param {{ layer: number, head: number }[]} heads
 * @param {"mean" | "max"} how
 */
async function sampleGrid(page, sample, state, heads, how) {
  const stack = stackOf(sample, state);
  const found = heads.map(({ layer, head }) => {
    const at = layerOf(stack, { ...state, layer });
    return headGrid(page, sample, stack, at, headOf(at, { ...state, head }));
  });
  const grid = combined(await Promise.all(found), how);
  if (!state.join) return grid;
  return joined(grid, labels(rowOf(sample, stack.queries), true), labels(rowOf(sample, stack.keys), true));
}

/**
 * Return whether two samples can be subtracted: equal stacks, layers, heads and numbers of tokens.
 * @param {Sample} one
 * @param {Sample} two
 */
export function areComparable(one, two) {
  /** @param {Sample} sample */
  const shape = (sample) =>
    JSON.stringify([
      // With a given target, each model may predict a different token after the last one.
      Object.entries(sample.rows).filter(([name]) => name !== "written").map(([name, row]) => [name, row.texts]),
      sample.attentions.map((stack) => [stack.stack, stack.measure, stack.layers.map((layer) => [layer.layer, layer.heads])]),
    ]);
  return shape(one) === shape(two);
}

/**
 * Return the keys with the largest weights of a query.
 * @param {Grid} grid
 * @param {number} query
 * @param {number} count
 */
export function strongest(grid, query, count) {
  const out = new Float32Array(grid.keys.length);
  grid.row(query, out);
  const order = [...out.keys()].filter((key) => !Number.isNaN(out[key]));
  order.sort((one, two) => Math.abs(out[two]) - Math.abs(out[one]) || one - two);
  return order.slice(0, count).map((key) => ({ key, value: out[key] }));
}
