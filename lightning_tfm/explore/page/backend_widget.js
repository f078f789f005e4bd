// Answers from the kernel of a notebook.

import { html } from "./dom.js";
import { start } from "./main.js";

/** Return a backend that asks through the messages of a widget's model, and the function that ends it. */
function widgetBackend(model) {
  const waiting = new Map(); // from the ids of messages to the functions that settle their promises
  let last = 0;

  function receive({ id, result, error }) {
    const { resolve, reject } = waiting.get(id) ?? {};
    waiting.delete(id);
    if (error !== undefined) reject?.(new Error(error));
    else resolve?.(result);
  }

  function send(message) {
    last += 1;
    const id = last;
    return new Promise((resolve, reject) => {
      waiting.set(id, { resolve, reject });
      model.send({ id, ...message });
    });
  }

  model.on("msg:custom", receive);
  const backend = {
    kind: "widget",
    describe: () => send({ question: "describe" }),
    ask: (index, question, values) => send({ model: index, question, arguments: values }),
  };
  return [backend, () => model.off("msg:custom", receive)];
}

/** Draw the page into the output of a cell, and return the function that ends it. */
function render({ model, el }) {
  const [backend, end] = widgetBackend(model);
  const root = html("div", { "data-lm-suppress-shortcuts": "true" }); // the keys belong to the page, not to JupyterLab
  const { jpThemeLight } = document.body.dataset;
  if (jpThemeLight !== undefined) root.dataset.theme = jpThemeLight === "true" ? "light" : "dark";
  el.append(root);
  const stop = start(root, backend);
  return () => {
    stop();
    end();
  };
}
