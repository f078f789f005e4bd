// The report: attention of all heads, errors, and examples on which two systems disagree.

import { clear, heatColor, html, number, percent, rove, svg, visible } from "./dom.js";
import { LETTER, clipped, liveLine } from "./drawings.js";
import { columnLabel, heatMap } from "./map.js";
import { downloadFile } from "./pictures.js";

/** Colors of the weights of a head, see `cellPaths`. */
const HEAD_WEIGHTS = { shades: 32, strongest: 1 };

/** Smallest, preferred and largest distance of the cells of a map, and its largest height, unless that is too small. */
const [MIN_SIZE, GOOD_SIZE, MAX_SIZE, MAX_HEIGHT] = [4, 8, 24, 600];

/** Distance of cells from which rows and columns have labels, and size of the smallest font that is not turned. */
const [LABELED_SIZE, MIN_LABEL] = [7.5, 6.5];

/** Gap between maps, and between two layers side by side, from a width on. */
const [GAP, LAYER_GAP, WIDE] = [28, 56, 1400];

/** Maximum number of maps that are beside those during training. */
const FEW_MAPS = 2;

/** Number of rows of a table that are shown at first, and number of characters of a text that is never wrapped. */
const [FIRST_ROWS, SHORT_TEXT] = [12, 40];

/** Probability above which the end of a text is not shown. */
const SURE = 0.9;

const content = JSON.parse(document.getElementById("data").textContent);
const element = (id) => document.getElementById(id);

/** Return a field with a menu of names; null if there is only one. */
function menu(label, id, names, value, onchange) {
  if (names.length < 2) return null;
  return html("label", { class: "field" }, label, html("select", { id, "data-key": id,
    onchange: (event) => onchange(Number(event.target.value)) },
  names.map((name, place) => html("option", { value: place, selected: place === value }, name))));
}

/** Return the nodes of the alternatives of a step: "62%; instead: 3 30%, 8 5%". */
function stepText([symbol, probability, alternatives]) {
  return [html("b", { class: "mono" }, visible(symbol)), ` ${percent(probability)}`,
    alternatives.length > 0 ? "; alternatives: " : "",
    alternatives.flatMap(([other, value], k) => [k > 0 ? ", " : "", html("b", { class: "mono" }, visible(other)),
      ` ${percent(value)}`])];
}

/* Attention */

/** Return the weights (H, T, S) of a layer at a validation. */
function weightsAt(layer, validation) {
  layer.decoded ??= [];
  layer.decoded[validation] ??= (() => {
    const bytes = Uint8Array.from(atob(layer.weights[validation]), (letter) => letter.charCodeAt(0));
    const [rows, keys] = [layer.queries.length, layer.keys.length];
    const row = (start) => Array.from(bytes.subarray(start, start + keys), (value) => value / 255);
    return Array.from({ length: layer.heads }, (_, head) =>
      Array.from({ length: rows }, (__, t) => row((head * rows + t) * keys)));
  })();
  return layer.decoded[validation];
}

/** Return the distance of the cells of the maps of a layer, and the width of the labels of their rows. */
function mapSize({ heads, queries, keys }, width) {
  const longest = Math.max(1, ...queries.map((symbol) => clipped(symbol, 8).length));
  const left = LETTER * 12 * longest + 16;
  const fitting = Math.max(1, Math.floor((width + GAP) / (left + GOOD_SIZE * keys.length + GAP)));
  const columns = Math.ceil(heads / Math.ceil(heads / fitting));
  const room = (width - GAP * (columns - 1)) / columns - left - 3;
  const size = Math.min(room / keys.length, MAX_SIZE, Math.max(GOOD_SIZE, MAX_HEIGHT / queries.length));
  return { left, size: Math.max(MIN_SIZE, size) };
}

/** Return the example to begin with: an input of the user, a wrong prediction, or that of the lowest loss. */
function firstExample(examples) {
  const place = examples.findIndex(({ correct }) => !correct);
  return place < 0 ? examples.length - 1 : place;
}

/** Return the map of the weights (T, S) of a head; `show` is called with a cell {t, s}. */
function headMap(layer, weights, { key, label, limit, cursors, show, left, size }) {
  const [rows, keys] = [layer.queries, layer.keys].map((symbols) => symbols.map((symbol) => clipped(symbol, 8)));
  const isLabeled = size >= LABELED_SIZE;
  const turnedFont = Math.min(12, size + 2);
  const fontOf = (text) => Math.min(12, size / (LETTER * text.length)); // so that EOS fits
  const isTurned = (text) => fontOf(text) < MIN_LABEL;
  const longest = Math.max(0, ...keys.filter(isTurned).map((text) => text.length));
  const top = isLabeled ? Math.max(18, LETTER * turnedFont * longest + 8) : 4;
  const gold = new Set(layer.gold.map(String));
  const columnLabels = keys.map((text, s) => columnLabel(text, left + (s + 0.5) * size, top - 5,
    isTurned(text) ? turnedFont : fontOf(text), isTurned(text)));
  const drawing = heatMap({ name: "map", key, label, cursors, show, framesPointed: true, left, top, size,
    width: left + keys.length * size + 2, height: top + rows.length * size + 2, values: weights, colors: HEAD_WEIGHTS,
    limit, rows: isLabeled ? rows : [], rowFont: turnedFont, isMarked: (t, s) => gold.has(`${s},${t}`) },
  isLabeled ? columnLabels : null);
  const { width, height } = drawing.viewBox.baseVal;
  drawing.setAttribute("width", width);
  drawing.setAttribute("height", height);
  const frame = svg("rect", { class: "row", visibility: "hidden", x: left - 1, width: keys.length * size + 1,
    height: size + 1 });
  drawing.append(frame);

  /** Outline a row; none: no row. */
  function outline(row) {
    frame.setAttribute("visibility", row === null ? "hidden" : "visible");
    if (row !== null) frame.setAttribute("y", top + row * size - 1);
  }
  return { drawing, outline };
}

/**
 * Fill an element with the attention of all heads for one example of one run.
 * @param {Element} root
 * @param {Array<object>} runs those with examples.
 * @param {string} name the name of the examples of a run: "attention", or "history" for those during the training.
 */
function attentionView(root, runs, name) {
  const state = { run: 0, example: firstExample(runs[0][name]), rows: "output", validation: Infinity, layer: null };
  const cursors = new Map();
  const controls = html("div", { class: "controls" });
  const texts = html("dl", { class: "example" });
  const caption = html("p", { class: "note" });
  const live = liveLine("Point at a cell or a symbol, or use Tab and the arrow keys.");
  const layers = html("div", { class: "layers" });
  root.append(controls, texts, caption, live.element, layers);
  let maps = [];

  const example = () => runs[state.run][name][state.example];
  const rowsOf = () => (example().layers[state.rows] ? state.rows : Object.keys(example().layers)[0]);

  /** Return the layers that are shown: all or, during training, one, at first the last with a gold alignment. */
  function shownLayers() {
    const every = example().layers[rowsOf()];
    if (!example().validations) return every;
    const first = Math.max(0, every.findLastIndex((layer) => layer.gold.length > 0));
    return [every[state.layer ?? first] ?? every[first]];
  }

  /** Outline the row that predicts a symbol of the output in all maps with such rows. */
  function outline(step) {
    for (const { layer, outline: outlineRow } of maps) {
      const row = step + layer.first;
      outlineRow(layer.predicts === "output" && row < layer.queries.length ? row : null);
    }
  }

  function drawTexts() {
    const { source, target, prediction, correct, marks, steps } = example();
    const entry = (title, text) => [html("dt", {}, title), html("dd", { class: "mono" }, text)];
    clear(texts, source === undefined ? null : [
      entry("source", source),
      correct === false ? entry("target", marked(target, marks[0])) : null,
      entry("output", steps ? symbols(example(), outline) : prediction),
    ]);
  }

  function drawHead(layer, head, weights, limit, size) {
    const show = (cell) => cell && live.show(html("b", {}, `${layer.layer}, head ${head}: `),
      html("b", { class: "mono" }, visible(layer.queries[cell.t])), " attends to ",
      html("b", { class: "mono" }, visible(layer.keys[cell.s])), ` ${number(weights[cell.t][cell.s])}`,
      html("span", { class: "muted" }, ` (row ${cell.t + 1}, column ${cell.s + 1})`));
    const map = headMap(layer, weights, { ...size, key: `${name} ${layer.layer} ${head}`, limit, cursors, show,
      label: `Attention of head ${head} of ${layer.layer}, ${layer.queries.length} rows and ${layer.keys.length} `
        + "columns. Arrow keys move between the cells." });
    maps.push({ layer, ...map });
    return html("figure", {}, html("figcaption", { class: "muted" }, `head ${head}`),
      html("div", { class: "drawing" }, map.drawing));
  }

  function drawMaps() {
    const shown = shownLayers();
    const isPaired = shown.length > 1 && layers.clientWidth >= WIDE;
    const width = isPaired ? (layers.clientWidth - LAYER_GAP) / 2 : layers.clientWidth;
    maps = [];
    clear(layers, shown.map((layer) => {
      const every = layer.weights.map((_, place) => weightsAt(layer, place));
      const limit = every.flat(3).reduce((most, weight) => Math.max(most, weight), 0.01);
      const size = mapSize(layer, width);
      const heads = every[Math.min(state.validation, every.length - 1)];
      return html("div", { class: "block", style: `width: ${width}px` },
        html("h3", { class: "layer" }, layer.layer,
          html("span", { class: "muted" }, ` colors from 0 to ${number(limit)}`)),
        html("div", { class: "heads" }, heads.map((weights, head) => drawHead(layer, head, weights, limit, size))));
    }));
  }

  /** Return the slider of the validations of a training, or the step of the only one. */
  function slider(steps) {
    const last = steps.length - 1;
    const text = () => `step ${steps[Math.min(state.validation, last)].toLocaleString("en")}`;
    const at = html("span", { id: `${name}-at` }, `Validation at ${text()}`);
    if (last === 0) return at;
    const input = html("input", { type: "range", id: `${name}-validation`, "data-key": `${name}-validation`, min: 0,
      max: last, value: Math.min(state.validation, last), "aria-valuetext": text(), oninput: () => {
        state.validation = Number(input.value);
        at.textContent = `Validation at ${text()}`;
        input.setAttribute("aria-valuetext", text());
        drawMaps();
      } });
    return html("label", { class: "field" }, at, input);
  }

  function rowsField(rows) {
    const radio = (value, text) => html("label", { class: "check" }, html("input", { type: "radio", value,
      name: `${name}-rows`, "data-key": `${name}-${value}`, checked: value === rows,
      onchange: () => change({ rows: value }) }), text);
    return html("fieldset", {}, html("legend", {}, "Rows"), radio("output", "model's output"),
      radio("target", "target"));
  }

  function change(values) {
    Object.assign(state, values);
    draw();
  }

  function draw() {
    const { layers: sides, validations } = example();
    const rows = rowsOf();
    const shown = shownLayers();
    clear(controls,
      menu("Run", `${name}-run`, runs.map((run) => run.name), state.run,
        (run) => change({ run, example: firstExample(runs[run][name]), layer: null })),
      menu("Example", `${name}-example`, runs[state.run][name].map(({ title }) => title), state.example,
        (place) => change({ example: place })),
      Object.keys(sides).length > 1 ? rowsField(rows) : null,
      validations ? [menu("Layer", `${name}-layer`, sides[rows].map(({ layer }) => layer),
        sides[rows].indexOf(shown[0]), (layer) => change({ layer })), slider(validations)] : null);
    const predicts = shown.some((layer) => layer.predicts);
    const hasGold = shown.some((layer) => layer.gold.length > 0);
    caption.textContent = [predicts ? `Rows are ${rows === "output" ? "the model's own output" : "the target"}.` : "",
      hasGold ? "The gold alignment is outlined." : ""].filter(Boolean).join(" ");
    drawTexts();
    live.show();
    drawMaps();
  }

  let width = 0;
  new ResizeObserver(() => {
    if (layers.clientWidth === width) return;
    width = layers.clientWidth;
    draw();
  }).observe(layers);
}

/* Errors */

const tip = html("div", { class: "tip", role: "tooltip", id: "tip", hidden: true });
document.body.append(tip);

function showTip(button, step) {
  clear(tip, stepText(step));
  tip.hidden = false;
  const box = button.getBoundingClientRect();
  const most = document.documentElement.clientWidth - tip.offsetWidth - 8;
  tip.style.left = `${Math.max(8, Math.min(box.left, most)) + window.scrollX}px`;
  tip.style.top = `${box.bottom + 6 + window.scrollY}px`;
}

function hideTip() {
  tip.hidden = true;
}

document.addEventListener("keydown", (event) => event.key === "Escape" && hideTip());

/** Return the parts of a text, of which those that differ are marked. */
function marked(text, ranges = [], offset = 0) {
  const isMarked = (place) => ranges.some(([start, end]) => place >= start && place < end);
  const within = ranges.flat().map((place) => place - offset).filter((place) => place > 0 && place < text.length);
  const bounds = [0, ...within, text.length];
  return bounds.slice(1).map((end, k) => {
    const part = text.slice(bounds[k], end);
    return isMarked(bounds[k] + offset) ? html("span", { class: "differs" }, part) : part;
  });
}

/**
 * Return a prediction whose symbols show their probabilities and alternatives under the pointer or with the focus.
 * @param {object} line the prediction.
 * @param {function(number)} onshow is called with the index of the symbol.
 */
function symbols({ prediction, steps, marks }, onshow = () => {}) {
  const [parts, buttons] = [[], []];
  let end = 0;
  for (const [place, step] of steps.entries()) {
    const start = step[0] === "EOS" ? prediction.length : prediction.indexOf(step[0], end);
    if (start < 0 || step[0] === "" || (step[0] === "EOS" && step[1] > SURE)) continue;
    parts.push(marked(prediction.slice(end, start), marks?.[1], end));
    end = step[0] === "EOS" ? start : start + step[0].length;
    const show = () => {
      showTip(button, step);
      onshow(place);
    };
    const button = html("button", { type: "button", class: step[0] === "EOS" ? "given end" : "given",
      tabindex: buttons.length > 0 ? -1 : 0, "aria-describedby": "tip", onmouseenter: show,
      style: `background: ${heatColor(1 - step[1], "--warm")}`, onfocus: show, onmouseleave: hideTip, onblur: hideTip },
    step[0] === "EOS" ? "EOS" : marked(prediction.slice(start, end), marks?.[1], start));
    parts.push(button);
    buttons.push(button);
  }
  const group = html("span", { role: "group", "aria-label": `Symbols of ${prediction}` }, parts, prediction.slice(end));
  rove(group);
  return group;
}

function textCell(text, ...children) {
  return html("td", { class: text.length > SHORT_TEXT ? "words long" : "words" }, children);
}

function predictionCell(line) {
  const mark = html("span", { class: "muted" }, line.correct ? "✓ " : "✗ ");
  return textCell(line.prediction, mark, line.steps ? symbols(line) : marked(line.prediction, line.marks?.[1]));
}

/** Return a table of texts; a button shows the rows after the first ones. */
function textTable(label, titles, rows, makeRow) {
  const body = html("tbody", {}, rows.slice(0, FIRST_ROWS).map(makeRow));
  const more = rows.length <= FIRST_ROWS ? null : html("button", { type: "button", onclick: () => {
    body.append(...rows.slice(FIRST_ROWS).map(makeRow));
    more.remove();
  } }, `Show all ${rows.length.toLocaleString("en")}`);
  return [html("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label }, html("table", {},
    html("thead", {}, html("tr", {}, titles.map((title) => html("th", { scope: "col" }, title)))), body)), more];
}

/** Return rows as a CSV file. */
function csvOf(columns, rows) {
  const cell = (value) => `"${String(value ?? "").replaceAll('"', '""')}"`;
  const lines = [columns, ...rows.map((row) => columns.map((column) => row[column]))];
  return lines.map((line) => `${line.map(cell).join(",")}\r\n`).join("");
}

function errorsView(root, runs) {
  const state = { run: 0, category: 0, search: "", which: runs.some((run) => run.wrong) ? 0 : 2 };
  const controls = html("div", { class: "controls" });
  const count = html("p", { class: "note", id: "p-count", role: "status" });
  const body = html("div", { id: "p-table" });
  const confused = html("div", { id: "p-confused" });
  root.append(controls, count, body, confused);
  let selected = [];

  function categories() {
    return [...new Set(runs[state.run].predictions.map((line) => line.category).filter(Boolean))].sort();
  }

  /** Return the titles and the texts of the columns after the prediction. */
  function furtherColumns({ predictions }) {
    const has = (name) => predictions.some((line) => (line[name] ?? null) !== null);
    return [
      ["split", new Set(predictions.map((line) => line.split)).size > 1, (line) => line.split],
      ["category", has("category"), (line) => line.category ?? ""],
      ["loss", true, (line) => line.nll?.toFixed(4) ?? "not finite"],
      ["probability", has("probability"), (line) => line.probability?.toFixed(4) ?? ""],
    ].filter(([, isShown]) => isShown);
  }

  function drawTable() {
    const run = runs[state.run];
    const category = state.category > 0 ? categories()[state.category - 1] : null;
    const wanted = state.search.toLowerCase();
    selected = run.predictions.filter((line) => (state.which === 2 || line.correct === (state.which === 1))
      && (category === null || line.category === category)
      && [line.source, line.target, line.prediction].some((text) => text.toLowerCase().includes(wanted)));
    count.textContent = `${run.wrong.toLocaleString("en")} of ${run.tested.toLocaleString("en")} predictions on the `
      + `${run.split} data are wrong; ${selected.length} of ${run.predictions.length} in this page are shown, the `
      + "largest loss first.";
    const further = furtherColumns(run);
    const titles = ["source", "target", "prediction", ...further.map(([title]) => title)];
    clear(body, textTable("Table of predictions", titles, selected, (line) => html("tr", {},
      textCell(line.source, line.source), textCell(line.target, marked(line.target, line.marks?.[0])),
      predictionCell(line), further.map(([, , text]) => html("td", {}, text(line))))));
  }

  /** Draw the table of the symbols that the chosen run confuses, omits or adds. */
  function drawConfused() {
    const rows = runs[state.run].confused;
    const symbol = (text) => html("td", { class: "words" },
      text === "" ? html("span", { class: "muted" }, "none") : visible(text));
    const save = () => downloadFile("confused_symbols.csv",
      new Blob([csvOf(["edit", "target", "predicted", "count"], rows)], { type: "text/csv" }));
    clear(confused, rows.length === 0 ? null : [
      html("h3", {}, "Confused symbols"),
      html("p", { class: "note" }, "Targets are aligned with predictions by the fewest edits. Each example is the "
        + "prediction with the fewest errors."),
      html("div", { class: "controls" }, html("button", { type: "button", id: "p-confused-download", onclick: save },
        "Download symbols as CSV")),
      textTable("Table of confused symbols", ["target", "prediction", "count", "target and prediction", "source"], rows,
        ({ target, predicted, count, example: { source, marks, ...texts } }) => html("tr", {}, symbol(target),
          symbol(predicted), html("td", {}, count.toLocaleString("en")),
          textCell(texts.target, html("div", {}, marked(texts.target, marks[0])),
            html("div", {}, marked(texts.prediction, marks[1]))), textCell(source, source))),
    ]);
  }

  function download() {
    const columns = ["source", "target", "prediction", "correct", "split", "category", "nll"];
    downloadFile("predictions.csv", new Blob([csvOf(columns, selected)], { type: "text/csv" }));
  }

  function draw() {
    const names = categories();
    const search = html("input", { type: "search", id: "p-search", value: state.search,
      placeholder: "source, target, prediction", oninput: () => {
        state.search = search.value;
        drawTable();
      } });
    const drawWith = (name) => (place) => {
      state[name] = place;
      drawTable();
    };
    clear(controls,
      menu("Run", "p-run", runs.map((run) => run.name), state.run, (run) => {
        Object.assign(state, { run, category: 0 });
        draw();
      }),
      menu("Show", "p-which", ["wrong", "correct", "all"], state.which, drawWith("which")),
      names.length > 1 ? menu("Category", "p-category", ["all", ...names], state.category, drawWith("category")) : null,
      html("label", { class: "field" }, "Search", search),
      html("button", { type: "button", id: "p-download", onclick: download }, "Download CSV"));
    drawTable();
    drawConfused();
  }

  draw();
}

/* Examples on which two systems disagree */

function disagreementsView(root, pairs) {
  const [controls, body] = [html("div", { class: "controls" }), html("div", {})];
  root.append(controls, body);
  function draw(chosen) {
    const { names, counts, rows } = pairs[chosen];
    clear(controls, menu("Systems", "d-pair", pairs.map((pair) => pair.names.join(" and ")), chosen, draw));
    const [first, second] = counts.map((count) => count.toLocaleString("en"));
    const makeRow = ({ source, target, predictions }) => html("tr", {}, textCell(source, source),
      textCell(target, target), predictions.map(predictionCell));
    clear(body,
      html("p", { class: "note" }, `Only ${names[0]} is right on ${first} examples, only ${names[1]} on ${second}.`),
      textTable("Table of disagreements", ["source", "target", ...names], rows, makeRow));
  }
  draw(0);
}

const runsWith = (name) => content.runs.filter((run) => run[name].length > 0);
const views = [
  ["attention", attentionView, runsWith("attention")],
  ["history", attentionView, runsWith("history")],
  ["predictions", errorsView, runsWith("predictions")],
  ["disagreements", disagreementsView, content.disagreements],
];
const examples = content.runs.flatMap((run) => [...run.attention, ...run.history]);
const numbersOfMaps = examples.map(({ layers }) => Object.values(layers)[0].reduce((sum, { heads }) => sum + heads, 0));
document.querySelector(".views").classList.toggle("few", Math.max(0, ...numbersOfMaps) <= FEW_MAPS);
for (const [id, view, items] of views) {
  if (items.length > 0) view(element(id), items, id);
  else element(id)?.remove();
}
if (examples.length === 0) document.querySelector(".attention-section").remove();

/* The explorer is a page of its own, whose addresses are relative to its own. */
if (content.explorer) {
  element("explorer").src = URL.createObjectURL(new Blob([content.explorer], { type: "text/html" }));
}
