// Answers from the kernel of a notebook.

import { html } from "./dom.js";
import { start } from "./main.js";

const DISCONNECTED = "the kernel has stopped; run the cell again";

/** Return a backend that asks by messages of a widget's model, and a function that disconnects it. */
function widgetBackend(model) {
  const waiting = new Map(); // from the ids of messages to the functions that settle their promises

  function receive({ id, result, error }) {
    const { resolve, reject } = waiting.get(id) ?? {};
    waiting.delete(id);
    if (error !== undefined) reject?.(new Error(error));
    else resolve?.(result);
  }

  function disconnect() {
    for (const { reject } of waiting.values()) reject(new Error(DISCONNECTED));
    waiting.clear();
  }

  function send(message) {
    const id = Math.random(); // unique, since all views of a widget receive all answers
    return new Promise((resolve, reject) => {
      waiting.set(id, { resolve, reject });
      try {
        model.send({ id, ...message });
      } catch {
        disconnect();
      }
    });
  }

  const events = { "msg:custom": receive, comm_live_update: disconnect };
  for (const [name, listener] of Object.entries(events)) model.on(name, listener);
  const backend = {
    kind: "widget",
    describe: () => send({ question: "describe" }),
    ask: (index, question, values) => send({ model: index, question, arguments: values }),
  };
  return [backend, () => {
    for (const [name, listener] of Object.entries(events)) model.off(name, listener);
  }];
}

/** Draw the page in the output of a cell; return a function that removes it. */
function render({ model, el }) {
  const [backend, end] = widgetBackend(model);
  const root = html("div", { onkeydown: (event) => event.stopPropagation() }); // JupyterLab would delete cells by "dd"
  el.append(root);
  const stop = start(root, backend);
  return () => {
    stop();
    end();
  };
}
