/** Heat maps of a sweep: the effect of patching in a second text at each depth and position. */

import { el, fill, withSign } from "./dom.js";
import { HeatMap } from "./heat.js";
import { nameLabel, tokenNode } from "./labels.js";

/**
 * Answer of the program to a sweep.
 * @typedef {object} Swept
 * @property {string} outcome
 * @property {number | null} total
 * @property {Record<string, string[]>} tokens
 * @property {Record<string, (number | null)[][]>} streams
 * @property {[string, number, number, number][]} heads
 */

/**
 * Scale numbers to a grid from -1 to 1, relative to the largest number of all maps.
 * @param {(number | null)[][]} rows
 * @param {string[]} names names of the rows
 * @param {string[]} columns
 * @param {number} most
 * @returns {import("./types.js").Grid}
 */
function gridOf(rows, names, columns, most) {
  return {
    queries: names.map(nameLabel), keys: columns.map(nameLabel), signed: true, exact: true, sink: () => NaN,
    row: (query, out) => out.set(rows[query].map((value) => (value === null ? NaN : value / most))),
  };
}

/**
 * @param {HTMLElement} root
 * @param {Swept} swept
 * @param {(stack: string, depth: number, position: number) => void} apply
 */
export function showSweep(root, swept, apply) {
  const { streams, heads, tokens, outcome, total } = swept;
  const all = [...Object.values(streams).flat(2), ...heads.map((head) => head[3])].map((value) => Math.abs(value ?? 0));
  const most = Math.max(1e-9, ...all);
  const close = el("button", { type: "button", class: "plain-button", onclick: () => fill(root) }, "Close");
  fill(root, el("div", { class: "bench-row" }, el("h2", {}, `Sweep: log-probability of ${outcome}`), close),
    el("p", { class: "note" }, "Each cell shows its change if the vector of the second text is patched in at that depth and position. Blue raises it, orange lowers it; the largest change is ",
      withSign(all.length ? most : 0).replace("+", ""), ".", total === null ? "" : ` In the second text it differs by ${withSign(total)}.`, " Click a cell to make that change."));
  for (const [stack, rows] of Object.entries(streams)) {
    const names = rows.map((_, depth) => (depth ? `after layer ${depth - 1}` : "embedding"));
    drawn(root, `${stack}: the stream`, gridOf(rows, names, tokens[stack], most), most, (cell) => apply(stack, cell.query, cell.key));
  }
  for (const stack of new Set(heads.map((head) => head[0]))) {
    const own = heads.filter((head) => head[0] === stack);
    const layers = [...new Set(own.map((head) => head[1]))];
    const count = Math.max(...own.map((head) => head[2])) + 1;
    const rows = layers.map((layer) => Array.from({ length: count }, (_, head) => own.find((one) => one[1] === layer && one[2] === head)?.[3] ?? null));
    drawn(root, `${stack}: heads, at all positions`, gridOf(rows, layers.map((layer) => `layer ${layer}`), rows[0].map((_, head) => String(head)), most), most, null);
  }
}

/**
 * @param {HTMLElement} root
 * @param {string} name
 * @param {import("./types.js").Grid} grid
 * @param {number} most
 * @param {((cell: import("./heat.js").Cell) => void) | null} pick
 */
function drawn(root, name, grid, most, pick) {
  const stage = el("div", { class: "sweep-map" });
  root.append(el("h3", {}, name), stage);
  const heat = new HeatMap(stage, {
    name: `${name}: changes by row and column`,
    hover: (cell) => {
      if (!cell) return;
      const value = heat.value(cell) * most;
      fill(heat.tip, el("span", { class: "tip-tokens" }, grid.queries[cell.query].text, " · ", tokenNode(grid.keys[cell.key].text)), el("b", {}, Number.isNaN(value) ? "no counterpart" : withSign(value)));
    },
    pick: (cell) => pick?.(cell),
  });
  heat.show(grid, "linear", null, "");
}
