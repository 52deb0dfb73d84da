/** The page with its heading, controls, views and keyboard shortcuts. */

import { alignment, hasAlignment } from "./alignment.js";
import { beams } from "./beams.js";
import { setTheme, theme } from "./color.js";
import { el, fill, refill, segmented, select, stepper, toggle } from "./dom.js";
import { watchFrames } from "./frames.js";
import { STACK_NAMES, areComparable, bestHead, headOf, layerOf, stackOf } from "./grids.js";
import { showHelp } from "./help.js";
import { canJoin } from "./labels.js";
import { lens } from "./lens.js";
import { lines } from "./lines.js";
import { matrix } from "./matrix.js";
import { hasExact, neuron } from "./neuron.js";
import { overview } from "./overview.js";
import { inWords } from "./words.js";
import { Player } from "./player.js";
import { Store } from "./state.js";
import { token } from "./token.js";

/** @typedef {import("./types.js").Sample} Sample */
/** @typedef {import("./types.js").Pane} Pane */
/** @typedef {import("./state.js").State} State */
/**
 * @typedef {object} ViewKind
 * @property {string} name
 * @property {string} title
 * @property {(sample: Sample) => boolean} has
 * @property {(root: HTMLElement, pane: Pane, app: import("./types.js").App) => import("./types.js").View} open
 * @property {("layer" | "head")[]} chooses indices that the view takes from the state
 * @property {boolean} canDiffer
 */

const hasAttention = (/** @type {Sample} */ sample) => sample.attentions.length > 0;
/** For a long text, a live page has only tiles of the maps. */
const hasWeights = (/** @type {Sample} */ sample) => hasAttention(sample) && sample.attentions[0].layers[0].weights !== null;

/** @type {ViewKind[]} */
const VIEWS = [
  { name: "overview", title: "Overview", has: hasAttention, open: overview, chooses: [], canDiffer: true },
  { name: "matrix", title: "Matrix", has: hasAttention, open: matrix, chooses: ["layer", "head"], canDiffer: true },
  { name: "lines", title: "Lines", has: hasWeights, open: lines, chooses: ["layer"], canDiffer: true },
  { name: "token", title: "Token", has: hasWeights, open: token, chooses: [], canDiffer: true },
  { name: "neuron", title: "Neuron", has: hasExact, open: neuron, chooses: [], canDiffer: false },
  { name: "alignment", title: "Alignment", has: (sample) => hasWeights(sample) && hasAlignment(sample), open: alignment, chooses: [], canDiffer: true },
  { name: "lens", title: "Lens", has: (sample) => sample.lens !== null, open: lens, chooses: [], canDiffer: false },
  { name: "beams", title: "Beams", has: (sample) => sample.beams.length > 0, open: beams, chooses: [], canDiffer: false },
];

/** @param {[string, string][]} facts */
function factNodes(facts) {
  return facts.map(([name, value]) => el("span", { class: "fact" }, el("span", { class: "fact-name" }, name), " ", el("bdi", {}, value)));
}

/**
 * The texts that the model reads and writes, once for samples with equal texts.
 * @param {Sample[]} samples
 */
function textNodes(samples) {
  const known = new Set(samples.map((sample) => JSON.stringify(sample.texts)));
  return (known.size === 1 ? samples.slice(0, 1) : samples).flatMap((sample) => (sample.texts ?? []).map(([name, text]) =>
    el("p", { title: text }, el("span", { class: "fact-name" }, known.size > 1 ? `${sample.label} ${name} ` : `${name} `), el("bdi", {}, text))));
}

class Explorer {
  constructor() {
    /** @type {import("./types.js").Page} */
    this.page = JSON.parse(document.getElementById("data")?.textContent ?? "");
    this.store = new Store();
    this.top = /** @type {HTMLElement} */ (document.getElementById("top"));
    this.main = /** @type {HTMLElement} */ (document.getElementById("main"));
    this.live = /** @type {HTMLElement} */ (document.getElementById("live"));
    /** @type {{ view: import("./types.js").View, root: HTMLElement, heading: HTMLElement, place: number }[]} */
    this.open = [];
    this.opened = "";
    this.controlled = "";
    document.title = `${this.page.title} · attention`;
    this.nav = el("nav", { class: "views", "aria-label": "views" });
    this.texts = el("div", { class: "texts" });
    this.words = el("p", { class: "note words" });
    this.bar = el("div", { class: "bar" });
    this.slot = el("div", { class: "bar" });
    this.scaleBar = el("div", { class: "bar scale" });
    this.player = new Player(this);
    this.begin();
    this.heading();
    this.store.watchers.push(() => this.update());
    addEventListener("keydown", (event) => this.keyed(event));
    const dark = matchMedia("(prefers-color-scheme: dark)");
    dark.addEventListener("change", () => this.recolor(dark.matches ? "dark" : "light"));
    watchFrames();
    this.recolor(dark.matches ? "dark" : "light");
  }

  /**
   * Replace the content by another page.
   * @param {import("./types.js").Page} page
   */
  replace(page) {
    const isFirst = !this.page.samples.length;
    this.page = page;
    if (isFirst) this.begin();
    this.opened = this.controlled = "";
    this.heading();
    this.update();
  }

  /** Open every view on the head that the Alignment view shows. */
  begin() {
    const { samples, timeline } = this.page;
    const best = bestHead(timeline ? samples.at(-1) : samples[0]);
    if (best) this.store.begin({ layer: best.layer, head: best.head });
  }

  /** @param {string} text */
  announce(text) {
    this.live.textContent = text;
  }

  heading() {
    fill(this.top,
      el("div", { class: "title" },
        el("h1", {}, el("bdi", {}, this.page.title)),
        el("p", { class: "page-facts" }, ...factNodes(this.page.facts)),
        el("div", { class: "tools" },
          el("button", { type: "button", class: "icon", "aria-label": "light or dark", title: "light or dark (t)", onclick: () => this.turnTheme() }, "◐"),
          el("button", { type: "button", class: "icon", "aria-label": "help and keys", title: "help and keys (?)", onclick: () => showHelp(this.offered()) }, "?"),
        ),
      ),
      this.texts, this.nav, el("div", { class: "controls" }, this.bar, this.slot, this.scaleBar), this.words, this.player.root,
    );
  }

  turnTheme() {
    this.recolor(theme() === "dark" ? "light" : "dark");
  }

  /**
   * @param {"light" | "dark"} name
   */
  recolor(name) {
    setTheme(name);
    this.update();
  }

  sample() {
    return this.page.samples[this.store.state.sample] ?? this.page.samples[0];
  }

  other() {
    const other = this.page.samples[this.store.state.other];
    return other && other !== this.sample() ? other : null;
  }

  offered() {
    return VIEWS.filter((kind) => this.page.samples.some(kind.has));
  }

  kind() {
    const offered = this.offered();
    const named = offered.find((kind) => kind.name === this.store.state.view);
    // A model with two stacks opens with its word alignment.
    return named ?? offered.find((kind) => kind.name === "alignment") ?? offered[0];
  }

  /** @returns {Pane[]} */
  panes() {
    const [sample, other, kind] = [this.sample(), this.other(), this.kind()];
    /** @type {Pane[]} */
    const panes = [{ sample, minus: null, name: sample.label }];
    if (other) panes.push({ sample: other, minus: null, name: other.label });
    if (other && this.store.state.difference && kind.canDiffer && areComparable(sample, other)) {
      panes.push({ sample: other, minus: sample, name: `${other.label} − ${sample.label}` });
    }
    return panes;
  }

  update() {
    const { state } = this.store;
    const kind = this.kind();
    if (!kind) {
      fill(this.main, el("p", { class: "note" }, "This page has no data to show."));
      return;
    }
    this.controls(state, kind);
    this.player.update(state);
    const panes = this.panes();
    fill(this.texts, ...textNodes([...new Set(panes.map((pane) => pane.sample))]));
    fill(this.words, inWords(kind.name, this.sample(), state));
    // The checkpoints of a run use the same panes one after the other.
    const place = (/** @type {Sample} */ sample) => (this.page.timeline && kind.has(sample) ? 0 : this.page.samples.indexOf(sample));
    const opened = JSON.stringify([kind.name, panes.map((pane) => [place(pane.sample), pane.minus !== null])]);
    if (opened !== this.opened) {
      this.opened = opened;
      this.openPanes(kind, panes);
    }
    const { dataset } = document.documentElement;
    const number = String(Number(dataset.update ?? 0) + 1);
    dataset.update = number;
    for (const { heading, place } of this.open) this.namePane(heading, panes[place]);
    void Promise.all(this.open.map(({ view, place }) => view.update(state, panes[place]))).then(() => {
      if (dataset.update === number) dataset.drawn = number;
    });
  }

  /**
   * @param {ViewKind} kind
   * @param {Pane[]} panes
   */
  openPanes(kind, panes) {
    for (const { view } of this.open) view.close?.();
    this.open = [];
    fill(this.slot);
    this.main.dataset.panes = String(panes.length);
    this.main.dataset.view = kind.name;
    const sections = panes.map((pane) => {
      const heading = el("h2", { class: this.page.samples.length < 2 ? "unseen" : null });
      return { pane, heading, root: el("section", { class: "pane", "aria-label": pane.name }, heading) };
    });
    fill(this.main, ...sections.map(({ root }) => root));
    sections.forEach(({ pane, root, heading }, place) => {
      if (kind.has(pane.sample)) this.open.push({ view: kind.open(root, pane, this), root, heading, place });
      else root.append(el("p", { class: "note" }, "There is no data for this view."));
      const panel = root.querySelector("aside");
      if (panel && panes.length > 1) panel.ariaLabel += ` of ${pane.name}`;
    });
  }

  /**
   * @param {HTMLElement} heading
   * @param {Pane} pane
   */
  namePane(heading, pane) {
    fill(heading, el("bdi", {}, pane.name), " ", ...(pane.minus ? [] : factNodes(pane.sample.facts)));
  }

  /**
   * @param {State} state
   * @param {ViewKind} kind
   */
  controls(state, kind) {
    const { query, key, box, node, ...rest } = state;
    const controlled = JSON.stringify([kind.name, rest]);
    if (controlled === this.controlled) return;
    this.controlled = controlled;
    refill(this.nav, ...this.offered().map((one) =>
      el("button", { type: "button", "aria-current": one === kind ? "page" : null, onclick: () => this.store.set({ view: one.name }) }, one.title),
    ));
    const sample = this.sample();
    const stack = hasAttention(sample) ? stackOf(sample, state) : null;
    const usesStack = stack !== null && !["lens", "beams", "alignment"].includes(kind.name);
    refill(this.bar,
      ...this.sampleControls(state, kind),
      ...(usesStack ? this.stackControls(sample, stack, kind) : []),
      ...(stack ? this.headControls(stack, state, kind) : []),
      Object.values(sample.rows).some(canJoin) && !["overview", "neuron", "lens", "beams"].includes(kind.name)
        ? toggle("Join subwords", state.join === 1, (isOn) => this.store.set({ join: isOn ? 1 : 0, box: "" })) : null,
    );
    refill(this.scaleBar, stack && !["neuron", "lens", "beams", "lines"].includes(kind.name) ? this.legend(state) : null);
  }

  /**
   * @param {Sample} sample
   * @param {import("./types.js").Stack} stack
   * @param {ViewKind} kind
   */
  stackControls(sample, stack, kind) {
    const names = [...new Set(sample.attentions.map((one) => one.stack))];
    const same = sample.attentions.filter((one) => one.stack === stack.stack);
    const measures = same.map((one, index) => /** @type {[string, string]} */ ([String(index), one.measure]));
    return [
      names.length > 1 ? segmented("attention", names.map((name) => [name, STACK_NAMES[name]]), stack.stack,
        (name) => this.store.set({ stack: name, measure: 0, query: -1, key: -1, box: "" })) : null,
      measures.length > 1 && kind.name !== "neuron" ? select("Measure", measures, String(same.indexOf(stack)), (value) => this.store.set({ measure: Number(value) })) : null,
    ];
  }

  /**
   * @param {import("./types.js").Stack} stack
   * @param {State} state
   * @param {ViewKind} kind
   */
  headControls(stack, state, kind) {
    const layer = layerOf(stack, state);
    return [
      kind.chooses.includes("layer") ? stepper("Layer", stack.layers.map((one) => one.layer), layer.layer, (value) => this.store.set({ layer: value })) : null,
      kind.chooses.includes("head") ? stepper("Head", layer.heads, headOf(layer, state), (value) => this.store.set({ head: value })) : null,
    ];
  }

  /**
   * @param {State} state
   * @param {ViewKind} kind
   */
  sampleControls(state, kind) {
    const { samples, timeline } = this.page;
    if (samples.length < 2) return [];
    const options = samples.map((sample, index) => /** @type {[string, string]} */ ([String(index), sample.label]));
    const other = this.other();
    const shown = samples.indexOf(this.sample());
    return [
      timeline ? null : select("Show", options, String(shown), (value) => this.store.set({ sample: Number(value) })),
      select("Compare with", [["-1", "nothing"], ...options.filter(([value]) => value !== String(shown))], String(other ? state.other : -1),
        (value) => this.store.set({ other: Number(value) })),
      other && kind.canDiffer && areComparable(this.sample(), other)
        ? toggle("Difference", state.difference === 1, (isOn) => this.store.set({ difference: isOn ? 1 : 0 })) : null,
    ];
  }

  /** @param {State} state */
  legend(state) {
    const isRoot = state.scale === "root";
    const marks = isRoot ? [0, 0.1, 0.5, 1] : [0, 0.5, 1];
    const share = (/** @type {number} */ mark) => (isRoot ? Math.sqrt(mark) : mark);
    /**
     * @param {string} kind
     * @param {[string, number][]} named text and position of each mark
     */
    const ramp = (kind, named) => el("span", { class: `ramp ${kind}`, "aria-hidden": "true" }, ...named.map(([text, place]) => {
      const tick = el("span", {}, text);
      tick.style.left = `${100 * place}%`;
      return tick;
    }));
    const isDifferent = this.panes().some((pane) => pane.minus !== null);
    return el("button", {
      type: "button", class: "legend", title: "colours: square root or linear",
      "aria-label": `colours from 0 to 1 by ${isRoot ? "square root" : "linear"} scale; change`,
      onclick: () => this.store.set({ scale: isRoot ? "linear" : "root" }),
    }, isDifferent ? "difference" : null, isDifferent ? ramp("both", [["−1", 0], ["less", 0.25], ["0", 0.5], ["more", 0.75], ["1", 1]]) : null,
    this.store.state.measure && this.kind().name !== "alignment" ? "share" : "weight", ramp("one", marks.map((mark) => [String(mark), share(mark)])));
  }

  /**
   * @param {number} by
   * @param {"layer" | "head"} what
   */
  step(by, what) {
    const sample = this.sample();
    if (!hasAttention(sample)) return;
    const { state } = this.store;
    const stack = stackOf(sample, state);
    const layer = layerOf(stack, state);
    const numbers = what === "layer" ? stack.layers.map((one) => one.layer) : layer.heads;
    const next = numbers[numbers.indexOf(what === "layer" ? layer.layer : headOf(layer, state)) + by];
    if (next === undefined) return;
    this.store.set({ [what]: next });
    this.announce(`${what} ${next}`);
  }

  /** @param {KeyboardEvent} event */
  keyed(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    if (/** @type {Element} */ (event.target).closest("select, input, textarea, dialog[open]")) return;
    const view = this.offered()[Number(event.key) - 1];
    const { state } = this.store;
    /** @type {Record<string, () => void>} */
    const keys = {
      "?": () => showHelp(this.offered()),
      t: () => this.turnTheme(),
      "[": () => this.step(-1, "layer"),
      "]": () => this.step(1, "layer"),
      ",": () => this.step(-1, "head"),
      ".": () => this.step(1, "head"),
      j: () => this.store.set({ join: state.join ? 0 : 1, box: "" }),
      l: () => this.store.set({ scale: state.scale === "root" ? "linear" : "root" }),
      d: () => this.store.set({ difference: state.difference ? 0 : 1 }),
      s: () => this.nextStack(),
      p: () => this.player.turn(),
    };
    if (view) this.store.set({ view: view.name });
    else if (keys[event.key]) keys[event.key]();
    else if (!this.open.some((one) => one.root.contains(/** @type {Node} */ (event.target)) && one.view.key?.(event))) return;
    event.preventDefault();
  }

  nextStack() {
    const names = [...new Set(this.sample().attentions.map((one) => one.stack))];
    const at = names.indexOf(stackOf(this.sample(), this.store.state)?.stack);
    if (names.length > 1) this.store.set({ stack: names[(at + 1) % names.length], measure: 0, query: -1, key: -1, box: "" });
  }
}

export const explorer = new Explorer();
