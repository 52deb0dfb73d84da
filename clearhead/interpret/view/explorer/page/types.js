/**
 * Types of the stored data (see encode.py) and of the views.
 *
 * @typedef {"encoder.self" | "decoder.self" | "decoder.memory"} StackName
 * @typedef {"encoder" | "decoder" | "written"} RowName
 * @typedef {{ tokens: string[], texts: string[], words: number[], generated: number[] | null, special?: number[] | null, writes?: string[] }} TokenRow
 * @typedef {{ name: string, title: string, description: string, kind: "statistic" | "effect" | "contribution" }} Column
 * @typedef {{ blob: number, size: number, scale: number, softCap: number | null, sink: number | null, bias: boolean }} ExactHead
 *
 * @typedef {object} Layer
 * @property {number} layer
 * @property {number[]} heads
 * @property {number} numHeads
 * @property {number} numKvHeads
 * @property {number} spans index of the first and last keys of each query
 * @property {string} mask mask in words
 * @property {boolean} sink
 * @property {string} bias score bias in words; empty without one
 * @property {number | null} weights blob; null if a live page loads tiles
 * @property {Record<string, ExactHead>} exact
 * @property {Record<string, (number | null)[]>} values
 * @property {string[]} patterns
 * @property {number | null} keyEffects blob
 * @property {Record<string, number | null>} feedForward
 *
 * @typedef {{ stack: StackName, queries: RowName, keys: RowName, measure: string, layers: Layer[] }} Stack
 *
 * @typedef {object} Lens
 * @property {RowName} row
 * @property {string[]} layers
 * @property {string[]} vocabulary
 * @property {number} top
 * @property {number} entries blob
 * @property {number} probabilities blob
 * @property {number[] | null} targets
 * @property {number | null} targetProbabilities blob
 * @property {number | null} followed blob
 * @property {string} followedName the compared outputs in words
 *
 * @typedef {object} BeamNode
 * @property {number} parent
 * @property {string} token
 * @property {number | null} logProbability
 * @property {number | null} score
 * @property {number} step
 * @property {"kept" | "pruned" | "finished"} state
 * @property {string} reason
 * @property {number | null} rank
 *
 * @typedef {object} Sample
 * @property {string} label
 * @property {[string, string][]} facts
 * @property {[string, string][]=} texts texts that the model reads and writes
 * @property {Partial<Record<RowName, TokenRow>>} rows
 * @property {Column[]} columns
 * @property {Stack[]} attentions
 * @property {Lens | null} lens
 * @property {BeamNode[]} beams
 *
 * @typedef {{ title: string, facts: [string, string][], timeline: boolean, samples: Sample[], spans: number[][] }} Page
 *
 * One token, or the joined tokens of a word, with the text that the model writes next, if any.
 * @typedef {{ text: string, members: number[], generated: boolean, rtl: boolean, writes?: string, isName?: boolean }} Label
 *
 * A table of numbers with labels; NaN for masked cells.
 * @typedef {object} Grid
 * @property {Label[]} queries
 * @property {Label[]} keys
 * @property {(query: number, out: Float32Array) => void} row
 * @property {(query: number) => number} sink share of attention to no token; NaN without a sink
 * @property {boolean} signed numbers from -1 to 1; otherwise from 0 to 1
 * @property {boolean} exact float32 numbers; otherwise within 0.0005
 * @property {{ grid: Grid, pool: number }=} coarse for a long text, the largest number of each square of `pool` tokens
 * @property {{ paint: (heat: import("./heat.js").HeatMap, context: CanvasRenderingContext2D, right: number, bottom: number) => void }=} tiles
 *
 * Content of a pane: a sample, or the difference of two samples.
 * @typedef {{ sample: Sample, minus: Sample | null, name: string }} Pane
 *
 * @typedef {object} View
 * @property {(state: import("./state.js").State, pane: Pane) => void | Promise<void>} update
 * @property {((event: KeyboardEvent) => boolean)=} key whether the key was used
 * @property {(() => void)=} close
 *
 * @typedef {object} App
 * @property {Page} page
 * @property {import("./state.js").Store} store
 * @property {(text: string) => void} announce
 * @property {HTMLElement} slot element for the controls of a view
 */

export {};
