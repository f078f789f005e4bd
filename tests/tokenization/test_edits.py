"""Edit distances and alignments equal their definitions."""

import random

from lightning_tfm.tokenization import align, edit_distances
from lightning_tfm.tokenization.edits import ALIGNED


def alignments(output, reference):
    """Yield all alignments of a text to its reference."""
    if not output and not reference:
        yield []
    for rest in alignments(output[:-1], reference[:-1]) if output and reference else ():
        yield [*rest, (reference[-1], output[-1])]
    for rest in alignments(output, reference[:-1]) if reference else ():
        yield [*rest, (reference[-1], "")]
    for rest in alignments(output[:-1], reference) if output else ():
        yield [*rest, ("", output[-1])]


def edits(alignment):
    return sum(symbol != other for symbol, other in alignment)


def test_an_alignment_has_the_fewest_edits_of_all():
    generator = random.Random(0)
    symbols = ["a", "t\u0361s", "\u0259"]
    texts = [generator.choices(symbols, k=generator.randint(0, 4)) for _ in range(2 * (ALIGNED + 20))]
    outputs, references = texts[::2], texts[1::2]
    found = [*align(outputs, references)]
    assert len(found) == len(outputs)
    distances = edit_distances(outputs, references).tolist()
    for output, reference, alignment, distance in zip(outputs, references, found, distances, strict=True):
        every = [*alignments(output, reference)]
        assert alignment in every
        assert edits(alignment) == min(map(edits, every)) == distance


def test_symbols_are_aligned_rather_than_omitted():
    assert [*align(["xb"], ["ab"])] == [[("a", "x"), ("b", "b")]]
    assert [*align(["b", "ab", ""], ["ab", "b", ""])] == [[("a", ""), ("b", "b")], [("", "a"), ("b", "b")], []]
