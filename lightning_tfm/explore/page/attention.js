// Attention: lines between the texts, a map of the weights, and the scores of the heads.

import { clear, columns, drawingWidth, html, number, redraw, svg, visible } from "./dom.js";
import { LETTER, clipped, liveFigure, liveLine, moveAmong } from "./drawings.js";
import { cellPaths, columnLabel, heatMap } from "./map.js";
import { effects, increaseText } from "./parts.js";
import { pythonLines } from "./pictures.js";
import { changesFor, textArguments } from "./state.js";
import { MASKED, SPECIAL } from "./steps.js";

/** Titles of the sides of layers, in their order. */
const SIDES = {
  source: "Output over source",
  encoder: "Source over source",
  target: "Output over output",
  sequence: "Within one sequence",
};

/** Names of the rows and columns of a map, by side. */
const AXES = {
  source: ["output", "source"],
  encoder: ["source", "source"],
  target: ["input of the decoder", "input of the decoder"],
  sequence: ["symbol", "symbol"],
};

/** Smallest weight that is drawn. */
const MIN_WEIGHT = 0.01;

/** Maximum number of rows and columns of a map with labels. */
const MAX_LABELED = 80;

/** Number of symbols above which the drawings are not side by side. */
const LONG_TEXT = 48;

/** Maximum width of the drawings of longer texts. */
const MAX_WIDTH = 720;

/** Colors of the weights of a map and of a small map, see `cellPaths`. */
const [WEIGHTS, SMALL_WEIGHTS] = [{ shades: 50, strongest: 1 }, { shades: 8, strongest: 1 }];

/** Maximum number of characters of a label. */
const MAX_LABEL = 14;

function shortLabel(symbol) {
  return clipped(symbol, MAX_LABEL);
}

/** Return the number of characters of the longest label, special tokens aside, which are written smaller. */
function longestLabel(symbols) {
  return Math.max(1, ...symbols.map((symbol) => (SPECIAL.includes(symbol) ? 1 : shortLabel(symbol).length)));
}

/** Return the weights (T, S) of one head, or their mean over the heads. */
function weightsOf(map, head) {
  if (head !== "mean") return map.weights[head];
  const [first] = map.weights;
  const mean = (t, s) => map.weights.reduce((sum, one) => sum + one[t][s], 0) / map.weights.length;
  return first.map((row, t) => row.map((_, s) => mean(t, s)));
}

/** Return the size of the font of labels along an axis with this distance, and whether they must be turned. */
function labelFont(symbols, distance) {
  const longest = longestLabel(symbols);
  const size = Math.min(15, 0.85 * distance, distance / (LETTER * longest));
  if (longest === 1 || size >= 9) return { size, fit: distance / LETTER, isTurned: false, extent: 18 };
  return { size: 12, fit: Infinity, isTurned: true, extent: Math.max(3, longest) * LETTER * 12 + 6 };
}

/** Return the label of a symbol above or below a column. */
function symbolLabel(symbol, x, y, font, names) {
  const text = shortLabel(symbol);
  return columnLabel(text, x, y, Math.min(font.size, font.fit / text.length), font.isTurned, names);
}

/** Return the largest weights of a row or column as the nodes of a line: "0.93 M, 0.05 a". */
function largestWeights(weights, symbols) {
  const order = weights.map((weight, i) => [weight, i]).filter(([weight]) => weight >= MIN_WEIGHT)
    .sort((a, b) => b[0] - a[0]).slice(0, 5);
  return order.flatMap(([weight, i], k) => [k > 0 ? ", " : "", html("b", { class: "mono" }, visible(symbols[i])),
    ` ${number(weight)}`]);
}

/**
 * Return the figure of lines between two texts, keys above and queries below.
 *
 * Pointing at a symbol, or moving to it with the arrow keys, emphasizes its lines and shows its weights.
 */
function linesFigure(map, weights, { index, title, python, width, selected, cursors, choose }) {
  const texts = [map.keys, map.queries]; // above and below
  const widest = Math.max(30, LETTER * 13 * longestLabel(texts.flat()) + 6);
  const most = Math.max(...texts.map((symbols) => symbols.length));
  const distance = Math.max(9, Math.min(widest, (width - 12) / most));
  const total = Math.max(width, distance * most + 12);
  const fonts = texts.map((symbols) => labelFont(symbols, distance));
  const bars = 16; // the height of the bars of weights between labels and lines
  const x = (t, s) => (total - distance * texts[t].length) / 2 + distance * (s + 0.5);
  const top = 18 + fonts[0].extent + bars;
  const bottom = top + Math.max(110, Math.min(190, 0.34 * total));
  const height = bottom + bars + fonts[1].extent + 18;
  const middle = (top + bottom) / 2;
  const lines = weights.flatMap((row, query) => row.flatMap((weight, s) => {
    if (weight < MIN_WEIGHT) return [];
    const [a, b] = [x(0, s).toFixed(1), x(1, query).toFixed(1)];
    const d = `M${a} ${top}C${a} ${middle} ${b} ${middle} ${b} ${bottom}`;
    const line = svg("path", { class: "line", d, "stroke-opacity": weight.toFixed(2), "stroke-width": 2 });
    return [{ line, ends: [s, query] }];
  }));
  const labelY = [top - bars - 5, bottom + bars + (fonts[1].isTurned ? 4 : 13)];
  const labels = texts.map((symbols, t) => symbols.map((symbol, s) =>
    symbolLabel(symbol, x(t, s), labelY[t], fonts[t], ["above", "below"][t])));
  const weightBars = svg("g");
  const live = liveLine("Point at a symbol, or move with the arrow keys.");
  const axes = AXES[map.side];

  /** Emphasize a symbol; none: the query of the selected step. */
  function emphasize(symbol) {
    const { t: from, s: at } = symbol ?? { t: 1, s: selected };
    for (const { line, ends } of lines) {
      const isIts = ends[from] === at;
      line.setAttribute("class", `line${isIts ? " selected" : ""}${symbol !== null && !isIts ? " faint" : ""}`);
    }
    labels.forEach((elements, t) => elements.forEach((element, s) =>
      element.classList.toggle("emphasis", t === from && s === at)));
    const own = at === null ? [] : from === 1 ? weights[at] : weights.map((row) => row[at]);
    const wide = Math.max(2, Math.min(14, distance - 3));
    clear(weightBars, own.map((weight, s) => {
      const tall = weight * (bars - 3);
      return svg("rect", { class: "weight", width: wide.toFixed(1), height: tall.toFixed(1),
        x: (x(1 - from, s) - wide / 2).toFixed(1), y: (from === 1 ? top - tall : bottom).toFixed(1) });
    }));
    if (symbol === null) return;
    live.show(html("b", { class: "mono" }, visible(texts[from][at])),
      from === 1 ? " attends to " : " is attended to by ", largestWeights(own, texts[1 - from]));
  }

  emphasize(null);
  const drawing = svg("svg", { class: "lines", viewBox: `0 0 ${Math.round(total)} ${Math.round(height)}`,
    "data-key": `lines ${index} ${map.layer}`,
    "aria-label": `Lines of attention, queries (${axes[0]}) below and keys (${axes[1]}) above. `
      + "Arrow keys move between the symbols." },
  svg("text", { class: "axis", x: 2, y: 11 }, `keys: ${axes[1]}`),
  svg("text", { class: "axis", x: 2, y: height - 4 }, `queries: ${axes[0]}`),
  lines.map(({ line }) => line), weightBars, labels);
  moveAmong(drawing, {
    lengths: texts.map((symbols) => symbols.length),
    boxOf: ({ t, s }) => ({ x: x(t, s) - distance / 2, y: [top - bars - fonts[0].extent - 1, bottom + bars][t],
      width: distance, height: fonts[t].extent }),
    at: (left, y) => {
      const t = y < middle ? 0 : 1;
      return y < top || y > bottom ? { t, s: Math.floor((left - x(t, 0)) / distance + 0.5) } : null;
    },
  }, { cursors, first: { t: 1, s: selected ?? 0 }, show: emphasize, choose: ({ t, s }) => t === 1 && choose(s) });
  return liveFigure(live, `Attention lines: ${title}`, drawing, python);
}

/**
 * Return the figure of the map of the weights, queries as rows and keys as columns.
 *
 * Pointing at a cell, or moving to it with the arrow keys, shows its weight; a click or Enter calls `choose`.
 */
function weightsFigure(map, weights, { index, title, python, width, selected, cursors, choose, cells, isDrawing }) {
  const [rows, keys] = [map.queries.length, map.keys.length];
  const longest = Math.max(1, ...map.queries.map((symbol) => shortLabel(symbol).length));
  const left = Math.min(0.3 * width, Math.max(12, longest * LETTER * 13 + 6)) + 10;
  const isLabeled = Math.max(rows, keys) <= MAX_LABELED;
  const size = Math.max(isLabeled ? 9 : 3, Math.min(28, (width - left - 2) / keys));
  const font = labelFont(map.keys, size);
  const top = 16 + (isLabeled ? font.extent : 4);
  const height = top + rows * size + 18;
  const axes = AXES[map.side];
  const isDrawn = (t, s) => cells.some((cell) => cell.query === t && cell.key === s);
  const live = liveLine(isDrawing
    ? "Choose a cell: its row then attends to its column only. Choose it again to erase it."
    : "Point at a cell, or move with the arrow keys.");
  const drawing = heatMap({
    name: `map${isDrawing ? " drawing-mode" : ""}`, key: `map ${index} ${map.layer}`, height,
    width: Math.max(width, left + keys * size + 2), left, top, size,
    values: weights, colors: WEIGHTS, rows: isLabeled ? map.queries.map(shortLabel) : [],
    rowFont: Math.min(15, 0.85 * size, (left - 12) / (LETTER * longest)),
    selected: selected < rows ? selected : null, isMarked: isDrawn, cursors, framesPointed: true,
    label: `Map of attention, queries (${axes[0]}) as rows and keys (${axes[1]}) as columns. `
      + `Arrow keys move between the cells${isDrawing ? ", Enter draws" : ""}.`,
    show: (cell) => {
      if (cell === null) return;
      const { t, s } = cell;
      live.show(html("b", { class: "mono" }, visible(map.queries[t])), " ← ",
        html("b", { class: "mono" }, visible(map.keys[s])), `: ${number(weights[t][s])}`,
        html("span", { class: "muted" }, ` (row ${t + 1}, column ${s + 1}${isDrawn(t, s) ? ", drawn" : ""})`));
    },
    choose: ({ t, s }) => choose(t, s),
  },
  svg("text", { class: "axis", x: left, y: 11 }, `keys: ${axes[1]}`),
  svg("text", { class: "axis", x: left, y: height - 4 }, `queries: ${axes[0]}`),
  isLabeled ? map.keys.map((symbol, s) => symbolLabel(symbol, left + (s + 0.5) * size, top - 5, font)) : null);
  return liveFigure(live, `Attention map: ${title}`, drawing, python);
}

/** Return the panel of attention. */
export function attentionPanel({ backend, state }) {
  const element = html("div", {});
  const cursors = new Map(); // the cells of the keyboard, by map
  let isDrawing = false;
  let shownNow = [];

  /** Return the layer of the state, or the first one that reads the source, or the first. */
  function mapOf(answer) {
    const { layer } = state.get();
    const maps = answer.attention;
    return maps.find((map) => map.layer === layer) ?? maps.find(({ side }) => side === "source") ?? maps[0];
  }

  function headOf(map) {
    const { head } = state.get();
    return head === "mean" || head >= map.weights.length ? "mean" : head;
  }

  /** Return the row of each step; no rows if the steps are not predicted by rows of this map. */
  function rowsOfSteps(map, answer) {
    if (map.first_step === null) return [];
    if (!map.queries.includes(MASKED)) return answer.steps.map((_, t) => map.first_step + t);
    return [...map.queries.keys()].filter((t) => map.queries[t] === MASKED);
  }

  /** Return whether a query may attend to a key: a decoder never attends to later tokens. */
  function canAttend({ side }, { task }, t, s) {
    const isDecoder = ["seq2seq", "language_model"].includes(task);
    return s <= t || !(side === "target" || (side === "sequence" && isDecoder));
  }

  function choose(map, head, model, answer, t, s) {
    if (isDrawing && s !== undefined && model.drawable.includes(map.layer)) {
      if (!canAttend(map, model, t, s)) return;
      const { drawn } = state.get();
      const cell = { layer: map.layer, query: t, key: s, head: head === "mean" ? null : head };
      const isSameRow = (one) => one.layer === cell.layer && one.query === t && one.head === cell.head;
      const others = drawn.filter((one) => !isSameRow(one));
      const isErased = drawn.some((one) => isSameRow(one) && one.key === s);
      state.set({ drawn: isErased ? others : [...others, cell] });
    } else if (rowsOfSteps(map, answer).includes(t)) {
      state.set({ step: rowsOfSteps(map, answer).indexOf(t) });
    }
  }

  function layerField(index, map, answer) {
    const groups = Object.entries(SIDES).map(([side, title]) => {
      const layers = answer.attention.filter((one) => one.side === side).map(({ layer }) => layer);
      return layers.length === 0 ? null : html("optgroup", { label: title }, layers.map((layer) =>
        html("option", { value: layer, selected: layer === map.layer }, layer)));
    });
    return html("label", { class: "field" }, "Layer", html("select", { "data-key": `layer ${index}`,
      onchange: (event) => state.set({ layer: event.target.value }) }, groups));
  }

  function thumbnail(index, model, map, head, chosen) {
    const { off } = changesFor(model, state.get());
    const isOff = off.includes(map.layer) || off.includes(`${map.layer}.${head}`);
    const weights = weightsOf(map, head);
    return html("button", { type: "button", "aria-pressed": head === chosen, "data-key": `head ${index} ${head}`,
      "aria-label": `${head === "mean" ? "Mean of the heads" : `Head ${head}`}${isOff ? ", off" : ""}`,
      onclick: () => state.set({ layer: map.layer, head }) },
    svg("svg", { viewBox: `0 0 ${map.keys.length} ${map.queries.length}`, preserveAspectRatio: "none",
      "aria-hidden": true }, cellPaths(weights, {}, SMALL_WEIGHTS)),
    html("span", { class: isOff ? "is-off" : "" }, head));
  }

  /** Return the role, the scores and the effects of the ablation of a head, or those of all heads of the layer. */
  function facts(model, map, head) {
    const record = (one) => model.heads.find(({ name }) => name === `${map.layer}.${one}`);
    if (model.heads.length === 0) {
      if (backend.kind === "file") return null;
      return html("p", { class: "note" }, html("code", {}, "lightning-tfm inspect RUN"),
        " computes the scores of the heads, and the effects of their ablation.");
    }
    if (head !== "mean") {
      const one = record(head);
      if (!one) return null;
      const effect = effects(one);
      return [
        html("h4", {}, `Head ${head}${one.role ? `: ${one.role}` : ""}`),
        effect === null ? null : html("p", {}, `Without this head, ${effect}.`),
        html("dl", { class: "scores" }, Object.entries(one.scores).map(([name, score]) =>
          [html("dt", {}, name.replaceAll("_", " ")), html("dd", {}, number(score))])),
      ];
    }
    const rows = map.weights.map((_, i) => [i, record(i)]).filter(([, one]) => one);
    return html("div", { class: "table" }, html("table", {},
      html("thead", {}, html("tr", {}, html("th", { scope: "col" }, "Head"), html("th", { scope: "col" }, "Role"),
        html("th", { scope: "col", class: "number" }, "Loss without it"))),
      html("tbody", {}, rows.map(([i, one]) => html("tr", {}, html("th", { scope: "row" }, i),
        html("td", {}, one.role || "–"), html("td", { class: "number" }, increaseText(one.loss_increase)))))));
  }

  function switches(index, model, map, head) {
    const part = `${map.layer}.${head}`;
    const { off } = state.get();
    const isOff = off.includes(part);
    const canDraw = model.changes.includes("drawn") && model.drawable.includes(map.layer);
    return html("div", { class: "row" },
      canDraw ? html("label", { class: "check" }, html("input", { type: "checkbox", checked: isDrawing,
        "data-key": `draw ${index}`, onchange: (event) => {
          isDrawing = event.target.checked;
          panel.update(shownNow);
        } }), "Draw weights") : html("span", { class: "muted" }, "The weights of this layer cannot be drawn here."),
      head !== "mean" && model.changes.includes("off_heads") ? html("button", { type: "button",
        "data-key": `switch ${index}`, onclick: () =>
          state.set({ off: isOff ? off.filter((one) => one !== part) : [...off, part] }) },
      isOff ? "Switch this head on" : "Switch this head off") : null);
  }

  /** Return the column of a model, and the function that fills in the drawings once it has a width. */
  function column(index, model, answer) {
    const map = mapOf(answer);
    const head = headOf(map);
    const weights = weightsOf(map, head);
    const values = state.get();
    const item = `["attention"][${answer.attention.indexOf(map)}]["weights"]${head === "mean" ? "" : `[${head}]`}`;
    const python = pythonLines(model, "answer", textArguments(model, values), item);
    const title = `${map.layer}, ${head === "mean" ? "mean of the heads" : `head ${head}`}`;
    const selected = rowsOfSteps(map, answer)[Math.min(values.step, answer.steps.length - 1)] ?? null;
    const cells = changesFor(model, values).drawn.filter((one) => one.layer === map.layer
      && (head === "mean" || one.head === null || one.head === head));
    const slots = [html("div", {}), html("div", {})];
    const isLong = Math.max(map.queries.length, map.keys.length) > LONG_TEXT;

    function fill() {
      const width = Math.max(drawingWidth(slots[0]), isLong ? Math.min(MAX_WIDTH, slots[0].clientWidth) : 0);
      const options = { index, title, python, width, selected, cursors, cells,
        isDrawing: isDrawing && model.drawable.includes(map.layer),
        choose: (t, s) => choose(map, head, model, answer, t, s) };
      clear(slots[0], linesFigure(map, weights, options));
      clear(slots[1], weightsFigure(map, weights, options));
    }

    const content = html("div", { class: "attention" },
      html("div", { class: "choice-of-head" },
        layerField(index, map, answer),
        html("div", { class: "thumbnails", role: "group", "aria-label": "Head" },
          ["mean", ...map.weights.keys()].map((one) => thumbnail(index, model, map, one, head))),
        switches(index, model, map, head)),
      html("div", { class: isLong ? "drawings long" : "drawings" }, slots),
      html("div", { class: "facts-of-head" }, facts(model, map, head)));
    return { content, fill };
  }

  const panel = {
    id: "attention", title: "Attention", element,
    update(shown) {
      shownNow = shown;
      const fills = [];
      redraw(element, () => {
        element.replaceChildren(columns(shown, ({ index, model, answer }) => {
          if (model.attention.length === 0) return html("p", { class: "note" }, "This network has no attention.");
          if (!answer) return html("p", { class: "muted" }, "Enter a text to see its attention.");
          const { content, fill } = column(index, model, answer);
          fills.push(fill);
          return content;
        }));
        fills.forEach((fill) => fill());
      });
    },
  };
  return panel;
}
