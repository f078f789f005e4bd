"""Classification: what is learned, and how it is measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from lightning_tfm.data import LabelledBatch, LabelledDataModule, LabelledDataset
from lightning_tfm.errors import UserError
from lightning_tfm.metrics import Mean, at_least_float32
from lightning_tfm.modules.optimization import Optimization
from lightning_tfm.modules.task import Evaluation, TaskModule, check_label_smoothing, line_of
from lightning_tfm.networks import EncoderClassifier
from lightning_tfm.tokenizer import Tokenizer

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Classifier(TaskModule):
    """Trains a network to say which class a text is of.

    Logs the mean `loss` of a text, `accuracy` and the mean `f1` of the classes.

    Args:
        network: an EncoderClassifier.
        tokenizer: the data's vocabulary.
        labels: the names of the classes.
        optimization: optimizer and schedule.
        label_smoothing: of the training loss.
    """

    task = "classification"
    fits = LabelledDataModule
    because = "which says a class, and writes nothing"

    def __init__(
        self,
        network: EncoderClassifier,
        tokenizer: Tokenizer,
        labels: Sequence[str],
        optimization: Optimization = Optimization(),
        label_smoothing: float = 0.0,
    ) -> None:
        check_label_smoothing(label_smoothing)
        for name in ("word_dropout", "num_pairs"):
            if (value := network.hyper_parameters[name]) and tokenizer.unknown_id is None:
                raise UserError(
                    f"{name} must not be given with subwords, none of which stands for what is unknown, but is "
                    f"{value}; let data.init_args.tokens be word"
                )
        super().__init__(
            network,
            optimization,
            tokenizer=tokenizer.to_dict(),
            labels=list(labels),
            label_smoothing=label_smoothing,
        )
        self.tokenizer = tokenizer
        self.labels = list(labels)
        self.label_smoothing = label_smoothing
        self.metrics = nn.ModuleDict()

    def setup(self, stage: str) -> None:
        super().setup(stage)
        for prefix in ("val", "test"):
            if prefix not in self.metrics:
                self.metrics[prefix] = nn.ModuleDict(
                    {
                        "loss": Mean(),
                        "accuracy": MulticlassAccuracy(len(self.labels), average="micro"),
                        "f1": MulticlassF1Score(len(self.labels), average="macro"),
                    }
                )
        if stage == "fit" and self.network.naive_bayes is not None:
            self._count(self.trainer.datamodule.datasets["train"])

    def _count(self, examples: LabelledDataset) -> None:
        """Counts the words of the training data, which is all that a NaiveBayes learns."""
        naive_bayes = self.network.naive_bayes
        for buffer in naive_bayes.buffers():
            buffer.zero_()
        for rows in torch.arange(len(examples)).split(1024):
            batch = examples[rows]
            naive_bayes.count(batch.words, batch.label)

    def training_step(self, batch: LabelledBatch, batch_idx: int) -> Tensor:
        logits = at_least_float32(self.network(batch.text))
        loss = F.cross_entropy(logits, batch.label, label_smoothing=self.label_smoothing, reduction="sum")
        return self.summed(loss, torch.tensor(len(batch.label), device=loss.device))

    def _evaluate(self, batch: LabelledBatch, prefix: str) -> Evaluation:
        """`probabilities` (B, C) of the classes, and `nll` (B) of the right one, in nats."""
        logits = at_least_float32(self.network(batch.text))
        nll = F.cross_entropy(logits, batch.label, reduction="none")
        metrics = self.metrics[prefix]
        metrics["loss"].update(nll.sum(), len(nll))
        for name in ("accuracy", "f1"):
            metrics[name].update(logits, batch.label)
        self.log_dict(
            {f"{prefix}/{name}": metric for name, metric in metrics.items()},
            add_dataloader_idx=False,
            batch_size=len(batch.label),
        )
        return {"probabilities": logits.softmax(-1), "nll": nll}

    def validation_step(self, batch: LabelledBatch, batch_idx: int) -> Evaluation:
        return self._evaluate(batch, "val")

    def test_step(self, batch: LabelledBatch, batch_idx: int, dataloader_idx: int = 0) -> Evaluation:
        return self._evaluate(batch, "test")

    def answered(
        self, examples: LabelledDataset, rows: list[int], outputs: Evaluation, places: Tensor | slice
    ) -> list[dict[str, Any]]:
        lines = []
        probabilities, labels = outputs["probabilities"].cpu()[places].max(1)
        nlls = outputs["nll"].cpu()[places].tolist()
        for row, label, probability, nll in zip(rows, labels.tolist(), probabilities.tolist(), nlls, strict=True):
            line = line_of(examples.pairs[row], self.labels[label], nll)
            lines.append(line | {"probability": round(probability, 4)})
        return lines

    def pictures(self, lines: list[dict[str, Any]]) -> dict[str, Figure]:
        """`confusion`: how many texts of each class were taken for which."""
        from lightning_tfm.pictures import draw_confusion  # takes a while to import

        return {"confusion": draw_confusion(self.labels, Counter((line["target"], line["answer"]) for line in lines))}
