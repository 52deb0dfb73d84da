/** Maps of a long text on a live page: a coarse picture of the whole map, and tiles where the user zooms in. */

import { WEIGHTS, inflated } from "./arrays.js";
import { bytes } from "./ask.js";
import { theme } from "./color.js";
import { heatImage } from "./image.js";

/** @typedef {import("./types.js").Grid} Grid */
/** @typedef {import("./types.js").Label} Label */
/** @typedef {{ query: Record<string, string | number>, width: number, height: number, image: HTMLCanvasElement | null, look: string, codes: Uint16Array | null }} Tile */

const SIDE = 512;
const MASKED = 0xffff;
const MOST_TILES = 96;
const MOST_ROWS = 256;

/** Event when a tile has arrived, so that the page draws it. */
export const arrivals = new EventTarget();

/**
 * @param {Uint16Array} codes
 * @param {number} width
 * @param {number} height
 * @returns {Grid}
 */
function codedGrid(codes, width, height) {
  /** @param {number} size */
  const labels = (size) => /** @type {Label[]} */ (new Array(size).fill({ text: "", members: [], generated: false, rtl: false }));
  return {
    queries: labels(height), keys: labels(width), signed: false, exact: false, sink: () => NaN,
    row(query, out) {
      for (let key = 0; key < width; key++) {
        const code = codes[query * width + key];
        out[key] = code === MASKED ? NaN : WEIGHTS[code];
      }
    },
  };
}

/** The tiles of one run. */
export class Pieces {
  /** @param {string} name name of the run */
  constructor(name) {
    this.name = name;
    /** @type {Map<string, Float32Array>} */
    this.rows = new Map();
    /** @type {Map<string, Tile>} */
    this.tiles = new Map();
    /** @type {Map<string, Promise<Grid>>} */
    this.grids = new Map();
    /** @type {string | null} */
    this.wanted = null;
    this.isAsking = false;
    /** @type {Tile[]} */
    this.waiting = [];
    this.isLoading = false;
  }

  /**
   * @param {number} sample number of the sample on the page
   * @param {string} stack
   * @param {number} layer
   * @param {number} head
   * @param {Label[]} queries
   * @param {Label[]} keys
   */
  grid(sample, stack, layer, head, queries, keys) {
    const where = { stack, sample, layer, head };
    const place = Object.values(where).join(" ");
    const known = this.grids.get(place) ?? this.made(where, place, queries, keys);
    this.grids.set(place, known);
    // Only the whole run knows the last written token.
    return known.then((grid) => Object.assign(grid, { queries, keys }));
  }

  /**
   * @param {Record<string, string | number>} where
   * @param {string} place
   * @param {Label[]} queries
   * @param {Label[]} keys
   * @returns {Promise<Grid>}
   */
  async made(where, place, queries, keys) {
    const pool = Math.ceil(Math.max(queries.length, keys.length) / SIDE);
    const [width, height] = [Math.ceil(keys.length / pool), Math.ceil(queries.length / pool)];
    const codes = new Uint16Array(await inflated(await bytes(`tile/${this.name}`, { ...where, pool })));
    return {
      queries, keys, signed: false, exact: true, sink: () => NaN,
      coarse: { grid: codedGrid(codes, width, height), pool },
      row: (query, out) => this.row(where, query, out),
      tiles: { paint: (heat, context, right, bottom) => this.paint(heat, context, right, bottom, where, place, pool) },
    };
  }

  /**
   * Write the weights of a query into an array; NaN until they arrive.
   * @param {Record<string, string | number>} where
   * @param {number} query
   * @param {Float32Array} out
   */
  row({ stack, sample, layer, head }, query, out) {
    const asked = JSON.stringify({ stack, sample, layer, query });
    const all = this.rows.get(asked);
    if (all) {
      out.set(all.subarray(Number(head) * out.length, (Number(head) + 1) * out.length));
      return;
    }
    out.fill(NaN);
    this.wanted = asked;
    if (!this.isAsking) void this.askRows();
  }

  /** Load only the latest requested query: the pointer has left the others. */
  async askRows() {
    this.isAsking = true;
    while (this.wanted) {
      const asked = this.wanted;
      this.wanted = null;
      const packed = await bytes(`row/${this.name}`, JSON.parse(asked)).catch(() => null);
      if (!packed) continue;
      const row = new Float32Array(await inflated(packed)).map((value) => (value < 0 ? NaN : value));
      if (this.rows.size >= MOST_ROWS) this.rows.clear();
      this.rows.set(asked, row);
      arrivals.dispatchEvent(new Event("come"));
    }
    this.isAsking = false;
  }

  /**
   * Draw the loaded tiles over the coarse map, and request the missing ones.
   * @param {import("./heat.js").HeatMap} heat
   * @param {CanvasRenderingContext2D} context
   * @param {number} right
   * @param {number} bottom
   * @param {Record<string, string | number>} where
   * @param {string} place
   * @param {number} coarsest
   */
  paint(heat, context, right, bottom, where, place, coarsest) {
    const { grid, left, top, zoom, x, y, scale } = heat;
    let pool = 1;
    while (zoom * pool < 1) pool *= 2;
    if (pool >= coarsest || !grid) return;
    const extent = SIDE * pool;
    this.waiting = [];
    for (let row = Math.floor(y / extent); row * extent < Math.min(grid.queries.length, y + (bottom - top) / zoom); row++) {
      for (let column = Math.floor(x / extent); column * extent < Math.min(grid.keys.length, x + (right - left) / zoom); column++) {
        const tile = this.tile(`${place} ${pool} ${row} ${column}`, { ...where, pool, row, column }, grid);
        const image = this.image(tile, scale);
        if (!image) continue;
        context.imageSmoothingEnabled = zoom * pool < 1;
        context.drawImage(image, left + (column * extent - x) * zoom, top + (row * extent - y) * zoom, image.width * pool * zoom, image.height * pool * zoom);
      }
    }
    if (this.waiting.length && !this.isLoading) void this.load();
  }

  /**
   * @param {string} name
   * @param {Record<string, string | number>} query
   * @param {Grid} grid
   */
  tile(name, query, grid) {
    const known = this.tiles.get(name);
    const side = (/** @type {number} */ size, /** @type {string | number} */ at) =>
      Math.min(SIDE, Math.ceil((size - Number(at) * SIDE * Number(query.pool)) / Number(query.pool)));
    const tile = known ?? { query, width: side(grid.keys.length, query.column), height: side(grid.queries.length, query.row), image: null, look: "", codes: null };
    this.tiles.delete(name);
    this.tiles.set(name, tile);
    if (this.tiles.size > MOST_TILES) this.tiles.delete(/** @type {string} */ (this.tiles.keys().next().value));
    if (!tile.codes) this.waiting.push(tile);
    return tile;
  }

  /**
   * @param {Tile} tile
   * @param {string} scale
   */
  image(tile, scale) {
    const look = `${scale} ${theme()}`;
    if (tile.codes && tile.look !== look) {
      tile.image = heatImage(codedGrid(tile.codes, tile.width, tile.height), 1, scale);
      tile.look = look;
    }
    return tile.image;
  }

  /** Load one tile at a time; skip tiles that have left the window. */
  async load() {
    this.isLoading = true;
    for (let tile = this.waiting.shift(); tile; tile = this.waiting.shift()) {
      const packed = await bytes(`tile/${this.name}`, tile.query).catch(() => null);
      if (!packed) break;
      tile.codes = new Uint16Array(await inflated(packed));
      arrivals.dispatchEvent(new Event("come"));
    }
    this.isLoading = false;
  }
}
