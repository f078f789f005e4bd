"""Language modeling on any text: 'First Citizen:' -> 'Before we proceed any further, hear me speak.'."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path, PurePath
from typing import Any

from lightning_tfm.data import Download, TextDataModule, expand_path, list_files, read_documents, resolve_path
from lightning_tfm.errors import UserError
from lightning_tfm.tokenization import END_OF_DOCUMENT

FILES = {
    "tinyshakespeare/input.txt": Download(
        "https://raw.githubusercontent.com/karpathy/char-rnn/6f9487a6fe5b420b7ca9afb0d7c078e37c1d1b4e/data/"
        "tinyshakespeare/input.txt",
        "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
    )
}
"""Downloadable files: 1.1 MB of Shakespeare's plays."""


class Text(TextDataModule):
    """Data module for language modeling on the text of files, see `TextDataModule`.

    Args:
        path: a file; a folder, whose files except hidden ones are read in the order of their names; or
            tiny_shakespeare, which is downloaded. Files of JSON lines (.jsonl) or Parquet (.parquet) hold a document in
            each row; all other files are one document. Documents are joined by line feeds. A mapping of several
            such paths to weights is a mixture: the texts have shares of the training batches in proportion to them.
        encoding: encoding of the files, by Python's name.
        column: the field of JSON lines or Parquet that holds the text.
        end_of_document: whether EOS follows each document, in place of a line feed between two. A `LanguageModel`
            predicts it like any token, and its outputs end there.
        settings: further arguments of TextDataModule.

    Note:
        Files are known by path, size and time of modification, since hashing 5 GB at each start takes seconds.
    """

    def __init__(
        self,
        path: dict[str, float] | str = "tiny_shakespeare",
        encoding: str = "utf-8",
        column: str = "text",
        end_of_document: bool = False,
        **settings: Any,
    ) -> None:
        if isinstance(path, str):
            self.files = dict.fromkeys(self.weights, self._list(path))
        else:
            if not path or not all(0 < weight < math.inf for weight in path.values()):
                raise UserError(
                    f"path must give each text a weight above 0, but is {path}; try {{books/: 0.7, code.jsonl: 0.3}}"
                )
            names = [PurePath(each).name for each in path]
            names = names if len({*names}) == len(names) else [*path]
            self.weights = dict(zip(names, path.values(), strict=True))
            self.files = dict(zip(names, map(self._list, path), strict=True))
        self.encoding, self.column, self.end_of_document = encoding, column, end_of_document
        super().__init__(**settings)

    @staticmethod
    def _list(path: str) -> list[Path]:
        path = "tinyshakespeare/input.txt" if path == "tiny_shakespeare" else path
        folder = expand_path(path)
        if not folder.is_dir():
            return [resolve_path(path, FILES)]
        files = [file for file in list_files(folder) if file.is_file()]
        if not files:
            raise UserError(f"path must be a text or a folder of texts, but {path!r} holds no file")
        return files

    def read(self) -> Iterator[str]:
        return chain.from_iterable(read() for read in self.readers().values())

    def readers(self) -> Mapping[str, Callable[[], Iterator[str]]]:
        return {name: partial(self._read, files) for name, files in self.files.items()}

    def _read(self, files: Sequence[Path]) -> Iterator[str]:
        documents = chain.from_iterable(read_documents(file, self.encoding, self.column) for file in files)
        for number, document in enumerate(documents):
            if number and not self.end_of_document:
                yield "\n"
            yield from document
            if self.end_of_document:
                yield END_OF_DOCUMENT

    def version(self) -> str:
        stats = {
            name: [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
            for name, files in self.files.items()
        }
        ends = ["end_of_document"] if self.end_of_document else []
        return json.dumps([stats, self.encoding, self.column, *ends])
