// Parts of drawings: widths of symbols, colors of values, and moves among items.

import { clear, html, svg, visible } from "./dom.js";
import { figure } from "./pictures.js";

/** Width of a character of a symbol, relative to the size of the font. */
export const LETTER = 0.61;

/** Width of a character of the labels of a scale. */
const SCALE_LETTER = 7.2;

/** Colors of signed values: the number of shades of either sign, and the opacity of the strongest; text is readable. */
export const SIGNED = { shades: 20, strongest: 0.65 };

/** Return a symbol as text of at most this number of characters. */
export function clipped(symbol, length) {
  const text = visible(symbol);
  return text.length > length ? `${text.slice(0, length - 1)}…` : text;
}

/** Return the width of a symbol in a drawing. */
export function symbolWidth(text, font) {
  return LETTER * font * text.length;
}

/** Return the opacity and the class of the color of a value from -1 to 1. */
export function tone(value, { shades, strongest } = SIGNED) {
  const shade = Math.round(shades * Math.max(-1, Math.min(1, value)));
  return { opacity: (strongest * Math.abs(shade) / shades).toFixed(3), sign: shade < 0 ? "negative" : "positive" };
}

/** Return the width of a scale of colors, with the space after it. */
export function scaleWidth(labels) {
  return SCALE_LETTER * labels.join("").length + 158;
}

/**
 * Return a scale of colors.
 * @param {Array<string>} labels those of its ends and, in between, of 0 if it has two signs.
 */
export function colorScale(labels, x, y) {
  const from = labels.length > 2 ? -1 : 0;
  const swatches = Array.from({ length: 11 }, (_, i) => from + (1 - from) * i / 10);
  const left = x + SCALE_LETTER * labels[0].length + 6;
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

/** Return the items of a drawing that have these boxes, in rows; see `moveAmong`. */
export function boxedItems(rows) {
  const isIn = (left, top, { x, y, width, height }) => left >= x && left < x + width && top >= y && top < y + height;
  return {
    lengths: rows.map((row) => row.length),
    boxOf: ({ t, s }) => rows[t][s],
    at: (x, y) => rows.map((row, t) => ({ t, s: row.findIndex((box) => isIn(x, y, box)) })).find(({ s }) => s >= 0),
  };
}

/**
 * Let the pointer and the keyboard move among the items {t, s} of a drawing, those of row t.
 * @param {SVGElement} drawing with a `data-key` attribute; it takes the focus, and shows it around an item.
 * @param {object} items the `lengths` of their rows, the box `boxOf(item)` {x, y, width, height} of one of them, and
 *   `at(x, y)`, the one at a place, or any other value.
 * @param {object} options `cursors`, a map that keeps the item of the keyboard by the key of the drawing; `show(item)`,
 *   called for the item under the pointer or the cursor, or with null without any; `choose(item)`, called after a click
 *   or Enter; `first`, the first item of the keyboard; `moves(item)`, the items that keys lead to, other than the
 *   neighbors; `framesPointed`, whether the item under the pointer has a frame, too.
 */
export function moveAmong(drawing, { lengths, boxOf, at }, options) {
  const { cursors, show, choose = () => {}, first = { t: 0, s: 0 }, moves = () => ({}), framesPointed } = options;
  const { key } = drawing.dataset;
  const { width, height } = drawing.viewBox.baseVal;
  const cursor = svg("rect", { class: "cursor", rx: 3, visibility: "hidden" });
  drawing.append(cursor);
  drawing.setAttribute("tabindex", 0);
  drawing.setAttribute("role", "application");
  let shown = null;

  function nearest(item) {
    const t = Math.max(0, Math.min(lengths.length - 1, item.t));
    return { t, s: Math.max(0, Math.min(lengths[t] - 1, item.s)) };
  }
  function current() {
    return nearest(cursors.get(key) ?? first);
  }
  function showItem(item) {
    if (item?.t !== shown?.t || item?.s !== shown?.s) show(item);
    shown = item;
  }
  function frame(item) {
    const { x, y, width: wide, height: high } = boxOf(item);
    const box = { x: x - 1.5, y: y - 1.5, width: wide + 3, height: high + 3, visibility: "visible" };
    for (const [name, value] of Object.entries(box)) cursor.setAttribute(name, value);
  }
  function move(item) {
    cursors.set(key, item);
    frame(item);
    showItem(item);
  }
  function leave() {
    const item = drawing.matches(":focus") ? current() : null;
    if (item === null) cursor.setAttribute("visibility", "hidden");
    else frame(item);
    showItem(item);
  }
  function itemAt(event) {
    const box = drawing.getBoundingClientRect();
    const item = at((event.clientX - box.left) * width / box.width, (event.clientY - box.top) * height / box.height);
    return item?.s >= 0 && item.s < lengths[item.t] ? item : null;
  }

  drawing.addEventListener("focus", () => move(current()));
  drawing.addEventListener("blur", leave);
  drawing.addEventListener("pointerleave", leave);
  drawing.addEventListener("pointermove", (event) => {
    const item = itemAt(event);
    if (item === null) return;
    showItem(item);
    if (framesPointed) frame(item);
  });
  drawing.addEventListener("click", (event) => {
    const item = itemAt(event);
    if (item === null) return;
    move(item);
    choose(item);
  });
  drawing.addEventListener("keydown", (event) => {
    const { t, s } = current();
    const neighbors = { ArrowLeft: { t, s: s - 1 }, ArrowRight: { t, s: s + 1 }, ArrowUp: { t: t - 1, s },
      ArrowDown: { t: t + 1, s }, Home: { t, s: 0 }, End: { t, s: Infinity } };
    const to = { ...neighbors, ...moves({ t, s }) }[event.key];
    if (event.key === "Enter" || event.key === " ") choose({ t, s });
    else if (to !== undefined) move(nearest(to));
    else return;
    event.preventDefault();
    cursor.scrollIntoView({ block: "nearest", inline: "nearest" });
  });
}

/** Return a line that shows the item under the pointer or the cursor. */
export function liveLine(hint) {
  const element = html("p", { class: "live", role: "status" });
  const show = (...children) => clear(element, children.length > 0 ? children : html("span", { class: "muted" }, hint));
  show();
  return { element, show };
}

/** Return a figure with the line of its drawing below it; the other arguments are those of `figure`. */
export function liveFigure(live, ...parts) {
  const element = figure(...parts);
  element.querySelector(".drawing").after(live.element);
  return element;
}
