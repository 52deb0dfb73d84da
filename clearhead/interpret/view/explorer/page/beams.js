/** Beams view: the tree of the beam search, with the reason why each candidate was kept, finished or pruned. */

import { ink } from "./color.js";
import { Columns } from "./columns.js";
import { el, fill, fixed, refill, toggle } from "./dom.js";
import { tokenNode } from "./labels.js";

/** @typedef {import("./types.js").BeamNode} BeamNode */
/** @typedef {import("./types.js").Pane} Pane */

const LEFT = 12;
/** Least and largest width of a column. */
const WIDTHS = [130, 180];
const ROW = 34;
const TOP = 36;
const STATES = { kept: "kept", pruned: "pruned", finished: "finished" };

/**
 * @param {HTMLElement} root
 * @param {Pane} pane
 * @param {import("./types.js").App} app
 * @returns {import("./types.js").View}
 */
export function beams(root, pane, app) {
  return new Beams(root, pane, app);
}

class Beams {
  /**
   * @param {HTMLElement} root
   * @param {Pane} pane
   * @param {import("./types.js").App} app
   */
  constructor(root, pane, app) {
    this.app = app;
    this.pane = pane;
    const stage = el("div", { class: "stage" });
    this.panel = el("aside", { class: "panel", "aria-label": "one hypothesis" });
    root.append(el("div", { class: "split" }, stage, this.panel));
    this.columns = new Columns(stage, "search tree", (first, last) => this.draw(first, last));
    this.columns.root.classList.add("tree");
    this.built = "";
    /** @type {BeamNode[]} */
    this.nodes = [];
    /** @type {number[][]} */
    this.steps = [];
    this.rows = new Int32Array(0);
    this.chosen = -1;
    const at = (/** @type {Event} */ event) => {
      const button = /** @type {HTMLElement | null} */ (/** @type {Element} */ (event.target).closest("button.node"));
      return button ? Number(button.dataset.node) : -1;
    };
    const { board } = this.columns;
    board.addEventListener("pointerover", (event) => at(event) >= 0 && this.list(at(event)));
    board.addEventListener("focusin", (event) => at(event) >= 0 && this.list(at(event)));
    board.addEventListener("pointerleave", () => this.list(this.chosen));
    board.addEventListener("click", (event) => at(event) >= 0 && app.store.set({ node: at(event) }));
  }

  close() {
    this.columns.observer.disconnect();
  }

  /**
   * @param {import("./state.js").State} state
   * @param {Pane} pane
   */
  update(state, pane) {
    this.pane = pane;
    this.nodes = pane.sample.beams;
    refill(this.app.slot, toggle("Show pruned", state.pattern !== "kept", (isOn) => this.app.store.set({ pattern: isOn ? "" : "kept" })),
      el("span", { class: "tree-key", "aria-hidden": "true" }, el("span", { class: "kept" }, "kept"), el("span", { class: "pruned" }, "pruned"), el("span", { class: "finished" }, "finished")));
    this.arrange(state.pattern !== "kept");
    const best = this.nodes.findIndex((node) => node.rank === 0);
    this.chosen = this.nodes[state.node] ? state.node : Math.max(0, best);
    this.columns.fit(this.steps.length, WIDTHS, LEFT);
    this.list(this.chosen);
  }

  /**
   * Assign a row to each node: children near their parent, the path to the best result on top.
   * @param {boolean} isAll
   */
  arrange(isAll) {
    const { nodes } = this;
    const best = nodes.map((node) => node.rank ?? Infinity);
    for (let index = nodes.length - 1; index > 0; index--) {
      const { parent } = nodes[index];
      if (parent >= 0) best[parent] = Math.min(best[parent], best[index]);
    }
    this.best = best;
    this.rows = new Int32Array(nodes.length);
    this.steps = [];
    nodes.forEach((node, index) => {
      if (isAll || node.state !== "pruned" || best[index] < Infinity) (this.steps[node.step] ??= []).push(index);
    });
    this.steps = Array.from(this.steps, (step) => step ?? []);
    for (const step of this.steps) {
      step.sort((one, two) =>
        (this.rows[nodes[one].parent] ?? 0) - (this.rows[nodes[two].parent] ?? 0) || compare(best[one], best[two]) ||
        (nodes[two].score ?? -Infinity) - (nodes[one].score ?? -Infinity) || one - two);
      step.forEach((index, row) => { this.rows[index] = row; });
    }
    this.columns.board.style.height = `${TOP + ROW * Math.max(...this.steps.map((step) => step.length))}px`;
  }

  /**
   * @param {number} first
   * @param {number} last
   */
  draw(first, last) {
    const path = new Set(this.path(this.chosen));
    const shown = this.steps.slice(first, last).flat();
    const canvas = /** @type {HTMLCanvasElement} */ (el("canvas", { "aria-hidden": "true" }));
    canvas.style.left = `${this.x(first)}px`;
    const nodes = shown.map((index) => this.node(index, path.has(index)));
    const titles = Array.from({ length: last - first }, (_, at) => {
      const title = el("span", { class: "step" }, first + at === 0 ? "start" : `step ${first + at}`);
      title.style.left = `${this.x(first + at)}px`;
      return title;
    });
    fill(this.columns.board, canvas, ...titles, ...nodes);
    this.edges(canvas, first, last, path);
  }

  /** @param {number} step */
  x(step) {
    return LEFT + step * this.columns.width;
  }

  /**
   * @param {number} index
   * @param {boolean} isOnPath
   */
  node(index, isOnPath) {
    const node = this.nodes[index];
    const button = el("button", {
      type: "button", class: `node ${node.state}${isOnPath ? " path" : ""}${index === this.chosen ? " chosen" : ""}`, "data-node": index,
      "aria-label": `${node.token}, ${STATES[node.state]}${node.rank === null ? "" : `, result ${node.rank + 1}`}, score ${fixed(node.score ?? NaN)}`,
    }, node.rank === null ? null : el("span", { class: "rank" }, String(node.rank + 1)), tokenNode(node.token),
      el("small", {}, node.parent < 0 ? "" : fixed(Math.exp(node.logProbability ?? NaN), 2)));
    button.style.transform = `translate(${this.x(node.step)}px, ${TOP + this.rows[index] * ROW}px)`;
    return button;
  }

  /**
   * @param {HTMLCanvasElement} canvas
   * @param {number} first
   * @param {number} last
   * @param {Set<number>} path
   */
  edges(canvas, first, last, path) {
    const width = (last - first) * this.columns.width;
    const height = this.columns.board.clientHeight;
    canvas.width = width * devicePixelRatio;
    canvas.height = height * devicePixelRatio;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
    context.scale(devicePixelRatio, devicePixelRatio);
    context.translate(-this.x(first), 0);
    for (const index of this.steps.slice(first, last + 1).flat()) {
      const node = this.nodes[index];
      if (node.parent < 0) continue;
      const isOn = path.has(index);
      const parent = /** @type {HTMLElement | null} */ (this.columns.board.querySelector(`[data-node="${node.parent}"]`));
      const from = { x: this.x(node.step - 1) + (parent?.offsetWidth ?? this.columns.width - 26), y: TOP + this.rows[node.parent] * ROW + 14 };
      const to = { x: this.x(node.step), y: TOP + this.rows[index] * ROW + 14 };
      context.strokeStyle = ink(isOn ? "accent" : "edge");
      context.lineWidth = isOn ? 2.5 : 0.75 + 2 * Math.exp(node.logProbability ?? -9);
      context.setLineDash(node.state === "pruned" ? [3, 3] : []);
      context.beginPath();
      context.moveTo(from.x, from.y);
      context.bezierCurveTo(from.x + 16, from.y, to.x - 16, to.y, to.x, to.y);
      context.stroke();
    }
  }

  /**
   * @param {number} index
   * @returns {number[]} path from the root to the node
   */
  path(index) {
    const node = this.nodes[index];
    return node ? [...(node.parent < 0 ? [] : this.path(node.parent)), index] : [];
  }

  /** @param {number} index */
  list(index) {
    const node = this.nodes[index];
    if (!node) return;
    const path = this.path(index).map((at) => this.nodes[at]);
    const total = path.reduce((sum, one) => sum + (one.logProbability ?? 0), 0);
    /** @type {[string, string][]} */
    const facts = [
      ["state", STATES[node.state] + (node.reason ? `: ${node.reason}` : "")],
      ["score", fixed(node.score ?? NaN, 4)],
      ["probability of the token", fixed(Math.exp(node.logProbability ?? NaN), 4)],
      ["log-probability of all", fixed(total, 4)],
      ["step", String(node.step)],
    ];
    if (node.rank !== null) facts.unshift(["result", String(node.rank + 1)]);
    fill(this.panel, el("h3", {}, "Hypothesis"), el("p", { class: "hypothesis" }, el("bdi", {}, path.map((one) => one.token).join("").trim())),
      el("dl", { class: "facts" }, ...facts.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])));
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    const node = this.nodes[this.chosen];
    if (!node) return false;
    const step = this.steps[node.step];
    const place = step.indexOf(this.chosen);
    const children = (this.steps[node.step + 1] ?? []).filter((index) => this.nodes[index].parent === this.chosen);
    const next = { ArrowUp: step[place - 1], ArrowDown: step[place + 1], ArrowLeft: node.parent, ArrowRight: children[0] }[event.key];
    if (next === undefined || next < 0) return false;
    this.columns.reveal(this.nodes[next].step);
    this.app.store.set({ node: next });
    /** @type {HTMLElement | null} */ (this.columns.board.querySelector(`[data-node="${next}"]`))?.focus();
    return true;
  }
}

/**
 * @param {number} one
 * @param {number} two
 */
function compare(one, two) {
  return one === two ? 0 : one - two;
}
