// Answers from the server that sent the page.

import { start } from "./main.js";

/** Return the result of a request, or reject with its line. */
async function requestServer(token, path, question, signal) {
  const headers = { "X-Token": token, "Content-Type": "application/json" };
  const options = question === undefined ? { headers }
    : { headers, signal, method: "POST", body: JSON.stringify(question) };
  const response = await fetch(path, options).catch(() => {
    throw new Error("The server has stopped; run the command again.");
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
