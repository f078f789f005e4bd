// Elements, symbols and numbers, which all panels share.

/** Symbols that are shown as another character. */
const VISIBLE = { " ": "␣", "\n": "↵", "\t": "⇥" };

/** Milliseconds without a change of an input, or of the size of the page, before the change is used. */
const PAUSE = 150;

/** Share of the color in the background of the largest value; the text on it stays readable. */
const MAX_HEAT = 45;

function createIn(namespace, tag, attributes, children) {
  const element = document.createElementNS(`http://www.w3.org/${namespace}`, tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else if (name === "style") element.style.cssText = value; // setAttribute is subject to the content security policy
    else if (name.startsWith("aria-")) element.setAttribute(name, String(value));
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, String(value));
  }
  appendTo(element, children);
  return element;
}

function appendTo(element, children) {
  element.append(...children.flat(Infinity).filter((child) => ![null, undefined, false].includes(child)));
}

/**
 * Return a new HTML element.
 * @param {string} tag its name.
 * @param {object} attributes strings, numbers, booleans (true: set without a value; false, null: not set; written out
 *   for aria-*), or functions, for "onclick" and other events.
 * @param {...(Node|string|Array|null)} children nodes, or strings as text.
 */
export function html(tag, attributes = {}, ...children) {
  return createIn("1999/xhtml", tag, attributes, children);
}

/** Return a new SVG element; see `html`. */
export function svg(tag, attributes = {}, ...children) {
  return createIn("2000/svg", tag, attributes, children);
}

/** Call a function that draws an element again; the focus moves to the new descendant with the same `data-key`. */
function keepFocus(element, draw) {
  const focused = element.getRootNode().activeElement;
  const key = focused && element.contains(focused) ? focused.dataset.key : undefined;
  draw();
  if (key !== undefined) element.querySelector(`[data-key="${CSS.escape(key)}"]`)?.focus({ preventScroll: true });
}

/**
 * Call a function that draws an element again.
 *
 * The focus moves from an old descendant to the new one with the same `data-key` attribute. The element keeps its
 * height until it is drawn, so that the page does not scroll if the function measures the empty element.
 */
export function redraw(element, draw) {
  element.style.minHeight = `${element.offsetHeight}px`;
  keepFocus(element, draw);
  element.style.minHeight = "";
}

/** Replace the children of an element, and keep the focus, see `redraw`. */
export function clear(element, ...children) {
  keepFocus(element, () => {
    element.replaceChildren();
    appendTo(element, children);
  });
}

/** Return a symbol or text with visible blanks and control characters. */
export function visible(symbol) {
  return symbol.replace(/[ \n\t]/g, (character) => VISIBLE[character]);
}

/** Return whether an element is displayed: neither it nor a parent is hidden. */
export function isShown(element) {
  return element.isConnected && element.closest("[hidden]") === null;
}

/**
 * Return a function that calls `question`, and settles only if no later call has been made.
 * @param {function(...any, AbortSignal): Promise} question its last argument is aborted by a later call.
 */
export function latest(question) {
  let newest = new AbortController();
  return (...values) => {
    newest.abort();
    newest = new AbortController();
    const { signal } = newest;
    return new Promise((resolve, reject) => {
      const unlessOvertaken = (settle) => (value) => signal.aborted || settle(value);
      Promise.resolve(question(...values, signal)).then(unlessOvertaken(resolve), unlessOvertaken(reject));
    });
  };
}

/** Return a function that calls `action` once it has not been called for a while. */
export function debounced(action) {
  let timer = 0;
  return () => {
    clearTimeout(timer);
    timer = setTimeout(action, PAUSE);
  };
}

/** Return a probability as text: "98%", "2.3%", "<0.1%". */
export function percent(probability) {
  if (probability > 0 && probability < 0.0005) return "<0.1%";
  return `${(100 * probability).toFixed(probability < 0.0995 && probability > 0 ? 1 : 0)}%`;
}

/** Return a number as text, with a minus sign instead of a hyphen. */
export function number(value, digits = 2) {
  return value.toFixed(digits).replace(/^-(?=.*[1-9])/, "−").replace(/^-/, "");
}

/** Return a number with its sign, "+0.12" or "−0.12". */
export function signed(value, digits = 2) {
  return `${Number(value.toFixed(digits)) > 0 ? "+" : ""}${number(value, digits)}`;
}

/** Return the background color of a value from 0 to 1; text on it stays readable. */
export function heatColor(value, color = "--accent") {
  return `color-mix(in srgb, var(${color}) ${(MAX_HEAT * Math.max(0, Math.min(1, value))).toFixed(1)}%, transparent)`;
}

/** Return a bar whose width is a share from 0 to 1; the number is written elsewhere. */
export function bar(share, color = "--accent") {
  const width = `${(100 * Math.max(0, Math.min(1, share))).toFixed(1)}%`;
  return html("span", { class: "bar", "aria-hidden": true },
    html("span", { style: `width: ${width}; background: var(${color})` }));
}

/**
 * Return the columns of the shown models, side by side where there is room.
 * @param {Array<object>} shown as given to the `update` function of a panel.
 * @param {function(object): (Node|Array)} draw returns the content of the column of one shown model.
 */
export function columns(shown, draw) {
  const heading = shown.length > 1 ? "model" : "visually-hidden";
  return html("div", { class: "columns" }, shown.map((one) => html("div", { class: "column" },
    html("h3", { class: heading }, one.model.name), draw(one))));
}

/** Return a line about an error. */
export function errorLine(message) {
  return html("p", { class: "error", role: "alert" }, message);
}

/** Return an element that scrolls to the sides, also by keyboard. */
function scrollable(label, ...children) {
  return html("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": label }, ...children);
}

/** Return a table that scrolls to the sides; a column without a title has no heading. */
export function table(label, name, titles, rows) {
  const heading = (title) => (title === "" ? html("td") : html("th", { scope: "col" }, title));
  return scrollable(label, html("table", { class: name }, html("thead", {}, html("tr", {}, titles.map(heading))),
    html("tbody", {}, rows)));
}

/** Return the width of a drawing within an element, in pixels: at most that of a column of a paper. */
export function drawingWidth(element) {
  return Math.max(260, Math.min(480, element.clientWidth || 480));
}

/**
 * Move the focus among elements of which one at a time is in the tab order, by arrow keys, Home and End.
 * @param {Element} group its parent; the elements are those with a `tabindex`.
 * @param {function(Element)} onmove is called with the newly focused element.
 */
export function rove(group, onmove = () => {}) {
  group.addEventListener("keydown", (event) => {
    const elements = [...group.querySelectorAll("[tabindex]")];
    const at = elements.indexOf(event.target);
    const last = elements.length - 1;
    const moves = { ArrowLeft: at - 1, ArrowUp: at - 1, ArrowRight: at + 1, ArrowDown: at + 1, Home: 0, End: last };
    const to = moves[event.key];
    if (at < 0 || to === undefined) return;
    event.preventDefault();
    const next = elements[Math.max(0, Math.min(last, to))];
    for (const element of elements) element.tabIndex = element === next ? 0 : -1;
    next.focus();
    onmove(next);
  });
}
