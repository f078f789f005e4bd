"""Documents that end with EOS: the tokens are those of the documents one by one, and outputs end with a document."""

from __future__ import annotations

import json
import random

import pytest
import torch

from datamodules import Text
from lightning_tfm import load
from lightning_tfm.checkpoint import read, write
from lightning_tfm.data import TextDataModule, token_files
from lightning_tfm.errors import UserError
from lightning_tfm.inference.decoding import DecodingOptions, continue_text
from lightning_tfm.networks import GPT
from lightning_tfm.optimizers import AdamW, LRSchedule
from lightning_tfm.tasks import LanguageModel
from lightning_tfm.tokenization import END_OF_DOCUMENT, EOS, NUM_SPECIAL, PAD, train_tokenizer
from support.corpora import text_file
from support.training import make_trainer

SPLITS = {"train": (0, 0.6), "test": (0.6, 0.8), "val": (0.8, 1)}
FRACTIONS = {"val_fraction": 0.2, "test_fraction": 0.2}


def drawn_documents(seed=0):
    """Return documents of all lengths around that of a block, some without spaces, empty, or with the mark."""
    draw = random.Random(seed)
    words = ["a", "Ünder_", "東京", "don't", "\n", "\n\n", " ", "."]
    documents = [" ".join(draw.choices(words, k=draw.randint(1, 200))) for _ in range(30)]
    documents += ["x" * length for length in (1, 199, 200)]
    documents += ["", "", " ", "\n", f"before {END_OF_DOCUMENT} after", END_OF_DOCUMENT, "\ud800"]
    return draw.sample(documents, len(documents))


class Documents(TextDataModule):
    """Data module that generates its documents."""

    def __init__(self, documents, **settings):
        self.documents = documents
        super().__init__(**settings)

    def read(self):
        for document in self.documents:
            yield document
            yield END_OF_DOCUMENT


def write_folder(documents, folder):
    for number, document in enumerate(documents):
        (folder / f"{number:03}.txt").write_bytes(document.encode())


def write_json(documents, folder):
    (folder / "a.jsonl").write_text("\n".join(json.dumps({"text": document}) for document in documents))


def write_parquet(documents, folder):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"text": documents}), folder / "a.parquet")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize(("size", "number"), [(200, 2), (201, 64), (1 << 13, 64)])
@pytest.mark.parametrize("tokenizer", ["character", "subword"])
@pytest.mark.parametrize("form", ["folder", "JSON lines", "Parquet", "generator"])
def test_tokens_are_those_of_the_documents_one_by_one(form, tokenizer, size, number, tmp_path, monkeypatch):
    monkeypatch.setattr(token_files, "BLOCK", size)
    monkeypatch.setattr(token_files, "BLOCKS", number)
    documents = drawn_documents()
    if form != "JSON lines":  # which alone can escape what is no character
        documents = [document for document in documents if not {END_OF_DOCUMENT, "\ud800"} & {*document}]
    if form == "folder":
        documents = [document for document in documents if document.strip()]
    settings = {"tokenizer": tokenizer, "vocab_size": 280, "max_length": 2, "batch_size": 2, **FRACTIONS}
    if form == "generator":
        data = Documents(documents, **settings)
    else:
        (folder := tmp_path / "texts").mkdir()
        {"folder": write_folder, "JSON lines": write_json, "Parquet": write_parquet}[form](documents, folder)
        data = Text(str(folder), end_of_document=True, **settings)

    characters = [each for document in documents for each in (*document.encode(errors="replace").decode(), None)]
    for split, (begin, end) in SPLITS.items():
        part = characters[round(begin * len(characters)) : round(end * len(characters))]
        ends = [place for place, character in enumerate(part) if character is None]
        texts = ["".join(part[a:b]) for a, b in zip([0, *(end + 1 for end in ends)], [*ends, None], strict=True)]
        if split == "train" and tokenizer == "character":
            assert data.tokenizer.to_dict() == train_tokenizer(texts, tokenizer, 280).to_dict()
        ids = [id for text in texts for id in (*data.tokenizer.encode(text), EOS)][:-1]  # the last one goes on
        assert data.tokens.ids(split, "the text").tolist() == ids
        assert data.tokens.splits[split]["the text"].num_ends == len(ends) == ids.count(EOS)
        assert data.tokens.splits[split]["the text"].num_characters == len(part)
    assert data.marks_ends


def test_an_interrupted_preparation_of_documents_is_resumed(tmp_path, monkeypatch):
    for name, value in (("BLOCK", 200), ("BLOCKS", 3), ("SAVED", 1000)):
        monkeypatch.setattr(token_files, name, value)
    documents = [document.encode(errors="replace").decode() for document in drawn_documents()]
    settings = {"tokenizer": "subword", "vocab_size": 280, "max_length": 2, "batch_size": 2}
    data = Documents(documents, **settings)
    encode = data.tokenizer.encode_parts
    for number in range(3, 16, 6):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / str(number)))
        calls = iter(range(number))

        def interrupted(self, parts, continued, calls=calls):
            if next(calls, None) is None:
                raise KeyboardInterrupt
            return encode(parts, continued)

        with monkeypatch.context() as patch:
            patch.setattr(type(data.tokenizer), "encode_parts", interrupted)
            with pytest.raises(KeyboardInterrupt):
                Documents(documents, **settings)
        resumed = Documents(documents, **settings)
        assert resumed.tokens.splits == data.tokens.splits
        assert resumed.tokens.path.read_bytes() == data.tokens.path.read_bytes()


def test_lines_of_documents_are_compared_without_their_ends():
    documents = [f"document {number} of one line, without a line feed" for number in range(20)]
    data = Documents([*documents, documents[3], documents[4]], max_length=2, batch_size=2)
    assert data.overlaps(["val"]) == {"val": [2, 2]}


def test_documents_are_joined_by_line_feeds_by_default(tmp_path):
    write_json(["ab" * 20, "cd" * 20], tmp_path)
    path = str(tmp_path / "a.jsonl")
    plain, ended = Text(path, max_length=2), Text(path, max_length=2, end_of_document=True)
    assert Text(path, max_length=2, end_of_document=False).tokens == plain.tokens
    assert plain.tokens.path != ended.tokens.path
    assert (plain.marks_ends, ended.marks_ends) == (False, True)
    ids = [torch.cat([data.tokens.ids(split, "the text") for split in ("train", "val")]) for data in (plain, ended)]
    assert plain.tokenizer.decode(ids[0].tolist()) == "ab" * 20 + "\n" + "cd" * 20
    assert (ids[1] == EOS).nonzero().flatten().tolist() == [40, 81]


def test_outputs_end_with_a_document(tmp_path):
    """The model of a checkpoint stops at EOS if it was trained with it, and otherwise generates max_tokens."""
    data = Documents(["abcdef"] * 60, max_length=16, batch_size=8)
    network = GPT.from_data(data, d_model=32, num_heads=2, num_layers=1)
    rate = {"optimizer": lambda parameters: AdamW(parameters, lr=1e-2), "lr_schedule": LRSchedule(warmup_steps=1)}
    module = LanguageModel.from_data(data, network, **rate)
    trainer = make_trainer(max_steps=80)
    trainer.fit(module, data)
    trainer.save_checkpoint(path := tmp_path / "a.ckpt")

    def output(predictor, **options):
        (prediction,) = predictor.predict(["abc"], DecodingOptions(temperature=0, **options))
        return prediction

    predictor = load(path)
    assert output(predictor).text == "abcdef"
    assert output(predictor, max_tokens=2).text == "abcde"
    steps = output(predictor, steps=True).outputs[0].steps
    assert [step.symbol for step in steps] == [*"def", "EOS"]
    assert "EOS" in {alternative.symbol for alternative in steps[0].alternatives}
    for change in ({"stop_at_eos": False}, {}):  # checkpoints of earlier versions lack it
        content = read(path)
        del content["hyper_parameters"]["stop_at_eos"]
        content["hyper_parameters"] |= change
        write(content, tmp_path / "b.ckpt")
        text = output(load(tmp_path / "b.ckpt"), max_tokens=20).text
        assert (text[:6], len(text)) == ("abcdef", 23)


def test_rows_of_a_continuation_end_on_their_own():
    """The network predicts the number of a token minus one, so that a row ends after as many tokens."""

    def step(token, state):
        following = torch.where(token > NUM_SPECIAL, token - 1, EOS)
        return torch.nn.functional.one_hot(following, 9).float(), state

    text = torch.tensor([[4], [7], [3]])
    more = continue_text(lambda context: context, step, text, 20, 2, stop_at_eos=True)
    assert more.tolist() == [[3, EOS, PAD, PAD, PAD], [6, 5, 4, 3, EOS], [EOS, PAD, PAD, PAD, PAD]]
    assert continue_text(lambda context: context, step, text, 3, 9, stop_at_eos=True).equal(more[:, :3])
    assert (continue_text(lambda context: context, step, text, 20, 2) >= NUM_SPECIAL).all()


def test_a_network_without_eos_is_refused(tmp_path):
    data = Text(text_file(tmp_path), end_of_document=True, max_length=8)
    assert not data.marks_ends, "the only document ends in the validation split"
    data = Documents(["abc"] * 20, max_length=2)
    network = GPT.from_data(data, d_model=8, num_heads=2, num_layers=1, text_only=True)
    with pytest.raises(UserError, match="text_only must be false for documents that end with EOS"):
        LanguageModel.from_data(data, network)
