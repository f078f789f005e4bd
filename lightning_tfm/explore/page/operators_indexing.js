/** ONNX operators that read or write elements at positions that are themselves tensors. */
import { countElements, fromStart, indicesOf, makeTensor, stridesOf } from "./tensors.js";

function gather({ axis = 0 }) {
  return (x, indices) => {
    const along = fromStart(axis, x.dims.length);
    const [outerDims, innerDims] = [x.dims.slice(0, along), x.dims.slice(along + 1)];
    const [outer, width, size] = [countElements(outerDims), countElements(innerDims), x.dims[along]];
    const out = makeTensor(x.type, [...outerDims, ...indices.dims, ...innerDims]);
    const positions = indicesOf(indices).map((index) => fromStart(index, size));
    const wrong = positions.findIndex((index) => index < 0 || index >= size);
    if (wrong >= 0) throw new Error(`Gather: index ${indices.data[wrong]} of ${size} elements`);
    for (let row = 0, at = 0; row < outer; row++) {
      for (const index of positions) {
        const first = (row * size + index) * width;
        for (let i = 0; i < width; i++) out.data[at++] = x.data[first + i];
      }
    }
    return out;
  };
}

/** Call `visit` with (position in x, position in indices) for each index of GatherElements and ScatterElements. */
function forEachElementIndex(x, indices, axis, visit) {
  const strides = stridesOf(x.dims);
  const along = fromStart(axis, x.dims.length);
  const coordinates = indices.dims.map(() => 0);
  const values = indicesOf(indices);
  for (let i = 0; i < values.length; i++) {
    let position = fromStart(values[i], x.dims[along]) * strides[along];
    for (let k = 0; k < coordinates.length; k++) if (k !== along) position += coordinates[k] * strides[k];
    visit(position, i);
    for (let k = coordinates.length - 1; k >= 0 && ++coordinates[k] === indices.dims[k]; k--) coordinates[k] = 0;
  }
}

function gatherElements({ axis = 0 }) {
  return (x, indices) => {
    const out = makeTensor(x.type, indices.dims);
    forEachElementIndex(x, indices, axis, (position, i) => (out.data[i] = x.data[position]));
    return out;
  };
}

function scatterElements({ axis = 0, reduction = "none" }) {
  if (reduction !== "none" && reduction !== "add") throw new Error(`reduction ${reduction}`);
  return (x, indices, updates) => {
    const data = x.data.slice();
    forEachElementIndex(x, indices, axis, (position, i) => {
      data[position] = updates.data[i] + (reduction === "add" ? data[position] : 0);
    });
    return makeTensor(x.type, x.dims, data);
  };
}

function trilu({ upper = 1 }) {
  return (x, k) => {
    const [rows, columns] = x.dims.slice(-2);
    const shift = k?.data[0] ?? 0;
    const out = makeTensor(x.type, x.dims);
    for (let i = 0; i < x.data.length; i++) {
      const distance = (i % columns) - (Math.floor(i / columns) % rows);
      if (upper ? distance >= shift : distance <= shift) out.data[i] = x.data[i];
    }
    return out;
  };
}

export const INDEXING_OPERATORS = {
  Gather: gather,
  GatherElements: gatherElements,
  ScatterElements: scatterElements,
  Trilu: trilu,
};
