/** Lines view: queries on the left, keys on the right, and a line for each large enough weight. */

import { css, ink, inkOn, theme } from "./color.js";
import { el, fill, fixed, refill } from "./dom.js";
import { maskWords } from "./facts.js";
import { combined, headOf, lastOfText, layerOf, paneGrid, rowOf, stackOf, turned } from "./grids.js";
import { attendsTo, labelOf, queryNodes, quoted, tokenNode } from "./labels.js";
import { keyTable } from "./matrix.js";

/** @typedef {import("./types.js").Grid} Grid */
/** @typedef {import("./types.js").Pane} Pane */
/** @typedef {import("./state.js").State} State */
/** @typedef {{ side: "query" | "key", index: number }} Focus */

const STEPS = 6;
const WIDEST = 3.5;

/**
 * @param {HTMLElement} root
 * @param {Pane} pane
 * @param {import("./types.js").App} app
 * @returns {import("./types.js").View}
 */
export function lines(root, pane, app) {
  return new Lines(root, pane, app);
}

class Lines {
  /**
   * @param {HTMLElement} root
   * @param {Pane} pane
   * @param {import("./types.js").App} app
   */
  constructor(root, pane, app) {
    this.app = app;
    this.left = el("ol", { class: "line-tokens left", "aria-label": "queries" });
    this.right = el("ol", { class: "line-tokens right", "aria-label": "keys" });
    this.canvas = /** @type {HTMLCanvasElement} */ (el("canvas", { "aria-hidden": "true" }));
    this.middle = el("div", { class: "line-canvas" }, this.canvas);
    this.root = el("div", { class: "lines" }, this.left, this.middle, this.right);
    this.note = el("p", { class: "note" });
    this.panel = el("aside", { class: "panel", "aria-label": "the token under the pointer" });
    root.append(el("div", { class: "split" }, el("div", { class: "stage" }, this.root), this.panel));
    /** @type {Focus | null} */
    this.hovered = null;
    /** @type {Grid[]} */
    this.grids = [];
    /** @type {number[]} */
    this.heads = [];
    this.shown = "";
    this.request = 0;
    this.pane = pane;
    for (const side of /** @type {const} */ (["query", "key"])) this.listen(side);
    /** @type {{ from: number, width: number, height: number, places: { top: number, step: number }[] } | null} */
    this.place = null;
    this.scrolled = () => {
      this.place = null;
      this.draw();
    };
    this.observer = new ResizeObserver(this.scrolled);
    this.observer.observe(this.root);
    addEventListener("scroll", this.scrolled, { passive: true });
  }

  close() {
    this.observer.disconnect();
    removeEventListener("scroll", this.scrolled);
    cancelAnimationFrame(this.request);
  }

  /** @param {"query" | "key"} side */
  listen(side) {
    const list = side === "query" ? this.left : this.right;
    const at = (/** @type {Event} */ event) => {
      const item = /** @type {Element} */ (event.target).closest("li");
      return item ? Number(item.dataset.index) : -1;
    };
    const hover = (/** @type {Event} */ event) => this.setHovered(at(event) < 0 ? null : { side, index: at(event) });
    list.addEventListener("pointerover", hover);
    list.addEventListener("focusin", hover);
    list.addEventListener("pointerleave", () => this.setHovered(null));
    list.addEventListener("click", (event) => at(event) >= 0 && this.pick({ side, index: at(event) }));
    list.addEventListener("keydown", (event) => {
      const step = { ArrowUp: -1, ArrowDown: 1 }[event.key];
      const next = step && list.children[at(event) + step];
      if (next) {
        /** @type {HTMLElement} */ (next.firstElementChild).focus();
        event.preventDefault();
      }
    });
  }

  /** @param {Focus} focus */
  pick({ side, index }) {
    const label = (side === "query" ? this.grids[0].queries : this.grids[0].keys)[index];
    const { state } = this.app.store;
    const other = side === "query" ? "key" : "query";
    const isSame = state[side] === label.members[0] && state[other] < 0;
    this.app.store.set({ [side]: isSame ? -1 : label.members[0], [other]: -1 });
  }

  /**
   * @param {State} state
   * @param {Pane} pane
   */
  async update(state, pane) {
    this.pane = pane;
    this.state = state;
    const stack = stackOf(pane.sample, state);
    const layer = layerOf(stack, state);
    const chosen = state.heads === "" ? [] : state.heads.split(",").map(Number);
    const heads = layer.heads.filter((head) => chosen.includes(head));
    this.heads = heads.length ? heads : [headOf(layer, state)];
    this.controls(layer.heads, state);
    const shown = [pane.name, stack.stack, stack.measure, layer.layer, this.heads, state.join].join();
    if (shown !== this.shown) {
      this.shown = shown;
      const grids = await Promise.all(this.heads.map((head) => paneGrid(this.app.page, pane, state, [{ layer: layer.layer, head }])));
      if (shown !== this.shown) return;
      this.grids = grids;
      this.build();
    }
    fill(this.note, pane.minus ? "Blue: more; orange: less. " : "", layer.sink ? "A share of the attention goes to no token (sink); it is next to each query. " : "",
      `Mask: ${maskWords(layer.mask)}${layer.bias ? `; ${layer.bias}` : ""}`);
    this.draw();
    this.shade();
    this.list();
  }

  /** Show the numbers of the token under the pointer. */
  list() {
    const [grid] = this.grids;
    if (!grid) return;
    const focus = this.focus() ?? { side: /** @type {const} */ ("query"), index: lastOfText(rowOf(this.pane.sample, stackOf(this.pane.sample, this.app.store.state).queries), grid.queries) };
    const label = (focus.side === "query" ? grid.queries : grid.keys)[focus.index];
    const all = this.grids.length === 1 ? grid : combined(this.grids, "max");
    const asked = focus.side === "query" ? all : turned(all);
    fill(this.panel,
      el("h3", {}, ...(focus.side === "query" ? attendsTo(label) : ["What attends to ", quoted(label.text)])),
      this.grids.length > 1 ? el("p", { class: "note" }, "the largest weight of the drawn heads") : null,
      keyTable(asked, focus.index, (index) => this.pick({ side: focus.side === "query" ? "key" : "query", index })),
      this.note,
    );
  }

  /**
   * @param {number[]} heads
   * @param {State} state
   */
  controls(heads, state) {
    const chips = heads.map((head) => {
      const isOn = this.heads.includes(head);
      const next = isOn ? this.heads.filter((one) => one !== head) : [...this.heads, head];
      return el("button", {
        type: "button", class: `chip small pattern-${head % 8}`, "aria-pressed": String(isOn), "aria-label": `head ${head}`,
        onclick: () => next.length && this.app.store.set(next.length === 1 ? { heads: "", head: next[0] } : { heads: next.join() }),
      }, el("span", { class: "dot", "aria-hidden": "true" }), String(head));
    });
    const range = /** @type {HTMLInputElement} */ (el("input", {
      type: "range", min: 1, max: 50, value: state.least, oninput: () => this.app.store.set({ least: Number(range.value) }),
    }));
    refill(this.app.slot,
      heads.length > 1 ? el("div", { class: "chips", role: "group", "aria-label": "heads to draw" }, el("span", { class: "field-name" }, "Heads"), ...chips) : null,
      el("label", { class: "field" }, el("span", { class: "field-name" }, "from weight"), range, el("output", {}, (state.least / 100).toFixed(2))),
    );
  }

  build() {
    const grid = combined(this.grids, "max");
    this.root.classList.toggle("dense", grid.queries.length > 40 || grid.keys.length > 40);
    /**
     * @param {import("./types.js").Label[]} row
     * @param {boolean} isQuery
     */
    const items = (row, isQuery) => row.map((label, index) => {
      const share = isQuery ? grid.sink(index) : NaN;
      return el("li", { "data-index": index },
        el("button", { type: "button", class: label.generated ? "plain generated" : "plain" },
          share >= 0.005 ? el("small", { class: "sink-share" }, `sink ${fixed(share, 2)}`) : null, ...(isQuery ? queryNodes(label) : [tokenNode(label.text)]), el("small", { class: "share" })));
    });
    fill(this.left, ...items(grid.queries, true));
    fill(this.right, ...items(grid.keys, false));
    this.place = null;
  }

  /** @returns {Focus | null} */
  focus() {
    if (this.hovered || !this.state || !this.grids[0]) return this.hovered;
    const query = labelOf(this.grids[0].queries, this.state.query);
    const key = labelOf(this.grids[0].keys, this.state.key);
    if (query >= 0) return { side: "query", index: query };
    return key >= 0 ? { side: "key", index: key } : null;
  }

  /** @param {Focus | null} focus */
  setHovered(focus) {
    if (focus?.side === this.hovered?.side && focus?.index === this.hovered?.index) return;
    this.hovered = focus;
    this.draw();
    this.shade();
    this.list();
  }

  /** Shade the tokens at the other end of the lines. */
  shade() {
    const focus = this.focus();
    const [grid] = this.grids;
    if (!grid) return;
    const numbers = { query: new Float32Array(grid.queries.length).fill(NaN), key: new Float32Array(grid.keys.length).fill(NaN) };
    const row = new Float32Array(grid.keys.length);
    for (const one of focus ? this.grids : []) {
      for (let query = 0; query < grid.queries.length; query++) {
        if (focus?.side === "query" && focus.index !== query) continue;
        one.row(query, row);
        row.forEach((value, key) => {
          if (focus?.side === "key" && focus.index !== key) return;
          const [side, index] = focus?.side === "query" ? /** @type {const} */ (["key", key]) : /** @type {const} */ (["query", query]);
          if (!(Math.abs(numbers[side][index]) >= Math.abs(value))) numbers[side][index] = value;
        });
      }
    }
    for (const [side, list] of /** @type {const} */ ([["query", this.left], ["key", this.right]])) {
      [...list.children].forEach((item, index) => {
        const value = numbers[side][index];
        const isShown = Math.abs(value) >= 0.005;
        const button = /** @type {HTMLElement} */ (item.firstElementChild);
        const look = isShown ? `${value} ${theme()}` : "";
        button.classList.toggle("focus", focus?.side === side && focus.index === index);
        if (look === (button.dataset.look ?? "")) return;
        button.dataset.look = look;
        button.style.background = isShown ? css(value, "root", grid.signed) : "";
        button.style.color = isShown ? inkOn(value, "root", grid.signed) : "";
        /** @type {HTMLElement} */ (button.querySelector(".share")).textContent = isShown ? fixed(value, 2) : "";
      });
    }
  }

  draw() {
    if (this.request) return;
    this.request = requestAnimationFrame(() => {
      this.request = 0;
      if (this.grids[0] && this.root.isConnected) this.paint();
    });
  }

  /** Measure the visible area and the positions of the tokens in it. */
  measure() {
    const bounds = this.middle.getBoundingClientRect();
    const from = Math.max(0, -bounds.top);
    const places = [this.left, this.right].map((list) => {
      const first = list.firstElementChild?.getBoundingClientRect();
      return { top: (first?.top ?? 0) - bounds.top - from + (first?.height ?? 0) / 2, step: first?.height ?? 0 };
    });
    return { from, width: bounds.width, height: Math.min(innerHeight, bounds.height - from), places };
  }

  /** Draw the visible lines on a canvas of the size of the window. */
  paint() {
    this.place ??= this.measure();
    const { width, height, from, places } = this.place;
    if (height <= 0 || width === 0) return;
    const { canvas } = this;
    const size = [Math.round(width * devicePixelRatio), Math.round(height * devicePixelRatio)];
    if (canvas.width !== size[0] || canvas.height !== size[1]) [canvas.width, canvas.height] = size;
    canvas.style.height = `${height}px`;
    canvas.style.transform = `translateY(${from}px)`;
    const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
    context.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
    context.clearRect(0, 0, width, height);
    this.grids.forEach((grid, index) => this.paintGrid(context, grid, this.heads[index], places, width, height));
  }

  /**
   * @param {CanvasRenderingContext2D} context
   * @param {Grid} grid
   * @param {number} head
   * @param {{ top: number, step: number }[]} places position of the first token on each side, and distance to the next one
   * @param {number} width
   * @param {number} height
   */
  paintGrid(context, grid, head, [left, right], width, height) {
    const focus = this.focus();
    const least = focus ? 0.01 : (this.state?.least ?? 5) / 100;
    /** @type {[Path2D, Path2D][]} */
    const paths = Array.from({ length: STEPS }, () => [new Path2D(), new Path2D()]);
    const row = new Float32Array(grid.keys.length);
    for (let query = 0; query < grid.queries.length; query++) {
      if (focus?.side === "query" && focus.index !== query) continue;
      const start = left.top + query * left.step;
      grid.row(query, row);
      for (let key = 0; key < row.length; key++) {
        const size = Math.abs(row[key]);
        if (!(size >= least) || (focus?.side === "key" && focus.index !== key)) continue;
        const end = right.top + key * right.step;
        if (Math.max(start, end) < -20 || Math.min(start, end) > height + 20) continue;
        const path = paths[Math.min(STEPS - 1, Math.floor(size * STEPS))][row[key] < 0 ? 1 : 0];
        path.moveTo(0, start);
        path.bezierCurveTo(width * 0.4, start, width * 0.6, end, width, end);
      }
    }
    const color = ink(this.grids.length > 1 ? `pattern-${head % 8}` : "accent");
    paths.forEach((pair, step) => pair.forEach((path, isLess) => {
      const share = (step + 0.5) / STEPS;
      context.globalAlpha = 0.12 + 0.8 * share;
      context.lineWidth = 0.6 + WIDEST * share;
      context.strokeStyle = isLess ? ink("mark") : color;
      context.stroke(path);
    }));
  }
}
