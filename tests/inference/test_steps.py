"""Steps of outputs and of scored lines: the probability of each symbol, and its alternatives."""

import math

import pytest
import torch

from lightning_tfm.inference import (
    ClassifierPredictor,
    LanguageModelPredictor,
    MaskedLanguageModelPredictor,
    Seq2SeqPredictor,
)
from lightning_tfm.inference.decoding import DecodingOptions
from lightning_tfm.inference.predictor import ALTERNATIVES
from lightning_tfm.networks import GPT, AttentionLSTM, EncoderClassifier, MaskedEncoder, Transformer
from lightning_tfm.tokenization import BOS, EOS, PAD, SymbolTokenizer
from support.networks import randomize, tiny

TOKENIZER = SymbolTokenizer("abcdefgh")
LABELS = ["low", "middle", "high"]


def make(cls, network, *arguments, **settings):
    torch.manual_seed(1)
    made = tiny(network, **settings)
    predictor = cls(made.func(TOKENIZER.vocab_size, **made.keywords), TOKENIZER, *arguments).eval()
    randomize(predictor.network)
    return predictor


PREDICTORS = {
    "Transformer": (lambda: make(Seq2SeqPredictor, Transformer, 6), ["ab", "hgfed", "c"]),
    "AttentionLSTM": (lambda: make(Seq2SeqPredictor, AttentionLSTM, 6), ["ab", "hgfed", "c"]),
    "GPT": (lambda: make(Seq2SeqPredictor, GPT, 6), ["ab", "hgfed", "c"]),
    "language model": (lambda: make(LanguageModelPredictor, GPT, text_only=True), ["ab", "a" * 15]),
    "masked": (lambda: make(MaskedLanguageModelPredictor, MaskedEncoder), ["a[MASK]b[MASK]", "[MASK]"]),
    "classifier": (lambda: make(ClassifierPredictor, EncoderClassifier, LABELS, num_classes=3), ["ab", "hgfed"]),
}


@pytest.fixture(params=PREDICTORS)
def predictor(request):
    return PREDICTORS[request.param][0]()


@pytest.fixture
def lines(request):
    return PREDICTORS[request.node.callspec.params["predictor"]][1]


def options_for(predictor, **others):
    return DecodingOptions(steps=True, max_tokens=10 if predictor.outputs_are_long else None, **others)


def assert_ranked(predictor, step, logits):
    """Assert that the step agrees with a loop over the probabilities of all ids (V)."""
    probabilities = dict(enumerate(logits.double().softmax(-1).tolist()))
    assert step.probability == pytest.approx(probabilities[step.id], rel=1e-4)
    others = [id for id in probabilities if id != step.id and id not in predictor.excluded_ids]
    best = sorted(others, key=probabilities.__getitem__, reverse=True)[:ALTERNATIVES]
    assert [other.id for other in step.alternatives] == best
    for other in step.alternatives:
        assert other.probability == pytest.approx(probabilities[other.id], rel=1e-4)
        assert other.symbol == predictor.output_symbol(other.id)
    assert step.symbol == predictor.output_symbol(step.id)


def logits_step_by_step(predictor, line, steps):
    """Return the logits (V) of each step, each of which is computed alone."""
    network, ids = predictor.network, [step.id for step in steps]
    if isinstance(predictor, Seq2SeqPredictor):
        state, rows = network.encode(torch.tensor([[*TOKENIZER.encode(line), EOS]])), []
        for token in [BOS, *ids[:-1]]:
            logits, state = network.decode_step(torch.tensor([token]), state)
            rows.append(logits[0])
        return rows
    if isinstance(predictor, LanguageModelPredictor):
        text = [*TOKENIZER.encode(line), *ids]
        first = len(text) - len(ids)
        none = torch.empty(1, 0, dtype=torch.long)
        return [network(none, torch.tensor([text[: first + step]]))[0, -1] for step in range(len(ids))]
    if isinstance(predictor, MaskedLanguageModelPredictor):
        text = torch.tensor([predictor.encode_line(line)[0]])
        return [*network(text)[text < 3]]
    return [network(torch.tensor([TOKENIZER.encode(line)]))[0]]


@torch.no_grad()
def test_steps_agree_with_the_probabilities_of_all_ids(predictor, lines):
    for line, prediction in zip(lines, predictor.predict(lines, options_for(predictor)), strict=True):
        (output,) = prediction.outputs
        if predictor.outputs_are_long and len(line) + 10 > predictor.network.max_length:
            assert len(output.steps) == 10  # in several windows
            continue
        for step, logits in zip(output.steps, logits_step_by_step(predictor, line, output.steps), strict=True):
            assert_ranked(predictor, step, logits)


def test_steps_spell_the_output(predictor, lines):
    plain = predictor.predict(lines, DecodingOptions(max_tokens=10 if predictor.outputs_are_long else None))
    for line, expected, prediction in zip(lines, plain, predictor.predict(lines, options_for(predictor)), strict=True):
        (output,) = prediction.outputs
        assert output.text == expected.text
        assert expected.outputs[0].steps is None
        symbols = [step.symbol for step in output.steps if step.id not in (PAD, EOS) or predictor.excluded_ids == ()]
        rest = iter(symbols)
        filled = "".join(next(rest) if part == "?" else part for part in line.replace("[MASK]", "?"))
        spelled = {LanguageModelPredictor: line + "".join(symbols), MaskedLanguageModelPredictor: filled}
        assert output.text == spelled.get(type(predictor), "".join(symbols))


@pytest.mark.parametrize("predictor", ["Transformer", "GPT"], indirect=True)
def test_steps_of_each_beam_add_up_to_its_log_probability(predictor, lines):
    options = options_for(predictor, beam_size=4, n_best=3, scores=True)
    for prediction in predictor.predict(lines, options):
        assert len(prediction.outputs) > 1
        for output in prediction.outputs:
            total = sum(step.log_probability for step in output.steps)
            assert total == pytest.approx(output.log_probability, rel=1e-4)


@pytest.mark.parametrize("predictor", ["Transformer", "AttentionLSTM", "GPT", "language model"], indirect=True)
def test_scores_have_steps_on_request(predictor):
    """A text longer than the network has positions is scored in windows."""
    lines = ["abc", "ab" * 30] if predictor.outputs_are_long else ["ab\tcde", "h\tg"]
    scores, plain = predictor.score(lines, with_steps=True), predictor.score(lines)
    for line, score, other in zip(lines, scores, plain, strict=True):
        assert score._replace(steps=None) == other
        assert len(score.steps) == score.tokens
        assert sum(step.log_probability for step in score.steps) == pytest.approx(score.log_probability, rel=1e-4)
        symbols = [step.symbol for step in score.steps]
        assert symbols == ([*line[1:]] if predictor.outputs_are_long else [*line.partition("\t")[2], "EOS"])


def test_steps_of_an_impossible_symbol_have_finite_alternatives():
    predictor = make(Seq2SeqPredictor, GPT, 6)
    logits = torch.full((1, TOKENIZER.vocab_size), -math.inf)
    logits[0, 4:6] = 0.0
    (step,) = predictor.steps(logits, torch.tensor([3]))
    assert step.probability == 0
    assert sorted(other.id for other in step.alternatives) == [4, 5]
    assert [other.probability for other in step.alternatives] == pytest.approx([0.5, 0.5])
