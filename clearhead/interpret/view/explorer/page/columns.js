/** A wide board of columns; only the columns in the window exist as elements. */

import { el } from "./dom.js";

export class Columns {
  /**
   * @param {HTMLElement} root
   * @param {string} name
   * @param {(first: number, last: number) => void} show function called when other columns become visible
   */
  constructor(root, name, show) {
    this.board = el("div", { class: "columns-board" });
    this.root = el("div", { class: "columns", tabindex: 0, role: "group", "aria-label": name }, this.board);
    root.append(this.root);
    this.show = show;
    this.count = 0;
    this.width = 100;
    this.left = 0;
    this.range = "";
    /** @type {(() => void) | null} */
    this.refit = null;
    this.root.addEventListener("scroll", () => this.refresh(), { passive: true });
    this.observer = new ResizeObserver(() => (this.refit ? this.refit() : this.refresh()));
    this.observer.observe(this.root);
  }

  /**
   * Choose a width of the columns at which no column is cut.
   * @param {number} count
   * @param {number[]} widths least and largest width
   * @param {number} left width before the first column
   */
  fit(count, [least, largest], left) {
    this.refit = () => {
      const room = this.root.clientWidth - left;
      const shown = Math.min(count, Math.max(1, Math.floor(room / least)));
      this.resize(count, Math.min(largest, room / shown), left);
    };
    this.refit();
  }

  /**
   * @param {number} count
   * @param {number} width
   * @param {number} left width before the first column
   */
  resize(count, width, left) {
    this.count = count;
    this.width = width;
    this.left = left;
    this.range = "";
    this.board.style.width = `${left + count * width}px`;
    this.refresh();
  }

  refresh() {
    const first = Math.max(0, Math.floor((this.root.scrollLeft - this.left) / this.width) - 2);
    const last = Math.min(this.count, Math.ceil((this.root.scrollLeft + this.root.clientWidth - this.left) / this.width) + 2);
    const range = `${first} ${last}`;
    if (range === this.range || this.root.clientWidth === 0) return;
    this.range = range;
    this.show(first, last);
  }

  /** @param {number} column */
  reveal(column) {
    const from = column * this.width;
    const room = this.root.clientWidth - this.left;
    if (from < this.root.scrollLeft) this.root.scrollLeft = from;
    else if (from + this.width > this.root.scrollLeft + room) this.root.scrollLeft = from + this.width - room;
  }
}
