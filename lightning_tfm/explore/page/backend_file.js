// Answers from the networks in the page itself, which the ONNX interpreter computes. Results are those of `Explorer`.

import {
  beamSearch, continueText, decodeTokens, greedyChoice, logSoftmax, mulberry32, sampleChoice, topIds,
} from "./decoding.js";
import { html } from "./dom.js";
import { start } from "./main.js";
import { OnnxGraph } from "./onnx.js";
import { makeTensor } from "./tensors.js";
import { BOS, EOS, NUM_SPECIAL, PAD, nameSymbols, normalizeLine, pythonRepr, stripFields, tokenizerOf } from "./tokenizers.js";

const MASK_ID = BOS;
const SPACED_MASK_ID = -MASK_ID; // a mask that includes the space before it
const MASK_SYMBOL = "[MASK]";

/** Rules of arguments by name: [whether a value is valid, the rule, a valid value]. */
const ARGUMENT_RULES = {
  temperature: [(value) => value === 0 || (value >= 0.01 && value <= 100), "0 or from 0.01 to 100", 0.8],
  top_k: [(value) => value === null || value >= 1, "at least 1", 10],
  top_p: [(value) => value === null || (value > 0 && value <= 1), "above 0 and at most 1", 0.9],
  seed: [(value) => value >= 0 && value < 2 ** 32, `from 0 to ${2 ** 32 - 1}`, 1],
};

/** Return the rule of a number from 1 to a limit. */
const upTo = (limit, example) => [(value) => value >= 1 && value <= limit, `from 1 to ${limit}`, example];

function checkArguments(values, limits) {
  const rules = { beam_size: upTo(limits.beam_size, 5), ...ARGUMENT_RULES, max_tokens: upTo(limits.max_tokens, 100) };
  for (const [name, [isValid, rule, example]] of Object.entries(rules)) {
    const value = values[name];
    if (value !== undefined && !isValid(value)) {
      throw new Error(`${name} must be ${rule}, but is ${value}; try ${example}`);
    }
  }
}

const idsTensor = (ids, ...dims) => makeTensor("int64", dims, Float64Array.from(ids));

/** Return the rows of a head in weights (1, H, T, S), padded with zeros to a length. */
function weightRows({ dims: [, , T, S], data }, head, length) {
  return Array.from({ length: T }, (_, row) => {
    const begin = (head * T + row) * S;
    const values = Array.from(data.subarray(begin, begin + S), (value) => Math.round(value * 1e4) / 1e4);
    return [...values, ...Array(length - S).fill(0)];
  });
}

/** The graphs of a network as functions, with some heads off. */
class FileNetwork {
  constructor(graphs, config, off) {
    const { attention } = config;
    const width = Math.max(1, ...attention.map(({ heads }) => heads));
    const mask = makeTensor("float32", [Math.max(1, attention.length), width]).data.fill(1);
    const places = attention.flatMap(({ layer, heads }, row) =>
      Array.from({ length: heads }, (_, head) => [`${layer}.${head}`, row * width + head]));
    const placeOf = new Map(places);
    for (const name of off) {
      if (!placeOf.has(name)) throw new Error(`off must name heads, but the network has no ${pythonRepr(name)}`);
      mask[placeOf.get(name)] = 0;
    }
    this.headMask = makeTensor("float32", [mask.length / width, width], mask);
    Object.assign(this, { graphs, config });
  }

  /** Return {outputs of a graph, weights: those of attention layers among them}. */
  run(name, feeds) {
    const graph = this.graphs[name];
    const outputs = graph.run({ ...feeds, head_mask: this.headMask });
    const layers = this.config.attention.filter(({ graphs }) => graphs.includes(name)).map(({ layer }) => layer);
    return { outputs, weights: Object.fromEntries(layers.map((layer) => [layer, outputs[`weights.${layer}`]])) };
  }

  /** Return {rows: the logits at each position, or of the classes, weights} of a text. */
  forward(ids) {
    const sizes = Array.isArray(ids[0]) ? [ids[0].length] : []; // of tokens with several ids
    const { outputs, weights } = this.run("encode", { text: idsTensor(ids.flat(), 1, ids.length, ...sizes) });
    return { rows: logitRows(outputs.logits), weights };
  }

  /** Return {state, weights} of a source. */
  encode(ids) {
    const { outputs, weights } = this.run("encode", { source: idsTensor(ids, 1, ids.length) });
    return { state: Object.fromEntries(Object.keys(this.config.state).map((name) => [name, outputs[name]])), weights };
  }

  /** Return the result of a step, see decoding.js, with its weights. */
  step(tokens, state) {
    const { outputs, weights } = this.run("decode_step", { token: idsTensor(tokens, tokens.length), ...state });
    const changed = Object.entries(this.config.state).filter(([, next]) => next !== null);
    const next = Object.fromEntries(changed.map(([name, output]) => [name, outputs[output]]));
    return { logits: logitRows(outputs.logits), state: { ...state, ...next }, weights };
  }

  /**
   * Return the attention maps of all layers.
   *
   * @param {object} encoded the weights of `encode` or `forward`
   * @param {object[]} steps the results of the steps
   * @param {function(string): [string[], string[], number|null]} axes a function from a side to the symbols of its rows
   *   and columns, and the row that predicts the first step
   */
  maps(encoded, steps, axes) {
    return this.config.attention.flatMap(({ layer, heads, side }) => {
      const isEncoded = side === "encoder" || side === "sequence";
      const decoded = side === "encoder" ? [] : steps.map(({ weights }) => weights);
      const parts = [...(isEncoded ? [encoded] : []), ...decoded];
      if (!parts.every((weights) => layer in weights)) return []; // such as linear attention, whose steps have none
      const [queries, keys, first] = axes(side);
      const weights = Array.from({ length: heads }, (_, head) =>
        parts.flatMap((part) => weightRows(part[layer], head, keys.length)));
      return [{ layer, side, queries, keys, first_step: first, weights }];
    });
  }
}

/** Return the rows of logits (..., V). */
function logitRows({ dims, data }) {
  const size = dims.at(-1);
  return Array.from({ length: data.length / size }, (_, row) => data.subarray(row * size, (row + 1) * size));
}

/** Model of a page, which answers questions; base class of the models of all tasks. */
class FileModel {
  excluded = []; // ids that are no alternatives

  constructor(config, limits, graphs) {
    Object.assign(this, { config, limits, graphs, tokenizer: tokenizerOf(config.tokenizer) });
  }

  network(changes = {}) {
    return new FileNetwork(this.graphs, this.config, changes.off ?? []);
  }

  symbol(id) {
    return this.tokenizer.symbol(id);
  }

  /** Return {ids, note} of a text, or throw an Error with the reason why it has no answer. */
  encode(text) {
    try {
      return this.encodeLine(normalizeLine(text));
    } catch (error) {
      throw new Error(`no answer to ${pythonRepr(text)}: ${error.message}`);
    }
  }

  tokenize(line) {
    if (line === "") throw new Error("the text is empty");
    const ids = this.tokenizer.encode(line);
    if (ids.length === 0) throw new Error("it has no tokens");
    return ids;
  }

  /** Return a warning if a source has several columns but is read as one text, or lacks its features; throw an Error
   * if it has too many columns, or too few sources. */
  checkColumns(source) {
    const [expected, number] = [this.tokenizer.numColumns, source.split("\t").length];
    const sources = this.tokenizer.numSources;
    const count = `has ${number} columns, separated by tabs`;
    if (expected !== null && sources > 1 && (number < sources || number > expected)) {
      const kind = `${sources} sources${expected > sources ? " and their features" : ""}`;
      throw new Error(`it must hold ${expected} columns, separated by tabs, of ${kind}, but has ${number}`);
    }
    if (expected === null && number > 1) {
      return `it ${count}, read as one text; select the column of the source, for example with cut -f1`;
    }
    if (expected !== null && number > expected) {
      const [columns, one, fields] = expected === 1 ? ["column of the source", "it", "1"]
        : ["columns of the source and its features", "them", "1,2"];
      throw new Error(`it must hold only the ${columns}, but ${count}; select ${one}, as with cut -f${fields}`);
    }
    if (expected !== null && number < expected) {
      const space = source.lastIndexOf(" ");
      const last = source.slice(space + 1);
      if (space >= 0 && this.tokenizer.unknownSymbols("\t".repeat(sources) + last).length === 0) {
        return `it has no features, which follow a tab; type a tab before ${pythonRepr(last)} in place of the space`;
      }
      return "it has no features, unlike the training data; add a tab and the features";
    }
    return "";
  }

  refuseLength(tokens, needed) {
    const rule = `the model has max_length ${this.config.max_length} positions; try max_length ${needed}`;
    throw new Error(`the longest ${tokens} tokens, but ${rule}`);
  }

  /** Return other warnings, and those of unknown tokens and of unusual length, for the ids and the texts of a line. */
  note(ids, texts, ...others) {
    const notes = others.filter(Boolean);
    const unknown = texts.flatMap((text) => this.tokenizer.unknownSymbols(text));
    const { longest_source: longest, shortest_source: shortest } = this.config;
    if (unknown.length > 0) {
      notes.push(`${unknown.length} of ${ids.length} tokens are not in the vocabulary: ${nameSymbols(unknown)}`);
    }
    if (longest !== null && ids.length > longest) {
      notes.push(`it has ${ids.length} tokens, more than any training text (${longest})`);
    }
    if (shortest !== null && ids.length < shortest) {
      notes.push(`it has ${ids.length} tokens, fewer than any training text (${shortest})`);
    }
    return notes.join("; ");
  }

  /** Throw an Error unless a prefix has at most a number of ids, and ids of symbols only, except EOS at its end. */
  checkPrefix(prefix, maxLength, canEnd) {
    if (prefix.length > maxLength) {
      throw new Error(`prefix must have at most ${maxLength} ids, but has ${prefix.length}`);
    }
    const last = this.config.vocab_size - 1;
    const wrong = prefix.find((id, place) =>
      !(id >= NUM_SPECIAL && id <= last) && !(canEnd && id === EOS && place === prefix.length - 1));
    if (wrong !== undefined) throw new Error(`prefix must have ids from ${NUM_SPECIAL} to ${last}, but has ${wrong}`);
  }

  /** Return a step of an answer for logits (V) and the chosen id. */
  answerStep(logits, id, forced = false, given = false) {
    const values = logSoftmax(logits);
    const ranked = values.map((value, other) => (this.excluded.includes(other) ? -Infinity : value));
    const ids = topIds(ranked, Math.min(this.limits.alternatives, ranked.length - this.excluded.length));
    if (!ids.includes(id)) ids[ids.length - 1] = id;
    const [chosen, ...alternatives] = [id, ...ids].map((other) => (
      { id: other, symbol: this.symbol(other), probability: Math.exp(values[other]) }
    ));
    return { ...chosen, alternatives, forced, given, log_probability: values[id] };
  }

  /** Return the result of `answer`. */
  result(text, note, source, output, steps, attention) {
    const logProbability = steps.reduce((sum, step) => sum + step.log_probability, 0);
    for (const step of steps) delete step.log_probability;
    return { text, note, source, output, log_probability: logProbability, steps, attention };
  }

  /** Return the result of `sample`, for the steps of decoding. */
  sampled(text, steps, given) {
    const values = steps.map(({ token, logits: [row] }) => [token, logSoftmax(row)[token]]);
    const sampledStep = ([id, value]) => (
      { id, symbol: this.symbol(id), probability: Math.exp(value), surprise: -value / Math.LN2 }
    );
    return { text, steps: values.map(sampledStep), given };
  }

  choice({ temperature = 1, top_k: topK = null, top_p: topP = null, seed = 0 }) {
    if (temperature > 0) return sampleChoice(mulberry32(seed), { temperature, topK, topP });
    if (topK !== null || topP !== null) {
      throw new Error("top_k and top_p need a temperature above 0, but it is 0; try 1");
    }
    return greedyChoice();
  }
}

/** Model from a source to a target. */
class Seq2SeqModel extends FileModel {
  excluded = [PAD, BOS];

  encodeLine(line) {
    const source = stripFields(line);
    const note = this.checkColumns(source);
    const ids = this.tokenize(source);
    const { max_source_length: longest, max_target_length: target, attention } = this.config;
    const length = ids.length + 1; // with EOS
    if (longest !== null && length > longest) {
      const isJoint = attention.some(({ side }) => side === "sequence");
      const needed = length + (longest < this.config.max_length ? target : 0); // coupled positions number both from 0
      this.refuseLength(isJoint ? `source and target have ${length} + ${target}` : `source has ${length}`, needed);
    }
    return { ids: [...ids, EOS], note: this.note(ids, [source], note) };
  }

  answer({ text, prefix = [], changes }) {
    const { ids, note } = this.encode(text);
    const { max_target_length: maxLength } = this.config;
    this.checkPrefix(prefix, maxLength, true);
    const network = this.network(changes);
    const { state, weights } = network.encode(ids);
    const decoded = decodeTokens(network.step.bind(network), state, maxLength, greedyChoice(prefix));
    const steps = decoded.map(({ token, logits: [row] }, place) => this.answerStep(row, token, place < prefix.length));
    const source = [...this.tokenizer.split(stripFields(normalizeLine(text))), "EOS"];
    const outputs = steps.map(({ symbol }) => symbol);
    const inputs = ["BOS", ...outputs.slice(0, -1)];
    const sequence = [...source, ...inputs];
    const axes = (side) => ({
      encoder: [source, source, null],
      source: [outputs, source, 0],
      target: [inputs, inputs, 0],
      sequence: [sequence, sequence, source.length],
    })[side];
    const output = this.tokenizer.decode(decoded.map(({ token }) => token));
    return this.result(text, note, source, output, steps, network.maps(weights, decoded, axes));
  }

  beam({ text, beam_size: beamSize, changes }) {
    const { ids } = this.encode(text);
    const network = this.network(changes);
    const { state } = network.encode(ids);
    const { nodes, outputs } = beamSearch(network.step.bind(network), state, this.config.max_target_length, beamSize);
    return {
      nodes: nodes.map((node) => ({ ...node, symbol: node.token === null ? "" : this.symbol(node.token) })),
      outputs: outputs.map(({ tokens, ...output }) => ({ text: this.tokenizer.decode(tokens), ...output })),
    };
  }

  sample({ text, max_tokens: number, ...sampling }) {
    const { ids } = this.encode(text);
    const network = this.network();
    const { state } = network.encode(ids);
    const length = Math.min(number, this.config.max_target_length);
    const steps = decodeTokens(network.step.bind(network), state, length, this.choice(sampling));
    return this.sampled(this.tokenizer.decode(steps.map(({ token }) => token)), steps, 0);
  }
}

/** Model that continues a text. */
class LanguageModel extends FileModel {
  excluded = [PAD, BOS, EOS];

  encodeLine(line) {
    const ids = this.tokenize(line);
    const note = this.note(ids, [line]);
    const { max_length: positions } = this.config;
    if (ids.length <= positions) return { ids, note };
    const used = Math.max(1, Math.floor(positions / 2));
    const cut = `only the last ${used} of ${ids.length} tokens are used`;
    return { ids: ids.slice(-used), note: [note, cut].filter(Boolean).join("; ") };
  }

  continued(network, ids, number, choice) {
    const encode = (tokens) => network.encode(tokens).state;
    return continueText(encode, network.step.bind(network), ids, number, this.config.max_length, choice);
  }

  answer({ text, prefix = [], changes }) {
    const { ids, note } = this.encode(text);
    const number = Math.min(this.limits.continuation, this.config.max_length - ids.length);
    this.checkPrefix(prefix, number, false);
    const network = this.network(changes);
    const decoded = this.continued(network, ids, number, greedyChoice(prefix));
    const given = ids.length - 1;
    const steps = decoded.map(({ token, logits: [row] }, place) =>
      this.answerStep(row, token, place < given + prefix.length, place < given));
    const symbols = [this.symbol(ids[0]), ...steps.map(({ symbol }) => symbol)];
    const inputs = symbols.slice(0, -1);
    const output = this.tokenizer.decode([ids[0], ...decoded.map(({ token }) => token)]);
    const attention = network.maps(network.encode([]).weights, decoded, () => [inputs, inputs, 0]);
    return this.result(text, note, symbols.slice(0, ids.length), output, steps, attention);
  }

  sample({ text, max_tokens: number, ...sampling }) {
    const { ids } = this.encode(text);
    const steps = this.continued(this.network(), ids, number, this.choice(sampling));
    const tokens = steps.map(({ token }) => token);
    return this.sampled(this.tokenizer.decode([ids[0], ...tokens]), steps, ids.length - 1);
  }
}

/** Base class of models that read a text at once. */
class TextModel extends FileModel {
  answer({ text, prefix = [], changes }) {
    if (prefix.length > 0) throw new Error(`prefix must be empty for this network, but is ${JSON.stringify(prefix)}`);
    const { note } = this.encode(text);
    const line = stripFields(normalizeLine(text));
    const { ids } = this.encode(line);
    const network = this.network(changes);
    const { rows, weights } = network.forward(ids.map((id) => (id === SPACED_MASK_ID ? MASK_ID : id)));
    const { symbols, steps, output, first } = this.read(line, ids, rows);
    return this.result(text, note, symbols, output, steps, network.maps(weights, [], () => [symbols, symbols, first]));
  }
}

/** Model that fills in masked tokens. */
class MaskedModel extends TextModel {
  excluded = [PAD, BOS, EOS];

  encodeLine(line) {
    if (stripFields(line) === "") throw new Error("the text is empty");
    const parts = line.split(MASK_SYMBOL);
    if (parts.length < 2) throw new Error(`it must have a masked token, written as ${MASK_SYMBOL}, but has none`);
    const ids = [];
    parts.forEach((part, place) => {
      const isMasked = place < parts.length - 1;
      const isSpaced = isMasked && part.endsWith(" ") && this.tokenizer.spacedIds.length > 0;
      const text = isSpaced ? part.slice(0, -1) : part;
      if (text !== "") ids.push(...(ids.length > 0 ? this.tokenizer.encodeRest(text) : this.tokenizer.encode(text)));
      if (isMasked) ids.push(isSpaced ? SPACED_MASK_ID : MASK_ID);
    });
    if (ids.length > this.config.max_length) this.refuseLength(`input has ${ids.length}`, ids.length);
    return { ids, note: this.note(ids, parts) };
  }

  /** Return the symbols, steps and output of a text, for the logits at each position. */
  read(line, ids, rows) {
    const spaced = new Set(this.tokenizer.spacedIds);
    const filled = ids.map((id, place) => {
      if (id >= NUM_SPECIAL) return id;
      const isCandidate = (other) => other >= NUM_SPECIAL && (id === MASK_ID || spaced.has(other));
      return topIds(rows[place].map((value, other) => (isCandidate(other) ? value : -Infinity)), 1)[0];
    });
    const isMasked = ids.map((id) => id < NUM_SPECIAL);
    return {
      symbols: filled.map((id, place) => (isMasked[place] ? MASK_SYMBOL : this.tokenizer.decode([id]))),
      steps: filled.flatMap((id, place) => (isMasked[place] ? [this.answerStep(rows[place], id)] : [])),
      output: this.tokenizer.decode(filled),
      first: isMasked.indexOf(true),
    };
  }
}

/** Model that classifies a text. */
class ClassifierModel extends TextModel {
  symbol(id) {
    return this.config.labels[id];
  }

  encodeLine(line) {
    const text = stripFields(line);
    const columns = this.checkColumns(text);
    const ids = this.tokenize(text);
    const { max_length: longest } = this.config;
    const cut = ids.length > longest ? `only the last ${longest} of ${ids.length} tokens are used` : "";
    return { ids: ids.slice(-longest), note: this.note(ids, [text], columns, cut) };
  }

  read(line, ids, [logits]) {
    const step = this.answerStep(logits, topIds(logits, 1)[0]);
    const symbols = this.tokenizer.split(line).slice(-ids.length);
    return { symbols, steps: [step], output: step.symbol, first: null };
  }
}

const FILE_MODELS = {
  seq2seq: Seq2SeqModel,
  language_model: LanguageModel,
  masked_language_model: MaskedModel,
  classifier: ClassifierModel,
};

/** Return the bytes of a compressed text in base64. */
async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** Return the model of an entry of a page, see `fileBackend`. */
async function loadModel({ describe, config, files }) {
  const graphs = {};
  for (const [name, text] of Object.entries(files)) graphs[name] = new OnnxGraph(await unpack(text));
  return new FILE_MODELS[describe.task](config, describe.limits, graphs);
}

/**
 * Return a backend of networks in the page.
 *
 * @param {object[]} entries for each model {describe: its description, config: the content of model.json, files: the
 *   graphs by name, compressed and in base64}
 */
export function fileBackend(entries) {
  const loaded = new Map();

  async function ask(index, question, values) {
    const { describe } = entries[index];
    if (!describe.questions.includes(question)) throw new Error(`${question} ${describe.excluded[question]}`);
    checkArguments(values, describe.limits);
    if (!loaded.has(index)) loaded.set(index, loadModel(entries[index]));
    return (await loaded.get(index))[question](values);
  }

  return { kind: "file", describe: async () => ({ models: entries.map(({ describe }) => describe) }), ask };
}

/** Start the page. */
function startFile() {
  const root = document.querySelector("#explorer") ?? document.body.appendChild(html("div", { id: "explorer" }));
  start(root, fileBackend(globalThis.EXPLORER_MODELS));
}

if (typeof document !== "undefined") startFile();
