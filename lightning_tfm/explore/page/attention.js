// Attention: lines between the texts, a map of the weights, and the scores of the heads.

import { clear, columns, drawingWidth, html, number, redraw, svg, visible } from "./dom.js";
import { effects, increaseText } from "./parts.js";
import { figure, pythonLines } from "./pictures.js";
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

/** Number of shades of a map. */
const SHADES = 50;

/** Width of a character relative to the size of the font. */
const CHARACTER = 0.62;

/** Maximum number of characters of a label. */
const MAX_LABEL = 14;

function shortLabel(symbol) {
  const text = visible(symbol);
  return text.length > MAX_LABEL ? `${text.slice(0, MAX_LABEL - 1)}…` : text;
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

/** Return the cells of a map as paths, one for each shade. */
function cellPaths(weights, left, top, size, gap, shades) {
  const paths = new Map();
  weights.forEach((row, t) => row.forEach((weight, s) => {
    const shade = Math.round(shades * weight);
    if (shade === 0) return;
    const place = `M${(left + s * size).toFixed(2)} ${(top + t * size).toFixed(2)}`;
    const side = (size - gap).toFixed(2);
    paths.set(shade, `${paths.get(shade) ?? ""}${place}h${side}v${side}h-${side}z`);
  }));
  return [...paths].map(([shade, d]) => svg("path", { d, "fill-opacity": (shade / shades).toFixed(2) }));
}

/** Return the size of the font of labels along an axis with this distance, and whether they must be turned. */
function labelFont(symbols, distance) {
  const longest = longestLabel(symbols);
  const size = Math.min(15, 0.85 * distance, distance / (CHARACTER * longest));
  if (longest === 1 || size >= 9) return { size, fit: distance / CHARACTER, isTurned: false, extent: 18 };
  return { size: 12, fit: Infinity, isTurned: true, extent: Math.max(3, longest) * CHARACTER * 12 + 6 };
}

/** Return a label at the end of a column. */
function columnLabel(symbol, x, y, font, names) {
  const text = shortLabel(symbol);
  const size = Math.min(font.size, font.fit / text.length).toFixed(1);
  const turn = font.isTurned ? { transform: `rotate(-90 ${(x + 4).toFixed(1)} ${y.toFixed(1)})` } : {};
  return svg("text", { class: `symbol ${names}${font.isTurned ? " turned" : ""}`, style: `font-size: ${size}px`,
    x: (font.isTurned ? x + 4 : x).toFixed(1), y: y.toFixed(1), ...turn }, text);
}

/** Show the frame of the keyboard's position at a place. */
function place(cursor, box) {
  for (const [name, value] of Object.entries(box)) cursor.setAttribute(name, value.toFixed(1));
  cursor.setAttribute("visibility", "visible");
}

/** Return the largest weights of a row or column as the nodes of a line: "0.93 M, 0.05 a". */
function largestWeights(weights, symbols) {
  const order = weights.map((weight, i) => [weight, i]).filter(([weight]) => weight >= MIN_WEIGHT)
    .sort((a, b) => b[0] - a[0]).slice(0, 5);
  return order.flatMap(([weight, i], k) => [k > 0 ? ", " : "", html("b", { class: "mono" }, visible(symbols[i])),
    ` ${number(weight)}`]);
}

/**
 * Return the drawing of lines between two texts, keys above and queries below.
 *
 * Pointing at a symbol, or moving to it with the arrow keys, emphasizes its lines and shows its weights.
 */
function linesDrawing(map, weights, { width, selected, live, key, choose }) {
  const texts = { keys: map.keys, queries: map.queries };
  const most = Math.max(map.keys.length, map.queries.length);
  const widest = Math.max(30, CHARACTER * 13 * longestLabel([...map.keys, ...map.queries]) + 6);
  const distance = Math.max(9, Math.min(widest, (width - 12) / most));
  const total = Math.max(width, distance * most + 12);
  const fonts = { keys: labelFont(map.keys, distance), queries: labelFont(map.queries, distance) };
  const bars = 16; // the height of the bars of weights between labels and lines
  const x = (kind, i) => (total - distance * texts[kind].length) / 2 + distance * (i + 0.5);
  const top = 18 + fonts.keys.extent + bars;
  const bottom = top + Math.max(110, Math.min(190, 0.34 * total));
  const height = bottom + bars + fonts.queries.extent + 18;
  const middle = (top + bottom) / 2;
  const lines = weights.flatMap((row, t) => row.flatMap((weight, s) => {
    if (weight < MIN_WEIGHT) return [];
    const [a, b] = [x("keys", s).toFixed(1), x("queries", t).toFixed(1)];
    const d = `M${a} ${top}C${a} ${middle} ${b} ${middle} ${b} ${bottom}`;
    const line = svg("path", { class: "line", d, "stroke-opacity": weight.toFixed(2), "stroke-width": 2 });
    return [{ line, t, s }];
  }));
  const labels = {
    keys: map.keys.map((symbol, s) => columnLabel(symbol, x("keys", s), top - bars - 5, fonts.keys, "above")),
    queries: map.queries.map((symbol, t) => columnLabel(symbol, x("queries", t),
      bottom + bars + (fonts.queries.isTurned ? 4 : 13), fonts.queries, "below")),
  };
  const weightBars = svg("g");
  const cursor = svg("rect", { class: "cursor", visibility: "hidden", rx: 3 });
  const axes = AXES[map.side];

  function rowOrColumn(kind, i) {
    return kind === "queries" ? weights[i] : weights.map((row) => row[i]);
  }

  let emphasized = "";

  /** Emphasize a symbol; none: the row of the selected step. */
  function emphasize(kind, i) {
    if (emphasized === `${kind} ${i}`) return;
    emphasized = `${kind} ${i}`;
    const isPointed = kind !== null;
    const [from, at] = isPointed ? [kind, i] : ["queries", selected];
    for (const { line, t, s } of lines) {
      const isIts = (from === "queries" ? t : s) === at;
      line.setAttribute("class", `line${isIts ? " selected" : ""}${isPointed && !isIts ? " faint" : ""}`);
    }
    for (const [name, elements] of Object.entries(labels)) {
      elements.forEach((element, j) => element.classList.toggle("emphasis", name === from && j === at));
    }
    const to = from === "queries" ? "keys" : "queries";
    const own = at === null ? [] : rowOrColumn(from, at);
    const wide = Math.max(2, Math.min(14, distance - 3));
    clear(weightBars, own.map((weight, j) => {
      const tall = weight * (bars - 3);
      return svg("rect", { class: "weight", width: wide.toFixed(1), height: tall.toFixed(1),
        x: (x(to, j) - wide / 2).toFixed(1), y: (to === "keys" ? top - tall : bottom).toFixed(1) });
    }));
    if (!isPointed) return;
    const verb = from === "queries" ? " attends to " : " is attended to by ";
    clear(live, html("b", { class: "mono" }, visible(texts[kind][i])), verb, largestWeights(own, texts[to]));
  }

  const drawing = svg("svg", { class: "lines", role: "application", tabindex: 0, "data-key": key,
    viewBox: `0 0 ${total.toFixed(0)} ${height.toFixed(0)}`,
    "aria-label": `Lines of attention, queries (${axes[0]}) below and keys (${axes[1]}) above. `
      + "Arrow keys move between the symbols.",
  },
  svg("text", { class: "axis", x: 2, y: 11 }, `keys: ${axes[1]}`),
  svg("text", { class: "axis", x: 2, y: height - 4 }, `queries: ${axes[0]}`),
  lines.map(({ line }) => line), weightBars, labels.keys, labels.queries, cursor);

  let at = { kind: "queries", i: Math.max(0, selected ?? 0) };
  function move(kind, i) {
    at = { kind, i: Math.max(0, Math.min(texts[kind].length - 1, i)) };
    const y = kind === "keys" ? top - bars - fonts.keys.extent - 1 : bottom + bars;
    place(cursor, { x: x(kind, at.i) - distance / 2, y, width: distance, height: fonts[kind].extent });
    cursor.scrollIntoView({ block: "nearest", inline: "nearest" });
    emphasize(kind, at.i);
  }
  function leave() {
    cursor.setAttribute("visibility", "hidden");
    emphasize(null);
  }
  function pointed(event) {
    const box = drawing.getBoundingClientRect();
    const [px, py] = [(event.clientX - box.left) * total / box.width, (event.clientY - box.top) * height / box.height];
    const kind = py < middle ? "keys" : "queries";
    const i = Math.floor((px - x(kind, 0)) / distance + 0.5);
    return i >= 0 && i < texts[kind].length && (py < top || py > bottom) ? { kind, i } : null;
  }
  drawing.addEventListener("focus", () => move(at.kind, at.i));
  drawing.addEventListener("blur", leave);
  drawing.addEventListener("pointermove", (event) => {
    const symbol = pointed(event);
    if (symbol === null) emphasize(null);
    else emphasize(symbol.kind, symbol.i);
  });
  drawing.addEventListener("pointerleave", leave);
  drawing.addEventListener("click", (event) => {
    const symbol = pointed(event);
    if (symbol?.kind === "queries") choose(symbol.i);
  });
  drawing.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: [at.kind, at.i - 1], ArrowRight: [at.kind, at.i + 1], Home: [at.kind, 0],
      End: [at.kind, Infinity], ArrowUp: ["keys", at.i], ArrowDown: ["queries", at.i] };
    if (event.key === "Enter" && at.kind === "queries") choose(at.i);
    else if (event.key in moves) move(...moves[event.key]);
    else return;
    event.preventDefault();
  });
  emphasize(null);
  return drawing;
}

/**
 * Return the map of the weights, queries as rows and keys as columns.
 *
 * Pointing at a cell, or moving to it with the arrow keys, shows its weight; a click or Enter calls `choose`.
 */
function mapDrawing(map, weights, { width, selected, live, key, cells, cursors, isDrawing, choose }) {
  const [rows, keys] = [map.queries.length, map.keys.length];
  const longest = Math.max(1, ...map.queries.map((symbol) => shortLabel(symbol).length));
  const left = Math.min(0.3 * width, Math.max(12, longest * CHARACTER * 13 + 6)) + 10;
  const isLabeled = Math.max(rows, keys) <= MAX_LABELED;
  const size = Math.max(isLabeled ? 9 : 3, Math.min(28, (width - left - 2) / keys));
  const font = labelFont(map.keys, size);
  const top = 16 + (isLabeled ? font.extent : 4);
  const [total, height] = [Math.max(width, left + keys * size + 2), top + rows * size + 18];
  const axes = AXES[map.side];
  const rowSize = Math.min(15, 0.85 * size, (left - 12) / (CHARACTER * longest)).toFixed(1);
  const middle = (t) => top + (t + 0.5) * size;
  const cursor = svg("rect", { class: "cursor", visibility: "hidden" });
  const at = cursors.get(key) ?? { t: Math.max(0, selected ?? 0), s: 0 };
  const isDrawn = (t, s) => cells.some((cell) => cell.query === t && cell.key === s);

  const drawing = svg("svg", { class: `map${isDrawing ? " drawing-mode" : ""}`, role: "application", tabindex: 0,
    viewBox: `0 0 ${total.toFixed(0)} ${height.toFixed(0)}`, "data-key": key,
    "aria-label": `Map of attention, queries (${axes[0]}) as rows and keys (${axes[1]}) as columns. `
      + `Arrow keys move between the cells${isDrawing ? ", Enter draws" : ""}.` },
  svg("text", { class: "axis", x: left, y: 11 }, `keys: ${axes[1]}`),
  svg("text", { class: "axis", x: left, y: height - 4 }, `queries: ${axes[0]}`),
  isLabeled ? map.keys.map((symbol, s) => columnLabel(symbol, left + (s + 0.5) * size, top - 5, font, "key")) : null,
  isLabeled ? map.queries.map((symbol, t) => svg("text", { class: `symbol query${t === selected ? " emphasis" : ""}`,
    style: `font-size: ${rowSize}px`, x: left - 10, y: middle(t) }, shortLabel(symbol))) : null,
  svg("rect", { class: "frame", x: left, y: top, width: keys * size, height: rows * size }),
  cellPaths(weights, left, top, size, size > 7 ? 1 : 0, SHADES),
  selected === null || selected >= rows ? null : svg("path", { class: "row-marker",
    d: `M${left - 7} ${middle(selected) - 4}l6 4l-6 4z` }),
  cells.filter(({ query, key: s }) => query < rows && s < keys).map(({ query, key: s }) => svg("rect", { class: "drawn",
    x: left + s * size, y: top + query * size, width: size - 1, height: size - 1 })),
  cursor);

  function show(t, s) {
    place(cursor, { x: left + s * size, y: top + t * size, width: size, height: size });
    clear(live, html("b", { class: "mono" }, visible(map.queries[t])), " ← ",
      html("b", { class: "mono" }, visible(map.keys[s])), `: ${number(weights[t][s])}`,
      html("span", { class: "muted" }, ` (row ${t + 1}, column ${s + 1}${isDrawn(t, s) ? ", drawn" : ""})`));
  }
  function move(t, s) {
    Object.assign(at, { t: Math.max(0, Math.min(rows - 1, t)), s: Math.max(0, Math.min(keys - 1, s)) });
    cursors.set(key, at);
    show(at.t, at.s);
    cursor.scrollIntoView({ block: "nearest", inline: "nearest" });
  }
  function pointed(event) {
    const box = drawing.getBoundingClientRect();
    const t = Math.floor(((event.clientY - box.top) * height / box.height - top) / size);
    const s = Math.floor(((event.clientX - box.left) * total / box.width - left) / size);
    return t >= 0 && t < rows && s >= 0 && s < keys ? { t, s } : null;
  }
  drawing.addEventListener("focus", () => move(at.t, at.s));
  drawing.addEventListener("blur", () => cursor.setAttribute("visibility", "hidden"));
  drawing.addEventListener("pointermove", (event) => {
    const cell = pointed(event);
    if (cell !== null) show(cell.t, cell.s);
  });
  drawing.addEventListener("click", (event) => {
    const cell = pointed(event);
    if (cell === null) return;
    move(cell.t, cell.s);
    choose(cell.t, cell.s);
  });
  drawing.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: [at.t, at.s - 1], ArrowRight: [at.t, at.s + 1], ArrowUp: [at.t - 1, at.s],
      ArrowDown: [at.t + 1, at.s], Home: [at.t, 0], End: [at.t, keys - 1] };
    if (event.key === "Enter" || event.key === " ") choose(at.t, at.s);
    else if (event.key in moves) move(...moves[event.key]);
    else return;
    event.preventDefault();
  });
  return drawing;
}

/** Return the panel of attention. */
export function attentionPanel({ state }) {
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
      "aria-hidden": true }, cellPaths(weights, 0, 0, 1, 0, 8)),
    html("span", { class: isOff ? "is-off" : "" }, head));
  }

  /** Return the role, the scores and the effects of the ablation of a head, or those of all heads of the layer. */
  function facts(model, map, head) {
    const record = (one) => model.heads.find(({ name }) => name === `${map.layer}.${one}`);
    if (model.heads.length === 0) {
      return html("p", { class: "note" }, html("code", {}, "lightning-tfm inspect CKPT"),
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
    const live = [html("p", { class: "live", role: "status" }), html("p", { class: "live", role: "status" })];
    const slots = [html("div", {}), html("div", {})];
    const isLong = Math.max(map.queries.length, map.keys.length) > LONG_TEXT;
    const mode = isDrawing && model.drawable.includes(map.layer);
    const hint = mode ? "Choose a cell: its row then attends to its column only. Choose it again to erase it."
      : "Point at a cell, or move with the arrow keys.";

    function fill() {
      const pick = (t, s) => choose(map, head, model, answer, t, s);
      const width = Math.max(drawingWidth(slots[0]), isLong ? Math.min(MAX_WIDTH, slots[0].clientWidth) : 0);
      const common = { width, selected, choose: pick };
      clear(live[0], html("span", { class: "muted" }, "Point at a symbol, or move with the arrow keys."));
      clear(live[1], html("span", { class: "muted" }, hint));
      const lines = linesDrawing(map, weights, { ...common, live: live[0], key: `lines ${index} ${map.layer}` });
      const cellMap = mapDrawing(map, weights, { ...common, live: live[1], key: `map ${index} ${map.layer}`, cells,
        cursors, isDrawing: mode });
      clear(slots[0], figure(`Attention lines: ${title}`, lines, python));
      clear(slots[1], figure(`Attention map: ${title}`, cellMap, python));
      lines.parentNode.after(live[0]);
      cellMap.parentNode.after(live[1]);
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
          if (!answer) return html("p", { class: "muted" }, "The attention to a text is shown with its answer.");
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
