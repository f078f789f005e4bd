// The answer: its steps with their probabilities and alternatives, and the changes that are active.

import { bar, clear, columns, errorLine, heatColor, html, number, percent, rove, visible } from "./dom.js";
import { actions, pythonLines } from "./pictures.js";
import { changesFor, textArguments, vocabularyField } from "./state.js";

/** Probability below which a step is marked as unsure. */
const UNSURE = 0.5;

/** Surprise, in bits, of the strongest background. */
export const MAX_SURPRISE = 8;

/** Symbols that are written as a word. */
export const SPECIAL = ["EOS", "BOS", "PAD", "UNK"];

/** Symbol of a masked token. */
export const MASKED = "[MASK]";

function surprise(probability) {
  return -Math.log2(Math.max(probability, 1e-12));
}

/** Return the panel of the answer. */
export function stepsPanel({ models, state }) {
  const element = html("div", { class: "answers" });
  const drawnSymbols = new Map(); // those of the last drawing, by the index of the model

  function selected(answer) {
    return Math.min(state.get().step, answer.steps.length - 1);
  }

  function firstChange(index, answer) {
    const before = drawnSymbols.get(index) ?? [];
    const now = answer.steps.map(({ symbol }) => symbol);
    drawnSymbols.set(index, now);
    const change = now.findIndex((symbol, t) => symbol !== before[t]);
    return change < 0 ? now.length : change;
  }

  /** Return the attributes of a button that selects step `t`. */
  function stepAttributes(index, answer, t) {
    const isSelected = t === selected(answer);
    const { symbol, probability, forced, given } = answer.steps[t];
    const mark = forced && !given ? ", forced" : "";
    return {
      type: "button", "aria-pressed": isSelected, tabindex: isSelected ? 0 : -1, "data-key": `step ${index} ${t}`,
      "aria-label": `Step ${t + 1}: ${visible(symbol)}, ${percent(probability)}${mark}`,
      title: `${percent(probability)}${mark}`, onclick: () => state.set({ step: t }),
    };
  }

  function chip(index, answer, t, change) {
    const { symbol, probability, forced } = answer.steps[t];
    const isUnsure = probability < UNSURE;
    const names = ["chip", forced && "forced", isUnsure && "unsure", SPECIAL.includes(symbol) && "special",
      t >= change && "changed"];
    return html("button", { class: names.filter(Boolean).join(" "), style: `--i: ${t - change}`,
      ...stepAttributes(index, answer, t) },
    html("span", { class: "symbol" }, visible(symbol)), bar(probability, isUnsure ? "--warm" : "--accent"),
    html("small", {}, probability < 0.995 ? percent(probability) : ""));
  }

  /** Return a symbol of the given text, with its surprise as its background. */
  function givenSymbol(index, answer, t) {
    const { symbol, probability } = answer.steps[t];
    const bits = surprise(probability);
    const label = `${visible(symbol)}: ${number(bits, 1)} bits, ${percent(probability)}`;
    const button = html("button", { class: "given", ...stepAttributes(index, answer, t), title: label,
      "aria-label": label, style: `background: ${heatColor(bits / MAX_SURPRISE, "--warm")}` }, visible(symbol));
    return symbol === "\n" ? [button, html("br")] : button;
  }

  function group(label, name, ...children) {
    const element = html("div", { class: name, role: "group", "aria-label": label }, ...children);
    rove(element, (button) => state.set({ step: Number(button.dataset.key.split(" ")[2]) }));
    return element;
  }

  function chips(index, answer, change) {
    return answer.steps.map((_, t) => chip(index, answer, t, change));
  }

  function textWithSurprise(index, answer, change) {
    const given = answer.steps.filter((step) => step.given).length;
    const rest = chips(index, answer, change).slice(given);
    return group("Symbols of the text and of its continuation", "",
      html("div", { class: "text" }, html("span", { class: "given" }, visible(answer.source[0] ?? "")),
        answer.steps.slice(0, given).map((_, t) => givenSymbol(index, answer, t))),
      html("div", { class: "chips" }, rest));
  }

  function textWithMasks(index, answer, change) {
    const filled = chips(index, answer, change);
    return group("Symbols at the masks", "chips", answer.source.map((symbol) =>
      (symbol === MASKED ? filled.shift() : html("span", { class: "given" }, visible(symbol)))));
  }

  function labels(answer) {
    const [step] = answer.steps;
    return html("div", { class: "labels", role: "list", "aria-label": "Labels" }, step.alternatives.map((one) =>
      html("div", { role: "listitem", class: one.id === step.id ? "chosen" : "" },
        html("span", {}, one.symbol), bar(one.probability),
        html("span", { class: "number" }, percent(one.probability)))));
  }

  function alternatives(index, model, answer) {
    const t = selected(answer);
    const step = answer.steps[t];
    if (step === undefined) return null;
    const first = answer.steps.filter(({ given }) => given).length; // the steps that a prefix can force
    const canForce = !step.given && model.task !== "masked_language_model";
    const choice = (one) => {
      const content = [html("span", { class: "symbol" }, visible(one.symbol)),
        html("span", { class: "number" }, percent(one.probability)), bar(one.probability)];
      const name = `choice${one.id === step.id ? " chosen" : ""}`;
      if (!canForce) return html("div", { class: name }, content);
      return html("button", { type: "button", class: name, "data-key": `choice ${index} ${one.id}`,
        "aria-label": `Force ${visible(one.symbol)}, ${percent(one.probability)}`, "aria-pressed": one.id === step.id,
        onclick: () => state.set({ prefix: [...answer.steps.slice(first, t).map(({ id }) => id), one.id],
          ...vocabularyField(models, model) }) }, content);
    };
    return html("div", { class: "alternatives" },
      html("h4", {}, `Step ${t + 1}, `, html("b", {}, visible(step.symbol)), ". Most probable symbols",
        canForce ? "; choose one to force it:" : ":"),
      html("div", { class: "choices", role: "group", "aria-label": `Symbols of step ${t + 1}` },
        step.alternatives.map(choice)));
  }

  function facts(model, answer) {
    const predicted = answer.steps.filter(({ given }) => !given);
    const given = answer.steps.filter((step) => step.given);
    const bits = given.reduce((sum, { probability }) => sum + surprise(probability), 0) / given.length;
    const parts = [
      given.length > 0 && `text: ${number(bits)} bits per symbol`,
      model.task === "classifier" ? null : `log probability ${number(answer.log_probability)}`,
      predicted.length > 1 && `${predicted.length} steps`,
    ];
    return html("div", { class: "facts" },
      model.task === "language_model" ? null : html("p", { class: "output" }, answer.output || "(empty)"),
      html("span", { class: "muted" }, parts.filter(Boolean).join(" · ")));
  }

  function content(index, model, answer) {
    const change = firstChange(index, answer);
    if (model.task === "classifier") return labels(answer);
    if (model.task === "language_model") return textWithSurprise(index, answer, change);
    if (model.task === "masked_language_model") return textWithMasks(index, answer, change);
    return group("Steps of the output", "chips", chips(index, answer, change));
  }

  function column({ index, model, answer, error }) {
    if (error) return errorLine(error);
    if (!answer) return html("p", { class: "muted" }, "No answer yet.");
    const python = pythonLines(model, "answer", textArguments(model, state.get()));
    return [
      facts(model, answer),
      answer.note ? html("p", { class: "note" }, answer.note) : null,
      content(index, model, answer),
      model.task === "classifier" ? null : alternatives(index, model, answer),
      actions(python),
    ];
  }

  /** Return the active changes, each with a button that undoes it. */
  function changes(shown) {
    const values = state.get();
    const without = (name, item) => () => state.set({ [name]: values[name].filter((one) => one !== item) });
    const applies = (name, item) => shown.some(({ model }) => changesFor(model, values)[name].includes(item));
    const symbolAt = (kind, layer, position) => shown.map(({ answer }) =>
      answer?.attention.find((map) => map.layer === layer)?.[kind][position]).find((symbol) => symbol !== undefined);
    const named = (kind, layer, position) => `${position + 1} “${visible(symbolAt(kind, layer, position) ?? "")}”`;
    const forced = values.prefix.length;
    const items = [
      ...(forced > 0 ? [[`${forced} ${forced === 1 ? "step" : "steps"} forced`, () => state.set({ prefix: [] })]] : []),
      ...values.off.filter((part) => applies("off", part)).map((part) => [`${part} off`, without("off", part)]),
      ...values.drawn.filter((one) => applies("drawn", one)).map((one) => [`${one.layer}${one.head === null ? ""
        : `.${one.head}`}: row ${named("queries", one.layer, one.query)} reads column ${
        named("keys", one.layer, one.key)}`,
      without("drawn", one)]),
      ...values.patched.filter((one) => applies("patched", one)).map((one) => [
        `${one.layer} patched at ${one.position + 1}`, without("patched", one)]),
    ];
    if (items.length === 0) return null;
    return html("div", { class: "changes", role: "group", "aria-label": "Active changes" },
      html("strong", {}, `${items.length} ${items.length > 1 ? "changes" : "change"}:`),
      items.map(([label, undo]) => html("button", { type: "button", "data-key": `undo ${label}`,
        "aria-label": `Undo: ${label}`, onclick: undo }, `${label} ×`)),
      html("button", { type: "button", "data-key": "reset", onclick: () =>
        state.set({ prefix: [], off: [], drawn: [], patched: [] }) }, "Reset all"));
  }

  return {
    id: "answer", title: "Answer", element,
    update(shown) {
      clear(element, columns(shown, column), changes(shown));
    },
  };
}
