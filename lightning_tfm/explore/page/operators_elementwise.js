/** ONNX operators that compute each element from the elements at the same position, with broadcasting. */
import { broadcastDims, broadcastStrides, forEachRow, makeTensor, tensorOf } from "./tensors.js";

/**
 * Compute a tensor of type `type` row by row from tensors that are broadcast together.
 *
 * A kernel is called with (array of the result, position, length of the row), and for each tensor with (its array, the
 * position in it, the step within the row).
 */
function broadcastRows(type, kernel, x, y, z) {
  const operands = z ? [x, y, z] : [x, y];
  const shapes = operands.map((operand) => operand.dims);
  const dims = broadcastDims(...shapes);
  const out = makeTensor(type, dims);
  const strides = shapes.map((shape) => broadcastStrides(shape, dims));
  forEachRow(dims, strides, operands.map(() => 0), (at, length, [p, q, r], [dp, dq, dr]) => {
    kernel(out.data, at, length, x.data, p, dp, y.data, q, dq, z?.data, r, dr);
  });
  return out;
}

const pairKernel = (compute) => (out, at, length, x, p, dp, y, q, dq) => {
  for (let i = 0; i < length; i++, p += dp, q += dq) out[at + i] = compute(x[p], y[q]);
};

// The frequent operators have kernels of their own, in which nothing is called for each element.
function addKernel(out, at, length, x, p, dp, y, q, dq) {
  for (let i = 0; i < length; i++, p += dp, q += dq) out[at + i] = x[p] + y[q];
}

function subKernel(out, at, length, x, p, dp, y, q, dq) {
  for (let i = 0; i < length; i++, p += dp, q += dq) out[at + i] = x[p] - y[q];
}

function mulKernel(out, at, length, x, p, dp, y, q, dq) {
  for (let i = 0; i < length; i++, p += dp, q += dq) out[at + i] = x[p] * y[q];
}

function divKernel(out, at, length, x, p, dp, y, q, dq) {
  for (let i = 0; i < length; i++, p += dp, q += dq) out[at + i] = x[p] / y[q];
}

function whereKernel(out, at, length, condition, o, step, x, p, dp, y, q, dq) {
  for (let i = 0; i < length; i++, o += step, p += dp, q += dq) out[at + i] = condition[o] ? x[p] : y[q];
}

/** Return an operator on two tensors whose result has the type of the first. */
function arithmetic(compute, float32Kernel = pairKernel(compute)) {
  const kernel = pairKernel(compute);
  const int64Kernel = pairKernel((a, b) => Math.trunc(compute(a, b)));
  const kernels = { float32: float32Kernel, int64: int64Kernel };
  return () => (x, y) => broadcastRows(x.type, kernels[x.type] ?? kernel, x, y);
}

/** Return an operator on two tensors whose result is bool. */
function comparison(compute) {
  const kernel = pairKernel(compute);
  return () => (x, y) => broadcastRows("bool", kernel, x, y);
}

/** Return an operator on any number of tensors, which are combined pair by pair. */
function variadic(compute) {
  const kernel = pairKernel(compute);
  return () => (first, ...others) => others.reduce((x, y) => broadcastRows(x.type, kernel, x, y), first);
}

function mapElements(x, compute, type = x.type) {
  const out = makeTensor(type, x.dims);
  const [from, to] = [x.data, out.data];
  for (let i = 0; i < from.length; i++) to[i] = compute(from[i]);
  return out;
}

const unary = (compute, type) => () => (x) => mapElements(x, compute, type);

/** Return the sigmoid function of a number. */
export const logistic = (v) => 1 / (1 + Math.exp(-v));

const ERFC_COEFFICIENTS = [
  0.17087277, -0.82215223, 1.48851587, -1.13520398, 0.27886807, -0.18628806, 0.09678418, 0.37409196, 1.00002368,
  -1.26551223,
];

/** Return erf(x): a Taylor polynomial near 0, else the Chebyshev fit of 1 - erf in Press et al. (1992, section 6.2). */
function errorFunction(x) {
  const z = Math.abs(x);
  if (z < 0.5) {
    const s = x * x;
    const series = 1 - s * (1 / 3 - s * (1 / 10 - s * (1 / 42 - s * (1 / 216 - s * (1 / 1320 - s / 9360)))));
    return (2 / Math.sqrt(Math.PI)) * x * series;
  }
  const t = 2 / (2 + z);
  let sum = 0;
  for (const coefficient of ERFC_COEFFICIENTS) sum = sum * t + coefficient;
  const complement = t * Math.exp(sum - z * z);
  return x < 0 ? complement - 1 : 1 - complement;
}

const geluExact = (v) => 0.5 * v * (1 + errorFunction(v * Math.SQRT1_2));
const geluTanh = (v) => 0.5 * v * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (v + 0.044715 * v * v * v)));

/** Return the remainder with the sign of the divisor. */
function floorModulo(a, b) {
  const remainder = a % b;
  return remainder !== 0 && remainder < 0 !== b < 0 ? remainder + b : remainder;
}

function modulo({ fmod = 0 }) {
  const kernel = pairKernel(fmod ? (a, b) => a % b : floorModulo);
  return (x, y) => broadcastRows(x.type, kernel, x, y);
}

function relu() {
  return (x) => {
    const out = makeTensor(x.type, x.dims);
    const [from, to] = [x.data, out.data];
    for (let i = 0; i < from.length; i++) to[i] = from[i] < 0 ? 0 : from[i];
    return out;
  };
}

function clip() {
  return (x, low, high) => {
    const [least, greatest] = [low?.data[0] ?? -Infinity, high?.data[0] ?? Infinity];
    return mapElements(x, (v) => Math.min(Math.max(v, least), greatest));
  };
}

function elu({ alpha = 1 }) {
  return (x) => mapElements(x, (v) => (v < 0 ? alpha * Math.expm1(v) : v));
}

function gelu({ approximate = "none" }) {
  return unary(approximate === "tanh" ? geluTanh : geluExact)();
}

// Data types of TensorProto. Half precision is computed in single precision.
const CAST_TYPES = { 1: "float32", 6: "int32", 7: "int64", 9: "bool", 10: "float32", 11: "float64" };

function convertType(x, type) {
  if (x.type === type) return x;
  if (type === "bool") return mapElements(x, (v) => (v !== 0 ? 1 : 0), type);
  if (type === "int64") return mapElements(x, Math.trunc, type);
  return tensorOf(type, x.dims, x.data);
}

function cast({ to, saturate = 1 }) {
  if (!(to in CAST_TYPES) || saturate !== 1) throw new Error(`to ${to}`);
  return (x) => convertType(x, CAST_TYPES[to]);
}

export const ELEMENTWISE_OPERATORS = {
  Abs: unary(Math.abs),
  Add: arithmetic((a, b) => a + b, addKernel),
  And: comparison((a, b) => a & b),
  Cast: cast,
  CastLike: () => (x, like) => convertType(x, like.type),
  Ceil: unary(Math.ceil),
  Clip: clip,
  Cos: unary(Math.cos),
  Div: arithmetic((a, b) => a / b, divKernel),
  Elu: elu,
  Equal: comparison((a, b) => a === b),
  Erf: unary(errorFunction),
  Exp: unary(Math.exp),
  Floor: unary(Math.floor),
  Gelu: gelu,
  Greater: comparison((a, b) => a > b),
  GreaterOrEqual: comparison((a, b) => a >= b),
  IsNaN: unary(Number.isNaN, "bool"),
  Less: comparison((a, b) => a < b),
  LessOrEqual: comparison((a, b) => a <= b),
  Log: unary(Math.log),
  Max: variadic(Math.max),
  Min: variadic(Math.min),
  Mod: modulo,
  Mul: arithmetic((a, b) => a * b, mulKernel),
  Neg: unary((v) => -v),
  Not: unary((v) => 1 - v),
  Or: comparison((a, b) => a | b),
  Pow: arithmetic((a, b) => a ** b),
  Reciprocal: unary((v) => 1 / v),
  Relu: relu,
  Sigmoid: unary(logistic),
  Sign: unary(Math.sign),
  Sin: unary(Math.sin),
  Sqrt: unary(Math.sqrt),
  Sub: arithmetic((a, b) => a - b, subKernel),
  Tanh: unary(Math.tanh),
  Where: () => (condition, x, y) => broadcastRows(x.type, whereKernel, condition, x, y),
  Xor: comparison((a, b) => a ^ b),
};
