"""The encoder classifier."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from lightning_tfm.errors import UserError
from lightning_tfm.networks import EncoderClassifier
from lightning_tfm.tokenization import PAD
from support.networks import VOCAB_SIZE, minimize, randomize


@pytest.fixture(params=["pre", "post"])
def classifier(request):
    network = EncoderClassifier(VOCAB_SIZE, 3, 9, 16, 4, 2, 32, dropout=0.1, word_dropout=0.2, norm=request.param)
    return randomize(network).eval()


def test_padding_does_not_change_the_logits_of_a_classifier(classifier):
    text = torch.tensor([[3, 4, 5, 6, 7], [8, 9, PAD, PAD, PAD]])
    alone = torch.cat([classifier(text[:1]), classifier(text[1:, :2])])
    for padded in (text, F.pad(text, (0, 3), value=PAD)):
        torch.testing.assert_close(classifier(padded), alone, rtol=1e-5, atol=1e-5)


def test_words_are_dropped_in_training_only(classifier):
    text = torch.arange(4, 10).repeat(200, 1)
    read = []
    classifier.embedding.register_forward_hook(lambda layer, args, output: read.append(args[0].view(text.shape)))
    classifier(text)
    assert read[0].equal(text)
    classifier.train()(text)
    dropped = read[1] != text
    assert (read[1][dropped] == 3).all(), "dropped words become the unknown word"
    assert dropped.float().mean() == pytest.approx(0.2, abs=0.04)
    classifier(F.pad(text[:, :2], (0, 4), value=PAD))
    assert (read[2][:, 2:] == PAD).all()


def test_a_classifier_can_overfit_one_batch():
    text, label = torch.randint(3, VOCAB_SIZE, (12, 6)), torch.arange(12) % 3
    network = EncoderClassifier(VOCAB_SIZE, 3, 9, 32, 4, 1, 32, dropout=0.0, norm="pre")
    minimize(lambda: F.cross_entropy(network(text), label), network)
    assert network(text).argmax(1).equal(label)


def test_a_text_longer_than_a_classifiers_positions_is_refused(classifier):
    with pytest.raises(UserError, match=r"10 tokens, .* max_length 9"):
        classifier(torch.full((1, 10), 3))
