/** The page that needs no installation: a text, a model that runs here, what it writes, and every head of it. */

import { explorer } from "./app.js";
import { hold, readFrom } from "./arrays.js";
import { el, fill, fixed } from "./dom.js";
import { quoted } from "./labels.js";
import { END, START, Translator, Weights, softmax } from "./model.js";

/** @typedef {import("./types.js").Sample} Sample */
/** @typedef {import("./types.js").Stack} Stack */
/** @typedef {import("./types.js").TokenRow} TokenRow */

/** @type {[import("./types.js").StackName, import("./types.js").RowName, import("./types.js").RowName, string][]} */
const ATTENTIONS = [
  ["encoder.self", "encoder", "encoder", "encoder: the text reads itself"],
  ["decoder.self", "decoder", "decoder", "decoder: the answer reads itself"],
  ["decoder.memory", "written", "encoder", "cross-attention: the answer reads the text"],
];
/** @type {import("./types.js").Column} */
const ALIGNMENT = { name: "alignment", title: "alignment", description: "The share of links between source and target that are best in both directions.", kind: "statistic" };
const MOST = 64;
/** Probability of a written token below which the page says that the model is unsure. */
const UNSURE = 0.5;

/**
 * The weight of links that are the largest of both their query and their key, divided by the number of queries.
 * @param {Float64Array[]} rows weights of each query
 */
function alignmentOf(rows) {
  const largest = (/** @type {ArrayLike<number>} */ values) => Array.from(values).reduce((best, value, place) => (value > values[best] ? place : best), 0);
  const queries = Array.from(rows[0], (_, key) => largest(rows.map((row) => row[key])));
  return rows.reduce((sum, row, query) => sum + (queries[largest(row)] === query ? row[largest(row)] : 0), 0) / rows.length;
}

/** Makes what the explorer shows of a run: its JSON, and arrays that it holds by number. */
class Pages {
  constructor() {
    this.blobs = 0;
    /** @type {number[][]} */
    this.spans = [];
  }

  /** @param {Uint16Array | Float32Array} numbers */
  held(numbers) {
    hold(this.blobs, numbers);
    return this.blobs++;
  }

  /**
   * @param {import("./model.js").AttentionMap} map
   * @param {number} layer
   * @param {import("./types.js").StackName} stack
   */
  layer(map, layer, stack) {
    const isCausal = stack === "decoder.self";
    const [numQueries, numKeys] = [map.weights[0].length, map.weights[0][0].length];
    const last = (/** @type {number} */ query) => (isCausal ? query : numKeys - 1);
    const spans = Array.from({ length: numQueries }, (_, query) => [0, last(query)]).flat();
    this.spans.push(spans);
    const allowed = map.weights.map((rows) => rows.flatMap((row, query) => Array.from(row.subarray(0, last(query) + 1))));
    const codes = Uint16Array.from(allowed.flat(), (share) => Math.round(2047 * Math.sqrt(share)));
    const size = map.queries[0][0].length;
    const exact = allowed.map((shares, head) => {
      const rows = [...map.queries[head], ...map.keys[head]].flatMap((row) => Array.from(row));
      return [head, { blob: this.held(Float32Array.from([...shares, ...rows])), size, scale: 1 / Math.sqrt(size), softCap: null, sink: null, bias: false }];
    });
    return {
      layer, heads: allowed.map((_, head) => head), numHeads: allowed.length, numKvHeads: allowed.length,
      spans: this.spans.length - 1, mask: isCausal ? "causal" : "none", sink: false, bias: "",
      weights: this.held(codes), exact: Object.fromEntries(exact), values: stack === "decoder.memory" ? { alignment: map.weights.map(alignmentOf) } : {}, patterns: [], keyEffects: null, feedForward: {},
    };
  }

  /**
   * @param {string} label
   * @param {string} text
   * @param {string} written
   * @param {Record<import("./types.js").RowName, TokenRow>} rows
   * @param {import("./model.js").Maps} maps
   * @param {import("./model.js").BeamNode[]} beams
   * @returns {Sample}
   */
  sample(label, text, written, rows, maps, beams) {
    const attentions = ATTENTIONS.map(([stack, queries, keys]) => /** @type {Stack} */ ({
      stack, queries, keys, measure: "attention weight",
      layers: maps[stack].map((map, layer) => this.layer(map, layer, stack)),
    }));
    return { label, facts: [], texts: [["reads", text], ["writes", written]], rows, columns: [ALIGNMENT], attentions, lens: null, beams };
  }
}

class Bench {
  constructor() {
    const read = (/** @type {string} */ id) => document.getElementById(id)?.textContent ?? "";
    const facts = JSON.parse(read("model"));
    const letters = atob(read("weights"));
    const bytes = Uint8Array.from({ length: letters.length }, (_, at) => letters.charCodeAt(at));
    /** @type {string[]} */
    this.examples = facts.examples;
    this.translator = new Translator(new Weights(facts.index, bytes.buffer), facts.source, facts.target);
    /** @type {Set<string>} */
    this.off = new Set();
    this.layers = facts.layers;
    /** @type {string} link to the site; empty for a page alone */
    this.home = facts.home;
    this.text = /** @type {HTMLInputElement} */ (el("input", { type: "text", class: "date", "aria-label": "a date", maxlength: MOST, spellcheck: "false", value: this.examples[0] }));
    this.beams = /** @type {HTMLSelectElement} */ (el("select", { "aria-label": "beams" }, ...[1, 2, 3, 5, 8].map((count) => el("option", { value: count, selected: count === 3 }, String(count)))));
    this.output = el("p", { class: "written-date", role: "status" });
    this.doubt = el("p", { class: "status fault", role: "status" });
    this.heads = el("div", { class: "switches" });
    this.allOn = el("button", { type: "button", class: "plain-button", onclick: () => {
      this.off.clear();
      this.show();
    } }, "All on");
    this.build();
    this.show();
  }

  build() {
    this.text.addEventListener("input", () => this.show());
    this.beams.addEventListener("change", () => this.show());
    const another = el("button", { type: "button", class: "plain-button", onclick: () => {
      this.text.value = this.examples[(this.examples.indexOf(this.text.value) + 1) % this.examples.length];
      this.show();
    } }, "Another date");
    const reads = el("section", { class: "bench-part bench-first", "aria-label": "text" },
      el("label", { class: "bench-field" }, el("span", { class: "field-name" }, "A date, in any of the languages that it learned"), this.text),
      el("div", { class: "bench-row" }, another, el("label", { class: "field" }, el("span", { class: "field-name" }, "Beams"), this.beams)),
      this.output, this.doubt);
    const heads = el("section", { class: "bench-part bench-rest", "aria-label": "heads" },
      el("div", { class: "bench-row" }, el("h2", {}, "Switch off some of its 24 heads"), this.allOn), this.heads);
    document.body.classList.add("with-bench");
    if (this.home) document.getElementById("top")?.before(el("nav", { class: "home", "aria-label": "site" }, el("a", { href: this.home }, "← clearhead: Transformers you can see through")));
    document.getElementById("main")?.before(el("aside", { class: "bench", "aria-label": "text and heads" }, reads, heads));
  }

  switches() {
    const groups = ATTENTIONS.map(([stack, , , says]) => el("div", { class: "switch-group" }, el("span", {}, says),
      ...Array.from({ length: this.layers }, (_, layer) =>
        el("div", { class: "switch-row", role: "group", "aria-label": `${says}, layer ${layer}` }, el("span", { "aria-hidden": "true" }, `layer ${layer}`),
          ...[0, 1, 2, 3].map((head) => {
            const address = `${stack}.${layer}.${head}`;
            return el("button", { type: "button", class: "switch", "aria-pressed": String(!this.off.has(address)), "aria-label": `head ${head}`, title: address, onclick: () => this.turn(address) }, String(head));
          })))));
    const focused = /** @type {HTMLElement | null} */ (document.activeElement)?.title;
    fill(this.heads, ...groups);
    this.allOn.hidden = this.off.size === 0;
    if (focused) /** @type {HTMLElement | null} */ (this.heads.querySelector(`[title="${focused}"]`))?.focus();
  }

  /** @param {string} address */
  turn(address) {
    if (!this.off.delete(address)) this.off.add(address);
    this.show();
  }

  /**
   * @param {Pages} pages
   * @param {string} label
   * @param {Set<string>} off
   * @returns {{ sample: Sample, written: string, least: { token: string, probability: number } }} the least probable written token
   */
  run(pages, label, off) {
    const { translator } = this;
    const { results: [best], nodes } = translator.translate(this.text.value, Number(this.beams.value), off);
    const [source, target] = [translator.encode(this.text.value), best.ids.slice(0, best.ids.at(-1) === END ? -1 : undefined)];
    const characters = Array.from(this.text.value);
    const words = (/** @type {string[]} */ tokens) => tokens.map((_, place) => tokens.slice(0, place + 1).filter((token) => !/[\p{L}\p{N}\p{M}]/u.test(token)).length);
    /** @type {(tokens: string[], special: number[], generated: number[] | null) => TokenRow} */
    const row = (tokens, special, generated) => ({ tokens, texts: tokens, words: words(tokens), generated, special });
    const read = [...characters, "</s>"];
    const said = target.map((id) => (id === START ? "<s>" : translator.targetCharacters[id]));
    const writes = best.ids.slice(1, target.length + 1).map((id) => (id === END ? "</s>" : translator.targetCharacters[id]));
    const rows = {
      encoder: row(read, read.map((_, place) => Number(place === read.length - 1)), null),
      decoder: { ...row(said, said.map((_, place) => Number(place === 0)), said.map((_, place) => Number(place > 0))), writes },
      written: row(writes, writes.map((token) => Number(token === "</s>")), writes.map(() => 1)),
    };
    const { maps, logits } = translator.read(source, target, off);
    const written = translator.decode(best.ids);
    const [least] = writes.map((token, step) => ({ token, probability: softmax(logits[step])[best.ids[step + 1]] })).sort((one, two) => one.probability - two.probability);
    return { sample: pages.sample(label, this.text.value, written, rows, maps, nodes), written, least };
  }

  show() {
    this.switches();
    if (!this.text.value.trim()) {
      fill(this.output, "Type a date, such as ", this.examples[0]);
      fill(this.doubt);
      return;
    }
    readFrom(async () => "");
    const pages = new Pages();
    const plain = this.run(pages, "all heads", new Set());
    const names = `without ${this.off.size} ${this.off.size === 1 ? "head" : "heads"}`;
    const changed = this.off.size > 0 ? this.run(pages, names, this.off) : null;
    fill(this.output, el("span", { class: "field-name" }, "writes"), " ", el("strong", {}, (changed ?? plain).written || "nothing"),
      changed ? el("span", { class: "field-name" }, changed.written === plain.written ? " as with all heads" : ` in place of ${plain.written}`) : null);
    const { token, probability } = (changed ?? plain).least;
    fill(this.doubt, ...(probability < UNSURE ? ["The model is unsure: it gives ", quoted(token), ` a probability of ${fixed(probability, 2)}.`] : []));
    explorer.replace({
      ...explorer.page, samples: changed ? [changed.sample, plain.sample] : [plain.sample], spans: pages.spans,
    });
  }
}

// In the console: clearhead.translator.translate("5. Januar 1998", 3)
Object.assign(globalThis, { clearhead: new Bench() });
