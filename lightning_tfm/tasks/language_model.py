"""Language modeling: prediction of the next token of a text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor
from torchmetrics import Metric

from lightning_tfm.data import Batch, MixtureDataset, TextDataModule, TextDataset
from lightning_tfm.errors import UserError
from lightning_tfm.inference import LanguageModelPredictor
from lightning_tfm.layers.losses import sequence_nll, token_nll
from lightning_tfm.networks import CausalNetwork
from lightning_tfm.networks.huggingface import start_from
from lightning_tfm.optimizers import AdamW, LRSchedule
from lightning_tfm.tasks.base import TaskModule
from lightning_tfm.tasks.metrics import Loss, TextLosses, TokenLoss
from lightning_tfm.tokenization import PAD, Tokenizer


class LanguageModel(TaskModule, LanguageModelPredictor):
    """Module that trains a network to predict the next token of a text.

    Logs, over the whole split and in nats, the `loss` per token, the `loss_per_character`, which is comparable between
    tokenizers, and the `perplexity` per token. Of a mixture of texts, also logs the `loss/NAME` per token of each text.

    Args:
        network: the network.
        tokenizer: the tokenizer of the data.
        optimizer: a function from parameter groups to an optimizer, such as an optimizer class.
        lr_schedule: the schedule of the learning rate.
        pretrained: a Hugging Face folder with a GPT-2, Llama or Qwen 3 of the network's settings, from whose weights
            training starts; requires the tokenizer in the folder.
        stop_at_eos: whether outputs end where the network predicts EOS; None if they do for documents that end with it.
    """

    network: CausalNetwork
    datamodule_class = TextDataModule

    def __init__(
        self,
        network: CausalNetwork,
        tokenizer: Tokenizer,
        optimizer: OptimizerCallable = AdamW,
        lr_schedule: LRSchedule = LRSchedule(),
        pretrained: str | None = None,
        stop_at_eos: bool | None = None,
    ) -> None:
        if stop_at_eos and network.hyper_parameters.get("text_only"):
            raise UserError("text_only must be false for documents that end with EOS, which would have probability 0")
        super().__init__(network, tokenizer, optimizer, lr_schedule, stop_at_eos=bool(stop_at_eos))
        self.pretrained = pretrained

    @classmethod
    def data_settings(cls, data: TextDataModule) -> dict[str, Any]:
        return super().data_settings(data) | {"stop_at_eos": data.marks_ends}

    def load_pretrained(self) -> None:
        if self.pretrained is not None:
            start_from(self.network, self.pretrained)
            self.pretrained = None

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return token_nll(self.network(batch.source, batch.target_in), batch.target_out), batch.tokens

    def new_metrics(self) -> dict[str, Metric]:
        data = self.trainer.datamodule
        texts = {} if data is None or len(data.weights) == 1 else {"loss_of_texts": TextLosses([*data.weights])}
        return {"loss": TokenLoss(), "loss_per_character": Loss(), **texts}

    def evaluate(self, batch: Batch, dataset: TextDataset | MixtureDataset, metrics: Mapping[str, Metric]) -> None:
        logits = self.network(batch.source, batch.target_in)
        nll, tokens = token_nll(logits, batch.target_out), batch.tokens
        if isinstance(dataset, MixtureDataset):
            indices = dataset.text_indices(batch.rows).unsqueeze(1)
            is_of_text = indices == torch.arange(len(dataset.texts), device=indices.device)  # (B, texts)
            sums = sequence_nll(logits, batch.target_out).unsqueeze(1) * is_of_text
            counts = (batch.target_out != PAD).sum(1, keepdim=True) * is_of_text
            metrics["loss_of_texts"].update(sums.sum(0, keepdim=True), counts.sum(0))
        metrics["loss"].update(nll, tokens)
        metrics["loss_per_character"].update(nll / dataset.characters_per_token, tokens)
