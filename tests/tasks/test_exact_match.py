"""Exact match and symbol error rate of decoded texts."""

import itertools
import random
from collections import defaultdict
from functools import cache, partial
from statistics import fmean

import pytest
import torch
from torchmetrics.functional.text import edit_distance

from lightning_tfm.callbacks.predictions import Predictions
from lightning_tfm.data import Pair, PairDataModule
from lightning_tfm.networks import AttentionLSTM, Seq2SeqNetwork
from lightning_tfm.tasks import Seq2SeqModule
from lightning_tfm.tasks.evaluation import test_prefix as prefix_of
from lightning_tfm.tokenization import (
    EOS,
    NUM_SPECIAL,
    PAD,
    UNKNOWN,
    SubwordTokenizer,
    SymbolTokenizer,
    edit_distances,
    pad_sequences,
    train_tokenizer,
)
from support.data import DATA
from support.training import make_trainer


def test_the_symbol_error_rate_of_subwords_counts_characters():
    tokenizer = odd_data("subword").tokenizer
    generator = random.Random(0)
    texts = ["".join(generator.choices("ab ", k=generator.randint(0, 9))) for _ in range(200)]
    outputs, references = texts[:100], texts[100:]
    distances = edit_distances(*([tokenizer.split_scored(text) for text in side] for side in (outputs, references)))
    assert distances.sum() == edit_distance(outputs, references, reduction="sum")


def test_copied_symbols_that_are_not_in_the_vocabulary_are_correct():
    """The network copies symbol by symbol from left to right, and generates nothing."""
    tokenizer = SymbolTokenizer([UNKNOWN, *"ab"])
    network = AttentionLSTM(tokenizer.vocab_size, 8, attention="monotonic", pointer_generator=True)
    for layer, bias in ((network.attention.q_proj, 50.0), (network.pointer.generation, -50.0)):
        torch.nn.init.zeros_(layer.weight)
        torch.nn.init.constant_(layer.bias, bias)
    torch.nn.init.zeros_(network.attention.k_proj.weight)
    texts = ["xay", "ab", "bzzx", "y"]
    data = Pairs([Pair(text, text) for text in texts], tokenizer)
    module = Seq2SeqModule(network, tokenizer, 64)
    (scores,) = make_trainer().test(module, data, verbose=False)
    assert (scores["test/exact_match"], scores["test/ser"]) == (1, 0)
    assert [prediction.text for prediction in module.predict(texts)] == texts


class Scripted(Seq2SeqNetwork):
    """A network that decodes given ids for each source."""

    def __init__(self, vocab_size, outputs):
        super().__init__()
        self.head = torch.nn.Linear(1, vocab_size)
        self.vocab_size, self.outputs = vocab_size, outputs

    def forward(self, source, target_in):
        return torch.zeros(*target_in.shape, self.vocab_size)

    def encode(self, source):
        outputs = [self.outputs[tuple(row[row != PAD].tolist())] for row in source]
        return pad_sequences(outputs)[0], torch.zeros(len(source), dtype=torch.long)

    def decode_step(self, token, state):
        outputs, step = state
        ids = outputs[torch.arange(len(outputs)), step.clamp(max=outputs.size(1) - 1)]
        return 50.0 * torch.nn.functional.one_hot(ids, self.vocab_size), (outputs, step + 1)


class Pairs(PairDataModule):
    """A data module with given pairs, which are the same in every split."""

    def __init__(self, pairs, tokenizer):
        super().__init__(tokenizer, 64, 64, batch_size=4, eval_batch_size=7, num_workers=0, seed=0)
        self.given = pairs

    def pairs(self, split):
        return self.given


ODD_TARGETS = ["a  b", " a b", "b\ta", "a b ", "a \ufffd", "a x b", "\u00fc x", "ab ab", "b", "a b a", "[a]", "a-b"]


def odd_data(tokens):
    """Return data with whitespace and symbols that not every tokenizer can decode."""
    tokenizers = {
        "character": train_tokenizer(["a b \u00fc [-]"], "character", 50),
        "word": train_tokenizer(["a b ab \u00fc"], "word", 50),
        "subword": train_tokenizer(["a b ab \u00fc a b ab"] * 9, "subword", 270),
        "features": SymbolTokenizer([*"ab -", "[a]", "[", "]", UNKNOWN], feature_separator=";"),
        "separated": SymbolTokenizer([UNKNOWN, *"ab"], target_separator="-"),
    }
    sources = (" ".join(f"{n:b}").translate({ord("0"): "a", ord("1"): "b"}) for n in itertools.count())
    pairs = [
        Pair(source, target, category=source[-1]) for source, target in zip(sources, ODD_TARGETS * 3, strict=False)
    ]
    return Pairs(pairs, tokenizers[tokens])


ALL_DATA = DATA | {name: partial(odd_data, name) for name in ("character", "word", "subword", "features", "separated")}


def encode_differently(tokenizer, text):
    """Encode the text by other ids, if the tokenizer has any."""
    if isinstance(tokenizer, SubwordTokenizer):
        pieces = [piece for piece, _ in tokenizer.model.pre_tokenizer.pre_tokenize_str(text)]
        return [tokenizer.model.token_to_id(byte) + NUM_SPECIAL for byte in "".join(pieces)]
    return tokenizer.encode_target(text)


@pytest.mark.parametrize("beam_size", [1, 2])
@pytest.mark.parametrize("make", ALL_DATA.values(), ids=ALL_DATA)
def test_exact_match_is_the_mean_of_correct_predictions(make, beam_size):
    data = make()
    data.setup("fit")
    outputs = {}
    for examples in data.datasets.values():
        for row, pair in enumerate(examples.pairs):
            ids = [data.tokenizer.encode_target, partial(encode_differently, data.tokenizer)][row // 2 % 2](pair.target)
            wrong = [*ids[1:], ids[0]] if row % 5 == 0 else ids
            source = tuple(examples.sources[torch.tensor([row])][0].tolist())
            outputs[source] = [*wrong, EOS]
    assert len(outputs) == len({pair.source for examples in data.datasets.values() for pair in examples.pairs})
    network = Scripted(data.vocab_size, outputs)
    module = Seq2SeqModule(network, data.tokenizer, data.max_target_length, beam_size=beam_size)
    predictions = Predictions()
    trainer = make_trainer(callbacks=[predictions], limit_val_batches=None)
    trainer.test(module, data, verbose=False)
    by_name = defaultdict(list)
    for name, _, line in predictions.lines:
        assert line["correct"] == (line["prediction"] == line["target"])
        prefix = f"{prefix_of(name)}/exact_match"
        by_name[prefix].append(line["correct"])
        if line["category"] is not None:
            by_name[f"{prefix}/{line['category']}"].append(line["correct"])
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items() if "/exact_match" in name}
    assert metrics == pytest.approx({name: sum(right) / len(right) for name, right in by_name.items()})
    assert 0 < metrics["test/exact_match"] < 1
    (validated,) = trainer.validate(module, data, verbose=False)
    if isinstance(data, Pairs):  # its splits are the same
        assert validated["val/exact_match"] == pytest.approx(metrics["test/exact_match"])


@cache
def distance(output, reference):
    """Compute the edit distance of two tuples by its definition."""
    if not output or not reference:
        return len(output) + len(reference)
    kept = distance(output[1:], reference[1:]) + (output[0] != reference[0])
    return min(kept, 1 + distance(output[1:], reference), 1 + distance(output, reference[1:]))


def test_error_rates_are_those_of_the_shared_tasks_of_pronunciation(tmp_path):
    """Compare with the definitions of SIGMORPHON 2021, task 1: WER by language and its macro average, in percent."""
    generator = random.Random(1)
    phones = ["a", "t\u0361s", "\u0259", "b\u02d0"]
    pairs, outputs = [], {}
    tokenizer = SymbolTokenizer([UNKNOWN, *"xy", *phones], "", " ")
    for number in range(60):
        word = "".join("xy"[int(bit)] for bit in f"{number:07b}")
        said, heard = (generator.choices(phones, k=generator.randint(1, 6)) for _ in range(2))
        heard = generator.choice([said, said, heard, heard[:2]])
        language = generator.choice(["ady", "gre", "gre", "gre"])
        pairs.append(Pair(word, " ".join(said), category=language))
        outputs[*tokenizer.encode(word), EOS] = [*tokenizer.encode_target(" ".join(heard)), EOS]
    data = Pairs(pairs, tokenizer)
    predictions = Predictions()
    trainer = make_trainer(callbacks=[predictions], limit_val_batches=None)
    network = Scripted(data.vocab_size, outputs)
    trainer.test(Seq2SeqModule(network, tokenizer, 64, text_metrics=["wer"]), data, verbose=False)

    tables = defaultdict(list)  # of the gold and the hypothesized symbols, as in the files of the task's evaluation
    for *_, line in predictions.lines:
        tables[line["category"]].append((tuple(line["target"].split()), tuple(line["prediction"].split())))
    wer = {name: 100 * sum(gold != hypo for gold, hypo in rows) / len(rows) for name, rows in tables.items()}
    rows = [row for rows in tables.values() for row in rows]
    errors = {name: sum(itertools.starmap(distance, rows)) for name, rows in tables.items()}
    lengths = {name: sum(len(gold) for gold, _ in rows) for name, rows in tables.items()}
    per = {name: errors[name] / lengths[name] for name in tables}
    expected = {
        "wer": 100 * sum(gold != hypo for gold, hypo in rows) / len(rows),
        "macro_wer": fmean(wer.values()),
        "ser": sum(errors.values()) / sum(lengths.values()),
        "macro_ser": fmean(per.values()),
    }
    expected |= {f"wer/{name}": value for name, value in wer.items()} | {f"ser/{name}": per[name] for name in per}
    metrics = {name.removeprefix("test/"): value.item() for name, value in trainer.callback_metrics.items()}
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-6)
    assert wer.keys() == {"ady", "gre"}
    assert expected["macro_wer"] != pytest.approx(expected["wer"]), "the average is not over words"
    assert {name: trainer.lightning_module.higher_is_better[f"test/{name}"] for name in expected} == dict.fromkeys(
        expected, False
    )
