/** ONNX operators that change dimensions or move elements without computing with them. */
import {
  axesFromStart, broadcastDims, broadcastStrides, copyStrided, countElements, forEachRow, fromStart, indicesOf,
  makeTensor, permuteAxes, stridesOf, tensorOf, withDims,
} from "./tensors.js";

function reshape({ allowzero = 0 }) {
  return (x, shape) => {
    const dims = indicesOf(shape).map((size, axis) => (size === 0 && !allowzero ? x.dims[axis] : size));
    const inferred = dims.indexOf(-1);
    if (inferred >= 0) dims[inferred] = x.data.length / countElements(dims.filter((size) => size !== -1));
    if (countElements(dims) !== x.data.length) throw new Error(`shape (${x.dims}) cannot become (${shape.data})`);
    return withDims(x, dims);
  };
}

function unsqueeze() {
  return (x, axes) => {
    const rank = x.dims.length + axes.data.length;
    const added = axesFromStart(axes, rank);
    const kept = x.dims.values();
    return withDims(x, Array.from({ length: rank }, (_, axis) => (added.includes(axis) ? 1 : kept.next().value)));
  };
}

function squeeze() {
  return (x, axes) => {
    const removed = axesFromStart(axes, x.dims.length);
    return withDims(x, x.dims.filter((size, axis) => (removed ? !removed.includes(axis) : size !== 1)));
  };
}

function transpose({ perm }) {
  return (x) => permuteAxes(x, perm ?? x.dims.map((_, axis) => x.dims.length - 1 - axis));
}

function expand() {
  return (x, shape) => {
    const dims = broadcastDims(x.dims, indicesOf(shape));
    return copyStrided(x, dims, broadcastStrides(x.dims, dims));
  };
}

function shapeOf({ start = 0, end }) {
  return (x) => {
    const sizes = x.dims.slice(start, end);
    return tensorOf("int64", [sizes.length], sizes);
  };
}

/** Return a tensor that consists of scalars of an attribute, or the tensor of an attribute. */
function constant({ value, value_float: float, value_floats: floats, value_int: int, value_ints: ints }) {
  let result = value;
  if (float !== undefined) result = tensorOf("float32", [], [float]);
  if (floats) result = tensorOf("float32", [floats.length], floats);
  if (int !== undefined) result = tensorOf("int64", [], [int]);
  if (ints) result = tensorOf("int64", [ints.length], ints);
  return () => result;
}

function constantOfShape({ value }) {
  return (shape) => {
    const out = makeTensor(value?.type ?? "float32", indicesOf(shape));
    if (value) out.data.fill(value.data[0]);
    return out;
  };
}

function range() {
  return (start, limit, delta) => {
    const [first, step] = [start.data[0], delta.data[0]];
    const out = makeTensor(start.type, [Math.max(0, Math.ceil((limit.data[0] - first) / step))]);
    for (let i = 0; i < out.data.length; i++) out.data[i] = first + i * step;
    return out;
  };
}

function slice() {
  return (x, starts, ends, axes, steps) => {
    const dims = [...x.dims];
    const strides = stridesOf(x.dims);
    let offset = 0;
    const ending = indicesOf(ends);
    const along = axesFromStart(axes, dims.length);
    const stepping = steps && indicesOf(steps);
    indicesOf(starts).forEach((start, i) => {
      const axis = along?.[i] ?? i;
      const size = x.dims[axis];
      const step = stepping?.[i] ?? 1;
      // Backwards, an end before the first element is -1.
      const [least, greatest] = step > 0 ? [0, size] : [-1, size - 1];
      const clamp = (index, low) => Math.min(Math.max(fromStart(index, size), low), greatest);
      const first = clamp(start, 0);
      dims[axis] = Math.max(0, Math.ceil((clamp(ending[i], least) - first) / step));
      offset += first * strides[axis];
      strides[axis] *= step;
    });
    return copyStrided(x, dims, strides, offset);
  };
}

function concat({ axis }) {
  return (...tensors) => {
    const along = fromStart(axis, tensors[0].dims.length);
    const total = tensors.reduce((sum, x) => sum + x.dims[along], 0);
    const out = makeTensor(tensors[0].type, tensors[0].dims.with(along, total));
    const outer = countElements(out.dims.slice(0, along));
    let at = 0;
    for (let row = 0; row < outer; row++) {
      for (const { data } of tensors) {
        const width = data.length / outer;
        out.data.set(data.subarray(row * width, (row + 1) * width), at);
        at += width;
      }
    }
    return out;
  };
}

function split({ axis = 0, num_outputs: number }) {
  return (x, sizes) => {
    const along = fromStart(axis, x.dims.length);
    const strides = stridesOf(x.dims);
    const largest = Math.ceil(x.dims[along] / number);
    const part = (first, length) => copyStrided(x, x.dims.with(along, length), strides, first * strides[along]);
    let first = 0;
    const lengths = sizes ? indicesOf(sizes) : new Array(number).fill(largest);
    return lengths.map((length) => {
      const result = part(first, Math.max(0, Math.min(length, x.dims[along] - first)));
      first += length;
      return result;
    });
  };
}

function pad({ mode = "constant" }) {
  if (mode !== "constant") throw new Error(`mode ${mode}`);
  return (x, pads, value, axes) => {
    const dims = [...x.dims];
    const copied = [...x.dims]; // negative pads cut elements off
    const before = dims.map(() => 0);
    const widths = indicesOf(pads);
    (axesFromStart(axes, dims.length) ?? [...dims.keys()]).forEach((axis, i) => {
      const [left, right] = [widths[i], widths[i + widths.length / 2]];
      dims[axis] += left + right;
      copied[axis] += Math.min(left, 0) + Math.min(right, 0);
      before[axis] = left;
    });
    const out = makeTensor(x.type, dims);
    if (value) out.data.fill(value.data[0]);
    const strides = [stridesOf(x.dims), stridesOf(dims)];
    const firsts = [before.map((left) => Math.max(-left, 0)), before.map((left) => Math.max(left, 0))];
    const offsets = firsts.map((first, i) => first.reduce((sum, index, axis) => sum + index * strides[i][axis], 0));
    forEachRow(copied, strides, offsets, (_, length, [from, to], [fromStep, toStep]) => {
      for (let i = 0; i < length; i++) out.data[to + i * toStep] = x.data[from + i * fromStep];
    });
    return out;
  };
}

export const SHAPE_OPERATORS = {
  Concat: concat,
  Constant: constant,
  ConstantOfShape: constantOfShape,
  Expand: expand,
  Identity: () => (x) => x,
  Pad: pad,
  Range: range,
  Reshape: reshape,
  Shape: shapeOf,
  Size: () => (x) => tensorOf("int64", [], [x.data.length]),
  Slice: slice,
  Split: split,
  Squeeze: squeeze,
  Transpose: transpose,
  Unsqueeze: unsqueeze,
};
