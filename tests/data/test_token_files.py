"""Token files: the tokens are those of the text as a whole, and are prepared once, completely."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import pickle
import random
import subprocess
import sys
import unicodedata

import pytest
import torch

from datamodules import Text
from lightning_tfm.data import TextDataModule, token_files
from lightning_tfm.data import text as text_module
from lightning_tfm.errors import UserError
from lightning_tfm.tokenization import PAD, train_tokenizer
from support.corpora import TEXT, text_file
from support.data import set_up, split_texts

PIECES = [
    "word",
    "Ünder_",
    "don't",
    "42",
    "。",
    "東京",
    "👍🏽",
    ".",
    "?!",
    "\t",
    " ",
    "  ",
    "\n",
    "\n\n",
    " \n",
    "\r",
    "\x85",
]


def drawn_text(number=3000, seed=0):
    """Return a text with all kinds of white space."""
    text = "".join(random.Random(seed).choices(PIECES, weights=[2] * 9 + [1] + [9] + [1] * 6, k=number))
    return unicodedata.normalize("NFC", text)


class Parts(TextDataModule):
    """Data module that reads a text in parts of random lengths."""

    def __init__(self, text=TEXT, longest=50, **settings):
        self.text, self.longest = text, longest
        super().__init__(**{"max_length": 8, "batch_size": 4} | settings)

    def read(self):
        draw, position = random.Random(self.longest), 0
        while position < len(self.text):
            end = position + draw.randint(0, self.longest)
            yield self.text[position:end]
            position = end


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Use an empty cache and short blocks."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(token_files, "BLOCK", 200)
    monkeypatch.setattr(token_files, "BLOCKS", 2)
    return tmp_path / "cache/lightning_tfm/tokens"


def bytes_of(data):
    return data.tokens.path.read_bytes()


@pytest.mark.parametrize("longest", [1, 50, 10_000])
@pytest.mark.parametrize("test_fraction", [0, 0.2])
@pytest.mark.parametrize("tokenizer", ["character", "subword"])
def test_windows_are_those_of_the_whole_text_in_memory(tokenizer, test_fraction, longest):
    text = drawn_text()
    data = set_up(
        Parts(text, longest, tokenizer=tokenizer, vocab_size=300, val_fraction=0.3, test_fraction=test_fraction)
    )
    val, test = round(len(text) * 0.7), round(len(text) * (1 - 0.3 - test_fraction))
    texts = {"train": text[:test], "test": text[test:val], "val": text[val:]}
    whole = train_tokenizer([texts["train"]], tokenizer, 300)
    assert data.tokenizer.to_dict() == whole.to_dict()
    for split, dataset in data.datasets.items():
        ids = torch.tensor(whole.encode(texts[split]))
        assert dataset.ids.equal(ids.to(dataset.ids.dtype))
        assert dataset.fingerprint == hashlib.sha256(texts[split].encode()).hexdigest()[:16]
        assert dataset.characters_per_token == len(texts[split]) / len(ids)
        begins = range(len(ids) - 8) if split == "train" else range(0, len(ids) - 1, 8)
        windows = [ids[begin : begin + 9].tolist() for begin in begins]
        batch = dataset[torch.arange(len(dataset))]
        rows = torch.cat([batch.target_in, batch.target_out[:, -1:]], dim=1).tolist()
        assert rows == [window + [PAD] * (9 - len(window)) for window in windows]
        assert dataset.lengths.tolist() == [len(window) - 1 for window in windows]
        assert dataset.num_tokens == dataset.lengths.sum()


def test_a_text_without_spaces_is_encoded_completely():
    text = "".join(random.Random(0).choices("東京都", k=2000))
    assert "".join(split_texts(Parts(text)).values()) == text[1800:] + text[:1800]
    data = Parts(text, tokenizer="subword", vocab_size=300)
    assert data.tokenizer.decode(data.tokens.ids("train", "the text").tolist()) == text[:1800]


@pytest.mark.parametrize(("number", "size"), [(200, 1), (253, 2), (70_000, 4)])
def test_ids_have_the_smallest_type(number, size):
    text = "".join(map(chr, [*range(0x4E00, 0x9FFF), *range(0x10000, 0x20000)][:number]))
    data = Parts(text * 2, 10_000, val_fraction=0.5, vocab_size=100_000)
    assert data.vocab_size == number + 4
    assert len(bytes_of(data)) == size * len(text) * 2
    assert split_texts(data) == {"train": text, "val": text}


def test_only_subwords_are_trained_on_a_sample(monkeypatch):
    monkeypatch.setattr(text_module, "SAMPLE", 500)
    assert Parts(tokenizer="subword", vocab_size=270).tokenizer.to_dict() == (
        train_tokenizer([TEXT[:500]], "subword", 270).to_dict()
    )
    late = "common " * 200 + "x" * 100 + " common" * 50
    assert "x" in Parts(late).tokenizer.symbols


def test_lines_of_the_other_splits_in_the_training_data_are_counted(capsys):
    lines = [f"line {number} of a text with short and long lines" for number in range(100)]
    lines[95] = lines[3]
    lines[98] = "short line"
    lines[2] = "short line"
    data = set_up(Parts("\n".join(lines)))
    assert data.overlaps(["val"]) == {"val": [9, 1]}
    assert "1 of 9 lines of val also occur in train" in capsys.readouterr().err


@pytest.mark.parametrize("tokenizer", ["character", "subword"])
@pytest.mark.parametrize("number", [1, 3, 8, 11])
def test_an_interrupted_preparation_is_resumed_with_the_same_bytes(tokenizer, number, cache, monkeypatch):
    settings = {"tokenizer": tokenizer, "vocab_size": 300, "test_fraction": 0.1}
    monkeypatch.setattr(token_files, "SAVED", 700)
    undisturbed = Parts(drawn_text(), **settings)
    content, index = bytes_of(undisturbed), json.loads((undisturbed.tokens.path.parent / "index.json").read_text())
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parent / "other"))
    encode, encoded = undisturbed.tokenizer.encode_parts, []

    def interrupted(self, parts, continued):
        if len(encoded) == number:
            raise KeyboardInterrupt
        encoded.append(sum(map(len, parts)))
        return encode(parts, continued)

    monkeypatch.setattr(type(undisturbed.tokenizer), "encode_parts", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Parts(drawn_text(), **settings)
    number = -1
    resumed = Parts(drawn_text(), **settings)
    assert bytes_of(resumed) == content
    other = json.loads((resumed.tokens.path.parent / "index.json").read_text())
    assert other["splits"] == index["splits"]
    assert other["overlaps"] == index["overlaps"]
    assert sum(encoded) < len(drawn_text()) + 700 + 400, "what was saved is not encoded again"
    assert sorted(path.name for path in resumed.tokens.path.parent.iterdir()) == ["index.json", "lock", "tokens.bin"]


SCRIPT = """
import sys
from datamodules import Text
from lightning_tfm.data import token_files

encode = token_files._prepare

def prepare(*arguments):
    print("prepared")
    encode(*arguments)

token_files._prepare = prepare
print(sum(Text(sys.argv[1], tokenizer="subword", vocab_size=300).tokens.ids("train", "the text").tolist()))
"""


def test_one_of_two_processes_prepares_the_tokens(tmp_path):
    path = text_file(tmp_path, drawn_text(20_000))
    command = [sys.executable, "-c", SCRIPT, path]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [child.communicate()[0].split() for child in children]
    assert [child.returncode for child in children] == [0, 0]
    assert sorted(map(len, outputs)) == [1, 2]
    assert outputs[0][-1] == outputs[1][-1]


def flip(folder):
    content = bytearray((folder / "tokens.bin").read_bytes())
    content[100] ^= 1
    (folder / "tokens.bin").write_bytes(content)


DAMAGES = {
    "a changed byte": flip,
    "missing bytes": lambda folder: os.truncate(folder / "tokens.bin", 10),
    "no index": lambda folder: (folder / "index.json").unlink(),
    "no tokens": lambda folder: (folder / "tokens.bin").unlink(),
    "an empty index": lambda folder: (folder / "index.json").write_text(""),
    "another index": lambda folder: (folder / "index.json").write_text("[]"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_tokens_are_prepared_again(damage, capsys):
    data = Parts()
    content, folder = bytes_of(data), data.tokens.path.parent
    damage(folder)
    assert bytes_of(Parts()) == content
    assert (f"the tokens in {str(folder)!r} are damaged" in capsys.readouterr().err) == (damage != DAMAGES["no index"])


def test_tokens_are_prepared_once_for_equal_texts_and_settings(tmp_path, monkeypatch):
    path = text_file(tmp_path)
    first = Text(path)
    with monkeypatch.context() as patch:
        patch.setattr(token_files, "_prepare", lambda *arguments: pytest.fail("the tokens were prepared again"))
        assert Text(path, max_length=9, batch_size=3).tokens == first.tokens
    os.utime(path, ns=(0, 0))
    assert split_texts(Text(path)) == split_texts(first)
    text_file(tmp_path, TEXT.replace("u", "x"))
    assert split_texts(Text(path))["train"] == split_texts(first)["train"].replace("u", "x")
    for settings in ({"val_fraction": 0.2}, {"vocab_size": 10}, {"tokenizer": "subword"}):
        assert Text(path, **settings).tokens.path != first.tokens.path


def write_forms(folder):
    """Write the same documents as files of a folder, compressed files, JSON lines and compressed JSON lines."""
    documents = [drawn_text(300, seed).replace("\r", "") for seed in range(5)]
    rows = [json.dumps({"id": number, "content": document}) for number, document in enumerate(documents)]
    forms = {name: folder / name for name in ("plain", "gz", "jsonl", "mixed")}
    for path in forms.values():
        path.mkdir()
    for number, document in enumerate(documents):
        (forms["plain"] / f"{number}.txt").write_bytes(document.encode())
        (forms["gz"] / f"{number}.txt.gz").write_bytes(gzip.compress(document.encode()))
    (forms["jsonl"] / "all.jsonl").write_text("\n".join(rows) + "\n\n")
    (forms["mixed"] / "0.jsonl.gz").write_bytes(gzip.compress("\n".join(rows[:3]).encode()))
    (forms["mixed"] / "1.ndjson").write_text(rows[3])
    (forms["mixed"] / "2").write_bytes(documents[4].encode())
    return "\n".join(documents), forms


def test_documents_of_all_kinds_of_files_are_joined_to_the_same_text(tmp_path):
    text, forms = write_forms(tmp_path)
    for path in [*forms.values(), forms["jsonl"] / "all.jsonl"]:
        texts = split_texts(Text(str(path), column="content", test_fraction=0.1))
        assert texts["train"] + texts["test"] + texts["val"] == text


def test_parquet_and_zstandard_files_are_read(tmp_path):
    text, forms = write_forms(tmp_path)
    pyarrow, zstd = pytest.importorskip("pyarrow"), pytest.importorskip("backports.zstd")
    from pyarrow import json as json_reader
    from pyarrow import parquet

    parquet.write_table(json_reader.read_json(forms["jsonl"] / "all.jsonl"), tmp_path / "a.parquet")
    (tmp_path / "a.txt.zst").write_bytes(zstd.compress(text[:500].encode()) + zstd.compress(text[500:].encode()))
    assert pyarrow.__version__
    for name in ("a.parquet", "a.txt.zst"):
        texts = split_texts(Text(str(tmp_path / name), column="content"))
        assert texts["train"] + texts["val"] == text
    (tmp_path / "b.zst").write_bytes(zstd.compress(text.encode())[:-9])
    for name, message in (("b.zst", "b.zst' cannot be read: .*; copy it again"), ("a.parquet", "has id, content")):
        with pytest.raises(UserError, match=message):
            Text(str(tmp_path / name), column="text")


@pytest.mark.parametrize(("name", "package"), [("a.parquet", "pyarrow"), ("a.txt.zst", "backports.zstd")])
def test_a_missing_package_is_named(name, package, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=f"a.* needs the package {package}; pip install {package}"):
        Text(text_file(tmp_path, name=name))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "a"}\n{"body": "b"}', "column must be .* but is 'text', and row 2 has body"),
        ('{"text": "a"}\n["b"]', "row 2 has no field"),
        ('{"text": 1}', "row 1 has text"),
        ('{"text": "a"}\n{"text": ', "line 2 of the file '.*a.jsonl' must be JSON, but is not"),
    ],
)
def test_unusable_rows_are_named(content, message, tmp_path):
    with pytest.raises(UserError, match=message):
        Text(text_file(tmp_path, content, "a.jsonl"))


def test_a_cache_that_cannot_be_written_is_named(cache):
    cache.parent.mkdir(parents=True)
    cache.write_text("a file in place of a folder")
    with pytest.raises(
        UserError, match=r"tokens of the text cannot be kept in .*; free disk space, or set XDG_CACHE_HOME"
    ):
        Parts()


def test_a_dataset_is_sent_to_a_worker_without_its_tokens():
    text = "a word and " * 20_000
    dataset = set_up(Parts(text)).datasets["train"]
    sent = pickle.dumps(dataset)
    assert len(sent) < 2_000
    rows = torch.tensor([0, 100])
    assert all(map(torch.equal, pickle.loads(sent)[rows], dataset[rows]))
    assert dataset.lengths.untyped_storage().nbytes() == 8, "lengths of windows at any position are not stored"
