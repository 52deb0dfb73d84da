/** Convert grids of numbers to images. */

import { colors, shade } from "./color.js";

/** @typedef {import("./types.js").Grid} Grid */

/**
 * Convert a grid to an image: one pixel per cell, or per square of cells with their largest number.
 * @param {Grid} grid
 * @param {number} pool cells on a side of the square
 * @param {string} scale
 * @returns {HTMLCanvasElement}
 */
export function heatImage(grid, pool, scale) {
  if (grid.coarse) return heatImage(grid.coarse.grid, Math.max(1, Math.floor(pool / grid.coarse.pool)), scale);
  const width = Math.max(1, Math.ceil(grid.keys.length / pool));
  const height = Math.max(1, Math.ceil(grid.queries.length / pool));
  const canvas = document.createElement("canvas");
  canvas.width = width;
  canvas.height = height;
  const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  const image = context.createImageData(width, height);
  const pixels = new Uint32Array(image.data.buffer);
  const { sequential, diverging, masked } = colors();
  const palette = grid.signed ? diverging : sequential;
  const row = new Float32Array(grid.keys.length);
  const most = new Float32Array(width);
  for (let y = 0; y < height; y++) {
    most.fill(NaN);
    for (let query = y * pool; query < Math.min((y + 1) * pool, grid.queries.length); query++) {
      grid.row(query, row);
      for (let x = 0, key = 0; x < width; x++) {
        const end = Math.min(key + pool, row.length);
        let largest = most[x];
        for (; key < end; key++) {
          const value = row[key];
          // Comparisons with NaN are false, so any number replaces NaN, and NaN replaces no number.
          if (Math.abs(value) > Math.abs(largest) || (largest !== largest && value === value)) largest = value;
        }
        most[x] = largest;
      }
    }
    for (let x = 0; x < width; x++) {
      pixels[y * width + x] = Number.isNaN(most[x]) ? masked : palette[shade(most[x], scale, grid.signed)];
    }
  }
  context.putImageData(image, 0, 0);
  return canvas;
}
