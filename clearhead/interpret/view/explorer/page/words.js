/** What a view shows, in a sentence: what its rows and columns are, and who looks at what. */

import { stackOf } from "./grids.js";
import { WRITES } from "./labels.js";

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
  const looks = lookWords(sample, stack);
  const next = stack === "decoder.self" && sample.rows.decoder?.writes?.length && ["overview", "matrix", "lines"].includes(view)
    ? ` After ${WRITES} is the token that the model writes next.` : "";
  /** @type {Record<string, string>} */
  const starts = {
    overview: "Each square is a head; its rows are the tokens that look, its columns those that are looked at:",
    matrix: "Rows are the tokens that look, columns those that are looked at:",
    alignment: "Rows are the tokens that look, columns those that are looked at:",
    lines: "Lines lead from the tokens that look, on the left, to those that are looked at, on the right:",
    token: "One token in every layer, where it looks and who looks at it:",
    neuron: "How one token comes to look at another:",
  };
  return `${starts[view] ?? ""} ${looks}.${next}`;
}

/**
 * @param {Sample} sample
 * @param {string} stack
 */
function lookWords(sample, stack) {
  if (stack === "encoder.self") return "each token of the text that is read looks at tokens of the same text";
  const isSelf = stack === "decoder.self";
  const query = !isSelf && sample.rows.written ? "each token that is written" : "each token that the decoder reads";
  if (!isSelf) return `${query} looks at tokens of the text that is read`;
  const hasTwo = sample.attentions.some((one) => one.stack !== "decoder.self");
  return `${hasTwo ? query : "each token of the text"} looks at itself and those before it`;
}
