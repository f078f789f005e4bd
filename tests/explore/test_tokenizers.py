"""Tokenizers of the page give the ids, symbols, texts and errors of those in Python."""

from __future__ import annotations

import json
import random
import subprocess
import unicodedata
from datetime import date
from pathlib import Path

import pytest
import tokenizers
from babel.dates import format_date

from lightning_tfm.errors import UserError
from lightning_tfm.explore.file import check_tokenizer
from lightning_tfm.inference import clean_line
from lightning_tfm.tokenization import (
    NUM_SPECIAL,
    UNKNOWN,
    SubwordTokenizer,
    SymbolTokenizer,
    Tokenizer,
    train_tokenizer,
    train_word_tokenizer,
)
from support.corpora import TEXT

MODULE = Path(__file__).parents[2] / "lightning_tfm/explore/page/tokenizers.js"

SCRIPT = """
import {{ readFileSync, writeFileSync }} from "node:fs";
import {{ normalizeLine, stripFields, tokenizerOf }} from {module};
const attempt = (compute) => {{ try {{ return compute(); }} catch (error) {{ return error.message; }} }};
const {{ tokenizers, lines, ids }} = JSON.parse(readFileSync(process.argv[1], "utf-8"));
const cleaned = lines.map((line) => stripFields(normalizeLine(line)));
const results = tokenizers.map((values) => {{
  const tokenizer = tokenizerOf(values);
  return {{
    ids: cleaned.map((line) => attempt(() => tokenizer.encode(line))),
    rests: cleaned.slice(0, 1000).map((line) => attempt(() => tokenizer.encodeRest(line))),
    symbols: cleaned.map((line) => tokenizer.split(line)),
    texts: ids.map((row) => tokenizer.decode(row)),
    names: [0, 1, 2, 3, 4, 5].map((id) => tokenizer.symbol(id)),
    settings: [tokenizer.idsPerToken, tokenizer.numColumns, tokenizer.unknownId, [...tokenizer.spacedIds].sort()],
  }};
}});
writeFileSync(process.argv[2], JSON.stringify({{ cleaned, results }}));
"""

LOCALES = (
    "am",
    "ar",
    "bn",
    "de",
    "el",
    "en",
    "fa",
    "fr",
    "he",
    "hi",
    "ja",
    "ka",
    "ko",
    "ru",
    "ta",
    "th",
    "tr",
    "vi",
    "zh",
)
EMOJI = "👍🏽 👩‍👩‍👧 🏴󠁧󠁢󠁥󠁮󠁧󠁿 ❤️ 🇩🇪 e\u0301 ﬁ İ ΣΑΣ ῼ\u0345 ｶﾞ \u1100\u1161\u11a8"


def run_node(tokenizers: list[dict], lines: list[str], ids: list[list[int]], folder: Path) -> dict:
    """Return what tokenizers.js makes of lines and ids."""
    (folder / "input.json").write_text(json.dumps({"tokenizers": tokenizers, "lines": lines, "ids": ids}))
    script = SCRIPT.format(module=json.dumps(MODULE.as_uri()))
    arguments = [str(folder / name) for name in ("input.json", "output.json")]
    subprocess.run(["node", "--input-type=module", "--eval", script, *arguments], check=True)
    return json.loads((folder / "output.json").read_text())


def random_lines(number: int) -> list[str]:
    """Draw dates in many languages, sentences, and texts of all scripts with spaces, marks and control characters."""
    draw = random.Random(0)
    scripts = [chr(code) for code in range(1, 0x20000) if unicodedata.category(chr(code)) not in ("Cn", "Co", "Cs")]
    marks = [character for character in scripts if unicodedata.category(character)[0] == "M"]
    pools = (scripts, scripts, marks, scripts[:300], EMOJI, " \t\u3000\u200d\x1f<|>'")
    words = TEXT.split()

    def one_date() -> str:
        day = date.fromordinal(draw.randint(1, date.max.toordinal()))
        return format_date(day, draw.choice(("short", "medium", "long", "full")), locale=draw.choice(LOCALES))

    def sentence() -> str:
        parts = (
            draw.choice(words) + draw.choice(("", "", "", ",", "'s", "!?", "...", "<br />", "-")) for _ in range(9)
        )
        return draw.choice(("", " ", "\t", "  ")).join(draw.choice((part, part.upper())) + " " for part in parts)

    def characters() -> str:
        return "".join(draw.choice(draw.choice(pools)) for _ in range(draw.randint(0, 20)))

    def script() -> str:
        begin = draw.randrange(len(scripts) - 60)
        return "".join(draw.choice((" ", *draw.choices(scripts[begin : begin + 60], k=5))) for _ in range(25))

    kinds = (one_date, sentence, characters, script)
    specials = [
        EMOJI,
        "",
        " ",
        "\t",
        "a<|endoftext|> b<|endoftext|>",
        "x" * 70 + "'",
        'it\'s "x"',
        "\ufeffa\ufeff",
        "-" * 300,
    ]
    return [*specials, *(draw.choice(kinds)() for _ in range(number - len(specials)))]


def byte_level(add_prefix_space: bool, special: str | None) -> SubwordTokenizer:
    """Train a tokenizer in the format of GPT-2."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.normalizer = tokenizers.normalizers.NFC()
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    model.post_processor = tokenizers.processors.ByteLevel(trim_offsets=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    model.train_from_iterator([TEXT, EMOJI], trainer)
    if special is not None:
        model.add_special_tokens([special])
        model.add_tokens([tokenizers.AddedToken("Hund", normalized=False)])
    return SubwordTokenizer(model.to_str())


def attempt(compute):
    try:
        return compute()
    except UserError as error:
        return str(error)


def test_tokenizers_equal_python(tmp_path):
    lines = random_lines(10_000)
    known = sorted(set("".join(map(clean_line, lines[:500]))))
    decomposed = sorted(set(unicodedata.normalize("NFD", "".join(known))))
    cases: list[Tokenizer] = [
        SymbolTokenizer(known),
        SymbolTokenizer([character for character in known if character != "\t"]),
        SymbolTokenizer([UNKNOWN, *known[::2]]),
        SymbolTokenizer(TEXT.split()[:1] + sorted(set(TEXT.split()) - {TEXT.split()[0]}), " "),
        SymbolTokenizer([UNKNOWN, *sorted(set(TEXT))], ",", " "),
        SymbolTokenizer([UNKNOWN, *known, "[PL]", "[Hund]"], "", None, " "),
        *(
            SymbolTokenizer([UNKNOWN, *known, "[PL]", "[Hund]"], separator, None, features, sources)
            for separator in ("", " ", ",")
            for features in (None, " ")
            for sources in (2, 3)
        ),
        *(SymbolTokenizer([UNKNOWN, *decomposed], "", target, None, 1, decompose=True) for target in ("", " ")),
        train_word_tokenizer(lines, 2000),
        train_word_tokenizer(lines, 2000, num_ngrams=1000),
        train_tokenizer([TEXT, *lines], "subword", 1500),
        byte_level(add_prefix_space=False, special="<|endoftext|>"),
        byte_level(add_prefix_space=True, special=None),
    ]
    draw = random.Random(1)
    ids = [[draw.randrange(200) for _ in range(draw.randint(0, 30))] for _ in range(500)]
    smallest = min(tokenizer.vocab_size for tokenizer in cases)
    ids = [[id % smallest for id in row] for row in ids]
    actual = run_node([tokenizer.to_dict() for tokenizer in cases], lines, ids, tmp_path)

    for tokenizer in cases:
        check_tokenizer(tokenizer.to_dict())
    cleaned = [*map(clean_line, lines)]
    assert actual["cleaned"] == cleaned
    for tokenizer, values in zip(cases, actual["results"], strict=True):
        encodings = [attempt(lambda line=line, own=tokenizer: own.encode(line)) for line in cleaned]
        rests = [attempt(lambda line=line, own=tokenizer: own.encode_rest(line)) for line in cleaned[:1000]]
        assert values["ids"] == json.loads(json.dumps(encodings))
        assert values["rests"] == json.loads(json.dumps(rests))
        assert values["symbols"] == [*map(tokenizer.split, cleaned)]
        assert values["texts"] == [*map(tokenizer.decode, ids)]
        assert values["names"] == ["PAD", "BOS", "EOS", *(tokenizer.decode([id]) for id in range(NUM_SPECIAL, 6))]
        settings = [tokenizer.ids_per_token, tokenizer.num_columns, tokenizer.unknown_id, [*tokenizer.spaced_ids]]
        assert values["settings"][:3] == settings[:3]
        assert sorted(values["settings"][3]) == sorted(settings[3])


def test_other_tokenizers_are_refused():
    """A tokenizer that the page would apply differently is an error, which names its part."""
    trained = json.loads(byte_level(add_prefix_space=True, special="<s>").to_dict()["model"])
    changes = [
        ({"normalizer": {"type": "Lowercase"}}, "the normalizer Lowercase"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "the pre_tokenizer Whitespace"),
        ({"pre_tokenizer": trained["pre_tokenizer"] | {"use_regex": False}}, "the option use_regex false"),
        ({"post_processor": trained["post_processor"] | {"trim_offsets": True}}, "the option trim_offsets"),
        ({"decoder": None}, "the decoder None"),
        ({"model": {"type": "WordPiece", "vocab": {}}}, "the model WordPiece"),
        ({"model": trained["model"] | {"dropout": 0.1}}, "the option dropout"),
        ({"model": trained["model"] | {"vocab": {"a": 0}}}, "a vocabulary without some bytes"),
        ({"added_tokens": [trained["added_tokens"][0] | {"lstrip": True}]}, "the option lstrip"),
    ]
    for change, part in changes:
        with pytest.raises(UserError, match=f"a page supports only byte-level BPE as in GPT-2, but .* has {part};"):
            check_tokenizer({"type": "subwords", "model": json.dumps(trained | change)})
