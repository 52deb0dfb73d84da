/** A live page: other texts, changes of the model, and its output before and after. */

import { explorer } from "./app.js";
import { readFrom } from "./arrays.js";
import { post, text } from "./ask.js";
import { ChangeForm, attentionName, changeName } from "./changes.js";
import { el, fill } from "./dom.js";
import { gridsFrom } from "./grids.js";
import { effectWords, outputNodes } from "./outputs.js";
import { Pieces, arrivals } from "./pieces.js";
import { showSweep } from "./sweep.js";

/** @typedef {import("./changes.js").Change} Change */
/** @typedef {{ text: string, target: string | null, generate: number, edits: Change[], of: [string, string] | null, position: number | null }} Asked */
/**
 * Facts about the model, from the program.
 * @typedef {object} Facts
 * @property {Asked} first
 * @property {Record<string, Record<string, string>>} attentions stack -> depth -> address of its attention
 * @property {Record<string, number[]>} orders stack -> layer that runs at each depth
 * @property {boolean} readsTarget
 * @property {boolean} writes
 * @property {boolean} predicts whether the model has probabilities of tokens or labels
 */
/** @typedef {{ name: string, page: import("./types.js").Page, outputs: import("./outputs.js").Outputs, python: string[] }} Answer */

class Bench {
  constructor() {
    /** @type {Facts} */
    this.facts = JSON.parse(document.getElementById("model")?.textContent ?? "");
    /** @type {Asked} */
    this.asked = this.facts.first;
    /** @type {Asked[]} */
    this.before = [];
    /** @type {AbortController | null} */
    this.asking = null;
    /** @type {Answer | null} */
    this.answer = null;
    this.text = this.field("Text", this.asked.text);
    this.text.id = "text";
    this.target = this.field("Target", this.asked.target ?? "", "empty: what the model writes");
    this.more = /** @type {HTMLInputElement} */ (el("input", { type: "number", min: 0, max: 1024, value: this.asked.generate }));
    this.first = this.name("The first output");
    this.second = this.name("The second output");
    this.form = new ChangeForm(this.facts, explorer, (change) => this.add(change), (text, target) => void this.sweep(text, target));
    this.list = el("ul", { class: "changes" });
    this.status = el("p", { class: "status", role: "status" });
    this.trial = el("div", { class: "trial", role: "status" });
    this.targetDetails = el("details", { open: Boolean(this.asked.target) }, el("summary", {}, "Target"), this.target);
    this.output = el("section", { class: "bench-part output", "aria-label": "output" });
    /** @type {{ position: number | null, index: number } | null} */
    this.followed = null;
    this.swept = el("section", { class: "bench-part swept", "aria-label": "sweep" });
    this.python = el("pre", { class: "python", tabindex: 0 });
    this.build();
    gridsFrom((sample, stack, layer, head, queries, keys) => {
      const place = explorer.page.samples.indexOf(sample);
      return this.pieces.grid(place, stack.stack, layer.layer, head, queries, keys);
    });
    this.pieces = new Pieces("");
    arrivals.addEventListener("come", () => explorer.update());
    explorer.store.watchers.push(() => this.form.follow());
    void this.ask();
  }

  /**
   * @param {string} title
   * @param {string} value
   * @param {string} [placeholder]
   */
  field(title, value, placeholder = "") {
    const field = /** @type {HTMLTextAreaElement} */ (el("textarea", { rows: 1, spellcheck: "false", "aria-label": title, placeholder }));
    field.value = value;
    field.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey) {
        event.preventDefault();
        this.read();
      }
    });
    return field;
  }

  /** @param {string} title */
  name(title) {
    const field = /** @type {HTMLInputElement} */ (el("input", { type: "text", size: 8, spellcheck: "false", "aria-label": title }));
    field.addEventListener("keydown", (event) => {
      if (event.key === "Enter") this.compare();
    });
    return field;
  }

  build() {
    const { facts } = this;
    const button = (/** @type {string} */ name, /** @type {() => void} */ act) => el("button", { type: "button", class: "plain-button", onclick: act }, name);
    const first = el("section", { class: "bench-part bench-first", "aria-label": "text" },
      el("label", { class: "field-name", for: "text" }, "Text"),
      el("div", { class: "bench-row" }, this.text, el("button", { type: "button", class: "do", onclick: () => this.read() }, "Read")),
      facts.readsTarget ? this.targetDetails : null,
      facts.writes && !facts.readsTarget ? el("label", { class: "field" }, el("span", { class: "field-name" }, "then write"), this.more, el("span", { class: "field-name" }, "new tokens")) : null,
      el("div", { class: "bench-row progress" }, this.status, el("button", { type: "button", class: "stop", onclick: () => this.stop() }, "Stop")),
      this.trial,
    );
    const compare = el("section", { class: "bench-part", "aria-label": "comparison" }, el("h2", {}, "Compare two outputs"),
      el("div", { class: "bench-row why", title: "effects, contributions, the lens and sweeps then use the difference of two log-probabilities" },
        el("span", { class: "field-name" }, "Why"), this.first, el("span", { class: "field-name" }, "rather than"), this.second, button("Compare", () => this.compare())));
    const rest = el("div", { class: "bench-rest" }, this.output,
      el("section", { class: "bench-part", "aria-label": "changes" }, el("h2", {}, "Change the model"), this.form.root, this.list),
      facts.predicts ? compare : null,
      el("details", {}, el("summary", {}, "The same in Python"), this.python));
    document.body.classList.add("with-bench");
    document.getElementById("main")?.before(el("aside", { class: "bench", "aria-label": "text and model" }, first, rest), this.swept);
  }

  read() {
    const target = this.facts.readsTarget && this.target.value.trim() ? this.target.value : null;
    this.set({ text: this.text.value, target, generate: Number(this.more.value) || 0, position: null });
  }

  /** Compare two outputs at the position that was chosen in the output. */
  compare() {
    const { first, second } = this;
    if (!first.value || !second.value) this.say("type two outputs, such as Mary and John", true);
    else this.set({ of: [first.value, second.value], position: this.followed?.position ?? null });
  }

  alone() {
    this.first.value = this.second.value = "";
    if (this.asked.of) this.set({ of: null, position: null });
  }

  /** @param {Partial<Asked>} change */
  set(change) {
    this.before.push(this.asked);
    this.asked = { ...this.asked, ...change };
    void this.ask();
  }

  /** @param {Change} change */
  add(change) {
    this.set({ edits: [...this.asked.edits, change] });
  }

  /**
   * Patch in each activation of a second text, one after the other.
   * @param {string} text
   * @param {string | null} target
   */
  async sweep(text, target) {
    const { position, index } = this.followed ?? { position: null, index: null };
    const swept = await this.working((signal) => post("sweep", { request: this.asked, text, target, position, index }, signal));
    if (swept) showSweep(this.swept, swept, (stack, depth, place) => this.add(this.form.patch(stack, depth, place)));
  }

  /**
   * Continue the output from another token.
   * @param {number} position
   * @param {number} index
   */
  async force(position, index) {
    const answer = await this.working((signal) => post("force", { request: this.asked, position, index }, signal));
    if (!answer) return;
    const field = this.facts.readsTarget ? this.target : this.text;
    field.value = answer.text;
    this.targetDetails.toggleAttribute("open", this.facts.readsTarget);
    this.more.value = "0";
    this.read();
  }

  undo() {
    const before = this.before.pop();
    if (!before) return;
    this.asked = before;
    this.text.value = before.text;
    this.target.value = before.target ?? "";
    this.more.value = String(before.generate);
    [this.first.value, this.second.value] = before.of ?? ["", ""];
    void this.ask();
  }

  stop() {
    this.asking?.abort();
  }

  /** @param {string} text @param {boolean} [isFault] */
  say(text, isFault = false) {
    this.status.textContent = text;
    this.status.classList.toggle("fault", isFault);
  }

  /**
   * Wait for an answer and show the time; cancel the computation if it is no longer needed.
   * @template T
   * @param {(signal: AbortSignal) => Promise<T>} ask
   * @param {(error: Error) => void} [refused]
   * @returns {Promise<T | null>}
   */
  async working(ask, refused = () => {}) {
    this.stop();
    const asking = new AbortController();
    this.asking = asking;
    const start = performance.now();
    const clock = setInterval(() => this.say(`computing for ${Math.round((performance.now() - start) / 1000)} s`), 1000);
    this.say("computing …");
    document.documentElement.dataset.asking = "1";
    try {
      const answer = await ask(asking.signal);
      this.say("");
      return answer;
    } catch (error) {
      const { name, message } = /** @type {Error} */ (error);
      if (asking === this.asking) {
        this.say(name === "AbortError" ? "stopped" : message, name !== "AbortError");
        refused(/** @type {Error} */ (error));
      }
      return null;
    } finally {
      clearInterval(clock);
      if (asking === this.asking) document.documentElement.dataset.asking = "0";
    }
  }

  async ask() {
    const { asked } = this;
    this.showChanges();
    await this.working(async (signal) => {
      // For a long text, the first layer is loaded first; its maps stay when all layers are ready.
      const begun = asked.edits.length ? null : await post("read", { ...asked, is_beginning: true }, signal);
      if (begun?.page.samples) await this.begin(begun);
      this.show(/** @type {Answer} */ (await post("read", asked, signal)), Boolean(begun?.page.samples));
    }, () => this.refused(asked));
  }

  /**
   * Show the first layer, and return when its maps are loaded.
   * @param {Answer} begun
   */
  async begin(begun) {
    this.pieces = new Pieces(begun.name);
    readFrom(async () => "");
    explorer.replace(begun.page);
    explorer.store.set({ sample: 0, other: -1 });
    for (let seen = -1; seen !== this.pieces.grids.size;) {
      seen = this.pieces.grids.size;
      await Promise.allSettled([...this.pieces.grids.values(), new Promise((done) => setTimeout(done, 200))]);
    }
  }

  /**
   * An impossible change is refused and changes nothing.
   * @param {Asked} asked
   */
  refused(asked) {
    const before = this.before.pop();
    if (before && asked === this.asked) this.asked = before;
    this.showChanges();
  }

  /**
   * @param {Answer} answer
   * @param {boolean} [isKnown] whether pieces of it have come already
   */
  show(answer, isKnown = false) {
    const hadTwo = explorer.page.samples.length > 1;
    this.answer = answer;
    if (isKnown) this.pieces.name = answer.name;
    else this.pieces = new Pieces(answer.name);
    readFrom((number) => text(`blob/${answer.name}/${number}`));
    explorer.replace(answer.page);
    const hasTwo = answer.page.samples.length > 1;
    if (hasTwo !== hadTwo) explorer.store.set({ sample: 0, other: hasTwo ? 1 : -1 });
    this.form.follow();
    this.followed = null;
    const force = this.facts.writes ? (/** @type {number} */ position, /** @type {number} */ index) => void this.force(position, index) : null;
    fill(this.output, ...outputNodes(answer.outputs, hasTwo, (position, index) => (this.followed = { position, index }), force));
    if (answer.outputs.difference) this.output.append(el("button", { type: "button", class: "plain-button", onclick: () => this.alone() }, "Stop comparing"));
    this.python.textContent = answer.python.join("\n");
    this.showTrial();
  }

  /** Offer one change to try; after a change, say what it did. */
  showTrial() {
    const { edits } = this.asked;
    const strongest = strongestHead(explorer.page.samples[0]);
    if (edits.length && this.answer && explorer.page.samples.length > 1) {
      const names = edits.map((change) => changeName(change, this.facts)).join("; ");
      fill(this.trial, el("p", {}, el("b", {}, `${names[0].toUpperCase()}${names.slice(1)}. `), ...effectWords(this.answer.outputs)), this.undoButton());
    } else if (!edits.length && strongest && this.facts.attentions[strongest.stack]) {
      const { stack, layer, head } = strongest;
      fill(this.trial, el("p", {}, "Try this: ",
        el("button", { type: "button", class: "plain-button", onclick: () => this.add(this.form.headOff(stack, layer, head)) }, `Switch off layer ${layer}, head ${head}`),
        ` of the ${attentionName(stack)}, and see what the model does.`));
    } else fill(this.trial);
  }

  undoButton() {
    return el("button", { type: "button", class: "plain-button", onclick: () => this.undo() }, "Undo");
  }

  showChanges() {
    const { edits } = this.asked;
    fill(this.list,
      ...edits.map((change, index) => el("li", { class: "change" }, changeName(change, this.facts),
        el("button", { type: "button", class: "icon small", "aria-label": `remove: ${changeName(change, this.facts)}`, onclick: () => this.set({ edits: edits.filter((_, place) => place !== index) }) }, "×"))),
      this.before.length && !edits.length ? el("li", {}, this.undoButton()) : null,
      edits.length > 1 ? el("li", {}, el("button", { type: "button", class: "plain-button", onclick: () => this.set({ edits: [] }) }, "Remove all")) : null,
    );
  }
}

/**
 * Return the head with the largest effect on the output; where it was not measured, with the largest contribution.
 * @param {import("./types.js").Sample | undefined} sample
 */
function strongestHead(sample) {
  const heads = (sample?.attentions ?? []).flatMap(({ stack, layers }) => layers.flatMap((layer) => layer.heads.map((head, place) =>
    ({ stack, layer: layer.layer, head, size: Math.abs(layer.values.effect?.[place] ?? layer.values.contribution?.[place] ?? 0) }))));
  return heads.sort((one, two) => two.size - one.size)[0];
}

new Bench();
