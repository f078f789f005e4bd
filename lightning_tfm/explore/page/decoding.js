/**
 * Greedy decoding, sampling and beam search with any step function, as in lightning_tfm.inference.decoding.
 *
 * A step function `step(tokens, state)` takes the last token of each of B rows and a state, and returns
 * {logits: B arrays of length V, state, ...others}. A state holds tensors by name, whose first dimension is B.
 */

import { BOS, EOS, PAD } from "./tokenizers.js";

/** Number of finished sequences with which a beam search ends, divided by the number of beams. */
const PATIENCE = 2;

/** Ids that are never generated as part of a target. */
const NEVER_GENERATED = [PAD, BOS];

/** Return the log probabilities of logits. */
export function logSoftmax(logits) {
  const values = Float64Array.from(logits);
  const greatest = values.reduce((most, value) => Math.max(most, value), -Infinity);
  const normalizer = greatest + Math.log(values.reduce((sum, value) => sum + Math.exp(value - greatest), 0));
  return values.map((value) => value - normalizer);
}

/** Return a copy of logits or log probabilities in which excluded ids have -Infinity. */
function maskIds(logits, excluded) {
  const masked = Float64Array.from(logits);
  for (const id of excluded) masked[id] = -Infinity;
  return masked;
}

/** Return the ids of the greatest values, in descending order; the lower id of equal values comes first. */
export function topIds(values, number) {
  const best = [];
  values.forEach((value, id) => {
    let place = best.length;
    while (place > 0 && values[best[place - 1]] < value) place--;
    if (place === number) return;
    best.splice(place, 0, id);
    best.length = Math.min(best.length, number);
  });
  return best;
}

/** Return the id of the greatest value. */
function argmaxId(values) {
  return values.reduce((best, value, id) => (value > values[best] ? id : best), 0);
}

/** Return the rows of every tensor of a state with some indices, in their new order. */
function selectRows(state, rows) {
  return Object.fromEntries(
    Object.entries(state).map(([name, { type, dims, data }]) => {
      const size = data.length / dims[0];
      const selected = new data.constructor(rows.length * size);
      rows.forEach((row, place) => selected.set(data.subarray(row * size, (row + 1) * size), place * size));
      return [name, { type, dims: [rows.length, ...dims.slice(1)], data: selected }];
    }),
  );
}

/**
 * Decode one row, token by token, until EOS.
 *
 * @param {function} step the step function
 * @param {object} state the state, of one row
 * @param {number} maxLength the maximum number of tokens
 * @param {function(Float64Array, number): number} choose returns the next token for logits and the index of the step
 * @param {{first: number, excluded: number[]}} options the token before the first one, and ids that are never chosen
 * @returns {object[]} for each token, {token, ...the result of `step`}
 */
export function decodeTokens(step, state, maxLength, choose, { first = BOS, excluded = NEVER_GENERATED } = {}) {
  const steps = [];
  let token = first;
  while (steps.length < maxLength && token !== EOS) {
    const result = step([token], state);
    token = choose(maskIds(result.logits[0], excluded), steps.length);
    steps.push({ token, ...result });
    state = result.state;
  }
  return steps;
}

/**
 * Continue a text by a number of tokens, as `continue_text` of Python.
 *
 * The network attends to at most the last `maxLength` tokens. When its positions are used up, the last half of them is
 * encoded again from position 0.
 *
 * @param {function(number[]): object} encode returns the state of `decode_step` after some tokens, which may be none
 * @param {function} step the step function
 * @param {number[]} tokens the text, of at most `maxLength` tokens
 * @param {number} number the number of tokens to generate
 * @param {number} maxLength the number of positions
 * @param {function} choose see `decodeTokens`; steps are counted from the end of the text
 * @returns {object[]} the steps of the text, except its first token, and those of the continuation, see `decodeTokens`
 */
export function continueText(encode, step, tokens, number, maxLength, choose) {
  const [, ...given] = tokens;
  const length = given.length + number;
  const steps = [];
  let seen = tokens.slice(0, 1);
  while (steps.length < length) {
    const done = steps.length;
    const choice = (logits, place) => given[done + place] ?? choose(logits, done + place - given.length);
    const options = { first: seen.at(-1), excluded: [PAD, BOS, EOS] };
    const room = Math.min(maxLength - seen.length + 1, length - done);
    steps.push(...decodeTokens(step, encode(seen.slice(0, -1)), room, choice, options));
    seen = steps.slice(-Math.max(1, Math.floor(maxLength / 2))).map(({ token }) => token);
  }
  return steps;
}

/** Return a function that chooses the tokens of a prefix, and after them the most probable ones. */
export function greedyChoice(prefix = []) {
  return (logits, place) => prefix[place] ?? argmaxId(logits);
}

/** Return a generator of random numbers from 0 to 1 (mulberry32), with a seed below 2^32. */
export function mulberry32(seed) {
  return () => {
    seed = (seed + 0x6d2b79f5) | 0;
    let bits = Math.imul(seed ^ (seed >>> 15), seed | 1);
    bits = (bits + Math.imul(bits ^ (bits >>> 7), bits | 61)) ^ bits;
    return ((bits ^ (bits >>> 14)) >>> 0) / 2 ** 32;
  };
}

/** Return the probabilities from which tokens are sampled, as in `sampler` of Python. */
export function samplingProbabilities(logits, { temperature = 1, topK = null, topP = null }) {
  let values = Float64Array.from(logits, (logit) => logit / temperature);
  if (topK !== null && topK < values.length) {
    const least = values.toSorted()[values.length - topK];
    values = values.map((value) => (value < least ? -Infinity : value));
  }
  if (topP !== null) {
    const probabilities = logSoftmax(values).map(Math.exp);
    const ids = Array.from(values.keys()).sort((a, b) => probabilities[b] - probabilities[a]);
    let sum = 0;
    for (const id of ids) {
      if (sum >= topP) values[id] = -Infinity; // the more probable tokens already reach it
      sum += probabilities[id];
    }
  }
  return logSoftmax(values).map(Math.exp);
}

/** Return a function that samples tokens with `random`, a generator of numbers from 0 to 1. */
export function sampleChoice(random, sampling = {}) {
  return (logits) => {
    const probabilities = samplingProbabilities(logits, sampling);
    let rest = random();
    const chosen = probabilities.findIndex((probability) => (rest -= probability) < 0);
    return chosen < 0 ? argmaxId(probabilities) : chosen; // the sum may be rounded below 1
  };
}

/** Return the candidates of a step of a beam search: the most probable extensions of open prefixes, the best first. */
function extendBeams(open, logits, number) {
  const candidates = open.flatMap(({ tokens, node, logProbability }, row) => {
    const values = maskIds(logSoftmax(logits[row]), NEVER_GENERATED);
    return topIds(values, number).map((token) => (
      { row, parent: node, tokens: [...tokens, token], logProbability: logProbability + values[token] }
    ));
  });
  const isPossible = ({ logProbability }) => logProbability > -Infinity;
  return candidates.filter(isPossible).sort((a, b) => b.logProbability - a.logProbability).slice(0, number);
}

/**
 * Find sequences with high scores by beam search, as `beam_search` of Python with a length penalty of 1.
 *
 * @param {function} step the step function
 * @param {object} state the state, of one row
 * @param {number} maxLength the maximum number of tokens
 * @param {number} beamSize the number of beams
 * @returns {{nodes: object[], outputs: object[]}} the tree of the candidates of all steps, see `Explorer.beam` of
 *   Python, without symbols, and up to `beamSize` outputs {tokens, score, log_probability, node}, the best first
 */
export function beamSearch(step, state, maxLength, beamSize) {
  const capacity = PATIENCE * beamSize;
  const nodes = [{ id: 0, token: null, parent: null, log_probability: 0, step: 0, status: "open", rank: 0 }];
  const finished = [];
  let numFinished = 0; // also those beyond the capacity
  let open = [{ tokens: [], node: 0, logProbability: 0 }];
  for (let length = 1; length <= maxLength && open.length > 0 && numFinished < capacity; length++) {
    const result = step(open.map(({ tokens }) => tokens.at(-1) ?? BOS), state);
    const candidates = extendBeams(open, result.logits, 2 * beamSize);
    open = [];
    candidates.forEach((candidate, rank) => {
      const { tokens, parent, logProbability } = candidate;
      const isEnd = tokens.at(-1) === EOS;
      const status = isEnd ? (rank < beamSize ? "finished" : "pruned") : open.length < beamSize ? "open" : "pruned";
      candidate.node = nodes.length;
      candidate.score = logProbability / length;
      const [id, token] = [candidate.node, tokens.at(-1)];
      nodes.push({ id, token, parent, log_probability: logProbability, step: length, status, rank });
      if (status === "open") open.push(candidate);
      if (status === "finished" && numFinished++ < capacity) finished.push(candidate);
    });
    state = selectRows(result.state, open.map(({ row }) => row));
  }
  const all = numFinished < capacity ? [...finished, ...open] : finished;
  const outputs = all.sort((a, b) => b.score - a.score).slice(0, beamSize); // the earlier of equal scores comes first
  return {
    nodes,
    outputs: outputs.map(({ tokens, score, logProbability, node }) => (
      { tokens, score, log_probability: logProbability, node }
    )),
  };
}
