// Contributions of the input symbols to the output.

import { liveFigure, liveLine, tone } from "./drawings.js";
import { choiceField } from "./controls.js";
import { clear, html, percent, signed, visible } from "./dom.js";
import { MIN_SIGN, signedMap } from "./map.js";
import { pythonLines } from "./pictures.js";
import { questionPanel } from "./questions.js";
import { textArguments } from "./state.js";
import { isCharacters, textDrawing } from "./text_drawing.js";

/** Names of the methods. */
const METHODS = { occlusion: "Occlusion", integrated_gradients: "Integrated gradients" };

/** Descriptions of the methods. */
const EXPLANATIONS = {
  occlusion: "The decrease of the log probability of an output symbol without an input symbol.",
  integrated_gradients: "The share of an input symbol in the log probability of an output symbol, compared with an "
    + "empty input (Sundararajan et al. 2017).",
};

/** Return the largest absolute value. */
function largest(values) {
  return values.flat().reduce((most, value) => Math.max(most, Math.abs(value)), 0) || 1;
}

/** Return the labels of the scale of values up to a limit. */
function scaleLabels(limit) {
  return [signed(-limit, 1), "0", signed(limit, 1)];
}

/** Return the panel of contributions. */
export function contributionsPanel(context) {
  const { state } = context;
  const explanation = html("p", { class: "note" });
  state.follow(({ method }) => { explanation.textContent = EXPLANATIONS[method]; });
  const cursors = new Map();

  /** Return the figure of the contributions to one output, drawn as the text of the input. */
  function textFigure({ index, answer }, { inputs, targets, values: [row] }, python, width, step = 0) {
    const limit = largest(row);
    const note = (value) => (isCharacters(inputs) ? signed(value)[0] : signed(value, 1));
    const notes = row.map((value) => (Math.abs(value) < MIN_SIGN / 2 * limit ? "" : note(value)));
    const place = answer.steps.length > 1 ? `step ${step + 1}, ` : "";
    const title = `Contributions to ${place}${visible(targets[0])}`;
    const live = liveLine("Point at a symbol, or move with the arrow keys.");
    const drawing = textDrawing({ symbols: inputs, values: row.map((value) => value / limit), notes, width,
      scale: scaleLabels(limit), key: `contributions ${index}`, cursors,
      label: `${title}, as backgrounds of the text. Arrow keys move between the symbols.`,
      show: (i) => live.show(...(i === null ? [] : [
        html("b", { class: "mono" }, visible(inputs[i])), ` ${signed(row[i])} nats`])) });
    return liveFigure(live, title, drawing, python,
      `In nats, for a probability of ${percent(answer.steps[step].probability)}.`);
  }

  /** Return the numbers of a row, each below its symbol. */
  function numbersOf(inputs, row, limit, at) {
    return row.map((value, s) => {
      const { opacity, sign } = tone(value / limit);
      const color = sign === "negative" ? "--cool" : "--warm";
      return html("span", { class: `value${s === at ? " pointed" : ""}`,
        style: `background: color-mix(in srgb, var(${color}) ${100 * opacity}%, transparent)` },
      html("span", { class: "symbol" }, visible(inputs[s])),
      html("small", { class: Number(opacity) === 0 ? "muted" : "" }, signed(value)));
    });
  }

  /** Return the figure of the contributions to all steps of the output. */
  function mapFigure({ index }, { inputs, targets, values }, python, width) {
    const limit = largest(values);
    const selected = Math.min(state.get().step, targets.length - 1);
    const live = liveLine("Point at a row, or move with the arrow keys; the numbers are those of its output symbol.");
    const heading = html("h4", {});
    const numbers = html("div", { class: "values" });
    function show(cell) {
      const { t, s } = cell ?? { t: selected, s: -1 };
      clear(heading, "Contributions to step ", t + 1, ", ", html("b", { class: "mono" }, visible(targets[t])));
      clear(numbers, numbersOf(inputs, values[t], limit, s));
      live.show(...(cell === null ? [] : [html("b", { class: "mono" }, visible(targets[t])), " ← ",
        html("b", { class: "mono" }, visible(inputs[s])), ` ${signed(values[t][s])} nats`]));
    }
    show(null);
    const drawing = signedMap({
      rows: targets, tops: inputs.map((symbol) => [symbol]), values, limit, width, selected, scale: scaleLabels(limit),
      title: "input", key: `contributions ${index}`, cursors, show, choose: ({ t }) => state.set({ step: t }),
      label: `Map of contributions, ${targets.length} output symbols as rows and ${inputs.length} input symbols as `
        + "columns. Arrow keys move between the cells; Enter selects a step.",
    });
    return html("div", { class: "beside" },
      liveFigure(live, "Contributions", drawing, python, "Output symbols over input symbols, in nats."),
      html("div", {}, heading, numbers));
  }

  return questionPanel(context, {
    id: "contributions", title: "Contributions", question: "attributions",
    fields: [choiceField(state, "method", "Method", METHODS)], notes: explanation,
    argumentsOf: ({ model, answer }) => {
      const { method, step } = state.get();
      const values = { ...textArguments(model, state.get()), method };
      // Integrated gradients of all steps take seconds.
      if (method === "integrated_gradients") values.step = Math.max(0, Math.min(step, answer.steps.length - 1));
      return values;
    },
    draw: (one, result, values, width) => {
      const python = pythonLines(one.model, "attributions", values);
      return (result.targets.length === 1 ? textFigure : mapFigure)(one, result, python, width, values.step);
    },
  });
}
