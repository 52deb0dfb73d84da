/** Drawing of a heat map around and over its cells: lines, marks, strips and labels. */

import { css, ink } from "./color.js";
import { WRITES, labelParts, parts } from "./labels.js";

/** @typedef {import("./types.js").Grid} Grid */
/** @typedef {import("./types.js").Label} Label */

export const TURN = -Math.PI / 3;
export const STRIP = 16;

/**
 * @param {CanvasRenderingContext2D} context
 * @param {string} text
 * @param {number} room in pixels
 */
function shortened(context, text, room) {
  if (context.measureText(text).width <= room) return text;
  let letters = [...text];
  while (letters.length > 1 && context.measureText(`${letters.join("")}…`).width > room) letters = letters.slice(0, -1);
  return `${letters.join("")}…`;
}

/** @param {Label} label query token, with the token that the model writes next, if any */
export function writtenAfter({ writes }) {
  return writes ? ` ${WRITES} ${parts(writes).join("")}` : "";
}

/**
 * Draw the strips: on the left the sink share of each query, above a number of each key.
 * @param {import("./heat.js").HeatMap} heat
 * @param {CanvasRenderingContext2D} context
 * @param {Grid} grid
 * @param {number} right
 * @param {number} bottom
 */
export function paintStrips(heat, context, grid, right, bottom) {
  const { left, top, zoom, x, y } = heat;
  context.save();
  context.beginPath();
  context.rect(left - STRIP, top, STRIP, bottom - top);
  context.rect(left, top - STRIP, right - left, STRIP);
  context.clip();
  for (let query = Math.floor(y); heat.hasSink && query < grid.queries.length && top + (query - y) * zoom < bottom; query++) {
    context.fillStyle = css(grid.sink(query), heat.scale, grid.signed);
    context.fillRect(left - STRIP + 1, top + (query - y) * zoom, STRIP - 5, zoom + 0.5);
  }
  for (let key = Math.floor(x); heat.above && key < grid.keys.length && left + (key - x) * zoom < right; key++) {
    context.fillStyle = css(heat.above[key], "linear", true);
    context.fillRect(left + (key - x) * zoom, top - STRIP + 1, zoom + 0.5, STRIP - 5);
  }
  context.restore();
  if (!heat.hasSink) return;
  context.strokeStyle = ink("edge");
  context.strokeRect(left - STRIP + 0.5, top - 0.5, STRIP - 4, bottom - top + 1);
  context.save();
  context.translate(left - STRIP / 2, top - 6);
  context.rotate(TURN);
  context.font = `italic ${heat.font()}`;
  context.textBaseline = "middle";
  context.textAlign = "left";
  context.fillStyle = ink("faint");
  context.fillText("sink", 0, 0);
  context.restore();
}

/**
 * @param {import("./heat.js").HeatMap} heat
 * @param {CanvasRenderingContext2D} context
 * @param {number} left
 * @param {number} top
 * @param {number} right
 * @param {number} bottom
 */
export function paintLines(heat, context, left, top, right, bottom) {
  context.strokeStyle = ink("grid");
  context.lineWidth = 0.5;
  context.beginPath();
  for (let at = left + (Math.ceil(heat.x) - heat.x) * heat.zoom; at < right; at += heat.zoom) {
    context.moveTo(at, top);
    context.lineTo(at, bottom);
  }
  for (let at = top + (Math.ceil(heat.y) - heat.y) * heat.zoom; at < bottom; at += heat.zoom) {
    context.moveTo(left, at);
    context.lineTo(right, at);
  }
  context.stroke();
}

/**
 * @param {import("./heat.js").HeatMap} heat
 * @param {CanvasRenderingContext2D} context
 */
export function paintMarks(heat, context) {
  const { left, top, zoom, x, y, width, height } = heat;
  const at = heat.hovered;
  if (at) {
    context.fillStyle = ink("cross");
    context.fillRect(left, top + (at.query - y) * zoom, width, zoom);
    context.fillRect(left + (at.key - x) * zoom, top, zoom, height);
  }
  context.lineWidth = 2;
  context.strokeStyle = ink("ring");
  for (const { query, key } of heat.rings) {
    if (zoom >= 5) context.strokeRect(left + (key - x) * zoom + 1.5, top + (query - y) * zoom + 1.5, zoom - 3, zoom - 3);
  }
  if (heat.picked) {
    const side = Math.max(zoom, 6);
    const middle = [left + (heat.picked.key + 0.5 - x) * zoom, top + (heat.picked.query + 0.5 - y) * zoom];
    context.strokeStyle = ink("mark");
    context.strokeRect(middle[0] - side / 2, middle[1] - side / 2, side, side);
  }
}

/**
 * @param {import("./heat.js").HeatMap} heat
 * @param {CanvasRenderingContext2D} context
 * @param {Grid} grid
 * @param {number} right
 * @param {number} bottom
 */
export function paintLabels(heat, context, grid, right, bottom) {
  const { left, top, zoom, x, y } = heat;
  const at = heat.hovered ?? heat.picked;
  const every = Math.max(1, Math.ceil(11 / zoom));
  context.font = heat.font();
  context.textBaseline = "middle";
  for (let query = Math.floor(y); query < grid.queries.length && top + (query + 0.5 - y) * zoom < bottom; query++) {
    const place = top + (query + 0.5 - y) * zoom;
    if (place < top || !isLabelled(heat, query, every, at?.query)) continue;
    const end = left - 8 - (heat.hasSink ? STRIP : 0);
    const label = grid.queries[query];
    const rest = end - 4 - context.measureText(labelParts(label).join("")).width;
    const written = shortened(context, writtenAfter(label), Math.max(rest, (end - 4) / 2));
    const width = context.measureText(written).width;
    context.textAlign = "left";
    context.direction = "ltr";
    context.fillStyle = ink("faint");
    context.fillText(written, end - width, place);
    paintLabel(context, label, end - width, place, end - width - 4, true, at?.query === query);
  }
  for (let key = Math.floor(x); key < grid.keys.length && left + (key + 0.5 - x) * zoom < right; key++) {
    const place = left + (key + 0.5 - x) * zoom;
    if (place < left || !isLabelled(heat, key, every, at?.key)) continue;
    context.save();
    context.translate(place, top - 6 - (heat.above ? STRIP : 0));
    context.rotate(TURN);
    paintLabel(context, grid.keys[key], 0, 0, (top - 14 - (heat.above ? STRIP : 0)) / Math.sin(-TURN), false, at?.key === key);
    context.restore();
  }
}

/**
 * Hide labels that would touch the label under the pointer.
 * @param {import("./heat.js").HeatMap} heat
 * @param {number} index
 * @param {number} every
 * @param {number} [at]
 */
function isLabelled(heat, index, every, at) {
  if (every === 1 || index === at) return true;
  return index % every === 0 && (at === undefined || Math.abs(index - at) * heat.zoom >= 11);
}

/**
 * @param {CanvasRenderingContext2D} context
 * @param {Label} label
 * @param {number} px
 * @param {number} py
 * @param {number} room
 * @param {boolean} isEnd whether the text ends at the position
 * @param {boolean} isStrong
 */
function paintLabel(context, label, px, py, room, isEnd, isStrong) {
  const [blank, rest] = labelParts(label);
  const blankWidth = context.measureText(blank).width;
  const text = rest && shortened(context, rest, room - blankWidth);
  const width = context.measureText(text).width;
  const start = isEnd ? px - width - blankWidth : px;
  context.textAlign = "left";
  context.direction = "ltr";
  context.fillStyle = ink("blank");
  context.fillText(blank, label.rtl ? start + width : start, py);
  context.fillStyle = ink(isStrong ? "ink" : label.generated ? "accent" : "faint");
  context.direction = label.rtl ? "rtl" : "ltr";
  context.textAlign = label.rtl ? "right" : "left";
  context.fillText(text, label.rtl ? start + width : start + blankWidth, py);
}
