/** Labels of tokens: visible white space, joined subwords, and the writing direction of each text. */

import { el } from "./dom.js";

const RTL = /^[^\p{L}]*[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc]/u;
/** @type {Record<string, string>} */
const SIGNS = { " ": "␣", "\n": "↵", "\r": "␍", "\t": "⇥", "\u00a0": "⍽", "\u202f": "⍽", "\u200b": "⌷", "\u3000": "□" };
const OTHER_BLANKS = /[\u1680\u2000-\u200a\u2028\u2029\u202f\u205f]/;
/** Sign between a token that the model reads and the token that it writes next. */
export const WRITES = "▸";
const BLANK = /^[ \n\r\t\u00a0\u200b\u3000\u1680\u2000-\u200a\u2028\u2029\u202f\u205f]+/;

/** @param {string} text */
export function isRightToLeft(text) {
  return RTL.test(text);
}

/**
 * The signs of the white space in front of a label, and the rest of it.
 * @param {import("./types.js").Label} label
 */
export function labelParts({ text, isName }) {
  return isName ? ["", text] : parts(text);
}

/** @param {string} text text whose white space is shown as signs */
export function signs(text) {
  return [...text].map((letter) => SIGNS[letter] ?? (OTHER_BLANKS.test(letter) ? SIGNS[" "] : letter)).join("");
}

/**
 * Return the signs of the leading white space, and the rest of the text; for white space only, just signs.
 * @param {string} text
 * @returns {[string, string]}
 */
export function parts(text) {
  if (text === "") return ["∅", ""];
  const blank = BLANK.exec(text)?.[0] ?? "";
  return [signs(blank), signs(text.slice(blank.length))];
}

/**
 * @param {import("./types.js").TokenRow} row
 * @param {boolean} isJoined whether the tokens of a word become one label
 * @returns {import("./types.js").Label[]}
 */
export function labels(row, isJoined) {
  /** @type {import("./types.js").Label[]} */
  const found = [];
  row.texts.forEach((text, index) => {
    const before = found.at(-1);
    const generated = row.generated?.[index] === 1;
    const writes = row.writes?.[index] ?? "";
    if (isJoined && before !== undefined && row.words[index] === row.words[index - 1]) {
      before.text += text;
      before.writes = (before.writes ?? "") + writes;
      before.members.push(index);
    } else found.push({ text, members: [index], generated, rtl: false, writes });
  });
  for (const label of found) {
    if (isJoined && label.text.trim() !== "") label.text = label.text.trim();
    label.rtl = isRightToLeft(label.text);
  }
  return found;
}

/**
 * A label that names something other than a token, such as a layer.
 * @param {string} text
 * @returns {import("./types.js").Label}
 */
export function nameLabel(text) {
  return { text, members: [], generated: false, rtl: false, isName: true };
}

/** @param {import("./types.js").TokenRow | undefined} row */
export function canJoin(row) {
  return row !== undefined && row.words.some((word, index) => index > 0 && word === row.words[index - 1]);
}

/** @param {string} text */
export function tokenNode(text) {
  const [blank, rest] = parts(text);
  return el("bdi", { class: "token-text" }, blank ? el("span", { class: "blank" }, blank) : null, rest);
}

/**
 * A token in quotes, for sentences.
 * @param {string} text
 */
export function quoted(text) {
  return el("span", { class: "quoted" }, "“", tokenNode(text), "”");
}

/**
 * Heading of the tokens that a query token attends to.
 * @param {import("./types.js").Label} label
 */
export function attendsTo(label) {
  const [, writes] = queryNodes(label);
  return [quoted(label.text), " attends to", writes];
}

/**
 * Label of a query token, with the token that the model writes next.
 * @param {import("./types.js").Label} label
 */
export function queryNodes({ text, writes }) {
  return [tokenNode(text), writes ? el("small", { class: "writes" }, `${WRITES} `, tokenNode(writes)) : null];
}

/** @param {import("./types.js").Label[]} row labels, whose first letters determine the direction of the text */
export function direction(row) {
  return row.find((label) => /\p{L}/u.test(label.text))?.rtl ? "rtl" : "ltr";
}

/**
 * Return the label that a token belongs to.
 * @param {import("./types.js").Label[]} row
 * @param {number} token
 */
export function labelOf(row, token) {
  return row.findIndex((label) => label.members.includes(token));
}
