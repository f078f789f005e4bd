"""Sequence to sequence: what is learned, and how it is measured."""

from __future__ import annotations

from torch import Tensor, nn

from lightning_tfm.data import Batch, PairDataModule
from lightning_tfm.decoding import decode
from lightning_tfm.errors import UserError
from lightning_tfm.metrics import SequenceMetrics, sequence_nll, token_nll
from lightning_tfm.modules.optimization import Optimization
from lightning_tfm.modules.task import TaskModule
from lightning_tfm.networks import Seq2SeqNetwork
from lightning_tfm.tokenizer import PAD, SubwordTokenizer, Tokenizer

Evaluation = dict[str, Tensor]
"""What callbacks get of a batch: `answers` (B, T'), each ended by EOS, and `nll` (B), of the right answer, in nats."""


class Seq2SeqModule(TaskModule):
    """Trains a network to answer a source with its target, and tests it by decoding.

    Args:
        network: any of lightning_tfm.networks.
        tokenizer: the data's vocabulary.
        max_target_length: where decoding stops, in tokens, EOS included.
        optimization: optimizer and schedule.
        label_smoothing: of the training loss; validation and test losses have none.
        bleu: whether to score the answers by BLEU as well, which makes sense for sentences.
    """

    task = "seq2seq"
    fits = PairDataModule

    def __init__(
        self,
        network: Seq2SeqNetwork,
        tokenizer: Tokenizer | SubwordTokenizer,
        max_target_length: int,
        optimization: Optimization = Optimization(),
        label_smoothing: float = 0.0,
        bleu: bool = False,
    ) -> None:
        if not 0 <= label_smoothing < 1:
            raise UserError(f"label_smoothing must be at least 0 and below 1, but is {label_smoothing}; try 0.1")
        if bleu and not tokenizer.has_words:
            raise UserError("bleu must be false where symbols are characters, but is true; it scores words")
        super().__init__(
            network,
            optimization,
            tokenizer=tokenizer.to_dict(),
            max_target_length=max_target_length,
            label_smoothing=label_smoothing,
            bleu=bleu,
        )
        self.tokenizer = tokenizer
        self.max_target_length = max_target_length
        self.label_smoothing = label_smoothing
        self.bleu = bleu
        self.metrics = nn.ModuleDict()

    def setup(self, stage: str) -> None:
        prefixes = ["val"] if stage in ("fit", "validate") else [test_prefix(name) for name in self._test_sets()]
        for prefix in prefixes:
            if prefix not in self.metrics:
                self.metrics[prefix] = SequenceMetrics(self.tokenizer, self.bleu)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        logits = self.network(batch.source, batch.target_in)
        loss = token_nll(logits, batch.target_out, self.label_smoothing)
        return self.summed(loss, (batch.target_out != PAD).sum())

    def _evaluate(self, batch: Batch, prefix: str) -> Evaluation:
        metrics = self.metrics[prefix]
        logits = self.network(batch.source, batch.target_in)
        answers = decode(self.network.decode_step, self.network.encode(batch.source), self.max_target_length)
        metrics.count(batch, logits, answers)
        self.log_dict(
            {f"{prefix}/{name}": metric for name, metric in metrics.items()},
            add_dataloader_idx=False,
            batch_size=batch.source.size(0),
        )
        return {"answers": answers, "nll": sequence_nll(logits, batch.target_out)}

    def validation_step(self, batch: Batch, batch_idx: int) -> Evaluation:
        return self._evaluate(batch, "val")

    def test_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> Evaluation:
        return self._evaluate(batch, test_prefix(self._test_sets()[dataloader_idx]))

    def _test_sets(self) -> tuple[str, ...]:
        return self.trainer.datamodule.test_sets if self.trainer.datamodule else ("test",)


def test_prefix(test_set: str) -> str:
    """What the names of a test set's metrics begin with: "test" for the first, "test/longer" for "longer"."""
    return test_set if test_set == "test" else f"test/{test_set}"
