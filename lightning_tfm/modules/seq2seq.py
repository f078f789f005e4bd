"""Sequence to sequence: what is learned, how it is measured, and how weights are updated."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from lightning import LightningModule
from torch import Tensor, nn

from lightning_tfm.data import Batch
from lightning_tfm.decoding import decode
from lightning_tfm.errors import UserError
from lightning_tfm.metrics import SequenceMetrics, token_nll
from lightning_tfm.modules.optimization import Optimization
from lightning_tfm.networks import Network
from lightning_tfm.tokenizer import PAD, Tokenizer


class Seq2SeqModule(LightningModule):
    """Trains a network to answer a source with its target, and tests it by decoding.

    Args:
        network: any of lightning_tfm.networks.
        tokenizer: the data's vocabulary.
        max_target_length: where decoding stops, in tokens, EOS included.
        optimization: optimizer and schedule.
        label_smoothing: of the training loss; validation and test losses have none.
        bleu: whether to score the answers by BLEU as well, which makes sense for sentences.
    """

    def __init__(
        self,
        network: Network,
        tokenizer: Tokenizer,
        max_target_length: int,
        optimization: Optimization = Optimization(),
        label_smoothing: float = 0.0,
        bleu: bool = False,
    ) -> None:
        super().__init__()
        if not 0 <= label_smoothing < 1:
            raise UserError(f"label_smoothing must be at least 0 and below 1, but is {label_smoothing}; try 0.1")
        if bleu and not tokenizer.has_words:
            raise UserError("bleu must be false where symbols are characters, but is true; it scores words")
        self.network = network
        self.tokenizer = tokenizer
        self.max_target_length = max_target_length
        self.optimization = optimization
        self.label_smoothing = label_smoothing
        self.bleu = bleu
        self.metrics = nn.ModuleDict()
        self.step_sums: Tensor | int = 0  # loss and tokens of the step so far
        self.save_hyperparameters(
            {
                "network": {"class_path": _path_of(type(network)), "init_args": network.hyper_parameters},
                "tokenizer": tokenizer.to_dict(),
                "max_target_length": max_target_length,
                "optimization": asdict(optimization),
                "label_smoothing": label_smoothing,
                "bleu": bleu,
            }
        )

    def configure_optimizers(self) -> dict[str, Any]:
        fused = "mixed" not in self.trainer.precision  # under mixed precision Lightning cannot clip for a fused one
        return self.optimization.configure(self.network, self.trainer.max_steps, fused)

    def setup(self, stage: str) -> None:
        prefixes = ["val"] if stage in ("fit", "validate") else [_prefix(name) for name in self._test_sets()]
        for prefix in prefixes:
            if prefix not in self.metrics:
                self.metrics[prefix] = SequenceMetrics(self.tokenizer, self.bleu)

    def on_train_start(self) -> None:
        if self.trainer.global_rank:  # all processes start from one seed, and would drop the same units
            torch.manual_seed(torch.initial_seed() + self.trainer.global_rank)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The summed loss: what it is divided by is known at the end of the step, see on_before_optimizer_step."""
        logits = self.network(batch.source, batch.target_in)
        loss = token_nll(logits, batch.target_out, self.label_smoothing)
        tokens = (batch.target_out != PAD).sum()
        self.step_sums = self.step_sums + torch.stack((loss.detach(), tokens.to(loss.dtype)))
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Divides the gradients by the number of tokens in the whole step, over micro-batches and processes.

        So a token weighs the same wherever it is computed. Lightning has divided by the number of micro-batches
        and the strategy by that of processes; both are taken back.
        """
        loss, tokens = self.trainer.strategy.reduce(self.step_sums, reduce_op="sum")
        self.step_sums = 0
        self.log("train/loss", loss / tokens)
        factor = self.trainer.accumulate_grad_batches * self.trainer.world_size / tokens
        for parameter in self.network.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def _evaluate(self, batch: Batch, prefix: str) -> None:
        metrics = self.metrics[prefix]
        logits = self.network(batch.source, batch.target_in)
        answers = decode(self.network.decode_step, self.network.encode(batch.source), self.max_target_length)
        metrics.count(batch, logits, answers)
        self.log_dict(
            {f"{prefix}/{name}": metric for name, metric in metrics.items()},
            add_dataloader_idx=False,
            batch_size=batch.source.size(0),
        )

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate(batch, "val")

    def test_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._evaluate(batch, _prefix(self._test_sets()[dataloader_idx]))

    def _test_sets(self) -> tuple[str, ...]:
        return self.trainer.datamodule.test_sets if self.trainer.datamodule else ("test",)


def _prefix(test_set: str) -> str:
    """What the names of a test set's metrics begin with: "test" for the first, "test/longer" for "longer"."""
    return test_set if test_set == "test" else f"test/{test_set}"


def _path_of(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
