/** State of the page: its selection, stored in the address so that links restore it. */

const DEFAULTS = {
  view: "",
  stack: "",
  measure: 0,
  layer: 0,
  head: 0,
  heads: "",
  query: -1,
  key: -1,
  sample: 0,
  other: -1,
  difference: 0,
  join: 0,
  scale: "root",
  sort: "",
  up: 0,
  pattern: "",
  least: 5,
  over: "mean",
  average: "best",
  box: "",
  node: -1,
  cells: "prediction",
};

/** @typedef {typeof DEFAULTS} State */

/**
 * @param {string} hash
 * @param {State} [start] state of a page whose address has no hash
 * @returns {State}
 */
export function readState(hash, start = DEFAULTS) {
  /** @type {Record<string, string | number>} */
  const defaults = start;
  const state = { ...defaults };
  for (const [name, value] of new URLSearchParams(hash.replace(/^#/, ""))) {
    if (!Object.hasOwn(DEFAULTS, name)) continue;
    if (typeof state[name] === "string") state[name] = value;
    // Numbers count from 0. -1 means none, or the embedding below layer 0.
    else if (Number.isInteger(Number(value))) state[name] = Math.max(Number(value), name === "layer" ? -1 : Math.min(0, Number(defaults[name])));
  }
  return /** @type {State} */ (state);
}

/**
 * @param {State} state
 * @param {State} [start]
 */
export function writeState(state, start = DEFAULTS) {
  const parameters = new URLSearchParams();
  for (const [name, value] of Object.entries(state)) {
    if (value !== /** @type {Record<string, string | number>} */ (start)[name]) parameters.set(name, String(value));
  }
  return parameters.toString();
}

export class Store {
  constructor() {
    this.start = DEFAULTS;
    /** @type {State} */
    this.state = readState(location.hash);
    /** @type {((state: State) => void)[]} */
    this.watchers = [];
    this.timer = 0;
    addEventListener("hashchange", () => {
      if (location.hash.replace(/^#/, "") === writeState(this.state, this.start)) return;
      this.state = readState(location.hash, this.start);
      this.tell();
    });
  }

  /**
   * Set the state in which the page opens.
   * @param {Partial<State>} start
   */
  begin(start) {
    this.start = { ...DEFAULTS, ...start };
    this.state = readState(location.hash, this.start);
  }

  /** @param {Partial<State>} change */
  set(change) {
    const next = { ...this.state, ...change };
    if (writeState(next, this.start) === writeState(this.state, this.start)) return;
    const isStep = next.view !== this.state.view;
    this.state = next;
    this.tell();
    clearTimeout(this.timer);
    if (isStep) this.address(true);
    else {
      const shown = location.hash;
      // The user may have followed a link that the page does not know yet: keep its address.
      this.timer = setTimeout(() => location.hash === shown && this.address(false), 200);
    }
  }

  tell() {
    for (const watcher of this.watchers) watcher(this.state);
  }

  /** @param {boolean} isStep whether the browser's back button restores the previous state */
  address(isStep) {
    const hash = `#${writeState(this.state, this.start)}`;
    if (hash === location.hash) return;
    try {
      if (isStep) history.pushState(null, "", hash);
      else history.replaceState(null, "", hash);
    } catch {
      // A frame without an address, such as in a notebook: the page works, but without links.
    }
  }
}
