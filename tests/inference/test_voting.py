"""Votes of the members of an ensemble, compared with a count by hand."""

from __future__ import annotations

from collections import defaultdict
from fractions import Fraction
from statistics import fmean

import pytest
import torch

from lightning_tfm.errors import UserError
from lightning_tfm.inference import Seq2SeqPredictor, voting
from lightning_tfm.inference.decoding import DecodingOptions, beam_search, decode
from lightning_tfm.inference.voting import vote
from lightning_tfm.layers.losses import sequence_nll
from lightning_tfm.networks import AttentionLSTM
from lightning_tfm.tasks import Seq2SeqModule
from lightning_tfm.tokenization import BOS, EOS, PAD, SymbolTokenizer
from support.networks import NETWORKS, VOCAB_SIZE, joined, randomize

LENGTH = 4


def trimmed(tokens):
    """Return a sequence without padding."""
    return tuple(tokens[tokens != PAD].tolist())


def ballots(member, source, beam_size):
    """Return the sequences of a member with their mean log probabilities, the best first, for each row."""
    if beam_size > 1:
        outputs, scores = beam_search(member.decode_step, member.encode(source), LENGTH, beam_size, n_best=beam_size)
    else:
        outputs = decode(member.decode_step, member.encode(source), LENGTH).unsqueeze(1)
        target_in = torch.cat((torch.full_like(outputs[:, 0, :1], BOS), outputs[:, 0, :-1]), dim=1)
        logits = member(source, target_in.masked_fill(target_in == EOS, PAD))
        scores = -sequence_nll(logits, outputs[:, 0])[:, None] / (outputs != PAD).sum(2)
    pairs = [zip(map(trimmed, row), values.tolist(), strict=True) for row, values in zip(outputs, scores, strict=True)]
    return [[pair for pair in row if pair[1] > -torch.inf] for row in pairs]


@torch.no_grad()
@pytest.mark.parametrize("beam_size", [1, 2, 5])
def test_sequences_are_ranked_by_votes_and_then_by_probability(beam_size, batch):
    source, _ = batch
    torch.manual_seed(3)
    names = "Transformer", "GPT", "AttentionLSTM", "AttentionLSTM", "LinearTransformer"
    ensemble = joined(*(randomize(NETWORKS[name](), 0.1) for name in names))
    tokens, votes = vote(ensemble, ensemble.encode(source), LENGTH, beam_size, beam_size)
    found = [ballots(member, source, beam_size) for member in ensemble.members]
    ties = 0
    for row in range(len(source)):
        counts, scores = defaultdict(Fraction), defaultdict(list)
        for ballot in found:
            for rank, (sequence, score) in enumerate(ballot[row], start=1):
                counts[sequence] += Fraction(1, rank)
                scores[sequence].append(score)
        ranked = sorted(counts, key=lambda sequence: (-counts[sequence], -fmean(scores[sequence])))[:beam_size]
        ties += len({counts[sequence] for sequence in ranked}) < len(ranked)
        real = votes[row].isfinite()
        assert [trimmed(each) for each in tokens[row][real]] == ranked
        assert votes[row][real].tolist() == pytest.approx([float(counts[sequence]) for sequence in ranked])
    assert ties or beam_size == 1


def test_votes_are_counted(monkeypatch):
    """By hand: x has 1 + 1/2, y has 1/2 + 1 + 1, and z has 1/2 votes; then, each has one and a half."""
    x, y, z = [5, EOS], [6, 7, EOS], [8, EOS]

    def found(*rows):
        width = max(len(tokens) for row in rows for tokens in row if tokens)
        padded = [[(tokens or []) + [PAD] * (width - len(tokens or [])) for tokens in row] for row in rows]
        scores = [[-0.1 * (place + 1) if tokens else -torch.inf for place, tokens in enumerate(row)] for row in rows]
        return torch.tensor(padded), torch.tensor(scores)

    results = iter([found([x, y], [x, y]), found([y, x], [y, z]), found([y, z], [z, x])])
    monkeypatch.setattr(voting, "_best", lambda *_: next(results))
    ensemble = joined(*[AttentionLSTM(VOCAB_SIZE, 8)] * 3)
    tokens, votes = vote(ensemble, ensemble.encode(torch.tensor([[5, EOS]] * 2)), LENGTH, 2, 2)
    assert [trimmed(each) for each in tokens[0]] == [tuple(y), tuple(x)]
    assert votes.tolist() == [[2.5, 1.5], [1.5, 1.5]]
    results = iter([found([x, None]), found([x, None]), found([x, None])])
    tokens, votes = vote(ensemble, ensemble.encode(torch.tensor([[5, EOS]])), LENGTH, 2, 2)
    assert [trimmed(each) for each in tokens[0]] == [tuple(x), ()]
    assert votes.tolist() == [[3.0, -torch.inf]]


def test_a_vote_is_an_option_of_decoding():
    tokenizer = SymbolTokenizer("abcdefgh")
    torch.manual_seed(0)
    network = joined(*(randomize(AttentionLSTM(tokenizer.vocab_size, 8)) for _ in range(3)))
    predictor = Seq2SeqPredictor(network, tokenizer, LENGTH).eval()
    options = DecodingOptions(beam_size=3, n_best=3, vote=True, scores=True)
    (prediction,) = predictor.predict(["abc"], options)
    source = torch.tensor([[*tokenizer.encode("abc"), EOS]])
    with torch.no_grad():
        tokens, _ = vote(network, network.encode(source), LENGTH, 3, 3)
    assert [output.text for output in prediction.outputs] == [tokenizer.decode(ids.tolist()) for ids in tokens[0]]
    with pytest.raises(UserError, match="vote and temperature are mutually exclusive"):
        DecodingOptions(vote=True, temperature=1.0)
    single = AttentionLSTM(tokenizer.vocab_size, 8)
    with pytest.raises(UserError, match="vote must not be set for AttentionLSTM, which has no members"):
        Seq2SeqPredictor(single, tokenizer, LENGTH).predict(["abc"], DecodingOptions(vote=True))
    with pytest.raises(UserError, match="vote must not be set for AttentionLSTM, which has no members"):
        Seq2SeqModule(single, tokenizer, LENGTH, vote=True)
    assert Seq2SeqModule(network, tokenizer, LENGTH, vote=True).hparams["vote"] is True
