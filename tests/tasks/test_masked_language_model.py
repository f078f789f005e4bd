"""Masked language modeling: the masks, and the network that predicts masked tokens."""

import math

import lightning
import pytest
import torch

from datamodules import Text
from lightning_tfm.inference.masked_language_model import SPACED_MASK, MaskedLanguageModelPredictor
from lightning_tfm.networks import MaskedEncoder
from lightning_tfm.tasks import MaskedLanguageModel
from lightning_tfm.tasks.masked_language_model import MASK
from lightning_tfm.tokenization import NUM_SPECIAL, PAD, train_tokenizer
from support.corpora import TEXT


def make_module(folder, mask_fraction=0.15, **settings):
    (folder / "text.txt").write_text(TEXT)
    data = Text(str(folder / "text.txt"), val_fraction=0.3, max_length=12, batch_size=8, **settings)
    network = MaskedEncoder.from_data(data, d_model=16, num_heads=2, num_layers=2)
    return data, MaskedLanguageModel.from_data(data, network, mask_fraction=mask_fraction)


@pytest.mark.parametrize("mask_fraction", [0.15, 0.5])
def test_masked_tokens_are_replaced_in_the_proportions_of_bert(mask_fraction, tmp_path):
    """80% become a mask, 10% a random token, and 10% are unchanged (Devlin et al. 2019, 3.1)."""
    _, module = make_module(tmp_path, mask_fraction)
    vocab_size = module.tokenizer.vocab_size
    text = torch.randint(NUM_SPECIAL, vocab_size, (2_000, 100))
    source, target = module._masked(text, torch.rand(3, *text.shape))
    masked = target != PAD
    assert target[masked].equal(text[masked])
    assert source[~masked].equal(text[~masked])

    def assert_fraction(of, total, expected):
        number = int(total.sum())
        deviation = math.sqrt(expected * (1 - expected) / number)
        assert of.sum().item() / number == pytest.approx(expected, abs=5 * deviation)

    assert_fraction(masked, torch.ones_like(masked), mask_fraction)
    assert_fraction(masked & (source == MASK), masked, 0.8)
    changed = 1 - 1 / (vocab_size - NUM_SPECIAL)  # a random token may be the same one
    assert_fraction(masked & (source != MASK) & (source != text), masked, 0.1 * changed)
    random_tokens = source[masked & (source != MASK) & (source != text)]
    assert set(random_tokens.tolist()) == set(range(NUM_SPECIAL, vocab_size))


def test_each_text_has_a_masked_token_and_padding_has_none(tmp_path):
    _, module = make_module(tmp_path, 0.01)
    text = torch.full((200, 12), PAD)
    for row in range(200):
        length = row % 12 + 1
        text[row, :length] = torch.randint(NUM_SPECIAL, module.tokenizer.vocab_size, (length,))
    source, target = module._masked(text, torch.rand(3, *text.shape))
    assert (target != PAD).any(1).all()
    assert (source[text == PAD] == PAD).all()
    assert (target[text == PAD] == PAD).all()


def test_validation_does_not_depend_on_the_batch_size(tmp_path):
    """The masks of a window depend on its row alone."""
    _, module = make_module(tmp_path)
    results = []
    for batch_size in (1, 5, 64):
        data = Text(
            str(tmp_path / "text.txt"), val_fraction=0.3, max_length=12, batch_size=8, eval_batch_size=batch_size
        )
        trainer = lightning.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
        torch.rand(batch_size)  # the state of the global generator must not matter
        results.append(trainer.validate(module, data, verbose=False)[0])
    for other in results[1:]:
        assert other == pytest.approx(results[0], rel=1e-5)


def test_logits_do_not_depend_on_padding_and_depend_on_both_sides():
    network = MaskedEncoder(11, 16, 2, 2, max_length=12)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    network.eval()
    text = torch.randint(NUM_SPECIAL, 11, (3, 8))
    logits = network(text)
    padded = torch.nn.functional.pad(text, (0, 4), value=PAD)
    torch.testing.assert_close(network(padded)[:, :8], logits, atol=1e-5, rtol=1e-5)
    for position, seen_from in ((7, 0), (0, 7)):
        other = text.clone()
        other[:, position] = NUM_SPECIAL + (text[:, position] - NUM_SPECIAL + 1) % (11 - NUM_SPECIAL)
        assert not torch.allclose(network(other)[:, seen_from], logits[:, seen_from], atol=1e-4)


@pytest.mark.parametrize("tokens", ["character", "subword"])
@pytest.mark.parametrize(
    "line", ["the c[MASK]t sat", "the [MASK] sat", "[MASK] sat", "the  [MASK][MASK]", "cat\n[MASK] [MASK]sat [MASK]"]
)
def test_the_text_around_a_mask_is_kept(line, tokens, monkeypatch):
    tokenizer = train_tokenizer(["the cat sat on the x x x\n\n"], tokens, 300)
    network = MaskedEncoder(tokenizer.vocab_size, 16, 2, 1, max_length=32)
    logits = torch.zeros(tokenizer.vocab_size)
    for preference, text in enumerate((" x", "\nx"), start=1):
        logits[tokenizer.encode(text)[-1]] = preference
    monkeypatch.setattr(network, "forward", lambda text: logits.expand(*text.shape, -1).clone())
    (prediction,) = MaskedLanguageModelPredictor(network, tokenizer).predict([line])
    assert prediction.text == line.replace("[MASK]", "x")


def test_masked_subwords_are_those_of_the_whole_text():
    tokenizer = train_tokenizer(["the cat sat on the mat\n\n"], "subword", 300)
    predictor = MaskedLanguageModelPredictor(MaskedEncoder(tokenizer.vocab_size, 16, 2, 1, max_length=32), tokenizer)
    the, cat, sat = tokenizer.encode("the cat sat")
    assert cat in tokenizer.spaced_ids
    assert predictor.encode_line("the [MASK] sat") == ([the, SPACED_MASK, sat], "")
    assert predictor.encode_line("the cat[MASK]") == ([the, cat, MASK], "")
    assert predictor.encode_line("[MASK] cat sat") == ([MASK, cat, sat], "")
