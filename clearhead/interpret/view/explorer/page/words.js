/** One sentence about a view: what a row, a column and a dark cell mean. */

import { theme } from "./color.js";
import { stackOf } from "./grids.js";
import { WRITES } from "./labels.js";

/** @typedef {import("./types.js").Sample} Sample */

/**
 * @param {string} view
 * @param {Sample} sample
 * @param {import("./state.js").State} state
 */
export function inWords(view, sample, state) {
  // The scale begins with the colour of the page, so large weights are bright in the dark theme.
  const dark = theme() === "dark" ? "bright" : "dark";
  if (view === "lens") return `Columns are positions, rows are layers; each cell is the prediction if the model ended there, ${dark} where its probability is high.`;
  if (view === "beams") return "Each column is one step of the search; each box is a candidate token with its probability.";
  if (!sample.attentions.length) return "";
  const stack = view === "alignment" ? "decoder.memory" : stackOf(sample, state).stack;
  const { row, keys, during } = roles(sample, stack);
  const writes = stack === "decoder.self" && sample.rows.decoder?.writes?.length && ["overview", "matrix", "lines"].includes(view)
    ? ` After ${WRITES} is the token that the model writes next.` : "";
  /** @type {Record<string, string>} */
  const sentences = {
    overview: `Each square is one head: a row is ${row}, and ${dark} cells are the ${keys} that it attends to.`,
    matrix: `Each row is ${row}; ${dark} cells are the ${keys} that it attends to${during}.`,
    alignment: `Each row is ${row}; ${dark} cells are the ${keys} that it attends to${during}. A ring marks the largest weight.`,
    lines: `Each line leads from ${row} on the left to one of the ${keys} on the right; a thicker line is a larger weight.`,
    token: `One token in every layer: each row is a layer, each column a token, and ${dark} cells are large weights.`,
    neuron: "The computation of one weight: each column is one dimension of the query, the key and their product.",
  };
  return sentences[view] + writes;
}

/**
 * Names of the rows and columns of an attention.
 * @param {Sample} sample
 * @param {string} stack
 */
function roles(sample, stack) {
  if (stack === "encoder.self") return { row: "a token of the text", keys: "tokens of the same text", during: "" };
  if (stack === "decoder.self") {
    const hasTwo = sample.attentions.some((one) => one.stack !== "decoder.self");
    return { row: hasTwo ? "a token that the decoder reads" : "a token of the text", keys: "tokens up to it", during: "" };
  }
  const isWritten = sample.rows.written !== undefined;
  return { row: isWritten ? "one step of the decoder" : "a token that the decoder reads", keys: "source tokens", during: isWritten ? " while it writes the token on the left" : "" };
}
