/** One sentence about a view: its rows and columns, and the tokens that look at each other. */

import { stackOf } from "./grids.js";
import { WRITES } from "./labels.js";

/** @typedef {import("./types.js").Sample} Sample */

/**
 * @param {string} view
 * @param {Sample} sample
 * @param {import("./state.js").State} state
 */
export function inWords(view, sample, state) {
  if (view === "lens") return "Columns are tokens, rows are layers from bottom to top. Each cell is the prediction if the model ended after that layer.";
  if (view === "beams") return "Steps of the search from left to right. Each box is a candidate token with its probability.";
  if (!sample.attentions.length) return "";
  const stack = view === "alignment" ? "decoder.memory" : stackOf(sample, state).stack;
  const looks = lookWords(sample, stack);
  const next = stack === "decoder.self" && sample.rows.decoder?.writes?.length && ["overview", "matrix", "lines"].includes(view)
    ? ` After ${WRITES} is the token that the model writes next.` : "";
  /** @type {Record<string, string>} */
  const starts = {
    overview: "Each square is a head; its rows are queries, its columns are keys:",
    matrix: "Rows are queries, columns are keys:",
    alignment: "Rows are queries, columns are keys:",
    lines: "Lines go from the queries on the left to the keys on the right:",
    token: "One token in every layer, with the tokens that it looks at and that look at it:",
    neuron: "The computation of one weight:",
  };
  return `${starts[view] ?? ""} ${looks}.${next}`;
}

/**
 * @param {Sample} sample
 * @param {string} stack
 */
function lookWords(sample, stack) {
  if (stack === "encoder.self") return "each token of the text looks at tokens of the same text";
  const isSelf = stack === "decoder.self";
  const query = !isSelf && sample.rows.written ? "each token that is written" : "each token that the decoder reads";
  if (!isSelf) return `${query} looks at tokens of the source text`;
  const hasTwo = sample.attentions.some((one) => one.stack !== "decoder.self");
  return `${hasTwo ? query : "each token of the text"} looks at itself and earlier tokens`;
}
