/** Neuron view: the computation of one weight from query, key, scale, soft cap, bias, mask and softmax. */

import { exactNumbers } from "./arrays.js";
import { css, inkOn } from "./color.js";
import { el, fill, fixed, refill, select, short } from "./dom.js";
import { labels, tokenNode } from "./labels.js";
import { maskWords } from "./facts.js";
import { lastOfText, rowOf, stackOf } from "./grids.js";
import { Ribbon } from "./ribbon.js";

/** @typedef {import("./types.js").Pane} Pane */
/** @typedef {import("./types.js").Stack} Stack */
/** @typedef {import("./arrays.js").ExactNumbers} ExactNumbers */
/** @typedef {{ key: number, product: number, score: number, share: number, weight: number, allowed: boolean }} KeyNumbers */

const LISTED = 200;
const CELL = 48;

/** @param {import("./types.js").Sample} sample */
export function hasExact(sample) {
  return sample.attentions.some((stack) => stack.layers.some((layer) => Object.keys(layer.exact).length > 0));
}

/**
 * @param {HTMLElement} root
 * @param {Pane} pane
 * @param {import("./types.js").App} app
 * @returns {import("./types.js").View}
 */
export function neuron(root, pane, app) {
  return new Neuron(root, pane, app);
}

/**
 * Compute the score and weight of every key for one query, from queries and keys.
 * @param {ExactNumbers} exact
 * @param {number} query
 * @param {number} numKeys
 * @returns {KeyNumbers[]}
 */
function keyNumbers(exact, query, numKeys) {
  const { head, spans } = exact;
  const vector = exact.query(query);
  const found = Array.from({ length: numKeys }, (_, key) => {
    const other = exact.key(key);
    let product = 0;
    for (let at = 0; at < head.size; at++) product += vector[at] * other[at];
    const allowed = spans.allows(query, key);
    let score = product * head.scale;
    if (head.softCap !== null) score = head.softCap * Math.tanh(score / head.softCap);
    if (exact.biases && allowed) score += exact.biases[exact.at(query, key)];
    return { key, product, score, share: 0, weight: allowed ? exact.weights[exact.at(query, key)] : NaN, allowed };
  });
  const scores = found.filter((one) => one.allowed).map((one) => one.score);
  const most = Math.max(...scores, head.sink ?? -Infinity);
  const total = scores.reduce((sum, score) => sum + Math.exp(score - most), head.sink === null ? 0 : Math.exp(head.sink - most));
  for (const one of found) one.share = one.allowed ? Math.exp(one.score - most) / total : 0;
  return found;
}

class Neuron {
  /**
   * @param {HTMLElement} root
   * @param {Pane} pane
   * @param {import("./types.js").App} app
   */
  constructor(root, pane, app) {
    this.app = app;
    this.pane = pane;
    const store = app.store;
    this.queryRibbon = new Ribbon("query", (index) => store.set({ query: index }));
    this.keyRibbon = new Ribbon("key", (index) => store.set({ key: index }));
    this.vectors = el("div", { class: "vectors", role: "group", "aria-label": "query, key and their product, by dimension" });
    this.steps = el("div", { class: "steps" });
    this.table = el("div", { class: "neuron-keys", tabindex: 0, role: "group", "aria-label": "all keys of this query" });
    root.append(
      el("div", { class: "neuron-texts" },
        el("section", {}, el("h3", {}, "Query token"), this.queryRibbon.root),
        el("section", {}, el("h3", {}, "Key tokens, shaded by weight"), this.keyRibbon.root)),
      el("section", {}, this.vectors),
      el("div", { class: "neuron-split" }, this.steps, this.table),
    );
  }

  /**
   * @param {import("./state.js").State} state
   * @param {Pane} pane
   */
  async update(state, pane) {
    this.pane = pane;
    const named = stackOf(pane.sample, state);
    const stack = hasHeads(named) ? named : pane.sample.attentions.find(hasHeads);
    if (!stack) return;
    const choices = stack.layers.flatMap((layer) => Object.keys(layer.exact).map((head) => ({ layer, head: Number(head) })));
    const chosen = choices.find(({ layer, head }) => layer.layer === state.layer && head === state.head) ?? choices[0];
    refill(this.app.slot, select("Head", choices.map(({ layer, head }) => [`${layer.layer} ${head}`, `layer ${layer.layer}, head ${head}`]),
      `${chosen.layer.layer} ${chosen.head}`, (value) => {
        const [layer, head] = value.split(" ").map(Number);
        this.app.store.set({ layer, head });
      }));
    const [queries, keys] = [labels(rowOf(pane.sample, stack.queries), false), labels(rowOf(pane.sample, stack.keys), false)];
    const exact = await exactNumbers(this.app.page, chosen.layer, chosen.head, keys.length);
    if (!exact) return;
    const query = state.query < 0 || state.query >= queries.length ? lastOfText(rowOf(pane.sample, stack.queries), queries) : state.query;
    const numbers = keyNumbers(exact, query, keys.length);
    const best = numbers.reduce((one, two) => (two.share > one.share ? two : one)).key;
    const key = state.key < 0 || state.key >= keys.length ? best : state.key;
    this.queryRibbon.setRow(queries);
    this.queryRibbon.paint(query, null, state.scale, false);
    this.keyRibbon.setRow(keys);
    this.keyRibbon.paint(key, Float32Array.from(numbers, (one) => one.weight), state.scale, false);
    this.showVectors(exact, query, key);
    this.showSteps(exact, numbers[key], chosen.layer);
    this.showTable(numbers, key, keys, exact.head.sink !== null);
  }

  /**
   * @param {ExactNumbers} exact
   * @param {number} query
   * @param {number} key
   */
  showVectors(exact, query, key) {
    const [one, two] = [exact.query(query), exact.key(key)];
    const products = one.map((value, at) => value * two[at]);
    const most = Math.max(...[...one, ...two].map(Math.abs), 1e-9);
    const mostProduct = Math.max(...products.map(Math.abs), 1e-9);
    /**
     * @param {string} name
     * @param {string} sign
     * @param {Float32Array} values
     * @param {number} largest
     */
    const row = (name, sign, values, largest) => el("tr", {}, el("th", { scope: "row" }, el("span", { class: "operator" }, sign), name),
      ...[...values].map((value) => {
        const cell = el("td", { title: String(value) }, short(value));
        cell.style.background = css(value / largest, "linear", true);
        cell.style.color = inkOn(value / largest, "linear", true);
        return cell;
      }));
    const across = Math.max(4, Math.floor(((this.vectors.clientWidth || 700) - 100) / CELL));
    const tables = Array.from({ length: Math.ceil(one.length / across) }, (_, index) => {
      const [from, to] = [index * across, (index + 1) * across];
      return el("table", { class: "vector" },
        el("caption", { class: "unseen" }, `dimensions ${from} to ${Math.min(to, one.length) - 1}: query, key and their product`),
        el("thead", {}, el("tr", {}, ...["dimension", ...one.subarray(from, to).keys()].map((name) => el("th", { scope: "col" }, String(typeof name === "number" ? from + name : name))))),
        el("tbody", {}, row("query", "", one.subarray(from, to), most), row("key", "×", two.subarray(from, to), most), row("product", "=", products.subarray(from, to), mostProduct)));
    });
    fill(this.vectors, ...tables);
  }

  /**
   * @param {ExactNumbers} exact
   * @param {KeyNumbers} numbers
   * @param {import("./types.js").Layer} layer
   */
  showSteps(exact, numbers, layer) {
    const { head } = exact;
    const scaled = numbers.product * head.scale;
    const capped = head.softCap === null ? scaled : head.softCap * Math.tanh(scaled / head.softCap);
    /** @type {[string, string, string][]} */
    const steps = [["query · key", "sum of the products", fixed(numbers.product, 6)], ["× scale", short(head.scale), fixed(scaled, 6)]];
    if (head.softCap !== null) steps.push(["soft cap", `${head.softCap} tanh(score / ${head.softCap})`, fixed(capped, 6)]);
    if (exact.biases) steps.push(["+ bias", numbers.allowed ? `${layer.bias || "bias"} ${short(numbers.score - capped)}` : "–", fixed(numbers.score, 6)]);
    steps.push(["mask", maskWords(layer.mask), numbers.allowed ? "may attend" : "masked: −∞"]);
    if (head.sink !== null) steps.push(["sink", "an additional score without a token", fixed(head.sink, 6)]);
    steps.push(["softmax", "e^score / sum over all keys", fixed(numbers.share, 7)]);
    const off = Math.abs(numbers.share - (numbers.allowed ? numbers.weight : 0));
    fill(this.steps, el("h3", {}, "From product to weight"), el("table", {}, el("tbody", {}, ...steps.map(([name, how, value]) =>
      el("tr", {}, el("th", { scope: "row" }, name), el("td", { class: "how" }, how), el("td", { class: "number", "data-step": name }, value))))),
      el("p", { class: "note" }, `The model's weight: ${fixed(numbers.allowed ? numbers.weight : 0, 7)} (${off < 1e-12 ? "the same" : `${short(off)} apart`}).`));
  }

  /**
   * @param {KeyNumbers[]} numbers
   * @param {number} chosen
   * @param {import("./types.js").Label[]} keys
   * @param {boolean} hasSink
   */
  showTable(numbers, chosen, keys, hasSink) {
    const order = numbers.filter((one) => one.allowed).sort((one, two) => two.share - one.share || one.key - two.key);
    const rows = order.slice(0, LISTED).map((one) => {
      const bar = el("span", { class: "meter", "aria-hidden": "true" });
      bar.style.setProperty("--share", String(one.share));
      return el("tr", { class: one.key === chosen ? "chosen" : null },
        el("td", {}, el("button", { type: "button", class: "plain", onclick: () => this.app.store.set({ key: one.key }) }, tokenNode(keys[one.key].text), el("small", {}, String(one.key)))),
        el("td", { class: "number" }, fixed(one.product)), el("td", { class: "number" }, fixed(one.score)),
        el("td", { class: "number" }, bar, fixed(one.share, 5)));
    });
    const rest = order.length - rows.length;
    const sink = 1 - order.reduce((sum, one) => sum + one.share, 0);
    fill(this.table, el("h3", {}, "All keys of this query"), el("table", { class: "keys" },
      el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "key"), ...["q · k", "score", "weight"].map((name) => el("th", { scope: "col", class: "number" }, name)))),
      el("tbody", {}, ...rows)),
      hasSink ? el("p", { class: "note" }, `To no token (sink): ${fixed(sink, 5)}`) : null,
      rest > 0 ? el("p", { class: "note" }, `and ${rest} keys with less`) : null);
  }
}

/** @param {Stack} stack */
function hasHeads(stack) {
  return stack.layers.some((layer) => Object.keys(layer.exact).length > 0);
}
