"""Alignment scores equal their definitions."""

import math

import pytest
import torch

from lightning_tfm.data import Pair, PairDataset
from lightning_tfm.tasks.alignment import AlignmentScores, gold_links
from lightning_tfm.tasks.metrics import all_gather_list
from lightning_tfm.tokenization import EOS, PAD, SymbolTokenizer
from support.data import set_up


def test_lists_of_all_processes_are_concatenated(monkeypatch):
    assert all_gather_list([1]) == [1]
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 2)

    def gather(gathered, lines, group):
        gathered[:] = [lines, [3]]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    assert all_gather_list([1, 2]) == [1, 2, 3]


def scores_by_definition(weights, pairs, split):
    """Compute accuracy, alignment error rate and entropy of each head by definition, link by link."""
    scores = []
    for head in range(len(weights[0])):
        actual, sure, possible, accurate, linked, entropies = set(), set(), set(), 0, 0, []
        for row, pair in enumerate(pairs):
            source, target = split(pair.source), split(pair.target)
            for j in range(len(target)):
                own = weights[row][head, j].tolist()
                attended = max(range(len(own)), key=own.__getitem__)
                entropies.append(-sum(w * math.log(w) for w in own if w > 0))
                if attended < len(source):
                    actual.add((row, attended, j))
                sources = {i for i, other in pair.alignment if other == j}
                linked += bool(sources)
                accurate += attended in sources
                possible |= {(row, i, j) for i in sources}
                sure |= {(row, i, j) for i in sources if len(sources) == 1}
        error = 1 - (len(actual & sure) + len(actual & possible)) / (len(actual) + len(sure))
        scores.append((accurate / linked, error, sum(entropies) / len(entropies)))
    return scores


def test_alignment_scores_equal_their_definitions(make_data):
    data = set_up(make_data())
    dataset = data.datasets["val"]
    score = AlignmentScores()
    all_weights, all_pairs = [], []
    for rows in torch.arange(len(dataset)).split(13):
        batch = dataset[rows]
        weights = torch.rand(len(rows), 3, batch.target_out.size(1), batch.source.size(1)) ** 3
        weights = weights * (batch.source != PAD)[:, None, None]
        weights = weights / weights.sum(-1, keepdim=True)
        pairs = [dataset.pairs[row] for row in rows.tolist()]
        score.update({"layer": weights}, gold_links(pairs, batch), batch)
        all_weights += weights
        all_pairs += pairs
    expected = scores_by_definition(all_weights, all_pairs, data.tokenizer.split)
    actual = score.compute()
    for head, values in enumerate(expected):
        for name, value in zip(("accuracy", "aer", "entropy"), values, strict=True):
            assert actual[f"alignment/layer/head_{head}/{name}"].item() == pytest.approx(value, rel=1e-5)
    assert score.best_head == ("layer", max(range(3), key=lambda head: expected[head][0]))


def scores_of_head(pairs, weights_of):
    """Return the scores, by name, of a head with weights (B, T, S) that are a function of the batch and its links."""
    batch = PairDataset(pairs, SymbolTokenizer("abc"))[torch.arange(len(pairs))]
    gold = gold_links(pairs, batch)
    score = AlignmentScores()
    score.update({"layer": weights_of(batch, gold).unsqueeze(1)}, gold, batch)
    return {name.rpartition("/")[2]: value.item() for name, value in score.compute().items()}


def uniform(batch, gold):
    mask = (batch.source != PAD).unsqueeze(1).expand(gold.shape).float()
    return mask / mask.sum(-1, keepdim=True)


def perfect(batch, gold):
    weights = gold.float()
    weights[..., -1] += weights.sum(-1).eq(0)  # targets without a link attend to EOS
    return weights


def to_eos(batch, gold):
    return (batch.source == EOS).unsqueeze(1).expand(gold.shape).float()


def test_scores_of_perfect_uniform_and_absent_alignments():
    pairs = [Pair("abc", "cab", ((2, 0), (0, 1), (1, 2))), Pair("a", "a", ((0, 0),))]
    assert scores_of_head(pairs, perfect) == {"accuracy": 1.0, "aer": 0.0, "entropy": 0.0}
    assert scores_of_head(pairs, uniform)["entropy"] == pytest.approx((3 * math.log(4) + math.log(2)) / 4)
    assert scores_of_head(pairs, to_eos) == {"accuracy": 0.0, "aer": 1.0, "entropy": 0.0}
