"""Token files: the tokens of texts, which are written to the cache once and then mapped into memory."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from importlib.metadata import version as package_version
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple
from unicodedata import unidata_version

import torch
from torch import Tensor

from lightning_tfm.data.download import cache_folder
from lightning_tfm.errors import UserError, rank_zero_print
from lightning_tfm.system.files import make_folder, naming_file, replace_file, write_text
from lightning_tfm.system.progress import progress_bar
from lightning_tfm.tokenization import END_OF_DOCUMENT, Tokenizer, tokenizer_from_dict

FORMAT = 1
"""Version of the token files; other versions are written again."""

TOKENS, INDEX = "tokens.bin", "index.json"
"""Names of the file of the tokens, and of the file that describes it."""

BLOCK, BLOCKS = 1 << 13, 64
"""Maximum number of characters that are encoded as one text, and number of such blocks that are encoded at a time."""

SAVED = 1 << 24
"""Number of characters after which the progress is saved, from which an interrupted preparation is resumed."""

SHORT_LINE, COMPARED = 30, 2_000_000
"""Minimum length of lines that are compared with the training data, and how much of a split is, in characters."""

DIVIDED = re.compile(r".*(?:\S(?= \S)|[^\W_](?=\n\S))", re.DOTALL)
"""Beginning of a text up to the last place where it can be divided into blocks without changing its tokens.

The rest starts with a single space, or with a single line feed after a letter or digit, where the pre-tokenizers of
byte-level tokenizers divide a text.
"""


Reader = Callable[[], Iterator[str]]
"""Function that returns a text in parts of any length, the same in every call.

END_OF_DOCUMENT, alone or within a part, is the end of a document.
"""


class TokenSplit(NamedTuple):
    """Part of a token file: a split of a text.

    Attributes:
        begin: the index of the first token in the file.
        num_tokens: the number of tokens.
        num_characters: the number of characters of the text, to which each end of a document adds one.
        fingerprint: a hash of the text, whatever the tokenizer.
        num_ends: the number of ends of documents, each of which is the token EOS.
    """

    begin: int
    num_tokens: int
    num_characters: int
    fingerprint: str
    num_ends: int = 0  # in files of versions without documents


class TokenFile(NamedTuple):
    """File with the tokens of all splits of all texts, one after the other, in the smallest integer type.

    Attributes:
        path: the path of the file.
        dtype: the type of the ids.
        splits: the place and the size of each split of each text, by the names of the split and of the text.
        overlaps: for each split except "train", the number of lines that were compared with the training data, and how
            many of them occur there.
    """

    path: Path
    dtype: torch.dtype
    splits: Mapping[str, Mapping[str, TokenSplit]]
    overlaps: Mapping[str, tuple[int, int]]

    def ids(self, split: str, name: str) -> Tensor:
        """Map the tokens of a split of a text into memory (N), which the processes of a machine share."""
        begin, number, *_ = self.splits[split][name]
        size = self.path.stat().st_size // self.dtype.itemsize
        return torch.from_file(str(self.path), shared=False, size=size, dtype=self.dtype)[begin : begin + number]


def prepare_tokens(
    key: Mapping[str, Any],
    readers: Mapping[str, Reader],
    train_tokenizer: Callable[[Sequence[Iterable[list[str]]]], Tokenizer],
    val_fraction: float,
    test_fraction: float,
) -> tuple[Tokenizer, TokenFile]:
    """Return the tokenizer and the tokens of texts, from the cache or else by encoding the texts.

    One process prepares the tokens, while the others wait. A preparation that was interrupted is resumed: the texts are
    read again, but not encoded again.

    Args:
        key: what the tokens depend on, as JSON values: the texts, the tokenizer and the fractions.
        readers: for each text, by name, a function that returns it in parts of any length.
        train_tokenizer: returns a tokenizer trained on the training split of each text, given as lists of parts.
        val_fraction: the fraction of each text for validation, at its end.
        test_fraction: the fraction of each text for testing, before the former.

    Raises:
        UserError: if the cache cannot be written.

    Note:
        The tokens are found by `key`, and are trusted if their file has the size and the time of modification that were
        recorded. Otherwise, they are prepared again.
    """
    from filelock import FileLock

    versions = {"format": FORMAT, "unicode": unidata_version, "tokenizers": package_version("tokenizers")}
    content = json.dumps(
        {**key, **versions, "names": [*readers], "fractions": [val_fraction, test_fraction]}, sort_keys=True
    )
    folder = cache_folder() / "tokens" / hashlib.sha256(content.encode()).hexdigest()[:16]
    try:
        # This is done before anything is written, since the cache may be read-only.
        if (prepared := _load(folder)) is None:
            make_folder(folder)
            with FileLock(folder / "lock"):
                if (prepared := _load(folder)) is None:
                    if (folder / INDEX).exists():
                        rank_zero_print(f"the tokens in {str(folder)!r} are damaged and are prepared again")
                    _prepare(folder, readers, train_tokenizer, val_fraction, test_fraction)
                    prepared = _load(folder)
    except OSError as error:
        if not str(error.filename).startswith(str(folder)):
            raise
        raise UserError(
            f"the tokens of the text cannot be kept in {str(folder)!r}: {error.strerror}; free disk space, or set "
            "XDG_CACHE_HOME to another folder"
        ) from None
    assert prepared is not None
    return prepared


def _load(folder: Path) -> tuple[Tokenizer, TokenFile] | None:
    """Return the tokens in a folder; None if there are none, or if they are damaged."""
    path = folder / TOKENS
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        if index["stat"] != _stat(path):
            return None
        tokenizer = tokenizer_from_dict(index["tokenizer"])
        splits = {
            split: {name: TokenSplit(**values) for name, values in texts.items()}
            for split, texts in index["splits"].items()
        }
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    return tokenizer, TokenFile(path, _dtype(tokenizer), splits, index["overlaps"])


def _stat(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns]


def _dtype(tokenizer: Tokenizer) -> torch.dtype:
    """Return the smallest type of the ids of a tokenizer."""
    sizes = {torch.uint8: 1 << 8, torch.uint16: 1 << 16, torch.int32: 1 << 31}
    return next(dtype for dtype, size in sizes.items() if tokenizer.vocab_size <= size)


def _prepare(
    folder: Path,
    readers: Mapping[str, Reader],
    train_tokenizer: Callable[[Sequence[Iterable[list[str]]]], Tokenizer],
    val_fraction: float,
    test_fraction: float,
) -> None:
    """Write tokens.bin and, at the end, index.json."""
    totals = {name: sum(map(len, _watch(read(), "counting characters"))) for name, read in readers.items()}
    # The lines of the training data are compared with those of the other splits, which are therefore read first.
    splits = ("val", "test", "train") if test_fraction else ("val", "train")

    def blocks(split: str, name: str, description: str) -> Iterator[list[str]]:
        total = totals[name]
        val_start = round(total * (1 - val_fraction))
        test_start = round(total * (1 - val_fraction - test_fraction))
        places = {"val": (val_start, total), "test": (test_start, val_start), "train": (0, test_start)}
        return _blocks(_between(_watch(readers[name](), description, total), *places[split]))

    tokenizer = train_tokenizer([blocks("train", name, "training the tokenizer") for name in readers])
    lines: dict[str, list[str]] = {split: [] for split in splits if split != "train"}
    repeated: set[str] = set()
    with closing(_Writer(folder, tokenizer)) as writer:
        for split in splits:
            compared = {*chain.from_iterable(lines.values())}
            for name in readers:
                written = writer.write(split, name, blocks(split, name, f"encoding {split}"))
                if split == "train":
                    repeated.update(line for line in _lines(tokenizer, written) if line in compared)
                else:
                    lines[split] += _keep_first(_lines(tokenizer, written))
        writer.finish({split: (len(some), sum(line in repeated for line in some)) for split, some in lines.items()})


class _Writer:
    """Writer of a token file, which continues after the blocks that an interrupted one has saved."""

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        self.folder, self.tokenizer, self.dtype = folder, tokenizer, _dtype(tokenizer)
        self.path, self.progress = folder / "tokens.bin.part", folder / "progress.json"
        self.num_blocks = self.num_unsaved = 0  # blocks read, and characters encoded since the progress was saved
        self.num_tokens: list[int] = []  # of each split of each text, in the order in which they are written
        self.splits: dict[str, dict[str, TokenSplit]] = {}  # those that are complete
        self.num_skipped = 0  # blocks that are already encoded
        with suppress(FileNotFoundError):
            saved = json.loads(self.progress.read_text(encoding="utf-8"))
            if saved["tokenizer"] == tokenizer.fingerprint and self._size(saved["tokens"]) <= self.path.stat().st_size:
                self.num_skipped, self.num_tokens = saved["blocks"], saved["tokens"]
        with naming_file(self.path):
            self.file = self.path.open("r+b" if self.num_skipped else "wb")
            self.file.truncate(self._size(self.num_tokens))
            self.file.seek(0, os.SEEK_END)

    def _size(self, num_tokens: Sequence[int]) -> int:
        return sum(num_tokens) * self.dtype.itemsize

    def write(self, split: str, name: str, batches: Iterable[list[str]]) -> Iterator[str]:
        """Encode and write the blocks of a split of a text; yield the split in parts."""
        index = sum(map(len, self.splits.values()))
        if index == len(self.num_tokens):  # otherwise, a part of it is already encoded
            self.num_tokens.append(0)
        num_characters, num_ends, total = 0, 0, hashlib.sha256()
        last = END_OF_DOCUMENT  # the block before
        for blocks in batches:
            text = "".join(blocks)
            total.update(text.encode(errors="surrogatepass"))
            skipped = max(0, self.num_skipped - self.num_blocks)
            self.num_blocks += len(blocks)
            if rest := blocks[skipped:]:
                is_start = [last, *blocks][skipped].endswith(END_OF_DOCUMENT)
                ids = self.tokenizer.encode_parts(rest, continued=not is_start)
                with naming_file(self.path):
                    self.file.write(ids.to(self.dtype).numpy().data)
                self.num_tokens[index] += len(ids)
                self.num_unsaved += len(text)
            num_characters += len(text)
            num_ends += text.count(END_OF_DOCUMENT)
            last = blocks[-1]
            if self.num_unsaved >= SAVED:
                self._save()
            yield text
        self.splits.setdefault(split, {})[name] = TokenSplit(
            sum(self.num_tokens[:index]), self.num_tokens[index], num_characters, total.hexdigest()[:16], num_ends
        )

    def _synchronize(self) -> None:
        with naming_file(self.path):
            self.file.flush()
            os.fsync(self.file.fileno())

    def _save(self) -> None:
        """Save the progress."""
        self._synchronize()
        content = {"tokenizer": self.tokenizer.fingerprint, "blocks": self.num_blocks, "tokens": self.num_tokens}
        write_text(self.progress, json.dumps(content))
        self.num_unsaved = 0

    def finish(self, overlaps: Mapping[str, tuple[int, int]]) -> None:
        """Write index.json, which makes the file complete."""
        self._synchronize()
        self.close()
        path = self.folder / TOKENS
        replace_file(self.path, path)
        content = {
            "stat": _stat(path),
            "tokenizer": self.tokenizer.to_dict(),
            "splits": {
                split: {name: values._asdict() for name, values in texts.items()}
                for split, texts in self.splits.items()
            },
            "overlaps": overlaps,
        }
        write_text(self.folder / INDEX, json.dumps(content))
        self.progress.unlink(missing_ok=True)

    def close(self) -> None:
        with naming_file(self.path):
            self.file.close()


def _watch(parts: Iterable[str], description: str, total: int | None = None) -> Iterator[str]:
    """Yield parts of a text, and show the number of characters in a progress bar."""
    with progress_bar(description, total=total, unit_scale=True, leave=False) as bar:
        for part in parts:
            yield part
            bar.update(len(part))


def _between(parts: Iterable[str], begin: int, end: int) -> Iterator[str]:
    """Yield the parts of a text between two characters."""
    position = 0
    for part in parts:
        yield part[max(0, begin - position) : max(0, end - position)]
        position += len(part)
        if position >= end:
            return


def _blocks(parts: Iterable[str]) -> Iterator[list[str]]:
    """Divide a text into blocks, which do not depend on its parts; yield BLOCKS at a time.

    A document ends with a block.
    """
    blocks: list[str] = []
    text, begin = "", 0
    for part in chain(_joined(parts), [None]):
        text, begin = text[begin:] + (part or ""), 0
        while len(text) - begin > (BLOCK if part is not None else 0):
            end = text.find(END_OF_DOCUMENT, begin, begin + BLOCK) + 1
            if not end:
                divided = len(text) - begin > BLOCK and DIVIDED.match(text, begin, begin + BLOCK)
                end = divided.end() if divided else begin + BLOCK
            blocks.append(text[begin:end])
            begin = end
            if len(blocks) == BLOCKS:
                yield blocks
                blocks = []
    if blocks:
        yield blocks


def _joined(parts: Iterable[str]) -> Iterator[str]:
    """Join short parts of a text up to the size of the blocks that are encoded at a time."""
    short: list[str] = []
    size = 0
    for part in parts:
        short.append(part)
        size += len(part)
        if size >= BLOCK * BLOCKS:
            yield "".join(short)
            short, size = [], 0
    yield "".join(short)


def first_characters(texts: Iterable[str], number: int) -> Iterator[str]:
    """Yield the first texts, up to a total number of characters; the last one is cut off."""
    for text in texts:
        yield text[:number]
        number -= len(text)
        if number <= 0:
            return


def _lines(tokenizer: Tokenizer, texts: Iterable[str]) -> Iterator[str]:
    """Yield the normalized lines of a text except short ones, such as names of speakers, which often recur.

    A line that is longer than the blocks that are encoded at a time is divided.
    """
    line = ""
    for text in texts:
        *lines, line = (line + text.replace(END_OF_DOCUMENT, "\n")).split("\n")
        if not lines:
            lines, line = [line], ""
        yield from (tokenizer.normalize(each) for each in lines if len(each) >= SHORT_LINE)
    if len(line) >= SHORT_LINE:
        yield tokenizer.normalize(line)


def _keep_first(lines: Iterable[str]) -> list[str]:
    """Return the first COMPARED characters of lines, and read the others."""
    first: list[str] = []
    size = 0
    for line in lines:
        if size < COMPARED:
            first.append(line)
        size += len(line)
    return first
