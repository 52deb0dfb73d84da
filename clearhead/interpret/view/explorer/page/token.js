/** Token view: one token through all layers, with the tokens that it looks at and that look at it. */

import { el, fill, refill, select } from "./dom.js";
import { headOf, lastOfText, layerOf, paneGrid, rowOf, stackOf } from "./grids.js";
import { heatImage } from "./image.js";
import { labelOf, labels, queryNodes, tokenNode } from "./labels.js";
import { amount } from "./matrix.js";
import { Ribbon } from "./ribbon.js";

/** @typedef {import("./types.js").Grid} Grid */
/** @typedef {import("./types.js").Pane} Pane */
/** @typedef {import("./state.js").State} State */

const LISTED = 3;

/**
 * @param {HTMLElement} root
 * @param {Pane} pane
 * @param {import("./types.js").App} app
 * @returns {import("./types.js").View}
 */
export function token(root, pane, app) {
  return new TokenView(root, pane, app);
}

/** One side of the view (keys or queries of a token): the text shaded by one layer, and a line per layer. */
class Side {
  /**
   * @param {HTMLElement} root
   * @param {TokenView} view
   * @param {"query" | "key"} what role of the chosen token
   */
  constructor(root, view, what) {
    this.view = view;
    this.what = what;
    this.heading = el("h3", {});
    this.ribbon = new Ribbon(what === "query" ? "tokens looked at" : "tokens that look", (index) => view.pick(what === "query" ? "key" : "query", index));
    this.lines = el("div", { class: "layer-lines" });
    root.append(el("section", { class: "token-side" }, this.heading, this.ribbon.root, this.lines));
    this.layer = -1;
    /** @type {Float32Array[]} */
    this.rows = [];
  }

  /**
   * @param {Grid[]} grids one grid per layer
   * @param {number} chosen index of the selected label
   * @param {State} state
   */
  show(grids, chosen, state) {
    this.state = state;
    this.grids = grids;
    const isQuery = this.what === "query";
    const own = isQuery ? grids[0].queries : grids[0].keys;
    const others = isQuery ? grids[0].keys : grids[0].queries;
    this.chosen = chosen;
    this.rows = grids.map((grid) => (isQuery ? rowOfGrid(grid, chosen) : columnOfGrid(grid, chosen)));
    const { layers } = this.view;
    this.layer = Math.max(0, layers.indexOf(state.layer));
    fill(this.heading, ...(isQuery ? ["Where ", ...queryNodes(own[chosen]), " looks"] : ["Who looks at ", tokenNode(own[chosen].text)]));
    this.ribbon.setRow(others);
    const lines = this.rows.map((row, index) => this.line(row, index, grids[index], others));
    fill(this.lines, ...lines);
    this.shade(this.layer);
  }

  /**
   * @param {Float32Array} row
   * @param {number} index
   * @param {Grid} grid
   * @param {import("./types.js").Label[]} others
   */
  line(row, index, grid, others) {
    const layer = this.view.layers[index];
    const strip = heatImage({ ...grid, queries: [others[0]], keys: others, row: (_, out) => out.set(row) }, 1, this.state?.scale ?? "root");
    strip.setAttribute("aria-hidden", "true");
    const order = [...row.keys()].filter((key) => Math.abs(row[key]) >= 0.005);
    order.sort((one, two) => Math.abs(row[two]) - Math.abs(row[one]) || one - two);
    const sink = this.what === "query" ? grid.sink(this.chosen ?? 0) : NaN;
    const found = order.slice(0, LISTED).map((key) => el("span", { class: "look" }, tokenNode(others[key].text), el("b", {}, amount({ ...grid, exact: false }, row[key]))));
    if (sink >= 0.005) found.unshift(el("span", { class: "look" }, "no token ", el("b", {}, amount({ ...grid, exact: false }, sink))));
    return el("button", {
      type: "button", class: "layer-line", "data-layer": layer, "aria-pressed": String(index === this.layer),
      onclick: () => this.view.app.store.set({ layer }),
      onpointerenter: () => this.shade(index),
      onpointerleave: () => this.shade(this.layer),
    }, el("span", { class: "layer-name" }, `layer ${layer}`), strip, el("span", { class: "looks" }, ...found));
  }

  /** @param {number} index number of the layer */
  shade(index) {
    const { state, grids } = this;
    if (!state || !grids) return;
    const isOwn = grids[0].queries.length === this.rows[index].length && grids[0].keys.length === this.rows[index].length;
    this.ribbon.paint(isOwn ? this.chosen ?? -1 : -1, this.rows[index], state.scale, grids[index].signed);
  }
}

/**
 * @param {Grid} grid
 * @param {number} query
 */
function rowOfGrid(grid, query) {
  const row = new Float32Array(grid.keys.length);
  grid.row(query, row);
  return row;
}

/**
 * @param {Grid} grid
 * @param {number} key
 */
function columnOfGrid(grid, key) {
  const row = new Float32Array(grid.keys.length);
  return Float32Array.from(grid.queries, (_, query) => {
    grid.row(query, row);
    return row[key];
  });
}

class TokenView {
  /**
   * @param {HTMLElement} root
   * @param {Pane} pane
   * @param {import("./types.js").App} app
   */
  constructor(root, pane, app) {
    this.pane = pane;
    this.app = app;
    /** @type {number[]} */
    this.layers = [];
    this.text = new Ribbon("the text: choose a token", (index) => this.pick("query", index));
    this.source = new Ribbon("the source: choose a token", (index) => this.pick("key", index));
    this.picker = el("section", { class: "token-text" }, el("h3", {}, "Choose a token"), this.text.root, this.source.root);
    const sides = el("div", { class: "token-sides" });
    root.append(this.picker, sides);
    this.sides = [new Side(sides, this, "query"), new Side(sides, this, "key")];
    this.shown = "";
  }

  /**
   * @param {"query" | "key"} what
   * @param {number} index
   */
  pick(what, index) {
    if (!this.grids) return;
    const isCross = this.stack?.queries !== this.stack?.keys;
    const label = (what === "query" ? this.grids[0].queries : this.grids[0].keys)[index];
    this.app.store.set(isCross ? { [what]: label.members[0] } : { query: label.members[0], key: label.members[0] });
  }

  /**
   * @param {State} state
   * @param {Pane} pane
   */
  async update(state, pane) {
    this.pane = pane;
    const stack = stackOf(pane.sample, state);
    this.stack = stack;
    this.layers = stack.layers.map((layer) => layer.layer);
    this.controls(state, stack);
    const shown = [pane.name, stack.stack, stack.measure, state.join, state.over, state.over === "head" ? state.head : ""].join();
    if (shown !== this.shown) {
      this.shown = shown;
      this.made = Promise.all(stack.layers.map((layer) => {
        const heads = state.over === "head" ? [headOf(layer, state)] : layer.heads;
        return paneGrid(this.app.page, pane, state, heads.map((head) => ({ layer: layer.layer, head })), state.over === "max" ? "max" : "mean");
      }));
    }
    const grids = await this.made;
    if (!grids || shown !== this.shown || state !== this.app.store.state) return;
    this.grids = grids;
    const [{ queries, keys }] = this.grids;
    const isCross = stack.queries !== stack.keys;
    const query = Math.max(labelOf(queries, state.query), state.query < 0 ? lastOfText(rowOf(pane.sample, stack.queries), queries) : 0);
    const isText = (/** @type {import("./types.js").Label} */ label) => !rowOf(pane.sample, stack.keys).special?.[label.members[0]];
    const key = isCross ? Math.max(0, state.key < 0 ? keys.findIndex(isText) : labelOf(keys, state.key)) : query;
    this.text.setRow(queries);
    this.text.paint(query, null, state.scale, false);
    this.source.root.hidden = !isCross;
    this.source.setRow(isCross ? labels(rowOf(pane.sample, stack.keys), state.join === 1) : []);
    this.source.paint(key, null, state.scale, false);
    this.sides[0].show(this.grids, query, state);
    this.sides[1].show(this.grids, key, state);
  }

  /**
   * @param {State} state
   * @param {import("./types.js").Stack} stack
   */
  controls(state, stack) {
    const heads = layerOf(stack, state).heads.map((head) => /** @type {[string, string]} */ ([String(head), `head ${head}`]));
    refill(this.app.slot, select("Heads", [["mean", "mean of all"], ["max", "largest of all"], ...heads],
      state.over === "head" ? String(headOf(layerOf(stack, state), state)) : state.over,
      (value) => this.app.store.set(Number.isNaN(Number(value)) ? { over: value } : { over: "head", head: Number(value) })));
  }
}
