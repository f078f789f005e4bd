"""Tokenizer of byte-level subwords."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_tfm.errors import UserError
from lightning_tfm.tokenization.tokenizer import END_OF_DOCUMENT, EOS, NUM_SPECIAL, Tokenizer, strip_special

SPACE = "\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}"
"""Character for a space in the tokens of a byte-level vocabulary."""

MAX_GROWTH = 100_000
"""Maximum factor by which a tokenizer may enlarge a text, if each of its parts doubles it and adds its replacement."""


class SubwordTokenizer(Tokenizer):
    """Tokenizer by byte-level byte-pair encoding (Sennrich et al. 2016, Radford et al. 2019), for any text.

    The ids are those of a Hugging Face tokenizer, given as the content of a `tokenizer.json`, plus NUM_SPECIAL.
    """

    unknown_id, is_word_based = None, True

    def __init__(self, model: str) -> None:
        from tokenizers import Tokenizer as Model

        _check_growth(model)
        self.model = Model.from_str(model)
        self.model.no_truncation()  # set for a specific model
        self.model.no_padding()
        self.vocab_size = NUM_SPECIAL + 1 + max(self.model.get_vocab().values(), default=-1)  # there may be gaps

    @cached_property
    def spaced_ids(self) -> list[int]:  # type: ignore[override]  # read only
        return [NUM_SPECIAL + id for token, id in self.model.get_vocab().items() if token.startswith(SPACE)]

    @cached_property
    def _rest_model(self) -> Any:
        """The model without the space that it may add before a text."""
        unspaced = self.model.to_str().replace('"add_prefix_space":true', '"add_prefix_space":false')
        return type(self.model).from_str(unspaced)

    def split(self, text: str) -> list[str]:
        return [text[begin:end] for begin, end in self.model.encode(text, add_special_tokens=False).offsets]

    def normalize(self, text: str) -> str:
        return self.model.normalizer.normalize_str(text) if self.model.normalizer else text

    def split_scored(self, text: str) -> list[str]:
        """Split a target into characters, since equal parts of two texts may be divided into different subwords."""
        return list(text)

    def word_indices(self, text: str) -> list[int]:
        offsets = self.model.encode(text, add_special_tokens=False).offsets
        return [max(0, len(text[:end].split()) - 1) for _, end in offsets]

    def encode(self, text: str) -> list[int]:
        return [id + NUM_SPECIAL for id in self.model.encode(text, add_special_tokens=False).ids]

    def encode_rest(self, text: str) -> list[int]:
        return [id + NUM_SPECIAL for id in self._rest_model.encode(text, add_special_tokens=False).ids]

    def encode_all(self, texts: Sequence[str], are_targets: bool = False) -> list[list[int]]:
        """Encode several texts in parallel on all cores."""
        encodings = self.model.encode_batch(texts, add_special_tokens=False)
        return [[id + NUM_SPECIAL for id in encoding.ids] for encoding in encodings]

    def encode_parts(self, parts: Sequence[str], continued: bool) -> Tensor:
        ends = [part.endswith(END_OF_DOCUMENT) for part in parts]
        starts = [not continued, *ends[:-1]]
        texts: tuple[list[str], list[str]] = [], []  # the rest of a source, and starts
        for part, is_start in zip(parts, starts, strict=True):
            texts[is_start].append(part.removesuffix(END_OF_DOCUMENT))
        models = self._rest_model, self.model
        encodings = [iter(m.encode_batch_fast(t, add_special_tokens=False)) for m, t in zip(models, texts, strict=True)]
        ids = array("i")  # several times as fast to fill as a tensor
        for is_start, is_end in zip(starts, ends, strict=True):
            ids.fromlist(next(encodings[is_start]).ids)
            if is_end:
                ids.append(EOS - NUM_SPECIAL)
        return torch.frombuffer(ids, dtype=torch.int32).add_(NUM_SPECIAL) if ids else torch.empty(0, dtype=torch.int32)

    def decode(self, ids: Sequence[int]) -> str:
        return self.model.decode([id - NUM_SPECIAL for id in strip_special(ids)]).removeprefix(" ")

    def to_dict(self) -> dict[str, Any]:
        return {"type": "subwords", "model": self.model.to_str()}


def _check_growth(model: str) -> None:
    """Raise UserError if normalizers, pre-tokenizers and decoders may enlarge a text beyond MAX_GROWTH times."""
    content = json.loads(model)
    parts, growth = [content.get(name) for name in ("normalizer", "pre_tokenizer", "decoder")], 1
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            growth *= 2 + len(part.get("content") or part.get("prepend") or "")  # ByteLevel doubles a text
            parts += [each for name in ("normalizers", "pretokenizers", "decoders") for each in part.get(name) or []]
        if growth > MAX_GROWTH:
            raise UserError(f"a tokenizer must enlarge a text at most {MAX_GROWTH:,} times, but has more replacements")


def read_tokenizer(path: Path) -> SubwordTokenizer:
    """Load the tokenizer of a Hugging Face tokenizer.json; raise UserError if the file is none."""
    try:
        return SubwordTokenizer(path.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises plain Exception
        raise UserError(f"{str(path)!r} must be a Hugging Face tokenizer.json, but is not: {error}") from None
