/** ONNX operators that multiply matrices, and convolution. */
import {
  broadcastDims, broadcastStrides, countElements, forEachRow, makeTensor, permuteAxes, withDims,
} from "./tensors.js";

/**
 * Return x (rows, inner) times y (inner, columns) in `out`; each array has the position of its first element.
 *
 * Sums have double precision. Two rows of x are multiplied at a time, so that each element of y is read once for both,
 * and four rows of y, so that sums are read and written less often.
 */
function multiplyMatrices(out, outStart, x, xStart, y, yStart, rows, inner, columns) {
  const sums = new Float64Array(2 * columns);
  for (let row = 0; row < rows; row += 2) {
    const at = outStart + row * columns;
    const isPair = row + 1 < rows;
    const multiply = isPair ? multiplyTwoRows : multiplyRow;
    multiply(sums, x, xStart + row * inner, y, yStart, inner, columns);
    for (let j = 0, end = isPair ? 2 * columns : columns; j < end; j++) out[at + j] = sums[j];
  }
}

function multiplyRow(sums, x, xStart, y, yStart, inner, columns) {
  sums.fill(0);
  const xEnd = xStart + inner;
  let p = xStart;
  let y0 = yStart;
  for (; p + 3 < xEnd; p += 4, y0 += 4 * columns) {
    const y1 = y0 + columns;
    const y2 = y1 + columns;
    const y3 = y2 + columns;
    const a0 = x[p];
    const a1 = x[p + 1];
    const a2 = x[p + 2];
    const a3 = x[p + 3];
    for (let j = 0; j < columns; j++) sums[j] += a0 * y[y0 + j] + a1 * y[y1 + j] + a2 * y[y2 + j] + a3 * y[y3 + j];
  }
  for (; p < xEnd; p++, y0 += columns) for (let j = 0; j < columns; j++) sums[j] += x[p] * y[y0 + j];
}

function multiplyTwoRows(sums, x, xStart, y, yStart, inner, columns) {
  sums.fill(0);
  const xEnd = xStart + inner;
  let p = xStart;
  let y0 = yStart;
  for (; p + 3 < xEnd; p += 4, y0 += 4 * columns) {
    const q = p + inner; // in the second row
    const y1 = y0 + columns;
    const y2 = y1 + columns;
    const y3 = y2 + columns;
    const a0 = x[p];
    const a1 = x[p + 1];
    const a2 = x[p + 2];
    const a3 = x[p + 3];
    const b0 = x[q];
    const b1 = x[q + 1];
    const b2 = x[q + 2];
    const b3 = x[q + 3];
    for (let j = 0; j < columns; j++) {
      const v0 = y[y0 + j];
      const v1 = y[y1 + j];
      const v2 = y[y2 + j];
      const v3 = y[y3 + j];
      sums[j] += a0 * v0 + a1 * v1 + a2 * v2 + a3 * v3;
      sums[columns + j] += b0 * v0 + b1 * v1 + b2 * v2 + b3 * v3;
    }
  }
  for (; p < xEnd; p++, y0 += columns) {
    for (let j = 0; j < columns; j++) {
      sums[j] += x[p] * y[y0 + j];
      sums[columns + j] += x[p + inner] * y[y0 + j];
    }
  }
}

/** Return x (rows, inner) times the transpose of y (columns, inner) in `out`; see multiplyMatrices. */
export function multiplyTransposed(out, outStart, x, xStart, y, yStart, rows, inner, columns) {
  for (let row = 0; row < rows; row++) {
    const at = outStart + row * columns;
    const first = xStart + row * inner;
    let j = 0;
    for (; j + 3 < columns; j += 4) {
      const y0 = yStart + j * inner;
      const y1 = y0 + inner;
      const y2 = y1 + inner;
      const y3 = y2 + inner;
      let s0 = 0;
      let s1 = 0;
      let s2 = 0;
      let s3 = 0;
      for (let k = 0; k < inner; k++) {
        const a = x[first + k];
        s0 += a * y[y0 + k];
        s1 += a * y[y1 + k];
        s2 += a * y[y2 + k];
        s3 += a * y[y3 + k];
      }
      out[at + j] = s0;
      out[at + j + 1] = s1;
      out[at + j + 2] = s2;
      out[at + j + 3] = s3;
    }
    for (; j < columns; j++) {
      let sum = 0;
      for (let k = 0; k < inner; k++) sum += x[first + k] * y[yStart + j * inner + k];
      out[at + j] = sum;
    }
  }
}

/** Return the product of x (..., M, K) and y (..., K, N), where leading axes are broadcast. */
function multiplyBatches(x, y) {
  const [rows, inner] = x.dims.slice(-2);
  const columns = y.dims.at(-1);
  if (inner !== y.dims.at(-2)) throw new Error(`MatMul: shapes (${x.dims}) and (${y.dims}) differ`);
  const [xBatch, yBatch] = [x.dims.slice(0, -2), y.dims.slice(0, -2)];
  const batch = broadcastDims(xBatch, yBatch);
  const out = makeTensor(x.type, [...batch, rows, columns]);
  const multiply = (outStart, xStart, yStart, rowCount) => {
    multiplyMatrices(out.data, outStart, x.data, xStart, y.data, yStart, rowCount, inner, columns);
  };
  if (countElements(yBatch) === 1) {
    multiply(0, 0, 0, countElements(batch) * rows); // one matrix for all rows
    return out;
  }
  const strides = [broadcastStrides(xBatch, batch), broadcastStrides(yBatch, batch)];
  forEachRow(batch, strides, [0, 0], (at, length, offsets, steps) => {
    for (let i = 0; i < length; i++) {
      const xStart = (offsets[0] + i * steps[0]) * rows * inner;
      const yStart = (offsets[1] + i * steps[1]) * inner * columns;
      multiply((at + i) * rows * columns, xStart, yStart, rows);
    }
  });
  return out;
}

function matMul() {
  return (x, y) => {
    const left = x.dims.length === 1 ? withDims(x, [1, ...x.dims]) : x;
    const right = y.dims.length === 1 ? withDims(y, [...y.dims, 1]) : y;
    const { dims, ...out } = multiplyBatches(left, right);
    if (y.dims.length === 1) dims.pop();
    if (x.dims.length === 1) dims.splice(-1 - (y.dims.length > 1), 1);
    return { ...out, dims };
  };
}

/** Return alpha * A @ B + beta * C, where A and B may be transposed. */
function gemm({ alpha = 1, beta = 1, transA: transposeLeft = 0, transB: transposeRight = 0 }) {
  return (a, b, c) => {
    const left = transposeLeft ? permuteAxes(a, [1, 0]) : a;
    const [rows, inner] = left.dims;
    const columns = b.dims[transposeRight ? 0 : 1];
    const out = makeTensor(a.type, [rows, columns]);
    const multiply = transposeRight ? multiplyTransposed : multiplyMatrices;
    multiply(out.data, 0, left.data, 0, b.data, 0, rows, inner, columns);
    if (alpha !== 1) for (let i = 0; i < out.data.length; i++) out.data[i] *= alpha;
    if (c) {
      forEachRow(out.dims, [broadcastStrides(c.dims, out.dims)], [0], (at, length, offsets, steps) => {
        for (let i = 0, p = offsets[0]; i < length; i++, p += steps[0]) out.data[at + i] += beta * c.data[p];
      });
    }
    return out;
  };
}

/** Return the convolution in one dimension of x (B, C, L) with w (F, C, K). */
function convolution(attributes) {
  const { auto_pad: padding = "NOTSET", dilations = [1], group = 1, strides = [1], pads = [0, 0] } = attributes;
  const { kernel_shape: kernel = [1] } = attributes;
  const isPlain = padding === "NOTSET" && String([dilations, group, strides]) === "1,1,1";
  if (!isPlain || kernel.length !== 1) throw new Error(JSON.stringify(attributes));
  return (x, w, bias) => {
    const [batch, channels, length] = x.dims;
    const [filters, , width] = w.dims;
    const positions = length + pads[0] + pads[1] - width + 1;
    const out = makeTensor(x.type, [batch, filters, positions]);
    let at = 0;
    for (let row = 0; row < batch; row++) {
      for (let filter = 0; filter < filters; filter++) {
        for (let position = 0; position < positions; position++) {
          let sum = bias ? bias.data[filter] : 0;
          const first = Math.max(0, pads[0] - position);
          const end = Math.min(width, length + pads[0] - position);
          for (let channel = 0; channel < channels; channel++) {
            const p = (row * channels + channel) * length + position - pads[0];
            const q = (filter * channels + channel) * width;
            for (let k = first; k < end; k++) sum += x.data[p + k] * w.data[q + k];
          }
          out.data[at++] = sum;
        }
      }
    }
    return out;
  };
}

export const PRODUCT_OPERATORS = {
  Conv: convolution,
  Gemm: gemm,
  MatMul: matMul,
};
