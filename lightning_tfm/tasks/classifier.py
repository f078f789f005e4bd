"""Text classification."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from lightning_tfm.data import LabeledBatch, LabeledDataModule, LabeledDataset
from lightning_tfm.errors import UserError
from lightning_tfm.inference import ClassifierPredictor, Prediction, make_prediction
from lightning_tfm.layers import at_least_float32
from lightning_tfm.networks import EncoderClassifier
from lightning_tfm.optimizers import AdamW, LRSchedule
from lightning_tfm.tasks.base import TaskModule
from lightning_tfm.tasks.checks import check_label_smoothing
from lightning_tfm.tasks.metrics import Loss
from lightning_tfm.tokenization import Tokenizer

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Classifier(TaskModule, ClassifierPredictor):
    """Module that trains a network to classify texts.

    Logs the mean `loss` per text, the `accuracy`, and the `f1` score averaged over classes.

    Args:
        network: the network.
        tokenizer: the tokenizer of the data.
        labels: the names of the classes.
        optimizer: a function from parameter groups to an optimizer, such as an optimizer class.
        lr_schedule: the schedule of the learning rate.
        label_smoothing: label smoothing of the training loss.
    """

    network: EncoderClassifier
    datamodule_class = LabeledDataModule

    def __init__(
        self,
        network: EncoderClassifier,
        tokenizer: Tokenizer,
        labels: Sequence[str],
        optimizer: OptimizerCallable = AdamW,
        lr_schedule: LRSchedule = LRSchedule(),
        label_smoothing: float = 0.0,
    ) -> None:
        check_label_smoothing(label_smoothing)
        for name in ("word_dropout", "num_bigram_buckets"):
            if (value := network.hyper_parameters[name]) and tokenizer.unknown_id is None:
                raise UserError(
                    f"{name} must not be set for subwords, which have no unknown token, but is {value}; "
                    "set data.init_args.tokenizer to word"
                )
        super().__init__(
            network,
            tokenizer,
            optimizer,
            lr_schedule,
            labels=list(labels),
            label_smoothing=label_smoothing,
        )
        self.label_smoothing = label_smoothing

    @classmethod
    def data_settings(cls, data: LabeledDataModule) -> dict[str, Any]:
        return super().data_settings(data) | {"labels": data.labels}

    def on_train_start(self) -> None:
        super().on_train_start()
        if self.network.naive_bayes is not None:
            dataset: LabeledDataset = self.trainer.datamodule.datasets["train"]
            batches = (dataset[rows] for rows in torch.arange(len(dataset)).split(256))
            self.network.naive_bayes.fit((batch.text, batch.label) for batch in batches)

    def loss(self, batch: LabeledBatch) -> tuple[Tensor, int]:
        logits = at_least_float32(self.network(batch.text))
        loss = F.cross_entropy(logits, batch.label, label_smoothing=self.label_smoothing, reduction="sum")
        return loss, len(batch.label)

    def new_metrics(self) -> dict[str, Metric]:
        return {
            "loss": Loss(),
            "accuracy": MulticlassAccuracy(len(self.labels), average="micro"),
            "f1": MulticlassF1Score(len(self.labels), average="macro"),
        }

    def evaluate(self, batch: LabeledBatch, dataset: LabeledDataset, metrics: Mapping[str, Metric]) -> list[Prediction]:
        logits = at_least_float32(self.network(batch.text))
        nlls = F.cross_entropy(logits, batch.label, reduction="none")  # (B)
        metrics["loss"].update(nlls.sum(), len(nlls))
        metrics["accuracy"].update(logits, batch.label)
        metrics["f1"].update(logits, batch.label)
        predictions = []
        best = zip(*(values.tolist() for values in logits.softmax(-1).max(1)), strict=True)
        for row, (probability, label), nll in zip(batch.rows.tolist(), best, nlls.tolist(), strict=True):
            prediction = make_prediction(dataset.pairs[row], self.labels[label], nll)
            prediction["probability"] = round(probability, 4)
            predictions.append(prediction)
        return predictions

    def figures(self, predictions: list[Prediction]) -> dict[str, Figure]:
        """Return `confusion`, the number of texts of each class that were predicted as each class."""
        from lightning_tfm.plots.pictures import draw_confusion  # slow to import

        counts = Counter((prediction["target"], prediction["prediction"]) for prediction in predictions)
        return {"confusion": draw_confusion(self.labels, counts)}
