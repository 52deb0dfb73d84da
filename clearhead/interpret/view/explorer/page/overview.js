/** Overview: all heads of a stack as thumbnails, in the order of layers or sorted by a number. */

import { theme } from "./color.js";
import { headFacts, headNumbers, Strips } from "./facts.js";
import { el, fill, narrow, refill, segmented, select, short } from "./dom.js";
import { headOf, layerOf, paneGrid, rowOf, stackOf } from "./grids.js";
import { HeatMap } from "./heat.js";
import { heatImage } from "./image.js";
import { cellNodes } from "./matrix.js";

/** @typedef {import("./types.js").Layer} Layer */
/** @typedef {{ layer: Layer, head: number, place: number, button: HTMLElement, caption: HTMLElement }} Card */

const THUMBNAIL = 112;

/**
 * @param {HTMLElement} root
 * @param {import("./types.js").Pane} pane
 * @param {import("./types.js").App} app
 * @returns {import("./types.js").View}
 */
export function overview(root, pane, app) {
  return new Overview(root, pane, app);
}

class Overview {
  /**
   * @param {HTMLElement} root
   * @param {import("./types.js").Pane} pane
   * @param {import("./types.js").App} app
   */
  constructor(root, pane, app) {
    this.pane = pane;
    this.app = app;
    this.board = el("div", { class: "board", role: "group", "aria-label": "heads" });
    this.panel = el("aside", { class: "panel", "aria-label": "the head under the pointer" });
    this.split = el("div", { class: "split" }, this.board, this.panel);
    root.append(this.split);
    /** @type {Card[]} */
    this.cards = [];
    this.built = "";
    this.drawn = "";
    this.strips = new Strips();
    this.picture = el("div", { class: "preview" });
    this.heat = new HeatMap(this.picture, {
      name: "the selected head: arrow keys move",
      hover: (cell) => { if (cell && this.heat.grid) fill(this.heat.tip, ...cellNodes(this.heat.grid, cell, this.heat.value(cell))); },
      pick: (cell) => this.picked(cell),
    });
    /** @type {Map<string, HTMLCanvasElement>} */
    this.images = new Map();
    this.observer = new IntersectionObserver((entries) => this.seen(entries), { rootMargin: "200px" });
    /** @type {Set<Card>} */
    this.waiting = new Set();
    this.isDrawing = false;
    this.shownHead = "";
    this.board.addEventListener("pointerover", (event) => this.hovered(event));
    this.board.addEventListener("focusin", (event) => this.hovered(event));
  }

  close() {
    this.observer.disconnect();
    this.heat.close();
  }

  /** @param {import("./heat.js").Cell} cell */
  picked({ query, key }) {
    const { grid } = this.heat;
    const [layer, head] = this.shownHead.split(" ").map(Number);
    if (grid) this.app.store.set({ view: "matrix", layer, head, query: grid.queries[query].members[0], key: grid.keys[key].members[0], box: "" });
  }

  /**
   * @param {import("./state.js").State} state
   * @param {import("./types.js").Pane} pane
   */
  update(state, pane) {
    this.pane = pane;
    this.state = state;
    const stack = stackOf(this.pane.sample, state);
    this.stack = stack;
    const columns = this.columns(stack);
    const sort = columns.some((column) => column.name === state.sort) ? state.sort : "";
    const order = [pane.name, stack.stack, stack.measure, sort, state.up, state.pattern].join(" ");
    if (order !== this.built) {
      this.built = order;
      this.drawn = "";
      this.controls(stack, columns, sort, state);
      this.build(stack, sort, state);
    }
    if (this.drawn !== `${state.scale} ${theme()}`) {
      this.drawn = `${state.scale} ${theme()}`;
      for (const card of this.cards) {
        this.observer.unobserve(card.button);
        this.observer.observe(card.button);
      }
    }
    const layer = layerOf(stack, state);
    this.choose(layer, headOf(layer, state));
  }

  /** @param {import("./types.js").Stack} stack */
  columns(stack) {
    return this.pane.sample.columns.filter((column) => stack.layers.some((layer) => layer.values[column.name]?.some((value) => value !== null)));
  }

  /**
   * @param {Layer} layer
   * @param {number} place
   * @param {string} name
   */
  number(layer, place, name) {
    return headNumbers(this.pane, this.stack, layer, place, name);
  }

  /**
   * @param {import("./types.js").Stack} stack
   * @param {import("./types.js").Column[]} columns
   * @param {string} sort
   * @param {import("./state.js").State} state
   */
  controls(stack, columns, sort, state) {
    const { store } = this.app;
    /** @type {[string, string][]} */
    const orders = [["", "layer and head"], ...columns.map((column) => /** @type {[string, string]} */ ([column.name, column.title]))];
    const chosen = columns.find((column) => column.name === sort);
    /** @type {Map<string, number>} */
    const counts = new Map();
    for (const layer of stack.layers) for (const name of layer.patterns) if (name) counts.set(name, (counts.get(name) ?? 0) + 1);
    const names = [...counts.keys()].sort((one, two) => (counts.get(two) ?? 0) - (counts.get(one) ?? 0));
    this.patterns = names;
    const chips = names.map((name, index) =>
      el("button", {
        type: "button", class: `chip pattern-${index % 8}`, "aria-pressed": String(state.pattern === name),
        onclick: () => store.set({ pattern: state.pattern === name ? "" : name }),
      }, el("span", { class: "dot", "aria-hidden": "true" }), name, el("span", { class: "count" }, String(counts.get(name)))),
    );
    refill(this.app.slot,
      orders.length > 1 ? select("Sort by", orders, sort, (value) => store.set({ sort: value })) : null,
      chosen ? segmented("order", [["0", "most first"], ["1", "least first"]], String(state.up), (value) => store.set({ up: Number(value) })) : null,
      chips.length ? el("div", { class: "chips", role: "group", "aria-label": "patterns" }, ...chips) : null,
      chosen ? el("p", { class: "note" }, chosen.description, ...this.feedForward(stack, sort)) : null,
    );
  }

  /**
   * Show the same number for the feed-forward networks, if it was measured.
   * @param {import("./types.js").Stack} stack
   * @param {string} sort
   */
  feedForward(stack, sort) {
    const known = stack.layers.filter((layer) => typeof layer.feedForward[sort] === "number");
    if (!known.length) return [];
    return [" Feed-forward: ", ...known.map((layer) => el("span", { class: "look" }, String(layer.layer), el("b", {}, short(layer.feedForward[sort] ?? NaN)), " "))];
  }

  /**
   * @param {import("./types.js").Stack} stack
   * @param {string} sort
   * @param {import("./state.js").State} state
   */
  build(stack, sort, state) {
    this.observer.disconnect();
    const [most, queries, keys] = [Math.max(...stack.layers.map((layer) => layer.heads.length)), ...[stack.queries, stack.keys].map((name) => rowOf(this.pane.sample, name).tokens.length)];
    const sizes = { heads: most, layers: stack.layers.length, ratio: Math.max(0.75, Math.min(4 / 3, keys / queries)) };
    for (const [name, size] of Object.entries(sizes)) this.board.style.setProperty(`--${name}`, String(size));
    this.split.classList.toggle("fitted", !sort);
    this.cards = stack.layers.flatMap((layer) => layer.heads.map((head, place) => this.card(layer, head, place, sort)));
    const isShown = (/** @type {Card} */ card) => !state.pattern || card.layer.patterns[card.place] === state.pattern;
    for (const card of this.cards) card.button.classList.toggle("dim", !isShown(card));
    if (sort) {
      const value = (/** @type {Card} */ card) => this.number(card.layer, card.place, sort);
      const known = this.cards.filter((card) => isShown(card) && !Number.isNaN(value(card)));
      const sign = state.up ? 1 : -1;
      known.sort((one, two) => sign * (value(one) - value(two)));
      this.cards = [...known, ...this.cards.filter((card) => isShown(card) && Number.isNaN(value(card)))];
      fill(this.board, el("div", { class: "sorted" }, ...this.cards.map((card) => card.button)));
    } else {
      const first = stack.layers.find((layer) => layer.heads.length === most);
      const numbers = first?.heads.map((head) => el("span", {}, String(head))) ?? [];
      fill(this.board,
        el("div", { class: "layer head-numbers", "aria-hidden": "true" }, el("span", { class: "layer-name" }, "head"), el("div", { class: "thumbs" }, ...numbers)),
        ...stack.layers.map((layer) => this.layerRow(layer)),
      );
    }
    this.board.classList.toggle("pixels", Math.max(...Object.values(this.pane.sample.rows).map((row) => row.tokens.length)) < 56);
    this.waiting.clear();
  }

  /** @param {Layer} layer */
  layerRow(layer) {
    const cards = this.cards.filter((card) => card.layer === layer);
    return el("div", { class: "layer" },
      el("span", { class: "layer-name" }, el("span", { class: "wide" }, "layer "), String(layer.layer), el("small", { title: layer.mask }, layer.mask === "none" ? "no mask" : layer.mask.split(":")[0])),
      el("div", { class: "thumbs" }, ...cards.map((card) => card.button)),
    );
  }

  /**
   * @param {Layer} layer
   * @param {number} head
   * @param {number} place
   * @param {string} sort
   * @returns {Card}
   */
  card(layer, head, place, sort) {
    const value = sort ? this.number(layer, place, sort) : NaN;
    const pattern = layer.patterns[place] ?? "";
    const caption = el("span", { class: "caption" }, `${layer.layer}·${head}`, sort ? el("b", {}, narrow(value)) : null);
    const share = layer.numHeads / layer.numKvHeads;
    const kind = pattern ? ` pattern-${(this.patterns ?? []).indexOf(pattern) % 8}` : "";
    // While checkpoints play, the previous picture stays until the next one is drawn.
    const before = this.images.get(`${layer.layer}.${head}`) ?? el("canvas", { width: 1, height: 1, "aria-hidden": "true" });
    const button = el("button", {
      type: "button",
      class: `head${kind}${share > 1 && Math.floor(head / share) !== Math.floor((head - 1) / share) && head ? " group" : ""}`,
      "aria-label": `layer ${layer.layer}, head ${head}${pattern ? `, ${pattern}` : ""}${sort ? `, ${short(value)}` : ""}`,
      tabindex: -1,
      onclick: () => this.app.store.set({ view: "matrix", layer: layer.layer, head, box: "" }),
    }, before, el("span", { class: "mark", "aria-hidden": "true" }), sort ? caption : null);
    return { layer, head, place, button, caption };
  }

  /** @param {IntersectionObserverEntry[]} entries */
  seen(entries) {
    for (const entry of entries) {
      const card = this.cards.find(({ button }) => button === entry.target);
      if (!card || !entry.isIntersecting) continue;
      this.observer.unobserve(entry.target);
      this.waiting.add(card);
    }
    if (!this.isDrawing) void this.drawAll();
  }

  async drawAll() {
    this.isDrawing = true;
    let start = performance.now();
    for (const card of this.waiting) {
      this.waiting.delete(card);
      if (!card.button.isConnected || !this.state) continue;
      const state = { ...this.state, join: 0 };
      const grid = await paneGrid(this.app.page, this.pane, state, [{ layer: card.layer.layer, head: card.head }]);
      const pool = Math.max(1, Math.ceil(Math.max(grid.queries.length, grid.keys.length) / THUMBNAIL));
      const image = heatImage(grid, pool, state.scale);
      image.setAttribute("aria-hidden", "true");
      card.button.querySelector("canvas")?.replaceWith(image);
      this.images.set(`${card.layer.layer}.${card.head}`, image);
      if (performance.now() - start > 12) {
        await new Promise((resume) => setTimeout(resume, 0));
        start = performance.now();
      }
    }
    this.isDrawing = false;
  }

  /** @param {Event} event */
  hovered(event) {
    const button = /** @type {Element} */ (event.target).closest("button.head");
    const card = this.cards.find((one) => one.button === button);
    if (card) this.inspect(card.layer, card.head);
  }

  /**
   * @param {Layer} layer
   * @param {number} head
   */
  choose(layer, head) {
    for (const card of this.cards) {
      const isChosen = card.layer === layer && card.head === head;
      card.button.tabIndex = isChosen ? 0 : -1;
      card.button.classList.toggle("chosen", isChosen);
    }
    if (!this.cards.some((card) => card.button.tabIndex === 0) && this.cards[0]) this.cards[0].button.tabIndex = 0;
    this.shownHead = "";
    this.inspect(layer, head);
  }

  /**
   * @param {Layer} layer
   * @param {number} head
   */
  inspect(layer, head) {
    const name = `${layer.layer} ${head}`;
    if (name === this.shownHead || !this.state) return;
    this.shownHead = name;
    const place = layer.heads.indexOf(head);
    const stack = /** @type {import("./types.js").Stack} */ (this.stack);
    this.strips.show(this.pane, stack, layer, place, this.columns(stack));
    fill(this.panel,
      el("h3", {}, `Layer ${layer.layer}, head ${head}`),
      layer.patterns[place] ? el("p", { class: "tag" }, layer.patterns[place]) : null,
      this.picture,
      headFacts(layer, head),
      this.strips.root,
    );
    void this.preview(name, layer, head);
  }

  /**
   * @param {string} name name of the column to show
   * @param {Layer} layer
   * @param {number} head
   */
  async preview(name, layer, head) {
    if (!this.state) return;
    const grid = await paneGrid(this.app.page, this.pane, { ...this.state, join: 0 }, [{ layer: layer.layer, head }]);
    if (name === this.shownHead) this.heat.show(grid, this.state.scale, null, "");
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    const at = this.cards.findIndex((card) => card.button === document.activeElement);
    if (at < 0) return false;
    const across = getComputedStyle(/** @type {Element} */ (this.cards[0].button.parentElement)).gridTemplateColumns.split(" ").length;
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -across, ArrowDown: across }[event.key];
    const next = step === undefined ? undefined : this.cards[at + step];
    if (!next) return false;
    for (const card of this.cards) card.button.tabIndex = -1;
    next.button.tabIndex = 0;
    next.button.focus();
    return true;
  }
}
