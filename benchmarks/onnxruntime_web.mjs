// Compares the page's interpreter of ONNX files with onnxruntime-web: node onnxruntime_web.mjs MODULES FOLDER ...
// onnxruntime-web is installed in MODULES. Each FOLDER is an export of a network from a source to a target, for which a
// line of JSON is printed, see `compareNetwork`.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { join } from "node:path";
import { beamSearch, decodeTokens, greedyChoice, mulberry32 } from "../lightning_tfm/explore/page/decoding.js";
import { OnnxGraph } from "../lightning_tfm/explore/page/onnx.js";
import { tensorOf } from "../lightning_tfm/explore/page/tensors.js";
import { EOS, NUM_SPECIAL } from "../lightning_tfm/explore/page/tokenizers.js";

const INPUTS = 200;
const MAX_SYMBOLS = 40;
const STEPS = 8; // of given tokens, whose logits and attention weights are compared
const BEAM_SIZE = 5;

const [modules, ...folders] = process.argv.slice(2);
const ort = createRequire(join(modules, "index.js"))("onnxruntime-web");
ort.env.wasm.numThreads = 1;

/** Return a function of a graph's inputs in the page's interpreter. */
function loadInterpreter(path) {
  const graph = new OnnxGraph(new Uint8Array(readFileSync(path)));
  return (feeds) => {
    const begin = performance.now();
    const outputs = graph.run(feeds);
    return { outputs, milliseconds: performance.now() - begin };
  };
}

/** Return the same in onnxruntime-web. The time excludes the conversion of tensors to its classes and back. */
async function loadRuntime(path) {
  const session = await ort.InferenceSession.create(readFileSync(path));
  const toRuntime = ({ type, dims, data }) =>
    new ort.Tensor(type, type === "int64" ? BigInt64Array.from(data, BigInt) : data, dims);
  const fromRuntime = ({ type, dims, data }) =>
    tensorOf(type, dims, type === "int64" ? Array.from(data, Number) : data);
  const mapped = (tensors, change) =>
    Object.fromEntries(Object.entries(tensors).map(([name, tensor]) => [name, change(tensor)]));
  return async (feeds) => {
    const inputs = Object.fromEntries(session.inputNames.map((name) => [name, toRuntime(feeds[name])]));
    const begin = performance.now();
    const results = await session.run(inputs);
    return { milliseconds: performance.now() - begin, outputs: mapped(results, fromRuntime) };
  };
}

/**
 * Return {result of `compute(run)`, calls: [name, {outputs, milliseconds}] of `run`}.
 *
 * `run(name, feeds)` returns the outputs of a graph. Since the page's decoding is synchronous, but onnxruntime-web is
 * not, `compute` is started again after each call, with the outputs of the earlier ones.
 */
async function replay(compute, graphs) {
  const calls = [];
  for (;;) {
    let done = 0;
    let next = null;
    const run = (name, feeds) => {
      if (done < calls.length) return calls[done++][1].outputs;
      next = [name, feeds];
      throw next;
    };
    try {
      return { result: compute(run), calls };
    } catch (error) {
      if (error !== next) throw error;
      calls.push([next[0], await graphs[next[0]](next[1])]);
    }
  }
}

/** Return the functions `encode` and `step` of a network, as those of backend_file.js. */
function networkOf(run, config, headMask) {
  const encode = (ids) => {
    const source = tensorOf("int64", [1, ids.length], ids);
    const outputs = run("encode", { source, head_mask: headMask });
    return Object.fromEntries(Object.keys(config.state).map((name) => [name, outputs[name]]));
  };
  const step = (tokens, state) => {
    const token = tensorOf("int64", [tokens.length], tokens);
    const outputs = run("decode_step", { token, head_mask: headMask, ...state });
    const changed = Object.entries(config.state).filter(([, next]) => next !== null);
    const { dims: [rows, size], data } = outputs.logits;
    const logits = Array.from({ length: rows }, (_, row) => data.subarray(row * size, (row + 1) * size));
    return { logits, state: { ...state, ...Object.fromEntries(changed.map(([name, next]) => [name, outputs[next]])) } };
  };
  return { encode, step };
}

/** Return the largest difference of the logits and attention weights of two lists of calls. */
function largestDifference(calls, others) {
  let largest = 0;
  calls.forEach(([, { outputs }], i) => {
    for (const name of Object.keys(outputs).filter((each) => each === "logits" || each.startsWith("weights."))) {
      const other = others[i][1].outputs[name].data;
      outputs[name].data.forEach((value, k) => { largest = Math.max(largest, Math.abs(value - other[k])); });
    }
  });
  return largest;
}

const median = (values) => values.toSorted((a, b) => a - b)[Math.floor(values.length / 2)];

/**
 * Return {inputs: their number, difference: the largest, greedy, beam: numbers of equal outputs, page, runtime: median
 * milliseconds of a step of greedy decoding} for random inputs, every other one with random heads off.
 */
async function compareNetwork(folder) {
  const config = JSON.parse(readFileSync(join(folder, "model.json"), "utf8"));
  const [page, runtime] = [{}, {}];
  for (const name of ["encode", "decode_step"]) {
    page[name] = loadInterpreter(join(folder, `${name}.onnx`));
    runtime[name] = await loadRuntime(join(folder, `${name}.onnx`));
  }
  const random = mulberry32(0);
  const draw = (length) => Array.from({ length }, () =>
    NUM_SPECIAL + Math.floor(random() * (config.vocab_size - NUM_SPECIAL)));
  const maxSymbols = Math.min(MAX_SYMBOLS, (config.max_source_length ?? Infinity) - 1);
  const maxLength = config.max_target_length;
  const shape = [config.attention.length, Math.max(...config.attention.map(({ heads }) => heads))];
  const totals = { inputs: INPUTS, difference: 0, greedy: 0, beam: 0 };
  const times = { page: [], runtime: [] };
  for (let i = 0; i < INPUTS; i++) {
    const source = [...draw(1 + (i % maxSymbols)), EOS];
    const tokens = draw(Math.min(STEPS, maxLength));
    const mask = Array.from({ length: shape[0] * shape[1] }, () => (i % 2 && random() < 0.5 ? 0 : 1));
    const both = async (compute) => {
      const computeWith = (run) => {
        const { encode, step } = networkOf(run, config, tensorOf("float32", shape, mask));
        return compute(step, encode(source));
      };
      return [await replay(computeWith, page), await replay(computeWith, runtime)];
    };
    const [given, sameGiven] = await both((step, state) =>
      tokens.reduce((before, token) => step([token], before).state, state));
    totals.difference = Math.max(totals.difference, largestDifference(given.calls, sameGiven.calls));
    const greedy = await both((step, state) =>
      decodeTokens(step, state, maxLength, greedyChoice()).map(({ token }) => token));
    const beam = await both((step, state) =>
      beamSearch(step, state, maxLength, BEAM_SIZE).outputs.map(({ tokens: output }) => output));
    const isEqual = ([one, other]) => JSON.stringify(one.result) === JSON.stringify(other.result);
    totals.greedy += isEqual(greedy);
    totals.beam += isEqual(beam);
    greedy.forEach(({ calls: [, ...steps] }, k) =>
      times[["page", "runtime"][k]].push(...steps.map(([, { milliseconds }]) => milliseconds)));
  }
  return { ...totals, page: median(times.page), runtime: median(times.runtime) };
}

for (const folder of folders) console.log(JSON.stringify(await compareNetwork(folder)));
