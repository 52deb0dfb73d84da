/** Lens view: the predictions of the model if it ended after each layer. */

import { array } from "./arrays.js";
import { css, ink, inkOn } from "./color.js";
import { Columns } from "./columns.js";
import { el, fill, fixed, refill, segmented, withSign } from "./dom.js";
import { rowOf } from "./grids.js";
import { labels, quoted, tokenNode } from "./labels.js";

/** @typedef {import("./types.js").Pane} Pane */

const LEFT = 92;
/** Least and largest width of a column. */
const WIDTHS = [72, 120];

/**
 * @param {HTMLElement} root
 * @param {Pane} pane
 * @param {import("./types.js").App} app
 * @returns {import("./types.js").View}
 */
export function lens(root, pane, app) {
  return new LensView(root, pane, app);
}

class LensView {
  /**
   * @param {HTMLElement} root
   * @param {Pane} pane
   * @param {import("./types.js").App} app
   */
  constructor(root, pane, app) {
    this.app = app;
    this.pane = pane;
    const stage = el("div", { class: "stage" });
    this.panel = el("aside", { class: "panel", "aria-label": "predictions at one position" });
    root.append(el("div", { class: "split" }, stage, this.panel));
    this.columns = new Columns(stage, "predictions by layer and position: arrow keys move", (first, last) => this.draw(first, last));
    this.depth = 0;
    this.position = 0;
    this.largest = 1;
    this.showsFollowed = false;
    const { board } = this.columns;
    const at = (/** @type {Event} */ event) => /** @type {HTMLElement | null} */ (/** @type {Element} */ (event.target).closest("td"));
    board.addEventListener("pointerover", (event) => {
      const cell = at(event);
      if (cell) this.list(Number(cell.dataset.depth), Number(cell.dataset.position));
    });
    board.addEventListener("pointerleave", () => this.list(this.depth, this.position));
    board.addEventListener("click", (event) => {
      const cell = at(event);
      if (cell) app.store.set({ layer: Number(cell.dataset.depth) - 1, query: Number(cell.dataset.position) });
    });
  }

  close() {
    this.columns.observer.disconnect();
  }

  /**
   * @param {import("./state.js").State} state
   * @param {Pane} pane
   */
  async update(state, pane) {
    this.pane = pane;
    const { lens: made } = pane.sample;
    if (!made) return;
    this.lens = made;
    this.entries = await array(made.entries, Int32Array);
    this.probabilities = await array(made.probabilities, Float32Array);
    const row = labels(rowOf(pane.sample, made.row), false);
    const count = this.entries.length / (made.top * made.layers.length);
    this.row = count === row.length ? row : [{ text: "(the whole text)", members: [0], generated: false, rtl: false }];
    this.targets = made.targetProbabilities === null ? null : await array(made.targetProbabilities, Float32Array);
    this.followed = made.followed === null ? null : await array(made.followed, Float32Array);
    this.largest = Math.max(1e-6, ...[...(this.followed ?? [])].filter(Number.isFinite).map(Math.abs));
    this.showsFollowed = this.followed !== null && state.cells === "followed";
    refill(this.app.slot, this.followed ? segmented("cells", [["prediction", "the prediction"], ["followed", made.followedName]], state.cells, (value) => this.app.store.set({ cells: value })) : null);
    // Layers count from 0; the embedding is below them.
    this.depth = Math.max(0, Math.min(state.layer + 1, made.layers.length - 1));
    this.position = state.query < 0 ? 0 : Math.min(state.query, this.row.length - 1);
    this.columns.fit(this.row.length, WIDTHS, LEFT);
    this.list(this.depth, this.position);
  }

  /**
   * @param {number} depth
   * @param {number} position
   * @param {number} rank
   */
  at(depth, position, rank) {
    const { lens: made, row, entries, probabilities } = this;
    if (!made || !row || !entries || !probabilities) return { text: "", entry: -1, probability: NaN };
    const place = (depth * row.length + position) * made.top + rank;
    return { text: made.vocabulary[entries[place]], entry: entries[place], probability: probabilities[place] };
  }

  /**
   * @param {number} first
   * @param {number} last
   */
  draw(first, last) {
    const { lens: made, row } = this;
    if (!made || !row || !this.probabilities) return;
    const places = Array.from({ length: Math.max(0, last - first) }, (_, index) => first + index);
    const hasProbabilities = made.layers.length <= 9;
    const lines = made.layers.map((name, depth) => {
      const cells = places.map((position) => {
        const { text, entry, probability } = this.at(depth, position, 0);
        const isTarget = made.targets?.[position] === entry;
        const isChosen = depth === this.depth && position === this.position;
        const difference = this.followed?.[depth * row.length + position] ?? NaN;
        const value = this.showsFollowed ? difference / this.largest : probability;
        const content = this.showsFollowed ? [withSign(difference)] : [tokenNode(text), hasProbabilities ? el("small", {}, percent(probability)) : null];
        const cell = el("td", { "data-depth": depth, "data-position": position, class: `${isTarget && !this.showsFollowed ? "hit" : ""}${isChosen ? " chosen" : ""}` }, ...content);
        cell.style.background = css(value, "linear", this.showsFollowed);
        cell.style.color = inkOn(value, "linear", this.showsFollowed);
        return cell;
      });
      return el("tr", {}, el("th", { scope: "row" }, layerName(name)), ...cells);
    });
    const heads = places.map((position) => el("th", { scope: "col" }, tokenNode(row[position].text)));
    const targets = places.map((position) => {
      const target = made.targets?.[position] ?? -1;
      return el("td", {}, target >= 0 ? tokenNode(made.vocabulary[target]) : "");
    });
    const table = el("table", { class: hasProbabilities ? "lens tall" : "lens" },
      el("caption", { class: "unseen" }, this.showsFollowed ? `the log-probability of ${made.followedName}, after each layer, by position` : "the most probable token after each layer, by position"),
      el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "reads"), ...heads)),
      el("tbody", {}, ...lines.reverse()),
      made.targets ? el("tfoot", {}, el("tr", {}, el("th", { scope: "row" }, "next token"), ...targets)) : null,
    );
    table.style.marginLeft = `${first * this.columns.width}px`;
    table.style.width = `${LEFT + places.length * this.columns.width}px`;
    fill(this.columns.board, table);
  }

  /**
   * @param {number} depth
   * @param {number} position
   */
  list(depth, position) {
    const { lens: made, row } = this;
    if (!made || !row) return;
    const rows = Array.from({ length: made.top }, (_, rank) => {
      const { text, entry, probability } = this.at(depth, position, rank);
      const bar = el("span", { class: "meter", "aria-hidden": "true" });
      bar.style.setProperty("--share", String(probability));
      return el("tr", { class: made.targets?.[position] === entry ? "chosen" : null }, el("td", {}, tokenNode(text)), el("td", { class: "number" }, bar, fixed(probability, 4)));
    });
    const target = made.targets?.[position] ?? -1;
    const canvas = /** @type {HTMLCanvasElement} */ (el("canvas", { class: "curve", role: "img", "aria-label": "probability of what follows, by layer" }));
    const curve = target >= 0 && this.targets ? made.layers.map((_, index) => this.targets?.[index * row.length + position] ?? NaN) : null;
    const difference = this.followed?.[depth * row.length + position];
    fill(this.panel,
      el("h3", {}, `After ${depth ? "" : "the "}${layerName(made.layers[depth])}`),
      el("p", {}, `Position ${position}, reading `, quoted(row[position].text)),
      difference === undefined ? null : el("p", {}, `Log-probability of ${made.followedName}: ${withSign(difference)}`),
      el("table", { class: "keys" }, el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "prediction"), el("th", { scope: "col", class: "number" }, "probability"))), el("tbody", {}, ...rows)),
      curve ? el("div", {}, el("p", {}, "The next token is ", quoted(made.vocabulary[target]), `: the model gives it ${percent(curve[depth])} here, and ${percent(curve.at(-1) ?? NaN)} after its last layer.`),
        el("h4", {}, "Probability of ", quoted(made.vocabulary[target]), " after each layer"), canvas) : null,
    );
    if (curve) paintCurve(canvas, curve, depth, made.layers);
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    const move = { ArrowUp: [1, 0], ArrowDown: [-1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!move || !this.lens || !this.row) return false;
    const depth = Math.max(0, Math.min(this.lens.layers.length - 1, this.depth + move[0]));
    const position = Math.max(0, Math.min(this.row.length - 1, this.position + move[1]));
    this.columns.reveal(position);
    const { text, probability } = this.at(depth, position, 0);
    this.app.announce(`${layerName(this.lens.layers[depth])}, after “${this.row[position].text}”: “${text}”, ${fixed(probability)}`);
    this.app.store.set({ layer: depth - 1, query: position });
    return true;
  }
}

/** @param {string} name "embedding", or the number of a layer */
function layerName(name) {
  return /^\d+$/.test(name) ? `layer ${name}` : name;
}

/** @param {number} share */
function percent(share) {
  return `${share >= 0.0995 ? fixed(100 * share, 0) : fixed(100 * share, 1)} %`;
}

/**
 * Draw a curve over the layers, with both axes.
 * @param {HTMLCanvasElement} canvas
 * @param {number[]} values numbers from 0 to 1
 * @param {number} marked
 * @param {string[]} names
 */
function paintCurve(canvas, values, marked, names) {
  const [width, height, left, bottom] = [canvas.clientWidth || 280, canvas.clientHeight || 120, 30, 22];
  canvas.width = width * devicePixelRatio;
  canvas.height = height * devicePixelRatio;
  const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  context.scale(devicePixelRatio, devicePixelRatio);
  const x = (/** @type {number} */ index) => left + 6 + (index / Math.max(1, values.length - 1)) * (width - left - 12);
  const y = (/** @type {number} */ value) => height - bottom - value * (height - bottom - 8);
  context.font = `12px ${getComputedStyle(canvas).fontFamily}`;
  context.fillStyle = ink("faint");
  context.strokeStyle = ink("grid");
  context.textAlign = "right";
  context.textBaseline = "middle";
  for (const value of [0, 0.5, 1]) {
    context.fillText(String(value), left - 6, y(value));
    context.strokeRect(left, y(value), width - left, 0);
  }
  const every = Math.ceil(names.length / 10);
  names.forEach((name, index) => {
    context.textAlign = index === 0 ? "left" : index === names.length - 1 ? "right" : "center";
    const text = index === names.length - 1 ? layerName(name) : name;
    if (index === 0 || index === names.length - 1 || (index % every === 0 && x(index) > left + 86 && x(index) < width - 60)) context.fillText(text, index === 0 ? left : index === names.length - 1 ? width : x(index), height - 8);
  });
  context.strokeStyle = context.fillStyle = ink("accent");
  context.lineWidth = 2;
  context.beginPath();
  values.forEach((value, index) => context.lineTo(x(index), y(value)));
  context.stroke();
  context.beginPath();
  context.arc(x(marked), y(values[marked]), 4, 0, 7);
  context.fill();
}
