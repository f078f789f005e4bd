"""Windows of a text for language models."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn import functional as F

from datamodules import Text
from lightning_tfm.data import EvaluationSampler
from lightning_tfm.networks import GPT
from lightning_tfm.tasks import LanguageModel
from lightning_tfm.tokenization import PAD
from support.corpora import TEXT, text_file
from support.data import set_up, split_texts
from support.training import make_trainer

SIZES = {"max_length": 16, "batch_size": 4, "eval_batch_size": 7}


@pytest.mark.parametrize("tokens", ["character", "subword"])
def test_validation_scores_every_token_once(tokens, tmp_path):
    data = set_up(Text(text_file(tmp_path), tokenizer=tokens, vocab_size=300, **SIZES | {"eval_batch_size": 3}))
    ids = data.tokenizer.encode(TEXT[round(len(TEXT) * 0.9) :])
    seen = torch.cat([batch.target_out.flatten() for batch in data.val_dataloader()])
    assert sorted(seen[seen != PAD].tolist()) == sorted(ids[1:])
    for batch in data.val_dataloader():
        assert batch.source.shape == (batch.target_in.size(0), 0)
        assert batch.target_in[:, 1:].equal(batch.target_out[:, :-1].where(batch.target_in[:, 1:] != PAD, PAD))


def test_training_windows_are_complete_and_start_anywhere(tmp_path):
    data = set_up(Text(text_file(tmp_path), **SIZES))
    ids = torch.tensor(data.tokenizer.encode(TEXT[: round(len(TEXT) * 0.9)]))
    begins = set()
    for rows in itertools.islice(data.training_batches(data.division), 500):
        batch = data.datasets["train"][rows]
        for begin, target_in, target_out in zip(rows.tolist(), batch.target_in, batch.target_out, strict=True):
            assert target_in.equal(ids[begin : begin + 16])
            assert target_out.equal(ids[begin + 1 : begin + 17])
            begins.add(begin % 16)
    assert len(begins) > 5, "each epoch starts at another offset"


@pytest.mark.parametrize("val_fraction", [0.05, 0.1, 0.3])
@pytest.mark.parametrize("test_fraction", [0.0, 0.05, 0.1, 0.3])
def test_validation_split_is_the_end_of_the_text(val_fraction, test_fraction, tmp_path):
    texts = split_texts(Text(text_file(tmp_path), val_fraction=val_fraction, test_fraction=test_fraction))
    assert texts["val"] == TEXT[round(len(TEXT) * (1 - val_fraction)) :]
    assert ("test" in texts) == (test_fraction > 0)
    test = texts.get("test", "")
    assert texts["train"] + test + texts["val"] == TEXT
    assert len(test) == pytest.approx(test_fraction * len(TEXT), abs=1)


def test_the_files_of_a_folder_are_joined_into_one_text(tmp_path):
    text_file(tmp_path, "first\n" * 40, "books/a.txt")
    text_file(tmp_path, "second\n" * 40, "books/b.txt")
    (tmp_path / "books/.DS_Store").write_bytes(b"\0")
    data = set_up(Text(str(tmp_path / "books"), max_length=8, batch_size=2, test_fraction=0.1))
    texts = split_texts(data)
    assert "".join(texts[split] for split in ("train", "test", "val")) == "first\n" * 40 + "\n" + "second\n" * 40
    assert set(data.fingerprint) == {"train", "val", "test"}
    assert data.fingerprint["test"] != data.fingerprint["val"]


def test_language_model_loss_covers_the_whole_validation_split(tmp_path):
    """Compare the loss with the sum over single windows; the loss per character divides by the characters per token."""
    data = Text(text_file(tmp_path), tokenizer="subword", vocab_size=300, **SIZES)
    module = LanguageModel(GPT(data.vocab_size, 16, 2, 1, max_length=16), data.tokenizer)
    (logged,) = make_trainer(limit_val_batches=1.0).validate(module, data, verbose=False)
    text = TEXT[round(len(TEXT) * 0.9) :]
    ids = torch.tensor(data.tokenizer.encode(text))
    total = 0.0
    for begin in range(0, len(ids) - 1, 16):
        window = ids[begin : begin + 17]
        with torch.no_grad():
            logits = module.network(window[None, :0], window[None, :-1])
        total += F.cross_entropy(logits[0], window[1:], reduction="sum").item()
    loss = total / (len(ids) - 1)
    assert logged["val/loss"] == pytest.approx(loss, rel=1e-5)
    assert logged["val/perplexity"] == pytest.approx(torch.tensor(loss).exp().item(), rel=1e-4)
    assert logged["val/loss_per_character"] == pytest.approx(loss * len(ids) / len(text), rel=1e-4)


@pytest.mark.parametrize("length", [16 * 9, 16 * 9 + 5])
def test_evaluation_reads_windows_in_the_order_of_their_lengths(length, tmp_path):
    """The order is computed without a table of all windows; only the last one may be shorter."""
    text = "".join(itertools.islice(itertools.cycle(TEXT), 10 * length + 10))
    data = set_up(Text(text_file(tmp_path, text), **SIZES))
    lengths = data.datasets["val"].lengths
    assert lengths.sum() == data.datasets["val"].num_tokens
    expected = EvaluationSampler(len(lengths), lengths.argsort(stable=True).__getitem__, 7, data.division)
    batches = data.val_dataloader().sampler
    assert [batch.tolist() for batch in batches] == [batch.tolist() for batch in expected]
