/**
 * Tensors of the ONNX interpreter: plain objects {type, dims, data}, whose data is a typed array in row-major order.
 *
 * Operators never write to the data of their inputs, so that several tensors may share one array.
 */

/**
 * Arrays of each element type.
 *
 * int64 is held in doubles, which are exact up to 2^53: hashes of ids exceed 32 bits. bool is 0 or 1.
 */
const TENSOR_ARRAYS = {
  float32: Float32Array,
  float64: Float64Array,
  int32: Int32Array,
  int64: Float64Array,
  bool: Uint8Array,
};

/** Return the number of elements of a tensor with the given dimensions. */
export function countElements(dims) {
  let count = 1;
  for (const size of dims) count *= size;
  return count;
}

/** Return a tensor; without data, it is filled with zeros. */
export function makeTensor(type, dims, data = new TENSOR_ARRAYS[type](countElements(dims))) {
  return { type, dims, data };
}

/** Return a tensor of any numbers; an array of the right kind is not copied. */
export function tensorOf(type, dims, values) {
  const Elements = TENSOR_ARRAYS[type];
  return makeTensor(type, dims, values instanceof Elements ? values : new Elements(values));
}

const LARGEST_INDEX = 2 ** 30 - 1;

/**
 * Return the values of a tensor of sizes, axes or indices, of which large ones, such as 2^63 - 1 for "to the end", are
 * limited. Engines index arrays several times faster with small integers than with the doubles of int64.
 */
export function indicesOf(x) {
  return Array.from(x.data, (value) => Math.min(Math.max(value, -LARGEST_INDEX), LARGEST_INDEX) | 0);
}

/** Return a tensor with other dimensions and the same data. */
export const withDims = (x, dims) => makeTensor(x.type, dims, x.data);

/** Return the distance between neighbors along each axis, in elements. */
export function stridesOf(dims) {
  const strides = new Array(dims.length);
  for (let axis = dims.length - 1, stride = 1; axis >= 0; axis--) {
    strides[axis] = stride;
    stride *= dims[axis];
  }
  return strides;
}

/** Return an index or axis from 0, where a negative one counts from the end. */
export const fromStart = (index, size) => (index < 0 ? index + size : index);

/** Return the values of an optional tensor of axes, counted from 0; without the tensor, undefined. */
export const axesFromStart = (axes, rank) => axes && indicesOf(axes).map((axis) => fromStart(axis, rank));

/** Return the dimensions to which tensors are broadcast together. */
export function broadcastDims(...shapes) {
  const rank = Math.max(...shapes.map((dims) => dims.length));
  const result = new Array(rank).fill(1);
  for (const dims of shapes) {
    const first = rank - dims.length;
    dims.forEach((size, axis) => {
      if (size === 1 || size === result[first + axis]) return;
      if (result[first + axis] !== 1) throw new Error(`shapes ${shapes.map((s) => `(${s})`).join(" and ")} differ`);
      result[first + axis] = size;
    });
  }
  return result;
}

/** Return the strides with which a tensor of dimensions `dims` is read as one of dimensions `target`. */
export function broadcastStrides(dims, target) {
  const strides = stridesOf(dims);
  const first = target.length - dims.length;
  return target.map((_, axis) => (axis < first || dims[axis - first] === 1 ? 0 : strides[axis - first]));
}

/**
 * Walk through a tensor of dimensions `dims` row by row, together with operands that are read with strides.
 *
 * Axes are merged where possible, so that operands of equal shape have a single row.
 *
 * @param {number[]} dims
 * @param {number[][]} strides of each operand
 * @param {number[]} offsets of the first element in each operand; changed in place
 * @param {function} visit called with (position of the row, its length, offsets of the operands, their steps in it)
 */
export function forEachRow(dims, strides, offsets, visit) {
  if (dims.includes(0)) return;
  const sizes = [];
  const steps = strides.map(() => []);
  dims.forEach((size, axis) => {
    if (size === 1) return;
    const last = sizes.length - 1;
    if (last >= 0 && strides.every((stride, i) => steps[i][last] === stride[axis] * size)) {
      sizes[last] *= size;
      strides.forEach((stride, i) => (steps[i][last] = stride[axis]));
    } else {
      sizes.push(size);
      strides.forEach((stride, i) => steps[i].push(stride[axis]));
    }
  });
  const length = sizes.pop() ?? 1;
  const inner = steps.map((step) => step.pop() ?? 0);
  const index = new Array(sizes.length).fill(0);
  for (let row = 0, rows = countElements(sizes); row < rows; row++) {
    visit(row * length, length, offsets, inner);
    for (let axis = sizes.length - 1; axis >= 0; axis--) {
      const wraps = ++index[axis] === sizes[axis];
      const moves = wraps ? 1 - sizes[axis] : 1;
      for (let i = 0; i < offsets.length; i++) offsets[i] += moves * steps[i][axis];
      if (!wraps) break;
      index[axis] = 0;
    }
  }
}

/** Return a contiguous copy of a view of a tensor with the given dimensions, strides and first element. */
export function copyStrided(x, dims, strides, offset = 0) {
  const out = makeTensor(x.type, dims);
  const [from, to] = [x.data, out.data];
  forEachRow(dims, [strides], [offset], (at, length, offsets, steps) => {
    const start = offsets[0];
    const step = steps[0];
    if (step === 1 && length > 64) to.set(from.subarray(start, start + length), at); // short rows are faster in a loop
    else for (let i = 0, p = start; i < length; i++, p += step) to[at + i] = from[p];
  });
  return out;
}

/** Return a contiguous copy of a tensor with its axes in another order. */
export function permuteAxes(x, order) {
  const strides = stridesOf(x.dims);
  return copyStrided(x, order.map((axis) => x.dims[axis]), order.map((axis) => strides[axis]));
}
