"""Predictions of masked tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch

from lightning_tfm.errors import UserError
from lightning_tfm.inference.attention_maps import MAX_POSITIONS, VISIBLE, AttentionMap, text_attention
from lightning_tfm.inference.decoding import DecodingOptions
from lightning_tfm.inference.prediction import ForcedOutput, Output
from lightning_tfm.inference.predictor import Predictor, clean_line
from lightning_tfm.networks import MaskedEncoder
from lightning_tfm.tokenization import BOS, NUM_SPECIAL, Ids

MASK = BOS
"""Id of masked tokens: BOS, which does not occur within a text."""

SPACED_MASK = -MASK
"""Id of a masked token that includes the space before it, replaced by MASK in the input of the network."""

MASK_SYMBOL = "[MASK]"
"""Symbol of a masked token in a line of input."""


class MaskedLanguageModelPredictor(Predictor):
    """Predictor of the masked tokens of a text."""

    network: MaskedEncoder

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
        return ids, self.input_note(ids)

    def predict_ids(
        self, sources: list[Ids], options: DecodingOptions, generator: torch.Generator
    ) -> list[list[Output]]:
        """Return each text with the most probable tokens at its masks."""
        outputs = []
        without_space = torch.ones(self.tokenizer.vocab_size, dtype=torch.bool, device=self.device)
        without_space[[*self.tokenizer.spaced_ids]] = False
        for ids in sources:
            text = torch.tensor([ids], device=self.device)
            logits = self.network(text.masked_fill(text == SPACED_MASK, MASK))
            logits[..., :NUM_SPECIAL] = -torch.inf
            logits[(text == SPACED_MASK).unsqueeze(-1) & without_space] = -torch.inf
            filled = torch.where(text < NUM_SPECIAL, logits.argmax(-1), text)
            outputs.append([Output(self.tokenizer.decode(filled[0].tolist()))])
        return outputs

    def example(self, line: str, output: str) -> dict[str, Any]:
        return super().example(line, output) | {"ids": self.tokenizer.encode(output)}

    def forced(self, line: str) -> ForcedOutput:
        """Return a text with masked tokens, which are predicted."""
        ids, _ = self.encode_line(clean_line(line))
        text = torch.tensor([ids], device=self.device)
        is_masked = text < NUM_SPECIAL
        text = text.masked_fill(text == SPACED_MASK, MASK)
        with torch.no_grad():
            logits = self.network(text)
        logits[..., :NUM_SPECIAL] = -torch.inf
        targets = torch.where(is_masked, logits.argmax(-1), text)
        filled = [self.tokenizer.decode([number]).translate(VISIBLE) for number in targets[0].tolist()]
        symbols = [MASK_SYMBOL if id == MASK else symbol for id, symbol in zip(text[0].tolist(), filled, strict=True)]
        return ForcedOutput(self.output_text(line), (text,), targets, is_masked, symbols, filled)

    def attention(self, content: Mapping[str, Any]) -> list[AttentionMap]:
        ids = content["ids"][:MAX_POSITIONS]
        symbols = [self.tokenizer.decode([number]).translate(VISIBLE) for number in ids]
        return text_attention(self.network, symbols, torch.tensor([ids]))
