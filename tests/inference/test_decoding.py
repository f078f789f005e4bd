"""Decoding with toy step functions, compared with brute force."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from lightning_tfm.inference import Seq2SeqPredictor
from lightning_tfm.inference.decoding import (
    PATIENCE,
    DecodingOptions,
    beam_search,
    continue_text,
    decode,
    reorder_state,
    sampler,
)
from lightning_tfm.networks.network import Memory
from lightning_tfm.tokenization import BOS, EOS, PAD, SymbolTokenizer

VOCAB_SIZE = 6
SYMBOLS = range(3, VOCAB_SIZE)


def table_step(tables):
    """Return a step function that looks up logits by all previous tokens, in one table for each row.

    The state is (row (B), (previous tokens encoded as one number (B),)).
    """

    def step(token, state):
        (rows, (history,)) = state
        history = history * VOCAB_SIZE + token
        logits = torch.stack([tables[row](number) for row, number in zip(rows.tolist(), history.tolist(), strict=True)])
        return logits, (rows, (history,))

    return step


def random_table(seed):
    """Return a function that draws fixed logits for each history."""

    def logits(number):
        return torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(1000 * number + seed)) * 2

    return logits


def start(batch):
    return torch.arange(batch), (torch.zeros(batch, dtype=torch.long),)


def score(table, tokens, length_penalty):
    """Return log p / n^length_penalty of a sequence, by definition."""
    total, number = 0.0, BOS
    for token in tokens:
        total += table(number).log_softmax(-1)[token].item()
        number = number * VOCAB_SIZE + token
    return total / len(tokens) ** length_penalty


def all_sequences(max_length):
    """Yield all sequences that a search may return: ended by EOS, or open at max_length."""
    for length in range(max_length):
        for symbols in itertools.product(SYMBOLS, repeat=length):
            yield (*symbols, EOS)
    yield from itertools.product(SYMBOLS, repeat=max_length)


def without_padding(row):
    return tuple(token for token in row.tolist() if token != PAD)


def test_a_short_beam_search_finds_fewer_sequences():
    """Places without a sequence are padding."""
    tokens, scores = beam_search(table_step([random_table(0)]), start(1), 1, beam_size=6, n_best=6)
    finite = scores[0].isfinite()
    sequences = [without_padding(sequence) for sequence in tokens[0][finite]]
    assert sorted(sequences) == [(EOS,), *((symbol,) for symbol in SYMBOLS)]
    assert tokens[0][~finite].eq(PAD).all()
    logits = torch.full((VOCAB_SIZE,), -math.inf).index_fill(0, torch.tensor(3), 0.0)  # only the symbol 3 is possible
    tokens, scores = beam_search(table_step([lambda number: logits]), start(1), 2, beam_size=5, n_best=5)
    assert scores[0].isfinite().tolist() == [True, *[False] * 4]
    assert tokens[0].tolist() == [[3, 3], *[[PAD, PAD]] * 4]


def test_greedy_takes_the_likeliest_symbol_until_eos():
    tables = [random_table(seed) for seed in range(12)]
    outputs = decode(table_step(tables), start(12), 7)
    for row, table in enumerate(tables):
        expected, number = [], BOS
        while len(expected) < 7 and EOS not in expected:
            expected.append(max((EOS, *SYMBOLS), key=table(number).tolist().__getitem__))
            number = number * VOCAB_SIZE + expected[-1]
        assert without_padding(outputs[row]) == tuple(expected)
        assert outputs[row, len(expected) :].eq(PAD).all()
    assert decode(table_step(tables), start(12), 0).shape == (12, 0)


def slow_beam_search(table, max_length, beam_size, length_penalty):
    """Return the sequences found for one row with their scores, the best first, by lists of prefixes."""
    prefixes, finished = {(): 0.0}, {}
    for length in range(1, max_length + 1):
        extended = {}
        for prefix, total in prefixes.items():
            number = BOS
            for token in prefix:
                number = number * VOCAB_SIZE + token
            log_probs = table(number).log_softmax(-1).tolist()
            extended |= {(*prefix, token): total + log_probs[token] for token in (EOS, *SYMBOLS)}
        ranked = sorted(extended, key=extended.get, reverse=True)
        for prefix in ranked[:beam_size]:
            if prefix[-1] == EOS and len(finished) < PATIENCE * beam_size:
                finished[prefix] = extended[prefix] / length**length_penalty
        if len(finished) == PATIENCE * beam_size:
            break
        prefixes = {prefix: extended[prefix] for prefix in [p for p in ranked if p[-1] != EOS][:beam_size]}
    else:
        finished |= {prefix: total / max_length**length_penalty for prefix, total in prefixes.items()}
    return sorted(finished.items(), key=lambda item: item[1], reverse=True)[:beam_size]


def exhaustive_search(table, max_length, beam_size, length_penalty):
    """Return all sequences of a row that a search may return with their scores, the best first."""
    scores = {sequence: score(table, sequence, length_penalty) for sequence in all_sequences(max_length)}
    return sorted(scores.items(), key=lambda item: item[1], reverse=True)


@pytest.mark.parametrize("length_penalty", [0.0, 0.7, 1.0])
@pytest.mark.parametrize(
    ("search", "max_length", "beam_size"),
    [(exhaustive_search, 4, 3**4), *((slow_beam_search, 7, beam_size) for beam_size in (1, 2, 3, 5))],
)
def test_beam_search_equals_a_slow_implementation(search, max_length, beam_size, length_penalty):
    tables, n_best = [random_table(seed) for seed in range(20)], min(beam_size, 5)
    tokens, scores = beam_search(table_step(tables), start(20), max_length, beam_size, length_penalty, n_best=n_best)
    for row, table in enumerate(tables):
        expected, expected_scores = zip(*search(table, max_length, beam_size, length_penalty)[:n_best], strict=True)
        assert [without_padding(sequence) for sequence in tokens[row]] == [*expected]
        assert scores[row].tolist() == pytest.approx(expected_scores, abs=1e-4)


@pytest.mark.parametrize(
    ("search", "expected"),
    [(decode, [3] * 5), (lambda *args: beam_search(*args, beam_size=2)[0][:, 0], [6, 6, 6, 4, 2, 2, 2])],
)
def test_decoding_stops_when_every_row_has_ended(search, expected):
    """Row i emits lengths[i] symbols and EOS. Beam search drops it after two more, in which its other beams end."""
    lengths = torch.tensor([1, 4, 0])
    rows = []

    def step(token, state):
        rows.append(len(token))
        (target, written) = state
        logits = torch.full((len(token), VOCAB_SIZE), -30.0)
        logits[:, 3] = 0.0
        logits[written >= target] = torch.tensor([-30.0, -30.0, 0.0, -30.0, -30.0, -30.0])
        return logits, (target, written + 1)

    outputs = search(step, (lengths, torch.zeros(3, dtype=torch.long)), 50)
    assert rows == expected
    assert [without_padding(row) for row in outputs] == [(3, EOS), (3, 3, 3, 3, EOS), (EOS,)]


@pytest.mark.parametrize(
    ("length", "num_tokens", "max_length", "contexts"),
    [
        *((3, 12, 8, [2, 3, 3]), (3, 5, 8, [2]), (8, 3, 8, [7, 3]), (9, 3, 8, [3])),
        *((20, 8, 9, [3, 3]), (1, 2, 1, [0, 0]), (1, 4, 2, [0, 0])),
    ],
)
def test_a_continuation_moves_its_window_by_half_of_the_positions(length, num_tokens, max_length, contexts):
    """The first tokens of each window are encoded at once; `contexts` has their numbers."""
    encoded, positions = [], []

    def encode(context):
        encoded.append(context.size(1))
        return torch.zeros(1, 1) + context.size(1)

    def step(token, state):
        positions.append(int(state.item()) + 1)
        return torch.zeros(1, VOCAB_SIZE), state + 1

    more = continue_text(encode, step, torch.full((1, length), 3), num_tokens, max_length)
    assert more.shape == (1, num_tokens)
    assert encoded == contexts
    assert max(positions) <= max_length


@torch.inference_mode()
def test_log_probabilities_are_those_of_the_beam_search(network):
    """Both are the log p of the network over all tokens, including PAD and BOS, as in the loss."""
    predictor = Seq2SeqPredictor(network, SymbolTokenizer("abcdefgh"), 6).eval()
    (prediction,) = predictor.predict(["abc"], DecodingOptions(beam_size=4, n_best=3, scores=True))
    assert prediction.text == predictor.predict(["abc"], DecodingOptions(beam_size=4))[0].text
    source = torch.tensor([[*predictor.tokenizer.encode("abc"), EOS]])
    tokens, scores = beam_search(network.decode_step, network.encode(source), 6, beam_size=4, n_best=3)
    for output, row, mean in zip(prediction.outputs, tokens[0], scores[0].tolist(), strict=True):
        target, total = without_padding(row), 0.0
        for length, token in enumerate(target):
            logits = network(source, torch.tensor([[BOS, *target[:length]]]))[0, -1]
            total += logits.double().log_softmax(-1)[token].item()
        assert output.text == predictor.tokenizer.decode(target)
        assert mean * len(target) == pytest.approx(total, abs=1e-3)
        assert output.log_probability == pytest.approx(total, abs=1e-3)


def test_pad_and_bos_are_never_generated():
    def step(token, state):
        return torch.tensor([[9.0, 9.0, 0.0, 1.0, 0.0, 0.0]]).expand(len(token), -1), state

    state = (torch.zeros(4),)
    beams, _ = beam_search(step, state, 5, beam_size=2)
    for tokens in (decode(step, state, 5), decode(step, state, 5, sampler(1.0)), beams[:, 0]):
        symbols = {token for row in tokens for token in without_padding(row)}
        assert symbols
        assert symbols <= {EOS, *SYMBOLS}


def draws(sample_fn, logits, count=20_000):
    return torch.bincount(sample_fn(logits.expand(count, -1)), minlength=logits.size(-1)) / count


def test_sampling_follows_temperature_and_top_k():
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    for temperature in (0.5, 1.0, 2.0):
        frequencies = draws(sampler(temperature, generator=torch.Generator().manual_seed(0)), logits)
        torch.testing.assert_close(frequencies, (logits / temperature).softmax(-1), atol=0.015, rtol=0)

    expected = torch.tensor([0.0, *logits[1:3].softmax(-1).tolist(), 0.0])
    torch.testing.assert_close(draws(sampler(top_k=2), logits), expected, atol=0.015, rtol=0)
    assert draws(sampler(top_k=100), logits).gt(0).all()


@pytest.mark.parametrize(("top_p", "kept"), [(0.3, 1), (0.5, 1), (0.51, 2), (0.8, 2), (0.81, 3), (1.0, 4)])
def test_top_p_keeps_the_smallest_set_of_that_probability(top_p, kept):
    probabilities = torch.tensor([0.15, 0.5, 0.05, 0.3])
    frequencies = draws(sampler(top_p=top_p), probabilities.log())
    likeliest = probabilities.argsort(descending=True)[:kept]
    assert set(frequencies.nonzero().flatten().tolist()) == set(likeliest.tolist())


def test_equal_seeds_draw_equal_samples():
    tables = [random_table(seed) for seed in range(6)]
    first, second, other = (
        decode(table_step(tables), start(6), 6, sampler(2.0, generator=torch.Generator().manual_seed(seed)))
        for seed in (1, 1, 2)
    )
    assert first.equal(second)
    assert not (first.shape == other.shape and first.equal(other))


def test_decoding_does_not_depend_on_the_batch(network, batch):
    source, _ = batch
    together = decode(network.decode_step, network.encode(source), 8)
    beams, _ = beam_search(network.decode_step, network.encode(source), 8, beam_size=3)
    for row in range(len(source)):
        alone = source[row : row + 1, : (source[row] != PAD).sum()]
        output = decode(network.decode_step, network.encode(alone), 8)
        assert without_padding(output[0]) == without_padding(together[row])
        beam, _ = beam_search(network.decode_step, network.encode(alone), 8, beam_size=3)
        assert without_padding(beam[0, 0]) == without_padding(beams[row, 0])


def test_reorder_state_selects_rows_of_every_tensor():
    """The memory is kept if the rows have the same sources."""
    state = (torch.arange(4), ((torch.arange(8).view(4, 2),), ()), Memory((torch.arange(4),)))
    rows = torch.tensor([3, 1, 1])
    copied, kept = reorder_state(state, rows), reorder_state(state, rows, same_sources=True)
    for number, nested, _ in (copied, kept):
        assert number.tolist() == [3, 1, 1]
        assert nested[0][0].tolist() == [[6, 7], [2, 3], [2, 3]]
    assert copied[2][0].tolist() == [3, 1, 1]
    assert isinstance(copied[2], Memory)
    assert kept[2] is state[2]
