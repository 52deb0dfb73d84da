/** Helpers for elements. Every text becomes a text node, so no text can become markup. */

/**
 * @param {(Node | string | null)[]} children
 */
function present(children) {
  return /** @type {(Node | string)[]} */ (children.filter((child) => child !== null));
}

/**
 * @param {string} tag
 * @param {Record<string, string | number | boolean | null | undefined | ((event: any) => void)>} [properties]
 *   `on…` is a listener, `class` and `aria-…` are attributes; null, undefined and false leave an attribute out.
 * @param {(Node | string | null)[]} children
 * @returns {HTMLElement}
 */
export function el(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, String(value));
  }
  element.append(...present(children));
  return element;
}

/**
 * @param {Element} element
 * @param {(Node | string | null)[]} children
 */
export function fill(element, ...children) {
  element.replaceChildren(...present(children));
}

/**
 * @param {number} number
 * @param {number} [digits]
 */
export function fixed(number, digits = 3) {
  if (!Number.isFinite(number)) return "–";
  const text = number.toFixed(digits);
  // A number that is rounded to zero has no sign.
  return Number(text) === 0 ? text.replace("-", "") : text.replace("-", "−");
}

/** @param {number} number number of any size, formatted with few digits */
export function short(number) {
  if (!Number.isFinite(number)) return "–";
  const size = Math.abs(number);
  const text = size !== 0 && (size < 0.001 || size >= 100000) ? number.toExponential(2) : number.toPrecision(3);
  return text.replace("-", "−");
}

/**
 * Format a number for a narrow cell.
 * @param {number} number
 */
export function narrow(number) {
  return Math.abs(number) < 100 ? fixed(number) : short(number);
}

/** @param {number} signed */
export function withSign(signed) {
  const text = fixed(signed);
  return (signed > 0 && Number(text) !== 0 ? "+" : "") + text;
}

/**
 * @param {string} title
 * @param {[string, string][]} options value and text
 * @param {string} value
 * @param {(value: string) => void} choose
 */
export function select(title, options, value, choose) {
  const element = /** @type {HTMLSelectElement} */ (el("select", { "aria-label": title }));
  for (const [name, text] of options) element.append(el("option", { value: name, selected: name === value }, text));
  element.addEventListener("change", () => choose(element.value));
  return el("label", { class: "field" }, el("span", { class: "field-name", "aria-hidden": "true" }, title), element);
}

/**
 * A group of buttons with one selected button.
 * @param {string} title
 * @param {[string, string][]} options value and text
 * @param {string} value
 * @param {(value: string) => void} choose
 */
export function segmented(title, options, value, choose) {
  const buttons = options.map(([name, text]) =>
    el("button", { type: "button", "aria-pressed": String(name === value), onclick: () => choose(name) }, text),
  );
  return el("div", { class: "segmented", role: "group", "aria-label": title }, ...buttons);
}

/**
 * A number between two step buttons.
 * @param {string} title
 * @param {number[]} numbers
 * @param {number} value
 * @param {(value: number) => void} choose
 */
export function stepper(title, numbers, value, choose) {
  const place = numbers.indexOf(value);
  /**
   * @param {number} by
   * @param {string} sign
   */
  const step = (by, sign) =>
    el(
      "button",
      {
        type: "button",
        "aria-label": by < 0 ? `previous ${title.toLowerCase()}` : `next ${title.toLowerCase()}`,
        disabled: numbers[place + by] === undefined,
        onclick: () => choose(numbers[place + by]),
      },
      sign,
    );
  const options = numbers.map((number) => /** @type {[string, string]} */ ([String(number), String(number)]));
  const list = select(title, options, String(value), (chosen) => choose(Number(chosen)));
  return el("div", { class: "stepper" }, list, step(-1, "‹"), step(1, "›"));
}

/**
 * @param {string} title
 * @param {boolean} isOn
 * @param {(isOn: boolean) => void} choose
 */
export function toggle(title, isOn, choose) {
  return el(
    "button",
    { type: "button", class: "toggle", role: "switch", "aria-checked": String(isOn), onclick: () => choose(!isOn) },
    el("span", { class: "knob", "aria-hidden": "true" }),
    title,
  );
}

/**
 * Replace controls, and keep the keyboard focus.
 * @param {HTMLElement} root
 * @param {(Node | string | null)[]} children
 */
export function refill(root, ...children) {
  const selector = "button, select, input";
  const focused = [...root.querySelectorAll(selector)].indexOf(/** @type {Element} */ (document.activeElement));
  fill(root, ...children);
  if (focused >= 0) /** @type {HTMLElement | undefined} */ (root.querySelectorAll(selector)[focused])?.focus();
}
