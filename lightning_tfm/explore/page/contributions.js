// Contributions of the input symbols to the output, and drawings of signed values.

import { asking, clipped, drawColumns, liveFigure, liveLine, moveAmong, replyOf, symbolWidth } from "./questions.js";
import { clear, html, number, percent, svg, visible } from "./dom.js";
import { pythonLines } from "./pictures.js";
import { textArguments } from "./state.js";

/** Names of the methods. */
const METHODS = { occlusion: "Occlusion", integrated_gradients: "Integrated gradients" };

/** Descriptions of the methods. */
const EXPLANATIONS = {
  occlusion: "The decrease of the log probability of an output symbol without an input symbol.",
  integrated_gradients: "The share of an input symbol in the log probability of an output symbol, compared with an "
    + "empty input (Sundararajan et al. 2017).",
};

/** Number of shades of either sign. */
const TONES = 20;

/** Opacity of the color of the largest value; signs and symbols on it stay readable. */
const MAX_OPACITY = 0.65;

/** Share of the largest value from which the sign is written into a cell. */
const MIN_SIGN = 0.2;

/** Maximum number of characters of the label of a row or column. */
const MAX_AXIS_LABEL = 18;

/** Sizes of the fonts of labels and of texts, in units of the drawing. */
const FONT = { label: 12, text: 15, note: 10 };

/** Size of the smallest font of labels that are not turned. */
const MIN_FONT = 9;

/** Return the opacity and the class of the color of a value from -1 to 1. */
function tone(value) {
  const shade = Math.round(TONES * Math.max(-1, Math.min(1, value)));
  return { opacity: (MAX_OPACITY * Math.abs(shade) / TONES).toFixed(3), sign: shade < 0 ? "negative" : "positive" };
}

/** Return whether symbols are characters, except EOS. */
export function isCharacters(symbols) {
  return symbols.every((symbol) => [...symbol].length === 1 || symbol === "EOS");
}

/** Return a number with its sign, "+0.12" or "−0.12". */
export function signed(value, digits = 2) {
  const text = number(value, digits);
  return value > 0 && Number(value.toFixed(digits)) > 0 ? `+${text}` : text;
}

/**
 * Return a scale of colors.
 * @param {Array<string>} labels those of its ends and, in between, of 0 if it has two signs.
 */
function colorScale(labels, x, y) {
  const from = labels.length > 2 ? -1 : 0;
  const swatches = Array.from({ length: 11 }, (_, i) => from + (1 - from) * i / 10);
  const left = x + 7.2 * labels[0].length + 6;
  const text = (label, place) => svg("text", { class: "axis", x: place, y, "dominant-baseline": "central" }, label);
  return [
    text(labels[0], x),
    swatches.map((value, i) => {
      const { opacity, sign } = tone(value);
      return svg("rect", { class: sign, x: left + 11 * i, y: y - 5, width: 11, height: 10, "fill-opacity": opacity });
    }),
    text(labels.at(-1), left + 127),
  ];
}

/** Return the cells of one tone as paths. */
function tonePaths(values, limit, { left, top, size }) {
  const paths = new Map();
  values.forEach((row, t) => row.forEach((value, s) => {
    const { opacity, sign } = tone(value / limit);
    if (Number(opacity) === 0) return;
    const key = `${sign} ${opacity}`;
    const cell = `M${(left + s * size).toFixed(1)} ${(top + t * size).toFixed(1)}h${size - 1}v${size - 1}h${1 - size}z`;
    paths.set(key, (paths.get(key) ?? "") + cell);
  }));
  return [...paths].map(([key, d]) => {
    const [sign, opacity] = key.split(" ");
    return svg("path", { class: sign, d, "fill-opacity": opacity });
  });
}

/**
 * Return the map of signed values, with a scale, and the boxes of its cells.
 * @param {object} options `rows`, labels; `tops`, labels of the columns, each a list of one or two lines; `values`
 *   (rows, columns); `limit`, the value of the strongest color; `scale`, the labels of the scale; `title`, the name of
 *   the columns; `width`; `selected`, the index of a row, or null; `isMarked(row, column)`; `minSize` of the cells;
 *   `key` and `label` of the drawing.
 */
export function heatMap(options) {
  const { rows, tops, values, limit, scale, title, width, key, label } = options;
  const { selected = null, isMarked = () => false, minSize = 12 } = options;
  const wide = (symbols) => Math.max(1, ...symbols.map((symbol) => symbolWidth(symbol, FONT.label)));
  const names = rows.map((row) => clipped(row, MAX_AXIS_LABEL));
  const lines = tops.map((top) => top.map((symbol) => clipped(symbol, MAX_AXIS_LABEL)));
  const left = wide(names) + 16;
  const size = Math.floor(Math.max(minSize, Math.min(28, (width - left - 4) / tops.length)));
  const fontOf = (text) => Math.min(FONT.label, (size - 1) / symbolWidth(text, 1)); // so that EOS fits
  const isTurned = (s) => Math.min(...lines[s].map(fontOf)) < MIN_FONT;
  const turned = lines.map((line) => line.join(" → "));
  const depth = Math.max(...lines.map((line, s) => (isTurned(s) ? 1 : line.length)));
  const top = 18 + Math.max(15 * depth, wide(turned.filter((_, s) => isTurned(s))) + 6);
  const bottom = top + rows.length * size;
  const total = Math.ceil(Math.max(left + tops.length * size + 4, 300));
  const place = { left, top, size };
  const middle = (index, start) => start + (index + 0.5) * size - 0.5;

  const columnLabels = (s) => {
    const other = lines[s].length > 1 ? " other" : "";
    if (!isTurned(s)) {
      return lines[s].map((line, i) => svg("text", { class: `symbol top${i > 0 ? other : ""}`, x: middle(s, left),
        y: top - 5 - 15 * (depth - 1 - i), style: `font-size: ${fontOf(line).toFixed(1)}px` }, line));
    }
    const [x, y] = [middle(s, left) + 4, top - 5];
    return svg("text", { class: `symbol turned${other}`, x, y, transform: `rotate(-90 ${x} ${y})` }, turned[s]);
  };
  const sign = (value, t, s) => (Math.abs(value) < MIN_SIGN * limit ? null : svg("text", { class: "sign",
    x: middle(s, left), y: middle(t, top), "dominant-baseline": "central" }, value < 0 ? "−" : "+"));
  const drawing = svg("svg", { class: "chart heat", viewBox: `0 0 ${total} ${Math.ceil(bottom + 32)}`, "data-key": key,
    "aria-label": label },
  svg("text", { class: "axis", x: left, y: 11 }, title),
  tops.map((_, s) => columnLabels(s)),
  names.map((name, t) => svg("text", { class: `symbol row-label${t === selected ? " selected" : ""}`, x: left - 10,
    y: middle(t, top), "dominant-baseline": "central" }, name)),
  svg("rect", { class: "frame", x: left - 0.5, y: top - 0.5, width: tops.length * size, height: rows.length * size }),
  tonePaths(values, limit, place),
  values.map((row, t) => row.map((value, s) => sign(value, t, s))),
  values.map((row, t) => row.map((_, s) => (isMarked(t, s) ? svg("rect", { class: "mark", x: left + s * size + 1,
    y: top + t * size + 1, width: size - 3, height: size - 3 }) : null))),
  selected === null ? null
    : svg("path", { class: "selected", d: `M${left - 7} ${middle(selected, top) - 4}l6 4l-6 4z` }),
  colorScale(scale, left, bottom + 18));
  const items = values.flatMap((row, t) => row.map((_, s) => ({ x: left + s * size, y: top + t * size, width: size - 1,
    height: size - 1, t, s })));
  return { drawing, items };
}

/** Return the moves by arrow keys among the cells of a map, in rows of `length` cells. */
export function gridMoves(length, count) {
  return (i) => ({
    ArrowLeft: i % length > 0 ? i - 1 : i, ArrowRight: i % length < length - 1 ? i + 1 : i,
    ArrowUp: i >= length ? i - length : i, ArrowDown: i + length < count ? i + length : i,
    Home: i - i % length, End: i - i % length + length - 1,
  });
}

/** Return the lines of a text: lists of indices of symbols, whose widths are given, with words that stay together. */
function textLines(symbols, widths, width) {
  const words = [[]];
  symbols.forEach((symbol, i) => {
    words.at(-1).push(i);
    if (/\s$/.test(symbol)) words.push([]);
  });
  const lines = [[]];
  let used = 0;
  for (const word of words) {
    const length = word.reduce((sum, i) => sum + widths[i], 0);
    if (used > 0 && used + length > width && length <= width) {
      lines.push([]);
      used = 0;
    }
    for (const i of word) {
      if (used + widths[i] > width && used > 0) {
        lines.push([]);
        used = 0;
      }
      lines.at(-1).push(i);
      used += widths[i];
      if (symbols[i] === "\n") {
        lines.push([]);
        used = 0;
      }
    }
  }
  return lines.filter((line) => line.length > 0);
}

/**
 * Return the drawing of a text whose symbols have backgrounds, with a scale, and the boxes of its symbols.
 * @param {object} options `symbols`; `values` from -1 to 1; `notes`, small texts below the symbols, or null; `scale`,
 *   the labels of the scale; `underlined(i)`; `legend`, the meaning of the line; `width`; `key` and `label` of the
 *   drawing.
 */
export function textDrawing(options) {
  const { symbols, values, notes = null, scale, underlined = () => false, legend = "", width, key, label } = options;
  const isWord = (symbol) => [...symbol].length > 1;
  const isText = isCharacters(symbols);
  const shownAs = symbols.map((symbol) => (isText && symbol === " " ? " " : clipped(symbol, 2 * MAX_AXIS_LABEL)));
  const widths = shownAs.map((symbol, i) => Math.max(
    symbolWidth(symbol, FONT.text) + (isText && !isWord(symbols[i]) ? 0 : 6),
    notes?.[i] ? symbolWidth(notes[i], FONT.note) + 4 : 0));
  const lines = textLines(symbols, widths, width - 4);
  const distance = notes === null ? 26 : 40;
  const items = [];
  lines.forEach((line, row) => {
    let x = 2;
    for (const i of line) {
      items[i] = { x, y: 4 + row * distance, width: widths[i], height: 22, row };
      x += widths[i];
    }
  });
  const bottom = lines.length * distance + 8;
  const gap = isText ? 0 : 1;
  const parts = symbols.map((symbol, i) => {
    const { x, y, width: wide, height } = items[i];
    const { opacity, sign } = tone(values[i]);
    const middle = x + wide / 2;
    return [
      Number(opacity) > 0 ? svg("rect", { class: sign, x: x + gap, y, width: wide - 2 * gap, height,
        "fill-opacity": opacity }) : null,
      svg("text", { class: `symbol letter${symbol === "\n" ? " blank" : ""}`, x: middle, y: y + height / 2,
        "dominant-baseline": "central" }, shownAs[i]),
      underlined(i) ? svg("path", { class: "underline", d: `M${x} ${y + height + 1}h${wide}` }) : null,
      notes?.[i] ? svg("text", { class: "symbol remark", x: middle, y: y + height + 11 }, notes[i]) : null,
    ];
  });
  const legendX = 7.2 * scale.join("").length + 160;
  const drawing = svg("svg", { class: "chart", viewBox: `0 0 ${Math.max(width, 260)} ${bottom + 26}`, "data-key": key,
    "aria-label": label },
  parts, colorScale(scale, 2, bottom + 12),
  legend === "" ? null : [svg("path", { class: "underline", d: `M${legendX} ${bottom + 16}h18` }),
    svg("text", { class: "axis", x: legendX + 24, y: bottom + 12, "dominant-baseline": "central" }, legend)]);
  return { drawing, items };
}

/** Return the moves by arrow keys among the symbols of a text. */
export function textMoves(items) {
  const nearest = (i, offset) => {
    const row = items[i].row + offset;
    const distance = ({ x }) => Math.abs(x - items[i].x);
    const others = items.filter((item) => item.row === row);
    return others.length === 0 ? i : items.indexOf(others.reduce((a, b) => (distance(b) < distance(a) ? b : a)));
  };
  return (i) => ({ ArrowLeft: i - 1, ArrowRight: i + 1, ArrowUp: nearest(i, -1), ArrowDown: nearest(i, 1) });
}

/** Return the largest absolute value. */
function largest(values) {
  return values.flat().reduce((most, value) => Math.max(most, Math.abs(value)), 0) || 1;
}

/** Return the panel of contributions. */
export function contributionsPanel({ backend, state }) {
  const select = html("select", { "data-key": "method", onchange: () => state.set({ method: select.value }) },
    Object.entries(METHODS).map(([method, name]) => html("option", { value: method }, name)));
  const explanation = html("p", { class: "note" });
  const controls = html("div", {},
    html("div", { class: "controls" }, html("label", { class: "field" }, "Method", select)), explanation);
  const body = html("div", {});
  const element = html("div", {}, controls, body, html("div", { class: "progress" }));
  const cursors = new Map();

  /** Return the figure of the contributions to one output, drawn as the text of the input. */
  function textFigure({ index, answer }, { inputs, targets, values: [row] }, python, width, step = 0) {
    const limit = largest(row);
    const note = (value) => (isCharacters(inputs) ? signed(value)[0] : signed(value, 1));
    const notes = row.map((value) => (Math.abs(value) < MIN_SIGN / 2 * limit ? "" : note(value)));
    const place = answer.steps.length > 1 ? `step ${step + 1}, ` : "";
    const title = `Contributions to ${place}${visible(targets[0])}`;
    const { drawing, items } = textDrawing({ symbols: inputs, values: row.map((value) => value / limit), notes, width,
      scale: [signed(-limit, 1), "0", signed(limit, 1)], key: `contributions ${index}`,
      label: `${title}, as backgrounds of the text. Arrow keys move between the symbols.` });
    const live = liveLine("Point at a symbol, or move with the arrow keys.");
    moveAmong(drawing, items, { cursors, moves: textMoves(items), show: (i) => live.show(...(i === null ? [] : [
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
    const { drawing, items } = heatMap({
      rows: targets, tops: inputs.map((symbol) => [symbol]), values, limit, width, selected,
      scale: [signed(-limit, 1), "0", signed(limit, 1)], title: "input", key: `contributions ${index}`,
      label: `Map of contributions, ${targets.length} output symbols as rows and ${inputs.length} input symbols as `
        + "columns. Arrow keys move between the cells; Enter selects a step.",
    });
    const live = liveLine("Point at a row, or move with the arrow keys; the numbers are those of its output symbol.");
    const heading = html("h4", {});
    const numbers = html("div", { class: "values" });
    function show(i) {
      const { t, s } = i === null ? { t: selected, s: -1 } : items[i];
      clear(heading, "Contributions to step ", t + 1, ", ", html("b", { class: "mono" }, visible(targets[t])));
      clear(numbers, numbersOf(inputs, values[t], limit, s));
      live.show(...(i === null ? [] : [html("b", { class: "mono" }, visible(targets[t])), " ← ",
        html("b", { class: "mono" }, visible(inputs[s])), ` ${signed(values[t][s])} nats`]));
    }
    moveAmong(drawing, items, { cursors, moves: gridMoves(inputs.length, items.length), show,
      first: selected * inputs.length, choose: (i) => state.set({ step: items[i].t }) });
    show(null);
    return html("div", { class: "beside" },
      liveFigure(live, "Contributions", drawing, python, "Output symbols over input symbols, in nats."),
      html("div", {}, heading, numbers));
  }

  function column(one, width) {
    return replyOf(one, "attributions", (result, values) => {
      const python = pythonLines(one.model, "attributions", values);
      return (result.targets.length === 1 ? textFigure : mapFigure)(one, result, python, width, values.step);
    });
  }

  const ask = asking(backend, element, ({ model, answer }) => {
    if (!answer) return {};
    const { method, step } = state.get();
    const values = { ...textArguments(model, state.get()), method };
    // Integrated gradients of all steps take seconds.
    if (method === "integrated_gradients") values.step = Math.max(0, Math.min(step, answer.steps.length - 1));
    return { attributions: ["attributions", values] };
  }, (shown) => {
    controls.hidden = !shown.some(({ model }) => model.questions.includes("attributions"));
    drawColumns(body, shown, column);
  });

  return {
    id: "contributions", title: "Contributions", element,
    update(shown) {
      const { method } = state.get();
      select.value = method;
      explanation.textContent = EXPLANATIONS[method];
      return ask(shown);
    },
  };
}
