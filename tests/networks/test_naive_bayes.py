"""Naive Bayes: weights, priors and its use in a classifier."""

from __future__ import annotations

import itertools

import pytest
import torch

from lightning_tfm.networks import EncoderClassifier
from lightning_tfm.networks.naive_bayes import PENALTY, NaiveBayes
from lightning_tfm.tokenization import PAD, UNKNOWN_ID
from support.networks import VOCAB_SIZE


@pytest.mark.parametrize(("ids_per_token", "constant"), [(1, 0.3), (3, 0.3), (1, 0.0)])
def test_naive_bayes_fits_weights_of_exact_counts(ids_per_token, constant):
    """The logits equal those of Newton's method in float64; with so many buckets, no two bigrams share one."""
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(4, 12, (40, 7), generator=generator)
    words[::3, 5:] = PAD
    words[1::4, 2] = UNKNOWN_ID
    label = torch.randint(3, (40,), generator=generator)
    words = torch.cat((words, torch.tensor([[11, 3, 11, 0, 0, 0, 0], [3, 3, 0, 0, 0, 0, 0]])))
    ngrams = torch.randint(12, 20, (*words.shape, 2), generator=generator)
    ngrams[:, 1, 0] = PAD  # a word that is too short for n-grams
    ngrams[-1] = 20  # an n-gram of no training text
    with_ngrams = torch.cat((words.unsqueeze(-1), ngrams.masked_fill(words.unsqueeze(-1) == PAD, PAD)), dim=-1)
    texts = words if ids_per_token == 1 else with_ngrams  # (42, 7) or (42, 7, 3)
    naive_bayes = NaiveBayes(21, 10**6, 3, constant)
    naive_bayes.fit((texts[rows], label[rows]) for rows in torch.arange(40).split(16))

    def features(text):
        known = [word if word not in (PAD, UNKNOWN_ID) else None for word, *_ in text]
        pairs = {(a, b) for a, b in itertools.pairwise(known) if a is not None and b is not None}
        first_ngrams = {ids[1] for ids in text if len(ids) > 1 and ids[1] != PAD}
        return {word for word in known if word is not None} | pairs | first_ngrams

    tokens = texts.view(42, 7, ids_per_token).tolist()
    names = [*set().union(*(features(text) for text in tokens[:40]))]
    present = torch.tensor([[name in features(text) for name in names] for text in tokens]).double()  # (42, F)
    one_hot = torch.nn.functional.one_hot(label, 3).double()
    number = one_hot.sum(0)
    evidence = (present[:40].T @ one_hot / number + 3 / 40).log()  # (F, C)
    prior = ((number + 1) / 43).log()

    def loss_of(weights):
        logits = prior + present[:40] @ (weights.unsqueeze(1) * evidence)
        decay = PENALTY / 2 * (weights - constant).square().sum()
        return torch.nn.functional.cross_entropy(logits, label, reduction="sum") + decay

    weights = torch.full((len(names),), constant, dtype=torch.double)
    for _ in range(20):
        gradient = torch.autograd.functional.jacobian(loss_of, weights)
        weights = weights - torch.linalg.solve(torch.autograd.functional.hessian(loss_of, weights), gradient)
    expected = prior + present @ (weights.unsqueeze(1) * evidence)
    actual = naive_bayes(texts).log_softmax(-1).double()
    torch.testing.assert_close(actual, expected.log_softmax(-1), atol=1e-3, rtol=0)
    torch.testing.assert_close(actual[-1], prior.log_softmax(-1), atol=1e-4, rtol=0)


@pytest.mark.parametrize("word", [UNKNOWN_ID, 5])
def test_naive_bayes_predicts_the_prior_for_uninformative_or_unknown_words(word):
    naive_bayes = NaiveBayes(12, 100, 2)
    naive_bayes.fit([(torch.full((50, 3), 5), torch.arange(50) % 10 // 9)])  # 45 texts of one class, 5 of the other
    assert naive_bayes(torch.tensor([[5, 5, 5]])).softmax(-1)[0, 0] == pytest.approx(0.9, abs=0.03)
    naive_bayes = NaiveBayes(12, 100, 3)
    naive_bayes.fit([(torch.full((10, 1), word), torch.arange(10) % 2)])  # no text of the last class
    logits = naive_bayes(torch.tensor([[UNKNOWN_ID, UNKNOWN_ID]]))
    torch.testing.assert_close(logits.softmax(-1), torch.tensor([[6.0, 6.0, 1.0]]) / 13, atol=1e-4, rtol=0)


def test_a_classifier_uses_naive_bayes_in_evaluation_only():
    text, label = torch.randint(4, VOCAB_SIZE, (12, 6)), torch.arange(12) % 3
    network = EncoderClassifier(VOCAB_SIZE, 3, 9, 16, 4, 1, 32, dropout=0.0, num_bigram_buckets=50)
    alone = network.train()(text)
    network.naive_bayes.fit([(text, label)])
    assert network(text).equal(alone)
    both = network.eval()(text).softmax(-1)
    product = alone.softmax(-1) ** (1 / 3) * network.naive_bayes(text).softmax(-1) ** (2 / 3)
    torch.testing.assert_close(both, product / product.sum(-1, keepdim=True))
