// Questions of the panels about the shown models, and shared parts of their replies.

import { clear, columns, drawingWidth, errorLine, html, isShown, latest, redraw } from "./dom.js";
import { changesFor } from "./state.js";

/** Number of results that a panel keeps. */
const MAX_RESULTS = 60;

/**
 * Return a function that asks questions about the shown models, and draws the replies.
 *
 * No question is asked twice, and replies that are overtaken by newer questions are dropped.
 * @param {object} backend
 * @param {Element} element is busy meanwhile.
 * @param {function(object): object} questionsOf returns questions to a shown model: { name: [question, arguments] }.
 * @param {function(Array<object>)} draw is given the shown models with `replies`: { name: { values, result, error } }.
 * @param {number} kept the number of results that are kept.
 */
export function asking(backend, element, questionsOf, draw, kept = MAX_RESULTS) {
  const results = new Map(); // promises

  function reply(index, [question, values], signal) {
    const key = JSON.stringify([index, question, values]);
    if (!results.has(key)) {
      const forget = () => results.delete(key);
      signal.addEventListener("abort", forget);
      results.set(key, backend.ask(index, question, values, signal));
      results.get(key).then(() => signal.removeEventListener("abort", forget), forget);
      if (results.size > kept) results.delete(results.keys().next().value);
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
    element.setAttribute("aria-busy", "true");
    const replied = await ask(shown);
    element.removeAttribute("aria-busy");
    draw(replied);
  };
}

/** Return whether one of the shown models answers a question. */
export function canAsk(shown, question) {
  return shown.some(({ model }) => model.questions.includes(question));
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
  if (reply === undefined || (reply.error !== null && reply.error === one.error)) { // which is shown above the tabs
    return html("p", { class: "muted" }, "There is no answer yet.");
  }
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
 * Return a panel that asks a question about the shown models, unless it is hidden, and draws the results in columns.
 * @param {object} context the backend and the state.
 * @param {object} options `id` and `title`; `question`; `fields`, its controls, hidden without a model that answers it;
 *   `notes`, elements below them; `argumentsOf(one)`, those of the question to a shown model with an answer;
 *   `draw(one, result, arguments, width)`, which returns the content of a column; `update(shown)`, called before
 *   questions are asked; `more`, a part below the columns: its `element`, `questionsOf`, as in `asking`, and
 *   `draw(shown)`.
 */
export function questionPanel({ backend }, options) {
  const { id, title, question, fields, notes = null, argumentsOf, draw, update = () => {}, more = null } = options;
  const controls = html("div", {}, html("div", { class: "controls" }, fields), notes);
  const body = html("div", {});
  const element = html("div", {}, controls, body, more?.element, html("div", { class: "progress" }));
  const questionsOf = (one) => ({
    ...(one.answer ? { [question]: [question, argumentsOf(one)] } : {}), ...more?.questionsOf(one),
  });
  const ask = asking(backend, element, questionsOf, (shown) => {
    controls.hidden = !canAsk(shown, question);
    drawColumns(body, shown, (one, width) => replyOf(one, question, (result, values) =>
      draw(one, result, values, width)));
    more?.draw(shown);
  });
  return {
    id, title, element,
    update(shown) {
      update(shown);
      if (isShown(element)) ask(shown);
    },
  };
}
