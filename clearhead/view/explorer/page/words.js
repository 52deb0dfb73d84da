/** What a view shows, in a sentence: what its rows and columns are, and who looks at what. */

import { stackOf } from "./grids.js";

/** @typedef {import("./types.js").Sample} Sample */

/**
 * @param {string} view
 * @param {Sample} sample
 * @param {import("./state.js").State} state
 */
export function inWords(view, sample, state) {
  if (view === "lens") return "Columns are the tokens that are read, rows the layers, the first one below: what the model would predict if it ended there.";
  if (view === "beams") return "Steps of the search from left to right: each box is a token that it considered, with its probability.";
  if (!sample.attentions.length) return "";
  const stack = view === "alignment" ? "decoder.memory" : stackOf(sample, state).stack;
  const looks = lookWords(stack, sample.attentions.some((one) => one.stack !== "decoder.self"));
  /** @type {Record<string, string>} */
  const starts = {
    overview: "Each square is a head; its rows are the tokens that look, its columns those that are looked at:",
    matrix: "Rows are the tokens that look, columns those that are looked at:",
    alignment: "Rows are the tokens that look, columns those that are looked at:",
    lines: "Lines lead from the tokens that look, on the left, to those that are looked at, on the right:",
    token: "One token in every layer, where it looks and who looks at it:",
    neuron: "How one token comes to look at another:",
  };
  return `${starts[view] ?? ""} ${looks}.`;
}

/**
 * @param {string} stack
 * @param {boolean} hasTwo whether another stack reads another text
 */
function lookWords(stack, hasTwo) {
  if (stack === "encoder.self") return "each token of the text that is read looks at tokens of the same text";
  if (stack === "decoder.memory") return "each token that is written looks at tokens of the text that is read";
  return hasTwo ? "each token that is written looks at itself and those before it" : "each token of the text looks at itself and those before it";
}
