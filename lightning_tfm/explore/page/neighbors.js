// The nearest training examples, and the test example with the largest loss.

import { asking, clipped, drawColumns, replyOf, unchangedNote } from "./questions.js";
import { isCharacters } from "./contributions.js";
import { bar, clear, html, number, rove, scrollable, visible } from "./dom.js";
import { actions, pythonLines } from "./pictures.js";
import { textArguments } from "./state.js";

/** Number of symbols that are shown before and after the marked one of a long text. */
const CONTEXT = 24;

/** Names of the features that are compared. */
const FEATURES = { source: "the source", decoder: "the state of the decoder at a step" };

/** Return a text with a marked symbol, or a part of it if it is long. */
function markedText(symbols, position, separator = "") {
  if (position === null || position >= symbols.length) return symbols.join(separator);
  const from = symbols.length > 4 * CONTEXT ? Math.max(0, position - CONTEXT) : 0;
  const to = symbols.length > 4 * CONTEXT ? position + CONTEXT : symbols.length;
  return [from > 0 ? "…" : "", symbols.slice(from, position).map((symbol) => symbol + separator),
    html("mark", {}, visible(symbols[position])), symbols.slice(position + 1, to).map((symbol) => separator + symbol),
    to < symbols.length ? "…" : ""];
}

/** Return a target with a marked symbol if its symbols are characters or words, as in the answer. */
function markedTarget(target, position, { output, steps }) {
  const symbols = steps.map(({ symbol }) => symbol).filter((symbol) => symbol !== "EOS");
  const isWords = symbols.join(" ") === output;
  if (position === null || !(isWords || isCharacters(symbols))) return target;
  const parts = isWords ? target.split(" ") : [...target];
  return markedText(parts.length === position ? [...parts, "EOS"] : parts, position, isWords ? " " : "");
}

/** Return the panel of the nearest examples. */
export function neighborsPanel({ backend, state }) {
  const select = html("select", { "data-key": "by", onchange: () => state.set({ by: select.value }) },
    Object.entries(FEATURES).map(([by, name]) => html("option", { value: by }, name)));
  const steps = html("div", {});
  const controls = html("div", {},
    html("div", { class: "controls" }, html("label", { class: "field" }, "Nearest by", select)), steps);
  const body = html("div", {});
  const worstButton = html("button", { type: "button", "aria-expanded": false, onclick: () => {
    isWorstShown = !isWorstShown;
    worstButton.setAttribute("aria-expanded", String(isWorstShown));
    panel.update(shownNow);
  } }, "Largest loss in the test set");
  const worst = html("div", {});
  const element = html("div", {}, controls, body, html("div", { class: "worst" }, worstButton, worst),
    html("div", { class: "progress" }));
  let isWorstShown = false;
  let shownNow = [];

  function useButton(key, source, label) {
    return html("button", { type: "button", "data-key": key, "aria-label": `Use the source ${clipped(source, 60)}`,
      onclick: () => state.set({ text: source }) }, label);
  }

  function stepOf(answer) {
    return Math.max(0, Math.min(state.get().step, answer.steps.length - 1));
  }

  /** Return the symbols of the answer, one of which is chosen. */
  function stepButtons(answer) {
    const button = ({ symbol }, t) => html("button", { type: "button", class: "mono",
      "aria-pressed": t === stepOf(answer), tabindex: t === stepOf(answer) ? 0 : -1, "data-key": `neighbor step ${t}`,
      "aria-label": `Step ${t + 1}: ${visible(symbol)}`, onclick: () => state.set({ step: t }) }, visible(symbol));
    const group = html("div", { class: "row steps", role: "group", "aria-label": "Step" }, answer.steps.map(button));
    rove(group, (chosen) => chosen.click());
    return group;
  }

  /** Return the texts of an example; that of characters without a target has the next character marked. */
  function exampleTexts({ source, target, position }, answer) {
    if (target !== "") return { source, target: markedTarget(target, position, answer) };
    const next = position === null || !isCharacters(answer.source) ? null : position + 1;
    return { source: markedText([...source], next), target: null };
  }

  function exampleTable({ index, answer }, examples) {
    const hasTarget = examples.some(({ target }) => target !== "");
    const titles = ["", ...(hasTarget ? ["Source", "Target"] : ["Text"]), "Similarity", ""];
    const row = (example, i) => {
      const texts = exampleTexts(example, answer);
      return html("tr", {}, html("th", { scope: "row" }, i + 1),
        html("td", { class: "mono" }, texts.source),
        hasTarget ? html("td", { class: "mono" }, texts.target) : null,
        html("td", { class: "with-bar" }, number(example.similarity, 3), bar(example.similarity)),
        html("td", {}, useButton(`use ${index} ${i}`, example.source, "Use this source")));
    };
    return scrollable("Nearest training examples",
      html("table", { class: "examples" },
        html("thead", {}, html("tr", {}, titles.map((title) =>
          (title === "" ? html("td", {}) : html("th", { scope: "col" }, title))))),
        html("tbody", {}, examples.map(row))));
  }

  function column(one) {
    return replyOf(one, "neighbors", ({ examples }, values) => [
      unchangedNote(one.model, state.get()),
      exampleTable(one, examples),
      html("p", { class: "note" }, `The similarity is the cosine of the angle between ${values.by === "source"
        ? "the mean states of the sources" : "the inputs of the output layer, which predict the marked symbol"}.`),
      actions(pythonLines(one.model, "neighbors", values)),
    ]);
  }

  function worstColumn(one) {
    return replyOf(one, "worst", ({ source, target, prediction, nll, examples }) => [
      html("dl", { class: "example" },
        html("dt", {}, target === "" ? "Text" : "Source"), html("dd", { class: "mono" }, source),
        target === "" ? null : [html("dt", {}, "Target"), html("dd", { class: "mono" }, target),
          html("dt", {}, "Prediction"), html("dd", { class: "mono" }, prediction || "(empty)")],
        html("dt", {}, "Loss"),
        html("dd", {}, `${nll.toPrecision(3)} nats, the largest of ${examples} drawn examples`)),
      html("div", { class: "row" }, useButton(`use worst ${one.index}`, source, "Use this source")),
      actions(pythonLines(one.model, "worst", {})),
    ]);
  }

  const ask = asking(backend, element, ({ model, answer }) => {
    const { by } = state.get();
    const { text, prefix = [] } = textArguments(model, state.get());
    const nearest = { text, by, ...(by === "decoder" ? { step: answer ? stepOf(answer) : 0, prefix } : {}) };
    return {
      ...(answer ? { neighbors: ["neighbors", nearest] } : {}),
      ...(isWorstShown ? { worst: ["worst", {}] } : {}),
    };
  }, (shown) => {
    const can = (question) => shown.some(({ model }) => model.questions.includes(question));
    controls.hidden = !can("neighbors");
    worstButton.hidden = !can("worst");
    drawColumns(body, shown, column);
    if (isWorstShown) drawColumns(worst, shown, worstColumn);
    else worst.replaceChildren();
  });

  const panel = {
    id: "neighbors", title: "Neighbors", element,
    update(shown) {
      shownNow = shown;
      const { by } = state.get();
      select.value = by;
      const answered = shown.find(({ answer }) => answer);
      clear(steps, by === "decoder" && answered ? stepButtons(answered.answer) : null);
      return ask(shown);
    },
  };
  return panel;
}
