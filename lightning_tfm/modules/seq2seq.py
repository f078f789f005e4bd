"""Sequence to sequence: what is learned, how it is measured, and how weights are updated."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from lightning import LightningModule
from torch import Tensor, nn

from lightning_tfm.data import Batch
from lightning_tfm.decoding import Choose, beam_search, decode, greedy
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
        self.network = network
        self.tokenizer = tokenizer
        self.max_target_length = max_target_length
        self.optimization = optimization
        self.label_smoothing = label_smoothing
        self.bleu = bleu
        self.metrics = nn.ModuleDict()
        self.tokens_in_step = 0
        self.save_hyperparameters(
            {
                "network": {"class_path": _path_of(type(network)), "init_args": network.hyper_parameters},
                "tokenizer": tokenizer.to_dict(),
                "max_target_length": max_target_length,
                "optimization": asdict(optimization) | {"betas": list(optimization.betas)},
                "label_smoothing": label_smoothing,
                "bleu": bleu,
            }
        )

    def configure_optimizers(self) -> dict[str, Any]:
        # float16 alone scales the loss, and Lightning's scaler cannot clip the gradients of a fused optimizer
        fused = self.trainer.precision != "16-mixed"
        return self.optimization.configure(self.network, self.trainer.max_steps, fused)

    def setup(self, stage: str) -> None:
        prefixes = ["val"] if stage in ("fit", "validate") else [_prefix(name) for name in self._test_sets()]
        for prefix in prefixes:
            if prefix not in self.metrics:
                self.metrics[prefix] = SequenceMetrics(self.tokenizer, self.bleu)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The summed loss: what it is divided by is known at the end of the step, see on_before_optimizer_step."""
        logits = self.network(batch.source, batch.target_in)
        loss = token_nll(logits, batch.target_out, self.label_smoothing)
        tokens = (batch.target_out != PAD).sum()
        self.tokens_in_step = self.tokens_in_step + tokens
        self.log("train/loss", loss.detach() / tokens)
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Divides the gradients by the number of tokens in the whole step, over micro-batches and processes.

        So a token weighs the same wherever it is computed. Lightning has divided by the number of micro-batches
        and the strategy by that of processes; both are taken back.
        """
        gradients = [parameter.grad for parameter in self.network.parameters() if parameter.grad is not None]
        tokens = self.trainer.strategy.reduce(self.tokens_in_step, reduce_op="sum").to(gradients[0].dtype)
        factor = self.trainer.accumulate_grad_batches * self.trainer.world_size / tokens
        for gradient in gradients:
            gradient.mul_(factor)
        self.tokens_in_step = 0

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        if not gradient_clip_val:
            return
        if gradient_clip_algorithm == "value":
            nn.utils.clip_grad_value_(self.network.parameters(), gradient_clip_val)
        else:
            nn.utils.clip_grad_norm_(self.network.parameters(), gradient_clip_val)

    def answer(self, source: Tensor, beam_size: int = 1, choose: Choose = greedy) -> Tensor:
        """The model's own targets (B, T) for source (B, S), each ended by EOS, then PAD."""
        state = self.network.encode(source)
        if beam_size > 1:
            return beam_search(self.network.decode_step, state, self.max_target_length, beam_size)[0]
        return decode(self.network.decode_step, state, self.max_target_length, choose)

    def _evaluate(self, batch: Batch, prefix: str) -> None:
        metrics = self.metrics[prefix]
        logits = self.network(batch.source, batch.target_in)
        metrics.count(batch, logits, self.answer(batch.source))
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
        return self.trainer.datamodule.test_sets


def _prefix(test_set: str) -> str:
    """ "test" -> "test", and "longer" -> "test/longer": what the names of a test set's metrics begin with."""
    return test_set if test_set == "test" else f"test/{test_set}"


def _path_of(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
