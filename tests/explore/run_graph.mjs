// Runs ONNX graphs in the page's interpreter: node run_graph.mjs MODULE REQUESTS.json RESULTS.json
// REQUESTS: [{model: path, feeds: {name: tensor}}]; RESULTS: [{name: tensor} or {error: message}].
// The data of a tensor are doubles in base64, so that infinities and NaN survive.
import { readFileSync, writeFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const [module, requests, results] = process.argv.slice(2);
const { OnnxGraph } = await import(pathToFileURL(module).href);

const mapTensors = (tensors, change) => {
  return Object.fromEntries(Object.entries(tensors).map(([name, x]) => [name, { ...x, data: change(x.data) }]));
};
const decode = (text) => new Float64Array(new Uint8Array(Buffer.from(text, "base64")).buffer);
const encode = (data) => Buffer.from(Float64Array.from(data).buffer).toString("base64");

const graphs = new Map();
const answers = JSON.parse(readFileSync(requests, "utf8")).map(({ model, feeds }) => {
  try {
    if (!graphs.has(model)) graphs.set(model, new OnnxGraph(new Uint8Array(readFileSync(model))));
    return mapTensors(graphs.get(model).run(mapTensors(feeds, decode)), encode);
  } catch (error) {
    return { error: error.message };
  }
});
writeFileSync(results, JSON.stringify(answers));
