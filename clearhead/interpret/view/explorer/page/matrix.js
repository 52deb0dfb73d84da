/** Matrix view: one head, queries by keys. */

import { array } from "./arrays.js";
import { headFacts } from "./facts.js";
import { el, fill, fixed, withSign } from "./dom.js";
import { headOf, lastOfText, layerOf, paneGrid, rowOf, stackOf, strongest } from "./grids.js";
import { HeatMap, zoomButtons } from "./heat.js";
import { attendsTo, labelOf, tokenNode } from "./labels.js";

const LISTED = 12;

/**
 * @param {HTMLElement} root
 * @param {import("./types.js").Pane} pane
 * @param {import("./types.js").App} app
 * @returns {import("./types.js").View}
 */
export function matrix(root, pane, app) {
  return new Matrix(root, pane, app);
}

/**
 * @param {import("./types.js").Grid} grid
 * @param {number} value
 */
export function amount(grid, value) {
  if (Number.isNaN(value)) return "masked";
  const digits = grid.exact ? 7 : 3;
  return grid.signed ? withSign(value) : fixed(value, digits);
}

/**
 * Text for a cell: its tokens and its number.
 * @param {import("./types.js").Grid} grid
 * @param {import("./heat.js").Cell} cell
 * @param {number} value
 */
export function cellNodes(grid, cell, value) {
  return [
    el("span", { class: "tip-tokens" }, tokenNode(grid.queries[cell.query].text), el("span", { class: "arrow" }, " → "), tokenNode(grid.keys[cell.key].text)),
    el("b", {}, amount(grid, value)),
  ];
}

/**
 * The same for a screen reader.
 * @param {import("./types.js").Grid} grid
 * @param {import("./heat.js").Cell} cell
 * @param {number} value
 */
export function cellWords(grid, cell, value) {
  return `“${grid.queries[cell.query].text}” attends to “${grid.keys[cell.key].text}”: ${amount(grid, value)}`;
}

/**
 * Table of keys by weight, with bars.
 * @param {import("./types.js").Grid} grid
 * @param {number} query
 * @param {(key: number) => void} pick
 */
export function keyTable(grid, query, pick) {
  const sink = grid.sink(query);
  const rows = strongest(grid, query, LISTED).map(({ key, value }) => {
    const bar = el("span", { class: `meter${value < 0 ? " less" : ""}`, "aria-hidden": "true" });
    bar.style.setProperty("--share", String(Math.min(1, Math.abs(value))));
    return el("tr", {},
      el("td", {}, el("button", { type: "button", class: "plain", onclick: () => pick(key) }, tokenNode(grid.keys[key].text), el("small", {}, String(grid.keys[key].members[0])))),
      el("td", { class: "number" }, bar, amount(grid, value)),
    );
  });
  if (!Number.isNaN(sink)) {
    const bar = el("span", { class: "meter sink", "aria-hidden": "true" });
    bar.style.setProperty("--share", String(Math.min(1, Math.abs(sink))));
    rows.unshift(el("tr", { class: "sink" }, el("td", {}, "no token (sink)"), el("td", { class: "number" }, bar, amount({ ...grid, exact: false }, sink))));
  }
  return el("table", { class: "keys" }, el("caption", { class: "unseen" }, "keys by weight"),
    el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "token ", el("small", {}, "position")), el("th", { scope: "col", class: "number" }, "weight"))), el("tbody", {}, ...rows));
}

/**
 * Return the change of the output if the head does not attend to each key, divided by the largest change.
 * @param {import("./types.js").Layer} layer
 * @param {number} head
 * @param {import("./types.js").Grid} grid
 * @param {import("./types.js").Pane} pane
 */
async function keyEffects(layer, head, grid, pane) {
  if (layer.keyEffects === null || pane.minus) return null;
  const all = await array(layer.keyEffects, Float32Array);
  const size = all.length / layer.heads.length;
  const own = all.subarray(layer.heads.indexOf(head) * size, (layer.heads.indexOf(head) + 1) * size);
  const most = all.reduce((so, value) => Math.max(so, Math.abs(value)), 1e-12);
  return Float32Array.from(grid.keys, (key) => key.members.reduce((sum, token) => sum + own[token], 0) / most);
}

class Matrix {
  /**
   * @param {HTMLElement} root
   * @param {import("./types.js").Pane} pane
   * @param {import("./types.js").App} app
   */
  constructor(root, pane, app) {
    this.pane = pane;
    this.app = app;
    this.panel = el("aside", { class: "panel", "aria-label": "the query under the pointer" });
    const stage = el("div", { class: "stage" });
    root.append(el("div", { class: "split" }, stage, this.panel));
    this.heat = new HeatMap(stage, {
      name: `attention matrix of ${pane.name}: arrow keys move, plus and minus zoom`,
      hover: (cell) => this.hovered(cell),
      pick: (cell) => this.picked(cell),
      moved: (box) => app.store.set({ box }),
    });
    if (!app.slot.hasChildNodes()) app.slot.append(zoomButtons(this.heat));
    this.shown = "";
  }

  close() {
    this.heat.close();
  }

  /**
   * @param {import("./state.js").State} state
   * @param {import("./types.js").Pane} pane
   */
  async update(state, pane) {
    this.pane = pane;
    const stack = stackOf(this.pane.sample, state);
    const layer = layerOf(stack, state);
    const head = headOf(layer, state);
    const shown = [pane.name, stack.stack, stack.measure, layer.layer, head, state.join].join();
    if (shown !== this.shown) {
      this.shown = shown;
      this.made = paneGrid(this.app.page, this.pane, state, [{ layer: layer.layer, head }])
        .then(async (grid) => ({ grid, above: await keyEffects(layer, head, grid, pane) }));
    }
    // Also if an earlier update requested it: a caller that awaits this update relies on its result.
    const made = await this.made;
    if (!made || shown !== this.shown || state !== this.app.store.state) return;
    const { grid } = made;
    this.grid = grid;
    this.heat.above = made.above;
    this.first = lastOfText(rowOf(pane.sample, stack.queries), grid.queries);
    this.facts = headFacts(layer, head);
    const query = labelOf(grid.queries, state.query);
    const key = labelOf(grid.keys, state.key);
    const picked = query >= 0 && key >= 0 ? { query, key } : null;
    this.heat.show(grid, state.scale, picked, state.box);
    this.title = `Layer ${layer.layer}, head ${head}`;
    this.pattern = layer.patterns[layer.heads.indexOf(head)] ?? "";
    this.list(this.heat.hovered ?? picked);
  }

  /**
   * Positions count the tokens that a stack reads; a written token has the step that writes it.
   * @param {number} row
   */
  rowName(row) {
    const { sample } = this.pane;
    return stackOf(sample, this.app.store.state).queries === "written" ? `Step ${row}` : `Position ${row}`;
  }

  /** @param {import("./heat.js").Cell | null} cell */
  hovered(cell) {
    if (!this.grid) return;
    if (cell) fill(this.heat.tip, ...cellNodes(this.grid, cell, this.heat.value(cell)));
    this.list(cell ?? this.heat.picked);
  }

  /** @param {import("./heat.js").Cell} cell */
  picked(cell) {
    if (!this.grid) return;
    const [query, key] = [this.grid.queries[cell.query], this.grid.keys[cell.key]];
    this.app.announce(cellWords(this.grid, cell, this.heat.value(cell)));
    this.app.store.set({ query: query.members[0], key: key.members[0] });
  }

  /** @param {import("./heat.js").Cell | null} cell */
  list(cell) {
    const { grid } = this;
    if (!grid) return;
    const query = cell?.query ?? this.first ?? 0;
    const value = cell ? this.heat.value(cell) : NaN;
    fill(this.panel,
      el("h3", {}, this.title ?? ""),
      this.pattern ? el("p", { class: "tag" }, this.pattern) : null,
      cell ? el("p", { class: "cell", "data-value": String(value) }, ...cellNodes(grid, cell, value)) : null,
      el("h4", {}, `${this.rowName(grid.queries[query].members[0])}: `, ...attendsTo(grid.queries[query])),
      keyTable(grid, query, (key) => this.app.store.set({ query: grid.queries[query].members[0], key: grid.keys[key].members[0] })),
      this.facts ?? null,
      this.heat.above ? el("p", { class: "note" }, "Strip above the columns: the change of the output if this head does not attend to the token (blue: more probable, orange: less).") : null,
    );
  }
}
