/** The arrays of the file, decompressed at their first use. */

/** @typedef {import("./types.js").Layer} Layer */
/** @typedef {import("./types.js").ExactHead} ExactHead */

// Older TypeScript definitions of the browser lack this class.
const Inflater = /** @type {any} */ (globalThis).DecompressionStream;
const LEVELS = 2047;
export const WEIGHTS = Float32Array.from({ length: LEVELS + 1 }, (_, code) => (code / LEVELS) ** 2);

/**
 * @param {string} text
 * @returns {Uint8Array}
 */
function fromBase64(text) {
  const native = /** @type {any} */ (Uint8Array).fromBase64;
  if (native) return native.call(Uint8Array, text);
  const letters = atob(text);
  const bytes = new Uint8Array(letters.length);
  for (let at = 0; at < letters.length; at++) bytes[at] = letters.charCodeAt(at);
  return bytes;
}

/**
 * Source of the arrays that are not in the file.
 * @type {(blob: number) => Promise<string>}
 */
let fetched = async () => "";

/**
 * Drop the arrays of the previous page, and load those of another page from a source.
 * @param {(blob: number) => Promise<string>} source
 */
export function readFrom(source) {
  fetched = source;
  loading.clear();
  knownSpans.clear();
}

/**
 * Store an array that was computed in this browser.
 * @param {number} blob
 * @param {Uint16Array | Float32Array} numbers
 */
export function hold(blob, numbers) {
  loading.set(blob, Promise.resolve(numbers));
}

/** @param {Uint8Array} packed deflated bytes */
export async function inflated(packed) {
  const stream = new Blob([/** @type {any} */ (packed)]).stream().pipeThrough(new Inflater("deflate"));
  return new Response(stream).arrayBuffer();
}

/**
 * @template {Uint16Array | Float32Array | Int32Array} A
 * @param {number} blob
 * @param {{ new (buffer: ArrayBuffer): A, BYTES_PER_ELEMENT: number }} type
 * @returns {Promise<A>}
 */
async function inflate(blob, type) {
  const element = document.getElementById(`blob-${blob}`);
  const planes = new Uint8Array(await inflated(fromBase64(element ? element.textContent ?? "" : await fetched(blob))));
  element?.remove();
  const size = type.BYTES_PER_ELEMENT;
  const count = planes.length / size;
  const bytes = new Uint8Array(planes.length);
  for (let plane = 0; plane < size; plane++) {
    for (let at = 0, to = plane, from = plane * count; at < count; at++, to += size) bytes[to] = planes[from + at];
  }
  return new type(bytes.buffer);
}

/** @type {Map<number, Promise<any>>} */
const loading = new Map();

/**
 * @template {Uint16Array | Float32Array | Int32Array} A
 * @param {number} blob
 * @param {{ new (buffer: ArrayBuffer): A, BYTES_PER_ELEMENT: number }} type
 * @returns {Promise<A>}
 */
export function array(blob, type) {
  const known = loading.get(blob);
  if (known) return known;
  const made = inflate(blob, type);
  loading.set(blob, made);
  return made;
}

/** The pairs of query and key that a mask allows, in storage order. */
export class Spans {
  /** @param {number[]} spans first and last key of each query */
  constructor(spans) {
    this.numQueries = spans.length / 2;
    this.first = Int32Array.from({ length: this.numQueries }, (_, query) => spans[2 * query]);
    this.last = Int32Array.from({ length: this.numQueries }, (_, query) => spans[2 * query + 1]);
    this.starts = new Int32Array(this.numQueries + 1);
    for (let query = 0; query < this.numQueries; query++) {
      this.starts[query + 1] = this.starts[query] + this.last[query] - this.first[query] + 1;
    }
    this.size = this.starts[this.numQueries];
  }

  /**
   * @param {number} query
   * @param {number} key
   */
  allows(query, key) {
    return this.first[query] <= key && key <= this.last[query];
  }
}

/** The weights of one layer. */
export class LayerWeights {
  /**
   * @param {Layer} layer
   * @param {Uint16Array} codes
   * @param {Spans} spans
   */
  constructor(layer, codes, spans) {
    this.layer = layer;
    this.codes = codes;
    this.spans = spans;
  }

  /**
   * Write the weights of one query into an array; NaN for masked keys.
   * @param {number} place index of the head among the shown heads
   * @param {number} query
   * @param {Float32Array} out
   */
  row(place, query, out) {
    const { spans, codes } = this;
    out.fill(NaN);
    let at = place * spans.size + spans.starts[query];
    for (let key = spans.first[query]; key <= spans.last[query]; key++) out[key] = WEIGHTS[codes[at++]];
  }

  /**
   * Return the share of attention that goes to no token (the sink).
   * @param {number} place
   * @param {number} query
   */
  sink(place, query) {
    if (!this.layer.sink) return NaN;
    const { spans, layer, codes } = this;
    return WEIGHTS[codes[layer.heads.length * spans.size + place * spans.numQueries + query]];
  }
}

/** One head with its queries, keys and weights in float32. */
export class ExactNumbers {
  /**
   * @param {ExactHead} head
   * @param {Float32Array} numbers
   * @param {Spans} spans
   * @param {number} numKeys
   */
  constructor(head, numbers, spans, numKeys) {
    const { size } = spans;
    const queryEnd = size + spans.numQueries * head.size;
    const keyEnd = queryEnd + numKeys * head.size;
    this.head = head;
    this.spans = spans;
    this.weights = numbers.subarray(0, size);
    this.queries = numbers.subarray(size, queryEnd);
    this.keys = numbers.subarray(queryEnd, keyEnd);
    this.biases = head.bias ? numbers.subarray(keyEnd) : null;
  }

  /**
   * @param {number} query
   * @param {Float32Array} out
   */
  row(query, out) {
    const { spans } = this;
    out.fill(NaN);
    out.set(this.weights.subarray(spans.starts[query], spans.starts[query + 1]), spans.first[query]);
  }

  /** @param {number} query */
  query(query) {
    return this.queries.subarray(query * this.head.size, (query + 1) * this.head.size);
  }

  /** @param {number} key */
  key(key) {
    return this.keys.subarray(key * this.head.size, (key + 1) * this.head.size);
  }

  /**
   * @param {number} query
   * @param {number} key
   */
  at(query, key) {
    return this.spans.starts[query] + key - this.spans.first[query];
  }
}

/** @type {Map<number, Spans>} */
const knownSpans = new Map();

/**
 * @param {import("./types.js").Page} page
 * @param {Layer} layer
 */
export function spansOf(page, layer) {
  const spans = knownSpans.get(layer.spans) ?? new Spans(page.spans[layer.spans]);
  knownSpans.set(layer.spans, spans);
  return spans;
}

/**
 * @param {import("./types.js").Page} page
 * @param {Layer} layer
 */
export async function layerWeights(page, layer) {
  return new LayerWeights(layer, await array(layer.weights ?? -1, Uint16Array), spansOf(page, layer));
}

/**
 * Load the float32 numbers of a head that was stored exactly.
 * @param {import("./types.js").Page} page
 * @param {Layer} layer
 * @param {number} head
 * @param {number} numKeys
 */
export async function exactNumbers(page, layer, head, numKeys) {
  const exact = layer.exact[head];
  if (!exact) return null;
  return new ExactNumbers(exact, await array(exact.blob, Float32Array), spansOf(page, layer), numKeys);
}
