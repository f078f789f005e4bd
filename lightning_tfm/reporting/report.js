// The report: attention of all heads, errors, and examples on which two systems disagree.

import { clear, html, number, percent, rove, svg, visible } from "./dom.js";
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

/** Return the index of the example to begin with: an input of the user, a wrong prediction, or that of the lowest loss. */
function firstExample(examples) {
  const place = examples.findIndex(({ correct }) => !correct);
  return place < 0 ? examples.length - 1 : place;
}

/** Fill an element with the attention of all heads for one example of one run. */
function attentionView(root, runs, name) {
  const state = { run: 0, example: firstExample(runs[0][name]), rows: null, validation: Infinity, layer: null };
  const [controls, texts, caption, live, layers] = [html("div", { class: "controls" }), html("dl", { class: "example" }),
    html("p", { class: "note" }), liveLine("Point at a cell or a symbol, or use Tab and the arrow keys."), html("div", { class: "layers" })];
  root.append(controls, texts, caption, live.element, layers);
  const cursors = new Map();
  let maps = [];

  const example = () => runs[state.run][name][state.example];
  const rowsOf = () => (example().layers[state.rows] ? state.rows : Object.keys(example().layers)[0]);

  /** Outline the row of a symbol of the output in all maps. */
  function outline(step) {
    for (const { layer, frame, size, left, top } of maps) {
      const row = step + (layer.first ?? 0);
      const isShown = layer.predicts && rowsOf() === "output" && example().steps && row < layer.queries.length;
      const box = { x: left - 1, y: top + row * size - 1, width: layer.keys.length * size + 1, height: size + 1 };
      for (const [key, value] of Object.entries({ ...box, visibility: isShown ? "visible" : "hidden" })) frame.setAttribute(key, value);
    }
  }

  function drawTexts() {
    const { source, target, prediction, correct, steps } = example();
    const entry = (title, text) => [html("dt", {}, title), html("dd", { class: "mono" }, text)];
    clear(texts, source === undefined ? null : [entry("source", source), correct === false ? entry("target", marked(target, example().marks[0])) : null,
      entry("output", steps ? symbols(example(), outline) : prediction)]);
  }

  function drawHead(layer, head, weights, limit, { left, size }) {
    const isLabeled = size >= LABELED_SIZE;
    const labels = layer.keys.map((symbol) => clipped(symbol, 8));
    const fontOf = (label) => Math.min(12, size / (LETTER * label.length)); // so that EOS fits
    const isTurned = labels.some((label) => fontOf(label) < MIN_LABEL);
    const turnedFont = Math.min(12, size + 2);
    const top = !isLabeled ? 4 : isTurned ? LETTER * turnedFont * Math.max(...labels.map((label) => label.length)) + 8 : 18;
    const gold = new Set(layer.gold.map(String));
    const [rows, keys] = [layer.queries.length, layer.keys.length];
    const drawing = heatMap({ name: "map", key: `${name} ${layer.layer} ${head}`, width: left + keys * size + 2,
      height: top + rows * size + 2, left, top, size, values: weights, colors: HEAD_WEIGHTS, limit,
      rows: isLabeled ? layer.queries.map((symbol) => clipped(symbol, 8)) : [], rowFont: Math.min(12, size + 2),
      isMarked: (t, s) => gold.has(`${s},${t}`), cursors, framesPointed: true,
      label: `Attention of head ${head} of ${layer.layer}, ${rows} rows and ${keys} columns. Arrow keys move between the cells.`,
      show: (cell) => {
        if (cell === null) return;
        live.show(html("b", {}, `${layer.layer}, head ${head}: `), html("b", { class: "mono" }, visible(layer.queries[cell.t])),
          " attends to ", html("b", { class: "mono" }, visible(layer.keys[cell.s])), ` ${number(weights[cell.t][cell.s])}`,
          html("span", { class: "muted" }, ` (row ${cell.t + 1}, column ${cell.s + 1})`));
      } }, isLabeled ? labels.map((label, s) => columnLabel(label, left + (s + 0.5) * size, top - 5, isTurned ? turnedFont : fontOf(label), isTurned)) : null);
    const { width, height } = drawing.viewBox.baseVal;
    drawing.setAttribute("width", width);
    drawing.setAttribute("height", height);
    const frame = svg("rect", { class: "row", visibility: "hidden" });
    drawing.append(frame);
    maps.push({ layer, frame, size, left, top });
    return html("figure", {}, html("figcaption", { class: "muted" }, `head ${head}`), html("div", { class: "drawing" }, drawing));
  }

  /** Return the layers that are shown: all or, during training, one, at first the one with the gold alignment. */
  function shownLayers() {
    const every = example().layers[rowsOf()];
    if (!example().validations) return every;
    const first = Math.max(0, every.findLastIndex((layer) => layer.gold.length > 0));
    return [every[state.layer ?? first] ?? every[first]];
  }

  function drawMaps() {
    const shown = shownLayers();
    const { validations } = example();
    const isPaired = shown.length > 1 && layers.clientWidth >= WIDE;
    const width = isPaired ? (layers.clientWidth - LAYER_GAP) / 2 : layers.clientWidth;
    const last = shown[0].weights.length - 1;
    const validation = Math.min(state.validation, last);
    maps = [];
    clear(layers, shown.map((layer) => {
      const every = layer.weights.map((_, place) => weightsAt(layer, place));
      const limit = Math.max(0.01, every.flat(3).reduce((most, weight) => Math.max(most, weight), 0));
      const size = mapSize(layer, width);
      return html("div", { class: "block", style: `width: ${width}px` },
        html("h4", { class: "layer" }, layer.layer, html("span", { class: "muted" }, ` colors from 0 to ${number(limit)}`)),
        html("div", { class: "heads" }, every[validation].map((weights, head) => drawHead(layer, head, weights, limit, size))));
    }));
    if (validations) {
      const at = `step ${validations[validation].toLocaleString("en")}`;
      element(`${name}-at`).textContent = `Validation at ${at}`;
      element(`${name}-validation`).setAttribute("aria-valuetext", at);
    }
  }

  function draw() {
    const { layers: sides, validations } = example();
    const rows = rowsOf();
    const radio = (value, text) => html("label", { class: "check" }, html("input", { type: "radio", name: `${name}-rows`, value,
      "data-key": `${name}-${value}`, checked: value === rows, onchange: () => { state.rows = value; draw(); } }), text);
    clear(controls,
      menu("Run", `${name}-run`, runs.map((run) => run.name), state.run, (run) => { Object.assign(state, { run, example: firstExample(runs[run][name]) }); draw(); }),
      menu("Example", `${name}-example`, runs[state.run][name].map(({ title }) => title), state.example,
        (place) => { state.example = place; draw(); }),
      Object.keys(sides).length > 1 ? html("fieldset", {}, html("legend", {}, "Rows"), radio("output", "model's output"), radio("target", "target")) : null,
      validations ? menu("Layer", `${name}-layer`, sides[rows].map(({ layer }) => layer), sides[rows].indexOf(shownLayers()[0]),
        (place) => { state.layer = place; draw(); }) : null,
      validations?.length > 1 ? html("label", { class: "field" }, html("span", { id: `${name}-at` }),
        html("input", { type: "range", id: `${name}-validation`, min: 0, max: validations.length - 1, "data-key": `${name}-validation`,
          value: Math.min(state.validation, validations.length - 1), oninput: (event) => { state.validation = Number(event.target.value); drawMaps(); } }))
        : html("span", { id: `${name}-at`, class: "muted" }));
    if (validations?.length === 1) controls.append(html("span", { id: `${name}-validation`, hidden: true }));
    const predicts = shownLayers().some((layer) => layer.predicts);
    const hasGold = shownLayers().some((layer) => layer.gold.length > 0);
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
  tip.style.left = `${Math.max(8, Math.min(box.left, document.documentElement.clientWidth - tip.offsetWidth - 8)) + window.scrollX}px`;
  tip.style.top = `${box.bottom + 6 + window.scrollY}px`;
}

function hideTip() {
  tip.hidden = true;
}

document.addEventListener("keydown", (event) => event.key === "Escape" && hideTip());

/** Return the parts of a text, of which those that differ are marked. */
function marked(text, ranges = [], offset = 0) {
  const isMarked = (place) => ranges.some(([start, end]) => place >= start && place < end);
  const bounds = [0, ...ranges.flat().map((place) => place - offset).filter((place) => place > 0 && place < text.length), text.length];
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
  const parts = [];
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
    const button = html("button", { type: "button", class: step[0] === "EOS" ? "given end" : "given", tabindex: parts.some((part) => part.tabIndex === 0) ? -1 : 0,
      "aria-describedby": "tip", style: `background: color-mix(in srgb, var(--warm) ${Math.round(40 * (1 - step[1]))}%, transparent)`,
      onmouseenter: show, onfocus: show, onmouseleave: hideTip, onblur: hideTip },
    step[0] === "EOS" ? "EOS" : marked(prediction.slice(start, end), marks?.[1], start));
    parts.push(button);
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
  return [columns, ...rows.map((row) => columns.map((column) => row[column]))].map((row) => `${row.map(cell).join(",")}\r\n`).join("");
}

function errorsView(root, runs) {
  const state = { run: 0, category: 0, search: "", which: runs.some((run) => run.wrong) ? "wrong" : "all" };
  const [controls, count, body] = [html("div", { class: "controls" }), html("p", { class: "note", id: "p-count", role: "status" }),
    html("div", { id: "p-table" })];
  root.append(controls, count, body);
  const categoriesOf = (run) => ["all", ...new Set(run.predictions.map((line) => line.category).filter(Boolean))];
  let selected = [];

  function drawTable() {
    const run = runs[state.run];
    const category = state.category > 0 ? categoriesOf(run)[state.category] : null;
    const wanted = state.search.toLowerCase();
    selected = run.predictions.filter((line) => (state.which === "all" || line.correct === (state.which === "correct"))
      && (category === null || line.category === category)
      && [line.source, line.target, line.prediction].some((text) => text.toLowerCase().includes(wanted)));
    count.textContent = `${run.wrong.toLocaleString("en")} of ${run.tested.toLocaleString("en")} predictions on the ${run.split} data are wrong; `
      + `${selected.length} of ${run.predictions.length} in this page are shown, the largest loss first.`;
    const has = (name) => run.predictions.some((line) => (line[name] ?? null) !== null);
    const splits = new Set(run.predictions.map((line) => line.split));
    const further = [["split", splits.size > 1, (line) => line.split], ["category", has("category"), (line) => line.category ?? ""],
      ["loss", true, (line) => line.nll?.toFixed(4) ?? "not finite"],
      ["probability", has("probability"), (line) => line.probability?.toFixed(4) ?? ""]].filter(([, isShown]) => isShown);
    clear(body, textTable("Table of predictions", ["source", "target", "prediction", ...further.map(([name]) => name)], selected,
      (line) => html("tr", {}, textCell(line.source, line.source), textCell(line.target, marked(line.target, line.marks?.[0])),
        predictionCell(line), further.map(([, , text]) => html("td", {}, text(line))))));
  }

  function draw() {
    const which = ["wrong", "correct", "all"];
    clear(controls,
      menu("Run", "p-run", runs.map((run) => run.name), state.run, (run) => { Object.assign(state, { run, category: 0 }); draw(); }),
      menu("Show", "p-which", which, which.indexOf(state.which), (place) => { state.which = which[place]; drawTable(); }),
      menu("Category", "p-category", categoriesOf(runs[state.run]).slice(categoriesOf(runs[state.run]).length === 2 ? 1 : 0), state.category,
        (place) => { state.category = place; drawTable(); }),
      html("label", { class: "field" }, "Search", html("input", { type: "search", id: "p-search", "data-key": "p-search", value: state.search,
        placeholder: "source, target, prediction", oninput: (event) => { state.search = event.target.value; drawTable(); } })),
      html("button", { type: "button", id: "p-download", onclick: () => downloadFile("predictions.csv",
        new Blob([csvOf(["source", "target", "prediction", "correct", "split", "category", "nll"], selected)], { type: "text/csv" })) }, "Download CSV"));
    drawTable();
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
    clear(body, html("p", { class: "note" }, `Only ${names[0]} is right on ${counts[0].toLocaleString("en")} examples, only ${names[1]} on ${counts[1].toLocaleString("en")}.`),
      textTable("Table of disagreements", ["source", "target", ...names], rows, ({ source, target, predictions }) => html("tr", {},
        textCell(source, source), textCell(target, target), predictions.map(predictionCell))));
  }
  draw(0);
}

const has = (name) => content.runs.filter((run) => run[name].length > 0);
for (const [id, view, items] of [["attention", attentionView, has("attention")], ["history", attentionView, has("history")],
  ["predictions", errorsView, has("predictions")], ["disagreements", disagreementsView, content.disagreements]]) {
  if (items.length > 0) view(element(id), items, id);
  else element(id)?.remove();
}
const numbers = [...has("attention").flatMap((run) => run.attention), ...has("history").flatMap((run) => run.history)].map((example) =>
  Object.values(example.layers)[0].reduce((sum, layer) => sum + layer.heads, 0));
document.querySelector(".views").classList.toggle("few", Math.max(0, ...numbers) <= FEW_MAPS);
if (numbers.length === 0) document.querySelector(".attention-section").remove();

/* The explorer is a page of its own, whose addresses are relative to its own. */
if (content.explorer) element("explorer").src = URL.createObjectURL(new Blob([content.explorer], { type: "text/html" }));
