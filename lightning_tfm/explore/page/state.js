// The state of the page, and its text in the address.

const textFormat = { parse: (text) => text, format: (value) => value };
const wholeFormat = { parse: (text) => wholeNumber(text), format: String };
const positiveFormat = { parse: (text) => real(text, (value) => value > 0), format: String };
const shareFormat = { parse: (text) => real(text, (value) => value > 0 && value <= 1), format: String };
const oneOf = (...values) => ({ parse: (text) => (values.includes(text) ? text : undefined), format: String });
const listOf = (item) => ({
  parse: (text) => wholeList(text.split(",").map(item.parse)),
  format: (value) => value.map(item.format).join(","),
});
const drawnFormat = {
  parse(text) {
    const [layer, query, key, head] = text.split(":");
    const cell = { layer, query: wholeNumber(query), key: wholeNumber(key), head: head ? wholeNumber(head) : null };
    return Object.values(cell).includes(undefined) ? undefined : cell;
  },
  format: ({ layer, query, key, head }) => [layer, query, key, ...(head === null ? [] : [head])].join(":"),
};
const patchedFormat = {
  parse(text) {
    const [layer, position] = text.split(":");
    return wholeNumber(position) === undefined ? undefined : { layer, position: wholeNumber(position) };
  },
  format: ({ layer, position }) => `${layer}:${position}`,
};
const headFormat = { parse: (text) => (text === "mean" ? text : wholeNumber(text)), format: String };

/** Format of each field in the address. */
const FORMATS = {
  model: listOf(wholeFormat),
  text: textFormat,
  against: textFormat,
  prefix: listOf(wholeFormat),
  vocabulary: textFormat,
  off: listOf(textFormat),
  drawn: listOf(drawnFormat),
  patched: listOf(patchedFormat),
  view: textFormat,
  layer: textFormat,
  head: headFormat,
  beamSize: wholeFormat,
  method: oneOf("occlusion", "integrated_gradients"),
  by: oneOf("source", "decoder"),
  step: wholeFormat,
  temperature: positiveFormat,
  topK: wholeFormat,
  topP: shareFormat,
  seed: wholeFormat,
  maxTokens: wholeFormat,
};

/** Characters that stay readable in the address. */
const READABLE = { "%2C": ",", "%3A": ":", "%20": "+" };

/** Fields whose consecutive changes are one entry of the browser's history. */
const CONTINUOUS = ["text", "against", "step", "temperature", "topP"];

/** Values of the fields that the address lacks. `model` null: the first two models. */
export const DEFAULTS = {
  model: null,
  text: "",
  against: "",
  prefix: [],
  vocabulary: null,
  off: [],
  drawn: [],
  patched: [],
  view: "attention",
  layer: null,
  head: "mean",
  beamSize: 5,
  method: "occlusion",
  by: "source",
  step: 0,
  temperature: 1,
  topK: null,
  topP: null,
  seed: 0,
  maxTokens: 100,
};

function wholeNumber(text) {
  return /^\d{1,9}$/.test(text) ? Number(text) : undefined;
}

function real(text, isValid) {
  return text !== "" && isValid(Number(text)) ? Number(text) : undefined;
}

function wholeList(items) {
  return items.includes(undefined) ? undefined : items;
}

function isEqual(a, b) {
  return JSON.stringify(a) === JSON.stringify(b);
}

/** Return values as the text of an address: "text=May+3&off=encoder.0.feed_forward". */
function addressOf(values) {
  return Object.entries(values)
    .filter(([name, value]) => !isEqual(value, DEFAULTS[name]))
    .map(([name, value]) => [name, encodeURIComponent(FORMATS[name].format(value))])
    .map(([name, text]) => `${name}=${text.replace(/%2C|%3A|%20/g, (code) => READABLE[code])}`)
    .join("&");
}

/** Return the values in the text of an address; fields that are missing or wrong have their defaults. */
function valuesOf(address) {
  const values = { ...DEFAULTS };
  for (const [name, text] of new URLSearchParams(address.replace(/^#/, ""))) {
    const value = Object.hasOwn(FORMATS, name) ? FORMATS[name].parse(text) : undefined;
    if (value !== undefined) values[name] = value;
  }
  return values;
}

/**
 * State of the page.
 *
 * With a location, the state is kept in its part after "#", and follows it: back and forward restore earlier states.
 */
export class State {
  #values;
  #location;
  #listeners = new Set();
  #previous = "text"; // the text that the page starts with is no entry of the history
  #follow = () => this.#read();

  /** @param {Location|null} location an object with `hash` and `replace(address)`, or null. */
  constructor(location) {
    this.#location = location;
    this.#values = valuesOf(location?.hash ?? "");
    if (location !== null) globalThis.addEventListener?.("hashchange", this.#follow);
  }

  /** Return the values of all fields. */
  get() {
    return this.#values;
  }

  /** Change fields; another text clears the changes that belong to the text before. */
  set(changes) {
    const before = this.#values;
    const isNew = (name) => name in changes && changes[name] !== before[name];
    const cleared = isNew("text") ? { prefix: [], drawn: [], patched: [], step: 0 }
      : isNew("against") ? { patched: [] } : {};
    this.#values = { ...before, ...cleared, ...changes };
    if (this.#values.prefix.length === 0) this.#values.vocabulary = null;
    if (isEqual(before, this.#values)) return;
    this.#write(Object.keys(changes).join());
    this.#notify();
  }

  /** Call a function with the values, now and after each change. */
  follow(listener) {
    this.#listeners.add(listener);
    listener(this.#values);
  }

  /** Stop following the address. */
  close() {
    globalThis.removeEventListener?.("hashchange", this.#follow);
    this.#listeners.clear();
  }

  #notify() {
    for (const listener of this.#listeners) listener(this.#values);
  }

  #write(changed) {
    if (this.#location === null) return;
    const address = `#${addressOf(this.#values)}`;
    if (changed === this.#previous && CONTINUOUS.includes(changed)) this.#location.replace(address);
    else this.#location.hash = address;
    this.#previous = changed;
  }

  #read() {
    const values = valuesOf(this.#location.hash);
    if (isEqual(values, this.#values)) return; // the page itself wrote the address
    this.#values = values;
    this.#previous = "";
    this.#notify();
  }
}

/** Return whether a model has a part: a component, or a head of one ("decoder.0.cross_attention.1"). */
function hasPart(model, part) {
  return model.components.some(({ name, kind, heads }) => name === part || (kind === "attention"
    && part.startsWith(`${name}.`) && wholeNumber(part.slice(name.length + 1)) < heads));
}

/** Return the changes of the state that apply to a model, as the argument `changes` of a question. */
export function changesFor(model, values) {
  const allowed = (kind, list) => (model.changes.includes(kind) ? list : []);
  const drawable = values.drawn.filter(({ layer }) => model.drawable.includes(layer));
  const patchable = values.against === "" ? [] : values.patched.filter(({ layer }) => hasPart(model, layer));
  const off = values.off.filter((part) => hasPart(model, part));
  return {
    off: off.filter((part) => model.changes.includes(model.components.some(({ name }) => name === part)
      ? "off_components" : "off_heads")),
    drawn: allowed("drawn", drawable),
    patched: allowed("patched", patchable),
  };
}

/** Return the vocabulary of the ids of a prefix of a model, as a field of the state; null if all models share it. */
export function vocabularyField(models, { vocabulary }) {
  return { vocabulary: models.every((model) => model.vocabulary === vocabulary) ? null : vocabulary };
}

/** Return the arguments of a question about the text of the state, with the changes that apply to a model. */
export function textArguments(model, values) {
  const changes = changesFor(model, values);
  const question = { text: values.text };
  const isKnown = [null, model.vocabulary].includes(values.vocabulary);
  if (values.prefix.length > 0 && isKnown) question.prefix = values.prefix;
  if (Object.values(changes).some((list) => list.length > 0)) question.changes = changes;
  if (changes.patched.length > 0) question.against = values.against;
  return question;
}
