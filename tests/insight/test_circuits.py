"""Networks whose circuits are known: exactly the planted heads are found."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lightning_tfm.insight import Sample, head_scores, inspect_network
from lightning_tfm.insight.ablation import Ablator, Part
from lightning_tfm.tokenization import BOS, EOS, NUM_SPECIAL, PAD
from support.circuits import (
    LENGTH,
    POSITION,
    TOKEN,
    copying_network,
    duplicate_network,
    induction_network,
    pick,
    set_head,
)
from support.networks import VOCAB_SIZE

SYMBOLS = 6
"""Number of symbols of a source."""


def texts(number):
    """Return texts (number, LENGTH) whose second half repeats the first, which has no token twice."""
    half = torch.stack([NUM_SPECIAL + torch.randperm(VOCAB_SIZE - NUM_SPECIAL) for _ in range(number)])[
        :, : LENGTH // 2
    ]
    return torch.cat((half, half), dim=1)


def repeated_texts(number=40):
    text = texts(number)
    is_target = torch.zeros_like(text[:, 1:], dtype=torch.bool)
    # The first half cannot be predicted, and the first token has none before it.
    is_target[:, text.size(1) // 2 + 1 :] = True
    return Sample((text[:, :0], text[:, :-1]), text[:, 1:], is_target)


def copies(order, number=40):
    """Return pairs of a source and the symbols of the source in an order, with their alignment."""
    symbols = torch.randint(NUM_SPECIAL, VOCAB_SIZE, (number, SYMBOLS))
    ends = torch.full((number, 1), EOS)
    source, target = torch.cat((symbols, ends), 1), torch.cat((symbols[:, order], ends), 1)
    target_in = torch.cat((torch.full_like(ends, BOS), target[:, :-1]), 1)
    gold = torch.zeros(number, SYMBOLS + 1, SYMBOLS + 1, dtype=torch.bool)
    gold[:, torch.arange(SYMBOLS), order] = True
    return Sample((source, target_in), target, target != PAD, gold)


def order_matrix(order):
    """Return the matrix from the position of a target to that of its source."""
    return torch.eye(LENGTH)[:, [*order, *range(SYMBOLS, LENGTH)]]


FORWARD, REVERSED = list(range(SYMBOLS)), list(range(SYMBOLS))[::-1]


def roles(inspection):
    return {head["name"]: head["role"] for head in inspection["heads"] if head["role"]}


def test_heads_of_an_induction_circuit_are_named():
    """The head that attends to equal tokens writes nothing, so it has a score, but no role."""
    network, sample = induction_network(), repeated_texts()
    scores = head_scores(network, sample)
    planted = {("layers.0.self_attention", 0): "previous_token", ("layers.0.self_attention", 1): "duplicate_token"}
    planted["layers.1.self_attention", 2] = "induction"
    high = {(head, name) for head, values in scores.items() for name, value in values.items() if value > 0.5}
    assert high == set(planted.items())
    assert all(scores[head][name] > 0.9 for head, name in planted.items())
    inspection = inspect_network(network, sample)
    assert inspection["full"]["exact_match"] == 1
    named = {"layers.0.self_attention.0": "previous token", "layers.1.self_attention.2": "induction"}
    assert roles(inspection) == named
    assert set(inspection["smallest_set"]["heads"]) == set(named)


def test_the_head_that_attends_to_equal_tokens_is_named():
    """The target of a token that has occurred before is the next id."""
    network, sample = duplicate_network(), repeated_texts()
    text = sample.inputs[1]
    is_repeated = torch.arange(text.size(1)).expand_as(text) >= LENGTH // 2
    inspection = inspect_network(network, Sample(sample.inputs, (text + 1) % VOCAB_SIZE, is_repeated))
    assert inspection["full"]["exact_match"] == 1
    assert roles(inspection) == {"layers.0.self_attention.1": "same token"}
    assert inspection["smallest_set"]["heads"] == ["layers.0.self_attention.1"]


def test_the_head_that_reads_a_part_is_named():
    """Each of three heads reads the sources of a third of the target; the last one also reads EOS."""
    thirds = {"beginning": [0, 1], "middle": [2, 3], "end": [4, 5]}
    network = copying_network(order_matrix(FORWARD), [])
    for head, positions in enumerate(([0, 1], [2, 3], [4, 5, 6])):
        matrix = torch.zeros(LENGTH, LENGTH)
        matrix[positions, positions] = 1
        set_head(network.decoder[0].cross_attention, head, pick(POSITION, 0, matrix), pick(POSITION), TOKEN)
    sample = copies(FORWARD)
    columns = torch.arange(sample.targets.size(1)).expand_as(sample.targets)
    parts = {name: torch.isin(columns, torch.tensor(positions)) for name, positions in thirds.items()}
    inspection = inspect_network(network, replace(sample, parts=parts))
    expected = {f"decoder.0.cross_attention.{head}": f"looks at the {part}" for head, part in enumerate(thirds)}
    assert inspection["full"]["exact_match"] == 1
    assert roles(inspection) == expected
    for head, part in zip(inspection["heads"][-4:-1], thirds, strict=True):
        increases = head["without"]["mean"]["errors_increase"]["part"]
        assert max(increases, key=lambda name: increases[name].mean) == part


@pytest.mark.parametrize("order", [FORWARD, REVERSED], ids=["copy", "reverse"])
@pytest.mark.parametrize("head", [0, 3])
def test_the_useful_head_among_random_ones_is_found(order, head):
    network = copying_network(order_matrix(order), [head])
    sample = copies(order)
    inspection = inspect_network(network, sample)
    name = f"decoder.0.cross_attention.{head}"
    assert inspection["full"]["exact_match"] == 1
    assert roles(inspection) == {name: "follows the alignment"}
    assert inspection["smallest_set"]["heads"] == [name]
    scores = head_scores(network, sample)["decoder.0.cross_attention", head]
    assert scores["alignment"] == 1
    assert scores["aer"] == 0
    assert scores["monotonicity"] == (1 if order == FORWARD else 0)
    assert inspection["backups"] == []


def test_heads_that_back_each_other_up_are_found():
    network = copying_network(order_matrix(FORWARD), [1, 2])
    sample = copies(FORWARD)
    ablator = Ablator(network, sample)
    first, second = (Part("decoder.0.cross_attention", head) for head in (1, 2))
    for head in (first, second):
        assert ablator.without([head]).exact.all()
    assert not ablator.without([first, second]).exact.any()
    inspection = inspect_network(network, sample)
    assert [pair["heads"] for pair in inspection["backups"]] == [(str(first), str(second))]
    assert roles(inspection) == dict.fromkeys([str(first), str(second)], "follows the alignment, backed up")
    assert len(inspection["smallest_set"]["heads"]) == 1


def test_heads_with_independent_contributions_do_not_back_each_other_up():
    """Without one of three equal heads, the output is still right, and without two, since the third remains."""
    network = copying_network(order_matrix(FORWARD), [0, 1, 2])
    inspection = inspect_network(network, copies(FORWARD))
    assert inspection["full"]["exact_match"] == 1
    assert inspection["ablated_pairs"] == 66
    assert inspection["backups"] == []
    assert roles(inspection) == {}
    assert len(inspection["smallest_set"]["heads"]) == 1
    assert inspection["smallest_set"]["exact_match"].mean == 1
