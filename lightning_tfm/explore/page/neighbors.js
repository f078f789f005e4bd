// The nearest training examples, and the test example with the largest loss.

import { choiceField } from "./controls.js";
import { bar, clear, html, number, rove, table, visible } from "./dom.js";
import { clipped } from "./drawings.js";
import { actions, pythonLines } from "./pictures.js";
import { canAsk, drawColumns, questionPanel, replyOf, unchangedNote } from "./questions.js";
import { textArguments } from "./state.js";

/** Number of characters that are shown before and after the mark of a long text. */
const CONTEXT = 24;

/** Names of the features that are compared. */
const FEATURES = { source: "the source", decoder: "the state of the decoder at a step" };

/** Return a text with a mark [start, end], which is on EOS if empty; of a long text, only the part around the mark. */
function markedText(text, mark) {
  if (mark === null) return text;
  const [start, end] = mark;
  const characters = [...text]; // code points, as those of Python
  const slice = (from, to) => characters.slice(from, to).join("");
  const isLong = characters.length > 4 * CONTEXT;
  const from = isLong ? Math.max(0, start - CONTEXT) : 0;
  const to = isLong ? end + CONTEXT : characters.length;
  const marked = slice(start, end);
  return [from > 0 ? "…" : "", slice(from, start), marked === "" ? " " : "",
    html("mark", {}, marked.trim() === "" ? visible(marked) || "EOS" : marked), slice(end, to),
    to < characters.length ? "…" : ""];
}

/** Return the panel of the nearest examples. */
export function neighborsPanel(context) {
  const { state } = context;
  const steps = html("div", {});
  const worstButton = html("button", { type: "button", "aria-expanded": false, onclick: () => {
    isWorstShown = !isWorstShown;
    worstButton.setAttribute("aria-expanded", String(isWorstShown));
    panel.update(shownNow);
  } }, "Largest loss in the test set");
  const worst = html("div", {});
  let isWorstShown = false;
  let shownNow = [];

  function useButton(key, source) {
    return html("button", { type: "button", "data-key": key, "aria-label": `Use the source ${clipped(source, 60)}`,
      onclick: () => state.set({ text: source }) }, "Use this source");
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

  function exampleTable({ index }, examples) {
    const hasTarget = examples.some(({ target }) => target !== "");
    const row = ({ source, target, similarity, mark }, i) => html("tr", {}, html("th", { scope: "row" }, i + 1),
      html("td", { class: "mono" }, target === "" ? markedText(source, mark) : source),
      hasTarget ? html("td", { class: "mono" }, target === "" ? "" : markedText(target, mark)) : null,
      html("td", { class: "with-bar" }, number(similarity, 3), bar(similarity)),
      html("td", {}, useButton(`use ${index} ${i}`, source)));
    return table("Nearest training examples", "examples",
      ["", ...(hasTarget ? ["Source", "Target"] : ["Text"]), "Similarity", ""], examples.map(row));
  }

  function worstColumn(one) {
    return replyOf(one, "worst", ({ source, target, prediction, nll, examples }) => [
      html("dl", { class: "example" },
        html("dt", {}, target === "" ? "Text" : "Source"), html("dd", { class: "mono" }, source),
        target === "" ? null : [html("dt", {}, "Target"), html("dd", { class: "mono" }, target),
          html("dt", {}, "Prediction"), html("dd", { class: "mono" }, prediction || "(empty)")],
        html("dt", {}, "Loss"),
        html("dd", {}, `${nll.toPrecision(3)} nats, the largest of ${examples} randomly drawn test examples`)),
      html("div", { class: "row" }, useButton(`use worst ${one.index}`, source)),
      actions(pythonLines(one.model, "worst", {})),
    ]);
  }

  const panel = questionPanel(context, {
    id: "neighbors", title: "Neighbors", question: "neighbors",
    fields: [choiceField(state, "by", "Nearest by", FEATURES)], notes: steps,
    argumentsOf: ({ model, answer }) => {
      const { by } = state.get();
      const { text, prefix = [] } = textArguments(model, state.get());
      return { text, by, ...(by === "decoder" ? { step: stepOf(answer), prefix } : {}) };
    },
    draw: (one, { examples, searched }, values) => [
      unchangedNote(one.model, state.get()),
      exampleTable(one, examples),
      html("p", { class: "note" }, `The nearest of ${searched} randomly drawn training examples. The similarity is the `
        + `cosine of the angle between ${values.by === "source" ? "the mean states of the sources"
          : "the inputs of the output layer, which predict the marked symbol"}.`),
      actions(pythonLines(one.model, "neighbors", values)),
    ],
    update(shown) {
      shownNow = shown;
      const answered = shown.find(({ answer }) => answer);
      clear(steps, state.get().by === "decoder" && answered ? stepButtons(answered.answer) : null);
    },
    more: {
      element: html("div", { class: "worst" }, worstButton, worst),
      questionsOf: () => (isWorstShown ? { worst: ["worst", {}] } : {}),
      draw(shown) {
        worstButton.hidden = !canAsk(shown, "worst");
        if (isWorstShown) drawColumns(worst, shown, worstColumn);
        else worst.replaceChildren();
      },
    },
  });
  return panel;
}
