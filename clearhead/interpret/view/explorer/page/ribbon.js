/** A text as a row of tokens, each shaded by a number; the user can select a token. */

import { css, inkOn } from "./color.js";
import { el, fill, fixed } from "./dom.js";
import { direction, tokenNode } from "./labels.js";

/** @typedef {import("./types.js").Label} Label */

export class Ribbon {
  /**
   * @param {string} name
   * @param {(index: number) => void} pick
   * @param {(index: number) => void} [hover] -1: no token
   */
  constructor(name, pick, hover) {
    this.root = el("div", { class: "ribbon", role: "group", "aria-label": name });
    this.name = name;
    /** @type {HTMLElement[]} */
    this.buttons = [];
    /** @type {Label[]} */
    this.row = [];
    const at = (/** @type {Event} */ event) => this.buttons.indexOf(/** @type {HTMLElement} */ (/** @type {Element} */ (event.target).closest("button")));
    this.root.addEventListener("click", (event) => at(event) >= 0 && pick(at(event)));
    if (hover) {
      this.root.addEventListener("pointerover", (event) => hover(at(event)));
      this.root.addEventListener("pointerleave", () => hover(-1));
      this.root.addEventListener("focusin", (event) => hover(at(event)));
    }
    this.root.addEventListener("keydown", (event) => this.walk(event));
  }

  /** @param {KeyboardEvent} event */
  walk(event) {
    const at = this.buttons.indexOf(/** @type {HTMLElement} */ (document.activeElement));
    const ahead = this.root.dir === "rtl" ? -1 : 1;
    const step = { ArrowLeft: -ahead, ArrowRight: ahead, ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (at < 0 || !step || event.ctrlKey || event.metaKey || event.altKey) return;
    const next = this.buttons[at + step];
    if (next) {
      this.buttons[at].tabIndex = -1;
      next.tabIndex = 0;
      next.focus();
    }
    event.preventDefault();
  }

  /** @param {Label[]} row */
  setRow(row) {
    const isSame = row.length === this.row.length && row.every((label, index) => label.text === this.row[index].text);
    this.row = row;
    if (isSame) return;
    this.root.dir = direction(row);
    this.buttons = row.map((label, index) => {
      const button = el("button", { type: "button", class: label.generated ? "token generated" : "token", tabindex: index ? -1 : 0 }, tokenNode(label.text));
      if (/\n/.test(label.text)) button.classList.add("ends-line");
      return button;
    });
    fill(this.root, ...this.buttons);
  }

  /**
   * @param {number} chosen
   * @param {Float32Array | null} numbers NaN: cannot be looked at
   * @param {string} scale
   * @param {boolean} signed
   */
  paint(chosen, numbers, scale, signed) {
    this.buttons.forEach((button, index) => {
      const value = numbers?.[index] ?? NaN;
      const isKnown = !Number.isNaN(value);
      button.style.background = isKnown ? css(value, scale, signed) : "";
      button.style.color = isKnown ? inkOn(value, scale, signed) : "";
      button.classList.toggle("masked", numbers !== null && !isKnown);
      button.setAttribute("aria-pressed", String(index === chosen));
      button.title = isKnown ? fixed(value) : "";
    });
    const { root } = this;
    const top = (this.buttons[chosen]?.offsetTop ?? 0) - root.offsetTop;
    if (root.scrollHeight > root.clientHeight && (top < root.scrollTop || top > root.scrollTop + root.clientHeight - 30)) root.scrollTop = top - 40;
    if (chosen >= 0 && !this.root.contains(document.activeElement)) {
      this.buttons.forEach((button, index) => { button.tabIndex = index === chosen ? 0 : -1; });
    }
  }
}
