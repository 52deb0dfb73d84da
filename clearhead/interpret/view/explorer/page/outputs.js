/** Output of the unchanged model and of the changed model, side by side. */

import { el, fill, fixed, withSign } from "./dom.js";
import { quoted, tokenNode } from "./labels.js";

/** @typedef {[string, number, number, number]} Candidate text, id, probability before and after */
/** @typedef {{ position: number | null, reads: string, follows: Candidate | null, candidates: Candidate[] }} OutputRow */
/** @typedef {{ name: string, position: number | null, values: number[] }} Difference of two log-probabilities, before and after */
/** @typedef {{ written: [string | null, string | null], rows: OutputRow[], end: number | null, similarity?: number, difference?: Difference | null }} Outputs */

/** @param {number} share */
export function percent(share) {
  const value = 100 * share;
  return value >= 0.1 || value === 0 ? `${fixed(value, value < 10 ? 1 : 0)} %` : "< 0.1 %";
}

/**
 * @param {Candidate} candidate
 * @param {boolean} isChanged
 * @param {(() => void) | null} go
 */
function candidateRow([text, , before, after], isChanged, go) {
  const share = (/** @type {number} */ value, /** @type {string} */ kind) => {
    const meter = el("span", { class: `meter ${kind}`, "aria-hidden": "true" });
    meter.style.setProperty("--share", String(value));
    return el("td", { class: "number" }, meter, el("span", { class: "share" }, percent(value)));
  };
  const name = go ? el("button", { type: "button", class: "plain", title: "write this token instead, and continue", onclick: go }, tokenNode(text)) : tokenNode(text);
  return el("tr", {}, el("th", { scope: "row" }, name), share(before, "before"), isChanged ? share(after, "after") : null);
}

/**
 * @param {OutputRow} row
 * @param {boolean} isChanged
 * @param {((position: number, index: number) => void) | null} force
 */
function candidates(row, isChanged, force) {
  const { position } = row;
  const sorted = [...row.candidates].sort((one, two) => Math.max(two[2], two[3]) - Math.max(one[2], one[3])).slice(0, 8);
  if (row.follows && !sorted.some(([, index]) => index === row.follows?.[1])) sorted.push(row.follows);
  return el("table", { class: "keys candidates" }, el("caption", { class: "unseen" }, "most probable outputs"),
    el("thead", {}, el("tr", {}, el("th", { scope: "col" }, force ? "next token" : "output"), el("th", { scope: "col", class: "number" }, "unchanged"), isChanged ? el("th", { scope: "col", class: "number" }, "changed") : null)),
    el("tbody", {}, ...sorted.map((candidate) => candidateRow(candidate, isChanged, force && position !== null ? () => force(position, candidate[1]) : null))));
}

/**
 * Where an output is predicted: after a token in a language model, at a token in a masked model.
 * @param {OutputRow} row
 * @param {OutputRow[]} rows
 */
function title(row, rows) {
  if (row.position === null) return ["label"];
  return [rows.some(({ follows }) => follows) ? "after " : "at ", quoted(row.reads), `, position ${row.position}`];
}

/**
 * @param {Outputs} outputs
 * @param {boolean} isChanged
 */
function writtenNodes(outputs, isChanged) {
  const [before, after] = outputs.written;
  if (before === null) return [];
  const line = (/** @type {string} */ name, /** @type {string} */ text) => el("p", { class: "written" }, el("span", { class: "field-name" }, name), " ", el("bdi", {}, text));
  if (!isChanged) return [line("writes", before)];
  return [line("unchanged", before), line("changed", after === before ? "the same" : after ?? "")];
}

/**
 * @param {Difference} difference
 * @param {OutputRow[]} rows
 * @param {boolean} isChanged
 */
function differenceNode({ name, position, values: [before, after] }, rows, isChanged) {
  const row = rows.find((one) => one.position === position);
  const values = isChanged ? `${withSign(before)} unchanged, ${withSign(after)} changed` : withSign(before);
  return el("p", { class: "difference" }, `Log-probability of ${name}`, ...(row && position !== null ? [", ", ...title(row, rows)] : []), ": ", el("b", {}, values));
}

/**
 * Say in one or two sentences what a change of the model did.
 * @param {Outputs} outputs
 * @returns {(Node | string)[]}
 */
export function effectWords({ written: [before, after], rows, similarity }) {
  // A short text is not broken into two lines.
  const text = (/** @type {string} */ written) => el("span", { class: written.length < 40 ? "quoted" : null }, `“${written}”`);
  /** @type {(Node | string)[]} */
  const words = before === null || after === null ? [] : after === before ? ["It still writes ", text(before), ". "] : ["It writes ", text(after), " in place of ", text(before), ". "];
  if (similarity !== undefined) words.push(`The cosine with the unchanged vector is ${fixed(similarity, 4)}.`);
  const all = rows.flatMap((row) => (row.follows ? [row.follows] : row.candidates).map((candidate) => ({ row, candidate, size: Math.abs(candidate[3] - candidate[2]) })));
  const [most] = all.sort((one, two) => two.size - one.size);
  if (most) {
    const { row, candidate: [token, , from, to] } = most;
    const change = [": the probability of ", quoted(token), ` from ${percent(from)} to ${percent(to)}.`];
    if (most.size < 0.0005) words.push("No probability changes by more than 0.1 %.");
    else words.push("The largest change", ...(row.position === null ? [] : [", ", ...title(row, rows)]), ...change);
  }
  return words;
}

/**
 * @param {Outputs} outputs
 * @param {boolean} isChanged
 * @param {(position: number | null, index: number) => void} follow function that selects the output of a sweep
 * @param {((position: number, index: number) => void) | null} force function that forces a token after a position; null if the model writes no text
 * @returns {HTMLElement[]}
 */
export function outputNodes(outputs, isChanged, follow, force) {
  const nodes = [el("h2", {}, "Output"), ...writtenNodes(outputs, isChanged)];
  if (outputs.similarity !== undefined && isChanged) nodes.push(el("p", {}, `cosine with the unchanged vector: ${fixed(outputs.similarity, 4)}`));
  const { rows, difference } = outputs;
  if (!rows.length) return nodes;
  if (difference) nodes.push(differenceNode(difference, rows, isChanged));
  const shown = el("div", { class: "shown-output" });
  const show = (/** @type {OutputRow} */ row) => {
    fill(shown, el("h3", {}, ...title(row, rows)), candidates(row, isChanged, force), force ? el("p", { class: "note" }, "Click a token to write it in this place, and continue.") : null);
    follow(row.position, (row.follows ?? row.candidates[0])[1]);
  };
  // Start at the compared position; otherwise skip the end of the text, which is least informative.
  const first = rows.find((row) => difference && row.position === difference.position) ?? [...rows].reverse().find((row) => row.follows?.[1] !== outputs.end) ?? rows[rows.length - 1];
  show(first);
  if (rows.length > 1) {
    nodes.push(el("div", { class: "output-strip", role: "group", "aria-label": "outputs of all positions" }, ...rows.map((row) => {
      const [text, , before, after] = row.follows ?? row.candidates[0];
      const button = el("button", { type: "button", class: "output-token", title: `${percent(before)}${isChanged ? ` → ${percent(after)}` : ""}`, onclick: () => show(row) }, tokenNode(text));
      button.style.setProperty("--before", String(before));
      button.style.setProperty("--after", String(isChanged ? after : 0));
      return button;
    })), el("p", { class: "note output-key" }, "Line under a token: its probability", ...(isChanged ? [", ", el("span", { class: "before" }, "unchanged"), " and ", el("span", { class: "after" }, "changed"), "."] : ["."])));
  }
  nodes.push(shown);
  return nodes;
}
