"""Evaluation of a task: the metrics of its validation and test sets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, cast

from lightning import LightningModule
from torch import nn
from torchmetrics import Metric

from lightning_tfm.distributed.parallel import data_group
from lightning_tfm.inference import Prediction
from lightning_tfm.tasks.metrics import CorpusScores

StepOutput = dict[str, list[Prediction] | None]
"""Output of a validation or test step: `{"predictions": ...}` with the prediction for each example of the batch."""


def test_prefix(test_set: str) -> str:
    """Return the prefix of the metrics that a test logs for a test set.

    It is "test" for "test", "test/longer" for "longer", and "val/final" for "val", the only test set of data without a
    test split: the metrics of this last evaluation are not another point of the curves under "val".
    """
    if test_set == "val":
        return "val/final"
    return test_set if test_set == "test" else f"test/{test_set}"


class EvaluationModule(LightningModule, ABC):
    """LightningModule with metrics of its validation and test sets, over all processes.

    Attributes:
        metrics: the metrics by prefix and name.
        higher_is_better: whether higher values of a metric are better, by logged name; of others, it is not known.
        token_metrics: the logged names of the metrics that are not comparable between tokenizers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.metrics = nn.ModuleDict()
        self.higher_is_better: dict[str, bool] = {}
        self.token_metrics: set[str] = set()

    @abstractmethod
    def new_metrics(self) -> dict[str, Metric]:
        """Return new metrics for one validation or test set, by name.

        The attribute `higher_is_better` of a metric says whether higher values are better, and `depends_on_tokenizer`
        whether they are not comparable between tokenizers. A metric may compute a dictionary of values by name; then,
        `higher_is_better` may be a dictionary by the last part of the name.
        """

    @abstractmethod
    def evaluate(self, batch: Any, dataset: Any, metrics: Mapping[str, Metric]) -> list[Prediction] | None:
        """Update the metrics with a batch of a validation or test set.

        Args:
            batch: the batch.
            dataset: the dataset of the batch.
            metrics: the metrics of this dataset, see `new_metrics`.

        Returns:
            The prediction for each example of the batch; None if the task has no predictions.
        """

    @property
    def test_prefixes(self) -> list[str]:
        """Return the prefix of the metrics of each test set."""
        data = self.trainer.datamodule
        return [test_prefix(name) for name in (data.test_sets if data else ("test",))]

    def setup(self, stage: str) -> None:
        """Create the metrics of the sets that are evaluated, or reset them."""
        for prefix in ["val"] if stage in ("fit", "validate") else self.test_prefixes:
            if prefix not in self.metrics:
                self.metrics[prefix] = nn.ModuleDict(self.new_metrics())
            for metric in self._metrics(prefix).values():
                metric.process_group = data_group(self.trainer.strategy)
                metric.reset()

    def validation_step(self, batch: Any, batch_idx: int) -> StepOutput:
        dataset = self.trainer.val_dataloaders.dataset
        return {"predictions": self.evaluate(batch, dataset, self._metrics("val"))}

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> StepOutput:
        dataset = self.trainer.test_dataloaders[dataloader_idx].dataset
        return {"predictions": self.evaluate(batch, dataset, self._metrics(self.test_prefixes[dataloader_idx]))}

    def on_validation_epoch_end(self) -> None:
        self._log_metrics("val")

    def on_test_epoch_end(self) -> None:
        for prefix in self.test_prefixes:
            self._log_metrics(prefix)

    def _metrics(self, prefix: str) -> Mapping[str, Metric]:
        return cast(Mapping[str, Metric], self.metrics[prefix])

    def _log_metrics(self, prefix: str) -> None:
        """Log the values of the metrics that have been updated, and reset them."""
        for metric_name, metric in self._metrics(prefix).items():
            if metric.update_called:
                values, higher_is_better = metric.compute(), cast(Any, metric.higher_is_better)
                for name, value in (values if isinstance(values, dict) else {metric_name: values}).items():
                    direction = higher_is_better
                    if isinstance(direction, dict):
                        direction = direction.get(name.rpartition("/")[2])
                    # Equal on all processes; a mean would be rounded.
                    self.log(f"{prefix}/{name}", value, sync_dist=True, reduce_fx="max", higher_is_better=direction)
                    if getattr(metric, "depends_on_tokenizer", False):
                        self.token_metrics.add(f"{prefix}/{name}")
            metric.reset()

    def log(
        self, name: str, value: Any, *arguments: Any, higher_is_better: bool | None = None, **settings: Any
    ) -> None:
        """Log a value as LightningModule does; `higher_is_better` replaces what a metric of torchmetrics says."""
        if higher_is_better is None:
            higher_is_better = getattr(value, "higher_is_better", None)
        if higher_is_better is not None:
            self.higher_is_better[name] = higher_is_better
        super().log(name, value, *arguments, **settings)

    @property
    def signatures(self) -> dict[str, str]:
        """Return the signatures (settings) of sacrebleu's scores, by name."""
        scores = [metric for metric in self.metrics.modules() if isinstance(metric, CorpusScores)]
        return scores[-1].signatures if scores else {}
