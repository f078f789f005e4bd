"""Language modelling: what is learned, and how it is measured."""

from __future__ import annotations

from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_tfm.data import Batch, TextDataModule
from lightning_tfm.metrics import Perplexity, token_nll
from lightning_tfm.modules.optimization import Optimization
from lightning_tfm.modules.task import TaskModule
from lightning_tfm.networks import GPT
from lightning_tfm.tokenizer import SubwordTokenizer, Tokenizer


class LanguageModel(TaskModule):
    """Trains a network to say which token comes next in a text.

    Logs, over the whole part, in nats: `loss` a token, `loss_per_character`, which texts of other tokens can be
    compared by, and `perplexity` of tokens.

    Args:
        network: a GPT.
        tokenizer: the data's vocabulary.
        optimization: optimizer and schedule.
    """

    task = "language modelling"
    fits = TextDataModule

    def __init__(
        self, network: GPT, tokenizer: Tokenizer | SubwordTokenizer, optimization: Optimization = Optimization()
    ) -> None:
        super().__init__(network, optimization, tokenizer=tokenizer.to_dict())
        self.tokenizer = tokenizer
        self.metrics = nn.ModuleDict()

    def setup(self, stage: str) -> None:
        for prefix in ("val", "test"):
            if prefix not in self.metrics:
                self.metrics[prefix] = nn.ModuleDict(
                    {"loss": MeanMetric(), "loss_per_character": MeanMetric(), "perplexity": Perplexity()}
                )

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.summed(token_nll(self.network(batch.source, batch.target_in), batch.target_out), batch.tokens)

    def _evaluate(self, batch: Batch, prefix: str) -> None:
        examples = self.trainer.datamodule.datasets[prefix]
        nll = token_nll(self.network(batch.source, batch.target_in), batch.target_out) / batch.tokens
        metrics = self.metrics[prefix]
        metrics["loss"].update(nll, weight=batch.tokens)
        metrics["perplexity"].update(nll, weight=batch.tokens)
        metrics["loss_per_character"].update(nll / examples.characters_per_token, weight=batch.tokens)
        for name, metric in metrics.items():
            self.log(
                f"{prefix}/{name}",
                metric,
                prog_bar=name == "loss",
                add_dataloader_idx=False,
                batch_size=batch.target_in.size(0),
            )

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate(batch, "val")

    def test_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._evaluate(batch, "test")
