"""Language modeling: prediction of the next token of a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_tfm.data import Batch, TextDataModule, TextDataset
from lightning_tfm.inference import AttentionExample, LanguageModelPredictor, Prediction
from lightning_tfm.layers.losses import token_nll
from lightning_tfm.networks import CausalNetwork
from lightning_tfm.networks.gpt2 import start_from_gpt2
from lightning_tfm.optimizers import AdamW, LRSchedule
from lightning_tfm.tasks.base import NUM_EXAMPLES, TaskModule
from lightning_tfm.tasks.metrics import Loss, Perplexity, TokenLoss
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
        pretrained: a folder with a Hugging Face GPT-2 of the network's size, from whose weights training starts;
            requires the tokenizer in the folder.
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
            start_from_gpt2(self.network, self.pretrained)
            self.pretrained = None

    def new_metrics(self) -> nn.ModuleDict:
        return nn.ModuleDict({"loss": TokenLoss(), "loss_per_character": Loss(), "perplexity": Perplexity()})

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        nll = token_nll(self.network(batch.source, batch.target_in), batch.target_out)
        return self.accumulate_loss(nll, batch.tokens)

    def _evaluate(self, batch: Batch, prefix: str, dataset: TextDataset) -> None:
        nll, tokens = token_nll(self.network(batch.source, batch.target_in), batch.target_out), batch.tokens
        metrics = cast(Mapping[str, Metric], self.metrics[prefix])
        metrics["loss"].update(nll, tokens)
        metrics["perplexity"].update(nll, tokens)
        metrics["loss_per_character"].update(nll / dataset.characters_per_token, tokens)
        for name, metric in metrics.items():
            self.log(
                f"{prefix}/{name}",
                metric,
                add_dataloader_idx=False,
                batch_size=batch.target_in.size(0),
            )

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate(batch, "val", self.trainer.val_dataloaders.dataset)

    def test_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._evaluate(batch, self.test_prefixes[dataloader_idx], self.trainer.test_dataloaders[dataloader_idx].dataset)

    def attention_examples(
        self, dataset: TextDataset, predictions: Sequence[tuple[int, Prediction]]
    ) -> list[AttentionExample]:
        """Return the first windows of the text."""
        return window_examples(dataset, self.tokenizer, "causal self-attention")


def window_examples(dataset: TextDataset, tokenizer: Tokenizer, title: str) -> list[AttentionExample]:
    """Return the first windows of a text as attention examples.

    Args:
        dataset: the windows.
        tokenizer: the tokenizer.
        title: the title of the plots.
    """
    examples = []
    for row in range(min(NUM_EXAMPLES, len(dataset))):
        ids = dataset[torch.tensor([row])].target_in[0].tolist()
        examples.append(AttentionExample(row, title, {"ids": ids, "text": tokenizer.decode(ids).strip()}))
    return examples
