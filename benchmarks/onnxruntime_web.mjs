// Comparison of the page's interpreter of ONNX files with onnxruntime-web, in Node or a browser: see `compareNetwork`.

import { beamSearch, decodeTokens, greedyChoice, mulberry32, topIds } from "../lightning_tfm/explore/page/decoding.js";
import { OnnxGraph } from "../lightning_tfm/explore/page/onnx.js";
import { tensorOf } from "../lightning_tfm/explore/page/tensors.js";
import { EOS, NUM_SPECIAL } from "../lightning_tfm/explore/page/tokenizers.js";

const MAX_SYMBOLS = 40;
const STEPS = 8; // of given tokens, whose logits and attention weights are compared
const BEAM_SIZE = 5;

/** Return a function of a graph's inputs in the page's interpreter. */
function loadInterpreter(file) {
  const graph = new OnnxGraph(file);
  return (feeds) => {
    const begin = performance.now();
    const outputs = graph.run(feeds);
    return { outputs, milliseconds: performance.now() - begin };
  };
}

/** Return the same in onnxruntime-web. The time excludes the conversion of tensors to its classes and back. */
async function loadRuntime(ort, file) {
  const session = await ort.InferenceSession.create(file);
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

/** Return the rows of logits (rows, V) or (1, rows, V). */
function rowsOf({ dims, data }) {
  const size = dims.at(-1);
  return Array.from({ length: data.length / size }, (_, row) => data.subarray(row * size, (row + 1) * size));
}

/** Return the functions `forward`, `encode` and `step` of a network, as those of backend_file.js. */
function networkOf(run, config, headMask) {
  const forward = (ids) => {
    const text = tensorOf("int64", [1, ids.length], ids);
    return rowsOf(run("encode", { text, head_mask: headMask }).logits);
  };
  const encode = (ids) => {
    const source = tensorOf("int64", [1, ids.length], ids);
    const outputs = run("encode", { source, head_mask: headMask });
    return Object.fromEntries(Object.keys(config.state).map((name) => [name, outputs[name]]));
  };
  const step = (tokens, state) => {
    const token = tensorOf("int64", [tokens.length], tokens);
    const outputs = run("decode_step", { token, head_mask: headMask, ...state });
    const changed = Object.entries(config.state).filter(([, next]) => next !== null);
    return { logits: rowsOf(outputs.logits), state: { ...state, ...Object.fromEntries(changed.map(([name, next]) => [name, outputs[next]])) } };
  };
  return { forward, encode, step };
}

/** Return the largest difference of the logits and attention weights of two lists of calls. */
function largestDifference(calls, others) {
  let largest = 0;
  calls.forEach(([, { outputs }], i) => {
    for (const name of Object.keys(outputs).filter((each) => each === "logits" || each.startsWith("weights."))) {
      const [one, other] = [outputs[name], others[i][1].outputs[name]];
      if (String(one.dims) !== String(other.dims)) throw new Error(`${name} must be ${other.dims}, but is ${one.dims}`);
      one.data.forEach((value, k) => { largest = Math.max(largest, Math.abs(value - other.data[k])); });
    }
  });
  return largest;
}

const median = (values) => values.toSorted((a, b) => a - b)[Math.floor(values.length / 2)];

/**
 * Return {inputs: their number, difference: the largest, greedy, beam: numbers of equal outputs, page, runtime: median
 * milliseconds of a step of greedy decoding} for random inputs of 1 to MAX_SYMBOLS symbols, each length by turns with
 * all heads on and random ones off.
 *
 * The greedy output of a network without a decoder is the id of the largest logit at each position, its milliseconds are
 * those of an input, and it has no output of a beam search.
 * @param {object} ort the module of onnxruntime-web.
 * @param {object} config the content of model.json.
 * @param {object} files the graphs by name, as arrays of bytes.
 * @param {number} inputs the number of inputs.
 */
export async function compareNetwork(ort, config, files, inputs) {
  ort.env.wasm.numThreads = 1;
  const [page, runtime] = [{}, {}];
  for (const [name, file] of Object.entries(files)) {
    page[name] = loadInterpreter(file);
    runtime[name] = await loadRuntime(ort, file);
  }
  const isDecoder = "decode_step" in files;
  const random = mulberry32(0);
  const draw = (length) => Array.from({ length }, () =>
    NUM_SPECIAL + Math.floor(random() * (config.vocab_size - NUM_SPECIAL)));
  const maxSymbols = Math.min(MAX_SYMBOLS, (config.max_source_length ?? Infinity) - 1);
  const maxLength = config.max_target_length;
  const shape = [config.attention.length, Math.max(...config.attention.map(({ heads }) => heads))];
  const totals = { inputs, difference: 0, greedy: 0, beam: isDecoder ? 0 : null };
  const times = { page: [], runtime: [] };
  const isEqual = ([one, other]) => JSON.stringify(one.result) === JSON.stringify(other.result);
  for (let i = 0; i < inputs; i++) {
    const source = [...draw(1 + (Math.floor(i / 2) % maxSymbols)), EOS];
    const mask = Array.from({ length: shape[0] * shape[1] }, () => (i % 2 && random() < 0.5 ? 0 : 1));
    const both = async (compute) => {
      const computeWith = (run) => compute(networkOf(run, config, tensorOf("float32", shape, mask)));
      return [await replay(computeWith, page), await replay(computeWith, runtime)];
    };
    const compare = ([one, other]) => {
      totals.difference = Math.max(totals.difference, largestDifference(one.calls, other.calls));
    };
    let greedy;
    if (isDecoder) {
      const tokens = draw(Math.min(STEPS, maxLength));
      compare(await both(({ encode, step }) =>
        tokens.reduce((before, token) => step([token], before).state, encode(source))));
      greedy = await both(({ encode, step }) =>
        decodeTokens(step, encode(source), maxLength, greedyChoice()).map(({ token }) => token));
      const beam = await both(({ encode, step }) =>
        beamSearch(step, encode(source), maxLength, BEAM_SIZE).outputs.map(({ tokens: output }) => output));
      totals.beam += isEqual(beam);
    } else {
      greedy = await both(({ forward }) => forward(source).map((logits) => topIds(logits, 1)[0]));
      compare(greedy);
    }
    totals.greedy += isEqual(greedy);
    greedy.forEach(({ calls }, k) => {
      const timed = isDecoder ? calls.slice(1) : calls;
      times[["page", "runtime"][k]].push(...timed.map(([, { milliseconds }]) => milliseconds));
    });
  }
  return { ...totals, page: median(times.page), runtime: median(times.runtime) };
}
