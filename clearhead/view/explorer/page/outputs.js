/** What the model puts out, beside what it puts out while it is changed. */

import { el, fixed, short } from "./dom.js";
import { tokenNode } from "./labels.js";

/** @typedef {[string, number, number, number]} Candidate text, id, probability before and after */
/** @typedef {{ position: number | null, reads: string, follows: Candidate | null, candidates: Candidate[] }} OutputRow */
/** @typedef {{ written: [string | null, string | null], rows: OutputRow[], similarity?: number }} Outputs */

/** @param {number} share */
export function percent(share) {
  const value = 100 * share;
  return value >= 0.1 || value === 0 ? `${fixed(value, value < 10 ? 1 : 0)} %` : `${short(value)} %`;
}

/**
 * @param {Candidate} candidate
 * @param {boolean} isChanged
 */
function candidateRow([text, , before, after], isChanged) {
  const bar = (/** @type {number} */ share, /** @type {string} */ kind) => {
    const meter = el("span", { class: `meter ${kind}`, "aria-hidden": "true" });
    meter.style.setProperty("--share", String(share));
    return meter;
  };
  return el("tr", {}, el("th", { scope: "row" }, tokenNode(text)),
    el("td", { class: "number" }, bar(before, "before"), el("span", { class: "share" }, percent(before))),
    isChanged ? el("td", { class: "number" }, bar(after, "after"), el("span", { class: "share" }, percent(after))) : null);
}

/**
 * @param {OutputRow} row
 * @param {boolean} isChanged
 */
function candidates(row, isChanged) {
  const sorted = [...row.candidates].sort((one, two) => Math.max(two[2], two[3]) - Math.max(one[2], one[3]));
  return el("table", { class: "keys candidates" }, el("caption", { class: "unseen" }, "most probable outputs"),
    el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "output"), el("th", { scope: "col", class: "number" }, "unchanged"), isChanged ? el("th", { scope: "col", class: "number" }, "changed") : null)),
    el("tbody", {}, ...sorted.slice(0, 8).map((candidate) => candidateRow(candidate, isChanged))));
}

/** @param {OutputRow} row */
function title(row) {
  if (row.position === null) return ["Label"];
  return row.follows ? ["After ", tokenNode(row.reads), `, position ${row.position}`] : ["At ", tokenNode(row.reads), `, position ${row.position}`];
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
 * @param {Outputs} outputs
 * @param {boolean} isChanged
 * @returns {HTMLElement[]}
 */
export function outputNodes(outputs, isChanged) {
  const nodes = [el("h3", {}, "Output"), ...writtenNodes(outputs, isChanged)];
  if (outputs.similarity !== undefined && isChanged) nodes.push(el("p", {}, `cosine with the unchanged vector: ${fixed(outputs.similarity, 4)}`));
  const { rows } = outputs;
  if (!rows.length) return nodes;
  const shown = el("div", { class: "shown-output" });
  const show = (/** @type {OutputRow} */ row) => shown.replaceChildren(el("h4", {}, ...title(row)), candidates(row, isChanged));
  const last = rows[rows.length - 1];
  show(last);
  if (rows.length > 1) {
    nodes.push(el("div", { class: "output-strip", role: "group", "aria-label": "outputs of all positions" }, ...rows.map((row) => {
      const [text, , before, after] = row.follows ?? row.candidates[0];
      const button = el("button", { type: "button", class: "output-token", title: `${percent(before)}${isChanged ? ` → ${percent(after)}` : ""}`, onclick: () => show(row) }, tokenNode(text));
      button.style.setProperty("--before", String(before));
      button.style.setProperty("--after", String(after));
      return button;
    })));
  }
  nodes.push(shown);
  return nodes;
}
