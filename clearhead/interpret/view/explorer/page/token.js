/** Token view: one token in all layers, with the tokens that it attends to and those that attend to it. */

import { el, fill, refill, select } from "./dom.js";
import { headOf, lastOfText, layerOf, paneGrid, rowOf, stackOf, strongest } from "./grids.js";
import { HeatMap } from "./heat.js";
import { attendsTo, labelOf, labels, nameLabel, quoted, tokenNode } from "./labels.js";
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

/** One side of the view (keys or queries of a token): a map of layers by tokens, and the largest weights of each layer. */
class Side {
  /**
   * @param {HTMLElement} stage
   * @param {HTMLElement} panel
   * @param {TokenView} view
   * @param {"query" | "key"} role role of the chosen token
   */
  constructor(stage, panel, view, role) {
    this.view = view;
    this.role = role;
    this.heading = el("h3", {});
    this.title = el("h3", {});
    this.lines = el("div", { class: "layer-lines" });
    const map = el("section", {}, this.heading);
    this.heat = new HeatMap(map, {
      name: `${role === "query" ? "weights on each token" : "weights of each token"}, by layer: arrow keys move`,
      hover: (cell) => this.hovered(cell),
      pick: ({ query, key }) => view.pick(role === "query" ? "key" : "query", key, view.layers[query]),
    });
    stage.append(map);
    panel.append(el("section", { class: "token-side" }, this.title, this.lines));
  }

  /**
   * @param {Grid[]} grids one grid per layer
   * @param {number} chosen index of the selected label
   * @param {State} state
   */
  show(grids, chosen, state) {
    const isQuery = this.role === "query";
    const [same, others] = isQuery ? [grids[0].queries, grids[0].keys] : [grids[0].keys, grids[0].queries];
    const rows = grids.map((grid) => (isQuery ? rowOfGrid(grid, chosen) : columnOfGrid(grid, chosen)));
    const words = () => (isQuery ? attendsTo(same[chosen]) : ["What attends to ", quoted(same[chosen].text)]);
    fill(this.heading, ...words());
    fill(this.title, ...words());
    const sink = (/** @type {number} */ layer) => (isQuery ? grids[layer].sink(chosen) : NaN);
    const { layers } = this.view;
    const [layer, at] = [layers.indexOf(state.layer), labelOf(others, isQuery ? state.key : state.query)];
    this.heat.show({
      queries: layers.map((layer) => nameLabel(`layer ${layer}`)), keys: others, signed: grids[0].signed, exact: false,
      row: (layer, out) => out.set(rows[layer]), sink,
    }, state.scale, at >= 0 && layer >= 0 ? { query: layer, key: at } : null, "");
    fill(this.lines, ...rows.map((row, index) => {
      const grid = { ...grids[index], exact: false };
      const order = [...row.keys()].filter((key) => Math.abs(row[key]) >= 0.005);
      order.sort((one, two) => Math.abs(row[two]) - Math.abs(row[one]) || one - two);
      const largest = order.slice(0, LISTED).map((key) => el("span", { class: "look" }, tokenNode(others[key].text), el("b", {}, amount(grid, row[key]))));
      if (sink(index) >= 0.005) largest.unshift(el("span", { class: "look" }, "no token ", el("b", {}, amount(grid, sink(index)))));
      return el("p", { class: "layer-line" }, el("span", { class: "field-name" }, `layer ${layers[index]}`), ...(largest.length ? largest : ["nothing above 0.005"]));
    }));
  }

  /** @param {import("./heat.js").Cell | null} cell */
  hovered(cell) {
    const { grid, tip } = this.heat;
    if (cell && grid) fill(tip, el("span", { class: "tip-tokens" }, `${grid.queries[cell.query].text}: `, tokenNode(grid.keys[cell.key].text)), el("b", {}, amount(grid, this.heat.value(cell))));
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
    this.names = [el("p", { class: "field-name" }), el("p", { class: "field-name" }, "Source tokens")];
    const panel = el("aside", { class: "panel", "aria-label": "the largest weights of each layer" });
    const stage = el("div", { class: "stage token-maps" }, el("section", { class: "token-texts" }, this.names[0], this.text.root, this.names[1], this.source.root));
    root.append(el("div", { class: "split" }, stage, panel));
    this.sides = [new Side(stage, panel, this, "query"), new Side(stage, panel, this, "key")];
    this.shown = "";
  }

  close() {
    for (const side of this.sides) side.heat.close();
  }

  /**
   * @param {"query" | "key"} role
   * @param {number} index
   * @param {number} [layer]
   */
  pick(role, index, layer = this.app.store.state.layer) {
    if (!this.grids) return;
    const isCross = this.stack?.queries !== this.stack?.keys;
    const [token] = (role === "query" ? this.grids[0].queries : this.grids[0].keys)[index].members;
    this.app.store.set({ layer, ...(isCross ? { [role]: token } : { query: token, key: token }) });
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
    const key = isCross ? Math.max(0, state.key < 0 ? strongest(grids[grids.length - 1], query, 1)[0]?.key : labelOf(keys, state.key)) : query;
    this.text.setRow(queries);
    this.text.paint(query, null, state.scale, false);
    this.source.root.hidden = this.names[1].hidden = !isCross;
    this.names[0].textContent = stack.queries === "written" ? "Written tokens" : stack.queries === "encoder" || !isCross && !pane.sample.rows.encoder ? "Tokens of the text" : "Tokens that the decoder reads";
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
