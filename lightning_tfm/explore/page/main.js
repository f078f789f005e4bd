// The page: its header, the text, the answer, and the tabs of the other panels.

import { attentionPanel } from "./attention.js";
import { beamPanel } from "./beam.js";
import { comparePanel } from "./compare.js";
import { contributionsPanel } from "./contributions.js";
import { clear, debounced, errorLine, html, latest, rove } from "./dom.js";
import { neighborsPanel } from "./neighbors.js";
import { partsPanel } from "./parts.js";
import { samplesPanel } from "./samples.js";
import { State, textArguments } from "./state.js";
import { stepsPanel } from "./steps.js";

/** Milliseconds without a key before a text is sent. */
const TYPING_PAUSE = 150;

/** Panels in tabs, in their order. */
const TABS = [attentionPanel, partsPanel, beamPanel, comparePanel, contributionsPanel, neighborsPanel, samplesPanel];

/** Return the indices of the shown models; without any in the state, the first two. */
function shownIndices(models, values) {
  const indices = [...new Set(values.model ?? [0, 1])].filter((index) => index < models.length);
  return indices.length > 0 ? indices : [0];
}

/** Return the element with the models' names, and check boxes that show them if there are several. */
function modelsElement(models, state) {
  const about = (model) => [html("strong", {}, model.name), " ", html("span", { class: "muted" },
    `${model.network}, ${model.parameters.toLocaleString("en-US")} parameters`)];
  if (models.length === 1) return { element: html("div", { class: "models" }, about(models[0])), update() {} };
  const boxes = models.map((_, index) => html("input", { type: "checkbox", onchange: () => {
    const checked = boxes.flatMap((box, i) => (box.checked ? [i] : []));
    state.set({ model: checked.length > 0 ? checked : [index] });
    boxes[index].checked ||= checked.length === 0;
  } }));
  const element = html("fieldset", { class: "models" }, html("legend", { class: "visually-hidden" }, "Shown models"),
    models.map((model, index) => html("label", { class: "check" }, boxes[index], html("span", {}, about(model)))));
  const update = (values) => boxes.forEach((box, i) => { box.checked = shownIndices(models, values).includes(i); });
  return { element, update };
}

/** Return the form of the text. */
function textElement(models, state) {
  const isLong = models.some(({ task }) => task === "language_model");
  const attributes = { autocomplete: "off", autocapitalize: "off", spellcheck: "false", "data-key": "text" };
  const input = isLong ? html("textarea", { ...attributes, rows: 2 }) : html("input", { ...attributes, type: "text" });
  let written = "";
  const write = debounced(() => {
    written = input.value;
    state.set({ text: written });
  }, TYPING_PAUSE);
  input.addEventListener("input", write);
  const example = () => shownIndices(models, state.get()).map((index) => models[index].example).find(Boolean) ?? "";
  const button = html("button", { type: "button", onclick: () => state.set({ text: example() }) }, "Example");
  const element = html("form", { class: "question", onsubmit: (event) => event.preventDefault() },
    html("label", { class: "field" }, "Text", input), button);
  const update = ({ text }) => {
    if (text !== written) input.value = text;
    written = text;
    button.hidden = example() === "";
  };
  return { element, update, example };
}

/** Return the tabs of panels. */
function tabsElement(panels, state) {
  const tabs = panels.map(({ id, title }) => html("button", { type: "button", role: "tab", "data-key": `tab ${id}`,
    onclick: () => state.set({ view: id }) }, title));
  const list = html("div", { class: "tabs", role: "tablist", "aria-label": "Questions" }, tabs);
  rove(list, (tab) => tab.click());
  const bodies = panels.map(({ id, title, element }) => html("section", { class: "panel", "data-panel": id,
    role: "tabpanel", "aria-label": title }, html("h2", { class: "visually-hidden" }, title), element));
  const update = ({ view }) => panels.forEach(({ id }, i) => {
    const isSelected = id === (panels.some((panel) => panel.id === view) ? view : panels[0].id);
    tabs[i].setAttribute("aria-selected", String(isSelected));
    tabs[i].tabIndex = isSelected ? 0 : -1;
    bodies[i].hidden = !isSelected;
  });
  return { elements: [list, ...bodies], update };
}

/** Return a function that returns the shown models with their answers; unchanged questions are not asked again. */
function asker({ backend, models, state }) {
  const known = new Map(); // the last answer of each model, and its question
  async function answerOf(index, signal) {
    const model = models[index];
    const values = textArguments(model, state.get());
    if (values.text === "") return { index, model, answer: null, error: null };
    const question = JSON.stringify(values);
    try {
      if (known.get(index)?.question !== question) {
        known.set(index, { question, answer: await backend.ask(index, "answer", values, signal) });
      }
      return { index, model, answer: known.get(index).answer, error: null };
    } catch (error) {
      return { index, model, answer: null, error: error.message };
    }
  }
  return latest((signal) => Promise.all(shownIndices(models, state.get()).map((index) => answerOf(index, signal))));
}

/** Return the element that scrolls an element: that of the document, or that of a notebook. */
function scrollerOf(element) {
  const scrolls = ({ scrollHeight, clientHeight }, { overflowY }) =>
    scrollHeight > clientHeight && ["auto", "scroll"].includes(overflowY);
  let parent = element.parentElement;
  while (parent !== null && !scrolls(parent, getComputedStyle(parent))) parent = parent.parentElement;
  return parent ?? document.scrollingElement;
}

/** Build the page in an element; return a function that removes its observers. */
function build(page, context) {
  const { models, state } = context;
  const header = modelsElement(models, state);
  const text = textElement(models, state);
  const answer = stepsPanel(context);
  const panels = TABS.map((panel) => panel(context));
  const tabs = tabsElement(panels, state);
  const content = html("div", {},
    text.element,
    html("section", { class: "panel answer", "aria-label": answer.title }, html("h2", { class: "visually-hidden" },
      answer.title), answer.element),
    html("div", { class: "progress" }),
    tabs.elements);
  clear(page, html("header", {}, html("h1", {}, "lightning-tfm explore"), header.element), content);
  const ask = asker(context);
  let shown = shownIndices(models, state.get()).map((index) => ({ index, model: models[index], answer: null }));

  /** Draw the answer and the panels, which stay at their place on the screen if one of them has the focus. */
  function draw() {
    const [list] = tabs.elements;
    const focused = page.getRootNode().activeElement;
    const isBelow = tabs.elements.some((element) => element.contains(focused));
    const { top } = list.getBoundingClientRect();
    answer.update(shown);
    if (isBelow) scrollerOf(page).scrollBy(0, list.getBoundingClientRect().top - top);
    for (const panel of panels) panel.update(shown);
  }

  async function update() {
    for (const part of [header, text, tabs]) part.update(state.get());
    content.setAttribute("aria-busy", "true");
    shown = await ask();
    content.removeAttribute("aria-busy");
    draw();
  }

  let width = page.clientWidth;
  const resized = debounced(() => {
    if (page.clientWidth !== width) draw();
    width = page.clientWidth;
  }, TYPING_PAUSE);
  const observer = new ResizeObserver(resized);
  observer.observe(page);
  state.subscribe(update);
  if (state.get().text === "" && text.example() !== "") state.set({ text: text.example() });
  else update();
  return () => observer.disconnect();
}

/**
 * Start the page in an element.
 * @param {Element} root
 * @param {{kind: string, describe: function, ask: function}} backend
 * @returns {function()} removes the page.
 */
export function start(root, backend) {
  const state = new State(backend.kind === "widget" ? null : location);
  const page = html("div", { class: "page" }, html("p", { class: "muted" }, "Loading the network …"));
  let end = () => {};
  root.classList.add("explorer");
  root.dataset.backend = backend.kind;
  root.append(page);
  backend.describe().then(({ models }) => { end = build(page, { backend, models, state }); })
    .catch((error) => clear(page, errorLine(error.message)));
  return () => {
    end();
    state.close();
    page.remove();
  };
}
