"""Paired tests over the examples of a test set, which compare two trained models rather than their settings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

from lightning_tfm.runs.record import Prediction, Run
from lightning_tfm.system.private import corpus_score, corpus_statistics

CORRECT = ("exact_match", "accuracy", "wer")
"""Metrics that are the share of correct, or of wrong, predictions."""

CORPUS = ("bleu", "chrf")
"""Metrics of sacrebleu."""

TRIALS = 10_000
"""Number of trials of the approximate randomization, sacrebleu's default."""

RANDOM_STATE = 12345
"""Seed of the trials, sacrebleu's default."""


class PairedTest(NamedTuple):
    """Paired test of two models on the same examples.

    Attributes:
        examples: the number of examples on which both were tested.
        score: the number of examples that only the model has right, or its score.
        baseline: the same for the model that it is compared with.
        p: the two-sided p value.
    """

    examples: int
    score: float
    baseline: float
    p: float


def by_example(run: Run, test_set: str) -> dict[Hashable, Prediction]:
    """Return the predictions for a test set, by source and number of its earlier occurrences."""
    counts: Counter[str] = Counter()
    predictions: dict[Hashable, Prediction] = {}
    for line in run.predictions:
        if line.get("split") == test_set:
            predictions[line["source"], counts[line["source"]]] = line
            counts[line["source"]] += 1
    return predictions


def compare_examples(run: Run, other: Run, metric: str, test_set: str) -> PairedTest | None:
    """Test two models on the examples that both were tested on.

    Exact match, accuracy and WER are compared by `sign_test`, BLEU and chrF by `randomization_test`.

    Args:
        run: a run.
        other: another run.
        metric: the name of a metric, of which only the last part counts, such as `bleu` of `test/bleu`.
        test_set: the name of the test set.

    Returns:
        The test; None if the metric has none, or if no example is shared, as without predictions.
    """
    kind = metric.rpartition("/")[2]
    if kind not in CORRECT + CORPUS:
        return None
    first, second = (by_example(each, test_set) for each in (run, other))
    pairs = [(line, second[key]) for key, line in first.items() if key in second]
    if not pairs:
        return None
    if kind in CORRECT:
        return sign_test([(line["correct"], paired["correct"]) for line, paired in pairs])
    outputs, others = ([pair[side]["prediction"] for pair in pairs] for side in (0, 1))
    return randomization_test(outputs, others, [line["target"] for line, _ in pairs], kind)


def sign_test(correct: Sequence[tuple[bool, bool]]) -> PairedTest:
    """Compare two models by the examples that only one of them has right (exact sign test, McNemar 1947).

    Returns:
        The test; p is 1 if both models have the same examples right.
    """
    from scipy.stats import binomtest  # slow to import

    first, second = (sum(pair == only for pair in correct) for only in ((True, False), (False, True)))
    p = float(binomtest(first, first + second).pvalue) if first + second else 1.0
    return PairedTest(len(correct), first, second, p)


def randomization_test(
    outputs: Sequence[str], other: Sequence[str], references: Sequence[str], metric: str
) -> PairedTest:
    """Compare the outputs of two models by paired approximate randomization as in sacrebleu (Riezler & Maxwell 2005).

    Note:
        sacrebleu counts only trials with a larger difference than the observed one. Here, an equal one counts, too:
        otherwise, models that differ in a single output would have p = 1 / (TRIALS + 1).
    """
    from sacrebleu.metrics import BLEU, CHRF  # slow to import

    scorer = BLEU(force=True) if metric == "bleu" else CHRF()
    first, second = (corpus_statistics(scorer, side, references) for side in (outputs, other))
    swaps = np.random.default_rng(RANDOM_STATE).integers(2, size=(TRIALS, len(outputs)), dtype=bool)
    shuffled = swaps @ second + ~swaps @ first, ~swaps @ second + swaps @ first
    totals = [(first.sum(0), second.sum(0)), *zip(*shuffled, strict=True)]
    scores = [[corpus_score(scorer, total) for total in pair] for pair in totals]
    observed, *trials = (abs(score - other_score) for score, other_score in scores)
    p = (sum(trial >= observed for trial in trials) + 1) / (TRIALS + 1)
    return PairedTest(len(outputs), scores[0][0], scores[0][1], p)
