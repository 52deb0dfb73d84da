/** The page that needs no installation: a text, a model that runs here, what it writes, and every head of it. */

import { explorer } from "./app.js";
import { hold, readFrom } from "./arrays.js";
import { el, fill } from "./dom.js";
import { END, START, Translator, Weights } from "./model.js";

/** @typedef {import("./types.js").Sample} Sample */
/** @typedef {import("./types.js").Stack} Stack */
/** @typedef {import("./types.js").TokenRow} TokenRow */

/** @type {[import("./types.js").StackName, "encoder" | "decoder", "encoder" | "decoder", string][]} */
const ATTENTIONS = [
  ["encoder.self", "encoder", "encoder", "the text reads itself"],
  ["decoder.self", "decoder", "decoder", "the answer reads itself"],
  ["decoder.memory", "decoder", "encoder", "the answer reads the text"],
];
const MOST = 64;

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
   * @param {boolean} isCausal
   */
  layer(map, layer, isCausal) {
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
      weights: this.held(codes), exact: Object.fromEntries(exact), values: {}, patterns: [], keyEffects: null, feedForward: {},
    };
  }

  /**
   * @param {string} label
   * @param {string} text
   * @param {string} written
   * @param {Record<"encoder" | "decoder", TokenRow>} rows
   * @param {import("./model.js").Maps} maps
   * @param {import("./model.js").BeamNode[]} beams
   * @returns {Sample}
   */
  sample(label, text, written, rows, maps, beams) {
    const attentions = ATTENTIONS.map(([stack, queries, keys]) => /** @type {Stack} */ ({
      stack, queries, keys, measure: "attention weight",
      layers: maps[stack].map((map, layer) => this.layer(map, layer, stack === "decoder.self")),
    }));
    return { label, facts: [], texts: [["reads", text], ["writes", written]], rows, columns: [], attentions, lens: null, beams };
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
    this.text = /** @type {HTMLInputElement} */ (el("input", { type: "text", class: "date", "aria-label": "a date", maxlength: MOST, spellcheck: "false", value: this.examples[0] }));
    this.beams = /** @type {HTMLSelectElement} */ (el("select", { "aria-label": "beams" }, ...[1, 2, 3, 5, 8].map((count) => el("option", { value: count, selected: count === 3 }, String(count)))));
    this.output = el("p", { class: "written-date", role: "status" });
    this.heads = el("div", { class: "switches" });
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
    const reads = el("section", { class: "bench-part", "aria-label": "text" },
      el("label", { class: "bench-field" }, el("span", { class: "field-name" }, "A date, in any of the languages that it learned"), this.text),
      el("div", { class: "bench-row" }, another, el("label", { class: "field" }, el("span", { class: "field-name" }, "Beams"), this.beams)),
      this.output);
    const bench = el("div", { class: "bench" }, el("div", { class: "bench-parts" }, reads,
      el("section", { class: "bench-part", "aria-label": "heads" }, el("span", { class: "field-name" }, "Its 24 heads: switch some off, and see what changes"), this.heads)));
    document.getElementById("main")?.before(bench);
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
    fill(this.heads, ...groups, el("button", { type: "button", class: "plain-button", disabled: this.off.size === 0, onclick: () => {
      this.off.clear();
      this.show();
    } }, "All on"));
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
   * @returns {{ sample: Sample, written: string }}
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
    const rows = {
      encoder: row(read, read.map((_, place) => Number(place === read.length - 1)), null),
      decoder: row(said, said.map((_, place) => Number(place === 0)), said.map((_, place) => Number(place > 0))),
    };
    const { maps } = translator.read(source, target, off);
    const written = translator.decode(best.ids);
    return { sample: pages.sample(label, this.text.value, written, rows, maps, nodes), written };
  }

  show() {
    this.switches();
    if (!this.text.value.trim()) {
      fill(this.output, "Type a date, such as ", this.examples[0]);
      return;
    }
    readFrom(async () => "");
    const pages = new Pages();
    const plain = this.run(pages, "all heads", new Set());
    const names = `without ${this.off.size} ${this.off.size === 1 ? "head" : "heads"}`;
    const changed = this.off.size > 0 ? this.run(pages, names, this.off) : null;
    fill(this.output, el("span", { class: "field-name" }, "writes"), " ", el("strong", {}, (changed ?? plain).written || "nothing"),
      changed ? el("span", { class: "field-name" }, changed.written === plain.written ? " as with all heads" : ` in place of ${plain.written}`) : null);
    explorer.replace({
      ...explorer.page, samples: changed ? [changed.sample, plain.sample] : [plain.sample], spans: pages.spans,
    });
  }
}

// In the console: clearhead.translator.translate("5. Januar 1998", 3)
Object.assign(globalThis, { clearhead: new Bench() });
