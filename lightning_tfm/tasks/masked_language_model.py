"""Masked language modeling: prediction of masked tokens from their context (Devlin et al. 2019)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor
from torchmetrics import Metric

from lightning_tfm.data import Batch, MixtureDataset, TextDataModule, TextDataset
from lightning_tfm.errors import UserError
from lightning_tfm.inference import MASK, MaskedLanguageModelPredictor
from lightning_tfm.layers.losses import token_nll
from lightning_tfm.networks import MaskedEncoder
from lightning_tfm.optimizers import AdamW, LRSchedule
from lightning_tfm.tasks.base import TaskModule
from lightning_tfm.tasks.metrics import TokenAccuracy, TokenLoss
from lightning_tfm.tokenization import NUM_SPECIAL, PAD, Tokenizer


class MaskedLanguageModel(TaskModule, MaskedLanguageModelPredictor):
    """Module that trains a network to predict the masked tokens of a text.

    Of the masked tokens, 80% are replaced by a mask, 10% by a random token, and 10% are unchanged (Devlin et al.
    2019, 3.1). In validation and testing, the masked tokens of a window depend only on its row.

    Logs the `loss` per masked token in nats, its `perplexity`, and the `accuracy`.

    Args:
        network: the network.
        tokenizer: the tokenizer of the data.
        optimizer: a function from parameter groups to an optimizer, such as an optimizer class.
        lr_schedule: the schedule of the learning rate.
        mask_fraction: fraction of tokens to mask; at least one token of each text is masked.
    """

    network: MaskedEncoder
    datamodule_class = TextDataModule
    step_arguments = ("mask_fraction",)

    def __init__(
        self,
        network: MaskedEncoder,
        tokenizer: Tokenizer,
        optimizer: OptimizerCallable = AdamW,
        lr_schedule: LRSchedule = LRSchedule(),
        mask_fraction: float = 0.15,
    ) -> None:
        if not 0 < mask_fraction <= 1:
            raise UserError(f"mask_fraction must be above 0 and at most 1, but is {mask_fraction}; try 0.15")
        super().__init__(network, tokenizer, optimizer, lr_schedule, mask_fraction=mask_fraction)
        self.mask_fraction = mask_fraction

    def _masked(self, text: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input (B, T) of the network, and the target (B, T), which is PAD where no token is masked.

        Args:
            text: the ids (B, T).
            draws: uniform random numbers (3, B, T) in float32, which select the masked tokens, the kind of replacement,
                and the random tokens.
        """
        real = text != PAD
        lowest = draws[0].masked_fill(~real, 1).amin(1, keepdim=True)
        masked = (draws[0] <= lowest.clamp(min=self.mask_fraction)) & real  # at least one in each text
        target = text.masked_fill(~masked, PAD)
        source = text.masked_fill(masked & (draws[1] < 0.8), MASK)
        num_ids = self.tokenizer.vocab_size - NUM_SPECIAL
        other = NUM_SPECIAL + (draws[2] * num_ids).long().clamp(max=num_ids - 1)
        return torch.where(masked & (draws[1] >= 0.9), other, source), target

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        text = batch.target_in
        source, target = self._masked(text, torch.rand(3, *text.shape, dtype=torch.float32, device=text.device))
        return token_nll(self.network(source), target), (target != PAD).sum()

    def new_metrics(self) -> dict[str, Metric]:
        return {"loss": TokenLoss(), "accuracy": TokenAccuracy()}

    def evaluate(self, batch: Batch, dataset: TextDataset | MixtureDataset, metrics: Mapping[str, Metric]) -> None:
        text = batch.target_in
        # Draw in float32 for every precision, since the same tokens must be masked.
        draws = [
            torch.rand(3, text.size(1), dtype=torch.float32, generator=torch.Generator().manual_seed(row))
            for row in batch.rows.tolist()
        ]
        source, target = self._masked(text, torch.stack(draws, dim=1).to(text.device))
        logits, tokens = self.network(source), (target != PAD).sum()
        metrics["loss"].update(token_nll(logits, target), tokens)
        metrics["accuracy"].update(((logits.argmax(-1) == target) & (target != PAD)).sum(), tokens)
