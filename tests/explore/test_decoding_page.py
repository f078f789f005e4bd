"""Decoding in the page equals that in Python."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lightning_tfm.explore.answers import Seq2SeqAnswers, forcing
from lightning_tfm.inference.decoding import continue_text, decode, sampler
from lightning_tfm.tokenization import BOS, EOS, PAD

MODULE = Path(__file__).parents[2] / "lightning_tfm/explore/page/decoding.js"

# The state is a number, which depends on all tokens, and the row of the logits in a table.
SCRIPT = f"""
import {{ readFileSync }} from "node:fs";
import {{
  beamSearch, continueText, decodeTokens, greedyChoice, mulberry32, sampleChoice, samplingProbabilities,
}} from {json.dumps(MODULE.as_uri())};
const start = {{ number: {{ type: "int64", dims: [1], data: Float64Array.of(0) }} }};
function stepOf(table) {{
  return (tokens, {{ number }}) => {{
    const next = Float64Array.from(number.data, (value, row) => (value * 31 + tokens[row]) % table.length);
    return {{
      logits: Array.from(next, (value) => Float32Array.from(table[value])),
      state: {{ number: {{ type: "int64", dims: number.dims, data: next }} }},
    }};
  }};
}}
const tokensOf = (steps) => steps.map(({{ token }}) => token);
const ask = {{
  beam: ({{ table, length, size }}) => beamSearch(stepOf(table), start, length, size),
  greedy: ({{ table, length, prefix }}) => tokensOf(decodeTokens(stepOf(table), start, length, greedyChoice(prefix))),
  sample: ({{ table, length, seed, options }}) =>
    tokensOf(decodeTokens(stepOf(table), start, length, sampleChoice(mulberry32(seed), options))),
  text: ({{ table, tokens, number, length }}) => {{
    const step = stepOf(table);
    const encode = (ids) => ids.reduce((state, id) => step([id], state).state, start);
    return tokensOf(continueText(encode, step, tokens, number, length, greedyChoice()));
  }},
  probabilities: ({{ logits, options }}) => Array.from(samplingProbabilities(logits, options)),
  random: ({{ seed, number }}) => Array.from({{ length: number }}, mulberry32(seed)),
}};
const questions = JSON.parse(readFileSync(0, "utf-8"));
process.stdout.write(JSON.stringify(questions.map(({{ name, ...values }}) => ask[name](values))));
"""


def ask(questions: list[dict]) -> list:
    """Return what decoding.js answers to questions."""
    arguments = ["node", "--input-type=module", "--eval", SCRIPT]
    result = subprocess.run(arguments, input=json.dumps(questions), capture_output=True, text=True, check=True)
    return json.loads(result.stdout)


def tables() -> list[torch.Tensor]:
    """Draw logits (rows, V): few and many ids, flat and sharp, with early and late ends, and with equal logits."""
    result = []
    for number, size in enumerate((4, 5, 7, 12, 40) * 4):
        table = torch.randn(97, size) * (0.1, 1, 3)[number % 3]
        table[:, EOS] += (-4, 0, 2)[number // 2 % 3]
        result.append(table.round() if number % 4 == 3 else table)
    return result


def step_of(table: torch.Tensor):
    def step(tokens, numbers):
        numbers = (numbers * 31 + tokens) % len(table)
        return table[numbers], numbers

    return step


START = torch.zeros(1, dtype=torch.long)


@pytest.fixture
def lowest_first(monkeypatch):
    """Let topk and argmax select the lowest index of equal values, as the page does."""

    def topk(x, k, dim=-1):
        ordered = x.sort(dim=dim, descending=True, stable=True)
        return torch.return_types.topk(tuple(part[..., :k].contiguous() for part in ordered))

    monkeypatch.setattr(torch.Tensor, "topk", topk)


def test_beam_search_equals_python(lowest_first):
    questions, expected = [], []
    for table in tables():
        for size, length in ((1, 6), (2, 1), (3, 9), (5, 20)):
            questions.append({"name": "beam", "table": table.tolist(), "length": length, "size": size})
            predictor = SimpleNamespace(
                network=SimpleNamespace(encode=lambda source: START, decode_step=step_of(table)),
                tokenizer=SimpleNamespace(decode=str),
                max_target_length=length,
                device="cpu",
                encode_line=lambda text: ([EOS], ""),
                output_symbol=str,
            )
            expected.append(Seq2SeqAnswers(predictor).beam("", size))  # type: ignore[arg-type]
    for tree, other in zip(ask(questions), expected, strict=True):
        for output, same in zip(tree["outputs"], other["outputs"], strict=True):
            assert output["node"] == same["node"]
            assert output["score"] == pytest.approx(same["score"], abs=1e-4)
            assert output["log_probability"] == pytest.approx(same["log_probability"], abs=1e-4)
            assert same["text"] == str([*output["tokens"], *[0] * same["text"].count(" 0")])  # padded
        for node, same in zip(tree["nodes"], other["nodes"], strict=True):
            del same["symbol"]
            assert node.pop("log_probability") == pytest.approx(same.pop("log_probability"), abs=1e-4)
            assert node == same


def test_greedy_decoding_equals_python():
    questions, expected = [], []
    for table in tables():
        for prefix in ([], [3], [3, 3, EOS]):
            questions.append({"name": "greedy", "table": table.tolist(), "length": 12, "prefix": prefix})
            expected.append(decode(step_of(table), START, 12, forcing(prefix))[0].tolist())
    assert ask(questions) == expected


def test_texts_are_continued_as_in_python():
    """When the positions are used up, the last half of them is encoded again."""
    questions, expected = [], []
    for table in tables():
        step = step_of(table)

        def encode(ids, step=step):
            numbers = START
            for token in ids.unbind(1):
                _, numbers = step(token, numbers)
            return numbers

        for tokens, number, length in (([3], 5, 20), ([3, 3, 3], 30, 8), ([3] * 7, 4, 7), ([3], 6, 1)):
            values = {"tokens": tokens, "number": number, "length": length}
            questions.append({"name": "text", "table": table.tolist(), **values})
            added = continue_text(encode, step, torch.tensor([tokens]), number, length)
            expected.append([*tokens[1:], *added[0].tolist()])
    assert ask(questions) == expected


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.4}, {"topK": 3}, {"topK": 50}, {"topP": 0.7}, {"temperature": 2, "topK": 5, "topP": 0.5}],
)
def test_samples_have_the_probabilities_of_python(options, monkeypatch):
    """Python draws with torch.multinomial from the probabilities that the page computes."""
    drawn = []
    monkeypatch.setattr(torch, "multinomial", lambda values, *_, **__: drawn.append(values) or values.argmax(1, True))
    names = {"temperature": "temperature", "topK": "top_k", "topP": "top_p"}
    sample_fn = sampler(**{names[name]: value for name, value in options.items()})
    rows = torch.randn(20, 12) * 2
    rows[:, 0] = -torch.inf
    sample_fn(rows)
    logits = [
        [value if value > -torch.inf else -1e30 for value in row] for row in rows.tolist()
    ]  # JSON has no infinity
    actual = ask([{"name": "probabilities", "logits": row, "options": options} for row in logits])
    torch.testing.assert_close(torch.tensor(actual), drawn[0])


def test_samples_follow_their_probabilities():
    """Greedy decoding is the limit of low temperatures, and frequencies approach the probabilities."""
    table = torch.randn(1, 6).tolist()
    questions = [
        {"name": "sample", "table": table, "length": 1, "seed": seed, "options": {"topK": 3}} for seed in range(4_000)
    ]
    counts = torch.tensor([token for (token,) in ask(questions)]).bincount(minlength=6)
    logits = torch.tensor(table[0]).index_fill(0, torch.tensor([PAD, BOS]), -torch.inf)
    least = logits.topk(3).values[-1]
    probabilities = logits.masked_fill(logits < least, -torch.inf).softmax(0)
    assert counts[probabilities == 0].sum() == 0
    torch.testing.assert_close(counts / counts.sum(), probabilities, atol=0.03, rtol=0)  # four standard deviations

    table = tables()[4]
    cold = {"name": "sample", "table": table.tolist(), "length": 12, "seed": 1, "options": {"temperature": 1e-4}}
    assert ask([cold, cold]) == [decode(step_of(table), START, 12)[0].tolist()] * 2


def mulberry32(seed: int, number: int) -> list[float]:
    """Return random numbers, as published by Tommy Ettinger (2017) in C."""
    mask, values = 2**32 - 1, []
    for _ in range(number):
        seed = seed + 0x6D2B79F5 & mask
        z = (seed ^ seed >> 15) * (seed | 1) & mask
        z ^= z + (z ^ z >> 7) * (z | 61) & mask
        values.append((z ^ z >> 14) / 2**32)
    return values


def test_random_numbers_are_those_of_mulberry32():
    seeds = [0, 1, 2**31, 2**32 - 1]
    actual = ask([{"name": "random", "seed": seed, "number": 20} for seed in seeds])
    assert actual == [mulberry32(seed, 20) for seed in seeds]
