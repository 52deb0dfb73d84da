/** Help dialog: the views and the keyboard shortcuts. */

import { el, fill } from "./dom.js";

/** @type {Record<string, string>} */
const VIEW_HELP = {
  overview: "Every head as a small matrix: a row is a token that attends, a column a token that it attends to. Sort the heads by any of their numbers.",
  matrix: "One head: each row shows how one token (query) divides its attention among the others (keys). Grey cells are masked.",
  lines: "Lines from queries on the left to keys on the right; a larger weight gives a stronger line.",
  token: "One token in all layers: the tokens that it attends to, and the tokens that attend to it.",
  neuron: "The computation of one weight: query times key, scale, mask and softmax.",
  alignment: "The source tokens that the decoder attends to while it writes each token; a ring marks the largest weight.",
  lens: "The prediction of the model if it ended after each layer.",
  beams: "The tree of the beam search: candidates that were kept, finished or pruned, with the reason.",
};

/** @type {[string, string][]} */
const KEYS = [
  ["1 … 8", "view"],
  ["[  ]", "previous layer, next layer"],
  [",  .", "previous head, next head"],
  ["s", "next attention: encoder, decoder, cross"],
  ["j", "join subwords"],
  ["l", "colours: square root or linear"],
  ["d", "difference of two"],
  ["p", "play checkpoints"],
  ["t", "light or dark"],
  ["← ↑ → ↓", "move; with shift by ten"],
  ["+  −  0", "zoom in, out, show all"],
  ["Enter", "open, pick"],
  ["?", "this help"],
];

/** @param {{ name: string, title: string }[]} views */
export function showHelp(views) {
  const dialog = /** @type {HTMLDialogElement} */ (document.getElementById("help"));
  if (dialog.open) {
    dialog.close();
    return;
  }
  fill(dialog,
    el("div", { class: "help-head" },
      el("h2", { id: "help-title" }, "Help"),
      el("button", { type: "button", class: "icon", "aria-label": "close", onclick: () => dialog.close() }, "✕"),
    ),
    el("div", { class: "help" },
      el("dl", { class: "help-views" }, ...views.flatMap(({ name, title }) => [el("dt", {}, title), el("dd", {}, VIEW_HELP[name] ?? "")])),
      el("dl", { class: "help-keys" }, ...KEYS.flatMap(([key, what]) => [el("dt", {}, el("kbd", {}, key)), el("dd", {}, what)])),
    ),
    el("p", { class: "note" },
      "White space has signs: ␣ a space, ↵ a line break, ⇥ a tab. Join subwords: weights are averaged over the query tokens ",
      "of a word, and summed over its key tokens. The address of the page is a link to what it shows. ",
      "Pinch, or turn the wheel with Ctrl, to zoom."),
  );
  dialog.showModal();
}
