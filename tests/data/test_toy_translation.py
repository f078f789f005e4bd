"""The grammar of the generated German and English."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from datamodules import ToyTranslation, toy_translation
from support.data import set_up


@pytest.fixture(scope="module")
def sentences():
    return set_up(ToyTranslation(train_size=20_000, val_size=1_000, test_size=3_000))


def test_sentences_spelled_alike_without_umlauts_have_one_translation_and_split(sentences):
    translations = {}
    for split, dataset in sentences.datasets.items():
        for pair in dataset.pairs:
            spelling, translation = toy_translation.spelled_plainly(pair.source), (pair.target, split)
            assert translations.setdefault(spelling, translation) == translation, pair.source


def test_longer_sentences_are_only_in_their_own_test_set():
    data = set_up(ToyTranslation(max_words=6, train_size=2_000, val_size=100, test_size=300, longer_size=200))
    lengths = {split: {len(pair.source.split()) for pair in data.datasets[split].pairs} for split in data.datasets}
    assert max(lengths["train"] | lengths["val"] | lengths["test"]) == 6
    assert (min(lengths["longer"]), max(lengths["longer"])) == (7, 10)


def test_the_three_original_sentences_are_included(sentences):
    pairs = {pair.source: pair.target for dataset in sentences.datasets.values() for pair in dataset.pairs}
    assert {
        "ich mochte ein bier": "i want a beer .",
        "ich mochte ein cola": "i want a coke .",
        "ich mag das Buch": "i like the book .",
    }.items() <= pairs.items()


KNOWN_BEGINNINGS = {
    # inversion after an adverb, and the accusative
    "heute kaufe ich einen": ("today i buy a", {("heute", "today"), ("kaufe", "buy"), ("einen", "a")}),
    # a modal verb
    "ich kann das": ("i can", {("ich", "i"), ("kann", "can"), ("das", "the")}),
    # kein before an indefinite object
    "ich brauche keine": ("i do not need", {("keine", "not"), ("keine", "do"), ("brauche", "need")}),
    # the verb distinguishes she from they
    "sie trinkt einen": ("she drinks a", {("sie", "she"), ("trinkt", "drinks")}),
    "sie trinken einen": ("they drink a", {("sie", "they"), ("trinken", "drink")}),
}


def test_grammar_and_alignment_of_known_sentences():
    draw = random.Random(0)
    counts = Counter()
    for _ in range(150_000):
        pair = toy_translation._sentence(draw, with_kept_back=True)
        for beginning, (translation, aligned) in KNOWN_BEGINNINGS.items():
            if pair.source.startswith(beginning + " ") or pair.source == beginning:
                counts[beginning] += 1
                german, english = pair.source.split(), pair.target.split()
                assert " ".join(english).startswith(translation.removesuffix(" .")), pair
                assert aligned <= {(german[i], english[j]) for i, j in pair.alignment}, pair
    assert set(counts) == set(KNOWN_BEGINNINGS)


def test_alignments_cover_every_german_word(sentences):
    infinitives = {"lesen", "trinken", "essen", "malen"}
    for dataset in sentences.datasets.values():
        for pair in dataset.pairs:
            german, english = pair.source.split(), pair.target.split()
            assert all(0 <= i < len(german) and 0 <= j < len(english) for i, j in pair.alignment)
            assert {i for i, _ in pair.alignment} == set(range(len(german))), pair
            unaligned = {english[j] for j in set(range(len(english))) - {j for _, j in pair.alignment}}
            assert unaligned <= {"."}, pair
            words = {(german[i], english[j]) for i, j in pair.alignment}
            assert ("nicht" in german) == (("nicht", "not") in words)
            if german[-1] in infinitives and len(german) > 3:  # last in German, but not in English
                assert pair.alignment[-1][1] < len(english) - 2


def test_the_language_has_reordering_negation_modals_and_inflection(sentences):
    pairs = sentences.datasets["train"].pairs
    crossing = sum(any(a[0] < b[0] and a[1] > b[1] for a in pair.alignment for b in pair.alignment) for pair in pairs)
    assert crossing / len(pairs) > 0.4  # a word-for-word translation would be wrong

    def share(*words):
        return sum(any(word in pair.source.split() for word in words) for pair in pairs) / len(pairs)

    assert share("nicht") > 0.05
    assert share("kein", "keine", "keinen") > 0.03
    assert share("kann", "kannst", "können", "könnt") > 0.03
    assert share("den") > 0.03
    assert share("Bücher", "Äpfel", "Häuser", "Stühle") > 0.01
    assert sum("ö" in pair.source or "ü" in pair.source or "ä" in pair.source for pair in pairs) / len(pairs) > 0.2
    assert len({pair.source for pair in pairs}) > 15_000


def test_the_test_set_has_combinations_that_training_lacks(sentences):
    nouns = {form: noun for noun in toy_translation.NOUNS for form in (noun.german, noun.german_plural) if form}

    def held_out(pair):
        words = pair.source.split()
        return any(
            second in nouns and toy_translation.held_out(adjective, nouns[second])
            for first, second in zip(words, words[1:], strict=False)
            for adjective in toy_translation.ADJECTIVES
            if first in {adjective + ending for ending in ("e", "en", "er", "es")}
        )

    shares = {split: sum(map(held_out, dataset.pairs)) for split, dataset in sentences.datasets.items()}
    assert shares["train"] == shares["val"] == 0
    assert shares["test"] > 100
    known = {word for pair in sentences.datasets["train"].pairs for word in pair.source.split()}
    assert all(word in known for pair in sentences.datasets["test"].pairs for word in pair.source.split())
