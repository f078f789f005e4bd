// Inputs of fields of the state, which follow its values.

import { debounced, html } from "./dom.js";
import { DEFAULTS } from "./state.js";

/**
 * Return a labeled input of a number.
 * @param {State} state
 * @param {string} name the field of the state.
 * @param {string} label
 * @param {object} attributes such as `min` and `max`; an invalid value is not used.
 */
export function numberField(state, name, label, attributes) {
  const write = () => {
    if (input.checkValidity()) state.set({ [name]: input.value === "" ? null : Number(input.value) });
  };
  const input = html("input", { type: "number", required: DEFAULTS[name] !== null, "data-key": name, ...attributes,
    oninput: debounced(write), onchange: () => (input.reportValidity() ? write() : undefined) });
  state.follow((values) => { if (!input.matches(":focus")) input.value = values[name] ?? ""; });
  return html("label", { class: "field" }, label, input);
}

/** Return a labeled choice between values; `titles` are their texts. */
export function choiceField(state, name, label, titles) {
  const select = html("select", { "data-key": name, onchange: () => state.set({ [name]: select.value }) },
    Object.entries(titles).map(([value, title]) => html("option", { value }, title)));
  state.follow((values) => { select.value = values[name]; });
  return html("label", { class: "field" }, label, select);
}

/** Return a form with a text, of several lines for language models, and the button that replaces it. */
export function textForm({ models, state }, name, label, button) {
  const isLong = models.some(({ task }) => task === "language_model");
  let written = null; // the text that the input has or had, while newer input is not used yet
  const write = () => {
    written = input.value;
    state.set({ [name]: written });
  };
  const input = html(isLong ? "textarea" : "input", { ...(isLong ? { rows: 2 } : { type: "text" }), autocomplete: "off",
    autocapitalize: "off", spellcheck: "false", "data-key": name, oninput: debounced(write) });
  state.follow((values) => {
    if (values[name] !== written) input.value = values[name];
    written = values[name];
  });
  return html("form", { class: "question", onsubmit: (event) => event.preventDefault() },
    html("label", { class: "field" }, label, input), button);
}
