/** What the views show and which keys there are. */

import { el, fill } from "./dom.js";

/** @type {Record<string, string>} */
const VIEW_HELP = {
  overview: "Every head as a small matrix: rows are queries, columns are keys. Sort them by any of their numbers.",
  matrix: "One head: each row shows how one query divides its attention among the keys. Grey cells are masked.",
  lines: "Lines from each query on the left to the keys on the right; the stronger the look, the stronger the line.",
  token: "One token through all layers: where it looks, and who looks at it.",
  neuron: "The numbers behind one weight: query times key, scale, mask and softmax.",
  alignment: "Which source tokens each target token looks at; a ring marks the most.",
  lens: "What the model would predict if it ended after each layer.",
  beams: "The search tree: what was kept, what was pruned, and why.",
};

/** @type {[string, string][]} */
const KEYS = [
  ["1 … 8", "view"],
  ["[  ]", "layer before, after"],
  [",  .", "head before, after"],
  ["s", "next attention: encoder, decoder, cross"],
  ["j", "join subwords"],
  ["l", "colours: square root or linear"],
  ["d", "difference of two"],
  ["p", "play checkpoints"],
  ["t", "light or dark"],
  ["← ↑ → ↓", "walk; with shift by ten"],
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
      el("h2", { id: "help-title" }, "How to look"),
      el("button", { type: "button", class: "icon", "aria-label": "close", onclick: () => dialog.close() }, "✕"),
    ),
    el("div", { class: "help" },
      el("dl", { class: "help-views" }, ...views.flatMap(({ name, title }) => [el("dt", {}, title), el("dd", {}, VIEW_HELP[name] ?? "")])),
      el("dl", { class: "help-keys" }, ...KEYS.flatMap(([key, what]) => [el("dt", {}, el("kbd", {}, key)), el("dd", {}, what)])),
    ),
    el("p", { class: "note" },
      "Blanks are shown: ␣ a space, ↵ a line break, ⇥ a tab. Joined subwords: a word's look is the mean over its tokens, ",
      "and a look at a word the sum over its tokens. The address of the page leads back to what it shows. ",
      "Pinch, or turn the wheel with Ctrl, to zoom."),
  );
  dialog.showModal();
}
