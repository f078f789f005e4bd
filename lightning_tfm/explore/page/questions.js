// Questions of the panels about the shown models, and shared parts of their replies.

import {
  clear, columns, debounced, drawingWidth, errorLine, html, isShown, latest, number, redraw, svg, visible,
} from "./dom.js";
import { figure } from "./pictures.js";
import { changesFor, DEFAULTS } from "./state.js";

/** Milliseconds without a change before the value of an input is used. */
const INPUT_PAUSE = 150;

/** Number of results that a panel keeps. */
const MAX_RESULTS = 60;

/** Width of a character of a symbol in a drawing, relative to the size of the font. */
const LETTER = 0.61;

/** Return a symbol as text of at most this number of characters. */
export function clipped(symbol, length) {
  const text = visible(symbol);
  return text.length > length ? `${text.slice(0, length - 1)}…` : text;
}

/** Return the width of a symbol in a drawing. */
export function symbolWidth(text, font) {
  return LETTER * font * text.length;
}

/**
 * Return a function that asks questions about the shown models, unless the panel is hidden, and draws the replies.
 *
 * No question is asked twice, and replies that are overtaken by newer questions are dropped.
 * @param {object} backend
 * @param {Element} element that of the panel, which is busy meanwhile.
 * @param {function(object): object} questionsOf returns questions to a shown model: { name: [question, arguments] }.
 * @param {function(Array<object>)} draw is given the shown models with `replies`: { name: { values, result, error } }.
 */
export function asking(backend, element, questionsOf, draw) {
  const results = new Map(); // promises

  function reply(index, [question, values], signal) {
    const key = JSON.stringify([index, question, values]);
    if (!results.has(key)) {
      const forget = () => results.delete(key);
      signal.addEventListener("abort", forget);
      results.set(key, backend.ask(index, question, values, signal));
      results.get(key).then(() => signal.removeEventListener("abort", forget), forget);
      if (results.size > MAX_RESULTS) results.delete(results.keys().next().value);
    }
    return results.get(key).then((result) => ({ values, result, error: null }),
      (error) => ({ values, result: null, error: error.message }));
  }

  async function withReplies(one, signal) {
    const questions = Object.entries(questionsOf(one)).filter(([, [name]]) => one.model.questions.includes(name));
    const replies = questions.map(async ([name, question]) => [name, await reply(one.index, question, signal)]);
    return { ...one, replies: Object.fromEntries(await Promise.all(replies)) };
  }

  const ask = latest((shown, signal) => Promise.all(shown.map((one) => withReplies(one, signal))));
  return async (shown) => {
    if (!isShown(element)) return;
    element.setAttribute("aria-busy", "true");
    const replied = await ask(shown);
    element.removeAttribute("aria-busy");
    draw(replied);
  };
}

/**
 * Return the content of a column: a drawn result, or a line about its absence.
 * @param {object} one a shown model with its replies.
 * @param {string} question the name of the question and of its reply.
 * @param {function(object, object)} draw is given the result and the arguments.
 */
export function replyOf(one, question, draw) {
  const { model, replies } = one;
  if (!model.questions.includes(question)) {
    return html("p", { class: "note" }, `This question ${model.excluded[question] ?? "has no answer here"}.`);
  }
  const reply = replies[question];
  if (reply === undefined) return html("p", { class: "muted" }, "There is no answer yet.");
  return reply.error === null ? draw(reply.result, reply.values) : errorLine(reply.error);
}

/** Return a line that says that a result is that of the network without the changes of the state, if it has any. */
export function unchangedNote(model, values) {
  const isChanged = Object.values(changesFor(model, values)).some((list) => list.length > 0);
  return isChanged ? html("p", { class: "note" }, "This is the result without the changes of the network.") : null;
}

/**
 * Draw the columns of the shown models.
 * @param {Element} body
 * @param {Array<object>} shown
 * @param {function(object, number)} draw returns the content of the column of a shown model, for a width of drawings.
 */
export function drawColumns(body, shown, draw) {
  redraw(body, () => {
    const slots = new Map(shown.map((one) => [one, html("div", {})]));
    body.replaceChildren(columns(shown, (one) => slots.get(one)));
    for (const [one, slot] of slots) clear(slot, draw(one, drawingWidth(slot)));
  });
}

/**
 * Return a labeled input of a number, and a function that shows the value of the state.
 * @param {State} state
 * @param {string} name the field of the state.
 * @param {string} label
 * @param {object} attributes such as `min` and `max`; an invalid value is not used.
 */
export function numberField(state, name, label, attributes) {
  const write = () => {
    if (input.checkValidity()) state.set({ [name]: input.value === "" ? null : Number(input.value) });
  };
  const input = html("input", { type: "number", required: DEFAULTS[name] !== null, "data-key": name, ...attributes,
    oninput: debounced(write, INPUT_PAUSE), onchange: () => (input.reportValidity() ? write() : undefined) });
  return {
    element: html("label", { class: "field" }, label, input),
    update: (values) => { if (!input.matches(":focus")) input.value = values[name] ?? ""; },
  };
}

/**
 * Let the pointer and the keyboard move among the items of a drawing.
 * @param {SVGElement} drawing with a `data-key` attribute; it takes the focus, and shows it around an item.
 * @param {Array<{x: number, y: number, width: number, height: number}>} items their boxes.
 * @param {object} options `cursors`, a map that keeps the item of the keyboard by the key of the drawing; `moves(i)`,
 *   the indices of the items that keys lead to; `show(i)`, called for the item under the pointer or the cursor, or with
 *   null without any; `choose(i)`, called after a click or Enter; `first`, the first item of the keyboard.
 */
export function moveAmong(drawing, items, { cursors, moves, show, choose = () => {}, first = 0 }) {
  const { key } = drawing.dataset;
  const { width, height } = drawing.viewBox.baseVal;
  const cursor = svg("rect", { class: "cursor", rx: 3, visibility: "hidden" });
  drawing.append(cursor);
  drawing.setAttribute("tabindex", 0);
  drawing.setAttribute("role", "application");
  let shownItem = null;

  function showItem(i) {
    if (i !== shownItem) show(i);
    shownItem = i;
  }
  function move(i) {
    cursors.set(key, i);
    const { x, y, width: wide, height: high } = items[i];
    const box = { x: x - 1.5, y: y - 1.5, width: wide + 3, height: high + 3, visibility: "visible" };
    for (const [name, value] of Object.entries(box)) cursor.setAttribute(name, value);
    showItem(i);
  }
  function leave() {
    const isFocused = drawing.matches(":focus");
    cursor.setAttribute("visibility", isFocused ? "visible" : "hidden");
    showItem(isFocused ? cursors.get(key) : null);
  }
  function itemAt(event) {
    const box = drawing.getBoundingClientRect();
    const left = (event.clientX - box.left) * width / box.width;
    const top = (event.clientY - box.top) * height / box.height;
    return items.findIndex((item) => left >= item.x && left < item.x + item.width && top >= item.y
      && top < item.y + item.height);
  }

  if (items.length === 0) return;
  drawing.addEventListener("focus", () => move(Math.min(cursors.get(key) ?? first, items.length - 1)));
  drawing.addEventListener("blur", leave);
  drawing.addEventListener("pointerleave", leave);
  drawing.addEventListener("pointermove", (event) => {
    const i = itemAt(event);
    if (i >= 0) showItem(i);
  });
  drawing.addEventListener("click", (event) => {
    const i = itemAt(event);
    if (i < 0) return;
    move(i);
    choose(i);
  });
  drawing.addEventListener("keydown", (event) => {
    const at = Math.min(cursors.get(key) ?? first, items.length - 1);
    const to = { Home: 0, End: items.length - 1, ...moves(at) }[event.key];
    if (event.key === "Enter" || event.key === " ") choose(at);
    else if (to !== undefined) move(Math.max(0, Math.min(items.length - 1, to)));
    else return;
    event.preventDefault();
    cursor.scrollIntoView({ block: "nearest", inline: "nearest" });
  });
}

/** Return a line that shows the item under the pointer or the cursor. */
export function liveLine(hint) {
  const element = html("p", { class: "live", role: "status" });
  const show = (...children) => clear(element, children.length > 0 ? children : html("span", { class: "muted" }, hint));
  show();
  return { element, show };
}

/** Return a figure with the line of its drawing below it; the other arguments are those of `figure`. */
export function liveFigure(live, ...parts) {
  const element = figure(...parts);
  element.querySelector(".drawing").after(live.element);
  return element;
}
