"""Mixtures of texts: each row is a window of one text, and the texts are in proportion to their weights."""

from __future__ import annotations

import itertools
import pickle
from fractions import Fraction

import pytest
import torch
from lightning import Callback
from torch.nn import functional as F

from datamodules import Text
from lightning_tfm.data import MixtureSampler, WindowSampler, token_files
from lightning_tfm.data import text as text_module
from lightning_tfm.errors import UserError
from lightning_tfm.networks import GPT
from lightning_tfm.tasks import LanguageModel
from lightning_tfm.tokenization import PAD, train_tokenizer
from support.corpora import TEXT, text_file
from support.data import set_up, split_texts
from support.training import make_trainer

HALVES = TEXT[: len(TEXT) // 2], TEXT[len(TEXT) // 2 :]
TEXTS = {"verses": "\n".join(HALVES), "numbers.txt": " ".join(map(str, range(300))), "code.txt": "x = 1\n" * 60}
SIZES = {"max_length": 8, "batch_size": 10, "eval_batch_size": 7}


@pytest.fixture
def path(tmp_path):
    """Write texts, one of them as a folder of two files, and return a mixture of them."""
    for number, half in enumerate(HALVES):  # which are joined by a line feed
        text_file(tmp_path, half, f"verses/{number}")
    for name in ("numbers.txt", "code.txt"):
        text_file(tmp_path, TEXTS[name], name)
    weights = {"verses/": 6, "numbers.txt": 3, "code.txt": 1}
    return {str(tmp_path / name): float(weight) for name, weight in weights.items()}


def texts_of(split):
    """Return a split of each text."""
    ends = {name: round(len(text) * 0.9) for name, text in TEXTS.items()}
    return {name: text[: ends[name]] if split == "train" else text[ends[name] :] for name, text in TEXTS.items()}


@pytest.mark.parametrize("batch_size", [1, 7])
@pytest.mark.parametrize("weights", [[0.7, 0.3], [1, 1, 1], [5, 3, 1, 1, 0.01], [1e-3, 1], [8, 4, 2, 1, 1]])
def test_texts_are_apportioned_as_seats_by_the_method_of_sainte_lague(weights, batch_size):
    sampler = MixtureSampler([100] * len(weights), dict(zip("abcde", weights, strict=False)), 4, batch_size, seed=0)
    seats = sorted(
        ((Fraction(number) + Fraction(1, 2)) / Fraction(weight), index)
        for index, weight in enumerate(weights)
        for number in range(301)
    )
    for position in range(300 // batch_size):
        parties = [index for _, index in seats[: position * batch_size]]
        assert sampler.counts(position) == [parties.count(index) for index in range(len(weights))]


@pytest.mark.parametrize("listed", [10, WindowSampler.LISTED])
def test_the_windows_of_each_text_are_visited_in_shuffled_passes(listed, monkeypatch):
    monkeypatch.setattr(WindowSampler, "LISTED", listed)
    sizes, max_length = [900, 250, 120], 8
    sampler = MixtureSampler(sizes, {"a": 6, "b": 3, "c": 1}, max_length, 10, seed=3)
    rows = torch.cat([*itertools.islice(sampler, 150)])
    begin = 0
    for size in sizes:
        own = rows[(rows >= begin) & (rows < begin + size - max_length)] - begin
        begin += size - max_length
        windows = (size - 1) // max_length - 1
        passes = [each for each in own.split(windows) if len(each) == windows]
        assert passes
        for visited in passes:
            first = int(visited.min())
            assert first < max_length
            assert sorted(visited.tolist()) == [first + number * max_length for number in range(windows)]
        assert len({tuple((visited - visited.min()).tolist()) for visited in passes}) == len(passes)


def test_training_rows_are_windows_of_one_text_in_proportion_to_the_weights(path):
    data = set_up(Text(path, **SIZES))
    texts, dataset = texts_of("train"), data.datasets["train"]
    starts = dict(zip(texts, itertools.accumulate([0, *(len(text) - 8 for text in texts.values())]), strict=False))
    for number, rows in enumerate(itertools.islice(data.training_batches(data.division), 200)):
        batch, counts = dataset[rows], dict.fromkeys(texts, 0)
        assert batch.rows.equal(rows)
        for row, target_in, target_out in zip(rows.tolist(), batch.target_in, batch.target_out, strict=True):
            name = max((name for name in texts if starts[name] <= row), key=starts.get)
            window = texts[name][row - starts[name] :][:9]
            assert (data.tokenizer.decode(target_in), data.tokenizer.decode(target_out)) == (window[:8], window[1:])
            counts[name] += 1
        assert counts == {"verses": 6, "numbers.txt": 3, "code.txt": 1}, f"of batch {number}"


def test_evaluation_scores_every_token_of_each_text_once(path):
    data = set_up(Text(path, **SIZES))
    scored = {name: [] for name in TEXTS}
    for batch in data.val_dataloader():
        for index, target_out in zip(data.datasets["val"].text_indices(batch.rows), batch.target_out, strict=True):
            scored[[*TEXTS][index]] += target_out[target_out != PAD].tolist()
    for name, text in texts_of("val").items():
        assert split_texts(data, name) == {"train": texts_of("train")[name], "val": text}
        assert sorted(scored[name]) == sorted(data.tokenizer.encode(text)[1:])
    dataset = data.datasets["val"]
    assert dataset.num_tokens == sum(map(len, scored.values())) == dataset.lengths.sum()
    assert len(dataset) == len(dataset.lengths)


def test_a_mixture_is_sent_to_a_worker_without_its_tokens(path):
    dataset = set_up(Text(path, **SIZES)).datasets["train"]
    sent = pickle.dumps(dataset)
    assert len(sent) < 4_000
    rows = torch.tensor([0, len(dataset) - 1, 100])
    assert all(map(torch.equal, pickle.loads(sent)[rows], dataset[rows]))


def test_the_tokenizer_is_trained_on_equally_many_characters_of_each_text(path, monkeypatch):
    monkeypatch.setattr(text_module, "SAMPLE", 900)
    tokenizer = Text(path, tokenizer="subword", vocab_size=280).tokenizer
    sample = [text[:300] for text in texts_of("train").values()]
    assert tokenizer.to_dict() == train_tokenizer(sample, "subword", 280).to_dict()
    assert Text(path).tokenizer.to_dict() == train_tokenizer(texts_of("train").values(), "character", 6000).to_dict()


def test_weights_do_not_change_the_tokens(path, monkeypatch):
    first = Text(path)
    monkeypatch.setattr(token_files, "_prepare", lambda *arguments: pytest.fail("the tokens were prepared again"))
    assert Text({name: 1 / weight for name, weight in path.items()}).tokens == first.tokens


def test_a_mixture_of_one_text_is_that_text(tmp_path):
    path = text_file(tmp_path)
    alone, mixture = set_up(Text(path, **SIZES)), set_up(Text({path: 3.0}, **SIZES))
    assert mixture.fingerprint == alone.fingerprint
    for rows, expected in itertools.islice(
        zip(*(data.training_batches(data.division) for data in (mixture, alone)), strict=True), 100
    ):
        assert rows.equal(expected)
        assert all(map(torch.equal, mixture.datasets["train"][rows], alone.datasets["train"][rows]))


def test_batches_depend_neither_on_workers_nor_on_interruptions(path):
    first = set_up(Text(path, **SIZES)).train_dataloader()
    whole = [*first]
    loader = set_up(Text(path, num_workers=2, **SIZES)).train_dataloader()
    loader.load_state_dict(first.state_dict() | {"position": 7})
    resumed = [batch for batch, _ in zip(loader, whole[7:], strict=False)]
    assert len(resumed) == len(whole) - 7 > 0
    assert all(map(torch.equal, itertools.chain(*resumed), itertools.chain(*whole[7:])))


def test_a_mixture_is_resumed_with_the_same_weights_only(path):
    state = set_up(Text(path, **SIZES)).train_dataloader().state_dict()
    other = set_up(Text(dict.fromkeys(path, 1.0), **SIZES)).train_dataloader()
    with pytest.raises(UserError, match=r"the weights must match the checkpoint \(\{'verses': 6.0, .*\) to resume"):
        other.load_state_dict(state)


class Logged(Callback):
    """Callback that counts the rows of each text, and keeps the logged values."""

    def __init__(self):
        self.rows, self.values = [], []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.rows += trainer.datamodule.datasets["train"].text_indices(batch.rows).tolist()
        values = {name: trainer.callback_metrics[f"train/{name}"].item() for name in self.names}
        shares = {f"share/{name}": self.rows.count(index) / len(self.rows) for index, name in enumerate(TEXTS)}
        windows = [(len(text) - 1) // 8 - 1 for text in texts_of("train").values()]
        passes = {f"passes/{name}": self.rows.count(index) / windows[index] for index, name in enumerate(TEXTS)}
        assert values == pytest.approx(shares | passes)

    @property
    def names(self):
        return [f"{kind}/{name}" for kind in ("share", "passes") for name in TEXTS]


def test_the_share_and_the_validation_loss_of_each_text_are_logged(path):
    """Compare the losses with sums over single windows."""
    data = Text(path, **SIZES | {"batch_size": 7})
    module = LanguageModel(GPT(data.vocab_size, 16, 2, 1, max_length=8), data.tokenizer)
    callback = Logged()
    settings = {"callbacks": [callback], "log_every_n_steps": 1, "max_steps": 5}
    make_trainer(**settings).fit(module, data)
    assert len(callback.rows) == 5 * 7
    (logged,) = make_trainer(limit_val_batches=1.0).validate(module, data, verbose=False)
    module.eval()
    totals, numbers = [], []
    for name, text in texts_of("val").items():
        ids, total = torch.tensor(data.tokenizer.encode(text)), 0.0
        for begin in range(0, len(ids) - 1, 8):
            window = ids[begin : begin + 9]
            with torch.no_grad():
                logits = module.network(window[None, :0], window[None, :-1])
            total += F.cross_entropy(logits[0], window[1:], reduction="sum").item()
        assert logged[f"val/loss/{name}"] == pytest.approx(total / (len(ids) - 1), rel=1e-5)
        totals.append(total)
        numbers.append(len(ids) - 1)
    assert logged["val/loss"] == pytest.approx(sum(totals) / sum(numbers), rel=1e-5)
    assert logged["val/loss_per_character"] == pytest.approx(sum(totals) / sum(numbers), rel=1e-5)


@pytest.mark.parametrize("weights", [{}, {"a.txt": 0.0}, {"a.txt": 1.0, "b.txt": -1.0}, {"a.txt": float("nan")}])
def test_unusable_weights_are_named(weights):
    with pytest.raises(UserError, match=r"path must give each text a weight above 0, but is .*; try \{books/: 0.7"):
        Text(weights)


def test_texts_of_a_mixture_are_named_by_their_paths_if_their_names_are_equal(tmp_path):
    paths = [text_file(tmp_path, TEXT, f"{folder}/train.txt") for folder in "ab"]
    assert [*Text(dict.fromkeys(paths, 1.0)).weights] == paths


def test_a_short_text_of_a_mixture_is_named(path, tmp_path):
    short = text_file(tmp_path, "a short text", "short.txt")
    with pytest.raises(UserError, match=r"the train split of short.txt must have at least 17 tokens with max_length 8"):
        set_up(Text(path | {short: 1.0}, **SIZES))
