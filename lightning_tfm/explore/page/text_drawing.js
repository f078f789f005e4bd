// Texts whose symbols have backgrounds.

import { boxedItems, clipped, colorScale, moveAmong, scaleWidth, symbolWidth, tone } from "./drawings.js";
import { svg } from "./dom.js";

/** Maximum number of characters of a symbol. */
const MAX_SYMBOL = 36;

/** Sizes of the fonts of symbols and of the notes below them. */
const [TEXT_FONT, NOTE_FONT] = [15, 10];

/** Return whether symbols are characters, except EOS. */
export function isCharacters(symbols) {
  return symbols.every((symbol) => [...symbol].length === 1 || symbol === "EOS");
}

/** Return the boxes of symbols in lines, with the index `i` of each; words stay together. */
function textRows(symbols, widths, width, distance) {
  const words = [[]];
  symbols.forEach((symbol, i) => {
    words.at(-1).push(i);
    if (/\s$/.test(symbol)) words.push([]);
  });
  const rows = [[]];
  let used = 0;
  const breakLine = () => {
    rows.push([]);
    used = 0;
  };
  for (const word of words) {
    const length = word.reduce((sum, i) => sum + widths[i], 0);
    if (used > 0 && used + length > width && length <= width) breakLine();
    for (const i of word) {
      if (used > 0 && used + widths[i] > width) breakLine();
      rows.at(-1).push({ i, x: 2 + used, y: 4 + (rows.length - 1) * distance, width: widths[i], height: 22 });
      used += widths[i];
      if (symbols[i] === "\n") breakLine();
    }
  }
  return rows.filter((row) => row.length > 0);
}

/** Return the items to which keys lead from one of the symbols in rows, see `moveAmong`. */
function textMoves(rows, { t, s }) {
  const distances = (row) => rows[row].map(({ x }) => Math.abs(x - rows[t][s].x));
  const nearest = (row) =>
    (row in rows ? { t: row, s: distances(row).indexOf(Math.min(...distances(row))) } : { t, s });
  return {
    ArrowLeft: s > 0 || t === 0 ? { t, s: s - 1 } : { t: t - 1, s: Infinity },
    ArrowRight: s + 1 < rows[t].length || t + 1 === rows.length ? { t, s: s + 1 } : { t: t + 1, s: 0 },
    ArrowUp: nearest(t - 1), ArrowDown: nearest(t + 1), Home: { t: 0, s: 0 }, End: { t: Infinity, s: Infinity },
  };
}

/**
 * Return the drawing of a text whose symbols have backgrounds, with a scale.
 * @param {object} options `symbols`; `values` from -1 to 1; `notes`, small texts below the symbols, or null; `scale`,
 *   the labels of the scale; `underlined(i)`; `legend`, the meaning of the line; `width`; `key` and `label` of the
 *   drawing; `cursors`, `show` and `first` of `moveAmong`, where items are indices of symbols.
 */
export function textDrawing(options) {
  const { symbols, values, notes = null, scale, underlined = () => false, legend = "", width, key, label } = options;
  const { cursors, show, first = 0 } = options;
  const isWord = (symbol) => [...symbol].length > 1;
  const isText = isCharacters(symbols);
  const shownAs = symbols.map((symbol) => (isText && symbol === " " ? " " : clipped(symbol, MAX_SYMBOL)));
  const widths = shownAs.map((symbol, i) => Math.max(
    symbolWidth(symbol, TEXT_FONT) + (isText && !isWord(symbols[i]) ? 0 : 6),
    notes?.[i] ? symbolWidth(notes[i], NOTE_FONT) + 4 : 0));
  const distance = notes === null ? 26 : 40;
  const rows = textRows(symbols, widths, width - 4, distance);
  const bottom = rows.length * distance + 8;
  const gap = isText ? 0 : 1;
  const parts = rows.flat().map(({ i, x, y, width: wide, height }) => {
    const { opacity, sign } = tone(values[i]);
    const middle = x + wide / 2;
    return [
      Number(opacity) > 0 ? svg("rect", { class: sign, x: x + gap, y, width: wide - 2 * gap, height,
        "fill-opacity": opacity }) : null,
      svg("text", { class: `symbol letter${symbols[i] === "\n" ? " blank" : ""}`, x: middle, y: y + height / 2,
        "dominant-baseline": "central" }, shownAs[i]),
      underlined(i) ? svg("path", { class: "underline", d: `M${x} ${y + height + 1}h${wide}` }) : null,
      notes?.[i] ? svg("text", { class: "symbol remark", x: middle, y: y + height + 11 }, notes[i]) : null,
    ];
  });
  const legendX = scaleWidth(scale) + 2;
  const drawing = svg("svg", { class: "chart", viewBox: `0 0 ${Math.max(width, 260)} ${bottom + 26}`, "data-key": key,
    "aria-label": label },
  parts, colorScale(scale, 2, bottom + 12),
  legend === "" ? null : [svg("path", { class: "underline", d: `M${legendX} ${bottom + 16}h18` }),
    svg("text", { class: "axis", x: legendX + 24, y: bottom + 12, "dominant-baseline": "central" }, legend)]);
  const row = rows.findLast(([item]) => item.i <= first);
  moveAmong(drawing, boxedItems(rows), {
    cursors, first: { t: rows.indexOf(row), s: first - row[0].i }, moves: (item) => textMoves(rows, item),
    show: (item) => show(item && rows[item.t][item.s].i),
  });
  return drawing;
}
