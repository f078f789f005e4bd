/** ONNX operators of recurrent networks. */
import { logistic } from "./operators_elementwise.js";
import { multiplyTransposed } from "./operators_product.js";
import { makeTensor } from "./tensors.js";

/**
 * Update the states of one row (H) with the gates i, o, f, c in this order: c' = f c + i g and h' = o tanh(c').
 *
 * @param {Float32Array} input W x (4 H) of the row
 * @param {Float32Array} recurrence R h (4 H) of the row
 * @param {Float32Array} bias of W and of R (8 H)
 * @param {Float32Array} hidden (H), changed in place
 * @param {Float32Array} memory (H), changed in place
 */
function updateLSTM(input, recurrence, bias, hidden, memory) {
  const H = hidden.length;
  const gate = (k) => input[k] + recurrence[k] + bias[k] + bias[4 * H + k];
  for (let j = 0; j < H; j++) {
    const candidate = Math.tanh(gate(3 * H + j));
    memory[j] = logistic(gate(2 * H + j)) * memory[j] + logistic(gate(j)) * candidate;
    hidden[j] = logistic(gate(H + j)) * Math.tanh(memory[j]);
  }
}

/** Update the state of one row with the gates z, r, h: h' = (1 - z) tanh(W x + r (R h)) + z h. See updateLSTM. */
function updateGRU(input, recurrence, bias, hidden) {
  const H = hidden.length;
  const ofInput = (k) => input[k] + bias[k];
  const ofHidden = (k) => recurrence[k] + bias[3 * H + k];
  for (let j = 0; j < H; j++) {
    const update = logistic(ofInput(j) + ofHidden(j));
    const reset = logistic(ofInput(H + j) + ofHidden(H + j));
    const candidate = Math.tanh(ofInput(2 * H + j) + reset * ofHidden(2 * H + j));
    hidden[j] = (1 - update) * candidate + update * hidden[j];
  }
}

/**
 * Return a recurrent operator on x (T, B, D). Each direction has W (gates * H, D), R (gates * H, H) and their biases.
 *
 * @param {number} gates of a cell
 * @param {function} update changes the states of one row; see updateLSTM
 */
function recurrent(gates, update) {
  return ({ direction = "forward", hidden_size: H, layout = 0, linear_before_reset: resetsProduct = 1 }) => {
    if (layout !== 0) throw new Error(`layout ${layout}`);
    if (!resetsProduct) throw new Error(`linear_before_reset ${resetsProduct}`);
    const directions = { forward: [false], reverse: [true], bidirectional: [false, true] }[direction];
    const G = gates * H;
    return (x, w, r, bias, lengths, initialHidden, initialMemory, peepholes) => {
      if (lengths || peepholes) throw new Error("sequence_lens and P of recurrent operators are not supported");
      const [T, B, D] = x.dims;
      const y = makeTensor("float32", [T, directions.length, B, H]);
      const states = [initialHidden, initialMemory].map((initial) => {
        return makeTensor("float32", [directions.length, B, H], initial?.data.slice());
      });
      const [input, recurrence] = [new Float32Array(T * B * G), new Float32Array(B * G)];
      directions.forEach((isReverse, d) => {
        const biases = bias ? bias.data.subarray(d * 2 * G, (d + 1) * 2 * G) : new Float32Array(2 * G);
        multiplyTransposed(input, 0, x.data, 0, w.data, d * G * D, T * B, D, G);
        for (let step = 0; step < T; step++) {
          const t = isReverse ? T - 1 - step : step;
          const hidden = states[0].data;
          multiplyTransposed(recurrence, 0, hidden, d * B * H, r.data, d * G * H, B, H, G);
          for (let row = 0; row < B; row++) {
            const at = (d * B + row) * H;
            update(
              input.subarray((t * B + row) * G, (t * B + row + 1) * G),
              recurrence.subarray(row * G, (row + 1) * G),
              biases,
              ...states.map(({ data }) => data.subarray(at, at + H)),
            );
          }
          y.data.set(hidden.subarray(d * B * H, (d + 1) * B * H), (t * directions.length + d) * B * H);
        }
      });
      return [y, ...states];
    };
  };
}

export const RECURRENT_OPERATORS = {
  GRU: recurrent(3, updateGRU),
  LSTM: recurrent(4, updateLSTM),
};
