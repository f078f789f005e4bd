// Figures: a drawing with its files, the Python lines of its numbers, and its address.

import { html, svg } from "./dom.js";

/** Properties of the style sheet that a file keeps. */
const KEPT = ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-opacity", "stroke-dasharray", "stroke-linecap",
  "opacity", "visibility", "font-size", "font-weight", "font-style", "text-anchor", "dominant-baseline",
  "text-decoration-line"];

/** Attributes that have a meaning only on the page. */
const DROPPED = ["class", "style", "tabindex", "role", "aria-label", "aria-describedby", "aria-roledescription"];

const MONOSPACE = "Menlo, Consolas, 'DejaVu Sans Mono', monospace";
const SANS = "Helvetica, Arial, 'DejaVu Sans', sans-serif";

/** Questions that need data. */
const DATA_QUESTIONS = ["neighbors", "worst"];

/** Number of pixels of a PNG file per unit of the drawing. */
const PNG_SCALE = 3;

/** Return a computed color without color(), which programs for drawings do not read. */
function plainColor(color) {
  const parts = /^color\(srgb ([\d.e+-]+) ([\d.e+-]+) ([\d.e+-]+)(?: \/ ([\d.]+))?\)$/.exec(color);
  if (parts === null) return color;
  const [red, green, blue] = parts.slice(1, 4).map((part) => Math.round(255 * Number(part)));
  return `rgba(${red}, ${green}, ${blue}, ${parts[4] ?? 1})`;
}

/** Return a drawing as the text of an SVG file, on white, in the light colors. */
function svgText(drawing) {
  const copy = drawing.cloneNode(true);
  copy.querySelectorAll(".cursor").forEach((element) => element.remove());
  const host = html("div", { class: "offscreen", "data-theme": "light" }, copy);
  drawing.parentNode.append(host); // so that the style sheet applies to the copy
  const elements = [copy, ...copy.querySelectorAll("*")];
  const styles = elements.map((element) => {
    const computed = getComputedStyle(element);
    const family = computed.fontFamily.includes("mono") ? MONOSPACE : SANS;
    return [["font-family", family], ...KEPT.map((name) => [name, plainColor(computed.getPropertyValue(name))])];
  });
  host.remove();
  elements.forEach((element, i) => {
    for (const name of element.getAttributeNames()) {
      if (DROPPED.includes(name) || name.startsWith("data-")) element.removeAttribute(name);
    }
    for (const [name, value] of styles[i]) element.setAttribute(name.replace("decoration-line", "decoration"), value);
  });
  const { width, height } = drawing.viewBox.baseVal;
  copy.prepend(svg("rect", { width, height, fill: "#fff" }));
  copy.setAttribute("width", width);
  copy.setAttribute("height", height);
  return new XMLSerializer().serializeToString(copy);
}

/** Return a drawing as a PNG file. */
async function pngBlob(drawing) {
  const image = new Image();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(svgText(drawing))}`;
  await image.decode();
  const { width, height } = drawing.viewBox.baseVal;
  const canvas = html("canvas", { width: Math.round(PNG_SCALE * width), height: Math.round(PNG_SCALE * height) });
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  return new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
}

export function downloadFile(name, blob) {
  const address = URL.createObjectURL(blob);
  html("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

/** Return a JSON value as Python: a literal, or the constructor of changes. */
function pythonValue(value) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(pythonValue).join(", ")}]`;
  return JSON.stringify(value);
}

/** Return values as keyword arguments in Python, without null and empty lists. */
function keywordArguments(values) {
  return Object.entries(values).filter(([, value]) => value !== null && value.length !== 0)
    .map(([name, value]) => `${name}=${pythonValue(value)}`);
}

function pythonCall(name, values) {
  return `${name}(${keywordArguments(values).join(", ")})`;
}

/**
 * Return the Python lines that ask a question.
 * @param {object} model the description of a model.
 * @param {string} question the name of the question.
 * @param {object} values its arguments, as in the protocol.
 * @param {string} item the part of the result that is printed, such as '["steps"]'.
 */
export function pythonLines(model, question, values, item = "") {
  const { text, changes = {}, ...others } = values;
  const { off = [], drawn = [], patched = [] } = changes;
  const isChanged = off.length + drawn.length + patched.length > 0;
  const names = ["Explorer", isChanged && "Changes", drawn.length > 0 && "Drawn", patched.length > 0 && "Patched"];
  const first = text === undefined ? [] : [pythonValue(text)];
  const given = [...first, ...keywordArguments(others), ...(isChanged ? ["changes=changes"] : [])];
  const lists = [
    off.length > 0 && `    off=${pythonValue(off)},`,
    drawn.length > 0 && `    drawn=[${drawn.map((one) => pythonCall("Drawn", one)).join(", ")}],`,
    patched.length > 0 && `    patched=[${patched.map((one) => pythonCall("Patched", one)).join(", ")}],`,
  ];
  const isLoaded = model.load.startsWith("load(");
  const needsData = DATA_QUESTIONS.includes(question);
  return [
    ...(isLoaded ? ["from lightning_tfm import load"] : []),
    `from lightning_tfm.explore import ${names.filter(Boolean).sort().join(", ")}`,
    ...(isLoaded && needsData ? ["from lightning_tfm.fit.cli import data_of_checkpoint"] : []),
    "",
    `explorer = Explorer(${model.load}${needsData ? `, data=lambda: ${model.data}` : ""})`,
    ...(isChanged ? ["changes = Changes(", ...lists.filter(Boolean), ")"] : []),
    `print(explorer.${question}(${given.join(", ")})${item})`,
  ].join("\n");
}

/** Return a button that copies a text, and confirms it. */
function copyButton(label, text, attributes = {}) {
  async function copy() {
    const isCopied = await navigator.clipboard?.writeText(text()).then(() => true, () => false);
    button.textContent = isCopied ? "Copied" : "Not copied";
    setTimeout(() => { button.textContent = label; }, 1500);
  }
  const button = html("button", { type: "button", ...attributes, onclick: copy }, label);
  return button;
}

/**
 * Return the buttons "Python" and "Link", and the lines that the first one shows.
 * @param {string} python the Python lines.
 * @param {...Node} buttons buttons before them.
 */
export function actions(python, ...buttons) {
  const code = html("div", { class: "code", hidden: true },
    html("pre", { tabindex: 0, role: "group", "aria-label": "Python lines" }, python),
    copyButton("Copy", () => python));
  const toggle = html("button", { type: "button", "aria-expanded": false, onclick: () => {
    code.hidden = !code.hidden;
    toggle.setAttribute("aria-expanded", String(!code.hidden));
  } }, "Python");
  const link = copyButton("Link", () => location.href, { class: "link" });
  return html("div", { class: "actions" }, html("div", { class: "row" }, buttons, toggle, link), code);
}

/**
 * Return a figure: a drawing with a caption, and buttons for its files, its Python lines and its address.
 * @param {string} title
 * @param {SVGElement} drawing with a `viewBox` that starts at 0 0, about 480 wide.
 * @param {string} python the Python lines of its numbers, see `pythonLines`.
 * @param {string} description more about it.
 */
export function figure(title, drawing, python, description = "") {
  const name = title.toLowerCase().replace(/[^a-z0-9]+/g, "_").replace(/^_|_$/g, "");
  if (!drawing.hasAttribute("role")) drawing.setAttribute("role", "img");
  if (!drawing.hasAttribute("aria-label")) drawing.setAttribute("aria-label", `${title} ${description}`.trim());
  const { width, height } = drawing.viewBox.baseVal;
  drawing.setAttribute("width", width);
  drawing.setAttribute("height", height);
  const file = (label, save) => html("button", { type: "button", onclick: save }, label);
  return html("figure", {},
    html("figcaption", {}, html("strong", {}, title), html("span", { class: "muted" }, ` ${description}`)),
    html("div", { class: "drawing" }, drawing),
    actions(python,
      file("SVG", () => downloadFile(`${name}.svg`, new Blob([svgText(drawing)], { type: "image/svg+xml" }))),
      file("PNG", async () => downloadFile(`${name}.png`, await pngBlob(drawing)))));
}
