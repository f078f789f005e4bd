// Samples of a text, with the surprise of each symbol.

import { numberField } from "./controls.js";
import { debounced, html, number, percent, visible } from "./dom.js";
import { liveFigure, liveLine } from "./drawings.js";
import { pythonLines } from "./pictures.js";
import { questionPanel, unchangedNote } from "./questions.js";
import { MAX_SURPRISE } from "./steps.js";
import { isCharacters, textDrawing } from "./text_drawing.js";

/** Return the numbers of the controls: the fields of the state, their labels and limits. */
const fieldsOf = ([{ limits }]) => [
  ["topK", "Top k", { min: 1, placeholder: "all" }],
  ["topP", "Top p", { min: 0.01, max: 1, step: 0.01, placeholder: "1" }],
  ["maxTokens", "Maximum symbols", { min: 1, max: limits.max_tokens }],
  ["seed", "Seed", { min: 0, max: 999999999 }],
];

/** Return the field of the temperature, with a slider. */
function temperatureField(state) {
  const slider = html("input", { type: "range", min: 0.05, max: 2, step: 0.05, "aria-label": "Temperature",
    oninput: debounced(() => state.set({ temperature: Number(slider.value) })) });
  state.follow(({ temperature }) => { slider.value = temperature; });
  return html("div", { class: "row slider" },
    numberField(state, "temperature", "Temperature", { min: 0.01, max: 10, step: 0.01 }), slider);
}

/** Return lines about the surprise of the sample and of the given text. */
function summary(unit, given, sampled) {
  const mean = (steps) => steps.reduce((sum, { surprise }) => sum + surprise, 0) / steps.length;
  const text = (steps) => `${number(mean(steps))} bits per ${unit}`;
  return html("p", {}, html("strong", {}, text(sampled)), ` in ${sampled.length} ${unit}s`,
    given.length > 0 ? html("span", { class: "muted" }, `; ${text(given)} in the given text`) : null);
}

/** Return the panel of samples. */
export function samplesPanel(context) {
  const { backend, models, state } = context;
  const next = html("button", { type: "button", class: "primary",
    onclick: () => state.set({ seed: state.get().seed + 1 }) }, "Next sample");
  const cursors = new Map();

  function draw({ index, model, answer }, { text, steps, given }, values, width) {
    // The first symbol of a text is not predicted.
    const start = model.task === "language_model" ? answer.source.slice(0, 1) : [];
    const symbols = [...start, ...steps.map(({ symbol }) => symbol)];
    const bits = [...start.map(() => 0), ...steps.map(({ surprise }) => surprise)];
    const unit = isCharacters(symbols) ? "character" : "symbol";
    const isGiven = (i) => i < start.length + given;
    const live = liveLine("Point at a symbol, or move with the arrow keys.");
    const describe = (i) => {
      const step = steps[i - start.length];
      const surprise = step ? ` ${number(step.surprise)} bits, ${percent(step.probability)}` : " not predicted";
      return [html("b", { class: "mono" }, visible(symbols[i])), surprise, isGiven(i) ? ", given" : ""];
    };
    const drawing = textDrawing({ symbols, values: bits.map((value) => value / MAX_SURPRISE), width,
      scale: ["0", `${MAX_SURPRISE} bits`], underlined: isGiven, legend: given + start.length > 0 ? "given text" : "",
      key: `sample ${index}`, label: `Sample: ${text}. Arrow keys move between the symbols.`, cursors,
      first: start.length + given, show: (i) => live.show(...(i === null ? [] : describe(i))) });
    return [unchangedNote(model, state.get()), summary(unit, steps.slice(0, given), steps.slice(given)),
      liveFigure(live, "Sample", drawing, pythonLines(model, "sample", values),
        `Backgrounds are the surprise of each ${unit}, in bits, at a temperature of 1.`),
      backend.kind === "file"
        ? html("p", { class: "note" }, "The same seed gives a different sample in Python.") : null];
  }

  return questionPanel(context, {
    id: "samples", title: "Samples", question: "sample", draw,
    fields: [temperatureField(state), fieldsOf(models).map((field) => numberField(state, ...field)), next],
    argumentsOf: () => {
      const { text, temperature, topK, topP, seed, maxTokens } = state.get();
      return { text, temperature, top_k: topK, top_p: topP, seed, max_tokens: maxTokens };
    },
  });
}
