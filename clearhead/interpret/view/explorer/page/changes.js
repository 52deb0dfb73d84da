/** Form for changes of the model. */

import { el, fill } from "./dom.js";
import { STACK_NAMES, stackOf } from "./grids.js";

/**
 * One change of the model, in the format of interventions.py.
 * @typedef {object} Change
 * @property {"scale" | "patch"} kind
 * @property {string} address
 * @property {number} [factor]
 * @property {number | null} [head]
 * @property {number[]} [positions]
 * @property {number | null} [depth]
 * @property {string} [text]
 * @property {string | null} [target]
 */

/**
 * @param {Change} change
 * @param {import("./live.js").Facts} facts
 */
export function changeName(change, facts) {
  const { address, head, positions, depth } = change;
  const [, stack, layer] = /^(\w+)\.layers\.(\d+)/.exec(address) ?? [];
  const attention = Object.entries(facts.attentions).find(([, places]) => Object.values(places).some((place) => `${place}.mixed` === address))?.[0];
  const thing = attention ? `${attentionName(attention)}, layer ${depth ?? layer}, head ${head}`
    : `${stack}, ${/\.(after|before)$/.test(address) ? `stream ${address.split(".").at(-1)} ` : ""}layer ${depth ?? layer}`;
  const where = thing + (positions?.length ? `, position ${positions.join(", ")}` : "");
  if (change.kind === "patch") return `${where}: from “${change.text}”`;
  return change.factor ? `${where}: × ${change.factor}` : `${where}: off`;
}

/** @param {string} stack */
export function attentionName(stack) {
  return stack === "decoder.memory" ? "cross-attention" : stack.split(".")[0];
}

/**
 * Parse a list of numbers and ranges, such as 0,3-5.
 * @param {string} text
 */
export function numbersOf(text) {
  /** @type {number[]} */
  const found = [];
  for (const part of text.split(",").map((one) => one.trim()).filter(Boolean)) {
    const match = /^(\d{1,7})(?:-(\d{1,7}))?$/.exec(part);
    if (!match) throw new Error(`“${part}” is not a position: give numbers and ranges, such as 0,3-5`);
    for (let at = Number(match[1]); at <= Number(match[2] ?? match[1]) && found.length < 256; at++) found.push(at);
  }
  return found;
}

export class ChangeForm {
  /**
   * @param {import("./live.js").Facts} facts
   * @param {{ store: import("./state.js").Store, page: import("./types.js").Page, sample: () => import("./types.js").Sample }} explorer
   * @param {(change: Change) => void} apply
   * @param {(text: string, target: string | null) => void} sweep
   */
  constructor(facts, explorer, apply, sweep) {
    this.sweep = sweep;
    this.facts = facts;
    this.explorer = explorer;
    this.apply = apply;
    this.what = this.choice("What", [["head", "a head"], ["layer", "a layer"], ["stream", "the stream after a layer"]]);
    this.how = this.choice("How", [["scale", "times"], ["patch", "from another text"]]);
    this.stack = this.choice("Stack", []);
    this.layer = this.choice("Layer", []);
    this.head = this.choice("Head", []);
    this.positions = this.input({ type: "text", placeholder: "all", size: 7, "aria-label": "positions" });
    this.factor = this.input({ type: "number", value: 0, step: 0.1, min: -1000, max: 1000, "aria-label": "factor" });
    this.slider = this.input({ type: "range", value: 0, step: 0.1, min: 0, max: 2, "aria-label": "factor" });
    this.slider.addEventListener("input", () => (this.factor.value = this.slider.value));
    this.factor.addEventListener("input", () => (this.slider.value = this.factor.value));
    this.other = this.input({ type: "text", placeholder: "a second text", "aria-label": "the second text" });
    this.otherTarget = this.input({ type: "text", placeholder: "its target; empty: what the model writes", "aria-label": "the target of the second text" });
    this.fault = el("p", { class: "status fault", role: "status" });
    this.root = el("div", { class: "bench-form" });
    this.followed = "";
    this.build();
  }

  /** @param {Record<string, string | number>} properties */
  input(properties) {
    return /** @type {HTMLInputElement} */ (el("input", properties));
  }

  /**
   * @param {string} title
   * @param {[string, string][]} options
   */
  choice(title, options) {
    const element = /** @type {HTMLSelectElement} */ (el("select", { "aria-label": title }));
    this.offer(element, options);
    element.addEventListener("change", () => this.build());
    return element;
  }

  /**
   * @param {HTMLSelectElement} element
   * @param {[string, string][]} options
   */
  offer(element, options) {
    const { value } = element;
    fill(element, ...options.map(([name, text]) => el("option", { value: name }, text)));
    if (options.some(([name]) => name === value)) element.value = value;
  }

  /** Copy the selection of the views into the form. */
  follow() {
    const { state } = this.explorer.store;
    // The shown selection; a link may leave it out.
    const stack = stackOf(this.explorer.sample(), state)?.stack ?? state.stack;
    const followed = [stack, state.layer, state.head, state.query].join();
    if (followed === this.followed) return;
    this.followed = followed;
    this.build();
    if (this.what.value === "head" && stack in this.facts.attentions) this.stack.value = stack;
    this.build();
    this.layer.value = String(state.layer);
    this.build();
    this.head.value = String(state.head);
    if (state.query >= 0 && this.what.value === "stream") this.positions.value = String(state.query);
  }

  build() {
    const { facts, explorer } = this;
    const isHead = this.what.value === "head";
    const stacks = Object.keys(isHead ? facts.attentions : facts.orders);
    this.offer(this.stack, stacks.map((name) => [name, STACK_NAMES[name] ?? name]));
    const layers = isHead ? Object.keys(facts.attentions[this.stack.value] ?? {}).map(Number).sort((one, two) => one - two) : (facts.orders[this.stack.value] ?? []).map((_, depth) => depth);
    this.offer(this.layer, layers.map((number) => [String(number), String(number)]));
    const shown = explorer.page.samples[0]?.attentions.find((one) => one.stack === this.stack.value)?.layers.find((one) => String(one.layer) === this.layer.value);
    this.offer(this.head, Array.from({ length: shown?.numHeads ?? 1 }, (_, head) => [String(head), String(head)]));
    const isPatch = this.how.value === "patch";
    if (isPatch && this.what.value === "layer") this.how.value = "scale";
    const field = (/** @type {string} */ title, /** @type {HTMLElement} */ control) => el("label", { class: "field" }, el("span", { class: "field-name" }, title), control);
    const button = (/** @type {string} */ name, /** @type {() => void} */ act) => el("button", { type: "button", class: "plain-button", onclick: act }, name);
    const [layer, positions] = [field("layer", this.layer), field("positions", this.positions)];
    const how = this.what.value === "layer" ? el("span", { class: "field-name" }, "times") : this.how;
    const apply = button(isPatch ? "Patch" : "Apply", () => this.submit());
    // Rows that fit the panel: no control stands alone.
    const rows = [
      [field("Change", this.what), stacks.length > 1 ? field("of", this.stack) : layer],
      [stacks.length > 1 ? layer : null, isHead ? field("head", this.head) : null, positions, stacks.length > 1 || isHead ? null : how],
      [stacks.length > 1 || isHead ? how : null, ...(isPatch ? [this.other] : [this.factor, this.slider, apply])],
      ...(isPatch ? [[facts.readsTarget ? this.otherTarget : null, apply, button("Sweep all positions", () => this.sweep(...this.second()))]] : []),
    ];
    fill(this.root, ...rows.map((row) => el("div", { class: "bench-row" }, ...row.filter((control) => control !== null))), this.fault);
  }

  /** @returns {[string, string | null]} the second text and its target */
  second() {
    return [this.other.value, this.facts.readsTarget && this.otherTarget.value.trim() ? this.otherTarget.value : null];
  }

  /**
   * Return the change that patches in the residual stream of the second text.
   * @param {string} stack
   * @param {number} depth 0 is the embedding, d the stream after d layers
   * @param {number} position
   * @returns {Change}
   */
  patch(stack, depth, position) {
    const order = this.facts.orders[stack];
    const place = Math.max(0, depth - 1);
    const address = `${stack}.layers.${order[place]}.${depth ? "after" : "before"}`;
    const isShared = order.indexOf(order[place]) !== order.lastIndexOf(order[place]);
    const [text, target] = this.second();
    return { kind: "patch", address, head: null, positions: [position], depth: isShared ? place : null, text, target };
  }

  /**
   * Return the change that switches off a head.
   * @param {string} stack
   * @param {number} layer
   * @param {number} head
   * @returns {Change}
   */
  headOff(stack, layer, head) {
    const order = this.facts.orders[stack.split(".")[0]];
    const isShared = order.indexOf(order[layer]) !== order.lastIndexOf(order[layer]);
    return { kind: "scale", address: `${this.facts.attentions[stack][String(layer)]}.mixed`, head, positions: [], depth: isShared ? layer : null, factor: 0 };
  }

  submit() {
    this.fault.textContent = "";
    try {
      this.apply(this.change());
    } catch (error) {
      this.fault.textContent = /** @type {Error} */ (error).message;
    }
  }

  /** @returns {Change} */
  change() {
    const { facts } = this;
    const depth = Number(this.layer.value);
    const name = this.stack.value.split(".")[0];
    const order = facts.orders[name];
    const isShared = order.indexOf(order[depth]) !== order.lastIndexOf(order[depth]);
    const addresses = {
      head: `${facts.attentions[this.stack.value]?.[String(depth)]}.mixed`,
      layer: `${name}.layers.${order[depth]}.steps.*.branches.*`,
      stream: `${name}.layers.${order[depth]}.after`,
    };
    /** @type {Change} */
    const change = {
      kind: this.how.value === "patch" ? "patch" : "scale",
      address: addresses[/** @type {"head" | "layer" | "stream"} */ (this.what.value)],
      head: this.what.value === "head" ? Number(this.head.value) : null,
      positions: numbersOf(this.positions.value),
      depth: isShared ? depth : null,
    };
    if (change.kind === "patch") {
      const [text, target] = this.second();
      return { ...change, text, target };
    }
    const factor = Number(this.factor.value);
    if (!Number.isFinite(factor) || this.factor.value.trim() === "") throw new Error("the factor must be a number, such as 0 or 0.5");
    return { ...change, factor };
  }
}
