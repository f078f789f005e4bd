// Answers from the server that sent the page.

import { start } from "./main.js";

/** Reason why the server cannot be reached any more; null before. */
let stopped = null;

/** Return the result of a request, or reject with its line; a server that has stopped is not asked again. */
async function requestServer(token, path, question, signal) {
  if (stopped !== null) throw stopped;
  const headers = { "X-Token": token, "Content-Type": "application/json" };
  const options = question === undefined ? { headers }
    : { headers, signal, method: "POST", body: JSON.stringify(question) };
  const response = await fetch(path, options).catch((error) => {
    if (signal?.aborted) throw error;
    stopped ??= new Error(`The server has stopped; to start it again, run: ${globalThis.EXPLORER_COMMAND}`);
    throw stopped;
  });
  if (!response.headers.get("Content-Type")?.startsWith("application/json")) throw new Error(await response.text());
  const { result, error } = await response.json();
  if (error !== undefined) throw new Error(error);
  return result;
}

/** Start the page, with the token in its address. */
function startServer() {
  const token = new URLSearchParams(location.search).get("token") ?? "";
  start(document.querySelector("#explorer"), {
    kind: "server",
    describe: () => requestServer(token, "describe"),
    ask: (model, question, values, signal) =>
      requestServer(token, "ask", { model, question, arguments: values }, signal),
  });
}

startServer();
