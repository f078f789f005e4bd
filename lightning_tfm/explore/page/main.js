// The page: its header, the text, the answer, and the tabs of the other panels.

import { attentionPanel } from "./attention.js";
import { beamPanel } from "./beam.js";
import { comparePanel } from "./compare.js";
import { contributionsPanel } from "./contributions.js";
import { textForm } from "./controls.js";
import { clear, debounced, errorLine, html, rove } from "./dom.js";
import { neighborsPanel } from "./neighbors.js";
import { partsPanel } from "./parts.js";
import { asking } from "./questions.js";
import { samplesPanel } from "./samples.js";
import { State, textArguments } from "./state.js";
import { stepsPanel } from "./steps.js";

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
  if (models.length === 1) return html("div", { class: "models" }, about(models[0]));
  const boxes = models.map((_, index) => html("input", { type: "checkbox", onchange: () => {
    const checked = boxes.flatMap((box, i) => (box.checked ? [i] : []));
    state.set({ model: checked.length > 0 ? checked : [index] });
    boxes[index].checked ||= checked.length === 0;
  } }));
  state.follow((values) => boxes.forEach((box, i) => { box.checked = shownIndices(models, values).includes(i); }));
  return html("fieldset", { class: "models" }, html("legend", { class: "visually-hidden" }, "Shown models"),
    models.map((model, index) => html("label", { class: "check" }, boxes[index], html("span", {}, about(model)))));
}

/** Return the tabs of panels, and the panels. */
function tabsElements(panels, state) {
  const tabs = panels.map(({ id, title }) => html("button", { type: "button", role: "tab", "data-key": `tab ${id}`,
    onclick: () => state.set({ view: id }) }, title));
  const list = html("div", { class: "tabs", role: "tablist", "aria-label": "Questions" }, tabs);
  rove(list, (tab) => tab.click());
  const bodies = panels.map(({ id, title, element }) => html("section", { class: "panel", "data-panel": id,
    role: "tabpanel", "aria-label": title }, html("h2", { class: "visually-hidden" }, title), element));
  state.follow(({ view }) => panels.forEach(({ id }, i) => {
    const isSelected = id === (panels.some((panel) => panel.id === view) ? view : panels[0].id);
    tabs[i].setAttribute("aria-selected", String(isSelected));
    tabs[i].tabIndex = isSelected ? 0 : -1;
    bodies[i].hidden = !isSelected;
  }));
  return [list, ...bodies];
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
  const { backend, models, state } = context;
  const shownModels = () => shownIndices(models, state.get()).map((index) => ({ index, model: models[index] }));
  const example = () => shownModels().map(({ model }) => model.example).find(Boolean) ?? "";
  const exampleButton = html("button", { type: "button", onclick: () => state.set({ text: example() }) }, "Example");
  const answer = stepsPanel(context);
  const panels = TABS.map((panel) => panel(context));
  const tabs = tabsElements(panels, state);
  const content = html("div", {},
    textForm(context, "text", "Text", exampleButton),
    html("section", { class: "panel answer", "aria-label": answer.title }, html("h2", { class: "visually-hidden" },
      answer.title), answer.element),
    html("div", { class: "progress" }),
    tabs);
  clear(page, html("header", {}, html("h1", {}, "lightning-tfm explore"), modelsElement(models, state)), content);
  let shown = shownModels();

  /** Draw the answer and the panels, which stay at their place on the screen if one of them has the focus. */
  function draw() {
    const focused = page.getRootNode().activeElement;
    const isBelow = tabs.some((element) => element.contains(focused));
    const { top } = tabs[0].getBoundingClientRect();
    answer.update(shown);
    if (isBelow) scrollerOf(page).scrollBy(0, tabs[0].getBoundingClientRect().top - top);
    for (const panel of panels) panel.update(shown);
  }

  function questionsOf({ model }) {
    const values = textArguments(model, state.get());
    return values.text === "" ? {} : { answer: ["answer", values] };
  }

  const ask = asking(backend, content, questionsOf, (replied) => {
    shown = replied.map(({ replies, ...one }) => (
      { ...one, answer: replies.answer?.result ?? null, error: replies.answer?.error ?? null }
    ));
    draw();
  }, 2 * models.length);

  let width = page.clientWidth;
  const resized = debounced(() => {
    if (page.clientWidth !== width) draw();
    width = page.clientWidth;
  });
  const observer = new ResizeObserver(resized);
  observer.observe(page);
  if (state.get().text === "") state.set({ text: example() });
  state.follow(() => {
    exampleButton.hidden = example() === "";
    ask(shownModels());
  });
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
