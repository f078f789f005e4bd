/** Interpreter of ONNX files, for the operators that exported networks contain. */
import { ELEMENTWISE_OPERATORS } from "./operators_elementwise.js";
import { INDEXING_OPERATORS } from "./operators_indexing.js";
import { PRODUCT_OPERATORS } from "./operators_product.js";
import { RECURRENT_OPERATORS } from "./operators_recurrent.js";
import { REDUCTION_OPERATORS } from "./operators_reduction.js";
import { SHAPE_OPERATORS } from "./operators_shape.js";
import { countElements, tensorOf } from "./tensors.js";

/**
 * Operators by name. Each is a function of the attributes of a node that returns a function of its input tensors
 * (undefined where an optional one is missing), which returns a tensor or, with several outputs, an array.
 */
export const OPERATORS = {
  ...ELEMENTWISE_OPERATORS,
  ...INDEXING_OPERATORS,
  ...PRODUCT_OPERATORS,
  ...RECURRENT_OPERATORS,
  ...REDUCTION_OPERATORS,
  ...SHAPE_OPERATORS,
};

/**
 * Return the fields of a Protocol Buffers message as {number: [values]}.
 *
 * Values are numbers, or bytes of strings, messages and packed numbers.
 */
function readMessage(bytes) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const fields = {};
  let at = 0;
  while (at < bytes.length) {
    let key;
    [key, at] = readVarint(bytes, at);
    const wireType = key & 7;
    let value;
    if (wireType === 0) {
      [value, at] = readVarint(bytes, at);
    } else if (wireType === 1) {
      value = view.getFloat64(at, true);
      at += 8;
    } else if (wireType === 2) {
      let length;
      [length, at] = readVarint(bytes, at);
      value = bytes.subarray(at, at + length);
      at += length;
    } else if (wireType === 5) {
      value = view.getFloat32(at, true);
      at += 4;
    } else {
      throw new Error("the file is not an ONNX model");
    }
    (fields[key >>> 3] ??= []).push(value);
  }
  return fields;
}

/** Return [a signed integer of up to 64 bits, the position after it]. */
function readVarint(bytes, at) {
  let value = 0n;
  let shift = 0n;
  let byte;
  do {
    byte = bytes[at++];
    value |= BigInt(byte & 127) << shift;
    shift += 7n;
  } while (byte > 127);
  return [Number(BigInt.asIntN(64, value)), at];
}

/** Return the integers of a repeated field, packed or not. */
function readIntegers(values = []) {
  return values.flatMap((value) => {
    if (typeof value === "number") return [value];
    const integers = [];
    for (let at = 0, integer; at < value.length; integers.push(integer)) [integer, at] = readVarint(value, at);
    return integers;
  });
}

/** Return the floats of a value of a repeated field, packed or not. */
function readFloats(value) {
  return typeof value === "number" ? [value] : Array.from(new Float32Array(value.slice().buffer));
}

const readString = (bytes) => new TextDecoder().decode(bytes);
const readStrings = (values = []) => values.map(readString);

/** Return floats of 32 bits, given the bits of floats of 16 bits. */
function widenHalves(halves) {
  const floats = new Float32Array(halves.length);
  const bits = new Uint32Array(floats.buffer);
  for (let i = 0; i < halves.length; i++) {
    const magnitude = halves[i] & 0x7fff;
    const sign = halves[i] & 0x8000;
    if (magnitude < 0x400) {
      floats[i] = (sign ? -1 : 1) * magnitude * 2 ** -24; // subnormal
    } else {
      // The bias of the exponent is 127 instead of 15; the largest exponent stands for infinity and NaN in both.
      const exponent = magnitude < 0x7c00 ? 112 : 224;
      bits[i] = (sign << 16) | ((magnitude << 13) + (exponent << 23));
    }
  }
  return floats;
}

// Data types of TensorProto: [type of the tensor, function that returns the values of raw bytes]
const RAW_READERS = {
  1: ["float32", (buffer) => new Float32Array(buffer)],
  6: ["int32", (buffer) => new Int32Array(buffer)],
  7: ["int64", (buffer) => Float64Array.from(new BigInt64Array(buffer), Number)],
  9: ["bool", (buffer) => new Uint8Array(buffer)],
  10: ["float32", (buffer) => widenHalves(new Uint16Array(buffer))],
  11: ["float64", (buffer) => new Float64Array(buffer)],
};

/** Return the tensor of a TensorProto, whose values are in raw_data or in the field of their type. */
function readTensor(bytes) {
  const { 1: sizes, 2: [dataType], 4: floats, 5: ints, 7: longs, 9: raw } = readMessage(bytes);
  const [type, ofBuffer] = RAW_READERS[dataType] ?? [];
  if (!type) throw new Error(`tensors of data type ${dataType} are not supported`);
  let values = floats?.flatMap(readFloats) ?? readIntegers(ints ?? longs);
  if (raw) values = ofBuffer(raw[0].slice().buffer);
  else if (dataType === 10) values = widenHalves(values);
  const dims = readIntegers(sizes);
  if (values.length !== countElements(dims)) throw new Error("values of a tensor are missing, or in another file");
  return tensorOf(type, dims, values);
}

/** Return [name, value] of an AttributeProto. */
function readAttribute(bytes) {
  const { 1: [name], 2: float, 3: int, 4: string, 5: tensor, 7: floats, 8: ints, 20: [type] } = readMessage(bytes);
  const values = {
    1: () => float[0],
    2: () => int[0],
    3: () => readString(string[0]),
    4: () => readTensor(tensor[0]),
    6: () => floats.flatMap(readFloats),
    7: () => readIntegers(ints),
  };
  // A value of another type, such as a graph, is no attribute that an operator reads.
  return [readString(name), values[type]?.() ?? null];
}

/** Return a NodeProto as {operator, inputs, outputs, attributes}. Operators of other domains have it in their name. */
function readNode(bytes) {
  const { 1: inputs, 2: outputs, 4: [operator], 5: attributes = [], 7: [domain] = [] } = readMessage(bytes);
  const prefix = domain?.length ? `${readString(domain)}.` : "";
  return {
    operator: prefix + readString(operator),
    inputs: readStrings(inputs),
    outputs: readStrings(outputs),
    attributes: Object.fromEntries(attributes.map(readAttribute)),
  };
}

/** Return {nodes, initializers: Map of tensors by name, inputs, outputs: names} of a ModelProto. */
function readModel(bytes) {
  const { 7: [graph] } = readMessage(bytes);
  const { 1: nodes = [], 5: tensors = [], 11: inputs = [], 12: outputs = [] } = readMessage(graph);
  const nameOf = (field) => (message) => readString(readMessage(message)[field][0]);
  const initializers = new Map(tensors.map((tensor) => [nameOf(8)(tensor), readTensor(tensor)]));
  return {
    nodes: nodes.map(readNode),
    initializers,
    inputs: inputs.map(nameOf(1)).filter((name) => !initializers.has(name)),
    outputs: outputs.map(nameOf(1)),
  };
}

/**
 * Return the function of a node, or throw an Error that names the unsupported attributes.
 *
 * An attribute that the operator does not read would change its result unnoticed.
 */
function compileNode({ operator, attributes }) {
  if (!Object.hasOwn(OPERATORS, operator)) throw new Error(operator);
  const unread = new Set(Object.keys(attributes));
  const get = (_, name) => {
    unread.delete(name);
    return attributes[name];
  };
  let compute;
  try {
    compute = OPERATORS[operator](new Proxy(attributes, { get }));
  } catch (error) {
    throw new Error(`${operator} with ${error.message}`);
  }
  if (unread.size) throw new Error(`${operator} with ${[...unread].join(", ")}`);
  return compute;
}

/** Return the functions of all nodes, or throw an Error that names all operators that are not supported. */
function compileNodes(nodes) {
  const unsupported = new Set();
  const functions = nodes.map((node) => {
    try {
      return compileNode(node);
    } catch (error) {
      return unsupported.add(error.message);
    }
  });
  if (unsupported.size) throw new Error(`ONNX operators that are not supported: ${[...unsupported].join("; ")}`);
  return functions;
}

/** Compute a step from an array of values, and store its results there. Number 0 stands for "none". */
function runStep({ compute, inputs, outputs }, values) {
  const results = compute(...inputs.map((number) => values[number]));
  const tensors = Array.isArray(results) ? results : [results];
  outputs.forEach((number, i) => {
    if (number !== 0) values[number] = tensors[i];
  });
}

/**
 * Network in an ONNX file.
 *
 * @property {string[]} inputs names of the inputs
 * @property {string[]} outputs names of the outputs
 */
export class OnnxGraph {
  #constants = [undefined]; // by number of the value
  #inputNumbers;
  #outputNumbers;
  #steps = [];

  /**
   * Read a model, and compute the values that do not depend on its inputs.
   *
   * @param {Uint8Array} bytes of the file
   * @throws {Error} names all operators that are not supported
   */
  constructor(bytes) {
    const { nodes, initializers, inputs, outputs } = readModel(bytes);
    const functions = compileNodes(nodes);
    this.inputs = inputs;
    this.outputs = outputs;

    const numbers = new Map([["", 0]]);
    const numberOf = (name) => numbers.get(name) ?? numbers.set(name, numbers.size).get(name);
    for (const [name, tensor] of initializers) this.#constants[numberOf(name)] = tensor;
    this.#inputNumbers = inputs.map(numberOf);
    nodes.forEach((node, i) => {
      const step = { compute: functions[i], inputs: node.inputs.map(numberOf), outputs: node.outputs.map(numberOf) };
      if (step.inputs.every((number) => number in this.#constants)) runStep(step, this.#constants);
      else this.#steps.push(step);
    });
    this.#outputNumbers = outputs.map(numberOf);
    this.#planReleases();
  }

  /** Keep only the constants that steps need, and let each step release the values that no later one needs. */
  #planReleases() {
    const needed = new Set(this.#outputNumbers);
    for (const step of this.#steps.toReversed()) {
      step.released = [...step.inputs, ...step.outputs].filter((number) => !needed.has(number));
      for (const number of step.inputs) needed.add(number);
    }
    this.#constants.forEach((_, number) => {
      if (!needed.has(number)) delete this.#constants[number];
    });
  }

  /**
   * Return the outputs of the network.
   *
   * @param {Object<string, {type: string, dims: number[], data: ArrayLike<number>}>} feeds inputs by name
   * @returns {Object<string, {type: string, dims: number[], data: TypedArray}>} outputs by name; they may share their
   *   data with inputs and constants, and must not be changed
   */
  run(feeds) {
    const values = this.#constants.slice();
    this.inputs.forEach((name, i) => {
      if (!(name in feeds)) throw new Error(`the input ${name} of the network is missing`);
      const { type, dims, data } = feeds[name];
      values[this.#inputNumbers[i]] = tensorOf(type, dims, data);
    });
    for (const step of this.#steps) {
      runStep(step, values);
      for (const number of step.released) values[number] = undefined;
    }
    return Object.fromEntries(this.outputs.map((name, i) => [name, values[this.#outputNumbers[i]]]));
  }
}
