// A second text: its answer beside the first, and states that are patched from it.

import { textForm } from "./controls.js";
import { clear, errorLine, html, isShown, number, percent, visible } from "./dom.js";
import { liveFigure, liveLine } from "./drawings.js";
import { signedMap } from "./map.js";
import { pythonLines } from "./pictures.js";
import { asking, drawColumns, replyOf } from "./questions.js";
import { changesFor, textArguments } from "./state.js";

/** Size of the smallest cell, which one can touch. */
const MIN_CELL = 20;

/** Titles of the maps of patches. */
const PATCH_TITLES = { input: "Patches of the input", decoder: "Patches of the decoder" };

/** Return the indices at which a list differs from another one of the same length, or else those between equal ends. */
function differences(list, other) {
  const isEqualAt = (i, offset) => list[i] === other[i + offset];
  const all = [...list.keys()];
  if (list.length === other.length) return new Set(all.filter((i) => !isEqualAt(i, 0)));
  const offset = other.length - list.length;
  const shorter = Math.min(list.length, other.length);
  let start = 0;
  while (start < shorter && isEqualAt(start, 0)) start += 1;
  let end = list.length;
  while (list.length - end < shorter - start && isEqualAt(end - 1, offset)) end -= 1;
  return new Set(all.slice(start, end));
}

/** Return symbols in a row, of which some are marked. */
function markedRow(symbols, marked) {
  return html("span", { class: "marked" }, symbols.map((symbol, i) => html(marked.has(i) ? "mark" : "span",
    { class: [...symbol].length > 1 ? "symbol word" : "symbol" }, visible(symbol))));
}

/** Return the symbols of an answer, without those of the given text. */
function outputSymbols({ steps }) {
  return steps.filter(({ given }) => !given).map(({ symbol }) => symbol);
}

/** Return the panel of the second text. */
export function comparePanel(context) {
  const { backend, state } = context;
  const form = textForm(context, "against", "Second text", html("button", { type: "button", onclick: () => {
    state.set({ against: state.get().text });
    form.querySelector("[data-key]").focus();
  } }, "Copy the text"));
  const body = html("div", {});
  const element = html("div", {}, form, body, html("div", { class: "progress" }));
  const cursors = new Map();

  function isPatched(layer, position) {
    return state.get().patched.some((one) => one.layer === layer && one.position === position);
  }

  function togglePatch(layer, position) {
    const others = state.get().patched.filter((one) => one.layer !== layer || one.position !== position);
    state.set({ patched: isPatched(layer, position) ? others : [...others, { layer, position }] });
  }

  /** Return a text and its answer, with the symbols that differ from those of the first text. */
  function answerRows(name, { result, error }, first, text) {
    if (error !== null) return [html("h4", {}, name), errorLine(error)];
    const symbols = outputSymbols(result);
    const certainty = result.steps.length === 1 ? percent(result.steps[0].probability)
      : `log probability ${number(result.log_probability)}`;
    return [
      html("h4", {}, name),
      text ? html("p", {}, markedRow(result.source, differences(result.source, first.source))) : null,
      html("p", {}, html("span", { class: "muted" }, "→ "),
        markedRow(symbols, differences(symbols, outputSymbols(first))),
        html("span", { class: "muted" }, ` ${certainty}`)),
    ];
  }

  function answers({ model, replies }) {
    const { first, second, patched } = replies;
    if (!first || !second) return null;
    if (first.error !== null) return errorLine(first.error);
    const unpatched = model.questions.includes("patch") ? [html("h4", {}, "First text, patched"),
      html("p", { class: "muted" }, "No state is patched.")] : null;
    return html("div", { class: "compared" },
      answerRows("First text", first, first.result, true),
      answerRows("Second text", second, first.result, true),
      patched ? answerRows("First text, patched", patched, first.result, false) : unpatched);
  }

  /** Return the labels of the positions of a map: the symbols of the first text and, if they differ, of the second. */
  function positionLabels({ side, symbols }, { first, second }) {
    const [source, other] = [first, second].map((reply) => reply?.result?.source ?? []);
    return symbols.map((symbol, i) => (side === "input" && other[i] !== undefined && other[i] !== source[i]
      ? [symbol, other[i]] : [symbol]));
  }

  /** Return the figure of the patches of the layers of one side. */
  function patchFigure({ index, model, replies }, side, layers, values, width) {
    const tops = positionLabels(layers[0], replies);
    const shares = layers.map((layer) => layer.effects);
    const canPatch = model.changes.includes("patched");
    const live = liveLine(`Point at a cell, or move with the arrow keys.${canPatch
      ? " Choose one to patch its state." : ""}`);
    const drawing = signedMap({
      rows: layers.map(({ layer }) => layer), tops, values: shares, limit: 1, scale: ["−100%", "0", "100%"], width,
      minSize: MIN_CELL, cursors,
      title: side === "input" ? "position of the input" : "position of the output", key: `patch ${index} ${side}`,
      isMarked: (t, s) => isPatched(layers[t].layer, s),
      label: `Map of patches, ${layers.length} layers as rows and ${tops.length} positions as columns. Arrow keys move `
        + `between the cells${canPatch ? "; Enter patches, or undoes it" : ""}.`,
      show: (cell) => {
        if (cell === null) return live.show();
        const { t, s } = cell;
        const { layer } = layers[t];
        return live.show(html("b", { class: "mono" }, layer), ` at ${s + 1}, `, html("b", { class: "mono" },
          tops[s].map(visible).join(" → ")), `: ${number(100 * shares[t][s], 1)}% restored`,
          isPatched(layer, s) ? ", patched" : "");
      },
      choose: ({ t, s }) => canPatch && togglePatch(layers[t].layer, s),
    });
    return liveFigure(live, PATCH_TITLES[side], drawing, pythonLines(model, "patch", values),
      "Share of the log probability of the second output that each patch restores.");
  }

  /** Return the active patches, each with a button that undoes it. */
  function activePatches(index, model) {
    const active = changesFor(model, state.get()).patched;
    if (active.length === 0) return null;
    return html("div", { class: "row patches", role: "group", "aria-label": "Active patches" },
      html("span", { class: "muted" }, "Patched:"),
      active.map(({ layer, position }) => html("button", { type: "button",
        "data-key": `patched ${index} ${layer} ${position}`, onclick: () => togglePatch(layer, position),
        "aria-label": `Undo the patch of ${layer} at ${position + 1}` }, `${layer} at ${position + 1} ×`)),
      html("button", { type: "button", "data-key": `unpatch ${index}`, onclick: () => state.set({ patched: [] }) },
        "Undo all"));
  }

  function patches(one, width) {
    const { text, against } = state.get();
    if (against === text) return html("p", { class: "note" }, "Change a symbol of the second text.");
    if (one.replies.first?.error || one.replies.second?.error) return null;
    return replyOf(one, "patch", ({ layers }, values) => {
      const sides = [...new Set(layers.map(({ side }) => side))];
      const { off, drawn } = changesFor(one.model, state.get());
      return [
        off.length + drawn.length > 0 ? html("p", { class: "note" }, "The map is that of the network without changes.")
          : null,
        html("div", { class: "drawings" }, sides.map((side) => patchFigure(one, side,
          layers.filter((layer) => layer.side === side), values, width))),
        activePatches(one.index, one.model),
      ];
    });
  }

  /** Return the questions about both texts, whose answers are not forced. */
  function questions({ model }) {
    const values = state.get();
    if (values.text === "" || values.against === "") return {};
    const unpatched = { ...values, prefix: [], patched: [] };
    const isActive = changesFor(model, values).patched.length > 0;
    return {
      first: ["answer", textArguments(model, unpatched)],
      second: ["answer", textArguments(model, { ...unpatched, text: values.against })],
      ...(isActive ? { patched: ["answer", textArguments(model, { ...values, prefix: [] })] } : {}),
      ...(values.against === values.text ? {} : { patch: ["patch", { text: values.text, against: values.against }] }),
    };
  }

  const ask = asking(backend, element, questions, (shown) => {
    if (state.get().against === "") {
      clear(body, html("p", { class: "note" }, "Type a second text with as many symbols as the first, such as a copy "
        + "of it with another letter. The map then shows which states carry the difference."));
    } else {
      drawColumns(body, shown, (one, width) => [answers(one), patches(one, width)]);
    }
  });

  return {
    id: "compare", title: "Second text", element,
    update(shown) {
      if (isShown(element)) ask(shown);
    },
  };
}
