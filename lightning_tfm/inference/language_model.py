"""Continuations and log probabilities of texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_tfm.errors import UserError
from lightning_tfm.inference.attention_maps import MAX_POSITIONS, VISIBLE, AttentionMap, text_attention
from lightning_tfm.inference.decoding import DecodingOptions, continue_text, recording
from lightning_tfm.inference.prediction import Output, OutputStep, Score, TeacherForced
from lightning_tfm.inference.predictor import Predictor, clean_line
from lightning_tfm.layers.losses import sequence_nll
from lightning_tfm.networks import CausalNetwork
from lightning_tfm.tokenization import BOS, EOS, PAD, Ids, Tokenizer


class LanguageModelPredictor(Predictor):
    """Predictor of the continuation of a text.

    Args:
        network: the network.
        tokenizer: the tokenizer of the data.
        stop_at_eos: whether an output ends where the network predicts EOS, as at the end of a document.
    """

    network: CausalNetwork
    task = "language_model"
    predictor_arguments = ("stop_at_eos",)
    decoding_options = ("temperature", "top_k", "top_p", "max_tokens")
    gives_scores = True
    outputs_are_long = True
    default_temperature, default_max_tokens = 0.8, 500

    def __init__(self, network: CausalNetwork, tokenizer: Tokenizer, stop_at_eos: bool = False) -> None:
        super().__init__(network, tokenizer)
        self.stop_at_eos = stop_at_eos
        self.excluded_ids = (PAD, BOS) if stop_at_eos else (PAD, BOS, EOS)

    def encode_line(self, line: str) -> tuple[Ids, str]:
        ids = self.tokenize(line)
        return ids, self.input_note(ids, [line])

    def predict_ids(
        self, sources: list[Ids], options: DecodingOptions, generator: torch.Generator
    ) -> list[list[Output]]:
        """Return each text with its continuation; texts are not batched, since they cannot be padded on the left."""
        sample_fn = options.sample_fn(generator, self.default_temperature)
        length, network, outputs = options.max_tokens or self.default_max_tokens, self.network, []
        for ids in sources:
            text = torch.tensor([ids], device=self.device)
            step, logits = recording(network.decode_step) if options.steps else (network.decode_step, [])
            added = continue_text(network.encode, step, text, length, network.max_length, sample_fn, self.stop_at_eos)
            steps = self.steps(torch.cat(logits), added[0]) if options.steps else None
            outputs.append([Output(self.tokenizer.decode(torch.cat((text, added), dim=1)[0].tolist()), steps=steps)])
        return outputs

    def encode_pair(self, line: str) -> tuple[Ids, Ids, str]:
        ids = self.tokenize(line)
        if len(ids) == 1:
            raise UserError("it has one token, but the first one is not predicted")
        return [], ids, self.input_note(ids, [line])

    def score_ids(self, pairs: list[tuple[Ids, Ids]], with_steps: bool) -> list[Score]:
        """Return the log probability of each text given its first token.

        Note:
            A text with more tokens than the network has positions is split into overlapping windows: each token is
            predicted from all preceding tokens, or from at least half as many as there are positions.
        """
        length, scores = self.network.max_length, []
        for _, ids in pairs:
            text, log_probability, seen = torch.tensor([ids], device=self.device), 0.0, 1  # predicted up to here
            steps: list[OutputStep] = []
            while seen < len(ids):
                start = 0 if seen == 1 else seen - max(1, length // 2)
                end = min(start + length + 1, len(ids))
                logits = self.network(text[:, :0], text[:, start : end - 1])[:, seen - start - 1 :]
                log_probability -= sequence_nll(logits, text[:, seen:end]).item()
                if with_steps:
                    steps += self.steps(logits[0], text[0, seen:end])
                seen = end
            scores.append(Score(log_probability, len(ids) - 1, steps=steps if with_steps else None))
        return scores

    def example_inputs(self, rows: int, length: int, generator: torch.Generator) -> dict[str, Tensor]:
        target_in = self.network.random_ids(rows, length, generator)
        return {"source": target_in[:, :0], "target_in": target_in}

    def max_input_lengths(self) -> dict[str, int | None]:
        return {"target_in": self.network.max_length}

    def example(self, line: str, output: str) -> dict[str, Any]:
        return super().example(line, output) | {"ids": self.tokenizer.encode(output)}

    def teacher_forced(self, line: str) -> TeacherForced:
        """Return a text, each of whose tokens is predicted from those before."""
        ids = self.encode_pair(clean_line(line))[1][: self.network.max_length + 1]
        text = torch.tensor([ids], device=self.device)
        symbols = [self.tokenizer.decode([id]) for id in text[0].tolist()]
        targets = text[:, 1:]
        return TeacherForced(line, (text[:, :0], text[:, :-1]), targets, targets != PAD, symbols[:-1], symbols[1:])

    def attention(self, content: Mapping[str, Any]) -> list[AttentionMap]:
        ids = content["ids"][:MAX_POSITIONS]  # earlier tokens do not attend to later ones
        symbols = [self.tokenizer.decode([number]).translate(VISIBLE) for number in ids]
        text = torch.tensor([ids])
        return text_attention(self.network, symbols, text[:, :0], text)
