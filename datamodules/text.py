"""'First Citizen:' -> '\nBefore we proceed any further, hear me speak.', from any text."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from lightning_tfm.data import Download, TextDataModule, is_hidden, located, read_text
from lightning_tfm.errors import UserError
from lightning_tfm.tokenizer import learned, read_tokenizer

FILES = {
    "tinyshakespeare/input.txt": Download(
        "https://raw.githubusercontent.com/karpathy/char-rnn/6f9487a6fe5b420b7ca9afb0d7c078e37c1d1b4e/data/"
        "tinyshakespeare/input.txt",
        "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
    )
}
"""What can be downloaded: 1.1 MB of Shakespeare's plays."""


class Text(TextDataModule):
    """A text to continue, cut into a training, a test and a validation part, in this order.

    The validation part is the last `val_share` of the text, whatever `test_share` is. The test part lies just before
    it, so that settings chosen on the end of the text can be tested on a part that none was chosen on.

    Args:
        path: a file, a folder, of which all files are read in the order of their names, but hidden ones, or
            tiny_shakespeare, which is downloaded.
        encoding: of the files, as Python calls it.
        tokens: characters, or byte-level subwords, which are learned from the training part.
        vocab_size: how many different tokens there are at most: the commonest.
        tokenizer_file: a Hugging Face tokenizer.json, whose tokens are taken instead.
        val_share: share of the whole text for validation.
        test_share: share of the whole text for the test; where it is 0, the validation part is tested.
        context: tokens of a window.
        batch_size, eval_batch_size, num_workers, seed: see TaskDataModule.
    """

    def __init__(
        self,
        path: str = "tiny_shakespeare",
        encoding: str = "utf-8",
        tokens: Literal["character", "subword"] = "character",
        vocab_size: int = 6_000,
        tokenizer_file: str | None = None,
        val_share: float = 0.1,
        test_share: float = 0.0,
        context: int = 64,
        batch_size: int = 32,
        eval_batch_size: int = 256,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        if not (val_share > 0 and test_share >= 0 and val_share + test_share < 1):
            raise UserError(
                "val_share must be above 0, test_share at least 0, and both together below 1, but they are "
                f"{val_share} and {test_share}; try 0.1 and 0"
            )
        text = self._read(path, encoding)
        val_start = round(len(text) * (1 - val_share))
        test_start = round(len(text) * (1 - val_share - test_share))
        texts = {"train": text[:test_start], "test": text[test_start:val_start], "val": text[val_start:]}
        if not test_share:
            texts["test"] = texts["val"]
        if tokenizer_file is not None:
            tokenizer = read_tokenizer(Path(tokenizer_file))
        else:
            tokenizer = learned([texts["train"]], tokens, vocab_size)
        super().__init__(tokenizer, texts, context, batch_size, eval_batch_size, num_workers, seed)

    @staticmethod
    def _read(path: str, encoding: str) -> str:
        path = "tinyshakespeare/input.txt" if path == "tiny_shakespeare" else path
        folder = Path(path)
        if not folder.is_dir():
            return read_text(located(path, FILES), encoding)
        files = [
            file
            for file in sorted(folder.rglob("*"), key=lambda file: file.parts)  # paths ignore case on Windows
            if file.is_file() and not is_hidden(file.relative_to(folder))
        ]
        if not files:
            raise UserError(f"path must be a text or a folder of texts, but {path!r} holds no file")
        return "\n".join(read_text(file, encoding) for file in files)
