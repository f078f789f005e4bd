// Maps of values, with labels of their rows and columns.

import { SIGNED, clipped, colorScale, moveAmong, symbolWidth, tone } from "./drawings.js";
import { svg } from "./dom.js";

/** Maximum number of characters of the label of a row or column of a signed map. */
const MAX_AXIS_LABEL = 18;

/** Size of the font of labels that are turned, or have room. */
const LABEL_FONT = 12;

/** Size of the smallest font of labels that are not turned. */
const MIN_FONT = 9;

/** Share of the largest value from which the sign is written into a cell. */
export const MIN_SIGN = 0.2;

/** Return the length of the sides of cells that lie this far apart. */
function cellSide(size) {
  return size > 7 ? size - 1 : size;
}

/**
 * Return the cells of a map as paths, one for each shade.
 * @param {Array<Array<number>>} values
 * @param {object} place `left`, `top` and `size`, the distance of cells.
 * @param {object} colors see `SIGNED`.
 * @param {number} limit the value of the strongest color.
 */
export function cellPaths(values, { left = 0, top = 0, size = 1 }, colors, limit = 1) {
  const paths = new Map();
  const side = cellSide(size).toFixed(2);
  values.forEach((row, t) => row.forEach((value, s) => {
    const shade = Math.round(colors.shades * value / limit);
    if (shade === 0) return;
    const corner = `${(left + s * size).toFixed(2)} ${(top + t * size).toFixed(2)}`;
    paths.set(shade, `${paths.get(shade) ?? ""}M${corner}h${side}v${side}h-${side}z`);
  }));
  return [...paths].map(([shade, d]) => {
    const { opacity, sign } = tone(shade / colors.shades, colors);
    return svg("path", { class: sign, d, "fill-opacity": opacity });
  });
}

/** Return a label above a column, centered or turned. */
export function columnLabel(text, x, y, font, isTurned, name = "") {
  const left = isTurned ? x + 4 : x;
  return svg("text", { class: `symbol top${isTurned ? " turned" : ""}${name && ` ${name}`}`, x: left, y,
    style: `font-size: ${font.toFixed(1)}px`, transform: isTurned ? `rotate(-90 ${left} ${y})` : null }, text);
}

/**
 * Return the drawing of a map.
 * @param {object} options `name`, `key` and `label` of the drawing; its `width` and `height`; `left`, `top` and `size`
 *   of its cells; `values` (rows, columns), `colors` and `limit`, see `cellPaths`; `rows`, their labels, and `rowFont`;
 *   `selected`, the index of a row, or null; `isMarked(row, column)`; `cursors`, `show`, `choose` and `framesPointed`
 *   of `moveAmong`.
 * @param {...(Node|Array)} labels further elements.
 */
export function heatMap(options, ...labels) {
  const { name, key, label, width, height, left, top, size, values, colors, limit, rows } = options;
  const { rowFont = LABEL_FONT, selected = null, isMarked = () => false } = options;
  const side = cellSide(size);
  const boxOf = ({ t, s }) => ({ x: left + s * size, y: top + t * size, width: side, height: side });
  const middle = (t) => top + t * size + side / 2;
  const drawing = svg("svg", { class: name, viewBox: `0 0 ${Math.round(width)} ${Math.round(height)}`, "data-key": key,
    "aria-label": label },
  rows.map((row, t) => svg("text", { class: `symbol row-label${t === selected ? " selected" : ""}`, x: left - 10,
    y: middle(t), "dominant-baseline": "central", style: `font-size: ${rowFont.toFixed(1)}px` }, row)),
  svg("rect", { class: "frame", x: left - 0.5, y: top - 0.5, width: values[0].length * size,
    height: values.length * size }),
  cellPaths(values, options, colors, limit),
  values.map((row, t) => row.map((_, s) =>
    (isMarked(t, s) ? svg("rect", { class: "mark", ...boxOf({ t, s }) }) : null))),
  selected === null ? null
    : svg("path", { class: "selected", d: `M${left - 7} ${middle(selected) - 4}l6 4l-6 4z` }),
  labels);

  const at = (x, y) => ({ t: Math.floor((y - top) / size), s: Math.floor((x - left) / size) });
  moveAmong(drawing, { lengths: values.map((row) => row.length), boxOf, at },
    { ...options, first: { t: selected ?? 0, s: 0 } });
  return drawing;
}

/**
 * Return the map of signed values, with a scale.
 * @param {object} options those of `heatMap` except its sizes; `rows` and `tops`, labels of rows and columns, where the
 *   latter are lists of one or two lines; `scale`, the labels of the scale; `title`, the name of the columns; `width`;
 *   `minSize` of the cells.
 */
export function signedMap(options) {
  const { tops, values, limit, scale, title, width, minSize = 12 } = options;
  const wide = (symbols) => Math.max(1, ...symbols.map((symbol) => symbolWidth(symbol, LABEL_FONT)));
  const rows = options.rows.map((row) => clipped(row, MAX_AXIS_LABEL));
  const lines = tops.map((top) => top.map((symbol) => clipped(symbol, MAX_AXIS_LABEL)));
  const left = wide(rows) + 16;
  const size = Math.floor(Math.max(minSize, Math.min(28, (width - left - 4) / tops.length)));
  const fontOf = (text) => Math.min(LABEL_FONT, (size - 1) / symbolWidth(text, 1)); // so that EOS fits
  const isTurned = lines.map((line) => Math.min(...line.map(fontOf)) < MIN_FONT);
  const turned = lines.map((line) => line.join(" → "));
  const depth = Math.max(...lines.map((line, s) => (isTurned[s] ? 1 : line.length)));
  const top = 18 + Math.max(15 * depth, wide(turned.filter((_, s) => isTurned[s])) + 6);
  const bottom = top + values.length * size;
  const middle = (index, start) => start + (index + 0.5) * size - 0.5;
  const columnLabels = (line, s) => {
    if (isTurned[s]) {
      return columnLabel(turned[s], middle(s, left), top - 5, LABEL_FONT, true, line.length > 1 ? "other" : "");
    }
    return line.map((text, i) => columnLabel(text, middle(s, left), top - 5 - 15 * (depth - 1 - i), fontOf(text), false,
      i > 0 ? "other" : ""));
  };
  const sign = (value, t, s) => (Math.abs(value) < MIN_SIGN * limit ? null : svg("text", { class: "sign",
    x: middle(s, left), y: middle(t, top), "dominant-baseline": "central" }, value < 0 ? "−" : "+"));
  return heatMap({ ...options, name: "chart", rows, left, top, size, colors: SIGNED, height: Math.ceil(bottom + 32),
    width: Math.ceil(Math.max(left + tops.length * size + 4, 300)) },
  svg("text", { class: "axis", x: left, y: 11 }, title),
  lines.map(columnLabels),
  values.map((row, t) => row.map((value, s) => sign(value, t, s))),
  colorScale(scale, left, bottom + 18));
}
