"""Paired tests over the examples of a test set, which compare two trained models rather than their settings."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lightning_tfm.errors import UserError

CORRECT = ("exact_match", "accuracy")
"""Metrics that are the share of correct predictions."""

CORPUS = ("bleu", "chrf")
"""Metrics of sacrebleu."""

TRIALS = 10_000
"""Number of trials of the approximate randomization, sacrebleu's default."""

RANDOM_STATE = 12345
"""Seed of the trials, sacrebleu's default."""


class SignTest(NamedTuple):
    """Exact sign test of two models (McNemar 1947), on the examples that only one of them has right.

    Attributes:
        shared: the number of examples on which both were tested.
        ours: the number of examples that only the first has right.
        theirs: the number of examples that only the second has right.
        p: the two-sided p value; 1 if both have the same examples right.
    """

    shared: int
    ours: int
    theirs: int
    p: float


def sign_test(ours: Mapping[Hashable, bool], theirs: Mapping[Hashable, bool]) -> SignTest:
    """Compare whether two models are right on their shared examples.

    Args:
        ours: whether the first model is right on each example.
        theirs: the same for the second model.
    """
    from scipy.stats import binomtest  # slow to import

    shared = ours.keys() & theirs.keys()
    only_ours = sum(ours[key] and not theirs[key] for key in shared)
    only_theirs = sum(theirs[key] and not ours[key] for key in shared)
    differing = only_ours + only_theirs
    p = float(binomtest(only_ours, differing).pvalue) if differing else 1.0
    return SignTest(len(shared), only_ours, only_theirs, p)


def outcomes(lines: Sequence[Mapping[str, Any]], test_set: str) -> dict[Hashable, bool]:
    """Return whether each prediction of a test set is right, by source and number of its earlier occurrences.

    Args:
        lines: the lines of predictions.jsonl.
        test_set: the name of the test set.
    """
    return {key: bool(line["correct"]) for key, line in _by_example(lines, test_set).items()}


def _by_example(lines: Sequence[Mapping[str, Any]], test_set: str) -> dict[Hashable, Mapping[str, Any]]:
    seen: Counter[str] = Counter()
    found: dict[Hashable, Mapping[str, Any]] = {}
    for line in lines:
        if line["split"] == test_set:
            found[line["source"], seen[line["source"]]] = line
            seen[line["source"]] += 1
    return found


class ExampleTest(NamedTuple):
    """Paired test of two trained models over the examples of a test set.

    Attributes:
        group: the name of the group.
        seed: the seed of both models.
        examples: the number of examples.
        ours: the number of examples that only the model of the group has right, or its score.
        theirs: the same for the baseline.
        p: the two-sided p value.
    """

    group: str
    seed: int
    examples: int
    ours: float
    theirs: float
    p: float


def compare_examples(name: str, seed: int, ours: Path, theirs: Path, metric: str, test_set: str) -> ExampleTest | None:
    """Test two models with the same seed on the examples of predictions.jsonl.

    Exact match and accuracy are compared by `sign_test`, BLEU and chrF by `randomization_test`.

    Args:
        name: the name of the group.
        seed: the seed of both models.
        ours: the run of the group.
        theirs: the run of the baseline.
        metric: the full name of the metric.
        test_set: the name of the test set.

    Returns:
        The test; None if the metric has none, or if a run has no predictions.
    """
    kind = metric.rpartition("/")[2]
    if kind not in CORRECT + CORPUS:
        return None
    found = [_by_example(_predictions(run / "predictions.jsonl"), test_set) for run in (ours, theirs)]
    shared = [key for key in found[0] if key in found[1]]
    if not shared:
        return None
    if kind in CORRECT:
        of_ours, of_theirs = ({key: bool(lines[key]["correct"]) for key in shared} for lines in found)
        test = sign_test(of_ours, of_theirs)
        return ExampleTest(name, seed, test.shared, test.ours, test.theirs, test.p)
    outputs = [[lines[key]["prediction"] for key in shared] for lines in found]
    references = [found[0][key]["target"] for key in shared]
    (score, other), p = randomization_test(outputs[0], outputs[1], references, kind)
    return ExampleTest(name, seed, len(shared), score, other, p)


def randomization_test(
    ours: Sequence[str], theirs: Sequence[str], references: Sequence[str], metric: str
) -> tuple[tuple[float, float], float]:
    """Compare the outputs of two models by paired approximate randomization as in sacrebleu (Riezler & Maxwell 2005).

    Args:
        ours: the outputs of the first model.
        theirs: the outputs of the second model.
        references: a reference for each output.
        metric: "bleu" or "chrf".

    Returns:
        The two scores, and the two-sided p value.

    Note:
        sacrebleu counts only trials with a larger difference than the observed one. Here, an equal one counts, too:
        otherwise, models that differ in a single output would have p = 1 / (TRIALS + 1).
    """
    from sacrebleu.metrics import BLEU, CHRF  # slow to import

    scorer = BLEU(force=True) if metric == "bleu" else CHRF()
    first, second = (np.array(scorer._extract_corpus_statistics(side, [references])) for side in (theirs, ours))
    swaps = np.random.default_rng(RANDOM_STATE).integers(2, size=(TRIALS, len(ours)), dtype=bool)
    shuffled = swaps @ first + ~swaps @ second, ~swaps @ first + swaps @ second
    pairs = [(first.sum(0), second.sum(0)), *zip(*shuffled, strict=True)]
    (baseline, own), *trials = (
        [scorer._compute_score_from_stats(total.tolist()).score for total in pair] for pair in pairs
    )
    as_large = sum(abs(one - other) >= abs(own - baseline) for one, other in trials)
    return (own, baseline), (as_large + 1) / (TRIALS + 1)


def _predictions(path: Path) -> list[dict[str, Any]]:
    """Return the lines of predictions.jsonl; empty if it does not exist, as for a language model.

    Raises:
        UserError: if the file is damaged.
    """
    if not path.is_file():
        return []
    try:
        # str.splitlines would also split at U+0085, which the data may contain.
        *lines, _ = path.read_text(encoding="utf-8").split("\n")
        found = [json.loads(line) for line in lines]
        return [{name: line[name] for name in ("split", "source", "target", "prediction", "correct")} for line in found]
    except (LookupError, RecursionError, TypeError, ValueError):
        raise UserError(
            f"{str(path)!r} must hold the predictions that fit has written, but is damaged; delete it to leave it out"
        ) from None
