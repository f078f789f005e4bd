/** Tokenizers, which map texts to ids and back exactly as those of lightning_tfm.tokenization. */

/** Ids of padding, beginning of sequence and end of sequence. */
export const PAD = 0;
export const BOS = 1;
export const EOS = 2;

/** Number of special ids, which precede the ids of symbols. */
export const NUM_SPECIAL = 3;

const SPECIAL_NAMES = ["PAD", "BOS", "EOS"];
const UNKNOWN_SYMBOL = "\ufffd";
const UNKNOWN_ID = NUM_SPECIAL;

/** Maximum number of symbols that a message names. */
const NUM_NAMED = 3;

// Whitespace of Python's str.isspace, which is not that of JavaScript.
const SPACES = "[\\t-\\r\\x1c-\\x20\\x85\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000]";
const OUTER_SPACES = new RegExp(`^${SPACES}+|${SPACES}+$`, "gu");
const SPACE_RUNS = new RegExp(`${SPACES}+`, "u");

function stripSpaces(text) {
  return text.replace(OUTER_SPACES, "");
}

/** Strip whitespace around the tab-separated fields of a line, as in the training data. */
export function stripFields(line) {
  return line.split("\t").map(stripSpaces).join("\t").replace(/\t+$/, "");
}

/** Convert a line to Unicode's normalization form NFC; throw an Error if it is not valid Unicode. */
export function normalizeLine(line) {
  if (/\p{Surrogate}/u.test(line)) {
    throw new Error("it is not valid UTF-8; save the input in UTF-8, as with iconv -t UTF-8");
  }
  return line.normalize("NFC");
}

/** Return a text as Python's repr() does. */
export function pythonRepr(text) {
  const quote = text.includes("'") && !text.includes('"') ? '"' : "'";
  const named = { "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t" };
  const escaped = Array.from(text, (character) => {
    if (character === quote || character in named) return named[character] ?? `\\${quote}`;
    if (character === " " || !/[\p{C}\p{Z}]/u.test(character)) return character;
    const code = character.codePointAt(0).toString(16);
    const [letter, width] = code.length <= 2 ? ["x", 2] : code.length <= 4 ? ["u", 4] : ["U", 8];
    return `\\${letter}${code.padStart(width, "0")}`;
  });
  return quote + escaped.join("") + quote;
}

/** Return the ids before the first EOS, without special ids. */
function stripSpecial(ids) {
  const end = ids.indexOf(EOS);
  return (end < 0 ? ids : ids.slice(0, end)).filter((id) => id >= NUM_SPECIAL);
}

/** Return the index of each of some symbols, counted from a first id. */
function numbered(symbols, first) {
  return new Map(symbols.map((symbol, place) => [symbol, place + first]));
}

/** Base class of tokenizers; `encode` returns an id, or an array of `idsPerToken` ids, for each token. */
class Tokenizer {
  idsPerToken = 1;
  numColumns = null;
  numSources = 1;
  unknownId = null;
  spacedIds = [];

  /** Encode the end of a text, which follows another token. */
  encodeRest(text) {
    return this.encode(text);
  }

  /** Return the symbols of a text that are encoded as the unknown id. */
  unknownSymbols(text) {
    if (this.unknownId === null) return [];
    const ids = this.encode(text);
    return this.split(text).filter((_, place) => ids[place] === this.unknownId);
  }

  /** Return the symbol of a token, with the names of special tokens. */
  symbol(id) {
    return SPECIAL_NAMES[id] ?? this.decode([id]);
  }
}

/** Return the names of the most frequent symbols, for a message. */
export function nameSymbols(symbols) {
  const counts = new Map();
  for (const symbol of symbols) counts.set(symbol, (counts.get(symbol) ?? 0) + 1);
  const names = Array.from(counts).sort(([, a], [, b]) => b - a).map(([symbol]) => pythonRepr(symbol));
  return [...names.slice(0, NUM_NAMED), ...(names.length > NUM_NAMED ? ["..."] : [])].join(", ");
}

function splitSymbols(text, separator) {
  if (separator === "") return Array.from(text);
  if (stripSpaces(separator) !== "") return text.split(separator);
  const stripped = stripSpaces(text);
  return stripped === "" ? [] : stripped.split(SPACE_RUNS);
}

class SymbolTokenizer extends Tokenizer {
  constructor({ symbols, separator, target_separator, feature_separator, num_sources, decompose }) {
    super();
    Object.assign(this, { symbols, separator, targetSeparator: target_separator, featureSeparator: feature_separator });
    this.numSources = num_sources;
    this.decompose = decompose;
    this.ids = numbered(symbols, NUM_SPECIAL);
    const numColumns = num_sources + (feature_separator === null ? 0 : 1);
    this.numColumns = numColumns === 1 && this.ids.has("\t") ? null : numColumns;
    this.unknownId = this.ids.get(UNKNOWN_SYMBOL) ?? null;
  }

  split(text) {
    const hasFeatures = this.featureSeparator !== null;
    if (this.numSources === 1 && !hasFeatures) return this.splitSource(text);
    const sources = text.split("\t");
    const rest = hasFeatures ? sources.splice(this.numSources).join("\t") : "";
    const features = hasFeatures ? splitSymbols(rest, this.featureSeparator).map(stripSpaces).filter(Boolean) : [];
    const symbols = sources.flatMap((source) => ["\t", ...this.splitSource(source)]).slice(1);
    return [...symbols, ...features.map((feature) => `[${feature}]`)];
  }

  splitSource(text) {
    const isDecomposed = this.decompose && this.separator === "";
    return splitSymbols(isDecomposed ? text.normalize("NFD") : text, this.separator);
  }

  encode(text) {
    const symbols = this.split(text);
    const ids = symbols.map((symbol) => this.ids.get(symbol) ?? this.unknownId);
    const place = ids.indexOf(null);
    if (place < 0) return ids;
    const characters = Array.from(text);
    const excerpt = characters.length <= 60 ? text : `${characters.slice(0, 57).join("")}...`;
    const name = `${this.separator ? "word" : "character"} ${pythonRepr(symbols[place])}`;
    throw new Error(`the vocabulary has no ${name} (position ${place + 1} of ${pythonRepr(excerpt)})`);
  }

  decode(ids) {
    const text = stripSpecial(ids).map((id) => this.symbols[id - NUM_SPECIAL]).join(this.targetSeparator);
    return this.decompose ? text.normalize("NFC") : text;
  }
}

// Marks, joiners and the skin tones of emoji extend the preceding character; \w of Python is [\p{L}\p{N}_].
const EXTENSIONS = "[\\p{M}\\u200c\\u200d\\u{1f3fb}-\\u{1f3ff}]";
const WORD = `[\\p{L}\\p{N}_']+(?:${EXTENSIONS}+[\\p{L}\\p{N}_']*)*`;
const OTHER = `(?:(?!${SPACES}|[\\p{L}\\p{N}_])[^])${EXTENSIONS}*`;
const WORD_PATTERN = new RegExp(`${WORD}|${OTHER}(?:(?<=\\u200d)${OTHER})*`, "gu");
const LINE_BREAKS = new RegExp(`<br${SPACES}*/?>`, "gu");

const NGRAMS = [5, 4, 3];
const MAX_NGRAMS = 32;

const CRC_TABLE = Uint32Array.from({ length: 256 }, (_, value) => {
  for (let bit = 0; bit < 8; bit++) value = value & 1 ? (value >>> 1) ^ 0xedb88320 : value >>> 1;
  return value;
});

function crc32(bytes) {
  return (bytes.reduce((crc, byte) => CRC_TABLE[(crc ^ byte) & 255] ^ (crc >>> 8), -1) ^ -1) >>> 0;
}

class WordTokenizer extends Tokenizer {
  unknownId = UNKNOWN_ID;

  constructor({ words, num_ngrams }) {
    super();
    Object.assign(this, { words, numNgrams: num_ngrams, ids: numbered(words, UNKNOWN_ID + 1) });
    this.firstNgram = UNKNOWN_ID + 1 + words.length;
    this.idsPerToken = num_ngrams ? 1 + MAX_NGRAMS : 1;
  }

  split(text) {
    return text.replace(LINE_BREAKS, " ").toLowerCase().match(WORD_PATTERN) ?? [];
  }

  encode(text) {
    return this.split(text).map((word) => (this.numNgrams ? this.spell(word) : this.ids.get(word) ?? UNKNOWN_ID));
  }

  /** Return the ids of a word and of the n-grams of the word enclosed in `<` and `>`. */
  spell(word) {
    const characters = Array.from(`<${word}>`);
    const ngrams = NGRAMS.flatMap((n) =>
      Array.from({ length: Math.max(0, characters.length - n + 1) }, (_, place) => characters.slice(place, place + n)),
    );
    const ids = Array(MAX_NGRAMS).fill(PAD);
    ngrams.slice(0, MAX_NGRAMS).forEach((ngram, place) => {
      ids[place] = this.firstNgram + (crc32(new TextEncoder().encode(ngram.join(""))) % this.numNgrams);
    });
    return [this.ids.get(word) ?? UNKNOWN_ID, ...ids];
  }

  decode(ids) {
    return stripSpecial(ids).map((id) => [UNKNOWN_SYMBOL, ...this.words][id - UNKNOWN_ID]).join(" ");
  }
}

// The character of each byte in the tokens of a byte-level vocabulary: printable bytes represent themselves.
const BYTE_CHARACTERS = (() => {
  let others = 256;
  const isPrintable = (byte) => (byte > 32 && byte < 127) || (byte > 160 && byte !== 173);
  return Array.from({ length: 256 }, (_, byte) => String.fromCharCode(isPrintable(byte) ? byte : others++));
})();
const CHARACTER_BYTES = numbered(BYTE_CHARACTERS, 0);

// The pattern of GPT-2, whose whitespace is Unicode's.
const PIECE_PATTERN = new RegExp(
  "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\p{White_Space}\\p{L}\\p{N}]+|" +
    "\\p{White_Space}+(?!\\P{White_Space})|\\p{White_Space}+",
  "gu",
);

/** Tokenizer of a tokenizer.json of byte-level BPE, which `check_tokenizer` of Python checks. */
class SubwordTokenizer extends Tokenizer {
  constructor({ model }) {
    super();
    const content = JSON.parse(model);
    const added = content.added_tokens;
    this.ids = new Map([...Object.entries(content.model.vocab), ...added.map(({ content: token, id }) => [token, id])]);
    this.tokens = new Map(Array.from(this.ids, ([token, id]) => [id, token]));
    this.skipped = new Set(added.filter(({ special }) => special).map(({ id }) => id));
    const pairs = content.model.merges.map((pair) => (typeof pair === "string" ? pair : pair.join(" ")));
    this.ranks = numbered(pairs, 0);
    this.addsSpace = content.pre_tokenizer.add_prefix_space;
    const spaced = Array.from(this.ids).filter(([token]) => token.startsWith(BYTE_CHARACTERS[32]));
    this.spacedIds = spaced.map(([, id]) => id + NUM_SPECIAL);
    const longestFirst = added.map((token) => token.content).sort((a, b) => b.length - a.length);
    const escaped = longestFirst.map((token) => token.replace(/[\\^$.*+?()[\]{}|]/g, "\\$&"));
    this.addedPattern = escaped.length ? new RegExp(`(${escaped.join("|")})`, "u") : null;
    this.merged = new Map();
  }

  /** Return the tokens of a text, with the indices of their first and after their last character. */
  tokenize(text, addsSpace) {
    const tokens = [];
    let place = 0;
    (this.addedPattern ? text.split(this.addedPattern) : [text]).forEach((part, number) => {
      const characters = Array.from(part);
      if (number % 2) tokens.push({ token: part, begin: place, end: place + characters.length });
      else tokens.push(...this.tokenizePart(characters, place, addsSpace));
      place += characters.length;
    });
    return tokens;
  }

  tokenizePart(characters, place, addsSpace) {
    const isPrefixed = addsSpace && characters.length > 0 && characters[0] !== " ";
    const tokens = [];
    const part = (isPrefixed ? " " : "") + characters.join("");
    let next = place - (isPrefixed ? 1 : 0);
    for (const [piece] of part.matchAll(PIECE_PATTERN)) {
      const places = []; // of the character of each byte
      let symbols = "";
      for (const character of piece) {
        for (const byte of new TextEncoder().encode(character)) {
          symbols += BYTE_CHARACTERS[byte];
          places.push(Math.max(next, place)); // the added space belongs to the first character
        }
        next++;
      }
      let begin = 0;
      for (const token of this.merge(symbols)) {
        tokens.push({ token, begin: places[begin], end: places[begin + token.length - 1] + 1 });
        begin += token.length;
      }
    }
    return tokens;
  }

  /** Return the tokens of a piece: the first pair with the lowest rank is merged until there is none. */
  merge(piece) {
    if (this.merged.has(piece)) return this.merged.get(piece);
    const tokens = Array.from(piece);
    for (;;) {
      const ranks = tokens.slice(1).map((token, place) => this.ranks.get(`${tokens[place]} ${token}`) ?? Infinity);
      const lowest = ranks.reduce((least, rank) => Math.min(least, rank), Infinity);
      if (lowest === Infinity) break;
      const place = ranks.indexOf(lowest);
      tokens.splice(place, 2, tokens[place] + tokens[place + 1]);
    }
    this.merged.set(piece, tokens);
    return tokens;
  }

  split(text) {
    const characters = Array.from(text);
    return this.tokenize(text, this.addsSpace).map(({ begin, end }) => characters.slice(begin, end).join(""));
  }

  encode(text) {
    return this.tokenize(text, this.addsSpace).map(({ token }) => this.ids.get(token) + NUM_SPECIAL);
  }

  encodeRest(text) {
    return this.tokenize(text, false).map(({ token }) => this.ids.get(token) + NUM_SPECIAL);
  }

  decode(ids) {
    const known = stripSpecial(ids).map((id) => id - NUM_SPECIAL).filter((id) => this.tokens.has(id));
    const bytes = known.filter((id) => !this.skipped.has(id)).flatMap((id) => {
      const characters = Array.from(this.tokens.get(id));
      if (characters.every((character) => CHARACTER_BYTES.has(character)))
        return characters.map((character) => CHARACTER_BYTES.get(character));
      return Array.from(new TextEncoder().encode(characters.join("")));
    });
    return new TextDecoder("utf-8", { ignoreBOM: true }).decode(Uint8Array.from(bytes)).replace(/^ /, "");
  }
}

const TOKENIZERS = { symbols: SymbolTokenizer, words: WordTokenizer, subwords: SubwordTokenizer };

/**
 * Construct a tokenizer from the values of Python's `Tokenizer.to_dict`.
 *
 * @param {object} values the values
 * @returns {Tokenizer} the tokenizer
 */
export function tokenizerOf(values) {
  return new TOKENIZERS[values.type](values);
}
