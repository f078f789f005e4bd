"""Sequence-to-sequence learning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_tfm.data import Batch, PairDataModule, PairDataset
from lightning_tfm.distributed.parallel import data_group
from lightning_tfm.errors import UserError
from lightning_tfm.inference import Evaluation, Seq2SeqPredictor, make_prediction
from lightning_tfm.inference.decoding import beam_search, decode
from lightning_tfm.layers import attention_maps
from lightning_tfm.layers.losses import sequence_nll, token_nll
from lightning_tfm.networks import Seq2SeqNetwork
from lightning_tfm.optimizers import AdamW, LRSchedule
from lightning_tfm.tasks.alignment import gold_links
from lightning_tfm.tasks.base import TaskModule, check_label_smoothing
from lightning_tfm.tasks.metrics import CorpusScores, SequenceMetrics
from lightning_tfm.tokenization import PAD, Tokenizer


class Seq2SeqModule(TaskModule, Seq2SeqPredictor):
    """Module that trains a network to map a source to its target, and evaluates it by decoding.

    Logs `loss`, `perplexity`, `token_accuracy`, `exact_match` (the fraction of outputs equal to the target), `ser` (the
    symbol error rate) and the `text_metrics`. predictions.jsonl records which outputs are correct.

    Args:
        network: the network.
        tokenizer: the tokenizer of the data.
        max_target_length: maximum number of tokens in an output, including EOS.
        optimizer: a function from parameter groups to an optimizer, such as an optimizer class.
        lr_schedule: the schedule of the learning rate.
        label_smoothing: label smoothing of the training loss, but not of validation and test losses.
        text_metrics: corpus metrics, which require a word-based tokenizer.
        beam_size: the number of beams in testing; validation uses greedy decoding.
    """

    network: Seq2SeqNetwork
    datamodule_class = PairDataModule

    def __init__(
        self,
        network: Seq2SeqNetwork,
        tokenizer: Tokenizer,
        max_target_length: int,
        optimizer: OptimizerCallable = AdamW,
        lr_schedule: LRSchedule = LRSchedule(),
        label_smoothing: float = 0.0,
        text_metrics: Sequence[Literal["bleu", "chrf"]] = (),
        beam_size: int = 1,
    ) -> None:
        check_label_smoothing(label_smoothing)
        if beam_size < 1:
            raise UserError(f"beam_size must be at least 1, but is {beam_size}; try 5")
        if text_metrics and not tokenizer.is_word_based:
            raise UserError(
                f"text_metrics must be empty unless the tokenizer is word-based, but is "
                f"{', '.join(text_metrics)}; leave it out"
            )
        if network.hyper_parameters.get("text_only"):
            raise UserError("text_only must be false for a network with targets, since these end with EOS")
        super().__init__(
            network,
            tokenizer,
            optimizer,
            lr_schedule,
            max_target_length=max_target_length,
            label_smoothing=label_smoothing,
            text_metrics=list(text_metrics),
            beam_size=beam_size,
        )
        self.label_smoothing = label_smoothing
        self.text_metrics = tuple(text_metrics)
        self.beam_size = beam_size
        self.scores: dict[str, CorpusScores] = {}

    @classmethod
    def data_settings(cls, data: PairDataModule) -> dict[str, Any]:
        return super().data_settings(data) | {"max_target_length": data.max_target_length}

    def new_metrics(self) -> nn.ModuleDict:
        return SequenceMetrics()

    def setup(self, stage: str) -> None:
        super().setup(stage)
        prefixes = ["val"] if stage in ("fit", "validate") else self.test_prefixes
        if self.text_metrics:
            group = data_group(self.trainer.strategy)
            self.scores = {prefix: CorpusScores(self.text_metrics, group) for prefix in prefixes}

    @property
    def signatures(self) -> dict[str, str]:
        return next(iter(self.scores.values())).signatures if self.scores else {}

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        logits = self.network(batch.source, batch.target_in)
        loss = token_nll(logits, batch.target_out, self.label_smoothing)
        return self.accumulate_loss(loss, (batch.target_out != PAD).sum())

    def _evaluate(self, batch: Batch, prefix: str, dataset: PairDataset, beam_size: int) -> Evaluation:
        metrics = cast(SequenceMetrics, self.metrics[prefix])
        logits = self.network(batch.source, batch.target_in)
        state = self.network.encode(batch.source)
        if beam_size > 1:
            outputs = beam_search(self.network.decode_step, state, self.max_target_length, beam_size)[0][:, 0]
        else:
            outputs = decode(self.network.decode_step, state, self.max_target_length)
        texts = [self.tokenizer.decode(ids) for ids in outputs.tolist()]
        pairs = [dataset.pairs[row] for row in batch.rows.tolist()]
        references = [pair.target for pair in pairs]  # the original text, which decoding may not restore
        exact = [text == reference for text, reference in zip(texts, references, strict=True)]
        symbols = ([self.tokenizer.split_scored(text) for text in side] for side in (texts, references))
        metrics.count(batch, logits, torch.tensor(exact, device=self.device), *symbols)
        if self.text_metrics:
            self.scores[prefix].count(texts, references)
        self.log_dict(
            {f"{prefix}/{name}": metric for name, metric in cast(Mapping[str, Metric], metrics).items()},
            add_dataloader_idx=False,
            batch_size=batch.source.size(0),
        )
        nlls = sequence_nll(logits, batch.target_out).tolist()
        return {"predictions": [make_prediction(*values) for values in zip(pairs, texts, nlls, strict=True)]}

    def _log_scores(self) -> None:
        for prefix, scores in self.scores.items():
            for name, value in scores.compute().items():
                score = torch.tensor(value, device=self.device)
                self.log(f"{prefix}/{name}", score, sync_dist=True, higher_is_better=True)

    def validation_step(self, batch: Batch, batch_idx: int) -> Evaluation:
        return self._evaluate(batch, "val", self.trainer.val_dataloaders.dataset, beam_size=1)

    def on_validation_epoch_end(self) -> None:
        super().on_validation_epoch_end()
        self._log_scores()

    def test_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> Evaluation:
        prefix = self.test_prefixes[dataloader_idx]
        return self._evaluate(batch, prefix, self.trainer.test_dataloaders[dataloader_idx].dataset, self.beam_size)

    def on_test_epoch_end(self) -> None:
        self._log_scores()

    def aligned_attention(self, dataset: PairDataset, batch: Batch) -> tuple[dict[str, Tensor], Tensor] | None:
        if not dataset.pairs.are_aligned:  # of the whole split, since all processes must agree
            return None
        with attention_maps(self.network) as maps:
            self.network(batch.source, batch.target_in)
        gold = gold_links([dataset.pairs[row] for row in batch.rows.tolist()], batch)
        return self.network.source_attention(maps, batch.source), gold
