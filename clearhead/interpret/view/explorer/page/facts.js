/** Facts about one head: mask and bias of its layer, and its numbers compared with those of all heads. */

import { ink } from "./color.js";
import { el, fill, short } from "./dom.js";

/** @typedef {import("./types.js").Layer} Layer */
/** @typedef {import("./types.js").Pane} Pane */
/** @typedef {import("./types.js").Stack} Stack */

/**
 * Return a number of a head; in a pane of differences, the difference.
 * @param {Pane} pane
 * @param {Stack | undefined} stack
 * @param {Layer} layer
 * @param {number} place
 * @param {string} name
 */
export function headNumbers(pane, stack, layer, place, name) {
  const value = layer.values[name]?.[place] ?? NaN;
  if (pane.minus === null || !stack) return value;
  const other = pane.minus.attentions.find((one) => one.stack === stack.stack && one.measure === stack.measure);
  const same = other?.layers.find((one) => one.layer === layer.layer);
  return value - (same?.values[name]?.[place] ?? NaN);
}

/**
 * @param {Layer} layer
 * @param {number} head
 */
export function headFacts(layer, head) {
  const share = layer.numHeads / layer.numKvHeads;
  const first = Math.floor(head / share) * share;
  /** @type {[string, string][]} */
  const facts = [["mask", maskWords(layer.mask)]];
  if (share > 1) facts.push(["keys and values", `shared by heads ${first}–${first + share - 1}`]);
  if (layer.sink) facts.push(["sink", "a share of the attention goes to no token"]);
  if (layer.bias) facts.push(["score bias", layer.bias]);
  facts.push(["numbers", head in layer.exact ? "exact (float32)" : "within 0.0005"]);
  return el("dl", { class: "facts" }, ...facts.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
}

/** @param {string} mask */
export function maskWords(mask) {
  return mask === "none" ? "none: every token is visible" : mask;
}

/** One strip per column of numbers, with a tick for every head and a mark for this head. */
export class Strips {
  constructor() {
    this.root = el("div", { class: "strips" });
  }

  /**
   * @param {Pane} pane
   * @param {Stack} stack
   * @param {Layer} layer
   * @param {number} place
   * @param {import("./types.js").Column[]} columns
   */
  show(pane, stack, layer, place, columns) {
    const width = this.root.clientWidth || 280;
    /** @type {(() => void)[]} */
    const canvases = [];
    const own = columns.filter((column) => !Number.isNaN(headNumbers(pane, stack, layer, place, column.name)));
    fill(this.root, ...own.map((column) => {
      const value = headNumbers(pane, stack, layer, place, column.name);
      const all = stack.layers.flatMap((one) => one.heads.map((_, at) => headNumbers(pane, stack, one, at, column.name)));
      const known = all.filter((number) => !Number.isNaN(number));
      const above = known.filter((number) => number > value).length;
      const canvas = /** @type {HTMLCanvasElement} */ (el("canvas", { "aria-hidden": "true" }));
      canvases.push(() => paintStrip(canvas, width, known, value));
      return el("div", { class: "strip", title: column.description },
        el("span", { class: "strip-name" }, column.title),
        el("span", { class: "strip-value" }, short(value)),
        canvas,
        el("small", { class: "strip-note" }, column.description),
        el("span", { class: "unseen" }, `rank ${above + 1} of ${known.length}`),
      );
    }));
    for (const paint of canvases) paint();
  }
}

/**
 * @param {HTMLCanvasElement} canvas
 * @param {number} width
 * @param {number[]} all
 * @param {number} value
 */
function paintStrip(canvas, width, all, value) {
  canvas.width = width * devicePixelRatio;
  canvas.height = 14 * devicePixelRatio;
  const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  context.scale(devicePixelRatio, devicePixelRatio);
  const low = Math.min(0, ...all);
  const high = Math.max(...all, low + 1e-9);
  const at = (/** @type {number} */ number) => 2 + ((number - low) / (high - low)) * (width - 4);
  context.fillStyle = ink("edge");
  context.fillRect(0, 7, width, 1);
  context.globalAlpha = 0.45;
  context.fillStyle = ink("faint");
  for (const number of all) context.fillRect(at(number) - 0.5, 3, 1, 9);
  if (Number.isNaN(value)) return;
  context.globalAlpha = 1;
  context.fillStyle = ink("accent");
  context.beginPath();
  context.arc(at(value), 7.5, 4.5, 0, 7);
  context.fill();
}
