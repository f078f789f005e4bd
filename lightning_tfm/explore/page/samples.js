// Samples of a text, with the surprise of each symbol.

import {
  asking, drawColumns, liveFigure, liveLine, moveAmong, numberField, replyOf, unchangedNote,
} from "./questions.js";
import { isCharacters, textDrawing, textMoves } from "./contributions.js";
import { debounced, html, number, percent, visible } from "./dom.js";
import { pythonLines } from "./pictures.js";

/** Milliseconds without a change before the temperature of the slider is used. */
const SLIDER_PAUSE = 150;

/** Surprise, in bits, of the strongest background. */
const STRONGEST = 8;

/** Numbers of the controls: the fields of the state, their labels and limits. */
const FIELDS = [
  ["topK", "Top k", { min: 1, placeholder: "all" }],
  ["topP", "Top p", { min: 0.01, max: 1, step: 0.01, placeholder: "1" }],
  ["maxTokens", "Maximum symbols", { min: 1, max: 1000 }],
  ["seed", "Seed", { min: 0, max: 999999999 }],
];

function sum(steps) {
  return steps.reduce((total, { surprise: bits }) => total + bits, 0);
}

/** Return the panel of samples. */
export function samplesPanel({ backend, state }) {
  const temperature = numberField(state, "temperature", "Temperature", { min: 0.01, max: 10, step: 0.01 });
  const slide = debounced(() => state.set({ temperature: Number(slider.value) }), SLIDER_PAUSE);
  const slider = html("input", { type: "range", min: 0.05, max: 2, step: 0.05, "aria-label": "Temperature",
    oninput: slide });
  const fields = FIELDS.map(([name, label, limits]) => numberField(state, name, label, limits));
  const next = html("button", { type: "button", class: "primary",
    onclick: () => state.set({ seed: state.get().seed + 1 }) }, "Next sample");
  const controls = html("div", { class: "controls" },
    html("div", { class: "row slider" }, temperature.element, slider), fields.map((field) => field.element), next);
  const body = html("div", {});
  const element = html("div", {}, controls, body, html("div", { class: "progress" }));
  const cursors = new Map();

  /** Return lines about the surprise of the sample and of the given text. */
  function summary(unit, given, sampled) {
    const mean = (steps) => `${number(sum(steps) / steps.length)} bits per ${unit}`;
    return html("p", {}, html("strong", {}, mean(sampled)), ` in ${sampled.length} ${unit}s`,
      given.length > 0 ? html("span", { class: "muted" }, `; ${mean(given)} in the given text`) : null);
  }

  function sampleFigure({ index, model, answer }, { text, steps, given }, values, width) {
    // The first symbol of a text is not predicted.
    const start = model.task === "language_model" ? answer.source.slice(0, 1) : [];
    const symbols = [...start, ...steps.map(({ symbol }) => symbol)];
    const bits = [...start.map(() => 0), ...steps.map(({ surprise }) => surprise)];
    const unit = isCharacters(symbols) ? "character" : "symbol";
    const isGiven = (i) => i < start.length + given;
    const { drawing, items } = textDrawing({ symbols, values: bits.map((value) => value / STRONGEST), width,
      scale: ["0", `${STRONGEST} bits`], underlined: isGiven, legend: given + start.length > 0 ? "given text" : "",
      key: `sample ${index}`, label: `Sample: ${text}. Arrow keys move between the symbols.` });
    const live = liveLine("Point at a symbol, or move with the arrow keys.");
    const describe = (i) => {
      const step = steps[i - start.length];
      const surprise = step ? ` ${number(step.surprise)} bits, ${percent(step.probability)}` : " not predicted";
      return [html("b", { class: "mono" }, visible(symbols[i])), surprise, isGiven(i) ? ", given" : ""];
    };
    moveAmong(drawing, items, { cursors, moves: textMoves(items), first: start.length + given,
      show: (i) => live.show(...(i === null ? [] : describe(i))) });
    return [unchangedNote(model, state.get()), summary(unit, steps.slice(0, given), steps.slice(given)),
      liveFigure(live, "Sample", drawing, pythonLines(model, "sample", values),
        `Backgrounds are the surprise of each ${unit}, in bits, at a temperature of 1.`),
      backend.kind === "file" ? html("p", { class: "note" }, "A seed gives another sample in Python.") : null];
  }

  const ask = asking(backend, element, ({ answer }) => {
    const { text, temperature: value, topK, topP, seed, maxTokens } = state.get();
    const values = { text, temperature: value, top_k: topK, top_p: topP, seed, max_tokens: maxTokens };
    return answer ? { sample: ["sample", values] } : {};
  }, (shown) => {
    controls.hidden = !shown.some(({ model }) => model.questions.includes("sample"));
    drawColumns(body, shown, (one, width) => replyOf(one, "sample", (result, values) =>
      sampleFigure(one, result, values, width)));
  });

  return {
    id: "samples", title: "Samples", element,
    update(shown) {
      const values = state.get();
      for (const field of [temperature, ...fields]) field.update(values);
      slider.value = values.temperature;
      return ask(shown);
    },
  };
}
