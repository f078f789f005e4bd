"""Sequence-to-sequence learning."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Literal, cast

from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor
from torchmetrics import Metric

from lightning_tfm.data import Batch, PairDataModule, PairDataset
from lightning_tfm.errors import UserError
from lightning_tfm.inference import Prediction, Seq2SeqPredictor, make_prediction
from lightning_tfm.inference.decoding import beam_search, decode
from lightning_tfm.inference.voting import check_vote, vote
from lightning_tfm.layers import attention_maps
from lightning_tfm.layers.losses import sequence_nll, token_nll
from lightning_tfm.networks import Ensemble, Seq2SeqNetwork
from lightning_tfm.networks.network import State
from lightning_tfm.optimizers import AdamW, LRSchedule
from lightning_tfm.tasks.alignment import AlignmentScores, gold_links
from lightning_tfm.tasks.base import TaskModule
from lightning_tfm.tasks.checks import check_label_smoothing
from lightning_tfm.tasks.metrics import Accuracy, CorpusScores, ErrorRate, TokenAccuracy, TokenLoss, WordErrorRate
from lightning_tfm.tokenization import PAD, Tokenizer, edit_distances


class Seq2SeqModule(TaskModule, Seq2SeqPredictor):
    """Module that trains a network to map a source to its target, and evaluates it by decoding.

    Logs `loss`, `perplexity`, `token_accuracy`, `exact_match` (the fraction of outputs equal to the target), `ser` and
    the `text_metrics`; at a validation with a gold alignment, also the scores of each head that attends to the source,
    see `AlignmentScores`. predictions.jsonl records which outputs are correct.

    The symbol error rate `ser` is the sum of the edit distances of the outputs to their references, divided by the
    number of symbols of the references, without EOS: 0 is perfect, and there is no maximum. The symbols are those of
    the tokenizer, such as characters or words, but characters if its tokens are subwords.

    The word error rate `wer` is that of pronunciation and inflection, where each target is one word: the percentage of
    outputs that differ from their target. The word error rate of speech recognition, which counts the words within a
    target, is `ser` with words as symbols.

    Args:
        network: the network.
        tokenizer: the tokenizer of the data.
        max_target_length: maximum number of tokens in an output, including EOS.
        optimizer: a function from parameter groups to an optimizer, such as an optimizer class.
        lr_schedule: the schedule of the learning rate.
        label_smoothing: label smoothing of the training loss, but not of validation and test losses.
        text_metrics: further metrics: "bleu" and "chrf", which require a word-based tokenizer, and "wer".
        beam_size: the number of beams in testing; validation uses greedy decoding.
        vote: whether the members of an `Ensemble` vote in testing, see `lightning_tfm.inference.voting.vote`.
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
        text_metrics: Sequence[Literal["bleu", "chrf", "wer"]] = (),
        beam_size: int = 1,
        vote: bool = False,
    ) -> None:
        check_label_smoothing(label_smoothing)
        if beam_size < 1:
            raise UserError(f"beam_size must be at least 1, but is {beam_size}; try 5")
        corpus_scores = [name for name in text_metrics if name != "wer"]
        if corpus_scores and not tokenizer.is_word_based:
            raise UserError(
                f"text_metrics must be empty or wer unless the tokenizer is word-based, but is "
                f"{', '.join(text_metrics)}; leave out {' and '.join(corpus_scores)}"
            )
        if vote:
            check_vote(network)
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
            vote=vote,
        )
        self.label_smoothing = label_smoothing
        self.text_metrics = tuple(text_metrics)
        self.corpus_scores = tuple(corpus_scores)
        self.beam_size = beam_size
        self.vote = vote

    @classmethod
    def data_settings(cls, data: PairDataModule) -> dict[str, Any]:
        return super().data_settings(data) | {"max_target_length": data.max_target_length}

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        logits = self.network(batch.source, batch.target_in)
        return token_nll(logits, batch.target_out, self.label_smoothing), batch.tokens

    def new_metrics(self) -> dict[str, Metric]:
        metrics: dict[str, Metric] = {
            "loss": TokenLoss(),
            "token_accuracy": TokenAccuracy(),
            "exact_match": Accuracy(),
            "ser": ErrorRate(),
            "alignment": AlignmentScores(),
        }
        if "wer" in self.text_metrics:
            metrics["wer"] = WordErrorRate()
        return metrics | ({"text": CorpusScores(self.corpus_scores)} if self.corpus_scores else {})

    def evaluate(self, batch: Batch, dataset: PairDataset, metrics: Mapping[str, Metric]) -> list[Prediction]:
        pairs = [dataset.pairs[row] for row in batch.rows.tolist()]
        # Of the whole split, so that all processes agree.
        scores_alignment = dataset.pairs.are_aligned and not self.trainer.testing
        state = self.network.encode(batch.source)
        with attention_maps(self.network) if scores_alignment else nullcontext() as maps:
            logits = self.network.logits(batch.source, batch.target_in, state)
        if maps and (weights := self.network.source_attention(maps, batch.source)):  # there may be no attention
            metrics["alignment"].update(weights, gold_links(pairs, batch), batch)
        nlls = sequence_nll(logits, batch.target_out)  # (B)
        right = (logits.argmax(-1) == batch.target_out) & (batch.target_out != PAD)
        metrics["loss"].update(nlls.sum(), batch.tokens)
        metrics["token_accuracy"].update(right.sum(), batch.tokens)

        decoded = [self.tokenizer.decode(ids) for ids in self._decode(state).tolist()]
        outputs = [self.copy_unknown(pair.source, text) for pair, text in zip(pairs, decoded, strict=True)]
        targets = [pair.target for pair in pairs]  # the original text, which decoding may not restore
        number = sum(map(str.__eq__, outputs, targets))
        metrics["exact_match"].update(number, len(pairs))
        metrics["ser"].update(*self._symbol_errors(outputs, targets))
        if "wer" in self.text_metrics:
            metrics["wer"].update(len(pairs) - number, len(pairs))
        if self.corpus_scores:
            metrics["text"].update(outputs, targets)
        return list(map(make_prediction, pairs, outputs, nlls.tolist()))

    def category_metrics(self, predictions: Sequence[Prediction]) -> dict[str, float]:
        metrics = super().category_metrics(predictions)
        errors, symbols = self._symbol_errors(
            *([line[side] for line in predictions] for side in ("prediction", "target"))
        )
        metrics["ser"] = errors / symbols if symbols else math.nan
        return metrics | ({"wer": 100 * (1 - metrics["exact_match"])} if "wer" in self.text_metrics else {})

    def _symbol_errors(self, outputs: Sequence[str], targets: Sequence[str]) -> tuple[int, int]:
        """Return the number of errors of the outputs, and the number of symbols of the targets."""
        symbols, target_symbols = ([self.tokenizer.split_scored(text) for text in side] for side in (outputs, targets))
        return int(edit_distances(symbols, target_symbols).sum()), sum(map(len, target_symbols))

    def _decode(self, state: State) -> Tensor:
        """Return the outputs (B, T), in testing by a beam search or a vote."""
        if self.trainer.testing and self.vote:
            return vote(cast(Ensemble, self.network), state, self.max_target_length, self.beam_size)[0][:, 0]
        if self.trainer.testing and self.beam_size > 1:
            return beam_search(self.network.decode_step, state, self.max_target_length, self.beam_size)[0][:, 0]
        return decode(self.network.decode_step, state, self.max_target_length)

    def on_validation_epoch_end(self) -> None:
        super().on_validation_epoch_end()
        scores = cast(AlignmentScores, self._metrics("val")["alignment"])
        self.alignment_head = scores.best_head or self.alignment_head
