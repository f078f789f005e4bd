"""Partitions of inflections by what of them occurs in the training data (SIGMORPHON 2022)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

PARTITIONS = {(True, True): "both", (True, False): "lemma", (False, True): "features", (False, False): "neither"}
"""Names of the partitions, by whether the lemma and the features of a source occur in training."""


def partition_by(sources: Iterable[str]) -> Callable[[str], str]:
    """Return a function that names the partition of a source, given those of training.

    A source consists of a lemma, a tab and features. The lemma may contain tabs.
    """
    seen: tuple[set[str], set[str]] = set(), set()
    for source in sources:
        for texts, text in zip(seen, source.rsplit("\t", 1), strict=True):
            texts.add(text)

    def name(source: str) -> str:
        lemma, features = source.rsplit("\t", 1)
        return PARTITIONS[lemma in seen[0], features in seen[1]]

    return name
