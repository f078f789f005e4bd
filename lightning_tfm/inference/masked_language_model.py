"""Predictions of masked tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from lightning_tfm.errors import UserError
from lightning_tfm.inference.attention_maps import MAX_POSITIONS, VISIBLE, AttentionMap, text_attention
from lightning_tfm.inference.decoding import DecodingOptions
from lightning_tfm.inference.prediction import Output, TeacherForced
from lightning_tfm.inference.predictor import Predictor, clean_line
from lightning_tfm.networks import MaskedEncoder
from lightning_tfm.tokenization import BOS, EOS, NUM_SPECIAL, PAD, Ids

MASK = BOS
"""Id of masked tokens: BOS, which does not occur within a text."""

SPACED_MASK = -MASK
"""Id of a masked token that includes the space before it, replaced by MASK in the input of the network."""

MASK_SYMBOL = "[MASK]"
"""Symbol of a masked token in a line of input."""


class MaskedLanguageModelPredictor(Predictor):
    """Predictor of the masked tokens of a text."""

    network: MaskedEncoder
    task = "masked_language_model"
    excluded_ids = (PAD, BOS, EOS)

    def encode_line(self, line: str) -> tuple[Ids, str]:
        if not line.strip():
            raise UserError("the text is empty")
        *before, last = line.split(MASK_SYMBOL)
        if not before:
            raise UserError(f"it must have a masked token, written as {MASK_SYMBOL}, but has none")
        ids: list[int] = []

        def append(text: str) -> None:
            encode = self.tokenizer.encode_rest if ids else self.tokenizer.encode
            ids.extend(cast(list[int], encode(text)) if text else [])

        for part in before:
            is_spaced = part.endswith(" ") and len(self.tokenizer.spaced_ids) > 0
            append(part[:-1] if is_spaced else part)
            ids.append(SPACED_MASK if is_spaced else MASK)
        append(last)
        self.network.check_lengths(len(ids))
        return ids, self.input_note(ids, line.split(MASK_SYMBOL))

    def predict_ids(
        self, sources: list[Ids], options: DecodingOptions, generator: torch.Generator
    ) -> list[list[Output]]:
        """Return each text with the most probable tokens at its masks."""
        outputs = []
        for ids in sources:
            text = torch.tensor([ids], device=self.device)
            filled, logits = self._filled(text)
            is_masked = text < NUM_SPECIAL
            steps = self.steps(logits[is_masked], filled[is_masked]) if options.steps else None
            outputs.append([Output(self.tokenizer.decode(filled[0].tolist()), steps=steps)])
        return outputs

    def _filled(self, text: Tensor) -> tuple[Tensor, Tensor]:
        """Return a text (1, T) with the most probable tokens at its masks, and the logits (1, T, V)."""
        without_space = torch.ones(self.tokenizer.vocab_size, dtype=torch.bool, device=self.device)
        without_space[[*self.tokenizer.spaced_ids]] = False
        logits = self.network(text.masked_fill(text == SPACED_MASK, MASK))
        ranked = logits.clone()
        ranked[..., :NUM_SPECIAL] = -torch.inf
        ranked[(text == SPACED_MASK).unsqueeze(-1) & without_space] = -torch.inf
        return torch.where(text < NUM_SPECIAL, ranked.argmax(-1), text), logits

    def example(self, line: str, output: str) -> dict[str, Any]:
        return super().example(line, output) | {"ids": self.tokenizer.encode(output)}

    def teacher_forced(self, line: str) -> TeacherForced:
        """Return a text with masked tokens, which are predicted."""
        ids, _ = self.encode_line(clean_line(line))
        text = torch.tensor([ids], device=self.device)
        with torch.no_grad():
            targets, _ = self._filled(text)
        is_masked = text < NUM_SPECIAL
        symbols = [self.tokenizer.decode([id]) for id in targets[0].tolist()]
        read = [MASK_SYMBOL if masked else symbol for masked, symbol in zip(is_masked[0], symbols, strict=True)]
        inputs = (text.masked_fill(is_masked, MASK),)
        output = self.tokenizer.decode(targets[0].tolist())
        return TeacherForced(output, inputs, targets, is_masked, read, symbols)

    def attention(self, content: Mapping[str, Any]) -> list[AttentionMap]:
        ids = content["ids"][:MAX_POSITIONS]
        symbols = [self.tokenizer.decode([number]).translate(VISIBLE) for number in ids]
        return text_attention(self.network, symbols, torch.tensor([ids]))
