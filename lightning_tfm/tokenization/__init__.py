"""Tokenizers, which map texts to ids and back."""

from lightning_tfm.tokenization.edits import align, edit_distances
from lightning_tfm.tokenization.subwords import SubwordTokenizer, read_tokenizer
from lightning_tfm.tokenization.symbols import SymbolTokenizer
from lightning_tfm.tokenization.tokenizer import (
    BOS,
    END_OF_DOCUMENT,
    EOS,
    NUM_SPECIAL,
    PAD,
    UNKNOWN,
    UNKNOWN_ID,
    Ids,
    Tokenizer,
    name_symbols,
    normalize_text,
    pad_sequences,
)
from lightning_tfm.tokenization.training import (
    build_vocab,
    tokenizer_from_dict,
    train_pair_tokenizer,
    train_tokenizer,
    train_word_tokenizer,
)
from lightning_tfm.tokenization.words import WordTokenizer

__all__ = [
    "BOS",
    "END_OF_DOCUMENT",
    "EOS",
    "NUM_SPECIAL",
    "PAD",
    "UNKNOWN",
    "UNKNOWN_ID",
    "Ids",
    "SubwordTokenizer",
    "SymbolTokenizer",
    "Tokenizer",
    "WordTokenizer",
    "align",
    "build_vocab",
    "edit_distances",
    "name_symbols",
    "normalize_text",
    "pad_sequences",
    "read_tokenizer",
    "tokenizer_from_dict",
    "train_pair_tokenizer",
    "train_tokenizer",
    "train_word_tokenizer",
]
