/** A heat map with labels on a canvas, with zoom, pan and arrow keys. */

import { ink, theme } from "./color.js";
import { el } from "./dom.js";
import { STRIP, TURN, paintLabels, paintLines, paintMarks, paintStrips, writtenAfter } from "./heat_paint.js";
import { heatImage } from "./image.js";
import { labelParts } from "./labels.js";

/** @typedef {import("./types.js").Grid} Grid */
/** @typedef {import("./types.js").Label} Label */
/** @typedef {{ query: number, key: number }} Cell */

const LARGEST_IMAGE = 1 << 20;
const LARGEST_CELL = 56;
/** Least height of a map (if its cells can be that large), and the height that it leaves free in the window. */
const MOST_HEIGHT = [380, 190];

/**
 * @typedef {object} HeatOptions
 * @property {string} name label for screen readers
 * @property {(cell: Cell | null) => void} hover
 * @property {(cell: Cell) => void} pick
 * @property {((box: string) => void)=} moved
 */

export class HeatMap {
  /**
   * @param {HTMLElement} root
   * @param {HeatOptions} options
   */
  constructor(root, options) {
    this.options = options;
    this.canvas = /** @type {HTMLCanvasElement} */ (el("canvas", { "aria-hidden": "true" }));
    this.tip = el("div", { class: "tip", hidden: true, "aria-hidden": "true" });
    this.root = el("div", {
      class: "heat", tabindex: 0, role: "application", "aria-roledescription": "heat map", "aria-label": options.name,
    }, this.canvas, this.tip);
    root.append(this.root);
    /** @type {Grid | null} */
    this.grid = null;
    this.scale = "root";
    /** @type {Cell | null} */
    this.hovered = null;
    /** @type {Cell | null} */
    this.picked = null;
    /** @type {Cell[]} */
    this.rings = [];
    /**
     * Numbers above the columns, one per key, from -1 to 1.
     * @type {Float32Array | null}
     */
    this.above = null;
    this.hasSink = false;
    this.family = "";
    this.left = this.top = this.right = 0;
    this.zoom = this.fitted = 1;
    this.x = this.y = 0;
    this.isFit = true;
    this.box = "";
    this.look = "";
    this.width = this.height = 0;
    this.request = 0;
    /** @type {HTMLCanvasElement | null} */
    this.image = null;
    this.pool = 1;
    /** @type {Map<number, { x: number, y: number }>} */
    this.pointers = new Map();
    this.isDragged = false;
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(this.root);
    this.listen();
  }

  close() {
    this.observer.disconnect();
    cancelAnimationFrame(this.request);
  }

  /**
   * @param {Grid} grid
   * @param {string} scale
   * @param {Cell | null} picked
   * @param {string} box
   */
  show(grid, scale, picked, box) {
    const look = `${scale} ${theme()}`;
    if (grid !== this.grid || look !== this.look) this.image = null;
    this.grid = grid;
    this.look = look;
    this.scale = scale;
    this.picked = picked;
    if (box !== this.box) this.isFit = box === "";
    if (this.width === 0) this.widen();
    this.measure();
    if (box !== this.box && box) this.setBox(box);
    this.box = box;
    this.paintNow();
  }

  /** Measure the available width; return whether it changed. */
  widen() {
    const { width } = this.root.getBoundingClientRect();
    const pixels = Math.round(width * devicePixelRatio);
    if (width === 0 || (width === this.width && pixels === this.canvas.width)) return false;
    this.width = width;
    this.canvas.width = pixels;
    return true;
  }

  /** Redraw now: resizing has cleared the canvas, and the browser shows it next. */
  resize() {
    if (!this.widen()) return;
    this.measure();
    this.paintNow();
  }

  paintNow() {
    cancelAnimationFrame(this.request);
    this.request = 0;
    if (this.grid && this.width) this.paint(this.grid);
  }

  measure() {
    const { grid } = this;
    if (!grid || this.width === 0) return;
    const context = this.context();
    context.font = this.font();
    const room = Math.min(150, this.width * 0.3);
    /** @param {Label[]} row @param {boolean} [isQuery] */
    const widest = (row, isQuery = false) => Math.min(room, Math.max(...row.slice(0, 2000).map((label) =>
      context.measureText(labelParts(label).join("") + (isQuery ? writtenAfter(label) : "")).width)));
    this.hasSink = !Number.isNaN(grid.sink(0));
    this.left = Math.ceil(widest(grid.queries, true)) + 14 + (this.hasSink ? STRIP : 0);
    const tall = widest(grid.keys);
    this.top = Math.ceil(tall * Math.sin(-TURN)) + 16 + (this.above ? STRIP : 0);
    this.right = Math.ceil(tall * Math.cos(TURN)) + 6;
    const most = Math.max(MOST_HEIGHT[0], innerHeight - MOST_HEIGHT[1]);
    this.fitted = Math.max(0.02, Math.min(
      (this.width - this.left - this.right) / grid.keys.length, (most - this.top - 6) / grid.queries.length, LARGEST_CELL,
    ));
    const height = Math.ceil(this.top + grid.queries.length * this.fitted + 8);
    this.setHeight(this.isFit ? height : Math.max(height, Math.min(most, MOST_HEIGHT[0])));
    if (this.isFit) {
      this.zoom = this.fitted;
      this.x = this.y = 0;
    }
    this.clamp();
  }

  /** @param {number} height */
  setHeight(height) {
    if (height === this.height) return;
    this.height = height;
    this.root.style.height = `${height}px`;
    this.canvas.height = Math.round(height * devicePixelRatio);
  }

  font() {
    this.family ||= getComputedStyle(document.body).fontFamily;
    return `12px ${this.family}`;
  }

  context() {
    return /** @type {CanvasRenderingContext2D} */ (this.canvas.getContext("2d"));
  }

  clamp() {
    if (!this.grid) return;
    const columns = (this.width - this.left - this.right) / this.zoom;
    const rows = (this.height - this.top - 6) / this.zoom;
    this.x = Math.max(0, Math.min(this.x, this.grid.keys.length - columns));
    this.y = Math.max(0, Math.min(this.y, this.grid.queries.length - rows));
  }

  /**
   * @param {number} factor
   * @param {number} [px]
   * @param {number} [py] the point that stays
   */
  zoomBy(factor, px = (this.left + this.width) / 2, py = (this.top + this.height) / 2) {
    const zoom = Math.max(this.fitted, Math.min(LARGEST_CELL, this.zoom * factor));
    const key = this.x + (px - this.left) / this.zoom;
    const query = this.y + (py - this.top) / this.zoom;
    this.isFit = zoom <= this.fitted * 1.001;
    this.zoom = zoom;
    if (this.isFit) this.measure();
    this.x = key - (px - this.left) / zoom;
    this.y = query - (py - this.top) / zoom;
    this.moved();
  }

  fit() {
    this.isFit = true;
    this.zoom = this.fitted;
    this.moved();
  }

  /**
   * @param {number} dx
   * @param {number} dy in pixels
   */
  pan(dx, dy) {
    const { x, y } = this;
    this.x -= dx / this.zoom;
    this.y -= dy / this.zoom;
    this.moved();
    return x !== this.x || y !== this.y;
  }

  moved() {
    this.clamp();
    this.root.classList.toggle("zoomed", !this.isFit);
    this.draw();
    this.box = this.isFit ? "" : [this.x, this.y, this.zoom].map((number) => number.toFixed(2)).join(",");
    this.options.moved?.(this.box);
  }

  /** @param {string} box value from `moved` */
  setBox(box) {
    const numbers = box.split(",").map(Number);
    if (numbers.length !== 3 || !numbers.every(Number.isFinite)) return;
    [this.x, this.y] = numbers;
    this.zoom = Math.max(this.fitted, Math.min(LARGEST_CELL, numbers[2]));
    this.isFit = this.zoom === this.fitted;
    this.clamp();
    this.root.classList.toggle("zoomed", !this.isFit);
  }

  /**
   * @param {number} px
   * @param {number} py
   * @returns {Cell | null}
   */
  cellAt(px, py) {
    if (!this.grid) return null;
    const key = Math.floor(this.x + (px - this.left) / this.zoom);
    const query = Math.floor(this.y + (py - this.top) / this.zoom);
    const isInside = px >= this.left && py >= this.top && key >= 0 && query >= 0;
    return isInside && key < this.grid.keys.length && query < this.grid.queries.length ? { query, key } : null;
  }

  /** @param {Cell} cell */
  value(cell) {
    if (!this.grid) return NaN;
    const row = new Float32Array(this.grid.keys.length);
    this.grid.row(cell.query, row);
    return row[cell.key];
  }

  listen() {
    const { root } = this;
    root.addEventListener("pointermove", (event) => this.pointerMoved(event));
    root.addEventListener("pointerleave", () => this.setHovered(null));
    root.addEventListener("pointerdown", (event) => {
      this.isDragged = false;
      this.pointers.set(event.pointerId, { x: event.offsetX, y: event.offsetY });
    });
    for (const name of ["pointerup", "pointercancel"]) {
      root.addEventListener(name, (event) => this.pointers.delete(/** @type {PointerEvent} */ (event).pointerId));
    }
    root.addEventListener("click", (event) => {
      const cell = this.cellAt(event.offsetX, event.offsetY);
      if (cell && !this.isDragged) this.options.pick(cell);
    });
    root.addEventListener("dblclick", (event) => this.zoomBy(2, event.offsetX, event.offsetY));
    root.addEventListener("wheel", (event) => {
      if (event.ctrlKey || event.metaKey) {
        event.preventDefault();
        this.zoomBy(Math.exp(-event.deltaY / 200), event.offsetX, event.offsetY);
      } else if (!this.isFit && this.pan(-event.deltaX, -event.deltaY)) event.preventDefault();
    }, { passive: false });
    root.addEventListener("keydown", (event) => {
      if (this.keyed(event)) event.preventDefault();
    });
  }

  /** @param {PointerEvent} event */
  pointerMoved(event) {
    const last = this.pointers.get(event.pointerId);
    if (last) {
      const now = { x: event.offsetX, y: event.offsetY };
      const other = [...this.pointers].find(([id]) => id !== event.pointerId)?.[1];
      if (other) {
        const apart = (/** @type {{ x: number, y: number }} */ at) => Math.hypot(at.x - other.x, at.y - other.y);
        this.zoomBy(apart(now) / Math.max(1, apart(last)), (now.x + other.x) / 2, (now.y + other.y) / 2);
      } else this.pan(now.x - last.x, now.y - last.y);
      if (Math.hypot(now.x - last.x, now.y - last.y) > 2) {
        this.isDragged = true;
        this.root.setPointerCapture(event.pointerId);
      }
      this.pointers.set(event.pointerId, now);
    }
    if (this.isDragged && last) return;
    this.setHovered(this.cellAt(event.offsetX, event.offsetY), event.offsetX, event.offsetY);
  }

  /**
   * @param {Cell | null} cell
   * @param {number} [px]
   * @param {number} [py]
   */
  setHovered(cell, px = 0, py = 0) {
    const isSame = cell?.query === this.hovered?.query && cell?.key === this.hovered?.key;
    if (!isSame) {
      this.hovered = cell;
      this.options.hover(cell);
      this.draw();
    }
    this.tip.hidden = cell === null;
    if (cell) {
      const isRight = px > this.width - 230;
      this.tip.style.transform = `translate(${isRight ? px - 14 : px + 14}px, ${py + 16}px)${isRight ? " translateX(-100%)" : ""}`;
    }
  }

  /** @param {KeyboardEvent} event */
  keyed(event) {
    const { grid } = this;
    if (!grid || event.ctrlKey || event.metaKey || event.altKey) return false;
    const step = event.shiftKey ? 10 : 1;
    const move = { ArrowUp: [-step, 0], ArrowDown: [step, 0], ArrowLeft: [0, -step], ArrowRight: [0, step] }[event.key];
    if (move) {
      const at = this.picked ?? this.hovered ?? { query: 0, key: 0 };
      const place = this.picked ?? this.hovered ? move : [0, 0];
      const cell = {
        query: Math.max(0, Math.min(grid.queries.length - 1, at.query + place[0])),
        key: Math.max(0, Math.min(grid.keys.length - 1, at.key + place[1])),
      };
      this.picked = cell;
      this.reveal(cell);
      this.options.pick(cell);
    } else if (event.key === "+" || event.key === "=") this.zoomBy(1.5, ...this.center());
    else if (event.key === "-") this.zoomBy(1 / 1.5, ...this.center());
    else if (event.key === "0") this.fit();
    else return false;
    return true;
  }

  /** @returns {[number, number]} position of the selected cell, otherwise of the middle */
  center() {
    const cell = this.picked;
    if (!cell) return [(this.left + this.width) / 2, (this.top + this.height) / 2];
    return [this.left + (cell.key + 0.5 - this.x) * this.zoom, this.top + (cell.query + 0.5 - this.y) * this.zoom];
  }

  /** @param {Cell} cell */
  reveal(cell) {
    const columns = (this.width - this.left - this.right) / this.zoom;
    const rows = (this.height - this.top - 6) / this.zoom;
    this.x = Math.max(cell.key - columns + 1, Math.min(this.x, cell.key));
    this.y = Math.max(cell.query - rows + 1, Math.min(this.y, cell.query));
    this.moved();
  }

  draw() {
    if (this.request) return;
    this.request = requestAnimationFrame(() => this.paintNow());
  }

  /** @param {Grid} grid */
  paint(grid) {
    const context = this.context();
    const { left, top, zoom, x, y, width, height } = this;
    context.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
    context.clearRect(0, 0, width, height);
    const right = Math.min(width - this.right, left + (grid.keys.length - x) * zoom);
    const bottom = Math.min(height - 6, top + (grid.queries.length - y) * zoom);
    if (!this.image) {
      this.pool = grid.coarse?.pool ?? 1;
      while ((grid.keys.length / this.pool) * (grid.queries.length / this.pool) > LARGEST_IMAGE) this.pool *= 2;
      this.image = heatImage(grid, this.pool, this.scale);
    }
    context.save();
    context.beginPath();
    context.rect(left, top, right - left, bottom - top);
    context.clip();
    context.imageSmoothingEnabled = zoom * this.pool < 1;
    const size = zoom * this.pool;
    context.drawImage(this.image, left - x * zoom, top - y * zoom, this.image.width * size, this.image.height * size);
    grid.tiles?.paint(this, context, right, bottom);
    if (zoom >= 9) paintLines(this, context, left, top, right, bottom);
    paintMarks(this, context);
    context.restore();
    context.strokeStyle = ink("edge");
    context.lineWidth = 1;
    context.strokeRect(left - 0.5, top - 0.5, right - left + 1, bottom - top + 1);
    paintStrips(this, context, grid, right, bottom);
    paintLabels(this, context, grid, right, bottom);
  }
}

/** @param {HeatMap} heat */
export function zoomButtons(heat) {
  /**
   * @param {string} name
   * @param {string} sign
   * @param {() => void} act
   */
  const button = (name, sign, act) => el("button", { type: "button", "aria-label": name, title: name, onclick: act }, sign);
  return el("div", { class: "segmented", role: "group", "aria-label": "zoom" },
    button("zoom out", "−", () => heat.zoomBy(1 / 1.5, ...heat.center())),
    button("show all", "⤢", () => heat.fit()),
    button("zoom in", "+", () => heat.zoomBy(1.5, ...heat.center())),
  );
}
