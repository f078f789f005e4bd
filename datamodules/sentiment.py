"""'an engrossing story of survival' -> pos, from archives, folders and tables of labelled texts."""

from __future__ import annotations

import re
import tarfile
from collections import Counter
from pathlib import Path, PurePosixPath

from lightning_tfm.data import Download, located, read_lines, read_text
from lightning_tfm.data.batches import stable_hash
from lightning_tfm.data.labels import LabelledDataModule, LabelledText
from lightning_tfm.errors import UserError
from lightning_tfm.tokenizer import NUM_SPECIAL, Tokenizer

FILES = {
    "aclImdb_v1.tar.gz": Download("https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz", ""),
}

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
"""Stands for the words that are not among the commonest."""


def words(text: str) -> str:
    """A text as its words and punctuation marks, in small letters, between spaces."""
    return " ".join(re.findall(r"[\w']+|[^\w\s]", re.sub(r"<br\s*/?>", " ", text).lower()))
