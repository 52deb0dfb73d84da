/** Colours from numbers: one hue for weights, and two hues for differences that suit colour-blind readers. */

/** @typedef {{ sequential: Uint32Array, diverging: Uint32Array, masked: number }} Palette */

const STOPS = {
  light: {
    sequential: ["#ffffff", "#d6e6f4", "#9ecae1", "#5ba3d0", "#2171b5", "#08306b"],
    diverging: ["#8c3a00", "#d9771f", "#f8cd9c", "#ffffff", "#a8cfe8", "#2f7fbf", "#08306b"],
    masked: "#eef1f4",
  },
  dark: {
    sequential: ["#1b222b", "#173a5e", "#1f6aa5", "#4fa3dc", "#a6d5f7", "#f4fbff"],
    diverging: ["#ffd9ae", "#f0964a", "#8a4a17", "#1b222b", "#1f5c8f", "#5ab0ea", "#dff2ff"],
    masked: "#0f1317",
  },
};

/** @param {string} hex */
function channels(hex) {
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

/** @param {number[]} color four bytes of a pixel */
function pixel([red, green, blue]) {
  return ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
}

/** @param {string[]} stops */
function ramp(stops) {
  const colors = stops.map(channels);
  return Uint32Array.from({ length: 256 }, (_, index) => {
    const place = (index / 255) * (colors.length - 1);
    const low = Math.min(Math.floor(place), colors.length - 2);
    return pixel(colors[low].map((value, channel) => Math.round(value + (colors[low + 1][channel] - value) * (place - low))));
  });
}

/**
 * @param {"light" | "dark"} theme
 * @returns {Palette}
 */
function palette(theme) {
  const { sequential, diverging, masked } = STOPS[theme];
  return { sequential: ramp(sequential), diverging: ramp(diverging), masked: pixel(channels(masked)) };
}

const PALETTES = { light: palette("light"), dark: palette("dark") };

/** @type {"light" | "dark"} */
let shownTheme = "light";

export function theme() {
  return shownTheme;
}

/**
 * @param {"light" | "dark"} name
 */
export function setTheme(name) {
  shownTheme = name;
  document.documentElement.dataset.shown = name;
}

export function colors() {
  return PALETTES[theme()];
}

/**
 * Return the index of a number on the colour scale, from 0 to 255; NaN has no colour.
 * @param {number} value
 * @param {string} scale "root" or "linear"
 * @param {boolean} signed
 */
export function shade(value, scale, signed) {
  const size = Math.min(Math.abs(value), 1);
  const share = scale === "root" ? Math.sqrt(size) : size;
  return Math.round(signed ? 127.5 + Math.sign(value) * 127.5 * share : 255 * share);
}

/**
 * @param {number} value
 * @param {string} scale
 * @param {boolean} signed
 */
export function pixelOf(value, scale, signed) {
  const { sequential, diverging, masked } = colors();
  return Number.isNaN(value) ? masked : (signed ? diverging : sequential)[shade(value, scale, signed)];
}

/**
 * @param {number} value
 * @param {string} scale
 * @param {boolean} signed
 */
export function css(value, scale, signed) {
  const color = pixelOf(value, scale, signed);
  return `rgb(${color & 255} ${(color >> 8) & 255} ${(color >> 16) & 255})`;
}

/**
 * Return the text colour with the higher contrast on a cell; its contrast is at least 4.5.
 * @param {number} value
 * @param {string} scale
 * @param {boolean} signed
 */
export function inkOn(value, scale, signed) {
  const color = pixelOf(value, scale, signed);
  const light = /** @param {number} at */ (at) => {
    const share = ((color >> at) & 255) / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  };
  return 0.2126 * light(0) + 0.7152 * light(8) + 0.0722 * light(16) > 0.179 ? "#000000" : "#ffffff";
}

/** @type {Map<string, string>} */
const inks = new Map();

/**
 * Return a colour of the style sheet.
 * @param {string} name
 */
export function ink(name) {
  const key = `${theme()} ${name}`;
  const known = inks.get(key) ?? getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  inks.set(key, known);
  return known;
}
