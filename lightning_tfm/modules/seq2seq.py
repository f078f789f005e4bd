"""Sequence to sequence: what is learned, and how it is measured."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_tfm.data import Batch, PairDataModule, PairDataset
from lightning_tfm.decoding import beam_search, decode
from lightning_tfm.errors import UserError
from lightning_tfm.metrics import SentenceScores, SequenceMetrics, sequence_nll, token_nll
from lightning_tfm.modules.optimization import Optimization
from lightning_tfm.modules.task import Evaluation, TaskModule, check_label_smoothing, line_of, test_prefix
from lightning_tfm.networks import Seq2SeqNetwork
from lightning_tfm.tokenizer import PAD, Tokenizer


class Seq2SeqModule(TaskModule):
    """Trains a network to answer a source with its target, and tests it by decoding.

    Exact match is the share of answers whose text is the target's, as the data have it: those that are `right` in
    predictions.jsonl.

    Args:
        network: any of lightning_tfm.networks.
        tokenizer: the data's vocabulary.
        max_target_length: where decoding stops, in tokens, EOS included.
        optimization: optimizer and schedule.
        label_smoothing: of the training loss; validation and test losses have none.
        bleu: whether to score the answers by BLEU and chrF as well, which makes sense for sentences.
        beam_size: of the search that is tested; validation is greedy.
    """

    task = "seq2seq"
    fits = PairDataModule
    because = "which answers a source"

    def __init__(
        self,
        network: Seq2SeqNetwork,
        tokenizer: Tokenizer,
        max_target_length: int,
        optimization: Optimization = Optimization(),
        label_smoothing: float = 0.0,
        bleu: bool = False,
        beam_size: int = 1,
    ) -> None:
        check_label_smoothing(label_smoothing)
        if beam_size < 1:
            raise UserError(f"beam_size must be at least 1, but is {beam_size}; try 5")
        if bleu and not tokenizer.writes_sentences:
            raise UserError("bleu must be false where symbols are characters, but is true; it scores words")
        if network.hyper_parameters.get("text_only"):
            raise UserError("text_only must be false for a network that answers a source, whose answers end with EOS")
        super().__init__(
            network,
            optimization,
            tokenizer=tokenizer.to_dict(),
            max_target_length=max_target_length,
            label_smoothing=label_smoothing,
            bleu=bleu,
            beam_size=beam_size,
        )
        self.tokenizer = tokenizer
        self.max_target_length = max_target_length
        self.label_smoothing = label_smoothing
        self.bleu = bleu
        self.beam_size = beam_size
        self.metrics = nn.ModuleDict()
        self.scores: dict[str, SentenceScores] = {}

    def setup(self, stage: str) -> None:
        super().setup(stage)
        prefixes = ["val"] if stage in ("fit", "validate") else [test_prefix(name) for name in self._test_sets()]
        for prefix in prefixes:
            if prefix not in self.metrics:
                self.metrics[prefix] = SequenceMetrics()
        self.scores = {prefix: SentenceScores() for prefix in prefixes} if self.bleu else {}

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        logits = self.network(batch.source, batch.target_in)
        loss = token_nll(logits, batch.target_out, self.label_smoothing)
        return self.summed(loss, (batch.target_out != PAD).sum())

    def _evaluate(self, batch: Batch, prefix: str, loader: DataLoader, batch_idx: int, beam_size: int) -> Evaluation:
        """`answers` (B, T'), each ended by EOS, and `nll` (B), of the right answer, in nats."""
        metrics = self.metrics[prefix]
        logits = self.network(batch.source, batch.target_in)
        state = self.network.encode(batch.source)
        if beam_size > 1:
            answers, _ = beam_search(self.network.decode_step, state, self.max_target_length, beam_size)
        else:
            answers = decode(self.network.decode_step, state, self.max_target_length)
        texts = [self.tokenizer.decode(ids) for ids in answers.tolist()]
        rows = loader.sampler.batches[batch_idx].tolist()
        references = [loader.dataset.pairs[row].target for row in rows]  # as they are, not as they are encoded
        exact = [text == reference for text, reference in zip(texts, references, strict=True)]
        metrics.count(batch, logits, torch.tensor(exact, device=self.device))
        if self.bleu:
            self.scores[prefix].count(texts, references)
        self.log_dict(
            {f"{prefix}/{name}": metric for name, metric in metrics.items()},
            add_dataloader_idx=False,
            batch_size=batch.source.size(0),
        )
        return {"answers": answers, "nll": sequence_nll(logits, batch.target_out)}

    def _log_scores(self) -> None:
        for prefix, scores in self.scores.items():
            for name, value in scores.compute().items():
                self.log(f"{prefix}/{name}", torch.tensor(value, device=self.device), sync_dist=True)

    def validation_step(self, batch: Batch, batch_idx: int) -> Evaluation:
        return self._evaluate(batch, "val", self.trainer.val_dataloaders, batch_idx, beam_size=1)

    def on_validation_epoch_end(self) -> None:
        self._log_scores()

    def test_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> Evaluation:
        prefix, loader = test_prefix(self._test_sets()[dataloader_idx]), self.trainer.test_dataloaders[dataloader_idx]
        return self._evaluate(batch, prefix, loader, batch_idx, self.beam_size)

    def on_test_epoch_end(self) -> None:
        self._log_scores()

    def answered(
        self, examples: PairDataset, rows: list[int], outputs: Evaluation, places: Tensor | slice
    ) -> list[dict[str, Any]]:
        lines = []
        answers, nlls = outputs["answers"].cpu()[places].tolist(), outputs["nll"].cpu()[places].tolist()
        for row, ids, nll in zip(rows, answers, nlls, strict=True):
            lines.append(line_of(examples.pairs[row], self.tokenizer.decode(ids), nll))
        return lines

    def _test_sets(self) -> tuple[str, ...]:
        return self.trainer.datamodule.test_sets if self.trainer.datamodule else ("test",)
