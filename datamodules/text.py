"""Language modeling on any text: 'First Citizen:' -> 'Before we proceed any further, hear me speak.'."""

from __future__ import annotations

from typing import Any, Literal

from lightning_tfm.data import Download, TextDataModule, expand_path, list_files, read_text, resolve_path
from lightning_tfm.errors import UserError
from lightning_tfm.tokenization import Tokenizer, read_tokenizer, train_tokenizer

FILES = {
    "tinyshakespeare/input.txt": Download(
        "https://raw.githubusercontent.com/karpathy/char-rnn/6f9487a6fe5b420b7ca9afb0d7c078e37c1d1b4e/data/"
        "tinyshakespeare/input.txt",
        "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
    )
}
"""Downloadable files: 1.1 MB of Shakespeare's plays."""


class Text(TextDataModule):
    """Data module for language modeling on a text, split into training, test and validation data, in this order.

    The validation split is the last `val_fraction` of the text for any `test_fraction`. The test split precedes it, so
    settings chosen on the end of the text can be tested on data not used to choose them.

    Args:
        path: a file; a folder, whose files except hidden ones are read in the order of their names; or
            tiny_shakespeare, which is downloaded.
        encoding: encoding of the files, by Python's name.
        tokenizer: characters or byte-level subwords, trained on the training split.
        vocab_size: maximum size of the vocabulary, which keeps the most frequent tokens.
        tokenizer_file: a Hugging Face tokenizer.json, used instead of a trained tokenizer.
        val_fraction: fraction of the whole text for validation.
        test_fraction: fraction of the whole text for testing; with 0, the model is tested on the validation split.
        settings: further arguments of TextDataModule.
    """

    def __init__(
        self,
        path: str = "tiny_shakespeare",
        encoding: str = "utf-8",
        tokenizer: Literal["character", "subword"] = "character",
        vocab_size: int = 6_000,
        tokenizer_file: str | None = None,
        val_fraction: float = 0.1,
        test_fraction: float = 0.0,
        **settings: Any,
    ) -> None:
        if not (val_fraction > 0 and test_fraction >= 0 and val_fraction + test_fraction < 1):
            raise UserError(
                "val_fraction must be above 0, test_fraction at least 0, and both together below 1, but they are "
                f"{val_fraction} and {test_fraction}; try 0.1 and 0"
            )
        text = self._read(path, encoding)
        val_start = round(len(text) * (1 - val_fraction))
        test_start = round(len(text) * (1 - val_fraction - test_fraction))
        texts = {"train": text[:test_start], "test": text[test_start:val_start], "val": text[val_start:]}
        if not test_fraction:
            del texts["test"]
        if tokenizer_file is not None:
            trained: Tokenizer = read_tokenizer(expand_path(tokenizer_file, "tokenizer_file"))
        else:
            trained = train_tokenizer([texts["train"]], tokenizer, vocab_size)
        super().__init__(trained, texts, **settings)

    @staticmethod
    def _read(path: str, encoding: str) -> str:
        path = "tinyshakespeare/input.txt" if path == "tiny_shakespeare" else path
        folder = expand_path(path)
        if not folder.is_dir():
            return read_text(resolve_path(path, FILES), encoding)
        files = [file for file in list_files(folder) if file.is_file()]
        if not files:
            raise UserError(f"path must be a text or a folder of texts, but {path!r} holds no file")
        return "\n".join(read_text(file, encoding) for file in files)
