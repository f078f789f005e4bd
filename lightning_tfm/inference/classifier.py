"""Predictions of the class of a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lightning_tfm.inference.attention_maps import AttentionMap, text_attention
from lightning_tfm.inference.decoding import DecodingOptions
from lightning_tfm.inference.prediction import Output, TeacherForced
from lightning_tfm.inference.predictor import Predictor, clean_line, strip_fields
from lightning_tfm.networks import EncoderClassifier
from lightning_tfm.tokenization import Ids, Tokenizer, pad_sequences


class ClassifierPredictor(Predictor):
    """Predictor of the class of a text.

    Args:
        network: the network.
        tokenizer: the tokenizer of the data.
        labels: the names of the classes, in the order of the network's outputs.
    """

    network: EncoderClassifier
    task = "classifier"
    predictor_arguments = ("labels",)

    def __init__(self, network: EncoderClassifier, tokenizer: Tokenizer, labels: Sequence[str]) -> None:
        super().__init__(network, tokenizer)
        self.labels = list(labels)

    def encode_line(self, line: str) -> tuple[Ids, str]:
        text, longest = strip_fields(line), self.network.max_length
        note = self.check_columns(text)
        ids = self.tokenize(text)
        cut = f"only the last {longest} of {len(ids)} tokens are used" if len(ids) > longest else ""
        return ids[-longest:], self.input_note(ids, [text], note, cut)

    def predict_ids(
        self, sources: list[Ids], options: DecodingOptions, generator: torch.Generator
    ) -> list[list[Output]]:
        text, _ = pad_sequences(sources)
        logits = self.network(text.to(self.device)).float()
        probabilities, labels = logits.softmax(-1).max(1)
        steps = [[step] for step in self.steps(logits, labels)] if options.steps else [None] * len(sources)
        best = zip(labels.tolist(), probabilities.tolist(), steps, strict=True)
        return [[Output(self.labels[label], round(probability, 4), steps=taken)] for label, probability, taken in best]

    def teacher_forced(self, line: str) -> TeacherForced:
        ids, _ = self.encode_line(clean_line(line))
        output = self.output_text(line)
        label = torch.tensor([[self.labels.index(output)]], device=self.device)
        symbols = self.tokenizer.split(clean_line(line))[-len(ids) :]
        text = pad_sequences([ids])[0].to(self.device)
        return TeacherForced(output, (text,), label, torch.ones_like(label, dtype=torch.bool), symbols, [output])

    def output_symbol(self, id: int) -> str:
        return self.labels[id]

    def attention(self, content: Mapping[str, Any]) -> list[AttentionMap]:
        read = slice(-self.network.max_length, None)
        ids = self.tokenizer.encode(content["source"])[read]
        symbols = self.tokenizer.split(content["source"])[read]
        return text_attention(self.network, symbols, torch.tensor([ids], dtype=torch.long))
