/** Alignment view: the source tokens that the decoder attends to while it writes each token. */

import { el, fill, fixed, refill, segmented, stepper } from "./dom.js";
import { bestHead, headOf, layerOf, paneGrid, strongest } from "./grids.js";
import { HeatMap, zoomButtons } from "./heat.js";
import { labelOf, tokenNode } from "./labels.js";
import { amount, cellNodes, cellWords } from "./matrix.js";

/** @typedef {import("./types.js").Pane} Pane */
/** @typedef {import("./state.js").State} State */

/**
 * @param {HTMLElement} root
 * @param {Pane} pane
 * @param {import("./types.js").App} app
 * @returns {import("./types.js").View}
 */
export function alignment(root, pane, app) {
  return new Alignment(root, pane, app);
}

/** @param {import("./types.js").Sample} sample */
export function hasAlignment(sample) {
  return sample.attentions.some((stack) => stack.stack === "decoder.memory");
}

class Alignment {
  /**
   * @param {HTMLElement} root
   * @param {Pane} pane
   * @param {import("./types.js").App} app
   */
  constructor(root, pane, app) {
    this.app = app;
    this.pane = pane;
    this.panel = el("aside", { class: "panel", "aria-label": "alignment by token" });
    const stage = el("div", { class: "stage" });
    root.append(el("div", { class: "split" }, stage, this.panel));
    this.heat = new HeatMap(stage, {
      name: `alignment of ${pane.name}: rows are written tokens, columns are source tokens; arrow keys move`,
      hover: (cell) => { if (cell && this.grid) fill(this.heat.tip, ...cellNodes(this.grid, cell, this.heat.value(cell))); },
      pick: (cell) => this.picked(cell),
      moved: (box) => app.store.set({ box }),
    });
    this.controls = el("div", { class: "bar" });
    if (!app.slot.hasChildNodes()) app.slot.append(this.controls, zoomButtons(this.heat));
    this.shown = "";
    /** @type {Promise<import("./types.js").Grid> | undefined} */
    this.made = undefined;
    /** @type {import("./types.js").Grid | undefined} */
    this.grid = undefined;
  }

  close() {
    this.heat.close();
  }

  /**
   * @param {State} outer
   * @param {Pane} pane
   */
  async update(outer, pane) {
    const state = { ...outer, stack: "decoder.memory", measure: 0 };
    this.pane = pane;
    const stack = pane.sample.attentions.find((one) => one.stack === "decoder.memory");
    if (!stack) return;
    const layer = layerOf(stack, state);
    // One head for all checkpoints, and for both of two samples.
    const { page } = this.app;
    const best = bestHead(page.timeline ? page.samples.at(-1) : page.samples[0]);
    if (state.average === "best" && !best) state.average = "layer";
    this.choices(stack, layer, state, best !== null);
    const layers = state.average === "all" ? stack.layers : [layer];
    const heads = state.average === "best" && best ? [best] : layers.flatMap((one) =>
      (state.average === "head" ? [headOf(one, state)] : one.heads).map((head) => ({ layer: one.layer, head })));
    this.tag = state.average === "best" && best ? this.praise(best, stack) : "";
    const shown = JSON.stringify([pane.name, heads, state.join]);
    if (shown !== this.shown) {
      this.shown = shown;
      this.made = paneGrid(this.app.page, pane, state, heads);
    }
    /** @type {import("./types.js").Grid | undefined} */
    const grid = await this.made;
    if (!grid || shown !== this.shown || outer !== this.app.store.state) return;
    if (grid !== this.grid) {
      this.grid = grid;
      this.list();
    }
    const [query, key] = [labelOf(grid.queries, state.query), labelOf(grid.keys, state.key)];
    this.heat.show(grid, state.scale, query >= 0 && key >= 0 ? { query, key } : null, state.box);
  }

  /**
   * Say what distinguishes the head that the page opens with.
   * @param {{ layer: number, head: number, value: number }} best
   * @param {import("./types.js").Stack} stack
   */
  praise({ layer, head, value }, stack) {
    const shown = layerOf(stack, { ...this.app.store.state, layer });
    const here = shown.values.alignment?.[shown.heads.indexOf(head)] ?? NaN;
    const most = "the most consistent alignment of all heads";
    return here === value ? `Layer ${layer}, head ${head}: ${most} (${fixed(here, 2)} of 1).`
      : `Layer ${layer}, head ${head}: alignment ${fixed(here, 2)} of 1 here; ${this.app.page.timeline ? `in the end ${most} (${fixed(value, 2)})` : `${fixed(value, 2)} in “${this.app.page.samples[0].label}”`}.`;
  }

  /**
   * @param {import("./types.js").Stack} stack
   * @param {import("./types.js").Layer} layer
   * @param {State} state
   * @param {boolean} hasBest
   */
  choices(stack, layer, state, hasBest) {
    const { store } = this.app;
    refill(this.controls,
      segmented("average", [...(hasBest ? [/** @type {[string, string]} */ (["best", "best head"])] : []), ["all", "all layers"], ["layer", "one layer"], ["head", "one head"]], state.average, (value) => store.set({ average: value })),
      ["all", "best"].includes(state.average) ? null : stepper("Layer", stack.layers.map((one) => one.layer), layer.layer, (value) => store.set({ layer: value })),
      state.average === "head" ? stepper("Head", layer.heads, headOf(layer, state), (value) => store.set({ head: value })) : null,
    );
  }

  list() {
    const { grid } = this;
    if (!grid) return;
    const pairs = grid.queries.map((label, query) => ({ label, query, best: strongest(grid, query, 1)[0] }));
    this.heat.rings = pairs.flatMap(({ query, best }) => (best ? [{ query, key: best.key }] : []));
    fill(this.panel, el("h3", {}, "The largest weight of each row"), this.tag ? el("p", { class: "tag" }, this.tag) : null,
      el("table", { class: "keys" },
        el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "writes"), el("th", { scope: "col" }, "attends to"), el("th", { scope: "col", class: "number" }, "weight"))),
        el("tbody", {}, ...pairs.flatMap(({ label, query, best }) => best ? [el("tr", {},
          el("td", {}, el("button", { type: "button", class: "plain", onclick: () => this.picked({ query, key: best.key }) }, tokenNode(label.text))),
          el("td", {}, tokenNode(grid.keys[best.key].text)),
          el("td", { class: "number" }, amount({ ...grid, exact: false }, best.value)))] : []))));
  }

  /** @param {import("./heat.js").Cell} cell */
  picked(cell) {
    if (!this.grid) return;
    const [query, key] = [this.grid.queries[cell.query], this.grid.keys[cell.key]];
    this.app.announce(cellWords(this.grid, cell, this.heat.value(cell)));
    this.app.store.set({ query: query.members[0], key: key.members[0] });
  }
}
