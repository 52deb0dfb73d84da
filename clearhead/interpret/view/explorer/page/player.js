/** Player of the checkpoints of a run, one after the other. */

import { el, fill } from "./dom.js";

const PACE = 700;

export class Player {
  /** @param {import("./types.js").App} app */
  constructor(app) {
    this.root = el("div", { class: "player" });
    this.app = app;
    this.timer = 0;
    this.root.hidden = !app.page.timeline || app.page.samples.length < 2;
    this.button = el("button", { type: "button", class: "icon", "aria-label": "play", title: "play (p)", onclick: () => this.turn() }, "▶");
    this.range = /** @type {HTMLInputElement} */ (el("input", {
      type: "range", min: 0, max: app.page.samples.length - 1, step: 1, "aria-label": "checkpoint",
      oninput: () => app.store.set({ sample: Number(this.range.value) }),
    }));
    this.label = el("output", {});
    this.place = el("span", { class: "fact-name" });
    fill(this.root, this.button, this.range, this.label, this.place);
  }

  /** @param {import("./state.js").State} state */
  update(state) {
    this.range.value = String(state.sample);
    const label = this.app.page.samples[state.sample]?.label ?? "";
    this.range.setAttribute("aria-valuetext", label);
    this.label.textContent = label;
    this.place.textContent = `${state.sample + 1} of ${this.app.page.samples.length}`;
  }

  turn() {
    if (this.root.hidden) return;
    const last = this.app.page.samples.length - 1;
    if (this.timer) clearInterval(this.timer);
    const isPlaying = this.timer !== 0;
    this.timer = 0;
    if (!isPlaying) {
      if (this.app.store.state.sample >= last) this.app.store.set({ sample: 0 });
      this.timer = setInterval(() => {
        const next = this.app.store.state.sample + 1;
        if (next > last) this.turn();
        else this.app.store.set({ sample: next });
      }, PACE);
    }
    this.button.textContent = this.timer ? "❚❚" : "▶";
    this.button.setAttribute("aria-label", this.timer ? "pause" : "play");
  }
}
