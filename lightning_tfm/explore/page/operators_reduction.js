/** ONNX operators that compute with all elements along an axis: reductions, softmax, normalization, sums, selection. */
import { axesFromStart, countElements, fromStart, indicesOf, makeTensor, permuteAxes } from "./tensors.js";

/**
 * Return a reduction.
 *
 * @param {function} reduce called with (array, first position, position after the last) of the elements of a result
 */
function reduction(reduce) {
  return ({ keepdims = 1, noop_with_empty_axes: noop = 0 }) => (x, axes) => {
    const given = axesFromStart(axes, x.dims.length) ?? [];
    if (given.length === 0 && noop) return x;
    const reduced = x.dims.map((_, axis) => given.length === 0 || given.includes(axis));
    const kept = x.dims.filter((_, axis) => !reduced[axis]);
    const out = makeTensor(x.type, keepdims ? x.dims.map((size, axis) => (reduced[axis] ? 1 : size)) : kept);
    // The reduced axes become the last ones; the order is stable.
    const order = [...x.dims.keys()].sort((a, b) => reduced[a] - reduced[b]);
    const { data } = order.every((axis, i) => axis === i) ? x : permuteAxes(x, order);
    const length = data.length / out.data.length;
    for (let i = 0; i < out.data.length; i++) out.data[i] = reduce(data, i * length, (i + 1) * length);
    return out;
  };
}

function sumOf(data, start, end) {
  let sum = 0;
  for (let i = start; i < end; i++) sum += data[i];
  return sum;
}

function productOf(data, start, end) {
  let product = 1;
  for (let i = start; i < end; i++) product *= data[i];
  return product;
}

function maximumOf(data, start, end) {
  let maximum = -Infinity;
  for (let i = start; i < end; i++) maximum = Math.max(maximum, data[i]);
  return maximum;
}

function minimumOf(data, start, end) {
  let minimum = Infinity;
  for (let i = start; i < end; i++) minimum = Math.min(minimum, data[i]);
  return minimum;
}

function logSumExpOf(data, start, end) {
  const maximum = maximumOf(data, start, end);
  const shift = Number.isFinite(maximum) ? maximum : 0;
  let sum = 0;
  for (let i = start; i < end; i++) sum += Math.exp(data[i] - shift);
  return shift + Math.log(sum);
}

/** Call `visit` with (first position, step between elements) for each line of elements along an axis. */
function forEachLine(dims, axis, visit) {
  const step = countElements(dims.slice(axis + 1));
  const outer = countElements(dims.slice(0, axis));
  for (let i = 0; i < outer; i++) for (let j = 0; j < step; j++) visit(i * dims[axis] * step + j, step);
}

/** Return softmax or its logarithm over an axis. */
function softmaxOver(isLogarithm) {
  return ({ axis = -1 }) => (x) => {
    const along = fromStart(axis, x.dims.length);
    const size = x.dims[along];
    const out = makeTensor(x.type, x.dims);
    const [from, to] = [x.data, out.data];
    forEachLine(x.dims, along, (start, step) => {
      const end = start + size * step;
      let maximum = -Infinity;
      for (let i = start; i < end; i += step) maximum = Math.max(maximum, from[i]);
      let sum = 0;
      for (let i = start; i < end; i += step) sum += to[i] = Math.exp(from[i] - maximum);
      const shift = maximum + Math.log(sum);
      for (let i = start; i < end; i += step) to[i] = isLogarithm ? from[i] - shift : to[i] / sum;
    });
    return out;
  };
}

function layerNormalization({ axis = -1, epsilon = 1e-5, stash_type: precision = 1 }) {
  if (precision !== 1) throw new Error(`stash_type ${precision}`);
  return (x, scale, bias) => {
    const length = countElements(x.dims.slice(fromStart(axis, x.dims.length)));
    const out = makeTensor(x.type, x.dims);
    const [from, to] = [x.data, out.data];
    for (let start = 0; start < from.length; start += length) {
      const mean = sumOf(from, start, start + length) / length;
      let squares = 0;
      for (let i = start; i < start + length; i++) squares += (from[i] - mean) ** 2;
      const factor = 1 / Math.sqrt(squares / length + epsilon);
      for (let i = 0; i < length; i++) to[start + i] = (from[start + i] - mean) * factor * scale.data[i];
      if (bias) for (let i = 0; i < length; i++) to[start + i] += bias.data[i];
    }
    return out;
  };
}

function cumulativeSum({ exclusive = 0, reverse = 0 }) {
  return (x, axis) => {
    const along = axesFromStart(axis, x.dims.length)[0];
    const size = x.dims[along];
    const out = makeTensor(x.type, x.dims);
    forEachLine(x.dims, along, (start, step) => {
      let sum = 0;
      for (let k = 0; k < size; k++) {
        const i = start + (reverse ? size - 1 - k : k) * step;
        if (exclusive) out.data[i] = sum;
        sum += x.data[i];
        if (!exclusive) out.data[i] = sum;
      }
    });
    return out;
  };
}

function topK({ axis = -1, largest = 1, sorted = 1 }) {
  if (!sorted) throw new Error("sorted 0");
  return (x, k) => {
    const along = fromStart(axis, x.dims.length);
    const [number] = indicesOf(k);
    const dims = x.dims.with(along, number);
    const [values, indices] = [makeTensor(x.type, dims), makeTensor("int64", dims)];
    const starts = [];
    forEachLine(dims, along, (start) => starts.push(start));
    const sign = largest ? 1 : -1;
    let line = 0;
    forEachLine(x.dims, along, (start, step) => {
      const order = Array.from({ length: x.dims[along] }, (_, i) => i);
      order.sort((a, b) => sign * (x.data[start + b * step] - x.data[start + a * step]));
      const first = starts[line++];
      for (let i = 0; i < number; i++) {
        values.data[first + i * step] = x.data[start + order[i] * step];
        indices.data[first + i * step] = order[i];
      }
    });
    return [values, indices];
  };
}

export const REDUCTION_OPERATORS = {
  CumSum: cumulativeSum,
  LayerNormalization: layerNormalization,
  LogSoftmax: softmaxOver(true),
  ReduceLogSumExp: reduction(logSumExpOf),
  ReduceMax: reduction(maximumOf),
  ReduceMean: reduction((data, start, end) => sumOf(data, start, end) / (end - start)),
  ReduceMin: reduction(minimumOf),
  ReduceProd: reduction(productOf),
  ReduceSum: reduction(sumOf),
  Softmax: softmaxOver(false),
  TopK: topK,
};
