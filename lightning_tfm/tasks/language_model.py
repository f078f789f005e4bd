"""Language modeling: prediction of the next token of a text."""

from __future__ import annotations

from collections.abc import Mapping

from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor
from torchmetrics import Metric

from lightning_tfm.data import Batch, TextDataModule, TextDataset
from lightning_tfm.inference import LanguageModelPredictor
from lightning_tfm.layers.losses import token_nll
from lightning_tfm.networks import CausalNetwork
from lightning_tfm.networks.huggingface import start_from
from lightning_tfm.optimizers import AdamW, LRSchedule
from lightning_tfm.tasks.base import TaskModule
from lightning_tfm.tasks.metrics import Loss, TokenLoss
from lightning_tfm.tokenization import Tokenizer


class LanguageModel(TaskModule, LanguageModelPredictor):
    """Module that trains a network to predict the next token of a text.

    Logs, over the whole split and in nats, the `loss` per token, the `loss_per_character`, which is comparable between
    tokenizers, and the `perplexity` per token.

    Args:
        network: the network.
        tokenizer: the tokenizer of the data.
        optimizer: a function from parameter groups to an optimizer, such as an optimizer class.
        lr_schedule: the schedule of the learning rate.
        pretrained: a Hugging Face folder with a GPT-2, Llama or Qwen 3 of the network's settings, from whose weights
            training starts; requires the tokenizer in the folder.
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
    ) -> None:
        super().__init__(network, tokenizer, optimizer, lr_schedule)
        self.pretrained = pretrained

    def load_pretrained(self) -> None:
        if self.pretrained is not None:
            start_from(self.network, self.pretrained)
            self.pretrained = None

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return token_nll(self.network(batch.source, batch.target_in), batch.target_out), batch.tokens

    def new_metrics(self) -> dict[str, Metric]:
        return {"loss": TokenLoss(), "loss_per_character": Loss()}

    def evaluate(self, batch: Batch, dataset: TextDataset, metrics: Mapping[str, Metric]) -> None:
        nll, tokens = self.loss(batch)
        metrics["loss"].update(nll, tokens)
        metrics["loss_per_character"].update(nll / dataset.characters_per_token, tokens)
